//! The memory that pages lie in.
//!
//! Invariants:
//! - Memory of the [`Arena`] has one writer or many readers, never both. [`SlotMut`] is exclusive
//!   and [`Slot`] is shared and read-only; both are ordinary Rust ownership.
//! - Processes on one machine share memory by file descriptor ([`share`]). Neither side ever writes
//!   to the other's memory.
//! - A device that reads or writes memory by itself receives a value that owns that memory
//!   ([`span`]). The memory is reused only after the device has returned the value.
//!
//! Layout:
//! - [`arena`]: one mapping on huge pages, cut into slots.
//! - [`extent`]: the allocator behind the arena and behind a client's shared memory.
//! - [`machine`]: the memory that the machine has.
//! - [`plan`]: upper bound of the memory of a process.
//! - [`share`]: the arena in other processes of the machine, and their memory in the node.
//! - [`socket`]: bytes in the send queue of a socket.
//! - [`span`]: traits for memory that a device may access by itself.

pub mod arena;
pub mod extent;
pub mod machine;
pub mod plan;
pub mod share;
pub mod socket;
pub mod span;

pub use arena::{Arena, ArenaSharing, PrivateBlock, Slot, SlotMut, SlotPart, SlotPartMut, SlotSlice};
pub use extent::ExtentAllocator;
