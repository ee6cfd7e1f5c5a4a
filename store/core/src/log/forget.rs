//! Forgetting pages for good.
//!
//! Always true: a page of which a record may be on the device, and which was not forgotten durably, is known to the
//! index, to a write under way, or as a doubt, or some segment could not be read to its end. So forgetting a page of which
//! none of them knows needs no tombstone.

use super::{AppendError, Log, PlannedWrite};
use crate::planted::{Bug, has};
use larder_format::PageId;
use larder_format::disk::{BLOCK_BYTES, RecordBody};
use std::collections::BTreeMap;

/// Answer of [`Log::forget`].
#[derive(Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "it is moved once")]
pub enum Forget {
    /// No record of it is on the device.
    NotThere,
    /// It cannot be found any more. Once this tombstone is written and synced, call [`Log::forgotten`]; only then will it
    /// stay forgotten after a crash.
    Write {
        /// The tombstone.
        tombstone: PlannedWrite,
        /// Whether the page could be found until now.
        was_found: bool,
    },
    /// No segment has room for a tombstone, or the log is being restored, and nothing changed; try again after the next
    /// [`Log::prepared`], [`Log::cleaned`] or [`Log::restored`].
    Wait,
}

/// Pages whose records on the device the index does not know.
#[derive(Debug, Default)]
pub(super) struct Forgetting {
    /// Pages with writes under way.
    pending: BTreeMap<PageId, Pending>,
    /// Pages with records that may be on the device though they are not served.
    doubts: BTreeMap<PageId, Doubt>,
    /// Segments up to this life may hold records that nobody knows of: not all of them could be read. 0: none.
    blind: u64,
}

#[derive(Debug, Default)]
struct Pending {
    writes: u32,
    /// Records with smaller numbers were forgotten while they were written.
    killed_below: u64,
}

#[derive(Debug, Clone, Copy)]
struct Doubt {
    /// Records with smaller numbers are in doubt.
    below: u64,
    /// They are in segments of at most this life.
    life: u64,
}

impl Forgetting {
    pub(super) fn page_planned(&mut self, id: &PageId) {
        self.pending.entry(*id).or_default().writes += 1;
    }

    /// Whether the page was forgotten since its record `number` was planned.
    pub(super) fn page_done(&mut self, id: &PageId, number: u64) -> bool {
        let Some(pending) = self.pending.get_mut(id) else { return false };
        pending.writes = pending.writes.saturating_sub(1);
        let killed = number < pending.killed_below;
        if pending.writes == 0 {
            self.pending.remove(id);
        }
        killed
    }

    pub(super) fn doubt(&mut self, id: PageId, below: u64, life: u64) {
        let doubt = self.doubts.entry(id).or_insert(Doubt { below, life });
        *doubt = Doubt { below: doubt.below.max(below), life: doubt.life.max(life) };
    }

    /// Segments up to `life` are gone, and what was in doubt in them.
    pub(super) fn reclaimed(&mut self, life: u64) {
        self.doubts.retain(|_, doubt| doubt.life > life);
        if self.blind <= life {
            self.blind = 0;
        }
    }

    /// A segment of this life could not be read to its end: it may hold records of any page.
    pub(super) fn blind_up_to(&mut self, life: u64) {
        self.blind = self.blind.max(life);
    }

    /// Whether a record of a page that the index does not know may be on the device.
    fn may_be_there(&self, id: &PageId) -> bool {
        self.blind > 0 && !has(Bug::BlindForgets) || self.pending.contains_key(id) || self.doubts.contains_key(id)
    }
}

impl Log {
    /// There may be records on the device that nobody knows of: until everything that is there now was reclaimed, forgetting
    /// always writes a tombstone.
    pub fn distrust_index(&mut self) {
        self.forgetting.blind_up_to(self.next_life.saturating_sub(1));
    }

    /// Forgets a page: it cannot be found from now on, not even if a put of it is under way. A later put counts again.
    pub fn forget(&mut self, id: &PageId) -> Result<Forget, AppendError> {
        let found = self.index.find(id).is_some();
        // What is not yet restored may be of this page.
        if self.restoring.is_some() {
            return if self.stopped { Err(AppendError::Stopped) } else { Ok(Forget::Wait) };
        }
        if !found && !self.forgetting.may_be_there(id) {
            return Ok(Forget::NotThere);
        }
        if has(Bug::DropTombstone) {
            self.index.find(id).map(|slot| self.take_out(slot));
            return Ok(Forget::NotThere);
        }
        let Some(tombstone) = self.plan(RecordBody::Tombstone(*id), &id.namespace, BLOCK_BYTES as u64)? else {
            return Ok(Forget::Wait);
        };
        let (number, life) = (tombstone.header.number, tombstone.header.place.life);
        // Making room may have evicted the page meanwhile.
        let slot = self.index.find(id);
        slot.map(|slot| self.take_out(slot));
        let was_found = slot.is_some();
        if let Some(pending) = self.forgetting.pending.get_mut(id) {
            pending.killed_below = if has(Bug::ForgetMissesWrite) { 0 } else { number };
        }
        self.forgetting.doubt(*id, number, life);
        Ok(Forget::Write { tombstone, was_found })
    }

    /// The tombstone `number` of a page is durable.
    pub fn forgotten(&mut self, id: &PageId, number: u64) {
        let doubts = &mut self.forgetting.doubts;
        if doubts.get(id).is_some_and(|doubt| doubt.below <= number) {
            doubts.remove(id);
        }
    }
}
