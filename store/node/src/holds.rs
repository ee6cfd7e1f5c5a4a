//! Pages held for readers: by leases of lookups, and by clients that read in place.
//!
//! Invariants:
//! - The memory of a held page is not reused before its last hold is dropped, whatever L2 does.
//! - A forgotten or damaged page is never served from here, although its memory may still be held.
//! - The bytes of held pages never exceed `bytes_max`.

use crate::page::Page;
use larder_format::PageId;
use larder_runtime::sync::Mutex;
use larder_runtime::sync::atomic::{AtomicUsize, Ordering};
use larder_runtime::{fail_point, race_point};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(crate) struct Holds {
    bytes_max: u64,
    /// A leaf lock: see the lock order in [`crate::tiers`].
    held: Mutex<HeldPages>,
    /// Number of entries in `held`, changed under its lock. Lookups read it first: each would wait
    /// for the puts that withhold pages otherwise.
    count: AtomicUsize,
}

#[derive(Default)]
struct HeldPages {
    /// By page and generation: a page that was forgotten and put again has two entries while
    /// readers still hold the first.
    pages: BTreeMap<(PageId, u64), HeldPage>,
    bytes: u64,
}

struct HeldPage {
    page: Arc<Page>,
    holds: usize,
    served: bool,
}

pub(crate) enum HoldOutcome {
    Held(Hold),
    /// The held bytes would exceed the bound, or this put of the page is withheld.
    Refused,
    /// The page may have changed since it was found.
    Changed,
}

/// One hold of one page. Dropping it releases the page.
pub(crate) struct Hold {
    holds: Arc<Holds>,
    page: Arc<Page>,
}

impl Hold {
    pub(crate) fn page(&self) -> &Arc<Page> {
        &self.page
    }
}

fn key_of(page: &Page) -> (PageId, u64) {
    (page.id(), page.generation())
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut held = self.holds.held.lock();
        let Some(entry) = held.pages.get_mut(&key_of(&self.page)) else { return };
        entry.holds -= 1;
        if entry.holds == 0 {
            let last = held.pages.remove(&key_of(&self.page));
            self.holds.count.store(held.pages.len(), Ordering::Release);
            held.bytes -= u64::from(self.page.bytes());
            // Freeing arena memory can take long, so it happens without the lock.
            drop(held);
            drop(last);
        }
    }
}

impl Holds {
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, held: Mutex::default(), count: AtomicUsize::new(0) })
    }

    /// Holds a page if `is_unchanged` returns `true` under the lock. See
    /// [`Tiers::hold`](crate::tiers::Tiers::hold).
    pub(crate) fn hold(self: &Arc<Self>, page: &Arc<Page>, is_unchanged: impl FnOnce() -> bool) -> HoldOutcome {
        let bytes = u64::from(page.bytes());
        // Held from the check to the addition: concurrent holds must not pass the bound together.
        let mut held = self.held.lock();
        if !is_unchanged() {
            return HoldOutcome::Changed;
        }
        if race_point!("node.hold-after-unlock") {
            drop(held);
            held = self.held.lock();
        }
        let bytes_after = held.bytes + bytes;
        if race_point!("node.held-bytes-after-unlock") {
            drop(held);
            held = self.held.lock();
        }
        let page = match held.pages.get_mut(&key_of(page)) {
            // A page that was read from L3 twice has two copies. The held one serves both readers,
            // so that it counts once.
            Some(entry) if entry.served => {
                entry.holds += 1;
                entry.page.clone()
            }
            Some(_) => return HoldOutcome::Refused,
            None if bytes_after > self.bytes_max => return HoldOutcome::Refused,
            None => {
                held.pages.insert(key_of(page), HeldPage { page: page.clone(), holds: 1, served: true });
                self.count.store(held.pages.len(), Ordering::Release);
                held.bytes = bytes_after;
                page.clone()
            }
        };
        drop(held);
        HoldOutcome::Held(Hold { holds: self.clone(), page })
    }

    /// Returns the newest held put of the page that may be served.
    pub(crate) fn get(&self, id: &PageId) -> Option<Arc<Page>> {
        // Acquire: a lookup that finds a page gone from L2 also sees the hold that came before. A
        // hold that comes now may be ordered after the lookup.
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let held = self.held.lock();
        let mut newest_first = held.pages.range((*id, 0)..=(*id, u64::MAX)).rev();
        newest_first.find(|(_, entry)| entry.served).map(|(_, entry)| entry.page.clone())
    }

    /// Stops serving the page from here. Its holds stay valid for their owners, and its bytes count
    /// until the last of them is dropped.
    pub(crate) fn withhold(&self, id: &PageId) {
        let mut held = self.held.lock();
        if fail_point!("node.serve-forgotten-held") {
            return;
        }
        for (_, entry) in held.pages.range_mut((*id, 0)..=(*id, u64::MAX)) {
            entry.served = false;
        }
    }

    pub(crate) fn usage(&self) -> (usize, u64) {
        let held = self.held.lock();
        (held.pages.len(), held.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PageShapes;
    use larder_format::{NamespaceId, PageKey, PageMeta};
    use larder_memory::Arena;

    fn page(arena: &Arc<Arena>, key: u8, generation: u64) -> Arc<Page> {
        let slot = arena.allocate(8192).unwrap();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([key; 32]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, vec![8192], &slot);
        Arc::new(PageShapes::default().page(PageMeta { generation, ..meta }, slot.freeze()))
    }

    fn hold(holds: &Arc<Holds>, page: &Arc<Page>) -> Option<Hold> {
        match holds.hold(page, || true) {
            HoldOutcome::Held(hold) => Some(hold),
            HoldOutcome::Refused | HoldOutcome::Changed => None,
        }
    }

    #[test]
    fn memory_is_freed_with_the_last_hold() {
        let arena = Arena::new(1 << 20).unwrap();
        let holds = Holds::new(2 * 8192);
        let a = page(&arena, 1, 1);
        let b = page(&arena, 2, 2);
        let c = page(&arena, 3, 3);
        let id = a.id();
        let first = hold(&holds, &a).unwrap();
        let second = hold(&holds, &a).unwrap();
        let other = hold(&holds, &b).unwrap();
        assert!(hold(&holds, &c).is_none(), "the bound is reached");
        drop((a, b, c));
        assert_eq!((holds.usage(), arena.used()), ((2, 16384), 16384));
        drop(first);
        assert!(holds.get(&id).is_some());
        drop((second, other));
        assert!(holds.get(&id).is_none());
        assert_eq!((holds.usage(), arena.used()), ((0, 0), 0));
    }

    #[test]
    fn a_withheld_page_stays_held_and_is_not_served() {
        let arena = Arena::new(1 << 20).unwrap();
        let holds = Holds::new(1 << 20);
        let old = page(&arena, 1, 1);
        let new = page(&arena, 1, 2);
        let id = old.id();
        let held = hold(&holds, &old).unwrap();
        holds.withhold(&id);
        assert!(holds.get(&id).is_none() && held.page().generation() == 1);
        let _newer = hold(&holds, &new).unwrap();
        assert_eq!(holds.get(&id).unwrap().generation(), 2);
        drop(held);
        assert_eq!(holds.usage(), (1, 8192));
    }
}
