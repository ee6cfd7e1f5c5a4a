//! Tests of the log against a model, on a disk with a volatile cache.
//!
//! Fault model:
//! - The device writes block by block. A completed write is read back at once, and is durable only
//!   after a sync of its segment.
//! - A crash keeps any subset of the unsynced blocks, of completed and uncompleted writes, and may
//!   replace any of them by garbage. Durable blocks stay.
//! - A failed write has written any subset of its blocks.
//! - Preparing a segment may fail in any step. A copy-forward may end early.
//! - While the log is closed, the header of a segment may rot, or the header of a record that a
//!   later record calls durable. Then pages may be lost, but no forgotten page may come back.
//!
//! [`Model`] lists the properties that must hold.

use super::*;
use disk::{BlockWrite, Disk, LOG, Random, SEGMENT, blocks_of, blocks_of_footer, config};
use larder_format::disk::{LogId, RecordBody, SegmentHeader, record_bytes};
use larder_format::footer::RecordSummary;
use larder_format::{PageKey, PageMeta};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

mod bounds;
mod cases;
mod checks;
mod controls;
mod disk;
mod eviction;
mod fallback;
mod floors;

const IDS: u8 = 12;

/// A page in one of two namespaces, by the parity of `n`. Each namespace has sequences of three
/// pages.
fn id(n: u8) -> PageId {
    PageId { namespace: NamespaceId([n % 2; 32]), key: PageKey([n; 32]) }
}

fn meta(n: u8, generation: u64, blocks: u64, expires_unix_ms: u64) -> PageMeta {
    let bytes = (blocks * BLOCK_BYTES as u64) as u32;
    let chunk_crcs = vec![0; PageMeta::chunks_of(bytes)];
    let position = u32::from(n / 2 % 3);
    let parent = if position == 0 { PageKey::NONE } else { PageKey([n - 2; 32]) };
    PageMeta {
        id: id(n),
        parent,
        position,
        generation,
        expires_unix_ms,
        part_bytes: vec![bytes],
        chunk_crcs,
        token_ids: Vec::new(),
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Put { id: u8, blocks: u64, ttl_s: u64 },
    Forget { id: u8 },
    Complete { which: u64, outcome: u8 },
    Intent { fails: bool },
    Sync { fails: bool },
    BeginRead { id: u8 },
    EndRead { which: u64 },
    Touch { id: u8 },
    Damage { id: u8 },
    CopyForward { which: u64, gives_up: bool },
    Pin { id: u8, pin: u8 },
    Quota { namespace: u8, blocks: u64 },
    Floors { parts: [u64; 2] },
    Expire { seconds: u64 },
    Crash { seed: u64, segments_max: u32 },
    Rot { seed: u64, header: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        24 => (0..IDS, 1u64..5, 0u64..40).prop_map(|(id, blocks, ttl_s)| Step::Put { id, blocks, ttl_s }),
        5 => (0..IDS).prop_map(|id| Step::Forget { id }),
        34 => (any::<u64>(), 0u8..64).prop_map(|(which, outcome)| Step::Complete { which, outcome }),
        14 => (0u8..24).prop_map(|n| Step::Intent { fails: n == 0 }),
        10 => (0u8..40).prop_map(|n| Step::Sync { fails: n == 0 }),
        6 => (0..IDS).prop_map(|id| Step::BeginRead { id }),
        6 => any::<u64>().prop_map(|which| Step::EndRead { which }),
        2 => (0..IDS).prop_map(|id| Step::Touch { id }),
        1 => (0..IDS).prop_map(|id| Step::Damage { id }),
        12 => (any::<u64>(), 0u8..30).prop_map(|(which, n)| Step::CopyForward { which, gives_up: n == 0 }),
        3 => (0..IDS, 0u8..3).prop_map(|(id, pin)| Step::Pin { id, pin }),
        1 => (0u8..2, 0u64..40).prop_map(|(namespace, blocks)| Step::Quota { namespace, blocks }),
        1 => any::<[u8; 2]>().prop_map(|parts| Step::Floors { parts: parts.map(|n| u64::from(n % 48)) }),
        2 => (1u64..4).prop_map(|seconds| Step::Expire { seconds }),
        2 => (any::<u64>(), 2u32..8).prop_map(|(seed, segments_max)| Step::Crash { seed, segments_max }),
        1 => (any::<u64>(), any::<bool>()).prop_map(|(seed, header)| Step::Rot { seed, header }),
    ];
    prop::collection::vec(step, 1..500)
}

/// Negative controls: faults of the environment that the model must detect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Control {
    None,
    IgnoredSyncs,
    /// Footers omit tombstones.
    NoTombstonesInFooters,
    NoCopies,
    /// Segments are recovered oldest first.
    Backwards,
}

