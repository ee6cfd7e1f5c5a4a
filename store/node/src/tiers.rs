//! The cache tiers of a node: L2 (DRAM) over L3 (NVMe).
//!
//! Invariants:
//! - `policy` alone decides which pages L2 keeps, and `l2` indexes them. Both change under the
//!   `state` lock.
//! - A hit in L2 never waits for `state`, nor for a lock of an L3 log. No thread waits for an L3
//!   log while it holds `state` or the table of open puts.
//! - A page with a write to L3 in flight stays readable in `writeback` until the write ends.
//!   Eviction therefore never leaves a page unreachable between the tiers.
//! - Concurrent readers of one put on L3 share one device read.
//! - An expired page is a miss in every tier.
//!
//! Lock order, outermost first. A thread takes a lock only while it holds none further down:
//! 1. the table of open puts (`puts`), which reserves bytes under its lock;
//! 2. [`Tiers::shares`], so that floors are set in the order of their changes;
//! 3. [`Tiers::state`];
//! 4. the lock of the budget, which is in [`crate::budget`];
//! 5. leaf locks: the shards of `l2` and of foyer, `writeback`, `holds`, `arrivals`, queues of
//!    touches and of changes, shapes, floors, the health of a device, the arena. An L3 log and the
//!    shards of its index are leaves too, but only for threads without 1 and 3. A log takes the
//!    locks of the floors and of the queue of changes under its own.
//!
//! No lock is held across an `await`. An L3 log calls the damage listener without its own lock,
//! because the listener takes `state`.
//!
//! Layout: this file looks pages up and puts them; `load` reads L3; `forget` removes pages;
//! `hold` keeps their memory for readers; `writeback` tracks writes to L3; `index` finds pages by
//! id; `changes` tells whether a lookup is still valid; `touches` queues hits for the policy;
//! `turns` keeps the order of a request's pages, and `arrivals` shows them meanwhile; `pages` makes
//! them of their facts; `namespaces` lists namespaces and hides retired ones; `status` reports.

mod arrivals;
mod changes;
mod forget;
mod hints;
mod hits;
mod hold;
mod index;
mod load;
mod namespaces;
mod pages;
mod status;
#[cfg(all(test, feature = "shuttle"))]
mod threads;
mod touches;
mod turns;
mod writeback;
mod writes;

use crate::budget::Charge;
use crate::departures::{Departures, Reason};
use crate::devices::{DeviceLocation, Devices};
use crate::holds::Holds;
use crate::metrics::Metrics;
use crate::namespaces::Namespaces;
use crate::options::NodeOptions;
use crate::page::{Page, PageShapes};
use crate::page_changes::ChangeQueue;
use crate::places::Peer;
use crate::policy::{L2Policy, PinRefused, PolicyActions, PolicyOptions, PutOutcome, WritePolicy};
use crate::shares::Shares;
use crate::token_ids::TokenMemory;
use arrivals::Arrivals;
use changes::{ChangeCounters, ChangeStamp};
use foyer::{Cache, CacheBuilder, FifoConfig};
use index::PageIndex;
use larder_evict::{EvictionReason, Outlook};
use larder_format::{NamespaceId, PageId};
use larder_memory::{Arena, SlotMut};
use larder_runtime::sync::{Mutex, MutexGuard};
use larder_runtime::{Clock, fail_point, now, race_point};
use larder_wire::{PinKind, TierCode};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use touches::{Touch, TouchQueues};
use writeback::WritebackTable;

pub use forget::TiersError;
pub(crate) use hits::ReadRecord;
pub(crate) use turns::Turns;
pub(crate) use writeback::WriteLoad;

