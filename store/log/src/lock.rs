//! The lock around the state of a log.

use crate::machine::{Log, SharedIndex};
use larder_runtime::sync::{Mutex, MutexGuard};
use std::sync::Arc;

/// A [`Log`] that one thread uses at a time, and its index, which lookups and reads use without
/// that lock. It is held for short computations only, never across an await.
#[derive(Debug)]
pub struct LogLock {
    log: Mutex<Log>,
    entries: Arc<SharedIndex>,
}

impl LogLock {
    pub fn new(log: Log) -> LogLock {
        let entries = log.entries().clone();
        LogLock { log: Mutex::new(log), entries }
    }

    /// The part that lookups and reads use. Never waits for [`LogLock::lock`].
    pub fn entries(&self) -> &SharedIndex {
        &self.entries
    }

    pub fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock()
    }
}
