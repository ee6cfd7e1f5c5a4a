//! Byte streams that frames travel on: sockets, and whatever else moves bytes in order.

use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use tokio::net::{tcp, unix};

/// The side of a stream that bytes come from.
pub trait Source: Send + 'static {
    /// Waits for bytes and puts them into the buffers, one after the other; 0 at the end of the stream. Dropping the future
    /// loses nothing.
    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> impl Future<Output = io::Result<usize>> + Send;

    /// The same for the beginning of a message: nothing is under way that must come, so it may be worth being awake.
    fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> impl Future<Output = io::Result<usize>> + Send {
        self.receive(into)
    }
}

/// A side of a socket that can be looked at without waiting.
pub trait Ready {
    /// Puts bytes into the buffers, as [`Source::receive`], if there are any.
    fn receive_now(&mut self, into: &mut [IoSliceMut<'_>]) -> Option<io::Result<usize>>;
}

/// The side of a stream that bytes go to.
pub trait Sink: Send + 'static {
    /// Waits for room and takes bytes from the buffers, one after the other; how many. Dropping the future sends nothing.
    fn send(&mut self, from: &[IoSlice<'_>]) -> impl Future<Output = io::Result<usize>> + Send;
}

macro_rules! sockets {
    ($($source:ty, $sink:ty);+) => { $(
        impl Source for $source {
            async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                loop {
                    self.readable().await?;
                    match self.try_read_vectored(into) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        received => return received,
                    }
                }
            }
        }

        impl Ready for $source {
            fn receive_now(&mut self, into: &mut [IoSliceMut<'_>]) -> Option<io::Result<usize>> {
                match rustix::io::readv(self.as_ref(), into) {
                    Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
                    received => Some(received.map_err(io::Error::from)),
                }
            }
        }

        impl Sink for $sink {
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
