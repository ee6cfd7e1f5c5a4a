//! Namespaces with pages in L2: their index in the evictor, their pages and their quotas.
//!
//! Invariants:
//! - A namespace has an index while it has pages. Indices are reused, so the pages bound the table,
//!   however many namespaces clients invent.
//! - `by_size` has each namespace once, in the class of its bytes. So a list of the largest ones
//!   costs no visit of the others.

use super::options::NamespaceQuota;
use super::pins::PINNED_PART;
use super::{L2Policy, PageState, Resident};
use larder_evict::{Evicted, Evictor, HitDensity, NamespaceIndex};
use larder_format::NamespaceId;
use larder_runtime::fail_point;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug)]
struct ResidentNamespace {
    index: NamespaceIndex,
    pages: u64,
    bytes: u64,
    /// Resolved when its first page came. The rules never change while a node runs.
    quota: Option<u64>,
}

impl ResidentNamespace {
    /// Floor that the evictor keeps. A floor never exceeds the quota, which an operator chose.
    fn kept_floor(&self, floor: u64) -> u64 {
        floor.min(self.quota.unwrap_or(u64::MAX))
    }
}

/// Quota rules by prefix. A look-up costs one search per length of a prefix, however many rules
/// there are.
#[derive(Debug)]
struct QuotaRules {
    default: Option<u64>,
    /// Length in digits, then prefix; with the order of the rule and its bytes.
    by_length: BTreeMap<usize, BTreeMap<String, (usize, u64)>>,
}

impl QuotaRules {
    fn new(default: Option<u64>, rules: &[NamespaceQuota]) -> QuotaRules {
        let mut by_length = BTreeMap::<usize, BTreeMap<String, (usize, u64)>>::new();
        for (order, rule) in rules.iter().enumerate() {
            let digits = rule.namespace.digits();
            // Of equal prefixes the first one counts.
            by_length.entry(digits.len()).or_default().entry(digits.into()).or_insert((order, rule.bytes));
        }
        QuotaRules { default, by_length }
    }

    /// Quota of a namespace in bytes. The first rule that matches counts. `None` is no limit.
    fn quota(&self, namespace: &NamespaceId) -> Option<u64> {
        if self.by_length.is_empty() {
            return self.default;
        }
        let name = namespace.to_string();
        let matching = self.by_length.iter().filter_map(|(&length, rules)| rules.get(name.get(..length)?));
        matching.min_by_key(|(order, _)| *order).map(|&(_, bytes)| bytes).or(self.default)
    }
}

/// Order of a namespace by size: the class of its bytes, the largest first, then its name.
type SizeKey = (Reverse<u64>, NamespaceId);

/// Class of a number of bytes. Four classes per power of two: a page rarely moves its namespace to
/// another class, and namespaces of one class differ by less than a quarter.
fn size_class(bytes: u64) -> u64 {
    let bits = u64::from(bytes.checked_ilog2().unwrap_or(0));
    let quarter = (bytes << 2).checked_shr(bits as u32).unwrap_or(0) & 3;
    bits * 4 + quarter
}

#[derive(Debug)]
pub(super) struct NamespaceTable {
    resident: BTreeMap<NamespaceId, ResidentNamespace>,
    by_size: BTreeSet<SizeKey>,
    free: Vec<NamespaceIndex>,
    indices_used: u32,
    rules: QuotaRules,
    /// Floors in bytes of the namespaces in use, resident or not.
    floors: BTreeMap<NamespaceId, u64>,
}

impl NamespaceTable {
    pub(super) fn new(quota_default: Option<u64>, quotas: &[NamespaceQuota]) -> NamespaceTable {
        NamespaceTable {
            resident: BTreeMap::new(),
            by_size: BTreeSet::new(),
            free: Vec::new(),
            indices_used: 0,
            rules: QuotaRules::new(quota_default, quotas),
            floors: BTreeMap::new(),
        }
    }

    /// Quota of a namespace in bytes. `None` is no limit.
    pub(super) fn quota(&self, namespace: NamespaceId) -> Option<u64> {
        match self.resident.get(&namespace) {
            Some(resident) => resident.quota,
            None => self.rules.quota(&namespace),
        }
    }

