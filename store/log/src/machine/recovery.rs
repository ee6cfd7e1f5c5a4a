//! Recovery: builds the index from the segments, newest first, and serves reads meanwhile.
//!
//! The record of a page with the largest number counts, unless a tombstone with a
//! larger number names the page. Numbers grow with epochs. So whatever supersedes a record stands
//! in the same segment or in a younger one. If segments come youngest first, a page can be served
//! on sight: no later segment takes it back.
//!
//! Steps of a start:
//!
//! 1. [`Recovery::new`] decides by the headers which segments must be removed, before anything
//!    else. It returns a log that serves reads and answers writers [`Append::Wait`].
//! 2. [`Log::recover_segment`] takes the scans in the order of [`Recovery::scan_order`]. The caller
//!    may scan several segments at once.
//! 3. [`Log::finish_recovery`]: the log takes writes. Segments without a footer get one after their
//!    next sync.
//!
//! A crash in any step changes nothing but the removals of step 1, see `triage.rs`.
//!
//! A crash during a copy-forward leaves copies beside their originals. The original was durable and
//! verified, and the copy may be torn. So the original counts until its segment is reclaimed, see
//! record 0029.
//!
//! Invariants:
//! - A segment that could not be read to its end, and all older ones, are *untrusted*: none of
//!   their pages is served. The unread part may hold a tombstone of any of them.
//! - The index is then incomplete up to that epoch, see `unindexed.rs`.

use super::entry::{Fingerprint, PackedEntry};
use super::segment::EpochState;
use super::shared_index::SharedIndex;
use super::*;
use larder_format::disk::record_bytes;
use larder_format::footer::{PageSummary, RecordSummary};
use std::collections::{BTreeMap, BTreeSet};

/// Number of youngest segments whose last second of writes may not be durable.
const UNSYNCED_SEGMENTS: usize = 2;

/// A call that does not match the state of the recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RecoveryError {
    #[error("segment {found:?} was scanned out of order: the next one is {expected:?}")]
    OutOfOrder { found: SegmentEpoch, expected: Option<SegmentEpoch> },
    #[error("{left} segments were not recovered yet")]
    Unfinished { left: usize },
    #[error("recovery has already finished")]
    NotRecovering,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecoveryResult {
    pub segments: u64,
    pub footers: u64,
    pub cut_short: u64,
    /// Page records in untrusted segments. These pages are not served.
    pub untrusted: u64,
    /// Page records that the index had no room for. These pages are not served.
    pub beyond_index: u64,
    /// Page records found, current or not.
    pub page_records: u64,
    pub expired: u64,
    pub tombstones: u64,
    pub torn_records: u64,
    pub generation_max: u64,
}

#[derive(Debug, Clone, Copy)]
struct Deletion {
    /// Records with smaller numbers are deleted.
    below: u64,
    /// A power failure may still take the tombstone, or the reason was no tombstone.
    not_durable: bool,
}

#[derive(Debug)]
pub(super) struct RecoveryState {
    /// Segments not recovered yet. The next one is the last.
    left: Vec<SegmentEpoch>,
    segments: usize,
    deletions: BTreeMap<Fingerprint, Deletion>,
    /// Generations of pages that were dropped meanwhile, such as damaged ones. An older put must
    /// not take the place of such a page. Its original may.
    dropped: BTreeMap<Fingerprint, u64>,
    record_number_max: u64,
    /// A segment was cut short, so it and all older ones are untrusted.
    untrusted: bool,
    /// The index had no room for a page. No older page is indexed either: it could be an older put
    /// of one that was left out.
    is_index_full: bool,
    result: RecoveryResult,
}

impl RecoveryState {
    pub(super) fn new(oldest_first: Vec<SegmentEpoch>) -> RecoveryState {
        RecoveryState {
            segments: oldest_first.len(),
            left: oldest_first,
            deletions: BTreeMap::new(),
            dropped: BTreeMap::new(),
            record_number_max: 0,
            untrusted: false,
            is_index_full: false,
            result: RecoveryResult::default(),
        }
    }

