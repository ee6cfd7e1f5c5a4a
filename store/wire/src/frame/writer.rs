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

/// Sends frames on a stream and stamps each with its sequence number, so that the reader detects
/// dropped, repeated and reordered frames. Large payloads leave in fragments.
pub struct FrameWriter<S> {
    sink: S,
    batch: Batch,
    budget: YieldBudget,
    payload_progress: Arc<AtomicU64>,
}

impl<S: ByteSink> FrameWriter<S> {
    /// A writer at the start of a stream. Its sequence numbers begin with 0, as do those of the
    /// peer's [`FrameReader`](super::FrameReader).
    pub fn new(sink: S) -> Self {
        Self { sink, batch: Batch::default(), budget: YieldBudget::default(), payload_progress: Arc::default() }
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
        match self.sink.send(&slices[..count]).await? {
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
