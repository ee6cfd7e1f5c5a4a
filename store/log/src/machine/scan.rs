//! Scan of one segment: a state machine that returns the next read, and takes its bytes.
//!
//! Invariants:
//! - Every reported record was found whole and checked at the place that it names, in this log and
//!   this epoch, or is listed by the epoch's footer.
//! - The scan never reads payloads, except while it searches for the next header after a hole.
//!
//! States: the scan reads the tail of the segment first. With a valid footer there it is done, or
//! it needs the rest of the footer's table. Otherwise it hops from header to header.

use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, LogId, RecordBody, RecordHeader, RecordPlace};
use larder_format::footer::{FooterBlock, RecordSummary};
use larder_runtime::fail_point;

/// Bytes of the first read, at the end of the segment: a footer of several hundred records.
pub const TAIL_BYTES: u64 = 64 << 10;
/// Bytes per read of a search for the next header. The search visits every block, so small reads
/// would take a round trip each.
const SEARCH_BYTES: u64 = 1 << 20;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// A read to perform. Fewer bytes mean that the file ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanRead {
    pub offset: u64,
    pub len: usize,
}

#[derive(Debug)]
pub struct ScannedSegment {
    pub segment: u32,
    pub epoch: u64,
    /// In the order of their offsets.
    pub records: Vec<RecordSummary>,
    pub end: u64,
    pub footer: bool,
    pub torn: u64,
    /// The device failed to read a part of the segment, or a record that was durable is damaged.
    /// There may be records that the scan did not find.
    pub cut_short: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ScanState {
    /// Expects a footer in the tail of the segment.
    ReadTail,
    /// Expects the whole table of this footer.
    ReadFooterTable(FooterBlock),
    /// Expects a record header at the cursor.
    Hop,
    /// Found no header after the last record, and searches block by block. `torn` if the block
    /// there looked like a damaged header.
    Search {
        torn: bool,
    },
    Done,
}

/// Scan of one segment. The caller repeats [`next_read`](Self::next_read) and [`feed`](Self::feed)
/// until no read is left, then calls [`finish`](Self::finish).
#[derive(Debug)]
pub struct SegmentScan {
    log_id: LogId,
    segment_bytes: u64,
    readable_bytes: u64,
    cursor: u64,
    state: ScanState,
    found: ScannedSegment,
    /// Offset of the first missing record.
    hole: Option<u64>,
    /// Offset before which every record was durable, according to later records.
    durable_end: u64,
}

impl SegmentScan {
    /// Starts the scan of a segment whose header names `epoch` and whose file has `file_bytes`.
    pub fn new(log_id: LogId, segment: u32, epoch: u64, segment_bytes: u64, file_bytes: u64) -> SegmentScan {
        let found = ScannedSegment {
            segment,
            epoch,
            records: Vec::new(),
            end: BLOCK,
            footer: false,
            torn: 0,
            cut_short: false,
        };
        let readable_bytes = file_bytes.min(segment_bytes) / BLOCK * BLOCK;
        let state = if readable_bytes == segment_bytes { ScanState::ReadTail } else { ScanState::Hop };
        SegmentScan { log_id, segment_bytes, readable_bytes, cursor: BLOCK, state, found, hole: None, durable_end: 0 }
    }

    /// The next read, whose bytes go to [`feed`](Self::feed). `None` when the scan is complete.
    pub fn next_read(&self) -> Option<ScanRead> {
        let wanted = match &self.state {
            ScanState::Done => return None,
            ScanState::ReadTail => {
                let len = TAIL_BYTES.min(self.segment_bytes - BLOCK);
                return Some(ScanRead { offset: self.segment_bytes - len, len: len as usize });
            }
            ScanState::ReadFooterTable(footer) => {
                return Some(ScanRead { offset: footer.table_offset(), len: footer.table_blocks_bytes() });
            }
            ScanState::Hop => BLOCK,
            ScanState::Search { .. } => SEARCH_BYTES,
        };
        let left = self.readable_bytes.saturating_sub(self.cursor);
        (left > 0).then_some(ScanRead { offset: self.cursor, len: wanted.min(left) as usize })
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        match std::mem::replace(&mut self.state, ScanState::Hop) {
            ScanState::ReadTail => self.parse_tail(bytes),
            ScanState::ReadFooterTable(footer) => self.parse_footer_table(&footer, bytes),
            ScanState::Hop => self.parse_header(bytes),
            ScanState::Search { torn } => {
                self.state = ScanState::Search { torn };
                self.search_headers(bytes);
            }
            ScanState::Done => self.state = ScanState::Done,
        }
    }

