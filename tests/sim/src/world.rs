//! State that outlives a node: device contents, virtual time, the trace, and violations.
//!
//! Invariant: one thread uses a world. Its locks are never contended, so the order of events
//! follows from the seed.

use crate::disk::Disk;
use crate::faults::Faults;
use crate::trace::{Event, Trace};
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Bound on reported violations. The first one explains most.
const VIOLATIONS_KEPT: usize = 8;

/// Begins the names of the counters of exemptions.
pub const FORGIVEN: &str = "forgiven: ";

const BEGAN_UNIX_MS: u64 = 1_700_000_000_123;

/// Surroundings of one seed: the state that outlives an incarnation. One thread uses it, so its
/// locks are never contended.
#[derive(Debug)]
pub struct World {
    pub seed: u64,
    pub disks: Vec<Mutex<Disk>>,
    pub faults: Mutex<Faults>,
    trace: Mutex<Trace>,
    clock: Mutex<Clock>,
    violations: Mutex<Vec<String>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Debug, Default)]
struct Clock {
    base_ms: u64,
    /// Difference of the machine's wall clock to virtual time. Steps between incarnations change
    /// it.
    wall_offset_ms: i64,
    /// Start of the current incarnation, by the clock of its runtime. Each runtime has its own
    /// virtual clock.
    incarnation_began: Option<Instant>,
}

impl World {
    pub fn new(seed: u64, devices: usize, faults: Faults, verbose: bool) -> World {
        World {
            seed,
            disks: (0..devices).map(|_| Mutex::default()).collect(),
            faults: Mutex::new(faults),
            trace: Mutex::new(Trace::new(verbose)),
            clock: Mutex::default(),
            violations: Mutex::default(),
            counts: Mutex::default(),
        }
    }

    /// Starts the clock of an incarnation. Must run inside its runtime, whose clock is paused:
    /// virtual time passes only while all tasks wait.
    pub fn incarnation_begins(&self) {
        self.clock.lock().incarnation_began = Some(Instant::now());
    }

    /// Stops the clock. The next incarnation continues at the same virtual time, although its
    /// runtime has a clock of its own.
    pub fn incarnation_ends(&self) {
        let mut clock = self.clock.lock();
        clock.base_ms += clock.incarnation_began.take().map_or(0, |began| (Instant::now() - began).as_millis() as u64);
    }

    /// Virtual time since the start of the seed, in milliseconds. It goes on from one incarnation
    /// to the next, and stands still between them.
    pub fn now_ms(&self) -> u64 {
        let clock = self.clock.lock();
        clock.base_ms + clock.incarnation_began.map_or(0, |began| (Instant::now() - began).as_millis() as u64)
    }

    /// Wall clock of the machine. It advances with virtual time, except for [`World::step_clock`].
    /// In milliseconds since 1970-01-01 UTC.
    pub fn unix_ms(&self) -> u64 {
        let offset = self.clock.lock().wall_offset_ms;
        BEGAN_UNIX_MS.saturating_add_signed(offset) + self.now_ms()
    }

    /// Moves the wall clock, mostly back. Virtual time and its timers do not change.
    pub fn step_clock(&self, by_ms: i64) {
        self.clock.lock().wall_offset_ms += by_ms;
        self.fault(if by_ms < 0 { "clock set back" } else { "clock set forward" }, [by_ms.unsigned_abs(), 0, 0]);
    }

    /// Converts a virtual time to an instant of the current runtime, for timers. Panics if that
    /// time lies before this incarnation.
    pub fn instant(&self, at_ms: u64) -> Instant {
        let clock = self.clock.lock();
        let began = clock.incarnation_began.unwrap_or_else(Instant::now);
        assert!(at_ms >= clock.base_ms, "timers belong to the current incarnation");
        began + Duration::from_millis(at_ms - clock.base_ms)
    }

    /// Returns `true` if forgotten pages of a key may return because a device silently damaged
    /// their tombstones.
    fn is_suspect(&self, key: u64) -> bool {
        self.disks.iter().any(|disk| disk.lock().is_suspect(key))
    }

    /// Decides about a broken promise: forgives it, and counts that, if the key is suspect.
    pub fn forgives_suspect(&self, key: u64) -> bool {
        let is_suspect = self.is_suspect(key);
        self.forgive("forgiven: suspect key", is_suspect.into());
        is_suspect
    }

    /// Runs a check of a key. If it fails and the key is suspect, repeats it with the parameter
    /// `true`, and counts a success as forgiven.
    pub fn check_key<T>(&self, key: u64, check: impl Fn(bool) -> Result<T, String>) -> Result<T, String> {
        check(false).or_else(|problem| match self.is_suspect(key) {
            true => check(true).inspect(|_| self.forgive("forgiven: suspect key", 1)),
            false => Err(problem),
        })
    }

    /// Counts broken or unchecked promises that the fault model exempts. The name of the counter
    /// begins with [`FORGIVEN`].
    pub fn forgive(&self, counter: &'static str, by: u64) {
        if by > 0 {
            self.count(counter, by);
        }
    }

    pub fn event(&self, name: &'static str, numbers: [u64; 3]) {
        let event = Event { at_ms: self.now_ms(), name, numbers };
        self.trace.lock().add(event);
    }

    pub fn count(&self, name: &'static str, by: u64) {
        *self.counts.lock().entry(name).or_default() += by;
    }

    pub fn fault(&self, name: &'static str, numbers: [u64; 3]) {
        self.count(name, 1);
        self.event(name, numbers);
    }

    /// Reports a violated promise, which ends the seed soon. Keeps the first [`VIOLATIONS_KEPT`]
    /// texts, because later ones mostly follow from them.
    pub fn violate(&self, problem: String) {
        self.event("VIOLATION", [0; 3]);
        // A broken seed may violate a promise at every operation. The first ones explain the rest.
        let mut violations = self.violations.lock();
        if violations.len() < VIOLATIONS_KEPT {
            violations.push(format!("at {} ms: {problem}", self.now_ms()));
        }
    }

    pub fn failed(&self) -> bool {
        !self.violations.lock().is_empty()
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().clone()
    }

    /// Hash over all events, and their number. Two runs of a seed with different hashes prove that
    /// something besides the seed decides.
    pub fn hash(&self) -> (u64, u64) {
        let trace = self.trace.lock();
        (trace.hash(), trace.events())
    }

    pub fn tail(&self) -> Vec<String> {
        self.trace.lock().tail()
    }
}
