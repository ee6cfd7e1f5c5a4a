//! Finding the records of one segment again: a state machine that says what to read next.
//!
//! Always true: what it reports stood, whole and checked, at the place that it names, in this log and this life of the
//! segment. It never looks at payloads but to search for the next header after a hole.

use super::Entry;
use larder_format::PageId;
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, LogId, RecordBody, RecordHeader, RecordPlace, SegmentHeader};

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

/// A record that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundRecord {
    /// A page.
    Page {
        /// Its name.
        id: PageId,
        /// Its place and what the index keeps of it.
        entry: Entry,
    },
    /// A tombstone.
    Tombstone {
        /// The page it kills.
        id: PageId,
        /// The number of the record.
        number: u64,
    },
}

/// What one segment holds.
#[derive(Debug)]
pub struct ScannedSegment {
    /// Its number.
    pub segment: u32,
    /// Its life, or why its header does not say.
    pub life: Result<u64, DecodeError>,
    /// Its records, in order.
    pub records: Vec<FoundRecord>,
    /// Where the last of them ends.
    pub end: u64,
    /// Whether a seal record stands there.
    pub sealed: bool,
    /// Records that were begun and are not whole.
    pub torn: u64,
    /// The device did not give all of it: there may be records that were not found.
    pub cut_short: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Looking {
    ForSegmentHeader,
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
}

impl SegmentScan {
    /// Begins at the header of segment `segment`, of whose file `file_bytes` can be read.
    pub fn new(log_id: LogId, segment: u32, segment_bytes: u64, file_bytes: u64) -> SegmentScan {
        let life = Err(DecodeError::Short("segment header"));
        let found =
            ScannedSegment { segment, life, records: Vec::new(), end: BLOCK, sealed: false, torn: 0, cut_short: false };
        let readable_bytes = file_bytes.min(segment_bytes) / BLOCK * BLOCK;
        SegmentScan { log_id, segment_bytes, readable_bytes, cursor: 0, looking: Looking::ForSegmentHeader, found }
    }

    /// What to read and [`feed`](Self::feed) next; `None` when the scan is complete.
    pub fn next_read(&self) -> Option<ScanRead> {
        let wanted = match self.looking {
            Looking::Done => return None,
            Looking::ForSegmentHeader | Looking::Hopping => BLOCK,
            Looking::Searching { .. } => SEARCH_BYTES,
        };
        let left = self.readable_bytes.saturating_sub(self.cursor);
        (left > 0).then_some(ScanRead { offset: self.cursor, len: wanted.min(left) as usize })
    }

    /// Takes what was read.
    pub fn feed(&mut self, bytes: &[u8]) {
        match self.looking {
            Looking::ForSegmentHeader => self.segment_header(bytes),
            Looking::Hopping => self.hop(bytes),
            Looking::Searching { torn } => self.search(bytes, torn),
            Looking::Done => {}
        }
    }

    /// The device cannot give what was asked for: what was found so far is all there is.
    pub fn stop(&mut self) {
        self.found.cut_short = true;
        self.looking = Looking::Done;
    }

    /// Ends the scan.
    pub fn finish(mut self) -> ScannedSegment {
        if let Looking::Searching { torn: true } = self.looking {
            self.found.torn += 1;
        }
        self.found
    }

    fn segment_header(&mut self, bytes: &[u8]) {
        let checked = SegmentHeader::decode(bytes).and_then(|header| {
            match header.log_id == self.log_id && header.segment == self.found.segment {
                true => Ok(header.life),
                false => Err(DecodeError::Invalid("log or number of a segment")),
            }
        });
        self.looking = if checked.is_ok() { Looking::Hopping } else { Looking::Done };
        self.found.life = checked;
        self.cursor = BLOCK;
    }

    fn hop(&mut self, bytes: &[u8]) {
        match self.decode(bytes, self.cursor) {
            Ok(header) => self.take(header),
            Err(error) => {
                let torn = matches!(error, DecodeError::Checksum(_) | DecodeError::Short(_));
                self.looking = if bytes.is_empty() { Looking::Done } else { Looking::Searching { torn } };
            }
        }
    }

    fn search(&mut self, bytes: &[u8], torn: bool) {
        for block in bytes.chunks_exact(BLOCK_BYTES) {
            if let Ok(header) = self.decode(block, self.cursor) {
                // A seal behind the last record closes the segment cleanly, but for a torn one before it.
                let hole = torn || header.body != RecordBody::Seal;
                self.found.torn += u64::from(hole);
                return self.take(header);
            }
            self.cursor += BLOCK;
        }
        if bytes.len() < BLOCK_BYTES {
            self.cursor = self.readable_bytes;
        }
    }

    fn decode(&self, block: &[u8], offset: u64) -> Result<RecordHeader, DecodeError> {
        let life = self.found.life.clone()?;
        let place = RecordPlace { segment: self.found.segment, life, offset };
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
        match header.body {
            RecordBody::Page(meta) => {
                let entry = Entry::of(header.place, header.number, &meta);
                self.found.records.push(FoundRecord::Page { id: meta.id, entry });
            }
            RecordBody::Tombstone(id) => self.found.records.push(FoundRecord::Tombstone { id, number: header.number }),
            RecordBody::Seal => {
                self.found.sealed = true;
                self.looking = Looking::Done;
            }
        }
    }
}
