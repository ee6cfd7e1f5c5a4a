//! A device that is not there: requests take virtual time, and go wrong as the seed says.
//!
//! The fault model:
//! - a write takes its bytes from memory, and a read fills it, when the request is done, not when it is asked for: memory
//!   that is used again too early becomes visible as damage;
//! - requests take 0 to some milliseconds each and are done in any order; some take seconds, some ten;
//! - a sync makes durable what was written before it was asked for; other writes may be kept, lost or torn by a loss of
//!   power, in pieces of 512 bytes or 4 KiB, and so may those under way;
//! - what makes, replaces, renames and removes files is durable when it is answered, and whole or not done at all before;
//! - each kind of [`Faults`](crate::faults::Faults) happens at its rate;
//! - a device may refuse everything for a while or for good, or have no room for files for a while;
//! - at a given event (a request taken or done, a file made or removed) power fails, and all devices stop answering.
//!
//! What no store with one copy can help is exempted from the promise that forgotten pages stay forgotten: a tombstone
//! that was damaged, lost or misdirected on its way to the device, on it, or on the way back while the node starts; and a
//! segment whose header was, since its records are all lost with it. Errors that the device owns up to are not exempted.
//!
//! Not in the model: damage of small files, and power that fails for one of two devices alone.
//!
//! Always true: everything happens on the one thread of the life's runtime; a request's memory is with the device until
//! it is answered or [`SimDevice::lose_power`] was called.

mod files;
mod power;
mod serve;

use crate::dice::{Dice, Stream};
use crate::disk::Disk;
use crate::disk::Loss;
use crate::world::World;
use files::FileChange;
use larder_device::{
    Arena, BoxFuture, Completion, Device, DeviceFacts, Done, Lane, Operation, RingGone, Share, SmallFile,
};
use parking_lot::Mutex;
pub use power::Power;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Most requests that the device has taken and not answered.
const TAKEN_MAX: usize = 48;
const STALL_MS: u64 = 10_000;

/// A request under way.
struct Flight {
    segment: u32,
    operation: Operation,
    on_done: Completion,
    /// For a sync: the writes that were done when it was asked for.
    covers: u64,
    _permit: OwnedSemaphorePermit,
}

struct State {
    dice: Dice,
    open: BTreeSet<u32>,
    /// By when they are done, and the order in which they were taken.
    flights: BTreeMap<(u64, u64), Flight>,
    taken: u64,
    files: BTreeMap<u64, FileChange>,
    tasks: Vec<AbortHandle>,
    /// What cannot be read while the node starts, and why not.
    bad_place: Option<(u32, u64, &'static str)>,
    closed: bool,
}

/// The device of one life of a node.
pub struct SimDevice {
    world: Arc<World>,
    /// Which disk of the world it is.
    number: usize,
    power: Arc<Power>,
    arena: Arc<Arena>,
    path: PathBuf,
    state: Mutex<State>,
    permits: Arc<Semaphore>,
    /// Rung when there is something new for the pump.
    bell: Notify,
    /// Rung when a request was answered.
    progress: Notify,
    /// Most bytes of all files.
    capacity_bytes: u64,
    /// The node starts on it: a read that lies may hide tombstones.
    starting: AtomicBool,
    tasks_alive: Arc<AtomicUsize>,
}

impl SimDevice {
    /// Disk `number` of the world in life `life`, as long as there is `power`, and the task that drives it.
    pub fn start(
        world: Arc<World>,
        arena: Arc<Arena>,
        number: usize,
        life: u64,
        power: Arc<Power>,
        capacity_bytes: u64,
    ) -> Arc<SimDevice> {
        let mut dice = Dice::new(world.seed, Stream::Device(life, number as u64));
        let bad_place = serve::bad_place(&world, number, &mut dice);
        let state = State {
            dice,
            bad_place,
            open: BTreeSet::new(),
            flights: BTreeMap::new(),
            taken: 0,
            files: BTreeMap::new(),
            tasks: Vec::new(),
            closed: false,
        };
        let device = Arc::new(SimDevice {
            world,
            number,
            power,
            arena,
            path: PathBuf::from("/simulated"),
            state: Mutex::new(state),
            permits: Arc::new(Semaphore::new(TAKEN_MAX)),
            bell: Notify::new(),
            progress: Notify::new(),
            capacity_bytes,
            starting: AtomicBool::new(true),
            tasks_alive: Arc::default(),
        });
        tokio::spawn(device.clone().pump());
        device
    }

