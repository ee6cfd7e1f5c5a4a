//! Receiving frames.

use super::{CRC_AT, FrameHeader, HEADER_BYTES, YieldBudget, crc, invalid};
use crate::stream::ByteSource;
use larder_format::CHUNK_BYTES;
use larder_format::codec::DecodeError;
use larder_runtime::fail_point;
use std::io::{self, IoSliceMut};

/// Length of the read-ahead buffer, in bytes. Bytes in it are copied to their destination, so it is
/// small.
const READ_AHEAD_BYTES: usize = 4 << 10;
/// Length of the buffer for bytes that no caller keeps: one chunk. Discarding a payload therefore
/// takes several receives, but no memory of its size.
const SCRATCH_BYTES: usize = CHUNK_BYTES;
/// Maximum payload bytes of one receive. The caller computes checksums of a piece while the next
/// one arrives.
const PIECE_BYTES: usize = 512 << 10;
/// Capacity of the body buffer that is kept between frames, in bytes. A rare large body must not
/// occupy memory for the connection's lifetime.
const BODY_CAPACITY_BYTES: usize = 64 << 10;

/// Reads frames from a stream. Headers and bodies pass through a small buffer, payloads go straight
/// to their final memory.
///
/// A malformed frame, or one out of sequence, is an `InvalidData` error. The stream is unusable
/// afterwards, because the reader can no longer tell where a frame begins.
pub struct FrameReader<S> {
    source: S,
    sequence: u32,
    /// Bytes received beyond the last payload. Those in `from..to` are unread.
    ahead: Box<[u8; READ_AHEAD_BYTES]>,
    from: usize,
    to: usize,
    body: Vec<u8>,
    budget: YieldBudget,
}

/// A header whose body is still unread. The caller can refuse the message by it before the reader
/// allocates for the body.
pub struct FrameHead {
    /// Decoded header. Only its lengths have been checked so far.
    pub header: FrameHeader,
    bytes: [u8; HEADER_BYTES],
}

impl<S: ByteSource> FrameReader<S> {
    /// A reader at the start of a stream. Its sequence numbers begin with 0, as do those of the
    /// peer's [`FrameWriter`](super::FrameWriter).
    pub fn new(source: S) -> Self {
        let ahead = Box::new([0; READ_AHEAD_BYTES]);
        Self { source, sequence: 0, ahead, from: 0, to: 0, body: Vec::new(), budget: YieldBudget::default() }
    }

    /// Reads the next header and body. Returns `None` at a clean end of the stream.
    ///
    /// The body is then in [`FrameReader::body`]. The caller MUST take the payload with
    /// [`FrameReader::payload`] or [`FrameReader::discard`] before the next frame.
    ///
    /// # Errors
    /// `InvalidData` for a malformed frame, `UnexpectedEof` if the stream ends inside one, or the
    /// source's error.
    pub async fn next(&mut self) -> io::Result<Option<FrameHeader>> {
        let Some(head) = self.head().await? else { return Ok(None) };
        self.take_body(&head).await?;
        Ok(Some(head.header))
    }

    /// Reads the next header, for callers that admit a request by its size before they read the
    /// body.
    ///
    /// The caller MUST follow with [`FrameReader::take_body`] or [`FrameReader::skip_body`]. Until
    /// one of them succeeds the header is unverified, except for the limits of its lengths.
    pub async fn head(&mut self) -> io::Result<Option<FrameHead>> {
        while self.to - self.from < HEADER_BYTES {
            self.ahead.copy_within(self.from..self.to, 0);
            self.to -= self.from;
            self.from = 0;
            let into = &mut [IoSliceMut::new(&mut self.ahead[self.to..])];
            let received = match self.to {
                0 => self.source.receive_next(into).await?,
                _ => self.source.receive(into).await?,
            };
            match received {
                0 if self.to == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                received => self.to += received,
            }
        }
        let bytes = self.ahead[self.from..].first_chunk().expect("the loop received a whole header");
        let head = FrameHead { header: FrameHeader::decode(bytes).map_err(invalid)?, bytes: *bytes };
        self.from += HEADER_BYTES;
        Ok(Some(head))
    }

