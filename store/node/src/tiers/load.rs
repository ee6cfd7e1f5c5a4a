//! Reading pages, from DRAM or from L3 into L2.

use super::{PageLocation, PolicyActions, StampedLocation, Tiers};
use crate::devices::DeviceLocation;
use crate::page::Page;
use larder_format::PageId;
use larder_log::L3Error;
use larder_runtime::{fail_point, now, race_point};
use larder_wire::TierCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Length of the moving average of L3's read time, in reads: a new read counts one part in 16.
const L3_READS_WEIGHED: u32 = 16;
/// Expected read time of L3 before the first read: that of an NVMe drive under moderate load.
const L3_READ_GUESS: Duration = Duration::from_millis(1);

/// Pauses in milliseconds between the attempts to read a page for which the arena has no free run
/// of bytes. Each attempt evicts some pages. Their memory returns when no reader and no write to L3
/// uses it any more.
const NO_MEMORY_PAUSES_MS: [u64; 6] = [0, 1, 5, 20, 80, 300];

/// L3 no longer has the page. All readers that share the read get a miss.
#[derive(Debug, thiserror::Error)]
#[error("the page is not on L3")]
struct NotOnL3;

impl Tiers {
    /// Returns a page and the tier that had it. Counts a hit or a miss.
    ///
    /// L3 verifies what it returns. The reader at the far end verifies bytes from L2.
    pub async fn get(&self, id: &PageId, deadline: Instant) -> Option<(Arc<Page>, TierCode)> {
        self.get_at(id, self.lookup(id), deadline).await
    }

    /// Returns a page from the location that [`Tiers::lookup`] returned for the same request. Looks
    /// it up again only if a put, load or forget of the page came in between. Counts like
    /// [`Tiers::get`].
    pub(crate) async fn get_at(
        &self,
        id: &PageId,
        location: PageLocation,
        deadline: Instant,
    ) -> Option<(Arc<Page>, TierCode)> {
        // A request may wait long for send credit between lookup and read. Meanwhile another may
        // have brought the page into L2.
        let location = match location {
            PageLocation::OnL3(found) if self.changes.stamp(id) != found.stamp => self.lookup(id),
            valid => valid,
        };
        let found = match location {
            PageLocation::InL2(page) | PageLocation::BeingWritten(page) | PageLocation::Held(page) => {
                self.record_hits(std::iter::once(&*page));
                return Some((page, TierCode::L2));
            }
            PageLocation::OnL3(_) if fail_point!("node.get-misses-l3") => None,
            PageLocation::OnL3(found) => self.load(id, found, deadline).await,
            PageLocation::Absent => None,
        };
        match &found {
            Some(_) => self.metrics.pages_hit_l3.inc(),
            None => self.metrics.pages_missed.inc(),
        };
        found.map(|page| (page, TierCode::L3))
    }

    /// Returns the checksums and the generation of a page. Counts a hit or a miss, as a get does:
    /// the caller has the same page and asks in place of a put.
    ///
    /// Of a page on L3, only the header of its record is read. It is neither verified nor loaded.
    pub(crate) async fn describe(&self, id: &PageId, deadline: Instant) -> Option<(Vec<u32>, u64)> {
        let location = self.lookup(id);
        let PageLocation::OnL3(found) = location else {
            let (page, _) = self.get_at(id, location, deadline).await?;
            let meta = page.meta();
            return Some((meta.chunk_crcs, meta.generation));
        };
        let read = async {
            let meta = self.devices.read_meta(&found.location).await;
            if !matches!(meta, Err(L3Error::NoMemory { .. })) {
                return meta;
            }
            self.make_room();
            self.devices.read_meta(&found.location).await
        };
        let read = tokio::time::timeout_at(deadline.into(), read).await.unwrap_or(Ok(None));
        let meta = read.unwrap_or_else(|error| {
            tracing::warn!(?id, %error, "cannot read the header of a page from L3; its writer cannot compare it");
            None
        });
        let meta = meta.filter(|meta| self.is_live(meta.expires_unix_ms));
        match &meta {
            Some(_) => self.metrics.pages_hit_l3.inc(),
            None => self.metrics.pages_missed.inc(),
        };
        meta.map(|meta| (meta.chunk_crcs, meta.generation))
    }

    /// Returns a page, after reading it from L3 if necessary. Counts neither a hit nor a miss: the
    /// client has yet to ask for it.
    pub(crate) async fn fetch(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        match self.lookup(id) {
            PageLocation::OnL3(found) => self.load(id, found, deadline).await,
            location => location.into_page(),
        }
    }