    pub(super) fn segments_left(&self) -> usize {
        self.left.len()
    }

    /// Reverses the order, for a test that shows that the order matters.
    #[cfg(test)]
    pub(super) fn reverse(&mut self) {
        self.left.reverse();
    }

    /// Notes that a page left the index. Older segments may hold other records of it.
    pub(super) fn page_dropped(&mut self, entry: &PackedEntry) {
        self.dropped.insert(entry.fingerprint, entry.generation);
    }

    /// Notes that the records of a page with numbers below `number` do not count.
    fn delete_below(&mut self, page: Fingerprint, number: u64, not_durable: bool) {
        let deletion = Deletion { below: number, not_durable };
        let known = self.deletions.entry(page).or_insert(deletion);
        if number > known.below {
            *known = deletion;
        }
    }

    fn take_next(&mut self, found: SegmentEpoch) -> Result<(), RecoveryError> {
        let expected = self.left.last().copied();
        if expected != Some(found) {
            return Err(RecoveryError::OutOfOrder { found, expected });
        }
        self.left.pop();
        Ok(())
    }

    /// Collects everything in a segment that deletes records of this segment or of older ones.
    fn collect_deletions(
        &mut self,
        index: &SharedIndex,
        records: &[RecordSummary],
        not_durable: bool,
        now_unix_ms: u64,
    ) {
        // No page of these segments will be served, so nothing need be deleted.
        let is_needed = !self.is_index_full;
        for record in records {
            self.record_number_max = self.record_number_max.max(record.number());
            match record {
                RecordSummary::Page(page) => {
                    self.result.page_records += 1;
                    self.result.generation_max = self.result.generation_max.max(page.generation);
                    if is_needed && is_expired(page.expires_unix_ms, now_unix_ms) {
                        self.result.expired += 1;
                        // Otherwise an older put of the page would be served after a newer one
                        // expired.
                        self.delete_below(index.fingerprint(&page.id), page.number, false);
                    }
                }
                RecordSummary::Tombstone(tombstone) => {
                    self.result.tombstones += 1;
                    if is_needed && !fail_point!("log.recovery-ignores-tombstones") {
                        self.delete_below(index.fingerprint(&tombstone.id), tombstone.number, not_durable);
                    }
                }
            }
        }
    }
}

impl Log {
    /// Adds the next segment of [`Recovery::scan_order`]. Readers find its pages from now on.
    pub fn recover_segment(&mut self, scanned: ScannedSegment, now_unix_ms: u64) -> Result<(), RecoveryError> {
        let mut recovery = self.recovery.take().ok_or(RecoveryError::NotRecovering)?;
        let result = recovery.take_next(SegmentEpoch { segment: scanned.segment, epoch: scanned.epoch });
        if result.is_ok() {
            self.add_scanned(&mut recovery, scanned, now_unix_ms);
        }
        self.recovery = Some(recovery);
        result
    }

    fn add_scanned(&mut self, recovery: &mut RecoveryState, scanned: ScannedSegment, now_unix_ms: u64) {
        let ScannedSegment { segment, epoch, records, end, footer, torn, cut_short } = scanned;
        recovery.result.torn_records += torn;
        if records.is_empty() && !cut_short {
            return self.segments.add_free(segment);
        }
        recovery.result.segments += 1;
        recovery.result.footers += u64::from(footer);
        recovery.result.cut_short += u64::from(cut_short);
        if cut_short {
            recovery.untrusted = !fail_point!("log.trust-below-truncated-segment");
            self.unindexed.mark_incomplete_up_to(epoch);
        }
        let is_young = recovery.segments - recovery.left.len() <= UNSYNCED_SEGMENTS;
        // Only a footer proves that the segment was synced: it is written after the sync.
        let synced = footer && !is_young;
        self.segments.add_sealed(segment, EpochState::recovered(epoch, end, synced));
        recovery.collect_deletions(&self.index.entries, &records, !synced, now_unix_ms);
        // Newest first, as the segments: readers find each page at once, and no record that
        // follows may take it back.
        for record in records.iter().rev() {
            if let RecordSummary::Page(page) = record {
                self.recover_page(recovery, SegmentEpoch { segment, epoch }, page, now_unix_ms);
            }
        }
        if let Some(state) = self.segments.epoch_mut(segment) {
            // Oldest first, as in a segment that this log wrote: floors drop the first pages.
            state.reverse_slots();
            state.shrink_slots();
            // A footer claims to list every record. The unread part of a segment may have more.
            state.set_footer_records((!footer && !cut_short).then_some(records));
        }
    }

