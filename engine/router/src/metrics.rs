//! Counters of a router, as Prometheus and as JSON.

use crate::engines::EngineTable;
use larder_worker::api::Role;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Status under which a request is counted whose client went away before its answer was complete.
pub const STATUS_CLIENT_GONE: u16 = 499;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
}

/// All counters of a router.
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    ttft_seconds: Histogram,
    request_seconds: Histogram,
    tokens_in: Counter,
    tokens_out: Counter,
    tokens_cached: Counter,
    retries: Family<RoleLabels, Counter>,
    inflight: Gauge,
    engines_up: Family<RoleLabels, Gauge>,
    finished: AtomicU64,
    failed: AtomicU64,
    registry: Registry,
}

/// The counters that `status` shows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Requests answered, in whatever way.
    pub requests: u64,
    /// Of those, with a status of 400 or above, clients that went away included.
    pub requests_failed: u64,
    /// Requests being answered now.
    pub inflight: u64,
    /// Prompt tokens of complete answers.
    pub tokens_in: u64,
    /// Generated tokens of complete answers.
    pub tokens_out: u64,
    /// Prompt tokens that came from a cache.
    pub tokens_cached: u64,
    /// Prefills that went to another engine after a failure.
    pub retries_prefill: u64,
    /// Decodes that went to another engine after a failure.
    pub retries_decode: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        // 1 ms to 131 s.
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let mut metrics = Self {
            requests: Family::default(),
            ttft_seconds: seconds(),
            request_seconds: seconds(),
            tokens_in: Counter::default(),
            tokens_out: Counter::default(),
            tokens_cached: Counter::default(),
            retries: Family::default(),
            inflight: Gauge::default(),
            engines_up: Family::default(),
            finished: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            registry: Registry::default(),
        };
        metrics.registry = metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&self) -> Registry {
        let mut r = Registry::with_prefix("larder_router");
        r.register("requests", "Requests by endpoint and HTTP status", self.requests.clone());
        let ttft = self.ttft_seconds.clone();
        r.register_with_unit("ttft", "Time from a request's arrival to its first token", Unit::Seconds, ttft);
        let whole = self.request_seconds.clone();
        r.register_with_unit("request", "Time from a request's arrival to its end", Unit::Seconds, whole);
        r.register("tokens_in", "Prompt tokens of complete answers", self.tokens_in.clone());
        r.register("tokens_out", "Generated tokens of complete answers", self.tokens_out.clone());
        r.register("tokens_cached", "Prompt tokens that came from a cache", self.tokens_cached.clone());
        r.register("retries", "Calls that went to another engine after a failure", self.retries.clone());
        r.register("inflight", "Requests being answered", self.inflight.clone());
        r.register("engines_up", "Engines that requests may go to", self.engines_up.clone());
        r
    }

    /// Counts a request until the record is dropped.
    pub fn begin(self: &Arc<Self>, endpoint: &'static str) -> Record {
        self.inflight.inc();
        Record { metrics: self.clone(), endpoint, arrived: Instant::now(), status: STATUS_CLIENT_GONE }
    }

    /// A call went to another engine after a failure.
    pub fn count_retry(&self, role: Role) {
        self.retries.get_or_create(&RoleLabels { role: role.as_str() }).inc();
    }

    /// Tokens of a complete answer.
    pub fn count_tokens(&self, tokens_in: u32, tokens_out: u32, cached: u32) {
        self.tokens_in.inc_by(u64::from(tokens_in));
        self.tokens_out.inc_by(u64::from(tokens_out));
        self.tokens_cached.inc_by(u64::from(cached));
    }

    /// The counters for people.
    pub fn counters(&self) -> Counters {
        let retries = |role: Role| self.retries.get_or_create(&RoleLabels { role: role.as_str() }).get();
        Counters {
            requests: self.finished.load(Ordering::Relaxed),
            requests_failed: self.failed.load(Ordering::Relaxed),
            inflight: self.inflight.get().max(0) as u64,
            tokens_in: self.tokens_in.get(),
            tokens_out: self.tokens_out.get(),
            tokens_cached: self.tokens_cached.get(),
            retries_prefill: retries(Role::Prefill),
            retries_decode: retries(Role::Decode),
        }
    }

    /// All metrics in Prometheus text form.
    pub fn text(&self, engines: &EngineTable) -> Result<String, std::fmt::Error> {
        for role in [Role::Prefill, Role::Decode] {
            let up = engines.list().iter().filter(|e| e.info.role == role && e.is_admitted()).count();
            self.engines_up.get_or_create(&RoleLabels { role: role.as_str() }).set(up as i64);
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// One request's entry in the metrics, made when it is dropped. Unless an end was noted, its client went away.
pub struct Record {
    metrics: Arc<Metrics>,
    endpoint: &'static str,
    arrived: Instant,
    status: u16,
}

impl Record {
    /// When the request came.
    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    /// The first token is there.
    pub fn first_token(&self) {
        self.metrics.ttft_seconds.observe(self.arrived.elapsed().as_secs_f64());
    }

    /// The answer is complete, with this HTTP status; for a stream that failed, the status it would have had.
    pub fn end(mut self, status: u16) {
        self.status = status;
    }

    /// The answer is complete, and these are its tokens.
    pub fn end_with_tokens(self, tokens_in: u32, tokens_out: u32, cached: u32) {
        self.metrics.count_tokens(tokens_in, tokens_out, cached);
        self.end(200);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let m = &self.metrics;
        m.inflight.dec();
        m.finished.fetch_add(1, Ordering::Relaxed);
        if self.status >= 400 {
            m.failed.fetch_add(1, Ordering::Relaxed);
        }
        m.request_seconds.observe(self.arrived.elapsed().as_secs_f64());
        m.requests.get_or_create(&RequestLabels { endpoint: self.endpoint, status: self.status }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_record_counts_as_a_client_that_left() {
        let metrics = Arc::new(Metrics::default());
        metrics.begin("completions").end_with_tokens(10, 5, 8);
        drop(metrics.begin("completions"));
        let running = metrics.begin("completions");
        metrics.count_retry(Role::Prefill);
        let counters = metrics.counters();
        assert_eq!((counters.requests, counters.requests_failed, counters.inflight), (2, 1, 1));
        assert_eq!((counters.tokens_in, counters.tokens_out, counters.tokens_cached), (10, 5, 8));
        assert_eq!((counters.retries_prefill, counters.retries_decode), (1, 0));
        drop(running);
        let text = metrics.text(&EngineTable::default()).unwrap();
        assert!(text.contains(r#"larder_router_requests_total{endpoint="completions",status="499"} 2"#), "{text}");
        assert!(text.contains(r#"larder_router_engines_up{role="decode"} 0"#), "{text}");
    }
}
