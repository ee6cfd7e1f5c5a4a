//! Reading pages, from DRAM or from L3 into L2.

use super::turns::{Turn, TurnBefore};
use super::{PageLocation, PolicyActions, StampedLocation, Tiers};
use crate::devices::DeviceLocation;
use crate::page::Page;
use larder_format::PageId;
use larder_log::{HeldRecord, L3Error};
use larder_runtime::{fail_point, now, race_point};
use larder_wire::TierCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Length of the moving average of L3's read time, in reads: a new read counts one part in 16.
const L3_READS_WEIGHED: u32 = 16;
/// Expected read time of L3 before the first read: that of an NVMe drive under moderate load.
const L3_READ_GUESS: Duration = Duration::from_millis(1);

/// Pauses in milliseconds between the attempts to read a page for which the arena has no free run
/// of bytes. Each attempt evicts some pages. Their memory returns when no reader and no write to L3
/// uses it any more.
const NO_MEMORY_PAUSES_MS: [u64; 6] = [0, 1, 5, 20, 80, 300];

/// Reads of a page for a reader that wants it in L2, at most. The last one may have been shared
/// with a reader that does not.
const READS_INTO_L2_MAX: usize = 4;

/// Reason to read a page from L3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadFor {
    /// A reader that takes the page now.
    Read,
    /// A lease, which holds the page until its client has read it.
    Lease,
    /// A reader that wants the page in L2, which must not refuse it.
    L2,
}

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
        self.get_in_turn(id, location, Turn::alone(), deadline).await
    }

    /// Returns a page like [`Tiers::get_at`]. If it comes from L3, it is offered to L2 when the
    /// turn of the page before it has ended.
    pub(crate) async fn get_in_turn(
        &self,
        id: &PageId,
        location: PageLocation,
        turn: Turn,
        deadline: Instant,
    ) -> Option<(Arc<Page>, TierCode)> {
        self.get_from(id, location, LoadFor::Read, turn, deadline).await
    }

    /// Returns a page like [`Tiers::get_at`]. L2 refuses no page that this reads from L3: the
    /// caller wants it there.
    pub(crate) async fn warm_at(
        &self,
        id: &PageId,
        location: PageLocation,
        deadline: Instant,
    ) -> Option<(Arc<Page>, TierCode)> {
        self.get_from(id, location, LoadFor::L2, Turn::alone(), deadline).await
    }

    async fn get_from(
        &self,
        id: &PageId,
        location: PageLocation,
        purpose: LoadFor,
        turn: Turn,
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
            PageLocation::OnL3(found) => self.load(id, found, purpose, turn, deadline).await,
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

    /// Holds the record of a page that only L3 has, for a client that reads it by itself. Counts
    /// neither a hit nor a miss: the page has yet to be given. It does not enter L2, and L3 learns
    /// of its use.
    pub(crate) async fn hold_record(&self, id: &PageId, deadline: Instant) -> Option<HeldRecord> {
        let PageLocation::OnL3(found) = self.lookup(id) else { return None };
        let held = tokio::time::timeout_at(deadline.into(), self.devices.hold(&found.location)).await;
        // Without memory for a header the client asks for the page, which makes room.
        let held = held.ok()?.ok()??;
        if !self.is_live(held.meta().expires_unix_ms) {
            return None;
        }
        Some(held)
    }

    /// Returns a page for a lease, after reading it from L3 if necessary. Counts neither a hit nor
    /// a miss: the client has yet to ask for it. L2 may refuse the page, since the lease holds its
    /// memory until the client has read it.
    pub(crate) async fn fetch(&self, id: &PageId, turn: Turn, deadline: Instant) -> Option<Arc<Page>> {
        match self.lookup(id) {
            PageLocation::OnL3(found) => self.load(id, found, LoadFor::Lease, turn, deadline).await,
            location => location.into_page(),
        }
    }

    /// Returns a page for a reader that follows it. Counts neither a hit nor a miss, because its
    /// writer hands it over. The policy learns of the read.
    pub(crate) async fn hand_over(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        match self.lookup(id) {
            PageLocation::OnL3(found) => self.load(id, found, LoadFor::Read, Turn::alone(), deadline).await,
            location => {
                let page = location.into_page()?;
                self.record_touches(std::iter::once(&*page));
                Some(page)
            }
        }
    }

    /// Reads a page from L3. The eviction policy may keep it out of L2, unless its purpose is to be
    /// there. The turn ends when the policy has decided.
    async fn load(
        &self,
        id: &PageId,
        found: StampedLocation,
        purpose: LoadFor,
        mut turn: Turn,
        deadline: Instant,
    ) -> Option<Arc<Page>> {
        let mut found = found;
        let mut reads = 1;
        loop {
            let before = turn.take_before(deadline);
            let (page, is_own) = self.read_shared(id, found, purpose, (before, &mut turn), deadline).await?;
            if purpose != LoadFor::L2 || is_own || reads == READS_INTO_L2_MAX {
                return Some(page);
            }
            // The other reader may have left the page on L3.
            match self.lookup(id) {
                PageLocation::OnL3(newer) => found = newer,
                location => return location.into_page(),
            }
            reads += 1;
        }
    }

    /// Reads a page from L3. Concurrent readers of the same put share one device read. The device
    /// read continues past the deadline of this reader, for the others. The purpose of the first of
    /// them counts. Returns `true` with the page if that was this reader.
    ///
    /// The other readers do not wait for the turn of the first one, unless their purpose is L2.
    async fn read_shared(
        &self,
        id: &PageId,
        found: StampedLocation,
        purpose: LoadFor,
        (before, turn): (TurnBefore, &mut Turn),
        deadline: Instant,
    ) -> Option<(Arc<Page>, bool)> {
        let tiers = self.this.upgrade()?;
        let id = *id;
        // With the page alone as key, this reader could join a read that began before its lookup
        // and returns an earlier, forgotten put: rule 2 of `Tiers::find`.
        let key = (id, found.location.generation());
        let is_own = Arc::new(AtomicBool::new(false));
        let begun = is_own.clone();
        let read = self.l3_reads.get_or_fetch(&key, || async move {
            begun.store(true, Ordering::Release);
            tiers.read_into_l2(id, found, purpose, before).await.ok_or(NotOnL3)
        });
        let is_joined = || purpose != LoadFor::L2 && !is_own.load(Ordering::Acquire);
        let arrival = async {
            let page = self.arrivals.wait(&key).await;
            // The first reader waits for its turn.
            if is_joined() { page } else { std::future::pending().await }
        };
        let either = async {
            tokio::select! {
                biased;
                read = read => read.ok().map(|read| read.value().clone()),
                page = arrival => {
                    self.arrivals.prolong(&key, turn);
                    Some(page)
                }
            }
        };
        let page = tokio::time::timeout_at(deadline.into(), either).await.ok()??;
        Some((page, is_own.load(Ordering::Acquire)))
    }

    pub(super) async fn read_into_l2(
        &self,
        id: PageId,
        found: StampedLocation,
        purpose: LoadFor,
        mut before: TurnBefore,
    ) -> Option<Arc<Page>> {
        let key = (id, found.location.generation());
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
        // The page may have expired during the read, or while it waits.
        let is_live = || self.is_live(page.expires_unix_ms());
        let _shown = (is_live() && !before.is_over()).then(|| self.arrivals.show(key, &page));
        before.ended().await;
        if !is_live() {
            return None;
        }
        // Other pages share the stamp. A lookup that finds the same put again gives the stamp of a
        // moment at which the put was current.
        if self.changes.stamp(&id) != found.stamp
            && let PageLocation::OnL3(newer) = self.lookup(&id)
            && newer.location.generation() == page.generation()
        {
            found = newer;
        }
        // Before `state` is locked: these calls take locks of the devices and of their logs, and no
        // put or eviction may wait for them.
        let writable = self.devices.writable();
        let is_on_l3 = self.devices.is_current(&found.location);
        let mut actions = PolicyActions::default();
        let mut state = self.lock_updated(&mut actions);
        // Conditions for the page to enter L2:
        // - The stamp is unchanged: rule 3 of `Tiers::find`. This also proves that no put was
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
            let may_refuse = purpose != LoadFor::L2;
            let admitted = state.policy.loaded(page.clone(), may_refuse, self.clock.now_unix_ms(), &mut actions);
            if admitted && purpose == LoadFor::Lease {
                state.policy.announce_read(&id);
            }
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
    use crate::store::Store;
    use crate::test_support::{land, open_log, options, put, reserved, soon};
    use crate::tiers::Turns;
    use larder_format::{NamespaceId, PageKey, PageMeta, chunk_crcs};
    use larder_memory::Arena;
    use larder_runtime::{Clock, SteppedClock};
    use larder_wire::{CommitOutcome, PinKind, PutEnd, Reserved};
    use std::path::Path;
    use tempfile::TempDir;

    fn id() -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) }
    }

    async fn open(dir: &Path, generation_first: u64, l2_bytes: u64, clock: Clock) -> Store {
        let options = options(l2_bytes);
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let devices = Devices::of(vec![open_log(dir, &arena).await]).unwrap();
        Store::new(&options, arena, devices, clock, generation_first)
    }

    /// A store that has these pages on L3 only, and the folder of its L3. Their bytes are ones.
    async fn with_pages_on_l3(ids: &[PageId], l2_bytes: u64, clock: Clock) -> (TempDir, Store) {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let store = open(dir.path(), 1, 1 << 20, Clock::system()).await;
        ids.iter().for_each(|id| put(&store, *id, &[1; 100]));
        store.close(soon()).await;
        let store = open(dir.path(), 1000, l2_bytes, clock).await;
        (dir, store)
    }

    #[tokio::test]
    async fn a_stale_location_on_l3_never_outlives_a_load_a_forget_or_a_put() {
        let (_dir, store) = with_pages_on_l3(&[id()], 1 << 20, Clock::system()).await;
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
        put(&store, id(), &[2; 100]);
        let (third, _) = tiers.get_at(&id(), on_l3, soon()).await.unwrap();
        assert_eq!(third.payload[0], 2, "the put after the forget");
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn page_returns_from_l3_with_its_token_ids() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let store = open(dir.path(), 1, 1 << 20, Clock::system()).await;
        let put = store.reserve(id(), Reserved { token_ids: vec![1, 70_000], ..reserved(id(), 100) }).unwrap();
        land(&put, &[1; 100]);
        assert_eq!(store.puts().commit(&put), CommitOutcome::Stored);
        store.close(soon()).await;
        let store = open(dir.path(), 1000, 1 << 20, Clock::system()).await;
        let (page, tier) = store.tiers().get(&id(), soon()).await.unwrap();
        assert_eq!(tier, TierCode::L3);
        assert_eq!(page.token_ids().map(|ids| ids.as_slice()), Some(&[1, 70_000][..]));
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn compare_reads_no_payload_from_l3() {
        let (_dir, store) = with_pages_on_l3(&[id()], 1 << 20, Clock::system()).await;
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
        let (_dir, store) = with_pages_on_l3(&[id()], 1 << 20, Clock::system()).await;
        let tiers = store.tiers();
        let id = id();
        let mut read = Box::pin(tiers.get(&id, soon()));
        assert!(futures::poll!(&mut read).is_pending());
        tokio::task::yield_now().await;
        store.forget(&[id], soon()).await.unwrap();
        put(&store, id, &[2; 100]);
        // The read began before the forget, so it may return either put.
        let _ = read.await;
        let (page, tier) = tiers.get(&id, soon()).await.unwrap();
        assert_eq!((page.payload[0], tier), (2, TierCode::L2));
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn pages_of_one_request_enter_l2_in_its_order() {
        let ids = [1, 2].map(numbered);
        let (_dir, store) = with_pages_on_l3(&ids, 1 << 20, Clock::system()).await;
        let tiers = store.tiers();
        let mut turns = Turns::default();
        let [first_turn, second_turn] = [(); 2].map(|()| turns.next_turn());
        // The second page is read first.
        let mut second = Box::pin(tiers.get_in_turn(&ids[1], tiers.lookup(&ids[1]), second_turn, soon()));
        while store.metrics().pages_read_l3.get() == 0 {
            assert!(futures::poll!(&mut second).is_pending());
            tokio::task::yield_now().await;
        }
        let first = tiers.get_in_turn(&ids[0], tiers.lookup(&ids[0]), first_turn, soon()).await;
        assert!(first.is_some() && second.await.is_some());
        // Slots are taken in the order of admission.
        let (page, _) = tiers.next_from(0);
        assert_eq!(page.unwrap().id(), ids[0]);
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn reader_that_shares_a_read_does_not_wait_for_the_turn_of_another_request() {
        let id = id();
        let (_dir, store) = with_pages_on_l3(&[id], 1 << 20, Clock::system()).await;
        let tiers = store.tiers();
        let mut turns = Turns::default();
        let [turn_before, turn] = [(); 2].map(|()| turns.next_turn());
        let mut first = Box::pin(tiers.get_in_turn(&id, tiers.lookup(&id), turn, soon()));
        assert!(futures::poll!(&mut first).is_pending());
        let mut joined_turns = Turns::default();
        let [turn, mut turn_behind] = [(); 2].map(|()| joined_turns.next_turn());
        let joined = tiers.get_in_turn(&id, tiers.lookup(&id), turn, soon()).await;
        assert!(joined.is_some() && futures::poll!(&mut first).is_pending(), "it waited too");
        assert_eq!(store.metrics().pages_read_l3.get(), 1);
        // Its own next page is still offered to L2 after this one.
        let mut page_behind = Box::pin(turn_behind.take_before(soon()).ended());
        assert!(futures::poll!(&mut page_behind).is_pending());
        drop(turn_before);
        assert!(first.await.is_some());
        page_behind.await;
        store.close(soon()).await;
    }

    /// Not a hash of tokens: that would take most of the time of a test.
    fn numbered(number: u32) -> PageId {
        let mut key = [1; 32];
        key[..4].copy_from_slice(&number.to_le_bytes());
        PageId { key: PageKey(key), ..id() }
    }

    /// Requests a page every ten milliseconds, without L3: ten prefixes of fifteen pages in turn,
    /// and between any two of them sixty pages that never return. An L2 of less than the prefixes
    /// then refuses most others.
    fn make_l2_refuse(tiers: &Tiers, clock: &SteppedClock) {
        let request = |number: u32, position: u32| {
            clock.advance_to(tiers.clock.now_unix_ms() + 10);
            let id = numbered(number);
            if let Some(page) = tiers.get_l2(&id) {
                tiers.record_hits(std::iter::once(&*page));
                return;
            }
            let meta = PageMeta {
                id,
                parent: if position == 0 { PageKey::NONE } else { numbered(number - 1).key },
                position,
                generation: (1 << 40) + u64::from(number),
                expires_unix_ms: 0,
                part_bytes: vec![100],
                chunk_crcs: vec![0],
                token_ids: Vec::new(),
            };
            let page = Arc::new(tiers.page(meta, tiers.arena.allocate(100).unwrap().freeze()));
            let mut actions = PolicyActions::default();
            let mut state = tiers.lock_updated(&mut actions);
            state.policy.loaded(page.clone(), true, tiers.clock.now_unix_ms(), &mut actions);
            tiers.update_index(&state.policy, &page);
            tiers.apply(state, actions, None);
        };
        for round in 0..3000 {
            (0..15).for_each(|position| request(round % 10 * 100 + position, position));
            (0..60).for_each(|position| request(1_000_000 + round * 100 + position, position));
        }
    }

    /// A store whose L2 refuses most new pages. `ids` are on L3.
    async fn store_that_refuses(ids: &[PageId]) -> (TempDir, Store) {
        let clock = SteppedClock::at(1_000_000);
        let (dir, store) = with_pages_on_l3(ids, 100 * 4096, clock.clock()).await;
        make_l2_refuse(store.tiers(), &clock);
        (dir, store)
    }

    #[tokio::test]
    async fn leased_page_that_l2_refuses_stays_readable_until_the_lease_ends() {
        let ids: Vec<PageId> = (10_000..10_030).map(numbered).collect();
        let (_dir, store) = store_that_refuses(&ids).await;
        let tiers = store.tiers();
        let mut refused = 0;
        for id in &ids {
            let page = tiers.fetch(id, Turn::alone(), soon()).await.unwrap();
            let lease = tiers.hold(&page).unwrap();
            drop(page);
            assert_eq!(tiers.locate(id), TierCode::L2, "a read of it waits for no device");
            drop(lease);
            refused += u32::from(tiers.locate(id) == TierCode::L3);
        }
        assert!(refused > 0, "L2 admitted all pages");
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn l2_admits_pages_of_low_value_for_a_warm_or_a_pin() {
        let ids: Vec<PageId> = (10_000..10_060).map(numbered).collect();
        let (_dir, store) = store_that_refuses(&ids).await;
        let tiers = store.tiers();
        let mut refused = 0;
        for id in &ids[..30] {
            let (_, tier) = tiers.get(id, soon()).await.unwrap();
            assert_eq!(tier, TierCode::L3);
            refused += u32::from(tiers.locate(id) == TierCode::L3);
        }
        assert!(refused > 0, "so the rest of this test shows something");
        for id in &ids[30..50] {
            assert_eq!(store.warm(&[*id], soon()).await, 1);
            assert_eq!(tiers.locate(id), TierCode::L2);
        }
        for id in &ids[50..] {
            assert_eq!(store.pin(&[*id], PinKind::Soft, 60_000, soon()).await, Ok(1));
        }
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn l2_admits_a_page_for_a_warm_that_shares_the_read_of_a_get() {
        let ids: Vec<PageId> = (10_000..10_030).map(numbered).collect();
        let (_dir, store) = store_that_refuses(&ids).await;
        let tiers = store.tiers();
        for id in &ids {
            let deadline = soon();
            let location = tiers.lookup(id);
            let (got, warmed) = futures::join!(tiers.get(id, deadline), tiers.warm_at(id, location, deadline));
            assert!(got.is_some() && warmed.is_some());
            assert_eq!(tiers.locate(id), TierCode::L2);
        }
        store.close(soon()).await;
    }
}
