//! `bench-disk`: L3 beside fio and beside a bare io_uring loop, on one file system in one run.
//!
//! All three read at random with the same queue depth and past the page cache, in turns; every figure is the median of the
//! rounds. L3 verifies every byte it reads; the others look at none. The others write at random too, while L3 appends to its
//! log, and hands writes that follow each other to the kernel as one.

mod bare;
mod figures;
mod fio;
mod l3;
mod recovery;
mod report;

use anyhow::{Context, Result, ensure};
use bytesize::ByteSize;
use clap::Parser;
use figures::{Direction, Figures, Measured};
use larder_device::arena::UNIT_BYTES;
use larder_device::{Arena, Sharing};
use report::Report;
use std::path::PathBuf;
use std::sync::Arc;

/// Random reads and writes of L3 beside fio and a bare io_uring loop; recovery; reads during a scrub
#[derive(Debug, Parser)]
#[command(name = "bench-disk", max_term_width = 110)]
struct Args {
    /// Directory on the file system to measure; twice `bytes` must be free. What is written there is removed
    #[arg(long)]
    dir: PathBuf,
    /// Bytes of the log, and of the file that the others use
    #[arg(long, default_value = "4GiB")]
    bytes: ByteSize,
    /// Bytes moved by each of them in a round
    #[arg(long, default_value = "1GiB")]
    round_bytes: ByteSize,
    /// Page sizes
    #[arg(long, visible_alias = "page", value_delimiter = ',', default_value = "64KiB,256KiB,1MiB,4MiB")]
    sizes: Vec<ByteSize>,
    /// Pages asked of L3 at a time. Its queue with the device is as deep as the others', 16, whatever this says
    #[arg(long, default_value_t = QUEUE_DEPTH)]
    at_once: usize,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only write a log of `bytes`, and measure its next starts after clean ends and kills, `rounds` of each: only
    /// `bytes` must be free
    #[arg(long)]
    recovery: bool,
    /// One JSON object per line instead of tables
    #[arg(long)]
    json: bool,
}

/// Requests at a time, of each of the three.
const QUEUE_DEPTH: usize = 16;
/// Memory on huge pages, of L3 and of the bare loop.
const ARENA_BYTES: usize = 512 << 20;
const PAGE_BYTES_MAX: u64 = 16 << 20;

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.rounds > 0 && !args.sizes.is_empty(), "at least one round and one size");
    for size in &args.sizes {
        let bytes = size.as_u64();
        let fits = bytes.is_multiple_of(4096) && (4096..=PAGE_BYTES_MAX).contains(&bytes);
        ensure!(fits, "{size}: a page is a multiple of 4 KiB and at most 16 MiB here");
        let under_way = args.at_once as u64 * (bytes + UNIT_BYTES as u64);
        ensure!(
            under_way <= ARENA_BYTES as u64 / 4 * 3,
            "--at-once {}: of {size} that is too much memory",
            args.at_once
        );
        ensure!(args.bytes.as_u64() >= 64 * bytes, "a log of {} is too small for pages of {size}", args.bytes);
    }
    let dir = tempfile::Builder::new().prefix("larder-bench-disk-").tempdir_in(&args.dir);
    let dir = dir.with_context(|| args.dir.display().to_string())?;
    if args.recovery {
        return measure_recovery(&args, dir.path());
    }
    let fio = fio::Fio::find();
    let arena = Arena::with(ARENA_BYTES, Sharing::IfHuge).context("arena")?;
    let mut report = Report::begin(args.json, &args.dir, (args.rounds, args.at_once), &fio, arena.huge_pages())?;
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
    let arena = Arena::new(ARENA_BYTES).context("arena of L3")?;
    report::begin_starts(args.json);
    for size in &args.sizes {
        let log = dir.join(format!("l3-{}", size.as_u64()));
        let (bytes, size) = (args.bytes.as_u64(), size.as_u64() as usize);
        let starts = runtime.block_on(recovery::measure(&log, bytes, arena.clone(), size, args.rounds))?;
        starts.iter().for_each(|start| report::start(args.json, size, start));
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
    let at_once = args.at_once.max(1);
    // Beside what the others have, the pages that are written: each has memory of its own. It is memory as a node has it.
    let arena_bytes = ARENA_BYTES + at_once * (size + UNIT_BYTES);
    let arena = Arena::with(arena_bytes, Sharing::IfHuge).context("arena of L3")?;
    let mut ours = runtime.block_on(l3::Pages::fill(log, args.bytes.as_u64(), arena.clone(), size, at_once))?;
    let mut bare = bare::Bare::new(file, Arena::new(ARENA_BYTES).context("arena of the bare loop")?)?;
    let mut figures: [[Vec<Measured>; 3]; 2] = Default::default();
    for _ in 0..args.rounds {
        for (direction, [l3, raw, theirs]) in Direction::BOTH.into_iter().zip(&mut figures) {
            l3.push(runtime.block_on(ours.run(direction, count))?);
            raw.push(bare.run(direction, size, count)?);
            theirs.extend(fio.run(file, direction, size, count)?);
        }
    }
    for (direction, [l3, raw, theirs]) in Direction::BOTH.into_iter().zip(figures) {
        report.size(direction, size, [Figures::median(l3), Figures::median(raw), Figures::median(theirs)])?;
    }
    let scrub = runtime.block_on(ours.reads_during_scrub(count))?;
    let stats = ours.stats();
    runtime.block_on(ours.close());
    let recovery = runtime.block_on(l3::recover(log, args.bytes.as_u64(), Arc::clone(&arena)))?;
    report.recovery(size, recovery, &stats, scrub);
    Ok(())
}
