//! The line of writers that were refused for lack of room.
//!
//! A refused connection gets a place. Free room goes to the places in order, so a connection that
//! returns as it was told finds room, even if others came meanwhile.
//!
//! Invariants:
//! - A connection has at most one place, and the line at most [`PLACES_MAX`].
//! - Tenants take turns: a tenant's second place comes after the first places of the others.
//! - A place ends when its bytes were granted, with its connection, or soon after the time at
//!   which the connection was to return. So room never waits for long for a client that is gone.

use super::Kind;
use super::tenants::{TenantNumber, TenantTable};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bounds the line, and with it the cost of an admission while writers wait. Further connections
/// are told a time without a place.
const PLACES_MAX: usize = 128;

/// Turn of the place, then the order of arrival.
type PlaceKey = (u64, u64);

struct Place {
    connection: u64,
    tenant: TenantNumber,
    bytes: u64,
    /// First refusal that was not followed by a grant.
    since: Instant,
    expires_at: Instant,
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
    /// No place expires before this time.
    expiry_first: Option<Instant>,
}

/// Bytes that places ahead of a connection will take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    pub(super) of_tenant: u64,
    pub(super) of_all: u64,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Sums the bytes promised to places ahead of a connection, or to all if it has none. A place
    /// of another tenant that is at its share of `max` takes nothing, because it cannot be served
    /// now. Places of the own tenant always count: they get its room first.
    pub(super) fn ahead(&self, connection: u64, tenant: TenantNumber, tenants: &TenantTable, max: u64) -> Ahead {
        let mut ahead = Ahead::default();
        if self.places.is_empty() {
            return ahead;
        }
        let own = self.by_connection.get(&connection);
        let mut by_tenant = BTreeMap::<TenantNumber, u64>::new();
        for (_, place) in self.places.iter().take_while(|(key, _)| own.is_none_or(|own| *key < own)) {
            let promised = by_tenant.entry(place.tenant).or_default();
            let used = tenants.used(place.tenant, Kind::Puts) + *promised;
            let is_other = place.tenant != tenant;
            if is_other && used > 0 && used + place.bytes > tenants.share(place.tenant, Kind::Puts, max) {
                continue;
            }
            *promised += place.bytes;
            ahead.of_all += place.bytes;
        }
        ahead.of_tenant = by_tenant.get(&tenant).copied().unwrap_or(0);
        ahead
    }

    /// Gives a connection a place, or moves the time of the place that it has. Does nothing if the
    /// line is full.
    pub(super) fn enter(&mut self, connection: u64, tenant: TenantNumber, bytes: u64, now: Instant) {
        if let Some(key) = self.by_connection.get(&connection)
            && let Some(place) = self.places.get_mut(key)
            && !place.is_served
        {
            place.bytes = bytes;
            return;
        }
        self.leave(connection);
        if self.places.len() >= PLACES_MAX {
            return;
        }
        let last = self.places.iter().rfind(|(_, place)| place.tenant == tenant).map(|(&(turn, _), _)| turn + 1);
        let key = (last.unwrap_or(0).max(self.turn), self.arrivals);
        self.arrivals += 1;
        let place = Place { connection, tenant, bytes, since: now, expires_at: now, is_served: false };
        self.places.insert(key, place);
        self.by_connection.insert(connection, key);
    }

    /// Keeps the place of a connection until `expires_at`.
    pub(super) fn keep_until(&mut self, connection: u64, expires_at: Instant) {
        let key = self.by_connection.get(&connection);
        if let Some(place) = key.and_then(|key| self.places.get_mut(key)) {
            place.expires_at = expires_at;
            self.expiry_first = Some(self.expiry_first.map_or(expires_at, |first| first.min(expires_at)));
        }
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

    /// Ends the places whose time is over. Visits the line only if one of them may have expired.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.places.is_empty() || self.expiry_first.is_some_and(|first| now < first) {
            return;
        }
        let expired: Vec<u64> =
            self.places.values().filter(|place| place.expires_at < now).map(|place| place.connection).collect();
        expired.into_iter().for_each(|connection| self.leave(connection));
        self.expiry_first = self.places.values().map(|place| place.expires_at).min();
    }
}
