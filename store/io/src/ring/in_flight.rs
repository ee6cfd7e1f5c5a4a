//! The table of requests that are with the kernel.
//!
//! Invariants:
//! - An entry keeps its address and its memory from insertion until it is removed after the
//!   kernel's last completion.
//! - A table that is dropped with entries in it leaks them. Memory that a device may still write is
//!   never freed.

use crate::inbox::run_completion;
use crate::request::{Completion, Done, FileId, Operation, Priority, Request};
use larder_format::disk::BLOCK_BYTES;
use larder_memory::{Arena, PrivateBlock};
use std::io;
use std::sync::Arc;

/// Maximum length of a merged entry. A longer one would delay demand reads behind it.
const MERGED_BYTES_MAX: usize = 1 << 20;
const MERGED_MAX: usize = 16;

pub(super) struct QueuedRequest {
    pub(super) request: Request,
    completion: Completion,
    /// Registered memory that the kernel uses instead of the request's block.
    staged: Option<PrivateBlock>,
}

impl QueuedRequest {
    pub(super) fn new(request: Request, completion: Completion) -> QueuedRequest {
        QueuedRequest { request, completion, staged: None }
    }

    /// Copies the request's block to registered memory, unless it has none or was copied before.
    /// Copying 4 KiB costs less than pinning the memory of the whole request.
    fn stage(&mut self, arena: &Arc<Arena>, region: usize) {
        let operation = &self.request.operation;
        let (Operation::Read { block: Some(block), .. } | Operation::Write { block: Some(block), .. }) = operation
        else {
            return;
        };
        if self.staged.is_some() {
            return;
        }
        self.staged = arena.private_block(region);
        if let Some(staged) = &mut self.staged
            && matches!(operation, Operation::Write { .. })
        {
            staged.copy_from_slice(&block[..]);
        }
    }

    /// Calls the completion. The kernel must be done with the request's memory.
    pub(super) fn complete(self, result: io::Result<()>) {
        let QueuedRequest { request: Request { mut operation, .. }, completion, staged } = self;
        if let (Operation::Read { block: Some(block), .. }, Some(staged), Ok(())) = (&mut operation, &staged, &result) {
            block.copy_from_slice(staged);
        }
        // First: the completion may start a request that needs the memory.
        drop(staged);
        run_completion(completion, Done { operation, result });
    }
}

/// Kind of transfer of an entry. All requests of a merged entry have the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    Write,
    Sync,
}

impl Action {
    fn of(operation: &Operation) -> Action {
        match operation {
            Operation::Read { .. } => Action::Read,
            Operation::Write { .. } => Action::Write,
            Operation::Sync => Action::Sync,
        }
    }
}

/// One entry for the kernel, with its progress: a request, or several that are adjacent in a file
/// and merged.
pub(super) struct InFlight {
    first: QueuedRequest,
    more: Vec<QueuedRequest>,
    bytes: usize,
    /// Bytes that earlier, short completions transferred.
    pub(super) moved: usize,
    /// Retries since the last byte was transferred.
    pub(super) retries: u32,
    /// The memory that is still to be transferred. The kernel reads the list at submission.
    pub(super) iovecs: Vec<libc::iovec>,
}

impl InFlight {
    pub(super) fn new(first: QueuedRequest) -> Box<InFlight> {
        let bytes = first.request.operation.bytes();
        Box::new(InFlight { first, more: Vec::new(), bytes, moved: 0, retries: 0, iovecs: Vec::new() })
    }

    /// Returns `true` if `request` starts where these end, so that one entry can do both. The
    /// result respects the bounds of a merged entry.
    pub(super) fn is_continued_by(&self, request: &Request) -> bool {
        let action = self.action();
        action != Action::Sync
            && action == Action::of(&request.operation)
            && request.file == self.file()
            && offset_of(&request.operation).checked_sub(self.offset()) == Some(self.bytes as u64)
            && self.len() < MERGED_MAX
            && request.operation.check().is_ok()
            && self.bytes + request.operation.bytes() <= MERGED_BYTES_MAX
    }

    /// Adds a request for which [`InFlight::is_continued_by`] returned `true`.
    pub(super) fn push(&mut self, queued: QueuedRequest) {
        self.bytes += queued.request.operation.bytes();
        self.more.push(queued);
    }

    pub(super) fn file(&self) -> FileId {
        self.first.request.file
    }

    pub(super) fn priority(&self) -> Priority {
        self.first.request.priority
    }

