//! Status of the nodes.

use crate::client::Client;
use crate::url::Transport;
use larder_wire::{Request, Response};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// One node as this client sees it. Other clients may see it differently, because each has its own
/// connections.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeView {
    /// `host:port` as given in the URL.
    pub address: String,
    /// `true` if the node is connected now.
    pub up: bool,
    /// The node's own id, or `None` while it is not connected. Placement depends on the id, not on
    /// the address.
    pub node_id: Option<String>,
    /// The node's epoch, which grows with each of its starts. `None` while it is not connected.
    pub epoch: Option<u64>,
    /// Protocol version of the connection. `None` while the node is not connected.
    pub protocol: Option<u16>,
    /// Reason of the latest failure to connect. `None` while the node is connected, and before the
    /// first failure.
    pub problem: Option<String>,
    /// Transport of pages between the node and this client. `None` while it is not connected.
    pub transport: Option<Transport>,
    /// Reason for which pages do not travel by shared memory, with `transport=auto`.
    pub no_shared_memory: Option<String>,
    /// Reason for which pages do not travel by RDMA, if it was tried.
    pub no_rdma: Option<String>,
    /// The node's own status as JSON: tiers, budgets and counters. `None` if it does not answer in
    /// time.
    pub status: Option<serde_json::Value>,
}

impl Client {
    /// Status of every node of the URL, in its order. A node that is absent, or does not answer
    /// before `deadline`, has an entry without `status`.
    pub async fn status(&self, deadline: Instant) -> Vec<NodeView> {
        let answers = self.request_all(&Request::Status, deadline).await;
        let views = self.nodes().iter().zip(answers).map(|(node, answer)| {
            let pool = node.pool();
            let connection = pool.as_ref().map(|pool| pool.primary());
            let notes = node.notes();
            NodeView {
                address: node.address().to_string(),
                up: connection.is_some(),
                node_id: connection.map(|connection| connection.node().node_id.clone()),
                epoch: connection.map(|connection| connection.node().epoch),
                protocol: connection.map(|connection| connection.version()),
                problem: notes.problem.filter(|_| connection.is_none()),
                no_shared_memory: notes.no_shared_memory,
                no_rdma: notes.no_rdma,
                transport: connection.map(|connection| connection.transport()),
                status: match answer {
                    Some(Response::Status(json)) => serde_json::from_str(&json).ok(),
                    _ => None,
                },
            }
        });
        views.collect()
    }
}
