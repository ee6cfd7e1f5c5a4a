//! Namespaces of an evictor: their bytes, quotas and floors, and the pages of each that may leave.
//!
//! Invariants:
//! - Each offered page is in exactly one list of its namespace: that of the soft-pinned pages, or
//!   the other one.
//! - `above` has exactly the namespaces that use more than their floor and have an offered page,
//!   with the bytes above it.
//!
//! A list is a clock. A page enters at the end, or at the front if its last child was evicted: a
//! sequence then leaves from its end, as a whole. A page at the front that was touched goes to the
//! end once. So a hit costs one flag, and every other change O(log n) for n namespaces.

use super::{Evictor, Flags, NO_SLOT, NamespaceIndex};
use crate::policy::{Policy, Slot};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of touched pages that one search for a page to evict passes over.
const PASSED_OVER_MAX: u32 = 32;

/// Pages of a namespace that may leave, linked through the pages.
#[derive(Debug, Clone, Copy)]
struct List {
    first: Slot,
    last: Slot,
}

const EMPTY: List = List { first: NO_SLOT, last: NO_SLOT };

/// Links of an offered page to its neighbours in the list of its namespace. The number of its
/// children takes the place of the first one in other pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Links {
    previous: Slot,
    next: Slot,
}

impl Links {
    pub(super) const fn of_children(children: u32) -> Links {
        Links { previous: Slot(children), next: NO_SLOT }
    }

    pub(super) fn children(self) -> u32 {
        self.previous.0
    }
}

/// End of a list at which a page enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListEnd {
    /// The page leaves next.
    Front,
    Back,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct NamespaceUsage {
    pub(super) used_bytes: u64,
    /// `u64::MAX` is no limit.
    pub(super) quota_bytes: u64,
    floor_bytes: u64,
    /// Offered pages: those without a soft pin, and those with one.
    lists: [List; 2],
}

impl NamespaceUsage {
    const UNLIMITED: NamespaceUsage =
        NamespaceUsage { used_bytes: 0, quota_bytes: u64::MAX, floor_bytes: 0, lists: [EMPTY; 2] };

    pub(super) fn over(&self, more_bytes: u32) -> bool {
        self.used_bytes.saturating_add(u64::from(more_bytes)) > self.quota_bytes
    }

    /// Returns `true` if the namespace has a floor, and stays within it with `more_bytes`.
    pub(super) fn within_floor(&self, more_bytes: u32) -> bool {
        self.used_bytes.saturating_add(u64::from(more_bytes)) <= self.floor_bytes
    }

    fn has_offered_page(&self) -> bool {
        self.lists.iter().any(|list| list.first != NO_SLOT)
    }

    /// Bytes above the floor, if an offered page can make room.
    fn excess(&self) -> Option<u64> {
        let excess = self.used_bytes.checked_sub(self.floor_bytes)?;
        (excess > 0 && self.has_offered_page()).then_some(excess)
    }

    fn is_default(&self) -> bool {
        self.used_bytes == 0 && self.quota_bytes == u64::MAX && self.floor_bytes == 0 && !self.has_offered_page()
    }
}

/// Usage of all namespaces with pages, a quota or a floor.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    usage: BTreeMap<NamespaceIndex, NamespaceUsage>,
    above: BTreeSet<(u64, NamespaceIndex)>,
}

impl Namespaces {
    pub(super) fn usage_of(&self, namespace: NamespaceIndex) -> NamespaceUsage {
        self.usage.get(&namespace).copied().unwrap_or(NamespaceUsage::UNLIMITED)
    }

    /// Changes bytes, limits or lists of a namespace, and its place in `above`.
    pub(super) fn update(&mut self, namespace: NamespaceIndex, change: impl FnOnce(&mut NamespaceUsage)) {
        let usage = self.usage.entry(namespace).or_insert(NamespaceUsage::UNLIMITED);
        let before = usage.excess();
        change(usage);
        let after = usage.excess();
        if usage.is_default() {
            self.usage.remove(&namespace);
        }
        if before != after {
            before.into_iter().for_each(|excess| _ = self.above.remove(&(excess, namespace)));
            after.into_iter().for_each(|excess| _ = self.above.insert((excess, namespace)));
        }
    }
}

