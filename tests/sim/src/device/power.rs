//! The power that all devices of a life run on.
//!
//! Always true: it fails for all of them at once, and does not come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

/// Power that lasts for so many events.
#[derive(Debug)]
pub struct Power {
    events_left: AtomicU64,
    failure: Notify,
}

impl Power {
    /// It fails at event `events` of all devices together.
    pub fn lasting(events: u64) -> Arc<Power> {
        Arc::new(Power { events_left: AtomicU64::new(events), failure: Notify::new() })
    }

    /// Ends when it fails. One task may wait.
    pub async fn failed(&self) {
        self.failure.notified().await;
    }

    /// It fails no more, if it has not.
    pub(crate) fn stays(&self) {
        if self.is_on() {
            self.events_left.store(u64::MAX, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.events_left.load(Ordering::Relaxed) > 0
    }

    /// Takes one event's worth; whether there is any left.
    pub(super) fn spend(&self) -> bool {
        if self.events_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.failure.notify_one();
        }
        self.is_on()
    }

    pub(super) fn cut(&self) {
        self.events_left.store(0, Ordering::Relaxed);
    }
}
