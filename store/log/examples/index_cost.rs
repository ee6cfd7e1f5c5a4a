//! Memory of the index per page, and the time for which its lock stops lookups.
//!
//! `cargo run --release -p larder-log --example index_cost [PAGES] [PAGE_KIB] [NAMESPACES]
//! [LAPS] [--expiry] [--quota] [--pin]`
//!
//! The log has the segments that a node of this capacity has. Puts fill it LAPS times and a half
//! before memory is measured, 1 by default. The index of a log that has run for long must not grow.
//!
//! With `--expiry` each page has an expiry, and with `--quota` each namespace a quota. Neither
//! drops a page: a quota only costs the memory of its order. With `--pin` each page has a soft pin,
//! so more pages are copied.
//!
//! There is no device: each planned write completes at once, so no bytes move, and no write is in
//! flight for long. All else is the traffic of a node. The log is filled. Then one thread puts
//! pages at 2 GB/s while segments are recycled, and reads a third as many. A second thread looks
//! pages up meanwhile, and reports uses of them, as hits in L2 do. The control does the work of a
//! lookup in memory of that thread alone: it has the noise of the machine, and no lock.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a measurement: it reads the clock and /proc")]

use larder_format::{CHUNK_BYTES, NamespaceId, PageId, PageKey, PageMeta};
use larder_log::machine::{
    Append, CopyForward, Intent, KEEP_PERCENT_DEFAULT, Log, LogConfig, Pin, PrepareOutcome, ReadTicket, WriteOutcome,
};
use larder_log::{L3Options, LogLock};
use std::collections::BTreeMap;
use std::error::Error;
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the puts beside which lookups are measured.
const BUSY_BYTES: u64 = 3 << 30;
/// Pages of a sequence: each but the first has a parent.
const SEQUENCE: u64 = 15;
const BYTES_PER_SECOND: u64 = 2_000_000_000;
const CALLS: [(&str, &str); 6] = [
    ("lookup", "idle"),
    ("lookup", "busy"),
    ("use in L2", "idle"),
    ("use in L2", "busy"),
    ("control", "idle"),
    ("control", "busy"),
];
/// Cache lines of the table that the control probes: as large as the index of 4 million pages.
const CONTROL_LINES: usize = 1 << 22;
const IDLE: Duration = Duration::from_secs(3);
/// Expiry of the first page, if it has one: a time in 2033.
const FIRST_EXPIRY_MS: u64 = 2_000_000_000_000;
/// Puts between two checks of the rate. A put per tick would measure the sleep.
const BURST: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let (options, numbers): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    if let Some(unknown) = options.iter().find(|option| !["--expiry", "--quota", "--pin"].contains(&option.as_str())) {
        return Err(format!("unknown option {unknown}; there are --expiry, --quota and --pin").into());
    }
    let has = |wanted: &str| options.iter().any(|option| option == wanted);
    let orders = Orders { expiry: has("--expiry"), quota: has("--quota"), pin: has("--pin") };
    let given: Vec<u64> = numbers.iter().map(|number| number.parse()).collect::<Result<_, _>>()?;
    let argument = |at: usize, default| given.get(at).copied().unwrap_or(default);
    let (pages, page_kib, namespaces) = (argument(0, 300_000), argument(1, 64), argument(2, 1));
    let laps = argument(3, 1);
    let before = resident_bytes();
    let bench = Bench::new((pages, page_kib << 10, namespaces), orders);
    let mut writer = Writer { bench: &bench, next: 0, copying: None, held: BTreeMap::new() };
    while writer.next < bench.capacity_pages() * laps + bench.capacity_pages() / 2 {
        writer.put_and_read()?;
    }
    let counts = bench.log.lock().counts();
    let each = |bytes: f64| bytes / counts.pages as f64;
    println!("{} pages of {page_kib} KiB in {namespaces} namespaces, {} used", counts.pages, counts.kept_pages);
    println!("filled {laps} times and a half, in segments of {} MiB", bench.segment_bytes >> 20);
    println!("each with an expiry: {}, with a quota: {}, with a pin: {}", orders.expiry, orders.quota, orders.pin);
    println!("memory per page: {:.1} bytes resident", each(resident_bytes() - before));
    println!(
        "index per page:  {:.1} bytes by capacity",
        each(bench.log.lock().index_bytes() as f64 + bench.log.entries().memory_bytes() as f64)
    );
    writer.held.clear();
    std::thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let reader = scope.spawn(|| bench.look_up());
        std::thread::sleep(IDLE);
        bench.is_busy.store(true, Ordering::Relaxed);
        let result = writer.put_at_rate(BUSY_BYTES / bench.page_bytes);
        bench.is_done.store(true, Ordering::Relaxed);
        result?;
        let latencies = reader.join().map_err(|_| "the thread of lookups panicked")?;
        for ((call, when), latencies) in CALLS.into_iter().zip(latencies) {
            print_latency(call, when, latencies);
        }
        Ok(())
    })?;
    println!("| call | count | total ms | p99.9 of its hold of the lock, µs | longest |");
    println!("|---|---|---|---|---|");
    for (call, Held { count, total, longest, each }) in &mut writer.held {
        let p999 = f64::from(quantile(each, 0.999)) / 1e3;
        println!("| {call} | {count} | {} | {p999:.1} | {:.0} |", total.as_millis(), longest.as_secs_f64() * 1e6);
    }
    Ok(())
}

