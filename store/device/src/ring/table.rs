//! The requests that are with the kernel.
//!
//! Always true: what is in the table stays at its address and keeps its memory until it is taken out after the kernel's
//! last answer. A table that is dropped with requests in it leaks them: memory a device may still write is never freed.

use crate::inbox::Completion;
use crate::request::{Operation, Request};
use larder_format::disk::BLOCK_BYTES;

/// A request and how far it is.
pub(super) struct InFlight {
    pub(super) request: Request,
    pub(super) completion: Completion,
    /// Bytes moved by earlier, short answers.
    pub(super) moved: usize,
    /// Times it was tried again without moving a byte.
    pub(super) retries: u32,
    /// Where the kernel reads the pieces of a write; at least until it was submitted.
    pub(super) pieces: [libc::iovec; 2],
}

/// One piece of memory still to be moved.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) start: *mut u8,
    pub(super) len: usize,
}

impl InFlight {
    pub(super) fn new(request: Request, completion: Completion) -> Box<InFlight> {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Box::new(InFlight { request, completion, moved: 0, retries: 0, pieces: [none; 2] })
    }

    /// The memory behind what was moved already, in order.
    pub(super) fn remaining(&mut self) -> ([Option<Piece>; 2], u64) {
        let moved = self.moved;
        let part = |start: *mut u8, len: usize, before: usize| {
            let skip = moved.saturating_sub(before).min(len);
            // SAFETY: skip <= len, and `len` bytes from `start` are one allocation that the request owns.
            (skip < len).then(|| Piece { start: unsafe { start.add(skip) }, len: len - skip })
        };
        match &mut self.request.operation {
            Operation::Read { offset, slot, range } => {
                // SAFETY: `Operation::check` holds: range.end <= capacity of the slot.
                let start = unsafe { slot.pointer().as_ptr().add(range.start) };
                ([part(start, range.len(), 0), None], *offset + moved as u64)
            }
            Operation::Write { offset, block, payload } => {
                let block = block.as_mut().map(|block| block.as_mut_ptr());
                let first = block.and_then(|start| part(start, BLOCK_BYTES, 0));
                let before = block.map_or(0, |_| BLOCK_BYTES);
                let second = payload.as_ref().and_then(|(slot, range)| {
                    // SAFETY: as above. The kernel only reads from it.
                    let start = unsafe { slot.pointer().as_ptr().add(range.start) };
                    part(start, range.len(), before)
                });
                ([first, second], *offset + moved as u64)
            }
            Operation::Sync => ([None, None], 0),
        }
    }
}

/// A fixed number of places.
pub(super) struct Table {
    places: Vec<Option<Box<InFlight>>>,
    free: Vec<usize>,
}

impl Table {
    pub(super) fn new(places: usize) -> Table {
        Table { places: (0..places).map(|_| None).collect(), free: (0..places).rev().collect() }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// # Panics
    /// If there is no room.
    pub(super) fn insert(&mut self, request: Box<InFlight>) -> usize {
        let place = self.free.pop().expect("a caller looks for room first");
        self.places[place] = Some(request);
        place
    }

    pub(super) fn get(&mut self, place: usize) -> Option<&mut InFlight> {
        self.places.get_mut(place)?.as_deref_mut()
    }

    pub(super) fn remove(&mut self, place: usize) -> Option<Box<InFlight>> {
        let request = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(request)
    }

    /// Files that requests in the table use.
    pub(super) fn uses(&self, file: crate::request::FileId) -> bool {
        self.places.iter().flatten().any(|inflight| inflight.request.file == file)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for inflight in self.places.drain(..).flatten() {
            std::mem::forget(inflight);
        }
    }
}
