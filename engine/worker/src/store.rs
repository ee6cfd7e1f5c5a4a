//! Interface between an engine and the page store.
//!
//! Invariant: nothing behind [`PageStore`] fails a request. A page that cannot be read is a miss,
//! and a page that cannot be put is lost. [`larder_client::Client`] implements the trait in
//! production; tests use an in-memory store.

use futures::future::BoxFuture;
use larder_client::{
    Client, FollowEnd, GetOptions, Hint, Lookup, NewPage, PageDescription, PagePut, PartsReceived, PutOptions,
    PutOutcome, Tier,
};
use larder_format::{PageKey, PageOrigin};
use larder_model::{KvPage, PageSeal};
use std::time::{Duration, Instant};

/// Page that a get has read and verified. The checksums prove the bytes that are in the buffer.
#[derive(Debug)]
pub struct Fetched {
    pub tier: Tier,
    pub seal: PageSeal,
}

/// End of a follow. Only `Sealed` allows the use of the buffer's content.
#[derive(Debug)]
pub enum Followed {
    Sealed(PageSeal),
    /// The writer aborted its put, or died.
    Aborted,
    /// No put began in time, or it did not end in time.
    Missed,
}

/// Reason for a lookup. It decides what the store counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookupPurpose {
    /// The pages of earlier requests. The store leases those it has, and counts the others as
    /// misses.
    Reuse,
    /// Pages that a prefill engine writes for this request. Their absence is no miss.
    HandOver,
}

/// Origin of the bytes of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutSource {
    /// The forward pass computes the page now.
    Computed,
    /// The page is a copy from L1. The store refuses it if the page was forgotten after its origin,
    /// or if it cannot know. `None`: the store has not confirmed that it has had the page.
    Copy { origin: Option<PageOrigin> },
}

/// Page store as an engine sees it. No method fails: without a node, reads are misses and puts are
/// lost, and the engine computes all pages itself.
pub trait PageStore: Send + Sync + 'static {
    /// Finds the longest prefix of `keys` that the store can serve. If no node answers, the prefix
    /// is empty and `answered` is false.
    fn lookup(&self, keys: Vec<PageKey>, purpose: LookupPurpose, deadline: Instant) -> BoxFuture<'_, Lookup>;

    /// Reads whole pages into their buffers. `None` marks a miss, and the content of its buffer is
    /// undefined.
    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<(KvPage, Option<Fetched>)>>;

    /// Reads a page while another engine writes it, or waits until `deadline` for such a write to
    /// begin. Counts each part that arrives in `parts`.
    fn follow(
        &self,
        key: PageKey,
        buffer: KvPage,
        parts: PartsReceived,
        deadline: Instant,
    ) -> BoxFuture<'_, (KvPage, Followed)>;

    /// Opens a put. MUST return at once, because the scheduler calls it between steps. Dropping the
    /// put aborts it.
    fn put(&self, page: NewPage, source: PutSource, deadline: Instant) -> Box<dyn OpenPut>;

    /// Forgets those pages whose stored copy has the given origin. An unknown origin stands for
    /// any. Returns the number of pages that it asked the store to forget.
    fn forget_copies(&self, pages: Vec<(PageKey, Option<PageOrigin>)>, deadline: Instant) -> BoxFuture<'_, usize>;

    /// Reports that a generation of `tokens` tokens has ended, which used these pages: its session
    /// can return from now on.
    fn generation_ended(&self, keys: Vec<PageKey>, tokens: u32, deadline: Instant) -> BoxFuture<'_, ()>;

    /// Returns `true` if the node of this page can tell whether it was forgotten after `origin`.
    /// `None` if no node is connected.
    fn can_judge_copy(&self, key: &PageKey, origin: PageOrigin) -> Option<bool>;

    fn nodes_connected(&self) -> usize;
}

pub trait OpenPut: Send {
    /// Writes a copy of part `part`, with the CRC-32 of each of its chunks. The store takes no page
    /// whose bytes do not match them. MUST NOT wait for the network.
    fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]);

    /// Seals the page. The outcome tells if the store holds it. Decode engines may only follow
    /// pages that it holds. The origin is that of the store's page, if the store has said it.
    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)>;
}

/// A put whose parts lie in shared client memory, from which a node on the same host copies them.
struct ClientPut {
    client: Client,
    put: PagePut,
}