    fn recover_page(&mut self, recovery: &mut RecoveryState, at: SegmentEpoch, page: &PageSummary, now_unix_ms: u64) {
        let tracked = self.pages_tracked() + (recovery.deletions.len() + recovery.dropped.len()) as u64;
        recovery.is_index_full |= tracked >= self.config.pages_max;
        if recovery.is_index_full {
            recovery.result.beyond_index += 1;
            // An entry for each page would take the memory that the bound saves.
            return self.unindexed.mark_incomplete_up_to(at.epoch);
        }
        let fingerprint = self.index.entries.fingerprint(&page.id);
        if is_expired(page.expires_unix_ms, now_unix_ms) {
            return self.unindexed.add(fingerprint, page.number + 1, at.epoch);
        }
        if recovery.untrusted {
            recovery.result.untrusted += 1;
            return self.unindexed.add(fingerprint, page.number + 1, at.epoch);
        }
        if let Some(deletion) = recovery.deletions.get(&fingerprint).filter(|deletion| deletion.below > page.number) {
            if deletion.not_durable {
                // A power failure may still take the tombstone, so another forget must write
                // another one.
                self.unindexed.add(fingerprint, deletion.below, at.epoch);
            }
            return;
        }
        // Its record is unindexed already, with a larger number and epoch.
        if recovery.dropped.get(&fingerprint).is_some_and(|&generation| generation != page.generation) {
            return;
        }
        let known = self.index.entries.find_fingerprint(fingerprint);
        if let Some(slot) = known.filter(|&slot| !self.supersedes(slot, page.number)) {
            if self.index.entries.get(slot).is_same_put(page) && !fail_point!("log.torn-copy-hides-original") {
                self.relocate_to_original(slot, at.segment, page);
            }
            return;
        }
        known.map(|slot| self.remove_page(slot));
        let bytes = record_bytes(page.payload_bytes as usize) as u64;
        let used = self.index.namespace_bytes(&page.id.namespace);
        if used.saturating_add(bytes) > self.index.quota(&page.id.namespace) {
            self.counts.quota_pages += 1;
            return self.unindexed.add(fingerprint, page.number + 1, at.epoch);
        }
        self.insert_page(at.segment, page);
    }

    /// Ends the recovery after the last segment. The log takes writes from now on. Segments without
    /// a footer get one after their next sync.
    pub fn finish_recovery(&mut self) -> Result<RecoveryResult, RecoveryError> {
        let left = self.recovery.as_ref().ok_or(RecoveryError::NotRecovering)?.segments_left();
        if left > 0 {
            return Err(RecoveryError::Unfinished { left });
        }
        let recovery = self.recovery.take().ok_or(RecoveryError::NotRecovering)?;
        self.segments.number_records_above(recovery.record_number_max);
        // In the order of their numbers, which every run of the simulation repeats.
        let segments: BTreeSet<u32> = self.segments.in_epoch_order(..).map(|(_, segment)| segment).collect();
        for segment in segments {
            self.plan_footer(segment);
        }
        if let Some(listener) = self.listener() {
            listener.all_changed();
        }
        Ok(recovery.result)
    }
}
