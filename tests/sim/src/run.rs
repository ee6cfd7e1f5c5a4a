//! A seed from begin to end, and many seeds.
//!
//! Always true: a seed's report follows from the seed and the options alone.

use crate::dice::{Dice, Stream};
use crate::faults::{Faults, Profile};
use crate::life::{End, Ground, Legacy, Plan, live};
use crate::model::Model;
use crate::panics;
use crate::setup::Setup;
use crate::wire::{self, WireSetup};
use crate::world::World;
use larder_device::Arena;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// No seed takes more lives: one that crashes before it does anything is rare.
const LIVES_MAX: u64 = 10_000;

/// What is simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Subject {
    /// L3 alone.
    #[default]
    L3,
    /// A whole node without its sockets.
    Node,
    /// Clients and nodes, and what is between them.
    Wire,
}

/// What to run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Operations per seed.
    pub operations: u64,
    /// A control: syncs are answered and do nothing.
    pub lying_syncs: bool,
    /// Of what.
    pub subject: Subject,
    /// Which faults; by the seed if not given.
    pub profile: Option<Profile>,
    /// Print every event.
    pub verbose: bool,
    /// Go on after a seed failed.
    pub keep_going: bool,
}

/// What came of one seed.
#[derive(Debug, Clone, Serialize)]
pub struct SeedReport {
    /// The seed.
    pub seed: u64,
    /// Of what it was.
    pub subject: Subject,
    /// Which faults it had.
    pub profile: &'static str,
    /// Hash over all events.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
    /// Operations asked for.
    pub operations_asked: u64,
    /// Operations done.
    pub operations: u64,
    /// Virtual milliseconds.
    pub virtual_ms: u64,
    /// What was counted.
    pub counts: BTreeMap<&'static str, u64>,
    /// What was found wrong; empty if nothing.
    pub violations: Vec<String>,
    /// The last events, if something was.
    pub tail: Vec<String>,
}

impl SeedReport {
    /// Arguments of the command that replay it.
    pub fn replay(&self) -> String {
        let subject = match self.subject {
            Subject::L3 => "",
            Subject::Node => "node-",
            Subject::Wire => "wire-",
        };
        let SeedReport { profile, seed, operations_asked, .. } = self;
        format!("--profile {subject}{profile} --seed {seed} --operations {operations_asked} --verbose")
    }
}

/// Runs one seed.
pub fn run_seed(seed: u64, options: &Options) -> SeedReport {
    let mut dice = Dice::new(seed, Stream::Setup);
    let profile = options.profile.unwrap_or_else(|| Profile::of_seed(seed));
    if options.subject == Subject::Wire {
        return run_wire(seed, profile, options, dice);
    }
    let node = options.subject == Subject::Node;
    let draw = if node { Setup::draw_node } else { Setup::draw };
    let setup = draw(profile, options.operations, &mut dice);
    let devices = setup.node.as_ref().map_or(1, |node| node.devices);
    let mut faults = Faults::draw(profile, &mut dice);
    faults.sync_lie = if options.lying_syncs { 1_000_000 } else { 0 };
    let world = Arc::new(World::new(seed, devices, faults, options.verbose));
    let operations = match Arena::new(setup.arena_bytes as usize) {
        Ok(arena) => {
            let model = Arc::new(Mutex::new(Model::new(setup.keys, node || setup.keep_percent > 0)));
            let ground = Ground { world: world.clone(), model, arena, setup: Arc::new(setup) };
            panics::watched(|| lives(&ground, options, &mut dice)).unwrap_or_else(|panic| {
                world.violate(panic);
                0
            })
        }
        Err(error) => {
            world.violate(format!("no memory for the arena: {error}"));
            0
        }
    };
    report(&world, options, profile, operations)
}

