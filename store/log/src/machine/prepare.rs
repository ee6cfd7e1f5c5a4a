//! The next segment: a free one, a new one, or the oldest one after its reclaim.
//!
//! Steps of preparing a segment, and what a crash leaves after each of them:
//!
//! 1. If the segment has pages, they leave the index in slices ([`Intent::Reclaim`]). Lookups find
//!    the pages that are left, and may begin to read them. A crash brings all of them back. None
//!    was forgotten without a tombstone, because the index counts as incomplete until step 4.
//! 2. [`Intent::Prepare`] is queued. No page of the segment can be found, and no read or write of
//!    it is in flight. A crash leaves the old epoch. Its pages that come back were never forgotten,
//!    because a tombstone for one of them stands in this segment or in a younger one.
//! 3. The caller writes the header and syncs it, or creates the file. A crash leaves the old epoch,
//!    or the new one without records.
//! 4. [`Log::prepared`]. As in step 3.

use super::copy_forward::{ChoiceOfCopies, CopyForwardState};
use super::*;

/// Prepare a segment for records, and report to [`Log::prepared`].
///
/// If `fresh`, the caller creates the file: fully allocated, with this epoch in its header, durably
/// and atomically. An existing file is replaced. Otherwise the caller writes the header and syncs
/// it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepare {
    pub segment: u32,
    pub epoch: u64,
    /// `true` if there is no file, or one that never held a record. After a crash, the rest of a
    /// torn header in such a file would say nothing about its epoch.
    pub fresh: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrepareOutcome {
    /// The header is durable.
    Ready,
    /// It failed, and the file is durably gone. Another try may succeed.
    Removed,
    /// As [`Removed`](PrepareOutcome::Removed), and the file system reports that it is full.
    Full,
    /// It failed, and the file may still exist with any content.
    Undetermined,
}

/// Pages per [`Log::reclaim_step`]. A step takes a few microseconds, for which writers wait. Tests
/// take single pages, so that other requests come between them.
const SLICE: usize = if cfg!(test) { 1 } else { 8 };
/// Entries of unindexed records that a step visits while the index is full. It must find those
/// whose record is gone, and a visit costs less than an eviction.
const PURGE_SLICE: usize = 8 * SLICE;

#[derive(Debug)]
pub(super) enum NextSegment {
    None,
    /// Pages of the oldest segment are being chosen for copies.
    Choosing(ChoiceOfCopies),
    /// Pages of the oldest segment are being copied to the open one.
    CopyingForward(CopyForwardState),
    /// The pages of this segment leave the index.
    Evicting(u32),
    /// This segment waits for its reads and writes to end.
    Reclaiming(u32),
    Preparing,
    /// This segment is ready, but the index is full. Entries of records that are gone leave it.
    Purging(u32),
    Ready(u32),
    /// It could not be prepared. The next writer without room tries again, and gets the error if
    /// that fails too.
    Failed,
}

impl Log {
    pub(super) fn open_next(&mut self) -> bool {
        let NextSegment::Ready(segment) = self.next_segment else { return false };
        self.next_segment = NextSegment::None;
        self.segments.open_prepared(segment)
    }

    /// Starts on the next segment before the open one is full, so that writers need not wait for
    /// it.
    pub(super) fn prepare_ahead(&mut self) {
        if !matches!(self.next_segment, NextSegment::None | NextSegment::Failed) {
            return;
        }
        let needed = match self.segments.open_epoch() {
            None => true,
            Some(_) if matches!(self.next_segment, NextSegment::Failed) => false,
            // In a log of few segments, an early reclaim would cost too large a share of the pages.
            Some((_, open)) => {
                let segment_bytes = self.config.segment_bytes;
                self.config.segments_max > 3 && open.free_bytes(segment_bytes) < segment_bytes / 4
            }
        };
        if needed {
            self.choose_next();
        }
    }

    fn choose_next(&mut self) {
        // An unused segment does not help if the index has no room for its pages.
        if self.must_reclaim_for_index() {
            return self.reclaim_oldest(None);
        }
        if let Some(segment) = self.segments.free_segment() {
            return self.prepare(segment, true);
        }
        let excess = usize::from(fail_point!("log.one-segment-over-capacity"));
        if self.segments.len() < self.config.segments_max as usize + excess
            && let Some(segment) = self.segments.unused_number()
        {
            return self.prepare(segment, true);
        }
        self.reclaim_oldest(None);
    }

    /// Evicts all pages of the oldest segment, slice by slice, and prepares it when it is idle.
    pub(super) fn reclaim(&mut self, oldest: u32) {
        // Until the new header is durable, a crash would bring the pages back. So all of them count
        // as unindexed.
        if let Some(epoch) = self.segments.epoch(oldest) {
            self.unindexed.mark_incomplete_up_to(epoch.number());
        }
        self.segments.begin_reclaim(oldest);
        self.next_segment = NextSegment::Evicting(oldest);
        self.begin_steps();
    }

