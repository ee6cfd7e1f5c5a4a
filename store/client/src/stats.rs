//! Counters.

use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a client since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStats {
    /// Pages read and checked.
    pub get_hits: u64,
    /// Pages asked for and not had.
    pub get_misses: u64,
    /// Of these, pages that a node was too busy for.
    pub gets_busy: u64,
    /// Gets at a node that were given up because it had not begun to answer in time.
    pub gets_hedged: u64,
    /// Pages or parts whose bytes or identity did not check: dropped.
    pub corrupt: u64,
    /// Pages put.
    pub puts: u64,
    /// Pages that could not be put.
    pub puts_lost: u64,
    /// Of these, pages that a node was too busy for.
    pub puts_busy: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) get_hits: AtomicU64,
    pub(crate) get_misses: AtomicU64,
    pub(crate) gets_busy: AtomicU64,
    pub(crate) gets_hedged: AtomicU64,
    pub(crate) corrupt: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) puts_lost: AtomicU64,
    pub(crate) puts_busy: AtomicU64,
}

impl Counters {
    pub(crate) fn read(&self) -> ClientStats {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ClientStats {
            get_hits: value(&self.get_hits),
            get_misses: value(&self.get_misses),
            gets_busy: value(&self.gets_busy),
            gets_hedged: value(&self.gets_hedged),
            corrupt: value(&self.corrupt),
            puts: value(&self.puts),
            puts_lost: value(&self.puts_lost),
            puts_busy: value(&self.puts_busy),
        }
    }
}

pub(crate) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}
