//! Interface between the router and the page store.
//!
//! The router learns from the store which engines are registered and which pages are cached. No
//! failure of the store fails a request: lookups time out and count as misses. [`StoreDirectory`]
//! is the production implementation. Tests provide fakes.

use futures::future::BoxFuture;
use larder_client::{
    Client, ClientOptions, Explanation, Forgotten, Hint, Member, NodeView, PagePin, PinKind, Pinned, StoreUrl, Tier,
};
use larder_format::{NamespaceDescriptor, PageKey};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub trait Directory: Send + Sync + 'static {
    /// All registered members. Returns `None` if no node answers by `deadline`.
    fn members(&self, deadline: Instant) -> BoxFuture<'_, Option<Vec<Member>>>;

    /// Status of every node. A node that does not answer by `deadline` is listed as down.
    fn status(&self, deadline: Instant) -> BoxFuture<'_, Vec<NodeView>>;

    /// Page index of one namespace. MUST return without waiting for the network.
    fn pages(&self, namespace: &NamespaceDescriptor) -> Arc<dyn PageIndex>;
}

/// Pages of one namespace in the store. Every answer is a hint: the store may evict a page a moment
/// later.
pub trait PageIndex: Send + Sync + 'static {
    /// Returns `true` if at least one node is connected. MUST return without waiting for the
    /// network.
    fn up(&self) -> bool;

    /// Length, in pages, of the longest prefix of `keys` that the store can serve. Returns 0 if no
    /// node answers by `deadline`.
    fn lookup(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, usize>;

    /// Tier of each page, in the order of `keys`. `None` means that no node reported the page.
    fn locate(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<Tier>>>;

    /// Loads pages from L3 into L2. Returns the number of pages in L2 afterwards.
    fn warm(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, usize>;

    /// Deletes pages durably: they do not reappear after a crash.
    fn forget(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Forgotten>;

    /// Pin of each page, in the order of `keys`. `None` means no pin, or that no node reported it.
    fn pins(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<PagePin>>>;

    /// Reason why each page is missing, in the order of `keys`. `None` means that no node told it.
    fn explain(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<Explanation>>>;

    /// Gives advice about the pages of a sequence. Returns the number of pages in L2 at the nodes
    /// that took it.
    fn hint(&self, keys: Arc<[PageKey]>, hint: Hint, deadline: Instant) -> BoxFuture<'_, usize>;

    /// Pins pages in L2 for `ttl`. With [`PinKind::None`] it ends their pins and ignores `ttl`.
    fn pin(&self, keys: Arc<[PageKey]>, kind: PinKind, ttl: Duration, deadline: Instant) -> BoxFuture<'_, Pinned>;
}

pub struct StoreDirectory {
    url: StoreUrl,
    client: Client,
}

impl StoreDirectory {
    /// Attaches to the store at `url`. Must be called inside a tokio runtime. Returns at once: the
    /// client connects in the background.
    pub fn attach(url: StoreUrl) -> Self {
        // Without a namespace: this client reads members and status, never pages.
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

    fn pins(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<PagePin>>> {
        Box::pin(async move { Client::pins(self, &keys, deadline).await })
    }

    fn explain(&self, keys: Arc<[PageKey]>, deadline: Instant) -> BoxFuture<'_, Vec<Option<Explanation>>> {
        Box::pin(async move { Client::explain(self, &keys, deadline).await })
    }

    fn hint(&self, keys: Arc<[PageKey]>, hint: Hint, deadline: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move { Client::hint(self, &keys, None, hint, deadline).await })
    }

    fn pin(&self, keys: Arc<[PageKey]>, kind: PinKind, ttl: Duration, deadline: Instant) -> BoxFuture<'_, Pinned> {
        Box::pin(async move { Client::pin(self, &keys, kind, ttl, deadline).await })
    }
}
