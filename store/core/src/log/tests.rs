//! The log against a model, on a disk that forgets.
//!
//! Fault model. Blocks are written one by one. A completed write is read back at once, but is durable only after a sync
//! of its segment. A crash keeps any subset of the blocks that were not synced, whether their write had completed or not,
//! and may leave garbage in place of any of them. What was durable stays. Writes may fail, having written any subset.
//! Preparing a segment may fail at any step, cleaning one may end early. Between two lives the header of a segment, or of a
//! record that a later one calls durable, may rot: then pages may be lost, and nothing else.
//!
//! What must hold: see [`Model`].

use super::*;
use disk::{BlockWrite, Dice, Disk, LOG, SEGMENT, blocks_of, blocks_of_footer};
use larder_format::PageKey;
use larder_format::disk::{LogId, SegmentHeader};
use proptest::prelude::*;
use std::collections::BTreeSet;

mod cases;
mod disk;

const IDS: u8 = 12;

/// Even and odd ids are of two namespaces; each has sequences of three pages.
fn id(n: u8) -> PageId {
    PageId { namespace: NamespaceId([n % 2; 32]), key: PageKey([n; 32]) }
}

fn meta(n: u8, generation: u64, blocks: u64, expires_unix_ms: u64) -> PageMeta {
    let bytes = (blocks * BLOCK_BYTES as u64) as u32;
    let chunk_crcs = vec![0; PageMeta::chunks_of(bytes)];
    let position = u32::from(n / 2 % 3);
    let parent = if position == 0 { PageKey::NONE } else { PageKey([n - 2; 32]) };
    PageMeta { id: id(n), parent, position, generation, expires_unix_ms, part_bytes: vec![bytes], chunk_crcs }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Put { id: u8, blocks: u64, lives_s: u64 },
    Forget { id: u8 },
    Complete { which: u64, outcome: u8 },
    Intent { fails: bool },
    Sync { fails: bool },
    BeginRead { id: u8 },
    EndRead { which: u64 },
    Touch { id: u8 },
    Damage { id: u8 },
    Clean { which: u64, gives_up: bool },
    Pin { id: u8, pin: u8 },
    Quota { namespace: u8, blocks: u64 },
    Expire { seconds: u64 },
    Settle { max: usize },
    Crash { seed: u64, segments_max: u32 },
    Rot { seed: u64, header: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        24 => (0..IDS, 1u64..5, 0u64..40).prop_map(|(id, blocks, lives_s)| Step::Put { id, blocks, lives_s }),
        5 => (0..IDS).prop_map(|id| Step::Forget { id }),
        34 => (any::<u64>(), 0u8..64).prop_map(|(which, outcome)| Step::Complete { which, outcome }),
        14 => (0u8..24).prop_map(|n| Step::Intent { fails: n == 0 }),
        10 => (0u8..40).prop_map(|n| Step::Sync { fails: n == 0 }),
        6 => (0..IDS).prop_map(|id| Step::BeginRead { id }),
        6 => any::<u64>().prop_map(|which| Step::EndRead { which }),
        2 => (0..IDS).prop_map(|id| Step::Touch { id }),
        1 => (0..IDS).prop_map(|id| Step::Damage { id }),
        12 => (any::<u64>(), 0u8..30).prop_map(|(which, n)| Step::Clean { which, gives_up: n == 0 }),
        3 => (0..IDS, 0u8..3).prop_map(|(id, pin)| Step::Pin { id, pin }),
        1 => (0u8..2, 0u64..40).prop_map(|(namespace, blocks)| Step::Quota { namespace, blocks }),
        2 => (1u64..4).prop_map(|seconds| Step::Expire { seconds }),
        2 => (1usize..5).prop_map(|max| Step::Settle { max }),
        2 => (any::<u64>(), 2u32..8).prop_map(|(seed, segments_max)| Step::Crash { seed, segments_max }),
        1 => (any::<u64>(), any::<bool>()).prop_map(|(seed, header)| Step::Rot { seed, header }),
    ];
    prop::collection::vec(step, 1..500)
}

/// Faults of the world around the log that the model must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Control {
    None,
    /// Syncs do nothing.
    LyingDisk,
    /// Footers list pages only.
    NoTombstonesInFooters,
    /// Pages are not copied, and nothing is said of it.
    NoCopies,
    /// Segments are restored as if the oldest were the youngest.
    Backwards,
}

