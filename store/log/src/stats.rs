//! Counters and statistics of L3.

use crate::machine::LogCounts;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Fill level of an L3, and counts of events since it was opened. `/status` of a node shows them
/// under `tiers.l3`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct L3Stats {
    pub bytes_used: u64,
    /// Bytes of all files, which are preallocated.
    pub bytes_on_device: u64,
    pub bytes_capacity: u64,
    pub pages: u64,
    /// Bound of the pages that take memory. At the bound, the log reclaims its oldest segment
    /// although it has unused ones.
    pub pages_max: u64,
    pub segments: u64,
    /// Lower than the capacity allows if the file system had no room for more.
    pub segments_max: u64,
    pub segments_used: u64,
    /// Segments prepared for records: created, or reclaimed and reused.
    pub segments_prepared: u64,
    /// Segments with completed writes that no sync covers yet. 0: every write that had completed is
    /// durable, unless its sync failed.
    pub segments_unsynced: u64,
    /// Segments closed early because a write or sync of them failed.
    pub segments_abandoned: u64,
    /// `true` if the log takes no more writes until the restart: a segment file could neither be
    /// written nor removed.
    pub stopped: bool,
    /// Pages read for clients, and verified.
    pub reads: u64,
    pub read_bytes: u64,
    /// Pages written for clients, without copies.
    pub writes: u64,
    pub written_bytes: u64,
    pub write_queue_bytes: u64,
    pub forgotten_pages: u64,
    pub evicted_pages: u64,
    /// Pages used since their record was written, or since the start. A copy-forward copies them,
    /// and all others without a pin are evicted with their segment.
    pub kept_pages: u64,
    pub kept_bytes: u64,
    pub pinned_bytes: u64,
    pub quota_pages: u64,
    pub expired_pages: u64,
    /// Footers written. A segment with a footer is recovered by one or two reads.
    pub footers_written: u64,
    pub copied_forward_pages: u64,
    pub copied_forward_bytes: u64,
    /// Bytes of memory allocated for the index: entries, hash tables, and lists of slots per
    /// segment. The orders by quota and by expiry are not included.
    pub index_bytes: u64,
    pub corrupt: u64,
    pub io_errors: u64,
    /// Syncs completed, failed ones included.
    pub syncs: u64,
    /// `true` if reads and writes bypass the page cache.
    pub direct_io: bool,
    /// `true` if the arena is registered with the kernel.
    pub registered_buffers: bool,
}

/// Counts of events that the log state machine does not see. Each is updated alone, so a snapshot
/// may show two related counters at different moments.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) writes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) forgotten_pages: Counter,
    pub(crate) corrupt: Counter,
    pub(crate) io_errors: Counter,
    pub(crate) recovery_io_errors: Counter,
    pub(crate) copied_forward_pages: Counter,
    pub(crate) copied_forward_bytes: Counter,
    pub(crate) syncs: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        // Relaxed: a counter orders no other memory access.
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn stats(&self, log: LogCounts) -> L3Stats {
        L3Stats {
            bytes_used: log.page_bytes,
            pages: log.pages,
            pages_max: log.pages_max,
            segments: log.segments,
            segments_max: log.segments_max,
            segments_used: log.segments_used,
            segments_prepared: log.segments_prepared,
            segments_unsynced: log.segments_unsynced,
            segments_abandoned: log.segments_abandoned,
            stopped: log.stopped,
            evicted_pages: log.evicted_pages,
            kept_pages: log.kept_pages,
            kept_bytes: log.kept_bytes,
            pinned_bytes: log.pinned_bytes,
            quota_pages: log.quota_pages,
            expired_pages: log.expired_pages,
            footers_written: log.footers,
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            writes: self.writes.get(),
            written_bytes: self.written_bytes.get(),
            forgotten_pages: self.forgotten_pages.get(),
            copied_forward_pages: self.copied_forward_pages.get(),
            copied_forward_bytes: self.copied_forward_bytes.get(),
            corrupt: self.corrupt.get(),
            io_errors: self.io_errors.get(),
            syncs: self.syncs.get(),
            ..L3Stats::default()
        }
    }
}
