//! One life of a node: its start on devices that may fail, its work, and its end.
//!
//! Always true: every wait here has an end.

use super::{NodeLife, check, operations};
use crate::device::{Power, SimDevice};
use crate::dice::{Dice, Stream};
use crate::disk::Loss;
use crate::faults::Faults;
use crate::life::{self, DURABLE_AFTER_MS, End, Ground, Legacy, Lives, Plan, STARTS_MAX, watch, world_is_calm};
use crate::model::Expected;
use crate::payload::page_id;
use larder_device::{Clock, Device};
use larder_l3::{L3, L3Options};
use larder_node::sim::{Devices, Store};
use larder_node::{L3Device, NamespaceQuota, NodeOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// By then every device was scanned, however slow it is.
const RECOVERY_MAX: Duration = Duration::from_secs(1200);
/// Most time in which a node stops, as for a real one …
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);
/// … and what a device that does not answer may add.
const CLOSE_LATE_MS: u64 = 60_000;

/// A life of a node from begin to end.
pub(crate) struct NodeRun {
    ground: Ground,
    plan: Plan,
    before: Legacy,
    operations: Arc<AtomicU64>,
    /// Those that could not be opened too.
    devices: Vec<Arc<SimDevice>>,
    opened: Vec<Arc<SimDevice>>,
    life: Option<Arc<NodeLife>>,
    left: Legacy,
}

/// What goes on beside the workers, until it is stopped.
struct Beside {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Beside {
    fn begin(life: &Arc<NodeLife>) -> Beside {
        let stop = CancellationToken::new();
        let (upkeep, watching) = ((life.clone(), stop.clone()), (life.clone(), stop.clone()));
        let tasks = vec![
            tokio::spawn(async move { upkeep.0.store.upkeep(upkeep.1).await }),
            tokio::spawn(async move { check::watch(&watching.0, watching.1).await }),
        ];
        Beside { stop, tasks }
    }

    async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

impl Lives for NodeRun {
    async fn live(&mut self, crash: Arc<Notify>) {
        let mut dice = Dice::new(self.ground.world.seed, Stream::Life(self.plan.number));
        self.break_one(&mut dice);
        let Some(life) = self.start(&crash).await else { return };
        self.life = Some(life.clone());
        let beside = Beside::begin(&life);
        let eager = dice.chance(400_000);
        let mut workers = if eager { begin_work(&life) } else { Vec::new() };
        self.recover(&life).await;
        if !eager {
            check_expected(&life, &self.before.expected);
            workers = begin_work(&life);
        }
        for worker in workers {
            if worker.await.is_err() {
                life.violate("a worker panicked".into());
            }
        }
        if life.world.failed() {
            return;
        }
        let rests = match self.plan.end {
            End::Last => true,
            End::Closed => dice.chance(500_000),
            End::Dropped => false,
        };
        if rests {
            check::come_to_rest(&life).await;
        }
        beside.end().await;
        match self.plan.end {
            End::Dropped => self.drop_store(life).await,
            End::Closed | End::Last => self.close(&life).await,
        }
    }

    fn crash(&mut self, loss: Loss) {
        let Some(life) = self.life.as_ref().filter(|life| life.is_recovered()) else { return };
        let kill = matches!(loss, Loss::Kill);
        let acked_ms = if kill { u64::MAX } else { life.world.now_ms().saturating_sub(DURABLE_AFTER_MS) };
        self.left = Legacy { expected: expected(life, acked_ms), durable: !kill, operations: 0 };
    }

    fn end(&mut self) -> Vec<Arc<SimDevice>> {
        self.life = None;
        self.opened.clear();
        std::mem::take(&mut self.devices)
    }
}

impl NodeRun {
    pub(crate) fn new(ground: Ground, plan: Plan, before: Legacy, operations: Arc<AtomicU64>) -> NodeRun {
        NodeRun {
            ground,
            plan,
            before,
            operations,
            devices: Vec::new(),
            opened: Vec::new(),
            life: None,
            left: Legacy::default(),
        }
    }

