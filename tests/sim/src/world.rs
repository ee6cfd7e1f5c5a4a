//! What outlives the node: the device's content, virtual time, the trace, and what was found wrong.
//!
//! Always true: only one thread uses a world, so that its locks are never contended and the order of events follows from
//! the seed.

use crate::disk::Disk;
use crate::faults::Faults;
use crate::trace::{Event, Trace};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Violations that are kept; the first says most.
const VIOLATIONS_KEPT: usize = 8;

/// The time of day at which every seed begins.
const BEGAN_UNIX_MS: u64 = 1_700_000_000_123;

/// The surroundings of one seed.
#[derive(Debug)]
pub struct World {
    /// The seed.
    pub seed: u64,
    /// What is stored, by device.
    pub disks: Vec<Mutex<Disk>>,
    /// What goes wrong from now on.
    pub faults: Mutex<Faults>,
    trace: Mutex<Trace>,
    clock: Mutex<Clock>,
    violations: Mutex<Vec<String>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Debug, Default)]
struct Clock {
    /// Milliseconds that earlier lives took.
    base_ms: u64,
    /// When the runtime of this life was made, in its own time.
    life_began: Option<Instant>,
}

impl World {
    /// Empty devices at time 0.
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

    /// A life begins in a runtime whose clock stands still.
    pub fn life_begins(&self) {
        self.clock.lock().life_began = Some(Instant::now());
    }

    /// It is over; the next one goes on at the same time.
    pub fn life_ends(&self) {
        let mut clock = self.clock.lock();
        clock.base_ms += clock.life_began.take().map_or(0, |began| (Instant::now() - began).as_millis() as u64);
    }

    /// Virtual milliseconds since the seed began.
    pub fn now_ms(&self) -> u64 {
        let clock = self.clock.lock();
        clock.base_ms + clock.life_began.map_or(0, |began| (Instant::now() - began).as_millis() as u64)
    }

    /// The time of day, in milliseconds since 1970.
    pub fn unix_ms(&self) -> u64 {
        BEGAN_UNIX_MS + self.now_ms()
    }

    /// When that is, for timers of this life.
    pub fn instant(&self, at_ms: u64) -> Instant {
        let clock = self.clock.lock();
        let began = clock.life_began.unwrap_or_else(Instant::now);
        began + Duration::from_millis(at_ms.saturating_sub(clock.base_ms))
    }

    /// Whether forgotten pages of a key may come back, because a device lied about its tombstones.
    pub fn is_suspect(&self, key: u64) -> bool {
        self.disks.iter().any(|disk| disk.lock().is_suspect(key))
    }

    /// Adds an event to the trace.
    pub fn event(&self, what: &'static str, numbers: [u64; 3]) {
        let event = Event { at_ms: self.now_ms(), what, numbers };
        self.trace.lock().add(event);
    }

    /// Counts something that a report tells of.
    pub fn count(&self, what: &'static str, by: u64) {
        *self.counts.lock().entry(what).or_default() += by;
    }

    /// A fault happens: it is counted and traced.
    pub fn fault(&self, what: &'static str, numbers: [u64; 3]) {
        self.count(what, 1);
        self.event(what, numbers);
    }

    /// Something that must not be.
    pub fn violate(&self, what: String) {
        self.event("VIOLATION", [0; 3]);
        let mut violations = self.violations.lock();
        if violations.len() < VIOLATIONS_KEPT {
            violations.push(format!("at {} ms: {what}", self.now_ms()));
        }
    }

    /// Whether anything was found wrong.
    pub fn failed(&self) -> bool {
        !self.violations.lock().is_empty()
    }

    /// What was found wrong.
    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    /// What was counted.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().clone()
    }

    /// The hash over all events, and their number.
    pub fn hash(&self) -> (u64, u64) {
        let trace = self.trace.lock();
        (trace.hash(), trace.events())
    }

    /// The last events.
    pub fn tail(&self) -> Vec<String> {
        self.trace.lock().tail()
    }
}
