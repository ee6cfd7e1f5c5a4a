//! A client's shared memory as memory for RDMA: implementations of the DMA traits.

use super::{SharedBlock, SharedMemory};
use crate::span::{DmaBuf, DmaBufMut, DmaMemory, Span};

// SAFETY: one mapping, which neither moves nor ends while the value lives.
unsafe impl DmaMemory for SharedMemory {
    fn span(&self) -> Span {
        let (start, len) = self.span();
        Span::new(start, len)
    }
}

// SAFETY: the block is the only access to its bytes in this process, no other process can write
// them, and they are not reused while it lives.
unsafe impl DmaBuf for SharedBlock {
    fn span(&self) -> Span {
        Span::of(self)
    }
}
// SAFETY: as above. Other processes may read the bytes meanwhile; they check what they read.
unsafe impl DmaBufMut for SharedBlock {}
