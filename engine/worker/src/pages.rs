//! The pages of one sequence, and how far it is computed.
//!
//! What always holds: `slots` are the sequence's pages from its start without a gap; all whole pages below `computed` are
//! sealed, and only the page in which `computed` lies may be partly filled. Pages that came from elsewhere for later
//! places wait in `ahead` until the places before them are filled.

use larder_model::{KvPage, PageSlot};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// See the module.
pub(crate) struct SequencePages {
    page_tokens: usize,
    computed: usize,
    slots: Vec<PageSlot>,
    ahead: BTreeMap<usize, Arc<KvPage>>,
    spare: Vec<KvPage>,
}

impl SequencePages {
    pub(crate) fn new(page_tokens: usize) -> Self {
        Self { page_tokens, computed: 0, slots: Vec::new(), ahead: BTreeMap::new(), spare: Vec::new() }
    }

    /// Tokens whose keys and values are in the pages.
    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    /// The page that a cached one could fill now: only between pages.
    pub(crate) fn next_whole(&self) -> Option<usize> {
        self.computed.is_multiple_of(self.page_tokens).then_some(self.computed / self.page_tokens)
    }

    /// The pages, for the forward pass.
    pub(crate) fn slots_mut(&mut self) -> &mut [PageSlot] {
        &mut self.slots
    }

    /// Bytes of page `index`, if it is sealed.
    pub(crate) fn sealed(&self, index: usize) -> Option<&KvPage> {
        match self.slots.get(index)? {
            PageSlot::Sealed(page) => Some(page),
            PageSlot::Open(_) => None,
        }
    }

    /// Pages reserved and not used yet.
    pub(crate) fn spare_mut(&mut self) -> &mut Vec<KvPage> {
        &mut self.spare
    }

    /// Keeps a page for place `index` until the places before it are filled.
    pub(crate) fn put_ahead(&mut self, index: usize, page: Arc<KvPage>) {
        if index >= self.slots.len() {
            self.ahead.insert(index, page);
        }
    }

    /// Takes the page kept for place `index`.
    pub(crate) fn take_ahead(&mut self, index: usize) -> Option<Arc<KvPage>> {
        self.ahead.remove(&index)
    }

    /// Fills the next place with a whole page. Only between pages.
    pub(crate) fn push_sealed(&mut self, page: Arc<KvPage>) {
        debug_assert!(self.next_whole().is_some());
        for slot in self.slots.drain(self.computed / self.page_tokens..) {
            if let PageSlot::Open(page) = slot {
                self.spare.push(page);
            }
        }
        self.slots.push(PageSlot::Sealed(page));
        self.computed += self.page_tokens;
    }

    /// Tokens that can be computed in one go on the way to `target`: up to the next page that is there already.
    pub(crate) fn span(&self, target: usize) -> usize {
        let next = self.ahead.keys().next().map_or(target, |&index| index * self.page_tokens);
        target.min(next).saturating_sub(self.computed)
    }

    /// Makes places for `tokens` more tokens, from reserved pages and then from `allocate`; `false` if that has none left.
    pub(crate) fn make_room(&mut self, tokens: usize, mut allocate: impl FnMut() -> Option<KvPage>) -> bool {
        let needed = (self.computed + tokens).div_ceil(self.page_tokens);
        while self.slots.len() < needed {
            match self.spare.pop().or_else(&mut allocate) {
                Some(page) => self.slots.push(PageSlot::Open(page)),
                None => return false,
            }
        }
        true
    }

    /// Counts `tokens` as computed and seals the pages they completed; `adopt` may replace a page by an equal one.
    pub(crate) fn advance(
        &mut self,
        tokens: usize,
        mut adopt: impl FnMut(usize, Arc<KvPage>) -> Arc<KvPage>,
    ) -> Range<usize> {
        let first = self.computed / self.page_tokens;
        self.computed += tokens;
        let whole = self.computed / self.page_tokens;
        let tail = self.slots.split_off(first.min(self.slots.len()));
        for (index, slot) in (first..).zip(tail) {
            self.slots.push(match slot {
                PageSlot::Open(page) if index < whole => PageSlot::Sealed(adopt(index, Arc::new(page))),
                other => other,
            });
        }
        first..whole
    }

    /// Gives back reserved pages that a sequence of `target` tokens does not need.
    pub(crate) fn trim_spare(&mut self, target: usize) {
        let needed = target.div_ceil(self.page_tokens).saturating_sub(self.slots.len() + self.ahead.len());
        self.spare.truncate(needed);
    }

    /// Lets go of everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.page_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KvDtype, PageGeometry};
    use larder_model::KvPool;

    fn pool(pages: usize) -> Arc<KvPool> {
        let geometry = PageGeometry {
            dtype: KvDtype::F32,
            layers: 1,
            kv_heads: 1,
            head_dim: 2,
            page_tokens: 4,
            layers_per_part: 1,
            head_groups: 1,
        };
        KvPool::new(geometry, pages)
    }

    #[test]
    fn computes_around_pages_that_came_ahead() {
        let pool = pool(8);
        let mut pages = SequencePages::new(4);
        pages.put_ahead(1, Arc::new(pool.allocate().unwrap()));
        assert_eq!(pages.span(11), 4, "up to the page that is there");
        assert!(pages.make_room(4, || pool.allocate()));
        assert_eq!(pages.advance(4, |_, page| page), 0..1);
        assert_eq!(pages.next_whole(), Some(1));
        let page = pages.take_ahead(1).unwrap();
        pages.push_sealed(page);
        assert_eq!((pages.computed(), pages.span(11)), (8, 3));
        assert!(pages.make_room(3, || pool.allocate()));
        assert_eq!(pages.advance(3, |_, page| page), 2..2, "the last page is not whole");
        assert_eq!(pages.next_whole(), None);
        assert!(pages.sealed(1).is_some() && pages.sealed(2).is_none());
        pages.clear();
        assert_eq!(pool.free_pages(), 8);
    }

    #[test]
    fn room_comes_from_the_reserve_first_and_ends_with_the_pool() {
        let pool = pool(2);
        let mut pages = SequencePages::new(4);
        pages.spare_mut().push(pool.allocate().unwrap());
        assert!(pages.make_room(4, || panic!("the reserve has one")));
        assert!(!pages.make_room(9, || pool.allocate()));
        pages.clear();
        assert_eq!(pool.free_pages(), 2);
    }

    #[test]
    fn a_cached_page_takes_the_place_of_an_empty_open_one() {
        let pool = pool(4);
        let mut pages = SequencePages::new(4);
        assert!(pages.make_room(4, || pool.allocate()));
        pages.push_sealed(Arc::new(pool.allocate().unwrap()));
        assert_eq!((pages.slots_mut().len(), pages.spare_mut().len()), (1, 1));
        pages.trim_spare(4);
        assert_eq!(pool.free_pages(), 3);
    }
}
