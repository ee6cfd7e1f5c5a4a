//! Moving bytes between storage and device memory.
//!
//! There are three ways, and [`ways`] says which of them this machine has:
//!
//! | way | how | needs |
//! | --- | --- | --- |
//! | [`Way::CuFile`] | NVMe straight to GPU memory (GPUDirect Storage) | a CUDA device and libcufile |
//! | [`Way::Pinned`] | direct I/O into pinned host memory, then a device copy | a CUDA device |
//! | [`Way::Host`] | direct I/O into the arena | nothing |
//!
//! Only [`Way::Host`] moves bytes in this version: the CPU engine computes where the arena lies. The GPU ways are found, and
//! reported, so that an operator sees what a machine could do.

mod host;
mod probe;

pub use host::{HostMover, MoveError};
pub use probe::{Way, ways};
