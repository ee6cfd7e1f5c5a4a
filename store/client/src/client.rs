//! The public face of the client. Reading pages is in `get`, what there is in `lookup`.

use crate::clock::now;
use crate::connect::{Connector, Sockets};
use crate::follow::{self, Follow};
use crate::lanes;
use crate::link::{Link, LinkOptions, Live};
use crate::members::{self, Member, Registration};
use crate::memory::{self, Buffer};
use crate::pin::{Pinned, milliseconds};
use crate::put::{self, Budget, NewPage, PagePut, PutOptions, PutOutcome};
use crate::put_pages::put_pages;
use crate::stats::{ClientStats, Counters, count};
use crate::{StoreUrl, Transport, spread};
use bytes::Bytes;
use futures::future::join_all;
use larder_format::planted::{Bug, has};
use larder_format::{NamespaceDescriptor, NamespaceId, PageGeometry, PageId, PageKey};
use larder_rdma::FabricOptions;
use larder_share::Memory;
use larder_wire::{MAX_KEYS, MAX_PUTS, PROTOCOL_VERSION, PinKind, Request, Response, TierCode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
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

pub(crate) fn tier(code: TierCode) -> Option<Tier> {
    match code {
        TierCode::Nowhere => None,
        TierCode::L2 => Some(Tier::L2),
        TierCode::L3 => Some(Tier::L3),
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
    /// Bytes of this client's own memory that nodes can be told places in, for [`Client::buffer`]; 0: none. It is address
    /// space until it is used; default 256 MiB.
    pub memory_bytes: usize,
    /// Most time for which a thread that waits for a node's answer looks for it again and again before it sleeps, where the last
    /// ones came as soon and no other thread wants the processor (over TCP); zero: it sleeps at once. Default 200 µs.
    pub spin: Duration,
    /// RDMA devices that pages may move by, and how they behave; default all of them.
    pub rdma: FabricOptions,
    /// Newest version of the protocol that is spoken; for tests. Default: this build's.
    #[doc(hidden)]
    pub protocol_max: u16,
    /// Where all chance comes from; by default another one for every client.
    pub seed: Option<u64>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            name: "client".into(),
            connect_timeout: Duration::from_secs(1),
            put_queue_bytes_max: 256 << 20,
            memory_bytes: 256 << 20,
            spin: larder_wire::SPIN,
            rdma: FabricOptions::default(),
            protocol_max: PROTOCOL_VERSION,
            seed: None,
        }
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
/// Memory of a client that only asks for members and status.
const STATUS_MEMORY_BYTES: usize = 64 << 10;

pub(crate) struct Namespace {
    pub(crate) id: NamespaceId,
    pub(crate) geometry: PageGeometry,
}

pub(crate) struct Inner {
    links: Vec<Arc<Link>>,
    pub(crate) namespace: Option<Namespace>,
    budget: Arc<Budget>,
    pub(crate) counters: Arc<Counters>,
    memory: Option<Arc<Memory>>,
    _stop: DropGuard,
}

/// A store client; clones share connections, which end with the last clone.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

/// The nodes that are connected now, for one operation.
pub(crate) struct Nodes {
    live: Vec<Arc<Live>>,
    seeds: Vec<u64>,
}

impl Nodes {
    fn owner(&self, key: &PageKey) -> Option<usize> {
        spread::owner(key, &self.seeds)
    }

    /// Without nodes an answer takes no time: whoever asks in a loop must still let others run, and nodes be connected.
    pub(crate) async fn or_pause(&self) {
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
        Self::attach_by(Arc::new(Sockets::new(options.spin, options.rdma.clone())), url, namespace, options)
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
        // Whoever moves no pages only wants to know how they would move.
        let memory_max = if namespace.is_some() { usize::MAX } else { STATUS_MEMORY_BYTES };
        let memory = memory::map(options.memory_bytes.min(memory_max));
        let seed = options.seed.unwrap_or_else(|| RandomState::new().hash_one(&options.name));
        let link = |address: String| {
            let options = LinkOptions {
                transport,
                address,
                name: options.name.clone(),
                namespace: namespace.clone(),
                connect_timeout: options.connect_timeout,
                connections: url.connections,
                protocol_max: options.protocol_max,
                memory: memory.clone(),
                seed,
            };
            Arc::new(Link::start(options, connector.clone(), stop.child_token()))
        };
        let inner = Inner {
            links: url.nodes.into_iter().map(link).collect(),
            namespace: namespace.as_ref().map(|n| Namespace { id: n.id(), geometry: n.geometry }),
            budget: Arc::new(Budget::new(options.put_queue_bytes_max)),
            counters: Arc::default(),
            memory: memory.clone(),
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

    /// Nodes that are connected now, of all that the URL names.
    pub fn nodes_connected(&self) -> usize {
        self.inner.links.iter().filter(|link| link.live().is_some()).count()
    }

    /// Memory for `bytes` bytes, which come and go with it: those of an earlier owner, or zeros. Putting from it costs a copy
    /// less where the node is on this machine. Never waits; plain memory if there is none of the other kind.
    pub fn buffer(&self, bytes: usize) -> Buffer {
        Buffer::new(self.inner.memory.as_ref(), bytes)
    }

    /// Shape of a page in this client's namespace.
    pub fn geometry(&self) -> Option<PageGeometry> {
        self.inner.namespace.as_ref().map(|n| n.geometry)
    }

    pub(crate) fn nodes(&self) -> Nodes {
        let live: Vec<Arc<Live>> = self.inner.links.iter().filter_map(|link| link.live()).collect();
        let seeds = live.iter().map(|node| spread::seed(&node.node_id)).collect();
        Nodes { live, seeds }
    }

    /// Indices of `keys` by the node that owns them, in batches of at most `batch`, each with the connection it is to go by:
    /// several if they are worth it, at `bytes_each` bytes. Keys without a node are in none.
    pub(crate) fn batches(
        nodes: &Nodes,
        keys: &[PageKey],
        batch: usize,
        bytes_each: usize,
    ) -> Vec<(Arc<Live>, Vec<usize>)> {
        let mut by_node: Vec<Vec<usize>> = vec![Vec::new(); nodes.live.len()];
        for (index, key) in keys.iter().enumerate() {
            if let Some(owner) = nodes.owner(key) {
                by_node[owner].push(index);
            }
        }
        let batches =
            nodes.live.iter().zip(&by_node).filter(|(_, indices)| !indices.is_empty()).flat_map(|(node, indices)| {
                let lanes = lanes::for_bytes(node, indices.len() * bytes_each);
                let chunk = indices.len().div_ceil(lanes.len()).min(batch);
                let chunks = indices.chunks(chunk).map(<[usize]>::to_vec);
                lanes.into_iter().cycle().zip(chunks).collect::<Vec<_>>()
            });
        batches.collect()
    }

    /// Asks every owner about its keys, all at once.
    ///
    /// A node that is too busy is asked again, each time after as long as it says, until the deadline.
    pub(crate) async fn ask_owners(
        &self,
        keys: &[PageKey],
        deadline: Instant,
        message: impl Fn(Vec<PageKey>) -> Request,
    ) -> Vec<(Vec<usize>, Option<Response>)> {
        let nodes = self.nodes();
        nodes.or_pause().await;
        let batches = Self::batches(&nodes, keys, MAX_KEYS, 0);
        let asks = batches.into_iter().map(|(node, indices)| {
            let request = message(indices.iter().map(|&i| keys[i]).collect());
            async move { (indices, ask_until(&node, &request, deadline).await) }
        });
        join_all(asks).await
    }

    fn owner(&self, key: &PageKey) -> Option<Arc<Live>> {
        let nodes = self.nodes();
        nodes.owner(key).map(|index| lanes::idlest(&nodes.live[index]))
    }

    pub(crate) fn namespace(&self) -> &Namespace {
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
        let nodes = self.nodes();
        nodes.or_pause().await;
        let puts = Self::batches(&nodes, &keys, MAX_PUTS, page_bytes).into_iter().map(|(node, mut indices)| {
            indices.retain(|&index| pages[index].1.len() == page_bytes);
            let (pages, part_table) = (&pages, &part_table);
            async move {
                let (mut ends, mut retries) = (Vec::new(), options.busy_retries);
                loop {
                    let pages = indices.iter().map(|&index| pages[index].clone()).collect();
                    let outcomes = put_pages(&node, pages, options, part_table, deadline).await;
                    let again = again_after(&outcomes, &node, deadline).filter(|_| retries > 0);
                    ends.extend(indices.iter().copied().zip(outcomes));
                    let Some(pause) = again else { return ends };
                    retries -= 1;
                    tokio::time::sleep(pause).await;
                    indices = ends.extract_if(.., |(_, outcome)| outcome.is_busy()).map(|(index, _)| index).collect();
                }
            }
        });
        for (index, end) in join_all(puts).await.into_iter().flatten() {
            outcomes[index] = end;
        }
        let stored = outcomes.iter().filter(|&&outcome| outcome == PutOutcome::Stored).count();
        let busy = outcomes.iter().filter(|outcome| outcome.is_busy()).count();
        let lost = outcomes.iter().filter(|&&outcome| outcome == PutOutcome::Lost).count();
        count(&self.inner.counters.puts, stored);
        count(&self.inner.counters.puts_busy, busy);
        count(&self.inner.counters.puts_lost, lost + busy);
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
            let mut answers = self.ask_all_lanes(&Request::Forget(batch.to_vec()), deadline).await;
            if has(Bug::ForgetAsksOwner) {
                answers =
                    self.ask_owners(batch, deadline, Request::Forget).await.into_iter().map(|a| vec![a.1]).collect();
            }
            for lanes in answers {
                // Each lane of a node may have found the page there while another was about to end it.
                let mut here = 0;
                for answer in lanes {
                    match answer {
                        Some(Response::Count(count)) => here = here.max(count as usize),
                        _ if has(Bug::ForgetWithoutAll) => {}
                        _ => forgotten.complete = false,
                    }
                }
                pages += here;
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

    /// Asks on every connection to every node: each answer comes after all that went before it on that connection, so no put
    /// that was given up is still on its way then. A node that is away has one answer, `None`.
    async fn ask_all_lanes(&self, request: &Request, deadline: Instant) -> Vec<Vec<Option<Response>>> {
        self.nodes().or_pause().await;
        let nodes = self.inner.links.iter().map(|link| async move {
            let lanes = match link.live() {
                Some(node) => lanes::all(&node).into_iter().map(Some).collect(),
                None => vec![None],
            };
            join_all(lanes.into_iter().map(|lane| async move { lane?.ask(request, deadline).await })).await
        });
        join_all(nodes).await
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

    /// Payload bytes of puts that wait in this client, requests that wait for answers, and bytes of its memory that are taken.
    pub(crate) fn under_way(&self) -> (usize, usize, usize) {
        let waiting = self.inner.links.iter().filter_map(|link| link.live()).map(|node| node.waiting());
        let memory = self.inner.memory.as_ref().map_or(0, |memory| memory.used());
        (self.inner.budget.used(), waiting.sum(), memory)
    }

    /// Counters.
    pub fn stats(&self) -> ClientStats {
        self.inner.counters.read()
    }
}

/// Asks a node, and again while it is too busy. Its last word on that comes at the deadline, so that nobody takes it for an
/// answer while there is time.
async fn ask_until(node: &Arc<Live>, request: &Request, deadline: Instant) -> Option<Response> {
    loop {
        let answer = node.ask(request, deadline).await;
        let Some(Response::Busy { retry_after_ms, .. }) = answer else { return answer };
        let pause = node.jittered(put::hint(retry_after_ms));
        let again = now() + pause;
        tokio::time::sleep_until(again.min(deadline).into()).await;
        if again >= deadline {
            return answer;
        }
    }
}

/// After which time to try those pages again that the node is too busy for; `None` if there are none, or the deadline comes
/// first.
fn again_after(outcomes: &[PutOutcome], node: &Live, deadline: Instant) -> Option<Duration> {
    let times = outcomes.iter().filter_map(|outcome| match outcome {
        PutOutcome::Busy { retry_after } => Some(*retry_after),
        _ => None,
    });
    times.max().map(|time| node.jittered(time)).filter(|&time| now() + time < deadline)
}
