//! Copy-forward: saves pages that will probably be used again from the segment that is reclaimed
//! next. This file holds the decisions; `crate::copy_forward` does the I/O.
//!
//! A *number* in this file is a record number. The larger number is the newer record.
//!
//! Invariants:
//! - A copy is made of the current record only. The copy has a larger number and stands in a
//!   younger segment, so a tombstone that is planned later deletes the copy and the original alike.
//! - Room for all copies is reserved in the open segment before the work begins. So a copy never
//!   waits for room, though writers may wait for copies.
//!
//! The log starts a copy-forward when it opens the last available segment. Then another segment is
//! ready before the open one is full. It also starts one later, from `choose_next` in `prepare`, if
//! it expected to create the next segment and the file system was full.
//!
//! Precedence for room in the open segment:
//! 1. Copies of hard-pinned pages. In a freshly opened segment they always fit, because they come
//!    from a segment of the same size. They are at most a quarter of the log, so at most one
//!    segment in four fills up with them.
//! 2. Copies of pages without which their namespace would fall below its floor. They may fill
//!    [`FLOOR_RUN_SEGMENTS`] segments in a row, and on average take seven eighths of each. After a
//!    longer run they come after 3, and the run loses an eighth of the rest.
//! 3. The record for which the segment was opened.
//! 4. Copies of other pages, up to seven eighths of the segment, and on average `keep_percent`.
//!    Those of higher worth come first.
//!
//! Steps, and what a crash or failure leaves after each of them:
//!
//! 1. The log chooses pages and reserves room, slice by slice ([`Intent::Reclaim`]), and queues
//!    [`Intent::CopyForward`]. Nothing changed: the pages are served from their originals. Until
//!    the choice ends, writers share an eighth of the segment, and a page cannot be pinned any more
//!    unless it was chosen. The choice begins when no write to the oldest segment is in flight. A
//!    put there could otherwise replace a chosen page, inherit its hard pin, and be evicted.
//! 2. For each page: [`Log::begin_maintenance_read`], a read, [`Log::end_read`]. A damaged page is
//!    dropped as in any other read. If the page was forgotten, replaced or dropped meanwhile, step
//!    3 refuses it.
//! 3. [`Log::plan_copy`] plans the copy, and [`Log::write_done`] makes it current. A crash leaves
//!    the original, or both. With both, the original counts while its segment exists, because the
//!    copy may be torn. The reclaim of that segment copies the page again if it is retained, and
//!    otherwise leaves it with its unverified copy. If the write fails, the original stays current.
//!    A forget deletes the copy by its number. A put that was planned before the copy and is
//!    written after it has a smaller number, so the copy wins: the page's first complete writer
//!    wins.
//! 4. A sync of the segment of the copies. From now on a crash leaves the copies.
//! 5. [`Log::copy_forward_done`]: the log evicts the pages that were not copied, and reclaims the
//!    segment when idle. If the sync failed, or copies are still being written, a crash may lose
//!    them. That is a miss.
//!
//! Exceptions. In these cases even hard-pinned pages may be lost:
//! - If the open segment fails during the copies, its reservation ends, and pages not copied yet
//!   are evicted. The oldest segment is then reclaimed without copies.
//! - A log that was opened full has no open segment to copy to.
//! - A log of fewer than [`SEGMENTS_MIN`] segments copies nothing.
//! - If the next segment could not be created, copies take no more than the rest of the open one.
//!   So do those of a second segment that is reclaimed because the index is full.

use super::*;
use larder_format::PageMeta;
use larder_format::disk::{RecordBody, record_bytes};
use std::collections::{BTreeMap, BTreeSet};

/// In a smaller log, the room for copies would be too large a share.
const SEGMENTS_MIN: u32 = 4;

/// Number of segments whose share copies may take at once, if few were made before. Pages that are
/// used together were often put together.
const CREDIT_SEGMENTS: u64 = 4;

