//! Frames: header, body, payload.
//!
//! Invariants:
//! - A reader accepts frame *n* of a stream only as frame *n*: the sequence number is part of the
//!   check. So a stream that drops, repeats or reorders frames fails instead of being misread.
//! - Lengths of a header are checked against their limits before anything is allocated by them.
//! - Page bytes are never copied on the way out, and on the way in only the few that arrive with a
//!   header.
//! - At most one payload per direction is *open*: begun and neither complete nor abandoned. Between
//!   its fragments only frames without payload travel.
//!
//! Layout: this file has the header and the frame, `reader` and `writer` the two directions of a
//! stream, `queue` the frames that wait for a writer, `batch` their order and their fragments,
//! `abandon` the payloads that no request needs any more.

mod abandon;
mod batch;
mod queue;
mod reader;
mod writer;

pub use abandon::{PayloadGuard, QueuedPayloads};
pub use queue::FrameQueue;
pub use reader::{FrameHead, FrameReader, Piece};
pub use writer::FrameWriter;

use crate::VERSION_FRAGMENTS;

use larder_format::MAX_PAGE_BYTES;
use larder_format::codec::{DecodeError, Put, Reader};
use std::io;
use std::sync::Arc;

/// Length of a frame header in bytes. All headers have this length, so a reader knows the lengths
/// of body and payload after that many bytes.
pub const HEADER_BYTES: usize = 32;
/// Maximum length of a body in bytes. Page bytes travel as payload, so a body holds only keys, CRCs
/// and text.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// First capacity of the buffer for a body, in bytes. Most bodies fit, and then never grow it.
pub(crate) const BODY_ROOM_BYTES: usize = 128;

/// Maximum payload bytes of a fragment, and of a frame that carries its payload itself. Short
/// frames and cancellations wait for at most one fragment that has begun. At 64 KB/s that takes
/// 4 s.
pub const FRAGMENT_BYTES: usize = 256 << 10;

const MAGIC: [u8; 4] = *b"LRDR";
const FLAGS_AT: usize = 5;
const REQUEST_AT: usize = 8;
/// Header flag of a frame whose payload follows in fragments.
const FRAGMENTED: u8 = 1;
/// Header flag of a fragment: a frame without body that continues the open payload. Its kind is 0.
const FRAGMENT: u8 = 2;
/// Offset of the check in the header. The check covers the bytes before it.
const CRC_AT: usize = 28;
/// Bytes that a task moves before it yields: some 200 µs of copying. The runtime's own budget
/// counts operations, so it would take a mebibyte for one small step.
const YIELD_BYTES: usize = 1 << 20;

/// A decoded frame header. Its lengths are within their limits, and its check is verified together
/// with the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Kind of the message in the body.
    pub kind: u8,
    /// Request number. Every response repeats it, so that responses may arrive in any order.
    pub request: u64,
    /// Length of the body in bytes, at most [`MAX_BODY_BYTES`].
    pub body_bytes: u32,
    /// Length of the payload in bytes, at most [`MAX_PAGE_BYTES`]. The payload may be in this frame
    /// or in fragments after it.
    pub payload_bytes: u32,
    /// Time left to the request, in milliseconds. 0 in responses.
    pub deadline_ms: u32,
    flags: u8,
    crc: u32,
}

