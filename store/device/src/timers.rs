//! Sleeping on the executor of a ring.
//!
//! Always true: a sleep ends at its deadline or when the ring closes, never before; one that is dropped leaves nothing
//! behind.

use crate::inbox::Bell;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Longest sleep; a longer one ends then.
const SLEEP_MAX: Duration = Duration::from_secs(1 << 30);

/// All sleeps of a ring.
pub(crate) struct Timers {
    bell: Arc<Bell>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By deadline; the number tells equal deadlines apart.
    sleepers: BTreeMap<(Instant, u64), Waker>,
    numbers: u64,
    closed: bool,
}

impl Timers {
    pub(crate) fn new(bell: Arc<Bell>) -> Arc<Timers> {
        Arc::new(Timers { bell, state: Mutex::default() })
    }

    /// A future that ends after `duration`.
    pub(crate) fn sleep(self: &Arc<Self>, duration: Duration) -> Sleep {
        Sleep { timers: self.clone(), deadline: Instant::now() + duration.min(SLEEP_MAX), number: None }
    }

    /// Wakes whose time has come, and tells the next deadline.
    pub(crate) fn fire(&self) -> Option<Instant> {
        let mut due = Vec::new();
        let mut state = self.state.lock();
        if !state.sleepers.is_empty() {
            let now = Instant::now();
            while let Some(first) = state.sleepers.first_entry()
                && first.key().0 <= now
            {
                due.push(first.remove());
            }
        }
        let next = state.sleepers.keys().next().map(|&(deadline, _)| deadline);
        drop(state);
        // A waker may run anything, so no lock is held.
        due.into_iter().for_each(Waker::wake);
        next
    }

    /// Ends all sleeps, and all that will be begun.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let sleepers = std::mem::take(&mut state.sleepers);
        drop(state);
        sleepers.into_values().for_each(Waker::wake);
    }
}

/// See [`Timers::sleep`].
pub(crate) struct Sleep {
    timers: Arc<Timers>,
    deadline: Instant,
    number: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let timers = self.timers.clone();
        let mut state = timers.state.lock();
        if state.closed || Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        let number = *self.number.get_or_insert_with(|| {
            state.numbers += 1;
            state.numbers
        });
        let key = (self.deadline, number);
        let replaced = state.sleepers.insert(key, context.waker().clone());
        let first = state.sleepers.first_key_value().is_some_and(|(&first, _)| first == key);
        drop(state);
        drop(replaced);
        if first {
            timers.bell.ring();
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let waker = self.timers.state.lock().sleepers.remove(&(self.deadline, number));
            drop(waker);
        }
    }
}
