//! What the benches share.

pub mod cpu;
pub mod zero_copy;
