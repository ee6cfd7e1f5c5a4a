//! Places of pages in the memory of a device.
//!
//! Invariants:
//! - A place holds at most one version of a page, and a version has at most one place.
//! - A page that the present pass uses keeps its place until the next pass.
//! - Of the others, the page of the longest ago pass gives up its place first.

use crate::kv::PageVersion;
use std::collections::{BTreeSet, HashMap};

#[derive(Debug)]
pub(super) struct Places {
    of_page: HashMap<PageVersion, u32>,
    /// Per place: its page, and the last pass that used it.
    held: Vec<(Option<PageVersion>, u64)>,
    /// All places by the last pass that used them.
    by_use: BTreeSet<(u64, u32)>,
    pass: u64,
}

impl Places {
    pub(super) fn new(count: u32) -> Places {
        Places {
            of_page: HashMap::new(),
            held: vec![(None, 0); count as usize],
            by_use: (0..count).map(|place| (0, place)).collect(),
            pass: 0,
        }
    }

    pub(super) fn count(&self) -> usize {
        self.held.len()
    }

    pub(super) fn begin_pass(&mut self) {
        self.pass += 1;
    }

    /// Place of a page for the present pass, and `true` if its content is there already. `None` if
    /// pages of this pass hold all places.
    pub(super) fn take(&mut self, page: PageVersion) -> Option<(u32, bool)> {
        if let Some(&place) = self.of_page.get(&page) {
            self.mark(place);
            return Some((place, true));
        }
        let &(used, place) = self.by_use.first()?;
        if used == self.pass {
            return None;
        }
        if let Some(old) = self.held[place as usize].0.replace(page) {
            self.of_page.remove(&old);
        }
        self.of_page.insert(page, place);
        self.mark(place);
        Some((place, false))
    }

    /// Forgets all content.
    pub(super) fn clear(&mut self) {
        *self = Places { pass: self.pass, ..Places::new(self.held.len() as u32) };
    }

    fn mark(&mut self, place: u32) {
        let used = &mut self.held[place as usize].1;
        self.by_use.remove(&(*used, place));
        *used = self.pass;
        self.by_use.insert((*used, place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvPool;
    use larder_format::{KvDtype, PageGeometry};

    #[test]
    fn pages_of_the_present_pass_keep_their_places_and_the_oldest_leaves_first() {
        let geometry = PageGeometry {
            dtype: KvDtype::F32,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
            page_tokens: 1,
            layers_per_part: 1,
            head_groups: 1,
        };
        let pool = KvPool::new(geometry, 4);
        let mut pages: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        let [a, b, c, d] = [0, 1, 2, 3].map(|index: usize| pages[index].version());
        let mut places = Places::new(2);
        places.begin_pass();
        let (first, second) = (places.take(a).unwrap(), places.take(b).unwrap());
        assert!(!first.1 && !second.1 && first.0 != second.0);
        assert_eq!(places.take(c), None, "both are in use");
        places.begin_pass();
        assert_eq!(places.take(b), Some((second.0, true)));
        places.begin_pass();
        assert_eq!(places.take(c), Some((first.0, false)), "the place of a, which was used first");
        assert_eq!(places.take(d), Some((second.0, false)));
        places.begin_pass();
        assert_eq!(places.take(a).map(|taken| taken.1), Some(false));
        // A page that the host has changed is another one.
        places.begin_pass();
        assert_eq!(places.take(d), Some((second.0, true)));
        pages[3].as_mut()[0] = 1;
        assert_ne!(pages[3].version(), d);
        assert_eq!(places.take(pages[3].version()).map(|taken| taken.1), Some(false));
        places.begin_pass();
        places.clear();
        assert_eq!(places.take(d).map(|taken| taken.1), Some(false));
    }
}
