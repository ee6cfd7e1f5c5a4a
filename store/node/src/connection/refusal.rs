//! Refusal of connections beyond a limit of the node.
//!
//! Invariants:
//! - The node answers Hello before it closes a refused connection. A client that learned nothing
//!   would take the node for dead.
//! - At most [`REFUSALS_MAX`] refused connections are open. Further ones are closed without an
//!   answer. They are counted like the others.
//! - The log gets one line per [`LOG_INTERVAL`] and limit, however many clients try.

use super::handshake::HELLO_BODY_MAX;
use crate::state::NodeState;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use larder_wire::{ByteSink, ByteSource, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION_MIN, Response};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of refused connections that wait for their answer. Each may take a Hello of
/// 16 KiB, so together they take at most 1 MiB.
const REFUSALS_MAX: usize = 64;
/// Maximum time to receive Hello and to answer it.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum time between two log lines about the same limit.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Limit that a refused connection exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionLimit {
    Count,
    /// Connections of one address, or over local sockets.
    Peer,
    Memory,
}

/// Refusals of a node: the places for answers, and the lines logged so far.
pub(crate) struct Refusals {
    permits: Arc<Semaphore>,
    count: Mutex<LogLines>,
    peer: Mutex<LogLines>,
    memory: Mutex<LogLines>,
    failed_accepts: Mutex<LogLines>,
}

#[derive(Debug, Default)]
struct LogLines {
    last: Option<Instant>,
    refused: u64,
}

impl LogLines {
    /// Counts a refusal. Returns the number since the last line if a new one is due.
    fn record(&mut self, at: Instant) -> Option<u64> {
        self.refused += 1;
        if self.last.is_some_and(|last| at.saturating_duration_since(last) < LOG_INTERVAL) {
            return None;
        }
        self.last = Some(at);
        Some(std::mem::take(&mut self.refused))
    }
}

impl Refusals {
    pub(crate) fn new() -> Refusals {
        Refusals {
            permits: Arc::new(Semaphore::new(REFUSALS_MAX)),
            count: Mutex::default(),
            peer: Mutex::default(),
            memory: Mutex::default(),
            failed_accepts: Mutex::default(),
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
    if let Some(refused) = lines.lock().record(now()) {
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
    if let Some(failed) = node.refusals.failed_accepts.lock().record(now()) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_logged_once_per_interval_with_their_number() {
        let mut lines = LogLines::default();
        let start = now();
        assert_eq!(lines.record(start), Some(1), "the first one at once");
        for _ in 0..9 {
            assert_eq!(lines.record(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(lines.record(start + LOG_INTERVAL), Some(10));
        assert_eq!(lines.record(start + LOG_INTERVAL), None);
    }
}
