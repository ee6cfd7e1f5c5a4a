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

pub(super) enum QueuedFrame {
    Urgent(Frame),
    Bulk(Frame),
}

impl From<mpsc::Receiver<Frame>> for FrameQueue {
    /// A queue with one priority. All frames count as bulk, so they keep their order.
    fn from(only: mpsc::Receiver<Frame>) -> Self {
        Self::new(mpsc::channel(1).1, only)
    }
}

impl FrameQueue {
    /// A queue with two priorities. It ends when both senders are closed and all frames are taken.
    pub fn new(urgent: mpsc::Receiver<Frame>, bulk: mpsc::Receiver<Frame>) -> Self {
        Self { urgent, bulk, next_bulk: None }
    }

    pub(super) fn take_urgent(&mut self) -> Option<Frame> {
        self.urgent.try_recv().ok()
    }

    /// Takes a frame that waits now. Without `allow_payload` it leaves bulk frames that carry page
    /// bytes.
    pub(super) fn take(&mut self, allow_payload: bool) -> Option<QueuedFrame> {
        if self.next_bulk.is_none() {
            self.next_bulk = self.bulk.try_recv().ok();
        }
        // Polled after the bulk queue: a frame that became urgent before that bulk frame was queued
        // is seen here.
        if let Some(frame) = self.take_urgent() {
            return Some(QueuedFrame::Urgent(frame));
        }
        let bulk = self.next_bulk.take_if(|frame| allow_payload || frame.payload_len == 0);
        bulk.map(QueuedFrame::Bulk)
    }

    pub(super) async fn next(&mut self) -> Option<QueuedFrame> {
        if self.next_bulk.is_none() {
            tokio::select! {
                biased;
                Some(frame) = self.urgent.recv() => return Some(QueuedFrame::Urgent(frame)),
                Some(frame) = self.bulk.recv() => self.next_bulk = Some(frame),
                else => return None,
            }
        }
        self.take(true)
    }
}