/// Full segments in a row that copies for floors may fill. A segment counts as full without room
/// for the record for which it was opened. Writers get little room meanwhile.
const FLOOR_RUN_SEGMENTS: u64 = 8;

/// Pages that a choice of copies takes, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    Hard,
    /// Pages without which their namespace falls below its floor. Those that nothing else retains
    /// count as leaving first.
    FloorUnretained,
    FloorRetained,
    Soft,
    /// Used pages of high worth, then those of usual worth, then all others: the worth of a page
    /// may change between two passes.
    UsedHigh,
    UsedUsual,
    Used,
}

/// Copy these pages, sync the segment of the copies, and report to [`Log::copy_forward_done`] in
/// any case. A copy is [`Log::begin_maintenance_read`], a verified read, and [`Log::plan_copy`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyForward {
    /// The segment that is reclaimed next.
    pub segment: u32,
    pub epoch: u64,
    /// Records to copy: those of hard-pinned pages first, then those for floors, soft-pinned ones,
    /// and used ones by their worth, each in the order in which they became visible.
    pub pages: Vec<RecordRef>,
}

#[derive(Debug)]
pub(super) struct CopyForwardState {
    /// Segment that is reclaimed after the copies.
    source: SegmentEpoch,
    /// Open segment in which room for the copies is reserved.
    target: SegmentEpoch,
    /// Numbers of the records without a planned copy. At the end their pages are evicted.
    left: BTreeSet<u64>,
}

/// Pages of the oldest segment that were chosen for copies so far. Room for each is reserved.
#[derive(Debug)]
pub(super) struct ChoiceOfCopies {
    source: SegmentEpoch,
    target: SegmentEpoch,
    /// The choice begins when the writes to the source have ended.
    awaits_writes: bool,
    /// Position in the source's list of slots.
    next: usize,
    pass: Pass,
    /// Result of [`Log::is_floor_at_risk`] when the choice began.
    is_floor_at_risk: bool,
    /// True if copies for floors may fill the target. Otherwise they leave room to `beside`.
    floors_may_fill: bool,
    /// Bytes by namespace that leave with the source, as far as floors allow.
    leaving: BTreeMap<u32, u64>,
    /// Bytes of the pages that were chosen for floors.
    floor_bytes: u64,
    /// The record for which the target was opened, until it has its place.
    beside: Option<(NamespaceId, u64)>,
    pages: Vec<RecordRef>,
    /// Their numbers.
    left: BTreeSet<u64>,
}

impl LogConfig {
    /// Bytes of copies that each reclaim allows, on average.
    fn copied_bytes_share(&self) -> u64 {
        self.segment_bytes / 100 * u64::from(self.keep_percent)
    }

    pub(super) fn copy_credit_max(&self) -> u64 {
        self.copied_bytes_share() * CREDIT_SEGMENTS
    }

    /// Bytes of copies for floors that each reclaim allows, on average.
    fn floor_bytes_share(&self) -> u64 {
        self.segment_bytes / 8 * 7
    }

    pub(super) fn floor_credit_max(&self) -> u64 {
        self.floor_bytes_share() + (self.segment_bytes - self.floor_bytes_share()) * FLOOR_RUN_SEGMENTS
    }
}

impl Log {
    pub(super) fn can_copy_forward(&self) -> bool {
        self.config.segments_max >= SEGMENTS_MIN
    }

    pub(super) fn is_copy_target(&self, segment: u32) -> bool {
        match &self.next_segment {
            NextSegment::Choosing(choice) => choice.target.segment == segment,
            NextSegment::CopyingForward(copying) => copying.target.segment == segment,
            _ => false,
        }
    }

