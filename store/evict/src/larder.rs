//! The project's own policy: evict what is least worth its room, as learnt from the traffic.
//!
//! Pages are put into classes ([`classes`]): how often they were asked for, also before an earlier eviction, how long
//! they waited for the last request, or if there was but one how hot the sequence is that they continue, and how far
//! into it they stand. For each class the learner follows a sample
//! of pages, resident or not, and counts at which age they are asked for again ([`learner`]). From that follows what
//! a page of a class is worth at an age: the most requests per time that can be had from keeping it for a while
//! longer. Pages that may go stand in cells of one class and one span of ages ([`cells`]); the victim is the oldest
//! of the cell of least worth.
//!
//! A shadow of an LRU cache, of a sample of pages, runs beside it ([`guard`]). Once that is ahead by more than a
//! little, or while there is nothing to gain over it, or too little was seen yet, pages go in the order of LRU.
//!
//! A page is taken to be worth what it costs to compute, and that to grow with its bytes; so sizes cancel out.

mod cells;
mod classes;
mod ghosts;
mod guard;
mod learner;

use crate::policy::{Arrival, Farewell, Policy, Slot, Stamp};
use crate::push_tight;
use cells::Cells;
use classes::{Class, heat_of_child};
use ghosts::Ghosts;
use guard::{Access, Guard};
use learner::Learner;

/// What is known of a resident page.
#[derive(Debug, Clone, Copy)]
struct Page {
    hash: u64,
    /// Of its last request: see [`Stamp`].
    run: u64,
    position: u32,
    previous: u32,
    next: u32,
    /// Requests so far, as far as is known; saturates.
    accesses: u8,
    /// Of the sequence that it continues.
    heat: u8,
    class: Class,
    /// Span of ages of its cell, [`cells::NOT_OFFERED`] if it is in none.
    span: u8,
}

const _: () = assert!(size_of::<Page>() <= 32);

/// Hit density, learnt per class of pages.
#[derive(Debug)]
pub struct Larder {
    pages: Vec<Page>,
    residents: usize,
    cells: Cells,
    ghosts: Ghosts,
    learner: Learner,
    guard: Guard,
    seed: u64,
    /// Latest access, on the scale of [`Stamp::run`].
    now: u64,
}

impl Larder {
    /// Empty. The seed keeps strangers from choosing which pages are sampled.
    pub fn new(seed: u64) -> Larder {
        Larder {
            pages: Vec::new(),
            residents: 0,
            cells: Cells::new(),
            ghosts: Ghosts::new(),
            learner: Learner::new(),
            guard: Guard::new(),
            seed,
            now: 0,
        }
    }

    /// Whether the LRU order is in force at the moment.
    pub fn follows_lru(&self) -> bool {
        self.guard.follows_lru()
    }

    fn observe(&mut self, slot: Slot, hit: bool) {
        let page = &self.pages[slot.index()];
        let stamp = Stamp { run: page.run, position: std::cmp::Reverse(page.position) };
        self.now = self.now.max(page.run + u64::from(page.position));
        self.learner.access(page.hash, page.class, self.now);
        let returns = page.accesses > 1;
        self.guard.access(&Access { hash: page.hash, stamp, hit, returns }, self.now);
        self.cells.advance(&mut self.pages, self.now);
        if self.learner.is_due(self.now) {
            self.cells.rank(self.learner.learn(self.now, self.residents));
        }
        if self.guard.is_crowded() {
            let residents = self.pages.iter().filter(|page| page.accesses > 0).map(|page| page.hash);
            self.guard.halve(residents);
        }
    }
}

impl Policy for Larder {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        let hash = mixed(arrival.fingerprint ^ self.seed);
        let before = self.ghosts.take(hash, arrival.stamp.run);
        let accesses = before.accesses.saturating_add(1);
        let parent = arrival.parent.map(|parent| &self.pages[parent.index()]);
        let heat = parent.map_or(0, |parent| heat_of_child(parent.accesses, parent.heat));
        let position = arrival.stamp.position.0;
        let page = Page {
            hash,
            run: arrival.stamp.run,
            position,
            previous: cells::NONE,
            next: cells::NONE,
            accesses,
            heat,
            class: Class::of(accesses, before.gap, heat, position),
            span: cells::NOT_OFFERED,
        };
        while self.pages.len() <= slot.index() {
            push_tight(&mut self.pages, Page { accesses: 0, ..page });
        }
        self.pages[slot.index()] = page;
        self.residents += 1;
        self.ghosts.grow_for(self.residents);
        self.guard.arrived(hash);
        self.observe(slot, false);
    }

    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        let offered = self.pages[slot.index()].span != cells::NOT_OFFERED;
        if offered {
            self.cells.leave(&mut self.pages, slot);
        }
        let page = &mut self.pages[slot.index()];
        let gap = stamp.run.saturating_sub(std::mem::replace(&mut page.run, stamp.run));
        page.accesses = page.accesses.saturating_add(1);
        page.class = Class::of(page.accesses, gap, page.heat, page.position);
        self.observe(slot, true);
        if offered {
            self.offer(slot);
        }
    }

    fn offer(&mut self, slot: Slot) {
        self.cells.enter(&mut self.pages, slot, self.now);
    }

    fn withdraw(&mut self, slot: Slot) {
        self.cells.leave(&mut self.pages, slot);
    }

    fn victim(&mut self) -> Option<Slot> {
        self.guard.full(self.now);
        if self.guard.follows_lru() { self.cells.oldest(&self.pages) } else { self.cells.least_worth() }
    }

    fn remove(&mut self, slot: Slot, farewell: Farewell) {
        let page = &mut self.pages[slot.index()];
        let (hash, run, accesses) = (page.hash, page.run, std::mem::take(&mut page.accesses));
        self.residents -= 1;
        match farewell {
            Farewell::Evicted => self.ghosts.put(hash, accesses, run),
            Farewell::Removed => self.learner.forget(hash, self.now),
        }
        self.guard.left(hash, farewell);
    }
}

/// Spreads a fingerprint over all bits (the finalizer of SplitMix64).
fn mixed(fingerprint: u64) -> u64 {
    let a = fingerprint.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}
