//! An allocator of extents in a range of numbered units.
//!
//! Always true: extents handed out never overlap; free extents never touch each other (neighbours are merged when they
//! are released), so when everything is released one extent is free again. Every step takes time logarithmic in the
//! number of free extents. It decides by its own history alone: the smallest free extent that is large enough, and
//! of several the one at the lowest unit.

use std::collections::{BTreeMap, BTreeSet};

/// Hands out runs of units and takes them back.
#[derive(Debug, Clone)]
pub struct ExtentAllocator {
    units: u64,
    free_units: u64,
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl ExtentAllocator {
    /// All of `0..units` is free.
    pub fn new(units: u64) -> Self {
        let mut new = Self { units, free_units: units, by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        if units > 0 {
            new.insert(0, units);
        }
        new
    }

    /// Units in all.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Units that are free.
    pub fn free_units(&self) -> u64 {
        self.free_units
    }

    /// The longest extent that could be handed out now, in units.
    pub fn largest_free(&self) -> u64 {
        self.by_size.last().map_or(0, |&(len, _)| len)
    }

    /// Free extents: 1 when nothing is handed out (or 0 if there are no units at all).
    pub fn fragments(&self) -> usize {
        self.by_start.len()
    }

    /// Whether none of the `len` units from `start` is free.
    pub fn is_taken(&self, start: u64, len: u64) -> bool {
        let before_end = self.by_start.range(..start.saturating_add(len)).next_back();
        before_end.is_none_or(|(first, free)| first + free <= start)
    }

    /// Takes `len` units; the first of them is returned. `None` if no free extent is that long, or `len` is 0.
    pub fn allocate(&mut self, len: u64) -> Option<u64> {
        if len == 0 {
            return None;
        }
        let &(found, start) = self.by_size.range((len, 0)..).next()?;
        self.remove(start, found);
        if found > len {
            self.insert(start + len, found - len);
        }
        self.free_units -= len;
        Some(start)
    }

    /// Gives `len` units back that begin at `start`. They may be part of what was taken at once.
    ///
    /// # Panics
    /// If some of them are not taken: the caller would give away memory that another owner holds.
    pub fn release(&mut self, start: u64, len: u64) {
        let end = start + len;
        assert!(len > 0 && end <= self.units, "released extent lies in the range");
        assert!(self.is_taken(start, len), "released extent was taken");
        let before = self.by_start.range(..=start).next_back().map(|(&s, &l)| (s, l));
        let after = self.by_start.range(start..).next().map(|(&s, &l)| (s, l));
        let (mut first, mut last) = (start, end);
        if let Some((s, l)) = before.filter(|&(s, l)| s + l == start) {
            self.remove(s, l);
            first = s;
        }
        if let Some((s, l)) = after.filter(|&(s, _)| s == end) {
            self.remove(s, l);
            last = s + l;
        }
        self.insert(first, last - first);
        self.free_units += len;
    }

    fn insert(&mut self, start: u64, len: u64) {
        self.by_start.insert(start, len);
        self.by_size.insert((len, start));
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_best_fit_is_taken() {
        let mut allocator = ExtentAllocator::new(100);
        let parts: Vec<u64> = [10, 5, 10, 7, 68].iter().map(|&len| allocator.allocate(len).unwrap()).collect();
        allocator.release(parts[1], 5);
        allocator.release(parts[3], 7);
        assert_eq!(allocator.allocate(6), Some(parts[3]), "7 fits better than nothing else, 5 is too short");
        assert_eq!(allocator.allocate(5), Some(parts[1]));
        assert_eq!(allocator.allocate(2), None);
    }

    #[test]
    fn nothing_is_handed_out_of_nothing() {
        assert_eq!(ExtentAllocator::new(0).allocate(1), None);
        assert_eq!(ExtentAllocator::new(4).allocate(0), None);
        assert_eq!(ExtentAllocator::new(4).allocate(5), None);
    }

    #[test]
    #[should_panic(expected = "was taken")]
    fn a_double_release_is_refused() {
        let mut allocator = ExtentAllocator::new(8);
        let start = allocator.allocate(4).unwrap();
        allocator.release(start, 4);
        allocator.release(start, 4);
    }

    proptest! {
        #[test]
        fn extents_never_overlap_and_merge_again(steps in prop::collection::vec((any::<bool>(), 1u64..40, any::<prop::sample::Index>()), 1..300)) {
            let mut allocator = ExtentAllocator::new(256);
            let mut owner = [None::<usize>; 256];
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (turn, (take, len, which)) in steps.into_iter().enumerate() {
                if take {
                    let longest = owner.chunk_by(|a, b| a.is_none() == b.is_none()).filter(|run| run[0].is_none()).map(<[_]>::len).max();
                    prop_assert_eq!(allocator.largest_free(), longest.unwrap_or(0) as u64);
                    let Some(start) = allocator.allocate(len) else {
                        prop_assert!(longest.unwrap_or(0) < len as usize, "refused though it fits");
                        continue;
                    };
                    for unit in &mut owner[start as usize..(start + len) as usize] {
                        prop_assert!(unit.replace(turn).is_none(), "overlap");
                    }
                    held.push((start, len));
                } else if !held.is_empty() {
                    let (start, len) = held.swap_remove(which.index(held.len()));
                    allocator.release(start, len);
                    owner[start as usize..(start + len) as usize].fill(None);
                }
                prop_assert_eq!(allocator.free_units(), owner.iter().filter(|unit| unit.is_none()).count() as u64);
                let (from, to) = (which.index(250), which.index(250) + len.min(6) as usize);
                let taken = owner[from..to].iter().all(Option::is_some);
                prop_assert_eq!(allocator.is_taken(from as u64, (to - from) as u64), taken);
            }
            for (start, len) in held {
                allocator.release(start, len);
            }
            prop_assert_eq!((allocator.fragments(), allocator.free_units(), allocator.largest_free()), (1, 256, 256));
        }
    }
}
