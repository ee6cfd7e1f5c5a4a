//! Forks of the interpreter, and the runtime of this process.
//!
//! Invariant: the locks of the runtime and of clients are taken with the GIL only, and released
//! before it. A fork by the interpreter therefore never finds one taken.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::Runtime;

pub(crate) use larder_bindings::PerProcess;

pub(crate) fn start_error(error: std::io::Error) -> PyErr {
    PyRuntimeError::new_err(format!("cannot start the threads of the Larder client: {error}"))
}

pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    larder_bindings::runtime().map_err(start_error)
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
