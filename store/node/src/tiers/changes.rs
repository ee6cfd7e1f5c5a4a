//! Change counters that tell whether the result of a lookup is still valid.

use larder_format::PageId;
use larder_runtime::sync::atomic::{AtomicU64, Ordering};

/// Number of counters. Pages that share a counter invalidate each other's lookups, which costs a
/// second lookup and never a wrong result. 4096 counters take 32 KiB, and a read of L3 that takes
/// 100 µs while 40,000 pages per second enter L2 loses its place in L2 once in a thousand times.
///
/// A thread model creates a node per schedule, and needs few.
const COUNTERS: usize = if cfg!(feature = "shuttle") { 16 } else { 4096 };

/// State of a page's change counter at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChangeStamp(u64);

/// Counts puts, loads and forgets, spread over [`COUNTERS`] counters by the page's id.
///
/// [`ChangeCounters::record`] runs under the lock of the tiers' state, in the critical section that
/// makes the change visible. A put that L2 refused is recorded once more without the lock, when it
/// can be found. [`ChangeCounters::stamp`] needs no lock.
pub(super) struct ChangeCounters(Box<[AtomicU64]>);

impl ChangeCounters {
    pub(super) fn new() -> ChangeCounters {
        ChangeCounters((0..COUNTERS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Returns the page's stamp. A lookup reads it before it probes any tier.
    pub(super) fn stamp(&self, id: &PageId) -> ChangeStamp {
        // Acquire pairs with the Release of `record`: a lookup that sees the new count also sees
        // the tiers as they were when the change was recorded.
        ChangeStamp(self.counter(id).load(Ordering::Acquire))
    }

    pub(super) fn record(&self, id: &PageId) {
        self.counter(id).fetch_add(1, Ordering::Release);
    }

    fn counter(&self, id: &PageId) -> &AtomicU64 {
        &self.0[spread(id) % COUNTERS]
    }
}

/// A number below 4096 that spreads pages over tables without a seed. Clients can choose keys with
/// equal numbers, which costs them speed.
pub(super) fn spread(id: &PageId) -> usize {
    // Every word counts: foreign engines bring keys that share a prefix. The multiplier is that of
    // FxHash; its high bits are the well mixed ones.
    let words = id.key.0.chunks_exact(8).chain(id.namespace.0.chunks_exact(8));
    let hash = words.fold(0u64, |hash, word| {
        let word = word.iter().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
        (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
    });
    (hash >> 52) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};
    use std::collections::BTreeSet;

    fn id(number: u32) -> PageId {
        let mut key = [0x61; 32];
        key[28..].copy_from_slice(&number.to_be_bytes());
        PageId { namespace: NamespaceId([7; 32]), key: PageKey(key) }
    }

    #[test]
    fn a_change_invalidates_stamps_of_its_page() {
        let changes = ChangeCounters::new();
        let before = changes.stamp(&id(1));
        assert_eq!(changes.stamp(&id(1)), before);
        changes.record(&id(1));
        assert_ne!(changes.stamp(&id(1)), before);
    }

    #[test]
    fn keys_with_a_common_prefix_use_most_counters() {
        let changes = ChangeCounters::new();
        let used: BTreeSet<usize> =
            (0..4 * COUNTERS as u32).map(|number| std::ptr::from_ref(changes.counter(&id(number))).addr()).collect();
        assert!(used.len() > COUNTERS * 9 / 10, "{}", used.len());
    }
}
