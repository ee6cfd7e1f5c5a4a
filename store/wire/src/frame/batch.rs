//! Order of the frames that a writer sends next, and their fragments. A queued frame is a *message*
//! here. It becomes one or more *segments*, the frames of the stream.
//!
//! Invariants:
//! - A frame whose first byte was sent keeps its place and its sequence number. All others may
//!   still be overtaken by an urgent frame, or be dropped with their payload.
//! - The fragments of a payload stand together. Only urgent frames come between them.
//! - A payload that was begun ends with its last byte, or with an empty fragment.

use super::queue::QueuedFrame;
use super::{
    CRC_AT, FRAGMENT_BYTES, Frame, FrameQueue, HEADER_BYTES, Held, IsAbandoned, Payload, REQUEST_AT, YIELD_BYTES,
    fragment_head,
};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

/// Maximum bytes of one send. It bounds the time that one connection keeps the thread.
const SEND_BYTES: usize = YIELD_BYTES;
/// Maximum frames in one batch. Each takes up to two slices of one vectored send.
const BATCH_FRAMES: usize = 32;
/// Length up to which frames without a payload are short. A link of 64 KB/s carries one within the
/// silence after which a peer counts as dead.
const SHORT_BYTES: usize = 64 << 10;
/// Maximum number of slices that [`Batch::gather`] fills.
pub(super) const SLICES_MAX: usize = 2 * BATCH_FRAMES;
/// Size, in bytes, from which a batch takes no more page bytes.
// Above one and a quarter sends, from which on `gather` takes whole sends. Not much above, because
// `gather` numbers all segments of the batch anew for each send.
const BATCH_BYTES: usize = SEND_BYTES + SEND_BYTES / 2;

/// Frames in the order in which they are sent.
#[derive(Default)]
pub(super) struct Batch {
    segments: VecDeque<Segment>,
    bytes: usize,
    /// Bytes of the first segment that have been sent.
    sent: usize,
    /// Sequence number of the first segment.
    sequence: u32,
    cutting: Option<Cutting>,
}

/// A frame of the stream: header and body, then a piece of a payload.
struct Segment {
    head: Vec<u8>,
    /// Sequence number that the check in `head` contains now, by XOR.
    number: u32,
    is_urgent: bool,
    message: Arc<Message>,
    bytes: Range<usize>,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Whole,
    /// Head of a message whose payload follows in fragments.
    Begin,
    /// Piece of the payload, or an empty piece that ends an abandoned one.
    Fragment,
}

/// Payload that the segments of one message share. It is dropped with the last of them.
struct Message {
    payload: Option<Payload>,
    is_abandoned: Option<Box<IsAbandoned>>,
    _held: Option<Held>,
}

impl Message {
    fn is_abandoned(&self) -> bool {
        self.is_abandoned.as_ref().is_some_and(|is_abandoned| is_abandoned())
    }
}

/// A message whose remaining fragments are not in the batch yet.
struct Cutting {
    message: Arc<Message>,
    request: u64,
    rest: Range<usize>,
}

impl Segment {
    fn len(&self) -> usize {
        self.head.len() + self.bytes.len()
    }

    fn payload(&self) -> &[u8] {
        self.message.payload.as_ref().map_or(&[], |payload| &(**payload).as_ref()[self.bytes.clone()])
    }

    /// Returns `true` for page bytes and for the head before them. All others are short frames,
    /// whichever queue they come from.
    fn is_bulk(&self) -> bool {
        self.role == Role::Begin || !self.bytes.is_empty()
    }

    /// Stamps the segment with its sequence number, instead of an earlier one.
    fn number(&mut self, number: u32) {
        let change = (self.number ^ number).to_le_bytes();
        self.head[CRC_AT..HEADER_BYTES].iter_mut().zip(change).for_each(|(byte, change)| *byte ^= change);
        self.number = number;
    }
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Takes waiting frames until the batch is full, and drops payloads that were abandoned.
    pub(super) fn fill(&mut self, queue: &mut FrameQueue) {
        self.drop_abandoned();
        while self.segments.len() < BATCH_FRAMES {
            let allow_payload = self.bytes < BATCH_BYTES;
            if self.cutting.is_none() {
                match queue.take(allow_payload) {
                    Some(frame) => self.add(frame),
                    None => return,
                }
            } else if let Some(frame) = queue.take_urgent() {
                self.add(QueuedFrame::Urgent(frame));
            } else if allow_payload {
                self.cut();
            } else {
                return;
            }
        }
    }

    pub(super) fn add(&mut self, frame: QueuedFrame) {
        let (frame, is_urgent) = match frame {
            QueuedFrame::Urgent(frame) => (frame, true),
            QueuedFrame::Bulk(frame) => (frame, false),
        };
        let Frame { head, payload, payload_len, is_fragmented, is_abandoned, held } = frame;
        let message = Arc::new(Message { payload, is_abandoned, _held: held });
        if message.is_abandoned() {
            return;
        }
        let role = if is_fragmented { Role::Begin } else { Role::Whole };
        let bytes = if is_fragmented { 0..0 } else { 0..payload_len };
        if is_fragmented {
            debug_assert!(!is_urgent && self.cutting.is_none(), "payloads follow each other in the bulk queue");
            self.cutting = Some(Cutting { message: message.clone(), request: request_of(&head), rest: 0..payload_len });
        }
        let segment = Segment { head, number: 0, is_urgent, message, bytes, role };
        // Urgent frames keep their order, and go before all that has not begun.
        let begun = usize::from(self.sent > 0);
        let at = match is_urgent {
            true => begun + self.segments.iter().skip(begun).take_while(|segment| segment.is_urgent).count(),
            false => self.segments.len(),
        };
        self.insert(at, segment);
    }

