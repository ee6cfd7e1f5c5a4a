//! Files of a device: of a fixed length, preallocated, opened for direct I/O where the file system allows it.

use larder_format::disk::BLOCK_BYTES;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// An open file that a [`crate::Ring`] reads and writes.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    direct: bool,
}

impl DeviceFile {
    /// Opens an existing file.
    pub fn open(path: &Path) -> io::Result<DeviceFile> {
        Self::open_with(path, OpenOptions::new().read(true).write(true))
    }

    /// Makes a file that must not exist yet, with all its `bytes` allocated.
    pub fn create(path: &Path, bytes: u64) -> io::Result<DeviceFile> {
        let new = Self::open_with(path, OpenOptions::new().read(true).write(true).create_new(true))?;
        new.allocate(bytes)?;
        new.file.sync_all()?;
        Ok(new)
    }

    /// A file system that cannot do direct I/O answers EINVAL; then the page cache stands between, and all else holds.
    fn open_with(path: &Path, options: &mut OpenOptions) -> io::Result<DeviceFile> {
        match options.custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => Ok(DeviceFile { file, direct: true }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                // The refused open may have made the file already.
                let options = options.custom_flags(0).create_new(false).create(true);
                Ok(DeviceFile { file: options.open(path)?, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Allocates the first `bytes` on the device, so that writes into them need no new space. What is there stays.
    pub fn allocate(&self, bytes: u64) -> io::Result<()> {
        let len = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        loop {
            // SAFETY: a system call on our own descriptor; no memory is passed.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                // No preallocation on this file system: the length alone must do.
                Some(libc::EOPNOTSUPP) => return self.file.set_len(bytes.max(self.len()?)),
                _ => return Err(error),
            }
        }
    }

    /// Bytes, as the file system says.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Whether reads and writes go straight to the device.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Whole blocks in it.
    pub fn blocks(&self) -> io::Result<u64> {
        Ok(self.len()? / BLOCK_BYTES as u64)
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
