//! Counters of a ring.
//!
//! Invariant: counters only grow, and only the ring's executor writes them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Work of a ring since its start. The counters are read one by one, so they may be a few requests
/// apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Requests passed to the kernel. Refused ones are not counted.
    pub requests: u64,
    /// Entries submitted. Merging makes them fewer than requests; retries and short transfers add
    /// to them.
    pub submissions: u64,
    pub merged: u64,
    /// Entries whose memory the kernel need not pin, because one registered buffer contains all of
    /// it.
    pub registered: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) requests: Counter,
    pub(crate) submissions: Counter,
    pub(crate) merged: Counter,
    pub(crate) registered: Counter,
    pub(crate) bytes: Counter,
}

#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: usize) {
        // Counters are statistics: no other memory depends on their order.
        self.0.fetch_add(more as u64, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn read(&self) -> RingStats {
        RingStats {
            requests: self.requests.get(),
            submissions: self.submissions.get(),
            merged: self.merged.get(),
            registered: self.registered.get(),
            bytes: self.bytes.get(),
        }
    }
}
