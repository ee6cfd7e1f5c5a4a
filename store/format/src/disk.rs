//! The blocks of an L3 segment log.
//!
//! Invariants:
//! - Every block carries magic, CRC, version and log id. A reader checks all four.
//! - A record repeats its segment, epoch and offset. So a reader detects stale and misdirected
//!   writes.
//! - An epoch is larger than all earlier epochs of the log. Record numbers grow with the epochs.
//! - A tombstone is never older than the records it deletes. Segments are rewritten oldest epoch
//!   first, so a tombstone outlives those records.
//! - A segment has its final name only if its header is durable.
//!
//! ```text
//! DIR/larder.sb         superblock (one 4 KiB block): the constants of this log
//! DIR/larder.sb2        the same block again: one valid copy is enough
//! DIR/00000000.seg      segments, all of one length, preallocated: 00000000, 00000001, …
//! DIR/00000002.seg.new  a segment under construction: readers ignore it
//! DIR/00000099.stray    a misplaced file that had the name of a segment (also .stray.1, …):
//!                       an operator examines and removes it
//!
//! segment, front to back:
//! ┌ segment header ┬ record header ┬ payload         ┬ record … ┬ anything ┬ table     ┬ footer ┐
//! │ 4 KiB          │ 4 KiB         │ padded to 4 KiB │          │ (old)    │ of footer │ 4 KiB  │
//! ```
//!
//! Reasons for this order:
//! - A node fills a segment front to back. A reader hops from header to header, so headers alone
//!   rebuild the index.
//! - A node rewrites a segment only as a whole, under a new *epoch*. Where a record of that epoch
//!   is missing, a reader may find remains of an earlier epoch, a torn block or a misdirected
//!   write. Each of these fails one of magic, CRC, log id, epoch and offset.
//! - A full segment ends with a *footer* ([`crate::footer`]): a table of all its records, found
//!   with one read. Hopping costs a read per record. The node writes the footer when no write of
//!   the segment is in flight. A segment without a valid footer of its epoch is hopped through.
//!
//! Segment creation: the node writes the header under another name, makes it durable, then renames
//! the file. So a segment with a blank or missing header is damaged. One whose header has another
//! number than its name was copied or renamed by an operator ([`crate::epoch`]). The node also
//! creates a segment anew if it was prepared and never received a record. So headers that a crash
//! may tear precede records that still state the previous epoch.
//!
//! Holes: records are written concurrently, so a crash may leave a hole before a complete record. A
//! reader that meets an invalid block searches block by block for the next valid one. It then sees
//! payload bytes, which an attacker may have chosen. A forged header would need the log's random
//! id, which never leaves the node.
//!
//! Payloads: a record's header is written together with its payload, in any order. The header's CRC
//! covers the header, and its chunk CRCs cover the payload. A header whose payload is missing is
//! therefore detected when the page is read.
//!
//! Durability: a crash loses only what was not durable. Every record states the offset up to which
//! its segment was durable when the record was planned. A hole before that offset is damage, which
//! may have been a tombstone. A hole after it is the normal result of a crash.
//!
//! Record kinds:
//! - *page*: a header and the payload.
//! - *tombstone*: deletes all records of its key with a smaller record number.
//! - *void*: skips bytes that a repair took out and that no reader misses ([`crate::verify`]).
//! - *lost*: skips damaged bytes that may have been tombstones. Nothing older than it can be
//!   trusted.
//!
//! Token ids: the header of a page ends with the list of its token ids. The padding behind a header
//! is zero, which is an empty list. So a header without the list reads as one without token ids,
//! and a build that knows no list ignores it. Indexers of KV events use them. No page depends on
//! them.
//!
//! Versions: [`VERSION`] 1 is the first. A build refuses a superblock of another version. A segment
//! or record whose version differs from the superblock's ends the scan of its segment.

use crate::codec::{DecodeError, Put, Reader, Result};
use crate::limits::MAX_TOKEN_IDS;
use crate::page::{PageId, PageMeta};
use crate::{NamespaceId, PageKey};

