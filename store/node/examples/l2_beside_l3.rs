//! Hits in L2 and lookups in L3, idle and while puts are written to L3.
//!
//! ```text
//! cargo run --release -p larder-node --example l2_beside_l3 [PAGES] [PAGE_KIB] [NAMESPACES]
//! ```
//!
//! The device takes each write at once and keeps no bytes, so that millions of pages need no disk.
//! All else is the code of a node: L2 over the log of L3, and puts that write through. The log is
//! full, so each put also reclaims. One thread hits pages in L2 and looks pages up in L3. A second
//! one puts pages at 2 GB/s in every other phase. The control does the memory accesses of a lookup
//! in a table of its own thread: it has the noise of the machine, and no lock.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a measurement: it has threads and a clock")]

use futures::FutureExt;
use larder_format::{NamespaceId, PageId, PageKey, chunk_crcs};
use larder_io::{
    BoxFuture, Completion, Device, DeviceCapabilities, Done, Operation, Priority, RingClosed, SmallFile, TaskClass,
};
use larder_log::{L3, L3Options};
use larder_memory::Arena;
use larder_node::sim::{Clock, Devices, PageLocation, Store};
use larder_node::{L3Device, NodeOptions};
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use std::collections::{BTreeMap, HashMap};
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BYTES_PER_SECOND: u64 = 2_000_000_000;
const L2_BYTES: u64 = 2 << 30;
/// Share of L2 that the thread hits. Puts do not evict it: it is hit far more often than they.
const HIT_FRACTION: u64 = 4;
/// Length of a phase. Idle and busy phases alternate.
const PHASE: Duration = Duration::from_secs(2);
const ROUNDS: usize = 7;
/// Puts between two looks at the clock. A put per look would measure the sleep.
const BURST: u64 = 16;
const CALLS: [&str; 3] = ["hit in L2", "lookup in L3", "control"];

/// Device that completes each request at once and forgets all page bytes. A read fills nothing, so
/// the log takes the page for damaged. The measurement therefore reads pages from L2 only.
#[derive(Default)]
struct NullDevice {
    small: Mutex<BTreeMap<&'static str, Vec<u8>>>,
    segments: Mutex<BTreeMap<u32, u64>>,
}

fn ready<'a, T: Send + 'a>(value: T) -> BoxFuture<'a, T> {
    Box::pin(std::future::ready(value))
}

impl Device for NullDevice {
    fn path(&self) -> &Path {
        Path::new("null")
    }

