//! Settings of a client.

use larder_rdma::FabricOptions;
use larder_wire::PROTOCOL_VERSION;
use std::time::Duration;

/// Settings of a client, for [`Client::attach`](crate::Client::attach).
///
/// ```
/// use larder_client::ClientOptions;
/// use std::time::Duration;
///
/// let options = ClientOptions {
///     name: "prefill-1".into(),
///     connect_timeout: Duration::from_millis(500),
///     ..ClientOptions::default()
/// };
/// assert_eq!(options.memory_bytes, 256 << 20);
/// ```
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Name of this client in the nodes' logs and status. It identifies nothing, so several clients
    /// may share one. Default: `client`.
    pub name: String,
    /// Limit for each step of connecting: the TCP connect and each handshake. Default: 1 s.
    pub connect_timeout: Duration,
    /// Payload bytes of streaming puts that may wait in this client. A part beyond the limit aborts
    /// its put, which then ends as [`PutOutcome::Lost`](crate::PutOutcome::Lost). Default: 256 MiB.
    pub put_queue_bytes_max: usize,
    /// Bytes of shared memory for [`Client::buffer`](crate::Client::buffer); 0 for none. The memory
    /// is address space until it is used, except with RDMA, which pins it. Clients without a
    /// namespace use at most 64 KiB. Default: 256 MiB.
    pub memory_bytes: usize,
    /// Limit for busy polling on a TCP connection before the task sleeps. The client polls only if
    /// the last answers came within this time and no other thread wants the processor. Zero turns
    /// polling off. Default: 200 µs.
    pub busy_poll: Duration,
    /// RDMA devices to use, and the settings of their connections. Default: all devices with an
    /// active port.
    pub rdma: FabricOptions,
    /// Newest protocol version that the client offers, for tests. Default: the version of this
    /// build.
    #[doc(hidden)]
    pub protocol_max: u16,
    /// Seed of the jitter of retries, for simulations. Default: `None`, a random seed.
    pub seed: Option<u64>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            name: "client".into(),
            connect_timeout: Duration::from_secs(1),
            put_queue_bytes_max: 256 << 20,
            memory_bytes: 256 << 20,
            busy_poll: larder_wire::DEFAULT_BUSY_POLL,
            rdma: FabricOptions::default(),
            protocol_max: PROTOCOL_VERSION,
            seed: None,
        }
    }
}