/// What was asked of the log, and what it must answer:
/// - before a crash: never a page that was not put, whose write has not completed, whose time is over, or that was
///   forgotten since; and every page that was pinned hard, if no failure came between;
/// - after a crash, from the first segment that is restored on: never a page that was not put, or that was put before a
///   forgetting that was reported durable; and at the end every page that could be found, was synced, and was not
///   touched since;
/// - a page that is being read stays where it is;
/// - there are never more segments than allowed, and no namespace takes more than its quota.
struct Model {
    log: Log,
    disk: Disk,
    control: Control,
    segments_max: u32,
    clock: u64,
    now_ms: u64,
    /// By generation: whose put, when it was planned, when its time is over.
    puts: BTreeMap<u64, (u8, u64, u64)>,
    completed: BTreeSet<u64>,
    /// When a page was last forgotten, and when so for good.
    forgotten: BTreeMap<u8, u64>,
    forgotten_durably: BTreeMap<u8, u64>,
    writes: Vec<PlannedWrite>,
    footers: Vec<PlannedFooter>,
    cleaning: Option<Clean>,
    /// Tombstones written and not synced: page, number, when asked, segment.
    tombstones: Vec<(u8, u64, u64, u32)>,
    /// When each tombstone under way was asked for, by record number.
    asked: BTreeMap<u64, (u8, u64)>,
    reads: Vec<ReadTicket>,
    /// Pages of which a write failed or a record was dropped: after a crash it may stand before an older, whole one.
    doubtful: BTreeSet<PageId>,
    /// Pinned hard, with their generation; nothing failed since.
    pinned: BTreeMap<u8, u64>,
    quotas: BTreeMap<u8, u64>,
    /// Namespaces of which something was pinned since their quota was set: they may be over it.
    quota_pinned: BTreeSet<u8>,
    /// Numbers of the records that were copies.
    copies: BTreeSet<u64>,
    footers_found: u64,
    rotted: usize,
}

fn config(segments_max: u32) -> LogConfig {
    LogConfig { segment_bytes: SEGMENT, segments_max, hash_seed: 5, keep_percent: 50, quota_default: u64::MAX }
}

impl Model {
    fn new(control: Control) -> Model {
        Model {
            log: Log::new(config(5)),
            disk: Disk { lies: control == Control::LyingDisk, ..Disk::default() },
            control,
            segments_max: 5,
            clock: 0,
            now_ms: 1_000_000,
            puts: BTreeMap::new(),
            completed: BTreeSet::new(),
            forgotten: BTreeMap::new(),
            forgotten_durably: BTreeMap::new(),
            writes: Vec::new(),
            footers: Vec::new(),
            cleaning: None,
            tombstones: Vec::new(),
            asked: BTreeMap::new(),
            reads: Vec::new(),
            doubtful: BTreeSet::new(),
            pinned: BTreeMap::new(),
            quotas: BTreeMap::new(),
            quota_pinned: BTreeSet::new(),
            copies: BTreeSet::new(),
            footers_found: 0,
            rotted: 0,
        }
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        self.clock += 1;
        match step {
            Step::Put { id, blocks, lives_s } => self.put(id, blocks, lives_s),
            Step::Forget { id } => self.forget(id),
            Step::Complete { which, outcome } => self.complete(which, outcome),
            Step::Intent { fails } => self.intent(fails),
            Step::Sync { fails } => self.sync(fails),
            Step::BeginRead { id: n } => self.reads.extend(self.log.begin_read(&id(n), self.now_ms)),
            Step::EndRead { which } => self.end_read(which)?,
            Step::Touch { id: n } => self.log.touch(&id(n)),
            Step::Damage { id: n } => {
                if let Some(number) = self.log.find(&id(n), 0).map(|entry| entry.number) {
                    self.log.drop_damaged(&id(n), number);
                    self.doubtful.insert(id(n));
                    self.pinned.remove(&n);
                }
            }
            Step::Clean { which, gives_up } => self.clean(which, gives_up)?,
            Step::Pin { id, pin } => self.pin(id, pin),
            Step::Quota { namespace, blocks } => self.quota(namespace, blocks),
            Step::Expire { seconds } => {
                self.now_ms += seconds * 1000;
                self.log.expire(self.now_ms, 1);
            }
            Step::Settle { max } => {
                self.log.settle(max);
            }
            Step::Crash { seed, segments_max } => self.crash(seed, segments_max, None)?,
            Step::Rot { seed, header } => self.crash(seed, self.segments_max, Some(header))?,
        }
        self.check_live()
    }

