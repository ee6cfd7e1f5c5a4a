//! Which page stands where.
//!
//! Always true: a page has at most one entry, and the bytes of a namespace are those of its entries' records.
//!
//! Entries lie in a slab of chunks, so that growing moves none of them; a table of slab numbers finds them by a seeded
//! hash. The table is cut into shards, as a table that grows moves all it has at once. Namespaces are few and long, so
//! entries name them by a number. A page's parent is known by 32 bits of its hash only: enough to find it, and when that
//! is wrong once in a billion, two pages that have nothing to do with each other leave in another order than they might.

use hashbrown::HashTable;
use larder_format::disk::{BLOCK_BYTES, RecordPlace, record_bytes};
use larder_format::footer::PageSummary;
use larder_format::{NamespaceId, PageId, PageKey};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hasher};

/// No slot.
pub(super) const NONE: u32 = u32::MAX;
/// Entries that are allocated at once.
const CHUNK: usize = 4096;
const SHARDS: usize = 64;
/// Set in [`Stored::block`] of a page that was asked for: a segment has far fewer blocks.
const USED: u32 = 1 << 31;
/// Most namespaces that are known for their quota alone.
pub(super) const WITHOUT_PAGES_MAX: usize = 4096;
/// An expiry in seconds that never comes.
const NEVER: u32 = u32::MAX;

/// What is kept of a page: 80 bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    key: PageKey,
    pub(super) number: u64,
    pub(super) generation: u64,
    pub(super) namespace: u32,
    parent_tag: u32,
    pub(super) segment: u32,
    /// Of the record in its segment, in blocks; and [`USED`].
    block: u32,
    pub(super) payload_bytes: u32,
    pub(super) position: u32,
    /// Rounded down, so that a page is gone rather a little too early.
    expires_s: u32,
    /// Where the keeper has it, or [`NONE`].
    pub(super) keeper: u32,
}

impl Stored {
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.block & !USED) * BLOCK_BYTES as u64
    }

    /// Somebody asked for it since it was put, or since the start.
    pub(super) fn is_used(&self) -> bool {
        self.block & USED != 0
    }

    pub(super) fn set_used(&mut self) {
        self.block |= USED;
    }

    pub(super) fn record_bytes(&self) -> u64 {
        record_bytes(self.payload_bytes as usize) as u64
    }

    /// 0: it has no end.
    pub(super) fn expires_unix_ms(&self) -> u64 {
        match self.expires_s {
            NEVER => 0,
            seconds => (u64::from(seconds) * 1000).max(1),
        }
    }

    fn is_same_put(&self, page: &PageSummary) -> bool {
        self.generation == page.generation
            && self.payload_bytes == page.payload_bytes
            && self.expires_s == seconds(page.expires_unix_ms)
    }
}

fn seconds(expires_unix_ms: u64) -> u32 {
    match expires_unix_ms {
        0 => NEVER,
        ms => (ms / 1000).min(u64::from(NEVER - 1)) as u32,
    }
}

/// A record of the very put that is found, mostly an older one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Original {
    pub(super) segment: u32,
    pub(super) offset: u64,
    pub(super) number: u64,
    pub(super) generation: u64,
}

impl Original {
    /// Of a record in a segment.
    pub(super) fn of(segment: u32, page: &PageSummary) -> Original {
        Original { segment, offset: page.offset, number: page.number, generation: page.generation }
    }
}

/// What is known of a namespace that has pages or a quota of its own.
#[derive(Debug)]
pub(super) struct Namespace {
    id: NamespaceId,
    pub(super) pages: u64,
    /// Bytes of the records of its pages.
    pub(super) bytes: u64,
    /// `u64::MAX`: none.
    pub(super) quota_bytes: u64,
    /// It stands in [`Index::without_pages`].
    listed: bool,
}

#[derive(Debug)]
pub(super) struct Index {
    seed: u64,
    quota_default: u64,
    /// Namespaces with a quota of their own that lost their last page, or never had one, oldest first; some have pages again.
    without_pages: VecDeque<u32>,
    chunks: Vec<Vec<Stored>>,
    free: Vec<u32>,
    shards: Vec<HashTable<u32>>,
    namespaces: Vec<Namespace>,
    namespaces_free: Vec<u32>,
    namespaces_by_id: BTreeMap<NamespaceId, u32>,
    len: usize,
    record_bytes: u64,
}

