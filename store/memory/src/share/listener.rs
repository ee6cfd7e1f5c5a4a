//! The node's side: it accepts processes of its machine and hands them the arena.

use super::check_user;
use super::handshake::send;
use rustix::fs::{Mode, OFlags, open};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};

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
/// end of a socket pair.
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
        send(peer, bytes, &[arena, far_end.as_fd()]).await?;
        Ok(ArenaSession { end: UnixStream::from_std(end)? })
    }

    /// Waits until no process holds the far end. Memory held for the peer can then be reused.
    pub async fn ended(mut self) {
        let mut nothing = [0; 64];
        while self.end.read(&mut nothing).await.is_ok_and(|bytes| bytes > 0) {}
    }
}
