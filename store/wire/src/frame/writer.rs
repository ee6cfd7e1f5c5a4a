//! Sending frames.

use super::batch::{Batch, SLICES_MAX};
use super::queue::QueuedFrame;
use super::{Frame, FrameQueue, YieldBudget};
use crate::stream::ByteSink;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Time of one send from which on the link counts as slow.
const SLOW_SEND: Duration = Duration::from_millis(100);
/// Bytes that a link takes in [`SLOW_SEND`] at least to count as fast: 80 MB/s.
const FAST_BYTES: u64 = 8 << 20;

/// Speed of the link, as far as it matters for the sink's buffer. A link counts as slow until it
/// has proved fast: a buffer that is filled already cannot be limited any more.
#[derive(Default)]
struct LinkSpeed {
    is_fast: bool,
    sent_bytes: u64,
    sending: Duration,
}

impl LinkSpeed {
    /// Records one send. Returns `true` if the judgement changed.
    fn record(&mut self, bytes: usize, took: Duration) -> bool {
        let was_fast = self.is_fast;
        self.sent_bytes += bytes as u64;
        self.sending += took;
        if self.sending >= SLOW_SEND {
            // Not by many short sends alone, so an idle link stays fast.
            self.is_fast &= took < SLOW_SEND;
            self.sent_bytes = 0;
            self.sending = Duration::ZERO;
        } else if self.sent_bytes >= FAST_BYTES {
            self.is_fast = true;
            self.sent_bytes = 0;
            self.sending = Duration::ZERO;
        }
        self.is_fast != was_fast
    }
}

/// Sends frames on a stream and stamps each with its sequence number, so that the reader detects
/// dropped, repeated and reordered frames. Large payloads leave in fragments.
pub struct FrameWriter<S> {
    sink: S,
    batch: Batch,
    budget: YieldBudget,
    payload_progress: Arc<AtomicU64>,
    speed: LinkSpeed,
}

impl<S: ByteSink> FrameWriter<S> {
    /// A writer at the start of a stream. Its sequence numbers begin with 0, as do those of the
    /// peer's [`FrameReader`](super::FrameReader).
    pub fn new(sink: S) -> Self {
        Self {
            sink,
            batch: Batch::default(),
            budget: YieldBudget::default(),
            payload_progress: Arc::default(),
            speed: LinkSpeed::default(),
        }
    }

    /// Counter that grows while the sink takes page bytes. Short frames do not count: they fit into
    /// the socket's buffer, even if the peer is dead.
    pub fn payload_progress(&self) -> Arc<AtomicU64> {
        self.payload_progress.clone()
    }

    /// Sends one frame. An error leaves the stream unusable, as does dropping the future: part of
    /// the frame may have been sent.
    pub async fn send(&mut self, frame: Frame) -> io::Result<()> {
        // A closed queue without frames: it only lets the batch cut its fragments.
        let mut queue = FrameQueue::from(mpsc::channel(1).1);
        self.batch.add(QueuedFrame::Bulk(frame));
        loop {
            self.batch.fill(&mut queue);
            if self.batch.is_empty() {
                return Ok(());
            }
            self.send_some().await?;
        }
    }

    /// Sends queued frames in batches until the queue is closed. Each frame is dropped as soon as
    /// it has been sent.
    ///
    /// # Errors
    /// `TimedOut` if the peer takes no byte for `stall`, or the sink's error.
    pub async fn send_all(mut self, queue: impl Into<FrameQueue>, stall: Duration) -> io::Result<()> {
        let mut queue = queue.into();
        self.sink.limit_buffered(true);
        loop {
            self.batch.fill(&mut queue);
            if self.batch.is_empty() {
                let Some(frame) = queue.next().await else { return Ok(()) };
                self.batch.add(frame);
                continue;
            }
            // Any byte is progress: the time starts anew with each send.
            let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
            tokio::time::timeout_at(Instant::now() + stall, self.send_some()).await.map_err(timed_out)??;
        }
    }

    /// Sends part of the batch: as much as the sink takes at once.
    async fn send_some(&mut self) -> io::Result<()> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let count = self.batch.gather(&mut slices);
        let begin = Instant::now();
        let sent = self.sink.send(&slices[..count]).await?;
        if self.speed.record(sent, begin.elapsed()) {
            self.sink.limit_buffered(!self.speed.is_fast);
        }
        match sent {
            0 => Err(io::ErrorKind::WriteZero.into()),
            now => {
                if self.batch.record_sent(now) {
                    // Relaxed: the counter is only compared with itself.
                    self.payload_progress.fetch_add(now as u64, Ordering::Relaxed);
                }
                self.budget.spend(now).await;
                Ok(())
            }
        }
    }
}
