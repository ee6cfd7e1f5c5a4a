//! Forgets that a node has recorded, to refuse older copies of the pages.
//!
//! Each namespace has a table of its own with its latest forgets. The table belongs to the peer
//! that forgot first in it. Peers share the memory: a flood of forgets takes it from the flooding
//! peer, and makes copies of its own namespaces count as forgotten.
//!
//! Invariants:
//! - A forget is never lost. Where its entry had to go, older copies count as forgotten: those of
//!   its namespace, or of the few namespaces that share a slot of `dropped`. A refused copy costs a
//!   computation.
//! - There are at most [`ENTRIES_MAX`] entries and [`TABLES_MAX`] tables, of which a peer has at
//!   most [`TABLES_OF_PEER_MAX`]. Each entry takes about 60 bytes: 16 MiB in all.
//! - If there are too many, the peer with most of them loses its oldest ones.

use crate::places::Peer;
use larder_format::{NamespaceId, PageId, PageKey};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

const ENTRIES_MAX: usize = 1 << 18;
const TABLES_MAX: usize = 256;
/// As many as the namespaces of a peer that have a floor.
const TABLES_OF_PEER_MAX: usize = 16;
/// Slots for namespaces without a table that were forgotten in. Each needs a connection of its own,
/// so a client rarely fills many: 128 KiB.
const DROPPED_SLOTS: usize = 1 << 14;

pub(super) struct Forgets {
    tables: BTreeMap<NamespaceId, Table>,
    peers: BTreeMap<Peer, PeerUse>,
    entries: usize,
    /// By the hash of a namespace: its copies below this generation count as forgotten.
    dropped: Vec<u64>,
    /// Random, so that no client can choose a namespace for its slot or a page for its entry.
    hash_seed: u64,
}

#[derive(Default)]
struct PeerUse {
    entries: usize,
    tables: usize,
}

/// Latest forgets of a namespace. A forget is the number of the first put after it.
struct Table {
    owner: Peer,
    /// Latest forget by the hash of a key.
    forgets: BTreeMap<u64, u64>,
    /// The same, the oldest first.
    by_age: BTreeSet<(u64, u64)>,
    /// Copies below this generation count as forgotten: entries were dropped.
    dropped_below: u64,
    last: u64,
}

impl Table {
    fn remove_oldest(&mut self) -> bool {
        let Some((forget, key)) = self.by_age.pop_first() else { return false };
        self.forgets.remove(&key);
        self.dropped_below = forget;
        true
    }
}

impl Forgets {
    pub(super) fn new(hash_seed: u64) -> Self {
        Forgets {
            tables: BTreeMap::new(),
            peers: BTreeMap::new(),
            entries: 0,
            dropped: vec![0; DROPPED_SLOTS],
            hash_seed,
        }
    }

    /// Records that a client of `peer` forgets a page. `next` is the number of the first put after
    /// that, and does not decrease. Costs O(log n), and O(tables) once the memory is full.
    pub(super) fn record(&mut self, peer: Peer, id: &PageId, next: u64) {
        let key = self.hash_of_key(&id.key);
        if !self.tables.contains_key(&id.namespace) {
            self.add_table(peer, id.namespace);
        }
        let Some(table) = self.tables.get_mut(&id.namespace) else { return };
        table.last = next;
        table.by_age.insert((next, key));
        match table.forgets.insert(key, next) {
            Some(before) if before != next => drop(table.by_age.remove(&(before, key))),
            Some(_) => {}
            None => {
                self.peers.entry(table.owner).or_default().entries += 1;
                self.entries += 1;
            }
        }
        if self.entries > ENTRIES_MAX {
            self.drop_entry();
        }
    }

    /// Returns `false` only if the page was certainly not forgotten after `generation`.
    pub(super) fn is_forgotten_since(&self, id: &PageId, generation: u64) -> bool {
        // Also with a table: an earlier one of the namespace may have been dropped.
        let is_dropped = self.dropped[self.slot_of(&id.namespace)] > generation;
        let Some(table) = self.tables.get(&id.namespace) else { return is_dropped };
        let forget = table.forgets.get(&self.hash_of_key(&id.key)).copied().unwrap_or(0);
        is_dropped || forget.max(table.dropped_below) > generation
    }

    fn add_table(&mut self, peer: Peer, namespace: NamespaceId) {
        if self.peers.get(&peer).is_some_and(|used| used.tables >= TABLES_OF_PEER_MAX) {
            self.drop_table_of(peer);
        } else if self.tables.len() >= TABLES_MAX
            && let Some(peer) = self.largest_peer(|used| used.tables)
        {
            self.drop_table_of(peer);
        }
        let table = Table { owner: peer, forgets: BTreeMap::new(), by_age: BTreeSet::new(), dropped_below: 0, last: 0 };
        self.tables.insert(namespace, table);
        self.peers.entry(peer).or_default().tables += 1;
    }

