//! Which life a segment has whose header cannot be read.
//!
//! Its records and its footer name their life. But a segment that was made ready for another life and has no record of
//! it yet still has those of the life before; they do not count any more, and pages in them may have been forgotten without
//! a tombstone. Segments are written anew oldest first. So:
//! - if another segment is older than what was found, this one was not written anew since: that is its life;
//! - if none is, it is the oldest, or it was written anew. Its first record is still there: then no record of another life
//!   was lost, and the segment as it stands can go, as its tombstones have nothing left to kill;
//! - if nothing in it is of this segment, and its header is whole and says another log or another number, it is a *stray*: a
//!   file that somebody copied or renamed. It is set aside. If a segment of the log may have stood there ([`may_replace`]), that
//!   may have forgotten anything: nothing in the log can be trusted. If it is of this log, and the segment that it says is not
//!   there or is older, what it forgot may come back: nothing that is not younger can be trusted;
//! - in all other cases it may have had tombstones of any age, and nothing in the log can be trusted. That is so for a blank
//!   segment, too: files get their names only once their header is durable.

use crate::disk::{BLOCK_BYTES, LogId, RecordHeader, SegmentHeader, life_in};
use crate::footer::FooterBlock;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Bytes that are read at once.
const READ_BYTES: u64 = 1 << 20;

/// What is to be done about a segment without a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It has this life.
    Life(u64),
    /// It is to be removed, and nothing else is lost with it.
    Remove,
    /// Its file is to be set aside, as it is none of the log's segments.
    Stray(Foreign),
    /// Nothing older than the newest segment can be trusted, nor that.
    DistrustAll,
}

/// What the header of a stray says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Foreign {
    /// It is of another log.
    Log,
    /// It is of another segment of this log.
    Segment {
        /// Which one.
        segment: u32,
        /// In which life.
        life: u64,
    },
}

/// Whether a stray of this number may lie where a segment of the log was, if none is known with a number above `last`. A new
/// segment gets the smallest number that is free, so the one above that may have been there. (What lay above a gap, which a
/// failure or a smaller capacity left just then, nobody can tell.)
pub fn may_replace(stray: u32, last: Option<u32>) -> bool {
    last.is_some_and(|last| stray <= last.saturating_add(1))
}

/// What a segment without a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headless {
    /// The largest life that a record or the footer names.
    pub life: Option<u64>,
    /// The first record is of that life.
    pub begins: bool,
    /// The header is whole, and not of this segment.
    pub foreign: Option<Foreign>,
}

impl Headless {
    /// Judges it. `oldest` is the smallest life that the headers of the other segments say.
    pub fn verdict(&self, oldest: Option<u64>) -> Verdict {
        match (self.life, self.foreign) {
            (None, Some(foreign)) => Verdict::Stray(foreign),
            (Some(life), _) if oldest.is_some_and(|oldest| oldest < life) => Verdict::Life(life),
            (Some(_), _) if self.begins => Verdict::Remove,
            _ => Verdict::DistrustAll,
        }
    }
}

/// Looks through a segment without a header: a state machine that says what to read next.
#[derive(Debug)]
pub struct LifeSearch {
    log_id: LogId,
    segment: u32,
    segment_bytes: u64,
    readable_bytes: u64,
    cursor: u64,
    first: Option<u64>,
    found: Headless,
}

impl LifeSearch {
    /// Begins on a segment of whose file `file_bytes` can be read.
    pub fn new(log_id: LogId, segment: u32, segment_bytes: u64, file_bytes: u64) -> LifeSearch {
        let readable_bytes = file_bytes.min(segment_bytes) / BLOCK * BLOCK;
        let found = Headless { life: None, begins: false, foreign: None };
        LifeSearch { log_id, segment, segment_bytes, readable_bytes, cursor: BLOCK, first: None, found }
    }

    /// Takes the segment's first block, if there is one.
    pub fn header(&mut self, block: &[u8]) {
        let Ok(SegmentHeader { log_id, segment, life }) = SegmentHeader::decode(block) else { return };
        self.found.foreign = match log_id == self.log_id {
            false => Some(Foreign::Log),
            true if segment == self.segment => None,
            true => Some(Foreign::Segment { segment, life }),
        };
    }

    /// Offset and bytes of what to read and [`feed`](Self::feed) next, in whole blocks; `None` when all was read.
    pub fn next_read(&self) -> Option<(u64, usize)> {
        let left = self.readable_bytes.saturating_sub(self.cursor);
        (left > 0).then_some((self.cursor, left.min(READ_BYTES) as usize))
    }

    /// Takes what was read: at least a block of it.
    pub fn feed(&mut self, bytes: &[u8]) {
        for block in bytes.chunks_exact(BLOCK_BYTES) {
            if let Some(life) = self.life_of(block) {
                self.found.life = self.found.life.max(Some(life));
                if self.cursor == BLOCK {
                    self.first = Some(life);
                }
            }
            self.cursor += BLOCK;
        }
    }

    fn life_of(&self, block: &[u8]) -> Option<u64> {
        let header = RecordHeader::decode_of_any_life(block, &self.log_id, self.segment, self.cursor);
        if let Ok(header) = header {
            return Some(header.place.life);
        }
        let life = life_in(block).filter(|_| self.cursor + BLOCK == self.segment_bytes)?;
        FooterBlock::decode(block, &self.log_id, self.segment, life, self.segment_bytes).ok().map(|_| life)
    }

