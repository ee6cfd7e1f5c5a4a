//! Frames: header, body, payload.

use larder_format::MAX_PAGE_BYTES;
use larder_format::codec::{DecodeError, Put, Reader};
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::mpsc;

/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 32;
/// Most bytes of a body.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// Buffer of each direction of a connection; page bytes larger than that go past it.
pub const IO_BUFFER_BYTES: usize = 64 << 10;

const MAGIC: [u8; 4] = *b"LRDR";

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
    hasher.update(&header[..28]);
    hasher.update(body);
    hasher.finalize()
}

/// Page bytes that travel with a frame, from whatever memory holds them.
pub type Payload = Box<dyn AsRef<[u8]> + Send + Sync>;

/// A frame ready to be sent.
pub struct Frame {
    /// Header and body.
    pub head: Vec<u8>,
    /// Page bytes, sent from where they lie.
    pub payload: Option<Payload>,
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
        Frame { head, payload }
    }

    /// Bytes of head and payload.
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.as_ref().map_or(0, |p| (**p).as_ref().len())
    }

    /// Never: a frame has a header.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// Reads the next header and body; the payload is left in the stream for the caller to place. `None` at a clean end.
///
/// `body` is reused between calls. What is not a frame is an `InvalidData` error: the stream cannot be trusted any more.
pub async fn read_frame<R: AsyncRead + Unpin>(stream: &mut R, body: &mut Vec<u8>) -> io::Result<Option<FrameHeader>> {
    let mut bytes = [0u8; HEADER_BYTES];
    let first = stream.read(&mut bytes).await?;
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut bytes[first..]).await?;
    let header = FrameHeader::decode(&bytes).map_err(invalid)?;
    body.resize(header.body_bytes as usize, 0);
    stream.read_exact(body).await?;
    if crc(&bytes, body) != header.crc {
        return Err(invalid(DecodeError::Checksum("frame")));
    }
    Ok(Some(header))
}

/// Sends queued frames until the queue is closed, a frame takes longer than `stall`, or the stream fails. Small frames that
/// wait together leave together.
pub async fn write_frames<W: AsyncWrite + Unpin>(
    stream: W,
    mut queue: mpsc::Receiver<Frame>,
    stall: Duration,
) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(IO_BUFFER_BYTES, stream);
    while let Some(frame) = queue.recv().await {
        let send = async {
            out.write_all(&frame.head).await?;
            if let Some(payload) = &frame.payload {
                out.write_all((**payload).as_ref()).await?;
            }
            if queue.is_empty() { out.flush().await } else { Ok(()) }
        };
        tokio::time::timeout(stall, send).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    }
    out.flush().await
}

/// Reads and throws away a payload that nobody wants.
pub async fn discard<R: AsyncRead + Unpin>(stream: &mut R, bytes: usize) -> io::Result<()> {
    let copied = tokio::io::copy(&mut stream.take(bytes as u64), &mut tokio::io::sink()).await?;
    if copied < bytes as u64 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8]) -> io::Result<Option<(FrameHeader, Vec<u8>)>> {
        let mut body = Vec::new();
        let mut stream = bytes;
        Ok(read_frame(&mut stream, &mut body).await?.map(|header| (header, body)))
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
    async fn a_strangers_length_is_refused_before_it_is_believed() {
        let mut head = Frame::new(7, 1, 0, b"", None).head;
        head[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = read(&head).await.unwrap_err();
        assert!(error.to_string().contains("maximum"), "{error}");
    }
}
