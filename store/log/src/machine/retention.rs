//! Retention: the pages that are worth a copy when their segment is reclaimed.
//!
//! A page is *retained* if it was used since its record was written, or if it is pinned. A copy
//! counts as unused again, so a page that is not used any more goes with the segment of its copy.
//! Used pages have a [`Worth`], which the owner of a faster tier reports. If the room does not take
//! all of them, those of higher worth come first. A bit and two more per page are all that this
//! needs: see `shared_index.rs` and `entry.rs`. Record 0020 compares this with other rankings.
//!
//! A page is also retained if its namespace would fall below its *floor* without it.
//!
//! This part holds what only some pages have: pins, and the order of pages in namespaces with a
//! quota. It also has the floors, which other logs share.
//!
//! Invariants:
//! - The quota order holds exactly the pages of namespaces with a quota that have no hard pin.
//! - The records of hard-pinned pages take at most a quarter of the log.

use super::entry::PackedEntry;
use super::floors::SharedFloors;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pin {
    #[default]
    None,
    /// Copied like a page that was used, and before those.
    Soft,
    /// Copied before all other pages when its segment is reclaimed. A newer put of the page
    /// inherits the pin, if it has room among the pinned pages. The pin does not survive a restart.
    /// The page can still be lost to damage, its expiry, a failed copy or a failing device, or if
    /// the open segment has no room: see `copy_forward`.
    Hard,
}

/// Worth of a used page among all used pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worth {
    /// Hardly expected to be used again.
    Low,
    #[default]
    Usual,
    /// Expected to be used again.
    High,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PinError {
    #[error("the page is not in the log")]
    NotFound,
    /// Pinned pages would take more than a quarter of the log, or the log is too small to copy
    /// pages.
    #[error("pinned pages would take {bytes} bytes of {max}")]
    Full { bytes: u64, max: u64 },
    /// The log copies no pages, or the page's segment is being reclaimed without it.
    #[error("no room among the pages that the log retains")]
    NotKept,
}

/// Record number in two halves, and slot. With the number as one integer it would take 16 bytes.
type QuotaKey = (u32, u32, u32);

// Each page with a quota has one, and a tree takes about twice their bytes. The bytes of a pin
// follow from the size of its entry: see `PIN_MEMORY_BYTES`.
const _: () = assert!(size_of::<QuotaKey>() == 12);
const _: () = assert!(size_of::<u32>() + size_of::<Pin>() == 5);

fn quota_key(number: u64, slot: u32) -> QuotaKey {
    ((number >> 32) as u32, number as u32, slot)
}

/// Pages of a namespace in the order of their record numbers.
type QuotaOrder = BTreeSet<QuotaKey>;

#[derive(Debug, Default)]
pub(super) struct Retention {
    /// By slot. Pages without a pin are absent.
    pins: BTreeMap<u32, Pin>,
    pinned_bytes: u64,
    pinned_pages: u64,
    /// Pages that may be dropped for a quota, by namespace. No order is empty.
    quota_orders: BTreeMap<u32, QuotaOrder>,
    /// Orders of lifted quotas, which [`Retention::discard_orders`] frees.
    discarded_orders: Vec<QuotaOrder>,
    /// By namespace: the record number from which the search for a page to drop continues.
    hands: BTreeMap<u32, u64>,
    floors: Arc<SharedFloors>,
}

impl Retention {
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Number of hard-pinned pages.
    pub(super) fn pinned_pages(&self) -> u64 {
        self.pinned_pages
    }

    pub(super) fn pin_of(&self, slot: u32) -> Pin {
        self.pins.get(&slot).copied().unwrap_or_default()
    }

    pub(super) fn has_pins(&self) -> bool {
        !self.pins.is_empty()
    }

    pub(super) fn share_floors(&mut self, floors: Arc<SharedFloors>) {
        self.floors = floors;
    }

    pub(super) fn floors(&self) -> &SharedFloors {
        &self.floors
    }

    /// Sets the pin of a page. The caller updates the quota order.
    pub(super) fn set_pin(&mut self, slot: u32, entry: &PackedEntry, pin: Pin) {
        let old = match pin {
            Pin::None => self.pins.remove(&slot),
            _ => self.pins.insert(slot, pin),
        };
        let bytes = entry.record_bytes();
        if old == Some(Pin::Hard) {
            assert!(self.pinned_bytes >= bytes, "more bytes are unpinned than were pinned");
            self.pinned_bytes -= bytes;
            self.pinned_pages -= 1;
        }
        if pin == Pin::Hard {
            self.pinned_bytes += bytes;
            self.pinned_pages += 1;
        }
    }

    pub(super) fn remove(&mut self, slot: u32, entry: &PackedEntry) {
        self.set_pin(slot, entry, Pin::None);
        self.remove_from_quota_order(slot, entry);
    }

    pub(super) fn add_to_quota_order(&mut self, slot: u32, entry: &PackedEntry) {
        self.quota_orders.entry(entry.namespace).or_default().insert(quota_key(entry.number, slot));
    }

    pub(super) fn remove_from_quota_order(&mut self, slot: u32, entry: &PackedEntry) {
        let namespace = entry.namespace;
        let Some(order) = self.quota_orders.get_mut(&namespace) else { return };
        order.remove(&quota_key(entry.number, slot));
        if order.is_empty() {
            self.quota_orders.remove(&namespace);
        }
    }

    /// Forgets the quota order of a namespace. [`Retention::discard_orders`] frees its memory.
    pub(super) fn clear_quota_order(&mut self, namespace: u32) {
        self.discarded_orders.extend(self.quota_orders.remove(&namespace));
        self.hands.remove(&namespace);
    }

    /// Frees the memory of at most `pages` pages in orders of lifted quotas. Returns `true` if some
    /// is left.
    pub(super) fn discard_orders(&mut self, pages: usize) -> bool {
        for _ in 0..pages {
            let Some(order) = self.discarded_orders.last_mut() else { return false };
            order.pop_first();
            if order.is_empty() {
                self.discarded_orders.pop();
            }
        }
        !self.discarded_orders.is_empty()
    }

    /// The next page of a namespace that may be dropped for its quota, in the order of record
    /// numbers, and again from the start. The search moves past the page.
    pub(super) fn next_in_quota_order(&mut self, namespace: u32) -> Option<u32> {
        let order = self.quota_orders.get(&namespace)?;
        let hand = self.hands.get(&namespace).copied().unwrap_or(0);
        let &(high, low, slot) = order.range(quota_key(hand, 0)..).next().or_else(|| order.first())?;
        self.hands.insert(namespace, ((u64::from(high) << 32) | u64::from(low)) + 1);
        Some(slot)
    }

    /// Forgets where the search for a page to drop continues, for a namespace without pages.
    pub(super) fn forget_namespace(&mut self, namespace: u32) {
        self.hands.remove(&namespace);
    }
}
