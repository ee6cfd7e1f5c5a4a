//! L2 over L3.
//!
//! Always true:
//! - `policy` decides what L2 keeps; foyer is its index, with so much capacity that it never evicts by itself. Both change
//!   under one lock;
//! - a page being written to L3 is held in `writing` until the write has ended, and readable there, so that eviction cannot
//!   open a gap in which it is nowhere;
//! - however many ask for a page on L3, it is read once;
//! - a page whose time is over is a miss, wherever it lies.

use crate::budget::Charge;
use crate::clock::{Clock, now};
use crate::devices::{Devices, ForgetError};
use crate::holds::{Hold, Holds};
use crate::metrics::Metrics;
use crate::options::NodeOptions;
use crate::policy::{Decisions, PageFacts, PinRefused, Placed, PolicyOptions, Residency};
use crate::scrub::Scrubbed;
use crate::writing::{Ticket, Writing};
use foyer::{Cache, CacheBuilder, FifoConfig};
use larder_core::planted::{Bug, has};
use larder_device::{Arena, Slot, SlotMut};
use larder_evict::Reason;
use larder_format::{NamespaceId, PageId, PageMeta};
use larder_l3::L3Error;
use larder_wire::{PinKind, TierCode};
use parking_lot::{Mutex, MutexGuard};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::Notify;

/// A sealed page in DRAM.
#[derive(Debug)]
pub struct Page {
    /// Identity and checksums.
    pub meta: PageMeta,
    /// Its bytes.
    pub payload: Slot,
}

impl Page {
    fn facts(&self) -> PageFacts {
        let PageMeta { id, parent, position, generation, expires_unix_ms, .. } = self.meta;
        PageFacts { id, parent, position, generation, bytes: self.bytes(), expires_unix_ms }
    }

    /// Bytes of its slot.
    pub(crate) fn bytes(&self) -> u32 {
        u32::try_from(self.payload.capacity()).unwrap_or(u32::MAX)
    }
}

/// Bytes of L2 that are made free at once when the arena has no run of bytes for a page.
const MAKE_ROOM_BYTES: u64 = 64 << 20;
/// Slots are multiples of it.
const SLOT_UNIT: usize = 4096;
/// Reads of L3 that count for what the next is expected to take.
const L3_READS_WEIGHED: u32 = 16;
/// What a read of L3 is expected to take before there was one.
const L3_READ_GUESS: Duration = Duration::from_millis(1);
/// Most namespaces in a status.
const STATUS_NAMESPACES_MAX: usize = 64;
/// How often a stop says what is still on its way to L3.
const DRAIN_PROGRESS: Duration = Duration::from_secs(5);

/// What is decided under one lock.
pub(crate) struct State {
    policy: Residency,
    /// Forgets so far: a page that was read from L3 enters L2 only if nothing was forgotten since the read began.
    forgets: u64,
}

/// A page read from L3 for all who asked meanwhile.
#[derive(Clone)]
struct Loaded {
    page: Arc<Page>,
    /// Forgets when the read began.
    forgets: u64,
}

/// L3 does not have the page.
#[derive(Debug, thiserror::Error)]
#[error("a miss")]
struct Missed;

/// Room for a page that is being put; it comes back when this is dropped.
pub(crate) struct Room {
    tiers: Arc<Tiers>,
    bytes: u32,
    charge: Option<Charge>,
}

impl Room {
    /// The page takes the room over.
    fn spend(mut self) -> u32 {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.bytes > 0 && !has(Bug::RoomLeaks) {
            self.tiers.state.lock().policy.release(self.bytes);
            self.tiers.ended.notify_waiters();
        }
    }
}

