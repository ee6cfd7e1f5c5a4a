//! The segment log of one device as a deterministic state machine: no I/O, no clock, no randomness.
//!
//! The caller performs all I/O. It asks the log for a plan, carries the plan out, and reports the
//! result:
//!
//! ```text
//! append ─► PlannedWrite ─► device ─► write_done      next_intent ─► Prepare, Footer, CopyForward
//! lookup ─► begin_read_at ─► ReadTicket ─► device ─► end_read       ─► device ─► prepared, …
//! ```
//!
//! Invariants:
//! 1. A page is found only after its write completed, never after it was forgotten, and never after
//!    it expired.
//! 2. At most one segment is open. Records are numbered in the order in which they are planned.
//!    Numbers and segment epochs grow together, even past segments that recovery could not read.
//! 3. Segments are reclaimed oldest epoch first, and never while a read or write of them is in
//!    flight. A tombstone is younger than the records that it deletes, so it exists as long as they
//!    do.
//! 4. The first record of a segment is planned only after its header, with an epoch never used
//!    before, is durable.
//! 5. The number of segments never exceeds the capacity, and the number of pages never exceeds
//!    `pages_max`. A log at either bound reclaims its oldest segment.
//! 6. The footer of a segment is planned only when nothing else of the segment is in flight and all
//!    its records are durable. It lists all of them. Room for it is kept from the first record on.
//!
//! Layout: the state is split into parts with private fields, and each operation has a module.
//!
//! | part | module | holds |
//! | --- | --- | --- |
//! | `Segments` | `segments`, `segment` | segment states, epochs, numbers, requests in flight |
//! | `Index` | `index`, `entry` | fallback records, namespaces |
//! | `SharedIndex` | `shared_index`, `segment_reads` | page → record, uses, reads in flight |
//! | `Departed` | `departed` | pages that lately left for lack of room |
//! | `Retention` | `retention` | pins, floors, order by quota |
//! | `Names` | `names` | starts of the keys, if a listener follows the pages |
//! | `UnindexedRecords` | `unindexed` | records that a crash could bring back |
//! | `RecoveryState` | `recovery` | progress of the start |
//!
//! Operations: `append` (writes), `read`, `forget`, `sync`, `pages` (changes of index entries),
//! `expiry`, `quota`, `prepare` (the next segment), `copy_forward`, `footer`, `scrub`; `triage`,
//! `scan` and `recovery` at a start.

use larder_format::disk::{BLOCK_BYTES, RecordHeader, RecordPlace, record_bytes};
use larder_format::footer::{Footer, FooterRoom};
use larder_format::{NamespaceId, PageId, is_expired};
use larder_runtime::fail_point;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use thiserror::Error;

mod append;
mod copy_forward;
mod departed;
mod entry;
mod expiry;
mod floors;
mod footer;
mod forget;
mod index;
mod names;
mod pages;
mod prepare;
mod quota;
mod read;
mod recovery;
mod retention;
mod scan;
mod scrub;
mod segment;
mod segment_reads;
mod segments;
mod shared_index;
mod sync;
#[cfg(test)]
mod tests;
mod triage;
mod unindexed;

pub use append::{Append, AppendError, PlannedWrite, WriteOutcome};
pub use copy_forward::CopyForward;
pub use expiry::ExpirySweep;
pub use floors::{FloorPart, SharedFloors};
pub use footer::PlannedFooter;
pub use forget::Forget;
pub use index::NamespacePages;
pub use names::{NamedPage, PageListener, PageName};
pub use prepare::{Prepare, PrepareOutcome};
pub use read::{Location, ReadTicket, RecordRef};
pub use recovery::{RecoveryError, RecoveryResult};
pub use retention::{Pin, PinError, Worth};
pub use scan::{ScanRead, ScannedSegment, SegmentScan, TAIL_BYTES};
pub use scrub::ScrubList;
pub use shared_index::SharedIndex;
pub use sync::SyncTicket;
pub use triage::{FoundSegment, Recovery, SegmentEpoch};

use index::Index;
use names::Names;
use prepare::NextSegment;
use recovery::RecoveryState;
use retention::Retention;
use segment_reads::SegmentReads;
use segments::Segments;
use unindexed::UnindexedRecords;

pub const KEEP_PERCENT_DEFAULT: u8 = 50;

