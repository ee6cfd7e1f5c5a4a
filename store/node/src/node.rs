//! Start, accept, stop.

use crate::clock::{Clock, now};
use crate::devices::Devices;
use crate::identity::Identity;
use crate::members::Members;
use crate::metrics::Metrics;
use crate::options::NodeOptions;
use crate::store::Store;
use crate::{admin, connection};
use larder_device::Arena;
use prometheus_client::registry::Registry;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Most time a stopping node waits for its clients' tasks, and again for pages on their way to L3.
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
    started: Instant,
}

impl Shared {
    /// State for people and scripts.
    pub(crate) fn status(&self) -> serde_json::Value {
        let mut status = self.store.status();
        status["node_id"] = self.identity.node_id.clone().into();
        status["epoch"] = self.identity.epoch.into();
        status["uptime_seconds"] = now().saturating_duration_since(self.started).as_secs().into();
        status["members"] = self.members.list(now()).len().into();
        status
    }
}

/// A running node.
pub struct Node {
    shared: Arc<Shared>,
    addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Node {
    /// Opens the tiers, recovers L3, and listens. Must be called inside a tokio runtime.
    pub async fn start(options: NodeOptions) -> Result<Node, NodeError> {
        options.validate().map_err(NodeError::Options)?;
        let mut chance = options.seed.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64);
        // All tiers go by one clock, which is read once: what one of them holds to be over is over on the others.
        let clock = Clock::system();
        let identity = identity(&options, clock.now_unix_ms() / 1000, &mut chance)?;
        let arena_bytes = options.arena_bytes();
        let arena = tokio::task::spawn_blocking(move || Arena::new(arena_bytes as usize))
            .await
            .map_err(std::io::Error::other)
            .and_then(|arena| arena)
            .map_err(|source| NodeError::Memory { bytes: arena_bytes, source })?;
        let devices = Devices::open(&options, clock, &arena).await?;
        let store = Store::new(&options, arena, devices, clock, identity.generation_first());
        let metrics = store.metrics().clone();
        let shared = Arc::new(Shared {
            store,
            members: Members::default(),
            registry: metrics.registry(),
            metrics,
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
        tasks.spawn(accept(shared.clone(), listener, options.connections_max, stop.clone(), tasks.clone()));
        tracing::info!(node = %shared.identity.node_id, epoch = shared.identity.epoch, %addr, "store node ready");
        Ok(Node { shared, addr, admin_addr, stop, tasks })
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

    /// Stops: no new connections, the present ones end, what is on its way to L3 gets there. Bounded in time.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!("stopped with connections still open");
        }
        self.shared.store.close(now() + STOP_TIMEOUT).await;
        tracing::info!(node = %self.shared.identity.node_id, "store node stopped");
    }
}

async fn upkeep(shared: Arc<Shared>, stop: CancellationToken) {
    shared.store.upkeep(stop).await;
}

fn identity(options: &NodeOptions, unix_seconds: u64, chance: &mut StdRng) -> Result<Identity, NodeError> {
    let Some(dir) = &options.data_dir else { return Ok(Identity::transient(unix_seconds, chance)) };
    let failed = |source| NodeError::Directory { directory: dir.display().to_string(), source };
    std::fs::create_dir_all(dir).map_err(failed)?;
    Identity::next(dir, unix_seconds, chance).map_err(failed)
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

async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    connections_max: usize,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let permits = Arc::new(tokio::sync::Semaphore::new(connections_max));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely: wait for some to come back.
                tracing::warn!(%error, "accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            shared.metrics.connections_rejected.inc();
            continue;
        };
        shared.metrics.connections_accepted.inc();
        let (shared, stop) = (shared.clone(), stop.clone());
        tasks.spawn(async move {
            shared.metrics.connections.inc();
            tokio::select! {
                () = stop.cancelled() => {}
                () = connection::serve(shared.clone(), stream) => {}
            }
            shared.metrics.connections.dec();
            drop(permit);
        });
    }
}
