//! Getting the next segment: a free one, a new one, or the oldest one.

use super::{Intent, Log};
use crate::log::segment::{Life, Segment};

/// Make a segment ready for records. If it is `fresh`, make the file and preallocate it; write the header with this
/// life; make all of that durable. Then report to [`Log::prepared`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepare {
    /// The segment's number.
    pub segment: u32,
    /// Its life.
    pub life: u64,
    /// Whether there is no such file yet.
    pub fresh: bool,
}

/// What came of preparing a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrepareOutcome {
    /// The header is durable.
    Ready,
    /// It failed, and the segment's file is durably gone.
    Removed,
    /// It failed, and the file may still be there with anything in it.
    Stuck,
}

/// The segment that is opened next.
#[derive(Debug)]
pub(super) enum Spare {
    None,
    /// Waits for reads and writes to end.
    Reclaiming(u32),
    Preparing,
    Ready(u32),
}

impl Log {
    /// Opens the segment that is ready, if one is.
    pub(super) fn open_spare(&mut self) {
        let Spare::Ready(number) = self.spare else { return };
        self.spare = Spare::None;
        let Some(segment) = self.segments.get_mut(&number) else { return };
        if let Segment::Ready(life) = *segment {
            *segment = Segment::Open(Life::new(life));
            self.by_life.insert(life, number);
            self.open = Some(number);
        }
    }

    /// Gets a segment ready before the open one is full, so that writers need not wait for it.
    pub(super) fn prepare_ahead(&mut self) {
        if !matches!(self.spare, Spare::None) {
            return;
        }
        let needed = match self.open.and_then(|open| self.segments.get(&open)) {
            None => true,
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
        let free =
            self.segments.iter().find(|(_, segment)| matches!(segment, Segment::Free)).map(|(&number, _)| number);
        if let Some(number) = free {
            return self.prepare(number, false);
        }
        if self.segments.len() < self.config.segments_max as usize {
            let number = (0..).find(|number| !self.segments.contains_key(number)).unwrap_or(u32::MAX);
            return self.prepare(number, true);
        }
        // The oldest, and no other: see the module's third rule.
        let Some((_, &oldest)) = self.by_life.first_key_value() else { return };
        if self.open == Some(oldest) {
            return;
        }
        self.evict(oldest);
        self.spare = Spare::Reclaiming(oldest);
        self.reclaim_when_idle();
    }

    /// None of the segment's pages can be found any more.
    fn evict(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(&number) else { return };
        segment.reclaim();
        let Some(life) = segment.life_mut() else { return };
        let number = life.number;
        for (id, record) in std::mem::take(&mut life.pages) {
            if self.index.remove_if(&id, record).is_some() {
                self.counts.evicted_pages += 1;
                // Until the segment has its new header, a crash would bring the page back.
                self.forgetting.doubt(id, record + 1, number);
            }
        }
    }

    /// Prepares the segment that is being reclaimed, once nothing of it is under way.
    pub(super) fn reclaim_when_idle(&mut self) {
        let Spare::Reclaiming(number) = self.spare else { return };
        let Some(life) = self.segments.get(&number).and_then(Segment::life) else { return };
        if !life.is_idle() {
            return;
        }
        let life = life.number;
        self.by_life.remove(&life);
        self.prepare(number, false);
    }

    fn prepare(&mut self, segment: u32, fresh: bool) {
        let life = self.next_life;
        self.next_life += 1;
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
            PrepareOutcome::Removed => {
                self.segments.remove(&segment);
                // The device has no room for another: go on with those that there are.
                if fresh && !self.segments.is_empty() {
                    self.config.segments_max = self.segments.len() as u32;
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
