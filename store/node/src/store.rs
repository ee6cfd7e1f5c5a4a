//! A node without its sockets: tiers, open puts and budget together.
//!
//! [`Store`] has the operations that need more than one of these parts. A caller that needs one
//! part asks for it: [`Store::tiers`] reads pages, [`Store::puts`] tracks open puts. Connections
//! use the store, and so does the simulation.

use crate::budget::{Account, Budget, Kind};
use crate::devices::Devices;
use crate::memory_plan;
use crate::metrics::{self, Metrics};
use crate::options::NodeOptions;
use crate::places::Peer;
use crate::policy::PinRefused;
use crate::puts::{Put, Puts, page_bytes};
use crate::scrub::{self, ScrubProgress};
use crate::tiers::{PageLocation, SLOT_UNIT, Tiers, TiersError};
use futures::StreamExt;
use larder_format::PageId;
use larder_memory::Arena;
use larder_runtime::{Clock, fail_point};
use larder_wire::{CommitOutcome, Hint, PinKind, PutEnd, ReserveOutcome, Reserved};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Pages that one request loads from L3 at a time. Enough to keep a drive's queue busy, and few
/// enough that one request does not fill it.
const LOADS_AT_ONCE: usize = 16;
/// Interval of the search for expired pins, pages and idle puts.
const TICK: Duration = Duration::from_secs(1);
/// An open put is aborted if its writer sends nothing for this long: the writer is gone.
const PUT_IDLE_MAX: Duration = Duration::from_secs(60);
/// An open put without bytes for [`PUT_IDLE_MAX`] is aborted after this time, whatever its writer
/// sends for others: the longest deadline of a request.
const PUT_TIME_MAX: Duration = Duration::from_secs(600);

/// Tiers, open puts and budget of a node. Methods that end in `_for` charge the account of a
/// connection. The others charge no account.
pub struct Store {
    tiers: Arc<Tiers>,
    puts: Puts,
    metrics: Arc<Metrics>,
    budget: Arc<Budget>,
    scrub_progress: ScrubProgress,
    options: NodeOptions,
}