/// Maximum number of misplaced files that are kept per segment number. It bounds the search for a
/// free name.
const MISPLACED_MAX: u32 = 1000;

/// Candidate names for a misplaced file with the name of this segment. The caller takes the first
/// that is free.
pub fn misplaced_names(segment: u32) -> impl Iterator<Item = String> {
    (0..MISPLACED_MAX).map(move |nth| match nth {
        0 => format!("{segment:08}.stray"),
        _ => format!("{segment:08}.stray.{nth}"),
    })
}

/// Length of a block in bytes, and the alignment of every record. It satisfies the alignment that
/// direct I/O requires.
pub const BLOCK_BYTES: usize = 4096;
/// Version of all blocks in this module. A decoder refuses every other version, so a change of any
/// layout needs a new one.
pub const VERSION: u32 = 1;
/// Maximum segment length in bytes. It bounds the lengths that a superblock can make a reader
/// trust.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 40;
/// Minimum segment length in bytes: room for headers, a footer and some pages. A decoder refuses a
/// superblock with shorter segments.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

const SUPERBLOCK_MAGIC: [u8; 4] = *b"LDSB";
const SEGMENT_MAGIC: [u8; 4] = *b"LDSG";
pub(crate) const RECORD_MAGIC: [u8; 4] = *b"LDRC";
/// Offset of the log id in every block, after magic, CRC and version.
pub(crate) const LOG_ID_AT: usize = 12;
/// Offset of the epoch in record headers and footers, after the log id and the segment.
const EPOCH_AT: usize = LOG_ID_AT + 20;

/// Random identity of a log. Only the node knows it, so no client can forge a record inside a
/// payload.
pub type LogId = [u8; 16];

/// Exclusive limit of epochs and record numbers. A node counts on from the largest it reads, so a
/// damaged number must not bring it near the overflow.
const COUNT_MAX: u64 = 1 << 62;

/// Returns `number` if a node can count on from it. A number at the end of its range would overflow
/// on the next record or epoch, so only a forged block can hold it.
pub(crate) fn countable(number: u64, what: &'static str) -> Result<u64> {
    if number < COUNT_MAX { Ok(number) } else { Err(DecodeError::Invalid(what)) }
}

/// The epoch that an unverified record header or footer states. The caller must verify the block
/// with it: the value alone proves nothing.
pub(crate) fn epoch_in(block: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(*block.get(EPOCH_AT..)?.first_chunk()?))
}

pub fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(BLOCK_BYTES)
}

/// Length in a segment of a page with this payload: the header block and the padded payload.
pub fn record_bytes(payload_bytes: usize) -> usize {
    BLOCK_BYTES + padded(payload_bytes)
}

/// Pads a block and stamps its CRC. Every block begins with magic (4), CRC-32 of the rest (4),
/// version (4).
pub(crate) fn seal(mut block: Vec<u8>) -> Vec<u8> {
    assert!(block.len() <= BLOCK_BYTES, "the fields exceed a block");
    block.resize(BLOCK_BYTES, 0);
    let crc = crc32fast::hash(&block[8..]);
    block[4..8].copy_from_slice(&crc.to_le_bytes());
    block
}

pub(crate) fn begin(magic: [u8; 4]) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    block.put(&magic);
    block.put_u32(0);
    block.put_u32(VERSION);
    block
}

pub(crate) fn open<'a>(block: &'a [u8], magic: [u8; 4], what: &'static str) -> Result<Reader<'a>> {
    let mut reader = Reader::new(block.get(..BLOCK_BYTES).ok_or(DecodeError::Short(what))?);
    if reader.array::<4>(what)? != magic {
        return Err(DecodeError::Invalid(what));
    }
    let crc = reader.u32(what)?;
    if crc32fast::hash(&block[8..BLOCK_BYTES]) != crc {
        return Err(DecodeError::Checksum(what));
    }
    let version = reader.u32(what)?;
    if version != VERSION {
        return Err(DecodeError::Version { what, found: version, supported: VERSION });
    }
    Ok(reader)
}

