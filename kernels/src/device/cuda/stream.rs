//! Streams, events and graphs of a CUDA device.
//!
//! Invariants:
//! - Numbers of operations follow the order in which the driver gets them.
//! - A fence (an event behind the submitted operations of a stream) is recorded only when the state
//!   of an operation is in question, and never while the stream records a graph.

use super::library::Operands;
use super::{Core, lock};
use crate::device::memory::Progress;
use crate::device::software::check_copy;
use crate::device::{Arg, DeviceError, Event, Graph, Launch, LibraryProduct, Memory, Slice, Stream};
use cudarc::driver::{result, sys};
use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Dynamic shared memory that a kernel gets without asking for more.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;
/// Time between two looks at an event, after the first few.
const POLL: Duration = Duration::from_micros(50);
/// A wait polls without sleeping for this time.
const SPIN: Duration = Duration::from_micros(100);

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// A stream of the driver and its progress, shared with its events and its memory.
struct Track {
    core: Arc<Core>,
    name: String,
    raw: sys::CUstream,
    /// Number of operations, with one that is being submitted.
    enqueued: AtomicU64,
    progress: Mutex<Advance>,
}

#[derive(Default)]
struct Advance {
    submitted: u64,
    ended: u64,
    /// The stream records a graph, and a fence would become part of it.
    is_recording: bool,
    /// Fences in order, each with the number of operations before it.
    fences: VecDeque<(u64, sys::CUevent)>,
}

// SAFETY: the handles are those of the driver, whose functions may be called from any thread.
unsafe impl Send for Track {}
// SAFETY: as for `Send`. A lock protects the list of fences.
unsafe impl Sync for Track {}

impl fmt::Debug for Track {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} with {} operations", self.name, self.enqueued.load(Ordering::Relaxed))
    }
}