/// The history of requests, and the properties that the log must have:
/// - Before a crash, a page is found only if it was put, its write completed, it has not expired,
///   and it was not forgotten since. A hard-pinned page is found, unless a failure came between.
/// - After a crash, from the first recovered segment on, a page is found only if it was put, and
///   not before a forget that was reported durable. After recovery, every page is found that was
///   visible and synced, and not changed since.
/// - A record that is being read stays in place.
/// - The number of segments and the bytes of each namespace keep their limits.
struct Model {
    log: Log,
    disk: Disk,
    control: Control,
    segments_max: u32,
    clock: u64,
    now_ms: u64,
    /// By generation: page, time of the plan, expiry.
    puts: BTreeMap<u64, (u8, u64, u64)>,
    completed: BTreeSet<u64>,
    /// Time of the last forget of a page, and of the last durable one.
    forgotten: BTreeMap<u8, u64>,
    forgotten_durably: BTreeMap<u8, u64>,
    writes: Vec<PlannedWrite>,
    footers: Vec<PlannedFooter>,
    copying: Option<CopyForward>,
    /// Another [`Log::reclaim_step`] is due.
    reclaiming: bool,
    /// Tombstones written and not synced: page, record number, time of the forget, segment.
    tombstones: Vec<(u8, u64, u64, u32)>,
    /// Tombstones in flight, by record number: page, time of the forget.
    tombstones_in_flight: BTreeMap<u64, (u8, u64)>,
    reads: Vec<ReadTicket>,
    /// Pages with a failed write or a dropped record. After a crash that record may hide an older,
    /// whole one.
    doubtful: BTreeSet<PageId>,
    /// Hard-pinned pages with their generation. Cleared by every failure.
    pinned: BTreeMap<u8, u64>,
    quotas: BTreeMap<u8, u64>,
    /// Namespaces with a page pinned since their quota was set. They may exceed it.
    quota_pinned: BTreeSet<u8>,
    copies: BTreeSet<u64>,
    /// Numbers of copies that the last crash left beside their originals. They may be torn.
    unverified: BTreeSet<u64>,
    footers_found: u64,
    rotted: usize,
}

fn record_of(log: &Log, id: &PageId) -> Option<RecordRef> {
    let slot = log.index.entries.find(id)?;
    Some(RecordRef { number: log.index.entries.get(slot).number, slot })
}

