//! The footer of a segment: a table of the records of one epoch, at the segment's end.
//!
//! Invariants:
//! - A footer lists all records of its epoch, and each was durable before the footer was written.
//! - An index built from footers equals the one built by hopping through the headers. It costs one
//!   read per segment instead of one per record.
//! - The footer is a copy. Losing it costs time, never data.
//!
//! ```text
//! segment:  ┌ header ┬ records … ┬ anything ┬ table, padded to 4 KiB at its end ┬ footer block ┐
//!                                           └────────── table bytes ──────┘     └── last 4 KiB ┘
//! table:    namespaces (count u32, 32 B each)
//!           records (count u32), in the order of their offsets:
//!   page       kind 1 · namespace u32 · key 32 · offset in blocks u32 · number u64 ·
//!   (105 B)    parent 32 · payload bytes u32 · generation u64 · position u32 · expiry u64
//!   tombstone  kind 2 · namespace u32 · key 32 · offset in blocks u32 · number u64
//!   (49 B)
//! block:    magic, CRC, version · log id 16 · segment u32 · epoch u64 ·
//!           table bytes u32 · records u32 · CRC of the table
//! ```
//!
//! Reasons for this layout:
//! - At the end, a reader knows the footer's place without reading anything else. The node keeps
//!   that room free of records while the segment fills ([`FooterRoom`]).
//! - With the table before the block, one read of the segment's end returns both.
//! - The epoch detects the footer of an earlier epoch, the two CRCs a torn one, and the log id one
//!   that is forged or of another log.

use crate::codec::{DecodeError, Put, Reader, Result};
use crate::disk::{BLOCK_BYTES, LogId, RecordBody, RecordHeader, begin, countable, open, padded, record_bytes, seal};
use crate::limits::MAX_PAGE_BYTES;
use crate::page::PageId;
use crate::{NamespaceId, PageKey};
use std::collections::{BTreeMap, BTreeSet};

const FOOTER_MAGIC: [u8; 4] = *b"LDFT";
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Length of a page's table entry in bytes. [`FooterRoom`] counts this length for every record,
/// tombstones included.
pub const PAGE_ENTRY_BYTES: usize = 105;
pub const TOMBSTONE_ENTRY_BYTES: usize = 49;
const NAMESPACE_BYTES: usize = 32;
const COUNTS_BYTES: usize = 8;

/// Table entry of a page: the part of its record that the index needs. A start that has the entry
/// need not read the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSummary {
    pub id: PageId,
    pub offset: u64,
    /// Record number, by which tombstones delete.
    pub number: u64,
    pub parent: PageKey,
    pub payload_bytes: u32,
    /// Number of the put, as in [`PageMeta`](crate::PageMeta).
    pub generation: u64,
    pub position: u32,
    /// Expiry in Unix milliseconds. 0: the page does not expire.
    pub expires_unix_ms: u64,
}

/// Table entry of a tombstone. It holds all that the index needs, so a start that has the entry
/// need not read the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TombstoneSummary {
    pub id: PageId,
    pub offset: u64,
    pub number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordSummary {
    Page(PageSummary),
    Tombstone(TombstoneSummary),
}

impl RecordSummary {
    /// The entry of a record. `None` for a void and a lost record, which a footer does not list.
    pub fn of(header: &RecordHeader) -> Option<RecordSummary> {
        let offset = header.place.offset;
        let number = header.number;
        match &header.body {
            RecordBody::Page(meta) => Some(RecordSummary::Page(PageSummary {
                id: meta.id,
                offset,
                number,
                parent: meta.parent,
                payload_bytes: meta.payload_bytes() as u32,
                generation: meta.generation,
                position: meta.position,
                expires_unix_ms: meta.expires_unix_ms,
            })),
            RecordBody::Tombstone(id) => Some(RecordSummary::Tombstone(TombstoneSummary { id: *id, offset, number })),
            RecordBody::Void { .. } | RecordBody::Lost { .. } => None,
        }
    }

    pub fn id(&self) -> &PageId {
        match self {
            RecordSummary::Page(page) => &page.id,
            RecordSummary::Tombstone(tombstone) => &tombstone.id,
        }
    }

    pub fn offset(&self) -> u64 {
        match self {
            RecordSummary::Page(page) => page.offset,
            RecordSummary::Tombstone(tombstone) => tombstone.offset,
        }
    }

    pub fn number(&self) -> u64 {
        match self {
            RecordSummary::Page(page) => page.number,
            RecordSummary::Tombstone(tombstone) => tombstone.number,
        }
    }

