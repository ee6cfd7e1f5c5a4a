//! Conversion of durations to and from the wire.

use std::time::Duration;

/// Pause before a retry at a node that gives no hint.
pub(super) const RETRY_DEFAULT: Duration = Duration::from_millis(100);

/// Pause before a retry at a busy node, by its hint in milliseconds. 0 means that it gives none.
pub(super) fn retry_delay(retry_after_ms: u32) -> Duration {
    if retry_after_ms == 0 { RETRY_DEFAULT } else { Duration::from_millis(retry_after_ms.into()) }
}

/// Whole milliseconds, rounded up: a short duration must not become 0, which means none.
pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
