//! Compute kernels of the inference engine, for the CPU and for CUDA.
//!
//! Invariants:
//! - The result for one row (one token) is bit-identical whatever other rows share the call and
//!   however many threads run it.
//! - All sums are `f32`, all activations row-major.
//!
//! Layout:
//! - [`cpu`]: kernels of the engine, and the reference for the device kernels.
//! - [`cuda`]: sources of the device kernels, and their compilation for CUDA.
//! - [`device`]: memory, streams and launches, on a CUDA device or emulated.
//! - [`launch`]: typed launchers of the device kernels that a model needs.
//! - [`pages`]: moves pages between an engine's pool and the store's layout, with checksums.

pub mod cpu;
pub mod cuda;
pub mod device;
pub mod launch;
pub mod pages;
