//! The index of L2: each resident page by its id.
//!
//! Invariants:
//! - It has the pages that [`L2Policy`](crate::policy::L2Policy) keeps. [`Tiers`](super::Tiers)
//!   changes both under its `state` lock.
//! - A lookup takes one shard's lock, and no thread waits for another lock or does I/O under it.
//! - Every entry and every end of a page is recorded for KV events, in order: no other code changes
//!   the index.
//!
//! An entry is a pointer, because the page has the id. Decision record 0016 compares it with
//! foyer's, which took 179 bytes per page.

use crate::page::Page;
use crate::page_changes::ChangeQueue;
use crate::policy::{hash_shards, page_hash};
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use larder_format::PageId;
use larder_runtime::sync::RwLock;
use std::sync::Arc;

pub(super) struct PageIndex {
    seed: u64,
    /// Queue of the changes, if KV events are on.
    recorded: Option<Arc<ChangeQueue>>,
    /// A leaf lock each. Many, because a table that grows moves all its entries at once.
    shards: Box<[RwLock<HashTable<Arc<Page>>>]>,
}

impl PageIndex {
    /// Creates an empty index for an L2 of that size, which records its changes in `recorded`. The
    /// seed keeps clients from choosing ids that collide.
    pub(super) fn new(seed: u64, l2_bytes: u64, recorded: Option<Arc<ChangeQueue>>) -> PageIndex {
        PageIndex { seed, recorded, shards: (0..hash_shards(l2_bytes)).map(|_| RwLock::default()).collect() }
    }

    pub(super) fn recorded(&self) -> Option<&Arc<ChangeQueue>> {
        self.recorded.as_ref()
    }

    pub(super) fn hash(&self, id: &PageId) -> u64 {
        page_hash(self.seed, id)
    }

    pub(super) fn get(&self, id: &PageId) -> Option<Arc<Page>> {
        let hash = self.hash(id);
        self.shard(hash).read().find(hash, |page| page.is(id)).cloned()
    }

    pub(super) fn contains(&self, id: &PageId) -> bool {
        let hash = self.hash(id);
        self.shard(hash).read().find(hash, |page| page.is(id)).is_some()
    }

    /// Inserts a page. Returns the put that it replaces, to be dropped without a lock.
    pub(super) fn insert(&self, page: Arc<Page>) -> Option<Arc<Page>> {
        if let Some(recorded) = &self.recorded {
            recorded.stored(&page);
        }
        let id = page.id();
        let hash = self.hash(&id);
        let mut shard = self.shard(hash).write();
        match shard.entry(hash, |page| page.is(&id), |page| page_hash(self.seed, &page.id())) {
            Entry::Occupied(mut entry) => Some(std::mem::replace(entry.get_mut(), page)),
            Entry::Vacant(entry) => {
                entry.insert(page);
                None
            }
        }
    }

    pub(super) fn remove(&self, id: &PageId) -> Option<Arc<Page>> {
        let hash = self.hash(id);
        let mut shard = self.shard(hash).write();
        let removed = shard.find_entry(hash, |page| page.is(id)).ok().map(|entry| entry.remove().0);
        drop(shard);
        if let (Some(recorded), Some(page)) = (&self.recorded, &removed) {
            recorded.removed(page);
        }
        removed
    }

    fn shard(&self, hash: u64) -> &RwLock<HashTable<Arc<Page>>> {
        // The table uses the lowest and the highest bits.
        &self.shards[(hash >> 32) as usize % self.shards.len()]
    }
}
