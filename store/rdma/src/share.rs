//! A client's own memory as memory for RDMA.

use crate::memory::{self, Bytes, BytesMut, Span};
use larder_share::{Block, Memory};

// SAFETY: it is one mapping, which stays where it is as long as the value lives.
unsafe impl memory::Memory for Memory {
    fn span(&self) -> Span {
        let (start, len) = self.span();
        Span::new(start, len)
    }
}

// SAFETY: it is the only way to its bytes in this process, and no other can write to them; they are its own while it lives.
unsafe impl Bytes for Block {
    fn span(&self) -> Span {
        Span::of(self)
    }
}
// SAFETY: as above. Processes of this machine that were told its place may read it meanwhile, and check what they read.
unsafe impl BytesMut for Block {}
