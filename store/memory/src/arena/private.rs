//! Private blocks of an arena: memory for record headers, in the same registered buffers as slots.
//!
//! The kernel transfers several ranges of memory with one request, without pinning them, only if
//! one registered buffer contains them all. A header must therefore lie in the buffer of its
//! payload, but not in memory that clients map.
//!
//! Invariants:
//! - Two private blocks never overlap, and none overlaps a slot.
//! - A block returns to its region when its owner drops it.
//!
//! ```text
//!  region 0                                region 1
//!  ┌─────────┬───────────────────────────┬─────────┬────────────────
//!  │ private │ slots                     │ private │ slots
//!  └─────────┴───────────────────────────┴─────────┴────────────────
//!            └ Arena::start, offset 0
//! ```

use super::mapping::{Mapping, PRIVATE_BYTES};
use super::{Arena, UNIT_BYTES};
use crate::extent::ExtentAllocator;
use crate::span::Span;
use larder_runtime::lock::Mutex;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Length of a region: the kernel registers no longer buffer.
pub(super) const REGION_BYTES: usize = 1 << 30;

/// Free private blocks of all regions.
pub(super) struct PrivateBlocks {
    /// Numbers of the free blocks of each region.
    free: Vec<Mutex<Vec<u32>>>,
    /// Bytes between the arena's start and its end that are private.
    inside: usize,
}

impl PrivateBlocks {
    /// Takes the private memory of all regions from `extents`. The first region's lies before the
    /// arena's start.
    pub(super) fn new(mapping: &Mapping, extents: &mut ExtentAllocator) -> PrivateBlocks {
        let all = PRIVATE_BYTES + mapping.len();
        let (mut free, mut inside) = (Vec::new(), 0);
        for first in (0..all).step_by(mapping.region_bytes()) {
            let bytes = PRIVATE_BYTES.min(all - first);
            if first > 0 {
                let units = ((first - PRIVATE_BYTES) / UNIT_BYTES, bytes / UNIT_BYTES);
                assert!(extents.take(units.0 as u64, units.1 as u64), "a new arena has no slots");
                inside += bytes;
            }
            free.push(Mutex::new((0..(bytes / UNIT_BYTES) as u32).rev().collect()));
        }
        PrivateBlocks { free, inside }
    }

    pub(super) fn bytes_inside(&self) -> usize {
        self.inside
    }
}

impl Arena {
    /// Returns the memory of each region, for registration with a kernel: its private blocks, and
    /// its slots behind them.
    pub fn regions(&self) -> impl Iterator<Item = Span> {
        let all = PRIVATE_BYTES + self.mapping.len();
        let bytes = self.mapping.region_bytes();
        (0..all).step_by(bytes).map(move |first| {
            // SAFETY: first < all, so the pointer stays inside the mapping.
            let start = unsafe { self.mapping.regions_start().add(first) };
            Span::new(start, bytes.min(all - first))
        })
    }

    /// Returns the number of the region that contains all `len` bytes from `address`, if there is
    /// one.
    pub fn region_of(&self, address: usize, len: usize) -> Option<usize> {
        let first = address.checked_sub(self.mapping.regions_start().as_ptr() as usize)?;
        let last = first.checked_add(len.checked_sub(1)?)?;
        let region = first / self.mapping.region_bytes();
        let inside = last < PRIVATE_BYTES + self.mapping.len() && last / self.mapping.region_bytes() == region;
        inside.then_some(region)
    }

    /// Allocates a block of [`UNIT_BYTES`] in the region's private memory, which no other process
    /// can map. It contains the bytes of an earlier owner. Returns `None` if all 512 blocks of the
    /// region are in use, or there is no such region.
    pub fn private_block(self: &Arc<Self>, region: usize) -> Option<PrivateBlock> {
        let block = self.private.free.get(region)?.lock().pop()?;
        Some(PrivateBlock { arena: self.clone(), region, block })
    }
}

/// Exclusive memory of [`UNIT_BYTES`] that no other process can map. Dropping it returns the memory
/// to its arena.
pub struct PrivateBlock {
    arena: Arc<Arena>,
    region: usize,
    block: u32,
}

