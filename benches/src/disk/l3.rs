//! Our side: pages in an L3, written and read at random.

use super::figures::{Direction, Measured, Round, histogram};
use anyhow::{Context, Result};
use larder_device::arena::UNIT_BYTES;
use larder_device::{Arena, Slot};
use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
use larder_l3::{L3, L3Options, L3Stats, RecoveryReport};
use rand::Rng;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::{JoinHandle, JoinSet};

/// Most bytes of pages that were read and are kept: most of the arena.
const KEPT_BYTES_MAX: usize = super::ARENA_BYTES / 4 * 3;
/// What is left of the arena beside pages that are kept or being read: for footers, for a scrub, and for what lies scattered
/// between pages.
const SPARE_BYTES: usize = super::ARENA_BYTES / 8;
const PATIENCE: Duration = Duration::from_secs(60);
/// Reads choose among the newest pages, this share of those that are there: the oldest are on their way out.
const READ_NEWEST: f64 = 0.8;

/// Begins a full scrub and returns the task that ends with it.
type StartScrub = fn(&L3) -> JoinHandle<()>;
const SCRUB: Option<StartScrub> = Some(start_scrub);

fn start_scrub(l3: &L3) -> JoinHandle<()> {
    let l3 = l3.clone();
    tokio::spawn(async move {
        let passes = l3.scrub().passes;
        l3.scrub_now();
        while l3.scrub().passes == passes {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
}

/// Latency of reads during a full scrub and without one, p99 in microseconds.
#[derive(Debug, Clone, Copy)]
pub struct DuringScrub {
    /// Without.
    pub without_us: f64,
    /// During.
    pub during_us: f64,
}

/// An L3 full of pages of one size. Page `n` is the `n`th that was written.
pub struct Pages {
    l3: L3,
    size: usize,
    at_once: usize,
    meta: PageMeta,
    /// One for each that writes, as pages have memory of their own.
    payloads: Vec<Slot>,
    /// The pages that were read last, as a store keeps them: so each is read to other memory than the one before.
    kept: Arc<Mutex<VecDeque<Slot>>>,
    written: Arc<AtomicU64>,
}

impl Pages {
    /// Makes a log of `bytes`, to be asked for `at_once` pages at a time, and writes it full, and a little more, so that segments are used for the second time.
    pub async fn fill(dir: &Path, bytes: u64, arena: Arc<Arena>, size: usize, at_once: usize) -> Result<Pages> {
        let l3 = L3::open(options(dir, bytes), arena.clone()).await?;
        let mut pages = Pages::of(l3, &arena, size, 0, at_once)?;
        while pages.stats().evicted_pages == 0 {
            pages.run(Direction::Write, at_once * 4).await?;
        }
        Ok(pages)
    }

    /// An open log, to which `written` pages were written.
    pub fn of(l3: L3, arena: &Arc<Arena>, size: usize, written: u64, at_once: usize) -> Result<Pages> {
        let bytes: Vec<u8> = (0..size as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let meta = PageMeta::describe(id(0), PageKey::NONE, 0, vec![size as u32], &bytes);
        let payload = || {
            let mut slot = arena.allocate(size)?;
            slot.copy_from_slice(&bytes);
            Some(slot.freeze())
        };
        let payloads =
            (0..at_once).map(|_| payload()).collect::<Option<_>>().context("an arena for so many at once")?;
        let written = Arc::new(AtomicU64::new(written));
        Ok(Pages { l3, size, at_once, meta, payloads, kept: Arc::default(), written })
    }

    /// The number of the page that was written last.
    pub fn newest(&self) -> u64 {
        self.written.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// Figures of the log.
    pub fn stats(&self) -> L3Stats {
        self.l3.stats()
    }

    /// Closes the log.
    pub async fn close(self) {
        self.clear();
        self.l3.close().await;
    }

    /// Moves `count` pages, `at_once` at a time; so many are with the device as its queue is deep, the others wait or are
    /// being verified.
    pub async fn run(&mut self, direction: Direction, count: usize) -> Result<Measured> {
        let left = Arc::new(AtomicU64::new(count as u64));
        let newest = (self.l3.stats().pages as f64 * READ_NEWEST) as u64;
        let kept_max = kept_max(self.size, self.at_once);
        let mut workers = JoinSet::new();
        let round = Round::begin();
        for payload in &self.payloads {
            let left = left.clone();
            let worker = Worker {
                l3: self.l3.clone(),
                meta: self.meta.clone(),
                payload: payload.clone(),
                kept: self.kept.clone(),
                kept_max,
                written: self.written.clone(),
            };
            workers.spawn(async move {
                let mut latencies = Vec::new();
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                    let began = Instant::now();
                    match direction {
                        Direction::Read => worker.read(newest).await?,
                        Direction::Write => worker.write().await?,
                    }
                    latencies.push(began.elapsed());
                }
                anyhow::Ok(latencies)
            });
        }
        let mut latencies = Vec::with_capacity(self.at_once);
        while let Some(worker) = workers.join_next().await {
            latencies.push(worker??);
        }
        let round = round.end(count * self.size);
        // Telling them apart is no part of what is measured.
        let mut histogram = histogram()?;
        latencies.iter().flatten().for_each(|latency| histogram.saturating_record(latency.as_nanos() as u64));
        Ok(round.with(&histogram))
    }

    /// Lets go of pages that were read.
    fn clear(&self) {
        self.kept.lock().expect("nobody panics with it").clear();
    }

    /// Reads without a scrub, and reads until a full scrub has ended. `None` while L3 has no scrub.
    pub async fn reads_during_scrub(&mut self, count: usize) -> Result<Option<DuringScrub>> {
        let Some(start) = SCRUB else { return Ok(None) };
        let without_us = self.run(Direction::Read, count).await?.p99_us;
        let scrub = start(&self.l3);
        let mut during_us = Vec::new();
        while !scrub.is_finished() {
            during_us.push(self.run(Direction::Read, count / 8 + self.at_once).await?.p99_us);
        }
        scrub.await?;
        during_us.sort_by(f64::total_cmp);
        let during_us =
            during_us.get(during_us.len() / 2).copied().context("the scrub ended before anything was read")?;
        Ok(Some(DuringScrub { without_us, during_us }))
    }
}

/// Pages that may be kept, so that as many as are asked for at once find memory beside them.
fn kept_max(size: usize, at_once: usize) -> usize {
    let under_way = at_once * (size + UNIT_BYTES);
    let kept = super::ARENA_BYTES.saturating_sub(under_way + SPARE_BYTES).min(KEPT_BYTES_MAX);
    kept / size
}

struct Worker {
    l3: L3,
    meta: PageMeta,
    payload: Slot,
    kept: Arc<Mutex<VecDeque<Slot>>>,
    kept_max: usize,
    written: Arc<AtomicU64>,
}

impl Worker {
    async fn read(&self, newest: u64) -> Result<()> {
        let written = self.written.load(Ordering::Relaxed);
        let number = rand::rng().random_range(written - newest.min(written)..written);
        let found = self.l3.read(&id(number), Instant::now() + PATIENCE).await?;
        let (_, payload) =
            found.filter(|(_, payload)| payload.len() == self.payload.len()).context("a page is not there")?;
        let mut kept = self.kept.lock().expect("nobody panics with it");
        kept.push_back(payload);
        while kept.len() > self.kept_max {
            kept.pop_front();
        }
        Ok(())
    }

    /// The checksums of a page are computed where it is received, once, and not by L3.
    async fn write(&self) -> Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let meta = PageMeta { id: id(number), generation: number + 1, ..self.meta.clone() };
        Ok(self.l3.write(meta, self.payload.clone(), Instant::now() + PATIENCE).await?)
    }
}

/// Nothing is rescued out of old segments: how fast the log is, is measured here, and not what it keeps.
pub fn options(dir: &Path, bytes: u64) -> L3Options {
    L3Options { keep_percent: 0, ..L3Options::new(dir, bytes) }
}

/// Name of page `number`.
pub fn id(number: u64) -> PageId {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    PageId { namespace: NamespaceId([7; 32]), key: PageKey(key) }
}

/// Opens the log again, as after a crash, and closes it.
pub async fn recover(dir: &Path, bytes: u64, arena: Arc<Arena>) -> Result<RecoveryReport> {
    let l3 = L3::open(options(dir, bytes), arena).await?;
    let report = l3.recovered().await?;
    l3.close().await;
    Ok(report)
}
