//! Bounded queues from any thread to the executor of a ring, and the eventfd that wakes it.
//!
//! Invariants:
//! - The executor takes every message, or the message is completed with an error when the executor
//!   ends, however that happens.
//! - A sender makes a system call only if the executor announced that it is going to sleep.

use crate::file::DeviceFile;
use crate::request::{Completion, Done, FileId, Priority, Request, RingClosed};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

pub(crate) enum Message {
    Submit(Request, Completion),
    Attach(DeviceFile, oneshot::Sender<io::Result<FileId>>),
    Detach(FileId),
}

impl Message {
    fn refuse(self) {
        match self {
            Message::Submit(Request { operation, .. }, completion) => {
                run_completion(completion, Done { operation, result: Err(RingClosed.into()) });
            }
            // If the caller no longer waits for the number, it cannot use the file either.
            Message::Attach(_, reply) => drop(reply.send(Err(RingClosed.into()))),
            Message::Detach(_) => {}
        }
    }
}

/// Calls `completion`. A panic in it is logged, because the device's executor must survive defects
/// of its callers.
pub(crate) fn run_completion(completion: Completion, done: Done) {
    if catch_unwind(AssertUnwindSafe(|| completion(done))).is_err() {
        tracing::error!("a completion callback panicked on the device's executor");
    }
}

/// One in this many messages is taken from the background queue first. This bounds its delay under
/// demand load.
const BACKGROUND_EVERY: u32 = 4;
/// One in this many messages is taken from the idle queue first, so that scrubbing proceeds under
/// any load.
const IDLE_EVERY: u32 = 64;

/// Wakes the executor from its sleep in the kernel.
///
/// All flags use `SeqCst`. The executor stores `sleeping` and then looks for work; a sender
/// publishes work and then loads `sleeping`. Weaker orderings would let both miss each other (store
/// buffering), and the wake-up would be lost.
pub(crate) struct EventFd {
    file: File,
    /// Set by tasks, timers and closing; cleared when the executor looks.
    notified: AtomicBool,
    sleeping: AtomicBool,
    /// The executor sleeps and has a free entry for a request. If all entries are in use, waking it
    /// for a message would be useless: a completion wakes it anyway.
    wants_messages: AtomicBool,
    closing: AtomicBool,
    /// The inbox was dropped: senders complete leftover messages themselves.
    receiver_gone: AtomicBool,
}

