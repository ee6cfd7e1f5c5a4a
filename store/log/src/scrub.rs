//! The scrub: reads all pages at a low rate, to find damage before a reader does.
//!
//! A pass visits the pages in record order, a segment at a time. Its reads have the lowest priority
//! and keep to a rate in bytes per second, see [`ScrubRate`]. Its progress survives a restart. A
//! damaged page is dropped and counted as if a reader had found it. The listener of
//! [`L3::on_damage`](crate::L3::on_damage) may write it again from another copy.
//!
//! Invariant: the log's lock is held for one segment at most, and nothing is sorted under it.

use crate::L3Options;
use crate::machine::{Entry, RecordRef, ScrubList};
use crate::shared::LogShared;
use larder_format::disk::record_bytes;
use larder_io::{Priority, SmallFile};
use larder_runtime::sync::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Maximum bytes of records that one step reads before it pauses for the rate.
const STEP_BYTES: u64 = 1 << 20;
/// Interval at which progress is saved. A crash repeats at most this part of a pass.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes per second of a pass over a small log, and of a requested pass if periodic passes are
/// turned off. A drive does not notice it, and a small log is verified in minutes.
const RATE_MIN: u64 = 32 << 20;
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

/// Rate of the scrub for the pages that the log has now.
///
/// The rate follows from the bytes of the log and the interval, with a quarter more for restarts
/// and busy times. It is at least 32 MiB/s, and at most [`L3Options::scrub_bytes_per_second`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ScrubRate {
    pub bytes_per_second: u64,
    /// Rate that completes a pass in exactly one interval. 0 if periodic passes are turned off.
    pub needed_bytes_per_second: u64,
    pub interval_seconds: u64,
    /// `true` if the limit does not allow the needed rate, or if the last pass ended more than two
    /// intervals ago: one interval until the next is due, and one for that pass.
    pub is_late: bool,
}

impl ScrubRate {
    fn new(limit: u64, interval: Duration, log_bytes: u64) -> ScrubRate {
        let interval_seconds = interval.as_secs();
        if limit == 0 {
            return ScrubRate {
                bytes_per_second: RATE_MIN,
                needed_bytes_per_second: 0,
                interval_seconds,
                is_late: false,
            };
        }
        // In 128 bits: the product overflows 64.
        let exact = u128::from(log_bytes) * 1000 / interval.as_millis().max(1);
        let needed = u64::try_from(exact).unwrap_or(u64::MAX);
        let wanted = needed.saturating_add(needed / 4).max(RATE_MIN);
        ScrubRate {
            bytes_per_second: wanted.min(limit),
            needed_bytes_per_second: needed,
            interval_seconds,
            is_late: needed > limit,
        }
    }
}

/// Settings and published state of the scrub. Only the scrub task writes the progress. The lock
/// serves callers that read it.
pub(crate) struct ScrubControl {
    progress: Mutex<ScrubProgress>,
    requested: AtomicBool,
    /// Maximum bytes per second. 0 turns periodic passes off.
    rate_limit: u64,
    interval: Duration,
}

impl ScrubControl {
    pub(crate) fn new(options: &L3Options) -> ScrubControl {
        ScrubControl {
            progress: Mutex::default(),
            requested: AtomicBool::new(false),
            rate_limit: options.scrub_bytes_per_second,
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
        let is_periodic = self.rate_limit > 0 && elapsed >= self.interval.as_millis() as u64;
        is_periodic || self.requested.load(Ordering::Relaxed)
    }

    /// Rate for a log with `log_bytes` of records.
    pub(crate) fn rate(&self, log_bytes: u64, now_unix_ms: u64) -> ScrubRate {
        let rate = ScrubRate::new(self.rate_limit, self.interval, log_bytes);
        let completed = self.progress().completed_unix_ms;
        // Saturating: the wall clock may have been set back.
        let elapsed = u128::from(now_unix_ms.saturating_sub(completed));
        // 0: the time of the last pass is unknown.
        let is_overdue = self.rate_limit > 0 && completed > 0 && elapsed > 2 * self.interval.as_millis();
        ScrubRate { is_late: rate.is_late || is_overdue, ..rate }
    }
}

fn warn_if_late(shared: &LogShared, rate: &ScrubRate) {
    if !rate.is_late {
        return;
    }
    tracing::warn!(
        dir = %shared.device.path().display(),
        bytes_per_second = rate.bytes_per_second,
        needed_bytes_per_second = rate.needed_bytes_per_second,
        interval_seconds = rate.interval_seconds,
        "L3: the scrub cannot verify the log once per interval; raise --l3-scrub-rate, or check the load of the device \
         [LRD0207]"
    );
}

/// Runs passes until the log is closed. The first one waits for the end of recovery, because the
/// index is incomplete until then.
pub(crate) async fn run_scrub(shared: Arc<LogShared>, control: Arc<ScrubControl>) {
    let mut progress = load_progress(&shared).await;
    control.publish(progress);
    let mut saved = Instant::now();
    let mut list = None;
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
        let rate = control.rate(shared.with_log(|log| log.counts().page_bytes), shared.clock.now_unix_ms());
        if !was_running {
            warn_if_late(&shared, &rate);
        }
        let bytes = scrub_step(&shared, &mut progress, &mut list).await;
        control.publish(progress);
        if was_running != progress.running || saved.elapsed() >= SAVE_INTERVAL {
            save_progress(&shared, &progress).await;
            saved = Instant::now();
        }
        let step = Duration::from_micros(bytes.saturating_mul(1_000_000) / rate.bytes_per_second);
        // Saturating: a slow device may take longer than the step.
        let left = step.saturating_sub(began.elapsed());
        if left > Duration::ZERO {
            shared.device.sleep(left).await;
        } else {
            // Even without a pause, other tasks of the device get their turn.
            tokio::task::yield_now().await;
        }
    }
}

