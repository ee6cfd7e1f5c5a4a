//! HTTP server of routers, engines and store nodes, robust against strangers and slow clients.
//!
//! It stands between the sockets and an [`axum::Router`], and hands a request over only when its
//! whole body has arrived. Handlers therefore never wait for a client, and a place in a queue
//! behind this server costs its holder a complete request.
//!
//! Invariants:
//! - Connections, bytes of bodies and the time of each phase of a connection are bounded.
//! - A connection that is not waiting for an answer never keeps out a new one for long: at the
//!   limit, the server closes the one that has waited longest.
//! - A refused client gets an answer. The log says why, at most once per [`LOG_INTERVAL`].
//!
//! Layout: [`HttpOptions`] are the limits, `places` counts connections, `socket` has the deadlines
//! of reads and writes, `body` receives bodies, `shares` divides memory and places among peers,
//! `hosts` refuses foreign web pages, and `server` accepts and serves. [`listen`] opens its socket.
//! [`EventLoopMetrics`] tell of stalls.
#![forbid(unsafe_code)]

mod body;
mod event_loop;
mod hosts;
mod lanes;
mod listen;
mod metrics;
mod options;
mod phase;
mod places;
mod proxies;
mod refusal;
mod server;
mod shares;
mod socket;

pub use body::{BodyCharge, RequestBody};
pub use event_loop::EventLoopMetrics;
pub use hosts::AllowedHosts;
pub use lanes::{LanePlaces, PeerLane};
pub use listen::listen;
pub use metrics::HttpMetrics;
pub use options::{HttpOptions, OptionsError};
pub use refusal::{LOG_INTERVAL, Refusal};
pub use server::HttpServer;
pub use shares::{PeerAddress, PeerBudget, PeerCharge, PeerShare};
