//! References to Python objects, which threads without the GIL drop.
//!
//! Invariants:
//! - A dropped reference returns to Python at the end of a call into the module. So no thread of
//!   the client ever waits for the interpreter, not even while it ends.
//! - No thread drops a `Py` without the GIL. PyO3 would keep it under a lock of the process, which
//!   every call takes. A fork may copy that lock taken, and the child would hang at its first call.

use larder_bindings::DropList;
use pyo3::prelude::*;

static DROPPED: DropList<Py<PyAny>> = DropList::new();

/// Keeps the bytes of an object where they are. `None` if the caller keeps them until the process
/// ends.
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    pub(crate) fn new(object: Option<Py<PyAny>>) -> Owner {
        Owner(object)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            DROPPED.push(object);
        }
    }
}

/// Returns the dropped references to Python. Their destructors may call into the module again.
pub(crate) fn return_dropped(py: Python<'_>) {
    DROPPED.take().into_iter().for_each(|object| object.drop_ref(py));
}

/// Returns the dropped references when a call ends, in whatever way.
pub(crate) struct ReturnAtEnd<'py>(pub(crate) Python<'py>);

impl Drop for ReturnAtEnd<'_> {
    fn drop(&mut self) {
        return_dropped(self.0);
    }
}
