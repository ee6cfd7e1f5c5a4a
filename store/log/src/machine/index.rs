//! The index: the location of each page that readers can find.
//!
//! Invariants:
//! - A page has at most one entry.
//! - The byte count of a namespace is the sum over the records of its entries.
//! - A fallback exists only for an indexed page, and is another record of the same put. The list of
//!   slots of its segment names the page.
//!
//! Layout: entries lie in a slab of fixed-size chunks, so growth never moves an entry. Hash tables
//! map a page to its *slot*, its position in the slab. There are 64 tables, because a table that
//! grows moves everything it has at once. The hash is seeded, so clients cannot choose keys that
//! collide.
//!
//! Entries name their namespace by a number, because namespaces are few and their names long. An
//! entry keeps only 32 hash bits of its parent page. A false match, one in a billion, merely
//! changes the order in which two unrelated pages are evicted.

use hashbrown::HashTable;
use larder_format::disk::{BLOCK_BYTES, RecordPlace, record_bytes};
use larder_format::footer::PageSummary;
use larder_format::{NamespaceId, PageId, PageKey};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hasher};

pub(super) const NONE: u32 = u32::MAX;
/// Entries per chunk of the slab: 320 KiB.
const CHUNK: usize = 4096;
const SHARDS: usize = 64;
/// Flag in [`PackedEntry::block`] of a page that was used. A segment has far fewer blocks than
/// 2^31.
const USED: u32 = 1 << 31;
/// Maximum number of namespaces that are kept for their quota alone.
pub(super) const WITHOUT_PAGES_MAX: usize = 4096;
const NEVER: u32 = u32::MAX;

/// The index entry of a page: 80 bytes. A log of 1 TiB with pages of 64 KiB has some 16 million
/// entries, so the size matters.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedEntry {
    key: PageKey,
    pub(super) number: u64,
    pub(super) generation: u64,
    pub(super) namespace: u32,
    parent_tag: u32,
    pub(super) segment: u32,
    /// Offset of the record in its segment, in blocks, with the flag [`USED`].
    block: u32,
    pub(super) payload_bytes: u32,
    pub(super) position: u32,
    /// Expiry in seconds since 1970, rounded down: a page expires up to a second early, never late.
    expires_s: u32,
    /// Index of the page's handle in the retention ranking, or [`NONE`].
    pub(super) retained_at: u32,
}

impl PackedEntry {
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.block & !USED) * BLOCK_BYTES as u64
    }

    /// Returns `true` if the page was used since its put, or since the start of the process.
    pub(super) fn is_used(&self) -> bool {
        self.block & USED != 0
    }

    pub(super) fn set_used(&mut self) {
        self.block |= USED;
    }

    pub(super) fn record_bytes(&self) -> u64 {
        record_bytes(self.payload_bytes as usize) as u64
    }

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

/// Another record of an indexed put, mostly an older one that was copied forward. If the indexed
/// copy turns out torn, the page is served from here.
#[derive(Debug, Clone, Copy)]
pub(super) struct FallbackRecord {
    pub(super) segment: u32,
    pub(super) offset: u64,
    pub(super) number: u64,
    pub(super) generation: u64,
}

impl FallbackRecord {
    pub(super) fn of(segment: u32, page: &PageSummary) -> FallbackRecord {
        FallbackRecord { segment, offset: page.offset, number: page.number, generation: page.generation }
    }
}

#[derive(Debug)]
pub(super) struct Namespace {
    id: NamespaceId,
    pub(super) pages: u64,
    pub(super) bytes: u64,
    /// `u64::MAX` for no limit.
    pub(super) quota_bytes: u64,
    /// `true` while [`Index::without_pages`] has its number.
    listed: bool,
}

