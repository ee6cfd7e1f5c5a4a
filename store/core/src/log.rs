//! The segment log of one device.
//!
//! Always true:
//! 1. A page is found only after its write completed, and never after it was forgotten.
//! 2. At most one segment is open, records are numbered in the order in which they are planned, and segments open in the
//!    order of their lives; so numbers and lives grow together.
//! 3. Segments are reclaimed oldest life first, none while a read or write of it is under way. So a tombstone, which is
//!    younger than what it kills, is there as long as that is.
//! 4. A segment's first record is planned only after its header, with a life never used before, is durable.
//! 5. There are never more segments than the capacity allows.
//!
//! Steps of a write, and what a crash leaves behind each of them:
//! 1. [`Log::append`] plans place and number: nothing is on the device.
//! 2. The device writes header and payload: a hole, a torn record, a header without its payload (found at reading by the
//!    payload's checksums), or a whole record, whatever became of its neighbours.
//! 3. [`Log::write_done`] makes the page visible: as in 2 until the segment was synced.
//! 4. [`Log::sync_plan`], a sync of the device, [`Log::sync_done`]: the record is found again.
//!
//! Steps of preparing a segment: [`Intent::Prepare`] comes when no read or write of the segment is under way and none of
//! its pages can be found; then header written, header synced, [`Log::prepared`]. A crash leaves the old life or the new
//! one without records; the pages of the old life that come back were not forgotten, by 3.

use larder_format::disk::{BLOCK_BYTES, RecordBody, RecordHeader, RecordPlace, record_bytes};
use larder_format::{PageId, PageKey, PageMeta};
use std::collections::{BTreeMap, VecDeque};
use thiserror::Error;

mod forget;
mod index;
mod prepare;
mod recover;
mod scan;
mod segment;
#[cfg(test)]
mod tests;

pub use forget::Forget;
pub use prepare::{Prepare, PrepareOutcome};
pub use recover::{Recovered, recover};
pub use scan::{FoundRecord, ScanRead, ScannedSegment, SegmentScan};

use index::Index;
use prepare::Spare;
use segment::{Life, Segment};

/// Size and limits of a log.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// Bytes of every segment.
    pub segment_bytes: u64,
    /// Most segments.
    pub segments_max: u32,
    /// Seeds the hash of the index, so that a stranger cannot choose keys that collide.
    pub hash_seed: u64,
}

/// What the index knows of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Where its record stands.
    pub place: RecordPlace,
    /// The record's number.
    pub number: u64,
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// Number of the put.
    pub generation: u64,
    /// Place in its sequence, in pages.
    pub position: u32,
    /// The page before it.
    pub parent: PageKey,
}

impl Entry {
    fn of(place: RecordPlace, number: u64, meta: &PageMeta) -> Entry {
        let payload_bytes = meta.payload_bytes() as u32;
        Entry {
            place,
            number,
            payload_bytes,
            generation: meta.generation,
            position: meta.position,
            parent: meta.parent,
        }
    }
}

/// A record to be written: its header block at `header.place`, and a page's payload behind it. Goes back into
/// [`Log::write_done`] exactly once; until then its segment is not reclaimed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a planned write must be reported, or its segment is never reclaimed"]
pub struct PlannedWrite {
    /// What to write and where.
    pub header: RecordHeader,
}

/// What came of a planned write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The device has all of it.
    Written,
    /// The device reported an error: any part of it may be there.
    Failed,
    /// It was never handed to the device.
    NotSent,
}

/// Answer of [`Log::append`].
#[derive(Debug, PartialEq, Eq)]
pub enum Append {
    /// Write this.
    Write(PlannedWrite),
    /// This very put is in the log already.
    AlreadyThere,
    /// No segment has room; try again after the next [`Log::prepared`].
    Wait,
}

/// Why a record cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AppendError {
    /// It is larger than a segment.
    #[error("a record of {bytes} bytes does not fit into a segment, which takes {max}")]
    TooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Most bytes of a record.
        max: u64,
    },
    /// A segment could neither be written anew nor removed; going on could bring forgotten pages back.
    #[error("the log takes no more writes: a segment could neither be written nor removed")]
    Stopped,
}

/// Something to be done on the device, that nobody in particular waits for.
#[derive(Debug, PartialEq, Eq)]
pub enum Intent {
    /// Make a segment ready, then call [`Log::prepared`].
    Prepare(Prepare),
    /// Write this record, then call [`Log::write_done`].
    Write(PlannedWrite),
}

/// A hold on a record while it is read. Goes back into [`Log::end_read`] exactly once; until then its segment is not
/// reclaimed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a read must be ended, or its segment is never reclaimed"]
pub struct ReadTicket {
    /// The page.
    pub id: PageId,
    /// What the index knows of it.
    pub entry: Entry,
}

/// A sync to be done of one segment. Goes back into [`Log::sync_done`].
#[derive(Debug, PartialEq, Eq)]
pub struct SyncTicket {
    /// The segment's number.
    pub segment: u32,
    life: u64,
    completed: u64,
}

