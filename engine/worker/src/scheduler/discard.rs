//! Pages that leave L1 before their eviction: forgotten, damaged, refused by the store, or suspect.
//!
//! A *suspect* page has intact checksums, but its values may be wrong, because another client may
//! have put it. The engine looks for such pages when a pass gives values that are not finite (NaN
//! or infinite).
//!
//! Invariants:
//! - From the answer to a forget until the end of its hold, the engine neither caches the forgotten
//!   pages in L1 nor opens puts of them.
//! - A sequence that held a forgotten page may finish with it. It shares that page and all later
//!   ones with no other sequence, not even after the hold.
//! - No sequence computes from a page that is known to be damaged or suspect. A device that reads
//!   wrong bytes of a page ends the step before it computes with them.
//! - A request whose pass gave values that are not finite fails. It gets no token from them.

use super::{RETRY_AFTER_MS, Scheduler};
use crate::api::{ApiError, ErrorCode};
use crate::commits::Commits;
use crate::forgets::ForgottenKeys;
use crate::metrics::RequestOutcome;
use crate::sequence::Sequence;
use crate::store::PageStore;
use larder_format::{PageKey, PageOrigin};
use larder_model::SealedPage;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time for the store to forget suspect pages. The failed request waits for it, so that a
/// retry finds the pages gone.
const FORGET_SUSPECTS_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum part of it to wait for commits of suspect pages, which could store a page after the
/// forget.
const COMMITS_WAIT: Duration = Duration::from_secs(1);

/// Maximum number of pages with wrong bytes on the device that a request survives.
const DAMAGED_COPIES_MAX: u32 = 2;

/// Keys that the engine must not cache or put for now.
#[derive(Default)]
pub(super) struct WithheldKeys {
    /// At most [`HOLDS_MAX`](crate::forgets::HOLDS_MAX): each set has a place of the budget.
    holds: Vec<(Instant, Arc<ForgottenKeys>)>,
}

impl WithheldKeys {
    /// Begins a hold, or ends one hold of the same keys if `time` is zero.
    fn hold(&mut self, keys: Arc<ForgottenKeys>, time: Duration, now: Instant) {
        self.expire(now);
        if !time.is_zero() {
            self.holds.push((now + time, keys));
            return;
        }
        // One only: another router may hold the same keys.
        if let Some(at) = self.holds.iter().position(|(_, held)| held.get() == keys.get()) {
            self.holds.swap_remove(at);
        }
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.holds.retain(|(until, _)| now < *until);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.holds.is_empty()
    }

    pub(super) fn contains(&self, key: &PageKey) -> bool {
        self.holds.iter().any(|(_, keys)| keys.get().contains(key))
    }
}

impl Scheduler {
    /// Drops pages from L1 and aborts their open puts. For `hold`, the engine then treats these
    /// keys as not cacheable. Returns the number of pages dropped, those after the named ones
    /// included.
    pub(super) fn forget(&mut self, keys: &Arc<ForgottenKeys>, hold: Duration) -> usize {
        self.withheld.hold(keys.clone(), hold, Instant::now());
        let keys = keys.get();
        for sequence in &mut self.active {
            sequence.withhold(|key| keys.contains(key));
        }
        let dropped = keys.iter().map(|key| self.radix.remove(key)).sum();
        self.context.metrics.l1.pages_forgotten.inc_by(dropped as u64);
        dropped
    }

    /// Marks sequences that reach withheld keys, by admission or by generating.
    pub(super) fn withhold_new_keys(&mut self) {
        self.withheld.expire(Instant::now());
        if self.withheld.is_empty() {
            return;
        }
        for sequence in &mut self.active {
            // A step adds at most one key to a sequence. Admission has looked at the others.
            if sequence.keys.last().is_some_and(|key| self.withheld.contains(key)) {
                sequence.withhold_from(sequence.keys.len() - 1);
            }
        }
    }

    /// Drops a page whose bytes do not match their checksums, with all pages after it. Requests
    /// that use the page start again without it. Does nothing if L1 has an intact page by now.
    pub(super) fn discard_damaged(&mut self, key: &PageKey) {
        let Some(page) = self.radix.peek(key).cloned() else { return };
        let Err(mismatch) = page.verify() else { return };
        tracing::error!(%key, %mismatch, "L1 page damaged in memory: dropped; check the machine's memory [LRD0408]");
        self.context.metrics.l1.pages_corrupt.inc();
        self.radix.remove(key);
        self.preempt_users(|s| {
            let at = s.keys.iter().position(|own| own == key);
            at.is_some_and(|at| uses(s, at, &page))
        });
    }

