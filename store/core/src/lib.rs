//! The deterministic storage core of Larder.
//!
//! Always true: no I/O, no clock, no randomness, no threads. What should be done to a device comes out as values
//! ([`log::Intent`], [`log::PlannedWrite`], [`log::SyncTicket`]), what came of it goes in as values, so that the same code
//! runs on real devices and in a simulator that crashes it at every step. `clippy.toml` beside this crate keeps it so.
//!
//! - [`extent`]: an allocator of extents (memory of the arena).
//! - [`planted`]: bugs that a simulation plants;
//! - [`log`]: the segment log: where records go, which page stands where, what is reclaimed, what a crash leaves.
#![forbid(unsafe_code)]

pub mod extent;
pub mod log;

pub use extent::ExtentAllocator;
pub use larder_format::planted;
