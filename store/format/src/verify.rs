//! Verifies the segments of a log offline, and repairs damaged ones.
//!
//! Invariants:
//! - Everything reported clean can be read back exactly.
//! - After a crash at any step of a repair, a start can read the segment. It finds no page in it
//!   that was not there before.
//! - Memory is bounded by the records of one segment. Payloads are read in pieces of
//!   [`CHUNK_BYTES`].
//!
//! Checks: with a footer, each record header against its table entry, and each payload against its
//! header. Without one, the verifier hops through the records as a start does. An unreadable region
//! between two records is damage of unknown pages. Bytes after the last record are ignored, unless
//! they look like a torn record.
//!
//! Steps of a repair:
//! 1. Write blocks in place of the damage, then sync:
//!    - a damaged tombstone that the footer lists is written again;
//!    - a damaged page becomes a tombstone with its record number, so that no older put of it is
//!      found, and a *void* behind it;
//!    - a region torn by a crash becomes a void;
//!    - a region damaged later, which may have held tombstones, becomes a *lost* record: the next
//!      start serves nothing older;
//!    - a damaged segment header is written again.
//!
//!    Each write is one block. After a crash some are done and the others are as before. Pages that
//!    the footer still lists, but that are gone, are misses.
//! 2. Write the footer again, if there was one, with the records that remain. Sync. With a torn
//!    footer the start hops. Next to a lost record there must be no footer.
//!
//! Left to the next start, because no repair can help:
//! - a segment whose file is too short;
//! - a segment without a header whose records do not determine its epoch ([`crate::epoch`]);
//! - a misplaced segment that replaced a segment of the log, or whose own segment is missing.
//!
//! The start removes these (it sets a misplaced segment aside), with everything that they may have
//! had tombstones for. Other misplaced segments cost nothing. A start judges by all files, so an
//! operator must not remove or set aside a file while another one is left to the start.

use crate::codec::DecodeError;
use crate::disk::{
    BLOCK_BYTES, LOG_ID_AT, RECORD_MAGIC, RecordBody, RecordHeader, RecordPlace, SegmentHeader, Superblock,
};
use crate::epoch::{EpochSearch, ForeignHeader, Headerless, Verdict, may_replace};
use crate::footer::{Footer, FooterBlock, RecordSummary, TombstoneSummary};
use crate::limits::CHUNK_BYTES;
use crate::page::{Mismatch, PageId, PageMeta};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Seek, SeekFrom, Write};
use thiserror::Error;

const BLOCK: u64 = BLOCK_BYTES as u64;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Reason {
    #[error("segment header: {0}")]
    SegmentHeader(DecodeError),
    /// The footer is damaged. No data is lost: the next start hops through the record headers,
    /// which takes longer.
    #[error("footer: {0}")]
    Footer(DecodeError),
    #[error("record header: {0}")]
    RecordHeader(DecodeError),
    /// A record differs from its footer entry.
    #[error("the record differs from its entry in the footer")]
    NotAsListed,
    #[error("payload: {0}")]
    Payload(Mismatch),
    #[error("unreadable: {0}")]
    Unreadable(io::ErrorKind),
    /// No record begins where one should: a crash tore it, or it was never written.
    #[error("no record here, but valid records behind it")]
    Hole,
    /// One or more durable records are gone. They may have been tombstones, so older records of any
    /// page are suspect.
    #[error("durable records are lost here; they may have been tombstones")]
    Lost,
    /// The file is shorter than a segment.
    #[error("the file is shorter than a segment")]
    CutShort,
    /// The file is a copy of another segment, or was renamed.
    #[error("a misplaced file: its header is of segment {segment:08} in epoch {epoch}")]
    Misnamed { segment: u32, epoch: u64 },
    #[error("a misplaced file: its header is of another log")]
    OfAnotherLog,
}

/// A damaged page, or a damaged region whose records are unknown. The report names the page where
/// it can, so that an operator knows the loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    pub segment: u32,
    pub offset: u64,
    /// Number of lost bytes.
    pub bytes: u64,
    pub page: Option<PageId>,
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

