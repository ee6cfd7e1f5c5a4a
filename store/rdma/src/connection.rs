//! State that an endpoint, its futures, its grants and its driver share.
//!
//! Invariants:
//! - An entry in `work` owns everything its request lets the device access. An entry in `grants`
//!   owns the memory of a grant. Entries are removed after their completion, or when the queue pair
//!   was destroyed. If destroying fails, they are leaked.
//! - Completions arrive in the order of the requests, so `work` is a queue. A completion out of
//!   order retires the connection and frees nothing.
//! - The queue pair always has room. A transfer holds a permit per request, and a grant has at most
//!   two requests, bind and invalidation.
//! - A dead connection posts nothing, and all its waiters were notified.
//!
//! Lock order: `state` first, then a transfer's `done` or the lock of the queue pair. Memory owners
//! are dropped after `state` is released, because that runs foreign code.

use crate::address::RemoteRange;
use crate::blocking;
use crate::error::{DisconnectReason, Error};
use crate::nic::{ConnectionEvents, Nic};
use crate::options::EndpointOptions;
use crate::region::Region;
use crate::verbs::{Local, MemoryWindow, POLL_MAX, QueuePair, Registration, Remote, Request};
use ibverbs_sys::{ibv_access_flags, ibv_wc_status};
use larder_memory::span::Span;
use larder_runtime::fail_point;
use larder_runtime::lock::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::time::Instant;

/// Rate from which a link is fast enough for long requests, in bytes per second. One of 32 KiB then
/// takes at most an eighth of a second, and half a second on a link that has become slow.
const FAST_BYTES_PER_SECOND: f64 = (256 << 10) as f64;

/// Keeps memory alive, whatever its type.
pub(crate) type MemoryOwner = Arc<dyn AnyOwner>;

pub(crate) trait AnyOwner: Send + Sync {}
impl<T: Send + Sync> AnyOwner for T {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

pub(crate) struct Transfer {
    pub(crate) direction: Direction,
    pub(crate) bytes: usize,
    /// Requests that have not completed. Requests that are not posted count until the caller stops
    /// the transfer.
    pub(crate) left: AtomicUsize,
    /// One permit for each request that the transfer may have with the device.
    pub(crate) window: Semaphore,
    /// Bytes of completed requests.
    pub(crate) moved: Arc<AtomicU64>,
    pub(crate) done: Mutex<Option<oneshot::Sender<Result<(), DisconnectReason>>>>,
    pub(crate) _owners: (MemoryOwner, Arc<Region>),
}

struct WorkRequest {
    id: u64,
    posted: Instant,
    kind: WorkKind,
}

enum WorkKind {
    /// A request of a transfer, with its length in bytes.
    Transfer(Arc<Transfer>, u32),
    Bind(Option<oneshot::Sender<Result<(), DisconnectReason>>>),
    Revoke(u64),
}

impl WorkRequest {
    /// Notifies the waiter of the failure. The memory stays here.
    fn fail(&mut self, reason: &DisconnectReason) {
        let waiting = match &mut self.kind {
            WorkKind::Transfer(transfer, _) => {
                // The transfer may wait to post more.
                transfer.window.close();
                transfer.done.lock().take()
            }
            WorkKind::Bind(done) => done.take(),
            // A revocation then waits for the end of the queue pair instead.
            WorkKind::Revoke(_) => None,
        };
        if let Some(waiting) = waiting {
            let _ = waiting.send(Err(reason.clone()));
        }
    }
}

/// Bytes that a peer has a key for. Dropped only after that key is dead, or to end its own
/// registration.
pub(crate) struct Grant {
    access: GrantAccess,
    region: Option<Arc<Region>>,
    owner: Option<MemoryOwner>,
    done: Option<oneshot::Sender<()>>,
    nic: Arc<Nic>,
}

enum GrantAccess {
    Window(MemoryWindow),
    Registration(Registration),
    /// The window was moved out, to be reused.
    Taken,
}

impl Grant {
    fn new(nic: &Arc<Nic>, access: GrantAccess, region: Arc<Region>, owner: MemoryOwner) -> Grant {
        nic.counters.grants.add(1);
        Grant { access, region: Some(region), owner: Some(owner), done: None, nic: nic.clone() }
    }