    fn capabilities(&self) -> DeviceCapabilities {
        DeviceCapabilities { executor: "null", direct_io: true, registered_buffers: true, registered_files: true }
    }

    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>> {
        ready(Ok(self.small.lock().unwrap().get(file.name()).cloned()))
    }

    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        self.small.lock().unwrap().insert(file.name(), bytes);
        ready(Ok(()))
    }

    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>> {
        ready(Ok(self.segments.lock().unwrap().keys().copied().collect()))
    }

    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>> {
        ready(Ok(self.segments.lock().unwrap().get(&segment).map_or(0, |&len| len.min(bytes))))
    }

    fn create(&self, segment: u32, bytes: u64, _header: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        self.segments.lock().unwrap().insert(segment, bytes);
        ready(Ok(()))
    }

    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>> {
        self.segments.lock().unwrap().remove(&segment);
        ready(Ok(()))
    }

    fn rename_misplaced(&self, _segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn submit(
        &self,
        _segment: u32,
        _priority: Priority,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingClosed>> {
        on_done(Done { operation, result: Ok(()) });
        ready(Ok(()))
    }

    fn spawn(&self, _class: TaskClass, task: BoxFuture<'static, ()>) {
        tokio::spawn(task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        ready(())
    }

    fn close_now(&self) {}
}

/// A node without sockets, full to the last segment. Pages have numbers in the order of their puts,
/// so the newest ones are in L2, and the oldest ones have been reclaimed.
struct Bench {
    store: Store,
    page_bytes: usize,
    /// Pages that L3 holds when it is full.
    pages: u64,
    namespaces: u64,
    put: AtomicU64,
}

impl Bench {
    fn id(&self, number: u64) -> PageId {
        let mut namespace = [1; 32];
        namespace[..8].copy_from_slice(&(number % self.namespaces).to_le_bytes());
        let mut key = [0; 32];
        // Spread over the table, as digests are.
        key[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        key[8..16].copy_from_slice(&number.to_le_bytes());
        PageId { namespace: NamespaceId(namespace), key: PageKey(key) }
    }

    /// Puts the next page. Waits while L3 has too much to write.
    fn put(&self) {
        let id = self.id(self.put.fetch_add(1, Ordering::Relaxed));
        let page = Reserved::first(id.key, vec![self.page_bytes as u32]);
        let put = loop {
            match self.store.reserve(id, page.clone()) {
                Ok(put) => break put,
                Err(ReserveOutcome::Busy) => std::thread::yield_now(),
                Err(other) => panic!("a new page was refused: {other:?}"),
            }
        };
        let part = put.take_part(0, self.page_bytes).expect("the first part");
        let crcs = chunk_crcs(&part).collect();
        assert!(put.land(0, part, crcs), "checksums of the same bytes");
        assert_eq!(self.store.puts().commit(&put), CommitOutcome::Stored);
    }

    /// Puts pages at [`BYTES_PER_SECOND`] while `is_busy`, or as fast as this machine can if that
    /// is slower. The pace follows from the begin, so a late burst is made up for.
    /// Returns the number of puts.
    fn put_at_rate(&self, is_busy: &AtomicBool) -> u64 {
        let begin = Instant::now();
        let mut puts = 0;
        while is_busy.load(Ordering::Relaxed) {
            (0..BURST).for_each(|_| self.put());
            puts += BURST;
            let due = Duration::from_secs_f64((puts * self.page_bytes as u64) as f64 / BYTES_PER_SECOND as f64);
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
        }
        puts
    }
}

/// Times of one kind of call, in nanoseconds. A phase makes millions, so they have 32 bits.
/// Longer times count as the longest.
type Times = Vec<u32>;

/// Makes a call and adds its time to the list. The list may grow meanwhile, but not within the
/// time.
fn timed<T>(times: &mut Times, call: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = call();
    times.push(u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX));
    result
}

/// The thread that is measured. Its random numbers come from a xorshift generator: a call of the
/// system's would be in the figures.
struct Reader<'a> {
    bench: &'a Bench,
    hit_ids: Vec<PageId>,
    control: &'a HashMap<u64, u64>,
    random: u64,
    /// Calls that found nothing: the page had left its tier.
    misses: [u64; 2],
}

impl Reader<'_> {
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Makes calls of each kind in turn for [`PHASE`], and returns the time of every call. The
    /// clock is read twice per call, which adds some 50 ns to each.
    ///
    /// First it leaves out pages that are no longer in L2.
    fn phase(&mut self) -> [Times; CALLS.len()] {
        let mut times = [const { Times::new() }; CALLS.len()];
        let begin = Instant::now();
        let tiers = self.bench.store.tiers();
        // A page that puts have evicted would be read from the device, which has no bytes.
        self.hit_ids.retain(|id| tiers.locate(id) == TierCode::L2);
        while begin.elapsed() < PHASE {
            for _ in 0..64 {
                let at = self.next() as usize % self.hit_ids.len();
                let hit = self.hit_ids[at];
                let found = timed(&mut times[0], || tiers.get(&hit, begin).now_or_never().flatten());
                self.misses[0] += u64::from(found.is_none());
                // Behind what L2 has, and before what reclaims take meanwhile.
                let newest = self.bench.put.load(Ordering::Relaxed) - L2_BYTES / self.bench.page_bytes as u64;
                let id = self.bench.id(newest - self.next() % (self.bench.pages / 2));
                let location = timed(&mut times[1], || tiers.lookup(&id));
                self.misses[1] += u64::from(matches!(location, PageLocation::Absent));
                let number = self.next() % self.bench.pages;
                black_box(timed(&mut times[2], || self.control.get(&number).copied()));
            }
        }
        times
    }
}

