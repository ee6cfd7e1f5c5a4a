//! Frames: header, body, payload.

use crate::stream::{Sink, Source};
use larder_format::codec::{DecodeError, Put, Reader};
use larder_format::planted::{Bug, has};
use larder_format::{CHUNK_BYTES, MAX_PAGE_BYTES};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 32;
/// Most bytes of a body.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// Most bytes that are received behind a payload and have to be copied to where they belong.
const AHEAD_BYTES: usize = 4 << 10;
/// Most bytes that are received at once and not kept: a chunk.
const SCRATCH_BYTES: usize = CHUNK_BYTES;
/// Most bytes of a payload that are received at once: their checksums are computed while more arrives.
const PIECE_BYTES: usize = 512 << 10;
/// Bytes after which other tasks of the thread have their turn, timers and other sockets among them: some 200 µs. The runtime
/// would count them as one step, like a frame of a few bytes.
const TURN_BYTES: usize = 1 << 20;
/// Most bytes that leave at once: others want the processor, too. What leaves last goes in halves, so that one is copied in while the
/// other is copied out.
const SEND_BYTES: usize = 1 << 20;
/// Most frames that wait to leave together, and bytes after which no frame of bulk joins them: what is urgent waits for no more.
const FRAMES_AT_ONCE: usize = 32;
const BULK_AT_ONCE_BYTES: usize = SEND_BYTES + SEND_BYTES / 2;

const MAGIC: [u8; 4] = *b"LRDR";
/// Bytes of a body's memory that are kept for the next.
const KEPT_BODY_BYTES: usize = 64 << 10;
/// Where a header has its CRC.
const CRC_AT: usize = 28;

/// A decoded frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Message kind.
    pub kind: u8,
    /// Request number.
    pub request: u64,
    /// Bytes of the body.
    pub body_bytes: u32,
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// Milliseconds the requester still waits; 0 in answers.
    pub deadline_ms: u32,
    crc: u32,
}

impl FrameHeader {
    /// Reads a header. Lengths are checked against their limits before anybody can allocate by them.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>("magic")? != MAGIC {
            return Err(DecodeError::Invalid("frame magic"));
        }
        let kind = reader.u8("kind")?;
        if reader.array::<3>("reserved")? != [0; 3] {
            return Err(DecodeError::Invalid("reserved bytes"));
        }
        let request = reader.u64("request")?;
        let body_bytes = reader.count(MAX_BODY_BYTES, "body bytes")? as u32;
        let payload_bytes = reader.count(MAX_PAGE_BYTES, "payload bytes")? as u32;
        let deadline_ms = reader.u32("deadline")?;
        let crc = reader.u32("crc")?;
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

/// Page bytes that travel with a frame, from whatever memory holds them.
pub type Payload = Box<dyn AsRef<[u8]> + Send + Sync>;

/// No bytes, and what is kept with them.
struct Kept<T>(T);

impl<T> AsRef<[u8]> for Kept<T> {
    fn as_ref(&self) -> &[u8] {
        &[]
    }
}

/// A frame ready to be sent.
pub struct Frame {
    /// Header and body.
    pub head: Vec<u8>,
    /// Page bytes, sent from where they lie.
    payload: Option<Payload>,
    /// How many: whoever only counts them does not look where they lie.
    payload_len: usize,
}

impl Frame {
    /// Builds a frame.
    ///
    /// # Panics
    /// If body or payload are above their limits: senders bound what they send.
    pub fn new(kind: u8, request: u64, deadline_ms: u32, body: &[u8], payload: Option<Payload>) -> Frame {
        let payload_bytes = payload.as_ref().map_or(0, |p| (**p).as_ref().len());
        assert!(body.len() <= MAX_BODY_BYTES && payload_bytes <= MAX_PAGE_BYTES, "senders bound their frames");
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

    /// Keeps something until the frame has left. It has no payload.
    pub fn keep(&mut self, keeper: impl Send + Sync + 'static) {
        debug_assert!(self.payload.is_none(), "a payload is what is kept");
        self.payload = Some(Box::new(Kept(keeper)));
    }

    /// Bytes of head and payload.
    pub fn len(&self) -> usize {
        self.head.len() + self.payload_len
    }

    fn payload_bytes(&self) -> &[u8] {
        self.payload.as_ref().map_or(&[], |payload| (**payload).as_ref())
    }

    /// Makes a new frame number `number` of its direction, from 0: it is taken nowhere else. [`FrameWriter`] does.
    pub fn number(&mut self, number: u32) {
        let crc = &mut self.head[CRC_AT..HEADER_BYTES];
        crc.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, of_number)| *byte ^= of_number);
    }

    /// Never: a frame has a header.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// Reads frames from a stream: headers and bodies by way of a small buffer, payloads straight to where they belong.