/// Bytes of L2 that one call of [`Tiers::make_room`] frees, at most.
const MAKE_ROOM_BYTES: u64 = 64 << 20;
/// Floors of L2 that are compared, and set, under one lock of the state.
const FLOORS_AT_ONCE: usize = 64;
/// Floors of L2 that one handshake compares, at most. With another peer those of all namespaces
/// change. The next handshake continues, and [`Tiers::tick`] does the rest.
const FLOORS_PER_JOIN: usize = 512;
/// The arena hands out slots in multiples of this many bytes.
pub(crate) const SLOT_UNIT: usize = 4096;
/// Memory of a page in DRAM beside its payload, in bytes: indices, metadata with checksums, and the
/// allocator's share. The example `l2_memory` measures 275, and an expiry adds less than 100.
pub(crate) const PAGE_MEMORY_BYTES: u64 = 416;
const DRAIN_PROGRESS: Duration = Duration::from_secs(5);

/// Location of a page on L3, with the stamp that tells whether the lookup is still valid. Holds no
/// memory, so a request may keep it while it waits for send credit.
#[derive(Debug, Clone, Copy)]
pub struct StampedLocation {
    location: DeviceLocation,
    stamp: ChangeStamp,
}

#[derive(Debug, Clone)]
pub enum PageLocation {
    /// L2 keeps the page.
    InL2(Arc<Page>),
    /// The page left L2, or never entered it, and its write to L3 is in flight.
    BeingWritten(Arc<Page>),
    /// The page left L2, and a reader still holds it.
    Held(Arc<Page>),
    OnL3(StampedLocation),
    /// No tier has the page, or it has expired.
    Absent,
}

impl PageLocation {
    /// Returns the tier as clients see it. Every copy in DRAM counts as L2.
    pub fn tier(&self) -> TierCode {
        match self {
            PageLocation::InL2(_) | PageLocation::BeingWritten(_) | PageLocation::Held(_) => TierCode::L2,
            PageLocation::OnL3(_) => TierCode::L3,
            PageLocation::Absent => TierCode::Absent,
        }
    }

    /// Generation of the page's put. Each put of a page has another one.
    pub fn generation(&self) -> Option<u64> {
        match self {
            PageLocation::InL2(page) | PageLocation::BeingWritten(page) | PageLocation::Held(page) => {
                Some(page.generation())
            }
            PageLocation::OnL3(found) => Some(found.location.generation()),
            PageLocation::Absent => None,
        }
    }

    fn into_page(self) -> Option<Arc<Page>> {
        match self {
            PageLocation::InL2(page) | PageLocation::BeingWritten(page) | PageLocation::Held(page) => Some(page),
            PageLocation::OnL3(_) | PageLocation::Absent => None,
        }
    }
}

/// Bytes reserved in L2's budget for a page that is being put. Dropping it releases them, unless
/// [`Tiers::insert`] has spent them.
pub(crate) struct PutReservation {
    tiers: Arc<Tiers>,
    bytes: u32,
    charge: Option<Charge>,
}

