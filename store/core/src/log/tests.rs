//! The log against a model, on a disk that forgets.
//!
//! Fault model. Blocks are written one by one. A completed write is read back at once, but is durable only after a sync
//! of its segment. A crash keeps any subset of the blocks that were not synced, whether their write had completed or not,
//! and may leave garbage in place of any of them. What was durable stays. Writes may fail, having written any subset.
//! Preparing a segment may fail at any step.
//!
//! What must hold: see [`Model`].

use super::*;
use larder_format::NamespaceId;
use larder_format::disk::{LogId, SegmentHeader};
use proptest::prelude::*;
use std::collections::BTreeSet;

const LOG: LogId = [7; 16];
const BLOCKS: u64 = 16;
const SEGMENT: u64 = BLOCKS * BLOCK_BYTES as u64;
const IDS: u8 = 10;

type Block = Vec<u8>;
type Address = (u32, u64);

/// One block on its way.
#[derive(Clone)]
struct BlockWrite {
    at: Address,
    block: Block,
}

/// A disk with a volatile cache.
#[derive(Default)]
struct Disk {
    durable: BTreeMap<Address, Block>,
    /// Completed and not synced, oldest first.
    cached: Vec<BlockWrite>,
    /// The negative control: syncs do nothing.
    lies: bool,
}

impl Disk {
    fn read(&self, at: Address) -> Block {
        let cached = self.cached.iter().rev().find(|write| write.at == at).map(|write| &write.block);
        cached.or(self.durable.get(&at)).cloned().unwrap_or_else(|| vec![0; BLOCK_BYTES])
    }

    fn sync(&mut self, segment: u32) {
        if self.lies {
            return;
        }
        let (synced, rest) = std::mem::take(&mut self.cached).into_iter().partition(|write| write.at.0 == segment);
        self.cached = rest;
        let synced: Vec<BlockWrite> = synced;
        self.durable.extend(synced.into_iter().map(|write| (write.at, write.block)));
    }

    fn remove(&mut self, segment: u32) {
        self.cached.retain(|write| write.at.0 != segment);
        self.durable.retain(|at, _| at.0 != segment);
    }

    fn segments(&self) -> BTreeSet<u32> {
        self.durable.keys().chain(self.cached.iter().map(|write| &write.at)).map(|at| at.0).collect()
    }

    fn crash(&mut self, under_way: impl Iterator<Item = BlockWrite>, dice: &mut Dice) {
        let unsynced: Vec<BlockWrite> = self.cached.drain(..).chain(under_way).collect();
        for mut write in unsynced {
            match dice.roll(4) {
                0 => continue,
                1 => write.block[BLOCK_BYTES / 2..].fill(0xa5),
                _ => {}
            }
            self.durable.insert(write.at, write.block);
        }
    }
}

/// Repeatable chance.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % sides
    }
}

fn id(n: u8) -> PageId {
    PageId { namespace: NamespaceId([1; 32]), key: PageKey([n; 32]) }
}

fn meta(n: u8, generation: u64, blocks: u64) -> PageMeta {
    let bytes = (blocks * BLOCK_BYTES as u64) as u32;
    let chunk_crcs = vec![0; PageMeta::chunks_of(bytes)];
    PageMeta { id: id(n), parent: PageKey::NONE, position: 0, generation, part_bytes: vec![bytes], chunk_crcs }
}

/// A payload block that names its put.
fn payload_block(generation: u64, index: u64) -> Block {
    let mut block = vec![0xee; BLOCK_BYTES];
    block[..8].copy_from_slice(&generation.to_le_bytes());
    block[8..16].copy_from_slice(&index.to_le_bytes());
    block
}