    pub fn record_bytes(&self) -> u64 {
        match self {
            RecordSummary::Page(page) => record_bytes(page.payload_bytes as usize) as u64,
            RecordSummary::Tombstone(_) => BLOCK,
        }
    }
}

/// Room that a segment's footer will take. The node adds each record to it before it admits the
/// record to the segment.
#[derive(Debug, Clone, Default)]
pub struct FooterRoom {
    namespaces: BTreeSet<NamespaceId>,
    entries_bytes: u64,
}

impl FooterRoom {
    /// Length of the footer in bytes, table and block, with one more record of this namespace. A
    /// segment that lacks this room is full.
    pub fn bytes_with(&self, namespace: &NamespaceId) -> u64 {
        let namespaces = self.namespaces.len() + usize::from(!self.namespaces.contains(namespace));
        footer_bytes(namespaces, self.entries_bytes + PAGE_ENTRY_BYTES as u64)
    }

    /// Length of the footer in bytes, table and block, with two more records of these namespaces.
    pub fn bytes_with_two(&self, first: &NamespaceId, second: &NamespaceId) -> u64 {
        let new_first = !self.namespaces.contains(first);
        let new_second = first != second && !self.namespaces.contains(second);
        let namespaces = self.namespaces.len() + usize::from(new_first) + usize::from(new_second);
        footer_bytes(namespaces, self.entries_bytes + 2 * PAGE_ENTRY_BYTES as u64)
    }

    /// Adds a record. A tombstone counts as much as a page, so the estimate is an upper bound. The
    /// node can therefore always write the footer of a full segment.
    pub fn add(&mut self, namespace: &NamespaceId) {
        self.namespaces.insert(*namespace);
        self.entries_bytes += PAGE_ENTRY_BYTES as u64;
    }

    /// Removes a record that was added. Its namespace stays counted, so the result stays an upper
    /// bound.
    pub fn remove(&mut self) {
        let entry_bytes = PAGE_ENTRY_BYTES as u64;
        assert!(self.entries_bytes >= entry_bytes, "more footer entries removed than added");
        self.entries_bytes -= entry_bytes;
    }
}

fn footer_bytes(namespaces: usize, entries_bytes: u64) -> u64 {
    padded(COUNTS_BYTES + namespaces * NAMESPACE_BYTES + entries_bytes as usize) as u64 + BLOCK
}

/// Footer of one epoch of a segment. It lists all pages and tombstones of the segment, so a start
/// need not visit their records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    pub segment: u32,
    pub epoch: u64,
    /// Records in the order of their offsets.
    pub records: Vec<RecordSummary>,
}

impl Footer {
    /// Length of the encoded footer in bytes, table and block. [`FooterRoom::bytes`] of the same
    /// records is an upper bound of it.
    pub fn encoded_bytes(&self) -> u64 {
        let mut namespaces: Vec<&NamespaceId> = self.records.iter().map(|record| &record.id().namespace).collect();
        namespaces.sort_unstable();
        namespaces.dedup();
        let entry = |record: &RecordSummary| match record {
            RecordSummary::Page(_) => PAGE_ENTRY_BYTES as u64,
            RecordSummary::Tombstone(_) => TOMBSTONE_ENTRY_BYTES as u64,
        };
        footer_bytes(namespaces.len(), self.records.iter().map(entry).sum())
    }

    /// Encodes table and block as whole blocks. They belong at the end of the segment: at
    /// `segment_bytes` less their length.
    pub fn encode(&self, log_id: &LogId) -> Vec<u8> {
        let mut bytes = self.encode_table();
        let mut block = begin(FOOTER_MAGIC);
        block.put(log_id);
        block.put_u32(self.segment);
        block.put_u64(self.epoch);
        block.put_u32(bytes.len() as u32);
        block.put_u32(self.records.len() as u32);
        block.put_u32(crc32fast::hash(&bytes));
        bytes.resize(padded(bytes.len()), 0);
        bytes.extend_from_slice(&seal(block));
        bytes
    }

