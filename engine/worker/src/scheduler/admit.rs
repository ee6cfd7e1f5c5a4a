//! Admission: reserves pages for requests, loads cached pages, and preempts requests when pages run
//! out.

use super::{Scheduler, SchedulerEvent};
use crate::load::{ComputeCost, FollowLimits, LoadJob, Loaded, load};
use crate::metrics::PageSource;
use crate::radix::RadixTree;
use crate::sequence::{RequestKind, RequestState, Sequence};
use larder_client::{NewPage, PutOutcome};
use larder_format::PageKey;
use larder_model::{KvPage, KvPool, SealedPage};
use prometheus_client::metrics::counter::Counter;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Slack beyond a load's own deadline before the scheduler abandons it. The store honours its
/// deadlines, so only a fault in the store client makes this expire.
const LOAD_GRACE: Duration = Duration::from_millis(500);

impl Scheduler {
    /// Reserves pages for queued requests, oldest first, and starts their loads. Stops at the first
    /// request that does not fit: a later one must not overtake it.
    ///
    /// Requests that wait for something else are overtaken. A peer with all its running places
    /// waits for its own requests to end. A preempted request has kept its place. At most one
    /// request whose prompt needs all logits is active.
    pub(super) fn admit(&mut self) {
        let mut has_whole = self.active.iter().any(Sequence::wants_prompt_logits);
        let mut at = 0;
        while let Some(next) = self.queue.get_mut(at) {
            let is_whole = next.wants_prompt_logits();
            let place = match is_whole && has_whole {
                true => None,
                false => next.running_place.take().or_else(|| self.running.of(next.peer).take(1)),
            };
            let Some(place) = place else {
                at += 1;
                continue;
            };
            let Some(mut sequence) = self.queue.remove(at) else { return };
            if !self.reserve(&mut sequence) {
                sequence.running_place = sequence.was_preempted().then_some(place);
                self.queue.insert(at, sequence);
                // Head-of-line blocking is intended: a smaller request must not starve a larger,
                // older one.
                return;
            }
            has_whole |= is_whole;
            sequence.queue_place = None;
            sequence.running_place = Some(place);
            sequence.times.admitted.get_or_insert_with(Instant::now);
            sequence.withhold(|key| self.withheld.contains(key));
            self.start_load(&mut sequence);
            self.active.push(sequence);
        }
    }

    /// Reserves all pages of a request or none; returns `false` if L1 has too few. Pages cached in
    /// L1 are shared, the rest come from the pool.
    fn reserve(&mut self, sequence: &mut Sequence) -> bool {
        let cacheable = sequence.cacheable_pages();
        let reads_l1 = sequence.cache.uses_l1() && sequence.reads_cached_pages();
        let cached = if reads_l1 { self.radix.match_prefix(&sequence.keys[..cacheable]) } else { Vec::new() };
        let needed = sequence.pages_to_reserve() - cached.len();
        let mut pages = Vec::with_capacity(needed);
        while pages.len() < needed {
            let Some(page) = allocate(&self.context.pool, &mut self.radix, &self.context.metrics.pages_evicted) else {
                // Dropping `pages` returns the partial reservation, so waiting requests cannot
                // starve each other.
                return false;
            };
            pages.push(page);
        }
        sequence.count_pages(PageSource::L1, cached.len());
        cached.into_iter().for_each(|page| sequence.pages.push_sealed(page));
        *sequence.pages.reserved_mut() = pages;
        true
    }

