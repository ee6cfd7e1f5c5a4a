//! One client.
//!
//! The reading half decodes frames, receives parts straight into their slots, answers what is quick at once, and starts a
//! task for what has to wait. Everything that is sent goes through one bounded queue to the writing half, so a client that
//! does not read holds up nobody but itself. When the connection ends, its tasks end and its open puts are given up.

use crate::node::Shared;
use crate::puts::{Presence, Progress, Put};
use crate::tiers::Page;
use futures::StreamExt;
use larder_format::codec::DecodeError;
use larder_format::{MAX_PAGE_BYTES, NamespaceId, PageId, PageKey};
use larder_wire::{
    CommitOutcome, ErrorCode, FollowState, Frame, FrameHeader, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Payload,
    Request, ReserveOutcome, Reserved, Response, TierCode, read_frame,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;

/// Most requests of one connection that wait at a time; more are answered "busy".
const REQUESTS_MAX: usize = 4096;
/// Most puts of one connection that are open at a time; more are answered "busy".
const PUTS_MAX: usize = 4096;
/// Frames queued towards the client.
const SEND_QUEUE_FRAMES: usize = 32;
/// Pages of one Get that are read at a time.
const GET_PAGES_AT_ONCE: usize = 16;
/// Most time until Hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Most time to send one frame, or to receive one payload, before the client is given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// For requests that do not say how long they wait.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(5);
/// However long a request says it waits, it waits no longer.
const DEADLINE_MAX: Duration = Duration::from_secs(600);
const IO_BUFFER_BYTES: usize = 64 << 10;

/// Serves one client until it leaves, misbehaves, or the node stops.
pub(crate) async fn serve(shared: Arc<Shared>, stream: TcpStream) {
    let peer = stream.peer_addr().map_or_else(|_| "?".to_string(), |a| a.to_string());
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, %error, "TCP_NODELAY");
    }
    let (read, write) = stream.into_split();
    let (sender, receiver) = mpsc::channel(SEND_QUEUE_FRAMES);
    let writer = tokio::spawn(write_frames(write, receiver));
    let connection = Connection {
        shared: shared.clone(),
        out: sender,
        namespace: None,
        puts: HashMap::new(),
        next_put: 1,
        tasks: Arc::default(),
        permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
    };
    let mut reader = BufReader::with_capacity(IO_BUFFER_BYTES, read);
    match connection.run(&mut reader).await {
        Ok(()) => tracing::debug!(%peer, "client left"),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            shared.metrics.connections_rejected.inc();
            tracing::warn!(%peer, %error, "connection closed: not what a Larder client says");
        }
        Err(error) => tracing::debug!(%peer, %error, "connection ended"),
    }
    // The queue's senders are gone with the connection and its tasks; what is queued may still leave.
    let _ = tokio::time::timeout(Duration::from_secs(1), writer).await;
}

async fn write_frames(write: OwnedWriteHalf, mut queue: mpsc::Receiver<Frame>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(IO_BUFFER_BYTES, write);
    while let Some(frame) = queue.recv().await {
        let send = async {
            out.write_all(&frame.head).await?;
            if let Some(payload) = &frame.payload {
                out.write_all((**payload).as_ref()).await?;
            }
            if queue.is_empty() { out.flush().await } else { Ok(()) }
        };
        tokio::time::timeout(STALL_TIMEOUT, send).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    }
    out.flush().await
}

/// Tasks by request number.
type Tasks = Arc<Mutex<HashMap<u64, AbortHandle>>>;

