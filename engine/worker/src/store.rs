//! Interface between an engine and the page store.
//!
//! Invariant: nothing behind [`PageStore`] fails a request. A page that cannot be read is a miss,
//! and a page that cannot be put is lost. [`NodeStore`] and
//! [`RedisStore`](crate::redis_store::RedisStore) implement the trait in production; tests use an
//! in-memory store.

pub use crate::node_store::NodeStore;
use futures::future::BoxFuture;
use larder_client::{Lookup, NewPage, PartsReceived, PutOutcome, Tier};
use larder_format::{PageKey, PageOrigin};
use larder_model::{KvPage, PageSeal};
use std::time::Instant;

/// Page that a get has read and verified. The checksums prove the bytes that are in the buffer.
#[derive(Debug)]
pub struct Fetched {
    pub tier: Tier,
    /// The engine has read the page from a file of L3 by itself.
    pub is_direct: bool,
    pub seal: PageSeal,
}

/// Result for one page of a get.
#[derive(Debug)]
pub enum Got {
    /// The buffer holds the verified page.
    Hit(KvPage, Fetched),
    /// The content of the buffer is undefined. `None`: a transfer that missed its deadline still
    /// owns the buffer, which returns to its pool afterwards.
    Miss(Option<KvPage>),
}

impl From<(KvPage, Option<Fetched>)> for Got {
    fn from((page, fetched): (KvPage, Option<Fetched>)) -> Got {
        match fetched {
            Some(fetched) => Got::Hit(page, fetched),
            None => Got::Miss(Some(page)),
        }
    }
}

/// End of a follow. Only `Sealed` allows the use of the buffer's content.
#[derive(Debug)]
pub enum Followed {
    Sealed(PageSeal),
    /// The writer aborted its put, or died.
    Aborted,
    /// No put began in time, or it did not end in time.
    Missed,
    /// The store has no memory for another follow now. It has some again when one of them ends, or
    /// requests of other clients do.
    Refused,
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

    /// Reads whole pages into their buffers. The results are in the order of `pages`.
    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<Got>>;

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

    /// Number of pages whose bytes did not match their key or checksums, since the start.
    fn pages_damaged(&self) -> u64;
}

pub trait OpenPut: Send {
    /// Writes a copy of part `part`, with the CRC-32 of each of its chunks. The store takes no page
    /// whose bytes do not match them. MUST NOT wait for the network.
    fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]);

    /// Seals the page. The outcome tells if the store holds it. Decode engines may only follow
    /// pages that it holds. The origin is that of the store's page, if the store has said it.
    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)>;
}

/// Maximum payload bytes of puts queued in the store client. Beyond it the client drops the put,
/// and its page counts as lost.
pub(crate) const PUT_QUEUE_BYTES_MAX: usize = 256 << 20;
