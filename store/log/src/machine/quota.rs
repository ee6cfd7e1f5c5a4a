//! Quotas of namespaces.
//!
//! Invariants:
//! - The bytes of a namespace's visible pages exceed its quota only by pinned pages that were there
//!   when the quota was lowered. After the pins end, the next put of the namespace drops the
//!   excess.
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

impl Log {
    /// Quota of a namespace in bytes. [`LogConfig::quota_default`] for an unknown namespace.
    pub fn quota(&self, namespace: &NamespaceId) -> u64 {
        self.index.quota(namespace)
    }

    /// Limits the bytes of the records of a namespace's visible pages. `u64::MAX` for no limit.
    /// Does not survive a restart.
    ///
    /// The excess is dropped. The first quota of a namespace with pages takes time in proportion to
    /// the pages of the log.
    pub fn set_quota(&mut self, namespace: NamespaceId, quota_bytes: u64) {
        let had_quota = self.index.quota(&namespace) != u64::MAX;
        let number = self.index.set_quota(&namespace, quota_bytes);
        if quota_bytes == u64::MAX {
            self.retention.clear_quota_order(number);
        } else if !had_quota && self.index.namespace(number).bytes > 0 {
            for slot in self.index.entries.slots_of(number) {
                self.update_quota_order(slot);
            }
        }
        self.make_quota_room(&namespace, 0);
        self.index.release(number);
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
        let mut passed_over = 0;
        while self.index.namespace_bytes(namespace).saturating_add(bytes) > self.index.quota(namespace) {
            let Some(slot) = self.retention.next_in_quota_order(number) else { return };
            let is_retained = self.index.entries.is_used(slot) || self.retention.pin_of(slot) == Pin::Soft;
            if is_retained && passed_over < PASSED_OVER_MAX {
                // A second chance: the next search finds the page unused, unless it was used again.
                self.index.entries.clear_used(slot);
                passed_over += 1;
                continue;
            }
            self.counts.quota_pages += 1;
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