    pub(super) fn action(&self) -> Action {
        Action::of(&self.first.request.operation)
    }

    fn offset(&self) -> u64 {
        offset_of(&self.first.request.operation)
    }

    pub(super) fn len(&self) -> usize {
        1 + self.more.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn into_requests(self) -> impl Iterator<Item = QueuedRequest> {
        std::iter::once(self.first).chain(self.more)
    }

    /// Copies blocks to registered memory, so that one registered buffer contains all memory of the
    /// entry. The buffer is that of the first slot, or the first buffer if there is none. Blocks
    /// for which the buffer has no room stay where they are.
    pub(super) fn stage(&mut self, arena: &Arc<Arena>) {
        // A part of a block may already be where it is: the rest must go there, too.
        if self.moved > 0 {
            return;
        }
        let mut requests = std::iter::once(&mut self.first).chain(&mut self.more);
        let region = requests.find_map(|queued| slot_address(&mut queued.request.operation));
        let region = region.map_or(Some(0), |address| arena.region_of(address, 1));
        let Some(region) = region else { return };
        for queued in std::iter::once(&mut self.first).chain(&mut self.more) {
            queued.stage(arena, region);
        }
    }

    /// Collects the memory behind the bytes already transferred into `iovecs`. Returns the file
    /// offset of that memory.
    pub(super) fn gather(&mut self) -> u64 {
        let mut gathered = IovecBuilder { skip: self.moved, iovecs: std::mem::take(&mut self.iovecs) };
        gathered.iovecs.clear();
        for queued in std::iter::once(&mut self.first).chain(&mut self.more) {
            gathered.add_request(queued);
        }
        self.iovecs = gathered.iovecs;
        self.offset() + self.moved as u64
    }
}

fn offset_of(operation: &Operation) -> u64 {
    match operation {
        Operation::Read { offset, .. } | Operation::Write { offset, .. } => *offset,
        Operation::Sync => 0,
    }
}

fn slot_address(operation: &mut Operation) -> Option<usize> {
    let pointer = match operation {
        Operation::Read { slot, .. } => slot.pointer(),
        Operation::Write { payload, .. } => payload.as_ref()?.0.pointer(),
        Operation::Sync => return None,
    };
    Some(pointer.as_ptr() as usize)
}

struct IovecBuilder {
    skip: usize,
    iovecs: Vec<libc::iovec>,
}

impl IovecBuilder {
    fn add_request(&mut self, queued: &mut QueuedRequest) {
        let staged = queued.staged.as_ref().map(|staged| staged.pointer().as_ptr());
        match &mut queued.request.operation {
            Operation::Read { block, slot, range, .. } => {
                if let Some(block) = block {
                    self.add(staged.unwrap_or(block.as_mut_ptr()), BLOCK_BYTES);
                }
                // SAFETY: `Operation::check` passed, so range.end <= capacity of the slot.
                self.add(unsafe { slot.pointer().as_ptr().add(range.start) }, range.len());
            }
            Operation::Write { block, payload, .. } => {
                if let Some(block) = block {
                    self.add(staged.unwrap_or(block.as_mut_ptr()), BLOCK_BYTES);
                }
                if let Some((slot, range)) = payload {
                    // SAFETY: as above. The kernel only reads from this memory.
                    self.add(unsafe { slot.pointer().as_ptr().add(range.start) }, range.len());
                }
            }
            Operation::Sync => {}
        }
    }