impl Model {
    fn new(control: Control) -> Model {
        Model {
            log: Log::new(config(5)),
            disk: Disk { ignores_syncs: control == Control::IgnoredSyncs, ..Disk::default() },
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
            copying: None,
            reclaiming: false,
            tombstones: Vec::new(),
            tombstones_in_flight: BTreeMap::new(),
            reads: Vec::new(),
            doubtful: BTreeSet::new(),
            pinned: BTreeMap::new(),
            quotas: BTreeMap::new(),
            quota_pinned: BTreeSet::new(),
            copies: BTreeSet::new(),
            unverified: BTreeSet::new(),
            footers_found: 0,
            rotted: 0,
        }
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        self.clock += 1;
        if self.clock.is_multiple_of(2) {
            (0..16).for_each(|_| self.reclaiming = self.reclaiming && self.log.reclaim_step());
            self.drop_torn_copies();
        }
        match step {
            Step::Put { id, blocks, ttl_s } => self.put(id, blocks, ttl_s),
            Step::Forget { id } => self.forget(id),
            Step::Complete { which, outcome } => self.complete(which, outcome),
            Step::Intent { fails } => self.intent(fails),
            Step::Sync { fails } => self.sync(fails),
            Step::BeginRead { id: n } => self.reads.extend(self.log.entries().begin_read(&id(n), self.now_ms)),
            Step::EndRead { which } => self.end_read(which)?,
            Step::Touch { id: n } => self.log.entries().touch(&id(n)),
            Step::Damage { id: n } => {
                if let Some(record) = record_of(&self.log, &id(n)) {
                    self.log.drop_damaged(record);
                    self.doubtful.insert(id(n));
                    self.pinned.remove(&n);
                }
            }
            Step::CopyForward { which, gives_up } => self.copy_forward(which, gives_up)?,
            Step::Pin { id, pin } => self.pin(id, pin),
            Step::Quota { namespace, blocks } => self.quota(namespace, blocks),
            Step::Floors { parts } => {
                let weights = (0..2).map(|n| (NamespaceId([n; 32]), parts[usize::from(n)]));
                let weights: Vec<_> = weights.filter(|(_, weight)| *weight > 0).collect();
                let floors = SharedFloors::default();
                floors.change(&[], &weights, 32);
                self.log.share_floors(Arc::new(floors));
            }
            Step::Expire { seconds } => {
                self.now_ms += seconds * 1000;
                let entries = self.log.entries().clone();
                let mut sweep = ExpirySweep::default();
                sweep.begin_part(&entries, self.now_ms);
                // One of them: the others stay in the index.
                let expired = sweep.next_step(&entries, self.now_ms).unwrap_or_default();
                self.log.drop_expired(&expired[..expired.len().min(1)]);
            }
            Step::Crash { seed, segments_max } => self.crash(seed, segments_max, None)?,
            Step::Rot { seed, header } => self.crash(seed, self.segments_max, Some(header))?,
        }
        self.check_live()
    }

    fn put(&mut self, n: u8, blocks: u64, ttl_s: u64) {
        let generation = self.clock;
        let expires = if ttl_s < 10 { self.now_ms + ttl_s * 1000 } else { 0 };
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
                self.tombstones_in_flight.insert(tombstone.header.number, (n, self.clock));
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
        // Without an open segment, or after the next one failed, the log has no target for copies.
        let none_left =
            self.log.segments.free_segment().is_none() && self.log.segments.len() >= self.segments_max as usize;
        if matches!(self.log.next_segment, NextSegment::None) && none_left {
            return;
        }
        if let (Pin::Hard, Some(_), Some(entry)) = (pin, self.log.segments.open(), self.log.find(&id(n), self.now_ms)) {
            self.pinned.insert(n, entry.generation);
        }
    }

    fn quota(&mut self, namespace: u8, blocks: u64) {
        let bytes = if blocks == 0 { u64::MAX } else { blocks * BLOCK_BYTES as u64 };
        self.quotas.insert(namespace, bytes);
        if self.log.retention.pinned_bytes() == 0 {
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
                if let Some((n, when)) = self.tombstones_in_flight.remove(&header.number) {
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
                assert!(
                    !self.disk.cached.iter().any(|write| write.at.0 == segment) || self.disk.ignores_syncs,
                    "not durable"
                );
                assert!(!self.writes.iter().any(|write| write.header.place.segment == segment), "written meanwhile");
                self.footers.push(footer);
            }
            Some(Intent::CopyForward(work)) => {
                assert!(self.copying.is_none(), "two at a time");
                assert_eq!(
                    self.log.segments.in_epoch_order(..).next(),
                    Some((work.epoch, work.segment)),
                    "not the oldest"
                );
                self.copying = Some(work);
            }
            Some(Intent::Reclaim) => self.reclaiming = true,
            Some(Intent::Prepare(prepare)) => self.prepare(prepare, fails),
        }
    }