///
/// What is not a frame, or not the next one, is an `InvalidData` error: the stream cannot be trusted any more.
pub struct FrameReader<S> {
    source: S,
    /// Frames so far, modulo 2^32.
    frames: u32,
    /// Bytes that came behind a payload.
    ahead: Box<[u8; AHEAD_BYTES]>,
    from: usize,
    to: usize,
    body: Vec<u8>,
    turn: Turn,
}

/// What a task has moved since others had their turn.
#[derive(Debug, Default)]
pub struct Turn {
    bytes: usize,
}

impl Turn {
    /// It has moved so many more. Lets the other tasks of this thread go first, once it was a mebibyte.
    pub async fn moved(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= TURN_BYTES {
            self.bytes = 0;
            tokio::task::yield_now().await;
        }
    }
}

impl<S: Source> FrameReader<S> {
    /// Reads frames from `source`.
    pub fn new(source: S) -> Self {
        let ahead = Box::new([0; AHEAD_BYTES]);
        Self { source, frames: 0, ahead, from: 0, to: 0, body: Vec::new(), turn: Turn::default() }
    }

    /// The next header; its body is then in [`FrameReader::body`], and its payload must be taken with
    /// [`FrameReader::payload`] or [`FrameReader::discard`] before the next. `None` at a clean end.
    pub async fn next(&mut self) -> io::Result<Option<FrameHeader>> {
        let Some(head) = self.head().await? else { return Ok(None) };
        self.take_body(&head).await?;
        Ok(Some(head.header))
    }

    /// The next header, as [`FrameReader::next`], for those who look at it before they take the body: with
    /// [`FrameReader::take_body`] or [`FrameReader::skip_body`]. Until then nothing but its lengths is known to be true.
    pub async fn head(&mut self) -> io::Result<Option<FrameHead>> {
        while self.to - self.from < HEADER_BYTES {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
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
        let bytes = self.ahead[self.from..].first_chunk().expect("a header's bytes are there");
        let head = FrameHead { header: FrameHeader::decode(bytes).map_err(invalid)?, bytes: *bytes };
        self.from += HEADER_BYTES;
        Ok(Some(head))
    }

    /// Reads the body of a header, and checks both.
    pub async fn take_body(&mut self, head: &FrameHead) -> io::Result<()> {
        let mut body = std::mem::take(&mut self.body);
        body.resize(head.header.body_bytes as usize, 0);
        self.payload(&mut body, |_| {}).await?;
        // What one large body took is not kept for the small ones.
        body.shrink_to(KEPT_BODY_BYTES);
        self.body = body;
        self.check(head, crc(&head.bytes, &self.body))
    }

    /// Reads the body of a header and checks both, without memory for it: [`FrameReader::body`] is empty then.
    pub async fn skip_body(&mut self, head: &FrameHead) -> io::Result<()> {
        self.body = Vec::new();
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head.bytes[..CRC_AT]);
        self.pass(head.header.body_bytes as usize, |piece| hasher.update(piece)).await?;
        self.check(head, hasher.finalize())
    }

    fn check(&mut self, head: &FrameHead, crc: u32) -> io::Result<()> {
        let number = if has(Bug::FrameOutOfOrder) { crc ^ head.header.crc } else { self.frames };
        if crc ^ number != head.header.crc && !has(Bug::FrameUnchecked) {
            return Err(invalid(DecodeError::Checksum("frame")));
        }
        self.frames = self.frames.wrapping_add(1);
        Ok(())
    }

