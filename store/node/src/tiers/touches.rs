//! Hits of pages in L2 that the order of eviction has yet to learn of.
//!
//! A hit must not wait for the `state` lock, which puts hold while they evict. So it queues a
//! touch. The next thread that takes the lock to decide something applies all touches first. A hit
//! that finds its queue half full applies some of them itself, if the lock is free.
//!
//! Invariants:
//! - A queue has at most [`QUEUE_TOUCHES`] entries. A touch beyond them is dropped and counted: the
//!   order of eviction is then based on a sample.
//! - A hit applies at most [`TOUCHES_PER_HIT`] touches, and a batch of hits as many for each. So no
//!   hit pays for many others, and only a lock that is taken makes touches pile up.
//! - Touches name pages without keeping their memory.
//! - The touches of one thread are applied in their order. With one thread, as in a simulation,
//!   that is the order of all hits.

use larder_runtime::sync::Mutex;
use larder_runtime::sync::atomic::{AtomicUsize, Ordering};
use std::cell::Cell;
use std::collections::VecDeque;

/// A decision may have to apply all of them, at about 0.7 µs each (record 0012).
const QUEUE_TOUCHES: usize = 32;
const QUEUES: usize = 8;
/// Touches that a hit applies for the thread's earlier hits: the lock's cost is shared by as many,
/// and the hit takes about 5 µs longer.
const TOUCHES_PER_HIT: usize = 2;

/// A hit of one put of a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Touch {
    /// Hash of the page's id, as the policy has it.
    pub(super) hash: u64,
    pub(super) generation: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recorded {
    Queued,
    /// Queued. The caller should apply some touches: [`TouchQueues::take_some`].
    Due,
    Dropped,
}

/// Aligned to two cache lines, which the processor loads together: threads use different queues.
#[repr(align(128))]
#[derive(Default)]
struct Queue {
    /// Length, so that an empty queue is skipped without its lock.
    length: AtomicUsize,
    /// A leaf lock, held for one push or one copy.
    touches: Mutex<VecDeque<Touch>>,
}

impl Queue {
    fn take(&self, most: usize, into: &mut Vec<Touch>) {
        // Relaxed: a caller that misses a touch finds it the next time.
        if self.length.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut touches = self.touches.lock();
        let count = most.min(touches.len());
        into.extend(touches.drain(..count));
        self.length.store(touches.len(), Ordering::Relaxed);
    }
}

#[derive(Default)]
pub(super) struct TouchQueues([Queue; QUEUES]);

impl TouchQueues {
    pub(super) fn record(&self, touch: Touch) -> Recorded {
        let queue = &self.0[queue_of_thread()];
        let mut touches = queue.touches.lock();
        if touches.len() >= QUEUE_TOUCHES {
            return Recorded::Dropped;
        }
        touches.push_back(touch);
        queue.length.store(touches.len(), Ordering::Relaxed);
        if touches.len() >= QUEUE_TOUCHES / 2 { Recorded::Due } else { Recorded::Queued }
    }

    /// Moves all touches to `into`, one queue after the other.
    pub(super) fn take_all(&self, into: &mut Vec<Touch>) {
        self.0.iter().for_each(|queue| queue.take(QUEUE_TOUCHES, into));
    }

    /// Moves the oldest touches of the calling thread's queue to `into`, on behalf of so many hits.
    pub(super) fn take_some(&self, hits: usize, into: &mut Vec<Touch>) {
        self.0[queue_of_thread()].take(hits.saturating_mul(TOUCHES_PER_HIT), into);
    }
}

/// Queue of the calling thread. The choice affects only speed: the touches of one thread share a
/// queue.
fn queue_of_thread() -> usize {
    // Not of a model: a static outlives its schedules.
    static THREADS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    thread_local! {
        static QUEUE: Cell<Option<usize>> = const { Cell::new(None) };
    }
    QUEUE.with(|queue| match queue.get() {
        Some(number) => number,
        None => {
            let number = THREADS.fetch_add(1, Ordering::Relaxed) % QUEUES;
            queue.set(Some(number));
            number
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touches_of_a_thread_stay_in_order_and_those_beyond_the_bound_are_dropped() {
        let queues = TouchQueues::default();
        let touch = |number: usize| Touch { hash: number as u64, generation: 1 };
        let recorded: Vec<Recorded> = (0..QUEUE_TOUCHES + 1).map(|number| queues.record(touch(number))).collect();
        let count = |outcome| recorded.iter().filter(|&&one| one == outcome).count();
        assert_eq!((count(Recorded::Queued), count(Recorded::Dropped)), (QUEUE_TOUCHES / 2 - 1, 1));
        let mut taken = Vec::new();
        queues.take_some(1, &mut taken);
        assert_eq!(taken.len(), TOUCHES_PER_HIT);
        assert_eq!(queues.record(touch(QUEUE_TOUCHES)), Recorded::Due, "there is room again");
        queues.take_all(&mut taken);
        assert_eq!(
            taken.iter().map(|touch| touch.hash).collect::<Vec<_>>(),
            (0..=QUEUE_TOUCHES as u64).collect::<Vec<_>>()
        );
    }
}
