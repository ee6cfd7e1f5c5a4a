//! Compares a ring with a bare io_uring loop and with glommio's files: random reads, or page
//! writes, of a 2 GiB file at queue depth 16.
//!
//! `cargo run --release -p larder-io --example ring_speed -- --dir /var/tmp/x [--write] [--setups]
//! [--only WORD] [--rounds 5] [--bytes N] [--depth 16]`
//!
//! All variants use the same file, the same arena on huge pages and the same order of offsets. Each
//! round transfers each block once. Variants alternate within a round, and the medians are printed.
//! CPU time is that of the whole process, with the kernel's threads for it.
//!
//! The bare loop transfers each block from one range of memory. A ring transfers pages as the log
//! of a shared arena does: a header and a payload. "Pinned" rings transfer these as on kernels
//! before 6.15, and "deferred" rings complete requests only when they wait. With `--only WORD`,
//! only rings with this word in their name run, and the bare loop. With `--setups`, bare loops with
//! other memory and other flags of the ring are compared instead, see [`bare::SETUPS`].

use larder_io::{Block, DeviceFile, Done, Executor, FileId, Operation, Priority, Request, Ring, RingOptions};
use larder_memory::{Arena, Slot, SlotMut};
use larder_runtime::lock::Mutex;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

mod bare;
mod dma_file;
mod measure;

use bare::{Flags, Memory};
use measure::{measured, report};

const ARENA_BYTES: usize = 256 << 20;
const SIZES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
const HEADER: usize = 4096;

struct Options {
    dir: PathBuf,
    write: bool,
    /// Compares bare loops with each other.
    setups: bool,
    /// Part of the names of the rings to compare.
    only: String,
    rounds: usize,
    bytes: usize,
    depth: usize,
}

fn main() {
    let options = options();
    std::fs::create_dir_all(&options.dir).expect("the directory can be made");
    let path = options.dir.join("ring_speed");
    let _ = std::fs::remove_file(&path);
    let arena = Arena::new(ARENA_BYTES).expect("memory for the arena");
    println!("huge pages: {}, bytes: {}, depth: {}", arena.huge_pages(), options.bytes, options.depth);
    drop(DeviceFile::create(&path, options.bytes as u64).expect("the file can be made"));
    // File systems answer reads of unwritten blocks without the device, so the file is written
    // first.
    let first = order(options.bytes, 1 << 20, 0);
    let writes = Options { write: true, dir: PathBuf::new(), only: String::new(), ..options };
    bare::run(&arena, &path, &first, 1 << 20, &writes, Memory::Contiguous, Flags::None).expect("io_uring");
    for size in SIZES {
        if options.setups {
            bare::compare(&arena, &path, size, &options);
            continue;
        }
        compare(&arena, &path, size, &options);
    }
    std::fs::remove_file(&path).expect("the file can be removed");
}

/// Setup of a ring.
#[derive(Clone, Copy)]
struct Through {
    executor: Executor,
    vectored: bool,
    deferred: bool,
}

/// Measures all systems, alternating, and prints the medians.
fn compare(arena: &Arc<Arena>, path: &Path, size: usize, options: &Options) {
    let rings = [
        ("thread", Through { executor: Executor::Thread, vectored: true, deferred: false }),
        ("glommio", Through { executor: Executor::Glommio, vectored: true, deferred: false }),
        ("thread, deferred", Through { executor: Executor::Thread, vectored: true, deferred: true }),
        ("glommio, deferred", Through { executor: Executor::Glommio, vectored: true, deferred: true }),
        ("thread, pinned", Through { executor: Executor::Thread, vectored: false, deferred: false }),
        ("glommio, pinned", Through { executor: Executor::Glommio, vectored: false, deferred: false }),
    ];
    let files = [("DmaFile", false), ("DmaFile, copied", true)];
    let names = std::iter::once("bare").chain(rings.map(|ring| ring.0)).chain(files.map(|file| file.0));
    let names: Vec<&str> = names.collect();
    let is_wanted = |number: usize| number == 0 || names[number].contains(&options.only);
    let mut found: Vec<Vec<(f64, f64)>> = vec![Vec::new(); names.len()];
    for round in 0..options.rounds {
        let order = Arc::new(order(options.bytes, size, round as u64 + 1));
        for turn in 0..found.len() {
            // Another system is first in each round.
            let number = (turn + round) % found.len();
            if !is_wanted(number) {
                continue;
            }
            let taken = if number == 0 {
                measured(options.bytes, || {
                    bare::run(arena, path, &order, size, options, Memory::Contiguous, Flags::Cooperative)
                        .expect("io_uring");
                })
            } else if let Some(&(_, through)) = rings.get(number - 1) {
                through_ring(arena, path, &order, size, options, through)
            } else {
                dma_file::run(arena, path, &order, size, options, files[number - 1 - rings.len()].1)
            };
            found[number].push(taken);
        }
    }
    for (name, taken) in names.iter().zip(&found).filter(|(_, taken)| !taken.is_empty()) {
        report(size, name, taken, &found[0]);
    }
}

