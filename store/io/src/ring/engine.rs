//! Moves requests from the inbox to the kernel and completes them. The executor decides when.
//!
//! Invariants:
//! - The in-flight table owns an entry's memory from before the kernel sees the entry until after
//!   its completion.
//! - At most `queue_depth` entries are with the kernel, at most two of them idle.
//! - A request completes once: by the kernel, by a check before submission, or when the engine is
//!   dropped.

use super::files::Files;
use super::in_flight::{InFlight, InFlightTable, QueuedRequest};
use super::kernel::{self, Registered};
use super::options::{Executor, RingCapabilities, RingOptions};
use crate::inbox::{Inbox, Message};
use crate::request::{FileId, Priority, RingClosed};
use crate::stats::Counters;
use io_uring::{IoUring, opcode, squeue, types};
use larder_memory::Arena;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of retries of an entry that the kernel interrupted before it moved a byte.
const RETRIES_MAX: u32 = 8;
/// Upper bound of `queue_depth`. Deeper queues only add latency.
const DEPTH_MAX: u32 = 1024;
/// Maximum number of idle entries with the kernel, so that a scrub delays a demand read by two
/// transfers at most.
const IDLE_MAX: usize = 2;
/// Ring entries beyond the requests: the poll on the eventfd, the timer, and its update, rounded
/// up.
const ENTRIES_BESIDE: u32 = 4;
/// `user_data` of the poll on the eventfd. Requests use their index in the table, which is far
/// smaller.
const EVENT_FD: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
const TIMER_CHANGED: u64 = u64::MAX - 2;
/// Pause when the kernel has no resources for a submission. Retrying at once would spin.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// Requests of a ring. Fields drop in declaration order: the ring goes before the memory it may
/// use.
pub(super) struct Engine {
    ring: IoUring,
    table: InFlightTable,
    files: Files,
    inbox: Inbox,
    /// Requests of a merged entry that failed or came back short. They are submitted one by one.
    retries: VecDeque<QueuedRequest>,
    finished: Vec<(QueuedRequest, io::Result<()>)>,
    polls_event_fd: bool,
    timer: Timer,
    registered: Registered,
    arena: Arc<Arena>,
    counters: Arc<Counters>,
}

/// The single timer with the kernel. It may fire early, never late.
#[derive(Default)]
struct Timer {
    armed: Option<Instant>,
    /// Durations of a new and of an updated timer. The kernel reads them at submission, so they
    /// live on the heap.
    durations: Box<[types::Timespec; 2]>,
}

impl Engine {
    pub(super) fn new(
        arena: Arc<Arena>,
        inbox: Inbox,
        options: &RingOptions,
        counters: Arc<Counters>,
    ) -> io::Result<Engine> {
        let depth = options.queue_depth.clamp(1, DEPTH_MAX);
        let ring = kernel::build((depth + ENTRIES_BESIDE).next_power_of_two(), options.completions())?;
        let registered = Registered::new(&ring, &arena, options);
        let files = Files::new(&ring, options);
        Ok(Engine {
            ring,
            table: InFlightTable::new(depth as usize),
            files,
            inbox,
            retries: VecDeque::new(),
            finished: Vec::new(),
            polls_event_fd: false,
            timer: Timer::default(),
            registered,
            arena,
            counters,
        })
    }

    pub(super) fn capabilities(&self, executor: Executor) -> RingCapabilities {
        let (registered_buffers, registered_files) = (self.registered.buffers, self.files.registered);
        let vectored = self.registered.vectored;
        RingCapabilities { executor, registered_buffers, registered_files, vectored }
    }

    /// Submits a poll on the eventfd, unless one is with the kernel. Its completion ends a sleep.
    pub(super) fn poll_event_fd(&mut self) {
        if !self.polls_event_fd {
            let descriptor = types::Fd(self.inbox.event_fd.descriptor());
            self.push(&opcode::PollAdd::new(descriptor, libc::POLLIN as u32).build().user_data(EVENT_FD));
            self.polls_event_fd = true;
        }
    }