impl PutReservation {
    fn spend(mut self) -> u32 {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for PutReservation {
    fn drop(&mut self) {
        if self.bytes > 0 && !fail_point!("node.aborted-put-leaks-reservation") {
            self.tiers.state.lock().policy.release(self.bytes);
            self.tiers.in_flight_ended.notify_waiters();
            // No sample of the time that a put takes, nor of those that become writes to L3.
            if let Some(charge) = self.charge.take() {
                charge.release_unused();
            }
        }
    }
}

/// Use of a namespace by a connection. Keeps the namespace's floor.
pub struct NamespaceUser {
    tiers: Arc<Tiers>,
    namespace: NamespaceId,
    peer: Peer,
    /// The table of namespaces counts the connection.
    is_counted: bool,
}

impl Drop for NamespaceUser {
    fn drop(&mut self) {
        self.tiers.shares.lock().leave(self.namespace, self.peer, now());
        if self.is_counted {
            self.tiers.namespaces.leave(self.namespace, self.tiers.clock.now_unix_ms());
        }
    }
}

/// State that changes under one lock. Code that changes `policy` applies its actions to `l2` and
/// `writeback` before it releases the lock: no thread sees one without the other.
struct TiersState {
    policy: L2Policy<Arc<Page>>,
    /// Touches that are being applied. Empty while the lock is free.
    touches: Vec<Touch>,
}

/// The two tiers of a node, with the pages on their way between them. The module documents the
/// order of the locks.
pub struct Tiers {
    l2: PageIndex,
    /// Stores nothing. foyer shares one read among all concurrent readers of a put (page and
    /// generation).
    l3_reads: Cache<(PageId, u64), Arc<Page>>,
    arrivals: Arrivals,
    devices: Devices,
    arena: Arc<Arena>,
    /// Namespaces in use. See the lock order.
    shares: Mutex<Shares>,
    namespaces: Namespaces,
    departures: Departures,
    state: Mutex<TiersState>,
    shapes: PageShapes,
    token_memory: Arc<TokenMemory>,
    touches: TouchQueues,
    /// Pages with hits in L2 that L3 is to learn of. A leaf lock.
    l3_touches: Mutex<Vec<(PageId, Outlook)>>,
    /// True if a hit may start a write to L3, so that it is applied at once.
    hits_write: bool,
    changes: ChangeCounters,
    writeback: WritebackTable,
    holds: Arc<Holds>,
    /// Exponential moving average of the time that L3 takes to read a page, in microseconds.
    l3_read_us: AtomicU32,
    /// Notified when a write to L3 or a put ends.
    in_flight_ended: Notify,
    clock: Clock,
    this: Weak<Tiers>,
    /// Runtime for writes to L3: some begin on a device's thread, which has no tokio context.
    runtime: Handle,
    metrics: Arc<Metrics>,
}

impl Tiers {
    /// Creates the tiers and listens for damage on the devices. Must be called inside a tokio
    /// runtime, on which the writes to L3 run later.
    pub(crate) fn new(
        options: &NodeOptions,
        arena: Arc<Arena>,
        devices: Devices,
        clock: Clock,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let shards = (options.l2_bytes >> 28).clamp(1, 8) as usize;
        let seed = larder_runtime::random::seed(options.seed);
        let l3_reads = CacheBuilder::new(shards)
            .with_shards(shards)
            .with_eviction_config(FifoConfig::default())
            .with_filter(|_, _: &Arc<Page>| false)
            .build();
        let policy = L2Policy::new(PolicyOptions {
            capacity_bytes: options.l2_bytes,
            dirty_bytes_max: options.dirty_bytes_max(),
            has_l3: !devices.is_empty(),
            write_policy: options.write_policy,
            write_after_hits: options.write_after_hits,
            l3_write_bytes_per_day: options.l3_write_bytes_per_day,
            quota_default: options.quota_default,
            quotas: options.quotas.clone(),
            seed,
        });
        let waits_for_hits = options.write_policy == WritePolicy::Selective || options.l3_write_bytes_per_day.is_some();
        let hits_write = !devices.is_empty() && waits_for_hits;
        let shares = Shares::default();
        devices.share_floors(shares.floors());
        let recorded = options.kv_events_listen.map(|_| {
            let namespace = options.kv_events_namespace.clone();
            Arc::new(ChangeQueue::new(namespace, metrics.kv_events_dropped.clone()))
        });
        let token_memory = TokenMemory::beside(options.arena_bytes(), shares.floors().clone(), &metrics);
        pages::record_l3(options, &devices, recorded.as_ref(), &token_memory);
        Arc::new_cyclic(|this: &Weak<Tiers>| {
            // Weak: the devices must not keep the tiers alive that own them.
            let listener = this.clone();
            devices.on_damage(
                &(Arc::new(move |id| {
                    if let Some(tiers) = listener.upgrade() {
                        tiers.lost_on_l3(&id);
                    }
                }) as _),
            );
            Self {
                l2: PageIndex::new(seed, options.l2_bytes, recorded),
                l3_reads,
                arrivals: Arrivals::default(),
                devices,
                arena,
                shares: Mutex::new(shares),
                namespaces: Namespaces::new(),
                departures: Departures::new(options.l2_bytes),
                state: Mutex::new(TiersState { policy, touches: Vec::new() }),
                shapes: PageShapes::default(),
                token_memory,
                touches: TouchQueues::default(),
                l3_touches: Mutex::default(),
                hits_write,
                changes: ChangeCounters::new(),
                writeback: WritebackTable::default(),
                holds: Holds::new(options.held_bytes_max()),
                l3_read_us: AtomicU32::new(0),
                in_flight_ended: Notify::new(),
                clock,
                this: this.clone(),
                runtime: Handle::current(),
                metrics,
            }
        })
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// Changes of L2 for KV events. `None` if they are off.
    pub(crate) fn recorded_changes(&self) -> Option<&Arc<ChangeQueue>> {
        self.l2.recorded()
    }

    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    pub(crate) fn write_load(&self) -> &Arc<WriteLoad> {
        self.writeback.load()
    }

    /// Allocates memory for a page of `bytes` and reserves as much of the budget. Returns `None` if
    /// the node is busy; `charge` is then returned unused.
    pub(crate) fn reserve(&self, bytes: usize, charge: Option<Charge>) -> Option<(SlotMut, PutReservation)> {
        let mut reservation = self.reserve_budget(bytes, charge)?;
        if let Some(slot) = self.arena.allocate(bytes) {
            return Some((slot, reservation));
        }
        // Without the reservation: pages that L2 writes back as it evicts them need its budget.
        let charge = reservation.charge.take();
        drop(reservation);
        self.make_room();
        let mut reservation = self.reserve_budget(bytes, charge)?;
        let Some(slot) = self.arena.allocate(bytes) else {
            if let Some(charge) = reservation.charge.take() {
                charge.release_unused();
            }
            return None;
        };
        Some((slot, reservation))
    }

    fn reserve_budget(&self, bytes: usize, charge: Option<Charge>) -> Option<PutReservation> {
        let tiers = self.this.upgrade()?;
        let bytes = u32::try_from(bytes.next_multiple_of(SLOT_UNIT)).ok()?;
        // Asked before `state` is locked: it locks the health of every device.
        let writable = self.devices.writable();
        let mut state = self.state.lock();
        state.policy.set_writable(writable);
        let reserved = state.policy.reserve(bytes);
        drop(state);
        // Returns early rather than through `then_some`, which would build a reservation that its
        // drop releases although nothing was reserved.
        if !reserved {
            if let Some(charge) = charge {
                charge.release_unused();
            }
            return None;
        }
        Some(PutReservation { tiers, bytes, charge })
    }

    /// Looks a page up in all tiers for a reader. Counts neither a hit nor a miss. A retired
    /// namespace has no pages.
    ///
    /// `find` documents the validity of the result.
    pub fn lookup(&self, id: &PageId) -> PageLocation {
        if self.is_retired(&id.namespace) {
            return PageLocation::Absent;
        }
        self.find(id)
    }

    /// Looks a page up in all tiers, of a retired namespace too: one probe of each tier, DRAM
    /// first.
    ///
    /// The order follows the way of a page: L2, writeback, holds, L3. A page on its way down is
    /// found, because `writeback` has it before L2 loses it, and L3 has it before `writeback` loses
    /// it. A page that comes up meanwhile is still on L3.
    ///
    /// # Validity of the result
    ///
    /// A copy in DRAM is the page itself and needs no further check by a request that began before
    /// the lookup: a forget that runs concurrently may be ordered after it. [`Tiers::hold`] checks
    /// again, because a hold outlasts the request.
    ///
    /// A location on L3 is a hint. These rules keep a stale hint from giving wrong bytes:
    /// 1. L3 verifies identity, generation and checksums of every record it reads. A record that
    ///    moved or went is found again or a miss.
    /// 2. Readers share a device read per put (page and generation). A put found after a forget has
    ///    a generation that no earlier read has. So a reader never gets a page that was forgotten
    ///    before its own lookup.
    /// 3. The stamp is read before the first probe. Every put, load and forget changes the stamp of
    ///    its page in the critical section that changes L2. A page enters L2 from L3 only if, under
    ///    the same lock, the stamp is that of a lookup which found this put. So no forgotten page
    ///    returns to L2, and no newer put is replaced by an older one.
    ///
    /// For rule 3 a forget comes in three places. Recorded before the stamp was read: its tombstone
    /// was there before as well, and the lookup found nothing older. Recorded between the stamp and
    /// the load: the stamps differ. Recorded after the load: it removes the page from L2 again.
    pub(crate) fn find(&self, id: &PageId) -> PageLocation {
        let stamp = self.changes.stamp(id);
        if let Some(page) = self.l2.get(id) {
            // All tiers expire a page by the same clock: L3 need not be asked.
            let is_live = self.is_live(page.expires_unix_ms());
            let is_found = is_live && !fail_point!("node.lookup-misses-now-and-then", 1 in 25);
            return if is_found { PageLocation::InL2(page) } else { PageLocation::Absent };
        }
        if let Some(page) = self.writeback.get(id).filter(|page| self.is_live(page.expires_unix_ms())) {
            return PageLocation::BeingWritten(page);
        }
        if let Some(page) = self.holds.get(id).filter(|page| self.is_live(page.expires_unix_ms())) {
            return PageLocation::Held(page);
        }
        match self.devices.lookup(id) {
            Some(location) => PageLocation::OnL3(StampedLocation { location, stamp }),
            None => PageLocation::Absent,
        }
    }

    /// Stamp of a page. It changes with every put, load and forget of the page.
    pub(crate) fn stamp(&self, id: &PageId) -> ChangeStamp {
        self.changes.stamp(id)
    }

    pub fn locate(&self, id: &PageId) -> TierCode {
        self.lookup(id).tier()
    }

    /// Returns the tiers of the longest prefix of `ids` that can be served.
    pub fn locate_prefix(&self, ids: &[PageId]) -> Vec<TierCode> {
        ids.iter().map(|id| self.locate(id)).take_while(|tier| *tier != TierCode::Absent).collect()
    }

    fn is_live(&self, expires_unix_ms: u64) -> bool {
        expires_unix_ms == 0 || self.clock.now_unix_ms() < expires_unix_ms || fail_point!("node.serve-expired")
    }

    /// Returns a copy in DRAM without asking L3. Counts neither a hit nor a miss.
    pub(crate) fn get_l2(&self, id: &PageId) -> Option<Arc<Page>> {
        let page = self.l2.get(id);
        let page = page.or_else(|| self.writeback.get(id)).or_else(|| self.holds.get(id));
        page.filter(|page| self.is_live(page.expires_unix_ms()) && !self.is_retired(&id.namespace))
    }

    pub(crate) fn count_misses(&self, pages: usize) {
        self.metrics.pages_missed.inc_by(pages as u64);
    }

    /// Makes a sealed page visible and starts the write to L3 that the write policy asks for.
    /// Returns `false` if no tier takes the page.
    pub(crate) fn insert(&self, page: Arc<Page>, reservation: PutReservation) -> bool {
        let id = page.id();
        let mut actions = PolicyActions::default();
        let mut state = self.lock_updated(&mut actions);
        let now_ms = self.clock.now_unix_ms();
        let outcome = state.policy.put(page.clone(), reservation.spend(), now_ms, &mut actions);
        self.update_index(&state.policy, &page);
        let is_in_l2 = state.policy.generation(&id) == Some(page.generation());
        // Recorded before: see `Tiers::hold`.
        self.changes.record(&id);
        // An older put is held only for its current readers.
        self.holds.withhold(&id);
        self.apply(state, actions, Some(&page));
        // A page that L2 refused is found from now on: `Puts` relies on a change after that.
        if !is_in_l2 && !race_point!("node.refused-put-keeps-stamp") {
            self.changes.record(&id);
        }
        self.in_flight_ended.notify_waiters();
        outcome == PutOutcome::Stored
    }

    /// Makes the index agree with the policy about one page.
    fn update_index(&self, policy: &L2Policy<Arc<Page>>, page: &Arc<Page>) {
        let id = page.id();
        match policy.generation(&id) {
            Some(generation) if generation == page.generation() => drop(self.l2.insert(page.clone())),
            Some(_) => {}
            None => drop(self.l2.remove(&id)),
        }
    }

    /// Calls the policy and applies the actions it returns, in one critical section.
    fn decide<T>(&self, call: impl FnOnce(&mut L2Policy<Arc<Page>>, u64, &mut PolicyActions) -> T) -> T {
        let mut actions = PolicyActions::default();
        let mut state = self.lock_updated(&mut actions);
        let answer = call(&mut state.policy, self.clock.now_unix_ms(), &mut actions);
        self.apply(state, actions, None);
        answer
    }

    /// Applies the policy's actions and releases the lock. Takes the guard by value, so that no
    /// caller can release the lock between decision and action.
    fn apply(&self, state: MutexGuard<'_, TiersState>, actions: PolicyActions, put: Option<&Arc<Page>>) {
        let mut writes = Vec::with_capacity(actions.write.len());
        // Writes before evictions: `writeback` must have a page before L2 loses it.
        for id in &actions.write {
            let sealed = put.filter(|page| page.is(id)).cloned();
            if let Some(page) = sealed.or_else(|| self.l2.get(id)) {
                // Here, because a lock of its own for each write would cost more than the look-up.
                let quota = state.policy.quota(id.namespace);
                writes.extend(self.begin_write(page).map(|write| (write, quota)));
            }
        }
        let mut evicted = Vec::with_capacity(actions.evict.len());
        let now_ms = if actions.evict.is_empty() { 0 } else { self.clock.now_unix_ms() };
        for (id, reason) in &actions.evict {
            if fail_point!("node.serve-evicted") {
                continue;
            }
            evicted.push(self.l2.remove(id));
            let departure = match reason {
                EvictionReason::Expired => {
                    self.metrics.pages_expired_l2.inc();
                    Reason::Expired
                }
                EvictionReason::Capacity | EvictionReason::Quota => {
                    self.metrics.pages_evicted_l2.inc();
                    Reason::Evicted
                }
            };
            self.departures.record(self.l2.hash(id), departure, now_ms);
        }
        drop(state);
        // A new task wakes a thread, which may take the lock at once.
        writes.into_iter().for_each(|(write, quota)| self.run_write(write, quota));
        // Freeing many pages takes long, and L3 takes its own lock: both happen without `state`.
        drop(evicted);
        self.queue_l3_touches(actions.touch);
        if !actions.unpin.is_empty() {
            self.devices.pin(&actions.unpin, PinKind::None);
        }
    }

    /// Evicts pages because the arena has no free run of bytes for a new one.
    fn make_room(&self) {
        let writable = self.devices.writable();
        self.decide(|policy, now_ms, actions| {
            policy.set_writable(writable);
            let bytes = (policy.capacity_bytes() / 16).min(MAKE_ROOM_BYTES);
            policy.make_room(bytes as u32, now_ms, actions);
        });
    }

    /// Handles damage that L3 found: L2 writes the page again if it has a copy.
    fn lost_on_l3(&self, id: &PageId) {
        self.decide(|policy, _, actions| policy.lost_on_l3(id, actions));
    }

    /// Pins those of `ids` that are in L2, for `ttl_ms`. Returns how many those are.
    pub(crate) fn pin(&self, ids: &BTreeSet<PageId>, kind: PinKind, ttl_ms: u64) -> Result<usize, PinRefused> {
        let until_ms = self.clock.now_unix_ms().saturating_add(ttl_ms);
        let pinned = self.state.lock().policy.pin(ids, kind, until_ms)?;
        // L3 pins only the pages that L2 pins too: the end of a pin in L2 ends it on L3.
        let ids: Vec<PageId> = ids.iter().filter(|id| self.l2.contains(id)).copied().collect();
        self.devices.pin(&ids, kind);
        Ok(pinned)
    }

    /// Ends pins and pages that have expired, and tells L3 of hits in L2. To be called about once a
    /// second.
    pub(crate) fn tick(&self) {
        self.send_l3_touches();
        let mut shares = self.shares.lock();
        shares.expire(now());
        self.update_floors(&mut shares, usize::MAX);
        drop(shares);
        self.decide(|policy, now_ms, actions| policy.tick(now_ms, actions));
    }

    /// Passes the quota of a namespace to the L3 logs, before its first page arrives.
    pub fn apply_quota(&self, namespace: NamespaceId) {
        let quota = self.state.lock().policy.quota(namespace);
        if let Some(bytes) = quota {
            self.devices.set_quota(namespace, bytes);
        }
    }

    /// Records that a connection of a peer uses a namespace, until the answer is dropped. Passes
    /// quota and floors to the policy and the L3 logs, before the first page arrives. With more
    /// than some hundred namespaces in use, L2 has the floor within a second.
    pub fn join(&self, namespace: NamespaceId, peer: Peer) -> Option<NamespaceUser> {
        self.apply_quota(namespace);
        let tiers = self.this.upgrade()?;
        let mut shares = self.shares.lock();
        shares.join(namespace, peer);
        self.update_floors(&mut shares, FLOORS_PER_JOIN);
        drop(shares);
        let is_counted = self.namespaces.enter(namespace, self.clock.now_unix_ms());
        Some(NamespaceUser { tiers, namespace, peer, is_counted })
    }

    /// Passes changed floors to L2, after `visits_max` comparisons at most. The caller keeps the
    /// lock of `shares`, so that an older change never follows a newer one.
    fn update_floors(&self, shares: &mut Shares, visits_max: usize) {
        if !shares.has_changes_of_l2() {
            return;
        }
        let l2_bytes = self.state.lock().policy.capacity_bytes();
        let mut left = visits_max;
        while left > 0 && shares.has_changes_of_l2() {
            let visits = left.min(FLOORS_AT_ONCE);
            left -= visits;
            let changes = shares.changes_of_l2(l2_bytes, visits);
            // Requests wait for the lock of the state, so each hold of it is short.
            self.state.lock().policy.set_floors(&changes);
        }
    }

    /// Walks over the pages in L2: see [`L2Policy::next_from`].
    pub(crate) fn next_from(&self, place: usize) -> (Option<Arc<Page>>, Option<usize>) {
        self.state.lock().policy.next_from(place)
    }

    /// Flushes to L3: starts the writes that write-back has deferred and waits until no write or
    /// put is in flight, or until `deadline`. Logs the progress every [`DRAIN_PROGRESS`].
    pub(crate) async fn drain(&self, deadline: Instant) {
        let flushed = async {
            loop {
                let mut ended = std::pin::pin!(self.in_flight_ended.notified());
                // Registered before the check, so that no wake-up falls between check and wait.
                ended.as_mut().enable();
                let all_begun =
                    fail_point!("node.shutdown-keeps-dirty") || self.decide(|policy, _, actions| policy.flush(actions));
                if all_begun && self.state.lock().policy.in_flight_bytes() == 0 {
                    return;
                }
                ended.await;
            }
        };
        let mut flushed = std::pin::pin!(flushed);
        loop {
            let pause_end = deadline.min(now() + DRAIN_PROGRESS);
            if tokio::time::timeout_at(pause_end.into(), &mut flushed).await.is_ok() {
                return;
            }
            let (pages, bytes) = self.unflushed();
            if pause_end == deadline {
                tracing::warn!(pages, bytes, "stopped before all pages reached L3; these pages are lost");
                return;
            }
            tracing::info!(pages, bytes, "stopping: writing pages to L3");
        }
    }

    fn unflushed(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.policy.dirty_pages() + self.writeback.len(), state.policy.in_flight_bytes())
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}
