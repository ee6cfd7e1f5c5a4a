//! What may and what must be read, kept by those who put and forget.
//!
//! Always true: one writer at a time changes a page, and its versions grow. So a read is right if its version was put
//! before the read ended, and neither forgotten nor replaced before the read began.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What was acknowledged this long before the node was killed must be there afterwards.
pub const DURABLE_AFTER: Duration = Duration::from_secs(1);

/// What a read came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A version that may be there.
    Right,
    /// A version that was forgotten durably.
    Resurrected,
    /// A version that was gone before another was stored, by the same process.
    Replaced,
    /// A version that nobody had begun to put.
    Unborn,
}

/// What must be there.
#[derive(Debug, Clone, Copy)]
struct Expected {
    version: u64,
    /// When it was acknowledged; `None` is long ago.
    since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Page {
    /// The latest version whose put began; 0 is none.
    begun: u64,
    forgotten_below: u64,
    /// Holds for this process only: what was evicted may come back after a crash.
    replaced_below: u64,
    expected: Option<Expected>,
    /// A put ended unknown: until the next start nobody can say what comes of it.
    unknown: bool,
}

/// The lowest version that a read may return which begins now.
#[derive(Debug, Clone, Copy)]
pub struct Floor {
    forgotten_below: u64,
    replaced_below: u64,
}

/// A forget under way: what was put until now.
#[derive(Debug)]
pub struct Forgetting {
    below: u64,
}

/// All pages of one kind.
#[derive(Debug)]
pub struct Ledger {
    pages: Vec<Mutex<Page>>,
}

impl Ledger {
    /// Nothing was put yet.
    pub fn new(keys: usize) -> Ledger {
        Ledger { pages: (0..keys).map(|_| Mutex::default()).collect() }
    }

    /// Nothing in a page can be left half changed, so a panic elsewhere does not matter.
    fn page(&self, key: usize) -> MutexGuard<'_, Page> {
        self.pages[key].lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A version that was never put before; `None` while the page's state is unknown.
    pub fn begin_put(&self, key: usize) -> Option<u64> {
        let mut page = self.page(key);
        if page.unknown {
            return None;
        }
        page.begun += 1;
        Some(page.begun)
    }

    /// The version that should be there, to be put again.
    pub fn expected(&self, key: usize) -> Option<u64> {
        self.page(key).expected.map(|expected| expected.version)
    }

    /// The node said that it has this version.
    pub fn stored(&self, key: usize, version: u64) {
        let mut page = self.page(key);
        page.replaced_below = page.replaced_below.max(version);
        if page.expected.is_none_or(|expected| expected.version != version) {
            page.expected = Some(Expected { version, since: Some(Instant::now()) });
        }
    }

    /// The node said that it has other bytes than this new version. `false` if there can be none.
    pub fn refused(&self, key: usize, version: u64) -> bool {
        let page = self.page(key);
        page.forgotten_below.max(page.replaced_below).max(1) < version
    }

    /// A put ended without an answer.
    pub fn put_unknown(&self, key: usize) {
        let mut page = self.page(key);
        page.unknown = true;
        page.expected = None;
    }

    /// `None` while the page's state is unknown.
    pub fn begin_forget(&self, key: usize) -> Option<Forgetting> {
        let mut page = self.page(key);
        page.expected = None;
        (!page.unknown).then_some(Forgetting { below: page.begun + 1 })
    }

    /// The node said that it is forgotten durably.
    pub fn forgotten(&self, key: usize, forgetting: Forgetting) {
        let mut page = self.page(key);
        page.forgotten_below = page.forgotten_below.max(forgetting.below);
    }

    /// What a read that begins now may return.
    pub fn begin_read(&self, key: usize) -> Floor {
        let Page { forgotten_below, replaced_below, .. } = *self.page(key);
        Floor { forgotten_below, replaced_below }
    }

    /// Whether a read may return this version.
    pub fn judge(&self, key: usize, floor: Floor, version: u64) -> Verdict {
        if version == 0 || version > self.page(key).begun {
            return Verdict::Unborn;
        }
        if version < floor.forgotten_below {
            return Verdict::Resurrected;
        }
        if version < floor.replaced_below {
            return Verdict::Replaced;
        }
        Verdict::Right
    }

    /// A new process serves: what it has is what its first reads find.
    pub fn restarted(&self) {
        for key in 0..self.pages.len() {
            let mut page = self.page(key);
            page.replaced_below = 0;
            page.unknown = false;
        }
    }

    /// Whether page `key` must be there after a kill at `killed`, and in which version.
    pub fn must_have(&self, key: usize, killed: Instant) -> Option<u64> {
        let expected = self.page(key).expected?;
        let durable = expected.since.is_none_or(|since| killed.saturating_duration_since(since) > DURABLE_AFTER);
        durable.then_some(expected.version)
    }

    /// What the first read after a start found. It came from the device, so it must be there from now on.
    pub fn found(&self, key: usize, version: Option<u64>) {
        self.page(key).expected = version.map(|version| Expected { version, since: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgotten_versions_may_not_return_and_later_ones_may() {
        let ledger = Ledger::new(1);
        let floor = ledger.begin_read(0);
        assert_eq!(ledger.judge(0, floor, 1), Verdict::Unborn);
        assert_eq!(ledger.begin_put(0), Some(1));
        ledger.stored(0, 1);
        let before = ledger.begin_read(0);
        let forgetting = ledger.begin_forget(0).unwrap();
        assert_eq!(ledger.judge(0, ledger.begin_read(0), 1), Verdict::Right, "not answered yet");
        ledger.forgotten(0, forgetting);
        assert_eq!(ledger.judge(0, before, 1), Verdict::Right, "the read began before");
        assert_eq!(ledger.judge(0, ledger.begin_read(0), 1), Verdict::Resurrected);
        assert!(!ledger.refused(0, ledger.begin_put(0).unwrap()), "nothing is there that could be other bytes");
        ledger.restarted();
        assert_eq!(ledger.judge(0, ledger.begin_read(0), 1), Verdict::Resurrected, "a restart changes nothing");
        assert_eq!(ledger.judge(0, ledger.begin_read(0), 2), Verdict::Right);
    }

    #[test]
    fn a_replaced_version_may_return_only_after_a_restart() {
        let ledger = Ledger::new(1);
        for version in 1..=2 {
            assert_eq!(ledger.begin_put(0), Some(version));
            ledger.stored(0, version);
        }
        assert_eq!(ledger.judge(0, ledger.begin_read(0), 1), Verdict::Replaced);
        ledger.restarted();
        assert_eq!(ledger.judge(0, ledger.begin_read(0), 1), Verdict::Right);
    }

    #[test]
    fn what_must_be_there_was_acknowledged_long_enough_before_the_kill() {
        let ledger = Ledger::new(1);
        ledger.begin_put(0);
        ledger.stored(0, 1);
        let now = Instant::now();
        assert_eq!(ledger.must_have(0, now), None);
        assert_eq!(ledger.must_have(0, now + DURABLE_AFTER * 2), Some(1));
        ledger.found(0, Some(1));
        assert_eq!(ledger.must_have(0, now), Some(1), "it was read from the device");
        ledger.put_unknown(0);
        assert_eq!((ledger.must_have(0, now), ledger.begin_put(0)), (None, None));
    }
}
