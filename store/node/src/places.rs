//! Places of the connections that may be open at a time.
//!
//! A client needs no permission to connect, so a careless or hostile one may take all places. A
//! node tells clients apart by their address, by their handshake, and by what they have in flight.
//!
//! Invariants:
//! - The connections with a place keep within three limits: in all, per peer, and in descriptors.
//!   Those that are being closed have about [`CLOSING_MAX`] descriptors at most.
//! - A descriptor that outlives its connection stays counted until it is closed.
//! - A connection that has greeted and has something in flight, or was active within [`IDLE_MIN`],
//!   never loses its place to another one.
//! - Strangers, which have not greeted, take at most a quarter of the places. The oldest one makes
//!   room for the next.
//! - The last eighth of the places is for known peers: those that have, or lately had, a connection
//!   with an answered request. A handshake alone is not one.
//!
//! All processes behind one address are one peer, also those of this machine that use TCP.

use crate::budget::Account;
use crate::connection::ConnectionLimit;
use crate::metrics::Metrics;
use larder_runtime::sync::Mutex;
use larder_runtime::{AgeOrder, now};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Descriptors of connections that are being closed and still exist. No further connection is
/// closed beyond it.
pub(crate) const CLOSING_MAX: usize = 64;
/// Silence after which a connection without anything in flight may lose its place. A client of
/// Larder probes an idle node every 2 s, and waits up to 3 s for the answer.
const IDLE_MIN: Duration = Duration::from_secs(6);
/// Age from which a stranger makes room when all places are taken. A handshake takes one round
/// trip.
const STRANGER_GRACE: Duration = Duration::from_secs(1);
/// Minimum time between two searches for idle connections that found none: among the connections of
/// one peer, or among all. A search looks at each of them.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);
/// Peers that a table remembers. The one with the oldest time leaves first.
pub(crate) const KNOWN_PEERS_MAX: usize = 1024;

/// Peers that a table remembers, each with a time.
pub(crate) type KnownPeers = AgeOrder<Peer, Instant>;

/// Origin of a connection, as far as a node can tell without authentication.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    /// Descriptors of all entries, and those that outlive their connection.
    descriptors: usize,
    /// Part of them that comes back in a moment: those of connections that are being closed.
    closing_descriptors: usize,
    peers: BTreeMap<Peer, PeerUse>,
    /// Peers without a connection, and the end of their last one.
    known: KnownPeers,
    next_number: u64,
    /// Time of the next search among all connections.
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
    open: BTreeSet<u64>,
    /// Connections that were served, including those that are being closed.
    served: usize,
    /// Time of the next search among the connections of this peer.
    next_search: Option<Instant>,
}

struct PlaceState {
    close: CancellationToken,
    /// Time of the last request in milliseconds since the start of [`Places`].
    active_ms: AtomicU64,
    /// The timeout for idle connections does not apply. A search for room still may close it.
    keeps_idle: AtomicBool,
    /// Set by the handshake.
    account: OnceLock<Weak<Account>>,
    /// Set by the first answer after the handshake. Changed under the lock of the table only.
    is_served: AtomicBool,
}

/// Place of one connection. Dropping it frees the place.
pub(crate) struct Place {
    places: Arc<Places>,
    peer: Peer,
    number: u64,
    state: Arc<PlaceState>,
}

/// Descriptors that stay open after their connection has ended. Dropping it gives them back.
pub(crate) struct LastingDescriptors {
    places: Arc<Places>,
    count: usize,
}

