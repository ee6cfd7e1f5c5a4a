//! Those who want pages: they put some and get some, check every byte that they get, and never wait before they ask again.

use super::line::Line;
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use larder_client::{Client, ClientOptions, NewPage, PinKind, PutOptions, PutOutcome, StoreUrl, Transport};
use larder_format::{Arriving, KvDtype, NamespaceDescriptor, PageGeometry, PageId, PageKey, PageMeta, chunk_crcs};
use larder_wire::{
    CommitOutcome, Delivery, Entry, Frame, FrameReader, PROTOCOL_VERSION, PartBytes, Request, ReserveOutcome, Reserved,
    Response,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

const PAGE_BYTES: [usize; 2] = [256 << 10, 1 << 20];
/// Connections for each size.
const LINES: usize = 16;
/// Bytes of one get, and of one put: several pages.
const GET_BYTES: usize = 4 << 20;
const PUT_BYTES: usize = 2 << 20;
/// Pages of each size that are read again and again, pinned: in all less than a quarter of L2.
const HOT_BYTES: usize = 24 << 20;
const PINNED: Duration = Duration::from_secs(24 * 3600);
/// Different bytes that pages have.
const CONTENTS: usize = 16;
/// The deadline of an operation: what comes later does not count.
const PATIENCE: Duration = Duration::from_secs(2);
/// By then all are answered, in one way or another.
const ANSWERED: Duration = Duration::from_secs(10);
/// How often operations are begun.
const TICK: Duration = Duration::from_millis(2);
/// Most operations at a time; the load is less than asked for if that is reached.
const OPERATIONS_MAX: usize = 20_000;
/// Frames that wait to leave on one connection.
const QUEUE_FRAMES: usize = 1024;
/// Most operations that one turn makes up for if it comes late.
const LATE_MAX: Duration = Duration::from_millis(50);

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
    under_way: AtomicUsize,
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

fn add(count: &AtomicU64, more: usize) {
    count.fetch_add(more as u64, Ordering::Relaxed);
}

/// One get or put that has not ended.
struct Operation {
    tally: Arc<Counting>,
    begun: Instant,
    /// Dropped at its end.
    _tell: Option<oneshot::Sender<()>>,
}

impl Operation {
    fn begin(tally: &Arc<Counting>, tell: Option<oneshot::Sender<()>>) -> Operation {
        tally.under_way.fetch_add(1, Ordering::Relaxed);
        Operation { tally: tally.clone(), begun: Instant::now(), _tell: tell }
    }

    fn in_time(&self) -> bool {
        self.begun.elapsed() <= PATIENCE
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.tally.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a connection waits for.
enum Waiting {
    /// Pages; those that came are `None`.
    Get(Vec<Option<u64>>, Operation),
    /// Room for pages.
    Reserve(Vec<u64>, Operation),
    /// Pages that were sent to be sealed.
    Commit(Operation),
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

/// The tenant of pages of that size.
pub fn tenant(page_bytes: usize) -> String {
    format!("pages of {page_bytes}")
}

/// Pages of one size.
struct Shelf {
    page_bytes: usize,
    namespace: NamespaceDescriptor,
    /// The bytes of pages, by their number, and their checksums: so many different ones that a page is not taken for its
    /// neighbour.
    contents: Vec<(Bytes, Vec<u32>)>,
    /// Numbers for pages that are put once.
    next: AtomicU64,
}

impl Shelf {
    fn new(page_bytes: usize) -> Shelf {
        let content = |content| {
            let bytes = Bytes::from(vec![content as u8 + 1; page_bytes]);
            let crcs = chunk_crcs(&bytes).collect();
            (bytes, crcs)
        };
        let namespace = namespace(page_bytes, &tenant(page_bytes));
        Shelf { page_bytes, namespace, contents: (0..CONTENTS).map(content).collect(), next: AtomicU64::new(1 << 32) }
    }

    fn hot(&self) -> u64 {
        (HOT_BYTES / self.page_bytes) as u64
    }

    fn key(number: u64) -> PageKey {
        PageKey::chain(None, &[number as u32, (number >> 32) as u32])
    }

    fn content(&self, number: u64) -> &(Bytes, Vec<u32>) {
        &self.contents[number as usize % CONTENTS]
    }

    /// Whether these are the page's bytes, of which the checksums were compared with those that came along.
    fn is_page(&self, number: u64, meta: &PageMeta, bytes: &[u8]) -> bool {
        let (content, crcs) = self.content(number);
        let ends = [0..64, self.page_bytes - 64..self.page_bytes];
        let id = PageId { namespace: self.namespace.id(), key: Self::key(number) };
        meta.id == id && meta.chunk_crcs == *crcs && ends.into_iter().all(|end| bytes[end.clone()] == content[end])
    }
}

/// One connection, and what it waits for.
struct Asker {
    shelf: Arc<Shelf>,
    tally: Arc<Counting>,
    out: mpsc::Sender<Frame>,
    waiting: Mutex<BTreeMap<u64, Waiting>>,
    next: AtomicU64,
}

impl Asker {
    /// Asks for pages, or for room for some; `false` if so much waits to leave that this cannot.
    fn ask(&self, request: &Request, waiting: Waiting) -> bool {
        let Ok(place) = self.out.try_reserve() else { return false };
        add(&self.tally.operations, 1);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.waiting.lock().insert(number, waiting);
        place.send(request.frame(PROTOCOL_VERSION, number, PATIENCE.as_millis() as u32, None));
        true
    }

    fn get(&self, numbers: Vec<u64>, operation: Operation) -> bool {
        let keys = numbers.iter().map(|&number| Shelf::key(number)).collect();
        let waiting = Waiting::Get(numbers.into_iter().map(Some).collect(), operation);
        self.ask(&Request::Get { keys, by: Delivery::Sent }, waiting)
    }

    fn put(&self, numbers: Vec<u64>, operation: Operation) -> bool {
        let reserved = |&number| Reserved {
            key: Shelf::key(number),
            parent: PageKey::NONE,
            position: 0,
            ttl_ms: 0,
            part_bytes: vec![self.shelf.page_bytes as u32],
        };
        let request = Request::Reserve(numbers.iter().map(reserved).collect());
        self.ask(&request, Waiting::Reserve(numbers, operation))
    }

    /// Sends the pages for which there is room, and has them sealed.
    async fn send(self: Arc<Self>, reserve: u64, granted: Vec<(u32, u64)>, operation: Operation) {
        let puts: Vec<Entry> = granted.iter().map(|&(index, _)| Entry { request: reserve, index }).collect();
        for (&put, (_, number)) in puts.iter().zip(granted) {
            let (content, crcs) = self.shelf.content(number).clone();
            let part = Request::Part { put, part: 0, crcs, bytes: PartBytes::Payload };
            let frame = part.frame(PROTOCOL_VERSION, reserve, 0, Some(Box::new(content)));
            if self.out.send(frame).await.is_err() {
                return;
            }
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.waiting.lock().insert(number, Waiting::Commit(operation));
        let deadline_ms = PATIENCE.as_millis() as u32;
        let _ = self.out.send(Request::Commit(puts).frame(PROTOCOL_VERSION, number, deadline_ms, None)).await;
    }

    /// Takes answers until the connection ends.
    async fn hear(self: &Arc<Self>, mut reader: FrameReader<OwnedReadHalf>) -> Result<()> {
        let mut memory = vec![0; GET_BYTES];
        while let Some(header) = reader.next().await? {
            let response = Response::decode(PROTOCOL_VERSION, header.kind, reader.body())?;
            let waiting = self.waiting.lock().remove(&header.request);
            let left = match (waiting, response) {
                (Some(Waiting::Get(mut pages, operation)), Response::Page { index, meta, .. }) => {
                    let number = pages.get_mut(index as usize).and_then(Option::take);
                    let number = number.context("a page that was not asked for")?;
                    ensure!(header.payload_bytes as usize == self.shelf.page_bytes, "a page of another size");
                    let places = memory.len() / self.shelf.page_bytes;
                    let at = index as usize % places * self.shelf.page_bytes;
                    let bytes = &mut memory[at..at + self.shelf.page_bytes];
                    let mut arriving = Arriving::new(&meta.part_bytes, &meta.chunk_crcs);
                    reader.payload(bytes, |piece| arriving.take(piece)).await?;
                    if arriving.finish().is_err() || !self.shelf.is_page(number, &meta, bytes) {
                        add(&self.tally.wrong, 1);
                    } else if operation.in_time() {
                        add(&self.tally.had, 1);
                        add(&self.tally.bytes, bytes.len());
                    } else {
                        add(&self.tally.missed, 1);
                    }
                    Some(Waiting::Get(pages, operation))
                }
                // What is there and does not come was given up at its deadline.
                (Some(Waiting::Get(mut pages, operation)), Response::Miss { index }) => {
                    if pages.get_mut(index as usize).and_then(Option::take).is_some() {
                        add(&self.tally.missed, 1);
                    }
                    Some(Waiting::Get(pages, operation))
                }
                (Some(Waiting::Get(mut pages, operation)), Response::Busy { index: Some(index), .. }) => {
                    let refused = pages.get_mut(index as usize..).unwrap_or_default();
                    add(&self.tally.busy, refused.iter_mut().filter_map(Option::take).count());
                    Some(Waiting::Get(pages, operation))
                }
                (Some(Waiting::Get(pages, _)), Response::Busy { index: None, .. }) => {
                    add(&self.tally.busy, pages.into_iter().flatten().count());
                    None
                }
                (Some(Waiting::Get(pages, _)), Response::End) => {
                    ensure!(pages.iter().all(Option::is_none), "the end of an answer before all of it");
                    None
                }
                (Some(Waiting::Reserve(numbers, operation)), Response::Reserved { outcomes, .. }) => {
                    let named = (0..).zip(numbers).zip(&outcomes);
                    let granted: Vec<(u32, u64)> = named
                        .filter_map(|(page, &outcome)| (outcome == ReserveOutcome::Granted).then_some(page))
                        .collect();
                    let busy = outcomes.iter().filter(|&&outcome| outcome == ReserveOutcome::Busy).count();
                    add(&self.tally.busy, busy);
                    if !granted.is_empty() {
                        // Not here: who waits for answers must not wait for room to send.
                        tokio::spawn(self.clone().send(header.request, granted, operation));
                    }
                    None
                }
                (Some(Waiting::Reserve(numbers, _)), Response::Busy { .. }) => {
                    add(&self.tally.busy, numbers.len());
                    None
                }
                (Some(Waiting::Commit(operation)), Response::Committed(outcomes)) => {
                    let stored = outcomes.iter().filter(|&&outcome| outcome == CommitOutcome::Stored).count();
                    add(if operation.in_time() { &self.tally.put } else { &self.tally.missed }, stored);
                    if operation.in_time() {
                        add(&self.tally.bytes, stored * self.shelf.page_bytes);
                    }
                    None
                }
                (_, response) => bail!("the node answered {response:?}"),
            };
            if let Some(left) = left {
                self.waiting.lock().insert(header.request, left);
            }
        }
        bail!("the node hung up")
    }
}

/// All of them.
pub struct Load {
    askers: Vec<Arc<Asker>>,
    turn: AtomicU64,
    pub tally: Arc<Counting>,
    connections: JoinSet<Result<()>>,
}

impl Load {
    /// Attaches to the node and puts what is read again and again.
    pub async fn attach(address: &str) -> Result<Load> {
        let mut load =
            Load { askers: Vec::new(), turn: AtomicU64::new(0), tally: Arc::default(), connections: JoinSet::new() };
        let shelves = PAGE_BYTES.map(|page_bytes| Arc::new(Shelf::new(page_bytes)));
        for shelf in &shelves {
            stock(address, shelf).await?;
        }
        for shelf in shelves.iter().cycle().take(LINES * shelves.len()) {
            let line = Line::attach(address, shelf.page_bytes, &tenant(shelf.page_bytes)).await?;
            let (out, queue) = mpsc::channel(QUEUE_FRAMES);
            let (waiting, next) = (Mutex::default(), AtomicU64::new(1));
            let asker = Arc::new(Asker { shelf: shelf.clone(), tally: load.tally.clone(), out, waiting, next });
            load.askers.push(asker.clone());
            load.connections.spawn(async move { Ok(line.writer.send_all(queue, PATIENCE * 10).await?) });
            load.connections.spawn(async move {
                let heard = asker.hear(line.reader).await;
                asker.waiting.lock().clear();
                heard
            });
        }
        Ok(load)
    }

    /// One get, or one put, of the next connection, if it can send one.
    fn begin(&self, tell: Option<oneshot::Sender<()>>) -> bool {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let (round, asker) = (turn / self.askers.len() as u64, &self.askers[turn as usize % self.askers.len()]);
        let (shelf, operation) = (&asker.shelf, Operation::begin(&self.tally, tell));
        if (round + turn / PAGE_BYTES.len() as u64).is_multiple_of(2) {
            let (pages, hot) = ((GET_BYTES / shelf.page_bytes) as u64, shelf.hot());
            let first = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            asker.get((0..pages).map(|page| (first + page) % hot).collect(), operation)
        } else {
            let pages = (PUT_BYTES / shelf.page_bytes) as u64;
            let first = shelf.next.fetch_add(pages, Ordering::Relaxed);
            asker.put((first..first + pages).collect(), operation)
        }
    }

    /// So many operations at a time, one after the other; goodput in bytes and operations, per second.
    pub async fn sustained(&mut self, at_a_time: usize, time: Duration) -> Result<(f64, f64)> {
        self.tally.reset();
        let begin = Instant::now();
        let work = (0..at_a_time).map(|_| async {
            while begin.elapsed() < time {
                let (tell, ended) = oneshot::channel();
                ensure!(self.begin(Some(tell)), "a request could not be sent");
                // It is dropped at its end, unsent.
                let _ = tokio::time::timeout(ANSWERED, ended).await.context("a request was not answered")?;
            }
            Ok(())
        });
        futures::future::try_join_all(work.collect::<Vec<_>>()).await?;
        let (seconds, tally) = (begin.elapsed().as_secs_f64(), self.tally.read());
        self.connected()?;
        ensure!(tally.wrong == 0, "{} pages were wrong", tally.wrong);
        Ok((tally.bytes as f64 / seconds, tally.operations as f64 / seconds))
    }

    /// Fails if a connection was lost: those that take what they ask for keep theirs, whatever goes on.
    fn connected(&mut self) -> Result<()> {
        match self.connections.try_join_next() {
            Some(lost) => lost?.context("a connection was lost"),
            None => Ok(()),
        }
    }

    /// Waits until what was begun has ended.
    pub async fn rest(&mut self) -> Result<()> {
        let begin = Instant::now();
        let under_way = || self.tally.under_way.load(Ordering::Relaxed);
        while under_way() > 0 && begin.elapsed() < ANSWERED {
            tokio::time::sleep(TICK).await;
        }
        ensure!(under_way() == 0, "{} requests were not answered", under_way());
        self.connected()
    }

    /// Begins `rate` operations per second, whatever becomes of them; how many were begun.
    pub async fn offer(&mut self, rate: f64, time: Duration) -> Result<u64> {
        let begin = Instant::now();
        let (mut begun, mut due, mut last) = (0u64, 0.0, begin);
        while begin.elapsed() < time {
            tokio::time::sleep(TICK).await;
            due += rate * last.elapsed().min(LATE_MAX).as_secs_f64();
            last = Instant::now();
            while due >= 1.0 && self.tally.under_way.load(Ordering::Relaxed) < OPERATIONS_MAX {
                due -= 1.0;
                begun += u64::from(self.begin(None));
            }
            due = due.min(1.0 + rate * LATE_MAX.as_secs_f64());
            self.connected()?;
        }
        Ok(begun)
    }
}

/// Puts what is read again and again.
async fn stock(address: &str, shelf: &Shelf) -> Result<()> {
    let url = StoreUrl { nodes: vec![address.into()], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(shelf.namespace.clone()), ClientOptions::default());
    ensure!(client.ready(Duration::from_secs(10)).await, "the node cannot be reached");
    let soon = Instant::now() + Duration::from_secs(10);
    for number in 0..shelf.hot() {
        let page = NewPage { key: Shelf::key(number), parent: PageKey::NONE, position: 0 };
        let pages = vec![(page, shelf.content(number).0.clone())];
        let outcomes = client.put_pages(pages, PutOptions::default(), soon).await;
        ensure!(outcomes == [PutOutcome::Stored], "a page was not stored: {outcomes:?}");
    }
    let keys: Vec<PageKey> = (0..shelf.hot()).map(Shelf::key).collect();
    let pinned = client.pin(&keys, PinKind::Hard, PINNED, soon).await;
    ensure!(pinned.pages == keys.len(), "of {} pages that are to be read, {pinned:?}", keys.len());
    Ok(())
}
