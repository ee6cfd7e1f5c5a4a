//! The arena as memory for RDMA: implementations of the DMA traits for its types.

use super::{Arena, Slot, SlotPartMut};
use crate::span::{DmaBuf, DmaBufMut, DmaMemory, Span};
use std::ops::Range;

// SAFETY: an arena is one mapping, which neither moves nor ends while the arena lives.
unsafe impl DmaMemory for Arena {
    fn span(&self) -> Span {
        Span::new(self.start(), self.capacity())
    }
}

/// A range of a shared slot, kept alive by it. A peer may read it over RDMA.
#[derive(Debug, Clone)]
pub struct SlotSlice {
    slot: Slot,
    range: Range<usize>,
}

impl SlotSlice {
    /// Returns the bytes at `range`, or `None` if the slot is shorter.
    pub fn new(slot: Slot, range: Range<usize>) -> Option<SlotSlice> {
        slot.get(range.clone())?;
        Some(SlotSlice { slot, range })
    }
}

// SAFETY: a shared slot has no writer, and its memory is not reused while the handle lives.
unsafe impl DmaBuf for SlotSlice {
    fn span(&self) -> Span {
        Span::of(&self.slot[self.range.clone()])
    }
}

// SAFETY: the part is the only access to its bytes, as parts do not overlap. They are not reused
// while it lives.
unsafe impl DmaBuf for SlotPartMut {
    fn span(&self) -> Span {
        Span::of(self)
    }
}
// SAFETY: as above.
unsafe impl DmaBufMut for SlotPartMut {}