    /// The node has found all that is stored.
    pub fn started(&self) {
        self.starting.store(false, Ordering::Relaxed);
        self.state.lock().bad_place = None;
        self.check_capacity();
    }

    /// Ends when nothing is under way.
    pub async fn idle(&self) {
        loop {
            let progress = self.progress.notified();
            if self.state.lock().flights.is_empty() {
                return;
            }
            progress.await;
        }
    }

    /// Requests under way.
    pub fn requests(&self) -> usize {
        self.state.lock().flights.len()
    }

    /// Tasks of [`Device::spawn`] that have not ended.
    pub fn tasks(&self) -> usize {
        self.tasks_alive.load(Ordering::Relaxed)
    }

    /// The world it was in is gone: what was under way is done in part or not, and what was not synced is lost by `loss`.
    pub fn lose_power(&self, loss: Loss, dice: &mut Dice) {
        self.power.cut();
        let mut state = self.state.lock();
        let (flights, files) = (std::mem::take(&mut state.flights), std::mem::take(&mut state.files));
        drop(state);
        let mut disk = self.disk().lock();
        for flight in flights.values() {
            if let Some((offset, bytes)) = serve::bytes_of(&flight.operation) {
                let kept = [0, 500_000, 1_000_000][dice.below(3) as usize];
                disk.write_some(flight.segment, offset, &bytes, kept, dice);
            }
        }
        for change in files.into_values() {
            if dice.chance(500_000) {
                change.apply(&mut disk);
            }
        }
        disk.lose_power(loss, dice);
        drop(disk);
        drop(flights);
    }

    /// One more event; `false` if the device has stopped answering.
    fn event(&self, what: &'static str, numbers: [u64; 3]) -> bool {
        if !self.power.is_on() {
            return false;
        }
        self.world.event(what, numbers);
        self.power.spend()
    }

    /// When a request that is asked for now will be done.
    fn due_ms(&self, dice: &mut Dice) -> u64 {
        let faults = *self.world.faults.lock();
        let now = self.world.now_ms();
        if dice.chance(faults.stall) {
            self.world.fault("stall", [now, 0, 0]);
            return now + STALL_MS;
        }
        if dice.chance(faults.slow) {
            self.world.fault("slow", [now, 0, 0]);
            return now + dice.between(1000, 3000);
        }
        now + dice.between(0, faults.latency_ms_max)
    }

    /// Takes a request, which is done some time.
    fn take(&self, segment: u32, operation: Operation, on_done: Completion, permit: OwnedSemaphorePermit) {
        let (offset, bytes) = (serve::offset_of(&operation), operation.bytes() as u64);
        let covers = {
            let mut disk = self.disk().lock();
            if let Operation::Write { offset, block, payload } = &operation {
                let alone = block.as_ref().filter(|_| payload.is_none());
                disk.note_write(segment, *offset, alone.map(|block| &block[..]));
            }
            disk.writes()
        };
        // A request whose taking is the last event is under way when the device stops.
        self.event(serve::name_of(&operation), [u64::from(segment), offset, bytes]);
        let mut state = self.state.lock();
        if matches!(&operation, Operation::Write { offset: 0, .. }) {
            self.check_idle(&state, segment);
        }
        let due = self.due_ms(&mut state.dice);
        state.taken += 1;
        let key = (due, state.taken);
        state.flights.insert(key, Flight { segment, operation, on_done, covers, _permit: permit });
        self.bell.notify_one();
    }

    /// A segment is written anew only when nothing of it is under way.
    fn check_idle(&self, state: &State, segment: u32) {
        let moves = |flight: &&Flight| flight.segment == segment && !matches!(flight.operation, Operation::Sync);
        let under_way = state.flights.values().filter(moves).count();
        if under_way > 0 {
            self.world.violate(format!("segment {segment} is written anew under {under_way} requests"));
        }
    }

