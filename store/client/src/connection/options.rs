//! Settings of the connections to one node.

use crate::url::Transport;
use larder_format::NamespaceDescriptor;
use larder_memory::share::SharedMemory;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone)]
pub(crate) struct ConnectionOptions {
    pub(crate) address: String,
    pub(crate) name: String,
    pub(crate) namespace: Option<NamespaceDescriptor>,
    /// Limit for each step of connecting: the TCP connect and each handshake.
    pub(crate) connect_timeout: Duration,
    pub(crate) transport: Transport,
    pub(crate) connections: usize,
    /// Memory of this client that is shared with nodes on this machine and registered with RDMA
    /// devices.
    pub(crate) memory: Option<Arc<SharedMemory>>,
    /// Newest protocol version that the client offers.
    pub(crate) protocol_max: u16,
    /// Source of the jitter of retries.
    pub(crate) jitter_seed: u64,
}
