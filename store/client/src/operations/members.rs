//! Membership: engines register with the nodes, and routers list them.

use crate::client::Client;
use crate::connection::NodeHandle;
use larder_runtime::now;
use larder_wire::{MAX_INFO_BYTES, MAX_NAME_BYTES, Request, Response};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// A process that has registered with the nodes, usually an engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Unique name, e.g. `prefill-1f3a`. At most 256 bytes.
    pub name: String,
    /// Self-description as JSON. At most 16 KiB when serialised.
    pub info: serde_json::Value,
}

/// Time after its last renewal when a node drops a member.
pub const MEMBER_TTL: Duration = Duration::from_secs(3);
/// Interval of renewals. Three may be lost before a member lapses.
const RENEW_EVERY: Duration = Duration::from_millis(800);

/// Keeps a member registered, and the client attached. Dropping it withdraws the member from all
/// connected nodes.
pub struct Registration {
    stop: CancellationToken,
    /// The connections end with the last clone of a client.
    _client: Client,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Client {
    /// Keeps `member` registered with every node until the result is dropped. The client renews the
    /// registration every 800 ms, and at once when a node reconnects. A member that is not renewed
    /// for 3 s disappears.
    ///
    /// A name or description above its limit is logged as an error, and never registered.
    ///
    /// # Panics
    /// If it is called outside a tokio runtime.
    pub fn register(&self, member: Member) -> Registration {
        let stop = CancellationToken::new();
        let info = member.info.to_string();
        if member.name.len() > MAX_NAME_BYTES || info.len() > MAX_INFO_BYTES {
            // A node would close the connection, and every reconnection would repeat that.
            tracing::error!(
                name = %member.name,
                bytes = info.len(),
                bytes_max = MAX_INFO_BYTES,
                "member not registered: its name or description is too long; shorten it"
            );
            return Registration { stop, _client: self.clone() };
        }
        for node in self.nodes() {
            tokio::spawn(keep_registered(node.clone(), member.name.clone(), info.clone(), stop.clone()));
        }
        Registration { stop, _client: self.clone() }
    }

    /// Members that the nodes know, merged by name and sorted. `None` if no node answers before
    /// `deadline`.
    pub async fn members(&self, deadline: Instant) -> Option<Vec<Member>> {
        let mut merged: Option<BTreeMap<String, Member>> = None;
        for answer in self.request_all(&Request::Members, deadline).await {
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
}

async fn keep_registered(node: Arc<NodeHandle>, name: String, info: String, stop: CancellationToken) {
    let message = Request::Register { name: name.clone(), ttl_ms: MEMBER_TTL.as_millis() as u32, info };
    loop {
        let pool = node.pool();
        let renew = async {
            if let Some(pool) = &pool {
                // Waits for room in a full queue: a busy connection must not let the member lapse.
                pool.primary().send(&message, now() + MEMBER_TTL).await;
            }
        };
        // Stops also while the queue is full.
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = renew => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep(RENEW_EVERY) => {}
            is_running = node.changed(pool.as_ref()) => if !is_running { break },
        }
    }
    if let Some(pool) = node.pool() {
        pool.primary().send_detached(&Request::Withdraw(name));
    }
}
