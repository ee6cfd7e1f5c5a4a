//! The public face of the client.

use crate::buffer::{DynBuffer, downcast};
use crate::clock::now;
use crate::connect::{Connector, Sockets};
use crate::follow::{self, Follow};
use crate::link::{Link, LinkOptions, Live};
use crate::members::{self, Member, Registration};
use crate::pin::{Pinned, milliseconds};
use crate::put::{self, Budget, NewPage, PagePut, PutOptions, PutOutcome};
use crate::put_pages::put_pages;
use crate::sink::{Got, PageEnd, PageSink, Sink};
use crate::stats::{ClientStats, Counters, count};
use crate::view::{Later, PageView, ViewBytes, copy_checked};
use crate::{StoreUrl, Transport, spread};
use bytes::Bytes;
use futures::future::join_all;
use larder_format::planted::{Bug, has};
use larder_format::{NamespaceDescriptor, NamespaceId, PageGeometry, PageId, PageKey};
use larder_wire::{MAX_HOLD_MS, MAX_KEYS, MAX_PUTS, PinKind, Request, Response, TierCode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Where a page was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    /// DRAM of a store node.
    L2,
    /// NVMe of a store node.
    L3,
}

fn tier(code: TierCode) -> Option<Tier> {
    match code {
        TierCode::Nowhere => None,
        TierCode::L2 => Some(Tier::L2),
        TierCode::L3 => Some(Tier::L3),
    }
}

/// What the nodes hold of a chain of pages.
#[derive(Debug, Default)]
pub struct Lookup {
    /// Tier of each page of the longest servable prefix; its length is the prefix in pages.
    pub tiers: Vec<Tier>,
    /// Whether every node that owns one of the keys answered in time. If not, an empty prefix does not mean that nothing
    /// is there.
    pub answered: bool,
    /// How many of these pages, from the first on, are held in L2 already. The others are brought there, one after the other.
    pub held: usize,
    /// How long a page on L3 is expected to take.
    pub l3_expected: Duration,
    /// Keeps the pages readable. They are let go of when this is dropped, or the time is over that was asked for.
    pub lease: Lease,
}

/// Pages that nodes keep readable for this client.
#[derive(Default)]
pub struct Lease {
    lookups: Vec<(Arc<Live>, u64)>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("nodes", &self.lookups.len()).finish()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for (node, request) in &self.lookups {
            node.tell_surely(&Request::Cancel(*request));
        }
    }
}

/// What forgetting came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forgotten {
    /// Pages that were there.
    pub pages: usize,
    /// Whether every node of the URL said that it has durably forgotten. If not, try again.
    pub complete: bool,
}

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Who this is, for the nodes' logs; default `client`.
    pub name: String,
    /// Most time for one connection attempt; default 1 s.
    pub connect_timeout: Duration,
    /// Most payload bytes of puts that wait in this client; above it new puts are given up; default 256 MiB.
    pub put_queue_bytes_max: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self { name: "client".into(), connect_timeout: Duration::from_secs(1), put_queue_bytes_max: 256 << 20 }
    }
}

/// One node as this client sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeView {
    /// Address as given in the URL.
    pub address: String,
    /// Whether it is connected now.
    pub up: bool,
    /// The node's own name, once known.
    pub node_id: Option<String>,
    /// Its epoch, once known.
    pub epoch: Option<u64>,
    /// How pages move between it and this client, once known.
    pub transport: Option<Transport>,
    /// What the node says of its state (tiers, counters), JSON; present in [`Client::status`] only.
    pub status: Option<serde_json::Value>,
}

/// How long [`Client::ready`] waits for the last nodes once the first is there.
const STRAGGLER_WAIT: Duration = Duration::from_secs(1);
/// How long after its deadline a get still checks and copies pages that are there.
const COPY_GRACE: Duration = Duration::from_secs(1);
/// Pages asked for in one Get.
const GET_PAGES_MAX: usize = 1024;

struct Namespace {
    id: NamespaceId,
    geometry: PageGeometry,
}

struct Inner {
    links: Vec<Arc<Link>>,
    namespace: Option<Namespace>,
    budget: Arc<Budget>,
    counters: Arc<Counters>,
    _stop: DropGuard,
}

