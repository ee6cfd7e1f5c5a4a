//! The mapping under an arena.
//!
//! Always true: `len` bytes from `start` are mapped, readable, writable and backed by memory from `new` until drop.

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;

const HUGE_BYTES: usize = 2 << 20;
const SHMEM_MODE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Who opens the file again, by way of a descriptor that was handed over, may read.
const READ_ONLY: Mode = Mode::RUSR;

pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// What was mapped for `start` to be aligned.
    mapped: (NonNull<u8>, usize),
    /// What is mapped, if others can map it too.
    file: Option<File>,
    huge_pages: bool,
}

/// Whether other processes shall be able to map an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// No.
    Never,
    /// If it can lie on huge pages then. Devices move small pages more slowly.
    IfHuge,
    /// Yes, on small pages if need be.
    Always,
}

// SAFETY: a mapping is plain memory that any thread may use; who may touch which bytes is decided by the slots.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared mapping gives out its address and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(len: usize, sharing: Sharing) -> io::Result<Mapping> {
        let file = match sharing {
            Sharing::Never => None,
            _ => match huge_file(len) {
                Ok(file) => Some(file),
                // It takes CAP_SYS_ADMIN; the other way takes an administrator who has allowed it.
                Err(_) if sharing == Sharing::Always => Some(memfd(len)?),
                Err(_) if shared_memory_can_be_huge() => memfd(len).ok(),
                Err(_) => None,
            },
        };
        match Self::of(len, file) {
            // What is shared may be had less easily than what is not.
            Err(_) if sharing == Sharing::IfHuge => Self::of(len, None),
            made => made,
        }
    }

    fn of(len: usize, file: Option<File>) -> io::Result<Mapping> {
        let mapped = map(len, file.as_ref())?;
        let lead = mapped.0.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: `map` maps HUGE_BYTES more than `len`, so the aligned start and `len` bytes behind it lie inside.
        let start = unsafe { mapped.0.add(lead) };
        let mut mapping = Mapping { start, len, mapped, file, huge_pages: false };
        if let Some(file) = &mapping.file {
            // Of a tmpfs it cannot be had; that file is only open for reading to whoever gets it.
            let _ = fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE);
        }
        mapping.advise_huge();
        mapping.touch()?;
        mapping.huge_pages = len >= HUGE_BYTES && huge_bytes(start.as_ptr() as usize, len) >= len / 2;
        Ok(mapping)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    fn advise_huge(&self) {
        // SAFETY: the range is mapped and ours; the advice changes no content. Refusal costs speed only.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
    }

    /// Backs every page with memory now, on a few threads, so that no request pays for a page fault.
    fn touch(&self) -> io::Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let piece = self.len.div_ceil(threads).next_multiple_of(HUGE_BYTES);
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..self.len).step_by(piece).map(|at| scope.spawn(move || self.populate(at, piece))).collect();
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Err(io::ErrorKind::Other.into())))
        })
    }

    fn populate(&self, at: usize, piece: usize) -> io::Result<()> {
        let len = piece.min(self.len - at);
        // SAFETY: at + len <= self.len, so the range lies in the mapping.
        let start = unsafe { self.start.add(at) };
        // SAFETY: the range is mapped and ours; populating writes no new content.
        if unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
        // A kernel before 5.14: touch one byte of every page.
        for offset in (0..len).step_by(4096) {
            // SAFETY: inside the range above; no slot exists yet, so nobody else uses these bytes (fresh memory is zero).
            unsafe { start.add(offset).as_ptr().write_volatile(0) };
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped; every slot holds the arena, so none is left.
        unsafe { libc::munmap(self.mapped.0.as_ptr().cast(), self.mapped.1) };
    }
}

/// Whether a memfd may lie on huge pages after MADV_HUGEPAGE.
fn shared_memory_can_be_huge() -> bool {
    let mode = std::fs::read_to_string(SHMEM_MODE).unwrap_or_default();
    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|allowed| mode.contains(allowed))
}

fn memfd(len: usize) -> io::Result<File> {
    let file = File::from(memfd_create(c"larder-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    fchmod(&file, READ_ONLY)?;
    file.set_len(len as u64)?;
    Ok(file)
}

/// A nameless file on a tmpfs of its own, which is mounted nowhere: so it lies on huge pages whatever the system's setting
/// for shared memory is.
fn huge_file(len: usize) -> io::Result<File> {
    let bytes = len.next_multiple_of(HUGE_BYTES);
    let system = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(system.as_fd(), c"huge", c"always")?;
    fsconfig_set_string(system.as_fd(), c"size", bytes.to_string())?;
    fsconfig_set_string(system.as_fd(), c"mode", c"0700")?;
    fsconfig_create(system.as_fd())?;
    let mount = fsmount(system.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(openat(&mount, c".", flags, READ_ONLY)?);
    file.set_len(bytes as u64)?;
    Ok(file)
}

/// Maps `len` bytes so that they can begin at a huge page: reserves a little more and puts the mapping inside.
fn map(len: usize, file: Option<&File>) -> io::Result<(NonNull<u8>, usize)> {
    let reserved = len.checked_add(HUGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: no address is asked for, so no existing mapping is touched.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), reserved, access, private, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let base_pointer = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    if let Some(file) = file {
        let lead = base_pointer.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: the target lies in the reservation just made, which nobody uses yet.
        let mapped = unsafe {
            let target = base_pointer.as_ptr().add(lead).cast();
            libc::mmap(target, len, access, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: exactly the reservation made above.
            unsafe { libc::munmap(base, reserved) };
            return Err(error);
        }
    }
    Ok((base_pointer, reserved))
}

/// Bytes on huge pages in the mappings that overlap `start..start+len`, as the kernel tells in smaps.
fn huge_bytes(start: usize, len: usize) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let (mut inside, mut bytes) = (false, 0);
    for line in smaps.lines() {
        if let Some((from, to)) = address_range(line) {
            inside = from < start + len && to > start;
        } else if inside && (line.starts_with("AnonHugePages:") || line.starts_with("ShmemPmdMapped:")) {
            bytes += line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0) << 10;
        }
    }
    bytes
}

fn address_range(line: &str) -> Option<(usize, usize)> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}
