//! Kernels for the CPU. Vector code is chosen at run time (AVX-512, AVX2 with FMA, or plain code); all cores are used
//! through rayon, and a small piece of work stays on the calling thread.
//!
//! The order of every sum is fixed by the kernel alone: a matrix product adds in the order of the inner index, a sum over a
//! row runs in [`LANES`] lanes that are then added in pairs, attention goes through the keys in blocks of absolute
//! positions.

mod activation;
mod attention;
mod math;
mod matmul;
mod norm;
mod rope;
mod share;

pub use activation::silu_mul;
pub use attention::{AttentionChunk, AttentionShape, HeadPlace, attention};
pub use math::{LANES, argmax, softmax};
pub use matmul::{PackError, Packed, matmul};
pub use norm::{add, rms_norm};
pub use rope::{Rope, RopeTable};
