//! Reading everything again, slowly, before somebody needs it.
//!
//! A pass goes through the pages in the order of their records. It keeps to a rate in bytes per second, its reads stand
//! behind all others, and how far it is survives a restart. What it finds damaged is dropped and counted like what a reader
//! finds, and the listener of [`L3::on_damage`](crate::L3::on_damage) may put it again from a copy.

use crate::shared::Shared;
use larder_core::log::Entry;
use larder_device::{Lane, SmallFile};
use larder_format::PageId;
use larder_format::disk::record_bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Most bytes of pages that are taken on at once.
const STEP_BYTES: u64 = 1 << 20;
/// Progress is saved this often.
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// Bytes per second of a pass that was asked for, where none goes by itself.
const RATE_WHEN_ASKED: u64 = 32 << 20;
/// How often a scrub that waits looks whether it should go on.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How far the scrub is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubProgress {
    /// A pass is under way.
    pub running: bool,
    /// Passes completed since the log was made.
    pub passes: u64,
    /// Life and byte offset of the record that this pass looked at last.
    pub position: Option<(u64, u64)>,
    /// Pages looked at in this pass.
    pub pages: u64,
    /// Bytes of their records.
    pub bytes: u64,
    /// Pages of this pass that were damaged and dropped.
    pub damaged: u64,
    /// Pages that could not be read into memory, as there was no room.
    pub skipped: u64,
    /// When the last complete pass ended, in milliseconds since 1970; 0 if none did.
    pub completed_unix_ms: u64,
}

/// Scrubs until the device is closed.
pub(crate) async fn scrub(shared: Arc<Shared>) {
    let mut progress = load(&shared).await;
    *shared.scrub.lock() = progress;
    let mut saved = Instant::now();
    while shared.open().is_ok() {
        let recovered = shared.progress.look(|progress| progress.report.is_some());
        if !recovered || !progress.running && !due(&shared, &progress) {
            shared.device.sleep(LOOK_EVERY).await;
            continue;
        }
        shared.scrub_wanted.store(false, std::sync::atomic::Ordering::Relaxed);
        let began = Instant::now();
        let was_running = progress.running;
        let step = step(&shared, &mut progress).await;
        *shared.scrub.lock() = progress;
        if was_running != progress.running || saved.elapsed() >= SAVE_EVERY {
            save(&shared, &progress).await;
            saved = Instant::now();
        }
        pause(&shared, step, began).await;
    }
}

/// Bytes looked at.
async fn step(shared: &Arc<Shared>, progress: &mut ScrubProgress) -> u64 {
    if !progress.running {
        *progress = ScrubProgress {
            running: true,
            passes: progress.passes,
            completed_unix_ms: progress.completed_unix_ms,
            ..ScrubProgress::default()
        };
    }
    let Some(pages) = shared.look(|log| log.scrub_next(progress.position, STEP_BYTES)) else {
        progress.running = false;
        progress.position = None;
        progress.passes += 1;
        progress.completed_unix_ms = shared.clock.now_unix_ms();
        tracing::info!(pages = progress.pages, damaged = progress.damaged, "scrub: pass completed");
        return 0;
    };
    let mut bytes = 0;
    for (id, entry) in pages {
        progress.position = Some((entry.place.life, entry.place.offset));
        check(shared, &id, &entry, progress).await;
        bytes += record_bytes(entry.payload_bytes as usize) as u64;
    }
    progress.bytes += bytes;
    bytes
}

async fn check(shared: &Arc<Shared>, id: &PageId, entry: &Entry, progress: &mut ScrubProgress) {
    let Some(ticket) = shared.change(|log| log.hold(id, entry.number)) else { return };
    match shared.read_record(ticket, Lane::Idle).await {
        Ok(Some(_)) => progress.pages += 1,
        Ok(None) => {
            progress.pages += 1;
            progress.damaged += 1;
        }
        Err(error) => {
            progress.skipped += 1;
            tracing::debug!(%error, "scrub: page not looked at");
        }
    }
}

/// Keeps to the rate.
async fn pause(shared: &Shared, bytes: u64, began: Instant) {
    let rate = match shared.scrub_bytes_per_second {
        0 => RATE_WHEN_ASKED,
        rate => rate,
    };
    let due = Duration::from_micros(bytes.saturating_mul(1_000_000) / rate);
    let left = due.saturating_sub(began.elapsed());
    if left > Duration::ZERO {
        shared.device.sleep(left).await;
    } else {
        tokio::task::yield_now().await;
    }
}

fn due(shared: &Shared, progress: &ScrubProgress) -> bool {
    let wanted = shared.scrub_wanted.load(std::sync::atomic::Ordering::Relaxed);
    let since = shared.clock.now_unix_ms().saturating_sub(progress.completed_unix_ms);
    wanted || shared.scrub_bytes_per_second > 0 && since >= shared.scrub_interval.as_millis() as u64
}

/// What cannot be read is begun anew: nothing but time is lost.
async fn load(shared: &Shared) -> ScrubProgress {
    match shared.device.load(SmallFile::Scrub).await {
        Ok(Some(bytes)) => serde_json::from_slice(&bytes).unwrap_or_default(),
        Ok(None) => ScrubProgress { completed_unix_ms: shared.clock.now_unix_ms(), ..ScrubProgress::default() },
        Err(error) => {
            tracing::warn!(%error, "scrub: progress cannot be read");
            ScrubProgress::default()
        }
    }
}

pub(crate) async fn save(shared: &Shared, progress: &ScrubProgress) {
    let Ok(bytes) = serde_json::to_vec(progress) else { return };
    if let Err(error) = shared.device.save(SmallFile::Scrub, bytes).await {
        tracing::warn!(%error, "scrub: progress cannot be saved");
    }
}
