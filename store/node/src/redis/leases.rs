//! Values that stay readable after a positive `EXISTS`.
//!
//! LMCache's native client asks `EXISTS` and then waits for the bytes of a `GET`. A null in their
//! place stalls it for ever. So a positive answer holds the value for [`LEASE_TIME`]: pages in DRAM
//! by a hold, pages on L3 by a touch, which keeps them from the next reclaim.
//!
//! Invariants:
//! - A lease never ends early.
//! - One peer leases at most half of the bytes that may be held, and half of [`LEASES_MAX`] values.
//!   The rest is for others.

use crate::holds::Hold;
use crate::places::Peer;
use larder_format::PageId;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time for which a value stays after a positive `EXISTS`.
pub(super) const LEASE_TIME: Duration = Duration::from_secs(30);
/// Maximum number of leases of a node. An entry takes about 300 bytes and 24 for each page.
const LEASES_MAX: usize = 16 << 10;

pub(super) struct Leases {
    bytes_max: u64,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_key: BTreeMap<PageId, Lease>,
    by_end: BTreeMap<(Instant, PageId), ()>,
    peers: BTreeMap<Peer, PeerUse>,
}

#[derive(Default)]
struct PeerUse {
    leases: usize,
    bytes: u64,
}

struct Lease {
    /// Generation of the manifest.
    generation: u64,
    ends_at: Instant,
    peer: Peer,
    bytes: u64,
    _holds: Vec<Hold>,
}

impl Leases {
    pub(super) fn new(held_bytes_max: u64) -> Leases {
        Leases { bytes_max: held_bytes_max / 2, table: Mutex::default() }
    }

    /// Extends the lease of this put of a key. Returns `false` if there is none.
    pub(super) fn extend(&self, id: &PageId, generation: u64, now: Instant) -> bool {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let Some(lease) = table.by_key.get_mut(id).filter(|lease| lease.generation == generation) else { return false };
        table.by_end.remove(&(lease.ends_at, *id));
        lease.ends_at = now + LEASE_TIME;
        table.by_end.insert((lease.ends_at, *id), ());
        true
    }

    /// Returns `true` if `peer` may lease a further value of so many bytes.
    pub(super) fn has_room(&self, peer: Peer, bytes: u64) -> bool {
        let table = self.table.lock();
        let used = table.peers.get(&peer);
        let fits = |used: &PeerUse| used.leases < LEASES_MAX / 2 && used.bytes + bytes <= self.bytes_max;
        table.by_key.len() < LEASES_MAX && used.map_or(bytes <= self.bytes_max, fits)
    }

    /// Leases the pages of a value. Replaces the lease of an older put of the key.
    pub(super) fn grant(&self, id: PageId, generation: u64, peer: Peer, holds: Vec<Hold>, now: Instant) {
        let bytes = holds.iter().map(|hold| u64::from(hold.page().bytes())).sum();
        let ends_at = now + LEASE_TIME;
        let mut guard = self.table.lock();
        let before = guard.remove(&id);
        guard.by_end.insert((ends_at, id), ());
        let used = guard.peers.entry(peer).or_default();
        used.leases += 1;
        used.bytes += bytes;
        guard.by_key.insert(id, Lease { generation, ends_at, peer, bytes, _holds: holds });
        drop(guard);
        // Freeing arena memory can take long.
        drop(before);
    }

    /// Ends the leases whose time is over.
    pub(super) fn expire(&self, now: Instant) {
        let mut ended = Vec::new();
        let mut table = self.table.lock();
        while let Some((&(ends_at, id), ())) = table.by_end.first_key_value()
            && ends_at <= now
        {
            ended.extend(table.remove(&id));
        }
        drop(table);
        drop(ended);
    }
}

impl Table {
    fn remove(&mut self, id: &PageId) -> Option<Lease> {
        let lease = self.by_key.remove(id)?;
        self.by_end.remove(&(lease.ends_at, *id));
        let used = self.peers.get_mut(&lease.peer).expect("a peer with a lease has an entry");
        used.leases -= 1;
        used.bytes -= lease.bytes;
        if used.leases == 0 {
            self.peers.remove(&lease.peer);
        }
        Some(lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};

    #[test]
    fn leases_end_with_their_time_and_no_peer_takes_all() {
        let leases = Leases::new(100);
        let id = |key: u8| PageId { namespace: NamespaceId([1; 32]), key: PageKey([key; 32]) };
        let start = Instant::now();
        let mine = Peer::Local;
        leases.grant(id(1), 7, mine, Vec::new(), start);
        assert!(!leases.extend(&id(1), 8, start) && !leases.extend(&id(2), 7, start), "another put, another key");
        leases.expire(start + LEASE_TIME - Duration::from_millis(1));
        assert!(leases.extend(&id(1), 7, start + Duration::from_secs(1)));
        leases.expire(start + LEASE_TIME);
        assert!(leases.extend(&id(1), 7, start + Duration::from_secs(1)), "it was extended");
        leases.expire(start + LEASE_TIME + Duration::from_secs(1));
        assert!(!leases.extend(&id(1), 7, start));
        assert!(leases.has_room(mine, 50) && !leases.has_room(mine, 51));
        let table = leases.table.lock();
        assert!(table.by_key.is_empty() && table.by_end.is_empty() && table.peers.is_empty());
    }
}
