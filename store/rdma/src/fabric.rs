//! The RDMA devices of this machine that are in use, and one memory that all of them know.
//!
//! Always true: a line transfers between its peer and that memory, and nothing else. Addresses of a peer are believed no further than
//! that: a line to a wrong one is a line that does not work.

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
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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
    /// used are left out, with a warning; without any, this is an error. Must be called inside a tokio runtime.
    pub async fn open(options: &FabricOptions, memory: Arc<dyn Memory>) -> Result<Fabric, Error> {
        let blocking = |_| Error::NoRuntime;
        let found = tokio::task::spawn_blocking(devices).await.map_err(blocking)??;
        let usable = found.into_iter().filter(|device| device.ports.iter().any(|port| port.path().is_some()));
        let names: Vec<String> = match options.devices.is_empty() {
            true => usable.map(|device| device.name).collect(),
            false => options.devices.clone(),
        };
        let mut ports = Vec::new();
        for name in names {
            match open(&name, memory.clone()).await {
                Ok(port) => ports.push(port),
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

async fn open(name: &str, memory: Arc<dyn Memory>) -> Result<(Arc<Nic>, Arc<Region>), Error> {
    let nic = Nic::open(name, &NicOptions::default()).await?;
    let known = nic.clone();
    let region = tokio::task::spawn_blocking(move || Region::register(&known, memory));
    Ok((nic, region.await.map_err(|_| Error::NoRuntime)??))
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

    /// Waits until it can never transfer anything again, and no device touches memory for it.
    pub async fn ended(&self) {
        self.endpoint.ended().await;
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