    /// Arms the timer for `deadline`, or moves it earlier. A later deadline leaves it as it is:
    /// firing early costs one wake-up.
    pub(super) fn arm(&mut self, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        if self.timer.armed.is_some_and(|armed| armed <= deadline) {
            return;
        }
        // A deadline in the past gives zero, and the timer fires at once.
        let duration = types::Timespec::from(deadline.saturating_duration_since(Instant::now()));
        let entry = match self.timer.armed {
            None => {
                self.timer.durations[0] = duration;
                opcode::Timeout::new(&raw const self.timer.durations[0]).build().user_data(TIMER)
            }
            Some(_) => {
                self.timer.durations[1] = duration;
                opcode::TimeoutUpdate::new(TIMER, &raw const self.timer.durations[1]).build().user_data(TIMER_CHANGED)
            }
        };
        self.timer.armed = Some(deadline);
        self.push(&entry);
    }

    /// Submits queued entries and runs completions. With `wait`, blocks until at least one
    /// completion is available.
    pub(super) fn submit(&mut self, wait: bool) -> io::Result<()> {
        match self.ring.submitter().submit_and_wait(usize::from(wait)) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    std::thread::sleep(BUSY_PAUSE);
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    /// Returns `true` if completions are available, entries are not submitted yet, or the kernel
    /// asks to be entered.
    pub(super) fn has_kernel_work(&mut self) -> bool {
        let mut entries = self.ring.submission();
        // The kernel completes requests only when this thread enters it, and flags that. Overflowed
        // completions are flushed the same way.
        entries.sync();
        let pending = !entries.is_empty() || entries.taskrun() || entries.cq_overflow();
        drop(entries);
        pending || !self.ring.completion().is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.table.has_room()
    }

    pub(super) fn has_work(&self) -> bool {
        self.table.has_room() && (self.next_retry().is_some() || self.inbox.has_any(self.idle_allowed()))
    }

    /// Returns `true` if every accepted request has completed.
    pub(super) fn is_done(&self) -> bool {
        self.table.is_empty() && self.retries.is_empty() && !self.inbox.has_any(true)
    }

    pub(super) fn take(&mut self) {
        while self.table.has_room() {
            // Retries go first: they are the oldest requests.
            if let Some(next) = self.next_retry() {
                if let Some(queued) = self.retries.remove(next) {
                    let index = self.table.insert(InFlight::new(queued));
                    self.start(index);
                }
                continue;
            }
            match self.inbox.take(self.idle_allowed()) {
                Some((priority, Message::Submit(request, completion))) => {
                    self.accept(priority, QueuedRequest::new(request, completion))
                }
                Some((_, Message::Attach(file, reply))) => {
                    // If the caller no longer waits for the number, it cannot use the file: it
                    // stays open until the ring ends.
                    let _ = reply.send(self.files.attach(&self.ring, file));
                }
                Some((_, Message::Detach(file))) if self.uses(file) => self.files.detach_later(file),
                Some((_, Message::Detach(file))) => self.files.detach(&self.ring, file),
                None => return,
            }
        }
    }

    fn idle_allowed(&self) -> bool {
        self.table.idle() < IDLE_MAX
    }

    fn next_retry(&self) -> Option<usize> {
        let idle = self.idle_allowed();
        self.retries.iter().position(|queued| idle || queued.request.priority != Priority::Idle)
    }

    fn uses(&self, file: FileId) -> bool {
        self.table.uses(file) || self.retries.iter().any(|queued| queued.request.file == file)
    }

    fn accept(&mut self, priority: Priority, queued: QueuedRequest) {
        let refused = match self.files.accepts_requests(queued.request.file) {
            true => queued.request.operation.check().err(),
            false => Some(io::Error::new(io::ErrorKind::NotFound, "the file is not attached to this ring")),
        };
        if let Some(error) = refused {
            return queued.complete(Err(error));
        }
        let mut inflight = InFlight::new(queued);
        // Only the head of the same queue is inspected. Merging thus never reorders requests, and
        // costs no search.
        while let Some(Message::Submit(request, completion)) = self.inbox.take_if(
            priority,
            |message| matches!(message, Message::Submit(request, _) if inflight.is_continued_by(request)),
        ) {
            inflight.push(QueuedRequest::new(request, completion));
        }
        self.counters.requests.add(inflight.len());
        if inflight.len() > 1 {
            self.counters.merged.add(inflight.len());
        }
        let index = self.table.insert(inflight);
        self.start(index);
    }

    fn start(&mut self, index: usize) {
        let Some(inflight) = self.table.get(index) else { return };
        let entry = self.registered.entry(&self.arena, &self.files, inflight, &self.counters);
        self.counters.submissions.add(1);
        self.push(&entry.user_data(index as u64));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the requests in `table` own the memory that an entry names. The table keeps
            // them until the kernel has completed the entry, and leaks them if the engine is
            // dropped before. The durations of a timer are read at submission and live on the heap
            // for as long as the ring. The poll on the eventfd names no memory.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The queue has room for every entry in flight, the timer and the poll. It is full only
            // if entries have not been submitted.
            if self.ring.submit().is_err() {
                std::thread::sleep(BUSY_PAUSE);
            }
        }
    }

