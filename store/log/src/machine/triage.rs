//! First step of recovery: decides by the segments' headers which segments the log keeps.
//!
//! Terms:
//! - A segment is *headerless* if its header is unreadable or states another segment or log.
//!   [`larder_format::epoch`] infers its epoch from its records, or says why it cannot
//!   ([`Verdict`]).
//! - A headerless file is a *misplaced segment* if it holds no record of the segment in its name,
//!   and a valid header of another segment or log. An operator copied or renamed it.
//! - An epoch is *untrusted* if its segment was truncated, or a younger one was truncated or is
//!   missing. The lost part may have held tombstones for any of its records, so the log discards
//!   the segment.
//!
//! Invariant: no crash between the caller's removals makes an untrusted segment look trusted. The
//! order of [`Recovery::discard`] ensures that: oldest first, and the reason for the distrust last.

use super::entry::SEGMENTS_MAX;
use super::*;
use larder_format::epoch::{ForeignHeader, Headerless, Verdict, may_replace};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundSegment {
    /// Number in the file's name.
    pub segment: u32,
    /// Epoch from the header ([`larder_format::disk::SegmentHeader::decode_epoch`]), or the result
    /// of a search in a headerless segment.
    pub epoch: Result<u64, Headerless>,
    pub truncated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentEpoch {
    pub segment: u32,
    pub epoch: u64,
}

/// A log to recover, and the work that must precede its recovery.
#[derive(Debug)]
pub struct Recovery {
    pub log: Log,
    /// Segments to remove first, durably and in this order: unused ones, the oldest ones beyond the
    /// capacity, and untrusted ones.
    pub discard: Vec<u32>,
    /// Misplaced segments, to rename after `discard`.
    pub misplaced: Vec<u32>,
    /// Headerless segments whose epoch is known. Their headers are to be written anew; if that
    /// fails, the next start infers their epochs again.
    pub header_repairs: Vec<SegmentEpoch>,
    /// All segments to scan and to pass to [`Log::recover_segment`]: youngest epoch first.
    pub scan_order: Vec<SegmentEpoch>,
}

impl Recovery {
    pub fn new(config: LogConfig, found: Vec<FoundSegment>) -> Recovery {
        let segments_max = config.segments_max as usize;
        let numbers = found.iter().map(|found| found.segment.saturating_add(1)).max().unwrap_or(0);
        let mut log = Log::with_segments(config, numbers);
        let mut triage = Triage::of(found);
        if let Some((&newest, _)) = triage.kept.last_key_value() {
            log.segments.number_epochs_above(newest);
        }
        for (_, foreign) in &triage.misplaced {
            if let ForeignHeader::Segment { epoch, .. } = foreign {
                log.segments.number_epochs_above(*epoch);
            }
        }
        let discard = triage.take_discarded(segments_max);
        let oldest_first: Vec<SegmentEpoch> =
            triage.kept.into_iter().map(|(epoch, segment)| SegmentEpoch { segment, epoch }).collect();
        let scan_order: Vec<SegmentEpoch> = oldest_first.iter().rev().copied().collect();
        log.recovery = Some(RecoveryState::new(oldest_first));
        let header_repairs = triage.headerless.into_iter().filter(|at| scan_order.contains(at)).collect();
        let misplaced = triage.misplaced.into_iter().map(|(segment, _)| segment).collect();
        Recovery { log, discard, misplaced, header_repairs, scan_order }
    }
}

#[derive(Default)]
struct Triage {
    kept: BTreeMap<u64, u32>,
    /// Segments without a record that counts. Also one of two segments with the same epoch: epochs
    /// are unique, so it is a copy.
    discard: Vec<u32>,
    /// Kept, with an epoch inferred from the records.
    headerless: Vec<SegmentEpoch>,
    /// Epochs before this one are untrusted.
    trusted_from: u64,
    /// Reasons to distrust the whole log, to be removed last.
    distrust_causes: Vec<u32>,
    misplaced: Vec<(u32, ForeignHeader)>,
    /// A misplaced segment may have replaced a segment of the log, which may have held tombstones
    /// of any page.
    overwritten: bool,
}

impl Triage {
    fn of(found: Vec<FoundSegment>) -> Triage {
        let oldest = found.iter().filter_map(|found| found.epoch.ok()).min();
        let mut triage = Triage::default();
        // The largest number of a segment of this log, from the name or from a misplaced segment's
        // header.
        let mut last_number = None;
        for found in found {
            let verdict = match found.epoch {
                Err(headerless) if !fail_point!("log.headerless-segment-is-empty") => headerless.verdict(oldest),
                Err(_) => Verdict::Remove,
                Ok(epoch) => Verdict::Epoch(epoch),
            };
            let verdict = match verdict {
                // No log writes to such a number, and the index cannot name it.
                Verdict::Epoch(_) if found.segment >= SEGMENTS_MAX => Verdict::LogUntrusted,
                verdict => verdict,
            };
            last_number = last_number.max(match verdict {
                Verdict::Misplaced(ForeignHeader::Log) => None,
                Verdict::Misplaced(ForeignHeader::Segment { segment, .. }) => Some(segment),
                _ => Some(found.segment),
            });
            triage.add(&found, verdict);
        }
        triage.distrust_below_missing_segments();
        triage.overwritten = triage.misplaced.iter().any(|(segment, _)| {
            may_replace(*segment, last_number) && !fail_point!("log.overwritten-segment-not-missed")
        });
        if triage.overwritten {
            triage.trusted_from = u64::MAX;
        }
        triage
    }

    fn add(&mut self, found: &FoundSegment, verdict: Verdict) {
        let segment = found.segment;
        match verdict {
            Verdict::Epoch(epoch) => {
                if found.truncated {
                    self.trusted_from = self.trusted_from.max(epoch + 1);
                }
                if found.epoch.is_err() {
                    self.headerless.push(SegmentEpoch { segment, epoch });
                }
                self.discard.extend(self.kept.insert(epoch, segment));
            }
            Verdict::Remove => self.discard.push(segment),
            Verdict::Misplaced(foreign) => self.misplaced.push((segment, foreign)),
            Verdict::LogUntrusted => {
                self.trusted_from = u64::MAX;
                self.distrust_causes.push(segment);
            }
        }
    }

    /// A segment that exists only under another name is missing from the log, with all its
    /// tombstones.
    fn distrust_below_missing_segments(&mut self) {
        for (_, foreign) in &self.misplaced {
            let ForeignHeader::Segment { segment, epoch } = foreign else { continue };
            let exists = self.kept.range(epoch..).any(|(_, kept)| kept == segment);
            if !exists && !fail_point!("log.renamed-segment-not-missed") {
                self.trusted_from = self.trusted_from.max(epoch.saturating_add(1));
            }
        }
    }

    fn take_discarded(&mut self, segments_max: usize) -> Vec<u32> {
        let mut discard = std::mem::take(&mut self.discard);
        while self.kept.len() > segments_max
            || self.kept.first_key_value().is_some_and(|(epoch, _)| *epoch < self.trusted_from)
        {
            discard.extend(self.kept.pop_first().map(|(_, segment)| segment));
        }
        discard.append(&mut self.distrust_causes);
        if self.overwritten {
            // All segments go. The largest number must go last: while it exists, a start after a
            // crash still sees that the misplaced segment may have replaced one.
            discard.sort_unstable();
        }
        discard
    }
}
