//! The arena: one mapping of memory, and slots cut from it.
//!
//! Invariants:
//! - Two slots never overlap.
//! - A slot's memory returns to the arena when its last owner drops it, and only then.
//! - The mapping lives as long as any slot or private block of it.
//! - No slot reaches into private memory, which other processes cannot map.

use crate::ExtentAllocator;
use larder_runtime::lock::Mutex;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
// Without a weak count: L2 has a slot per page, and no code refers to one weakly.
use triomphe::Arc as SlotArc;

mod mapping;
mod parts;
mod private;
mod span;

pub use mapping::ArenaSharing;
use mapping::Mapping;
pub use parts::{SlotPart, SlotPartMut};
pub use private::PrivateBlock;
use private::PrivateBlocks;
pub use span::SlotSlice;

/// Unit and alignment of slots, one page of the processor. Direct I/O needs this alignment.
pub const UNIT_BYTES: usize = 4096;

/// Memory for all pages in L2 and in flight. It is faulted in at start, on huge pages where the
/// system has them. A mutex guards the list of free extents and is held for one lookup.
///
/// The arena consists of regions of 1 GiB. A kernel registers no longer piece of memory. Each
/// region starts with 2 MiB of private blocks, see [`Arena::private_block`].
pub struct Arena {
    extents: Mutex<ExtentAllocator>,
    private: PrivateBlocks,
    mapping: Mapping,
}

impl Arena {
    /// Maps and faults in `bytes`, rounded up to whole units, for this process alone.
    pub fn new(bytes: usize) -> io::Result<Arc<Arena>> {
        Self::with(bytes, ArenaSharing::Never)
    }

    /// Maps and faults in `bytes`, rounded up to whole units.
    pub fn with(bytes: usize, sharing: ArenaSharing) -> io::Result<Arc<Arena>> {
        Self::with_regions(bytes, sharing, private::REGION_BYTES)
    }

    fn with_regions(bytes: usize, sharing: ArenaSharing, region_bytes: usize) -> io::Result<Arc<Arena>> {
        let bytes = bytes.max(1).next_multiple_of(UNIT_BYTES);
        if u32::try_from(bytes / UNIT_BYTES).is_err() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an arena has at most 16 TiB"));
        }
        let mapping = Mapping::new(bytes, sharing, region_bytes)?;
        let mut extents = ExtentAllocator::new((bytes / UNIT_BYTES) as u64);
        let private = PrivateBlocks::new(&mapping, &mut extents);
        Ok(Arc::new(Arena { extents: Mutex::new(extents), private, mapping }))
    }

    /// Allocates an exclusive slot of `len` bytes, less than 4 GiB. Returns `None` if no free
    /// extent is long enough.
    ///
    /// The slot contains the bytes of an earlier owner. Only the padding behind `len` is zeroed,
    /// because a device writes it to disk.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<SlotMut> {
        let capacity = len.max(1).checked_next_multiple_of(UNIT_BYTES)?;
        let len = u32::try_from(len).ok()?;
        let start = self.extents.lock().allocate((capacity / UNIT_BYTES) as u64)?;
        // It fits: `with` bounds the units of an arena.
        let mut slot = SlotMut { extent: Extent { arena: self.clone(), first: start as u32, len } };
        slot.whole()[len as usize..].fill(0);
        Some(slot)
    }

    /// Returns the length of the arena in bytes. Above 1 GiB, private blocks take 2 MiB of each
    /// GiB.
    pub fn capacity(&self) -> usize {
        self.mapping.len()
    }

    /// Returns the bytes in use by slots, in whole units.
    pub fn used(&self) -> usize {
        let extents = self.extents.lock();
        (extents.units() - extents.free_units()) as usize * UNIT_BYTES - self.private.bytes_inside()
    }

    pub fn largest_free(&self) -> usize {
        self.extents.lock().largest_free() as usize * UNIT_BYTES
    }

    /// Returns `true` if at least half of the arena was on huge pages after it had been faulted in.
    pub fn huge_pages(&self) -> bool {
        self.mapping.huge_pages()
    }

    /// Flips one bit, as a failing memory cell does. For simulations, which have one thread.
    ///
    /// # Panics
    /// If `byte` is outside the arena.
    ///
    /// # Safety
    /// No other thread uses the arena, and no reference to that byte exists.
    #[cfg(feature = "faults")]
    pub unsafe fn flip_bit(&self, byte: usize, bit: u32) {
        assert!(byte < self.capacity(), "inside the arena");
        // SAFETY: the assertion keeps the byte inside the mapping; the caller excludes other
        // accesses.
        unsafe { *self.mapping.start().add(byte).as_ptr() ^= 1 << (bit % 8) };
    }

    /// Returns `true` if every one of these bytes, counted from the arena's start, lies in an
    /// allocated unit.
    pub fn is_taken(&self, bytes: &Range<usize>) -> bool {
        let units = bytes.start / UNIT_BYTES..bytes.end.div_ceil(UNIT_BYTES);
        self.extents.lock().is_taken(units.start as u64, units.len() as u64)
    }

    /// Returns the address of the first byte. The address gives no right to access memory.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// Returns the mapped file if other processes can map it. Its first [`Arena::capacity`] bytes
    /// are the arena.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.file()
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("capacity", &self.capacity()).field("used", &self.used()).finish()
    }
}

