//! Time, taken in one place.
//!
//! Waiting and deadlines follow tokio's clock, so that a simulation that pauses it governs all of it. Times to live are
//! Unix milliseconds, because they outlive the process.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Now, by tokio's clock.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Where Unix time comes from.
#[derive(Debug, Clone, Copy)]
pub enum Clock {
    /// The system.
    System,
    /// Counted from `unix_ms` on by tokio's clock.
    Counted {
        /// Unix milliseconds at `since`.
        unix_ms: u64,
        /// When that was.
        since: Instant,
    },
}

impl Clock {
    /// A clock that begins at `unix_ms` now and goes by tokio's clock.
    pub fn counted_from(unix_ms: u64) -> Clock {
        Clock::Counted { unix_ms, since: now() }
    }

    /// Unix time in milliseconds.
    pub fn unix_ms(&self) -> u64 {
        match self {
            Clock::System => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
            }
            Clock::Counted { unix_ms, since } => {
                let more = now().saturating_duration_since(*since).as_millis();
                unix_ms.saturating_add(u64::try_from(more).unwrap_or(u64::MAX))
            }
        }
    }
}
