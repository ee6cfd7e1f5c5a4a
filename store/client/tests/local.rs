//! The tests of `node`, with pages in shared memory.

#[path = "node.rs"]
mod node;
