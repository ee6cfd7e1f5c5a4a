//! The segment log of one device.
//!
//! Always true:
//! 1. A page is found only after its write completed, never after it was forgotten, and never after its time.
//! 2. At most one segment is open, records are numbered in the order in which they are planned, from a number on that follows
//!    from the segment's life, and segments open in the order of their lives; so numbers and lives grow together, even past
//!    segments that cannot be read.
//! 3. Segments are reclaimed oldest life first, none while a read or write of it is under way. So a tombstone, which is
//!    younger than what it kills, is there as long as that is.
//! 4. A segment's first record is planned only after its header, with a life never used before, is durable.
//! 5. There are never more segments than the capacity allows.
//! 6. The footer of a segment is planned only when nothing else of it is under way and all of it is durable, and lists
//!    all that was written. Room for it is kept from the first record on.
//!
//! Steps of a write, and what a crash leaves behind each of them:
//! 1. [`Log::append`] plans place and number: nothing is on the device.
//! 2. The device writes header and payload: a hole, a torn record, a header without its payload (found at reading by the
//!    payload's checksums), or a whole record, whatever became of its neighbours.
//! 3. [`Log::write_done`] makes the page visible: as in 2 until the segment was synced.
//! 4. [`Log::sync_plan`], a sync of the device, [`Log::sync_done`]: the record is found again.
//! 5. After the segment was sealed, [`Intent::Footer`], [`Log::footer_done`]: as in 4, whether the footer is whole, torn
//!    or missing.
//!
//! Steps of preparing a segment: [`Intent::Prepare`] comes when no read or write of the segment is under way and none of
//! its pages can be found; then header written, header synced, [`Log::prepared`]. A crash leaves the old life or the new
//! one without records; the pages of the old life that come back were not forgotten, by 3.
//!
//! What is kept when the log is full: see [`clean`](self) in `log/clean.rs` and `log/keeper.rs`. After a start the log is
//! *restoring*: see [`Recovery`].

use crate::planted::{Bug, has};
use larder_evict::Larder;
use larder_format::disk::{BLOCK_BYTES, RecordBody, RecordHeader, RecordPlace, SEGMENT_BYTES_MAX, record_bytes};
use larder_format::footer::{Footer, FooterRoom, RecordSummary};
use larder_format::{NamespaceId, PageId, PageMeta, is_expired};
use std::collections::{BTreeMap, VecDeque};
use thiserror::Error;

mod clean;
mod footers;
mod forget;
mod index;
mod keeper;
mod prepare;
mod quota;
mod restore;
mod scan;
mod scrub;
mod segment;
#[cfg(test)]
mod tests;

pub use clean::Clean;
pub use footers::PlannedFooter;
pub use forget::Forget;
pub use keeper::{Pin, PinError};
pub use prepare::{Prepare, PrepareOutcome};
pub use restore::{FoundSegment, Recovery, RestoreError, RestoreReport, SegmentLife};
pub use scan::{ScanRead, ScannedSegment, SegmentScan, TAIL_BYTES};

use index::Index;
use keeper::Keeper;
use prepare::Spare;
use segment::{Life, Segment};

/// Share of the log whose pages are kept when their segment is reclaimed, unless configured otherwise.
pub const KEEP_PERCENT_DEFAULT: u8 = 50;
/// More records than a segment can have.
const RECORDS_PER_LIFE_MAX: u64 = SEGMENT_BYTES_MAX / BLOCK_BYTES as u64;

