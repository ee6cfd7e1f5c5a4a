//! The interface of eviction policies.

use std::cmp::Reverse;

/// Index in the evictor's table of pages. A later page reuses the slot of an evicted one, so a
/// policy must reset its state in [`Policy::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl Slot {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Ticks per millisecond. Each access has a tick of its own. So ticks follow the caller's clock up
/// to a million accesses per second, and count accesses beyond.
pub const TICKS_PER_MS: u64 = 1 << 10;

/// Time of a page's last access, in ticks.
///
/// The time is normalized to the start of the page's sequence. So the pages that one request walks
/// over share one `run`, and the last of them orders first: a sequence is evicted from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Tick of the access less the position.
    pub run: u64,
    pub position: Reverse<u32>,
}

impl Stamp {
    /// Stamp of access `tick` to a page at `position`. Runs start at 2^32, so that none is
    /// negative.
    pub fn new(tick: u64, position: u32) -> Stamp {
        Stamp { run: (1 << 32) + tick - u64::from(position), position: Reverse(position) }
    }

    /// Stamp before that of every access.
    pub fn demoted(position: u32) -> Stamp {
        Stamp { run: 0, position: Reverse(position) }
    }

    pub fn is_demoted(self) -> bool {
        self.run == 0
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Hash of the page's name. It is the same when the page returns. A collision of two pages only
    /// blurs statistics.
    pub fingerprint: u64,
    /// The preceding page of the sequence, if it is resident.
    pub parent: Option<Slot>,
    /// Fingerprint of the preceding page, resident or not. 0 if the page is the first one.
    pub parent_fingerprint: u64,
    pub stamp: Stamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The tier or the namespace was full. The page may return.
    Evicted,
    /// A client removed the page, or it expired. A policy should learn nothing from it.
    Removed,
}

/// Knowledge of a client about the use of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// The generation that used the page has ended, so its session can return from now on.
    GenerationEnded,
    /// The page is not expected to be used again.
    Demote,
}

/// The order in which pages are evicted.
///
/// The evictor enforces the rules (capacity, leaves before roots, pins, deadlines, quotas). It
/// *offers* exactly the pages that the rules allow to leave, and the policy ranks the offered
/// pages. So a policy never searches for an evictable page.
///
/// The caller:
/// - MUST insert a slot before any other call with it;
/// - MUST offer only slots that are inserted and not offered;
/// - MUST withdraw only slots that are offered;
/// - MUST remove only slots that are inserted and not offered.
///
/// An implementation:
/// - MUST be deterministic;
/// - MUST take O(log n) amortized time per call.
pub trait Policy {
    /// Adds a resident page. It MUST NOT become a victim before it is offered.
    fn insert(&mut self, slot: Slot, arrival: &Arrival);

    /// Records a hit on a page, which has `stamp` from now on. The page keeps its state, offered or
    /// not.
    fn touch(&mut self, slot: Slot, stamp: Stamp);

    /// Time from which the page counts as unused: the stamp of its arrival or of its last touch, or
    /// what advice has made of it. The evictor keeps none of its own.
    fn stamp(&self, slot: Slot) -> Stamp;

    /// Allows the page to become a victim. The evictor offers a page when it has no pins and no
    /// resident children.
    fn offer(&mut self, slot: Slot);

    /// Forbids that the page becomes a victim, until it is offered again.
    fn withdraw(&mut self, slot: Slot);

    /// The page to evict next. MUST be an offered page, and `Some` if any page is offered. The page
    /// stays offered.
    fn victim(&mut self) -> Option<Slot>;

    /// Removes a page. The evictor may reuse the slot for another page.
    fn remove(&mut self, slot: Slot, removal: Removal);

    /// Decides about admission: `true` if every offered page is worth more than the arriving one.
    /// The evictor asks when it would have to evict for the page.
    fn refuses(&mut self, _: &Arrival) -> bool {
        false
    }

    /// Records the arrival of a page that does not become resident, because the policy refused it.
    fn decline(&mut self, _: &Arrival) {}

    /// Takes advice about a resident page, at a tick. It may change the page's stamp. The page
    /// stays offered or not. Advice that repeats itself before the next touch MUST have no effect.
    fn advise(&mut self, _: Slot, _: Advice, _tick: u64) {}

    /// Records that the generation ended that used a page, which is not resident. It MUST NOT take
    /// memory for a page that it does not know.
    fn generation_ended(&mut self, _fingerprint: u64, _tick: u64) {}

    /// Heap bytes of its state, estimated from the capacities of its tables.
    fn memory_bytes(&self) -> usize;
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        (**self).insert(slot, arrival);
    }
    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        (**self).touch(slot, stamp);
    }
    fn stamp(&self, slot: Slot) -> Stamp {
        (**self).stamp(slot)
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
    fn remove(&mut self, slot: Slot, removal: Removal) {
        (**self).remove(slot, removal);
    }
    fn refuses(&mut self, arrival: &Arrival) -> bool {
        (**self).refuses(arrival)
    }
    fn decline(&mut self, arrival: &Arrival) {
        (**self).decline(arrival);
    }
    fn advise(&mut self, slot: Slot, advice: Advice, tick: u64) {
        (**self).advise(slot, advice, tick);
    }
    fn generation_ended(&mut self, fingerprint: u64, tick: u64) {
        (**self).generation_ended(fingerprint, tick);
    }
    fn memory_bytes(&self) -> usize {
        (**self).memory_bytes()
    }
}