    /// Starts a background load of the pages that L1 lacks. A request with nothing to load becomes
    /// ready at once.
    fn start_load(&mut self, sequence: &mut Sequence) {
        let cacheable = sequence.cacheable_pages();
        let present = sequence.pages.next_page().unwrap_or(0);
        // A prefill puts into the store each page that the store lacks, so it looks up even those
        // that L1 holds.
        let wants_store = match &sequence.kind {
            RequestKind::Prefill(_) => cacheable > 0,
            RequestKind::Decode(_) => cacheable > present,
        };
        // Nothing to load: skip the round trip to the store.
        if !sequence.cache.uses_store() || !wants_store || !sequence.reads_cached_pages() {
            self.make_ready(sequence);
            return;
        }
        sequence.enter_loading();
        let (await_pages, reusable) = match &sequence.kind {
            RequestKind::Prefill(_) => (0, cacheable),
            RequestKind::Decode(output) => (output.await_pages, output.cached_pages.unwrap_or(cacheable)),
        };
        let reserved = sequence.pages.reserved_mut();
        let buffers = reserved.split_off(reserved.len() - (cacheable - present));
        let limits = self.context.limits;
        let now = Instant::now();
        // Waiting takes half of the remaining time at most. The other half is left to compute
        // missing pages.
        let follow_until = now + sequence.deadline.saturating_duration_since(now) / 2;
        let job = LoadJob {
            keys: sequence.keys[..cacheable].to_vec(),
            present,
            buffers,
            await_pages,
            reusable,
            load_timeout: limits.load_timeout.min(follow_until - now),
            follow: FollowLimits {
                until: follow_until,
                grace: limits.follow_grace,
                start: limits.follow_start_timeout,
                stall: limits.follow_stall_timeout,
                cost: self.compute_cost(),
            },
        };
        let store = self.context.store.clone();
        let sender = self.context.sender.clone();
        let id = sequence.id;
        sequence.loads += 1;
        let load_number = sequence.loads;
        let cancel = sequence.cancel.clone();
        let abandon_at = follow_until + LOAD_GRACE;
        self.context.tasks.spawn(async move {
            let load = tokio::time::timeout_at(abandon_at.into(), load(&*store, job));
            let event = tokio::select! {
                loaded = load => SchedulerEvent::Loaded { id, load: load_number, loaded: loaded.unwrap_or_default() },
                // A cancelled request needs no result, but must give its pages back: wake the
                // thread.
                () = cancel.cancelled() => SchedulerEvent::Wake,
            };
            // Sending fails only after the scheduler thread has ended.
            let _ = sender.send_async(event).await;
        });
    }

    /// Estimates the time to compute pages here and now, from the measured speed.
    fn compute_cost(&self) -> ComputeCost {
        let pending: usize = self.active.iter().filter(|s| s.is_ready()).map(|s| s.pending()).sum();
        // Out of range only for a speed of 0: the limits of the follow bound the wait then.
        let time = |tokens: usize| Duration::try_from_secs_f64(tokens as f64 / self.prefill_tokens_per_second);
        let time = |tokens| time(tokens).unwrap_or(Duration::MAX);
        ComputeCost { backlog: time(pending), page: time(self.context.limits.step.page_tokens) }
    }

    /// Applies the result of a load and makes the request ready. Ignores a result whose request has
    /// ended or was preempted.
    pub(super) fn finish_load(&mut self, id: u64, load: u64, loaded: Loaded) {
        // The request may have ended while its load ran. Dropping the result frees its pages.
        let Some(at) = self.active.iter().position(|s| s.id == id && s.loads == load && !s.is_ready()) else {
            return;
        };
        // Before the request leaves `active`: damage sends it back to the queue.
        if loaded.answered && self.discard_damaged_copies(at, loaded.in_store) {
            return;
        }
        let mut sequence = self.active.remove(at);
        let present = sequence.pages.next_page().unwrap_or(0);
        // Without an answer from the store, no page is known to be missing.
        if loaded.answered && matches!(sequence.kind, RequestKind::Prefill(_)) {
            let copies = self.put_copies(&sequence, loaded.in_store..present);
            if let RequestKind::Prefill(output) = &mut sequence.kind {
                output.commits.extend(copies);
            }
        }
        for page in loaded.pages {
            sequence.count_pages(page.source, 1);
            sequence.pages.add_loaded(page.index, Arc::new(page.page));
        }
        sequence.pages.reserved_mut().extend(loaded.unused);
        self.make_ready(&mut sequence);
        // The same position: `active` stays in order of admission.
        self.active.insert(at, sequence);
    }

    /// Verifies the pages that L1 holds and the store lacks, because they are about to be put. If
    /// one is damaged, drops it, queues the request again and returns `true`.
    fn discard_damaged_copies(&mut self, at: usize, in_store: usize) -> bool {
        let sequence = &self.active[at];
        if !matches!(sequence.kind, RequestKind::Prefill(_)) {
            return false;
        }
        let present = sequence.pages.next_page().unwrap_or(0);
        let is_damaged = |&index: &usize| sequence.pages.sealed(index).is_some_and(|page| page.verify().is_err());
        let Some(index) = (in_store..present).find(is_damaged) else { return false };
        let id = sequence.id;
        let key = sequence.keys[index];
        self.discard_damaged(&key);
        // If the page has left L1 already, nothing has queued its last user yet.
        self.preempt(id);
        true
    }

