//! The seam between an engine and the page store.
//!
//! The engine asks for pages and hands pages over through [`PageStore`] only; nothing behind it may fail a request. A page
//! that cannot be had is a miss, a page that cannot be put is lost. [`larder_client::Client`] is the store in use; tests
//! bring their own.

use futures::future::BoxFuture;
use larder_client::{Client, FollowEnd, GetOptions, Lookup, NewPage, PagePut, PutOutcome, Tier};
use larder_format::PageKey;
use larder_model::KvPage;
use std::time::{Duration, Instant};

/// What an engine needs of a store.
pub trait PageStore: Send + Sync + 'static {
    /// The longest prefix of `keys` that can be served; empty if no node answers, and then not `answered`.
    fn lookup(&self, keys: Vec<PageKey>, deadline: Instant) -> BoxFuture<'_, Lookup>;

    /// Reads whole pages into their buffers; `None` marks a miss, whose buffer holds nothing of use.
    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<(KvPage, Option<Tier>)>>;

    /// Reads a page that is being written, or will be before `deadline`.
    fn follow(&self, key: PageKey, buffer: KvPage, deadline: Instant) -> BoxFuture<'_, (KvPage, FollowEnd)>;

    /// Begins to put a page. MUST return at once; dropping the put aborts it.
    fn put(&self, page: NewPage, deadline: Instant) -> Box<dyn OpenPut>;

    /// Nodes that are connected now. MUST return at once.
    fn nodes_connected(&self) -> usize;
}

/// A page that is being put.
pub trait OpenPut: Send {
    /// Hands over a copy of part `part`. MUST NOT wait for the network.
    fn part(&mut self, part: usize, bytes: &[u8]);

    /// Seals the page.
    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, PutOutcome>;
}

/// A put whose parts lie in the client's memory, from where a node on this machine takes them.
struct ClientPut {
    client: Client,
    put: PagePut,
}

impl OpenPut for ClientPut {
    fn part(&mut self, part: usize, bytes: &[u8]) {
        let mut copy = self.client.buffer(bytes.len());
        copy.copy_from_slice(bytes);
        self.put.part(part, copy.freeze());
    }

    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, PutOutcome> {
        Box::pin(self.put.commit(deadline))
    }
}

/// How often a node that is too busy is asked again: computing a page takes longer than a short while.
const BUSY_RETRIES: u32 = 3;
/// How long the store keeps what a lookup found for the reads that follow it.
const HOLD: Duration = Duration::from_secs(30);

impl PageStore for Client {
    fn lookup(&self, keys: Vec<PageKey>, deadline: Instant) -> BoxFuture<'_, Lookup> {
        Box::pin(async move { Client::lookup(self, &keys, HOLD, deadline).await })
    }

    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<(KvPage, Option<Tier>)>> {
        Box::pin(async move {
            let options = GetOptions { busy_retries: BUSY_RETRIES, ..GetOptions::default() };
            let got = Client::get_with(self, pages, options, deadline).await;
            got.into_iter().map(|(page, fetched)| (page, fetched.tier())).collect()
        })
    }

    fn follow(&self, key: PageKey, buffer: KvPage, deadline: Instant) -> BoxFuture<'_, (KvPage, FollowEnd)> {
        Box::pin(Client::follow(self, key, buffer, deadline).finish())
    }

    fn put(&self, page: NewPage, deadline: Instant) -> Box<dyn OpenPut> {
        Box::new(ClientPut { client: self.clone(), put: Client::put(self, page, deadline) })
    }

    fn nodes_connected(&self) -> usize {
        Client::nodes_connected(self)
    }
}
