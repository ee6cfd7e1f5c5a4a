//! One incarnation of a node: its start on devices that may fail, its work, and its end.
//!
//! Invariant: every wait in this module has a deadline.

use super::{NodeIncarnation, check, operations};
use crate::device::{Power, SimDevice};
use crate::disk::CrashEffect;
use crate::faults::Faults;
use crate::identity::{NodeIdentity, check_first_generation, dir_of};
use crate::incarnation::{
    self, Carryover, DURABLE_AFTER_MS, Ending, Environment, IncarnationPlan, STARTS_MAX, SimulatedSystem,
    has_no_faults, watch_power,
};
use crate::model::Expected;
use crate::payload::{NAMESPACES, namespace_id, page_id};
use crate::random::{RandomSource, Stream};
use larder_io::Device;
use larder_log::{L3, L3Options};
use larder_node::sim::{Devices, Store};
use larder_node::{L3Device, NamespaceQuota, NodeOptions};
use larder_runtime::Clock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

const RECOVERY_MAX: Duration = Duration::from_secs(1200);
/// Deadline for closing a node, as in production …
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);
/// … and the delay that a stalled device may add, in milliseconds.
const CLOSE_LATE_MS: u64 = 60_000;

pub(crate) struct NodeRun {
    env: Environment,
    plan: IncarnationPlan,
    before: Carryover,
    operations: Arc<AtomicU64>,
    /// All devices of the last start, including those that could not be opened.
    devices: Vec<Arc<SimDevice>>,
    opened: Vec<Arc<SimDevice>>,
    /// For each log on a reliable device: the generations by key that its recovery found.
    recoveries: Vec<JoinHandle<Vec<(u64, u64)>>>,
    node: Option<Arc<NodeIncarnation>>,
    carryover: Carryover,
}

struct BackgroundTasks {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl BackgroundTasks {
    fn spawn(node: &Arc<NodeIncarnation>) -> BackgroundTasks {
        let stop = CancellationToken::new();
        let upkeep = (node.clone(), stop.clone());
        let watching = (node.clone(), stop.clone());
        let tasks = vec![
            tokio::spawn(async move { upkeep.0.store.upkeep(upkeep.1).await }),
            tokio::spawn(async move { check::monitor(&watching.0, watching.1).await }),
        ];
        BackgroundTasks { stop, tasks }
    }

    async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

impl SimulatedSystem for NodeRun {
    async fn run(&mut self, crash: Arc<Notify>) {
        let mut random = RandomSource::new(self.env.world.seed, Stream::Incarnation(self.plan.number));
        self.fail_one_device(&mut random);
        let Some(node) = self.start(&crash).await else { return };
        self.node = Some(node.clone());
        let background = BackgroundTasks::spawn(&node);
        let eager = random.chance(400_000);
        let mut workers = if eager { spawn_workers(&node) } else { Vec::new() };
        let found = self.recover(&node).await;
        if !eager {
            check_expected(&node, &self.before.expected, &found);
            workers = spawn_workers(&node);
        }
        for worker in workers {
            if worker.await.is_err() {
                node.violate("a worker panicked".into());
            }
        }
        if node.world.failed() {
            return;
        }
        let quiesces = match self.plan.end {
            Ending::Quiescent => true,
            Ending::Closed => random.chance(500_000),
            Ending::Dropped => false,
        };
        if quiesces {
            check::quiesce(&node).await;
        }
        background.end().await;
        match self.plan.end {
            Ending::Dropped => self.drop_store(node).await,
            Ending::Closed | Ending::Quiescent => self.close(&node).await,
        }
    }

    fn crash(&mut self, effect: CrashEffect) {
        let Some(node) = self.node.as_ref().filter(|node| node.is_recovered()) else { return };
        let kill = matches!(effect, CrashEffect::ProcessKilled);
        let acked_ms = if kill { u64::MAX } else { node.world.now_ms().saturating_sub(DURABLE_AFTER_MS) };
        self.carryover = Carryover { expected: expected(node, acked_ms), durable: !kill, operations: 0 };
    }

    fn end(&mut self) -> Vec<Arc<SimDevice>> {
        self.node = None;
        self.opened.clear();
        std::mem::take(&mut self.devices)
    }
}

impl NodeRun {
    pub(crate) fn new(
        env: Environment,
        plan: IncarnationPlan,
        before: Carryover,
        operations: Arc<AtomicU64>,
    ) -> NodeRun {
        NodeRun {
            env,
            plan,
            before,
            operations,
            devices: Vec::new(),
            opened: Vec::new(),
            recoveries: Vec::new(),
            node: None,
            carryover: Carryover::default(),
        }
    }

    pub(crate) fn carryover(self) -> Carryover {
        self.carryover
    }

