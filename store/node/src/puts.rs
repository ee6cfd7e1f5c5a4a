//! Open puts of a node, and the readers that wait for pages to be put.
//!
//! A put is reserved, its parts land in any order, and then it is sealed or aborted. Module `put`
//! has the states of its parts.
//!
//! Invariants:
//! - At most one put of a page is open. The first complete writer wins.
//! - Each part has its own piece of the page's memory. One owner may write it: the connection that
//!   receives it, or a client with a remote grant. After verification it is shared and immutable,
//!   so followers read landed parts while others still arrive.
//! - A sealed page is visible in L2 before its put closes. So a reader finds it in L2, or its put
//!   in the table of open puts.
//! - No copy of a page becomes visible after a forget of the page that is newer than the copy. Puts
//!   and forgets take their generations under one lock: see `generations`.
//! - A put that the node aborts keeps its reservation while its client may still write parts of it.

mod forgets;
mod generations;
mod idle;
mod put;

use crate::budget::{Charge, EXPOSED_MAX, LosingWriter};
use crate::identity::generation_end;
use crate::metrics::Metrics;
use crate::places::Peer;
use crate::tiers::Tiers;
use generations::Generations;
use idle::IdleOrder;
use larder_format::PageId;
use larder_runtime::sync::{Mutex, MutexGuard};
use larder_runtime::{LogLimit, fail_point, now, race_point};
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
pub use put::{Progress, Put};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;
use tokio::sync::oneshot;

/// Forgotten pages that are recorded under one lock of the table. A request may have thousands, and
/// all puts and follows wait meanwhile.
const FORGETS_AT_ONCE: usize = 64;

pub struct Puts {
    tiers: Arc<Tiers>,
    metrics: Arc<Metrics>,
    /// Outermost lock of the node: held while [`Tiers`] reserves memory, never while L3 looks a
    /// page up.
    state: Mutex<PutTable>,
    waiters_max: usize,
    idle_lines: LogLimit,
    taken_back_lines: LogLimit,
}

struct PutTable {
    generations: Generations,
    open: BTreeMap<PageId, Arc<Put>>,
    /// Open puts by their last activity, without those that [`Puts::abort_idle`] looks at.
    idle: IdleOrder,
    /// Open puts by connection and generation, the oldest reservation of a connection first.
    of_writer: BTreeMap<(u64, u64), PageId>,
    /// Aborted puts of each connection whose client may still write parts of them. The connection
    /// owns each. [`Puts::abort_idle`] removes those that are gone.
    draining: BTreeMap<Option<u64>, Vec<Weak<Put>>>,
    waiting: BTreeMap<PageId, BTreeMap<u64, oneshot::Sender<()>>>,
    /// Number of registered readers.
    waiters: usize,
    /// Number of the next reader that registers.
    next_waiter: u64,
    /// The node shuts down and starts no put any more.
    closed: bool,
}

impl PutTable {
    fn new(generation_first: u64, hash_seed: u64) -> Self {
        Self {
            generations: Generations::new(generation_first, generation_end(generation_first), hash_seed),
            open: BTreeMap::new(),
            idle: IdleOrder::default(),
            of_writer: BTreeMap::new(),
            draining: BTreeMap::new(),
            waiting: BTreeMap::new(),
            waiters: 0,
            next_waiter: 0,
            closed: false,
        }
    }

    fn insert(&mut self, put: &Arc<Put>) {
        if let Some(writer) = put.writer() {
            self.of_writer.insert((writer, put.generation()), put.id);
        }
        self.idle.set(put.generation(), put.id, put.reserved_at());
        self.open.insert(put.id, put.clone());
    }

    fn remove(&mut self, put: &Put) {
        self.open.remove(&put.id);
        self.idle.remove(put.generation(), put.id);
        if let Some(writer) = put.writer() {
            self.of_writer.remove(&(writer, put.generation()));
        }
    }

    /// Newest open put of a connection among those with a generation below `end`.
    fn newest_of(&self, writer: u64, end: u64) -> Option<Arc<Put>> {
        let (_, id) = self.of_writer.range((writer, 0)..(writer, end)).next_back()?;
        self.open.get(id).cloned()
    }

    /// Aborted puts whose clients may still write parts of them.
    fn all_draining(&self) -> Vec<Arc<Put>> {
        self.draining.values().flatten().filter_map(Weak::upgrade).collect()
    }

    fn wake(&mut self, id: &PageId) {
        for (_, waiter) in self.waiting.remove(id).unwrap_or_default() {
            self.waiters -= 1;
            // The reader may have left at this moment. Its drop finds no entry then.
            let _ = waiter.send(());
        }
    }
}

