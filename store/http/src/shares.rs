//! Budgets that the peers of a server share: bytes or places.
//!
//! Invariants:
//!
//! - All peers together hold at most the budget.
//! - A peer takes more only while it then holds at most [`PEER_PART`] times what stays free. So one
//!   peer has three quarters at most, and something is left for the next one: `n` peers that take
//!   all they can leave one part in `1 + 3 n`.
//!
//! These are the thresholds that the node has for reads (Choudhury and Hahne, "Dynamic queue length
//! thresholds for shared-memory packet switches", 1998). Peers that come and go need no
//! configuration, and a peer that asks for nothing reserves nothing.

use larder_runtime::lock::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum of a peer, as a multiple of what stays free.
const PEER_PART: usize = 3;

/// Clients that share limits: those behind one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerAddress(IpAddr);

impl PeerAddress {
    /// Counts only the network of an IPv6 address: one client usually owns a whole /64.
    pub fn of(address: IpAddr) -> PeerAddress {
        match address.to_canonical() {
            IpAddr::V6(address) => PeerAddress(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into()),
            v4 => PeerAddress(v4),
        }
    }
}

impl std::fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Default for PeerAddress {
    /// Peer of requests that no server received, such as those of tests.
    fn default() -> Self {
        PeerAddress(Ipv4Addr::UNSPECIFIED.into())
    }
}

/// Bytes or places that peers share.
#[derive(Debug)]
pub struct PeerBudget {
    units_max: usize,
    held: Mutex<Held>,
    /// Shows the units held to operators.
    gauge: Gauge,
}

#[derive(Debug, Default)]
struct Held {
    all: usize,
    by_peer: BTreeMap<PeerAddress, usize>,
}

/// Share of one peer.
#[derive(Debug, Clone)]
pub struct PeerShare {
    budget: Arc<PeerBudget>,
    peer: PeerAddress,
}

/// Units that a peer holds. Dropping it gives them back.
#[derive(Debug)]
pub struct PeerCharge {
    share: PeerShare,
    /// Changed under the lock of the budget only.
    units: AtomicUsize,
}

impl PeerBudget {
    pub fn new(units_max: usize) -> Arc<PeerBudget> {
        PeerBudget::with_gauge(units_max, Gauge::default())
    }

    pub(crate) fn with_gauge(units_max: usize, gauge: Gauge) -> Arc<PeerBudget> {
        Arc::new(PeerBudget { units_max, held: Mutex::default(), gauge })
    }

    /// Most units that a peer can ever hold.
    pub fn units_max_of_peer(&self) -> usize {
        let units = PEER_PART as u128 * (self.units_max as u128 + 1) / (PEER_PART as u128 + 1);
        units as usize
    }

    pub fn of(self: &Arc<Self>, peer: PeerAddress) -> PeerShare {
        PeerShare { budget: self.clone(), peer }
    }

    pub fn free(&self) -> usize {
        self.units_max - self.held.lock().all
    }

    fn take(&self, peer: PeerAddress, units: usize) -> bool {
        if units == 0 {
            // Also for a peer that has more than its part, because others have taken some since.
            return true;
        }
        let mut guard = self.held.lock();
        let held = &mut *guard;
        let free = self.units_max - held.all;
        let own = held.by_peer.get(&peer).copied().unwrap_or(0);
        // One more than what stays free: of one or two places a peer may take all.
        let may_take = units <= free && own + units <= (free - units + 1).saturating_mul(PEER_PART);
        if may_take {
            held.all += units;
            held.by_peer.insert(peer, own + units);
            self.gauge.inc_by(units as i64);
        }
        may_take
    }

    fn give_back(&self, peer: PeerAddress, units: usize) {
        if units == 0 {
            return;
        }
        let mut held = self.held.lock();
        held.all -= units;
        if let Some(own) = held.by_peer.get_mut(&peer) {
            *own -= units;
            if *own == 0 {
                held.by_peer.remove(&peer);
            }
        }
        self.gauge.dec_by(units as i64);
    }
}