    fn put(&mut self, n: u8, blocks: u64, lives_s: u64) {
        let generation = self.clock;
        let expires = if lives_s < 10 { self.now_ms + lives_s * 1000 } else { 0 };
        if let Append::Write(write) = self.log.append(&meta(n, generation, blocks, expires)).expect("fits") {
            self.puts.insert(generation, (n, self.clock, expires));
            self.writes.push(write);
        }
    }

    fn forget(&mut self, n: u8) {
        match self.log.forget(&id(n)).expect("not stopped") {
            Forget::NotThere => {
                self.forgotten.insert(n, self.clock);
                self.forgotten_durably.insert(n, self.clock);
            }
            Forget::Write { tombstone, .. } => {
                self.pinned.remove(&n);
                self.forgotten.insert(n, self.clock);
                self.asked.insert(tombstone.header.number, (n, self.clock));
                self.writes.push(tombstone);
            }
            Forget::Wait => {}
        }
    }

    fn pin(&mut self, n: u8, pin: u8) {
        let pin = [Pin::None, Pin::Soft, Pin::Hard][usize::from(pin)];
        if self.log.pin(&id(n), pin).is_err() {
            return;
        }
        if pin == Pin::Hard {
            self.quota_pinned.insert(n % 2);
        }
        self.pinned.remove(&n);
        // Without an open segment, or when the next could not be made, there may be nowhere to copy to.
        let none_left = self.log.free_segment().is_none() && self.log.segments.len() >= self.segments_max as usize;
        if matches!(self.log.spare, Spare::None) && none_left {
            return;
        }
        if let (Pin::Hard, Some(_), Some(entry)) = (pin, self.log.open, self.log.find(&id(n), self.now_ms)) {
            self.pinned.insert(n, entry.generation);
        }
    }

    fn quota(&mut self, namespace: u8, blocks: u64) {
        let bytes = if blocks == 0 { u64::MAX } else { blocks * BLOCK_BYTES as u64 };
        self.quotas.insert(namespace, bytes);
        if self.log.keeper.pinned_bytes() == 0 {
            self.quota_pinned.remove(&namespace);
        }
        self.log.set_quota(NamespaceId([namespace; 32]), bytes);
    }

    fn complete(&mut self, which: u64, outcome: u8) {
        let outcome = match outcome {
            0 => WriteOutcome::Failed,
            1 => WriteOutcome::NotSent,
            _ => WriteOutcome::Written,
        };
        let total = self.writes.len() + self.footers.len();
        if total == 0 {
            return;
        }
        if outcome != WriteOutcome::Written {
            self.pinned.clear();
        }
        let at = (which % total as u64) as usize;
        if at >= self.writes.len() {
            let footer = self.footers.swap_remove(at - self.writes.len());
            let blocks = blocks_of_footer(&footer, self.control == Control::NoTombstonesInFooters);
            self.device_takes(blocks, outcome, which);
            return self.log.footer_done(footer, outcome);
        }
        let write = self.writes.swap_remove(at);
        self.device_takes(blocks_of(&write.header), outcome, which);
        match outcome {
            WriteOutcome::Written => self.note_written(&write.header),
            WriteOutcome::Failed => self.doubtful.extend(body_id(&write.header.body)),
            WriteOutcome::NotSent => {}
        }
        self.log.write_done(write, outcome);
    }

    fn device_takes(&mut self, blocks: Vec<BlockWrite>, outcome: WriteOutcome, which: u64) {
        match outcome {
            WriteOutcome::Written => self.disk.cached.extend(blocks),
            WriteOutcome::Failed => {
                self.disk.cached.extend(blocks.into_iter().filter(|block| (block.at.1 ^ which) & 1 == 0));
            }
            WriteOutcome::NotSent => {}
        }
    }

