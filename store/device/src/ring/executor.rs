//! What drives a ring: the same work, done by glommio or by a plain loop.
//!
//! Always true: everything of a ring but its sending sides lives on the executor's thread; a ring that closes drops its
//! tasks first and then answers what was asked before.

use super::engine::Engine;
use super::tasks::{Queues, Share, Tasks};
use super::{RingFacts, RingOptions, on_glommio, on_thread};
use crate::arena::Arena;
use crate::inbox::{Bell, Inbox};
use crate::stats::Counters;
use crate::timers::Timers;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use thiserror::Error;

/// What runs a device's requests and tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Executor {
    /// glommio, which shares time out by weight. Where it cannot start, [`Executor::Thread`] does the work.
    #[default]
    Glommio,
    /// A loop on a plain thread, which polls foreground tasks first.
    Thread,
}

/// Not the name of an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("executors are \"glommio\" and \"thread\"")]
pub struct UnknownExecutor;

impl std::str::FromStr for Executor {
    type Err = UnknownExecutor;

    fn from_str(name: &str) -> Result<Executor, UnknownExecutor> {
        match name {
            "glommio" => Ok(Executor::Glommio),
            "thread" => Ok(Executor::Thread),
            _ => Err(UnknownExecutor),
        }
    }
}

impl std::fmt::Display for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Executor::Glommio => "glommio",
            Executor::Thread => "thread",
        })
    }
}

/// What all threads share with the executor.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) queues: Arc<Queues>,
    pub(super) timers: Arc<Timers>,
    pub(super) counters: Arc<Counters>,
}

impl Shared {
    pub(super) fn new(bell: &Arc<Bell>) -> Shared {
        let (queues, timers) = (Queues::new(bell.clone()), Timers::new(bell.clone()));
        Shared { queues, timers, counters: Arc::default() }
    }
}

/// Tells once how starting went.
pub(super) type Ready = SyncSender<io::Result<RingFacts>>;

/// Runs a ring on this thread until it is closed.
pub(super) fn run(arena: Arc<Arena>, inbox: Inbox, shared: Shared, options: &RingOptions, ready: &Ready) {
    let device = match Device::new(arena, inbox, shared, options) {
        Ok(device) => Rc::new(device),
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    if options.executor == Executor::Glommio {
        match on_glommio::run(&device, ready) {
            Ok(()) => return,
            Err(reason) => {
                tracing::warn!(
                    ring = options.name,
                    reason,
                    "glommio cannot run here; a plain thread drives the device"
                );
            }
        }
    }
    on_thread::run(&device, ready);
}

/// A ring's requests, tasks and timers, without what drives them.
pub(super) struct Device {
    pub(super) engine: RefCell<Engine>,
    pub(super) tasks: Tasks,
    pub(super) bell: Arc<Bell>,
    timers: Arc<Timers>,
    /// Tasks are gone and no others are taken.
    closed: Cell<bool>,
}

impl Device {
    fn new(arena: Arc<Arena>, inbox: Inbox, shared: Shared, options: &RingOptions) -> io::Result<Device> {
        let bell = inbox.bell.clone();
        let engine = RefCell::new(Engine::new(arena, inbox, options, shared.counters)?);
        let (tasks, timers) = (Tasks::new(shared.queues), shared.timers);
        Ok(Device { engine, tasks, bell, timers, closed: Cell::new(false) })
    }

    pub(super) fn facts(&self, executor: Executor) -> RingFacts {
        self.engine.borrow().facts(executor)
    }

    /// Answers, wakes, and begins what waits.
    pub(super) fn round(&self) {
        self.engine.borrow_mut().reap();
        if self.bell.take_news() && self.bell.closing() {
            self.close();
        }
        self.tasks.adopt();
        let next = self.timers.fire();
        let mut engine = self.engine.borrow_mut();
        engine.arm(next);
        engine.take();
    }

    /// Begins what waits, and tells the kernel if it does not know of everything.
    pub(super) fn hand_over(&self) -> io::Result<()> {
        let mut engine = self.engine.borrow_mut();
        engine.take();
        match engine.has_business() {
            true => engine.submit(false),
            false => Ok(()),
        }
    }

    /// Between two tasks: lets requests go on if any can.
    pub(super) fn let_requests_on(&self) -> io::Result<()> {
        self.engine.borrow_mut().reap();
        self.hand_over()
    }

    /// Drops the tasks and ends their sleeps. Requests go on.
    pub(super) fn close(&self) {
        if !self.closed.replace(true) {
            self.tasks.close();
            self.timers.close();
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Whether the ring is closed and everything asked for before is answered.
    pub(super) fn is_done(&self) -> bool {
        self.is_closed() && self.engine.borrow().is_done()
    }

    pub(super) fn has_ready(&self, share: Share) -> bool {
        self.tasks.queues().has_ready(share)
    }

    /// Submits, and sleeps until something is answered or asked for, unless there is something to do.
    pub(super) fn wait(&self) -> io::Result<()> {
        self.engine.borrow_mut().take();
        let sleep = self.fall_asleep();
        let mut engine = self.engine.borrow_mut();
        if sleep {
            engine.listen();
        }
        let waited = match sleep || engine.has_business() {
            true => engine.submit(sleep),
            false => Ok(()),
        };
        self.bell.awake();
        waited
    }

    /// Says that this thread will sleep. `false` if there is something to do first.
    fn fall_asleep(&self) -> bool {
        let engine = self.engine.borrow();
        self.bell.fall_asleep(engine.has_room());
        // Whoever sent or rang before it could see that we sleep did not strike the bell.
        !self.bell.has_news() && !engine.has_work() && !self.tasks.queues().has_any_ready()
    }
}
