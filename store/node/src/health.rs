//! Whether a device of L3 may be asked to read, or to write: each is judged apart, by one [`Health`].
//!
//! A device that fails again and again is set aside: its pages are misses, or others take its writes. After a while one
//! request is its trial, and all others still go elsewhere: a failure sets it aside again, for twice as long; a success makes
//! it well; a trial that ends without either leaves the next request to be one. Time comes in as a value.

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

/// How a request is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Of a device that is well.
    Freely,
    /// As the trial of one that was not.
    OnTrial,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Well,
    Aside { until: Instant, because: Trouble },
    OnTrial { because: Trouble },
}

/// What is known of how a device does one kind of request.
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
    /// Whether [`Health::ask`] would say yes now.
    pub(crate) fn usable(&self, now: Instant) -> bool {
        match self.state {
            State::Well => true,
            State::Aside { until, .. } => now >= until,
            State::OnTrial { .. } => false,
        }
    }

    /// Whether the device may be asked now. What comes of it goes into [`Health::succeeded`], [`Health::failed`] or
    /// [`Health::ended`].
    pub(crate) fn ask(&mut self, now: Instant) -> Option<Asked> {
        match self.state {
            State::Well => Some(Asked::Freely),
            State::Aside { until, because } if now >= until => {
                self.state = State::OnTrial { because };
                Some(Asked::OnTrial)
            }
            State::Aside { .. } | State::OnTrial { .. } => None,
        }
    }

    /// It did what it was asked; `true` if it is well again after a trial. The end of something that was begun before it
    /// was set aside is no trial.
    pub(crate) fn succeeded(&mut self, asked: Asked) -> bool {
        let on_trial = matches!(self.state, State::OnTrial { .. });
        if self.state != State::Well && !(on_trial && asked == Asked::OnTrial) {
            return false;
        }
        *self = Self { set_aside: self.set_aside, ..Self::default() };
        on_trial
    }

    /// It did not; for how long it is set aside, if that begins now.
    pub(crate) fn failed(&mut self, asked: Asked, trouble: Trouble, now: Instant) -> Option<Duration> {
        match (self.state, asked) {
            (State::Well, _) => {
                match trouble {
                    Trouble::Error => self.errors += 1,
                    Trouble::Timeout => self.timeouts += 1,
                }
                if self.errors < ERRORS_MAX && self.timeouts < TIMEOUTS_MAX {
                    return None;
                }
            }
            (State::OnTrial { .. }, Asked::OnTrial) => self.pause = (self.pause * 2).min(PAUSE_MAX),
            (State::Aside { .. } | State::OnTrial { .. }, _) => return None,
        }
        (self.errors, self.timeouts) = (0, 0);
        self.set_aside += 1;
        self.state = State::Aside { until: now + self.pause, because: trouble };
        Some(self.pause)
    }

    /// It was asked, and what came of that says nothing of it.
    pub(crate) fn ended(&mut self, asked: Asked, now: Instant) {
        if let (State::OnTrial { because }, Asked::OnTrial) = (self.state, asked) {
            self.state = State::Aside { until: now, because };
        }
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
        let fail = |health: &mut Health| health.failed(Asked::Freely, Trouble::Error, now);
        for _ in 0..3 {
            (0..4).for_each(|_| assert_eq!(fail(&mut health), None));
            assert!(!health.succeeded(Asked::Freely) && health.ask(now) == Some(Asked::Freely));
        }
        (0..4).for_each(|_| assert_eq!(fail(&mut health), None));
        assert_eq!(fail(&mut health), Some(PAUSE_MIN));
        assert!(health.ask(now).is_none() && !health.usable(now) && health.trouble() == Some(Trouble::Error));
        assert!(!health.succeeded(Asked::Freely) && !health.usable(now), "what was begun before proves nothing");
    }

    #[test]
    fn the_second_timeout_does_and_trials_come_after_longer_and_longer_pauses() {
        let (mut health, mut now) = (Health::default(), crate::clock::now());
        assert_eq!(health.failed(Asked::Freely, Trouble::Timeout, now), None);
        let mut pause = health.failed(Asked::Freely, Trouble::Timeout, now).unwrap();
        for _ in 0..10 {
            assert!(!health.usable(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(health.ask(now) == Some(Asked::OnTrial) && health.word() == "on trial");
            let next = health.failed(Asked::OnTrial, Trouble::Error, now).unwrap();
            assert_eq!(next, (pause * 2).min(PAUSE_MAX));
            pause = next;
        }
        assert_eq!(pause, PAUSE_MAX);
        now += pause;
        assert!(health.ask(now).is_some() && health.succeeded(Asked::OnTrial) && health.word() == "well");
        assert_eq!(health.times_set_aside(), 11);
        health.failed(Asked::Freely, Trouble::Timeout, now);
        assert_eq!(health.failed(Asked::Freely, Trouble::Timeout, now), Some(PAUSE_MIN), "it begins anew");
    }

    #[test]
    fn one_request_is_the_trial_and_only_it_counts() {
        let (mut health, mut now) = (Health::default(), crate::clock::now());
        (0..2).for_each(|_| _ = health.failed(Asked::Freely, Trouble::Timeout, now));
        now += PAUSE_MIN;
        assert!(health.usable(now));
        assert_eq!((health.ask(now), health.ask(now), health.usable(now)), (Some(Asked::OnTrial), None, false));
        assert!(!health.succeeded(Asked::Freely) && health.failed(Asked::Freely, Trouble::Error, now).is_none());
        assert_eq!(health.word(), "on trial", "those that were begun before count neither way");
        health.ended(Asked::Freely, now);
        assert!(health.ask(now).is_none());
        health.ended(Asked::OnTrial, now);
        assert_eq!(health.ask(now), Some(Asked::OnTrial), "the next one is the trial");
        assert!(health.succeeded(Asked::OnTrial) && health.ask(now) == Some(Asked::Freely));
    }
}
