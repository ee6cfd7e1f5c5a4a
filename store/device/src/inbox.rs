//! How requests reach the executor of a ring: three bounded lanes and a bell that wakes it.
//!
//! Always true: a message that was sent is either taken by the executor or answered with an error when that ends, however
//! that happens; the bell makes a system call only when the executor said that it would sleep.

use crate::file::DeviceFile;
use crate::request::{Done, FileId, Lane, Request};
use crate::ring::RingGone;
use crate::seam::Completion;
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
    /// Nobody will take it any more.
    fn refuse(self) {
        match self {
            Message::Submit(Request { operation, .. }, completion) => {
                answer(completion, Done { operation, result: Err(RingGone.into()) });
            }
            // If nobody waits for the number, nobody will use the file.
            Message::Attach(_, reply) => drop(reply.send(Err(RingGone.into()))),
            Message::Detach(_) => {}
        }
    }
}

/// A completion that panics is a defect of its author; the device's executor must outlive it.
pub(crate) fn answer(completion: Completion, done: Done) {
    if catch_unwind(AssertUnwindSafe(|| completion(done))).is_err() {
        tracing::error!("a completion panicked on the device's executor");
    }
}

/// Every this many messages the background lane goes first.
const BACKGROUND_TURN: u32 = 4;
/// Every this many messages the idle lane goes first.
const IDLE_TURN: u32 = 64;

/// Wakes the executor.
pub(crate) struct Bell {
    event: File,
    /// Something other than a message happened since the executor last looked.
    news: AtomicBool,
    sleeping: AtomicBool,
    /// It sleeps, and could take a message: with all places taken, messages have to wait for an answer anyway.
    hungry: AtomicBool,
    closing: AtomicBool,
    /// Nobody takes messages any more.
    gone: AtomicBool,
}

impl Bell {
    fn new() -> io::Result<Bell> {
        // SAFETY: no memory is passed; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let event = unsafe { File::from_raw_fd(fd) };
        let [news, sleeping, hungry, closing, gone] = [false; 5].map(AtomicBool::new);
        Ok(Bell { event, news, sleeping, hungry, closing, gone })
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Tells of a task, a timer or the end.
    pub(crate) fn ring(&self) {
        self.news.store(true, Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.strike();
        }
    }

    /// Tells of a message in a lane.
    fn ring_for_message(&self) {
        if self.hungry.swap(false, Ordering::SeqCst) {
            self.strike();
        }
    }

    fn strike(&self) {
        // The counter cannot overflow, as it is cleared at each wake-up; there is nothing to do about an error.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    /// Whoever sends or rings from now on, and sees it, strikes. What was sent before must be looked for after this.
    pub(crate) fn fall_asleep(&self, hungry: bool) {
        self.sleeping.store(true, Ordering::SeqCst);
        self.hungry.store(hungry, Ordering::SeqCst);
    }

    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
        self.hungry.store(false, Ordering::SeqCst);
    }

    pub(crate) fn has_news(&self) -> bool {
        self.news.load(Ordering::SeqCst)
    }

    pub(crate) fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn clear(&self) {
        let _ = (&self.event).read(&mut [0; 8]);
    }

    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(crate) fn closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }
}

/// The sending side.
pub(crate) struct Outbox {
    lanes: [flume::Sender<Message>; Lane::COUNT],
    /// For what is sent while the executor ends: a lane keeps it as long as there are senders.
    left: [flume::Receiver<Message>; Lane::COUNT],
    pub(crate) bell: Arc<Bell>,
}

/// The receiving side.
pub(crate) struct Inbox {
    lanes: [Waiting; Lane::COUNT],
    turn: u32,
    pub(crate) bell: Arc<Bell>,
}

/// One lane, with its first message at hand.
struct Waiting {
    first: Option<Message>,
    rest: flume::Receiver<Message>,
}

/// Three lanes of `backlog` messages each.
pub(crate) fn pair(backlog: usize) -> io::Result<(Outbox, Inbox)> {
    let bell = Arc::new(Bell::new()?);
    let [one, two, three] = [(); Lane::COUNT].map(|()| flume::bounded(backlog));
    let left = [one.1.clone(), two.1.clone(), three.1.clone()];
    let outbox = Outbox { lanes: [one.0, two.0, three.0], left, bell: bell.clone() };
    let lanes = [one.1, two.1, three.1].map(|rest| Waiting { first: None, rest });
    Ok((outbox, Inbox { lanes, turn: 0, bell }))
}

impl Outbox {
    /// Waits for room in the lane. `false` if the executor is gone or going.
    pub(crate) async fn send(&self, lane: Lane, message: Message) -> bool {
        if self.bell.closing() {
            return false;
        }
        let sent = self.lanes[lane as usize].send_async(message).await.is_ok();
        self.bell.ring_for_message();
        if self.bell.gone.load(Ordering::SeqCst) {
            self.left[lane as usize].try_iter().for_each(Message::refuse);
        }
        sent
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.bell.close();
        // Whoever sends after this looks after its message by itself.
        self.bell.gone.store(true, Ordering::SeqCst);
        for lane in &mut self.lanes {
            lane.first.take().into_iter().chain(lane.rest.try_iter()).for_each(Message::refuse);
        }
    }
}

