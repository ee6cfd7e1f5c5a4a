//! The scrub: reads all pages at a low rate, to find damage before a reader does.
//!
//! A pass visits the pages in record order. Its reads have the lowest priority and keep to a rate
//! in bytes per second. Its progress survives a restart. A damaged page is dropped and counted as
//! if a reader had found it. The listener of [`L3::on_damage`](crate::L3::on_damage) may write it
//! again from another copy.

use crate::L3Options;
use crate::machine::Entry;
use crate::shared::LogShared;
use larder_format::PageId;
use larder_format::disk::record_bytes;
use larder_io::{Priority, SmallFile};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Maximum bytes of records that one step reads before it pauses for the rate.
const STEP_BYTES: u64 = 1 << 20;
/// Interval at which progress is saved. A crash repeats at most this part of a pass.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes per second of a requested pass, if periodic passes are turned off.
const REQUESTED_RATE: u64 = 32 << 20;
/// Interval at which an idle scrub checks for a request or a due pass.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubProgress {
    pub running: bool,
    /// Passes completed since the log was created.
    pub passes: u64,
    /// Segment epoch and byte offset of the last record that this pass read.
    pub position: Option<(u64, u64)>,
    /// Pages that this pass has read.
    pub pages: u64,
    pub bytes: u64,
    pub damaged: u64,
    /// Pages that this pass could not read, for lack of memory or because the device failed.
    pub skipped: u64,
    /// End of the last complete pass, in milliseconds since 1970. 0 if there was none.
    pub completed_unix_ms: u64,
}

/// Settings and published state of the scrub. Only the scrub task writes the progress. The lock
/// serves callers that read it.
pub(crate) struct ScrubControl {
    progress: Mutex<ScrubProgress>,
    requested: AtomicBool,
    /// 0 turns periodic passes off.
    bytes_per_second: u64,
    interval: Duration,
}

impl ScrubControl {
    pub(crate) fn new(options: &L3Options) -> ScrubControl {
        ScrubControl {
            progress: Mutex::default(),
            requested: AtomicBool::new(false),
            bytes_per_second: options.scrub_bytes_per_second,
            interval: options.scrub_interval,
        }
    }

    pub(crate) fn progress(&self) -> ScrubProgress {
        *self.progress.lock()
    }

    fn publish(&self, progress: ScrubProgress) {
        *self.progress.lock() = progress;
    }

    /// Requests a pass, which starts within [`POLL_INTERVAL`].
    pub(crate) fn request(&self) {
        // Relaxed: the flag orders no other memory access.
        self.requested.store(true, Ordering::Relaxed);
    }

    fn is_pass_due(&self, progress: &ScrubProgress, now_unix_ms: u64) -> bool {
        // Saturating: the wall clock may have been set back.
        let elapsed = now_unix_ms.saturating_sub(progress.completed_unix_ms);
        let is_periodic = self.bytes_per_second > 0 && elapsed >= self.interval.as_millis() as u64;
        is_periodic || self.requested.load(Ordering::Relaxed)
    }

    fn step_duration(&self, bytes: u64) -> Duration {
        let rate = if self.bytes_per_second == 0 { REQUESTED_RATE } else { self.bytes_per_second };
        Duration::from_micros(bytes.saturating_mul(1_000_000) / rate)
    }
}

