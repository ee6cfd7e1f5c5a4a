//! The tasks of a ring's executor.
//!
//! Always true: a task is polled and dropped on the executor's thread only; a wake-up from any thread is a place in a
//! queue and a stroke of the bell, so nothing of the executor itself leaves its thread; a task that panics ends alone.

use crate::inbox::Bell;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// What runs on an executor: no tokio I/O or timers in it.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Most tasks of a ring at a time.
const TASKS_MAX: usize = 1024;

/// How much of the executor's time a task gets when others want it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Somebody waits for it: goes before all others.
    Foreground,
    /// It must get on.
    Background,
    /// It has time.
    Idle,
}

impl Share {
    const COUNT: usize = 3;

    pub(super) const ALL: [Share; Share::COUNT] = [Share::Foreground, Share::Background, Share::Idle];

    /// Of the time that is wanted, in parts per [`Share::Foreground`]'s 1000.
    pub(super) fn weight(self) -> usize {
        match self {
            Share::Foreground => 1000,
            Share::Background => 200,
            Share::Idle => 50,
        }
    }
}

/// The side of the tasks that every thread may use.
pub(super) struct Queues {
    bell: Arc<Bell>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Places of tasks that want to be polled.
    ready: [VecDeque<usize>; Share::COUNT],
    spawned: Vec<(Share, Task)>,
    /// Tasks that were spawned and have not ended.
    alive: usize,
    closed: bool,
}

impl Queues {
    pub(super) fn new(bell: Arc<Bell>) -> Arc<Queues> {
        Arc::new(Queues { bell, state: Mutex::default() })
    }

    /// Takes a task, or drops it: when the ring is closed, or has too many.
    pub(super) fn spawn(&self, share: Share, task: Task) {
        let mut state = self.state.lock();
        if state.closed || state.alive >= TASKS_MAX {
            let (closed, alive) = (state.closed, state.alive);
            drop(state);
            if !closed {
                tracing::error!(alive, "a device's executor has too many tasks and takes no other");
            }
            return drop(task);
        }
        state.alive += 1;
        state.spawned.push((share, task));
        drop(state);
        self.bell.ring();
    }

    /// Whether a task of this share wants to be polled.
    pub(super) fn has_ready(&self, share: Share) -> bool {
        !self.state.lock().ready[share as usize].is_empty()
    }

    /// Whether a task of any share wants to be polled.
    pub(super) fn has_any_ready(&self) -> bool {
        self.state.lock().ready.iter().any(|ready| !ready.is_empty())
    }

    /// Tasks of this share that want to be polled.
    pub(super) fn ready(&self, share: Share) -> usize {
        self.state.lock().ready[share as usize].len()
    }
}

/// Wakes one task. The place may have got another task since: that one is polled for nothing, once.
struct Alarm {
    queues: Arc<Queues>,
    share: Share,
    place: usize,
    queued: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::SeqCst) {
            self.queues.state.lock().ready[self.share as usize].push_back(self.place);
            self.queues.bell.ring();
        }
    }
}

/// The tasks themselves, on the executor's thread.
pub(super) struct Tasks {
    queues: Arc<Queues>,
    places: RefCell<Vec<Option<Hosted>>>,
}

struct Hosted {
    alarm: Arc<Alarm>,
    /// Away while it is polled.
    task: Option<Task>,
}

impl Tasks {
    pub(super) fn new(queues: Arc<Queues>) -> Tasks {
        Tasks { queues, places: RefCell::default() }
    }

    pub(super) fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Gives spawned tasks a place, and their first turn.
    pub(super) fn adopt(&self) {
        let spawned = std::mem::take(&mut self.queues.state.lock().spawned);
        for (share, task) in spawned {
            let mut places = self.places.borrow_mut();
            let place = places.iter().position(Option::is_none).unwrap_or(places.len());
            let alarm = Arc::new(Alarm { queues: self.queues.clone(), share, place, queued: AtomicBool::new(false) });
            let hosted = Some(Hosted { alarm: alarm.clone(), task: Some(task) });
            match places.get_mut(place) {
                Some(free) => *free = hosted,
                None => places.push(hosted),
            }
            drop(places);
            alarm.wake();
        }
    }

    /// Polls the task of this share that has waited longest. `false` if none waits.
    pub(super) fn poll_one(&self, share: Share) -> bool {
        let Some(place) = self.queues.state.lock().ready[share as usize].pop_front() else { return false };
        let Some((alarm, mut task)) = self.take(place) else { return true };
        // From here on a wake-up means another turn.
        alarm.queued.store(false, Ordering::SeqCst);
        let waker = Waker::from(alarm);
        let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(&mut Context::from_waker(&waker))));
        match polled {
            Ok(Poll::Pending) => {
                if let Some(Some(hosted)) = self.places.borrow_mut().get_mut(place) {
                    hosted.task = Some(task);
                }
                return true;
            }
            Ok(Poll::Ready(())) => {}
            Err(_) => tracing::error!("a task panicked on the device's executor and is given up"),
        }
        self.places.borrow_mut()[place] = None;
        self.end(task);
        true
    }

    fn take(&self, place: usize) -> Option<(Arc<Alarm>, Task)> {
        let mut places = self.places.borrow_mut();
        let hosted = places.get_mut(place)?.as_mut()?;
        Some((hosted.alarm.clone(), hosted.task.take()?))
    }

    fn end(&self, task: Task) {
        if catch_unwind(AssertUnwindSafe(|| drop(task))).is_err() {
            tracing::error!("a task panicked when it was dropped");
        }
        self.queues.state.lock().alive -= 1;
    }

    /// Drops all tasks, and takes no more.
    pub(super) fn close(&self) {
        let spawned = {
            let mut state = self.queues.state.lock();
            state.closed = true;
            std::mem::take(&mut state.spawned)
        };
        let hosted = std::mem::take(&mut *self.places.borrow_mut());
        let hosted = hosted.into_iter().flatten().filter_map(|hosted| hosted.task);
        hosted.chain(spawned.into_iter().map(|(_, task)| task)).for_each(|task| self.end(task));
        self.queues.state.lock().ready = Default::default();
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.close();
    }
}
