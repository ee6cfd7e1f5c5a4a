//! Receiving frames.

use super::{CRC_AT, FrameHeader, HEADER_BYTES, YieldBudget, crc, invalid};
use crate::VERSION_FRAGMENTS;
use crate::stream::ByteSource;
use larder_format::CHUNK_BYTES;
use larder_format::codec::DecodeError;
use larder_runtime::fail_point;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
const BODY_CAPACITY_BYTES: usize = 16 << 10;
/// First length of the body buffer, in bytes. It doubles as bytes arrive, so an announced length
/// costs nothing by itself.
const BODY_STEP_BYTES: usize = 8 << 10;

/// Reads frames from a stream. Headers and bodies pass through a small buffer, payloads go straight
/// to their final memory.
///
/// The reader knows how much of a payload is left. So a caller may stop in the middle, and discard
/// the rest later. Frames without payload may come between the fragments of one.
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
    accepts_fragments: bool,
    open: OpenPayload,
    received_bytes: Arc<AtomicU64>,
}

/// Rest of the payload that is being received. `left` is 0 while there is none.
#[derive(Default)]
struct OpenPayload {
    request: u64,
    left: usize,
    left_in_frame: usize,
}

/// One step in receiving a payload.
pub enum Piece {
    /// So many bytes are in the caller's memory. They follow the bytes of the last step.
    Bytes(usize),
    /// Another frame came between two fragments. It has no payload. The caller MUST take or skip
    /// its body.
    Frame(FrameHead),
    /// The peer gave up the rest of the payload. No further piece comes.
    Abandoned,
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
        Self {
            source,
            sequence: 0,
            ahead: Box::new([0; READ_AHEAD_BYTES]),
            from: 0,
            to: 0,
            body: Vec::new(),
            budget: YieldBudget::default(),
            accepts_fragments: false,
            open: OpenPayload::default(),
            received_bytes: Arc::default(),
        }
    }

    /// Records the negotiated version. Until then the reader takes a fragment for an error.
    pub fn set_version(&mut self, version: u16) {
        self.accepts_fragments = version >= VERSION_FRAGMENTS;
    }

    /// Counter of the bytes that the source has delivered. Only its changes mean something.
    pub fn received_bytes(&self) -> Arc<AtomicU64> {
        self.received_bytes.clone()
    }

    /// Reads the next header and body. Returns `None` at a clean end of the stream.
    ///
    /// The body is then in [`FrameReader::body`]. The caller MUST take the payload with
    /// [`FrameReader::piece`], [`FrameReader::payload`] or [`FrameReader::discard`] before the next
    /// frame.
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
    /// The caller MUST follow with [`FrameReader::take_body`] or [`FrameReader::take_body_if`].
    /// Until one of them succeeds the header is unverified, except for the limits of its lengths.
    ///
    /// # Errors
    /// As for [`FrameReader::next`]. `InvalidData` also if the last payload was not taken.
    pub async fn head(&mut self) -> io::Result<Option<FrameHead>> {
        match self.any_head().await? {
            Some(head) if head.header.is_fragment() || self.open.left > 0 => {
                Err(invalid(DecodeError::Invalid("fragment without its message")))
            }
            head => Ok(head),
        }
    }

    /// Waits for the first byte of the next frame, for callers that bound the time of the rest.
    /// Returns `false` at a clean end of the stream. Cancel safe.
    pub async fn begin(&mut self) -> io::Result<bool> {
        if self.to > self.from {
            return Ok(true);
        }
        let into = &mut [IoSliceMut::new(&mut self.ahead[..])];
        let received = match self.open.left {
            0 => self.source.receive_next(into).await?,
            _ => self.source.receive(into).await?,
        };
        self.from = 0;
        self.to = received;
        self.count(received);
        Ok(received > 0)
    }

    /// Reads the next header, which may be that of a fragment. Cancel safe.
    async fn any_head(&mut self) -> io::Result<Option<FrameHead>> {
        if !self.begin().await? {
            return Ok(None);
        }
        while self.to - self.from < HEADER_BYTES {
            self.ahead.copy_within(self.from..self.to, 0);
            self.to -= self.from;
            self.from = 0;
            let into = &mut [IoSliceMut::new(&mut self.ahead[self.to..])];
            match self.source.receive(into).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                received => {
                    self.to += received;
                    self.count(received);
                }
            }
        }
        let bytes = self.ahead[self.from..].first_chunk().expect("the loop received a whole header");
        let head = FrameHead { header: FrameHeader::decode(bytes).map_err(invalid)?, bytes: *bytes };
        if !self.accepts_fragments && (head.header.is_fragment() || head.header.is_fragmented()) {
            return Err(invalid(DecodeError::Invalid("fragment in this protocol version")));
        }
        self.from += HEADER_BYTES;
        Ok(Some(head))
    }

    /// Relaxed: the counter is only compared with itself.
    fn count(&mut self, received: usize) {
        self.received_bytes.fetch_add(received as u64, Ordering::Relaxed);
        self.budget.count(received);
    }

    /// Reads the body of a header and verifies both. A failure is final: the caller must close the
    /// stream.
    pub async fn take_body(&mut self, head: &FrameHead) -> io::Result<()> {
        self.take_body_if(head, |_| true).await.map(|_| ())
    }

    /// Reads the body of a header and verifies both, in memory that grows as the bytes arrive.
    ///
    /// Calls `admit` with the length of the buffer before it grows. If `admit` returns `false`, the
    /// reader drops the body, discards the rest, and returns `false`. [`FrameReader::body`] is
    /// empty then.
    ///
    /// # Errors
    /// As for [`FrameReader::take_body`].
    pub async fn take_body_if(&mut self, head: &FrameHead, mut admit: impl FnMut(usize) -> bool) -> io::Result<bool> {
        let total = head.header.body_bytes as usize;
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        while body.len() < total {
            let at = body.len();
            let length = total.min(BODY_STEP_BYTES.max(2 * at));
            if !admit(length) {
                self.skip_rest(head, &body).await?;
                return Ok(false);
            }
            body.reserve_exact(length - at);
            body.resize(length, 0);
            self.fill(&mut body[at..]).await?;
        }
        self.body = body;
        self.verify(head, crc(&head.bytes, &self.body))?;
        Ok(true)
    }

    /// Discards the rest of a body after its first bytes, `received`, and verifies all of it.
    async fn skip_rest(&mut self, head: &FrameHead, received: &[u8]) -> io::Result<()> {
        self.body = Vec::new();
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head.bytes[..CRC_AT]);
        hasher.update(received);
        let mut left = head.header.body_bytes as usize - received.len();
        // Small: nothing is charged for it, and many refused clients may be slow.
        let mut scratch = vec![0; left.min(BODY_STEP_BYTES)];
        while left > 0 {
            let piece = &mut scratch[..left.min(BODY_STEP_BYTES)];
            self.fill(piece).await?;
            hasher.update(piece);
            left -= piece.len();
        }
        self.verify(head, hasher.finalize())
    }

    fn verify(&mut self, head: &FrameHead, crc: u32) -> io::Result<()> {
        let sequence =
            if fail_point!("wire.accept-out-of-order-frame") { crc ^ head.header.crc } else { self.sequence };
        if crc ^ sequence != head.header.crc && !fail_point!("wire.accept-damaged-frame") {
            return Err(invalid(DecodeError::Checksum("frame")));
        }
        self.sequence = self.sequence.wrapping_add(1);
        self.open_payload(&head.header)
    }

    /// Records the payload of a verified frame.
    pub(super) fn open_payload(&mut self, header: &FrameHeader) -> io::Result<()> {
        let bytes = header.payload_bytes as usize;
        if header.is_fragment() {
            if header.request != self.open.request || bytes > self.open.left {
                return Err(invalid(DecodeError::Invalid("fragment of another message")));
            }
            self.open.left_in_frame = bytes;
        } else if bytes > 0 {
            if self.open.left > 0 {
                return Err(invalid(DecodeError::Invalid("payload between fragments")));
            }
            let left_in_frame = if header.is_fragmented() { 0 } else { bytes };
            self.open = OpenPayload { request: header.request, left: bytes, left_in_frame };
        }
        Ok(())
    }

    /// Body of the last frame, verified. The next frame overwrites it, so the caller decodes it
    /// first.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Frees the buffer of a large body, once the caller has decoded it. Otherwise a single large
    /// body would keep its memory until the next one.
    pub fn release_body(&mut self) {
        if self.body.capacity() > BODY_CAPACITY_BYTES {
            self.body = Vec::new();
        }
    }

    /// Fills `memory` with the next bytes of the stream. They are part of a body.
    async fn fill(&mut self, memory: &mut [u8]) -> io::Result<()> {
        let mut at = self.take_ahead(memory);
        while at < memory.len() {
            let left = memory.len() - at;
            let into = &mut [IoSliceMut::new(&mut memory[at..]), IoSliceMut::new(&mut self.ahead[..])];
            let received = self.source.receive(into).await?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.count(received);
            self.to = received.saturating_sub(left);
            at += received.min(left);
            self.budget.settle().await;
        }
        Ok(())
    }

    /// Moves bytes out of the read-ahead buffer. Returns their number. The buffer is empty
    /// afterwards if they are fewer than `memory` takes.
    fn take_ahead(&mut self, memory: &mut [u8]) -> usize {
        let taken = (self.to - self.from).min(memory.len());
        memory[..taken].copy_from_slice(&self.ahead[self.from..self.from + taken]);
        self.from += taken;
        if self.from == self.to {
            self.from = 0;
            self.to = 0;
        }
        taken
    }

    /// Receives the next bytes of the payload into `memory`, which must not be empty. Waits for
    /// one byte at least.
    ///
    /// The caller sees the bytes while they are in the processor's cache, which is the cheapest
    /// moment to compute checksums.
    ///
    /// Cancel safe: a dropped future has taken no bytes, and does not touch `memory` any more.
    ///
    /// # Errors
    /// `UnexpectedEof` if the stream ends first, `InvalidData` if no payload is left or the next
    /// frame is not allowed here, or the source's error.
    pub async fn piece(&mut self, memory: &mut [u8]) -> io::Result<Piece> {
        // Before the receive: afterwards, a dropped future would lose the bytes.
        self.budget.settle().await;
        while self.open.left_in_frame == 0 {
            if self.open.left == 0 {
                return Err(invalid(DecodeError::Invalid("payload length")));
            }
            let head = self.any_head().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if !head.header.is_fragment() {
                return Ok(Piece::Frame(head));
            }
            self.verify(&head, crc(&head.bytes, &[]))?;
            if head.header.payload_bytes == 0 {
                self.open = OpenPayload::default();
                return Ok(Piece::Abandoned);
            }
        }
        let wanted = memory.len().min(self.open.left_in_frame).min(PIECE_BYTES);
        let mut taken = self.take_ahead(&mut memory[..wanted]);
        if taken == 0 {
            // The last receive of a frame may place the next header in the read-ahead buffer. Of a
            // fragment only the header: payload bytes would have to be copied.
            let ahead = match wanted < self.open.left_in_frame {
                true => 0,
                false if self.open.left > wanted => HEADER_BYTES,
                false => READ_AHEAD_BYTES,
            };
            let into = &mut [IoSliceMut::new(&mut memory[..wanted]), IoSliceMut::new(&mut self.ahead[..ahead])];
            let received = self.source.receive(into).await?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.count(received);
            taken = received.min(wanted);
            self.to = received - taken;
        }
        self.open.left_in_frame -= taken;
        self.open.left -= taken;
        Ok(Piece::Bytes(taken))
    }

    /// Number of bytes of the payload that the caller has not received.
    pub fn payload_left(&self) -> usize {
        self.open.left
    }

    /// Receives a whole payload of `memory.len()` bytes, for callers with one request at a time.
    /// `on_piece` sees the bytes in order, piece by piece.
    ///
    /// # Errors
    /// As for [`FrameReader::piece`]. `InvalidData` also if the peer abandons the payload, or sends
    /// another frame between its fragments.
    pub async fn payload(&mut self, memory: &mut [u8], mut on_piece: impl FnMut(&[u8])) -> io::Result<()> {
        let mut at = 0;
        while at < memory.len() {
            match self.piece(&mut memory[at..]).await? {
                Piece::Bytes(bytes) => {
                    on_piece(&memory[at..at + bytes]);
                    at += bytes;
                }
                Piece::Frame(_) | Piece::Abandoned => return Err(invalid(DecodeError::Invalid("end of a payload"))),
            }
        }
        Ok(())
    }

    /// Drops the rest of the payload, under the same conditions as [`FrameReader::payload`]. It
    /// keeps the stream in step when the caller has no use for the page.
    pub async fn discard(&mut self) -> io::Result<()> {
        let mut scratch = vec![0; self.open.left.min(SCRATCH_BYTES)];
        while self.open.left > 0 {
            let bytes = self.open.left.min(SCRATCH_BYTES);
            self.payload(&mut scratch[..bytes], |_| {}).await?;
        }
        Ok(())
    }
}
