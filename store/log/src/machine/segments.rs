//! The table of all segments, and the numbers of epochs and records.
//!
//! Invariants:
//! - At most one segment is open.
//! - Segments open in the order of their epochs. Record numbers grow with epochs, even past
//!   segments that recovery could not read, so a tombstone always outranks the records that it
//!   deletes.
//! - `by_epoch` lists exactly the segments that are open, sealed or being reclaimed.

use super::SyncTicket;
use super::segment::{EpochState, Segment};
use super::segment_reads::SegmentReads;
use larder_format::NamespaceId;
use larder_format::disk::{BLOCK_BYTES, RecordPlace, SEGMENT_BYTES_MAX};
use larder_runtime::fail_point;
use std::collections::BTreeMap;
use std::ops::RangeBounds;
use std::sync::Arc;

/// Count of record numbers that each epoch has to itself. It exceeds the records of any segment:
/// each takes at least a block, and so does the header.
const RECORDS_PER_EPOCH_MAX: u64 = SEGMENT_BYTES_MAX / BLOCK_BYTES as u64;

#[derive(Debug)]
pub(super) struct Segments {
    segment_bytes: u64,
    by_number: BTreeMap<u32, Segment>,
    by_epoch: BTreeMap<u64, u32>,
    open: Option<u32>,
    next_epoch: u64,
    next_record: u64,
    reads: Arc<SegmentReads>,
}

impl Segments {
    pub(super) fn new(segment_bytes: u64, reads: Arc<SegmentReads>) -> Segments {
        Segments {
            segment_bytes,
            by_number: BTreeMap::new(),
            by_epoch: BTreeMap::new(),
            open: None,
            next_epoch: 1,
            next_record: 1,
            reads,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_number.len()
    }

    pub(super) fn used(&self) -> usize {
        self.by_epoch.len()
    }

    pub(super) fn open(&self) -> Option<u32> {
        self.open
    }

    pub(super) fn is_open(&self, segment: u32) -> bool {
        self.open == Some(segment)
    }

    pub(super) fn is_sealed(&self, segment: u32) -> bool {
        matches!(self.by_number.get(&segment), Some(Segment::Sealed(_)))
    }

    pub(super) fn is_reclaiming(&self, segment: u32) -> bool {
        matches!(self.by_number.get(&segment), Some(Segment::Reclaiming(_)))
    }

    pub(super) fn epoch(&self, segment: u32) -> Option<&EpochState> {
        self.by_number.get(&segment)?.epoch()
    }

    pub(super) fn epoch_mut(&mut self, segment: u32) -> Option<&mut EpochState> {
        self.by_number.get_mut(&segment)?.epoch_mut()
    }

    /// The epoch that `place` belongs to, unless the segment was reused since.
    pub(super) fn epoch_at(&self, place: &RecordPlace) -> Option<&EpochState> {
        self.epoch(place.segment).filter(|epoch| epoch.number() == place.epoch)
    }

    pub(super) fn epoch_at_mut(&mut self, place: &RecordPlace) -> Option<&mut EpochState> {
        self.epoch_mut(place.segment).filter(|epoch| epoch.number() == place.epoch)
    }

    pub(super) fn open_epoch(&self) -> Option<(u32, &EpochState)> {
        let open = self.open?;
        Some((open, self.epoch(open)?))
    }

    pub(super) fn in_epoch_order(
        &self,
        epochs: impl RangeBounds<u64>,
    ) -> impl DoubleEndedIterator<Item = (u64, u32)> + '_ {
        self.by_epoch.range(epochs).map(|(&epoch, &segment)| (epoch, segment))
    }

    pub(super) fn oldest_epoch(&self) -> Option<u64> {
        self.by_epoch.first_key_value().map(|(&epoch, _)| epoch)
    }

    /// The epoch and number of the segment to reclaim next: the oldest one, unless it is open.
    ///
    /// No other segment may go first. Its tombstones could delete records in an older segment.
    pub(super) fn next_to_reclaim(&self) -> Option<(u64, u32)> {
        let mut closed = self.in_epoch_order(..).filter(|&(_, segment)| !self.is_open(segment));
        let first =
            if fail_point!("log.reclaim-newest-segment") { closed.next_back() } else { self.in_epoch_order(..).next() };
        first.filter(|&(_, segment)| !self.is_open(segment))
    }

    /// A segment whose file exists and holds nothing that counts.
    pub(super) fn free_segment(&self) -> Option<u32> {
        let mut free = self.by_number.iter().filter(|(_, segment)| matches!(segment, Segment::Free));
        free.next().map(|(&number, _)| number)
    }

    /// The smallest number that no segment has. Recovery relies on this choice: it judges by the
    /// number of a misplaced file whether a segment was lost there (`may_replace`).
    pub(super) fn unused_number(&self) -> Option<u32> {
        (0..).find(|number| !self.by_number.contains_key(number))
    }

    /// Returns `true` if the segment has room for a record of `bytes`, and still for its footer.
    /// The size of the footer depends on the namespaces in it.
    pub(super) fn fits(&self, segment: u32, namespace: &NamespaceId, bytes: u64) -> bool {
        self.epoch(segment).is_some_and(|epoch| epoch.fits(self.segment_bytes, namespace, bytes))
    }

