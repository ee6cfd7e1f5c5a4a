//! Health of a device for one kind of request: a circuit breaker per reads and per writes.
//!
//! ```text
//!            ERRORS_MAX or TIMEOUTS_MAX                pause is over
//!  Healthy ───────────────────────────▶ Quarantined ────────────────▶ Probing
//!     ▲                                  ▲                               │ │
//!     │                                  └──── fails: pause doubles ─────┘ │
//!     └─────────────────────────── succeeds ───────────────────────────────┘
//! ```
//!
//! Invariants:
//! - While a device is quarantined, its pages are misses and other devices take its writes.
//! - At most one request probes a device. All others still avoid it.
//! - Requests admitted before the quarantine change nothing.
//! - A probe that ends without a result, by cancellation, lets the next request probe.
//!
//! Time comes in as a value.

use std::fmt;
use std::time::{Duration, Instant};

/// Errors without a success in between that quarantine a device. A few in a row may be one bad
/// spot.
const ERRORS_MAX: u32 = 5;
/// Timeouts without a success in between that quarantine a device. Fewer than errors, because each
/// costs its reader the whole timeout.
const TIMEOUTS_MAX: u32 = 2;
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Error,
    Timeout,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::Error => "errors",
            Fault::Timeout => "timeouts",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    Normal,
    /// The request decides whether the device leaves quarantine.
    Probe,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HealthState {
    Healthy,
    Quarantined { until: Instant, cause: Fault },
    Probing { cause: Fault },
}

/// Health of one kind of request of one device. It has no lock of its own: the device guards reads
/// and writes with a mutex each.
#[derive(Debug)]
pub(crate) struct Health {
    state: HealthState,
    errors: u32,
    timeouts: u32,
    pause: Duration,
    quarantines: u64,
}

impl Default for Health {
    fn default() -> Self {
        Self { state: HealthState::Healthy, errors: 0, timeouts: 0, pause: PAUSE_MIN, quarantines: 0 }
    }
}

impl Health {
    /// Returns `true` if [`Health::admit`] would admit a request now.
    pub(crate) fn usable(&self, now: Instant) -> bool {
        match self.state {
            HealthState::Healthy => true,
            HealthState::Quarantined { until, .. } => now >= until,
            HealthState::Probing { .. } => false,
        }
    }

    /// Admits a request, or returns `None`. The caller reports the result to [`Health::succeeded`]
    /// or [`Health::failed`], and in every case to [`Health::finished`].
    pub(crate) fn admit(&mut self, now: Instant) -> Option<Admission> {
        match self.state {
            HealthState::Healthy => Some(Admission::Normal),
            HealthState::Quarantined { until, cause } if now >= until => {
                self.state = HealthState::Probing { cause };
                Some(Admission::Probe)
            }
            HealthState::Quarantined { .. } | HealthState::Probing { .. } => None,
        }
    }

    /// Records a success. Returns `true` if it ends the quarantine.
    pub(crate) fn succeeded(&mut self, admission: Admission) -> bool {
        let is_probing = matches!(self.state, HealthState::Probing { .. });
        // A success admitted before the quarantine says nothing of the device now.
        if self.state != HealthState::Healthy && !(is_probing && admission == Admission::Probe) {
            return false;
        }
        *self = Self { quarantines: self.quarantines, ..Self::default() };
        is_probing
    }

    /// Records a fault. Returns the length of the quarantine that begins now, if one does.
    pub(crate) fn failed(&mut self, admission: Admission, fault: Fault, now: Instant) -> Option<Duration> {
        match (self.state, admission) {
            (HealthState::Healthy, _) => {
                match fault {
                    Fault::Error => self.errors += 1,
                    Fault::Timeout => self.timeouts += 1,
                }
                if self.errors < ERRORS_MAX && self.timeouts < TIMEOUTS_MAX {
                    return None;
                }
            }
            (HealthState::Probing { .. }, Admission::Probe) => self.pause = (self.pause * 2).min(PAUSE_MAX),
            (HealthState::Quarantined { .. } | HealthState::Probing { .. }, _) => return None,
        }
        self.errors = 0;
        self.timeouts = 0;
        self.quarantines += 1;
        self.state = HealthState::Quarantined { until: now + self.pause, cause: fault };
        Some(self.pause)
    }