/// Constants of one device's log. The node writes both copies of the superblock once, when it
/// creates the log. Every later start reads them before any segment, and restores a damaged one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Random identity of the log. Every block repeats it, so blocks of another log are never
    /// accepted.
    pub log_id: LogId,
    pub segment_bytes: u64,
}

impl Superblock {
    /// Encodes the superblock as one block: the fields, padding of zeros, and the CRC over both.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = begin(SUPERBLOCK_MAGIC);
        block.put(&self.log_id);
        block.put_u64(self.segment_bytes);
        seal(block)
    }

    /// Decodes and verifies one block. Errors name the first field that is wrong. The lengths of a
    /// decoded superblock are within their limits.
    pub fn decode(block: &[u8]) -> Result<Self> {
        let mut reader = open(block, SUPERBLOCK_MAGIC, "superblock")?;
        let superblock = Self { log_id: reader.array("log id")?, segment_bytes: reader.u64("segment bytes")? };
        let bytes = superblock.segment_bytes;
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(DecodeError::Invalid("segment bytes"));
        }
        Ok(superblock)
    }
}

/// First block of a segment. It is durable before the segment gets its final name, so a named
/// segment once had a valid header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    pub log_id: LogId,
    pub segment: u32,
    /// Epoch of the segment's content: larger than any earlier epoch of the log. Records of other
    /// epochs in the same file are stale.
    pub epoch: u64,
}

impl SegmentHeader {
    pub fn encode(&self) -> Vec<u8> {
        let mut block = begin(SEGMENT_MAGIC);
        block.put(&self.log_id);
        block.put_u32(self.segment);
        block.put_u64(self.epoch);
        seal(block)
    }

    /// Decodes and verifies one block. The caller compares log and segment with what it expects.
    pub fn decode(block: &[u8]) -> Result<Self> {
        let mut reader = open(block, SEGMENT_MAGIC, "segment header")?;
        let header =
            Self { log_id: reader.array("log id")?, segment: reader.u32("segment")?, epoch: reader.u64("epoch")? };
        countable(header.epoch, "epoch")?;
        Ok(header)
    }

    /// Decodes the header of segment `segment` of the log `log_id` and returns its epoch. Fails if
    /// the header is of another log or segment.
    pub fn decode_epoch(block: &[u8], log_id: &LogId, segment: u32) -> Result<u64> {
        let header = Self::decode(block)?;
        match header.log_id == *log_id && header.segment == segment {
            true => Ok(header.epoch),
            false => Err(DecodeError::Invalid("log or number of the segment")),
        }
    }
}

/// Location of a record. The record repeats it, so that a reader detects a misdirected write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordPlace {
    pub segment: u32,
    pub epoch: u64,
    pub offset: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordBody {
    Page(PageMeta),
    Tombstone(PageId),
    /// Bytes to skip: a repair took out the record that was here.
    Void {
        /// Distance to the next record in bytes, including this header. A multiple of
        /// [`BLOCK_BYTES`].
        bytes: u64,
    },
    /// Bytes to skip whose records are unknown. They may have deleted anything older.
    Lost {
        bytes: u64,
    },
}

/// Header of a record, one block long. Its CRC covers the header alone: the payload has CRCs of its
/// own in [`PageMeta`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    pub place: RecordPlace,
    /// Record number. It grows with every record of the log, across segments, so it orders puts and
    /// deletions.
    pub number: u64,
    /// Byte offset in the segment up to which all data was durable when the record was planned. 0:
    /// unknown.
    pub durable: u64,
    pub body: RecordBody,
}

impl RecordHeader {
    pub fn record_bytes(&self) -> usize {
        match &self.body {
            RecordBody::Page(meta) => record_bytes(meta.payload_bytes()),
            RecordBody::Tombstone(_) => BLOCK_BYTES,
            RecordBody::Void { bytes } | RecordBody::Lost { bytes } => *bytes as usize,
        }
    }

