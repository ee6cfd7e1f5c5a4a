//! Namespaces in use, and the part of a tier that is the floor of each: bytes that other namespaces
//! cannot take from it.
//!
//! Half of a tier is divided into floors: equally among the peers, and the part of a peer equally
//! among the namespaces that it uses. A namespace that several peers use has a part of each.
//!
//! Invariants:
//! - All floors together are at most half of a tier.
//! - A namespace is *in use* by a peer while the peer has a connection with it, and for
//!   [`USED_FOR`] after the last one.
//! - The first [`FLOORS_PER_PEER`] namespaces of a peer have floors. So a peer that opens many
//!   takes nothing from other peers. It leaves a sixteenth of its part to each namespace before.
//! - The table is bounded by the connections, [`ENDED_PER_PEER`] and [`PEERS_MAX`].
//!
//! A node knows a peer by its address only. Record 0024 tells what that does not defend.

use crate::places::Peer;
use larder_format::NamespaceId;
use larder_log::{FloorPart, Floors};
use std::collections::BTreeMap;
use std::ops::RangeToInclusive;
use std::time::{Duration, Instant};

/// Time for which a namespace keeps its floor after its last connection. An engine restarts within
/// it, and an abandoned model leaves its room to others soon.
pub(crate) const USED_FOR: Duration = Duration::from_secs(600);
/// Namespaces of one peer that have a floor. A router of a few models with some tenants each finds
/// room, and the smallest floor is still worth having.
const FLOORS_PER_PEER: usize = 16;
/// Namespaces of a peer without a connection that the table keeps.
const ENDED_PER_PEER: usize = 64;
/// Peers that the table keeps, beyond those with connections.
const PEERS_MAX: usize = 1024;

/// Use of a namespace by a peer.
#[derive(Debug)]
struct Use {
    /// Order in which the peer began to use its namespaces.
    number: u64,
    connections: usize,
    /// End of the use. `None` while there are connections.
    ends_at: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Shares {
    peers: BTreeMap<Peer, BTreeMap<NamespaceId, Use>>,
    uses_begun: u64,
    has_changed: bool,
    /// Floors in bytes that L2 has.
    of_l2: BTreeMap<NamespaceId, u64>,
    next_end: Option<Instant>,
}

impl Shares {
    /// Counts one more connection. The caller pairs it with [`Shares::leave`].
    pub(crate) fn join(&mut self, namespace: NamespaceId, peer: Peer) {
        if self.peers.len() >= PEERS_MAX && !self.peers.contains_key(&peer) {
            self.forget_a_peer();
        }
        let number = self.uses_begun;
        let uses = self.peers.entry(peer).or_default();
        let used = uses.entry(namespace).or_insert(Use { number, connections: 0, ends_at: None });
        used.connections += 1;
        used.ends_at = None;
        if used.number != number {
            return;
        }
        self.uses_begun += 1;
        self.has_changed |= uses.len() <= FLOORS_PER_PEER;
        if uses.len() > ENDED_PER_PEER {
            let ended = uses.iter().filter_map(|(namespace, used)| Some((used.ends_at?, *namespace)));
            let ended: Vec<(Instant, NamespaceId)> = ended.collect();
            if ended.len() > ENDED_PER_PEER
                && let Some((_, first)) = ended.into_iter().min()
            {
                let floored = numbers_with_floor(uses);
                self.has_changed |= uses.remove(&first).is_some_and(|used| floored.contains(&used.number));
            }
        }
    }

    pub(crate) fn leave(&mut self, namespace: NamespaceId, peer: Peer, now: Instant) {
        let Some(used) = self.peers.get_mut(&peer).and_then(|uses| uses.get_mut(&namespace)) else { return };
        assert!(used.connections > 0, "a connection left a namespace that it had not joined");
        used.connections -= 1;
        if used.connections == 0 {
            let ends_at = now + USED_FOR;
            used.ends_at = Some(ends_at);
            self.next_end = Some(self.next_end.map_or(ends_at, |next| next.min(ends_at)));
        }
    }

    /// Ends the uses whose time is over. Visits the table only if there may be one.
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.next_end.is_none_or(|next| now < next) {
            return;
        }
        self.next_end = None;
        self.peers.retain(|_, uses| {
            let end = uses.values().filter_map(|used| used.ends_at).min();
            if end.is_some_and(|end| end <= now) {
                let floored = numbers_with_floor(uses);
                uses.retain(|_, used| {
                    let ended = used.ends_at.is_some_and(|end| end <= now);
                    // A peer may end uses without a floor each second: they change nothing.
                    self.has_changed |= ended && floored.contains(&used.number);
                    !ended
                });
            }
            let ends = uses.values().filter_map(|used| used.ends_at);
            self.next_end = ends.chain(self.next_end).min();
            !uses.is_empty()
        });
    }

