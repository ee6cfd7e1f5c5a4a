//! Regular clients: they put and get pages, verify every page, and start requests without waiting
//! for the answers of earlier ones.

use super::connection::{FrameConnection, VERSION};
use super::counters::{LoadCounters, add};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use larder_client::{Client, ClientOptions, NewPage, PinKind, PutOptions, PutOutcome, StoreUrl, Transport};
use larder_format::{
    KvDtype, NamespaceDescriptor, PageGeometry, PageId, PageKey, PageMeta, PayloadVerifier, chunk_crcs,
};
use larder_runtime::lock::Mutex;
use larder_wire::{
    CommitOutcome, Delivery, Entry, Frame, FrameReader, PartLocation, Request, ReserveOutcome, Reserved, Response,
};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

const PAGE_BYTES: [usize; 2] = [256 << 10, 1 << 20];
const CONNECTIONS_PER_SIZE: usize = 16;
/// Bytes of one get and of one put. Each covers several pages.
const GET_BYTES: usize = 4 << 20;
const PUT_BYTES: usize = 2 << 20;
/// Pinned pages of each size, which the gets read. Together below the pin limit, a quarter of L2.
const PINNED_BYTES: usize = 24 << 20;
const PIN_DURATION: Duration = Duration::from_secs(24 * 3600);
const DISTINCT_PAGES: usize = 16;
const TIMEOUT: Duration = Duration::from_secs(2);
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(2);
/// Maximum number of concurrent operations. Beyond it the offered load falls short of its rate, and
/// the report shows the lower factor.
const IN_FLIGHT_MAX: usize = 20_000;
const QUEUE_FRAMES: usize = 1024;
/// Maximum delay of a tick whose missed operations are still made up for. A longer pause of the
/// machine must not end in a burst.
const CATCH_UP_MAX: Duration = Duration::from_millis(50);

/// A get or put in flight. Dropping it ends it and frees its place, so that every way out of a
/// request is counted.
struct Operation {
    counters: Arc<LoadCounters>,
    begun: Instant,
    _on_end: Option<oneshot::Sender<()>>,
}

impl Operation {
    fn begin(counters: &Arc<LoadCounters>, on_end: Option<oneshot::Sender<()>>) -> Operation {
        counters.in_flight.fetch_add(1, Ordering::Relaxed);
        Operation { counters: counters.clone(), begun: Instant::now(), _on_end: on_end }
    }

