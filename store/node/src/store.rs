//! Puts and tiers as one: all of a node but its sockets. Connections use it, and a simulation can.

use crate::budget::{Account, Budget, Kind};
use crate::clock::Clock;
use crate::devices::Devices;
use crate::holds::Hold;
use crate::metrics::{self, Metrics};
use crate::options::NodeOptions;
use crate::policy::PinRefused;
use crate::puts::{Presence, Put, Puts};
use crate::scrub;
use crate::tiers::{Page, Tiers, TiersError};
use futures::StreamExt;
use larder_core::planted::{Bug, has};
use larder_device::Arena;
use larder_format::{NamespaceId, PageId};
use larder_wire::{CommitOutcome, PinKind, ReserveOutcome, Reserved, TierCode};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Pages that are brought into L2 at a time for one request.
const LOADS_AT_ONCE: usize = 16;
/// How often pins, pages and puts are looked at whose time may be over.
const TICK: Duration = Duration::from_secs(1);
/// An open put that nothing is received for is given up after this time.
const PUT_IDLE_MAX: Duration = Duration::from_secs(60);

/// The pages of a node.
pub struct Store {
    tiers: Arc<Tiers>,
    puts: Puts,
    metrics: Arc<Metrics>,
    budget: Arc<Budget>,
    options: NodeOptions,
}

impl Store {
    /// A store over an arena of [`NodeOptions::arena_bytes`] and devices that are open. Puts are numbered from
    /// `generation_first` on, which must be above all that the devices hold. Must be called inside a tokio runtime.
    pub fn new(
        options: &NodeOptions,
        arena: Arc<Arena>,
        devices: Devices,
        clock: Clock,
        generation_first: u64,
    ) -> Store {
        let metrics = Arc::new(Metrics::default());
        let tiers = Tiers::new(options, arena, devices, clock, metrics.clone());
        let puts = Puts::new(tiers.clone(), metrics.clone(), generation_first, options.waiters_max());
        let budget = Budget::new(options, metrics.clone());
        Store { tiers, puts, metrics, budget, options: options.clone() }
    }

