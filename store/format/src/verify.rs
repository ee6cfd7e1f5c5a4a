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
//! 1. Tombstones that are damaged but listed by the footer are written again. A damaged page becomes a tombstone of its
//!    number, so that no older put of it is found, and a *void* behind that. What was torn by a crash becomes a void; what
//!    was damaged later and may have been tombstones, a *lost* record, and the next start serves nothing that is older.
//!    A damaged header of the segment is written again. Sync. A crash leaves some of that: each is one block, or as it was;
//!    pages that the footer still lists, and that are not there, are misses.
//! 2. The footer, if there was one, is written again with what is there. Sync. A torn footer is one without which the
//!    start hops. Beside a lost record there must be none.
//!
//! What no repair can help is left to the next start: a segment whose file is too short, one without a header that says
//! too little ([`crate::life`]), a stray that lies where a segment was, and one whose segment is not there. It removes them
//! (the stray is set aside) and all that they may have had tombstones for. Other strays cost nothing. As a start judges by all
//! the files that there are, none is to be removed or set aside beside one that is left to it.

use crate::codec::DecodeError;
use crate::disk::{
    BLOCK_BYTES, LOG_ID_AT, RECORD_MAGIC, RecordBody, RecordHeader, RecordPlace, SegmentHeader, Superblock,
};
use crate::footer::{Footer, FooterBlock, RecordSummary, TombstoneSummary};
use crate::life::{Foreign, Headless, LifeSearch, Verdict, may_replace};
use crate::page::{CHUNK_BYTES, Mismatch, PageId, PageMeta};
use std::collections::BTreeMap;
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
    /// No record stands where one should begin: it was torn by a crash, or never written.
    #[error("no record stands here, but behind it")]
    Hole,
    /// A record stood here that was durable, or several.
    #[error("what stood here is lost; it may have been tombstones")]
    Lost,
    /// The file is shorter than a segment.
    #[error("the file is cut short")]
    CutShort,
    /// The file is a copy of another segment, or was renamed.
    #[error("a stray file: its header says that it is segment {segment:08} in life {life}")]
    Misnamed {
        /// What it says.
        segment: u32,
        /// And which life of that.
        life: u64,
    },
    /// The file is of another log.
    #[error("a stray file: its header says that it is of another log")]
    OfAnotherLog,
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
    /// Everything that is wrong, in the order of offsets, but for header and footer, which come first.
    pub damages: Vec<Damage>,
    /// No repair helps: the next start removes the segment, and all in the log that it may have had tombstones for.
    pub hopeless: bool,
    /// The file is none of the log's segments.
    pub stray: bool,
}

/// What a log's segments say of themselves: by that a segment is judged that does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lives {
    lives: BTreeMap<u32, u64>,
    /// The largest number that one of them has, or had before it was renamed.
    last: Option<u32>,
}

impl Lives {
    /// A segment is there, in this life.
    pub fn add(&mut self, segment: u32, life: u64) {
        self.lives.insert(segment, life);
        self.last = self.last.max(Some(segment));
    }

    /// Takes what was found of a segment without a header.
    pub fn learn(&mut self, found: &SegmentReport) {
        if let Some(life) = found.life {
            return self.add(found.segment, life);
        }
        self.last = self.last.max(match found.damages.first().map(|damage| &damage.reason) {
            Some(Reason::OfAnotherLog) => None,
            Some(&Reason::Misnamed { segment, .. }) => Some(segment),
            _ => Some(found.segment),
        });
    }

    fn oldest(&self) -> Option<u64> {
        self.lives.values().min().copied()
    }

    /// Whether a segment is there in this life or a later one.
    fn has(&self, segment: u32, life: u64) -> bool {
        self.lives.get(&segment).is_some_and(|&found| found >= life)
    }
}

/// What a repair did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// What was found before.
    pub found: SegmentReport,
    /// Nothing in the segment counts: its file is to be removed, and nothing was written to it. A stray is to be set aside
    /// instead, by another name ([`crate::disk::stray_names`]). Neither is to be done while a segment is hopeless.
    pub remove: bool,
    /// Pages and regions taken out.
    pub voided: u64,
    /// Tombstones, headers and footers written again.
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

/// The life that a segment's header says.
pub fn header_life<F: Read + Seek>(superblock: &Superblock, segment: u32, file: &mut F) -> Option<u64> {
    Survey::new(superblock, segment, &Lives::default(), file).header_life().ok()
}

/// Checks one segment. What cannot be read is a damage, not an error. `lives` are the [`header_life`]s of the log's segments.
pub fn verify<F: Read + Seek>(superblock: &Superblock, segment: u32, lives: &Lives, file: &mut F) -> SegmentReport {
    Survey::of(superblock, segment, lives, file).report
}

