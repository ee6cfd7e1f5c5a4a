//! Frames: header, body, payload.
//!
//! Invariants:
//! - A reader accepts frame *n* of a stream only as frame *n*: the sequence number is part of the
//!   check. So a stream that drops, repeats or reorders frames fails instead of being misread.
//! - Lengths of a header are checked against their limits before anything is allocated by them.
//! - Page bytes are never copied on the way out, and on the way in only the few that arrive with a
//!   header.
//!
//! Layout: this file has the header and the frame, `reader` and `writer` the two directions of a
//! stream,
//! `queue` the frames that wait for a writer.

mod queue;
mod reader;
mod writer;

pub use queue::FrameQueue;
pub use reader::{FrameHead, FrameReader};
pub use writer::FrameWriter;

use larder_format::MAX_PAGE_BYTES;
use larder_format::codec::{DecodeError, Put, Reader};
use std::io;

/// Length of a frame header in bytes. All headers have this length, so a reader knows the lengths
/// of body and payload after that many bytes.
pub const HEADER_BYTES: usize = 32;
/// Maximum length of a body in bytes. Page bytes travel as payload, so a body holds only keys, CRCs
/// and text.
pub const MAX_BODY_BYTES: usize = 1 << 20;

const MAGIC: [u8; 4] = *b"LRDR";
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
    /// Length of the payload in bytes, at most [`MAX_PAGE_BYTES`].
    pub payload_bytes: u32,
    /// Time left to the request, in milliseconds. 0 in responses.
    pub deadline_ms: u32,
    crc: u32,
}

impl FrameHeader {
    /// Decodes a header and checks its lengths. The caller checks the CRC once it has the body.
    ///
    /// # Errors
    /// The magic is wrong, reserved bytes are set, or a length is above its limit.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>("frame magic")? != MAGIC {
            return Err(DecodeError::Invalid("frame magic"));
        }
        let kind = reader.u8("kind")?;
        if reader.array::<3>("reserved bytes")? != [0; 3] {
            return Err(DecodeError::Invalid("reserved bytes"));
        }
        let request = reader.u64("request")?;
        let body_bytes = reader.count(MAX_BODY_BYTES, "body bytes")? as u32;
        let payload_bytes = reader.count(MAX_PAGE_BYTES, "payload bytes")? as u32;
        let deadline_ms = reader.u32("deadline")?;
        let crc = reader.u32("frame check")?;
        Ok(Self { kind, request, body_bytes, payload_bytes, deadline_ms, crc })
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.put(&MAGIC);
        out.put_u8(self.kind);
        out.put(&[0; 3]);
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

/// An encoded frame that waits to be sent. It owns its payload, so the payload's memory stays valid
/// until the frame is dropped.
pub struct Frame {
    /// Encoded header and body.
    pub head: Vec<u8>,
    payload: Option<Payload>,
    /// Length of the payload in bytes. Kept here so that a count does not touch the payload's
    /// memory.
    payload_len: usize,
}

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
            crc: 0,
        };
        let mut head = header.encode();
        head.put_u32(crc(&head, body));
        head.put(body);
        Frame { head, payload, payload_len: payload_bytes }
    }

    /// Attaches a guard to a frame without payload. The guard is dropped once the frame has been
    /// sent, or when the connection drops it unsent.
    pub fn attach(&mut self, guard: impl Send + Sync + 'static) {
        // A payload is a guard already: it keeps its memory alive until the frame is dropped.
        debug_assert!(self.payload.is_none(), "a frame with payload cannot carry a guard");
        self.payload = Some(Box::new(Guard(guard)));
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

    fn payload_bytes(&self) -> &[u8] {
        self.payload.as_ref().map_or(&[], |payload| (**payload).as_ref())
    }
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
        self.spent_bytes += bytes;
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
mod tests;
