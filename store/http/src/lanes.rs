//! Places for work in progress, with a line in front of them.

use crate::shares::PeerAddress;
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Places of which all peers have the same part while they wait: a peer has a few pieces of work in
/// the common line, and its others wait behind those. So no crowd delays another peer by more than
/// that.
#[derive(Debug)]
pub struct PeerLane {
    places: Arc<Semaphore>,
    per_peer: usize,
    /// Permits to wait for places, of the peers that have work here.
    peers: Mutex<BTreeMap<PeerAddress, Weak<Semaphore>>>,
}

/// Places that a piece of work has. Dropping it gives them back.
#[derive(Debug)]
pub struct LanePlaces {
    _own: OwnedSemaphorePermit,
    _places: OwnedSemaphorePermit,
}

impl PeerLane {
    /// Lane of which a peer has `per_peer` pieces of work in the line or at a place.
    pub fn new(places: usize, per_peer: usize) -> PeerLane {
        PeerLane { places: Arc::new(Semaphore::new(places)), per_peer, peers: Mutex::default() }
    }

    /// Waits for `places` places in the order of arrival, behind earlier work of the same peer.
    /// Never returns `None`: the lane is not closed.
    pub async fn enter(&self, peer: PeerAddress, places: u32) -> Option<LanePlaces> {
        let own = {
            let mut peers = self.peers.lock();
            peers.retain(|_, own| own.strong_count() > 0);
            let known = peers.get(&peer).and_then(Weak::upgrade);
            let own = known.unwrap_or_else(|| Arc::new(Semaphore::new(self.per_peer)));
            peers.insert(peer, Arc::downgrade(&own));
            own
        };
        let own = own.acquire_owned().await.ok()?;
        Some(LanePlaces { _own: own, _places: self.places.clone().acquire_many_owned(places).await.ok()? })
    }

    /// Number of peers that the lane remembers.
    pub fn peers(&self) -> usize {
        self.peers.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, poll};
    use std::pin::pin;

    #[tokio::test]
    async fn crowd_of_a_peer_leaves_a_place_to_the_next_one() {
        let lane = PeerLane::new(4, 3);
        let peer = |last| PeerAddress::of([10, 0, 0, last].into());
        let mut crowd: Vec<_> = (0..9).map(|_| Box::pin(lane.enter(peer(1), 1))).collect();
        let mut held: Vec<_> = crowd.iter_mut().filter_map(|place| place.now_or_never()).collect();
        assert_eq!(held.len(), 3);
        assert!(lane.enter(peer(2), 1).now_or_never().is_some());
        let mut wide = pin!(lane.enter(peer(3), 2));
        assert!(poll!(&mut wide).is_pending());
        held.pop();
        assert!(poll!(&mut wide).is_ready(), "before the rest of the crowd");
        drop((held, crowd));
        lane.enter(peer(4), 4).await;
        assert_eq!(lane.peers(), 1, "peers without work are forgotten");
    }
}
