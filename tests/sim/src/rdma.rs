//! Simulated RDMA devices. They replace libibverbs, so `larder-rdma`, nodes and clients run
//! unchanged above them.
//!
//! A device executes the work requests of a queue pair in order, after any delay, and one piece at
//! a time. The peer, its memory windows and local memory may change between two pieces. Faults, by
//! seed:
//! - A verbs call fails.
//! - A request takes seconds, or moves its bytes and never completes.
//! - Each queue pair moves a limited number of bytes per second.
//! - A queue pair fails with a completion error or an asynchronous event, after some of the bytes
//!   have moved.
//! - A failed queue pair keeps its requests until it is destroyed, and still moves bytes of them.
//! - Corruption: bits flip in transit, and truncated transfers complete successfully.
//!
//! Invariants, which are the guarantees of the verbs manual and the only ones that Larder may rely
//! on:
//! - A device accesses registered local memory only.
//! - It accesses peer memory only with a live key that is valid for that range, access and queue
//!   pair.
//! - It accesses nothing of a request after its completion, or after its queue pair was destroyed.

mod requests;
mod verbs;

use crate::faults::Profile;
use crate::random::{RandomSource, Stream};
use crate::world::World;
use ibverbs_sys::ibv_access_flags as Access;
use ibverbs_sys::{ibv_qp_state, ibv_wc};
use larder_runtime::lock::Mutex;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, Default)]
pub struct RdmaFaults {
    pub refuse: u32,
    pub late: u32,
    pub lost: u32,
    pub fail: u32,
    /// Requests at which the queue pair fails with an asynchronous event.
    pub event: u32,
    /// Failed queue pairs that keep their requests until they are destroyed.
    pub hang: u32,
    pub flip: u32,
    /// Transfers that complete without their last piece.
    pub short: u32,
    pub latency_ms_max: u64,
    /// Rate of each queue pair. 0: no limit.
    pub bytes_per_second: u64,
}

impl RdmaFaults {
    pub fn draw(profile: Profile, random: &mut RandomSource) -> RdmaFaults {
        let mut faults = RdmaFaults { latency_ms_max: [0, 0, 1, 3][random.below(4) as usize], ..RdmaFaults::default() };
        let mut rate = |most: u32| [0, most / 20, most / 4, most][random.below(4) as usize];
        if profile != Profile::Calm {
            faults.refuse = rate(50_000);
            faults.late = rate(50_000);
            faults.lost = rate(30_000);
            faults.fail = rate(50_000);
            faults.event = rate(30_000);
            faults.hang = rate(1_000_000);
        }
        if profile.has_silent_faults() {
            faults.flip = rate(30_000);
            faults.short = rate(60_000);
        }
        faults
    }

    pub fn stop(&mut self) {
        *self = RdmaFaults { latency_ms_max: self.latency_ms_max, ..RdmaFaults::default() };
    }
}

/// Support of a device for memory windows of type 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryWindows {
    None,
    Exact,
    /// A window exposes the whole registration around it, as soft-RoCE in the Linux kernel does.
    WholeRegistration,
}

#[derive(Debug, Clone)]
pub struct DeviceSpec {
    pub name: String,
    pub address: [u8; 4],
    pub windows: MemoryWindows,
}

thread_local! {
    static FABRIC: RefCell<Option<Fabric>> = const { RefCell::new(None) };
}

fn with_fabric<T>(work: impl FnOnce(&mut Fabric) -> T) -> Option<T> {
    FABRIC.with_borrow_mut(|fabric| fabric.as_mut().map(work))
}

/// Installs the devices of a seed on this thread until it is dropped. Drop it after the runtime,
/// and thus after every user of a device. The drop reports leaked objects.
pub struct FabricGuard;

