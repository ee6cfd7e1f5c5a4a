//! Setup and maintenance of the RDMA channels to a connected node.
//!
//! Invariant: while channels are missing, pages travel over TCP, unless the URL demands RDMA.
//! Channels that died, or that the node does not use, are replaced with growing pauses.

use super::connector::{Connector, unsupported};
use super::multiplex::Connection;
use super::options::ConnectionOptions;
use super::rdma_channels::Devices;
use super::supervisor::Notes;
use crate::url::Transport;
use larder_rdma::{EndpointAddress, Error, RdmaChannel};
use larder_runtime::lock::Mutex;
use larder_wire::{MAX_RDMA_CHANNELS, RdmaEndpoint, Request, Response, VERSION_RDMA};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Limit for the node's answer to an offer of channels.
const OFFER_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause before the next attempt after channels died or could not be made. It doubles each time.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Lifetime of a channel after which the pause starts from its minimum again.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Maintains RDMA channels to a connected node.
///
/// Calls `publish` once, as soon as pages can move: when the first channels are up, or when it is
/// clear that they take longer than the connect timeout. Returns only if the URL demands RDMA and
/// there is none.
pub(super) async fn maintain<C: Connector>(
    connection: &Arc<Connection>,
    connector: &C,
    options: &ConnectionOptions,
    notes: &Mutex<Notes>,
    publish: impl FnOnce(),
) -> io::Error {
    let is_required = options.transport == Transport::Rdma;
    let mut publish = Some(publish);
    let mut publish_once = || _ = publish.take().map(|publish| publish());
    let Some(devices) = open_devices(connection, connector, options, &mut publish_once).await else {
        if is_required {
            return unsupported("no RDMA: no usable device or memory here, or the node's version is too old");
        }
        let reason = match connection.version() < VERSION_RDMA {
            true => "the node's version is too old",
            false => "no usable device here",
        };
        notes.lock().no_rdma = Some(reason.into());
        publish_once();
        return std::future::pending().await;
    };
    // Reads need the devices' memory as soon as a channel is up.
    connection.rdma().set_devices(devices.clone());
    let by_device = devices.fabric.nics().map(|_| None).collect();
    let mut setup = ChannelSetup { connection, by_device, unannounced: Vec::new(), next_number: 1, devices };
    let mut pause = PAUSE_MIN;
    // Short at first: operations wait for `publish`.
    let mut timeout = options.connect_timeout;
    loop {
        let attempt = tokio::time::timeout(timeout, setup.connect_missing()).await;
        if let Ok(Err(error)) = &attempt {
            tracing::debug!(node = %options.address, %error, "cannot make an RDMA channel to the node");
        }
        notes.lock().no_rdma = (!connection.rdma().is_up()).then(|| match attempt {
            Ok(Ok(())) => "the node offers no channel".into(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the node does not answer the offer of channels".into(),
        });
        if is_required && !connection.rdma().is_up() {
            return unsupported("no RDMA: no device of the node is reachable, or the channels to it died");
        }
        publish_once();
        timeout = OFFER_TIMEOUT;
        let begin = larder_runtime::now();
        setup.wait(pause).await;
        let was_stable = larder_runtime::now().saturating_duration_since(begin) > STABLE_AFTER.max(pause * 2);
        pause = if was_stable { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
    }
}

/// Opens the devices, if the transport and the protocol version allow RDMA. If that takes longer
/// than the connect timeout, calls `publish` meanwhile, unless the URL demands RDMA.
async fn open_devices<C: Connector>(
    connection: &Connection,
    connector: &C,
    options: &ConnectionOptions,
    mut publish: impl FnMut(),
) -> Option<Arc<Devices>> {
    let is_required = options.transport == Transport::Rdma;
    // Shared memory is cheaper than RDMA on the same machine.
    let is_useful = options.transport == Transport::Auto && connection.transport() != Transport::Shm;
    if !(is_required || is_useful) || connection.version() < VERSION_RDMA {
        return None;
    }
    // Not dropped on timeout: a restart would pin the memory from the beginning.
    let opening = connector.devices(options.memory.as_ref());
    tokio::pin!(opening);
    match tokio::time::timeout(options.connect_timeout, &mut opening).await {
        Ok(devices) => devices,
        Err(_) => {
            if !is_required {
                publish();
            }
            opening.await
        }
    }
}

struct ChannelSetup<'a> {
    connection: &'a Arc<Connection>,
    devices: Arc<Devices>,
    by_device: Vec<Option<u32>>,
    /// Numbers of dead channels that the node has not heard of.
    unannounced: Vec<u32>,
    /// Number of the next channel. Numbers are not reused on a connection.
    next_number: u32,
}

impl ChannelSetup<'_> {
    async fn connect_missing(&mut self) -> Result<(), Error> {
        self.remove_dead();
        let (offered, ends) = self.create_ends();
        let announced = self.unannounced.len().min(MAX_RDMA_CHANNELS);
        let gone = self.unannounced[..announced].to_vec();
        // The node may connect an end that this side gives up. Until a channel is in use, its
        // number counts as gone.
        self.unannounced.extend(offered.keys());
        let deadline = larder_runtime::now() + OFFER_TIMEOUT;
        let answer = self.connection.request(&Request::RdmaChannels { closed: gone, offered: ends }, deadline).await;
        let Some(Response::RdmaChannels(answered)) = answer else { return Err(Error::NotConnected) };
        // Only now: without an answer, the node may not have heard of them.
        self.unannounced.drain(..announced);
        self.connect_ends(offered, answered).await
    }

    fn create_ends(&mut self) -> (BTreeMap<u32, (usize, RdmaChannel)>, Vec<RdmaEndpoint>) {
        let mut offered = BTreeMap::new();
        let mut ends = Vec::new();
        let missing = (0..self.by_device.len()).filter(|&device| self.by_device[device].is_none());
        for device in missing.take(MAX_RDMA_CHANNELS) {
            let channel = match self.devices.fabric.channel(device) {
                Ok(channel) => channel,
                Err(error) => {
                    tracing::debug!(device, %error, "a device cannot open an RDMA channel");
                    continue;
                }
            };
            ends.push(RdmaEndpoint { channel: self.next_number, address: channel.local().encode() });
            offered.insert(self.next_number, (device, channel));
            self.next_number += 1;
        }
        (offered, ends)
    }

    async fn connect_ends(
        &mut self,
        mut offered: BTreeMap<u32, (usize, RdmaChannel)>,
        answered: Vec<RdmaEndpoint>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for end in answered {
            let Some((device, channel)) = offered.remove(&end.channel) else { continue };
            let connected = match EndpointAddress::decode(&end.address) {
                Ok(address) => channel.connect(&address).await,
                Err(_) => Err(Error::Invalid("the node's address of an RDMA channel")),
            };
            match connected {
                Ok(()) => {
                    self.unannounced.retain(|&number| number != end.channel);
                    self.by_device[device] = Some(end.channel);
                    self.connection.rdma().insert(end.channel, channel);
                }
                Err(error) => result = Err(error),
            }
        }
        result
    }

    fn remove_dead(&mut self) {
        for channel in &mut self.by_device {
            if let Some(number) = *channel
                && self.connection.rdma().remove_dead(number)
            {
                *channel = None;
                self.unannounced.push(number);
            }
        }
    }

    /// Waits for `pause`, and before that, if no channel is missing, until one dies or the client
    /// abandons them.
    async fn wait(&self, pause: Duration) {
        let channels = self.connection.rdma().all();
        let is_missing = self.by_device.iter().any(Option::is_none);
        if !is_missing && !channels.is_empty() {
            let ends = channels.iter().map(|channel| Box::pin(channel.ended()));
            tokio::select! {
                // A fixed order of polling keeps simulations replayable.
                biased;
                _ = futures::future::select_all(ends) => {}
                () = self.connection.rdma().abandoned() => {}
            }
        }
        tokio::time::sleep(pause).await;
    }
}
