//! Guard that keeps the policy from falling below LRU.
//!
//! Similar to set dueling, a shadow LRU cache runs beside the real cache. Both are compared on a
//! sample of the pages. The shadow stores no pages, only the [`Stamp`]s of the last accesses. It
//! has room for as many sampled pages as are resident. A *balance* holds the sampled hits by which
//! the cache is ahead of the shadow:
//! - A small fraction of LRU's hits refills it up to its initial value: the tolerated loss.
//! - It has a maximum, so that old gains do not pay for new losses.
//! - The initial value and the maximum shrink while LRU leaves little to gain.
//!
//! So over any time the sampled loss is at most the sum of that fraction, that maximum, and the
//! hits lost between an empty balance and the return of the pages that LRU would have kept.
//!
//! The policy evicts in LRU order:
//! - until it has watched the traffic for [`WATCH_FILLS`] times the time that it took to fill the
//!   cache, because gains from keeping pages longer than LRU show only later;
//! - while LRU answers nearly all returning accesses, because there is little to gain and much to
//!   lose;
//! - from when the balance is empty until it has recovered;
//! - from when hits suddenly stop, where LRU answers most returning accesses. What was learnt no
//!   longer holds, and losses would show only when the new pages return. This ends when hits
//!   return, or when LRU has replaced all pages.
//!
//! All times count accesses. The constants were chosen while looking at two public traces: see
//! decision 0048. `tests/rates.rs` bounds the loss on synthetic workloads.

use crate::policy::{Removal, Stamp};
use crate::{map_bytes, tree_bytes};
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

/// Maximum number of sampled pages. Beyond it the sample is halved.
const SHADOW_MAX: usize = 1 << 14;
/// Lowest bit of a page's hash that decides whether the page is sampled. The bits below choose its
/// bucket in `stamps`, so they must differ among sampled pages.
const SAMPLE_SHIFT: u32 = 24;
/// Half-life of the access counts, in sampled accesses: a constant, and a share per shadow page.
const HALF_LIFE_MIN: f64 = 4096.0;
const HALF_LIFE_PER_PAGE: f64 = 4.0;
/// Tolerated loss, as a fraction of LRU's hits. The balance falls in the long run only if the
/// policy loses more than this.
const LOSS_FRACTION: f64 = 0.005;
/// Initial balance in sampled hits: a constant, a share per shadow page, and a number of requests.
/// One unlucky session must not empty the balance.
const CREDIT_HITS: f64 = 64.0;
const CREDIT_PER_PAGE: f64 = 0.01;
const CREDIT_REQUESTS: f64 = 4.0;
/// The balance shrinks if LRU misses less than one part in this many of the returning accesses.
const CREDIT_MISSED_PARTS: f64 = 4.0;
/// Share of an access in the average position.
const POSITION_SHARE: f64 = 1e-3;
/// Maximum balance, and balance at which the policy resumes, as multiples of the initial balance. A
/// positive balance means that the loss is repaid, with all that the return to LRU cost. In LRU
/// order only the tolerated loss adds to it. So a larger factor would keep the policy away for long
/// where LRU has few hits.
const CREDIT_MAX_FACTOR: f64 = 2.0;
const CREDIT_RESUME_FACTOR: f64 = 0.02;
/// LRU is good enough if it answers more than this fraction of the returning accesses.
const LRU_SUFFICIENT: f64 = 0.9;
/// Pages may be refused while LRU answers less than this fraction of the returning accesses. Beyond
/// it, there is room for nearly all pages that return.
const REFUSAL_LRU_MAX: f64 = 0.75;
/// Time to watch before the policy departs from LRU, in times to fill the cache. Estimates from
/// less traffic are mostly prior.
const WATCH_FILLS: u64 = 3;

/// Hits stop if their recent rate falls below this share of their usual rate. They have returned at
/// twice that share.
const STOP_SHARE: f64 = 0.25;
/// Usual rate of hits from which on a stop counts. Traffic with fewer hits pauses too often.
const STOP_RATE_MIN: f64 = 0.5;
/// Sampled accesses over which the usual rate is averaged, per shadow page, and number of these
/// times in which the recent rate is.
const USUAL_PER_PAGE: f64 = 4.0;
const RECENT_PARTS: f64 = 64.0;
/// The averages need at least as many accesses as this number of pages has.
const RATE_PAGES_MIN: f64 = 256.0;

/// Order in which pages are evicted now, with the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictionOrder {
    /// No page was evicted yet.
    NotFull,
    /// LRU, until enough traffic was seen, at the start or after a sudden change.
    Watching,
    /// LRU, because the learnt order recently lost hits against it.
    LruAhead,
    /// LRU, because it answers nearly all returning accesses.
    LruSuffices,
    /// Lowest hit density first. `refuses` tells whether pages may be refused.
    Learnt { refuses: bool },
}

