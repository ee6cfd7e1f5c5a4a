//! Never below LRU.
//!
//! Beside the cache runs the shadow of an LRU cache: stamps of a sample of pages, chosen by hash, as many as there
//! are resident pages of that sample. An account is kept of the hits that the cache is ahead by on the sample; a small
//! part of LRU's hits is paid in on top, and there is a most that it holds, so that gains of long ago do not pay for
//! losses of today. So over any time the sample falls behind by no more than that part, that most, and what is
//! lost after the account is empty, until the pages that LRU would have kept are back. Pages go in LRU order
//!
//! - until the traffic was watched for several times as long as it took to fill the cache: what is gained from
//!   keeping a page longer than LRU would shows only later;
//! - while LRU finds nearly all that returns: there is little to gain, and as much to lose;
//! - from when the account is empty until there is something in it again.

use crate::policy::{Farewell, Stamp};
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

/// Most pages in the shadow.
const SHADOW_MAX: usize = 1 << 14;
/// The sample is chosen by the bits from here on.
const SAMPLE_SHIFT: u32 = 24;
/// Accesses of the sample after which counts have faded by half: so many, and so many per page of the shadow.
const HALF_LIFE_MIN: f64 = 4096.0;
const HALF_LIFE_PER_PAGE: f64 = 4.0;
/// Part of LRU's hits that may be lost.
const LOSS_PART: f64 = 0.005;
/// What is in the account at first, in hits on the sample: so many, and so many per page of the shadow.
const CREDIT_HITS: f64 = 64.0;
const CREDIT_PER_PAGE: f64 = 0.02;
/// Most in the account, and the least to begin again with, in times of that.
const CREDIT_MOST: f64 = 2.0;
const CREDIT_AGAIN: f64 = 0.1;
/// LRU finds nearly all: this part of the requests for pages that were seen before.
const NEARLY_ALL: f64 = 0.9;
/// Times to fill the cache, before anything but LRU is tried.
const FILLS_MIN: u64 = 3;

#[derive(Debug)]
pub(super) struct Guard {
    stamps: HashMap<u64, Stamp, BuildHasherDefault<super::learner::AsItIs>>,
    order: BTreeSet<(Stamp, u64)>,
    sample_bits: u32,
    residents: usize,
    /// Hits that may still be lost; `None` before anything but LRU was tried.
    account: Option<f64>,
    /// It was not empty since it was filled last.
    solvent: bool,
    /// Requests for pages that were seen before, and those of them that the shadow answers.
    returns: f64,
    lru_returns: f64,
    first_at: Option<u64>,
    full_at: Option<u64>,
    now: u64,
}

/// A request for a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    pub(super) hash: u64,
    pub(super) stamp: Stamp,
    /// It was found.
    pub(super) hit: bool,
    /// It was seen before.
    pub(super) returns: bool,
}

impl Guard {
    pub(super) fn new() -> Guard {
        Guard {
            stamps: HashMap::default(),
            order: BTreeSet::new(),
            sample_bits: 0,
            residents: 0,
            account: None,
            solvent: false,
            returns: 0.0,
            lru_returns: 0.0,
            first_at: None,
            full_at: None,
            now: 0,
        }
    }

    pub(super) fn follows_lru(&self) -> bool {
        !self.solvent || self.lru_returns > NEARLY_ALL * self.returns
    }

    fn has_watched_enough(&self) -> bool {
        let (Some(first_at), Some(full_at)) = (self.first_at, self.full_at) else { return false };
        self.now - first_at >= FILLS_MIN * (full_at - first_at)
    }

    /// A victim is asked for.
    pub(super) fn full(&mut self, now: u64) {
        self.full_at.get_or_insert(now);
    }

    pub(super) fn arrived(&mut self, hash: u64) {
        self.residents += usize::from(self.is_sampled(hash));
    }

    pub(super) fn left(&mut self, hash: u64, farewell: Farewell) {
        if !self.is_sampled(hash) {
            return;
        }
        self.residents -= 1;
        if farewell == Farewell::Removed
            && let Some(stamp) = self.stamps.remove(&hash)
        {
            self.order.remove(&(stamp, hash));
        }
    }

    /// A page was asked for.
    pub(super) fn access(&mut self, access: &Access, now: u64) {
        self.now = now;
        self.first_at.get_or_insert(now);
        if !self.is_sampled(access.hash) {
            return;
        }
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
        self.settle(access.hit, before.is_some());
    }

