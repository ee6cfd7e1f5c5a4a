//! Memory that a device accesses by itself, as values that own it.
//!
//! A device reads and writes behind the compiler's back. Ownership therefore states what it may
//! touch:
//!
//! - [`DmaMemory`] is registered with a device, once and as a whole.
//! - [`DmaBuf`] and [`DmaBufMut`] own some bytes of it. A transfer or a remote grant takes such a
//!   value and returns it when no device can touch the bytes any more.
//!
//! [`Arena`](crate::Arena), [`SlotSlice`](crate::SlotSlice) and [`SlotPartMut`](crate::SlotPartMut)
//! implement these traits for a node, [`SharedMemory`](crate::share::SharedMemory) for a client.
//!
//! ```
//! use larder_memory::span::{DmaBuf, DmaBufMut, Span};
//! use larder_memory::{Arena, SlotMut};
//!
//! struct Exclusive(SlotMut);
//! // SAFETY: a `SlotMut` is the only access to its memory, and moving it does not move the bytes.
//! unsafe impl DmaBuf for Exclusive {
//!     fn span(&self) -> Span {
//!         Span::of(&self.0)
//!     }
//! }
//! // SAFETY: as above.
//! unsafe impl DmaBufMut for Exclusive {}
//! # let slot = Arena::new(1 << 20).unwrap().allocate(5000).unwrap();
//! # assert_eq!(Exclusive(slot).span().len(), 5000);
//! ```

use std::ptr::NonNull;

/// Address and length of some bytes. It gives no right to access them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length are plain values. Nothing is accessed through them without
// further `unsafe`.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub fn new(start: NonNull<u8>, len: usize) -> Span {
        Span { start, len }
    }

    /// Returns the span of a slice.
    pub fn of(bytes: &[u8]) -> Span {
        Span { start: NonNull::from(bytes).cast(), len: bytes.len() }
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte as a number, as devices and peers use it.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }
}

/// Memory that can be registered with a device: one run of mapped, readable and writable bytes.
///
/// # Safety
/// `span` always returns the same value, and those bytes stay mapped while the implementing value
/// lives.
pub unsafe trait DmaMemory: Send + Sync + 'static {
    fn span(&self) -> Span;
}

/// Bytes that a device may read.
///
/// # Safety
/// `span` returns the same value wherever the implementing value is moved. While it lives and is
/// not borrowed, the bytes are mapped, initialized and not written. The memory is not reused before
/// it is dropped.
pub unsafe trait DmaBuf: Send + Sync + 'static {
    fn span(&self) -> Span;
}

/// Bytes that a device may write.
///
/// # Safety
/// As for [`DmaBuf`]. While the value lives and is not borrowed, nothing else reads the bytes or
/// holds a reference into them.
pub unsafe trait DmaBufMut: DmaBuf {}

// SAFETY: `Bytes` is immutable, and its buffer neither moves nor is freed while a handle lives.
unsafe impl DmaBuf for bytes::Bytes {
    fn span(&self) -> Span {
        Span::of(self)
    }
}

/// Bytes together with a guard, such as a lease or a permit, that must live as long as the bytes.
#[derive(Debug)]
pub struct Guarded<B, K> {
    /// The bytes, dropped before the guard.
    pub bytes: B,
    /// The value that is kept alive.
    pub guard: K,
}

// SAFETY: `bytes` guarantees what the trait demands; the guard only lives longer.
unsafe impl<B: DmaBuf, K: Send + Sync + 'static> DmaBuf for Guarded<B, K> {
    fn span(&self) -> Span {
        self.bytes.span()
    }
}
// SAFETY: as above.
unsafe impl<B: DmaBufMut, K: Send + Sync + 'static> DmaBufMut for Guarded<B, K> {}
