//! Pages by RDMA: lines to a node, and what is read and written on them.
//!
//! Always true:
//! - whatever becomes of a request, memory that a device may touch belongs to the line until it no longer does; a caller's buffer
//!   is its caller's all the time, only the memory in it changes;
//! - what was read counts only after it was checked, like what comes any other way;
//! - a page that is open is released when it was read, or will not be;
//! - lines that died, or that the node does not use, are made anew, with growing pauses; until then pages come over TCP, unless the
//!   URL wants nothing but RDMA;
//! - a put is not given up at the node while a part of it is being written: that would cost the line.

use crate::connect::{Connector, away};
use crate::link::{LinkOptions, Live};
use crate::url::Transport;
use crate::view::Releases;
use bytes::Bytes;
use larder_format::planted::{Bug, has};
use larder_format::{CHUNK_BYTES, chunk_crcs};
use larder_rdma::{EndpointAddress, Error, Fabric, Line, RemoteRange};
use larder_share::{Block, Memory};
use larder_wire::{Entry, LineEnd, LineWindow, MAX_LINES, PartBytes, PartWindow, Request, Response, VERSION_OF_LINES};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

/// Most time for the node to answer an offer of lines.
const OFFER_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause before lines that died, or could not be made, are tried again, and how far it grows.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A line that lived so long was a good one: the next pause is the shortest again.
const LIFE_GOOD: Duration = Duration::from_secs(10);
/// So often in a row a node may answer without a window what asked for one, before its ends of the lines are taken for dead.
const UNUSED_MAX: usize = 64;

/// Devices, and the memory that they know.
pub struct Devices {
    /// Open devices.
    pub(crate) fabric: Fabric,
    /// Registered with each of them.
    pub(crate) memory: Arc<Memory>,
}

/// The lines to one node, and what is open on them.
#[derive(Default)]
pub(crate) struct Lines {
    state: Mutex<State>,
    turn: AtomicUsize,
    /// How often in a row a window was asked for, and none came.
    unused: AtomicUsize,
    /// Lines were given up here.
    given_up: Notify,
}

#[derive(Default)]
struct State {
    lines: BTreeMap<u32, Arc<Line>>,
    devices: Option<Arc<Devices>>,
    /// Parts that may be written, by the number of their Reserve.
    parts: BTreeMap<u64, BTreeMap<(u32, u32), LineWindow>>,
    /// Parts that are being written, by the number of their Reserve.
    writing: BTreeMap<u64, Writing>,
}

/// Writes of one Reserve's parts that are under way.
#[derive(Default)]
struct Writing {
    writes: usize,
    /// The node is told to give the puts up when the last has ended.
    cancelled: bool,
}

/// A page that the node keeps open until this is dropped.
pub(crate) struct Promise {
    pub(crate) entry: Entry,
    pub(crate) releases: Arc<Releases>,
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.releases.add(self.entry);
    }
}

impl Lines {
    /// Whether there is a line.
    pub(crate) fn is_up(&self) -> bool {
        self.state.lock().lines.values().any(|line| !line.is_dead())
    }

    /// The lines that can be used, each time beginning with the next.
    fn in_turn(&self) -> Vec<u32> {
        let state = self.state.lock();
        let alive = state.lines.iter().filter(|(_, line)| !line.is_dead());
        let mut numbers: Vec<u32> = alive.map(|(number, _)| *number).collect();
        if !numbers.is_empty() {
            let first = self.turn.fetch_add(1, Ordering::Relaxed) % numbers.len();
            numbers.rotate_left(first);
        }
        numbers
    }

    /// Lines to read pages on, and the memory to read them into; `None` if there are none.
    pub(crate) fn for_reading(&self) -> Option<(Vec<u32>, Arc<Devices>)> {
        let numbers = self.in_turn();
        let devices = self.state.lock().devices.clone()?;
        (!numbers.is_empty()).then_some((numbers, devices))
    }

    /// Reads what is behind a window. Goes on if nobody waits for it any more; then the memory goes back when it is done.
    pub(crate) fn read(&self, window: LineWindow, into: Block, promise: Promise) -> oneshot::Receiver<Block> {
        let (done, read) = oneshot::channel();
        let line = self.state.lock().lines.get(&window.line).cloned();
        if let Some(line) = line {
            let promise = Some(promise).filter(|_| !has(Bug::ReadReleasedEarly));
            tokio::spawn(async move {
                match line.read(into, range(window)).await {
                    Ok(block) => _ = done.send(block),
                    Err(error) => tracing::debug!(%error, line = window.line, "a page was not read"),
                }
                drop(promise);
            });
        }
        read
    }

