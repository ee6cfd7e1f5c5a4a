//! The arena: one mapping of memory, and slots cut from it.
//!
//! Always true: two slots never overlap; a slot's memory goes back to the arena when its last owner is gone, and only
//! then; the mapping lives as long as any slot of it.

use larder_core::ExtentAllocator;
use larder_format::disk::BLOCK_BYTES;
use parking_lot::Mutex;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

mod mapping;
mod parts;

use mapping::Mapping;
pub use mapping::Sharing;
pub use parts::{Piece, PieceMut};

/// Unit and alignment of slots.
pub const UNIT_BYTES: usize = BLOCK_BYTES;

/// Memory for pages in flight and at rest: pre-faulted, on huge pages where the system has them.
pub struct Arena {
    extents: Mutex<ExtentAllocator>,
    mapping: Mapping,
}

impl Arena {
    /// Maps and touches `bytes` (rounded up to whole units) for this process alone.
    pub fn new(bytes: usize) -> io::Result<Arc<Arena>> {
        Self::with(bytes, Sharing::Never)
    }

    /// Maps and touches `bytes` (rounded up to whole units).
    pub fn with(bytes: usize, sharing: Sharing) -> io::Result<Arc<Arena>> {
        let bytes = bytes.max(1).next_multiple_of(UNIT_BYTES);
        let mapping = Mapping::new(bytes, sharing)?;
        let extents = Mutex::new(ExtentAllocator::new((bytes / UNIT_BYTES) as u64));
        Ok(Arc::new(Arena { extents, mapping }))
    }

    /// An exclusive slot of `len` bytes, in whole units; `None` if no free extent is that long.
    ///
    /// Its bytes are what an earlier owner left there, but for those behind `len`, which are zero.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<SlotMut> {
        let capacity = len.max(1).checked_next_multiple_of(UNIT_BYTES)?;
        let start = self.extents.lock().allocate((capacity / UNIT_BYTES) as u64)?;
        let extent = Extent { arena: self.clone(), offset: start as usize * UNIT_BYTES, capacity };
        let mut slot = SlotMut { extent, len: capacity };
        slot[len..].fill(0);
        slot.len = len;
        Some(slot)
    }

    /// Bytes in all.
    pub fn capacity(&self) -> usize {
        self.mapping.len()
    }

    /// Bytes taken by slots, in whole units.
    pub fn used(&self) -> usize {
        let extents = self.extents.lock();
        (extents.units() - extents.free_units()) as usize * UNIT_BYTES
    }

    /// Bytes of the longest slot that could be taken now.
    pub fn largest_free(&self) -> usize {
        self.extents.lock().largest_free() as usize * UNIT_BYTES
    }

    /// Whether at least half of the arena lay on huge pages when it had been touched.
    pub fn huge_pages(&self) -> bool {
        self.mapping.huge_pages()
    }

    /// Turns one bit around, as a failing memory cell does. For simulations, which have one thread.
    ///
    /// # Panics
    /// If there is no such byte.
    ///
    /// # Safety
    /// No other thread uses the arena, and no reference into that byte is alive.
    #[cfg(feature = "faults")]
    pub unsafe fn flip_bit(&self, byte: usize, bit: u32) {
        assert!(byte < self.capacity(), "inside the arena");
        // SAFETY: inside the mapping by the assertion; the caller vouches that nobody looks.
        unsafe { *self.mapping.start().add(byte).as_ptr() ^= 1 << (bit % 8) };
    }

    /// Whether each of these bytes, some from its start, lies in a unit that a slot has.
    pub fn is_taken(&self, bytes: &Range<usize>) -> bool {
        let units = bytes.start / UNIT_BYTES..bytes.end.div_ceil(UNIT_BYTES);
        self.extents.lock().is_taken(units.start as u64, units.len() as u64)
    }

    /// Where its first byte is. No right to touch what lies there.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// The file that is mapped, if other processes can map it: its first [`Arena::capacity`] bytes are the arena.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.file()
    }

    /// Start and length, for registration with a device.
    pub(crate) fn span(&self) -> (NonNull<u8>, usize) {
        (self.mapping.start(), self.mapping.len())
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("capacity", &self.capacity()).field("used", &self.used()).finish()
    }
}

