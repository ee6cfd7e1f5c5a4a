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

use super::index::NONE;
use super::*;
use larder_format::disk::record_bytes;
use larder_format::footer::PageSummary;

impl Log {
    /// Quota of a namespace in bytes. [`LogConfig::quota_default`] for an unknown namespace.
    pub fn quota(&self, namespace: &NamespaceId) -> u64 {
        self.index.quota(namespace)
    }

    /// Limits the bytes of the records of a namespace's visible pages. `u64::MAX` for no limit.
    /// Does not survive a restart.
    ///
    /// The excess is dropped: first retired pages, oldest first, then pages that the ranking
    /// evicts. Takes time in proportion to the pages of the log.
    pub fn set_quota(&mut self, namespace: NamespaceId, quota_bytes: u64) {
        let had_quota = self.index.quota(&namespace) != u64::MAX;
        let number = self.index.set_quota(&namespace, quota_bytes);
        if quota_bytes == u64::MAX {
            self.retention.clear_retired(number);
        } else if !had_quota {
            for slot in self.index.slots_of(number) {
                let entry = *self.index.get(slot);
                if entry.retained_at == NONE {
                    self.retention.retire(slot, &entry);
                }
            }
        }
        self.make_quota_room(&namespace, 0);
        let evicted = self.retention.set_quota(number, quota_bytes);
        self.handle_evictions(evicted);
        self.index.release(number);
    }

    pub(super) fn exceeds_quota_with(&self, slot: u32, page: &PageSummary) -> bool {
        let namespace = self.index.namespace(self.index.get(slot).namespace);
        let others = namespace.bytes - self.index.get(slot).record_bytes();
        others + record_bytes(page.payload_bytes as usize) as u64 > namespace.quota_bytes
    }

    /// Makes room for `bytes` in the quota of a namespace, as far as dropping retired pages does.
    pub(super) fn make_quota_room(&mut self, namespace: &NamespaceId, bytes: u64) {
        while self.index.namespace_bytes(namespace).saturating_add(bytes) > self.index.quota(namespace) {
            let Some(number) = self.index.namespace_number(namespace) else { return };
            let Some(slot) = self.retention.first_retired(number) else { return };
            self.counts.quota_pages += 1;
            self.drop_page(slot);
        }
    }
}
