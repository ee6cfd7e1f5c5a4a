//! Compute kernels of the inference engine, for the CPU and for CUDA.
//!
//! Invariants:
//! - The result for one row (one token) is bit-identical whatever other rows share the call and
//!   however many threads run it.
//! - All sums are `f32`, all activations row-major.
//!
//! Layout:
//! - [`cpu`]: kernels of the engine, and the reference for the device kernels.
//! - [`cuda`]: device kernels and their launchers. They need a CUDA device.

pub mod cpu;
pub mod cuda;
