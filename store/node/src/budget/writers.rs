//! Writers with reserved pages: their progress, the time at which their room becomes free, and the
//! choice of those that lose it.
//!
//! A writer is a connection. It may reserve many pages and send them one after the other, so the
//! silence of one page says nothing.

use super::tenants::TenantNumber;
use super::{BudgetState, Kind};
use crate::tiers::WriteLoad;
use larder_runtime::fail_point;
use larder_runtime::sync::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Bytes that count as progress of a writer, within [`SILENT_AFTER`]. An eighth of the slowest link
/// that a request may count on (64 KB/s), because several connections may share it. Otherwise a
/// byte now and then would keep a page.
pub(super) const PROGRESS_BYTES: u64 = 8 << 10;
/// Time without progress after which a writer may lose its reservations, if others want the room.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(1);
/// Time for which memory of an aborted put stays exposed to its writer's RDMA device, if others
/// want the room, and its writer reports no progress. A client ends a write that makes none within
/// 5 s (the stall timeout of [`EndpointOptions`](crate::EndpointOptions)), so none runs any more.
pub(crate) const EXPOSED_MAX: Duration = Duration::from_secs(6);
/// Time that a connection waits before a tenant above its share loses the excess. Writers at work
/// usually end sooner, and then lose nothing.
const EXCESS_AFTER: Duration = Duration::from_secs(1);
/// Writers that lose room to one request, at most.
const LOSING_MAX: usize = 64;
/// Writers that one search for silent ones looks at, at most. The next search continues.
const VISITS_MAX: usize = 1024;
/// A writer that is silent for longer is expected to stay so.
const QUIET_AFTER: Duration = Duration::from_millis(250);
/// Length of one measurement of a writer's rate.
const WINDOW: Duration = Duration::from_secs(1);
/// Bytes count for a rate once they took this long. Less would see single packets.
const WINDOW_MIN: Duration = Duration::from_millis(20);
/// A forecast serves all refusals of this time, because it visits all writers of its scope: at most
/// one per connection. The forecasts of all tenants together visit each writer once more.
const FORECAST_AGE_MAX: Duration = Duration::from_millis(10);
/// Steps of a forecast. Each is 15 % longer than the one before: 1 ms to 10 s.
const STEPS: usize = 67;
const STEP_FACTOR: f64 = 1.15;
/// Those who wait ahead return up to a quarter later than they were told, and their puts then take
/// longer than one without others.
const RETURN_FACTOR: f64 = 1.4;
/// Weight of a new sample in a mean, as a divisor.
const MEAN_WEIGHT: u32 = 8;
/// A mean is unknown after this time without a sample: other clients put other pages by then.
const MEAN_AGE_MAX: Duration = Duration::from_secs(5);

/// Bytes that a connection sent for its open puts.
#[derive(Debug)]
pub(super) struct WriterProgress {
    last_byte: Instant,
    /// Last time at which [`PROGRESS_BYTES`] more had arrived.
    last_progress: Instant,
    /// Bytes received since then.
    since_progress: u64,
    /// Bytes received for puts that are still open, at most the bytes reserved.
    unsealed: u64,
    window_start: Instant,
    window_bytes: u64,
    /// Bytes per second in the last full window.
    rate: Option<u64>,
}

impl WriterProgress {
    pub(super) fn new(now: Instant) -> WriterProgress {
        WriterProgress {
            last_byte: now,
            last_progress: now,
            since_progress: 0,
            unsealed: 0,
            window_start: now,
            window_bytes: 0,
            rate: None,
        }
    }

    /// Records a reservation. The first one begins a new measurement.
    pub(super) fn begin(&mut self, is_first: bool, now: Instant) {
        self.last_byte = now;
        self.last_progress = now;
        self.since_progress = 0;
        if is_first {
            self.unsealed = 0;
            self.window_start = now;
            self.window_bytes = 0;
        }
    }

    pub(super) fn record(&mut self, bytes: u64, now: Instant) {
        self.last_byte = now;
        self.since_progress += bytes;
        if self.since_progress >= PROGRESS_BYTES {
            self.last_progress = now;
            self.since_progress = 0;
        }
        self.unsealed += bytes;
        self.window_bytes += bytes;
        let elapsed = now.saturating_duration_since(self.window_start);
        if elapsed >= WINDOW {
            self.rate = Some(per_second(self.window_bytes, elapsed));
            self.window_start = now;
            self.window_bytes = 0;
        }
    }