/// A store client; clones share connections, which end with the last clone.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

/// The nodes that are connected now, for one operation.
struct Nodes {
    live: Vec<Arc<Live>>,
    seeds: Vec<u64>,
}

impl Nodes {
    fn owner(&self, key: &PageKey) -> Option<usize> {
        spread::owner(key, &self.seeds)
    }

    /// Without nodes an answer takes no time: whoever asks in a loop must still let others run, and nodes be connected.
    async fn or_pause(&self) {
        if self.live.is_empty() {
            tokio::task::yield_now().await;
        }
    }
}

impl Client {
    /// Attaches to the nodes of `url`. Must be called inside a tokio runtime; returns at once, connections are made in the
    /// background.
    ///
    /// `namespace` is `None` for clients that only ask for members and status.
    pub fn attach(url: StoreUrl, namespace: Option<NamespaceDescriptor>, options: ClientOptions) -> Client {
        Self::attach_by(Arc::new(Sockets), url, namespace, options)
    }

    /// Like [`Client::attach`], with connections that `connector` makes.
    pub(crate) fn attach_by(
        connector: Arc<impl Connector>,
        url: StoreUrl,
        namespace: Option<NamespaceDescriptor>,
        options: ClientOptions,
    ) -> Client {
        let stop = CancellationToken::new();
        let transport = url.transport;
        let link = |address: String| {
            let options = LinkOptions {
                transport,
                address,
                name: options.name.clone(),
                namespace: namespace.clone(),
                connect_timeout: options.connect_timeout,
            };
            Arc::new(Link::start(options, connector.clone(), stop.child_token()))
        };
        let inner = Inner {
            links: url.nodes.into_iter().map(link).collect(),
            namespace: namespace.as_ref().map(|n| Namespace { id: n.id(), geometry: n.geometry }),
            budget: Arc::new(Budget::new(options.put_queue_bytes_max)),
            counters: Arc::default(),
            _stop: stop.drop_guard(),
        };
        Client { inner: Arc::new(inner) }
    }

    /// Waits until every node is connected, or at least one and the others do not come soon; `false` if there is none after
    /// `timeout`.
    pub async fn ready(&self, timeout: Duration) -> bool {
        if self.inner.links.is_empty() {
            return false;
        }
        let all = join_all(self.inner.links.iter().map(|link| link.connected()));
        let any = futures::future::select_all(self.inner.links.iter().map(|link| Box::pin(link.connected())));
        let work = async {
            let (first, _, _) = any.await;
            let _ = tokio::time::timeout(STRAGGLER_WAIT, all).await;
            first
        };
        tokio::time::timeout(timeout, work)
            .await
            .unwrap_or_else(|_| self.inner.links.iter().any(|l| l.live().is_some()))
    }

    /// Shape of a page in this client's namespace.
    pub fn geometry(&self) -> Option<PageGeometry> {
        self.inner.namespace.as_ref().map(|n| n.geometry)
    }

    fn nodes(&self) -> Nodes {
        let live: Vec<Arc<Live>> = self.inner.links.iter().filter_map(|link| link.live()).collect();
        let seeds = live.iter().map(|node| spread::seed(&node.node_id)).collect();
        Nodes { live, seeds }
    }

    /// Indices of `keys` by the node that owns them, in batches of at most `batch`. Keys without a node are in none.
    fn batches(nodes: &Nodes, keys: &[PageKey], batch: usize) -> Vec<(Arc<Live>, Vec<usize>)> {
        let mut by_node: Vec<Vec<usize>> = vec![Vec::new(); nodes.live.len()];
        for (index, key) in keys.iter().enumerate() {
            if let Some(owner) = nodes.owner(key) {
                by_node[owner].push(index);
            }
        }
        let batches = nodes
            .live
            .iter()
            .zip(&by_node)
            .flat_map(|(node, indices)| indices.chunks(batch).map(|chunk| (node.clone(), chunk.to_vec())));
        batches.collect()
    }

