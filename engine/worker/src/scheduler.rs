//! The scheduler thread: it owns L1 and decides which tokens each step computes. A [`Sequence`] is
//! a request inside the engine.
//!
//! Invariants:
//! - Only this thread allocates, shares and evicts pages of L1, and moves requests between states.
//!   A load task owns the reserved pages that it fills until it returns them. A finished prefill
//!   ends in a task that waits for its puts.
//! - The thread blocks on its event channel only. Tokio tasks talk to the store and to sockets, and
//!   report here.
//! - Requests reserve pages in order of arrival. When pages run out during a step, the youngest
//!   ready request is preempted in favour of an older one. The older one takes the freed pages in
//!   the same step, or in the next if it had no place in this one. So the oldest ready request
//!   always makes progress.
//! - Of more than two running places, no peer holds all: see `PeerBudget`. A preempted request
//!   keeps its place. A step divides its places and tokens fairly among peers: see `batch`.
//! - A finished request holds no page, no put and no place, whatever its outcome.
//!
//! Layout: this file is the main loop. `admit` reserves pages for queued requests, loads cached
//! pages, and preempts requests. `discard` drops pages that must not be used again. `step` reserves
//! pages for the chunks of one step and computes them.

mod admit;
mod discard;
mod step;

use crate::api::{ApiError, EngineState, ErrorCode};
use crate::batch::{RUNNING_PER_BATCH, StepLimits};
use crate::forgets::ForgottenKeys;
use crate::load::Loaded;
use crate::metrics::{Metrics, RequestOutcome};
use crate::publish::Publisher;
use crate::radix::RadixTree;
use crate::sequence::Sequence;
use crate::store::PageStore;
use discard::WithheldKeys;
use larder_client::{NewPage, PutOutcome};
use larder_format::PageKey;
use larder_http::PeerBudget;
use larder_model::{KvPool, Model, SealedPage};
use larder_runtime::lock::Mutex;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use step::LOGIT_ROWS_MAX;

/// Interval between admission attempts while requests wait for pages. Abandoned transfers return
/// their pages without an event, so the thread must poll for them.
const PAGE_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Longest sleep of the thread. It bounds the delay if a wake-up is lost, and is not a tuning
/// parameter.
const IDLE_SLEEP_MAX: Duration = Duration::from_secs(1);
/// Delay that a busy response asks the client to wait, in milliseconds. A few steps long: enough
/// for a queue place to become free.
pub(crate) const RETRY_AFTER_MS: u64 = 200;
/// Weight of the newest sample in the moving averages of `/v1/state`.
const EWMA_WEIGHT: f64 = 0.2;

/// Places for the requests that hold pages.
pub(crate) fn running_places(max_batch: usize) -> Arc<PeerBudget> {
    PeerBudget::new(max_batch.saturating_mul(RUNNING_PER_BATCH))
}

pub(crate) enum SchedulerEvent {
    Submit(Box<Sequence>),
    /// The load of request `id` finished. The scheduler ignores it if the request has ended.
    Loaded {
        id: u64,
        /// Number of the load within the request.
        load: u64,
        loaded: Loaded,
    },
    /// Drops pages from L1, and neither caches nor puts them for `hold`. The reply is the number of
    /// dropped pages.
    Forget {
        keys: Arc<ForgottenKeys>,
        hold: Duration,
        reply: oneshot::Sender<usize>,
    },
    /// Drops all cached pages of L1 that no request uses. The reply is their number.
    Flush {
        reply: oneshot::Sender<usize>,
    },
    /// Asks for up to `count` cached pages in the order of their keys, after `last`.
    Scrub {
        last: Option<PageKey>,
        count: usize,
        reply: oneshot::Sender<Vec<(PageKey, Weak<SealedPage>)>>,
    },
    /// A scrub found that the bytes of this page do not match their checksums.
    Damaged(PageKey),
    /// Puts a page again that the caller has just verified, if L1 still holds it. The reply yields
    /// the outcome.
    Republish {
        page: NewPage,
        content: Arc<SealedPage>,
        /// Puts of the page so far.
        attempts: u32,
        reply: oneshot::Sender<JoinHandle<PutOutcome>>,
    },
    /// The store refused a copy of this page from L1: it may have been forgotten, or differs.
    Refused(PageKey),
    Wake,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct SchedulerLimits {
    pub(crate) step: StepLimits,
    /// Limit of the wait for a followed prefill that shows a fault.
    pub(crate) follow_stall_timeout: Duration,
    /// Limit of the wait for the first part of a followed prefill.
    pub(crate) follow_start_timeout: Duration,
    /// Minimum patience with a followed prefill.
    pub(crate) follow_grace: Duration,
    /// Limit of the wait for L1 pages before the first admission.
    pub(crate) queue_timeout: Duration,
    /// Limit for the lookup and the reads of one request's pages.
    pub(crate) load_timeout: Duration,
}

pub(crate) struct SchedulerContext {
    pub(crate) model: Arc<Model>,
    pub(crate) pool: Arc<KvPool>,
    pub(crate) store: Arc<dyn PageStore>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) limits: SchedulerLimits,
    /// Prompt tokens per second, as measured at start.
    pub(crate) tokens_per_second: f64,
    pub(crate) runtime: Handle,
    pub(crate) tasks: TaskTracker,
    /// Stops the thread. The canceller must also send [`SchedulerEvent::Wake`], or the thread may
    /// sleep on.
    pub(crate) stop: CancellationToken,
    /// Snapshot for `/v1/state`, rewritten once per loop. Readers hold the lock only to clone it,
    /// because the scheduler takes it in every loop.
    pub(crate) state: Arc<Mutex<EngineState>>,
    pub(crate) events: flume::Receiver<SchedulerEvent>,
    pub(crate) sender: flume::Sender<SchedulerEvent>,
}

