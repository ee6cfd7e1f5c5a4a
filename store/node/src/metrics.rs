//! Counters of a node, as Prometheus and as JSON.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Declares the counters once: field, Prometheus name and help.
macro_rules! counters {
    ($($(#[doc = $help:literal])+ $field:ident),+ $(,)?) => {
        /// All counters of a node.
        #[derive(Default)]
        pub(crate) struct Metrics {
            $($(#[doc = $help])+ pub(crate) $field: Counter,)+
            pub(crate) connections: Gauge,
            pub(crate) rdma_lines: Gauge,
            pub(crate) rdma_windows: Gauge,
            /// Bytes under way by kind.
            pub(crate) in_flight: Family<Vec<(String, String)>, Gauge>,
            /// One per device of L3: 1 if it is in use.
            pub(crate) devices: Family<Vec<(String, String)>, Gauge>,
            /// Bytes in DRAM of the namespaces with most.
            pub(crate) namespaces: Family<Vec<(String, String)>, Gauge>,
        }

        impl Metrics {
            /// A registry that shows them.
            pub(crate) fn registry(&self) -> Registry {
                let mut registry = Registry::with_prefix("larder_store");
                $(registry.register(stringify!($field), concat!($($help),+).trim(), self.$field.clone());)+
                registry.register("connections", "Open connections", self.connections.clone());
                registry.register("rdma_lines", "RDMA lines to clients", self.rdma_lines.clone());
                let help = "Pages and parts that clients can reach by RDMA";
                registry.register("rdma_windows", help, self.rdma_windows.clone());
                let help = "Bytes under way: puts, reads, pages asked for, requests";
                registry.register("in_flight_bytes", help, self.in_flight.clone());
                let help = "Whether the device of L3 is in use, and why not";
                registry.register("l3_device_up", help, self.devices.clone());
                registry.register("l2_namespace_bytes", "Bytes in DRAM of a namespace", self.namespaces.clone());
                registry
            }

            /// Name and value of each.
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
    /// Pages served from DRAM
    pages_hit_l2,
    /// Pages served from NVMe
    pages_hit_l3,
    /// Pages read from NVMe for whoever wanted them, lookups that hold included
    pages_read_l3,
    /// Pages asked for and not had
    pages_missed,
    /// Pages sealed
    pages_put,
    /// Reservations answered: there already
    puts_existing,
    /// Answers that said busy
    refusals,
    /// Answers that said busy later than a millisecond after the request was read, or the pages ahead for the same client had left
    refusals_late,
    /// Pages of Gets that were refused
    pages_refused,
    /// Readers that took nothing while others were refused for want of what waited for them: disconnected
    readers_given_up,
    /// Puts of other bytes under a key that was there: refused
    puts_refused,
    /// Reservations refused for want of room
    puts_busy,
    /// Puts that were complete and that nothing in DRAM could go for
    puts_without_room,
    /// Puts given up by their writer, or whose writer went away
    puts_aborted,
    /// Parts whose bytes did not match their checksums on arrival
    parts_corrupt,
    /// Copies in DRAM that were found damaged and dropped
    pages_corrupt_l2,
    /// Pages that left DRAM because there was no room
    pages_evicted_l2,
    /// Pages that left DRAM because their time was over
    pages_expired_l2,
    /// Bytes in DRAM verified in the background
    scrub_bytes,
    /// Pages that could not be written to NVMe
    l3_writes_failed,
    /// Pages followed while being written
    follows,
    /// Pages forgotten on request
    pages_forgotten,
    /// Payload bytes received
    bytes_received,
    /// Bytes of parts copied from the memory of clients on this machine
    bytes_copied,
    /// Payload bytes sent
    bytes_sent,
    /// Payload bytes that clients of this machine were pointed at
    bytes_in_place,
    /// Payload bytes opened to clients that read by RDMA
    bytes_opened_rdma,
    /// Payload bytes that clients wrote by RDMA
    bytes_written_rdma,
    /// RDMA lines to clients made; those beyond the first of a client replace others
    rdma_lines_made,
    /// Connections accepted
    connections_accepted,
    /// Connections closed because of what they sent
    connections_rejected,
}

/// Shows values by label: those of before go.
pub(crate) fn show(family: &Family<Vec<(String, String)>, Gauge>, values: Vec<(Vec<(String, String)>, i64)>) {
    family.clear();
    for (labels, value) in values {
        family.get_or_create(&labels).set(value);
    }
}
