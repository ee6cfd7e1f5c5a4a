//! Tenants with open connections: their bytes in flight, and the share of each.
//!
//! A tenant is the name that a client gave, together with the client's peer: without authentication
//! a name proves nothing. Peers share equally, and so do the tenants of a peer. A peer that invents
//! names gets no more.
//!
//! Invariants:
//! - `active` counts the tenants with demand exactly, and the peers that have such tenants. So a
//!   share costs O(log n) for n peers, however many tenants are idle.
//! - A tenant has demand while it has bytes in flight, and until the end of its recorded demand.
//! - `largest` orders the tenants that can have more than their share of puts, the largest part of
//!   a share first within each peer. So those above their shares are found without a look at
//!   others.

use super::{BytesByKind, KINDS, Kind, QueuedRead, subtract};
use crate::places::Peer;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Number of a tenant in the table. A tenant that leaves and returns gets another one.
pub(crate) type TenantNumber = u64;

/// Name of a tenant, and the peer that gave it.
type TenantKey = (Peer, Arc<str>);

pub(super) struct Tenant {
    key: TenantKey,
    connections: usize,
    used: BytesByKind,
    puts: u64,
    /// End of the demand that was recorded, until [`TenantTable::expire`] removes it.
    demand_until: [Option<Instant>; KINDS.len()],
    pub(super) queue: VecDeque<QueuedRead>,
}

/// Tenants with more than one put, by their bytes.
#[derive(Default)]
struct Largest {
    of_peer: BTreeMap<Peer, BTreeSet<(u64, TenantNumber)>>,
    /// Bytes of the largest tenant of each peer, times the peer's tenants with demand. The peers
    /// have equal shares, so this orders them by the part of a share.
    weight_of: BTreeMap<Peer, u128>,
    peers: BTreeSet<(u128, Peer)>,
}

impl Largest {
    fn replace(&mut self, peer: Peer, number: TenantNumber, before: Option<u64>, after: Option<u64>) {
        if before == after {
            return;
        }
        let tenants = self.of_peer.entry(peer).or_default();
        if let Some(bytes) = before {
            tenants.remove(&(bytes, number));
        }
        if let Some(bytes) = after {
            tenants.insert((bytes, number));
        }
        if tenants.is_empty() {
            self.of_peer.remove(&peer);
        }
    }

    /// Orders a peer anew, with so many tenants that have demand.
    fn update_weight(&mut self, peer: Peer, active: u64) {
        if let Some(weight) = self.weight_of.remove(&peer) {
            self.peers.remove(&(weight, peer));
        }
        let largest = self.of_peer.get(&peer).and_then(|tenants| tenants.last());
        if let Some(&(bytes, _)) = largest {
            let weight = u128::from(bytes) * u128::from(active);
            self.weight_of.insert(peer, weight);
            self.peers.insert((weight, peer));
        }
    }
}

impl Tenant {
    /// Bytes of its puts if there is more than one. A tenant may always have one.
    fn reducible(&self) -> Option<u64> {
        (self.puts > 1).then_some(self.used(Kind::Puts))
    }

    pub(super) fn used(&self, kind: Kind) -> u64 {
        self.used[kind as usize]
    }

    fn is_active(&self, kind: usize) -> bool {
        self.used[kind] > 0 || self.demand_until[kind].is_some()
    }
}

#[derive(Default)]
pub(super) struct TenantTable {
    numbers: BTreeMap<TenantKey, TenantNumber>,
    tenants: BTreeMap<TenantNumber, Tenant>,
    joined: u64,
    /// Number of tenants with demand of each peer that has one, by kind.
    active: [BTreeMap<Peer, u64>; KINDS.len()],
    /// End, kind and tenant of all recorded demand, the earliest end first.
    demand_ends: BTreeSet<(Instant, usize, TenantNumber)>,
    largest: Largest,
}

impl TenantTable {
    pub(super) fn len(&self) -> usize {
        self.tenants.len()
    }

    /// Counts one more connection of a tenant. The caller pairs it with [`TenantTable::leave`].
    pub(super) fn join(&mut self, peer: Peer, name: &str) -> TenantNumber {
        let key: TenantKey = (peer, name.into());
        if let Some(&number) = self.numbers.get(&key) {
            if let Some(tenant) = self.tenants.get_mut(&number) {
                tenant.connections += 1;
            }
            return number;
        }
        let number = self.joined;
        self.joined += 1;
        let tenant = Tenant {
            key: key.clone(),
            connections: 1,
            used: [0; KINDS.len()],
            puts: 0,
            demand_until: [None; KINDS.len()],
            queue: VecDeque::new(),
        };
        self.numbers.insert(key, number);
        self.tenants.insert(number, tenant);
        number
    }

