//! One client.
//!
//! The reading half decodes frames, receives parts straight into their slots, answers what is quick at once, and starts a
//! task for what has to wait. Everything that is sent goes through one bounded queue to the writing half, so a client that
//! does not read holds up nobody but itself. When the connection ends, its tasks end and its open puts are given up.

use crate::clock::now;
use crate::holds::Hold;
use crate::node::Shared;
use crate::puts::{Presence, Progress, Put};
use crate::tiers::Page;
use futures::StreamExt;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_format::{Arriving, NamespaceId, PageId, PageKey};
use larder_share::Tenure;
use larder_wire::{
    CommitOutcome, Entry, ErrorCode, FollowState, Frame, FrameHeader, FrameReader, FrameWriter, MAX_HOLD_MS,
    MAX_PIN_MS, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Payload, PinKind, Request, ReserveOutcome, Reserved, Response,
    Sink, Source, TierCode,
};
use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use std::collections::{BTreeMap, btree_map};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinHandle};

/// Most requests of one connection that wait at a time, those with many keys counted several times; more are answered
/// "busy".
const REQUESTS_MAX: usize = 4096;
/// Most lookups of one connection that hold pages at a time; more hold nothing.
const LEASES_MAX: usize = 64;
/// Most pages that one client reads in place at a time; more are sent.
const PLACES_MAX: usize = 65_536;
/// Keys that count as one request.
const KEYS_PER_PERMIT: usize = 64;
/// Most pages that a connection holds for sending: a client that does not read pins no more.
const SENDING_PAGES_MAX: usize = 32;
/// Most puts of one connection that are open at a time; more are answered "busy".
const PUTS_MAX: usize = 4096;
/// Frames queued towards the client.
const SEND_QUEUE_FRAMES: usize = 32;
/// Pages of one Get that are read at a time.
const GET_PAGES_AT_ONCE: usize = 16;
/// A client that says nothing for so long is asked whether it is there, and then again and again.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Most time until Hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Most time to send one frame, or to receive one payload, before the client is given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// For requests that do not say how long they wait.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(5);
/// However long a request says it waits, it waits no longer.
const DEADLINE_MAX: Duration = Duration::from_secs(600);

/// Serves one client over TCP until it leaves, misbehaves, or the node stops.
pub(crate) async fn serve_tcp(shared: Arc<Shared>, stream: TcpStream) {
    let peer = stream.peer_addr().map_or_else(|_| "?".to_string(), |a| a.to_string());
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, %error, "TCP_NODELAY");
    }
    // A client that lost its power says nothing: its puts and its place are given back after a minute.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL).with_retries(3);
    if let Err(error) = SockRef::from(&stream).set_tcp_keepalive(&keepalive) {
        tracing::debug!(%peer, %error, "TCP keepalive");
    }
    let (read, write) = stream.into_split();
    serve(shared, peer, read, write).await;
}

/// Serves one client on any streams.
pub(crate) async fn serve<R: Source, W: Sink>(shared: Arc<Shared>, peer: String, read: R, write: W) {
    converse(shared, peer, read, write, Places::None).await;
}

/// Serves a process of this machine until it leaves, misbehaves, or the node stops. What it reads in place stays where it is
/// until it lets go of it, or of the node's memory, however the connection ends.
pub(crate) async fn serve_local(shared: Arc<Shared>, stream: UnixStream, memory: Arc<LocalMemory>) {
    // Who finds no place here comes by TCP.
    let Ok(place) = memory.tenures.clone().try_acquire_owned() else { return };
    let peer = "a process of this machine".to_string();
    let begin = Tenure::begin(&stream, memory.file.as_fd(), memory.bytes);
    let tenure = match tokio::time::timeout(HELLO_TIMEOUT, begin).await {
        Ok(Ok(tenure)) => tenure,
        Ok(Err(error)) => return tracing::warn!(%error, "a process of this machine was not let in"),
        Err(_) => return,
    };
    let (read, write) = stream.into_split();
    let over = async move {
        tenure.over().await;
        drop(place);
    };
    serve_in_place(shared, peer, read, write, over).await;
}

