//! One life of what is simulated: it starts on what is stored, is worked with, and ends one way or another. Here, of L3 alone.
//!
//! Always true: when a life is over nothing of it is left, neither a task nor memory.

use crate::device::{Power, SimDevice};
use crate::dice::{Dice, Stream};
use crate::disk::Loss;
use crate::faults::Faults;
use crate::model::{Expected, Model};
use crate::node::NodeRun;
use crate::payload::page_id;
use crate::setup::Setup;
use crate::workload;
use crate::world::World;
use futures::future::{Either, select};
use larder_core::log::AppendError;
use larder_device::{Arena, Clock};
use larder_l3::{L3, L3Error, L3Options};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// What was acknowledged this long before a crash must be there.
pub(crate) const DURABLE_AFTER_MS: u64 = 1000;
/// Starts that may fail while the device does.
pub(crate) const STARTS_MAX: u32 = 6;
/// No life lasts longer: workers have only so much to do, and every wait has an end.
const LIFE_MAX: Duration = Duration::from_secs(12 * 3600);
/// By then every request of a stalling device was answered.
pub(crate) const CALM_DOWN: Duration = Duration::from_secs(60);

/// How a life ends, if the device does not end it earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Closed, as on shutdown.
    Closed,
    /// The handle goes without a word; the device goes on.
    Dropped,
    /// It is the last one: faults stop, and everything must come to rest.
    Last,
}

/// What the tasks of a life share.
pub struct Life {
    /// What outlives it.
    pub world: Arc<World>,
    /// What was asked.
    pub model: Arc<Mutex<Model>>,
    /// The memory.
    pub arena: Arc<Arena>,
    /// How the seed is set up.
    pub setup: Arc<Setup>,
    /// The store.
    pub l3: L3,
    /// Its number, from 1.
    pub number: u64,
    /// When all that was stored had been found; `u64::MAX` until then.
    pub recovered_ms: AtomicU64,
    /// Operations left to do.
    pub operations: Arc<AtomicU64>,
}

/// What a life leaves to the next one.
#[derive(Debug, Default)]
pub struct Legacy {
    /// Versions that must be there.
    pub expected: Vec<Expected>,
    /// They were durable when the life ended, not only with the device.
    pub durable: bool,
    /// Operations done.
    pub operations: u64,
}

/// How one life is to go.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Its number, from 1.
    pub number: u64,
    /// Operations to do.
    pub operations: u64,
    /// Device events until power fails.
    pub events: u64,
    /// How it ends otherwise.
    pub end: End,
    /// Most segments.
    pub segments: u64,
}

/// Everything that lives longer than a life.
#[derive(Clone)]
pub struct Ground {
    /// Device content, time, trace.
    pub world: Arc<World>,
    /// What was asked.
    pub model: Arc<Mutex<Model>>,
    /// The memory.
    pub arena: Arc<Arena>,
    /// How the seed is set up.
    pub setup: Arc<Setup>,
}

/// What a running life keeps where a crash can look at it.
#[derive(Default)]
struct Running {
    device: Option<Arc<SimDevice>>,
    life: Option<Arc<Life>>,
    operations: Arc<AtomicU64>,
    legacy: Legacy,
}

/// Something that lives.
pub(crate) trait Lives {
    /// Lives until it ends by itself, or is dropped when power fails, which is told to `crash`.
    fn live(&mut self, crash: Arc<Notify>) -> impl Future<Output = ()>;
    /// Power failed.
    fn crash(&mut self, loss: Loss);
    /// It is over: lets go of everything but the devices it had last.
    fn end(&mut self) -> Vec<Arc<SimDevice>>;
}

