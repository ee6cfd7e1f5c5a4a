//! Simulated RDMA devices, which stand in for libibverbs: everything above it (`larder-rdma`, nodes and clients) runs as it is.
//!
//! A device does what is posted on its queue pairs, in order, after any delay and piece by piece: between two pieces the peer, its
//! windows and this side's memory may be others. What goes wrong, as a seed says:
//! - calls are refused;
//! - a request takes seconds, longer than anybody waits, or is never answered though its bytes move;
//! - a queue pair fails, by a completion or by an event, with some of the bytes moved;
//! - a failed queue pair does not give its requests back until it is destroyed, and moves bytes of them until then;
//! - it lies: bits flip on the way, and transfers end well that lack their end.
//!
//! Always true: a device touches registered memory only, and the peer's only with a key that is alive for that range, that way and
//! that connection; nothing of a request after its completion, or after its queue pair was destroyed. These are the manual's
//! promises, and all that may be relied on.

mod verbs;

use crate::dice::{Dice, Stream};
use crate::faults::Profile;
use crate::world::World;
use ibverbs_sys::ibv_access_flags as Access;
use ibverbs_sys::{ibv_event_type, ibv_qp_state, ibv_wc, ibv_wc_status};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// How long a device asks a peer that does not answer.
const RETRIES: Duration = Duration::from_secs(2);
/// Most pieces of a transfer.
const PIECES_MAX: u64 = 4;
/// Times that others may run before an announcement counts as not heard.
const HEARD_MAX: usize = 1000;

/// How often requests go wrong, per million.
#[derive(Debug, Clone, Copy, Default)]
pub struct RdmaFaults {
    /// Calls: refused.
    pub refuse: u32,
    /// Requests: take seconds more.
    pub late: u32,
    /// Requests: never answered.
    pub lost: u32,
    /// Requests: fail.
    pub fail: u32,
    /// Requests: the queue pair fails, and an event says so.
    pub event: u32,
    /// Queue pairs that failed: do not give their requests back.
    pub hang: u32,
    /// Pieces: a bit flips.
    pub flip: u32,
    /// Transfers: end well without their end.
    pub short: u32,
    /// Most milliseconds of anything.
    pub latency_ms_max: u64,
}

impl RdmaFaults {
    /// The rates of a seed.
    pub fn draw(profile: Profile, dice: &mut Dice) -> RdmaFaults {
        let mut faults = RdmaFaults { latency_ms_max: [0, 0, 1, 3][dice.below(4) as usize], ..RdmaFaults::default() };
        let mut rate = |most: u32| [0, most / 20, most / 4, most][dice.below(4) as usize];
        if profile != Profile::Calm {
            faults.refuse = rate(50_000);
            faults.late = rate(50_000);
            faults.lost = rate(30_000);
            faults.fail = rate(50_000);
            faults.event = rate(30_000);
            faults.hang = rate(1_000_000);
        }
        if profile.lies() {
            faults.flip = rate(30_000);
            faults.short = rate(30_000);
        }
        faults
    }

    /// None from now on.
    pub fn calm(&mut self) {
        *self = RdmaFaults { latency_ms_max: self.latency_ms_max, ..RdmaFaults::default() };
    }
}

/// What a device's memory windows of type 2 are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// It has none.
    None,
    /// They open their range.
    Narrow,
    /// They open all of the registration around it, as the kernel's soft-RoCE does.
    Broad,
}

