//! The Larder store node.
//!
//! A node keeps pages in DRAM (L2: one arena) and on NVMe (L3: one segment log per device). It
//! serves them over TCP, to processes of its own machine in place, and to clients with RDMA
//! devices.
//!
//! Invariants:
//! - A page is visible only after its commit, when all parts have landed and were verified. It
//!   never changes afterwards.
//! - The first complete writer of a key wins. Later writers are told so.
//! - A transfer owns the memory that it can touch. A deadline may end the wait, never the
//!   ownership.
//! - Everything that a client can make grow has a bound: connections, requests, puts, waiting
//!   readers, members.
//!
//! | module | contents |
//! | --- | --- |
//! | [`options`] | settings |
//! | [`node`] | start, accept, shutdown |
//! | [`memory_plan`] | upper bound of the node's memory |
//! | `state` | state that connections and HTTP endpoints share |
//! | `connection` | one client: handshake, requests, transfers |
//! | `budget` | admission control: bytes in flight per connection, tenant and node |
//! | `shares` | namespaces in use, and the floor of each |
//! | `store` | operations on pages, without sockets |
//! | `puts` | open puts, and readers that wait for them |
//! | `page` | a sealed page in DRAM |
//! | `tiers`, `policy` | L2 over L3; the choice of pages for L2, and of writes to L3 |
//! | `devices`, `health` | L3 logs, and the quarantine of failed devices |
//! | `holds` | pages held for readers |
//! | `redis` | the Redis protocol: keys and values over pages |
//! | `events`, `event_limits` | KV events for indexers, and their bounds |
//! | `page_changes` | the queue of changes of L2 for KV events |
//! | `token_ids` | token ids of pages in DRAM |
//! | `rdma` | RDMA devices, channels and grants |
//! | `scrub` | background verification |
//! | `members`, `former_owners` | registered engines; those before the start |
//! | `identity` | name and epoch of the node |
//! | `namespaces` | known and retired namespaces |
//! | `departures`, `explain` | pages that left; reasons of misses |
//! | `metrics`, `admin` | metrics and HTTP endpoints |

// The simulation runs this crate: see store/clippy.toml.
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]
#![forbid(unsafe_code)]

mod admin;
mod budget;
mod connection;
mod departures;
mod descriptors;
mod devices;
mod event_limits;
mod events;
mod explain;
mod former_owners;
mod health;
mod holds;
mod host;
mod identity;
mod members;
pub mod memory_plan;
mod metrics;
#[cfg(all(test, feature = "shuttle"))]
mod model;
mod namespaces;
pub mod node;
pub mod options;
mod page;
mod page_changes;
mod places;
mod policy;
mod puts;
mod rdma;
mod redis;
mod scrub;
mod shares;
mod state;
mod store;
#[cfg(test)]
mod test_support;
mod tiers;
mod token_ids;

pub use larder_io::Executor;
pub use larder_log::QUEUE_DEPTH_DEFAULT as L3_QUEUE_DEPTH_DEFAULT;
pub use larder_rdma::{EndpointOptions, FabricOptions};
pub use metrics::metrics_registry;
pub use node::{Node, NodeError};
pub use options::{L3Device, NodeOptions};
pub use policy::{NamespacePrefix, NamespaceQuota, WritePolicy};
pub use rdma::RdmaOptions;

/// Parts of a node that simulations run without sockets, on any streams.
#[doc(hidden)]
pub mod sim {
    pub use crate::devices::Devices;
    pub use crate::identity::{Identity, IdentityPlace, NextIdentity};
    pub use crate::node::Server;
    pub use crate::page::Page;
    pub use crate::places::Peer;
    pub use crate::policy::*;
    pub use crate::puts::{Presence, Progress, Put, Puts, Waiter};
    pub use crate::rdma::{Rdma, open as open_rdma};
    pub use crate::store::Store;
    pub use crate::tiers::{NamespaceUser, PageLocation, StampedLocation, Tiers, TiersError};
    pub use larder_runtime::Clock;
}
