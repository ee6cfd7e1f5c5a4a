//! Requests to a [`crate::Ring`] and their outcomes.
//!
//! Invariant: a request owns every byte of memory that it names, and returns it with its outcome.

use larder_format::disk::BLOCK_BYTES;
use larder_memory::{Slot, SlotMut};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use thiserror::Error;

/// One block on the heap, aligned for direct I/O. Record headers use these, so they take no arena
/// memory.
#[repr(C, align(4096))]
pub struct Block([u8; BLOCK_BYTES]);

impl Block {
    /// Returns a block that starts with `bytes` and is zero behind them.
    ///
    /// # Panics
    /// If `bytes` is longer than a block.
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

/// Identifies a file attached to a ring. The number is reused after the file is detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId(pub(crate) u32);

/// Scheduling priority of a request. Requests of one priority start in order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// A client or the log waits for this request.
    Demand,
    /// Soon: at least every fourth request that starts is of this priority, if one is queued.
    Background,
    /// No hurry: starts when nothing else is queued, or as every 64th request. At most two are with
    /// the kernel at a time.
    Idle,
}

impl Priority {
    pub(crate) const COUNT: usize = 3;
}

/// The I/O of a request. Offsets and ranges are multiples of [`BLOCK_BYTES`].
#[derive(Debug)]
pub enum Operation {
    /// Fills the block and, from directly behind it in the file, `range` of the slot's capacity.
    /// Fails with `UnexpectedEof` if the file ends inside the range.
    Read { offset: u64, block: Option<Box<Block>>, slot: SlotMut, range: Range<usize> },
    /// Writes the block and, directly behind it, `range` of the slot's capacity.
    Write { offset: u64, block: Option<Box<Block>>, payload: Option<(Slot, Range<usize>)> },
    /// Makes writes to the file durable that completed before this request started (fdatasync).
    Sync,
}

impl Operation {
    pub fn read(offset: u64, slot: SlotMut) -> Operation {
        Operation::read_split(offset, None, slot)
    }

    /// Reads the first block apart from the rest, if there is a block for it.
    pub fn read_split(offset: u64, block: Option<Box<Block>>, slot: SlotMut) -> Operation {
        let range = 0..slot.capacity();
        Operation::Read { offset, block, slot, range }
    }

    pub fn write(offset: u64, block: Box<Block>, payload: Option<Slot>) -> Operation {
        let payload = payload.map(|slot| {
            let range = 0..slot.capacity();
            (slot, range)
        });
        Operation::Write { offset, block: Some(block), payload }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Operation::Read { block, range, .. } => block.as_ref().map_or(0, |_| BLOCK_BYTES) + range.len(),
            Operation::Write { block, payload, .. } => {
                block.as_ref().map_or(0, |_| BLOCK_BYTES) + payload.as_ref().map_or(0, |(_, range)| range.len())
            }
            Operation::Sync => 0,
        }
    }

    /// Fails if the request is not in whole blocks, or reaches outside its memory. The kernel would
    /// otherwise access memory that the request does not own.
    pub(crate) fn check(&self) -> io::Result<()> {
        let aligned = |range: &Range<usize>, capacity: usize| {
            range.start.is_multiple_of(BLOCK_BYTES)
                && range.end.is_multiple_of(BLOCK_BYTES)
                && range.start < range.end
                && range.end <= capacity
        };
        let fits = match self {
            Operation::Read { offset, slot, range, .. } => {
                offset.is_multiple_of(BLOCK_BYTES as u64) && aligned(range, slot.capacity())
            }
            Operation::Write { offset, block, payload } => {
                offset.is_multiple_of(BLOCK_BYTES as u64)
                    && (block.is_some() || payload.is_some())
                    && payload.as_ref().is_none_or(|(slot, range)| aligned(range, slot.capacity()))
            }
            Operation::Sync => true,
        };
        // The kernel reports the transferred length as an `i32`.
        if fits && self.bytes() <= i32::MAX as usize {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "the request is not in whole blocks of its memory"))
    }
}

#[derive(Debug)]
pub struct Request {
    pub file: FileId,
    pub priority: Priority,
    pub operation: Operation,
}

/// The outcome of a request. It returns the memory to the caller, also if the request failed.
#[derive(Debug)]
pub struct Done {
    pub operation: Operation,
    /// `Ok` if every byte was transferred.
    pub result: io::Result<()>,
}

impl Done {
    pub fn into_slot(self) -> Option<SlotMut> {
        match self.operation {
            Operation::Read { slot, .. } => Some(slot),
            _ => None,
        }
    }
}

/// Callback that receives the outcome of a request. It runs once, on the device's executor thread,
/// so it must neither block nor compute for long.
pub type Completion = Box<dyn FnOnce(Done) + Send>;

/// The ring is closed, or its thread has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the device ring is closed")]
pub struct RingClosed;

impl From<RingClosed> for io::Error {
    fn from(closed: RingClosed) -> io::Error {
        io::Error::new(io::ErrorKind::BrokenPipe, closed)
    }
}
