//! What happened in a run: a hash over all events, and the last of them in words.
//!
//! Always true: two runs of a seed have the same hash if and only if they had the same events in the same order at the
//! same virtual times (but for collisions of a 64-bit hash).

use std::collections::VecDeque;

/// Events that are kept for the report of a failure.
const KEPT: usize = 60;

/// One event.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// Virtual milliseconds since the seed began.
    pub at_ms: u64,
    /// What.
    pub what: &'static str,
    /// Its particulars.
    pub numbers: [u64; 3],
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c] = self.numbers;
        write!(f, "{:>8} ms  {:<18} {a} {b} {c}", self.at_ms, self.what)
    }
}

/// The events of one seed.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    events: u64,
    kept: VecDeque<Event>,
    verbose: bool,
}

impl Trace {
    /// No events yet. A verbose one prints each.
    pub fn new(verbose: bool) -> Trace {
        Trace { hash: 0xcbf2_9ce4_8422_2325, events: 0, kept: VecDeque::with_capacity(KEPT), verbose }
    }

    /// Adds one.
    pub fn add(&mut self, event: Event) {
        let mut mix = |value: u64| self.hash = (self.hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        mix(event.at_ms);
        event.what.bytes().for_each(|byte| mix(byte.into()));
        event.numbers.iter().for_each(|&number| mix(number));
        self.events += 1;
        if self.verbose {
            println!("{event}");
        }
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
    }

    /// The hash so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// The last events, oldest first.
    pub fn tail(&self) -> Vec<String> {
        self.kept.iter().map(ToString::to_string).collect()
    }
}
