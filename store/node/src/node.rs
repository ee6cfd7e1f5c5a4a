//! Start, connections and shutdown of a node.

use crate::connection::{ConnectionLimit, LocalClient, SharedArena};
use crate::descriptors::{self, LOCAL_DESCRIPTORS, TCP_DESCRIPTORS};
use crate::devices::Devices;
use crate::events::EventServer;
use crate::host::{self, Host};
use crate::identity::{Identity, IdentityDirectory, NextIdentity, PlaceErrors};
use crate::memory_plan;
use crate::options::NodeOptions;
use crate::places::{Peer, Place, Places};
use crate::rdma::Rdma;
use crate::redis::{self, Databases, RedisServer};
use crate::state::NodeState;
use crate::store::Store;
use crate::{admin, connection, former_owners, identity, namespaces, rdma};
use futures::future::BoxFuture;
use larder_http::{AllowedHosts, HttpOptions, HttpServer};
use larder_memory::Arena;
use larder_memory::share::{ArenaListener, PeerMemory};
use larder_runtime::{Clock, now};
use larder_wire::{ArenaListenerInfo, ByteSink, ByteSource};
use larder_zmtp::SocketKind;
use rand::Rng;
use rand::rngs::StdRng;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Maximum time that a shutdown waits for connections. They end at once unless a task blocks, and
/// the flush to L3 starts only after them.
const CONNECTIONS_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept. The usual cause is a lack of file descriptors, which come back when
/// clients disconnect. Without a pause the loop would use a whole processor until then.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// Maximum time that a shutdown waits for answers of the admin server.
const ADMIN_STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two looks for idle connections. The timeout has whole seconds.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum NodeError {
    #[error("{0} [LRD0101]")]
    Options(String),
    #[error(
        "cannot listen on {address}: {source}; check --listen, --admin-listen, --redis-listen and --kv-events-listen [LRD0102]"
    )]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot use the data directory {directory}: {source}; check its permissions and free space [LRD0103]")]
    Directory { directory: String, source: std::io::Error },
    #[error("cannot map {bytes} bytes for L2 and pages in transfer: {source}; lower --l2 or --in-flight [LRD0104]")]
    Memory { bytes: u64, source: std::io::Error },
    #[error("{0} [LRD0106]")]
    MemoryPlan(String),
    #[error(
        "L3 has a page of generation {generation:#x}, and no epoch is left above it; remove the log that has it [LRD0110]"
    )]
    NoEpochLeft { generation: u64 },
    #[error(
        "cannot read the flushes of Redis databases (redis.json): {0}; restore the file, or remove it to see flushed keys again [LRD0111]"
    )]
    Redis(std::io::Error),
    #[error(
        "cannot read which namespaces are retired: {0}; restore the file, or remove it to serve them all [LRD0114]"
    )]
    Namespaces(std::io::Error),
    #[error("cannot open L3: {0}")]
    L3(#[from] larder_log::L3Error),
}

/// A running node: its sockets, its store and its tasks.
///
/// Must be stopped with [`Node::shutdown`]. Dropping a node stops nothing, and pages that wait for
/// L3 are lost when the process ends.
pub struct Node {
    state: Arc<NodeState>,
    addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    redis_addr: Option<SocketAddr>,
    events: Option<EventAddresses>,
    stop: CancellationToken,
    tasks: TaskTracker,
    drain_timeout: Duration,
}

