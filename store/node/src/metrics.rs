//! Metrics of a node, in Prometheus text form and as JSON in `/status`.
//!
//! Counters use relaxed ordering: readers need no consistency between two of them. The registry
//! adds the prefix `larder_store_`, and the text form adds `_total` to counters.

use larder_http::HttpMetrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

pub(crate) type LabelledGauge = Family<Vec<(String, String)>, Gauge>;

/// Declares each counter once. Field name and doc comment become Prometheus name and help text, so
/// the doc comments must say unit and meaning in one sentence each.
macro_rules! counters {
    ($($(#[doc = $help:literal])+ $field:ident),+ $(,)?) => {
        /// Metrics of one node. Cheap to update from any thread.
        #[derive(Default)]
        pub(crate) struct Metrics {
            $($(#[doc = $help])+ pub(crate) $field: Counter,)+
            pub(crate) connections: Gauge,
            pub(crate) rdma_channels: Gauge,
            pub(crate) rdma_grants: Gauge,
            pub(crate) in_flight: LabelledGauge,
            pub(crate) memory_max: LabelledGauge,
            pub(crate) devices: LabelledGauge,
            pub(crate) late_scrubs: LabelledGauge,
            pub(crate) namespaces: LabelledGauge,
        }

        impl Metrics {
            /// Returns a registry that exposes these metrics. It shares their values.
            pub(crate) fn registry(&self) -> Registry {
                let mut registry = Registry::with_prefix("larder_store");
                $(registry.register(stringify!($field), concat!($($help),+).trim(), self.$field.clone());)+
                self.register_gauges(&mut registry);
                registry
            }

            /// Returns all counters and the number of connections, by name.
            pub(crate) fn json(&self) -> serde_json::Value {
                let mut counters = serde_json::Map::new();
                $(counters.insert(stringify!($field).into(), self.$field.get().into());)+
                counters.insert("connections".into(), self.connections.get().into());
                counters.into()
            }
        }
    };
}

counters! {
    /// Pages read from DRAM (L2), without those that were followed
    pages_hit_l2,
    /// Pages read from NVMe (L3), without those that were followed
    pages_hit_l3,
    /// Pages that a reader followed to their end: handed over by their writer, and neither hits nor
    /// misses
    pages_followed,
    /// Hits of pages in L2 that the order of eviction did not learn of, because a queue of hits was
    /// full
    touches_dropped_l2,
    /// Reports of ended generations. Each node that owns keys of the sequence gets at least one
    generations_ended,
    /// Tokens of the generations whose end was reported
    tokens_generated,
    /// Pages read from L3 into DRAM, including those that lookups with a lease load in advance
    pages_read_l3,
    /// Pages of L3 whose place in the files the node told to clients on its machine, which then
    /// read them themselves
    pages_extents,
    /// Requests for extents whose holds ended by time, because the client did not end them
    extent_holds_expired,
    /// Pages that the node did not have: those of reads, and those of lookups with a lease, which
    /// engines make for pages to reuse
    pages_missed,
    /// Pages committed by a put
    pages_put,
    /// Bytes of the pages committed by a put
    put_bytes,
    /// Reservations refused because the page exists already
    puts_existing,
    /// Reservations refused because the page is a copy and may have been forgotten since
    puts_forgotten,
    /// Busy answers
    refusals,
    /// Busy answers that took over 1 ms, measured from the request's arrival or the end of the page
    /// bytes queued before it
    refusals_late,
    /// Pages of GETs that were answered busy
    pages_refused,
    /// Readers disconnected because they received nothing for 1 s while others waited for the
    /// memory that they held
    slow_readers_disconnected,
    /// Clients disconnected because a request of theirs stalled while others waited for the memory
    /// that it held
    stalled_requests_disconnected,
    /// Puts of different bytes under an existing key, refused
    puts_conflicting,
    /// Reservations answered busy because a bound on puts was reached
    puts_busy,
    /// Puts aborted because their writer sent less than 8 KiB in 1 s, or its tenant was above its
    /// share, while others waited for the room
    puts_taken_back,
    /// Complete puts dropped because L2 could not evict enough pages for them
    puts_dropped_l2_full,
    /// Puts aborted by their writer, by a lost connection or by the node
    puts_aborted,
    /// Parts whose bytes did not match their checksums on arrival
    parts_corrupt,
    /// Pages in L2 that were found damaged and dropped
    pages_corrupt_l2,
    /// Pages evicted from L2 to make room, without those that expired
    pages_evicted_l2,
    /// Pages removed from L2 because their time to live ended
    pages_expired_l2,
    /// Bytes of L2 verified by the background scrub
    bytes_scrubbed_l2,
    /// Pages that could not be written to L3
    l3_writes_failed,
    /// Requests to follow a page while it is written
    follows,
    /// Pages deleted on request
    pages_forgotten,
    /// Page bytes received over TCP
    bytes_received,
    /// Page bytes copied from shared client memory, by clients of the same machine
    bytes_copied,
    /// Page bytes sent over TCP
    bytes_sent,
    /// Page bytes that clients of the same machine read in place from the arena
    bytes_in_place,
    /// Page bytes exposed to clients for RDMA reads
    bytes_exposed_rdma,
    /// Page bytes that clients wrote by RDMA
    bytes_written_rdma,
    /// RDMA channels opened; growth while the number of clients is constant means that channels
    /// fail and are replaced
    rdma_channels_opened,
    /// Commands of Redis clients
    redis_commands,
    /// Connections to the Redis port that sent HTTP or TLS, as a browser does for a web page, and
    /// were closed
    redis_other_protocol,
    /// Pages whose token ids the node dropped because the memory for them was full. KV events show
    /// them without token ids
    token_ids_dropped,
    /// KV events published, without those of snapshots
    kv_events_published,
    /// KV events lost because the publisher was behind; it then publishes all pages anew
    kv_events_dropped,
    /// Batches of KV events that subscribers missed because they were too slow
    kv_events_batches_missed,
    /// Connections for KV events that the node refused or closed: too many, stalled, unused, or
    /// another protocol
    kv_events_connections_refused,
    /// Connections accepted
    connections_accepted,
    /// Connections closed by the node because they were idle, or because another one needed the
    /// place before their handshake
    connections_closed_idle,
    /// Connections closed by the node: too many, no memory, wrong protocol version, or malformed
    /// messages
    connections_rejected,
}

impl Metrics {
    fn register_gauges(&self, registry: &mut Registry) {
        registry.register("connections", "Open connections", self.connections.clone());
        registry.register("rdma_channels", "Open RDMA channels to clients", self.rdma_channels.clone());
        let help = "Pages and parts that clients can access by RDMA now";
        registry.register("rdma_grants", help, self.rdma_grants.clone());
        let help = "Bytes in flight by kind: puts, reads, outstanding (requested and not yet sent), requests";
        registry.register("in_flight_bytes", help, self.in_flight.clone());
        let help = "Bytes of memory that the node's options let each part of it take";
        registry.register("memory_max_bytes", help, self.memory_max.clone());
        let help = "1 if the L3 device in directory dir is in use; 0 if not, for the given reason";
        registry.register("l3_device_up", help, self.devices.clone());
        let help = "1 if the scrub of the L3 device in directory dir cannot verify it once a day; 0 if it can";
        registry.register("l3_scrub_late", help, self.late_scrubs.clone());
        let help = "Bytes in L2 of the 64 namespaces that use most";
        registry.register("l2_namespace_bytes", help, self.namespaces.clone());
    }
}

/// Replaces all values of a labelled gauge. Labels that are not in `values` disappear.
pub(crate) fn show(family: &LabelledGauge, values: Vec<(Vec<(String, String)>, i64)>) {
    family.clear();
    for (labels, value) in values {
        family.get_or_create(&labels).set(value);
    }
}

/// Returns a registry with all metrics of a node at zero, for generated documentation.
///
/// Labelled gauges have one sample each: an exporter leaves out a family without samples.
pub fn metrics_registry() -> Registry {
    let metrics = Metrics::default();
    let sample = |gauge: &LabelledGauge, labels: &[&str]| {
        let labels = labels.iter().map(|label| (label.to_string(), String::new())).collect();
        gauge.get_or_create(&labels).set(0);
    };
    sample(&metrics.in_flight, &["kind"]);
    sample(&metrics.memory_max, &["part"]);
    sample(&metrics.devices, &["dir", "reason"]);
    sample(&metrics.late_scrubs, &["dir"]);
    sample(&metrics.namespaces, &["namespace"]);
    let http = HttpMetrics::default();
    http.sample();
    let mut registry = metrics.registry();
    http.register(&mut registry);
    registry
}