    /// Returns a page for a reader that follows it. Counts neither a hit nor a miss, because its
    /// writer hands it over. The policy learns of the read.
    pub(crate) async fn hand_over(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        match self.lookup(id) {
            PageLocation::OnL3(found) => self.load(id, found, deadline).await,
            location => {
                let page = location.into_page()?;
                self.record_touches(std::iter::once(&*page));
                Some(page)
            }
        }
    }

    /// Reads a page from L3. Concurrent readers of the same put share one device read. The device
    /// read continues past the deadline of this reader, for the others.
    async fn load(&self, id: &PageId, found: StampedLocation, deadline: Instant) -> Option<Arc<Page>> {
        let tiers = self.this.upgrade()?;
        let id = *id;
        // With the page alone as key, this reader could join a read that began before its lookup
        // and returns an earlier, forgotten put: rule 2 of `Tiers::lookup`.
        let key = (id, found.location.generation());
        let read =
            self.l3_reads.get_or_fetch(&key, || async move { tiers.read_into_l2(id, found).await.ok_or(NotOnL3) });
        let read = tokio::time::timeout_at(deadline.into(), read).await.ok()?;
        Some(read.ok()?.value().clone())
    }

    pub(super) async fn read_into_l2(&self, id: PageId, found: StampedLocation) -> Option<Arc<Page>> {
        let mut found = found;
        // Another read of this page may have ended between the lookup and this call. Without this
        // check the device would read the page twice.
        if self.changes.stamp(&id) != found.stamp {
            match self.lookup(&id) {
                PageLocation::OnL3(newer) => found = newer,
                other => return other.into_page(),
            }
        }
        let page = Arc::new(self.read_l3(&found.location).await?);
        // The page may have expired during the read.
        if !self.is_live(page.expires_unix_ms()) {
            return None;
        }
        // Before `state` is locked: these calls take locks of the devices and of their logs, and no
        // put or eviction may wait for them.
        let writable = self.devices.writable();
        let is_on_l3 = self.devices.is_current(&found.location);
        let mut actions = PolicyActions::default();
        let mut state = self.lock_updated(&mut actions);
        // Conditions for the page to enter L2:
        // - The stamp is unchanged: rule 3 of `Tiers::lookup`. This also proves that no put was
        //   sealed since the lookup, so DRAM is not probed again.
        // - The generation is that of the lookup. If the newest put was damaged, L3 returned an
        //   older one, which stays out of L2.
        // - L3 still had the record after the read. Otherwise the policy would count on a copy that
        //   is gone. A record that goes later costs the page when L2 evicts it.
        //
        // A newer put on a device that was quarantined at the lookup is not noticed: readers get
        // the older put until L2 evicts it.
        let is_current =
            self.changes.stamp(&id) == found.stamp && page.generation() == found.location.generation() && is_on_l3;
        if race_point!("node.load-after-unlock") {
            drop(state);
            state = self.lock_updated(&mut actions);
        }
        if is_current || fail_point!("node.load-after-forget") {
            state.policy.set_writable(writable);
            state.policy.loaded(page.clone(), self.clock.now_unix_ms(), &mut actions);
            self.update_index(&state.policy, &page);
            self.changes.record(&id);
            self.apply(state, actions, None);
            return Some(page);
        }
        // A put that was sealed during the read is newer. A forget during the read is concurrent
        // with all readers that share it, so they may still get the page.
        let newer = self.get_l2(&id).filter(|newer| newer.generation() > page.generation());
        self.apply(state, actions, None);
        newer.or(Some(page))
    }

    async fn read_l3(&self, location: &DeviceLocation) -> Option<Page> {
        let began = now();
        let mut read = self.devices.read(location).await;
        for pause in NO_MEMORY_PAUSES_MS {
            if !matches!(read, Err(L3Error::NoMemory { .. })) {
                break;
            }
            self.make_room();
            tokio::time::sleep(Duration::from_millis(pause)).await;
            read = self.devices.read(location).await;
        }
        let read = read.unwrap_or_else(|error| {
            tracing::warn!(id = ?location.id(), %error, "cannot read a page from L3; the reader gets a miss");
            None
        });
        let (meta, payload) = read?;
        self.metrics.pages_read_l3.inc();
        self.record_l3_read(now().saturating_duration_since(began));
        Some(self.page(meta, payload))
    }

    fn record_l3_read(&self, time: Duration) {
        let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        // Relaxed, and not one atomic step: two updates that cross lose one sample, which an
        // average can spare.
        let before = self.l3_read_us.load(Ordering::Relaxed);
        let mean = if before == 0 { time } else { before - before / L3_READS_WEIGHED + time / L3_READS_WEIGHED };
        self.l3_read_us.store(mean, Ordering::Relaxed);
    }