    fn encode_table(&self) -> Vec<u8> {
        let mut numbers = BTreeMap::new();
        let mut namespaces: Vec<NamespaceId> = Vec::new();
        for record in &self.records {
            numbers.entry(record.id().namespace).or_insert_with(|| {
                namespaces.push(record.id().namespace);
                namespaces.len() as u32 - 1
            });
        }
        let mut table = Vec::with_capacity(COUNTS_BYTES + self.records.len() * PAGE_ENTRY_BYTES);
        table.put_list(&namespaces, |out, namespace| out.put(&namespace.0));
        table.put_list(&self.records, |out, record| {
            let page = match record {
                RecordSummary::Page(page) => Some(page),
                RecordSummary::Tombstone(_) => None,
            };
            out.put_u8(if page.is_some() { 1 } else { 2 });
            out.put_u32(numbers[&record.id().namespace]);
            out.put(&record.id().key.0);
            out.put_u32((record.offset() / BLOCK) as u32);
            out.put_u64(record.number());
            if let Some(page) = page {
                out.put(&page.parent.0);
                out.put_u32(page.payload_bytes);
                out.put_u64(page.generation);
                out.put_u32(page.position);
                out.put_u64(page.expires_unix_ms);
            }
        });
        table
    }
}

/// Last block of a segment. It locates the table and holds the table's CRC, so a reader can verify
/// the table before it decodes an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FooterBlock {
    segment: u32,
    epoch: u64,
    segment_bytes: u64,
    table_bytes: usize,
    records: usize,
    table_crc: u32,
}

impl FooterBlock {
    /// Decodes the last block of a segment and verifies that it is the footer of this epoch,
    /// segment and log.
    pub fn decode(block: &[u8], log_id: &LogId, segment: u32, epoch: u64, segment_bytes: u64) -> Result<FooterBlock> {
        let mut reader = open(block, FOOTER_MAGIC, "footer")?;
        if reader.array::<16>("log id")? != *log_id || reader.u32("segment")? != segment {
            return Err(DecodeError::Invalid("log or segment of a footer"));
        }
        if reader.u64("epoch")? != epoch {
            return Err(DecodeError::Invalid("epoch of a footer"));
        }
        // The table cannot be longer than the segment without its header and this block.
        let most = segment_bytes.saturating_sub(2 * BLOCK) / BLOCK * BLOCK;
        let table_bytes = reader.count(most.min(u64::from(u32::MAX)) as usize, "table of a footer")?;
        let records = reader.count(table_bytes / TOMBSTONE_ENTRY_BYTES, "records of a footer")?;
        let table_crc = reader.u32("crc of a table")?;
        Ok(FooterBlock { segment, epoch, segment_bytes, table_bytes, records, table_crc })
    }

    /// Byte offset of the table in the segment, a multiple of the block length.
    pub fn table_offset(&self) -> u64 {
        self.segment_bytes - BLOCK - self.table_blocks_bytes() as u64
    }

    pub fn table_blocks_bytes(&self) -> usize {
        padded(self.table_bytes)
    }

    /// Verifies and decodes the table from the bytes at [`table_offset`](Self::table_offset).
    ///
    /// Guarantees that the records are in the order of their offsets, do not overlap, and lie
    /// between header and table.
    pub fn decode_table(&self, bytes: &[u8]) -> Result<Footer> {
        let table = bytes.get(..self.table_bytes).ok_or(DecodeError::Short("table of a footer"))?;
        if crc32fast::hash(table) != self.table_crc {
            return Err(DecodeError::Checksum("table of a footer"));
        }
        let mut reader = Reader::new(table);
        let namespaces = reader
            .list(self.records, "namespaces of a footer", |reader| Ok(NamespaceId(reader.array("namespace")?)))?;
        let mut end = BLOCK;
        let records = reader.list(self.records, "records of a footer", |reader| {
            let record = decode_record(reader, &namespaces)?;
            if record.offset() < end {
                return Err(DecodeError::Invalid("offset in a footer"));
            }
            end = record.offset() + record.record_bytes();
            Ok(record)
        })?;
        reader.finish()?;
        match records.len() == self.records && end <= self.table_offset() {
            true => Ok(Footer { segment: self.segment, epoch: self.epoch, records }),
            false => Err(DecodeError::Invalid("records of a footer")),
        }
    }
}

