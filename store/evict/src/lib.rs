//! Cache eviction: which page leaves a full tier.
//!
//! Invariants:
//! - No I/O, no clock, no randomness, no threads: the same calls give the same victims. Time comes
//!   in as a value, and a replay reads from a [`std::io::BufRead`] that its caller opened.
//! - [`Evictor`] alone enforces the rules. A [`Policy`] only ranks the pages that the rules allow
//!   to leave.
//!
//! Layout:
//! - [`Evictor`]: the resident pages of one tier, and the rules that hold under any policy:
//!   capacity, leaves before roots, pins, soft pins, deadlines, quotas.
//! - [`Policy`]: the order of eviction, and admission. [`Lru`], [`S3Fifo`] and [`Sieve`] are for
//!   comparison. [`HitDensity`] learns from the traffic.
//! - [`replay`]: hit rates of the policies, and of the offline optimum, on recorded traffic.
//! - [`synthetic`]: generated traffic, for tests and benchmarks without a recording.

// The simulation runs this crate: see store/clippy.toml.
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]
#![forbid(unsafe_code)]

mod evictor;
mod hit_density;
mod lru;
mod policy;
pub mod replay;
mod s3fifo;
mod sieve;
pub mod synthetic;

pub use evictor::{Evicted, EvictionReason, Evictor, InsertError, NamespaceIndex, NewPage, PageHandle};
pub use hit_density::{Counters, EvictionOrder, HitDensity, Outlook};
pub use lru::Lru;
pub use policy::{Advice, Arrival, Policy, Removal, Slot, Stamp, TICKS_PER_MS};
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;

/// Appends to a table that grows by an eighth. Doubling would waste up to half of it, and spare
/// capacity counts as memory per page.
fn push_tight<T>(table: &mut Vec<T>, value: T) {
    if table.len() == table.capacity() {
        table.reserve_exact((table.len() / 8).max(64));
    }
    table.push(value);
}

/// Estimated heap bytes of a B-tree of these entries. Its nodes are about two thirds full.
fn tree_bytes<T>(entries: usize) -> usize {
    entries * size_of::<T>() * 3 / 2
}

/// Estimated heap bytes of a hash map with this capacity. It keeps an eighth of its buckets free,
/// and a byte for each.
fn map_bytes<T>(capacity: usize) -> usize {
    capacity * 8 / 7 * (size_of::<T>() + 1)
}
