//! Settings of a node. The comments are the manual.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Everything a node needs to know at start.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Address of the data port; port 0 takes a free one. Default `127.0.0.1:7700`.
    pub listen: SocketAddr,
    /// Address of `/healthz`, `/metrics` and `/status`; none by default.
    pub admin_listen: Option<SocketAddr>,
    /// Directory of identity and L3. Without one the node has no L3 and forgets everything when it stops.
    pub data_dir: Option<PathBuf>,
    /// Bytes of pages kept in DRAM. Default 1 GiB, at least 32 MiB. The arena is an eighth larger (at least 64 MiB more), for pages
    /// on their way in and out.
    pub l2_bytes: u64,
    /// Most bytes of L3 on disk. Default 4 GiB; 0 means no L3.
    pub l3_bytes: u64,
    /// Most connections. Default 1024.
    pub connections_max: usize,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7700)),
            admin_listen: None,
            data_dir: None,
            l2_bytes: 1 << 30,
            l3_bytes: 4 << 30,
            connections_max: 1024,
        }
    }
}

/// Smallest L2.
pub const L2_BYTES_MIN: u64 = 32 << 20;

impl NodeOptions {
    /// Checks what can be checked before anything is opened.
    pub fn validate(&self) -> Result<(), String> {
        if self.l2_bytes < L2_BYTES_MIN {
            return Err(format!("L2 of {} bytes is too small, the minimum is {L2_BYTES_MIN}", self.l2_bytes));
        }
        if self.connections_max == 0 {
            return Err("a node needs at least one connection".into());
        }
        Ok(())
    }

    /// Bytes of the arena: L2 and room for pages on their way.
    pub fn arena_bytes(&self) -> u64 {
        self.l2_bytes + self.in_flight_bytes()
    }

    /// Room for pages on their way in and out, in bytes.
    pub fn in_flight_bytes(&self) -> u64 {
        (self.l2_bytes / 8).max(64 << 20)
    }
}