impl Node {
    /// Opens the tiers, recovers L3, and listens. Must be called inside a tokio runtime.
    ///
    /// Returns once clients can connect. The recovery of a large L3 log continues in the
    /// background. A device that fails to open is an error only if no other one opens.
    // Boxed and never inlined. The compiler generates the code of an `async fn` in each crate that
    // polls it: the whole node, in every test program.
    #[inline(never)]
    pub fn start(options: NodeOptions) -> BoxFuture<'static, Result<Node, NodeError>> {
        Box::pin(Node::open(options))
    }

    async fn open(options: NodeOptions) -> Result<Node, NodeError> {
        options.validate().map_err(NodeError::Options)?;
        let plan = memory_plan::of(&options);
        memory_plan::check(&plan, &options, larder_memory::machine::total()).map_err(NodeError::MemoryPlan)?;
        tracing::info!(bytes = plan.total(), "memory of this node, at most: {plan}");
        let mut rng = larder_runtime::random::generator(options.seed);
        // All tiers share one clock: a page that expired on one of them must be expired on all.
        let clock = options.clock.unwrap_or_else(Clock::system);
        let mut found = next_identity(&options, clock.now_unix_ms() / 1000, &mut rng);
        let arena_bytes = options.arena_bytes();
        let sharing = options.sharing();
        // On a blocking thread: faulting in a large arena takes seconds.
        let arena = tokio::task::spawn_blocking(move || Arena::with(arena_bytes as usize, sharing))
            .await
            .map_err(std::io::Error::other)
            .and_then(|arena| arena)
            .map_err(|source| NodeError::Memory { bytes: arena_bytes, source })?;
        let local = listen_local(&arena, &options, found.identity(), &mut rng);
        let rdma = rdma::open(&options.rdma, &arena).await;
        let mut devices = Devices::open(&options, clock, &arena).await?;
        let (own, errors) = found.store_above_generations(&mut devices).await?;
        let dirs = identity_dirs(&options);
        let members_dir = dirs.iter().find(|dir| errors.iter().all(|(failed, _)| failed != *dir)).cloned();
        let has_dirs = !dirs.is_empty();
        report_identity_errors(&options, errors)?;
        let store = Store::new(&options, arena, devices, clock, own.generation_first(&mut rng));
        // Before any reader. Directories without the identity count too: their pages stay readable.
        let unopened = store.tiers().devices().unopened_dirs();
        store.tiers().namespaces().open(dirs, &unopened).map_err(NodeError::Namespaces)?;
        let address = local.as_ref().map(|local| local.address.clone());
        let host = Host::read(options.l3_devices().into_iter().map(|device| device.dir).collect()).await;
        let state = NodeState::new(own, store, address, rdma, options.protocol_max, options.busy_poll, Some(host));
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        if let Some(dir) = &members_dir {
            // Before clients can connect.
            state.members.expect(former_owners::read(dir), now());
        }
        // Last of all that can fail: a client that connects finds a node that serves.
        let (listener, addr) = listen(options.listen)?;
        let admin_addr = match options.admin_listen {
            Some(address) => Some(serve_admin(&state, (address, options.http.clone()), &stop, &tasks)?),
            None => None,
        };
        let redis = match options.redis_listen {
            Some(address) => {
                let databases = Databases::open(members_dir.clone()).map_err(NodeError::Redis)?;
                Some((listen(address)?, databases))
            }
            None => None,
        };
        let events = serve_events(&state, &options, &stop, &tasks)?;
        if let Some(dir) = members_dir {
            tasks.spawn(former_owners::keep(state.clone(), dir, stop.clone()));
        }
        if has_dirs {
            tasks.spawn(namespaces::keep(state.clone(), stop.clone()));
        }
        tasks.spawn(identity::keep_ahead(state.clone(), found, stop.clone()));
        spawn_upkeep(&state, &stop, &tasks);
        let acceptor = Acceptor {
            state: state.clone(),
            places: Places::new(options.place_limits(descriptors::for_connections(&options)), state.metrics.clone()),
            stop: stop.clone(),
            tasks: tasks.clone(),
        };
        if let Some(local) = local {
            tasks.spawn(accept_local(acceptor.clone(), local));
        }
        tasks.spawn(close_idle(acceptor.places.clone(), stop.clone()));
        let redis_addr = redis.as_ref().map(|((_, addr), _)| *addr);
        if let Some(((listener, _), databases)) = redis {
            let server = RedisServer::new(state.clone(), databases, larder_runtime::random::generator(options.seed));
            tasks.spawn(server.clone().end_leases(stop.clone()));
            tasks.spawn(accept_redis(acceptor.clone(), listener, server));
        }
        tasks.spawn(accept_tcp(acceptor, listener));
        tracing::info!(node = %state.identity.node_id, epoch = state.identity.epoch, %addr, "store node ready");
        Ok(Node { state, addr, admin_addr, redis_addr, events, stop, tasks, drain_timeout: options.drain_timeout })
    }

    /// Address of the data port, with the port that was picked if the option was 0.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    pub fn redis_addr(&self) -> Option<SocketAddr> {
        self.redis_addr
    }

    /// Address of the stream of KV events.
    pub fn kv_events_addr(&self) -> Option<SocketAddr> {
        self.events.map(|events| events.stream)
    }

    /// Address for replays of KV events.
    pub fn kv_events_replay_addr(&self) -> Option<SocketAddr> {
        self.events?.replay
    }

    pub fn node_id(&self) -> &str {
        &self.state.identity.node_id
    }

    /// Returns the node's state as JSON. `docs/operations.md` describes the fields.
    pub fn status(&self) -> serde_json::Value {
        self.state.status()
    }

    /// Shuts down: accepts no more connections, ends the open ones, and flushes pages to L3 for at
    /// most [`NodeOptions::drain_timeout`].
    // Boxed and never inlined: see `Node::start`.
    #[inline(never)]
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(self.close())
    }

    async fn close(self) {
        // Connections end before the flush: an open connection could add pages to it.
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(CONNECTIONS_END_TIMEOUT, self.tasks.wait()).await.is_err() {
            let open = self.state.metrics.connections.get();
            tracing::warn!(open, timeout = ?CONNECTIONS_END_TIMEOUT, "shutting down with connections still open");
        }
        self.state.store.close(now() + self.drain_timeout).await;
        tracing::info!(node = %self.state.identity.node_id, "store node stopped");
    }
}

