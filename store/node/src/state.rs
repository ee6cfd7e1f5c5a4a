//! State that the connections and HTTP endpoints of a node share.

use crate::budget::TenantNumber;
use crate::connection::{ArrivingBodies, BulkScheduler, ExtentLimits, Refusals};
use crate::host::Host;
use crate::identity::Identity;
use crate::members::Members;
use crate::metrics::Metrics;
use crate::rdma::{self, Rdma};
use crate::store::Store;
use larder_http::HttpMetrics;
use larder_rdma::NicStats;
use larder_runtime::now;
use larder_wire::{ArenaListenerInfo, PROTOCOL_VERSION_MIN};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// State that all connections of a node share. Immutable, except for parts that have locks or
/// atomics of their own.
pub(crate) struct NodeState {
    pub(crate) identity: Identity,
    pub(crate) store: Store,
    pub(crate) members: Members,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) registry: Registry,
    pub(crate) http: HttpMetrics,
    /// Address of the arena listener, sent in the handshake. `None` if the arena is not shared: all
    /// clients use TCP then.
    pub(crate) arena_listener: Option<ArenaListenerInfo>,
    pub(crate) protocol_max: u16,
    pub(crate) busy_poll: Duration,
    pub(crate) rdma: Option<Rdma>,
    /// `None` in a simulation.
    pub(crate) host: Option<Host>,
    pub(crate) bulk_scheduler: BulkScheduler,
    pub(crate) refusals: Refusals,
    pub(crate) arriving: ArrivingBodies,
    pub(crate) extents: ExtentLimits,
    started: Instant,
}

impl NodeState {
    pub(crate) fn new(
        identity: Identity,
        store: Store,
        arena_listener: Option<ArenaListenerInfo>,
        rdma: Option<Rdma>,
        protocol_max: u16,
        busy_poll: Duration,
        host: Option<Host>,
    ) -> Arc<NodeState> {
        let metrics = store.metrics().clone();
        let arriving = ArrivingBodies::new(store.options().stall_timeout);
        let http = HttpMetrics::default();
        let mut registry = metrics.registry();
        http.register(&mut registry);
        Arc::new(NodeState {
            store,
            members: Members::default(),
            registry,
            http,
            metrics,
            arena_listener,
            protocol_max,
            busy_poll,
            rdma,
            host,
            bulk_scheduler: BulkScheduler::new(),
            refusals: Refusals::new(),
            arriving,
            extents: ExtentLimits::default(),
            started: now(),
            identity,
        })
    }

    /// Maximum time from a connection to the end of its first message.
    pub(crate) fn handshake_timeout(&self) -> Duration {
        self.store.options().handshake_timeout
    }

    /// Maximum time without a byte while a frame, a reply or a value is sent or received.
    pub(crate) fn stall_timeout(&self) -> Duration {
        self.store.options().stall_timeout
    }

    /// Disconnects clients whose requests stall: those of one tenant, or all. To be called when
    /// the tenant or the node lacks memory for requests.
    pub(crate) fn end_stalled_bodies(&self, tenant: Option<TenantNumber>) {
        let ended = self.arriving.end_stalled(tenant);
        self.metrics.stalled_requests_disconnected.inc_by(ended);
        if ended > 0
            && let Some(searches) = self.refusals.stalled_requests.record()
        {
            tracing::warn!(ended, searches, "disconnected clients whose requests stalled while others needed memory");
        }
    }

    /// Returns the node's state as JSON, for `/status`. `docs/operations.md` describes the fields.
    pub(crate) fn status(&self) -> serde_json::Value {
        let mut status = self.store.status();
        status["node_id"] = self.identity.node_id.clone().into();
        status["epoch"] = self.identity.epoch.into();
        status["uptime_seconds"] = now().saturating_duration_since(self.started).as_secs().into();
        if let Some(rdma) = &self.rdma {
            status["rdma"] = rdma::status(&rdma.fabric);
        }
        status["version"] = env!("CARGO_PKG_VERSION").into();
        status["protocol"] = serde_json::json!({ "min": PROTOCOL_VERSION_MIN, "max": self.protocol_max });
        // The clock that ends times to live.
        status["unix_ms"] = self.store.tiers().clock().now_unix_ms().into();
        status["host"] = self.host.as_ref().map(Host::status).into();
        status["members"] = self.members.list(now()).len().into();
        status
    }

    /// Updates the gauges. The exporter calls it before every export: unlike the counters, gauges
    /// are derived from other state on demand.
    pub(crate) fn refresh_metrics(&self) {
        self.store.refresh_metrics();
        let stats: Vec<NicStats> =
            self.rdma.iter().flat_map(|rdma| rdma.fabric.nics()).map(|nic| nic.stats()).collect();
        let sum = |of: fn(&NicStats) -> u64| i64::try_from(stats.iter().map(of).sum::<u64>()).unwrap_or(i64::MAX);
        self.metrics.rdma_channels.set(sum(|stats| stats.endpoints));
        self.metrics.rdma_grants.set(sum(|stats| stats.grants));
    }
}
