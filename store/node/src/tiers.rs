//! L2 over L3.
//!
//! A sealed page enters L2 and is written through to L3 from the same slot. Until that write is done it is held in
//! `writing` too, so that eviction from L2 cannot open a gap in which the page is nowhere. Reads promote from L3 to L2.

use crate::metrics::Metrics;
use crate::options::NodeOptions;
use foyer::{Cache, CacheBuilder, LruConfig};
use larder_device::{Arena, Slot};
use larder_format::{PageId, PageMeta};
use larder_l3::{L3, L3Error};
use larder_wire::TierCode;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// A sealed page in DRAM.
pub(crate) struct Page {
    pub(crate) meta: PageMeta,
    pub(crate) payload: Slot,
}

/// Most time for one write to L3.
const L3_WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Unit of the budget for pages that L3 has not got yet.
const DIRTY_UNIT: usize = 4096;

struct Writing {
    page: Arc<Page>,
    done: watch::Receiver<bool>,
}

/// The two tiers of a node.
pub(crate) struct Tiers {
    l2: Cache<PageId, Arc<Page>>,
    l3: Option<L3>,
    arena: Arc<Arena>,
    writing: Mutex<HashMap<PageId, Writing>>,
    dirty: Arc<Semaphore>,
    dirty_units: u32,
    metrics: Arc<Metrics>,
}