    /// What was found.
    pub fn finish(self) -> Headless {
        Headless { begins: self.found.life.is_some() && self.first == self.found.life, ..self.found }
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

    fn tombstone(life: u64, block: u64) -> RecordHeader {
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let place = RecordPlace { segment: 3, life, offset: block * BLOCK };
        RecordHeader { place, number: life * 100 + block, durable: 0, body: RecordBody::Tombstone(id) }
    }

    fn put(bytes: &mut [u8], record: &RecordHeader) {
        bytes[record.place.offset as usize..][..BLOCK_BYTES].copy_from_slice(&record.encode(&LOG));
    }

    fn search(bytes: &[u8]) -> Headless {
        let mut search = LifeSearch::new(LOG, 3, BYTES as u64, bytes.len() as u64);
        search.header(bytes);
        while let Some((offset, len)) = search.next_read() {
            search.feed(&bytes[offset as usize..offset as usize + len]);
        }
        search.finish()
    }

    /// A full segment of life 5, with its footer.
    fn full() -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        bytes[..BLOCK_BYTES].copy_from_slice(&SegmentHeader { log_id: LOG, segment: 3, life: 5 }.encode());
        let records: Vec<RecordHeader> = (1..20).map(|block| tombstone(5, block)).collect();
        records.iter().for_each(|record| put(&mut bytes, record));
        let footer = Footer { segment: 3, life: 5, records: records.iter().filter_map(RecordSummary::of).collect() };
        let footer = footer.encode(&LOG);
        bytes[BYTES - footer.len()..].copy_from_slice(&footer);
        bytes
    }

    #[test]
    fn records_or_the_footer_say_it() {
        let mut bytes = full();
        assert_eq!(search(&bytes), Headless { life: Some(5), begins: true, foreign: None });
        assert_eq!(search(&bytes).verdict(Some(4)), Verdict::Life(5));
        bytes[BYTES - BLOCK_BYTES..].fill(0);
        assert_eq!(search(&bytes).life, Some(5), "without its footer");
        let mut bytes = full();
        bytes[BLOCK_BYTES..20 * BLOCK_BYTES].fill(7);
        assert_eq!(search(&bytes), Headless { life: Some(5), begins: false, foreign: None }, "the footer alone");
        assert_eq!(search(&bytes[..BYTES - 1]).life, None, "without the last block");
    }

    #[test]
    fn the_youngest_life_counts() {
        let mut bytes = full();
        put(&mut bytes, &tombstone(9, 1));
        assert_eq!(search(&bytes), Headless { life: Some(9), begins: true, foreign: None });
        let mut bytes = full();
        put(&mut bytes, &tombstone(9, 2));
        assert_eq!(search(&bytes), Headless { life: Some(9), begins: false, foreign: None });
    }

    #[test]
    fn what_may_have_been_written_anew_is_not_served() {
        let mut bytes = full();
        assert_eq!(search(&bytes).verdict(Some(6)), Verdict::Remove, "made ready, and nothing written to it");
        assert_eq!(search(&bytes).verdict(None), Verdict::Remove);
        bytes[BLOCK_BYTES + 100] ^= 1;
        assert_eq!(search(&bytes).verdict(Some(6)), Verdict::DistrustAll, "that was a tombstone of life 9, perhaps");
        assert_eq!(search(&bytes).verdict(Some(4)), Verdict::Life(5));
        assert_eq!(search(&vec![7; BYTES]).verdict(Some(4)), Verdict::DistrustAll);
        let mut blank = vec![0; BYTES];
        blank[..BLOCK_BYTES].fill(7);
        assert_eq!(search(&blank).verdict(Some(4)), Verdict::DistrustAll, "it had a header when it got its name");
        assert_eq!(search(&[]).verdict(Some(4)), Verdict::DistrustAll);
    }

    #[test]
    fn only_far_above_the_log_no_segment_of_it_was() {
        assert!(may_replace(0, Some(7)) && may_replace(7, Some(7)) && may_replace(8, Some(7)));
        assert!(!may_replace(9, Some(7)) && !may_replace(0, None) && may_replace(u32::MAX, Some(u32::MAX)));
    }

    #[test]
    fn what_is_of_another_log_or_segment_is_set_aside() {
        let with = |mut bytes: Vec<u8>, log_id, segment| {
            bytes[..BLOCK_BYTES].copy_from_slice(&SegmentHeader { log_id, segment, life: 5 }.encode());
            search(&bytes).verdict(Some(4))
        };
        assert_eq!(with(vec![7; BYTES], [8; 16], 3), Verdict::Stray(Foreign::Log));
        let of_another = Foreign::Segment { segment: 2, life: 5 };
        assert_eq!(with(vec![0; BYTES], LOG, 2), Verdict::Stray(of_another));
        let mut copy = vec![0; BYTES];
        let mut record = tombstone(5, 1);
        record.place.segment = 2;
        put(&mut copy, &record);
        assert_eq!(with(copy, LOG, 2), Verdict::Stray(of_another), "a copy of segment 2");
        assert_eq!(with(full(), LOG, 2), Verdict::Life(5), "a header that went astray");
    }
}