/// Ownership of a run of units. It is not `Clone`: only its owner may access those bytes or lend
/// them.
struct Extent {
    arena: Arc<Arena>,
    /// First unit.
    first: u32,
    /// Bytes in use. The extent has as few units as hold them, and at least one.
    len: u32,
}

// L2 has one of these per page. With the count of its `Arc` and the allocator's header it takes 32
// bytes.
const _: () = assert!(size_of::<SlotMut>() <= 16);

impl Extent {
    /// Bytes from the start of the mapping.
    fn offset(&self) -> usize {
        self.first as usize * UNIT_BYTES
    }

    /// Length in bytes, a multiple of [`UNIT_BYTES`].
    fn capacity(&self) -> usize {
        (self.len.max(1) as usize).next_multiple_of(UNIT_BYTES)
    }

    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: offset + capacity <= length of the mapping, because the allocator returns only
        // units of it.
        unsafe { self.arena.mapping.start().add(self.offset()) }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        // Tasks of many threads drop slots. The lock covers the allocator only, never page content.
        self.arena.extents.lock().release(self.first.into(), (self.capacity() / UNIT_BYTES) as u64);
    }
}

/// Exclusive memory of the arena. Dropping it returns the memory to the arena.
pub struct SlotMut {
    extent: Extent,
}

impl SlotMut {
    /// Converts the slot into a shared, read-only one.
    pub fn freeze(self) -> Slot {
        Slot { shared: SlotArc::new(self) }
    }

    /// Returns the length in whole units. A device may fill this many bytes.
    pub fn capacity(&self) -> usize {
        self.extent.capacity()
    }

    /// Splits the slot at `at`, a multiple of [`UNIT_BYTES`]. Each half returns to the arena by
    /// itself.
    ///
    /// # Panics
    /// If `at` is not a multiple of the unit strictly inside the slot.
    pub fn split_at(self, at: usize) -> (SlotMut, SlotMut) {
        assert!(at.is_multiple_of(UNIT_BYTES) && 0 < at && at < self.extent.capacity(), "split inside the slot");
        let SlotMut { extent: mut head } = self;
        // The slot ends in its last unit, so `at` is less than its length and fits too.
        let (first, len) = (head.first + (at / UNIT_BYTES) as u32, head.len - at as u32);
        let tail = Extent { arena: head.arena.clone(), first, len };
        head.len = at as u32;
        (SlotMut { extent: head }, SlotMut { extent: tail })
    }

    /// Returns all memory of the slot, in whole units.
    pub fn whole(&mut self) -> &mut [u8] {
        // SAFETY: the extent is initialized memory owned by this slot alone, and `&mut self` makes
        // this the only reference into it.
        unsafe { std::slice::from_raw_parts_mut(self.extent.pointer().as_ptr(), self.capacity()) }
    }

    pub fn arena_offset(&self) -> usize {
        self.extent.offset()
    }
    /// Returns the address of the first byte, for a device. Accesses through it must follow the
    /// rules of [`SlotMut`] and [`Slot`].
    pub fn pointer(&mut self) -> NonNull<u8> {
        self.extent.pointer()
    }
}

impl Deref for SlotMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is initialized memory and lives as long as the extent. This slot
        // alone owns the extent, and `&self` excludes a writer.
        unsafe { std::slice::from_raw_parts(self.extent.pointer().as_ptr(), self.extent.len as usize) }
    }
}