    /// Reports that the device failed to perform [`next_read`](Self::next_read). Without the footer
    /// the scan continues with the headers; after another failure it ends with the records found so
    /// far.
    pub fn read_failed(&mut self) {
        if matches!(self.state, ScanState::ReadTail | ScanState::ReadFooterTable(_)) {
            self.state = ScanState::Hop;
            return;
        }
        self.found.cut_short = true;
        self.state = ScanState::Done;
    }

    pub fn finish(mut self) -> ScannedSegment {
        if let ScanState::Search { torn: true } = self.state {
            self.found.torn += 1;
        }
        // A crash leaves holes only after the durable part. A hole inside it is damage.
        let damaged = self.hole.is_some_and(|hole| hole < self.durable_end) && !fail_point!("log.hole-is-torn-write");
        self.found.cut_short |= damaged;
        self.found
    }

    fn parse_tail(&mut self, bytes: &[u8]) {
        let Some(last) = bytes.len().checked_sub(BLOCK_BYTES) else { return };
        let ScannedSegment { segment, epoch, .. } = self.found;
        let Ok(footer) = FooterBlock::decode(&bytes[last..], &self.log_id, segment, epoch, self.segment_bytes) else {
            return;
        };
        match last.checked_sub(footer.table_blocks_bytes()) {
            Some(table) => self.parse_footer_table(&footer, &bytes[table..last]),
            None => self.state = ScanState::ReadFooterTable(footer),
        }
    }

    fn parse_footer_table(&mut self, footer: &FooterBlock, bytes: &[u8]) {
        let Ok(footer) = footer.decode_table(bytes) else { return };
        self.found.end = footer.records.last().map_or(BLOCK, |last| last.offset() + last.record_bytes());
        self.found.records = footer.records;
        self.found.footer = true;
        self.state = ScanState::Done;
    }

    fn parse_header(&mut self, bytes: &[u8]) {
        match self.decode_header(bytes, self.cursor) {
            Ok(header) => self.add_record(header),
            Err(error) => {
                let torn = matches!(error, DecodeError::Checksum(_) | DecodeError::Short(_));
                self.hole.get_or_insert(self.cursor);
                self.state = if bytes.is_empty() { ScanState::Done } else { ScanState::Search { torn } };
            }
        }
    }

    fn search_headers(&mut self, bytes: &[u8]) {
        for block in bytes.chunks_exact(BLOCK_BYTES) {
            if let Ok(header) = self.decode_header(block, self.cursor) {
                self.found.torn += 1;
                return self.add_record(header);
            }
            self.cursor += BLOCK;
        }
        if bytes.len() < BLOCK_BYTES {
            self.cursor = self.readable_bytes;
        }
    }

    fn decode_header(&self, block: &[u8], offset: u64) -> Result<RecordHeader, DecodeError> {
        let place = RecordPlace { segment: self.found.segment, epoch: self.found.epoch, offset };
        let header = RecordHeader::decode(block, &self.log_id, place)?;
        match offset + header.record_bytes() as u64 <= self.segment_bytes {
            true => Ok(header),
            false => Err(DecodeError::Invalid("length of a record")),
        }
    }

    fn add_record(&mut self, header: RecordHeader) {
        self.cursor = header.place.offset + header.record_bytes() as u64;
        self.state = ScanState::Hop;
        self.found.end = self.cursor;
        self.durable_end = self.durable_end.max(header.durable);
        self.found.cut_short |= matches!(header.body, RecordBody::Lost { .. });
        self.found.records.extend(RecordSummary::of(&header));
    }
}