    /// Drops the oldest entry of the largest table of the peer with most entries.
    fn drop_entry(&mut self) {
        let Some(peer) = self.largest_peer(|used| used.entries) else { return };
        let tables = self.tables.values_mut().filter(|table| table.owner == peer);
        if let Some(table) = tables.max_by_key(|table| table.forgets.len())
            && table.remove_oldest()
        {
            self.entries -= 1;
            self.count(peer).entries -= 1;
        }
    }

    /// Drops the table of a peer in which no client forgot for longest.
    fn drop_table_of(&mut self, peer: Peer) {
        let tables = self.tables.iter().filter(|(_, table)| table.owner == peer);
        let Some((&namespace, _)) = tables.min_by_key(|(_, table)| table.last) else { return };
        let Some(table) = self.tables.remove(&namespace) else { return };
        let slot = self.slot_of(&namespace);
        self.dropped[slot] = self.dropped[slot].max(table.last);
        self.entries -= table.forgets.len();
        let used = self.count(peer);
        used.entries -= table.forgets.len();
        used.tables -= 1;
        if used.tables == 0 {
            self.peers.remove(&peer);
        }
    }

    fn count(&mut self, peer: Peer) -> &mut PeerUse {
        self.peers.entry(peer).or_default()
    }

    fn largest_peer(&self, size: impl Fn(&PeerUse) -> usize) -> Option<Peer> {
        self.peers.iter().max_by_key(|(_, used)| size(used)).map(|(&peer, _)| peer)
    }

    fn slot_of(&self, namespace: &NamespaceId) -> usize {
        // The remainder fits a usize.
        (self.hash(namespace) % DROPPED_SLOTS as u64) as usize
    }

    /// Keys that share a hash share their latest forget, which errs towards refusal.
    fn hash_of_key(&self, key: &PageKey) -> u64 {
        self.hash(key)
    }

    fn hash(&self, value: &impl Hash) -> u64 {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.hash_seed);
        value.hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn id(namespace: u16, number: u32) -> PageId {
        let mut bytes = [7; 32];
        bytes[..2].copy_from_slice(&namespace.to_le_bytes());
        PageId { namespace: NamespaceId(bytes), key: PageKey::chain(None, &[number]) }
    }

    fn peer(number: u8) -> Peer {
        Peer::Address(Ipv4Addr::new(10, 0, 0, number).into())
    }

    /// Numbers of the pages up to `count` whose copies of `generation` are admitted.
    fn admitted(forgets: &Forgets, namespace: u16, count: u32, generation: u64) -> usize {
        (0..count).filter(|&number| !forgets.is_forgotten_since(&id(namespace, number), generation)).count()
    }

    #[test]
    fn flood_of_a_peer_leaves_the_copies_of_others() {
        let mut forgets = Forgets::new(7);
        (0..1000).for_each(|number| forgets.record(peer(1), &id(1, number), 10 + u64::from(number)));
        for number in 0..3 * ENTRIES_MAX as u32 {
            forgets.record(peer(2), &id(2 + (number % 5) as u16, number), 5_000 + u64::from(number));
        }
        assert!(forgets.entries <= ENTRIES_MAX);
        assert_eq!(admitted(&forgets, 1, 1000, 5), 0, "forgets are not lost");
        assert_eq!(admitted(&forgets, 1, 2000, 5), 1000, "other pages of the namespace");
        assert_eq!(admitted(&forgets, 9, 1000, 5), 1000, "another namespace");
        assert_eq!(admitted(&forgets, 2, 1000, 4_999), 0, "the flooded namespace");
    }

    #[test]
    fn no_forget_is_lost_whatever_goes() {
        // The tables of 40 peers exceed those of the node, those of 7 do not.
        for peers in [7, 40] {
            let mut forgets = Forgets::new(7);
            let mut recorded = Vec::new();
            for number in 0..100_000_u32 {
                let page = id((number % 300) as u16, number / 1000);
                forgets.record(peer((number % peers) as u8), &page, u64::from(number) + 1);
                recorded.push((page, u64::from(number)));
            }
            assert!(forgets.tables.len() <= TABLES_MAX);
            assert!(forgets.peers.values().all(|used| used.tables <= TABLES_OF_PEER_MAX));
            assert_eq!(forgets.peers.values().map(|used| used.entries).sum::<usize>(), forgets.entries);
            assert!(recorded.iter().all(|(page, older)| forgets.is_forgotten_since(page, *older)));
        }
    }

    #[test]
    fn namespaces_without_end_cost_only_few_others_their_copies() {
        let mut forgets = Forgets::new(7);
        (0..1000).for_each(|namespace| forgets.record(peer(1), &id(namespace, 0), 10 + u64::from(namespace)));
        let refused = (1000..2000).filter(|&namespace| forgets.is_forgotten_since(&id(namespace, 1), 5)).count();
        assert!(refused < 150, "{refused} of 1,000 namespaces");
    }
}
