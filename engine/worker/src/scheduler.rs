//! The scheduler: one thread that owns the L1 and decides what is computed when.
//!
//! What always holds:
//! - pages of the L1 and the states of requests change on this thread only;
//! - the thread waits for nothing but its channel: store and sockets are served by tokio tasks, which report here;
//! - requests reserve pages in the order of their arrival; for want of pages the youngest gives way to older ones, and who
//!   it gave way to gets them in the same step, so the oldest always gets on;
//! - a request that is over, however it ended, holds no page, no put and no place in the queue.
//!
//! This file is the loop; `admit` gives out pages; `step` computes.

mod admit;
mod step;

use crate::api::{ApiError, EngineState, ErrorCode};
use crate::batch::StepLimits;
use crate::metrics::{Ending, Metrics};
use crate::publish::Publisher;
use crate::radix::Radix;
use crate::sequence::Sequence;
use crate::store::PageStore;
use crate::transfer::Loaded;
use larder_model::{KvPage, KvPool, Model};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Time after which a request that waits for pages is looked at again when nothing else happens: pages may come back from
/// transfers that were given up.
const PAGES_RETRY: Duration = Duration::from_millis(20);
/// Longest sleep of the thread.
const IDLE_MAX: Duration = Duration::from_secs(1);
/// Milliseconds after which a busy engine should be asked again.
pub(crate) const RETRY_AFTER_MS: u64 = 200;
/// Weight of the newest value in smoothed ones.
const SMOOTHING: f64 = 0.2;

/// What the thread is told.
pub(crate) enum Event {
    /// A new request.
    Submit(Box<Sequence>),
    /// What came of a request's load.
    Loaded {
        /// The request.
        id: u64,
        /// What came.
        loaded: Loaded,
    },
    /// Something else changed: look again.
    Nudge,
}

/// Settings of the scheduler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) step: StepLimits,
    pub(crate) follow_grace: Duration,
    pub(crate) follow_limit: Duration,
    pub(crate) queue_limit: Duration,
    pub(crate) load_limit: Duration,
}

/// What the scheduler works with.
pub(crate) struct Parts {
    pub(crate) model: Arc<Model>,
    pub(crate) pool: Arc<KvPool>,
    pub(crate) store: Arc<dyn PageStore>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) limits: Limits,
    pub(crate) runtime: Handle,
    pub(crate) tasks: TaskTracker,
    /// Ends the thread.
    pub(crate) stop: CancellationToken,
    /// Where the thread tells how it is doing.
    pub(crate) state: Arc<Mutex<EngineState>>,
    pub(crate) events: flume::Receiver<Event>,
    /// For the tasks that the scheduler starts.
    pub(crate) sender: flume::Sender<Event>,
}

/// See the module.
pub(crate) struct Scheduler {
    parts: Parts,
    radix: Radix<KvPage>,
    /// Requests without pages, oldest first.
    queue: VecDeque<Sequence>,
    /// Requests with pages, in the order in which they got them.
    active: Vec<Sequence>,
    prefill_tokens_per_second: f64,
    step_ms: f64,
}

impl Scheduler {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            parts,
            radix: Radix::default(),
            queue: VecDeque::new(),
            active: Vec::new(),
            prefill_tokens_per_second: 0.0,
            step_ms: 0.0,
        }
    }

    /// Runs until it is stopped. On a thread of its own.
    pub(crate) fn run(mut self) {
        let runtime = self.parts.runtime.clone();
        let _context = runtime.enter();
        while !self.parts.stop.is_cancelled() {
            while let Ok(event) = self.parts.events.try_recv() {
                self.take(event);
            }
            self.sweep();
            self.admit();
            let computed = self.step();
            self.report();
            if !computed && let Ok(event) = self.parts.events.recv_deadline(self.wake_at()) {
                self.take(event);
            }
        }
        let waiting = self.parts.events.drain().filter_map(|event| match event {
            Event::Submit(sequence) => Some(*sequence),
            _ => None,
        });
        for sequence in self.queue.drain(..).chain(self.active.drain(..)).chain(waiting) {
            sequence.fail(ApiError::busy("the engine is shutting down", RETRY_AFTER_MS), Ending::Failed);
        }
        self.report();
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Submit(sequence) => self.queue.push_back(*sequence),
            Event::Loaded { id, loaded } => self.loaded(id, loaded),
            Event::Nudge => {}
        }
    }

    /// Ends what is over: abandoned, or out of time.
    fn sweep(&mut self) {
        let now = Instant::now();
        let queue_limit = self.parts.limits.queue_limit;
        let is_over = |s: &Sequence, queued: bool| {
            // One that was put back has had its turn to be refused: it ends by its own deadline.
            let waited_too_long = queued && !s.was_preempted() && s.state.elapsed() >= queue_limit;
            s.is_abandoned() || now >= s.deadline || waited_too_long
        };
        let mut over: Vec<Sequence> = Vec::new();
        for _ in 0..self.queue.len() {
            match self.queue.pop_front() {
                Some(sequence) if is_over(&sequence, true) => over.push(sequence),
                Some(sequence) => self.queue.push_back(sequence),
                None => break,
            }
        }
        over.extend(self.active.extract_if(.., |s| is_over(s, false)));
        for sequence in over {
            end_early(sequence, now);
        }
    }

    /// When to look again though nothing was reported.
    fn wake_at(&self) -> Instant {
        let now = Instant::now();
        let next_end = self.queue.iter().chain(&self.active).map(|s| s.deadline).min();
        let idle = if self.queue.is_empty() { IDLE_MAX } else { PAGES_RETRY };
        next_end.unwrap_or(now + IDLE_MAX).min(now + idle)
    }

    fn report(&self) {
        let pool = &self.parts.pool;
        let all = || self.queue.iter().chain(&self.active);
        let loading = self.active.iter().filter(|s| !s.is_ready()).count();
        let state = &mut *self.parts.state.lock();
        state.queue = self.queue.len() as u32;
        state.running = self.active.len() as u32;
        state.loading = loading as u32;
        state.tokens_pending = all().map(|s| s.pending() as u64).sum();
        state.l1_pages = pool.capacity_pages() as u32;
        state.l1_pages_free = pool.free_pages() as u32;
        state.l1_pages_cached = self.radix.len() as u32;
        state.prefill_tokens_per_second = self.prefill_tokens_per_second;
        state.step_ms = self.step_ms;
        let metrics = &self.parts.metrics;
        metrics.queue.set(i64::from(state.queue));
        metrics.running.set(i64::from(state.running));
        metrics.l1_pages.set(i64::from(state.l1_pages));
        metrics.l1_pages_free.set(i64::from(state.l1_pages_free));
        metrics.l1_pages_cached.set(i64::from(state.l1_pages_cached));
    }
}

fn end_early(sequence: Sequence, now: Instant) {
    if sequence.is_abandoned() {
        let error = ApiError::new(ErrorCode::Deadline, "the caller went away");
        sequence.fail(error, Ending::Cancelled);
    } else if now >= sequence.deadline {
        let error = ApiError::new(ErrorCode::Deadline, "the request's deadline passed");
        sequence.fail(error, Ending::Deadline);
    } else {
        let error = ApiError::busy("no pages became free in time", RETRY_AFTER_MS);
        sequence.fail(error, Ending::Refused);
    }
}