    fn note_written(&mut self, header: &RecordHeader) {
        match &header.body {
            RecordBody::Page(meta) => {
                self.completed.insert(meta.generation);
            }
            RecordBody::Tombstone(_) => {
                if let Some((n, when)) = self.asked.remove(&header.number) {
                    self.tombstones.push((n, header.number, when, header.place.segment));
                }
            }
            RecordBody::Void { .. } | RecordBody::Lost { .. } => {}
        }
    }

    fn intent(&mut self, fails: bool) {
        match self.log.next_intent() {
            None => {}
            Some(Intent::Footer(footer)) => {
                let segment = footer.footer.segment;
                assert!(!self.disk.cached.iter().any(|write| write.at.0 == segment) || self.disk.lies, "not durable");
                assert!(!self.writes.iter().any(|write| write.header.place.segment == segment), "written meanwhile");
                self.footers.push(footer);
            }
            Some(Intent::Clean(clean)) => {
                assert!(self.cleaning.is_none(), "two at a time");
                assert_eq!(self.log.by_life.first_key_value(), Some((&clean.life, &clean.segment)), "not the oldest");
                self.cleaning = Some(clean);
            }
            Some(Intent::Prepare(prepare)) => self.prepare(prepare, fails),
        }
    }

    fn prepare(&mut self, prepare: Prepare, fails: bool) {
        let Prepare { segment, life, fresh } = prepare;
        assert!(fresh || self.disk.segments().contains(&segment), "there is a file");
        assert!(!self.writes.iter().any(|write| write.header.place.segment == segment), "written meanwhile");
        assert!(!self.footers.iter().any(|footer| footer.footer.segment == segment), "ended meanwhile");
        assert!(!self.reads.iter().any(|read| read.entry.place.segment == segment), "read meanwhile");
        if fails {
            self.pinned.clear();
            self.disk.remove(segment);
            let outcome = if life % 2 == 0 { PrepareOutcome::Full } else { PrepareOutcome::Removed };
            if outcome == PrepareOutcome::Full && fresh && !self.disk.segments().is_empty() {
                self.segments_max = self.disk.segments().len() as u32;
            }
            return self.log.prepared(&prepare, outcome);
        }
        let header = SegmentHeader { log_id: LOG, segment, life };
        let write = BlockWrite { at: (segment, 0), block: header.encode() };
        if fresh {
            self.disk.remove(segment);
            self.disk.durable.insert(write.at, write.block);
        } else {
            self.disk.cached.push(write);
            self.disk.sync(segment);
        }
        self.log.prepared(&prepare, PrepareOutcome::Ready);
    }

    /// Copies a page, or reports if none is left and no copy is being written.
    fn clean(&mut self, which: u64, gives_up: bool) -> Result<(), String> {
        let Some(mut clean) = self.cleaning.take() else { return Ok(()) };
        if self.control == Control::NoCopies {
            clean.pages.clear();
        }
        let busy = self.writes.iter().any(|write| self.copies.contains(&write.header.number));
        if gives_up || (clean.pages.is_empty() && !busy) {
            if gives_up {
                self.pinned.clear();
            }
            self.log.cleaned(clean.segment, clean.life);
            return Ok(());
        }
        if !clean.pages.is_empty() {
            let (id, number) = clean.pages.swap_remove((which % clean.pages.len() as u64) as usize);
            if let Some(ticket) = self.log.hold(&id, number) {
                let meta = self.read(&ticket.entry)?;
                self.log.end_read(ticket);
                if let Some(write) = self.log.copy(&id, number, &meta) {
                    assert!(write.header.place.life > clean.life);
                    self.copies.insert(write.header.number);
                    self.writes.push(write);
                }
            }
        }
        self.cleaning = Some(clean);
        Ok(())
    }

    fn sync(&mut self, fails: bool) {
        let Some(ticket) = self.log.sync_plan().into_iter().next() else { return };
        let segment = ticket.segment;
        if fails {
            self.pinned.clear();
        } else {
            self.disk.sync(segment);
            let (durable, rest) = std::mem::take(&mut self.tombstones).into_iter().partition(|t| t.3 == segment);
            self.tombstones = rest;
            let durable: Vec<_> = durable;
            for (n, number, when, _) in durable {
                self.log.forgotten(&id(n), number);
                let known = self.forgotten_durably.entry(n).or_default();
                *known = (*known).max(when);
            }
        }
        self.log.sync_done(ticket, !fails);
    }