/// Size and limits of a log.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// Bytes of every segment.
    pub segment_bytes: u64,
    /// Most segments.
    pub segments_max: u32,
    /// Seeds the hash of the index, so that a stranger cannot choose keys that collide.
    pub hash_seed: u64,
    /// How much of the log, in percent of its bytes, is kept for what will be asked for again: the pages of this share
    /// are copied when the log reclaims their segment. 0: none, pages go in the order in which they came. Default
    /// [`KEEP_PERCENT_DEFAULT`], at most 90.
    pub keep_percent: u8,
    /// Most bytes of a namespace's pages, unless [`Log::set_quota`] says otherwise; `u64::MAX`: no limit.
    pub quota_default: u64,
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
    /// From when on it is not found, in milliseconds since 1970, at most a second early; 0: it has no end.
    pub expires_unix_ms: u64,
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
#[allow(clippy::large_enum_variant, reason = "it is moved once")]
pub enum Append {
    /// Write this.
    Write(PlannedWrite),
    /// This very put is in the log already.
    AlreadyThere,
    /// No segment has room, or the log is being restored; try again after the next [`Log::prepared`], [`Log::cleaned`]
    /// or [`Log::restored`].
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
    /// Write this footer, then call [`Log::footer_done`]. It only speeds up the next start.
    Footer(PlannedFooter),
    /// Copy these pages, then call [`Log::cleaned`].
    Clean(Clean),
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
    /// Up to where all was written.
    written: u64,
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
    /// Pages that are copied when their segment is reclaimed.
    pub kept_pages: u64,
    /// Bytes of their records.
    pub kept_bytes: u64,
    /// Bytes of the records of hard-pinned pages.
    pub pinned_bytes: u64,
    /// Pages that were copied, and their old segment cleaned.
    pub rescued_pages: u64,
    /// Pages that went as their namespace was over its quota.
    pub quota_pages: u64,
    /// Pages that went as their time was over.
    pub expired_pages: u64,
    /// Footers written.
    pub footers: u64,
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
    keeper: Keeper,
    /// Where pages that were copied stood before, as long as that segment is there: a copy may turn out torn.
    originals: BTreeMap<PageId, index::Original>,
    restoring: Option<restore::Restoring>,
    settling: Option<restore::Settling>,
    intents: VecDeque<Intent>,
    stopped: bool,
    counts: LogCounts,
}

