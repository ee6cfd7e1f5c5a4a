//! The node's side: it accepts processes of its machine and hands them the arena.

use super::check_user;
use super::handshake::{send, try_send};
use rustix::fs::{Mode, OFlags, open};
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream};
use tokio::net::{UnixListener, UnixStream};

/// Bytes of messages on a session that the peer has not received. The kernel doubles it, which is
/// room for some ten messages: their descriptors count for all processes of this user.
const SESSION_BUFFER_BYTES: usize = 4096;

/// Listener for processes of this machine, in the abstract socket namespace.
pub struct ArenaListener {
    listener: UnixListener,
}

impl ArenaListener {
    /// Listens under this name. Must be called inside a tokio runtime. Fails if another process has
    /// the name.
    pub fn open(name: &str) -> io::Result<ArenaListener> {
        let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(ArenaListener { listener: UnixListener::from_std(listener)? })
    }

    /// Waits for the next connection. Its user is checked by [`ArenaSession::start`].
    pub async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// Reopens a file read-only. A duplicated descriptor would keep the right to write.
pub fn read_only(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The time during which a process may access the arena. It lasts as long as the process holds its
/// end of a socket pair. The node sends it files of L3 over that pair.
#[derive(Debug)]
pub struct ArenaSession {
    end: UnixStream,
}

impl ArenaSession {
    /// Sends the first `bytes` bytes of `arena`, a read-only descriptor, to `peer`. Fails if the
    /// peer belongs to another user.
    pub async fn start(peer: &UnixStream, arena: BorrowedFd<'_>, bytes: u64) -> io::Result<ArenaSession> {
        check_user(peer)?;
        let (end, far_end) = StdStream::pair()?;
        end.set_nonblocking(true)?;
        set_socket_send_buffer_size(&end, SESSION_BUFFER_BYTES)?;
        send(peer, bytes, &[arena, far_end.as_fd()]).await?;
        Ok(ArenaSession { end: UnixStream::from_std(end)? })
    }

    /// Sends descriptors to the peer, at most 16, with a number that tells it their purpose. Does
    /// not wait.
    ///
    /// # Errors
    /// `WouldBlock` if the peer has not received earlier ones. Any other error of the system, for
    /// example if too many descriptors of this user are under way.
    pub fn send_files(&self, number: u64, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        try_send(self.end.as_fd(), number, files)
    }

    /// Waits until no process holds the far end. Memory held for the peer can then be reused.
    pub async fn ended(&self) {
        let mut nothing = [0; 64];
        while self.end.readable().await.is_ok() {
            match self.end.try_read(&mut nothing) {
                Ok(bytes) if bytes > 0 => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    }
}