impl PeerShare {
    /// Takes `units`. Returns `None` if the budget or the peer's part of it has too few. Never
    /// waits.
    pub fn take(&self, units: usize) -> Option<PeerCharge> {
        let charge = self.charge();
        charge.raise_to(units).then_some(charge)
    }

    /// Charge of no units, which may grow.
    pub fn charge(&self) -> PeerCharge {
        PeerCharge { share: self.clone(), units: AtomicUsize::new(0) }
    }
}

impl PeerCharge {
    pub fn units(&self) -> usize {
        // Relaxed: the counter guards no other memory.
        self.units.load(Ordering::Relaxed)
    }

    pub fn share(&self) -> &PeerShare {
        &self.share
    }

    /// Raises the charge to `units`. Returns `false`, and changes nothing, if there are too few.
    /// Only one task may raise a charge at a time.
    pub fn raise_to(&self, units: usize) -> bool {
        let has_room = self.share.budget.take(self.share.peer, units.saturating_sub(self.units()));
        if has_room {
            // Relaxed: as above.
            self.units.fetch_max(units, Ordering::Relaxed);
        }
        has_room
    }

    /// Takes over the units of another charge of the same share.
    pub fn absorb(&self, other: PeerCharge) {
        assert!(Arc::ptr_eq(&self.share.budget, &other.share.budget) && self.share.peer == other.share.peer);
        // Relaxed: as above.
        self.units.fetch_add(other.units.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for PeerCharge {
    fn drop(&mut self) {
        self.share.budget.give_back(self.share.peer, *self.units.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> PeerAddress {
        PeerAddress::of([10, 0, 0, last].into())
    }

    /// Takes single units until there are no more.
    fn take_all(share: &PeerShare) -> Vec<PeerCharge> {
        std::iter::from_fn(|| share.take(1)).collect()
    }

    #[test]
    fn greedy_peers_leave_a_part_to_the_next_one() {
        let budget = PeerBudget::new(1000);
        let taken: Vec<Vec<PeerCharge>> = (1..=4).map(|at| take_all(&budget.of(peer(at)))).collect();
        let counts: Vec<usize> = taken.iter().map(Vec::len).collect();
        assert_eq!(counts[0], budget.units_max_of_peer());
        assert_eq!(counts, [750, 188, 47, 12]);
        assert!(budget.of(peer(1)).take(0).is_some());
        drop(taken);
        assert_eq!((budget.free(), budget.held.lock().by_peer.len()), (1000, 0));
        assert_eq!(take_all(&budget.of(peer(5))).len(), 750, "an idle peer reserves nothing");
    }

    #[test]
    fn smallest_budgets_serve_a_single_peer() {
        for (units, of_peer) in [(0, 0), (1, 1), (2, 2), (4, 3), (8, 6)] {
            let budget = PeerBudget::new(units);
            assert_eq!(budget.units_max_of_peer(), of_peer);
            assert_eq!(take_all(&budget.of(peer(1))).len(), of_peer);
        }
        assert_eq!(PeerBudget::new(usize::MAX).units_max_of_peer(), usize::MAX / 4 * 3 + 3);
    }

    #[test]
    fn charge_grows_within_the_share_and_absorbs_others() {
        let budget = PeerBudget::new(100);
        let share = budget.of(peer(1));
        let (first, second) = (share.take(40).unwrap(), share.take(20).unwrap());
        assert!(!first.raise_to(60), "80 of 100");
        assert!(first.raise_to(55) && first.raise_to(50));
        assert_eq!((first.units(), budget.free()), (55, 25));
        first.absorb(second);
        assert_eq!((first.units(), budget.free()), (75, 25));
        drop(first);
        assert_eq!(budget.free(), 100);
    }

    #[test]
    fn hosts_of_an_ipv6_network_are_one_peer() {
        let of = |address: &str| PeerAddress::of(address.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), peer(1));
    }
}
