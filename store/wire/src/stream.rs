//! Byte streams below the frames: TCP sockets, UNIX sockets, and the simulation's network.

use socket2::SockRef;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use tokio::net::{tcp, unix};

/// Bytes in a TCP socket that the kernel has not sent yet, from which on it takes no more. A
/// cancelled page would otherwise keep the stream busy with all that fits into the socket's buffer:
/// 4 MiB, which take a minute at 64 KB/s. Bytes on their way to the peer do not count.
const UNSENT_BYTES_MAX: u32 = 256 << 10;

/// Limits the unsent bytes of a TCP socket, so that short frames and cancellations do not wait
/// behind a full buffer.
///
/// # Errors
/// The socket is not a TCP socket.
pub fn limit_unsent_bytes(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_tcp_notsent_lowat(UNSENT_BYTES_MAX)
}

/// Receiving half of an ordered byte stream. The frame reader adds message boundaries and checks,
/// so a source only moves bytes.
pub trait ByteSource: Send + 'static {
    /// Waits for bytes and fills the buffers in order. Returns the number of bytes, 0 at the end of
    /// the stream.
    ///
    /// Cancel safe: an implementation MUST NOT lose bytes when the future is dropped.
    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> impl Future<Output = io::Result<usize>> + Send;

    /// Like [`ByteSource::receive`], at the start of a message. The wait may be long, or very short
    /// if the peer answers at once, so an implementation may spin before it sleeps.
    fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> impl Future<Output = io::Result<usize>> + Send {
        self.receive(into)
    }
}

/// A source that can be polled without waiting. Only a source with this trait can spin for its next
/// message.
pub trait TryReceive {
    /// Fills the buffers in order with bytes that have already arrived. Returns `None` if there are
    /// none.
    fn try_receive(&mut self, into: &mut [IoSliceMut<'_>]) -> Option<io::Result<usize>>;
}

/// Sending half of an ordered byte stream. It may take fewer bytes than it is offered, as a socket
/// does.
pub trait ByteSink: Send + 'static {
    /// Waits for room and takes bytes from the buffers in order. Returns the number of bytes taken.
    ///
    /// Cancel safe: an implementation MUST NOT take bytes if the future is dropped before it
    /// completes.
    fn send(&mut self, from: &[IoSlice<'_>]) -> impl Future<Output = io::Result<usize>> + Send;
}

macro_rules! sockets {
    ($($source:ty, $sink:ty);+) => { $(
        impl ByteSource for $source {
            async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                loop {
                    self.readable().await?;
                    match self.try_read_vectored(into) {
                        // Readiness may be stale: another read took the bytes that raised it.
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        received => return received,
                    }
                }
            }
        }

        impl TryReceive for $source {
            fn try_receive(&mut self, into: &mut [IoSliceMut<'_>]) -> Option<io::Result<usize>> {
                // The system call itself, not tokio's `try_read`: tokio answers from cached
                // readiness, which only the runtime's event loop refreshes, and a spinning task
                // does not let that loop run.
                match rustix::io::readv(self.as_ref(), into) {
                    Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
                    received => Some(received.map_err(io::Error::from)),
                }
            }
        }

        impl ByteSink for $sink {
            async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
                loop {
                    self.writable().await?;
                    match self.try_write_vectored(from) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        sent => return sent,
                    }
                }
            }
        }
    )+ };
}

sockets!(tcp::OwnedReadHalf, tcp::OwnedWriteHalf; unix::OwnedReadHalf, unix::OwnedWriteHalf);