impl Index {
    pub(super) fn new(seed: u64, quota_default: u64) -> Index {
        Index {
            seed,
            quota_default,
            without_pages: VecDeque::new(),
            chunks: Vec::new(),
            free: Vec::new(),
            shards: (0..SHARDS).map(|_| HashTable::new()).collect(),
            namespaces: Vec::new(),
            namespaces_free: Vec::new(),
            namespaces_by_id: BTreeMap::new(),
            len: 0,
            record_bytes: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the records of all pages.
    pub(super) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> usize {
        let slab = self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<Stored>()).sum::<usize>();
        let tables = self.shards.iter().map(HashTable::allocation_size).sum::<usize>();
        let namespaces = self.namespaces.capacity() * (size_of::<Namespace>() + size_of::<(NamespaceId, u32)>());
        slab + tables + namespaces + (self.free.capacity() + self.namespaces_free.capacity()) * size_of::<u32>()
    }

    /// Stands for the page's whole name.
    pub(super) fn hash(&self, id: &PageId) -> u64 {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.seed);
        hasher.write(&id.namespace.0);
        hasher.write(&id.key.0);
        hasher.finish()
    }

    fn tag(&self, id: &PageId) -> u32 {
        (self.hash(id) >> 32) as u32
    }

    pub(super) fn find(&self, id: &PageId) -> Option<u32> {
        let namespace = *self.namespaces_by_id.get(&id.namespace)?;
        let tag = self.tag(id);
        let is_it = |&slot: &u32| {
            let stored = self.get(slot);
            stored.key == id.key && stored.namespace == namespace
        };
        self.shards[shard_of(tag)].find(spread(tag), is_it).copied()
    }