impl Log {
    /// A log on an empty device.
    pub fn new(config: LogConfig) -> Log {
        Log {
            index: Index::new(config.hash_seed, config.quota_default),
            keeper: Keeper::new(keep_bytes(&config), Larder::new(config.hash_seed)),
            originals: BTreeMap::new(),
            restoring: None,
            settling: None,
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

    /// Most bytes of a record: a segment without its header, and the footer of one record.
    pub fn record_bytes_max(&self) -> u64 {
        let footer = FooterRoom::default().bytes_with(&NamespaceId([0; 32]));
        self.config.segment_bytes.saturating_sub(BLOCK_BYTES as u64 + footer)
    }

    /// How full it is.
    pub fn counts(&self) -> LogCounts {
        let to_come = self.restoring.as_ref().map_or(0, restore::Restoring::left);
        LogCounts {
            pages: self.index.len() as u64,
            page_bytes: self.index.record_bytes(),
            segments: (self.segments.len() + to_come) as u64,
            segments_max: u64::from(self.config.segments_max),
            segments_used: self.by_life.len() as u64,
            kept_pages: self.keeper.pages() as u64,
            kept_bytes: self.keeper.bytes(),
            pinned_bytes: self.keeper.pinned_bytes(),
            ..self.counts
        }
    }

    /// Bytes of memory that the index takes, by what is allocated for it. The keeper's are not among them.
    pub fn index_bytes(&self) -> u64 {
        let lives = self.segments.values().filter_map(Segment::life).map(Life::memory_bytes).sum::<usize>();
        (self.index.memory_bytes() + lives) as u64
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
    pub fn find(&self, id: &PageId, now_unix_ms: u64) -> Option<Entry> {
        let entry = self.entry(self.index.find(id)?)?;
        (!is_expired(entry.expires_unix_ms, now_unix_ms) || has(Bug::ExpiredIsServed)).then_some(entry)
    }

    fn entry(&self, slot: u32) -> Option<Entry> {
        let stored = self.index.get(slot);
        let life = self.segments.get(&stored.segment)?.life()?.number;
        Some(Entry {
            place: index::place_of(stored, life),
            number: stored.number,
            payload_bytes: stored.payload_bytes,
            generation: stored.generation,
            position: stored.position,
            expires_unix_ms: stored.expires_unix_ms(),
        })
    }

    /// Plans the record of a page. If the log is full, its oldest segment is given up for it.
    pub fn append(&mut self, meta: &PageMeta) -> Result<Append, AppendError> {
        if self.index.find(&meta.id).is_some_and(|slot| self.index.get(slot).generation == meta.generation) {
            return Ok(Append::AlreadyThere);
        }
        let bytes = record_bytes(meta.payload_bytes()) as u64;
        let planned = self.plan(RecordBody::Page(meta.clone()), &meta.id.namespace, bytes)?;
        Ok(match planned {
            Some(write) => {
                self.forgetting.page_planned(&meta.id);
                if has(Bug::VisibleBeforeWrite) {
                    self.show(&write.header);
                }
                Append::Write(write)
            }
            None => Append::Wait,
        })
    }

    /// Gives a record its place and number, if an open segment has room.
    fn plan(
        &mut self,
        body: RecordBody,
        namespace: &NamespaceId,
        bytes: u64,
    ) -> Result<Option<PlannedWrite>, AppendError> {
        if self.stopped {
            return Err(AppendError::Stopped);
        }
        let max = self.record_bytes_max();
        if bytes > max {
            return Err(AppendError::TooLarge { bytes, max });
        }
        // Until all is known, a segment could be reclaimed before it was looked into.
        if self.restoring.is_some() {
            return Ok(None);
        }
        Ok(self.make_room(namespace, bytes).map(|place| self.planned(place, body)))
    }

    fn planned(&mut self, place: RecordPlace, body: RecordBody) -> PlannedWrite {
        let number = self.next_number.max(first_number(place.life));
        self.next_number = number.saturating_add(1);
        let durable = self.life_of(&place).map_or(0, |life| life.durable);
        PlannedWrite { header: RecordHeader { place, number, durable, body } }
    }

    /// Takes `bytes` of the open segment, or of the next one.
    fn make_room(&mut self, namespace: &NamespaceId, bytes: u64) -> Option<RecordPlace> {
        if let Some(open) = self.open
            && !self.fits(open, namespace, bytes)
        {
            if self.is_cleaned_into(open) {
                // What is left is for the pages that are being rescued; the next segment comes when they are.
                return None;
            }
            self.seal(open);
        }
        if self.open.is_none() && self.open_spare() {
            self.clean_ahead(namespace, bytes);
        }
        let place = self.open.filter(|&open| self.fits(open, namespace, bytes)).and_then(|open| {
            let life = self.segments.get_mut(&open)?.life_mut()?;
            life.footer_room.add(namespace);
            Some(RecordPlace { segment: open, life: life.number, offset: life.take(bytes) })
        });
        self.prepare_ahead();
        place
    }

    fn fits(&self, segment: u32, namespace: &NamespaceId, bytes: u64) -> bool {
        let life = self.segments.get(&segment).and_then(Segment::life);
        life.is_some_and(|life| life.fits(self.config.segment_bytes, namespace, bytes))
    }

    /// Closes the open segment for records, as at the end: a start would not go on with it.
    pub fn seal_open(&mut self) {
        if let Some(open) = self.open {
            self.seal(open);
        }
    }

    /// Closes a segment for records.
    fn seal(&mut self, number: u32) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.seal();
        }
        if self.open == Some(number) {
            self.open = None;
        }
        self.plan_footer(number);
    }

    /// Reports a planned write. A page that was written can be found from now on, unless it was forgotten meanwhile.
    pub fn write_done(&mut self, write: PlannedWrite, outcome: WriteOutcome) {
        let PlannedWrite { header } = write;
        let Some(life) = self.life_of(&header.place) else { return };
        life.writes = life.writes.saturating_sub(1);
        match outcome {
            WriteOutcome::Written => {
                life.completed += 1;
                life.missing.remove(&header.place.offset);
                if life.wants_footer {
                    life.records.extend(RecordSummary::of(&header));
                }
            }
            // It may be on the device, and be found if a footer that does not list it is lost.
            WriteOutcome::Failed => life.renounce_footer(),
            // Behind a hole that nobody will fill, damage could not be told from a crash: what comes goes elsewhere.
            WriteOutcome::NotSent if self.open == Some(header.place.segment) => self.seal(header.place.segment),
            WriteOutcome::NotSent => {}
        }
        if let RecordBody::Page(meta) = &header.body {
            self.page_done(&header, meta, outcome);
        }
        if outcome == WriteOutcome::Failed {
            self.abandon(header.place.segment);
        }
        self.plan_footer(header.place.segment);
        self.reclaim_when_idle();
    }

    fn page_done(&mut self, header: &RecordHeader, meta: &PageMeta, outcome: WriteOutcome) {
        let killed = self.forgetting.page_done(&meta.id, header.number);
        let evicted = matches!(self.segments.get(&header.place.segment), Some(Segment::Reclaiming(_)));
        match outcome {
            WriteOutcome::NotSent => {}
            WriteOutcome::Written if killed => {}
            WriteOutcome::Written if !evicted => self.show(header),
            // It is not served, but may be on the device and come back after a crash.
            WriteOutcome::Written | WriteOutcome::Failed => {
                self.counts.evicted_pages += u64::from(evicted);
                self.forgetting.doubt(meta.id, header.number + 1, header.place.life);
            }
        }
    }

    /// The page can be found from now on, unless a newer record of it is.
    fn show(&mut self, header: &RecordHeader) {
        let Some(RecordSummary::Page(page)) = RecordSummary::of(header) else { return };
        let segment = header.place.segment;
        let mut pin = Pin::None;
        if let Some(slot) = self.index.find(&page.id) {
            if self.index.get(slot).number > page.number && !has(Bug::OlderReplacesNewer) {
                return;
            }
            if self.move_page(slot, segment, &page) {
                return;
            }
            pin = self.keeper.pin_of(slot);
            if pin == Pin::Hard && self.is_over_quota_with(slot, &page) {
                // The pinned page stays; the new one would have to go at once.
                self.counts.quota_pages += 1;
                return self.forgetting.doubt(page.id, page.number + 1, header.place.life);
            }
            self.take_out(slot);
        }
        self.squeeze(&page.id.namespace, record_bytes(page.payload_bytes as usize) as u64);
        let slot = self.enter(segment, &page);
        self.keep(slot);
        if self.index.namespace_bytes(&page.id.namespace) > self.index.quota(&page.id.namespace) {
            self.counts.quota_pages += 1;
            self.drop_page(slot);
        } else if pin != Pin::None {
            // The new put takes over the pin, if it is not too large for that.
            let _ = self.pin_slot(slot, pin);
        }
    }

    /// Holds a page for reading, and counts as a use of it.
    pub fn begin_read(&mut self, id: &PageId, now_unix_ms: u64) -> Option<ReadTicket> {
        let slot = self.index.find(id)?;
        if is_expired(self.index.get(slot).expires_unix_ms(), now_unix_ms) && !has(Bug::ExpiredIsServed) {
            self.counts.expired_pages += 1;
            self.drop_page(slot);
            return None;
        }
        self.use_page(slot);
        self.ticket(slot)
    }

    /// Holds record `number` of a page for reading it without using it: to copy or to check it. `None` if it is not the
    /// one that would be found.
    pub fn hold(&mut self, id: &PageId, number: u64) -> Option<ReadTicket> {
        let slot = self.index.find(id).filter(|&slot| self.index.get(slot).number == number)?;
        self.ticket(slot)
    }

    fn ticket(&mut self, slot: u32) -> Option<ReadTicket> {
        let entry = self.entry(slot)?;
        self.life_of(&entry.place)?.reads += 1;
        Some(ReadTicket { id: self.index.id_of(slot), entry })
    }

    /// A page was asked for and served from elsewhere: it counts as a use of the one here.
    pub fn touch(&mut self, id: &PageId) {
        if let Some(slot) = self.index.find(id) {
            self.use_page(slot);
        }
    }

    /// The device has answered the read, whatever it answered.
    pub fn end_read(&mut self, ticket: ReadTicket) {
        if let Some(life) = self.life_of(&ticket.entry.place) {
            life.reads = life.reads.saturating_sub(1);
        }
        self.reclaim_when_idle();
    }

    /// What was read as record `number` is not the page: it is not found any more, unless it is a copy whose original is
    /// still there; then that is found again. `false` if that record is not the one that would be found.
    pub fn drop_damaged(&mut self, id: &PageId, number: u64) -> bool {
        let Some(slot) = self.index.find(id).filter(|&slot| self.index.get(slot).number == number) else {
            return false;
        };
        if !self.fall_back(slot) {
            self.drop_page(slot);
        }
        true
    }

    /// The page is found where it stood before it was copied, if that is still there.
    fn fall_back(&mut self, slot: u32) -> bool {
        let (id, before) = (self.index.id_of(slot), *self.index.get(slot));
        let Some(original) = self.originals.remove(&id).filter(|at| at.generation == before.generation) else {
            return false;
        };
        if let Some(life) = self.segments.get_mut(&original.segment).and_then(Segment::life_mut) {
            life.slots.push(slot);
        }
        if let Some(life) = self.segments.get(&before.segment).and_then(Segment::life) {
            self.forgetting.doubt(id, before.number + 1, life.number);
        }
        self.restand(slot, |index| index.stand_at(slot, &original));
        true
    }

    /// Drops at most `max` pages whose time is over; whether there are more. To be called now and then.
    pub fn expire(&mut self, now_unix_ms: u64, max: usize) -> bool {
        for _ in 0..max {
            let Some(slot) = self.keeper.first_expired(now_unix_ms) else { return false };
            self.counts.expired_pages += 1;
            self.drop_page(slot);
        }
        self.keeper.first_expired(now_unix_ms).is_some()
    }

    /// Takes a page out of the index, though its record stays on the device.
    fn drop_page(&mut self, slot: u32) {
        let id = self.index.id_of(slot);
        let stored = self.take_out(slot);
        if let Some(restoring) = &mut self.restoring {
            // Older records of it are still to come, and must not take its place.
            restoring.kill(id, stored.number, true);
        }
        // It may be found again after a restart, so forgetting it must still write a tombstone.
        if let Some(life) = self.segments.get(&stored.segment).and_then(Segment::life).filter(|_| !has(Bug::NoDoubt)) {
            let life = life.number;
            self.forgetting.doubt(id, stored.number + 1, life);
        }
    }

    /// The segments with completed writes that were not synced yet.
    pub fn sync_plan(&self) -> Vec<SyncTicket> {
        let lives = self.by_life.values().filter_map(|&segment| Some((segment, self.segments.get(&segment)?.life()?)));
        lives
            .filter(|(_, life)| life.completed > life.synced)
            .map(|(segment, life)| {
                let (completed, written) = (life.completed, life.written());
                SyncTicket { segment, life: life.number, completed, written }
            })
            .collect()
    }

    /// Reports a sync. After a failed one nobody knows what the device kept: the segment takes no more records.
    pub fn sync_done(&mut self, ticket: SyncTicket, synced: bool) {
        let SyncTicket { segment, life, completed, written } = ticket;
        let Some(found) = self.segments.get_mut(&segment).and_then(Segment::life_mut) else { return };
        if found.number != life {
            return;
        }
        match synced {
            true => {
                found.synced = found.synced.max(completed);
                found.durable = found.durable.max(written);
            }
            false => {
                found.synced = found.completed;
                found.sync_failed = true;
                found.renounce_footer();
                self.abandon(segment);
            }
        }
        self.plan_footer(segment);
    }

    /// Whether a sync of this life of the segment failed, so that records of it cannot be relied upon.
    pub fn sync_failed(&self, place: &RecordPlace) -> bool {
        let life = self.segments.get(&place.segment).and_then(Segment::life);
        life.is_some_and(|life| life.number == place.life && life.sync_failed)
    }

    /// Takes no more records into a segment of which a write failed. Its pages stay readable, as reads are verified.
    fn abandon(&mut self, segment: u32) {
        if self.open == Some(segment) {
            self.counts.segments_abandoned += 1;
            self.seal(segment);
        }
    }

    /// The life a place is of, if the segment still lives it.
    fn life_of(&mut self, place: &RecordPlace) -> Option<&mut Life> {
        self.segments.get_mut(&place.segment)?.life_mut().filter(|life| life.number == place.life)
    }
}

/// The smallest number of a record of a life, above all of the lives before it, whether or not those could be read at the
/// start: a tombstone must outrank what it kills.
fn first_number(life: u64) -> u64 {
    life.saturating_mul(RECORDS_PER_LIFE_MAX)
}

fn keep_bytes(config: &LogConfig) -> u64 {
    let bytes = config.segment_bytes.saturating_mul(u64::from(config.segments_max));
    bytes / 100 * u64::from(config.keep_percent.min(90))
}
