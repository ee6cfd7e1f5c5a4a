//! A device in host memory, with a thread per stream. `emulated` gives it kernels, `host` does not.
//!
//! Invariants:
//! - Operations of a stream run on its thread, in order. Those of two streams run at the same time
//!   unless an event orders them, as on a GPU.
//! - A call checks for races before it enqueues. So an operation with a race never runs.
//! - An operation holds handles of its memory until it has ended.
//! - After the first error of an operation, the device skips all others, and every call reports
//!   this error.

use super::emulated::Library;
use super::memory::{Owner, Progress, Region, Use};
use super::races::{Clock, Races, Touch};
use super::registrations::Registrations;
use super::{Access, Device, DeviceError, DeviceInfo, Event, Graph, Keep, Launch, MEMORY_ALIGNMENT, Memory, Place};
use super::{Slice, Stream};
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Operations that wait in a stream. A call beyond it waits for room.
const QUEUE_LIMIT: usize = 1024;
/// Longest wait of a call for room in its stream, and of a stream for an event.
const STALL_LIMIT: Duration = Duration::from_secs(600);
/// Time between two looks at a queue that is full or in use.
const POLL: Duration = Duration::from_micros(100);
/// Bytes behind each allocation of an emulated device, with a pattern that launches check.
const GUARD_BYTES: usize = 64;
/// Alignment of pinned memory, in bytes.
const PINNED_ALIGNMENT: usize = 4096;
const GUARD: u8 = 0xA5;
/// New memory of an emulated device up to this length is filled with [`UNDEFINED`].
const FILL_LIMIT: usize = 16 << 20;
/// A NaN in most number formats.
const UNDEFINED: u8 = 0xFF;

static DEVICES: AtomicU64 = AtomicU64::new(1);
/// Nothing is pinned here. The rules are those of a driver.
static REGISTERED: Registrations = Registrations::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Ignoring poison is sound: no holder of these locks panics between two related changes.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State that a device, its streams and its memory share.
struct Core {
    id: u64,
    kernels: Option<Arc<Library>>,
    races: Mutex<Races>,
    memory_limit: usize,
    used_bytes: AtomicUsize,
    /// Launches so far. The emulator alternates the order of threads with it.
    launches: AtomicU64,
    failure: OnceLock<DeviceError>,
}

impl Core {
    fn check(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Allocated bytes of a region, with its guard. Pinned memory begins with a page, as that of a
    /// driver does.
    fn layout(&self, place: Place, bytes: usize) -> Option<Layout> {
        let guard = if self.kernels.is_some() { GUARD_BYTES } else { 0 };
        let alignment = if place == Place::Pinned { PINNED_ALIGNMENT } else { MEMORY_ALIGNMENT };
        Layout::from_size_align(bytes.checked_add(guard)?, alignment).ok()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} with {} bytes in use", self.id, self.used_bytes.load(Ordering::Relaxed))
    }
}

/// Owner of memory that the device has allocated.
#[derive(Debug)]
struct Allocated(Arc<Core>);

impl Owner for Allocated {
    fn release(&self, region: Region, _uses: Vec<Use>) {
        // The operations in flight held handles, so all uses have ended.
        lock(&self.0.races).forget(&(region.address..region.address + region.bytes as u64));
        if let Some(layout) = self.0.layout(region.place, region.bytes) {
            // SAFETY: `allocate` has obtained the region with this layout, and this is its only
            // release.
            unsafe { std::alloc::dealloc(region.address as *mut u8, layout) };
            self.0.used_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        }
    }
}

/// Owner of memory that belongs to another object.
struct Adopted {
    core: Arc<Core>,
    _keep: Keep,
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "adopted memory of {:?}", self.core)
    }
}

impl Owner for Adopted {
    fn release(&self, region: Region, _uses: Vec<Use>) {
        lock(&self.core.races).forget(&(region.address..region.address + region.bytes as u64));
        if region.place == Place::Pinned {
            REGISTERED.remove(region.address);
        }
    }
}

#[derive(Debug)]
pub(super) struct Software {
    core: Arc<Core>,
    info: DeviceInfo,
}

