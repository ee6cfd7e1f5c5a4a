//! Building a log from what its segments hold, newest first, so that it can be read at once.
//!
//! Always true: of the records of a page the one with the largest number counts, and none that a tombstone with a larger
//! number names; the order in which they are found does not matter. As numbers grow with lives, whatever counts against a
//! record of a segment stands in that segment or in a younger one. So when segments come in descending order of lives,
//! a page that is found can be served: nothing that comes later takes it back.
//!
//! Steps of a start:
//! 1. [`Recovery::new`] takes the segments' headers: which segments must go, durably, before anything else; the others,
//!    youngest first; and a log that is *restoring*: it can be read, and answers whoever wants to write [`Append::Wait`].
//!    A segment whose file was cut short goes with all that is older, as what was cut off may have forgotten it; one without
//!    a header as [`larder_format::life`] says.
//! 2. [`Log::restore`] takes their scans in that order. They may be scanned in any order, and several at once.
//! 3. [`Log::restored`]: the log takes writes. Segments without a footer get one, once they are synced.
//! 4. [`Log::settle`], until it says that there is no more: the keeper learns what there is, oldest first.
//!
//! A crash at any of these steps changes nothing but that segments of step 1 are gone, oldest first, so that what makes
//! others go is gone or set aside after them.

use super::index::Original;
use super::scan::ScannedSegment;
use super::*;
use crate::planted::{Bug, has};
use larder_format::footer::PageSummary;
use larder_format::life::{Foreign, Headless, Verdict, may_replace};
use std::collections::BTreeSet;

/// The newest segments, whose last second of writes may not be durable yet.
const UNSYNCED_SEGMENTS: usize = 2;

/// A segment that is there, and what its header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundSegment {
    /// Its number.
    pub segment: u32,
    /// Its life by its header ([`larder_format::disk::SegmentHeader::decode_life`]), or what else it says.
    pub life: Result<u64, Headless>,
    /// Its file is shorter than a segment.
    pub short: bool,
}

/// A segment to be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentLife {
    /// Its number.
    pub segment: u32,
    /// Its life.
    pub life: u64,
}

/// A log to be restored, and what must happen before it is.
#[derive(Debug)]
pub struct Recovery {
    /// The log. It is empty until [`Log::restore`] was called.
    pub log: Log,
    /// Segments to remove from the device first, durably and in this order: those that hold nothing, the oldest of those
    /// that are more than the capacity allows, and what cannot be trusted.
    pub discard: Vec<u32>,
    /// Files that are none of the log's segments: to be set aside when the others are gone.
    pub strays: Vec<u32>,
    /// Segments whose header is to be written again, with this life: their records said it.
    pub mend: Vec<SegmentLife>,
    /// The others, in the order in which [`Log::restore`] takes them: youngest first.
    pub order: Vec<SegmentLife>,
}

/// A call that does not fit the state of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// This segment is not the next to be restored.
    #[error("segment {found:?} cannot be restored now, but {expected:?}")]
    OutOfOrder {
        /// What came.
        found: SegmentLife,
        /// What should have come; `None` if all have.
        expected: Option<SegmentLife>,
    },
    /// Some segments were not restored yet.
    #[error("{left} segments were not restored yet")]
    Unfinished {
        /// How many.
        left: usize,
    },
    /// The log is not being restored.
    #[error("the log is not being restored")]
    NotRestoring,
}

/// What was found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// Segments with records.
    pub segments: u64,
    /// Of these, segments whose footer said it all.
    pub footers: u64,
    /// Segments that could not be read to their end, or in which something is lost.
    pub cut_short: u64,
    /// Pages of these and of older ones, which are not served: what forgot them may not have been read.
    pub distrusted: u64,
    /// Records of pages, whether they count or not.
    pub page_records: u64,
    /// Pages whose time is over.
    pub expired: u64,
    /// Tombstones.
    pub tombstones: u64,
    /// Records that were begun and are not whole.
    pub torn_records: u64,
    /// The largest generation of a page.
    pub generation_max: u64,
}

