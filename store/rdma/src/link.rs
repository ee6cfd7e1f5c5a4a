//! What an endpoint, its futures, its windows and its driver share.
//!
//! Always true:
//! - whatever a request lets the device touch is owned by the request's entry in `work`, and each window's memory by its entry in
//!   `windows`. An entry goes when its completion came, or when the queue pair was destroyed; if that fails, never;
//! - completions come in the order of the requests, so `work` is a queue; one that comes out of order condemns the link and frees
//!   nothing;
//! - the queue pair has room: transfers hold a permit per request, and a window has at most two requests, bind and withdrawal;
//! - a condemned link posts nothing, and all who wait have been told.

use crate::apart;
use crate::endpoint::EndpointOptions;
use crate::error::{Death, Error};
use crate::nic::Nic;
use crate::region::Region;
use crate::verbs::{Local, MemoryWindow, POLL_MAX, QueuePair, Registration, Remote, Request};
use crate::{RemoteRange, Span};
use ibverbs_sys::{ibv_access_flags, ibv_wc_status};
use larder_format::planted::{Bug, has};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::time::Instant;

/// Something that keeps memory. What it is does not matter here.
pub(crate) type Hold = Arc<dyn Keep>;

/// Anything that may be kept until a device is done with it.
pub(crate) trait Keep: Send + Sync {}
impl<T: Send + Sync> Keep for T {}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A transfer of which requests are with the device.
pub(crate) struct Transfer {
    pub(crate) direction: Direction,
    pub(crate) bytes: usize,
    /// Requests that are not done, posted or not.
    pub(crate) left: AtomicUsize,
    pub(crate) done: Mutex<Option<oneshot::Sender<Result<(), Death>>>>,
    /// What the requests let the device touch.
    pub(crate) _keeps: (Hold, Arc<Region>),
}

struct Work {
    id: u64,
    deadline: Instant,
    kind: Kind,
}

enum Kind {
    Transfer(Arc<Transfer>),
    Bind(Option<oneshot::Sender<Result<(), Death>>>),
    Withdraw(u64),
}

impl Work {
    /// Tells whoever waits for it that it will not succeed. The memory stays here.
    fn fail(&mut self, death: &Death) {
        let waiting = match &mut self.kind {
            Kind::Transfer(transfer) => transfer.done.lock().take(),
            Kind::Bind(done) => done.take(),
            // Whoever withdraws waits for the end of the queue pair then.
            Kind::Withdraw(_) => None,
        };
        if let Some(waiting) = waiting {
            let _ = waiting.send(Err(death.clone()));
        }
    }
}

/// Bytes that a peer has a key for. Dropped only when that key is dead, or to end a registration of its own.
pub(crate) struct Bound {
    access: Opened,
    region: Option<Arc<Region>>,
    hold: Option<Hold>,
    done: Option<oneshot::Sender<()>>,
    nic: Arc<Nic>,
}

enum Opened {
    Window(MemoryWindow),
    Registration(Registration),
    /// The window was taken out, for the next.
    Over,
}

impl Bound {
    fn new(nic: &Arc<Nic>, access: Opened, region: Arc<Region>, hold: Hold) -> Bound {
        nic.counters.windows.add(1);
        Bound { access, region: Some(region), hold: Some(hold), done: None, nic: nic.clone() }
    }