    fn in_time(&self) -> bool {
        self.begun.elapsed() <= TIMEOUT
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.counters.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

enum PendingRequest {
    Get(Vec<Option<u64>>, Operation),
    Reserve(Vec<u64>, Operation),
    Commit(Operation),
}

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

pub fn tenant(page_bytes: usize) -> String {
    format!("pages of {page_bytes}")
}

struct PageSet {
    page_bytes: usize,
    namespace: NamespaceDescriptor,
    /// Bytes and checksums of pages, by page number. Neighbouring pages differ, so that a mix-up is
    /// found.
    contents: Vec<(Bytes, Vec<u32>)>,
    next: AtomicU64,
}

impl PageSet {
    fn new(page_bytes: usize) -> PageSet {
        let content = |content| {
            let bytes = Bytes::from(vec![content as u8 + 1; page_bytes]);
            let crcs = chunk_crcs(&bytes).collect();
            (bytes, crcs)
        };
        let namespace = namespace(page_bytes, &tenant(page_bytes));
        PageSet {
            page_bytes,
            namespace,
            contents: (0..DISTINCT_PAGES).map(content).collect(),
            next: AtomicU64::new(1 << 32),
        }
    }

    fn pinned_pages(&self) -> u64 {
        (PINNED_BYTES / self.page_bytes) as u64
    }

    fn key(number: u64) -> PageKey {
        PageKey::chain(None, &[number as u32, (number >> 32) as u32])
    }

    fn content(&self, number: u64) -> &(Bytes, Vec<u32>) {
        &self.contents[number as usize % DISTINCT_PAGES]
    }

    /// Returns `true` if this is the page. The caller has verified the bytes against the checksums
    /// in `meta`, so comparing the checksums and both ends of the page is enough.
    fn is_page(&self, number: u64, meta: &PageMeta, bytes: &[u8]) -> bool {
        let (content, crcs) = self.content(number);
        let ends = [0..64, self.page_bytes - 64..self.page_bytes];
        let id = PageId { namespace: self.namespace.id(), key: Self::key(number) };
        meta.id == id && meta.chunk_crcs == *crcs && ends.into_iter().all(|end| bytes[end.clone()] == content[end])
    }
}

struct LoadConnection {
    pages: Arc<PageSet>,
    counters: Arc<LoadCounters>,
    out: mpsc::Sender<Frame>,
    pending: Mutex<BTreeMap<u64, PendingRequest>>,
    next: AtomicU64,
}

impl LoadConnection {
    /// Queues a request. Returns `false` if the send queue is full: the load generator never waits,
    /// because that would lower the offered load.
    fn send_request(&self, request: &Request, pending: PendingRequest) -> bool {
        let Ok(slot) = self.out.try_reserve() else { return false };
        add(&self.counters.operations, 1);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.pending.lock().insert(number, pending);
        slot.send(request.frame(VERSION, number, TIMEOUT.as_millis() as u32, None));
        true
    }

    fn get(&self, numbers: Vec<u64>, operation: Operation) -> bool {
        let keys = numbers.iter().map(|&number| PageSet::key(number)).collect();
        let pending = PendingRequest::Get(numbers.into_iter().map(Some).collect(), operation);
        self.send_request(&Request::Get { keys, by: Delivery::Inline }, pending)
    }

    fn put(&self, numbers: Vec<u64>, operation: Operation) -> bool {
        let reserved = |&number| Reserved::first(PageSet::key(number), vec![self.pages.page_bytes as u32]);
        let request = Request::Reserve(numbers.iter().map(reserved).collect());
        self.send_request(&request, PendingRequest::Reserve(numbers, operation))
    }

    async fn send_pages(self: Arc<Self>, reserve: u64, granted: Vec<(u32, u64)>, operation: Operation) {
        let puts: Vec<Entry> = granted.iter().map(|&(index, _)| Entry { request: reserve, index }).collect();
        for (&put, (_, number)) in puts.iter().zip(granted) {
            let (content, crcs) = self.pages.content(number).clone();
            let part = Request::Part { put, part: 0, crcs, bytes: PartLocation::Inline };
            let frame = part.frame(VERSION, reserve, 0, Some(Box::new(content)));
            if self.out.send(frame).await.is_err() {
                return;
            }
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.pending.lock().insert(number, PendingRequest::Commit(operation));
        let deadline_ms = TIMEOUT.as_millis() as u32;
        let _ = self.out.send(Request::Commit(puts).frame(VERSION, number, deadline_ms, None)).await;
    }

    async fn receive(self: &Arc<Self>, mut reader: FrameReader<OwnedReadHalf>) -> Result<()> {
        let mut memory = vec![0; GET_BYTES];
        while let Some(header) = reader.next().await? {
            let response = Response::decode(VERSION, header.kind, reader.body())?;
            let pending = self.pending.lock().remove(&header.request);
            let remaining = match (pending, response) {
                (Some(PendingRequest::Get(pages, operation)), Response::Page { index, meta, .. }) => {
                    let payload_bytes = header.payload_bytes as usize;
                    ensure!(payload_bytes == self.pages.page_bytes, "the node sent a page of {payload_bytes} bytes");
                    Some(self.receive_page(&mut reader, &mut memory, pages, operation, index, &meta).await?)
                }
                (Some(PendingRequest::Get(pages, operation)), response) => {
                    self.get_answered(pages, operation, response)?
                }
                (Some(PendingRequest::Reserve(numbers, operation)), response) => {
                    self.reserve_answered(header.request, numbers, operation, response)?;
                    None
                }
                (Some(PendingRequest::Commit(operation)), Response::Committed(ends)) => {
                    let stored = ends.iter().filter(|end| end.outcome == CommitOutcome::Stored).count();
                    add(if operation.in_time() { &self.counters.put } else { &self.counters.late_puts }, stored);
                    if operation.in_time() {
                        add(&self.counters.put_bytes, stored * self.pages.page_bytes);
                    }
                    None
                }
                (_, response) => bail!("the node sent an unexpected answer: {response:?}"),
            };
            if let Some(remaining) = remaining {
                self.pending.lock().insert(header.request, remaining);
            }
        }
        Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
    }

    async fn receive_page(
        &self,
        reader: &mut FrameReader<OwnedReadHalf>,
        memory: &mut [u8],
        mut pages: Vec<Option<u64>>,
        operation: Operation,
        index: u32,
        meta: &PageMeta,
    ) -> Result<PendingRequest> {
        let number = pages.get_mut(index as usize).and_then(Option::take);
        let number = number.context("the node sent a page that was not requested")?;
        let slots = memory.len() / self.pages.page_bytes;
        let start = index as usize % slots * self.pages.page_bytes;
        let bytes = &mut memory[start..start + self.pages.page_bytes];
        let mut verifier = PayloadVerifier::new(&meta.part_bytes, &meta.chunk_crcs);
        reader.payload(bytes, |piece| verifier.take(piece)).await?;
        if verifier.finish().is_err() || !self.pages.is_page(number, meta, bytes) {
            add(&self.counters.wrong, 1);
        } else if operation.in_time() {
            add(&self.counters.read_pages, 1);
            add(&self.counters.read_bytes, bytes.len());
        } else {
            add(&self.counters.late_reads, 1);
        }
        Ok(PendingRequest::Get(pages, operation))
    }

    /// Handles an answer to a get that carries no page. Returns the rest of the request.
    fn get_answered(
        &self,
        mut pages: Vec<Option<u64>>,
        operation: Operation,
        response: Response,
    ) -> Result<Option<PendingRequest>> {
        match response {
            // Pinned pages are always present. A miss means that the node gave up at the deadline.
            Response::Miss { index } => {
                if pages.get_mut(index as usize).and_then(Option::take).is_some() {
                    add(&self.counters.missed, 1);
                }
                Ok(Some(PendingRequest::Get(pages, operation)))
            }
            Response::Busy { index: Some(index), .. } => {
                let refused = pages.get_mut(index as usize..).unwrap_or_default();
                add(&self.counters.busy, refused.iter_mut().filter_map(Option::take).count());
                Ok(Some(PendingRequest::Get(pages, operation)))
            }
            Response::Busy { index: None, .. } => {
                add(&self.counters.busy, pages.into_iter().flatten().count());
                Ok(None)
            }
            Response::End => {
                // The node drops pages that still wait when a request is long past its deadline.
                let dropped = pages.iter().flatten().count();
                ensure!(dropped == 0 || !operation.in_time(), "the node ended an answer before its last page");
                add(&self.counters.missed, dropped);
                Ok(None)
            }
            response => bail!("the node sent an unexpected answer to a get: {response:?}"),
        }
    }

    fn reserve_answered(
        self: &Arc<Self>,
        request: u64,
        numbers: Vec<u64>,
        operation: Operation,
        response: Response,
    ) -> Result<()> {
        match response {
            Response::Reserved { outcomes, .. } => {
                let pages = (0..).zip(numbers).zip(&outcomes);
                let granted: Vec<(u32, u64)> =
                    pages.filter_map(|(page, &outcome)| (outcome == ReserveOutcome::Granted).then_some(page)).collect();
                let busy = outcomes.iter().filter(|&&outcome| outcome == ReserveOutcome::Busy).count();
                add(&self.counters.busy, busy);
                if !granted.is_empty() {
                    // In its own task: the receiver must never wait for the send queue, or both
                    // sides block.
                    tokio::spawn(self.clone().send_pages(request, granted, operation));
                }
                Ok(())
            }
            Response::Busy { .. } => {
                add(&self.counters.busy, numbers.len());
                Ok(())
            }
            response => bail!("the node sent an unexpected answer to a reservation: {response:?}"),
        }
    }
}

/// Place of a connection, which [`keep_connected`] replaces when the node ends it.
#[derive(Clone)]
struct Place(Arc<Mutex<Arc<LoadConnection>>>);

impl Place {
    fn connection(&self) -> Arc<LoadConnection> {
        self.0.lock().clone()
    }
}

/// Both ends of a new connection: its socket, and the queue of what it sends.
type Link = (FrameConnection, mpsc::Receiver<Frame>);

async fn connect(
    address: &str,
    pages: &Arc<PageSet>,
    counters: &Arc<LoadCounters>,
) -> Result<(Arc<LoadConnection>, Link)> {
    let frames = FrameConnection::attach(address, pages.namespace.clone()).await?;
    let (out, queue) = mpsc::channel(QUEUE_FRAMES);
    let connection = LoadConnection {
        pages: pages.clone(),
        counters: counters.clone(),
        out,
        pending: Mutex::default(),
        next: AtomicU64::new(1),
    };
    Ok((Arc::new(connection), (frames, queue)))
}

/// Runs the connection of a place, and the next one whenever the node has ended it. Returns an
/// error that is not the end of a connection, such as an unexpected answer.
async fn keep_connected(address: String, place: Place, mut link: Link) -> Result<Infallible> {
    loop {
        let connection = place.connection();
        let (FrameConnection { reader, writer }, queue) = link;
        let ended = tokio::select! {
            sent = writer.send_all(queue, TIMEOUT * 10) => sent.map_err(anyhow::Error::from),
            received = connection.receive(reader) => received,
        };
        // Ends the operations, so that no caller waits for them.
        connection.pending.lock().clear();
        match ended {
            Err(error) if !is_disconnect(&error) => return Err(error),
            _ => add(&connection.counters.connections_lost, 1),
        }
        let (next, next_link) = connect(&address, &connection.pages, &connection.counters).await?;
        *place.0.lock() = next;
        link = next_link;
    }
}

fn is_disconnect(error: &anyhow::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind.is_some_and(|kind| [BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof].contains(&kind))
}

/// All connections of the load generator. Operations go to them in turn, so that no connection
/// limits the load alone.
pub struct Workload {
    places: Vec<Place>,
    sequence: AtomicU64,
    pub counters: Arc<LoadCounters>,
    connections: JoinSet<Result<Infallible>>,
}

impl Workload {
    pub async fn attach(address: &str) -> Result<Workload> {
        let mut load = Workload {
            places: Vec::new(),
            sequence: AtomicU64::new(0),
            counters: Arc::default(),
            connections: JoinSet::new(),
        };
        let page_sets = PAGE_BYTES.map(|page_bytes| Arc::new(PageSet::new(page_bytes)));
        for pages in &page_sets {
            put_pinned_pages(address, pages).await?;
        }
        for pages in page_sets.iter().cycle().take(CONNECTIONS_PER_SIZE * page_sets.len()) {
            let (connection, link) = connect(address, pages, &load.counters).await?;
            let place = Place(Arc::new(Mutex::new(connection)));
            load.places.push(place.clone());
            load.connections.spawn(keep_connected(address.to_string(), place, link));
        }
        Ok(load)
    }

    /// Starts a get or a put on the next connection. Returns `false` if its send queue is full.
    /// Gets and puts alternate.
    fn begin(&self, on_end: Option<oneshot::Sender<()>>) -> bool {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let round = sequence / self.places.len() as u64;
        let connection = self.places[sequence as usize % self.places.len()].connection();
        let pages = &connection.pages;
        let operation = Operation::begin(&self.counters, on_end);
        if (round + sequence / PAGE_BYTES.len() as u64).is_multiple_of(2) {
            let count = (GET_BYTES / pages.page_bytes) as u64;
            // Spreads the gets over the pinned pages without a random generator.
            let first = sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            connection.get((0..count).map(|page| (first + page) % pages.pinned_pages()).collect(), operation)
        } else {
            let count = (PUT_BYTES / pages.page_bytes) as u64;
            let first = pages.next.fetch_add(count, Ordering::Relaxed);
            connection.put((first..first + count).collect(), operation)
        }
    }

    /// Runs a fixed number of concurrent operations. Returns bytes and operations per second. A new
    /// operation starts whenever one ends, so this measures the capacity.
    pub async fn sustained(&mut self, concurrency: usize, time: Duration) -> Result<(f64, f64)> {
        self.counters.reset();
        let begin = Instant::now();
        let work = (0..concurrency).map(|_| async {
            while begin.elapsed() < time {
                let (on_end, ended) = oneshot::channel();
                if !self.begin(Some(on_end)) {
                    // The connection is being replaced.
                    tokio::time::sleep(TICK).await;
                    continue;
                }
                // The operation drops the sender at its end, which this side sees as an error.
                let _ = tokio::time::timeout(COMPLETION_TIMEOUT, ended).await.context("a request was not answered")?;
            }
            anyhow::Ok(())
        });
        futures::future::try_join_all(work.collect::<Vec<_>>()).await?;
        let seconds = begin.elapsed().as_secs_f64();
        let totals = self.counters.totals();
        self.connected()?;
        ensure!(totals.wrong == 0, "{} pages had wrong bytes", totals.wrong);
        Ok((totals.bytes() as f64 / seconds, totals.operations as f64 / seconds))
    }

    /// Fails if the node sent an unexpected answer, or refuses new connections.
    fn connected(&mut self) -> Result<()> {
        match self.connections.try_join_next() {
            Some(failed) => match failed? {
                Ok(never) => match never {},
                Err(error) => Err(error),
            },
            None => Ok(()),
        }
    }

    pub async fn wait_idle(&mut self) -> Result<()> {
        let begin = Instant::now();
        let in_flight = || self.counters.in_flight.load(Ordering::Relaxed);
        while in_flight() > 0 && begin.elapsed() < COMPLETION_TIMEOUT {
            tokio::time::sleep(TICK).await;
        }
        ensure!(in_flight() == 0, "{} requests were not answered", in_flight());
        self.connected()
    }

    /// Starts `rate` operations per second regardless of their outcome. Returns how many were
    /// started.
    pub async fn offer(&mut self, rate: f64, time: Duration) -> Result<u64> {
        let begin = Instant::now();
        let mut started = 0u64;
        let mut due = 0.0;
        let mut last = begin;
        while begin.elapsed() < time {
            tokio::time::sleep(TICK).await;
            due += rate * last.elapsed().min(CATCH_UP_MAX).as_secs_f64();
            last = Instant::now();
            while due >= 1.0 && self.counters.in_flight.load(Ordering::Relaxed) < IN_FLIGHT_MAX {
                due -= 1.0;
                started += u64::from(self.begin(None));
            }
            due = due.min(1.0 + rate * CATCH_UP_MAX.as_secs_f64());
            self.connected()?;
        }
        Ok(started)
    }
}

async fn put_pinned_pages(address: &str, pages: &PageSet) -> Result<()> {
    let url = StoreUrl { nodes: vec![address.into()], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(pages.namespace.clone()), ClientOptions::default());
    ensure!(client.ready(Duration::from_secs(10)).await, "the node cannot be reached");
    let deadline = Instant::now() + Duration::from_secs(10);
    for number in 0..pages.pinned_pages() {
        let page = NewPage::first(PageSet::key(number));
        let pages = vec![(page, pages.content(number).0.clone())];
        let outcomes = client.put_pages(pages, PutOptions::default(), deadline).await;
        ensure!(outcomes == [PutOutcome::Stored], "the node did not store a pinned page: {outcomes:?}");
    }
    let keys: Vec<PageKey> = (0..pages.pinned_pages()).map(PageSet::key).collect();
    let pinned = client.pin(&keys, PinKind::Hard, PIN_DURATION, deadline).await;
    ensure!(pinned.pages == keys.len(), "the node pinned {} of {} pages", pinned.pages, keys.len());
    Ok(())
}