/// Runs passes until the log is closed. The first one waits for the end of recovery, because the
/// index is incomplete until then.
pub(crate) async fn run_scrub(shared: Arc<LogShared>, control: Arc<ScrubControl>) {
    let mut progress = load_progress(&shared).await;
    control.publish(progress);
    let mut saved = Instant::now();
    while shared.ensure_open().is_ok() {
        let is_recovered = shared.recovery.with(|recovery| recovery.report.is_some());
        let is_due = progress.running || control.is_pass_due(&progress, shared.clock.now_unix_ms());
        if !is_recovered || !is_due {
            shared.device.sleep(POLL_INTERVAL).await;
            continue;
        }
        // A request during a pass has no effect, so every step clears the flag.
        control.requested.store(false, Ordering::Relaxed);
        let began = Instant::now();
        let was_running = progress.running;
        let bytes = scrub_step(&shared, &mut progress).await;
        control.publish(progress);
        if was_running != progress.running || saved.elapsed() >= SAVE_INTERVAL {
            save_progress(&shared, &progress).await;
            saved = Instant::now();
        }
        let left = control.step_duration(bytes).saturating_sub(began.elapsed());
        if left > Duration::ZERO {
            shared.device.sleep(left).await;
        } else {
            // Even without a pause, other tasks of the device get their turn.
            tokio::task::yield_now().await;
        }
    }
}

/// Reads the next pages, and begins or ends a pass. Returns the bytes of the records read, from
/// which the caller derives its pause.
async fn scrub_step(shared: &Arc<LogShared>, progress: &mut ScrubProgress) -> u64 {
    if !progress.running {
        *progress = ScrubProgress {
            running: true,
            passes: progress.passes,
            completed_unix_ms: progress.completed_unix_ms,
            ..ScrubProgress::default()
        };
    }
    let Some(pages) = shared.with_log(|log| log.scrub_next(progress.position, STEP_BYTES)) else {
        progress.running = false;
        progress.position = None;
        progress.passes += 1;
        progress.completed_unix_ms = shared.clock.now_unix_ms();
        let dir = shared.device.path().display();
        tracing::info!(%dir, pages = progress.pages, damaged = progress.damaged, "L3: scrub pass completed");
        return 0;
    };
    let mut bytes = 0;
    for (id, entry) in pages {
        progress.position = Some((entry.place.epoch, entry.place.offset));
        scrub_page(shared, &id, &entry, progress).await;
        bytes += record_bytes(entry.payload_bytes as usize) as u64;
    }
    progress.bytes += bytes;
    bytes
}

async fn scrub_page(shared: &Arc<LogShared>, id: &PageId, entry: &Entry, progress: &mut ScrubProgress) {
    // The page may have been forgotten or replaced since the step began.
    let Some(ticket) = shared.with_log(|log| log.begin_maintenance_read(id, entry.number)) else { return };
    match shared.read_record(ticket, Priority::Idle).await {
        Ok(Some(_)) => progress.pages += 1,
        Ok(None) => {
            progress.pages += 1;
            progress.damaged += 1;
        }
        Err(error) => {
            progress.skipped += 1;
            tracing::debug!(page = ?id, %error, "L3: the scrub skipped a page");
        }
    }
}

/// Loads the progress of the previous process. If that fails, the pass starts again, which costs
/// time only.
async fn load_progress(shared: &LogShared) -> ScrubProgress {
    match shared.device.load(SmallFile::Scrub).await {
        Ok(Some(bytes)) => serde_json::from_slice(&bytes).unwrap_or_default(),
        // A new log has nothing to scrub yet: the first pass is due one interval from now.
        Ok(None) => ScrubProgress { completed_unix_ms: shared.clock.now_unix_ms(), ..ScrubProgress::default() },
        Err(error) => {
            let file = shared.device.path().join(SmallFile::Scrub.name());
            let file = file.display();
            tracing::warn!(%file, %error, "L3: cannot read the progress of the scrub; it starts a new pass");
            ScrubProgress::default()
        }
    }
}

pub(crate) async fn save_progress(shared: &LogShared, progress: &ScrubProgress) {
    let Ok(bytes) = serde_json::to_vec(progress) else { return };
    if let Err(error) = shared.device.save(SmallFile::Scrub, bytes).await {
        let file = shared.device.path().join(SmallFile::Scrub.name());
        let file = file.display();
        tracing::warn!(%file, %error, "L3: cannot save the progress of the scrub; a restart repeats part of the pass");
    }
}
