//! Compute kernels of Larder: CPU and CUDA.
//!
//! What must always hold: what a kernel gives for one row (a token) does not depend, in a single bit, on the other rows it
//! is computed with, nor on how the work is spread over threads. Everything is `f32`, row-major.
//!
//! - [`cpu`]: what the engine computes with, and the reference for device kernels.
//! - [`cuda`]: device kernels and their launchers; usable only where there is a device.

pub mod cpu;
pub mod cuda;