    /// Returns `true` if the page's segment is being reclaimed, and no copy of this page is to be
    /// planned any more. A pin would come too late for it.
    pub(super) fn is_excluded_from_copy(&self, slot: u32) -> bool {
        let entry = self.index.entries.get(slot);
        let (source, left) = match &self.next_segment {
            // A choice that has no room for hard pins gets none while it waits, either. Writers may
            // have taken the room.
            NextSegment::Choosing(choice) if choice.awaits_writes => {
                return entry.segment() == choice.source.segment && choice.pass != Pass::Hard;
            }
            NextSegment::Choosing(choice) => (choice.source.segment, &choice.left),
            NextSegment::CopyingForward(copying) => (copying.source.segment, &copying.left),
            NextSegment::Evicting(segment) => return entry.segment() == *segment,
            _ => return false,
        };
        entry.segment() == source && !left.contains(&{ entry.number })
    }

    /// Starts to reclaim the oldest segment, if the one just opened for a record of `bytes` is the
    /// last available: no segment is free, and the log has all its segments, or the index has no
    /// room for another one.
    pub(super) fn copy_forward_ahead(&mut self, namespace: &NamespaceId, bytes: u64) {
        let has_all = self.segments.len() >= self.config.segments_max as usize;
        let is_last = self.is_index_full() || (has_all && self.segments.free_segment().is_none());
        if is_last && matches!(self.next_segment, NextSegment::None) && self.can_copy_forward() {
            self.reclaim_oldest(Some((namespace, bytes)));
        }
    }

    /// Reclaims the oldest segment, after copying those of its pages for which the open segment has
    /// room. `next_record` is the record that goes to the open segment first.
    pub(super) fn reclaim_oldest(&mut self, next_record: Option<(&NamespaceId, u64)>) {
        let Some((epoch, segment)) = self.segments.next_to_reclaim() else { return };
        let source = SegmentEpoch { segment, epoch };
        let target = self.segments.open_epoch().map(|(segment, open)| SegmentEpoch { segment, epoch: open.number() });
        let Some(target) = target.filter(|_| self.can_copy_forward()) else { return self.reclaim(segment) };
        self.copy_credit = (self.copy_credit + self.config.copied_bytes_share()).min(self.config.copy_credit_max());
        self.floor_credit = (self.floor_credit + self.config.floor_bytes_share()).min(self.config.floor_credit_max());
        let is_floor_at_risk = self.is_floor_at_risk();
        let choice = ChoiceOfCopies {
            source,
            target,
            awaits_writes: true,
            next: 0,
            pass: self.pass_from(Pass::Hard, is_floor_at_risk),
            is_floor_at_risk,
            floors_may_fill: self.floor_credit >= self.config.segment_bytes,
            leaving: BTreeMap::new(),
            floor_bytes: 0,
            beside: next_record.map(|(namespace, bytes)| (*namespace, bytes)),
            pages: Vec::new(),
            left: BTreeSet::new(),
        };
        self.next_segment = NextSegment::Choosing(choice);
        self.begin_steps();
    }

    /// Keeps these floors from now on, and follows their changes. They do not survive a restart.
    pub fn share_floors(&mut self, floors: Arc<SharedFloors>) {
        self.retention.share_floors(floors);
    }

    /// Bytes of all segments that the log may have now: fewer than configured once the file system
    /// was full.
    fn bytes_max(&self) -> u64 {
        self.config.segment_bytes * u64::from(self.config.segments_max)
    }

    /// The first pass from `pass` on that may find pages.
    fn pass_from(&self, pass: Pass, is_floor_at_risk: bool) -> Pass {
        match pass {
            Pass::Hard if self.retention.pinned_bytes() > 0 => Pass::Hard,
            Pass::Hard | Pass::FloorUnretained | Pass::FloorRetained if is_floor_at_risk => {
                pass.max(Pass::FloorUnretained)
            }
            _ if pass <= Pass::Soft && self.retention.has_pins() => Pass::Soft,
            _ => pass.max(Pass::UsedHigh),
        }
    }

