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
use larder_runtime::AgeOrder;
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
    /// Peers with entries, by their number.
    by_entries: BTreeSet<(usize, Peer)>,
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
    /// Its tables with entries, by their number.
    by_size: BTreeSet<(usize, NamespaceId)>,
}

/// Latest forgets of a namespace. A forget is the number of the first put after it.
pub(super) struct Table {
    owner: Peer,
    /// Latest forget by the hash of a key.
    forgets: AgeOrder<u64, u64>,
    /// Copies below this generation count as forgotten: entries were dropped.
    dropped_below: u64,
    last: u64,
}

impl Table {
    fn remove_oldest(&mut self) -> bool {
        let Some((forget, _)) = self.forgets.pop_oldest() else { return false };
        self.dropped_below = forget;
        true
    }
}

impl Forgets {
    pub(super) fn new(hash_seed: u64) -> Self {
        Forgets {
            tables: BTreeMap::new(),
            peers: BTreeMap::new(),
            by_entries: BTreeSet::new(),
            entries: 0,
            dropped: vec![0; DROPPED_SLOTS],
            hash_seed,
        }
    }

    /// Records that a client of `peer` forgets a page. `next` is the number of the first put after
    /// that, and does not decrease. Costs O(log n).
    ///
    /// Returns the table that had to go for one of a new namespace. To free it may take long.
    #[must_use]
    pub(super) fn record(&mut self, peer: Peer, id: &PageId, next: u64) -> Option<Table> {
        let key = self.hash_of_key(&id.key);
        let retired = match self.tables.contains_key(&id.namespace) {
            true => None,
            false => self.add_table(peer, id.namespace),
        };
        let table = self.tables.get_mut(&id.namespace)?;
        table.last = next;
        if table.forgets.set(key, next).is_none() {
            let (owner, size) = (table.owner, table.forgets.len());
            self.resize(owner, id.namespace, (size - 1, size));
        }
        if self.entries > ENTRIES_MAX {
            self.drop_entry();
        }
        retired
    }

    /// Returns `false` only if the page was certainly not forgotten after `generation`.
    pub(super) fn is_forgotten_since(&self, id: &PageId, generation: u64) -> bool {
        // Also with a table: an earlier one of the namespace may have been dropped.
        let is_dropped = self.dropped[self.slot_of(&id.namespace)] > generation;
        let Some(table) = self.tables.get(&id.namespace) else { return is_dropped };
        let forget = table.forgets.time_of(&self.hash_of_key(&id.key)).unwrap_or(0);
        is_dropped || forget.max(table.dropped_below) > generation
    }

    /// Returns `true` if the table of the namespace has a forget of the page.
    pub(super) fn has(&self, id: &PageId) -> bool {
        let table = self.tables.get(&id.namespace);
        table.is_some_and(|table| table.forgets.time_of(&self.hash_of_key(&id.key)).is_some())
    }

    fn add_table(&mut self, peer: Peer, namespace: NamespaceId) -> Option<Table> {
        let is_peer_full = self.peers.get(&peer).is_some_and(|used| used.tables >= TABLES_OF_PEER_MAX);
        let loser = match is_peer_full {
            true => Some(peer),
            false if self.tables.len() >= TABLES_MAX => self.peer_with_most_tables(),
            false => None,
        };
        let retired = loser.and_then(|loser| self.take_table_of(loser));
        let table = Table { owner: peer, forgets: AgeOrder::default(), dropped_below: 0, last: 0 };
        self.tables.insert(namespace, table);
        self.peers.entry(peer).or_default().tables += 1;
        retired
    }

    /// Drops the oldest entry of the largest table of the peer with most entries.
    fn drop_entry(&mut self) {
        let Some(&(_, peer)) = self.by_entries.last() else { return };
        let largest = self.peers.get(&peer).and_then(|used| used.by_size.last());
        let Some(&(size, namespace)) = largest else { return };
        if self.tables.get_mut(&namespace).is_some_and(Table::remove_oldest) {
            self.resize(peer, namespace, (size, size - 1));
        }
    }

