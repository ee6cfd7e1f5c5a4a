//! The entries of the index, which lookups share with changes.
//!
//! Lookups and reads do not take the lock of the [`Log`](super::Log). They lock the shard of their
//! page, and so does each change of an entry. A lookup therefore waits for the change of one entry
//! at most. Record 0023 has the figures.
//!
//! Invariants:
//! - A page has at most one entry.
//! - Only the `Log` changes entries, and it has one owner at a time. So a check and a change by the
//!   `Log` need no common lock of a shard. Uses are the exception: readers set their bits, and the
//!   owner of a faster tier sets the worth of pages.
//! - An entry names a segment from its opening on, until its pages have left the index.
//! - A reader counts its read of a segment before it unlocks the shard. So once the pages of the
//!   segment have left the index, no read of it begins.
//!
//! A change of several entries is not atomic to lookups. A page whose record is replaced by one of
//! another put is absent for a moment. Its writer still has the new put in memory.
//!
//! Layout: a shard has a hash table, which maps a fingerprint to a position in a slab of small
//! chunks. Growth never moves an entry. Only the table grows at once, and it is small: there are
//! up to 4096 shards. The *slot* of an entry is its shard and its position there.

use super::departed::Departed;
use super::entry::{Fingerprint, PackedEntry};
use super::read::RecordRef;
use super::retention::Worth;
use super::segment_reads::SegmentReads;
use hashbrown::HashTable;
use larder_format::{PageId, is_expired};
use larder_runtime::race_point;
use larder_runtime::sync::{MODELLED, RwLock, RwLockReadGuard};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SHARDS_MAX: usize = 4096;
/// A model needs no more, and would take long to create them.
const SHARDS_MIN: usize = if MODELLED { 2 } else { 64 };
/// Pages for which a log has a shard. The number of pages in a shard varies, and its memory is that
/// of the most it ever had. In large shards this counts less: record 0091 has the figures.
const PAGES_PER_SHARD: u64 = 8192;
/// Bits of a slot for the position in the shard.
const POSITION_BITS: u32 = 20;
const SHARD_ENTRIES_MAX: usize = 1 << POSITION_BITS;
/// Maximum number of pages of a log. The largest shard has half more pages than the average, and
/// this leaves as much again for chance.
pub(super) const PAGES_MAX: u64 = 1 << 31;
/// Entries per chunk. Half a chunk per shard is unused on average. A chunk takes slightly less than
/// a table of 256 places, so the allocator fills the memory of outgrown tables with chunks.
pub(super) const CHUNK: usize = 22;
/// Entries of the first table of a shard, which has 256 places. Memory of smaller tables that were
/// outgrown would stay unused: no chunk fits.
const TABLE_FIRST: usize = 224;
/// End of the list of free entries.
const END: u64 = u64::MAX;

/// The part of the index that lookups and reads use without the log.
#[derive(Debug)]
pub struct SharedIndex {
    seed: u64,
    /// Lets all pages collide, for a test.
    #[cfg(test)]
    is_colliding: std::sync::atomic::AtomicBool,
    shards: Box<[RwLock<Shard>]>,
    used_pages: AtomicU64,
    used_bytes: AtomicU64,
    /// Number of pages with an expiry.
    expiring: AtomicU64,
    pub(super) departed: Departed,
    pub(super) segments: Arc<SegmentReads>,
}

#[derive(Debug)]
pub(super) struct Shard {
    table: HashTable<TableEntry>,
    // Boxed: a vector of entries would move them all when it grows.
    #[allow(clippy::vec_box, reason = "the vector grows while lookups wait")]
    chunks: Vec<Box<Chunk>>,
    /// Position of the first free entry. Its number is the position of the next one.
    free: u64,
}

/// A position in three bytes, because the table has nearly two of them per page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TableEntry([u8; 3]);

const _: () = assert!(POSITION_BITS <= 24);
// Each place of a table has an entry and a byte of its hash.
const _: () = assert!(size_of::<Chunk>() <= 256 * (size_of::<TableEntry>() + 1));

impl TableEntry {
    fn new(at: u32) -> TableEntry {
        let [a, b, c, _] = at.to_le_bytes();
        TableEntry([a, b, c])
    }

