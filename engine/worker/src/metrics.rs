//! What an engine counts, in Prometheus form.

use crate::api::Role;
use larder_client::PutOutcome;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use std::time::Duration;

/// One label.
type Label = [(&'static str, &'static str); 1];
type States = Family<Label, Histogram, SecondsBuckets>;

/// Makes histograms of 0.1 ms to 400 s.
#[derive(Clone)]
pub(crate) struct SecondsBuckets;

impl MetricConstructor<Histogram> for SecondsBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.0001, 2.0, 22))
    }
}

/// How a request ended, as a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Done,
    Refused,
    Cancelled,
    Deadline,
    Failed,
}

impl Ending {
    fn as_str(self) -> &'static str {
        match self {
            Ending::Done => "done",
            Ending::Refused => "refused",
            Ending::Cancelled => "cancelled",
            Ending::Deadline => "deadline",
            Ending::Failed => "failed",
        }
    }
}

/// Where a page of a prompt came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageSource {
    L1,
    L2,
    L3,
    Followed,
    Computed,
}

impl PageSource {
    fn as_str(self) -> &'static str {
        match self {
            PageSource::L1 => "l1",
            PageSource::L2 => "l2",
            PageSource::L3 => "l3",
            PageSource::Followed => "followed",
            PageSource::Computed => "computed",
        }
    }
}

/// All counters of one engine.
pub struct Metrics {
    registry: Registry,
    requests: Family<Label, Counter>,
    pages: Family<Label, Counter>,
    published: Family<Label, Counter>,
    state_seconds: States,
    state_requests: Family<Label, Gauge>,
    pub(crate) queue: Gauge,
    pub(crate) running: Gauge,
    pub(crate) step_seconds: Histogram,
    pub(crate) first_token_seconds: Histogram,
    pub(crate) tokens_computed: Counter,
    pub(crate) tokens_generated: Counter,
    pub(crate) preemptions: Counter,
    pub(crate) pages_evicted: Counter,
    pub(crate) l1_pages: Gauge,
    pub(crate) l1_pages_free: Gauge,
    pub(crate) l1_pages_cached: Gauge,
    pub(crate) store_nodes: Gauge,
    pub(crate) store_transitions: Counter,
}

impl Metrics {
    /// All at zero, labelled with the engine's role.
    pub fn new(role: Role) -> Self {
        let label = ("role".into(), role.as_str().into());
        let mut registry = Registry::with_prefix_and_labels("larder_engine", std::iter::once(label));
        let r = &mut registry;
        Self {
            requests: add(r, "requests", "Requests by how they ended", Family::default()),
            pages: add(r, "prompt_pages", "Pages of prompts by where they came from", Family::default()),
            published: add(r, "pages_published", "Pages handed to the store by outcome", Family::default()),
            state_seconds: add(
                r,
                "state_seconds",
                "Time that requests spent in each state",
                Family::new_with_constructor(SecondsBuckets),
            ),
            state_requests: add(r, "state_requests", "Requests in each state", Family::default()),
            queue: add(r, "queue_length", "Requests that wait for pages", Gauge::default()),
            running: add(r, "running", "Requests that hold pages", Gauge::default()),
            step_seconds: add(r, "step_seconds", "Time of one step", SecondsBuckets.new_metric()),
            first_token_seconds: add(
                r,
                "first_token_seconds",
                "Time from arrival to the first token",
                SecondsBuckets.new_metric(),
            ),
            tokens_computed: add(
                r,
                "tokens_computed",
                "Tokens whose keys and values were computed",
                Counter::default(),
            ),
            tokens_generated: add(r, "tokens_generated", "Tokens sampled", Counter::default()),
            preemptions: add(r, "preemptions", "Requests put back for want of pages", Counter::default()),
            pages_evicted: add(r, "l1_evicted_pages", "Pages given up by the L1", Counter::default()),
            l1_pages: add(r, "l1_pages", "Pages of the L1 pool", Gauge::default()),
            l1_pages_free: add(r, "l1_pages_free", "Pages of the L1 pool that are free", Gauge::default()),
            l1_pages_cached: add(r, "l1_pages_cached", "Pages kept for later requests", Gauge::default()),
            store_nodes: add(r, "store_nodes", "Store nodes that are connected", Gauge::default()),
            store_transitions: add(
                r,
                "store_transitions",
                "Times the store went away or came back",
                Counter::default(),
            ),
            registry,
        }
    }

    /// The text form.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing into a String cannot fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    pub(crate) fn request_ended(&self, ending: Ending) {
        self.requests.get_or_create(&[("outcome", ending.as_str())]).inc();
    }

    pub(crate) fn prompt_pages(&self, source: PageSource, pages: usize) {
        self.pages.get_or_create(&[("source", source.as_str())]).inc_by(pages as u64);
    }

    pub(crate) fn page_published(&self, outcome: PutOutcome) {
        let outcome = match outcome {
            PutOutcome::Stored => "stored",
            PutOutcome::AlreadyThere => "already_there",
            PutOutcome::Refused => "refused",
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

fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_has_names_labels_and_values() {
        let metrics = Metrics::new(Role::Decode);
        metrics.request_ended(Ending::Done);
        metrics.prompt_pages(PageSource::Followed, 3);
        metrics.state_entered("transfer");
        let text = metrics.encode();
        assert!(text.contains(r#"larder_engine_requests_total{role="decode",outcome="done"} 1"#), "{text}");
        assert!(text.contains(r#"larder_engine_prompt_pages_total{role="decode",source="followed"} 3"#));
        assert!(text.contains(r#"larder_engine_state_requests{role="decode",state="transfer"} 1"#));
    }
}
