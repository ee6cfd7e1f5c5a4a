//! The seam between the router and the page store.
//!
//! The router learns from the store which engines there are and what is cached; nothing behind this seam may fail a
//! request. [`StoreDirectory`] is the store in use; tests bring their own.

use futures::future::BoxFuture;
use larder_client::{Client, ClientOptions, Forgotten, Member, NodeView, PinKind, Pinned, StoreUrl, Tier};
use larder_format::{NamespaceDescriptor, PageKey};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who is there.
pub trait Directory: Send + Sync + 'static {
    /// Everyone who registered; `None` if no node answers in time.
    fn members(&self, deadline: Instant) -> BoxFuture<'_, Option<Vec<Member>>>;

    /// The nodes and how they are.
    fn status(&self, deadline: Instant) -> BoxFuture<'_, Vec<NodeView>>;

    /// The pages of one namespace. MUST return at once.
    fn pages(&self, namespace: &NamespaceDescriptor) -> Arc<dyn PageIndex>;
}

/// What the store holds of one namespace. Answers are hints: a page may be gone a moment later.
pub trait PageIndex: Send + Sync + 'static {
    /// Whether any node is connected now. MUST return at once.
    fn up(&self) -> bool;

    /// Pages in the longest prefix of `keys` that can be served; 0 if no node answers in time.
    fn lookup(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, usize>;

    /// Where each page lies; `None` is nowhere.
    fn locate(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<Tier>>>;

    /// Brings pages from L3 to L2; the number in L2 afterwards.
    fn warm(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, usize>;

    /// Forgets pages durably.
    fn forget(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Forgotten>;

    /// Pins pages in L2 for `ttl`, or ends their pins.
    fn pin(&self, keys: Arc<[PageKey]>, kind: PinKind, ttl: Duration, deadline: Instant) -> BoxFuture<'_, Pinned>;
}

/// The store behind a URL.
pub struct StoreDirectory {
    url: StoreUrl,
    client: Client,
}

impl StoreDirectory {
    /// Attaches inside a tokio runtime. Returns at once; connections are made in the background.
    pub fn attach(url: StoreUrl) -> Self {
        let client = Client::attach(url.clone(), None, options());
        Self { url, client }
    }
}

fn options() -> ClientOptions {
    ClientOptions { name: "router".into(), ..ClientOptions::default() }
}

impl Directory for StoreDirectory {
    fn members(&self, deadline: Instant) -> BoxFuture<'_, Option<Vec<Member>>> {
        Box::pin(self.client.members(deadline))
    }

    fn status(&self, deadline: Instant) -> BoxFuture<'_, Vec<NodeView>> {
        Box::pin(self.client.status(deadline))
    }

    fn pages(&self, namespace: &NamespaceDescriptor) -> Arc<dyn PageIndex> {
        Arc::new(Client::attach(self.url.clone(), Some(namespace.clone()), options()))
    }
}

impl PageIndex for Client {
    fn up(&self) -> bool {
        self.nodes_connected() > 0
    }

    fn lookup(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move { Client::lookup(self, &keys, Duration::ZERO, deadline).await.tiers.len() })
    }

    fn locate(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<Tier>>> {
        Box::pin(async move { Client::locate(self, &keys, deadline).await })
    }

    fn warm(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move { Client::warm(self, &keys, deadline).await })
    }

    fn forget(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Forgotten> {
        Box::pin(async move { Client::forget(self, &keys, deadline).await })
    }

    fn pin(&self, keys: Arc<[PageKey]>, kind: PinKind, ttl: Duration, deadline: Instant) -> BoxFuture<'_, Pinned> {
        Box::pin(async move { Client::pin(self, &keys, kind, ttl, deadline).await })
    }
}
