//! Frames that wait for a stream, at two priorities.

use super::Frame;
use tokio::sync::mpsc;

/// Frames that wait to be sent on one stream: urgent ones first, bulk data after them.
///
/// Invariants:
/// - Each queue keeps its order.
/// - A frame that entered the urgent queue before another entered the bulk queue is sent first.
pub struct FrameQueue {
    urgent: mpsc::Receiver<Frame>,
    bulk: mpsc::Receiver<Frame>,
    /// Head of the bulk queue. It waits here until it may be sent.
    next_bulk: Option<Frame>,
}

impl From<mpsc::Receiver<Frame>> for FrameQueue {
    /// A queue with one priority. All frames count as urgent, so they keep their order.
    fn from(only: mpsc::Receiver<Frame>) -> Self {
        Self::new(only, mpsc::channel(1).1)
    }
}

impl FrameQueue {
    /// A queue with two priorities. It ends when both senders are closed and all frames are taken.
    pub fn new(urgent: mpsc::Receiver<Frame>, bulk: mpsc::Receiver<Frame>) -> Self {
        Self { urgent, bulk, next_bulk: None }
    }

    /// Takes a frame that waits now. Without `allow_payload` it leaves bulk frames that carry page
    /// bytes.
    pub(super) fn take(&mut self, allow_payload: bool) -> Option<Frame> {
        if self.next_bulk.is_none() {
            self.next_bulk = self.bulk.try_recv().ok();
        }
        // Polled after the bulk queue: a frame that became urgent before that bulk frame was queued
        // is seen here.
        let urgent = self.urgent.try_recv().ok();
        urgent.or_else(|| self.next_bulk.take_if(|frame| allow_payload || frame.payload_len == 0))
    }

    pub(super) async fn next(&mut self) -> Option<Frame> {
        if self.next_bulk.is_none() {
            tokio::select! {
                biased;
                Some(frame) = self.urgent.recv() => return Some(frame),
                Some(frame) = self.bulk.recv() => self.next_bulk = Some(frame),
                else => return None,
            }
        }
        self.take(true)
    }
}