    /// Removes a connection of a tenant, and the tenant with its last connection.
    pub(super) fn leave(&mut self, number: TenantNumber) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        tenant.connections -= 1;
        if tenant.connections > 0 {
            return;
        }
        let Some(tenant) = self.tenants.remove(&number) else { return };
        self.numbers.remove(&tenant.key);
        for (kind, until) in tenant.demand_until.into_iter().enumerate() {
            if tenant.is_active(kind) {
                self.deactivate(tenant.key.0, kind);
            }
            if let Some(until) = until {
                self.demand_ends.remove(&(until, kind, number));
            }
        }
        self.largest.replace(tenant.key.0, number, tenant.reducible(), None);
        self.update_weight(tenant.key.0);
    }

    fn update_weight(&mut self, peer: Peer) {
        let active = self.active[Kind::Puts as usize].get(&peer).copied().unwrap_or(0);
        self.largest.update_weight(peer, active);
    }

    pub(super) fn queue(&mut self, number: TenantNumber) -> Option<&mut VecDeque<QueuedRead>> {
        self.tenants.get_mut(&number).map(|tenant| &mut tenant.queue)
    }

    pub(super) fn used(&self, number: TenantNumber, kind: Kind) -> u64 {
        self.tenants.get(&number).map_or(0, |tenant| tenant.used(kind))
    }

    /// Adds a charge of `bytes`.
    pub(super) fn add(&mut self, number: TenantNumber, kind: Kind, bytes: u64) {
        self.update(number, kind as usize, |tenant| {
            tenant.used[kind as usize] += bytes;
            tenant.puts += u64::from(kind == Kind::Puts);
        });
    }

    /// Removes `bytes` of a charge. A charge of [`Kind::Puts`] is removed as a whole.
    pub(super) fn remove(&mut self, number: TenantNumber, kind: Kind, bytes: u64) {
        self.update(number, kind as usize, |tenant| {
            subtract(&mut tenant.used[kind as usize], bytes);
            subtract(&mut tenant.puts, u64::from(kind == Kind::Puts));
        });
    }

    /// Bytes of a tenant's puts above its share of `max`. A single page is never too much: a page
    /// larger than a share could not move otherwise.
    pub(super) fn excess(&self, number: TenantNumber, max: u64) -> u64 {
        let Some(tenant) = self.tenants.get(&number).filter(|tenant| tenant.puts > 1) else { return 0 };
        let used = tenant.used(Kind::Puts);
        let fair = self.share(number, Kind::Puts, max).max(used / tenant.puts);
        // Saturates because a tenant below its share is the normal case.
        used.saturating_sub(fair)
    }

    /// Tenants above their shares of `max`, the largest part of a share first. Returns only as many
    /// as have `bytes` too much together, and at most `count`.
    pub(super) fn above_share(&self, max: u64, bytes: u64, count: usize) -> Vec<TenantNumber> {
        let mut above = Vec::new();
        let mut excess_bytes = 0;
        for (_, peer) in self.largest.peers.iter().rev() {
            let mut is_above = false;
            for &(_, number) in self.largest.of_peer.get(peer).into_iter().flatten().rev() {
                let excess = self.excess(number, max);
                if excess == 0 {
                    break;
                }
                is_above = true;
                above.push(number);
                excess_bytes += excess;
                if excess_bytes >= bytes || above.len() == count {
                    return above;
                }
            }
            if !is_above {
                break;
            }
        }
        above
    }

    /// Returns `true` if a tenant has more than its share of `max`.
    pub(super) fn is_any_above_share(&self, max: u64) -> bool {
        !self.above_share(max, 1, 1).is_empty()
    }

    /// Records that a tenant wants bytes, which reserves its share until `until` or longer.
    pub(super) fn record_demand(&mut self, number: TenantNumber, kind: Kind, until: Instant) {
        let kind = kind as usize;
        let Some(tenant) = self.tenants.get(&number) else { return };
        let before = tenant.demand_until[kind];
        if before.is_some_and(|before| before >= until) {
            return;
        }
        if let Some(before) = before {
            self.demand_ends.remove(&(before, kind, number));
        }
        self.demand_ends.insert((until, kind, number));
        self.update(number, kind, |tenant| tenant.demand_until[kind] = Some(until));
    }

    /// Ends recorded demand that is over. Each record ends once, so a charge costs O(log n) on
    /// average.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(&(until, kind, number)) = self.demand_ends.first()
            && until <= now
        {
            self.demand_ends.pop_first();
            self.update(number, kind, |tenant| tenant.demand_until[kind] = None);
        }
    }

    pub(super) fn peer(&self, number: TenantNumber) -> Option<Peer> {
        self.tenants.get(&number).map(|tenant| tenant.key.0)
    }

    /// Returns the bytes that a tenant may use of `max`: equal shares of all peers whose tenants
    /// have demand, divided among those tenants. The caller has called [`TenantTable::expire`].
    pub(super) fn share(&self, number: TenantNumber, kind: Kind, max: u64) -> u64 {
        let Some(tenant) = self.tenants.get(&number) else { return max };
        let active = &self.active[kind as usize];
        let of_peer = active.get(&tenant.key.0).copied().unwrap_or(0);
        let peers = active.len() as u64 + u64::from(of_peer == 0);
        let tenants = of_peer + u64::from(!tenant.is_active(kind as usize));
        max / peers / tenants
    }

    fn deactivate(&mut self, peer: Peer, kind: usize) {
        let Some(of_peer) = self.active[kind].get_mut(&peer) else { return };
        subtract(of_peer, 1);
        if *of_peer == 0 {
            self.active[kind].remove(&peer);
        }
    }

    fn update(&mut self, number: TenantNumber, kind: usize, change: impl FnOnce(&mut Tenant)) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        let (was_active, before) = (tenant.is_active(kind), tenant.reducible());
        change(tenant);
        let peer = tenant.key.0;
        self.largest.replace(peer, number, before, tenant.reducible());
        match (was_active, tenant.is_active(kind)) {
            (false, true) => *self.active[kind].entry(peer).or_default() += 1,
            (true, false) => self.deactivate(peer, kind),
            (false, false) | (true, true) => {}
        }
        if kind == Kind::Puts as usize {
            self.update_weight(peer);
        }
    }
}
