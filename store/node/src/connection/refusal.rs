//! Refusal of connections beyond a limit of the node.
//!
//! Invariants:
//! - The node answers Hello before it closes a refused connection. A client that learned nothing
//!   would take the node for dead.
//! - At most [`REFUSALS_MAX`] refused connections are open. Further ones are closed without an
//!   answer. They are counted like the others.
//! - The log gets few lines about each limit, however many clients try: see [`LogLimit`].

use super::handshake::HELLO_BODY_MAX;
use crate::state::NodeState;
use larder_runtime::LogLimit;
use larder_wire::{ByteSink, ByteSource, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION_MIN, Response};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of refused connections that wait for their answer. Each may take a Hello of
/// 16 KiB, so together they take at most 1 MiB.
pub(crate) const REFUSALS_MAX: usize = 64;
/// Maximum time to receive Hello and to answer it.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit that a refused connection exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionLimit {
    Count,
    /// Connections of one address, or over local sockets.
    Peer,
    Memory,
}

/// Places for answers to refused connections, and the limits of the lines about clients.
pub(crate) struct Refusals {
    permits: Arc<Semaphore>,
    count: LogLimit,
    peer: LogLimit,
    memory: LogLimit,
    failed_accepts: LogLimit,
    pub(super) versions: LogLimit,
    pub(super) protocol_errors: LogLimit,
    pub(crate) other_protocols: LogLimit,
    pub(super) stalled_readers: LogLimit,
    pub(crate) stalled_requests: LogLimit,
    pub(super) damaged_parts: LogLimit,
}

impl Refusals {
    pub(crate) fn new() -> Refusals {
        Refusals {
            permits: Arc::new(Semaphore::new(REFUSALS_MAX)),
            count: LogLimit::default(),
            peer: LogLimit::default(),
            memory: LogLimit::default(),
            failed_accepts: LogLimit::default(),
            versions: LogLimit::default(),
            protocol_errors: LogLimit::default(),
            other_protocols: LogLimit::default(),
            stalled_readers: LogLimit::default(),
            stalled_requests: LogLimit::default(),
            damaged_parts: LogLimit::default(),
        }
    }
}

/// Counts a refused connection, and logs it if a line is due. Returns a permit to answer it, or
/// `None` while too many others are being answered.
pub(crate) fn record(node: &NodeState, peer: &str, limit: ConnectionLimit) -> Option<OwnedSemaphorePermit> {
    node.metrics.connections_rejected.inc();
    let lines = match limit {
        ConnectionLimit::Count => &node.refusals.count,
        ConnectionLimit::Peer => &node.refusals.peer,
        ConnectionLimit::Memory => &node.refusals.memory,
    };
    if let Some(refused) = lines.record() {
        let options = node.store.options();
        match limit {
            ConnectionLimit::Count => tracing::warn!(
                %peer, refused, limit = options.connections_max,
                "connections refused: the node has as many as it may have; raise --max-connections [LRD0105]"
            ),
            ConnectionLimit::Peer => tracing::warn!(
                %peer, refused, limit = options.connections_per_peer(),
                "connections refused: their address has as many as it may have; raise --max-connections-per-peer [LRD0105]"
            ),
            ConnectionLimit::Memory => tracing::warn!(
                %peer, refused, limit_bytes = options.request_bytes,
                "connections refused: no memory left for them; raise --request-memory [LRD0105]"
            ),
        }
    }
    node.refusals.permits.clone().try_acquire_owned().ok()
}

/// Logs a failed accept if a line is due. The usual cause is a lack of descriptors.
pub(crate) fn record_failed_accept(node: &NodeState, error: &io::Error) {
    if let Some(failed) = node.refusals.failed_accepts.record() {
        tracing::warn!(
            %error, failed,
            "cannot accept a connection; if open files ran out, raise their limit (LimitNOFILE, ulimit -n) [LRD0107]"
        );
    }
}

/// Receives the first message of a refused client and answers it with the error *busy*.
pub(super) async fn answer<R: ByteSource, W: ByteSink>(limit: ConnectionLimit, read: R, writer: &mut FrameWriter<W>) {
    let answer = async {
        // Closing a socket with unread bytes resets it, and the client would lose the answer.
        let mut reader = FrameReader::new(read);
        let Some(head) = reader.head().await? else { return Ok(()) };
        if head.header.body_bytes > HELLO_BODY_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        reader.take_body(&head).await?;
        let message = match limit {
            ConnectionLimit::Count => "the node has no room for another connection; try again later",
            ConnectionLimit::Peer => "this address has too many connections to the node; try again later",
            ConnectionLimit::Memory => "the node has no memory for another connection; try again later",
        };
        let response = Response::Error { code: ErrorCode::Busy, message: message.into() };
        // No version was negotiated. All versions share this message.
        writer.send(response.frame(PROTOCOL_VERSION_MIN, head.header.request, None)).await
    };
    // A client that goes away, or is too slow, only misses the reason.
    let _: Result<io::Result<()>, _> = tokio::time::timeout(REFUSAL_TIMEOUT, answer).await;
}

/// Refuses a TCP connection beyond the limit of the node.
pub(crate) async fn refuse_tcp(stream: TcpStream, permit: OwnedSemaphorePermit, limit: ConnectionLimit) {
    let (read, write) = stream.into_split();
    answer(limit, read, &mut FrameWriter::new(write)).await;
    drop(permit);
}
