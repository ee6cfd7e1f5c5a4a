//! Which page goes when there is no room.
//!
//! Always true: no I/O, no clock, no randomness, no threads; the same calls give the same victims. Time comes in as a
//! value, a replay reads from a [`std::io::BufRead`] that its caller opened. `clippy.toml` beside this crate keeps it
//! so.
//!
//! - [`Evictor`]: the resident pages of one tier, and the rules that hold under any policy: capacity, leaf before
//!   root, pins, soft pins, deadlines, quotas.
//! - [`Policy`]: the order in which the pages go that the rules allow: [`Lru`], [`S3Fifo`] and [`Larder`], which
//!   learns it from the traffic.
//! - [`replay`]: hit rates of the policies, and of the offline optimum, on recorded traffic.
//! - [`synthetic`]: made-up traffic, for tests and benches that may not carry a recording.
#![forbid(unsafe_code)]

mod evictor;
mod larder;
mod lru;
mod policy;
pub mod replay;
mod s3fifo;
pub mod synthetic;

pub use evictor::{Evicted, Evictor, Handle, NamespaceIndex, NewPage, Reason, Refused};
pub use larder::Larder;
pub use lru::Lru;
pub use policy::{Arrival, Farewell, Policy, Slot, Stamp};
pub use s3fifo::S3Fifo;

/// Appends, growing by an eighth: what a table has in reserve counts as memory of its pages.
fn push_tight<T>(table: &mut Vec<T>, value: T) {
    if table.len() == table.capacity() {
        table.reserve_exact((table.len() / 8).max(64));
    }
    table.push(value);
}