/// Reads the next pages, or lists those of the next segment, and begins or ends a pass. Returns the
/// bytes of the records read, from which the caller derives its pause.
async fn scrub_step(shared: &Arc<LogShared>, progress: &mut ScrubProgress, list: &mut Option<ScrubList>) -> u64 {
    if !progress.running {
        *progress = ScrubProgress {
            running: true,
            passes: progress.passes,
            completed_unix_ms: progress.completed_unix_ms,
            ..ScrubProgress::default()
        };
    }
    let Some(current) = list else {
        let Some(mut listed) = shared.with_log(|log| log.scrub_list(progress.position)) else {
            end_pass(shared, progress);
            return 0;
        };
        // Without the lock: a segment may have 100,000 pages.
        listed.sort(shared.entries());
        // A list of an open segment is taken again until nothing was added.
        match listed.is_empty() {
            true => progress.position = Some(listed.next_segment()),
            false => *list = Some(listed),
        }
        return 0;
    };
    let pages = shared.with_log(|log| log.scrub_next(current, STEP_BYTES));
    if pages.is_empty() {
        *list = None;
    }
    let mut bytes = 0;
    for (record, entry) in pages {
        progress.position = Some((entry.place.epoch, entry.place.offset));
        scrub_page(shared, record, &entry, progress).await;
        bytes += record_bytes(entry.payload_bytes as usize) as u64;
    }
    progress.bytes += bytes;
    bytes
}

fn end_pass(shared: &LogShared, progress: &mut ScrubProgress) {
    progress.running = false;
    progress.position = None;
    progress.passes += 1;
    progress.completed_unix_ms = shared.clock.now_unix_ms();
    let dir = shared.device.path().display();
    tracing::info!(%dir, pages = progress.pages, damaged = progress.damaged, "L3: scrub pass completed");
}

async fn scrub_page(shared: &Arc<LogShared>, record: RecordRef, entry: &Entry, progress: &mut ScrubProgress) {
    // The page may have been forgotten or replaced since the step began.
    let Some(ticket) = shared.entries().begin_maintenance_read(record) else { return };
    match shared.read_record(ticket, Priority::Idle).await {
        Ok(Some(_)) => progress.pages += 1,
        Ok(None) => {
            progress.pages += 1;
            progress.damaged += 1;
        }
        Err(error) => {
            progress.skipped += 1;
            tracing::debug!(place = ?entry.place, %error, "L3: the scrub skipped a page");
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

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);
    const TIB: u64 = 1 << 40;

    #[test]
    fn rate_follows_the_bytes_of_the_log_up_to_the_limit() {
        let rate = |limit, bytes| ScrubRate::new(limit, DAY, bytes);
        let large = rate(256 << 20, 4 * TIB);
        assert!(large.bytes_per_second * DAY.as_secs() > 4 * TIB && !large.is_late, "{large:?}");
        assert!(large.bytes_per_second < 64 << 20, "not faster than the interval asks for: {large:?}");
        let small = rate(256 << 20, 1 << 30);
        assert_eq!((small.bytes_per_second, small.is_late), (RATE_MIN, false));
        let limited = rate(32 << 20, 4 * TIB);
        assert_eq!((limited.bytes_per_second, limited.is_late), (32 << 20, true), "the limit holds, and is reported");
        let off = rate(0, 4 * TIB);
        assert_eq!((off.bytes_per_second, off.needed_bytes_per_second, off.is_late), (RATE_MIN, 0, false));
        assert!(ScrubRate::new(1, Duration::ZERO, u64::MAX).is_late, "no overflow");
    }

    #[test]
    fn scrub_is_late_two_intervals_after_the_last_pass() {
        let options = L3Options { scrub_interval: DAY, ..L3Options::new("x", TIB) };
        let control = ScrubControl::new(&options);
        let day_ms = DAY.as_millis() as u64;
        assert!(!control.rate(0, 100 * day_ms).is_late, "no pass is known");
        control.publish(ScrubProgress { completed_unix_ms: 10 * day_ms, ..ScrubProgress::default() });
        assert!(!control.rate(0, 12 * day_ms).is_late && !control.rate(0, 9 * day_ms).is_late);
        assert!(control.rate(0, 12 * day_ms + 1).is_late);
    }
}
