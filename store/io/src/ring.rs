//! One io_uring and its executor per device.
//!
//! Invariants:
//! - At most `queue_depth` entries are with the kernel. Further requests wait in bounded queues,
//!   one for each [`Priority`].
//! - The executor sleeps when there is nothing to do.
//! - A request completes once, after the kernel has finished with its memory.
//!
//! Layout:
//! - `engine`, with `kernel`, `files` and `in_flight`: the way of a request to the kernel and back.
//!   Adjacent requests of one priority are merged into one entry.
//! - `tasks`: futures that run on the same thread.
//! - `executor`: the loop, with its two drivers `on_glommio` and `on_thread`.
//! - `options`: configuration of a ring.

use crate::device::TaskClass;
use crate::file::DeviceFile;
use crate::inbox::{self, Inbox, Message, Outbox};
use crate::request::{Completion, Done, FileId, Priority, Request, RingClosed};
use crate::stats::RingStats;
use larder_memory::Arena;
use larder_runtime::lock::Mutex;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;
use tokio::sync::oneshot;

mod engine;
mod executor;
mod files;
mod in_flight;
mod kernel;
mod on_glommio;
mod on_thread;
mod options;
mod tasks;

pub use options::{Executor, RingCapabilities, RingOptions, UnknownExecutor};
pub use tasks::Task;

use executor::{Ready, RingCore, RingHandles};

/// Handle to the ring of one device. Dropping it closes the ring: accepted requests complete first,
/// tasks are dropped.
///
/// A task that holds the ring it runs on keeps the ring alive. The owner of such tasks must call
/// [`Ring::close`].
pub struct Ring {
    outbox: Outbox,
    handles: RingHandles,
    capabilities: RingCapabilities,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Disconnected when the thread ends. Nothing is ever sent.
    ended: flume::Receiver<()>,
    thread_id: ThreadId,
    close_timeout: Duration,
    given_up: AtomicBool,
}

impl Ring {
    /// Starts the executor on a thread of its own, and waits until its ring is set up. Fails if the
    /// kernel refuses a ring or the thread cannot be started.
    pub fn start(arena: Arc<Arena>, options: RingOptions) -> io::Result<Ring> {
        let (outbox, inbox) = inbox::pair(options.backlog.max(1))?;
        let handles = RingHandles::new(&outbox.event_fd);
        let (ready, started) = std::sync::mpsc::sync_channel(1);
        let thread_handles = handles.clone();
        let (end, ended) = flume::bounded(1);
        let close_timeout = options.close_timeout;
        let thread = std::thread::Builder::new().name(options.name.clone()).spawn(move || {
            run(arena, inbox, thread_handles, &options, &ready);
            drop(end);
        })?;
        // A thread that ends without a report has no ring, so this counts as closed.
        let capabilities = started.recv().map_err(|_| io::Error::from(RingClosed))??;
        let thread_id = thread.thread().id();
        let given_up = AtomicBool::new(false);
        Ok(Ring {
            outbox,
            handles,
            capabilities,
            thread: Mutex::new(Some(thread)),
            ended,
            thread_id,
            close_timeout,
            given_up,
        })
    }

    pub fn capabilities(&self) -> RingCapabilities {
        self.capabilities
    }

    /// Attaches a file. The ring keeps it open until it is detached or the ring ends. Fails if
    /// `files_max` files are attached.
    pub async fn attach(&self, file: DeviceFile) -> io::Result<FileId> {
        let (reply, answer) = oneshot::channel();
        if !self.outbox.send(Priority::Demand, Message::Attach(file, reply)).await {
            return Err(RingClosed.into());
        }
        answer.await.map_err(|_| RingClosed)?
    }

    /// Closes a file after the requests on it that were accepted before. Later requests on it fail.
    pub async fn detach(&self, file: FileId) {
        self.outbox.send(Priority::Demand, Message::Detach(file)).await;
    }

    pub fn stats(&self) -> RingStats {
        self.handles.counters.read()
    }

