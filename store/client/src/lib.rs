//! The Larder store client.
//!
//! A [`Client`] attaches to one or more store nodes by URL, spreads page keys over them by rendezvous hashing, and moves
//! pages: [`Client::lookup`], [`Client::get`], [`Client::put`], [`Client::follow`]. Every answer is checked here, at the far
//! end: identity and CRC of every chunk. What does not check is a miss.
//!
//! The store is a cache: nothing here fails because a node is away. A page that cannot be had in time is a miss, a page that
//! cannot be put is lost, and both are counted. The client reconnects by itself with backoff.
//!
//! Where things are: [`client`](Client) (what callers see) · `connect` (a node's data port, and from there its memory) ·
//! `link` (one node: multiplex, receive) · `lanes` (more connections to it) · `sink` (where answers go, and the checks) · `lookup`, `get` · `put`, `put_pages`, `parts` ·
//! `rdma` (lines to a node) · `view` (pages in place) · `memory` (buffers that nodes can be told of) · `follow` · `pin` · `members` (registration) ·
//! `spread` (which node has which key) · [`StoreUrl`].
#![forbid(unsafe_code)]

mod buffer;
mod client;
mod clock;
mod connect;
mod follow;
mod get;
mod lanes;
mod link;
mod lookup;
mod members;
mod memory;
mod parts;
mod pin;
mod put;
mod put_pages;
mod rdma;
mod sink;
mod spread;
mod stats;
mod url;
mod view;

pub use client::{Client, ClientOptions, Forgotten, NodeView, Tier};
pub use follow::{Follow, FollowEnd};
pub use get::{Fetched, GetOptions};
pub use larder_rdma::{EndpointOptions, FabricOptions};
pub use lookup::{Lease, Lookup};
pub use members::{Member, Registration};
pub use memory::Buffer;
pub use pin::{PinKind, Pinned};
pub use put::{NewPage, PagePut, PutOptions, PutOutcome};
pub use stats::ClientStats;
pub use url::{CONNECTIONS, StoreUrl, Transport, UrlError};
pub use view::PageView;

/// A client over other connections than sockets, and what it has under way: for simulations.
#[doc(hidden)]
pub mod sim {
    use crate::{Client, ClientOptions, StoreUrl};
    use larder_format::NamespaceDescriptor;
    use std::sync::Arc;

    pub use crate::connect::Connector;
    pub use crate::rdma::{Devices, open as open_devices};

    /// Like [`Client::attach`], with connections that `connector` makes.
    pub fn attach(
        connector: Arc<impl Connector>,
        url: StoreUrl,
        namespace: NamespaceDescriptor,
        options: ClientOptions,
    ) -> Client {
        Client::attach_by(connector, url, Some(namespace), options)
    }

    /// Payload bytes of puts that wait in this client, requests that wait for answers, and bytes of its memory that are taken.
    pub fn under_way(client: &Client) -> (usize, usize, usize) {
        client.under_way()
    }
}
