//! Time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// Returns the current time of tokio's clock, for deadlines and durations.
///
/// A simulation pauses tokio's clock and advances it by itself, so every deadline follows it.
pub fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// Wall-clock time in Unix milliseconds, for times to live.
///
/// The system clock is read once. From there on the value advances with tokio's clock: it never
/// goes back while the process runs, and it stands still in a simulation that pauses time. A copy
/// is cheap and shows the same time.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin_unix_ms: u64,
    origin: Instant,
}

impl Clock {
    /// Starts a clock at the system's time. A system time before 1970 counts as 1970.
    pub fn system() -> Clock {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Clock::at(unix.as_millis() as u64)
    }

    /// Starts a clock that shows `unix_ms` at this moment.
    pub fn at(unix_ms: u64) -> Clock {
        Clock { origin_unix_ms: unix_ms, origin: Instant::now() }
    }

    /// Milliseconds since 1970-01-01T00:00:00Z.
    pub fn now_unix_ms(&self) -> u64 {
        self.origin_unix_ms.saturating_add(self.origin.elapsed().as_millis() as u64)
    }
}
