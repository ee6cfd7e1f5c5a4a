//! Giving out pages: reserving them for a request, taking them back, and bringing what is cached.

use super::{Event, Scheduler};
use crate::metrics::PageSource;
use crate::radix::Radix;
use crate::sequence::{Sequence, State, Work};
use crate::transfer::{self, LoadJob, Loaded};
use larder_format::PageKey;
use larder_model::{KvPage, KvPool};
use prometheus_client::metrics::counter::Counter;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time beyond its own limits after which a load is given up: the store answers by its deadlines, so this never happens
/// unless something is broken.
const LOAD_OVERRUN: Duration = Duration::from_millis(500);

impl Scheduler {
    /// Reserves pages for requests in the queue, oldest first, and starts to load them.
    pub(super) fn admit(&mut self) {
        let active_max = 2 * self.parts.limits.step.max_batch;
        while self.active.len() < active_max
            && let Some(mut sequence) = self.queue.pop_front()
        {
            if !self.reserve(&mut sequence) {
                self.queue.push_front(sequence);
                return;
            }
            sequence.queue_slot = None;
            sequence.times.admitted.get_or_insert_with(Instant::now);
            self.start_load(&mut sequence);
            self.active.push(sequence);
        }
    }

    /// All pages or none: what is in L1 is shared, the rest reserved.
    fn reserve(&mut self, sequence: &mut Sequence) -> bool {
        let cacheable = sequence.cacheable_pages();
        let cached = match sequence.cache.uses_l1() {
            true => self.radix.match_prefix(&sequence.keys[..cacheable]),
            false => Vec::new(),
        };
        let needed = sequence.pages_to_reserve() - cached.len();
        let mut pages = Vec::with_capacity(needed);
        while pages.len() < needed {
            let Some(page) = allocate(&self.parts.pool, &mut self.radix, &self.parts.metrics.pages_evicted) else {
                return false;
            };
            pages.push(page);
        }
        sequence.count_pages(PageSource::L1, cached.len());
        cached.into_iter().for_each(|page| sequence.pages.push_sealed(page));
        *sequence.pages.spare_mut() = pages;
        true
    }

    /// Looks for the rest in the store, in the background; without anything to look for, the request is ready.
    fn start_load(&mut self, sequence: &mut Sequence) {
        let cacheable = sequence.cacheable_pages();
        let present = sequence.pages.next_whole().unwrap_or(0);
        // A prefill must know what the store lacks even if L1 has it all.
        let wants_store = match &sequence.work {
            Work::Prefill(_) => cacheable > 0,
            Work::Decode(_) => cacheable > present,
        };
        if !sequence.cache.uses_store() || !wants_store {
            self.make_ready(sequence);
            return;
        }
        sequence.enter_loading();
        let await_pages = match &sequence.work {
            Work::Prefill(_) => 0,
            Work::Decode(work) => work.await_pages,
        };
        let spare = sequence.pages.spare_mut();
        let buffers = spare.split_off(spare.len() - (cacheable - present));
        let limits = self.parts.limits;
        let now = Instant::now();
        // The other half of the time is left for computing what does not come.
        let follow_until = now + sequence.deadline.saturating_duration_since(now) / 2;
        let job = LoadJob {
            keys: sequence.keys[..cacheable].to_vec(),
            present,
            buffers,
            await_pages,
            load_limit: limits.load_limit.min(follow_until - now),
            follow_until,
            follow_grace: limits.follow_grace,
            follow_limit: limits.follow_limit,
        };
        let (store, sender) = (self.parts.store.clone(), self.parts.sender.clone());
        let (id, cancel) = (sequence.id, sequence.cancel.clone());
        let given_up_at = follow_until + LOAD_OVERRUN;
        self.parts.tasks.spawn(async move {
            let load = tokio::time::timeout_at(given_up_at.into(), transfer::load(&*store, job));
            let event = tokio::select! {
                loaded = load => Event::Loaded { id, loaded: loaded.unwrap_or_default() },
                () = cancel.cancelled() => Event::Nudge,
            };
            let _ = sender.send_async(event).await;
        });
    }