    /// Ends its memory window, if it has one. The memory stays.
    fn end_window(&mut self) {
        if let Opened::Window(_) = self.access {
            self.access = Opened::Over;
        }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Opened::Registration(registration) = &mut self.access
            && let Err(error) = registration.close()
        {
            tracing::error!(device = self.nic.name(), %error, "a device does not let go of memory, which is not freed");
            self.nic.counters.stuck.add(1);
            std::mem::forget((self.hold.take(), self.region.take(), self.done.take()));
            return;
        }
        self.nic.counters.windows.subtract(1);
        drop(self.hold.take());
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
    Dead(Death),
}

struct State {
    phase: Phase,
    next: u64,
    work: VecDeque<Work>,
    windows: BTreeMap<u64, Bound>,
    /// Windows that are not bound.
    spare: Vec<MemoryWindow>,
}

impl State {
    fn ready(&self) -> Result<(), Error> {
        match &self.phase {
            Phase::Ready => Ok(()),
            Phase::Dead(death) => Err(death.clone().into()),
            Phase::Fresh | Phase::Connecting => Err(Error::NotConnected),
        }
    }
}

pub(crate) struct Link {
    pub(crate) nic: Arc<Nic>,
    pub(crate) options: EndpointOptions,
    pub(crate) pair: QueuePair,
    /// One for each request of a transfer that may be posted.
    pub(crate) permits: Semaphore,
    /// Wakes the driver: there is a new deadline, or the link was condemned.
    pub(crate) wake: Notify,
    pub(crate) runtime: Handle,
    /// Whether the device has let go of all memory: that it has when the queue pair is destroyed, that it does not if that failed.
    ended: watch::Sender<Option<bool>>,
    state: Mutex<State>,
}

impl Link {
    pub(crate) fn new(nic: &Arc<Nic>, options: EndpointOptions, runtime: Handle) -> Result<Arc<Link>, Error> {
        let pair = QueuePair::new(&nic.domain, options.requests())?;
        let permits = Semaphore::new(options.transfers as usize);
        let state =
            State { phase: Phase::Fresh, next: 0, work: VecDeque::new(), windows: BTreeMap::new(), spare: Vec::new() };
        let objects = [pair.object(), pair.completions.object()];
        let link = Arc::new(Link {
            nic: nic.clone(),
            options,
            pair,
            permits,
            wake: Notify::new(),
            runtime,
            ended: watch::Sender::new(None),
            state: Mutex::new(state),
        });
        nic.add_link(objects, &link);
        Ok(link)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().phase.clone()
    }

    /// Goes from one phase to the next; `false` if it is not in the first.
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

    /// Why the link is dead, as an error. If it is not, there was a misunderstanding.
    pub(crate) fn why(&self) -> Error {
        self.ready().err().unwrap_or(Error::NotConnected)
    }

    /// Ends the link: nothing is posted any more, all who wait are told, and the driver destroys the queue pair.
    pub(crate) fn condemn(&self, death: Death) {
        self.condemn_locked(&mut self.state.lock(), death);
    }

    fn condemn_locked(&self, state: &mut State, death: Death) {
        if matches!(state.phase, Phase::Dead(_)) {
            return;
        }
        if death != Death::Closed {
            self.nic.counters.deaths.add(1);
            tracing::debug!(device = self.nic.name(), pair = self.pair.number(), %death, "an RDMA connection died");
        }
        state.work.iter_mut().for_each(|work| work.fail(&death));
        if has(Bug::MemoryBackEarly) {
            state.work.clear();
        }
        state.phase = Phase::Dead(death);
        self.permits.close();
        self.wake.notify_one();
    }