/// A reader that waits for a put of a page to start. Dropping it ends the wait.
pub struct Waiter<'a> {
    puts: &'a Puts,
    id: PageId,
    number: u64,
    started: oneshot::Receiver<()>,
}

impl Waiter<'_> {
    /// Waits until a put of the page starts. Returns `false` at `deadline`.
    pub async fn put_started(mut self, deadline: Instant) -> bool {
        tokio::time::timeout_at(deadline.into(), &mut self.started).await.is_ok()
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut state = self.puts.state.lock();
        // No entry: a put of the page has started, and `wake` removed it.
        let Some(waiting) = state.waiting.get_mut(&self.id) else { return };
        let is_removed = waiting.remove(&self.number).is_some();
        if waiting.is_empty() {
            state.waiting.remove(&self.id);
        }
        state.waiters -= usize::from(is_removed && !fail_point!("node.cancelled-follower-leaks"));
    }
}

pub enum Presence<'a> {
    /// Complete: the tiers have it.
    Sealed,
    Open(Arc<Put>),
    /// Absent. The waiter is registered already, so no start of a put is missed.
    Absent(Waiter<'a>),
    /// Absent, and the bound on waiting readers is reached.
    TooManyWaiters,
}

/// Bytes of a page in memory: those of its parts.
pub(crate) fn page_bytes(page: &Reserved) -> usize {
    page.part_bytes.iter().map(|&bytes| bytes as usize).sum()
}

impl Puts {
    /// Creates an empty table. `generation_first` must exceed every generation in L3. At most
    /// `waiters_max` readers wait for absent pages.
    pub(crate) fn new(
        tiers: Arc<Tiers>,
        metrics: Arc<Metrics>,
        generation_first: u64,
        waiters_max: usize,
        hash_seed: u64,
    ) -> Self {
        let state = Mutex::new(PutTable::new(generation_first, hash_seed));
        let idle_lines = LogLimit::default();
        let taken_back_lines = LogLimit::default();
        Self { tiers, metrics, state, waiters_max, idle_lines, taken_back_lines }
    }

    /// Reserves memory for a page that is neither stored nor being written. Refuses a copy that may
    /// have been forgotten.
    ///
    /// `charge` charges the page's bytes to a connection until the put is sealed or aborted. It
    /// returns `None` to refuse the put, and `Some(None)` to admit it without a charge, for callers
    /// without a connection.
    pub(crate) fn reserve(
        &self,
        id: PageId,
        page: &Reserved,
        charge: impl FnOnce(u64) -> Option<Option<Charge>>,
    ) -> Result<Arc<Put>, ReserveOutcome> {
        let bytes = page_bytes(page);
        if self.tiers.is_retired(&id.namespace) {
            return Err(ReserveOutcome::Retired);
        }
        // Held to the end: two writers of one page must not both find it absent.
        let (mut state, is_stored) = self.lock_with_lookup(&id);
        if state.closed || !state.generations.has_next() {
            self.metrics.puts_busy.inc();
            return Err(ReserveOutcome::Busy);
        }
        let has_twin = || state.open.keys().any(|open| open.key == id.key);
        if state.open.contains_key(&id) || (fail_point!("node.open-puts-ignore-namespace") && has_twin()) {
            return Err(ReserveOutcome::InProgress);
        }
        if is_stored && !fail_point!("node.second-writer-replaces") {
            self.metrics.puts_existing.inc();
            return Err(ReserveOutcome::Exists);
        }
        // Only for an absent page: one that exists needs no copy, and the writer compares it.
        let is_forgotten = page.copy_of.is_some_and(|copied| state.generations.is_forgotten_since(&id, copied));
        if is_forgotten && !fail_point!("node.reserve-ignores-copy-condition") {
            self.metrics.puts_forgotten.inc();
            return Err(ReserveOutcome::Forgotten);
        }
        if race_point!("node.reserve-after-unlock") {
            drop(state);
            state = self.state.lock();
        }
        let reserved = charge(bytes as u64).and_then(|charge| {
            let writer = charge.as_ref().map(Charge::connection);
            Some((self.tiers.reserve(bytes, charge)?, writer))
        });
        let Some(((memory, reservation), writer)) = reserved else {
            self.metrics.puts_busy.inc();
            return Err(ReserveOutcome::Busy);
        };
        // Another put may have taken the last one if the table was unlocked.
        let generation = state.generations.next().ok_or(ReserveOutcome::Busy)?;
        let mut page = page.clone();
        let token_ids = self.tiers.token_memory().keep(&id.namespace, std::mem::take(&mut page.token_ids));
        let put = Arc::new(Put::new(id, page, token_ids, generation, memory, reservation, writer));
        state.insert(&put);
        state.wake(&id);
        Ok(put)
    }