    fn prepare(&mut self, prepare: Prepare, fails: bool) {
        let Prepare { segment, epoch, fresh } = prepare;
        assert!(fresh || self.disk.segments().contains(&segment), "there is a file");
        assert!(!self.writes.iter().any(|write| write.header.place.segment == segment), "written meanwhile");
        assert!(!self.footers.iter().any(|footer| footer.footer.segment == segment), "ended meanwhile");
        assert!(!self.reads.iter().any(|read| read.entry.place.segment == segment), "read meanwhile");
        if fails {
            self.pinned.clear();
            self.disk.remove(segment);
            let outcome = if epoch % 2 == 0 { PrepareOutcome::Full } else { PrepareOutcome::Removed };
            if outcome == PrepareOutcome::Full && fresh && !self.disk.segments().is_empty() {
                self.segments_max = self.disk.segments().len() as u32;
            }
            return self.log.prepared(&prepare, outcome);
        }
        let header = SegmentHeader { log_id: LOG, segment, epoch };
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

    /// Copies a page, or ends the copy-forward if no page is left and no copy is in flight.
    fn copy_forward(&mut self, which: u64, gives_up: bool) -> Result<(), String> {
        let Some(mut work) = self.copying.take() else { return Ok(()) };
        if self.control == Control::NoCopies {
            work.pages.clear();
        }
        let busy = self.writes.iter().any(|write| self.copies.contains(&write.header.number));
        if gives_up || (work.pages.is_empty() && !busy) {
            if gives_up {
                self.pinned.clear();
            }
            self.log.copy_forward_done(work.segment, work.epoch);
            return Ok(());
        }
        if !work.pages.is_empty() {
            let record = work.pages.swap_remove((which % work.pages.len() as u64) as usize);
            if let Some(ticket) = self.log.entries().begin_maintenance_read(record) {
                let meta = self.read(&ticket.entry)?;
                self.log.end_read(ticket);
                if let Some(write) = self.log.plan_copy(record, &meta) {
                    assert!(write.header.place.epoch > work.epoch);
                    self.copies.insert(write.header.number);
                    self.writes.push(write);
                }
            }
        }
        self.copying = Some(work);
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

    /// Reads a record from the disk, which must have all of it.
    fn read(&self, entry: &Entry) -> Result<PageMeta, String> {
        let first = entry.place.offset / BLOCK_BYTES as u64;
        let header = RecordHeader::decode(&self.disk.read((entry.place.segment, first)), &LOG, entry.place);
        let header = header.map_err(|error| format!("{entry:?}: {error}"))?;
        let whole = blocks_of(&header).iter().all(|write| self.disk.read(write.at) == write.block);
        match header.body {
            RecordBody::Page(meta) if header.number == entry.number && whole => Ok(meta),
            _ => Err(format!("{entry:?} differs from the record on the disk")),
        }
    }

    /// Pages that a crash must not lose, with their generations.
    fn safe(&self) -> BTreeMap<u8, u64> {
        let unsynced: BTreeSet<u32> = self.disk.cached.iter().map(|write| write.at.0).collect();
        let is_copy = |write: &PlannedWrite| self.copies.contains(&write.header.number);
        let under_way = self.writes.iter().filter(|write| !is_copy(write));
        let under_way = under_way.filter_map(|write| body_id(&write.header.body));
        let touched: BTreeSet<PageId> = under_way.chain(self.doubtful.iter().copied()).collect();
        (0..IDS)
            .filter(|n| !touched.contains(&id(*n)) && !self.tombstones.iter().any(|t| t.0 == *n))
            .filter_map(|n| Some((n, self.log.find(&id(n), self.now_ms)?)))
            .filter(|(n, entry)| {
                !unsynced.contains(&entry.place.segment) || self.has_durable_original(*n, entry, &unsynced)
            })
            .filter(|(n, entry)| !self.is_overtaken(*n, entry.generation))
            .map(|(n, entry)| (n, entry.generation))
            .collect()
    }

    /// Returns `true` if a crash leaves the original of an unsynced copy, and no younger put.
    fn has_durable_original(&self, n: u8, copy: &Entry, unsynced: &BTreeSet<u32>) -> bool {
        let record = record_of(&self.log, &id(n));
        let original = record.and_then(|record| self.log.index.fallback(record.slot));
        original.is_some_and(|original| !unsynced.contains(&original.segment))
            && !self.puts.range(copy.generation + 1..).any(|(_, &(owner, ..))| owner == n)
    }

    /// Returns `true` if a younger put of the page has expired. After a crash the younger put
    /// counts, so the page is a miss.
    fn is_overtaken(&self, n: u8, generation: u64) -> bool {
        let mut younger = self.puts.range(generation + 1..);
        younger.any(|(_, &(owner, _, expires))| owner == n && expires != 0 && expires <= self.now_ms)
    }

    /// Crashes and recovers. With `rot`, a durable block is damaged meanwhile: the header of a
    /// segment, or of a record.
    fn crash(&mut self, seed: u64, segments_max: u32, rot: Option<bool>) -> Result<(), String> {
        let mut random = Random(seed);
        let mut safe = if segments_max >= self.segments_max { self.safe() } else { BTreeMap::new() };
        let torn = self.control == Control::NoTombstonesInFooters;
        let footers = self.footers.iter().flat_map(|footer| blocks_of_footer(footer, torn));
        let under_way: Vec<BlockWrite> =
            self.writes.iter().flat_map(|write| blocks_of(&write.header)).chain(footers).collect();
        self.disk.crash(under_way.into_iter(), &mut random);
        self.writes.clear();
        self.footers.clear();
        self.copying = None;
        self.reclaiming = false;
        self.reads.clear();
        self.tombstones.clear();
        self.tombstones_in_flight.clear();
        self.pinned.clear();
        self.quota_pinned.clear();
        for n in 0..IDS {
            // A forget that was not durable is undone by the crash.
            self.forgotten.insert(n, self.forgotten_durably.get(&n).copied().unwrap_or(0));
        }
        let quotas_first = random.below(2) == 0;
        if quotas_first {
            // Pages that were dropped for a quota come back, and may displace others.
            safe.clear();
        }
        if let Some(header) = rot {
            safe.clear();
            self.rotted += usize::from(self.disk.rot(header, &mut random));
        }
        self.recover(segments_max, quotas_first, &mut random)?;
        (0..IDS).try_for_each(|n| self.check_recovered(n, safe.get(&n).copied()))
    }

    fn recover(&mut self, segments_max: u32, quotas_first: bool, random: &mut Random) -> Result<(), String> {
        let Recovery { log, discard, header_repairs, mut scan_order, .. } =
            Recovery::new(config(segments_max), self.disk.headers());
        discard.into_iter().for_each(|segment| self.disk.remove(segment));
        for SegmentEpoch { segment, epoch } in header_repairs {
            let header = SegmentHeader { log_id: LOG, segment, epoch };
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
            scan_order.reverse();
            self.log.recovery.as_mut().expect("recovering").reverse();
        }
        for (at, &segment) in scan_order.iter().enumerate() {
            assert_eq!(self.log.append(&meta(0, self.clock, 1, 0)), Ok(Append::Wait));
            assert_eq!(self.log.forget(&id(0)), Ok(Forget::Wait));
            if let Some(&other) = scan_order.get(at + 1) {
                assert!(self.log.recover_segment(self.disk.scan(other), self.now_ms).is_err(), "out of order");
                assert!(self.log.finish_recovery().is_err(), "not all are restored");
            }
            let scanned = self.disk.scan(segment);
            self.footers_found += u64::from(scanned.footer);
            self.log.recover_segment(scanned, self.now_ms).map_err(|error| error.to_string())?;
            if random.below(2) == 0 {
                (0..IDS).try_for_each(|n| self.check_recovered(n, None))?;
                self.reads.extend(self.log.entries().begin_read(&id(random.below(IDS.into()) as u8), self.now_ms));
            }
        }
        self.log.finish_recovery().map_err(|error| error.to_string())?;
        let records = (0..IDS).filter_map(|n| record_of(&self.log, &id(n)));
        let copies = records.filter_map(|record| self.log.index.fallback(record.slot));
        self.unverified = copies.map(|copy| copy.number).collect();
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
        // Recovery accepts a header without its payload. The read then finds the damage.
        match self.read(&entry) {
            Ok(_) => {
                self.completed.insert(entry.generation);
            }
            Err(_) if safe == Some(entry.generation) => return Err(format!("page {n} was durable and is torn")),
            Err(_) => {
                if let Some(record) = record_of(&self.log, &id(n)) {
                    self.log.drop_damaged(record);
                }
                // Recovery may still find an older record of the page. Another crash brings the
                // torn one back.
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
    fn crashes_revive_no_forgotten_page_and_lose_no_synced_page(steps in steps()) {
        if let Err(problem) = run(&steps, Control::None) {
            prop_assert!(false, "{}", problem);
        }
    }
}
