//! Frames on their way to the node.
//!
//! Invariants:
//! - Control frames never wait behind the bytes of puts: they have their own queue.
//! - At most [`QUEUED_BYTES_MAX`] payload bytes wait on one connection.
//! - Frames of one queue leave in the order in which they were added.
//! - Parts of a put that was abandoned occupy the stream for at most one fragment more.

use larder_runtime::now;
use larder_wire::{Entry, Frame, FrameQueue, Payload, QueuedPayloads, Request};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

const QUEUE_FRAMES: usize = 256;
/// Limit of payload bytes that wait to leave on one connection. Callers beyond it wait, which slows
/// writers down to the node's pace.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Payload bytes per permit. A semaphore counts in `u32`, and finer units gain nothing.
const QUEUED_UNIT_BYTES: usize = 4096;
const QUEUED_UNITS_MAX: usize = QUEUED_BYTES_MAX / QUEUED_UNIT_BYTES;

pub(super) struct Outbox {
    /// Negotiated protocol version, in which requests are encoded.
    version: u16,
    control: mpsc::Sender<Frame>,
    /// Parts and commits, which must keep their order.
    bulk: mpsc::Sender<Frame>,
    payload_credit: Arc<Semaphore>,
    payloads: Arc<QueuedPayloads>,
}

impl Outbox {
    pub(super) fn new(version: u16) -> (Outbox, FrameQueue) {
        let (control, control_queue) = mpsc::channel(QUEUE_FRAMES);
        let (bulk, bulk_queue) = mpsc::channel(QUEUE_FRAMES);
        let payload_credit = Arc::new(Semaphore::new(QUEUED_UNITS_MAX));
        let outbox = Outbox { version, control, bulk, payload_credit, payloads: Arc::default() };
        (outbox, FrameQueue::new(control_queue, bulk_queue))
    }

    pub(super) fn queued_units(&self) -> usize {
        QUEUED_UNITS_MAX - self.payload_credit.available_permits()
    }

    fn queue(&self, request: &Request) -> &mpsc::Sender<Frame> {
        match request {
            Request::Part { .. } | Request::Commit(_) => &self.bulk,
            _ => &self.control,
        }
    }

    /// Queues a message without a response if the queue has room. Returns `false` if it has none.
    pub(super) fn try_send(&self, request: &Request) -> bool {
        self.control.try_send(request.frame(self.version, 0, 0, None)).is_ok()
    }

    /// Queues a numbered request, and waits for room until `deadline`. `timeout_ms` is the time
    /// that the node has for its answer. Returns `false` on timeout, or if the connection ended.
    pub(super) async fn send(&self, request: &Request, number: u64, timeout_ms: u32, deadline: Instant) -> bool {
        let send = self.queue(request).send(request.frame(self.version, number, timeout_ms, None));
        matches!(tokio::time::timeout_at(deadline.into(), send).await, Ok(Ok(())))
    }

    /// Queues a part of a put with its payload, and waits for room until `deadline`. Returns
    /// `false` on timeout, or if the connection ended. What has not left at `deadline`, or when the
    /// put is abandoned, is not sent any more.
    pub(super) async fn send_payload<P>(&self, put: Entry, request: &Request, bytes: P, deadline: Instant) -> bool
    where
        P: AsRef<[u8]> + Send + Sync + 'static,
    {
        // A payload above the limit waits for all of the credit, and then leaves alone.
        let units = bytes.as_ref().len().div_ceil(QUEUED_UNIT_BYTES).min(QUEUED_UNITS_MAX);
        let send = async {
            // Credit first, then room in the queue: a frame in the queue always can leave.
            let credit = self.payload_credit.clone().acquire_many_owned(units as u32).await.ok()?;
            let payload: Payload = Box::new(QueuedPayload { bytes, _credit: credit });
            let mut frame = request.frame(self.version, 0, 0, Some(payload));
            let guard = self.payloads.add(put.request);
            frame.abandon_when(move || guard.is_abandoned() || now() >= deadline);
            self.queue(request).send(frame).await.ok()
        };
        matches!(tokio::time::timeout_at(deadline.into(), send).await, Ok(Some(())))
    }

    /// Abandons the queued parts of a Reserve.
    pub(super) fn abandon_parts(&self, reserve: u64) {
        self.payloads.abandon(reserve);
    }

    /// Queues a control message and waits for room without a deadline. Returns `false` once the
    /// connection has ended.
    pub(super) async fn send_control(&self, request: &Request) -> bool {
        self.control.send(request.frame(self.version, 0, 0, None)).await.is_ok()
    }

    /// Queues a control message, in a task of its own if the queue is full. The message is lost
    /// only if the connection ends.
    pub(super) fn send_detached(&self, request: &Request) {
        let Err(TrySendError::Full(frame)) = self.control.try_send(request.frame(self.version, 0, 0, None)) else {
            return;
        };
        // Destructors call this, perhaps after the runtime has shut down.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let control = self.control.clone();
            runtime.spawn(async move { control.send(frame).await });
        }
    }
}

/// Payload of a frame. It returns its credit when it was written, or when the connection ended.
struct QueuedPayload<P> {
    bytes: P,
    _credit: OwnedSemaphorePermit,
}

impl<P: AsRef<[u8]>> AsRef<[u8]> for QueuedPayload<P> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}
