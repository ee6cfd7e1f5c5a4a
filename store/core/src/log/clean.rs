//! Copying what will be asked for again out of the segment that is reclaimed next.
//!
//! Always true: what is copied is the record that would be found, under a new and larger number, in a younger segment;
//! so a tombstone that is planned later counts against the copy as against the original. Room for
//! the copies is reserved in the open segment before anybody is told, so cleaning never waits for room; writers may
//! have to wait for cleaning.
//!
//! When: as soon as a segment is opened behind which no other is free or can be made, the oldest is taken, so that
//! another is ready when the open one is full. The record that the segment was opened for goes first, but for pinned
//! pages: these fit by themselves, as they came from one segment, and are a quarter of the log at most, so that the
//! next segments have room again.
//!
//! Steps of cleaning, and what a crash, a failure or somebody else may do between them:
//! 1. Pages are chosen, room is reserved, [`Intent::Clean`]: nothing changed. The pages are found where they were.
//! 2. For each of them, [`Log::hold`], a read, [`Log::end_read`]. What is damaged is dropped as ever. If the page was
//!    forgotten, put anew or dropped meanwhile, step 3 says so.
//! 3. [`Log::copy`] plans the copy, [`Log::write_done`] makes it the one that is found. Reads of the original hold its
//!    segment as before. A put that was planned before the copy and is written after it comes too late: the first
//!    complete writer wins, as the copy has its page. A forgetting kills the copy by its number. A crash leaves the original, or
//!    both; the copy counts, and if it is torn, the original is found again as long as its segment is there. If the copy
//!    fails, the original is still found.
//! 4. A sync of the copies' segment: now a crash leaves the copies.
//! 5. [`Log::cleaned`]: what was not copied is evicted, the segment is reclaimed when idle, and written anew. If the
//!    sync failed, or copies are still being written, they may be lost, which is a miss.
//!
//! If the open segment fails meanwhile, the reservation goes with it: there are no further copies, and their pages are lost.
//! A log that is opened full, or whose open segment failed, has nowhere to copy to, and reclaims its oldest segment as
//! it is; so do logs of few segments, where half a segment is too much to give up for it. When another segment could not
//! be made, no more is copied than the open one still takes.

use super::*;
use crate::planted::{Bug, has};

/// Fewer segments than this are too few to copy anything.
const SEGMENTS_MIN: u32 = 4;

/// Read each of these pages (with [`Log::hold`]), verify it, and write it again with [`Log::copy`]. Then sync the segments
/// of the copies and report to [`Log::cleaned`], whatever came of all that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clean {
    /// The segment that is reclaimed next.
    pub segment: u32,
    /// Its life.
    pub life: u64,
    /// The pages to copy, with the numbers of their records; pinned ones first, then as they stand.
    pub pages: Vec<(PageId, u64)>,
}

/// A cleaning under way.
#[derive(Debug)]
pub(super) struct Cleaning {
    pub(super) segment: u32,
    life: u64,
    into: u32,
    into_life: u64,
    /// Not yet copied.
    left: BTreeMap<PageId, u64>,
}

impl Log {
    pub(super) fn can_rescue(&self) -> bool {
        self.config.segments_max >= SEGMENTS_MIN
    }

    pub(super) fn is_cleaned_into(&self, open: u32) -> bool {
        matches!(&self.spare, Spare::Cleaning(cleaning) if cleaning.into == open)
    }

    /// Whether the page's segment is being cleaned, and the page is not among those to be copied.
    pub(super) fn is_left_behind(&self, slot: u32) -> bool {
        let Spare::Cleaning(cleaning) = &self.spare else { return false };
        let (id, stored) = (self.index.id_of(slot), self.index.get(slot));
        stored.segment == cleaning.segment && cleaning.left.get(&id) != Some(&stored.number)
    }

    /// Begins with the oldest segment if the one just opened, for a record of `bytes`, is the last that there is.
    pub(super) fn clean_ahead(&mut self, namespace: &NamespaceId, bytes: u64) {
        let none_left = self.free_segment().is_none() && self.segments.len() >= self.config.segments_max as usize;
        if matches!(self.spare, Spare::None) && self.can_rescue() && none_left {
            self.take_oldest(Some((namespace, bytes)));
        }
    }