/// Orders that the log keeps beside the index.
#[derive(Debug, Clone, Copy)]
struct Orders {
    expiry: bool,
    quota: bool,
    pin: bool,
}

struct Bench {
    log: LogLock,
    orders: Orders,
    segment_bytes: u64,
    pages: u64,
    page_bytes: u64,
    namespaces: u64,
    next: AtomicU64,
    is_busy: AtomicBool,
    is_done: AtomicBool,
}

impl Bench {
    fn new((pages, page_bytes, namespaces): (u64, u64, u64), orders: Orders) -> Bench {
        let capacity_bytes = pages * (page_bytes + 4096);
        let segment_bytes = L3Options::new("", capacity_bytes).segment_bytes();
        let config = LogConfig {
            segment_bytes,
            segments_max: capacity_bytes.div_ceil(segment_bytes).max(6) as u32,
            hash_seed: 1,
            keep_percent: KEEP_PERCENT_DEFAULT,
            // One that no namespace reaches. `u64::MAX` is none.
            quota_default: if orders.quota { u64::MAX - 1 } else { u64::MAX },
            pages_max: 2 * pages,
        };
        Bench {
            log: LogLock::new(Log::new(config)),
            orders,
            segment_bytes,
            pages,
            page_bytes,
            namespaces,
            next: AtomicU64::new(0),
            is_busy: AtomicBool::new(false),
            is_done: AtomicBool::new(false),
        }
    }

    fn capacity_pages(&self) -> u64 {
        self.pages
    }

    fn id(&self, number: u64) -> PageId {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        let mut namespace = [0; 32];
        namespace[..8].copy_from_slice(&(number / SEQUENCE % self.namespaces).to_le_bytes());
        PageId { namespace: NamespaceId(namespace), key: PageKey(key) }
    }

    fn meta(&self, number: u64) -> PageMeta {
        let position = (number % SEQUENCE) as u32;
        PageMeta {
            id: self.id(number),
            parent: if position == 0 { PageKey::NONE } else { self.id(number - 1).key },
            position,
            generation: number + 1,
            expires_unix_ms: if self.orders.expiry { self.expires_unix_ms(number) } else { 0 },
            part_bytes: vec![self.page_bytes as u32],
            chunk_crcs: vec![0; (self.page_bytes as usize).div_ceil(CHUNK_BYTES)],
            token_ids: Vec::new(),
        }
    }

    /// Expiry in the far future, after the same time for each page.
    fn expires_unix_ms(&self, number: u64) -> u64 {
        FIRST_EXPIRY_MS + number * self.page_bytes / (BYTES_PER_SECOND / 1000)
    }

    /// Looks pages up and reports uses of them, until the writer is done. Returns the latencies in
    /// nanoseconds, in the order of [`CALLS`].
    fn look_up(&self) -> [Vec<u32>; 6] {
        let mut latencies = [const { Vec::new() }; 6];
        let control = vec![[1u64; 8]; CONTROL_LINES];
        let mut random = 1u64;
        while !self.is_done.load(Ordering::Relaxed) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let written = self.next.load(Ordering::Relaxed);
            let id = self.id(written - 1 - (random >> 32) % self.pages.min(written));
            let began = Instant::now();
            std::hint::black_box(self.log.entries().lookup(&id, 0));
            let busy = usize::from(self.is_busy.load(Ordering::Relaxed));
            latencies[busy].push(began.elapsed().as_nanos() as u32);
            let began = Instant::now();
            self.log.entries().touch(&id);
            latencies[2 + busy].push(began.elapsed().as_nanos() as u32);
            // The work of a lookup in memory of this thread: it shows the noise of the machine.
            let began = Instant::now();
            std::hint::black_box(probe(&control, &id));
            latencies[4 + busy].push(began.elapsed().as_nanos() as u32);
            // A lookup every few microseconds, as a busy node makes them.
            let pause = Instant::now();
            while pause.elapsed() < Duration::from_micros(2) {
                std::hint::spin_loop();
            }
        }
        latencies
    }
}

/// Hashes an id as the index does, and reads three lines that depend on each other.
fn probe(lines: &[[u64; 8]], id: &PageId) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(&id.namespace.0);
    hasher.write(&id.key.0);
    let first = hasher.finish();
    hasher.write_u8(1);
    let hash = first ^ hasher.finish();
    (1..=3).fold(hash, |at, step| at.rotate_left(21) ^ lines[at as usize % lines.len()][step])
}

#[derive(Default)]
struct Held {
    count: u64,
    total: Duration,
    longest: Duration,
    /// In nanoseconds, beside lookups only: it takes memory.
    each: Vec<u32>,
}