fn blocks_of(header: &RecordHeader) -> Vec<BlockWrite> {
    let first = header.place.offset / BLOCK_BYTES as u64;
    let mut writes = vec![BlockWrite { at: (header.place.segment, first), block: header.encode(&LOG) }];
    if let RecordBody::Page(meta) = &header.body {
        let payload = (meta.payload_bytes() / BLOCK_BYTES) as u64;
        writes.extend((0..payload).map(|index| BlockWrite {
            at: (header.place.segment, first + 1 + index),
            block: payload_block(meta.generation, index),
        }));
    }
    writes
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Put { id: u8, blocks: u64 },
    Forget { id: u8 },
    Complete { which: u64, outcome: u8 },
    Intent { fails: bool },
    Sync { fails: bool },
    BeginRead { id: u8 },
    EndRead { which: u64 },
    Damage { id: u8 },
    Crash { seed: u64, segments_max: u32 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..IDS, 1u64..5).prop_map(|(id, blocks)| Step::Put { id, blocks }),
        3 => (0..IDS).prop_map(|id| Step::Forget { id }),
        14 => (any::<u64>(), 0u8..32).prop_map(|(which, outcome)| Step::Complete { which, outcome }),
        6 => (0u8..12).prop_map(|n| Step::Intent { fails: n == 0 }),
        5 => (0u8..20).prop_map(|n| Step::Sync { fails: n == 0 }),
        3 => (0..IDS).prop_map(|id| Step::BeginRead { id }),
        3 => any::<u64>().prop_map(|which| Step::EndRead { which }),
        1 => (0..IDS).prop_map(|id| Step::Damage { id }),
        1 => (any::<u64>(), 2u32..6).prop_map(|(seed, segments_max)| Step::Crash { seed, segments_max }),
    ];
    prop::collection::vec(step, 1..400)
}

/// What was asked of the log, and what it must answer:
/// - before a crash: never a page that was not put, whose write has not completed, or that was forgotten since;
/// - after a crash: never a page that was not put, or that was put before a forgetting that was reported durable; and
///   every page that could be found, was synced, and was not touched since;
/// - a page that is being read stays where it is;
/// - there are never more segments than allowed.
struct Model {
    log: Log,
    disk: Disk,
    segments_max: u32,
    clock: u64,
    /// By generation: whose put, and when it was planned.
    puts: BTreeMap<u64, (u8, u64)>,
    completed: BTreeSet<u64>,
    /// When a page was last forgotten, and when so for good.
    forgotten: BTreeMap<u8, u64>,
    forgotten_durably: BTreeMap<u8, u64>,
    writes: Vec<PlannedWrite>,
    /// Tombstones written and not synced: page, number, when asked, segment.
    tombstones: Vec<(u8, u64, u64, u32)>,
    /// When each tombstone under way was asked for, by record number.
    asked: BTreeMap<u64, (u8, u64)>,
    reads: Vec<ReadTicket>,
    /// Pages of which a write failed or a record was dropped: after a crash it may stand before an older, whole one.
    doubtful: BTreeSet<PageId>,
}

fn config(segments_max: u32) -> LogConfig {
    LogConfig { segment_bytes: SEGMENT, segments_max, hash_seed: 5 }
}

impl Model {
    fn new(lies: bool) -> Model {
        Model {
            log: Log::new(config(4)),
            disk: Disk { lies, ..Disk::default() },
            segments_max: 4,
            clock: 0,
            puts: BTreeMap::new(),
            completed: BTreeSet::new(),
            forgotten: BTreeMap::new(),
            forgotten_durably: BTreeMap::new(),
            writes: Vec::new(),
            tombstones: Vec::new(),
            asked: BTreeMap::new(),
            reads: Vec::new(),
            doubtful: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        self.clock += 1;
        match step {
            Step::Put { id, blocks } => self.put(id, blocks),
            Step::Forget { id } => self.forget(id),
            Step::Complete { which, outcome } => self.complete(which, outcome),
            Step::Intent { fails } => self.intent(fails),
            Step::Sync { fails } => self.sync(fails),
            Step::BeginRead { id: n } => self.reads.extend(self.log.begin_read(&id(n))),
            Step::EndRead { which } => self.end_read(which)?,
            Step::Damage { id: n } => {
                if let Some(number) = self.log.find(&id(n)).map(|entry| entry.number) {
                    self.log.drop_damaged(&id(n), number);
                    self.doubtful.insert(id(n));
                }
            }
            Step::Crash { seed, segments_max } => self.crash(seed, segments_max)?,
        }
        self.check_live()
    }

    fn put(&mut self, n: u8, blocks: u64) {
        let generation = self.clock;
        if let Append::Write(write) = self.log.append(&meta(n, generation, blocks)).expect("fits") {
            self.puts.insert(generation, (n, self.clock));
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
                self.forgotten.insert(n, self.clock);
                self.asked.insert(tombstone.header.number, (n, self.clock));
                self.writes.push(tombstone);
            }
            Forget::Wait => {}
        }
    }