    /// Looks a page up in the tiers, and locks the table. Returns `true` if the tiers have the
    /// page.
    ///
    /// If they have not, no put of it was sealed between the lookup and the lock. A put changes the
    /// page's stamp once lookups find it, and leaves the table afterwards. So a page that is absent
    /// under an unchanged stamp is stored nowhere, or its put is still in the table.
    fn lock_with_lookup(&self, id: &PageId) -> (MutexGuard<'_, PutTable>, bool) {
        loop {
            // The stamp first, and both without the lock: every put and follow needs it, and L3 may
            // make a lookup wait.
            let stamp = self.tiers.stamp(id);
            // Of a retired namespace too: a put must not replace a page that a rollback brings
            // back.
            let is_stored = self.tiers.find(id).tier() != TierCode::Absent;
            let state = self.state.lock();
            let is_valid = is_stored || self.tiers.stamp(id) == stamp;
            // Another round only follows a put, load or forget of a page with the same counter.
            if is_valid || race_point!("node.lookup-trusted-after-unlock") {
                return (state, is_stored);
            }
        }
    }

    /// Seals a put and makes its page visible. Aborts the put instead if a part is missing, or if
    /// L2 has no room for the page. Both are `Incomplete`, as is a put that has ended already.
    pub fn commit(&self, put: &Arc<Put>) -> CommitOutcome {
        let Some((meta, payload)) = put.seal(self.tiers.clock().now_unix_ms()) else {
            self.abort(put);
            return CommitOutcome::Incomplete;
        };
        // Visible before the put closes, so that no reader finds it in neither place.
        let page = Arc::new(self.tiers.put_page(meta, payload, put.token_ids()));
        let bytes = u64::from(page.bytes());
        let Some(is_stored) = put.end_by(|reservation| self.tiers.insert(page, reservation)) else {
            return CommitOutcome::Incomplete;
        };
        if !is_stored {
            // Pins or a quota hold all of L2: nothing can be evicted for this page.
            self.metrics.puts_dropped_l2_full.inc();
            self.close(put, Progress::Aborted);
            return CommitOutcome::Incomplete;
        }
        self.metrics.pages_put.inc();
        self.metrics.put_bytes.inc_by(bytes);
        self.close(put, Progress::Sealed);
        CommitOutcome::Stored
    }

    /// Aborts a put and revokes its grants at once: its writer is done with it, gone or silent for
    /// long, or the node shuts down. Does nothing to a sealed put.
    pub fn abort(&self, put: &Arc<Put>) {
        self.abort_unannounced(put);
        if put.progress() == Progress::Aborted {
            put.release();
        }
    }

    /// Aborts a put on the node's initiative. The writer has not been told. Returns `false`, and
    /// does nothing, if the put has ended.
    ///
    /// Parts that the writer may access by RDMA stay exposed until it is done or silent for long. A
    /// write to a revoked grant would break its channel and every transfer there.
    pub(crate) fn abort_unannounced(&self, put: &Arc<Put>) -> bool {
        // The reservation decides who ends the put. A commit may end an open one after this look.
        let was_open = race_point!("node.abort-after-unlock") && matches!(put.progress(), Progress::Open(_));
        let reservation = put.take_reservation();
        if reservation.is_none() && !was_open {
            return false;
        }
        if reservation.is_some_and(|reservation| put.discard(reservation)) {
            self.state.lock().draining.entry(put.writer()).or_default().push(Arc::downgrade(put));
        }
        self.metrics.puts_aborted.inc();
        self.close(put, Progress::Aborted);
        true
    }

    /// Aborts puts of these writers in their order, as long as `takes_from` says so. Each writer
    /// loses its newest reservation first: it sends pages in their order, so the oldest one has
    /// most of its bytes.
    ///
    /// Memory that a writer's RDMA device may access returns when the put was aborted for
    /// [`EXPOSED_MAX`]. A write to it after that fails the writer's channel, and no transfer of
    /// anybody else.
    pub(crate) fn take_back(&self, writers: &[LosingWriter], takes_from: impl Fn(LosingWriter) -> bool) {
        let now = now();
        for writer in writers {
            // Before any abort: a put that is aborted below stays exposed.
            let exposed = self.draining_of(writer.connection);
            let mut generation_end = u64::MAX;
            loop {
                if !takes_from(*writer) {
                    return;
                }
                let newest = self.state.lock().newest_of(writer.connection, generation_end);
                let Some(put) = newest else { break };
                generation_end = put.generation();
                // Its commit may have come meanwhile.
                if !self.abort_unannounced(&put) {
                    continue;
                }
                self.metrics.puts_taken_back.inc();
                if let Some(puts) = self.taken_back_lines.record() {
                    let key = put.id.key;
                    tracing::warn!(
                        %key, puts, is_silent = writer.is_silent,
                        "puts aborted, because others waited for room: their writers sent less than 8 KiB in 1 s, or their \
                         tenants had more than their share"
                    );
                }
            }
            exposed
                .iter()
                .filter(|put| writer.is_silent && put.is_idle(now, EXPOSED_MAX))
                .for_each(|put| put.release());
        }
    }

