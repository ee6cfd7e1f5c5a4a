//! Watch over the event loop of a process, so that a stall is visible.
//!
//! A task that computes or blocks delays all others of its thread. Two measures show that:
//!
//! - The *delay* of a timer: all threads were busy, or the one that had the timer. Requests waited
//!   as long.
//! - The *busy time* of a thread between two waits for events. It is the longest poll at least, and
//!   shows a thread that was blocked while others served the requests.
//!
//! Tokio's histogram of poll times would be exact. It is not a part of its stable interface.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::runtime::{Handle, RuntimeMetrics};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Interval of the timer. The delay that it measures lacks at most as much.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(25);
/// Time for which a maximum is kept at least. Twice as long is the most.
const WINDOW: Duration = Duration::from_secs(30);

type SecondsGauge = Gauge<f64, AtomicU64>;

/// Metrics of the event loop of a process. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct EventLoopMetrics {
    delay_max: SecondsGauge,
    busy_max: SecondsGauge,
}

impl EventLoopMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "event_loop_delay_max_seconds",
            "Longest delay of a timer of the event loop in the last 30 to 60 seconds; requests waited as long",
            self.delay_max.clone(),
        );
        registry.register(
            "event_loop_busy_max_seconds",
            "Longest time in the last 30 to 60 seconds that a thread of the event loop worked without a wait for \
             events, in one poll or several",
            self.busy_max.clone(),
        );
    }

    /// Measures the runtime that it runs in, until `stop` is cancelled. Costs 40 wake-ups per
    /// second.
    pub async fn watch(self, stop: CancellationToken) {
        let runtime = Handle::current().metrics();
        let begin = Instant::now();
        let mut threads: Vec<BusyThread> = (0..runtime.num_workers()).map(|at| BusyThread::new(at, &runtime)).collect();
        let (mut delay, mut busy) = (Maximum::new(begin), Maximum::new(begin));
        let mut due = begin + SAMPLE_INTERVAL;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(due) => {}
            }
            let now = Instant::now();
            self.delay_max.set(delay.add(now.saturating_duration_since(due), now).as_secs_f64());
            let longest = threads.iter_mut().filter_map(|thread| thread.ended(&runtime)).max();
            self.busy_max.set(busy.add(longest.unwrap_or_default(), now).as_secs_f64());
            due = now + SAMPLE_INTERVAL;
        }
    }
}

/// Thread of the event loop, as of its last wait for events.
struct BusyThread {
    at: usize,
    waits: u64,
    /// Time spent in tasks.
    busy: Duration,
}

impl BusyThread {
    fn new(at: usize, runtime: &RuntimeMetrics) -> Self {
        Self { at, waits: runtime.worker_park_count(at), busy: runtime.worker_total_busy_duration(at) }
    }

    /// Busy time until a wait since the last call, if there was one. Of several waits, it is the
    /// sum.
    fn ended(&mut self, runtime: &RuntimeMetrics) -> Option<Duration> {
        let new = Self::new(self.at, runtime);
        if new.waits == self.waits {
            return None;
        }
        let busy = new.busy.saturating_sub(self.busy);
        *self = new;
        Some(busy)
    }
}

/// Maximum of the last one or two windows.
struct Maximum {
    begin: Instant,
    current: Duration,
    previous: Duration,
}

impl Maximum {
    fn new(begin: Instant) -> Self {
        Self { begin, current: Duration::ZERO, previous: Duration::ZERO }
    }

    /// Adds a value and returns the maximum.
    fn add(&mut self, value: Duration, now: Instant) -> Duration {
        if now >= self.begin + WINDOW {
            *self = Self { begin: now, current: Duration::ZERO, previous: self.current };
        }
        self.current = self.current.max(value);
        self.current.max(self.previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_millis(400);
    /// The timer may become due at any time of the stall.
    const SEEN: f64 = 0.3;

    /// Waits up to 30 s until a gauge shows the stall.
    async fn shows(gauge: &SecondsGauge) -> bool {
        let until = Instant::now() + Duration::from_secs(30);
        while gauge.get() < SEEN && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        gauge.get() >= SEEN
    }

    #[tokio::test]
    async fn stall_of_the_event_loop_is_seen_as_a_delay() {
        let metrics = EventLoopMetrics::default();
        let stop = CancellationToken::new();
        let watch = tokio::spawn(metrics.clone().watch(stop.clone()));
        tokio::time::sleep(2 * SAMPLE_INTERVAL).await;
        std::thread::sleep(STALL);
        assert!(shows(&metrics.delay_max).await, "{metrics:?}");
        stop.cancel();
        watch.await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn blocked_thread_is_seen_beside_idle_ones() {
        let metrics = EventLoopMetrics::default();
        let stop = CancellationToken::new();
        let watch = tokio::spawn(metrics.clone().watch(stop.clone()));
        let begins = async || {
            while metrics.delay_max.get() <= 0.0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), begins()).await.expect("the watch begins");
        tokio::spawn(async { std::thread::sleep(STALL) }).await.unwrap();
        assert!(shows(&metrics.busy_max).await, "{metrics:?}");
        stop.cancel();
        watch.await.unwrap();
    }

    #[test]
    fn maximum_is_kept_for_one_to_two_windows() {
        let begin = Instant::now();
        let mut maximum = Maximum::new(begin);
        let ms = Duration::from_millis;
        assert_eq!(maximum.add(ms(7), begin), ms(7));
        assert_eq!(maximum.add(ms(3), begin + WINDOW / 2), ms(7));
        assert_eq!(maximum.add(ms(2), begin + WINDOW), ms(7));
        assert_eq!(maximum.add(ms(1), begin + 2 * WINDOW), ms(2));
    }
}