/// Serves one client on any streams that reads pages in place until its tenure is over.
pub(crate) async fn serve_in_place<R: Source, W: Sink>(
    shared: Arc<Shared>,
    peer: String,
    read: R,
    write: W,
    over: impl Future<Output = ()> + Send + 'static,
) {
    let held = Arc::<Mutex<BTreeMap<Entry, Hold>>>::default();
    let after = Arc::clone(&held);
    // Not one of the node's tasks: it takes as long as that process does, and stopping the node does not wait for it.
    tokio::spawn(async move {
        over.await;
        drop(after);
    });
    converse(shared, peer, read, write, Places::Some(held.clone())).await;
    if has(Bug::HoldsEndEarly) {
        held.lock().clear();
    }
}

/// The arena, for processes of this machine.
pub(crate) struct LocalMemory {
    /// Open for reading alone.
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    /// Most processes that have it mapped, by connections that were made for it.
    pub(crate) tenures: Arc<Semaphore>,
}

/// What a client reads in place, if it can.
#[derive(Clone)]
enum Places {
    None,
    Some(Arc<Mutex<BTreeMap<Entry, Hold>>>),
}

async fn converse<R: Source, W: Sink>(shared: Arc<Shared>, peer: String, read: R, write: W, places: Places) {
    let (sender, receiver) = mpsc::channel(SEND_QUEUE_FRAMES);
    let mut writer = AbortOnDrop(tokio::spawn(FrameWriter::new(write).send_all(receiver, STALL_TIMEOUT)));
    let connection = Connection {
        shared: shared.clone(),
        out: sender,
        namespace: None,
        part_table: Vec::new(),
        puts: BTreeMap::new(),
        places,
        leases: BTreeMap::new(),
        tasks: Arc::default(),
        next_task: 0,
        permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
        sending: Arc::new(Semaphore::new(SENDING_PAGES_MAX)),
    };
    let mut reader = FrameReader::new(read);
    match connection.run(&mut reader).await {
        Ok(()) => tracing::debug!(%peer, "client left"),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            shared.metrics.connections_rejected.inc();
            tracing::warn!(%peer, %error, "connection closed: not what a Larder client says");
        }
        Err(error) => tracing::debug!(%peer, %error, "connection ended"),
    }
    // The queue's senders are gone with the connection and its tasks; what is queued may still leave.
    let _ = tokio::time::timeout(Duration::from_secs(1), &mut writer.0).await;
}

/// A task that ends with its owner.
struct AbortOnDrop(JoinHandle<io::Result<()>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Tasks by a number of our own: a client may repeat its request numbers, and then cancels all of that number.
type Tasks = Arc<Mutex<BTreeMap<u64, RunningTask>>>;

struct RunningTask {
    request: u64,
    handle: AbortHandle,
}

struct Connection {
    shared: Arc<Shared>,
    out: mpsc::Sender<Frame>,
    namespace: Option<NamespaceId>,
    /// Parts of a page of that namespace.
    part_table: Vec<u32>,
    /// Open puts.
    puts: BTreeMap<Entry, Arc<Put>>,
    places: Places,
    /// What lookups promised, by the number of the request.
    leases: BTreeMap<u64, Arc<Lease>>,
    tasks: Tasks,
    next_task: u64,
    /// What waits, in units of [`KEYS_PER_PERMIT`] keys.
    permits: Arc<Semaphore>,
    /// Pages on their way to this client.
    sending: Arc<Semaphore>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let tasks: Vec<AbortHandle> =
            std::mem::take(&mut *self.tasks.lock()).into_values().map(|task| task.handle).collect();
        tasks.iter().for_each(AbortHandle::abort);
        for put in self.puts.values().filter(|_| !has(Bug::PutsOutlive)) {
            self.shared.store.abort(put);
        }
    }
}