    /// What has to be done regularly, until `stop`: ends what is over, and verifies L2.
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
        tokio::join!(tick, scrub::run(self.tiers.clone(), self.options.scrub_bytes_per_second, stop.clone()));
    }

    /// Begins a pass over all that L3 holds.
    pub fn scrub_l3_now(&self) {
        self.tiers.devices().scrub_now();
    }

    /// Ends pins, pages and puts whose time is over.
    pub fn tick(&self) {
        self.tiers.tick();
        self.puts.abort_idle(crate::clock::now(), PUT_IDLE_MAX);
    }

    /// A namespace is about to be used.
    pub fn welcome(&self, namespace: NamespaceId) {
        self.tiers.welcome(namespace);
    }

    /// Room for a page, if nobody has it or writes it.
    pub fn reserve(&self, id: PageId, page: Reserved) -> Result<Arc<Put>, ReserveOutcome> {
        self.puts.reserve(id, page, |_| Some(None))
    }

    /// Like [`Store::reserve`], counted for a connection.
    pub(crate) fn reserve_for(
        &self,
        account: &Arc<Account>,
        id: PageId,
        page: Reserved,
    ) -> Result<Arc<Put>, ReserveOutcome> {
        self.puts.reserve(id, page, |bytes| account.charge(Kind::Puts, bytes).ok().map(Some))
    }

    /// What connections have under way.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// The settings it was made with.
    pub(crate) fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Seals a put whose parts have landed.
    pub fn commit(&self, put: &Arc<Put>) -> CommitOutcome {
        self.puts.commit(put)
    }

    /// Gives a put up whose writer is done with it, or gone. Does nothing to one that is sealed.
    pub fn abort(&self, put: &Arc<Put>) {
        self.puts.abort(put);
    }

    /// Gives a put up of which its writer does not know it yet. Does nothing to one that is sealed.
    pub(crate) fn give_up(&self, put: &Arc<Put>) {
        self.puts.give_up(put);
    }

    /// What there is of a page, and how to learn that it changed.
    pub fn presence(&self, id: &PageId) -> Presence<'_> {
        self.puts.presence(id)
    }

    /// Where a page lies now.
    pub fn locate(&self, id: &PageId) -> TierCode {
        self.tiers.locate(id)
    }

    /// The longest prefix of the pages that can be served, as tiers.
    pub fn lookup(&self, ids: &[PageId]) -> Vec<TierCode> {
        ids.iter().map(|id| self.locate(id)).take_while(|tier| *tier != TierCode::Nowhere).collect()
    }

    /// A page in L2, after it was brought there if need be. This is no hit: it is about to be asked for.
    pub(crate) async fn fetch(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        self.tiers.fetch(id, deadline).await
    }

    /// Keeps a page readable, and its memory where it is, until the hold is dropped; `None` if too much is held, or the page
    /// was forgotten since it was found.
    pub(crate) fn hold(&self, page: &Arc<Page>) -> Option<Hold> {
        self.tiers.hold(page)
    }

    /// Holds those of the pages that are in L2 and `wanted`, by their place among `ids`, each a hit; as [`Store::hold`].
    pub(crate) fn hold_all_l2(&self, ids: &[PageId], wanted: impl Fn(usize, &Page) -> bool) -> Vec<Option<Hold>> {
        self.tiers.hold_all_l2(ids, wanted)
    }

    /// Holds a page that is in L2.
    pub(crate) fn hold_l2(&self, id: &PageId) -> Option<Hold> {
        self.tiers.get_l2(id).and_then(|page| self.tiers.hold(&page))
    }

    /// How long a page on L3 takes, by those read last.
    pub(crate) fn l3_expected(&self) -> Duration {
        self.tiers.l3_expected()
    }

    /// Those of the pages that are in L2 now. Their bytes are to be verified by the reader.
    pub fn get_l2(&self, ids: &[PageId]) -> Vec<Option<Arc<Page>>> {
        self.tiers.get_all_l2(ids)
    }

    /// A page and where it was, or a miss. The bytes of one from L2 are to be verified by the reader.
    pub async fn get(&self, id: &PageId, deadline: Instant) -> Option<(Arc<Page>, TierCode)> {
        self.tiers.get(id, deadline).await
    }

    /// Pages were asked for that are nowhere.
    pub(crate) fn missed(&self, pages: usize) {
        self.metrics.pages_missed.inc_by(pages as u64);
    }

    /// Whether a page that is there has these checksums: what a second writer wants to know.
    pub async fn compare(&self, id: &PageId, crcs: &[u32], deadline: Instant) -> CommitOutcome {
        match self.get(id, deadline).await {
            Some((page, _)) if page.meta.chunk_crcs == crcs => CommitOutcome::AlreadyThere,
            Some(_) if has(Bug::CompareBelieves) => CommitOutcome::AlreadyThere,
            Some(_) => {
                self.metrics.puts_refused.inc();
                CommitOutcome::Refused
            }
            None => CommitOutcome::Incomplete,
        }
    }

    /// Brings pages into L2; how many of them could be read.
    pub async fn warm(&self, ids: &[PageId], deadline: Instant) -> usize {
        self.warm_for(None, ids, deadline).await
    }

    /// Like [`Store::warm`], with what is on its way from L3 counted to an account, for pages of so many bytes.
    pub(crate) async fn warm_for(
        &self,
        whose: Option<&(Arc<Account>, u64)>,
        ids: &[PageId],
        deadline: Instant,
    ) -> usize {
        let loads = futures::stream::iter(ids.to_vec())
            .map(|id| self.load(whose, id, deadline))
            .buffer_unordered(LOADS_AT_ONCE);
        loads.filter(|&there| std::future::ready(there)).count().await
    }

    /// Brings one page into L2, if the account has room for it in time; whether it could be read.
    async fn load(&self, whose: Option<&(Arc<Account>, u64)>, id: PageId, deadline: Instant) -> bool {
        let load = async {
            let _charge = match whose.filter(|_| self.locate(&id) == TierCode::L3) {
                Some((account, page_bytes)) => Some(account.charge_read(*page_bytes).await),
                None => None,
            };
            self.tiers.get(&id, deadline).await.is_some()
        };
        tokio::time::timeout_at(deadline.into(), load).await.unwrap_or(false)
    }

    /// Forgets pages, and gives up puts of them; the number that were there. After an error it is to be tried again.
    pub async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, TiersError> {
        self.puts.abort_all(ids);
        self.tiers.forget(ids, deadline).await
    }

    /// Pins pages for `ttl_ms`, after it brought those on L3 into L2; how many are pinned now. With [`PinKind::None`] their
    /// pins end; the answer is how many did.
    pub async fn pin(
        &self,
        ids: &[PageId],
        kind: PinKind,
        ttl_ms: u64,
        deadline: Instant,
    ) -> Result<usize, PinRefused> {
        self.pin_for(None, ids, kind, ttl_ms, deadline).await
    }

    /// Like [`Store::pin`], with what is on its way from L3 counted to an account, for pages of so many bytes.
    pub(crate) async fn pin_for(
        &self,
        whose: Option<&(Arc<Account>, u64)>,
        ids: &[PageId],
        kind: PinKind,
        ttl_ms: u64,
        deadline: Instant,
    ) -> Result<usize, PinRefused> {
        if kind != PinKind::None {
            let on_l3: Vec<PageId> = ids.iter().copied().filter(|id| self.locate(id) == TierCode::L3).collect();
            self.warm_for(whose, &on_l3, deadline).await;
        }
        let ids: BTreeSet<PageId> = ids.iter().copied().collect();
        self.tiers.pin(&ids, kind, ttl_ms)
    }

    /// Verifies a copy in DRAM and drops it if it is damaged; the number dropped.
    pub fn recheck(&self, id: &PageId) -> usize {
        self.tiers.recheck(id)
    }

    /// Gives up open puts, writes to L3 what waits for it, until `deadline`, and lets go of the devices.
    pub async fn close(&self, deadline: Instant) {
        self.puts.end();
        self.tiers.drain(deadline).await;
        self.tiers.devices().close().await;
    }

    /// State for people and scripts.
    pub fn status(&self) -> serde_json::Value {
        let (open, waiting) = self.puts.counts();
        serde_json::json!({
            "tiers": self.tiers.status(),
            "puts_open": open,
            "readers_waiting": waiting,
            "budget": self.budget.status(),
            "counters": self.metrics.json(),
        })
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Gauges by label are up to date only after this.
    pub(crate) fn refresh_metrics(&self) {
        let label = |name: &str, value: String| (name.to_string(), value);
        let devices =
            self.tiers.devices().states().into_iter().map(|device| {
                (vec![label("dir", device.dir), label("reason", device.reason)], i64::from(device.usable))
            });
        metrics::show(&self.metrics.devices, devices.collect());
        let namespaces = self.tiers.namespace_bytes().into_iter().map(|(namespace, bytes)| {
            (vec![label("namespace", namespace.to_string())], i64::try_from(bytes).unwrap_or(i64::MAX))
        });
        metrics::show(&self.metrics.namespaces, namespaces.collect());
        let in_flight = self
            .budget
            .usage()
            .into_iter()
            .map(|(kind, bytes)| (vec![label("kind", kind.to_string())], i64::try_from(bytes).unwrap_or(i64::MAX)));
        metrics::show(&self.metrics.in_flight, in_flight.collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{PageKey, chunk_crcs};

    #[tokio::test]
    async fn a_page_that_was_forgotten_since_it_was_found_is_not_held_and_not_served() {
        let options = NodeOptions { l2_bytes: 1 << 20, in_flight_bytes: Some(1 << 20), ..NodeOptions::default() };
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let devices = Devices::of(Vec::new()).unwrap();
        let store = Store::new(&options, arena, devices, Clock::at(0), 1);
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let page = Reserved { key: id.key, parent: PageKey::NONE, position: 0, ttl_ms: 0, part_bytes: vec![100] };
        let put = store.reserve(id, page).ok().unwrap();
        let part = put.take_part(0, 100).unwrap();
        let crcs = chunk_crcs(&part).collect();
        assert!(put.land(0, part, crcs) && store.commit(&put) == CommitOutcome::Stored);
        let soon = crate::clock::now() + Duration::from_secs(5);
        let (found, _) = store.get(&id, soon).await.unwrap();
        drop(store.hold(&found).expect("it is there"));
        store.forget(&[id], soon).await.unwrap();
        let hold = store.hold(&found);
        assert!(hold.is_none() && store.get(&id, soon).await.is_none());
    }
}
