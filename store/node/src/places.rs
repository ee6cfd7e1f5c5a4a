//! Places of the connections that may be open at a time.
//!
//! A client needs no permission to connect, so a careless or hostile one may take all places. A
//! node tells clients apart by their address, by their handshake, and by what they have in flight.
//!
//! Invariants:
//! - The connections with a place keep within three limits: in all, per peer, and in descriptors.
//!   At most [`CLOSING_MAX`] others are being closed.
//! - A connection that has greeted and has something in flight, or was active within [`IDLE_MIN`],
//!   never loses its place to another one.
//! - Strangers, which have not greeted, take at most a quarter of the places. The oldest one makes
//!   room for the next.
//! - The last eighth of the places is for known peers: those that have, or lately had, a connection
//!   that greeted.
//!
//! All processes behind one address are one peer, also those of this machine that use TCP.

use crate::budget::Account;
use crate::connection::ConnectionLimit;
use crate::metrics::Metrics;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Connections that are being closed and still exist, at most.
const CLOSING_MAX: usize = 64;
/// Silence after which a connection without anything in flight may lose its place. A client of
/// Larder probes an idle node every 2 s, and waits up to 3 s for the answer.
const IDLE_MIN: Duration = Duration::from_secs(6);
/// Age from which a stranger makes room when all places are taken. A handshake takes one round
/// trip.
const STRANGER_GRACE: Duration = Duration::from_secs(1);
/// Minimum time between two searches for idle connections that found none. A search looks at all.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);
/// Peers without a connection that a node remembers.
const KNOWN_MAX: usize = 1024;

/// Origin of a connection, as far as a node can tell without authentication.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// Processes of this machine and user, over local sockets.
    #[default]
    Local,
    Address(IpAddr),
}

