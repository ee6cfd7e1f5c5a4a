//! Retention: the choice of pages that outlive their segment.
//!
//! An eviction policy ranks pages up to a share of the log's bytes. A page enters the ranking when
//! it becomes visible and whenever it is used. A page that the ranking evicts is *retired*: readers
//! still find it, but it is not copied when its segment is reclaimed.
//!
//! Pages that were never used are ranked too, although they are not copied. They compete with those
//! that were used once. Ranking at the first use alone would save memory, but it copies three times
//! as much for fewer hits: 29.6 % instead of 30.9 % (example `copy_forward`, conversation trace, 6
//! GiB).
//!
//! Invariants:
//! - An index entry names its ranked page by [`PackedEntry::retained_at`], and the ranking names
//!   the entry by its slot.
//! - The retired list holds exactly the retired pages of namespaces with a quota, by record number.
//! - Hard-pinned pages are ranked. Their records take at most a quarter of the log.

use super::index::PackedEntry;
use larder_evict::{Evicted, Evictor, HitDensity, NamespaceIndex, NewPage, PageHandle};
use larder_format::is_expired;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pin {
    #[default]
    None,
    /// Evicted from the ranking after all unpinned pages. The pin ends with that.
    Soft,
    /// Copied before all other pages when its segment is reclaimed, as are the pages before it. The
    /// pin does not survive a restart. The page can still be lost to damage, its expiry, a failed
    /// copy or a failing device, or if the open segment has no room: see `copy_forward`.
    Hard,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PinError {
    #[error("the page is not in the log")]
    NotFound,
    /// Pinned pages would take more than a quarter of the log, or the log is too small to copy
    /// pages.
    #[error("pinned pages would take {bytes} bytes of {max}")]
    Full { bytes: u64, max: u64 },
    /// The ranking is full of pinned pages, or the page's segment is being reclaimed without it.
    #[error("no room among the pages that the log retains")]
    NotKept,
}

#[derive(Debug)]
pub(super) struct Retention {
    ranking: Evictor<u32, HitDensity>,
    handles: Vec<PageHandle>,
    pins: BTreeMap<u32, Pin>,
    pinned_bytes: u64,
    /// Namespace, record number, slot.
    retired: BTreeSet<(u32, u64, u32)>,
    /// Expiry in milliseconds since 1970, and slot, of all pages with an expiry.
    expiring: BTreeSet<(u64, u32)>,
}

impl Retention {
    pub(super) fn new(capacity_bytes: u64, policy: HitDensity) -> Retention {
        Retention {
            ranking: Evictor::new(capacity_bytes, policy),
            handles: Vec::new(),
            pins: BTreeMap::new(),
            pinned_bytes: 0,
            retired: BTreeSet::new(),
            expiring: BTreeSet::new(),
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.ranking.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.ranking.used_bytes()
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    pub(super) fn pin_of(&self, slot: u32) -> Pin {
        self.pins.get(&slot).copied().unwrap_or_default()
    }

    pub(super) fn first_expired(&self, now_unix_ms: u64) -> Option<u32> {
        self.expiring.first().filter(|(expires, _)| is_expired(*expires, now_unix_ms)).map(|&(_, slot)| slot)
    }

    /// The slot of the oldest retired page of a namespace with a quota.
    pub(super) fn first_retired(&self, namespace: u32) -> Option<u32> {
        let first = self.retired.range((namespace, 0, 0)..).next().filter(|(of, _, _)| *of == namespace);
        first.map(|&(_, _, slot)| slot)
    }

    pub(super) fn handle(&self, entry: &PackedEntry) -> Option<PageHandle> {
        self.handles.get(entry.retained_at as usize).copied()
    }

    pub(super) fn add(&mut self, slot: u32, entry: &PackedEntry) {
        if entry.expires_unix_ms() != 0 {
            self.expiring.insert((entry.expires_unix_ms(), slot));
        }
    }

    pub(super) fn remove(&mut self, slot: u32, entry: &PackedEntry) {
        self.unpin(slot, entry);
        if let Some(handle) = self.handle(entry) {
            self.ranking.remove(handle);
        }
        self.unretire(slot, entry);
        self.expiring.remove(&(entry.expires_unix_ms(), slot));
    }

    pub(super) fn retire(&mut self, slot: u32, entry: &PackedEntry) {
        self.retired.insert((entry.namespace, entry.number, slot));
    }

    pub(super) fn unretire(&mut self, slot: u32, entry: &PackedEntry) {
        self.retired.remove(&(entry.namespace, entry.number, slot));
    }

    pub(super) fn clear_retired(&mut self, namespace: u32) {
        let keys = (namespace, 0, 0)..=(namespace, u64::MAX, u32::MAX);
        let retired: Vec<_> = self.retired.range(keys).copied().collect();
        for key in retired {
            self.retired.remove(&key);
        }
    }

    /// Sets the quota of a namespace, and returns the pages that it evicts from the ranking.
    pub(super) fn set_quota(&mut self, namespace: u32, quota_bytes: u64) -> Vec<Evicted<u32>> {
        let mut evicted = Vec::new();
        self.ranking.set_quota(NamespaceIndex(namespace), quota_bytes, &mut evicted);
        evicted
    }

    /// Ranks a page, and adds those that it displaces to `evicted`. Returns the new value of
    /// [`PackedEntry::retained_at`], or `None` if the ranking refuses the page.
    pub(super) fn rank(&mut self, page: NewPage<u32>, evicted: &mut Vec<Evicted<u32>>) -> Option<u32> {
        let handle = self.ranking.insert(page, 0, evicted).ok()?;
        let at = handle.slot().index();
        match self.handles.get_mut(at) {
            Some(before) => *before = handle,
            None => self.handles.push(handle),
        }
        Some(at as u32)
    }

    pub(super) fn evicted(&mut self, slot: u32) {
        self.pins.remove(&slot);
    }

    pub(super) fn touch(&mut self, handle: PageHandle) {
        self.ranking.touch(handle, 0);
    }

    /// Pins a ranked page that has no pin.
    pub(super) fn pin(&mut self, slot: u32, handle: PageHandle, entry: &PackedEntry, pin: Pin) {
        match pin {
            Pin::None => return,
            Pin::Soft => self.ranking.soft_pin(handle, true),
            Pin::Hard => {
                self.pinned_bytes += entry.record_bytes();
                self.ranking.pin(handle)
            }
        };
        self.pins.insert(slot, pin);
    }

    pub(super) fn unpin(&mut self, slot: u32, entry: &PackedEntry) {
        let Some(pin) = self.pins.remove(&slot) else { return };
        let Some(handle) = self.handle(entry) else { return };
        match pin {
            Pin::None => {}
            Pin::Soft => {
                self.ranking.soft_pin(handle, false);
            }
            Pin::Hard => {
                self.ranking.unpin(handle);
                let bytes = entry.record_bytes();
                assert!(self.pinned_bytes >= bytes, "more bytes are unpinned than were pinned");
                self.pinned_bytes -= bytes;
            }
        }
    }
}
