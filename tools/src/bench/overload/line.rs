//! One connection to the node that speaks frames itself: the load must cost little beside the node, on the same machine.

use super::load::namespace;
use anyhow::{Context, Result};
use larder_wire::{Frame, FrameReader, FrameWriter, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Request, Response, Sink};
use std::io::{self, IoSlice};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Most time for a frame to come or to leave.
const PATIENCE: Duration = Duration::from_secs(10);

/// What goes to the node, up to some byte at which it breaks off.
pub struct Way {
    write: OwnedWriteHalf,
    left: usize,
}

impl Sink for Way {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.left == usize::MAX {
            return self.write.send(from).await;
        }
        let first = from.first().map_or(&[][..], |first| &first[..first.len().min(self.left)]);
        if first.is_empty() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let sent = self.write.send(&[IoSlice::new(first)]).await?;
        self.left -= sent;
        Ok(sent)
    }
}

/// A connection that has said hello.
pub struct Line {
    pub reader: FrameReader<OwnedReadHalf>,
    pub writer: FrameWriter<Way>,
}

impl Line {
    /// Attaches to the pages of a tenant.
    pub async fn attach(address: &str, page_bytes: usize, tenant: &str) -> Result<Line> {
        Self::attach_for(address, page_bytes, tenant, usize::MAX).await
    }

    /// Attaches, and will break off after so many bytes were said.
    pub async fn attach_for(address: &str, page_bytes: usize, tenant: &str, bytes: usize) -> Result<Line> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (read, write) = stream.into_split();
        let mut line = Line { reader: FrameReader::new(read), writer: FrameWriter::new(Way { write, left: bytes }) };
        let hello = Request::Hello {
            version_min: PROTOCOL_VERSION_MIN,
            version_max: PROTOCOL_VERSION,
            name: "overload".into(),
            namespace: Some(namespace(page_bytes, tenant)),
        };
        line.say(hello.frame(PROTOCOL_VERSION_MIN, 0, 0, None)).await?;
        // Hello is the same in every version.
        line.hear_of(PROTOCOL_VERSION_MIN).await?;
        Ok(line)
    }

    /// Sends one frame.
    pub async fn say(&mut self, frame: Frame) -> Result<()> {
        Ok(tokio::time::timeout(PATIENCE, self.writer.send(frame)).await??)
    }

    /// The next answer; its payload, if it has one, is thrown away.
    pub async fn hear(&mut self) -> Result<Response> {
        self.hear_of(PROTOCOL_VERSION).await
    }

    async fn hear_of(&mut self, version: u16) -> Result<Response> {
        let header = tokio::time::timeout(PATIENCE, self.reader.next()).await??.context("the node hung up")?;
        let response = Response::decode(version, header.kind, self.reader.body())?;
        self.reader.discard(header.payload_bytes as usize).await?;
        Ok(response)
    }
}