    fn complete(&mut self, which: u64, outcome: u8) {
        if self.writes.is_empty() {
            return;
        }
        let write = self.writes.swap_remove((which % self.writes.len() as u64) as usize);
        let blocks = blocks_of(&write.header);
        let outcome = match outcome {
            0 => WriteOutcome::Failed,
            1 => WriteOutcome::NotSent,
            _ => WriteOutcome::Written,
        };
        match outcome {
            WriteOutcome::Written => {
                self.disk.cached.extend(blocks);
                self.note_written(&write.header);
            }
            WriteOutcome::Failed => {
                self.disk.cached.extend(blocks.into_iter().filter(|block| (block.at.1 ^ which) & 1 == 0));
                self.doubtful.extend(body_id(&write.header.body));
            }
            WriteOutcome::NotSent => {}
        }
        self.log.write_done(write, outcome);
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
            RecordBody::Seal => {}
        }
    }

    fn intent(&mut self, fails: bool) {
        match self.log.next_intent() {
            None => {}
            Some(Intent::Write(write)) => self.writes.push(write),
            Some(Intent::Prepare(prepare)) => {
                let Prepare { segment, life, fresh } = prepare;
                assert_ne!(fresh, self.disk.segments().contains(&segment), "fresh means that there is no file");
                assert!(!self.writes.iter().any(|write| write.header.place.segment == segment), "written meanwhile");
                assert!(!self.reads.iter().any(|read| read.entry.place.segment == segment), "read meanwhile");
                if fails {
                    self.disk.remove(segment);
                    if fresh && !self.disk.segments().is_empty() {
                        self.segments_max = self.disk.segments().len() as u32;
                    }
                    return self.log.prepared(&prepare, PrepareOutcome::Removed);
                }
                let header = SegmentHeader { log_id: LOG, segment, life };
                self.disk.cached.push(BlockWrite { at: (segment, 0), block: header.encode() });
                self.disk.sync(segment);
                self.log.prepared(&prepare, PrepareOutcome::Ready);
            }
        }
    }

    fn sync(&mut self, fails: bool) {
        let Some(ticket) = self.log.sync_plan().into_iter().next() else { return };
        let segment = ticket.segment;
        if !fails {
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
        read
    }

    /// The record must stand there, whole.
    fn read(&self, entry: &Entry) -> Result<(), String> {
        let first = entry.place.offset / BLOCK_BYTES as u64;
        let header = RecordHeader::decode(&self.disk.read((entry.place.segment, first)), &LOG, entry.place);
        let header = header.map_err(|error| format!("{entry:?}: {error}"))?;
        let whole = blocks_of(&header).iter().all(|write| self.disk.read(write.at) == write.block);
        match header.number == entry.number && whole {
            true => Ok(()),
            false => Err(format!("{entry:?} is not what is on the disk")),
        }
    }

    fn check_live(&self) -> Result<(), String> {
        for n in 0..IDS {
            let Some(entry) = self.log.find(&id(n)) else { continue };
            let &(owner, planned) = self.puts.get(&entry.generation).ok_or("a page that was never put")?;
            let forgotten = self.forgotten.get(&n).copied().unwrap_or(0);
            if owner != n || !self.completed.contains(&entry.generation) || planned < forgotten {
                return Err(format!("page {n}: found {entry:?}, forgotten at {forgotten}"));
            }
            self.read(entry)?;
        }
        match self.disk.segments().len() as u32 <= self.segments_max {
            true => Ok(()),
            false => Err("more segments than allowed".into()),
        }
    }

    /// Pages that a crash must not lose, with their generation.
    fn safe(&self) -> BTreeMap<u8, u64> {
        let unsynced: BTreeSet<u32> = self.disk.cached.iter().map(|write| write.at.0).collect();
        let under_way = self.writes.iter().filter_map(|write| body_id(&write.header.body));
        let touched: BTreeSet<PageId> = under_way.chain(self.doubtful.iter().copied()).collect();
        (0..IDS)
            .filter(|n| !touched.contains(&id(*n)) && !self.tombstones.iter().any(|t| t.0 == *n))
            .filter_map(|n| Some((n, self.log.find(&id(n))?)))
            .filter(|(_, entry)| !unsynced.contains(&entry.place.segment))
            .map(|(n, entry)| (n, entry.generation))
            .collect()
    }

    fn crash(&mut self, seed: u64, segments_max: u32) -> Result<(), String> {
        let safe = if segments_max >= self.segments_max { self.safe() } else { BTreeMap::new() };
        let under_way: Vec<BlockWrite> = self.writes.iter().flat_map(|write| blocks_of(&write.header)).collect();
        self.disk.crash(under_way.into_iter(), &mut Dice(seed));
        self.recover(segments_max, seed);
        for n in 0..IDS {
            self.check_recovered(n, safe.get(&n).copied())?;
        }
        Ok(())
    }

    fn recover(&mut self, segments_max: u32, seed: u64) {
        let mut numbers: Vec<u32> = self.disk.segments().into_iter().collect();
        let turn = (seed % numbers.len().max(1) as u64) as usize;
        numbers.rotate_left(turn);
        let scanned = numbers.into_iter().map(|segment| scan(&self.disk, segment)).collect();
        let Recovered { log, discard, .. } = recover(config(segments_max), scanned);
        discard.into_iter().for_each(|segment| self.disk.remove(segment));
        self.log = log;
        self.segments_max = segments_max;
        self.writes.clear();
        self.reads.clear();
        self.tombstones.clear();
        self.asked.clear();
    }

    fn check_recovered(&mut self, n: u8, safe: Option<u64>) -> Result<(), String> {
        let durably = self.forgotten_durably.get(&n).copied().unwrap_or(0);
        // What came back of a forgetting that was not durable was not forgotten.
        self.forgotten.insert(n, durably);
        let found = self.log.find(&id(n)).copied();
        if safe.is_some_and(|generation| found.is_none_or(|entry| entry.generation != generation)) {
            return Err(format!("page {n} was durable as put {safe:?} and is {found:?}"));
        }
        let Some(entry) = found else { return Ok(()) };
        match self.puts.get(&entry.generation) {
            Some(&(owner, planned)) if owner == n && planned >= durably => {}
            other => return Err(format!("page {n}: {entry:?} came back: put {other:?}, forgotten at {durably}")),
        }
        // A header without its whole payload is a miss when it is read.
        match self.read(&entry) {
            Ok(()) => {
                self.completed.insert(entry.generation);
            }
            Err(_) if safe.is_some() => return Err(format!("page {n} was durable and is torn")),
            Err(_) => {
                self.log.drop_damaged(&id(n), entry.number);
            }
        }
        Ok(())
    }
}

