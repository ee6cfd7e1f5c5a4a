//! A Redis-compatible server as the store of an engine.
//!
//! Invariants:
//! - A page that is read is exactly the page that was put: its key, namespace, shape and checksums
//!   are verified in the buffer that the engine uses. Any other value is a miss, is counted, and is
//!   deleted.
//! - Every call ends by its deadline. A server that is away is a miss at once.
//! - The first writer of a page wins (`SET … NX`).
//! - Memory of puts and replies has a bound: [`memory_bytes_max`].
//!
//! Redis has less than a node of Larder:
//!
//! - Pages have no leases. The server may evict a page between lookup and read.
//! - Pages have no parts: a page appears when its put has ended. A follow asks for it again and
//!   again.
//! - The server remembers no forgets. So no page of L1 is ever put again.
//! - The server learns nothing about parents, positions and the ends of generations.
//!
//! Layout: [`url`] tells the stores apart. `value` is the format of a page in Redis. `connection`
//! and `pool` carry commands.

mod connection;
mod pool;
pub mod url;
mod value;

use crate::store::{Fetched, Followed, Got, LookupPurpose, OpenPut, PUT_QUEUE_BYTES_MAX, PageStore, PutSource};
use connection::{Question, SHORT_REPLY_BYTES};
use futures::future::{BoxFuture, join_all};
use larder_client::{Lookup, NewPage, PartsReceived, PutOutcome, Tier};
use larder_format::{MAX_PAGE_BYTES, NamespaceDescriptor, PageKey, PageOrigin};
use larder_model::{KvPage, PageSeal};
use pool::{CONNECTIONS_MAX, Pool};
use redis::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;
use url::RedisUrl;
use value::PageFormat;

/// Maximum number of commands without values in one request.
const COMMANDS_MAX: usize = 512;
/// Maximum bytes of the pages that one request reads, unless one page has more.
const READ_BYTES_MAX: usize = 8 << 20;
/// Copies of the values of a request that the `redis` crate and its buffers hold. Buffers grow to
/// twice of what they need.
const COPIES: usize = 4;
/// Pause before a follow asks for an absent page again.
const FOLLOW_PAUSE: Duration = Duration::from_millis(100);
/// Origin of every page. It is the same for all, so that a forget fits each of them.
const ORIGIN: PageOrigin = PageOrigin { run: 0, generation: 1 };

// A put reserves room for its value: a page, and a header of a few KiB. No valid geometry has
// larger pages, so every page of an engine can be put.
const _: () = assert!(2 * MAX_PAGE_BYTES <= PUT_QUEUE_BYTES_MAX);

/// Maximum memory of puts and replies in bytes, for pages of `page_bytes` bytes.
pub(crate) fn memory_bytes_max(page_bytes: usize) -> usize {
    let request = page_bytes.max(READ_BYTES_MAX).saturating_mul(COPIES);
    PUT_QUEUE_BYTES_MAX.saturating_add(request.saturating_mul(CONNECTIONS_MAX))
}

/// Pages of one namespace on a Redis server. Dropping it closes all connections.
pub struct RedisStore {
    shared: Arc<Shared>,
    _watch: AbortOnDropHandle<()>,
}

struct Shared {
    pool: Arc<Pool>,
    format: PageFormat,
    /// Bytes that open puts may take.
    put_bytes: Arc<Semaphore>,
    damaged: AtomicU64,
}

impl RedisStore {
    /// Attaches to a server, in the background. Must run inside a tokio runtime.
    pub fn attach(url: RedisUrl, descriptor: &NamespaceDescriptor) -> Self {
        let pool = Arc::new(Pool::new(url));
        let watch = AbortOnDropHandle::new(tokio::spawn(pool.clone().watch()));
        let format = PageFormat::new(descriptor);
        let put_bytes = Arc::new(Semaphore::new(PUT_QUEUE_BYTES_MAX));
        let shared = Arc::new(Shared { pool, format, put_bytes, damaged: AtomicU64::new(0) });
        Self { shared, _watch: watch }
    }

    /// Waits until the server answers. Returns `false` if it does not within `timeout`.
    pub async fn ready(&self, timeout: Duration) -> bool {
        self.shared.pool.ready(timeout).await
    }
}

impl Shared {
    /// Sends one command for each key. `None` if the server did not answer all of them.
    async fn ask_short(&self, command: &str, keys: &[PageKey], deadline: Instant) -> Option<Vec<Value>> {
        let mut commands = redis::pipe();
        for key in keys {
            commands.cmd(command).arg(self.format.name(key));
        }
        self.pool.ask(&Question::short(commands), deadline).await
    }

