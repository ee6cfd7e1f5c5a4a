//! Counters of a client.

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a client since it was attached, in pages unless stated otherwise.
///
/// The counters are independent: a snapshot may show one half of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStats {
    /// Pages and ranges that were read and verified.
    pub get_hits: u64,
    /// Pages and ranges that were requested and not read, for any reason.
    pub get_misses: u64,
    /// Misses because a node was busy. Included in [`ClientStats::get_misses`].
    pub gets_busy: u64,
    /// Get requests, of many pages each, that the client abandoned because of
    /// [`GetOptions::hedge_after`](crate::GetOptions::hedge_after).
    pub gets_hedged: u64,
    /// Pages whose identity or checksum did not match, and which were discarded. A value above 0
    /// means damage on the network, in memory or on a device.
    pub corrupt: u64,
    /// Pages that a node stored. Pages that a node already had are not among them.
    pub puts: u64,
    /// Pages that could not be put, because a node was unreachable, too slow or busy.
    pub puts_lost: u64,
    /// Pages that a busy node refused. Included in [`ClientStats::puts_lost`].
    pub puts_busy: u64,
}

/// The counters behind [`ClientStats`]. All accesses are relaxed: they order no other memory.
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
    pub(crate) fn snapshot(&self) -> ClientStats {
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

    /// Counts a batch of `all` pages, of which `hits` were read.
    pub(crate) fn count_gets(&self, hits: usize, all: usize) {
        assert!(hits <= all, "more hits than pages in a get");
        count(&self.get_hits, hits);
        count(&self.get_misses, all - hits);
    }
}

pub(crate) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Number of parts that follows have received and verified. Clones share the number, so one counter
/// can serve several follows. Its growth is a sign of life of their writers.
#[derive(Debug, Clone, Default)]
pub struct PartsReceived(Arc<AtomicU64>);

impl PartsReceived {
    /// Parts so far.
    pub fn get(&self) -> u64 {
        // Relaxed: the number orders no other memory.
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
