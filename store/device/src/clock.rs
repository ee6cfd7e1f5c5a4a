//! What time it is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// Time of day in milliseconds. Read once from the system and counted on from there, so that it never goes back while the
/// process runs, and stands still where tokio's clock does.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin_unix_ms: u64,
    origin: Instant,
}

impl Clock {
    /// The system's time.
    pub fn system() -> Clock {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Clock::at(unix.as_millis() as u64)
    }

    /// It is `unix_ms` now.
    pub fn at(unix_ms: u64) -> Clock {
        Clock { origin_unix_ms: unix_ms, origin: Instant::now() }
    }

    /// Milliseconds since 1970.
    pub fn now_unix_ms(&self) -> u64 {
        self.origin_unix_ms.saturating_add(self.origin.elapsed().as_millis() as u64)
    }
}