    /// Asks every owner about its keys, all at once.
    async fn ask_owners(
        &self,
        keys: &[PageKey],
        deadline: Instant,
        message: impl Fn(Vec<PageKey>) -> Request,
    ) -> Vec<(Vec<usize>, Option<Response>)> {
        let nodes = self.nodes();
        nodes.or_pause().await;
        let batches = Self::batches(&nodes, keys, MAX_KEYS);
        let asks = batches.into_iter().map(|(node, indices)| {
            let request = message(indices.iter().map(|&i| keys[i]).collect());
            async move { (indices, node.ask(&request, deadline).await) }
        });
        join_all(asks).await
    }

    /// Where each page lies: `None` is nowhere.
    pub async fn locate(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<Tier>> {
        let mut located = vec![None; keys.len()];
        for (indices, answer) in self.ask_owners(keys, deadline, Request::Locate).await {
            if let Some(Response::Located(tiers)) = answer {
                for (index, code) in indices.into_iter().zip(tiers) {
                    located[index] = tier(code);
                }
            }
        }
        located
    }

    /// The longest prefix of `keys` that the nodes can serve, which they hold for `hold` (at most a minute; nothing is held
    /// if it is zero) or until the lease is dropped.
    pub async fn lookup(&self, keys: &[PageKey], hold: Duration, deadline: Instant) -> Lookup {
        let hold_ms = u32::try_from(hold.as_millis()).unwrap_or(u32::MAX).min(MAX_HOLD_MS);
        let asks = Self::batches(&self.nodes(), keys, MAX_KEYS).into_iter().map(|(node, indices)| {
            let keys = indices.iter().map(|&index| keys[index]).collect();
            async move {
                let request = node.number();
                // From now on, whatever comes of it, the node is told when it is over.
                let lease = (hold_ms > 0).then(|| Lease { lookups: vec![(node.clone(), request)] });
                let answer = node.ask_as(request, &Request::Lookup { keys, hold_ms }, deadline).await;
                (indices, lease, answer)
            }
        });
        let (mut located, mut is_held, mut answered) = (vec![None; keys.len()], vec![false; keys.len()], 0);
        let mut lookup = Lookup::default();
        for (indices, lease, answer) in join_all(asks).await {
            let Some(Response::Looked { tiers, held, l3_expected_us }) = answer else { continue };
            answered += indices.len();
            for (place, (index, code)) in indices.into_iter().zip(tiers).enumerate() {
                located[index] = tier(code);
                is_held[index] = place < held as usize;
            }
            lookup.l3_expected = lookup.l3_expected.max(Duration::from_micros(l3_expected_us.into()));
            lookup.lease.lookups.extend(lease.into_iter().flat_map(|mut lease| std::mem::take(&mut lease.lookups)));
        }
        lookup.answered = answered == keys.len();
        lookup.tiers = located.into_iter().map_while(|tier| tier).collect();
        lookup.held = is_held.iter().take(lookup.tiers.len()).take_while(|&&held| held).count();
        lookup
    }

    /// Which of `keys` exist.
    pub async fn exists(&self, keys: &[PageKey], deadline: Instant) -> Vec<bool> {
        self.locate(keys, deadline).await.into_iter().map(|tier| tier.is_some()).collect()
    }

    /// Reads whole pages, each into its own buffer of exactly the page's size. The answer has the buffers in the order of
    /// the request, with where the page came from, or `None` for a miss (the buffer then holds nothing of use).
    pub async fn get<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
        let mut buffers: Vec<Option<(B, Option<Tier>)>> = pages.into_iter().map(|(_, b)| Some((b, None))).collect();
        let nodes = self.nodes();
        nodes.or_pause().await;
        if let Some(namespace) = &self.inner.namespace {
            let gets = Self::batches(&nodes, &keys, GET_PAGES_MAX).into_iter().map(|(node, indices)| {
                let wanted = indices.iter().map(|&index| {
                    let (buffer, _) = buffers[index].take().expect("each index is in one batch");
                    (PageId { namespace: namespace.id, key: keys[index] }, Box::new(buffer) as DynBuffer)
                });
                let wanted: Vec<_> = wanted.collect();
                async move {
                    let ids: Vec<PageId> = wanted.iter().map(|(id, _)| *id).collect();
                    let pages = get_from(&node, wanted, deadline).await;
                    (indices, copy_from(&node, &ids, pages, deadline).await)
                }
            });
            let gets: Vec<_> = gets.collect();
            for (indices, pages) in join_all(gets).await {
                for (index, (buffer, got)) in indices.into_iter().zip(pages) {
                    buffers[index] = Some((downcast(buffer), self.note(got)));
                }
            }
        }
        let answer: Vec<_> = buffers.into_iter().map(|b| b.expect("every batch hands its buffers back")).collect();
        self.count_gets(answer.iter().filter(|(_, tier)| tier.is_some()).count(), answer.len());
        answer
    }

