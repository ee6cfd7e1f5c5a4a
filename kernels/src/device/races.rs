//! Finds operations of several streams that overlap in memory and are not ordered.
//!
//! Each stream has a vector clock: for every stream the number of its operations that precede the
//! next one here. Stream order, events and waits of the host advance the clocks (Mattern, "Virtual
//! Time and Global States of Distributed Systems", 1989). All calls of the host count as one
//! thread, so a race between two host threads that share no event can stay unnoticed.
//!
//! Invariant: an access leaves the history only if every later conflict with it is also a conflict
//! with an access that stays, or if the host has waited for it.

use super::DeviceError;
use std::ops::Range;
use std::sync::Arc;

/// Accesses that the history holds. Beyond it the oldest are dropped, and their races stay
/// unnoticed.
const HISTORY_LIMIT: usize = 1 << 16;

/// Vector clock, indexed by stream. Missing entries are 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    fn at(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    fn set(&mut self, stream: usize, count: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = count;
    }

    fn join(&mut self, other: &Clock) {
        for (stream, &count) in other.0.iter().enumerate() {
            if self.at(stream) < count {
                self.set(stream, count);
            }
        }
    }
}

/// Range of addresses that an operation accesses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Touch {
    pub(super) range: Range<u64>,
    pub(super) writes: bool,
}

#[derive(Debug)]
struct Access {
    stream: usize,
    /// Number of the operation in its stream, from 1.
    number: u64,
    touch: Touch,
    operation: Arc<str>,
}

#[derive(Debug, Default)]
pub(super) struct Races {
    streams: Vec<Clock>,
    host: Clock,
    history: Vec<Access>,
}

impl Races {
    /// Adds a stream and returns its index.
    pub(super) fn add_stream(&mut self) -> usize {
        self.streams.push(self.host.clone());
        self.streams.len() - 1
    }

    /// Checks the next operation of `stream`, and adds it to the history if it has no race.
    pub(super) fn operation(&mut self, stream: usize, touches: &[Touch], name: &str) -> Result<(), DeviceError> {
        let mut clock = self.streams[stream].clone();
        clock.join(&self.host);
        let number = clock.at(stream) + 1;
        clock.set(stream, number);
        for touch in touches {
            if let Some(earlier) = self.history.iter().find(|access| conflicts(access, touch, &clock)) {
                let both = overlap(&earlier.touch.range, &touch.range);
                return Err(DeviceError::Race {
                    first: earlier.operation.to_string(),
                    second: name.to_string(),
                    range: format!("{} bytes at {:#x}", both.end - both.start, both.start),
                });
            }
        }
        let operation: Arc<str> = name.into();
        for touch in touches.iter().filter(|touch| !touch.range.is_empty()) {
            self.history.retain(|access| !is_covered(access, touch, &clock));
            let operation = Arc::clone(&operation);
            self.history.push(Access { stream, number, touch: touch.clone(), operation });
        }
        if self.history.len() > HISTORY_LIMIT {
            self.history.drain(..self.history.len() - HISTORY_LIMIT);
        }
        self.streams[stream] = clock;
        Ok(())
    }

    /// Clock of an event at the present end of `stream`.
    pub(super) fn record(&self, stream: usize) -> Clock {
        let mut clock = self.streams[stream].clone();
        clock.join(&self.host);
        clock
    }

    /// Orders later operations of `stream` after an event.
    pub(super) fn wait_for(&mut self, stream: usize, event: &Clock) {
        self.streams[stream].join(event);
    }

    /// Orders everything later after an event for which the host has waited.
    pub(super) fn host_waited(&mut self, event: &Clock) {
        self.host.join(event);
        let host = &self.host;
        self.history.retain(|access| host.at(access.stream) < access.number);
    }

    /// Forgets memory that is freed, as another allocation may get its addresses.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.history.retain(|access| overlap(&access.touch.range, range).is_empty());
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.max(b.start)..a.end.min(b.end)
}