    /// A window was asked for, and came or did not.
    pub(crate) fn answered(&self, with_window: bool) {
        if with_window {
            return self.unused.store(0, Ordering::Relaxed);
        }
        if self.unused.fetch_add(1, Ordering::Relaxed) + 1 < UNUSED_MAX {
            return;
        }
        self.unused.store(0, Ordering::Relaxed);
        // What is under way on them keeps them until it is over.
        let unused = std::mem::take(&mut self.state.lock().lines);
        if !unused.is_empty() {
            tracing::debug!(lines = unused.len(), "a node does not use RDMA lines: they are given up");
            self.given_up.notify_one();
        }
    }

    /// Whether parts of this Reserve are being written. If so, its Cancel goes out when that is over.
    fn cancel_later(&self, reserve: u64) -> bool {
        self.state.lock().writing.get_mut(&reserve).map(|writing| writing.cancelled = true).is_some()
    }

    /// Nothing moves here any more.
    pub(crate) fn end(&self) {
        let state = std::mem::take(&mut *self.state.lock());
        drop(state);
    }

    fn part(&self, put: Entry, part: u32) -> Option<(Arc<Line>, LineWindow, Arc<Devices>)> {
        let mut state = self.state.lock();
        let window = state.parts.get_mut(&put.request)?.remove(&(put.index, part))?;
        let line = state.lines.get(&window.line).filter(|line| !line.is_dead())?;
        Some((line.clone(), window, state.devices.clone()?))
    }
}

/// A write of a part of a Reserve, until this is dropped.
struct Write {
    live: Arc<Live>,
    reserve: u64,
}

impl Write {
    fn begin(live: &Arc<Live>, reserve: u64) -> Write {
        live.lines.state.lock().writing.entry(reserve).or_default().writes += 1;
        Write { live: live.clone(), reserve }
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        let last = {
            let mut state = self.live.lines.state.lock();
            match state.writing.get_mut(&self.reserve) {
                Some(others) if others.writes > 1 => {
                    others.writes -= 1;
                    None
                }
                _ => state.writing.remove(&self.reserve),
            }
        };
        if last.is_some_and(|last| last.cancelled) {
            self.live.tell_surely(&Request::Cancel(self.reserve));
        }
    }
}

fn range(window: LineWindow) -> RemoteRange {
    RemoteRange { address: window.address, len: window.len, key: window.key }
}

/// Parts of a Reserve that may be written by RDMA, until this is dropped.
pub(crate) struct OpenParts {
    live: Arc<Live>,
    reserve: u64,
    /// How many.
    opened: usize,
}

impl OpenParts {
    /// The node granted some of the pages, so that it could have opened parts.
    pub(crate) fn granted(&self) {
        self.live.lines.answered(self.opened > 0);
    }
}

impl Drop for OpenParts {
    fn drop(&mut self) {
        let parts = self.live.lines.state.lock().parts.remove(&self.reserve);
        drop(parts);
    }
}

/// What became of a part that might go by RDMA.
pub(crate) enum Written<P> {
    /// It is there, and the node was told.
    Told,
    /// It cannot go this way: send it.
    No(P),
    /// It is lost.
    Lost,
}

/// Bytes of a part, with whatever counts them.
pub(crate) trait PartSource: AsRef<[u8]> + Send + Sync + 'static {
    fn shared(&self) -> Bytes;
}

impl PartSource for Bytes {
    fn shared(&self) -> Bytes {
        self.clone()
    }
}

impl Live {
    /// Asks the node to open the parts of what request `reserve` was granted, if there are lines.
    pub(crate) async fn open_parts(self: &Arc<Self>, reserve: u64, deadline: Instant) -> Option<OpenParts> {
        let lines = self.lines.in_turn();
        if lines.is_empty() {
            return None;
        }
        let answer = self.ask(&Request::OpenParts { reserve, lines }, deadline).await;
        let Some(Response::Windows(windows)) = answer else { return None };
        let by_part = |open: PartWindow| ((open.index, open.part), open.window);
        let windows: BTreeMap<_, _> = windows.into_iter().map(by_part).collect();
        let opened = windows.len();
        self.lines.state.lock().parts.insert(reserve, windows);
        Some(OpenParts { live: self.clone(), reserve, opened })
    }

