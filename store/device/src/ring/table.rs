//! The requests that are with the kernel.
//!
//! Always true: what is in the table stays at its address and keeps its memory until it is taken out after the kernel's
//! last answer. A table that is dropped with requests in it leaks them: memory a device may still write is never freed.

use crate::request::{FileId, Lane, Operation, Request};
use crate::seam::Completion;
use larder_format::disk::BLOCK_BYTES;

/// Most bytes of requests that go to the kernel as one.
const MERGED_BYTES_MAX: usize = 1 << 20;
/// Most requests that go to the kernel as one.
const MERGED_MAX: usize = 16;

/// A request, and who is told.
pub(super) struct Asked {
    pub(super) request: Request,
    pub(super) completion: Completion,
}

/// What the kernel does for a place of the table.
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

/// One request or several that follow each other in a file, and how far they are.
pub(super) struct InFlight {
    first: Asked,
    more: Vec<Asked>,
    /// Bytes in all.
    bytes: usize,
    /// Bytes moved by earlier, short answers.
    pub(super) moved: usize,
    /// Times it was tried again without moving a byte.
    pub(super) retries: u32,
    /// The memory still to be moved, where the kernel finds it; at least until it was submitted.
    pub(super) pieces: Vec<libc::iovec>,
}

impl InFlight {
    pub(super) fn new(first: Asked) -> Box<InFlight> {
        let bytes = first.request.operation.bytes();
        Box::new(InFlight { first, more: Vec::new(), bytes, moved: 0, retries: 0, pieces: Vec::new() })
    }

    /// Whether a request goes on where these end, so that the kernel can do it with them.
    pub(super) fn goes_on_with(&self, request: &Request) -> bool {
        let action = self.action();
        action != Action::Sync
            && action == Action::of(&request.operation)
            && request.file == self.file()
            && offset_of(&request.operation).checked_sub(self.offset()) == Some(self.bytes as u64)
            && self.len() < MERGED_MAX
            && request.operation.check().is_ok()
            && self.bytes + request.operation.bytes() <= MERGED_BYTES_MAX
    }

    /// Adds a request for which [`InFlight::goes_on_with`] is true.
    pub(super) fn push(&mut self, asked: Asked) {
        self.bytes += asked.request.operation.bytes();
        self.more.push(asked);
    }

    pub(super) fn file(&self) -> FileId {
        self.first.request.file
    }

    pub(super) fn lane(&self) -> Lane {
        self.first.request.lane
    }

    pub(super) fn action(&self) -> Action {
        Action::of(&self.first.request.operation)
    }

    fn offset(&self) -> u64 {
        offset_of(&self.first.request.operation)
    }

    /// Requests.
    pub(super) fn len(&self) -> usize {
        1 + self.more.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn into_asked(self) -> impl Iterator<Item = Asked> {
        std::iter::once(self.first).chain(self.more)
    }

    /// Gathers the memory behind what was moved already into `pieces`, and tells the file offset where it belongs.
    pub(super) fn gather(&mut self) -> u64 {
        let mut gathered = Pieces { skip: self.moved, pieces: std::mem::take(&mut self.pieces) };
        gathered.pieces.clear();
        for asked in std::iter::once(&mut self.first).chain(&mut self.more) {
            gathered.add_operation(&mut asked.request.operation);
        }
        self.pieces = gathered.pieces;
        self.offset() + self.moved as u64
    }
}

fn offset_of(operation: &Operation) -> u64 {
    match operation {
        Operation::Read { offset, .. } | Operation::Write { offset, .. } => *offset,
        Operation::Sync => 0,
    }
}

/// Memory in the order of the file, but for the first `skip` bytes.
struct Pieces {
    skip: usize,
    pieces: Vec<libc::iovec>,
}

impl Pieces {
    fn add_operation(&mut self, operation: &mut Operation) {
        match operation {
            Operation::Read { slot, range, .. } => {
                // SAFETY: `Operation::check` holds: range.end <= capacity of the slot.
                self.add(unsafe { slot.pointer().as_ptr().add(range.start) }, range.len());
            }
            Operation::Write { block, payload, .. } => {
                if let Some(block) = block {
                    self.add(block.as_mut_ptr(), BLOCK_BYTES);
                }
                if let Some((slot, range)) = payload {
                    // SAFETY: as above. The kernel only reads from it.
                    self.add(unsafe { slot.pointer().as_ptr().add(range.start) }, range.len());
                }
            }
            Operation::Sync => {}
        }
    }

    /// Adds `len` bytes from `start`, which are one allocation that a request owns.
    fn add(&mut self, start: *mut u8, len: usize) {
        let skip = self.skip.min(len);
        self.skip -= skip;
        // SAFETY: skip <= len.
        let (start, len) = (unsafe { start.add(skip) }, len - skip);
        match self.pieces.last_mut() {
            _ if len == 0 => {}
            // Memory that lies behind the piece before is one piece with it.
            Some(last) if last.iov_base as usize + last.iov_len == start as usize => last.iov_len += len,
            _ => self.pieces.push(libc::iovec { iov_base: start.cast(), iov_len: len }),
        }
    }
}

/// A fixed number of places.
pub(super) struct Table {
    places: Vec<Option<Box<InFlight>>>,
    free: Vec<usize>,
    /// Places taken by the idle lane.
    idle: usize,
}

impl Table {
    pub(super) fn new(places: usize) -> Table {
        Table { places: (0..places).map(|_| None).collect(), free: (0..places).rev().collect(), idle: 0 }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Places taken by requests of the idle lane.
    pub(super) fn idle(&self) -> usize {
        self.idle
    }

    /// # Panics
    /// If there is no room.
    pub(super) fn insert(&mut self, inflight: Box<InFlight>) -> usize {
        let place = self.free.pop().expect("a caller looks for room first");
        self.idle += usize::from(inflight.lane() == Lane::Idle);
        self.places[place] = Some(inflight);
        place
    }

    pub(super) fn get(&mut self, place: usize) -> Option<&mut InFlight> {
        self.places.get_mut(place)?.as_deref_mut()
    }

    pub(super) fn remove(&mut self, place: usize) -> Option<Box<InFlight>> {
        let inflight = self.places.get_mut(place)?.take()?;
        self.idle -= usize::from(inflight.lane() == Lane::Idle);
        self.free.push(place);
        Some(inflight)
    }

    /// Whether requests in the table use a file.
    pub(super) fn uses(&self, file: FileId) -> bool {
        self.places.iter().flatten().any(|inflight| inflight.file() == file)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for inflight in self.places.drain(..).flatten() {
            std::mem::forget(inflight);
        }
    }
}
