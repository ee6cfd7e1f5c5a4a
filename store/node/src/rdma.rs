//! RDMA devices of a node, its channels to clients, and the memory that clients may access.

use crate::holds::Hold;
use larder_memory::{Arena, SlotPartMut};
use larder_rdma::{Fabric, FabricOptions, GrantCredit, Guarded, RdmaChannel, RemoteGrant, RemoteRange, SlotSlice};
use larder_runtime::sync::Mutex;
use larder_wire::GrantedRange;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of channels of a node, over all connections. Each one has a queue pair, a
/// completion queue and a file descriptor on the device.
const CHANNELS_MAX: usize = 256;

#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// Offers RDMA to clients where this machine has devices. Default: true. Without devices the
    /// node uses TCP.
    pub enabled: bool,
    /// Devices to use, and limits of each connection. Default: all devices with an active port.
    pub fabric: FabricOptions,
    /// Maximum time for which a client may neither read nor release a page that it may access.
    /// Default: 60 s. Afterwards the node revokes the access, and a late read fails on the client's
    /// side. A client may read until this time after the deadline of its request.
    pub page_age_max: Duration,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self { enabled: true, fabric: FabricOptions::default(), page_age_max: Duration::from_secs(60) }
    }
}

pub struct Rdma {
    pub(crate) fabric: Fabric,
    /// One permit per channel that may still be opened.
    pub(crate) channel_permits: Arc<Semaphore>,
    pub(crate) page_age_max: Duration,
}

/// RDMA channel to a client. Counts against the node's maximum until it is dropped.
pub(crate) struct ClientChannel {
    channel: RdmaChannel,
    /// Cleared when the device refuses a grant for writing. Some devices have no such grants.
    can_grant_writes: AtomicBool,
    /// Last time at which the client reported that it had read bytes.
    last_read: Mutex<Option<Instant>>,
    _permit: OwnedSemaphorePermit,
}

impl ClientChannel {
    pub(crate) fn new(channel: RdmaChannel, permit: OwnedSemaphorePermit) -> ClientChannel {
        ClientChannel { channel, can_grant_writes: AtomicBool::new(true), last_read: Mutex::new(None), _permit: permit }
    }

    pub(crate) fn record_read(&self, now: Instant) {
        *self.last_read.lock() = Some(now);
    }

    pub(crate) fn last_read(&self) -> Option<Instant> {
        *self.last_read.lock()
    }

    /// Returns credit for one grant for writing, if there is some and the device supports such
    /// grants.
    pub(crate) fn write_credit(&self) -> Option<GrantCredit> {
        // Relaxed: a stale value costs one more failed grant.
        if self.can_grant_writes.load(Ordering::Relaxed) { self.grant_credit() } else { None }
    }

    /// Records that this channel cannot grant writes. Returns `true` the first time, so that the
    /// caller logs it once.
    pub(crate) fn disable_write_grants(&self) -> bool {
        self.can_grant_writes.swap(false, Ordering::Relaxed)
    }
}

impl Deref for ClientChannel {
    type Target = RdmaChannel;

    fn deref(&self) -> &RdmaChannel {
        &self.channel
    }
}

/// A usable channel with the number that the client gave it.
pub(crate) type NumberedChannel = (u32, Arc<ClientChannel>);

/// Access of a client to a page, for reading. The hold and the credit return when the device has
/// invalidated the key, and not before.
pub(crate) type ReadGrant = RemoteGrant<Guarded<Guarded<SlotSlice, Hold>, GrantCredit>>;
/// Access of a client to a part that it writes.
pub(crate) type WriteGrant = RemoteGrant<Guarded<SlotPartMut, GrantCredit>>;

/// Opens the devices and registers the arena with them. Returns `None` without usable devices.
pub async fn open(options: &RdmaOptions, arena: &Arc<Arena>) -> Option<Rdma> {
    if !options.enabled {
        return None;
    }
    // Registers the whole arena once. Registration per transfer would cost more than the transfer.
    match Fabric::open(&options.fabric, arena.clone()).await {
        Ok(fabric) => {
            let devices: Vec<&str> = fabric.nics().map(|nic| nic.name()).collect();
            tracing::info!(?devices, "RDMA enabled: clients with RDMA devices read and write pages directly");
            let channel_permits = Arc::new(Semaphore::new(CHANNELS_MAX));
            Some(Rdma { fabric, channel_permits, page_age_max: options.page_age_max })
        }
        // No device was named, so most machines end here.
        Err(error) if options.fabric.devices.is_empty() => {
            tracing::debug!(%error, "no RDMA devices: pages move over TCP");
            None
        }
        Err(error) => {
            let devices = &options.fabric.devices;
            tracing::warn!(%error, ?devices, "cannot use the RDMA devices: pages move over TCP; check --rdma-devices");
            None
        }
    }
}

pub(crate) fn status(fabric: &Fabric) -> serde_json::Value {
    let device = |nic: &Arc<larder_rdma::Nic>| {
        let stats = nic.stats();
        serde_json::json!({
            "device": nic.name(), "up": nic.is_alive(), "channels": stats.endpoints, "grants": stats.grants,
            "channels_failed": stats.disconnects, "leaked": stats.leaked,
        })
    };
    fabric.nics().map(device).collect()
}

/// Returns the message that lets the client use a grant on channel `number`.
pub(crate) fn describe<B>(number: u32, grant: &RemoteGrant<B>) -> GrantedRange {
    let RemoteRange { address, len, key } = grant.remote();
    GrantedRange { channel: number, address, len, key }
}