/// A device that there is.
#[derive(Debug, Clone)]
pub struct DeviceSpec {
    /// Its name.
    pub name: String,
    /// IPv4 address of its port.
    pub address: [u8; 4],
    /// Its memory windows.
    pub windows: Windows,
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

fn machine<T>(work: impl FnOnce(&mut Machine) -> T) -> Option<T> {
    MACHINE.with_borrow_mut(|machine| machine.as_mut().map(work))
}

/// The devices of a seed, on this thread, until this is dropped: after the runtime, with which goes what uses them.
pub struct Devices;

impl Devices {
    /// These devices. If nothing else fails either, nobody uses a key that is dead.
    pub fn begin(world: &Arc<World>, faults: Arc<Mutex<RdmaFaults>>, is_calm: bool, specs: &[DeviceSpec]) -> Devices {
        verbs::stand_in();
        let machine = Machine::new(world.clone(), faults, is_calm, specs);
        MACHINE.with_borrow_mut(|place| *place = Some(machine));
        Devices
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        let Some(machine) = MACHINE.with_borrow_mut(Option::take) else { return };
        let left = machine.left_over();
        if !left.is_empty() {
            machine.world.violate(format!("at the end, RDMA objects are left over: {left}"));
        }
    }
}

/// No faults of RDMA until this is dropped: devices are opened in it, as who has none does not try again.
pub struct Shelter(());

impl Shelter {
    /// From now on.
    pub fn begin() -> Shelter {
        machine(|machine| machine.shelters += 1);
        Shelter(())
    }
}

impl Drop for Shelter {
    fn drop(&mut self) {
        machine(|machine| machine.shelters -= 1);
    }
}

/// Whether bytes are taken, of which these are offsets; `None` if the memory is gone.
type IsTaken = Box<dyn Fn(&Range<usize>) -> Option<bool>>;

/// Memory that owners take and give back: what a device may touch of it must be taken.
pub fn watch(start: NonNull<u8>, len: usize, is_taken: impl Fn(&Range<usize>) -> Option<bool> + 'static) {
    let start = start.as_ptr() as u64;
    machine(|machine| machine.watched.push((start..start + len as u64, Box::new(is_taken))));
}

/// A structure that callers have the address of.
struct Raw<T>(NonNull<T>);

impl<T> Raw<T> {
    fn new(value: T) -> Raw<T> {
        Raw(NonNull::from(Box::leak(Box::new(value))))
    }

    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for Raw<T> {
    fn drop(&mut self) {
        // SAFETY: it was a box, and whoever had its address has said that it does not need it any more, or is gone.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A descriptor that is readable while something was not heard yet.
struct Bell {
    here: UnixStream,
    there: UnixStream,
}

impl Bell {
    fn new() -> std::io::Result<Bell> {
        let (here, there) = UnixStream::pair()?;
        there.set_nonblocking(true)?;
        Ok(Bell { here, there })
    }

    fn fd(&self) -> RawFd {
        self.there.as_raw_fd()
    }

    fn ring(&mut self) {
        let _ = self.here.write_all(&[1]);
    }

    fn hush(&mut self) {
        let _ = self.there.read(&mut [0]);
    }
}

struct Device {
    name: CString,
    gid: [u8; 16],
    windows: Windows,
    raw: Raw<ibverbs_sys::ibv_device>,
}

struct Context {
    device: usize,
    events: VecDeque<(u32, usize)>,
    bell: Bell,
    raw: Raw<ibverbs_sys::ibv_context>,
}

struct Domain {
    context: usize,
    raw: Raw<ibverbs_sys::ibv_pd>,
}

/// Bytes that a key is good for.
#[derive(Clone, Copy)]
struct Reach {
    start: u64,
    len: u64,
    access: u32,
}

impl Reach {
    fn has(&self, start: u64, len: u64, access: Access) -> bool {
        let offset = start.checked_sub(self.start);
        let inside = offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len);
        inside && self.access & access.0 == access.0
    }
}

struct Registration {
    reach: Reach,
    context: usize,
    raw: Raw<ibverbs_sys::ibv_mr>,
}

/// What a memory window is bound to.
#[derive(Clone, Copy)]
struct Bound {
    key: u32,
    reach: Reach,
    /// Number of the queue pair that it is good for.
    pair: u32,
    registration: u32,
}

struct MemoryWindow {
    bound: Option<Bound>,
    raw: Raw<ibverbs_sys::ibv_mw>,
}

struct Channel {
    /// Queues of which a completion was announced.
    events: VecDeque<usize>,
    bell: Bell,
    raw: Raw<ibverbs_sys::ibv_comp_channel>,
}

struct Queue {
    channel: usize,
    entries: usize,
    completions: VecDeque<ibv_wc>,
    armed: bool,
    raw: Raw<ibverbs_sys::ibv_cq>,
}

#[derive(Clone, Copy)]
struct Transfer {
    is_read: bool,
    local: (u64, u32, u32),
    remote: (u64, u32),
}

#[derive(Clone, Copy)]
enum What {
    Transfer(Transfer),
    Bind { window: u32, key: u32, registration: u32, reach: Reach },
    Invalidate { key: u32 },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Well,
    Fails(u32),
    Event,
    Never,
}

/// How a request goes.
struct Plan {
    due: Instant,
    /// What is still to be moved: offsets.
    pieces: VecDeque<(u32, u32)>,
    end: End,
}

struct Request {
    id: u64,
    what: What,
    plan: Option<Plan>,
}

struct Pair {
    state: u32,
    requests_max: usize,
    peer: Option<u32>,
    requests: VecDeque<Request>,
    /// Whether it keeps what it has until it is destroyed, once it failed.
    hangs: bool,
    queue: usize,
    context: usize,
    wake: Arc<Notify>,
    raw: Raw<ibverbs_sys::ibv_qp>,
}

/// What a queue pair does next.
enum Step {
    /// Nothing, until it is woken.
    Idle,
    /// Nothing before this, unless it is woken.
    Until(Instant),
    /// It goes on when what it told was heard.
    Told,
    /// It goes on.
    On,
}

/// All devices of a seed, and what was made of them.
struct Machine {
    world: Arc<World>,
    faults: Arc<Mutex<RdmaFaults>>,
    is_calm: bool,
    dice: Dice,
    shelters: usize,
    watched: Vec<(Range<u64>, IsTaken)>,
    next: u32,
    devices: Vec<Device>,
    contexts: BTreeMap<usize, Context>,
    domains: BTreeMap<usize, Domain>,
    /// By their key without its last byte, as windows are.
    registrations: BTreeMap<u32, Registration>,
    windows: BTreeMap<u32, MemoryWindow>,
    channels: BTreeMap<usize, Channel>,
    queues: BTreeMap<usize, Queue>,
    /// By their number.
    pairs: BTreeMap<u32, Pair>,
}

impl Machine {
    fn new(world: Arc<World>, faults: Arc<Mutex<RdmaFaults>>, is_calm: bool, specs: &[DeviceSpec]) -> Machine {
        let device = |spec: &DeviceSpec| {
            let mut gid = [0; 16];
            gid[10..12].copy_from_slice(&[0xff; 2]);
            gid[12..].copy_from_slice(&spec.address);
            let name = CString::new(spec.name.as_str()).unwrap_or_default();
            Device { name, gid, windows: spec.windows, raw: Raw::new(ibverbs_sys::ibv_device::default()) }
        };
        Machine {
            dice: Dice::new(world.seed, Stream::Rdma),
            world,
            faults,
            is_calm,
            shelters: 0,
            watched: Vec::new(),
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

    fn left_over(&self) -> String {
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
            counts.into_iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}")).collect();
        left.join(", ")
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn faults(&self) -> RdmaFaults {
        let mut faults = *self.faults.lock();
        if self.shelters > 0 {
            faults.calm();
        }
        faults
    }

    /// Whether a call is refused.
    fn refuses(&mut self, call: &'static str) -> bool {
        let refused = self.dice.chance(self.faults().refuse);
        if refused {
            self.world.count("rdma calls refused", 1);
            self.world.event(call, [0; 3]);
        }
        refused
    }

    fn device_of(&self, context: usize) -> Option<&Device> {
        self.devices.get(self.contexts.get(&context)?.device)
    }

    /// Something that the manual forbids was done.
    fn misused(&self, what: &str) {
        self.world.violate(format!("RDMA: {what}"));
    }

    fn announce(&mut self, context: usize, kind: u32, object: usize) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push_back((kind, object));
            context.bell.ring();
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
            channel.bell.ring();
        }
        if is_full {
            self.misused("completions come for which their queue has no room");
        }
    }

    /// A queue pair fails: its requests come back, or they do not.
    fn fail(&mut self, number: u32) {
        let hangs = self.dice.chance(self.faults().hang);
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        if pair.state != ibv_qp_state::IBV_QPS_ERR {
            (pair.state, pair.hangs) = (ibv_qp_state::IBV_QPS_ERR, hangs);
            pair.wake.notify_one();
            self.world.event("rdma pair ends", [number.into(), hangs.into(), 0]);
        }
    }

    /// Whether memory that is watched is taken.
    fn is_owned(&self, start: u64, len: u64) -> bool {
        let around = |(memory, _): &&(Range<u64>, IsTaken)| memory.start <= start && start + len <= memory.end;
        // What was mapped there earlier is gone.
        let mut taken = self.watched.iter().filter(around).filter_map(|(memory, is_taken)| {
            let from = (start - memory.start) as usize;
            is_taken(&(from..from + len as usize))
        });
        taken.next_back().unwrap_or(true)
    }

    /// What a device may still touch, for us or for a peer, is somebody's.
    fn check_owners(&self) {
        let posted = self.pairs.values().flat_map(|pair| &pair.requests);
        let local = posted.filter_map(|request| match request.what {
            What::Transfer(transfer) => Some((transfer.local.0, u64::from(transfer.local.1))),
            What::Bind { .. } | What::Invalidate { .. } => None,
        });
        let remote = (Access::IBV_ACCESS_REMOTE_READ | Access::IBV_ACCESS_REMOTE_WRITE).0;
        let registered = self.registrations.values().map(|registration| registration.reach);
        let bound = self.windows.values().filter_map(|window| Some(window.bound?.reach));
        let open = registered.chain(bound).filter(|reach| reach.access & remote != 0);
        let mut all = local.chain(open.map(|reach| (reach.start, reach.len)));
        if all.any(|(start, len)| !self.is_owned(start, len)) {
            self.misused("a device may touch memory that has no owner any more");
        }
    }

    /// What a queue pair does next; `None` if it is gone.
    fn step(&mut self, number: u32) -> Option<Step> {
        self.check_owners();
        let pair = self.pairs.get(&number)?;
        match pair.state {
            ibv_qp_state::IBV_QPS_ERR => return Some(self.flush(number)),
            ibv_qp_state::IBV_QPS_RTS => {}
            _ => return Some(Step::Idle),
        }
        let Some((what, due, end)) = self.planned(number, 0) else { return Some(Step::Idle) };
        if due > Instant::now() {
            return Some(Step::Until(due));
        }
        if let (What::Transfer(transfer), Some(piece)) = (what, self.next_piece(number, 0)) {
            let moved = self.move_piece(number, transfer, piece, true);
            let latency = Duration::from_millis(self.dice.between(0, self.faults().latency_ms_max));
            let plan = self.pairs.get_mut(&number)?.requests.front_mut()?.plan.as_mut()?;
            plan.due += latency;
            if let Err(status) = moved {
                plan.pieces.clear();
                plan.end = End::Fails(status);
                if status == ibv_wc_status::IBV_WC_RETRY_EXC_ERR {
                    plan.due += RETRIES;
                }
            }
            return Some(Step::On);
        }
        if end == End::Never {
            return Some(Step::Idle);
        }
        let request = self.pairs.get_mut(&number)?.requests.pop_front()?;
        match end {
            End::Well => {
                let status = self.perform(number, what);
                self.complete(number, request.id, status);
                if status != ibv_wc_status::IBV_WC_SUCCESS {
                    self.fail(number);
                }
            }
            End::Fails(status) => {
                self.world.fault("rdma fails", [number.into(), status.into(), 0]);
                self.complete(number, request.id, status);
                self.fail(number);
            }
            End::Event | End::Never => {
                self.world.fault("rdma pair fails", [number.into(), 0, 0]);
                self.pairs.get_mut(&number)?.requests.push_front(request);
                let (context, object) =
                    self.pairs.get(&number).map(|pair| (pair.context, pair.raw.as_ptr() as usize))?;
                self.announce(context, ibv_event_type::IBV_EVENT_QP_FATAL, object);
                self.fail(number);
            }
        }
        Some(Step::Told)
    }

    /// What the request at `at` is, when it goes on, and how it ends.
    fn planned(&mut self, number: u32, at: usize) -> Option<(What, Instant, End)> {
        let request = self.pairs.get(&number)?.requests.get(at)?;
        let (what, fresh) = (request.what, request.plan.is_none());
        let new = fresh.then(|| self.plan(what));
        let request = self.pairs.get_mut(&number)?.requests.get_mut(at)?;
        let plan = match new {
            Some(plan) => request.plan.insert(plan),
            None => request.plan.as_mut()?,
        };
        Some((what, plan.due, plan.end))
    }

    fn next_piece(&mut self, number: u32, at: usize) -> Option<(u32, u32)> {
        self.pairs.get_mut(&number)?.requests.get_mut(at)?.plan.as_mut()?.pieces.pop_front()
    }

    fn plan(&mut self, what: What) -> Plan {
        let faults = self.faults();
        let dice = &mut self.dice;
        let mut due = Instant::now() + Duration::from_millis(dice.between(0, faults.latency_ms_max));
        let mut pieces = VecDeque::new();
        if let What::Transfer(transfer) = what {
            let len = transfer.local.1;
            let mut cuts: Vec<u32> = (1..dice.between(1, PIECES_MAX)).map(|_| dice.below(len.into()) as u32).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            cuts.dedup();
            pieces = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
            if dice.chance(faults.short) {
                self.world.fault("rdma ends early", [len.into(), 0, 0]);
                pieces.pop_back();
            }
        }
        if dice.chance(faults.late) {
            let seconds = [1, 4, 8, 12][dice.below(4) as usize];
            self.world.fault("rdma late", [seconds, 0, 0]);
            due += Duration::from_secs(seconds);
        }
        let statuses = [
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
            ibv_wc_status::IBV_WC_REM_OP_ERR,
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
            ibv_wc_status::IBV_WC_GENERAL_ERR,
        ];
        let end = match () {
            () if dice.chance(faults.lost) => End::Never,
            () if dice.chance(faults.fail) => End::Fails(statuses[dice.below(4) as usize]),
            () if dice.chance(faults.event) => End::Event,
            () => End::Well,
        };
        if end == End::Never {
            self.world.fault("rdma lost", [0; 3]);
        }
        if end != End::Well && !pieces.is_empty() {
            pieces.truncate(dice.below(pieces.len() as u64 + 1) as usize);
        }
        Plan { due, pieces, end }
    }

    /// What a queue pair that failed does with its requests.
    fn flush(&mut self, number: u32) -> Step {
        let Some(pair) = self.pairs.get_mut(&number) else { return Step::Idle };
        if pair.requests.is_empty() {
            return Step::Idle;
        }
        if !pair.hangs {
            let ids: Vec<u64> = pair.requests.drain(..).map(|request| request.id).collect();
            ids.into_iter().for_each(|id| self.complete(number, id, ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
            return Step::Told;
        }
        // What is on its way comes, however late.
        for at in 0..pair.requests.len() {
            let Some((what, ..)) = self.planned(number, at) else { continue };
            if let (What::Transfer(transfer), Some(piece)) = (what, self.next_piece(number, at)) {
                let moved = self.move_piece(number, transfer, piece, false);
                self.world.event("rdma straggles", [number.into(), at as u64, moved.is_ok().into()]);
                self.world.count("rdma stragglers", moved.is_ok().into());
                return Step::Until(Instant::now() + Duration::from_millis(self.dice.between(0, 300)));
            }
        }
        Step::Idle
    }

    /// Moves bytes `from..to` of a transfer, if both sides allow it. Bytes that the peer had sent when the pair failed are read
    /// without asking it again.
    fn move_piece(
        &mut self,
        number: u32,
        transfer: Transfer,
        (from, to): (u32, u32),
        is_alive: bool,
    ) -> Result<(), u32> {
        let Transfer { is_read, local: (address, len, key), remote: (remote, remote_key) } = transfer;
        let here = if is_read { Access::IBV_ACCESS_LOCAL_WRITE } else { Access(0) };
        let known = self.registrations.get(&(key >> 8)).is_some_and(|known| known.reach.has(address, len.into(), here));
        if !known {
            self.misused("a request is about memory of this side that is not registered");
            return Err(ibv_wc_status::IBV_WC_LOC_PROT_ERR);
        }
        let peer = self.pairs.get(&number).and_then(|pair| pair.peer);
        let there = peer.and_then(|peer| self.pairs.get(&peer)).filter(|there| {
            let hears = [ibv_qp_state::IBV_QPS_RTR, ibv_qp_state::IBV_QPS_RTS].contains(&there.state);
            hears && there.peer == Some(number)
        });
        let wanted = if is_read { Access::IBV_ACCESS_REMOTE_READ } else { Access::IBV_ACCESS_REMOTE_WRITE };
        let (start, bytes) = (remote.wrapping_add(from.into()), u64::from(to - from));
        match there {
            Some(there) => {
                let context = there.context;
                let peer = peer.unwrap_or_default();
                if !self.opens(peer, context, remote_key, start, bytes, wanted) {
                    if is_alive {
                        let what = if self.shelters > 0 { "rdma probe denied" } else { "rdma access denied" };
                        self.world.fault(what, [number.into(), bytes, is_read.into()]);
                        if self.is_calm && self.shelters == 0 {
                            self.misused("a key is used that is dead, and nothing had failed");
                        }
                        let object = self.pairs.get(&peer).map_or(0, |pair| pair.raw.as_ptr() as usize);
                        self.announce(context, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR, object);
                        self.fail(peer);
                    }
                    return Err(ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
                }
            }
            None => {
                let mapped = |known: &Registration| known.reach.has(start, bytes, Access(0));
                if is_alive || !is_read || !self.registrations.values().any(mapped) {
                    return Err(ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
                }
            }
        }
        let local = address + u64::from(from);
        let (source, target) = if is_read { (start, local) } else { (local, start) };
        // SAFETY: both lie in registered memory, which is mapped until the registration ends; who may look at it meanwhile is what
        // the simulation is about. There is one thread.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes as usize) };
        self.world.count(if is_read { "rdma bytes read" } else { "rdma bytes written" }, bytes);
        if self.dice.chance(self.faults().flip) {
            let at = target + self.dice.below(bytes.max(1));
            self.world.fault("rdma flips a bit", [number.into(), bytes, is_read.into()]);
            // SAFETY: as above, one of these bytes.
            unsafe { *(at as *mut u8) ^= 1 << self.dice.below(8) };
        }
        Ok(())
    }

    /// Whether a key opens these bytes to who speaks to queue pair `pair`.
    fn opens(&self, pair: u32, context: usize, key: u32, start: u64, bytes: u64, wanted: Access) -> bool {
        if let Some(known) = self.registrations.get(&(key >> 8)) {
            return key & 0xff == 0 && known.context == context && known.reach.has(start, bytes, wanted);
        }
        let bound = self.windows.get(&(key >> 8)).and_then(|window| window.bound);
        bound.is_some_and(|bound| bound.key == key && bound.pair == pair && bound.reach.has(start, bytes, wanted))
    }

    /// Does what is no transfer; how it ends.
    fn perform(&mut self, number: u32, what: What) -> u32 {
        match what {
            What::Transfer(transfer) => {
                self.world.count(if transfer.is_read { "rdma reads" } else { "rdma writes" }, 1);
            }
            What::Bind { window, key, registration, mut reach } => {
                let context = self.pairs.get(&number).map_or(0, |pair| pair.context);
                let broad = self.device_of(context).is_some_and(|device| device.windows == Windows::Broad);
                let Some(known) = self.registrations.get(&registration) else {
                    self.misused("a window is bound to memory that is not registered");
                    return ibv_wc_status::IBV_WC_MW_BIND_ERR;
                };
                let allowed = known.reach.has(reach.start, reach.len, Access::IBV_ACCESS_MW_BIND);
                let Some(window) = self.windows.get_mut(&window).filter(|window| allowed && window.bound.is_none())
                else {
                    self.misused("a window is bound to what is not its registration's, or twice");
                    return ibv_wc_status::IBV_WC_MW_BIND_ERR;
                };
                if broad {
                    (reach.start, reach.len) = (known.reach.start, known.reach.len);
                }
                window.bound = Some(Bound { key, reach, pair: number, registration });
                self.world.count("rdma windows", 1);
            }
            What::Invalidate { key } => {
                let window = self.windows.get_mut(&(key >> 8));
                let bound =
                    window.and_then(|window| window.bound.take_if(|bound| bound.key == key && bound.pair == number));
                if bound.is_none() {
                    self.misused("a key is withdrawn that is not alive");
                    return ibv_wc_status::IBV_WC_LOC_QP_OP_ERR;
                }
            }
        }
        ibv_wc_status::IBV_WC_SUCCESS
    }

    /// Whether something was announced that nobody has heard yet.
    fn is_unheard(&self) -> bool {
        self.contexts.values().any(|context| !context.events.is_empty())
            || self.channels.values().any(|channel| !channel.events.is_empty())
    }
}

/// Does what is posted on a queue pair, as long as there is one.
async fn drive(number: u32, wake: Arc<Notify>) {
    loop {
        match machine(|machine| machine.step(number)).flatten() {
            None => return,
            Some(Step::Idle) => wake.notified().await,
            Some(Step::Until(due)) => drop(timeout_at(due, wake.notified()).await),
            Some(Step::Told) => heard().await,
            Some(Step::On) => {}
        }
    }
}

/// Lets others run until they have heard what was announced, or clearly do not listen, as who has given a queue pair up. A clock that
/// stands still would jump over the time in which the runtime looks at descriptors.
async fn heard() {
    for _ in 0..HEARD_MAX {
        if !machine(|machine| machine.is_unheard()).unwrap_or(false) {
            return;
        }
        tokio::task::yield_now().await;
    }
}
