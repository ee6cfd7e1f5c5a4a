//! Files attached to a ring.
//!
//! Invariants:
//! - A file stays open while a request on it may be with the kernel.
//! - Its number is not reused before it is closed.

use super::options::RingOptions;
use crate::file::DeviceFile;
use crate::request::FileId;
use io_uring::IoUring;
use std::io;
use std::os::fd::RawFd;

pub(super) struct Files {
    open: Vec<Option<DeviceFile>>,
    /// True if the kernel knows the files by number.
    pub(super) registered: bool,
    /// Files that were detached while requests on them were with the kernel. They are closed by the
    /// last completion.
    detaching: Vec<FileId>,
}

impl Files {
    pub(super) fn new(ring: &IoUring, options: &RingOptions) -> Files {
        let open = (0..options.files_max).map(|_| None).collect();
        Files { open, registered: register(ring, options), detaching: Vec::new() }
    }

    pub(super) fn attach(&mut self, ring: &IoUring, file: DeviceFile) -> io::Result<FileId> {
        let free = self.open.iter().position(Option::is_none);
        let index = free.ok_or_else(|| io::Error::other("the ring has the maximum number of files attached"))?;
        // The kernel learns the descriptor before the caller gets the number: a request may use it
        // at once.
        if self.registered {
            ring.submitter().register_files_update(index as u32, &[file.raw()])?;
        }
        self.open[index] = Some(file);
        Ok(FileId(index as u32))
    }

    pub(super) fn detach(&mut self, ring: &IoUring, file: FileId) {
        self.detaching.retain(|&detaching| detaching != file);
        let Some(open) = self.open.get_mut(file.0 as usize) else { return };
        if open.take().is_some() && self.registered {
            let cleared = ring.submitter().register_files_update(file.0, &[-1]);
            if let Err(error) = cleared {
                tracing::warn!(%error, "a closed file could not be unregistered from io_uring; its descriptor stays open");
            }
        }
    }

    pub(super) fn detach_later(&mut self, file: FileId) {
        self.detaching.push(file);
    }

    pub(super) fn is_detaching(&self, file: FileId) -> bool {
        self.detaching.contains(&file)
    }

    pub(super) fn accepts_requests(&self, file: FileId) -> bool {
        self.open.get(file.0 as usize).is_some_and(Option::is_some) && !self.is_detaching(file)
    }

    /// Returns the descriptor of an open file. Otherwise returns -1, which the kernel rejects.
    pub(super) fn raw(&self, file: FileId) -> RawFd {
        self.open.get(file.0 as usize).and_then(Option::as_ref).map_or(-1, DeviceFile::raw)
    }
}

fn register(ring: &IoUring, options: &RingOptions) -> bool {
    raise_descriptor_limit(u64::from(options.files_max));
    match ring.submitter().register_files_sparse(options.files_max) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(ring = options.name, files = options.files_max, %error, "files could not be registered with io_uring; requests cost more CPU");
            false
        }
    }
}

/// Raises the soft limit of open files to the hard limit. The kernel bounds registered files by the
/// soft limit. 4,096 descriptors are left for sockets.
fn raise_descriptor_limit(files: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer refers to a live rlimit for the duration of the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 || limit.rlim_cur >= 2 * files + 4096 {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above. Refusal is harmless: `register` then fails and logs the consequence.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
}