    fn end_read(&mut self, which: u64) -> Result<(), String> {
        if self.reads.is_empty() {
            return Ok(());
        }
        let ticket = self.reads.swap_remove((which % self.reads.len() as u64) as usize);
        let read = self.read(&ticket.entry);
        self.log.end_read(ticket);
        read.map(|_| ())
    }

    /// The record must stand there, whole.
    fn read(&self, entry: &Entry) -> Result<PageMeta, String> {
        let first = entry.place.offset / BLOCK_BYTES as u64;
        let header = RecordHeader::decode(&self.disk.read((entry.place.segment, first)), &LOG, entry.place);
        let header = header.map_err(|error| format!("{entry:?}: {error}"))?;
        let whole = blocks_of(&header).iter().all(|write| self.disk.read(write.at) == write.block);
        match header.body {
            RecordBody::Page(meta) if header.number == entry.number && whole => Ok(meta),
            _ => Err(format!("{entry:?} is not what is on the disk")),
        }
    }

    fn check_live(&mut self) -> Result<(), String> {
        for n in 0..IDS {
            let found = self.log.find(&id(n), self.now_ms);
            // A put that takes its place may be over already.
            self.check_pin(n, self.log.find(&id(n), 0).as_ref())?;
            let Some(entry) = found else { continue };
            let &(owner, planned, expires) = self.puts.get(&entry.generation).ok_or("a page that was never put")?;
            let forgotten = self.forgotten.get(&n).copied().unwrap_or(0);
            if owner != n || !self.completed.contains(&entry.generation) || planned < forgotten {
                return Err(format!("page {n}: found {entry:?}, forgotten at {forgotten}"));
            }
            if expires != entry.expires_unix_ms || (expires != 0 && expires <= self.now_ms) {
                return Err(format!("page {n}: found {entry:?} at {} ms, its time was {expires}", self.now_ms));
            }
            self.read(&entry)?;
        }
        self.check_quotas()?;
        self.check_scrub()?;
        match self.disk.segments().len() as u32 <= self.segments_max {
            true => Ok(()),
            false => Err("more segments than allowed".into()),
        }
    }

    fn check_pin(&mut self, n: u8, found: Option<&Entry>) -> Result<(), String> {
        let Some(&generation) = self.pinned.get(&n) else { return Ok(()) };
        let expires = self.puts[&generation].2;
        let over = expires != 0 && expires <= self.now_ms;
        if over || found.is_some_and(|entry| entry.generation != generation) {
            self.pinned.remove(&n);
        } else if found.is_none() {
            return Err(format!("page {n} was pinned as put {generation} and is gone"));
        }
        Ok(())
    }

    fn check_quotas(&self) -> Result<(), String> {
        for (&namespace, &quota) in &self.quotas {
            let of_it = |n: &u8| n % 2 == namespace;
            let entries = (0..IDS).filter(of_it).filter_map(|n| self.log.find(&id(n), 0));
            let bytes: u64 = entries.map(|entry| record_bytes(entry.payload_bytes as usize) as u64).sum();
            if bytes > quota && !self.quota_pinned.contains(&namespace) {
                return Err(format!("namespace {namespace} takes {bytes} bytes of {quota}"));
            }
        }
        Ok(())
    }

    /// Going through all pages meets each of them once, in order.
    fn check_scrub(&self) -> Result<(), String> {
        let (mut after, mut met) = (None, 0);
        while let Some(pages) = self.log.scrub_next(after, 3 * BLOCK_BYTES as u64) {
            for (id, entry) in pages {
                let at = (entry.place.life, entry.place.offset);
                if after.is_some_and(|after| after >= at) || self.log.find(&id, 0) != Some(entry) {
                    return Err(format!("{entry:?} was scrubbed after {after:?}"));
                }
                (after, met) = (Some(at), met + 1);
            }
        }
        match met == self.log.counts().pages {
            true => Ok(()),
            false => Err(format!("{met} pages were scrubbed of {}", self.log.counts().pages)),
        }
    }

