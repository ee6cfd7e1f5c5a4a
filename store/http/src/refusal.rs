//! Refusals: the answer, the metric and the log line.

use crate::metrics::ServerMetrics;
use axum::http::StatusCode;
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;
use tokio::time::Instant;

/// Minimum time between two log lines about refusals of one kind. Strangers must not fill the log.
pub const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Cause of a refused request, or of a connection that the server refused or closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reason {
    Accept,
    Connections,
    Address,
    Replaced,
    HeaderTimeout,
    BodyTimeout,
    WriteTimeout,
    BodySize,
    BodyMemory,
    BodyBroken,
    Host,
    Origin,
    ContentType,
}

impl Reason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Reason::Accept => "accept",
            Reason::Connections => "connections",
            Reason::Address => "address",
            Reason::Replaced => "replaced",
            Reason::HeaderTimeout => "header_timeout",
            Reason::BodyTimeout => "body_timeout",
            Reason::WriteTimeout => "write_timeout",
            Reason::BodySize => "body_size",
            Reason::BodyMemory => "body_memory",
            Reason::BodyBroken => "body_broken",
            Reason::Host => "host",
            Reason::Origin => "origin",
            Reason::ContentType => "content_type",
        }
    }

    /// Text of the log line: what happened, and what to do.
    pub(crate) fn log_text(self) -> &'static str {
        match self {
            Reason::Accept => {
                "cannot accept an HTTP connection; if files ran out, raise the limit of open files [LRD0701]"
            }
            Reason::Connections => {
                "refused an HTTP connection: too many are open; look for the clients that hold them, or raise \
                 --http-connections [LRD0701]"
            }
            Reason::Address => {
                "refused an HTTP connection: its address has too many open; raise --http-connections-per-address if \
                 many clients share the address [LRD0701]"
            }
            Reason::Replaced => {
                "closed the HTTP connection that waited longest for its client, to make room for another; look for \
                 clients that hold connections, or raise --http-connections [LRD0701]"
            }
            Reason::HeaderTimeout => {
                "closed an HTTP connection: its request did not begin or its header did not end in time; raise \
                 --http-header-timeout for slow links [LRD0702]"
            }
            Reason::BodyTimeout => {
                "refused an HTTP request: its body arrived too slowly; raise --http-body-timeout for slow links \
                 [LRD0702]"
            }
            Reason::WriteTimeout => {
                "closed an HTTP connection: its client does not read the answer; raise --http-write-timeout for slow \
                 links [LRD0702]"
            }
            Reason::BodySize => "refused an HTTP request: its body is too long [LRD0702]",
            Reason::BodyMemory => {
                "refused an HTTP request: bodies that are still arriving hold all memory for bodies; raise \
                 --http-body-memory [LRD0702]"
            }
            Reason::BodyBroken => "refused an HTTP request: its connection ended before its body [LRD0702]",
            Reason::Host => {
                "refused an HTTP request: its Host header names neither an address nor this server; add the name with \
                 --allowed-host [LRD0703]"
            }
            Reason::Origin => "refused an HTTP request that a web page of another server sent [LRD0703]",
            Reason::ContentType => "refused an HTTP request: its body is not application/json [LRD0703]",
        }
    }
}

/// Answer to a request that the server refuses before any handler sees it. Each server gives it
/// the form of its own errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    pub message: String,
    /// Value of the header `Retry-After`, in seconds.
    pub retry_after_s: Option<u64>,
    pub(crate) reason: Reason,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, reason: Reason, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), retry_after_s: None, reason }
    }

    /// 503 for a lack of room that usually passes within seconds.
    pub(crate) fn busy(reason: Reason, message: impl Into<String>) -> Self {
        Self { retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, reason, message) }
    }
}

/// Counts and logs the refusals of one server.
#[derive(Debug)]
pub(crate) struct Reporter {
    server: &'static str,
    metrics: ServerMetrics,
    /// Per reason: time of the last line, and refusals since then.
    logged: Mutex<BTreeMap<Reason, (Instant, u64)>>,
}

impl Reporter {
    pub(crate) fn new(server: &'static str, metrics: ServerMetrics) -> Self {
        Self { server, metrics, logged: Mutex::default() }
    }

    pub(crate) fn refused(&self, reason: Reason, peer: IpAddr) {
        self.metrics.count(reason.as_str());
        if let Some(unlogged) = self.may_log(reason, Instant::now()) {
            let server = self.server;
            tracing::warn!(server, %peer, unlogged, "{}", reason.log_text());
        }
    }

    /// Number of refusals since the last line, if the next line is due.
    pub(crate) fn may_log(&self, reason: Reason, now: Instant) -> Option<u64> {
        let mut logged = self.logged.lock();
        match logged.get_mut(&reason) {
            Some((last, unlogged)) if now.duration_since(*last) < LOG_INTERVAL => {
                *unlogged += 1;
                None
            }
            _ => Some(logged.insert(reason, (now, 0)).map_or(0, |(_, unlogged)| unlogged)),
        }
    }

    pub(crate) fn metrics(&self) -> &ServerMetrics {
        &self.metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::HttpMetrics;

    #[test]
    fn a_flood_of_refusals_is_one_log_line_per_interval_and_reason() {
        let reporter = Reporter::new("api", HttpMetrics::default().server("api"));
        let start = Instant::now();
        assert_eq!(reporter.may_log(Reason::Host, start), Some(0));
        assert_eq!(reporter.may_log(Reason::Origin, start), Some(0));
        for _ in 0..500 {
            assert_eq!(reporter.may_log(Reason::Host, start), None);
        }
        assert_eq!(reporter.may_log(Reason::Host, start + LOG_INTERVAL), Some(500));
    }
}
