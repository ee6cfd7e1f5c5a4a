//! Prometheus metrics of an engine. All names begin with `larder_engine_` and carry the engine's
//! role as a label.

use crate::api::Role;
use larder_client::PutOutcome;
use larder_http::{EventLoopMetrics, HttpMetrics};
use larder_memory::plan::MemoryPlan;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use std::time::Duration;

type Label = [(&'static str, &'static str); 1];
type StateHistograms = Family<Label, Histogram, SecondsBuckets>;

/// Constructor of histograms from 0.1 ms to about 200 s, in powers of two.
#[derive(Clone)]
pub(crate) struct SecondsBuckets;

impl MetricConstructor<Histogram> for SecondsBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.0001, 2.0, 22))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Done,
    Refused,
    Cancelled,
    Deadline,
    Failed,
}

impl RequestOutcome {
    fn as_str(self) -> &'static str {
        match self {
            RequestOutcome::Done => "done",
            RequestOutcome::Refused => "refused",
            RequestOutcome::Cancelled => "cancelled",
            RequestOutcome::Deadline => "deadline",
            RequestOutcome::Failed => "failed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageSource {
    L1,
    L2,
    L3,
    /// L3, read by this engine.
    L3Direct,
    Followed,
    Computed,
}

impl PageSource {
    fn as_str(self) -> &'static str {
        match self {
            PageSource::L1 => "l1",
            PageSource::L2 => "l2",
            PageSource::L3 => "l3",
            PageSource::L3Direct => "l3_gds",
            PageSource::Followed => "followed",
            PageSource::Computed => "computed",
        }
    }
}

/// Pages of the L1 pool.
pub(crate) struct L1Metrics {
    pub(crate) pages: Gauge,
    pub(crate) pages_free: Gauge,
    pub(crate) pages_cached: Gauge,
    pub(crate) pages_corrupt: Counter,
    pub(crate) pages_scrubbed: Counter,
    pub(crate) pages_forgotten: Counter,
}

impl L1Metrics {
    fn new(r: &mut Registry) -> Self {
        Self {
            pages: add(r, "l1_pages", "Capacity of the L1 pool, in pages", Gauge::default()),
            pages_free: add(r, "l1_pages_free", "Free pages of the L1 pool", Gauge::default()),
            pages_cached: add(r, "l1_pages_cached", "Pages cached in the L1 radix tree", Gauge::default()),
            pages_corrupt: add(
                r,
                "l1_corrupt_pages",
                "Pages dropped from L1 because their bytes did not match their checksums",
                Counter::default(),
            ),
            pages_scrubbed: add(
                r,
                "l1_scrubbed_pages",
                "Pages of L1 that the background scrub verified, each once per round",
                Counter::default(),
            ),
            pages_forgotten: add(
                r,
                "l1_forgotten_pages",
                "Pages dropped from L1 because they were forgotten, or because the store refused to take them back",
                Counter::default(),
            ),
        }
    }
}

pub struct Metrics {
    registry: Registry,
    requests: Family<Label, Counter>,
    pages: Family<Label, Counter>,
    published: Family<Label, Counter>,
    state_seconds: StateHistograms,
    state_requests: Family<Label, Gauge>,
    pub(crate) queue: Gauge,
    pub(crate) active: Gauge,
    pub(crate) step_seconds: Histogram,
    pub(crate) first_token_seconds: Histogram,
    pub(crate) tokens_computed: Counter,
    pub(crate) tokens_generated: Counter,
    pub(crate) preemptions: Counter,
    pub(crate) pages_evicted: Counter,
    pub(crate) l1: L1Metrics,
    pub(crate) suspect_pages: Counter,
    pub(crate) unpublished_pages: Gauge,
    pub(crate) abandoned_pages: Counter,
    pub(crate) store_nodes: Gauge,
    pub(crate) store_connection_changes: Counter,
    pub(crate) store_damaged_pages: Counter,
    memory_max: Family<Label, Gauge>,
    pub(crate) http: HttpMetrics,
    pub(crate) event_loop: EventLoopMetrics,
}

