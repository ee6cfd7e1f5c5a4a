//! Checking the segments of a log offline, and taking out what is damaged.
//!
//! Always true: what is reported clean can be read back exactly; what a repair leaves is, after a crash at any of its
//! steps, a segment that a start can read, with no page in it that was not there before. Memory is bounded by the records
//! of one segment; payloads are read in pieces of [`CHUNK_BYTES`].
//!
//! What is checked: a segment with a footer has what that lists, each header against its entry and each payload against
//! its header. Without one, records are hopped through as a start would do it, and what stands between two of them is a
//! damage of unknown pages. What stands behind the last record is nobody's, unless it looks like a record that was torn.
//!
//! Steps of a repair:
//! 1. Tombstones that are damaged but listed by the footer are written again. A damaged page or region gets a *void* record of its length. Sync. A crash leaves some of that: each is one block, or torn as it was;
//!    pages that the footer still lists, and that are not there, are misses.
//! 2. The footer, if there was one, is written again without those pages. Sync. A torn footer is one without which the
//!    start hops.
//!
//! A segment whose life nobody knows cannot be repaired: its file is to be removed, as the next start would do.

use crate::codec::DecodeError;
use crate::disk::{
    BLOCK_BYTES, LOG_ID_AT, RECORD_MAGIC, RecordBody, RecordHeader, RecordPlace, SegmentHeader, Superblock,
};
use crate::footer::{Footer, FooterBlock, RecordSummary};
use crate::page::{CHUNK_BYTES, Mismatch, PageId, PageMeta};
use std::fmt;
use std::io::{self, Read, Seek, SeekFrom, Write};
use thiserror::Error;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Reason {
    /// The header of the segment.
    #[error("segment header: {0}")]
    SegmentHeader(DecodeError),
    /// The footer of the segment: without it the next start takes longer.
    #[error("footer: {0}")]
    Footer(DecodeError),
    /// The header of a record.
    #[error("record header: {0}")]
    RecordHeader(DecodeError),
    /// A record is not the one that the footer lists.
    #[error("the record is not the one that the footer lists")]
    NotAsListed,
    /// The payload of a page.
    #[error("payload: {0}")]
    Payload(Mismatch),
    /// The device or the file does not give it.
    #[error("cannot be read: {0}")]
    Unreadable(io::ErrorKind),
    /// No record stands where one should begin: one that was torn by a crash, or is damaged.
    #[error("no record stands here, but behind it")]
    Hole,
}

/// A damaged page, or a region of which nobody knows what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The segment.
    pub segment: u32,
    /// Byte offset in it.
    pub offset: u64,
    /// Bytes that are lost.
    pub bytes: u64,
    /// The page, if it is known.
    pub page: Option<PageId>,
    /// What is wrong.
    pub reason: Reason,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {:08} offset {} bytes {}", self.segment, self.offset, self.bytes)?;
        if let Some(page) = &self.page {
            write!(f, " page {page:?}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// What one segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentReport {
    /// Its number.
    pub segment: u32,
    /// Its life; `None` if nothing says.
    pub life: Option<u64>,
    /// Whether it has a valid footer.
    pub footer: bool,
    /// Whole pages.
    pub pages: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// Whole tombstones.
    pub tombstones: u64,
    /// Everything that is wrong, in the order of offsets, but for the footer, which comes first.
    pub damages: Vec<Damage>,
}

/// What a repair did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// What was found before.
    pub found: SegmentReport,
    /// Nothing says what life the segment has: its file is to be removed, and nothing was written to it.
    pub remove: bool,
    /// Pages and regions taken out.
    pub voided: u64,
    /// Tombstones and footers written again.
    pub restored: u64,
}

/// Something that can be made durable.
pub trait Sync {
    /// Returns when everything written is durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sync for std::fs::File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Checks one segment. What cannot be read is a damage, not an error.
pub fn verify<F: Read + Seek>(superblock: &Superblock, segment: u32, file: &mut F) -> SegmentReport {
    Survey::of(superblock, segment, file).report
}

/// Checks one segment, and takes out what is damaged; durable when it returns. An error is one of writing: try again.
pub fn repair<F: Read + Write + Seek + Sync>(
    superblock: &Superblock,
    segment: u32,
    file: &mut F,
) -> io::Result<Repair> {
    let survey = Survey::of(superblock, segment, file);
    let mut done = Repair { found: survey.report.clone(), remove: false, voided: 0, restored: 0 };
    let Some(life) = survey.report.life else { return Ok(Repair { remove: true, ..done }) };
    if survey.report.damages.is_empty() {
        return Ok(done);
    }
    for damage in survey.report.damages.iter().filter(|damage| !matches!(damage.reason, Reason::Footer(_))) {
        match survey.broken_at(damage) {
            Some(RecordSummary::Tombstone(_)) => done.restored += 1,
            _ => done.voided += 1,
        }
        let block = survey.in_place_of(damage, life).encode(&superblock.log_id);
        survey.file.seek(SeekFrom::Start(damage.offset))?;
        survey.file.write_all(&block)?;
    }
    survey.file.sync()?;
    if let Some(records) = survey.footer_records() {
        let footer = Footer { segment, life, records };
        let bytes = footer.encode(&superblock.log_id);
        survey.file.seek(SeekFrom::Start(superblock.segment_bytes - bytes.len() as u64))?;
        survey.file.write_all(&bytes)?;
        survey.file.sync()?;
        done.restored += 1;
    }
    Ok(done)
}

/// One look through a segment.
struct Survey<'a, F> {
    superblock: &'a Superblock,
    file: &'a mut F,
    report: SegmentReport,
    /// Records that are whole.
    whole: Vec<RecordSummary>,
    /// Records that the footer lists and that are not whole.
    broken: Vec<RecordSummary>,
    /// There is a footer, or was one.
    wants_footer: bool,
    /// Where the last record ends.
    end: u64,
}

