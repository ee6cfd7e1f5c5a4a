//! Reaching a node: its data port first, and from there, if it is on this machine, through its door to its memory. Lines by RDMA
//! are made on the connection.

use crate::link::LinkOptions;
use crate::rdma::{self, Devices};
use crate::url::Transport;
use larder_format::NamespaceDescriptor;
use larder_format::codec::DecodeError;
use larder_rdma::FabricOptions;
use larder_share::{Memory, Window};
use larder_wire::{
    FrameReader, FrameWriter, LocalDoor, PROTOCOL_VERSION_MIN, Request, Response, Sink, Source, Spinning,
    VERSION_OF_LENDING,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, tcp, unix};
use tokio::sync::OnceCell;

/// What makes connections.
pub trait Connector: Send + Sync + 'static {
    /// The side of a connection that a node's bytes come from.
    type Source: Source;
    /// The side that bytes go to a node by.
    type Sink: Sink;

    /// Connects to a node's data port.
    fn connect(&self, address: &str) -> impl Future<Output = io::Result<(Self::Source, Self::Sink)>> + Send;

    /// Goes through a node's door, if it is on this machine: another connection, and the node's memory. The node is lent
    /// `memory` to copy from.
    fn come_in(
        &self,
        door: &LocalDoor,
        memory: Option<&Arc<Memory>>,
    ) -> impl Future<Output = io::Result<(Self::Source, Self::Sink, Arc<Window>)>> + Send;

    /// The RDMA devices of this machine, with which `memory` is registered; by default there are none.
    fn devices(&self, _memory: Option<&Arc<Memory>>) -> impl Future<Output = Option<Arc<Devices>>> + Send {
        std::future::ready(None)
    }
}

/// Connections by sockets, and the devices of this machine.
pub(crate) struct Sockets {
    /// Most time for which a message is waited for without sleep.
    spin: Duration,
    rdma: FabricOptions,
    /// Opened when they are first wanted.
    devices: OnceCell<Option<Arc<Devices>>>,
}

impl Sockets {
    pub(crate) fn new(spin: Duration, rdma: FabricOptions) -> Self {
        Self { spin, rdma, devices: OnceCell::new() }
    }
}

/// The side of a socket that bytes come from.
pub(crate) enum SocketSource {
    Tcp(Spinning<tcp::OwnedReadHalf>),
    Local(unix::OwnedReadHalf),
}

/// The side of a socket that bytes go to.
pub(crate) enum SocketSink {
    Tcp(tcp::OwnedWriteHalf),
    Local(unix::OwnedWriteHalf),
}

impl Source for SocketSource {
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

impl Sink for SocketSink {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            SocketSink::Tcp(sink) => sink.send(from).await,
            SocketSink::Local(sink) => sink.send(from).await,
        }
    }
}

impl Connector for Sockets {
    type Source = SocketSource;
    type Sink = SocketSink;

    async fn connect(&self, address: &str) -> io::Result<(SocketSource, SocketSink)> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (read, write) = stream.into_split();
        Ok((SocketSource::Tcp(Spinning::new(read, self.spin)), SocketSink::Tcp(write)))
    }

    async fn come_in(
        &self,
        door: &LocalDoor,
        memory: Option<&Arc<Memory>>,
    ) -> io::Result<(SocketSource, SocketSink, Arc<Window>)> {
        if larder_share::machine().as_ref() != Some(&door.machine) {
            return Err(away("the node is on another machine"));
        }
        let (stream, window) = larder_share::attach(&door.name, memory.map(|memory| &**memory)).await?;
        let (read, write) = stream.into_split();
        Ok((SocketSource::Local(read), SocketSink::Local(write), window))
    }

    async fn devices(&self, memory: Option<&Arc<Memory>>) -> Option<Arc<Devices>> {
        let memory = memory?;
        self.devices.get_or_init(|| rdma::open(&self.rdma, memory)).await.clone()
    }
}

/// A node that has said hello.
pub(crate) struct Reached<C: Connector> {
    pub(crate) node_id: String,
    pub(crate) epoch: u64,
    /// Of the protocol, as agreed.
    pub(crate) version: u16,
    pub(crate) reader: FrameReader<C::Source>,
    pub(crate) writer: FrameWriter<C::Sink>,
    /// Its memory, if it is on this machine.
    pub(crate) window: Option<Arc<Window>>,
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

pub(crate) fn away(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what)
}