    /// Makes one of several devices fail at the start of the node, now and then. The node must
    /// start without it.
    fn fail_one_device(&self, random: &mut RandomSource) {
        let Environment { world, setup, .. } = &self.env;
        let number = random.below(world.disks.len() as u64) as usize;
        if setup.profile.has_errors() && world.disks.len() > 1 && random.chance(200_000) {
            world.fault("device fails at start", [number as u64, 0, 0]);
            world.disks[number].lock().fail_until(world.now_ms() + random.between(100, 60_000));
        }
    }

    /// Starts the node, with retries. It leaves out failing devices if another one works. The last
    /// attempt runs without faults and must succeed.
    async fn start(&mut self, crash: &Arc<Notify>) -> Option<Arc<NodeIncarnation>> {
        let world = self.env.world.clone();
        let faults = *world.faults.lock();
        for attempt in 0..STARTS_MAX {
            let last = attempt + 1 == STARTS_MAX;
            if last {
                *world.faults.lock() = Faults::none(faults.latency_ms_max);
                world.disks.iter().for_each(|disk| disk.lock().heal());
            }
            let power = Power::lasting(self.plan.events);
            let watch_power = watch_power(&power, crash);
            let start = self.plan.number << 8 | u64::from(attempt);
            let identity = NodeIdentity::take(&world, 0..world.disks.len(), start);
            let opened = self.open(attempt, &power).await;
            *world.faults.lock() = faults;
            let logs: Vec<L3> = opened.iter().filter_map(|(_, l3)| l3.as_ref().ok()).cloned().collect();
            let left_out = opened.len() - logs.len();
            match Devices::of(opened) {
                Ok(mut devices) => {
                    world.event("started", [attempt.into(), left_out as u64, 0]);
                    world.count("starts", 1);
                    world.count("devices not opened", left_out as u64);
                    if left_out > 0 && has_no_faults(&faults) {
                        world.violate("a device cannot be opened although no fault is injected".into());
                    }
                    return match identity.store(&mut devices).await {
                        Ok((_, first)) => Some(self.incarnation(devices, logs, first)),
                        Err(error) => {
                            world.violate(format!("the node does not start: {error}"));
                            None
                        }
                    };
                }
                Err(error) => {
                    world.event("start failed", [attempt.into(), 0, 0]);
                    world.count("starts failed", 1);
                    if last || has_no_faults(&faults) {
                        world.violate(format!("the node does not start: {error}"));
                        return None;
                    }
                    watch_power.abort();
                }
            }
        }
        None
    }

    async fn open(&mut self, attempt: u32, power: &Arc<Power>) -> Vec<(L3Device, Result<L3, larder_log::L3Error>)> {
        let Environment { world, arena, setup, .. } = &self.env;
        let options = incarnation::options(&self.env, self.plan);
        self.devices.clear();
        self.opened.clear();
        self.recoveries.clear();
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
            if let Some(l3) = l3.as_ref().ok().filter(|_| setup.profile.is_reliable()) {
                self.recoveries.push(tokio::spawn(generations_recovered(l3.clone(), setup.keys)));
            }
            opened.push((L3Device { dir: dir_of(number), bytes }, l3));
        }
        opened
    }

    fn incarnation(&self, devices: Devices, logs: Vec<L3>, first: u64) -> Arc<NodeIncarnation> {
        let Environment { world, model, arena, setup } = self.env.clone();
        let node_setup = setup.node.clone().unwrap_or_else(|| unreachable!("a node incarnation has a node setup"));
        let clock = Clock::at(world.unix_ms());
        let options = NodeOptions {
            l2_bytes: node_setup.l2_bytes,
            in_flight_bytes: Some(node_setup.in_flight_bytes),
            write_policy: node_setup.write_policy,
            scrub_bytes_per_second: node_setup.scrub_bytes_per_second,
            quotas: quotas(node_setup.quota),
            seed: Some(world.seed),
            ..NodeOptions::default()
        };
        let began = model.lock().now();
        let store = Store::new(&options, arena.clone(), devices, clock, first);
        (0..NAMESPACES).for_each(|namespace| store.tiers().apply_quota(namespace_id(namespace)));
        Arc::new(NodeIncarnation {
            world,
            model,
            arena,
            setup,
            node_setup,
            store,
            logs,
            clock,
            number: self.plan.number,
            first_generation: first,
            began,
            recovered_ms: AtomicU64::new(u64::MAX),
            operations: self.operations.clone(),
            abandoned_puts: Default::default(),
        })
    }