impl Store {
    /// Creates a store over an arena of [`NodeOptions::arena_bytes`] and devices that are open.
    /// Generations start at `generation_first`, which must exceed all generations on the devices.
    /// Must be called inside a tokio runtime.
    pub fn new(
        options: &NodeOptions,
        arena: Arc<Arena>,
        devices: Devices,
        clock: Clock,
        generation_first: u64,
    ) -> Store {
        let metrics = Arc::new(Metrics::default());
        let tiers = Tiers::new(options, arena, devices, clock, metrics.clone());
        let hash_seed = larder_runtime::random::seed(options.seed);
        let puts = Puts::new(tiers.clone(), metrics.clone(), generation_first, options.waiters_max(), hash_seed);
        let budget = Budget::new(options, tiers.write_load().clone(), metrics.clone());
        let scrub_progress = ScrubProgress::default();
        Store { tiers, puts, metrics, budget, scrub_progress, options: options.clone() }
    }

    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    pub fn puts(&self) -> &Puts {
        &self.puts
    }

    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    pub(crate) fn options(&self) -> &NodeOptions {
        &self.options
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Runs the periodic work until `stop` is cancelled: expiry, idle puts, and the scrub of L2.
    pub async fn upkeep(&self, stop: CancellationToken) {
        let tick = async {
            loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(TICK) => self.tick(),
                }
            }
        };
        let rate = self.options.scrub_bytes_per_second;
        tokio::join!(tick, scrub::run(&self.tiers, &self.scrub_progress, rate, stop.clone()));
    }

    pub fn tick(&self) {
        self.tiers.tick();
        let now = larder_runtime::now();
        let silence_of = |writer| self.budget.writer_silence(writer, now);
        self.puts.abort_idle(now, (PUT_IDLE_MAX, PUT_TIME_MAX), silence_of);
    }

    /// Opens a put, unless the page exists or another put of it is open.
    pub fn reserve(&self, id: PageId, page: Reserved) -> Result<Arc<Put>, ReserveOutcome> {
        self.puts.reserve(id, &page, |_| Some(None))
    }

    /// Opens a put like [`Store::reserve`] and charges its bytes to a connection's account. Without
    /// room for it, puts of silent writers end, and of tenants above their share. `seeks_room` is
    /// `false` if an equal page has just found none.
    pub(crate) fn reserve_for(
        &self,
        account: &Arc<Account>,
        id: PageId,
        page: &Reserved,
        seeks_room: bool,
    ) -> Result<Arc<Put>, ReserveOutcome> {
        if !seeks_room {
            return self.puts.reserve(id, page, |_| None);
        }
        // The bytes that the page takes in the arena, as the policy counts them.
        let bytes = page_bytes(page).next_multiple_of(SLOT_UNIT) as u64;
        let reserve = || self.puts.reserve(id, page, |_| account.charge(Kind::Puts, bytes).ok().map(Some));
        match reserve() {
            Err(ReserveOutcome::Busy) => {
                let writers = account.losing_writers(bytes);
                if writers.is_empty() {
                    return Err(ReserveOutcome::Busy);
                }
                self.puts.take_back(&writers, |writer| account.takes_from(writer, bytes));
                reserve()
            }
            outcome => outcome,
        }
    }

    /// Compares a page's checksums with those of a second writer. The outcome is `Refused` if they
    /// differ, and `Incomplete` if no tier can return them before `deadline`. Reads no payload.
    pub async fn compare(&self, id: &PageId, crcs: &[u32], deadline: Instant) -> PutEnd {
        match self.tiers.describe(id, deadline).await {
            Some((ours, generation)) if ours == crcs || fail_point!("node.compare-skips-bytes") => {
                PutEnd { outcome: CommitOutcome::AlreadyThere, generation }
            }
            Some(_) => {
                self.metrics.puts_conflicting.inc();
                PutEnd { outcome: CommitOutcome::Refused, generation: 0 }
            }
            None => PutEnd { outcome: CommitOutcome::Incomplete, generation: 0 },
        }
    }

    /// Loads pages into L2. Returns how many of them could be read.
    pub async fn warm(&self, ids: &[PageId], deadline: Instant) -> usize {
        self.warm_for(None, ids, deadline).await
    }

    /// Loads pages like [`Store::warm`]. Charges the bytes that L3 reads to an account, with the
    /// page size in bytes that comes with it.
    pub(crate) async fn warm_for(
        &self,
        charged_to: Option<&(Arc<Account>, u64)>,
        ids: &[PageId],
        deadline: Instant,
    ) -> usize {
        let loads = futures::stream::iter(ids.to_vec())
            .map(|id| self.warm_page(charged_to, id, deadline))
            .buffer_unordered(LOADS_AT_ONCE);
        loads.filter(|&loaded| std::future::ready(loaded)).count().await
    }

    /// Loads one page into L2 as soon as the account has budget for it. Returns `true` if it was
    /// read before the deadline.
    async fn warm_page(&self, charged_to: Option<&(Arc<Account>, u64)>, id: PageId, deadline: Instant) -> bool {
        let load = async {
            let location = self.tiers.lookup(&id);
            if matches!(location, PageLocation::OnL3(_)) && fail_point!("node.warm-misses-l3") {
                return false;
            }
            // Only a read of L3 takes memory; a page in DRAM has its memory already.
            let _charge = match charged_to.filter(|_| matches!(location, PageLocation::OnL3(_))) {
                Some((account, page_bytes)) => Some(account.charge_read(*page_bytes).await),
                None => None,
            };
            self.tiers.warm_at(&id, location, deadline).await.is_some()
        };
        tokio::time::timeout_at(deadline.into(), load).await.unwrap_or(false)
    }

    /// Forgets pages and aborts open puts of them. Returns how many pages existed. After an error
    /// the caller must try again.
    pub async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, TiersError> {
        self.forget_for(Peer::Local, ids, deadline).await
    }

    /// Like [`Store::forget`], for a client of `peer`, whose share of the recorded forgets it
    /// takes.
    pub(crate) async fn forget_for(&self, peer: Peer, ids: &[PageId], deadline: Instant) -> Result<usize, TiersError> {
        // Puts first: a put that was open when the forget began must not be sealed after it, and no
        // copy from before may be admitted after it.
        self.puts.forget(peer, ids);
        let forgotten = self.tiers.forget(ids, deadline).await;
        if fail_point!("node.forget-records-late") {
            self.puts.record_forget(peer, ids);
        }
        forgotten
    }

    /// Pins pages for `ttl_ms`, after loading those on L3 into L2. Returns how many pages are
    /// pinned now. [`PinKind::None`] removes pins and returns how many pages had one.
    pub async fn pin(
        &self,
        ids: &[PageId],
        kind: PinKind,
        ttl_ms: u64,
        deadline: Instant,
    ) -> Result<usize, PinRefused> {
        self.pin_for(None, ids, kind, ttl_ms, deadline).await
    }

    /// Pins pages like [`Store::pin`] and charges loads like [`Store::warm_for`].
    pub(crate) async fn pin_for(
        &self,
        charged_to: Option<&(Arc<Account>, u64)>,
        ids: &[PageId],
        kind: PinKind,
        ttl_ms: u64,
        deadline: Instant,
    ) -> Result<usize, PinRefused> {
        if kind != PinKind::None {
            if self.is_of_retired(ids) {
                return Ok(0);
            }
            let is_on_l3 = |id: &PageId| matches!(self.tiers.lookup(id), PageLocation::OnL3(_));
            let on_l3: Vec<PageId> = ids.iter().copied().filter(is_on_l3).collect();
            self.warm_for(charged_to, &on_l3, deadline).await;
        }
        let ids: BTreeSet<PageId> = ids.iter().copied().collect();
        self.tiers.pin(&ids, kind, ttl_ms)
    }

    /// Takes a hint for pages of one namespace, in the order of their sequence. `generated` is the
    /// number of generated tokens, if the generation that used them has ended. Returns how many are
    /// in L2.
    pub async fn hint(
        &self,
        ids: &[PageId],
        generated: Option<u32>,
        advice: Hint,
        retain_ms: u64,
        deadline: Instant,
    ) -> usize {
        if self.is_of_retired(ids) {
            return 0;
        }
        let retain_ms = retain_ms.min(self.options.pin_time_max.as_millis() as u64);
        self.tiers.hint(ids, generated, advice, retain_ms, deadline).await
    }

    /// Returns `true` if the pages, which are of one namespace, are of a retired one.
    fn is_of_retired(&self, ids: &[PageId]) -> bool {
        ids.first().is_some_and(|id| self.tiers.is_retired(&id.namespace))
    }

    /// Aborts open puts, flushes pages to L3 until `deadline`, and closes the devices. Pages that
    /// are not flushed by then are lost.
    pub async fn close(&self, deadline: Instant) {
        // Puts first: their reserved bytes are budget that the flush needs.
        self.puts.shut_down();
        self.tiers.drain(deadline).await;
        self.tiers.devices().close().await;
    }

    pub fn status(&self) -> serde_json::Value {
        let (open, waiting) = self.puts.counts();
        let mut tiers = self.tiers.status();
        tiers["l2"]["scrub"] = self.scrub_progress.status();
        serde_json::json!({
            "memory_max": memory_plan::json(&memory_plan::of(&self.options)),
            "tiers": tiers,
            "puts_open": open,
            "readers_waiting": waiting,
            "budget": self.budget.status(),
            "counters": self.metrics.json(),
        })
    }

    /// Updates the gauges that carry labels. To be called before every export.
    pub(crate) fn refresh_metrics(&self) {
        let label = |name: &str, value: String| (name.to_string(), value);
        let gauge = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let devices =
            self.tiers.devices().conditions().into_iter().map(|device| {
                (vec![label("dir", device.dir), label("reason", device.reason)], i64::from(device.usable))
            });
        metrics::show(&self.metrics.devices, devices.collect());
        let scrubs = self.tiers.devices().late_scrubs().into_iter();
        let scrubs = scrubs.map(|(dir, is_late)| (vec![label("dir", dir)], i64::from(is_late)));
        metrics::show(&self.metrics.late_scrubs, scrubs.collect());
        let namespaces = self.tiers.namespace_bytes().into_iter();
        let namespaces =
            namespaces.map(|(namespace, bytes)| (vec![label("namespace", namespace.to_string())], gauge(bytes)));
        metrics::show(&self.metrics.namespaces, namespaces.collect());
        let in_flight = self.budget.usage().into_iter();
        let in_flight = in_flight.map(|(kind, bytes)| (vec![label("kind", kind.to_string())], gauge(bytes)));
        metrics::show(&self.metrics.in_flight, in_flight.collect());
        let plan = memory_plan::of(&self.options);
        let parts = plan.parts().map(|(part, bytes)| (vec![label("part", part.to_string())], gauge(bytes)));
        metrics::show(&self.metrics.memory_max, parts.collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{self, open_put, put, reserved, soon};
    use larder_format::{NamespaceId, PageKey};

    const PAGE: [u8; 100] = [0; 100];

    fn id(number: u32) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
    }

    fn reserve_copy(store: &Store, id: PageId, generation: u64) -> Result<Arc<Put>, ReserveOutcome> {
        store.reserve(id, Reserved { copy_of: Some(generation), ..reserved(id, PAGE.len()) })
    }

    #[tokio::test]
    async fn a_forgotten_page_is_neither_held_nor_served() {
        let store = test_support::store(Clock::at(0));
        put(&store, id(1), &PAGE);
        let (found, _) = store.tiers().get(&id(1), soon()).await.unwrap();
        drop(store.tiers().hold(&found).expect("the page is current"));
        store.forget(&[id(1)], soon()).await.unwrap();
        let hold = store.tiers().hold(&found);
        assert!(hold.is_none() && store.tiers().get(&id(1), soon()).await.is_none());
    }

    /// The table of puts is locked for a part of the request at a time.
    #[tokio::test]
    async fn forget_of_many_pages_reaches_each_of_them() {
        let store = test_support::store(Clock::at(0));
        let ids: Vec<PageId> = (0..8192).map(id).collect();
        let open = [0, 100, 8191].map(|number| open_put(&store, id(number), &PAGE));
        let copied = open[2].generation();
        store.forget(&ids, soon()).await.unwrap();
        assert!(open.iter().all(|put| store.puts().commit(put) == CommitOutcome::Incomplete));
        for id in &ids {
            assert_eq!(reserve_copy(&store, *id, copied).err(), Some(ReserveOutcome::Forgotten));
        }
        assert!(reserve_copy(&store, id(8192), copied).is_ok(), "another page");
    }
}
