//! Start, accept, stop.

use crate::identity::Identity;
use crate::members::Members;
use crate::metrics::Metrics;
use crate::options::NodeOptions;
use crate::puts::Puts;
use crate::tiers::Tiers;
use crate::{admin, connection};
use larder_device::Arena;
use larder_l3::{L3, L3Options, RecoveryReport};
use prometheus_client::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Most time a stopping node waits for its clients' tasks, and again for pages on their way to L3.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// An open put that nothing is received for is given up after this time.
const PUT_IDLE_MAX: Duration = Duration::from_secs(60);

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
    pub(crate) tiers: Arc<Tiers>,
    pub(crate) puts: Puts,
    pub(crate) members: Members,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) registry: Registry,
    started: Instant,
    recovery: Option<RecoveryReport>,
}

impl Shared {
    /// State for people and scripts.
    pub(crate) fn status(&self) -> serde_json::Value {
        let (open, waiting) = self.puts.counts();
        serde_json::json!({
            "node_id": self.identity.node_id,
            "epoch": self.identity.epoch,
            "uptime_seconds": self.started.elapsed().as_secs(),
            "tiers": self.tiers.status(),
            "puts_open": open,
            "readers_waiting": waiting,
            "members": self.members.list(Instant::now()).len(),
            "recovery": self.recovery,
            "counters": self.metrics.json(),
        })
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
        let identity = identity(&options)?;
        let arena_bytes = options.arena_bytes();
        let arena = tokio::task::spawn_blocking(move || Arena::new(arena_bytes as usize))
            .await
            .map_err(std::io::Error::other)
            .and_then(|arena| arena)
            .map_err(|source| NodeError::Memory { bytes: arena_bytes, source })?;
        let (l3, recovery) = open_l3(&options, &arena).await?;
        let metrics = Arc::new(Metrics::default());
        let tiers = Tiers::new(&options, arena, l3, metrics.clone());
        // The epoch alone would do, but for a data directory whose identity was removed and whose L3 was not.
        let generation_first = recovery.as_ref().map_or(0, |r| r.generation_max + 1).max(identity.epoch << 32);
        let shared = Arc::new(Shared {
            puts: Puts::new(tiers.clone(), metrics.clone(), generation_first),
            tiers,
            members: Members::default(),
            registry: metrics.registry(),
            metrics,
            started: Instant::now(),
            recovery,
            identity,
        });
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let (listener, addr) = listen(options.listen).await?;
        let admin_addr = match options.admin_listen {
            Some(address) => Some(serve_admin(&shared, address, &stop, &tasks).await?),
            None => None,
        };
        tasks.spawn(sweep(shared.clone(), stop.clone()));
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
        self.shared.tiers.drain(Instant::now() + STOP_TIMEOUT).await;
        if let Some(l3) = self.shared.tiers.l3() {
            l3.close().await;
        }
        tracing::info!(node = %self.shared.identity.node_id, "store node stopped");
    }
}

/// Gives up puts whose writers are gone without a word.
async fn sweep(shared: Arc<Shared>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(Duration::from_secs(1)) => shared.puts.abort_idle(Instant::now(), PUT_IDLE_MAX),
        }
    }
}

fn identity(options: &NodeOptions) -> Result<Identity, NodeError> {
    let Some(dir) = &options.data_dir else { return Ok(Identity::transient()) };
    let failed = |source| NodeError::Directory { directory: dir.display().to_string(), source };
    std::fs::create_dir_all(dir).map_err(failed)?;
    Identity::next(dir).map_err(failed)
}

async fn open_l3(options: &NodeOptions, arena: &Arc<Arena>) -> Result<(Option<L3>, Option<RecoveryReport>), NodeError> {
    let (Some(dir), true) = (&options.data_dir, options.l3_bytes > 0) else { return Ok((None, None)) };
    let (l3, report) = L3::open(L3Options::new(dir.join("l3"), options.l3_bytes), arena.clone()).await?;
    tracing::info!(?report, "L3 recovered");
    Ok((Some(l3), Some(report)))
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
