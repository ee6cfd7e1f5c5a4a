//! The native module of the Python package `larder-kv`: the store client of `larder-client`, with
//! Python's buffers, threads, event loops and forks.
//!
//! | module | contents |
//! | --- | --- |
//! | `client` | the client's methods, and lookups with their leases |
//! | `calls` | futures that a thread or an event loop waits for |
//! | `memory` | buffers of Python, and how long they stay referenced |
//! | `owner` | references that threads without the GIL drop |
//! | `namespace` | namespaces and keys |
//! | `fork` | the runtime of a process, and forks |
//!
//! `larder_kv/__init__.py` is the package that users import.

mod calls;
mod client;
mod fork;
mod memory;
mod namespace;
mod owner;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::calls::{Completions, Pending};
    #[pymodule_export]
    use crate::client::{Client, Lookup};
    #[pymodule_export]
    use crate::fork::{_after_fork_in_child, _after_fork_in_parent, _before_fork};
    #[pymodule_export]
    use crate::memory::{Buffer, Pointer};
    #[pymodule_export]
    use crate::namespace::{Namespace, page_key};
}