    async fn lookup(&self, keys: &[PageKey], deadline: Instant) -> Lookup {
        let mut found = Lookup { answered: true, ..Lookup::default() };
        for batch in keys.chunks(COMMANDS_MAX) {
            let replies = self.ask_short("EXISTS", batch, deadline).await.unwrap_or_default();
            let present = replies.iter().take_while(|&reply| *reply == Value::Int(1)).count();
            found.tiers.extend(std::iter::repeat_n(Tier::L3, present));
            // Anything but a number is no answer.
            found.answered = present == batch.len() || replies.get(present) == Some(&Value::Int(0));
            if present < batch.len() {
                break;
            }
        }
        found
    }

    /// Values of pages, read in one request. An absent or unreadable one is `None`.
    async fn values(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<Vec<u8>>> {
        let value_bytes = self.format.value_bytes();
        let mut commands = redis::pipe();
        for key in keys {
            // GETRANGE limits the reply, and its last place is that of one byte too many. An absent
            // page has no bytes.
            commands.cmd("GETRANGE").arg(self.format.name(key)).arg(0).arg(value_bytes);
        }
        let question = Question { commands, reply_bytes_max: value_bytes + SHORT_REPLY_BYTES };
        let replies = self.pool.ask(&question, deadline).await.unwrap_or_default();
        let value = |reply: Value| match reply {
            Value::BulkString(value) if !value.is_empty() => Some(value),
            _ => None,
        };
        let mut values: Vec<Option<Vec<u8>>> = replies.into_iter().map(value).collect();
        values.resize(keys.len(), None);
        values
    }

    /// Copies a value into its page, and verifies it there. Counts and logs a value that is not the
    /// page, and adds its key to `damaged`.
    fn fill(
        &self,
        key: PageKey,
        value: Option<Vec<u8>>,
        mut page: KvPage,
        damaged: &mut Vec<PageKey>,
    ) -> (KvPage, Option<Fetched>) {
        let Some(value) = value else { return (page, None) };
        match self.format.open(key, &value, page.as_mut()) {
            Ok(chunk_crcs) => {
                let seal = PageSeal { chunk_crcs, origin: Some(ORIGIN) };
                (page, Some(Fetched { tier: Tier::L3, is_direct: false, seal }))
            }
            Err(error) => {
                self.damaged.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%key, %error, "a value of the Redis server is not its page; deleting it");
                damaged.push(key);
                (page, None)
            }
        }
    }

    /// Deletes values that are not their pages. Later puts would find them there.
    async fn delete(&self, damaged: &[PageKey], deadline: Instant) {
        if !damaged.is_empty() {
            self.ask_short("DEL", damaged, deadline).await;
        }
    }

    /// Reads pages in one request.
    async fn read(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> Vec<(KvPage, Option<Fetched>)> {
        let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
        let values = self.values(&keys, deadline).await;
        let mut damaged = Vec::new();
        let mut read = Vec::with_capacity(pages.len());
        for ((key, page), value) in pages.into_iter().zip(values) {
            read.push(self.fill(key, value, page, &mut damaged));
        }
        self.delete(&damaged, deadline).await;
        read
    }

    async fn follow(&self, key: PageKey, mut page: KvPage, deadline: Instant) -> (KvPage, Followed) {
        loop {
            let value = self.values(&[key], deadline).await.pop().flatten();
            let mut damaged = Vec::new();
            let (same, fetched) = self.fill(key, value, page, &mut damaged);
            self.delete(&damaged, deadline).await;
            if let Some(fetched) = fetched {
                return (same, Followed::Sealed(fetched.seal));
            }
            page = same;
            if !self.pool.is_up() || Instant::now() + FOLLOW_PAUSE >= deadline {
                return (page, Followed::Missed);
            }
            tokio::time::sleep(FOLLOW_PAUSE).await;
        }
    }

    async fn set(&self, page: &NewPage, parts: Parts, deadline: Instant) -> PutOutcome {
        let Parts { mut value, crcs, charge } = parts;
        let Some(crcs) = crcs.into_iter().collect::<Option<Vec<_>>>() else { return PutOutcome::Lost };
        if let Err(error) = self.format.seal(page, &mut value, crcs.concat()) {
            tracing::warn!(key = %page.key, %error, "a page was damaged in memory before its put; it is not stored");
            return PutOutcome::Lost;
        }
        let mut commands = redis::pipe();
        commands.cmd("SET").arg(self.format.name(&page.key)).arg(value.as_slice()).arg("NX");
        drop(value);
        let replies = self.pool.ask(&Question::short(commands), deadline).await;
        drop(charge);
        match replies.as_deref() {
            Some([Value::Okay]) => PutOutcome::Stored,
            Some([Value::Nil]) => PutOutcome::AlreadyThere,
            Some(other) => {
                tracing::debug!(key = %page.key, ?other, "the Redis server did not take a page");
                PutOutcome::Lost
            }
            None => PutOutcome::Lost,
        }
    }
}

impl PageStore for RedisStore {
    fn lookup(&self, keys: Vec<PageKey>, _purpose: LookupPurpose, deadline: Instant) -> BoxFuture<'_, Lookup> {
        Box::pin(async move { self.shared.lookup(&keys, deadline).await })
    }

    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<Got>> {
        let pages_max = (READ_BYTES_MAX / self.shared.format.value_bytes()).max(1);
        let mut pages = pages.into_iter();
        let mut batches = Vec::new();
        loop {
            let batch: Vec<(PageKey, KvPage)> = pages.by_ref().take(pages_max).collect();
            if batch.is_empty() {
                break;
            }
            batches.push(self.shared.read(batch, deadline));
        }
        // The pool limits the number of requests at a time.
        Box::pin(async move { join_all(batches).await.into_iter().flatten().map(Got::from).collect() })
    }