impl Tiers {
    pub(crate) fn new(options: &NodeOptions, arena: Arc<Arena>, l3: Option<L3>, metrics: Arc<Metrics>) -> Arc<Self> {
        // Few shards: foyer bounds each one by itself, and a shard must hold many pages.
        let shards = (options.l2_bytes >> 28).clamp(1, 8) as usize;
        let l2 = CacheBuilder::new(options.l2_bytes as usize)
            .with_shards(shards)
            .with_eviction_config(LruConfig::default())
            .with_weighter(|_, page: &Arc<Page>| page.payload.len())
            .build();
        // Half of the in-flight room may wait for L3; the other half is for reads.
        let dirty_units = (options.in_flight_bytes() as usize / 2 / DIRTY_UNIT) as u32;
        Arc::new(Self {
            l2,
            l3,
            arena,
            writing: Mutex::default(),
            dirty: Arc::new(Semaphore::new(dirty_units as usize)),
            dirty_units,
            metrics,
        })
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Room for a page of `bytes` that is not on L3 yet; `None` means busy.
    pub(crate) fn dirty_permit(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = (bytes.div_ceil(DIRTY_UNIT) as u32).min(self.dirty_units);
        self.dirty.clone().try_acquire_many_owned(units).ok()
    }

    /// Where a page lies now.
    pub(crate) fn locate(&self, id: &PageId) -> TierCode {
        if self.l2.contains(id) || self.writing.lock().contains_key(id) {
            return TierCode::L2;
        }
        match self.l3.as_ref().and_then(|l3| l3.find(id)) {
            Some(_) => TierCode::L3,
            None => TierCode::Nowhere,
        }
    }

    /// A copy in DRAM, without touching L3.
    fn get_l2(&self, id: &PageId) -> Option<Arc<Page>> {
        if let Some(entry) = self.l2.get(id) {
            return Some(entry.value().clone());
        }
        self.writing.lock().get(id).map(|writing| writing.page.clone())
    }

    /// A page and where it was. What L3 returns has been verified by it; what L2 holds is verified by the reader at the far
    /// end.
    pub(crate) async fn get(&self, id: &PageId, deadline: Instant) -> Option<(Arc<Page>, TierCode)> {
        if let Some(page) = self.get_l2(id) {
            self.metrics.pages_hit_l2.inc();
            return Some((page, TierCode::L2));
        }
        let found = match self.l3.as_ref() {
            Some(l3) => l3.read(id, deadline).await.unwrap_or_else(|error| {
                tracing::warn!(?id, %error, "L3 read failed: a miss");
                None
            }),
            None => None,
        };
        let Some((meta, payload)) = found else {
            self.metrics.pages_missed.inc();
            return None;
        };
        self.metrics.pages_hit_l3.inc();
        let page = Arc::new(Page { meta, payload });
        // A page forgotten while it was being read is not put back.
        if self.l3.as_ref().is_some_and(|l3| l3.find(id).is_some()) {
            self.l2.insert(*id, page.clone());
        }
        Some((page, TierCode::L3))
    }

    /// Makes a sealed page visible and begins to write it through.
    pub(crate) fn insert(self: &Arc<Self>, page: Arc<Page>, permit: OwnedSemaphorePermit) {
        let id = page.meta.id;
        let Some(l3) = self.l3.clone() else {
            self.l2.insert(id, page);
            return;
        };
        let (done, receiver) = watch::channel(false);
        self.writing.lock().insert(id, Writing { page: page.clone(), done: receiver });
        self.l2.insert(id, page.clone());
        let tiers = self.clone();
        tokio::spawn(async move {
            let written = l3.write(page.meta.clone(), page.payload.clone(), Instant::now() + L3_WRITE_TIMEOUT).await;
            if let Err(error) = written {
                tiers.metrics.l3_writes_failed.inc();
                tracing::warn!(?id, %error, "page not written to L3; it stays in L2 until evicted");
            }
            tiers.writing.lock().remove(&id);
            let _ = done.send(true);
            drop(permit);
        });
    }

    /// Forgets pages, durably where L3 has them; the number that were there. After an error they are not served, but may
    /// return after a crash: it is to be tried again.
    pub(crate) async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, L3Error> {
        let mut there = vec![false; ids.len()];
        for (id, there) in ids.iter().zip(&mut there) {
            // A write under way must land first, or it would land after the tombstone and resurrect the page.
            let pending = self.writing.lock().get(id).map(|writing| writing.done.clone());
            if let Some(mut done) = pending {
                *there = true;
                let _ = tokio::time::timeout_at(deadline.into(), done.wait_for(|&done| done)).await;
            }
            *there |= self.l3.as_ref().is_some_and(|l3| l3.find(id).is_some());
        }
        let durable = match &self.l3 {
            Some(l3) => l3.forget(ids, deadline).await.map(drop),
            None => Ok(()),
        };
        for (id, there) in ids.iter().zip(&mut there) {
            *there |= self.l2.remove(id).is_some();
        }
        durable?;
        let count = there.iter().filter(|&&t| t).count();
        self.metrics.pages_forgotten.inc_by(count as u64);
        Ok(count)
    }

    /// Verifies the copy in DRAM and drops it if it is damaged; the number dropped.
    pub(crate) fn recheck(&self, id: &PageId) -> usize {
        let Some(page) = self.get_l2(id) else { return 0 };
        match page.meta.verify(id, &page.payload) {
            Ok(()) => 0,
            Err(mismatch) => {
                tracing::error!(?id, %mismatch, "page damaged in memory: dropped");
                self.metrics.pages_corrupt_l2.inc();
                self.l2.remove(id);
                1
            }
        }
    }

    /// Waits until nothing waits for L3, or `deadline`.
    pub(crate) async fn drain(&self, deadline: Instant) {
        let all = self.dirty.acquire_many(self.dirty_units);
        if tokio::time::timeout_at(deadline.into(), all).await.is_err() {
            tracing::warn!("stopped before every page had reached L3");
        }
    }

    pub(crate) fn l3(&self) -> Option<&L3> {
        self.l3.as_ref()
    }

    /// State for people and scripts.
    pub(crate) fn status(&self) -> serde_json::Value {
        serde_json::json!({
            "l2": {
                "bytes_used": self.l2.usage(),
                "bytes_capacity": self.l2.capacity(),
                "pages": self.l2.entries(),
                "arena_bytes": self.arena.capacity(),
                "arena_used": self.arena.used(),
                "huge_pages": self.arena.huge_pages(),
            },
            "l3": self.l3.as_ref().map(|l3| l3.stats()),
            "writing": self.writing.lock().len(),
        })
    }
}