    fn pass_after(&self, choice: &ChoiceOfCopies) -> Option<Pass> {
        let next = match choice.pass {
            Pass::Hard => Pass::FloorUnretained,
            Pass::FloorUnretained => Pass::FloorRetained,
            Pass::FloorRetained => Pass::Soft,
            Pass::Soft => Pass::UsedHigh,
            Pass::UsedHigh => Pass::UsedUsual,
            Pass::UsedUsual => Pass::Used,
            Pass::Used => return None,
        };
        Some(self.pass_from(next, choice.is_floor_at_risk))
    }

    /// Returns `true` if the loss of a segment could bring a namespace below its floor. A namespace
    /// that is alone needs no floor. Costs O(n log n) for n namespaces with a floor.
    fn is_floor_at_risk(&self) -> bool {
        let floors = self.retention.floors();
        self.config.keep_percent > 0
            && floors.count() > 1
            && floors.any(|namespace, floor| {
                let bytes = self.index.namespace_bytes(namespace);
                bytes > 0 && bytes < floor.of(self.bytes_max()).saturating_add(self.config.segment_bytes)
            })
    }

    /// Returns `true` if the namespace of a page would fall below its floor without the page. If
    /// not, counts the page as leaving.
    fn is_needed_for_floor(&self, choice: &mut ChoiceOfCopies, slot: u32) -> bool {
        let entry = self.index.entries.get(slot);
        let namespace = self.index.namespace(entry.namespace);
        let part = self.retention.floors().part_of(self.index.namespace_of(slot));
        let floor = part.of(self.bytes_max());
        let leaving = choice.leaving.entry(entry.namespace).or_default();
        let without = namespace.bytes.checked_sub(*leaving + entry.record_bytes());
        if without.is_some_and(|without| without >= floor) {
            *leaving += entry.record_bytes();
            return false;
        }
        // While the index is full, copies for floors take at most a quarter of it, as hard-pinned
        // pages do. Small pages could otherwise leave no room to writers.
        let pages = self.config.pages_max - pages_reserve(self.config.segment_bytes);
        floor > 0 && (!self.is_index_full() || namespace.pages <= part.of(pages) / 2)
    }

    /// Returns `true` if a record must wait until the pages to copy are chosen.
    ///
    /// Hard-pinned pages, and those for floors, take room before any writer does. The record for
    /// which the segment was opened comes next. Meanwhile other records share the eighth that
    /// copies leave to them: writers could otherwise fill the segment before the choice ends.
    pub(super) fn must_await_choice(&self, namespace: &NamespaceId, bytes: u64) -> bool {
        let NextSegment::Choosing(choice) = &self.next_segment else { return false };
        let end = self.segments.epoch(choice.target.segment).map_or(0, |target| target.end());
        let is_next_record = choice.beside == Some((*namespace, bytes));
        choice.pass <= Pass::FloorRetained || (!is_next_record && end + bytes > self.config.segment_bytes / 8)
    }

    /// Notes that the record for which the open segment was opened has its place, so that copies
    /// need leave no more room for it.
    pub(super) fn next_record_placed(&mut self, namespace: &NamespaceId, bytes: u64) {
        if let NextSegment::Choosing(choice) = &mut self.next_segment
            && choice.beside == Some((*namespace, bytes))
        {
            choice.beside = None;
        }
    }

    /// Begins a choice that waited for writes to its source, if they have ended.
    pub(super) fn choose_if_written(&mut self) {
        if let NextSegment::Choosing(choice) = &self.next_segment
            && choice.awaits_writes
            && self.segments.epoch(choice.source.segment).is_none_or(|epoch| !epoch.has_writes_in_flight())
        {
            self.begin_steps();
        }
    }

