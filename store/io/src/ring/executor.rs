//! State and steps of a ring's loop, which glommio or a plain thread drives.
//!
//! Invariants:
//! - All state of a ring lives on the executor's thread, except the sending sides.
//! - A closing ring drops its tasks first, and then completes the requests that were accepted
//!   before.

use super::engine::Engine;
use super::options::{Executor, RingCapabilities, RingOptions};
use super::tasks::{TaskQueues, Tasks};
use crate::device::TaskClass;
use crate::inbox::{EventFd, Inbox};
use crate::stats::Counters;
use crate::timers::Timers;
use larder_memory::Arena;
use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

#[derive(Clone)]
pub(super) struct RingHandles {
    pub(super) queues: Arc<TaskQueues>,
    pub(super) timers: Arc<Timers>,
    pub(super) counters: Arc<Counters>,
}

impl RingHandles {
    pub(super) fn new(event_fd: &Arc<EventFd>) -> RingHandles {
        let queues = TaskQueues::new(event_fd.clone());
        let timers = Timers::new(event_fd.clone());
        RingHandles { queues, timers, counters: Arc::default() }
    }
}

/// Reports once that the ring is set up, or the error that prevents it.
pub(super) type Ready = SyncSender<io::Result<RingCapabilities>>;

pub(super) struct RingCore {
    pub(super) engine: RefCell<Engine>,
    pub(super) tasks: Tasks,
    pub(super) event_fd: Arc<EventFd>,
    timers: Arc<Timers>,
    /// True once the tasks were dropped. No further tasks are accepted.
    closed: Cell<bool>,
}

impl RingCore {
    pub(super) fn new(
        arena: Arc<Arena>,
        inbox: Inbox,
        handles: RingHandles,
        options: &RingOptions,
    ) -> io::Result<RingCore> {
        let event_fd = inbox.event_fd.clone();
        let engine = RefCell::new(Engine::new(arena, inbox, options, handles.counters)?);
        let tasks = Tasks::new(handles.queues);
        let timers = handles.timers;
        Ok(RingCore { engine, tasks, event_fd, timers, closed: Cell::new(false) })
    }

    pub(super) fn capabilities(&self, executor: Executor) -> RingCapabilities {
        self.engine.borrow().capabilities(executor)
    }

    /// Runs one round without blocking: completes requests, admits tasks, fires timers and starts
    /// queued requests.
    pub(super) fn run_once(&self) {
        self.engine.borrow_mut().reap();
        if self.event_fd.take_notification() && self.event_fd.closing() {
            self.close();
        }
        self.tasks.admit_spawned();
        let next = self.timers.fire();
        let mut engine = self.engine.borrow_mut();
        engine.arm(next);
        engine.take();
    }

    /// Starts queued requests and submits their entries, if the kernel does not have them all.
    pub(super) fn submit_pending(&self) -> io::Result<()> {
        let mut engine = self.engine.borrow_mut();
        engine.take();
        match engine.has_kernel_work() {
            true => engine.submit(false),
            false => Ok(()),
        }
    }

    /// Makes progress on requests between two polls of tasks, without blocking.
    pub(super) fn advance_requests(&self) -> io::Result<()> {
        self.engine.borrow_mut().reap();
        self.submit_pending()
    }

    /// Drops the tasks and completes their sleeps. Requests continue.
    pub(super) fn close(&self) {
        if !self.closed.replace(true) {
            self.tasks.close();
            self.timers.close();
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_closed() && self.engine.borrow().is_done()
    }

    pub(super) fn has_ready(&self, class: TaskClass) -> bool {
        self.tasks.queues().has_ready(class)
    }

    /// Submits entries. Then sleeps until a completion or a notification, unless there is work to
    /// do.
    pub(super) fn wait(&self) -> io::Result<()> {
        self.engine.borrow_mut().take();
        let sleep = self.prepare_sleep();
        let mut engine = self.engine.borrow_mut();
        if sleep {
            engine.poll_event_fd();
        }
        let waited = match sleep || engine.has_kernel_work() {
            true => engine.submit(sleep),
            false => Ok(()),
        };
        // Senders need not signal an executor that is awake, also after a failed wait.
        self.event_fd.end_sleep();
        waited
    }

    /// Announces the sleep. Returns `false` if there is work to do first.
    fn prepare_sleep(&self) -> bool {
        let engine = self.engine.borrow();
        self.event_fd.prepare_sleep(engine.has_room());
        // Work published before the announcement came without a signal, so it must be looked for
        // here. See `EventFd`.
        !self.event_fd.is_notified() && !engine.has_work() && !self.tasks.queues().has_any_ready()
    }
}