    /// Has the node give up the puts of a Reserve, and forget what it has not answered of it.
    pub(crate) fn cancel_puts(&self, reserve: u64) {
        if has(Bug::CancelUnderWrite) || !self.lines.cancel_later(reserve) {
            self.tell_surely(&Request::Cancel(reserve));
        }
    }

    /// Writes a part by RDMA if it is open: from where it lies if devices know that memory, otherwise from a copy. A write that
    /// began goes on if nobody waits for it any more, as after `by`. The node takes back what it lent when the bytes come another way.
    pub(crate) async fn write_part<P: PartSource>(
        self: &Arc<Self>,
        put: Entry,
        part: u32,
        bytes: P,
        by: Instant,
    ) -> Written<P> {
        let Some((line, window, devices)) = self.lines.part(put, part) else { return Written::No(bytes) };
        let shared = bytes.shared();
        let mut block = None;
        let crcs = if line.reaches(&shared) {
            chunk_crcs(&shared).collect()
        } else {
            let Some(copy) = devices.memory.allocate(shared.len()) else { return Written::No(bytes) };
            copy_with_crcs(&shared, block.insert(copy))
        };
        let write = Write::begin(self, put.request);
        let writing = tokio::spawn(async move {
            let written = match block {
                Some(block) => line.write(block, range(window)).await.map(drop),
                None => line.write(shared, range(window)).await.map(drop),
            };
            drop(write);
            (written, bytes)
        });
        let message = Request::Part { put, part, crcs, bytes: PartBytes::Window };
        match tokio::time::timeout_at(by.into(), writing).await {
            Ok(Ok((Ok(()), _))) if self.send(&message, by).await => Written::Told,
            Ok(Ok((Err(error), bytes))) => {
                tracing::debug!(%error, line = window.line, "a part was not written");
                Written::No(bytes)
            }
            Ok(Ok((Ok(()), _)) | Err(_)) | Err(_) => Written::Lost,
        }
    }
}

/// Copies bytes while they are in the processor's cache for their checksums, one for each chunk.
fn copy_with_crcs(from: &[u8], into: &mut [u8]) -> Vec<u32> {
    let chunks = from.chunks(CHUNK_BYTES).zip(into.chunks_mut(CHUNK_BYTES));
    let copied = chunks.map(|(from, into)| {
        let crc = crc32fast::hash(from);
        into.copy_from_slice(from);
        crc
    });
    copied.collect()
}

/// Keeps lines to a node while it is connected. `announce` is called when pages can move: when lines are there, or it is clear that
/// they do not come soon. Ends only if there can be none and the URL wants nothing else.
pub(crate) async fn keep<C: Connector>(
    live: &Arc<Live>,
    connector: &C,
    options: &LinkOptions,
    announce: impl FnOnce(),
) -> io::Error {
    let forced = options.transport == Transport::Rdma;
    let mut announce = Some(announce);
    let mut announced = || _ = announce.take().map(|announce| announce());
    let Some(devices) = devices(live, connector, options, &mut announced).await else {
        if forced {
            return away("no RDMA: no usable device here, no memory for it, or a node of an older version");
        }
        announced();
        return std::future::pending().await;
    };
    live.lines.state.lock().devices = Some(devices.clone());
    let ports = devices.fabric.nics().map(|_| None).collect();
    let mut maker = Maker { live, ports, gone: Vec::new(), next: 1, devices };
    let (mut pause, mut patience) = (PAUSE_MIN, options.connect_timeout);
    loop {
        if let Ok(Err(error)) = tokio::time::timeout(patience, maker.make()).await {
            tracing::debug!(node = %options.address, %error, "no RDMA line");
        }
        if forced && !live.lines.is_up() {
            return away("no RDMA: the node has no device that can be reached from here, or the lines to it died");
        }
        announced();
        // Pages move by now: what comes later may take longer.
        patience = OFFER_TIMEOUT;
        let begin = Instant::now();
        maker.wait(pause).await;
        pause = if begin.elapsed() > LIFE_GOOD.max(pause * 2) { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
    }
}

/// The devices to use, if there are any and they are wanted. What takes longer than a connection may is not waited for before pages
/// move, unless they move in no other way.
async fn devices<C: Connector>(
    live: &Live,
    connector: &C,
    options: &LinkOptions,
    mut announce: impl FnMut(),
) -> Option<Arc<Devices>> {
    let forced = options.transport == Transport::Rdma;
    let wanted = forced || (options.transport == Transport::Auto && live.transport() != Transport::Shm);
    if !wanted || live.version < VERSION_OF_LINES {
        return None;
    }
    let opening = connector.devices(options.memory.as_ref());
    tokio::pin!(opening);
    match tokio::time::timeout(options.connect_timeout, &mut opening).await {
        Ok(devices) => devices,
        Err(_) => {
            if !forced {
                announce();
            }
            opening.await
        }
    }
}

/// Makes lines, one for each device.
struct Maker<'a> {
    live: &'a Arc<Live>,
    devices: Arc<Devices>,
    /// By device: the line that it has.
    ports: Vec<Option<u32>>,
    /// Lines that the node was not told yet are of no use.
    gone: Vec<u32>,
    /// Number of the next line.
    next: u32,
}