    /// Returns the floors if they may have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> Option<Floors> {
        if !std::mem::take(&mut self.has_changed) {
            return None;
        }
        let mut floors = Floors::new();
        for uses in self.peers.values() {
            let floored = numbers_with_floor(uses);
            let part = FloorPart::ALL.divided_by(self.peers.len()).divided_by(uses.len().min(FLOORS_PER_PEER));
            let namespaces = uses.iter().filter(|(_, used)| floored.contains(&used.number));
            namespaces.for_each(|(namespace, _)| *floors.entry(*namespace).or_default() += part);
        }
        Some(floors)
    }

    /// Returns the floors of L2 that differ from those of the last call, in bytes, 0 for none. The
    /// lower ones come first. So a prefix of them never makes all floors together exceed both the
    /// old and the new ones.
    pub(crate) fn changes_of_l2(&mut self, floors: &Floors, l2_bytes: u64) -> Vec<(NamespaceId, u64)> {
        let floors: BTreeMap<_, _> = floors.iter().map(|(namespace, part)| (*namespace, part.of(l2_bytes))).collect();
        let before = std::mem::replace(&mut self.of_l2, floors);
        let bytes_of = |floors: &BTreeMap<_, u64>, namespace| floors.get(namespace).copied().unwrap_or(0);
        let ended = before.keys().filter(|namespace| !self.of_l2.contains_key(namespace));
        let changes = ended.chain(self.of_l2.keys()).filter_map(|namespace| {
            let (old, new) = (bytes_of(&before, namespace), bytes_of(&self.of_l2, namespace));
            (old != new).then_some((new > old, (*namespace, new)))
        });
        let (higher, lower): (Vec<_>, Vec<_>) = changes.partition(|&(is_higher, _)| is_higher);
        lower.into_iter().chain(higher).map(|(_, change)| change).collect()
    }

    /// Forgets the peer without connections whose use ends first.
    fn forget_a_peer(&mut self) {
        let end_of = |uses: &BTreeMap<NamespaceId, Use>| {
            let ends: Option<Vec<Instant>> = uses.values().map(|used| used.ends_at).collect();
            ends?.into_iter().max()
        };
        let ended = self.peers.iter().filter_map(|(peer, uses)| Some((end_of(uses)?, *peer)));
        if let Some((_, peer)) = ended.min() {
            self.peers.remove(&peer);
            self.has_changed = true;
        }
    }
}

