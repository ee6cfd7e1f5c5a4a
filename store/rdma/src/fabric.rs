//! The RDMA devices of this machine that are in use, and one memory that all of them know.
//!
//! Always true: a line transfers between its peer and that memory, and nothing else. Addresses of a peer are believed no further than
//! that: a line to a wrong one is a line that does not work.

use crate::apart;
use crate::device::devices;
use crate::endpoint::{Endpoint, EndpointOptions};
use crate::error::Error;
use crate::memory::{Bytes, BytesMut, Kept, Memory};
use crate::nic::{Nic, NicOptions};
use crate::path::{Path, pairs};
use crate::region::Region;
use crate::window::Window;
use crate::{EndpointAddress, RemoteRange};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Longest time to look for devices, and to open one. A device that is slower is not used.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// Longest time to register memory: for any, and for each of its GiB.
const REGISTER_MAX: Duration = Duration::from_secs(10);
const REGISTER_MAX_PER_GIB: Duration = Duration::from_secs(2);

/// Which devices are used, and how their connections behave.
#[derive(Debug, Clone, Default)]
pub struct FabricOptions {
    /// Names of devices; all that have an active port if there are none.
    pub devices: Vec<String>,
    /// How connections behave.
    pub endpoint: EndpointOptions,
}

/// Open devices, with some memory that is registered with each.
#[derive(Debug)]
pub struct Fabric {
    ports: Vec<(Arc<Nic>, Arc<Region>)>,
    options: EndpointOptions,
}

impl Fabric {
    /// Opens the devices and registers `memory` with each. This pins the memory: seconds for many gigabytes. Devices that cannot be
    /// used, or not in time, are left out, with a warning if they were named; without any, this is an error. Must be called inside
    /// a tokio runtime.
    pub async fn open(options: &FabricOptions, memory: Arc<dyn Memory>) -> Result<Fabric, Error> {
        let blocking = |_| Error::NoRuntime;
        let looking = timeout(OPEN_MAX, apart(devices));
        let found = looking.await.map_err(|_| Error::Late("looking for RDMA devices"))?.map_err(blocking)??;
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
                    tracing::debug!(device = name, %error, "an RDMA device is not used");
                }
                Err(error) => tracing::warn!(device = name, %error, "an RDMA device is not used"),
            }
        }
        match ports.is_empty() {
            true => Err(Error::NotFound("usable RDMA device".into())),
            false => Ok(Fabric { ports, options: options.endpoint.clone() }),
        }
    }

    /// The devices.
    pub fn nics(&self) -> impl ExactSizeIterator<Item = &Arc<Nic>> {
        self.ports.iter().map(|(nic, _)| nic)
    }

    /// A line from a device, by its index among [`Fabric::nics`], that is not connected yet.
    pub fn line(&self, port: usize) -> Result<Line, Error> {
        let (nic, region) = self.ports.get(port).ok_or_else(|| Error::NotFound(format!("device {port}")))?;
        let endpoint = Endpoint::new(nic, self.options.clone())?;
        let credits = Arc::new(Semaphore::new(self.options.windows as usize));
        Ok(Line { endpoint, region: region.clone(), credits })
    }

    /// Connects to a peer's endpoints, each from the device that is nearest to it; `None` for those that cannot be reached.
    pub async fn answer(&self, offered: &[EndpointAddress]) -> Vec<Option<Line>> {
        let here: Vec<Path> = self.nics().map(|nic| nic.path()).collect();
        let there: Vec<Path> = offered.iter().map(EndpointAddress::path).collect();
        let mut lines: Vec<Option<Line>> = offered.iter().map(|_| None).collect();
        for (port, index) in pairs(&here, &there) {
            if lines[index].is_some() || !self.ports[port].0.is_alive() {
                continue;
            }
            let connected = async {
                let line = self.line(port)?;
                line.connect(&offered[index]).await.map(|()| line)
            };
            match connected.await {
                Ok(line) => lines[index] = Some(line),
                Err(error) => tracing::debug!(device = self.ports[port].0.name(), %error, "no RDMA line to a peer"),
            }
        }
        lines
    }
}

async fn open(
    name: &str,
    options: &EndpointOptions,
    memory: Arc<dyn Memory>,
) -> Result<(Arc<Nic>, Arc<Region>), Error> {
    let as_usual = NicOptions::default();
    let opening = timeout(OPEN_MAX, Nic::open(name, &as_usual));
    let nic = opening.await.map_err(|_| Error::Late("opening an RDMA device"))??;
    // A device that has no such endpoints is known before all memory is pinned for it.
    if !Endpoint::new(&nic, options.clone())?.close(OPEN_MAX).await {
        return Err(Error::Stuck);
    }
    let known = nic.clone();
    let patience = REGISTER_MAX + REGISTER_MAX_PER_GIB * (memory.span().len() >> 30) as u32;
    let registering = timeout(patience, apart(move || Region::register(&known, memory)));
    let region = registering.await.map_err(|_| Error::Late("registering memory"))?.map_err(|_| Error::NoRuntime)??;
    Ok((nic, region))
}

/// One end of a connection, for transfers between the peer's memory and that of the [`Fabric`] it is of.
#[derive(Debug)]
pub struct Line {
    endpoint: Endpoint,
    region: Arc<Region>,
    /// Windows that may still be opened.
    credits: Arc<Semaphore>,
}

/// Leave to open a window; good for the next when the window's key is dead.
#[derive(Debug)]
pub struct Credit(#[expect(dead_code, reason = "held until it is dropped")] OwnedSemaphorePermit);

impl Line {
    /// What the peer needs to connect to it.
    pub fn local(&self) -> EndpointAddress {
        self.endpoint.local()
    }

    /// As [`Endpoint::connect`].
    pub async fn connect(&self, remote: &EndpointAddress) -> Result<(), Error> {
        self.endpoint.connect(remote).await
    }

    /// Whether it can never transfer anything again.
    pub fn is_dead(&self) -> bool {
        self.endpoint.is_dead()
    }

    /// As [`Endpoint::ended`].
    pub async fn ended(&self) -> bool {
        self.endpoint.ended().await
    }

    /// Whether these bytes lie in the memory.
    pub fn reaches(&self, bytes: &[u8]) -> bool {
        self.region.contains(bytes)
    }

    /// As [`Endpoint::read`].
    pub async fn read<B: BytesMut>(&self, into: B, from: RemoteRange) -> Result<B, Error> {
        self.endpoint.read(into, &self.region, from).await
    }

    /// As [`Endpoint::write`].
    pub async fn write<B: Bytes>(&self, from: B, to: RemoteRange) -> Result<B, Error> {
        self.endpoint.write(from, &self.region, to).await
    }

    /// Leave to open a window; `None` if as many are open as there may be. Without it bytes that were given to a window that could
    /// not be opened would be lost to the caller.
    pub fn credit(&self) -> Option<Credit> {
        self.credits.clone().try_acquire_owned().ok().map(Credit)
    }

    /// As [`Endpoint::readable`].
    pub async fn readable<B: Bytes>(&self, bytes: B, credit: Credit) -> Result<Window<Kept<B, Credit>>, Error> {
        self.endpoint.readable(Kept { bytes, keeper: credit }, &self.region).await
    }

    /// As [`Endpoint::writable`].
    pub async fn writable<B: BytesMut>(&self, bytes: B, credit: Credit) -> Result<Window<Kept<B, Credit>>, Error> {
        self.endpoint.writable(Kept { bytes, keeper: credit }, &self.region).await
    }
}