/// Ownership of a run of units. Not `Clone`: whoever has it alone may touch those bytes, or lend them.
struct Extent {
    arena: Arc<Arena>,
    /// Bytes from the start of the mapping.
    offset: usize,
    /// Bytes, whole units.
    capacity: usize,
}

impl Extent {
    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: offset + capacity <= length of the mapping, as the allocator hands out units of it only.
        unsafe { self.arena.mapping.start().add(self.offset) }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.arena.extents.lock().release((self.offset / UNIT_BYTES) as u64, (self.capacity / UNIT_BYTES) as u64);
    }
}

/// Exclusive memory of the arena. It goes back to the arena on drop.
pub struct SlotMut {
    extent: Extent,
    len: usize,
}

impl SlotMut {
    /// Makes it shared and read-only.
    pub fn freeze(self) -> Slot {
        Slot { shared: Arc::new(self) }
    }

    /// Bytes of memory behind it, whole units: what a device may fill.
    pub fn capacity(&self) -> usize {
        self.extent.capacity
    }

    /// Cuts it in two at `at`, a multiple of [`UNIT_BYTES`] inside it. Each half goes back to the arena on its own.
    ///
    /// # Panics
    /// If `at` is no such place.
    pub fn split_at(self, at: usize) -> (SlotMut, SlotMut) {
        assert!(at.is_multiple_of(UNIT_BYTES) && 0 < at && at < self.extent.capacity, "split inside the slot");
        let SlotMut { extent, len } = self;
        let (offset, capacity) = (extent.offset, extent.capacity);
        let mut head = extent;
        let tail = Extent { arena: head.arena.clone(), offset: offset + at, capacity: capacity - at };
        head.capacity = at;
        (SlotMut { extent: head, len: len.min(at) }, SlotMut { extent: tail, len: len.saturating_sub(at) })
    }

    /// All memory behind it, whole units: what a device may fill.
    pub fn whole(&mut self) -> &mut [u8] {
        // SAFETY: the extent is initialised memory that this slot owns alone, and `&mut self` makes this the only
        // reference into it.
        unsafe { std::slice::from_raw_parts_mut(self.extent.pointer().as_ptr(), self.extent.capacity) }
    }

    /// Offset in the arena, in bytes.
    pub fn arena_offset(&self) -> usize {
        self.extent.offset
    }

    pub(crate) fn pointer(&mut self) -> NonNull<u8> {
        self.extent.pointer()
    }
}

impl Deref for SlotMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is initialised memory that lives as long as the extent; the extent is owned by this slot
        // alone, and `&self` rules out a writer.
        unsafe { std::slice::from_raw_parts(self.extent.pointer().as_ptr(), self.len) }
    }
}