/// Checks one segment, and takes out what is damaged; durable when it returns. An error is one of writing: try again.
pub fn repair<F: Read + Write + Seek + Sync>(
    superblock: &Superblock,
    segment: u32,
    lives: &Lives,
    file: &mut F,
) -> io::Result<Repair> {
    let survey = Survey::of(superblock, segment, lives, file);
    let mut done = Repair { found: survey.report.clone(), remove: false, voided: 0, restored: 0 };
    if survey.report.hopeless {
        return Ok(done);
    }
    let Some(life) = survey.report.life else { return Ok(Repair { remove: true, ..done }) };
    if survey.report.damages.is_empty() {
        return Ok(done);
    }
    for damage in &survey.report.damages {
        match damage.reason {
            Reason::Footer(_) => continue,
            Reason::SegmentHeader(_) => done.restored += 1,
            _ if matches!(survey.broken_at(damage), Some(RecordSummary::Tombstone(_))) => done.restored += 1,
            _ => done.voided += 1,
        }
        for (offset, block) in survey.in_place_of(damage, life) {
            survey.file.seek(SeekFrom::Start(offset))?;
            survey.file.write_all(&block)?;
        }
    }
    survey.file.sync()?;
    let Some(mut bytes) = survey.footer_bytes(life) else { return Ok(done) };
    if bytes.is_empty() {
        bytes = vec![0; BLOCK_BYTES];
    }
    survey.file.seek(SeekFrom::Start(superblock.segment_bytes - bytes.len() as u64))?;
    survey.file.write_all(&bytes)?;
    survey.file.sync()?;
    done.restored += 1;
    Ok(done)
}

/// One look through a segment.
struct Survey<'a, F> {
    superblock: &'a Superblock,
    file: &'a mut F,
    report: SegmentReport,
    /// Records that are whole.
    whole: Vec<RecordSummary>,
    /// Records that are known, by the footer or their header, and not whole; in the order of their offsets.
    broken: Vec<RecordSummary>,
    /// There is a footer, or was one.
    wants_footer: bool,
    /// Something is lost, and no footer must say that this is all.
    lost: bool,
    /// Up to here all was durable, as records say.
    durable: u64,
    /// Where the last record ends.
    end: u64,
    lives: &'a Lives,
}

