//! Hits in L2: what the policy and L3 learn of them.
//!
//! A hit waits for no lock that is held during a decision or by L3. See [`super::touches`].

use super::touches::{Recorded, Touch};
use super::{Tiers, TiersState};
use crate::page::Page;
use crate::policy::PolicyActions;
use larder_format::PageId;
use larder_runtime::sync::MutexGuard;
use std::sync::Arc;

/// Pages that L3 learns of in one second, at most. Each was hit 16 times since it was last told.
const L3_TOUCHES_MAX: usize = 4096;
impl Tiers {
    /// Counts hits of pages in DRAM.
    pub(super) fn record_hits<'a>(&self, pages: impl Iterator<Item = &'a Page>) {
        let hits = self.record_touches(pages);
        self.metrics.pages_hit_l2.inc_by(hits);
    }

    /// Tells the policy of reads of pages in DRAM. Returns their number.
    pub(super) fn record_touches<'a>(&self, pages: impl Iterator<Item = &'a Page>) -> u64 {
        let mut reads = 0;
        let mut dropped = 0;
        let mut is_due = self.hits_write;
        for page in pages {
            reads += 1;
            let touch = Touch { hash: self.l2.hash(&page.id()), generation: page.generation() };
            match self.touches.record(touch) {
                Recorded::Queued => {}
                Recorded::Due => is_due = true,
                Recorded::Dropped => {
                    is_due = true;
                    dropped += 1;
                }
            }
        }
        if dropped > 0 {
            self.metrics.touches_dropped_l2.inc_by(dropped);
        }
        // Without a wait. If another thread has the lock, touches stay queued for the next one.
        if reads > 0
            && is_due
            && let Some(mut state) = self.state.try_lock()
        {
            let mut actions = PolicyActions::default();
            if self.hits_write {
                self.touches.take_all(&mut state.touches);
            } else {
                self.touches.take_some(&mut state.touches);
            }
            self.apply_touches(&mut state, &mut actions);
            self.apply(state, actions, None);
        }
        reads
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

    /// Queues pages whose hits L3 is to learn of. Beyond [`L3_TOUCHES_MAX`] they are left out: they
    /// are told again after 16 more hits.
    pub(super) fn queue_l3_touches(&self, ids: Vec<PageId>) {
        if ids.is_empty() {
            return;
        }
        let mut queued = self.l3_touches.lock();
        let room = L3_TOUCHES_MAX - queued.len();
        queued.extend(ids.into_iter().take(room));
    }

    pub(super) fn send_l3_touches(&self) {
        let ids = std::mem::take(&mut *self.l3_touches.lock());
        self.devices.touch(&ids);
    }

    /// Returns those of `ids` that are in DRAM. Counts a hit for each. The reader at the far end
    /// verifies the bytes.
    pub fn get_all_l2(&self, ids: &[PageId]) -> Vec<Option<Arc<Page>>> {
        let found: Vec<_> = ids.iter().map(|id| self.get_l2(id)).collect();
        self.record_hits(found.iter().flatten().map(|page| &**page));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Devices;
    use crate::options::NodeOptions;
    use crate::store::Store;
    use futures::FutureExt;
    use larder_format::{NamespaceId, PageKey, chunk_crcs};
    use larder_memory::Arena;
    use larder_runtime::{Clock, now};
    use larder_wire::{CommitOutcome, Reserved};

    const PAGES: u32 = 16;
    const PAGE: usize = 64 << 10;

    fn id(number: u32) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
    }

    fn put(store: &Store, number: u32) {
        let key = id(number).key;
        let page = Reserved {
            key,
            parent: PageKey::NONE,
            position: 0,
            ttl_ms: 0,
            part_bytes: vec![PAGE as u32],
            copy_of: None,
        };
        let put = store.reserve(id(number), page).ok().unwrap();
        let part = put.take_part(0, PAGE).unwrap();
        let crcs = chunk_crcs(&part).collect();
        assert!(put.land(0, part, crcs) && store.puts().commit(&put) == CommitOutcome::Stored);
    }

    fn full_store() -> Store {
        let l2_bytes = u64::from(PAGES) * PAGE as u64;
        let options = NodeOptions { l2_bytes, in_flight_bytes: Some(1 << 20), seed: Some(1), ..NodeOptions::default() };
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let store = Store::new(&options, arena, Devices::of(Vec::new()).unwrap(), Clock::at(0), 1);
        (0..PAGES).for_each(|number| put(&store, number));
        store
    }

    fn get(store: &Store, number: u32) -> bool {
        store.tiers().get(&id(number), now()).now_or_never().expect("a hit does not wait").is_some()
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
        assert!(tiers.hold_all_l2(&[id(4)], |_, _| true)[0].is_some());
        drop(state);
        assert_eq!(tiers.metrics.pages_hit_l2.get(), 101);
        let dropped = tiers.metrics.touches_dropped_l2.get();
        assert!(dropped > 0 && dropped < 100, "{dropped} of a bounded queue");
    }

    #[tokio::test]
    async fn eviction_knows_all_hits_before_it() {
        let store = full_store();
        // All but one, the oldest of them first. LRU order applies until the policy has learnt.
        for number in (0..PAGES).filter(|&number| number != 7) {
            assert!(get(&store, number));
        }
        put(&store, 99);
        let missing: Vec<u32> = (0..PAGES).filter(|&number| store.tiers().get_l2(&id(number)).is_none()).collect();
        assert_eq!(missing, [7]);
    }
}