/// State of the scheduler thread. Requests move from `queue` to `active`, and back on preemption.
pub(crate) struct Scheduler {
    context: SchedulerContext,
    radix: RadixTree<SealedPage>,
    withheld: WithheldKeys,
    /// Requests without pages, oldest first. Of those with a running place, only the first one may
    /// be admitted, so that small requests do not starve a large one.
    queue: VecDeque<Sequence>,
    /// Requests that hold pages, in order of admission. A preempted request re-enters at the end.
    active: Vec<Sequence>,
    /// Places for the requests that hold pages, or were preempted.
    running: Arc<PeerBudget>,
    /// Moving average of the prompt tokens per second of computation.
    prefill_tokens_per_second: f64,
    /// Moving average for `/v1/state`: duration of a step in milliseconds. 0 until measured.
    step_ms: f64,
}

impl Scheduler {
    pub(crate) fn new(context: SchedulerContext) -> Self {
        Self {
            prefill_tokens_per_second: context.tokens_per_second,
            running: running_places(context.limits.step.max_batch),
            context,
            radix: RadixTree::default(),
            withheld: WithheldKeys::default(),
            queue: VecDeque::new(),
            active: Vec::new(),
            step_ms: 0.0,
        }
    }

    /// Runs the main loop until `stop` is cancelled, then fails all remaining requests. Blocks, so
    /// it needs a thread of its own.
    pub(crate) fn run(mut self) {
        let runtime = self.context.runtime.clone();
        // Tasks are spawned and tokio timers created on this thread, outside the runtime's own
        // threads.
        let _context = runtime.enter();
        while !self.context.stop.is_cancelled() {
            // Drain before every step: cancellations and loads must not wait for the channel to be
            // idle.
            while let Ok(event) = self.context.events.try_recv() {
                self.handle(event);
            }
            self.end_expired_requests();
            self.admit();
            self.withhold_new_keys();
            let computed = self.step();
            self.publish_state();
            // Block only if nothing was computed: while requests can run, steps follow each other
            // without a pause.
            if !computed && let Ok(event) = self.context.events.recv_deadline(self.wake_at()) {
                self.handle(event);
            }
        }
        let waiting = self.context.events.drain().filter_map(|event| match event {
            // Requests that are still in the channel have clients that wait for an answer.
            SchedulerEvent::Submit(sequence) => Some(*sequence),
            _ => None,
        });
        for sequence in self.queue.drain(..).chain(self.active.drain(..)).chain(waiting) {
            sequence.fail(
                ApiError::busy("the engine is shutting down; send the request to another engine", RETRY_AFTER_MS),
                RequestOutcome::Failed,
            );
        }
        self.publish_state();
    }

