//! Circuit breaker of one engine.
//!
//! - A lost connection excludes the engine at once, for [`EXCLUDED_MIN`]. Each further exclusion
//!   lasts twice as long, up to [`EXCLUDED_MAX`].
//! - Error answers exclude it only after [`FAULTS_MAX`] in a row. One request that makes every
//!   engine fail must not exclude them all.
//! - A success resets everything.

use std::time::{Duration, Instant};

pub const EXCLUDED_MIN: Duration = Duration::from_secs(2);
/// Longest exclusion. It bounds the time until a repaired engine gets requests again.
pub const EXCLUDED_MAX: Duration = Duration::from_secs(30);
/// Consecutive error answers that count like a lost connection. A single one may be the fault of
/// one request.
pub const FAULTS_MAX: u32 = 3;

/// Failure history of one engine. Callers pass the time, so tests need no clock.
#[derive(Debug, Default)]
pub struct CircuitBreaker {
    excluded_until: Option<Instant>,
    excluded_for: Duration,
    faults: u32,
}

impl CircuitBreaker {
    /// Returns `true` if the engine may get requests at `now`. There is no half-open state: after
    /// an exclusion, nothing limits its requests.
    pub fn admits(&self, now: Instant) -> bool {
        self.excluded_until.is_none_or(|until| now >= until)
    }

    /// Records a lost connection, and excludes the engine from `now` on. A loss during an exclusion
    /// neither prolongs it nor doubles the next one.
    pub fn lost(&mut self, now: Instant) {
        // Requests that were in flight together fail together. They count as one failure, or the
        // exclusion would double for each of them.
        if self.admits(now) {
            self.excluded_for = (self.excluded_for * 2).clamp(EXCLUDED_MIN, EXCLUDED_MAX);
            self.excluded_until = Some(now + self.excluded_for);
        }
    }

    /// Records an error answer. Every third one without a success between them counts as a lost
    /// connection.
    pub fn fault(&mut self, now: Instant) {
        self.faults += 1;
        if self.faults >= FAULTS_MAX {
            self.faults = 0;
            self.lost(now);
        }
    }

    /// Records a good answer: closes the breaker and forgets all failures.
    pub fn success(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusion_doubles_to_its_maximum_and_a_success_resets_it() {
        let mut breaker = CircuitBreaker::default();
        let mut now = Instant::now();
        for seconds in [2, 4, 8, 16, 30, 30] {
            assert!(breaker.admits(now));
            breaker.lost(now);
            breaker.lost(now);
            assert!(!breaker.admits(now + Duration::from_millis(seconds * 1000 - 1)), "{seconds}");
            now += Duration::from_secs(seconds);
        }
        assert!(breaker.admits(now));
        breaker.success();
        breaker.lost(now);
        assert!(breaker.admits(now + EXCLUDED_MIN));
    }

    #[test]
    fn fewer_faults_in_a_row_than_the_limit_do_not_exclude() {
        let mut breaker = CircuitBreaker::default();
        let now = Instant::now();
        for _ in 0..10 {
            breaker.fault(now);
            breaker.fault(now);
            breaker.success();
        }
        assert!(breaker.admits(now));
        (0..FAULTS_MAX).for_each(|_| breaker.fault(now));
        assert!(!breaker.admits(now));
    }
}