/// Result of verifying one segment. An intact segment has no `damages` and is neither unrepairable
/// nor misplaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentReport {
    pub segment: u32,
    /// Epoch. `None` if nothing in the segment determines it.
    pub epoch: Option<u64>,
    pub footer: bool,
    pub pages: u64,
    pub payload_bytes: u64,
    pub tombstones: u64,
    /// All damage: header and footer first, the rest in the order of offsets.
    pub damages: Vec<Damage>,
    /// True if no repair can help. The next start removes the segment, with all in the log that it
    /// may have had tombstones for.
    pub unrepairable: bool,
    /// True if the file is not one of the log's segments.
    pub misplaced: bool,
}

/// Epochs of a log's segments. They decide about a segment whose header is unreadable, so a repair
/// needs the epochs of all other segments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SegmentEpochs {
    epochs: BTreeMap<u32, u64>,
    /// Largest number that a segment has, or had before it was renamed.
    last: Option<u32>,
}

impl SegmentEpochs {
    pub fn add(&mut self, segment: u32, epoch: u64) {
        self.epochs.insert(segment, epoch);
        self.last = self.last.max(Some(segment));
    }

    /// Adds the findings about a segment without a readable header.
    pub fn learn(&mut self, found: &SegmentReport) {
        if let Some(epoch) = found.epoch {
            return self.add(found.segment, epoch);
        }
        self.last = self.last.max(match found.damages.first().map(|damage| &damage.reason) {
            Some(Reason::OfAnotherLog) => None,
            Some(&Reason::Misnamed { segment, .. }) => Some(segment),
            _ => Some(found.segment),
        });
    }

    fn oldest(&self) -> Option<u64> {
        self.epochs.values().min().copied()
    }

    fn has(&self, segment: u32, epoch: u64) -> bool {
        self.epochs.get(&segment).is_some_and(|&found| found >= epoch)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    pub found: SegmentReport,
    /// True if the caller must remove the segment's file: nothing in it counts, and the repair
    /// wrote nothing to it. A misplaced segment is set aside instead, under one of
    /// [`misplaced_names`](crate::disk::misplaced_names). The caller must do neither while any
    /// segment of the log is beyond repair.
    pub remove: bool,
    /// Number of pages and regions that the repair took out.
    pub voided: u64,
    /// Number of tombstones, headers and footers that the repair wrote again.
    pub restored: u64,
}

/// A file that can be made durable. [`std::fs::File`] implements it, and tests implement it for
/// disks that fail.
pub trait Sync {
    /// Returns once everything written is durable.
    fn sync(&mut self) -> io::Result<()>;
}

#[allow(clippy::disallowed_types, reason = "the offline verifier works on files of a stopped node")]
impl Sync for std::fs::File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Epoch in the header of a segment, if the header is valid.
pub fn header_epoch<F: Read + Seek>(superblock: &Superblock, segment: u32, file: &mut F) -> Option<u64> {
    Survey::new(superblock, segment, &SegmentEpochs::default(), file).header_epoch().ok()
}

/// Verifies one segment. Unreadable data is damage, not an error. `epochs` holds the
/// [`header_epoch`] of every segment of the log.
pub fn verify<F: Read + Seek>(
    superblock: &Superblock,
    segment: u32,
    epochs: &SegmentEpochs,
    file: &mut F,
) -> SegmentReport {
    Survey::of(superblock, segment, epochs, file).report
}

/// Verifies one segment and takes out the damage. All changes are durable on return.
///
/// # Errors
/// A write or sync failed. The repair can be run again.
pub fn repair<F: Read + Write + Seek + Sync>(
    superblock: &Superblock,
    segment: u32,
    epochs: &SegmentEpochs,
    file: &mut F,
) -> io::Result<Repair> {
    let survey = Survey::of(superblock, segment, epochs, file);
    let mut done = Repair { found: survey.report.clone(), remove: false, voided: 0, restored: 0 };
    if survey.report.unrepairable {
        return Ok(done);
    }
    let Some(epoch) = survey.report.epoch else { return Ok(Repair { remove: true, ..done }) };
    if survey.report.damages.is_empty() {
        return Ok(done);
    }
    // Step 1 of the module documentation.
    for damage in &survey.report.damages {
        match damage.reason {
            Reason::Footer(_) => continue,
            Reason::SegmentHeader(_) => done.restored += 1,
            _ if matches!(survey.damaged_at(damage), Some(RecordSummary::Tombstone(_))) => done.restored += 1,
            _ => done.voided += 1,
        }
        for (offset, block) in survey.replacement_blocks(damage, epoch) {
            survey.file.seek(SeekFrom::Start(offset))?;
            survey.file.write_all(&block)?;
        }
    }
    // The footer must not describe records that are not durable yet.
    survey.file.sync()?;
    // Step 2.
    let Some(mut bytes) = survey.footer_bytes(epoch) else { return Ok(done) };
    if bytes.is_empty() {
        bytes = vec![0; BLOCK_BYTES];
    }
    survey.file.seek(SeekFrom::Start(superblock.segment_bytes - bytes.len() as u64))?;
    survey.file.write_all(&bytes)?;
    survey.file.sync()?;
    done.restored += 1;
    Ok(done)
}

/// State of one pass over a segment. Checking and repairing share it, so a repair acts on exactly
/// the damage that a check reports.
struct Survey<'a, F> {
    superblock: &'a Superblock,
    file: &'a mut F,
    report: SegmentReport,
    intact: Vec<RecordSummary>,
    /// Damaged records that the footer or their own header names, in the order of their offsets.
    damaged: Vec<RecordSummary>,
    /// True if the segment has a footer, or had one that is damaged.
    wants_footer: bool,
    /// True if records are lost. No footer may then claim to be complete.
    lost: bool,
    /// Offset up to which everything was durable, by the records read so far.
    durable: u64,
    end: u64,
    epochs: &'a SegmentEpochs,
}

