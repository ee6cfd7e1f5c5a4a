//! Throughput estimates: delays before a retry, and the bytes that a reader can receive in time.

use larder_runtime::fail_point;
use std::time::{Duration, Instant};

const RETRY_MIN: Duration = Duration::from_millis(1);
/// Also the answer while no rate is known. A longer pause would leave a freed budget unused.
pub(super) const RETRY_MAX: Duration = Duration::from_secs(1);
/// Longest delay of a refused request of pages. Over the slowest links one page takes minutes, and
/// a reader should notice soon if the link has become faster.
pub(super) const RETRY_READ_MAX: Duration = Duration::from_secs(10);
/// Answer to a request of pages while no rate is known. Such a request reserves no memory, so an
/// early retry costs the node little, and a late one leaves the reader idle.
pub(super) const RETRY_OUTSTANDING: Duration = Duration::from_millis(50);
/// Length of one measurement. Shorter ones would see single pages instead of a rate.
const SAMPLE_TIME: Duration = Duration::from_millis(100);
/// A measurement that took this many sample times replaces the estimate instead of averaging with
/// it: the old value describes a load that ended long ago.
const STALE_SAMPLES: u32 = 8;

/// Rate at which charged bytes of one kind become free, in wall time. It gives the delay that a
/// refusal suggests.
#[derive(Default)]
pub(super) struct ReleaseRate {
    since: Option<Instant>,
    bytes: u64,
    per_second: u64,
}

impl ReleaseRate {
    pub(super) fn record(&mut self, now: Instant, bytes: u64) {
        let since = *self.since.get_or_insert(now);
        self.bytes += bytes;
        let elapsed = now.saturating_duration_since(since);
        if elapsed >= SAMPLE_TIME {
            let measured = u128::from(self.bytes) * 1_000_000 / elapsed.as_micros();
            let is_stale = elapsed >= SAMPLE_TIME * STALE_SAMPLES;
            let before = if is_stale { measured } else { u128::from(self.per_second) };
            self.per_second = u64::try_from((before + measured) / 2).unwrap_or(u64::MAX);
            self.since = Some(now);
            self.bytes = 0;
        }
    }

    /// Expected time until `bytes` become free, between [`RETRY_MIN`] and [`RETRY_MAX`].
    pub(super) fn time_for(&mut self, now: Instant, bytes: u64) -> Duration {
        // Closes an old sample, so that an idle period lowers the rate.
        self.record(now, 0);
        if self.per_second == 0 {
            return RETRY_MAX;
        }
        time_at(self.per_second, bytes).clamp(RETRY_MIN, RETRY_MAX)
    }
}

/// Rate at which readers receive requested bytes. Time without outstanding bytes does not count.
#[derive(Default)]
pub(super) struct ReadRate {
    /// Start of the part of the busy period that is not yet in `busy`. `None` while idle.
    busy_since: Option<Instant>,
    busy: Duration,
    bytes: u64,
    per_second: Option<u64>,
}

impl ReadRate {
    pub(super) fn start(&mut self, now: Instant) {
        self.busy_since = Some(now);
    }

    /// Ends the busy period. The caller has recorded the last bytes before.
    pub(super) fn stop(&mut self) {
        self.busy_since = None;
    }

    /// Adds received bytes. With 0 bytes it only accounts for the time that passed, so that a
    /// reader that receives nothing becomes slow.
    pub(super) fn record(&mut self, now: Instant, bytes: u64) {
        self.bytes += bytes;
        // While idle, nothing can be received. The bytes belong to a request that ended just now.
        let Some(since) = self.busy_since.replace(now) else { return };
        self.busy += now.saturating_duration_since(since);
        if self.busy < SAMPLE_TIME {
            return;
        }
        let measured = u128::from(self.bytes) * 1_000_000 / self.busy.as_micros();
        let measured = u64::try_from(measured).unwrap_or(u64::MAX);
        let is_stale = self.busy >= SAMPLE_TIME * STALE_SAMPLES;
        let before = self.per_second.filter(|_| !is_stale).unwrap_or(measured);
        self.per_second = Some(before / 2 + measured / 2);
        self.busy = Duration::ZERO;
        self.bytes = 0;
    }

    /// Returns the bytes that fit into `time` at this rate, or `None` before the first measurement.
    pub(super) fn bytes_in(&self, time: Duration) -> Option<u64> {
        let bytes = u128::from(self.per_second?) * time.as_micros() / 1_000_000;
        Some(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Expected time to receive `bytes`, or `None` before the first measurement.
    fn time_for(&self, bytes: u64) -> Option<Duration> {
        Some(time_at(self.per_second?, bytes))
    }
}

/// Reads of one connection that were refused and told to return. It keeps no list of them: each is
/// told to return after those before it, whether they do or not.
#[derive(Default)]
pub(super) struct RefusedReads {
    /// Time at which the last of them finds room. `None` if they all have.
    until: Option<Instant>,
}

impl RefusedReads {
    /// The delay for a read of `bytes`, of which `excess` do not fit now.
    pub(super) fn refuse(&mut self, rate: &ReadRate, bytes: u64, excess: u64, now: Instant) -> Duration {
        let Some((alone, behind)) = rate.time_for(excess).zip(rate.time_for(bytes)) else {
            return RETRY_OUTSTANDING;
        };
        let until = if fail_point!("node.refused-reads-told-together") { None } else { self.until };
        let after = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now) + behind);
        let delay = alone.max(after).clamp(RETRY_MIN, RETRY_READ_MAX);
        let delay = if fail_point!("node.read-told-too-short") { RETRY_MIN } else { delay };
        self.until = Some(now + delay);
        delay
    }

    /// The connection has received all that it requested, so a read that comes now finds room.
    pub(super) fn clear(&mut self) {
        self.until = None;
    }
}

fn time_at(per_second: u64, bytes: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(per_second.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}
