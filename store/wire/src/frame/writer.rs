//! Sending frames.

use super::{Frame, FrameQueue, YieldBudget};
use crate::stream::ByteSink;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;
use tokio::time::Instant;

/// Maximum bytes of one send. It bounds the time that one connection keeps the thread.
const SEND_BYTES: usize = 1 << 20;
/// Maximum frames in one batch. Each takes up to two slices of one vectored send.
const BATCH_FRAMES: usize = 32;
/// Batch size, in bytes, from which no frame with page bytes joins. An urgent frame then waits for
/// at most this much.
const BATCH_BYTES: usize = SEND_BYTES + SEND_BYTES / 2;

/// Sends frames on a stream and stamps each with its sequence number, so that the reader detects
/// dropped, repeated and reordered frames.
pub struct FrameWriter<S> {
    sink: S,
    sequence: u32,
    budget: YieldBudget,
}

impl<S: ByteSink> FrameWriter<S> {
    /// A writer at the start of a stream. Its sequence numbers begin with 0, as do those of the
    /// peer's [`FrameReader`](super::FrameReader).
    pub fn new(sink: S) -> Self {
        Self { sink, sequence: 0, budget: YieldBudget::default() }
    }

    /// Sends one frame. An error leaves the stream unusable, as does dropping the future: part of
    /// the frame may have been sent.
    pub async fn send(&mut self, frame: Frame) -> io::Result<()> {
        let frames = VecDeque::from([self.stamp(frame)]);
        let mut sent = 0;
        while sent < frames[0].len() {
            sent += self.send_some(&frames, sent).await?;
        }
        Ok(())
    }

    /// Sends queued frames in batches until the queue is closed. Each frame is dropped as soon as
    /// it has been sent.
    ///
    /// # Errors
    /// `TimedOut` if the peer takes longer than `stall` for one frame, or the sink's error.
    pub async fn send_all(mut self, queue: impl Into<FrameQueue>, stall: Duration) -> io::Result<()> {
        let mut queue = queue.into();
        let mut frames = VecDeque::with_capacity(BATCH_FRAMES);
        let mut batch_bytes = 0;
        // Bytes of the first frame that have been sent.
        let mut sent = 0;
        let mut deadline = Instant::now() + stall;
        loop {
            while frames.len() < BATCH_FRAMES
                && let Some(frame) = queue.take(batch_bytes < BATCH_BYTES)
            {
                batch_bytes += frame.len();
                frames.push_back(self.stamp(frame));
            }
            if frames.is_empty() {
                let Some(frame) = queue.next().await else { return Ok(()) };
                batch_bytes += frame.len();
                frames.push_back(self.stamp(frame));
                // An idle connection is not stalled: the clock starts with the frame.
                deadline = Instant::now() + stall;
                continue;
            }
            let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
            sent += tokio::time::timeout_at(deadline, self.send_some(&frames, sent)).await.map_err(timed_out)??;
            while let Some(first) = frames.front().map(Frame::len)
                && sent >= first
            {
                sent -= first;
                batch_bytes -= first;
                frames.pop_front();
                deadline = Instant::now() + stall;
            }
        }
    }

    fn stamp(&mut self, mut frame: Frame) -> Frame {
        frame.number(self.sequence);
        self.sequence = self.sequence.wrapping_add(1);
        frame
    }

    /// Sends part of the batch, from byte `sent` on. Returns the number of bytes that the sink
    /// took.
    async fn send_some(&mut self, frames: &VecDeque<Frame>, sent: usize) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); 2 * BATCH_FRAMES];
        let count = gather(frames, sent, &mut slices);
        match self.sink.send(&slices[..count]).await? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            now => {
                self.budget.spend(now).await;
                Ok(now)
            }
        }
    }
}

/// Collects the slices of the next send: up to [`SEND_BYTES`] from byte `sent` on, which lies in
/// the first frame. Returns the number of slices.
fn gather<'a>(frames: &'a VecDeque<Frame>, sent: usize, slices: &mut [IoSlice<'a>]) -> usize {
    let mut skip = sent;
    let waiting = frames.iter().map(Frame::len).sum::<usize>() - sent;
    // The last mebibyte goes in halves: the peer copies out one while this side copies in the
    // other.
    let limit = if waiting > SEND_BYTES + SEND_BYTES / 4 { SEND_BYTES } else { SEND_BYTES / 2 };
    let mut count = 0;
    let mut room = limit;
    let mut only_short = true;
    for frame in frames {
        let has_payload = frame.payload_len > 0;
        // Short frames go alone. A sink that limits page bytes would otherwise delay them too.
        if room == 0 || (only_short && has_payload && count > 0) {
            break;
        }
        only_short &= !has_payload;
        for bytes in [frame.head.as_slice(), frame.payload_bytes()] {
            let left = &bytes[skip.min(bytes.len())..];
            skip -= bytes.len() - left.len();
            let left = &left[..left.len().min(room)];
            room -= left.len();
            if !left.is_empty() {
                slices[count] = IoSlice::new(left);
                count += 1;
            }
        }
    }
    count
}