impl Software {
    /// Creates a device of at most `memory_limit` bytes, pinned memory included.
    pub(super) fn new(info: DeviceInfo, memory_limit: usize, kernels: Option<Arc<Library>>) -> Software {
        let core = Core {
            id: DEVICES.fetch_add(1, Ordering::Relaxed),
            kernels,
            races: Mutex::default(),
            memory_limit,
            used_bytes: AtomicUsize::new(0),
            launches: AtomicU64::new(0),
            failure: OnceLock::new(),
        };
        Software { core: Arc::new(core), info }
    }
}

impl Device for Software {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        Ok(self.core.memory_limit.saturating_sub(self.core.used_bytes.load(Ordering::Relaxed)))
    }

    fn allocate(&self, place: Place, bytes: usize) -> Result<Memory, DeviceError> {
        let exhausted = || DeviceError::OutOfMemory { wanted: bytes };
        let layout = self.core.layout(place, bytes).filter(|_| bytes > 0).ok_or_else(exhausted)?;
        let limit = self.core.memory_limit;
        let used = &self.core.used_bytes;
        let take = |used: usize| used.checked_add(layout.size()).filter(|&total| total <= limit);
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).map_err(|_| exhausted())?;
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            used.fetch_sub(layout.size(), Ordering::Relaxed);
            return Err(exhausted());
        }
        if self.core.kernels.is_some() {
            let filled = if bytes <= FILL_LIMIT { bytes } else { 0 };
            // SAFETY: the allocation has `bytes` bytes and a guard, and no other owner yet.
            unsafe {
                start.write_bytes(UNDEFINED, filled);
                start.add(bytes).write_bytes(GUARD, GUARD_BYTES);
            }
        }
        let region =
            Region { device: self.core.id, place, address: start as u64, bytes, guarded: self.core.kernels.is_some() };
        Ok(Memory::new(region, Arc::new(Allocated(Arc::clone(&self.core)))))
    }

    unsafe fn adopt(&self, place: Place, address: u64, bytes: usize, keep: Keep) -> Result<Memory, DeviceError> {
        if place == Place::Pinned {
            REGISTERED.add(address, bytes, || Ok(Box::new(|| ())))?;
        }
        let region = Region { device: self.core.id, place, address, bytes, guarded: false };
        Ok(Memory::new(region, Arc::new(Adopted { core: Arc::clone(&self.core), _keep: keep })))
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        let index = lock(&self.core.races).add_stream();
        let state = Arc::new(State { name: name.to_string(), ..State::default() });
        let (sender, receiver) = sync_channel(QUEUE_LIMIT);
        let worker = Worker { core: Arc::clone(&self.core), state: Arc::clone(&state), receiver };
        std::thread::Builder::new()
            .name(format!("stream {name}"))
            .spawn(move || worker.run())
            .map_err(|error| DeviceError::System { action: "start a stream's thread", reason: error.to_string() })?;
        let queue = Mutex::new(Queue { sender, recording: None });
        Ok(Arc::new(SoftwareStream { core: Arc::clone(&self.core), index, state, queue }))
    }
}

/// Progress of a stream, shared with its thread, its events and its memory.
#[derive(Debug, Default)]
struct State {
    name: String,
    enqueued: AtomicU64,
    ended: Mutex<u64>,
    changed: Condvar,
}