impl OpenPut for ClientPut {
    fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]) {
        // Copy: the page stays in L1 and may be evicted before the node has read it.
        let mut copy = self.client.buffer(bytes.len());
        copy.copy_from_slice(bytes);
        // The caller's checksums: those of the copy would hide damage from before it.
        self.put.part_with_crcs(part, copy.freeze(), crcs.to_vec());
    }

    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)> {
        Box::pin(self.put.commit_described(deadline))
    }
}

/// Maximum payload bytes of puts queued in the store client. Beyond it the client drops the put,
/// and its page counts as lost.
pub(crate) const PUT_QUEUE_BYTES_MAX: usize = 256 << 20;
/// Maximum retries at a busy node. Few suffice: computing a page takes longer than a short backoff.
const BUSY_RETRIES: u32 = 3;
/// Lease on looked-up pages, which keeps them readable until the reads that follow the lookup.
const LOOKUP_LEASE: Duration = Duration::from_secs(30);

fn seal(page: PageDescription) -> PageSeal {
    PageSeal { chunk_crcs: page.chunk_crcs, origin: page.origin }
}

impl PageStore for Client {
    fn lookup(&self, keys: Vec<PageKey>, purpose: LookupPurpose, deadline: Instant) -> BoxFuture<'_, Lookup> {
        let lease = match purpose {
            LookupPurpose::Reuse => LOOKUP_LEASE,
            // Nodes count misses only for lookups with a lease.
            LookupPurpose::HandOver => Duration::ZERO,
        };
        Box::pin(async move { Client::lookup(self, &keys, lease, deadline).await })
    }

    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<(KvPage, Option<Fetched>)>> {
        Box::pin(async move {
            let options = GetOptions { busy_retries: BUSY_RETRIES, ..GetOptions::default() };
            let got = Client::get_described(self, pages, options, deadline).await;
            let fetched = |tier, description| Some(Fetched { tier, seal: seal(description?) });
            let result = |(page, end, description): (_, larder_client::Fetched, _)| {
                (page, end.tier().and_then(|tier| fetched(tier, description)))
            };
            got.into_iter().map(result).collect()
        })
    }

    fn follow(
        &self,
        key: PageKey,
        buffer: KvPage,
        parts: PartsReceived,
        deadline: Instant,
    ) -> BoxFuture<'_, (KvPage, Followed)> {
        let follow = Client::follow_counted(self, key, buffer, parts, deadline);
        Box::pin(async move {
            let (page, end, description) = follow.finish_described().await;
            let followed = match (end, description) {
                (FollowEnd::Sealed, Some(description)) => Followed::Sealed(seal(description)),
                (FollowEnd::Aborted, _) => Followed::Aborted,
                (FollowEnd::Sealed | FollowEnd::Miss, _) => Followed::Missed,
            };
            (page, followed)
        })
    }

    fn put(&self, page: NewPage, source: PutSource, deadline: Instant) -> Box<dyn OpenPut> {
        let put = match source {
            PutSource::Computed => Client::put(self, page, deadline),
            PutSource::Copy { origin } => Client::put_copy(self, page, origin, PutOptions::default(), deadline),
        };
        Box::new(ClientPut { client: self.clone(), put })
    }

    fn forget_copies(&self, pages: Vec<(PageKey, Option<PageOrigin>)>, deadline: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
            let stored = self.describe(&keys, deadline).await;
            // Another put may replace a page between this look and the forget. That page is then
            // computed once more.
            let is_copy = |origin: &Option<PageOrigin>, page: &PageDescription| {
                origin.is_none() || page.origin.is_none() || *origin == page.origin
            };
            let same = pages.into_iter().zip(stored);
            let same = same.filter(|((_, origin), page)| page.as_ref().is_some_and(|page| is_copy(origin, page)));
            let same: Vec<PageKey> = same.map(|((key, _), _)| key).collect();
            if !same.is_empty() {
                self.forget(&same, deadline).await;
            }
            same.len()
        })
    }

    fn generation_ended(&self, keys: Vec<PageKey>, tokens: u32, deadline: Instant) -> BoxFuture<'_, ()> {
        Box::pin(async move { _ = self.hint(&keys, Some(tokens), Hint::None, deadline).await })
    }

    fn can_judge_copy(&self, key: &PageKey, origin: PageOrigin) -> Option<bool> {
        Client::can_judge_copy(self, key, origin)
    }

    fn nodes_connected(&self) -> usize {
        Client::nodes_connected(self)
    }
}