impl<'a, F: Read + Seek> Survey<'a, F> {
    fn of(superblock: &'a Superblock, segment: u32, lives: &'a Lives, file: &'a mut F) -> Survey<'a, F> {
        let mut survey = Survey::new(superblock, segment, lives, file);
        survey.look();
        survey
    }

    fn new(superblock: &'a Superblock, segment: u32, lives: &'a Lives, file: &'a mut F) -> Survey<'a, F> {
        let report = SegmentReport {
            segment,
            life: None,
            footer: false,
            pages: 0,
            payload_bytes: 0,
            tombstones: 0,
            damages: Vec::new(),
            hopeless: false,
            stray: false,
        };
        Survey {
            superblock,
            file,
            report,
            whole: Vec::new(),
            broken: Vec::new(),
            wants_footer: false,
            lost: false,
            durable: 0,
            end: BLOCK,
            lives,
        }
    }

    fn look(&mut self) {
        let (segment_bytes, file_bytes) = (self.superblock.segment_bytes, self.file_bytes());
        let life = match self.header_life() {
            Ok(life) => life,
            Err(reason) => match self.headless(file_bytes).verdict(self.lives.oldest()) {
                Verdict::Life(life) => {
                    self.damage(0, BLOCK, None, reason);
                    life
                }
                Verdict::Stray(foreign) => return self.stray(foreign, file_bytes),
                verdict => {
                    self.report.hopeless = verdict == Verdict::DistrustAll;
                    return self.damage(0, segment_bytes, None, reason);
                }
            },
        };
        self.report.life = Some(life);
        match self.footer(life) {
            Some(footer) => self.listed(footer),
            None => self.hop(life, file_bytes),
        }
        if file_bytes < segment_bytes {
            self.report.hopeless = true;
            self.damage(file_bytes, segment_bytes - file_bytes, None, Reason::CutShort);
        }
    }

    fn stray(&mut self, foreign: Foreign, file_bytes: u64) {
        self.report.stray = true;
        let (reason, missed) = match foreign {
            Foreign::Log => (Reason::OfAnotherLog, false),
            Foreign::Segment { segment, life } => (Reason::Misnamed { segment, life }, !self.lives.has(segment, life)),
        };
        self.report.hopeless = missed || may_replace(self.report.segment, self.lives.last);
        self.damage(0, file_bytes, None, reason);
    }

    /// What there is of the segment's bytes.
    fn file_bytes(&mut self) -> u64 {
        self.file.seek(SeekFrom::End(0)).unwrap_or(0).min(self.superblock.segment_bytes)
    }

    fn header_life(&mut self) -> Result<u64, Reason> {
        let block = self.block(0)?;
        let (log_id, segment) = (self.superblock.log_id, self.report.segment);
        SegmentHeader::decode_life(&block, &log_id, segment).map_err(Reason::SegmentHeader)
    }

    fn headless(&mut self, file_bytes: u64) -> Headless {
        let Superblock { log_id, segment_bytes } = *self.superblock;
        let mut search = LifeSearch::new(log_id, self.report.segment, segment_bytes, file_bytes);
        if let Ok(block) = self.block(0) {
            search.header(&block);
        }
        while let Some((offset, len)) = search.next_read() {
            let mut bytes = vec![0; len];
            if self.read(offset, &mut bytes).is_err() {
                // Nobody knows what stands in the first block of it; on with the next.
                bytes = vec![0xff; BLOCK_BYTES];
            }
            search.feed(&bytes);
        }
        search.finish()
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
    fn hop(&mut self, life: u64, file_bytes: u64) {
        let segment = self.report.segment;
        let (mut at, mut hole) = (BLOCK, None);
        while at + BLOCK <= file_bytes {
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
            self.damage(begin, BLOCK, None, if self.wants_footer { Reason::Lost } else { reason });
        }
        // What a footer was written behind had been durable.
        let durable = if self.wants_footer { u64::MAX } else { self.durable };
        for damage in self.report.damages.iter_mut().filter(|damage| damage.reason == Reason::Hole) {
            if damage.offset < durable {
                damage.reason = Reason::Lost;
            }
        }
        self.lost |= self.report.damages.iter().any(|damage| damage.reason == Reason::Lost);
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
        self.durable = self.durable.max(header.durable);
        self.lost |= matches!(header.body, RecordBody::Lost { .. });
        match (self.check_body(header), RecordSummary::of(header)) {
            (Ok(()), summary) => self.whole.extend(summary),
            (Err(reason), summary) => {
                let page = summary.map(|summary| *summary.id());
                self.broken.extend(summary);
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
            RecordBody::Void { .. } | RecordBody::Lost { .. } => {}
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
        let at = self.broken.binary_search_by_key(&damage.offset, RecordSummary::offset).ok()?;
        self.broken.get(at)
    }

    /// The blocks that are written where something is damaged, in this order: until the last is there, nothing has changed
    /// for a start.
    fn in_place_of(&self, damage: &Damage, life: u64) -> Vec<(u64, Vec<u8>)> {
        let Superblock { log_id, .. } = *self.superblock;
        let segment = self.report.segment;
        if damage.offset == 0 {
            return vec![(0, SegmentHeader { log_id, segment, life }.encode())];
        }
        let block = |offset, number, body| {
            let place = RecordPlace { segment, life, offset };
            (offset, RecordHeader { place, number, durable: self.durable.min(offset), body }.encode(&log_id))
        };
        let (offset, bytes) = (damage.offset, damage.bytes);
        let Some(record) = self.broken_at(damage) else {
            // Neither kills by its number, nor is killed: any number will do.
            return vec![match damage.reason {
                Reason::Lost => block(offset, 0, RecordBody::Lost { bytes }),
                _ => block(offset, 0, RecordBody::Void { bytes }),
            }];
        };
        let rest = (bytes > BLOCK).then(|| block(offset + BLOCK, 0, RecordBody::Void { bytes: bytes - BLOCK }));
        let tombstone = block(offset, record.number(), RecordBody::Tombstone(*record.id()));
        rest.into_iter().chain([tombstone]).collect()
    }

    /// The footer that is to be written, if there is to be one; empty where a damaged one is to be taken out.
    fn footer_bytes(&self, life: u64) -> Option<Vec<u8>> {
        let segment_bytes = self.superblock.segment_bytes;
        // Where hopping found records that were never to stand there, it has to do without.
        if !self.wants_footer || self.end > segment_bytes - BLOCK {
            return None;
        }
        let forgotten = self.broken.iter().map(|record| {
            let tombstone = TombstoneSummary { id: *record.id(), offset: record.offset(), number: record.number() };
            RecordSummary::Tombstone(tombstone)
        });
        let mut records: Vec<RecordSummary> = self.whole.iter().copied().chain(forgotten).collect();
        records.sort_unstable_by_key(RecordSummary::offset);
        let footer = Footer { segment: self.report.segment, life, records };
        let fits = self.end + footer.encoded_bytes() <= segment_bytes;
        Some(if fits && !self.lost { footer.encode(&self.superblock.log_id) } else { Vec::new() })
    }
}

#[cfg(test)]
mod tests;