    /// Waits for the whole page. Its parts are not counted, because they do not arrive one by one.
    fn follow(
        &self,
        key: PageKey,
        buffer: KvPage,
        _parts: PartsReceived,
        deadline: Instant,
    ) -> BoxFuture<'_, (KvPage, Followed)> {
        Box::pin(self.shared.follow(key, buffer, deadline))
    }

    fn put(&self, page: NewPage, source: PutSource, _deadline: Instant) -> Box<dyn OpenPut> {
        let is_copy = matches!(source, PutSource::Copy { .. });
        let parts = if is_copy || !self.shared.pool.is_up() { None } else { Parts::reserve(&self.shared) };
        Box::new(RedisPut { shared: self.shared.clone(), page, is_copy, parts })
    }

    /// Deletes the pages. All stored copies have one origin.
    fn forget_copies(&self, pages: Vec<(PageKey, Option<PageOrigin>)>, deadline: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let keys: Vec<PageKey> = pages.into_iter().map(|(key, _)| key).collect();
            let mut requested = 0;
            for batch in keys.chunks(COMMANDS_MAX) {
                if self.shared.ask_short("DEL", batch, deadline).await.is_some() {
                    requested += batch.len();
                }
            }
            requested
        })
    }

    fn generation_ended(&self, _keys: Vec<PageKey>, _tokens: u32, _deadline: Instant) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Always `false`: the server remembers no forgets.
    fn can_judge_copy(&self, _key: &PageKey, _origin: PageOrigin) -> Option<bool> {
        Some(false)
    }

    fn nodes_connected(&self) -> usize {
        usize::from(self.shared.pool.is_up())
    }

    fn pages_damaged(&self) -> u64 {
        self.shared.damaged.load(Ordering::Relaxed)
    }
}

/// Parts of a page on their way to the server.
struct Parts {
    /// The value. Its header stays empty until all parts are there.
    value: Vec<u8>,
    /// Checksums of the chunks of each part that was written.
    crcs: Vec<Option<Vec<u32>>>,
    charge: OwnedSemaphorePermit,
}

impl Parts {
    /// Reserves memory for a page. `None` if the puts in flight have all of it.
    fn reserve(shared: &Shared) -> Option<Self> {
        let bytes = shared.format.value_bytes();
        let charge = shared.put_bytes.clone().try_acquire_many_owned(u32::try_from(bytes).ok()?).ok()?;
        Some(Self { value: vec![0; bytes], crcs: vec![None; shared.format.part_count()], charge })
    }
}

struct RedisPut {
    shared: Arc<Shared>,
    page: NewPage,
    is_copy: bool,
    /// `None`: the page is lost, because the server was away or there was no room.
    parts: Option<Parts>,
}

impl OpenPut for RedisPut {
    fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]) {
        let Some(parts) = &mut self.parts else { return };
        let place = self.shared.format.part_range(part).and_then(|range| parts.value.get_mut(range));
        if let Some(place) = place
            && place.len() == bytes.len()
        {
            place.copy_from_slice(bytes);
            parts.crcs[part] = Some(crcs.to_vec());
        }
    }

    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)> {
        Box::pin(async move {
            let Self { shared, page, is_copy, parts } = *self;
            let outcome = match parts {
                // The page may have been forgotten since it was copied.
                None if is_copy && shared.pool.is_up() => PutOutcome::Forgotten,
                None => PutOutcome::Lost,
                Some(parts) => shared.set(&page, parts, deadline).await,
            };
            let is_there = matches!(outcome, PutOutcome::Stored | PutOutcome::AlreadyThere);
            (outcome, is_there.then_some(ORIGIN))
        })
    }
}