    /// Pages that a crash must not lose, with their generation.
    fn safe(&self) -> BTreeMap<u8, u64> {
        let unsynced: BTreeSet<u32> = self.disk.cached.iter().map(|write| write.at.0).collect();
        let under_way = self.writes.iter().filter_map(|write| body_id(&write.header.body));
        let touched: BTreeSet<PageId> = under_way.chain(self.doubtful.iter().copied()).collect();
        (0..IDS)
            .filter(|n| !touched.contains(&id(*n)) && !self.tombstones.iter().any(|t| t.0 == *n))
            .filter_map(|n| Some((n, self.log.find(&id(n), self.now_ms)?)))
            .filter(|(_, entry)| !unsynced.contains(&entry.place.segment))
            .filter(|(n, entry)| !self.is_overtaken(*n, entry.generation))
            .map(|(n, entry)| (n, entry.generation))
            .collect()
    }

    /// A younger put of the page was over before an older one came to be found: after a crash the younger counts.
    fn is_overtaken(&self, n: u8, generation: u64) -> bool {
        let mut younger = self.puts.range(generation + 1..);
        younger.any(|(_, &(owner, _, expires))| owner == n && expires != 0 && expires <= self.now_ms)
    }

    /// With rot, a block that was durable is damaged: the header of a segment, or of a record.
    fn crash(&mut self, seed: u64, segments_max: u32, rot: Option<bool>) -> Result<(), String> {
        let mut dice = Dice(seed);
        let mut safe = if segments_max >= self.segments_max { self.safe() } else { BTreeMap::new() };
        let torn = self.control == Control::NoTombstonesInFooters;
        let footers = self.footers.iter().flat_map(|footer| blocks_of_footer(footer, torn));
        let under_way: Vec<BlockWrite> =
            self.writes.iter().flat_map(|write| blocks_of(&write.header)).chain(footers).collect();
        self.disk.crash(under_way.into_iter(), &mut dice);
        self.writes.clear();
        self.footers.clear();
        self.cleaning = None;
        self.reads.clear();
        self.tombstones.clear();
        self.asked.clear();
        self.pinned.clear();
        self.quota_pinned.clear();
        for n in 0..IDS {
            // What comes back of a forgetting that was not durable was not forgotten.
            self.forgotten.insert(n, self.forgotten_durably.get(&n).copied().unwrap_or(0));
        }
        let quotas_first = dice.roll(2) == 0;
        if quotas_first {
            // What was dropped for a quota comes back, and others may have to go for it.
            safe.clear();
        }
        if let Some(header) = rot {
            safe.clear();
            self.rotted += usize::from(self.disk.rot(header, &mut dice));
        }
        self.restore(segments_max, quotas_first, &mut dice)?;
        (0..IDS).try_for_each(|n| self.check_recovered(n, safe.get(&n).copied()))
    }

    fn restore(&mut self, segments_max: u32, quotas_first: bool, dice: &mut Dice) -> Result<(), String> {
        let Recovery { log, discard, mend, mut order, .. } = Recovery::new(config(segments_max), self.disk.headers());
        discard.into_iter().for_each(|segment| self.disk.remove(segment));
        for SegmentLife { segment, life } in mend {
            let header = SegmentHeader { log_id: LOG, segment, life };
            self.disk.durable.insert((segment, 0), header.encode());
        }
        self.log = log;
        self.segments_max = segments_max;
        let quotas = self.quotas.clone();
        let set_quotas = |log: &mut Log| {
            quotas.iter().for_each(|(&namespace, &bytes)| log.set_quota(NamespaceId([namespace; 32]), bytes));
        };
        if quotas_first {
            set_quotas(&mut self.log);
        }
        if self.control == Control::Backwards {
            // As if the order did not count.
            order.reverse();
            self.log.restoring.as_mut().expect("restoring").reverse();
        }
        for (at, &segment) in order.iter().enumerate() {
            assert_eq!(self.log.append(&meta(0, self.clock, 1, 0)), Ok(Append::Wait));
            assert_eq!(self.log.forget(&id(0)), Ok(Forget::Wait));
            if let Some(&other) = order.get(at + 1) {
                assert!(self.log.restore(self.disk.scan(other), self.now_ms).is_err(), "out of order");
                assert!(self.log.restored().is_err(), "not all are restored");
            }
            let scanned = self.disk.scan(segment);
            self.footers_found += u64::from(scanned.footer);
            self.log.restore(scanned, self.now_ms).map_err(|error| error.to_string())?;
            if dice.roll(2) == 0 {
                (0..IDS).try_for_each(|n| self.check_recovered(n, None))?;
                self.reads.extend(self.log.begin_read(&id(dice.roll(IDS.into()) as u8), self.now_ms));
            }
        }
        self.log.restored().map_err(|error| error.to_string())?;
        if !quotas_first {
            set_quotas(&mut self.log);
        }
        Ok(())
    }