    /// Posts requests that are then owned by `kinds`, one each. Room for them is the caller's business.
    fn post(
        &self,
        state: &mut State,
        requests: &mut [Request<'_>],
        kinds: Vec<Kind>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let first = state.next;
        // SAFETY: the entries below own what the requests refer to, until their completions or the end of the queue pair.
        let posted = unsafe { self.pair.post(first, requests) };
        // If the device refused some, it may have taken others; all are kept until the queue pair is destroyed.
        for kind in kinds {
            state.work.push_back(Work { id: state.next, deadline, kind });
            state.next += 1;
        }
        if let Err(error) = &posted {
            self.condemn_locked(state, error.clone().into_death());
        }
        // An idle driver does not know that there is a deadline now.
        if state.work.len() == requests.len() {
            self.wake.notify_one();
        }
        posted
    }

    /// Posts some requests of a transfer, for which the caller has taken permits.
    pub(crate) fn post_transfer(
        &self,
        transfer: &Arc<Transfer>,
        chunks: &[(Local, Remote)],
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut requests: Vec<Request<'_>> = chunks
            .iter()
            .map(|&(local, remote)| match transfer.direction {
                Direction::Read => Request::Read(local, remote),
                Direction::Write => Request::Write(local, remote),
            })
            .collect();
        let kinds = chunks.iter().map(|_| Kind::Transfer(transfer.clone())).collect();
        let mut state = self.state.lock();
        state.ready()?;
        self.post(&mut state, &mut requests, kinds, deadline)
    }

    /// Opens bytes of one registration to the peer by a memory window. Answers its number, its key, and when it is open.
    #[allow(clippy::type_complexity)]
    pub(crate) fn bind(
        &self,
        region: &Arc<Region>,
        registration: &Registration,
        span: Span,
        access: ibv_access_flags,
        hold: Hold,
        deadline: Instant,
    ) -> Result<(u64, RemoteRange, oneshot::Receiver<Result<(), Death>>), Error> {
        let spare = self.state.lock().spare.pop();
        let mut window = match spare {
            Some(window) => window,
            None => MemoryWindow::new(&self.nic.domain)?,
        };
        let mut state = self.state.lock();
        self.room_for_window(&state)?;
        let (done, open) = oneshot::channel();
        let posted = {
            let mut requests = [Request::Bind(&mut window, registration, span, access)];
            self.post(&mut state, &mut requests, vec![Kind::Bind(Some(done))], deadline)
        };
        let key = window.key();
        // From here on it may be bound, whatever `posted` says.
        let bound = Bound::new(&self.nic, Opened::Window(window), region.clone(), hold);
        let number = self.insert(&mut state, bound);
        posted?;
        Ok((number, RemoteRange { address: span.address() as u64, len: span.len() as u64, key }, open))
    }

    /// Opens bytes to peers by a registration of their own, which was made by a call into the kernel.
    pub(crate) fn adopt(
        &self,
        registration: Registration,
        region: Arc<Region>,
        hold: Hold,
    ) -> Result<(u64, RemoteRange), Error> {
        let (span, key) = (registration.span(), registration.remote_key());
        let bound = Bound::new(&self.nic, Opened::Registration(registration), region, hold);
        let mut state = self.state.lock();
        if let Err(error) = self.room_for_window(&state) {
            // Ends the registration, by a call into the kernel.
            drop(state);
            drop(bound);
            return Err(error);
        }
        let number = self.insert(&mut state, bound);
        Ok((number, RemoteRange { address: span.address() as u64, len: span.len() as u64, key }))
    }

    fn room_for_window(&self, state: &State) -> Result<(), Error> {
        state.ready()?;
        match state.windows.len() < self.options.windows as usize {
            true => Ok(()),
            false => Err(Error::TooManyWindows),
        }
    }

    fn insert(&self, state: &mut State, bound: Bound) -> u64 {
        let number = state.next;
        // Numbers of windows and of requests are drawn from one well, so that none comes twice.
        state.next += 1;
        state.windows.insert(number, bound);
        number
    }

    /// Begins to withdraw a window. `done` hears of it when its key is dead and its memory was let go of; if the window is gone
    /// already, `done` is dropped.
    pub(crate) fn withdraw(&self, number: u64, done: Option<oneshot::Sender<()>>) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(bound) = state.windows.get_mut(&number) else { return };
        bound.done = done;
        if has(Bug::WindowBackEarly) {
            bound.hold = None;
            let _ = bound.done.take().map(|done| done.send(()));
        }
        if has(Bug::WindowStays) {
            return;
        }
        if let Opened::Registration(_) = bound.access {
            let bound = state.windows.remove(&number);
            // Ending a registration is a call into the kernel. Should the runtime be at its end, the entry is dropped here, and with
            // it code of the owner may run, so not under the lock.
            drop(guard);
            self.runtime.spawn(apart(move || drop(bound)));
            return;
        }
        if state.phase != Phase::Ready {
            // It goes with the queue pair.
            return;
        }
        // The window is out of the table for as long as it is borrowed by the request.
        let Opened::Window(window) = std::mem::replace(&mut bound.access, Opened::Over) else { return };
        let deadline = Instant::now() + self.options.deadline;
        let _ = self.post(state, &mut [Request::Invalidate(&window)], vec![Kind::Withdraw(number)], deadline);
        if let Some(bound) = state.windows.get_mut(&number) {
            bound.access = Opened::Window(window);
        }
    }

