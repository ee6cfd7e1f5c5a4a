//! Memory of this process that others can be told places in.
//!
//! Always true: two blocks never overlap; a block's memory goes back when its owner is gone, and only then; the mapping lives
//! as long as any block of it. Nobody but this process ever writes there, and nobody makes the file shorter: it is sealed.

use larder_core::ExtentAllocator;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Unit and alignment of blocks.
const UNIT_BYTES: usize = 4096;

/// One mapping of a nameless file. It takes address space at once, and memory when it is first written.
pub struct Memory {
    extents: Mutex<ExtentAllocator>,
    start: NonNull<u8>,
    len: usize,
    /// The same file, open for reading alone.
    file: OwnedFd,
}

// SAFETY: it is plain memory that any thread may use; who may touch which bytes is decided by the blocks.
unsafe impl Send for Memory {}
// SAFETY: as above; what is shared gives out addresses and nothing else.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `bytes`, rounded up to whole units.
    pub fn new(bytes: usize) -> io::Result<Arc<Memory>> {
        let len = bytes.max(1).checked_next_multiple_of(UNIT_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let file = memfd_create(c"larder-client", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        let shown = crate::read_only(file.as_fd())?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let extents = Mutex::new(ExtentAllocator::new((len / UNIT_BYTES) as u64));
        let memory = Memory { extents, start, len, file: shown };
        // From here on the mapping above is the only way to write.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        Ok(Arc::new(memory))
    }

    /// A block of `len` bytes, which are what an earlier owner left there; `None` if no free run is that long.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<Block> {
        let units = len.max(1).div_ceil(UNIT_BYTES) as u64;
        let first = self.extents.lock().allocate(units)?;
        Some(Block { memory: self.clone(), first, units, len })
    }

    /// Where `bytes` lie in this memory, in bytes from its start; `None` if they do not.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let offset = bytes.as_ptr().addr().checked_sub(self.start.addr().get())?;
        (offset.checked_add(bytes.len())? <= self.len).then_some(offset as u64)
    }

    /// Start and length, for registration with a device.
    pub fn span(&self) -> (NonNull<u8>, usize) {
        (self.start, self.len)
    }

    /// Bytes taken by blocks, in whole units.
    pub fn used(&self) -> usize {
        let extents = self.extents.lock();
        (extents.units() - extents.free_units()) as usize * UNIT_BYTES
    }

    /// Whether each of these bytes, some from its start, lies in a unit that a block has.
    pub fn is_taken(&self, bytes: &Range<usize>) -> bool {
        let units = bytes.start / UNIT_BYTES..bytes.end.div_ceil(UNIT_BYTES);
        self.extents.lock().is_taken(units.start as u64, units.len() as u64)
    }

    /// The file, open for reading alone.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped; every block holds the memory, so none is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).field("used", &self.used()).finish()
    }
}

/// Exclusive bytes of a [`Memory`]. They go back on drop.
pub struct Block {
    memory: Arc<Memory>,
    first: u64,
    units: u64,
    len: usize,
}

impl Block {
    /// Where it lies, in bytes from the start of the memory.
    pub fn offset(&self) -> u64 {
        self.first * UNIT_BYTES as u64
    }

    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: first + units <= units of the mapping, as the allocator hands out units of it only.
        unsafe { self.memory.start.add(self.first as usize * UNIT_BYTES) }
    }
}

impl Deref for Block {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory (fresh units are zero) that `memory` keeps, `len` bytes in the units of this block
        // alone; `&self` rules out a writer here, and the seals one elsewhere.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), self.len) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference into the block in this process. Others may read
        // it: what they see then is for them to check.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.memory.extents.lock().release(self.first, self.units);
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Block").field("offset", &self.offset()).field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    #[test]
    fn blocks_do_not_overlap_and_go_back() {
        let memory = Memory::new(5 * UNIT_BYTES).unwrap();
        let mut blocks: Vec<Block> = [5000, 1, 4096].iter().map(|&len| memory.allocate(len).unwrap()).collect();
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
        // A block outlives the handle that it was taken from.
        let weak = Arc::downgrade(&memory);
        drop(memory);
        assert_eq!((blocks[2][0], weak.upgrade().unwrap().used()), (3, 4 * UNIT_BYTES));
        drop(blocks);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn who_has_the_file_sees_the_blocks_and_can_change_nothing() {
        let memory = Memory::new(UNIT_BYTES).unwrap();
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
