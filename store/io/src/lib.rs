//! Device I/O of a store node: io_uring rings, their executors, and preallocated segment files.
//!
//! Invariants:
//! - A request on a [`Ring`] owns its buffers until the kernel has completed it. Neither a dropped
//!   future, a timeout nor a panic frees memory that a device may still access.
//! - Each [`Device`] runs on one thread. The thread drives one ring and the log's background tasks.
//! - Every queue has a bound: requests with the kernel, requests waiting at each priority, tasks,
//!   attached files.
//!
//! Layout:
//! - [`device`]: the [`Device`] trait, the interface between the log and its storage.
//! - `file_device`, `directory`, [`file`](mod@file): [`FileDevice`], the device on a directory of
//!   files.
//! - [`ring`]: one io_uring and its executor.
//! - [`request`], `inbox`: requests and their way to the executor.

pub mod device;
mod directory;
pub mod file;
mod file_device;
mod inbox;
pub mod request;
pub mod ring;
mod stats;
mod timers;

pub use device::{BoxFuture, Device, DeviceCapabilities, SmallFile, TaskClass};
pub use directory::{OpenError, is_out_of_descriptors, segment_name};
pub use file::DeviceFile;
pub use file_device::FileDevice;
pub use request::{Block, Completion, Done, FileId, Operation, Priority, Request, RingClosed};
pub use ring::{Executor, Ring, RingCapabilities, RingOptions, Task, UnknownExecutor};
pub use stats::RingStats;
