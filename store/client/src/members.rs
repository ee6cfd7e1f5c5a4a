//! Registering with the nodes: who serves here, and where.

use crate::clock::now;
use crate::link::Link;
use larder_wire::{MAX_INFO_BYTES, MAX_NAME_BYTES, Request};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A process that registered with the nodes: an engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Unique name, e.g. `prefill-1f3a`.
    pub name: String,
    /// What it says of itself, JSON.
    pub info: serde_json::Value,
}

/// A member that is not renewed for this long is forgotten.
const TTL: Duration = Duration::from_secs(3);
/// It is renewed this often, and at once when a node comes back.
const RENEW_EVERY: Duration = Duration::from_millis(800);

/// Keeps a registration alive; dropping it withdraws the member.
pub struct Registration {
    stop: CancellationToken,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Keeps `member` registered with every node of `links`.
pub(crate) fn register(links: &[Arc<Link>], member: &Member) -> Registration {
    let stop = CancellationToken::new();
    let info = member.info.to_string();
    if member.name.len() > MAX_NAME_BYTES || info.len() > MAX_INFO_BYTES {
        // Nodes would close the connection over it.
        tracing::error!(name = %member.name, bytes = info.len(), "too large to register: name or description");
        return Registration { stop };
    }
    for link in links {
        tokio::spawn(keep(link.clone(), member.name.clone(), info.clone(), stop.clone()));
    }
    Registration { stop }
}

async fn keep(link: Arc<Link>, name: String, info: String, stop: CancellationToken) {
    let message = Request::Register { name: name.clone(), ttl_ms: TTL.as_millis() as u32, info };
    loop {
        let live = link.live();
        let renew = async {
            if let Some(live) = &live {
                // Behind whatever is queued: a busy link is no reason to lapse.
                live.send(&message, now() + TTL).await;
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = renew => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep(RENEW_EVERY) => {}
            more = link.changed(live.as_ref()) => if !more { break },
        }
    }
    if let Some(live) = link.live() {
        live.tell_surely(&Request::Withdraw(name));
    }
}
