//! What a namespace may take.
//!
//! Always true: the bytes of the findable pages of a namespace do not exceed its quota, or what pins held when the quota
//! was lowered below that; when the pins are gone, the next page of the namespace makes what is over it go. A page that
//! goes for it leaves a doubt, as its record stays on the device until the segment is reclaimed. A namespace without pages
//! is known only if it has a quota of its own, other than [`LogConfig::quota_default`], and was one of the last thousands that
//! lost their pages or got their quota: strangers may use as many namespaces as they like.

use super::*;
use larder_format::footer::PageSummary;

impl Log {
    /// What holds for a namespace: the default, if it is not known.
    pub fn quota(&self, namespace: &NamespaceId) -> u64 {
        self.index.quota(namespace)
    }

    /// Limits the bytes that the records of a namespace's findable pages take; `u64::MAX`: no limit. What is over it
    /// goes: first what would not be copied, oldest first, then what the keeper gives up. Takes time in proportion to
    /// the pages in the log. Does not outlive a restart.
    pub fn set_quota(&mut self, namespace: NamespaceId, quota_bytes: u64) {
        let had = self.index.quota(&namespace) != u64::MAX;
        let number = self.index.set_quota(&namespace, quota_bytes);
        if quota_bytes == u64::MAX {
            self.keeper.forget_order(number);
        } else if !had {
            for slot in self.index.slots_of(number) {
                let stored = *self.index.get(slot);
                if stored.keeper == index::NONE {
                    self.keeper.condemn(slot, &stored);
                }
            }
        }
        self.squeeze(&namespace, 0);
        let evicted = self.keeper.set_quota(number, quota_bytes);
        self.given_up(evicted);
        self.index.release(number);
    }

    /// Whether `page` in place of the one in `slot` would exceed its namespace's quota as it is.
    pub(super) fn is_over_quota_with(&self, slot: u32, page: &PageSummary) -> bool {
        let namespace = self.index.namespace(self.index.get(slot).namespace);
        let others = namespace.bytes - self.index.get(slot).record_bytes();
        others + record_bytes(page.payload_bytes as usize) as u64 > namespace.quota_bytes
    }

    /// Makes room for `bytes` in the quota of a namespace, as far as condemned pages go.
    pub(super) fn squeeze(&mut self, namespace: &NamespaceId, bytes: u64) {
        while self.index.namespace_bytes(namespace).saturating_add(bytes) > self.index.quota(namespace) {
            let Some(number) = self.index.namespace_number(namespace) else { return };
            let Some(slot) = self.keeper.first_condemned(number) else { return };
            self.counts.quota_pages += 1;
            self.drop_page(slot);
        }
    }
}
