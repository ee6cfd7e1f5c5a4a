//! The reader's side: a read-only mapping of a node's arena.
//!
//! Invariants:
//! - The mapping lives as long as any [`HeldBytes`] of it.
//! - The session closes after the mapping is gone, so the node never reuses memory that is still
//!   visible here.

use super::handshake::{receive_listed, send};
use super::session_files::{ExpectedFiles, SessionFiles};
use super::{SharedMemory, between_forks, check_user};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Connects to the listener of that name and maps the node's arena. Returns the stream for requests
/// and the mapping. If `memory` is given, the node may copy from it.
///
/// Must be called inside a tokio runtime. Waits for the node without a limit: the caller sets the
/// deadline.
pub async fn attach(name: &str, memory: Option<&SharedMemory>) -> io::Result<(UnixStream, Arc<ArenaMap>)> {
    // Non-blocking: a listener whose backlog is full fails at once instead of blocking a runtime
    // thread.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = between_forks(|descriptors| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        descriptors.list(&socket).map(|()| socket)
    })?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let stream = UnixStream::from_std(socket.into())?;
    check_user(&stream)?;
    let (size, descriptors) = receive_listed(&stream).await?;
    let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let [arena, session]: [OwnedFd; 2] =
        descriptors.try_into().map_err(|_| invalid("the node's handshake does not carry two descriptors"))?;
    let len = usize::try_from(size).map_err(|_| invalid("the size of the node's arena is wrong"))?;
    // Touching a mapping behind the end of its file raises SIGBUS, so the length is checked before
    // mapping.
    let file_bytes = rustix::fs::fstat(&arena)?.st_size;
    if len == 0 || u64::try_from(file_bytes).is_ok_and(|bytes| bytes < len as u64) {
        return Err(invalid("the size of the node's arena is wrong"));
    }
    // A forked child closes the session, so it must not see the memory either.
    let start = between_forks(|_| {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &arena, 0) }?;
        // SAFETY: the mapping that was just made. The advice changes only what a fork copies.
        unsafe { madvise(start, len, Advice::LinuxDontFork) }.map(|()| start)
    })?;
    let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let map = Arc::new(ArenaMap { start, len, memory: Backing::Mapped(SessionFiles::new(session)) });
    if let Some(memory) = memory {
        send(&stream, memory.span().1 as u64, &[memory.file()]).await?;
    }
    Ok((stream, map))
}

/// A node's arena, mapped for reading. The mapping lasts until the last [`HeldBytes`] from it is
/// dropped.
pub struct ArenaMap {
    start: NonNull<u8>,
    len: usize,
    memory: Backing,
}

/// Owner of the mapped memory.
enum Backing {
    /// Another process. The descriptor is the session; it closes after `drop` has removed the
    /// mapping.
    Mapped(SessionFiles),
    /// This process, and the value that keeps the memory. For simulations.
    Local(#[expect(dead_code, reason = "held until it is dropped")] Box<dyn Send + Sync>),
}

// SAFETY: the memory may be read by any thread; `HeldBytes` decides when.
unsafe impl Send for ArenaMap {}
// SAFETY: as above.
unsafe impl Sync for ArenaMap {}

impl Drop for ArenaMap {
    fn drop(&mut self) {
        if let Backing::Mapped(..) = self.memory {
            // SAFETY: exactly the mapping made by `attach`. Every `HeldBytes` holds the map, so no
            // reference is left.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

impl std::fmt::Debug for ArenaMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArenaMap").field("len", &self.len).finish()
    }
}

impl ArenaMap {
    /// Wraps memory of this process, which `owner` keeps until the map is dropped. For
    /// simulations.
    ///
    /// # Safety
    /// The `len` bytes from `start` are initialized and do not move until `owner` is dropped.
    #[doc(hidden)]
    pub unsafe fn from_local(start: NonNull<u8>, len: usize, owner: Box<dyn Send + Sync>) -> Arc<ArenaMap> {
        Arc::new(ArenaMap { start, len, memory: Backing::Local(owner) })
    }

    /// Begins to collect the files that the node sends under this number. Call it before the
    /// request that asks for them. `None` if the map has no session.
    pub fn expect_files(self: &Arc<Self>, number: u64) -> Option<ExpectedFiles> {
        ExpectedFiles::begin(self.clone(), number)
    }

    pub(super) fn session_files(&self) -> Option<&SessionFiles> {
        match &self.memory {
            Backing::Mapped(session) => Some(session),
            Backing::Local(_) => None,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Always returns `false`: an arena has at least one unit.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns bytes that the node holds for this reader. Dropping them calls `release`, which must
    /// tell the node. Returns `None` if the arena is shorter.
    ///
    /// The node guarantees that the bytes do not change while it holds them.
    pub fn hold(
        self: &Arc<Self>,
        offset: u64,
        len: usize,
        release: impl FnOnce() + Send + Sync + 'static,
    ) -> Option<HeldBytes> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| HeldBytes { map: self.clone(), offset, len, release: Some(Box::new(release)) })
    }
}

/// Bytes of a node's arena, read in place while the node holds them. Dropping the value calls
/// `release` once.
pub struct HeldBytes {
    map: Arc<ArenaMap>,
    offset: usize,
    len: usize,
    release: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Deref for HeldBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: offset + len <= length of the mapping (see `hold`), which `map` keeps. The node
        // does not write these bytes while it holds them, and it is told to stop holding them only
        // when this value is dropped.
        unsafe { std::slice::from_raw_parts(self.map.start.add(self.offset).as_ptr(), self.len) }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}

impl std::fmt::Debug for HeldBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldBytes").field("offset", &self.offset).field("len", &self.len).finish()
    }
}
