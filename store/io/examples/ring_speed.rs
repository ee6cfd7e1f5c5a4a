//! Compares a ring with a bare io_uring loop: random reads (or page writes) of a 2 GiB file at
//! depth 16.
//!
//! `cargo run --release -p larder-io --example ring_speed -- --dir /var/tmp/x [--write] [--rounds
//! 5] [--bytes N]`
//!
//! All variants use the same file, the same arena on huge pages and the same order of offsets. Each
//! round transfers each block once. Variants alternate within a round, and the medians are printed.
//! CPU time is that of the whole process.
//!
//! The bare loop writes each block from one range of memory. A ring writes pages as the log does: a
//! header from the heap and a payload from the arena.

use io_uring::{IoUring, opcode, types};
use larder_io::{Block, DeviceFile, Done, Executor, FileId, Operation, Priority, Request, Ring, RingOptions};
use larder_memory::{Arena, Slot, SlotMut};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const DEPTH: usize = 16;
const ARENA_BYTES: usize = 256 << 20;
const SIZES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
const HEADER: usize = 4096;

struct Options {
    dir: PathBuf,
    write: bool,
    rounds: usize,
    bytes: usize,
}

fn main() {
    let options = options();
    std::fs::create_dir_all(&options.dir).expect("the directory can be made");
    let path = options.dir.join("ring_speed");
    let _ = std::fs::remove_file(&path);
    let arena = Arena::new(ARENA_BYTES).expect("memory for the arena");
    println!("huge pages: {}, bytes: {}, depth: {DEPTH}", arena.huge_pages(), options.bytes);
    drop(DeviceFile::create(&path, options.bytes as u64).expect("the file can be made"));
    // File systems answer reads of unwritten blocks without the device, so the file is written
    // first.
    bare(&arena, &path, &order(options.bytes, 1 << 20, 0), 1 << 20, true);
    for size in SIZES {
        let mut found: [Vec<(f64, f64)>; 3] = Default::default();
        for round in 0..options.rounds {
            let order = Arc::new(order(options.bytes, size, round as u64 + 1));
            found[0].push(measured(options.bytes, || bare(&arena, &path, &order, size, options.write)));
            for (executor, found) in [Executor::Thread, Executor::Glommio].into_iter().zip(&mut found[1..]) {
                found.push(through_ring(&arena, &path, &order, size, &options, executor));
            }
        }
        let base = median(&found[0], |found| found.0);
        for (name, found) in ["bare", "thread", "glommio"].iter().zip(&found) {
            let (speed, cpu) = (median(found, |found| found.0), median(found, |found| found.1));
            println!("{:>5} KiB {name:<8} {speed:.2} GB/s  {cpu:.4} CPU-s/GB  {:.3} of bare", size >> 10, speed / base);
        }
    }
    std::fs::remove_file(&path).expect("the file can be removed");
}

fn options() -> Options {
    let mut options = Options { dir: PathBuf::new(), write: false, rounds: 5, bytes: 2 << 30 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value behind each option");
        match word.as_str() {
            "--dir" => options.dir = value().into(),
            "--write" => options.write = true,
            "--rounds" => options.rounds = value().parse().expect("a number of rounds"),
            "--bytes" => options.bytes = value().parse().expect("a number of bytes"),
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

fn median(found: &[(f64, f64)], of: impl Fn(&(f64, f64)) -> f64) -> f64 {
    let mut values: Vec<f64> = found.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measured(bytes: usize, work: impl FnOnce()) -> (f64, f64) {
    let start = Instant::now();
    let cpu_before = processor_time();
    work();
    let took = start.elapsed();
    let used = processor_time() - cpu_before;
    let gigabytes = bytes as f64 / 1e9;
    (gigabytes / took.as_secs_f64(), used.as_secs_f64() / gigabytes)
}

fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer refers to a live timespec for the duration of the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Lower bound of the cost: one thread, one ring, registered buffers and files, and nothing else.
fn bare(arena: &Arc<Arena>, path: &Path, order: &[u64], size: usize, write: bool) {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).expect("opens");
    let mut memory = arena.allocate(arena.capacity()).expect("the arena is free");
    let start = memory.as_mut_ptr();
    let mut ring: IoUring = IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(32).expect("io_uring");
    let whole = libc::iovec { iov_base: start.cast(), iov_len: memory.capacity() };
    // SAFETY: this function owns the memory until after the ring is dropped.
    unsafe { ring.submitter().register_buffers(&[whole]) }.expect("buffers can be registered");
    ring.submitter().register_files(&[file.as_raw_fd()]).expect("files can be registered");
    let (mut next, mut done) = (0, 0);
    while done < order.len() {
        while next < order.len() && next - done < DEPTH {
            // SAFETY: whole blocks inside the arena. It has more blocks than the depth, so two in
            // flight never share one.
            let at = unsafe { start.add(next * size % memory.capacity()) };
            let file = types::Fixed(0);
            let len = size as u32;
            let offset = order[next];
            let entry = match write {
                true => opcode::WriteFixed::new(file, at, len, 0).offset(offset).build(),
                false => opcode::ReadFixed::new(file, at, len, 0).offset(offset).build(),
            };
            // SAFETY: as above.
            unsafe { ring.submission().push(&entry) }.expect("there is room");
            next += 1;
        }
        ring.submit_and_wait(1).expect("the kernel goes on");
        for answer in ring.completion() {
            assert_eq!(answer.result(), size as i32);
            done += 1;
        }
    }
    drop(ring);
}

/// The same transfers through a ring, requested by 16 tasks on a tokio thread.
fn through_ring(
    arena: &Arc<Arena>,
    path: &Path,
    order: &Arc<Vec<u64>>,
    size: usize,
    options: &Options,
    executor: Executor,
) -> (f64, f64) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    let ring = RingOptions { executor, queue_depth: DEPTH as u32, ..RingOptions::new("speed", 1) };
    let ring = Arc::new(Ring::start(arena.clone(), ring).expect("the ring starts"));
    assert!(
        ring.capabilities().executor == executor && ring.capabilities().registered_buffers,
        "{:?}",
        ring.capabilities()
    );
    let file = DeviceFile::open(path).expect("the file opens");
    let file = runtime.block_on(ring.attach(file)).expect("there is room for a file");
    let payload = if options.write { size - HEADER } else { size };
    let mut slots: VecDeque<SlotMut> = std::iter::from_fn(|| arena.allocate(payload)).collect();
    let pages = if options.write { slots.drain(..).map(SlotMut::freeze).collect() } else { Vec::new() };
    let slots = Arc::new(Mutex::new(slots));
    let pages = Arc::new(pages);
    let worker = Worker { ring, file, slots, pages, order: order.clone(), next: Arc::default() };
    let result = measured(options.bytes, || {
        let tasks: Vec<_> = (0..DEPTH)
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
            let done = self.run(Operation::read(offset, slot)).await;
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