    fn position(self) -> u32 {
        let TableEntry([a, b, c]) = self;
        u32::from_le_bytes([a, b, c, 0])
    }
}

#[derive(Debug)]
struct Chunk {
    entries: [PackedEntry; CHUNK],
    /// A bit per entry: the page was used since its record was written, or since the start of the
    /// process. Atomic, because readers that share the shard set it.
    used: AtomicU32,
}

impl Shard {
    fn new() -> Shard {
        Shard { table: HashTable::new(), chunks: Vec::new(), free: END }
    }

    pub(super) fn find(&self, fingerprint: Fingerprint) -> Option<u32> {
        let is_it = |at: &TableEntry| { self.entry(at.position()).fingerprint } == fingerprint;
        self.table.find(fingerprint.hash(), is_it).map(|at| at.position())
    }

    /// Returns `true` if record `number` is at a position. Costs no hash probe. Record numbers are
    /// never reused.
    pub(super) fn is_at(&self, at: u32, number: u64) -> bool {
        let chunk = self.chunks.get(at as usize / CHUNK);
        chunk
            .map(|chunk| chunk.entries[at as usize % CHUNK])
            .is_some_and(|entry| !entry.is_free() && entry.number == number)
    }

    pub(super) fn entry(&self, at: u32) -> &PackedEntry {
        &self.chunks[at as usize / CHUNK].entries[at as usize % CHUNK]
    }

    fn entry_mut(&mut self, at: u32) -> &mut PackedEntry {
        &mut self.chunks[at as usize / CHUNK].entries[at as usize % CHUNK]
    }

    fn used_word(&self, at: u32) -> (&AtomicU32, u32) {
        (&self.chunks[at as usize / CHUNK].used, 1 << (at as usize % CHUNK))
    }

    fn insert(&mut self, entry: PackedEntry) -> u32 {
        if self.free == END {
            self.grow();
        }
        let at = self.free as u32;
        let next = self.entry(at).number;
        self.free = next;
        *self.entry_mut(at) = entry;
        let Shard { table, chunks, .. } = self;
        let hash_of = |at: &TableEntry| {
            let at = at.position() as usize;
            { chunks[at / CHUNK].entries[at % CHUNK].fingerprint }.hash()
        };
        if has_many_erased(table) {
            rebuild(table, hash_of);
        }
        table.insert_unique({ entry.fingerprint }.hash(), TableEntry::new(at), hash_of);
        at
    }

    /// Adds a chunk of free entries.
    fn grow(&mut self) {
        let first = (self.chunks.len() * CHUNK) as u64;
        assert!(first as usize + CHUNK <= SHARD_ENTRIES_MAX, "a shard has more pages than the bound of pages allows");
        let mut entries = [PackedEntry::FREE; CHUNK];
        for (entry, next) in entries.iter_mut().zip(first + 1..) {
            entry.number = next;
        }
        entries[CHUNK - 1].number = END;
        if self.chunks.is_empty() {
            self.table = HashTable::with_capacity(TABLE_FIRST);
        }
        self.chunks.push(Box::new(Chunk { entries, used: AtomicU32::new(0) }));
        self.free = first;
    }

    fn remove(&mut self, at: u32) -> PackedEntry {
        let entry = *self.entry(at);
        if let Ok(found) = self.table.find_entry({ entry.fingerprint }.hash(), |&other| other == TableEntry::new(at)) {
            found.remove();
        }
        *self.entry_mut(at) = PackedEntry::FREE;
        self.entry_mut(at).number = self.free;
        self.free = u64::from(at);
        entry
    }
}

/// Returns `true` if all places of a table are in use, and a sixteenth of them or more by removed
/// entries. The next insertion would double the table, if it is more than half full.
fn has_many_erased(table: &HashTable<TableEntry>) -> bool {
    // Of eight places, one stays empty.
    let places = table.num_buckets() / 8 * 7;
    table.len() == table.capacity() && table.len() < places - places / 16
}

/// Frees the places of removed entries. Takes time proportional to the entries, at most once per
/// sixteenth of them.
fn rebuild(table: &mut HashTable<TableEntry>, hash_of: impl Fn(&TableEntry) -> u64) {
    let entries: Vec<TableEntry> = table.drain().collect();
    for at in entries {
        table.insert_unique(hash_of(&at), at, &hash_of);
    }
}

