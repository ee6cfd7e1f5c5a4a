//! One segment: its state, and the records of its current epoch.
//!
//! ```text
//! (created) ──► Preparing ──► Ready ──► Open ──► Sealed ──► Reclaiming ──► Preparing …
//! Free ───────────┘
//! ```
//!
//! An *epoch* is one use of a segment, from its header to its reclaim. Each epoch has a number that
//! no segment of the log had before.
//!
//! Invariants:
//! - Every planned write and every begun read of an epoch ends exactly once. Only an idle epoch,
//!   one without either, may be overwritten. `segment_reads` counts the reads.
//! - A footer lists each record whose write completed, or is not written at all.

use larder_format::NamespaceId;
use larder_format::disk::{BLOCK_BYTES, RecordHeader};
use larder_format::footer::{Footer, FooterRoom, RecordSummary};
use larder_runtime::fail_point;
use std::collections::BTreeSet;

#[derive(Debug)]
pub(super) struct EpochState {
    number: u64,
    /// Offset of the next record, in bytes.
    end: u64,
    /// Index slots of the pages written here. A slot may hold another page by now.
    slots: Vec<u32>,
    /// Records for the footer. Empty once the footer is planned or cancelled.
    records: Vec<RecordSummary>,
    footer_wanted: bool,
    footer_room: FooterRoom,
    /// Bytes reserved for copied records. Their footer entries are already in `footer_room`.
    reserved_bytes: u64,
    writes_in_flight: u32,
    /// Offsets of records that were planned and are not written, or never will be. The first of
    /// them bounds the part that a sync can make durable.
    unwritten: BTreeSet<u64>,
    durable_end: u64,
    writes_completed: u64,
    writes_synced: u64,
    sync_failed: bool,
}

impl EpochState {
    pub(super) fn new(number: u64) -> EpochState {
        EpochState {
            number,
            end: BLOCK_BYTES as u64,
            slots: Vec::new(),
            records: Vec::new(),
            footer_wanted: true,
            footer_room: FooterRoom::default(),
            reserved_bytes: 0,
            writes_in_flight: 0,
            unwritten: BTreeSet::new(),
            durable_end: BLOCK_BYTES as u64,
            writes_completed: 0,
            writes_synced: 0,
            sync_failed: false,
        }
    }

