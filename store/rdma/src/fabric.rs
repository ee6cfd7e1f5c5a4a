//! All usable RDMA devices of a machine, with one memory that is registered with each.
//!
//! Invariants:
//! - A channel transfers between its peer and that memory only.
//! - A peer's address is trusted no further: a channel to a wrong address does not work, and does
//!   nothing else.

use crate::address::{EndpointAddress, RemoteRange};
use crate::blocking;
use crate::connection::Direction;
use crate::device::devices;
use crate::endpoint::{Endpoint, single};
use crate::error::Error;
use crate::grant::RemoteGrant;
use crate::nic::{Nic, NicOptions};
use crate::options::EndpointOptions;
use crate::path::{Path, pairs};
use crate::region::Region;
use larder_memory::span::{DmaBuf, DmaBufMut, DmaMemory, Guarded};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Time limit to list the devices, and to open one. Slower devices are not used.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// Time limit to register memory: a base, plus a part for each GiB, because registration pins every
/// page.
const REGISTER_MAX: Duration = Duration::from_secs(10);
const REGISTER_MAX_PER_GIB: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Default)]
pub struct FabricOptions {
    /// Device names. If empty, all devices with an active port are used.
    pub devices: Vec<String>,
    pub endpoint: EndpointOptions,
}

#[derive(Debug)]
pub struct Fabric {
    ports: Vec<(Arc<Nic>, Arc<Region>)>,
    options: EndpointOptions,
}

impl Fabric {
    /// Opens the devices and registers `memory` with each, which pins it: seconds for many
    /// gigabytes.
    ///
    /// Devices that fail or are too slow are skipped, with a warning if they were configured by
    /// name. Fails if none is left. Must be called inside a tokio runtime.
    pub async fn open(options: &FabricOptions, memory: Arc<dyn DmaMemory>) -> Result<Fabric, Error> {
        let no_runtime = |_| Error::NoRuntime;
        let looking = timeout(OPEN_MAX, blocking(devices));
        let found = looking.await.map_err(|_| Error::Late("listing RDMA devices"))?.map_err(no_runtime)??;
        let usable = found.into_iter().filter(|device| device.ports.iter().any(|port| port.path().is_some()));
        let names: Vec<String> = match options.devices.is_empty() {
            true => usable.map(|device| device.name).collect(),
            false => options.devices.clone(),
        };
        let mut ports = Vec::new();
        for name in names {
            match open(&name, &options.endpoint, memory.clone()).await {
                Ok(port) => ports.push(port),
                Err(error) if options.devices.is_empty() => {
                    tracing::debug!(device = name, %error, "skipping an RDMA device");
                }
                Err(error) => tracing::warn!(device = name, %error, "skipping an RDMA device"),
            }
        }
        match ports.is_empty() {
            true => Err(Error::NotFound("a usable RDMA device".into())),
            false => Ok(Fabric { ports, options: options.endpoint.clone() }),
        }
    }

    pub fn nics(&self) -> impl ExactSizeIterator<Item = &Arc<Nic>> {
        self.ports.iter().map(|(nic, _)| nic)
    }

    /// Creates a channel on a device, by its index among [`Fabric::nics`]. The channel is not
    /// connected.
    pub fn channel(&self, port: usize) -> Result<RdmaChannel, Error> {
        let (nic, region) = self.ports.get(port).ok_or_else(|| Error::NotFound(format!("device {port}")))?;
        let endpoint = Endpoint::new(nic, self.options.clone())?;
        let credits = Arc::new(Semaphore::new(self.options.grants as usize));
        Ok(RdmaChannel { endpoint, region: region.clone(), credits })
    }

    /// Connects to a peer's endpoints, each from the device nearest to it. Returns `None` for
    /// unreachable ones.
    pub async fn accept(&self, offered: &[EndpointAddress]) -> Vec<Option<RdmaChannel>> {
        let here: Vec<Path> = self.nics().map(|nic| nic.path()).collect();
        let there: Vec<Path> = offered.iter().map(EndpointAddress::path).collect();
        let mut channels: Vec<Option<RdmaChannel>> = offered.iter().map(|_| None).collect();
        for (port, index) in pairs(&here, &there) {
            if channels[index].is_some() || !self.ports[port].0.is_alive() {
                continue;
            }
            let connected = async {
                let channel = self.channel(port)?;
                channel.connect(&offered[index]).await.map(|()| channel)
            };
            match connected.await {
                Ok(channel) => channels[index] = Some(channel),
                Err(error) => {
                    tracing::debug!(device = self.ports[port].0.name(), %error, "an RDMA channel to a peer could not be connected")
                }
            }
        }
        channels
    }
}