    /// Records the end of a put of `bytes`. It may have ended early, with fewer bytes received.
    pub(super) fn end(&mut self, bytes: u64) {
        self.unsealed -= self.unsealed.min(bytes);
    }

    /// Time without any byte.
    pub(super) fn quiet_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_byte)
    }

    /// Time without progress.
    fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_progress)
    }

    fn bytes_per_second(&self) -> Option<u64> {
        // Until the last byte: the time since then belongs to bytes that are still to come.
        let elapsed = self.last_byte.saturating_duration_since(self.window_start);
        let measured = (self.window_bytes > 0 && elapsed >= WINDOW_MIN).then(|| per_second(self.window_bytes, elapsed));
        measured.or(self.rate).filter(|&rate| rate > 0)
    }

    /// Expected end of a writer with `used` reserved bytes.
    fn end_of(&self, used: u64, page: u64, put_time: Option<Duration>, now: Instant) -> ExpectedEnd {
        let silence = self.silence(now);
        if silence >= SILENT_AFTER {
            // It has lost its puts, and its device may still reach their memory.
            return ExpectedEnd::At((SILENT_AFTER + EXPOSED_MAX).saturating_sub(silence));
        }
        let silent = ExpectedEnd::At(SILENT_AFTER - silence);
        if self.quiet_for(now) >= QUIET_AFTER {
            return silent;
        }
        match (self.bytes_per_second(), put_time) {
            // It will lose its room.
            (Some(rate), _) if rate < PROGRESS_BYTES => silent,
            (Some(rate), _) => {
                let left = used - self.unsealed.min(used);
                let end = Duration::from_secs_f64(left as f64 / rate as f64);
                // With more than a page it sends several at a time.
                let received = if self.unsealed < page { self.unsealed } else { 0 };
                ExpectedEnd::Steady { end, page, received }
            }
            (None, Some(end)) => ExpectedEnd::Steady { end, page, received: 0 },
            (None, None) => silent,
        }
    }

    /// Time until the connection finds `bytes` of its own `used` ones free, which belong to `puts`.
    /// Only its client ends these puts, because no connection takes room of its own. So neither a
    /// low rate nor silence frees them. A quiet client is expected to stay so for as long again.
    fn time_to_free(&self, bytes: u64, (used, puts): (u64, u64), put_time: Option<Duration>, now: Instant) -> Duration {
        let page = (used / puts.max(1)).max(1);
        let received = self.unsealed.min(used);
        // The fewest pages that the received bytes can belong to. A client that sends several at a
        // time ends them together.
        let begun = received.next_multiple_of(page);
        let left = bytes.next_multiple_of(page).max(begun).min(used) - received;
        let time = match (self.bytes_per_second(), put_time) {
            (Some(rate), _) => Duration::from_secs_f64(left as f64 / rate as f64),
            (None, Some(put_time)) => put_time.mul_f64(left as f64 / used.max(1) as f64),
            (None, None) => SILENT_AFTER,
        };
        self.quiet_for(now) + time
    }
}

fn per_second(bytes: u64, elapsed: Duration) -> u64 {
    let rate = u128::from(bytes) * 1_000_000 / elapsed.as_micros().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

enum ExpectedEnd {
    /// Everything at once, after this time.
    At(Duration),
    /// Page by page, the last one after `end`. `received` bytes of the next page are there.
    Steady { end: Duration, page: u64, received: u64 },
}

impl ExpectedEnd {
    /// Returns the bytes of `used` that are free after `time`.
    fn freed(&self, used: u64, time: Duration) -> u64 {
        match self {
            ExpectedEnd::At(end) if time >= *end => used,
            ExpectedEnd::At(_) => 0,
            ExpectedEnd::Steady { end, .. } if time >= *end => used,
            ExpectedEnd::Steady { end, page, received } => {
                let part = time.as_secs_f64() / end.as_secs_f64();
                let by_then = received + ((used - received.min(&used)) as f64 * part) as u64;
                by_then / page * page
            }
        }
    }
}

/// Running mean of a time.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct MeanTime {
    /// The mean, and the time of its last sample.
    mean: Option<(Duration, Instant)>,
}

