//! [`Connection`]: one connection to a node. It carries many requests at a time.
//!
//! Invariants:
//! - A request number is used once per connection.
//! - A request ends once: with its last response, when its caller gives it up (deadline, hedge or
//!   dropped future), or with the connection. Its handler is then dropped, which returns the
//!   caller's buffers.
//! - A payload that is being received does not delay that end: the receiving task is interrupted,
//!   drops the handler, and discards the rest of the payload.
//! - The node hears of a request that the client gave up before its last response.

use super::handlers::{ResponseHandler, StoredAt, UncopiedBytes};
use super::outbox::Outbox;
use super::pending::{Cancelled, PendingRequests};
use super::rdma_channels::RdmaChannels;
use super::releases::{ReleaseOnDrop, ReleaseQueue};
use crate::placement;
use crate::random;
use crate::url::Transport;
use larder_format::{PageId, PageMeta, PageOrigin};
use larder_memory::share::{ArenaMap, ExpectedFiles, HeldBytes, SharedMemory};
use larder_runtime::lock::Mutex;
use larder_runtime::{fail_point, now};
use larder_wire::{Entry, FrameQueue, Request, Response, TierCode, VERSION_COPIES, VERSION_SHARED_MEMORY_PUTS};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

/// Minimum pause after a refused put. During it, the client sends the bytes of a put only after the
/// node has granted it.
const PUTS_PAUSED_MIN: Duration = Duration::from_secs(1);
/// Limit per connection of the bytes that the node was told to copy and whose commit it has not
/// answered. The node copies them before it reads the next request.
const COPY_BYTES_MAX: usize = 64 << 20;
const COPY_UNIT_BYTES: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeIdentity {
    pub(crate) node_id: String,
    /// Grows with each start of the node. Another epoch means that L2 is empty.
    pub(crate) epoch: u64,
    pub(crate) version: u16,
}

/// Memory that a node on this machine shares with this client, and the other way round.
pub(crate) struct SharedMappings {
    pub(crate) arena: Arc<ArenaMap>,
    pub(crate) client_memory: Option<Arc<SharedMemory>>,
}

/// A connection to a node. It multiplexes requests: each has a number, and responses arrive in any
/// order.
pub(crate) struct Connection {
    node: NodeIdentity,
    /// Hash of `node`, for the origins of pages.
    run: u64,
    /// Largest generation that the node has told this connection, 0 if none.
    newest_generation: AtomicU64,
    outbox: Outbox,
    pending: Mutex<PendingRequests>,
    /// Wakes the receiving task when the request whose payload it receives may have been given up.
    given_up: Notify,
    next_request: AtomicU64,
    /// Cancelled when the connection must end, or has ended.
    closed: CancellationToken,
    arena: Option<Arc<ArenaMap>>,
    client_memory: Option<Arc<SharedMemory>>,
    copy_credit: Arc<Semaphore>,
    releases: Arc<ReleaseQueue>,
    rdma: RdmaChannels,
    jitter_seed: u64,
    /// End of the pause that [`Connection::pause_puts`] began.
    puts_paused_until: Mutex<Option<Instant>>,
}

impl Connection {
    pub(crate) fn new(
        node: NodeIdentity,
        shared: Option<SharedMappings>,
        jitter_seed: u64,
    ) -> (Arc<Connection>, FrameQueue) {
        let (outbox, queue) = Outbox::new(node.version);
        let (arena, client_memory) = shared.map_or((None, None), |shared| (Some(shared.arena), shared.client_memory));
        let client_memory = client_memory.filter(|_| node.version >= VERSION_SHARED_MEMORY_PUTS);
        let run = placement::node_run(&node.node_id, node.epoch);
        let connection = Connection {
            node,
            run,
            newest_generation: AtomicU64::new(0),
            outbox,
            pending: Mutex::default(),
            given_up: Notify::new(),
            next_request: AtomicU64::new(1),
            closed: CancellationToken::new(),
            arena,
            client_memory,
            copy_credit: Arc::new(Semaphore::new(COPY_BYTES_MAX / COPY_UNIT_BYTES)),
            releases: Arc::default(),
            rdma: RdmaChannels::default(),
            jitter_seed,
            puts_paused_until: Mutex::default(),
        };
        (Arc::new(connection), queue)
    }

