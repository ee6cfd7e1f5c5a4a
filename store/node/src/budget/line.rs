//! The line of writers that were refused for lack of room.
//!
//! A refused connection gets a place. Free room goes to the places in order, so a connection that
//! returns as it was told finds room, even if others came meanwhile. Beyond the places, refused
//! connections queue for a place.
//!
//! Invariants:
//! - A connection has at most one place, and the line at most [`PLACES_MAX`].
//! - Free places go to the queue in order: see `place_queue`. A connection gets one at once only if
//!   enough others are left for those that queue.
//! - Tenants take turns: a tenant's second place comes after the first places of the others.
//! - A turn that is being served admits no newcomer while a place waits for a later turn. So a
//!   place that finds n places of its tenant comes before all callers that are refused and get
//!   their place after it, except for at most n * (PLACES_MAX - 1): see [`Line::first_turn`].
//!   Places of its tenant that leave unserved count as if they were there.
//! - A place holds room from a put's time before the connection is to return until soon after that.
//!   A put that begins earlier has usually ended by then, with its write to L3. So room does not
//!   wait for long, unless a connection returns early and is told to wait again.
//! - A late connection keeps its turn without room for [`LATE_MAX`]. Over a slow link even a client
//!   that returns as told is late.
//! - A place ends when its bytes were granted, with its connection, or after that time.

use super::Kind;
use super::place_queue::{PlaceQueue, Refused, time_for_place};
use super::tenants::{TenantNumber, TenantTable};
use larder_runtime::fail_point;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bounds the line, and with it the cost of an admission while writers wait. Further connections
/// queue.
const PLACES_MAX: usize = 128;

/// Time for which a place outlasts the room that it holds.
pub(super) const LATE_MAX: Duration = Duration::from_secs(10);

/// Turn of the place, then the order of arrival.
type PlaceKey = (u64, u64);

struct Place {
    connection: u64,
    tenant: TenantNumber,
    bytes: u64,
    refused: Refused,
    /// First refusal of those since which every time told was meant to be the last. `None` if the
    /// latest one was not.
    estimated_since: Option<Instant>,
    /// Time at which the connection was told to return.
    returns_at: Instant,
    /// The place holds room until then.
    holds_until: Instant,
    /// True once some of its bytes were granted. A further refusal moves it to the end.
    is_served: bool,
}

#[derive(Default)]
pub(super) struct Line {
    places: BTreeMap<PlaceKey, Place>,
    by_connection: BTreeMap<u64, PlaceKey>,
    queue: PlaceQueue,
    arrivals: u64,
    /// Latest turn of which a place was served, since the line was empty.
    served_turn: Option<u64>,
    /// No place is late before this time.
    late_first: Option<Instant>,
}

/// Position of a place that was granted its first bytes. The connection gets it back if the tiers
/// have no room for their page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Served {
    turn: u64,
    refused: Refused,
}

impl Place {
    /// Returns `false` once the connection is late.
    fn holds_room(&self, now: Instant) -> bool {
        now <= self.holds_until
    }

    /// Time at which the connection is expected. Once its time is over, any moment may be the last.
    fn expected_at(&self, now: Instant) -> Instant {
        if now < self.returns_at { self.returns_at } else { self.holds_until }
    }
}

/// Bytes that places ahead of a connection will take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    pub(super) of_tenant: u64,
    pub(super) of_all: u64,
}

/// Places ahead of a connection that room is promised to, in their order.
pub(super) struct PromisedPlaces<'a> {
    places: Vec<&'a Place>,
    /// Tenant of the connection.
    tenant: TenantNumber,
}

impl PromisedPlaces<'_> {
    pub(super) fn bytes(&self) -> Ahead {
        let mut ahead = Ahead::default();
        for place in &self.places {
            ahead.of_all += place.bytes;
            ahead.of_tenant += if place.tenant == self.tenant { place.bytes } else { 0 };
        }
        ahead
    }

    /// Returns the time at which the connection is expected whose put must have ended before
    /// `bytes` more fit into the `room` of `scope`.
    pub(super) fn expected_before(&self, scope: RoomOf, bytes: u64, room: u64, now: Instant) -> Option<Instant> {
        let mut sum = bytes;
        let mut ahead = self.places.iter().filter(|place| scope == RoomOf::Node || place.tenant == self.tenant);
        let blocking = ahead.rfind(|place| {
            sum += place.bytes;
            sum > room
        });
        blocking.map(|place| place.expected_at(now))
    }
}

/// Room for puts that a place waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoomOf {
    Node,
    Tenant,
}

impl Line {
    /// Number of connections that wait, with and without a place.
    pub(super) fn len(&self) -> usize {
        self.places.len() + self.queue.len()
    }