/// The two tiers of a node.
pub(crate) struct Tiers {
    l2: Cache<PageId, Arc<Page>>,
    /// Keeps nothing: brings those together who want the same page from L3.
    reads: Cache<PageId, Loaded>,
    devices: Devices,
    arena: Arc<Arena>,
    state: Mutex<State>,
    writing: Writing,
    holds: Arc<Holds>,
    /// Microseconds that a page on L3 takes, a mean in which older ones fade.
    l3_read_us: AtomicU32,
    /// Wakes whoever waits for writes and puts to end.
    ended: Notify,
    clock: Clock,
    this: Weak<Tiers>,
    /// Writes may begin on a device's thread.
    runtime: Handle,
    metrics: Arc<Metrics>,
    pub(crate) scrubbed: Scrubbed,
}

impl Tiers {
    /// Must be called inside a tokio runtime.
    pub(crate) fn new(
        options: &NodeOptions,
        arena: Arc<Arena>,
        devices: Devices,
        clock: Clock,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let shards = (options.l2_bytes >> 28).clamp(1, 8) as usize;
        // One shard may come to hold all there is.
        let capacity = arena.capacity().saturating_mul(2 * shards);
        let index = |_: &PageId, page: &Arc<Page>| page.payload.capacity();
        let l2 = CacheBuilder::new(capacity)
            .with_shards(shards)
            .with_eviction_config(FifoConfig::default())
            .with_weighter(index)
            .build();
        let reads = CacheBuilder::new(shards)
            .with_shards(shards)
            .with_eviction_config(FifoConfig::default())
            .with_filter(|_, _: &Loaded| false)
            .build();
        let policy = Residency::new(PolicyOptions {
            capacity_bytes: options.l2_bytes,
            dirty_bytes_max: options.dirty_bytes_max(),
            has_l3: !devices.is_empty(),
            write_policy: options.write_policy,
            write_after_hits: options.write_after_hits,
            quota_default: options.quota_default,
            quotas: options.quotas.clone(),
            seed: options.seed.unwrap_or_else(rand::random),
        });
        Arc::new_cyclic(|this: &Weak<Tiers>| {
            let told = this.clone();
            devices.on_damage(
                &(Arc::new(move |id| {
                    if let Some(tiers) = told.upgrade() {
                        tiers.lost_on_l3(&id);
                    }
                }) as _),
            );
            Self {
                l2,
                reads,
                devices,
                arena,
                state: Mutex::new(State { policy, forgets: 0 }),
                writing: Writing::default(),
                holds: Holds::new(options.held_bytes_max()),
                l3_read_us: AtomicU32::new(0),
                ended: Notify::new(),
                clock,
                this: this.clone(),
                runtime: Handle::current(),
                metrics,
                scrubbed: Scrubbed::default(),
            }
        })
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Memory and room for a page of `bytes`, counted by `charge`; `None` means busy.
    pub(crate) fn reserve(&self, bytes: usize, charge: Option<Charge>) -> Option<(SlotMut, Room)> {
        let mut room = self.room(bytes, charge)?;
        let slot = self.arena.allocate(bytes).or_else(|| {
            self.make_room();
            self.arena.allocate(bytes)
        });
        let Some(slot) = slot else {
            if let Some(charge) = room.charge.take() {
                charge.unused();
            }
            return None;
        };
        Some((slot, room))
    }

    fn room(&self, bytes: usize, charge: Option<Charge>) -> Option<Room> {
        let tiers = self.this.upgrade()?;
        let bytes = u32::try_from(bytes.next_multiple_of(SLOT_UNIT)).ok()?;
        let writable = self.devices.writable();
        let mut state = self.state.lock();
        state.policy.set_writable(writable);
        let reserved = state.policy.reserve(bytes);
        drop(state);
        // Not `then_some`: room that was not had must not be given back.
        if !reserved {
            if let Some(charge) = charge {
                charge.unused();
            }
            return None;
        }
        Some(Room { tiers, bytes, charge })
    }

    /// Where a page lies now.
    pub(crate) fn locate(&self, id: &PageId) -> TierCode {
        let in_l2 = self.l2.get(id).map(|entry| self.is_live(&entry.value().meta));
        let beside = || self.writing.get(id).or_else(|| self.holds.get(id));
        if in_l2.unwrap_or_else(|| beside().is_some_and(|page| self.is_live(&page.meta))) {
            return TierCode::L2;
        }
        // What is over in L2 is over on L3.
        match self.devices.generation(id).filter(|_| in_l2.is_none()) {
            Some(_) => TierCode::L3,
            None => TierCode::Nowhere,
        }
    }

    fn is_live(&self, meta: &PageMeta) -> bool {
        meta.expires_unix_ms == 0 || self.clock.now_unix_ms() < meta.expires_unix_ms || has(Bug::OverIsServed)
    }

    /// A copy in DRAM, without touching L3.
    pub(crate) fn get_l2(&self, id: &PageId) -> Option<Arc<Page>> {
        let page = self.l2.get(id).map(|entry| entry.value().clone());
        let page = page.or_else(|| self.writing.get(id)).or_else(|| self.holds.get(id));
        page.filter(|page| self.is_live(&page.meta))
    }

    /// Keeps a page readable, and its memory where it is, until the hold is dropped; `None` if too much is held, or the page
    /// is not the one that is served now: it may have been forgotten since it was found.
    pub(crate) fn hold(&self, page: &Arc<Page>) -> Option<Hold> {
        // Forgetting withholds under this lock, last of all: a page that is current now is withheld then.
        self.hold_in(&self.state.lock(), page)
    }

    fn hold_in(&self, state: &State, page: &Arc<Page>) -> Option<Hold> {
        let PageMeta { id, generation, .. } = &page.meta;
        let is_this = |found: &Arc<Page>| found.meta.generation == *generation;
        let current = state.policy.generation(id) == Some(*generation)
            || self.writing.get(id).is_some_and(|found| is_this(&found))
            || self.holds.get(id).is_some_and(|found| is_this(&found))
            || self.devices.generation(id) == Some(*generation);
        current.then(|| self.holds.hold(page)).flatten()
    }

    /// Holds those of the pages that are in L2 and that are `wanted`, going by their place among `ids`, each a hit; as
    /// [`Tiers::hold`].
    pub(crate) fn hold_all_l2(&self, ids: &[PageId], wanted: impl Fn(usize, &Page) -> bool) -> Vec<Option<Hold>> {
        let find = |(at, id)| self.get_l2(id).filter(|page| wanted(at, page));
        // Dropped without the lock.
        let found: Vec<_> = ids.iter().enumerate().map(find).collect();
        let (mut out, now_ms) = (Decisions::default(), self.clock.now_unix_ms());
        let mut state = self.state.lock();
        let hold = |page: &Option<Arc<Page>>| {
            let hold = self.hold_in(&state, page.as_ref()?)?;
            let PageMeta { id, generation, .. } = &hold.page().meta;
            state.policy.hit(id, *generation, now_ms, &mut out);
            Some(hold)
        };
        let holds: Vec<_> = found.iter().map(hold).collect();
        self.carry_out(state, out, None);
        self.metrics.pages_hit_l2.inc_by(holds.iter().flatten().count() as u64);
        holds
    }

    /// Those of the pages that are in L2, each a hit.
    pub(crate) fn get_all_l2(&self, ids: &[PageId]) -> Vec<Option<Arc<Page>>> {
        let found: Vec<_> = ids.iter().map(|id| self.get_l2(id)).collect();
        self.metrics.pages_hit_l2.inc_by(found.iter().flatten().count() as u64);
        self.decide(None, |policy, now_ms, out| {
            for page in found.iter().flatten() {
                policy.hit(&page.meta.id, page.meta.generation, now_ms, out);
            }
        });
        found
    }

    /// A page, from L3 if need be; no hit and no miss.
    pub(crate) async fn fetch(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        match self.get_l2(id) {
            None if self.devices.generation(id).is_some() => self.load(id, deadline).await,
            page => page,
        }
    }

    /// A page and where it was. What L3 returns has been verified by it; what L2 holds is verified by the reader at the far
    /// end.
    pub(crate) async fn get(&self, id: &PageId, deadline: Instant) -> Option<(Arc<Page>, TierCode)> {
        if let Some(page) = self.get_l2(id) {
            self.metrics.pages_hit_l2.inc();
            self.decide(None, |policy, now_ms, out| policy.hit(id, page.meta.generation, now_ms, out));
            return Some((page, TierCode::L2));
        }
        let found = match self.devices.generation(id) {
            Some(_) => self.load(id, deadline).await,
            None => None,
        };
        match &found {
            Some(_) => self.metrics.pages_hit_l3.inc(),
            None => self.metrics.pages_missed.inc(),
        };
        found.map(|page| (page, TierCode::L3))
    }

    /// Reads a page from L3, once for all who want it meanwhile. Past the deadline the read goes on for the others.
    async fn load(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        let tiers = self.this.upgrade()?;
        let asked = self.state.lock().forgets;
        let name = *id;
        let read = self.reads.get_or_fetch(id, || async move { tiers.read(name).await.ok_or(Missed) });
        let read = tokio::time::timeout_at(deadline.into(), read).await.ok()?;
        let Loaded { page, forgets } = read.ok()?.value().clone();
        // The read may have begun before something was forgotten, and this request after it.
        let current = forgets == asked || self.devices.generation(id) == Some(page.meta.generation);
        current.then_some(page)
    }

    /// Reads a page from L3 and offers it to L2.
    async fn read(&self, id: PageId) -> Option<Loaded> {
        let forgets = self.state.lock().forgets;
        // Another read may have ended after this was asked for and before it began.
        if let Some(page) = self.get_l2(&id) {
            return Some(Loaded { page, forgets });
        }
        let begin = now();
        let mut found = self.devices.read(&id).await;
        if matches!(found, Err(L3Error::NoMemory { .. })) {
            self.make_room();
            found = self.devices.read(&id).await;
        }
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(?id, %error, "L3 read failed: a miss");
            None
        });
        let (meta, payload) = found?;
        self.metrics.pages_read_l3.inc();
        self.note_l3_read(now().saturating_duration_since(begin));
        let page = Arc::new(Page { meta, payload });
        // L3 goes by the same clock, and drops it by itself.
        if !self.is_live(&page.meta) {
            return None;
        }
        let writable = self.devices.writable();
        let mut state = self.state.lock();
        // A put may have been sealed meanwhile that was reserved before the page was found on L3.
        if let Some(newer) = self.get_l2(&id).filter(|newer| newer.meta.generation > page.meta.generation) {
            return Some(Loaded { page: newer, forgets });
        }
        let current = state.forgets == forgets && self.devices.generation(&id) == Some(page.meta.generation);
        if current || has(Bug::LoadAfterForget) {
            let mut out = Decisions::default();
            state.policy.set_writable(writable);
            state.policy.loaded(page.facts(), self.clock.now_unix_ms(), &mut out);
            self.index(&state.policy, &page);
            self.carry_out(state, out, None);
        }
        Some(Loaded { page, forgets })
    }

    fn note_l3_read(&self, time: Duration) {
        let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        // Readings that cross are no harm.
        let before = self.l3_read_us.load(Ordering::Relaxed);
        let mean = if before == 0 { time } else { before - before / L3_READS_WEIGHED + time / L3_READS_WEIGHED };
        self.l3_read_us.store(mean, Ordering::Relaxed);
    }

    pub(crate) fn l3_expected(&self) -> Duration {
        match self.l3_read_us.load(Ordering::Relaxed) {
            0 => L3_READ_GUESS,
            known => Duration::from_micros(known.into()),
        }
    }

    /// Makes a sealed page visible and does with it what the write policy says; `false` if no tier takes it.
    pub(crate) fn insert(&self, page: Arc<Page>, room: Room) -> bool {
        let mut out = Decisions::default();
        let mut state = self.state.lock();
        let placed = state.policy.put(page.facts(), room.spend(), self.clock.now_unix_ms(), &mut out);
        self.index(&state.policy, &page);
        // What is held of an earlier put is for those who have it.
        self.holds.withhold(&page.meta.id);
        self.carry_out(state, out, Some(&page));
        self.ended.notify_waiters();
        placed == Placed::Stored
    }

    /// Lets the index follow what was decided of a page.
    fn index(&self, policy: &Residency, page: &Arc<Page>) {
        let id = page.meta.id;
        match policy.generation(&id) {
            Some(generation) if generation == page.meta.generation => drop(self.l2.insert(id, page.clone())),
            Some(_) => {}
            None => drop(self.l2.remove(&id)),
        }
    }

    /// Asks the policy for decisions and carries them out.
    fn decide<T>(&self, page: Option<&Arc<Page>>, ask: impl FnOnce(&mut Residency, u64, &mut Decisions) -> T) -> T {
        let mut out = Decisions::default();
        let mut state = self.state.lock();
        let answer = ask(&mut state.policy, self.clock.now_unix_ms(), &mut out);
        self.carry_out(state, out, page);
        answer
    }

    /// Carries out what was decided, and then lets go of the lock: nobody sees the one without the other.
    fn carry_out(&self, state: MutexGuard<'_, State>, out: Decisions, put: Option<&Arc<Page>>) {
        for id in &out.write {
            let fresh = put.filter(|page| page.meta.id == *id).cloned();
            if let Some(page) = fresh.or_else(|| self.l2.get(id).map(|entry| entry.value().clone())) {
                self.begin_write(page);
            }
        }
        let mut gone = Vec::with_capacity(out.evict.len());
        for (id, reason) in &out.evict {
            if has(Bug::EvictedIsServed) {
                continue;
            }
            gone.push(self.l2.remove(id));
            match reason {
                Reason::Expired => self.metrics.pages_expired_l2.inc(),
                Reason::Capacity | Reason::Quota => self.metrics.pages_evicted_l2.inc(),
            };
        }
        drop(state);
        // Their memory is given back without the lock.
        drop(gone);
        if !out.touch.is_empty() {
            self.devices.touch(&out.touch);
        }
        if !out.unpin.is_empty() {
            self.devices.pin(&out.unpin, PinKind::None);
        }
    }

    fn begin_write(&self, page: Arc<Page>) {
        let Some(tiers) = self.this.upgrade() else { return };
        let ticket = self.writing.begin(&page);
        self.runtime.spawn(async move {
            // However this ends, the page is held here no longer, and who waits for that hears of it.
            let mut write = Write { tiers, page, landed: false, ticket };
            let Page { meta, payload } = &*write.page;
            let quota = write.tiers.state.lock().policy.quota(meta.id.namespace);
            match write.tiers.devices.write(meta, payload, quota).await {
                Ok(()) => write.landed = true,
                Err(error) => {
                    write.tiers.metrics.l3_writes_failed.inc();
                    tracing::warn!(id = ?write.page.meta.id, %error, "page not written to L3");
                }
            }
        });
    }

    /// The arena had no run of bytes for a page: what L2 holds lies in the way.
    fn make_room(&self) {
        let writable = self.devices.writable();
        self.decide(None, |policy, now_ms, out| {
            policy.set_writable(writable);
            let bytes = (policy.capacity_bytes() / 16).min(MAKE_ROOM_BYTES);
            policy.make_room(bytes as u32, now_ms, out);
        });
    }

    /// Forgets pages, durably where L3 has them; the number that were there. After an error some may still be served, or
    /// return after a crash: it is to be tried again.
    pub(crate) async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, TiersError> {
        let (mut there, mut late) = (vec![false; ids.len()], false);
        for (id, there) in ids.iter().zip(&mut there) {
            // Out of L2 first: from then on no write of it begins. One under way must land, or it would land after the
            // tombstone and resurrect the page.
            *there = !has(Bug::ForgetKeepsL2) && self.drop_l2(id);
            self.holds.withhold(id);
            let pending = if has(Bug::ForgetMissesWriting) { Vec::new() } else { self.writing.withhold(id) };
            *there |= !pending.is_empty();
            for ended in pending {
                let ended = ended.wait(|&ended| ended.then_some(()));
                late |= tokio::time::timeout_at(deadline.into(), ended).await.is_err();
            }
            *there |= self.devices.has(id);
        }
        let durable = self.devices.forget(ids, deadline).await;
        let mut state = self.state.lock();
        state.forgets += 1;
        for id in ids.iter().filter(|_| !has(Bug::ForgetKeepsL2)) {
            state.policy.forget(id);
            self.l2.remove(id);
            self.holds.withhold(id);
        }
        drop(state);
        durable?;
        if late {
            return Err(TiersError::Writing);
        }
        let count = there.iter().filter(|&&t| t).count();
        self.metrics.pages_forgotten.inc_by(count as u64);
        Ok(count)
    }

    /// Takes a page out of L2.
    fn drop_l2(&self, id: &PageId) -> bool {
        let mut state = self.state.lock();
        let there = state.policy.forget(id);
        let gone = self.l2.remove(id);
        drop(state);
        there || gone.is_some()
    }

    /// Verifies the copy in DRAM and drops it if it is damaged; the number dropped.
    pub(crate) fn recheck(&self, id: &PageId) -> usize {
        // There may be several, if one was read again while another was held.
        let copies = [self.l2.get(id).map(|entry| entry.value().clone()), self.writing.get(id), self.holds.get(id)];
        let damaged = copies.into_iter().flatten().find_map(|page| page.meta.verify(id, &page.payload).err());
        let Some(mismatch) = damaged else { return 0 };
        tracing::error!(?id, %mismatch, "page damaged in memory: dropped");
        self.metrics.pages_corrupt_l2.inc();
        self.writing.withhold(id);
        self.holds.withhold(id);
        if !has(Bug::RecheckKeeps) {
            self.drop_l2(id);
        }
        1
    }

    /// L3 found a page damaged: it is written again if L2 has it.
    fn lost_on_l3(&self, id: &PageId) {
        self.decide(None, |policy, _, out| policy.lost_on_l3(id, out));
    }

    /// Pins pages that are in L2; how many those are.
    pub(crate) fn pin(&self, ids: &BTreeSet<PageId>, kind: PinKind, ttl_ms: u64) -> Result<usize, PinRefused> {
        let until_ms = self.clock.now_unix_ms().saturating_add(ttl_ms);
        let pinned = self.state.lock().policy.pin(ids, kind, until_ms)?;
        // What L3 alone has is not held: nothing would let go of it.
        let ids: Vec<PageId> = ids.iter().filter(|id| self.l2.contains(*id)).copied().collect();
        self.devices.pin(&ids, kind);
        Ok(pinned)
    }

    /// What is due by the clock.
    pub(crate) fn tick(&self) {
        self.decide(None, |policy, now_ms, out| policy.tick(now_ms, out));
    }

    /// A namespace is about to be used: L3 hears of its quota.
    pub(crate) fn welcome(&self, namespace: NamespaceId) {
        let quota = self.state.lock().policy.quota(namespace);
        if let Some(bytes) = quota {
            self.devices.set_quota(namespace, bytes);
        }
    }

    /// The next page in L2 behind `cursor`.
    pub(crate) fn next_after(&self, cursor: Option<&PageId>) -> Option<PageId> {
        self.state.lock().policy.next_after(cursor)
    }

    /// Writes what only L2 has and write-back would have written later, and waits until nothing waits for L3, or
    /// `deadline`. Says now and then how much is left.
    pub(crate) async fn drain(&self, deadline: Instant) {
        let all = async {
            loop {
                let mut ended = std::pin::pin!(self.ended.notified());
                ended.as_mut().enable();
                let begun = has(Bug::DirtyStays) || self.decide(None, |policy, _, out| policy.flush(out));
                if begun && self.state.lock().policy.in_flight_bytes() == 0 {
                    return;
                }
                ended.await;
            }
        };
        let mut all = std::pin::pin!(all);
        loop {
            let turn = deadline.min(now() + DRAIN_PROGRESS);
            if tokio::time::timeout_at(turn.into(), &mut all).await.is_ok() {
                return;
            }
            let (pages, bytes) = self.left_to_write();
            if turn == deadline {
                tracing::warn!(pages, bytes, "stopped before every page had reached L3: these are lost");
                return;
            }
            tracing::info!(pages, bytes, "stopping: pages are on their way to L3");
        }
    }

    /// Pages that L3 has not got and is to get, and bytes of those that are being written.
    fn left_to_write(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.policy.dirty_pages() + self.writing.len(), state.policy.in_flight_bytes())
    }

    /// State for people and scripts.
    pub(crate) fn status(&self) -> serde_json::Value {
        let state = self.state.lock();
        let policy = &state.policy;
        let (pinned_pages, pinned_bytes) = policy.pinned();
        let (held_pages, held_bytes) = self.holds.usage();
        let namespaces = policy.namespaces(STATUS_NAMESPACES_MAX);
        let l2 = json!({
            "bytes_used": policy.used_bytes(),
            "bytes_capacity": policy.capacity_bytes(),
            "pages": policy.len(),
            "dirty_pages": policy.dirty_pages(),
            "in_flight_bytes": policy.in_flight_bytes(),
            "pinned_pages": pinned_pages,
            "hard_pinned_bytes": pinned_bytes,
            "order": if policy.follows_lru() { "lru" } else { "learnt" },
            "write_policy": policy.write_policy().to_string(),
            "arena_bytes": self.arena.capacity(),
            "arena_used": self.arena.used(),
            "huge_pages": self.arena.huge_pages(),
            "shared": self.arena.file().is_some(),
            "held_pages": held_pages,
            "held_bytes": held_bytes,
            "scrub": self.scrubbed.status(),
        });
        drop(state);
        let namespaces: Vec<_> = namespaces
            .into_iter()
            .map(|used| {
                json!({
                    "namespace": used.namespace.to_string(),
                    "pages": used.pages,
                    "bytes": used.bytes,
                    "quota_bytes": used.quota_bytes,
                })
            })
            .collect();
        json!({ "l2": l2, "l3": self.devices.status(), "namespaces": namespaces, "writing": self.writing.len() })
    }

    /// What the namespaces with most have in L2, in bytes.
    pub(crate) fn namespace_bytes(&self) -> Vec<(NamespaceId, u64)> {
        let uses = self.state.lock().policy.namespaces(STATUS_NAMESPACES_MAX);
        uses.into_iter().map(|used| (used.namespace, used.bytes)).collect()
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}

/// A write to L3 that is under way.
struct Write {
    tiers: Arc<Tiers>,
    page: Arc<Page>,
    landed: bool,
    ticket: Ticket,
}

impl Drop for Write {
    fn drop(&mut self) {
        let PageMeta { id, generation, .. } = self.page.meta;
        self.tiers.state.lock().policy.written(&id, generation, self.page.bytes(), self.landed);
        self.tiers.writing.end(&self.ticket);
        self.tiers.ended.notify_waiters();
    }
}

/// Why pages are not durably forgotten.
#[derive(Debug, thiserror::Error)]
pub enum TiersError {
    /// They were being written to L3 and the deadline passed first.
    #[error("deadline passed while a write to L3 was under way")]
    Writing,
    /// A device did not forget.
    #[error(transparent)]
    Device(#[from] ForgetError),
}