struct Writer<'a> {
    bench: &'a Bench,
    next: u64,
    copying: Option<CopyForward>,
    /// By the name of the call of the log.
    held: BTreeMap<&'static str, Held>,
}

impl Writer<'_> {
    fn locked<R>(&mut self, call: &'static str, change: impl FnOnce(&mut Log) -> R) -> R {
        let mut log = self.bench.log.lock();
        let began = Instant::now();
        let result = change(&mut log);
        let elapsed = began.elapsed();
        drop(log);
        let held = self.held.entry(call).or_default();
        held.count += 1;
        held.total += elapsed;
        held.longest = held.longest.max(elapsed);
        if self.bench.is_busy.load(Ordering::Relaxed) {
            held.each.push(elapsed.as_nanos() as u32);
        }
        result
    }

    fn end_read(&mut self, ticket: ReadTicket) {
        if ticket.end() {
            self.locked("reads_ended", |log| log.reads_ended());
        }
    }

    fn put_at_rate(&mut self, pages: u64) -> Result<(), Box<dyn Error>> {
        let began = Instant::now();
        for put in 0..pages {
            if put.is_multiple_of(BURST) {
                let due = Duration::from_nanos(put * self.bench.page_bytes * 1_000_000_000 / BYTES_PER_SECOND);
                std::thread::sleep(due.saturating_sub(began.elapsed()));
            }
            self.put_and_read()?;
        }
        Ok(())
    }

    /// Puts a page, and reads a hot one after every third put. Each fifth page is hot, so retention
    /// has pages to copy.
    fn put_and_read(&mut self) -> Result<(), Box<dyn Error>> {
        let number = self.next;
        let meta = self.bench.meta(number);
        loop {
            match self.locked("append", |log| log.append(&meta))? {
                Append::Write(write) => {
                    self.locked("write_done", |log| log.write_done(write, WriteOutcome::Written));
                    break;
                }
                Append::AlreadyThere => break,
                Append::Wait => self.work()?,
            }
        }
        if self.bench.orders.pin {
            // A page whose segment is being reclaimed is not pinned.
            let _ = self.locked("pin", |log| log.pin(&meta.id, Pin::Soft));
        }
        self.next += 1;
        self.bench.next.store(self.next, Ordering::Relaxed);
        if number.is_multiple_of(3) {
            let back = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            let read = self.bench.id((number - back % self.bench.pages.min(number + 1)) / 5 * 5);
            let ticket = self.bench.log.entries().begin_read(&read, 0);
            if let Some(ticket) = ticket {
                self.end_read(ticket);
            }
        }
        if number.is_multiple_of(1024) {
            let plan = self.bench.log.lock().sync_plan();
            for ticket in plan {
                self.locked("sync_done", |log| log.sync_done(ticket, true));
            }
        }
        self.work()
    }

    /// Completes the work of the device.
    fn work(&mut self) -> Result<(), Box<dyn Error>> {
        while let Some(intent) = self.locked("next_intent", |log| log.next_intent()) {
            match intent {
                Intent::Prepare(prepare) => {
                    self.locked("prepared", |log| log.prepared(&prepare, PrepareOutcome::Ready))
                }
                Intent::Footer(footer) => {
                    self.locked("footer_done", |log| log.footer_done(footer, WriteOutcome::Written))
                }
                Intent::Reclaim => while self.locked("reclaim_step", |log| log.reclaim_step()) {},
                Intent::CopyForward(work) => self.copying = Some(work),
            }
        }
        let Some(work) = self.copying.take() else { return Ok(()) };
        for record in work.pages {
            let ticket = self.bench.log.entries().begin_maintenance_read(record);
            let Some(ticket) = ticket else { continue };
            // The example numbers pages by generation, so it needs no device for the metadata.
            let meta = self.bench.meta(ticket.entry.generation - 1);
            self.end_read(ticket);
            if let Some(copy) = self.locked("plan_copy", |log| log.plan_copy(record, &meta)) {
                self.locked("write_done", |log| log.write_done(copy, WriteOutcome::Written));
            }
        }
        self.locked("copy_forward_done", |log| log.copy_forward_done(work.segment, work.epoch));
        self.work()
    }
}

fn quantile(nanos: &mut [u32], share: f64) -> u32 {
    nanos.sort_unstable();
    nanos.get((nanos.len() as f64 * share) as usize).copied().unwrap_or(0)
}

fn print_latency(call: &str, when: &str, mut latencies: Vec<u32>) {
    let mut micros = |share| f64::from(quantile(&mut latencies, share)) / 1e3;
    let (p50, p99, p999) = (micros(0.5), micros(0.99), micros(0.999));
    let longest = latencies.last().copied().unwrap_or(0) / 1000;
    let count = latencies.len();
    println!(
        "{call} {when}: p50 {p50:.2} µs, p99 {p99:.2} µs, p99.9 {p999:.2} µs, longest {longest} µs ({count} calls)"
    );
}

fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: f64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number of pages");
    pages * 4096.0
}
