//! Generations of a node: numbers of its puts, which also order its forgets.
//!
//! A client may put a copy of a page long after it read the page. It states the generation of the
//! page that it copied. The node refuses the copy if the page was forgotten after that generation.
//!
//! Invariants:
//! - Numbers grow and never repeat on a node: see `identity`. The node gives no number beyond the
//!   last one for which an identity is stored.
//! - A forget that was recorded is never lost while the node runs: see `forgets`.
//! - The table knows no forget of earlier runs. Clients therefore state a generation only in the
//!   run in which they read it.

use super::FORGETS_AT_ONCE;
use super::forgets::{Forgets, Table};
use crate::places::Peer;
use larder_format::PageId;

pub(super) struct Generations {
    next: u64,
    /// The node gives numbers below this one.
    end: u64,
    forgets: Forgets,
}

impl Generations {
    /// Begins with the number `first`, and ends before `end`.
    pub(super) fn new(first: u64, end: u64, hash_seed: u64) -> Self {
        Self { next: first, end, forgets: Forgets::new(hash_seed) }
    }

    /// Takes the next number. `None` until [`Generations::extend`] allows more.
    pub(super) fn next(&mut self) -> Option<u64> {
        let generation = self.next;
        self.next += u64::from(generation < self.end);
        (generation < self.end).then_some(generation)
    }

    pub(super) fn has_next(&self) -> bool {
        self.next < self.end
    }

    /// Numbers that are left.
    pub(super) fn left(&self) -> u64 {
        self.end - self.next
    }

    /// Allows all numbers below `end`.
    pub(super) fn extend(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// Records that these pages are forgotten now, by a client of `peer`, at most
    /// [`FORGETS_AT_ONCE`]. Puts from here on are newer. To free what it returns may take long.
    #[must_use]
    pub(super) fn record_forget(&mut self, peer: Peer, ids: &[PageId]) -> Vec<Table> {
        assert!(ids.len() <= FORGETS_AT_ONCE, "{} forgets under one lock", ids.len());
        // The number of the next put: greater than those of all earlier puts, and of no later one.
        ids.iter().filter_map(|id| self.forgets.record(peer, id, self.next)).collect()
    }

    /// Returns `true` if a forget of the page is recorded.
    pub(super) fn has_forgotten(&self, id: &PageId) -> bool {
        self.forgets.has(id)
    }

    /// Returns `true` unless the node can prove that the page was not forgotten after `generation`.
    pub(super) fn is_forgotten_since(&self, id: &PageId, generation: u64) -> bool {
        // The node has not given these numbers, so they prove nothing.
        let is_foreign = generation == 0 || generation >= self.next;
        is_foreign || self.forgets.is_forgotten_since(id, generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};

    fn id(number: u32) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
    }

    #[test]
    fn copies_are_ordered_with_forgets() {
        let mut generations = Generations::new(100, 200, 7);
        let before = generations.next().unwrap();
        assert!(!generations.is_forgotten_since(&id(1), before));
        assert!(generations.record_forget(Peer::Local, &[id(1), id(2)]).is_empty());
        let after = generations.next().unwrap();
        assert!(generations.is_forgotten_since(&id(1), before) && generations.is_forgotten_since(&id(2), before));
        assert!(!generations.is_forgotten_since(&id(1), after), "put after the forget");
        assert!(!generations.is_forgotten_since(&id(3), before), "another page");
        assert!(!generations.is_forgotten_since(&id(3), 5), "read from L3, which an earlier run wrote");
    }

    #[test]
    fn unknown_and_future_generations_count_as_forgotten() {
        let mut generations = Generations::new(100, 200, 7);
        assert!(generations.is_forgotten_since(&id(1), 0) && generations.is_forgotten_since(&id(1), 100));
        assert_eq!(generations.next(), Some(100));
        assert!(!generations.is_forgotten_since(&id(1), 100));
    }

    #[test]
    fn numbers_end_until_more_are_allowed() {
        let mut generations = Generations::new(100, 102, 7);
        assert_eq!([generations.next(), generations.next(), generations.next()], [Some(100), Some(101), None]);
        assert!(!generations.has_next() && generations.left() == 0);
        generations.extend(101);
        assert_eq!(generations.next(), None, "no number twice");
        generations.extend(103);
        assert_eq!([generations.next(), generations.next()], [Some(102), None]);
    }
}