#[derive(Debug)]
pub(super) struct LruGuard {
    stamps: HashMap<u64, Stamp, BuildHasherDefault<super::estimator::IdentityHasher>>,
    order: BTreeSet<(Stamp, u64)>,
    sample_bits: u32,
    residents: usize,
    /// Sampled hits that may still be lost. `None` until the policy first departs from LRU. An
    /// empty balance returns the cache to LRU.
    balance: Option<f64>,
    /// True if the balance has not been empty since it last recovered.
    in_credit: bool,
    /// Decayed count of returning accesses, and of those that the shadow answers. An access returns
    /// if the shadow or the policy remembers an earlier one to its page.
    returns: f64,
    lru_returns: f64,
    /// Average position of accessed pages: half the size of a request.
    position: f64,
    hits: HitRate,
    /// Accesses to all pages, and their number when the cache became full.
    accesses: u64,
    full_at: Option<u64>,
}

/// Rate of accesses that hit, in the cache or in the shadow.
#[derive(Debug, Clone, Copy, Default)]
struct HitRate {
    usual: f64,
    recent: f64,
    /// Sampled accesses for which a stop goes on. 0 without one.
    stopped_for: u64,
}

impl HitRate {
    /// Counts an access. `matters` tells whether LRU leaves so little to gain that a stop counts.
    fn count(&mut self, hit: bool, pages: usize, matters: bool) {
        let hit = f64::from(u8::from(hit));
        let usual_over = USUAL_PER_PAGE * (pages as f64).max(RATE_PAGES_MIN);
        self.usual += (hit - self.usual) / usual_over;
        self.recent += (hit - self.recent) / usual_over * RECENT_PARTS;
        if self.stopped_for > 0 {
            self.stopped_for -= 1;
            if self.recent > 2.0 * STOP_SHARE * self.usual {
                self.stopped_for = 0;
            } else if self.stopped_for == 0 {
                // LRU has kept nothing from before.
                self.usual = self.recent;
            }
        } else if matters && self.usual > STOP_RATE_MIN && self.recent < STOP_SHARE * self.usual {
            self.stopped_for = pages as u64;
        }
    }

    fn has_stopped(&self) -> bool {
        self.stopped_for > 0
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    pub(super) hash: u64,
    pub(super) stamp: Stamp,
    /// The page was in the real cache.
    pub(super) hit: bool,
    /// The policy remembers an earlier access to the page.
    pub(super) returns: bool,
}

impl LruGuard {
    pub(super) fn new() -> LruGuard {
        LruGuard {
            stamps: HashMap::default(),
            order: BTreeSet::new(),
            sample_bits: 0,
            residents: 0,
            balance: None,
            in_credit: false,
            returns: 0.0,
            lru_returns: 0.0,
            position: 0.0,
            hits: HitRate::default(),
            accesses: 0,
            full_at: None,
        }
    }

    pub(super) fn follows_lru(&self) -> bool {
        !matches!(self.order(), EvictionOrder::Learnt { .. })
    }

    /// The order in force, with its reason.
    pub(super) fn order(&self) -> EvictionOrder {
        let lru_suffices = self.lru_returns > LRU_SUFFICIENT * self.returns;
        match self.balance {
            _ if self.full_at.is_none() => EvictionOrder::NotFull,
            None => EvictionOrder::Watching,
            Some(_) if self.hits.has_stopped() => EvictionOrder::Watching,
            Some(_) if !self.in_credit => EvictionOrder::LruAhead,
            Some(_) if lru_suffices => EvictionOrder::LruSuffices,
            Some(_) => EvictionOrder::Learnt { refuses: self.lru_misses_many() },
        }
    }

    /// Returns `true` if the cache is so small for its traffic that refusals can gain.
    pub(super) fn may_refuse(&self) -> bool {
        self.order() == EvictionOrder::Learnt { refuses: true }
    }

    fn lru_misses_many(&self) -> bool {
        self.lru_returns < REFUSAL_LRU_MAX * self.returns
    }

    fn has_watched_enough(&self) -> bool {
        self.full_at.is_some_and(|full_at| self.accesses >= WATCH_FILLS * full_at)
    }

    /// Notes that the cache needs a victim, so it is full.
    pub(super) fn full(&mut self) {
        self.full_at.get_or_insert(self.accesses);
    }

    pub(super) fn arrived(&mut self, hash: u64) {
        self.residents += usize::from(self.is_sampled(hash));
    }

