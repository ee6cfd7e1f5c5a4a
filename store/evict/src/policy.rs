//! What an eviction policy is.

use std::cmp::Reverse;

/// A place in the evictor's table of pages; taken again after its page went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl Slot {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// When a page was last asked for, in page accesses, taken back to the start of its sequence: pages that one request
/// walks over one after the other have the same run, and of those the last one orders first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Access number, less the position.
    pub run: u64,
    /// Position in the sequence.
    pub position: Reverse<u32>,
}

impl Stamp {
    /// Of access `tick` to a page at `position`. Runs start far above zero, so that none is negative.
    pub fn new(tick: u64, position: u32) -> Stamp {
        Stamp { run: (1 << 32) + tick - u64::from(position), position: Reverse(position) }
    }
}

/// What a policy learns of a page that arrives.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Stands for the page's name, also when it returns. Two pages with one fingerprint blur what is learnt, no more.
    pub fingerprint: u64,
    /// The page before it, if that is resident.
    pub parent: Option<Slot>,
    /// When, and where in its sequence.
    pub stamp: Stamp,
}

/// Why a page leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Farewell {
    /// There was no room: it may come back.
    Evicted,
    /// It was removed or its time was over: nothing is to be concluded from it.
    Removed,
}

/// The order in which pages go.
///
/// The evictor keeps the rules (capacity, leaf before root, pins, deadlines, quotas) and *offers* exactly the pages
/// that may go; a policy ranks them. So a policy never has to look for a page that may go.
///
/// A caller MUST insert a slot before all else, offer only what is inserted and not offered, withdraw only what is
/// offered, and remove only what is not offered. A policy MUST be deterministic, and take O(log n) or less per call,
/// on average over the calls.
pub trait Policy {
    /// A page is resident from now on. It MUST NOT be a victim before it is offered.
    fn insert(&mut self, slot: Slot, arrival: &Arrival);

    /// The page was asked for and found. It may be offered or not, and stays so.
    fn touch(&mut self, slot: Slot, stamp: Stamp);

    /// The page may go from now on.
    fn offer(&mut self, slot: Slot);

    /// The page may no longer go.
    fn withdraw(&mut self, slot: Slot);

    /// The page that should go first. MUST be one that is offered, and `Some` if there is any. It stays offered.
    fn victim(&mut self) -> Option<Slot>;

    /// The page is gone; its slot may come back with another page.
    fn remove(&mut self, slot: Slot, farewell: Farewell);
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        (**self).insert(slot, arrival);
    }
    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        (**self).touch(slot, stamp);
    }
    fn offer(&mut self, slot: Slot) {
        (**self).offer(slot);
    }
    fn withdraw(&mut self, slot: Slot) {
        (**self).withdraw(slot);
    }
    fn victim(&mut self) -> Option<Slot> {
        (**self).victim()
    }
    fn remove(&mut self, slot: Slot, farewell: Farewell) {
        (**self).remove(slot, farewell);
    }
}
