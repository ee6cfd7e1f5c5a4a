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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
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
    /// Served no longer, though the write is still under way.
    forgotten: bool,
}

/// A write to L3 that is under way.
struct Written {
    tiers: Arc<Tiers>,
    page: Arc<Page>,
    _done: watch::Sender<bool>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Written {
    fn drop(&mut self) {
        let mut writing = self.tiers.writing.lock();
        // The key may have been forgotten and put again meanwhile: only the entry of this very page goes.
        if writing.get(&self.page.meta.id).is_some_and(|entry| Arc::ptr_eq(&entry.page, &self.page)) {
            writing.remove(&self.page.meta.id);
        }
    }
}

/// The two tiers of a node.
pub(crate) struct Tiers {
    l2: Cache<PageId, Arc<Page>>,
    l3: Option<L3>,
    arena: Arc<Arena>,
    writing: Mutex<HashMap<PageId, Writing>>,
    dirty: Arc<Semaphore>,
    dirty_units: u32,
    /// Forgets so far. Held while a page that was read from L3 enters L2, and while forgotten ones leave it: a page that
    /// was forgotten while it was being read is not put back.
    forgets: Mutex<u64>,
    shrinking: AtomicBool,
    this: Weak<Tiers>,
    metrics: Arc<Metrics>,
}

impl Tiers {
    pub(crate) fn new(options: &NodeOptions, arena: Arc<Arena>, l3: Option<L3>, metrics: Arc<Metrics>) -> Arc<Self> {
        // Few shards: foyer bounds each one by itself, and a shard must hold many pages.
        let shards = (options.l2_bytes >> 28).clamp(1, 8) as usize;
        let l2 = CacheBuilder::new(options.l2_bytes as usize)
            .with_shards(shards)
            .with_eviction_config(LruConfig::default())
            .with_weighter(|_, page: &Arc<Page>| page.payload.capacity())
            .build();
        // Half of the in-flight room may wait for L3; the other half is for reads.
        let dirty_units = (options.in_flight_bytes() as usize / 2 / DIRTY_UNIT) as u32;
        Arc::new_cyclic(|this| Self {
            l2,
            l3,
            arena,
            writing: Mutex::default(),
            dirty: Arc::new(Semaphore::new(dirty_units as usize)),
            dirty_units,
            forgets: Mutex::default(),
            shrinking: AtomicBool::new(false),
            this: this.clone(),
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
        if self.l2.contains(id) || self.writing.lock().get(id).is_some_and(|writing| !writing.forgotten) {
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
        self.writing.lock().get(id).filter(|writing| !writing.forgotten).map(|writing| writing.page.clone())
    }

    /// A page and where it was. What L3 returns has been verified by it; what L2 holds is verified by the reader at the far
    /// end.
    pub(crate) async fn get(&self, id: &PageId, deadline: Instant) -> Option<(Arc<Page>, TierCode)> {
        if let Some(page) = self.get_l2(id) {
            self.metrics.pages_hit_l2.inc();
            return Some((page, TierCode::L2));
        }
        let forgets = *self.forgets.lock();
        let found = match self.l3.as_ref() {
            Some(l3) => l3.read(id, deadline).await.unwrap_or_else(|error| {
                tracing::warn!(?id, %error, "L3 read failed: a miss");
                if matches!(error, L3Error::NoMemory { .. }) {
                    self.make_room();
                }
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
        let now = self.forgets.lock();
        let current = self.l3.as_ref().and_then(|l3| l3.find(id)).map(|entry| entry.generation);
        if *now == forgets && current == Some(page.meta.generation) {
            self.l2.insert(*id, page.clone());
        }
        drop(now);
        Some((page, TierCode::L3))
    }

    /// The arena had no run of bytes for a page: what L2 holds lies in the way. Evicts a sixteenth of it, in the
    /// background, so that later pages find room.
    pub(crate) fn make_room(&self) {
        if self.shrinking.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(tiers) = self.this.upgrade() else { return };
        tokio::task::spawn_blocking(move || {
            let capacity = tiers.l2.capacity();
            for bytes in [tiers.l2.usage().min(capacity) / 16 * 15, capacity] {
                if let Err(error) = tiers.l2.resize(bytes.max(1)) {
                    tracing::warn!(%error, "L2 could not be resized");
                }
            }
            tiers.shrinking.store(false, Ordering::Relaxed);
        });
    }

    /// Makes a sealed page visible and begins to write it through.
    pub(crate) fn insert(self: &Arc<Self>, page: Arc<Page>, permit: OwnedSemaphorePermit) {
        let id = page.meta.id;
        let Some(l3) = self.l3.clone() else {
            self.l2.insert(id, page);
            return;
        };
        let (done, receiver) = watch::channel(false);
        self.writing.lock().insert(id, Writing { page: page.clone(), done: receiver, forgotten: false });
        self.l2.insert(id, page.clone());
        let tiers = self.clone();
        tokio::spawn(async move {
            // However this ends, the page is held here no longer, and who waits for that hears of it.
            let _written = Written { tiers: tiers.clone(), page: page.clone(), _done: done, _permit: permit };
            let written = l3.write(page.meta.clone(), page.payload.clone(), Instant::now() + L3_WRITE_TIMEOUT).await;
            if let Err(error) = written {
                tiers.metrics.l3_writes_failed.inc();
                tracing::warn!(?id, %error, "page not written to L3; it stays in L2 until evicted");
            }
        });
    }

    /// Forgets pages, durably where L3 has them; the number that were there. After an error some may still be served, or
    /// return after a crash: it is to be tried again.
    pub(crate) async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, L3Error> {
        let mut there = vec![false; ids.len()];
        for (id, there) in ids.iter().zip(&mut there) {
            // A write under way must land first, or it would land after the tombstone and resurrect the page.
            let pending = self.writing.lock().get_mut(id).map(|writing| {
                writing.forgotten = true;
                writing.done.clone()
            });
            *there |= self.l2.remove(id).is_some();
            if let Some(mut done) = pending {
                *there = true;
                // Ends with an error when the sender is dropped, that is, when the write has ended.
                let _ = tokio::time::timeout_at(deadline.into(), done.wait_for(|&done| done)).await;
            }
            *there |= self.l3.as_ref().is_some_and(|l3| l3.find(id).is_some());
        }
        let durable = match &self.l3 {
            Some(l3) => l3.forget(ids, deadline).await.map(drop),
            None => Ok(()),
        };
        let mut forgets = self.forgets.lock();
        *forgets += 1;
        for id in ids {
            self.l2.remove(id);
        }
        drop(forgets);
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

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};
    use larder_l3::L3Options;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    /// A page that is on L3 and nowhere else.
    async fn page_on_l3(tiers: &Arc<Tiers>, bytes: usize) -> PageId {
        let mut slot = tiers.arena.allocate(bytes).unwrap();
        slot.fill(7);
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, vec![bytes as u32], &slot);
        let permit = tiers.dirty_permit(bytes).unwrap();
        tiers.insert(Arc::new(Page { meta, payload: slot.freeze() }), permit);
        tiers.drain(soon()).await;
        tiers.l2.remove(&id);
        assert_eq!(tiers.locate(&id), TierCode::L3);
        id
    }

    #[tokio::test]
    async fn a_page_forgotten_while_it_is_read_does_not_come_back() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let options = NodeOptions { l2_bytes: 32 << 20, ..NodeOptions::default() };
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let (l3, _) = L3::open(L3Options::new(dir.path(), 64 << 20), arena.clone()).await.unwrap();
        let tiers = Tiers::new(&options, arena, Some(l3), Arc::default());
        let id = page_on_l3(&tiers, 100_000).await;

        let mut read = std::pin::pin!(tiers.get(&id, soon()));
        assert!(futures::poll!(&mut read).is_pending(), "the device has been asked");
        assert_eq!(tiers.forget(&[id], soon()).await.unwrap(), 1);
        // Asked for before it was forgotten, it may be answered; it may not stay.
        let _ = read.await;
        assert_eq!(tiers.locate(&id), TierCode::Nowhere);
        tiers.l3.as_ref().unwrap().close().await;
    }
}