impl FabricGuard {
    /// Installs these devices. With `is_calm`, use of a revoked key is a violation, because no
    /// fault can explain it.
    pub fn install(
        world: &Arc<World>,
        faults: Arc<Mutex<RdmaFaults>>,
        is_calm: bool,
        specs: &[DeviceSpec],
    ) -> FabricGuard {
        verbs::install();
        let fabric = Fabric::new(world.clone(), faults, is_calm, specs);
        FABRIC.with_borrow_mut(|place| *place = Some(fabric));
        FabricGuard
    }
}

impl Drop for FabricGuard {
    fn drop(&mut self) {
        let Some(fabric) = FABRIC.with_borrow_mut(Option::take) else { return };
        let left = fabric.leaked_objects();
        if !left.is_empty() {
            fabric.world.violate(format!("RDMA objects leaked at the end of the seed: {left}"));
        }
    }
}

/// Suspends RDMA faults until it is dropped. Opening a device runs under it: a process that fails
/// to open its devices does not try again.
pub struct FaultPause(());

impl FaultPause {
    pub fn start() -> FaultPause {
        with_fabric(|fabric| fabric.fault_pauses += 1);
        FaultPause(())
    }
}

impl Drop for FaultPause {
    fn drop(&mut self) {
        with_fabric(|fabric| fabric.fault_pauses -= 1);
    }
}

/// Returns `true` if these offsets belong to an allocation, and `None` if the memory itself is
/// gone.
type OwnerCheck = Box<dyn Fn(&Range<usize>) -> Option<bool>>;

/// Registers memory with an allocator. A device may access allocated ranges of it only: any other
/// access is a violation.
pub fn track_owner(start: NonNull<u8>, len: usize, is_taken: impl Fn(&Range<usize>) -> Option<bool> + 'static) {
    let start = start.as_ptr() as u64;
    with_fabric(|fabric| fabric.tracked.push((start..start + len as u64, Box::new(is_taken))));
}

/// Heap object whose address callers hold, as the verbs API requires. The address stays valid until
/// the drop.
struct HeapObject<T>(NonNull<T>);

impl<T> HeapObject<T> {
    fn new(value: T) -> HeapObject<T> {
        HeapObject(NonNull::from(Box::leak(Box::new(value))))
    }

    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for HeapObject<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `Box::leak`. Its users have destroyed the object through
        // the API, or are gone.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// File descriptor that is readable while an event is unobserved.
struct ReadinessFd {
    here: UnixStream,
    there: UnixStream,
}

impl ReadinessFd {
    fn new() -> std::io::Result<ReadinessFd> {
        let (here, there) = UnixStream::pair()?;
        there.set_nonblocking(true)?;
        Ok(ReadinessFd { here, there })
    }

    fn fd(&self) -> RawFd {
        self.there.as_raw_fd()
    }

    fn signal(&mut self) {
        let _ = self.here.write_all(&[1]);
    }

    fn clear_one(&mut self) {
        let _ = self.there.read(&mut [0]);
    }
}

struct Device {
    name: CString,
    gid: [u8; 16],
    windows: MemoryWindows,
    raw: HeapObject<ibverbs_sys::ibv_device>,
}

struct Context {
    device: usize,
    events: VecDeque<(u32, usize)>,
    readiness: ReadinessFd,
    raw: HeapObject<ibverbs_sys::ibv_context>,
}

struct ProtectionDomain {
    context: usize,
    raw: HeapObject<ibverbs_sys::ibv_pd>,
}

#[derive(Clone, Copy)]
struct AccessRange {
    start: u64,
    len: u64,
    access: u32,
}

impl AccessRange {
    fn allows(&self, start: u64, len: u64, access: Access) -> bool {
        let offset = start.checked_sub(self.start);
        let inside = offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len);
        inside && self.access & access.0 == access.0
    }
}

struct Registration {
    range: AccessRange,
    context: usize,
    raw: HeapObject<ibverbs_sys::ibv_mr>,
}

#[derive(Clone, Copy)]
struct Binding {
    key: u32,
    range: AccessRange,
    /// Number of the only queue pair that may use it.
    pair: u32,
    registration: u32,
}