pub(super) fn slot_of(shard: usize, at: u32) -> u32 {
    (shard as u32) << POSITION_BITS | at
}

pub(super) fn shard_of(slot: u32) -> usize {
    (slot >> POSITION_BITS) as usize
}

/// Position of a slot in its shard.
pub(super) fn position_of(slot: u32) -> u32 {
    slot % SHARD_ENTRIES_MAX as u32
}

impl SharedIndex {
    /// An index for at most `pages_max` pages.
    pub(super) fn new(seed: u64, pages_max: u64, segments: Arc<SegmentReads>) -> SharedIndex {
        let shards = usize::try_from(pages_max / PAGES_PER_SHARD).unwrap_or(SHARDS_MAX).max(SHARDS_MIN);
        let shards = if MODELLED { SHARDS_MIN } else { shards.min(SHARDS_MAX) };
        SharedIndex {
            seed,
            #[cfg(test)]
            is_colliding: false.into(),
            shards: (0..shards).map(|_| RwLock::new(Shard::new())).collect(),
            used_pages: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            expiring: AtomicU64::new(0),
            departed: Departed::new(),
            segments,
        }
    }

    fn shard(&self, slot: u32) -> &RwLock<Shard> {
        &self.shards[shard_of(slot)]
    }

    /// Locks the shard of a slot for a reader.
    pub(super) fn share(&self, slot: u32) -> RwLockReadGuard<'_, Shard> {
        self.shard(slot).read()
    }

    pub(super) fn fingerprint(&self, id: &PageId) -> Fingerprint {
        #[cfg(test)]
        if self.is_colliding.load(Ordering::Relaxed) {
            return Fingerprint::zero();
        }
        Fingerprint::of(self.seed, id)
    }

    #[cfg(test)]
    pub(crate) fn make_fingerprints_equal(&self) {
        self.is_colliding.store(true, Ordering::Relaxed);
    }

    /// Finds a page: one probe of a hash table. Returns its slot, and its shard, which is locked.
    pub(super) fn find_shared(&self, id: &PageId) -> Option<(u32, RwLockReadGuard<'_, Shard>)> {
        let fingerprint = self.fingerprint(id);
        let number = fingerprint.shard(self.shards.len());
        let shard = self.shards[number].read();
        let at = shard.find(fingerprint)?;
        Some((slot_of(number, at), shard))
    }

    pub(super) fn find(&self, id: &PageId) -> Option<u32> {
        self.find_shared(id).map(|(slot, _)| slot)
    }

    pub(super) fn find_fingerprint(&self, fingerprint: Fingerprint) -> Option<u32> {
        let number = fingerprint.shard(self.shards.len());
        self.shards[number].read().find(fingerprint).map(|at| slot_of(number, at))
    }

    /// Returns `true` if record `number` is in `slot`.
    pub(super) fn is_at(&self, slot: u32, number: u64) -> bool {
        self.share(slot).is_at(position_of(slot), number)
    }

    pub(super) fn get(&self, slot: u32) -> PackedEntry {
        *self.share(slot).entry(position_of(slot))
    }

    /// Returns `true` if the page was used since its record was written, or since the start of the
    /// process.
    pub(super) fn is_used(&self, slot: u32) -> bool {
        let shard = self.share(slot);
        let (word, bit) = shard.used_word(position_of(slot));
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Marks a page as used. The caller shares its shard.
    pub(super) fn set_used(&self, shard: &Shard, at: u32) {
        let (word, bit) = shard.used_word(at);
        // Tested first: a line that is only read stays in the caches of all cores. Relaxed: the
        // bits order no other memory access, and the lock of the shard orders them with changes.
        if word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.used_pages.fetch_add(1, Ordering::Relaxed);
            self.used_bytes.fetch_add(shard.entry(at).record_bytes(), Ordering::Relaxed);
        }
    }

    /// Records a use of a page in a faster tier. Does not wait: while another thread changes the
    /// shard, the use is lost.
    pub fn touch(&self, id: &PageId) {
        let fingerprint = self.fingerprint(id);
        if let Some(shard) = self.shards[fingerprint.shard(self.shards.len())].try_read()
            && let Some(at) = shard.find(fingerprint)
        {
            self.set_used(&shard, at);
        }
    }

    /// Records a use of a page as [`SharedIndex::touch`] does, and its worth. Waits for no thread
    /// either: the worth is lost while another thread uses the shard.
    pub fn rank(&self, id: &PageId, worth: Worth) {
        self.touch(id);
        let fingerprint = self.fingerprint(id);
        let lock = &self.shards[fingerprint.shard(self.shards.len())];
        let to_change = |shard: &Shard| shard.find(fingerprint).filter(|&at| shard.entry(at).worth() != worth);
        // Most pages have their worth already, and this lets other readers pass.
        if lock.try_read().is_none_or(|shard| to_change(&shard).is_none()) {
            return;
        }
        if let Some(mut shard) = lock.try_write()
            && let Some(at) = to_change(&shard)
        {
            shard.entry_mut(at).set_worth(worth);
        }
    }

    /// Time at which a page last left the log for lack of room, in milliseconds since 1970, to the
    /// second. `None` if it did not, or if the log has no record of it any more.
    pub fn departed_unix_ms(&self, id: &PageId) -> Option<u64> {
        self.departed.find(self.fingerprint(id))
    }

    /// Clears the bit of a page whose shard this thread has alone.
    fn unset_used(&self, shard: &Shard, at: u32) {
        let (word, bit) = shard.used_word(at);
        if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            self.used_pages.fetch_sub(1, Ordering::Relaxed);
            self.used_bytes.fetch_sub(shard.entry(at).record_bytes(), Ordering::Relaxed);
        }
    }

    pub(super) fn clear_used(&self, slot: u32) {
        // Alone: a reader adds to the totals after it has set the bit.
        self.unset_used(&self.shard(slot).write(), position_of(slot));
    }

    pub(super) fn used_pages(&self) -> u64 {
        self.used_pages.load(Ordering::Relaxed)
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn insert(&self, entry: PackedEntry) -> u32 {
        // Relaxed, here and in `remove`: the number orders nothing.
        self.expiring.fetch_add(entry.expires_s().is_some().into(), Ordering::Relaxed);
        let number = { entry.fingerprint }.shard(self.shards.len());
        slot_of(number, self.shards[number].write().insert(entry))
    }

    /// Points an entry to another record of its put. The page counts as unused from then on.
    pub(super) fn relocate(&self, slot: u32, segment: u32, offset: u64, number: u64) {
        let at = position_of(slot);
        let mut shard = self.shard(slot).write();
        self.unset_used(&shard, at);
        if race_point!("log.relocate-after-unlock") {
            // In two steps, as the entry of a replaced put. The position stays: it was freed last.
            let entry = shard.remove(at);
            drop(shard);
            shard = self.shard(slot).write();
            shard.insert(entry);
        }
        shard.entry_mut(at).move_to(segment, offset, number);
    }

    pub(super) fn remove(&self, slot: u32) -> PackedEntry {
        let mut shard = self.shard(slot).write();
        self.unset_used(&shard, position_of(slot));
        let entry = shard.remove(position_of(slot));
        self.expiring.fetch_sub(entry.expires_s().is_some().into(), Ordering::Relaxed);
        entry
    }

    /// Returns `true` if any page has an expiry.
    pub(super) fn has_expiring(&self) -> bool {
        self.expiring.load(Ordering::Relaxed) > 0
    }

    /// Adds the expired pages in some chunks of a shard to `expired`. Returns the number of those
    /// chunks that exist, to which the time is proportional, and whether they are the last ones.
    pub(super) fn find_expired(
        &self,
        number: usize,
        chunks: Range<usize>,
        now_unix_ms: u64,
        expired: &mut Vec<RecordRef>,
    ) -> (usize, bool) {
        let shard = self.shards[number].read();
        let end = chunks.end.min(shard.chunks.len());
        let searched = &shard.chunks[chunks.start.min(end)..end];
        for (chunk, index) in searched.iter().zip(chunks.start..) {
            for (entry, at) in chunk.entries.iter().zip((index * CHUNK) as u32..) {
                // A free entry has no expiry.
                if is_expired(entry.expires_unix_ms(), now_unix_ms) {
                    expired.push(RecordRef { number: entry.number, slot: slot_of(number, at) });
                }
            }
        }
        (searched.len(), end == shard.chunks.len())
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Slots of the pages of a namespace in one shard, and the number of all pages there, to which
    /// the time is proportional.
    pub(super) fn slots_in_shard(&self, namespace: u32, number: usize) -> (Vec<u32>, usize) {
        let shard = self.shards[number].read();
        let positions = shard.table.iter().map(|at| at.position());
        let of_it = positions.filter(|&at| { shard.entry(at).namespace } == namespace);
        (of_it.map(|at| slot_of(number, at)).collect(), shard.table.len())
    }

    /// Bytes of heap memory. Visits all shards, so callers do not hold the log's lock.
    pub fn memory_bytes(&self) -> usize {
        let of_shard = |shard: &RwLock<Shard>| {
            let shard = shard.read();
            let chunks = shard.chunks.len() * size_of::<Chunk>() + shard.chunks.capacity() * size_of::<Box<Chunk>>();
            size_of::<RwLock<Shard>>() + shard.table.allocation_size() + chunks
        };
        let shards: usize = self.shards.iter().map(of_shard).sum();
        shards + self.segments.memory_bytes() + self.departed.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::footer::PageSummary;
    use larder_format::{NamespaceId, PageKey};

    fn id(number: u32) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
    }

    fn entry(index: &SharedIndex, number: u32) -> PackedEntry {
        let offset = 4096 * u64::from(number);
        let page = PageSummary {
            id: id(number),
            offset,
            number: number.into(),
            parent: PageKey::NONE,
            payload_bytes: 1,
            generation: 1,
            position: 0,
            expires_unix_ms: 0,
        };
        PackedEntry::new(index.fingerprint(&id(number)), 0, number % 7, &page)
    }

    #[test]
    fn entries_stay_in_place_while_shards_grow_and_slots_are_reused() {
        const PAGES: u32 = 300_000;
        let index = SharedIndex::new(7, PAGES.into(), Arc::new(SegmentReads::new(7)));
        let slots: Vec<u32> = (0..PAGES).map(|number| index.insert(entry(&index, number))).collect();
        for (&slot, number) in slots.iter().zip(0u32..) {
            assert!(index.find(&id(number)) == Some(slot) && index.is_at(slot, number.into()));
            assert_eq!(index.get(slot).offset(), 4096 * u64::from(number));
        }
        let bytes = index.memory_bytes();
        index.touch(&id(2));
        assert!(index.is_used(slots[2]) && !index.is_used(slots[3]) && index.used_pages() == 1);
        index.rank(&id(2), Worth::High);
        assert_eq!((index.get(slots[2]).worth(), index.get(slots[2]).offset()), (Worth::High, 2 * 4096));
        for &slot in slots.iter().step_by(2) {
            index.remove(slot);
        }
        assert_eq!((index.used_pages(), index.used_bytes(), index.find(&id(2))), (0, 0, None));
        (0..PAGES).step_by(2).for_each(|number| {
            assert_eq!(index.insert(entry(&index, number)) >> POSITION_BITS, slots[number as usize] >> POSITION_BITS)
        });
        assert!((0..PAGES).all(|number| index.find(&id(number)).is_some_and(|slot| index.is_at(slot, number.into()))));
        assert!(!index.is_used(slots[2]) && index.memory_bytes() == bytes, "free entries are reused");
    }

    /// Bytes of all tables.
    fn table_bytes(index: &SharedIndex) -> usize {
        index.shards.iter().map(|shard| shard.read().table.allocation_size()).sum()
    }

    #[test]
    fn tables_keep_their_size_while_pages_come_and_go() {
        const PAGES: u32 = 40_000;
        let index = SharedIndex::new(7, PAGES.into(), Arc::new(SegmentReads::new(7)));
        for number in 0..PAGES {
            index.insert(entry(&index, number));
        }
        let mut early = 0;
        for number in PAGES..10 * PAGES {
            let oldest = index.find(&id(number - PAGES)).expect("the page is there");
            index.remove(oldest);
            index.insert(entry(&index, number));
            if number == 2 * PAGES {
                early = table_bytes(&index);
            }
        }
        let late = table_bytes(&index);
        assert!(late < early * 5 / 4, "the tables grew from {early} to {late} bytes");
        assert!((9 * PAGES..10 * PAGES).all(|number| index.find(&id(number)).is_some()), "no page is lost");
    }
}