    fn count(&mut self, access: &Access, lru_hit: bool) {
        let half_life = HALF_LIFE_MIN + HALF_LIFE_PER_PAGE * self.residents as f64;
        let fade = 1.0 - std::f64::consts::LN_2 / half_life;
        let count = |sum: &mut f64, one: bool| *sum = *sum * fade + f64::from(u8::from(one));
        count(&mut self.returns, access.returns || lru_hit);
        count(&mut self.lru_returns, lru_hit);
    }

    fn settle(&mut self, hit: bool, lru_hit: bool) {
        if self.account.is_none() && !self.has_watched_enough() {
            return;
        }
        let credit = CREDIT_HITS + CREDIT_PER_PAGE * self.residents as f64;
        self.solvent |= self.account.is_none();
        let account = self.account.get_or_insert(credit);
        *account += f64::from(u8::from(hit)) - f64::from(u8::from(lru_hit)) * (1.0 - LOSS_PART);
        *account = account.min(CREDIT_MOST * credit);
        if *account <= 0.0 {
            self.solvent = false;
        } else if *account >= CREDIT_AGAIN * credit {
            self.solvent = true;
        }
    }

    /// Whether the sample should be halved.
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
        self.account = self.account.map(|account| account / 2.0);
    }

    fn is_sampled(&self, hash: u64) -> bool {
        (hash >> SAMPLE_SHIFT) & ((1 << self.sample_bits) - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of 100 pages that finds what is asked for or not, under traffic in which LRU finds half.
    fn guard_of_cache_that(finds: bool) -> Guard {
        let mut guard = Guard::new();
        (0..100u64).for_each(|page| guard.arrived(page << SAMPLE_SHIFT));
        guard.full(100);
        for tick in 100..2000u64 {
            let soon = tick % 2 == 0;
            let page = if soon { tick % 50 } else { tick % 998 };
            let access = Access { hash: page, stamp: Stamp::new(tick, 0), hit: soon && finds, returns: true };
            guard.access(&access, tick);
        }
        guard
    }

    #[test]
    fn lru_takes_over_when_it_is_ahead_and_only_then() {
        assert!(guard_of_cache_that(false).follows_lru());
        assert!(!guard_of_cache_that(true).follows_lru());
    }

    /// A guard that is in force, after so many accesses that LRU finds and the cache finds or not.
    fn account_after(accesses: &[(bool, u32)]) -> Guard {
        let mut guard = Guard { first_at: Some(0), full_at: Some(0), ..Guard::new() };
        for (hit, times) in accesses {
            (0..*times).for_each(|_| guard.settle(*hit, true));
        }
        guard
    }

    #[test]
    fn what_is_gained_pays_for_no_more_than_twice_what_was_there_at_first() {
        assert!(account_after(&[(false, 64)]).solvent);
        assert!(!account_after(&[(false, 65)]).solvent);
        assert!(account_after(&[(true, 100_000), (false, 128)]).solvent);
        assert!(!account_after(&[(true, 100_000), (false, 129)]).solvent);
    }

    #[test]
    fn lru_pays_for_another_try() {
        assert!(!account_after(&[(false, 70), (true, 1000)]).solvent);
        assert!(account_after(&[(false, 70), (true, 3000)]).solvent);
    }

    #[test]
    fn lru_goes_first_while_too_little_was_seen() {
        let mut guard = Guard::new();
        assert!(guard.follows_lru());
        for tick in 0..400 {
            guard.arrived(tick << SAMPLE_SHIFT);
            let access = Access { hash: tick, stamp: Stamp::new(tick, 0), hit: false, returns: true };
            guard.access(&access, tick);
            if tick == 100 {
                guard.full(tick);
            }
            assert_eq!(guard.follows_lru(), tick < 300, "{tick}");
        }
    }

    #[test]
    fn the_shadow_is_bounded() {
        let mut guard = Guard::new();
        let pages: Vec<u64> = (0..2 * SHADOW_MAX as u64).map(|page| (page << SAMPLE_SHIFT) | page).collect();
        for (tick, page) in pages.iter().enumerate() {
            guard.arrived(*page);
            let stamp = Stamp::new(tick as u64, 0);
            guard.access(&Access { hash: *page, stamp, hit: false, returns: false }, tick as u64);
        }
        assert!(guard.is_crowded());
        guard.halve(pages.iter().copied());
        assert!(!guard.is_crowded());
        assert_eq!((guard.residents, guard.stamps.len()), (SHADOW_MAX, SHADOW_MAX));
    }
}
