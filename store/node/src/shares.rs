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
//! - The weights in `floors` of the namespaces of one peer sum up to [`PEER_WEIGHT`].
//!
//! A connection that begins or ends costs O(log n) for n namespaces in use. The logs of L3 share
//! `floors`, so they see each change at once. L2 keeps its pages in an order that depends on each
//! floor in bytes, and another peer changes all of them. So L2 takes the differences in slices,
//! the lower floors first: see [`Shares::changes_of_l2`].
//!
//! A node knows a peer by its address only. Record 0024 tells what that does not defend.

use crate::places::Peer;
use larder_format::NamespaceId;
use larder_log::SharedFloors;
use larder_runtime::AgeOrder;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for which a namespace keeps its floor after its last connection. An engine restarts within
/// it, and an abandoned model leaves its room to others soon.
pub(crate) const USED_FOR: Duration = Duration::from_secs(600);
/// Namespaces of one peer that have a floor. A router of a few models with some tenants each finds
/// room, and the smallest floor is still worth having.
const FLOORS_PER_PEER: usize = 16;
/// Weight of the floors of a peer: the least number that each number up to [`FLOORS_PER_PEER`]
/// divides.
const PEER_WEIGHT: u64 = 720_720;
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
struct PeerUses {
    uses: BTreeMap<NamespaceId, Use>,
    by_number: BTreeMap<u64, NamespaceId>,
    /// Uses without connections, by their ends.
    ended: BTreeSet<(Instant, NamespaceId)>,
}

impl PeerUses {
    /// Counts one more connection. `number` is that of a use that begins with it.
    fn join(&mut self, namespace: NamespaceId, number: u64) {
        let used = self.uses.entry(namespace).or_insert(Use { number, connections: 0, ends_at: None });
        used.connections += 1;
        if let Some(at) = used.ends_at.take() {
            self.ended.remove(&(at, namespace));
        }
        if used.number != number {
            return;
        }
        self.by_number.insert(number, namespace);
        if self.ended.len() > ENDED_PER_PEER
            && let Some(&(_, first)) = self.ended.first()
        {
            self.remove(&first);
        }
    }

    /// Counts one connection less. `ends_at` is the end of the use if that was the last one.
    fn leave(&mut self, namespace: NamespaceId, ends_at: Instant) {
        let Some(used) = self.uses.get_mut(&namespace) else { return };
        assert!(used.connections > 0, "a connection left a namespace that it had not joined");
        used.connections -= 1;
        if used.connections == 0 {
            used.ends_at = Some(ends_at);
            self.ended.insert((ends_at, namespace));
        }
    }

    fn remove(&mut self, namespace: &NamespaceId) {
        let Some(used) = self.uses.remove(namespace) else { return };
        self.by_number.remove(&used.number);
        if let Some(at) = used.ends_at {
            self.ended.remove(&(at, *namespace));
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&(at, namespace)) = self.ended.first()
            && at <= now
        {
            self.remove(&namespace);
        }
    }

    /// Weights of the namespaces with a floor.
    fn weights(&self) -> Vec<(NamespaceId, u64)> {
        let weight = PEER_WEIGHT / self.uses.len().clamp(1, FLOORS_PER_PEER) as u64;
        self.by_number.values().take(FLOORS_PER_PEER).map(|namespace| (*namespace, weight)).collect()
    }

    /// End of the first use that has one.
    fn first_end(&self) -> Option<Instant> {
        self.ended.first().map(|(at, _)| *at)
    }