impl Metrics {
    pub fn new(role: Role) -> Self {
        let label = ("role".into(), role.as_str().into());
        let mut registry = Registry::with_prefix_and_labels("larder_engine", std::iter::once(label));
        let r = &mut registry;
        let http = HttpMetrics::default();
        http.register(r);
        let event_loop = EventLoopMetrics::default();
        event_loop.register(r);
        Self {
            requests: add(r, "requests", "Finished requests by outcome", Family::default()),
            pages: add(
                r,
                "prompt_pages",
                "Prompt pages by source: reused from l1, l2, l3 or l3_gds (read by this engine from the L3 of a node), \
                 followed (handed over by a prefill engine), computed",
                Family::default(),
            ),
            published: add(r, "pages_published", "Pages put into the store by outcome", Family::default()),
            state_seconds: add(
                r,
                "state_seconds",
                "Time requests spent in each state, in seconds",
                Family::new_with_constructor(SecondsBuckets),
            ),
            state_requests: add(r, "state_requests", "Requests currently in each state", Family::default()),
            queue: add(r, "queue_length", "Requests waiting for L1 pages", Gauge::default()),
            active: add(r, "active_requests", "Admitted requests that hold L1 pages", Gauge::default()),
            step_seconds: add(
                r,
                "step_seconds",
                "Duration of one scheduler step, in seconds",
                SecondsBuckets.new_metric(),
            ),
            first_token_seconds: add(
                r,
                "first_token_seconds",
                "Time from arrival to the first token, in seconds",
                SecondsBuckets.new_metric(),
            ),
            tokens_computed: add(r, "tokens_computed", "Tokens whose KV this engine computed", Counter::default()),
            tokens_generated: add(r, "tokens_generated", "Tokens generated by sampling", Counter::default()),
            preemptions: add(r, "preemptions", "Requests preempted because L1 ran out of pages", Counter::default()),
            pages_evicted: add(r, "l1_evicted_pages", "Pages evicted from the L1 radix tree", Counter::default()),
            l1: L1Metrics::new(r),
            suspect_pages: add(
                r,
                "suspect_pages",
                "Pages from the store that led to values that are not finite, dropped from L1 and from the store",
                Counter::default(),
            ),
            unpublished_pages: add(
                r,
                "unpublished_pages",
                "Pages that the store did not take and that wait for another put",
                Gauge::default(),
            ),
            abandoned_pages: add(
                r,
                "abandoned_pages",
                "Pages that the store did not take and that will not be put again: they left L1 meanwhile, too many \
                 pages waited, or the engine stopped",
                Counter::default(),
            ),
            store_nodes: add(r, "store_nodes", "Connected store nodes", Gauge::default()),
            store_connection_changes: add(
                r,
                "store_connection_changes",
                "Times the connection to the store was lost or restored",
                Counter::default(),
            ),
            store_damaged_pages: add(
                r,
                "store_damaged_pages",
                "Pages from the store whose bytes did not match their key or checksums, and which were not used",
                Counter::default(),
            ),
            memory_max: add(
                r,
                "memory_max_bytes",
                "Bytes of memory that options and model let each part of the engine take",
                Family::default(),
            ),
            http,
            event_loop,
            registry,
        }
    }

    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing into a String cannot fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    pub(crate) fn show_memory_max(&self, plan: &MemoryPlan) {
        for (part, bytes) in plan.parts() {
            self.memory_max.get_or_create(&[("part", part)]).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    pub(crate) fn request_ended(&self, outcome: RequestOutcome) {
        self.requests.get_or_create(&[("outcome", outcome.as_str())]).inc();
    }

    pub(crate) fn prompt_pages(&self, source: PageSource, pages: usize) {
        self.pages.get_or_create(&[("source", source.as_str())]).inc_by(pages as u64);
    }

    pub(crate) fn page_published(&self, outcome: PutOutcome) {
        let outcome = match outcome {
            PutOutcome::Stored => "stored",
            PutOutcome::AlreadyThere => "already_there",
            PutOutcome::Refused => "refused",
            PutOutcome::Forgotten => "forgotten",
            PutOutcome::Retired => "retired",
            PutOutcome::InProgress => "in_progress",
            PutOutcome::Busy { .. } => "busy",
            PutOutcome::Lost => "lost",
        };
        self.published.get_or_create(&[("outcome", outcome)]).inc();
    }

    pub(crate) fn state_entered(&self, state: &'static str) {
        self.state_requests.get_or_create(&[("state", state)]).inc();
    }

    pub(crate) fn state_left(&self, state: &'static str, after: Duration) {
        self.state_requests.get_or_create(&[("state", state)]).dec();
        self.state_seconds.get_or_create(&[("state", state)]).observe(after.as_secs_f64());
    }
}

/// Returns a registry with all metrics of an engine at zero, for generated documentation.
///
/// Labelled metrics have one sample each: an exporter leaves out a family without samples.
pub fn metrics_registry() -> Registry {
    let metrics = Metrics::new(Role::Prefill);
    drop(metrics.requests.get_or_create(&[("outcome", "")]));
    drop(metrics.pages.get_or_create(&[("source", "")]));
    drop(metrics.published.get_or_create(&[("outcome", "")]));
    drop(metrics.state_seconds.get_or_create(&[("state", "")]));
    drop(metrics.state_requests.get_or_create(&[("state", "")]));
    drop(metrics.memory_max.get_or_create(&[("part", "")]));
    metrics.http.sample();
    metrics.registry
}

fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_writes_names_labels_and_values() {
        let metrics = Metrics::new(Role::Decode);
        metrics.request_ended(RequestOutcome::Done);
        metrics.prompt_pages(PageSource::Followed, 3);
        metrics.state_entered("transfer");
        let text = metrics.encode();
        assert!(text.contains(r#"larder_engine_requests_total{role="decode",outcome="done"} 1"#), "{text}");
        assert!(text.contains(r#"larder_engine_prompt_pages_total{role="decode",source="followed"} 3"#));
        assert!(text.contains(r#"larder_engine_state_requests{role="decode",state="transfer"} 1"#));
    }
}
