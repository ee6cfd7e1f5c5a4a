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
//! - The locks of this module are taken with the GIL only, and released before it. A fork by the
//!   interpreter therefore never finds one taken.

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use tokio::runtime::{Builder, Runtime};

/// Threads of the runtime. They receive, verify and copy pages.
const WORKER_THREADS_MAX: usize = 4;

static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// The runtime of this process. It is never dropped: its threads may hold memory of Python objects,
/// and end with the process.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    let pid = std::process::id();
    let mut current = RUNTIME.lock();
    if let Some((owner, runtime)) = *current
        && owner == pid
    {
        return Ok(runtime);
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(WORKER_THREADS_MAX));
    let runtime =
        Builder::new_multi_thread().worker_threads(threads).thread_name("larder-kv").enable_all().build().map_err(
            |error| PyRuntimeError::new_err(format!("cannot start the threads of the Larder client: {error}")),
        )?;
    let runtime: &'static Runtime = Box::leak(Box::new(runtime));
    *current = Some((pid, runtime));
    Ok(runtime)
}

/// A value that only the process that made it may use. Another process leaks it.
pub(crate) struct PerProcess<T> {
    pid: u32,
    value: ManuallyDrop<T>,
}

impl<T> PerProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        PerProcess { pid: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// The value, or `None` in a child of the process that made it.
    pub(crate) fn get(&self) -> Option<&T> {
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

/// Waits until no thread opens a connection. Runs in the parent before each fork.
#[pyfunction]
pub(crate) fn _before_fork(py: Python<'_>) {
    // Without the GIL: a thread that forks at the same time may need it to end its fork.
    py.detach(larder_client::before_fork);
}

#[pyfunction]
pub(crate) fn _after_fork_in_parent() {
    larder_client::after_fork_in_parent();
}

/// Closes the parent's connections. Runs in the child after each fork.
#[pyfunction]
pub(crate) fn _after_fork_in_child() {
    // SAFETY: the child has no client yet, and `PerProcess` keeps it from those of the parent.
    unsafe { larder_client::after_fork_in_child() };
}