    pub(crate) fn node(&self) -> &NodeIdentity {
        &self.node
    }

    /// Origin of a page of this node with this generation. `None` for 0: the node has not said it.
    pub(crate) fn origin(&self, generation: u64) -> Option<PageOrigin> {
        // Relaxed: a smaller value only makes the node refuse more.
        self.newest_generation.fetch_max(generation, Ordering::Relaxed);
        (generation > 0).then_some(PageOrigin { run: self.run, generation })
    }

    /// Origin of the newest put that this connection knows of. Forgets from now on have a larger
    /// generation. `None` if the node has told no generation yet, or is too old to take copies.
    pub(crate) fn newest_origin(&self) -> Option<PageOrigin> {
        let origin = self.origin(self.newest_generation.load(Ordering::Relaxed));
        origin.filter(|_| self.version() >= VERSION_COPIES)
    }

    /// Generation that a copy from `origin` has for this node, 0 if the node cannot know.
    pub(crate) fn generation_of(&self, origin: Option<PageOrigin>) -> u64 {
        let is_known = |origin: &PageOrigin| origin.run == self.run || fail_point!("client.copy-ignores-node-run");
        origin.filter(is_known).map_or(0, |origin| origin.generation)
    }

    pub(crate) fn version(&self) -> u16 {
        self.node.version
    }

    pub(super) fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Abandons the queued parts of a Reserve.
    pub(crate) fn abandon_parts(&self, reserve: u64) {
        self.outbox.abandon_parts(reserve);
    }

    pub(super) fn pending(&self) -> &Mutex<PendingRequests> {
        &self.pending
    }

    /// Waits until a request is given up while its response is being received.
    pub(super) async fn given_up(&self, request: u64) {
        // `Notify` stores one permit, so a notification between check and wait is not lost.
        while !self.pending.lock().is_given_up(request) {
            self.given_up.notified().await;
        }
    }

    pub(super) fn releases(&self) -> &Arc<ReleaseQueue> {
        &self.releases
    }

    pub(crate) fn rdma(&self) -> &RdmaChannels {
        &self.rdma
    }

    pub(super) fn client_memory(&self) -> Option<&Arc<SharedMemory>> {
        self.client_memory.as_ref()
    }

    pub(super) fn jitter_seed(&self) -> u64 {
        self.jitter_seed
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.pending.lock().len()
    }

    /// Work on this connection: outstanding requests plus 4-KiB units of queued payload.
    pub(super) fn load(&self) -> usize {
        self.outbox.queued_units() + self.outstanding()
    }

    /// Transport of pages now. It changes when RDMA channels appear or die.
    pub(crate) fn transport(&self) -> Transport {
        if self.arena.is_some() {
            Transport::Shm
        } else if self.rdma.is_up() {
            Transport::Rdma
        } else {
            Transport::Tcp
        }
    }

    /// Returns `true` if TCP is the only transport for pages. Over shared memory and RDMA, single
    /// parts may still travel as payload.
    pub(super) fn carries_payload(&self) -> bool {
        self.transport() == Transport::Tcp
    }

    /// Ends the connection and all of its requests.
    pub(crate) fn close(&self) {
        // Cancelled before the handlers are taken. A handler that `begin_by` inserts later is seen
        // there, because it checks `closed` after the insertion.
        self.closed.cancel();
        self.rdma.close();
        // Drop the handlers without the lock: their destructors wake callers.
        let waiting = self.pending.lock().take_all();
        drop(waiting);
    }

    pub(super) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Scales a pause by a random factor between 1 and 1.25. Takes a request number as a fresh
    /// seed; the number is not sent.
    pub(crate) fn jittered(&self, pause: Duration) -> Duration {
        random::jittered(pause, self.jitter_seed ^ self.next_request())
    }

    /// Starts the pause after a refused put: `time`, but at least [`PUTS_PAUSED_MIN`]. During it,
    /// puts wait for their grant before they send bytes.
    pub(crate) fn pause_puts(&self, time: Duration) {
        *self.puts_paused_until.lock() = Some(now() + time.max(PUTS_PAUSED_MIN));
    }

    pub(crate) fn are_puts_paused(&self) -> bool {
        self.puts_paused_until.lock().is_some_and(|until| now() < until)
    }

