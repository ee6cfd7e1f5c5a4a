//! Refused connections that have no place in the line, in the order of their first refusals.
//!
//! They hold no room. A free place of the line goes to the first of them that return: with n free
//! places, to one that has fewer than n others ahead. So newcomers cannot overtake for long.
//!
//! Invariants:
//! - A connection is here or has a place, never both. So the connections bound the queue.
//! - A connection that is late keeps its position, and no free place. It leaves [`LATE_MAX`] later.
//! - Each operation costs O(log n) for n connections, or O(places).

use super::line::LATE_MAX;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Position in the order of first refusals.
#[derive(Debug, Clone, Copy)]
pub(super) struct Refused {
    pub(super) arrival: u64,
    /// First refusal that was not followed by a grant.
    pub(super) since: Instant,
}

struct Waiting {
    refused: Refused,
    /// Key in `ends`.
    ends_at: Instant,
    /// The connection is on time: it keeps a free place from those behind it.
    is_expected: bool,
}

#[derive(Default)]
pub(super) struct PlaceQueue {
    waiting: BTreeMap<u64, Waiting>,
    /// Arrivals of the expected connections.
    expected: BTreeSet<u64>,
    /// Times at which a connection becomes late, or leaves.
    ends: BTreeSet<(Instant, u64)>,
}

impl PlaceQueue {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn get(&self, connection: u64) -> Option<Refused> {
        self.waiting.get(&connection).map(|waiting| waiting.refused)
    }

    /// Adds a connection that is expected until `holds_until`.
    pub(super) fn insert(&mut self, connection: u64, refused: Refused, holds_until: Instant) {
        self.remove(connection);
        self.expected.insert(refused.arrival);
        self.ends.insert((holds_until, connection));
        self.waiting.insert(connection, Waiting { refused, ends_at: holds_until, is_expected: true });
    }

    /// Adds a connection that is late already.
    pub(super) fn insert_late(&mut self, connection: u64, refused: Refused, holds_until: Instant) {
        self.insert(connection, refused, holds_until);
        self.end(connection);
    }

    /// Expects a connection until `holds_until`. Does nothing if it is not here.
    pub(super) fn keep_until(&mut self, connection: u64, holds_until: Instant) {
        if let Some(refused) = self.get(connection) {
            self.insert(connection, refused, holds_until);
        }
    }

    pub(super) fn remove(&mut self, connection: u64) -> Option<Refused> {
        let waiting = self.waiting.remove(&connection)?;
        self.ends.remove(&(waiting.ends_at, connection));
        if waiting.is_expected {
            self.expected.remove(&waiting.refused.arrival);
        }
        Some(waiting.refused)
    }

    /// Makes connections late whose time is over, and removes those that are late for too long.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(&(ends_at, connection)) = self.ends.first()
            && ends_at < now
        {
            self.end(connection);
        }
    }

    /// Makes an expected connection late, or removes a late one.
    fn end(&mut self, connection: u64) {
        let Some(waiting) = self.waiting.get_mut(&connection) else { return };
        if !waiting.is_expected {
            self.remove(connection);
            return;
        }
        waiting.is_expected = false;
        self.expected.remove(&waiting.refused.arrival);
        self.ends.remove(&(waiting.ends_at, connection));
        waiting.ends_at += LATE_MAX;
        self.ends.insert((waiting.ends_at, connection));
    }

    /// Returns `true` if fewer than `count` expected connections came before `arrival`.
    pub(super) fn is_among_first(&self, arrival: u64, count: usize) -> bool {
        self.expected.range(..arrival).take(count).count() < count
    }

    /// Estimates the number of expected connections before `arrival`. Exact while they have
    /// consecutive arrivals: none behind the first has left, or got a place at once.
    pub(super) fn estimated_ahead(&self, arrival: u64) -> u64 {
        let (Some(&first), Some(&last)) = (self.expected.first(), self.expected.last()) else { return 0 };
        let before = arrival.saturating_sub(first).min(last - first);
        let span = u128::from(last - first) + 1;
        // At most the number of connections.
        u64::try_from(u128::from(before) * self.expected.len() as u128 / span).unwrap_or(u64::MAX)
    }
}

/// Time after which the place of a connection with `ahead` others before it is free. `line_time`
/// is that of a connection behind all `places` of a line that has room for `most`.
///
/// The connection returns while the line is still long, or the room would be empty until then.
pub(super) fn time_for_place(line_time: Duration, ahead: u64, (places, most): (usize, usize)) -> Duration {
    let ends = (ahead + 1).saturating_sub((most - places) as u64);
    // A short line says little about the time of one place.
    line_time.mul_f64(ends as f64 / places.max(PLACES_MIN) as f64 + SLACK)
}

/// Places whose time is known well enough to tell that of one.
const PLACES_MIN: usize = 8;
/// Part of a line's time that is added: places end several at once.
const SLACK: f64 = 0.25;
