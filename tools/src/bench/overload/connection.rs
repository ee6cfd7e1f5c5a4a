//! Connection that sends and receives raw frames. The load generator runs beside the node on the
//! same machine, so it must cost less than a full client.

use anyhow::{Context, Result};
use larder_format::NamespaceDescriptor;
use larder_wire::{
    ByteSink, Frame, FrameReader, FrameWriter, PROTOCOL_VERSION_MIN, Request, Response, VERSION_FRAGMENTS,
};
use std::io::{self, IoSlice};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Protocol version of the load generator. It receives one frame after the other, so it wants no
/// frames between the fragments of a page.
pub const VERSION: u16 = VERSION_FRAGMENTS - 1;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Socket that fails after a set number of bytes, to disconnect in the middle of a frame. The node
/// must then free what the put had reserved.
pub struct TruncatingWriter {
    write: OwnedWriteHalf,
    bytes_left: usize,
}

impl ByteSink for TruncatingWriter {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.bytes_left == usize::MAX {
            return self.write.send(from).await;
        }
        let first = from.first().map_or(&[][..], |first| &first[..first.len().min(self.bytes_left)]);
        if first.is_empty() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let sent = self.write.send(&[IoSlice::new(first)]).await?;
        self.bytes_left -= sent;
        Ok(sent)
    }
}

pub struct FrameConnection {
    pub reader: FrameReader<OwnedReadHalf>,
    pub writer: FrameWriter<TruncatingWriter>,
}

impl FrameConnection {
    pub async fn attach(address: &str, namespace: NamespaceDescriptor) -> Result<FrameConnection> {
        Self::attach_truncated(address, namespace, usize::MAX).await
    }

    pub async fn attach_truncated(
        address: &str,
        namespace: NamespaceDescriptor,
        bytes: usize,
    ) -> Result<FrameConnection> {
        Self::over(TcpStream::connect(address).await?, namespace, bytes).await
    }

    /// Completes the handshake on a new connection, which fails after sending `bytes` bytes.
    pub async fn over(stream: TcpStream, namespace: NamespaceDescriptor, bytes: usize) -> Result<FrameConnection> {
        larder_wire::prepare_socket(&stream)?;
        let (read, write) = stream.into_split();
        let mut connection = FrameConnection {
            reader: FrameReader::new(read),
            writer: FrameWriter::new(TruncatingWriter { write, bytes_left: bytes }),
        };
        let hello = Request::Hello {
            version_min: PROTOCOL_VERSION_MIN,
            version_max: VERSION,
            name: "load".into(),
            namespace: Some(namespace),
        };
        connection.send(hello.frame(PROTOCOL_VERSION_MIN, 0, 0, None)).await?;
        // The answer to Hello has the same layout in every version.
        connection.receive_versioned(PROTOCOL_VERSION_MIN).await?;
        Ok(connection)
    }

    pub async fn send(&mut self, frame: Frame) -> Result<()> {
        Ok(tokio::time::timeout(TIMEOUT, self.writer.send(frame)).await??)
    }

    pub async fn receive(&mut self) -> Result<Response> {
        self.receive_versioned(VERSION).await
    }

    async fn receive_versioned(&mut self, version: u16) -> Result<Response> {
        let header =
            tokio::time::timeout(TIMEOUT, self.reader.next()).await??.context("the node closed the connection")?;
        let response = Response::decode(version, header.kind, self.reader.body())?;
        self.reader.discard().await?;
        Ok(response)
    }
}