    /// Puts pages again that the store evicted and L1 still holds. The caller has verified them. If
    /// the store refuses a page, because it may have been forgotten, it leaves L1.
    fn put_copies(&self, sequence: &Sequence, indices: Range<usize>) -> Vec<JoinHandle<PutOutcome>> {
        let shareable = indices.filter(|&index| sequence.is_shareable(index));
        let copies = shareable.filter_map(|index| Some((index, sequence.pages.sealed(index)?)));
        copies.map(|(index, page)| self.put_copy(sequence.new_page(index), page, 0)).collect()
    }

    /// Returns `true` if L1 holds this content of a page, no forget of the page is in progress, and
    /// the store would not refuse the put for want of knowledge. After a restart of its node, the
    /// page stays in L1 for later requests.
    pub(super) fn may_put_again(&self, key: &PageKey, content: &Arc<SealedPage>) -> bool {
        let store = &self.context.store;
        let is_judged = |origin| store.can_judge_copy(key, origin) != Some(false);
        !self.withheld.contains(key)
            && self.radix.peek(key).is_some_and(|cached| Arc::ptr_eq(cached, content))
            && content.copy_origin().is_none_or(is_judged)
    }

    /// Puts a page of L1 again, after `attempts` puts without success. The caller has verified it.
    pub(super) fn put_copy(&self, page: NewPage, content: &Arc<SealedPage>, attempts: u32) -> JoinHandle<PutOutcome> {
        let key = page.key;
        let put = self.context.publisher.put_copy(page, content, attempts);
        let sender = self.context.sender.clone();
        self.context.tasks.spawn(async move {
            // A put whose task failed counts as lost.
            let outcome = put.await.unwrap_or(PutOutcome::Lost);
            if outcome == PutOutcome::Refused {
                tracing::warn!(%key, "the store has other bytes for a page of L1; check the engines' numerics");
            }
            if matches!(outcome, PutOutcome::Refused | PutOutcome::Forgotten) {
                // Sending fails only after the scheduler thread has ended.
                let _ = sender.send_async(SchedulerEvent::Refused(key)).await;
            }
            outcome
        })
    }

    fn make_ready(&mut self, sequence: &mut Sequence) {
        sequence.times.loaded.get_or_insert_with(Instant::now);
        sequence.state.enter(RequestState::Waiting);
    }

    /// Advances a request over pages that exist already: loaded for it, or computed by another
    /// request meanwhile.
    pub(super) fn fill_from_cache(radix: &mut RadixTree<SealedPage>, sequence: &mut Sequence) {
        let uses_l1 = sequence.cache.uses_l1();
        let cacheable = sequence.cacheable_pages();
        while let Some(index) = sequence.pages.next_page().filter(|&index| index < cacheable) {
            let key = sequence.keys[index];
            let page = match sequence.pages.take_loaded(index) {
                Some(page) if uses_l1 && sequence.is_shareable(index) => {
                    radix.insert(key, parent_key(&sequence.keys, index), page)
                }
                Some(page) => page,
                None => match (uses_l1 && sequence.reads_cached_pages()).then(|| radix.get(&key)).flatten() {
                    Some(page) => {
                        sequence.count_pages(PageSource::L1, 1);
                        page
                    }
                    None => break,
                },
            };
            // The page is complete without this put. Dropping the put aborts it.
            sequence.puts.remove(&index);
            sequence.pages.push_sealed(page);
        }
        let target = sequence.pages_to_reserve() * sequence.page_tokens();
        sequence.pages.trim_reserved(target);
    }

    /// Preempts the youngest ready request that arrived after `id`. Returns `false` if there is
    /// none.
    pub(super) fn preempt_youngest_after(&mut self, id: u64) -> bool {
        let younger = self.active.iter().filter(|s| s.is_ready() && s.id > id).map(|s| s.id);
        let Some(victim) = younger.max() else { return false };
        self.preempt(victim);
        true
    }