/// Pages held for a lookup, until it is cancelled or its time is over.
#[derive(Default)]
struct Lease {
    /// `None` when it has ended.
    holds: Mutex<Option<Vec<Hold>>>,
}

impl Lease {
    fn add(&self, hold: Hold) {
        if let Some(holds) = self.holds.lock().as_mut() {
            holds.push(hold);
        }
    }

    fn end(&self) {
        if has(Bug::LeaseStays) {
            return;
        }
        let holds = self.holds.lock().take();
        drop(holds);
    }
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Connection {
    async fn run<S: Source>(mut self, reader: &mut FrameReader<S>) -> io::Result<()> {
        let hello = tokio::time::timeout(HELLO_TIMEOUT, reader.next()).await;
        let Some(header) = hello.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? else { return Ok(()) };
        self.hello(&header, reader.body()).await?;
        while let Some(header) = reader.next().await? {
            let request = Request::decode(header.kind, reader.body()).map_err(invalid)?;
            match request {
                Request::Part { put, part, crcs } => self.receive_part(reader, &header, put, part, crcs).await?,
                _ if header.payload_bytes > 0 => return Err(invalid(DecodeError::Invalid("payload"))),
                request => self.dispatch(&header, request).await?,
            }
        }
        Ok(())
    }

    async fn answer(&self, request: u64, response: Response) -> io::Result<()> {
        send(&self.out, response.frame(request, None)).await
    }

    async fn hello(&mut self, header: &FrameHeader, body: &[u8]) -> io::Result<()> {
        let message = Request::decode(header.kind, body).map_err(invalid)?;
        let Request::Hello { version_min, version_max, name, namespace } = message else {
            return Err(invalid(DecodeError::Invalid("first message")));
        };
        let version = version_max.min(PROTOCOL_VERSION);
        if version < version_min.max(PROTOCOL_VERSION_MIN) || header.payload_bytes > 0 {
            let message = format!(
                "client speaks protocol {version_min} to {version_max}, this node {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}"
            );
            self.shared.metrics.connections_rejected.inc();
            tracing::warn!(client = %name, %message, "refused");
            self.answer(header.request, Response::Error { code: ErrorCode::Version, message }).await?;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        self.part_table = namespace.as_ref().map(|n| n.geometry.part_table()).unwrap_or_default();
        self.namespace = namespace.map(|n| n.id());
        if let Some(namespace) = self.namespace {
            self.shared.store.welcome(namespace);
        }
        tracing::debug!(client = %name, namespace = ?self.namespace, "connected");
        let identity = &self.shared.identity;
        let (node_id, epoch) = (identity.node_id.clone(), identity.epoch);
        let door = self.shared.door.clone();
        self.answer(header.request, Response::Hello { version, node_id, epoch, namespace: self.namespace, door }).await
    }

    async fn dispatch(&mut self, header: &FrameHeader, message: Request) -> io::Result<()> {
        let request = header.request;
        let shared = self.shared.clone();
        let response = match message {
            Request::Hello { .. } => return Err(invalid(DecodeError::Invalid("second Hello"))),
            Request::Cancel(other) => {
                self.cancel(other);
                return Ok(());
            }
            Request::Register { name, ttl_ms, info } => {
                let ttl = Duration::from_millis(u64::from(ttl_ms));
                Response::Count(u32::from(shared.members.register(name, info, ttl, now())))
            }
            Request::Withdraw(name) => Response::Count(u32::from(shared.members.withdraw(&name))),
            Request::Members => Response::Members(shared.members.list(now())),
            Request::Status => Response::Status(shared.status().to_string()),
            message => match self.namespace {
                Some(namespace) => return self.page_request(header, namespace, message).await,
                None => Response::Error { code: ErrorCode::State, message: "this connection has no namespace".into() },
            },
        };
        self.answer(request, response).await
    }

    /// Requests about pages of this connection's namespace.
    async fn page_request(&mut self, header: &FrameHeader, ns: NamespaceId, message: Request) -> io::Result<()> {
        let page = |key| PageId { namespace: ns, key };
        let pages = |keys: Vec<PageKey>| keys.into_iter().map(page).collect::<Vec<_>>();
        let shared = self.shared.clone();
        let deadline = deadline(header);
        let request = header.request;
        match message {
            Request::Locate(keys) => {
                let tiers = keys.into_iter().map(|key| shared.store.locate(&page(key))).collect();
                self.answer(request, Response::Located(tiers)).await
            }
            Request::Reserve(pages) => {
                let outcomes = pages
                    .into_iter()
                    .zip(0..)
                    .map(|(reserved, index)| self.reserve(Entry { request, index }, page(reserved.key), reserved));
                let outcomes = outcomes.collect();
                self.answer(request, Response::Reserved(outcomes)).await
            }
            Request::Commit(puts) => {
                let outcomes = puts.iter().map(|name| match self.puts.remove(name) {
                    Some(put) => shared.store.commit(&put),
                    None => CommitOutcome::Incomplete,
                });
                let outcomes = outcomes.collect();
                self.answer(request, Response::Committed(outcomes)).await
            }
            Request::Abort(name) => {
                if let Some(put) = self.puts.remove(&name) {
                    shared.store.abort(&put);
                }
                Ok(())
            }
            Request::Get { keys, in_place } => {
                let ids = pages(keys);
                let client = self.client(request);
                let places = if in_place { self.places.clone() } else { Places::None };
                self.spawn(request, ids.len(), async move { get(&shared, &client, ids, deadline, &places).await }).await
            }
            Request::Lookup { keys, hold_ms } => self.lookup(request, pages(keys), hold_ms, deadline).await,
            Request::Release(entries) => {
                if let Places::Some(held) = &self.places
                    && !has(Bug::ReleaseUnheard)
                {
                    let gone: Vec<Option<Hold>> = {
                        let mut held = held.lock();
                        entries.iter().map(|entry| held.remove(entry)).collect()
                    };
                    drop(gone);
                }
                Ok(())
            }
            Request::Follow(key) => {
                let (id, client) = (page(key), self.client(request));
                shared.metrics.follows.inc();
                self.spawn(request, 1, async move { follow(&shared, &client, id, deadline).await }).await
            }
            Request::Pin { kind, ttl_ms, .. } if kind != PinKind::None && !(1..=MAX_PIN_MS).contains(&ttl_ms) => {
                let message = format!("pins last from 1 to {MAX_PIN_MS} milliseconds, not {ttl_ms}");
                self.answer(request, Response::Error { code: ErrorCode::Malformed, message }).await
            }
            message => {
                let ids = match &message {
                    Request::Warm(keys) | Request::Forget(keys) | Request::Pin { keys, .. } => pages(keys.clone()),
                    Request::Suspect(key) | Request::Compare { key, .. } => vec![page(*key)],
                    _ => return Err(invalid(DecodeError::Invalid("message"))),
                };
                let client = self.client(request);
                self.spawn(request, ids.len(), async move {
                    let response = administer(&shared, message, ids, deadline).await;
                    client.send(response).await
                })
                .await
            }
        }
    }

    /// Tells the longest servable prefix, and holds it: what is in L2 at once, what is on L3 as it comes into L2.
    async fn lookup(&mut self, request: u64, ids: Vec<PageId>, hold_ms: u32, deadline: Instant) -> io::Result<()> {
        let shared = self.shared.clone();
        let tiers = shared.store.lookup(&ids);
        let l3_expected_us = u32::try_from(shared.store.l3_expected().as_micros()).unwrap_or(u32::MAX);
        self.leases.retain(|_, lease| lease.holds.lock().is_some());
        let may_hold = hold_ms > 0 && self.leases.len() < LEASES_MAX && !self.leases.contains_key(&request);
        let permit = (may_hold && !tiers.is_empty()).then(|| self.permit(ids.len())).flatten();
        let Some(permit) = permit else {
            return self.answer(request, Response::Looked { tiers, held: 0, l3_expected_us }).await;
        };
        let lease = Arc::new(Lease { holds: Mutex::new(Some(Vec::new())) });
        let prefix = &ids[..tiers.len()];
        let mut on_l3 = Vec::new();
        let mut held = 0;
        for (index, id) in (0..).zip(prefix) {
            match shared.store.hold_l2(id) {
                Some(hold) => {
                    held += u32::from(held == index);
                    lease.add(hold);
                }
                None => on_l3.push(*id),
            }
        }
        self.leases.insert(request, lease.clone());
        let until = now() + Duration::from_millis(hold_ms.min(MAX_HOLD_MS).into());
        self.start(request, async move {
            futures::stream::iter(on_l3)
                .for_each_concurrent(GET_PAGES_AT_ONCE, |id| {
                    let (shared, lease) = (&shared, &lease);
                    async move {
                        let page = shared.store.fetch(&id, deadline.min(until)).await;
                        if let Some(hold) = page.and_then(|page| shared.store.hold(&page)) {
                            lease.add(hold);
                        }
                    }
                })
                .await;
            drop(permit);
            tokio::time::sleep_until(until.into()).await;
            lease.end();
            Ok(())
        });
        self.answer(request, Response::Looked { tiers, held, l3_expected_us }).await
    }

    fn client(&self, request: u64) -> ToClient {
        ToClient { out: self.out.clone(), request, sending: self.sending.clone() }
    }

    fn reserve(&mut self, name: Entry, id: PageId, page: Reserved) -> ReserveOutcome {
        // The parts are those of the namespace's geometry, or readers could make nothing of the page.
        if page.part_bytes != self.part_table || self.puts.contains_key(&name) {
            return ReserveOutcome::Malformed;
        }
        if self.puts.len() >= PUTS_MAX {
            return ReserveOutcome::Busy;
        }
        match self.shared.store.reserve(id, page) {
            Ok(put) => {
                self.puts.insert(name, put);
                ReserveOutcome::Granted
            }
            Err(outcome) => outcome,
        }
    }

    /// Receives a payload into the memory of its part. A part that is not wanted is read and thrown away; one that is
    /// damaged ends its put.
    async fn receive_part<S: Source>(
        &mut self,
        reader: &mut FrameReader<S>,
        header: &FrameHeader,
        name: Entry,
        part: u32,
        crcs: Vec<u32>,
    ) -> io::Result<()> {
        let bytes = header.payload_bytes as usize;
        let stalled = |_| io::Error::from(io::ErrorKind::TimedOut);
        let put = self.puts.get(&name).cloned();
        let taken = put.and_then(|put| put.take_part(part as usize, bytes).map(|slot| (put, slot)));
        let Some((put, mut slot)) = taken else {
            return tokio::time::timeout(STALL_TIMEOUT, reader.discard(bytes)).await.map_err(stalled)?;
        };
        let lengths = [header.payload_bytes];
        let mut arriving = Arriving::new(&lengths, &crcs);
        let receive = reader.payload(&mut slot, |piece| arriving.take(piece));
        tokio::time::timeout(STALL_TIMEOUT, receive).await.map_err(stalled)??;
        self.shared.metrics.bytes_received.inc_by(bytes as u64);
        if let Err(mismatch) = arriving.finish()
            && !has(Bug::PartUnchecked)
        {
            self.shared.metrics.parts_corrupt.inc();
            tracing::warn!(id = ?put.id, part, %mismatch, "part damaged on its way: put given up");
            self.puts.remove(&name);
            self.shared.store.abort(&put);
        } else {
            put.land_checked(part as usize, slot, crcs);
        }
        Ok(())
    }

    /// Ends the tasks of a request, and the puts it reserved.
    fn cancel(&mut self, request: u64) {
        // A task that has not begun cannot take itself off the list.
        let tasks: Vec<RunningTask> =
            self.tasks.lock().extract_if(.., |_, task| task.request == request).map(|(_, task)| task).collect();
        tasks.iter().for_each(|task| task.handle.abort());
        if !has(Bug::LeaseStays)
            && let Some(lease) = self.leases.remove(&request)
        {
            lease.end();
        }
        if has(Bug::CancelKeepsPuts) {
            return;
        }
        let all = Entry { request, index: 0 }..=Entry { request, index: u32::MAX };
        for (_, put) in self.puts.extract_if(all, |_, _| true) {
            self.shared.store.abort(&put);
        }
    }

    /// Runs a request about `keys` keys that may wait, unless too much waits already.
    async fn spawn<F>(&mut self, request: u64, keys: usize, work: F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let Some(permit) = self.permit(keys) else {
            let message = format!("more than {REQUESTS_MAX} requests wait on this connection");
            return self.answer(request, Response::Error { code: ErrorCode::Busy, message }).await;
        };
        self.start(request, async move {
            let _permit = permit;
            work.await
        });
        Ok(())
    }

    /// Leave for a request about `keys` keys to wait, unless too much waits already.
    fn permit(&self, keys: usize) -> Option<OwnedSemaphorePermit> {
        let weight = 1 + (keys / KEYS_PER_PERMIT) as u32;
        self.permits.clone().try_acquire_many_owned(weight).ok()
    }

    /// Runs a task of a request.
    fn start<F>(&mut self, request: u64, work: F)
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let number = self.next_task;
        self.next_task += 1;
        let tasks = self.tasks.clone();
        // The lock is held over the spawn, so that the task cannot end before it is noted.
        let mut running = self.tasks.lock();
        let task = tokio::spawn(async move {
            let _done = Done { tasks, number };
            let _ = work.await;
        });
        running.insert(number, RunningTask { request, handle: task.abort_handle() });
    }
}

/// Takes a task off the list when it ends, however it ends.
struct Done {
    tasks: Tasks,
    number: u64,
}

impl Drop for Done {
    fn drop(&mut self) {
        self.tasks.lock().remove(&self.number);
    }
}

fn deadline(header: &FrameHeader) -> Instant {
    let patience = match header.deadline_ms {
        0 => DEADLINE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)).min(DEADLINE_MAX),
    };
    now() + patience
}