    /// Expected time of one read from L3: the moving average, or a guess before the first read.
    pub(crate) fn l3_expected(&self) -> Duration {
        match self.l3_read_us.load(Ordering::Relaxed) {
            0 => L3_READ_GUESS,
            known => Duration::from_micros(known.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Devices;
    use crate::options::{L3Device, NodeOptions};
    use crate::store::Store;
    use larder_format::{NamespaceId, PageKey, chunk_crcs};
    use larder_log::{L3, L3Options};
    use larder_memory::Arena;
    use larder_runtime::Clock;
    use larder_wire::{CommitOutcome, PutEnd, Reserved};

    fn id() -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) }
    }

    fn put(store: &Store, byte: u8) {
        let page = Reserved {
            key: id().key,
            parent: PageKey::NONE,
            position: 0,
            ttl_ms: 0,
            part_bytes: vec![100],
            copy_of: None,
        };
        let put = store.reserve(id(), page).ok().unwrap();
        let mut part = put.take_part(0, 100).unwrap();
        part.fill(byte);
        let crcs = chunk_crcs(&part).collect();
        assert!(put.land(0, part, crcs) && store.puts().commit(&put) == CommitOutcome::Stored);
    }

    async fn open(dir: &std::path::Path, generation_first: u64) -> Store {
        let options = NodeOptions { l2_bytes: 1 << 20, in_flight_bytes: Some(1 << 20), ..NodeOptions::default() };
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let bytes = 64 << 20;
        let l3 = L3::open(L3Options::new(dir, bytes), arena.clone()).await.unwrap();
        l3.recovered().await.unwrap();
        let devices = Devices::of(vec![(L3Device { dir: dir.to_path_buf(), bytes }, Ok(l3))]).unwrap();
        Store::new(&options, arena, devices, Clock::system(), generation_first)
    }

    fn soon() -> Instant {
        now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn a_stale_location_on_l3_never_outlives_a_load_a_forget_or_a_put() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let store = open(dir.path(), 1).await;
        put(&store, 1);
        store.close(soon()).await;
        let store = open(dir.path(), 100).await;
        let tiers = store.tiers();
        let on_l3 = tiers.lookup(&id());
        assert_eq!(on_l3.tier(), TierCode::L3);

        let (first, tier) = tiers.get_at(&id(), on_l3.clone(), soon()).await.unwrap();
        assert_eq!((first.payload[0], tier), (1, TierCode::L3));
        let (second, tier) = tiers.get_at(&id(), on_l3.clone(), soon()).await.unwrap();
        assert_eq!((second.payload[0], tier), (1, TierCode::L2), "the load made the location stale");
        assert_eq!(store.metrics().pages_read_l3.get(), 1);

        assert_eq!(store.forget(&[id()], soon()).await.unwrap(), 1);
        assert!(tiers.get_at(&id(), on_l3.clone(), soon()).await.is_none());
        put(&store, 2);
        let (third, _) = tiers.get_at(&id(), on_l3, soon()).await.unwrap();
        assert_eq!(third.payload[0], 2, "the put after the forget");
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn compare_reads_no_payload_from_l3() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let store = open(dir.path(), 1).await;
        put(&store, 1);
        store.close(soon()).await;
        let store = open(dir.path(), 100).await;
        let crcs = |byte: u8| chunk_crcs(&[byte; 100]).collect::<Vec<u32>>();
        let read_bytes = || store.status()["tiers"]["l3"]["devices"][0]["log"]["read_bytes"].as_u64();
        let end = |outcome, generation| PutEnd { outcome, generation };
        assert_eq!(store.compare(&id(), &crcs(1), soon()).await, end(CommitOutcome::AlreadyThere, 1));
        assert_eq!(store.compare(&id(), &crcs(2), soon()).await, end(CommitOutcome::Refused, 0));
        assert_eq!((store.metrics().pages_read_l3.get(), read_bytes()), (0, Some(0)));
        assert_eq!(store.tiers().lookup(&id()).tier(), TierCode::L3, "it was not loaded");
        store.forget(&[id()], soon()).await.unwrap();
        assert_eq!(store.compare(&id(), &crcs(1), soon()).await, end(CommitOutcome::Incomplete, 0));
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn a_put_during_a_read_of_l3_is_not_replaced_by_the_older_page() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let store = open(dir.path(), 1).await;
        put(&store, 1);
        store.close(soon()).await;
        let store = open(dir.path(), 100).await;
        let tiers = store.tiers();
        let id = id();
        let mut read = Box::pin(tiers.get(&id, soon()));
        assert!(futures::poll!(&mut read).is_pending());
        tokio::task::yield_now().await;
        store.forget(&[id], soon()).await.unwrap();
        put(&store, 2);
        // The read began before the forget, so it may return either put.
        let _ = read.await;
        let (page, tier) = tiers.get(&id, soon()).await.unwrap();
        assert_eq!((page.payload[0], tier), (2, TierCode::L2));
        store.close(soon()).await;
    }
}
