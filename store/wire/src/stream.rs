//! Byte streams below the frames: TCP sockets, UNIX sockets, and the simulation's network.

use socket2::SockRef;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream, tcp, unix};

/// Bytes in the TCP socket of a slow link that the kernel has not sent, from which on it takes no
/// more. Bytes on their way to the peer do not count. At 64 KB/s the socket then takes bytes twice
/// a second, so that progress shows, and a cancelled page leaves soon.
const UNSENT_BYTES_MAX: u32 = 64 << 10;

/// Limits the unsent bytes of a TCP socket, or ends the limit.
fn limit_unsent(socket: &TcpStream, is_limited: bool) {
    let bytes = if is_limited { UNSENT_BYTES_MAX } else { i32::MAX as u32 };
    // Without the option short frames wait longer, and nothing else changes.
    let _ = SockRef::from(socket).set_tcp_notsent_lowat(bytes);
}

/// Congestion control of connections within one machine. It is part of every kernel, and allowed
/// for every user.
const LOCAL_CONGESTION_CONTROL: &[u8] = b"reno";

/// Prepares a TCP socket for frames. Short frames leave at once (`TCP_NODELAY`).
///
/// On a connection within one machine it replaces BBR, which many systems use by default. BBR paces
/// each connection with timers. That costs up to a fifth of the node's processor time, and there is
/// no network to protect.
pub fn prepare_socket(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    let [peer, local] = [socket.peer_addr(), socket.local_addr()].map(|address| address.ok()?.as_socket());
    if let (Some(peer), Some(local)) = (peer, local)
        && (peer.ip().is_loopback() || peer.ip() == local.ip())
    {
        // The system's choice works too, only slower.
        let _ = socket.set_tcp_congestion(LOCAL_CONGESTION_CONTROL);
    }
    Ok(())
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

    /// Keeps few bytes in buffers below, or stops doing so. Buffered bytes can neither be overtaken
    /// nor abandoned, and hide the progress of a slow link. On a fast link the limit costs about a
    /// tenth of the throughput. The default does nothing.
    fn limit_buffered(&mut self, _is_limited: bool) {}

    /// Returns the socket below, if there is one. Its owner can look how far the peer has received.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the bytes that the peer has not acknowledged, if the frame writer is to look how far
    /// the peer has received while the sink takes nothing. The default is `None`.
    fn unacknowledged_bytes(&self) -> Option<u64> {
        None
    }
}

/// One attempt to move bytes through a socket. A transfer of fewer bytes than wanted proves that
/// the socket is empty, or full. The attempt then ends the readiness that tokio has recorded, and
/// the next one waits without a system call in vain. tokio's own `poll_read` does so, but its
/// vectored calls do not.
struct Transfer {
    wanted: usize,
    moved: Option<usize>,
}

impl Transfer {
    fn of(wanted: usize) -> Self {
        Self { wanted, moved: None }
    }

    /// Makes the system call, within tokio's `try_io`. `WouldBlock` clears the readiness that was
    /// read before the call, and no later one.
    fn run(&mut self, call: impl FnOnce() -> rustix::io::Result<usize>) -> io::Result<()> {
        let moved = call()?;
        self.moved = Some(moved);
        // An end of the stream stays ready.
        if moved > 0 && moved < self.wanted { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    /// Returns the outcome of the system call. `None` if the readiness was stale: another call took
    /// the bytes or the room that raised it.
    fn end(self, ready: io::Result<()>) -> Option<io::Result<usize>> {
        match (self.moved, ready) {
            (Some(moved), _) => Some(Ok(moved)),
            (None, Err(error)) if error.kind() != io::ErrorKind::WouldBlock => Some(Err(error)),
            (None, _) => None,
        }
    }
}

macro_rules! sockets {
    ($($source:ty, $sink:ty, $limit:expr);+) => { $(
        impl ByteSource for $source {
            async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                let room = into.iter().map(|slice| slice.len()).sum();
                loop {
                    self.readable().await?;
                    let socket = self.as_ref();
                    let mut transfer = Transfer::of(room);
                    let ready = socket.try_io(Interest::READABLE, || transfer.run(|| rustix::io::readv(socket, into)));
                    if let Some(received) = transfer.end(ready) {
                        return received;
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
                let bytes = from.iter().map(|slice| slice.len()).sum();
                loop {
                    self.writable().await?;
                    let socket = self.as_ref();
                    let mut transfer = Transfer::of(bytes);
                    let ready = socket.try_io(Interest::WRITABLE, || transfer.run(|| rustix::io::writev(socket, from)));
                    if let Some(sent) = transfer.end(ready) {
                        return sent;
                    }
                }
            }

            fn limit_buffered(&mut self, is_limited: bool) {
                $limit(self.as_ref(), is_limited);
            }

            fn socket(&self) -> Option<BorrowedFd<'_>> {
                Some(self.as_ref().as_fd())
            }
        }
    )+ };
}

// A local socket is never slow.
sockets!(
    tcp::OwnedReadHalf, tcp::OwnedWriteHalf, limit_unsent;
    unix::OwnedReadHalf, unix::OwnedWriteHalf, |_: &UnixStream, _| ()
);

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::net::TcpListener;

    const BYTES: usize = 64 << 20;

    #[test]
    fn only_a_short_transfer_ends_the_readiness() {
        let outcome = |call: rustix::io::Result<usize>| {
            let mut transfer = Transfer::of(10);
            let ready = transfer.run(|| call);
            (ready.is_ok(), transfer.end(ready).map(|ended| ended.map_err(|error| error.kind())))
        };
        assert_eq!(outcome(Ok(10)), (true, Some(Ok(10))));
        assert_eq!(outcome(Ok(9)), (false, Some(Ok(9))));
        assert_eq!(outcome(Ok(0)), (true, Some(Ok(0))), "the end of the stream stays ready");
        assert_eq!(outcome(Err(rustix::io::Errno::AGAIN)), (false, None));
        assert_eq!(outcome(Err(rustix::io::Errno::CONNRESET)), (false, Some(Err(io::ErrorKind::ConnectionReset))));
    }

    #[tokio::test]
    async fn bytes_and_room_after_a_short_transfer_wake_the_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut source, _write) = client.into_split();
        let (_read, mut sink) = listener.accept().await.unwrap().0.into_split();
        let sending = tokio::spawn(async move {
            let bytes = vec![7; BYTES];
            let mut sent = 0;
            while sent < BYTES {
                sent += sink.send(&[IoSlice::new(&bytes[sent..])]).await.unwrap();
            }
        });
        let mut memory = vec![0; 1 << 20];
        let mut received = 0;
        loop {
            let into = &mut [IoSliceMut::new(&mut memory)];
            let now = tokio::time::timeout(Duration::from_secs(20), source.receive(into)).await.expect("no wake-up");
            match now.unwrap() {
                0 => break,
                bytes => received += bytes,
            }
        }
        sending.await.unwrap();
        assert_eq!(received, BYTES);
    }
}