    /// Reserves the right to let the node copy `bytes` bytes from client memory. The right ends
    /// when the permit is dropped. Returns `None` if there is none before `deadline`.
    pub(crate) async fn reserve_copy_credit(&self, bytes: usize, deadline: Instant) -> Option<OwnedSemaphorePermit> {
        let units = bytes.min(COPY_BYTES_MAX).div_ceil(COPY_UNIT_BYTES) as u32;
        let credit = self.copy_credit.clone().acquire_many_owned(units);
        tokio::time::timeout_at(deadline.into(), credit).await.ok()?.ok()
    }

    /// Reports a page whose bytes do not match its checksums, so that the node checks its copy.
    pub(crate) fn report_corrupt(&self, id: &PageId) {
        tracing::error!(
            ?id,
            node = %self.node.node_id,
            "page failed verification, counted as a miss; asked the node to check its copy"
        );
        // If the queue is full, the next reader of the page reports it.
        self.outbox.try_send(&Request::Suspect(id.key));
    }

    /// Sends a message without a response, and waits for room until `deadline`. Returns `false` on
    /// timeout, or if the connection ended.
    pub(crate) async fn send(&self, request: &Request, deadline: Instant) -> bool {
        self.outbox.send(request, 0, 0, deadline).await
    }

    /// Sends a control message without a response, after those in the queue, without a deadline. A
    /// task waits with it if the queue is full, so callers send at most a few per request. The
    /// message is lost if the connection ends, or outside a runtime with a full queue.
    pub(crate) fn send_detached(&self, request: &Request) {
        self.outbox.send_detached(request);
    }

    /// Takes an unused request number. Relaxed: the number only has to be unique.
    pub(crate) fn next_request(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a request whose responses go to `handler`. Returns `None`, and drops the handler, if
    /// the request cannot be sent before `deadline`.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        number: u64,
        request: &Request,
        handler: ResponseHandler,
        deadline: Instant,
    ) -> Option<OutstandingRequest> {
        self.begin_by(deadline, number, request, handler, deadline).await
    }

    /// Like [`Connection::begin`], but waits for room in the queue until `send_by` only.
    async fn begin_by(
        self: &Arc<Self>,
        send_by: Instant,
        number: u64,
        request: &Request,
        handler: ResponseHandler,
        deadline: Instant,
    ) -> Option<OutstandingRequest> {
        let outstanding = OutstandingRequest { connection: self.clone(), number };
        // Before the request leaves: its response may arrive before `send` returns.
        self.pending.lock().insert(number, handler);
        let is_sent = self.outbox.send(request, number, milliseconds_left(deadline), send_by).await;
        // `close` may have dropped all handlers before this one was inserted.
        (is_sent && !self.closed.is_cancelled()).then_some(outstanding)
    }

    /// Sends a request and waits for its single response. Returns `None` after `deadline`.
    pub(crate) async fn request(self: &Arc<Self>, request: &Request, deadline: Instant) -> Option<Response> {
        self.request_as(self.next_request(), request, deadline).await
    }

    /// Like [`Connection::request`], with a number from [`Connection::next_request`].
    pub(crate) async fn request_as(
        self: &Arc<Self>,
        number: u64,
        request: &Request,
        deadline: Instant,
    ) -> Option<Response> {
        let (sender, receiver) = oneshot::channel();
        let _outstanding = self.begin(number, request, ResponseHandler::Reply(sender), deadline).await?;
        tokio::time::timeout_at(deadline.into(), receiver).await.ok()?.ok()
    }

    /// Sends a Get and waits for its handler's result. The second value is `true` if the client
    /// gave up this node at `hedge_at`, before `deadline`: the request could not be sent, or no
    /// response had begun. The caller may then ask another node.
    pub(crate) async fn get<T>(
        self: &Arc<Self>,
        request: &Request,
        handler: ResponseHandler,
        mut done: oneshot::Receiver<T>,
        hedge_at: Instant,
        deadline: Instant,
    ) -> (T, bool) {
        let number = self.next_request();
        let begin_by = hedge_at.min(deadline);
        let Some(outstanding) = self.begin_by(begin_by, number, request, handler, deadline).await else {
            return (self.finish(None, done, deadline).await, begin_by < deadline);
        };
        if begin_by < deadline {
            match tokio::time::timeout_at(begin_by.into(), &mut done).await {
                Ok(ended) => return (ended.expect("a handler always returns its buffers"), false),
                // Once pages arrive, hedging would only waste them.
                Err(_) if !self.pending.lock().has_begun(number) || fail_point!("client.hedge-gives-up-begun-page") => {
                    return (self.finish(Some(outstanding), done, begin_by).await, true);
                }
                // The node has begun to answer: wait for the rest.
                Err(_) => {}
            }
        }
        (self.finish(Some(outstanding), done, deadline).await, false)
    }

