//! Counters of a NIC.
//!
//! Invariant: all but the gauges `grants` and `endpoints` only grow.

use std::sync::atomic::{AtomicU64, Ordering};

/// Work of a NIC since it was opened. `grants` and `endpoints` are current numbers, all others only
/// grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicStats {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Connections that died, except by being closed.
    pub disconnects: u64,
    /// Grants that peers can use now, or whose keys are not proven dead yet.
    pub grants: u64,
    pub endpoints: u64,
    /// Memory ranges that the device did not release. They are lost to this process.
    pub leaked: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) reads: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) writes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) disconnects: Counter,
    pub(crate) grants: Counter,
    pub(crate) endpoints: Counter,
    pub(crate) leaked: Counter,
}

#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        // Statistics: no other memory depends on the order of these counters.
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, less: u64) {
        self.0.fetch_sub(less, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn read(&self) -> NicStats {
        NicStats {
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            writes: self.writes.get(),
            written_bytes: self.written_bytes.get(),
            disconnects: self.disconnects.get(),
            grants: self.grants.get(),
            endpoints: self.endpoints.get(),
            leaked: self.leaked.get(),
        }
    }
}
