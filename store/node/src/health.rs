//! Whether a device of L3 may be asked.
//!
//! A device that fails again and again is set aside: its pages are misses and others take its writes. After a while it is
//! on trial: one failure sets it aside again, for twice as long; one success makes it well. Time comes in as a value.

use std::fmt;
use std::time::{Duration, Instant};

/// Errors in a row after which a device is set aside.
const ERRORS_MAX: u32 = 5;
/// Timeouts, with no success in between, after which it is.
const TIMEOUTS_MAX: u32 = 2;
/// How long it is left alone the first time …
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// … and at most.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What a device did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// It refused.
    Error,
    /// It did not answer in time.
    Timeout,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Trouble::Error => "errors",
            Trouble::Timeout => "timeouts",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Well,
    Aside { until: Instant, because: Trouble },
    OnTrial { because: Trouble },
}

/// What is known of a device's health.
#[derive(Debug)]
pub(crate) struct Health {
    state: State,
    errors: u32,
    timeouts: u32,
    pause: Duration,
    set_aside: u64,
}

impl Default for Health {
    fn default() -> Self {
        Self { state: State::Well, errors: 0, timeouts: 0, pause: PAUSE_MIN, set_aside: 0 }
    }
}

impl Health {
    /// Whether the device may be asked now.
    pub(crate) fn usable(&mut self, now: Instant) -> bool {
        if let State::Aside { until, because } = self.state {
            if now < until {
                return false;
            }
            self.state = State::OnTrial { because };
        }
        true
    }

    /// It did what it was asked; `true` if it is well again after a trial. The end of something that was begun before it
    /// was set aside is no trial.
    pub(crate) fn succeeded(&mut self) -> bool {
        let recovered = match self.state {
            State::Aside { .. } => return false,
            State::OnTrial { .. } => true,
            State::Well => false,
        };
        *self = Self { set_aside: self.set_aside, ..Self::default() };
        recovered
    }

    /// It did not; for how long it is set aside, if that begins now.
    pub(crate) fn failed(&mut self, trouble: Trouble, now: Instant) -> Option<Duration> {
        match trouble {
            Trouble::Error => self.errors += 1,
            Trouble::Timeout => self.timeouts += 1,
        }
        match self.state {
            State::Aside { .. } => return None,
            State::Well if self.errors < ERRORS_MAX && self.timeouts < TIMEOUTS_MAX => return None,
            State::Well => {}
            State::OnTrial { .. } => self.pause = (self.pause * 2).min(PAUSE_MAX),
        }
        (self.errors, self.timeouts) = (0, 0);
        self.set_aside += 1;
        self.state = State::Aside { until: now + self.pause, because: trouble };
        Some(self.pause)
    }

    /// Why it is not well, if so.
    pub(crate) fn trouble(&self) -> Option<Trouble> {
        match self.state {
            State::Well => None,
            State::Aside { because, .. } | State::OnTrial { because } => Some(because),
        }
    }

    /// In one word.
    pub(crate) fn word(&self) -> &'static str {
        match self.state {
            State::Well => "well",
            State::Aside { .. } => "set aside",
            State::OnTrial { .. } => "on trial",
        }
    }

    /// How often it was set aside.
    pub(crate) fn times_set_aside(&self) -> u64 {
        self.set_aside
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_in_a_row_set_a_device_aside_and_a_success_ends_the_row() {
        let (mut health, now) = (Health::default(), crate::clock::now());
        for _ in 0..3 {
            (0..4).for_each(|_| assert_eq!(health.failed(Trouble::Error, now), None));
            assert!(!health.succeeded() && health.usable(now));
        }
        (0..4).for_each(|_| assert_eq!(health.failed(Trouble::Error, now), None));
        assert_eq!(health.failed(Trouble::Error, now), Some(PAUSE_MIN));
        assert!(!health.usable(now) && health.trouble() == Some(Trouble::Error));
        assert!(!health.succeeded() && !health.usable(now), "what was begun before proves nothing");
    }

    #[test]
    fn the_second_timeout_does_and_trials_come_after_longer_and_longer_pauses() {
        let (mut health, mut now) = (Health::default(), crate::clock::now());
        assert_eq!(health.failed(Trouble::Timeout, now), None);
        let mut pause = health.failed(Trouble::Timeout, now).unwrap();
        for _ in 0..10 {
            assert!(!health.usable(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(health.usable(now) && health.word() == "on trial");
            let next = health.failed(Trouble::Error, now).unwrap();
            assert_eq!(next, (pause * 2).min(PAUSE_MAX));
            pause = next;
        }
        assert_eq!(pause, PAUSE_MAX);
        now += pause;
        assert!(health.usable(now) && health.succeeded() && health.word() == "well");
        assert_eq!(health.times_set_aside(), 11);
        health.failed(Trouble::Timeout, now);
        assert_eq!(health.failed(Trouble::Timeout, now), Some(PAUSE_MIN), "it begins anew");
    }
}
