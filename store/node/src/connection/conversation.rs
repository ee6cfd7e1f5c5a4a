//! What one client says, request by request.

use super::following::follow;
use super::lookup::Lease;
use super::rdma::{Lines, Unsealed};
use super::reading::Asked;
use super::receiving::Part;
use super::sending::{ToClient, WINDOW_UNIT, send};
use super::socket::FreeSince;
use super::tasks::{Done, RunningTask, Tasks};
use super::{HELLO_TIMEOUT, Places, STALL_TIMEOUT, invalid};
use crate::budget::{Account, Busy, Charge};
use crate::clock::now;
use crate::holds::Hold;
use crate::node::Shared;
use crate::puts::Put;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_format::{NamespaceId, PageId, PageKey};
use larder_share::Lender;
use larder_wire::{
    CommitOutcome, Entry, ErrorCode, Frame, FrameHeader, FrameQueue, FrameReader, MAX_PIN_MS, PROTOCOL_VERSION_MIN,
    PageRange, PartBytes, PinKind, Request, Response, Source,
};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;

/// Most requests of one connection that wait at a time, those with many keys counted several times; more are answered
/// "busy".
const REQUESTS_MAX: usize = 4096;
/// Frames in each queue towards the client.
const SEND_QUEUE_FRAMES: usize = 32;
/// A Hello says who and of which namespace; whoever it is may have no more than this of the node's memory.
const HELLO_BODY_MAX: u32 = 16 << 10;
/// When a client is to try again that has too many requests waiting.
const CROWDED_RETRY: Duration = Duration::from_millis(10);
/// Keys that count as one request.
const KEYS_PER_PERMIT: usize = 64;
/// For requests that do not say how long they wait.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(5);
/// However long a request says it waits, it waits no longer.
const DEADLINE_MAX: Duration = Duration::from_secs(600);

/// One client, and what it has under way.
pub(super) struct Connection {
    pub(super) shared: Arc<Shared>,
    pub(super) account: Arc<Account>,
    /// To the client: what is short, and page bytes.
    pub(super) out: mpsc::Sender<Frame>,
    /// Of the protocol, as agreed.
    pub(super) version: u16,
    pub(super) bulk: mpsc::Sender<Frame>,
    pub(super) free_since: FreeSince,
    pub(super) namespace: Option<NamespaceId>,
    /// Parts of a page of that namespace.
    pub(super) part_table: Vec<u32>,
    /// Open puts.
    pub(super) puts: BTreeMap<Entry, Arc<Put>>,
    pub(super) places: Places,
    /// What parts may be copied from.
    pub(super) lent: Option<Arc<dyn Lender>>,
    /// Bytes copied from there since others had their turn.
    pub(super) copied: usize,
    /// What it reaches by RDMA.
    pub(super) lines: Arc<Lines>,
    /// What lookups promised, by the number of the request.
    pub(super) leases: BTreeMap<u64, Arc<Lease>>,
    pub(super) tasks: Tasks,
    pub(super) next_task: u64,
    /// What waits, in units of [`KEYS_PER_PERMIT`] keys.
    pub(super) permits: Arc<Semaphore>,
    /// Room for bytes on their way to this client, in units of [`WINDOW_UNIT`].
    pub(super) window: Arc<Semaphore>,
    /// When the request came that is being worked on, and what it is counted for until somebody takes that over.
    pub(super) heard: Instant,
    pub(super) charge: Option<Charge>,
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

impl Connection {
    /// A client of which nothing is known yet, and the queue of what goes to it.
    pub(super) fn new(
        shared: Arc<Shared>,
        account: Arc<Account>,
        places: Places,
        lent: Option<Arc<dyn Lender>>,
        free_since: FreeSince,
    ) -> (Self, FrameQueue) {
        let ((out, first), (bulk, then)) = (mpsc::channel(SEND_QUEUE_FRAMES), mpsc::channel(SEND_QUEUE_FRAMES));
        let connection = Self {
            shared,
            account,
            out,
            version: PROTOCOL_VERSION_MIN,
            bulk,
            free_since,
            namespace: None,
            part_table: Vec::new(),
            puts: BTreeMap::new(),
            places,
            lent,
            copied: 0,
            lines: Arc::default(),
            leases: BTreeMap::new(),
            tasks: Arc::default(),
            next_task: 0,
            permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
            window: Arc::new(Semaphore::new(0)),
            heard: now(),
            charge: None,
        };
        (connection, FrameQueue::new(first, then))
    }

