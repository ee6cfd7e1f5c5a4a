//! One io_uring and its executor per device.
//!
//! Always true: at most `queue_depth` entries are with the kernel, the rest waits in bounded lanes; the executor sleeps when
//! there is nothing to do; a request is answered once, after the kernel has let go of its memory.
//!
//! - `engine`, with `kernel`, `files` and `table`: requests, from a lane to the kernel and back. Requests that wait in a
//!   lane behind each other and follow each other in their file go to the kernel as one.
//! - `tasks`: futures that run beside them, on the same thread.
//! - `executor`: what both drivers do, `on_glommio` and `on_thread`.

use crate::arena::Arena;
use crate::file::DeviceFile;
use crate::inbox::{self, Message, Outbox};
use crate::request::{Done, FileId, Lane, Request};
use crate::seam::Completion;
use crate::stats::RingStats;
use parking_lot::Mutex;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::oneshot;

mod engine;
mod executor;
mod files;
mod kernel;
mod on_glommio;
mod on_thread;
mod table;
mod tasks;

pub use executor::{Executor, UnknownExecutor};
pub use tasks::{Share, Task};

use executor::Shared;

/// How a ring is set up.
#[derive(Debug, Clone)]
pub struct RingOptions {
    /// Name of the thread, for people.
    pub name: String,
    /// What drives it.
    pub executor: Executor,
    /// Most entries with the kernel at a time, 1..=1024. Past 16 a device gains little and every request waits longer.
    pub queue_depth: u32,
    /// Most requests that wait in each lane before a sender has to wait.
    pub backlog: usize,
    /// Most files attached at a time.
    pub files_max: u32,
    /// Whether to register the arena: worth it for a ring that moves payloads.
    pub register_arena: bool,
    /// Most time that closing waits for requests that the device does not answer.
    pub patience: Duration,
}

impl RingOptions {
    /// On glommio, with queue depth 16, a backlog of 256, room for `files_max` files, and 10 s of patience.
    pub fn new(name: impl Into<String>, files_max: u32) -> RingOptions {
        RingOptions {
            name: name.into(),
            executor: Executor::default(),
            queue_depth: 16,
            backlog: 256,
            files_max,
            register_arena: true,
            patience: Duration::from_secs(10),
        }
    }
}

/// What the kernel granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingFacts {
    /// What drives the ring: [`Executor::Thread`] too where glommio was asked for and could not start.
    pub executor: Executor,
    /// The arena is registered: its pages are pinned once, not at every request.
    pub registered_buffers: bool,
    /// Files are registered.
    pub registered_files: bool,
}

/// The ring is closed, or its thread ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the device ring is closed")]
pub struct RingGone;

impl From<RingGone> for io::Error {
    fn from(gone: RingGone) -> io::Error {
        io::Error::new(io::ErrorKind::BrokenPipe, gone)
    }
}

/// A device's ring. Closed on drop: what was asked before is done first, tasks are dropped. A task that holds the ring it
/// runs on keeps it from being dropped, so whoever has such tasks calls [`Ring::close`].
pub struct Ring {
    outbox: Outbox,
    shared: Shared,
    facts: RingFacts,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Closed when the thread ends.
    ended: flume::Receiver<()>,
    thread_id: ThreadId,
    patience: Duration,
    given_up: AtomicBool,
}

impl Ring {
    /// Starts the executor on a thread of its own.
    pub fn start(arena: Arc<Arena>, options: RingOptions) -> io::Result<Ring> {
        let (outbox, inbox) = inbox::pair(options.backlog.max(1))?;
        let shared = Shared::new(&outbox.bell);
        let (ready, started) = std::sync::mpsc::sync_channel(1);
        let theirs = shared.clone();
        let (end, ended) = flume::bounded(1);
        let patience = options.patience;
        let thread = std::thread::Builder::new().name(options.name.clone()).spawn(move || {
            executor::run(arena, inbox, theirs, &options, &ready);
            drop(end);
        })?;
        let facts = started.recv().map_err(|_| io::Error::from(RingGone))??;
        let (thread_id, given_up) = (thread.thread().id(), AtomicBool::new(false));
        Ok(Ring { outbox, shared, facts, thread: Mutex::new(Some(thread)), ended, thread_id, patience, given_up })
    }