struct MemoryWindow {
    binding: Option<Binding>,
    raw: HeapObject<ibverbs_sys::ibv_mw>,
}

struct CompletionChannel {
    events: VecDeque<usize>,
    readiness: ReadinessFd,
    raw: HeapObject<ibverbs_sys::ibv_comp_channel>,
}

struct CompletionQueue {
    channel: usize,
    entries: usize,
    completions: VecDeque<ibv_wc>,
    armed: bool,
    raw: HeapObject<ibverbs_sys::ibv_cq>,
}

#[derive(Clone, Copy)]
struct Transfer {
    is_read: bool,
    local: (u64, u32, u32),
    remote: (u64, u32),
    /// Registration of the peer that holds the remote bytes when the request is posted. Addresses
    /// do not identify it: the allocator may give them away again, and differs between runs.
    source: Option<u32>,
}

#[derive(Clone, Copy)]
enum WorkRequest {
    Transfer(Transfer),
    Bind { window: u32, key: u32, registration: u32, range: AccessRange },
    Invalidate { key: u32 },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestEnd {
    Success,
    Error(u32),
    AsyncEvent,
    Never,
}

struct RequestPlan {
    due: Instant,
    pieces: VecDeque<(u32, u32)>,
    end: RequestEnd,
}

struct PostedRequest {
    id: u64,
    work: WorkRequest,
    plan: Option<RequestPlan>,
}

struct QueuePair {
    state: u32,
    requests_max: usize,
    peer: Option<u32>,
    requests: VecDeque<PostedRequest>,
    hangs: bool,
    queue: usize,
    context: usize,
    wake: Arc<Notify>,
    raw: HeapObject<ibverbs_sys::ibv_qp>,
}

/// All devices of a seed, and the objects created on them. Each thread has its own, because no
/// argument of a verbs function could name it.
struct Fabric {
    world: Arc<World>,
    faults: Arc<Mutex<RdmaFaults>>,
    is_calm: bool,
    random: RandomSource,
    fault_pauses: usize,
    tracked: Vec<(Range<u64>, OwnerCheck)>,
    next: u32,
    devices: Vec<Device>,
    contexts: BTreeMap<usize, Context>,
    domains: BTreeMap<usize, ProtectionDomain>,
    registrations: BTreeMap<u32, Registration>,
    windows: BTreeMap<u32, MemoryWindow>,
    channels: BTreeMap<usize, CompletionChannel>,
    queues: BTreeMap<usize, CompletionQueue>,
    pairs: BTreeMap<u32, QueuePair>,
}

impl Fabric {
    fn new(world: Arc<World>, faults: Arc<Mutex<RdmaFaults>>, is_calm: bool, specs: &[DeviceSpec]) -> Fabric {
        let device = |spec: &DeviceSpec| {
            let mut gid = [0; 16];
            gid[10..12].copy_from_slice(&[0xff; 2]);
            gid[12..].copy_from_slice(&spec.address);
            let name = CString::new(spec.name.as_str()).unwrap_or_default();
            Device { name, gid, windows: spec.windows, raw: HeapObject::new(ibverbs_sys::ibv_device::default()) }
        };
        Fabric {
            random: RandomSource::new(world.seed, Stream::Rdma),
            world,
            faults,
            is_calm,
            fault_pauses: 0,
            tracked: Vec::new(),
            next: 0,
            devices: specs.iter().map(device).collect(),
            contexts: BTreeMap::new(),
            domains: BTreeMap::new(),
            registrations: BTreeMap::new(),
            windows: BTreeMap::new(),
            channels: BTreeMap::new(),
            queues: BTreeMap::new(),
            pairs: BTreeMap::new(),
        }
    }