/// Runs one seed of clients and nodes.
fn run_wire(seed: u64, profile: Profile, options: &Options, mut dice: Dice) -> SeedReport {
    let setup = WireSetup::draw(profile, &mut dice);
    let faults = Faults::draw(profile, &mut dice);
    let world = Arc::new(World::new(seed, setup.nodes, faults, options.verbose));
    let run = || wire::run(&world, setup, options.operations, &mut dice);
    let operations = panics::watched(run).unwrap_or_else(|panic| {
        world.violate(panic);
        0
    });
    report(&world, options, profile, operations)
}

/// One life after the other until the operations are done.
fn lives(ground: &Ground, options: &Options, dice: &mut Dice) -> u64 {
    let setup = &ground.setup;
    let (mut done, mut number, mut segments, mut legacy) = (0, 0, setup.segments, Legacy::default());
    let drawn = *ground.world.faults.lock();
    while !ground.world.failed() {
        number += 1;
        if number > LIVES_MAX {
            ground.world.violate(format!("{LIVES_MAX} lives and only {done} operations"));
            break;
        }
        let last = done >= options.operations;
        // Room changes now and then; less of it takes the oldest pages.
        if dice.chance(250_000) {
            let other = dice.between(3, 10);
            if other < segments {
                legacy.expected.clear();
            }
            segments = other;
        }
        let plan = match last {
            true => Plan { number, operations: 0, events: u64::MAX, end: End::Last, segments },
            false => plan(setup, number, options.operations - done, segments, dice),
        };
        *ground.world.faults.lock() = drawn;
        legacy = live(ground, plan, legacy);
        done += legacy.operations;
        if last {
            break;
        }
    }
    done
}

fn plan(setup: &Setup, number: u64, left: u64, segments: u64, dice: &mut Dice) -> Plan {
    let operations = dice.between(1, setup.life_operations * 2).min(left);
    // A crash may come at any event, and one time in ten while the node starts.
    let events = match (setup.profile.crashes(), dice.below(10)) {
        (false, _) => u64::MAX,
        (true, 0) => dice.between(1, 60),
        (true, 1) => dice.between(1, 600),
        (true, 2..8) => dice.between(1, operations * 2),
        (true, _) => u64::MAX,
    };
    let end = if dice.chance(500_000) { End::Closed } else { End::Dropped };
    Plan { number, operations, events, end, segments }
}

fn report(world: &World, options: &Options, profile: Profile, operations: u64) -> SeedReport {
    let (hash, events) = world.hash();
    let violations = world.violations();
    SeedReport {
        seed: world.seed,
        subject: options.subject,
        profile: profile.name(),
        hash,
        events,
        operations_asked: options.operations,
        operations,
        virtual_ms: world.now_ms(),
        counts: world.counts(),
        tail: if violations.is_empty() { Vec::new() } else { world.tail() },
        violations,
    }
}

/// What came of many seeds.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Summary {
    /// Seeds run.
    pub seeds: u64,
    /// Operations done.
    pub operations: u64,
    /// Virtual hours.
    pub virtual_hours: f64,
    /// Seconds that it took.
    pub seconds: f64,
    /// What was counted, over all seeds.
    pub counts: BTreeMap<&'static str, u64>,
    /// The seeds in which something was found wrong.
    pub failed: Vec<SeedReport>,
}

impl Summary {
    fn add(&mut self, report: SeedReport) {
        self.seeds += 1;
        self.operations += report.operations;
        self.virtual_hours += report.virtual_ms as f64 / 3.6e6;
        for (what, count) in &report.counts {
            *self.counts.entry(what).or_default() += count;
        }
        if !report.violations.is_empty() {
            self.failed.push(report);
            self.failed.sort_by_key(|report| report.seed);
        }
    }

    /// How often something was counted.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }
}

/// Runs seeds from `first` on, on all cores: `seeds` of them, or as many as begin within `limit`.
pub fn run_seeds(first: u64, seeds: u64, limit: Option<Duration>, options: &Options) -> Summary {
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let summary = Mutex::new(Summary::default());
    let began = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let work = || {
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
