//! Takes requests, hands them to the kernel, and answers them. When, is the executor's business.
//!
//! Always true: an entry's memory is owned by the table from before the kernel sees it until after its answer.

use super::files::Files;
use super::kernel::{self, Registered};
use super::table::{Asked, InFlight, Table};
use super::{Executor, RingFacts, RingGone, RingOptions};
use crate::arena::Arena;
use crate::inbox::{Inbox, Message, answer};
use crate::request::{Done, FileId, Lane};
use crate::stats::Counters;
use io_uring::{IoUring, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Times a request is tried again when the kernel moved nothing and said that it might.
const RETRIES_MAX: u32 = 8;
const DEPTH_MAX: u32 = 1024;
/// Most places of the table for the idle lane.
const IDLE_MAX: usize = 2;
/// Entries beside those of requests: the bell, the timer and its changes.
const ENTRIES_BESIDE: u32 = 4;
/// Marks the answer to the poll on the bell.
const BELL: u64 = u64::MAX;
/// Marks the end of the timer.
const TIMER: u64 = u64::MAX - 1;
/// Marks the answer to a change of the timer.
const TIMER_CHANGED: u64 = u64::MAX - 2;
/// Pause when the kernel is out of resources for a new submission.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// Fields are dropped in this order: the ring before the memory it may use.
pub(super) struct Engine {
    ring: IoUring,
    table: Table,
    files: Files,
    inbox: Inbox,
    /// Taken before, to be done one by one because the kernel did not do them together.
    again: VecDeque<Asked>,
    /// Answered by the kernel, and about to be told.
    finished: Vec<(Asked, io::Result<()>)>,
    listening: bool,
    timer: Timer,
    registered: Registered,
    arena: Arc<Arena>,
    counters: Arc<Counters>,
}

/// The one timer that is with the kernel. It may ring for nothing, never too late.
#[derive(Default)]
struct Timer {
    armed: Option<Instant>,
    /// Where the kernel finds the durations of a new timer and of a changed one, until they are submitted.
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
        let ring = kernel::build((depth + ENTRIES_BESIDE).next_power_of_two())?;
        let registered = Registered::new(&ring, &arena, options);
        let files = Files::new(&ring, options);
        let (table, again, timer) = (Table::new(depth as usize), VecDeque::new(), Timer::default());
        let finished = Vec::new();
        Ok(Engine { ring, table, files, inbox, again, finished, listening: false, timer, registered, arena, counters })
    }

    /// What the kernel granted to a ring that `executor` drives.
    pub(super) fn facts(&self, executor: Executor) -> RingFacts {
        let (registered_buffers, registered_files) = (self.registered.buffers, self.files.registered);
        RingFacts { executor, registered_buffers, registered_files }
    }

    /// Has the bell answered by the kernel, once.
    pub(super) fn listen(&mut self) {
        if !self.listening {
            let descriptor = types::Fd(self.inbox.bell.descriptor());
            self.push(&opcode::PollAdd::new(descriptor, libc::POLLIN as u32).build().user_data(BELL));
            self.listening = true;
        }
    }

    /// Has something answered by the kernel at `deadline`.
    pub(super) fn arm(&mut self, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        if self.timer.armed.is_some_and(|armed| armed <= deadline) {
            return;
        }
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

    /// Hands entries to the kernel, and lets it answer. With `wait`, until it has answered something.
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

    /// Whether the kernel has answers, or could give some if it were entered, or does not know of entries yet.
    pub(super) fn has_business(&mut self) -> bool {
        let mut entries = self.ring.submission();
        entries.sync();
        let pending = !entries.is_empty() || entries.taskrun() || entries.cq_overflow();
        drop(entries);
        pending || !self.ring.completion().is_empty()
    }

    /// Whether another request could be taken, if one waited.
    pub(super) fn has_room(&self) -> bool {
        self.table.has_room()
    }

    /// Whether [`Engine::take`] would take something.
    pub(super) fn has_work(&self) -> bool {
        self.table.has_room() && (self.next_again().is_some() || self.inbox.has_any(self.idle_may()))
    }

    /// Whether everything asked for is answered.
    pub(super) fn is_done(&self) -> bool {
        self.table.is_empty() && self.again.is_empty() && !self.inbox.has_any(true)
    }

    /// Begins what waits, as long as there is room.
    pub(super) fn take(&mut self) {
        while self.table.has_room() {
            if let Some(next) = self.next_again() {
                if let Some(asked) = self.again.remove(next) {
                    let place = self.table.insert(InFlight::new(asked));
                    self.start(place);
                }
                continue;
            }
            match self.inbox.take(self.idle_may()) {
                Some((lane, Message::Submit(request, completion))) => self.begin(lane, Asked { request, completion }),
                Some((_, Message::Attach(file, reply))) => {
                    // If nobody waits for the number, nobody can use the file: it stays until the ring ends.
                    let _ = reply.send(self.files.attach(&self.ring, file));
                }
                Some((_, Message::Detach(file))) if self.uses(file) => self.files.leave(file),
                Some((_, Message::Detach(file))) => self.files.detach(&self.ring, file),
                None => return,
            }
        }
    }

    fn idle_may(&self) -> bool {
        self.table.idle() < IDLE_MAX
    }

    fn next_again(&self) -> Option<usize> {
        let idle = self.idle_may();
        self.again.iter().position(|asked| idle || asked.request.lane != Lane::Idle)
    }

    fn uses(&self, file: FileId) -> bool {
        self.table.uses(file) || self.again.iter().any(|asked| asked.request.file == file)
    }

    fn begin(&mut self, lane: Lane, asked: Asked) {
        let refused = match self.files.serves(asked.request.file) {
            true => asked.request.operation.check().err(),
            false => Some(io::Error::new(io::ErrorKind::NotFound, "no such file on this ring")),
        };
        if let Some(error) = refused {
            return complete(asked, Err(error));
        }
        let mut inflight = InFlight::new(asked);
        while let Some(Message::Submit(request, completion)) = self
            .inbox
            .take_if(lane, |message| matches!(message, Message::Submit(request, _) if inflight.goes_on_with(request)))
        {
            inflight.push(Asked { request, completion });
        }
        self.counters.requests.add(inflight.len());
        if inflight.len() > 1 {
            self.counters.merged.add(inflight.len());
        }
        let place = self.table.insert(inflight);
        self.start(place);
    }

    /// Hands what is left of a place's requests to the kernel.
    fn start(&mut self, place: usize) {
        let Some(inflight) = self.table.get(place) else { return };
        let entry = self.registered.entry(&self.arena, &self.files, inflight);
        self.counters.submissions.add(1);
        self.push(&entry.user_data(place as u64));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the memory an entry names is owned by its requests in `table`, which keeps it until the kernel has
            // answered, and leaks it if the engine ends before. The durations of a timer live until after the ring, and
            // are read when the entry is submitted. The bell's poll names no memory.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The queue has a place for every request in flight and the rest; it is full only of unsubmitted entries.
            if self.ring.submit().is_err() {
                std::thread::sleep(BUSY_PAUSE);
            }
        }
    }

    /// Answers those whose requests the kernel has answered. What waits is handed over before that: answering takes time,
    /// which the device should not spend idle.
    pub(super) fn reap(&mut self) {
        self.collect();
        if self.finished.is_empty() {
            return;
        }
        if self.has_work() {
            self.take();
            // An error that stays is met by whoever waits next.
            let _ = self.submit(false);
        }
        for (asked, result) in self.finished.drain(..) {
            complete(asked, result);
        }
    }

    fn collect(&mut self) {
        while let Some(answer) = { self.ring.completion().next() } {
            match answer.user_data() {
                BELL => {
                    self.inbox.bell.clear();
                    self.listening = false;
                }
                TIMER => {
                    self.timer.armed = None;
                    self.inbox.bell.ring();
                }
                TIMER_CHANGED if answer.result() < 0 => {
                    // It had gone off, or this kernel cannot change one: the next round arms another.
                    self.timer.armed = None;
                    self.inbox.bell.ring();
                }
                TIMER_CHANGED => {}
                place => self.answered(place as usize, answer.result()),
            }
        }
    }

    fn answered(&mut self, place: usize, answer: i32) {
        let Some(inflight) = self.table.get(place) else { return };
        let total = inflight.bytes();
        if inflight.len() > 1 && usize::try_from(answer) != Ok(total) {
            // Which of them is at fault shows when each is done by itself.
            let Some(inflight) = self.table.remove(place) else { return };
            return self.again.extend(inflight.into_asked());
        }
        let result = match answer {
            error if error < 0 => {
                let again = matches!(-error, libc::EINTR | libc::EAGAIN) && inflight.retries < RETRIES_MAX;
                inflight.retries += 1;
                if again {
                    return self.start(place);
                }
                Err(io::Error::from_raw_os_error(-error))
            }
            0 if total > 0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside the request")),
            moved => {
                inflight.moved += moved as usize;
                if inflight.moved < total {
                    return self.start(place);
                }
                Ok(())
            }
        };
        let Some(inflight) = self.table.remove(place) else { return };
        let file = inflight.file();
        if result.is_ok() {
            self.counters.bytes.add(total);
        }
        // Several requests are here only if all of them succeeded.
        let mut result = Some(result);
        for asked in inflight.into_asked() {
            self.finished.push((asked, result.take().unwrap_or(Ok(()))));
        }
        if self.files.is_leaving(file) && !self.uses(file) {
            self.files.detach(&self.ring, file);
        }
    }
}

fn complete(asked: Asked, result: io::Result<()>) {
    let Asked { request, completion } = asked;
    answer(completion, Done { operation: request.operation, result });
}

impl Drop for Engine {
    /// What is not with the kernel is told how it ended; what is, is leaked by the table.
    fn drop(&mut self) {
        std::mem::take(&mut self.finished).into_iter().for_each(|(asked, result)| complete(asked, result));
        let again = std::mem::take(&mut self.again);
        again.into_iter().for_each(|asked| complete(asked, Err(RingGone.into())));
    }
}