impl EventFd {
    fn new() -> io::Result<EventFd> {
        // SAFETY: the call passes no memory, and its result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nothing else owns.
        let file = unsafe { File::from_raw_fd(fd) };
        let [notified, sleeping, wants_messages, closing, receiver_gone] = [false; 5].map(AtomicBool::new);
        Ok(EventFd { file, notified, sleeping, wants_messages, closing, receiver_gone })
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn notify(&self) {
        // The flag is stored before `sleeping` is read. See the type for the ordering.
        self.notified.store(true, Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.signal();
        }
    }

    fn notify_message(&self) {
        if self.wants_messages.swap(false, Ordering::SeqCst) {
            self.signal();
        }
    }

    fn signal(&self) {
        // The executor clears the counter at each wake-up, so it cannot overflow. A failed write to
        // an eventfd has no remedy.
        let _ = (&self.file).write(&1u64.to_ne_bytes());
    }

    /// Announces the sleep. From now on, senders signal. The caller must check for work once more
    /// after this call: work published before it came without a signal.
    pub(crate) fn prepare_sleep(&self, wants_messages: bool) {
        self.sleeping.store(true, Ordering::SeqCst);
        self.wants_messages.store(wants_messages, Ordering::SeqCst);
    }

    pub(crate) fn end_sleep(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
        self.wants_messages.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_notified(&self) -> bool {
        self.notified.load(Ordering::SeqCst)
    }

    pub(crate) fn take_notification(&self) -> bool {
        self.notified.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn clear(&self) {
        let _ = (&self.file).read(&mut [0; 8]);
    }

    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.notify();
    }

    pub(crate) fn closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }
}

/// The sending side, shared by all threads. Each priority has its own queue, so a full background
/// queue does not block demand requests.
pub(crate) struct Outbox {
    queues: [flume::Sender<Message>; Priority::COUNT],
    /// Clones of the receivers. A sender that finds the inbox gone drains its queue with these.
    drains: [flume::Receiver<Message>; Priority::COUNT],
    pub(crate) event_fd: Arc<EventFd>,
}

pub(crate) struct Inbox {
    queues: [PeekQueue; Priority::COUNT],
    turn: u32,
    pub(crate) event_fd: Arc<EventFd>,
}

/// One queue with its first message taken out, so that it can be inspected before it is taken.
struct PeekQueue {
    first: Option<Message>,
    rest: flume::Receiver<Message>,
}

pub(crate) fn pair(backlog: usize) -> io::Result<(Outbox, Inbox)> {
    let event_fd = Arc::new(EventFd::new()?);
    let [one, two, three] = [(); Priority::COUNT].map(|()| flume::bounded(backlog));
    let drains = [one.1.clone(), two.1.clone(), three.1.clone()];
    let outbox = Outbox { queues: [one.0, two.0, three.0], drains, event_fd: event_fd.clone() };
    let queues = [one.1, two.1, three.1].map(|rest| PeekQueue { first: None, rest });
    Ok((outbox, Inbox { queues, turn: 0, event_fd }))
}

impl Outbox {
    /// Waits for room in the queue and sends. Returns `false` if the executor has ended or is
    /// closing.
    pub(crate) async fn send(&self, priority: Priority, message: Message) -> bool {
        if self.event_fd.closing() {
            return false;
        }
        let sent = self.queues[priority as usize].send_async(message).await.is_ok();
        self.event_fd.notify_message();
        // The inbox may have been dropped after the message was queued. Its `drop` did not see the
        // message then, so it is refused here.
        if self.event_fd.receiver_gone.load(Ordering::SeqCst) {
            self.drains[priority as usize].try_iter().for_each(Message::refuse);
        }
        sent
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.event_fd.close();
        // The flag is set before draining. A sender that queues after the drain sees the flag and
        // drains the queue itself.
        self.event_fd.receiver_gone.store(true, Ordering::SeqCst);
        for queue in &mut self.queues {
            queue.first.take().into_iter().chain(queue.rest.try_iter()).for_each(Message::refuse);
        }
    }
}

impl PeekQueue {
    fn take_if(&mut self, wanted: impl FnOnce(&Message) -> bool) -> Option<Message> {
        if self.first.is_none() {
            self.first = self.rest.try_recv().ok();
        }
        self.first.take_if(|message| wanted(message))
    }

    fn is_empty(&self) -> bool {
        self.first.is_none() && self.rest.is_empty()
    }
}

impl Inbox {
    /// Takes the next message and its priority, or returns `None` if all queues are empty. With
    /// `idle` unset, the idle queue is skipped.
    pub(crate) fn take(&mut self, idle: bool) -> Option<(Priority, Message)> {
        use Priority::{Background, Demand, Idle};
        self.turn = (self.turn + 1) % IDLE_EVERY;
        let order = match self.turn {
            0 => [Idle, Demand, Background],
            turn if turn.is_multiple_of(BACKGROUND_EVERY) => [Background, Demand, Idle],
            _ => [Demand, Background, Idle],
        };
        let mut allowed = order.into_iter().filter(|&priority| idle || priority != Idle);
        allowed.find_map(|priority| Some((priority, self.take_if(priority, |_| true)?)))
    }

    /// Takes the next message of a queue if `wanted` accepts it. Otherwise the message keeps its
    /// position.
    pub(crate) fn take_if(&mut self, priority: Priority, wanted: impl FnOnce(&Message) -> bool) -> Option<Message> {
        self.queues[priority as usize].take_if(wanted)
    }

