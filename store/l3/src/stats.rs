//! What L3 counts.

use larder_core::log::LogCounts;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Figures since the start, and how full it is now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct L3Stats {
    /// Bytes of the records of pages that can be found.
    pub bytes_used: u64,
    /// Bytes of all files, which are preallocated.
    pub bytes_on_device: u64,
    /// Most bytes of all files.
    pub bytes_capacity: u64,
    /// Pages that can be found.
    pub pages: u64,
    /// Segments that exist.
    pub segments: u64,
    /// Most segments; fewer than the capacity allows if the file system had no room for more.
    pub segments_max: u64,
    /// Segments that hold records.
    pub segments_used: u64,
    /// Segments that were written anew since the start.
    pub segments_prepared: u64,
    /// Segments that took no more records since a write or sync of them failed.
    pub segments_abandoned: u64,
    /// Pages read and verified.
    pub reads: u64,
    /// Bytes of their payloads.
    pub read_bytes: u64,
    /// Pages written.
    pub writes: u64,
    /// Bytes of their payloads.
    pub written_bytes: u64,
    /// Bytes of pages taken for writing and not on the device yet.
    pub write_queue_bytes: u64,
    /// Pages forgotten.
    pub forgotten_pages: u64,
    /// Pages that went with the segment that was given up for newer ones.
    pub evicted_pages: u64,
    /// Pages that are to be copied when their segment is written anew.
    pub kept_pages: u64,
    /// Bytes of their records.
    pub kept_bytes: u64,
    /// Bytes of the records of hard-pinned pages.
    pub pinned_bytes: u64,
    /// Pages that went as their namespace was over its quota.
    pub quota_pages: u64,
    /// Pages that went as their time was over.
    pub expired_pages: u64,
    /// Footers written, which make the next start quick.
    pub footers_written: u64,
    /// Pages copied out of segments that were written anew, as they will be asked for again.
    pub rescued_pages: u64,
    /// Bytes of their payloads.
    pub rescued_bytes: u64,
    /// Bytes of memory of the index, and of what is known about which pages to keep.
    pub index_bytes: u64,
    /// Pages dropped because what was read was not what had been written.
    pub corrupt: u64,
    /// Reads, writes and syncs that the device refused.
    pub io_errors: u64,
    /// Syncs done.
    pub syncs: u64,
    /// Whether reads and writes go past the page cache.
    pub direct_io: bool,
    /// Whether the arena is registered with the device.
    pub registered_buffers: bool,
}

/// The running counts.
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
    pub(crate) rescued_pages: Counter,
    pub(crate) rescued_bytes: Counter,
    pub(crate) syncs: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    /// The counters and the log's counts, in one.
    pub(crate) fn stats(&self, log: LogCounts) -> L3Stats {
        L3Stats {
            bytes_used: log.page_bytes,
            pages: log.pages,
            segments: log.segments,
            segments_max: log.segments_max,
            segments_used: log.segments_used,
            segments_prepared: log.segments_prepared,
            segments_abandoned: log.segments_abandoned,
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
            rescued_pages: self.rescued_pages.get(),
            rescued_bytes: self.rescued_bytes.get(),
            corrupt: self.corrupt.get(),
            io_errors: self.io_errors.get(),
            syncs: self.syncs.get(),
            ..L3Stats::default()
        }
    }
}