    /// Takes out the table of a peer in which no client forgot for longest.
    fn take_table_of(&mut self, peer: Peer) -> Option<Table> {
        let tables = self.tables.iter().filter(|(_, table)| table.owner == peer);
        let (&namespace, _) = tables.min_by_key(|(_, table)| table.last)?;
        let table = self.tables.remove(&namespace)?;
        let slot = self.slot_of(&namespace);
        self.dropped[slot] = self.dropped[slot].max(table.last);
        self.resize(peer, namespace, (table.forgets.len(), 0));
        let used = self.peers.entry(peer).or_default();
        used.tables -= 1;
        if used.tables == 0 {
            self.peers.remove(&peer);
        }
        Some(table)
    }

    /// Counts the entries of a table of `peer` that had `before` of them, and has `after` now.
    fn resize(&mut self, peer: Peer, namespace: NamespaceId, (before, after): (usize, usize)) {
        self.entries = self.entries - before + after;
        let used = self.peers.entry(peer).or_default();
        self.by_entries.remove(&(used.entries, peer));
        used.entries = used.entries - before + after;
        if used.entries > 0 {
            self.by_entries.insert((used.entries, peer));
        }
        used.by_size.remove(&(before, namespace));
        if after > 0 {
            used.by_size.insert((after, namespace));
        }
    }

    fn peer_with_most_tables(&self) -> Option<Peer> {
        self.peers.iter().max_by_key(|(_, used)| used.tables).map(|(&peer, _)| peer)
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

    /// Records a forget, and returns the number of entries that went with a table.
    fn record(forgets: &mut Forgets, peer: Peer, id: &PageId, next: u64) -> usize {
        forgets.record(peer, id, next).map_or(0, |table| table.forgets.len())
    }

    /// Compares the indices with what they stand for.
    fn check_indices(forgets: &Forgets) {
        for (peer, used) in &forgets.peers {
            let tables = || forgets.tables.iter().filter(|(_, table)| table.owner == *peer);
            let by_size = tables().map(|(namespace, table)| (table.forgets.len(), *namespace));
            assert_eq!(used.by_size, by_size.filter(|&(size, _)| size > 0).collect());
            assert_eq!(used.tables, tables().count());
            assert_eq!(used.entries, tables().map(|(_, table)| table.forgets.len()).sum::<usize>());
        }
        let by_entries = forgets.peers.iter().map(|(peer, used)| (used.entries, *peer));
        assert_eq!(forgets.by_entries, by_entries.filter(|&(entries, _)| entries > 0).collect());
        assert_eq!(forgets.peers.values().map(|used| used.entries).sum::<usize>(), forgets.entries);
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
        for number in 0..1000 {
            record(&mut forgets, peer(1), &id(1, number), 10 + u64::from(number));
        }
        for number in 0..3 * ENTRIES_MAX as u32 {
            record(&mut forgets, peer(2), &id(2 + (number % 5) as u16, number), 5_000 + u64::from(number));
        }
        assert_eq!(forgets.entries, ENTRIES_MAX);
        check_indices(&forgets);
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
                record(&mut forgets, peer((number % peers) as u8), &page, u64::from(number) + 1);
                recorded.push((page, u64::from(number)));
            }
            assert!(forgets.tables.len() <= TABLES_MAX);
            assert!(forgets.peers.values().all(|used| used.tables <= TABLES_OF_PEER_MAX));
            check_indices(&forgets);
            assert!(recorded.iter().all(|(page, older)| forgets.is_forgotten_since(page, *older)));
        }
    }

    #[test]
    fn namespaces_without_end_cost_only_few_others_their_copies() {
        let mut forgets = Forgets::new(7);
        for namespace in 0..1000 {
            record(&mut forgets, peer(1), &id(namespace, 0), 10 + u64::from(namespace));
        }
        let refused = (1000..2000).filter(|&namespace| forgets.is_forgotten_since(&id(namespace, 1), 5)).count();
        assert!(refused < 150, "{refused} of 1,000 namespaces");
    }

    #[test]
    fn table_that_goes_returns_to_the_caller() {
        let mut forgets = Forgets::new(7);
        for number in 0..1000 {
            assert_eq!(record(&mut forgets, peer(1), &id(1, number), 10), 0);
        }
        let namespaces = 2..1 + TABLES_OF_PEER_MAX as u16;
        assert!(namespaces.clone().all(|namespace| record(&mut forgets, peer(1), &id(namespace, 0), 11) == 0));
        assert_eq!(record(&mut forgets, peer(1), &id(namespaces.end, 0), 12), 1000);
        assert!(forgets.is_forgotten_since(&id(1, 1), 9));
    }
}