impl<'a, F: Read + Seek> Survey<'a, F> {
    fn of(superblock: &'a Superblock, segment: u32, epochs: &'a SegmentEpochs, file: &'a mut F) -> Survey<'a, F> {
        let mut survey = Survey::new(superblock, segment, epochs, file);
        survey.scan();
        survey
    }

    fn new(superblock: &'a Superblock, segment: u32, epochs: &'a SegmentEpochs, file: &'a mut F) -> Survey<'a, F> {
        let report = SegmentReport {
            segment,
            epoch: None,
            footer: false,
            pages: 0,
            payload_bytes: 0,
            tombstones: 0,
            damages: Vec::new(),
            unrepairable: false,
            misplaced: false,
        };
        Survey {
            superblock,
            file,
            report,
            intact: Vec::new(),
            damaged: Vec::new(),
            wants_footer: false,
            lost: false,
            durable: 0,
            end: BLOCK,
            epochs,
        }
    }

    fn scan(&mut self) {
        let segment_bytes = self.superblock.segment_bytes;
        let file_bytes = self.file_bytes();
        let epoch = match self.header_epoch() {
            Ok(epoch) => epoch,
            Err(reason) => match self.headerless(file_bytes).verdict(self.epochs.oldest()) {
                Verdict::Epoch(epoch) => {
                    self.damage(0, BLOCK, None, reason);
                    epoch
                }
                Verdict::Misplaced(foreign) => return self.misplaced(foreign, file_bytes),
                verdict => {
                    self.report.unrepairable = verdict == Verdict::LogUntrusted;
                    return self.damage(0, segment_bytes, None, reason);
                }
            },
        };
        self.report.epoch = Some(epoch);
        match self.footer(epoch) {
            Some(footer) => self.check_listed(footer),
            None => self.hop(epoch, file_bytes),
        }
        if file_bytes < segment_bytes {
            self.report.unrepairable = true;
            self.damage(file_bytes, segment_bytes - file_bytes, None, Reason::CutShort);
        }
    }

    fn misplaced(&mut self, foreign: ForeignHeader, file_bytes: u64) {
        self.report.misplaced = true;
        let (reason, missed) = match foreign {
            ForeignHeader::Log => (Reason::OfAnotherLog, false),
            ForeignHeader::Segment { segment, epoch } => {
                (Reason::Misnamed { segment, epoch }, !self.epochs.has(segment, epoch))
            }
        };
        self.report.unrepairable = missed || may_replace(self.report.segment, self.epochs.last);
        self.damage(0, file_bytes, None, reason);
    }

    fn file_bytes(&mut self) -> u64 {
        self.file.seek(SeekFrom::End(0)).unwrap_or(0).min(self.superblock.segment_bytes)
    }

    fn header_epoch(&mut self) -> Result<u64, Reason> {
        let block = self.block(0)?;
        let log_id = self.superblock.log_id;
        let segment = self.report.segment;
        SegmentHeader::decode_epoch(&block, &log_id, segment).map_err(Reason::SegmentHeader)
    }

    fn headerless(&mut self, file_bytes: u64) -> Headerless {
        let Superblock { log_id, segment_bytes } = *self.superblock;
        let mut search = EpochSearch::new(log_id, self.report.segment, segment_bytes, file_bytes);
        if let Ok(block) = self.block(0) {
            search.header(&block);
        }
        while let Some((offset, len)) = search.next_read() {
            let mut bytes = vec![0; len];
            if self.read(offset, &mut bytes).is_err() {
                // A filler block: the search counts blocks, and an unreadable one must not stop it.
                bytes = vec![0xff; BLOCK_BYTES];
            }
            search.feed(&bytes);
        }
        search.finish()
    }

    /// The valid footer of this epoch. A damaged footer is reported. The footer of another epoch
    /// counts as none.
    fn footer(&mut self, epoch: u64) -> Option<Footer> {
        match self.try_footer(epoch) {
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

    fn try_footer(&mut self, epoch: u64) -> Result<Option<Footer>, DecodeError> {
        let Superblock { log_id, segment_bytes } = *self.superblock;
        let segment = self.report.segment;
        let block = self.block(segment_bytes - BLOCK).map_err(|_| DecodeError::Short("footer"))?;
        let footer = match FooterBlock::decode(&block, &log_id, segment, epoch, segment_bytes) {
            Ok(footer) => footer,
            Err(error @ DecodeError::Checksum(_)) => return Err(error),
            Err(_) => return Ok(None),
        };
        let mut bytes = vec![0; footer.table_blocks_bytes()];
        self.read(footer.table_offset(), &mut bytes).map_err(|_| DecodeError::Short("table of a footer"))?;
        footer.decode_table(&bytes).map(Some)
    }

    fn check_listed(&mut self, footer: Footer) {
        for record in footer.records {
            let place = RecordPlace { segment: footer.segment, epoch: footer.epoch, offset: record.offset() };
            self.end = self.end.max(record.offset() + record.record_bytes());
            let header = self.header(place);
            let checked = header.and_then(|header| match RecordSummary::of(&header) {
                Some(found) if found == record => self.check_body(&header),
                _ => Err(Reason::NotAsListed),
            });
            match checked {
                Ok(()) => self.intact.push(record),
                Err(reason) => {
                    self.damage(record.offset(), record.record_bytes(), Some(*record.id()), reason);
                    self.damaged.push(record);
                }
            }
        }
    }

    /// Hops from header to header, as a start does. It costs one read per record, and a search
    /// block by block where a header is invalid.
    fn hop(&mut self, epoch: u64, file_bytes: u64) {
        let segment = self.report.segment;
        let mut at = BLOCK;
        let mut hole = None;
        while at + BLOCK <= file_bytes {
            let place = RecordPlace { segment, epoch, offset: at };
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
            self.check_record(&header);
            at += header.record_bytes() as u64;
            self.end = at;
        }
        if let Some((begin, reason)) = hole.filter(|(begin, _)| self.was_record(*begin)) {
            self.damage(begin, BLOCK, None, if self.wants_footer { Reason::Lost } else { reason });
        }
        // The node writes a footer only once everything before it is durable.
        let durable = if self.wants_footer { u64::MAX } else { self.durable };
        for damage in self.report.damages.iter_mut().filter(|damage| damage.reason == Reason::Hole) {
            if damage.offset < durable {
                damage.reason = Reason::Lost;
            }
        }
        self.lost |= self.report.damages.iter().any(|damage| damage.reason == Reason::Lost);
    }

    /// Returns `true` if an invalid header block looks like a damaged record. Such a record may
    /// have been a tombstone, so it counts as lost and not as a hole.
    fn was_record(&mut self, offset: u64) -> bool {
        let log_id = self.superblock.log_id;
        let Ok(block) = self.block(offset) else { return true };
        match RecordHeader::decode(&block, &log_id, RecordPlace { segment: 0, epoch: 0, offset }) {
            Err(DecodeError::Checksum(_)) => true,
            // Its magic is damaged. A record with its magic intact is a valid one of an earlier
            // epoch.
            _ => !block.starts_with(&RECORD_MAGIC) && block[LOG_ID_AT..][..log_id.len()] == log_id,
        }
    }

    fn check_record(&mut self, header: &RecordHeader) {
        self.durable = self.durable.max(header.durable);
        self.lost |= matches!(header.body, RecordBody::Lost { .. });
        match (self.check_body(header), RecordSummary::of(header)) {
            (Ok(()), summary) => self.intact.extend(summary),
            (Err(reason), summary) => {
                let page = summary.map(|summary| *summary.id());
                self.damaged.extend(summary);
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
    fn damaged_at(&self, damage: &Damage) -> Option<&RecordSummary> {
        let at = self.damaged.binary_search_by_key(&damage.offset, RecordSummary::offset).ok()?;
        self.damaged.get(at)
    }

    /// Blocks to write in place of a damage, in order. Until the last one is written, a start sees
    /// no change.
    fn replacement_blocks(&self, damage: &Damage, epoch: u64) -> Vec<(u64, Vec<u8>)> {
        let Superblock { log_id, .. } = *self.superblock;
        let segment = self.report.segment;
        if damage.offset == 0 {
            return vec![(0, SegmentHeader { log_id, segment, epoch }.encode())];
        }
        let block = |offset, number, body| {
            let place = RecordPlace { segment, epoch, offset };
            (offset, RecordHeader { place, number, durable: self.durable.min(offset), body }.encode(&log_id))
        };
        let Damage { offset, bytes, .. } = *damage;
        let Some(record) = self.damaged_at(damage) else {
            // Voids and lost records are neither deleted by number nor delete by number.
            return vec![match damage.reason {
                Reason::Lost => block(offset, 0, RecordBody::Lost { bytes }),
                _ => block(offset, 0, RecordBody::Void { bytes }),
            }];
        };
        let rest = (bytes > BLOCK).then(|| block(offset + BLOCK, 0, RecordBody::Void { bytes: bytes - BLOCK }));
        let tombstone = block(offset, record.number(), RecordBody::Tombstone(*record.id()));
        rest.into_iter().chain([tombstone]).collect()
    }

    /// Footer to write, if any. Empty: overwrite a damaged footer, because records are lost and no
    /// footer may claim to be complete.
    fn footer_bytes(&self, epoch: u64) -> Option<Vec<u8>> {
        let segment_bytes = self.superblock.segment_bytes;
        // Records beyond the footer's block leave no room for a footer. The start hops.
        if !self.wants_footer || self.end > segment_bytes - BLOCK {
            return None;
        }
        let forgotten = self.damaged.iter().map(|record| {
            let tombstone = TombstoneSummary { id: *record.id(), offset: record.offset(), number: record.number() };
            RecordSummary::Tombstone(tombstone)
        });
        let mut records: Vec<RecordSummary> = self.intact.iter().copied().chain(forgotten).collect();
        records.sort_unstable_by_key(RecordSummary::offset);
        let footer = Footer { segment: self.report.segment, epoch, records };
        let fits = self.end + footer.encoded_bytes() <= segment_bytes;
        Some(if fits && !self.lost { footer.encode(&self.superblock.log_id) } else { Vec::new() })
    }
}

#[cfg(test)]
mod tests;