#[derive(Debug, Clone)]
pub struct LogConfig {
    pub segment_bytes: u64,
    pub segments_max: u32,
    /// Seed of the index's hash. It must be unknown to clients, or they could choose keys that
    /// collide.
    pub hash_seed: u64,
    /// Maximum percentage of a segment for copies of pages that were used, when another segment is
    /// reclaimed, on average. With 0, pages are evicted in the order in which they came. Default
    /// [`KEEP_PERCENT_DEFAULT`], maximum 75.
    pub keep_percent: u8,
    /// Quota in bytes of a namespace for which [`Log::set_quota`] set none. `u64::MAX` for no
    /// limit.
    pub quota_default: u64,
    /// Maximum number of pages that take memory: those in the index, and those with unindexed
    /// records. [`Log::new`] raises it to [`LogConfig::pages_max_min`].
    pub pages_max: u64,
}

impl LogConfig {
    /// Smallest [`LogConfig::pages_max`] that works with segments of this size. Half of it is for
    /// pages to come, so that readers find the other half.
    pub fn pages_max_min(segment_bytes: u64) -> u64 {
        2 * pages_reserve(segment_bytes)
    }
}

/// Maximum number of pages in a segment.
fn segment_pages(segment_bytes: u64) -> u64 {
    segment_bytes / record_bytes(1) as u64
}

/// Pages that may come before the log opens another segment and the one after it: those of both,
/// of the open segment, and of writes in flight to the one before.
fn pages_reserve(segment_bytes: u64) -> u64 {
    4 * segment_pages(segment_bytes)
}

/// Index entry of a page, as readers and the scrub see it. It is a snapshot: the record may be
/// copied, replaced or reclaimed at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub place: RecordPlace,
    /// Number of the record, unique in the log.
    pub number: u64,
    pub payload_bytes: u32,
    pub generation: u64,
    /// Expiry in milliseconds since 1970, up to a second early. 0 if the page never expires.
    pub expires_unix_ms: u64,
}

/// Background work for the device. No caller in particular waits for it. The end of each must be
/// reported, or the log eventually takes no more writes.
#[derive(Debug, PartialEq, Eq)]
pub enum Intent {
    /// Prepare a segment for records, then call [`Log::prepared`].
    Prepare(Prepare),
    /// Write a footer, then call [`Log::footer_done`]. A footer only speeds up the next start.
    Footer(PlannedFooter),
    /// Call [`Log::reclaim_step`] until it returns `false`. Let others use the log between two
    /// calls, and let writers that wait for room try again at the end.
    Reclaim,
    /// Copy pages to the open segment, then call [`Log::copy_forward_done`].
    CopyForward(CopyForward),
}

/// Fill level of the log, and counts of events since it was opened. [`L3Stats`](crate::L3Stats)
/// explains the fields of the same names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogCounts {
    pub pages: u64,
    pub pages_max: u64,
    pub page_bytes: u64,
    pub segments: u64,
    pub segments_max: u64,
    pub segments_used: u64,
    pub evicted_pages: u64,
    pub segments_prepared: u64,
    pub segments_unsynced: u64,
    pub segments_abandoned: u64,
    pub stopped: bool,
    pub kept_pages: u64,
    pub kept_bytes: u64,
    pub pinned_bytes: u64,
    /// Pages for which a copy was planned.
    pub copied_pages: u64,
    pub quota_pages: u64,
    pub expired_pages: u64,
    pub footers: u64,
}

/// The log: the place of each record, and the work that comes next. It computes in memory only, so
/// the caller may hold a lock around each call. Lookups and reads go to [`Log::entries`], which
/// needs no such lock.
#[derive(Debug)]
pub struct Log {
    config: LogConfig,
    segments: Segments,
    next_segment: NextSegment,
    index: Index,
    retention: Retention,
    unindexed: UnindexedRecords,
    /// `None` if the log keeps no names.
    names: Option<Names>,
    /// Namespaces whose new quota is being enforced, with the next shard of the index to scan.
    quota_steps: BTreeMap<u32, usize>,
    /// Present until every segment was recovered.
    recovery: Option<RecoveryState>,
    /// Bytes of pages without a hard pin that may be copied.
    copy_credit: u64,
    /// Bytes of pages that may be copied for the floor of their namespace.
    floor_credit: u64,
    intents: VecDeque<Intent>,
    /// No more writes: a segment is in an unknown state, see [`AppendError::Stopped`].
    stopped: bool,
    /// Counts of events. The fill levels are computed by [`Log::counts`].
    counts: LogCounts,
}

impl Log {
    pub fn new(config: LogConfig) -> Log {
        Log::with_segments(config, 0)
    }

