//! Ways to reach a node: TCP sockets, the node's local socket, and RDMA devices. A simulation
//! brings its own.

use super::rdma_channels::{Devices, open_devices};
use larder_memory::share::{ArenaMap, SharedMemory, between_forks};
use larder_rdma::FabricOptions;
use larder_wire::{ArenaListenerInfo, BusyPollSource, ByteSink, ByteSource};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpSocket, TcpStream, lookup_host, tcp, unix};
use tokio::sync::OnceCell;

/// Maker of connections. Sockets are the usual one; a simulation substitutes its own network and
/// devices.
pub trait Connector: Send + Sync + 'static {
    /// Receiving half of a connection.
    type Source: ByteSource;
    /// Sending half of a connection.
    type Sink: ByteSink;

    /// Connects to a node's data port at `host:port`.
    fn connect(&self, address: &str) -> impl Future<Output = io::Result<(Self::Source, Self::Sink)>> + Send;

    /// Connects to the local socket of a node on this machine, and maps the node's arena. The node
    /// in turn may copy from `memory`. Fails if the node is on another machine.
    fn attach_memory(
        &self,
        listener: &ArenaListenerInfo,
        memory: Option<&Arc<SharedMemory>>,
    ) -> impl Future<Output = io::Result<(Self::Source, Self::Sink, Arc<ArenaMap>)>> + Send;

    /// RDMA devices of this machine, with `memory` registered. The default has none.
    fn devices(&self, _memory: Option<&Arc<SharedMemory>>) -> impl Future<Output = Option<Arc<Devices>>> + Send {
        std::future::ready(None)
    }
}

/// Connects by sockets, and opens this machine's RDMA devices.
pub(crate) struct SocketConnector {
    /// Limit for busy polling before a task sleeps.
    busy_poll: Duration,
    rdma: FabricOptions,
    /// Opened at the first use: opening pins the client's memory, which takes a while.
    devices: OnceCell<Option<Arc<Devices>>>,
}

impl SocketConnector {
    pub(crate) fn new(busy_poll: Duration, rdma: FabricOptions) -> Self {
        Self { busy_poll, rdma, devices: OnceCell::new() }
    }
}

/// Receiving half of a socket.
pub(crate) enum SocketSource {
    Tcp(BusyPollSource<tcp::OwnedReadHalf>),
    Local(unix::OwnedReadHalf),
}

/// Sending half of a socket.
pub(crate) enum SocketSink {
    Tcp(tcp::OwnedWriteHalf),
    Local(unix::OwnedWriteHalf),
}

impl ByteSource for SocketSource {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            SocketSource::Tcp(source) => source.receive(into).await,
            SocketSource::Local(source) => source.receive(into).await,
        }
    }

    async fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            SocketSource::Tcp(source) => source.receive_next(into).await,
            SocketSource::Local(source) => source.receive_next(into).await,
        }
    }
}

impl ByteSink for SocketSink {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            SocketSink::Tcp(sink) => sink.send(from).await,
            SocketSink::Local(sink) => sink.send(from).await,
        }
    }

    fn limit_buffered(&mut self, is_limited: bool) {
        match self {
            SocketSink::Tcp(sink) => sink.limit_buffered(is_limited),
            SocketSink::Local(sink) => sink.limit_buffered(is_limited),
        }
    }

    fn unacknowledged_bytes(&self) -> Option<u64> {
        let socket = match self {
            SocketSink::Tcp(sink) => sink.socket(),
            SocketSink::Local(sink) => sink.socket(),
        };
        larder_memory::socket::unacknowledged_bytes(socket?).ok()
    }
}

impl Connector for SocketConnector {
    type Source = SocketSource;
    type Sink = SocketSink;

    async fn connect(&self, address: &str) -> io::Result<(SocketSource, SocketSink)> {
        let stream = connect_to_any(address).await?;
        larder_wire::prepare_socket(&stream)?;
        let (read, write) = stream.into_split();
        Ok((SocketSource::Tcp(BusyPollSource::new(read, self.busy_poll)), SocketSink::Tcp(write)))
    }

    async fn attach_memory(
        &self,
        listener: &ArenaListenerInfo,
        memory: Option<&Arc<SharedMemory>>,
    ) -> io::Result<(SocketSource, SocketSink, Arc<ArenaMap>)> {
        if larder_memory::share::host_id().as_ref() != Some(&listener.machine) {
            return Err(unsupported("the node is on another machine"));
        }
        let (stream, arena) = larder_memory::share::attach(&listener.name, memory.map(|memory| &**memory)).await?;
        let (read, write) = stream.into_split();
        Ok((SocketSource::Local(read), SocketSink::Local(write), arena))
    }

    async fn devices(&self, memory: Option<&Arc<SharedMemory>>) -> Option<Arc<Devices>> {
        // Devices transfer only to and from registered memory.
        let memory = memory?;
        self.devices.get_or_init(|| open_devices(&self.rdma, memory)).await.clone()
    }
}

/// Connects to the first address of `host:port` that accepts. A forked child closes the socket from
/// the beginning.
async fn connect_to_any(address: &str) -> io::Result<TcpStream> {
    let mut problem = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in lookup_host(address).await? {
        let socket = between_forks(|descriptors| {
            let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            descriptors.list(&socket).map(|()| socket)
        })?;
        match socket.connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

/// An error for a transport that is not available.
pub(super) fn unsupported(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, reason)
}