/// Numbers of the uses of a peer that have a floor: no other use of it has one of these.
fn numbers_with_floor(uses: &BTreeMap<NamespaceId, Use>) -> RangeToInclusive<u64> {
    let mut numbers: Vec<u64> = uses.values().map(|used| used.number).collect();
    if numbers.len() <= FLOORS_PER_PEER {
        return ..=u64::MAX;
    }
    ..=*numbers.select_nth_unstable(FLOORS_PER_PEER - 1).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn id(number: u32) -> NamespaceId {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_be_bytes());
        NamespaceId(id)
    }

    fn peer(host: u32) -> Peer {
        Peer::Address(Ipv4Addr::from_bits(host).into())
    }

    /// Floor of a namespace in a tier of 96,000 bytes, of which half is for floors.
    fn floor(floors: &Floors, namespace: u32) -> u64 {
        floors.get(&id(namespace)).map_or(0, |part| part.of(96_000) + 1) / 10 * 10
    }

    #[test]
    fn peers_share_equally_and_so_do_the_namespaces_of_a_peer() {
        let mut shares = Shares::default();
        shares.join(id(1), peer(1));
        let floors = shares.take_changed().unwrap();
        assert_eq!((floor(&floors, 1), floors[&id(1)].of(96_000)), (48_000, 48_000));
        shares.join(id(2), peer(1));
        shares.join(id(3), peer(2));
        let floors = shares.take_changed().unwrap();
        assert_eq!([1, 2, 3].map(|n| floor(&floors, n)), [12_000, 12_000, 24_000]);
        // A second peer of a namespace adds its part.
        shares.join(id(1), peer(2));
        let floors = shares.take_changed().unwrap();
        assert_eq!([1, 2, 3].map(|n| floor(&floors, n)), [24_000, 12_000, 12_000]);
        shares.join(id(1), peer(2));
        assert_eq!(shares.take_changed(), None);
    }

    #[test]
    fn peer_with_many_namespaces_takes_nothing_from_others_and_little_from_its_own_first_ones() {
        let mut shares = Shares::default();
        shares.join(id(1), peer(1));
        shares.join(id(2), peer(2));
        let now = larder_runtime::now();
        for number in 100..5000 {
            shares.join(id(number), peer(2));
            if number % 2 == 0 {
                shares.leave(id(number), peer(2), now);
            }
        }
        let floors = shares.take_changed().unwrap();
        assert_eq!((floor(&floors, 1), floor(&floors, 2)), (24_000, 1_500));
        assert_eq!(floors.len(), 1 + FLOORS_PER_PEER);
        let sum: u64 = floors.values().map(|part| part.of(96_000)).sum();
        assert!(sum <= 48_000, "{sum}");
        (101..5000).step_by(2).for_each(|number| shares.leave(id(number), peer(2), now));
        shares.join(id(6000), peer(2));
        shares.expire(now + USED_FOR);
        assert_eq!(shares.take_changed().map(|floors| floors.len()), Some(3), "1, 2 and 6000 have connections");
    }

    #[test]
    fn namespace_keeps_its_floor_for_a_while_after_its_last_connection() {
        let mut shares = Shares::default();
        let now = larder_runtime::now();
        shares.join(id(1), peer(1));
        shares.join(id(2), peer(1));
        shares.leave(id(1), peer(1), now);
        shares.take_changed();
        shares.expire(now + USED_FOR - Duration::from_secs(1));
        assert_eq!(shares.take_changed(), None);
        shares.expire(now + USED_FOR);
        let floors = shares.take_changed().unwrap();
        assert_eq!((floor(&floors, 1), floor(&floors, 2)), (0, 48_000));
    }

    #[test]
    fn uses_without_a_floor_begin_and_end_without_a_change() {
        let mut shares = Shares::default();
        let now = larder_runtime::now();
        (0..17).for_each(|number| shares.join(id(number), peer(1)));
        shares.take_changed();
        shares.leave(id(16), peer(1), now);
        for number in 100..300 {
            shares.join(id(number), peer(1));
            shares.leave(id(number), peer(1), now);
        }
        assert_eq!(shares.take_changed(), None);
        shares.expire(now + USED_FOR);
        assert_eq!(shares.take_changed(), None);
        shares.leave(id(3), peer(1), now);
        shares.expire(now + USED_FOR);
        assert_eq!(shares.take_changed().map(|floors| floors.len()), Some(15));
    }

    #[test]
    fn changes_of_l2_are_only_those_and_never_exceed_half_of_it() {
        let mut shares = Shares::default();
        let mut floors = BTreeMap::new();
        let mut update = |shares: &mut Shares| {
            let Some(wanted) = shares.take_changed() else { return 0 };
            let changes = shares.changes_of_l2(&wanted, 96_000);
            for (namespace, bytes) in &changes {
                floors.insert(*namespace, *bytes);
                assert!(floors.values().sum::<u64>() <= 48_000);
            }
            floors.retain(|_, bytes| *bytes > 0);
            assert_eq!(floors, wanted.iter().map(|(namespace, part)| (*namespace, part.of(96_000))).collect());
            changes.len()
        };
        for host in 0..300 {
            (0..=host % 3).for_each(|number| shares.join(id(1000 * number + host), peer(host)));
            update(&mut shares);
        }
        // A third namespace changes those of its peer only.
        shares.join(id(9000), peer(1));
        assert_eq!(update(&mut shares), 3);
        let now = larder_runtime::now();
        (0..100).for_each(|host| shares.leave(id(host), peer(host), now));
        shares.expire(now + USED_FOR);
        assert!(update(&mut shares) >= 100);
    }

    #[test]
    fn table_is_bounded_in_peers_and_in_namespaces() {
        let mut shares = Shares::default();
        let now = larder_runtime::now();
        shares.join(id(1), peer(0));
        for host in 1..3000 {
            shares.join(id(host), peer(host));
            shares.leave(id(host), peer(host), now + Duration::from_millis(host.into()));
        }
        assert_eq!(shares.peers.len(), PEERS_MAX);
        assert!(shares.peers.contains_key(&peer(0)) && shares.peers.contains_key(&peer(2999)));
        for number in 0..500 {
            shares.join(id(number), peer(0));
            shares.leave(id(number), peer(0), now);
        }
        assert!(shares.peers[&peer(0)].len() <= ENDED_PER_PEER + 2);
    }
}
