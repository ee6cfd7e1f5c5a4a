//! Best-fit allocator of extents in a range of numbered units.
//!
//! Invariants:
//! - Allocated extents never overlap.
//! - Free extents never touch each other: releasing merges neighbors. When everything is released,
//!   one free extent is left.
//! - Results depend on the history of calls alone. The smallest sufficient extent is taken, and of
//!   equal ones that at the lowest unit.
//!
//! Every operation takes time logarithmic in the number of free extents.

use std::collections::{BTreeMap, BTreeSet};

/// Set of free extents, indexed by start and by length.
#[derive(Debug, Clone)]
pub struct ExtentAllocator {
    units: u64,
    free_units: u64,
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl ExtentAllocator {
    /// Creates an allocator in which all of `0..units` is free.
    pub fn new(units: u64) -> Self {
        let mut new = Self { units, free_units: units, by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        if units > 0 {
            new.insert(0, units);
        }
        new
    }

    pub fn units(&self) -> u64 {
        self.units
    }

    pub fn free_units(&self) -> u64 {
        self.free_units
    }

    /// Returns the length of the longest free extent, in units.
    pub fn largest_free(&self) -> u64 {
        self.by_size.last().map_or(0, |&(len, _)| len)
    }

    /// Returns the number of free extents: 1 when nothing is allocated, 0 when there are no units.
    pub fn fragments(&self) -> usize {
        self.by_start.len()
    }

    /// Returns `true` if none of the `len` units from `start` is free.
    pub fn is_taken(&self, start: u64, len: u64) -> bool {
        let before_end = self.by_start.range(..start.saturating_add(len)).next_back();
        before_end.is_none_or(|(first, free)| first + free <= start)
    }

    /// Allocates `len` units and returns the first. Returns `None` if no free extent is long
    /// enough, or `len` is 0.
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

    /// Allocates exactly these units, which must be in one free extent. Returns `false` if they are
    /// not.
    pub fn take(&mut self, start: u64, len: u64) -> bool {
        let Some((&first, &free)) = self.by_start.range(..=start).next_back() else { return false };
        let (end, free_end) = (start + len, first + free);
        if len == 0 || end > free_end {
            return false;
        }
        self.remove(first, free);
        if first < start {
            self.insert(first, start - first);
        }
        if end < free_end {
            self.insert(end, free_end - end);
        }
        self.free_units -= len;
        true
    }

    /// Releases `len` units from `start`. They may be a part of an allocated extent.
    ///
    /// # Panics
    /// If some of them are free: the caller would give away memory of another owner.
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
    fn smallest_sufficient_extent_is_taken() {
        let mut allocator = ExtentAllocator::new(100);
        let parts: Vec<u64> = [10, 5, 10, 7, 68].iter().map(|&len| allocator.allocate(len).unwrap()).collect();
        allocator.release(parts[1], 5);
        allocator.release(parts[3], 7);
        assert_eq!(allocator.allocate(6), Some(parts[3]), "of 5, 7 and 68 units, 7 is the best fit");
        assert_eq!(allocator.allocate(5), Some(parts[1]));
        assert_eq!(allocator.allocate(2), None);
    }

    #[test]
    fn empty_or_oversized_requests_return_none() {
        assert_eq!(ExtentAllocator::new(0).allocate(1), None);
        assert_eq!(ExtentAllocator::new(4).allocate(0), None);
        assert_eq!(ExtentAllocator::new(4).allocate(5), None);
    }

    #[test]
    fn exact_units_are_taken_only_if_all_are_free() {
        let mut allocator = ExtentAllocator::new(10);
        assert!(allocator.take(4, 2));
        assert_eq!((allocator.free_units(), allocator.largest_free(), allocator.fragments()), (8, 4, 2));
        for (start, len) in [(3, 2), (5, 1), (9, 2), (10, 1), (0, 0)] {
            assert!(!allocator.take(start, len), "{len} from {start}");
        }
        assert!(allocator.take(0, 4) && allocator.take(6, 4));
        assert_eq!((allocator.free_units(), allocator.allocate(1)), (0, None));
        allocator.release(0, 10);
        assert_eq!(allocator.fragments(), 1);
    }

    #[test]
    #[should_panic(expected = "was taken")]
    fn double_release_panics() {
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
                        prop_assert!(longest.unwrap_or(0) < len as usize, "refused although it fits");
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
