//! The index: the location of each page that readers can find.
//!
//! Invariants:
//! - A page has at most one entry.
//! - The byte count of a namespace is the sum over the records of its entries.
//! - A fallback exists only for an indexed page, and is another record of the same put. The list of
//!   slots of its segment names the page.
//!
//! Layout: entries lie in a slab of fixed-size chunks, so growth never moves an entry. Hash tables
//! map a page to its *slot*, its position in the slab. There are 4096 tables, because a table that
//! grows moves everything it has at once.
//!
//! An entry does not hold its page's name, but a [`Fingerprint`] of it. Two pages with the same
//! fingerprint would share an entry: one of them is a miss then. A reader compares the whole name
//! with the record's header, so it never gets another page. Record 0020 has the figures.
//!
//! Entries name their namespace by a number, because namespaces are few and their names long.

use hashbrown::HashTable;
use larder_format::disk::{BLOCK_BYTES, RecordPlace, record_bytes};
use larder_format::footer::PageSummary;
use larder_format::{NamespaceId, PageId};
use larder_runtime::fail_point;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

/// Segment of a free slot.
const NONE: u32 = u32::MAX;
/// Entries per chunk of the slab: 192 KiB.
const CHUNK: usize = 4096;
const SHARDS: usize = 4096;
/// Maximum number of namespaces that are kept for their quota alone.
pub(super) const WITHOUT_PAGES_MAX: usize = 4096;
const NEVER: u32 = u32::MAX;

/// 96 bits of a keyed hash of a page's namespace and key.
///
/// The key is secret, so clients cannot choose pages that collide. By chance, two of 2^26 pages
/// have the same fingerprint with a probability of 2^-45.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fingerprint([u32; 3]);

impl Fingerprint {
    /// Number of the shard. The first shards get twice the pages of the last ones, and the others
    /// lie between. Tables double when they are full, so equal shards would all grow at once, and
    /// all be half empty afterwards.
    fn shard(&self) -> usize {
        let hash = u64::from(self.0[0]);
        let skewed = (2 * hash + ((hash * hash) >> 32)) / 3;
        ((skewed * SHARDS as u64) >> 32) as usize
    }

    /// Hash in the table of a shard. Independent of the bits that choose the shard.
    fn hash(&self) -> u64 {
        u64::from(self.0[1]) << 32 | u64::from(self.0[2])
    }
}

/// The index entry of a page: 48 bytes. A log of 1 TiB with pages of 64 KiB has some 16 million
/// entries, so the size matters.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedEntry {
    pub(super) number: u64,
    pub(super) generation: u64,
    pub(super) fingerprint: Fingerprint,
    pub(super) namespace: u32,
    pub(super) segment: u32,
    /// Offset of the record in its segment, in blocks.
    block: u32,
    pub(super) payload_bytes: u32,
    /// Expiry in seconds since 1970, rounded down: a page expires up to a second early, never late.
    expires_s: u32,
}

const _: () = assert!(size_of::<PackedEntry>() == 48);

impl PackedEntry {
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.block) * BLOCK_BYTES as u64
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
struct Chunk {
    entries: Vec<PackedEntry>,
    /// A bit per entry: the page was used since its record was written, or since the start of the
    /// process. Atomic, because readers that share the index set it.
    used: Vec<AtomicU64>,
}

impl Chunk {
    fn new() -> Chunk {
        Chunk { entries: Vec::with_capacity(CHUNK), used: (0..CHUNK / 64).map(|_| AtomicU64::new(0)).collect() }
    }
}

#[derive(Debug)]
pub(super) struct Index {
    seed: u64,
    /// Bits of fingerprints that count. A test clears some, so that pages collide.
    #[cfg(test)]
    fingerprint_mask: u32,
    quota_default: u64,
    /// Namespaces with a quota of their own that lost their last page, or never had one. Oldest
    /// first. Some have pages again.
    without_pages: VecDeque<u32>,
    chunks: Vec<Chunk>,
    free: Vec<u32>,
    shards: Vec<HashTable<u32>>,
    namespaces: Vec<Namespace>,
    namespaces_free: Vec<u32>,
    namespaces_by_id: BTreeMap<NamespaceId, u32>,
    len: usize,
    record_bytes: u64,
    used_pages: AtomicU64,
    used_bytes: AtomicU64,
    /// By slot.
    fallbacks: BTreeMap<u32, FallbackRecord>,
}

