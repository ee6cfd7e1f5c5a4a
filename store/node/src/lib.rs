//! The Larder store node.
//!
//! A node keeps pages in DRAM (L2: [foyer](https://docs.rs/foyer) over one arena of slots) and on NVMe (L3: segment logs),
//! and serves them over TCP, and to its own machine in place. What must always hold:
//!
//! - a page is visible only when it is sealed: every part has landed and checked, and it is never changed afterwards;
//! - the first complete writer of a key wins; later ones are told so;
//! - memory that a transfer can touch is owned by that transfer: a deadline may end the waiting, never the ownership;
//! - everything that a stranger can make grow has a bound: connections, requests, puts, waiting readers, members.
//!
//! Where things are: [`options`] · [`node`] (start, accept, stop) · `connection` (one client) · `store` (all but the sockets) ·
//! `budget` (bytes in flight) · `holds` (pages held for readers) · `rdma` (devices, and what is open through them) · `puts` (pages being put, and who waits for them) · `tiers` (L2 over L3) · `policy` (what L2 keeps, and what is written to
//! L3 when) · `writing` (pages on their way to L3) · `devices`, `health` (the logs of L3) · `scrub` · `members` (who
//! registered) · `clock` · `metrics`, `admin` (axum).
#![forbid(unsafe_code)]

mod admin;
mod budget;
mod clock;
mod connection;
mod devices;
mod health;
mod holds;
mod identity;
mod members;
mod metrics;
pub mod node;
pub mod options;
mod policy;
mod puts;
mod rdma;
mod scrub;
mod store;
mod tiers;
mod writing;

pub use larder_device::Executor;
pub use larder_rdma::{EndpointOptions, FabricOptions};
pub use node::{Node, NodeError};
pub use options::{L3Device, NamespacePrefix, NamespaceQuota, NodeOptions, WritePolicy};
pub use rdma::RdmaOptions;

/// A node without sockets, on any streams or on none, and its rules without a node: for simulations.
#[doc(hidden)]
pub mod sim {
    pub use crate::clock::Clock;
    pub use crate::devices::Devices;
    pub use crate::node::Server;
    pub use crate::policy::*;
    pub use crate::puts::{Presence, Progress, Put, Waiter};
    pub use crate::rdma::{Rdma, open as open_rdma};
    pub use crate::store::Store;
    pub use crate::tiers::{Page, TiersError};
}