    /// Encodes the header as one block of the log `log_id`. The caller writes the payload of a page
    /// behind it, padded to whole blocks.
    pub fn encode(&self, log_id: &LogId) -> Vec<u8> {
        let mut block = begin(RECORD_MAGIC);
        block.put(log_id);
        block.put_u32(self.place.segment);
        block.put_u64(self.place.epoch);
        block.put_u64(self.place.offset);
        block.put_u64(self.number);
        match &self.body {
            RecordBody::Page(meta) => {
                block.put_u8(1);
                meta.encode(&mut block);
            }
            RecordBody::Tombstone(id) => {
                block.put_u8(2);
                block.put(&id.namespace.0);
                block.put(&id.key.0);
            }
            RecordBody::Void { bytes } => {
                block.put_u8(3);
                block.put_u64(*bytes);
            }
            RecordBody::Lost { bytes } => {
                block.put_u8(4);
                block.put_u64(*bytes);
            }
        }
        block.put_u64(self.durable);
        if let RecordBody::Page(meta) = &self.body {
            block.put_list(&meta.token_ids, |out, &token| out.put_u32(token));
        }
        seal(block)
    }

    /// Decodes a header block and verifies that it belongs at `place` of the log `log_id`. An
    /// intact header of another place is an error: it is stale or misdirected.
    pub fn decode(block: &[u8], log_id: &LogId, place: RecordPlace) -> Result<Self> {
        let record = Self::decode_at_stated_place(block, log_id)?;
        match record.place == place {
            true => Ok(record),
            false => Err(DecodeError::Invalid("record place")),
        }
    }

    /// Decodes a header block of the log `log_id` at whatever place the block itself states. The
    /// caller must compare [`place`](Self::place) with the place that it read from.
    pub fn decode_at_stated_place(block: &[u8], log_id: &LogId) -> Result<Self> {
        let mut reader = open(block, RECORD_MAGIC, "record header")?;
        if reader.array::<16>("log id")? != *log_id {
            return Err(DecodeError::Invalid("log id of a record"));
        }
        let place =
            RecordPlace { segment: reader.u32("segment")?, epoch: reader.u64("epoch")?, offset: reader.u64("offset")? };
        let number = countable(reader.u64("record number")?, "record number")?;
        let mut body = match reader.u8("record kind")? {
            1 => RecordBody::Page(PageMeta::decode(&mut reader)?),
            2 => RecordBody::Tombstone(PageId {
                namespace: NamespaceId(reader.array("namespace")?),
                key: PageKey(reader.array("page key")?),
            }),
            3 => RecordBody::Void { bytes: whole_blocks(reader.u64("bytes of a void")?)? },
            4 => RecordBody::Lost { bytes: whole_blocks(reader.u64("bytes of a void")?)? },
            _ => return Err(DecodeError::Invalid("record kind")),
        };
        let durable = reader.u64("durable bytes")?;
        if let RecordBody::Page(meta) = &mut body {
            meta.token_ids = reader.list(MAX_TOKEN_IDS, "token ids", |r| r.u32("token id"))?;
        }
        Ok(Self { place, number, durable, body })
    }

    /// Decodes a header block that belongs at `offset` of the segment, in any epoch.
    pub(crate) fn decode_any_epoch(block: &[u8], log_id: &LogId, segment: u32, offset: u64) -> Result<Self> {
        let epoch = epoch_in(block).ok_or(DecodeError::Short("epoch"))?;
        Self::decode(block, log_id, RecordPlace { segment, epoch, offset })
    }
}

