//! Pages from files to device memory, by each path of `larder-gds` that this machine has.
//!
//! The same reads into memory of the host alternate with them: the same ring, the same number of
//! threads, every chunk compared with its CRC.

use crate::Measurement;
use crate::bench::{Random, Times, soon};
use crate::report::{Figure, Rate};
use crate::sizes::StorageSize;
use anyhow::{Context, Result, anyhow, ensure};
use larder_format::CHUNK_BYTES;
use larder_format::disk::BLOCK_BYTES;
use larder_gds::{Chunk, FileNumber, PageRead, PathKind, TransferLimits, TransferOptions, Transfers, open};
use larder_io::{DeviceFile, FileId, Operation, Priority, Request, Ring, RingOptions};
use larder_kernels::device::{Keep, Slice};
use larder_memory::Arena;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::{Handle, Runtime};

const HOST: &str = "the same reads into host memory, CRC included";
/// Least ratio to the reads into host memory.
const TARGET: f64 = 0.95;
const ARENA_BYTES: usize = 64 << 20;

/// A file with pages as a log has them: a block for the header, then the payload.
struct Segment {
    path: PathBuf,
    size: StorageSize,
    bytes: Vec<u8>,
    chunks: Vec<Vec<Chunk>>,
}

impl Segment {
    fn write(folder: &Path, size: StorageSize) -> Result<Segment> {
        let bytes = Random::new(6).bytes(size.pages * (BLOCK_BYTES + size.page_bytes));
        let path = folder.join("segment");
        std::fs::write(&path, &bytes).with_context(|| format!("write {}", path.display()))?;
        std::fs::File::open(&path)?.sync_all()?;
        let mut segment = Segment { path, size, bytes, chunks: Vec::new() };
        let chunk = |bytes: &[u8]| Chunk { bytes: bytes.len() as u32, crc: crc32fast::hash(bytes) };
        segment.chunks =
            (0..size.pages).map(|page| segment.payload(page).chunks(CHUNK_BYTES).map(chunk).collect()).collect();
        Ok(segment)
    }

    fn offset(&self, page: usize) -> usize {
        page * (BLOCK_BYTES + self.size.page_bytes) + BLOCK_BYTES
    }

    fn payload(&self, page: usize) -> &[u8] {
        &self.bytes[self.offset(page)..][..self.size.page_bytes]
    }

    fn total_bytes(&self) -> usize {
        self.size.pages * self.size.page_bytes
    }

    /// Reads of all pages, one after the other in `target`.
    fn reads(&self, file: FileNumber, target: &Slice) -> Result<Vec<PageRead>> {
        let read = |page: usize| {
            let start = page * self.size.page_bytes;
            let targets = vec![target.slice(start..start + self.size.page_bytes)?];
            let (offset, chunks) = (self.offset(page) as u64, self.chunks[page].clone());
            Ok::<_, anyhow::Error>(PageRead { file, offset, chunks, targets })
        };
        (0..self.size.pages).map(read).collect()
    }
}

/// Reads into slots of an arena.
struct HostReads<'a> {
    segment: &'a Segment,
    arena: Arc<Arena>,
    ring: Ring,
    file: FileId,
    runtime: &'a Handle,
    threads: usize,
}

impl<'a> HostReads<'a> {
    fn new(segment: &'a Segment, runtime: &'a Handle, threads: usize) -> Result<HostReads<'a>> {
        let arena = Arena::new(ARENA_BYTES).context("allocate an arena")?;
        let ring = Ring::start(Arc::clone(&arena), RingOptions::new("bench-gpu-ring", 1)).context("start a ring")?;
        let file = runtime.block_on(in_time(ring.attach(DeviceFile::open_read_only(&segment.path)?)))??;
        Ok(HostReads { segment, arena, ring, file, runtime, threads })
    }

    /// Reads and verifies all pages, and returns the time.
    fn run(&self) -> Result<Duration> {
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            loop {
                let page = next.fetch_add(1, Ordering::Relaxed);
                if page >= self.segment.size.pages {
                    return Ok(());
                }
                self.read(page)?;
            }
        };
        let start = Instant::now();
        let outcome: Result<()> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(work)).collect();
            let panicked = |_| Err(anyhow!("a reader panicked"));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
        });
        outcome.map(|()| start.elapsed())
    }

    fn read(&self, page: usize) -> Result<()> {
        let slot = self.arena.allocate(self.segment.size.page_bytes).context("the arena is full")?;
        let operation = Operation::read(self.segment.offset(page) as u64, slot);
        let request = Request { file: self.file, priority: Priority::Demand, operation };
        let mut done = self.runtime.block_on(in_time(self.ring.run(request)))??;
        std::mem::replace(&mut done.result, Ok(()))?;
        let slot = done.into_slot().context("a read without memory")?;
        for (chunk, expected) in slot.chunks(CHUNK_BYTES).zip(&self.segment.chunks[page]) {
            ensure!(crc32fast::hash(chunk) == expected.crc, "page {page} differs from the file");
        }
        Ok(())
    }
}

