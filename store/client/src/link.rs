//! One node: multiplex requests, receive answers, reconnect with backoff.

mod answers;

use crate::clock::now;
use crate::connect::{self, Connector, Reached};
use crate::lanes::{self, Lanes};
use crate::parts::{LENT_BYTES_MAX, LENT_UNIT_BYTES};
use crate::rdma::{self, Lines};
use crate::sink::Sink;
use crate::spread;
use crate::url::Transport;
use crate::view::Releases;
use larder_bell::Bell;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_format::{NamespaceDescriptor, PageId};
use larder_share::{Memory, Window};
use larder_wire::{
    Frame, FrameQueue, FrameReader, FrameWriter, MAX_KEYS, Payload, Request, Response, Sink as ByteSink, Source,
    VERSION_OF_LENDING,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Frames in each queue towards the node.
const SEND_QUEUE_FRAMES: usize = 256;
/// Most payload bytes that wait to leave on one connection, and the unit in which they are counted.
const OUTGOING_BYTES_MAX: usize = 64 << 20;
const OUTGOING_UNIT_BYTES: usize = 4096;
/// Most time for one payload to arrive once announced, or one frame to leave.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// After so long without a frame from the node, it is probed.
const SILENCE_PROBED: Duration = Duration::from_secs(2);
/// Most time for its answer.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// How long after its deadline a payload that is just being received may still land.
const LANDING_GRACE: Duration = Duration::from_secs(1);
/// A node that refused puts is sent no bytes of puts for so long but those it said it would take.
const PRESSED_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// What a link needs to connect.
#[derive(Clone)]
pub(crate) struct LinkOptions {
    pub(crate) address: String,
    pub(crate) name: String,
    pub(crate) namespace: Option<NamespaceDescriptor>,
    pub(crate) connect_timeout: Duration,
    pub(crate) transport: Transport,
    /// Connections to a node, if pages move over them.
    pub(crate) connections: usize,
    /// What devices of this machine know.
    pub(crate) memory: Option<Arc<Memory>>,
    pub(crate) protocol_max: u16,
    /// Where chance comes from.
    pub(crate) seed: u64,
}

/// The memory of a node on this machine, and what that node may copy from.
type Shared = (Arc<Window>, Option<Arc<Memory>>);

/// A connection to a node.
pub(crate) struct Live {
    pub(crate) node_id: String,
    pub(crate) epoch: u64,
    /// Of the protocol, as agreed.
    pub(crate) version: u16,
    /// To the node: what is short, and what belongs to puts once they are reserved, in its order.
    out: mpsc::Sender<Frame>,
    bulk: mpsc::Sender<Frame>,
    sinks: Mutex<Sinks>,
    next: AtomicU64,
    broken: CancellationToken,
    /// Frames received and payloads sent; grows while the node is alive and has something to say, or to hear.
    frames: Arc<AtomicU64>,
    /// Payload bytes that may wait to leave, in units of [`OUTGOING_UNIT_BYTES`].
    outgoing: Arc<Semaphore>,
    /// The node's memory, if it is on this machine.
    window: Option<Arc<Window>>,
    /// This client's memory, if the node copies from it.
    pub(crate) lent: Option<Arc<Memory>>,
    /// Bytes whose places the node may be told, in units of [`LENT_UNIT_BYTES`].
    pub(crate) lending: Arc<Semaphore>,
    releases: Arc<Releases>,
    /// What moves by RDMA.
    pub(crate) lines: Lines,
    /// Further connections, if this is the first.
    pub(crate) lanes: Lanes,
    pub(crate) seed: u64,
    /// Until when it is too busy for puts, as it said.
    pressed: Mutex<Option<Instant>>,
}

/// Where the answers of this connection's requests go.
#[derive(Default)]
struct Sinks {
    waiting: BTreeMap<u64, Sink>,
    /// The request whose answer is being received, its sink taken out so that nobody else can end it in the middle of a
    /// payload; and whether it was cancelled meanwhile.
    in_hand: Option<(u64, bool)>,
}

impl Sinks {
    fn take(&mut self, request: u64) -> Option<Sink> {
        let sink = self.waiting.remove(&request);
        self.in_hand = sink.is_some().then_some((request, false));
        sink
    }

    /// Ends the receiving of one answer. Returns the sink of a request that was cancelled meanwhile.
    fn give_back(&mut self, request: u64, sink: Option<Sink>) -> Option<Sink> {
        let cancelled = self.in_hand.take().is_some_and(|(_, cancelled)| cancelled);
        match sink {
            Some(sink) if cancelled => Some(sink),
            Some(sink) => {
                self.waiting.insert(request, sink);
                None
            }
            None => None,
        }
    }

    /// Takes a request out; `true` if the node may still be working on it.
    fn cancel(&mut self, request: u64) -> (Option<Sink>, bool) {
        let sink = self.waiting.remove(&request);
        let waiting = sink.is_some();
        if let Some((_, cancelled)) = self.in_hand.as_mut().filter(|(in_hand, _)| *in_hand == request) {
            *cancelled = true;
        }
        (sink, waiting)
    }

    /// Whether an answer to a Get has come, or is coming.
    fn has_begun(&self, request: u64) -> bool {
        let in_hand = self.in_hand.is_some_and(|(in_hand, _)| in_hand == request);
        in_hand || matches!(self.waiting.get(&request), Some(Sink::Pages(pages)) if pages.has_begun())
    }
}

/// A node that may be connected.
pub(crate) struct Link {
    pub(crate) address: String,
    state: Arc<Bell<State>>,
}

/// Whether a node is connected.
#[derive(Clone, Default)]
enum State {
    #[default]
    Away,
    Connected(Arc<Live>),
    /// Nobody connects any more.
    Ended,
}

impl State {
    fn live(&self) -> Option<&Arc<Live>> {
        match self {
            State::Connected(live) => Some(live),
            State::Away | State::Ended => None,
        }
    }
}

impl Link {
    /// Keeps connecting to `options.address` until `stop`.
    pub(crate) fn start(options: LinkOptions, connector: Arc<impl Connector>, stop: CancellationToken) -> Link {
        let state = Arc::<Bell<State>>::default();
        let link = Link { address: options.address.clone(), state: state.clone() };
        tokio::spawn(async move {
            stop.run_until_cancelled(keep_connected(options, &connector, &state)).await;
            state.change(|state| *state = State::Ended);
        });
        link
    }

    pub(crate) fn live(&self) -> Option<Arc<Live>> {
        self.state.look(|state| state.live().cloned())
    }

    /// Waits until the node is connected; `false` if it never will be.
    pub(crate) async fn connected(&self) -> bool {
        let there = |state: &State| match state {
            State::Away => None,
            State::Connected(_) => Some(true),
            State::Ended => Some(false),
        };
        self.state.wait(there).await
    }

    /// Waits until the connection is another one than `seen`, or gone; `false` if there will be none any more.
    pub(crate) async fn changed(&self, seen: Option<&Arc<Live>>) -> bool {
        let changed = |state: &State| match (state, seen) {
            (State::Ended, _) => Some(false),
            (State::Connected(live), Some(seen)) if Arc::ptr_eq(live, seen) => None,
            (State::Away, None) => None,
            _ => Some(true),
        };
        self.state.wait(changed).await
    }
}

async fn keep_connected<C: Connector>(options: LinkOptions, connector: &Arc<C>, state: &Bell<State>) {
    let mut backoff = BACKOFF_MIN;
    let mut said_away = false;
    loop {
        match connect::reach(&**connector, &options).await {
            Ok(Reached { node_id, epoch, version, reader, writer, window }) => {
                let (live, queue) = Live::new(
                    node_id,
                    epoch,
                    version,
                    window.map(|window| (window, options.memory.clone())),
                    options.seed,
                );
                let connected = Connected { state, live: live.clone(), announced: AtomicBool::new(false) };
                let lanes = lanes::keep(&options, connector, &live);
                let lines = rdma::keep(&live, &**connector, &options, || connected.announce(&options));
                let error = run(&live, reader, writer, queue, lines).await;
                drop(lanes);
                if connected.announced.load(Ordering::Relaxed) {
                    (backoff, said_away) = (BACKOFF_MIN, false);
                    tracing::warn!(node = %options.address, %error, "store node lost; reconnecting");
                } else {
                    say_away(&options, &error, &mut said_away);
                }
            }
            Err(error) => say_away(&options, &error, &mut said_away),
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

fn say_away(options: &LinkOptions, error: &io::Error, said: &mut bool) {
    if !*said {
        tracing::warn!(node = %options.address, %error, "store node away; going on without it, retrying");
    }
    *said = true;
}

/// While it lives, the node counts as connected from when that is announced. However the connection ends, its requests end
/// with it.
struct Connected<'a> {
    state: &'a Bell<State>,
    live: Arc<Live>,
    announced: AtomicBool,
}

impl Connected<'_> {
    fn announce(&self, options: &LinkOptions) {
        let (live, transport) = (&self.live, self.live.transport());
        tracing::info!(node = %options.address, node_id = %live.node_id, epoch = live.epoch, version = live.version, %transport, "store node connected");
        self.announced.store(true, Ordering::Relaxed);
        self.state.change(|state| *state = State::Connected(live.clone()));
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.state.change(|state| *state = State::Away);
        self.live.end();
    }
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Moves frames until the connection ends; returns why.
pub(crate) async fn run<R: Source, W: ByteSink>(
    live: &Arc<Live>,
    mut reader: FrameReader<R>,
    writer: FrameWriter<W>,
    queue: FrameQueue,
    lines: impl Future<Output = io::Error>,
) -> io::Error {
    // A task of its own: neither direction takes the other's turns, however much there is to move.
    let mut sending = AbortOnDropHandle::new(tokio::spawn(writer.send_all(queue, STALL_TIMEOUT)));
    let ended = tokio::select! {
        biased;
        () = live.broken.cancelled() => Err(io::Error::other("given up by a reader whose deadline passed")),
        silent = watch_for_silence(live) => Err(silent),
        () = release(live) => Ok(()),
        useless = lines => Err(useless),
        sent = &mut sending => sent.unwrap_or_else(|error| Err(io::Error::other(error))),
        received = receive(live, &mut reader) => received,
    };
    ended.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Tells the node which pages need not be held any more, until the connection ends.
async fn release(live: &Live) {
    loop {
        let entries = live.releases.take(MAX_KEYS).await;
        if live.out.send(Request::Release(entries).frame(live.version, 0, 0, None)).await.is_err() {
            return;
        }
    }
}

/// A node that says nothing for [`SILENCE_PROBED`] is asked for a word, and given up if it does not come: its keys are
/// misses then, not waits.
async fn watch_for_silence(live: &Arc<Live>) -> io::Error {
    loop {
        let before = live.frames.load(Ordering::Relaxed);
        tokio::time::sleep(SILENCE_PROBED).await;
        if live.frames.load(Ordering::Relaxed) != before {
            continue;
        }
        let answer = live.ask(&Request::Members, now() + SILENCE_MAX).await;
        if answer.is_none() && live.frames.load(Ordering::Relaxed) == before {
            return io::Error::new(io::ErrorKind::TimedOut, "the node is silent");
        }
    }
}

async fn receive<S: Source>(live: &Arc<Live>, reader: &mut FrameReader<S>) -> io::Result<()> {
    while let Some(header) = reader.next().await? {
        live.frames.fetch_add(1, Ordering::Relaxed);
        let response = Response::decode(live.version, header.kind, reader.body()).map_err(invalid)?;
        let sink = live.sinks.lock().take(header.request);
        let step = answers::place(live, reader, &header, response, sink);
        let kept =
            tokio::time::timeout(STALL_TIMEOUT, step).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let cancelled = live.sinks.lock().give_back(header.request, kept);
        if cancelled.is_some() {
            live.tell_surely(&Request::Cancel(header.request));
        }
    }
    Ok(())
}

fn milliseconds_left(deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(now());
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl Live {
    /// A node that has said hello, and the frames that go to it.
    pub(crate) fn new(
        node_id: String,
        epoch: u64,
        version: u16,
        shared: Option<Shared>,
        seed: u64,
    ) -> (Arc<Live>, FrameQueue) {
        let ((out, first), (bulk, then)) = (mpsc::channel(SEND_QUEUE_FRAMES), mpsc::channel(SEND_QUEUE_FRAMES));
        let (window, memory) = shared.map_or((None, None), |(window, memory)| (Some(window), memory));
        let live = Live {
            node_id,
            epoch,
            version,
            out,
            bulk,
            sinks: Mutex::default(),
            next: AtomicU64::new(1),
            broken: CancellationToken::new(),
            frames: Arc::default(),
            outgoing: Arc::new(Semaphore::new(OUTGOING_BYTES_MAX / OUTGOING_UNIT_BYTES)),
            window,
            lent: memory.filter(|_| version >= VERSION_OF_LENDING),
            lending: Arc::new(Semaphore::new(LENT_BYTES_MAX / LENT_UNIT_BYTES)),
            releases: Arc::default(),
            lines: Lines::default(),
            lanes: Lanes::default(),
            seed,
            pressed: Mutex::default(),
        };
        (Arc::new(live), FrameQueue::new(first, then))
    }

    /// Requests that wait for answers.
    pub(crate) fn waiting(&self) -> usize {
        self.own_waiting() + self.lanes.waiting()
    }

    fn own_waiting(&self) -> usize {
        let sinks = self.sinks.lock();
        sinks.waiting.len() + usize::from(sinks.in_hand.is_some())
    }

    /// What there is to do: requests that wait for answers, and bytes that wait to leave, in units of
    /// [`OUTGOING_UNIT_BYTES`].
    pub(crate) fn load(&self) -> usize {
        let leaving = OUTGOING_BYTES_MAX / OUTGOING_UNIT_BYTES - self.outgoing.available_permits();
        leaving + self.own_waiting()
    }

    /// Whether pages move over this connection, and not past it.
    pub(crate) fn moves_pages_itself(&self) -> bool {
        self.transport() == Transport::Tcp
    }

    /// The connection is over, and its requests with it.
    pub(crate) fn end(&self) {
        self.broken.cancel();
        self.lines.end();
        let waiting = std::mem::take(&mut self.sinks.lock().waiting);
        drop(waiting);
    }

    /// How pages move.
    pub(crate) fn transport(&self) -> Transport {
        match () {
            () if self.window.is_some() => Transport::Shm,
            () if self.lines.is_up() => Transport::Rdma,
            () => Transport::Tcp,
        }
    }

    /// The bytes of a page were not what was put: the node is to look at its copy.
    pub(crate) fn suspect(&self, id: &PageId) {
        tracing::error!(?id, node = %self.node_id, "page damaged on its way or at its source: a miss");
        self.tell(&Request::Suspect(id.key));
    }

    /// Where a request waits to leave. Nothing that is short waits behind the bytes of puts.
    fn queue(&self, request: &Request) -> &mpsc::Sender<Frame> {
        match request {
            Request::Part { .. } | Request::Commit(_) => &self.bulk,
            _ => &self.out,
        }
    }

    /// Sends a frame without a request's answer, if there is room now.
    pub(crate) fn tell(&self, request: &Request) -> bool {
        self.out.try_send(request.frame(self.version, 0, 0, None)).is_ok()
    }

    /// Sends a frame without an answer, waiting for room until `deadline`.
    pub(crate) async fn send(&self, request: &Request, deadline: Instant) -> bool {
        let send = self.queue(request).send(request.frame(self.version, 0, 0, None));
        matches!(tokio::time::timeout_at(deadline.into(), send).await, Ok(Ok(())))
    }

    /// Sends a frame with bytes and without an answer, waiting for room until `deadline`.
    pub(crate) async fn send_bytes<P>(&self, request: &Request, bytes: P, deadline: Instant) -> bool
    where
        P: AsRef<[u8]> + Send + Sync + 'static,
    {
        let units = bytes.as_ref().len().div_ceil(OUTGOING_UNIT_BYTES).min(OUTGOING_BYTES_MAX / OUTGOING_UNIT_BYTES);
        let send = async {
            let permit = self.outgoing.clone().acquire_many_owned(units as u32).await.ok()?;
            let payload: Payload = Box::new(Leaving { bytes, frames: self.frames.clone(), _permit: permit });
            self.queue(request).send(request.frame(self.version, 0, 0, Some(payload))).await.ok()
        };
        matches!(tokio::time::timeout_at(deadline.into(), send).await, Ok(Some(())))
    }

    /// Sends a frame without an answer, after those that are queued, however long they take; nothing if the connection ends.
    pub(crate) fn tell_surely(&self, request: &Request) {
        let Err(TrySendError::Full(frame)) = self.out.try_send(request.frame(self.version, 0, 0, None)) else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let out = self.out.clone();
            runtime.spawn(async move { out.send(frame).await });
        }
    }

    /// It is too busy for puts, and may be for so long.
    pub(crate) fn press(&self, time: Duration) {
        *self.pressed.lock() = Some(now() + time.max(PRESSED_MIN));
    }

    pub(crate) fn is_pressed(&self) -> bool {
        self.pressed.lock().is_some_and(|until| now() < until)
    }

    /// A time, give or take half of it: those who were sent away together do not come back together.
    pub(crate) fn jittered(&self, time: Duration) -> Duration {
        spread::jittered(time, self.seed ^ self.number())
    }

    /// A number for a request.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a request whose answers go to `sink`; `None` if it cannot be sent in time (the sink is then dropped).
    pub(crate) async fn begin(
        self: &Arc<Self>,
        number: u64,
        request: &Request,
        sink: Sink,
        deadline: Instant,
    ) -> Option<Begun> {
        self.begin_by(deadline, number, request, sink, deadline).await
    }

    /// Like [`Live::begin`], if there is room for the request by then.
    async fn begin_by(
        self: &Arc<Self>,
        by: Instant,
        number: u64,
        request: &Request,
        sink: Sink,
        deadline: Instant,
    ) -> Option<Begun> {
        let begun = Begun { live: self.clone(), number };
        self.sinks.lock().waiting.insert(number, sink);
        let send = self.queue(request).send(request.frame(self.version, number, milliseconds_left(deadline), None));
        match tokio::time::timeout_at(by.into(), send).await {
            // The connection may have ended, and its sinks been dropped, before ours was put in.
            Ok(Ok(())) if !self.broken.is_cancelled() => Some(begun),
            _ => None,
        }
    }

    /// One request, one answer; `None` if it does not come in time.
    pub(crate) async fn ask(self: &Arc<Self>, request: &Request, deadline: Instant) -> Option<Response> {
        self.ask_as(self.number(), request, deadline).await
    }

    /// Like [`Live::ask`], with a number taken before.
    pub(crate) async fn ask_as(
        self: &Arc<Self>,
        number: u64,
        request: &Request,
        deadline: Instant,
    ) -> Option<Response> {
        let (sender, receiver) = oneshot::channel();
        let _begun = self.begin(number, request, Sink::Reply(sender), deadline).await?;
        tokio::time::timeout_at(deadline.into(), receiver).await.ok()?.ok()
    }

    /// One Get: what its sink hands back, and whether it was given up because no answer had begun at `hedge_at`.
    pub(crate) async fn get<T>(
        self: &Arc<Self>,
        request: &Request,
        sink: Sink,
        mut done: oneshot::Receiver<T>,
        hedge_at: Instant,
        deadline: Instant,
    ) -> (T, bool) {
        let number = self.number();
        let by = hedge_at.min(deadline);
        let Some(begun) = self.begin_by(by, number, request, sink, deadline).await else {
            return (self.settle(None, done, deadline).await, by < deadline);
        };
        if by < deadline {
            match tokio::time::timeout_at(by.into(), &mut done).await {
                Ok(ended) => return (ended.expect("a sink always hands back what it was given"), false),
                Err(_) if !self.sinks.lock().has_begun(number) => {
                    return (self.settle(Some(begun), done, by).await, true);
                }
                Err(_) => {}
            }
        }
        (self.settle(Some(begun), done, deadline).await, false)
    }

    /// Waits for what a sink hands back when it ends: at the last answer, or at `deadline`, when the request is given up.
    /// A payload that is just being received then may still land; if it does not soon, the connection is ended, because
    /// only that gives the caller's memory back.
    pub(crate) async fn settle<T>(&self, begun: Option<Begun>, mut done: oneshot::Receiver<T>, deadline: Instant) -> T {
        let mut ended = None;
        if begun.is_some() {
            ended = tokio::time::timeout_at(deadline.into(), &mut done).await.ok();
        }
        // Takes the sink out, which ends it, unless a payload is just being received into it.
        drop(begun);
        if ended.is_none() {
            ended = tokio::time::timeout(LANDING_GRACE, &mut done).await.ok();
        }
        let ended = match ended {
            Some(ended) => ended,
            None => {
                if !has(Bug::LandingHasNoEnd) {
                    self.break_off();
                }
                done.await
            }
        };
        ended.expect("a sink always hands back what it was given")
    }

    /// Ends the connection: a payload that is being received will not arrive in time, and its memory is wanted back.
    fn break_off(&self) {
        self.broken.cancel();
    }
}

/// Bytes on their way to the node.
struct Leaving<P> {
    bytes: P,
    frames: Arc<AtomicU64>,
    _permit: OwnedSemaphorePermit,
}

impl<P: AsRef<[u8]>> AsRef<[u8]> for Leaving<P> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl<P> Drop for Leaving<P> {
    fn drop(&mut self) {
        self.frames.fetch_add(1, Ordering::Relaxed);
    }
}

/// A request under way. Dropping it takes its sink out and tells the node to stop.
pub(crate) struct Begun {
    live: Arc<Live>,
    number: u64,
}

impl Drop for Begun {
    fn drop(&mut self) {
        let (sink, waiting) = self.live.sinks.lock().cancel(self.number);
        drop(sink);
        if waiting {
            self.live.tell_surely(&Request::Cancel(self.number));
        }
    }
}