impl Drop for LastingDescriptors {
    fn drop(&mut self) {
        self.places.table.lock().descriptors -= self.count;
    }
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
    }

    /// Records that the node answered a request after the handshake.
    pub(crate) fn served(&self) {
        // Relaxed: the lock orders the rest. Without it for all requests but the first.
        if self.state.is_served.load(Ordering::Relaxed) {
            return;
        }
        let mut guard = self.places.table.lock();
        let table = &mut *guard;
        let Some(entry) = table.entries.get(&self.number) else { return };
        if !self.state.is_served.swap(true, Ordering::Relaxed) {
            table.peers.entry(entry.peer).or_default().served += 1;
        }
    }

    /// Keeps the connection open however long it is idle, as long as no other needs its place. For
    /// clients that do not probe an idle connection.
    pub(crate) fn keep_idle(&self) {
        // Relaxed: a search that misses it has found an idle connection of the full timeout.
        self.state.keeps_idle.store(true, Ordering::Relaxed);
    }

    /// Takes descriptors out of the place, because they may outlive the connection.
    ///
    /// # Panics
    /// If the place was admitted with fewer.
    pub(crate) fn keep_descriptors(&self, count: usize) -> LastingDescriptors {
        let mut guard = self.places.table.lock();
        let table = &mut *guard;
        if let Some(entry) = table.entries.get_mut(&self.number) {
            assert!(entry.descriptors >= count, "a place has the descriptors that it was admitted with");
            entry.descriptors -= count;
            if entry.state.close.is_cancelled() {
                table.closing_descriptors -= count;
            }
        }
        LastingDescriptors { places: self.places.clone(), count }
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
        if is_closing {
            table.closing_descriptors -= entry.descriptors;
        } else {
            table.open -= 1;
        }
        let Some(peer) = table.peers.get_mut(&entry.peer) else { return };
        peer.open.remove(&self.number);
        // Relaxed: as in `served`.
        if entry.state.is_served.load(Ordering::Relaxed) {
            peer.served -= 1;
            table.known.set_within(KNOWN_PEERS_MAX, entry.peer, now());
        }
        if peer.open.is_empty() && peer.served == 0 {
            table.peers.remove(&entry.peer);
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
        let of_peer = table.peers.get(&peer).map_or(0, |peer| peer.open.len());
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
        let is_known =
            table.peers.get(&peer).is_some_and(|peer| peer.served > 0) || table.known.time_of(&peer).is_some();
        let allowed = if is_known { limits.connections } else { limits.for_unknown_peers() };
        if table.open >= allowed {
            let has_closed = self.close_one(table, None, now);
            // Those of known peers may still be too many for an unknown one.
            if !has_closed || table.open >= allowed {
                return Err(ConnectionLimit::Count);
            }
        }
        // The descriptors of closed connections come back in a moment. The node keeps some for that
        // time. One connection may need those of several.
        while table.descriptors - table.closing_descriptors + descriptors > limits.descriptors {
            if !self.close_one(table, None, now) {
                return Err(ConnectionLimit::Count);
            }
        }
        let number = table.next_number;
        table.next_number += 1;
        let state = Arc::new(PlaceState {
            close: CancellationToken::new(),
            active_ms: AtomicU64::new(self.milliseconds(now)),
            keeps_idle: AtomicBool::new(false),
            account: OnceLock::new(),
            is_served: AtomicBool::new(false),
        });
        table.entries.insert(number, Entry { peer, descriptors, state: state.clone() });
        table.strangers.insert(number);
        table.open += 1;
        table.descriptors += descriptors;
        table.peers.entry(peer).or_default().open.insert(number);
        Ok(Place { places: self.clone(), peer, number, state })
    }

    /// Closes the connections that have been idle for the timeout, and strangers of this age.
    pub(crate) fn close_idle(&self) {
        let before = now() - self.limits.idle_timeout.min(now().saturating_duration_since(self.started));
        let before_ms = self.milliseconds(before);
        let mut guard = self.table.lock();
        let table = &mut *guard;
        // Relaxed: as in `keep_idle`.
        let may_close =
            |entry: &Entry| entry.is_stranger() || !entry.state.keeps_idle.load(Ordering::Relaxed) && entry.is_idle();
        let is_idle = |entry: &Entry| entry.active_ms() < before_ms && may_close(entry);
        let idle: Vec<u64> = table.entries.iter().filter(|(_, entry)| is_idle(entry)).map(|(n, _)| *n).collect();
        for number in idle.into_iter().take(CLOSING_MAX) {
            self.close(table, number);
        }
    }

    /// Closes the oldest stranger, or else the connection that has been idle for longest, of one
    /// peer or of all. Returns `false` if no connection may be closed.
    fn close_one(&self, table: &mut Table, peer: Option<Peer>, now: Instant) -> bool {
        let next_search = match peer {
            Some(peer) => table.peers.get(&peer).and_then(|peer| peer.next_search),
            None => table.next_search,
        };
        if !table.may_close_more() || next_search.is_some_and(|at| now < at) {
            return false;
        }
        let found = match peer {
            Some(peer) => {
                let open = table.peers.get(&peer).into_iter().flat_map(|peer| &peer.open);
                self.longest_idle(open.filter_map(|number| Some((*number, table.entries.get(number)?))), now)
            }
            None => self.longest_idle(table.entries.iter().map(|(number, entry)| (*number, entry)), now),
        };
        if let Some(number) = found {
            self.close(table, number);
            return true;
        }
        // The searches of one peer must not delay those of others.
        let next = Some(now + SEARCH_PAUSE);
        match peer {
            Some(peer) => table.peers.entry(peer).or_default().next_search = next,
            None => table.next_search = next,
        }
        false
    }

    /// The connection that may make room for another one: the oldest stranger, or else the one that
    /// has been idle for longest.
    fn longest_idle<'a>(&self, open: impl Iterator<Item = (u64, &'a Entry)>, now: Instant) -> Option<u64> {
        let now_ms = self.milliseconds(now);
        let silence = |entry: &Entry| Duration::from_millis(now_ms - entry.active_ms().min(now_ms));
        let mut idle: Option<(u64, u64)> = None;
        for (number, entry) in open {
            if entry.is_stranger() && silence(entry) >= STRANGER_GRACE {
                return Some(number);
            }
            let is_longer = idle.is_none_or(|(longest, _)| entry.active_ms() < longest);
            if is_longer && silence(entry) >= IDLE_MIN && entry.is_idle() {
                idle = Some((entry.active_ms(), number));
            }
        }
        idle.map(|(_, number)| number)
    }

    fn close(&self, table: &mut Table, number: u64) {
        table.strangers.remove(&number);
        let Some(entry) = table.entries.get(&number).filter(|entry| !entry.state.close.is_cancelled()) else { return };
        entry.state.close.cancel();
        table.open -= 1;
        table.closing_descriptors += entry.descriptors;
        if let Some(peer) = table.peers.get_mut(&entry.peer) {
            peer.open.remove(&number);
        }
        self.metrics.connections_closed_idle.inc();
        tracing::debug!(peer = ?entry.peer, "connection closed: it was idle, or its place was needed before its handshake");
    }
}

