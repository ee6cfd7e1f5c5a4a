//! The scrub of L2: a slow, endless pass that verifies pages in DRAM before a reader meets damage.

use crate::tiers::Tiers;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Pause between two passes, so that an empty L2 does not make the scrub spin.
const PASS_PAUSE: Duration = Duration::from_secs(1);

/// Progress of the scrub. The counters are independent, so relaxed ordering is enough.
#[derive(Debug, Default)]
pub(crate) struct ScrubProgress {
    passes: AtomicU64,
    pass_pages: AtomicU64,
    pass_bytes: AtomicU64,
    dropped: AtomicU64,
}

impl ScrubProgress {
    fn verified(&self, bytes: u64, dropped: u64) {
        self.pass_pages.fetch_add(1, Ordering::Relaxed);
        self.pass_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
    }

    fn pass_ended(&self) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.pass_pages.store(0, Ordering::Relaxed);
        self.pass_bytes.store(0, Ordering::Relaxed);
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "passes": value(&self.passes),
            "pass_pages": value(&self.pass_pages),
            "pass_bytes": value(&self.pass_bytes),
            "pages_dropped": value(&self.dropped),
        })
    }
}

/// Verifies L2 at `bytes_per_second` until `stop` is cancelled. Zero disables the scrub.
pub(crate) async fn run(tiers: &Tiers, progress: &ScrubProgress, bytes_per_second: u64, stop: CancellationToken) {
    if bytes_per_second == 0 {
        return;
    }
    let mut cursor = None;
    loop {
        let pause = match tiers.next_after(cursor.as_ref()) {
            Some(id) => {
                cursor = Some(id);
                let bytes = tiers.get_l2(&id).map_or(0, |page| page.payload.len() as u64);
                progress.verified(bytes, tiers.recheck(&id) as u64);
                tiers.metrics().bytes_scrubbed_l2.inc_by(bytes);
                // The pause after each page keeps the average rate. One page is the largest burst.
                Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64)
            }
            None => {
                cursor = None;
                progress.pass_ended();
                PASS_PAUSE
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}