impl DerefMut for SlotMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` makes this the only reference into the extent.
        unsafe { std::slice::from_raw_parts_mut(self.extent.pointer().as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for SlotMut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotMut").field("offset", &self.extent.offset).field("len", &self.len).finish()
    }
}

/// Shared, read-only memory of the arena. It goes back to the arena when the last clone is dropped.
#[derive(Clone)]
pub struct Slot {
    shared: Arc<SlotMut>,
}

impl Slot {
    /// Bytes of memory behind it, whole units. The bytes behind its length are zero, or what was read with it.
    pub fn capacity(&self) -> usize {
        self.shared.extent.capacity
    }

    /// All memory behind it, whole units: what a device may take.
    pub fn whole(&self) -> &[u8] {
        // SAFETY: the extent is initialised memory that lives as long as this handle, and nobody writes to shared slots.
        unsafe { std::slice::from_raw_parts(self.shared.extent.pointer().as_ptr(), self.capacity()) }
    }

    /// Offset in the arena, in bytes.
    pub fn arena_offset(&self) -> usize {
        self.shared.extent.offset
    }

    /// Whether this is the only handle to the memory now.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.shared.extent.pointer()
    }
}

impl Deref for Slot {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.shared
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("offset", &self.arena_offset()).field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    #[test]
    fn memory_goes_back_when_the_last_owner_is_gone() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut slot = arena.allocate(5000).unwrap();
        assert_eq!((slot.len(), slot.capacity(), arena.used()), (5000, 8192, 8192));
        slot.fill(7);
        let shared = slot.freeze();
        let clone = shared.clone();
        drop(shared);
        assert_eq!((clone[4999], arena.used()), (7, 8192));
        drop(clone);
        assert_eq!(arena.used(), 0);
    }

    #[test]
    fn a_full_arena_says_so_and_recovers() {
        let arena = Arena::new(3 * UNIT_BYTES).unwrap();
        let slots: Vec<_> = (0..3).map(|_| arena.allocate(1).unwrap()).collect();
        assert!(arena.allocate(1).is_none());
        drop(slots);
        assert_eq!(arena.allocate(3 * UNIT_BYTES).unwrap().len(), 3 * UNIT_BYTES);
        assert!(arena.allocate(3 * UNIT_BYTES + 1).is_none());
        assert!(arena.allocate(usize::MAX).is_none());
    }

    #[test]
    fn slots_do_not_share_bytes_and_padding_is_zero() {
        let arena = Arena::new(1 << 20).unwrap();
        arena.allocate(1 << 20).unwrap().fill(0xff);
        let mut slots: Vec<_> = (1..20).map(|i| arena.allocate(i * 700).unwrap()).collect();
        for (i, slot) in slots.iter_mut().enumerate() {
            slot.fill(i as u8);
        }
        for (i, slot) in slots.into_iter().enumerate() {
            assert!(slot.iter().all(|&b| b == i as u8), "slot {i}");
            let (len, mut whole) = (slot.len(), slot);
            whole.len = whole.capacity();
            assert!(whole[len..].iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn halves_of_a_slot_go_back_on_their_own() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut slot = arena.allocate(UNIT_BYTES + 10).unwrap();
        slot[UNIT_BYTES] = 9;
        let (head, tail) = slot.split_at(UNIT_BYTES);
        assert_eq!((head.len(), tail.len(), tail[0]), (UNIT_BYTES, 10, 9));
        drop(head);
        assert_eq!(arena.used(), UNIT_BYTES);
        drop(tail);
        assert_eq!((arena.used(), arena.largest_free()), (0, 1 << 20));
    }

    #[test]
    fn concurrent_owners_see_their_own_bytes() {
        let arena = Arena::new(4 << 20).unwrap();
        std::thread::scope(|scope| {
            for id in 0..4u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    for turn in 0..2000usize {
                        let Some(mut slot) = arena.allocate(1 + (turn * 977 + id as usize) % 30_000) else { continue };
                        slot.fill(id);
                        let slot = slot.freeze();
                        assert!(slot.iter().all(|&b| b == id));
                    }
                });
            }
        });
        assert_eq!(arena.used(), 0);
    }

    #[test]
    fn an_arena_starts_at_a_huge_page() {
        for sharing in [Sharing::Never, Sharing::IfHuge, Sharing::Always] {
            let arena = Arena::with(8 << 20, sharing).unwrap();
            assert_eq!(arena.span().0.as_ptr() as usize % (2 << 20), 0);
        }
    }

    #[test]
    fn what_is_shared_is_the_arena() {
        let arena = Arena::with((4 << 20) + 5000, Sharing::Always).unwrap();
        let mut slot = arena.allocate(9000).unwrap();
        slot.fill(3);
        let file = File::from(arena.file().expect("it is shared").try_clone_to_owned().unwrap());
        let mut seen = vec![0; 9000];
        file.read_exact_at(&mut seen, slot.arena_offset() as u64).unwrap();
        assert!(seen == slot[..]);
        assert!(Arena::new(1 << 20).unwrap().file().is_none());
    }
}
