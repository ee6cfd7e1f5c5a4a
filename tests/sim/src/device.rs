//! Simulated device: requests take virtual time, and fail as the seed says.
//!
//! Fault model:
//! - A write takes its bytes from memory when it completes, not when it is submitted. A read fills
//!   memory at completion, too. Memory that is reused too early therefore shows up as damage.
//! - Requests take up to some milliseconds and complete in any order. Some take seconds, some ten
//!   seconds.
//! - A sync makes durable the writes that had completed when it was submitted. A power loss keeps,
//!   loses or tears all other writes, in pieces of 512 bytes or 4 KiB. Writes in flight suffer the
//!   same.
//! - Creating, replacing, renaming and removing a file is atomic, and durable once acknowledged.
//! - Each kind of [`Faults`](crate::faults::Faults) happens at its own rate.
//! - A device may refuse all requests for a while or for ever, or be full for a while.
//! - Power fails at a chosen event: a request is submitted or completes, a file is created or
//!   removed. All devices then stop answering.
//!
//! Exempt from the promise that forgotten pages stay forgotten, because no store with one copy can
//! keep it:
//! - a tombstone that was silently damaged, lost or misdirected on its way to the device, on the
//!   device, or on the way back during recovery;
//! - a segment whose header was silently damaged, since all its records are lost with it.
//!
//! Errors that a device reports are not exempt.
//!
//! Not modelled: damage of small files, and a power loss of one device of a node alone.
//!
//! Invariants:
//! - One thread runs the device, in the runtime of the incarnation.
//! - The device owns the memory of a request until it completes it, or until
//!   [`SimDevice::lose_power`] runs.

mod files;
mod power;
mod serve;

use crate::disk::{CrashEffect, Disk};
use crate::random::{RandomSource, Stream};
use crate::world::World;
use files::FileChange;
use larder_io::{
    BoxFuture, Completion, Device, DeviceCapabilities, Done, Operation, Priority, RingClosed, SmallFile, TaskClass,
};
use larder_memory::Arena;
use larder_runtime::lock::Mutex;
pub use power::Power;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Bound on submitted requests that the device has not completed. Further ones wait for a permit.
const IN_FLIGHT_MAX: usize = 48;
/// Duration of a stall in virtual milliseconds. A request that is only slow takes 1 to 3 s.
const STALL_MS: u64 = 10_000;

struct InFlight {
    segment: u32,
    operation: Operation,
    on_done: Completion,
    /// For a sync: number of writes that had completed when it was submitted.
    covered_writes: u64,
    _permit: OwnedSemaphorePermit,
}

struct DeviceState {
    random: RandomSource,
    open: BTreeSet<u32>,
    /// Requests by due time, then by order of submission.
    in_flight: BTreeMap<(u64, u64), InFlight>,
    accepted: u64,
    files: BTreeMap<u64, FileChange>,
    tasks: Vec<AbortHandle>,
    /// Location that cannot be read while the node starts, and the kind of error.
    bad_sector: Option<(u32, u64, &'static str)>,
    closed: bool,
}

/// Device of one incarnation. The stored bytes are in [`World`] and outlive it: the next
/// incarnation starts from them.
pub struct SimDevice {
    world: Arc<World>,
    number: usize,
    power: Arc<Power>,
    arena: Arc<Arena>,
    path: PathBuf,
    state: Mutex<DeviceState>,
    permits: Arc<Semaphore>,
    wake: Notify,
    progress: Notify,
    capacity_bytes: u64,
    /// True during recovery, when a read with wrong bytes may hide tombstones.
    starting: AtomicBool,
    tasks_alive: Arc<AtomicUsize>,
}

impl SimDevice {
    /// Starts disk `number` of the world for one incarnation, and the task that completes its
    /// requests.
    pub fn start(
        world: Arc<World>,
        arena: Arc<Arena>,
        number: usize,
        incarnation: u64,
        power: Arc<Power>,
        capacity_bytes: u64,
    ) -> Arc<SimDevice> {
        let mut random = RandomSource::new(world.seed, Stream::Device(incarnation, number as u64));
        let bad_sector = serve::bad_sector(&world, number, &mut random);
        let state = DeviceState {
            random,
            bad_sector,
            open: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            accepted: 0,
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
            permits: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
            wake: Notify::new(),
            progress: Notify::new(),
            capacity_bytes,
            starting: AtomicBool::new(true),
            tasks_alive: Arc::default(),
        });
        tokio::spawn(device.clone().pump());
        device
    }