    /// Looks at the next `max` pages of the source. Chooses those to copy, and reserves room for
    /// them in the open segment. Then begins to copy, or to evict if nothing was chosen. Returns
    /// `true` if another step has work.
    pub(super) fn choose_copies(&mut self, max: usize) -> bool {
        let NextSegment::Choosing(mut choice) = std::mem::replace(&mut self.next_segment, NextSegment::None) else {
            return false;
        };
        let SegmentEpoch { segment: source, .. } = choice.source;
        let SegmentEpoch { segment: target, .. } = choice.target;
        if choice.awaits_writes {
            if self.segments.epoch(source).is_some_and(|epoch| epoch.has_writes_in_flight()) {
                self.next_segment = NextSegment::Choosing(choice);
                return false;
            }
            choice.awaits_writes = false;
            // Pages may have been soft-pinned meanwhile.
            choice.pass = self.pass_from(choice.pass.min(Pass::Soft), choice.is_floor_at_risk);
        }
        let slots = self.segments.epoch(source).map(|epoch| epoch.slots()).unwrap_or_default();
        let slice: Vec<u32> = slots.iter().skip(choice.next).take(max).copied().collect();
        let is_open = self.segments.is_open(target);
        if !slice.is_empty() && is_open {
            choice.next += slice.len();
            slice.into_iter().for_each(|slot| self.consider_copy(&mut choice, slot));
            self.next_segment = NextSegment::Choosing(choice);
            return true;
        }
        if let Some(pass) = self.pass_after(&choice).filter(|_| is_open) {
            choice = ChoiceOfCopies { next: 0, pass, ..choice };
            self.next_segment = NextSegment::Choosing(choice);
            return true;
        }
        self.charge_filled_target(&choice);
        let ChoiceOfCopies { source, target, pages, left, .. } = choice;
        if pages.is_empty() {
            self.reclaim(source.segment);
            return matches!(self.next_segment, NextSegment::Evicting(_));
        }
        self.next_segment = NextSegment::CopyingForward(CopyForwardState { source, target, left });
        self.intents.push_back(Intent::CopyForward(CopyForward {
            segment: source.segment,
            epoch: source.epoch,
            pages,
        }));
        false
    }

    /// Charges the rest of the target if copies for floors leave no room to the record for which it
    /// was opened. A large record does not fit into the eighth that other copies leave. Without the
    /// charge, such copies could fill one segment after the other for ever.
    fn charge_filled_target(&mut self, choice: &ChoiceOfCopies) {
        let target = choice.target.segment;
        let is_filled = choice.beside.as_ref().is_some_and(|(other, bytes)| !self.segments.fits(target, other, *bytes));
        if choice.floor_bytes > 0 && is_filled {
            let rest = self.config.segment_bytes - choice.floor_bytes;
            self.floor_credit -= rest.min(self.floor_credit);
        }
    }

    /// Reserves room for the copy of a page, if it is worth one: it was used, is pinned, or is
    /// needed for a floor. The module documentation has the precedence and the limits of each kind.
    fn consider_copy(&mut self, choice: &mut ChoiceOfCopies, slot: u32) {
        let entry = self.index.entries.get(slot);
        // A page that was never used is not worth a second write: traffic without readers is
        // written once.
        let pin = self.retention.pin_of(slot);
        let is_used_from =
            |worth: Worth| pin == Pin::None && entry.worth() >= worth && self.index.entries.is_used(slot);
        let is_of_pass = match choice.pass {
            Pass::Hard => pin == Pin::Hard,
            Pass::FloorUnretained => pin == Pin::None && !self.index.entries.is_used(slot),
            Pass::FloorRetained => pin == Pin::Soft || (pin == Pin::None && self.index.entries.is_used(slot)),
            Pass::Soft => pin == Pin::Soft,
            Pass::UsedHigh => is_used_from(Worth::High),
            Pass::UsedUsual => is_used_from(Worth::Usual),
            Pass::Used => is_used_from(Worth::Low),
        };
        // The list names a slot twice if it was reused for another page of the segment.
        if !is_of_pass || entry.segment() != choice.source.segment || choice.left.contains(&{ entry.number }) {
            return;
        }
        let is_for_floor = matches!(choice.pass, Pass::FloorUnretained | Pass::FloorRetained);
        if is_for_floor && !self.is_needed_for_floor(choice, slot) {
            return;
        }
        let segment_bytes = self.config.segment_bytes;
        let bytes = entry.record_bytes();
        let is_pinned = choice.pass == Pass::Hard;
        // A copy frees no entry, so while the index is full few pages are copied.
        if !is_pinned && !is_for_floor && self.is_index_full() {
            return;
        }
        let Some(target) = self.segments.epoch_mut(choice.target.segment) else { return };
        // Leave an eighth of the segment to new records, so that writers make progress. Exempt are
        // hard-pinned pages, which are at most a quarter of the log, and copies for floors, which
        // `floor_credit` bounds.
        let is_over = target.reserved_bytes() + bytes > segment_bytes / 8 * 7 || bytes > self.copy_credit;
        let is_refused = if is_for_floor { bytes > self.floor_credit } else { !is_pinned && is_over };
        if is_refused {
            return;
        }
        let namespace = *self.index.namespace_of(slot);
        let may_fill = is_pinned || (is_for_floor && choice.floors_may_fill);
        let beside = choice.beside.as_ref().filter(|_| !may_fill).map(|(namespace, bytes)| (namespace, *bytes));
        if target.reserve_copy(segment_bytes, &namespace, bytes, beside) {
            choice.pages.push(RecordRef { number: entry.number, slot });
            choice.left.insert(entry.number);
            if is_for_floor {
                self.floor_credit -= bytes;
                choice.floor_bytes += bytes;
            } else {
                // Hard-pinned pages are copied without credit too.
                self.copy_credit -= bytes.min(self.copy_credit);
            }
        }
    }