impl<T: Copy, P: Policy> Evictor<T, P> {
    /// Sets the floor of a namespace in bytes. While another namespace is above its floor, no page
    /// of a namespace at or below its own makes room for others. The floors of all namespaces
    /// should take at most half of the capacity.
    pub fn set_floor(&mut self, namespace: NamespaceIndex, floor_bytes: u64) {
        self.namespaces.update(namespace, |usage| usage.floor_bytes = floor_bytes);
    }

    /// The page that makes room in the tier: the policy's choice, if its namespace is above its
    /// floor. Otherwise a page of the namespace that is furthest above its floor. If none is above
    /// it, the policy's choice.
    pub(super) fn victim(&mut self) -> Option<Slot> {
        let chosen = self.policy.victim().or_else(|| self.soft.first().map(|(_, slot)| *slot))?;
        if self.namespaces.usage_of(self.pages[chosen.index()].namespace).excess().is_some() {
            return Some(chosen);
        }
        let furthest = self.namespaces.above.last().map(|(_, namespace)| *namespace);
        furthest.and_then(|namespace| self.oldest_of(namespace)).or(Some(chosen))
    }

    /// The page of a namespace that leaves next, soft-pinned ones last. Pages that were touched
    /// have a second chance.
    pub(super) fn oldest_of(&mut self, namespace: NamespaceIndex) -> Option<Slot> {
        let mut passed_over = 0;
        loop {
            let [plain, soft] = self.namespaces.usage_of(namespace).lists;
            let slot = [plain.first, soft.first].into_iter().find(|first| *first != NO_SLOT)?;
            let page = &mut self.pages[slot.index()];
            if !page.flags.has(Flags::TOUCHED) || passed_over == PASSED_OVER_MAX {
                return Some(slot);
            }
            page.flags.set(Flags::TOUCHED, false);
            passed_over += 1;
            self.unlink(slot);
            self.link(slot, ListEnd::Back);
        }
    }

    /// Adds an offered page to the list of its namespace.
    pub(super) fn link(&mut self, slot: Slot, end: ListEnd) {
        let page = &self.pages[slot.index()];
        let (namespace, which) = (page.namespace, usize::from(page.flags.has(Flags::SOFT_PINNED)));
        let mut list = self.namespaces.usage_of(namespace).lists[which];
        let links = match end {
            ListEnd::Front => Links { previous: NO_SLOT, next: list.first },
            ListEnd::Back => Links { previous: list.last, next: NO_SLOT },
        };
        *if links.previous == NO_SLOT { &mut list.first } else { &mut self.pages[links.previous.index()].links.next } =
            slot;
        *if links.next == NO_SLOT { &mut list.last } else { &mut self.pages[links.next.index()].links.previous } = slot;
        self.pages[slot.index()].links = links;
        self.namespaces.update(namespace, |usage| usage.lists[which] = list);
    }

    /// Removes a page from the list of its namespace.
    pub(super) fn unlink(&mut self, slot: Slot) {
        let page = &mut self.pages[slot.index()];
        let Links { previous, next } = std::mem::replace(&mut page.links, Links::of_children(0));
        let (namespace, which) = (page.namespace, usize::from(page.flags.has(Flags::SOFT_PINNED)));
        let mut list = self.namespaces.usage_of(namespace).lists[which];
        *if previous == NO_SLOT { &mut list.first } else { &mut self.pages[previous.index()].links.next } = next;
        *if next == NO_SLOT { &mut list.last } else { &mut self.pages[next.index()].links.previous } = previous;
        self.namespaces.update(namespace, |usage| usage.lists[which] = list);
    }
}