    /// The entry in a slot that is taken.
    pub(super) fn get(&self, slot: u32) -> &Stored {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Stored {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn id_of(&self, slot: u32) -> PageId {
        let stored = self.get(slot);
        PageId { namespace: self.namespaces[stored.namespace as usize].id, key: stored.key }
    }

    /// The page before the one in `slot`, if it is here.
    pub(super) fn parent_of(&self, slot: u32) -> Option<u32> {
        let child = self.get(slot);
        let position = child.position.checked_sub(1)?;
        let is_it = |&slot: &u32| {
            let stored = self.get(slot);
            stored.namespace == child.namespace
                && stored.position == position
                && self.tag(&self.id_of(slot)) == child.parent_tag
        };
        self.shards[shard_of(child.parent_tag)].find(spread(child.parent_tag), is_it).copied()
    }

    /// Takes a page that is not there.
    pub(super) fn insert(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let parent = PageId { namespace: page.id.namespace, key: page.parent };
        let stored = Stored {
            key: page.id.key,
            number: page.number,
            generation: page.generation,
            namespace: self.intern(&page.id.namespace),
            parent_tag: self.tag(&parent),
            segment,
            block: (page.offset / BLOCK_BYTES as u64) as u32,
            payload_bytes: page.payload_bytes,
            position: page.position,
            expires_s: seconds(page.expires_unix_ms),
            keeper: NONE,
        };
        let slot = self.take_slot(stored);
        let namespace = &mut self.namespaces[stored.namespace as usize];
        namespace.pages += 1;
        namespace.bytes += stored.record_bytes();
        self.len += 1;
        self.record_bytes += stored.record_bytes();
        let tag = self.tag(&page.id);
        let mut shard = std::mem::take(&mut self.shards[shard_of(tag)]);
        shard.insert_unique(spread(tag), slot, |&slot| spread(self.tag(&self.id_of(slot))));
        self.shards[shard_of(tag)] = shard;
        slot
    }

    /// Whether `page` is the very put that is in `slot`.
    pub(super) fn is_same_put(&self, slot: u32, page: &PageSummary) -> bool {
        self.get(slot).is_same_put(page)
    }

    /// The page in `slot` stands where another record of the same put is.
    pub(super) fn stand_at(&mut self, slot: u32, at: &Original) {
        let stored = self.get_mut(slot);
        stored.segment = at.segment;
        stored.block = (stored.block & USED) | (at.offset / BLOCK_BYTES as u64) as u32;
        stored.number = at.number;
    }

    pub(super) fn remove(&mut self, slot: u32) -> Stored {
        let tag = self.tag(&self.id_of(slot));
        if let Ok(found) = self.shards[shard_of(tag)].find_entry(spread(tag), |&other| other == slot) {
            found.remove();
        }
        let stored = *self.get(slot);
        // A free slot belongs to no segment.
        self.get_mut(slot).segment = NONE;
        self.free.push(slot);
        self.len -= 1;
        self.record_bytes -= stored.record_bytes();
        let namespace = &mut self.namespaces[stored.namespace as usize];
        namespace.pages -= 1;
        namespace.bytes -= stored.record_bytes();
        self.release(stored.namespace);
        stored
    }

    /// Namespaces that are known.
    #[cfg(test)]
    pub(super) fn namespaces(&self) -> usize {
        self.namespaces.len()
    }

    pub(super) fn namespace_number(&self, id: &NamespaceId) -> Option<u32> {
        self.namespaces_by_id.get(id).copied()
    }

    pub(super) fn namespace(&self, number: u32) -> &Namespace {
        &self.namespaces[number as usize]
    }

    /// What a namespace's pages may take; `u64::MAX` if there is no limit.
    pub(super) fn quota(&self, id: &NamespaceId) -> u64 {
        self.namespaces_by_id.get(id).map_or(self.quota_default, |&number| self.namespace(number).quota_bytes)
    }

    pub(super) fn namespace_bytes(&self, id: &NamespaceId) -> u64 {
        self.namespaces_by_id.get(id).map_or(0, |&number| self.namespace(number).bytes)
    }

    /// Sets a quota; the namespace's number. Its number is its own until [`release`](Self::release) finds it without
    /// pages, and without a quota or too many of its kind.
    pub(super) fn set_quota(&mut self, id: &NamespaceId, quota_bytes: u64) -> u32 {
        let number = self.intern(id);
        self.namespaces[number as usize].quota_bytes = quota_bytes;
        number
    }

    /// Gives up the number of a namespace that has neither pages nor a quota of its own. Of those that have only that, the
    /// last ones are kept.
    pub(super) fn release(&mut self, number: u32) {
        let namespace = &mut self.namespaces[number as usize];
        if namespace.pages > 0 {
            return;
        }
        if namespace.quota_bytes == self.quota_default {
            return self.forget_namespace(number);
        }
        if std::mem::replace(&mut namespace.listed, true) {
            return;
        }
        self.without_pages.push_back(number);
        if self.without_pages.len() > WITHOUT_PAGES_MAX
            && let Some(first) = self.without_pages.pop_front()
        {
            let namespace = &mut self.namespaces[first as usize];
            namespace.listed = false;
            if namespace.pages == 0 {
                self.forget_namespace(first);
            }
        }
    }

    fn forget_namespace(&mut self, number: u32) {
        let id = self.namespaces[number as usize].id;
        // It may have been forgotten before, and its number be another's.
        if self.namespaces_by_id.get(&id) == Some(&number) {
            self.namespaces_by_id.remove(&id);
            self.namespaces_free.push(number);
        }
    }

    /// The slots of all pages of a namespace.
    pub(super) fn slots_of(&self, namespace: u32) -> Vec<u32> {
        let of_it = |&&slot: &&u32| self.get(slot).namespace == namespace;
        self.shards.iter().flat_map(|shard| shard.iter().filter(of_it).copied()).collect()
    }

    fn take_slot(&mut self, stored: Stored) -> u32 {
        if let Some(slot) = self.free.pop() {
            *self.get_mut(slot) = stored;
            return slot;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let chunks = self.chunks.len();
        let last = &mut self.chunks[chunks - 1];
        last.push(stored);
        ((chunks - 1) * CHUNK + last.len() - 1) as u32
    }

    fn intern(&mut self, id: &NamespaceId) -> u32 {
        if let Some(&number) = self.namespaces_by_id.get(id) {
            return number;
        }
        let namespace = Namespace { id: *id, pages: 0, bytes: 0, quota_bytes: self.quota_default, listed: false };
        let number = match self.namespaces_free.pop() {
            Some(number) => {
                // Its number may stand in the list still.
                let listed = self.namespaces[number as usize].listed;
                self.namespaces[number as usize] = Namespace { listed, ..namespace };
                number
            }
            None => {
                self.namespaces.push(namespace);
                self.namespaces.len() as u32 - 1
            }
        };
        self.namespaces_by_id.insert(*id, number);
        number
    }
}

/// Where a stored page stands, in a segment of that life.
pub(super) fn place_of(stored: &Stored, life: u64) -> RecordPlace {
    RecordPlace { segment: stored.segment, life, offset: stored.offset() }
}

fn shard_of(tag: u32) -> usize {
    tag as usize % SHARDS
}

/// 64 bits for the table out of the 32 that a child remembers of its parent.
fn spread(tag: u32) -> u64 {
    let wide = u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    wide ^ (wide >> 29)
}