    /// Hears the client out.
    pub(super) async fn run<S: Source>(mut self, reader: &mut FrameReader<S>) -> io::Result<()> {
        let hello = async {
            let Some(head) = reader.head().await? else { return Ok(None) };
            if head.header.body_bytes > HELLO_BODY_MAX {
                return Err(invalid(DecodeError::Invalid("length of the first message")));
            }
            reader.take_body(&head).await?;
            Ok(Some(head.header))
        };
        let hello = tokio::time::timeout(HELLO_TIMEOUT, hello).await;
        let Some(header) = hello.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? else { return Ok(()) };
        self.hello(&header, reader.body()).await?;
        while let Some(head) = reader.head().await? {
            let header = head.header;
            let stalled = |_| io::Error::from(io::ErrorKind::TimedOut);
            match self.account.request(header.body_bytes, !Request::may_be_refused(header.kind)) {
                Ok(charge) => self.charge = Some(charge),
                Err(busy) => {
                    tokio::time::timeout(STALL_TIMEOUT, reader.skip_body(&head)).await.map_err(stalled)??;
                    if header.payload_bytes > 0 {
                        return Err(invalid(DecodeError::Invalid("payload")));
                    }
                    self.heard = now();
                    self.refuse(header.request, busy).await?;
                    continue;
                }
            }
            tokio::time::timeout(STALL_TIMEOUT, reader.take_body(&head)).await.map_err(stalled)??;
            self.heard = now();
            let request = match Request::decode(self.version, header.kind, reader.body()) {
                Ok(request) => request,
                Err(error) => {
                    let message = format!("a message of kind {}: {error}", header.kind);
                    self.answer(header.request, Response::Error { code: ErrorCode::Malformed, message }).await?;
                    return Err(invalid(error));
                }
            };
            match request {
                Request::Part { put, part, crcs, bytes: PartBytes::Window } if header.payload_bytes == 0 => {
                    self.land_written(put, part, crcs);
                }
                Request::Part { put, part, crcs, bytes: PartBytes::Payload } => {
                    let bytes = header.payload_bytes;
                    self.receive_part(reader, Part { put, part, crcs, bytes, lent_at: None }).await?;
                }
                Request::Part { put, part, crcs, bytes: PartBytes::Lent { offset, bytes } }
                    if header.payload_bytes == 0 =>
                {
                    self.receive_part(reader, Part { put, part, crcs, bytes, lent_at: Some(offset) }).await?;
                }
                _ if header.payload_bytes > 0 => return Err(invalid(DecodeError::Invalid("payload"))),
                request => self.dispatch(&header, request).await?,
            }
            self.charge = None;
        }
        Ok(())
    }

    pub(super) async fn answer(&self, request: u64, response: Response) -> io::Result<()> {
        send(&self.out, response.frame(self.version, request, None)).await
    }

    async fn hello(&mut self, header: &FrameHeader, body: &[u8]) -> io::Result<()> {
        // Every version has the same Hello.
        let message = Request::decode(self.version, header.kind, body).map_err(invalid)?;
        let Request::Hello { version_min, version_max, name, namespace } = message else {
            return Err(invalid(DecodeError::Invalid("first message")));
        };
        let newest = self.shared.protocol_max;
        let version = version_max.min(newest);
        if version < version_min.max(PROTOCOL_VERSION_MIN) || header.payload_bytes > 0 {
            let message = format!(
                "client speaks protocol {version_min} to {version_max}, this node {PROTOCOL_VERSION_MIN} to {newest}"
            );
            self.shared.metrics.connections_rejected.inc();
            tracing::warn!(client = %name, %message, "refused");
            self.answer(header.request, Response::Error { code: ErrorCode::Version, message }).await?;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(namespace) = &namespace {
            self.part_table = namespace.geometry.part_table();
            self.account.belongs_to(&namespace.tenant);
            let window = self.shared.store.options().window_bytes(self.page_bytes());
            self.window.add_permits(window.div_ceil(WINDOW_UNIT) as usize);
        }
        self.namespace = namespace.map(|n| n.id());
        if let Some(namespace) = self.namespace {
            self.shared.store.welcome(namespace);
        }
        tracing::debug!(client = %name, version, namespace = ?self.namespace, "connected");
        self.version = version;
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
                self.answer_reserved(request, outcomes).await
            }
            Request::Commit(puts) => {
                let puts: Vec<Option<Arc<Put>>> = puts.iter().map(|name| self.puts.remove(name)).collect();
                if !puts.iter().flatten().any(|put| put.withdraws()) {
                    return self.answer(request, commit(&shared, &puts)).await;
                }
                let (unsealed, client) = (Unsealed { shared, puts }, self.client(request, deadline));
                self.spawn(request, 1, async move { unsealed.seal(&client, deadline).await }).await
            }
            Request::Abort(name) => {
                if let Some(put) = self.puts.remove(&name) {
                    shared.store.abort(&put);
                }
                Ok(())
            }
            Request::Get { keys, by } => {
                let asked = (0..).zip(keys).map(|(index, key)| Asked { index, id: page(key), bytes: None });
                self.get(request, asked.collect(), by, deadline).await
            }
            Request::GetRanges { ranges, by } => {
                let range = |(index, PageRange { key, bytes })| Asked { index, id: page(key), bytes: Some(bytes) };
                self.get(request, (0..).zip(ranges).map(range).collect(), by, deadline).await
            }
            Request::Lines { gone, offered } => {
                let (lines, client) = (self.lines.clone(), self.client(request, deadline));
                self.spawn(request, 1, async move {
                    let response = lines.make(&shared, &gone, offered, deadline).await;
                    client.send(response).await
                })
                .await
            }
            Request::OpenParts { reserve, lines } => self.open_parts(request, reserve, lines, deadline).await,
            Request::Lookup { keys, hold_ms } => self.lookup(request, pages(keys), hold_ms, deadline).await,
            Request::Release(entries) => {
                self.lines.release(&entries);
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
                let (id, client) = (page(key), self.client(request, deadline));
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
                let (client, loads) = (self.client(request, deadline), (self.account.clone(), self.page_bytes()));
                self.spawn(request, ids.len(), async move {
                    let response = administer(&shared, message, ids, loads, deadline).await;
                    client.send(response).await
                })
                .await
            }
        }
    }