    /// What it leaves to the next one.
    pub(crate) fn legacy(self) -> Legacy {
        self.left
    }

    /// One of several devices may not work when the node starts.
    fn break_one(&self, dice: &mut Dice) {
        let Ground { world, setup, .. } = &self.ground;
        let number = dice.below(world.disks.len() as u64) as usize;
        if setup.profile.has_errors() && world.disks.len() > 1 && dice.chance(200_000) {
            world.fault("broken at the start", [number as u64, 0, 0]);
            world.disks[number].lock().breaks(world.now_ms() + dice.between(100, 60_000));
        }
    }

    /// Starts until it works, without devices that fail if there are others.
    async fn start(&mut self, crash: &Arc<Notify>) -> Option<Arc<NodeLife>> {
        let world = self.ground.world.clone();
        let faults = *world.faults.lock();
        for attempt in 0..STARTS_MAX {
            let last = attempt + 1 == STARTS_MAX;
            if last {
                *world.faults.lock() = Faults::none(faults.latency_ms_max);
                world.disks.iter().for_each(|disk| disk.lock().heals());
            }
            let power = Power::lasting(self.plan.events);
            let watch = watch(&power, crash);
            let opened = self.open(attempt, &power).await;
            *world.faults.lock() = faults;
            let logs: Vec<L3> = opened.iter().filter_map(|(_, l3)| l3.as_ref().ok()).cloned().collect();
            let left_out = opened.len() - logs.len();
            match Devices::of(opened) {
                Ok(devices) => {
                    world.event("started", [attempt.into(), left_out as u64, 0]);
                    world.count("starts", 1);
                    world.count("devices left out", left_out as u64);
                    if left_out > 0 && world_is_calm(&faults) {
                        world.violate("a device cannot be opened".into());
                    }
                    return Some(self.life(devices, logs));
                }
                Err(error) => {
                    world.event("start failed", [attempt.into(), 0, 0]);
                    world.count("starts failed", 1);
                    if last || world_is_calm(&faults) {
                        world.violate(format!("the node does not start: {error}"));
                        return None;
                    }
                    watch.abort();
                }
            }
        }
        None
    }

    /// Opens every device's log, and lets go of the devices of those that cannot be opened.
    async fn open(&mut self, attempt: u32, power: &Arc<Power>) -> Vec<(L3Device, Result<L3, larder_l3::L3Error>)> {
        let Ground { world, arena, .. } = &self.ground;
        let options = life::options(&self.ground, self.plan);
        self.devices.clear();
        self.opened.clear();
        let mut opened = Vec::new();
        for number in 0..world.disks.len() {
            let (turn, bytes) = (self.plan.number << 8 | u64::from(attempt), options.capacity_bytes);
            let device = SimDevice::start(world.clone(), arena.clone(), number, turn, power.clone(), bytes);
            self.devices.push(device.clone());
            let seed = Some(world.seed | (number as u64) << 56);
            let l3 = L3::open_on(device.clone(), L3Options { seed, ..options.clone() }, arena.clone()).await;
            match l3 {
                Ok(_) => self.opened.push(device),
                // It may still stop answering, and closing waits for answers.
                Err(_) => device.close().await,
            }
            opened.push((L3Device { dir: format!("/simulated/{number}").into(), bytes }, l3));
        }
        opened
    }

    fn life(&self, devices: Devices, logs: Vec<L3>) -> Arc<NodeLife> {
        let Ground { world, model, arena, setup } = self.ground.clone();
        let node = setup.node.clone().unwrap_or_else(|| unreachable!("a node's life is lived in a node's setup"));
        let clock = Clock::at(world.unix_ms());
        let options = NodeOptions {
            l2_bytes: node.l2_bytes,
            in_flight_bytes: Some(node.in_flight_bytes),
            write_policy: node.write_policy,
            scrub_bytes_per_second: node.scrub_bytes_per_second,
            quotas: quotas(node.quota),
            seed: Some(world.seed),
            ..NodeOptions::default()
        };
        let (began, first) = {
            let mut model = model.lock();
            (model.now(), model.next_version())
        };
        let store = Store::new(&options, arena.clone(), devices, clock, first);
        (0..2).for_each(|key| store.welcome(page_id(key).namespace));
        Arc::new(NodeLife {
            world,
            model,
            arena,
            setup,
            node,
            store,
            logs,
            clock,
            number: self.plan.number,
            began,
            recovered_ms: AtomicU64::new(u64::MAX),
            operations: self.operations.clone(),
            left: Default::default(),
        })
    }