    /// Takes in what came.
    pub(super) fn loaded(&mut self, id: u64, loaded: Loaded) {
        let Some(at) = self.active.iter().position(|s| s.id == id && !s.is_ready()) else {
            return;
        };
        let mut sequence = self.active.remove(at);
        let present = sequence.pages.next_whole().unwrap_or(0);
        // Without the store's word nothing is known to be missing.
        if loaded.answered
            && let Work::Prefill(work) = &mut sequence.work
        {
            // L1 has what the store lacks, e.g. because it restarted empty.
            for page in loaded.in_store..present {
                if let Some(payload) = sequence.pages.sealed(page) {
                    let put = self.parts.publisher.put_sealed(&sequence.keys, page, payload.as_ref());
                    work.commits.push(put);
                }
            }
        }
        for page in loaded.pages {
            sequence.count_pages(page.source, 1);
            sequence.pages.put_ahead(page.index, Arc::new(page.page));
        }
        sequence.pages.spare_mut().extend(loaded.spare);
        self.make_ready(&mut sequence);
        self.active.insert(at, sequence);
    }

    fn make_ready(&mut self, sequence: &mut Sequence) {
        sequence.times.loaded.get_or_insert_with(Instant::now);
        sequence.state.enter(State::Waiting);
    }

    /// Fills the next places of a request with pages that are there already: its own, or what others computed meanwhile.
    pub(super) fn fill_from_cache(radix: &mut Radix<KvPage>, sequence: &mut Sequence) {
        let uses_l1 = sequence.cache.uses_l1();
        let cacheable = sequence.cacheable_pages();
        while let Some(index) = sequence.pages.next_whole().filter(|&index| index < cacheable) {
            let key = sequence.keys[index];
            let page = match sequence.pages.take_ahead(index) {
                Some(page) if uses_l1 => radix.insert(key, parent(&sequence.keys, index), page),
                Some(page) => page,
                None => match uses_l1.then(|| radix.get(&key)).flatten() {
                    Some(page) => {
                        sequence.count_pages(PageSource::L1, 1);
                        page
                    }
                    None => break,
                },
            };
            sequence.puts.remove(&index);
            sequence.pages.push_sealed(page);
        }
        let target = sequence.pages_to_reserve() * sequence.page_tokens();
        sequence.pages.trim_spare(target);
    }

    /// Makes the youngest ready request that came after `id` give its pages back; `false` if there is none.
    pub(super) fn preempt_youngest_after(&mut self, id: u64) -> bool {
        let younger = self.active.iter().filter(|s| s.is_ready() && s.id > id).map(|s| s.id);
        let Some(victim) = younger.max() else { return false };
        self.put_back(victim);
        true
    }

    /// Makes a request give its pages back and wait for new ones.
    pub(super) fn put_back(&mut self, id: u64) {
        let Some(at) = self.active.iter().position(|s| s.id == id) else { return };
        let mut sequence = self.active.remove(at);
        tracing::debug!(request = %sequence.request_id, "put back for want of pages");
        self.parts.metrics.preemptions.inc();
        sequence.preempt();
        // In its old place: not before those that are older.
        let at = self.queue.iter().position(|s| s.id > id).unwrap_or(self.queue.len());
        self.queue.insert(at, sequence);
    }
}

/// Key of the page before page `index`.
pub(super) fn parent(keys: &[PageKey], index: usize) -> Option<PageKey> {
    index.checked_sub(1).map(|before| keys[before])
}

/// A free page, given up by the tree if need be.
pub(super) fn allocate(pool: &Arc<KvPool>, radix: &mut Radix<KvPage>, evicted: &Counter) -> Option<KvPage> {
    if let Some(page) = pool.allocate() {
        return Some(page);
    }
    evicted.inc_by(radix.evict(1) as u64);
    pool.allocate()
}
