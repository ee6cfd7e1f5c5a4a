//! Connections to store nodes: the lower layer of the client.
//!
//! One [`NodeHandle`] supervises one node of the URL. While the node is reachable, the handle holds
//! a [`ConnectionPool`]. Operations pick a [`Connection`] from it and exchange messages.
//!
//! Invariants:
//! - Nothing in this layer refers to operations.
//! - Every request ends at its deadline. Its response handler then returns the caller's buffers.
//! - When a connection ends, all of its requests end with it.
//!
//! From the bottom up:
//! - `handlers`: receive the responses of one request, and check them.
//! - `releases`, `outbox`, `pending`, `rdma_channels`: parts of a connection, with private state.
//! - `multiplex`: the connection itself, which carries many requests at a time.
//! - `parts`, `rdma_writes`: send the parts of a put the cheapest way.
//! - `connector`, `handshake`: reach a node and agree on a protocol version.
//! - `dispatch`, `receive`, `driver`: receive responses until the connection ends.
//! - `rdma_setup`, `pool`: further channels and connections to a connected node.
//! - `supervisor`: connects, and reconnects with backoff.

mod connector;
mod dispatch;
mod driver;
mod handlers;
mod handshake;
mod multiplex;
mod options;
mod outbox;
mod parts;
mod pending;
mod pool;
mod rdma_channels;
mod rdma_progress;
mod rdma_reads;
mod rdma_setup;
mod rdma_writes;
mod receive;
mod releases;
mod supervisor;

pub use connector::Connector;
pub(crate) use connector::SocketConnector;
pub(crate) use handlers::{FollowResult, PageRequest, PageResponse, PageResult, PagesHandler, PartsHandler};
pub(crate) use handlers::{ResponseHandler, StoredAt, UncopiedBytes};
pub(crate) use multiplex::Connection;
#[cfg(test)]
pub(crate) use multiplex::NodeIdentity;
pub(crate) use options::ConnectionOptions;
pub(crate) use parts::{SentPart, send_part, sends_location};
pub(crate) use pool::ConnectionPool;
pub use rdma_channels::{Devices, open_devices};
pub(crate) use rdma_writes::{OpenParts, PartSource, cancel_puts, open_parts};
pub(crate) use supervisor::NodeHandle;