    /// Drops page `index` of a request, of which the device has read other bytes than its checksums
    /// say. The requests that use it start again without it. The other requests of the step compute
    /// it again.
    ///
    /// A request that meets such pages repeatedly computes all its pages itself, and then fails:
    /// the device cannot read.
    pub(super) fn discard_copy(&mut self, id: u64, index: usize) {
        let Some(at) = self.active.iter().position(|s| s.id == id) else { return };
        let sequence = &mut self.active[at];
        sequence.damaged_copies += 1;
        let has_failed = sequence.damaged_copies > DAMAGED_COPIES_MAX;
        let key = sequence.keys.get(index).copied();
        let page = sequence.pages.sealed(index).cloned();
        let is_intact_here = page.as_ref().is_none_or(|page| page.verify().is_ok());
        tracing::error!(request = %sequence.request_id, ?key, index, is_intact_here, "the device read other bytes of an L1 page than its checksums say: dropped; check the machine's memory, or the device if the page is intact here [LRD0408]");
        self.context.metrics.l1.pages_corrupt.inc();
        if let (Some(key), Some(page)) = (key, page) {
            // L1 may have another copy of the page by now.
            if self.radix.peek(&key).is_some_and(|cached| Arc::ptr_eq(cached, &page)) {
                self.radix.remove(&key);
            }
            self.preempt_users(|s| {
                let at = s.keys.iter().position(|own| *own == key);
                at.is_some_and(|at| uses(s, at, &page))
            });
        }
        // If it has no key or seal, nothing has queued its only user yet.
        self.preempt(id);
        if has_failed
            && let Some(at) = self.queue.iter().position(|s| s.id == id)
            && let Some(failed) = self.queue.remove(at)
        {
            let message = "the device of the engine read wrong bytes repeatedly; use another engine";
            failed.fail(ApiError::new(ErrorCode::Internal, message), RequestOutcome::Failed);
        }
    }

    /// Preempts the requests that use a discarded page: their later pages were computed from it.
    fn preempt_users(&mut self, is_user: impl Fn(&Sequence) -> bool) {
        let users: Vec<u64> = self.active.iter().filter(|s| is_user(s)).map(|s| s.id).collect();
        for id in users {
            self.preempt(id);
        }
    }

    /// Fails a request whose pass gave values that are not finite. Drops its suspect pages from L1
    /// and has the store forget them. Other requests that use them start again. Without a suspect
    /// page, the model itself is at fault.
    pub(super) fn fail_unusable(&mut self, id: u64) {
        // Gone if it used a suspect page of a request before it: it starts again without the page.
        let Some(at) = self.active.iter().position(|s| s.id == id) else { return };
        let mut sequence = self.active.remove(at);
        let suspects = find_suspects(&sequence);
        // Returned before the wait below.
        sequence.pages.clear();
        sequence.puts.clear();
        sequence.running_place = None;
        if suspects.is_empty() {
            tracing::error!(request = %sequence.request_id, "the model computed values that are not finite; check its weights [LRD0410]");
            let message = "the model computed values that are not finite for this prompt; its weights may be damaged";
            sequence.fail(ApiError::new(ErrorCode::Internal, message), RequestOutcome::Failed);
            return;
        }
        self.context.metrics.suspect_pages.inc_by(suspects.len() as u64);
        for (index, page) in &suspects {
            // L1 may have another copy of the page by now.
            let key = &sequence.keys[*index];
            if self.radix.peek(key).is_some_and(|cached| Arc::ptr_eq(cached, page)) {
                self.radix.remove(key);
            }
        }
        self.preempt_users(|s| suspects.iter().any(|(index, page)| uses(s, *index, page)));
        let copies: Vec<(PageKey, Option<PageOrigin>)> =
            suspects.iter().map(|(index, page)| (sequence.keys[*index], page.origin())).collect();
        // The pages return to L1 before the wait.
        drop(suspects);
        self.context.tasks.spawn(forget_suspects(
            sequence,
            copies,
            self.context.store.clone(),
            self.context.publisher.commits().clone(),
        ));
    }

