//! The task of a connection: receives, sends and watches until the connection ends.

use super::multiplex::Connection;
use super::receive::{STALL_TIMEOUT, receive};
use larder_runtime::{fail_point, now};
use larder_wire::{ByteSink, ByteSource, FrameQueue, FrameReader, FrameWriter, MAX_KEYS, Request, VERSION_PING};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// Time without a byte in either direction after which the client probes the node. An idle
/// connection therefore costs two frames of 32 bytes in this time.
const PROBE_AFTER: Duration = Duration::from_secs(2);
/// Limit for the node's answer to the probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// Moves frames until the connection ends. Returns the reason. `rdma` maintains the RDMA channels,
/// and ends only if the connection is useless without them.
pub(super) async fn run<R: ByteSource, W: ByteSink>(
    connection: &Arc<Connection>,
    mut reader: FrameReader<R>,
    writer: FrameWriter<W>,
    queue: FrameQueue,
    rdma: impl Future<Output = io::Error>,
) -> io::Error {
    let responses = AtomicU64::new(0);
    let progress = Progress { bytes: [reader.received_bytes(), writer.payload_progress()], responses: &responses };
    // A task of its own, so that neither direction delays the other under load.
    let mut sending = AbortOnDropHandle::new(tokio::spawn(writer.send_all(queue, STALL_TIMEOUT)));
    let ended = tokio::select! {
        // A fixed order of polling keeps simulations replayable.
        biased;
        () = connection.closed() => Err(io::Error::other("the client closed the connection")),
        silent = watch_for_silence(connection, &progress) => Err(silent),
        () = send_releases(connection) => Ok(()),
        error = rdma => Err(error),
        sent = &mut sending => sent.unwrap_or_else(|error| Err(io::Error::other(error))),
        received = receive(connection, &mut reader, &responses) => received,
    };
    ended.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Sends releases of held pages in batches, until the connection ends.
async fn send_releases(connection: &Connection) {
    loop {
        let entries = connection.releases().take(MAX_KEYS).await;
        if !connection.outbox().send_control(&Request::Release(entries)).await {
            return;
        }
    }
}

/// Signs of life of the node. Bytes count, not responses: a large one takes long on a slow link.
struct Progress<'a> {
    /// Received from the node, and page bytes that the socket takes or the node acknowledges. A
    /// dead node acknowledges none, and the socket takes none once its buffer is full.
    bytes: [Arc<AtomicU64>; 2],
    responses: &'a AtomicU64,
}

impl Progress<'_> {
    /// Relaxed: the sum is only compared with itself, and orders nothing.
    fn get(&self) -> u64 {
        if fail_point!("client.silence-counts-frames") {
            return self.responses.load(Ordering::Relaxed);
        }
        self.bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
    }
}

/// Probes a node after [`PROBE_AFTER`] without progress. Returns if there is still none at the end
/// of the probe: the node's keys are then misses instead of waits.
async fn watch_for_silence(connection: &Arc<Connection>, progress: &Progress<'_>) -> io::Error {
    loop {
        let before = progress.get();
        // Polls instead of a timer per byte: bytes are far more frequent than probes.
        tokio::time::sleep(PROBE_AFTER).await;
        if progress.get() != before {
            continue;
        }
        let probe = if connection.version() >= VERSION_PING { Request::Ping } else { Request::Members };
        let answer = connection.request(&probe, now() + PROBE_TIMEOUT).await;
        // A busy node may be sending a large payload instead of the answer.
        if answer.is_none() && progress.get() == before {
            return io::Error::new(io::ErrorKind::TimedOut, "the node sent nothing for 5 s and ignored a probe");
        }
    }
}
