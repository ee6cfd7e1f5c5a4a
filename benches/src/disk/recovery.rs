//! One log as large as asked for, and how long its next starts take: after a clean end, and after one without a word.

use super::figures::Direction;
use super::l3::{self, Pages};
use anyhow::{Context, Result, ensure};
use larder_device::Arena;
use larder_l3::{L3, RecoveryReport};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_micros(200);

/// One start of the log.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// How the life before ended.
    pub after: &'static str,
    /// Whether the kernel was made to forget what it had cached.
    pub cold: bool,
    /// Until the log could be asked.
    pub open: Duration,
    /// Until the newest page was read and verified.
    pub first_page: Duration,
    /// Until all pages could be found, and writes were taken.
    pub index: Duration,
    /// What was found.
    pub report: RecoveryReport,
    /// Bytes of all files.
    pub log_bytes: u64,
}

/// Fills a log, and starts it `rounds` times after each kind of end.
pub async fn measure(dir: &Path, bytes: u64, arena: Arc<Arena>, size: usize, rounds: usize) -> Result<Vec<Start>> {
    let mut pages = Pages::fill(dir, bytes, arena.clone(), size, super::QUEUE_DEPTH * 2).await?;
    let mut starts = Vec::new();
    for round in 0..2 * rounds {
        let clean = round % 2 == 0;
        let newest = pages.newest();
        // Without a word: what was written is there, and nothing was synced or noted for the end.
        match clean {
            true => pages.close().await,
            false => drop(pages),
        }
        let after = if clean { "clean end" } else { "kill" };
        let (start, l3) = start(dir, bytes, arena.clone(), newest, after).await?;
        starts.push(start);
        // The next start finds another segment open.
        pages = Pages::of(l3, &arena, size, newest + 1, super::QUEUE_DEPTH * 2)?;
        pages.run(Direction::Write, half_a_segment(size)).await?;
    }
    pages.close().await;
    Ok(starts)
}

/// Pages of about half a segment.
fn half_a_segment(size: usize) -> usize {
    (32 << 20) / size + 1
}

async fn start(dir: &Path, bytes: u64, arena: Arc<Arena>, newest: u64, after: &'static str) -> Result<(Start, L3)> {
    let cold = drop_caches();
    let began = Instant::now();
    let l3 = L3::open(l3::options(dir, bytes), arena).await?;
    let open = began.elapsed();
    let mut first_page = None;
    while first_page.is_none() {
        if l3.read(&l3::id(newest), Instant::now() + PATIENCE).await?.is_some() {
            first_page = Some(began.elapsed());
        } else {
            ensure!(l3.recovery().report.is_none(), "page {newest} is not there");
            tokio::time::sleep(PAUSE).await;
        }
    }
    let report = l3.recovered().await?;
    let index = began.elapsed();
    let first_page = first_page.context("read above")?;
    let log_bytes = l3.stats().bytes_on_device;
    Ok((Start { after, cold, open, first_page, index, report, log_bytes }, l3))
}

/// Whether the kernel did it, which only root may ask for. The log's own reads go past the page cache in any case; what
/// the file system knows of its files does not.
fn drop_caches() -> bool {
    // SAFETY: a system call without arguments.
    unsafe { libc::sync() };
    std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}
