//! Metrics of the HTTP servers of one process.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServerLabel {
    server: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    server: &'static str,
    reason: &'static str,
}

/// Metrics of all HTTP servers of a process. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct HttpMetrics {
    connections: Family<ServerLabel, Gauge>,
    body_bytes: Family<ServerLabel, Gauge>,
    refusals: Family<RefusalLabels, Counter>,
}

impl HttpMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("http_connections", "Open HTTP connections by server", self.connections.clone());
        let help = "Bytes held for HTTP bodies that are arriving or not yet parsed, beyond 64 KiB of each";
        registry.register("http_body_bytes", help, self.body_bytes.clone());
        registry.register(
            "http_refusals",
            "HTTP requests that a server refused and connections that it refused or closed, by reason",
            self.refusals.clone(),
        );
    }

    /// Adds a sample of each metric, for generated documentation. An exporter leaves out a family
    /// without samples.
    pub fn sample(&self) {
        drop(self.connections.get_or_create(&ServerLabel { server: "" }));
        drop(self.body_bytes.get_or_create(&ServerLabel { server: "" }));
        drop(self.refusals.get_or_create(&RefusalLabels { server: "", reason: "" }));
    }

    pub(crate) fn server(&self, server: &'static str) -> ServerMetrics {
        ServerMetrics { server, metrics: self.clone() }
    }
}

/// Metrics of one server.
#[derive(Debug, Clone)]
pub(crate) struct ServerMetrics {
    server: &'static str,
    metrics: HttpMetrics,
}

impl ServerMetrics {
    pub(crate) fn count(&self, reason: &'static str) {
        let labels = RefusalLabels { server: self.server, reason };
        self.metrics.refusals.get_or_create(&labels).inc();
    }

    pub(crate) fn body_bytes(&self) -> Gauge {
        self.metrics.body_bytes.get_or_create(&ServerLabel { server: self.server }).clone()
    }

    /// Counts a connection until the returned guard is dropped.
    pub(crate) fn connection(&self) -> OpenConnection {
        let gauge = self.metrics.connections.get_or_create(&ServerLabel { server: self.server }).clone();
        gauge.inc();
        OpenConnection(gauge)
    }
}

#[derive(Debug)]
pub(crate) struct OpenConnection(Gauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