impl Table {
    fn may_close_more(&self) -> bool {
        self.closing_descriptors < CLOSING_MAX
    }
}

impl Entry {
    fn active_ms(&self) -> u64 {
        // Relaxed: as in `record_activity`.
        self.state.active_ms.load(Ordering::Relaxed)
    }

    fn is_stranger(&self) -> bool {
        self.state.account.get().is_none() && !self.state.close.is_cancelled()
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
            Fixture::with(LIMITS)
        }

        fn with(limits: PlaceLimits) -> Fixture {
            let metrics = Arc::<Metrics>::default();
            let budget = Budget::new(&NodeOptions::default(), Arc::<WriteLoad>::default(), metrics.clone());
            Fixture { places: Places::new(limits, metrics), budget }
        }

        /// Connections of a host that have greeted, with their accounts.
        fn greeted(&self, host: u8, count: usize) -> Vec<(Place, Arc<Account>)> {
            (0..count).map(|_| self.greet(host).unwrap()).collect()
        }

        fn greet(&self, host: u8) -> Result<(Place, Arc<Account>), ConnectionLimit> {
            let place = self.places.admit(peer(host), 1)?;
            let account = self.budget.open().unwrap();
            place.greeted(&account);
            place.served();
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
    async fn connection_that_keeps_idle_outlasts_the_timeout_and_still_makes_room() {
        let fixture = Fixture::with(PlaceLimits { connections: 2, per_peer: 2, ..LIMITS });
        let quiet = fixture.greet(1).unwrap();
        quiet.0.keep_idle();
        tokio::time::sleep(2 * LIMITS.idle_timeout).await;
        fixture.places.close_idle();
        assert!(!quiet.0.state.close.is_cancelled());
        let other = fixture.greet(1).unwrap();
        assert!(fixture.greet(1).is_ok() && quiet.0.state.close.is_cancelled());
        drop(other);
    }

    #[tokio::test(start_paused = true)]
    async fn stranger_is_closed_after_the_timeout_though_places_are_free() {
        let fixture = Fixture::new();
        let stranger = fixture.places.admit(peer(1), 1).unwrap();
        tokio::time::sleep(LIMITS.idle_timeout / 2).await;
        let young = fixture.places.admit(peer(2), 1).unwrap();
        tokio::time::sleep(LIMITS.idle_timeout / 2 + Duration::from_millis(1)).await;
        fixture.places.close_idle();
        assert_eq!([&stranger, &young].map(|place| place.state.close.is_cancelled()), [true, false]);
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
    async fn handshake_alone_does_not_make_a_peer_known() {
        let fixture = Fixture::new();
        let hello = |host| {
            let place = fixture.places.admit(peer(host), 1)?;
            let account = fixture.budget.open().unwrap();
            place.greeted(&account);
            Ok::<_, ConnectionLimit>((place, account))
        };
        drop(hello(9).unwrap());
        let others = [fixture.greeted(1, 7), fixture.greeted(2, 7)];
        assert_eq!(hello(9).err(), Some(ConnectionLimit::Count), "host 9 was never served");
        drop(others);
        let (place, _account) = hello(9).unwrap();
        place.served();
        place.served();
        drop(place);
        let _others = [fixture.greeted(1, 7), fixture.greeted(2, 7)];
        assert!(hello(9).is_ok(), "host 9 is known");
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_only_waits_for_another_client_is_idle() {
        let fixture = Fixture::new();
        let (place, account) = fixture.greet(1).unwrap();
        let request = account.charge_request(0, true).unwrap();
        let waiting = account.wait_for_others(request.bytes());
        tokio::time::sleep(LIMITS.idle_timeout + Duration::from_millis(1)).await;
        drop(waiting);
        fixture.places.close_idle();
        assert!(!place.state.close.is_cancelled(), "its request goes on");
        let _waiting = account.wait_for_others(request.bytes());
        fixture.places.close_idle();
        assert!(place.state.close.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn descriptors_bound_the_places() {
        let fixture = Fixture::new();
        let local: Vec<Place> = (0..4).map(|_| fixture.places.admit(Peer::Local, 20)).filter_map(Result::ok).collect();
        assert_eq!(local.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_of_three_descriptors_needs_those_of_three_others() {
        let fixture = Fixture::with(PlaceLimits { descriptors: 12, ..LIMITS });
        let all = fixture.greeted(1, 12);
        tokio::time::sleep(IDLE_MIN).await;
        all[2..].iter().for_each(|(place, _)| place.record_activity(now()));
        assert_eq!(fixture.places.admit(Peer::Local, 3).err(), Some(ConnectionLimit::Count), "two others are idle");
        tokio::time::sleep(IDLE_MIN).await;
        let local = fixture.places.admit(Peer::Local, 3).unwrap();
        let closed = |all: &[(Place, _)]| all.iter().filter(|(place, _)| place.state.close.is_cancelled()).count();
        assert_eq!(closed(&all), 3);
        let table = fixture.places.table.lock();
        assert_eq!((table.open, table.descriptors, table.closing_descriptors), (10, 15, 3));
        drop(table);
        drop((local, all));
        let table = fixture.places.table.lock();
        assert_eq!((table.open, table.descriptors, table.closing_descriptors), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn descriptor_that_outlives_its_connection_stays_counted() {
        let fixture = Fixture::with(PlaceLimits { descriptors: 4, ..LIMITS });
        let local = fixture.places.admit(Peer::Local, 3).unwrap();
        let session = local.keep_descriptors(1);
        drop(local);
        let others = [(); 3].map(|()| fixture.places.admit(peer(1), 1).unwrap());
        assert_eq!(fixture.places.admit(peer(1), 1).err(), Some(ConnectionLimit::Count), "the session lasts");
        drop(session);
        assert!(fixture.places.admit(peer(1), 1).is_ok());
        drop(others);
        assert_eq!(fixture.places.table.lock().descriptors, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn peer_at_its_limit_delays_no_search_for_another_peer() {
        let fixture = Fixture::with(PlaceLimits { connections: 32, ..LIMITS });
        let idle = fixture.greeted(2, 12);
        tokio::time::sleep(IDLE_MIN).await;
        let active = fixture.greeted(1, 12);
        assert_eq!(fixture.greet(1).err(), Some(ConnectionLimit::Peer), "none of its connections is idle");
        assert!(fixture.greet(2).is_ok(), "at the same time");
        assert!(idle[0].0.state.close.is_cancelled());
        drop(active);
    }

    #[test]
    fn hosts_of_an_ipv6_network_are_one_peer() {
        let of = |address: &str| Peer::of(SocketAddr::new(address.parse().unwrap(), 7));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), peer(1));
    }
}