fn decode_record(reader: &mut Reader<'_>, namespaces: &[NamespaceId]) -> Result<RecordSummary> {
    let kind = reader.u8("record kind")?;
    let namespace = reader.u32("namespace")? as usize;
    let namespace = *namespaces.get(namespace).ok_or(DecodeError::Invalid("namespace in a footer"))?;
    let id = PageId { namespace, key: PageKey(reader.array("page key")?) };
    let offset = u64::from(reader.u32("offset")?) * BLOCK;
    let number = countable(reader.u64("record number")?, "record number")?;
    Ok(match kind {
        1 => RecordSummary::Page(PageSummary {
            id,
            offset,
            number,
            parent: PageKey(reader.array("parent key")?),
            payload_bytes: match reader.count(MAX_PAGE_BYTES, "page bytes")? {
                0 => return Err(DecodeError::Invalid("page bytes")),
                bytes => bytes as u32,
            },
            generation: reader.u64("generation")?,
            position: reader.u32("position")?,
            expires_unix_ms: reader.u64("expiry")?,
        }),
        2 => RecordSummary::Tombstone(TombstoneSummary { id, offset, number }),
        _ => return Err(DecodeError::Invalid("record kind")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RecordPlace;
    use crate::page::PageMeta;
    use proptest::prelude::*;

    const LOG: LogId = [9; 16];
    const SEGMENT: u64 = 1 << 20;

    fn id(n: u8) -> PageId {
        PageId { namespace: NamespaceId([n % 3; 32]), key: PageKey([n; 32]) }
    }

    fn sample(records: u8) -> Footer {
        let mut offset = BLOCK;
        let of = |n: u8| {
            let place = RecordPlace { segment: 3, epoch: 8, offset };
            let payload = vec![n; 1 + usize::from(n) * 100];
            let mut meta = PageMeta::describe(id(n), PageKey([n + 1; 32]), 7, vec![payload.len() as u32], &payload);
            meta.expires_unix_ms = u64::from(n) << 33;
            let body = if n % 4 == 3 { RecordBody::Tombstone(id(n)) } else { RecordBody::Page(meta) };
            let header = RecordHeader { place, number: 100 + u64::from(n), durable: 0, body };
            offset += header.record_bytes() as u64;
            RecordSummary::of(&header).unwrap()
        };
        Footer { segment: 3, epoch: 8, records: (0..records).map(of).collect() }
    }

    fn decode(bytes: &[u8], epoch: u64) -> Result<Footer> {
        let block = FooterBlock::decode(&bytes[bytes.len() - BLOCK_BYTES..], &LOG, 3, epoch, SEGMENT)?;
        let at = bytes.len() - (SEGMENT - block.table_offset()) as usize;
        block.decode_table(&bytes[at..])
    }

    #[test]
    fn footer_round_trips_within_its_reserved_room() {
        let mut room = FooterRoom::default();
        for records in 0..100 {
            let footer = sample(records);
            let bytes = footer.encode(&LOG);
            assert_eq!(bytes.len() as u64, footer.encoded_bytes());
            assert!(
                footer.encoded_bytes() <= footer_bytes(room.namespaces.len(), room.entries_bytes),
                "{records} records"
            );
            assert_eq!(decode(&bytes, 8).unwrap(), footer);
            let next = id(records).namespace;
            let with = room.bytes_with(&next);
            room.add(&next);
            assert_eq!(footer_bytes(room.namespaces.len(), room.entries_bytes), with);
        }
    }

    #[test]
    fn footer_of_another_epoch_log_or_segment_is_refused() {
        let bytes = sample(5).encode(&LOG);
        let block = &bytes[bytes.len() - BLOCK_BYTES..];
        assert!(FooterBlock::decode(block, &LOG, 3, 8, SEGMENT).is_ok());
        assert!(FooterBlock::decode(block, &LOG, 3, 9, SEGMENT).is_err());
        assert!(FooterBlock::decode(block, &LOG, 4, 8, SEGMENT).is_err());
        assert!(FooterBlock::decode(block, &[8; 16], 3, 8, SEGMENT).is_err());
    }

    #[test]
    fn table_with_overlapping_records_is_refused() {
        let mut footer = sample(5);
        footer.records.swap(1, 2);
        assert!(decode(&footer.encode(&LOG), 8).is_err());
    }

    proptest! {
        #[test]
        fn flipped_bit_outside_padding_is_detected(records in 0u8..60, at: prop::sample::Index, bit in 0u8..8) {
            let footer = sample(records);
            let mut bytes = footer.encode(&LOG);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let table = footer.encode_table().len();
            let padding = (table..bytes.len() - BLOCK_BYTES).contains(&at);
            prop_assert_eq!(decode(&bytes, 8).is_ok(), padding);
        }

        #[test]
        fn random_table_with_valid_checksum_never_panics(mut table in prop::collection::vec(0u8..4, 0..900), records in 0u32..9) {
            let mut block = begin(FOOTER_MAGIC);
            block.put(&LOG);
            block.put_u32(3);
            block.put_u64(8);
            block.put_u32(table.len() as u32);
            block.put_u32(records);
            block.put_u32(crc32fast::hash(&table));
            table.resize(padded(table.len()), 0);
            table.extend_from_slice(&seal(block));
            let _ = decode(&table, 8);
        }
    }
}
