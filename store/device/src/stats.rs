//! Counters of a ring.
//!
//! Always true: they only grow, and are written by the ring's executor alone.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a ring has done since it was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Requests that were handed to the kernel. Refused ones do not count.
    pub requests: u64,
    /// Entries by which they were: fewer for merged requests, more for those that had to be tried again or went on.
    pub submissions: u64,
    /// Requests that were handed over together with others.
    pub merged: u64,
    /// Bytes of requests that succeeded.
    pub bytes: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) requests: Counter,
    pub(crate) submissions: Counter,
    pub(crate) merged: Counter,
    pub(crate) bytes: Counter,
}

#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: usize) {
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
            bytes: self.bytes.get(),
        }
    }
}