    /// A log of which segments with numbers below `numbers` may exist.
    fn with_segments(config: LogConfig, numbers: u32) -> Log {
        let pages_max = config.pages_max.max(LogConfig::pages_max_min(config.segment_bytes));
        let config = LogConfig { pages_max: pages_max.min(shared_index::PAGES_MAX), ..config };
        let excess = u32::from(fail_point!("log.one-segment-over-capacity"));
        let numbers = numbers.max(config.segments_max.saturating_add(excess)).min(entry::SEGMENTS_MAX);
        let reads = Arc::new(SegmentReads::new(numbers as usize));
        Log {
            segments: Segments::new(config.segment_bytes, reads.clone()),
            next_segment: NextSegment::None,
            index: Index::new(&config, reads),
            retention: Retention::default(),
            unindexed: UnindexedRecords::default(),
            names: None,
            quota_steps: BTreeMap::new(),
            recovery: None,
            copy_credit: config.copy_credit_max(),
            floor_credit: config.floor_credit_max(),
            intents: VecDeque::new(),
            stopped: false,
            counts: LogCounts::default(),
            config,
        }
    }

    /// The part that lookups and reads use without the log.
    pub fn entries(&self) -> &Arc<SharedIndex> {
        &self.index.entries
    }

    pub fn config(&self) -> &LogConfig {
        &self.config
    }

    /// Maximum bytes of a record: a segment without its header and a footer of one record.
    pub fn record_bytes_max(&self) -> u64 {
        let footer = FooterRoom::default().bytes_with(&NamespaceId([0; 32]));
        self.config.segment_bytes.saturating_sub(BLOCK_BYTES as u64 + footer)
    }

    pub fn counts(&self) -> LogCounts {
        let unrecovered = self.recovery.as_ref().map_or(0, RecoveryState::segments_left);
        LogCounts {
            pages: self.index.len() as u64,
            pages_max: self.config.pages_max,
            page_bytes: self.index.record_bytes(),
            segments: (self.segments.len() + unrecovered) as u64,
            segments_max: u64::from(self.config.segments_max),
            segments_used: self.segments.used() as u64,
            segments_unsynced: self.segments.unsynced().count() as u64,
            kept_pages: self.index.entries.used_pages(),
            kept_bytes: self.index.entries.used_bytes(),
            pinned_bytes: self.retention.pinned_bytes(),
            stopped: self.stopped,
            ..self.counts
        }
    }

    /// Returns `true` if the log should reclaim a segment when it opens one. Copies then have a
    /// whole segment for themselves.
    pub(super) fn is_index_full(&self) -> bool {
        let tracked = self.pages_tracked().saturating_add(pages_reserve(self.config.segment_bytes));
        tracked > self.config.pages_max && !fail_point!("log.index-exceeds-page-bound")
    }

    /// Returns `true` if the log must reclaim a segment before it prepares another one: the pages
    /// of that one, of the open one and of writes in flight could exceed
    /// [`LogConfig::pages_max`].
    pub(super) fn is_index_overfull(&self) -> bool {
        let to_come = pages_reserve(self.config.segment_bytes) - segment_pages(self.config.segment_bytes);
        let tracked = self.pages_tracked().saturating_add(to_come);
        tracked > self.config.pages_max && !fail_point!("log.index-exceeds-page-bound")
    }

    /// Number of entries that pages have in memory. A copied page has a second one for a while.
    fn pages_tracked(&self) -> u64 {
        (self.index.len() + self.index.fallbacks() + self.unindexed.pages()) as u64
    }

    /// Bytes of heap memory of the indices, without [`SharedIndex::memory_bytes`].
    pub fn index_bytes(&self) -> u64 {
        let names = self.names.as_ref().map_or(0, Names::memory_bytes);
        (self.index.memory_bytes() + self.segments.memory_bytes() + names) as u64
    }

    /// Takes the next background work. Any call with `&mut self` may add some.
    pub fn next_intent(&mut self) -> Option<Intent> {
        self.intents.pop_front()
    }

    pub fn has_intents(&self) -> bool {
        !self.intents.is_empty()
    }

    /// Returns `true` if `number` outranks the record in `slot`, so that it becomes the current
    /// one.
    fn supersedes(&self, slot: u32, number: u64) -> bool {
        self.index.entries.get(slot).number <= number || fail_point!("log.older-record-replaces-newer")
    }
}

/// Returns `true` if a page with this expiry must not be served. Its record stays on the device
/// until the segment is reclaimed.
fn must_not_serve(expires_unix_ms: u64, now_unix_ms: u64) -> bool {
    is_expired(expires_unix_ms, now_unix_ms) && !fail_point!("log.serve-expired")
}
