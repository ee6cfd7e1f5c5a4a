//! A slow pass over L2, again and again, that finds pages whose bytes changed in memory before a reader does.

use crate::tiers::Tiers;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Least time between two passes.
const PASS_PAUSE: Duration = Duration::from_secs(1);

/// How far the passes got.
#[derive(Debug, Default)]
pub(crate) struct Scrubbed {
    passes: AtomicU64,
    pass_pages: AtomicU64,
    pass_bytes: AtomicU64,
    dropped: AtomicU64,
}

impl Scrubbed {
    fn page(&self, bytes: u64, dropped: u64) {
        self.pass_pages.fetch_add(1, Ordering::Relaxed);
        self.pass_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
    }

    fn pass_ended(&self) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.pass_pages.store(0, Ordering::Relaxed);
        self.pass_bytes.store(0, Ordering::Relaxed);
    }

    /// State for people and scripts.
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

/// Verifies L2 at `bytes_per_second` until `stop`; 0 means not at all.
pub(crate) async fn run(tiers: Arc<Tiers>, bytes_per_second: u64, stop: CancellationToken) {
    if bytes_per_second == 0 {
        return;
    }
    let mut cursor = None;
    loop {
        let pause = match tiers.next_after(cursor.as_ref()) {
            Some(id) => {
                cursor = Some(id);
                let bytes = tiers.get_l2(&id).map_or(0, |page| page.payload.len() as u64);
                tiers.scrubbed.page(bytes, tiers.recheck(&id) as u64);
                tiers.metrics().scrub_bytes.inc_by(bytes);
                Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64)
            }
            None => {
                cursor = None;
                tiers.scrubbed.pass_ended();
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
