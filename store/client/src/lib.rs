//! The Larder store client.
//!
//! A [`Client`] attaches to one or more store nodes by URL and moves KV-cache pages. It places each
//! key on a node by rendezvous hashing, so clients agree on the owner without a coordinator.
//!
//! The store is a cache, so nothing here fails because a node is absent. A page that does not
//! arrive in time is a miss. A page that cannot be put is lost. The client counts both, and
//! reconnects in the background.
//!
//! The client verifies every page at this end: identity, and the checksum of every chunk. A page
//! that does not match is a miss.
//!
//! | to | use |
//! | --- | --- |
//! | attach, wait for nodes | [`Client::attach`], [`Client::ready`] |
//! | find pages | [`Client::lookup`], [`Client::locate`], [`Client::exists`] |
//! | read pages | [`Client::get`], [`Client::get_ranges`], [`Client::view`] |
//! | read the files of L3 | [`Client::extents`], [`Client::lookup_without_loads`] |
//! | write pages | [`Client::put`] part by part, [`Client::put_pages`], [`Client::put_parts`] |
//! | read a page while it is written | [`Client::follow`] |
//! | steer the cache | [`Client::warm`], [`Client::pin`], [`Client::pins`], [`Client::forget`] |
//! | discover engines | [`Client::register`], [`Client::members`] |
//! | observe | [`Client::status`], [`Client::stats`] |
//!
//! # Example
//!
//! ```no_run
//! use bytes::Bytes;
//! use larder_client::{Client, ClientOptions, NewPage, PutOptions, PutOutcome, StoreUrl};
//! use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
//! use std::time::{Duration, Instant};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let url: StoreUrl = "larder://127.0.0.1:7700".parse()?;
//! // Only clients with equal descriptors share pages.
//! let geometry = PageGeometry {
//!     dtype: KvDtype::Bf16,
//!     layers: 16,
//!     kv_heads: 8,
//!     head_dim: 64,
//!     page_tokens: 32,
//!     layers_per_part: 4,
//!     head_groups: 1,
//! };
//! let namespace =
//!     NamespaceDescriptor { model: "example".into(), weights: [0; 32], geometry, tenant:
//! "docs".into() }; let client = Client::attach(url, Some(namespace), ClientOptions::default());
//! assert!(client.ready(Duration::from_secs(5)).await, "no node is reachable");
//!
//! let key = PageKey::chain(None, &[1, 2, 3]);
//! let page = NewPage::first(key);
//! let bytes = Bytes::from(vec![7; geometry.page_bytes()]);
//! let deadline = Instant::now() + Duration::from_secs(1);
//! let outcomes = client.put_pages(vec![(page, bytes)], PutOptions::default(), deadline).await;
//! assert_eq!(outcomes, [PutOutcome::Stored]);
//!
//! let buffer = client.buffer(geometry.page_bytes());
//! let (buffer, tier) = client.get(vec![(key, buffer)], deadline).await.remove(0);
//! assert!(tier.is_some() && buffer.iter().all(|&byte| byte == 7));
//! # Ok(())
//! # }
//! ```
//!
//! `examples/put_get.rs` and `examples/follow.rs` are complete programs.
//!
//! # Layers
//!
//! `operations` (one file per operation) is above `connection` (one connection pool per node).
//! `client` holds the state that operations share. `placement`, `budget`, `buffer`, `random`,
//! `stats`, `options` and `url` are leaves.

// The simulation runs this crate: see store/clippy.toml.
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod budget;
mod buffer;
mod client;
mod connection;
mod operations;
mod options;
mod placement;
mod random;
mod stats;
mod url;

pub use buffer::Buffer;
pub use client::Client;
pub use larder_memory::share::{after_fork_in_child, after_fork_in_parent, before_fork};
pub use larder_rdma::{EndpointOptions, FabricOptions, SLOW_CHUNK_BYTES};
/// Oldest and newest protocol version of this build.
pub use larder_wire::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN};
pub use operations::{
    Explanation, Extent, Fetched, Follow, FollowEnd, Forgotten, GetOptions, Hint, Lease, Lookup, MEMBER_TTL, Member,
    MissReason, NewPage, NodeView, PageDescription, PagePin,
};
pub use operations::{PagePut, PageView, PinKind, Pinned, PutOptions, PutOutcome, Registration, Tier};
pub use options::ClientOptions;
pub use stats::{ClientStats, PartsReceived};
pub use url::{DEFAULT_CONNECTIONS, MAX_CONNECTIONS, MAX_NODES, StoreUrl, Transport, UrlError};

/// Hooks for simulations: connections that are not sockets, and the resources of a client.
#[doc(hidden)]
pub mod sim {
    use crate::{Client, ClientOptions, StoreUrl};
    use larder_format::NamespaceDescriptor;
    use std::sync::Arc;

    pub use crate::connection::{Connector, Devices, open_devices};

    /// Like [`Client::attach`], with connections that `connector` makes.
    pub fn attach(
        connector: Arc<impl Connector>,
        url: StoreUrl,
        namespace: NamespaceDescriptor,
        options: ClientOptions,
    ) -> Client {
        Client::attach_with(connector, url, Some(namespace), options)
    }

    /// Resources in use: payload bytes of queued puts, outstanding requests, and bytes of shared
    /// memory that are allocated. All are zero once no operation is in progress.
    pub fn in_flight(client: &Client) -> (usize, usize, usize) {
        client.in_flight()
    }
}