    /// Takes the first step of a reclaim at once, and queues the rest.
    pub(super) fn begin_steps(&mut self) {
        if self.reclaim_step() {
            self.intents.push_back(Intent::Reclaim);
        }
    }

    /// Does a bounded part of the work to reclaim a segment: it chooses pages to copy, evicts
    /// pages, or removes entries of records that are gone. Returns `true` if there is more to do,
    /// after the caller let others use the log.
    pub fn reclaim_step(&mut self) -> bool {
        self.unindexed.purge(if self.is_index_full() { PURGE_SLICE } else { SLICE });
        match self.next_segment {
            NextSegment::Choosing(_) => self.choose_copies(SLICE),
            NextSegment::Evicting(segment) => self.evict_slice(segment),
            NextSegment::Purging(segment) => self.check_room_in_index(segment),
            _ => false,
        }
    }

    fn evict_slice(&mut self, segment: u32) -> bool {
        let Some(epoch) = self.segments.epoch_mut(segment) else { return false };
        for slot in epoch.take_slots(SLICE) {
            if self.index.entries.get(slot).segment() == segment {
                // After a crash, a page may have an unverified copy in a younger segment.
                if !self.fall_back(slot) {
                    self.counts.evicted_pages += 1;
                    let entry = self.remove_page(slot);
                    self.index.entries.departed.record(entry.fingerprint);
                }
            } else {
                self.index.drop_fallback_in(slot, segment);
            }
        }
        let is_empty = self.segments.epoch(segment).is_none_or(|epoch| epoch.slots().is_empty());
        if is_empty {
            self.next_segment = NextSegment::Reclaiming(segment);
            self.reclaim_if_idle();
        }
        !is_empty
    }

    /// Continues a reclaim that waited for reads or writes of its segment, if they have ended.
    pub(super) fn reclaim_if_idle(&mut self) {
        self.choose_if_written();
        if let NextSegment::Reclaiming(segment) = self.next_segment
            && let Some(fresh) = self.segments.end_reclaim(segment)
        {
            self.prepare(segment, fresh);
        }
    }

    fn prepare(&mut self, segment: u32, fresh: bool) {
        let epoch = self.segments.begin_prepare(segment);
        self.next_segment = NextSegment::Preparing;
        self.intents.push_back(Intent::Prepare(Prepare { segment, epoch, fresh }));
    }

    /// Reports a [`Prepare`]. If the state of the file is undetermined, the log takes no more
    /// writes until the node restarts.
    pub fn prepared(&mut self, prepare: &Prepare, outcome: PrepareOutcome) {
        let Prepare { segment, epoch, fresh } = *prepare;
        self.next_segment = NextSegment::None;
        match outcome {
            PrepareOutcome::Ready => {
                self.counts.segments_prepared += 1;
                self.segments.prepared(segment, epoch);
                self.next_segment = NextSegment::Ready(segment);
            }
            PrepareOutcome::Removed | PrepareOutcome::Full => {
                self.segments.remove(segment);
                self.next_segment = NextSegment::Failed;
                // The file system has no room for another file: continue with the existing
                // segments.
                if outcome == PrepareOutcome::Full && fresh && self.segments.len() > 0 {
                    self.config.segments_max = self.segments.len() as u32;
                    self.next_segment = NextSegment::None;
                }
            }
            // The old records may still be on the device, so their tombstones must not be
            // reclaimed.
            PrepareOutcome::Undetermined => {
                self.stopped = true;
                return;
            }
        }
        // The records of all older epochs are gone from the device now.
        let oldest = self.segments.oldest_epoch().unwrap_or(epoch);
        self.unindexed.reclaimed_up_to(oldest - 1);
        if let NextSegment::Ready(segment) = self.next_segment
            && self.check_room_in_index(segment)
        {
            self.begin_steps();
        }
    }

    /// Lets writers open a segment that is ready, if the index has room for its pages. Otherwise
    /// entries of records that are gone leave the index first, and then another segment is
    /// reclaimed. Returns `true` if another step has work.
    fn check_room_in_index(&mut self, segment: u32) -> bool {
        self.next_segment = NextSegment::Ready(segment);
        if !self.must_reclaim_for_index() {
            return false;
        }
        if self.unindexed.may_have_gone_records() {
            self.next_segment = NextSegment::Purging(segment);
            return true;
        }
        // The reclaimed segment had fewer pages than the next one can bring. Reclaim another.
        self.segments.add_free(segment);
        self.next_segment = NextSegment::None;
        self.choose_next();
        false
    }

    /// Returns `true` if another segment can bring more pages than the index has room for, and the
    /// pages of an older one can leave.
    fn must_reclaim_for_index(&self) -> bool {
        self.is_index_overfull() && self.segments.next_to_reclaim().is_some()
    }
}
