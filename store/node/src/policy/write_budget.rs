//! Budget of writes to L3: bytes per day, for devices that wear out.
//!
//! A token bucket of one hour. While it is more than half full, every write takes from it. Below
//! that only pages that were used twice may, and an empty bucket stops all writes. Copies that the
//! log makes to reclaim segments are not counted.

const DAY_MS: u128 = 24 * 3600 * 1000;
/// Hours of the budget that may be saved, as parts of a day.
const SAVED_DAY_PARTS: u64 = 24;

#[derive(Debug)]
pub(super) struct WriteBudget {
    /// `None` is no limit.
    bytes_per_day: Option<u64>,
    tokens: u64,
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
        let left = self.tokens.checked_sub(u64::from(bytes));
        let kept = if is_reused { 0 } else { Self::tokens_max(per_day) / 2 };
        match left.filter(|left| *left >= kept) {
            Some(left) => self.tokens = left,
            None => self.denied += 1,
        }
        left.is_some_and(|left| left >= kept)
    }

    /// Number of writes that the budget denied.
    pub(super) fn denied(&self) -> u64 {
        self.denied
    }

    fn tokens_max(per_day: u64) -> u64 {
        per_day.div_ceil(SAVED_DAY_PARTS)
    }

    fn fill(&mut self, per_day: u64, now_ms: u64) {
        let filled_ms = self.filled_ms.get_or_insert(now_ms);
        let passed_ms = u128::from(now_ms.saturating_sub(*filled_ms));
        let earned = passed_ms * u128::from(per_day) / DAY_MS;
        if earned > 0 {
            let tokens = (u128::from(self.tokens) + earned).min(u128::from(Self::tokens_max(per_day)));
            self.tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
            // Only the time that was paid out, so that frequent calls lose no fraction.
            let paid_ms = earned * DAY_MS / u128::from(per_day);
            *filled_ms += u64::try_from(paid_ms).unwrap_or(u64::MAX);
        }
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
    fn no_budget_is_no_limit() {
        let mut budget = WriteBudget::new(None);
        assert!((0..1000).all(|_| budget.take(u32::MAX, false, 0)));
    }
}