impl<'a, F: Read + Seek> Survey<'a, F> {
    fn of(superblock: &'a Superblock, segment: u32, file: &'a mut F) -> Survey<'a, F> {
        let report = SegmentReport {
            segment,
            life: None,
            footer: false,
            pages: 0,
            payload_bytes: 0,
            tombstones: 0,
            damages: Vec::new(),
        };
        let mut survey =
            Survey { superblock, file, report, whole: Vec::new(), broken: Vec::new(), wants_footer: false, end: BLOCK };
        survey.look();
        survey
    }

    fn look(&mut self) {
        let life = match self.segment_life() {
            Ok(life) => life,
            // A footer may say what life it had once, but not whether it has another since.
            Err(reason) => return self.damage(0, self.superblock.segment_bytes, None, reason),
        };
        self.report.life = Some(life);
        match self.footer(life) {
            Some(footer) => self.listed(footer),
            None => self.hop(life),
        }
    }

    fn segment_life(&mut self) -> Result<u64, Reason> {
        let block = self.block(0)?;
        let (log_id, segment) = (self.superblock.log_id, self.report.segment);
        SegmentHeader::decode_life(&block, &log_id, segment).map_err(Reason::SegmentHeader)
    }

    /// The valid footer of this life. One that is damaged is reported; one of another life is none.
    fn footer(&mut self, life: u64) -> Option<Footer> {
        match self.try_footer(life) {
            Ok(footer) => {
                self.report.footer = footer.is_some();
                self.wants_footer = footer.is_some();
                footer
            }
            Err(error) => {
                self.wants_footer = true;
                self.damage(self.superblock.segment_bytes - BLOCK, BLOCK, None, Reason::Footer(error));
                None
            }
        }
    }

    fn try_footer(&mut self, life: u64) -> Result<Option<Footer>, DecodeError> {
        let (log_id, segment, segment_bytes) =
            (self.superblock.log_id, self.report.segment, self.superblock.segment_bytes);
        let block = self.block(segment_bytes - BLOCK).map_err(|_| DecodeError::Short("footer"))?;
        let footer = match FooterBlock::decode(&block, &log_id, segment, life, segment_bytes) {
            Ok(footer) => footer,
            Err(error @ DecodeError::Checksum(_)) => return Err(error),
            Err(_) => return Ok(None),
        };
        let mut bytes = vec![0; footer.table_blocks_bytes()];
        self.read(footer.table_offset(), &mut bytes).map_err(|_| DecodeError::Short("table of a footer"))?;
        footer.decode_table(&bytes).map(Some)
    }

    /// Checks each record that the footer lists.
    fn listed(&mut self, footer: Footer) {
        for record in footer.records {
            let place = RecordPlace { segment: footer.segment, life: footer.life, offset: record.offset() };
            self.end = self.end.max(record.offset() + record.record_bytes());
            let header = self.header(place);
            let checked = header.and_then(|header| match RecordSummary::of(&header) {
                Some(found) if found == record => self.check_body(&header),
                _ => Err(Reason::NotAsListed),
            });
            match checked {
                Ok(()) => self.whole.push(record),
                Err(reason) => {
                    self.damage(record.offset(), record.record_bytes(), Some(*record.id()), reason);
                    self.broken.push(record);
                }
            }
        }
    }

    /// Goes from header to header as a start does.
    fn hop(&mut self, life: u64) {
        let segment = self.report.segment;
        let (mut at, mut hole) = (BLOCK, None);
        while at + BLOCK <= self.superblock.segment_bytes {
            let place = RecordPlace { segment, life, offset: at };
            let header = match self.header(place) {
                Ok(header) => header,
                Err(reason) => {
                    hole.get_or_insert((at, reason));
                    at += BLOCK;
                    continue;
                }
            };
            if let Some((begin, _)) = hole.take() {
                self.damage(begin, at - begin, None, Reason::Hole);
            }
            self.hopped(&header);
            at += header.record_bytes() as u64;
            self.end = at;
        }
        if let Some((begin, reason)) = hole.filter(|(begin, _)| self.was_record(*begin)) {
            self.damage(begin, BLOCK, None, reason);
        }
    }

    /// Whether the block, which is no valid header, looks like one that was.
    fn was_record(&mut self, offset: u64) -> bool {
        let log_id = self.superblock.log_id;
        let Ok(block) = self.block(offset) else { return true };
        match RecordHeader::decode(&block, &log_id, RecordPlace { segment: 0, life: 0, offset }) {
            Err(DecodeError::Checksum(_)) => true,
            // Its magic is gone, or it is a whole record of an earlier life.
            _ => !block.starts_with(&RECORD_MAGIC) && block[LOG_ID_AT..][..log_id.len()] == log_id,
        }
    }

    fn hopped(&mut self, header: &RecordHeader) {
        match (self.check_body(header), RecordSummary::of(header)) {
            (Ok(()), summary) => self.whole.extend(summary),
            (Err(reason), summary) => {
                let page = summary.map(|summary| *summary.id());
                self.damage(header.place.offset, header.record_bytes() as u64, page, reason);
            }
        }
    }

    fn header(&mut self, place: RecordPlace) -> Result<RecordHeader, Reason> {
        let block = self.block(place.offset)?;
        let header = RecordHeader::decode(&block, &self.superblock.log_id, place).map_err(Reason::RecordHeader)?;
        match place.offset.saturating_add(header.record_bytes() as u64) <= self.superblock.segment_bytes {
            true => Ok(header),
            false => Err(Reason::RecordHeader(DecodeError::Invalid("length of a record"))),
        }
    }

    fn check_body(&mut self, header: &RecordHeader) -> Result<(), Reason> {
        match &header.body {
            RecordBody::Page(meta) => {
                self.check_payload(meta, header.place.offset + BLOCK)?;
                self.report.pages += 1;
                self.report.payload_bytes += meta.payload_bytes() as u64;
            }
            RecordBody::Tombstone(_) => self.report.tombstones += 1,
            RecordBody::Void { .. } => {}
        }
        Ok(())
    }

    fn check_payload(&mut self, meta: &PageMeta, mut at: u64) -> Result<(), Reason> {
        let mut crcs = meta.chunk_crcs.iter();
        let mut buffer = vec![0; CHUNK_BYTES];
        for (part, &part_bytes) in meta.part_bytes.iter().enumerate() {
            for chunk in 0..PageMeta::chunks_of(part_bytes) {
                let bytes = CHUNK_BYTES.min(part_bytes as usize - chunk * CHUNK_BYTES);
                self.read(at, &mut buffer[..bytes])?;
                if crcs.next() != Some(&crc32fast::hash(&buffer[..bytes])) {
                    return Err(Reason::Payload(Mismatch::Crc { part, chunk }));
                }
                at += bytes as u64;
            }
        }
        Ok(())
    }

    fn block(&mut self, offset: u64) -> Result<Vec<u8>, Reason> {
        let mut block = vec![0; BLOCK_BYTES];
        self.read(offset, &mut block)?;
        Ok(block)
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Reason> {
        let read = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.read_exact(bytes));
        read.map_err(|error| Reason::Unreadable(error.kind()))
    }

    fn damage(&mut self, offset: u64, bytes: u64, page: Option<PageId>, reason: Reason) {
        let segment = self.report.segment;
        self.report.damages.push(Damage { segment, offset, bytes, page, reason });
    }
}

