//! Slots of the resident pages by id.

use super::page_hash;
use hashbrown::HashTable;
use larder_evict::Slot;
use larder_format::PageId;

/// Bytes of L2 per hash table. A table that grows moves all its entries at once, which takes about
/// 100 ns each: with pages of 4 KiB less than a millisecond.
const BYTES_PER_SHARD: u64 = 16 << 20;
/// Bounds the memory of empty tables.
const SHARDS_MAX: u64 = 4096;

/// Number of hash tables among which the pages of an L2 of `bytes` are divided.
pub(crate) fn hash_shards(bytes: u64) -> usize {
    (bytes / BYTES_PER_SHARD).clamp(1, SHARDS_MAX).next_power_of_two() as usize
}

/// Maps ids to slots. It keeps no ids: the caller has the pages.
#[derive(Debug)]
pub(super) struct SlotTable {
    seed: u64,
    shards: Box<[HashTable<Slot>]>,
}

impl SlotTable {
    /// Creates an empty table. The seed keeps clients from choosing ids that collide.
    pub(super) fn new(seed: u64, l2_bytes: u64) -> SlotTable {
        SlotTable { seed, shards: (0..hash_shards(l2_bytes)).map(|_| HashTable::new()).collect() }
    }

    pub(super) fn hash(&self, id: &PageId) -> u64 {
        page_hash(self.seed, id)
    }

    /// Returns the slot with this hash that `is_it` accepts.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(Slot) -> bool) -> Option<Slot> {
        self.shards[self.shard(hash)].find(hash, |slot| is_it(*slot)).copied()
    }

    /// Adds a slot, whose id the table must not have. `id_of` returns the ids of all slots.
    pub(super) fn insert(&mut self, hash: u64, slot: Slot, id_of: impl Fn(Slot) -> Option<PageId>) {
        let seed = self.seed;
        let shard = self.shard(hash);
        // Every slot in the table has a page: `remove_page` empties both.
        let rehash = |slot: &Slot| id_of(*slot).map_or(0, |id| page_hash(seed, &id));
        self.shards[shard].insert_unique(hash, slot, rehash);
    }

    pub(super) fn remove(&mut self, hash: u64, slot: Slot) {
        let shard = self.shard(hash);
        if let Ok(entry) = self.shards[shard].find_entry(hash, |other| *other == slot) {
            entry.remove();
        }
    }

    fn shard(&self, hash: u64) -> usize {
        // The table itself uses the lowest and the highest bits.
        (hash >> 32) as usize % self.shards.len()
    }
}
