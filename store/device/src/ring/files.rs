//! The files of a ring.
//!
//! Always true: a file is open as long as a request on it may be with the kernel; its number means no other file until it
//! was closed.

use super::RingOptions;
use crate::file::DeviceFile;
use crate::request::FileId;
use io_uring::IoUring;
use std::io;
use std::os::fd::RawFd;

pub(super) struct Files {
    open: Vec<Option<DeviceFile>>,
    /// Known to the kernel by their number.
    pub(super) registered: bool,
    /// Detached while requests on them were with the kernel.
    leaving: Vec<FileId>,
}

impl Files {
    pub(super) fn new(ring: &IoUring, options: &RingOptions) -> Files {
        let open = (0..options.files_max).map(|_| None).collect();
        Files { open, registered: register(ring, options), leaving: Vec::new() }
    }

    pub(super) fn attach(&mut self, ring: &IoUring, file: DeviceFile) -> io::Result<FileId> {
        let free = self.open.iter().position(Option::is_none);
        let index = free.ok_or_else(|| io::Error::other("the ring has no room for another file"))?;
        if self.registered {
            ring.submitter().register_files_update(index as u32, &[file.raw()])?;
        }
        self.open[index] = Some(file);
        Ok(FileId(index as u32))
    }

    pub(super) fn detach(&mut self, ring: &IoUring, file: FileId) {
        self.leaving.retain(|&leaving| leaving != file);
        let Some(open) = self.open.get_mut(file.0 as usize) else { return };
        if open.take().is_some() && self.registered {
            let cleared = ring.submitter().register_files_update(file.0, &[-1]);
            if let Err(error) = cleared {
                tracing::warn!(%error, "a closed file stays registered with the ring");
            }
        }
    }

    /// Refuses new requests on a file that will be closed.
    pub(super) fn leave(&mut self, file: FileId) {
        self.leaving.push(file);
    }

    pub(super) fn is_leaving(&self, file: FileId) -> bool {
        self.leaving.contains(&file)
    }

    /// Whether new requests on it are taken.
    pub(super) fn serves(&self, file: FileId) -> bool {
        self.open.get(file.0 as usize).is_some_and(Option::is_some) && !self.is_leaving(file)
    }

    /// The descriptor of an open file, otherwise one that is none.
    pub(super) fn raw(&self, file: FileId) -> RawFd {
        self.open.get(file.0 as usize).and_then(Option::as_ref).map_or(-1, DeviceFile::raw)
    }
}

fn register(ring: &IoUring, options: &RingOptions) -> bool {
    raise_descriptor_limit(u64::from(options.files_max));
    match ring.submitter().register_files_sparse(options.files_max) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(ring = options.name, files = options.files_max, %error, "files are not registered with the device");
            false
        }
    }
}

/// The kernel bounds registered files by the soft limit of open files; sockets need some as well.
fn raise_descriptor_limit(files: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live rlimit.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 || limit.rlim_cur >= 2 * files + 4096 {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above. Refusal is fine: `register` then says what it means.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
}
