//! One incarnation of the simulated system: it recovers from the stored bytes, serves its workers,
//! and ends. This module runs the log alone.
//!
//! Invariant: after an incarnation, no task, no device handle and no arena memory is left.

use crate::device::{Power, SimDevice};
use crate::disk::CrashEffect;
use crate::faults::Faults;
use crate::model::{Expected, Model};
use crate::node::NodeRun;
use crate::payload::page_id;
use crate::random::{RandomSource, Stream};
use crate::setup::Setup;
use crate::workload;
use crate::world::World;
use futures::future::{Either, select};
use larder_log::machine::AppendError;
use larder_log::{L3, L3Error, L3Options};
use larder_memory::Arena;
use larder_runtime::Clock;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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

pub struct LogIncarnation {
    pub world: Arc<World>,
    pub model: Arc<Mutex<Model>>,
    pub arena: Arc<Arena>,
    pub setup: Arc<Setup>,
    pub l3: L3,
    pub number: u64,
    pub recovered_ms: AtomicU64,
    pub operations: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
pub struct Carryover {
    pub expected: Vec<Expected>,
    /// True if those versions were durable, and not only acknowledged by the device.
    pub durable: bool,
    pub operations: u64,
}

#[derive(Debug, Clone, Copy)]
pub struct IncarnationPlan {
    pub number: u64,
    pub operations: u64,
    pub events: u64,
    pub end: Ending,
    pub segments: u64,
}

#[derive(Clone)]
pub struct Environment {
    pub world: Arc<World>,
    pub model: Arc<Mutex<Model>>,
    pub arena: Arc<Arena>,
    pub setup: Arc<Setup>,
}

/// State of the running incarnation, kept where a crash handler can read it.
#[derive(Default)]
struct LogRunState {
    device: Option<Arc<SimDevice>>,
    log: Option<Arc<LogIncarnation>>,
    operations: Arc<AtomicU64>,
    carryover: Carryover,
}

/// System that the simulation starts, crashes and stops: the log alone, or a whole node. One value
/// runs one incarnation.
pub(crate) trait SimulatedSystem {
    /// Runs until its own end. Dropped when power fails, which the implementation reports through
    /// `crash`.
    fn run(&mut self, crash: Arc<Notify>) -> impl Future<Output = ()>;
    fn crash(&mut self, effect: CrashEffect);
    fn end(&mut self) -> Vec<Arc<SimDevice>>;
}

/// Runs one incarnation in a runtime of its own, and returns its expectations for the next one. The
/// drop of the runtime ends every task, as a crash does.
pub fn run_incarnation(env: &Environment, plan: IncarnationPlan, carryover: Carryover) -> Carryover {
    let operations = Arc::new(AtomicU64::new(plan.operations));
    let mut left = match env.setup.node {
        Some(_) => {
            let mut node = NodeRun::new(env.clone(), plan, carryover, operations.clone());
            drive(env, plan, &mut node);
            node.carryover()
        }
        None => {
            let running = LogRunState { operations: operations.clone(), ..LogRunState::default() };
            let mut l3 = LogRun { env: env.clone(), plan, carryover, running };
            drive(env, plan, &mut l3);
            l3.running.carryover
        }
    };
    left.operations = plan.operations - operations.load(Ordering::Relaxed);
    left
}

/// Runs a system in a paused-clock runtime until it ends or crashes. Then checks that nothing is
/// left of it.
fn drive(env: &Environment, plan: IncarnationPlan, system: &mut impl SimulatedSystem) {
    let world = &env.world;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let Ok(runtime) = runtime else {
        world.violate("the runtime could not be created".into());
        return;
    };
    let mut random = RandomSource::new(world.seed, Stream::Crash(plan.number));
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

fn set_expectations_after_crash(env: &Environment, running: &mut LogRunState, before: &Carryover, effect: CrashEffect) {
    let kill = matches!(effect, CrashEffect::ProcessKilled);
    let recovered = |log: &&Arc<LogIncarnation>| log.recovered_ms.load(Ordering::Relaxed) != u64::MAX;
    let Some(log) = running.log.as_ref().filter(recovered) else {
        // The incarnation has written nothing, so the earlier expectations stand, except for
        // versions that were not durable.
        if kill || before.durable {
            running.carryover.expected = before.expected.clone();
            running.carryover.durable = before.durable;
        }
        return;
    };
    let acked_ms = match effect {
        // A process kill loses no write that the device has acknowledged.
        CrashEffect::ProcessKilled => u64::MAX,
        _ => env.world.now_ms().saturating_sub(DURABLE_AFTER_MS),
    };
    running.carryover.expected = expected(log, acked_ms);
    running.carryover.durable = !kill;
}

fn expected(log: &LogIncarnation, acked_ms: u64) -> Vec<Expected> {
    // Recovery makes durable all that it found.
    let earlier = log.recovered_ms.load(Ordering::Relaxed) < acked_ms;
    log.model.lock().expected(acked_ms, earlier, |key| log.l3.find(&page_id(key)).map(|entry| entry.generation))
}

pub(crate) fn options(env: &Environment, plan: IncarnationPlan) -> L3Options {
    let capacity_bytes = plan.segments * env.setup.segment_bytes + 16_384;
    L3Options {
        segment_bytes: env.setup.segment_bytes,
        seed: Some(env.world.seed),
        keep_percent: env.setup.keep_percent,
        scrub_bytes_per_second: env.setup.scrub_bytes_per_second,
        scrub_interval: Duration::from_millis(env.setup.scrub_interval_ms),
        clock: Clock::at(env.world.unix_ms()),
        ..L3Options::new("/simulated", capacity_bytes)
    }
}

struct LogRun {
    env: Environment,
    plan: IncarnationPlan,
    carryover: Carryover,
    running: LogRunState,
}

impl SimulatedSystem for LogRun {
    async fn run(&mut self, crash: Arc<Notify>) {
        run(&self.env, self.plan, &self.carryover, &mut self.running, crash).await;
    }

    fn crash(&mut self, effect: CrashEffect) {
        set_expectations_after_crash(&self.env, &mut self.running, &self.carryover, effect);
    }

    fn end(&mut self) -> Vec<Arc<SimDevice>> {
        self.running.log = None;
        self.running.device.take().into_iter().collect()
    }
}

async fn run(
    env: &Environment,
    plan: IncarnationPlan,
    carryover: &Carryover,
    running: &mut LogRunState,
    crash: Arc<Notify>,
) {
    let Some((device, l3)) = start(env, plan, running, &crash).await else { return };
    let log = Arc::new(LogIncarnation {
        world: env.world.clone(),
        model: env.model.clone(),
        arena: env.arena.clone(),
        setup: env.setup.clone(),
        l3,
        number: plan.number,
        recovered_ms: AtomicU64::new(u64::MAX),
        operations: running.operations.clone(),
    });
    running.log = Some(log.clone());
    // Some incarnations serve requests during recovery.
    let eager = RandomSource::new(env.world.seed, Stream::Incarnation(plan.number)).chance(400_000);
    let mut workers = if eager { spawn_workers(&log) } else { Vec::new() };
    recover(&log, &device).await;
    if !eager {
        workload::check_expected(&log, &carryover.expected).await;
        workers = spawn_workers(&log);
    }
    for worker in workers {
        if worker.await.is_err() {
            env.world.violate("a worker panicked".into());
        }
    }
    if env.world.failed() {
        return;
    }
    running.carryover = match plan.end {
        Ending::Closed => close(&log, &device).await,
        Ending::Dropped => drop_log(log, running, &device).await,
        Ending::Quiescent => {
            quiesce(&log).await;
            close(&log, &device).await
        }
    };
}

fn spawn_workers(log: &Arc<LogIncarnation>) -> Vec<JoinHandle<()>> {
    (0..log.setup.workers).map(|worker| tokio::spawn(workload::work(log.clone(), worker))).collect()
}

async fn recover(log: &LogIncarnation, device: &SimDevice) {
    match log.l3.recovered().await {
        Ok(report) => {
            log.world.event("recovered", [report.pages, report.segments, report.torn_records]);
            log.world.count("pages recovered", report.pages);
            log.world.count("segments read by their footer", report.segments_by_footer);
            log.recovered_ms.store(log.world.now_ms(), Ordering::Relaxed);
            device.started();
        }
        Err(error) => log.world.violate(format!("recovery did not complete: {error}")),
    }
}

/// Starts the log, with retries. A start may fail only on a device with faults. The last attempt
/// runs without faults and must succeed.
async fn start(
    env: &Environment,
    plan: IncarnationPlan,
    running: &mut LogRunState,
    crash: &Arc<Notify>,
) -> Option<(Arc<SimDevice>, L3)> {
    let world = &env.world;
    let options = options(env, plan);
    for attempt in 0..STARTS_MAX {
        let last = attempt + 1 == STARTS_MAX;
        let faults = *world.faults.lock();
        // Without faults the start must succeed, so a seed cannot get stuck here.
        if last {
            *world.faults.lock() = Faults::none(faults.latency_ms_max);
        }
        let number = plan.number << 8 | u64::from(attempt);
        let power = Power::lasting(plan.events);
        let watch_power = watch_power(&power, crash);
        let device = SimDevice::start(world.clone(), env.arena.clone(), 0, number, power, options.capacity_bytes);
        running.device = Some(device.clone());
        let opened = L3::open_on(device.clone(), options.clone(), env.arena.clone()).await;
        *world.faults.lock() = faults;
        match opened {
            Ok(l3) => {
                world.event("started", [attempt.into(), 0, 0]);
                world.count("starts", 1);
                return Some((device, l3));
            }
            Err(error) => {
                world.event("start failed", [attempt.into(), 0, 0]);
                world.count("starts failed", 1);
                if last || has_no_faults(&faults) {
                    world.violate(format!("the log does not start: {error}"));
                    return None;
                }
                // Close the device before the next attempt. It may still stop answering, and
                // closing waits for answers.
                larder_io::Device::close(&*device).await;
                watch_power.abort();
            }
        }
    }
    None
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

async fn close(log: &Arc<LogIncarnation>, device: &SimDevice) -> Carryover {
    // Collect expectations first: closing waits for writes in flight and syncs them.
    let expected = expected(log, u64::MAX);
    workload::release_all_pins(log);
    log.l3.close().await;
    check_quiescent(log, device);
    log.world.event("closed", [expected.len() as u64, 0, 0]);
    Carryover { expected, durable: true, operations: 0 }
}

async fn drop_log(log: Arc<LogIncarnation>, running: &mut LogRunState, device: &SimDevice) -> Carryover {
    let expected = expected(&log, u64::MAX);
    let world = log.world.clone();
    running.log = None;
    if Arc::into_inner(log).is_none() {
        world.violate("a task still holds the incarnation".into());
    }
    device.idle().await;
    world.event("dropped", [expected.len() as u64, 0, 0]);
    Carryover { expected, durable: false, operations: 0 }
}

async fn quiesce(log: &Arc<LogIncarnation>) {
    let calm = Faults::none(log.world.faults.lock().latency_ms_max);
    *log.world.faults.lock() = calm;
    log.world.event("faults stop", [0; 3]);
    tokio::time::sleep(FAULTS_DRAINED_AFTER).await;
    match workload::put_and_get(log).await {
        Ok(()) => {}
        Err(L3Error::Append(AppendError::Stopped)) => log.world.count("logs stopped", 1),
        Err(error) => log.world.violate(format!("a put fails after faults have stopped: {error}")),
    }
    workload::read_all_keys(log).await;
}

fn check_quiescent(log: &Arc<LogIncarnation>, device: &SimDevice) {
    let stats = log.l3.stats();
    let left = [
        ("requests in flight", device.requests() as u64),
        ("bytes in the write queue", stats.write_queue_bytes),
        ("bytes of arena memory", log.arena.used() as u64),
    ];
    for (resource, count) in left.into_iter().filter(|(_, count)| *count != 0) {
        log.world.violate(format!("{count} {resource} remain after closing"));
    }
    if log.setup.profile == crate::faults::Profile::Calm && stats.corrupt + stats.io_errors > 0 {
        log.world.violate(format!(
            "{} damaged pages and {} errors in a seed without faults",
            stats.corrupt, stats.io_errors
        ));
    }
    log.world.count("evicted pages", stats.evicted_pages);
    log.world.count("damaged pages", stats.corrupt);
    log.world.count("segments reused", stats.segments_prepared);
    log.world.count("pages copied forward", stats.copied_forward_pages);
    log.world.count("pages expired", stats.expired_pages);
    log.world.count("pages evicted by quota", stats.quota_pages);
    log.world.count("scrubs", log.l3.scrub().passes);
}