impl Peer {
    /// Peer of a TCP connection. Of an IPv6 address only the network counts: one host has 2^64 of
    /// them.
    pub(crate) fn of(address: SocketAddr) -> Peer {
        match address.ip().to_canonical() {
            IpAddr::V6(address) => Peer::Address(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into()),
            address => Peer::Address(address),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaceLimits {
    pub(crate) connections: usize,
    pub(crate) per_peer: usize,
    pub(crate) descriptors: usize,
    /// Silence after which a connection without anything in flight is closed, even if places are
    /// free.
    pub(crate) idle_timeout: Duration,
}

impl PlaceLimits {
    fn strangers(&self) -> usize {
        self.connections.div_ceil(4)
    }

    fn for_unknown_peers(&self) -> usize {
        self.connections - self.connections / 8
    }
}

pub(crate) struct Places {
    limits: PlaceLimits,
    metrics: Arc<Metrics>,
    started: Instant,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Connections that have a place, and those that are being closed.
    entries: BTreeMap<u64, Entry>,
    strangers: BTreeSet<u64>,
    open: usize,
    descriptors: usize,
    peers: BTreeMap<Peer, PeerUse>,
    /// Peers without a connection, and the end of their last one.
    known: BTreeMap<Peer, Instant>,
    next_number: u64,
    next_search: Option<Instant>,
}

struct Entry {
    peer: Peer,
    descriptors: usize,
    state: Arc<PlaceState>,
}

#[derive(Default)]
struct PeerUse {
    /// Connections with a place.
    open: usize,
    /// Connections that have greeted, including those that are being closed.
    greeted: usize,
}

struct PlaceState {
    close: CancellationToken,
    /// Time of the last request in milliseconds since the start of [`Places`].
    active_ms: AtomicU64,
    /// Set by the handshake.
    account: OnceLock<Weak<Account>>,
}

/// Place of one connection. Dropping it frees the place.
pub(crate) struct Place {
    places: Arc<Places>,
    peer: Peer,
    number: u64,
    state: Arc<PlaceState>,
}

impl Place {
    pub(crate) fn peer(&self) -> Peer {
        self.peer
    }

    /// Resolves when the connection must make room for another one.
    pub(crate) async fn closed(&self) {
        self.state.close.cancelled().await;
    }

    /// Records that the client introduced itself. What is in flight is charged to `account`.
    pub(crate) fn greeted(&self, account: &Arc<Account>) {
        self.record_activity(now());
        if self.state.account.set(Arc::downgrade(account)).is_err() {
            return;
        }
        let mut guard = self.places.table.lock();
        let table = &mut *guard;
        table.strangers.remove(&self.number);
        if let Some(entry) = table.entries.get(&self.number) {
            table.peers.entry(entry.peer).or_default().greeted += 1;
        }
    }

    pub(crate) fn record_activity(&self, now: Instant) {
        // Relaxed: the time orders nothing, and an old value only makes a search wait.
        self.state.active_ms.store(self.places.milliseconds(now), Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut guard = self.places.table.lock();
        let table = &mut *guard;
        let Some(entry) = table.entries.remove(&self.number) else { return };
        table.strangers.remove(&self.number);
        table.descriptors -= entry.descriptors;
        let is_closing = entry.state.close.is_cancelled();
        let Some(peer) = table.peers.get_mut(&entry.peer) else { return };
        if !is_closing {
            table.open -= 1;
            peer.open -= 1;
        }
        if entry.state.account.get().is_some() {
            peer.greeted -= 1;
            table.known.insert(entry.peer, now());
        }
        if peer.open == 0 && peer.greeted == 0 {
            table.peers.remove(&entry.peer);
        }
        if table.known.len() > KNOWN_MAX
            && let Some(oldest) = table.known.iter().min_by_key(|(_, at)| **at).map(|(peer, _)| *peer)
        {
            table.known.remove(&oldest);
        }
    }
}

impl Places {
    pub(crate) fn new(limits: PlaceLimits, metrics: Arc<Metrics>) -> Arc<Places> {
        Arc::new(Places { limits, metrics, started: now(), table: Mutex::default() })
    }

    fn milliseconds(&self, at: Instant) -> u64 {
        // Saturates: the clock of another thread may be read before the start.
        u64::try_from(at.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }

    /// Gives a new connection a place, if need be that of a stranger or of an idle connection.
    ///
    /// # Errors
    /// The limit that the connection exceeds.
    pub(crate) fn admit(self: &Arc<Self>, peer: Peer, descriptors: usize) -> Result<Place, ConnectionLimit> {
        let now = now();
        let limits = &self.limits;
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let of_peer = table.peers.get(&peer).map_or(0, |peer| peer.open);
        if of_peer >= limits.per_peer && !self.close_one(table, Some(peer), now) {
            return Err(ConnectionLimit::Peer);
        }
        if table.strangers.len() >= limits.strangers() {
            // However young it is. Otherwise a flood of strangers would keep all others out.
            match table.strangers.first().copied() {
                Some(oldest) if table.may_close_more() => self.close(table, oldest),
                _ => return Err(ConnectionLimit::Count),
            }
        }
        let is_known = table.peers.get(&peer).is_some_and(|peer| peer.greeted > 0) || table.known.contains_key(&peer);
        let allowed = if is_known { limits.connections } else { limits.for_unknown_peers() };
        let is_full = |table: &Table| table.open >= allowed || table.descriptors + descriptors > limits.descriptors;
        if is_full(table) {
            // The descriptors of the closed connection come back in a moment. The node keeps some
            // for that time.
            let lacks_place = table.open >= allowed;
            if !self.close_one(table, None, now) || (lacks_place && table.open >= allowed) {
                return Err(ConnectionLimit::Count);
            }
        }
        let number = table.next_number;
        table.next_number += 1;
        let state = Arc::new(PlaceState {
            close: CancellationToken::new(),
            active_ms: AtomicU64::new(self.milliseconds(now)),
            account: OnceLock::new(),
        });
        table.entries.insert(number, Entry { peer, descriptors, state: state.clone() });
        table.strangers.insert(number);
        table.open += 1;
        table.descriptors += descriptors;
        table.peers.entry(peer).or_default().open += 1;
        Ok(Place { places: self.clone(), peer, number, state })
    }

    /// Closes the connections that have been idle for the timeout.
    pub(crate) fn close_idle(&self) {
        let before = now() - self.limits.idle_timeout.min(now().saturating_duration_since(self.started));
        let before_ms = self.milliseconds(before);
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let is_idle = |entry: &Entry| entry.active_ms() < before_ms && entry.is_idle();
        let idle: Vec<u64> = table.entries.iter().filter(|(_, entry)| is_idle(entry)).map(|(n, _)| *n).collect();
        for number in idle.into_iter().take(CLOSING_MAX) {
            self.close(table, number);
        }
    }

    /// Closes the oldest stranger, or else the connection that has been idle for longest, of one
    /// peer or of all. Returns `false` if no connection may be closed.
    fn close_one(&self, table: &mut Table, peer: Option<Peer>, now: Instant) -> bool {
        if !table.may_close_more() || table.next_search.is_some_and(|at| now < at) {
            return false;
        }
        let now_ms = self.milliseconds(now);
        let is_silent =
            |entry: &Entry, time: Duration| u128::from(now_ms - entry.active_ms().min(now_ms)) >= time.as_millis();
        let is_of_peer = |entry: &Entry| peer.is_none_or(|peer| entry.peer == peer);
        let strangers = table.strangers.iter().filter_map(|number| Some((*number, table.entries.get(number)?)));
        let stranger = strangers.clone().find(|(_, entry)| is_of_peer(entry) && is_silent(entry, STRANGER_GRACE));
        let mut found = stranger.map(|(number, _)| number);
        if found.is_none() {
            let candidates = table.entries.iter().filter(|(_, entry)| is_of_peer(entry) && is_silent(entry, IDLE_MIN));
            let idle = candidates.filter(|(_, entry)| entry.is_idle()).min_by_key(|(_, entry)| entry.active_ms());
            found = idle.map(|(number, _)| *number);
        }
        let Some(number) = found else {
            table.next_search = Some(now + SEARCH_PAUSE);
            return false;
        };
        self.close(table, number);
        true
    }

    fn close(&self, table: &mut Table, number: u64) {
        table.strangers.remove(&number);
        let Some(entry) = table.entries.get(&number).filter(|entry| !entry.state.close.is_cancelled()) else { return };
        entry.state.close.cancel();
        table.open -= 1;
        if let Some(peer) = table.peers.get_mut(&entry.peer) {
            peer.open -= 1;
        }
        self.metrics.connections_closed_idle.inc();
        tracing::debug!(peer = ?entry.peer, "connection closed: it was idle, or its place was needed before its handshake");
    }
}

impl Table {
    fn may_close_more(&self) -> bool {
        self.entries.len() < self.open + CLOSING_MAX
    }
}

impl Entry {
    fn active_ms(&self) -> u64 {
        // Relaxed: as in `record_activity`.
        self.state.active_ms.load(Ordering::Relaxed)
    }

    /// Returns `true` for a connection that has greeted, has nothing in flight and is not being
    /// closed.
    fn is_idle(&self) -> bool {
        let account = self.state.account.get().and_then(Weak::upgrade);
        !self.state.close.is_cancelled() && account.is_some_and(|account| account.is_idle())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::options::NodeOptions;
    use crate::tiers::WriteLoad;

    const LIMITS: PlaceLimits =
        PlaceLimits { connections: 16, per_peer: 12, descriptors: 64, idle_timeout: Duration::from_secs(60) };

    struct Fixture {
        places: Arc<Places>,
        budget: Arc<Budget>,
    }

    impl Fixture {
        fn new() -> Fixture {
            let metrics = Arc::<Metrics>::default();
            let budget = Budget::new(&NodeOptions::default(), Arc::<WriteLoad>::default(), metrics.clone());
            Fixture { places: Places::new(LIMITS, metrics), budget }
        }

        /// Connections of a host that have greeted, with their accounts.
        fn greeted(&self, host: u8, count: usize) -> Vec<(Place, Arc<Account>)> {
            (0..count).map(|_| self.greet(host).unwrap()).collect()
        }

        fn greet(&self, host: u8) -> Result<(Place, Arc<Account>), ConnectionLimit> {
            let place = self.places.admit(peer(host), 1)?;
            let account = self.budget.open().unwrap();
            place.greeted(&account);
            Ok((place, account))
        }
    }

    fn peer(host: u8) -> Peer {
        Peer::of(SocketAddr::from(([10, 0, 0, host], 7)))
    }

    #[tokio::test(start_paused = true)]
    async fn stranger_makes_room_for_the_next_one() {
        let fixture = Fixture::new();
        let strangers: Vec<Place> = (0..10).map(|host| fixture.places.admit(peer(host), 1).unwrap()).collect();
        let closed = strangers.iter().map(|place| place.state.close.is_cancelled()).collect::<Vec<_>>();
        assert_eq!(closed, [true, true, true, true, true, true, false, false, false, false]);
        drop(strangers);
        assert_eq!(fixture.places.table.lock().open, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_loses_its_place_and_a_busy_one_keeps_it() {
        let fixture = Fixture::new();
        let mut all = fixture.greeted(1, 8);
        all.extend(fixture.greeted(2, 8));
        assert_eq!(fixture.greet(1).err(), Some(ConnectionLimit::Count), "all are active");
        let in_flight = all[0].1.charge_request(0, true).unwrap();
        all[1].0.record_activity(now());
        tokio::time::sleep(IDLE_MIN).await;
        all[1].0.record_activity(now());
        let more = fixture.greeted(2, 1);
        let closed: Vec<usize> = (0..16).filter(|&at| all[at].0.state.close.is_cancelled()).collect();
        assert_eq!(closed, [2], "the first is busy, the second active");
        drop((more, in_flight));
        tokio::time::sleep(LIMITS.idle_timeout + Duration::from_millis(1)).await;
        fixture.places.close_idle();
        assert!(all.iter().all(|(place, _)| place.state.close.is_cancelled()));
        drop(all);
        let table = fixture.places.table.lock();
        assert_eq!((table.open, table.descriptors, table.peers.len(), table.known.len()), (0, 0, 0, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn last_places_are_for_known_peers_and_no_peer_takes_all() {
        let fixture = Fixture::new();
        drop(fixture.greeted(9, 1));
        let of_one = fixture.greeted(1, 12);
        assert_eq!(fixture.greet(1).err(), Some(ConnectionLimit::Peer));
        let of_others = fixture.greeted(2, 2);
        assert_eq!(fixture.greet(3).err(), Some(ConnectionLimit::Count), "host 3 is unknown");
        assert!(fixture.greet(9).is_ok(), "host 9 is known");
        drop((of_one, of_others));
    }

    #[tokio::test(start_paused = true)]
    async fn descriptors_bound_the_places() {
        let fixture = Fixture::new();
        let local: Vec<Place> = (0..4).map(|_| fixture.places.admit(Peer::Local, 20)).filter_map(Result::ok).collect();
        assert_eq!(local.len(), 3);
    }

    #[test]
    fn hosts_of_an_ipv6_network_are_one_peer() {
        let of = |address: &str| Peer::of(SocketAddr::new(address.parse().unwrap(), 7));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), peer(1));
    }
}
