//! The mapping under an arena.
//!
//! Invariants:
//! - From `new` until drop, `len` bytes from `start` are mapped, readable, writable and backed by
//!   memory. The [`PRIVATE_BYTES`] before `start` are mapped, too. They get memory when they are
//!   registered or first used, because small arenas never use them.
//! - The first [`PRIVATE_BYTES`] of every region are private to this process, also if a file backs
//!   the rest. The first region starts that much before `start`.

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Size of a huge page where base pages have 4 KiB.
const HUGE_BYTES: usize = 2 << 20;
/// Private memory at the start of each region: one huge page, because a registered buffer is
/// cheaper for the kernel if all its pages have one size.
pub(super) const PRIVATE_BYTES: usize = HUGE_BYTES;
const SHMEM_MODE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Permissions of the file. A process that reopens it through a received descriptor can only read.
const READ_ONLY: Mode = Mode::RUSR;

pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Length of a region, a multiple of [`HUGE_BYTES`]. The last one may be shorter.
    region_bytes: usize,
    /// The whole reservation. It has room for the private memory before `start`, and for the
    /// alignment of `start`.
    mapped: (NonNull<u8>, usize),
    /// The mapped file, if other processes may map it too.
    file: Option<File>,
    huge_pages: bool,
}

/// Accessibility of an arena to other processes, and its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaSharing {
    /// Private memory: the fastest, and always available.
    Never,
    /// Shared if it can be on huge pages then, private otherwise. Devices move small pages more
    /// slowly.
    IfHuge,
    /// Shared, on small pages if need be.
    Always,
}

// SAFETY: a mapping is plain memory that any thread may use. The slots decide which bytes a thread
// may access.
unsafe impl Send for Mapping {}
// SAFETY: as above. A shared mapping gives out its address and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(len: usize, sharing: ArenaSharing, region_bytes: usize) -> io::Result<Mapping> {
        let file = match sharing {
            ArenaSharing::Never => None,
            _ => match huge_file(len) {
                Ok(file) => Some(file),
                // The tmpfs needs CAP_SYS_ADMIN. A memfd on huge pages needs an administrator who
                // enabled them for shared memory.
                Err(_) if sharing == ArenaSharing::Always => Some(memfd(len)?),
                Err(_) if shared_memory_can_be_huge() => memfd(len).ok(),
                Err(_) => None,
            },
        };
        match Self::of(len, file, region_bytes) {
            // Shared memory can be harder to get than private memory. `IfHuge` then prefers a
            // private arena to none.
            Err(_) if sharing == ArenaSharing::IfHuge => Self::of(len, None, region_bytes),
            made => made,
        }
    }

    fn of(len: usize, file: Option<File>, region_bytes: usize) -> io::Result<Mapping> {
        let mapped = reserve(len)?;
        // SAFETY: `reserve` maps PRIVATE_BYTES and HUGE_BYTES more than `len`, so the start lies
        // inside, and so do `len` bytes behind it.
        let start = unsafe { mapped.0.add(PRIVATE_BYTES) };
        // SAFETY: as above.
        let start = unsafe { start.add(start.as_ptr().align_offset(HUGE_BYTES)) };
        let mut mapping = Mapping { start, len, region_bytes, mapped, file, huge_pages: false };
        mapping.map_file()?;
        if let Some(file) = &mapping.file {
            // Fails on a tmpfs. Peers receive that file through a read-only descriptor, so seals
            // are a second line of defense.
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

    pub(super) fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    /// Returns the address of the first region: its private memory, and `start` behind it.
    pub(super) fn regions_start(&self) -> NonNull<u8> {
        // SAFETY: `of` leaves PRIVATE_BYTES before the start.
        unsafe { self.start.sub(PRIVATE_BYTES) }
    }

    /// Maps the file over the reservation, and private memory over the start of each region.
    fn map_file(&self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        self.map_over(0, self.len, libc::MAP_SHARED, file.as_raw_fd())?;
        let firsts = (self.region_bytes - PRIVATE_BYTES..self.len).step_by(self.region_bytes);
        for first in firsts {
            let bytes = PRIVATE_BYTES.min(self.len - first);
            self.map_over(first, bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)?;
        }
        Ok(())
    }

    /// Replaces the mapping of `len` bytes from `at`. The caller keeps the range inside the arena,
    /// before any slot exists.
    fn map_over(&self, at: usize, len: usize, flags: i32, file: i32) -> io::Result<()> {
        assert!(at + len <= self.len, "the range lies in the reservation");
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the assertion keeps the target in the reservation of this mapping, which nothing
        // uses yet.
        let mapped = unsafe {
            let target = self.start.add(at).as_ptr().cast();
            libc::mmap(target, len, access, flags | libc::MAP_FIXED, file, 0)
        };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn advise_huge(&self) {
        // Miri knows no `madvise`. Its memory is neither huge nor faulted in.
        if cfg!(miri) {
            return;
        }
        let (start, len) = (self.regions_start(), PRIVATE_BYTES + self.len);
        // SAFETY: the range is mapped and owned; the advice changes no content. Refusal only costs
        // speed.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
    }

    /// Backs every page from `start` with memory, on up to 16 threads, so that no request pays for
    /// a page fault.
    fn touch(&self) -> io::Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let part = self.len.div_ceil(threads).next_multiple_of(HUGE_BYTES);
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..self.len).step_by(part).map(|at| scope.spawn(move || self.populate(at, part))).collect();
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Err(io::ErrorKind::Other.into())))
        })
    }

    fn populate(&self, at: usize, part: usize) -> io::Result<()> {
        if cfg!(miri) {
            return Ok(());
        }
        let len = part.min(self.len - at);
        // SAFETY: at + len <= self.len, so the range lies in the mapping.
        let start = unsafe { self.start.add(at) };
        // SAFETY: the range is mapped and owned; populating writes no new content.
        if unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
        // Kernels before 5.14 do not know MADV_POPULATE_WRITE: write one byte of every page.
        for offset in (0..len).step_by(4096) {
            // SAFETY: inside the range above. No slot exists yet, so nothing else uses these bytes;
            // fresh memory is zero.
            unsafe { start.add(offset).as_ptr().write_volatile(0) };
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the reservation made by `map`. Every slot owns the arena, so none is
        // left.
        unsafe { libc::munmap(self.mapped.0.as_ptr().cast(), self.mapped.1) };
    }
}

/// Returns `true` if the system allows a memfd on huge pages after MADV_HUGEPAGE.
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

/// Creates an unnamed file on a private tmpfs that is mounted nowhere. Its pages are huge whatever
/// the system's setting for shared memory is.
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

/// Maps private memory with room for `len` bytes at a huge page, and for private memory before it.
fn reserve(len: usize) -> io::Result<(NonNull<u8>, usize)> {
    let reserved = len.checked_add(PRIVATE_BYTES + HUGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
    // Miri maps private memory only, without further flags.
    let unreserved = if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | unreserved;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: no address is requested, so no existing mapping is replaced.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), reserved, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok((NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?, reserved))
}

/// Returns the bytes on huge pages in mappings that overlap `start..start+len`, according to smaps.
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
