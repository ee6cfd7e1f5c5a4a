//! The pages of one sequence and the progress of its computation.
//!
//! Invariants:
//! - `slots` holds the pages of the sequence from its start, without gaps.
//! - All whole pages below `computed` are sealed. Only the page that contains `computed` may be
//!   partly filled.
//! - Pages loaded for later positions wait in `loaded` until all positions before them are filled.

use larder_model::{KvPage, PageSlot, SealedPage};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub(crate) struct SequencePages {
    page_tokens: usize,
    computed: usize,
    slots: Vec<PageSlot>,
    loaded: BTreeMap<usize, Arc<SealedPage>>,
    reserved: Vec<KvPage>,
}

impl SequencePages {
    pub(crate) fn new(page_tokens: usize) -> Self {
        Self { page_tokens, computed: 0, slots: Vec::new(), loaded: BTreeMap::new(), reserved: Vec::new() }
    }

    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    /// Index of the page that a cached page could fill now. `None` within a partly computed page.
    pub(crate) fn next_page(&self) -> Option<usize> {
        self.computed.is_multiple_of(self.page_tokens).then_some(self.computed / self.page_tokens)
    }

    pub(crate) fn slots_mut(&mut self) -> &mut [PageSlot] {
        &mut self.slots
    }

    /// Page `index`, or `None` if it is absent or not sealed.
    pub(crate) fn sealed(&self, index: usize) -> Option<&Arc<SealedPage>> {
        match self.slots.get(index)? {
            PageSlot::Sealed(page) => Some(page),
            PageSlot::Open(_) => None,
        }
    }

    /// Whole pages with their indices: those in use, and those loaded for later positions.
    pub(crate) fn whole_pages(&self) -> impl Iterator<Item = (usize, &Arc<SealedPage>)> {
        let used = (0..self.slots.len()).filter_map(|index| Some((index, self.sealed(index)?)));
        used.chain(self.loaded.iter().map(|(&index, page)| (index, page)))
    }

    pub(crate) fn reserved_mut(&mut self) -> &mut Vec<KvPage> {
        &mut self.reserved
    }

    /// Keeps a loaded page for position `index`. Drops it if the position is filled already.
    pub(crate) fn add_loaded(&mut self, index: usize, page: Arc<SealedPage>) {
        // A filled position has an identical page already.
        if index >= self.slots.len() {
            self.loaded.insert(index, page);
        }
    }

    pub(crate) fn take_loaded(&mut self, index: usize) -> Option<Arc<SealedPage>> {
        self.loaded.remove(&index)
    }

    /// Fills the next position with a whole page. Must be called on a page boundary: an open page
    /// with content would be lost otherwise.
    pub(crate) fn push_sealed(&mut self, page: Arc<SealedPage>) {
        debug_assert!(self.next_page().is_some());
        // The open page at this position has no content. Reuse it later.
        for slot in self.slots.drain(self.computed / self.page_tokens..) {
            if let PageSlot::Open(page) = slot {
                self.reserved.push(page);
            }
        }
        self.slots.push(PageSlot::Sealed(page));
        self.computed += self.page_tokens;
    }

    /// Number of tokens to compute towards `target` before the next loaded page begins.
    pub(crate) fn span(&self, target: usize) -> usize {
        let next = self.loaded.keys().next().map_or(target, |&index| index * self.page_tokens);
        let end = target.min(next);
        debug_assert!(self.computed <= end, "computed past the target or a loaded page");
        end - self.computed
    }

    /// Adds slots for `tokens` more tokens, from reserved pages first and then from `allocate`.
    /// Returns `false` if `allocate` runs out. Slots added so far stay.
    pub(crate) fn ensure_capacity(&mut self, tokens: usize, mut allocate: impl FnMut() -> Option<KvPage>) -> bool {
        let needed = (self.computed + tokens).div_ceil(self.page_tokens);
        while self.slots.len() < needed {
            match self.reserved.pop().or_else(&mut allocate) {
                Some(page) => self.slots.push(PageSlot::Open(page)),
                None => return false,
            }
        }
        true
    }

    /// Counts `tokens` as computed and seals the pages that they complete. `seal` may return an
    /// identical page that is cached already. Returns the indices of the completed pages.
    pub(crate) fn advance(
        &mut self,
        tokens: usize,
        mut seal: impl FnMut(usize, KvPage) -> Arc<SealedPage>,
    ) -> Range<usize> {
        let first = self.computed / self.page_tokens;
        self.computed += tokens;
        let whole = self.computed / self.page_tokens;
        // Pages before the first affected one are sealed already.
        let tail = self.slots.split_off(first.min(self.slots.len()));
        for (index, slot) in (first..).zip(tail) {
            self.slots.push(match slot {
                PageSlot::Open(page) if index < whole => PageSlot::Sealed(seal(index, page)),
                other => other,
            });
        }
        first..whole
    }

    pub(crate) fn trim_reserved(&mut self, target: usize) {
        let needed = target.div_ceil(self.page_tokens).saturating_sub(self.slots.len() + self.loaded.len());
        self.reserved.truncate(needed);
    }

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

    fn seal(_index: usize, page: KvPage) -> Arc<SealedPage> {
        Arc::new(SealedPage::compute(page))
    }

    fn sealed(pool: &Arc<KvPool>) -> Arc<SealedPage> {
        seal(0, pool.allocate().unwrap())
    }

    #[test]
    fn computes_up_to_and_past_a_loaded_page() {
        let pool = pool(8);
        let mut pages = SequencePages::new(4);
        pages.add_loaded(1, sealed(&pool));
        assert_eq!(pages.span(11), 4, "up to the page that is there");
        assert!(pages.ensure_capacity(4, || pool.allocate()));
        assert_eq!(pages.advance(4, seal), 0..1);
        assert_eq!(pages.next_page(), Some(1));
        let page = pages.take_loaded(1).unwrap();
        pages.push_sealed(page);
        assert_eq!((pages.computed(), pages.span(11)), (8, 3));
        assert!(pages.ensure_capacity(3, || pool.allocate()));
        assert_eq!(pages.advance(3, seal), 2..2, "the last page is not whole");
        assert_eq!(pages.next_page(), None);
        assert!(pages.sealed(1).is_some() && pages.sealed(2).is_none());
        pages.clear();
        assert_eq!(pool.free_pages(), 8);
    }

    #[test]
    fn ensure_capacity_uses_reserved_pages_before_the_pool() {
        let pool = pool(2);
        let mut pages = SequencePages::new(4);
        pages.reserved_mut().push(pool.allocate().unwrap());
        assert!(pages.ensure_capacity(4, || panic!("the reserve has one")));
        assert!(!pages.ensure_capacity(9, || pool.allocate()));
        pages.clear();
        assert_eq!(pool.free_pages(), 2);
    }

    #[test]
    fn push_sealed_replaces_an_empty_open_page() {
        let pool = pool(4);
        let mut pages = SequencePages::new(4);
        assert!(pages.ensure_capacity(4, || pool.allocate()));
        pages.push_sealed(sealed(&pool));
        assert_eq!((pages.slots_mut().len(), pages.reserved_mut().len()), (1, 1));
        pages.trim_reserved(4);
        assert_eq!(pool.free_pages(), 3);
    }
}