    /// The body of the last header.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Fills `memory` with the next bytes of the stream. `landed` sees them piece by piece, in order, while they are still in
    /// the processor's cache: the time to compute checksums.
    pub async fn payload(&mut self, memory: &mut [u8], mut landed: impl FnMut(&[u8])) -> io::Result<()> {
        let mut at = (self.to - self.from).min(memory.len());
        memory[..at].copy_from_slice(&self.ahead[self.from..self.from + at]);
        self.from += at;
        landed(&memory[..at]);
        while at < memory.len() {
            // Nothing is ahead now, so what comes behind the payload may be put there.
            (self.from, self.to) = (0, 0);
            let piece = (memory.len() - at).min(PIECE_BYTES);
            let last = at + piece == memory.len();
            let ahead = if last { &mut self.ahead[..] } else { &mut [] };
            let into = &mut [IoSliceMut::new(&mut memory[at..at + piece]), IoSliceMut::new(ahead)];
            let received = self.source.receive(into).await?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let here = received.min(piece);
            self.to = received - here;
            landed(&memory[at..at + here]);
            at += here;
            self.turn.moved(received).await;
        }
        Ok(())
    }

    /// Reads and throws away a payload that nobody wants.
    pub async fn discard(&mut self, bytes: usize) -> io::Result<()> {
        self.pass(bytes, |_| {}).await
    }

    /// Reads the next bytes of the stream and keeps none of them; `landed` sees them as in [`FrameReader::payload`].
    pub async fn pass(&mut self, bytes: usize, mut landed: impl FnMut(&[u8])) -> io::Result<()> {
        let mut scratch = vec![0; bytes.min(SCRATCH_BYTES)];
        let mut left = bytes;
        while left > 0 {
            let now = left.min(scratch.len());
            self.payload(&mut scratch[..now], &mut landed).await?;
            left -= now;
        }
        Ok(())
    }
}

/// A header whose body is still to be read.
pub struct FrameHead {
    /// What it says.
    pub header: FrameHeader,
    bytes: [u8; HEADER_BYTES],
}

/// What waits to leave on one stream: what is urgent first, the bulk behind it.
///
/// Always true: each queue keeps its order, and what went into the urgent one before something went into the other leaves
/// before it.
pub struct FrameQueue {
    urgent: mpsc::Receiver<Frame>,
    bulk: mpsc::Receiver<Frame>,
    /// Taken from the bulk, to leave next.
    held: Option<Frame>,
}

impl From<mpsc::Receiver<Frame>> for FrameQueue {
    /// One queue, in its order.
    fn from(only: mpsc::Receiver<Frame>) -> Self {
        Self::new(only, mpsc::channel(1).1)
    }
}

impl FrameQueue {
    /// Two queues; it ends when both are closed.
    pub fn new(urgent: mpsc::Receiver<Frame>, bulk: mpsc::Receiver<Frame>) -> Self {
        Self { urgent, bulk, held: None }
    }

    /// What waits now; page bytes only if they may be.
    fn take(&mut self, bulk: bool) -> Option<Frame> {
        if self.held.is_none() {
            self.held = self.bulk.try_recv().ok();
        }
        // Looked at last: it may have been urgent before that went into the bulk.
        let urgent = self.urgent.try_recv().ok();
        urgent.or_else(|| self.held.take_if(|frame| bulk || frame.payload_len == 0))
    }

    async fn next(&mut self) -> Option<Frame> {
        if self.held.is_none() {
            tokio::select! {
                biased;
                Some(frame) = self.urgent.recv() => return Some(frame),
                Some(frame) = self.bulk.recv() => self.held = Some(frame),
                else => return None,
            }
        }
        self.take(true)
    }
}

/// Sends frames, and numbers them: what a stream leaves out, repeats or brings in another order is not taken for what was
/// sent.
pub struct FrameWriter<S> {
    sink: S,
    /// Frames so far, modulo 2^32.
    frames: u32,
    turn: Turn,
}

impl<S: Sink> FrameWriter<S> {
    /// Sends frames to `sink`.
    pub fn new(sink: S) -> Self {
        Self { sink, frames: 0, turn: Turn::default() }
    }

    /// Sends one frame.
    pub async fn send(&mut self, frame: Frame) -> io::Result<()> {
        let frames = VecDeque::from([self.next(frame)]);
        let mut sent = 0;
        while sent < frames[0].len() {
            sent += self.send_some(&frames, sent).await?;
        }
        Ok(())
    }

