//! The reader's side.

use crate::greeting::{hear, say};
use crate::{Memory, check_user};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Goes through the door of that name: the stream to talk to the node on, and its arena. The node is lent `memory` to copy
/// from. Must be called inside a tokio runtime; waits for the node as long as it takes.
pub async fn attach(name: &str, memory: Option<&Memory>) -> io::Result<(UnixStream, Arc<Window>)> {
    // A door at which too many wait is no door, and nothing to wait for.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let stream = UnixStream::from_std(socket.into())?;
    check_user(&stream)?;
    let (size, descriptors) = hear(&stream).await?;
    let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let [arena, tenure]: [OwnedFd; 2] =
        descriptors.try_into().map_err(|_| invalid("the node's greeting has not two descriptors"))?;
    let len = usize::try_from(size).map_err(|_| invalid("size of the node's arena"))?;
    // Memory behind the end of the file would be fatal to touch.
    let file_bytes = rustix::fs::fstat(&arena)?.st_size;
    if len == 0 || u64::try_from(file_bytes).is_ok_and(|bytes| bytes < len as u64) {
        return Err(invalid("size of the node's arena"));
    }
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &arena, 0) }?;
    let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let window = Arc::new(Window { start, len, memory: Backing::Mapped(tenure) });
    if let Some(memory) = memory {
        say(&stream, memory.span().1 as u64, &[memory.file()]).await?;
    }
    Ok((stream, window))
}

/// A node's arena, for reading.
pub struct Window {
    start: NonNull<u8>,
    len: usize,
    memory: Backing,
}

/// Whose memory it is.
enum Backing {
    /// Another process's, and the tenure; closed after the mapping is gone, which `drop` sees to.
    Mapped(#[expect(dead_code, reason = "held until it is dropped")] OwnedFd),
    /// This process's, and what keeps it.
    Lent(#[expect(dead_code, reason = "held until it is dropped")] Box<dyn Send + Sync>),
}

// SAFETY: it is memory that any thread may read, and `Held` says when.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Drop for Window {
    fn drop(&mut self) {
        if let Backing::Mapped(_) = self.memory {
            // SAFETY: exactly what was mapped; every `Held` has its window, so nobody looks any more.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("len", &self.len).finish()
    }
}

impl Window {
    /// A window onto memory of this process, which `keeper` keeps; it is dropped with the window. For simulations.
    ///
    /// # Safety
    /// The `len` bytes from `start` on are initialised and stay where they are until `keeper` is dropped.
    #[doc(hidden)]
    pub unsafe fn onto(start: NonNull<u8>, len: usize, keeper: Box<dyn Send + Sync>) -> Arc<Window> {
        Arc::new(Window { start, len, memory: Backing::Lent(keeper) })
    }

    /// Bytes of the arena.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: an arena has bytes.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes that the node holds for this reader, until `release` is called when they are dropped. `None` if the arena has
    /// no such bytes.
    ///
    /// The node vouches that nothing changes in them while it holds them.
    pub fn hold(
        self: &Arc<Self>,
        offset: u64,
        len: usize,
        release: impl FnOnce() + Send + Sync + 'static,
    ) -> Option<Held> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Held { window: self.clone(), offset, len, release: Some(Box::new(release)) })
    }
}

/// Bytes of a node's arena, in place.
pub struct Held {
    window: Arc<Window>,
    offset: usize,
    len: usize,
    release: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Deref for Held {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: offset + len <= length of the mapping (see `hold`), which the window keeps. Nobody writes there while the
        // node holds the bytes: that is what it promised, and it is not told otherwise before this is dropped.
        unsafe { std::slice::from_raw_parts(self.window.start.add(self.offset).as_ptr(), self.len) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("offset", &self.offset).field("len", &self.len).finish()
    }
}