impl PrivateBlock {
    /// Returns the address of the first byte, for a device.
    pub fn pointer(&self) -> NonNull<u8> {
        let at = self.region * self.arena.mapping.region_bytes() + self.block as usize * UNIT_BYTES;
        // SAFETY: the list of free blocks has only blocks of the region's private memory.
        unsafe { self.arena.mapping.regions_start().add(at) }
    }
}

impl Deref for PrivateBlock {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is initialized memory owned by this value alone, and `&self` excludes a
        // writer.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), UNIT_BYTES) }
    }
}

impl DerefMut for PrivateBlock {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` makes this the only reference into the block.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), UNIT_BYTES) }
    }
}

impl Drop for PrivateBlock {
    fn drop(&mut self) {
        self.arena.private.free[self.region].lock().push(self.block);
    }
}

impl std::fmt::Debug for PrivateBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrivateBlock").field("region", &self.region).field("block", &self.block).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaSharing;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    /// Regions of the tests: two of them have slots, and the third is private memory alone.
    const REGION: usize = 4 << 20;
    const BYTES: usize = 2 * REGION - PRIVATE_BYTES + (1 << 20);

    fn arena(sharing: ArenaSharing) -> Arc<Arena> {
        Arena::with_regions(BYTES, sharing, REGION).unwrap()
    }

    #[test]
    fn regions_cover_slots_and_private_blocks() {
        let arena = arena(ArenaSharing::Never);
        let regions: Vec<Span> = arena.regions().collect();
        assert_eq!(regions.iter().map(Span::len).collect::<Vec<_>>(), [REGION, REGION, 1 << 20]);
        let start = arena.start().as_ptr() as usize;
        assert_eq!(regions[0].address(), start - PRIVATE_BYTES);
        for (number, region) in regions.iter().enumerate() {
            let end = region.address() + region.len();
            assert_eq!(arena.region_of(region.address(), region.len()), Some(number));
            assert_eq!(arena.region_of(end - 1, 1), Some(number));
            assert_eq!(arena.region_of(end - 1, 2), None, "no range spans two regions");
            let block = arena.private_block(number).unwrap();
            assert_eq!(arena.region_of(block.pointer().as_ptr() as usize, UNIT_BYTES), Some(number));
        }
        assert_eq!(arena.region_of(start - PRIVATE_BYTES - 1, 1), None);
        assert!(arena.private_block(3).is_none());
    }

    #[test]
    fn private_blocks_and_slots_are_disjoint() {
        // Miri has no file systems that could be shared.
        let arena = arena(if cfg!(miri) { ArenaSharing::Never } else { ArenaSharing::Always });
        assert_eq!(arena.used(), 0);
        let slots: Vec<_> = std::iter::from_fn(|| arena.allocate(UNIT_BYTES)).collect();
        let blocks: Vec<_> = (0..3)
            .flat_map(|region| {
                let arena = arena.clone();
                std::iter::from_fn(move || arena.private_block(region))
            })
            .collect();
        assert_eq!((slots.len(), blocks.len()), (1024, 512 + 512 + 256));
        let mut starts: Vec<usize> = slots.iter().map(|slot| slot.as_ptr() as usize).collect();
        starts.extend(blocks.iter().map(|block| block.as_ptr() as usize));
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 1024 + 1280);
        assert_eq!(arena.used(), slots.len() * UNIT_BYTES);
        drop((slots, blocks));
        assert_eq!(arena.used(), 0);
        assert!(arena.private_block(2).is_some());
    }

    #[test]
    fn private_blocks_are_not_in_the_shared_file() {
        let arena = arena(ArenaSharing::Always);
        let mut slot = arena.allocate(UNIT_BYTES).unwrap();
        slot.fill(3);
        let mut blocks: Vec<_> = (0..3).map(|region| arena.private_block(region).unwrap()).collect();
        blocks.iter_mut().for_each(|block| block.fill(9));
        let file = File::from(arena.file().expect("the arena is shared").try_clone_to_owned().unwrap());
        let mut seen = vec![0; BYTES];
        file.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen.contains(&3) && !seen.contains(&9));
    }
}
