//! Budget for payload bytes of puts that wait in this client.

use larder_runtime::fail_point;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts payload bytes of streaming puts, and refuses those beyond a limit.
pub(crate) struct PutBudget {
    used: AtomicUsize,
    max: usize,
}

impl PutBudget {
    pub(crate) fn new(max: usize) -> Self {
        Self { used: AtomicUsize::new(0), max }
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves `bytes` bytes, or returns `None` if that exceeds the limit.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Option<ReservedBytes> {
        // Relaxed: the counter guards no other memory. It overshoots for a moment when a
        // reservation fails, which can only refuse more.
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let reserved = ReservedBytes { budget: self.clone(), bytes };
        (before + bytes <= self.max).then_some(reserved)
    }
}

pub(crate) struct ReservedBytes {
    budget: Arc<PutBudget>,
    bytes: usize,
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        if !fail_point!("client.send-budget-leaks") {
            let before = self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
            debug_assert!(before >= self.bytes, "the put budget was returned twice");
        }
    }
}
