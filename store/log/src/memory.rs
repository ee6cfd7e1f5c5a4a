//! Memory for blocks that state the identity of the log.
//!
//! Invariant: no byte of such a block lies in memory that clients map. A client that knew the
//! identity could forge records inside the payload of a page. So record headers, scans and footers
//! use the arena only if this process alone maps it.

use crate::L3Error;
use crate::shared::LogShared;
use larder_format::disk::BLOCK_BYTES;
use larder_io::Block;
use larder_memory::{Arena, SlotMut};
use std::io;
use std::ops::Deref;
use std::sync::Arc;

/// Returns the arena itself, or memory of `bytes` apart from it if clients may map the arena.
pub(crate) fn private_memory(arena: &Arc<Arena>, bytes: usize) -> io::Result<Arc<Arena>> {
    match arena.file() {
        None => Ok(arena.clone()),
        Some(_) => Arena::new(bytes),
    }
}

/// Memory for one record: header and payload in one slot, or in two pieces.
pub(crate) struct RecordMemory {
    pub(crate) block: Option<Box<Block>>,
    pub(crate) slot: SlotMut,
}

/// Header of a record that was read.
pub(crate) enum HeaderMemory {
    Block(Box<Block>),
    Slot(SlotMut),
}

impl Deref for HeaderMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            HeaderMemory::Block(block) => &block[..],
            HeaderMemory::Slot(slot) => slot,
        }
    }
}

impl RecordMemory {
    /// Memory for a header alone.
    pub(crate) fn header(arena: &Arc<Arena>) -> Option<RecordMemory> {
        let slot = private_memory(arena, BLOCK_BYTES).ok()?.allocate(BLOCK_BYTES)?;
        Some(RecordMemory { block: None, slot })
    }

    /// Splits a record into its header and its payload.
    pub(crate) fn split(self) -> (HeaderMemory, SlotMut) {
        match self.block {
            Some(block) => (HeaderMemory::Block(block), self.slot),
            None => {
                let (header, payload) = self.slot.split_at(BLOCK_BYTES);
                (HeaderMemory::Slot(header), payload)
            }
        }
    }
}

impl LogShared {
    /// Allocates memory for a record. The payload lies in the arena, where readers find it later.
    pub(crate) fn allocate_record(&self, payload_bytes: usize) -> Result<RecordMemory, L3Error> {
        let is_shared = self.arena.file().is_some();
        // One slot, if possible: a read into registered memory costs the kernel less.
        let bytes = if is_shared { payload_bytes } else { BLOCK_BYTES + payload_bytes };
        let slot = self.arena.allocate(bytes).ok_or(L3Error::NoMemory { bytes })?;
        Ok(RecordMemory { block: is_shared.then(|| Block::of(&[])), slot })
    }
}
