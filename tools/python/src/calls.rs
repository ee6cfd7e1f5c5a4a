//! Calls: a future of the client, waited for by the calling thread or by an event loop.
//!
//! Invariants:
//! - No thread of the client takes the GIL. A finished call of an event loop goes to a queue and
//!   wakes the loop by a descriptor; the loop converts the result.
//! - Every call that was started finishes: its entry appears in the queue even if its task panics.
//! - A call that is interrupted or cancelled ends only when its buffers are free, or after
//!   [`RELEASE_WAIT`].

use crate::fork::runtime;
use crate::namespace::invalid;
use crate::owner::{ReturnAtEnd, return_dropped};
use larder_runtime::lock::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Interval at which a waiting thread looks for signals, such as Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum time that an interrupted call waits for its buffers. After it, they stay referenced.
const RELEASE_WAIT: Duration = Duration::from_secs(1);
/// Duration of `seconds`. Fails if it is negative, not a number, or above a day.
pub(crate) fn seconds(seconds: f64, name: &str) -> PyResult<Duration> {
    larder_bindings::bounded(Duration::try_from_secs_f64(seconds).ok(), name).map_err(invalid)
}

pub(crate) fn deadline(timeout: f64) -> PyResult<Instant> {
    Ok(Instant::now() + seconds(timeout, "timeout")?)
}

/// Converts a result to a Python object, with the GIL.
pub(crate) type Convert<T> = fn(Python<'_>, T) -> PyResult<Py<PyAny>>;
type Finish = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// Runs `work`. Without a queue, waits for it and returns its result. With a queue, returns a
/// [`Pending`] at once.
///
/// `released` is signalled when the memory of the call is free.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    queue: Option<&Bound<'_, Completions>>,
    released: Option<Arc<Notify>>,
    work: impl Future<Output = T> + Send + 'static,
    convert: Convert<T>,
) -> PyResult<Py<PyAny>> {
    let _returns = ReturnAtEnd(py);
    match queue {
        None => wait(py, released, work, convert),
        Some(queue) => start(py, &queue.get().queue, released, work, convert),
    }
}

fn wait<T: Send + 'static>(
    py: Python<'_>,
    released: Option<Arc<Notify>>,
    work: impl Future<Output = T> + Send + 'static,
    convert: Convert<T>,
) -> PyResult<Py<PyAny>> {
    let runtime = runtime()?;
    let mut work = Box::pin(work);
    loop {
        let slice = async { tokio::time::timeout(SIGNAL_INTERVAL, &mut work).await };
        if let Ok(result) = py.detach(|| runtime.block_on(slice)) {
            return convert(py, result);
        }
        // This call may be long.
        return_dropped(py);
        if let Err(interrupt) = py.check_signals() {
            py.detach(|| {
                let _context = runtime.enter();
                drop(work);
                runtime.block_on(wait_for_release(released));
            });
            return Err(interrupt);
        }
    }
}

fn start<T: Send + 'static>(
    py: Python<'_>,
    queue: &Arc<Queue>,
    released: Option<Arc<Notify>>,
    work: impl Future<Output = T> + Send + 'static,
    convert: Convert<T>,
) -> PyResult<Py<PyAny>> {
    let id = queue.next_id.fetch_add(1, Ordering::Relaxed);
    let cancel = Arc::new(Notify::new());
    let pending = Pending { id, cancel: cancel.clone() };
    let entry = Entry { queue: queue.clone(), id, finish: None };
    runtime()?.spawn(async move {
        let result = tokio::select! {
            result = work => Some(result),
            () = cancel.notified() => None,
        };
        match result {
            Some(result) => entry.finish(move |py| convert(py, result)),
            // `select!` has dropped the work.
            None => {
                wait_for_release(released).await;
                entry.finish(|py| Ok(py.None()));
            }
        }
    });
    Ok(Py::new(py, pending)?.into_any())
}

async fn wait_for_release(released: Option<Arc<Notify>>) {
    if let Some(released) = released {
        // After this time the memory stays referenced, but the caller may go on.
        let _ = tokio::time::timeout(RELEASE_WAIT, released.notified()).await;
    }
}

struct Queue {
    finished: Mutex<Vec<(u64, Option<Finish>)>>,
    next_id: AtomicU64,
    /// An eventfd that is readable while `finished` may have entries.
    wake: OwnedFd,
}

/// Puts its call into the queue when it is dropped.
struct Entry {
    queue: Arc<Queue>,
    id: u64,
    /// `None` if the task has panicked, or was dropped.
    finish: Option<Finish>,
}

impl Entry {
    fn finish(mut self, finish: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static) {
        self.finish = Some(Box::new(finish));
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.queue.finished.lock().push((self.id, self.finish.take()));
        let one = 1u64.to_ne_bytes();
        // SAFETY: the descriptor is open, and the buffer has 8 bytes. The call fails only if the
        // counter is full, and then the descriptor is readable already.
        unsafe { libc::write(self.queue.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

/// Finished calls of one event loop.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Completions {
    queue: Arc<Queue>,
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        // SAFETY: a plain system call.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if wake < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        // SAFETY: a new descriptor that nothing else owns.
        let wake = unsafe { OwnedFd::from_raw_fd(wake) };
        Ok(Completions { queue: Arc::new(Queue { finished: Mutex::default(), next_id: AtomicU64::new(0), wake }) })
    }

    /// Descriptor that is readable while calls have finished.
    fn fileno(&self) -> i32 {
        self.queue.wake.as_raw_fd()
    }

    /// Takes the finished calls: number, `True` for a result or `False` for an exception, and
    /// value.
    fn drain(&self, py: Python<'_>) -> Vec<(u64, bool, Py<PyAny>)> {
        let mut counter = [0u8; 8];
        // SAFETY: the descriptor is open, and the buffer has 8 bytes.
        unsafe { libc::read(self.queue.wake.as_raw_fd(), counter.as_mut_ptr().cast(), counter.len()) };
        let _returns = ReturnAtEnd(py);
        let finished = std::mem::take(&mut *self.queue.finished.lock());
        let convert = |(id, finish): (u64, Option<Finish>)| {
            let lost = || Err(PyRuntimeError::new_err("the call ended without a result; this is a bug of larder-kv"));
            match finish.map_or_else(lost, |finish| finish(py)) {
                Ok(value) => (id, true, value),
                Err(error) => (id, false, error.into_value(py).into_any()),
            }
        };
        finished.into_iter().map(convert).collect()
    }
}

/// A call that an event loop waits for.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Pending {
    #[pyo3(get)]
    id: u64,
    cancel: Arc<Notify>,
}

#[pymethods]
impl Pending {
    /// Ends the call early. Its entry still appears in the queue, once its buffers are free.
    fn cancel(&self) {
        self.cancel.notify_one();
    }
}
