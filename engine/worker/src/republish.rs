//! Later puts of pages that found the store busy, or whose put was lost.
//!
//! Invariants:
//! - A later put states the origin from before the first one, as a copy. So a page that was
//!   forgotten meanwhile does not come back.
//! - Only pages that L1 holds are put again. Weak references keep none of them from eviction.
//! - Each page is verified before each put, on the threads of the forward pass.
//! - At most [`waiting_max`] pages wait, and at most [`RUNNING_MAX`] are being put.

use crate::metrics::Metrics;
use crate::publish::Unpublished;
use crate::scheduler::SchedulerEvent;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use larder_client::PutOutcome;
use larder_format::MAX_TOKEN_IDS;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Pages that can wait for their next put with the smallest L1.
const WAITING_MIN: usize = 16_384;
/// Pages that can wait, for each page of L1. Those that left L1 wait until their turn, too.
const WAITING_PER_PAGE: usize = 2;
/// Memory of a page that waits, beside its token ids: its entry in the queue, and what the weak
/// reference keeps of the page.
const WAITING_PAGE_BYTES: usize = 512;
/// Maximum number of puts at a time. Few, because the scheduler copies the page for each, between
/// two steps.
const RUNNING_MAX: usize = 4;
/// Minimum pause after a busy answer. It doubles with each put.
const BUSY_PAUSE_MIN: Duration = Duration::from_millis(20);
/// Pause after a lost put, or one that another writer was ahead of. It doubles with each put.
const LOST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Maximum number of pages that wait for their next put, with an L1 of `l1_pages` pages.
pub(crate) fn waiting_max(l1_pages: usize) -> usize {
    l1_pages.saturating_mul(WAITING_PER_PAGE).max(WAITING_MIN)
}

/// Memory of the pages that wait for their next put, in bytes at most.
pub(crate) fn waiting_bytes_max(l1_pages: usize, page_tokens: usize) -> usize {
    // Longer pages have no token ids.
    let token_ids = if page_tokens > MAX_TOKEN_IDS { 0 } else { size_of::<u32>() * page_tokens };
    waiting_max(l1_pages).saturating_mul(WAITING_PAGE_BYTES + token_ids)
}

/// Pause before the next put of a page, after `attempts` puts. At least what the node asked for.
fn pause(outcome: PutOutcome, attempts: u32) -> Duration {
    let growth = 1 << (attempts.clamp(1, 11) - 1);
    match outcome {
        PutOutcome::Busy { retry_after } => retry_after.max((BUSY_PAUSE_MIN * growth).min(PAUSE_MAX)),
        _ => (LOST_PAUSE * growth).min(PAUSE_MAX),
    }
}

/// Pages by the time of their next put. The number keeps the order of pages with one time.
type Waiting = BTreeMap<(Instant, u64), Unpublished>;

/// Puts the pages that `unpublished` yields again, until `stop` is cancelled. At most `waiting_max`
/// of them wait here, and others in the channel.
pub(crate) async fn run(
    unpublished: flume::Receiver<Unpublished>,
    waiting_max: usize,
    events: flume::Sender<SchedulerEvent>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let mut waiting = Waiting::new();
    let mut running = FuturesUnordered::new();
    let mut number = 0;
    loop {
        metrics.unpublished_pages.set((waiting.len() + running.len()) as i64);
        let next = waiting.first_key_value().map(|((due, _), _)| *due).filter(|_| running.len() < RUNNING_MAX);
        tokio::select! {
            () = stop.cancelled() => break,
            received = unpublished.recv_async(), if waiting.len() < waiting_max => {
                let Ok(page) = received else { break };
                number += 1;
                waiting.insert((Instant::now() + pause(page.outcome, page.attempts), number), page);
            }
            () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now).into()), if next.is_some() => {
                if let Some((_, page)) = waiting.pop_first() {
                    running.push(put_again(page, events.clone(), &metrics));
                }
            }
            Some(()) = running.next(), if !running.is_empty() => {}
        }
    }
    let left = waiting.len() + running.len() + unpublished.len();
    if left > 0 {
        metrics.abandoned_pages.inc_by(left as u64);
        tracing::warn!(pages = left, "stopped before the store took these pages; other engines compute them again");
    }
}

/// Puts a page again, if L1 still holds it intact. A put without success returns by the queue.
async fn put_again(unpublished: Unpublished, events: flume::Sender<SchedulerEvent>, metrics: &Metrics) {
    let Unpublished { page, content, attempts, .. } = unpublished;
    let Some(content) = content.upgrade() else {
        metrics.abandoned_pages.inc();
        return;
    };
    // Not on blocking threads of tokio: the scrub would keep each additional one alive for ever.
    let (intact, verified) = oneshot::channel();
    rayon::spawn(move || drop(intact.send(content.verify().is_ok().then_some(content))));
    let Ok(verified) = verified.await else { return };
    // Sending fails only after the scheduler thread has ended.
    let Some(content) = verified else {
        let _ = events.send_async(SchedulerEvent::Damaged(page.key)).await;
        return;
    };
    let (reply, put) = oneshot::channel();
    let event = SchedulerEvent::Republish { page, content, attempts, reply };
    if events.send_async(event).await.is_ok()
        && let Ok(put) = put.await
    {
        let _ = put.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Role;
    use larder_client::NewPage;
    use larder_format::PageKey;
    use std::sync::Weak;

    #[tokio::test]
    async fn all_pages_of_a_large_l1_can_wait() {
        let metrics = Arc::new(Metrics::new(Role::Decode));
        let stop = CancellationToken::new();
        let (sender, reports) = flume::bounded(1);
        let (events, _received) = flume::bounded(1);
        let pages = 2 * WAITING_MIN;
        let running = tokio::spawn(run(reports, waiting_max(pages), events, metrics.clone(), stop.clone()));
        for position in 0..pages as u32 {
            let page = NewPage { position, ..NewPage::first(PageKey([1; 32])) };
            let outcome = PutOutcome::Busy { retry_after: Duration::from_secs(3600) };
            let report = Unpublished { page, content: Weak::new(), outcome, attempts: 1 };
            let sent = tokio::time::timeout(Duration::from_secs(60), sender.send_async(report)).await;
            assert!(sent.is_ok_and(|sent| sent.is_ok()), "no room for page {position}");
        }
        stop.cancel();
        running.await.unwrap();
        assert_eq!(metrics.abandoned_pages.get(), pages as u64);
    }

    #[test]
    fn pause_grows_to_its_maximum_and_is_never_shorter_than_the_nodes() {
        let busy = |ms| PutOutcome::Busy { retry_after: Duration::from_millis(ms) };
        assert_eq!(pause(busy(150), 1), Duration::from_millis(150));
        assert_eq!(pause(busy(1), 3), 4 * BUSY_PAUSE_MIN);
        assert_eq!(pause(busy(60_000), 1), Duration::from_secs(60));
        assert_eq!(pause(PutOutcome::Lost, 1), LOST_PAUSE);
        assert_eq!([pause(PutOutcome::Lost, u32::MAX), pause(busy(0), u32::MAX)], [PAUSE_MAX, BUSY_PAUSE_MIN * 1024]);
    }
}