    pub(super) fn left(&mut self, hash: u64, removal: Removal) {
        if !self.is_sampled(hash) {
            return;
        }
        self.residents -= 1;
        if removal == Removal::Removed
            && let Some(stamp) = self.stamps.remove(&hash)
        {
            self.order.remove(&(stamp, hash));
        }
    }

    pub(super) fn access(&mut self, access: &Access) {
        self.accesses += 1;
        if !self.is_sampled(access.hash) {
            return;
        }
        self.position += (f64::from(access.stamp.position.0) - self.position) * POSITION_SHARE;
        let before = self.stamps.insert(access.hash, access.stamp);
        if let Some(before) = before {
            self.order.remove(&(before, access.hash));
        }
        self.order.insert((access.stamp, access.hash));
        while self.stamps.len() > self.residents {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.stamps.remove(&oldest);
        }
        self.count(access, before.is_some());
        self.update_balance(access.hit, before.is_some());
        let matters = !self.lru_misses_many();
        self.hits.count(access.hit || before.is_some(), self.residents, matters);
    }

    /// Demotes a page in the shadow too: it has this stamp from now on. Otherwise a client could
    /// take the balance down by wrong advice. Of ended generations the shadow knows nothing: it is
    /// plain LRU.
    pub(super) fn demote(&mut self, hash: u64, stamp: Stamp) {
        if let Some(before) = self.stamps.get_mut(&hash) {
            self.order.remove(&(*before, hash));
            *before = stamp;
            self.order.insert((stamp, hash));
        }
    }

    fn count(&mut self, access: &Access, lru_hit: bool) {
        let half_life = HALF_LIFE_MIN + HALF_LIFE_PER_PAGE * self.residents as f64;
        let fade = 1.0 - std::f64::consts::LN_2 / half_life;
        let count = |sum: &mut f64, one: bool| *sum = *sum * fade + f64::from(u8::from(one));
        count(&mut self.returns, access.returns || lru_hit);
        count(&mut self.lru_returns, lru_hit);
    }

    fn update_balance(&mut self, hit: bool, lru_hit: bool) {
        if self.balance.is_none() && !self.has_watched_enough() {
            return;
        }
        let credit = self.credit();
        self.in_credit |= self.balance.is_none();
        let balance = self.balance.get_or_insert(credit);
        *balance += f64::from(u8::from(hit)) - f64::from(u8::from(lru_hit));
        *balance = balance.min(CREDIT_MAX_FACTOR * credit);
        if lru_hit && *balance < credit {
            *balance += LOSS_FRACTION;
        }
        if *balance <= 0.0 {
            self.in_credit = false;
        } else if *balance >= CREDIT_RESUME_FACTOR * credit {
            self.in_credit = true;
        }
    }

    /// Initial balance now.
    fn credit(&self) -> f64 {
        let sampled_of_request = 2.0 * self.position / (1u64 << self.sample_bits) as f64;
        let full = CREDIT_HITS + CREDIT_PER_PAGE * self.residents as f64 + CREDIT_REQUESTS * sampled_of_request;
        let missed = if self.returns > 0.0 { 1.0 - self.lru_returns / self.returns } else { 1.0 };
        full * (CREDIT_MISSED_PARTS * missed).min(1.0)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        map_bytes::<(u64, Stamp)>(self.stamps.capacity()) + tree_bytes::<(Stamp, u64)>(self.order.len())
    }

    /// Returns `true` if the sample exceeds its bound. The caller then calls [`LruGuard::halve`].
    pub(super) fn is_crowded(&self) -> bool {
        self.residents > SHADOW_MAX
    }

    /// Halves the sample. `residents` are the hashes of all resident pages.
    pub(super) fn halve(&mut self, residents: impl Iterator<Item = u64>) {
        self.sample_bits += 1;
        self.residents = residents.filter(|hash| self.is_sampled(*hash)).count();
        let dropped: Vec<u64> = self.stamps.keys().copied().filter(|hash| !self.is_sampled(*hash)).collect();
        for hash in dropped {
            if let Some(stamp) = self.stamps.remove(&hash) {
                self.order.remove(&(stamp, hash));
            }
        }
        self.balance = self.balance.map(|balance| balance / 2.0);
    }