    /// Waits until all that is stored was found.
    async fn recover(&self, life: &NodeLife) {
        for l3 in &life.logs {
            match timeout(RECOVERY_MAX, l3.recovered()).await {
                Ok(Ok(report)) => {
                    life.world.event("recovered", [report.pages, report.segments, report.torn_records]);
                    life.world.count("pages recovered", report.pages);
                }
                // A log that cannot be found whole takes no writes.
                _ if !life.setup.profile.honest() => life.world.count("recoveries without end", 1),
                other => life.violate(format!("the recovery ends without having found all: {other:?}")),
            }
        }
        self.opened.iter().for_each(|device| device.started());
        life.recovered_ms.store(life.world.now_ms(), Ordering::Relaxed);
    }

    async fn close(&mut self, life: &Arc<NodeLife>) {
        let began = life.world.now_ms();
        life.store.close((tokio::time::Instant::now() + CLOSE_PATIENCE).into_std()).await;
        let took = life.world.now_ms() - began;
        if took > CLOSE_PATIENCE.as_millis() as u64 + CLOSE_LATE_MS {
            life.violate(format!("closing takes {took} ms"));
        }
        check::closed(life, &self.devices);
        let expected = expected(life, u64::MAX);
        life.world.event("closed", [expected.len() as u64, 0, 0]);
        self.left = Legacy { expected, durable: true, operations: 0 };
    }

    async fn drop_store(&mut self, life: Arc<NodeLife>) {
        let expected = expected(&life, u64::MAX);
        let world = life.world.clone();
        self.life = None;
        if Arc::into_inner(life).is_none() {
            world.violate("somebody still holds the life".into());
        }
        for device in &self.devices {
            device.idle().await;
        }
        world.event("dropped", [expected.len() as u64, 0, 0]);
        self.left = Legacy { expected, durable: false, operations: 0 };
    }
}

fn quotas(bytes: Option<u64>) -> Vec<NamespaceQuota> {
    let quota = |bytes| Some(NamespaceQuota { namespace: page_id(0).namespace.to_string().parse().ok()?, bytes });
    bytes.and_then(quota).into_iter().collect()
}

fn begin_work(life: &Arc<NodeLife>) -> Vec<JoinHandle<()>> {
    (0..life.setup.workers).map(|worker| tokio::spawn(operations::work(life.clone(), worker))).collect()
}

/// What a crash now must not lose, of what was on L3 before `acked_ms`.
fn expected(life: &NodeLife, acked_ms: u64) -> Vec<Expected> {
    let earlier = life.recovered_ms.load(Ordering::Relaxed) < acked_ms;
    let mut model = life.model.lock();
    model.landed(life.world.now_ms(), |key| life.on_l3(key));
    model.expected(acked_ms, earlier, |key| life.on_l3(key))
}

/// After a start: what must be there is there. Quotas may take other pages now than they took before.
fn check_expected(life: &NodeLife, expected: &[Expected]) {
    if !life.setup.profile.honest() || life.node.quota.is_some() {
        return;
    }
    for Expected { key, version } in expected {
        let expires = life.model.lock().expires_unix_ms(*version);
        // The log may be a second early.
        if expires != 0 && expires <= life.clock.now_unix_ms() + 1000 {
            continue;
        }
        life.world.count("pages that had to be there", 1);
        let found = life.on_l3(*key);
        let other = found.is_some_and(|found| found < *version) && life.setup.keep_percent > 0;
        if found != Some(*version) && !other {
            life.violate(format!("key {key}: version {version} was durable, and {found:?} is there"));
        }
    }
}