    /// An epoch found by recovery whose records end at `end`. `synced` is `false` if a power
    /// failure may still take some of them.
    pub(super) fn recovered(number: u64, end: u64, synced: bool) -> EpochState {
        // One completed write stands for all of them: it makes a sync necessary or not.
        EpochState { end, writes_completed: 1, writes_synced: u64::from(synced), ..EpochState::new(number) }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    pub(super) fn add_slot(&mut self, slot: u32) {
        self.slots.push(slot);
    }

    pub(super) fn reverse_slots(&mut self) {
        self.slots.reverse();
    }

    pub(super) fn shrink_slots(&mut self) {
        self.slots.shrink_to_fit();
    }

    /// Takes at most `max` of the slots, the last ones first.
    pub(super) fn take_slots(&mut self, max: usize) -> Vec<u32> {
        let left = self.slots.len() - max.min(self.slots.len());
        let taken = self.slots.split_off(left);
        if left == 0 {
            self.slots = Vec::new();
        }
        taken
    }

    pub(super) fn has_writes_in_flight(&self) -> bool {
        self.writes_in_flight > 0 && !fail_point!("log.reuse-segment-under-write")
    }

    pub(super) fn is_unused(&self) -> bool {
        self.writes_completed == 0
    }

    pub(super) fn fits(&self, segment_bytes: u64, namespace: &NamespaceId, bytes: u64) -> bool {
        self.end + bytes + self.reserved_bytes + self.footer_room.bytes_with(namespace) <= segment_bytes
    }

    /// Bytes that are neither written nor reserved. The footer takes some of them.
    pub(super) fn free_bytes(&self, segment_bytes: u64) -> u64 {
        let used = self.end + self.reserved_bytes;
        assert!(used <= segment_bytes, "records and reservations exceed the segment");
        segment_bytes - used
    }

    pub(super) fn allocate(&mut self, namespace: &NamespaceId, bytes: u64) -> u64 {
        self.footer_room.add(namespace);
        self.plan_record(bytes)
    }

    /// Plans a copied record of `bytes` from the reservation. Returns `None` if the reservation is
    /// gone.
    pub(super) fn allocate_reserved(&mut self, bytes: u64) -> Option<u64> {
        if self.reserved_bytes < bytes {
            return None;
        }
        self.reserved_bytes -= bytes;
        Some(self.plan_record(bytes))
    }

    fn plan_record(&mut self, bytes: u64) -> u64 {
        let offset = self.end;
        self.end += bytes;
        self.writes_in_flight += 1;
        self.unwritten.insert(offset);
        offset
    }

    /// Reserves room for a copied record of `bytes`, if the segment also keeps room for `beside`,
    /// the record of another writer. Returns `false` without a change if not.
    pub(super) fn reserve_copy(
        &mut self,
        segment_bytes: u64,
        namespace: &NamespaceId,
        bytes: u64,
        beside: Option<(&NamespaceId, u64)>,
    ) -> bool {
        let (footer_bytes, beside_bytes) = match beside {
            Some((other, bytes)) => (self.footer_room.bytes_with_two(namespace, other), bytes),
            None => (self.footer_room.bytes_with(namespace), 0),
        };
        if self.end + self.reserved_bytes + bytes + beside_bytes + footer_bytes > segment_bytes {
            return false;
        }
        self.reserved_bytes += bytes;
        self.footer_room.add(namespace);
        true
    }

    /// Offset of the next record.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// Returns the rest of a reservation, and the footer room of `records` that were not copied.
    pub(super) fn release_reservation(&mut self, records: usize) {
        self.reserved_bytes = 0;
        (0..records).for_each(|_| self.footer_room.remove());
    }

    pub(super) fn write_completed(&mut self, header: &RecordHeader) {
        self.end_write();
        self.writes_completed += 1;
        self.unwritten.remove(&header.place.offset);
        if self.footer_wanted {
            self.records.extend(RecordSummary::of(header));
        }
    }

    /// A planned write has failed: the device may have any part of the record.
    pub(super) fn write_failed(&mut self) {
        self.end_write();
        // The record may be whole on the device. A footer that omits it would hide it from recovery
        // only as long as the footer itself is readable.
        self.cancel_footer();
    }

    pub(super) fn end_write(&mut self) {
        assert!(self.writes_in_flight > 0, "a write ended that was not planned");
        self.writes_in_flight -= 1;
    }

    /// Offset up to which every planned record is written.
    pub(super) fn written_end(&self) -> u64 {
        self.unwritten.first().copied().unwrap_or(self.end)
    }

    pub(super) fn durable_end(&self) -> u64 {
        self.durable_end
    }

    pub(super) fn writes_completed(&self) -> u64 {
        self.writes_completed
    }

    pub(super) fn has_unsynced_writes(&self) -> bool {
        self.writes_completed > self.writes_synced
    }

    /// A sync has succeeded that began when `writes` had completed and records were whole up to
    /// `written_end`.
    pub(super) fn sync_completed(&mut self, writes: u64, written_end: u64) {
        self.writes_synced = self.writes_synced.max(writes);
        self.durable_end = self.durable_end.max(written_end);
    }

    /// A sync has failed. Writes that completed before it may never become durable, and no later
    /// sync says which, so none is worth another sync.
    pub(super) fn sync_failed(&mut self) {
        self.writes_synced = self.writes_completed;
        self.sync_failed = true;
        self.cancel_footer();
    }

    pub(super) fn has_failed_sync(&self) -> bool {
        self.sync_failed
    }

    /// Sets the records that a footer for a recovered epoch will list.
    pub(super) fn set_footer_records(&mut self, records: Option<Vec<RecordSummary>>) {
        self.footer_wanted = records.is_some();
        self.records = records.unwrap_or_default();
    }

    pub(super) fn cancel_footer(&mut self) {
        self.footer_wanted = false;
        self.records = Vec::new();
    }

    /// Takes the footer of this epoch and its offset, if one is wanted, nothing is in flight, and
    /// all records are durable. The footer then counts as a write in flight.
    pub(super) fn take_footer(&mut self, segment: u32, segment_bytes: u64) -> Option<(Footer, u64)> {
        if !self.footer_wanted || self.writes_in_flight > 0 || self.has_unsynced_writes() {
            return None;
        }
        self.footer_wanted = false;
        let mut records = std::mem::take(&mut self.records);
        records.sort_unstable_by_key(RecordSummary::offset);
        if fail_point!("log.footer-omits-tombstones") {
            records.retain(|record| matches!(record, RecordSummary::Page(_)));
        }
        let footer = Footer { segment, epoch: self.number, records };
        // This process keeps room for the footer. A recovered segment may come from a version that
        // kept less.
        let offset = segment_bytes.checked_sub(footer.encoded_bytes()).filter(|&offset| offset >= self.end)?;
        self.writes_in_flight += 1;
        Some((footer, offset))
    }

    pub(super) fn footer_ended(&mut self, written: bool) {
        self.end_write();
        // A footer needs a sync of its own.
        self.writes_completed += u64::from(written);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>() + self.records.capacity() * size_of::<RecordSummary>()
    }
}

#[derive(Debug)]
pub(super) enum Segment {
    /// The file exists. Nothing in it counts.
    Free,
    Preparing,
    /// Its header, with this epoch, is durable.
    Ready(u64),
    Open(EpochState),
    Sealed(EpochState),
    /// Its pages leave the index. Then its reads and writes in flight end.
    Reclaiming(EpochState),
}

impl Segment {
    pub(super) fn epoch(&self) -> Option<&EpochState> {
        match self {
            Segment::Open(epoch) | Segment::Sealed(epoch) | Segment::Reclaiming(epoch) => Some(epoch),
            Segment::Free | Segment::Preparing | Segment::Ready(_) => None,
        }
    }

    pub(super) fn epoch_mut(&mut self) -> Option<&mut EpochState> {
        match self {
            Segment::Open(epoch) | Segment::Sealed(epoch) | Segment::Reclaiming(epoch) => Some(epoch),
            Segment::Free | Segment::Preparing | Segment::Ready(_) => None,
        }
    }

    pub(super) fn seal(&mut self) {
        *self = match std::mem::replace(self, Segment::Free) {
            Segment::Open(mut epoch) => {
                epoch.shrink_slots();
                Segment::Sealed(epoch)
            }
            other => other,
        };
    }

    pub(super) fn begin_reclaim(&mut self) {
        *self = match std::mem::replace(self, Segment::Free) {
            Segment::Sealed(epoch) => Segment::Reclaiming(epoch),
            other => other,
        };
    }
}
