//! One incarnation of the simulated system: it recovers from the stored bytes, serves its workers,
//! and ends. This module runs any [`SimulatedSystem`].
//!
//! Invariant: after an incarnation, no task, no device handle and no arena memory is left.

use crate::device::{Power, SimDevice};
use crate::disk::CrashEffect;
use crate::faults::Faults;
use crate::model::{Expected, Model};
use crate::random::{RandomSource, Stream};
use crate::setup::Setup;
use crate::world::World;
use futures::future::{Either, select};
use larder_log::L3Options;
use larder_memory::Arena;
use larder_runtime::Clock;
use larder_runtime::lock::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// A page acknowledged this long before a crash must survive it, on a reliable device.
pub(crate) const DURABLE_AFTER_MS: u64 = 1000;
/// Bound on failed starts. The last attempt runs without faults.
pub(crate) const STARTS_MAX: u32 = 6;
/// Bound on virtual time. Workers have finite work and every wait has a deadline, so only a
/// deadlock exceeds it.
const INCARNATION_MAX: Duration = Duration::from_secs(12 * 3600);
/// By this time after the last fault, a stalling device has completed every request.
pub(crate) const FAULTS_DRAINED_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Closed,
    /// The handle is dropped without closing. The device stays powered.
    Dropped,
    /// Last incarnation: faults stop, the system must become idle, then it is closed.
    Quiescent,
}

/// Results of one incarnation that the next one needs.
#[derive(Debug, Default)]
pub struct Carryover {
    /// Versions that the next incarnation must find.
    pub expected: Vec<Expected>,
    /// True if those versions were durable, and not only acknowledged by the device.
    pub durable: bool,
    pub operations: u64,
}

#[derive(Debug, Clone, Copy)]
pub struct IncarnationPlan {
    pub number: u64,
    /// Maximum number of operations that its workers begin.
    pub operations: u64,
    /// Number of device events after which power fails. `u64::MAX` for an incarnation without a
    /// crash.
    pub events: u64,
    pub end: Ending,
    pub size: LogSize,
}

#[derive(Debug, Clone, Copy)]
pub struct LogSize {
    pub segments: u64,
    /// The log has the smallest bound of pages that it accepts.
    pub bounds_pages: bool,
}

#[derive(Clone)]
pub struct Environment {
    pub world: Arc<World>,
    pub model: Arc<Mutex<Model>>,
    pub arena: Arc<Arena>,
    pub setup: Arc<Setup>,
}

/// System that the simulation starts, crashes and stops: the log alone, or a whole node. One value
/// runs one incarnation.
pub(crate) trait SimulatedSystem {
    /// Runs until its own end. The implementation notifies the parameter `crash` when power fails,
    /// and the caller then drops this future.
    fn run(&mut self, crash: Arc<Notify>) -> impl Future<Output = ()>;
    fn crash(&mut self, effect: CrashEffect);
    fn end(&mut self) -> Vec<Arc<SimDevice>>;
}

