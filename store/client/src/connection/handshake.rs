//! Handshake with a node: Hello on the data port, then, on the same machine, the attachment of
//! shared memory.
//!
//! Invariant: a client and a node that disagree on the namespace never exchange pages. Both derive
//! its id from the descriptor, and the client compares the two.

use super::connector::{Connector, unsupported};
use super::multiplex::NodeIdentity;
use super::options::ConnectionOptions;
use crate::url::Transport;
use larder_format::NamespaceDescriptor;
use larder_format::codec::DecodeError;
use larder_memory::share::ArenaMap;
use larder_wire::{
    ArenaListenerInfo, FrameReader, FrameWriter, PROTOCOL_VERSION_MIN, Request, Response, VERSION_SHARED_MEMORY_PUTS,
};
use std::io;
use std::sync::Arc;

pub(super) struct Handshake<C: Connector> {
    pub(super) node: NodeIdentity,
    pub(super) reader: FrameReader<C::Source>,
    pub(super) writer: FrameWriter<C::Sink>,
    pub(super) arena: Option<Arc<ArenaMap>>,
    /// Reason for which `transport=auto` found no shared memory.
    pub(super) no_shared_memory: Option<io::Error>,
}

/// Connects to the node. With `transport=auto`, falls back to TCP if shared memory is unavailable.
pub(super) async fn connect<C: Connector>(connector: &C, options: &ConnectionOptions) -> io::Result<Handshake<C>> {
    let (source, sink) = with_timeout(options, connector.connect(&options.address)).await?;
    let (mut handshake, listener) = with_timeout(options, exchange_hello::<C>(source, sink, options)).await?;
    if matches!(options.transport, Transport::Auto | Transport::Shm) {
        match with_timeout(options, attach_memory(connector, &handshake.node, listener, options)).await {
            Ok(attached) => return Ok(attached),
            Err(error) if options.transport == Transport::Shm => {
                return Err(io::Error::new(error.kind(), format!("shared memory is unavailable: {error}")));
            }
            Err(error) => {
                tracing::debug!(node = %options.address, %error, "no shared memory with this node; pages travel over TCP");
                handshake.no_shared_memory = Some(error);
            }
        }
    }
    Ok(handshake)
}

/// Opens a further connection to a node. Fails if another node, or another epoch of it, answers.
pub(super) async fn connect_again<C: Connector>(
    connector: &C,
    options: &ConnectionOptions,
    node: &NodeIdentity,
) -> io::Result<Handshake<C>> {
    let (source, sink) = with_timeout(options, connector.connect(&options.address)).await?;
    let (handshake, _) = with_timeout(options, exchange_hello::<C>(source, sink, options)).await?;
    if (&handshake.node.node_id, handshake.node.epoch) != (&node.node_id, node.epoch) {
        return Err(unsupported("another node answers at this address"));
    }
    Ok(handshake)
}

/// Connects to the local socket that the node announced, and maps the node's arena.
async fn attach_memory<C: Connector>(
    connector: &C,
    expected: &NodeIdentity,
    listener: Option<ArenaListenerInfo>,
    options: &ConnectionOptions,
) -> io::Result<Handshake<C>> {
    let listener = listener.ok_or_else(|| unsupported("the node does not share its memory"))?;
    // An older node does not expect a file descriptor in its handshake.
    let memory = options.memory.as_ref().filter(|_| expected.version >= VERSION_SHARED_MEMORY_PUTS);
    let (source, sink, arena) = connector.attach_memory(&listener, memory).await?;
    let (attached, _) = exchange_hello::<C>(source, sink, options).await?;
    // The name of the socket may have been reused since the node announced it.
    if attached.node != *expected {
        return Err(unsupported("another node answers at the local socket"));
    }
    Ok(Handshake { arena: Some(arena), ..attached })
}

/// Exchanges Hello. Also returns the address of the node's local socket, if it has one.
async fn exchange_hello<C: Connector>(
    source: C::Source,
    sink: C::Sink,
    options: &ConnectionOptions,
) -> io::Result<(Handshake<C>, Option<ArenaListenerInfo>)> {
    let mut reader = FrameReader::new(source);
    let mut writer = FrameWriter::new(sink);
    let hello = Request::Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: options.protocol_max,
        name: options.name.clone(),
        namespace: options.namespace.clone(),
    };
    writer.send(hello.frame(PROTOCOL_VERSION_MIN, 0, 0, None)).await?;
    let header = reader.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    // All versions encode Hello alike, because no version is negotiated yet.
    match Response::decode(PROTOCOL_VERSION_MIN, header.kind, reader.body()).map_err(invalid_data)? {
        Response::Hello { node_id, epoch, version, namespace, arena_listener } => {
            // A node that picks a version beyond the offer would be misunderstood later.
            if !(PROTOCOL_VERSION_MIN..=options.protocol_max).contains(&version) {
                return Err(invalid_data(DecodeError::Invalid("protocol version")));
            }
            if namespace != options.namespace.as_ref().map(NamespaceDescriptor::id) {
                return Err(invalid_data(DecodeError::Invalid("namespace in the node's hello")));
            }
            reader.set_version(version);
            let node = NodeIdentity { node_id, epoch, version };
            Ok((Handshake { node, reader, writer, arena: None, no_shared_memory: None }, arena_listener))
        }
        Response::Error { message, .. } => Err(io::Error::other(format!("the node refused the client: {message}"))),
        _ => Err(invalid_data(DecodeError::Invalid("answer to hello"))),
    }
}

async fn with_timeout<T>(options: &ConnectionOptions, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
    tokio::time::timeout(options.connect_timeout, work).await.map_err(timed_out)?
}

fn invalid_data(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
