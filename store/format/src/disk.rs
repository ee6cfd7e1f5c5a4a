//! The blocks of an L3 segment log.
//!
//! ```text
//! DIR/larder.sb                      superblock (one 4 KiB block): what must always be true of this log
//! DIR/00000000.seg, 00000001.seg …   segments, all of one length, preallocated
//! DIR/00000002.seg.new               a segment that is just being made: nothing in it counts
//! DIR/00000099.stray, ….stray.1 …    what had the name of a segment and is none: to be looked at and removed by people
//!
//! segment:  ┌ segment header ┬ record header ┬ payload, padded ┬ record header ┬ payload … ┬ anything ┬ table    ┬ footer ┐
//!           │ 4 KiB          │ 4 KiB         │ to 4 KiB        │               │           │ (old)    │ of footer│ 4 KiB  │
//! ```
//!
//! Why this order: a segment is filled front to back and its records are found by hopping from header to header, so an
//! index can be rebuilt from headers alone. A segment is written anew only as a whole: its header then carries a larger
//! *life* number than any before on this device, and every record repeats the life of its segment and its own offset.
//! What a reader finds where a record of this life is missing (the remains of an earlier one, a torn block, a write that
//! went astray) fails one of magic, CRC, log id, life and offset.
//!
//! A segment is made under another name, and gets its own once its header is durable. So one without a header, be it blank,
//! is damaged, and one whose header says another number than its name was copied or renamed by somebody ([`crate::life`]).
//! It is made anew, too, when it was made ready and never had a record: so the headers that are written in place, which a
//! crash may tear, stand before records that say which life was there.
//!
//! Hopping costs a read per record. So a full segment is ended by a *footer* ([`crate::footer`]): a table of all its
//! records, which one read of the segment's end finds. It repeats what the headers say, and is written when nothing of
//! the segment is under way any more. A segment without a valid footer of its life is hopped through.
//!
//! Records are written concurrently, so a crash may leave a hole before a complete record. A reader that meets an invalid
//! block therefore looks on, block by block, for the next valid one, until the end of the segment. It then looks at
//! payload bytes, which a stranger may have chosen: the random id of the log in every record header, which never leaves
//! the node, is what a forged header cannot know.
//!
//! A record's header is written together with its payload, in any order; the header's own CRC covers the header, and the
//! chunk CRCs in it cover the payload. A header without its payload is therefore found when the page is read.
//!
//! A crash takes only what was not durable. So every record says up to where its segment was durable when it was planned: a
//! hole before that place is damage, which may have been a tombstone, and a hole behind it what a crash leaves. If a
//! segment's header is damaged, its records and footer say which life it has ([`crate::life`]).
//!
//! Forgetting is a record too (a *tombstone*): it kills what was recorded of its key before it, by record number. Record
//! numbers and lives grow together, and segments are written anew oldest life first, so a tombstone outlives what it kills.
//!
//! A *void* stands where a repair took something out that nobody misses ([`crate::verify`]): it says how far to hop. A
//! *lost* record stands where there was damage that may have been tombstones.
//!
//! Versions: [`VERSION`] 1 is the first. A build refuses a superblock of another version; segments and records of another
//! version than the superblock's end the scan of their segment.

use crate::codec::{DecodeError, Put, Reader, Result};
use crate::page::{PageId, PageMeta};
use crate::{NamespaceId, PageKey};

/// Most files of one number that are set aside.
const STRAYS_MAX: u32 = 1000;

/// The names that a stray with the name of a segment may get: it gets the first that no file has.
pub fn stray_names(segment: u32) -> impl Iterator<Item = String> {
    (0..STRAYS_MAX).map(move |nth| match nth {
        0 => format!("{segment:08}.stray"),
        _ => format!("{segment:08}.stray.{nth}"),
    })
}

/// Every block, and the alignment of every record.
pub const BLOCK_BYTES: usize = 4096;
/// Version of everything in this module.
pub const VERSION: u32 = 1;
/// Largest segment.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 40;
/// Smallest segment.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

const SUPERBLOCK_MAGIC: [u8; 4] = *b"LDSB";
const SEGMENT_MAGIC: [u8; 4] = *b"LDSG";
pub(crate) const RECORD_MAGIC: [u8; 4] = *b"LDRC";
/// Where the log id stands in every block, behind magic, CRC and version.
pub(crate) const LOG_ID_AT: usize = 12;
/// Where the life stands in the headers of records and in footers, behind the log id and the segment.
const LIFE_AT: usize = LOG_ID_AT + 20;