impl Maker<'_> {
    /// Makes what is missing.
    async fn make(&mut self) -> Result<(), Error> {
        self.bury();
        let (mut offered, mut ends) = (BTreeMap::new(), Vec::new());
        for port in (0..self.ports.len()).filter(|&port| self.ports[port].is_none()).take(MAX_LINES) {
            let line = match self.devices.fabric.line(port) {
                Ok(line) => line,
                Err(error) => {
                    tracing::debug!(port, %error, "no RDMA line from a device");
                    continue;
                }
            };
            ends.push(LineEnd { line: self.next, address: line.local().encode() });
            offered.insert(self.next, (port, line));
            self.next += 1;
        }
        let told = self.gone.len().min(MAX_LINES);
        let gone = self.gone[..told].to_vec();
        // Whatever comes of them, the node may have connected those that are not in use in the end.
        self.gone.extend(offered.keys());
        let deadline = crate::clock::now() + OFFER_TIMEOUT;
        let answer = self.live.ask(&Request::Lines { gone, offered: ends }, deadline).await;
        let Some(Response::Lines(answered)) = answer else { return Err(Error::NotConnected) };
        self.gone.drain(..told);
        let mut last = Ok(());
        for end in answered {
            let Some((port, line)) = offered.remove(&end.line) else { continue };
            let connected = match EndpointAddress::decode(&end.address) {
                Ok(address) => line.connect(&address).await,
                Err(_) => Err(Error::Invalid("the node's address of a line")),
            };
            match connected {
                Ok(()) => {
                    self.gone.retain(|&number| number != end.line);
                    self.ports[port] = Some(end.line);
                    self.live.lines.state.lock().lines.insert(end.line, Arc::new(line));
                }
                Err(error) => last = Err(error),
            }
        }
        last
    }

    /// Takes lines that died off the list.
    fn bury(&mut self) {
        let mut state = self.live.lines.state.lock();
        for port in &mut self.ports {
            if let Some(number) = *port
                && state.lines.get(&number).is_none_or(|line| line.is_dead())
            {
                *port = None;
                self.gone.push(number);
                state.lines.remove(&number);
            }
        }
    }

    /// Waits until there is something to do: until a line died or was given up, and for `pause` at least; only so long if some are
    /// missing.
    async fn wait(&self, pause: Duration) {
        let lines: Vec<Arc<Line>> = self.live.lines.state.lock().lines.values().cloned().collect();
        let missing = self.ports.iter().any(Option::is_none);
        if !missing && !lines.is_empty() {
            let ends = lines.iter().map(|line| Box::pin(line.ended()));
            tokio::select! {
                _ = futures::future::select_all(ends) => {}
                () = self.live.lines.given_up.notified() => {}
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Opens this machine's devices and registers `memory` with them; `None` if there are none.
pub async fn open(options: &larder_rdma::FabricOptions, memory: &Arc<Memory>) -> Option<Arc<Devices>> {
    match Fabric::open(options, memory.clone()).await {
        Ok(fabric) => Some(Arc::new(Devices { fabric, memory: memory.clone() })),
        Err(error) if options.devices.is_empty() => {
            tracing::debug!(%error, "no RDMA");
            None
        }
        Err(error) => {
            tracing::warn!(%error, devices = ?options.devices, "no RDMA");
            None
        }
    }
}