impl FrameHeader {
    /// Decodes a header and checks its lengths. The caller checks the CRC once it has the body.
    ///
    /// # Errors
    /// The magic is wrong, reserved bytes are set, a length is above its limit, or the flags do not
    /// fit the lengths.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>("frame magic")? != MAGIC {
            return Err(DecodeError::Invalid("frame magic"));
        }
        let kind = reader.u8("kind")?;
        let flags = reader.u8("flags")?;
        if reader.array::<2>("reserved bytes")? != [0; 2] {
            return Err(DecodeError::Invalid("reserved bytes"));
        }
        let request = reader.u64("request")?;
        let body_bytes = reader.count(MAX_BODY_BYTES, "body bytes")? as u32;
        let payload_bytes = reader.count(MAX_PAGE_BYTES, "payload bytes")? as u32;
        let deadline_ms = reader.u32("deadline")?;
        let crc = reader.u32("frame check")?;
        let fits_flags = match flags {
            0 => true,
            FRAGMENTED => payload_bytes > 0,
            FRAGMENT => kind == 0 && body_bytes == 0 && deadline_ms == 0 && payload_bytes as usize <= FRAGMENT_BYTES,
            _ => false,
        };
        if !fits_flags {
            return Err(DecodeError::Invalid("frame flags"));
        }
        Ok(Self { kind, request, body_bytes, payload_bytes, deadline_ms, flags, crc })
    }

    fn is_fragment(&self) -> bool {
        self.flags == FRAGMENT
    }

    fn is_fragmented(&self) -> bool {
        self.flags == FRAGMENTED
    }

    /// Encodes all but the check, into a buffer with room for `body_room` bytes of the body.
    fn encode(&self, body_room: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + body_room);
        out.put(&MAGIC);
        out.put_u8(self.kind);
        out.put_u8(self.flags);
        out.put(&[0; 2]);
        out.put_u64(self.request);
        out.put_u32(self.body_bytes);
        out.put_u32(self.payload_bytes);
        out.put_u32(self.deadline_ms);
        out
    }
}

fn crc(header: &[u8], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..CRC_AT]);
    hasher.update(body);
    hasher.finalize()
}

/// Page bytes that a frame sends from the memory that holds them. Dropping it releases that memory,
/// once the frame was sent or the connection has ended.
pub type Payload = Box<dyn AsRef<[u8]> + Send + Sync>;

/// A payload without bytes that owns a guard. See [`Frame::attach`].
struct Guard<T>(T);

impl<T> AsRef<[u8]> for Guard<T> {
    fn as_ref(&self) -> &[u8] {
        &[]
    }
}

/// Bytes of a body that frames share, and a guard of one of these frames.
struct SharedBytes<T> {
    bytes: Arc<[u8]>,
    _guard: T,
}

impl<T> AsRef<[u8]> for SharedBytes<T> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// An encoded frame that waits to be sent. It owns its payload, so the payload's memory stays valid
/// until the frame is dropped.
pub struct Frame {
    /// Encoded header and body.
    pub head: Vec<u8>,
    payload: Option<Payload>,
    /// Length of the payload in bytes. Kept here so that a count does not touch the payload's
    /// memory.
    payload_len: usize,
    is_fragmented: bool,
    is_abandoned: Option<Box<IsAbandoned>>,
    /// Dropped with the frame.
    held: Option<Held>,
}

/// Guard of a frame, whatever its type.
type Held = Box<dyn Send + Sync>;

/// Condition under which the rest of a payload is not sent. Once true, it stays true.
type IsAbandoned = dyn Fn() -> bool + Send + Sync;

impl Frame {
    /// Encodes a frame. The caller bounds its messages: the decoder's limits apply on both sides.
    ///
    /// # Panics
    /// If the body is above [`MAX_BODY_BYTES`] or the payload above [`MAX_PAGE_BYTES`].
    pub fn new(kind: u8, request: u64, deadline_ms: u32, body: &[u8], payload: Option<Payload>) -> Frame {
        let payload_bytes = payload.as_ref().map_or(0, |p| (**p).as_ref().len());
        assert!(body.len() <= MAX_BODY_BYTES, "a body of {} bytes is above the limit", body.len());
        assert!(payload_bytes <= MAX_PAGE_BYTES, "a payload of {payload_bytes} bytes is above the limit");
        let header = FrameHeader {
            kind,
            request,
            body_bytes: body.len() as u32,
            payload_bytes: payload_bytes as u32,
            deadline_ms,
            flags: 0,
            crc: 0,
        };
        let mut head = header.encode(body.len());
        head.put_u32(crc(&head, body));
        head.put(body);
        Frame { head, payload, payload_len: payload_bytes, is_fragmented: false, is_abandoned: None, held: None }
    }

