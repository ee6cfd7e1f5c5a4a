//! Counters of a crash loop, and the limits that decide whether it passed.

use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const VIOLATIONS_MAX: usize = 20;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters that all tasks update concurrently. Every access is relaxed: no counter orders
        /// other memory.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
            violations: Mutex<Vec<String>>,
        }

        #[derive(Debug, Clone, Serialize)]
        pub struct CrashReport {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub fn report(&self) -> CrashReport {
                CrashReport { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counts! {
    kills,
    kills_at_start,
    puts,
    stored,
    already_there,
    refused,
    puts_lost,
    gets,
    hits,
    forgotten,
    put_bytes,
    /// Reads that returned bytes of no version of the page. Any such read fails the run.
    wrong_bytes,
    /// Reads that returned a durably deleted version. Any such read fails the run.
    resurrected,
    /// Reads that returned a version already replaced, or not yet put.
    impossible,
    /// Pages that must still be present: acknowledged before the node had no write in flight, in an
    /// L3 that is large enough to evict nothing.
    must_have,
    /// Pages of `must_have` that are not present. Any such page fails the run.
    lost,
    slowest_start_ms,
}

pub fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counters {
    pub fn violation(&self, counter: &AtomicU64, text: String) {
        increment(counter);
        let mut violations = self.violations.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if violations.len() < VIOLATIONS_MAX {
            violations.push(text);
        }
    }

    pub fn started(&self, time: Duration) {
        self.slowest_start_ms.fetch_max(time.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

impl CrashReport {
    pub fn check(&self) -> Result<(), String> {
        if self.wrong_bytes + self.resurrected + self.impossible > 0 {
            return Err("a node returned wrong, deleted or impossible versions of pages".into());
        }
        if self.lost > 0 {
            return Err(format!("{} of {} pages that were on L3 before the kill are lost", self.lost, self.must_have));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_fails_on_a_wrong_or_lost_page() {
        let counts = |change: fn(&Counters)| {
            let counters = Counters::default();
            counters.must_have.store(1000, Ordering::Relaxed);
            change(&counters);
            counters.report().check().is_ok()
        };
        assert!(counts(|_| ()));
        assert!(!counts(|counters| increment(&counters.lost)));
        assert!(!counts(|counters| increment(&counters.wrong_bytes)));
        assert!(!counts(|counters| increment(&counters.resurrected)));
        assert!(!counts(|counters| increment(&counters.impossible)));
    }
}
