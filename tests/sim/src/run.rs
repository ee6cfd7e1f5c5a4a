//! Execution of one seed, and of many seeds on all cores.
//!
//! Invariant: the report of a seed follows from the seed and the options alone.

use crate::faults::{Faults, Profile};
use crate::incarnation::{Carryover, Ending, Environment, IncarnationPlan, LogSize, drive};
use crate::log::LogRun;
use crate::model::Model;
use crate::node::NodeRun;
use crate::panics;
use crate::random::{RandomSource, Stream};
use crate::setup::Setup;
use crate::wire::{self, ClusterSetup};
use crate::world::{FORGIVEN, World};
use larder_memory::Arena;
use larder_runtime::lock::Mutex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bound on restarts. A seed that keeps crashing before any operation would never end otherwise.
const INCARNATIONS_MAX: u64 = 10_000;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    #[default]
    L3,
    Node,
    Wire,
}

/// Options of a run. Together with the seed they determine every event, so the command for a replay
/// names both.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub operations: u64,
    /// Negative control: devices acknowledge syncs and make nothing durable.
    pub ignore_syncs: bool,
    pub scope: Scope,
    /// Simulates a log with more than a million keys. Only for the scope `L3`.
    pub large: bool,
    /// Fault profile. `None` lets the seed choose.
    pub profile: Option<Profile>,
    pub verbose: bool,
    pub keep_going: bool,
}

#[derive(Debug, Clone, Serialize)]
pub struct SeedReport {
    pub seed: u64,
    pub scope: Scope,
    pub large: bool,
    pub profile: &'static str,
    /// Hash over all events. Two runs of a seed must agree on it.
    pub hash: u64,
    pub events: u64,
    /// Number of operations that the options asked for. Replaying a seed needs the same number.
    pub operations_requested: u64,
    pub operations: u64,
    pub virtual_ms: u64,
    pub counts: BTreeMap<&'static str, u64>,
    pub violations: Vec<String>,
    pub tail: Vec<String>,
}

impl SeedReport {
    pub fn replay(&self) -> String {
        let scope = match self.scope {
            Scope::L3 => "",
            Scope::Node => "node-",
            Scope::Wire => "wire-",
        };
        let SeedReport { profile, seed, operations_requested, .. } = self;
        let large = if self.large { " --large" } else { "" };
        format!("--profile {scope}{profile}{large} --seed {seed} --operations {operations_requested} --verbose")
    }
}

/// Runs one seed on the calling thread. A panic in any of its tasks becomes a violation in the
/// report. Allocates the memory of the whole system.
pub fn run_seed(seed: u64, options: &Options) -> SeedReport {
    let mut random = RandomSource::new(seed, Stream::Setup);
    let profile = options.profile.unwrap_or_else(|| Profile::of_seed(seed));
    if options.scope == Scope::Wire {
        return run_wire(seed, profile, options, random);
    }
    let node = options.scope == Scope::Node;
    let draw = match (node, options.large) {
        (true, _) => Setup::draw_node,
        (false, true) => Setup::draw_large,
        (false, false) => Setup::draw,
    };
    let setup = draw(profile, options.operations, &mut random);
    let devices = setup.node.as_ref().map_or(1, |node| node.devices);
    let mut faults = Faults::draw(profile, &mut random);
    faults.sync_ignored = if options.ignore_syncs { 1_000_000 } else { 0 };
    let world = Arc::new(World::new(seed, devices, faults, options.verbose));
    let operations = match Arena::new(setup.arena_bytes as usize) {
        Ok(arena) => {
            let model = Arc::new(Mutex::new(Model::new(setup.keys, node || setup.keep_percent > 0)));
            let env = Environment { world: world.clone(), model, arena, setup: Arc::new(setup) };
            panics::catch_panics(|| run_incarnations(&env, options, &mut random)).unwrap_or_else(|panic| {
                world.violate(panic);
                0
            })
        }
        Err(error) => {
            world.violate(format!("the arena could not be allocated: {error}"));
            0
        }
    };
    report(&world, options, profile, operations)
}

fn run_wire(seed: u64, profile: Profile, options: &Options, mut random: RandomSource) -> SeedReport {
    let setup = ClusterSetup::draw(profile, &mut random);
    let faults = Faults::draw(profile, &mut random);
    let world = Arc::new(World::new(seed, setup.nodes, faults, options.verbose));
    let run = || wire::run(&world, setup, options.operations, &mut random);
    let operations = panics::catch_panics(run).unwrap_or_else(|panic| {
        world.violate(panic);
        0
    });
    report(&world, options, profile, operations)
}

