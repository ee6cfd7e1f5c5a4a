//! The client's own memory, which nodes can be told places in, and buffers that lie in it.
//!
//! Always true: a buffer is this caller's alone until it is dropped, or, once frozen, until its last `Bytes` is.

use bytes::Bytes;
use larder_share::{Block, Memory};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Memory of `bytes` bytes; `None` for 0, and if the machine gives none: buffers are plain memory then.
pub(crate) fn map(bytes: usize) -> Option<Arc<Memory>> {
    if bytes == 0 {
        return None;
    }
    let mapped = Memory::new(bytes);
    mapped.inspect_err(|error| tracing::warn!(%error, bytes, "no memory that nodes can be told of")).ok()
}

/// Bytes to put pages from, or to get them into: [`Client::buffer`](crate::Client::buffer).
#[derive(Debug)]
pub struct Buffer {
    bytes: Kind,
}

#[derive(Debug)]
enum Kind {
    Shown(Block),
    /// So many bytes, which a device is reading into.
    Away(usize),
    Plain(Vec<u8>),
}

impl Buffer {
    pub(crate) fn new(memory: Option<&Arc<Memory>>, bytes: usize) -> Buffer {
        let block = memory.and_then(|memory| memory.allocate(bytes));
        Buffer { bytes: block.map_or_else(|| Kind::Plain(vec![0; bytes]), Kind::Shown) }
    }

    /// The bytes as they are now, to be put, as a whole or in slices. Their memory goes back when the last of them is dropped.
    pub fn freeze(self) -> Bytes {
        match self.bytes {
            Kind::Shown(block) => Bytes::from_owner(Shown(block)),
            Kind::Plain(bytes) => bytes.into(),
            Kind::Away(len) => vec![0; len].into(),
        }
    }

    /// Takes its memory out, for a device to read into; `None` if it is of the other kind. Until it is given back, or replaced, the
    /// buffer has no bytes.
    pub(crate) fn take(&mut self) -> Option<Block> {
        let away = match &self.bytes {
            Kind::Shown(block) => Kind::Away(block.len()),
            Kind::Plain(_) | Kind::Away(_) => return None,
        };
        match std::mem::replace(&mut self.bytes, away) {
            Kind::Shown(block) => Some(block),
            Kind::Plain(_) | Kind::Away(_) => None,
        }
    }

    /// Gives memory back that was taken out. A buffer whose memory was not takes none.
    pub(crate) fn restore(&mut self, block: Block) {
        if let Kind::Away(_) = self.bytes {
            self.bytes = Kind::Shown(block);
        }
    }

    /// Whether its memory was taken out.
    pub(crate) fn is_away(&self) -> bool {
        matches!(self.bytes, Kind::Away(_))
    }

    /// Puts plain memory in the place of what does not come back.
    pub(crate) fn replace(&mut self) {
        if let Kind::Away(len) = self.bytes {
            self.bytes = Kind::Plain(vec![0; len]);
        }
    }

    /// Whether nodes on this machine can be told where it lies.
    pub fn is_shown(&self) -> bool {
        matches!(self.bytes, Kind::Shown(_))
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Kind::Shown(block) => block,
            Kind::Plain(bytes) => bytes,
            Kind::Away(_) => &[],
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            Kind::Shown(block) => block,
            Kind::Plain(bytes) => bytes,
            Kind::Away(_) => &mut [],
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

/// What a frozen buffer's `Bytes` own.
struct Shown(Block);

impl AsRef<[u8]> for Shown {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_lie_in_the_memory_while_there_is_some_and_elsewhere_after() {
        let memory = map(1 << 20).unwrap();
        let mut first = Buffer::new(Some(&memory), 600_000);
        let mut second = Buffer::new(Some(&memory), 600_000);
        assert!(first.is_shown() && !second.is_shown() && !Buffer::new(None, 5).is_shown());
        first.fill(1);
        second.fill(2);
        let (first, second) = (first.freeze(), second.freeze());
        assert!(first.iter().all(|&byte| byte == 1) && second.iter().all(|&byte| byte == 2));
        let part = first.slice(70_000..80_000);
        assert_eq!(memory.offset_of(&part), memory.offset_of(&first).map(|start| start + 70_000));
        assert!(memory.offset_of(&part).is_some() && memory.offset_of(&second).is_none());
        drop(first);
        assert!(memory.used() >= 600_000, "a slice keeps it");
        drop(part);
        assert_eq!(memory.used(), 0);
        assert!(map(0).is_none());
    }
}
