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
    let mut place = 0;
    loop {
        let (page, next) = tiers.next_from(place);
        let mut pause = Duration::ZERO;
        if let Some(page) = page {
            let bytes = page.payload.len() as u64;
            let id = page.id();
            // The scrub must not keep the memory of a page that leaves.
            drop(page);
            progress.verified(bytes, tiers.recheck(&id) as u64);
            tiers.metrics().bytes_scrubbed_l2.inc_by(bytes);
            // The pause after each page keeps the average rate. One page is the largest burst.
            pause = Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64);
        }
        place = next.unwrap_or_else(|| {
            progress.pass_ended();
            pause += PASS_PAUSE;
            0
        });
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}
