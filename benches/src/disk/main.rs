//! `bench-disk`: L3 beside fio and a bare io_uring loop, on one file system in one run.
//!
//! - The three alternate in each round. Every figure is the median of the rounds.
//! - All read at random offsets with O_DIRECT and the same queue depth.
//! - L3 verifies every byte that it reads. The others verify nothing.
//! - L3 appends its writes to the log and merges adjacent ones. The others write at random offsets.

mod bare;
mod figures;
mod fio;
mod l3;
mod recovery;
mod report;

use anyhow::{Context, Result, ensure};
use bytesize::ByteSize;
use clap::Parser;
use figures::{Direction, Medians, RoundFigures};
use larder_memory::arena::UNIT_BYTES;
use larder_memory::{Arena, ArenaSharing};
use report::Report;
use std::path::PathBuf;
use std::sync::Arc;

/// Compare L3 with fio and an io_uring loop: random reads, writes, restart, reads during a scrub
#[derive(Debug, Parser)]
#[command(name = "bench-disk", max_term_width = 110)]
struct Args {
    /// Directory on the file system to measure. Needs free space of twice --bytes; all files are
    /// removed at the end
    #[arg(long)]
    dir: PathBuf,
    /// Size of the log, and of the file that fio and the loop use
    #[arg(long, default_value = "4GiB")]
    bytes: ByteSize,
    /// Bytes that each system moves per round
    #[arg(long, default_value = "1GiB")]
    round_bytes: ByteSize,
    /// Page sizes
    #[arg(long, visible_alias = "page", value_delimiter = ',', default_value = "64KiB,256KiB,1MiB,4MiB")]
    sizes: Vec<ByteSize>,
    /// Concurrent requests to L3. The queue depth at the device is 16 for all systems in any case
    #[arg(long, alias = "at-once", default_value_t = QUEUE_DEPTH)]
    concurrency: usize,
    /// Number of rounds; medians are printed
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only measure restarts of a log of --bytes, --rounds of them after a clean shutdown and as
    /// many after a kill. Needs free space of --bytes
    #[arg(long)]
    recovery: bool,
    /// Print one JSON object per line instead of tables
    #[arg(long)]
    json: bool,
}

const QUEUE_DEPTH: usize = 16;
/// Memory of L3 and of the io_uring loop each, on huge pages where possible.
const ARENA_BYTES: usize = 512 << 20;
const PAGE_BYTES_MAX: u64 = 16 << 20;

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.rounds > 0 && !args.sizes.is_empty(), "--rounds and --sizes must not be empty");
    for size in &args.sizes {
        let bytes = size.as_u64();
        let fits = bytes.is_multiple_of(4096) && (4096..=PAGE_BYTES_MAX).contains(&bytes);
        ensure!(fits, "--sizes {size}: a page is a multiple of 4 KiB and at most 16 MiB");
        let in_flight = args.concurrency as u64 * (bytes + UNIT_BYTES as u64);
        ensure!(
            in_flight <= ARENA_BYTES as u64 / 4 * 3,
            "--concurrency {}: pages of {size} in flight do not fit into the arena",
            args.concurrency
        );
        ensure!(
            args.bytes.as_u64() >= 64 * bytes,
            "--bytes {}: too small for pages of {size}, a log holds at least 64 pages",
            args.bytes
        );
    }
    let dir = tempfile::Builder::new().prefix("larder-bench-disk-").tempdir_in(&args.dir);
    let dir = dir.with_context(|| args.dir.display().to_string())?;
    if args.recovery {
        return measure_recovery(&args, dir.path());
    }
    let fio = fio::Fio::find();
    let arena = Arena::with(ARENA_BYTES, ArenaSharing::IfHuge).context("allocate the arena")?;
    let mut report = Report::begin(args.json, &args.dir, (args.rounds, args.concurrency), &fio, arena.huge_pages())?;
    drop(arena);
    let file = dir.path().join("file");
    bare::make_file(&file, args.bytes.as_u64())?;
    for size in &args.sizes {
        let log = dir.path().join(format!("l3-{}", size.as_u64()));
        measure_size(&args, &file, &log, size.as_u64() as usize, &fio, &mut report)?;
        std::fs::remove_dir_all(&log)?;
    }
    report.end();
    Ok(())
}

fn measure_recovery(args: &Args, dir: &std::path::Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let arena = Arena::new(ARENA_BYTES).context("allocate the arena of L3")?;
    report::begin_restarts(args.json);
    for size in &args.sizes {
        let log = dir.join(format!("l3-{}", size.as_u64()));
        let bytes = args.bytes.as_u64();
        let size = size.as_u64() as usize;
        let restarts = runtime.block_on(recovery::measure(&log, bytes, arena.clone(), size, args.rounds))?;
        restarts.iter().for_each(|restart| report::restart(args.json, size, restart));
        std::fs::remove_dir_all(&log)?;
    }
    Ok(())
}

fn measure_size(
    args: &Args,
    file: &std::path::Path,
    log: &std::path::Path,
    size: usize,
    fio: &fio::Fio,
    report: &mut Report,
) -> Result<()> {
    let count = (args.round_bytes.as_u64() as usize / size).max(QUEUE_DEPTH);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let concurrency = args.concurrency.max(1);
    // The other systems write from the buffers they read into. Pages written to L3 have their own
    // memory, so its arena is larger by these pages.
    let arena_bytes = ARENA_BYTES + concurrency * (size + UNIT_BYTES);
    let arena = Arena::with(arena_bytes, ArenaSharing::IfHuge).context("allocate the arena of L3")?;
    let mut ours = runtime.block_on(l3::Pages::fill(log, args.bytes.as_u64(), arena.clone(), size, concurrency))?;
    let mut bare = bare::Bare::new(file, Arena::new(ARENA_BYTES).context("allocate the arena of the io_uring loop")?)?;
    let mut figures: [[Vec<RoundFigures>; 3]; 2] = Default::default();
    for _ in 0..args.rounds {
        for (direction, [l3, raw, theirs]) in Direction::BOTH.into_iter().zip(&mut figures) {
            l3.push(runtime.block_on(ours.run(direction, count))?);
            raw.push(bare.run(direction, size, count)?);
            theirs.extend(fio.run(file, direction, size, count)?);
        }
    }
    for (direction, [l3, raw, theirs]) in Direction::BOTH.into_iter().zip(figures) {
        report.size(direction, size, [Medians::median(l3), Medians::median(raw), Medians::median(theirs)])?;
    }
    let scrub = runtime.block_on(ours.reads_during_scrub(count))?;
    let stats = ours.stats();
    runtime.block_on(ours.close());
    let recovery = runtime.block_on(l3::recover(log, args.bytes.as_u64(), Arc::clone(&arena)))?;
    report.recovery(size, recovery, &stats, scrub);
    Ok(())
}