    pub(super) fn client(&self, request: u64, deadline: Instant) -> ToClient {
        ToClient::new(self, request, deadline)
    }

    /// Bytes of a page of this connection's namespace.
    pub(super) fn page_bytes(&self) -> u64 {
        self.part_table.iter().map(|&bytes| u64::from(bytes)).sum()
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

    /// Runs a request about `keys` keys that may wait, unless too much waits already. What is about one is begun here, as it
    /// mostly need not wait; of several pages the first leave while others are looked up.
    pub(super) async fn spawn<F>(&mut self, request: u64, keys: usize, work: F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        self.run_here(request, keys, keys <= 1, work).await
    }

    /// The same, begun here or not.
    pub(super) async fn run_here<F>(&mut self, request: u64, keys: usize, here: bool, work: F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let Some(permit) = self.permit(keys) else {
            return self.refuse(request, Busy { retry_after: CROWDED_RETRY }).await;
        };
        let work = async move {
            let _permit = permit;
            work.await
        };
        if !here {
            self.start(request, work);
            return Ok(());
        }
        let mut work = Box::pin(work);
        match futures::poll!(&mut work) {
            Poll::Ready(ended) => ended,
            Poll::Pending => {
                self.start(request, work);
                Ok(())
            }
        }
    }

    /// Leave for a request about `keys` keys to wait, unless too much waits already.
    pub(super) fn permit(&self, keys: usize) -> Option<OwnedSemaphorePermit> {
        let weight = 1 + (keys / KEYS_PER_PERMIT) as u32;
        self.permits.clone().try_acquire_many_owned(weight).ok()
    }

    /// Runs a task of a request.
    pub(super) fn start<F>(&mut self, request: u64, work: F)
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let number = self.next_task;
        self.next_task += 1;
        let (tasks, charge) = (self.tasks.clone(), self.charge.take());
        // The lock is held over the spawn, so that the task cannot end before it is noted.
        let mut running = self.tasks.lock();
        let task = tokio::spawn(async move {
            let (_done, _charge) = (Done { tasks, number }, charge);
            let _ = work.await;
        });
        running.insert(number, RunningTask { request, handle: task.abort_handle() });
    }
}

/// Seals puts, those that are known.
pub(super) fn commit(shared: &Shared, puts: &[Option<Arc<Put>>]) -> Response {
    let outcomes = puts.iter().map(|put| match put {
        Some(put) => shared.store.commit(put),
        None => CommitOutcome::Incomplete,
    });
    Response::Committed(outcomes.collect())
}

fn deadline(header: &FrameHeader) -> Instant {
    let patience = match header.deadline_ms {
        0 => DEADLINE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)).min(DEADLINE_MAX),
    };
    now() + patience
}

/// `loads` says whose the pages are that it brings into L2, and how large one is.
async fn administer(
    shared: &Shared,
    message: Request,
    ids: Vec<PageId>,
    loads: (Arc<Account>, u64),
    deadline: Instant,
) -> Response {
    match message {
        Request::Warm(_) => Response::Count(shared.store.warm_for(Some(&loads), &ids, deadline).await as u32),
        Request::Forget(_) => match shared.store.forget(&ids, deadline).await {
            Ok(count) => Response::Count(count as u32),
            Err(error) => {
                tracing::error!(%error, "forgetting did not reach L3");
                Response::Error { code: ErrorCode::Internal, message: format!("not durably forgotten: {error}") }
            }
        },
        Request::Pin { kind, ttl_ms, .. } => {
            match shared.store.pin_for(Some(&loads), &ids, kind, ttl_ms, deadline).await {
                Ok(count) => Response::Count(count as u32),
                Err(error) => Response::Error { code: ErrorCode::Busy, message: error.to_string() },
            }
        }
        Request::Suspect(_) => Response::Count(shared.store.recheck(&ids[0]) as u32),
        Request::Compare { crcs, .. } => {
            let (account, page_bytes) = &loads;
            let compare = async {
                let _read = account.charge_read(*page_bytes).await;
                shared.store.compare(&ids[0], &crcs, deadline).await
            };
            let outcome = tokio::time::timeout_at(deadline.into(), compare).await;
            Response::Committed(vec![outcome.unwrap_or(CommitOutcome::Incomplete)])
        }
        _ => Response::Error { code: ErrorCode::Malformed, message: "not an administrative message".into() },
    }
}