    /// Plans the copy of a record named by [`Intent::CopyForward`], which has the metadata `meta`.
    /// Returns `None` if another record of the page is current, or the reservation is gone.
    pub fn plan_copy(&mut self, record: RecordRef, meta: &PageMeta) -> Option<PlannedWrite> {
        let RecordRef { number, .. } = record;
        let NextSegment::CopyingForward(copying) = &self.next_segment else { return None };
        if self.stopped || !copying.left.contains(&number) {
            return None;
        }
        let SegmentEpoch { segment, epoch } = copying.target;
        // The number names the record. `meta` was read from the device, so it is compared as well.
        let is_current =
            self.index.entries.find(&meta.id).map(|slot| self.index.entries.get(slot)).is_some_and(|entry| {
                entry.number == number
                    && entry.generation == meta.generation
                    && entry.payload_bytes as usize == meta.payload_bytes()
            });
        if !(is_current || fail_point!("log.copy-forward-after-forget")) || !self.segments.is_open(segment) {
            return None;
        }
        let bytes = record_bytes(meta.payload_bytes()) as u64;
        // `epoch_at_mut` ignores the offset. The reservation yields the real one.
        let target = RecordPlace { segment, epoch, offset: 0 };
        let offset = self.segments.epoch_at_mut(&target)?.allocate_reserved(bytes)?;
        if let NextSegment::CopyingForward(copying) = &mut self.next_segment {
            copying.left.remove(&number);
        }
        self.counts.copied_pages += 1;
        self.unindexed.write_planned(self.index.entries.fingerprint(&meta.id));
        Some(self.planned(RecordPlace { offset, ..target }, RecordBody::Page(meta.clone())))
    }

    /// Reports a [`CopyForward`]: no further copy will be planned. The log evicts the pages left in
    /// the segment.
    pub fn copy_forward_done(&mut self, segment: u32, epoch: u64) {
        let source = SegmentEpoch { segment, epoch };
        let copying = match std::mem::replace(&mut self.next_segment, NextSegment::None) {
            NextSegment::CopyingForward(copying) if copying.source == source => copying,
            other => {
                self.next_segment = other;
                return;
            }
        };
        let SegmentEpoch { segment: target, epoch } = copying.target;
        if let Some(epoch) = self.segments.epoch_at_mut(&RecordPlace { segment: target, epoch, offset: 0 }) {
            epoch.release_reservation(copying.left.len());
        }
        self.reclaim(segment);
    }
}