    pub(crate) fn has_any(&self, idle: bool) -> bool {
        let waits = |priority: Priority| !self.queues[priority as usize].is_empty();
        waits(Priority::Demand) || waits(Priority::Background) || idle && waits(Priority::Idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detach(file: u32) -> Message {
        Message::Detach(FileId(file))
    }

    fn order(inbox: &mut Inbox, idle: bool) -> Vec<Priority> {
        std::iter::from_fn(|| Some(inbox.take(idle)?.0)).collect()
    }

    #[tokio::test]
    async fn every_fourth_message_is_background() {
        let (outbox, mut inbox) = pair(16).unwrap();
        for file in 0..8 {
            assert!(outbox.send(Priority::Demand, detach(file)).await);
            assert!(outbox.send(Priority::Background, detach(100 + file)).await);
        }
        let order = order(&mut inbox, true);
        let background: Vec<bool> = order.iter().map(|&priority| priority == Priority::Background).collect();
        assert_eq!(background[..8], [false, false, false, true, false, false, false, true]);
        assert_eq!(order.len(), 16);
    }

    #[tokio::test]
    async fn idle_messages_wait_for_others_but_are_not_starved() {
        let (outbox, mut inbox) = pair(256).unwrap();
        for file in 0..130 {
            assert!(outbox.send(Priority::Idle, detach(file)).await);
            assert!(outbox.send(Priority::Demand, detach(file)).await);
        }
        let order = order(&mut inbox, true);
        let idle: Vec<usize> = (0..order.len()).filter(|&at| order[at] == Priority::Idle).collect();
        assert_eq!(idle[..4], [63, 127, 132, 133]);
        assert_eq!(idle.len(), 130);
    }

    #[tokio::test]
    async fn idle_queue_is_skipped_at_its_limit() {
        let (outbox, mut inbox) = pair(16).unwrap();
        assert!(outbox.send(Priority::Idle, detach(0)).await);
        assert!(!inbox.has_any(false) && inbox.take(false).is_none());
        assert!(inbox.has_any(true) && inbox.take(true).is_some());
    }

    #[tokio::test]
    async fn unwanted_message_keeps_its_position() {
        let (outbox, mut inbox) = pair(16).unwrap();
        for file in 0..2 {
            assert!(outbox.send(Priority::Demand, detach(file)).await);
        }
        assert!(inbox.take_if(Priority::Demand, |_| false).is_none());
        assert!(inbox.has_any(false));
        for expected in 0..2 {
            let Some((_, Message::Detach(FileId(file)))) = inbox.take(false) else { panic!("nothing waits") };
            assert_eq!(file, expected);
        }
        assert!(!inbox.has_any(true));
    }

    /// The executor ends, as when its ring fails. Queued messages and a blocked sender are
    /// completed with errors.
    #[tokio::test]
    async fn messages_left_by_an_ended_executor_complete_with_errors() {
        let (outbox, inbox) = pair(2).unwrap();
        let (told, answers) = flume::unbounded();
        let message = |number: u32| {
            let told = told.clone();
            let request =
                Request { file: FileId(0), priority: Priority::Demand, operation: crate::request::Operation::Sync };
            Message::Submit(request, Box::new(move |done: Done| told.send((number, done.result.is_err())).unwrap()))
        };
        assert!(outbox.send(Priority::Demand, message(0)).await && outbox.send(Priority::Demand, message(1)).await);
        let (reply, attached) = oneshot::channel();
        let file = DeviceFile::open(std::path::Path::new("/dev/null")).unwrap();
        assert!(outbox.send(Priority::Background, Message::Attach(file, reply)).await);
        let waits = outbox.send(Priority::Demand, message(2));
        let ends = async {
            tokio::task::yield_now().await;
            drop(inbox);
        };
        tokio::join!(waits, ends);
        let mut on_completion: Vec<_> = answers.try_iter().collect();
        on_completion.sort_unstable();
        assert_eq!(on_completion, [(0, true), (1, true), (2, true)]);
        assert!(attached.await.unwrap().is_err());
        assert!(!outbox.send(Priority::Demand, message(3)).await, "later sends fail");
    }

    #[tokio::test]
    async fn send_fails_after_close() {
        let (outbox, _inbox) = pair(1).unwrap();
        outbox.event_fd.close();
        assert!(!outbox.send(Priority::Demand, detach(0)).await);
    }
}