/// How full the log is, and what happened to pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogCounts {
    /// Pages that can be found.
    pub pages: u64,
    /// Bytes of their records.
    pub page_bytes: u64,
    /// Segments that exist.
    pub segments: u64,
    /// Most segments.
    pub segments_max: u64,
    /// Segments that hold records.
    pub segments_used: u64,
    /// Pages that went with their segment.
    pub evicted_pages: u64,
    /// Segments that were written anew or made.
    pub segments_prepared: u64,
    /// Segments that take no more records since a write or sync of them failed.
    pub segments_abandoned: u64,
}

/// The log: which record stands where, and what happens next.
#[derive(Debug)]
pub struct Log {
    config: LogConfig,
    segments: BTreeMap<u32, Segment>,
    /// Segments that hold records, by life.
    by_life: BTreeMap<u64, u32>,
    open: Option<u32>,
    spare: Spare,
    next_life: u64,
    next_number: u64,
    index: Index,
    forgetting: forget::Forgetting,
    intents: VecDeque<Intent>,
    stopped: bool,
    counts: LogCounts,
}

impl Log {
    /// A log on an empty device.
    pub fn new(config: LogConfig) -> Log {
        Log {
            index: Index::new(config.hash_seed),
            config,
            segments: BTreeMap::new(),
            by_life: BTreeMap::new(),
            open: None,
            spare: Spare::None,
            next_life: 1,
            next_number: 1,
            forgetting: forget::Forgetting::default(),
            intents: VecDeque::new(),
            stopped: false,
            counts: LogCounts::default(),
        }
    }

    /// Size and limits.
    pub fn config(&self) -> &LogConfig {
        &self.config
    }

    /// Most bytes of a record: a segment without its header.
    pub fn record_bytes_max(&self) -> u64 {
        self.config.segment_bytes - BLOCK_BYTES as u64
    }

    /// How full it is.
    pub fn counts(&self) -> LogCounts {
        LogCounts {
            pages: self.index.len() as u64,
            page_bytes: self.index.record_bytes(),
            segments: self.segments.len() as u64,
            segments_max: u64::from(self.config.segments_max),
            segments_used: self.by_life.len() as u64,
            ..self.counts
        }
    }

    /// The next thing to do that nobody waits for. Ask after every call that takes `&mut self`.
    pub fn next_intent(&mut self) -> Option<Intent> {
        self.intents.pop_front()
    }

    /// Whether [`Log::next_intent`] has something.
    pub fn has_intents(&self) -> bool {
        !self.intents.is_empty()
    }

    /// What is known of a page that can be read.
    pub fn find(&self, id: &PageId) -> Option<&Entry> {
        self.index.get(id)
    }

    /// Plans the record of a page. If the log is full, its oldest segment is given up for it.
    pub fn append(&mut self, meta: &PageMeta) -> Result<Append, AppendError> {
        if self.index.get(&meta.id).is_some_and(|entry| entry.generation == meta.generation) {
            return Ok(Append::AlreadyThere);
        }
        let planned = self.plan(RecordBody::Page(meta.clone()), record_bytes(meta.payload_bytes()) as u64)?;
        Ok(match planned {
            Some(write) => {
                self.forgetting.page_planned(&meta.id);
                Append::Write(write)
            }
            None => Append::Wait,
        })
    }

    /// Gives a record its place and number, if an open segment has room.
    fn plan(&mut self, body: RecordBody, bytes: u64) -> Result<Option<PlannedWrite>, AppendError> {
        if self.stopped {
            return Err(AppendError::Stopped);
        }
        let max = self.record_bytes_max();
        if bytes > max {
            return Err(AppendError::TooLarge { bytes, max });
        }
        let Some(place) = self.make_room(bytes) else { return Ok(None) };
        let header = RecordHeader { place, number: self.next_number, body };
        self.next_number += 1;
        Ok(Some(PlannedWrite { header }))
    }

    /// Takes `bytes` of the open segment, or of the next one.
    fn make_room(&mut self, bytes: u64) -> Option<RecordPlace> {
        if let Some(open) = self.open
            && self.segments.get(&open).is_none_or(|segment| segment.room(self.config.segment_bytes) < bytes)
        {
            self.seal(open);
        }
        if self.open.is_none() {
            self.open_spare();
        }
        let place = self.open.and_then(|open| {
            let life = self.segments.get_mut(&open)?.life_mut()?;
            let place = RecordPlace { segment: open, life: life.number, offset: life.end };
            life.end += bytes;
            life.writes += 1;
            Some(place)
        });
        self.prepare_ahead();
        place
    }

    /// Closes the open segment; a seal record says so, if there is room for one.
    fn seal(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(&number) else { return };
        let room = segment.room(self.config.segment_bytes);
        segment.seal();
        if self.open == Some(number) {
            self.open = None;
        }
        if room >= BLOCK_BYTES as u64 {
            self.plan_seal(number);
        }
    }

