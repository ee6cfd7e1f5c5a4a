//! Kernels for the CPU.
//!
//! Each kernel selects its vector code at run time: AVX-512, AVX2 with FMA, or portable code. Large
//! calls spread over all cores with rayon. Small calls stay on the calling thread.
//!
//! Invariant: the kernel alone fixes the order of every sum.
//! - A matrix product adds in the order of the inner index, with one rounding per step.
//! - A sum over a row runs in [`LANES`] lanes, which are then added pairwise.
//! - Attention visits the keys in blocks of absolute positions.

mod activation;
mod attention;
mod disjoint;
mod element;
mod math;
mod matmul;
mod norm;
mod pages;
mod quantise;
mod rope;
mod sampling;
mod stored;
mod vector;

pub use activation::silu_mul;
pub use attention::{ATTENTION_SPAN, AttentionChunk, AttentionElement, AttentionShape, HeadLayout, attention};
pub use element::KvElement;
pub use math::{LANES, argmax, softmax};
pub use matmul::{PackError, PackedMatrix, matmul};
pub use norm::{add, rms_norm};
pub use pages::{CHUNK_BYTES, PageShape, PoolLayout, gather_page, scatter_page};
pub use quantise::{EightBit, merge_planes, split_planes};
pub use rope::{Rope, RopeTable};
pub use sampling::{SampleParams, best_first, sample_token};
pub use stored::WeightType;