fn body_id(body: &RecordBody) -> Option<PageId> {
    match body {
        RecordBody::Page(meta) => Some(meta.id),
        RecordBody::Tombstone(id) => Some(*id),
        RecordBody::Seal => None,
    }
}

fn scan(disk: &Disk, segment: u32) -> ScannedSegment {
    let mut scan = SegmentScan::new(LOG, segment, SEGMENT, SEGMENT);
    while let Some(ScanRead { offset, len }) = scan.next_read() {
        let first = offset / BLOCK_BYTES as u64;
        let bytes: Vec<u8> = (0..(len / BLOCK_BYTES) as u64).flat_map(|i| disk.read((segment, first + i))).collect();
        scan.feed(&bytes);
    }
    scan.finish()
}

fn run(steps: &[Step], lies: bool) -> Result<(), String> {
    let mut model = Model::new(lies);
    steps
        .iter()
        .enumerate()
        .try_for_each(|(at, step)| model.step(*step).map_err(|e| format!("step {at} {step:?}: {e}")))
}

proptest! {
    #[test]
    fn no_crash_brings_back_what_was_forgotten_or_loses_what_was_synced(steps in steps()) {
        if let Err(problem) = run(&steps, false) {
            prop_assert!(false, "{}", problem);
        }
    }
}

/// The negative control: if syncs do nothing, the model must notice.
#[test]
fn a_disk_that_lies_is_noticed() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let noticed = (0..200).any(|_| run(&steps().new_tree(&mut runner).unwrap().current(), true).is_err());
    assert!(noticed);
}
