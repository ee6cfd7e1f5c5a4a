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
/// Time between two looks at how far the peer has received, while the sink takes nothing.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

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
    /// The sink tells how far the peer has received.
    is_looking: bool,
    /// Bytes that the peer had not acknowledged at the last look.
    unacknowledged: Option<u64>,
    /// Time of the next look, while page bytes are on their way to the peer. Short frames do not
    /// delay it.
    look_at: Option<Instant>,
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
            is_looking: false,
            unacknowledged: None,
            look_at: None,
        }
    }

    /// Counter that grows while the sink takes bytes of pages or of long bodies, or the peer
    /// acknowledges them. Short frames do not count: they fit into the socket's buffer, even if the
    /// peer is dead.
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
            let sent = self.send_some().await?;
            self.budget.spend(sent).await;
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
        self.is_looking = self.sink.unacknowledged_bytes().is_some();
        loop {
            if self.look_at.is_some_and(|at| at <= Instant::now()) {
                self.look_after_payload();
            }
            self.batch.fill(&mut queue);
            if self.batch.is_empty() {
                let Some(frame) = self.next_frame(&mut queue).await else { return Ok(()) };
                self.batch.add(frame);
                continue;
            }
            self.send_some_within(stall).await?;
        }
    }

    /// Waits for a frame. While page bytes are on their way, it looks how far they have come: on a
    /// slow link, the last ones need longer than a silent peer may take.
    async fn next_frame(&mut self, queue: &mut FrameQueue) -> Option<QueuedFrame> {
        while let Some(look_at) = self.look_at {
            if let Ok(frame) = tokio::time::timeout_at(look_at, queue.next()).await {
                return frame;
            }
            self.look_after_payload();
        }
        queue.next().await
    }

    /// Looks for progress. Plans the next look, unless the peer has received all bytes.
    fn look_after_payload(&mut self) {
        self.look_for_progress();
        let is_on_the_way = self.unacknowledged.is_some_and(|bytes| bytes > 0);
        self.look_at = is_on_the_way.then(|| Instant::now() + LOOK_INTERVAL);
    }

    /// Sends part of the batch, unless the peer takes no byte for `stall`.
    async fn send_some_within(&mut self, stall: Duration) -> io::Result<()> {
        let mut until = Instant::now() + stall;
        let sent = loop {
            let look_at = if self.is_looking { until.min(Instant::now() + LOOK_INTERVAL) } else { until };
            // A dropped send has taken no bytes, so it can begin again.
            if let Ok(sent) = tokio::time::timeout_at(look_at, self.send_some()).await {
                break sent?;
            }
            // The next attempt may be short, although the link is slow.
            self.record_speed(0, LOOK_INTERVAL);
            // Any byte is progress. The socket of a link that was fast can hold many.
            if self.is_looking && self.look_for_progress() {
                until = Instant::now() + stall;
            } else if look_at == until {
                return Err(io::ErrorKind::TimedOut.into());
            }
        };
        // Without a limit: the bytes are gone, and a send that ends late must not be repeated.
        self.budget.spend(sent).await;
        Ok(())
    }

    /// Returns `true` if the peer has acknowledged bytes since the last look. A send in between may
    /// hide them. It is progress itself.
    fn look_for_progress(&mut self) -> bool {
        let after = self.sink.unacknowledged_bytes();
        let before = std::mem::replace(&mut self.unacknowledged, after);
        let has_progress = before.zip(after).is_some_and(|(before, after)| after < before);
        if has_progress {
            // Relaxed: the counter is only compared with itself.
            self.payload_progress.fetch_add(1, Ordering::Relaxed);
        }
        has_progress
    }

    fn record_speed(&mut self, bytes: usize, took: Duration) {
        if self.speed.record(bytes, took) {
            self.sink.limit_buffered(!self.speed.is_fast);
        }
    }

    /// Sends part of the batch: as much as the sink takes at once. Returns the number of bytes.
    ///
    /// Cancel safe: a dropped send has taken no bytes.
    async fn send_some(&mut self) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let count = self.batch.gather(&mut slices);
        let begin = Instant::now();
        let sent = self.sink.send(&slices[..count]).await?;
        let end = Instant::now();
        self.record_speed(sent, end - begin);
        if sent == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        if self.batch.record_sent(sent) {
            self.look_at = self.is_looking.then(|| end + LOOK_INTERVAL);
            // Relaxed: the counter is only compared with itself.
            self.payload_progress.fetch_add(sent as u64, Ordering::Relaxed);
        }
        Ok(sent)
    }
}
