//! Supervision of one node of the URL: connects, and reconnects with backoff.
//!
//! Invariant: a pool is published only while its primary connection runs. When that ends, all
//! requests end, and operations count the node as absent.

use super::connector::Connector;
use super::driver;
use super::handshake::{self, Handshake};
use super::multiplex::{Connection, SharedMappings};
use super::options::ConnectionOptions;
use super::pool::{self, ConnectionPool};
use super::rdma_setup;
use larder_runtime::OrderedWatch;
use larder_runtime::lock::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Pause before the next attempt. It doubles after each failure.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

pub(crate) struct NodeHandle {
    address: String,
    state: Arc<OrderedWatch<NodeState>>,
    notes: Arc<Mutex<Notes>>,
}

/// Reasons for the state of a connection, for operators.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notes {
    /// Reason of the latest failure to connect, or of the end of the latest connection.
    pub(crate) problem: Option<String>,
    /// Reason for which the latest connection has no shared memory.
    pub(crate) no_shared_memory: Option<String>,
    /// Reason for which the latest connection had no RDMA channel when one was last tried.
    pub(crate) no_rdma: Option<String>,
}

#[derive(Clone, Default)]
enum NodeState {
    #[default]
    Disconnected,
    Connected(Arc<ConnectionPool>),
    /// The client is gone. There will be no further connection.
    Stopped,
}

impl NodeHandle {
    /// Starts to supervise the node at `options.address`, until `stop` is cancelled.
    pub(crate) fn start(
        options: ConnectionOptions,
        connector: Arc<impl Connector>,
        stop: CancellationToken,
    ) -> NodeHandle {
        let state = Arc::<OrderedWatch<NodeState>>::default();
        let notes = Arc::<Mutex<Notes>>::default();
        let handle = NodeHandle { address: options.address.clone(), state: state.clone(), notes: notes.clone() };
        tokio::spawn(async move {
            // Cancelling drops the future at its next await, which closes the connection.
            stop.run_until_cancelled(supervise(options, &connector, &state, &notes)).await;
            state.update(|state| *state = NodeState::Stopped);
        });
        handle
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn notes(&self) -> Notes {
        self.notes.lock().clone()
    }

    pub(crate) fn pool(&self) -> Option<Arc<ConnectionPool>> {
        self.state.with(|state| match state {
            NodeState::Connected(pool) => Some(pool.clone()),
            NodeState::Disconnected | NodeState::Stopped => None,
        })
    }

    /// Waits until the node is connected. Returns `false` if the supervisor has stopped.
    pub(crate) async fn connected(&self) -> bool {
        let condition = |state: &NodeState| match state {
            NodeState::Disconnected => None,
            NodeState::Connected(_) => Some(true),
            NodeState::Stopped => Some(false),
        };
        self.state.wait_for(condition).await
    }

    /// Waits until the pool is another one than `seen`. Returns `false` if the supervisor has
    /// stopped.
    pub(crate) async fn changed(&self, seen: Option<&Arc<ConnectionPool>>) -> bool {
        let condition = |state: &NodeState| match (state, seen) {
            (NodeState::Stopped, _) => Some(false),
            (NodeState::Connected(pool), Some(seen)) if Arc::ptr_eq(pool, seen) => None,
            (NodeState::Disconnected, None) => None,
            _ => Some(true),
        };
        self.state.wait_for(condition).await
    }
}

async fn supervise<C: Connector>(
    options: ConnectionOptions,
    connector: &Arc<C>,
    state: &OrderedWatch<NodeState>,
    notes: &Mutex<Notes>,
) {
    let mut backoff = BACKOFF_MIN;
    // One warning per outage, not one per attempt.
    let mut has_warned = false;
    loop {
        let error = match handshake::connect(&**connector, &options).await {
            Ok(handshake) => {
                let (was_published, error) = run(&options, connector, (state, notes), handshake).await;
                if was_published {
                    backoff = BACKOFF_MIN;
                    has_warned = false;
                    tracing::warn!(node = %options.address, %error, "lost the connection to the store node; reconnecting");
                } else {
                    warn_once(&options, &error, &mut has_warned);
                }
                error
            }
            Err(error) => {
                warn_once(&options, &error, &mut has_warned);
                error
            }
        };
        notes.lock().problem = Some(error.to_string());
        tokio::time::sleep(backoff).await;
        // A node that restarts is back within seconds, so the pause stays short.
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Drives a connection until it ends. Returns the reason, and `true` if the node ever counted as
/// connected.
async fn run<C: Connector>(
    options: &ConnectionOptions,
    connector: &Arc<C>,
    (state, notes): (&OrderedWatch<NodeState>, &Mutex<Notes>),
    handshake: Handshake<C>,
) -> (bool, io::Error) {
    let Handshake { node, reader, writer, arena, no_shared_memory } = handshake;
    let no_shared_memory = no_shared_memory.map(|error| error.to_string());
    *notes.lock() = Notes { no_shared_memory, ..Notes::default() };
    let shared = arena.map(|arena| SharedMappings { arena, client_memory: options.memory.clone() });
    let (connection, queue) = Connection::new(node, shared, options.jitter_seed);
    let pool = ConnectionPool::new(connection.clone());
    let published = PublishedPool { state, pool: pool.clone(), is_published: AtomicBool::new(false) };
    // Before the pool is published: the first batch can then already use several connections.
    let further = pool::maintain(options, connector, &pool);
    let rdma = rdma_setup::maintain(&connection, &**connector, options, notes, || published.publish(options));
    let error = driver::run(&connection, reader, writer, queue, rdma).await;
    // Further connections end before the node counts as absent.
    drop(further);
    (published.is_published.load(Ordering::Relaxed), error)
}

fn warn_once(options: &ConnectionOptions, error: &io::Error, has_warned: &mut bool) {
    if !*has_warned {
        tracing::warn!(
            node = %options.address,
            %error,
            "store node is unreachable; its pages are misses until a retry succeeds"
        );
    }
    *has_warned = true;
}

/// Publishes a pool, and withdraws it when dropped. All requests end then.
struct PublishedPool<'a> {
    state: &'a OrderedWatch<NodeState>,
    pool: Arc<ConnectionPool>,
    is_published: AtomicBool,
}

impl PublishedPool<'_> {
    fn publish(&self, options: &ConnectionOptions) {
        let connection = self.pool.primary();
        let node = connection.node();
        tracing::info!(
            node = %options.address,
            node_id = %node.node_id,
            epoch = node.epoch,
            version = node.version,
            transport = %connection.transport(),
            "connected to store node"
        );
        // Relaxed: the same task reads it. The atomic only makes the closure shareable.
        self.is_published.store(true, Ordering::Relaxed);
        self.state.update(|state| *state = NodeState::Connected(self.pool.clone()));
    }
}

impl Drop for PublishedPool<'_> {
    fn drop(&mut self) {
        // First, so that no operation picks a connection whose requests have ended.
        self.state.update(|state| *state = NodeState::Disconnected);
        self.pool.primary().close();
    }
}
