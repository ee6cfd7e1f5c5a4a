//! Least recently used (LRU).

use crate::policy::{Arrival, Policy, Removal, Slot, Stamp};
use crate::{push_tight, tree_bytes};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Evicts the least recently used page. Among the pages of one request it takes the last one first.
#[derive(Debug, Default)]
pub struct Lru {
    stamps: Vec<Stamp>,
    offered: BTreeSet<(Stamp, Slot)>,
}

impl Lru {
    pub fn new() -> Lru {
        Lru::default()
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        while self.stamps.len() <= slot.index() {
            push_tight(&mut self.stamps, Stamp { run: 0, position: Reverse(0) });
        }
        self.stamps[slot.index()] = arrival.stamp;
    }

    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        let before = std::mem::replace(&mut self.stamps[slot.index()], stamp);
        if self.offered.remove(&(before, slot)) {
            self.offered.insert((stamp, slot));
        }
    }

    fn stamp(&self, slot: Slot) -> Stamp {
        self.stamps[slot.index()]
    }

    fn offer(&mut self, slot: Slot) {
        self.offered.insert((self.stamps[slot.index()], slot));
    }

    fn withdraw(&mut self, slot: Slot) {
        self.offered.remove(&(self.stamps[slot.index()], slot));
    }

    fn victim(&mut self) -> Option<Slot> {
        self.offered.first().map(|(_, slot)| *slot)
    }

    fn remove(&mut self, _: Slot, _: Removal) {}

    fn memory_bytes(&self) -> usize {
        self.stamps.capacity() * size_of::<Stamp>() + tree_bytes::<(Stamp, Slot)>(self.offered.len())
    }
}