/// Lives one life.
pub fn live(ground: &Ground, plan: Plan, legacy: Legacy) -> Legacy {
    let operations = Arc::new(AtomicU64::new(plan.operations));
    let mut left = match ground.setup.node {
        Some(_) => {
            let mut node = NodeRun::new(ground.clone(), plan, legacy, operations.clone());
            run_life(ground, plan, &mut node);
            node.legacy()
        }
        None => {
            let running = Running { operations: operations.clone(), ..Running::default() };
            let mut l3 = L3Run { ground: ground.clone(), plan, legacy, running };
            run_life(ground, plan, &mut l3);
            l3.running.legacy
        }
    };
    left.operations = plan.operations - operations.load(Ordering::Relaxed);
    left
}

fn run_life(ground: &Ground, plan: Plan, subject: &mut impl Lives) {
    let world = &ground.world;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let Ok(runtime) = runtime else {
        world.violate("no runtime could be made".into());
        return;
    };
    let mut dice = Dice::new(world.seed, Stream::Loss(plan.number));
    let mut loss = Loss::Kill;
    runtime.block_on(async {
        world.life_begins();
        world.event("life begins", [plan.number, plan.events, plan.operations]);
        let crashed = {
            let crash = Arc::new(Notify::new());
            let life = subject.live(crash.clone());
            let life = std::pin::pin!(async {
                if tokio::time::timeout(LIFE_MAX, life).await.is_err() {
                    world.violate("something waits for ever".into());
                }
            });
            let crash = std::pin::pin!(async move { crash.notified().await });
            matches!(select(crash, life).await, Either::Left(_))
        };
        if crashed {
            loss = Loss::draw(&mut dice);
            count_loss(world, loss);
            subject.crash(loss);
        }
        world.event("life ends", [plan.number, u64::from(crashed), 0]);
        world.life_ends();
    });
    let devices = subject.end();
    let faults = *world.faults.lock();
    // Every task goes here, with all it holds.
    drop(runtime);
    for device in devices {
        device.lose_power(loss, &mut dice);
        if dice.chance(faults.rot)
            && let Some((segment, offset)) = device.rot(&mut dice)
        {
            world.fault("rot", [segment.into(), offset, 0]);
        }
        let kinds = [("copied", "copied over", faults.copied), ("renamed", "renamed over", faults.renamed)];
        for ((what, what_over, rate), renames) in kinds.into_iter().zip([false, true]) {
            if !dice.chance(rate) {
                continue;
            }
            let over = dice.chance(faults.written_over);
            if let Some((from, to)) = device.stray(renames, over, &mut dice) {
                world.fault(if over { what_over } else { what }, [from.into(), to.into(), 0]);
            }
        }
        if Arc::strong_count(&device) != 1 {
            world.violate(format!("{} owners of the device are left", Arc::strong_count(&device) - 1));
        }
    }
    if ground.arena.used() != 0 {
        world.violate(format!("{} bytes of memory were not given back", ground.arena.used()));
    }
    ground.model.lock().life_ends();
}

fn count_loss(world: &World, loss: Loss) {
    let what = match loss {
        Loss::Kill => "end: kept",
        Loss::All => "end: unsynced lost",
        Loss::Pieces { .. } => "end: torn",
    };
    world.count(what, 1);
}

/// At a crash: what must be there afterwards.
fn expect_after_crash(ground: &Ground, running: &mut Running, before: &Legacy, loss: Loss) {
    let kill = matches!(loss, Loss::Kill);
    let recovered = |life: &&Arc<Life>| life.recovered_ms.load(Ordering::Relaxed) != u64::MAX;
    let Some(life) = running.life.as_ref().filter(recovered) else {
        // Nothing was written since the start: all is as it was, but for what had not been durable.
        if kill || before.durable {
            running.legacy.expected = before.expected.clone();
            running.legacy.durable = before.durable;
        }
        return;
    };
    let acked_ms = match loss {
        // A process that dies loses nothing that the device has answered.
        Loss::Kill => u64::MAX,
        _ => ground.world.now_ms().saturating_sub(DURABLE_AFTER_MS),
    };
    running.legacy.expected = expected(life, acked_ms);
    running.legacy.durable = !kill;
}

