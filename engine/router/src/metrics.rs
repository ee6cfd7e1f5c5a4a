//! Metrics of a router in Prometheus text form, and the subset of counters that the status page
//! shows.
//!
//! All counters use relaxed ordering: readers need no consistency between two of them.

use crate::engines::EngineTable;
use larder_http::{EventLoopMetrics, HttpMetrics};
use larder_memory::plan::MemoryPlan;
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

/// Status label of requests whose client disconnected before the answer was complete. nginx
/// established the number; no client ever receives it.
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

/// Reason for a refusal that protects the router's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    BodyTooLarge,
    PromptTooLong,
    TemplateBusy,
    PromptsBusy,
    ConstraintExceeded,
    ConstraintBusy,
}

impl RefusalReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::BodyTooLarge => "body_too_large",
            Self::PromptTooLong => "prompt_too_long",
            Self::TemplateBusy => "template_busy",
            Self::PromptsBusy => "prompts_busy",
            Self::ConstraintExceeded => "constraint_exceeded",
            Self::ConstraintBusy => "constraint_busy",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PartLabels {
    part: &'static str,
}

#[derive(Debug)]
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    ttft_seconds: Histogram,
    request_seconds: Histogram,
    tokens_in: Counter,
    tokens_out: Counter,
    tokens_cached: Counter,
    retries: Family<RoleLabels, Counter>,
    refusals: Family<ReasonLabels, Counter>,
    template_stops: Counter,
    engines_expelled: Counter,
    inflight: Gauge,
    engines_up: Family<RoleLabels, Gauge>,
    memory_max: Family<PartLabels, Gauge>,
    finished: AtomicU64,
    failed: AtomicU64,
    http: HttpMetrics,
    event_loop: EventLoopMetrics,
    registry: Registry,
}