/// Random identity of a log; known to the node alone.
pub type LogId = [u8; 16];

/// Lives and record numbers are counted on from what is read, and no log comes near this.
const COUNT_MAX: u64 = 1 << 62;

/// A number that can be counted on from.
pub(crate) fn countable(number: u64, what: &'static str) -> Result<u64> {
    if number < COUNT_MAX { Ok(number) } else { Err(DecodeError::Invalid(what)) }
}

/// The life that an unchecked header of a record or footer names.
pub(crate) fn life_in(block: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(*block.get(LIFE_AT..)?.first_chunk()?))
}

/// `bytes` rounded up to whole blocks.
pub fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(BLOCK_BYTES)
}

/// Bytes a page of `payload_bytes` takes in a segment.
pub fn record_bytes(payload_bytes: usize) -> usize {
    BLOCK_BYTES + padded(payload_bytes)
}

/// Every block begins alike: magic (4), CRC-32 of the rest of the block (4), version (4).
pub(crate) fn seal(mut block: Vec<u8>) -> Vec<u8> {
    assert!(block.len() <= BLOCK_BYTES, "a block's fields fit into it");
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

/// What must always be true of one device's log. Written once, when the log is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Random identity of this log.
    pub log_id: LogId,
    /// Bytes of every segment, a multiple of [`BLOCK_BYTES`].
    pub segment_bytes: u64,
}

impl Superblock {
    /// One block.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = begin(SUPERBLOCK_MAGIC);
        block.put(&self.log_id);
        block.put_u64(self.segment_bytes);
        seal(block)
    }

    /// Reads and checks one block.
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

/// The first block of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The log it belongs to.
    pub log_id: LogId,
    /// Its number, as in its file name.
    pub segment: u32,
    /// Number of this writing of the segment; larger than any before on this log.
    pub life: u64,
}

impl SegmentHeader {
    /// One block.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = begin(SEGMENT_MAGIC);
        block.put(&self.log_id);
        block.put_u32(self.segment);
        block.put_u64(self.life);
        seal(block)
    }

    /// Reads and checks one block.
    pub fn decode(block: &[u8]) -> Result<Self> {
        let mut reader = open(block, SEGMENT_MAGIC, "segment header")?;
        let header =
            Self { log_id: reader.array("log id")?, segment: reader.u32("segment")?, life: reader.u64("life")? };
        countable(header.life, "life")?;
        Ok(header)
    }

    /// Reads the block that should be the header of segment `segment` of the log `log_id`; its life.
    pub fn decode_life(block: &[u8], log_id: &LogId, segment: u32) -> Result<u64> {
        let header = Self::decode(block)?;
        match header.log_id == *log_id && header.segment == segment {
            true => Ok(header.life),
            false => Err(DecodeError::Invalid("log or number of a segment")),
        }
    }
}

/// Where a record stands; repeated in the record, so that a misplaced one is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordPlace {
    /// Segment number.
    pub segment: u32,
    /// Life of the segment.
    pub life: u64,
    /// Byte offset of the record header in the segment.
    pub offset: u64,
}

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordBody {
    /// A page; its payload follows the header.
    Page(PageMeta),
    /// What was recorded of this page before is forgotten.
    Tombstone(PageId),
    /// Nothing: a repair took out what stood here.
    Void {
        /// Bytes up to the next record, this header among them; whole blocks.
        bytes: u64,
    },
    /// Nobody knows what stood here, and it may have forgotten anything that is older.
    Lost {
        /// As of a void.
        bytes: u64,
    },
}

/// One record header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// Where it stands.
    pub place: RecordPlace,
    /// Grows with every record of this log.
    pub number: u64,
    /// Byte offset in the segment before which all was durable when the record was planned; 0 says nothing.
    pub durable: u64,
    /// What it says.
    pub body: RecordBody,
}

impl RecordHeader {
    /// Bytes of the record, header and padded payload.
    pub fn record_bytes(&self) -> usize {
        match &self.body {
            RecordBody::Page(meta) => record_bytes(meta.payload_bytes()),
            RecordBody::Tombstone(_) => BLOCK_BYTES,
            RecordBody::Void { bytes } | RecordBody::Lost { bytes } => *bytes as usize,
        }
    }

    /// The header block, in the log `log_id`.
    pub fn encode(&self, log_id: &LogId) -> Vec<u8> {
        let mut block = begin(RECORD_MAGIC);
        block.put(log_id);
        block.put_u32(self.place.segment);
        block.put_u64(self.place.life);
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
        seal(block)
    }

