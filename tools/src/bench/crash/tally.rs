//! What was counted, and what of it must not be.

use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Most violations that are kept in words.
const WORDS_MAX: usize = 20;
/// Share of the pages acknowledged in time that must be there after a kill.
const KEPT_MIN: f64 = 0.99;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counted by all tasks at once.
        #[derive(Debug, Default)]
        pub struct Tally {
            $($(#[$doc])* pub $name: AtomicU64,)*
            violations: Mutex<Vec<String>>,
        }

        /// The counts at one moment.
        #[derive(Debug, Clone, Serialize)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Tally {
            /// The counts now.
            pub fn counts(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Kills of a node that served.
    kills,
    /// Kills of a node that was starting.
    kills_at_start,
    /// Puts begun.
    puts,
    /// Puts answered "stored".
    stored,
    /// Puts answered "already there".
    already_there,
    /// Puts answered "other bytes are there".
    refused,
    /// Puts that ended without an answer, or for want of room.
    puts_lost,
    /// Pages read or missed.
    gets,
    /// Pages read.
    hits,
    /// Pages forgotten, and answered so.
    forgotten,
    /// Bytes put.
    put_bytes,
    /// Reads whose bytes are no version of the page.
    wrong_bytes,
    /// Forgotten versions that were read.
    resurrected,
    /// Versions read that another had replaced, or that were not put yet.
    impossible,
    /// Pages acknowledged long enough before a kill, in an L3 with room for all.
    must_have,
    /// Those of them that were not there afterwards.
    lost,
    /// The longest start, in milliseconds.
    slowest_start_ms,
}

/// Adds one.
pub fn one(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Tally {
    /// Counts what must not be, and keeps it in words.
    pub fn violation(&self, counter: &AtomicU64, words: String) {
        one(counter);
        let mut violations = self.violations.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if violations.len() < WORDS_MAX {
            violations.push(words);
        }
    }

    /// A start took this long.
    pub fn started(&self, time: Duration) {
        self.slowest_start_ms.fetch_max(time.as_millis() as u64, Ordering::Relaxed);
    }

    /// The first violations, in words.
    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

impl Counts {
    /// Why this is not good, if it is not.
    pub fn verdict(&self) -> Result<(), String> {
        if self.wrong_bytes + self.resurrected + self.impossible > 0 {
            return Err("pages were read that must not be".into());
        }
        let kept = (self.must_have - self.lost) as f64;
        if kept < self.must_have as f64 * KEPT_MIN {
            return Err(format!("{} of {} pages acknowledged in time were lost", self.lost, self.must_have));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_page_or_more_than_a_percent_lost_is_a_failure() {
        let counts = |change: fn(&Tally)| {
            let tally = Tally::default();
            tally.must_have.store(1000, Ordering::Relaxed);
            change(&tally);
            tally.counts().verdict().is_ok()
        };
        assert!(counts(|tally| tally.lost.store(10, Ordering::Relaxed)));
        assert!(!counts(|tally| tally.lost.store(11, Ordering::Relaxed)));
        assert!(!counts(|tally| one(&tally.wrong_bytes)));
        assert!(!counts(|tally| one(&tally.resurrected)));
        assert!(!counts(|tally| one(&tally.impossible)));
    }
}