impl Waiting {
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
    /// The next message and its lane. With `idle` unset, none of the idle lane.
    pub(crate) fn take(&mut self, idle: bool) -> Option<(Lane, Message)> {
        use Lane::{Background, Demand, Idle};
        self.turn = (self.turn + 1) % IDLE_TURN;
        let order = match self.turn {
            0 => [Idle, Demand, Background],
            turn if turn.is_multiple_of(BACKGROUND_TURN) => [Background, Demand, Idle],
            _ => [Demand, Background, Idle],
        };
        let mut allowed = order.into_iter().filter(|&lane| idle || lane != Idle);
        allowed.find_map(|lane| Some((lane, self.take_if(lane, |_| true)?)))
    }

    /// The next message of a lane, if it is wanted; otherwise it stays where it is.
    pub(crate) fn take_if(&mut self, lane: Lane, wanted: impl FnOnce(&Message) -> bool) -> Option<Message> {
        self.lanes[lane as usize].take_if(wanted)
    }

    /// Whether [`Inbox::take`] would find something.
    pub(crate) fn has_any(&self, idle: bool) -> bool {
        let waits = |lane: Lane| !self.lanes[lane as usize].is_empty();
        waits(Lane::Demand) || waits(Lane::Background) || idle && waits(Lane::Idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detach(file: u32) -> Message {
        Message::Detach(FileId(file))
    }

    /// The lanes in which messages are taken.
    fn order(inbox: &mut Inbox, idle: bool) -> Vec<Lane> {
        std::iter::from_fn(|| Some(inbox.take(idle)?.0)).collect()
    }

    #[tokio::test]
    async fn background_gets_every_fourth_turn() {
        let (outbox, mut inbox) = pair(16).unwrap();
        for file in 0..8 {
            assert!(outbox.send(Lane::Demand, detach(file)).await);
            assert!(outbox.send(Lane::Background, detach(100 + file)).await);
        }
        let order = order(&mut inbox, true);
        let background: Vec<bool> = order.iter().map(|&lane| lane == Lane::Background).collect();
        assert_eq!(background[..8], [false, false, false, true, false, false, false, true]);
        assert_eq!(order.len(), 16);
    }

    #[tokio::test]
    async fn idle_waits_for_all_others_but_not_for_ever() {
        let (outbox, mut inbox) = pair(256).unwrap();
        for file in 0..130 {
            assert!(outbox.send(Lane::Idle, detach(file)).await);
            assert!(outbox.send(Lane::Demand, detach(file)).await);
        }
        let order = order(&mut inbox, true);
        let idle: Vec<usize> = (0..order.len()).filter(|&at| order[at] == Lane::Idle).collect();
        assert_eq!(idle[..4], [63, 127, 132, 133]);
        assert_eq!(idle.len(), 130);
    }

    #[tokio::test]
    async fn idle_is_left_alone_when_enough_of_it_is_under_way() {
        let (outbox, mut inbox) = pair(16).unwrap();
        assert!(outbox.send(Lane::Idle, detach(0)).await);
        assert!(!inbox.has_any(false) && inbox.take(false).is_none());
        assert!(inbox.has_any(true) && inbox.take(true).is_some());
    }

    #[tokio::test]
    async fn what_is_not_wanted_stays_in_its_place() {
        let (outbox, mut inbox) = pair(16).unwrap();
        for file in 0..2 {
            assert!(outbox.send(Lane::Demand, detach(file)).await);
        }
        assert!(inbox.take_if(Lane::Demand, |_| false).is_none());
        assert!(inbox.has_any(false));
        for expected in 0..2 {
            let Some((_, Message::Detach(FileId(file)))) = inbox.take(false) else { panic!("nothing waits") };
            assert_eq!(file, expected);
        }
        assert!(!inbox.has_any(true));
    }

    /// The executor ends, as when its ring fails: what waits in the lanes and before them is answered.
    #[tokio::test]
    async fn what_nobody_takes_is_answered() {
        let (outbox, inbox) = pair(2).unwrap();
        let (told, answers) = flume::unbounded();
        let message = |number: u32| {
            let told = told.clone();
            let request = Request { file: FileId(0), lane: Lane::Demand, operation: crate::request::Operation::Sync };
            Message::Submit(request, Box::new(move |done: Done| told.send((number, done.result.is_err())).unwrap()))
        };
        assert!(outbox.send(Lane::Demand, message(0)).await && outbox.send(Lane::Demand, message(1)).await);
        let (reply, attached) = oneshot::channel();
        let file = DeviceFile::open(std::path::Path::new("/dev/null")).unwrap();
        assert!(outbox.send(Lane::Background, Message::Attach(file, reply)).await);
        let waits = outbox.send(Lane::Demand, message(2));
        let ends = async {
            tokio::task::yield_now().await;
            drop(inbox);
        };
        tokio::join!(waits, ends);
        let mut answered: Vec<_> = answers.try_iter().collect();
        answered.sort_unstable();
        assert_eq!(answered, [(0, true), (1, true), (2, true)]);
        assert!(attached.await.unwrap().is_err());
        assert!(!outbox.send(Lane::Demand, message(3)).await, "and nothing else is sent");
    }

    #[tokio::test]
    async fn nothing_is_taken_after_closing() {
        let (outbox, _inbox) = pair(1).unwrap();
        outbox.bell.close();
        assert!(!outbox.send(Lane::Demand, detach(0)).await);
    }
}
