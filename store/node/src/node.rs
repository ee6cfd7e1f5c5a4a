//! Start, accept, stop.

use crate::clock::{Clock, now};
use crate::connection::{LocalMemory, Turns};
use crate::devices::Devices;
use crate::identity::Identity;
use crate::members::Members;
use crate::metrics::Metrics;
use crate::options::NodeOptions;
use crate::rdma::Rdma;
use crate::store::Store;
use crate::{admin, connection, rdma};
use futures::future::BoxFuture;
use larder_device::Arena;
use larder_rdma::NicStats;
use larder_share::{Door, Lender};
use larder_wire::{LocalDoor, Sink, Source};
use prometheus_client::registry::Registry;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Most time a stopping node waits for its clients' tasks.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a node did not start.
#[derive(Debug, Error)]
pub enum NodeError {
    /// A setting out of range.
    #[error("{0}")]
    Options(String),
    /// An address that cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The data directory cannot be used.
    #[error("data directory {directory}: {source}")]
    Directory {
        /// The directory.
        directory: String,
        /// Why not.
        source: std::io::Error,
    },
    /// No memory for L2.
    #[error("cannot map {bytes} bytes for L2: {source}")]
    Memory {
        /// What was asked for.
        bytes: u64,
        /// Why not.
        source: std::io::Error,
    },
    /// L3 cannot be opened.
    #[error("L3: {0}")]
    L3(#[from] larder_l3::L3Error),
}

/// What every part of a node works with.
pub(crate) struct Shared {
    pub(crate) identity: Identity,
    pub(crate) store: Store,
    pub(crate) members: Members,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) registry: Registry,
    /// For processes of this machine.
    pub(crate) door: Option<LocalDoor>,
    /// Newest version of the protocol that is spoken.
    pub(crate) protocol_max: u16,
    /// Most time for which a client's next message is waited for without sleep.
    pub(crate) spin: Duration,
    /// What pages move with by RDMA, if there are devices.
    pub(crate) rdma: Option<Rdma>,
    /// To move page bytes.
    pub(crate) turns: Turns,
    started: Instant,
}

impl Shared {
    /// State for people and scripts.
    pub(crate) fn status(&self) -> serde_json::Value {
        let mut status = self.store.status();
        status["node_id"] = self.identity.node_id.clone().into();
        status["epoch"] = self.identity.epoch.into();
        status["uptime_seconds"] = now().saturating_duration_since(self.started).as_secs().into();
        if let Some(rdma) = &self.rdma {
            status["rdma"] = rdma::status(&rdma.fabric);
        }
        status["members"] = self.members.list(now()).len().into();
        status
    }

    /// Gauges are up to date only after this.
    pub(crate) fn refresh_metrics(&self) {
        self.store.refresh_metrics();
        let stats: Vec<NicStats> =
            self.rdma.iter().flat_map(|rdma| rdma.fabric.nics()).map(|nic| nic.stats()).collect();
        let sum = |of: fn(&NicStats) -> u64| i64::try_from(stats.iter().map(of).sum::<u64>()).unwrap_or(i64::MAX);
        self.metrics.rdma_lines.set(sum(|stats| stats.endpoints));
        self.metrics.rdma_windows.set(sum(|stats| stats.windows));
    }
}

/// A running node.
pub struct Node {
    shared: Arc<Shared>,
    addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    stop: CancellationToken,
    tasks: TaskTracker,
    drain: Duration,
}