impl MeanTime {
    pub(super) fn record(&mut self, time: Duration, now: Instant) {
        let mean = match self.get(now) {
            Some(mean) => (mean * (MEAN_WEIGHT - 1) + time) / MEAN_WEIGHT,
            None => time,
        };
        self.mean = Some((mean, now));
    }

    fn get(&self, now: Instant) -> Option<Duration> {
        self.mean.filter(|(_, at)| now.saturating_duration_since(*at) < MEAN_AGE_MAX).map(|(mean, _)| mean)
    }
}

/// Tells whether most puts become writes to L3 when they end. Both sums lose an eighth with each
/// put.
#[derive(Debug, Default)]
pub(super) struct WrittenPuts {
    /// Bytes of ended puts, without the last one: its write begins after its end.
    ended: u64,
    /// Part of them that was written at once.
    written: u64,
    last: u64,
    /// Bytes of all writes that had begun when the last put ended.
    begun: u64,
}

impl WrittenPuts {
    /// Records the end of a put of `bytes`. `begun` counts the bytes of all writes so far.
    pub(super) fn record(&mut self, bytes: u64, begun: u64) {
        let weight = u64::from(MEAN_WEIGHT);
        // L3 may write other pages meanwhile.
        let written = (begun - self.begun).min(self.last);
        self.ended = self.ended / weight * (weight - 1) + self.last;
        self.written = self.written / weight * (weight - 1) + written;
        (self.last, self.begun) = (bytes, begun);
    }

    /// Returns `true` if the room of most puts becomes free with a write to L3, and not before.
    pub(super) fn are_most(&self) -> bool {
        self.written > self.ended / 2
    }
}

/// Writers whose room a refusal waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    Node,
    Tenant(TenantNumber),
}

/// Bytes that are expected to become free within each step.
pub(super) struct Forecast {
    made_at: Instant,
    /// Writers that it visited.
    #[cfg(test)]
    pub(super) visits: usize,
    freed: [u64; STEPS],
    /// Time in which the whole room is used once, after that.
    pub(super) turn: Duration,
}

/// Computed once: a forecast goes through the steps for each writer.
static STEP_TIMES: LazyLock<[Duration; STEPS]> = LazyLock::new(|| {
    let mut step = Duration::from_millis(1).as_secs_f64();
    std::array::from_fn(|_| {
        let time = Duration::from_secs_f64(step);
        step *= STEP_FACTOR;
        time
    })
});

fn steps() -> impl Iterator<Item = Duration> {
    STEP_TIMES.iter().copied()
}

impl Forecast {
    pub(super) fn is_current(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.made_at) < FORECAST_AGE_MAX
    }

    /// Time until `bytes` are free. Beyond the bytes in use now it counts the puts of connections
    /// ahead, which take turns of `turn_bytes`.
    pub(super) fn time_for(&self, bytes: u64, turn_bytes: u64) -> Duration {
        let found = steps().zip(&self.freed).find(|(_, freed)| **freed >= bytes);
        if let Some((time, _)) = found {
            return time;
        }
        let all = self.freed[STEPS - 1];
        let end = steps().zip(&self.freed).find(|(_, freed)| **freed >= all).map_or(SILENT_AFTER, |(time, _)| time);
        // Whole turns: the puts of a turn often end together, because they began together.
        let turns = ((bytes - all) as f64 / turn_bytes.max(1) as f64).ceil();
        end + self.turn.mul_f64(turns * RETURN_FACTOR)
    }
}

/// Adds the bytes that leave the devices to those that become free. A device first writes
/// `written`, and then the bytes of `ended` puts, as far as there are any. A put that ends within a
/// step may end at its very end, so its write begins with the next step.
fn add_written(freed: &mut [u64; STEPS], written: u64, ended: &[u64; STEPS], bytes_per_second: f64) {
    let mut done = 0.0_f64;
    let (mut before, mut ended_before) = (Duration::ZERO, 0);
    for ((time, freed), ended) in steps().zip(freed).zip(ended) {
        done = (done + bytes_per_second * (time - before).as_secs_f64()).min((written + ended_before) as f64);
        (before, ended_before) = (time, *ended);
        *freed += done.round() as u64;
    }
}

