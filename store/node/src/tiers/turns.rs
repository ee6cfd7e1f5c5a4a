//! Turns: the pages that one request reads from L3 enter L2 in the order of the request.
//!
//! A request reads several pages at a time, and these reads end in any order. The eviction policy
//! must learn of a sequence from its first page on. It judges a page by the page before it, refuses
//! the pages behind a refused one, and evicts a page after those behind it. Without turns, a page
//! that arrives early would count as the begin of a sequence, or as a page behind a refused one.
//!
//! Invariants:
//! - A page is offered to L2 when the turn of the page before it has ended, or after
//!   [`TURN_TIME_MAX`].
//! - Other requests that share the read have the page at once, except those that want it in L2.
//!   Their own turns last until L2 has decided ([`super::arrivals`]).
//! - A page waits for half of the time to the deadline of its own request, at most. So pages that
//!   were read in time reach their client, although a device does not answer for one before them.
//! - A turn ends when it is dropped. So a request that is cancelled, or reaches its deadline, ends
//!   its turns.
//! - A read waits only for reads that began earlier: a request begins its reads in their order. So
//!   no two reads wait for each other.

use larder_runtime::now;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

/// Maximum time that a page waits for the pages before it, once it was read. Its memory waits too.
const TURN_TIME_MAX: Duration = Duration::from_millis(100);

/// Gives turns to the pages of one request.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// End of the turn that was given last.
    last: Option<oneshot::Receiver<()>>,
}

impl Turns {
    /// The turn of the next page. The caller drops it when L2 has decided about the page.
    pub(crate) fn next_turn(&mut self) -> Turn {
        let (end, ended) = oneshot::channel();
        Turn { before: self.last.replace(ended), end: Some(TurnEnd { _end: end }) }
    }
}

/// Turn of one page. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    end: Option<TurnEnd>,
}

/// End of a turn, when dropped.
#[derive(Debug)]
pub(super) struct TurnEnd {
    _end: oneshot::Sender<()>,
}

impl Turn {
    /// Turn of a page that no other page waits for, and that waits for none.
    pub(crate) fn alone() -> Turn {
        Turn { before: None, end: None }
    }

    /// Takes the wait for the turn before, for a request with this deadline. A later call returns
    /// one that is over.
    pub(super) fn take_before(&mut self, deadline: Instant) -> TurnBefore {
        TurnBefore { ended: self.before.take(), deadline }
    }

    /// Takes the end of the turn, which no longer ends with it. `None` if no page waits for it.
    pub(super) fn take_end(&mut self) -> Option<TurnEnd> {
        self.end.take()
    }
}

/// End of the turn before.
#[derive(Debug)]
pub(super) struct TurnBefore {
    ended: Option<oneshot::Receiver<()>>,
    /// Deadline of the request that waits.
    deadline: Instant,
}

impl TurnBefore {
    /// Returns `true` if there is nothing to wait for.
    pub(super) fn is_over(&mut self) -> bool {
        // A receiver must not be polled after its end.
        self.ended.take_if(|ended| !matches!(ended.try_recv(), Err(TryRecvError::Empty)));
        self.ended.is_none()
    }

    /// Waits for the end of the turn before, for [`TURN_TIME_MAX`] at most, and for half of the
    /// time to the deadline.
    pub(super) async fn ended(self) {
        if let Some(ended) = self.ended {
            let begin = now();
            let time_max = TURN_TIME_MAX.min(self.deadline.saturating_duration_since(begin) / 2);
            // The sender is dropped, never used: an error is the end.
            let _ = tokio::time::timeout_at((begin + time_max).into(), ended).await;
        }
    }

    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn none() -> TurnBefore {
        TurnBefore { ended: None, deadline: now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn later() -> Instant {
        now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn turn_waits_for_the_end_of_the_one_before() {
        let mut turns = Turns::default();
        let [mut first, mut second, mut third] = [(); 3].map(|()| turns.next_turn());
        assert!(first.take_before(later()).ended().now_or_never().is_some(), "nothing is before it");
        let mut second_waits = Box::pin(second.take_before(later()).ended());
        assert!(futures::poll!(&mut second_waits).is_pending());
        drop(first);
        second_waits.await;
        // Taken, so the next read of the page does not wait again.
        assert!(second.take_before(later()).ended().now_or_never().is_some());
        assert!(third.take_before(later()).ended().now_or_never().is_none(), "the second one has not ended");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_turn_is_bounded() {
        let mut turns = Turns::default();
        let _first = turns.next_turn();
        let wait = turns.next_turn().take_before(later()).ended();
        tokio::time::timeout(2 * TURN_TIME_MAX, wait).await.expect("it gave the order up");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_turn_leaves_time_before_the_deadline() {
        let mut turns = Turns::default();
        let [_first, mut second, mut third] = [(); 3].map(|()| turns.next_turn());
        let deadline = now() + TURN_TIME_MAX / 2;
        second.take_before(deadline).ended().await;
        assert!(now() < deadline, "a page that was read is late");
        third.take_before(now()).ended().await;
        assert!(now() < deadline, "a request that is late waits no longer");
    }
}