/// A node without sockets: a store that serves any pair of streams. Simulations bring their own
/// network, clock and devices.
#[derive(Clone)]
pub struct Server {
    state: Arc<NodeState>,
}

impl Server {
    pub fn new(
        store: Store,
        identity: Identity,
        arena_listener: Option<ArenaListenerInfo>,
        rdma: Option<Rdma>,
        protocol_max: u16,
    ) -> Server {
        // Simulated time does not pass while a thread polls.
        let busy_poll = Duration::ZERO;
        Server { state: NodeState::new(identity, store, arena_listener, rdma, protocol_max, busy_poll, None) }
    }

    pub fn store(&self) -> &Store {
        &self.state.store
    }

    pub fn status(&self) -> serde_json::Value {
        self.state.status()
    }

    /// Serves a client until it disconnects or violates the protocol.
    pub fn serve(&self, read: impl ByteSource, write: impl ByteSink) -> BoxFuture<'static, ()> {
        Box::pin(connection::serve(self.state.clone(), "simulated client".into(), read, write))
    }

    /// Serves a client that reads pages in place until `session_end` resolves, and that may put
    /// parts from `peer_memory`.
    pub fn serve_in_place(
        &self,
        read: impl ByteSource,
        write: impl ByteSink,
        peer_memory: Option<Arc<dyn PeerMemory>>,
        session_end: impl Future<Output = ()> + Send + 'static,
    ) -> BoxFuture<'static, ()> {
        let state = self.state.clone();
        let peer = "simulated local client".into();
        let client = LocalClient { memory: peer_memory, session: None };
        Box::pin(connection::serve_in_place(state, peer, (read, write), client, session_end, None))
    }
}

/// The node's name and next epoch: from the data directory, or else from beside the L3 logs. A node
/// with neither gets a new name at each start.
fn next_identity(options: &NodeOptions, unix_seconds: u64, rng: &mut StdRng) -> NextIdentity<IdentityDirectory> {
    NextIdentity::new(identity_dirs(options).into_iter().map(IdentityDirectory).collect(), unix_seconds, rng)
}

/// Directories that keep the identity.
fn identity_dirs(options: &NodeOptions) -> Vec<PathBuf> {
    match &options.data_dir {
        Some(dir) => vec![dir.clone()],
        None => options.l3.iter().map(|device| device.dir.clone()).collect(),
    }
}

/// Reports the places that do not have the identity. The node cannot run without its data
/// directory.
fn report_identity_errors(options: &NodeOptions, errors: PlaceErrors) -> Result<(), NodeError> {
    for (dir, source) in errors {
        if options.data_dir.is_some() {
            return Err(NodeError::Directory { directory: dir.display().to_string(), source });
        }
        tracing::warn!(
            error = %source, dir = %dir.display(),
            "cannot keep the node's identity on this L3 device; it gets no pages until the next start [LRD0110]"
        );
    }
    Ok(())
}