    /// Runs a task on the executor until the task ends or the ring closes. A closing ring drops the
    /// task on its own thread.
    ///
    /// The task may await requests of this ring, [`Ring::sleep`], channels and locks. It must not
    /// block or use tokio I/O and timers. A panic is logged and ends only this task. With 1,024
    /// tasks on the executor, another one is dropped and an error is logged.
    pub fn spawn(&self, class: TaskClass, task: Task) {
        self.handles.queues.spawn(class, task);
    }

    /// Returns a future that completes after `duration` or when the ring closes. Any executor can
    /// await it.
    pub fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.handles.timers.sleep(duration))
    }

    /// Queues a request. The executor calls `on_done` once, after the kernel has completed the
    /// request; the callback must be quick.
    ///
    /// If the ring fails, requests with the kernel never complete, because the kernel may still
    /// write to their memory. All others complete with an error.
    pub async fn submit(&self, request: Request, on_done: Completion) -> Result<(), RingClosed> {
        let sent = self.outbox.send(request.priority, Message::Submit(request, on_done)).await;
        if sent { Ok(()) } else { Err(RingClosed) }
    }

    /// Queues a request and waits for its outcome. Dropping the future does not cancel the request:
    /// the ring owns the memory until the kernel has completed it.
    pub async fn run(&self, request: Request) -> Result<Done, RingClosed> {
        let (reply, answer) = oneshot::channel();
        let on_done = Box::new(move |done| {
            // The caller may have dropped the future. The kernel is done with the memory, so it can
            // be freed.
            let _ = reply.send(done);
        });
        self.submit(request, on_done).await?;
        answer.await.map_err(|_| RingClosed)
    }

    /// Refuses new requests, drops the tasks, completes accepted requests and ends the thread.
    /// Blocks for at most `close_timeout`.
    ///
    /// Returns `false` if the device does not complete its requests in time. The thread and all
    /// memory that the kernel may still write then stay, until the process exits if need be. Also
    /// returns `false` on the ring's own thread, where a completion may drop the last handle: the
    /// thread cannot join itself and ends on its own.
    pub fn close(&self) -> bool {
        self.outbox.event_fd.close();
        !self.is_own_thread() && {
            // A disconnected channel means that the thread has ended. Only a timeout is a failure.
            let timeout = flume::RecvTimeoutError::Timeout;
            self.record_end(self.ended.recv_timeout(self.remaining_timeout()) != Err(timeout))
        }
    }

    pub async fn close_async(&self) -> bool {
        self.outbox.event_fd.close();
        !self.is_own_thread() && {
            let ended = tokio::time::timeout(self.remaining_timeout(), self.ended.recv_async()).await;
            self.record_end(ended.is_ok())
        }
    }

    pub(crate) fn end_receiver(&self) -> flume::Receiver<()> {
        self.ended.clone()
    }

    fn is_own_thread(&self) -> bool {
        self.thread_id == std::thread::current().id()
    }

    fn remaining_timeout(&self) -> Duration {
        // After one timeout, later calls do not wait again: a drop behind a close would double the
        // time.
        if self.given_up.load(Ordering::Relaxed) { Duration::ZERO } else { self.close_timeout }
    }

    fn record_end(&self, ended: bool) -> bool {
        let mut thread = self.thread.lock();
        if !ended {
            if !self.given_up.swap(true, Ordering::Relaxed) {
                let name = thread.as_ref().and_then(|thread| thread.thread().name());
                let close_timeout = self.close_timeout;
                tracing::error!(
                    ring = name,
                    ?close_timeout,
                    "the device does not complete its requests; their memory stays reserved"
                );
            }
        } else if let Some(thread) = thread.take() {
            let _ = thread.join();
        }
        ended
    }
}

/// Runs a ring on this thread until it is closed and its requests have completed.
fn run(arena: Arc<Arena>, inbox: Inbox, handles: RingHandles, options: &RingOptions, ready: &Ready) {
    let core = match RingCore::new(arena, inbox, handles, options) {
        Ok(core) => Rc::new(core),
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    if options.executor == Executor::Glommio {
        match on_glommio::run(&core, ready) {
            Ok(()) => return,
            Err(reason) => {
                tracing::warn!(ring = options.name, reason, "glommio cannot start; a plain thread drives the device");
            }
        }
    }
    on_thread::run(&core, ready);
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("capabilities", &self.capabilities).finish_non_exhaustive()
    }
}