    /// Reads whole pages where they lie: in the memory of nodes on this machine, which keep them there until the views are
    /// dropped; others are copied. `None` is a miss.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn view(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<PageView>> {
        let Namespace { id: namespace, geometry } = *self.namespace();
        let mut views: Vec<Option<PageView>> = keys.iter().map(|_| None).collect();
        let gets = Self::batches(&self.nodes(), keys, GET_PAGES_MAX).into_iter().map(|(node, indices)| {
            let buffer = || Box::new(Later { length: geometry.page_bytes(), bytes: Vec::new() }) as DynBuffer;
            let wanted = indices.iter().map(|&index| (PageId { namespace, key: keys[index] }, buffer())).collect();
            async move {
                let pages = get_from(&node, wanted, deadline).await;
                (node, indices, pages)
            }
        });
        for (node, indices, pages) in join_all(gets).await {
            for (index, PageEnd { buffer, got, held }) in indices.into_iter().zip(pages) {
                let id = PageId { namespace, key: keys[index] };
                let (bytes, got) = match held {
                    Some(_) if now() > deadline + COPY_GRACE => (None, Got::Missed),
                    Some((held, meta, code)) if meta.verify(&id, &held).is_ok() => {
                        (Some(ViewBytes::Held(held)), Got::Had(code))
                    }
                    Some(_) => {
                        node.suspect(&id);
                        (None, Got::Corrupt)
                    }
                    None => (Some(ViewBytes::Copied(downcast::<Later>(buffer).bytes)), got),
                };
                views[index] = self.note(got).zip(bytes).map(|(tier, bytes)| PageView { bytes, tier });
                tokio::task::yield_now().await;
            }
        }
        self.count_gets(views.iter().filter(|view| view.is_some()).count(), views.len());
        views
    }

    fn count_gets(&self, hits: usize, all: usize) {
        count(&self.inner.counters.get_hits, hits);
        count(&self.inner.counters.get_misses, all - hits);
    }

    fn note(&self, got: Got) -> Option<Tier> {
        match got {
            Got::Had(code) => tier(code),
            Got::Missed => None,
            Got::Corrupt => {
                count(&self.inner.counters.corrupt, 1);
                None
            }
        }
    }

    fn owner(&self, key: &PageKey) -> Option<Arc<Live>> {
        let nodes = self.nodes();
        nodes.owner(key).map(|index| nodes.live[index].clone())
    }

    fn namespace(&self) -> &Namespace {
        self.inner
            .namespace
            .as_ref()
            .expect("pages are put and followed by clients that were attached with a namespace")
    }

    /// Begins to put a page, which must be sealed by `deadline`. Returns at once.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub fn put(&self, page: NewPage, deadline: Instant) -> PagePut {
        self.put_with(page, PutOptions::default(), deadline)
    }

    /// Like [`Client::put`], with options.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub fn put_with(&self, page: NewPage, options: PutOptions, deadline: Instant) -> PagePut {
        let node = self.owner(&page.key);
        let inner = &self.inner;
        let (budget, counters) = (inner.budget.clone(), inner.counters.clone());
        put::begin(node, page, options, self.namespace().geometry, budget, counters, deadline)
    }

    /// Puts whole pages, all at once; how each ended, in the order of the request. Bytes that are not of a page's length
    /// are [`PutOutcome::Lost`].
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn put_pages(
        &self,
        pages: Vec<(NewPage, Bytes)>,
        options: PutOptions,
        deadline: Instant,
    ) -> Vec<PutOutcome> {
        let part_table = self.namespace().geometry.part_table();
        let page_bytes = self.namespace().geometry.page_bytes();
        let keys: Vec<PageKey> = pages.iter().map(|(page, _)| page.key).collect();
        let mut outcomes = vec![PutOutcome::Lost; pages.len()];
        let puts = Self::batches(&self.nodes(), &keys, MAX_PUTS).into_iter().map(|(node, mut indices)| {
            indices.retain(|&index| pages[index].1.len() == page_bytes);
            let pages = indices.iter().map(|&index| pages[index].clone()).collect();
            let part_table = &part_table;
            async move { (indices, put_pages(&node, pages, options, part_table, deadline).await) }
        });
        for (indices, ends) in join_all(puts).await {
            for (index, end) in indices.into_iter().zip(ends) {
                outcomes[index] = end;
            }
        }
        let stored = outcomes.iter().filter(|&&outcome| outcome == PutOutcome::Stored).count();
        let lost = outcomes.iter().filter(|outcome| matches!(outcome, PutOutcome::Lost | PutOutcome::Busy)).count();
        count(&self.inner.counters.puts, stored);
        count(&self.inner.counters.puts_lost, lost);
        outcomes
    }

    /// Reads a page that exists, is being written, or will begin to be written before `deadline`, into a buffer of exactly
    /// the page's size.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub fn follow<B: AsMut<[u8]> + Send + 'static>(&self, key: PageKey, buffer: B, deadline: Instant) -> Follow<B> {
        let namespace = self.namespace();
        let id = PageId { namespace: namespace.id, key };
        let counters = self.inner.counters.clone();
        follow::begin(self.owner(&key), id, namespace.geometry, buffer, counters, deadline)
    }

    async fn count_at_owners(
        &self,
        keys: &[PageKey],
        deadline: Instant,
        message: fn(Vec<PageKey>) -> Request,
    ) -> usize {
        let answers = self.ask_owners(keys, deadline, message).await;
        let counts = answers.into_iter().map(|(_, answer)| match answer {
            Some(Response::Count(count)) => count as usize,
            _ => 0,
        });
        counts.sum()
    }

    /// Brings pages from L3 to L2; the number that are in L2 afterwards.
    pub async fn warm(&self, keys: &[PageKey], deadline: Instant) -> usize {
        self.count_at_owners(keys, deadline, Request::Warm).await
    }

    /// Forgets pages durably, at every node: a page may lie at one that owned it while another was away.
    pub async fn forget(&self, keys: &[PageKey], deadline: Instant) -> Forgotten {
        let mut forgotten = Forgotten { pages: 0, complete: true };
        for batch in keys.chunks(MAX_KEYS) {
            let mut pages = 0;
            let mut answers = self.ask_all(&Request::Forget(batch.to_vec()), deadline).await;
            if has(Bug::ForgetAsksOwner) {
                answers = self.ask_owners(batch, deadline, Request::Forget).await.into_iter().map(|a| a.1).collect();
            }
            for answer in answers {
                match answer {
                    Some(Response::Count(count)) => pages += count as usize,
                    _ if has(Bug::ForgetWithoutAll) => {}
                    _ => forgotten.complete = false,
                }
            }
            forgotten.pages += pages.min(batch.len());
        }
        forgotten
    }

    /// Pins pages in L2 for `ttl` (at least a millisecond, at most 30 days), after they were brought there from L3. With
    /// [`PinKind::None`] their pins end, at every node, and `ttl` does not matter.
    pub async fn pin(&self, keys: &[PageKey], kind: PinKind, ttl: Duration, deadline: Instant) -> Pinned {
        let ttl_ms = if kind == PinKind::None { 0 } else { milliseconds(ttl) };
        let request = |keys| Request::Pin { keys, kind, ttl_ms };
        let mut pinned = Pinned { complete: true, ..Pinned::default() };
        if kind == PinKind::None {
            for batch in keys.chunks(MAX_KEYS) {
                for answer in self.ask_all(&request(batch.to_vec()), deadline).await {
                    pinned.add(answer);
                }
            }
            pinned.pages = pinned.pages.min(keys.len());
            return pinned;
        }
        let mut asked = 0;
        for (indices, answer) in self.ask_owners(keys, deadline, request).await {
            asked += indices.len();
            pinned.add(answer);
        }
        pinned.complete &= asked == keys.len();
        pinned
    }

    /// Keeps `member` registered with every node while the guard lives: renewed before it expires, and at once when a node
    /// comes back.
    pub fn register(&self, member: Member) -> Registration {
        members::register(&self.inner.links, &member)
    }

    async fn ask_all(&self, request: &Request, deadline: Instant) -> Vec<Option<Response>> {
        self.nodes().or_pause().await;
        let asks = self.inner.links.iter().map(|link| async move {
            match link.live() {
                Some(node) => node.ask(request, deadline).await,
                None => None,
            }
        });
        join_all(asks).await
    }

    /// Members that the nodes know, merged by name. `None` if no node answers in time.
    pub async fn members(&self, deadline: Instant) -> Option<Vec<Member>> {
        let mut merged: Option<BTreeMap<String, Member>> = None;
        for answer in self.ask_all(&Request::Members, deadline).await {
            let Some(Response::Members(members)) = answer else { continue };
            let merged = merged.get_or_insert_default();
            for entry in members {
                if let Ok(info) = serde_json::from_str(&entry.info) {
                    merged.insert(entry.name.clone(), Member { name: entry.name, info });
                }
            }
        }
        merged.map(|members| members.into_values().collect())
    }

    /// The nodes of the URL, with their own status where they answer in time.
    pub async fn status(&self, deadline: Instant) -> Vec<NodeView> {
        let answers = self.ask_all(&Request::Status, deadline).await;
        let views = self.inner.links.iter().zip(answers).map(|(link, answer)| {
            let live = link.live();
            NodeView {
                address: link.address.clone(),
                up: live.is_some(),
                node_id: live.as_ref().map(|node| node.node_id.clone()),
                epoch: live.as_ref().map(|node| node.epoch),
                transport: live.as_ref().map(|node| node.transport()),
                status: match answer {
                    Some(Response::Status(json)) => serde_json::from_str(&json).ok(),
                    _ => None,
                },
            }
        });
        views.collect()
    }

    /// Payload bytes of puts that wait in this client, and requests that wait for answers.
    pub(crate) fn under_way(&self) -> (usize, usize) {
        let waiting = self.inner.links.iter().filter_map(|link| link.live()).map(|node| node.waiting());
        (self.inner.budget.used(), waiting.sum())
    }

    /// Counters.
    pub fn stats(&self) -> ClientStats {
        self.inner.counters.read()
    }
}

