//! The way that pages take to a node, and the reason why no better one is in use.

use super::Findings;
use larder_client::{NodeView, Transport};
use serde_json::Value;

pub(super) fn check(view: &NodeView, required: Transport, is_local: bool, status: &Value, findings: &mut Findings) {
    let Some(used) = view.transport else { return };
    match used {
        Transport::Shm => return findings.ok("transports", "shared memory: pages are read in place"),
        _ if required != Transport::Auto => return by_url(required, is_local, findings),
        _ if is_local => {
            let reason = view.no_shared_memory.as_deref().unwrap_or("unknown reason");
            let fact = format!("{used}, though the node is on this machine. No shared memory: {reason}");
            return findings.warn("transports", fact, shared_memory_remedy(status));
        }
        Transport::Rdma => return findings.ok("transports", "RDMA; shared memory needs the node's machine"),
        _ => {}
    }
    let here = view.no_rdma.as_deref().unwrap_or("unknown reason");
    let devices = status["rdma"].as_array().map_or(0, Vec::len);
    let fact = format!("TCP. No shared memory: the node is on another machine. No RDMA: {here}");
    match devices {
        0 => findings.ok("transports", format!("{fact}; the node has no device either")),
        count => findings.warn(
            "transports",
            format!("{fact}; the node has {count} devices"),
            "check `ibv_devinfo` here, cables and subnets between the devices, and docs/internals/rdma.md",
        ),
    }
}

fn by_url(required: Transport, is_local: bool, findings: &mut Findings) {
    let fact = format!("{required}, because the URL demands it");
    match is_local {
        true => {
            findings.warn("transports", fact, "remove `transport=`: the node is on this machine, and may share memory")
        }
        false => findings.ok("transports", fact),
    }
}

fn shared_memory_remedy(status: &Value) -> &'static str {
    match status["tiers"]["l2"]["shared"] == true {
        true => "run the engine as the node's user, in the same network namespace and container",
        false => {
            "start the node with `--share-memory always`, or write `advise` to \
                  /sys/kernel/mm/transparent_hugepage/shmem_enabled and restart it"
        }
    }
}
