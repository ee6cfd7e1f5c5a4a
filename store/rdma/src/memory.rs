//! Memory, as values that own it.
//!
//! A device writes and reads behind the compiler's back, so what it may touch is said by ownership: [`Memory`] is what gets
//! registered, once and as a whole; [`Bytes`] and [`BytesMut`] are handles to some bytes of it, which a transfer or a window takes
//! and gives back when no device can touch them any more. For an arena that cuts slots from one mapping (the feature `arena` brings
//! this for `larder_device`):
//!
//! ```
//! use larder_device::{Arena, Slot, SlotMut};
//! use larder_rdma::{Bytes, BytesMut, Memory, Span};
//! use std::{ptr::NonNull, sync::Arc};
//!
//! struct Whole { arena: Arc<Arena>, start: Span }
//! // SAFETY: an arena is one mapping, which stays where it is while the `Arc` lives.
//! unsafe impl Memory for Whole {
//!     fn span(&self) -> Span {
//!         Span::new(self.start.start(), self.arena.capacity())
//!     }
//! }
//!
//! struct Shared(Slot);
//! // SAFETY: nobody writes to a `Slot`, and its memory is its own while it lives.
//! unsafe impl Bytes for Shared {
//!     fn span(&self) -> Span {
//!         Span::of(&self.0)
//!     }
//! }
//!
//! struct Exclusive(SlotMut);
//! // SAFETY: a `SlotMut` is the only way to its memory, and nobody borrows it while this crate owns it.
//! unsafe impl Bytes for Exclusive {
//!     fn span(&self) -> Span {
//!         Span::of(&self.0)
//!     }
//! }
//! // SAFETY: as above.
//! unsafe impl BytesMut for Exclusive {}
//! # let arena = Arena::new(1 << 20).unwrap();
//! # let mut slot = arena.allocate(5000).unwrap();
//! # assert_eq!(slot.arena_offset(), 0);
//! # let start = Span::of(&slot);
//! # let whole = Whole { arena, start };
//! # assert_eq!((whole.span().len(), Exclusive(slot).span().len()), (1 << 20, 5000));
//! ```

use std::ptr::NonNull;

/// Where bytes lie. An address, and no right to touch what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length, which anyone may know.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// `len` bytes from `start`.
    pub fn new(start: NonNull<u8>, len: usize) -> Span {
        Span { start, len }
    }

    /// Where these bytes lie.
    pub fn of(bytes: &[u8]) -> Span {
        Span { start: NonNull::from(bytes).cast(), len: bytes.len() }
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }
}

/// Memory that can be registered: one run of mapped, readable and writable bytes.
///
/// # Safety
/// `span` always answers the same, and what it answers stays mapped as long as the value lives.
pub unsafe trait Memory: Send + Sync + 'static {
    /// Where it lies.
    fn span(&self) -> Span;
}

/// Bytes that a device may read.
///
/// # Safety
/// `span` answers the same wherever the value is moved to. While the value lives and is not borrowed, the bytes are mapped and
/// initialised, and nobody writes to them. The memory is not used for anything else before the value is dropped.
pub unsafe trait Bytes: Send + Sync + 'static {
    /// Where they lie.
    fn span(&self) -> Span;
}

/// Bytes that a device may write to.
///
/// # Safety
/// As for [`Bytes`]; and while the value lives and is not borrowed, nobody reads the bytes either, nor holds a reference into them.
pub unsafe trait BytesMut: Bytes {}

// SAFETY: nobody writes to them, and they stay where they are while a handle lives.
unsafe impl Bytes for bytes::Bytes {
    fn span(&self) -> Span {
        Span::of(self)
    }
}

/// Bytes, and something that is kept as long as they are.
#[derive(Debug)]
pub struct Kept<B, K> {
    /// The bytes.
    pub bytes: B,
    /// What is kept with them. Dropped after them.
    pub keeper: K,
}

// SAFETY: the bytes vouch for themselves.
unsafe impl<B: Bytes, K: Send + Sync + 'static> Bytes for Kept<B, K> {
    fn span(&self) -> Span {
        self.bytes.span()
    }
}
// SAFETY: as above.
unsafe impl<B: BytesMut, K: Send + Sync + 'static> BytesMut for Kept<B, K> {}
