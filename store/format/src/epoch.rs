//! Determines the epoch of a segment whose header is unreadable.
//!
//! Its records and its footer state their epoch. But a segment that was prepared for a new epoch
//! and has no record of it yet still holds the records of the previous epoch. Those no longer
//! count: their pages may have been deleted without a tombstone. Segments are rewritten oldest
//! epoch first, which leaves these cases:
//!
//! - Another segment is older than the found epoch. So this segment was not rewritten since, and
//!   the found epoch is its epoch.
//! - No segment is older, and the first record has the found epoch. The segment is the oldest, or
//!   was prepared and never written to. Either way it can be removed: its tombstones have nothing
//!   left to delete.
//! - It holds no record of this segment, and a valid header of another log or segment. It is a
//!   *misplaced segment*: a file that an operator copied or renamed, to be set aside. If it
//!   replaced a segment of the log ([`may_replace`]), that segment may have deleted anything, so
//!   nothing in the log can be trusted. If it is of this log, and the segment that it states is
//!   missing or older, deletions may be missing too: nothing older can be trusted.
//! - Otherwise it may have held tombstones of any age, so nothing in the log can be trusted. A
//!   blank segment is such a case: files get their names only once their header is durable.

use crate::disk::{BLOCK_BYTES, LogId, RecordHeader, SegmentHeader, epoch_in};
use crate::footer::FooterBlock;

const BLOCK: u64 = BLOCK_BYTES as u64;
const READ_BYTES: u64 = 1 << 20;

/// Action that recovery takes for a segment without a readable header. In doubt it gives up
/// records: a deleted page must not return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Epoch(u64),
    /// Remove the segment. Nothing else is lost with it, because no older record is left for its
    /// tombstones to delete.
    Remove,
    Misplaced(ForeignHeader),
    /// Trust no record up to the newest segment: deletions may be missing. A deleted page that
    /// returns would be wrong data, a lost page is only a miss.
    LogUntrusted,
}

/// Origin of a misplaced segment, by its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignHeader {
    Log,
    Segment { segment: u32, epoch: u64 },
}

/// Returns `true` if a misplaced segment of this number may have replaced a segment of the log.
/// `last` is the largest known segment number.
///
/// A new segment gets the smallest free number, so the number after `last` may have existed. A
/// number above a gap cannot be judged: a failure or a smaller capacity may have left the gap just
/// then.
pub fn may_replace(misplaced: u32, last: Option<u32>) -> bool {
    last.is_some_and(|last| misplaced <= last.saturating_add(1))
}

/// Findings about a segment without a readable header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headerless {
    /// Largest epoch that a record or the footer states.
    pub epoch: Option<u64>,
    pub begins: bool,
    /// Origin of the file if its header is valid and of another segment.
    pub foreign: Option<ForeignHeader>,
}

impl Headerless {
    /// Chooses the action. `oldest` is the smallest epoch among the headers of the other segments,
    /// `None` if no other header is readable.
    pub fn verdict(&self, oldest: Option<u64>) -> Verdict {
        match (self.epoch, self.foreign) {
            (None, Some(foreign)) => Verdict::Misplaced(foreign),
            (Some(epoch), _) if oldest.is_some_and(|oldest| oldest < epoch) => Verdict::Epoch(epoch),
            (Some(_), _) if self.begins => Verdict::Remove,
            _ => Verdict::LogUntrusted,
        }
    }
}

/// Searches a segment without a readable header. A state machine without I/O: it tells the caller
/// what to read next.
#[derive(Debug)]
pub struct EpochSearch {
    log_id: LogId,
    segment: u32,
    segment_bytes: u64,
    readable_bytes: u64,
    cursor: u64,
    first: Option<u64>,
    found: Headerless,
}