fn spawn_upkeep(state: &Arc<NodeState>, stop: &CancellationToken, tasks: &TaskTracker) {
    tasks.spawn(host::keep_current(state.clone(), stop.clone()));
    let (upkeep, stop) = (state.clone(), stop.clone());
    tasks.spawn(async move { upkeep.store.upkeep(stop).await });
}

fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), NodeError> {
    larder_http::listen(address).map_err(|source| NodeError::Listen { address, source })
}

fn serve_admin(
    state: &Arc<NodeState>,
    (address, options): (SocketAddr, HttpOptions),
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<SocketAddr, NodeError> {
    let (listener, addr) = listen(address)?;
    let server = HttpServer {
        name: "admin",
        allowed_hosts: Some(AllowedHosts::new(options.allowed_hosts.clone())),
        options,
        metrics: state.http.clone(),
        render: admin::refusal,
    };
    tasks.spawn(server.serve(listener, admin::routes(state.clone()), stop.clone(), ADMIN_STOP_TIMEOUT));
    Ok(addr)
}

#[derive(Debug, Clone, Copy)]
struct EventAddresses {
    stream: SocketAddr,
    replay: Option<SocketAddr>,
}

/// Listens for subscribers of KV events and starts the publisher. Returns `None` if events are off.
fn serve_events(
    state: &Arc<NodeState>,
    options: &NodeOptions,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Option<EventAddresses>, NodeError> {
    let Some(address) = options.kv_events_listen else { return Ok(None) };
    let Some(server) = EventServer::new(state.clone()) else { return Ok(None) };
    let (listener, stream) = listen(address)?;
    let mut replay = None;
    if let Some(address) = options.kv_events_replay_listen {
        let (listener, addr) = listen(address)?;
        replay = Some(addr);
        tasks.spawn(server.clone().accept(SocketKind::Router, listener, stop.clone(), tasks.clone()));
    }
    tasks.spawn(server.clone().accept(SocketKind::Pub, listener, stop.clone(), tasks.clone()));
    tasks.spawn(server.publish(stop.clone()));
    Ok(Some(EventAddresses { stream, replay }))
}

struct LocalAccess {
    address: ArenaListenerInfo,
    listener: ArenaListener,
    arena: Arc<SharedArena>,
}

/// Listens for processes of the same machine. Returns `None` if the arena is not shared, or if the
/// machine cannot be identified: clients then use TCP.
fn listen_local(arena: &Arena, options: &NodeOptions, identity: &Identity, rng: &mut StdRng) -> Option<LocalAccess> {
    let file = arena.file()?;
    let mut listen = || {
        let machine = larder_memory::share::host_id().ok_or(std::io::ErrorKind::NotFound)?;
        // Random, so that a node that restarts does not collide with sessions of its predecessor.
        let name = format!("larder-{}-{:016x}", identity.node_id, rng.random::<u64>());
        let arena = SharedArena {
            file: larder_memory::share::read_only(file)?,
            bytes: arena.capacity() as u64,
            sessions: Arc::new(Semaphore::new(options.connections_max)),
        };
        let listener = ArenaListener::open(&name)?;
        let address = ArenaListenerInfo { machine, name };
        std::io::Result::Ok(LocalAccess { address, listener, arena: Arc::new(arena) })
    };
    listen()
        .inspect_err(|error| tracing::warn!(%error, "cannot share memory with local processes: they use TCP instead"))
        .ok()
}

#[derive(Clone)]
struct Acceptor {
    state: Arc<NodeState>,
    places: Arc<Places>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Acceptor {
    /// Waits for the next connection. Returns `Some(None)` after a failed accept, and `None` when
    /// the node shuts down.
    async fn next<T>(&self, accept: impl Future<Output = std::io::Result<T>> + Send) -> Option<Option<T>> {
        let accepted = tokio::select! {
            // A shutdown goes before a flood of new connections.
            biased;
            () = self.stop.cancelled() => return None,
            accepted = accept => accepted,
        };
        if let Err(error) = &accepted {
            connection::record_failed_accept(&self.state, error);
            tokio::time::sleep(ACCEPT_RETRY).await;
        }
        Some(accepted.ok())
    }

    /// Spawns the task of a connection, which keeps its place until it ends.
    fn serve(&self, place: Arc<Place>, serve: impl Future<Output = ()> + Send + 'static) {
        let metrics = self.state.metrics.clone();
        metrics.connections_accepted.inc();
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            metrics.connections.inc();
            tokio::select! {
                // Biased: a shutdown must not lose against a connection that is always ready.
                biased;
                () = stop.cancelled() => {}
                () = place.closed() => {}
                () = serve => {}
            }
            metrics.connections.dec();
            drop(place);
        });
    }

    /// Answers a TCP connection beyond the limit and closes it.
    fn refuse_tcp(&self, stream: TcpStream, peer: SocketAddr, limit: ConnectionLimit) {
        let recorded = connection::record_refusal(&self.state, &peer.to_string(), limit);
        let Some(permit) = recorded else { return };
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = connection::refuse_tcp(stream, permit, limit) => {}
            }
        });
    }
}

