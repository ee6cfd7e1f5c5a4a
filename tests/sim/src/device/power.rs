//! Power supply of all devices of an incarnation.
//!
//! Invariant: power fails for all devices at once, and does not return within the incarnation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

/// Power that fails after a number of device events. All devices of an incarnation share it and
/// stop at the same event.
#[derive(Debug)]
pub struct Power {
    events_left: AtomicU64,
    failure: Notify,
}

impl Power {
    /// Power that fails at the device event number `events`, counted from 1. That event is in the
    /// trace, but the device does not answer any more.
    pub fn lasting(events: u64) -> Arc<Power> {
        Arc::new(Power { events_left: AtomicU64::new(events), failure: Notify::new() })
    }

    /// Waits until power fails. Supports one waiting task.
    pub async fn failed(&self) {
        self.failure.notified().await;
    }

    pub(crate) fn keep_on(&self) {
        if self.is_on() {
            self.events_left.store(u64::MAX, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.events_left.load(Ordering::Relaxed) > 0
    }

    pub(super) fn consume_event(&self) -> bool {
        if self.events_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.failure.notify_one();
        }
        self.is_on()
    }

    pub(super) fn cut(&self) {
        self.events_left.store(0, Ordering::Relaxed);
    }
}
