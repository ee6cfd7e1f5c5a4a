//! Pages with a write to L3 in flight.
//!
//! Invariants:
//! - A page stays readable here until its write ends, whether or not L2 keeps it.
//! - A withheld page is never served from here, although its write continues.

use super::changes::spread;
use crate::page::Page;
use larder_format::{NamespaceId, PageId};
use larder_runtime::sync::atomic::{AtomicU64, Ordering};
use larder_runtime::sync::{MODELLED, Mutex, MutexGuard};
use larder_runtime::{OrderedWatch, fail_point, now};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Becomes `true` when the write has ended, successfully or not.
pub(super) type WriteEnded = Arc<OrderedWatch<bool>>;

/// Identifies one write: page, generation of the put, and serial number of the write.
///
/// The generation alone is not enough. A page that L3 loses at once is written again while the
/// first write still runs.
pub(super) type WriteTicket = (PageId, u64, u64);

struct PendingWrite {
    page: Arc<Page>,
    ended: WriteEnded,
    since: Instant,
    /// Bytes in flight at the begin of the write, with its own.
    queued_bytes: u64,
    /// True after the page was forgotten or found damaged.
    withheld: bool,
}

type PendingWrites = BTreeMap<WriteTicket, PendingWrite>;

/// Number of shards. Each lookup that L2 cannot answer takes the lock of one, and a thread that
/// finds it taken sleeps for longer than the lookup takes.
const SHARDS: usize = if MODELLED { 2 } else { 64 };

/// Weight of a new sample in a mean, as a divisor.
const MEAN_WEIGHT: u64 = 8;

/// Bytes being written to L3, and the pace of the writes. The budget for puts reads them for each
/// reservation, hence without a lock.
#[derive(Debug, Default)]
pub(crate) struct WriteLoad {
    bytes: AtomicU64,
    /// Bytes of all writes that have begun.
    begun_bytes: AtomicU64,
    /// Mean time of a write. 0 before the first write has ended.
    mean_us: AtomicU64,
    /// Mean of the bytes in flight at the begin of a write, with its own. Writes end about in the
    /// order of their begins, so the device wrote as many in the time of the write.
    mean_queued_bytes: AtomicU64,
}