    fn draining_of(&self, writer: u64) -> Vec<Arc<Put>> {
        let state = self.state.lock();
        state.draining.get(&Some(writer)).into_iter().flatten().filter_map(Weak::upgrade).collect()
    }

    /// Aborts all puts and starts no more. A shutdown needs their memory to flush pages to L3.
    pub(crate) fn shut_down(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let open: Vec<Arc<Put>> = state.open.values().cloned().collect();
        let draining = state.all_draining();
        // Each abort takes the lock itself.
        drop(state);
        open.iter().for_each(|put| self.abort(put));
        draining.iter().for_each(|put| put.release());
    }

    /// Aborts the open puts of these pages, which a client of `peer` is about to forget. From here
    /// on the node takes no copy of them from before.
    pub(crate) fn forget(&self, peer: Peer, ids: &[PageId]) {
        for ids in ids.chunks(FORGETS_AT_ONCE) {
            let mut state = self.state.lock();
            // One step with the search for open puts: each put of a copy is either found here, or
            // reserved later and refused.
            let retired = match fail_point!("node.forget-records-late") {
                true => Vec::new(),
                false => state.generations.record_forget(peer, ids),
            };
            let open: Vec<Arc<Put>> = ids.iter().filter_map(|id| state.open.get(id).cloned()).collect();
            // Each abort takes the lock itself, and a retired table has many entries to free.
            drop(state);
            drop(retired);
            for put in &open {
                self.abort_unannounced(put);
            }
        }
    }

    /// The first half of [`Puts::forget`] alone, for a fail point.
    pub(crate) fn record_forget(&self, peer: Peer, ids: &[PageId]) {
        for ids in ids.chunks(FORGETS_AT_ONCE) {
            let retired = self.state.lock().generations.record_forget(peer, ids);
            drop(retired);
        }
    }

    pub(crate) fn generations_left(&self) -> u64 {
        self.state.lock().generations.left()
    }

    /// Allows the generations below `end`, for which an identity is stored.
    pub(crate) fn extend_generations(&self, end: u64) {
        self.state.lock().generations.extend(end);
    }

    fn close(&self, put: &Arc<Put>, end: Progress) {
        let mut state = self.state.lock();
        // A later put of the same page may stand here by now.
        if state.open.get(&put.id).is_some_and(|open| Arc::ptr_eq(open, put)) {
            state.remove(put);
        }
        drop(state);
        // Followers that wake now must not find the put open.
        put.close(end);
    }

    /// Returns the state of a page. An absent page comes with a waiter for its put.
    pub fn presence(&self, id: &PageId) -> Presence<'_> {
        let (mut state, is_stored) = self.lock_with_lookup(id);
        let is_retired = self.tiers.is_retired(&id.namespace);
        if let Some(put) = state.open.get(id).filter(|_| !is_retired) {
            return Presence::Open(put.clone());
        }
        if is_stored && !is_retired {
            return Presence::Sealed;
        }
        if state.waiters >= self.waiters_max {
            return Presence::TooManyWaiters;
        }
        if race_point!("node.wait-after-unlock") {
            drop(state);
            state = self.state.lock();
        }
        let (sender, started) = oneshot::channel();
        let number = state.next_waiter;
        state.next_waiter += 1;
        state.waiters += 1;
        state.waiting.entry(*id).or_default().insert(number, sender);
        Presence::Absent(Waiter { puts: self, id: *id, number, started })
    }

    /// Returns `true` while a put of the page is open.
    pub(crate) fn is_open(&self, id: &PageId) -> bool {
        self.state.lock().open.contains_key(id)
    }

    /// Returns `true` if a forget of the page is recorded. Its page may have been put again since.
    pub(crate) fn has_forgotten(&self, id: &PageId) -> bool {
        self.state.lock().generations.has_forgotten(id)
    }

    /// Returns the number of open puts and the number of waiting readers.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.open.len(), state.waiters)
    }
}