async fn open(
    name: &str,
    options: &EndpointOptions,
    memory: Arc<dyn DmaMemory>,
) -> Result<(Arc<Nic>, Arc<Region>), Error> {
    let as_usual = NicOptions::default();
    let opening = timeout(OPEN_MAX, Nic::open(name, &as_usual));
    let nic = opening.await.map_err(|_| Error::Late("opening an RDMA device"))??;
    // A probe endpoint shows whether the device supports the options, before all memory is pinned
    // for it.
    if !Endpoint::new(&nic, options.clone())?.close(OPEN_MAX).await {
        return Err(Error::NotReleased);
    }
    let known = nic.clone();
    let patience = REGISTER_MAX + REGISTER_MAX_PER_GIB * (memory.span().len() >> 30) as u32;
    let registering = timeout(patience, blocking(move || Region::register(&known, memory)));
    let region = registering.await.map_err(|_| Error::Late("registering memory"))?.map_err(|_| Error::NoRuntime)??;
    Ok((nic, region))
}

/// An endpoint together with the registered memory of its [`Fabric`]. Its methods are those of
/// [`Endpoint`] on that memory. Opening a grant also takes a [`GrantCredit`].
#[derive(Debug)]
pub struct RdmaChannel {
    endpoint: Endpoint,
    region: Arc<Region>,
    credits: Arc<Semaphore>,
}

/// Permission to open one grant. The grant holds it until its key is dead, so a channel never has
/// more grants than its endpoint allows.
#[derive(Debug)]
pub struct GrantCredit(#[expect(dead_code, reason = "held until it is dropped")] OwnedSemaphorePermit);

impl RdmaChannel {
    pub fn local(&self) -> EndpointAddress {
        self.endpoint.local()
    }

    pub async fn connect(&self, remote: &EndpointAddress) -> Result<(), Error> {
        self.endpoint.connect(remote).await
    }

    pub fn is_dead(&self) -> bool {
        self.endpoint.is_dead()
    }

    pub async fn ended(&self) -> bool {
        self.endpoint.ended().await
    }

    pub fn reaches(&self, bytes: &[u8]) -> bool {
        self.region.contains(bytes)
    }

    /// Reads the peer's bytes, and counts them in `moved` as they arrive. It has no time limit as
    /// long as bytes move.
    ///
    /// Once `stop` resolves, it ends with [`Error::Stopped`] when the device is done with the
    /// memory. If the future is dropped instead, the channel keeps the memory until then.
    pub async fn read<B: DmaBufMut>(
        &self,
        into: B,
        from: RemoteRange,
        moved: &Arc<AtomicU64>,
        stop: impl Future<Output = ()>,
    ) -> Result<B, Error> {
        single(self.endpoint.transfer(Direction::Read, vec![(into, from)], &self.region, moved, stop).await)
    }

    /// Writes bytes to the peer. Otherwise as [`RdmaChannel::read`].
    pub async fn write<B: DmaBuf>(
        &self,
        from: B,
        to: RemoteRange,
        moved: &Arc<AtomicU64>,
        stop: impl Future<Output = ()>,
    ) -> Result<B, Error> {
        single(self.endpoint.transfer(Direction::Write, vec![(from, to)], &self.region, moved, stop).await)
    }

    /// Takes a permission to open a grant. Returns `None` if the limit is reached. The caller
    /// learns this before it gives its memory away: a grant that fails to open would lose it.
    pub fn grant_credit(&self) -> Option<GrantCredit> {
        self.credits.clone().try_acquire_owned().ok().map(GrantCredit)
    }

    pub async fn grant_read<B: DmaBuf>(
        &self,
        bytes: B,
        credit: GrantCredit,
    ) -> Result<RemoteGrant<Guarded<B, GrantCredit>>, Error> {
        self.endpoint.grant_read(Guarded { bytes, guard: credit }, &self.region).await
    }

    pub async fn grant_write<B: DmaBufMut>(
        &self,
        bytes: B,
        credit: GrantCredit,
    ) -> Result<RemoteGrant<Guarded<B, GrantCredit>>, Error> {
        self.endpoint.grant_write(Guarded { bytes, guard: credit }, &self.region).await
    }
}
