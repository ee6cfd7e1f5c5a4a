//! The read path: lookup, read tickets, damage, expiry.

use super::segment::ReadsInFlight;
use super::*;
use std::sync::Arc;

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
    reads: Arc<ReadsInFlight>,
}

impl ReadTicket {
    /// Ends the read without the log. If this returns `true`, a reclaim waits for it, and the
    /// caller must call [`Log::reads_ended`].
    #[must_use = "a reclaim may wait for the read"]
    pub fn end(self) -> bool {
        self.reads.end()
    }
}

impl Log {
    /// Looks up a page that can be read. Costs one hash probe. A lookup is no use of the page: only
    /// reads and touches change its rank.
    pub fn lookup(&self, id: &PageId, now_unix_ms: u64) -> Option<Location> {
        let slot = self.index.find(id)?;
        let entry = self.entry(slot)?;
        (!must_not_serve(entry.expires_unix_ms, now_unix_ms)).then_some(Location { id: *id, entry, slot })
    }

    /// Lets all pages collide, for a test.
    #[cfg(test)]
    pub(crate) fn make_fingerprints_equal(&mut self) {
        self.index.make_fingerprints_equal();
    }

    pub fn find(&self, id: &PageId, now_unix_ms: u64) -> Option<Entry> {
        self.lookup(id, now_unix_ms).map(|location| location.entry)
    }

    /// Returns `true` if a reader would find the same put as `location` names, wherever its record
    /// stands.
    pub fn is_current(&self, location: &Location, now_unix_ms: u64) -> bool {
        let entry = self.resolve(location).and_then(|slot| self.entry(slot));
        entry.is_some_and(|entry| {
            entry.generation == location.entry.generation && !must_not_serve(entry.expires_unix_ms, now_unix_ms)
        })
    }

    /// The slot of a located page. Probes the index only if the page has moved.
    fn resolve(&self, location: &Location) -> Option<u32> {
        match self.index.is_at(location.slot, location.entry.number) {
            true => Some(location.slot),
            false => self.index.find(&location.id),
        }
    }

    pub(super) fn entry(&self, slot: u32) -> Option<Entry> {
        let packed = self.index.get(slot);
        let epoch = self.segments.epoch(packed.segment)?.number();
        Some(Entry {
            place: index::place_of(packed, epoch),
            number: packed.number,
            payload_bytes: packed.payload_bytes,
            generation: packed.generation,
            expires_unix_ms: packed.expires_unix_ms(),
        })
    }

    /// Begins a read of a page for a client, and records a use of it. Reads need no exclusive
    /// access to the log.
    pub fn begin_read(&self, id: &PageId, now_unix_ms: u64) -> Option<ReadTicket> {
        let slot = self.index.find(id)?;
        self.begin_client_read(slot, id, now_unix_ms)
    }

    /// Like [`begin_read`](Self::begin_read), for a page that was looked up. Reads the current
    /// record of the page if the location is stale.
    pub fn begin_read_at(&self, location: &Location, now_unix_ms: u64) -> Option<ReadTicket> {
        let slot = self.resolve(location)?;
        self.begin_client_read(slot, &location.id, now_unix_ms)
    }

    fn begin_client_read(&self, slot: u32, id: &PageId, now_unix_ms: u64) -> Option<ReadTicket> {
        // [`Log::drop_expired`] drops the page.
        if must_not_serve(self.index.get(slot).expires_unix_ms(), now_unix_ms) {
            return None;
        }
        self.index.set_used(slot);
        self.begin_slot_read(slot, Some(*id))
    }

    /// Begins a read of a record for maintenance, which is no use of its page. Returns `None` if
    /// another record of the page is current.
    pub fn begin_maintenance_read(&self, record: RecordRef) -> Option<ReadTicket> {
        if !self.index.is_at(record.slot, record.number) {
            return None;
        }
        self.begin_slot_read(record.slot, None)
    }

    fn begin_slot_read(&self, slot: u32, id: Option<PageId>) -> Option<ReadTicket> {
        let entry = self.entry(slot)?;
        let reads = self.segments.epoch_at(&entry.place)?.begin_read();
        Some(ReadTicket { id, entry, record: RecordRef { number: entry.number, slot }, reads })
    }

    /// Records a use of a page in a faster tier.
    pub fn touch(&self, id: &PageId) {
        if let Some(slot) = self.index.find(id) {
            self.index.set_used(slot);
        }
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
        if !self.index.is_at(record.slot, record.number) {
            return false;
        }
        if !self.fall_back(record.slot) {
            self.drop_page(record.slot);
        }
        true
    }

    /// Drops at most `max` expired pages. Returns `true` if there are more. The caller does this
    /// periodically.
    pub fn drop_expired(&mut self, now_unix_ms: u64, max: usize) -> bool {
        for _ in 0..max {
            let Some(slot) = self.retention.first_expired(now_unix_ms) else { return false };
            self.counts.expired_pages += 1;
            self.drop_page(slot);
        }
        self.retention.first_expired(now_unix_ms).is_some()
    }
}
