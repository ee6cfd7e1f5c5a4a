//! Epoch and reads in flight of each segment, which readers use without the lock of the log.

use larder_runtime::fail_point;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Flag of a segment whose reclaim waits for the last read.
const AWAITED: u32 = 1 << 31;

/// Epoch of a segment, and the number of reads in flight with the flag [`AWAITED`].
///
/// A read begins under the lock of a shard of the index, and ends without a lock: the thread that
/// completes I/O must not wait.
#[derive(Default)]
struct Reads {
    epoch: AtomicU64,
    in_flight: AtomicU32,
}

pub(super) struct SegmentReads(Box<[Reads]>);

impl SegmentReads {
    /// For segments with numbers below `segments`.
    pub(super) fn new(segments: usize) -> SegmentReads {
        SegmentReads((0..segments).map(|_| Reads::default()).collect())
    }

    fn of(&self, segment: u32) -> &Reads {
        &self.0[segment as usize]
    }

    /// Begins an epoch of a segment. No page of it is in the index yet.
    pub(super) fn begin_epoch(&self, segment: u32, epoch: u64) {
        let reads = self.of(segment);
        reads.in_flight.fetch_and(!AWAITED, Ordering::Relaxed);
        // Relaxed, as above: readers learn of the epoch from an entry, and so after its insertion.
        reads.epoch.store(epoch, Ordering::Relaxed);
    }

    /// Epoch of a segment that an entry of the index names. The caller shares the entry's shard.
    pub(super) fn epoch(&self, segment: u32) -> u64 {
        self.of(segment).epoch.load(Ordering::Relaxed)
    }

    /// Begins a read of a page. The caller shares the shard of its entry.
    pub(super) fn begin(&self, segment: u32) {
        // Relaxed: the lock of the shard orders it before the eviction of the page, and so before
        // the check of a reclaim.
        let before = self.of(segment).in_flight.fetch_add(1, Ordering::Relaxed);
        assert!(before & !AWAITED < AWAITED - 1, "more reads in flight than the counter holds");
    }

    /// Returns `true` if a reclaim waited for this read.
    pub(super) fn end(&self, segment: u32) -> bool {
        // Release: the device is done with the segment before the reclaim sees the count.
        let before = self.of(segment).in_flight.fetch_sub(1, Ordering::AcqRel);
        assert!(before & !AWAITED > 0, "a read ended that was not begun");
        before == AWAITED | 1
    }

    /// Lets the last read in flight report its end, because a reclaim waits for it. Returns `true`
    /// if there is none.
    pub(super) fn await_end(&self, segment: u32) -> bool {
        // Acquire pairs with the release in `end`. In one step: a read that ends later reports it.
        let before = self.of(segment).in_flight.fetch_or(AWAITED, Ordering::AcqRel);
        before & !AWAITED == 0 || fail_point!("log.reuse-segment-under-read")
    }

    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

impl fmt::Debug for SegmentReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentReads").field("segments", &self.0.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_read_reports_its_end_only_to_a_reclaim_that_waits() {
        let reads = SegmentReads::new(2);
        reads.begin_epoch(1, 7);
        reads.begin(1);
        assert!(!reads.end(1));
        reads.begin(1);
        reads.begin(1);
        assert!(!reads.await_end(1) && !reads.end(1) && !reads.await_end(1));
        assert!(reads.end(1) && reads.await_end(1));
        reads.begin_epoch(1, 8);
        reads.begin(1);
        assert!(!reads.end(1) && reads.epoch(1) == 8, "no reclaim of the new epoch waits");
    }
}