/// Counters in the admin API's status response. Fields that the sender did not know read as 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    pub requests: u64,
    /// Part of `requests` with a status of 400 or above. Includes requests whose client
    /// disconnected.
    pub requests_failed: u64,
    pub inflight: u64,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub tokens_cached: u64,
    pub retries_prefill: u64,
    pub retries_decode: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        // Buckets from 1 ms to 17 minutes: from a cached one-token answer to more than the default
        // request timeout.
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 21));
        let mut metrics = Self {
            requests: Family::default(),
            ttft_seconds: seconds(),
            request_seconds: seconds(),
            tokens_in: Counter::default(),
            tokens_out: Counter::default(),
            tokens_cached: Counter::default(),
            retries: Family::default(),
            refusals: Family::default(),
            template_stops: Counter::default(),
            engines_expelled: Counter::default(),
            inflight: Gauge::default(),
            engines_up: Family::default(),
            memory_max: Family::default(),
            finished: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            http: HttpMetrics::default(),
            event_loop: EventLoopMetrics::default(),
            registry: Registry::default(),
        };
        // Registered after construction: the registry holds clones that share the counters.
        metrics.registry = metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&self) -> Registry {
        let mut r = Registry::with_prefix("larder_router");
        r.register(
            "requests",
            "Finished requests by endpoint and HTTP status; 499 means that the client disconnected",
            self.requests.clone(),
        );
        let ttft = self.ttft_seconds.clone();
        r.register_with_unit("ttft", "Time from the arrival of a request to its first token", Unit::Seconds, ttft);
        let whole = self.request_seconds.clone();
        r.register_with_unit(
            "request",
            "Time from the arrival of a request to the end of its answer",
            Unit::Seconds,
            whole,
        );
        r.register("tokens_in", "Prompt tokens of completed answers", self.tokens_in.clone());
        r.register("tokens_out", "Generated tokens of completed answers", self.tokens_out.clone());
        r.register("tokens_cached", "Prompt tokens that a cache provided", self.tokens_cached.clone());
        r.register("retries", "Calls repeated on another engine after a failure, by role", self.retries.clone());
        r.register(
            "refusals",
            "Requests refused before work, by reason: body_too_large, prompt_too_long, template_busy, prompts_busy, constraint_exceeded or constraint_busy",
            self.refusals.clone(),
        );
        r.register(
            "template_stops",
            "Renderings of a chat template that exceeded their time or memory; their process was killed",
            self.template_stops.clone(),
        );
        r.register(
            "engines_expelled",
            "Engines dropped for a while because they sent a wrong answer",
            self.engines_expelled.clone(),
        );
        r.register("inflight", "Requests in progress", self.inflight.clone());
        r.register(
            "engines_up",
            "Engines that accept requests, by role; excludes engines behind an open circuit breaker",
            self.engines_up.clone(),
        );
        r.register(
            "memory_max_bytes",
            "Bytes of memory that the router's limits let each part of it take; template workers are processes of their own",
            self.memory_max.clone(),
        );
        self.http.register(&mut r);
        self.event_loop.register(&mut r);
        r
    }

    pub(crate) fn http(&self) -> &HttpMetrics {
        &self.http
    }

    pub(crate) fn event_loop(&self) -> &EventLoopMetrics {
        &self.event_loop
    }

    pub fn begin(self: &Arc<Self>, endpoint: &'static str) -> RequestRecord {
        self.inflight.inc();
        RequestRecord { metrics: self.clone(), endpoint, arrived: Instant::now(), status: STATUS_CLIENT_GONE }
    }

    pub fn count_retry(&self, role: Role) {
        self.retries.get_or_create(&RoleLabels { role: role.as_str() }).inc();
    }

    pub fn count_refusal(&self, reason: RefusalReason) {
        self.refusals.get_or_create(&ReasonLabels { reason: reason.as_str() }).inc();
    }

    pub fn count_template_stop(&self) {
        self.template_stops.inc();
    }

    pub fn count_expulsion(&self) {
        self.engines_expelled.inc();
    }

    pub(crate) fn show_memory_max(&self, plan: &MemoryPlan) {
        for (part, bytes) in plan.parts() {
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            self.memory_max.get_or_create(&PartLabels { part }).set(bytes);
        }
    }

    /// Adds the token counts of a completed answer. `cached` is a part of `tokens_in`.
    pub fn count_tokens(&self, tokens_in: u32, tokens_out: u32, cached: u32) {
        self.tokens_in.inc_by(u64::from(tokens_in));
        self.tokens_out.inc_by(u64::from(tokens_out));
        self.tokens_cached.inc_by(u64::from(cached));
    }

    /// Snapshot of the counters. Values may be a few requests apart.
    pub fn counters(&self) -> Counters {
        // Each record increments once and decrements once on drop.
        let inflight = self.inflight.get();
        debug_assert!(inflight >= 0, "requests in progress: {inflight}");
        let retries = |role: Role| self.retries.get_or_create(&RoleLabels { role: role.as_str() }).get();
        Counters {
            requests: self.finished.load(Ordering::Relaxed),
            requests_failed: self.failed.load(Ordering::Relaxed),
            inflight: u64::try_from(inflight).unwrap_or(0),
            tokens_in: self.tokens_in.get(),
            tokens_out: self.tokens_out.get(),
            tokens_cached: self.tokens_cached.get(),
            retries_prefill: retries(Role::Prefill),
            retries_decode: retries(Role::Decode),
        }
    }

    /// All metrics in OpenMetrics text form. Counts the admitted `engines` at the time of the
    /// scrape.
    pub fn text(&self, engines: &EngineTable) -> Result<String, std::fmt::Error> {
        for role in [Role::Prefill, Role::Decode] {
            // Computed at scrape time. A gauge kept up to date would need a hook in the circuit
            // breaker.
            let up = engines.list().iter().filter(|e| e.info.role == role && e.is_admitted()).count();
            self.engines_up.get_or_create(&RoleLabels { role: role.as_str() }).set(up as i64);
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Converts metrics from OpenMetrics text to Prometheus' older form: the names of counters have
/// their suffix in the comments too, and there are no units and no end mark.
pub(crate) fn prometheus_text(openmetrics: &str) -> String {
    let mut counters = std::collections::BTreeSet::new();
    for line in openmetrics.lines() {
        if let Some(name) = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter")) {
            counters.insert(name);
        }
    }
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines().filter(|line| !line.starts_with("# UNIT ") && *line != "# EOF") {
        let comment = ["# HELP ", "# TYPE "].into_iter().find_map(|kind| Some((kind, line.strip_prefix(kind)?)));
        match comment.and_then(|(kind, rest)| Some((kind, rest.split_once(' ')?))) {
            Some((kind, (name, rest))) if counters.contains(name) => {
                text.extend([kind, name, "_total ", rest]);
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Returns a registry with all metrics of a router at zero, for generated documentation.
///
/// Labelled metrics have one sample each: an exporter leaves out a family without samples.
pub fn metrics_registry() -> Registry {
    let metrics = Metrics::default();
    drop(metrics.requests.get_or_create(&RequestLabels { endpoint: "", status: 0 }));
    drop(metrics.retries.get_or_create(&RoleLabels { role: "" }));
    drop(metrics.refusals.get_or_create(&ReasonLabels { reason: "" }));
    drop(metrics.engines_up.get_or_create(&RoleLabels { role: "" }));
    drop(metrics.memory_max.get_or_create(&PartLabels { part: "" }));
    metrics.http.sample();
    metrics.registry
}

/// Record of one request, written to the metrics on drop. Without a call to [`RequestRecord::end`]
/// it counts as [`STATUS_CLIENT_GONE`], because only a disconnect drops a request early.
pub struct RequestRecord {
    metrics: Arc<Metrics>,
    endpoint: &'static str,
    arrived: Instant,
    status: u16,
}

impl RequestRecord {
    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    pub fn first_token(&self) {
        self.metrics.ttft_seconds.observe(self.arrived.elapsed().as_secs_f64());
    }

    /// Ends the record with an HTTP status. A stream that failed after its headers passes the
    /// status that it would have had.
    pub fn end(mut self, status: u16) {
        self.status = status;
    }

    pub fn end_with_tokens(self, tokens_in: u32, tokens_out: u32, cached: u32) {
        self.metrics.count_tokens(tokens_in, tokens_out, cached);
        self.end(200);
    }
}

impl Drop for RequestRecord {
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
    fn older_form_names_counters_by_their_samples() {
        let text = "# HELP a Things.\n# TYPE a counter\na_total{x=\"1\"} 2\n# HELP b_seconds Time.\n\
                    # TYPE b_seconds histogram\n# UNIT b_seconds seconds\nb_seconds_sum 1.0\n# EOF\n";
        let expected = "# HELP a_total Things.\n# TYPE a_total counter\na_total{x=\"1\"} 2\n# HELP b_seconds Time.\n\
                        # TYPE b_seconds histogram\nb_seconds_sum 1.0\n";
        assert_eq!(prometheus_text(text), expected);
    }

    #[test]
    fn dropped_record_counts_as_a_client_disconnect() {
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
