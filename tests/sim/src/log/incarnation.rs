//! One incarnation of the log: its start on a device that may fail, its work, and its end.

use super::LogIncarnation;
use super::operations::{self, ExpectedReads};
use crate::device::{Power, SimDevice};
use crate::disk::CrashEffect;
use crate::faults::{Faults, Profile};
use crate::incarnation::{
    Carryover, DURABLE_AFTER_MS, Ending, Environment, FAULTS_DRAINED_AFTER, IncarnationPlan, STARTS_MAX,
    SimulatedSystem, has_no_faults, options, watch_power,
};
use crate::model::Expected;
use crate::payload::page_id;
use crate::random::{RandomSource, Stream};
use futures::future::join;
use larder_log::machine::AppendError;
use larder_log::{L3, L3Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// State of the running incarnation, kept where a crash handler can read it.
#[derive(Default)]
struct LogRunState {
    device: Option<Arc<SimDevice>>,
    log: Option<Arc<LogIncarnation>>,
    operations: Arc<AtomicU64>,
    carryover: Carryover,
}

pub(crate) struct LogRun {
    env: Environment,
    plan: IncarnationPlan,
    carryover: Carryover,
    running: LogRunState,
}

impl LogRun {
    pub(crate) fn new(
        env: Environment,
        plan: IncarnationPlan,
        carryover: Carryover,
        operations: Arc<AtomicU64>,
    ) -> LogRun {
        LogRun { env, plan, carryover, running: LogRunState { operations, ..LogRunState::default() } }
    }

    pub(crate) fn carryover(self) -> Carryover {
        self.running.carryover
    }
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
    // Some incarnations (400,000 in a million) serve requests during recovery.
    let mut random = RandomSource::new(env.world.seed, Stream::Incarnation(plan.number));
    let eager = random.chance(400_000);
    let mut workers = if eager { spawn_workers(&log) } else { Vec::new() };
    let checks = match eager || log.setup.is_large {
        true => ExpectedReads::None,
        false => ExpectedReads::draw(&mut random),
    };
    let (beyond_index, ()) =
        join(recover(&log, &device), operations::read_early(&log, &carryover.expected, checks)).await;
    if !eager {
        operations::check_expected(&log, &carryover.expected, beyond_index, checks).await;
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
    (0..log.setup.workers).map(|worker| tokio::spawn(operations::work(log.clone(), worker))).collect()
}

/// Waits for the end of recovery. Returns the number of pages for which the index had no room.
async fn recover(log: &LogIncarnation, device: &SimDevice) -> u64 {
    match log.l3.recovered().await {
        Ok(report) => {
            log.world.event("recovered", [report.pages, report.segments, report.torn_records]);
            log.world.count("pages recovered", report.pages);
            log.world.count("segments read by their footer", report.segments_by_footer);
            log.world.count("pages recovered beyond the bound", report.pages_beyond_index);
            operations::check_page_bound(log);
            log.recovered_ms.store(log.world.now_ms(), Ordering::Relaxed);
            device.started();
            report.pages_beyond_index
        }
        Err(error) => {
            log.world.violate(format!("recovery did not complete: {error}"));
            0
        }
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
                // Close the device before the next attempt, and watch its power until then: if
                // power fails, the device stops answering, and closing would wait for ever.
                larder_io::Device::close(&*device).await;
                watch_power.abort();
            }
        }
    }
    None
}

fn set_expectations_after_crash(env: &Environment, running: &mut LogRunState, before: &Carryover, effect: CrashEffect) {
    let kill = matches!(effect, CrashEffect::ProcessKilled);
    let recovered = |log: &&Arc<LogIncarnation>| log.recovered_ms.load(Ordering::Relaxed) != u64::MAX;
    let Some(log) = running.log.as_ref().filter(recovered) else {
        // Writers wait until recovery ends, so this incarnation has written nothing. The earlier
        // expectations stand, except for versions that were not durable.
        if !kill {
            env.model.lock().power_lost(0, false);
        }
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
    if !kill {
        log.model.lock().power_lost(acked_ms, log.recovered_ms.load(Ordering::Relaxed) < acked_ms);
    }
}

fn expected(log: &LogIncarnation, acked_ms: u64) -> Vec<Expected> {
    // Recovery makes durable all that it found.
    let earlier = log.recovered_ms.load(Ordering::Relaxed) < acked_ms;
    log.model.lock().expected(acked_ms, earlier, |key| log.l3.find(&page_id(key)).map(|entry| entry.generation))
}

async fn close(log: &Arc<LogIncarnation>, device: &SimDevice) -> Carryover {
    // Collect expectations first: closing waits for writes in flight and syncs them.
    let expected = expected(log, u64::MAX);
    operations::release_all_pins(log);
    log.l3.close().await;
    check_quiescent(log, device);
    log.model.lock().power_lost(u64::MAX, true);
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
    match operations::put_and_get(log).await {
        Ok(()) => {}
        Err(L3Error::Append(AppendError::Stopped)) => log.world.forgive("forgiven: log stopped", 1),
        Err(error) => log.world.violate(format!("a put fails after faults have stopped: {error}")),
    }
    operations::read_all_keys(log).await;
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
    if log.setup.profile == Profile::Calm && stats.corrupt + stats.io_errors > 0 {
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
    log.world.count("pages indexed at clean ends", stats.pages);
    log.world.count("scrubs", log.l3.scrub().passes);
}
