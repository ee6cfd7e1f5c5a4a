//! Hit density: evict the page with the lowest expected hits per unit of space and time, learnt
//! from the traffic.
//!
//! The idea is that of LHD (Beckmann et al., NSDI '18), with pages of one size and an LRU guard:
//! 1. *Classes* ([`classes`]). A page's class combines its access count, the average gap between
//!    its accesses, and its position in the sequence. For a page with one access the gap of its
//!    sequence, or its popularity, takes their place. Ghost entries keep the history of pages that
//!    left ([`ghost_table`]).
//! 2. *Estimation* ([`estimator`]). For each class the estimator follows a sample of pages,
//!    resident or not, and counts at which age they are accessed again. The density of a class at
//!    an age is the maximum rate of hits that keeping the page any longer can yield.
//! 3. *Victim* ([`age_buckets`]). Evictable pages are in buckets of one class and one span of ages.
//!    The victim is the oldest page in the bucket with the lowest density.
//! 4. *Admission*. If an arriving page would be in a bucket of lower density than all occupied
//!    ones, the policy refuses it, and the pages behind it. It observes refused pages as it
//!    observes others. Agents return after seconds: a page that was just used is worth less than
//!    one that is soon due.
//! 5. *Advice*. When an engine reports the end of a generation, the pages of its sequence get
//!    another class, and their ages count from then. The density of other pages includes the
//!    expected ends. A demoted page gets the highest age.
//! 6. *Guard* ([`guard`]). A sampled shadow LRU cache runs beside this one. While it is ahead, or
//!    close to the optimum, or too little traffic was seen, the policy evicts in LRU order and
//!    refuses nothing.
//!
//! The policy also tells if a page is likely to return at all ([`Outlook`]), for the retention of a
//! slower tier.
//!
//! The cost of a miss is taken to grow with the page's bytes, as the prefill that computes it does.
//! So sizes cancel out of the density.

mod age_buckets;
mod classes;
mod estimator;
mod ghost_table;
mod guard;

use crate::policy::{Advice, Arrival, Policy, Removal, Slot, Stamp, TICKS_PER_MS};
use crate::push_tight;
use age_buckets::AgeBuckets;
use classes::{Class, History};
use estimator::DensityEstimator;
pub use estimator::Outlook;
use ghost_table::{GhostTable, Past};
pub use guard::EvictionOrder;
use guard::{Access, LruGuard};

#[derive(Debug, Clone, Copy)]
struct Page {
    hash: u64,
    run: u64,
    position: u32,
    previous: u32,
    next: u32,
    history: History,
    /// Its bucket, [`age_buckets::NOT_OFFERED`] if it is in none.
    bucket: u16,
}

impl Page {
    fn class(&self) -> Class {
        Class::of(self.history, self.position)
    }
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
    /// Tick of the latest access, on the scale of [`Stamp::run`].
    now: u64,
    counters: Counters,
    #[cfg(test)]
    sabotage: Option<tests::Sabotage>,
}

