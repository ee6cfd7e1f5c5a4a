//! Pages that are held for readers: what a lookup promised, and what is read in place.
//!
//! Always true: the memory of a held page is not given back before its last hold is dropped, whatever L2 does; a page that
//! was forgotten, or found damaged, is served from here no more, though its memory may still be held; the bytes held at a time
//! are bounded.

use crate::tiers::Page;
use larder_format::PageId;
use larder_format::planted::{Bug, has};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// All holds of a node.
pub(crate) struct Holds {
    bytes_max: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By page and generation.
    pages: BTreeMap<(PageId, u64), HeldPage>,
    bytes: u64,
}

struct HeldPage {
    page: Arc<Page>,
    holds: usize,
    served: bool,
}

/// One hold of one page.
pub(crate) struct Hold {
    holds: Arc<Holds>,
    page: Arc<Page>,
}

impl Hold {
    pub(crate) fn page(&self) -> &Arc<Page> {
        &self.page
    }
}

fn name(page: &Page) -> (PageId, u64) {
    (page.meta.id, page.meta.generation)
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.holds.state.lock();
        let Some(held) = state.pages.get_mut(&name(&self.page)) else { return };
        held.holds -= 1;
        if held.holds == 0 {
            let last = state.pages.remove(&name(&self.page));
            state.bytes -= u64::from(self.page.bytes());
            drop(state);
            drop(last);
        }
    }
}

impl Holds {
    /// Holds of at most `bytes_max` bytes of pages.
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, state: Mutex::default() })
    }

    /// Holds a page; `None` if too much is held.
    pub(crate) fn hold(self: &Arc<Self>, page: &Arc<Page>) -> Option<Hold> {
        let bytes = u64::from(page.bytes());
        let mut state = self.state.lock();
        let room = self.bytes_max.saturating_sub(state.bytes);
        let page = match state.pages.get_mut(&name(page)) {
            // If the page was read twice from L3, the copy that is held already serves both.
            Some(held) if held.served => {
                held.holds += 1;
                held.page.clone()
            }
            Some(_) => return None,
            None if bytes > room => return None,
            None => {
                state.pages.insert(name(page), HeldPage { page: page.clone(), holds: 1, served: true });
                state.bytes += bytes;
                page.clone()
            }
        };
        drop(state);
        Some(Hold { holds: self.clone(), page })
    }

    /// The newest page of that name which is held and may be served.
    pub(crate) fn get(&self, id: &PageId) -> Option<Arc<Page>> {
        let state = self.state.lock();
        let mut newest = state.pages.range((*id, 0)..=(*id, u64::MAX)).rev();
        newest.find(|(_, held)| held.served).map(|(_, held)| held.page.clone())
    }

    /// Serves pages of that name no more.
    pub(crate) fn withhold(&self, id: &PageId) {
        let mut state = self.state.lock();
        if has(Bug::HeldIsServed) {
            return;
        }
        for (_, held) in state.pages.range_mut((*id, 0)..=(*id, u64::MAX)) {
            held.served = false;
        }
    }

    /// Pages and bytes held.
    pub(crate) fn usage(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.pages.len(), state.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_device::Arena;
    use larder_format::{NamespaceId, PageKey, PageMeta};

    fn page(arena: &Arc<Arena>, key: u8, generation: u64) -> Arc<Page> {
        let slot = arena.allocate(8192).unwrap();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([key; 32]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, vec![8192], &slot);
        Arc::new(Page { meta: PageMeta { generation, ..meta }, payload: slot.freeze() })
    }

    #[test]
    fn memory_stays_until_the_last_hold_and_no_longer() {
        let arena = Arena::new(1 << 20).unwrap();
        let holds = Holds::new(2 * 8192);
        let (a, b, c) = (page(&arena, 1, 1), page(&arena, 2, 2), page(&arena, 3, 3));
        let id = a.meta.id;
        let first = holds.hold(&a).unwrap();
        let second = holds.hold(&a).unwrap();
        let other = holds.hold(&b).unwrap();
        assert!(holds.hold(&c).is_none(), "no more than the bound");
        drop((a, b, c));
        assert_eq!((holds.usage(), arena.used()), ((2, 16384), 16384));
        drop(first);
        assert!(holds.get(&id).is_some());
        drop((second, other));
        assert!(holds.get(&id).is_none());
        assert_eq!((holds.usage(), arena.used()), ((0, 0), 0));
    }

    #[test]
    fn what_was_forgotten_is_held_and_not_served() {
        let arena = Arena::new(1 << 20).unwrap();
        let holds = Holds::new(1 << 20);
        let (old, new) = (page(&arena, 1, 1), page(&arena, 1, 2));
        let id = old.meta.id;
        let held = holds.hold(&old).unwrap();
        holds.withhold(&id);
        assert!(holds.get(&id).is_none() && held.page().meta.generation == 1);
        let _newer = holds.hold(&new).unwrap();
        assert_eq!(holds.get(&id).unwrap().meta.generation, 2);
        drop(held);
        assert_eq!(holds.usage(), (1, 8192));
    }
}