/// Closes connections that are idle for too long, until the node shuts down.
async fn close_idle(places: Arc<Places>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(IDLE_CHECK_INTERVAL)).await.is_some() {
        places.close_idle();
    }
}

async fn accept_tcp(acceptor: Acceptor, listener: TcpListener) {
    while let Some(accepted) = acceptor.next(listener.accept()).await {
        let Some((stream, peer)) = accepted else { continue };
        match acceptor.places.admit(Peer::of(peer), TCP_DESCRIPTORS) {
            Ok(place) => {
                let place = Arc::new(place);
                acceptor.serve(place.clone(), connection::serve_tcp(acceptor.state.clone(), stream, place));
            }
            Err(limit) => acceptor.refuse_tcp(stream, peer, limit),
        }
    }
}

async fn accept_redis(acceptor: Acceptor, listener: TcpListener, server: Arc<RedisServer>) {
    while let Some(accepted) = acceptor.next(listener.accept()).await {
        let Some((stream, peer)) = accepted else { continue };
        match acceptor.places.admit(Peer::of(peer), TCP_DESCRIPTORS) {
            Ok(place) => {
                let place = Arc::new(place);
                acceptor.serve(place.clone(), redis::serve_tcp(server.clone(), stream, place));
            }
            Err(limit) => {
                let Some(permit) = connection::record_refusal(&acceptor.state, &peer.to_string(), limit) else {
                    continue;
                };
                let stop = acceptor.stop.clone();
                acceptor.tasks.spawn(async move {
                    stop.run_until_cancelled(redis::refuse(stream, limit)).await;
                    drop(permit);
                });
            }
        }
    }
}