impl State {
    /// Waits until the first `operations` operations have ended. Returns `false` at the deadline.
    fn wait(&self, operations: u64, deadline: Instant) -> bool {
        let mut ended = lock(&self.ended);
        while *ended < operations {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            ended = self.changed.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Progress for State {
    fn has_reached(&self, operations: u64) -> bool {
        // A call that fails to enqueue takes its number back.
        *lock(&self.ended) >= operations.min(self.enqueued.load(Ordering::Acquire))
    }
}

fn late(waited_for: String, since: Instant) -> DeviceError {
    DeviceError::Deadline { waited_for, after: since.elapsed() }
}

#[derive(Debug, Clone)]
enum Work {
    Copy { target: Slice, source: Slice },
    Fill { target: Slice, byte: u8 },
    Launch(Launch),
    WaitFor { state: Arc<State>, operations: u64 },
    Stamp(Arc<OnceLock<Instant>>),
    Replay(Arc<[Work]>),
}

impl Work {
    fn name(&self, stream: &str) -> String {
        match self {
            Work::Copy { .. } => format!("a copy on stream {stream}"),
            Work::Fill { .. } => format!("a fill on stream {stream}"),
            Work::Launch(launch) => format!("kernel {} on stream {stream}", launch.kernel),
            Work::Replay(_) => format!("a graph on stream {stream}"),
            Work::WaitFor { .. } | Work::Stamp(_) => format!("an event on stream {stream}"),
        }
    }

    fn touches(&self, out: &mut Vec<Touch>) {
        match self {
            Work::Copy { target, source } => {
                out.push(touch(target, Access::Write));
                out.push(touch(source, Access::Read));
            }
            Work::Fill { target, .. } => out.push(touch(target, Access::Write)),
            Work::Launch(launch) => launch.pointers().for_each(|pointer| {
                let whole = touch(&pointer.slice, pointer.access);
                let Some(ranges) = &pointer.ranges else { return out.push(whole) };
                out.extend(ranges.iter().map(|range| {
                    let at = |offset: usize| whole.range.start.saturating_add(offset as u64).min(whole.range.end);
                    Touch { range: at(range.start)..at(range.end), writes: whole.writes }
                }));
            }),
            Work::WaitFor { .. } | Work::Stamp(_) => {}
            Work::Replay(works) => works.iter().for_each(|work| work.touches(out)),
        }
    }

    fn memories(&self, visit: &mut dyn FnMut(&Memory)) {
        match self {
            Work::Copy { target, source } => {
                visit(target.memory());
                visit(source.memory());
            }
            Work::Fill { target, .. } => visit(target.memory()),
            Work::Launch(launch) => launch.pointers().for_each(|pointer| visit(pointer.slice.memory())),
            Work::WaitFor { .. } | Work::Stamp(_) => {}
            Work::Replay(works) => works.iter().for_each(|work| work.memories(visit)),
        }
    }
}

fn touch(slice: &Slice, access: Access) -> Touch {
    Touch { range: slice.address()..slice.address() + slice.bytes() as u64, writes: access.writes() }
}

/// The thread of a stream.
struct Worker {
    core: Arc<Core>,
    state: Arc<State>,
    receiver: Receiver<Work>,
}

impl Worker {
    /// Runs operations until the stream is dropped and its queue is empty.
    fn run(self) {
        while let Ok(work) = self.receiver.recv() {
            if self.core.failure.get().is_none()
                && let Err(error) = self.execute(&work)
            {
                // An earlier error of another stream stays.
                let _ = self.core.failure.set(error);
            }
            // Before the count, which tells owners that the memory is free.
            drop(work);
            *lock(&self.state.ended) += 1;
            self.state.changed.notify_all();
        }
    }

    fn execute(&self, work: &Work) -> Result<(), DeviceError> {
        match work {
            Work::Copy { target, source } => {
                let (from, to) = (source.address() as *const u8, target.address() as *mut u8);
                // SAFETY: both slices lie inside memory that `work` keeps. They have one length
                // and do not overlap. No operation with a race runs at the same time.
                unsafe { std::ptr::copy_nonoverlapping(from, to, target.bytes()) };
            }
            Work::Fill { target, byte } => {
                // SAFETY: as for a copy.
                unsafe { (target.address() as *mut u8).write_bytes(*byte, target.bytes()) };
            }
            Work::Launch(launch) => self.launch(launch)?,
            Work::WaitFor { state, operations } => {
                let start = Instant::now();
                if !state.wait(*operations, start + STALL_LIMIT) {
                    return Err(late(format!("an event of stream {}", state.name), start));
                }
            }
            Work::Stamp(time) => {
                let _ = time.set(Instant::now());
            }
            Work::Replay(works) => works.iter().try_for_each(|work| self.execute(work))?,
        }
        Ok(())
    }

    fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        let library = self.core.kernels.as_ref().ok_or(DeviceError::RunsNoKernels("host"))?;
        let order = self.core.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller of `Stream::launch` guarantees that the kernel stays inside the
        // slices, which `launch` keeps. No operation with a race runs at the same time.
        unsafe { library.run(launch, order) }?;
        for pointer in launch.pointers() {
            let memory = pointer.slice.memory();
            if !memory.is_guarded() {
                continue;
            }
            // SAFETY: guarded memory has these bytes behind it.
            let guard =
                unsafe { std::slice::from_raw_parts((memory.address() as *const u8).add(memory.bytes()), GUARD_BYTES) };
            if guard.iter().any(|&byte| byte != GUARD) {
                let reason = format!("a thread has written behind the {} bytes of an argument", memory.bytes());
                return Err(DeviceError::Kernel { kernel: launch.kernel.to_string(), reason });
            }
        }
        Ok(())
    }
}

struct Queue {
    sender: SyncSender<Work>,
    recording: Option<Vec<Work>>,
}

struct SoftwareStream {
    core: Arc<Core>,
    /// Index in the race checker.
    index: usize,
    state: Arc<State>,
    queue: Mutex<Queue>,
}

impl fmt::Debug for SoftwareStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (enqueued, ended) = (self.state.enqueued.load(Ordering::Relaxed), *lock(&self.state.ended));
        write!(f, "stream {} with {ended} of {enqueued} operations done", self.state.name)
    }
}