    /// Ends the recovery phase: the node has read everything that is stored. The latent sector
    /// error ends, and the capacity is checked from now on.
    pub fn started(&self) {
        // Relaxed here and below: one thread runs the device and its users.
        self.starting.store(false, Ordering::Relaxed);
        self.state.lock().bad_sector = None;
        self.check_capacity();
    }

    /// Waits until no submitted request is left. After a power failure no request completes, so the
    /// wait does not end.
    pub async fn idle(&self) {
        loop {
            let progress = self.progress.notified();
            if self.state.lock().in_flight.is_empty() {
                return;
            }
            progress.await;
        }
    }

    pub fn requests(&self) -> usize {
        self.state.lock().in_flight.len()
    }

    pub fn tasks(&self) -> usize {
        self.tasks_alive.load(Ordering::Relaxed)
    }

    /// Applies a crash after the runtime is gone. Writes and file changes in flight are done in
    /// full, in part or not at all. Unsynced bytes are treated as `effect` says.
    pub fn lose_power(&self, effect: CrashEffect, random: &mut RandomSource) {
        self.power.cut();
        let mut state = self.state.lock();
        let in_flight = std::mem::take(&mut state.in_flight);
        let files = std::mem::take(&mut state.files);
        drop(state);
        let mut disk = self.disk().lock();
        for request in in_flight.values() {
            if let Some((offset, bytes)) = serve::bytes_of(&request.operation) {
                let kept = [0, 500_000, 1_000_000][random.below(3) as usize];
                disk.write_some(request.segment, offset, &bytes, kept, random);
            }
        }
        for change in files.into_values() {
            if random.chance(500_000) {
                change.apply(&mut disk);
            }
        }
        disk.lose_power(effect, random);
        drop(disk);
        drop(in_flight);
    }

    /// Records one event, at which power may fail. Returns `false` if power has failed and the
    /// device no longer answers.
    fn event(&self, name: &'static str, numbers: [u64; 3]) -> bool {
        if !self.power.is_on() {
            return false;
        }
        self.world.event(name, numbers);
        self.power.consume_event()
    }

    /// Draws the virtual time at which a request completes: after at most `latency_ms_max`, after 1
    /// to 3 s if it is slow, or after [`STALL_MS`] if it stalls.
    fn due_ms(&self, random: &mut RandomSource) -> u64 {
        let faults = *self.world.faults.lock();
        let now = self.world.now_ms();
        if random.chance(faults.stall) {
            self.world.fault("stall", [now, 0, 0]);
            return now + STALL_MS;
        }
        if random.chance(faults.slow) {
            self.world.fault("slow", [now, 0, 0]);
            return now + random.between(1000, 3000);
        }
        now + random.between(0, faults.latency_ms_max)
    }

    fn accept(&self, segment: u32, operation: Operation, on_done: Completion, permit: OwnedSemaphorePermit) {
        let offset = serve::offset_of(&operation);
        let bytes = operation.bytes() as u64;
        let covered_writes = {
            let mut disk = self.disk().lock();
            if let Operation::Write { offset, block, payload } = &operation {
                let alone = block.as_ref().filter(|_| payload.is_none());
                disk.note_write(segment, *offset, alone.map(|block| &block[..]));
            }
            disk.writes()
        };
        // Power may fail at this very event. The request then counts as in flight, so its bytes may
        // be torn.
        self.event(serve::name_of(&operation), [u64::from(segment), offset, bytes]);
        let mut state = self.state.lock();
        if matches!(&operation, Operation::Write { offset: 0, .. }) {
            self.check_segment_idle(&state, segment);
        }
        let due = self.due_ms(&mut state.random);
        state.accepted += 1;
        let key = (due, state.accepted);
        state.in_flight.insert(key, InFlight { segment, operation, on_done, covered_writes, _permit: permit });
        self.wake.notify_one();
    }

    /// Checks that a segment is rewritten only while no read or write of it is in flight. Either
    /// would see bytes of two epochs.
    fn check_segment_idle(&self, state: &DeviceState, segment: u32) {
        let moves = |request: &&InFlight| request.segment == segment && !matches!(request.operation, Operation::Sync);
        let under_way = state.in_flight.values().filter(moves).count();
        if under_way > 0 {
            self.world
                .violate(format!("segment {segment} is rewritten while {under_way} requests on it are in flight"));
        }
    }

