//! Finding the records of one segment again: a state machine that says what to read next.
//!
//! Always true: what it reports stood, whole and checked, at the place that it names, in this log and this life of the
//! segment; or the footer of this life says so. It never looks at payloads but to search for the next header after a
//! hole.
//!
//! It reads the segment's end first. If that has a valid footer, the scan is complete, or needs the rest of the table;
//! else it hops from header to header.

use crate::planted::{Bug, has};
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, LogId, RecordBody, RecordHeader, RecordPlace};
use larder_format::footer::{FooterBlock, RecordSummary};

/// Bytes of a segment's end that are read first: the footer of some hundred records.
pub const TAIL_BYTES: u64 = 64 << 10;
/// Bytes that are read at once when a header has to be searched for.
const SEARCH_BYTES: u64 = 1 << 20;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// What to read next; an answer that is shorter means that the file ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanRead {
    /// Byte offset in the segment, in whole blocks.
    pub offset: u64,
    /// Bytes, in whole blocks.
    pub len: usize,
}

/// What one segment holds.
#[derive(Debug)]
pub struct ScannedSegment {
    /// Its number.
    pub segment: u32,
    /// Its life.
    pub life: u64,
    /// Its records, in order.
    pub records: Vec<RecordSummary>,
    /// Where the last of them ends.
    pub end: u64,
    /// Whether they come from the footer.
    pub footer: bool,
    /// Records that were begun and are not whole.
    pub torn: u64,
    /// The device did not give all of it, or a record that was durable is damaged: there may have been records that were
    /// not found.
    pub cut_short: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Looking {
    /// For a footer, in the segment's end.
    AtTail,
    /// For the whole table of this footer.
    AtTable(FooterBlock),
    /// A header should stand here.
    Hopping,
    /// None stood at the end of the last record. `torn`: what stood there looked like a broken one.
    Searching {
        torn: bool,
    },
    Done,
}

/// The scan of one segment.
#[derive(Debug)]
pub struct SegmentScan {
    log_id: LogId,
    segment_bytes: u64,
    readable_bytes: u64,
    cursor: u64,
    looking: Looking,
    found: ScannedSegment,
    /// Where the first record is missing.
    hole: Option<u64>,
    /// Up to here all was durable, as later records say.
    durable: u64,
}

impl SegmentScan {
    /// Begins on segment `segment`, whose header says `life`, and of whose file `file_bytes` can be read.
    pub fn new(log_id: LogId, segment: u32, life: u64, segment_bytes: u64, file_bytes: u64) -> SegmentScan {
        let found =
            ScannedSegment { segment, life, records: Vec::new(), end: BLOCK, footer: false, torn: 0, cut_short: false };
        let readable_bytes = file_bytes.min(segment_bytes) / BLOCK * BLOCK;
        let looking = if readable_bytes == segment_bytes { Looking::AtTail } else { Looking::Hopping };
        SegmentScan { log_id, segment_bytes, readable_bytes, cursor: BLOCK, looking, found, hole: None, durable: 0 }
    }

    /// What to read and [`feed`](Self::feed) next; `None` when the scan is complete.
    pub fn next_read(&self) -> Option<ScanRead> {
        let wanted = match &self.looking {
            Looking::Done => return None,
            Looking::AtTail => {
                let len = TAIL_BYTES.min(self.segment_bytes - BLOCK);
                return Some(ScanRead { offset: self.segment_bytes - len, len: len as usize });
            }
            Looking::AtTable(footer) => {
                return Some(ScanRead { offset: footer.table_offset(), len: footer.table_blocks_bytes() });
            }
            Looking::Hopping => BLOCK,
            Looking::Searching { .. } => SEARCH_BYTES,
        };
        let left = self.readable_bytes.saturating_sub(self.cursor);
        (left > 0).then_some(ScanRead { offset: self.cursor, len: wanted.min(left) as usize })
    }