async fn send(out: &mpsc::Sender<Frame>, frame: Frame) -> io::Result<()> {
    out.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// The way to the client, for the answers of one request.
struct ToClient {
    out: mpsc::Sender<Frame>,
    request: u64,
    sending: Arc<Semaphore>,
}

impl ToClient {
    async fn send(&self, response: Response) -> io::Result<()> {
        send(&self.out, response.frame(self.request, None)).await
    }

    /// Says where a page lies, which is held for the client from then on.
    async fn point_at(
        &self,
        held: &Mutex<BTreeMap<Entry, Hold>>,
        hold: Hold,
        index: u32,
        tier: TierCode,
    ) -> io::Result<()> {
        // With room in the queue at hand, holding and telling are one step: no page is held that the client never hears of.
        let room = self.out.reserve().await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        let page = hold.page().clone();
        let place = Some(page.payload.arena_offset() as u64);
        let entry = Entry { request: self.request, index };
        if let btree_map::Entry::Vacant(vacant) = held.lock().entry(entry) {
            if !has(Bug::PlaceNotHeld) {
                vacant.insert(hold);
            }
            room.send(Response::Page { index, tier, meta: page.meta.clone(), place }.frame(self.request, None));
            return Ok(());
        }
        // Its memory must not move under who reads it.
        Err(invalid(DecodeError::Invalid("a request number whose pages are still held")))
    }

    /// Waits until one more page may be on its way.
    async fn permit(&self) -> io::Result<OwnedSemaphorePermit> {
        self.sending.clone().acquire_owned().await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Sends page bytes from where they lie; `permit` comes back when they have left.
    async fn send_bytes<P>(
        &self,
        shared: &Shared,
        head: Response,
        bytes: P,
        permit: OwnedSemaphorePermit,
    ) -> io::Result<()>
    where
        P: AsRef<[u8]> + Send + Sync + 'static,
    {
        shared.metrics.bytes_sent.inc_by(bytes.as_ref().len() as u64);
        let payload: Payload = Box::new(Sending { bytes, _permit: permit });
        send(&self.out, head.frame(self.request, Some(payload))).await
    }
}

/// Page bytes in the send queue.
struct Sending<P> {
    bytes: P,
    _permit: OwnedSemaphorePermit,
}

impl<P: AsRef<[u8]>> AsRef<[u8]> for Sending<P> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// A page's bytes, sent from its slot.
struct PagePayload(Arc<Page>);

impl AsRef<[u8]> for PagePayload {
    fn as_ref(&self) -> &[u8] {
        &self.0.payload
    }
}

/// A part of a sealed page.
struct PartPayload {
    page: Arc<Page>,
    part: usize,
}

impl AsRef<[u8]> for PartPayload {
    fn as_ref(&self) -> &[u8] {
        let range = self.page.meta.part_range(self.part).unwrap_or_default();
        &self.page.payload[range]
    }
}

/// A landed part of a page that is still being written.
struct PiecePayload(larder_device::Piece);

impl AsRef<[u8]> for PiecePayload {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

async fn get(
    shared: &Shared,
    client: &ToClient,
    ids: Vec<PageId>,
    deadline: Instant,
    places: &Places,
) -> io::Result<()> {
    let (there, elsewhere): (Vec<_>, Vec<_>) =
        (0..).zip(ids).partition(|(_, id)| shared.store.locate(id) == TierCode::L2);
    let send_page = async |index, page: Arc<Page>, tier, permit| {
        if let Places::Some(held) = places
            && held.lock().len() < PLACES_MAX
            && let Some(hold) = shared.store.hold(&page)
        {
            return client.point_at(held, hold, index, tier).await;
        }
        let head = Response::Page { index, tier, meta: page.meta.clone(), place: None };
        client.send_bytes(shared, head, PagePayload(page), permit).await
    };
    let at_once = async {
        // A few at a time, so that a client that does not read holds no more than that.
        for group in there.chunks(GET_PAGES_AT_ONCE) {
            let ids: Vec<PageId> = group.iter().map(|(_, id)| *id).collect();
            for ((index, id), page) in group.iter().zip(shared.store.get_l2(&ids)) {
                let permit = client.permit().await?;
                match page {
                    Some(page) => send_page(*index, page, TierCode::L2, permit).await?,
                    // It left L2 meanwhile.
                    None => match shared.store.get(id, deadline).await {
                        Some((page, tier)) => send_page(*index, page, tier, permit).await?,
                        None => client.send(Response::Miss { index: *index }).await?,
                    },
                }
            }
        }
        io::Result::Ok(())
    };
    let after_a_while = async {
        let mut pages = futures::stream::iter(elsewhere)
            .map(|(index, id)| async move {
                let permit = client.permit().await?;
                io::Result::Ok((index, shared.store.get(&id, deadline).await, permit))
            })
            .buffer_unordered(GET_PAGES_AT_ONCE);
        while let Some(found) = pages.next().await {
            match found? {
                (index, Some((page, tier)), permit) => send_page(index, page, tier, permit).await?,
                (index, None, _) => client.send(Response::Miss { index }).await?,
            }
        }
        io::Result::Ok(())
    };
    futures::try_join!(at_once, after_a_while)?;
    client.send(Response::End).await
}

/// Sends a page that is there, being written, or about to be, part by part.
async fn follow(shared: &Shared, client: &ToClient, id: PageId, deadline: Instant) -> io::Result<()> {
    let end = |state, meta| client.send(Response::FollowEnd { state, meta });
    loop {
        match shared.store.presence(&id) {
            Presence::Sealed => {
                let Some((page, _)) = shared.store.get(&id, deadline).await else {
                    return end(FollowState::Miss, None).await;
                };
                for part in 0..page.meta.part_bytes.len() {
                    let crcs = page.meta.part_crcs(part).unwrap_or_default().to_vec();
                    let head = Response::Part { part: part as u32, crcs };
                    let permit = client.permit().await?;
                    client.send_bytes(shared, head, PartPayload { page: page.clone(), part }, permit).await?;
                }
                return end(FollowState::Sealed, Some(page.meta.clone())).await;
            }
            Presence::Open(put) => match follow_put(shared, client, &put, deadline).await? {
                Progress::Sealed => {
                    // The client believes this only if it is the page whose parts it was just sent.
                    let found = shared.store.get(&id, deadline).await;
                    let (state, meta) = match found {
                        Some((page, _)) => (FollowState::Sealed, Some(page.meta.clone())),
                        None => (FollowState::Miss, None),
                    };
                    return end(state, meta).await;
                }
                Progress::Aborted => return end(FollowState::Aborted, None).await,
                Progress::Open(_) => return end(FollowState::Miss, None).await,
            },
            Presence::Nothing(waiter) => {
                if !waiter.begun(deadline).await {
                    return end(FollowState::Miss, None).await;
                }
            }
            Presence::Crowded => return end(FollowState::Miss, None).await,
        }
    }
}

/// Sends parts as they land; returns how the put ended, or `Open` at the deadline.
async fn follow_put(shared: &Shared, client: &ToClient, put: &Put, deadline: Instant) -> io::Result<Progress> {
    let mut now = put.progress();
    let mut sent = vec![false; put.part_count()];
    loop {
        for (part, sent) in sent.iter_mut().enumerate().filter(|(_, sent)| !**sent) {
            if let Some((bytes, crcs)) = put.landed(part) {
                *sent = true;
                let head = Response::Part { part: part as u32, crcs };
                let permit = client.permit().await?;
                client.send_bytes(shared, head, PiecePayload(bytes), permit).await?;
            }
        }
        if !matches!(now, Progress::Open(_)) {
            return Ok(now);
        }
        match tokio::time::timeout_at(deadline.into(), put.progress_after(now)).await {
            Ok(changed) => now = changed,
            Err(_) => return Ok(Progress::Open(0)),
        }
    }
}

async fn administer(shared: &Shared, message: Request, ids: Vec<PageId>, deadline: Instant) -> Response {
    match message {
        Request::Warm(_) => Response::Count(shared.store.warm(&ids, deadline).await as u32),
        Request::Forget(_) => match shared.store.forget(&ids, deadline).await {
            Ok(count) => Response::Count(count as u32),
            Err(error) => {
                tracing::error!(%error, "forgetting did not reach L3");
                Response::Error { code: ErrorCode::Internal, message: format!("not durably forgotten: {error}") }
            }
        },
        Request::Pin { kind, ttl_ms, .. } => match shared.store.pin(&ids, kind, ttl_ms, deadline).await {
            Ok(count) => Response::Count(count as u32),
            Err(error) => Response::Error { code: ErrorCode::Busy, message: error.to_string() },
        },
        Request::Suspect(_) => Response::Count(shared.store.recheck(&ids[0]) as u32),
        Request::Compare { crcs, .. } => {
            Response::Committed(vec![shared.store.compare(&ids[0], &crcs, deadline).await])
        }
        _ => Response::Error { code: ErrorCode::Malformed, message: "not an administrative message".into() },
    }
}