    /// Waits for a handler's result: after the last response, or at `deadline`, when the client
    /// abandons the request. `outstanding` is `None` if the request could not be sent: its handler
    /// is already dropped.
    pub(crate) async fn finish<T>(
        &self,
        outstanding: Option<OutstandingRequest>,
        mut done: oneshot::Receiver<T>,
        deadline: Instant,
    ) -> T {
        let mut ended = None;
        if outstanding.is_some() {
            ended = tokio::time::timeout_at(deadline.into(), &mut done).await.ok();
        }
        if let Some(outstanding) = &outstanding
            && ended.is_none()
            && fail_point!("client.deadline-ends-connection")
            && self.pending.lock().is_receiving(outstanding.number)
        {
            self.closed.cancel();
        }
        // Ends the handler. If a payload is being received into it, the receiving task does so as
        // soon as it runs: it waits for nothing else without listening.
        drop(outstanding);
        let ended = match ended {
            Some(ended) => ended,
            None => done.await,
        };
        ended.expect("a handler always returns its buffers")
    }

    /// Bytes of a page in the node's arena, which the node holds for a request. They are released
    /// when the result is dropped. `None` if the location is outside the arena, or if this client
    /// has not mapped it.
    pub(super) fn hold(&self, request: u64, index: u32, offset: u64, bytes: usize) -> Option<HeldBytes> {
        let releases = self.releases.clone();
        if fail_point!("client.release-before-read") {
            releases.add(Entry { request, index });
            return self.arena.as_ref()?.hold(offset, bytes, || {});
        }
        let release = move || releases.add(Entry { request, index });
        self.arena.as_ref()?.hold(offset, bytes, release)
    }

    /// Begins to collect the files that the node sends for a request. `None` if no session connects
    /// them.
    pub(crate) fn expect_files(&self, request: u64) -> Option<ExpectedFiles> {
        self.arena.as_ref()?.expect_files(request)
    }

    /// Like [`Connection::hold`], with the page's metadata.
    pub(super) fn hold_page(
        &self,
        entry: Entry,
        offset: u64,
        meta: PageMeta,
        tier: TierCode,
        range: Range<u32>,
    ) -> Option<UncopiedBytes> {
        let held = self.hold(entry.request, entry.index, offset, range.len())?;
        Some(UncopiedBytes { location: StoredAt::Arena(held), meta, tier, range })
    }

    /// Returns a guard that releases a page which the node keeps readable by RDMA.
    pub(super) fn release_on_drop(&self, entry: Entry) -> ReleaseOnDrop {
        ReleaseOnDrop { entry, releases: self.releases.clone() }
    }
}

/// Time until `deadline`, in milliseconds for the wire. At least 1, because 0 means no deadline.
fn milliseconds_left(deadline: Instant) -> u32 {
    // Saturates because a deadline may have passed already.
    let left = deadline.saturating_duration_since(now());
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
}

/// A request that waits for responses. Dropping it drops its handler and cancels it at the node.
pub(crate) struct OutstandingRequest {
    connection: Arc<Connection>,
    number: u64,
}

impl Drop for OutstandingRequest {
    fn drop(&mut self) {
        // The guard ends before the handler is dropped, which wakes the caller.
        let cancelled = self.connection.pending.lock().cancel(self.number);
        match cancelled {
            Cancelled::Waiting(handler) => {
                drop(handler);
                self.connection.send_detached(&Request::Cancel(self.number));
            }
            // The receiving task cancels the request at the node.
            Cancelled::Receiving if fail_point!("client.no-payload-deadline") => {}
            Cancelled::Receiving => self.connection.given_up.notify_one(),
            Cancelled::Ended => {}
        }
    }
}