fn whole_blocks(bytes: u64) -> Result<u64> {
    match (BLOCK_BYTES as u64..1 << 48).contains(&bytes) && bytes.is_multiple_of(BLOCK_BYTES as u64) {
        true => Ok(bytes),
        false => Err(DecodeError::Invalid("bytes of a void")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{MAX_CHUNKS, MAX_PARTS};

    const LOG: LogId = [9; 16];

    fn place() -> RecordPlace {
        RecordPlace { segment: 3, epoch: 9, offset: 8192 }
    }

    fn page(parts: usize, chunks_each: usize) -> PageMeta {
        PageMeta {
            id: PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) },
            parent: PageKey([3; 32]),
            position: 4,
            generation: 5,
            expires_unix_ms: 6,
            part_bytes: vec![(chunks_each * crate::CHUNK_BYTES - 1) as u32; parts],
            chunk_crcs: (0..(parts * chunks_each) as u32).collect(),
            token_ids: Vec::new(),
        }
    }

    #[test]
    fn blocks_round_trip() {
        let sb = Superblock { log_id: LOG, segment_bytes: 64 << 20 };
        assert_eq!(Superblock::decode(&sb.encode()).unwrap(), sb);
        let header = SegmentHeader { log_id: LOG, segment: 1, epoch: 2 };
        assert_eq!(SegmentHeader::decode(&header.encode()).unwrap(), header);
        for body in [
            RecordBody::Page(page(3, 2)),
            RecordBody::Page(PageMeta { token_ids: vec![7, 0, u32::MAX], ..page(3, 2) }),
            RecordBody::Tombstone(page(1, 1).id),
            RecordBody::Void { bytes: 8192 },
            RecordBody::Lost { bytes: 4096 },
        ] {
            let record = RecordHeader { place: place(), number: 77, durable: 4096, body };
            let block = record.encode(&LOG);
            assert_eq!(RecordHeader::decode(&block, &LOG, place()).unwrap(), record);
            assert_eq!(RecordHeader::decode_any_epoch(&block, &LOG, 3, 8192).unwrap(), record);
            assert!(RecordHeader::decode_any_epoch(&block, &LOG, 3, 4096).is_err());
        }
    }

    #[test]
    fn largest_page_fits_a_header() {
        let meta = PageMeta { token_ids: vec![1; MAX_TOKEN_IDS], ..page(MAX_PARTS, 2) };
        meta.validate().unwrap();
        RecordHeader { place: place(), number: 1, durable: 0, body: RecordBody::Page(meta) }.encode(&LOG);
        const { assert!(200 + 4 * (MAX_PARTS + MAX_CHUNKS + MAX_TOKEN_IDS) < BLOCK_BYTES) };
    }

    #[test]
    fn page_with_too_many_token_ids_is_refused() {
        let meta = PageMeta { token_ids: vec![1; MAX_TOKEN_IDS + 1], ..page(1, 1) };
        assert!(meta.validate().is_err());
        let block = RecordHeader { place: place(), number: 1, durable: 0, body: RecordBody::Page(meta) }.encode(&LOG);
        assert!(RecordHeader::decode(&block, &LOG, place()).is_err());
    }

    #[test]
    fn header_without_token_ids_has_the_padding_of_other_records() {
        let header = |token_ids| {
            let body = RecordBody::Page(PageMeta { token_ids, ..page(1, 1) });
            RecordHeader { place: place(), number: 1, durable: 0, body }.encode(&LOG)
        };
        let (without, with) = (header(vec![]), header(vec![5]));
        let first = without[8..].iter().zip(&with[8..]).position(|(a, b)| a != b).unwrap();
        assert!(without[8 + first..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn flipped_bit_in_a_header_is_detected() {
        let block =
            RecordHeader { place: place(), number: 77, durable: 0, body: RecordBody::Page(page(2, 1)) }.encode(&LOG);
        for byte in (0..BLOCK_BYTES).step_by(7) {
            let mut bad = block.clone();
            bad[byte] ^= 1;
            assert!(RecordHeader::decode(&bad, &LOG, place()).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn record_of_another_epoch_or_place_is_refused() {
        let block =
            RecordHeader { place: place(), number: 77, durable: 0, body: RecordBody::Page(page(2, 1)) }.encode(&LOG);
        for other in [
            RecordPlace { epoch: 8, ..place() },
            RecordPlace { offset: 4096, ..place() },
            RecordPlace { segment: 4, ..place() },
        ] {
            assert!(RecordHeader::decode(&block, &LOG, other).is_err());
        }
        assert!(RecordHeader::decode(&block, &[8; 16], place()).is_err(), "a record of another log");
    }
}