impl<F> Survey<'_, F> {
    fn broken_at(&self, damage: &Damage) -> Option<&RecordSummary> {
        // They are in the order in which the footer lists them.
        let at = self.broken.binary_search_by_key(&damage.offset, RecordSummary::offset).ok()?;
        self.broken.get(at)
    }

    /// The record that is written where something is damaged.
    fn in_place_of(&self, damage: &Damage, life: u64) -> RecordHeader {
        let place = RecordPlace { segment: self.report.segment, life, offset: damage.offset };
        match self.broken_at(damage) {
            Some(RecordSummary::Tombstone(tombstone)) => {
                RecordHeader { place, number: tombstone.number, body: RecordBody::Tombstone(tombstone.id) }
            }
            // A void kills nothing and is killed by nothing: any number will do.
            _ => RecordHeader { place, number: 0, body: RecordBody::Void { bytes: damage.bytes } },
        }
    }

    /// What the footer is to list, if there is to be one.
    fn footer_records(&self) -> Option<Vec<RecordSummary>> {
        if !self.wants_footer {
            return None;
        }
        let restored = self.broken.iter().filter(|record| matches!(record, RecordSummary::Tombstone(_)));
        let mut records: Vec<RecordSummary> = self.whole.iter().chain(restored).copied().collect();
        records.sort_unstable_by_key(RecordSummary::offset);
        let footer = Footer { segment: self.report.segment, life: 0, records };
        // Where hopping found records that were never to stand there, it has to do without.
        let fits = self.end + footer.encoded_bytes() <= self.superblock.segment_bytes;
        fits.then_some(footer.records)
    }
}

#[cfg(test)]
mod tests;
