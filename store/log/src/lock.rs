//! The lock around the state of a log.

use crate::machine::Log;
use larder_runtime::sync::{MODELLED, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Attempts at the shared lock before a reader sleeps: some 5 µs. The exclusive lock is mostly held
/// for less, and a sleeping reader takes 50 µs to wake up. In a thread model each is a step.
const ATTEMPTS: u32 = if MODELLED { 1 } else { 200 };

/// A [`Log`] that lookups share and changes take exclusively. It is held for short computations
/// only, never across an await.
#[derive(Debug)]
pub struct LogLock(RwLock<Log>);

impl LogLock {
    pub fn new(log: Log) -> LogLock {
        LogLock(RwLock::new(log))
    }

    pub fn read(&self) -> RwLockReadGuard<'_, Log> {
        for _ in 0..ATTEMPTS {
            if let Some(log) = self.0.try_read() {
                return log;
            }
            std::hint::spin_loop();
        }
        self.0.read()
    }

    /// The shared lock, unless another thread has or awaits the exclusive one.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, Log>> {
        self.0.try_read()
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, Log> {
        self.0.write()
    }
}