/// Numbers of decisions since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub admitted: u64,
    pub refused: u64,
    /// Pages with a reported end of their generation.
    pub ended: u64,
    pub demoted: u64,
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
            counters: Counters::default(),
            #[cfg(test)]
            sabotage: None,
        }
    }

    /// The order in force, with its reason.
    pub fn order(&self) -> EvictionOrder {
        self.guard.order()
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns `true` if an earlier access to the page is known, although it is not resident.
    pub fn has_seen(&self, fingerprint: u64) -> bool {
        // The time does not matter.
        self.ghost_table.find(self.hash(fingerprint), 0).is_some()
    }

    /// Outlook of a page that is not resident. [`Outlook::Unclear`] if no access to it is known, or
    /// while the policy evicts in LRU order: what it has learnt may be wrong then.
    pub fn outlook(&self, fingerprint: u64, position: u32) -> Outlook {
        match self.ghost_table.find(self.hash(fingerprint), self.now) {
            Some(past) if !self.guard.follows_lru() => {
                self.estimator.outlook(Class::of(past.history, position), past.gap)
            }
            _ => Outlook::Unclear,
        }
    }

    /// Outlook of a resident page, as for [`HitDensity::outlook`].
    pub fn outlook_of_resident(&self, slot: Slot) -> Outlook {
        let page = &self.pages[slot.index()];
        if self.guard.follows_lru() {
            return Outlook::Unclear;
        }
        self.estimator.outlook(page.class(), self.now.saturating_sub(page.run))
    }

    /// Learnt gaps between two accesses to a page, in milliseconds: the quantiles of a tenth, a
    /// half and nine tenths, to a factor of the square root of two. `None` before any page
    /// returned.
    pub fn gaps_ms(&self) -> Option<[u64; 3]> {
        self.estimator.gaps().map(|gaps| gaps.map(|ticks| ticks / TICKS_PER_MS))
    }

    /// History of an arriving page, with this access.
    fn history(&self, arrival: &Arrival) -> History {
        let run = arrival.stamp.run;
        if let Some(past) = self.ghost_table.find(self.hash(arrival.fingerprint), run) {
            return past.history.after(past.gap);
        }
        let parent = match arrival.parent {
            Some(parent) => Some(self.pages[parent.index()].history),
            None => self.ghost_of_parent(arrival).map(|past| past.history),
        };
        parent.map_or(History::FIRST, History::of_child)
    }

    fn ghost_of_parent(&self, arrival: &Arrival) -> Option<Past> {
        let known = arrival.parent.is_none() && arrival.parent_fingerprint != 0;
        known.then(|| self.ghost_table.find(self.hash(arrival.parent_fingerprint), arrival.stamp.run))?
    }

    fn hash(&self, fingerprint: u64) -> u64 {
        mixed(fingerprint ^ self.seed)
    }

    fn observe(&mut self, access: &Access, history: History) {
        self.now = self.now.max(access.stamp.run + u64::from(access.stamp.position.0));
        self.estimator.access(access.hash, Class::of(history, access.stamp.position.0), self.now);
        self.guard.access(access);
        self.age_buckets.advance(&mut self.pages, self.now);
        if self.estimator.is_due() {
            self.age_buckets.rank(self.estimator.update(self.now, self.residents));
        }
        if self.guard.is_crowded() {
            let residents = self.pages.iter().filter(|page| page.history.accesses() > 0).map(|page| page.hash);
            self.guard.halve(residents);
        }
    }
}

impl Policy for HitDensity {
    fn insert(&mut self, slot: Slot, arrival: &Arrival) {
        let hash = self.hash(arrival.fingerprint);
        let history = self.history(arrival);
        self.ghost_table.remove(hash);
        let page = Page {
            hash,
            run: arrival.stamp.run,
            position: arrival.stamp.position.0,
            previous: age_buckets::NONE,
            next: age_buckets::NONE,
            history,
            bucket: age_buckets::NOT_OFFERED,
        };
        while self.pages.len() <= slot.index() {
            push_tight(&mut self.pages, Page { history: History::default(), ..page });
        }
        self.pages[slot.index()] = page;
        self.residents += 1;
        self.counters.admitted += 1;
        self.ghost_table.grow_for(self.residents);
        self.guard.arrived(hash);
        let access = Access { hash, stamp: arrival.stamp, hit: false, returns: history.accesses() > 1 };
        self.observe(&access, history);
    }

    fn touch(&mut self, slot: Slot, stamp: Stamp) {
        let offered = self.pages[slot.index()].bucket != age_buckets::NOT_OFFERED;
        if offered {
            self.age_buckets.leave(&mut self.pages, slot);
        }
        let before = self.stamp(slot);
        let page = &mut self.pages[slot.index()];
        page.run = stamp.run;
        page.history = if before.is_demoted() {
            page.history.after_demotion()
        } else {
            page.history.after(stamp.run.saturating_sub(before.run))
        };
        let (hash, history) = (page.hash, page.history);
        self.observe(&Access { hash, stamp, hit: true, returns: true }, history);
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
        self.guard.full();
        if self.guard.follows_lru() {
            return self.age_buckets.oldest(&self.pages);
        }
        #[cfg(test)]
        if self.sabotage == Some(tests::Sabotage::EvictNewest) {
            return self.age_buckets.newest(&self.pages);
        }
        self.age_buckets.lowest_density()
    }

    fn remove(&mut self, slot: Slot, removal: Removal) {
        let page = &mut self.pages[slot.index()];
        let hash = page.hash;
        // The time of a demoted page's last access is unknown.
        let run = if page.run == 0 { self.now } else { page.run };
        let history = std::mem::take(&mut page.history);
        self.residents -= 1;
        match removal {
            Removal::Evicted => self.ghost_table.put(hash, history, run),
            Removal::Removed => self.estimator.forget(hash, self.now),
        }
        self.guard.left(hash, removal);
    }

