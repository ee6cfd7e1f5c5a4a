//! Threads that run a path, with deadlines and a bounded queue.
//!
//! Invariants:
//! - A request counts against the bound until its call of the path has returned. Calls that never
//!   return therefore fill the queue, and later requests are refused at once.
//! - The memory of a request is dropped after the last call that uses it has returned. The end of
//!   the request drops the memory of pages that no worker has begun, even if every worker hangs.

use crate::{FileNumber, PageRead, PathKind, PathWorker, TransferError, TransferPath};
use larder_io::DeviceFile;
use larder_kernels::device::{Keep, Memory};
use larder_runtime::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Maximum time that a drop waits for calls that do not return. Afterwards the drop logs the number
/// of pending requests, and leaves their threads and memory to the process.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Bounds of the work on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferLimits {
    /// Threads, and so the maximum number of pages in transfer. Each holds one page of the arena or
    /// of pinned memory, at most 16 MiB.
    pub workers: usize,
    /// Maximum number of requests that are queued or in transfer. A page is one request. Attaching,
    /// detaching and registering count as one each. One call of [`Transfers::read`] with more pages
    /// than this is invalid, and not busy.
    pub requests: usize,
}

impl Default for TransferLimits {
    /// 8 workers, and 1,024 requests.
    fn default() -> TransferLimits {
        TransferLimits { workers: 8, requests: 1024 }
    }
}

/// Numbers since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Verified pages. A page counts once its CRCs have matched, even if another page of its
    /// request fails.
    pub pages: u64,
    /// Bytes of the verified pages. Payload only: the padding up to the end of the last block does
    /// not count.
    pub bytes: u64,
    /// Pages that failed, those of stopped transfers included. Pages that were left out after the
    /// error of another page, or because the caller had left, do not count.
    pub failures: u64,
    /// Requests that are queued or in transfer now. A call of the path that does not return stays
    /// in this number.
    pub pending: usize,
}

type Reply<T> = oneshot::Sender<Result<T, TransferError>>;

enum Task {
    /// One page of a job, by its position.
    Page(Arc<Job>, usize),
    Attach(DeviceFile, Reply<FileNumber>),
    Detach(FileNumber, Reply<()>),
    Register(Memory, Reply<()>),
}

/// Pages that are read together.
struct Job {
    waiting: Mutex<Waiting>,
    /// Pages without result. The worker that lowers it to 0 sends the reply. Pages that are left
    /// out count down as well.
    left: AtomicUsize,
    /// The caller has left, or a page has failed: the other pages need not be read.
    is_cancelled: AtomicBool,
    error: Mutex<Option<TransferError>>,
    reply: Mutex<Option<Reply<()>>>,
}

/// Pages that no worker has begun, by their position. Empty once the caller has left.
#[derive(Default)]
struct Waiting {
    pages: Vec<Option<PageRead>>,
    /// Every worker that reads a page of the job has its own clone.
    keep: Option<Keep>,
}

impl Job {
    /// Takes a page and a clone of its `keep`, or `None` if the caller has left. One lock for both:
    /// no page is read without its `keep`.
    fn begin_page(&self, page: usize) -> Option<(PageRead, Option<Keep>)> {
        let mut waiting = self.waiting.lock();
        let page = waiting.pages.get_mut(page)?.take()?;
        Some((page, waiting.keep.clone()))
    }

    /// Drops the pages that no worker has begun.
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        // Dropped without the lock: the owners of the memory run their destructors.
        let waiting = std::mem::take(&mut *self.waiting.lock());
        drop(waiting);
    }

    /// Records the result of one page. The first error cancels the pages that wait, and is the one
    /// that the caller gets. The last page sends the reply.
    fn finish_page(&self, result: Result<(), TransferError>) {
        if let Err(error) = result {
            self.is_cancelled.store(true, Ordering::Relaxed);
            self.error.lock().get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let result = self.error.lock().take().map_or(Ok(()), Err);
        let reply = self.reply.lock().take();
        if let Some(reply) = reply {
            // The caller may have left at its deadline.
            let _ = reply.send(result);
        }
    }
}