impl DerefMut for SlotMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` makes this the only reference into the extent.
        unsafe { std::slice::from_raw_parts_mut(self.extent.pointer().as_ptr(), self.extent.len as usize) }
    }
}

impl std::fmt::Debug for SlotMut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotMut").field("offset", &self.extent.offset()).field("len", &self.extent.len).finish()
    }
}

/// Shared, read-only memory of the arena. Dropping the last clone returns the memory to the arena.
#[derive(Clone)]
pub struct Slot {
    shared: SlotArc<SlotMut>,
}

impl Slot {
    /// Returns the length in whole units. The bytes behind the slot's length are zero, or came from
    /// the same read.
    pub fn capacity(&self) -> usize {
        self.shared.extent.capacity()
    }

    /// Returns all memory of the slot, in whole units. A device may read this many bytes.
    pub fn whole(&self) -> &[u8] {
        // SAFETY: the extent is initialized memory that lives as long as this handle, and shared
        // slots have no writer.
        unsafe { std::slice::from_raw_parts(self.shared.extent.pointer().as_ptr(), self.capacity()) }
    }

    pub fn arena_offset(&self) -> usize {
        self.shared.extent.offset()
    }

    /// Returns `true` if this is the only handle to the memory now.
    pub fn is_unique(&self) -> bool {
        self.shared.is_unique()
    }

    /// Returns the address of the first byte, for a device. Accesses through it must follow the
    /// rules of [`SlotMut`] and [`Slot`].
    pub fn pointer(&self) -> NonNull<u8> {
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
    fn memory_returns_when_the_last_owner_drops_it() {
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
    fn full_arena_refuses_and_recovers() {
        let arena = Arena::new(3 * UNIT_BYTES).unwrap();
        let slots: Vec<_> = (0..3).map(|_| arena.allocate(1).unwrap()).collect();
        assert!(arena.allocate(1).is_none());
        drop(slots);
        assert_eq!(arena.allocate(3 * UNIT_BYTES).unwrap().len(), 3 * UNIT_BYTES);
        assert!(arena.allocate(3 * UNIT_BYTES + 1).is_none());
        assert!(arena.allocate(usize::MAX).is_none());
    }

    #[test]
    fn empty_slot_takes_a_unit_and_returns_it() {
        let arena = Arena::new(2 * UNIT_BYTES).unwrap();
        let slot = arena.allocate(0).unwrap();
        assert_eq!((slot.len(), slot.capacity(), arena.used()), (0, UNIT_BYTES, UNIT_BYTES));
        let shared = slot.freeze();
        assert_eq!((shared.len(), shared.whole().len()), (0, UNIT_BYTES));
        drop(shared);
        assert_eq!((arena.used(), arena.largest_free()), (0, 2 * UNIT_BYTES));
    }

    #[test]
    fn slots_are_disjoint_and_padding_is_zero() {
        let arena = Arena::new(1 << 20).unwrap();
        arena.allocate(1 << 20).unwrap().fill(0xff);
        let mut slots: Vec<_> = (1..20).map(|i| arena.allocate(i * 700).unwrap()).collect();
        for (i, slot) in slots.iter_mut().enumerate() {
            slot.fill(i as u8);
        }
        for (i, slot) in slots.into_iter().enumerate() {
            assert!(slot.iter().all(|&b| b == i as u8), "slot {i}");
            let (len, mut slot) = (slot.len(), slot);
            assert!(slot.whole()[len..].iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn halves_of_a_slot_return_separately() {
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
        // Miri is slower by orders of magnitude.
        let turns = if cfg!(miri) { 5 } else { 2000 };
        let arena = Arena::new(4 << 20).unwrap();
        std::thread::scope(|scope| {
            for id in 0..4u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    for turn in 0..turns {
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
    fn arena_starts_at_a_huge_page() {
        for sharing in [ArenaSharing::Never, ArenaSharing::IfHuge, ArenaSharing::Always] {
            let arena = Arena::with(8 << 20, sharing).unwrap();
            assert_eq!(arena.start().as_ptr() as usize % (2 << 20), 0);
        }
    }

    #[test]
    fn shared_file_contains_the_arena() {
        let arena = Arena::with((4 << 20) + 5000, ArenaSharing::Always).unwrap();
        let mut slot = arena.allocate(9000).unwrap();
        slot.fill(3);
        let file = File::from(arena.file().expect("the arena is shared").try_clone_to_owned().unwrap());
        let mut seen = vec![0; 9000];
        file.read_exact_at(&mut seen, slot.arena_offset() as u64).unwrap();
        assert!(seen == slot[..]);
        assert!(Arena::new(1 << 20).unwrap().file().is_none());
    }
}