    /// What the kernel granted.
    pub fn facts(&self) -> RingFacts {
        self.facts
    }

    /// Makes a file known. It is open until it is detached or the ring ends.
    pub async fn attach(&self, file: DeviceFile) -> io::Result<FileId> {
        let (reply, answer) = oneshot::channel();
        if !self.outbox.send(Lane::Demand, Message::Attach(file, reply)).await {
            return Err(RingGone.into());
        }
        answer.await.map_err(|_| RingGone)?
    }

    /// Closes a file when requests on it that were taken before are done. Later ones on it fail.
    pub async fn detach(&self, file: FileId) {
        self.outbox.send(Lane::Demand, Message::Detach(file)).await;
    }

    /// What it has done so far.
    pub fn stats(&self) -> RingStats {
        self.shared.counters.read()
    }

    /// Runs a task on the executor until it ends, or the ring closes: then it is dropped there. It may await this ring's
    /// requests and [`Ring::sleep`], channels and locks, but nothing that needs a tokio runtime, and must not block. If it
    /// panics, that is logged. With 1024 tasks on the executor another is refused: dropped, with an error in the log.
    pub fn spawn(&self, share: Share, task: Task) {
        self.shared.queues.spawn(share, task);
    }

    /// Ends after `duration`, or when the ring closes. For tasks of the ring, though any executor can wait for it.
    pub fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.shared.timers.sleep(duration))
    }

    /// Hands over a request. `on_done` is called once, on the ring's executor, when the kernel has answered; it must be
    /// quick. If the ring fails, requests that are with the kernel are never answered, as it may still write to their memory;
    /// all others are answered with an error.
    pub async fn submit(&self, request: Request, on_done: Completion) -> Result<(), RingGone> {
        match self.outbox.send(request.lane, Message::Submit(request, on_done)).await {
            true => Ok(()),
            false => Err(RingGone),
        }
    }

    /// Hands over a request and waits for its answer. Dropping the future does not stop the request.
    pub async fn run(&self, request: Request) -> Result<Done, RingGone> {
        let (reply, answer) = oneshot::channel();
        let on_done = Box::new(move |done| {
            // The asker may be gone; the memory is then free, as the kernel has answered.
            let _ = reply.send(done);
        });
        self.submit(request, on_done).await?;
        answer.await.map_err(|_| RingGone)
    }

    /// Takes no more requests, drops the tasks, finishes the requests it has, and ends the thread. Blocks until then, but
    /// no longer than its patience. `false` if the device does not answer: the thread and all memory that the kernel may
    /// still write then stay as they are, until the process ends if need be. `false` also on the ring's own thread, which
    /// then ends by itself: a completion may drop the last handle there.
    pub fn close(&self) -> bool {
        self.outbox.bell.close();
        !self.is_own_thread() && {
            let timeout = flume::RecvTimeoutError::Timeout;
            self.note_end(self.ended.recv_timeout(self.patience_left()) != Err(timeout))
        }
    }

    /// The same for a task of a tokio runtime, whose thread others can use meanwhile.
    pub async fn closed(&self) -> bool {
        self.outbox.bell.close();
        !self.is_own_thread() && {
            let ended = tokio::time::timeout(self.patience_left(), self.ended.recv_async()).await;
            self.note_end(ended.is_ok())
        }
    }

    /// Hears when the thread has ended: nothing is sent, but there is nobody left who could.
    pub(crate) fn end(&self) -> flume::Receiver<()> {
        self.ended.clone()
    }

    fn is_own_thread(&self) -> bool {
        self.thread_id == std::thread::current().id()
    }

    fn patience_left(&self) -> Duration {
        if self.given_up.load(Ordering::Relaxed) { Duration::ZERO } else { self.patience }
    }

    fn note_end(&self, ended: bool) -> bool {
        let mut thread = self.thread.lock();
        if !ended {
            if !self.given_up.swap(true, Ordering::Relaxed) {
                let (name, patience) = (thread.as_ref().and_then(|thread| thread.thread().name()), self.patience);
                tracing::error!(ring = name, ?patience, "the device does not answer: it keeps what it may still write");
            }
        } else if let Some(thread) = thread.take() {
            let _ = thread.join();
        }
        ended
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("facts", &self.facts).finish_non_exhaustive()
    }
}
