//! What the benches share.

pub mod cpu;