    /// Returns the places ahead of a connection that room is promised to, or all such places if it
    /// has none. `returns_by` limits them to those whose connections return by then. A place of
    /// another tenant that is at its share of `max` takes nothing, because it cannot be served now.
    /// Places of the own tenant always count: they get its room first.
    pub(super) fn promised(
        &self,
        (connection, tenant): (u64, TenantNumber),
        tenants: &TenantTable,
        max: u64,
        (now, returns_by): (Instant, Option<Instant>),
    ) -> PromisedPlaces<'_> {
        if self.places.is_empty() {
            return PromisedPlaces { places: Vec::new(), tenant };
        }
        let own = self.by_connection.get(&connection);
        let mut by_tenant = BTreeMap::<TenantNumber, u64>::new();
        let ahead = self.places.iter().take_while(|(key, _)| own.is_none_or(|own| *key < own));
        let is_promised = |place: &&Place| {
            let promised = by_tenant.entry(place.tenant).or_default();
            let used = tenants.used(place.tenant, Kind::Puts) + *promised;
            let is_other = place.tenant != tenant;
            if is_other && used > 0 && used + place.bytes > tenants.share(place.tenant, Kind::Puts, max) {
                return false;
            }
            *promised += place.bytes;
            true
        };
        let returns = |place: &&Place| returns_by.is_none_or(|by| place.returns_at <= by);
        let places = ahead.map(|(_, place)| place).filter(|place| place.holds_room(now)).filter(returns);
        let places = places.filter(is_promised).collect();
        PromisedPlaces { places, tenant }
    }

    /// Gives a connection a place, or changes the bytes of the place that it has. If too few places
    /// are free for all that were refused earlier, the connection queues. `served` is the position
    /// of a place that was granted bytes, if the tiers had no room for their page.
    pub(super) fn enter(
        &mut self,
        connection: u64,
        (tenant, bytes): (TenantNumber, u64),
        served: Option<Served>,
        now: Instant,
    ) {
        if let Some(key) = self.by_connection.get(&connection)
            && let Some(place) = self.places.get_mut(key)
            && !place.is_served
        {
            place.bytes = bytes;
            return;
        }
        self.end_place(connection);
        if fail_point!("node.line-forgets-callers") {
            return;
        }
        let refused = self.queue.get(connection).or(served.map(|served| served.refused)).unwrap_or_else(|| {
            self.arrivals += 1;
            Refused { arrival: self.arrivals, since: now }
        });
        if !self.may_take_place(refused, now) {
            self.queue.insert(connection, refused, now);
            return;
        }
        self.queue.remove(connection);
        let last = self.places.iter().rfind(|(_, place)| place.tenant == tenant).map(|(&(turn, _), _)| turn + 1);
        let first = self.first_turn();
        // Turns begin anew in an empty line.
        let first = served.map_or(first, |served| served.turn.min(first));
        let key = (last.unwrap_or(0).max(first), refused.arrival);
        let place = Place {
            connection,
            tenant,
            bytes,
            refused,
            estimated_since: None,
            returns_at: now,
            holds_until: now,
            is_served: false,
        };
        self.places.insert(key, place);
        self.by_connection.insert(connection, key);
    }

    /// Turn of a newcomer whose tenant has no place. It is the one that is being served, or the
    /// next one if a place waits for a later turn.
    ///
    /// Later callers get no place before one that enters here. A place that enters n turns later
    /// waits for n turns. Each turn is closed once one of its places was served. All its places are
    /// in the line then, beside the waiting one: `PLACES_MAX` - 1 at most. So new tenants cannot
    /// prolong the wait, although their names are free.
    fn first_turn(&self) -> u64 {
        let Some(served) = self.served_turn else { return 0 };
        let waits_for_later = self.places.last_key_value().is_some_and(|(&(turn, _), _)| turn > served);
        served + u64::from(waits_for_later)
    }

    /// Returns `true` if a place is free for a connection. In a full line a late place makes room
    /// for the first one of the queue.
    fn may_take_place(&mut self, refused: Refused, now: Instant) -> bool {
        let free = PLACES_MAX - self.places.len();
        if free > 0 {
            return self.queue.is_among_first(refused.arrival, free);
        }
        if !self.queue.is_among_first(refused.arrival, 1) {
            return false;
        }
        let Some(late) = self.places.values().find(|place| !place.holds_room(now)) else { return false };
        let (connection, refused, holds_until) = (late.connection, late.refused, late.holds_until);
        self.end_place(connection);
        self.queue.insert_late(connection, refused, holds_until);
        true
    }

    /// Takes the place of a connection back. It queues, at the position of its first refusal.
    pub(super) fn queue_instead(&mut self, connection: u64, now: Instant) {
        if let Some(place) = self.end_place(connection) {
            self.queue.insert(connection, place.refused, now);
        }
    }

    /// Records that the connection was told to return at `returns_at`. Its place holds room until
    /// `holds_until`. `is_estimate` tells that it should find room then.
    pub(super) fn keep_until(
        &mut self,
        connection: u64,
        (returns_at, holds_until): (Instant, Instant),
        is_estimate: bool,
        now: Instant,
    ) {
        self.queue.keep_until(connection, holds_until);
        let key = self.by_connection.get(&connection);
        if let Some(place) = key.and_then(|key| self.places.get_mut(key)) {
            // One that returns early keeps its time, or it would never come near.
            let returns_early = now < place.returns_at;
            place.returns_at = if returns_early { returns_at.min(place.returns_at) } else { returns_at };
            place.holds_until = holds_until;
            place.estimated_since = is_estimate.then_some(place.estimated_since.unwrap_or(now));
            self.late_first = Some(self.late_first.map_or(holds_until, |first| first.min(holds_until)));
        }
    }

    pub(super) fn has_place(&self, connection: u64) -> bool {
        self.by_connection.contains_key(&connection)
    }

    /// Returns `true` if the connection was refused, and waits.
    pub(super) fn has_waiting(&self, connection: u64) -> bool {
        self.has_place(connection) || self.queue.get(connection).is_some()
    }

    fn place(&self, connection: u64) -> Option<&Place> {
        self.by_connection.get(&connection).and_then(|key| self.places.get(key))
    }

    /// Returns the time since the first refusal of a connection, or zero if it does not wait.
    pub(super) fn waited(&self, connection: u64, now: Instant) -> Duration {
        let refused = self.place(connection).map(|place| place.refused).or_else(|| self.queue.get(connection));
        refused.map_or(Duration::ZERO, |refused| now.saturating_duration_since(refused.since))
    }

    /// Returns the time for which estimates of a connection's wait have been too short: since the
    /// first one that failed. Without a place that is the whole time.
    pub(super) fn misjudged(&self, connection: u64, now: Instant) -> Duration {
        match self.place(connection) {
            Some(place) => place.estimated_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)),
            None => self.waited(connection, now),
        }
    }

    /// Returns the time after which a connection in the queue finds a free place. `line_time` is
    /// the time for room behind all places. `None` if it does not queue.
    pub(super) fn time_for_place(&self, connection: u64, line_time: Duration) -> Option<Duration> {
        let refused = self.queue.get(connection)?;
        let ahead = self.queue.estimated_ahead(refused.arrival);
        Some(time_for_place(line_time, ahead, (self.places.len(), PLACES_MAX)))
    }

    /// Takes granted bytes off the connection's place, and ends the place with its last byte. Ends
    /// the wait of a connection in the queue. Returns the position of a place at its first grant.
    pub(super) fn record_grant(&mut self, connection: u64, bytes: u64) -> Option<Served> {
        self.queue.remove(connection);
        let key = *self.by_connection.get(&connection)?;
        let place = self.places.get_mut(&key)?;
        let was_served = std::mem::replace(&mut place.is_served, true);
        // A place that ends unserved moves no other turn.
        self.served_turn = self.served_turn.max(Some(key.0));
        let served = (!was_served).then_some(Served { turn: key.0, refused: place.refused });
        if place.bytes > bytes {
            place.bytes -= bytes;
        } else {
            self.end_place(connection);
        }
        served
    }

    /// Ends the wait of a connection.
    pub(super) fn leave(&mut self, connection: u64) {
        self.queue.remove(connection);
        self.end_place(connection);
    }

    fn end_place(&mut self, connection: u64) -> Option<Place> {
        let key = self.by_connection.remove(&connection)?;
        let place = self.places.remove(&key);
        if self.places.is_empty() {
            self.served_turn = None;
        }
        place
    }

    /// Ends the waits that are late for too long. Visits the line only if there may be one.
    pub(super) fn expire(&mut self, now: Instant) {
        self.queue.expire(now);
        if self.places.is_empty() || self.late_first.is_some_and(|first| now < first + LATE_MAX) {
            return;
        }
        let ended = self.places.values().filter(|place| place.holds_until + LATE_MAX < now);
        let ended: Vec<u64> = ended.map(|place| place.connection).collect();
        for connection in ended {
            self.end_place(connection);
        }
        self.late_first = self.places.values().map(|place| place.holds_until).min();
    }
}

#[cfg(test)]
mod tests;
