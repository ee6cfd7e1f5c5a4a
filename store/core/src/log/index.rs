//! Which page stands where.
//!
//! Always true: of the records of a page that it was told of, it has the one with the largest number.

use super::Entry;
use larder_format::PageId;
use larder_format::disk::record_bytes;
use std::collections::HashMap;
use std::collections::hash_map;
use std::hash::{BuildHasher, DefaultHasher, Hasher};

/// Hashes with a seed that comes from outside, so that a run can be repeated.
#[derive(Debug, Clone)]
struct Seeded(u64);

impl BuildHasher for Seeded {
    type Hasher = DefaultHasher;
    fn build_hasher(&self) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.0);
        hasher
    }
}

#[derive(Debug)]
pub(super) struct Index {
    entries: HashMap<PageId, Entry, Seeded>,
    record_bytes: u64,
}

impl Index {
    pub(super) fn new(seed: u64) -> Index {
        Index { entries: HashMap::with_hasher(Seeded(seed)), record_bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of the records of all pages.
    pub(super) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    pub(super) fn get(&self, id: &PageId) -> Option<&Entry> {
        self.entries.get(id)
    }

    /// `false` if a newer record of the page is known.
    pub(super) fn insert_newer(&mut self, id: PageId, entry: Entry) -> bool {
        match self.entries.entry(id) {
            hash_map::Entry::Occupied(known) if known.get().number > entry.number => return false,
            hash_map::Entry::Occupied(mut known) => {
                self.record_bytes -= bytes_of(known.get());
                known.insert(entry);
            }
            hash_map::Entry::Vacant(free) => {
                free.insert(entry);
            }
        }
        self.record_bytes += bytes_of(&entry);
        true
    }

    pub(super) fn remove(&mut self, id: &PageId) -> Option<Entry> {
        let entry = self.entries.remove(id)?;
        self.record_bytes -= bytes_of(&entry);
        Some(entry)
    }

    /// Removes the page if record `number` is the one that is known.
    pub(super) fn remove_if(&mut self, id: &PageId, number: u64) -> Option<Entry> {
        match self.entries.get(id)?.number == number {
            true => self.remove(id),
            false => None,
        }
    }
}

fn bytes_of(entry: &Entry) -> u64 {
    record_bytes(entry.payload_bytes as usize) as u64
}
