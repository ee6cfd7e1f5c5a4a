//! SIEVE (Zhang et al., NSDI '24): a queue and a hand. Here for comparison only.
//!
//! The hand moves from the oldest page to the newest. It evicts the first page that had no hit
//! since the hand last passed. Pages that are not evictable are skipped.

use crate::policy::{Arrival, Policy, Removal, Slot, Stamp};
use crate::{push_tight, tree_bytes};
use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};

#[derive(Debug, Clone, Copy)]
struct Page {
    /// Place in the queue: the stamp of its arrival.
    queued: Stamp,
    accessed: Stamp,
    visited: bool,
}

/// Eviction by SIEVE, for comparison.
#[derive(Debug, Default)]
pub struct Sieve {
    pages: Vec<Page>,
    offered: BTreeSet<(Stamp, Slot)>,
    /// The hand: the place of the page that it passed last.
    hand: Option<(Stamp, Slot)>,
}

impl Sieve {
    pub fn new() -> Sieve {
        Sieve::default()
    }
}

impl Policy for Sieve {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        let page = Page { queued: arrival.stamp, accessed: arrival.stamp, visited: false };
        while self.pages.len() <= slot.index() {
            push_tight(&mut self.pages, page);
        }
        self.pages[slot.index()] = page;
    }

    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        let page = &mut self.pages[slot.index()];
        page.accessed = stamp;
        page.visited = true;
    }

    fn stamp(&self, slot: Slot) -> Stamp {
        self.pages[slot.index()].accessed
    }

    fn offer(&mut self, slot: Slot) {
        self.offered.insert((self.pages[slot.index()].queued, slot));
    }

    fn withdraw(&mut self, slot: Slot) {
        self.offered.remove(&(self.pages[slot.index()].queued, slot));
    }

    fn victim(&mut self) -> Option<Slot> {
        loop {
            let after = self.hand.and_then(|hand| self.offered.range((Excluded(hand), Unbounded)).next());
            let next = *after.or_else(|| self.offered.first())?;
            let page = &mut self.pages[next.1.index()];
            if !std::mem::take(&mut page.visited) {
                return Some(next.1);
            }
            self.hand = Some(next);
        }
    }

    fn remove(&mut self, _: Slot, _: Removal) {}

    fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Page>() + tree_bytes::<(Stamp, Slot)>(self.offered.len())
    }
}