struct Connection {
    shared: Arc<Shared>,
    out: mpsc::Sender<Frame>,
    namespace: Option<NamespaceId>,
    puts: HashMap<u64, Arc<Put>>,
    next_put: u64,
    tasks: Tasks,
    permits: Arc<Semaphore>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let tasks: Vec<AbortHandle> = self.tasks.lock().drain().map(|(_, task)| task).collect();
        tasks.iter().for_each(AbortHandle::abort);
        for put in self.puts.values() {
            self.shared.puts.abort(put);
        }
    }
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Connection {
    async fn run(mut self, reader: &mut BufReader<OwnedReadHalf>) -> io::Result<()> {
        let mut body = Vec::new();
        let hello = tokio::time::timeout(HELLO_TIMEOUT, read_frame(reader, &mut body)).await;
        let Some(header) = hello.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? else { return Ok(()) };
        self.hello(&header, &body).await?;
        while let Some(header) = read_frame(reader, &mut body).await? {
            let request = Request::decode(header.kind, &body).map_err(invalid)?;
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
            return self.answer(header.request, Response::Error { code: ErrorCode::Version, message }).await;
        }
        self.namespace = namespace.map(|n| n.id());
        tracing::debug!(client = %name, namespace = ?self.namespace, "connected");
        let identity = &self.shared.identity;
        let (node_id, epoch) = (identity.node_id.clone(), identity.epoch);
        self.answer(header.request, Response::Hello { version, node_id, epoch, namespace: self.namespace }).await
    }

    async fn dispatch(&mut self, header: &FrameHeader, message: Request) -> io::Result<()> {
        let request = header.request;
        let shared = self.shared.clone();
        let response = match message {
            Request::Hello { .. } => return Err(invalid(DecodeError::Invalid("second Hello"))),
            Request::Cancel(other) => {
                if let Some(task) = self.tasks.lock().remove(&other) {
                    task.abort();
                }
                return Ok(());
            }
            Request::Register { name, ttl_ms, info } => {
                let ttl = Duration::from_millis(u64::from(ttl_ms));
                Response::Count(u32::from(shared.members.register(name, info, ttl, Instant::now())))
            }
            Request::Withdraw(name) => Response::Count(u32::from(shared.members.withdraw(&name))),
            Request::Members => Response::Members(shared.members.list(Instant::now())),
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
                let tiers = keys.into_iter().map(|key| shared.tiers.locate(&page(key))).collect();
                self.answer(request, Response::Located(tiers)).await
            }
            Request::Reserve(reserved) => {
                let (outcome, put) = self.reserve(page(reserved.key), reserved);
                self.answer(request, Response::Reserved { outcome, put }).await
            }
            Request::Commit { put } => {
                let outcome = match self.puts.remove(&put) {
                    Some(put) => shared.puts.commit(&put),
                    None => CommitOutcome::Incomplete,
                };
                self.answer(request, Response::Committed(outcome)).await
            }
            Request::Abort { put } => {
                if let Some(put) = self.puts.remove(&put) {
                    shared.puts.abort(&put);
                }
                Ok(())
            }
            Request::Get(keys) => {
                let ids = pages(keys);
                let out = self.out.clone();
                self.spawn(request, async move { get(&shared, &out, request, ids, deadline).await }).await
            }
            Request::Follow(key) => {
                let (id, out) = (page(key), self.out.clone());
                shared.metrics.follows.inc();
                self.spawn(request, async move { follow(&shared, &out, request, id, deadline).await }).await
            }
            message => {
                let ids = match &message {
                    Request::Warm(keys) | Request::Forget(keys) => pages(keys.clone()),
                    Request::Suspect(key) | Request::Compare { key, .. } => vec![page(*key)],
                    _ => return Err(invalid(DecodeError::Invalid("message"))),
                };
                let out = self.out.clone();
                self.spawn(request, async move {
                    let response = administer(&shared, message, ids, deadline).await;
                    send(&out, response.frame(request, None)).await
                })
                .await
            }
        }
    }

    fn reserve(&mut self, id: PageId, page: Reserved) -> (ReserveOutcome, u64) {
        let bytes = page.part_bytes.iter().map(|&b| u64::from(b)).sum::<u64>();
        let sound = !page.part_bytes.is_empty() && !page.part_bytes.contains(&0) && bytes <= MAX_PAGE_BYTES as u64;
        if !sound || self.puts.len() >= PUTS_MAX {
            return (ReserveOutcome::Busy, 0);
        }
        match self.shared.puts.reserve(id, page) {
            Ok(put) => {
                let number = self.next_put;
                self.next_put += 1;
                self.puts.insert(number, put);
                (ReserveOutcome::Granted, number)
            }
            Err(outcome) => (outcome, 0),
        }
    }

    /// Receives a payload into the memory of its part. A part that is not wanted is read and thrown away; one that is
    /// damaged ends its put.
    async fn receive_part(
        &mut self,
        reader: &mut BufReader<OwnedReadHalf>,
        header: &FrameHeader,
        put_number: u64,
        part: u32,
        crcs: Vec<u32>,
    ) -> io::Result<()> {
        let bytes = header.payload_bytes as usize;
        let stalled = |_| io::Error::from(io::ErrorKind::TimedOut);
        let put = self.puts.get(&put_number).cloned();
        let taken = put.and_then(|put| put.take_part(part as usize, bytes).map(|slot| (put, slot)));
        let Some((put, mut slot)) = taken else {
            let discard = discard(reader, bytes);
            return tokio::time::timeout(STALL_TIMEOUT, discard).await.map_err(stalled)?;
        };
        tokio::time::timeout(STALL_TIMEOUT, reader.read_exact(&mut slot)).await.map_err(stalled)??;
        self.shared.metrics.bytes_received.inc_by(bytes as u64);
        if !put.land(part as usize, slot, crcs) {
            self.shared.metrics.parts_corrupt.inc();
            tracing::warn!(id = ?put.id, part, "part damaged on its way: put given up");
            self.puts.remove(&put_number);
            self.shared.puts.abort(&put);
        }
        Ok(())
    }

    /// Runs a request that may wait, unless too many do.
    async fn spawn<F>(&self, request: u64, work: F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            let message = format!("more than {REQUESTS_MAX} requests wait on this connection");
            return self.answer(request, Response::Error { code: ErrorCode::Busy, message }).await;
        };
        let tasks = self.tasks.clone();
        // The lock is held over the spawn, so that the task cannot end before it is noted.
        let mut running = self.tasks.lock();
        let task = tokio::spawn(async move {
            let _done = Done { tasks, request, _permit: permit };
            let _ = work.await;
        });
        running.insert(request, task.abort_handle());
        Ok(())
    }
}