    fn leaked_objects(&self) -> String {
        let counts = [
            ("contexts", self.contexts.len()),
            ("domains", self.domains.len()),
            ("registrations", self.registrations.len()),
            ("windows", self.windows.len()),
            ("channels", self.channels.len()),
            ("queues", self.queues.len()),
            ("pairs", self.pairs.len()),
        ];
        let left: Vec<String> =
            counts.into_iter().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{count} {kind}")).collect();
        left.join(", ")
    }

    fn next_number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn faults(&self) -> RdmaFaults {
        let mut faults = *self.faults.lock();
        if self.fault_pauses > 0 {
            faults.stop();
        }
        faults
    }

    fn injects_refusal(&mut self, call: &'static str) -> bool {
        let refused = self.random.chance(self.faults().refuse);
        if refused {
            self.world.count("rdma calls refused", 1);
            self.world.event(call, [0; 3]);
        }
        refused
    }

    fn device_of(&self, context: usize) -> Option<&Device> {
        self.devices.get(self.contexts.get(&context)?.device)
    }

    fn violation(&self, problem: &str) {
        self.world.violate(format!("RDMA: {problem}"));
    }

    fn announce(&mut self, context: usize, kind: u32, object: usize) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push_back((kind, object));
            context.readiness.signal();
        }
    }

    fn complete(&mut self, number: u32, id: u64, status: u32) {
        self.world.event("rdma completion", [number.into(), id, status.into()]);
        let Some(pair) = self.pairs.get(&number) else { return };
        let at = pair.queue;
        let Some(queue) = self.queues.get_mut(&at) else { return };
        let is_full = queue.completions.len() >= queue.entries;
        queue.completions.push_back(ibv_wc { wr_id: id, status, qp_num: number, ..ibv_wc::default() });
        if std::mem::take(&mut queue.armed)
            && let Some(channel) = self.channels.get_mut(&queue.channel)
        {
            channel.events.push_back(at);
            channel.readiness.signal();
        }
        if is_full {
            self.violation("a completion queue overflowed");
        }
    }

    /// Moves a queue pair to the error state. Its requests are flushed, or kept until it is
    /// destroyed.
    fn fail(&mut self, number: u32) {
        let hangs = self.random.chance(self.faults().hang);
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        if pair.state != ibv_qp_state::IBV_QPS_ERR {
            (pair.state, pair.hangs) = (ibv_qp_state::IBV_QPS_ERR, hangs);
            pair.wake.notify_one();
            self.world.event("rdma queue pair in error", [number.into(), hangs.into(), 0]);
        }
    }

    fn is_owned(&self, start: u64, len: u64) -> bool {
        let around = |(memory, _): &&(Range<u64>, OwnerCheck)| memory.start <= start && start + len <= memory.end;
        // Earlier memory at the same address may be gone, so the latest registration decides.
        let mut taken = self.tracked.iter().filter(around).filter_map(|(memory, is_taken)| {
            let from = (start - memory.start) as usize;
            is_taken(&(from..from + len as usize))
        });
        taken.next_back().unwrap_or(true)
    }

    /// Checks that all memory a device may still access, locally or for a peer, has an owner. Runs
    /// at every step of a queue pair, so memory that returns too early is found.
    fn check_owners(&self) {
        let posted = self.pairs.values().flat_map(|pair| &pair.requests);
        let local = posted.filter_map(|request| match request.work {
            WorkRequest::Transfer(transfer) => Some((transfer.local.0, u64::from(transfer.local.1))),
            WorkRequest::Bind { .. } | WorkRequest::Invalidate { .. } => None,
        });
        let remote = (Access::IBV_ACCESS_REMOTE_READ | Access::IBV_ACCESS_REMOTE_WRITE).0;
        let registered = self.registrations.values().map(|registration| registration.range);
        let binding = self.windows.values().filter_map(|window| Some(window.binding?.range));
        let open = registered.chain(binding).filter(|range| range.access & remote != 0);
        let mut all = local.chain(open.map(|range| (range.start, range.len)));
        if all.any(|(start, len)| !self.is_owned(start, len)) {
            self.violation("a device may still access memory without an owner");
        }
    }
}