    fn check_recovered(&mut self, n: u8, safe: Option<u64>) -> Result<(), String> {
        let durably = self.forgotten_durably.get(&n).copied().unwrap_or(0);
        let found = self.log.find(&id(n), self.now_ms);
        let quota_counts = self.quotas.values().any(|&quota| quota != u64::MAX);
        if !quota_counts && safe.is_some_and(|generation| found.is_none_or(|entry| entry.generation != generation)) {
            return Err(format!("page {n} was durable as put {safe:?} and is {found:?}"));
        }
        let Some(entry) = found else { return Ok(()) };
        match self.puts.get(&entry.generation) {
            Some(&(owner, planned, _)) if owner == n && planned >= durably => {}
            other => return Err(format!("page {n}: {entry:?} came back: put {other:?}, forgotten at {durably}")),
        }
        // A header without its whole payload is a miss when it is read.
        match self.read(&entry) {
            Ok(_) => {
                self.completed.insert(entry.generation);
            }
            Err(_) if safe == Some(entry.generation) => return Err(format!("page {n} was durable and is torn")),
            Err(_) => {
                self.log.drop_damaged(&id(n), entry.number);
                // An older record of it may be found yet; and after another crash the torn one again.
                self.doubtful.insert(id(n));
            }
        }
        Ok(())
    }
}

fn body_id(body: &RecordBody) -> Option<PageId> {
    match body {
        RecordBody::Page(meta) => Some(meta.id),
        RecordBody::Tombstone(id) => Some(*id),
        RecordBody::Void { .. } | RecordBody::Lost { .. } => None,
    }
}

fn run(steps: &[Step], control: Control) -> Result<Model, String> {
    let mut model = Model::new(control);
    for (at, step) in steps.iter().enumerate() {
        model.step(*step).map_err(|error| format!("step {at} {step:?}: {error}"))?;
    }
    Ok(model)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]
    #[test]
    fn no_crash_brings_back_what_was_forgotten_or_loses_what_was_synced(steps in steps()) {
        if let Err(problem) = run(&steps, Control::None) {
            prop_assert!(false, "{}", problem);
        }
    }
}

fn cases() -> impl Iterator<Item = Vec<Step>> {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    std::iter::from_fn(move || Some(steps().new_tree(&mut runner).unwrap().current()))
}

/// The negative controls: each of these the model must notice.
#[test]
fn a_world_that_is_broken_is_noticed() {
    for control in [Control::LyingDisk, Control::NoTombstonesInFooters, Control::NoCopies, Control::Backwards] {
        let noticed = cases().take(3000).position(|steps| run(&steps, control).is_err());
        println!("{control:?}: noticed in case {noticed:?}");
        assert!(noticed.is_some(), "{control:?}");
    }
}

/// Damage that is taken for something else brings pages back.
#[cfg(feature = "planted")]
#[test]
fn damage_that_is_trusted_is_noticed() {
    use crate::planted::{Bug, with};
    for bug in [Bug::HeadlessIsNothing, Bug::HolesAreTorn] {
        let noticed = cases().take(20_000).position(|steps| with(bug, || run(&steps, Control::None).is_err()));
        println!("{bug:?}: noticed in case {noticed:?}");
        assert!(noticed.is_some(), "{bug:?}");
    }
}

/// The model is worth something only if what it tests happens.
#[test]
fn the_model_cleans_and_ends_segments() {
    let (mut rescued, mut footers, mut rotted) = (0, 0, 0);
    for steps in cases().take(400) {
        let model = run(&steps, Control::None).unwrap();
        rescued += model.copies.len();
        footers += model.footers_found;
        rotted += model.rotted;
    }
    let happened = format!("{rescued} pages copied, {footers} footers found, {rotted} headers rotted");
    println!("{happened}");
    assert!(rescued > 20 && footers > 50 && rotted > 50, "{happened}");
}
