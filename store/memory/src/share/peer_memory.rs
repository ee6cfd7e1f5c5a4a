//! Memory of a client that the node copies from.
//!
//! Invariant: whatever the client does with its file, a read returns promptly, with bytes or with
//! an error. Only files in memory are accepted, because a FIFO, a device or a network file could
//! block a reader. They are read with `pread`, where missing bytes are a short read; touching a
//! truncated mapping would raise SIGBUS.

use super::handshake::{is_handshake, receive};
use rustix::fs::{FileType, fcntl_get_seals, fstat};
use rustix::io::{Errno, pread};
use std::io;
use std::os::fd::OwnedFd;
use tokio::net::UnixStream;

/// Client memory that the node may copy from.
pub trait PeerMemory: Send + Sync + 'static {
    /// Fills `into` with the bytes at `offset` as they are now. Fails if the memory is shorter.
    /// Does not block.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

/// Shared memory of a connected process, as the file it handed over.
#[derive(Debug)]
pub struct PeerMemoryFile {
    file: OwnedFd,
    bytes: u64,
}

impl PeerMemoryFile {
    /// Receives the memory that `peer` shares, if any. A peer that shares memory sends a handshake
    /// before its first frame. Waits for either without a limit.
    pub async fn receive(peer: &UnixStream) -> io::Result<Option<PeerMemoryFile>> {
        if !is_handshake(peer).await? {
            return Ok(None);
        }
        let (bytes, files) = receive(peer).await?;
        let [file] =
            <[OwnedFd; 1]>::try_from(files).map_err(|_| invalid("the handshake does not carry one descriptor"))?;
        PeerMemoryFile::of(file, bytes).map(Some)
    }

    /// Accepts the first `bytes` bytes of `file`, if it is a file in memory of at least that
    /// length.
    fn of(file: OwnedFd, bytes: u64) -> io::Result<PeerMemoryFile> {
        // Only files in memory have seals: those of `memfd_create`, tmpfs and hugetlbfs. This check
        // comes first because the kernel answers it alone; `fstat` on a FUSE file could block.
        if fcntl_get_seals(&file).is_err() {
            return Err(invalid("the file is not in memory (memfd, tmpfs or hugetlbfs)"));
        }
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(invalid("the file is not a regular file"));
        }
        if u64::try_from(stat.st_size).is_ok_and(|length| length < bytes) {
            return Err(invalid("the file is shorter than announced"));
        }
        Ok(PeerMemoryFile { file, bytes })
    }
}

impl PeerMemory for PeerMemoryFile {
    fn read(&self, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(into.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(invalid("the range is outside"));
        }
        while !into.is_empty() {
            match pread(&self.file, &mut *into, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    into = &mut into[read..];
                    offset += read as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn invalid(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("shared memory of a client: {problem}"))
}