impl Node {
    /// Opens the tiers, recovers L3, and listens. Must be called inside a tokio runtime.
    pub async fn start(options: NodeOptions) -> Result<Node, NodeError> {
        options.validate().map_err(NodeError::Options)?;
        let mut chance = options.seed.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64);
        // All tiers go by one clock, which is read once: what one of them holds to be over is over on the others.
        let clock = Clock::system();
        let identity = identity(&options, clock.now_unix_ms() / 1000, &mut chance)?;
        let (arena_bytes, sharing) = (options.arena_bytes(), options.sharing());
        let arena = tokio::task::spawn_blocking(move || Arena::with(arena_bytes as usize, sharing))
            .await
            .map_err(std::io::Error::other)
            .and_then(|arena| arena)
            .map_err(|source| NodeError::Memory { bytes: arena_bytes, source })?;
        let local = open_door(&arena, &options, &identity, &mut chance);
        let rdma = rdma::open(&options.rdma, &arena).await;
        let devices = Devices::open(&options, clock, &arena).await?;
        let store = Store::new(&options, arena, devices, clock, identity.generation_first());
        let metrics = store.metrics().clone();
        let shared = Arc::new(Shared {
            store,
            members: Members::default(),
            registry: metrics.registry(),
            metrics,
            door: local.as_ref().map(|(name, ..)| name.clone()),
            protocol_max: options.protocol_max,
            spin: options.spin,
            rdma,
            turns: Turns::new(),
            started: now(),
            identity,
        });
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let (listener, addr) = listen(options.listen).await?;
        let admin_addr = match options.admin_listen {
            Some(address) => Some(serve_admin(&shared, address, &stop, &tasks).await?),
            None => None,
        };
        tasks.spawn(upkeep(shared.clone(), stop.clone()));
        let permits = Arc::new(Semaphore::new(options.connections_max));
        let host = Host { shared: shared.clone(), permits, stop: stop.clone(), tasks: tasks.clone() };
        if let Some((_, door, memory)) = local {
            tasks.spawn(accept_local(host.clone(), door, memory));
        }
        tasks.spawn(accept(host, listener));
        tracing::info!(node = %shared.identity.node_id, epoch = shared.identity.epoch, %addr, "store node ready");
        Ok(Node { shared, addr, admin_addr, stop, tasks, drain: options.drain })
    }

    /// Address of the data port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Address of the admin port, if there is one.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    /// The node's name.
    pub fn node_id(&self) -> &str {
        &self.shared.identity.node_id
    }

    /// State for people and scripts.
    pub fn status(&self) -> serde_json::Value {
        self.shared.status()
    }

    /// Stops: no new connections, the present ones end, what is on its way to L3 gets there, if [`NodeOptions::drain`] is
    /// enough. Bounded in time.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!("stopped with connections still open");
        }
        self.shared.store.close(now() + self.drain).await;
        tracing::info!(node = %self.shared.identity.node_id, "store node stopped");
    }
}

/// A node without sockets: a store, and what serves it on any streams. For simulations.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

impl Server {
    /// Serves `store` under this name, by versions of the protocol up to `protocol_max`. Processes of its machine hear of
    /// `door`; others may reach it by `rdma`.
    pub fn new(
        store: Store,
        (node_id, epoch): (String, u64),
        door: Option<LocalDoor>,
        rdma: Option<Rdma>,
        protocol_max: u16,
    ) -> Server {
        let metrics = store.metrics().clone();
        let shared = Shared {
            store,
            members: Members::default(),
            registry: metrics.registry(),
            metrics,
            door,
            protocol_max,
            spin: Duration::ZERO,
            rdma,
            turns: Turns::new(),
            started: now(),
            identity: Identity { node_id, epoch },
        };
        Server { shared: Arc::new(shared) }
    }

    /// What it serves.
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// State for people and scripts.
    pub fn status(&self) -> serde_json::Value {
        self.shared.status()
    }

    /// Serves a client until it leaves or misbehaves.
    pub fn serve(&self, read: impl Source, write: impl Sink) -> BoxFuture<'static, ()> {
        Box::pin(connection::serve(self.shared.clone(), "a client".into(), read, write))
    }

    /// Serves a client that reads pages in place until `over`, and puts what is in the memory that it lends.
    pub fn serve_in_place(
        &self,
        read: impl Source,
        write: impl Sink,
        lent: Option<Arc<dyn Lender>>,
        over: impl Future<Output = ()> + Send + 'static,
    ) -> BoxFuture<'static, ()> {
        let (shared, peer) = (self.shared.clone(), "a client in place".into());
        Box::pin(connection::serve_in_place(shared, peer, (read, write), lent, over))
    }
}

async fn upkeep(shared: Arc<Shared>, stop: CancellationToken) {
    shared.store.upkeep(stop).await;
}

