//! Helpers that several benchmarks share.

pub mod cpu;
pub mod zero_copy;