/// A writer that may lose reservations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LosingWriter {
    pub(crate) connection: u64,
    /// True if it made no progress for [`SILENT_AFTER`]. Otherwise its tenant is above its share.
    pub(crate) is_silent: bool,
}

/// Writers in the order of their progress: the search for silent ones.
///
/// Each received piece is progress. Recording it must not take the budget's lock, so the order lags
/// behind: it has for each writer a time that is not later than its last progress. A search moves a
/// writer back that made progress since. So it meets each writer at work at most once per
/// [`SILENT_AFTER`], and otherwise silent ones only.
///
/// A silent writer stays in the order while its device may reach the memory of its aborted puts.
/// [`LOSING_MAX`] of those must not hide the others, so each search begins behind the last one.
#[derive(Default)]
pub(super) struct WriterOrder {
    all: Order,
    by_tenant: BTreeMap<TenantNumber, Order>,
    entries: BTreeMap<u64, (TenantNumber, Instant)>,
    #[cfg(test)]
    pub(super) visits: usize,
}

#[derive(Default)]
struct Order {
    writers: BTreeSet<(Instant, u64)>,
    /// Last writer of the last search, if that found [`LOSING_MAX`].
    searched: Option<(Instant, u64)>,
}

impl WriterOrder {
    /// Adds a connection with its first reservation. Does nothing if it is there already.
    pub(super) fn add(&mut self, connection: u64, tenant: TenantNumber, now: Instant) {
        if !self.entries.contains_key(&connection) {
            self.insert(connection, tenant, now);
        }
    }

    fn insert(&mut self, connection: u64, tenant: TenantNumber, progress: Instant) {
        self.all.writers.insert((progress, connection));
        self.by_tenant.entry(tenant).or_default().writers.insert((progress, connection));
        self.entries.insert(connection, (tenant, progress));
    }

    /// Removes a connection without reserved pages.
    pub(super) fn remove(&mut self, connection: u64) {
        let Some((tenant, progress)) = self.entries.remove(&connection) else { return };
        self.all.writers.remove(&(progress, connection));
        if let Some(of_tenant) = self.by_tenant.get_mut(&tenant) {
            of_tenant.writers.remove(&(progress, connection));
            if of_tenant.writers.is_empty() {
                self.by_tenant.remove(&tenant);
            }
        }
    }

    fn move_to(&mut self, connection: u64, progress: Instant) {
        let Some(&(tenant, _)) = self.entries.get(&connection) else { return };
        self.remove(connection);
        self.insert(connection, tenant, progress);
    }

    /// Next writer of a tenant, or of all, behind a position.
    fn next(&self, tenant: Option<TenantNumber>, after: Option<(Instant, u64)>) -> Option<(Instant, u64)> {
        let order = match tenant {
            Some(tenant) => self.by_tenant.get(&tenant)?,
            None => &self.all,
        };
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        order.writers.range((start, Bound::Unbounded)).next().copied()
    }

    /// Position at which the last search ended, which the next one replaces.
    fn searched(&mut self, tenant: Option<TenantNumber>) -> Option<&mut Option<(Instant, u64)>> {
        let order = match tenant {
            Some(tenant) => self.by_tenant.get_mut(&tenant)?,
            None => &mut self.all,
        };
        Some(&mut order.searched)
    }
}

/// Reserved bytes of a writer, and the number of their puts.
struct WriterRoom<'a> {
    tenant: TenantNumber,
    used: u64,
    puts: u64,
    progress: &'a Mutex<WriterProgress>,
}