    /// Drops a page that the store refused as a copy: it may have been forgotten, or the store has
    /// other bytes. Not a warning: after a restart of a node, it refuses all copies from before.
    pub(super) fn discard_refused(&mut self, key: &PageKey) {
        let dropped = self.radix.remove(key);
        if dropped > 0 {
            tracing::debug!(%key, dropped, "dropped a page from L1 that the store refused as a copy");
            self.context.metrics.l1.pages_forgotten.inc_by(dropped as u64);
        }
    }
}

fn uses(sequence: &Sequence, index: usize, page: &Arc<SealedPage>) -> bool {
    sequence.pages.sealed(index).is_some_and(|own| Arc::ptr_eq(own, page))
}

/// Finds the pages, by index, that may have caused values that are not finite. These are the pages
/// that contain such values. Without any, finite values have overflowed. No value proves that, so
/// every used page from the first received one on is suspect: those after it were computed from it.
fn find_suspects(sequence: &Sequence) -> Vec<(usize, Arc<SealedPage>)> {
    let request = &sequence.request_id;
    let whole: Vec<(usize, Arc<SealedPage>)> =
        sequence.pages.whole_pages().map(|(index, page)| (index, page.clone())).collect();
    let proven: Vec<_> = whole.iter().filter(|(_, page)| !page.is_finite()).cloned().collect();
    for (index, page) in &proven {
        let key = &sequence.keys[*index];
        tracing::error!(%request, %key, origin = ?page.origin(), "page from the store has values that are not finite: dropped; find the client that put it [LRD0409]");
    }
    if !proven.is_empty() {
        return proven;
    }
    let is_used = |index: usize| sequence.pages.sealed(index).is_some();
    let received = whole.iter().filter(|(index, page)| page.is_received() && is_used(*index));
    let Some(first) = received.map(|(index, _)| *index).min() else { return Vec::new() };
    let suspects: Vec<_> = whole.into_iter().filter(|(index, _)| *index >= first).collect();
    let key = &sequence.keys[first];
    tracing::error!(%request, %key, pages = suspects.len(), "pages from the store led to values that are not finite: dropped this page and those after it; find the client that put them [LRD0409]");
    suspects
}

/// Has the store forget suspect pages, and fails the request that used them.
async fn forget_suspects(
    sequence: Sequence,
    copies: Vec<(PageKey, Option<PageOrigin>)>,
    store: Arc<dyn PageStore>,
    commits: Arc<Commits>,
) {
    let begin = Instant::now();
    let deadline = begin + FORGET_SUSPECTS_TIMEOUT;
    let count = copies.len();
    let keys: HashSet<PageKey> = copies.iter().map(|(key, _)| *key).collect();
    // A commit that takes longer is rather lost than slow: forget at least the other pages.
    let _ = tokio::time::timeout_at((begin + COMMITS_WAIT).into(), commits.wait_for(&keys)).await;
    let forget = tokio::time::timeout_at(deadline.into(), store.forget_copies(copies, deadline));
    let forgotten = forget.await.unwrap_or(0);
    tracing::info!(request = %sequence.request_id, suspects = count, forgotten, "asked the store to forget suspect pages");
    let message =
        format!("cached pages led to values that are not finite; {count} pages are dropped, so repeat the request");
    let error = ApiError { retry_after_ms: Some(RETRY_AFTER_MS), ..ApiError::new(ErrorCode::PagesUnusable, message) };
    sequence.fail(error, RequestOutcome::Failed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forgets::ForgetBudget;
    use larder_http::PeerAddress;

    #[test]
    fn hold_ends_with_its_time_or_its_release() {
        let mut withheld = WithheldKeys::default();
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let budget = ForgetBudget::new(100, 1);
        let forget = || Arc::new(budget.begin(PeerAddress::default(), vec![7], true).unwrap().keys());
        let [key, other] = [[7], [8]].map(|tokens| PageKey::chain(None, &tokens));
        withheld.hold(forget(), second, now);
        withheld.hold(forget(), second * 2, now);
        assert!(withheld.contains(&key) && !withheld.contains(&other));
        withheld.hold(forget(), Duration::ZERO, now);
        assert!(withheld.contains(&key), "another forget holds it still");
        withheld.expire(now + second * 2);
        assert!(withheld.is_empty());
    }
}
