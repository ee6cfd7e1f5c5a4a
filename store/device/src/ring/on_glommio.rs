//! The executor on glommio.
//!
//! Always true: the driver, which answers requests and polls foreground tasks, has the largest share; background and idle tasks have task queues of their own, and let requests go on between two polls.
//!
//! The kernel counts the answers of our ring into the same eventfd that is the bell, and one read of it through glommio is
//! all that the driver waits for. So a device needs no wake-up of glommio's from another thread.
//!
//! Queues take turns where we say so, after each poll, and never by glommio's preemption: glommio 0.9 goes to sleep beside
//! tasks that are ready if its preemption timer goes off just before it looks for them. So that timer is set to never, no
//! queue asks for a latency (which would shorten it), and who polls other tasks tells the driver when the bell was rung.

use super::executor::{Device, Executor, Ready};
use super::tasks::Share;
use glommio::io::BufferedFile;
use glommio::{Latency, LocalExecutorBuilder, Placement, Shares};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Bytes glommio keeps for its own transfers, of which there are none but the bell's.
const IO_MEMORY: usize = 64 << 10;
/// Entries of each of glommio's rings. That many answers at once would be a preemption, and there is one read at a time.
const RING_DEPTH: usize = 128;
/// Never, in effect: see above.
const PREEMPT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs the device until it is closed. `Err` says why glommio cannot; nothing was begun then.
pub(super) fn run(device: &Rc<Device>, ready: &Ready) -> Result<(), String> {
    let builder = LocalExecutorBuilder::new(Placement::Unbound)
        .io_memory(IO_MEMORY)
        .ring_depth(RING_DEPTH)
        .preempt_timer(PREEMPT);
    let executor = builder.make().map_err(|error| error.to_string())?;
    let event = device.bell.event().map_err(|error| error.to_string())?;
    device.engine.borrow().report_to(device.bell.descriptor()).map_err(|error| error.to_string())?;
    executor.run(async {
        // SAFETY: a descriptor that nobody else owns, which the file closes.
        let event = unsafe { BufferedFile::from_raw_fd(event.into_raw_fd()) };
        let _ = ready.send(Ok(device.facts(Executor::Glommio)));
        supervise(device, event).await;
    });
    Ok(())
}

async fn supervise(device: &Rc<Device>, event: BufferedFile) {
    let driver = Rc::new(Call::default());
    let runners = [Share::Background, Share::Idle].map(|share| Rc::new(Runner { share, call: Call::default() }));
    let running = runners.clone().map(|runner| {
        let (share, device, driver) = (runner.share, device.clone(), driver.clone());
        into_queue(share, async move { runner.run(&device, &driver).await })
    });
    let driven = device.clone();
    let driving = async move {
        if let Err(error) = drive(&driven, &event, &driver, &runners).await {
            // The requests with the kernel keep their memory (see `Table`); their askers meet their deadlines.
            tracing::error!(%error, "device ring failed and stops");
        }
        driven.close();
        runners.iter().for_each(|runner| runner.call.call());
        let _ = event.close().await;
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

/// Answers requests and polls foreground tasks until the ring is closed and done.
async fn drive(device: &Device, event: &BufferedFile, call: &Call, runners: &[Rc<Runner>]) -> io::Result<()> {
    let mut reading = None;
    loop {
        device.round();
        for _ in 0..device.tasks.queues().ready(Share::Foreground) {
            device.tasks.poll_one(Share::Foreground);
        }
        if device.is_done() {
            return Ok(());
        }
        device.hand_over()?;
        let waiting = runners.iter().filter(|runner| device.has_ready(runner.share));
        waiting.for_each(|runner| runner.call.call());
        if !device.fall_asleep() {
            glommio::executor().yield_task_queue_now().await;
            continue;
        }
        let rung = poll_fn(|context| {
            let read = reading.get_or_insert_with(|| Box::pin(event.read_at(0, 8)));
            if let Poll::Ready(read) = read.as_mut().poll(context) {
                reading = None;
                return Poll::Ready(read.map(drop));
            }
            call.poll(context).map(Ok)
        });
        let rung = rung.await;
        device.bell.awake();
        rung.map_err(io::Error::from)?;
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
                // If it fails for good, the driver meets that too, and ends.
                let _ = device.let_requests_on();
                if device.bell.has_news() {
                    driver.call();
                }
                glommio::executor().yield_task_queue_now().await;
            }
            poll_fn(|context| self.call.poll(context)).await;
        }
    }
}
