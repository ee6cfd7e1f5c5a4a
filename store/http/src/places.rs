//! Places of connections: a total, a share per address, and a reserve for known addresses.
//!
//! At a limit, a new connection replaces the one that has waited longest for its client. So a
//! client that holds many connections with half a request on each keeps others out for at most
//! [`EVICTION_GRACE`], even if it shares their address.

use crate::options::HttpOptions;
use crate::phase::PhaseCell;
use crate::shares::PeerAddress;
use larder_runtime::AgeOrder;
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Time during which a connection cannot be replaced: long enough for an honest request to arrive.
const EVICTION_GRACE: Duration = Duration::from_secs(1);
/// Time for which an address stays known after the last request that it was served.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// Maximum number of known addresses. The one served longest ago is forgotten first.
const KNOWN_MAX: usize = 1024;

/// Limit that a refused connection has hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaceLimit {
    Total,
    Address,
}

#[derive(Debug)]
struct Connection {
    peer: PeerAddress,
    phase: Arc<PhaseCell>,
    evicted: CancellationToken,
}

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    open: BTreeMap<u64, Connection>,
    per_address: BTreeMap<PeerAddress, usize>,
    /// Addresses that were served, with the time of the last answer.
    known: AgeOrder<PeerAddress, Instant>,
}

#[derive(Debug)]
pub(crate) struct Places {
    connections_max: usize,
    per_address_max: usize,
    reserved: usize,
    table: Mutex<Table>,
}

/// Place of an open connection. Its drop frees the place.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    id: u64,
    peer: PeerAddress,
    pub(crate) phase: Arc<PhaseCell>,
    /// Cancelled when another connection takes the place.
    pub(crate) evicted: CancellationToken,
}

impl Places {
    pub(crate) fn new(options: &HttpOptions) -> Arc<Places> {
        Arc::new(Places {
            connections_max: options.connections_max,
            per_address_max: options.per_address(),
            reserved: options.reserved(),
            table: Mutex::default(),
        })
    }

    /// Takes a place for a connection of `peer`, if need be that of a waiting one.
    pub(crate) fn take(self: &Arc<Places>, peer: PeerAddress) -> Result<Place, PlaceLimit> {
        self.take_at(peer, Instant::now())
    }

    fn take_at(self: &Arc<Places>, peer: PeerAddress, now: Instant) -> Result<Place, PlaceLimit> {
        let mut table = self.table.lock();
        if let Some(limit) = self.limit_reached(&table, peer, now) {
            // One place less would still be too many: no connection is evicted in vain.
            if limit == PlaceLimit::Total && table.open.len() > self.total_max(&table, peer, now) {
                return Err(limit);
            }
            let victim = table.longest_waiting(now, |c| limit == PlaceLimit::Total || c.peer == peer).ok_or(limit)?;
            table.evict(victim);
        }
        let id = table.next_id;
        table.next_id += 1;
        let phase = Arc::new(PhaseCell::default());
        let evicted = CancellationToken::new();
        table.open.insert(id, Connection { peer, phase: phase.clone(), evicted: evicted.clone() });
        *table.per_address.entry(peer).or_default() += 1;
        Ok(Place { places: self.clone(), id, peer, phase, evicted })
    }

    fn limit_reached(&self, table: &Table, peer: PeerAddress, now: Instant) -> Option<PlaceLimit> {
        if table.per_address.get(&peer).is_some_and(|&open| open >= self.per_address_max) {
            return Some(PlaceLimit::Address);
        }
        (table.open.len() >= self.total_max(table, peer, now)).then_some(PlaceLimit::Total)
    }

    /// Number of connections up to which this peer may open another one.
    fn total_max(&self, table: &Table, peer: PeerAddress, now: Instant) -> usize {
        let is_known = table.known.time_of(&peer).is_some_and(|served| now.duration_since(served) < KNOWN_FOR);
        if is_known { self.connections_max } else { self.connections_max - self.reserved }
    }

    #[cfg(test)]
    fn open(&self) -> usize {
        self.table.lock().open.len()
    }
}

