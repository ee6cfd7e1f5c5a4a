//! Connections to one connected node.
//!
//! One byte stream occupies one processor at a time, and a large payload delays the frames behind
//! it. So pages that travel over TCP use several connections.
//!
//! Invariants:
//! - All connections of a pool lead to the same node and the same epoch.
//! - Further connections end with the primary one.

use super::connector::Connector;
use super::driver;
use super::handshake::{self, Handshake};
use super::multiplex::Connection;
use super::options::ConnectionOptions;
use crate::url::Transport;
use larder_runtime::fail_point;
use larder_runtime::lock::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Bytes of a batch that justify one more connection. A smaller share gains less than the further
/// requests cost.
const BYTES_PER_CONNECTION: usize = 2 << 20;
/// Pause after a further connection was lost or refused. It doubles each time, because the node may
/// have reached its limit of connections.
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The primary connection to a node, and further ones.
pub(crate) struct ConnectionPool {
    primary: Arc<Connection>,
    further: Mutex<Vec<Arc<Connection>>>,
}

impl ConnectionPool {
    pub(super) fn new(primary: Arc<Connection>) -> Arc<ConnectionPool> {
        Arc::new(ConnectionPool { primary, further: Mutex::default() })
    }

    /// The connection that was made first. It carries all that is small or shared, and all RDMA.
    pub(crate) fn primary(&self) -> &Arc<Connection> {
        &self.primary
    }

    pub(crate) fn outstanding(&self) -> usize {
        let further: usize = self.further.lock().iter().map(|connection| connection.outstanding()).sum();
        self.primary.outstanding() + further
    }

    pub(crate) fn all(&self) -> Vec<Arc<Connection>> {
        let mut all = vec![self.primary.clone()];
        // Cloned, so that no lock is held while a caller waits on a connection.
        all.extend(self.further.lock().iter().cloned());
        all
    }

    pub(crate) fn least_loaded(&self) -> Arc<Connection> {
        // RDMA channels belong to the primary connection.
        if !self.primary.carries_payload() {
            return self.primary.clone();
        }
        self.all().into_iter().min_by_key(|connection| connection.load()).unwrap_or_else(|| self.primary.clone())
    }

    /// Connections for a batch of `bytes` bytes, those with the least load first. Never empty.
    pub(crate) fn for_bytes(&self, bytes: usize) -> Vec<Arc<Connection>> {
        let count = (bytes / BYTES_PER_CONNECTION).max(1);
        if count == 1 || !self.primary.carries_payload() {
            return vec![self.least_loaded()];
        }
        let mut connections = self.all();
        // The load changes while this sorts, so each is read once.
        connections.sort_by_cached_key(|connection| connection.load());
        connections.truncate(count);
        connections
    }

    fn add(&self, connection: Arc<Connection>) -> PooledConnection<'_> {
        self.further.lock().push(connection.clone());
        PooledConnection { pool: self, connection }
    }
}

/// Maintains the further connections of a pool until the result is dropped. There are none if
/// pages do not travel over TCP.
pub(super) fn maintain<C: Connector>(
    options: &ConnectionOptions,
    connector: &Arc<C>,
    pool: &Arc<ConnectionPool>,
) -> JoinSet<()> {
    let uses_tcp = pool.primary.carries_payload() && options.transport != Transport::Rdma;
    // The URL asks for at least one connection, but options can also be made by hand.
    let further = if uses_tcp { options.connections.max(1) - 1 } else { 0 };
    // One task each, so that each can use a processor of its own.
    let tasks = (0..further).map(|_| maintain_one(options.clone(), connector.clone(), pool.clone()));
    tasks.collect()
}

async fn maintain_one<C: Connector>(options: ConnectionOptions, connector: Arc<C>, pool: Arc<ConnectionPool>) {
    let mut retry = RETRY_MIN;
    loop {
        match handshake::connect_again(&*connector, &options, pool.primary.node()).await {
            Ok(Handshake { node, reader, writer, .. }) => {
                // No arena: pages of a pooled connection always travel as payload.
                let (connection, queue) = Connection::new(node, None, pool.primary.jitter_seed());
                retry = RETRY_MIN;
                let pooled = pool.add(connection.clone());
                let error = driver::run(&connection, reader, writer, queue, std::future::pending()).await;
                drop(pooled);
                tracing::debug!(node = %options.address, %error, "lost a further connection to the node; retrying");
            }
            Err(error) => {
                tracing::debug!(node = %options.address, %error, "no further connection to the node; retrying");
            }
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(RETRY_MAX);
    }
}

/// A connection that operations may pick. Dropping it removes the connection from the pool, and
/// ends its requests.
struct PooledConnection<'a> {
    pool: &'a ConnectionPool,
    connection: Arc<Connection>,
}

impl Drop for PooledConnection<'_> {
    fn drop(&mut self) {
        // Removed before it closes, so that no operation picks a connection that has ended.
        if !fail_point!("client.pool-keeps-ended-connection") {
            self.pool.further.lock().retain(|connection| !Arc::ptr_eq(connection, &self.connection));
        }
        self.connection.close();
    }
}

#[cfg(test)]
mod tests {
    use super::super::handlers::ResponseHandler;
    use super::super::multiplex::NodeIdentity;
    use super::*;
    use larder_wire::{FrameQueue, PROTOCOL_VERSION, Request};
    use std::time::Instant;

    fn connection() -> (Arc<Connection>, FrameQueue) {
        let node = NodeIdentity { node_id: "node".into(), epoch: 1, version: PROTOCOL_VERSION };
        Connection::new(node, None, 0)
    }

    #[tokio::test]
    async fn large_batches_use_several_connections_least_loaded_first() {
        let (primary, queue) = connection();
        let pool = ConnectionPool::new(primary.clone());
        let second = connection().0;
        let third = connection().0;
        let same = |a: &Arc<Connection>, b: &Arc<Connection>| Arc::ptr_eq(a, b);
        assert!(same(&pool.least_loaded(), &primary) && pool.for_bytes(100 * BYTES_PER_CONNECTION).len() == 1);
        let pooled = [pool.add(second.clone()), pool.add(third.clone())];
        let soon = Instant::now() + Duration::from_secs(5);
        let (sender, _answer) = tokio::sync::oneshot::channel();
        let outstanding = primary.begin(1, &Request::Members, ResponseHandler::Reply(sender), soon).await;
        assert!(outstanding.is_some() && same(&pool.least_loaded(), &second));
        assert_eq!(pool.for_bytes(BYTES_PER_CONNECTION).len(), 1);
        let two = pool.for_bytes(2 * BYTES_PER_CONNECTION);
        assert!(two.len() == 2 && same(&two[0], &second) && same(&two[1], &third));
        assert_eq!(pool.for_bytes(100 * BYTES_PER_CONNECTION).len(), 3);
        drop(pooled);
        assert!(same(&pool.least_loaded(), &primary), "connections that ended are not used");
        drop((outstanding, queue));
    }
}
