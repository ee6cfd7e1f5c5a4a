//! The arena of a node as memory for RDMA.

use crate::memory::{Bytes, BytesMut, Memory, Span};
use larder_device::{Arena, PieceMut, Slot};
use std::ops::Range;

// SAFETY: an arena is one mapping, which stays where it is as long as the arena lives.
unsafe impl Memory for Arena {
    fn span(&self) -> Span {
        Span::new(self.start(), self.capacity())
    }
}

/// Some bytes of a slot.
#[derive(Debug, Clone)]
pub struct SlotSlice {
    slot: Slot,
    range: Range<usize>,
}

impl SlotSlice {
    /// These bytes; `None` if the slot has no such bytes.
    pub fn new(slot: Slot, range: Range<usize>) -> Option<SlotSlice> {
        slot.get(range.clone())?;
        Some(SlotSlice { slot, range })
    }
}

// SAFETY: nobody writes to a slot that is shared, and its memory is its own while it lives.
unsafe impl Bytes for SlotSlice {
    fn span(&self) -> Span {
        Span::of(&self.slot[self.range.clone()])
    }
}

// SAFETY: it is the only way to its bytes: pieces do not overlap. They are its own while it lives.
unsafe impl Bytes for PieceMut {
    fn span(&self) -> Span {
        Span::of(self)
    }
}
// SAFETY: as above.
unsafe impl BytesMut for PieceMut {}