fn conflicts(earlier: &Access, touch: &Touch, clock: &Clock) -> bool {
    (earlier.touch.writes || touch.writes)
        && clock.at(earlier.stream) < earlier.number
        && !overlap(&earlier.touch.range, &touch.range).is_empty()
}

/// Returns `true` if `touch` comes after `earlier`, contains its range, and conflicts with at least
/// as much.
fn is_covered(earlier: &Access, touch: &Touch, clock: &Clock) -> bool {
    (touch.writes || !earlier.touch.writes)
        && clock.at(earlier.stream) >= earlier.number
        && touch.range.start <= earlier.touch.range.start
        && earlier.touch.range.end <= touch.range.end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(range: Range<u64>) -> Touch {
        Touch { range, writes: false }
    }

    fn writes(range: Range<u64>) -> Touch {
        Touch { range, writes: true }
    }

    fn two_streams() -> (Races, usize, usize) {
        let mut races = Races::default();
        let (a, b) = (races.add_stream(), races.add_stream());
        (races, a, b)
    }

    #[test]
    fn unordered_operations_race_if_one_writes_a_common_byte() {
        for (first, second, race) in [
            (writes(0..10), reads(9..12), true),
            (reads(0..10), writes(0..1), true),
            (writes(0..10), writes(3..4), true),
            (reads(0..10), reads(0..10), false),
            (writes(0..10), writes(10..20), false),
            (writes(0..10), writes(5..5), false),
        ] {
            let (mut races, a, b) = two_streams();
            races.operation(a, std::slice::from_ref(&first), "first").unwrap();
            let found = races.operation(b, std::slice::from_ref(&second), "second");
            assert_eq!(found.is_err(), race, "{first:?} {second:?}");
            if let Err(error) = found {
                let text = error.to_string();
                assert!(text.contains("first") && text.contains("second"), "{text}");
            }
        }
    }

    #[test]
    fn events_order_operations_and_later_work_stays_unordered() {
        let (mut races, a, b) = two_streams();
        races.operation(a, &[writes(0..10)], "load").unwrap();
        let event = races.record(a);
        races.operation(a, &[writes(10..20)], "next load").unwrap();
        races.wait_for(b, &event);
        races.operation(b, &[reads(0..10)], "compute").unwrap();
        assert!(races.operation(b, &[reads(0..11)], "compute too early").is_err());
    }

    #[test]
    fn order_is_transitive_over_a_third_stream() {
        let (mut races, a, b) = two_streams();
        let c = races.add_stream();
        races.operation(a, &[writes(0..8)], "write").unwrap();
        let event = races.record(a);
        races.wait_for(b, &event);
        let event = races.record(b);
        races.wait_for(c, &event);
        races.operation(c, &[writes(0..8)], "write after both").unwrap();
    }

    #[test]
    fn a_wait_of_the_host_orders_all_streams() {
        let (mut races, a, b) = two_streams();
        races.operation(a, &[writes(0..8)], "write").unwrap();
        let event = races.record(a);
        races.host_waited(&event);
        races.operation(b, &[writes(0..8)], "write").unwrap();
        assert_eq!(races.history.len(), 1);
    }

    #[test]
    fn a_covering_write_replaces_the_history_and_still_conflicts() {
        let (mut races, a, b) = two_streams();
        for _ in 0..100 {
            races.operation(a, &[reads(2..4), writes(4..6)], "small").unwrap();
            races.operation(a, &[writes(0..10)], "large").unwrap();
        }
        assert_eq!(races.history.len(), 1);
        assert!(races.operation(b, &[reads(4..5)], "reader").is_err());
    }

    #[test]
    fn freed_memory_has_no_history() {
        let (mut races, a, b) = two_streams();
        races.operation(a, &[writes(0..8), writes(16..24)], "write").unwrap();
        races.forget(&(0..8));
        races.operation(b, &[writes(0..8)], "new owner").unwrap();
        assert!(races.operation(b, &[reads(16..17)], "reader").is_err());
    }
}
