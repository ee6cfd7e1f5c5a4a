//! Getting the next segment: a free one, a new one, or the oldest one.

use super::clean::Cleaning;
use super::{Intent, Log};
use crate::log::segment::{Life, Segment};
use crate::planted::{Bug, has};

/// Make a segment ready for records, and report to [`Log::prepared`]. If it is `fresh`, make the file anew, allocated and with
/// this life in its header, durably and whole or not at all; nothing in one that is there counts any more. Otherwise
/// write the header with this life, and make it durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepare {
    /// The segment's number.
    pub segment: u32,
    /// Its life.
    pub life: u64,
    /// Whether there is no such file yet, or none that ever had a record: what is left of a header that a crash tore in it
    /// would say nothing.
    pub fresh: bool,
}

/// What came of preparing a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrepareOutcome {
    /// The header is durable.
    Ready,
    /// It failed, and the segment's file is durably gone. Another try may succeed.
    Removed,
    /// The same, and the device says that it has no room.
    Full,
    /// It failed, and the file may still be there with anything in it.
    Stuck,
}

/// The segment that is opened next.
#[derive(Debug)]
pub(super) enum Spare {
    None,
    /// Pages of it are being copied.
    Cleaning(Cleaning),
    /// Waits for reads and writes to end.
    Reclaiming(u32),
    Preparing,
    Ready(u32),
    /// It could not be made. The next try waits until somebody has no room without it, and hears of it if that fails too.
    Failed,
}

impl Log {
    /// Opens the segment that is ready; whether one is.
    pub(super) fn open_spare(&mut self) -> bool {
        let Spare::Ready(number) = self.spare else { return false };
        self.spare = Spare::None;
        let Some(segment) = self.segments.get_mut(&number) else { return false };
        let Segment::Ready(life) = *segment else { return false };
        *segment = Segment::Open(Life::new(life));
        self.by_life.insert(life, number);
        self.open = Some(number);
        true
    }

    /// Gets a segment ready before the open one is full, so that writers need not wait for it.
    pub(super) fn prepare_ahead(&mut self) {
        if !matches!(self.spare, Spare::None | Spare::Failed) {
            return;
        }
        let needed = match self.open.and_then(|open| self.segments.get(&open)) {
            None => true,
            Some(_) if matches!(self.spare, Spare::Failed) => false,
            // With very few segments, giving one up early would cost too much of what is kept.
            Some(open) => {
                self.config.segments_max > 3 && open.room(self.config.segment_bytes) < self.config.segment_bytes / 4
            }
        };
        if needed {
            self.choose_spare();
        }
    }

    fn choose_spare(&mut self) {
        if let Some(number) = self.free_segment() {
            return self.prepare(number, true);
        }
        // The smallest number that is free: a start tells by the numbers where a segment may have been.
        if self.segments.len() < self.config.segments_max as usize + usize::from(has(Bug::OverCapacity))
            && let Some(number) = (0..).find(|number| !self.segments.contains_key(number))
        {
            return self.prepare(number, true);
        }
        self.take_oldest(None);
    }

    pub(super) fn free_segment(&self) -> Option<u32> {
        self.segments.iter().find(|(_, segment)| matches!(segment, Segment::Free)).map(|(&number, _)| number)
    }

    /// The oldest segment is reclaimed, with all that is in it.
    pub(super) fn give_up(&mut self, oldest: u32) {
        self.evict(oldest);
        self.spare = Spare::Reclaiming(oldest);
        self.reclaim_when_idle();
    }

    /// None of the segment's pages can be found any more.
    fn evict(&mut self, number: u32) {
        let slots = self.pages_behind(number, 0);
        self.counts.evicted_pages += slots.len() as u64;
        // Until the segment has its new header, a crash would bring them back.
        slots.into_iter().for_each(|slot| self.drop_page(slot));
        self.originals.retain(|_, original| original.segment != number);
        let Some(segment) = self.segments.get_mut(&number) else { return };
        segment.reclaim();
        if let Some(life) = segment.life_mut() {
            life.slots = Vec::new();
            life.renounce_footer();
        }
    }

    /// Prepares the segment that is being reclaimed, once nothing of it is under way.
    pub(super) fn reclaim_when_idle(&mut self) {
        let Spare::Reclaiming(number) = self.spare else { return };
        let Some(life) = self.segments.get(&number).and_then(Segment::life) else { return };
        if !life.is_idle() {
            return;
        }
        let (life, fresh) = (life.number, life.completed == 0);
        self.by_life.remove(&life);
        self.prepare(number, fresh);
    }

    fn prepare(&mut self, segment: u32, fresh: bool) {
        let life = self.next_life;
        self.next_life += u64::from(!has(Bug::LifeUsedTwice));
        self.segments.insert(segment, Segment::Preparing);
        self.spare = Spare::Preparing;
        self.intents.push_back(Intent::Prepare(Prepare { segment, life, fresh }));
    }

    /// Reports a [`Prepare`].
    pub fn prepared(&mut self, prepare: &Prepare, outcome: PrepareOutcome) {
        let Prepare { segment, life, fresh } = *prepare;
        self.spare = Spare::None;
        match outcome {
            PrepareOutcome::Ready => {
                self.counts.segments_prepared += 1;
                self.segments.insert(segment, Segment::Ready(life));
                self.spare = Spare::Ready(segment);
            }
            PrepareOutcome::Removed | PrepareOutcome::Full => {
                self.segments.remove(&segment);
                self.spare = Spare::Failed;
                // There is no room for another: go on with those that there are.
                if outcome == PrepareOutcome::Full && fresh && !self.segments.is_empty() {
                    self.config.segments_max = self.segments.len() as u32;
                    self.spare = Spare::None;
                }
            }
            PrepareOutcome::Stuck => self.stopped = true,
        }
        if outcome != PrepareOutcome::Stuck {
            // What was in older segments is gone for good now.
            let oldest = self.by_life.first_key_value().map_or(life, |(&oldest, _)| oldest);
            self.forgetting.reclaimed(oldest - 1);
        }
    }
}