    /// Adds `len` bytes from `start`, which belong to one allocation owned by a request.
    fn add(&mut self, start: *mut u8, len: usize) {
        let skip = self.skip.min(len);
        self.skip -= skip;
        // SAFETY: skip <= len, so the pointer stays in the allocation.
        let (start, len) = (unsafe { start.add(skip) }, len - skip);
        match self.iovecs.last_mut() {
            _ if len == 0 => {}
            // Memory directly behind the previous range extends it: fewer ranges are cheaper.
            Some(last) if last.iov_base as usize + last.iov_len == start as usize => last.iov_len += len,
            _ => self.iovecs.push(libc::iovec { iov_base: start.cast(), iov_len: len }),
        }
    }
}

pub(super) struct InFlightTable {
    entries: Vec<Option<Box<InFlight>>>,
    free: Vec<usize>,
    idle: usize,
}

impl InFlightTable {
    pub(super) fn new(entries: usize) -> InFlightTable {
        InFlightTable { entries: (0..entries).map(|_| None).collect(), free: (0..entries).rev().collect(), idle: 0 }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    pub(super) fn idle(&self) -> usize {
        self.idle
    }

    /// Stores a request and returns its index, the `user_data` of its ring entry.
    ///
    /// # Panics
    /// If the table is full. The caller must check [`InFlightTable::has_room`] first.
    pub(super) fn insert(&mut self, inflight: Box<InFlight>) -> usize {
        let index = self.free.pop().expect("a caller looks for room first");
        self.idle += usize::from(inflight.priority() == Priority::Idle);
        self.entries[index] = Some(inflight);
        index
    }

    pub(super) fn get(&mut self, index: usize) -> Option<&mut InFlight> {
        self.entries.get_mut(index)?.as_deref_mut()
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<Box<InFlight>> {
        let inflight = self.entries.get_mut(index)?.take()?;
        self.idle -= usize::from(inflight.priority() == Priority::Idle);
        self.free.push(index);
        Some(inflight)
    }

    pub(super) fn uses(&self, file: FileId) -> bool {
        self.entries.iter().flatten().any(|inflight| inflight.file() == file)
    }
}

impl Drop for InFlightTable {
    fn drop(&mut self) {
        for inflight in self.entries.drain(..).flatten() {
            // Leaked on purpose: the kernel may still write to this memory.
            std::mem::forget(inflight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Block, Done};
    use larder_memory::Arena;

    fn queued(operation: Operation) -> QueuedRequest {
        let request = Request { file: FileId(0), priority: Priority::Demand, operation };
        QueuedRequest { request, completion: Box::new(|_: Done| {}), staged: None }
    }

    /// Fills the memory as the kernel does: through the addresses, behind the compiler's back.
    fn fill(iovecs: &[libc::iovec], byte: u8) -> usize {
        for iovec in iovecs {
            // SAFETY: `gather` names memory that the entry owns, and nothing borrows it now.
            unsafe { iovec.iov_base.cast::<u8>().write_bytes(byte, iovec.iov_len) };
        }
        iovecs.iter().map(|iovec| iovec.iov_len).sum()
    }

    #[test]
    fn iovecs_of_merged_reads_cover_the_memory_behind_the_bytes_moved() {
        let arena = Arena::new(1 << 20).unwrap();
        let slot = || arena.allocate(2 * BLOCK_BYTES).unwrap();
        let first = Operation::read_split(0, Some(Block::of(&[])), slot());
        let second = queued(Operation::read(3 * BLOCK_BYTES as u64, slot()));
        let mut inflight = InFlight::new(queued(first));
        assert!(inflight.is_continued_by(&second.request));
        inflight.push(second);
        assert_eq!((inflight.gather(), fill(&inflight.iovecs, 1)), (0, 5 * BLOCK_BYTES));
        // The kernel moved two blocks, and the rest comes with the next submission.
        inflight.moved = 2 * BLOCK_BYTES;
        assert_eq!((inflight.gather(), fill(&inflight.iovecs, 2)), (2 * BLOCK_BYTES as u64, 3 * BLOCK_BYTES));
        let mut read = Vec::new();
        for queued in inflight.into_requests() {
            let Operation::Read { block, slot, .. } = queued.request.operation else { panic!("a read") };
            read.extend(block.iter().flat_map(|block| block.to_vec()));
            read.extend_from_slice(&slot);
        }
        let moved = 2 * BLOCK_BYTES;
        assert!(read.len() == 5 * BLOCK_BYTES && read[..moved].iter().all(|&byte| byte == 1));
        assert!(read[moved..].iter().all(|&byte| byte == 2));
    }

    #[test]
    fn iovecs_of_a_write_show_readers_the_same_bytes() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut slot = arena.allocate(BLOCK_BYTES).unwrap();
        slot.fill(7);
        let slot = slot.freeze();
        let mut inflight = InFlight::new(queued(Operation::write(0, Block::of(b"header"), Some(slot.clone()))));
        inflight.gather();
        for iovec in &inflight.iovecs {
            // SAFETY: the entry owns the memory, which is shared for reading only.
            let bytes = unsafe { std::slice::from_raw_parts(iovec.iov_base.cast::<u8>(), iovec.iov_len) };
            assert!(bytes.starts_with(b"header") || bytes.iter().all(|&byte| byte == 7));
        }
        assert!(slot.iter().all(|&byte| byte == 7));
    }
}