impl SoftwareStream {
    /// Records or enqueues an operation on memory.
    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        let mut queue = lock(&self.queue);
        self.core.check()?;
        let mut own = true;
        work.memories(&mut |memory| own &= memory.device() == self.core.id);
        if !own {
            return Err(DeviceError::Foreign("the memory"));
        }
        if let Some(works) = &mut queue.recording {
            works.push(work);
            return Ok(());
        }
        let mut touches = Vec::new();
        work.touches(&mut touches);
        lock(&self.core.races).operation(self.index, &touches, &work.name(&self.state.name))?;
        self.enqueue(&queue, work).map(|_| ())
    }

    /// Enqueues `work`, and returns its number in the stream.
    fn enqueue(&self, queue: &Queue, mut work: Work) -> Result<u64, DeviceError> {
        let number = self.state.enqueued.fetch_add(1, Ordering::AcqRel) + 1;
        let progress: Arc<dyn Progress> = Arc::<State>::clone(&self.state);
        work.memories(&mut |memory| memory.mark(&progress, number));
        let start = Instant::now();
        loop {
            match queue.sender.try_send(work) {
                Ok(()) => return Ok(number),
                Err(TrySendError::Full(back)) if start.elapsed() < STALL_LIMIT => work = back,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                    self.state.enqueued.fetch_sub(1, Ordering::AcqRel);
                    return Err(late(format!("room in stream {}", self.state.name), start));
                }
            }
            std::thread::sleep(POLL);
        }
    }

    fn idle_queue(&self, action: &'static str) -> Result<MutexGuard<'_, Queue>, DeviceError> {
        self.check_idle(lock(&self.queue), action)
    }

    /// As [`idle_queue`](Self::idle_queue), with a deadline: a call of another thread that waits
    /// for room has the queue.
    fn idle_queue_until(&self, action: &'static str, deadline: Instant) -> Result<MutexGuard<'_, Queue>, DeviceError> {
        let start = Instant::now();
        loop {
            match self.queue.try_lock() {
                Ok(queue) => return self.check_idle(queue, action),
                Err(TryLockError::Poisoned(poisoned)) => return self.check_idle(poisoned.into_inner(), action),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(late(format!("a call on stream {}", self.state.name), start));
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(POLL),
            }
        }
    }

    fn check_idle<'a>(
        &self,
        queue: MutexGuard<'a, Queue>,
        action: &'static str,
    ) -> Result<MutexGuard<'a, Queue>, DeviceError> {
        self.core.check()?;
        if queue.recording.is_some() { Err(DeviceError::Recording(action)) } else { Ok(queue) }
    }
}

impl Stream for SoftwareStream {
    fn name(&self) -> &str {
        &self.state.name
    }

    fn copy(&self, target: &Slice, source: &Slice) -> Result<(), DeviceError> {
        check_copy(target, source)?;
        self.submit(Work::Copy { target: target.clone(), source: source.clone() })
    }