    /// Counts one more page and returns the index of its namespace.
    pub(super) fn add_page(
        &mut self,
        namespace: NamespaceId,
        bytes: u32,
        evictor: &mut Evictor<PageState, HitDensity>,
        evicted: &mut Vec<Evicted<PageState>>,
    ) -> NamespaceIndex {
        if let Some(resident) = self.resident.get_mut(&namespace) {
            resident.pages += 1;
            let index = resident.index;
            self.resize(namespace, |before| before + u64::from(bytes));
            return index;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.indices_used += 1;
            NamespaceIndex(self.indices_used - 1)
        });
        let quota = self.rules.quota(&namespace);
        // Set even without a quota or floor: the index may carry those of the namespace that had it
        // before.
        let enforced = quota.filter(|_| !fail_point!("node.ignore-quota"));
        evictor.set_quota(index, enforced.unwrap_or(u64::MAX), evicted);
        let bytes = u64::from(bytes);
        let resident = ResidentNamespace { index, pages: 1, bytes, quota };
        evictor.set_floor(index, resident.kept_floor(self.floor(&namespace)));
        self.resident.insert(namespace, resident);
        self.by_size.insert((Reverse(size_class(bytes)), namespace));
        index
    }

    /// Floor of a namespace in bytes. 0 if it is not in use.
    pub(super) fn floor(&self, namespace: &NamespaceId) -> u64 {
        self.floors.get(namespace).copied().unwrap_or(0)
    }

    /// Returns `true` if any namespace is in use.
    pub(super) fn has_floors(&self) -> bool {
        !self.floors.is_empty()
    }

    /// Floors of all namespaces in use, in bytes.
    #[cfg(test)]
    pub(super) fn floors(&self) -> impl Iterator<Item = (NamespaceId, u64)> {
        self.floors.iter().map(|(namespace, floor)| (*namespace, *floor))
    }

    /// Sets the floor of a namespace, 0 for none. Returns the floor that it had. Costs O(log n).
    fn set_floor(&mut self, namespace: NamespaceId, floor: u64, evictor: &mut Evictor<PageState, HitDensity>) -> u64 {
        let before = match floor {
            0 => self.floors.remove(&namespace),
            _ => self.floors.insert(namespace, floor),
        };
        if let Some(resident) = self.resident.get(&namespace) {
            evictor.set_floor(resident.index, resident.kept_floor(floor));
        }
        before.unwrap_or(0)
    }

    pub(super) fn remove_page(&mut self, namespace: NamespaceId, bytes: u32) {
        let Some(resident) = self.resident.get_mut(&namespace) else { return };
        resident.pages -= 1;
        let is_last = resident.pages == 0;
        self.resize(namespace, |before| {
            assert!(before >= u64::from(bytes), "a page of {bytes} bytes left a namespace of {before}");
            before - u64::from(bytes)
        });
        if is_last && let Some(resident) = self.resident.remove(&namespace) {
            self.by_size.remove(&(Reverse(size_class(resident.bytes)), namespace));
            self.free.push(resident.index);
        }
    }

    fn resize(&mut self, namespace: NamespaceId, change: impl FnOnce(u64) -> u64) {
        let Some(resident) = self.resident.get_mut(&namespace) else { return };
        let before = size_class(resident.bytes);
        resident.bytes = change(resident.bytes);
        let after = size_class(resident.bytes);
        if before != after {
            self.by_size.remove(&(Reverse(before), namespace));
            self.by_size.insert((Reverse(after), namespace));
        }
    }

    /// Lists the namespaces, the largest class first.
    fn largest(&self) -> impl Iterator<Item = NamespaceUse> + '_ {
        self.by_size.iter().filter_map(|(_, namespace)| {
            let resident = self.resident.get(namespace)?;
            let ResidentNamespace { pages, bytes, quota, .. } = *resident;
            let floor_bytes = resident.kept_floor(self.floor(namespace));
            Some(NamespaceUse {
                namespace: *namespace,
                pages,
                bytes,
                quota_bytes: quota,
                floor_bytes,
                hard_pinned_bytes: 0,
            })
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceUse {
    pub namespace: NamespaceId,
    pub pages: u64,
    pub bytes: u64,
    /// `None` is no limit.
    pub quota_bytes: Option<u64>,
    /// Bytes that no other namespace can take from this one.
    pub floor_bytes: u64,
    /// Bytes that its hard pins keep.
    pub hard_pinned_bytes: u64,
}

impl<P: Resident> L2Policy<P> {
    pub fn quota(&self, namespace: NamespaceId) -> Option<u64> {
        self.namespaces.quota(namespace)
    }

    /// Sets the floors of these namespaces in bytes, 0 for none. All floors together should take at
    /// most half of the capacity. Costs O(log n) for each.
    pub fn set_floors(&mut self, floors: &[(NamespaceId, u64)]) {
        for &(namespace, floor) in floors {
            let before = self.namespaces.set_floor(namespace, floor, &mut self.evictor);
            self.pins.change_floor(&namespace, before / PINNED_PART, floor / PINNED_PART);
        }
    }

    /// Pages of a namespace, and their bytes.
    pub fn used_by(&self, namespace: &NamespaceId) -> (u64, u64) {
        self.namespaces.resident.get(namespace).map_or((0, 0), |resident| (resident.pages, resident.bytes))
    }

    /// Usage of the namespaces with the most bytes, largest first, at most `most` of them. The last
    /// of them may be up to a quarter smaller than one that is left out.
    pub fn namespaces(&self, most: usize) -> Vec<NamespaceUse> {
        let mut uses: Vec<NamespaceUse> = self.namespaces.largest().take(most).collect();
        uses.iter_mut().for_each(|used| used.hard_pinned_bytes = self.hard_pinned_bytes(&used.namespace));
        uses.sort_by_key(|used| (Reverse(used.bytes), used.namespace));
        uses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_grow_with_the_bytes_and_span_less_than_a_quarter() {
        let mut last = size_class(0);
        for bytes in (4..1 << 16).chain([1 << 40, u64::MAX / 8]) {
            let class = size_class(bytes);
            assert!(class >= last && size_class(bytes + bytes / 4 + 1) > class, "{bytes}");
            last = class;
        }
    }

    #[test]
    fn first_matching_rule_counts_whatever_its_length() {
        let rule = |prefix: &str, bytes| NamespaceQuota { namespace: prefix.parse().unwrap(), bytes };
        let id = NamespaceId([0xab; 32]);
        let rules = [rule("cdef", 1), rule("ababab", 2), rule("abab", 3), rule("ababab", 4)];
        assert_eq!(QuotaRules::new(Some(9), &rules).quota(&id), Some(2));
        assert_eq!(QuotaRules::new(Some(9), &rules[2..]).quota(&id), Some(3));
        assert_eq!(QuotaRules::new(Some(9), &rules[..1]).quota(&id), Some(9));
        assert_eq!(QuotaRules::new(None, &[]).quota(&id), None);
    }
}