    /// Takes what was read.
    pub fn feed(&mut self, bytes: &[u8]) {
        match std::mem::replace(&mut self.looking, Looking::Hopping) {
            Looking::AtTail => self.tail(bytes),
            Looking::AtTable(footer) => self.table(&footer, bytes),
            Looking::Hopping => self.hop(bytes),
            Looking::Searching { torn } => {
                self.looking = Looking::Searching { torn };
                self.search(bytes);
            }
            Looking::Done => self.looking = Looking::Done,
        }
    }

    /// The device cannot give what was asked for. A footer can be done without; else what was found so far is all there
    /// is.
    pub fn stop(&mut self) {
        if matches!(self.looking, Looking::AtTail | Looking::AtTable(_)) {
            self.looking = Looking::Hopping;
            return;
        }
        self.found.cut_short = true;
        self.looking = Looking::Done;
    }

    /// Ends the scan.
    pub fn finish(mut self) -> ScannedSegment {
        if let Looking::Searching { torn: true } = self.looking {
            self.found.torn += 1;
        }
        // A crash leaves holes behind what was durable, never before it.
        let damaged = self.hole.is_some_and(|hole| hole < self.durable) && !has(Bug::HolesAreTorn);
        self.found.cut_short |= damaged;
        self.found
    }

    fn tail(&mut self, bytes: &[u8]) {
        let Some(last) = bytes.len().checked_sub(BLOCK_BYTES) else { return };
        let (segment, life) = (self.found.segment, self.found.life);
        let Ok(footer) = FooterBlock::decode(&bytes[last..], &self.log_id, segment, life, self.segment_bytes) else {
            return;
        };
        match last.checked_sub(footer.table_blocks_bytes()) {
            Some(table) => self.table(&footer, &bytes[table..last]),
            None => self.looking = Looking::AtTable(footer),
        }
    }

    fn table(&mut self, footer: &FooterBlock, bytes: &[u8]) {
        let Ok(footer) = footer.decode_table(bytes) else { return };
        self.found.end = footer.records.last().map_or(BLOCK, |last| last.offset() + last.record_bytes());
        self.found.records = footer.records;
        self.found.footer = true;
        self.looking = Looking::Done;
    }

    fn hop(&mut self, bytes: &[u8]) {
        match self.decode(bytes, self.cursor) {
            Ok(header) => self.take(header),
            Err(error) => {
                let torn = matches!(error, DecodeError::Checksum(_) | DecodeError::Short(_));
                self.hole.get_or_insert(self.cursor);
                self.looking = if bytes.is_empty() { Looking::Done } else { Looking::Searching { torn } };
            }
        }
    }

    fn search(&mut self, bytes: &[u8]) {
        for block in bytes.chunks_exact(BLOCK_BYTES) {
            if let Ok(header) = self.decode(block, self.cursor) {
                self.found.torn += 1;
                return self.take(header);
            }
            self.cursor += BLOCK;
        }
        if bytes.len() < BLOCK_BYTES {
            self.cursor = self.readable_bytes;
        }
    }

    fn decode(&self, block: &[u8], offset: u64) -> Result<RecordHeader, DecodeError> {
        let place = RecordPlace { segment: self.found.segment, life: self.found.life, offset };
        let header = RecordHeader::decode(block, &self.log_id, place)?;
        match offset + header.record_bytes() as u64 <= self.segment_bytes {
            true => Ok(header),
            false => Err(DecodeError::Invalid("length of a record")),
        }
    }

    fn take(&mut self, header: RecordHeader) {
        self.cursor = header.place.offset + header.record_bytes() as u64;
        self.looking = Looking::Hopping;
        self.found.end = self.cursor;
        self.durable = self.durable.max(header.durable);
        self.found.cut_short |= matches!(header.body, RecordBody::Lost { .. });
        self.found.records.extend(RecordSummary::of(&header));
    }
}
