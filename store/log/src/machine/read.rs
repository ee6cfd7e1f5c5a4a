//! The read path: lookup, read tickets, damage, expiry.

use super::entry::PackedEntry;
use super::segment_reads::SegmentReads;
use super::shared_index::{Shard, position_of};
use super::*;
use larder_runtime::race_point;
use larder_runtime::sync::RwLockReadGuard;

/// Location of a page, as of one lookup.
///
/// A location holds nothing: the page may move or vanish at any time. The log checks the location
/// by one array access, and looks the page up again if it is stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    pub id: PageId,
    pub entry: Entry,
    slot: u32,
}

/// Name of one record: its number, and the index slot of its page.
///
/// A reference holds nothing: the record may be replaced or vanish at any time, and the log checks
/// that it is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordRef {
    pub number: u64,
    pub(super) slot: u32,
}

/// Permission to read one record. The caller must pass it to [`Log::end_read`] or
/// [`ReadTicket::end`] exactly once. Until then the segment is not reclaimed.
#[derive(Debug)]
#[must_use = "a read must be ended, or its segment is never reclaimed"]
pub struct ReadTicket {
    /// The page that a client asked for. `None` if the read is maintenance: the log does not know
    /// the name of a page, only its record.
    pub id: Option<PageId>,
    pub entry: Entry,
    pub record: RecordRef,
    segments: Arc<SegmentReads>,
}

impl ReadTicket {
    /// Ends the read without the log. If this returns `true`, a reclaim waits for it, and the
    /// caller must call [`Log::reads_ended`].
    #[must_use = "a reclaim may wait for the read"]
    pub fn end(self) -> bool {
        self.segments.end(self.entry.place.segment)
    }
}

impl SharedIndex {
    /// Looks up a page that can be read. Costs one hash probe. A lookup is no use of the page: only
    /// reads and touches change its rank.
    pub fn lookup(&self, id: &PageId, now_unix_ms: u64) -> Option<Location> {
        let (slot, shard) = self.find_shared(id)?;
        let entry = self.entry(shard.entry(position_of(slot)));
        (!must_not_serve(entry.expires_unix_ms, now_unix_ms)).then_some(Location { id: *id, entry, slot })
    }

    /// Returns `true` if a reader would find the same put as `location` names, wherever its record
    /// stands.
    pub fn is_current(&self, location: &Location, now_unix_ms: u64) -> bool {
        self.resolve(location).is_some_and(|(slot, shard)| {
            let entry = shard.entry(position_of(slot));
            entry.generation == location.entry.generation && !must_not_serve(entry.expires_unix_ms(), now_unix_ms)
        })
    }

    /// The slot of a located page, and its shard, which is locked. Probes the index only if the
    /// page has moved.
    fn resolve(&self, location: &Location) -> Option<(u32, RwLockReadGuard<'_, Shard>)> {
        let shard = self.share(location.slot);
        if shard.is_at(position_of(location.slot), location.entry.number) {
            return Some((location.slot, shard));
        }
        drop(shard);
        self.find_shared(&location.id)
    }

    /// The page in a slot. `None` if the slot is free.
    pub(super) fn at(&self, slot: u32) -> Option<Entry> {
        let shard = self.share(slot);
        let entry = shard.entry(position_of(slot));
        (!entry.is_free()).then(|| self.entry(entry))
    }

    fn entry(&self, packed: &PackedEntry) -> Entry {
        let epoch = self.segments.epoch(packed.segment());
        Entry {
            place: RecordPlace { segment: packed.segment(), epoch, offset: packed.offset() },
            number: packed.number,
            payload_bytes: packed.payload_bytes,
            generation: packed.generation,
            expires_unix_ms: packed.expires_unix_ms(),
        }
    }

    /// Begins a read of a page for a client, and records a use of it.
    pub fn begin_read(&self, id: &PageId, now_unix_ms: u64) -> Option<ReadTicket> {
        let (slot, shard) = self.find_shared(id)?;
        self.begin_client_read(slot, shard, id, now_unix_ms)
    }

    /// Like [`begin_read`](Self::begin_read), for a page that was looked up. Reads the current
    /// record of the page if the location is stale.
    pub fn begin_read_at(&self, location: &Location, now_unix_ms: u64) -> Option<ReadTicket> {
        let (slot, shard) = self.resolve(location)?;
        self.begin_client_read(slot, shard, &location.id, now_unix_ms)
    }

    fn begin_client_read(
        &self,
        slot: u32,
        shard: RwLockReadGuard<'_, Shard>,
        id: &PageId,
        now_unix_ms: u64,
    ) -> Option<ReadTicket> {
        // [`Log::drop_expired`] drops the page.
        if must_not_serve(shard.entry(position_of(slot)).expires_unix_ms(), now_unix_ms) {
            return None;
        }
        self.set_used(&shard, position_of(slot));
        Some(self.begin_slot_read(slot, shard, Some(*id)))
    }

    /// Begins a read of a record for maintenance, which is no use of its page. Returns `None` if
    /// another record of the page is current.
    pub fn begin_maintenance_read(&self, record: RecordRef) -> Option<ReadTicket> {
        let shard = self.share(record.slot);
        let is_current = shard.is_at(position_of(record.slot), record.number);
        is_current.then(|| self.begin_slot_read(record.slot, shard, None))
    }

    /// Counts a read of the page in `slot`. Takes the lock of its shard, so that no caller can
    /// unlock before the count: an eviction in between would not see the read.
    fn begin_slot_read(&self, slot: u32, shard: RwLockReadGuard<'_, Shard>, id: Option<PageId>) -> ReadTicket {
        let entry = self.entry(shard.entry(position_of(slot)));
        if race_point!("log.read-counted-after-unlock") {
            drop(shard);
            drop(self.share(slot));
        }
        self.segments.begin(entry.place.segment);
        ReadTicket { id, entry, record: RecordRef { number: entry.number, slot }, segments: self.segments.clone() }
    }
}

impl Log {
    pub fn find(&self, id: &PageId, now_unix_ms: u64) -> Option<Entry> {
        self.index.entries.lookup(id, now_unix_ms).map(|location| location.entry)
    }

    /// Reports that the device has answered a read, with whatever result.
    pub fn end_read(&mut self, ticket: ReadTicket) {
        if ticket.end() {
            self.reads_ended();
        }
    }

    /// Reports that the last read of the segment that is being reclaimed has ended.
    pub fn reads_ended(&mut self) {
        self.reclaim_if_idle();
    }

    /// Reports that a record is damaged. Its page is served from the record that this one was
    /// copied from, or not at all. Returns `false` if another record of the page is current.
    pub fn drop_damaged(&mut self, record: RecordRef) -> bool {
        if !self.index.entries.is_at(record.slot, record.number) {
            return false;
        }
        if !self.fall_back(record.slot) {
            self.drop_page(record.slot);
        }
        true
    }

    /// Reports that the device failed to read a record. Its page is served from its other record
    /// from now on. Without one, or if that one failed lately, the page is dropped.
    pub fn avoid_unreadable(&mut self, record: RecordRef, now_unix_ms: u64) {
        if self.index.entries.is_at(record.slot, record.number) && !self.swap_fallback(record.slot, now_unix_ms) {
            self.drop_page(record.slot);
        }
    }

    /// Drops pages that an [`ExpirySweep`] has found. Passes over those that left since.
    pub fn drop_expired(&mut self, records: &[RecordRef]) {
        for record in records {
            if self.index.entries.is_at(record.slot, record.number) {
                self.counts.expired_pages += 1;
                self.drop_page(record.slot);
            }
        }
    }
}
