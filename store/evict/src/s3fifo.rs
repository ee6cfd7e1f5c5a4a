//! S3-FIFO (Yang et al., SOSP '23): quick demotion of one-hit wonders. Here for comparison only.
//!
//! A new page enters a small queue that holds a tenth of the pages. A page with a ghost entry
//! enters the main queue instead: it was recently evicted from the small queue. A page that leaves
//! the small queue after two or more hits moves to the main queue. There each hit buys it another
//! round. Pages that are not evictable are skipped, but count.

use crate::policy::{Arrival, Policy, Removal, Slot, Stamp};
use crate::{push_tight, tree_bytes};
use std::collections::{BTreeMap, BTreeSet};

const FREQUENCY_MAX: u8 = 3;
/// Hits that promote a page from the small queue to the main queue.
const PROMOTE_FREQUENCY: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Small,
    Main,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    fingerprint: u64,
    queued: Stamp,
    accessed: Stamp,
    queue: Queue,
    frequency: u8,
}

/// Eviction by S3-FIFO, for comparison. Pages pass through a small and a main queue. The ghost
/// queue remembers pages that were evicted from the small one.
#[derive(Debug, Default)]
pub struct S3Fifo {
    pages: Vec<Page>,
    small: BTreeSet<(Stamp, Slot)>,
    main: BTreeSet<(Stamp, Slot)>,
    small_pages: usize,
    main_pages: usize,
    ghosts: BTreeMap<u64, u64>,
    ghost_order: BTreeMap<u64, u64>,
    ghost_next: u64,
    latest: Option<Stamp>,
}

impl S3Fifo {
    pub fn new() -> S3Fifo {
        S3Fifo::default()
    }

    fn remember(&mut self, fingerprint: u64) {
        self.ghost_next += 1;
        if let Some(before) = self.ghosts.insert(fingerprint, self.ghost_next) {
            self.ghost_order.remove(&before);
        }
        self.ghost_order.insert(self.ghost_next, fingerprint);
        while self.ghosts.len() > (self.small_pages + self.main_pages) * 9 / 10 {
            let Some((_, oldest)) = self.ghost_order.pop_first() else { break };
            self.ghosts.remove(&oldest);
        }
    }

    fn recalled(&mut self, fingerprint: u64) -> bool {
        let order = self.ghosts.remove(&fingerprint);
        order.is_some_and(|order| self.ghost_order.remove(&order).is_some())
    }

    fn queue(&mut self, queue: Queue) -> &mut BTreeSet<(Stamp, Slot)> {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    fn count(&mut self, queue: Queue) -> &mut usize {
        match queue {
            Queue::Small => &mut self.small_pages,
            Queue::Main => &mut self.main_pages,
        }
    }

    /// Moves a page to the end of the main queue. A page of the main queue pays one hit for it; a
    /// page of the small queue starts at zero.
    fn requeue(&mut self, slot: Slot) {
        let before = self.pages[slot.index()];
        self.queue(before.queue).remove(&(before.queued, slot));
        *self.count(before.queue) -= 1;
        let run = self.latest.map_or(before.queued.run, |latest| latest.run);
        let page = &mut self.pages[slot.index()];
        page.frequency = if before.queue == Queue::Main { before.frequency - 1 } else { 0 };
        page.queue = Queue::Main;
        page.queued.run = run;
        let entry = (page.queued, slot);
        self.main.insert(entry);
        self.main_pages += 1;
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        let queue = if self.recalled(arrival.fingerprint) { Queue::Main } else { Queue::Small };
        let page = Page {
            fingerprint: arrival.fingerprint,
            queued: arrival.stamp,
            accessed: arrival.stamp,
            queue,
            frequency: 0,
        };
        while self.pages.len() <= slot.index() {
            push_tight(&mut self.pages, page);
        }
        self.pages[slot.index()] = page;
        self.latest = Some(arrival.stamp);
        *self.count(queue) += 1;
    }

    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        let page = &mut self.pages[slot.index()];
        page.accessed = stamp;
        page.frequency = (page.frequency + 1).min(FREQUENCY_MAX);
    }

    fn stamp(&self, slot: Slot) -> Stamp {
        self.pages[slot.index()].accessed
    }

    fn offer(&mut self, slot: Slot) {
        let page = self.pages[slot.index()];
        self.queue(page.queue).insert((page.queued, slot));
    }

    fn withdraw(&mut self, slot: Slot) {
        let page = self.pages[slot.index()];
        self.queue(page.queue).remove(&(page.queued, slot));
    }

    fn victim(&mut self) -> Option<Slot> {
        loop {
            let small_is_due = self.small_pages * 10 >= self.small_pages + self.main_pages;
            let small = self.small.first().map(|(_, slot)| *slot);
            let main = self.main.first().map(|(_, slot)| *slot);
            let slot = if small_is_due { small.or(main) } else { main.or(small) }?;
            let page = self.pages[slot.index()];
            let keep_from = if page.queue == Queue::Small { PROMOTE_FREQUENCY } else { 1 };
            if page.frequency < keep_from {
                return Some(slot);
            }
            self.requeue(slot);
        }
    }

    fn remove(&mut self, slot: Slot, removal: Removal) {
        let page = self.pages[slot.index()];
        if removal == Removal::Evicted && page.queue == Queue::Small {
            self.remember(page.fingerprint);
        }
        *self.count(page.queue) -= 1;
    }

    fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Page>()
            + tree_bytes::<(Stamp, Slot)>(self.small.len() + self.main.len())
            + tree_bytes::<(u64, u64)>(2 * self.ghosts.len())
    }
}
