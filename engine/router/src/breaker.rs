//! When an engine that failed is left alone, and for how long.
//!
//! An engine that cannot be reached is excluded at once, for [`EXCLUDED_MIN`], then twice as long each time up to
//! [`EXCLUDED_MAX`]. An engine that answers with faults is excluded after [`FAULTS_MAX`] in a row only: one request that
//! no engine can bear must not take them all out. A success resets everything.

use std::time::{Duration, Instant};

/// First exclusion.
pub const EXCLUDED_MIN: Duration = Duration::from_secs(2);
/// Longest exclusion.
pub const EXCLUDED_MAX: Duration = Duration::from_secs(30);
/// Faults in a row that count like a lost connection.
pub const FAULTS_MAX: u32 = 3;

/// State of one engine.
#[derive(Debug, Default)]
pub struct Breaker {
    excluded_until: Option<Instant>,
    excluded_for: Duration,
    faults: u32,
}

impl Breaker {
    /// Whether requests may go there.
    pub fn admits(&self, now: Instant) -> bool {
        self.excluded_until.is_none_or(|until| now >= until)
    }

    /// The engine could not be reached, or the connection broke.
    pub fn lost(&mut self, now: Instant) {
        // Requests that were on their way together fail together: that is one failure.
        if self.admits(now) {
            self.excluded_for = (self.excluded_for * 2).clamp(EXCLUDED_MIN, EXCLUDED_MAX);
            self.excluded_until = Some(now + self.excluded_for);
        }
    }

    /// The engine answered that it failed.
    pub fn fault(&mut self, now: Instant) {
        self.faults += 1;
        if self.faults >= FAULTS_MAX {
            self.faults = 0;
            self.lost(now);
        }
    }

    /// The engine answered well.
    pub fn success(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusion_doubles_to_its_maximum_and_a_success_resets_it() {
        let mut breaker = Breaker::default();
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
    fn single_faults_do_not_exclude() {
        let mut breaker = Breaker::default();
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
