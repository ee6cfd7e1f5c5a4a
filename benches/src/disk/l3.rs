//! Larder's side: pages in an L3, written in order and read at random.

use super::figures::{Direction, RoundFigures, Stopwatch, histogram};
use anyhow::{Context, Result};
use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
use larder_log::{L3, L3Options, L3Stats, RecoveryReport};
use larder_memory::arena::UNIT_BYTES;
use larder_memory::{Arena, Slot};
use rand::Rng;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::{JoinHandle, JoinSet};

/// Maximum bytes of pages that were read and are kept in the arena. The rest is for pages in flight
/// and for the log itself.
const KEPT_BYTES_MAX: usize = super::ARENA_BYTES / 4 * 3;
/// Bytes of the arena for anything but pages that are kept or being read: footers, a scrub, and
/// fragmentation.
const SPARE_BYTES: usize = super::ARENA_BYTES / 8;
const IO_TIMEOUT: Duration = Duration::from_secs(60);
/// Share of the log's pages, newest first, that reads choose from. The log evicts the oldest pages,
/// so reads of those could miss.
const READ_NEWEST: f64 = 0.8;

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

#[derive(Debug, Clone, Copy)]
pub struct ScrubLatency {
    pub without_us: f64,
    pub during_us: f64,
}

/// An L3 full of pages of one size. Pages are numbered in the order of their writes.
pub struct Pages {
    l3: L3,
    size: usize,
    concurrency: usize,
    meta: PageMeta,
    /// One page per concurrent writer, as each page of a node has its own memory. Sharing one page
    /// would keep it in the CPU cache.
    payloads: Vec<Slot>,
    /// Pages that were read last. A node keeps them in L2, so each read goes to other memory than
    /// the read before.
    kept: Arc<Mutex<VecDeque<Slot>>>,
    written: Arc<AtomicU64>,
}

impl Pages {
    /// Creates a log of `bytes` for `concurrency` requests at a time. Writes until it evicts, so
    /// that measurements include the reuse of segments.
    pub async fn fill(dir: &Path, bytes: u64, arena: Arc<Arena>, size: usize, concurrency: usize) -> Result<Pages> {
        let l3 = L3::open(options(dir, bytes), arena.clone()).await?;
        let mut pages = Pages::of(l3, &arena, size, 0, concurrency)?;
        while pages.stats().evicted_pages == 0 {
            pages.run(Direction::Write, concurrency * 4).await?;
        }
        Ok(pages)
    }

    /// Wraps an open log that holds the last of `written` pages. Fails if the arena has no memory
    /// for one page per concurrent writer.
    pub fn of(l3: L3, arena: &Arc<Arena>, size: usize, written: u64, concurrency: usize) -> Result<Pages> {
        let bytes: Vec<u8> = (0..size as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let meta = PageMeta::describe(id(0), PageKey::NONE, 0, vec![size as u32], &bytes);
        let payload = || {
            let mut slot = arena.allocate(size)?;
            slot.copy_from_slice(&bytes);
            Some(slot.freeze())
        };
        let payloads = (0..concurrency)
            .map(|_| payload())
            .collect::<Option<_>>()
            .context("the arena is too small for this concurrency")?;
        let written = Arc::new(AtomicU64::new(written));
        Ok(Pages { l3, size, concurrency, meta, payloads, kept: Arc::default(), written })
    }

    pub fn newest(&self) -> u64 {
        self.written.load(Ordering::Relaxed).saturating_sub(1)
    }

    pub fn stats(&self) -> L3Stats {
        self.l3.stats()
    }

    pub async fn close(self) {
        self.clear();
        self.l3.close().await;
    }

    /// Moves `count` pages with `concurrency` requests at a time. The device has as many of them as
    /// its queue is deep. The others wait or are being verified.
    pub async fn run(&mut self, direction: Direction, count: usize) -> Result<RoundFigures> {
        let left = Arc::new(AtomicU64::new(count as u64));
        let newest = (self.l3.stats().pages as f64 * READ_NEWEST) as u64;
        let kept_max = kept_max(self.size, self.concurrency);
        let mut workers = JoinSet::new();
        let round = Stopwatch::start();
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
        let mut latencies = Vec::with_capacity(self.concurrency);
        while let Some(worker) = workers.join_next().await {
            latencies.push(worker??);
        }
        let round = round.stop(count * self.size);
        // After the clock has stopped: sorting latencies is not part of the measurement.
        let mut histogram = histogram()?;
        latencies.iter().flatten().for_each(|latency| histogram.saturating_record(latency.as_nanos() as u64));
        Ok(round.with(&histogram))
    }

    fn clear(&self) {
        self.kept.lock().expect("no holder of this lock panics").clear();
    }

    /// Measures reads without a scrub, then reads until a full scrub has ended.
    pub async fn reads_during_scrub(&mut self, count: usize) -> Result<ScrubLatency> {
        let without_us = self.run(Direction::Read, count).await?.p99_us;
        let scrub = start_scrub(&self.l3);
        let mut during_us = Vec::new();
        while !scrub.is_finished() {
            during_us.push(self.run(Direction::Read, count / 8 + self.concurrency).await?.p99_us);
        }
        scrub.await?;
        during_us.sort_by(f64::total_cmp);
        let during_us = during_us.get(during_us.len() / 2).copied().context("the scrub ended before the first read")?;
        Ok(ScrubLatency { without_us, during_us })
    }
}

/// Maximum number of kept pages that leaves memory for all concurrent reads. 0 if those reads need
/// all of it.
fn kept_max(size: usize, concurrency: usize) -> usize {
    let in_flight = concurrency * (size + UNIT_BYTES);
    let kept = super::ARENA_BYTES.saturating_sub(in_flight + SPARE_BYTES).min(KEPT_BYTES_MAX);
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
        let found = self.l3.read(&id(number), Instant::now() + IO_TIMEOUT).await?;
        let (_, payload) = found
            .filter(|(_, payload)| payload.len() == self.payload.len())
            .with_context(|| format!("L3 missed page {number}"))?;
        let mut kept = self.kept.lock().expect("no holder of this lock panics");
        kept.push_back(payload);
        while kept.len() > self.kept_max {
            kept.pop_front();
        }
        Ok(())
    }

    /// Writes one page. Its checksums are precomputed, as a node computes them when it receives a
    /// page.
    async fn write(&self) -> Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let meta = PageMeta { id: id(number), generation: number + 1, ..self.meta.clone() };
        Ok(self.l3.write(meta, self.payload.clone(), Instant::now() + IO_TIMEOUT).await?)
    }
}

pub fn options(dir: &Path, bytes: u64) -> L3Options {
    L3Options { keep_percent: 0, ..L3Options::new(dir, bytes) }
}

pub fn id(number: u64) -> PageId {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    PageId { namespace: NamespaceId([7; 32]), key: PageKey(key) }
}

/// Opens the log again, waits until it has recovered, and closes it. The duration of the recovery
/// is in the report.
pub async fn recover(dir: &Path, bytes: u64, arena: Arc<Arena>) -> Result<RecoveryReport> {
    let l3 = L3::open(options(dir, bytes), arena).await?;
    let report = l3.recovered().await?;
    l3.close().await;
    Ok(report)
}
