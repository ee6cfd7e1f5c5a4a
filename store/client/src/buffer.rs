//! Memory that pages are put from and read into.
//!
//! [`Buffer`] is memory of the client that nodes on this machine and RDMA devices can reach.
//! [`PageBuffer`] hides the type of a caller's buffer, so that connections can receive into it.
//!
//! Invariant: a buffer is its owner's alone until it is dropped, or, once frozen, until its last
//! `Bytes` is dropped.

use bytes::Bytes;
use larder_memory::share::{SharedBlock, SharedMemory};
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Maps `bytes` bytes of shared memory. Returns `None` for 0, and if the machine refuses: buffers
/// are then plain memory.
pub(crate) fn map_shared_memory(bytes: usize) -> Option<Arc<SharedMemory>> {
    if bytes == 0 {
        return None;
    }
    let mapped = SharedMemory::new(bytes);
    let warn = |error: &_| {
        tracing::warn!(%error, bytes, "cannot map shared client memory; puts to nodes on this machine copy once more");
    };
    mapped.inspect_err(warn).ok()
}

/// Memory to put pages from, or to read them into. [`Client::buffer`](crate::Client::buffer) makes
/// one.
///
/// A buffer is usually a block of the client's shared memory, of
/// [`ClientOptions::memory_bytes`](crate::ClientOptions::memory_bytes) bytes in total. A node on
/// the same machine copies a put directly from there, and an RDMA device transfers without a bounce
/// buffer. When that memory is used up, a buffer is ordinary heap memory, which costs one more
/// copy.
#[derive(Debug)]
pub struct Buffer {
    memory: BufferMemory,
}

#[derive(Debug)]
enum BufferMemory {
    Shared(SharedBlock),
    /// An RDMA read owns the block. The number is its length in bytes.
    Detached(usize),
    Heap(Vec<u8>),
}

impl Buffer {
    pub(crate) fn new(memory: Option<&Arc<SharedMemory>>, bytes: usize) -> Buffer {
        let block = memory.and_then(|memory| memory.allocate(bytes));
        Buffer { memory: block.map_or_else(|| BufferMemory::Heap(vec![0; bytes]), BufferMemory::Shared) }
    }

    /// Turns the buffer into immutable bytes without copying them. A put takes these as a whole or
    /// in slices. The memory is free again when the last slice is dropped.
    pub fn freeze(self) -> Bytes {
        match self.memory {
            BufferMemory::Shared(block) => Bytes::from_owner(SharedBytes(block)),
            BufferMemory::Heap(bytes) => bytes.into(),
            BufferMemory::Detached(len) => vec![0; len].into(),
        }
    }

    /// Takes the shared block out, for a device to read into. `None` for heap memory. The buffer is
    /// empty until the block is restored or replaced.
    pub(crate) fn take_block(&mut self) -> Option<SharedBlock> {
        let detached = match &self.memory {
            BufferMemory::Shared(block) => BufferMemory::Detached(block.len()),
            BufferMemory::Heap(_) | BufferMemory::Detached(_) => return None,
        };
        match std::mem::replace(&mut self.memory, detached) {
            BufferMemory::Shared(block) => Some(block),
            BufferMemory::Heap(_) | BufferMemory::Detached(_) => None,
        }
    }

    pub(crate) fn restore_block(&mut self, block: SharedBlock) {
        if let BufferMemory::Detached(_) = self.memory {
            self.memory = BufferMemory::Shared(block);
        }
    }

    pub(crate) fn is_detached(&self) -> bool {
        matches!(self.memory, BufferMemory::Detached(_))
    }

    /// Substitutes zeroed heap memory for a block that does not return.
    pub(crate) fn replace_block(&mut self) {
        if let BufferMemory::Detached(len) = self.memory {
            self.memory = BufferMemory::Heap(vec![0; len]);
        }
    }

    /// Returns `true` if the buffer is a block of shared memory, so that a node on this machine can
    /// copy from it. `false` means heap memory.
    pub fn is_shared(&self) -> bool {
        matches!(self.memory, BufferMemory::Shared(_))
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.memory {
            BufferMemory::Shared(block) => block,
            BufferMemory::Heap(bytes) => bytes,
            BufferMemory::Detached(_) => &[],
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            BufferMemory::Shared(block) => block,
            BufferMemory::Heap(bytes) => bytes,
            BufferMemory::Detached(_) => &mut [],
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

struct SharedBytes(SharedBlock);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A caller's buffer of any type, which receives a page.
pub(crate) trait PageBuffer: Send + 'static {
    fn bytes(&mut self) -> &mut [u8];
    /// The buffer as a [`Buffer`], if it is one: RDMA can then read directly into it.
    fn as_client_buffer(&mut self) -> Option<&mut Buffer>;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<B: AsMut<[u8]> + Send + 'static> PageBuffer for B {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_mut()
    }

    fn as_client_buffer(&mut self) -> Option<&mut Buffer> {
        (self as &mut dyn Any).downcast_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(crate) type DynBuffer = Box<dyn PageBuffer>;

/// Returns the buffer with the type that the caller gave.
pub(crate) fn downcast<B: 'static>(buffer: DynBuffer) -> B {
    *buffer.into_any().downcast().expect("all buffers of a request have the type that the caller gave")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_fall_back_to_heap_when_shared_memory_is_used_up() {
        let memory = map_shared_memory(1 << 20).unwrap();
        let mut first = Buffer::new(Some(&memory), 600_000);
        let mut second = Buffer::new(Some(&memory), 600_000);
        assert!(first.is_shared() && !second.is_shared() && !Buffer::new(None, 5).is_shared());
        first.fill(1);
        second.fill(2);
        let first = first.freeze();
        let second = second.freeze();
        assert!(first.iter().all(|&byte| byte == 1) && second.iter().all(|&byte| byte == 2));
        let part = first.slice(70_000..80_000);
        assert_eq!(memory.offset_of(&part), memory.offset_of(&first).map(|start| start + 70_000));
        assert!(memory.offset_of(&part).is_some() && memory.offset_of(&second).is_none());
        drop(first);
        assert!(memory.used() >= 600_000, "a slice keeps the block");
        drop(part);
        assert_eq!(memory.used(), 0);
        assert!(map_shared_memory(0).is_none());
    }
}
