//! A slice that several threads write at once, each in its own range.

use std::marker::PhantomData;

/// Mutable slice from which threads borrow disjoint ranges. The caller guarantees that they are
/// disjoint.
pub(super) struct DisjointSlice<'a> {
    start: *mut f32,
    len: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer stands for an exclusive borrow of plain numbers. Callers of `range_mut`
// guarantee that ranges borrowed at the same time are disjoint.
unsafe impl Send for DisjointSlice<'_> {}
// SAFETY: as for `Send`. The struct itself is never written after construction.
unsafe impl Sync for DisjointSlice<'_> {}

impl<'a> DisjointSlice<'a> {
    pub(super) fn new(slice: &'a mut [f32]) -> DisjointSlice<'a> {
        DisjointSlice { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// Pointer to the range of `len` elements that starts at `at`. Panics if the range leaves the
    /// slice.
    pub(super) fn range_ptr(&self, at: usize, len: usize) -> *mut f32 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "the range lies inside the slice");
        // SAFETY: the assertion keeps the offset inside the slice.
        unsafe { self.start.add(at) }
    }

    /// Borrows the range of `len` elements that starts at `at`. Panics if the range leaves the
    /// slice.
    ///
    /// # Safety
    /// Ranges that are borrowed at the same time must not overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn range_mut(&self, at: usize, len: usize) -> &mut [f32] {
        // SAFETY: `range_ptr` checks the bounds, `self` holds the exclusive borrow, and the caller
        // guarantees disjoint ranges.
        unsafe { std::slice::from_raw_parts_mut(self.range_ptr(at, len), len) }
    }
}
