//! How requests reach the thread of a ring: two bounded lanes and a bell that wakes the thread.
//!
//! Always true: a message that was sent is either taken by the thread or dropped with its completion, never lost in
//! silence; the bell is rung only when the thread said that it would sleep.

use crate::file::DeviceFile;
use crate::request::{Done, FileId, Lane, Request};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

/// Called once, on the ring's thread, when the kernel has answered.
pub(crate) type Completion = Box<dyn FnOnce(Done) + Send>;

pub(crate) enum Message {
    Submit(Request, Completion),
    Attach(DeviceFile, oneshot::Sender<io::Result<FileId>>),
    Detach(FileId),
}

/// Every this many requests the background lane goes first.
const BACKGROUND_TURN: u32 = 4;

/// Wakes the thread.
pub(crate) struct Bell {
    event: File,
    sleeping: AtomicBool,
    closing: AtomicBool,
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
        Ok(Bell { event, sleeping: AtomicBool::new(false), closing: AtomicBool::new(false) })
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Wakes the thread if it sleeps or is about to.
    fn ring(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // The counter cannot overflow, as it is cleared at each wake-up; there is nothing to do about an error.
            let _ = (&self.event).write(&1u64.to_ne_bytes());
        }
    }

    pub(crate) fn fall_asleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
    }

    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
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
    demand: flume::Sender<Message>,
    background: flume::Sender<Message>,
    pub(crate) bell: Arc<Bell>,
}

/// The receiving side.
pub(crate) struct Inbox {
    demand: flume::Receiver<Message>,
    background: flume::Receiver<Message>,
    turn: u32,
    pub(crate) bell: Arc<Bell>,
}

/// Two lanes of `backlog` messages each.
pub(crate) fn pair(backlog: usize) -> io::Result<(Outbox, Inbox)> {
    let bell = Arc::new(Bell::new()?);
    let (demand, demand_in) = flume::bounded(backlog);
    let (background, background_in) = flume::bounded(backlog);
    let outbox = Outbox { demand, background, bell: bell.clone() };
    Ok((outbox, Inbox { demand: demand_in, background: background_in, turn: 0, bell }))
}

impl Outbox {
    /// Waits for room in the lane. `false` if the thread is gone or going.
    pub(crate) async fn send(&self, lane: Lane, message: Message) -> bool {
        if self.bell.closing() {
            return false;
        }
        let sender = match lane {
            Lane::Demand => &self.demand,
            Lane::Background => &self.background,
        };
        let sent = sender.send_async(message).await.is_ok();
        self.bell.ring();
        sent
    }
}

impl Inbox {
    pub(crate) fn take(&mut self) -> Option<Message> {
        self.turn = (self.turn + 1) % BACKGROUND_TURN;
        let (first, second) = match self.turn {
            0 => (&self.background, &self.demand),
            _ => (&self.demand, &self.background),
        };
        first.try_recv().or_else(|_| second.try_recv()).ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.demand.is_empty() && self.background.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detach(file: u32) -> Message {
        Message::Detach(FileId(file))
    }

    #[tokio::test]
    async fn background_gets_every_fourth_turn() {
        let (outbox, mut inbox) = pair(16).unwrap();
        for file in 0..8 {
            assert!(outbox.send(Lane::Demand, detach(file)).await);
            assert!(outbox.send(Lane::Background, detach(100 + file)).await);
        }
        let mut order = Vec::new();
        while let Some(Message::Detach(FileId(file))) = inbox.take() {
            order.push(file >= 100);
        }
        assert_eq!(order[..8], [false, false, false, true, false, false, false, true]);
        assert_eq!(order.len(), 16);
    }

    #[tokio::test]
    async fn nothing_is_taken_after_closing() {
        let (outbox, _inbox) = pair(1).unwrap();
        outbox.bell.close();
        assert!(!outbox.send(Lane::Demand, detach(0)).await);
    }
}
