//! Memory of a client process that a node of the same machine may copy from.
//!
//! Invariants:
//! - Two blocks never overlap, and a block's memory returns when its owner drops it.
//! - The mapping lives as long as any block of it.
//! - Only this process writes the memory, and no process can truncate the file: it is sealed.

use crate::ExtentAllocator;
use larder_runtime::lock::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Unit and alignment of blocks, one page of the processor.
const UNIT_BYTES: usize = 4096;

/// One mapping of an unnamed file. It reserves address space at once, and memory when a page is
/// first written.
pub struct SharedMemory {
    extents: Mutex<ExtentAllocator>,
    start: NonNull<u8>,
    len: usize,
    /// The same file, opened read-only, for other processes.
    file: OwnedFd,
}

// SAFETY: plain memory that any thread may use. The blocks decide which bytes a thread may access.
unsafe impl Send for SharedMemory {}
// SAFETY: as above. A shared reference gives out addresses and nothing else.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `bytes`, rounded up to whole units.
    pub fn new(bytes: usize) -> io::Result<Arc<SharedMemory>> {
        let len = bytes.max(1).checked_next_multiple_of(UNIT_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        if cfg!(miri) {
            return Self::private(len);
        }
        let file = memfd_create(c"larder-client", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        let shown = super::read_only(file.as_fd())?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let extents = Mutex::new(ExtentAllocator::new((len / UNIT_BYTES) as u64));
        let memory = SharedMemory { extents, start, len, file: shown };
        // From here on, the mapping above is the only way to write. The seal comes after it because
        // it forbids new writable mappings.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        Ok(Arc::new(memory))
    }

    /// Memory of this process alone, for Miri, which maps no files. The descriptor stands for one.
    fn private(len: usize) -> io::Result<Arc<SharedMemory>> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let extents = Mutex::new(ExtentAllocator::new((len / UNIT_BYTES) as u64));
        let file = std::io::pipe()?.0.into();
        Ok(Arc::new(SharedMemory { extents, start, len, file }))
    }

    /// Allocates a block of `len` bytes. It contains bytes of earlier owners. Returns `None` if no
    /// free extent is long enough.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<SharedBlock> {
        let units = len.max(1).div_ceil(UNIT_BYTES) as u64;
        let first = self.extents.lock().allocate(units)?;
        Some(SharedBlock { memory: self.clone(), first, units, len })
    }

    /// Returns the offset of `bytes` from the start of this memory, or `None` if they lie outside.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let offset = bytes.as_ptr().addr().checked_sub(self.start.addr().get())?;
        (offset.checked_add(bytes.len())? <= self.len).then_some(offset as u64)
    }

    pub fn span(&self) -> (NonNull<u8>, usize) {
        (self.start, self.len)
    }

    /// Returns the bytes in use by blocks, in whole units.
    pub fn used(&self) -> usize {
        let extents = self.extents.lock();
        (extents.units() - extents.free_units()) as usize * UNIT_BYTES
    }

    /// Returns `true` if every one of these bytes, counted from the start, lies in an allocated
    /// unit.
    pub fn is_taken(&self, bytes: &Range<usize>) -> bool {
        let units = bytes.start / UNIT_BYTES..bytes.end.div_ceil(UNIT_BYTES);
        self.extents.lock().is_taken(units.start as u64, units.len() as u64)
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made by `new`. Every block holds the memory, so none is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl std::fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).field("used", &self.used()).finish()
    }
}

/// Exclusive bytes of a [`SharedMemory`]. Dropping it returns the bytes.
pub struct SharedBlock {
    memory: Arc<SharedMemory>,
    first: u64,
    units: u64,
    len: usize,
}

impl SharedBlock {
    /// Returns the offset from the start of the memory, in bytes.
    pub fn offset(&self) -> u64 {
        self.first * UNIT_BYTES as u64
    }

    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: first + units <= units of the mapping, because the allocator returns only units
        // of it.
        unsafe { self.memory.start.add(self.first as usize * UNIT_BYTES) }
    }
}

impl Deref for SharedBlock {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialized memory (fresh units are zero) that `memory` keeps. The `len` bytes
        // lie in the units of this block alone. `&self` excludes a writer here, and the seals
        // exclude writers elsewhere.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), self.len) }
    }
}

impl DerefMut for SharedBlock {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference into the block in this
        // process. Other processes may read it meanwhile and must check the bytes they see.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), self.len) }
    }
}

impl Drop for SharedBlock {
    fn drop(&mut self) {
        self.memory.extents.lock().release(self.first, self.units);
    }
}

impl std::fmt::Debug for SharedBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedBlock").field("offset", &self.offset()).field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    #[test]
    fn blocks_are_disjoint_and_return_on_drop() {
        let memory = SharedMemory::new(5 * UNIT_BYTES).unwrap();
        let mut blocks: Vec<SharedBlock> = [5000, 1, 4096].iter().map(|&len| memory.allocate(len).unwrap()).collect();
        for (i, block) in blocks.iter_mut().enumerate() {
            block.fill(i as u8 + 1);
        }
        for (i, block) in blocks.iter().enumerate() {
            assert!(block.iter().all(|&byte| byte == i as u8 + 1));
            assert_eq!(memory.offset_of(&block[..1]), Some(block.offset()));
        }
        assert!(memory.allocate(UNIT_BYTES + 1).is_none() && memory.allocate(usize::MAX).is_none());
        assert_eq!(memory.offset_of(&blocks[0][4998..]), Some(blocks[0].offset() + 4998));
        assert_eq!(memory.offset_of(&[0; 8]), None);
        // A block keeps the memory after the handle that allocated it is dropped.
        let weak = Arc::downgrade(&memory);
        drop(memory);
        assert_eq!((blocks[2][0], weak.upgrade().unwrap().used()), (3, 4 * UNIT_BYTES));
        drop(blocks);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn file_shows_the_blocks_and_cannot_be_changed() {
        let memory = SharedMemory::new(UNIT_BYTES).unwrap();
        let mut block = memory.allocate(9).unwrap();
        block.copy_from_slice(b"some page");
        let file = File::from(memory.file().try_clone_to_owned().unwrap());
        let mut seen = [0; 9];
        file.read_exact_at(&mut seen, block.offset()).unwrap();
        assert_eq!(&seen, b"some page");
        assert!(file.write_at(b"x", 0).is_err() && file.set_len(0).is_err());
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        if let Ok(again) = File::options().read(true).write(true).open(path) {
            assert!(again.write_at(b"x", 0).is_err() && again.set_len(0).is_err() && again.set_len(1 << 20).is_err());
        }
        assert_eq!(&block[..], b"some page");
    }
}
