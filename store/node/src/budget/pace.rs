//! How fast bytes leave, and what follows from that: when to try again, and how much can be expected to leave in time.

use std::time::{Duration, Instant};

const RETRY_MIN: Duration = Duration::from_millis(1);
pub(super) const RETRY_MAX: Duration = Duration::from_secs(1);
/// Asking for pages again costs the node little.
pub(super) const RETRY_ASKED_MAX: Duration = Duration::from_millis(50);
/// Over how long the rate at which bytes leave is measured.
const RATE_WINDOW: Duration = Duration::from_millis(100);

/// How fast bytes of a kind come back.
#[derive(Default)]
pub(super) struct Drain {
    since: Option<Instant>,
    bytes: u64,
    per_second: u64,
}

impl Drain {
    pub(super) fn add(&mut self, now: Instant, bytes: u64) {
        let since = *self.since.get_or_insert(now);
        self.bytes += bytes;
        let passed = now.saturating_duration_since(since);
        if passed >= RATE_WINDOW {
            let measured = u128::from(self.bytes) * 1_000_000 / passed.as_micros();
            // What was measured over a long time counts for all of it.
            let before = if passed >= RATE_WINDOW * 8 { measured } else { u128::from(self.per_second) };
            self.per_second = u64::try_from((before + measured) / 2).unwrap_or(u64::MAX);
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    pub(super) fn time_for(&mut self, now: Instant, bytes: u64) -> Duration {
        self.add(now, 0);
        if self.per_second == 0 {
            return RETRY_MAX;
        }
        time_at(self.per_second, bytes)
    }
}

/// How fast readers take what they asked for, while there is something to take.
#[derive(Default)]
pub(super) struct Pace {
    /// Since when there is, as far as that is not counted yet.
    pub(super) since: Option<Instant>,
    busy: Duration,
    bytes: u64,
    per_second: Option<u64>,
}

impl Pace {
    pub(super) fn took(&mut self, now: Instant, bytes: u64) {
        self.bytes += bytes;
        let Some(since) = self.since.replace(now) else { return };
        self.busy += now.saturating_duration_since(since);
        if self.busy < RATE_WINDOW {
            return;
        }
        let measured = u128::from(self.bytes) * 1_000_000 / self.busy.as_micros();
        let measured = u64::try_from(measured).unwrap_or(u64::MAX);
        // What was measured over a long time counts for all of it.
        let before = self.per_second.filter(|_| self.busy < RATE_WINDOW * 8).unwrap_or(measured);
        self.per_second = Some(before / 2 + measured / 2);
        (self.busy, self.bytes) = (Duration::ZERO, 0);
    }

    /// Most bytes that it can be expected to take in `time`; `None`: that is not known yet.
    pub(super) fn bytes_in(&self, time: Duration) -> Option<u64> {
        let bytes = u128::from(self.per_second?) * time.as_micros() / 1_000_000;
        Some(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    pub(super) fn time_for(&self, bytes: u64) -> Duration {
        self.per_second.map_or(RETRY_ASKED_MAX, |rate| time_at(rate, bytes).min(RETRY_ASKED_MAX))
    }
}

fn time_at(per_second: u64, bytes: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(per_second.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)).clamp(RETRY_MIN, RETRY_MAX)
}
