//! The model kernels in the emulator, compared with the CPU kernels on random shapes.
//!
//! Each check returns an error instead of panicking. So `mutations` can run it on sources with a
//! defect, and demand that it fails.

mod attention;
mod mutations;
mod products;
mod quantise;
mod refusals;
mod rows;
mod sampling;
mod support;