impl WriteLoad {
    /// Records the begin of a write. Returns the bytes in flight with it, for
    /// [`WriteLoad::record_end`].
    pub(crate) fn record_begin(&self, bytes: u32) -> u64 {
        let bytes = u64::from(bytes);
        // Relaxed, here and below: the policy enforces the bound, and readers want an estimate.
        self.begun_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    /// Records the end of a write that took `time`. `queued_bytes` were in flight at its begin.
    pub(crate) fn record_end(&self, bytes: u32, queued_bytes: u64, time: Duration) {
        self.bytes.fetch_sub(bytes.into(), Ordering::Relaxed);
        add_sample(&self.mean_us, time.as_micros());
        add_sample(&self.mean_queued_bytes, queued_bytes.into());
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn begun_bytes(&self) -> u64 {
        self.begun_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that the devices write per second. `None` before the first write has ended.
    ///
    /// The ratio of two means: a small write with nothing ahead takes the latency of the device,
    /// and says little about the rate.
    pub(crate) fn bytes_per_second(&self) -> Option<f64> {
        let us = self.mean_us.load(Ordering::Relaxed);
        (us > 0).then(|| self.mean_queued_bytes.load(Ordering::Relaxed) as f64 * 1e6 / us as f64)
    }

    /// Returns the bytes in flight, and the mean time of a write once one has ended.
    pub(crate) fn load(&self) -> (u64, Option<Duration>) {
        let mean = Some(self.mean_us.load(Ordering::Relaxed)).filter(|&us| us > 0);
        (self.bytes(), mean.map(Duration::from_micros))
    }
}

/// Adds a sample to a mean that is 0 before the first one.
fn add_sample(mean: &AtomicU64, sample: u128) {
    let sample = u64::try_from(sample).unwrap_or(u64::MAX).max(1);
    // A concurrent sample may be lost, which a mean tolerates.
    let next = match mean.load(Ordering::Relaxed) {
        0 => sample,
        mean => (mean / MEAN_WEIGHT * (MEAN_WEIGHT - 1)).saturating_add(sample / MEAN_WEIGHT).max(1),
    };
    mean.store(next, Ordering::Relaxed);
}

/// Table of all writes to L3 that are in flight. Readers find a page here after L2 has evicted it
/// and before L3 has it.
pub(super) struct WritebackTable {
    /// Leaf locks: see the lock order in [`crate::tiers`]. All writes of a page are in one shard.
    shards: Box<[Mutex<PendingWrites>]>,
    serial_last: AtomicU64,
    load: Arc<WriteLoad>,
}

impl Default for WritebackTable {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        WritebackTable { shards, serial_last: AtomicU64::new(0), load: Arc::default() }
    }
}

impl WritebackTable {
    pub(super) fn load(&self) -> &Arc<WriteLoad> {
        &self.load
    }

    fn shard(&self, id: &PageId) -> MutexGuard<'_, PendingWrites> {
        self.shards[spread(id) % SHARDS].lock()
    }

    /// Enters a write. The caller must pass the ticket to [`WritebackTable::end`], whether or not
    /// the write succeeds.
    pub(super) fn begin(&self, page: &Arc<Page>) -> WriteTicket {
        let queued_bytes = self.load.record_begin(page.bytes());
        // Relaxed: a number of its own for each write, in any order.
        let serial = self.serial_last.fetch_add(1, Ordering::Relaxed);
        let ticket = (page.id(), page.generation(), serial);
        let write =
            PendingWrite { page: page.clone(), ended: Arc::default(), since: now(), queued_bytes, withheld: false };
        self.shard(&ticket.0).insert(ticket, write);
        ticket
    }

    /// Removes a write and wakes the tasks that wait for its end.
    pub(super) fn end(&self, ticket: &WriteTicket) {
        // The temporary guard is dropped before the wake-up: a woken task may take this lock at
        // once.
        let write = self.shard(&ticket.0).remove(ticket);
        if let Some(write) = write {
            let time = now().saturating_duration_since(write.since);
            self.load.record_end(write.page.bytes(), write.queued_bytes, time);
            write.ended.update(|ended| *ended = true);
        }
    }

    /// Returns the newest put of the page that is being written and not withheld.
    pub(super) fn get(&self, id: &PageId) -> Option<Arc<Page>> {
        if fail_point!("node.gap-before-written") {
            return None;
        }
        let pending = self.shard(id);
        let mut writes = pending.range(tickets_of(id)).map(|(_, write)| write);
        writes.rfind(|write| !write.withheld).map(|write| write.page.clone())
    }

    /// Stops serving the page from here. Returns a handle for each write in flight: a tombstone may
    /// be written only after these have ended.
    pub(super) fn withhold(&self, id: &PageId) -> Vec<WriteEnded> {
        let mut pending = self.shard(id);
        let writes = pending.range_mut(tickets_of(id)).map(|(_, write)| write);
        writes
            .map(|write| {
                write.withheld = true;
                write.ended.clone()
            })
            .collect()
    }

    /// Returns `true` if a page of the namespace is being written.
    pub(super) fn has_pages_of(&self, namespace: &NamespaceId) -> bool {
        self.shards.iter().any(|shard| shard.lock().keys().any(|(id, ..)| id.namespace == *namespace))
    }

    /// Number of writes in flight. Not exact while some begin and end.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

fn tickets_of(id: &PageId) -> std::ops::RangeInclusive<WriteTicket> {
    (*id, 0, 0)..=(*id, u64::MAX, u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{PageKey, PageMeta};
    use larder_memory::Arena;

    const MIB: u64 = 1 << 20;

    /// A device that writes a MiB in 10 ms, and three writes that begin at once.
    #[test]
    fn rate_of_writes_counts_the_bytes_ahead() {
        let load = WriteLoad::default();
        assert_eq!(load.bytes_per_second(), None);
        let queued = [1, 2, 3].map(|_| load.record_begin(1 << 20));
        assert_eq!((queued, load.bytes()), ([MIB, 2 * MIB, 3 * MIB], 3 * MIB));
        for (nth, queued) in (1..).zip(queued) {
            load.record_end(1 << 20, queued, Duration::from_millis(10 * nth));
        }
        let rate = load.bytes_per_second().unwrap();
        assert!((rate / (100 * MIB) as f64 - 1.0).abs() < 0.01, "{rate} bytes per second");
        assert_eq!((load.bytes(), load.begun_bytes()), (0, 3 * MIB));
    }

    #[test]
    fn ending_one_write_leaves_another_of_the_same_page_in_flight() {
        let arena = Arena::new(1 << 20).unwrap();
        let payload = arena.allocate(100).unwrap().freeze();
        let id = PageId { namespace: NamespaceId([7; 32]), key: PageKey::chain(None, &[1]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, vec![100], &payload);
        let page = Arc::new(crate::page::PageShapes::default().page(meta, payload));
        let writeback = WritebackTable::default();
        let first = writeback.begin(&page);
        let second = writeback.begin(&page);
        writeback.end(&first);
        assert!(writeback.get(&id).is_some(), "the second write is in flight");
        let ends = writeback.withhold(&id);
        assert!(ends.len() == 1 && !ends[0].get() && writeback.get(&id).is_none());
        writeback.end(&second);
        assert!(ends[0].get() && writeback.len() == 0);
    }
}
