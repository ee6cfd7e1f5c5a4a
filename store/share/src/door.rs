//! The node's side.

use crate::check_user;
use crate::greeting::say;
use rustix::fs::{Mode, OFlags, open};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};

/// Where processes of this machine come in.
pub struct Door {
    listener: UnixListener,
}

impl Door {
    /// Opens a door of that name. Must be called inside a tokio runtime.
    pub fn open(name: &str) -> io::Result<Door> {
        let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Door { listener: UnixListener::from_std(listener)? })
    }

    /// Waits for the next who comes in, of whatever user.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// The file behind `file`, open for reading alone.
pub fn read_only(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// How long a process may look at the arena: as long as it holds its end.
#[derive(Debug)]
pub struct Tenure {
    end: UnixStream,
}

impl Tenure {
    /// Hands `bytes` bytes of `arena`, which is open for reading alone, to who came through the door, if it is of this user
    /// or of root.
    pub async fn begin(guest: &UnixStream, arena: BorrowedFd<'_>, bytes: u64) -> io::Result<Tenure> {
        check_user(guest)?;
        let (end, far_end) = StdStream::pair()?;
        end.set_nonblocking(true)?;
        say(guest, bytes, &[arena, far_end.as_fd()]).await?;
        Ok(Tenure { end: UnixStream::from_std(end)? })
    }

    /// Waits until no process has the far end any more.
    pub async fn over(mut self) {
        let mut nothing = [0; 64];
        while self.end.read(&mut nothing).await.is_ok_and(|bytes| bytes > 0) {}
    }
}