    /// Records the end of a request. A probe without a result leaves the next request to probe.
    pub(crate) fn finished(&mut self, admission: Admission, now: Instant) {
        if let (HealthState::Probing { cause }, Admission::Probe) = (self.state, admission) {
            self.state = HealthState::Quarantined { until: now, cause };
        }
    }

    /// Fault that caused the quarantine, if the device is not healthy.
    pub(crate) fn fault(&self) -> Option<Fault> {
        match self.state {
            HealthState::Healthy => None,
            HealthState::Quarantined { cause, .. } | HealthState::Probing { cause } => Some(cause),
        }
    }

    pub(crate) fn state_name(&self) -> &'static str {
        match self.state {
            HealthState::Healthy => "healthy",
            HealthState::Quarantined { .. } => "quarantined",
            HealthState::Probing { .. } => "probing",
        }
    }

    pub(crate) fn quarantines(&self) -> u64 {
        self.quarantines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_in_a_row_quarantine_a_device_and_a_success_ends_the_row() {
        let mut health = Health::default();
        let now = larder_runtime::now();
        let fail = |health: &mut Health| health.failed(Admission::Normal, Fault::Error, now);
        for _ in 0..3 {
            (0..4).for_each(|_| assert_eq!(fail(&mut health), None));
            assert!(!health.succeeded(Admission::Normal) && health.admit(now) == Some(Admission::Normal));
        }
        (0..4).for_each(|_| assert_eq!(fail(&mut health), None));
        assert_eq!(fail(&mut health), Some(PAUSE_MIN));
        assert!(health.admit(now).is_none() && !health.usable(now) && health.fault() == Some(Fault::Error));
        assert!(!health.succeeded(Admission::Normal) && !health.usable(now), "an older request proves nothing");
    }

    #[test]
    fn the_second_timeout_quarantines_a_device_and_failed_probes_double_the_pause() {
        let mut health = Health::default();
        let mut now = larder_runtime::now();
        assert_eq!(health.failed(Admission::Normal, Fault::Timeout, now), None);
        let mut pause = health.failed(Admission::Normal, Fault::Timeout, now).unwrap();
        for _ in 0..10 {
            assert!(!health.usable(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(health.admit(now) == Some(Admission::Probe) && health.state_name() == "probing");
            let next = health.failed(Admission::Probe, Fault::Error, now).unwrap();
            assert_eq!(next, (pause * 2).min(PAUSE_MAX));
            pause = next;
        }
        assert_eq!(pause, PAUSE_MAX);
        now += pause;
        assert!(health.admit(now).is_some() && health.succeeded(Admission::Probe) && health.state_name() == "healthy");
        assert_eq!(health.quarantines(), 11);
        health.failed(Admission::Normal, Fault::Timeout, now);
        assert_eq!(health.failed(Admission::Normal, Fault::Timeout, now), Some(PAUSE_MIN), "the pause starts over");
    }

    #[test]
    fn one_request_probes_and_only_its_result_counts() {
        let mut health = Health::default();
        let mut now = larder_runtime::now();
        (0..2).for_each(|_| _ = health.failed(Admission::Normal, Fault::Timeout, now));
        now += PAUSE_MIN;
        assert!(health.usable(now));
        assert_eq!((health.admit(now), health.admit(now), health.usable(now)), (Some(Admission::Probe), None, false));
        assert!(!health.succeeded(Admission::Normal) && health.failed(Admission::Normal, Fault::Error, now).is_none());
        assert_eq!(health.state_name(), "probing", "requests admitted before count neither way");
        health.finished(Admission::Normal, now);
        assert!(health.admit(now).is_none());
        health.finished(Admission::Probe, now);
        assert_eq!(health.admit(now), Some(Admission::Probe), "the next request probes");
        assert!(health.succeeded(Admission::Probe) && health.admit(now) == Some(Admission::Normal));
    }
}