/// Runs a system in a paused-clock runtime until it ends or crashes. Then checks that nothing is
/// left of it.
pub(crate) fn drive(env: &Environment, plan: IncarnationPlan, system: &mut impl SimulatedSystem) {
    let world = &env.world;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let Ok(runtime) = runtime else {
        world.violate("the runtime could not be created".into());
        return;
    };
    let mut random = RandomSource::new(world.seed, Stream::Crash(plan.number));
    // Also the effect of an end without a crash: the device loses nothing that it acknowledged.
    let mut effect = CrashEffect::ProcessKilled;
    runtime.block_on(async {
        world.incarnation_begins();
        world.event("incarnation begins", [plan.number, plan.events, plan.operations]);
        let crashed = {
            let crash = Arc::new(Notify::new());
            let run = system.run(crash.clone());
            let run = std::pin::pin!(async {
                if tokio::time::timeout(INCARNATION_MAX, run).await.is_err() {
                    world.violate("deadlock: a task waits for ever".into());
                }
            });
            let crash = std::pin::pin!(async move { crash.notified().await });
            matches!(select(crash, run).await, Either::Left(_))
        };
        if crashed {
            effect = CrashEffect::draw(&mut random);
            count_crash(world, effect);
            system.crash(effect);
        }
        world.event("incarnation ends", [plan.number, u64::from(crashed), 0]);
        world.incarnation_ends();
    });
    let devices = system.end();
    let faults = *world.faults.lock();
    // Dropping the runtime drops every task with all it holds, as a crash does.
    drop(runtime);
    for device in devices {
        device.lose_power(effect, &mut random);
        if device.lacks_superblock() {
            world.violate("no superblock is valid after the end of the incarnation".into());
        }
        damage_disk(world, &device, &faults, &mut random);
        if Arc::strong_count(&device) != 1 {
            world.violate(format!(
                "{} tasks still own the device after the end of the incarnation",
                Arc::strong_count(&device) - 1
            ));
        }
    }
    if env.arena.used() != 0 {
        world.violate(format!("{} bytes of arena memory leaked", env.arena.used()));
    }
    env.model.lock().incarnation_ends();
}

/// Damages stored files between two incarnations, as operators and failing media do.
fn damage_disk(world: &World, device: &SimDevice, faults: &Faults, random: &mut RandomSource) {
    if random.chance(faults.header_rot)
        && let Some((segment, offset)) = device.destroy_header(random)
    {
        world.fault("header rot", [segment.into(), offset, 0]);
    }
    if random.chance(faults.header_rot)
        && let Some(copy) = device.destroy_superblock(random)
    {
        world.fault("superblock rot", [copy, 0, 0]);
    }
    let kinds = [
        ("segment copied", "segment copied over another", faults.segment_copied),
        ("segment renamed", "segment renamed over another", faults.segment_renamed),
    ];
    for ((name, name_over, rate), renames) in kinds.into_iter().zip([false, true]) {
        if !random.chance(rate) {
            continue;
        }
        let over = random.chance(faults.segment_overwritten);
        if let Some((from, to)) = device.misplace(renames, over, random) {
            world.fault(if over { name_over } else { name }, [from.into(), to.into(), 0]);
        }
    }
}

fn count_crash(world: &World, effect: CrashEffect) {
    let counter = match effect {
        CrashEffect::ProcessKilled => "crash: process killed",
        CrashEffect::UnsyncedLost => "crash: unsynced lost",
        CrashEffect::Torn { .. } => "crash: torn writes",
    };
    world.count(counter, 1);
}

pub(crate) fn options(env: &Environment, plan: IncarnationPlan) -> L3Options {
    // Beside the segments, L3 needs 16 KiB for its small files (`SMALL_FILES_BYTES`).
    let capacity_bytes = plan.size.segments * env.setup.segment_bytes + 16_384;
    L3Options {
        segment_bytes: env.setup.segment_bytes,
        seed: Some(env.world.seed),
        keep_percent: env.setup.keep_percent,
        // The log raises 0 to the pages of eight segments.
        pages_max: if plan.size.bounds_pages { 0 } else { u64::MAX },
        scrub_bytes_per_second: env.setup.scrub_bytes_per_second,
        scrub_interval: Duration::from_millis(env.setup.scrub_interval_ms),
        clock: Clock::at(env.world.unix_ms()),
        ..L3Options::new("/simulated", capacity_bytes)
    }
}

pub(crate) fn watch_power(power: &Arc<Power>, crash: &Arc<Notify>) -> JoinHandle<()> {
    let power = power.clone();
    let crash = crash.clone();
    tokio::spawn(async move {
        power.failed().await;
        crash.notify_one();
    })
}

pub(crate) fn has_no_faults(faults: &Faults) -> bool {
    *faults == Faults::none(faults.latency_ms_max)
}
