//! Generations of a node: numbers of its puts, which also order its forgets.
//!
//! A client may put a copy of a page long after it read the page. It states the generation of the
//! page that it copied. The node refuses the copy if the page was forgotten after that generation.
//!
//! Invariants:
//! - Numbers grow and never repeat on a node: see `identity`.
//! - A forget that this table has recorded is never lost while the node runs. So the check is exact
//!   about forgets, and errs only towards refusal: a refused copy costs a computation.
//! - The table knows no forget of earlier runs. Clients therefore state a generation only in the
//!   run in which they read it.

use larder_format::PageId;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Slots for forgets. Pages that share a slot share their latest forget: with 10,000 forgets, 1 %
/// of the older copies are refused without need. 8 MiB, which the system provides as it is touched.
const SLOTS: usize = 1 << 20;

pub(super) struct Generations {
    next: u64,
    /// By the hash of a page: number of the first put after the latest forget in this slot, or 0.
    forgotten: Vec<u64>,
}

impl Generations {
    pub(super) fn new(first: u64) -> Self {
        Self { next: first, forgotten: vec![0; SLOTS] }
    }

    pub(super) fn next(&mut self) -> u64 {
        let generation = self.next;
        self.next += 1;
        generation
    }

    /// Records that these pages are forgotten now. Puts from here on are newer.
    pub(super) fn record_forget(&mut self, ids: &[PageId]) {
        // The number of the next put: greater than those of all earlier puts, and of no later one.
        for id in ids {
            self.forgotten[slot(id)] = self.next;
        }
    }

    /// Returns `true` unless the node can prove that the page was not forgotten after `generation`.
    pub(super) fn is_forgotten_since(&self, id: &PageId, generation: u64) -> bool {
        // The node has not given these numbers, so they prove nothing.
        let is_foreign = generation == 0 || generation >= self.next;
        is_foreign || self.forgotten[slot(id)] > generation
    }
}

fn slot(id: &PageId) -> usize {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    // The remainder fits in memory, so it fits a usize.
    (hasher.finish() % SLOTS as u64) as usize
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
        let mut generations = Generations::new(100);
        let before = generations.next();
        assert!(!generations.is_forgotten_since(&id(1), before));
        generations.record_forget(&[id(1), id(2)]);
        let after = generations.next();
        assert!(generations.is_forgotten_since(&id(1), before) && generations.is_forgotten_since(&id(2), before));
        assert!(!generations.is_forgotten_since(&id(1), after), "put after the forget");
        assert!(!generations.is_forgotten_since(&id(3), before), "another page");
        assert!(!generations.is_forgotten_since(&id(3), 5), "read from L3, which an earlier run wrote");
    }

    #[test]
    fn unknown_and_future_generations_count_as_forgotten() {
        let mut generations = Generations::new(100);
        assert!(generations.is_forgotten_since(&id(1), 0) && generations.is_forgotten_since(&id(1), 100));
        assert_eq!(generations.next(), 100);
        assert!(!generations.is_forgotten_since(&id(1), 100));
    }

    #[test]
    fn ten_thousand_forgets_refuse_few_other_copies() {
        let mut generations = Generations::new(100);
        let copied = generations.next();
        generations.record_forget(&(0..10_000).map(id).collect::<Vec<_>>());
        let refused = (10_000..20_000).filter(|&number| generations.is_forgotten_since(&id(number), copied)).count();
        assert!(refused < 300, "{refused} of 10,000 copies");
        assert!((0..10_000).all(|number| generations.is_forgotten_since(&id(number), copied)));
    }
}
