//! Time, taken in one place.
//!
//! Waiting and deadlines follow tokio's clock, so that a simulation that pauses it governs all of it. Times to live are
//! Unix milliseconds of the clock that the devices go by too, because they outlive the process.

pub use larder_device::Clock;
use std::time::Instant;

/// Now, by tokio's clock.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
