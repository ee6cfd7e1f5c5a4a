//! Options of a ring, and the features that the kernel granted it.

use super::kernel::Completions;
use std::time::Duration;
use thiserror::Error;

/// Driver of a ring's requests and tasks. The choice affects the scheduling of tasks, not the order
/// or durability of requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Executor {
    /// glommio, which divides CPU time among task classes by weight. Where it cannot start,
    /// [`Executor::Thread`] takes over.
    #[default]
    Glommio,
    /// A loop on a plain thread that polls foreground tasks first.
    Thread,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("executors are \"glommio\" and \"thread\"")]
pub struct UnknownExecutor;

impl std::str::FromStr for Executor {
    type Err = UnknownExecutor;

    fn from_str(name: &str) -> Result<Executor, UnknownExecutor> {
        match name {
            "glommio" => Ok(Executor::Glommio),
            "thread" => Ok(Executor::Thread),
            _ => Err(UnknownExecutor),
        }
    }
}

impl std::fmt::Display for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Executor::Glommio => "glommio",
            Executor::Thread => "thread",
        })
    }
}

#[derive(Debug, Clone)]
pub struct RingOptions {
    /// Name of the executor's thread, shown in logs and by `top -H`.
    pub name: String,
    pub executor: Executor,
    /// Maximum number of entries with the kernel, 1 to 1,024. Beyond 16, devices gain little
    /// throughput and each request waits longer.
    pub queue_depth: u32,
    /// Maximum number of requests queued at each priority. A sender waits when it is reached.
    pub backlog: usize,
    pub files_max: u32,
    /// Registers the arena with the kernel. Worth it for a ring that transfers pages.
    pub register_arena: bool,
    /// Transfers several ranges of registered memory with one entry, if the kernel can (Linux
    /// 6.15). Tests clear it, to run as on an older kernel.
    pub vectored: bool,
    /// Completes requests only when the executor waits, if the kernel can (Linux 6.1). Reads take
    /// less CPU time, and writes more: decision record 0042. Default `false`.
    pub deferred: bool,
    /// Maximum time that closing waits for requests that the device does not complete.
    pub close_timeout: Duration,
}

impl RingOptions {
    /// Returns defaults: glommio, queue depth 16, backlog 256, and 10 s to close.
    pub fn new(name: impl Into<String>, files_max: u32) -> RingOptions {
        RingOptions {
            name: name.into(),
            executor: Executor::default(),
            queue_depth: 16,
            backlog: 256,
            files_max,
            register_arena: true,
            vectored: true,
            deferred: false,
            close_timeout: Duration::from_secs(10),
        }
    }

    /// Returns the best kind of completion to try.
    pub(super) fn completions(&self) -> Completions {
        if self.deferred { Completions::Deferred } else { Completions::Cooperative }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingCapabilities {
    /// The driver in use: [`Executor::Thread`] where glommio was configured but could not start.
    pub executor: Executor,
    /// True if the arena is registered. Its pages are then pinned once instead of per request.
    pub registered_buffers: bool,
    /// True if files are registered, which saves a reference count per request.
    pub registered_files: bool,
    /// True if requests with several ranges, such as a header and a payload, use registered memory
    /// (Linux 6.15).
    pub vectored: bool,
}