#[derive(Debug)]
pub(super) struct Restoring {
    /// The next is the last of these.
    order: Vec<SegmentLife>,
    total: usize,
    /// By page: the largest number of a tombstone, or of a record whose time is over, and whether that may not be durable.
    killed: BTreeMap<PageId, (u64, bool)>,
    /// Largest number of a record.
    number_max: u64,
    /// A segment could not be read to its end, or is damaged. It may hold tombstones of anything in it and in older ones, so none of that
    /// is served: what was forgotten stays forgotten.
    distrustful: bool,
    report: RestoreReport,
}

impl Restoring {
    pub(super) fn left(&self) -> usize {
        self.order.len()
    }

    /// For a test that shows that the order counts.
    #[cfg(test)]
    pub(super) fn reverse(&mut self) {
        self.order.reverse();
    }

    pub(super) fn kill(&mut self, id: PageId, number: u64, dirty: bool) {
        let known = self.killed.entry(id).or_insert((number, dirty));
        if number > known.0 {
            *known = (number, dirty);
        }
    }
}

/// How far the keeper knows what was restored.
#[derive(Debug)]
pub(super) struct Settling {
    /// Life and offset of the last page that it was told of.
    after: (u64, u64),
    /// What is younger came by itself.
    last_life: u64,
}

impl Recovery {
    /// Sorts out what was found.
    pub fn new(config: LogConfig, found: Vec<FoundSegment>) -> Recovery {
        let mut log = Log::new(config);
        let Sorted { mut kept, mut discard, headless, trusted_from, distrusted, strays, replaced } = Sorted::of(found);
        log.next_life = kept.last_key_value().map_or(1, |(life, _)| life.saturating_add(1));
        for (_, foreign) in &strays {
            if let Foreign::Segment { life, .. } = foreign {
                log.next_life = log.next_life.max(life.saturating_add(1));
            }
        }
        let segments_max = log.config.segments_max as usize;
        while kept.len() > segments_max || kept.first_key_value().is_some_and(|(life, _)| *life < trusted_from) {
            discard.extend(kept.pop_first().map(|(_, segment)| segment));
        }
        discard.extend(distrusted);
        if replaced {
            // All go, and a crash must not make what is left look as if the stray lay above it.
            discard.sort_unstable();
        }
        let oldest_first: Vec<SegmentLife> =
            kept.into_iter().map(|(life, segment)| SegmentLife { segment, life }).collect();
        let order: Vec<SegmentLife> = oldest_first.iter().rev().copied().collect();
        log.restoring = Some(Restoring {
            total: oldest_first.len(),
            order: oldest_first,
            killed: BTreeMap::new(),
            number_max: 0,
            distrustful: false,
            report: RestoreReport::default(),
        });
        let mend = headless.into_iter().filter(|at| order.contains(at)).collect();
        let strays = strays.into_iter().map(|(segment, _)| segment).collect();
        Recovery { log, discard, strays, mend, order }
    }
}

/// What is to become of the segments.
#[derive(Default)]
struct Sorted {
    /// By life.
    kept: BTreeMap<u64, u32>,
    /// To be removed: those without anything that counts. So is a second segment of the same life: one of them is a copy.
    discard: Vec<u32>,
    /// Kept though their header does not say their life.
    headless: Vec<SegmentLife>,
    /// Lives before this one cannot be trusted.
    trusted_from: u64,
    /// What nothing can be trusted for: to be removed last.
    distrusted: Vec<u32>,
    /// None of the log's segments.
    strays: Vec<(u32, Foreign)>,
    /// One of them lies where a segment of the log may have been, with tombstones of anything.
    replaced: bool,
}

