//! Log lines that clients cause, bounded in number.
//!
//! Any client can repeat its mistakes. One line per kind and [`LOG_INTERVAL`] tells the operator
//! the latest one, and the number since the line before.

use crate::now;
use crate::sync::Mutex;
use std::time::{Duration, Instant};

/// Minimum time between two log lines of one kind.
pub const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Limit of one kind of log line.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    events: u64,
}

impl LogLimit {
    /// Counts an event. Returns the number since the last line if a new one is due.
    pub fn record(&self) -> Option<u64> {
        self.record_at(now())
    }

    /// As [`LogLimit::record`], for an event at `at`.
    pub fn record_at(&self, at: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        state.events += 1;
        // Saturates: another thread may have recorded a later time.
        if state.last.is_some_and(|last| at.saturating_duration_since(last) < LOG_INTERVAL) {
            return None;
        }
        state.last = Some(at);
        Some(std::mem::take(&mut state.events))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_logged_once_per_interval_with_their_number() {
        let limit = LogLimit::default();
        let start = now();
        assert_eq!(limit.record_at(start), Some(1), "the first one at once");
        for _ in 0..9 {
            assert_eq!(limit.record_at(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(limit.record_at(start + LOG_INTERVAL), Some(10));
        assert_eq!(limit.record_at(start + LOG_INTERVAL), None);
    }
}
