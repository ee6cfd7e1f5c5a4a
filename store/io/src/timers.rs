//! Timers of a ring's executor.
//!
//! Invariants:
//! - A sleep completes at its deadline or when the ring closes, never earlier.
//! - A dropped sleep leaves no entry behind.

use crate::inbox::EventFd;
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Longest sleep, 34 years. It keeps `Instant` arithmetic from overflowing.
const SLEEP_MAX: Duration = Duration::from_secs(1 << 30);

pub(crate) struct Timers {
    event_fd: Arc<EventFd>,
    state: Mutex<TimerState>,
}

#[derive(Default)]
struct TimerState {
    /// Keyed by deadline. The id distinguishes equal deadlines.
    sleeping: BTreeMap<(Instant, u64), Waker>,
    last_id: u64,
    closed: bool,
}

impl Timers {
    pub(crate) fn new(event_fd: Arc<EventFd>) -> Arc<Timers> {
        Arc::new(Timers { event_fd, state: Mutex::default() })
    }

    pub(crate) fn sleep(self: &Arc<Self>, duration: Duration) -> SleepFuture {
        SleepFuture { timers: self.clone(), deadline: Instant::now() + duration.min(SLEEP_MAX), id: None }
    }

    /// Wakes the tasks whose deadline has passed. Returns the next deadline.
    pub(crate) fn fire(&self) -> Option<Instant> {
        let mut due = Vec::new();
        let mut state = self.state.lock();
        if !state.sleeping.is_empty() {
            let now = Instant::now();
            while let Some(first) = state.sleeping.first_entry()
                && first.key().0 <= now
            {
                due.push(first.remove());
            }
        }
        let next = state.sleeping.keys().next().map(|&(deadline, _)| deadline);
        drop(state);
        // A waker may run arbitrary code, even call back into the timers. The lock is released
        // first.
        due.into_iter().for_each(Waker::wake);
        next
    }

    /// Completes all sleeps, and any that start later.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let sleeping = std::mem::take(&mut state.sleeping);
        drop(state);
        sleeping.into_values().for_each(Waker::wake);
    }
}

pub(crate) struct SleepFuture {
    timers: Arc<Timers>,
    deadline: Instant,
    id: Option<u64>,
}

impl Future for SleepFuture {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let timers = self.timers.clone();
        let mut state = timers.state.lock();
        if state.closed || Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        let id = *self.id.get_or_insert_with(|| {
            state.last_id += 1;
            state.last_id
        });
        let key = (self.deadline, id);
        let replaced = state.sleeping.insert(key, context.waker().clone());
        let first = state.sleeping.first_key_value().is_some_and(|(&first, _)| first == key);
        drop(state);
        // Dropping a waker may run arbitrary code, so the lock is released first.
        drop(replaced);
        // The executor computed its sleep from a later deadline, so it must look again.
        if first {
            timers.event_fd.notify();
        }
        Poll::Pending
    }
}

impl Drop for SleepFuture {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let waker = self.timers.state.lock().sleeping.remove(&(self.deadline, id));
            // Dropping a waker may run arbitrary code, so the lock is released first.
            drop(waker);
        }
    }
}