    fn insert(&mut self, at: usize, segment: Segment) {
        self.bytes += segment.len();
        self.segments.insert(at, segment);
    }

    /// Appends the next fragment of the message that is being cut.
    fn cut(&mut self) {
        let Some(cutting) = &mut self.cutting else { return };
        let end = cutting.rest.end.min(cutting.rest.start + FRAGMENT_BYTES);
        let bytes = cutting.rest.start..end;
        cutting.rest.start = end;
        let head = fragment_head(cutting.request, bytes.len());
        let message = cutting.message.clone();
        let is_last = cutting.rest.is_empty();
        let segment = Segment { head, number: 0, is_urgent: false, message, bytes, role: Role::Fragment };
        if is_last {
            self.cutting = None;
        }
        self.insert(self.segments.len(), segment);
    }

    /// Removes segments of abandoned payloads that have not begun, and ends the open one.
    fn drop_abandoned(&mut self) {
        let begun = usize::from(self.sent > 0);
        let mut at = begun;
        while let Some(segment) = self.segments.get(at) {
            if segment.message.is_abandoned() {
                at = self.abandon(begun, at);
            } else {
                at += 1;
            }
        }
        // The loop found no unsent segment of this message, so the stream is inside its payload.
        if let Some(cutting) = self.cutting.take_if(|cutting| cutting.message.is_abandoned()) {
            self.insert(self.segments.len(), end_segment(cutting.request));
        }
    }

    /// Abandons the message of segment `at`. Returns the index of the first segment behind it.
    fn abandon(&mut self, begun: usize, at: usize) -> usize {
        let message = self.segments[at].message.clone();
        let is_of_message = |segment: &Segment| Arc::ptr_eq(&segment.message, &message);
        let first = begun + self.segments.iter().skip(begun).take_while(|segment| !is_of_message(segment)).count();
        let request = request_of(&self.segments[first].head);
        // The stream has the head of the message already, and perhaps fragments of it.
        let is_open = self.segments[first].role == Role::Fragment;
        let mut index = 0;
        self.segments.retain(|segment| {
            index += 1;
            index <= begun || !is_of_message(segment)
        });
        self.bytes = self.segments.iter().map(Segment::len).sum();
        self.cutting.take_if(|cutting| Arc::ptr_eq(&cutting.message, &message));
        if is_open {
            self.insert(first, end_segment(request));
            return first + 1;
        }
        first
    }

    /// Collects the slices of the next send: up to [`SEND_BYTES`] from the first unsent byte on.
    /// Returns the number of slices.
    pub(super) fn gather<'a>(&'a mut self, slices: &mut [IoSlice<'a>; SLICES_MAX]) -> usize {
        for (segment, number) in self.segments.iter_mut().zip(0..) {
            segment.number(self.sequence.wrapping_add(number));
        }
        let mut skip = self.sent;
        let waiting = self.bytes - self.sent;
        // The last bytes, up to a quarter more than one send, go in half sends: the peer copies out
        // one while this side copies in the other.
        let limit = if waiting > SEND_BYTES + SEND_BYTES / 4 { SEND_BYTES } else { SEND_BYTES / 2 };
        let mut count = 0;
        let mut room = limit;
        let mut only_short = true;
        for segment in &self.segments {
            // Short frames go alone. A sink that limits page bytes would otherwise delay them too.
            if room == 0 || (only_short && segment.is_bulk() && count > 0) {
                break;
            }
            only_short &= !segment.is_bulk();
            for bytes in [segment.head.as_slice(), segment.payload()] {
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

    /// Records that the sink took `bytes` bytes, and drops the segments that have left. Returns
    /// `true` if bytes of a bulk segment or of a long body were among them.
    pub(super) fn record_sent(&mut self, bytes: usize) -> bool {
        self.sent += bytes;
        let mut had_payload = false;
        while let Some(first) = self.segments.front() {
            let length = first.len();
            had_payload |= self.sent > 0 && (first.is_bulk() || length > SHORT_BYTES);
            if self.sent < length {
                break;
            }
            self.sent -= length;
            self.bytes -= length;
            self.sequence = self.sequence.wrapping_add(1);
            self.segments.pop_front();
        }
        had_payload
    }
}

fn request_of(head: &[u8]) -> u64 {
    u64::from_le_bytes(*head[REQUEST_AT..].first_chunk().expect("a frame has a header"))
}

/// An empty fragment, which ends the open payload.
fn end_segment(request: u64) -> Segment {
    let message = Arc::new(Message { payload: None, is_abandoned: None, _held: None });
    let head = fragment_head(request, 0);
    Segment { head, number: 0, is_urgent: false, message, bytes: 0..0, role: Role::Fragment }
}