    /// Reads and checks a header block that should stand at `place` of the log `log_id`.
    pub fn decode(block: &[u8], log_id: &LogId, place: RecordPlace) -> Result<Self> {
        let mut reader = open(block, RECORD_MAGIC, "record header")?;
        if reader.array::<16>("log id")? != *log_id {
            return Err(DecodeError::Invalid("log id of a record"));
        }
        let found =
            RecordPlace { segment: reader.u32("segment")?, life: reader.u64("life")?, offset: reader.u64("offset")? };
        if found != place {
            return Err(DecodeError::Invalid("record place"));
        }
        let number = countable(reader.u64("record number")?, "record number")?;
        let body = match reader.u8("record kind")? {
            1 => RecordBody::Page(PageMeta::decode(&mut reader)?),
            2 => RecordBody::Tombstone(PageId {
                namespace: NamespaceId(reader.array("namespace")?),
                key: PageKey(reader.array("page key")?),
            }),
            3 => RecordBody::Void { bytes: whole_blocks(reader.u64("bytes of a void")?)? },
            4 => RecordBody::Lost { bytes: whole_blocks(reader.u64("bytes of a void")?)? },
            _ => return Err(DecodeError::Invalid("record kind")),
        };
        Ok(Self { place, number, durable: reader.u64("durable bytes")?, body })
    }

    /// Reads and checks a header block that should stand at `offset` of the segment, whichever life it is of.
    pub(crate) fn decode_of_any_life(block: &[u8], log_id: &LogId, segment: u32, offset: u64) -> Result<Self> {
        let life = life_in(block).ok_or(DecodeError::Short("life"))?;
        Self::decode(block, log_id, RecordPlace { segment, life, offset })
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
    use crate::page::{MAX_CHUNKS, MAX_PARTS};

    const LOG: LogId = [9; 16];

    fn place() -> RecordPlace {
        RecordPlace { segment: 3, life: 9, offset: 8192 }
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
        }
    }

    #[test]
    fn blocks_round_trip() {
        let sb = Superblock { log_id: LOG, segment_bytes: 64 << 20 };
        assert_eq!(Superblock::decode(&sb.encode()).unwrap(), sb);
        let header = SegmentHeader { log_id: LOG, segment: 1, life: 2 };
        assert_eq!(SegmentHeader::decode(&header.encode()).unwrap(), header);
        for body in [
            RecordBody::Page(page(3, 2)),
            RecordBody::Tombstone(page(1, 1).id),
            RecordBody::Void { bytes: 8192 },
            RecordBody::Lost { bytes: 4096 },
        ] {
            let record = RecordHeader { place: place(), number: 77, durable: 4096, body };
            let block = record.encode(&LOG);
            assert_eq!(RecordHeader::decode(&block, &LOG, place()).unwrap(), record);
            assert_eq!(RecordHeader::decode_of_any_life(&block, &LOG, 3, 8192).unwrap(), record);
            assert!(RecordHeader::decode_of_any_life(&block, &LOG, 3, 4096).is_err());
        }
    }

    #[test]
    fn the_largest_page_fits_a_header() {
        let meta = page(MAX_PARTS, 2);
        meta.validate().unwrap();
        RecordHeader { place: place(), number: 1, durable: 0, body: RecordBody::Page(meta) }.encode(&LOG);
        const { assert!(192 + 4 * (MAX_PARTS + MAX_CHUNKS) < BLOCK_BYTES) };
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_found() {
        let block =
            RecordHeader { place: place(), number: 77, durable: 0, body: RecordBody::Page(page(2, 1)) }.encode(&LOG);
        for byte in (0..BLOCK_BYTES).step_by(7) {
            let mut bad = block.clone();
            bad[byte] ^= 1;
            assert!(RecordHeader::decode(&bad, &LOG, place()).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn a_record_of_another_life_or_place_is_refused() {
        let block =
            RecordHeader { place: place(), number: 77, durable: 0, body: RecordBody::Page(page(2, 1)) }.encode(&LOG);
        for other in [
            RecordPlace { life: 8, ..place() },
            RecordPlace { offset: 4096, ..place() },
            RecordPlace { segment: 4, ..place() },
        ] {
            assert!(RecordHeader::decode(&block, &LOG, other).is_err());
        }
        assert!(RecordHeader::decode(&block, &[8; 16], place()).is_err(), "a record of another log");
    }
}