impl EpochSearch {
    /// Begins with a segment whose file has `file_bytes` readable bytes. The search ignores a
    /// partial block at the end and all bytes beyond `segment_bytes`.
    pub fn new(log_id: LogId, segment: u32, segment_bytes: u64, file_bytes: u64) -> EpochSearch {
        let readable_bytes = file_bytes.min(segment_bytes) / BLOCK * BLOCK;
        let found = Headerless { epoch: None, begins: false, foreign: None };
        EpochSearch { log_id, segment, segment_bytes, readable_bytes, cursor: BLOCK, first: None, found }
    }

    /// Takes the segment's first block, if it was readable. A valid header of another segment or
    /// log marks the file as foreign.
    pub fn header(&mut self, block: &[u8]) {
        let Ok(SegmentHeader { log_id, segment, epoch }) = SegmentHeader::decode(block) else { return };
        self.found.foreign = match log_id == self.log_id {
            false => Some(ForeignHeader::Log),
            true if segment == self.segment => None,
            true => Some(ForeignHeader::Segment { segment, epoch }),
        };
    }

    /// Offset and length in bytes of the next read, in whole blocks and at most 1 MiB. `None` once
    /// the whole segment was fed.
    pub fn next_read(&self) -> Option<(u64, usize)> {
        let left = self.readable_bytes.saturating_sub(self.cursor);
        (left > 0).then_some((self.cursor, left.min(READ_BYTES) as usize))
    }

    /// Takes the bytes of the last [`next_read`](Self::next_read), at least one block of them. The
    /// caller feeds other bytes for an unreadable block, because the search counts blocks.
    pub fn feed(&mut self, bytes: &[u8]) {
        for block in bytes.chunks_exact(BLOCK_BYTES) {
            if let Some(epoch) = self.epoch_of(block) {
                self.found.epoch = self.found.epoch.max(Some(epoch));
                if self.cursor == BLOCK {
                    self.first = Some(epoch);
                }
            }
            self.cursor += BLOCK;
        }
    }

    fn epoch_of(&self, block: &[u8]) -> Option<u64> {
        let header = RecordHeader::decode_any_epoch(block, &self.log_id, self.segment, self.cursor);
        if let Ok(header) = header {
            return Some(header.place.epoch);
        }
        let epoch = epoch_in(block).filter(|_| self.cursor + BLOCK == self.segment_bytes)?;
        FooterBlock::decode(block, &self.log_id, self.segment, epoch, self.segment_bytes).ok().map(|_| epoch)
    }

    /// Ends the search. The result is final only after [`next_read`](Self::next_read) has returned
    /// `None`.
    pub fn finish(self) -> Headerless {
        Headerless { begins: self.found.epoch.is_some() && self.first == self.found.epoch, ..self.found }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{RecordBody, RecordPlace};
    use crate::footer::{Footer, RecordSummary};
    use crate::{NamespaceId, PageId, PageKey};

    const LOG: LogId = [9; 16];
    const BYTES: usize = 64 * BLOCK_BYTES;

    fn tombstone(epoch: u64, block: u64) -> RecordHeader {
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let place = RecordPlace { segment: 3, epoch, offset: block * BLOCK };
        RecordHeader { place, number: epoch * 100 + block, durable: 0, body: RecordBody::Tombstone(id) }
    }

    fn put(bytes: &mut [u8], record: &RecordHeader) {
        bytes[record.place.offset as usize..][..BLOCK_BYTES].copy_from_slice(&record.encode(&LOG));
    }

    fn search(bytes: &[u8]) -> Headerless {
        let mut search = EpochSearch::new(LOG, 3, BYTES as u64, bytes.len() as u64);
        search.header(bytes);
        while let Some((offset, len)) = search.next_read() {
            search.feed(&bytes[offset as usize..offset as usize + len]);
        }
        search.finish()
    }

    fn full() -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        bytes[..BLOCK_BYTES].copy_from_slice(&SegmentHeader { log_id: LOG, segment: 3, epoch: 5 }.encode());
        let records: Vec<RecordHeader> = (1..20).map(|block| tombstone(5, block)).collect();
        records.iter().for_each(|record| put(&mut bytes, record));
        let footer = Footer { segment: 3, epoch: 5, records: records.iter().filter_map(RecordSummary::of).collect() };
        let footer = footer.encode(&LOG);
        bytes[BYTES - footer.len()..].copy_from_slice(&footer);
        bytes
    }

