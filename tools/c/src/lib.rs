//! liblarder: the store client of `larder-client` for C. `include/larder.h` documents its
//! functions.
//!
//! Invariants:
//! - No panic crosses the boundary: it becomes [`Internal`](types::LarderStatus::Internal).
//! - Every pointer is checked for null and alignment, every number for its range, and every handle
//!   by look-up. A handle is a number, so a closed one is never dereferenced.
//! - The caller's memory is free when a call returns. See `memory`.
//!
//! | module | contents |
//! | --- | --- |
//! | `types` | structures and codes of the header |
//! | `call` | the boundary: panics, errors, pointers |
//! | `handles` | open clients, buffers and leases; forks |
//! | `memory` | the caller's memory |
//! | `client`, `pages`, `steer` | the functions |
//!
//! The header is generated: see `tests/header.rs`.

mod call;
mod client;
mod handles;
mod memory;
mod pages;
mod steer;
mod types;
