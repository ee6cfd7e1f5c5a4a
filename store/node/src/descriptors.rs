//! Share of the process's open files that connections may take.
//!
//! The log must always be able to open its next segment, so the node refuses connections that would
//! take the descriptors of its devices.

use crate::connection::REFUSALS_MAX;
use crate::options::NodeOptions;
use crate::places::CLOSING_MAX;
use larder_wire::MAX_EXTENT_FILES;
use rustix::process::{Resource, getrlimit};

/// Descriptors of everything but connections, devices, the admin port and KV events: listeners,
/// refused connections that wait for their answer, connections that are being closed, files for
/// clients that read L3, and the runtime.
const OTHER_DESCRIPTORS: u64 = 64 + 2 * REFUSALS_MAX as u64 + CLOSING_MAX as u64 + MAX_EXTENT_FILES as u64;
/// Descriptors for connections that a node has at least, whatever its devices need. The reserve of
/// each device lets its log go on for a while.
const CONNECTION_DESCRIPTORS_MIN: u64 = 64;
/// Descriptors of a connection over shared memory: its socket, its session and the file of the
/// client's memory.
pub(crate) const LOCAL_DESCRIPTORS: usize = 3;
pub(crate) const TCP_DESCRIPTORS: usize = 1;

/// Returns the descriptors that all connections may take together. Logs a warning if they are
/// fewer than the maximum number of connections.
pub(crate) fn for_connections(options: &NodeOptions) -> usize {
    // `None` stands for no limit.
    let Some(limit) = getrlimit(Resource::Nofile).current else { return usize::MAX >> 3 };
    let devices = options.l3_devices();
    let of_devices: u64 = devices.iter().map(|device| options.log_options(device).descriptors_max()).sum();
    let of_admin_port = options.admin_listen.map_or(0, |_| options.http.connections_max as u64);
    let reserved = of_devices + of_admin_port + options.kv_events_connections().unwrap_or_default() as u64;
    let left = left_for_connections(limit, reserved);
    let wanted = options.connections_max as u64;
    if left < wanted {
        tracing::warn!(
            limit,
            reserved,
            connections = left,
            wanted,
            "the limit of open files allows fewer connections than --max-connections; raise it (LimitNOFILE, ulimit -n) [LRD0107]"
        );
    }
    usize::try_from(left).unwrap_or(usize::MAX)
}

fn left_for_connections(limit: u64, reserved: u64) -> u64 {
    let others = reserved + OTHER_DESCRIPTORS;
    if limit > others { (limit - others).max(CONNECTION_DESCRIPTORS_MIN) } else { CONNECTION_DESCRIPTORS_MIN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_keep_their_descriptors() {
        assert_eq!(left_for_connections(1024, 112), 640);
        assert_eq!(left_for_connections(256, 112), CONNECTION_DESCRIPTORS_MIN);
        assert_eq!(left_for_connections(64, 4096), CONNECTION_DESCRIPTORS_MIN);
    }
}