    /// Deallocates the memory window, if there is one. The memory stays.
    fn end_window(&mut self) {
        if let GrantAccess::Window(_) = self.access {
            self.access = GrantAccess::Taken;
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if let GrantAccess::Registration(registration) = &mut self.access
            && let Err(error) = registration.close()
        {
            tracing::error!(device = self.nic.name(), %error, "the device failed to release memory; the memory is leaked until the process exits");
            // Leaked on purpose: the device may still access the memory.
            self.nic.counters.leaked.add(1);
            std::mem::forget((self.owner.take(), self.region.take(), self.done.take()));
            return;
        }
        self.nic.counters.grants.subtract(1);
        drop(self.owner.take());
        if let Some(done) = self.done.take() {
            let _ = done.send(());
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    Fresh,
    Connecting,
    Ready,
    Dead(DisconnectReason),
}

struct ConnectionState {
    phase: Phase,
    next: u64,
    work: VecDeque<WorkRequest>,
    /// Time of the last completion, or at which the first request was posted after an idle time.
    last_progress: Instant,
    grants: BTreeMap<u64, Grant>,
    /// Windows that are not bound, kept for the next grant.
    spare: Vec<MemoryWindow>,
}

impl ConnectionState {
    fn ready(&self) -> Result<(), Error> {
        match &self.phase {
            Phase::Ready => Ok(()),
            Phase::Dead(reason) => Err(reason.clone().into()),
            Phase::Fresh | Phase::Connecting => Err(Error::NotConnected),
        }
    }
}

pub(crate) struct Connection {
    pub(crate) nic: Arc<Nic>,
    pub(crate) options: EndpointOptions,
    pub(crate) pair: QueuePair,
    /// One permit for each transfer request that may be posted.
    pub(crate) permits: Semaphore,
    /// True once a request moved its bytes at [`FAST_BYTES_PER_SECOND`], until one was slower.
    pub(crate) is_fast: AtomicBool,
    /// Wakes the driver for a new deadline or a retired connection.
    pub(crate) wake: Notify,
    pub(crate) runtime: Handle,
    /// `None` while the queue pair exists. Then `true` if it was destroyed and all memory is
    /// released, `false` if destroying failed.
    ended: watch::Sender<Option<bool>>,
    /// Held for posting and polling, which do not block. Owners of memory are dropped outside it,
    /// because their destructors run foreign code.
    state: Mutex<ConnectionState>,
}

impl Connection {
    pub(crate) fn new(nic: &Arc<Nic>, options: EndpointOptions, runtime: Handle) -> Result<Arc<Connection>, Error> {
        let pair = QueuePair::new(&nic.domain, options.requests())?;
        let permits = Semaphore::new(options.transfers as usize);
        let state = ConnectionState {
            phase: Phase::Fresh,
            next: 0,
            work: VecDeque::new(),
            last_progress: Instant::now(),
            grants: BTreeMap::new(),
            spare: Vec::new(),
        };
        let objects = [pair.object(), pair.completions.object()];
        let connection = Arc::new(Connection {
            nic: nic.clone(),
            options,
            pair,
            permits,
            is_fast: AtomicBool::new(false),
            wake: Notify::new(),
            runtime,
            ended: watch::Sender::new(None),
            state: Mutex::new(state),
        });
        nic.add_connection(objects, Arc::<Connection>::downgrade(&connection));
        Ok(connection)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().phase.clone()
    }

    /// Moves from one phase to the next. Returns `false` if the connection is not in phase `from`.
    pub(crate) fn advance(&self, from: &Phase, to: Phase) -> bool {
        let mut state = self.state.lock();
        let is_there = state.phase == *from;
        if is_there {
            state.phase = to;
        }
        is_there
    }

    pub(crate) fn ready(&self) -> Result<(), Error> {
        self.state.lock().ready()
    }

    pub(crate) fn error(&self) -> Error {
        self.ready().err().unwrap_or(Error::NotConnected)
    }

    /// Makes the connection dead: nothing is posted any more, waiters are notified, and the driver
    /// destroys the queue pair. The first reason is kept.
    pub(crate) fn retire(&self, reason: DisconnectReason) {
        self.retire_locked(&mut self.state.lock(), reason);
    }

    fn retire_locked(&self, state: &mut ConnectionState, reason: DisconnectReason) {
        if matches!(state.phase, Phase::Dead(_)) {
            return;
        }
        if reason != DisconnectReason::Closed {
            self.nic.counters.disconnects.add(1);
            tracing::debug!(device = self.nic.name(), pair = self.pair.number(), %reason, "an RDMA connection died");
        }
        state.work.iter_mut().for_each(|work| work.fail(&reason));
        if fail_point!("rdma.memory-returned-on-disconnect") {
            state.work.clear();
        }
        state.phase = Phase::Dead(reason);
        // Waiters for permits end with an error.
        self.permits.close();
        self.wake.notify_one();
    }

    /// Posts requests, each owned by the element of `kinds` at its index. The caller makes sure
    /// that the queue pair has room.
    fn post(
        &self,
        state: &mut ConnectionState,
        requests: &mut [Request<'_>],
        kinds: Vec<WorkKind>,
    ) -> Result<(), Error> {
        let first = state.next;
        let now = Instant::now();
        if state.work.is_empty() {
            state.last_progress = now;
        }
        // SAFETY: the entries pushed below own what the requests refer to, until completion or the
        // end of the queue pair. The state is locked, so no completion is processed in between.
        let posted = unsafe { self.pair.post(first, requests) };
        // After an error the device may have accepted some of the requests. All are kept until the
        // queue pair is destroyed.
        for kind in kinds {
            state.work.push_back(WorkRequest { id: state.next, posted: now, kind });
            state.next += 1;
        }
        if let Err(error) = &posted {
            self.retire_locked(state, error.clone().into_reason());
        }
        // An idle driver sleeps without a time limit.
        if state.work.len() == requests.len() {
            self.wake.notify_one();
        }
        posted
    }

    /// Waits until the transfer may post `requests` more, and takes the permits for them, which
    /// `finish` returns. Returns `false` if the connection is dead.
    pub(crate) async fn room_for(&self, transfer: &Transfer, requests: usize) -> bool {
        let Ok(own) = transfer.window.acquire_many(requests as u32).await else { return false };
        let Ok(shared) = self.permits.acquire_many(requests as u32).await else { return false };
        own.forget();
        shared.forget();
        true
    }

    pub(crate) fn post_transfer(&self, transfer: &Arc<Transfer>, chunks: &[(Local, Remote)]) -> Result<(), Error> {
        let mut requests: Vec<Request<'_>> = chunks
            .iter()
            .map(|&(local, remote)| match transfer.direction {
                Direction::Read => Request::Read(local, remote),
                Direction::Write => Request::Write(local, remote),
            })
            .collect();
        let kinds = chunks.iter().map(|(local, _)| WorkKind::Transfer(transfer.clone(), local.len)).collect();
        let mut state = self.state.lock();
        state.ready()?;
        self.post(&mut state, &mut requests, kinds)
    }

    /// Binds a memory window to bytes of one registration. Returns the grant's number, the range
    /// for the peer, and a receiver that resolves when the window is bound.
    #[allow(clippy::type_complexity)]
    pub(crate) fn bind(
        &self,
        region: &Arc<Region>,
        registration: &Registration,
        span: Span,
        access: ibv_access_flags,
        owner: MemoryOwner,
    ) -> Result<(u64, RemoteRange, oneshot::Receiver<Result<(), DisconnectReason>>), Error> {
        // Allocating a window is a system call, so it happens outside the lock.
        let spare = self.state.lock().spare.pop();
        let mut window = match spare {
            Some(window) => window,
            None => MemoryWindow::new(&self.nic.domain)?,
        };
        let mut state = self.state.lock();
        self.check_grant_limit(&state)?;
        let (done, open) = oneshot::channel();
        let posted = {
            let mut requests = [Request::Bind(&mut window, registration, span, access)];
            self.post(&mut state, &mut requests, vec![WorkKind::Bind(Some(done))])
        };
        let key = window.key();
        // From here on the window may be bound, whether or not posting failed.
        let grant = Grant::new(&self.nic, GrantAccess::Window(window), region.clone(), owner);
        let number = self.insert(&mut state, grant);
        posted?;
        Ok((number, RemoteRange { address: span.address() as u64, len: span.len() as u64, key }, open))
    }

    /// Grants access by a registration that was made for these bytes alone.
    pub(crate) fn adopt(
        &self,
        registration: Registration,
        region: Arc<Region>,
        owner: MemoryOwner,
    ) -> Result<(u64, RemoteRange), Error> {
        let (span, key) = (registration.span(), registration.remote_key());
        let grant = Grant::new(&self.nic, GrantAccess::Registration(registration), region, owner);
        let mut state = self.state.lock();
        if let Err(error) = self.check_grant_limit(&state) {
            // Dropping the grant ends the registration, a system call. The lock is released first.
            drop(state);
            drop(grant);
            return Err(error);
        }
        let number = self.insert(&mut state, grant);
        Ok((number, RemoteRange { address: span.address() as u64, len: span.len() as u64, key }))
    }

    fn check_grant_limit(&self, state: &ConnectionState) -> Result<(), Error> {
        state.ready()?;
        match state.grants.len() < self.options.grants as usize {
            true => Ok(()),
            false => Err(Error::TooManyGrants),
        }
    }

    fn insert(&self, state: &mut ConnectionState, grant: Grant) -> u64 {
        let number = state.next;
        // Grants and requests share one number sequence, so no number occurs twice.
        state.next += 1;
        state.grants.insert(number, grant);
        number
    }

    /// Starts to revoke a grant. `done` resolves when its key is dead and its memory was dropped.
    /// If the grant is gone already, `done` is dropped.
    pub(crate) fn revoke(&self, number: u64, done: Option<oneshot::Sender<()>>) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(grant) = state.grants.get_mut(&number) else { return };
        grant.done = done;
        if fail_point!("rdma.memory-returned-before-invalidate") {
            grant.owner = None;
            let _ = grant.done.take().map(|done| done.send(()));
        }
        if fail_point!("rdma.grant-never-withdrawn") {
            return;
        }
        if let GrantAccess::Registration(_) = grant.access {
            let grant = state.grants.remove(&number);
            // Ending a registration is a system call. If the runtime is shutting down, the grant is
            // dropped right here, and foreign code may run: hence not under the lock.
            drop(guard);
            self.runtime.spawn(blocking(move || drop(grant)));
            return;
        }
        if state.phase != Phase::Ready {
            // The grant ends with the queue pair.
            return;
        }
        // The request borrows the window, so the window leaves the table for the call. The grant
        // itself, with its memory, stays until the invalidation has completed: until then the peer
        // can still use the key.
        let GrantAccess::Window(window) = std::mem::replace(&mut grant.access, GrantAccess::Taken) else { return };
        let _ = self.post(state, &mut [Request::Invalidate(&window)], vec![WorkKind::Revoke(number)]);
        if let Some(grant) = state.grants.get_mut(&number) {
            grant.access = GrantAccess::Window(window);
        }
    }

    pub(crate) fn poll(&self) -> usize {
        let mut room = [ibverbs::ibv_wc::default(); POLL_MAX];
        let (mut finished, mut closed) = (Vec::new(), Vec::new());
        let mut state = self.state.lock();
        let taken = match self.pair.completions.poll(&mut room) {
            Ok(taken) => taken,
            Err(error) => {
                self.retire_locked(&mut state, error.into_reason());
                return 0;
            }
        };
        let now = Instant::now();
        for completion in taken {
            let oldest = state.work.front().is_some_and(|work| work.id == completion.wr_id);
            let Some(mut work) = oldest.then(|| state.work.pop_front()).flatten() else {
                self.retire_locked(
                    &mut state,
                    DisconnectReason::Failed { status: completion.status, vendor: completion.vendor_err },
                );
                continue;
            };
            if completion.status != ibv_wc_status::IBV_WC_SUCCESS {
                let reason = DisconnectReason::Failed { status: completion.status, vendor: completion.vendor_err };
                work.fail(&reason);
                self.retire_locked(&mut state, reason);
            } else {
                self.record_completion(&mut state, &work, now);
                if let WorkKind::Revoke(number) = work.kind {
                    closed.extend(state.grants.remove(&number));
                }
            }
            finished.push((work, completion.status == ibv_wc_status::IBV_WC_SUCCESS));
        }
        for grant in &mut closed {
            // Only now that its key is dead can the window be bound again.
            if let GrantAccess::Window(window) = std::mem::replace(&mut grant.access, GrantAccess::Taken)
                && window.next_key().is_some()
                && state.spare.len() < self.options.grants as usize
            {
                state.spare.push(window);
            }
        }
        let count = taken.len();
        // Dropping the owners runs foreign code, which must not run under the lock.
        drop(state);
        drop(closed);
        finished.into_iter().for_each(|(work, well)| self.finish(work, well));
        count
    }

    /// Records that a request completed. Requests are executed in order, so its time began with
    /// the completion of the one before.
    fn record_completion(&self, state: &mut ConnectionState, work: &WorkRequest, now: Instant) {
        let began = state.last_progress.max(work.posted);
        state.last_progress = now;
        if let WorkKind::Transfer(_, bytes) = work.kind {
            let time = Duration::from_secs_f64(f64::from(bytes) / FAST_BYTES_PER_SECOND);
            // Relaxed: a transfer with the older value only chooses other lengths.
            self.is_fast.store(now.saturating_duration_since(began) <= time, Ordering::Relaxed);
        }
    }

    fn finish(&self, work: WorkRequest, well: bool) {
        match work.kind {
            WorkKind::Transfer(transfer, bytes) => {
                self.permits.add_permits(1);
                if well {
                    // Relaxed: a number for reports, which orders nothing.
                    transfer.moved.fetch_add(bytes.into(), Ordering::Relaxed);
                    transfer.window.add_permits(1);
                }
                // `AcqRel`: the thread that completes the last request sees the effects of all
                // others.
                if !well || transfer.left.fetch_sub(1, Ordering::AcqRel) > 1 {
                    return;
                }
                let (operations, bytes) = match transfer.direction {
                    Direction::Read => (&self.nic.counters.reads, &self.nic.counters.read_bytes),
                    Direction::Write => (&self.nic.counters.writes, &self.nic.counters.written_bytes),
                };
                // A transfer that its caller stopped is incomplete.
                if transfer.moved.load(Ordering::Relaxed) == transfer.bytes as u64 {
                    operations.add(1);
                    bytes.add(transfer.bytes as u64);
                }
                let done = transfer.done.lock().take();
                // Dropped before the caller is notified, so that the caller is the last owner of
                // the memory.
                drop(transfer);
                if let Some(done) = done {
                    let _ = done.send(Ok(()));
                }
            }
            WorkKind::Bind(done) => {
                if let Some(done) = done {
                    let _ = done.send(Ok(()));
                }
            }
            WorkKind::Revoke(_) => {}
        }
    }

    /// Time at which the connection counts as stalled. `None` without requests.
    pub(crate) fn stalled_at(&self) -> Option<Instant> {
        let state = self.state.lock();
        (!state.work.is_empty()).then(|| state.last_progress + self.options.stall_timeout)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().work.is_empty()
    }

    /// Destroys the queue pair. This proves that the device is done with all memory of the
    /// connection, which is then released. Makes several system calls. The caller has retired the
    /// connection.
    pub(crate) fn destroy(&self) {
        let mut state = self.state.lock();
        let work = std::mem::take(&mut state.work);
        let mut grants = std::mem::take(&mut state.grants);
        let spare = std::mem::take(&mut state.spare);
        drop(state);
        // Memory windows go first: some devices refuse to destroy a queue pair with bound windows.
        grants.values_mut().for_each(Grant::end_window);
        drop(spare);
        // Deregistered before the queue pair is destroyed: a new one may get the same address.
        self.nic.remove_connection([self.pair.object(), self.pair.completions.object()]);
        match self.pair.close() {
            Ok(()) => {
                drop((work, grants));
                self.ended.send_replace(Some(true));
            }
            Err(error) => {
                let held = work.len() + grants.len();
                tracing::error!(device = self.nic.name(), %error, held, "the device failed to release memory; the memory is leaked until the process exits");
                self.nic.counters.leaked.add(held as u64);
                // Leaked on purpose: the device may still access the memory.
                std::mem::forget((work, grants));
                self.ended.send_replace(Some(false));
            }
        }
    }

    pub(crate) fn is_ended(&self) -> bool {
        *self.ended.borrow() == Some(true)
    }

    /// Waits until the queue pair is destroyed and all memory released. Returns `false` if the
    /// device refuses, in which case the memory is leaked.
    pub(crate) async fn ended(&self) -> bool {
        self.ended.subscribe().wait_for(Option::is_some).await.is_ok_and(|ended| *ended == Some(true))
    }
}

impl ConnectionEvents for Connection {
    fn pair_number(&self) -> u32 {
        self.pair.number()
    }

    fn on_event(&self, kind: u32) {
        self.retire(DisconnectReason::Event(kind));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The driver did this, unless it never ran.
        if !self.is_ended() {
            self.destroy();
        }
    }
}
