//! Time to restart one large log, after a clean shutdown and after a kill.

use super::figures::Direction;
use super::l3::{self, Pages};
use anyhow::{Context, Result, ensure};
use larder_log::{L3, RecoveryReport};
use larder_memory::Arena;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const READ_TIMEOUT: Duration = Duration::from_secs(600);
const RETRY_INTERVAL: Duration = Duration::from_micros(200);

/// One restart. Durations count from the start of `L3::open`.
#[derive(Debug, Clone, Copy)]
pub struct Restart {
    pub after: &'static str,
    pub cold: bool,
    pub open: Duration,
    pub first_page: Duration,
    pub index: Duration,
    pub report: RecoveryReport,
    pub log_bytes: u64,
}

pub async fn measure(dir: &Path, bytes: u64, arena: Arc<Arena>, size: usize, rounds: usize) -> Result<Vec<Restart>> {
    let mut pages = Pages::fill(dir, bytes, arena.clone(), size, super::QUEUE_DEPTH * 2).await?;
    let mut restarts = Vec::new();
    for round in 0..2 * rounds {
        let clean = round % 2 == 0;
        let newest = pages.newest();
        let after = if clean {
            pages.close().await;
            "clean"
        } else {
            // Like a kill: written bytes are there, but nothing was synced or recorded at the end.
            drop(pages);
            "kill"
        };
        let (restart, l3) = restart(dir, bytes, arena.clone(), newest, after).await?;
        restarts.push(restart);
        // Half a segment more, so that the next restart finds another segment open.
        pages = Pages::of(l3, &arena, size, newest + 1, super::QUEUE_DEPTH * 2)?;
        pages.run(Direction::Write, half_a_segment(size)).await?;
    }
    pages.close().await;
    Ok(restarts)
}

fn half_a_segment(size: usize) -> usize {
    (32 << 20) / size + 1
}

async fn restart(dir: &Path, bytes: u64, arena: Arc<Arena>, newest: u64, after: &'static str) -> Result<(Restart, L3)> {
    let cold = drop_caches();
    let began = Instant::now();
    let l3 = L3::open(l3::options(dir, bytes), arena).await?;
    let open = began.elapsed();
    let mut first_page = None;
    while first_page.is_none() {
        if l3.read(&l3::id(newest), Instant::now() + READ_TIMEOUT).await?.is_some() {
            first_page = Some(began.elapsed());
        } else {
            ensure!(l3.recovery().report.is_none(), "page {newest} is missing after recovery");
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
    let report = l3.recovered().await?;
    let index = began.elapsed();
    let first_page = first_page.context("the newest page was not read")?;
    let log_bytes = l3.stats().bytes_on_device;
    Ok((Restart { after, cold, open, first_page, index, report, log_bytes }, l3))
}

/// Drops the file system caches of the kernel. Returns `true` on success, which needs root. The log
/// reads with O_DIRECT in any case, but the metadata of its files would stay cached.
fn drop_caches() -> bool {
    // SAFETY: the system call has no arguments and cannot fail.
    unsafe { libc::sync() };
    std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}