impl BudgetState {
    /// Expected release of room by the writers of `scope`. `max` is the whole room.
    pub(super) fn forecast(&self, scope: Scope, max: u64, writes: &WriteLoad, now: Instant) -> Forecast {
        let put_time = self.put_time.get(now);
        let (written, write_time) = writes.load();
        let bytes_per_second = writes.bytes_per_second();
        let puts_are_written = self.written_puts.are_most();
        // Writes to L3 take the room of the node, and not that of a tenant.
        let forecasts_writes = puts_are_written && scope == Scope::Node && bytes_per_second.is_some();
        let mut freed = [0; STEPS];
        // Bytes of puts that have ended by then, and keep their room until they are written.
        let mut ended = [0; STEPS];
        let mut add = |used: u64, end: ExpectedEnd, excess: u64| {
            // A silent writer's puts end without a write.
            let is_written = forecasts_writes && matches!(end, ExpectedEnd::Steady { .. });
            for ((time, freed), ended) in steps().zip(&mut freed).zip(&mut ended) {
                let taken = if time >= EXCESS_AFTER { excess } else { 0 };
                let by_then = end.freed(used, time);
                let to_write = if is_written { by_then } else { 0 };
                *ended += to_write;
                *freed += by_then.max(taken) - to_write;
            }
        };
        let mut measured_bytes = 0;
        let mut measured_rate = 0;
        #[cfg(test)]
        let mut visits = 0;
        for WriterRoom { tenant, used, puts, progress } in self.writers_in(scope) {
            #[cfg(test)]
            {
                visits += 1;
            }
            let progress = progress.lock();
            let excess = match scope {
                Scope::Node => self.excess_of(tenant, used, max),
                Scope::Tenant(_) => 0,
            };
            add(used, progress.end_of(used, (used / puts).max(1), put_time, now), excess);
            if let Some(rate) = progress.bytes_per_second() {
                measured_bytes += used;
                measured_rate += rate;
            }
        }
        if scope == Scope::Node {
            let rate = bytes_per_second.unwrap_or(written as f64 / SILENT_AFTER.as_secs_f64());
            add_written(&mut freed, written, &ended, rate);
        }
        // Those who wait will send about as fast as those who send now.
        let measured =
            (measured_rate > 0).then(|| Duration::from_secs_f64(measured_bytes as f64 / measured_rate as f64));
        let turn = put_time.max(measured).unwrap_or(SILENT_AFTER);
        let turn = turn + write_time.filter(|_| written > 0 || puts_are_written).unwrap_or_default();
        Forecast {
            made_at: now,
            #[cfg(test)]
            visits,
            freed,
            turn,
        }
    }

    /// Time until a connection finds `bytes` of its own room free. See
    /// [`WriterProgress::time_to_free`].
    pub(super) fn time_for_own_room(&self, number: u64, bytes: u64, now: Instant) -> Duration {
        let Some(connection) = self.connections.get(&number) else { return SILENT_AFTER };
        let used = connection.used[Kind::Puts as usize];
        let progress = connection.progress.writer.lock();
        progress.time_to_free(bytes.min(used), (used, connection.puts), self.put_time.get(now), now)
    }

    /// Expected time from a reservation to the end of its put.
    pub(super) fn time_of_put(&self, now: Instant) -> Duration {
        self.put_time.get(now).unwrap_or(SILENT_AFTER)
    }

