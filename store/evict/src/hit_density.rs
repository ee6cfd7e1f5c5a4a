//! Hit density: evict the page with the lowest expected hits per unit of space and time, learnt
//! from the traffic.
//!
//! The idea is that of LHD (Beckmann et al., NSDI '18), with pages of one size and an LRU guard:
//! 1. *Classes* ([`classes`]). A page's class combines its access count, including accesses before
//!    an earlier eviction, the gap between its last two accesses, and its position in the sequence.
//!    For a page with one access the popularity of its sequence replaces the gap.
//! 2. *Estimation* ([`estimator`]). For each class the estimator follows a sample of pages,
//!    resident or not, and counts at which age they are accessed again. The density of a class at
//!    an age is the maximum rate of hits that keeping the page any longer can yield.
//! 3. *Victim* ([`age_buckets`]). Evictable pages are in buckets of one class and one span of ages.
//!    The victim is the oldest page in the bucket with the lowest density.
//! 4. *Guard* ([`guard`]). A sampled shadow LRU cache runs beside this one. While it is ahead, or
//!    close to the optimum, or too little traffic was seen, the policy evicts in LRU order.
//!
//! The cost of a miss is taken to grow with the page's bytes, as the prefill that computes it does.
//! So sizes cancel out of the density.

mod age_buckets;
mod classes;
mod estimator;
mod ghost_table;
mod guard;

use crate::policy::{Arrival, Policy, Removal, Slot, Stamp};
use crate::push_tight;
use age_buckets::AgeBuckets;
use classes::{Class, heat_of_child};
use estimator::DensityEstimator;
use ghost_table::GhostTable;
use guard::{Access, LruGuard};

#[derive(Debug, Clone, Copy)]
struct Page {
    hash: u64,
    run: u64,
    position: u32,
    previous: u32,
    next: u32,
    /// Number of known accesses, saturating.
    accesses: u8,
    heat: u8,
    class: Class,
    /// Span of ages of its bucket, [`age_buckets::NOT_OFFERED`] if it is in none.
    span: u8,
}

const _: () = assert!(size_of::<Page>() <= 32);

/// Eviction by learnt hit density, with LRU as a lower bound. Only samples of the traffic are
/// tracked, so the cost per access does not grow with it. See the module documentation.
#[derive(Debug)]
pub struct HitDensity {
    pages: Vec<Page>,
    residents: usize,
    age_buckets: AgeBuckets,
    ghost_table: GhostTable,
    estimator: DensityEstimator,
    guard: LruGuard,
    seed: u64,
    /// Latest access, on the scale of [`Stamp::run`].
    now: u64,
}

impl HitDensity {
    /// An empty policy. The seed enters every hash, which keeps clients from choosing the pages
    /// that are sampled.
    pub fn new(seed: u64) -> HitDensity {
        HitDensity {
            pages: Vec::new(),
            residents: 0,
            age_buckets: AgeBuckets::new(),
            ghost_table: GhostTable::new(),
            estimator: DensityEstimator::new(),
            guard: LruGuard::new(),
            seed,
            now: 0,
        }
    }

    pub fn follows_lru(&self) -> bool {
        self.guard.follows_lru()
    }

    fn observe(&mut self, slot: Slot, hit: bool) {
        let page = &self.pages[slot.index()];
        let stamp = self.stamp(slot);
        self.now = self.now.max(page.run + u64::from(page.position));
        self.estimator.access(page.hash, page.class, self.now);
        let returns = page.accesses > 1;
        self.guard.access(&Access { hash: page.hash, stamp, hit, returns }, self.now);
        self.age_buckets.advance(&mut self.pages, self.now);
        if self.estimator.is_due(self.now) {
            self.age_buckets.rank(self.estimator.update(self.now, self.residents));
        }
        if self.guard.is_crowded() {
            let residents = self.pages.iter().filter(|page| page.accesses > 0).map(|page| page.hash);
            self.guard.halve(residents);
        }
    }
}

impl Policy for HitDensity {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        let hash = mixed(arrival.fingerprint ^ self.seed);
        let before = self.ghost_table.take(hash, arrival.stamp.run);
        let accesses = before.accesses.saturating_add(1);
        let parent = arrival.parent.map(|parent| &self.pages[parent.index()]);
        let heat = parent.map_or(0, |parent| heat_of_child(parent.accesses, parent.heat));
        let position = arrival.stamp.position.0;
        let page = Page {
            hash,
            run: arrival.stamp.run,
            position,
            previous: age_buckets::NONE,
            next: age_buckets::NONE,
            accesses,
            heat,
            class: Class::of(accesses, before.gap, heat, position),
            span: age_buckets::NOT_OFFERED,
        };
        while self.pages.len() <= slot.index() {
            push_tight(&mut self.pages, Page { accesses: 0, ..page });
        }
        self.pages[slot.index()] = page;
        self.residents += 1;
        self.ghost_table.grow_for(self.residents);
        self.guard.arrived(hash);
        self.observe(slot, false);
    }

    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        let offered = self.pages[slot.index()].span != age_buckets::NOT_OFFERED;
        if offered {
            self.age_buckets.leave(&mut self.pages, slot);
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

    fn stamp(&self, slot: Slot) -> Stamp {
        let page = &self.pages[slot.index()];
        Stamp { run: page.run, position: std::cmp::Reverse(page.position) }
    }

    fn offer(&mut self, slot: Slot) {
        self.age_buckets.enter(&mut self.pages, slot, self.now);
    }

    fn withdraw(&mut self, slot: Slot) {
        self.age_buckets.leave(&mut self.pages, slot);
    }

    fn victim(&mut self) -> Option<Slot> {
        self.guard.full(self.now);
        if self.guard.follows_lru() { self.age_buckets.oldest(&self.pages) } else { self.age_buckets.lowest_density() }
    }

    fn remove(&mut self, slot: Slot, removal: Removal) {
        let page = &mut self.pages[slot.index()];
        let hash = page.hash;
        let run = page.run;
        let accesses = std::mem::take(&mut page.accesses);
        self.residents -= 1;
        match removal {
            Removal::Evicted => self.ghost_table.put(hash, accesses, run),
            Removal::Removed => self.estimator.forget(hash, self.now),
        }
        self.guard.left(hash, removal);
    }
}

/// Spreads a fingerprint over all bits, so that each sample can use other bits of it (finalizer of
/// SplitMix64).
fn mixed(fingerprint: u64) -> u64 {
    let a = fingerprint.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}