/// Takes a task off the list when it ends, however it ends.
struct Done {
    tasks: Tasks,
    request: u64,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Done {
    fn drop(&mut self) {
        self.tasks.lock().remove(&self.request);
    }
}

fn deadline(header: &FrameHeader) -> Instant {
    let patience = match header.deadline_ms {
        0 => DEADLINE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)).min(DEADLINE_MAX),
    };
    Instant::now() + patience
}

async fn discard(reader: &mut BufReader<OwnedReadHalf>, bytes: usize) -> io::Result<()> {
    let copied = tokio::io::copy(&mut reader.take(bytes as u64), &mut tokio::io::sink()).await?;
    if copied < bytes as u64 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

async fn send(out: &mpsc::Sender<Frame>, frame: Frame) -> io::Result<()> {
    out.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// A page's bytes, sent from its slot.
struct PagePayload(Arc<Page>);

impl AsRef<[u8]> for PagePayload {
    fn as_ref(&self) -> &[u8] {
        &self.0.payload
    }
}

async fn send_bytes(shared: &Shared, out: &mpsc::Sender<Frame>, frame: Frame) -> io::Result<()> {
    shared.metrics.bytes_sent.inc_by(frame.len() as u64);
    send(out, frame).await
}

async fn get(
    shared: &Shared,
    out: &mpsc::Sender<Frame>,
    request: u64,
    ids: Vec<PageId>,
    deadline: Instant,
) -> io::Result<()> {
    let mut pages = futures::stream::iter(ids.into_iter().enumerate())
        .map(|(index, id)| async move { (index as u32, shared.tiers.get(&id, deadline).await) })
        .buffer_unordered(GET_PAGES_AT_ONCE);
    while let Some((index, found)) = pages.next().await {
        match found {
            Some((page, tier)) => {
                let head = Response::Page { index, tier, meta: page.meta.clone() };
                let payload: Payload = Box::new(PagePayload(page));
                send_bytes(shared, out, head.frame(request, Some(payload))).await?;
            }
            None => send(out, Response::Miss { index }.frame(request, None)).await?,
        }
    }
    send(out, Response::End.frame(request, None)).await
}

/// Sends a page that is there, being written, or about to be, part by part.
async fn follow(
    shared: &Shared,
    out: &mpsc::Sender<Frame>,
    request: u64,
    id: PageId,
    deadline: Instant,
) -> io::Result<()> {
    let end = |state, meta| Response::FollowEnd { state, meta }.frame(request, None);
    loop {
        match shared.puts.presence(&id) {
            Presence::Sealed => {
                let Some((page, _)) = shared.tiers.get(&id, deadline).await else {
                    return send(out, end(FollowState::Miss, None)).await;
                };
                for part in 0..page.meta.part_bytes.len() {
                    let crcs = page.meta.part_crcs(part).unwrap_or_default().to_vec();
                    let payload: Payload = Box::new(PartPayload { page: page.clone(), part });
                    let head = Response::Part { part: part as u32, crcs };
                    send_bytes(shared, out, head.frame(request, Some(payload))).await?;
                }
                return send(out, end(FollowState::Sealed, Some(page.meta.clone()))).await;
            }
            Presence::Open(put) => match follow_put(shared, out, request, &put, deadline).await? {
                Progress::Sealed => {
                    // The metadata is that of the page that is visible now: the put that was just followed.
                    let found = shared.tiers.get(&id, deadline).await;
                    let (state, meta) = match found {
                        Some((page, _)) => (FollowState::Sealed, Some(page.meta.clone())),
                        None => (FollowState::Miss, None),
                    };
                    return send(out, end(state, meta)).await;
                }
                Progress::Aborted => return send(out, end(FollowState::Aborted, None)).await,
                Progress::Open(_) => return send(out, end(FollowState::Miss, None)).await,
            },
            Presence::Nothing(changed) => {
                if tokio::time::timeout_at(deadline.into(), changed).await.is_err() {
                    shared.puts.forget_waiters(&id);
                    return send(out, end(FollowState::Miss, None)).await;
                }
            }
            Presence::Crowded => return send(out, end(FollowState::Miss, None)).await,
        }
    }
}

/// Sends parts as they land; returns how the put ended, or `Open` at the deadline.
async fn follow_put(
    shared: &Shared,
    out: &mpsc::Sender<Frame>,
    request: u64,
    put: &Put,
    deadline: Instant,
) -> io::Result<Progress> {
    let mut progress = put.progress();
    let mut sent = vec![false; put.part_count()];
    loop {
        let now = *progress.borrow_and_update();
        for (part, sent) in sent.iter_mut().enumerate().filter(|(_, sent)| !**sent) {
            if let Some((bytes, crcs)) = put.landed(part) {
                *sent = true;
                let head = Response::Part { part: part as u32, crcs };
                send_bytes(shared, out, head.frame(request, Some(Box::new(PiecePayload(bytes))))).await?;
            }
        }
        if !matches!(now, Progress::Open(_)) {
            return Ok(now);
        }
        match tokio::time::timeout_at(deadline.into(), progress.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Ok(Progress::Aborted),
            Err(_) => return Ok(Progress::Open(0)),
        }
    }
}

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

struct PiecePayload(larder_device::Piece);

impl AsRef<[u8]> for PiecePayload {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

async fn administer(shared: &Shared, message: Request, ids: Vec<PageId>, deadline: Instant) -> Response {
    match message {
        Request::Warm(_) => {
            let loads = futures::stream::iter(ids)
                .map(|id| async move { shared.tiers.get(&id, deadline).await.is_some() })
                .buffer_unordered(GET_PAGES_AT_ONCE);
            Response::Count(loads.filter(|&there| std::future::ready(there)).count().await as u32)
        }
        Request::Forget(_) => {
            shared.puts.abort_all(&ids);
            match shared.tiers.forget(&ids, deadline).await {
                Ok(count) => Response::Count(count as u32),
                Err(error) => {
                    tracing::error!(%error, "forgetting did not reach L3");
                    Response::Error { code: ErrorCode::Internal, message: format!("not durably forgotten: {error}") }
                }
            }
        }
        Request::Suspect(_) => Response::Count(shared.tiers.recheck(&ids[0]) as u32),
        Request::Compare { crcs, .. } => Response::Committed(match shared.tiers.get(&ids[0], deadline).await {
            Some((page, TierCode::L2 | TierCode::L3)) if page.meta.chunk_crcs == crcs => CommitOutcome::AlreadyThere,
            Some(_) => {
                shared.metrics.puts_refused.inc();
                CommitOutcome::Refused
            }
            None => CommitOutcome::Incomplete,
        }),
        _ => Response::Error { code: ErrorCode::Malformed, message: "not an administrative message".into() },
    }
}