impl Table {
    /// Connection that has waited longest for its client, among those that `may` be closed. Prefers
    /// the address with most connections, so that a crowd does not displace a bystander.
    fn longest_waiting(&self, now: Instant, may: impl Fn(&Connection) -> bool) -> Option<u64> {
        let candidates = self.open.iter().filter(|(_, c)| may(c)).filter_map(|(&id, c)| {
            let since = c.phase.waiting_since().filter(|&since| now.duration_since(since) >= EVICTION_GRACE)?;
            let crowd = self.per_address.get(&c.peer).copied().unwrap_or(0);
            Some((std::cmp::Reverse(crowd), since, id))
        });
        candidates.min().map(|(_, _, id)| id)
    }

    fn evict(&mut self, id: u64) {
        if let Some(connection) = self.open.get(&id) {
            connection.evicted.cancel();
        }
        self.remove(id);
    }

    /// Removes a connection. Does nothing if it was evicted before.
    fn remove(&mut self, id: u64) {
        let Some(connection) = self.open.remove(&id) else { return };
        if let Some(open) = self.per_address.get_mut(&connection.peer) {
            *open -= 1;
            if *open == 0 {
                self.per_address.remove(&connection.peer);
            }
        }
    }
}

impl Place {
    /// Records that the address was served.
    pub(crate) fn served(&self) {
        self.places.table.lock().known.set_within(KNOWN_MAX, self.peer, Instant::now());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.table.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::Phase;

    fn places(connections_max: usize, per_address: usize) -> Arc<Places> {
        let options =
            HttpOptions { connections_max, connections_per_address: Some(per_address), ..HttpOptions::default() };
        Places::new(&options)
    }

    fn peer(last: u8) -> PeerAddress {
        PeerAddress::of([10, 0, 0, last].into())
    }

    #[test]
    fn strangers_leave_the_reserve_to_known_addresses() {
        let places = places(8, 8);
        places.take(peer(1)).unwrap().served();
        let strangers: Vec<_> = (0..6).map(|_| places.take(peer(9)).unwrap()).collect();
        assert_eq!(places.take(peer(9)).unwrap_err(), PlaceLimit::Total);
        let known: Vec<_> = (0..2).map(|_| places.take(peer(1)).unwrap()).collect();
        assert_eq!(places.take(peer(1)).unwrap_err(), PlaceLimit::Total);
        assert_eq!(places.open(), 8);
        drop((strangers, known));
        assert_eq!((places.open(), places.table.lock().per_address.len()), (0, 0));
    }

    #[test]
    fn stranger_evicts_no_client_from_the_reserve() {
        let places = places(8, 8);
        places.take(peer(1)).unwrap().served();
        let known: Vec<_> = (0..8).map(|_| places.take(peer(1)).unwrap()).collect();
        let later = Instant::now() + EVICTION_GRACE;
        assert_eq!(places.take_at(peer(9), later).unwrap_err(), PlaceLimit::Total);
        assert!(known.iter().all(|place| !place.evicted.is_cancelled()));
    }

    #[test]
    fn one_address_has_a_share_of_the_places() {
        let places = places(8, 2);
        let held = (places.take(peer(1)).unwrap(), places.take(peer(1)).unwrap());
        assert_eq!(places.take(peer(1)).unwrap_err(), PlaceLimit::Address);
        places.take(peer(2)).unwrap();
        drop(held);
        places.take(peer(1)).unwrap();
    }

    #[test]
    fn at_the_limit_the_longest_wait_ends_and_answers_go_on() {
        let places = places(8, 2);
        let answering = places.take(peer(1)).unwrap();
        answering.phase.enter(Phase::Answering);
        let waiting = places.take(peer(1)).unwrap();
        assert_eq!(places.take(peer(1)).unwrap_err(), PlaceLimit::Address, "too early");
        let _newest = places.take_at(peer(1), Instant::now() + EVICTION_GRACE).unwrap();
        assert!(waiting.evicted.is_cancelled() && !answering.evicted.is_cancelled());
        drop(waiting);
        assert_eq!(places.open(), 2, "an evicted place is freed once");
    }

    #[test]
    fn known_addresses_are_bounded() {
        let places = places(4, 4);
        for n in 0..2000_u16 {
            places.take(PeerAddress::of([10, 0, (n >> 8) as u8, n as u8].into())).unwrap().served();
        }
        assert_eq!(places.table.lock().known.len(), KNOWN_MAX);
    }
}