    fn handle(&mut self, event: SchedulerEvent) {
        match event {
            SchedulerEvent::Submit(sequence) => self.queue.push_back(*sequence),
            SchedulerEvent::Loaded { id, load, loaded } => self.finish_load(id, load, loaded),
            // A failed reply means that the caller has left.
            SchedulerEvent::Forget { keys, hold, reply } => drop(reply.send(self.forget(&keys, hold))),
            SchedulerEvent::Flush { reply } => drop(reply.send(self.radix.evict_all(admit::may_leave))),
            SchedulerEvent::Scrub { last, count, reply } => drop(reply.send(self.radix.pages_after(last, count))),
            SchedulerEvent::Damaged(key) => self.discard_damaged(&key),
            SchedulerEvent::Republish { page, content, attempts, reply } => {
                if self.may_put_again(&page.key, &content) {
                    drop(reply.send(self.put_copy(page, &content, attempts)));
                }
            }
            SchedulerEvent::Refused(key) => self.discard_refused(&key),
            SchedulerEvent::Wake => {}
        }
    }

    /// Ends requests whose client left, whose deadline passed, or that waited too long for pages.
    fn end_expired_requests(&mut self) {
        let now = Instant::now();
        let queue_timeout = self.context.limits.queue_timeout;
        let is_expired = |s: &Sequence, queued: bool| {
            // A preempted request was admitted once. The queue timeout does not apply again: only
            // its deadline does.
            let waited_too_long = queued && !s.was_preempted() && s.state.elapsed() >= queue_timeout;
            s.is_abandoned() || now >= s.deadline || waited_too_long
        };
        let mut expired: Vec<Sequence> = Vec::new();
        // One full rotation keeps the order of the queue.
        for _ in 0..self.queue.len() {
            match self.queue.pop_front() {
                Some(sequence) if is_expired(&sequence, true) => expired.push(sequence),
                Some(sequence) => self.queue.push_back(sequence),
                None => break,
            }
        }
        expired.extend(self.active.extract_if(.., |s| is_expired(s, false)));
        for sequence in expired {
            self.report_end(&sequence);
            end_expired(sequence, now);
        }
    }

    /// Tells the store of the end of a generation. Its eviction then expects the next request of
    /// the session.
    fn report_end(&self, sequence: &Sequence) {
        if sequence.generated() == 0 || !sequence.cache.uses_store() {
            return;
        }
        let shared = sequence.private_from().min(sequence.cacheable_pages()).min(sequence.keys.len());
        self.context.publisher.report_end(sequence.keys[..shared].to_vec(), sequence.generated() as u32);
    }

    fn wake_at(&self) -> Instant {
        let now = Instant::now();
        let next_deadline = self.queue.iter().chain(&self.active).map(|s| s.deadline).min();
        let idle = if self.queue.is_empty() { IDLE_SLEEP_MAX } else { PAGE_RETRY_INTERVAL };
        next_deadline.unwrap_or(now + IDLE_SLEEP_MAX).min(now + idle)
    }

    fn publish_state(&self) {
        let pool = &self.context.pool;
        let all = || self.queue.iter().chain(&self.active);
        let loading = self.active.iter().filter(|s| !s.is_ready()).count();
        // One lock for all fields, so that readers never see a mix of two iterations.
        let state = &mut *self.context.state.lock();
        state.queue = self.queue.len() as u32;
        // Requests that hold pages, in any state.
        state.running = self.active.len() as u32;
        state.loading = loading as u32;
        state.tokens_pending = all().map(|s| s.pending() as u64).sum();
        state.l1_pages = pool.capacity_pages() as u32;
        state.l1_pages_free = pool.free_pages() as u32;
        state.l1_pages_cached = self.radix.len() as u32;
        state.prefill_tokens_per_second = self.prefill_tokens_per_second;
        state.step_ms = self.step_ms;
        let metrics = &self.context.metrics;
        metrics.queue.set(i64::from(state.queue));
        metrics.active.set(i64::from(state.running));
        metrics.l1.pages.set(i64::from(state.l1_pages));
        metrics.l1.pages_free.set(i64::from(state.l1_pages_free));
        metrics.l1.pages_cached.set(i64::from(state.l1_pages_cached));
    }
}

fn end_expired(sequence: Sequence, now: Instant) {
    if sequence.is_abandoned() {
        // The code is arbitrary, because the client that left does not read it. Metrics count the
        // outcome.
        let error = ApiError::new(ErrorCode::Deadline, "the client closed its connection");
        sequence.fail(error, RequestOutcome::Cancelled);
    } else if now >= sequence.deadline {
        let error =
            ApiError::new(ErrorCode::Deadline, "the request's deadline passed; allow more time or use another engine");
        sequence.fail(error, RequestOutcome::Deadline);
    } else {
        let error =
            ApiError::busy("no L1 pages became free in time; retry later or use another engine", RETRY_AFTER_MS);
        sequence.fail(error, RequestOutcome::Refused);
    }
}
