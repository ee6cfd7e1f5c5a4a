//! Background verification of the pages cached in L1.
//!
//! Invariants:
//! - The scheduler thread hands out references only. Checksums are computed on a blocking thread.
//! - The scrub reads at most [`SCRUB_BYTES_PER_SECOND`], however fast the machine is.
//! - A reference of the scrub keeps no page from eviction.

use crate::metrics::Metrics;
use crate::scheduler::SchedulerEvent;
use larder_format::PageKey;
use larder_model::SealedPage;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Rate of the scrub: 64 MiB/s. It visits an L1 of 32 GiB in nine minutes and costs about 1 % of a
/// processor core, because a core computes CRC-32 at 5 GB/s or more.
pub(crate) const SCRUB_BYTES_PER_SECOND: usize = 64 << 20;
/// Pause between two batches. Long enough that an idle engine sleeps, short enough that a batch
/// takes only milliseconds.
const SCRUB_INTERVAL: Duration = Duration::from_millis(250);

/// Number of pages of a batch, at least one. Pages larger than the budget of an interval get a
/// longer pause instead.
fn batch(page_bytes: usize) -> (usize, Duration) {
    let budget = SCRUB_BYTES_PER_SECOND / 1000 * SCRUB_INTERVAL.as_millis() as usize;
    let pages = (budget / page_bytes.max(1)).max(1);
    let pause = Duration::from_secs_f64((pages * page_bytes) as f64 / SCRUB_BYTES_PER_SECOND as f64);
    (pages, pause.max(SCRUB_INTERVAL))
}

/// Verifies all cached pages in turn until `stop` is cancelled. Reports the damaged ones to the
/// scheduler, which drops them.
pub(crate) async fn run(
    events: flume::Sender<SchedulerEvent>,
    page_bytes: usize,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let (count, pause) = batch(page_bytes);
    let mut last = None;
    while tokio::time::timeout(pause, stop.cancelled()).await.is_err() {
        let (reply, pages) = oneshot::channel();
        let request = events.send_async(SchedulerEvent::Scrub { last, count, reply });
        // The scheduler answers between two steps. It drops the request when it stops.
        let pages = tokio::select! {
            pages = async { request.await.ok()?; pages.await.ok() } => pages,
            () = stop.cancelled() => None,
        };
        let Some(pages) = pages else { return };
        // The end of the keys: begin again.
        last = pages.last().map(|(key, _)| *key).filter(|_| pages.len() == count);
        let (verified, damaged) = tokio::task::spawn_blocking(move || verify(pages)).await.unwrap_or_default();
        for key in damaged {
            if events.send_async(SchedulerEvent::Damaged(key)).await.is_err() {
                return;
            }
        }
        // After the reports. The scheduler handles them before it answers the next batch.
        metrics.l1.pages_scrubbed.inc_by(verified);
    }
}

/// Verifies the pages that L1 still has. Returns their number, and the damaged ones.
fn verify(pages: Vec<(PageKey, Weak<SealedPage>)>) -> (u64, Vec<PageKey>) {
    let mut verified = 0;
    let mut damaged = Vec::new();
    for (key, page) in pages {
        let Some(page) = page.upgrade() else { continue };
        verified += 1;
        if page.verify().is_err() {
            damaged.push(key);
        }
    }
    (verified, damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_the_rate_for_every_page_size() {
        for page_bytes in [4 << 10, 256 << 10, 16 << 20, 100 << 20] {
            let (pages, pause) = batch(page_bytes);
            let rate = (pages * page_bytes) as f64 / pause.as_secs_f64();
            assert!(rate <= SCRUB_BYTES_PER_SECOND as f64 * 1.001, "{page_bytes}: {rate}");
            assert!(rate >= SCRUB_BYTES_PER_SECOND as f64 * 0.7, "{page_bytes}: {rate}");
        }
    }
}