    /// Sends queued frames until the queue is closed, a frame takes longer than `stall`, or the stream fails. Frames that
    /// wait together leave together; each is dropped when it has left.
    pub async fn send_all(mut self, queue: impl Into<FrameQueue>, stall: Duration) -> io::Result<()> {
        let mut queue = queue.into();
        let mut frames = VecDeque::with_capacity(FRAMES_AT_ONCE);
        let mut gathered = 0;
        let mut sent = 0;
        let mut deadline = Instant::now() + stall;
        loop {
            while frames.len() < FRAMES_AT_ONCE
                && let Some(frame) = queue.take(gathered < BULK_AT_ONCE_BYTES)
            {
                gathered += frame.len();
                frames.push_back(self.next(frame));
            }
            if frames.is_empty() {
                let Some(frame) = queue.next().await else { return Ok(()) };
                gathered += frame.len();
                frames.push_back(self.next(frame));
                deadline = Instant::now() + stall;
                continue;
            }
            let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
            sent += tokio::time::timeout_at(deadline, self.send_some(&frames, sent)).await.map_err(timed_out)??;
            while let Some(first) = frames.front().map(Frame::len)
                && sent >= first
            {
                sent -= first;
                gathered -= first;
                frames.pop_front();
                deadline = Instant::now() + stall;
            }
        }
    }

    fn next(&mut self, mut frame: Frame) -> Frame {
        frame.number(self.frames);
        self.frames = self.frames.wrapping_add(1);
        frame
    }

    /// Sends what it can of what is left behind the first `sent` bytes; how much.
    async fn send_some(&mut self, frames: &VecDeque<Frame>, sent: usize) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); 2 * FRAMES_AT_ONCE];
        let count = gather(frames, sent, &mut slices);
        match self.sink.send(&slices[..count]).await? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            now => {
                self.turn.moved(now).await;
                Ok(now)
            }
        }
    }
}