/// Kept in the data directory; without one, beside the first log of L3 that can be written. A node without either forgets
/// everything when it stops, its name as well.
fn identity(options: &NodeOptions, unix_seconds: u64, chance: &mut StdRng) -> Result<Identity, NodeError> {
    let mut next = |dir: &Path| {
        let made = std::fs::create_dir_all(dir).and_then(|()| Identity::next(dir, unix_seconds, chance));
        made.map_err(|source| NodeError::Directory { directory: dir.display().to_string(), source })
    };
    if let Some(dir) = &options.data_dir {
        return next(dir);
    }
    let mut dirs: Vec<&Path> = options.l3.iter().map(|device| device.dir.as_path()).collect();
    // Devices may be given in another order than before.
    dirs.sort_by_key(|dir| !Identity::is_kept(dir));
    for dir in dirs {
        match next(dir) {
            Ok(identity) => return Ok(identity),
            Err(error) => tracing::warn!(%error, "the node's identity is not kept here"),
        }
    }
    Ok(Identity::transient(unix_seconds, chance))
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), NodeError> {
    let failed = |source| NodeError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let addr = listener.local_addr().map_err(failed)?;
    Ok((listener, addr))
}

async fn serve_admin(
    shared: &Arc<Shared>,
    address: SocketAddr,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<SocketAddr, NodeError> {
    let (listener, addr) = listen(address).await?;
    let server = axum::serve(listener, admin::routes(shared.clone()));
    let stopped = stop.clone().cancelled_owned();
    tasks.spawn(async move {
        if let Err(error) = server.with_graceful_shutdown(stopped).await {
            tracing::error!(%error, "admin server ended");
        }
    });
    Ok(addr)
}

/// Opens the way to the arena for processes of this machine, if it can be shared.
fn open_door(
    arena: &Arena,
    options: &NodeOptions,
    identity: &Identity,
    chance: &mut StdRng,
) -> Option<(LocalDoor, Door, Arc<LocalMemory>)> {
    let shared = arena.file()?;
    let mut open = || {
        let machine = larder_share::machine().ok_or(std::io::ErrorKind::NotFound)?;
        let name = format!("larder-{}-{:016x}", identity.node_id, chance.random::<u64>());
        let memory = LocalMemory {
            file: larder_share::read_only(shared)?,
            bytes: arena.capacity() as u64,
            tenures: Arc::new(Semaphore::new(options.connections_max)),
        };
        let door = Door::open(&name)?;
        std::io::Result::Ok((LocalDoor { machine, name }, door, Arc::new(memory)))
    };
    open().inspect_err(|error| tracing::warn!(%error, "memory is not shared with processes of this machine")).ok()
}

/// What serves connections.
#[derive(Clone)]
struct Host {
    shared: Arc<Shared>,
    permits: Arc<Semaphore>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Host {
    /// The next connection; `Some(None)` if there was none after all, `None` when the node stops.
    async fn next<T>(&self, accept: impl Future<Output = std::io::Result<T>> + Send) -> Option<Option<T>> {
        let accepted = tokio::select! {
            biased;
            () = self.stop.cancelled() => return None,
            accepted = accept => accepted,
        };
        if let Err(error) = &accepted {
            // Out of file descriptors, most likely: wait for some to come back.
            tracing::warn!(%error, "accept");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Some(accepted.ok())
    }

    /// Serves a connection unless there are too many.
    fn serve(&self, serve: impl Future<Output = ()> + Send + 'static) {
        let metrics = self.shared.metrics.clone();
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            metrics.connections_rejected.inc();
            return;
        };
        metrics.connections_accepted.inc();
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            metrics.connections.inc();
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = serve => {}
            }
            metrics.connections.dec();
            drop(permit);
        });
    }
}

async fn accept(host: Host, listener: TcpListener) {
    while let Some(accepted) = host.next(listener.accept()).await {
        if let Some((stream, _)) = accepted {
            host.serve(connection::serve_tcp(host.shared.clone(), stream));
        }
    }
}

async fn accept_local(host: Host, door: Door, memory: Arc<LocalMemory>) {
    while let Some(accepted) = host.next(door.accept()).await {
        if let Some(stream) = accepted {
            host.serve(connection::serve_local(host.shared.clone(), stream, memory.clone()));
        }
    }
}