fn expected(life: &Life, acked_ms: u64) -> Vec<Expected> {
    // A start makes durable what it found.
    let earlier = life.recovered_ms.load(Ordering::Relaxed) < acked_ms;
    life.model.lock().expected(acked_ms, earlier, |key| life.l3.find(&page_id(key)).map(|entry| entry.generation))
}

pub(crate) fn options(ground: &Ground, plan: Plan) -> L3Options {
    let capacity_bytes = plan.segments * ground.setup.segment_bytes + 16_384;
    L3Options {
        segment_bytes: ground.setup.segment_bytes,
        seed: Some(ground.world.seed),
        keep_percent: ground.setup.keep_percent,
        scrub_bytes_per_second: ground.setup.scrub_bytes_per_second,
        scrub_interval: Duration::from_millis(ground.setup.scrub_interval_ms),
        clock: Clock::at(ground.world.unix_ms()),
        ..L3Options::new("/simulated", capacity_bytes)
    }
}

/// L3 alone.
struct L3Run {
    ground: Ground,
    plan: Plan,
    legacy: Legacy,
    running: Running,
}

impl Lives for L3Run {
    async fn live(&mut self, crash: Arc<Notify>) {
        run(&self.ground, self.plan, &self.legacy, &mut self.running, crash).await;
    }

    fn crash(&mut self, loss: Loss) {
        expect_after_crash(&self.ground, &mut self.running, &self.legacy, loss);
    }

    fn end(&mut self) -> Vec<Arc<SimDevice>> {
        self.running.life = None;
        self.running.device.take().into_iter().collect()
    }
}

async fn run(ground: &Ground, plan: Plan, legacy: &Legacy, running: &mut Running, crash: Arc<Notify>) {
    let Some((device, l3)) = start(ground, plan, running, &crash).await else { return };
    let life = Arc::new(Life {
        world: ground.world.clone(),
        model: ground.model.clone(),
        arena: ground.arena.clone(),
        setup: ground.setup.clone(),
        l3,
        number: plan.number,
        recovered_ms: AtomicU64::new(u64::MAX),
        operations: running.operations.clone(),
    });
    running.life = Some(life.clone());
    // Some lives are worked with while the node still finds what is stored.
    let eager = Dice::new(ground.world.seed, Stream::Life(plan.number)).chance(400_000);
    let mut workers = if eager { begin_work(&life) } else { Vec::new() };
    recover(&life, &device).await;
    if !eager {
        workload::check_expected(&life, &legacy.expected).await;
        workers = begin_work(&life);
    }
    for worker in workers {
        if worker.await.is_err() {
            ground.world.violate("a worker panicked".into());
        }
    }
    if ground.world.failed() {
        return;
    }
    running.legacy = match plan.end {
        End::Closed => close(&life, &device).await,
        End::Dropped => drop_handle(life, running, &device).await,
        End::Last => {
            come_to_rest(&life).await;
            close(&life, &device).await
        }
    };
}

fn begin_work(life: &Arc<Life>) -> Vec<JoinHandle<()>> {
    (0..life.setup.workers).map(|worker| tokio::spawn(workload::work(life.clone(), worker))).collect()
}

/// Waits until all that is stored was found.
async fn recover(life: &Life, device: &SimDevice) {
    match life.l3.recovered().await {
        Ok(report) => {
            life.world.event("recovered", [report.pages, report.segments, report.torn_records]);
            life.world.count("pages recovered", report.pages);
            life.world.count("segments read by their footer", report.segments_by_footer);
            life.recovered_ms.store(life.world.now_ms(), Ordering::Relaxed);
            device.started();
        }
        Err(error) => life.world.violate(format!("the recovery ends without having found all: {error}")),
    }
}

