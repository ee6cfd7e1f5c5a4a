//! Shared code of the store clients for other languages: `tools/python` and `tools/c`.
//!
//! A program in another language blocks or waits in its own way, owns the memory of its pages, and
//! may fork. `larder-client` knows none of this.
//!
//! | module | contents |
//! | --- | --- |
//! | `process` | the runtime of a process, and forks |
//! | `session` | a client that attaches anew in a forked child |
//! | `memory` | the caller's memory, and how long transfers may touch it |
//! | `pages` | calls that move pages, and their arguments |
//! | `namespace` | namespaces of foreign engines |
//! | `drop_list` | values that another thread drops |

mod drop_list;
mod memory;
mod namespace;
mod pages;
mod process;
mod session;

pub use drop_list::DropList;
pub use memory::{Holds, Span, Target, check_distinct};
pub use namespace::{checked, opaque};
pub use pages::{PageTarget, bounded, follow, get, new_pages, put, targets_of_parts};
pub use process::{PerProcess, after_fork_in_child, after_fork_in_parent, before_fork, runtime};
pub use session::Session;

/// Reason to refuse a call before any transfer begins.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidArgument(pub String);