fn options() -> Options {
    let mut options = Options {
        dir: PathBuf::new(),
        write: false,
        setups: false,
        only: String::new(),
        rounds: 5,
        bytes: 2 << 30,
        depth: 16,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value behind each option");
        match word.as_str() {
            "--dir" => options.dir = value().into(),
            "--write" => options.write = true,
            "--setups" => options.setups = true,
            "--only" => options.only = value(),
            "--rounds" => options.rounds = value().parse().expect("a number of rounds"),
            "--bytes" => options.bytes = value().parse().expect("a number of bytes"),
            "--depth" => options.depth = value().parse().expect("a queue depth"),
            other => panic!("unknown option {other}"),
        }
    }
    assert!(!options.dir.as_os_str().is_empty(), "--dir is required: the directory for the test file");
    options
}

fn order(bytes: usize, size: usize, seed: u64) -> Vec<u64> {
    let mut offsets: Vec<u64> = (0..bytes / size).map(|n| (n * size) as u64).collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for n in (1..offsets.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        offsets.swap(n, (state % (n as u64 + 1)) as usize);
    }
    offsets
}

/// The same transfers through a ring, requested by as many tasks on a tokio thread as the
/// queue is deep. With `vectored`, registered memory includes the headers. With `deferred`, task
/// work waits for the executor.
fn through_ring(
    arena: &Arc<Arena>,
    path: &Path,
    order: &Arc<Vec<u64>>,
    size: usize,
    options: &Options,
    Through { executor, vectored, deferred }: Through,
) -> (f64, f64) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    let queue_depth = options.depth as u32;
    let ring = RingOptions { executor, queue_depth, vectored, deferred, ..RingOptions::new("speed", 1) };
    let ring = Arc::new(Ring::start(arena.clone(), ring).expect("the ring starts"));
    assert!(
        ring.capabilities().executor == executor && ring.capabilities().registered_buffers,
        "{:?}",
        ring.capabilities()
    );
    let file = DeviceFile::open(path).expect("the file opens");
    let file = runtime.block_on(ring.attach(file)).expect("there is room for a file");
    let payload = size - HEADER;
    let mut slots: VecDeque<SlotMut> = std::iter::from_fn(|| arena.allocate(payload)).collect();
    let pages = if options.write { slots.drain(..).map(SlotMut::freeze).collect() } else { Vec::new() };
    let slots = Arc::new(Mutex::new(slots));
    let pages = Arc::new(pages);
    let worker = Worker { ring, file, slots, pages, order: order.clone(), next: Arc::default() };
    let result = measured(options.bytes, || {
        let tasks: Vec<_> = (0..options.depth)
            .map(|_| match options.write {
                true => runtime.spawn(worker.clone().write()),
                false => runtime.spawn(worker.clone().read()),
            })
            .collect();
        runtime.block_on(async {
            for task in tasks {
                task.await.expect("a task ends well");
            }
        });
    });
    worker.ring.close();
    result
}

#[derive(Clone)]
struct Worker {
    ring: Arc<Ring>,
    file: FileId,
    /// Slots to read into, least recently used first.
    slots: Arc<Mutex<VecDeque<SlotMut>>>,
    pages: Arc<Vec<Slot>>,
    order: Arc<Vec<u64>>,
    next: Arc<AtomicUsize>,
}

impl Worker {
    /// Claims the next block and returns its number and offset.
    fn take(&self) -> Option<(usize, u64)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Some((number, *self.order.get(number)?))
    }

    async fn read(self) {
        while let Some((_, offset)) = self.take() {
            let slot = self.slots.lock().pop_front().expect("more slots than tasks");
            let done = self.run(Operation::read_split(offset, Some(Block::of(&[])), slot)).await;
            self.slots.lock().extend(done.into_slot());
        }
    }

    async fn write(self) {
        while let Some((number, offset)) = self.take() {
            let page = self.pages[number % self.pages.len()].clone();
            self.run(Operation::write(offset, Block::of(b"page"), Some(page))).await;
        }
    }

    async fn run(&self, operation: Operation) -> Done {
        let request = Request { file: self.file, priority: Priority::Demand, operation };
        let done = self.ring.run(request).await.expect("the ring is open");
        assert!(done.result.is_ok());
        done
    }
}