    fn is_sampled(&self, hash: u64) -> bool {
        (hash >> SAMPLE_SHIFT) & ((1 << self.sample_bits) - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of 100 pages that always hits or always misses, under traffic of which LRU answers
    /// half.
    fn guard_of_cache_that(finds: bool) -> LruGuard {
        let mut guard = LruGuard::new();
        (0..100u64).for_each(|page| guard.arrived(page << SAMPLE_SHIFT));
        guard.accesses = 100;
        guard.full();
        for tick in 100..2000u64 {
            let soon = tick % 2 == 0;
            let page = if soon { tick % 50 } else { tick % 998 };
            let access = Access { hash: page, stamp: Stamp::new(tick, 0), hit: soon && finds, returns: true };
            guard.access(&access);
        }
        guard
    }

    #[test]
    fn lru_takes_over_only_when_it_is_ahead() {
        assert!(guard_of_cache_that(false).follows_lru());
        assert!(!guard_of_cache_that(true).follows_lru());
    }

    fn balance_after(accesses: &[(bool, u32)]) -> LruGuard {
        let mut guard = LruGuard { full_at: Some(0), ..LruGuard::new() };
        for (hit, times) in accesses {
            (0..*times).for_each(|_| guard.update_balance(*hit, true));
        }
        guard
    }

    #[test]
    fn gains_pay_for_at_most_twice_the_initial_balance() {
        assert!(balance_after(&[(false, 64)]).in_credit);
        assert!(!balance_after(&[(false, 65)]).in_credit);
        let after_gains = |losses: u32| {
            let mut guard = balance_after(&[]);
            (0..100_000).for_each(|_| guard.update_balance(true, false));
            (0..losses).for_each(|_| guard.update_balance(false, true));
            guard.in_credit
        };
        assert!(after_gains(128) && !after_gains(129));
    }

    #[test]
    fn tolerated_loss_refills_the_balance_to_its_initial_value() {
        assert!(!balance_after(&[(false, 70), (true, 1000)]).in_credit);
        assert!(balance_after(&[(false, 70), (true, 1500)]).in_credit, "as soon as the loss is repaid");
        // A cache that only hits where LRU does gains nothing for later.
        assert!(!balance_after(&[(true, 100_000), (false, 66)]).in_credit);
    }

    #[test]
    fn balance_grows_with_requests_and_shrinks_where_little_is_to_gain() {
        let guard = LruGuard::new();
        let credit = guard.credit();
        assert_eq!(LruGuard { position: 100.0, ..LruGuard::new() }.credit(), credit + CREDIT_REQUESTS * 200.0);
        let little_to_gain = LruGuard { returns: 100.0, lru_returns: 95.0, ..LruGuard::new() };
        assert!((little_to_gain.credit() - credit * CREDIT_MISSED_PARTS * 0.05).abs() < 1e-9);
    }

    #[test]
    fn stop_of_hits_ends_when_they_return_or_lru_has_replaced_all_pages() {
        let after = |accesses: &[(bool, usize)], matters: bool| {
            let mut rate = HitRate::default();
            for (hit, times) in accesses {
                (0..*times).for_each(|_| rate.count(*hit, 1000, matters));
            }
            rate.has_stopped()
        };
        assert!(after(&[(true, 20_000), (false, 200)], true));
        assert!(!after(&[(true, 20_000), (false, 50)], true));
        assert!(!after(&[(true, 20_000), (false, 200)], false));
        assert!(!after(&[(true, 20_000), (false, 200), (true, 200)], true));
        assert!(!after(&[(true, 20_000), (false, 1200)], true));
        // Traffic that rarely hits pauses too.
        assert!(!after(&[(true, 1000), (false, 1000)], true));
    }

    #[test]
    fn lru_order_holds_until_enough_traffic_was_watched() {
        let mut guard = LruGuard::new();
        assert!(guard.follows_lru());
        for tick in 0..400 {
            guard.arrived(tick << SAMPLE_SHIFT);
            let access = Access { hash: tick, stamp: Stamp::new(tick, 0), hit: false, returns: true };
            guard.access(&access);
            if tick == 99 {
                guard.full();
            }
            assert_eq!(guard.follows_lru(), tick < 299, "{tick}");
        }
    }

    #[test]
    fn shadow_is_bounded() {
        let mut guard = LruGuard::new();
        let pages: Vec<u64> = (0..2 * SHADOW_MAX as u64).map(|page| (page << SAMPLE_SHIFT) | page).collect();
        for (tick, page) in pages.iter().enumerate() {
            guard.arrived(*page);
            let stamp = Stamp::new(tick as u64, 0);
            guard.access(&Access { hash: *page, stamp, hit: false, returns: false });
        }
        assert!(guard.is_crowded());
        guard.halve(pages.iter().copied());
        assert!(!guard.is_crowded());
        assert_eq!((guard.residents, guard.stamps.len()), (SHADOW_MAX, SHADOW_MAX));
    }
}
