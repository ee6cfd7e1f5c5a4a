//! Counters of a NIC.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a NIC has done since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicStats {
    /// Transfers from a peer that are done.
    pub reads: u64,
    /// Bytes of their requests.
    pub read_bytes: u64,
    /// Transfers to a peer that are done.
    pub writes: u64,
    /// Bytes of their requests.
    pub written_bytes: u64,
    /// Connections that died, other than by being closed.
    pub deaths: u64,
    /// Windows that peers can use now, or that are not proven dead yet.
    pub windows: u64,
    /// Connections whose queue pair exists now.
    pub endpoints: u64,
    /// Pieces of memory that the device did not let go of, and that are therefore lost to this process.
    pub stuck: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) reads: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) writes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) deaths: Counter,
    pub(crate) windows: Counter,
    pub(crate) endpoints: Counter,
    pub(crate) stuck: Counter,
}

#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
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
            deaths: self.deaths.get(),
            windows: self.windows.get(),
            endpoints: self.endpoints.get(),
            stuck: self.stuck.get(),
        }
    }
}