    /// End of the last use, if all have one.
    fn end(&self) -> Option<Instant> {
        self.ended.last().filter(|_| self.ended.len() == self.uses.len()).map(|(at, _)| *at)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Shares {
    peers: BTreeMap<Peer, PeerUses>,
    uses_begun: u64,
    /// Peers by [`PeerUses::first_end`].
    first_ends: AgeOrder<Peer, Instant>,
    /// Peers by [`PeerUses::end`].
    ends: AgeOrder<Peer, Instant>,
    floors: Arc<SharedFloors>,
    l2: FloorsOfL2,
    /// Namespaces of which the floor in L2 was compared with `floors`.
    #[cfg(test)]
    visits: usize,
}

/// Floors in bytes that L2 has, and those that may differ from [`Shares::floors`].
#[derive(Debug, Default)]
struct FloorsOfL2 {
    bytes: BTreeMap<NamespaceId, u64>,
    /// Namespaces whose weights changed.
    changed: BTreeSet<NamespaceId>,
    /// Place of a walk over all floors. It began when the total weight changed.
    walk: Option<Bound<NamespaceId>>,
    /// Total weight for which the last walk began.
    total: u64,
    /// Namespaces whose floor is higher now. They come after all that may be lower.
    higher: BTreeSet<NamespaceId>,
}

impl Shares {
    /// Floors of all tiers, which follow each change.
    pub(crate) fn floors(&self) -> &Arc<SharedFloors> {
        &self.floors
    }

    /// Counts one more connection. The caller pairs it with [`Shares::leave`].
    pub(crate) fn join(&mut self, namespace: NamespaceId, peer: Peer) {
        if self.peers.len() >= PEERS_MAX && !self.peers.contains_key(&peer) {
            self.forget_a_peer();
        }
        let number = self.uses_begun;
        self.uses_begun += 1;
        self.change(peer, |uses| uses.join(namespace, number));
    }

    pub(crate) fn leave(&mut self, namespace: NamespaceId, peer: Peer, now: Instant) {
        if self.peers.contains_key(&peer) {
            self.change(peer, |uses| uses.leave(namespace, now + USED_FOR));
        }
    }

    /// Ends the uses whose time is over. Visits only the peers that have such uses.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some((at, peer)) = self.first_ends.oldest()
            && at <= now
        {
            self.change(peer, |uses| uses.expire(now));
        }
    }

    /// Forgets the peer without connections whose use ends first.
    fn forget_a_peer(&mut self) {
        if let Some((_, peer)) = self.ends.oldest() {
            self.change(peer, |uses| *uses = PeerUses::default());
        }
    }

    /// Changes the uses of a peer, and all that follows from them. Costs O(log n), because at most
    /// [`FLOORS_PER_PEER`] weights change.
    fn change(&mut self, peer: Peer, change: impl FnOnce(&mut PeerUses)) {
        let uses = self.peers.entry(peer).or_default();
        let before = uses.weights();
        change(uses);
        let [first_end, end] = [uses.first_end(), uses.end()];
        let after = uses.weights();
        if uses.uses.is_empty() {
            self.peers.remove(&peer);
        }
        place_peer(&mut self.first_ends, peer, first_end);
        place_peer(&mut self.ends, peer, end);
        if before != after {
            self.floors.change(&before, &after, self.peers.len() as u64 * PEER_WEIGHT);
            self.l2.changed.extend(before.iter().chain(&after).map(|(namespace, _)| *namespace));
        }
    }

    /// Returns `true` if a floor of L2 may differ from [`Shares::floors`].
    pub(crate) fn has_changes_of_l2(&self) -> bool {
        let FloorsOfL2 { changed, walk, total, higher, .. } = &self.l2;
        !changed.is_empty() || walk.is_some() || !higher.is_empty() || *total != self.floors.total()
    }

    /// Returns floors of L2 that have changed, in bytes, 0 for none. Looks at `visits_max`
    /// namespaces, and the next call continues. The lower floors come before all higher ones. So
    /// at no time all floors together exceed half of L2.
    pub(crate) fn changes_of_l2(&mut self, l2_bytes: u64, visits_max: usize) -> Vec<(NamespaceId, u64)> {
        let total = self.floors.total();
        if self.l2.total != total {
            self.l2.total = total;
            self.l2.walk = Some(Bound::Unbounded);
        }
        let mut changes = Vec::new();
        for _ in 0..visits_max {
            let Some((namespace, may_be_higher)) = self.next_of_l2() else { break };
            #[cfg(test)]
            {
                self.visits += 1;
            }
            let before = self.l2.bytes.get(&namespace).copied().unwrap_or(0);
            let bytes = self.floors.part_of(&namespace).of(l2_bytes);
            if bytes > before && !may_be_higher {
                self.l2.higher.insert(namespace);
            } else if bytes != before {
                match bytes {
                    0 => self.l2.bytes.remove(&namespace),
                    _ => self.l2.bytes.insert(namespace, bytes),
                };
                changes.push((namespace, bytes));
            }
        }
        changes
    }

    /// Next namespace to compare. Returns `true` with it if no other floor has to become lower
    /// first.
    fn next_of_l2(&mut self) -> Option<(NamespaceId, bool)> {
        if let Some(namespace) = self.l2.changed.pop_first() {
            return Some((namespace, false));
        }
        if let Some(after) = self.l2.walk {
            let next = self.floors.next_after(after);
            self.l2.walk = next.map(Bound::Excluded);
            if let Some(namespace) = next {
                return Some((namespace, false));
            }
        }
        self.l2.higher.pop_first().map(|namespace| (namespace, true))
    }
}

/// Gives a peer its time in an order, or removes it.
fn place_peer(order: &mut AgeOrder<Peer, Instant>, peer: Peer, at: Option<Instant>) {
    match at {
        Some(at) => _ = order.set(peer, at),
        None => _ = order.remove(&peer),
    }
}

#[cfg(test)]
mod tests;