/// One Get at one node. Always hands every buffer back.
async fn get_from(node: &Arc<Live>, wanted: Vec<(PageId, DynBuffer)>, deadline: Instant) -> Vec<PageEnd> {
    let keys = wanted.iter().map(|(id, _)| id.key).collect();
    let (sink, done) = PageSink::new(wanted);
    let in_place = node.transport() == Transport::Shm;
    let begun = node.begin(node.number(), &Request::Get { keys, in_place }, Sink::Pages(sink), deadline).await;
    node.settle(begun, done, deadline).await
}

/// Copies pages that lie in the node's memory into their buffers.
async fn copy_from(node: &Live, ids: &[PageId], pages: Vec<PageEnd>, deadline: Instant) -> Vec<(DynBuffer, Got)> {
    let mut copied = Vec::with_capacity(pages.len());
    for (id, PageEnd { mut buffer, got, held }) in ids.iter().zip(pages) {
        let got = match held {
            None => got,
            Some(_) if now() > deadline + COPY_GRACE => Got::Missed,
            Some((held, meta, tier)) => match copy_checked(id, &meta, &held, buffer.bytes()) {
                Ok(()) => Got::Had(tier),
                Err(_) => {
                    node.suspect(id);
                    Got::Corrupt
                }
            },
        };
        copied.push((buffer, got));
        // Copying takes the processor as long as it takes: others want it too.
        tokio::task::yield_now().await;
    }
    copied
}