/// Starts until it works; a device that fails may make a start fail, one that does not may not.
async fn start(
    ground: &Ground,
    plan: Plan,
    running: &mut Running,
    crash: &Arc<Notify>,
) -> Option<(Arc<SimDevice>, L3)> {
    let world = &ground.world;
    let options = options(ground, plan);
    for attempt in 0..STARTS_MAX {
        let last = attempt + 1 == STARTS_MAX;
        let faults = *world.faults.lock();
        if last {
            *world.faults.lock() = Faults::none(faults.latency_ms_max);
        }
        let number = plan.number << 8 | u64::from(attempt);
        let power = Power::lasting(plan.events);
        let watch = watch(&power, crash);
        let device = SimDevice::start(world.clone(), ground.arena.clone(), 0, number, power, options.capacity_bytes);
        running.device = Some(device.clone());
        let opened = L3::open_on(device.clone(), options.clone(), ground.arena.clone()).await;
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
                if last || world_is_calm(&faults) {
                    world.violate(format!("the node does not start: {error}"));
                    return None;
                }
                // It may still stop answering, and closing waits for answers.
                larder_device::Device::close(&*device).await;
                watch.abort();
            }
        }
    }
    None
}

/// A failure of this power is a crash.
pub(crate) fn watch(power: &Arc<Power>, crash: &Arc<Notify>) -> JoinHandle<()> {
    let (power, crash) = (power.clone(), crash.clone());
    tokio::spawn(async move {
        power.failed().await;
        crash.notify_one();
    })
}

pub(crate) fn world_is_calm(faults: &Faults) -> bool {
    *faults == Faults::none(faults.latency_ms_max)
}

async fn close(life: &Arc<Life>, device: &SimDevice) -> Legacy {
    // Closing waits for what is under way and syncs it.
    let expected = expected(life, u64::MAX);
    workload::let_go(life);
    life.l3.close().await;
    check_at_rest(life, device);
    life.world.event("closed", [expected.len() as u64, 0, 0]);
    Legacy { expected, durable: true, operations: 0 }
}

async fn drop_handle(life: Arc<Life>, running: &mut Running, device: &SimDevice) -> Legacy {
    let expected = expected(&life, u64::MAX);
    let world = life.world.clone();
    running.life = None;
    if Arc::into_inner(life).is_none() {
        world.violate("somebody still holds the life".into());
    }
    device.idle().await;
    world.event("dropped", [expected.len() as u64, 0, 0]);
    Legacy { expected, durable: false, operations: 0 }
}

/// Faults stop; after a while everything works again.
async fn come_to_rest(life: &Arc<Life>) {
    let calm = Faults::none(life.world.faults.lock().latency_ms_max);
    *life.world.faults.lock() = calm;
    life.world.event("faults stop", [0; 3]);
    tokio::time::sleep(CALM_DOWN).await;
    match workload::put_and_get(life).await {
        Ok(()) => {}
        Err(L3Error::Append(AppendError::Stopped)) => life.world.count("logs stopped", 1),
        Err(error) => life.world.violate(format!("after faults stopped, a put fails: {error}")),
    }
    workload::read_everything(life).await;
}

fn check_at_rest(life: &Arc<Life>, device: &SimDevice) {
    let stats = life.l3.stats();
    let left = [
        ("requests under way", device.requests() as u64),
        ("bytes in the write queue", stats.write_queue_bytes),
        ("bytes of memory", life.arena.used() as u64),
    ];
    for (what, count) in left.into_iter().filter(|(_, count)| *count != 0) {
        life.world.violate(format!("after closing, {count} {what} are left"));
    }
    if life.setup.profile == crate::faults::Profile::Calm && stats.corrupt + stats.io_errors > 0 {
        life.world.violate(format!("without faults, {} damaged pages and {} errors", stats.corrupt, stats.io_errors));
    }
    life.world.count("evicted pages", stats.evicted_pages);
    life.world.count("damaged pages", stats.corrupt);
    life.world.count("segments written anew", stats.segments_prepared);
    life.world.count("pages rescued", stats.rescued_pages);
    life.world.count("pages past their time", stats.expired_pages);
    life.world.count("pages over a quota", stats.quota_pages);
    life.world.count("scrubs", life.l3.scrub().passes);
}
