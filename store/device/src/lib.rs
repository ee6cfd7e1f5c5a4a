//! Memory arena and device access of a store node: the only crate of the store with `unsafe`.
//!
//! Always true:
//! - memory of the [`Arena`] has one writer or many readers, never both: [`SlotMut`] is exclusive, [`Slot`] is shared and
//!   read-only, and both are ordinary Rust ownership;
//! - a request on a [`Ring`] owns its buffers until the kernel has answered it. Dropping a future, a time-out, a panic,
//!   none of them frees memory that a device may still touch.
//!
//! - [`arena`]: one mapping with huge pages, cut into slots.
//! - [`file`]: preallocated files, opened for direct I/O.
//! - [`ring`]: one io_uring and its executor per device.
//! - [`seam`]: what a log needs of a device, and [`FileDevice`], which is one.
//! - [`Bell`] and [`Clock`]: waiting and time that a simulation can repeat.

pub mod arena;
mod clock;
mod device;
mod directory;
pub mod file;
mod inbox;
pub mod request;
pub mod ring;
pub mod seam;
mod stats;
mod timers;

pub use arena::{Arena, Piece, PieceMut, Sharing, Slot, SlotMut};
pub use clock::Clock;
pub use device::FileDevice;
pub use directory::{OpenError, segment_name};
pub use file::DeviceFile;
pub use larder_bell::Bell;
pub use request::{Block, Done, FileId, Lane, Operation, Request};
pub use ring::{Executor, Ring, RingFacts, RingGone, RingOptions, Share, Task, UnknownExecutor};
pub use seam::{BoxFuture, Completion, Device, DeviceFacts, SmallFile};
pub use stats::RingStats;