    /// Reads the body of a header and verifies both. A failure is final: the caller must close the
    /// stream.
    pub async fn take_body(&mut self, head: &FrameHead) -> io::Result<()> {
        let mut body = std::mem::take(&mut self.body);
        body.resize(head.header.body_bytes as usize, 0);
        self.payload(&mut body, |_| {}).await?;
        // One large body must not pin a mebibyte for the rest of the connection.
        body.shrink_to(BODY_CAPACITY_BYTES);
        self.body = body;
        self.verify(head, crc(&head.bytes, &self.body))
    }

    /// Reads the body of a header and verifies both, without memory for the body.
    /// [`FrameReader::body`] is empty afterwards.
    pub async fn skip_body(&mut self, head: &FrameHead) -> io::Result<()> {
        self.body = Vec::new();
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head.bytes[..CRC_AT]);
        self.pass(head.header.body_bytes as usize, |piece| hasher.update(piece)).await?;
        self.verify(head, hasher.finalize())
    }

    fn verify(&mut self, head: &FrameHead, crc: u32) -> io::Result<()> {
        let sequence =
            if fail_point!("wire.accept-out-of-order-frame") { crc ^ head.header.crc } else { self.sequence };
        if crc ^ sequence != head.header.crc && !fail_point!("wire.accept-damaged-frame") {
            return Err(invalid(DecodeError::Checksum("frame")));
        }
        self.sequence = self.sequence.wrapping_add(1);
        Ok(())
    }

    /// Body of the last frame, verified. The next frame overwrites it, so the caller decodes it
    /// first.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Fills `memory` with the next bytes of the stream.
    ///
    /// `on_piece` sees the bytes in order, piece by piece, while they are still in the processor's
    /// cache. That is the cheapest moment to compute checksums.
    ///
    /// # Errors
    /// `UnexpectedEof` if the stream ends first, or the source's error.
    pub async fn payload(&mut self, memory: &mut [u8], mut on_piece: impl FnMut(&[u8])) -> io::Result<()> {
        let mut at = (self.to - self.from).min(memory.len());
        memory[..at].copy_from_slice(&self.ahead[self.from..self.from + at]);
        self.from += at;
        on_piece(&memory[..at]);
        while at < memory.len() {
            // The read-ahead buffer is empty now, so the last receive may place the next header
            // there.
            self.from = 0;
            self.to = 0;
            let piece = (memory.len() - at).min(PIECE_BYTES);
            let is_last = at + piece == memory.len();
            let ahead = if is_last { &mut self.ahead[..] } else { &mut [] };
            let into = &mut [IoSliceMut::new(&mut memory[at..at + piece]), IoSliceMut::new(ahead)];
            let received = self.source.receive(into).await?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let in_memory = received.min(piece);
            self.to = received - in_memory;
            on_piece(&memory[at..at + in_memory]);
            at += in_memory;
            self.budget.spend(received).await;
        }
        Ok(())
    }

    /// Reads a payload of `bytes` bytes and drops it. It keeps the stream in step when the caller
    /// has no use for the page.
    pub async fn discard(&mut self, bytes: usize) -> io::Result<()> {
        self.pass(bytes, |_| {}).await
    }

    /// Reads `bytes` bytes through a scratch buffer without keeping them. `on_piece` sees them as
    /// in [`FrameReader::payload`].
    pub async fn pass(&mut self, bytes: usize, mut on_piece: impl FnMut(&[u8])) -> io::Result<()> {
        let mut scratch = vec![0; bytes.min(SCRATCH_BYTES)];
        let mut left = bytes;
        while left > 0 {
            let now = left.min(scratch.len());
            self.payload(&mut scratch[..now], &mut on_piece).await?;
            left -= now;
        }
        Ok(())
    }
}
