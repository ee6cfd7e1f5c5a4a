//! Reaching a node: TCP first, and from there, if it is on this machine, through its door to its memory.

use crate::link::LinkOptions;
use crate::url::Transport;
use larder_format::NamespaceDescriptor;
use larder_format::codec::DecodeError;
use larder_share::Window;
use larder_wire::{FrameReader, LocalDoor, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Request, Response, Sink, Source};
use std::io::{self, IoSlice};
use std::sync::Arc;
use tokio::net::{TcpStream, tcp, unix};

/// Both directions of a connection.
pub(crate) enum Streams {
    Tcp(FrameReader<tcp::OwnedReadHalf>, tcp::OwnedWriteHalf),
    Local(FrameReader<unix::OwnedReadHalf>, unix::OwnedWriteHalf),
}

/// A node that has said hello.
pub(crate) struct Reached {
    pub(crate) node_id: String,
    pub(crate) epoch: u64,
    pub(crate) streams: Streams,
    /// Its memory, if it is on this machine.
    pub(crate) window: Option<Arc<Window>>,
}

/// What a node says of itself.
struct Greeting {
    node_id: String,
    epoch: u64,
    door: Option<LocalDoor>,
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

async fn in_time<T>(options: &LinkOptions, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
    tokio::time::timeout(options.connect_timeout, work).await.map_err(timed_out)?
}

/// Connects as the options say.
pub(crate) async fn reach(options: &LinkOptions) -> io::Result<Reached> {
    let stream = in_time(options, TcpStream::connect(&options.address)).await?;
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    let mut reader = FrameReader::new(read);
    let greeting = in_time(options, greet(&mut reader, &mut write, options)).await?;
    if options.transport != Transport::Tcp {
        match in_time(options, come_in(&greeting, options)).await {
            Ok(reached) => return Ok(reached),
            Err(error) if options.transport == Transport::Shm => {
                return Err(io::Error::new(error.kind(), format!("no shared memory: {error}")));
            }
            Err(error) => tracing::debug!(node = %options.address, %error, "pages of this node come over TCP"),
        }
    }
    let Greeting { node_id, epoch, .. } = greeting;
    Ok(Reached { node_id, epoch, streams: Streams::Tcp(reader, write), window: None })
}

/// Goes through the node's door, if it is on this machine and has one.
async fn come_in(greeting: &Greeting, options: &LinkOptions) -> io::Result<Reached> {
    let away = |what| io::Error::new(io::ErrorKind::Unsupported, what);
    let door = greeting.door.as_ref().ok_or_else(|| away("the node shares none"))?;
    if larder_share::machine().as_ref() != Some(&door.machine) {
        return Err(away("the node is on another machine"));
    }
    let (stream, window) = larder_share::attach(&door.name).await?;
    let (read, mut write) = stream.into_split();
    let mut reader = FrameReader::new(read);
    let Greeting { node_id, epoch, .. } = greet(&mut reader, &mut write, options).await?;
    if (&node_id, epoch) != (&greeting.node_id, greeting.epoch) {
        return Err(away("another node is behind the door"));
    }
    Ok(Reached { node_id, epoch, streams: Streams::Local(reader, write), window: Some(window) })
}

/// Says hello, and hears who is there.
async fn greet<R: Source, W: Sink>(
    reader: &mut FrameReader<R>,
    writer: &mut W,
    options: &LinkOptions,
) -> io::Result<Greeting> {
    let hello = Request::Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION,
        name: options.name.clone(),
        namespace: options.namespace.clone(),
    };
    let frame = hello.frame(0, 0, None);
    let mut left = frame.head.as_slice();
    while !left.is_empty() {
        let sent = writer.send(&[IoSlice::new(left)]).await?;
        left = &left[sent..];
    }
    let header = reader.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    match Response::decode(header.kind, reader.body()).map_err(invalid)? {
        Response::Hello { node_id, epoch, version, namespace, door } => {
            if !(PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION).contains(&version) {
                return Err(invalid(DecodeError::Invalid("protocol version")));
            }
            // Pages are read and written under this name: both sides must derive the same one.
            if namespace != options.namespace.as_ref().map(NamespaceDescriptor::id) {
                return Err(invalid(DecodeError::Invalid("namespace in the node's hello")));
            }
            Ok(Greeting { node_id, epoch, door })
        }
        Response::Error { message, .. } => Err(io::Error::other(format!("node refused: {message}"))),
        _ => Err(invalid(DecodeError::Invalid("answer to hello"))),
    }
}
