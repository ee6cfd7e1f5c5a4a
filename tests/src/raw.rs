//! Connections to a data port without the checks of a client, request by request.

use larder_format::NamespaceDescriptor;
use larder_wire::{FrameReader, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Request, Response, VERSION_RETRY_AFTER};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpSocket, TcpStream};

/// Connection that sends what a test tells it to. It reads nothing by itself.
pub struct RawConnection {
    reader: FrameReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    /// Number of the next request, and of its frame.
    next: u32,
}

impl RawConnection {
    /// Connects without a handshake.
    pub async fn open(address: SocketAddr) -> io::Result<RawConnection> {
        Ok(Self::over(TcpStream::connect(address).await?))
    }

    fn over(stream: TcpStream) -> RawConnection {
        let (read, write) = stream.into_split();
        RawConnection { reader: FrameReader::new(read), write, next: 0 }
    }

    /// Connects and completes the handshake.
    ///
    /// # Errors
    /// `ConnectionRefused` if the node answers anything but Hello, with its answer as text.
    pub async fn connect(address: SocketAddr, namespace: Option<NamespaceDescriptor>) -> io::Result<RawConnection> {
        RawConnection::open(address).await?.greet(namespace).await
    }

    /// Connects from another address of this machine, as a peer of its own, and completes the
    /// handshake.
    ///
    /// # Errors
    /// As for [`RawConnection::connect`].
    pub async fn connect_from(from: Ipv4Addr, address: SocketAddr) -> io::Result<RawConnection> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        Self::over(socket.connect(address).await?).greet(None).await
    }

    async fn greet(mut self, namespace: Option<NamespaceDescriptor>) -> io::Result<RawConnection> {
        match self.request(&hello(namespace)).await? {
            Response::Hello { .. } => Ok(self),
            other => Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("{other:?} to hello"))),
        }
    }

    /// Sends a request and does not wait for its answer.
    pub async fn send(&mut self, request: &Request) -> io::Result<()> {
        let frame = self.frame(request);
        self.send_bytes(&frame).await
    }

    pub async fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write.write_all(bytes).await
    }

    /// Returns the bytes of the next request. The caller sends all of them, some, or none and no
    /// further request.
    pub fn frame(&mut self, request: &Request) -> Vec<u8> {
        let mut frame = request.frame(PROTOCOL_VERSION, self.next.into(), 0, None);
        frame.number(self.next);
        self.next += 1;
        frame.head
    }

    /// Sends a request and receives the next answer.
    pub async fn request(&mut self, request: &Request) -> io::Result<Response> {
        self.send(request).await?;
        self.receive().await
    }

    /// Receives the next answer, whichever request it belongs to. It has no deadline.
    ///
    /// # Errors
    /// `UnexpectedEof` if the node has closed the connection, `InvalidData` for an answer that
    /// cannot be decoded.
    pub async fn receive(&mut self) -> io::Result<Response> {
        let header = self.reader.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        // The error before a handshake has the oldest version. Its encoding never changed.
        let decode = |version| Response::decode(version, header.kind, self.reader.body());
        let response = decode(PROTOCOL_VERSION).or_else(|_| decode(VERSION_RETRY_AFTER));
        response.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Waits until the node closes the connection. Discards its answers. Also returns if the node
    /// sends a frame that is not valid.
    pub async fn closed(&mut self) {
        while let Ok(Some(_)) = self.reader.next().await {}
    }
}

/// Handshake of a client of this build.
pub fn hello(namespace: Option<NamespaceDescriptor>) -> Request {
    Request::Hello { version_min: PROTOCOL_VERSION_MIN, version_max: PROTOCOL_VERSION, name: "raw".into(), namespace }
}
