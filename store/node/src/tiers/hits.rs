//! Hits in L2: what the policy and L3 learn of them.
//!
//! A hit waits for no lock that is held during a decision or by L3. See [`super::touches`].

use super::touches::{Recorded, Touch};
use super::{Tiers, TiersState};
use crate::page::Page;
use crate::policy::PolicyActions;
use larder_evict::Outlook;
use larder_format::PageId;
use larder_runtime::sync::MutexGuard;
use std::sync::Arc;

/// Pages that L3 learns of in one second, at most. Each was hit 16 times since it was last told, or
/// left L2 after hits.
const L3_TOUCHES_MAX: usize = 4096;

/// Records of a read from DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadRecord {
    HitAndTouch,
    /// The policy has learnt of the read before: see [`Tiers::touch_all_l2`].
    Hit,
}

impl Tiers {
    /// Counts hits of pages in DRAM, and tells the policy of them.
    pub(super) fn record_hits<'a>(&self, pages: impl Iterator<Item = &'a Page>) {
        let hits = self.record_touches(pages);
        self.metrics.pages_hit_l2.inc_by(hits);
    }

    /// Records reads of pages in DRAM.
    pub(super) fn record_reads<'a>(&self, pages: impl Iterator<Item = &'a Page>, record: ReadRecord) {
        match record {
            ReadRecord::HitAndTouch => self.record_hits(pages),
            ReadRecord::Hit => {
                self.metrics.pages_hit_l2.inc_by(pages.count() as u64);
            }
        }
    }

    /// Tells the policy of reads of those of `ids` that are in DRAM, before they are sent.
    pub(crate) fn touch_all_l2<'a>(&self, ids: impl Iterator<Item = &'a PageId>) {
        let found: Vec<Arc<Page>> = ids.filter_map(|id| self.get_l2(id)).collect();
        self.record_touches(found.iter().map(|page| &**page));
    }

    /// Tells the policy of reads of pages in DRAM. Returns their number.
    pub(super) fn record_touches<'a>(&self, pages: impl Iterator<Item = &'a Page>) -> u64 {
        let mut reads = 0;
        let mut dropped = 0;
        // Reads since touches were last applied: they pay for a part of the queue.
        let mut unapplied = 0;
        for page in pages {
            reads += 1;
            unapplied += 1;
            let touch = Touch { hash: self.l2.hash(&page.id()), generation: page.generation() };
            let recorded = self.touches.record(touch);
            dropped += u64::from(recorded == Recorded::Dropped);
            // A batch can have more pages than a queue has room.
            if recorded != Recorded::Queued && self.apply_some(unapplied) {
                unapplied = 0;
            }
        }
        if dropped > 0 {
            self.metrics.touches_dropped_l2.inc_by(dropped);
        }
        if self.hits_write && unapplied > 0 {
            self.apply_some(unapplied);
        }
        reads
    }

    /// Applies queued touches on behalf of so many reads, or all of them if hits write pages to L3.
    /// Never waits: returns `false` if another thread has the lock. Touches then stay queued.
    fn apply_some(&self, reads: usize) -> bool {
        let Some(mut state) = self.state.try_lock() else { return false };
        let mut actions = PolicyActions::default();
        if self.hits_write {
            self.touches.take_all(&mut state.touches);
        } else {
            self.touches.take_some(reads, &mut state.touches);
        }
        self.apply_touches(&mut state, &mut actions);
        self.apply(state, actions, None);
        true
    }

    /// Takes the `state` lock and applies all queued touches, so that the next decision knows the
    /// hits before it. The caller passes `actions` to [`Tiers::apply`].
    pub(super) fn lock_updated(&self, actions: &mut PolicyActions) -> MutexGuard<'_, TiersState> {
        let mut state = self.state.lock();
        self.touches.take_all(&mut state.touches);
        self.apply_touches(&mut state, actions);
        state
    }

    fn apply_touches(&self, state: &mut TiersState, actions: &mut PolicyActions) {
        let now_ms = self.clock.now_unix_ms();
        let TiersState { policy, touches } = state;
        for touch in touches.drain(..) {
            policy.hit(touch.hash, touch.generation, now_ms, actions);
        }
    }

    /// Queues pages whose hits L3 is to learn of. Beyond [`L3_TOUCHES_MAX`] they are left out: L3
    /// retains pages by a sample of their uses then.
    pub(super) fn queue_l3_touches(&self, pages: Vec<(PageId, Outlook)>) {
        if pages.is_empty() {
            return;
        }
        let mut queued = self.l3_touches.lock();
        let room = L3_TOUCHES_MAX - queued.len();
        queued.extend(pages.into_iter().take(room));
    }

    pub(super) fn send_l3_touches(&self) {
        let pages = std::mem::take(&mut *self.l3_touches.lock());
        self.devices.rank(&pages);
    }

    /// Returns those of `ids` that are in DRAM, and records a read of each. The reader at the far
    /// end verifies the bytes.
    pub(crate) fn get_all_l2(&self, ids: &[PageId], record: ReadRecord) -> Vec<Option<Arc<Page>>> {
        let found: Vec<_> = ids.iter().map(|id| self.get_l2(id)).collect();
        self.record_reads(found.iter().flatten().map(|page| &**page), record);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::test_support;
    use futures::FutureExt;
    use larder_format::{NamespaceId, PageKey};
    use larder_runtime::{Clock, now};

    const PAGES: u32 = 16;
    /// Bytes of a page. [`PAGES`] of them fill L2.
    const PAGE: usize = (1 << 20) / PAGES as usize;

    fn id(number: u32) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
    }

    fn put(store: &Store, number: u32) {
        test_support::put(store, id(number), &[0; PAGE]);
    }

    fn full_store() -> Store {
        let store = test_support::store(Clock::at(0));
        (0..PAGES).for_each(|number| put(&store, number));
        store
    }

    fn get(store: &Store, number: u32) -> bool {
        store.tiers().get(&id(number), now()).now_or_never().expect("a hit does not wait").is_some()
    }

    fn missing(store: &Store) -> Vec<u32> {
        (0..PAGES).filter(|&number| store.tiers().get_l2(&id(number)).is_none()).collect()
    }

    #[tokio::test]
    async fn a_hit_waits_for_no_decision_of_the_policy() {
        let store = full_store();
        let tiers = store.tiers();
        // As a put that evicts does. A hit that took the lock would hang here.
        let state = tiers.state.lock();
        for number in 0..100 {
            assert!(get(&store, number % PAGES));
        }
        let page = tiers.get_l2(&id(3)).unwrap();
        assert!(tiers.hold(&page).is_some());
        assert!(tiers.hold_all_l2(&[id(4)], |_, _| true, ReadRecord::HitAndTouch)[0].is_some());
        drop(state);
        assert_eq!(tiers.metrics.pages_hit_l2.get(), 101);
        let dropped = tiers.metrics.touches_dropped_l2.get();
        assert!(dropped > 0 && dropped < 100, "{dropped} of a bounded queue");
    }

    #[tokio::test]
    async fn hits_of_a_batch_are_all_told_to_the_policy() {
        let store = full_store();
        let ids: Vec<PageId> = (0..200).map(|number| id(number % PAGES)).collect();
        assert!(store.tiers().get_all_l2(&ids, ReadRecord::HitAndTouch).iter().all(Option::is_some));
        assert_eq!(store.tiers().metrics.touches_dropped_l2.get(), 0);
    }

    #[tokio::test]
    async fn eviction_knows_all_hits_before_it() {
        let store = full_store();
        // All but one, the oldest of them first. LRU order applies until the policy has learnt.
        for number in (0..PAGES).filter(|&number| number != 7) {
            assert!(get(&store, number));
        }
        put(&store, 99);
        assert_eq!(missing(&store), [7]);
    }

    #[tokio::test]
    async fn policy_learns_once_of_pages_that_are_sent_later() {
        let store = full_store();
        let ids: Vec<PageId> = (0..PAGES).filter(|&number| number != 7).map(id).collect();
        store.tiers().touch_all_l2(ids.iter());
        put(&store, 99);
        assert_eq!(missing(&store), [7]);
        assert_eq!(store.tiers().metrics.pages_hit_l2.get(), 0);
        // Page 0 is the oldest now. The read itself does not change that.
        assert!(store.tiers().get_all_l2(&ids[..1], ReadRecord::Hit)[0].is_some());
        assert_eq!(store.tiers().metrics.pages_hit_l2.get(), 1);
        put(&store, 100);
        assert_eq!(missing(&store), [0, 7]);
    }
}
