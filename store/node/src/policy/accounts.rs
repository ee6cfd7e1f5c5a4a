//! Namespaces that have pages in L2, their numbers with the evictor, and their quotas.
//!
//! Always true: a namespace has a number while it has pages, and numbers are taken again, so what strangers can make grow
//! here is bounded by the pages.

use crate::options::NamespaceQuota;
use larder_core::planted::{Bug, has};
use larder_evict::{Evicted, Evictor, Larder, NamespaceIndex};
use larder_format::{NamespaceId, PageId};
use std::collections::BTreeMap;

#[derive(Debug)]
struct Account {
    index: NamespaceIndex,
    pages: u64,
}

/// Which namespace has which number.
#[derive(Debug)]
pub(super) struct Accounts {
    accounts: BTreeMap<NamespaceId, Account>,
    free: Vec<NamespaceIndex>,
    numbers: u32,
    quota_default: Option<u64>,
    quotas: Vec<NamespaceQuota>,
}

impl Accounts {
    pub(super) fn new(quota_default: Option<u64>, quotas: Vec<NamespaceQuota>) -> Accounts {
        Accounts { accounts: BTreeMap::new(), free: Vec::new(), numbers: 0, quota_default, quotas }
    }

    /// Most bytes of a namespace; `None` is no limit.
    pub(super) fn quota(&self, namespace: NamespaceId) -> Option<u64> {
        let own = self.quotas.iter().find(|quota| quota.namespace.matches(&namespace));
        own.map(|quota| quota.bytes).or(self.quota_default)
    }

    /// One more page of `namespace`.
    pub(super) fn open(
        &mut self,
        namespace: NamespaceId,
        evictor: &mut Evictor<PageId, Larder>,
        evicted: &mut Vec<Evicted<PageId>>,
    ) -> NamespaceIndex {
        if let Some(account) = self.accounts.get_mut(&namespace) {
            account.pages += 1;
            return account.index;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.numbers += 1;
            NamespaceIndex(self.numbers - 1)
        });
        let quota = self.quota(namespace).filter(|_| !has(Bug::QuotaIgnored));
        evictor.set_quota(index, quota.unwrap_or(u64::MAX), evicted);
        self.accounts.insert(namespace, Account { index, pages: 1 });
        index
    }

    /// One page less.
    pub(super) fn left(&mut self, namespace: NamespaceId) {
        let Some(account) = self.accounts.get_mut(&namespace) else { return };
        account.pages -= 1;
        if account.pages == 0 {
            self.free.push(account.index);
            self.accounts.remove(&namespace);
        }
    }

    pub(super) fn list(&self) -> impl Iterator<Item = (NamespaceId, NamespaceIndex, u64)> + '_ {
        self.accounts.iter().map(|(namespace, account)| (*namespace, account.index, account.pages))
    }
}

/// What a namespace has in L2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceUse {
    /// Whose.
    pub namespace: NamespaceId,
    /// Pages.
    pub pages: u64,
    /// Bytes.
    pub bytes: u64,
    /// Most bytes.
    pub quota_bytes: Option<u64>,
}

impl super::Residency {
    /// Most bytes of a namespace; `None` is no limit.
    pub fn quota(&self, namespace: NamespaceId) -> Option<u64> {
        self.accounts.quota(namespace)
    }

    /// What the namespaces have, those with most first, at most `most` of them.
    pub fn namespaces(&self, most: usize) -> Vec<NamespaceUse> {
        let mut uses: Vec<NamespaceUse> = self
            .accounts
            .list()
            .map(|(namespace, index, pages)| NamespaceUse {
                namespace,
                pages,
                bytes: self.evictor.namespace_bytes(index),
                quota_bytes: self.accounts.quota(namespace),
            })
            .collect();
        uses.sort_by_key(|used| (std::cmp::Reverse(used.bytes), used.namespace));
        uses.truncate(most);
        uses
    }
}