/// Runs one incarnation after the other until the operations are done. Returns the number of
/// operations performed.
fn run_incarnations(env: &Environment, options: &Options, random: &mut RandomSource) -> u64 {
    let setup = &env.setup;
    let mut done = 0;
    let mut number = 0;
    let mut segments = setup.segments;
    let mut bounds_pages = false;
    let mut carryover = Carryover::default();
    let drawn = *env.world.faults.lock();
    while !env.world.failed() {
        number += 1;
        if number > INCARNATIONS_MAX {
            env.world.violate(format!("{INCARNATIONS_MAX} incarnations performed only {done} operations"));
            break;
        }
        let last = done >= options.operations;
        // The capacity changes now and then, and so does the bound of pages. A smaller log evicts
        // its oldest pages, so nothing is expected of them.
        if random.chance(250_000) {
            let other = setup.draw_segments(random);
            if other < segments {
                carryover.expected.clear();
            }
            segments = other;
        }
        let is_bounded = random.chance(setup.page_bound_rate);
        if is_bounded && !bounds_pages {
            carryover.expected.clear();
        }
        bounds_pages = is_bounded;
        let size = LogSize { segments, bounds_pages };
        let plan = match last {
            true => IncarnationPlan { number, operations: 0, events: u64::MAX, end: Ending::Quiescent, size },
            false => plan(setup, number, options.operations - done, size, random),
        };
        step_clock(&env.world, setup.clock_step_rate, random);
        // The previous incarnation may have ended with its faults switched off.
        *env.world.faults.lock() = drawn;
        carryover = run_incarnation(env, plan, carryover);
        done += carryover.operations;
        if last {
            break;
        }
    }
    done
}

fn plan(setup: &Setup, number: u64, left: u64, size: LogSize, random: &mut RandomSource) -> IncarnationPlan {
    let operations = random.between(1, setup.incarnation_operations * 2).min(left);
    // A crash may happen at any event. One time in ten it hits the start of the node.
    let events = match (setup.profile.crashes(), random.below(10)) {
        (false, _) => u64::MAX,
        (true, 0) => random.between(1, 60),
        (true, 1) => random.between(1, 600),
        (true, 2..8) => random.between(1, operations * 2),
        (true, _) => u64::MAX,
    };
    let end = if random.chance(500_000) { Ending::Closed } else { Ending::Dropped };
    IncarnationPlan { number, operations, events, end, size }
}

/// Sets the wall clock back between two incarnations, or rarely forward.
fn step_clock(world: &World, rate: u32, random: &mut RandomSource) {
    if !random.chance(rate) {
        return;
    }
    let most = [100, 5_000, 60_000, 7_200_000][random.below(4) as usize];
    let by_ms = random.between(1, most) as i64;
    world.step_clock(if random.chance(250_000) { by_ms } else { -by_ms });
}

/// Runs one incarnation in a runtime of its own, and returns its expectations for the next one. The
/// drop of the runtime ends every task, as a crash does.
fn run_incarnation(env: &Environment, plan: IncarnationPlan, carryover: Carryover) -> Carryover {
    let operations = Arc::new(AtomicU64::new(plan.operations));
    let mut left = match env.setup.node {
        Some(_) => {
            let mut node = NodeRun::new(env.clone(), plan, carryover, operations.clone());
            drive(env, plan, &mut node);
            node.carryover()
        }
        None => {
            let mut log = LogRun::new(env.clone(), plan, carryover, operations.clone());
            drive(env, plan, &mut log);
            log.carryover()
        }
    };
    left.operations = plan.operations - operations.load(Ordering::Relaxed);
    left
}

fn report(world: &World, options: &Options, profile: Profile, operations: u64) -> SeedReport {
    let (hash, events) = world.hash();
    let violations = world.violations();
    SeedReport {
        seed: world.seed,
        scope: options.scope,
        large: options.large,
        profile: profile.name(),
        hash,
        events,
        operations_requested: options.operations,
        operations,
        virtual_ms: world.now_ms(),
        counts: world.counts(),
        tail: if violations.is_empty() { Vec::new() } else { world.tail() },
        violations,
    }
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Summary {
    pub seeds: u64,
    pub operations: u64,
    pub virtual_hours: f64,
    pub seconds: f64,
    pub counts: BTreeMap<&'static str, u64>,
    pub failed: Vec<SeedReport>,
}

impl Summary {
    fn add(&mut self, report: SeedReport) {
        self.seeds += 1;
        self.operations += report.operations;
        self.virtual_hours += report.virtual_ms as f64 / 3.6e6;
        for (counter, count) in &report.counts {
            *self.counts.entry(counter).or_default() += count;
        }
        if !report.violations.is_empty() {
            self.failed.push(report);
            self.failed.sort_by_key(|report| report.seed);
        }
    }

    pub fn count(&self, counter: &str) -> u64 {
        self.counts.get(counter).copied().unwrap_or(0)
    }

    /// Counters of the exemptions that the oracles granted.
    pub fn forgiven(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.counts
            .iter()
            .filter(|(counter, _)| counter.starts_with(FORGIVEN))
            .map(|(counter, count)| (*counter, *count))
    }
}

/// Runs seeds from `first` on, on all cores. Ends after `seeds` seeds, or starts no seed after
/// `limit`.
pub fn run_seeds(first: u64, seeds: u64, limit: Option<Duration>, options: &Options) -> Summary {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let summary = Mutex::new(Summary::default());
    let began = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let work = || {
        // Relaxed: the flag ends the loop some time later and orders nothing.
        while !stop.load(Ordering::Relaxed) && limit.is_none_or(|limit| began.elapsed() < limit) {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            if turn >= seeds {
                return;
            }
            let report = run_seed(first + turn, options);
            stop.fetch_or(!options.keep_going && !report.violations.is_empty(), Ordering::Relaxed);
            summary.lock().add(report);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let mut summary = summary.into_inner();
    summary.seconds = began.elapsed().as_secs_f64();
    summary
}
