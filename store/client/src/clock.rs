//! Time, taken in one place: by tokio's clock, so that a simulation that pauses it governs every deadline.

use std::time::Instant;

/// Now.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
