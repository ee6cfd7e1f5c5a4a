//! The node's view of a client's memory: bytes are copied from it, never looked at in place.
//!
//! Always true: whatever the client does with its file, reading from it ends soon, with bytes or with an error. So only files
//! that lie in memory are taken (a FIFO, a device, or a file that another process or machine answers for could make a reader
//! wait), and they are read with `pread`: what is not there is a short read, where a mapping would be fatal to touch.

use crate::greeting::{hear, is_greeting};
use rustix::fs::{FileType, fcntl_get_seals, fstat};
use rustix::io::{Errno, pread};
use std::io;
use std::os::fd::OwnedFd;
use tokio::net::UnixStream;

/// Memory of a client that a node may copy from.
pub trait Lender: Send + Sync + 'static {
    /// Fills `into` with the bytes from `offset` on, as they are now; an error if not all of them are there. Does not wait.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

/// The memory of a process that came through the door.
#[derive(Debug)]
pub struct Lent {
    file: OwnedFd,
    bytes: u64,
}

impl Lent {
    /// Receives what `guest` lends, if anything: it says so after it was greeted, before its first frame. Waits for either as
    /// long as it takes.
    pub async fn receive(guest: &UnixStream) -> io::Result<Option<Lent>> {
        if !is_greeting(guest).await? {
            return Ok(None);
        }
        let (bytes, files) = hear(guest).await?;
        let [file] = <[OwnedFd; 1]>::try_from(files).map_err(|_| invalid("not one descriptor"))?;
        Lent::of(file, bytes).map(Some)
    }

    /// The first `bytes` bytes of `file`, if it is a file in memory that has so many.
    fn of(file: OwnedFd, bytes: u64) -> io::Result<Lent> {
        // Only what lies in memory has seals: files made by `memfd_create`, or on tmpfs or hugetlbfs. This is asked first: it
        // is answered by this kernel alone, whoever is behind the file.
        if fcntl_get_seals(&file).is_err() {
            return Err(invalid("not a file in memory"));
        }
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(invalid("not a regular file"));
        }
        if u64::try_from(stat.st_size).is_ok_and(|length| length < bytes) {
            return Err(invalid("shorter than was said"));
        }
        Ok(Lent { file, bytes })
    }
}

impl Lender for Lent {
    fn read(&self, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(into.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(invalid("a place outside"));
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

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("memory of a client: {what}"))
}