/// 99.9th percentile: the rank that one call in a thousand exceeds.
fn p999(times: &mut Times) -> u32 {
    times.sort_unstable();
    times[times.len() * 999 / 1000]
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::main(flavor = "multi_thread", worker_threads = 1)]
async fn main() {
    let given: Vec<u64> = std::env::args().skip(1).map(|argument| argument.parse().expect("a number")).collect();
    let argument = |at: usize, default| given.get(at).copied().unwrap_or(default);
    let (pages, page_bytes, namespaces) = (argument(0, 4_000_000), argument(1, 64) << 10, argument(2, 1));
    let options = NodeOptions { l2_bytes: L2_BYTES, seed: Some(1), ..NodeOptions::default() };
    let arena = Arena::new(options.arena_bytes() as usize).expect("memory");
    let capacity_bytes = pages * (page_bytes + 4096);
    let log = L3Options { scrub_bytes_per_second: 0, seed: Some(1), ..L3Options::new("null", capacity_bytes) };
    let l3 = L3::open_on(Arc::new(NullDevice::default()), log, arena.clone()).await.expect("an empty log opens");
    l3.recovered().await.expect("an empty log has nothing to recover");
    let device = L3Device { dir: "null".into(), bytes: capacity_bytes };
    let devices = Devices::of(vec![(device, Ok(l3))]).expect("one log");
    let store = Store::new(&options, arena, devices, Clock::system(), 1);
    let page_bytes = page_bytes as usize;
    let bench = Arc::new(Bench { store, page_bytes, pages, namespaces, put: AtomicU64::new(0) });
    tokio::task::spawn_blocking(move || measure(&bench)).await.expect("the measurement does not panic");
    // The log has tasks that would wait for the device.
    std::process::exit(0);
}

/// Fills the log beyond its capacity, then alternates idle and busy phases, and prints the medians
/// of their 99.9th percentiles.
fn measure(bench: &Bench) {
    let fill = bench.pages * 5 / 4;
    let begin = Instant::now();
    (0..fill).for_each(|_| bench.put());
    println!("{fill} pages of {} bytes in {:.0} s", bench.page_bytes, begin.elapsed().as_secs_f64());
    let hits = L2_BYTES / bench.page_bytes as u64 / HIT_FRACTION;
    let hit_ids: Vec<PageId> = (fill - hits..fill).map(|number| bench.id(number)).collect();
    let control: HashMap<u64, u64> = (0..bench.pages).map(|number| (number, number)).collect();
    let mut reader = Reader { bench, hit_ids, control: &control, random: 1, misses: [0; 2] };
    let mut figures: [[Vec<f64>; 2]; CALLS.len()] = Default::default();
    let mut puts = 0;
    for _ in 0..ROUNDS {
        for busy in [false, true] {
            let is_busy = AtomicBool::new(busy);
            let handle = tokio::runtime::Handle::current();
            let times = std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    let _entered = handle.enter();
                    bench.put_at_rate(&is_busy)
                });
                let times = reader.phase();
                is_busy.store(false, Ordering::Relaxed);
                puts += writer.join().expect("the writer does not panic");
                times
            });
            for (figures, mut times) in figures.iter_mut().zip(times) {
                figures[usize::from(busy)].push(f64::from(p999(&mut times)));
            }
        }
    }
    let rate = (puts * bench.page_bytes as u64) as f64 / (ROUNDS as f64 * PHASE.as_secs_f64());
    println!("{:.2} GB/s of puts in busy phases; not found: {:?} of hits, lookups", rate / 1e9, reader.misses);
    println!("pages still in L2: {} of {hits}", reader.hit_ids.len());
    println!("| p99.9 in µs, median of {ROUNDS} phases | idle | beside puts | ratio |\n|---|---|---|---|");
    for (call, [idle, busy]) in CALLS.iter().zip(&mut figures) {
        let (idle, busy) = (median(idle) / 1e3, median(busy) / 1e3);
        println!("| {call} | {idle:.2} | {busy:.2} | {:.2} |", busy / idle);
    }
}
