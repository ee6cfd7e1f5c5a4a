//! Open clients, buffers and leases, and forks of the process.
//!
//! Invariants:
//! - A handle is a number that is never used again, so a closed handle stays invalid.
//! - No call waits, and nothing is destroyed, under the lock of the table.
//! - A fork happens under that lock, so the child finds a whole table.

use crate::call::{Failure, Result};
use crate::types::{LarderBuffer, LarderClient, LarderLease, LarderMemory, LarderStatus};
use larder_bindings::{PerProcess, Session};
use larder_client::{Client, Lease};
use larder_format::NamespaceDescriptor;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of open handles of each kind.
const OPEN_MAX: usize = 1 << 16;

/// Memory of a client, which stays until no transfer uses it.
pub(crate) struct OpenBuffer {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    memory: PerProcess<Mutex<larder_client::Buffer>>,
}

struct Table {
    next_id: u64,
    clients: BTreeMap<u64, Session>,
    buffers: BTreeMap<u64, Arc<OpenBuffer>>,
    /// Handle of the buffer that begins at an address.
    buffers_by_start: BTreeMap<usize, u64>,
    leases: BTreeMap<u64, PerProcess<Lease>>,
}

/// Uses a lock of the standard library, like `larder_bindings`.
static TABLE: Mutex<Table> = Mutex::new(Table {
    next_id: 1,
    clients: BTreeMap::new(),
    buffers: BTreeMap::new(),
    buffers_by_start: BTreeMap::new(),
    leases: BTreeMap::new(),
});

thread_local! {
    /// The lock, while this thread forks.
    static FORKING: RefCell<Option<ManuallyDrop<MutexGuard<'static, Table>>>> = const { RefCell::new(None) };
}

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn next_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}

extern "C" fn before_fork() {
    let _ = FORKING.try_with(|forking| {
        forking.borrow_mut().get_or_insert_with(|| ManuallyDrop::new(table()));
    });
    larder_bindings::before_fork();
}

extern "C" fn after_fork_in_parent() {
    larder_bindings::after_fork_in_parent();
    let _ = FORKING.try_with(|forking| drop(forking.take().map(ManuallyDrop::into_inner)));
}

extern "C" fn after_fork_in_child() {
    // SAFETY: the table gives out clients, buffers and leases of this process only.
    unsafe { larder_bindings::after_fork_in_child() };
    let _ = FORKING.try_with(|forking| drop(forking.take().map(ManuallyDrop::into_inner)));
}

fn watch_forks() -> Result<()> {
    // No lock: a fork while another thread is here would leave it locked in the child. Handlers
    // that are registered twice do their work once.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.load(Ordering::Acquire) {
        return Ok(());
    }
    // SAFETY: the functions stay loaded: the shared library cannot be unloaded.
    let refused =
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
    if refused != 0 {
        return Err(Failure::exhausted("pthread_atfork has no memory"));
    }
    WATCHED.store(true, Ordering::Release);
    Ok(())
}

fn not_open(kind: &str) -> Failure {
    Failure { status: LarderStatus::InvalidHandle, text: format!("the {kind} is not open") }
}

fn check_room(open: usize, kind: &str) -> Result<()> {
    if open >= OPEN_MAX {
        return Err(Failure::exhausted(format!("{open} {kind}s are open: close some")));
    }
    Ok(())
}

/// Attaches under the lock that a fork takes, so that no child inherits half a client.
pub(crate) fn open_client(attach: impl FnOnce() -> std::io::Result<Session>) -> Result<LarderClient> {
    watch_forks()?;
    let mut table = table();
    check_room(table.clients.len(), "client")?;
    let session = attach()?;
    let id = table.next_id();
    table.clients.insert(id, session);
    Ok(LarderClient { id })
}

pub(crate) fn close_client(client: LarderClient) -> Result<()> {
    // In a statement of its own: the destructor must not run under the lock.
    let session = table().clients.remove(&client.id);
    session.map(drop).ok_or_else(|| not_open("client"))
}

/// The client of this process, and its namespace.
pub(crate) fn attached(client: LarderClient) -> Result<(Client, NamespaceDescriptor)> {
    let mut table = table();
    let session = table.clients.get_mut(&client.id).ok_or_else(|| not_open("client"))?;
    Ok((session.attached()?, session.namespace().clone()))
}

pub(crate) fn open_buffer(client: &Client, bytes: usize) -> Result<(LarderBuffer, LarderMemory, bool)> {
    let mut buffer = client.buffer(bytes);
    let (data, is_shared) = (buffer.as_mut_ptr(), buffer.is_shared());
    let start = data.expose_provenance();
    let open = Arc::new(OpenBuffer { start, bytes, memory: PerProcess::new(Mutex::new(buffer)) });
    let mut table = table();
    check_room(table.buffers.len(), "buffer")?;
    let id = table.next_id();
    table.buffers.insert(id, open);
    table.buffers_by_start.insert(start, id);
    Ok((LarderBuffer { id }, LarderMemory { data, size: bytes }, is_shared))
}

pub(crate) fn close_buffer(buffer: LarderBuffer) -> Result<()> {
    let mut table = table();
    let closed = table.buffers.remove(&buffer.id).ok_or_else(|| not_open("buffer"))?;
    table.buffers_by_start.remove(&closed.start);
    drop(table);
    Ok(())
}

/// The open buffer in which the memory lies, or `None` for other memory. Fails for memory that
/// begins in a buffer and leaves it, and for a buffer of the parent, whose memory both processes
/// share.
pub(crate) fn buffer_of(memory: LarderMemory) -> Result<Option<Arc<OpenBuffer>>> {
    let start = memory.data.addr();
    let table = table();
    let found = table.buffers_by_start.range(..=start).next_back().and_then(|(_, id)| table.buffers.get(id));
    let Some(buffer) = found.filter(|buffer| start < buffer.start + buffer.bytes) else { return Ok(None) };
    if buffer.memory.get().is_none() {
        let text = "the memory belongs to a buffer of the process that forked this one".into();
        return Err(Failure { status: LarderStatus::Forked, text });
    }
    if memory.size > buffer.start + buffer.bytes - start {
        return Err(Failure::invalid("the memory begins in a buffer and leaves it"));
    }
    Ok(Some(buffer.clone()))
}

pub(crate) fn open_lease(lease: Lease) -> Result<LarderLease> {
    let lease = PerProcess::new(lease);
    let mut table = table();
    check_room(table.leases.len(), "lease")?;
    let id = table.next_id();
    table.leases.insert(id, lease);
    Ok(LarderLease { id })
}

pub(crate) fn release_lease(lease: LarderLease) -> Result<()> {
    let released = table().leases.remove(&lease.id);
    released.map(drop).ok_or_else(|| not_open("lease"))
}