#[derive(Debug)]
pub(super) struct Index {
    seed: u64,
    quota_default: u64,
    /// Namespaces with a quota of their own that lost their last page, or never had one. Oldest
    /// first. Some have pages again.
    without_pages: VecDeque<u32>,
    chunks: Vec<Vec<PackedEntry>>,
    free: Vec<u32>,
    shards: Vec<HashTable<u32>>,
    namespaces: Vec<Namespace>,
    namespaces_free: Vec<u32>,
    namespaces_by_id: BTreeMap<NamespaceId, u32>,
    len: usize,
    record_bytes: u64,
    /// By slot.
    fallbacks: BTreeMap<u32, FallbackRecord>,
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
            fallbacks: BTreeMap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// Bytes of heap memory, fallbacks excluded.
    pub(super) fn memory_bytes(&self) -> usize {
        let slab = self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<PackedEntry>()).sum::<usize>();
        let tables = self.shards.iter().map(HashTable::allocation_size).sum::<usize>();
        let namespaces = self.namespaces.capacity() * (size_of::<Namespace>() + size_of::<(NamespaceId, u32)>());
        slab + tables + namespaces + (self.free.capacity() + self.namespaces_free.capacity()) * size_of::<u32>()
    }

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

    /// The slot of a page: one probe of a hash table.
    pub(super) fn find(&self, id: &PageId) -> Option<u32> {
        let namespace = *self.namespaces_by_id.get(&id.namespace)?;
        let tag = self.tag(id);
        let is_it = |&slot: &u32| {
            let entry = self.get(slot);
            entry.key == id.key && entry.namespace == namespace
        };
        self.shards[shard_of(tag)].find(spread(tag), is_it).copied()
    }

    /// Returns `true` if record `number` of page `id` is in `slot`. Costs no hash probe, so a
    /// caller that remembers a slot can check it first.
    pub(super) fn is_at(&self, slot: u32, id: &PageId, number: u64) -> bool {
        let entry = self.chunks.get(slot as usize / CHUNK).and_then(|chunk| chunk.get(slot as usize % CHUNK));
        // A free slot has no segment. Record numbers are never reused, so the other fields only
        // guard against a location of another log.
        entry.is_some_and(|entry| {
            entry.segment != NONE && entry.number == number && entry.key == id.key && self.id_of(slot) == *id
        })
    }

    pub(super) fn get(&self, slot: u32) -> &PackedEntry {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut PackedEntry {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn id_of(&self, slot: u32) -> PageId {
        let entry = self.get(slot);
        PageId { namespace: self.namespaces[entry.namespace as usize].id, key: entry.key }
    }

    /// The slot of the previous page of the sequence, if that is indexed. The search compares only
    /// 32 hash bits, so it may rarely find an unrelated page.
    pub(super) fn parent_of(&self, slot: u32) -> Option<u32> {
        let child = self.get(slot);
        let position = child.position.checked_sub(1)?;
        let is_it = |&slot: &u32| {
            let entry = self.get(slot);
            entry.namespace == child.namespace
                && entry.position == position
                && self.tag(&self.id_of(slot)) == child.parent_tag
        };
        self.shards[shard_of(child.parent_tag)].find(spread(child.parent_tag), is_it).copied()
    }

    /// Inserts a page that is not indexed, and returns its slot.
    pub(super) fn insert(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let parent = PageId { namespace: page.id.namespace, key: page.parent };
        let entry = PackedEntry {
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
            retained_at: NONE,
        };
        let slot = self.take_slot(entry);
        let namespace = &mut self.namespaces[entry.namespace as usize];
        namespace.pages += 1;
        namespace.bytes += entry.record_bytes();
        self.len += 1;
        self.record_bytes += entry.record_bytes();
        let tag = self.tag(&page.id);
        let mut shard = std::mem::take(&mut self.shards[shard_of(tag)]);
        shard.insert_unique(spread(tag), slot, |&slot| spread(self.tag(&self.id_of(slot))));
        self.shards[shard_of(tag)] = shard;
        slot
    }

    pub(super) fn is_same_put(&self, slot: u32, page: &PageSummary) -> bool {
        self.get(slot).is_same_put(page)
    }

    pub(super) fn relocate(&mut self, slot: u32, at: &FallbackRecord) {
        let entry = self.get_mut(slot);
        entry.segment = at.segment;
        entry.block = (entry.block & USED) | (at.offset / BLOCK_BYTES as u64) as u32;
        entry.number = at.number;
    }

    /// Removes the entry in `slot`, with its fallback. The next insertion reuses the slot, so
    /// callers must not keep it.
    pub(super) fn remove(&mut self, slot: u32) -> PackedEntry {
        let id = self.id_of(slot);
        self.fallbacks.remove(&slot);
        let tag = self.tag(&id);
        if let Ok(found) = self.shards[shard_of(tag)].find_entry(spread(tag), |&other| other == slot) {
            found.remove();
        }
        let entry = *self.get(slot);
        // Lists of slots per segment are not updated: they skip a slot without a segment.
        self.get_mut(slot).segment = NONE;
        self.free.push(slot);
        self.len -= 1;
        self.record_bytes -= entry.record_bytes();
        let namespace = &mut self.namespaces[entry.namespace as usize];
        namespace.pages -= 1;
        namespace.bytes -= entry.record_bytes();
        self.release(entry.namespace);
        entry
    }

    pub(super) fn set_fallback(&mut self, slot: u32, record: FallbackRecord) {
        self.fallbacks.insert(slot, record);
    }

    pub(super) fn set_first_fallback(&mut self, slot: u32, record: FallbackRecord) {
        self.fallbacks.entry(slot).or_insert(record);
    }

    /// Takes the fallback of the put in `slot`.
    pub(super) fn take_fallback(&mut self, slot: u32) -> Option<FallbackRecord> {
        let generation = self.get(slot).generation;
        self.fallbacks.remove(&slot).filter(|record| record.generation == generation)
    }

    /// Drops the fallback of `slot` if it lies in this segment.
    pub(super) fn drop_fallback_in(&mut self, slot: u32, segment: u32) {
        if self.fallbacks.get(&slot).is_some_and(|record| record.segment == segment) {
            self.fallbacks.remove(&slot);
        }
    }

    #[cfg(test)]
    pub(super) fn fallbacks(&self) -> usize {
        self.fallbacks.len()
    }

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

    pub(super) fn quota(&self, id: &NamespaceId) -> u64 {
        self.namespaces_by_id.get(id).map_or(self.quota_default, |&number| self.namespace(number).quota_bytes)
    }

    pub(super) fn namespace_bytes(&self, id: &NamespaceId) -> u64 {
        self.namespaces_by_id.get(id).map_or(0, |&number| self.namespace(number).bytes)
    }

    /// Sets a quota, and returns the namespace's number. The number stays assigned until
    /// [`release`](Self::release) gives it up.
    pub(super) fn set_quota(&mut self, id: &NamespaceId, quota_bytes: u64) -> u32 {
        let number = self.intern(id);
        self.namespaces[number as usize].quota_bytes = quota_bytes;
        number
    }

    /// Gives up the number of a namespace that has neither pages nor a quota of its own.
    ///
    /// The most recent [`WITHOUT_PAGES_MAX`] namespaces with only a quota keep theirs. Clients may
    /// name any number of namespaces, so the memory for them needs this bound.
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
        // The list may have named it twice: another namespace may own the number by now.
        if self.namespaces_by_id.get(&id) == Some(&number) {
            self.namespaces_by_id.remove(&id);
            self.namespaces_free.push(number);
        }
    }

    /// Slots of all pages of a namespace. Takes time in proportion to all pages of the log.
    pub(super) fn slots_of(&self, namespace: u32) -> Vec<u32> {
        let of_it = |&&slot: &&u32| self.get(slot).namespace == namespace;
        self.shards.iter().flat_map(|shard| shard.iter().filter(of_it).copied()).collect()
    }

    fn take_slot(&mut self, entry: PackedEntry) -> u32 {
        if let Some(slot) = self.free.pop() {
            *self.get_mut(slot) = entry;
            return slot;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let chunks = self.chunks.len();
        let last = &mut self.chunks[chunks - 1];
        last.push(entry);
        ((chunks - 1) * CHUNK + last.len() - 1) as u32
    }

    fn intern(&mut self, id: &NamespaceId) -> u32 {
        if let Some(&number) = self.namespaces_by_id.get(id) {
            return number;
        }
        let namespace = Namespace { id: *id, pages: 0, bytes: 0, quota_bytes: self.quota_default, listed: false };
        let number = match self.namespaces_free.pop() {
            Some(number) => {
                // The list of namespaces without pages may still have this number.
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

pub(super) fn place_of(entry: &PackedEntry, epoch: u64) -> RecordPlace {
    RecordPlace { segment: entry.segment, epoch, offset: entry.offset() }
}

fn shard_of(tag: u32) -> usize {
    tag as usize % SHARDS
}

/// Widens the 32 hash bits that a child keeps of its parent to the 64 that a table needs.
fn spread(tag: u32) -> u64 {
    let wide = u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    wide ^ (wide >> 29)
}