impl Sorted {
    fn of(found: Vec<FoundSegment>) -> Sorted {
        let oldest = found.iter().filter_map(|found| found.life.ok()).min();
        let mut sorted = Sorted::default();
        // The largest number that one of the log's segments has, or had before it was renamed.
        let mut last = None;
        for FoundSegment { segment, life, short } in found {
            let verdict = match life {
                Err(headless) if !has(Bug::HeadlessIsNothing) => headless.verdict(oldest),
                Err(_) => Verdict::Remove,
                Ok(life) => Verdict::Life(life),
            };
            last = last.max(match verdict {
                Verdict::Stray(Foreign::Log) => None,
                Verdict::Stray(Foreign::Segment { segment, .. }) => Some(segment),
                _ => Some(segment),
            });
            match verdict {
                Verdict::Life(number) => {
                    if short {
                        sorted.trusted_from = sorted.trusted_from.max(number + 1);
                    }
                    if life.is_err() {
                        sorted.headless.push(SegmentLife { segment, life: number });
                    }
                    sorted.discard.extend(sorted.kept.insert(number, segment));
                }
                Verdict::Remove => sorted.discard.push(segment),
                Verdict::Stray(foreign) => sorted.strays.push((segment, foreign)),
                Verdict::DistrustAll => {
                    sorted.trusted_from = u64::MAX;
                    sorted.distrusted.push(segment);
                }
            }
        }
        sorted.miss_renamed();
        let replaces = |(segment, _): &(u32, Foreign)| may_replace(*segment, last) && !has(Bug::ReplacedIsNotMissed);
        sorted.replaced = sorted.strays.iter().any(replaces);
        if sorted.replaced {
            sorted.trusted_from = u64::MAX;
        }
        sorted
    }

    /// What stands under another name only is missing from the log, with all that it forgot.
    fn miss_renamed(&mut self) {
        for (_, foreign) in &self.strays {
            let Foreign::Segment { segment, life } = foreign else { continue };
            let there = self.kept.range(life..).any(|(_, kept)| kept == segment);
            if !there && !has(Bug::RenamedIsNotMissed) {
                self.trusted_from = self.trusted_from.max(life.saturating_add(1));
            }
        }
    }
}