    /// Takes the oldest segment, and no other: see the module's third rule. Its pages go, or are copied before if the
    /// open segment has room, beside a record that is to come.
    pub(super) fn take_oldest(&mut self, to_come: Option<(&NamespaceId, u64)>) {
        let mut lives = self.by_life.iter().filter(|(_, segment)| self.open != Some(**segment));
        let first = if has(Bug::ReclaimYoungest) { lives.next_back() } else { self.by_life.first_key_value() };
        let Some((&life, &oldest)) = first else { return };
        if self.open == Some(oldest) {
            return;
        }
        let pages = if self.can_rescue() { self.reserve(oldest, to_come) } else { Vec::new() };
        let Some((into, into_life)) =
            self.open_life().map(|open| (open.0, open.1.number)).filter(|_| !pages.is_empty())
        else {
            return self.give_up(oldest);
        };
        let left = pages.iter().copied().collect();
        self.spare = Spare::Cleaning(Cleaning { segment: oldest, life, into, into_life, left });
        self.intents.push_back(Intent::Clean(Clean { segment: oldest, life, pages }));
    }

    fn open_life(&self) -> Option<(u32, &Life)> {
        let open = self.open?;
        Some((open, self.segments.get(&open)?.life()?))
    }

    /// Chooses what is copied, and keeps room for it in the open segment.
    fn reserve(&mut self, oldest: u32, to_come: Option<(&NamespaceId, u64)>) -> Vec<(PageId, u64)> {
        let Some((open, life)) = self.open_life() else { return Vec::new() };
        let segment_bytes = self.config.segment_bytes;
        let mut slots = self.pages_behind(oldest, 0);
        // What nobody ever asked for is not worth writing twice.
        slots.retain(|&slot| {
            let stored = self.index.get(slot);
            stored.keeper != index::NONE && (stored.is_used() || self.keeper.pin_of(slot) != Pin::None)
        });
        slots.sort_by_key(|&slot| self.keeper.pin_of(slot) != Pin::Hard);
        let (mut room, mut reserved, mut pages) = (life.footer_room.clone(), 0, Vec::new());
        for slot in slots {
            let (id, stored) = (self.index.id_of(slot), self.index.get(slot));
            let (bytes, pinned) = (stored.record_bytes(), self.keeper.pin_of(slot) == Pin::Hard);
            let mut with = room.clone();
            with.add(&id.namespace);
            let (footer, beside) = match to_come.filter(|_| !pinned) {
                Some((namespace, beside)) => (with.bytes_with(namespace), beside),
                None => (with.bytes(), 0),
            };
            let fits = life.end + reserved + bytes + beside + footer <= segment_bytes;
            if fits && (pinned || reserved + bytes <= segment_bytes / 8 * 7) {
                reserved += bytes;
                room = with;
                pages.push((id, stored.number));
            }
        }
        if let Some(life) = self.segments.get_mut(&open).and_then(Segment::life_mut) {
            life.footer_room = room;
            life.reserved_bytes = reserved;
        }
        pages
    }

    /// Plans the copy of a page that [`Intent::Clean`] named: `meta` is what its record `number` says. `None` if that
    /// record is not the one that would be found, or the room is not there any more.
    pub fn copy(&mut self, id: &PageId, number: u64, meta: &PageMeta) -> Option<PlannedWrite> {
        let Spare::Cleaning(cleaning) = &mut self.spare else { return None };
        if self.stopped || cleaning.left.get(id) != Some(&number) || meta.id != *id {
            return None;
        }
        let (into, into_life) = (cleaning.into, cleaning.into_life);
        let is_it = self.index.find(id).map(|slot| self.index.get(slot)).is_some_and(|stored| {
            stored.number == number
                && stored.generation == meta.generation
                && stored.payload_bytes as usize == meta.payload_bytes()
        });
        if !(is_it || has(Bug::CopyAfterForget)) || self.open != Some(into) {
            return None;
        }
        let bytes = record_bytes(meta.payload_bytes()) as u64;
        let place = RecordPlace { segment: into, life: into_life, offset: 0 };
        let life = self.life_of(&place).filter(|life| life.reserved_bytes >= bytes)?;
        life.reserved_bytes -= bytes;
        let place = RecordPlace { offset: life.take(bytes), ..place };
        if let Spare::Cleaning(cleaning) = &mut self.spare {
            cleaning.left.remove(id);
        }
        self.counts.rescued_pages += 1;
        self.forgetting.page_planned(id);
        Some(self.planned(place, RecordBody::Page(meta.clone())))
    }

    /// Reports a [`Clean`]: all copies that there will be are written and, if the device can, durable. Whatever else the
    /// segment has is evicted.
    pub fn cleaned(&mut self, segment: u32, life: u64) {
        let cleaning = match std::mem::replace(&mut self.spare, Spare::None) {
            Spare::Cleaning(cleaning) if cleaning.segment == segment && cleaning.life == life => cleaning,
            other => {
                self.spare = other;
                return;
            }
        };
        let Cleaning { into, into_life, left, .. } = cleaning;
        if let Some(life) = self.life_of(&RecordPlace { segment: into, life: into_life, offset: 0 }) {
            life.reserved_bytes = 0;
            left.iter().for_each(|_| life.footer_room.give_back());
        }
        self.give_up(segment);
    }
}