    /// Serves requests when they are due, until the device stops, or was closed and has none.
    async fn pump(self: Arc<SimDevice>) {
        loop {
            let (ended, closed, due) = self.next_due();
            match due {
                _ if ended => return,
                Some(due) if due <= self.world.now_ms() => self.serve_next(),
                Some(due) => {
                    let _ = tokio::time::timeout_at(self.world.instant(due), self.bell.notified()).await;
                }
                None if closed => return,
                None => self.bell.notified().await,
            }
        }
    }

    fn next_due(&self) -> (bool, bool, Option<u64>) {
        let state = self.state.lock();
        (!self.power.is_on(), state.closed, state.flights.keys().next().map(|key| key.0))
    }

    fn serve_next(&self) {
        let Some((segment, offset)) = self.state.lock().flights.values().next().map(serve::place_of) else { return };
        if !self.event("done", [u64::from(segment), offset, 0]) {
            return;
        }
        let mut state = self.state.lock();
        let Some((_, flight)) = state.flights.pop_first() else { return };
        let Flight { segment, mut operation, on_done, covers, _permit } = flight;
        let bad_place = state.bad_place;
        let result = self.serve(segment, &mut operation, covers, bad_place, &mut state.dice);
        drop(state);
        drop(_permit);
        on_done(Done { operation, result });
        self.progress.notify_waiters();
    }

    fn end_tasks(&self) {
        let tasks = std::mem::take(&mut self.state.lock().tasks);
        tasks.iter().for_each(AbortHandle::abort);
    }

    fn take_no_more(&self) {
        self.state.lock().closed = true;
        self.permits.close();
        self.bell.notify_one();
    }

    /// Destroys a header on the disk; which.
    pub fn rot(&self, dice: &mut Dice) -> Option<(u32, u64)> {
        self.disk().lock().rot(dice)
    }

    /// Somebody copies or renames a segment's file, `over` another one or not; from which number to which.
    pub fn stray(&self, renames: bool, over: bool, dice: &mut Dice) -> Option<(u32, u32)> {
        self.disk().lock().stray(renames, over, dice)
    }

    fn disk(&self) -> &Mutex<Disk> {
        &self.world.disks[self.number]
    }
}

/// Counts a task as alive until it is dropped.
struct Alive(Arc<AtomicUsize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Device for SimDevice {
    fn path(&self) -> &Path {
        &self.path
    }

    fn facts(&self) -> DeviceFacts {
        DeviceFacts { executor: "simulated", direct_io: true, registered_buffers: true, registered_files: true }
    }

    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            self.file_step("load", file as u64).await?;
            Ok(self.disk().lock().small(file))
        })
    }

    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(self.change_file("save", FileChange::Save(file, bytes)))
    }

    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>> {
        Box::pin(async move {
            self.file_step("list", 0).await?;
            Ok(self.disk().lock().segments())
        })
    }

    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>> {
        Box::pin(self.open_segment(segment, bytes))
    }

    fn create(&self, segment: u32, bytes: u64, header: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(self.create_segment(segment, bytes, header))
    }

    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(self.remove_segment(segment))
    }

    fn set_aside(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        Box::pin(self.set_segment_aside(segment))
    }

    fn submit(
        &self,
        segment: u32,
        _lane: Lane,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingGone>> {
        Box::pin(async move {
            if !self.power.is_on() {
                return std::future::pending().await;
            }
            if !self.state.lock().open.contains(&segment) {
                self.world.violate(format!("a request on segment {segment}, which is not open"));
                on_done(Done { operation, result: Err(io::ErrorKind::NotFound.into()) });
                return Ok(());
            }
            let permit = self.permits.clone().acquire_owned().await.map_err(|_| RingGone)?;
            if !self.power.is_on() {
                return std::future::pending().await;
            }
            self.take(segment, operation, on_done, permit);
            Ok(())
        })
    }

    fn spawn(&self, _share: Share, task: BoxFuture<'static, ()>) {
        self.tasks_alive.fetch_add(1, Ordering::Relaxed);
        let alive = Alive(self.tasks_alive.clone());
        let handle = tokio::spawn(async move {
            let _alive = alive;
            task.await;
        });
        self.state.lock().tasks.push(handle.abort_handle());
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.take_no_more();
            self.idle().await;
            self.end_tasks();
        })
    }

    fn close_now(&self) {
        // Nothing blocks here: the pump finishes what was taken, as long as the life lasts.
        self.take_no_more();
        self.end_tasks();
    }
}