    /// Completes requests when they are due. Ends on power loss, or once the device is closed and
    /// idle.
    async fn pump(self: Arc<SimDevice>) {
        loop {
            let (ended, closed, due) = self.next_due();
            match due {
                _ if ended => return,
                Some(due) if due <= self.world.now_ms() => self.serve_next(),
                Some(due) => {
                    let _ = tokio::time::timeout_at(self.world.instant(due), self.wake.notified()).await;
                }
                None if closed => return,
                None => self.wake.notified().await,
            }
        }
    }

    fn next_due(&self) -> (bool, bool, Option<u64>) {
        let state = self.state.lock();
        (!self.power.is_on(), state.closed, state.in_flight.keys().next().map(|key| key.0))
    }

    fn serve_next(&self) {
        let Some((segment, offset)) = self.state.lock().in_flight.values().next().map(serve::location_of) else {
            return;
        };
        if !self.event("done", [u64::from(segment), offset, 0]) {
            return;
        }
        let mut state = self.state.lock();
        let Some((_, request)) = state.in_flight.pop_first() else { return };
        let InFlight { segment, mut operation, on_done, covered_writes, _permit } = request;
        let bad_sector = state.bad_sector;
        let result = self.serve(segment, &mut operation, covered_writes, bad_sector, &mut state.random);
        // The callback may submit the next request, so neither lock nor permit may be held here.
        drop(state);
        drop(_permit);
        on_done(Done { operation, result });
        self.progress.notify_waiters();
    }

    fn abort_tasks(&self) {
        let tasks = std::mem::take(&mut self.state.lock().tasks);
        tasks.iter().for_each(AbortHandle::abort);
    }

    fn refuse_new_requests(&self) {
        self.state.lock().closed = true;
        self.permits.close();
        self.wake.notify_one();
    }

    pub fn lacks_superblock(&self) -> bool {
        self.disk().lock().lacks_superblock()
    }

    pub fn destroy_superblock(&self, random: &mut RandomSource) -> Option<u64> {
        self.disk().lock().destroy_superblock(random)
    }

    pub fn destroy_header(&self, random: &mut RandomSource) -> Option<(u32, u64)> {
        self.disk().lock().destroy_header(random)
    }

    /// Copies or renames a segment file, replacing another one if `over`. Returns the old and the
    /// new number.
    pub fn misplace(&self, renames: bool, over: bool, random: &mut RandomSource) -> Option<(u32, u32)> {
        self.disk().lock().misplace(renames, over, random)
    }

    fn disk(&self) -> &Mutex<Disk> {
        &self.world.disks[self.number]
    }
}

struct TaskGuard(Arc<AtomicUsize>);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Device for SimDevice {
    fn path(&self) -> &Path {
        &self.path
    }

    fn capabilities(&self) -> DeviceCapabilities {
        DeviceCapabilities { executor: "simulated", direct_io: true, registered_buffers: true, registered_files: true }
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

    fn rename_misplaced(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        Box::pin(self.quarantine_segment(segment))
    }

    fn submit(
        &self,
        segment: u32,
        _priority: Priority,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingClosed>> {
        Box::pin(async move {
            // A device without power never answers. The crash drops the caller.
            if !self.power.is_on() {
                return std::future::pending().await;
            }
            if !self.state.lock().open.contains(&segment) {
                self.world.violate(format!("a request was submitted on segment {segment}, which is not open"));
                on_done(Done { operation, result: Err(io::ErrorKind::NotFound.into()) });
                return Ok(());
            }
            let permit = self.permits.clone().acquire_owned().await.map_err(|_| RingClosed)?;
            if !self.power.is_on() {
                return std::future::pending().await;
            }
            self.accept(segment, operation, on_done, permit);
            Ok(())
        })
    }

    fn spawn(&self, _share: TaskClass, task: BoxFuture<'static, ()>) {
        self.tasks_alive.fetch_add(1, Ordering::Relaxed);
        let alive = TaskGuard(self.tasks_alive.clone());
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
            self.refuse_new_requests();
            self.idle().await;
            self.abort_tasks();
        })
    }

    fn close_now(&self) {
        // This call must not block. The pump completes the remaining requests while the runtime
        // lives.
        self.refuse_new_requests();
        self.abort_tasks();
    }
}
