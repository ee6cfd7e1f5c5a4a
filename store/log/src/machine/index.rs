//! The index: the location of each page that readers can find.
//!
//! Invariants:
//! - The byte count of a namespace is the sum over the records of its entries.
//! - A fallback exists only for an indexed page, and is another record of the same put. The list of
//!   slots of its segment names the page.
//! - All records of the put on the device have at most the number and epoch of the entry's record,
//!   or else of its fallback.
//!
//! `shared_index` has the entries, with the invariants that concern lookups.
//!
//! An entry does not hold its page's name, but a [`Fingerprint`](super::entry::Fingerprint) of it.
//! Two pages with the same fingerprint would share an entry: one of them is a miss then. A reader
//! compares the whole name with the record's header, so it never gets another page. Record 0020 has
//! the figures.
//!
//! Entries name their namespace by a number, because namespaces are few and their names long.

use super::LogConfig;
use super::entry::PackedEntry;
use super::segment_reads::SegmentReads;
use super::shared_index::SharedIndex;
use larder_format::NamespaceId;
use larder_format::footer::PageSummary;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Maximum number of namespaces that are kept for their quota alone.
pub(super) const WITHOUT_PAGES_MAX: usize = 4096;

/// Another record of an indexed put: the original of a copy that this process made, or the newest
/// copy that recovery found beside an original. If the indexed record turns out damaged, the page
/// is served from here.
#[derive(Debug, Clone, Copy)]
pub(super) struct FallbackRecord {
    pub(super) segment: u32,
    /// Second since 1970 in which the device last failed to read it, 0 if it did not.
    pub(super) failed_unix_s: u32,
    pub(super) offset: u64,
    pub(super) number: u64,
    pub(super) generation: u64,
}

/// Time after which a record that the device failed to read is tried again. Errors pass: cables,
/// resets, full queues.
const UNREADABLE_S: u32 = 60;

impl FallbackRecord {
    /// Records a failed read.
    pub(super) fn failed(self, now_unix_ms: u64) -> FallbackRecord {
        FallbackRecord { failed_unix_s: unix_s(now_unix_ms).max(1), ..self }
    }

    /// Returns `true` if the device failed to read the record lately. A clock that went back ends
    /// that time.
    pub(super) fn is_unreadable(&self, now_unix_ms: u64) -> bool {
        let age = unix_s(now_unix_ms).checked_sub(self.failed_unix_s);
        self.failed_unix_s != 0 && age.is_some_and(|age| age < UNREADABLE_S)
    }

    pub(super) fn of(segment: u32, page: &PageSummary) -> FallbackRecord {
        let PageSummary { offset, number, generation, .. } = *page;
        FallbackRecord { segment, failed_unix_s: 0, offset, number, generation }
    }

    pub(super) fn of_entry(entry: &PackedEntry) -> FallbackRecord {
        let (segment, offset) = (entry.segment(), entry.offset());
        let (number, generation) = (entry.number, entry.generation);
        FallbackRecord { segment, failed_unix_s: 0, offset, number, generation }
    }
}

/// Seconds since 1970, until the year 2106.
fn unix_s(unix_ms: u64) -> u32 {
    u32::try_from(unix_ms / 1000).unwrap_or(u32::MAX)
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

/// Pages of a namespace in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespacePages {
    pub namespace: NamespaceId,
    pub pages: u64,
    /// Bytes of their records.
    pub bytes: u64,
}

/// Part that only changes of the log use: the entries' namespaces, fallbacks and totals.
#[derive(Debug)]
pub(super) struct Index {
    /// Part that lookups use too.
    pub(super) entries: Arc<SharedIndex>,
    quota_default: u64,
    /// Namespaces with a quota of their own that lost their last page, or never had one. Oldest
    /// first. Some have pages again.
    without_pages: VecDeque<u32>,
    namespaces: Vec<Namespace>,
    namespaces_free: Vec<u32>,
    namespaces_by_id: BTreeMap<NamespaceId, u32>,
    len: usize,
    record_bytes: u64,
    /// By slot.
    fallbacks: BTreeMap<u32, FallbackRecord>,
}

impl Index {
    pub(super) fn new(config: &LogConfig, segments: Arc<SegmentReads>) -> Index {
        let quota_default = config.quota_default;
        Index {
            entries: Arc::new(SharedIndex::new(config.hash_seed, config.pages_max, segments)),
            quota_default,
            without_pages: VecDeque::new(),
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

    pub(super) fn fallbacks(&self) -> usize {
        self.fallbacks.len()
    }

    /// Bytes of heap memory, without fallbacks and `entries`.
    pub(super) fn memory_bytes(&self) -> usize {
        let namespaces = self.namespaces.capacity() * (size_of::<Namespace>() + size_of::<(NamespaceId, u32)>());
        namespaces + self.namespaces_free.capacity() * size_of::<u32>()
    }

    pub(super) fn namespace_of(&self, slot: u32) -> &NamespaceId {
        &self.namespaces[self.entries.get(slot).namespace as usize].id
    }

    /// Inserts a page that is not indexed, and returns its slot. Readers find it from now on.
    pub(super) fn insert(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let number = self.intern(&page.id.namespace);
        let entry = PackedEntry::new(self.entries.fingerprint(&page.id), number, segment, page);
        let namespace = &mut self.namespaces[number as usize];
        namespace.pages += 1;
        namespace.bytes += entry.record_bytes();
        self.len += 1;
        self.record_bytes += entry.record_bytes();
        self.entries.insert(entry)
    }

    /// Removes the entry in `slot`, with its fallback. The next insertion reuses the slot, so
    /// callers must not keep it.
    pub(super) fn remove(&mut self, slot: u32) -> PackedEntry {
        self.fallbacks.remove(&slot);
        // Lists of slots per segment are not updated: they skip a slot without a page.
        let entry = self.entries.remove(slot);
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

    /// Sets the fallback, unless the page has a newer one.
    pub(super) fn set_newest_fallback(&mut self, slot: u32, record: FallbackRecord) {
        let fallback = self.fallbacks.entry(slot).or_insert(record);
        if fallback.number < record.number {
            *fallback = record;
        }
    }

    pub(super) fn fallback(&self, slot: u32) -> Option<&FallbackRecord> {
        self.fallbacks.get(&slot)
    }

    /// Takes the fallback of the put in `slot`.
    pub(super) fn take_fallback(&mut self, slot: u32) -> Option<FallbackRecord> {
        let generation = self.entries.get(slot).generation;
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

    pub(super) fn namespace_pages(&self, id: &NamespaceId) -> u64 {
        self.namespaces_by_id.get(id).map_or(0, |&number| self.namespace(number).pages)
    }

    pub(super) fn namespace_bytes(&self, id: &NamespaceId) -> u64 {
        self.namespaces_by_id.get(id).map_or(0, |&number| self.namespace(number).bytes)
    }

    /// Namespaces with pages, in the order of their ids, at most `max`.
    pub(super) fn namespaces_with_pages(&self, max: usize) -> Vec<NamespacePages> {
        let all = self.namespaces_by_id.values().map(|&number| self.namespace(number));
        let used = all.filter(|namespace| namespace.pages > 0).take(max);
        used.map(|&Namespace { id, pages, bytes, .. }| NamespacePages { namespace: id, pages, bytes }).collect()
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