impl Log {
    /// Whether segments are still to be restored.
    pub fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }

    /// Takes what the next segment of [`Recovery::order`] holds. Its pages can be found and read from now on.
    pub fn restore(&mut self, scanned: ScannedSegment, now_unix_ms: u64) -> Result<(), RestoreError> {
        let mut restoring = self.restoring.take().ok_or(RestoreError::NotRestoring)?;
        let found = SegmentLife { segment: scanned.segment, life: scanned.life };
        let expected = restoring.order.last().copied();
        let result = match expected == Some(found) {
            true => {
                restoring.order.pop();
                self.restore_segment(&mut restoring, scanned, now_unix_ms);
                Ok(())
            }
            false => Err(RestoreError::OutOfOrder { found, expected }),
        };
        self.restoring = Some(restoring);
        result
    }

    fn restore_segment(&mut self, restoring: &mut Restoring, scanned: ScannedSegment, now_unix_ms: u64) {
        let ScannedSegment { segment, life, records, end, footer, torn, cut_short } = scanned;
        restoring.report.torn_records += torn;
        if records.is_empty() && !cut_short {
            self.segments.insert(segment, Segment::Free);
            return;
        }
        restoring.report.segments += 1;
        restoring.report.footers += u64::from(footer);
        restoring.report.cut_short += u64::from(cut_short);
        if cut_short {
            restoring.distrustful = !has(Bug::TrustsCutShort);
            self.forgetting.blind_up_to(life);
        }
        let young = restoring.total - restoring.order.len() <= UNSYNCED_SEGMENTS;
        let dirty = young || !footer;
        let rebuilt = Life { end, completed: 1, synced: u64::from(!dirty), ..Life::new(life) };
        self.segments.insert(segment, Segment::Sealed(rebuilt));
        self.by_life.insert(life, segment);
        restoring.take_killers(&records, dirty, now_unix_ms);
        for record in &records {
            if let RecordSummary::Page(page) = record {
                self.restore_page(restoring, SegmentLife { segment, life }, page, now_unix_ms);
            }
        }
        if let Some(rebuilt) = self.segments.get_mut(&segment).and_then(Segment::life_mut) {
            rebuilt.slots.shrink_to_fit();
            // Behind what could not be read there may be more: no footer must say that there is not.
            rebuilt.wants_footer = !footer && !cut_short;
            if rebuilt.wants_footer {
                rebuilt.records = records;
            }
        }
    }

    fn restore_page(&mut self, restoring: &mut Restoring, at: SegmentLife, page: &PageSummary, now_unix_ms: u64) {
        if is_expired(page.expires_unix_ms, now_unix_ms) {
            self.forgetting.doubt(page.id, page.number + 1, at.life);
            return;
        }
        if restoring.distrustful {
            restoring.report.distrusted += 1;
            self.forgetting.doubt(page.id, page.number + 1, at.life);
            return;
        }
        if let Some(&(killer, dirty)) = restoring.killed.get(&page.id).filter(|(killer, _)| *killer > page.number) {
            if dirty {
                // A power failure may still take the tombstone: forgetting the page again must write another.
                self.forgetting.doubt(page.id, killer, at.life);
            }
            return;
        }
        let known = self.index.find(&page.id);
        let younger = known.filter(|&slot| self.index.get(slot).number > page.number);
        if let Some(slot) = younger.filter(|_| !has(Bug::OlderReplacesNewer)) {
            if self.index.is_same_put(slot, page) {
                self.originals.entry(page.id).or_insert(Original::of(at.segment, page));
            }
            return;
        }
        known.map(|slot| self.take_out(slot));
        let bytes = record_bytes(page.payload_bytes as usize) as u64;
        let used = self.index.namespace_bytes(&page.id.namespace);
        if used.saturating_add(bytes) > self.index.quota(&page.id.namespace) {
            self.counts.quota_pages += 1;
            self.forgetting.doubt(page.id, page.number + 1, at.life);
            return;
        }
        self.enter(at.segment, page);
    }

    /// All segments of [`Recovery::order`] were restored: the log takes writes from now on.
    pub fn restored(&mut self) -> Result<RestoreReport, RestoreError> {
        let restoring = self.restoring.take().ok_or(RestoreError::NotRestoring)?;
        let left = restoring.left();
        if left > 0 {
            self.restoring = Some(restoring);
            return Err(RestoreError::Unfinished { left });
        }
        self.next_number = restoring.number_max.saturating_add(1);
        let last_life = self.by_life.last_key_value().map_or(0, |(&life, _)| life);
        self.settling = Some(Settling { after: (0, 0), last_life });
        let segments: BTreeSet<u32> = self.by_life.values().copied().collect();
        segments.into_iter().for_each(|segment| self.plan_footer(segment));
        Ok(restoring.report)
    }

    /// Tells the keeper of at most `max` pages that were restored, oldest record first; whether there are more. Until then
    /// they are not copied when their segment is reclaimed, unless they were used.
    pub fn settle(&mut self, max: usize) -> bool {
        let Some(Settling { after: (life, offset), last_life }) = self.settling.take() else { return false };
        let next = self.by_life.range(life..=last_life.max(life)).find_map(|(&found, &segment)| {
            let slots = self.pages_behind(segment, if found == life { offset } else { 0 });
            (!slots.is_empty()).then_some((found, slots))
        });
        let Some((life, slots)) = next else { return false };
        for &slot in slots.iter().take(max.max(1)) {
            let offset = self.index.get(slot).offset();
            self.settling = Some(Settling { after: (life, offset), last_life });
            self.keep(slot);
        }
        true
    }
}

impl Restoring {
    /// Looks at what counts against records of this segment and older ones.
    fn take_killers(&mut self, records: &[RecordSummary], dirty: bool, now_unix_ms: u64) {
        for record in records {
            self.number_max = self.number_max.max(record.number());
            match record {
                RecordSummary::Page(page) => {
                    self.report.page_records += 1;
                    self.report.generation_max = self.report.generation_max.max(page.generation);
                    if is_expired(page.expires_unix_ms, now_unix_ms) {
                        self.report.expired += 1;
                        self.kill(page.id, page.number, false);
                    }
                }
                RecordSummary::Tombstone(tombstone) => {
                    self.report.tombstones += 1;
                    if !has(Bug::IgnoreTombstones) {
                        self.kill(tombstone.id, tombstone.number, dirty);
                    }
                }
            }
        }
    }
}
