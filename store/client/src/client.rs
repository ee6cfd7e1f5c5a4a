//! The client's handle and its shared state. Operations are in `operations`.

use crate::StoreUrl;
use crate::budget::PutBudget;
use crate::buffer::{self, Buffer};
use crate::connection::{ConnectionOptions, Connector, NodeHandle, SocketConnector};
use crate::options::ClientOptions;
use crate::stats::{ClientStats, Counters};
use futures::future::join_all;
use larder_format::{NamespaceDescriptor, NamespaceId, PageGeometry};
use larder_memory::share::SharedMemory;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Time for which [`Client::ready`] waits for the remaining nodes once the first is connected.
const STRAGGLER_WAIT: Duration = Duration::from_secs(1);
/// Limit of shared memory for a client without a namespace, which moves no pages.
const STATUS_MEMORY_BYTES: usize = 64 << 10;

pub(crate) struct Namespace {
    pub(crate) id: NamespaceId,
    pub(crate) geometry: PageGeometry,
}

struct ClientInner {
    nodes: Vec<Arc<NodeHandle>>,
    namespace: Option<Namespace>,
    put_budget: Arc<PutBudget>,
    counters: Arc<Counters>,
    memory: Option<Arc<SharedMemory>>,
    _stop: DropGuard,
}

/// A store client. Clones share one set of connections, which end with the last clone.
///
/// Every operation takes a deadline and ends by then, give or take a second in which a payload that
/// is being received may finish. No operation fails because a node is absent: its pages are misses,
/// and puts to it are lost.
#[derive(Clone)]
pub struct Client {
    inner: Arc<ClientInner>,
}

impl Client {
    /// Attaches to the nodes of `url`. Returns at once: connections are made in the background, and
    /// again whenever they are lost, with a backoff of 50 ms to 2 s. Use [`Client::ready`] to wait.
    ///
    /// Without a `namespace`, the client can ask for members and status only.
    ///
    /// # Panics
    /// If it is called outside a tokio runtime.
    pub fn attach(url: StoreUrl, namespace: Option<NamespaceDescriptor>, options: ClientOptions) -> Client {
        let connector = SocketConnector::new(options.busy_poll, options.rdma.clone());
        Self::attach_with(Arc::new(connector), url, namespace, options)
    }

    pub(crate) fn attach_with(
        connector: Arc<impl Connector>,
        url: StoreUrl,
        namespace: Option<NamespaceDescriptor>,
        options: ClientOptions,
    ) -> Client {
        let stop = CancellationToken::new();
        // A client without a namespace needs memory only to learn the transport that pages would
        // use.
        let memory_max = if namespace.is_some() { usize::MAX } else { STATUS_MEMORY_BYTES };
        let memory = buffer::map_shared_memory(options.memory_bytes.min(memory_max));
        let jitter_seed = larder_runtime::random::seed(options.seed);
        let transport = url.transport;
        let start = |address: String| {
            let options = ConnectionOptions {
                transport,
                address,
                name: options.name.clone(),
                namespace: namespace.clone(),
                connect_timeout: options.connect_timeout,
                connections: url.connections,
                protocol_max: options.protocol_max,
                memory: memory.clone(),
                jitter_seed,
            };
            Arc::new(NodeHandle::start(options, connector.clone(), stop.child_token()))
        };
        let inner = ClientInner {
            nodes: url.nodes.into_iter().map(start).collect(),
            namespace: namespace.as_ref().map(|n| Namespace { id: n.id(), geometry: n.geometry }),
            put_budget: Arc::new(PutBudget::new(options.put_queue_bytes_max)),
            counters: Arc::default(),
            memory: memory.clone(),
            _stop: stop.drop_guard(),
        };
        // Supervisors hold no reference to it, so the last clone ends them.
        Client { inner: Arc::new(inner) }
    }

    /// Waits until all nodes are connected. Once one is, the others have at most one second.
    ///
    /// Returns `false` if no node is connected after `timeout`.
    pub async fn ready(&self, timeout: Duration) -> bool {
        let nodes = self.nodes();
        if nodes.is_empty() {
            return false;
        }
        let all = join_all(nodes.iter().map(|node| node.connected()));
        let any = futures::future::select_all(nodes.iter().map(|node| Box::pin(node.connected())));
        let work = async {
            let (first, _, _) = any.await;
            let _ = tokio::time::timeout(STRAGGLER_WAIT, all).await;
            first
        };
        tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| nodes.iter().any(|node| node.pool().is_some()))
    }

    /// Number of nodes that are connected now, at most the number of nodes in the URL. Never waits.
    pub fn nodes_connected(&self) -> usize {
        self.nodes().iter().filter(|node| node.pool().is_some()).count()
    }

    /// Allocates `bytes` bytes of the client's shared memory, or heap memory if that is used up.
    /// Never waits. The content is undefined: zeros, or bytes of an earlier buffer.
    ///
    /// A put from a buffer saves a copy if the node is on this machine or reachable by RDMA, and so
    /// does a get into one by RDMA.
    pub fn buffer(&self, bytes: usize) -> Buffer {
        Buffer::new(self.inner.memory.as_ref(), bytes)
    }

    /// Geometry of a page in this client's namespace, or `None` for a client without a namespace.
    /// It tells the bytes of a page and of its parts.
    pub fn geometry(&self) -> Option<PageGeometry> {
        self.inner.namespace.as_ref().map(|namespace| namespace.geometry)
    }

    /// Counters of this client and its clones since [`Client::attach`]. Never waits. The counters
    /// are read one by one, so they may differ by operations in progress.
    pub fn stats(&self) -> ClientStats {
        self.inner.counters.snapshot()
    }

    pub(crate) fn nodes(&self) -> &[Arc<NodeHandle>] {
        &self.inner.nodes
    }

    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.inner.counters
    }

    pub(crate) fn put_budget(&self) -> &Arc<PutBudget> {
        &self.inner.put_budget
    }

    pub(crate) fn namespace_if_any(&self) -> Option<&Namespace> {
        self.inner.namespace.as_ref()
    }

    /// The client's namespace.
    ///
    /// # Panics
    /// If the client was attached without one.
    pub(crate) fn namespace(&self) -> &Namespace {
        self.namespace_if_any().expect("a client that was attached without a namespace has no pages")
    }

    /// Resources in use: payload bytes of queued puts, outstanding requests, and bytes of shared
    /// memory that are allocated.
    pub(crate) fn in_flight(&self) -> (usize, usize, usize) {
        let outstanding = self.nodes().iter().filter_map(|node| node.pool()).map(|pool| pool.outstanding());
        let memory = self.inner.memory.as_ref().map_or(0, |memory| memory.used());
        (self.inner.put_budget.used(), outstanding.sum(), memory)
    }
}