/// What is left of the frames behind the first `sent` bytes, which lie in the first frame, up to [`SEND_BYTES`], and up to the first
/// page bytes if what stands before them is short; how many slices that are.
fn gather<'a>(frames: &'a VecDeque<Frame>, sent: usize, slices: &mut [IoSlice<'a>]) -> usize {
    let mut skip = sent;
    let waiting = frames.iter().map(Frame::len).sum::<usize>() - sent;
    let most = if waiting > SEND_BYTES + SEND_BYTES / 4 { SEND_BYTES } else { SEND_BYTES / 2 };
    let (mut count, mut room) = (0, most);
    let mut short = true;
    for frame in frames {
        // Whoever sends page bytes may have to wait longer than what is short and stands before them.
        let has_payload = frame.payload_len > 0;
        if room == 0 || (short && has_payload && count > 0) {
            break;
        }
        short &= !has_payload;
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

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::{Arc, Mutex};

    async fn read(bytes: &[u8]) -> io::Result<Option<(FrameHeader, Vec<u8>)>> {
        let mut reader = FrameReader::new(Trickle { bytes: bytes.to_vec(), at: 0, step: bytes.len().max(1) });
        Ok(reader.next().await?.map(|header| (header, reader.body().to_vec())))
    }

    /// A stream that gives few bytes at a time.
    struct Trickle {
        bytes: Vec<u8>,
        at: usize,
        step: usize,
    }

    impl Source for Trickle {
        async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            let end = self.bytes.len().min(self.at + self.step);
            let received = (&self.bytes[self.at..end]).read_vectored(into)?;
            self.at += received;
            Ok(received)
        }
    }

    /// A stream that takes few bytes at a time.
    struct Narrow {
        taken: Arc<Mutex<Vec<u8>>>,
        step: usize,
    }

    impl Sink for Narrow {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            tokio::task::yield_now().await;
            let mut left = self.step;
            let mut taken = self.taken.lock().unwrap();
            for slice in from {
                let now = slice.len().min(left);
                taken.extend_from_slice(&slice[..now]);
                left -= now;
            }
            Ok(self.step - left)
        }
    }

    fn frames(payloads: &[usize]) -> impl Iterator<Item = Frame> + '_ {
        payloads.iter().enumerate().map(|(i, &bytes)| {
            let payload: Option<Payload> =
                (bytes > 0).then(|| Box::new((0..bytes).map(|at| (at * 7 + i) as u8).collect::<Vec<u8>>()) as _);
            Frame::new(9, i as u64, 0, &vec![i as u8; i * 1000], payload)
        })
    }

    #[tokio::test]
    async fn frames_come_through_any_stream_as_they_were() {
        let payloads = [0, 1, 5000, 0, 70_000, 4096, 1 << 20, 3, 0];
        for step in [1000, 4096, 4097, 65_536, 10 << 20] {
            let (sender, queue) = mpsc::channel(16);
            for frame in frames(&payloads) {
                sender.try_send(frame).map_err(|_| ()).unwrap();
            }
            drop(sender);
            let taken = Arc::default();
            let writer = FrameWriter::new(Narrow { taken: Arc::clone(&taken), step });
            writer.send_all(queue, Duration::from_secs(1)).await.unwrap();
            let bytes = taken.lock().unwrap().clone();
            let mut reader = FrameReader::new(Trickle { bytes, at: 0, step });
            for (i, expected) in frames(&payloads).enumerate() {
                let header = reader.next().await.unwrap().unwrap();
                assert_eq!((header.request, reader.body().len()), (i as u64, i * 1000));
                let mut memory = vec![0; header.payload_bytes as usize];
                let mut seen = Vec::new();
                if i == 6 {
                    reader.discard(memory.len()).await.unwrap();
                    continue;
                }
                reader.payload(&mut memory, |piece| seen.extend_from_slice(piece)).await.unwrap();
                assert!(memory == expected.payload_bytes() && seen == memory, "frame {i}, step {step}");
            }
            assert!(reader.next().await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn what_is_urgent_waits_for_little_of_the_bulk_and_never_changes_places() {
        let frame = |request, bytes: usize| {
            let payload: Option<Payload> = (bytes > 0).then(|| Box::new(vec![0u8; bytes]) as _);
            Frame::new(9, request, 0, b"", payload)
        };
        let ((urgent, first), (bulk, then)) = (mpsc::channel(64), mpsc::channel(64));
        let send = |queue: &mpsc::Sender<Frame>, frame| queue.try_send(frame).map_err(|_| ()).unwrap();
        (0..40).for_each(|number| send(&bulk, frame(number, 600 << 10)));
        let taken = Arc::<Mutex<Vec<u8>>>::default();
        let writer = FrameWriter::new(Narrow { taken: taken.clone(), step: 100_000 });
        let sending = tokio::spawn(writer.send_all(FrameQueue::new(first, then), Duration::from_secs(1)));
        // The bulk is on its way when something urgent comes up, and behind that more of the bulk.
        while taken.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        (100..103).for_each(|number| send(&urgent, frame(number, 0)));
        send(&bulk, frame(200, 10));
        drop((urgent, bulk));
        sending.await.unwrap().unwrap();
        let bytes = taken.lock().unwrap().clone();
        let mut reader = FrameReader::new(Trickle { bytes, at: 0, step: 1 << 20 });
        let mut order = Vec::new();
        while let Some(header) = reader.next().await.unwrap() {
            order.push(header.request);
            reader.discard(header.payload_bytes as usize).await.unwrap();
        }
        let urgent: Vec<usize> = (0..order.len()).filter(|&at| (100..103).contains(&order[at])).collect();
        assert!(urgent[2] <= 5 && urgent[2] == urgent[0] + 2, "{order:?}");
        order.retain(|number| !(100..103).contains(number));
        assert_eq!(order, (0..40).chain([200]).collect::<Vec<u64>>());
    }

    #[tokio::test]
    async fn what_is_short_leaves_before_the_pages_behind_it() {
        struct Sends(Arc<Mutex<Vec<usize>>>);
        impl Sink for Sends {
            async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
                let bytes = from.iter().map(|slice| slice.len()).sum();
                self.0.lock().unwrap().push(bytes);
                Ok(bytes)
            }
        }
        let (sender, queue) = mpsc::channel(16);
        for bytes in [0, 0, 70_000, 0, 70_000] {
            let payload: Payload = Box::new(vec![0u8; bytes]);
            sender.try_send(Frame::new(9, 0, 0, b"", Some(payload))).map_err(|_| ()).unwrap();
        }
        drop(sender);
        let sends = Arc::default();
        FrameWriter::new(Sends(Arc::clone(&sends))).send_all(queue, Duration::from_secs(1)).await.unwrap();
        assert_eq!(*sends.lock().unwrap(), [2 * HEADER_BYTES, 3 * HEADER_BYTES + 140_000]);
    }

    #[tokio::test]
    async fn who_moves_much_lets_others_have_their_turns() {
        async fn turns_beside<T>(work: impl Future<Output = T> + Send + 'static) -> u32
        where
            T: Send + 'static,
        {
            let (work, mut turns) = (tokio::spawn(work), 0);
            while !work.is_finished() {
                turns += 1;
                tokio::task::yield_now().await;
            }
            turns
        }
        struct Ready;
        impl Source for Ready {
            async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                Ok(into[0].len())
            }
        }
        impl Sink for Ready {
            async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
                Ok(from.iter().map(|slice| slice.len()).sum())
            }
        }
        let reading = async { FrameReader::new(Ready).discard(16 << 20).await };
        assert!(turns_beside(reading).await >= 16);
        let (sender, queue) = mpsc::channel(16);
        for _ in 0..16 {
            let frame = Frame::new(9, 0, 0, b"", Some(Box::new(vec![0u8; 1 << 20])));
            sender.try_send(frame).map_err(|_| ()).unwrap();
        }
        drop(sender);
        let bulk = FrameQueue::new(mpsc::channel(1).1, queue);
        let writing = FrameWriter::new(Ready).send_all(bulk, Duration::from_secs(1));
        assert!(turns_beside(writing).await >= 4);
    }

    #[tokio::test]
    async fn a_body_that_is_skipped_is_checked_all_the_same() {
        for damage in [None, Some(8000)] {
            let mut bytes = Frame::new(9, 1, 0, &[5; 9000], None).head;
            let mut second = Frame::new(9, 2, 0, b"x", None);
            second.number(1);
            bytes.extend(second.head);
            damage.inspect(|&at: &usize| bytes[at] ^= 1);
            let mut reader = FrameReader::new(Trickle { bytes, at: 0, step: 1000 });
            let head = reader.head().await.unwrap().unwrap();
            assert_eq!(reader.skip_body(&head).await.is_ok(), damage.is_none());
            if damage.is_none() {
                assert_eq!(reader.next().await.unwrap().unwrap().request, 2);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_is_given_up() {
        struct Stuck;
        impl Sink for Stuck {
            async fn send(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
                std::future::pending().await
            }
        }
        let (sender, queue) = mpsc::channel(1);
        sender.send(frames(&[10]).next().unwrap()).await.map_err(|_| ()).unwrap();
        let begin = Instant::now();
        let error = FrameWriter::new(Stuck).send_all(queue, Duration::from_secs(3)).await.unwrap_err();
        assert_eq!((error.kind(), begin.elapsed().as_secs()), (io::ErrorKind::TimedOut, 3));
    }

    #[tokio::test]
    async fn round_trip_and_every_flipped_byte() {
        let frame = Frame::new(7, 99, 250, b"hello", Some(Box::new(vec![1u8, 2, 3])));
        let (header, body) = read(&frame.head).await.unwrap().unwrap();
        assert_eq!((header.kind, header.request, header.deadline_ms, header.payload_bytes), (7, 99, 250, 3));
        assert_eq!(body, b"hello");
        for at in 0..frame.head.len() {
            let mut bad = frame.head.clone();
            bad[at] ^= 4;
            assert!(read(&bad).await.is_err(), "byte {at}");
        }
        assert!(read(b"").await.unwrap().is_none());
        assert!(read(&frame.head[..20]).await.is_err());
    }

    #[tokio::test]
    async fn a_frame_is_taken_in_its_place_and_in_no_other() {
        let numbered = |number| {
            let mut frame = Frame::new(7, 1, 0, b"body", None);
            frame.number(number);
            frame.head
        };
        let taken = async |numbers: &[u32]| {
            let bytes = numbers.iter().flat_map(|&number| numbered(number)).collect();
            let mut reader = FrameReader::new(Trickle { bytes, at: 0, step: 100 });
            let mut taken = 0;
            while reader.next().await.is_ok_and(|header| header.is_some()) {
                taken += 1;
            }
            taken
        };
        for (numbers, good) in [(&[0, 1, 2][..], 3), (&[1], 0), (&[0, 0], 1), (&[0, 2, 1], 1), (&[0, 1, 0], 2)] {
            assert_eq!(taken(numbers).await, good, "{numbers:?}");
        }
    }

    #[tokio::test]
    async fn a_strangers_length_is_refused_before_it_is_believed() {
        let mut head = Frame::new(7, 1, 0, b"", None).head;
        head[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = read(&head).await.unwrap_err();
        assert!(error.to_string().contains("maximum"), "{error}");
    }
}
