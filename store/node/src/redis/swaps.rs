//! Writers of one key, one after the other, and readers that wait for the end of a swap.
//!
//! A swap forgets a manifest and puts another. In between the key has none. A reader that finds
//! none asks whether a swap may be the reason, in this order:
//!
//! 1. It notes how many swaps have begun.
//! 2. It waits for the end of a swap of its key, if one runs.
//! 3. It looks the manifest up.
//! 4. Without a manifest, and if no swap has begun since step 1, the key is absent.

use larder_format::PageId;
use larder_runtime::OrderedWatch;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::OwnedMutexGuard;

/// Counters of swaps that have begun. Keys share them, and a shared counter costs a reader another
/// look.
const COUNTERS: usize = 64;

pub(super) struct Swaps {
    writers: Mutex<BTreeMap<PageId, Arc<tokio::sync::Mutex<()>>>>,
    running: Mutex<BTreeMap<PageId, Arc<OrderedWatch<bool>>>>,
    begun: [AtomicU64; COUNTERS],
}

impl Default for Swaps {
    fn default() -> Self {
        Swaps { writers: Mutex::default(), running: Mutex::default(), begun: [const { AtomicU64::new(0) }; COUNTERS] }
    }
}

/// Right of the only writer of a key.
pub(super) struct Writer<'a> {
    swaps: &'a Swaps,
    id: PageId,
    guard: Option<OwnedMutexGuard<()>>,
}

/// A swap that runs. Its drop wakes the readers that wait for it.
pub(super) struct Swap<'a> {
    swaps: &'a Swaps,
    id: PageId,
}

impl Swaps {
    /// Waits until no other writer of the key works. Returns `None` at `deadline`.
    pub(super) async fn writer(&self, id: PageId, deadline: Instant) -> Option<Writer<'_>> {
        let lock = self.writers.lock().entry(id).or_default().clone();
        // Made before the wait: its drop removes the entry, also if the wait ends early.
        let mut writer = Writer { swaps: self, id, guard: None };
        writer.guard = Some(tokio::time::timeout_at(deadline.into(), lock.lock_owned()).await.ok()?);
        Some(writer)
    }

    fn counter(&self, id: &PageId) -> &AtomicU64 {
        &self.begun[usize::from(id.key.0[0]) % COUNTERS]
    }

    /// Number of swaps that have begun, of this key and of some others.
    pub(super) fn begun(&self, id: &PageId) -> u64 {
        // SeqCst: a reader that sees no manifest because of a swap must also see that it began.
        self.counter(id).load(Ordering::SeqCst)
    }

    /// Waits for the end of a swap of the key, if one runs. Returns `false` at `deadline`.
    pub(super) async fn ended(&self, id: &PageId, deadline: Instant) -> bool {
        let running = self.running.lock().get(id).cloned();
        let Some(running) = running else { return true };
        let ended = running.wait_for(|&ended| ended.then_some(()));
        tokio::time::timeout_at(deadline.into(), ended).await.is_ok()
    }
}

impl Writer<'_> {
    /// Id of the key's manifest.
    pub(super) fn id(&self) -> PageId {
        self.id
    }

    /// Begins a swap. To be called before the old manifest is forgotten.
    pub(super) fn begin_swap(&self) -> Swap<'_> {
        let running = Arc::new(OrderedWatch::new(false));
        self.swaps.running.lock().insert(self.id, running);
        self.swaps.counter(&self.id).fetch_add(1, Ordering::SeqCst);
        Swap { swaps: self.swaps, id: self.id }
    }
}

impl Drop for Swap<'_> {
    fn drop(&mut self) {
        let ended = self.swaps.running.lock().remove(&self.id);
        if let Some(ended) = ended {
            ended.update(|ended| *ended = true);
        }
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.guard = None;
        let mut writers = self.swaps.writers.lock();
        // All clones are made under this lock, so the last reference is that of the table.
        if writers.get(&self.id).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            writers.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn writers_take_turns_and_leave_nothing_behind() {
        let swaps = Swaps::default();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let soon = || larder_runtime::now() + Duration::from_secs(1);
        let first = swaps.writer(id, soon()).await.unwrap();
        assert!(swaps.writer(id, soon()).await.is_none(), "the first works");
        let begun = swaps.begun(&id);
        let swap = first.begin_swap();
        assert!(swaps.begun(&id) > begun && !swaps.ended(&id, soon()).await);
        drop(swap);
        assert!(swaps.ended(&id, soon()).await);
        drop(first);
        drop(swaps.writer(id, soon()).await.unwrap());
        assert!(swaps.writers.lock().is_empty() && swaps.running.lock().is_empty());
    }
}
