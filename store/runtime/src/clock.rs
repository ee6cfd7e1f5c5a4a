//! Time.

use std::sync::atomic::{AtomicU64, Ordering};
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
/// is cheap and shows the same time. The clock of a [`SteppedClock`] advances by its steps instead.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Source);

#[derive(Debug, Clone, Copy)]
enum Source {
    Running {
        origin_unix_ms: u64,
        origin: Instant,
    },
    /// Time of a [`SteppedClock`], in Unix milliseconds.
    Stepped(&'static AtomicU64),
}

impl Clock {
    /// Starts a clock at the system's time. A system time before 1970 counts as 1970.
    pub fn system() -> Clock {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Clock::at(unix.as_millis() as u64)
    }

    /// Starts a clock that shows `unix_ms` at this moment.
    pub fn at(unix_ms: u64) -> Clock {
        Clock(Source::Running { origin_unix_ms: unix_ms, origin: Instant::now() })
    }

    /// Milliseconds since 1970-01-01T00:00:00Z.
    pub fn now_unix_ms(&self) -> u64 {
        match self.0 {
            Source::Running { origin_unix_ms, origin } => {
                origin_unix_ms.saturating_add(origin.elapsed().as_millis() as u64)
            }
            Source::Stepped(unix_ms) => unix_ms.load(Ordering::Acquire),
        }
    }
}

/// Owner of a [`Clock`] that stands still between two steps. A replay of recorded traffic sets it
/// to the time of each request, and so needs no longer than the requests take.
#[derive(Debug)]
pub struct SteppedClock(&'static AtomicU64);

impl SteppedClock {
    /// A clock that shows `unix_ms`. Its eight bytes are never freed, because clocks are copied
    /// freely.
    pub fn at(unix_ms: u64) -> SteppedClock {
        SteppedClock(Box::leak(Box::new(AtomicU64::new(unix_ms))))
    }

    /// The clock for its readers. All copies follow the steps.
    pub fn clock(&self) -> Clock {
        Clock(Source::Stepped(self.0))
    }

    /// Advances the clock. An earlier time than the present one changes nothing.
    pub fn advance_to(&self, unix_ms: u64) {
        self.0.fetch_max(unix_ms, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stepped_clock_moves_forward_by_its_steps_alone() {
        let steps = SteppedClock::at(1000);
        let clock = steps.clock();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(clock.now_unix_ms(), 1000);
        for (step, shown) in [(1500, 1500), (1200, 1500), (1501, 1501)] {
            steps.advance_to(step);
            assert_eq!(clock.now_unix_ms(), shown);
        }
    }
}