async fn in_time<T>(options: &LinkOptions, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
    tokio::time::timeout(options.connect_timeout, work).await.map_err(timed_out)?
}

/// Connects as the options say.
pub(crate) async fn reach<C: Connector>(connector: &C, options: &LinkOptions) -> io::Result<Reached<C>> {
    let (source, sink) = in_time(options, connector.connect(&options.address)).await?;
    let (reached, door) = in_time(options, greet::<C>(source, sink, options)).await?;
    if matches!(options.transport, Transport::Auto | Transport::Shm) {
        let known = (reached.node_id.clone(), reached.epoch, reached.version);
        match in_time(options, come_in(connector, known, door, options)).await {
            Ok(reached) => return Ok(reached),
            Err(error) if options.transport == Transport::Shm => {
                return Err(io::Error::new(error.kind(), format!("no shared memory: {error}")));
            }
            Err(error) => tracing::debug!(node = %options.address, %error, "pages of this node come over TCP"),
        }
    }
    Ok(reached)
}

/// Connects once more to a node whose data port was reached before.
pub(crate) async fn again<C: Connector>(
    connector: &C,
    options: &LinkOptions,
    node_id: &str,
    epoch: u64,
) -> io::Result<(u16, FrameReader<C::Source>, FrameWriter<C::Sink>)> {
    let (source, sink) = in_time(options, connector.connect(&options.address)).await?;
    let (reached, _) = in_time(options, greet::<C>(source, sink, options)).await?;
    if (reached.node_id.as_str(), reached.epoch) != (node_id, epoch) {
        return Err(away("another node answers there"));
    }
    Ok((reached.version, reached.reader, reached.writer))
}

/// Goes through the node's door, if it is on this machine and has one.
async fn come_in<C: Connector>(
    connector: &C,
    known: (String, u64, u16),
    door: Option<LocalDoor>,
    options: &LinkOptions,
) -> io::Result<Reached<C>> {
    let door = door.ok_or_else(|| away("the node shares none"))?;
    let memory = options.memory.as_ref().filter(|_| known.2 >= VERSION_OF_LENDING);
    let (source, sink, window) = connector.come_in(&door, memory).await?;
    let (inside, _) = greet::<C>(source, sink, options).await?;
    if (&inside.node_id, inside.epoch, inside.version) != (&known.0, known.1, known.2) {
        return Err(away("another node is behind the door"));
    }
    Ok(Reached { window: Some(window), ..inside })
}

/// Says hello, and hears who is there, and its door.
async fn greet<C: Connector>(
    source: C::Source,
    sink: C::Sink,
    options: &LinkOptions,
) -> io::Result<(Reached<C>, Option<LocalDoor>)> {
    let (mut reader, mut writer) = (FrameReader::new(source), FrameWriter::new(sink));
    let hello = Request::Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: options.protocol_max,
        name: options.name.clone(),
        namespace: options.namespace.clone(),
    };
    writer.send(hello.frame(PROTOCOL_VERSION_MIN, 0, 0, None)).await?;
    let header = reader.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    // Every version has the same Hello.
    match Response::decode(PROTOCOL_VERSION_MIN, header.kind, reader.body()).map_err(invalid)? {
        Response::Hello { node_id, epoch, version, namespace, door } => {
            if !(PROTOCOL_VERSION_MIN..=options.protocol_max).contains(&version) {
                return Err(invalid(DecodeError::Invalid("protocol version")));
            }
            // Pages are read and written under this name: both sides must derive the same one.
            if namespace != options.namespace.as_ref().map(NamespaceDescriptor::id) {
                return Err(invalid(DecodeError::Invalid("namespace in the node's hello")));
            }
            Ok((Reached { node_id, epoch, version, reader, writer, window: None }, door))
        }
        Response::Error { message, .. } => Err(io::Error::other(format!("node refused: {message}"))),
        _ => Err(invalid(DecodeError::Invalid("answer to hello"))),
    }
}