impl Index {
    pub(super) fn new(seed: u64, quota_default: u64) -> Index {
        Index {
            seed,
            #[cfg(test)]
            fingerprint_mask: u32::MAX,
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
            used_pages: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            fallbacks: BTreeMap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    pub(super) fn fallbacks(&self) -> usize {
        self.fallbacks.len()
    }

    /// Bytes of heap memory, fallbacks excluded.
    pub(super) fn memory_bytes(&self) -> usize {
        let slab = self.chunks.len() * CHUNK * size_of::<PackedEntry>() + self.chunks.len() * CHUNK / 8;
        let tables = self.shards.iter().map(|table| size_of_val(table) + table.allocation_size()).sum::<usize>();
        let namespaces = self.namespaces.capacity() * (size_of::<Namespace>() + size_of::<(NamespaceId, u32)>());
        slab + tables + namespaces + (self.free.capacity() + self.namespaces_free.capacity()) * size_of::<u32>()
    }

    pub(super) fn fingerprint(&self, id: &PageId) -> Fingerprint {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.seed);
        if !fail_point!("log.index-ignores-namespace") {
            hasher.write(&id.namespace.0);
        }
        hasher.write(&id.key.0);
        let first = hasher.finish();
        // A longer message has an independent hash.
        hasher.write_u8(1);
        let words = [first as u32, (first >> 32) as u32, hasher.finish() as u32];
        #[cfg(test)]
        let words = words.map(|word| word & self.fingerprint_mask);
        Fingerprint(words)
    }

    /// Lets all pages collide.
    #[cfg(test)]
    pub(super) fn make_fingerprints_equal(&mut self) {
        self.fingerprint_mask = 0;
    }

    /// The slot of a page: one probe of a hash table.
    pub(super) fn find(&self, id: &PageId) -> Option<u32> {
        self.find_fingerprint(self.fingerprint(id))
    }

    pub(super) fn find_fingerprint(&self, fingerprint: Fingerprint) -> Option<u32> {
        let is_it = |&slot: &u32| self.get(slot).fingerprint == fingerprint;
        self.shards[fingerprint.shard()].find(fingerprint.hash(), is_it).copied()
    }

    /// Returns `true` if record `number` is in `slot`. Costs no hash probe, so a caller that
    /// remembers a slot can check it first. Record numbers are never reused.
    pub(super) fn is_at(&self, slot: u32, number: u64) -> bool {
        let chunk = self.chunks.get(slot as usize / CHUNK);
        let entry = chunk.and_then(|chunk| chunk.entries.get(slot as usize % CHUNK));
        entry.is_some_and(|entry| entry.segment != NONE && entry.number == number)
    }

    pub(super) fn get(&self, slot: u32) -> &PackedEntry {
        &self.chunks[slot as usize / CHUNK].entries[slot as usize % CHUNK]
    }

    fn get_mut(&mut self, slot: u32) -> &mut PackedEntry {
        &mut self.chunks[slot as usize / CHUNK].entries[slot as usize % CHUNK]
    }

    pub(super) fn namespace_of(&self, slot: u32) -> &NamespaceId {
        &self.namespaces[self.get(slot).namespace as usize].id
    }

    fn used_word(&self, slot: u32) -> (&AtomicU64, u64) {
        let at = slot as usize % CHUNK;
        (&self.chunks[slot as usize / CHUNK].used[at / 64], 1 << (at % 64))
    }

    /// Returns `true` if the page was used since its record was written, or since the start of the
    /// process.
    pub(super) fn is_used(&self, slot: u32) -> bool {
        let (word, bit) = self.used_word(slot);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Marks the page in `slot` as used. Needs no exclusive access.
    pub(super) fn set_used(&self, slot: u32) {
        let (word, bit) = self.used_word(slot);
        // Tested first: a line that is only read stays in the caches of all cores. Relaxed: the
        // bits order no other memory access, and the lock of the log orders them with changes.
        if word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.used_pages.fetch_add(1, Ordering::Relaxed);
            self.used_bytes.fetch_add(self.get(slot).record_bytes(), Ordering::Relaxed);
        }
    }

    pub(super) fn clear_used(&mut self, slot: u32) {
        let (word, bit) = self.used_word(slot);
        if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            self.used_pages.fetch_sub(1, Ordering::Relaxed);
            self.used_bytes.fetch_sub(self.get(slot).record_bytes(), Ordering::Relaxed);
        }
    }

    pub(super) fn used_pages(&self) -> u64 {
        self.used_pages.load(Ordering::Relaxed)
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Inserts a page that is not indexed, and returns its slot.
    pub(super) fn insert(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let entry = PackedEntry {
            number: page.number,
            generation: page.generation,
            fingerprint: self.fingerprint(&page.id),
            namespace: self.intern(&page.id.namespace),
            segment,
            block: (page.offset / BLOCK_BYTES as u64) as u32,
            payload_bytes: page.payload_bytes,
            expires_s: seconds(page.expires_unix_ms),
        };
        let slot = self.take_slot(entry);
        let namespace = &mut self.namespaces[entry.namespace as usize];
        namespace.pages += 1;
        namespace.bytes += entry.record_bytes();
        self.len += 1;
        self.record_bytes += entry.record_bytes();
        let shard = entry.fingerprint.shard();
        let mut table = std::mem::take(&mut self.shards[shard]);
        table.insert_unique(entry.fingerprint.hash(), slot, |&slot| self.get(slot).fingerprint.hash());
        self.shards[shard] = table;
        slot
    }

    pub(super) fn is_same_put(&self, slot: u32, page: &PageSummary) -> bool {
        self.get(slot).is_same_put(page)
    }

    /// Points an entry to another record of its put. The page counts as unused from then on.
    pub(super) fn relocate(&mut self, slot: u32, at: &FallbackRecord) {
        self.clear_used(slot);
        let entry = self.get_mut(slot);
        entry.segment = at.segment;
        entry.block = (at.offset / BLOCK_BYTES as u64) as u32;
        entry.number = at.number;
    }

    /// Removes the entry in `slot`, with its fallback. The next insertion reuses the slot, so
    /// callers must not keep it.
    pub(super) fn remove(&mut self, slot: u32) -> PackedEntry {
        self.fallbacks.remove(&slot);
        self.clear_used(slot);
        let entry = *self.get(slot);
        let fingerprint = entry.fingerprint;
        if let Ok(found) = self.shards[fingerprint.shard()].find_entry(fingerprint.hash(), |&other| other == slot) {
            found.remove();
        }
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
        if self.chunks.last().is_none_or(|chunk| chunk.entries.len() == CHUNK) {
            self.chunks.push(Chunk::new());
        }
        let chunks = self.chunks.len();
        let last = &mut self.chunks[chunks - 1].entries;
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
