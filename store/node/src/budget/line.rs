//! The line of writers that were refused for lack of room.
//!
//! A refused connection gets a place. Free room goes to the places in order, so a connection that
//! returns as it was told finds room, even if others came meanwhile.
//!
//! Invariants:
//! - A connection has at most one place, and the line at most [`PLACES_MAX`].
//! - Tenants take turns: a tenant's second place comes after the first places of the others.
//! - A place holds room until soon after the time at which the connection was to return. So room
//!   never waits for long for a client that is gone.
//! - A late connection keeps its turn without room for [`LATE_MAX`]. Over a slow link even a client
//!   that returns as told is late.
//! - A place ends when its bytes were granted, with its connection, or after that time.

use super::Kind;
use super::tenants::{TenantNumber, TenantTable};
use larder_runtime::fail_point;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bounds the line, and with it the cost of an admission while writers wait. Further connections
/// are told a time without a place.
const PLACES_MAX: usize = 128;

/// Time for which a place outlasts the room that it holds.
const LATE_MAX: Duration = Duration::from_secs(10);

/// Turn of the place, then the order of arrival.
type PlaceKey = (u64, u64);

struct Place {
    connection: u64,
    tenant: TenantNumber,
    bytes: u64,
    /// First refusal that was not followed by a grant.
    since: Instant,
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
    arrivals: u64,
    /// Turn of the last place that ended. A tenant without a place enters here.
    turn: u64,
    /// No place is late before this time.
    late_first: Option<Instant>,
}

impl Place {
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
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the places ahead of a connection that room is promised to, or all such places if it
    /// has none. A place of another tenant that is at its share of `max` takes nothing, because it
    /// cannot be served now. Places of the own tenant always count: they get its room first.
    pub(super) fn promised(
        &self,
        (connection, tenant): (u64, TenantNumber),
        tenants: &TenantTable,
        max: u64,
        now: Instant,
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
        let places = ahead.map(|(_, place)| place).filter(|place| place.holds_room(now)).filter(is_promised).collect();
        PromisedPlaces { places, tenant }
    }

    /// Gives a connection a place, or changes the bytes of the place that it has. Does nothing if
    /// the line is full, unless a late place can go.
    pub(super) fn enter(&mut self, connection: u64, tenant: TenantNumber, bytes: u64, now: Instant) {
        if let Some(key) = self.by_connection.get(&connection)
            && let Some(place) = self.places.get_mut(key)
            && !place.is_served
        {
            place.bytes = bytes;
            return;
        }
        self.leave(connection);
        if self.places.len() >= PLACES_MAX
            && let Some(late) = self.places.values().find(|place| !place.holds_room(now))
        {
            self.leave(late.connection);
        }
        if self.places.len() >= PLACES_MAX || fail_point!("node.line-forgets-callers") {
            return;
        }
        let last = self.places.iter().rfind(|(_, place)| place.tenant == tenant).map(|(&(turn, _), _)| turn + 1);
        let key = (last.unwrap_or(0).max(self.turn), self.arrivals);
        self.arrivals += 1;
        let place =
            Place { connection, tenant, bytes, since: now, returns_at: now, holds_until: now, is_served: false };
        self.places.insert(key, place);
        self.by_connection.insert(connection, key);
    }

    /// Records that the connection was told to return at `returns_at`. Its place holds room until
    /// `holds_until`.
    pub(super) fn keep_until(&mut self, connection: u64, returns_at: Instant, holds_until: Instant) {
        let key = self.by_connection.get(&connection);
        if let Some(place) = key.and_then(|key| self.places.get_mut(key)) {
            place.returns_at = returns_at;
            place.holds_until = holds_until;
            self.late_first = Some(self.late_first.map_or(holds_until, |first| first.min(holds_until)));
        }
    }

    pub(super) fn has_place(&self, connection: u64) -> bool {
        self.by_connection.contains_key(&connection)
    }

    /// Returns the time since the first refusal of a connection, or zero if it has no place.
    pub(super) fn waited(&self, connection: u64, now: Instant) -> Duration {
        let place = self.by_connection.get(&connection).and_then(|key| self.places.get(key));
        place.map_or(Duration::ZERO, |place| now.saturating_duration_since(place.since))
    }

    /// Takes granted bytes off the connection's place, and ends the place with its last byte.
    pub(super) fn record_grant(&mut self, connection: u64, bytes: u64) {
        let Some(key) = self.by_connection.get(&connection) else { return };
        let Some(place) = self.places.get_mut(key) else { return };
        place.is_served = true;
        if place.bytes <= bytes {
            self.leave(connection);
        } else {
            place.bytes -= bytes;
        }
    }

    pub(super) fn leave(&mut self, connection: u64) {
        let Some(key) = self.by_connection.remove(&connection) else { return };
        self.places.remove(&key);
        self.turn = if self.places.is_empty() { 0 } else { self.turn.max(key.0) };
    }

    /// Ends the places that are late for too long. Visits the line only if there may be one.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.places.is_empty() || self.late_first.is_some_and(|first| now < first + LATE_MAX) {
            return;
        }
        let ended = self.places.values().filter(|place| place.holds_until + LATE_MAX < now);
        let ended: Vec<u64> = ended.map(|place| place.connection).collect();
        ended.into_iter().for_each(|connection| self.leave(connection));
        self.late_first = self.places.values().map(|place| place.holds_until).min();
    }
}
