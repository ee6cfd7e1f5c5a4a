//! Counters of a node, as Prometheus and as JSON.

use prometheus_client::metrics::counter::Counter;
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
        }

        impl Metrics {
            /// A registry that shows them.
            pub(crate) fn registry(&self) -> Registry {
                let mut registry = Registry::with_prefix("larder_store");
                $(registry.register(stringify!($field), concat!($($help),+).trim(), self.$field.clone());)+
                registry.register("connections", "Open connections", self.connections.clone());
                registry
            }

            /// Name and value of each.
            pub(crate) fn json(&self) -> serde_json::Value {
                serde_json::json!({ $(stringify!($field): self.$field.get(),)+ "connections": self.connections.get() })
            }
        }
    };
}

counters! {
    /// Pages served from DRAM
    pages_hit_l2,
    /// Pages served from NVMe
    pages_hit_l3,
    /// Pages asked for and not had
    pages_missed,
    /// Pages sealed
    pages_put,
    /// Reservations answered: there already
    puts_existing,
    /// Puts of other bytes under a key that was there: refused
    puts_refused,
    /// Reservations refused for want of room
    puts_busy,
    /// Puts given up by their writer, or whose writer went away
    puts_aborted,
    /// Parts whose bytes did not match their checksums on arrival
    parts_corrupt,
    /// Copies in DRAM that were found damaged and dropped
    pages_corrupt_l2,
    /// Pages that could not be written to NVMe
    l3_writes_failed,
    /// Pages followed while being written
    follows,
    /// Pages forgotten on request
    pages_forgotten,
    /// Payload bytes received
    bytes_received,
    /// Payload bytes sent
    bytes_sent,
    /// Connections accepted
    connections_accepted,
    /// Connections closed because of what they sent
    connections_rejected,
}
