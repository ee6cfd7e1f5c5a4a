//! The executor on glommio.
//!
//! Invariants:
//! - Each task class has a glommio task queue whose share is the weight of the class.
//! - Requests make progress between any two polls of tasks.
//!
//! Tasks wait only for events that come through the eventfd or our own ring. When no task is ready,
//! the driver therefore sleeps in our ring and not in glommio's three rings. Awaiting an eventfd
//! through glommio cost a third of the throughput at 64 KiB and 1.7 times the CPU. For this reason
//! glommio's own timers, files and channels do not work in tasks.
//!
//! Queues yield explicitly after each poll, never by glommio's preemption. glommio 0.9 goes to
//! sleep with ready tasks if its preemption timer fires just before it looks for them. That timer
//! is therefore set to never, and no queue sets a latency goal, which would shorten it.

use super::executor::{Ready, RingCore};
use super::options::Executor;
use crate::device::TaskClass;
use glommio::{Latency, LocalExecutorBuilder, Placement, Shares};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Memory of glommio for I/O of its own. It does none, so this is the minimum.
const IO_MEMORY: usize = 64 << 10;
/// Entries of each of glommio's rings, which stay empty.
const RING_DEPTH: usize = 32;
/// Preemption interval of one year, in effect never. See the module documentation.
const PREEMPT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs the ring until it is closed. `Err` names the reason why glommio cannot start; nothing has
/// run then.
pub(super) fn run(core: &Rc<RingCore>, ready: &Ready) -> Result<(), String> {
    let builder = LocalExecutorBuilder::new(Placement::Unbound)
        .io_memory(IO_MEMORY)
        .ring_depth(RING_DEPTH)
        .preempt_timer(PREEMPT);
    let executor = builder.make().map_err(|error| error.to_string())?;
    let _ = ready.send(Ok(core.capabilities(Executor::Glommio)));
    executor.run(supervise(core));
    Ok(())
}

async fn supervise(core: &Rc<RingCore>) {
    let driver = Rc::new(LocalNotify::default());
    let runners = TaskClass::ALL.map(|class| Rc::new(Runner { class, notify: LocalNotify::default() }));
    let running = runners.clone().map(|runner| {
        let (class, core, driver) = (runner.class, core.clone(), driver.clone());
        into_queue(class, async move { runner.run(&core, &driver).await })
    });
    let driven = core.clone();
    let driving = async move {
        if let Err(error) = drive(&driven, &driver, &runners).await {
            // Requests with the kernel keep their memory (see `InFlightTable`). Their callers run
            // into their own deadlines.
            tracing::error!(%error, "io_uring of the device failed; the device stops");
        }
        driven.close();
        runners.iter().for_each(|runner| runner.notify.notify());
    };
    into_queue(TaskClass::Foreground, driving).await;
    for runner in running {
        runner.await;
    }
}

/// Weight of a class, relative to 1,000 for foreground tasks.
fn weight(class: TaskClass) -> usize {
    match class {
        TaskClass::Foreground => 1000,
        TaskClass::Background => 200,
        TaskClass::Idle => 50,
    }
}

fn into_queue(class: TaskClass, future: impl Future<Output = ()> + 'static) -> glommio::Task<()> {
    let shares = Shares::Static(weight(class));
    let queue = glommio::executor().create_task_queue(shares, Latency::NotImportant, "device");
    glommio::spawn_local_into(future, queue).expect("the queue was just made on this executor")
}

/// Completes requests, and sleeps when no task is ready, until the ring is closed and done.
async fn drive(core: &RingCore, notify: &LocalNotify, runners: &[Rc<Runner>]) -> io::Result<()> {
    loop {
        core.run_once();
        if core.is_done() {
            return Ok(());
        }
        let mut ready = false;
        for runner in runners.iter().filter(|runner| core.has_ready(runner.class)) {
            ready = true;
            runner.notify.notify();
        }
        match ready {
            // A runner notifies when its queue is empty or there is a notification. Awaiting that,
            // instead of yielding, also keeps glommio from charging the time slept to the driver's
            // queue.
            true => poll_fn(|context| notify.poll(context)).await,
            false => core.wait()?,
        }
    }
}

#[derive(Default)]
struct LocalNotify {
    notified: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl LocalNotify {
    fn notify(&self) {
        self.notified.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll(&self, context: &Context<'_>) -> Poll<()> {
        if self.notified.take() {
            return Poll::Ready(());
        }
        self.waker.replace(Some(context.waker().clone()));
        Poll::Pending
    }
}

/// Polls the tasks of one class, in the task queue of that class.
struct Runner {
    class: TaskClass,
    notify: LocalNotify,
}

impl Runner {
    async fn run(&self, core: &RingCore, driver: &LocalNotify) {
        while !core.is_closed() {
            while core.tasks.poll_one(self.class) {
                if core.advance_requests().is_err() || core.event_fd.is_notified() {
                    // The driver meets a persistent error as well, and then ends.
                    driver.notify();
                }
                // One poll per turn: glommio then divides the time among the classes by weight.
                glommio::executor().yield_task_queue_now().await;
            }
            driver.notify();
            poll_fn(|context| self.notify.poll(context)).await;
        }
    }
}
