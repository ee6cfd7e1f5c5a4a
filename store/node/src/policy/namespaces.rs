//! Namespaces with pages in L2: their index in the evictor, their pages and their quotas.
//!
//! Invariant: a namespace has an index while it has pages. Indices are reused, so the pages bound
//! the table, however many namespaces clients invent.

use super::options::NamespaceQuota;
use larder_evict::{Evicted, Evictor, HitDensity, NamespaceIndex};
use larder_format::{NamespaceId, PageId};
use larder_runtime::fail_point;
use std::collections::BTreeMap;

#[derive(Debug)]
struct ResidentNamespace {
    index: NamespaceIndex,
    pages: u64,
}

#[derive(Debug)]
pub(super) struct NamespaceTable {
    resident: BTreeMap<NamespaceId, ResidentNamespace>,
    free: Vec<NamespaceIndex>,
    indices_used: u32,
    quota_default: Option<u64>,
    quotas: Vec<NamespaceQuota>,
}

impl NamespaceTable {
    pub(super) fn new(quota_default: Option<u64>, quotas: Vec<NamespaceQuota>) -> NamespaceTable {
        NamespaceTable { resident: BTreeMap::new(), free: Vec::new(), indices_used: 0, quota_default, quotas }
    }

    /// Quota of a namespace in bytes. `None` is no limit.
    pub(super) fn quota(&self, namespace: NamespaceId) -> Option<u64> {
        let own = self.quotas.iter().find(|quota| quota.namespace.matches(&namespace));
        own.map(|quota| quota.bytes).or(self.quota_default)
    }

    /// Counts one more page and returns the index of its namespace.
    pub(super) fn add_page(
        &mut self,
        namespace: NamespaceId,
        evictor: &mut Evictor<PageId, HitDensity>,
        evicted: &mut Vec<Evicted<PageId>>,
    ) -> NamespaceIndex {
        if let Some(resident) = self.resident.get_mut(&namespace) {
            resident.pages += 1;
            return resident.index;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.indices_used += 1;
            NamespaceIndex(self.indices_used - 1)
        });
        let quota = self.quota(namespace).filter(|_| !fail_point!("node.ignore-quota"));
        // Set even without a quota: the index may carry that of the namespace that had it before.
        evictor.set_quota(index, quota.unwrap_or(u64::MAX), evicted);
        self.resident.insert(namespace, ResidentNamespace { index, pages: 1 });
        index
    }

    pub(super) fn remove_page(&mut self, namespace: NamespaceId) {
        let Some(resident) = self.resident.get_mut(&namespace) else { return };
        resident.pages -= 1;
        if resident.pages == 0 {
            self.free.push(resident.index);
            self.resident.remove(&namespace);
        }
    }

    pub(super) fn list(&self) -> impl Iterator<Item = (NamespaceId, NamespaceIndex, u64)> + '_ {
        self.resident.iter().map(|(namespace, resident)| (*namespace, resident.index, resident.pages))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceUse {
    pub namespace: NamespaceId,
    pub pages: u64,
    pub bytes: u64,
    /// `None` is no limit.
    pub quota_bytes: Option<u64>,
}

impl super::L2Policy {
    pub fn quota(&self, namespace: NamespaceId) -> Option<u64> {
        self.namespaces.quota(namespace)
    }

    /// Usage of the namespaces with the most bytes, largest first, at most `most` of them.
    pub fn namespaces(&self, most: usize) -> Vec<NamespaceUse> {
        let mut uses: Vec<NamespaceUse> = self
            .namespaces
            .list()
            .map(|(namespace, index, pages)| NamespaceUse {
                namespace,
                pages,
                bytes: self.evictor.namespace_bytes(index),
                quota_bytes: self.namespaces.quota(namespace),
            })
            .collect();
        uses.sort_by_key(|used| (std::cmp::Reverse(used.bytes), used.namespace));
        uses.truncate(most);
        uses
    }
}
