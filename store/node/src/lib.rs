//! The Larder store node.
//!
//! A node keeps pages in DRAM (L2: [foyer](https://docs.rs/foyer) over one arena of slots) and on NVMe (L3: a segment log),
//! and serves them over TCP. What must always hold:
//!
//! - a page is visible only when it is sealed: every part has landed and checked, and it is never changed afterwards;
//! - the first complete writer of a key wins; later ones are told so;
//! - memory that a transfer can touch is owned by that transfer: a deadline may end the waiting, never the ownership;
//! - everything that a stranger can make grow has a bound: connections, requests, puts, waiting readers, members.
//!
//! Where things are: [`options`] · [`node`] (start, accept, stop) · `connection` (one client) · `puts` (pages being written,
//! and who waits for them) · `tiers` (L2 over L3) · `members` (who registered) · `metrics`, `admin` (axum).
#![forbid(unsafe_code)]

mod admin;
mod connection;
mod identity;
mod members;
mod metrics;
pub mod node;
pub mod options;
mod puts;
mod tiers;

pub use node::{Node, NodeError};
pub use options::NodeOptions;
