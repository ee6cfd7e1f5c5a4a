//! Bounds on the connections of one socket: in all, and per peer.
//!
//! The last eighth is for known peers: those that lately had a subscription to the topic or a
//! replay. [`crate::places`] does the same for the data port.

use crate::places::{KNOWN_PEERS_MAX, KnownPeers, Peer};
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) struct Seats {
    max: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Number of connections of each peer that has any.
    taken: BTreeMap<Peer, usize>,
    /// Peers that have used a connection, with the time of the last use.
    known: KnownPeers,
}

/// Permission for one connection. Dropping it ends the permission.
pub(super) struct Seat {
    seats: Arc<Seats>,
    peer: Peer,
}

impl Seats {
    pub(super) fn new(max: usize) -> Arc<Seats> {
        Arc::new(Seats { max, table: Mutex::default() })
    }

    /// Admits a connection of a peer, which may have three quarters of all.
    pub(super) fn take(self: &Arc<Self>, peer: Peer) -> Option<Seat> {
        let Table { taken, known } = &mut *self.table.lock();
        let of_peer = taken.get(&peer).copied().unwrap_or_default();
        let reserved = if known.time_of(&peer).is_some() { 0 } else { self.max / 8 };
        if taken.values().sum::<usize>() >= self.max - reserved || of_peer >= self.max - self.max / 4 {
            return None;
        }
        taken.insert(peer, of_peer + 1);
        Some(Seat { seats: self.clone(), peer })
    }
}

impl Seat {
    /// Makes the peer a known one, because it uses the connection.
    pub(super) fn mark_used(&self) {
        self.seats.table.lock().known.set_within(KNOWN_PEERS_MAX, self.peer, now());
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let taken = &mut self.seats.table.lock().taken;
        if let Some(count) = taken.get(&self.peer).copied().filter(|&count| count > 1) {
            taken.insert(self.peer, count - 1);
        } else {
            taken.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> Peer {
        Peer::Address([10, 0, 0, last].into())
    }

    #[test]
    fn one_peer_gets_three_quarters_and_unknown_ones_leave_an_eighth() {
        let seats = Seats::new(8);
        let mut first: Vec<Seat> = (0..6).map_while(|_| seats.take(peer(1))).collect();
        assert!(first.len() == 6 && seats.take(peer(1)).is_none());
        let second: Vec<Seat> = (0..2).map_while(|_| seats.take(peer(2))).collect();
        assert!(second.len() == 1 && seats.take(peer(3)).is_none());
        drop(first.pop());
        assert!(seats.take(peer(3)).is_some());
        drop((first, second));
        assert!(seats.table.lock().taken.is_empty());
    }

    #[test]
    fn known_peer_gets_the_last_seats_and_not_more_than_its_part() {
        let seats = Seats::new(8);
        let used = seats.take(peer(9)).unwrap();
        used.mark_used();
        drop(used);
        let _others: Vec<Seat> = (0..7).map_while(|number| seats.take(peer(number))).collect();
        assert!(seats.take(peer(8)).is_none(), "host 8 is unknown");
        let known = seats.take(peer(9));
        assert!(known.is_some() && seats.take(peer(9)).is_none());
        drop((_others, known));
        let all: Vec<Seat> = (0..8).map_while(|_| seats.take(peer(9))).collect();
        assert_eq!(all.len(), 6);
    }
}