    /// A page behind a refused page is refused too: without that page it serves no reader.
    fn refuses(&mut self, arrival: &Arrival) -> bool {
        if !self.guard.may_refuse() {
            return false;
        }
        #[cfg(test)]
        if self.sabotage == Some(tests::Sabotage::RefuseAll) {
            return true;
        }
        if self.ghost_of_parent(arrival).is_some_and(|past| past.history.is_refused()) {
            return true;
        }
        let class = Class::of(self.history(arrival), arrival.stamp.position.0);
        self.age_buckets.ranks_below_all(class)
    }

    fn decline(&mut self, arrival: &Arrival) {
        let hash = self.hash(arrival.fingerprint);
        let history = self.history(arrival);
        self.ghost_table.put(hash, history.refused(), arrival.stamp.run);
        self.counters.refused += 1;
        let access = Access { hash, stamp: arrival.stamp, hit: false, returns: history.accesses() > 1 };
        self.observe(&access, history);
    }

    fn advise(&mut self, slot: Slot, advice: Advice, tick: u64) {
        let Page { hash, position, history, bucket, .. } = self.pages[slot.index()];
        let demoted = self.stamp(slot).is_demoted();
        let stamp = match advice {
            Advice::GenerationEnded if history.has_ended() || demoted => return,
            Advice::GenerationEnded => Stamp::new(tick, position),
            Advice::Demote if demoted => return,
            Advice::Demote => Stamp::demoted(position),
        };
        let offered = bucket != age_buckets::NOT_OFFERED;
        if offered {
            self.age_buckets.leave(&mut self.pages, slot);
        }
        self.pages[slot.index()].run = stamp.run;
        if advice == Advice::GenerationEnded {
            self.pages[slot.index()].history = history.ended();
            self.now = self.now.max(stamp.run + u64::from(position));
            self.estimator.generation_ended(hash, self.now);
            self.counters.ended += 1;
        } else {
            self.guard.demote(hash, stamp);
            self.counters.demoted += 1;
        }
        if offered {
            self.offer(slot);
        }
    }

    fn generation_ended(&mut self, fingerprint: u64, tick: u64) {
        let hash = self.hash(fingerprint);
        // The position does not matter for a time of this resolution.
        let stamp = Stamp::new(tick, 0);
        self.now = self.now.max(stamp.run);
        if let Some(past) = self.ghost_table.find(hash, stamp.run).filter(|past| !past.history.has_ended()) {
            self.ghost_table.put(hash, past.history.ended(), stamp.run);
            self.estimator.generation_ended(hash, self.now);
        }
    }

    fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Page>()
            + self.age_buckets.memory_bytes()
            + self.ghost_table.memory_bytes()
            + self.estimator.memory_bytes()
            + self.guard.memory_bytes()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{Outcome, PolicyKind, Trace, run, run_with};
    use crate::synthetic::Kind;
    use crate::{Evictor, NamespaceIndex, NewPage, PageHandle};
    use std::collections::BTreeMap;

