//! Clients that behave: they put pages and get them, and check what they get.

use anyhow::{Result, ensure};
use bytes::Bytes;
use larder_client::{
    Client, ClientOptions, Fetched, GetOptions, NewPage, PinKind, PutOptions, PutOutcome, StoreUrl, Transport,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Page sizes, each with a tenant of its own.
const PAGE_BYTES: [usize; 2] = [256 << 10, 1 << 20];
/// Clients for each size, with one connection each.
const CLIENTS: usize = 16;
/// Bytes of one get, and of one put: several pages.
const GET_BYTES: usize = 4 << 20;
const PUT_BYTES: usize = 2 << 20;
/// Pages of each size that are read again and again, pinned: in all less than a quarter of L2.
const HOT_BYTES: usize = 24 << 20;
const PINNED: Duration = Duration::from_secs(24 * 3600);
/// Different bytes that pages have.
const CONTENTS: usize = 16;
/// How long an operation waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often operations are begun.
const TICK: Duration = Duration::from_millis(5);
/// Most operations at a time; the load is less than asked for if that is reached.
const OPERATIONS_MAX: usize = 20_000;
/// Most operations that one turn makes up for if it comes late.
const LATE_MAX: Duration = Duration::from_millis(200);

/// What came of the operations.
#[derive(Default)]
pub struct Tally {
    /// Bytes had and put.
    pub bytes: u64,
    pub had: u64,
    pub put: u64,
    pub busy: u64,
    pub missed: u64,
    pub wrong: u64,
    pub operations: u64,
}

/// The same, while it is counted.
#[derive(Default)]
pub struct Counting {
    bytes: AtomicU64,
    had: AtomicU64,
    put: AtomicU64,
    busy: AtomicU64,
    missed: AtomicU64,
    wrong: AtomicU64,
    operations: AtomicU64,
}

impl Counting {
    fn all(&self) -> [&AtomicU64; 7] {
        [&self.bytes, &self.had, &self.put, &self.busy, &self.missed, &self.wrong, &self.operations]
    }

    /// Begins anew.
    pub fn reset(&self) {
        self.all().iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// So far.
    pub fn read(&self) -> Tally {
        let [bytes, had, put, busy, missed, wrong, operations] = self.all().map(|count| count.load(Ordering::Relaxed));
        Tally { bytes, had, put, busy, missed, wrong, operations }
    }
}

/// Memory for pages of one size, used again and again.
type Pool = Arc<Mutex<Vec<Vec<u8>>>>;

/// A page's buffer that takes memory only when something lands in it.
struct Landing {
    bytes: Vec<u8>,
    length: usize,
    pool: Pool,
}

impl AsMut<[u8]> for Landing {
    fn as_mut(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            let used = self.pool.lock().ok().and_then(|mut pool| pool.pop());
            self.bytes = used.unwrap_or_else(|| vec![0; self.length]);
        }
        &mut self.bytes
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.bytes.is_empty()
            && let Ok(mut pool) = self.pool.lock()
        {
            pool.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// One size of pages, and the clients that work with it.
struct Shelf {
    page_bytes: usize,
    clients: Vec<Client>,
    pool: Pool,
    /// The bytes of pages, by their number: so many different ones that a page is not taken for its neighbour.
    contents: Vec<Bytes>,
    /// Numbers for pages that are put once.
    next: AtomicU64,
}

/// The namespace of pages of that size.
pub fn namespace(page_bytes: usize, tenant: &str) -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 8,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: (page_bytes / (2 * 8 * 8 * 128 * 2)) as u32,
        layers_per_part: 8,
        head_groups: 1,
    };
    NamespaceDescriptor { model: "overload".into(), weights: [9; 32], geometry, tenant: tenant.into() }
}

impl Shelf {
    fn hot(&self) -> u64 {
        (HOT_BYTES / self.page_bytes) as u64
    }

    fn key(number: u64) -> PageKey {
        PageKey::chain(None, &[number as u32, (number >> 32) as u32])
    }

    fn page(&self, number: u64) -> (NewPage, Bytes) {
        let page = NewPage { key: Self::key(number), parent: PageKey::NONE, position: 0 };
        (page, self.contents[number as usize % CONTENTS].clone())
    }

    /// Looks at a bit of it: the client has checked all.
    fn is_page(&self, number: u64, bytes: &[u8]) -> bool {
        let ends = [0..64, self.page_bytes - 64..self.page_bytes];
        let content = &self.contents[number as usize % CONTENTS];
        bytes.len() == self.page_bytes && ends.into_iter().all(|end| bytes[end.clone()] == content[end])
    }

    async fn put(&self, client: &Client, numbers: impl Iterator<Item = u64>, tally: &Counting) {
        let pages = numbers.map(|number| self.page(number)).collect();
        for outcome in client.put_pages(pages, PutOptions::default(), Instant::now() + PATIENCE).await {
            match outcome {
                PutOutcome::Stored => {
                    tally.put.fetch_add(1, Ordering::Relaxed);
                    tally.bytes.fetch_add(self.page_bytes as u64, Ordering::Relaxed);
                }
                PutOutcome::Busy { .. } => {
                    tally.busy.fetch_add(1, Ordering::Relaxed);
                }
                _ => {}
            }
        }
    }

    async fn get(&self, client: &Client, numbers: Vec<u64>, tally: &Counting) {
        let buffer = || Landing { bytes: Vec::new(), length: self.page_bytes, pool: self.pool.clone() };
        let wanted = numbers.iter().map(|&number| (Self::key(number), buffer())).collect();
        let got = client.get_with(wanted, GetOptions::default(), Instant::now() + PATIENCE).await;
        for (number, (buffer, fetched)) in numbers.into_iter().zip(&got) {
            match fetched {
                Fetched::Had(_) if self.is_page(number, &buffer.bytes) => {
                    tally.had.fetch_add(1, Ordering::Relaxed);
                    tally.bytes.fetch_add(self.page_bytes as u64, Ordering::Relaxed);
                }
                Fetched::Had(_) => {
                    tally.wrong.fetch_add(1, Ordering::Relaxed);
                }
                Fetched::Busy { .. } => {
                    tally.busy.fetch_add(1, Ordering::Relaxed);
                }
                // Given up at the deadline: they are there.
                Fetched::Miss => {
                    tally.missed.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

/// All clients that behave.
pub struct Load {
    shelves: Vec<Shelf>,
    turn: AtomicU64,
    under_way: AtomicUsize,
    pub tally: Counting,
}

impl Load {
    /// Attaches to the node and puts what is read again and again.
    pub async fn attach(address: &str) -> Result<Arc<Load>> {
        let mut shelves = Vec::new();
        for page_bytes in PAGE_BYTES {
            let namespace = namespace(page_bytes, &format!("pages of {page_bytes}"));
            let url = StoreUrl { nodes: vec![address.into()], transport: Transport::Tcp, connections: 1 };
            let attach = |_| Client::attach(url.clone(), Some(namespace.clone()), ClientOptions::default());
            let clients: Vec<Client> = (0..CLIENTS).map(attach).collect();
            for client in &clients {
                ensure!(client.ready(Duration::from_secs(10)).await, "the node cannot be reached");
            }
            let contents = (0..CONTENTS).map(|content| vec![content as u8 + 1; page_bytes].into()).collect();
            let next = AtomicU64::new(1 << 32);
            shelves.push(Shelf { page_bytes, clients, pool: Pool::default(), contents, next });
        }
        let load =
            Load { shelves, turn: AtomicU64::new(0), under_way: AtomicUsize::new(0), tally: Counting::default() };
        for shelf in &load.shelves {
            for number in 0..shelf.hot() {
                shelf.put(&shelf.clients[0], number..number + 1, &load.tally).await;
            }
            let keys: Vec<PageKey> = (0..shelf.hot()).map(Shelf::key).collect();
            let soon = Instant::now() + Duration::from_secs(10);
            let pinned = shelf.clients[0].pin(&keys, PinKind::Hard, PINNED, soon).await;
            ensure!(pinned.pages == keys.len(), "of {} pages that are to be read, {pinned:?}", keys.len());
        }
        Ok(Arc::new(load))
    }

    /// One get, or one put, by the next client.
    async fn operation(&self) {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let shelf = &self.shelves[turn as usize % self.shelves.len()];
        let round = turn / self.shelves.len() as u64;
        let client = &shelf.clients[round as usize / 2 % CLIENTS];
        if round.is_multiple_of(2) {
            let (pages, hot) = ((GET_BYTES / shelf.page_bytes) as u64, shelf.hot());
            let first = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            shelf.get(client, (0..pages).map(|page| (first + page) % hot).collect(), &self.tally).await;
        } else {
            let pages = (PUT_BYTES / shelf.page_bytes) as u64;
            let first = shelf.next.fetch_add(pages, Ordering::Relaxed);
            shelf.put(client, first..first + pages, &self.tally).await;
        }
        self.tally.operations.fetch_add(1, Ordering::Relaxed);
    }

    /// So many operations at a time, one after the other; goodput in bytes and operations, per second.
    pub async fn sustained(self: &Arc<Self>, at_a_time: usize, time: Duration) -> (f64, f64) {
        self.tally.reset();
        let begin = Instant::now();
        let work = (0..at_a_time).map(|_| {
            let load = self.clone();
            tokio::spawn(async move {
                while begin.elapsed() < time {
                    load.operation().await;
                }
            })
        });
        futures::future::join_all(work.collect::<Vec<_>>()).await;
        let (seconds, tally) = (begin.elapsed().as_secs_f64(), self.tally.read());
        (tally.bytes as f64 / seconds, tally.operations as f64 / seconds)
    }

    /// Waits until what was begun has ended.
    pub async fn rest(&self) {
        let begin = Instant::now();
        while self.under_way.load(Ordering::Relaxed) > 0 && begin.elapsed() < PATIENCE * 5 {
            tokio::time::sleep(TICK).await;
        }
    }

    /// Begins `rate` operations per second, whatever becomes of them, and looks around in between; how many were begun.
    pub async fn offer(self: &Arc<Self>, rate: f64, time: Duration, mut look: impl FnMut()) -> u64 {
        let begin = Instant::now();
        let (mut begun, mut due, mut last) = (0u64, 0.0, begin);
        while begin.elapsed() < time {
            tokio::time::sleep(TICK).await;
            due += rate * last.elapsed().min(LATE_MAX).as_secs_f64();
            last = Instant::now();
            while due >= 1.0 && self.under_way.load(Ordering::Relaxed) < OPERATIONS_MAX {
                due -= 1.0;
                begun += 1;
                self.under_way.fetch_add(1, Ordering::Relaxed);
                let load = self.clone();
                tokio::spawn(async move {
                    load.operation().await;
                    load.under_way.fetch_sub(1, Ordering::Relaxed);
                });
            }
            due = due.min(1.0 + rate * LATE_MAX.as_secs_f64());
            look();
        }
        begun
    }
}