async fn accept_local(acceptor: Acceptor, local: LocalAccess) {
    while let Some(accepted) = acceptor.next(local.listener.accept()).await {
        let Some(stream) = accepted else { continue };
        match acceptor.places.admit(Peer::Local, LOCAL_DESCRIPTORS) {
            Ok(place) => {
                let place = Arc::new(place);
                let serve = connection::serve_local(acceptor.state.clone(), stream, local.arena.clone(), place.clone());
                acceptor.serve(place, serve);
            }
            // No answer here: the client falls back to TCP, and gets it there.
            Err(limit) => drop(connection::record_refusal(&acceptor.state, "local client", limit)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::L3Device;
    use crate::test_support::reserved;
    use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
    use larder_log::{L3, L3Options};
    use larder_wire::TierCode;
    use std::path::Path;

    const L3_BYTES: u64 = 64 << 20;

    fn options(l3: &[&Path]) -> NodeOptions {
        NodeOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            l2_bytes: 32 << 20,
            l3: l3.iter().map(|dir| L3Device { dir: dir.to_path_buf(), bytes: L3_BYTES }).collect(),
            share_memory: Some(false),
            ..NodeOptions::default()
        }
    }

    /// Starts a node and returns the generation of its first put.
    async fn first_generation(l3: &[&Path]) -> u64 {
        let node = Node::start(options(l3)).await.unwrap();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let generation = node.state.store.reserve(id, reserved(id, 100)).unwrap().generation();
        node.shutdown().await;
        generation
    }

    /// Leaves a page in a log, as a start with a later clock would.
    async fn leave_page(dir: &Path, generation: u64) {
        let arena = Arena::new(1 << 20).unwrap();
        let l3 = L3::open(L3Options::new(dir, L3_BYTES), arena.clone()).await.unwrap();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([3; 32]) };
        let meta = PageMeta { generation, ..PageMeta::describe(id, PageKey::NONE, 0, vec![100], &[7; 100]) };
        let mut slot = arena.allocate(100).unwrap();
        slot.fill(7);
        l3.write(meta, slot.freeze(), larder_runtime::now() + Duration::from_secs(10)).await.unwrap();
        l3.close().await;
    }

    #[tokio::test]
    async fn generations_exceed_those_on_l3_although_the_clock_went_back() {
        let in_2080: u64 = 3_500_000_000 << 32;
        for can_store in [true, false] {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            leave_page(dir.path(), in_2080 + 5).await;
            if !can_store {
                // The identity is staged under this name.
                std::fs::create_dir(dir.path().join("node.json.new")).unwrap();
            }
            let first = first_generation(&[dir.path()]).await;
            let second = first_generation(&[dir.path()]).await;
            assert!(first > in_2080 + 5 && second > in_2080 + 5, "{can_store}: {first:#x}, {second:#x}");
            assert!(second != first && (second > first || !can_store), "{can_store}: {first:#x}, {second:#x}");
        }
    }

    #[tokio::test]
    async fn log_without_the_identity_of_the_start_gets_no_pages() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        leave_page(dir.path(), 5 << 32).await;
        std::fs::create_dir(dir.path().join("node.json.new")).unwrap();
        let node = Node::start(options(&[dir.path()])).await.unwrap();
        assert!(!node.state.store.tiers().devices().writable(), "a later start could have the same epoch");
        let reason = node.status()["tiers"]["l3"]["devices"][0]["reason"].to_string();
        assert!(reason.contains("identity"), "{reason}");
        let old = PageId { namespace: NamespaceId([1; 32]), key: PageKey([3; 32]) };
        assert!(node.state.store.tiers().devices().has(&old), "older pages stay readable");
        node.shutdown().await;
        std::fs::remove_dir(dir.path().join("node.json.new")).unwrap();
        let node = Node::start(options(&[dir.path()])).await.unwrap();
        assert!(node.state.store.tiers().devices().writable());
        node.shutdown().await;
    }

    async fn set_retired(node: &Node, is_retired: bool) -> bool {
        node.state.store.tiers().set_retired(NamespaceId([1; 32]), is_retired).await.unwrap()
    }

    #[tokio::test]
    async fn retired_namespace_stays_so_on_a_log_without_the_identity_of_the_start() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        leave_page(dir.path(), 5 << 32).await;
        let old = PageId { namespace: NamespaceId([1; 32]), key: PageKey([3; 32]) };
        let locate = |node: &Node| node.state.store.tiers().locate(&old);
        let node = Node::start(options(&[dir.path()])).await.unwrap();
        assert_ne!(locate(&node), TierCode::Absent);
        assert!(set_retired(&node, true).await);
        node.shutdown().await;
        // As a full disk: the identity is staged under this name.
        std::fs::create_dir(dir.path().join("node.json.new")).unwrap();
        let node = Node::start(options(&[dir.path()])).await.unwrap();
        assert!(node.state.store.tiers().devices().has(&old));
        assert_eq!(locate(&node), TierCode::Absent, "the page of a retired namespace is served");
        assert!(set_retired(&node, false).await);
        assert_ne!(locate(&node), TierCode::Absent);
        assert!(set_retired(&node, true).await);
        node.shutdown().await;
        let node = Node::start(options(&[dir.path()])).await.unwrap();
        assert_eq!(locate(&node), TierCode::Absent, "a change of such a start is durable");
        node.shutdown().await;
        std::fs::write(dir.path().join("namespaces.json"), b"{}").unwrap();
        assert!(matches!(Node::start(options(&[dir.path()])).await, Err(NodeError::Namespaces(_))));
    }

    #[tokio::test]
    async fn node_does_not_start_above_the_last_epoch() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        leave_page(dir.path(), u64::MAX - 5).await;
        let error = Node::start(options(&[dir.path()])).await.err().expect("no epoch is left");
        assert!(error.to_string().contains("LRD0110"), "{error}");
    }

    #[tokio::test]
    async fn starts_without_a_stored_identity_have_different_generations() {
        assert_ne!(first_generation(&[]).await, first_generation(&[]).await, "probably in the same second");
    }
}