    /// Worst choices that the guard must contain.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(super) enum Sabotage {
        EvictNewest,
        RefuseAll,
    }

    const MILLION_TOKENS: [f64; 4] = [0.1, 0.3, 1.0, 3.0];
    /// Tolerated loss against LRU, as a share of all requested blocks.
    const LOSS_MAX: f64 = 0.005;

    fn sabotaged(trace: &Trace, sabotage: Sabotage, million_tokens: f64) -> Outcome {
        let policy = HitDensity { sabotage: Some(sabotage), ..HitDensity::new(0) };
        run_with(trace, policy, (million_tokens * 1e6) as u64 / trace.block_tokens())
    }

    /// Largest loss against LRU on all made-up traffic. One in `every` sizes of the cache is
    /// tried, and not the same ones for each kind of traffic.
    fn worst_loss(sabotage: Sabotage, every: usize) -> (f64, String) {
        let mut worst = (0.0, String::new());
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let trace = kind.trace(12_000, 1);
            for capacity in MILLION_TOKENS.into_iter().skip(number % every).step_by(every) {
                let lru = run(&trace, PolicyKind::Lru, (capacity * 1e6) as u64).rate();
                let loss = lru - sabotaged(&trace, sabotage, capacity).rate();
                if loss > worst.0 {
                    worst = (loss, format!("{kind:?} at {capacity} M tokens"));
                }
            }
        }
        worst
    }

    fn is_contained(sabotage: Sabotage, every: usize) {
        let (loss, at) = worst_loss(sabotage, every);
        println!("largest loss: {:.2} points, {at}", loss * 100.0);
        assert!(loss <= LOSS_MAX, "{sabotage:?} {loss}: {at}");
        assert!(loss > 0.0, "{sabotage:?} has no effect");
    }

    #[test]
    fn guard_contains_a_policy_that_evicts_the_newest_page() {
        is_contained(Sabotage::EvictNewest, 2);
    }

    #[test]
    fn guard_contains_a_policy_that_refuses_all_pages() {
        is_contained(Sabotage::RefuseAll, 2);
    }

    #[test]
    #[ignore = "takes minutes: two policies at every size of the cache"]
    fn guard_contains_both_policies_at_every_size_of_the_cache() {
        is_contained(Sabotage::EvictNewest, 1);
        is_contained(Sabotage::RefuseAll, 1);
    }

    /// Ten prefixes of fifteen pages in turn, and between any two of them sixty pages that never
    /// return.
    #[test]
    fn outlook_tells_pages_that_return_from_others() {
        let mut evictor = Evictor::new(100, HitDensity::new(1));
        let mut resident: BTreeMap<u32, PageHandle> = BTreeMap::new();
        let mut now_ms = 1_000_000;
        for round in 0..3000u32 {
            let hot = (0..15).map(|position| (round % 10 * 100 + position, position));
            let others = (0..60).map(|position| (1_000_000 + round * 100 + position, position));
            for (number, position) in hot.chain(others) {
                now_ms += 10;
                if resident.get(&number).is_some_and(|handle| evictor.touch(*handle, now_ms)) {
                    continue;
                }
                let before = if position == 0 { None } else { resident.get(&(number - 1)).copied() };
                let page = NewPage {
                    name: number,
                    fingerprint: u64::from(number) + 1,
                    parent_fingerprint: if position == 0 { 0 } else { u64::from(number) },
                    namespace: NamespaceIndex(0),
                    parent: before.filter(|parent| evictor.contains(*parent, now_ms)),
                    position,
                    bytes: 1,
                    deadline_ms: None,
                    may_refuse: true,
                };
                if let Ok(handle) = evictor.insert(page, now_ms, &mut Vec::new()) {
                    resident.insert(number, handle);
                }
            }
        }
        let outlook = |number: u32, position: u32| match resident
            .get(&number)
            .filter(|handle| evictor.contains(**handle, now_ms))
        {
            Some(handle) => evictor.policy().outlook_of_resident(handle.slot()),
            None => evictor.policy().outlook(u64::from(number) + 1, position),
        };
        assert_eq!(outlook(914, 14), Outlook::Likely, "of the prefix that was requested last");
        assert_eq!(outlook(1_000_000 + 2999 * 100 + 40, 40), Outlook::Unlikely);
        assert_eq!(outlook(17, 0), Outlook::Unclear, "nobody requested it");
    }

    fn arrival(fingerprint: u64, parent: Option<Slot>, before: u64, tick: u64, position: u32) -> Arrival {
        Arrival { fingerprint, parent, parent_fingerprint: before, stamp: Stamp::new(tick, position) }
    }

    #[test]
    fn refused_page_is_observed_and_its_children_inherit_from_it() {
        let mut policy = HitDensity::new(0);
        let second = 1000 * crate::TICKS_PER_MS;
        policy.decline(&arrival(7, None, 0, 0, 0));
        policy.decline(&arrival(7, None, 0, 8 * second, 0));
        assert_eq!(policy.history(&arrival(7, None, 0, 16 * second, 0)).accesses(), 3);
        let child = policy.history(&arrival(8, None, 7, 8 * second, 1));
        assert_eq!(child, History::FIRST.after(8 * second).of_child());
        assert_eq!(policy.counters(), Counters { refused: 2, ..Counters::default() });
        // A page that became resident is no ghost any more.
        policy.insert(Slot(0), &arrival(7, None, 0, 24 * second, 0));
        assert!(policy.ghost_of_parent(&arrival(8, None, 7, 24 * second, 1)).is_none());
    }
}