    /// Encodes a frame that sends a body from memory that other frames share. Dropping the frame
    /// drops `guard`.
    ///
    /// # Panics
    /// If the body is above [`MAX_BODY_BYTES`].
    pub(crate) fn with_shared_body(
        kind: u8,
        request: u64,
        body: Arc<[u8]>,
        guard: impl Send + Sync + 'static,
    ) -> Frame {
        assert!(body.len() <= MAX_BODY_BYTES, "a body of {} bytes is above the limit", body.len());
        let body_bytes = body.len() as u32;
        let header = FrameHeader { kind, request, body_bytes, payload_bytes: 0, deadline_ms: 0, flags: 0, crc: 0 };
        let mut head = header.encode(0);
        head.put_u32(crc(&head, &body));
        // The writer sends a payload behind its head, and so the bytes stand where the body
        // belongs.
        let payload_len = body.len();
        let payload: Payload = Box::new(SharedBytes { bytes: body, _guard: guard });
        Frame { head, payload: Some(payload), payload_len, is_fragmented: false, is_abandoned: None, held: None }
    }

    /// Adapts a new frame to the negotiated version: a payload above [`FRAGMENT_BYTES`] travels in
    /// fragments if the peer knows them. Must precede [`Frame::number`].
    pub(crate) fn for_version(mut self, version: u16) -> Frame {
        if version >= VERSION_FRAGMENTS && self.payload_len > FRAGMENT_BYTES {
            self.is_fragmented = true;
            self.head[FLAGS_AT] = FRAGMENTED;
            let check = crc(&self.head, &self.head[HEADER_BYTES..]);
            self.head[CRC_AT..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
        }
        self
    }

    /// Lets the writer give up the payload once `condition` holds. It then drops a frame that has
    /// not begun, and ends one whose fragments are being sent. `condition` must stay true, and must
    /// be cheap: the writer evaluates it before each send.
    pub fn abandon_when(&mut self, condition: impl Fn() -> bool + Send + Sync + 'static) {
        self.is_abandoned = Some(Box::new(condition));
    }

    /// Attaches a guard to a frame without payload. The guard is dropped once the frame has been
    /// sent, or when the connection drops it unsent.
    pub fn attach(&mut self, guard: impl Send + Sync + 'static) {
        // A payload is a guard already: it keeps its memory alive until the frame is dropped.
        debug_assert!(self.payload.is_none(), "a frame with payload cannot carry a guard");
        self.payload = Some(Box::new(Guard(guard)));
    }

    /// Lets a frame own a second guard, beside its payload or its first one. The guard is dropped
    /// with the frame.
    pub fn hold(&mut self, guard: impl Send + Sync + 'static) {
        self.held = Some(Box::new(guard));
    }

    /// Length of header, body and payload in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.payload_len
    }

    /// Always `false`: a frame has a header. It exists because a type with `len` is expected to
    /// have it.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Stamps a new frame with its sequence number in its direction, from 0. [`FrameWriter`] does
    /// so when it sends. Call it at most once per frame: the number is mixed into the check.
    pub fn number(&mut self, number: u32) {
        let check = &mut self.head[CRC_AT..HEADER_BYTES];
        check.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, of_number)| *byte ^= of_number);
    }

    #[cfg(test)]
    fn payload_bytes(&self) -> &[u8] {
        self.payload.as_ref().map_or(&[], |payload| (**payload).as_ref())
    }
}

/// Header of a fragment with `payload_bytes` bytes, without a sequence number.
fn fragment_head(request: u64, payload_bytes: usize) -> Vec<u8> {
    let payload_bytes = payload_bytes as u32;
    let header =
        FrameHeader { kind: 0, request, body_bytes: 0, payload_bytes, deadline_ms: 0, flags: FRAGMENT, crc: 0 };
    let mut head = header.encode(0);
    head.put_u32(crc(&head, &[]));
    head
}

/// Bytes that a task has moved since it last yielded to the other tasks of its thread. Each
/// direction of a stream has its own budget.
#[derive(Debug, Default)]
pub struct YieldBudget {
    spent_bytes: usize,
}

impl YieldBudget {
    /// Counts moved bytes. Yields once they reach a mebibyte, so that timers and other sockets run
    /// in between.
    pub async fn spend(&mut self, bytes: usize) {
        self.count(bytes);
        self.settle().await;
    }

    fn count(&mut self, bytes: usize) {
        self.spent_bytes += bytes;
    }

    async fn settle(&mut self) {
        if self.spent_bytes >= YIELD_BYTES {
            self.spent_bytes = 0;
            tokio::task::yield_now().await;
        }
    }
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod fragment_tests;
#[cfg(test)]
mod tests;
