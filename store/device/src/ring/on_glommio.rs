//! The executor on glommio.
//!
//! Always true: the tasks of each share have a task queue with that share of glommio's time; between two polls of any task
//! requests go on.
//!
//! All that a task may wait for comes through the bell or from our own ring. So when no task is ready the driver sleeps in
//! our ring, where the kernel's answers are, and not in glommio's three: awaiting an eventfd through those cost a third of
//! the speed at 64 KiB and 1.7 times the CPU. For this reason glommio's own timers, files and channels do not work in tasks.
//!
//! Queues take turns where we say so, after each poll, and never by glommio's preemption: glommio 0.9 goes to sleep beside
//! tasks that are ready if its preemption timer goes off just before it looks for them. So that timer is set to never, and
//! no queue asks for a latency, which would shorten it.

use super::executor::{Device, Executor, Ready};
use super::tasks::Share;
use glommio::{Latency, LocalExecutorBuilder, Placement, Shares};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Bytes glommio keeps for transfers of its own, of which there are none.
const IO_MEMORY: usize = 64 << 10;
/// Entries of each of glommio's rings, which stay empty.
const RING_DEPTH: usize = 32;
/// Never, in effect: see above.
const PREEMPT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs the device until it is closed. `Err` says why glommio cannot; nothing was begun then.
pub(super) fn run(device: &Rc<Device>, ready: &Ready) -> Result<(), String> {
    let builder = LocalExecutorBuilder::new(Placement::Unbound)
        .io_memory(IO_MEMORY)
        .ring_depth(RING_DEPTH)
        .preempt_timer(PREEMPT);
    let executor = builder.make().map_err(|error| error.to_string())?;
    let _ = ready.send(Ok(device.facts(Executor::Glommio)));
    executor.run(supervise(device));
    Ok(())
}

async fn supervise(device: &Rc<Device>) {
    let driver = Rc::new(Call::default());
    let runners = Share::ALL.map(|share| Rc::new(Runner { share, call: Call::default() }));
    let running = runners.clone().map(|runner| {
        let (share, device, driver) = (runner.share, device.clone(), driver.clone());
        into_queue(share, async move { runner.run(&device, &driver).await })
    });
    let driven = device.clone();
    let driving = async move {
        if let Err(error) = drive(&driven, &driver, &runners).await {
            // The requests with the kernel keep their memory (see `Table`); their askers meet their deadlines.
            tracing::error!(%error, "device ring failed and stops");
        }
        driven.close();
        runners.iter().for_each(|runner| runner.call.call());
    };
    into_queue(Share::Foreground, driving).await;
    for runner in running {
        runner.await;
    }
}

fn into_queue(share: Share, future: impl Future<Output = ()> + 'static) -> glommio::Task<()> {
    let shares = Shares::Static(share.weight());
    let queue = glommio::executor().create_task_queue(shares, Latency::NotImportant, "device");
    glommio::spawn_local_into(future, queue).expect("the queue was just made on this executor")
}

/// Answers requests, and sleeps when no task is ready, until the ring is closed and done.
async fn drive(device: &Device, call: &Call, runners: &[Rc<Runner>]) -> io::Result<()> {
    loop {
        device.round();
        if device.is_done() {
            return Ok(());
        }
        let mut ready = false;
        for runner in runners.iter().filter(|runner| device.has_ready(runner.share)) {
            ready = true;
            runner.call.call();
        }
        match ready {
            // Whoever polls calls when there is news, or nothing more to poll. Waiting for that, and not merely yielding,
            // also keeps the time slept from being held against the driver's queue.
            true => poll_fn(|context| call.poll(context)).await,
            false => device.wait()?,
        }
    }
}

/// How one task of this executor wakes another.
#[derive(Default)]
struct Call {
    called: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Call {
    fn call(&self) {
        self.called.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Ready once after each call.
    fn poll(&self, context: &Context<'_>) -> Poll<()> {
        if self.called.take() {
            return Poll::Ready(());
        }
        self.waker.replace(Some(context.waker().clone()));
        Poll::Pending
    }
}

/// Polls the tasks of one share, in the task queue of that share.
struct Runner {
    share: Share,
    call: Call,
}

impl Runner {
    async fn run(&self, device: &Device, driver: &Call) {
        while !device.is_closed() {
            while device.tasks.poll_one(self.share) {
                if device.let_requests_on().is_err() || device.bell.has_news() {
                    // An error that stays is met by the driver too, which then ends.
                    driver.call();
                }
                glommio::executor().yield_task_queue_now().await;
            }
            driver.call();
            poll_fn(|context| self.call.poll(context)).await;
        }
    }
}