    /// Completes the requests that the kernel has finished. Queued requests are submitted first:
    /// callbacks take time, and the device should not be idle meanwhile.
    pub(super) fn reap(&mut self) {
        self.collect();
        if self.finished.is_empty() {
            return;
        }
        if self.has_work() {
            self.take();
            // A persistent error is reported by the next wait.
            let _ = self.submit(false);
        }
        for (queued, result) in self.finished.drain(..) {
            queued.complete(result);
        }
    }

    fn collect(&mut self) {
        while let Some(completion_entry) = { self.ring.completion().next() } {
            match completion_entry.user_data() {
                EVENT_FD => {
                    self.inbox.event_fd.clear();
                    self.polls_event_fd = false;
                }
                TIMER => {
                    self.timer.armed = None;
                    self.inbox.event_fd.notify();
                }
                TIMER_CHANGED if completion_entry.result() < 0 => {
                    // The timer had fired already, or this kernel cannot update one. The next round
                    // arms a new one.
                    self.timer.armed = None;
                    self.inbox.event_fd.notify();
                }
                TIMER_CHANGED => {}
                index => self.on_completion(index as usize, completion_entry.result()),
            }
        }
    }

    fn on_completion(&mut self, index: usize, completion_entry: i32) {
        let Some(inflight) = self.table.get(index) else { return };
        let total = inflight.bytes();
        if inflight.len() > 1 && usize::try_from(completion_entry) != Ok(total) {
            // A short or failed merged entry does not tell which request is at fault. Each is
            // retried alone.
            let Some(inflight) = self.table.remove(index) else { return };
            return self.retries.extend(inflight.into_requests());
        }
        let result = match completion_entry {
            error if error < 0 => {
                let again = matches!(-error, libc::EINTR | libc::EAGAIN) && inflight.retries < RETRIES_MAX;
                inflight.retries += 1;
                // Nothing was transferred, so the entry can be submitted as it was.
                if again {
                    return self.start(index);
                }
                Err(io::Error::from_raw_os_error(-error))
            }
            0 if total > 0 => {
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside the requested range"))
            }
            moved => {
                inflight.moved += moved as usize;
                if inflight.moved < total {
                    return self.start(index);
                }
                Ok(())
            }
        };
        let Some(inflight) = self.table.remove(index) else { return };
        let file = inflight.file();
        if result.is_ok() {
            self.counters.bytes.add(total);
        }
        // A merged entry gets here only if all its requests succeeded; otherwise there is a single
        // result.
        let mut result = Some(result);
        for queued in inflight.into_requests() {
            self.finished.push((queued, result.take().unwrap_or(Ok(()))));
        }
        // The last request on a file that is being detached closes it.
        if self.files.is_detaching(file) && !self.uses(file) {
            self.files.detach(&self.ring, file);
        }
    }
}

impl Drop for Engine {
    /// Completes requests that are not with the kernel. The table leaks those that are.
    fn drop(&mut self) {
        std::mem::take(&mut self.finished).into_iter().for_each(|(queued, result)| queued.complete(result));
        let retries = std::mem::take(&mut self.retries);
        retries.into_iter().for_each(|queued| queued.complete(Err(RingClosed.into())));
    }
}