    #[test]
    fn epoch_comes_from_records_or_footer() {
        let mut bytes = full();
        assert_eq!(search(&bytes), Headerless { epoch: Some(5), begins: true, foreign: None });
        assert_eq!(search(&bytes).verdict(Some(4)), Verdict::Epoch(5));
        bytes[BYTES - BLOCK_BYTES..].fill(0);
        assert_eq!(search(&bytes).epoch, Some(5), "without its footer");
        let mut bytes = full();
        bytes[BLOCK_BYTES..20 * BLOCK_BYTES].fill(7);
        assert_eq!(search(&bytes), Headerless { epoch: Some(5), begins: false, foreign: None }, "the footer alone");
        assert_eq!(search(&bytes[..BYTES - 1]).epoch, None, "without the last block");
    }

    #[test]
    fn largest_epoch_wins() {
        let mut bytes = full();
        put(&mut bytes, &tombstone(9, 1));
        assert_eq!(search(&bytes), Headerless { epoch: Some(9), begins: true, foreign: None });
        let mut bytes = full();
        put(&mut bytes, &tombstone(9, 2));
        assert_eq!(search(&bytes), Headerless { epoch: Some(9), begins: false, foreign: None });
    }

    #[test]
    fn segment_that_may_have_been_rewritten_is_not_served() {
        let mut bytes = full();
        assert_eq!(search(&bytes).verdict(Some(6)), Verdict::Remove, "prepared, and never written to");
        assert_eq!(search(&bytes).verdict(None), Verdict::Remove);
        bytes[BLOCK_BYTES + 100] ^= 1;
        assert_eq!(
            search(&bytes).verdict(Some(6)),
            Verdict::LogUntrusted,
            "the damaged record may have been a tombstone of epoch 9"
        );
        assert_eq!(search(&bytes).verdict(Some(4)), Verdict::Epoch(5));
        assert_eq!(search(&vec![7; BYTES]).verdict(Some(4)), Verdict::LogUntrusted);
        let mut blank = vec![0; BYTES];
        blank[..BLOCK_BYTES].fill(7);
        assert_eq!(search(&blank).verdict(Some(4)), Verdict::LogUntrusted, "a named segment once had a header");
        assert_eq!(search(&[]).verdict(Some(4)), Verdict::LogUntrusted);
    }

    #[test]
    fn only_a_number_far_above_the_log_cannot_replace_a_segment() {
        assert!(may_replace(0, Some(7)) && may_replace(7, Some(7)) && may_replace(8, Some(7)));
        assert!(!may_replace(9, Some(7)) && !may_replace(0, None) && may_replace(u32::MAX, Some(u32::MAX)));
    }

    #[test]
    fn file_of_another_log_or_segment_is_set_aside() {
        let with = |mut bytes: Vec<u8>, log_id, segment| {
            bytes[..BLOCK_BYTES].copy_from_slice(&SegmentHeader { log_id, segment, epoch: 5 }.encode());
            search(&bytes).verdict(Some(4))
        };
        assert_eq!(with(vec![7; BYTES], [8; 16], 3), Verdict::Misplaced(ForeignHeader::Log));
        let of_another = ForeignHeader::Segment { segment: 2, epoch: 5 };
        assert_eq!(with(vec![0; BYTES], LOG, 2), Verdict::Misplaced(of_another));
        let mut copy = vec![0; BYTES];
        let mut record = tombstone(5, 1);
        record.place.segment = 2;
        put(&mut copy, &record);
        assert_eq!(with(copy, LOG, 2), Verdict::Misplaced(of_another), "a copy of segment 2");
        assert_eq!(with(full(), LOG, 2), Verdict::Epoch(5), "a misdirected header");
    }
}
