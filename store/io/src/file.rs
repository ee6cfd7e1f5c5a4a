//! Files of a device: of fixed length, preallocated, and opened for direct I/O where the file
//! system supports it.

use larder_format::disk::BLOCK_BYTES;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// An open segment file for use with a [`crate::Ring`], with direct I/O where the file system
/// supports it.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    direct: bool,
}

impl DeviceFile {
    pub fn open(path: &Path) -> io::Result<DeviceFile> {
        Self::open_with(path, OpenOptions::new().read(true).write(true))
    }

    /// Opens for reads only, as a process does that does not own the file. Writes to it fail.
    pub fn open_read_only(path: &Path) -> io::Result<DeviceFile> {
        match OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => Ok(DeviceFile { file, direct: true }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(DeviceFile { file: File::open(path)?, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a descriptor that another process has opened for reads.
    ///
    /// # Errors
    /// If it is not a regular file, or if the system does not tell how it is open.
    pub fn from_descriptor(descriptor: OwnedFd) -> io::Result<DeviceFile> {
        let file = File::from(descriptor);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is not that of a file"));
        }
        // SAFETY: a system call on our own descriptor that passes no memory.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(DeviceFile { file, direct: flags & libc::O_DIRECT != 0 })
    }

    /// Opens the same file once more, for another owner. Both have one state in the kernel.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn try_clone(&self) -> io::Result<DeviceFile> {
        Ok(DeviceFile { file: self.file.try_clone()?, direct: self.direct })
    }

    /// Fills `into` with the bytes at `offset`, and waits for them. With direct I/O, the address,
    /// the length and the offset must be multiples of [`BLOCK_BYTES`].
    ///
    /// # Errors
    /// `UnexpectedEof` if the file is shorter. `InvalidInput` if direct I/O refuses the memory.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }

    /// Creates a file with all its `bytes` allocated, and syncs it. Fails if the file exists or the
    /// disk lacks the space.
    pub fn create(path: &Path, bytes: u64) -> io::Result<DeviceFile> {
        let new = Self::open_with(path, OpenOptions::new().read(true).write(true).create_new(true))?;
        new.allocate(bytes)?;
        new.file.sync_all()?;
        Ok(new)
    }

    /// Opens with `O_DIRECT`. A file system without direct I/O returns `EINVAL`; the file is then
    /// opened through the page cache. That costs speed, not durability: syncs are the same.
    fn open_with(path: &Path, options: &mut OpenOptions) -> io::Result<DeviceFile> {
        match options.custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => Ok(DeviceFile { file, direct: true }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                // The failed open may have created the file already, so `create_new` would fail
                // now.
                let options = options.custom_flags(0).create_new(false).create(true);
                Ok(DeviceFile { file: options.open(path)?, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Allocates the first `bytes` on the device. Later writes then cannot fail for lack of space,
    /// nor pay for allocation. Existing content is preserved.
    pub fn allocate(&self, bytes: u64) -> io::Result<()> {
        let len = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        loop {
            // SAFETY: a system call on our own descriptor that passes no memory.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                // The file system has no preallocation. Setting the length at least keeps offsets
                // valid.
                Some(libc::EOPNOTSUPP) => return self.file.set_len(bytes.max(self.len()?)),
                _ => return Err(error),
            }
        }
    }

    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    pub fn direct(&self) -> bool {
        self.direct
    }

    pub fn blocks(&self) -> io::Result<u64> {
        Ok(self.len()? / BLOCK_BYTES as u64)
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
