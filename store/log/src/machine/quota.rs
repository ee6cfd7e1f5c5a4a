//! Quotas of namespaces.
//!
//! Invariants:
//! - The bytes of a namespace's visible pages exceed its quota only by pinned pages that were there
//!   when the quota was lowered, or while a new quota is being enforced. After the pins end, the
//!   next put of the namespace drops the excess.
//! - A new quota is enforced in steps, between which others use the log: first all pages of the
//!   namespace enter the quota order, then the excess is dropped.
//! - A page dropped for a quota is an unindexed record, because it stays on the device until its
//!   segment is reclaimed.
//! - A namespace without pages is known only if its quota differs from
//!   [`LogConfig::quota_default`], and only the most recent thousands are. Clients may name any
//!   number of namespaces.

use super::*;
use larder_format::disk::record_bytes;
use larder_format::footer::PageSummary;

/// Maximum number of used pages that one search for room passes over. It bounds the time for which
/// a put holds the lock.
const PASSED_OVER_MAX: u32 = 32;
/// Pages that one step looks at, at least, and pages of a lifted quota that it frees, at most. A
/// step ends with the shard of the index that it is in.
const STEP_PAGES: usize = 4096;
/// Pages that one step drops, at most.
const STEP_DROPS: usize = 1024;

impl Log {
    /// Quota of a namespace in bytes. [`LogConfig::quota_default`] for an unknown namespace.
    pub fn quota(&self, namespace: &NamespaceId) -> u64 {
        self.index.quota(namespace)
    }

    /// Limits the bytes of the records of a namespace's visible pages. `u64::MAX` for no limit.
    /// Does not survive a restart.
    ///
    /// The excess is dropped: a step of it now, and the rest by [`Log::quota_step`].
    pub fn set_quota(&mut self, namespace: NamespaceId, quota_bytes: u64) {
        let had_quota = self.index.quota(&namespace) != u64::MAX;
        let number = self.index.set_quota(&namespace, quota_bytes);
        if quota_bytes == u64::MAX {
            self.quota_steps.remove(&number);
            self.retention.clear_quota_order(number);
            // The first step. `quota_step` does the rest.
            self.retention.discard_orders(STEP_PAGES);
        } else if self.index.namespace(number).bytes > 0 {
            // A scan that is under way goes on.
            let from = if had_quota { self.index.entries.shards() } else { 0 };
            self.quota_steps.entry(number).or_insert(from);
            self.enforce_quota(number);
        }
        self.index.release(number);
    }

    /// Continues to enforce new quotas, and to free the order of lifted ones. Returns `true` if
    /// there is more to do. The caller does this periodically.
    pub fn quota_step(&mut self) -> bool {
        let has_orders = self.retention.discard_orders(STEP_PAGES);
        if let Some((&number, _)) = self.quota_steps.first_key_value() {
            self.enforce_quota(number);
        }
        has_orders || !self.quota_steps.is_empty()
    }

    /// Performs one step for a namespace.
    fn enforce_quota(&mut self, number: u32) {
        let Some(&from) = self.quota_steps.get(&number) else { return };
        let (mut shard, mut visited) = (from, 0);
        while shard < self.index.entries.shards() && visited < STEP_PAGES {
            let (slots, pages) = self.index.entries.slots_in_shard(number, shard);
            slots.into_iter().for_each(|slot| self.update_quota_order(slot));
            visited += pages;
            shard += 1;
        }
        self.quota_steps.insert(number, shard);
        let is_ordered = shard == self.index.entries.shards();
        // With its last page, the namespace has left the table of steps.
        if is_ordered && self.drop_excess(number, 0, STEP_DROPS) {
            self.quota_steps.remove(&number);
        }
    }

    pub(super) fn exceeds_quota_with(&self, slot: u32, page: &PageSummary) -> bool {
        let namespace = self.index.namespace(self.index.entries.get(slot).namespace);
        let others = namespace.bytes - self.index.entries.get(slot).record_bytes();
        others + record_bytes(page.payload_bytes as usize) as u64 > namespace.quota_bytes
    }

    /// Makes room for `bytes` in the quota of a namespace, as far as dropping pages without a hard
    /// pin does. Pages that were not used go first, older records before younger ones.
    pub(super) fn make_quota_room(&mut self, namespace: &NamespaceId, bytes: u64) {
        let Some(number) = self.index.namespace_number(namespace) else { return };
        // The order is incomplete, or the excess large.
        if !self.quota_steps.contains_key(&number) {
            self.drop_excess(number, bytes, usize::MAX);
        }
    }

    /// Makes room for `bytes`, and drops at most `max` pages for it. Returns `false` if others
    /// would have to go.
    fn drop_excess(&mut self, number: u32, bytes: u64, max: usize) -> bool {
        let mut passed_over = 0;
        let mut dropped = 0;
        loop {
            let namespace = self.index.namespace(number);
            if namespace.bytes.saturating_add(bytes) <= namespace.quota_bytes {
                return true;
            }
            let Some(slot) = self.retention.next_in_quota_order(number) else { return true };
            if dropped == max {
                return false;
            }
            let is_retained = self.index.entries.is_used(slot) || self.retention.pin_of(slot) == Pin::Soft;
            if is_retained && passed_over < PASSED_OVER_MAX {
                // A second chance: the next search finds the page unused, unless it was used again.
                self.index.entries.clear_used(slot);
                passed_over += 1;
                continue;
            }
            self.counts.quota_pages += 1;
            dropped += 1;
            self.index.entries.departed.record(self.index.entries.get(slot).fingerprint);
            self.drop_page(slot);
        }
    }

    /// Adds a page to the quota order, or removes it, as its namespace and its pin require.
    pub(super) fn update_quota_order(&mut self, slot: u32) {
        let entry = self.index.entries.get(slot);
        let has_quota = self.index.namespace(entry.namespace).quota_bytes != u64::MAX;
        if has_quota && self.retention.pin_of(slot) != Pin::Hard {
            self.retention.add_to_quota_order(slot, &entry);
        } else {
            self.retention.remove_from_quota_order(slot, &entry);
        }
    }
}
