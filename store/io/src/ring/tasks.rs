//! Tasks of a ring's executor.
//!
//! Invariants:
//! - A task is polled and dropped on the executor's thread only.
//! - A wake-up from any thread is an index in a queue and a notification, so no task leaves the
//!   thread.
//! - A task that panics ends alone.

use crate::device::TaskClass;
use crate::inbox::EventFd;
use larder_runtime::lock::Mutex;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A future for a ring's executor. It must not use tokio I/O or timers.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Maximum number of tasks of a ring. It bounds the memory of a caller that spawns without limit.
const TASKS_MAX: usize = 1024;

/// The part of the task list that all threads may use.
pub(super) struct TaskQueues {
    event_fd: Arc<EventFd>,
    state: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    /// Slots of tasks to poll, in order of their wake-ups.
    ready: [VecDeque<usize>; TaskClass::COUNT],
    spawned: Vec<(TaskClass, Task)>,
    alive: usize,
    closed: bool,
}

impl TaskQueues {
    pub(super) fn new(event_fd: Arc<EventFd>) -> Arc<TaskQueues> {
        Arc::new(TaskQueues { event_fd, state: Mutex::default() })
    }

    /// Queues a task. Drops it if the ring is closed or has too many tasks.
    pub(super) fn spawn(&self, class: TaskClass, task: Task) {
        let mut state = self.state.lock();
        if state.closed || state.alive >= TASKS_MAX {
            let (closed, alive) = (state.closed, state.alive);
            // Logging and dropping the task run foreign code, so neither happens under the lock.
            drop(state);
            if !closed {
                tracing::error!(alive, "the device's executor has its maximum of tasks; dropping a new one");
            }
            return drop(task);
        }
        state.alive += 1;
        state.spawned.push((class, task));
        drop(state);
        self.event_fd.notify();
    }

    pub(super) fn has_ready(&self, class: TaskClass) -> bool {
        !self.state.lock().ready[class as usize].is_empty()
    }

    pub(super) fn has_any_ready(&self) -> bool {
        self.state.lock().ready.iter().any(|ready| !ready.is_empty())
    }

    pub(super) fn ready(&self, class: TaskClass) -> usize {
        self.state.lock().ready[class as usize].len()
    }
}

/// Waker of one task. The slot may hold a newer task by the time it fires: that task is then polled
/// once in vain.
struct TaskWaker {
    queues: Arc<TaskQueues>,
    class: TaskClass,
    slot: usize,
    queued: AtomicBool,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // `queued` keeps a slot from being queued twice. `SeqCst` pairs with the store in
        // `poll_one`: a wake-up during the poll queues the task again.
        if !self.queued.swap(true, Ordering::SeqCst) {
            self.queues.state.lock().ready[self.class as usize].push_back(self.slot);
            self.queues.event_fd.notify();
        }
    }
}

pub(super) struct Tasks {
    queues: Arc<TaskQueues>,
    slots: RefCell<Vec<Option<TaskSlot>>>,
}

struct TaskSlot {
    task_waker: Arc<TaskWaker>,
    /// `None` while the task is being polled, so that the borrow of the list is not held.
    task: Option<Task>,
}

impl Tasks {
    pub(super) fn new(queues: Arc<TaskQueues>) -> Tasks {
        Tasks { queues, slots: RefCell::default() }
    }

    pub(super) fn queues(&self) -> &TaskQueues {
        &self.queues
    }

    /// Moves spawned tasks into slots and makes them ready.
    pub(super) fn admit_spawned(&self) {
        let spawned = std::mem::take(&mut self.queues.state.lock().spawned);
        for (class, task) in spawned {
            let mut slots = self.slots.borrow_mut();
            let slot = slots.iter().position(Option::is_none).unwrap_or(slots.len());
            let task_waker =
                Arc::new(TaskWaker { queues: self.queues.clone(), class, slot, queued: AtomicBool::new(false) });
            let task_slot = Some(TaskSlot { task_waker: task_waker.clone(), task: Some(task) });
            match slots.get_mut(slot) {
                Some(free) => *free = task_slot,
                None => slots.push(task_slot),
            }
            drop(slots);
            task_waker.wake();
        }
    }

    /// Polls the task of this class that has been ready longest. Returns `false` if none is.
    pub(super) fn poll_one(&self, class: TaskClass) -> bool {
        let Some(slot) = self.queues.state.lock().ready[class as usize].pop_front() else { return false };
        let Some((task_waker, mut task)) = self.take(slot) else { return true };
        // Cleared before the poll: a wake-up from now on must queue the task again.
        task_waker.queued.store(false, Ordering::SeqCst);
        let waker = Waker::from(task_waker);
        let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(&mut Context::from_waker(&waker))));
        match polled {
            Ok(Poll::Pending) => {
                if let Some(Some(task_slot)) = self.slots.borrow_mut().get_mut(slot) {
                    task_slot.task = Some(task);
                }
                return true;
            }
            Ok(Poll::Ready(())) => {}
            Err(_) => tracing::error!("a task panicked on the device's executor; the task is dropped"),
        }
        self.slots.borrow_mut()[slot] = None;
        self.end(task);
        true
    }

    fn take(&self, slot: usize) -> Option<(Arc<TaskWaker>, Task)> {
        let mut slots = self.slots.borrow_mut();
        let task_slot = slots.get_mut(slot)?.as_mut()?;
        Some((task_slot.task_waker.clone(), task_slot.task.take()?))
    }

    fn end(&self, task: Task) {
        if catch_unwind(AssertUnwindSafe(|| drop(task))).is_err() {
            tracing::error!("a task panicked while it was dropped");
        }
        self.queues.state.lock().alive -= 1;
    }

    /// Drops all tasks and refuses new ones.
    pub(super) fn close(&self) {
        // The lock is released before tasks are dropped: their destructors may spawn or wake.
        let spawned = {
            let mut state = self.queues.state.lock();
            state.closed = true;
            std::mem::take(&mut state.spawned)
        };
        let task_slot = std::mem::take(&mut *self.slots.borrow_mut());
        let task_slot = task_slot.into_iter().flatten().filter_map(|task_slot| task_slot.task);
        task_slot.chain(spawned.into_iter().map(|(_, task)| task)).for_each(|task| self.end(task));
        self.queues.state.lock().ready = Default::default();
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.close();
    }
}