    /// Plans the seal record of a sealed segment behind its last record.
    fn plan_seal(&mut self, segment: u32) {
        let Some(life) = self.segments.get_mut(&segment).and_then(Segment::life_mut) else { return };
        let place = RecordPlace { segment, life: life.number, offset: life.end };
        life.end += BLOCK_BYTES as u64;
        life.writes += 1;
        // A seal kills nothing and is killed by nothing: any number will do, and it must not exceed those of the next life.
        let header = RecordHeader { place, number: self.next_number.saturating_sub(1), body: RecordBody::Seal };
        self.intents.push_back(Intent::Write(PlannedWrite { header }));
    }

    /// Reports a planned write. A page that was written can be found from now on, unless it was forgotten meanwhile.
    pub fn write_done(&mut self, write: PlannedWrite, outcome: WriteOutcome) {
        let PlannedWrite { header } = write;
        let Some(life) = self.life_of(&header.place) else { return };
        life.writes = life.writes.saturating_sub(1);
        if outcome == WriteOutcome::Written {
            life.completed += 1;
        }
        if let RecordBody::Page(meta) = &header.body {
            self.page_done(&header, meta, outcome);
        }
        if outcome == WriteOutcome::Failed {
            self.abandon(header.place.segment);
        }
        self.reclaim_when_idle();
    }

    fn page_done(&mut self, header: &RecordHeader, meta: &PageMeta, outcome: WriteOutcome) {
        let killed = self.forgetting.page_done(&meta.id, header.number);
        let evicted = matches!(self.segments.get(&header.place.segment), Some(Segment::Reclaiming(_)));
        match outcome {
            WriteOutcome::NotSent => {}
            WriteOutcome::Written if killed => {}
            WriteOutcome::Written if !evicted => {
                let entry = Entry::of(header.place, header.number, meta);
                if self.index.insert_newer(meta.id, entry)
                    && let Some(life) = self.life_of(&header.place)
                {
                    life.pages.push((meta.id, header.number));
                }
            }
            // It is not served, but may be on the device and come back after a crash.
            WriteOutcome::Written | WriteOutcome::Failed => {
                self.counts.evicted_pages += u64::from(evicted);
                self.forgetting.doubt(meta.id, header.number + 1, header.place.life);
            }
        }
    }

    /// Holds a page for reading.
    pub fn begin_read(&mut self, id: &PageId) -> Option<ReadTicket> {
        let entry = *self.index.get(id)?;
        self.life_of(&entry.place)?.reads += 1;
        Some(ReadTicket { id: *id, entry })
    }

    /// The device has answered the read, whatever it answered.
    pub fn end_read(&mut self, ticket: ReadTicket) {
        if let Some(life) = self.life_of(&ticket.entry.place) {
            life.reads = life.reads.saturating_sub(1);
        }
        self.reclaim_when_idle();
    }

    /// What was read as record `number` is not the page: it is not found any more. `false` if that record is not the one
    /// that would be found.
    pub fn drop_damaged(&mut self, id: &PageId, number: u64) -> bool {
        let Some(entry) = self.index.remove_if(id, number) else { return false };
        // It may be readable again after a restart, so forgetting it must still write a tombstone.
        self.forgetting.doubt(*id, number + 1, entry.place.life);
        true
    }

    /// The segments with completed writes that were not synced yet.
    pub fn sync_plan(&self) -> Vec<SyncTicket> {
        let lives = self.by_life.values().filter_map(|&segment| Some((segment, self.segments.get(&segment)?.life()?)));
        lives
            .filter(|(_, life)| life.completed > life.synced)
            .map(|(segment, life)| SyncTicket { segment, life: life.number, completed: life.completed })
            .collect()
    }

    /// Reports a sync. After a failed one nobody knows what the device kept: the segment takes no more records.
    pub fn sync_done(&mut self, ticket: SyncTicket, synced: bool) {
        let SyncTicket { segment, life, completed } = ticket;
        let Some(found) = self.segments.get_mut(&segment).and_then(Segment::life_mut) else { return };
        if found.number != life {
            return;
        }
        match synced {
            true => found.synced = found.synced.max(completed),
            false => {
                found.synced = found.completed;
                self.abandon(segment);
            }
        }
    }

    /// Takes no more records into a segment of which a write failed. Its pages stay readable, as reads are verified.
    fn abandon(&mut self, segment: u32) {
        if self.open == Some(segment) {
            self.counts.segments_abandoned += 1;
            if let Some(segment) = self.segments.get_mut(&segment) {
                segment.seal();
            }
            self.open = None;
        }
    }

    /// The life a place is of, if the segment still lives it.
    fn life_of(&mut self, place: &RecordPlace) -> Option<&mut Life> {
        self.segments.get_mut(&place.segment)?.life_mut().filter(|life| life.number == place.life)
    }
}
