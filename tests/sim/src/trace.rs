//! History of a run: a hash over all events, and the last events as text.
//!
//! Invariant: two runs of a seed with equal hashes had the same events, in the same order, at the
//! same virtual times, except for collisions of the 64-bit hash. Equal runs have equal hashes.

use std::collections::VecDeque;

const KEPT: usize = 60;

#[derive(Debug, Clone, Copy)]
pub struct Event {
    pub at_ms: u64,
    pub name: &'static str,
    /// Arguments, whose meaning depends on the kind.
    pub numbers: [u64; 3],
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c] = self.numbers;
        write!(f, "{:>8} ms  {:<18} {a} {b} {c}", self.at_ms, self.name)
    }
}

/// Events of one seed. All of them enter the hash. Only the last ones are kept as text, because a
/// long seed has too many.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    events: u64,
    kept: VecDeque<Event>,
    verbose: bool,
}

impl Trace {
    pub fn new(verbose: bool) -> Trace {
        Trace { hash: 0xcbf2_9ce4_8422_2325, events: 0, kept: VecDeque::with_capacity(KEPT), verbose }
    }

    /// Mixes an event into the hash: FNV-1a over words of 64 bits, with a rotation after each.
    /// Drops the oldest of the kept events if there are too many.
    pub fn add(&mut self, event: Event) {
        let mut mix = |value: u64| self.hash = (self.hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        mix(event.at_ms);
        event.name.bytes().for_each(|byte| mix(byte.into()));
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

    pub fn hash(&self) -> u64 {
        self.hash
    }

    pub fn events(&self) -> u64 {
        self.events
    }

    pub fn tail(&self) -> Vec<String> {
        self.kept.iter().map(ToString::to_string).collect()
    }
}