    /// Takes completions, and answers how many came.
    pub(crate) fn poll(&self) -> usize {
        let mut room = [ibverbs::ibv_wc::default(); POLL_MAX];
        let (mut finished, mut closed) = (Vec::new(), Vec::new());
        let mut state = self.state.lock();
        let taken = match self.pair.completions.poll(&mut room) {
            Ok(taken) => taken,
            Err(error) => {
                self.condemn_locked(&mut state, error.into_death());
                return 0;
            }
        };
        for completion in taken {
            let oldest = state.work.front().is_some_and(|work| work.id == completion.wr_id);
            let Some(mut work) = oldest.then(|| state.work.pop_front()).flatten() else {
                self.condemn_locked(
                    &mut state,
                    Death::Failed { status: completion.status, vendor: completion.vendor_err },
                );
                continue;
            };
            if completion.status != ibv_wc_status::IBV_WC_SUCCESS {
                let death = Death::Failed { status: completion.status, vendor: completion.vendor_err };
                work.fail(&death);
                self.condemn_locked(&mut state, death);
            } else if let Kind::Withdraw(number) = work.kind {
                closed.extend(state.windows.remove(&number));
            }
            finished.push((work, completion.status == ibv_wc_status::IBV_WC_SUCCESS));
        }
        for bound in &mut closed {
            // Only now that its key is dead can it be used for another.
            if let Opened::Window(window) = std::mem::replace(&mut bound.access, Opened::Over)
                && window.next_key().is_some()
                && state.spare.len() < self.options.windows as usize
            {
                state.spare.push(window);
            }
        }
        let count = taken.len();
        // Dropping what was held runs code of the owner.
        drop(state);
        drop(closed);
        finished.into_iter().for_each(|(work, well)| self.finish(work, well));
        count
    }

    fn finish(&self, work: Work, well: bool) {
        match work.kind {
            Kind::Transfer(transfer) => {
                self.permits.add_permits(1);
                if !well || transfer.left.fetch_sub(1, Ordering::AcqRel) > 1 {
                    return;
                }
                let (operations, bytes) = match transfer.direction {
                    Direction::Read => (&self.nic.counters.reads, &self.nic.counters.read_bytes),
                    Direction::Write => (&self.nic.counters.writes, &self.nic.counters.written_bytes),
                };
                operations.add(1);
                bytes.add(transfer.bytes as u64);
                let done = transfer.done.lock().take();
                // The caller takes the memory back as its last owner.
                drop(transfer);
                if let Some(done) = done {
                    let _ = done.send(Ok(()));
                }
            }
            Kind::Bind(done) => {
                if let Some(done) = done {
                    let _ = done.send(Ok(()));
                }
            }
            Kind::Withdraw(_) => {}
        }
    }

    /// When the oldest request must be done.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.state.lock().work.front().map(|work| work.deadline)
    }

    /// Whether no request is with the device.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().work.is_empty()
    }

    /// Destroys the queue pair, which proves that the device is done with all that this link keeps, and lets go of it. A call into
    /// the kernel, and more of them for windows. Whoever calls this has condemned the link.
    pub(crate) fn destroy(&self) {
        let mut state = self.state.lock();
        let work = std::mem::take(&mut state.work);
        let mut windows = std::mem::take(&mut state.windows);
        let spare = std::mem::take(&mut state.spare);
        drop(state);
        // Memory windows first: one that is bound to a queue pair may keep it from being destroyed.
        windows.values_mut().for_each(Bound::end_window);
        drop(spare);
        // The next queue pair may get the address of this one.
        self.nic.remove_link([self.pair.object(), self.pair.completions.object()]);
        match self.pair.close() {
            Ok(()) => {
                drop((work, windows));
                self.ended.send_replace(Some(true));
            }
            Err(error) => {
                let held = work.len() + windows.len();
                tracing::error!(device = self.nic.name(), %error, held, "a device does not let go of memory, which is not freed");
                self.nic.counters.stuck.add(held as u64);
                std::mem::forget((work, windows));
                self.ended.send_replace(Some(false));
            }
        }
    }

    /// Whether the queue pair is destroyed.
    pub(crate) fn is_ended(&self) -> bool {
        *self.ended.borrow() == Some(true)
    }

    /// Waits until the queue pair is destroyed; `false` if it cannot be.
    pub(crate) async fn ended(&self) -> bool {
        self.ended.subscribe().wait_for(Option::is_some).await.is_ok_and(|ended| *ended == Some(true))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The driver has done this, unless it was never run.
        if !self.is_ended() {
            self.destroy();
        }
    }
}