    fn fill(&self, target: &Slice, byte: u8) -> Result<(), DeviceError> {
        target.memory().check_writable()?;
        self.submit(Work::Fill { target: target.clone(), byte })
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        let library = self.core.kernels.as_ref().ok_or(DeviceError::RunsNoKernels("host"))?;
        library.check(launch)?;
        launch.check_writable()?;
        self.submit(Work::Launch(launch.clone()))
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let queue = self.idle_queue("an event")?;
        let clock = lock(&self.core.races).record(self.index);
        let time = Arc::new(OnceLock::new());
        let operations = self.enqueue(&queue, Work::Stamp(Arc::clone(&time)))?;
        let state = Arc::clone(&self.state);
        Ok(Arc::new(SoftwareEvent { core: Arc::clone(&self.core), state, operations, clock, time }))
    }

    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let event = own_event(event, &self.core)?;
        let queue = self.idle_queue("a wait for an event")?;
        lock(&self.core.races).wait_for(self.index, &event.clock);
        let work = Work::WaitFor { state: Arc::clone(&event.state), operations: event.operations };
        self.enqueue(&queue, work).map(|_| ())
    }

    fn begin_graph(&self) -> Result<(), DeviceError> {
        let mut queue = self.idle_queue("a second recording")?;
        queue.recording = Some(Vec::new());
        Ok(())
    }

    fn end_graph(&self) -> Result<Arc<dyn Graph>, DeviceError> {
        let works = lock(&self.queue).recording.take().ok_or(DeviceError::NotRecording)?;
        Ok(Arc::new(SoftwareGraph { device: self.core.id, works: works.into() }))
    }

    fn replay(&self, graph: &dyn Graph) -> Result<(), DeviceError> {
        let graph: &dyn Any = graph;
        let own = graph.downcast_ref::<SoftwareGraph>().filter(|graph| graph.device == self.core.id);
        let works = Arc::clone(&own.ok_or(DeviceError::Foreign("the graph"))?.works);
        self.submit(Work::Replay(works))
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        let start = Instant::now();
        let (operations, clock) = {
            let _queue = self.idle_queue_until("a wait", deadline)?;
            (self.state.enqueued.load(Ordering::Acquire), lock(&self.core.races).record(self.index))
        };
        if !self.state.wait(operations, deadline) {
            return Err(late(format!("stream {}", self.state.name), start));
        }
        lock(&self.core.races).host_waited(&clock);
        self.core.check()
    }
}

/// Checks that a copy has one length, that its sides do not overlap, and that it may write.
pub(super) fn check_copy(target: &Slice, source: &Slice) -> Result<(), DeviceError> {
    target.memory().check_writable()?;
    if target.bytes() != source.bytes() {
        return Err(DeviceError::OutOfRange { start: 0, end: source.bytes(), bytes: target.bytes() });
    }
    let (a, b) = (target.address(), source.address());
    if target.bytes() > 0 && a.abs_diff(b) < target.bytes() as u64 {
        return Err(DeviceError::Shape("a copy onto an overlapping range"));
    }
    Ok(())
}

struct SoftwareEvent {
    core: Arc<Core>,
    state: Arc<State>,
    operations: u64,
    clock: Clock,
    time: Arc<OnceLock<Instant>>,
}

impl fmt::Debug for SoftwareEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event behind {} operations of stream {}", self.operations, self.state.name)
    }
}

fn own_event<'a>(event: &'a dyn Event, core: &Arc<Core>) -> Result<&'a SoftwareEvent, DeviceError> {
    let event: &dyn Any = event;
    let own = event.downcast_ref::<SoftwareEvent>().filter(|event| event.core.id == core.id);
    own.ok_or(DeviceError::Foreign("the event"))
}

impl Event for SoftwareEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        self.core.check()?;
        let done = self.state.has_reached(self.operations);
        if done {
            lock(&self.core.races).host_waited(&self.clock);
        }
        Ok(done)
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        let start = Instant::now();
        if !self.state.wait(self.operations, deadline) {
            return Err(late(format!("an event of stream {}", self.state.name), start));
        }
        lock(&self.core.races).host_waited(&self.clock);
        self.core.check()
    }

    fn since(&self, earlier: &dyn Event) -> Result<Duration, DeviceError> {
        let earlier = own_event(earlier, &self.core)?;
        match (earlier.time.get(), self.time.get()) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(*start)),
            _ => Err(DeviceError::Shape("the time between events that are not done")),
        }
    }
}

#[derive(Debug)]
struct SoftwareGraph {
    device: u64,
    works: Arc<[Work]>,
}

impl Graph for SoftwareGraph {
    fn operations(&self) -> usize {
        self.works.len()
    }
}