/// Drops the pages that wait when the caller leaves. A page that a worker is reading is read to its
/// end.
struct CancelOnDrop(Arc<Job>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

struct Shared {
    path: Arc<dyn TransferPath>,
    limits: TransferLimits,
    pending: AtomicUsize,
    is_stopping: AtomicBool,
    /// The device failed while it might have used memory. Never reset: later requests fail at once
    /// with [`TransferError::Failed`].
    has_failed: AtomicBool,
    pages: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
}

impl Shared {
    fn check_state(&self) -> Result<(), TransferError> {
        if self.is_stopping.load(Ordering::Acquire) {
            return Err(TransferError::Stopped);
        }
        if self.has_failed.load(Ordering::Acquire) {
            return Err(TransferError::Failed(self.path.kind()));
        }
        Ok(())
    }

    fn run(&self, worker: &mut dyn PathWorker, task: Task) {
        match task {
            Task::Page(job, page) => self.run_page(worker, &job, page),
            // A caller that has left cannot name the file, so nothing keeps it open.
            Task::Attach(file, reply) => match self.check_state().and_then(|()| self.path.attach(file)) {
                Ok(number) if reply.is_closed() => drop(self.path.detach(number)),
                result => {
                    if let Err(Ok(number)) = reply.send(result) {
                        drop(self.path.detach(number));
                    }
                }
            },
            Task::Detach(file, reply) => {
                let _ = reply.send(self.path.detach(file));
            }
            Task::Register(memory, reply) => {
                let _ = reply.send(self.check_state().and_then(|()| self.path.register(&memory)));
            }
        }
    }

    fn run_page(&self, worker: &mut dyn PathWorker, job: &Job, page: usize) {
        // No caller waits for a page that is gone.
        let Some((page, keep)) = job.begin_page(page) else { return job.finish_page(Ok(())) };
        let result = self.check_state().and_then(|()| match job.is_cancelled.load(Ordering::Relaxed) {
            // The job has its error already, or no caller waits for it.
            true => Ok(false),
            false => worker.read(&page).map(|()| true),
        });
        match &result {
            Ok(true) => {
                self.pages.fetch_add(1, Ordering::Relaxed);
                self.bytes.fetch_add(page.bytes() as u64, Ordering::Relaxed);
            }
            Ok(false) => {}
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                if matches!(error, TransferError::Unsettled(_)) {
                    self.has_failed.store(true, Ordering::Release);
                    // No proof exists that the device has finished, so the memory is never reused.
                    // The flag bounds this to one page per worker.
                    std::mem::forget((page, keep));
                    return job.finish_page(result.map(drop));
                }
            }
        }
        // Before the reply, so that the caller finds its memory free.
        drop((page, keep));
        job.finish_page(result.map(drop));
    }

    /// Counts `requests` as pending: all of them, or none.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] if they exceed the whole queue, [`TransferError::Busy`] if they
    /// exceed the room that is left.
    fn reserve(&self, requests: usize) -> Result<(), TransferError> {
        let max = self.limits.requests;
        if requests > max {
            return Err(TransferError::Invalid("the request has more pages than the queue holds"));
        }
        let more = |pending: usize| pending.checked_add(requests).filter(|&pending| pending <= max);
        self.pending
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .map(drop)
            .map_err(|_| TransferError::Busy(max))
    }
}

/// A path with its threads. Dropping it refuses the queue and waits for calls in progress, at most
/// 10 s. A call that does not return keeps its thread and its memory.
pub struct Transfers {
    shared: Arc<Shared>,
    /// `None` when the drop has begun.
    tasks: Option<flume::Sender<Task>>,
    /// Disconnected when the last thread has ended. Nothing is ever sent.
    ended: flume::Receiver<()>,
}

