//! One buffer written by many threads at once, each its own part.

use std::marker::PhantomData;

/// A mutable slice whose disjoint parts are handed out to threads.
pub(super) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer stands for an exclusive borrow of plain numbers; that parts handed out at one time are disjoint is
// what callers of `part` promise.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above; `Shared` itself is never written.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(super) fn new(slice: &'a mut [f32]) -> Shared<'a> {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// Where the part of `len` elements from `at` on begins.
    pub(super) fn start_of(&self, at: usize, len: usize) -> *mut f32 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "a part lies inside its buffer");
        // SAFETY: in bounds, as asserted.
        unsafe { self.start.add(at) }
    }

    /// The part of `len` elements from `at` on.
    ///
    /// # Safety
    /// No two parts that are alive at one time overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, at: usize, len: usize) -> &mut [f32] {
        // SAFETY: in bounds (checked in `start_of`), borrowed exclusively by `self`, and disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start_of(at, len), len) }
    }
}
