//! Pages that were read from L3 and wait for their turn.
//!
//! A request that shares such a read is answered from here. The turns are those of another request,
//! which has another deadline.

use super::turns::{Turn, TurnEnd};
use crate::page::Page;
use larder_format::PageId;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;

/// Turns of other requests that last until L2 has decided about one page, at most. Further ones end
/// with their answers, so L2 may learn of the pages behind in another order.
const TURNS_MAX: usize = 64;

/// A read of one put: the page, and the generation that the lookup found.
type ReadKey = (PageId, u64);

#[derive(Default)]
pub(super) struct Arrivals {
    /// A leaf lock.
    waiting: Mutex<BTreeMap<ReadKey, Arrived>>,
    /// Notified by each page that begins to wait.
    arrived: Notify,
}

struct Arrived {
    page: Arc<Page>,
    turns: Vec<TurnEnd>,
}

/// A page that other requests find. Dropping it ends that, and the turns that waited for it.
pub(super) struct Shown<'a> {
    arrivals: &'a Arrivals,
    key: ReadKey,
}

impl Arrivals {
    /// Shows a page to the requests that share its read.
    pub(super) fn show(&self, key: ReadKey, page: &Arc<Page>) -> Shown<'_> {
        self.waiting.lock().insert(key, Arrived { page: page.clone(), turns: Vec::new() });
        self.arrived.notify_waiters();
        Shown { arrivals: self, key }
    }

    /// Waits until the page is shown. Never returns if it is not: the caller waits for the end of
    /// the read too.
    pub(super) async fn wait(&self, key: &ReadKey) -> Arc<Page> {
        loop {
            let mut arrived = std::pin::pin!(self.arrived.notified());
            // Registered before the check, so that no page falls between check and wait.
            arrived.as_mut().enable();
            if let Some(arrived) = self.waiting.lock().get(key) {
                return arrived.page.clone();
            }
            arrived.await;
        }
    }

    /// Lets a turn last until L2 has decided about the page.
    pub(super) fn prolong(&self, key: &ReadKey, turn: &mut Turn) {
        let Some(end) = turn.take_end() else { return };
        if let Some(arrived) = self.waiting.lock().get_mut(key)
            && arrived.turns.len() < TURNS_MAX
        {
            arrived.turns.push(end);
        }
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        let ended = self.arrivals.waiting.lock().remove(&self.key);
        // Without the lock: the ends of turns wake other requests.
        drop(ended);
    }
}
