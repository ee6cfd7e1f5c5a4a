//! What can be asked of a [`crate::Ring`], and what comes back.
//!
//! Always true: a request owns every byte of memory it names, and gives it back with its answer.

use crate::arena::{Slot, SlotMut};
use larder_format::disk::BLOCK_BYTES;
use std::io;
use std::ops::{Deref, DerefMut, Range};

/// One block of memory of its own, aligned for direct I/O: headers do not take from the arena.
#[repr(C, align(4096))]
pub struct Block([u8; BLOCK_BYTES]);

impl Block {
    /// A block of `bytes`, at most one block of them, filled up with zeros.
    ///
    /// # Panics
    /// If there are more bytes than a block has.
    pub fn of(bytes: &[u8]) -> Box<Block> {
        let mut block = Box::new(Block([0; BLOCK_BYTES]));
        block[..bytes.len()].copy_from_slice(bytes);
        block
    }
}

impl Deref for Block {
    type Target = [u8; BLOCK_BYTES];
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Block")
    }
}

/// A file that was attached to a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId(pub(crate) u32);

/// Which requests go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Somebody waits for it.
    Demand,
    /// It must happen soon. At least every fourth request that is started is of this lane, if any waits.
    Background,
    /// It has time: started when nothing else waits, or as every 64th, and at most two of it are with the kernel.
    Idle,
}

impl Lane {
    pub(crate) const COUNT: usize = 3;
}

/// What to do. Offsets and ranges are multiples of [`BLOCK_BYTES`].
#[derive(Debug)]
pub enum Operation {
    /// Fills `range` of the slot's capacity from the file.
    Read {
        /// Byte offset in the file.
        offset: u64,
        /// Where to.
        slot: SlotMut,
        /// Which bytes of it.
        range: Range<usize>,
    },
    /// Writes the block and behind it `range` of the slot's capacity, as one.
    Write {
        /// Byte offset in the file.
        offset: u64,
        /// What comes first.
        block: Option<Box<Block>>,
        /// What comes then.
        payload: Option<(Slot, Range<usize>)>,
    },
    /// Makes durable what was written to the file and answered before (fdatasync).
    Sync,
}

impl Operation {
    /// Reads a slot's whole capacity.
    pub fn read(offset: u64, slot: SlotMut) -> Operation {
        let range = 0..slot.capacity();
        Operation::Read { offset, slot, range }
    }

    /// Writes a block and a slot's whole capacity.
    pub fn write(offset: u64, block: Box<Block>, payload: Option<Slot>) -> Operation {
        let payload = payload.map(|slot| {
            let range = 0..slot.capacity();
            (slot, range)
        });
        Operation::Write { offset, block: Some(block), payload }
    }

    /// Bytes to move.
    pub fn bytes(&self) -> usize {
        match self {
            Operation::Read { range, .. } => range.len(),
            Operation::Write { block, payload, .. } => {
                block.as_ref().map_or(0, |_| BLOCK_BYTES) + payload.as_ref().map_or(0, |(_, range)| range.len())
            }
            Operation::Sync => 0,
        }
    }

    /// Refuses what would reach outside its memory or cannot be done directly.
    pub(crate) fn check(&self) -> io::Result<()> {
        let aligned = |range: &Range<usize>, capacity: usize| {
            range.start.is_multiple_of(BLOCK_BYTES)
                && range.end.is_multiple_of(BLOCK_BYTES)
                && range.start < range.end
                && range.end <= capacity
        };
        let fits = match self {
            Operation::Read { offset, slot, range } => {
                offset.is_multiple_of(BLOCK_BYTES as u64) && aligned(range, slot.capacity())
            }
            Operation::Write { offset, block, payload } => {
                offset.is_multiple_of(BLOCK_BYTES as u64)
                    && (block.is_some() || payload.is_some())
                    && payload.as_ref().is_none_or(|(slot, range)| aligned(range, slot.capacity()))
            }
            Operation::Sync => true,
        };
        match fits && self.bytes() <= i32::MAX as usize {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "request is not in whole blocks of its memory")),
        }
    }
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// Of which file.
    pub file: FileId,
    /// How urgent.
    pub lane: Lane,
    /// What.
    pub operation: Operation,
}

/// The answer: the memory, and what came of it.
#[derive(Debug)]
pub struct Done {
    /// The operation with everything it owns.
    pub operation: Operation,
    /// `Ok` if every byte was moved.
    pub result: io::Result<()>,
}

impl Done {
    /// The slot that was read into.
    pub fn into_slot(self) -> Option<SlotMut> {
        match self.operation {
            Operation::Read { slot, .. } => Some(slot),
            _ => None,
        }
    }
}