async fn in_time<T>(answer: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout_at(soon().into(), answer).await.context("the ring does not answer")
}

/// One path, with its file attached.
struct PathReads<'a> {
    transfers: &'a Transfers,
    runtime: &'a Handle,
    reads: Vec<PageRead>,
}

impl PathReads<'_> {
    fn run(&self) -> Result<Duration> {
        let reads = self.reads.clone();
        let keep: Keep = Arc::new(());
        let start = Instant::now();
        self.runtime.block_on(self.transfers.read(reads, keep, soon()))?;
        Ok(start.elapsed())
    }
}

pub fn measure(run: &mut Measurement) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("larder-bench-gpu-").tempdir_in(&run.dir);
    let folder = folder.with_context(|| run.dir.display().to_string())?;
    let segment = Segment::write(folder.path(), run.sizes.storage)?;
    let runtime = Runtime::new()?;
    if !DeviceFile::open_read_only(&segment.path)?.direct() {
        run.report.note(&format!("{}: no direct I/O, the page cache serves all reads", run.dir.display()))?;
    }
    let mut opened = 0;
    for path in PathKind::ALL {
        match measure_path(run, &segment, runtime.handle(), path) {
            Ok(true) => opened += 1,
            Ok(false) => {}
            // The other paths are measured all the same.
            Err(error) => {
                opened += 1;
                run.report.problem(&format!("Storage: {path}: {error:#}"))?;
            }
        }
    }
    ensure!(opened > 0, "no path from storage to the device opens");
    Ok(())
}

/// Measures one path. Returns `false` if this machine does not have it.
fn measure_path(run: &mut Measurement, segment: &Segment, runtime: &Handle, path: PathKind) -> Result<bool> {
    let bench = &run.bench;
    let limits = TransferLimits::default();
    let arena = Arena::new(ARENA_BYTES).context("allocate an arena")?;
    let skip = PathKind::ALL.into_iter().filter(|other| *other != path);
    let options = TransferOptions {
        limits,
        skip: skip.map(|other| (other, "not in this measurement".to_string())).collect(),
        ..TransferOptions::new(Arc::clone(&bench.device), arena, Arc::new(DeviceFile::open_read_only(&segment.path)?))
    };
    let (transfers, report) = match open(&options) {
        Ok(opened) => opened,
        Err(error) => {
            let reason = error.rejected.into_iter().find(|rejected| rejected.path == path);
            let reason = reason.map_or("no reason".to_string(), |rejected| rejected.reason);
            run.report.note(&format!("storage to device by {path}: not measured, {reason}"))?;
            return Ok(false);
        }
    };
    let target = bench.allocate(segment.total_bytes())?;
    let file = runtime.block_on(transfers.attach(DeviceFile::open_read_only(&segment.path)?, soon()))?;
    if let Err(error) = runtime.block_on(transfers.register(target.memory().clone(), soon())) {
        // Transfers to other memory work too, but may be slower.
        run.report.note(&format!("storage to device by {path}: the target is not registered, {error}"))?;
    }
    let by_path = PathReads { transfers: &transfers, runtime, reads: segment.reads(file, &target)? };
    by_path.run()?;
    let expected: Vec<u8> = (0..segment.size.pages).flat_map(|page| segment.payload(page)).copied().collect();
    let name = format!("storage to device by {} ({})", report.path, report.mode);
    let verified = bench.checker.same(&name, &bench.download::<u8>(&target)?, &expected)?;
    drop(expected);

    let by_host = HostReads::new(segment, runtime, limits.workers)?;
    by_host.run()?;
    let (mut path_times, mut host_times) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        host_times.push(by_host.run()?);
        path_times.push(by_path.run()?);
    }
    let bytes = segment.total_bytes();
    let ceiling = Rate::bytes(bytes, &Times::new(host_times));
    let figure = Figure::new(name, Rate::bytes(bytes, &Times::new(path_times)));
    run.report.figure(verified, &figure.against(HOST, ceiling).target(TARGET))?;
    Ok(true)
}