    /// Waits for the recovery of all logs. Returns the newest generation of each key that a log on
    /// a reliable device had when its own recovery ended.
    async fn recover(&mut self, node: &NodeIncarnation) -> BTreeMap<u64, u64> {
        for l3 in &node.logs {
            match timeout(RECOVERY_MAX, l3.recovered()).await {
                Ok(Ok(report)) => {
                    node.world.event("recovered", [report.pages, report.segments, report.torn_records]);
                    node.world.count("pages recovered", report.pages);
                }
                // A log without a complete recovery takes no writes.
                _ if !node.setup.profile.is_reliable() => {
                    node.world.forgive("forgiven: recovery of a failing device", 1)
                }
                other => node.violate(format!("recovery did not complete: {other:?}")),
            }
        }
        self.opened.iter().for_each(|device| device.started());
        check_first_generation(&node.world, node.first_generation, &node.logs);
        node.recovered_ms.store(node.world.now_ms(), Ordering::Relaxed);
        let mut found = BTreeMap::new();
        for recovery in self.recoveries.drain(..) {
            for (key, generation) in recovery.await.unwrap_or_default() {
                let newest = found.entry(key).or_insert(generation);
                *newest = generation.max(*newest);
            }
        }
        found
    }

    async fn close(&mut self, node: &Arc<NodeIncarnation>) {
        let began = node.world.now_ms();
        node.store.close((tokio::time::Instant::now() + CLOSE_PATIENCE).into_std()).await;
        let took = node.world.now_ms() - began;
        if took > CLOSE_PATIENCE.as_millis() as u64 + CLOSE_LATE_MS {
            node.violate(format!("closing took {took} ms, longer than its deadline"));
        }
        check::check_closed(node, &self.devices);
        let expected = expected(node, u64::MAX);
        node.world.event("closed", [expected.len() as u64, 0, 0]);
        self.carryover = Carryover { expected, durable: true, operations: 0 };
    }

    async fn drop_store(&mut self, node: Arc<NodeIncarnation>) {
        let expected = expected(&node, u64::MAX);
        let world = node.world.clone();
        self.node = None;
        if Arc::into_inner(node).is_none() {
            world.violate("a task still holds the incarnation".into());
        }
        for device in &self.devices {
            device.idle().await;
        }
        world.event("dropped", [expected.len() as u64, 0, 0]);
        self.carryover = Carryover { expected, durable: false, operations: 0 };
    }
}

fn quotas(bytes: Option<u64>) -> Vec<NamespaceQuota> {
    let quota = |bytes| Some(NamespaceQuota { namespace: page_id(0).namespace.to_string().parse().ok()?, bytes });
    bytes.and_then(quota).into_iter().collect()
}

fn spawn_workers(node: &Arc<NodeIncarnation>) -> Vec<JoinHandle<()>> {
    (0..node.setup.workers).map(|worker| tokio::spawn(operations::work(node.clone(), worker))).collect()
}

/// Versions that a crash at this moment must not lose, among those on L3 before `acked_ms`.
fn expected(node: &NodeIncarnation, acked_ms: u64) -> Vec<Expected> {
    let earlier = node.recovered_ms.load(Ordering::Relaxed) < acked_ms;
    let mut model = node.model.lock();
    model.note_on_l3(node.world.now_ms(), |key| node.generation_on_l3(key));
    model.expected(acked_ms, earlier, |key| node.generation_on_l3(key))
}

/// Waits for the recovery of a log, and returns the generation of each key that its index names
/// then.
///
/// Recovery reads no payloads, so the index also names records that an earlier power loss tore. The
/// scrub of this log may drop them while the node still opens or recovers another log.
async fn generations_recovered(l3: L3, keys: u64) -> Vec<(u64, u64)> {
    // The caller reports a recovery that fails.
    let _ = timeout(RECOVERY_MAX, l3.recovered()).await;
    (0..keys).filter_map(|key| Some((key, l3.find(&page_id(key))?.generation))).collect()
}

/// Checks that recovery found all expected versions. Nodes with quotas are exempt: a quota may
/// evict other pages than before.
fn check_expected(node: &NodeIncarnation, expected: &[Expected], found: &BTreeMap<u64, u64>) {
    if !node.setup.profile.is_reliable() || node.node_setup.quota.is_some() {
        return node.world.forgive("forgiven: durable pages of failing devices", expected.len() as u64);
    }
    for Expected { key, version } in expected {
        let expires = node.model.lock().expires_unix_ms(*version);
        // The log may treat a page as expired up to a second early.
        if expires != 0 && expires <= node.clock.now_unix_ms() + 1000 {
            continue;
        }
        node.world.count("durable pages checked", 1);
        let found = found.get(key).map(|&generation| node.model.lock().version_of(generation));
        let other = found.is_some_and(|found| found < *version) && node.setup.keep_percent > 0;
        if found != Some(*version) && !other {
            node.violate(format!("key {key}: version {version} was durable, and L3 has {found:?}"));
        }
    }
}
