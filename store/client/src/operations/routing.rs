//! Routing of keys to nodes and connections, and requests to many nodes at once.

use super::durations::retry_delay;
use crate::client::Client;
use crate::connection::{Connection, ConnectionPool};
use crate::placement;
use futures::future::join_all;
use larder_format::PageKey;
use larder_runtime::now;
use larder_wire::{MAX_KEYS, Request, Response};
use std::sync::Arc;
use std::time::Instant;

/// The nodes that are connected when an operation starts.
pub(super) struct ConnectedNodes {
    pools: Vec<Arc<ConnectionPool>>,
    /// Placement seed of each node.
    seeds: Vec<u64>,
}

impl ConnectedNodes {
    fn owner(&self, key: &PageKey) -> Option<&Arc<ConnectionPool>> {
        placement::owner(key, &self.seeds).map(|index| &self.pools[index])
    }

    /// Yields once if there are no nodes. The operation then ends without waiting for anything, and
    /// a caller that loops over it would starve the tasks that connect.
    pub(super) async fn yield_if_none(&self) {
        if self.pools.is_empty() {
            tokio::task::yield_now().await;
        }
    }

    /// Splits `keys` into batches of at most `batch_max` keys with one owner. Returns the indices
    /// of each batch, and the connection for it. A node gets several connections if `bytes_each`
    /// bytes per key justify them. Keys without an owner are in no batch.
    pub(super) fn batches(
        &self,
        keys: &[PageKey],
        batch_max: usize,
        bytes_each: usize,
    ) -> Vec<(Arc<Connection>, Vec<usize>)> {
        let mut by_node: Vec<Vec<usize>> = vec![Vec::new(); self.pools.len()];
        for (index, key) in keys.iter().enumerate() {
            if let Some(owner) = placement::owner(key, &self.seeds) {
                by_node[owner].push(index);
            }
        }
        let used = self.pools.iter().zip(&by_node).filter(|(_, indices)| !indices.is_empty());
        let batches = used.flat_map(|(pool, indices)| {
            // Each connection gets a share, and large shares are split again at the limit of a
            // request.
            let connections = pool.for_bytes(indices.len() * bytes_each);
            let batch = indices.len().div_ceil(connections.len()).min(batch_max);
            let batches = indices.chunks(batch).map(<[usize]>::to_vec);
            connections.into_iter().cycle().zip(batches).collect::<Vec<_>>()
        });
        batches.collect()
    }
}

impl Client {
    pub(super) fn connected_nodes(&self) -> ConnectedNodes {
        let pools: Vec<Arc<ConnectionPool>> = self.nodes().iter().filter_map(|node| node.pool()).collect();
        let seeds = pools.iter().map(|pool| placement::node_seed(&pool.primary().node().node_id)).collect();
        ConnectedNodes { pools, seeds }
    }

    /// A connection to the owner of `key`, or `None` if no node is connected.
    pub(super) fn owner(&self, key: &PageKey) -> Option<Arc<Connection>> {
        self.connected_nodes().owner(key).map(|pool| pool.least_loaded())
    }

    /// Sends a request to every owner of `keys`, all at once. A busy node gets it again after each
    /// hint, until `deadline`. Returns the response for each batch of indices.
    pub(super) async fn request_owners(
        &self,
        keys: &[PageKey],
        deadline: Instant,
        message: impl Fn(Vec<PageKey>) -> Request,
    ) -> Vec<(Vec<usize>, Option<Response>)> {
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let batches = nodes.batches(keys, MAX_KEYS, 0);
        let requests = batches.into_iter().map(|(connection, indices)| {
            let request = message(indices.iter().map(|&i| keys[i]).collect());
            async move { (indices, request_until(&connection, &request, deadline).await) }
        });
        join_all(requests).await
    }

    /// Sends a request to every node of the URL. An absent node answers `None`.
    pub(super) async fn request_all(&self, request: &Request, deadline: Instant) -> Vec<Option<Response>> {
        self.connected_nodes().yield_if_none().await;
        let requests = self.nodes().iter().map(|node| async move {
            match node.pool() {
                Some(pool) => pool.primary().request(request, deadline).await,
                None => None,
            }
        });
        join_all(requests).await
    }

    /// Sends a request on every connection to every node. Each response comes after all that was
    /// sent before on its connection. So no abandoned put is still on its way then. An absent node
    /// has a single response, `None`.
    pub(super) async fn request_all_connections(
        &self,
        request: &Request,
        deadline: Instant,
    ) -> Vec<Vec<Option<Response>>> {
        self.connected_nodes().yield_if_none().await;
        let nodes = self.nodes().iter().map(|node| async move {
            let connections = match node.pool() {
                Some(pool) => pool.all().into_iter().map(Some).collect(),
                None => vec![None],
            };
            let requests =
                connections.into_iter().map(|connection| async move { connection?.request(request, deadline).await });
            join_all(requests).await
        });
        join_all(nodes).await
    }
}

/// Sends a request until the node is not busy. Returns a busy response only at `deadline`, so that
/// a caller cannot take it for an answer while there is time.
pub(super) async fn request_until(
    connection: &Arc<Connection>,
    request: &Request,
    deadline: Instant,
) -> Option<Response> {
    loop {
        let answer = connection.request(request, deadline).await;
        let Some(Response::Busy { retry_after_ms, .. }) = answer else { return answer };
        let retry_at = now() + connection.jittered(retry_delay(retry_after_ms));
        tokio::time::sleep_until(retry_at.min(deadline).into()).await;
        if retry_at >= deadline {
            return answer;
        }
    }
}