impl Transfers {
    /// Starts the threads of `path`.
    ///
    /// # Errors
    /// If a limit is zero, or if the device or the system refuses a worker.
    pub fn start(path: Arc<dyn TransferPath>, limits: TransferLimits) -> Result<Transfers, TransferError> {
        if limits.workers == 0 || limits.requests == 0 {
            return Err(TransferError::Invalid("transfers need a worker and room for a request"));
        }
        let (tasks, queue) = flume::bounded(limits.requests);
        let (end, ended) = flume::bounded::<()>(1);
        let shared = Arc::new(Shared {
            path: Arc::clone(&path),
            limits,
            pending: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        for number in 0..limits.workers {
            let worker = Arc::clone(&path).worker(number)?;
            let (shared, queue, end) = (Arc::clone(&shared), queue.clone(), end.clone());
            std::thread::Builder::new().name(format!("larder-gds-{number}")).spawn(move || {
                work(shared, worker, queue);
                drop(end);
            })?;
        }
        Ok(Transfers { shared, tasks: Some(tasks), ended })
    }

    pub fn kind(&self) -> PathKind {
        self.shared.path.kind()
    }

    /// Details of the path for operators.
    pub fn mode(&self) -> String {
        self.shared.path.mode()
    }

    pub fn stats(&self) -> TransferStats {
        TransferStats {
            pages: self.shared.pages.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            failures: self.shared.failures.load(Ordering::Relaxed),
            pending: self.shared.pending.load(Ordering::Acquire),
        }
    }

    /// Takes an open file, for reads until it is detached.
    ///
    /// # Errors
    /// As [`TransferPath::attach`], or at the deadline, or if too many requests are pending.
    pub async fn attach(&self, file: DeviceFile, deadline: Instant) -> Result<FileNumber, TransferError> {
        let (reply, answer) = oneshot::channel();
        self.submit(Task::Attach(file, reply))?;
        within(deadline, answer).await
    }

    /// Closes a file after the transfers that use it.
    ///
    /// # Errors
    /// If no file has the number, or at the deadline, or if too many requests are pending.
    pub async fn detach(&self, file: FileNumber, deadline: Instant) -> Result<(), TransferError> {
        let (reply, answer) = oneshot::channel();
        self.submit(Task::Detach(file, reply))?;
        within(deadline, answer).await
    }

    /// Prepares memory as a target of many transfers, for example the pool of L1.
    ///
    /// # Errors
    /// As [`TransferPath::register`], or at the deadline, or if too many requests are pending.
    pub async fn register(&self, memory: Memory, deadline: Instant) -> Result<(), TransferError> {
        let (reply, answer) = oneshot::channel();
        self.submit(Task::Register(memory, reply))?;
        within(deadline, answer).await
    }

    /// Reads `pages` to their targets and verifies them, several at a time and in any order. The
    /// targets contain the pages only after a success.
    ///
    /// `keep` owns the right to write to the targets, such as a lease of pages in L1. It is dropped
    /// after the last access to the targets, which may be long after an error. No stream may use
    /// the targets meanwhile. The end of the future, also at the deadline, drops pages that wait.
    ///
    /// # Errors
    /// The first error of a page; the remaining pages are then left out.
    /// [`TransferError::Deadline`] if the pages are not complete by `deadline`.
    /// [`TransferError::Busy`] if too many requests are pending.
    pub async fn read(&self, pages: Vec<PageRead>, keep: Keep, deadline: Instant) -> Result<(), TransferError> {
        if pages.is_empty() {
            return Ok(());
        }
        pages.iter().try_for_each(PageRead::check)?;
        self.shared.check_state()?;
        let count = pages.len();
        self.shared.reserve(count)?;
        let (reply, answer) = oneshot::channel();
        let job = Arc::new(Job {
            waiting: Mutex::new(Waiting { pages: pages.into_iter().map(Some).collect(), keep: Some(keep) }),
            left: AtomicUsize::new(count),
            is_cancelled: AtomicBool::new(false),
            error: Mutex::new(None),
            reply: Mutex::new(Some(reply)),
        });
        let _cancel = CancelOnDrop(Arc::clone(&job));
        (0..count).try_for_each(|page| self.send(Task::Page(Arc::clone(&job), page)))?;
        drop(job);
        within(deadline, answer).await
    }

    fn submit(&self, task: Task) -> Result<(), TransferError> {
        self.shared.reserve(1)?;
        self.send(task)
    }

    /// Queues a task whose room is reserved.
    fn send(&self, task: Task) -> Result<(), TransferError> {
        let tasks = self.tasks.as_ref().ok_or(TransferError::Stopped)?;
        // The queue holds all reservations. It refuses a task only if every thread has ended.
        tasks.try_send(task).map_err(|_| TransferError::Stopped)
    }
}

impl std::fmt::Debug for Transfers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfers").field("path", &self.shared.path).field("stats", &self.stats()).finish()
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.tasks = None;
        if self.ended.recv_timeout(CLOSE_TIMEOUT) == Err(flume::RecvTimeoutError::Timeout) {
            tracing::error!(
                path = self.kind().name(),
                pending = self.stats().pending,
                "transfers do not end; their threads and memory stay until the process ends"
            );
        }
    }
}

/// Runs tasks until the queue is closed and empty. A task stops counting as pending only after its
/// call of the path has returned.
fn work(shared: Arc<Shared>, mut worker: Box<dyn PathWorker>, queue: flume::Receiver<Task>) {
    while let Ok(task) = queue.recv() {
        shared.run(&mut *worker, task);
        shared.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn within<T>(deadline: Instant, answer: oneshot::Receiver<Result<T, TransferError>>) -> Result<T, TransferError> {
    match tokio::time::timeout_at(deadline.into(), answer).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(TransferError::Stopped),
        Err(_) => Err(TransferError::Deadline),
    }
}