    pub(super) fn allocate(&mut self, namespace: &NamespaceId, bytes: u64) -> Option<RecordPlace> {
        let open = self.open.filter(|&open| self.fits(open, namespace, bytes))?;
        let epoch = self.epoch_mut(open)?;
        Some(RecordPlace { segment: open, epoch: epoch.number(), offset: epoch.allocate(namespace, bytes) })
    }

    /// Number for the next record, which stands in a segment of `epoch`.
    ///
    /// The first number of an epoch exceeds all numbers of the epochs before it, whether or not
    /// recovery could read them.
    pub(super) fn take_record_number(&mut self, epoch: u64) -> u64 {
        let number = self.next_record.max(epoch.saturating_mul(RECORDS_PER_EPOCH_MAX));
        self.next_record = number.saturating_add(1);
        number
    }

    /// Numbers records from now on above `number`, the largest that recovery found. Called once,
    /// before any record is numbered.
    pub(super) fn number_records_above(&mut self, number: u64) {
        self.next_record = number.saturating_add(1);
    }

    #[cfg(test)]
    pub(super) fn next_record(&self) -> u64 {
        self.next_record
    }

    pub(super) fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    /// Numbers epochs from now on above `epoch`, which some segment had.
    pub(super) fn number_epochs_above(&mut self, epoch: u64) {
        self.next_epoch = self.next_epoch.max(epoch.saturating_add(1));
    }

    pub(super) fn begin_prepare(&mut self, segment: u32) -> u64 {
        let epoch = self.next_epoch;
        self.next_epoch += u64::from(!fail_point!("log.segment-epoch-reused"));
        self.by_number.insert(segment, Segment::Preparing);
        epoch
    }

    pub(super) fn prepared(&mut self, segment: u32, epoch: u64) {
        self.by_number.insert(segment, Segment::Ready(epoch));
    }

    pub(super) fn remove(&mut self, segment: u32) {
        self.by_number.remove(&segment);
    }

    pub(super) fn open_prepared(&mut self, number: u32) -> bool {
        assert!(self.open.is_none(), "one segment is open at a time");
        let Some(segment) = self.by_number.get_mut(&number) else { return false };
        let Segment::Ready(epoch) = *segment else { return false };
        *segment = Segment::Open(EpochState::new(epoch));
        self.reads.begin_epoch(number, epoch);
        self.by_epoch.insert(epoch, number);
        self.open = Some(number);
        true
    }

    pub(super) fn seal(&mut self, number: u32) {
        if let Some(segment) = self.by_number.get_mut(&number) {
            segment.seal();
        }
        if self.is_open(number) {
            self.open = None;
        }
    }

    /// Begins to reclaim a segment. Its pages leave the index from now on, and no page enters it.
    pub(super) fn begin_reclaim(&mut self, number: u32) {
        let Some(segment) = self.by_number.get_mut(&number) else { return };
        segment.begin_reclaim();
        if let Some(epoch) = segment.epoch_mut() {
            // Planning one now would be a write in flight, which delays the end of the reclaim.
            epoch.cancel_footer();
        }
    }

    /// Ends the epoch of a segment that is being reclaimed, if it is idle. Returns `true` if no
    /// write to it completed, so that its file may be created anew. Returns `None` while reads or
    /// writes are in flight.
    pub(super) fn end_reclaim(&mut self, segment: u32) -> Option<bool> {
        let epoch = self.epoch(segment)?;
        // Called in any case: a read that ends from now on reports that.
        let has_reads = !self.reads.await_end(segment);
        if has_reads || epoch.has_writes_in_flight() {
            return None;
        }
        let number = epoch.number();
        let unused = epoch.is_unused();
        self.by_epoch.remove(&number);
        Some(unused)
    }

    pub(super) fn add_free(&mut self, segment: u32) {
        self.by_number.insert(segment, Segment::Free);
    }

    /// Adds a segment with records, found by recovery. It takes no more records.
    pub(super) fn add_sealed(&mut self, segment: u32, epoch: EpochState) {
        self.reads.begin_epoch(segment, epoch.number());
        self.by_epoch.insert(epoch.number(), segment);
        self.by_number.insert(segment, Segment::Sealed(epoch));
    }

    /// Segments with completed writes that no sync covers, oldest epoch first.
    pub(super) fn unsynced(&self) -> impl Iterator<Item = (u32, &EpochState)> {
        let epochs = self.by_epoch.values().filter_map(|&segment| Some((segment, self.epoch(segment)?)));
        epochs.filter(|(_, epoch)| epoch.has_unsynced_writes())
    }

    pub(super) fn sync_plan(&self) -> Vec<SyncTicket> {
        self.unsynced()
            .map(|(segment, epoch)| SyncTicket {
                segment,
                epoch: epoch.number(),
                writes_completed: epoch.writes_completed(),
                written_end: epoch.written_end(),
            })
            .collect()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.by_number.values().filter_map(Segment::epoch).map(EpochState::memory_bytes).sum()
    }
}
