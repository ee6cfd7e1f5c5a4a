//! Sockets that a forked child must close.
//!
//! A child inherits the sockets of its parent. While it has them, a node takes the parent for
//! alive, and keeps what it holds for it. Rust code that forks always executes another program,
//! which closes them. An interpreter such as Python's may run on in the child.

use parking_lot::Mutex;
use rustix::fs::fstat;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};

/// Open sockets, with their inode numbers.
static OPEN: Mutex<BTreeMap<RawFd, u64>> = Mutex::new(BTreeMap::new());

/// Lists a socket in [`open_sockets`]. Its owner drops this before it closes the socket.
#[derive(Debug)]
pub struct ChildCloses(RawFd);

impl ChildCloses {
    /// Lists `socket`. A socket that the kernel cannot describe is not listed.
    pub fn new(socket: impl AsFd) -> ChildCloses {
        let socket = socket.as_fd();
        if let Ok(stat) = fstat(socket) {
            OPEN.lock().insert(socket.as_raw_fd(), stat.st_ino);
        }
        ChildCloses(socket.as_raw_fd())
    }
}

impl Drop for ChildCloses {
    fn drop(&mut self) {
        OPEN.lock().remove(&self.0);
    }
}

/// Sockets to nodes that this process has open: descriptors and inode numbers. A child that was
/// forked afterwards closes those descriptors that still have the same inode.
pub fn open_sockets() -> Vec<(RawFd, u64)> {
    OPEN.lock().iter().map(|(&descriptor, &inode)| (descriptor, inode)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_listed_until_its_entry_is_dropped() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let entry = ChildCloses::new(&socket);
        let listed = || open_sockets().iter().any(|(descriptor, _)| *descriptor == socket.as_raw_fd());
        assert!(listed());
        drop(entry);
        assert!(!listed());
    }
}