    fn writers_in(&self, scope: Scope) -> impl Iterator<Item = WriterRoom<'_>> {
        let (first, last) = match scope {
            Scope::Node => (TenantNumber::MIN, TenantNumber::MAX),
            Scope::Tenant(tenant) => (tenant, tenant),
        };
        let wanted = self.writers.range((first, 0, 0)..=(last, u64::MAX, u64::MAX));
        wanted.filter_map(|(_, _, number)| self.connections.get(number)).map(|connection| WriterRoom {
            tenant: connection.tenant,
            used: connection.used[Kind::Puts as usize],
            puts: connection.puts.max(1),
            progress: &connection.progress.writer,
        })
    }

    /// Part of a writer's bytes that its tenant has above its share of `max`.
    fn excess_of(&self, tenant: TenantNumber, used: u64, max: u64) -> u64 {
        let excess = self.tenants.excess(tenant, max);
        if excess == 0 {
            return 0;
        }
        let part = u128::from(used) * u128::from(excess) / u128::from(self.tenants.used(tenant, Kind::Puts).max(1));
        u64::try_from(part).unwrap_or(u64::MAX)
    }

    /// Returns `false` if no writer can be silent for [`SILENT_AFTER`].
    pub(super) fn may_have_silent_writer(&self, now: Instant) -> bool {
        let first = self.writers_order.next(None, None);
        first.is_some_and(|(since, _)| now.saturating_duration_since(since) >= SILENT_AFTER)
    }

    /// Silent writers other than `connection`, at most [`LOSING_MAX`]: the longest silence first,
    /// but those that the last search found come last. `tenant` limits them to one tenant.
    pub(super) fn silent_writers(
        &mut self,
        connection: u64,
        tenant: Option<TenantNumber>,
        now: Instant,
    ) -> Vec<LosingWriter> {
        let mut silent = Vec::new();
        if fail_point!("node.silent-writer-keeps-room") {
            return silent;
        }
        let begin = self.writers_order.searched(tenant).and_then(Option::take);
        let mut last = begin;
        let mut from_the_first = begin.is_none();
        for _ in 0..VISITS_MAX {
            let next = self.writers_order.next(tenant, last);
            // All others made progress later.
            let next = next.filter(|(since, _)| now.saturating_duration_since(*since) >= SILENT_AFTER);
            let Some((since, number)) = next.filter(|next| !from_the_first || begin.is_none_or(|begin| *next <= begin))
            else {
                if from_the_first {
                    break;
                }
                (last, from_the_first) = (None, true);
                continue;
            };
            #[cfg(test)]
            {
                self.writers_order.visits += 1;
            }
            let Some(writer) = self.connections.get(&number) else { break };
            let progress = writer.progress.writer.lock().last_progress;
            if progress > since {
                self.writers_order.move_to(number, progress);
                continue;
            }
            last = Some((since, number));
            if number != connection {
                silent.push(LosingWriter { connection: number, is_silent: true });
            }
            if silent.len() == LOSING_MAX {
                if let Some(searched) = self.writers_order.searched(tenant) {
                    *searched = last;
                }
                break;
            }
        }
        silent
    }

    /// Returns `true` if a connection has waited for so long that tenants above their share lose
    /// the excess to it.
    pub(super) fn may_take_excess(&self, connection: u64, now: Instant) -> bool {
        self.line.waited(connection, now) >= EXCESS_AFTER
    }

    /// Writers of tenants above their share of `max`, if `connection` has waited for long enough:
    /// as many as have `bytes` too much together, and at most [`LOSING_MAX`]. The largest tenants
    /// and their largest writers are chosen. Among them the longest silence comes first.
    pub(super) fn excess_writers(&self, connection: u64, (bytes, max): (u64, u64), now: Instant) -> Vec<LosingWriter> {
        if !self.may_take_excess(connection, now) {
            return Vec::new();
        }
        let tenants = self.tenants.above_share(max, bytes, LOSING_MAX).into_iter();
        let writers =
            tenants.flat_map(|tenant| self.writers.range((tenant, 0, 0)..=(tenant, u64::MAX, u64::MAX)).rev());
        let writers = writers.take(LOSING_MAX).filter_map(|&(_, _, number)| {
            let silence = self.connections.get(&number)?.progress.writer.lock().silence(now);
            Some((silence, LosingWriter { connection: number, is_silent: false }))
        });
        let mut above: Vec<(Duration, LosingWriter)> = writers.collect();
        above.sort_unstable_by_key(|&(silence, writer)| (std::cmp::Reverse(silence), writer.connection));
        above.into_iter().map(|(_, writer)| writer).collect()
    }

    /// Compares the indices of writers and tenants with what they stand for.
    #[cfg(test)]
    pub(super) fn check_indices(&mut self, max: u64) {
        let puts = Kind::Puts as usize;
        let writers = self.connections.iter().filter(|(_, one)| one.used[puts] > 0);
        let writers: BTreeSet<_> = writers.map(|(number, one)| (one.tenant, one.used[puts], *number)).collect();
        assert_eq!(writers, self.writers);
        let ordered: BTreeMap<u64, TenantNumber> =
            writers.iter().map(|&(tenant, _, number)| (number, tenant)).collect();
        let entries = &self.writers_order.entries;
        assert_eq!(ordered, entries.iter().map(|(number, &(tenant, _))| (*number, tenant)).collect());
        for (number, (_, since)) in entries {
            assert!(*since <= self.connections[number].progress.writer.lock().last_progress);
        }
        let tenants: BTreeSet<_> = writers.iter().map(|&(tenant, ..)| tenant).collect();
        let mut above: Vec<_> = tenants.into_iter().filter(|&one| self.tenants.excess(one, max) > 0).collect();
        let mut found = self.tenants.above_share(max, u64::MAX, usize::MAX);
        above.sort_unstable();
        found.sort_unstable();
        assert_eq!(above, found);
    }
}