    /// Takes all pages from a request and queues it again. It keeps the tokens generated so far.
    pub(super) fn preempt(&mut self, id: u64) {
        let Some(at) = self.active.iter().position(|s| s.id == id) else { return };
        let mut sequence = self.active.remove(at);
        tracing::debug!(request = %sequence.request_id, "preempted the request; it waits for pages again");
        self.context.metrics.preemptions.inc();
        sequence.preempt();
        // Queue order is arrival order, so the request overtakes only younger ones.
        let at = self.queue.iter().position(|s| s.id > id).unwrap_or(self.queue.len());
        self.queue.insert(at, sequence);
    }
}

pub(super) fn parent_key(keys: &[PageKey], index: usize) -> Option<PageKey> {
    index.checked_sub(1).map(|before| keys[before])
}

/// Returns `false` for pages that the store lacks and that can be put again.
pub(super) fn may_leave(page: &SealedPage) -> bool {
    page.origin().is_some() || page.copy_origin().is_none()
}

/// Takes a page from the pool. Evicts the least recently used cached page if the pool is empty.
pub(super) fn allocate(pool: &Arc<KvPool>, radix: &mut RadixTree<SealedPage>, evicted: &Counter) -> Option<KvPage> {
    loop {
        if let Some(page) = pool.allocate() {
            return Some(page);
        }
        // More than once only if a scrub or a commit holds the evicted page at this moment.
        if radix.evict(1, may_leave) == 0 {
            return None;
        }
        evicted.inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{CacheMode, Role};
    use crate::metrics::Metrics;
    use crate::request_memory::{RequestBudget, RequestSize};
    use crate::scheduler::running_places;
    use crate::sequence::{PrefillOutput, SequenceParams};
    use larder_format::MAX_TOKEN_IDS;
    use larder_http::{PeerAddress, PeerBudget, PeerCharge};
    use tokio::sync::oneshot;
    use tokio_util::sync::CancellationToken;

    fn sequence() -> Sequence {
        sequence_of(4, 4)
    }

    /// Sequence of so many tokens.
    fn sequence_of(tokens: usize, page_tokens: usize) -> Sequence {
        let peer = PeerAddress::default();
        let size = RequestSize { body_bytes: 100, tokens, prompt_logprobs: None };
        let params = SequenceParams {
            id: 1,
            peer,
            request_id: "request".into(),
            cache: CacheMode::All,
            tokens: vec![1; tokens],
            kind: RequestKind::Prefill(PrefillOutput { reply: oneshot::channel().0, commits: Vec::new() }),
            deadline: Instant::now(),
            cancel: CancellationToken::new(),
            queue_place: PeerBudget::new(1).of(peer).take(1).unwrap(),
            memory: RequestBudget::new(1 << 20, 1 << 20, page_tokens as u32).take(peer, size).unwrap(),
        };
        Sequence::new(params, page_tokens, Arc::new(Metrics::new(Role::Prefill)))
    }

    #[test]
    fn pages_to_put_have_only_token_ids_that_a_store_takes() {
        for (page_tokens, expected) in [(4, 4), (MAX_TOKEN_IDS, MAX_TOKEN_IDS), (MAX_TOKEN_IDS + 1, 0)] {
            let sequence = sequence_of(2 * page_tokens, page_tokens);
            assert_eq!(sequence.new_page(1).token_ids, vec![1; expected]);
        }
    }

    /// Its peer has more than its part by now, so it would get no other place before most of the
    /// peer's requests end. The client of a generation has read its first tokens.
    #[test]
    fn preempted_request_keeps_its_running_place() {
        let running = running_places(4);
        let [crowd, other] = [1_u8, 2].map(|last| running.of(PeerAddress::of([10, 0, 0, last].into())));
        let mut places: Vec<PeerCharge> = std::iter::from_fn(|| crowd.take(1)).collect();
        let of_other: Vec<PeerCharge> = std::iter::from_fn(|| other.take(1)).collect();
        assert_eq!((places.len(), of_other.len(), running.free()), (6, 2, 0));
        let mut preempted = sequence();
        preempted.running_place = places.pop();
        preempted.preempt();
        assert_eq!(running.free(), 0);
        drop(preempted);
        assert_eq!(running.free(), 1);
        assert!(crowd.take(1).is_none(), "it would wait");
    }
}
