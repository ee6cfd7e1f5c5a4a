//! The task of a connection: receives, sends and watches until the connection ends.

use super::dispatch::dispatch;
use super::multiplex::Connection;
use larder_format::codec::DecodeError;
use larder_runtime::now;
use larder_wire::{ByteSink, ByteSource, FrameQueue, FrameReader, FrameWriter, MAX_KEYS, Request, Response};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// Limit for receiving one payload after its header, and for sending one frame. A peer that stalls
/// for longer counts as dead.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a frame from the node after which the client probes it. An idle connection
/// therefore costs one small request in this time.
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
    // A task of its own, so that neither direction delays the other under load.
    let mut sending = AbortOnDropHandle::new(tokio::spawn(writer.send_all(queue, STALL_TIMEOUT)));
    let ended = tokio::select! {
        // A fixed order of polling keeps simulations replayable.
        biased;
        () = connection.closed() => Err(io::Error::other("a payload was not complete at its deadline")),
        silent = watch_for_silence(connection) => Err(silent),
        () = send_releases(connection) => Ok(()),
        error = rdma => Err(error),
        sent = &mut sending => sent.unwrap_or_else(|error| Err(io::Error::other(error))),
        received = receive(connection, &mut reader) => received,
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

/// Probes a node that sends nothing for [`PROBE_AFTER`]. Returns if the probe gets no answer: the
/// node's keys are then misses instead of waits.
async fn watch_for_silence(connection: &Arc<Connection>) -> io::Error {
    loop {
        let before = connection.outbox().progress();
        // Polls instead of a timer per frame: frames are far more frequent than probes.
        tokio::time::sleep(PROBE_AFTER).await;
        if connection.outbox().progress() != before {
            continue;
        }
        let answer = connection.request(&Request::Members, now() + PROBE_TIMEOUT).await;
        // A busy node may be sending a large payload instead of the answer.
        if answer.is_none() && connection.outbox().progress() == before {
            return io::Error::new(io::ErrorKind::TimedOut, "the node sent nothing for 5 s and ignored a probe");
        }
    }
}

async fn receive<S: ByteSource>(connection: &Arc<Connection>, reader: &mut FrameReader<S>) -> io::Result<()> {
    while let Some(header) = reader.next().await? {
        connection.outbox().record_progress();
        let response = Response::decode(connection.version(), header.kind, reader.body()).map_err(invalid_data)?;
        let handler = connection.pending().lock().begin_response(header.request);
        // Bounds the payload as well: a node that stalls within it blocks all other responses.
        let step = dispatch(connection, reader, &header, response, handler);
        let handler =
            tokio::time::timeout(STALL_TIMEOUT, step).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let cancelled = connection.pending().lock().end_response(header.request, handler);
        // The cancellation could not take the handler, so the node has not heard of it.
        if cancelled.is_some() {
            connection.send_detached(&Request::Cancel(header.request));
        }
    }
    Ok(())
}

fn invalid_data(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