impl Track {
    /// Returns `true` if the first `operations` submitted operations have ended.
    fn advance(&self, operations: u64) -> Result<bool, DeviceError> {
        let mut progress = lock(&self.progress);
        if progress.ended >= operations {
            return Ok(true);
        }
        self.core.bind()?;
        let fenced = progress.fences.back().map_or(progress.ended, |(number, _)| *number);
        if fenced < operations && fenced < progress.submitted && !progress.is_recording {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
            let submitted = progress.submitted;
            // Before the record: a fence that is in the list is destroyed in any case.
            progress.fences.push_back((submitted, event));
            // SAFETY: the event and the stream exist until `Drop`.
            if let Err(error) = unsafe { result::event::record(event, self.raw) } {
                progress.fences.pop_back();
                // SAFETY: the event was created above, and is no longer in the list.
                let _ = unsafe { result::event::destroy(event) };
                return Err(error.into());
            }
        }
        while let Some(&(number, event)) = progress.fences.front() {
            // SAFETY: the event exists until it leaves the list.
            match unsafe { result::event::query(event) } {
                Ok(()) => {
                    progress.ended = number;
                    progress.fences.pop_front();
                    // SAFETY: as above, and nothing else knows the event.
                    let _ = unsafe { result::event::destroy(event) };
                }
                Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(progress.ended >= operations)
    }

    /// Notes that the first `operations` operations have ended, as an event has proved.
    fn note_end(&self, operations: u64) {
        let mut progress = lock(&self.progress);
        progress.ended = progress.ended.max(operations);
        while let Some(&(number, event)) = progress.fences.front()
            && number <= operations
        {
            progress.fences.pop_front();
            // SAFETY: the list owned the event. The driver permits this before it is done.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}

impl Progress for Track {
    fn has_reached(&self, operations: u64) -> bool {
        // A call that fails to enqueue takes its number back. An error is no proof.
        let operations = operations.min(self.enqueued.load(Ordering::Acquire));
        self.advance(operations).unwrap_or(false)
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        if self.core.bind().is_err() {
            return;
        }
        let progress = self.progress.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, event) in progress.fences.drain(..) {
            // SAFETY: the list owns the event. The driver permits this before it is done.
            let _ = unsafe { result::event::destroy(event) };
        }
        // SAFETY: this is the last owner of the stream. The driver ends it after its operations.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

/// Polls `is_done` until it returns `true`, or until the deadline.
fn poll(
    waited_for: &dyn Fn() -> String,
    deadline: Instant,
    is_done: &dyn Fn() -> Result<bool, DeviceError>,
) -> Result<(), DeviceError> {
    let start = Instant::now();
    loop {
        if is_done()? {
            return Ok(());
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(DeviceError::Deadline { waited_for: waited_for(), after: now - start });
        }
        if now - start < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(POLL.min(deadline - now));
        }
    }
}

/// Memory and number of the operations that a stream records.
#[derive(Debug, Default)]
struct Recording {
    memories: Vec<Memory>,
    operations: usize,
}

pub(super) struct CudaStream {
    track: Arc<Track>,
    /// Also serialises calls, so that numbers follow the order of the driver.
    recording: Mutex<Option<Recording>>,
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.track.fmt(f)
    }
}

impl CudaStream {
    /// Takes over `raw`, a stream of the core's context.
    pub(super) fn new(core: Arc<Core>, name: &str, raw: sys::CUstream) -> CudaStream {
        let (enqueued, progress) = (AtomicU64::new(0), Mutex::default());
        let track = Arc::new(Track { core, name: name.to_string(), raw, enqueued, progress });
        CudaStream { track, recording: Mutex::new(None) }
    }

    /// Submits an operation on `memories` by `call`, or lets the driver record it.
    fn submit(&self, memories: &[&Memory], call: &dyn Fn() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        let core = &self.track.core;
        if memories.iter().any(|memory| memory.device() != core.id) {
            return Err(DeviceError::Foreign("the memory"));
        }
        let mut recording = lock(&self.recording);
        core.bind()?;
        if let Some(recording) = &mut *recording {
            call()?;
            for &memory in memories {
                recording.memories.push(memory.clone());
            }
            recording.operations += 1;
            return Ok(());
        }
        self.submit_numbered(memories, call)
    }

    /// Submits an operation under the next number. The caller holds the lock of `recording`.
    fn submit_numbered(
        &self,
        memories: &[&Memory],
        call: &dyn Fn() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let number = self.track.enqueued.fetch_add(1, Ordering::AcqRel) + 1;
        let progress: Arc<dyn Progress> = Arc::<Track>::clone(&self.track);
        for memory in memories {
            memory.mark(&progress, number);
        }
        let outcome = call();
        if outcome.is_ok() {
            lock(&self.track.progress).submitted = number;
        } else {
            self.track.enqueued.fetch_sub(1, Ordering::AcqRel);
        }
        outcome
    }

    fn idle(&self, action: &'static str) -> Result<MutexGuard<'_, Option<Recording>>, DeviceError> {
        let recording = lock(&self.recording);
        if recording.is_some() {
            return Err(DeviceError::Recording(action));
        }
        self.track.core.bind()?;
        Ok(recording)
    }
}

impl Stream for CudaStream {
    fn name(&self) -> &str {
        &self.track.name
    }

    fn copy(&self, target: &Slice, source: &Slice) -> Result<(), DeviceError> {
        check_copy(target, source)?;
        let (to, from, bytes) = (target.address(), source.address(), target.bytes());
        // SAFETY: both slices lie inside memory of this device, which stays allocated until the
        // stream has passed the operation. Unified addressing tells the driver the direction.
        let call =
            || unsafe { sys::cuMemcpyAsync(to, from, bytes, self.track.raw) }.result().map_err(DeviceError::from);
        self.submit(&[target.memory(), source.memory()], &call)
    }

    fn fill(&self, target: &Slice, byte: u8) -> Result<(), DeviceError> {
        target.memory().check_writable()?;
        let (to, bytes) = (target.address(), target.bytes());
        // SAFETY: as for a copy.
        let call = || unsafe { result::memset_d8_async(to, byte, bytes, self.track.raw) }.map_err(DeviceError::from);
        self.submit(&[target.memory()], &call)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        let function = self.track.core.functions.get(launch.kernel).copied();
        let function = function.ok_or_else(|| DeviceError::NoKernel(launch.kernel.to_string()))?;
        launch.check_writable()?;
        if launch.shared_bytes > PLAIN_SHARED_BYTES {
            use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC;
            self.track.core.bind()?;
            // SAFETY: the function belongs to a loaded module.
            unsafe { result::function::set_function_attribute(function, DYNAMIC, launch.shared_bytes as i32) }?;
        }
        let slots: Vec<u64> = launch.args.iter().map(Arg::slot).collect();
        let call = || {
            let mut slots = slots.clone();
            let mut params: Vec<*mut c_void> = slots.iter_mut().map(|slot| (&raw mut *slot).cast()).collect();
            let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
            let (grid, block) = ((gx, gy, gz), (bx, by, bz));
            // SAFETY: the caller guarantees that the arguments match the parameters, and the
            // accesses of the kernel. The memory stays allocated until the stream has passed the
            // operation. The driver copies the parameters during the call.
            unsafe { result::launch_kernel(function, grid, block, launch.shared_bytes, self.track.raw, &mut params) }
                .map_err(DeviceError::from)
        };
        let memories: Vec<&Memory> = launch.pointers().map(|pointer| pointer.slice.memory()).collect();
        self.submit(&memories, &call)
    }

    fn multiply(&self, product: &LibraryProduct<'_>) -> Result<(), DeviceError> {
        product.check()?;
        let LibraryProduct { rows, outputs, inputs, x, weight, out } = *product;
        if rows == 0 || outputs == 0 {
            return Ok(());
        }
        let library = self.track.core.library()?;
        let operands = Operands { x: x.address(), weight: weight.address(), out: out.address() };
        // SAFETY: the slices hold the operands, and streams may write the result. The memory stays
        // allocated until the stream has passed the product.
        let call = || unsafe { library.multiply([outputs, inputs], rows, &operands, self.track.raw.cast()) };
        self.submit(&[x.memory(), weight.memory(), out.memory()], &call)
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let _idle = self.idle("an event")?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        let operations = lock(&self.track.progress).submitted;
        let event = CudaEvent { track: Arc::clone(&self.track), raw, operations };
        // SAFETY: the event and the stream exist. `Drop` of the event destroys it.
        unsafe { result::event::record(raw, self.track.raw) }?;
        Ok(Arc::new(event))
    }

    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let event = own_event(event, self.track.core.id)?;
        let _idle = self.idle("a wait for an event")?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both exist. The driver keeps what it needs of the event.
        let call =
            || unsafe { result::stream::wait_event(self.track.raw, event.raw, flags) }.map_err(DeviceError::from);
        // An operation with a number, so that a wait for this stream includes the event.
        self.submit_numbered(&[], &call)
    }

    fn begin_graph(&self) -> Result<(), DeviceError> {
        let mut recording = self.idle("a second recording")?;
        let mut progress = lock(&self.track.progress);
        // Relaxed: other threads, and this one, may allocate and query meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream exists, and records nothing yet.
        unsafe { result::stream::begin_capture(self.track.raw, mode) }?;
        progress.is_recording = true;
        *recording = Some(Recording::default());
        Ok(())
    }

    fn end_graph(&self) -> Result<Arc<dyn Graph>, DeviceError> {
        let mut recording = lock(&self.recording);
        let recorded = recording.take().ok_or(DeviceError::NotRecording)?;
        self.track.core.bind()?;
        // SAFETY: the stream exists, and records since `begin_graph`.
        let ended = unsafe { result::stream::end_capture(self.track.raw) };
        lock(&self.track.progress).is_recording = false;
        let graph = ended?;
        // SAFETY: the driver has just returned `graph`, which is destroyed once.
        let exec = unsafe {
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            exec
        }?;
        let launches = Mutex::default();
        Ok(Arc::new(CudaGraph { core: Arc::clone(&self.track.core), exec, recorded, launches }))
    }

    fn replay(&self, graph: &dyn Graph) -> Result<(), DeviceError> {
        let graph: &dyn Any = graph;
        let own = graph.downcast_ref::<CudaGraph>().filter(|graph| graph.core.id == self.track.core.id);
        let graph = own.ok_or(DeviceError::Foreign("the graph"))?;
        if lock(&self.recording).is_some() {
            return Err(DeviceError::Recording("a graph inside a graph"));
        }
        // SAFETY: graph and stream exist. The memory stays allocated until the stream has passed
        // the graph.
        let call = || unsafe { result::graph::launch(graph.exec, self.track.raw) }.map_err(DeviceError::from);
        let _alone = lock(&graph.launches);
        self.submit(&graph.recorded.memories.iter().collect::<Vec<_>>(), &call)
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        // Without the lock of `recording`: a call that the driver keeps has it.
        let submitted = {
            let progress = lock(&self.track.progress);
            if progress.is_recording {
                return Err(DeviceError::Recording("a wait"));
            }
            progress.submitted
        };
        let name = || format!("stream {}", self.track.name);
        poll(&name, deadline, &|| self.track.advance(submitted))?;
        self.track.core.reap();
        Ok(())
    }
}

struct CudaEvent {
    track: Arc<Track>,
    raw: sys::CUevent,
    /// Number of operations of the stream before the event.
    operations: u64,
}

// SAFETY: the handle is one of the driver, whose functions may be called from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as for `Send`. The event is recorded once, before it is shared.
unsafe impl Sync for CudaEvent {}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event of {:?}", self.track)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.track.core.bind().is_ok() {
            // SAFETY: this is the only owner. The driver permits this before the event is done.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

fn own_event(event: &dyn Event, device: u64) -> Result<&CudaEvent, DeviceError> {
    let event: &dyn Any = event;
    let own = event.downcast_ref::<CudaEvent>().filter(|event| event.track.core.id == device);
    own.ok_or(DeviceError::Foreign("the event"))
}

/// `cuEventElapsedTime`. The bindings know only its second version, which drivers before 12.8 do
/// not have.
fn elapsed_time() -> Result<ElapsedTime, DeviceError> {
    static FUNCTION: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    let find = || {
        // SAFETY: the driver is loaded already, and the CUDA Driver API defines the type of the
        // function. The process never unloads the driver.
        unsafe {
            let library = libloading::Library::new("libcuda.so.1").ok()?;
            let function = *library.get::<ElapsedTime>(b"cuEventElapsedTime\0").ok()?;
            std::mem::forget(library);
            Some(function)
        }
    };
    FUNCTION.get_or_init(find).ok_or_else(|| DeviceError::Driver("no function cuEventElapsedTime".to_string()))
}

impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        self.track.core.bind()?;
        // SAFETY: the event exists.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => {
                // The host may then access the memory of these operations.
                self.track.note_end(self.operations);
                Ok(true)
            }
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        poll(&|| format!("an event of stream {}", self.track.name), deadline, &|| self.is_done())
    }

    fn since(&self, earlier: &dyn Event) -> Result<Duration, DeviceError> {
        let earlier = own_event(earlier, self.track.core.id)?;
        let elapsed = elapsed_time()?;
        self.track.core.bind()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: both events exist and measure time.
        unsafe { elapsed(&raw mut milliseconds, earlier.raw, self.raw) }.result()?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

struct CudaGraph {
    core: Arc<Core>,
    exec: sys::CUgraphExec,
    recorded: Recording,
    /// Serialises launches: the driver does not promise that two threads may launch one graph.
    launches: Mutex<()>,
}

// SAFETY: the handle is one of the driver, whose functions may be called from any thread.
unsafe impl Send for CudaGraph {}
// SAFETY: as for `Send`. The graph is not changed after construction, and a lock serialises its
// launches.
unsafe impl Sync for CudaGraph {}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph of {} operations", self.recorded.operations)
    }
}

impl Graph for CudaGraph {
    fn operations(&self) -> usize {
        self.recorded.operations
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.core.bind().is_ok() {
            // SAFETY: this is the only owner. A graph in flight is freed after its end.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
    }
}
