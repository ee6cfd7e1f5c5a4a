//! The newest batches of events, numbered, for all subscribers together.
//!
//! Invariants:
//! - Numbers are consecutive and begin at 0. A batch never changes.
//! - The kept batches take at most [`KEPT_BYTES_MAX`]. The oldest go first, even if a
//!   subscriber still needs them.
//! - A subscriber has no queue of its own. It reads batches from here, and misses those that went
//!   before it came.

use crate::event_limits::KEPT_BYTES_MAX;
use bytes::Bytes;
use larder_runtime::OrderedWatch;
use larder_runtime::sync::Mutex;
use std::collections::VecDeque;
use std::ops::Range;

/// Memory of a batch beside its bytes: its entry and the allocator's share.
const BATCH_COST_BYTES: usize = 96;

#[derive(Default)]
pub(super) struct Batches {
    kept: Mutex<Kept>,
    /// Number of the next batch.
    next: OrderedWatch<u64>,
}

#[derive(Default)]
struct Kept {
    batches: VecDeque<Bytes>,
    bytes: usize,
    next: u64,
}

impl Kept {
    fn numbers(&self) -> Range<u64> {
        self.next - self.batches.len() as u64..self.next
    }
}

impl Batches {
    /// Appends a batch and wakes the subscribers.
    pub(super) fn append(&self, batch: Vec<u8>) {
        let mut kept = self.kept.lock();
        kept.bytes += batch.len() + BATCH_COST_BYTES;
        kept.batches.push_back(batch.into());
        kept.next += 1;
        while kept.bytes > KEPT_BYTES_MAX
            && let Some(oldest) = kept.batches.pop_front()
        {
            kept.bytes -= oldest.len() + BATCH_COST_BYTES;
        }
        let next = kept.next;
        drop(kept);
        self.next.update(|number| *number = next);
    }

    /// Numbers of the kept batches.
    pub(super) fn numbers(&self) -> Range<u64> {
        self.kept.lock().numbers()
    }

    /// Returns the oldest kept batch with this number or a larger one.
    pub(super) fn since(&self, number: u64) -> Option<(u64, Bytes)> {
        let kept = self.kept.lock();
        let first = kept.numbers().start;
        let number = number.max(first);
        let batch = kept.batches.get(usize::try_from(number - first).ok()?)?;
        Some((number, batch.clone()))
    }

    /// Waits until the batch with this number was appended.
    pub(super) async fn wait_for(&self, number: u64) {
        self.next.wait_for(|&next| (next > number).then_some(())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_their_numbers_when_older_ones_go() {
        let batches = Batches::default();
        assert_eq!((batches.numbers(), batches.since(0)), (0..0, None));
        batches.append(vec![1]);
        batches.append(vec![2]);
        assert_eq!(batches.since(0), Some((0, Bytes::from_static(&[1]))));
        assert_eq!(batches.since(1), Some((1, Bytes::from_static(&[2]))));
        assert_eq!((batches.since(2), batches.since(u64::MAX)), (None, None));
        for _ in 0..20 {
            batches.append(vec![3; 1 << 20]);
        }
        let kept = batches.numbers();
        assert_eq!((kept.start > 2, kept.end), (true, 22));
        assert!(batches.kept.lock().bytes <= KEPT_BYTES_MAX);
        assert_eq!(batches.since(0).map(|(number, _)| number), Some(kept.start));
        assert_eq!(batches.since(21).map(|(_, batch)| batch.len()), Some(1 << 20));
    }
}
