//! Budget of writes to L3: bytes per day, for devices that wear out.
//!
//! A token bucket of one hour. While it is more than half full, every write takes from it. Below
//! that only pages that were used twice may, and an empty bucket stops both. Not counted are copies
//! that the log makes to reclaim segments, pages that L3 lost, and dirty pages at shutdown.

const DAY_MS: u128 = 24 * 3600 * 1000;
/// Hours of the budget that may be saved, as parts of a day.
const SAVED_DAY_PARTS: u64 = 24;

#[derive(Debug)]
pub(super) struct WriteBudget {
    /// `None` is no limit.
    bytes_per_day: Option<u64>,
    /// In units of which [`DAY_MS`] are one byte, so that frequent calls neither lose nor gain any.
    tokens: u128,
    /// Time up to which tokens were added. `None` before the first write.
    filled_ms: Option<u64>,
    denied: u64,
}

impl WriteBudget {
    pub(super) fn new(bytes_per_day: Option<u64>) -> WriteBudget {
        WriteBudget { bytes_per_day, tokens: bytes_per_day.map_or(0, Self::tokens_max), filled_ms: None, denied: 0 }
    }

    /// Takes the bytes of a write from the budget, or returns `false`. `is_reused` is true for a
    /// page with a second use.
    pub(super) fn take(&mut self, bytes: u32, is_reused: bool, now_ms: u64) -> bool {
        let Some(per_day) = self.bytes_per_day else { return true };
        self.fill(per_day, now_ms);
        let left = self.tokens.checked_sub(u128::from(bytes) * DAY_MS);
        let kept = if is_reused { 0 } else { Self::tokens_max(per_day) / 2 };
        match left.filter(|left| *left >= kept) {
            Some(left) => self.tokens = left,
            None => self.denied += 1,
        }
        left.is_some_and(|left| left >= kept)
    }

    /// Number of attempts to write that the budget denied.
    pub(super) fn denied(&self) -> u64 {
        self.denied
    }

    fn tokens_max(per_day: u64) -> u128 {
        u128::from(per_day.div_ceil(SAVED_DAY_PARTS)) * DAY_MS
    }

    fn fill(&mut self, per_day: u64, now_ms: u64) {
        let before = self.filled_ms.unwrap_or(now_ms);
        self.filled_ms = Some(before.max(now_ms));
        // A budget of `per_day` bytes earns that many units in each millisecond.
        let earned = u128::from(now_ms.saturating_sub(before)) * u128::from(per_day);
        self.tokens = (self.tokens + earned).min(Self::tokens_max(per_day));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand bytes per hour.
    const PER_DAY: u64 = 24_000;

    #[test]
    fn half_of_the_budget_is_for_pages_with_a_second_use() {
        let mut budget = WriteBudget::new(Some(PER_DAY));
        assert!((0..5).all(|_| budget.take(100, false, 0)));
        assert!(!budget.take(100, false, 0));
        assert!((0..5).all(|_| budget.take(100, true, 0)));
        assert!(!budget.take(100, true, 0));
        assert_eq!(budget.denied(), 2);
    }

    #[test]
    fn budget_refills_with_time_and_saves_at_most_an_hour() {
        let mut budget = WriteBudget::new(Some(PER_DAY));
        while budget.take(100, true, 0) {}
        // Many calls within the time of one byte lose no fraction of it.
        (0..360_000).for_each(|ms| assert!(!budget.take(101, true, ms)));
        assert!(budget.take(100, true, 360_000) && !budget.take(100, true, 360_000));
        let later = 360_000_000;
        assert_eq!((0..100).filter(|_| budget.take(100, true, later)).count(), 10);
    }

    #[test]
    fn frequent_calls_gain_nothing() {
        // 11,574 bytes in a millisecond.
        let mut budget = WriteBudget::new(Some(1_000_000_000_000));
        while budget.take(11_000, true, 0) {}
        let taken = (1..=1000).flat_map(|ms| [ms; 10]).filter(|&ms| budget.take(11_000, true, ms)).count();
        assert!((1050..=1053).contains(&taken), "{taken}");
    }

    #[test]
    fn no_budget_is_no_limit() {
        let mut budget = WriteBudget::new(None);
        assert!((0..1000).all(|_| budget.take(u32::MAX, false, 0)));
    }
}
