//! Oracle of the crash loop: knows the versions that a read may return, and those that must
//! survive.
//!
//! Invariants:
//! - One writer at a time changes a page, and its versions grow.
//! - A read is valid if its version was put before the read ended, and was neither deleted nor
//!   replaced before the read began.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadResult {
    Valid,
    Resurrected,
    /// A version that the same process had already replaced by a later one. After a crash such a
    /// version is valid again.
    Replaced,
    NeverPut,
}

#[derive(Debug, Clone, Copy)]
struct Expected {
    version: u64,
    /// Time of the acknowledgement. `None` if the version was read from L3.
    since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Page {
    begun: u64,
    forgotten_below: u64,
    /// Valid for the current process only: after a crash an evicted version may return from L3.
    replaced_below: u64,
    expected: Option<Expected>,
    /// A put ended without an answer. The page's version stays unknown until the next start.
    unknown: bool,
}

/// Lowest versions that a read starting now may return. Two bounds, because a replaced version may
/// return after a crash and a deleted one must not.
#[derive(Debug, Clone, Copy)]
pub struct ReadBounds {
    forgotten_below: u64,
    replaced_below: u64,
}

#[derive(Debug)]
pub struct PendingForget {
    below: u64,
}

/// Expected state of all pages of one kind. Each page has one writer and any number of readers, and
/// a lock of its own.
#[derive(Debug)]
pub struct Oracle {
    pages: Vec<Mutex<Page>>,
}

impl Oracle {
    pub fn new(keys: usize) -> Oracle {
        Oracle { pages: (0..keys).map(|_| Mutex::default()).collect() }
    }

    // No update leaves a page half changed, so a panic while the lock is held does no harm.
    fn page(&self, key: usize) -> MutexGuard<'_, Page> {
        self.pages[key].lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn begin_put(&self, key: usize) -> Option<u64> {
        let mut page = self.page(key);
        if page.unknown {
            return None;
        }
        page.begun += 1;
        Some(page.begun)
    }

    pub fn expected(&self, key: usize) -> Option<u64> {
        self.page(key).expected.map(|expected| expected.version)
    }

    pub fn stored(&self, key: usize, version: u64) {
        let mut page = self.page(key);
        page.replaced_below = page.replaced_below.max(version);
        if page.expected.is_none_or(|expected| expected.version != version) {
            page.expected = Some(Expected { version, since: Some(Instant::now()) });
        }
    }

    /// Records that the node refused this version because the page exists with other bytes. Returns
    /// `false` if the page cannot exist.
    pub fn refused(&self, key: usize, version: u64) -> bool {
        let page = self.page(key);
        page.forgotten_below.max(page.replaced_below).max(1) < version
    }

    pub fn put_unknown(&self, key: usize) {
        let mut page = self.page(key);
        page.unknown = true;
        page.expected = None;
    }

    /// Starts a deletion. Returns `None` while the page's version is unknown: a put that is still
    /// in flight could then follow the deletion.
    pub fn begin_forget(&self, key: usize) -> Option<PendingForget> {
        let mut page = self.page(key);
        page.expected = None;
        (!page.unknown).then_some(PendingForget { below: page.begun + 1 })
    }

    pub fn forgotten(&self, key: usize, pending: PendingForget) {
        let mut page = self.page(key);
        page.forgotten_below = page.forgotten_below.max(pending.below);
    }

    /// Returns the bounds for a read that starts now. The caller takes them before it sends the
    /// read: a later write may raise them meanwhile.
    pub fn begin_read(&self, key: usize) -> ReadBounds {
        let Page { forgotten_below, replaced_below, .. } = *self.page(key);
        ReadBounds { forgotten_below, replaced_below }
    }

    pub fn check_version(&self, key: usize, bound: ReadBounds, version: u64) -> ReadResult {
        if version == 0 || version > self.page(key).begun {
            return ReadResult::NeverPut;
        }
        if version < bound.forgotten_below {
            return ReadResult::Resurrected;
        }
        if version < bound.replaced_below {
            return ReadResult::Replaced;
        }
        ReadResult::Valid
    }

    pub fn restarted(&self) {
        for key in 0..self.pages.len() {
            let mut page = self.page(key);
            page.replaced_below = 0;
            page.unknown = false;
        }
    }

    /// Returns the version of page `key` that must have survived the kill of a node that had no
    /// write in flight at `flushed`. `None` if no version is expected, or if its put was
    /// acknowledged later.
    pub fn must_have(&self, key: usize, flushed: Option<Instant>) -> Option<u64> {
        let expected = self.page(key).expected?;
        let is_durable = expected.since.is_none_or(|since| flushed.is_some_and(|flushed| since < flushed));
        is_durable.then_some(expected.version)
    }

    /// Records the first read after a start. The version came from L3, so it must survive later
    /// kills.
    pub fn found(&self, key: usize, version: Option<u64>) {
        self.page(key).expected = version.map(|version| Expected { version, since: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn deleted_versions_must_not_return() {
        let oracle = Oracle::new(1);
        let bound = oracle.begin_read(0);
        assert_eq!(oracle.check_version(0, bound, 1), ReadResult::NeverPut);
        assert_eq!(oracle.begin_put(0), Some(1));
        oracle.stored(0, 1);
        let before = oracle.begin_read(0);
        let pending = oracle.begin_forget(0).unwrap();
        assert_eq!(
            oracle.check_version(0, oracle.begin_read(0), 1),
            ReadResult::Valid,
            "the deletion is not acknowledged yet"
        );
        oracle.forgotten(0, pending);
        assert_eq!(oracle.check_version(0, before, 1), ReadResult::Valid, "the read began before the deletion");
        assert_eq!(oracle.check_version(0, oracle.begin_read(0), 1), ReadResult::Resurrected);
        assert!(!oracle.refused(0, oracle.begin_put(0).unwrap()), "no other version can be stored");
        oracle.restarted();
        assert_eq!(
            oracle.check_version(0, oracle.begin_read(0), 1),
            ReadResult::Resurrected,
            "a restart does not bring it back"
        );
        assert_eq!(oracle.check_version(0, oracle.begin_read(0), 2), ReadResult::Valid);
    }

    #[test]
    fn replaced_version_may_return_only_after_restart() {
        let oracle = Oracle::new(1);
        for version in 1..=2 {
            assert_eq!(oracle.begin_put(0), Some(version));
            oracle.stored(0, version);
        }
        assert_eq!(oracle.check_version(0, oracle.begin_read(0), 1), ReadResult::Replaced);
        oracle.restarted();
        assert_eq!(oracle.check_version(0, oracle.begin_read(0), 1), ReadResult::Valid);
    }

    #[test]
    fn version_must_survive_a_kill_if_it_was_acknowledged_before_the_node_was_flushed() {
        let oracle = Oracle::new(1);
        let before = Some(Instant::now());
        oracle.begin_put(0);
        oracle.stored(0, 1);
        assert_eq!((oracle.must_have(0, None), oracle.must_have(0, before)), (None, None));
        let after = Some(Instant::now() + Duration::from_nanos(1));
        assert_eq!(oracle.must_have(0, after), Some(1));
        oracle.found(0, Some(1));
        assert_eq!(oracle.must_have(0, None), Some(1), "it was read from L3");
        oracle.put_unknown(0);
        assert_eq!((oracle.must_have(0, after), oracle.begin_put(0)), (None, None));
    }
}
