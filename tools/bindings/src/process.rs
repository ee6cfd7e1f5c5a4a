//! The runtime of this process, and what a fork does to it.
//!
//! A fork copies memory and descriptors, but no thread except the one that forks. So in the child
//! the parent's runtime and connections exist as memory only.
//!
//! Invariants:
//! - A child uses no runtime and no connection of its parent. It makes its own at first use.
//! - A child runs no destructor of the parent's client: the locks may be held by threads that do
//!   not exist there. It closes the inherited sockets, so that a parent that dies ends its
//!   connections although the child lives on.
//! - No thread has the lock of this module while another one forks. Python's GIL sees to this; a
//!   program without such a lock calls [`before_fork`].

use std::cell::RefCell;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::runtime::{Builder, Runtime};

/// Threads of the runtime. They receive, verify and copy pages.
const WORKER_THREADS_MAX: usize = 4;

/// Runtime, and the process that made it.
type Current = Option<(u32, &'static Runtime)>;

/// Uses a lock of the standard library. Its whole state is in this place, so the child can release
/// it: docs/decisions/0067-locks-and-forks.md.
static RUNTIME: Mutex<Current> = Mutex::new(None);

thread_local! {
    /// The lock, while this thread forks. Without a destructor, so that it exists until the end of
    /// the thread.
    static FORKING: RefCell<Option<ManuallyDrop<MutexGuard<'static, Current>>>> = const { RefCell::new(None) };
}

fn lock() -> MutexGuard<'static, Current> {
    RUNTIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime of this process. It is never dropped: its threads may hold memory of the caller, and
/// end with the process. Fails if the machine refuses its threads.
pub fn runtime() -> io::Result<&'static Runtime> {
    let pid = std::process::id();
    let mut current = lock();
    if let Some((owner, runtime)) = *current
        && owner == pid
    {
        return Ok(runtime);
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(WORKER_THREADS_MAX));
    let runtime = Builder::new_multi_thread().worker_threads(threads).thread_name("larder-kv").enable_all().build()?;
    let runtime: &'static Runtime = Box::leak(Box::new(runtime));
    *current = Some((pid, runtime));
    Ok(runtime)
}

/// A value that only the process that made it may use. Another process leaks it.
pub struct PerProcess<T> {
    pid: u32,
    value: ManuallyDrop<T>,
}

impl<T> PerProcess<T> {
    pub fn new(value: T) -> Self {
        PerProcess { pid: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// The value, or `None` in a child of the process that made it.
    pub fn get(&self) -> Option<&T> {
        (self.pid == std::process::id()).then(|| &*self.value)
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        // Destructors of the client send messages, for which they may need a task.
        let _context = runtime().ok().map(Runtime::enter);
        // SAFETY: the value is dropped here only, once.
        unsafe { ManuallyDrop::drop(&mut self.value) };
    }
}

/// Runs in the thread that forks, just before, in programs whose threads call without a common
/// lock. Waits until no thread starts the runtime or opens a connection.
pub fn before_fork() {
    FORKING.with_borrow_mut(|forking| {
        forking.get_or_insert_with(|| ManuallyDrop::new(lock()));
    });
    larder_client::before_fork();
}

/// Runs in the thread that has forked, in the parent. Also runs after a fork that failed.
pub fn after_fork_in_parent() {
    larder_client::after_fork_in_parent();
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}

/// Runs in the child. Closes the parent's connections.
///
/// # Safety
/// The process is a forked child in which no client exists yet. It uses the clients of its parent
/// through [`PerProcess`] only.
pub unsafe fn after_fork_in_child() {
    // SAFETY: the caller's promise.
    unsafe { larder_client::after_fork_in_child() };
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}
