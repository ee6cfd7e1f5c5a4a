//! The stream of one client: page bytes move on it in turns, and it notes since when nothing is in the way.
//!
//! No more clients have a turn at a time than the runtime has threads. When others want one, who has it lets all go first that
//! the thread was asked to do before, or as much of it as the runtime does before it looks at sockets again; so bulk gets on,
//! and what is short does not stand behind the pages of other clients. A client's own pages it may stand behind.

use crate::budget::Account;
use crate::clock::now;
use larder_wire::{Sink, Source};
use parking_lot::Mutex;
use std::io::{self, IoSlice, IoSliceMut};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};

/// What is no longer takes no turn: bodies, short answers.
const SHORT_BYTES: usize = 64 << 10;

/// Turns to move page bytes, in the order in which they were asked for.
#[derive(Clone)]
pub(crate) struct Turns {
    threads: usize,
    free: Arc<Semaphore>,
    /// Those who move page bytes, or wait for a turn or for their client: whoever may want a turn in a moment.
    moving: Arc<AtomicUsize>,
}

impl Turns {
    /// As many at a time as the runtime has threads.
    pub(crate) fn new() -> Turns {
        let threads = Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers());
        Turns { threads, free: Arc::new(Semaphore::new(threads)), moving: Arc::default() }
    }

    /// Moves bytes with `step`, in turns if they are many; `waited` hears whenever it had to wait for the client.
    async fn take<T>(&self, bytes: usize, step: impl Future<Output = T>, mut waited: impl FnMut()) -> T {
        let many = bytes > SHORT_BYTES;
        let _moving = many.then(|| Moving::begin(&self.moving));
        let mut step = pin!(step);
        loop {
            let turn = if many { self.turn().await } else { None };
            let polled = futures::poll!(&mut step);
            drop(turn);
            if let Poll::Ready(done) = polled {
                return done;
            }
            futures::pending!();
            waited();
        }
    }

    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        let turn = self.free.acquire().await.ok();
        if self.moving.load(Ordering::Relaxed) > self.threads {
            tokio::task::yield_now().await;
        }
        turn
    }
}

/// Counts one.
struct Moving<'a>(&'a AtomicUsize);

impl<'a> Moving<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Moving(count)
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Since when a way to a client is free: before that it was full of what the client had not taken, or pages that the client had
/// asked for were leaving, or waited for their turn to.
#[derive(Clone)]
pub(super) struct FreeSince(Arc<Mutex<Instant>>);

impl FreeSince {
    pub(super) fn get(&self) -> Instant {
        *self.0.lock()
    }
}

/// The way to a client.
pub(super) struct ToSocket<W> {
    way: W,
    turns: Turns,
    free_since: FreeSince,
    /// Hears what the client takes.
    account: Option<Arc<Account>>,
}

impl<W: Sink> ToSocket<W> {
    pub(super) fn new(way: W, turns: Turns, account: Option<Arc<Account>>) -> (Self, FreeSince) {
        let free_since = FreeSince(Arc::new(Mutex::new(now())));
        (Self { way, turns, free_since: free_since.clone(), account }, free_since)
    }
}

impl<W: Sink> Sink for ToSocket<W> {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let bytes = from.iter().map(|slice| slice.len()).sum();
        let free_since = &self.free_since.0;
        let sent = self.turns.take(bytes, self.way.send(from), || *free_since.lock() = now()).await;
        if bytes > SHORT_BYTES {
            *free_since.lock() = now();
            if let (Some(account), Ok(sent)) = (&self.account, &sent) {
                account.took(*sent as u64);
            }
        }
        sent
    }
}

/// The way from a client.
pub(super) struct FromSocket<R> {
    way: R,
    turns: Turns,
    /// Many bytes were received last: there are likely more, and who sleeps until they come gets more of them at once.
    in_bulk: bool,
}

impl<R: Source> FromSocket<R> {
    pub(super) fn new(way: R, turns: Turns) -> Self {
        Self { way, turns, in_bulk: false }
    }
}

impl<R: Source> Source for FromSocket<R> {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let bytes = into.iter().map(|slice| slice.len()).sum();
        self.in_bulk = bytes > SHORT_BYTES;
        self.turns.take(bytes, self.way.receive(into), || {}).await
    }

    async fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match std::mem::take(&mut self.in_bulk) {
            true => self.way.receive(into).await,
            false => self.way.receive_next(into).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::mpsc;

    const MANY: usize = 128 << 10;

    /// Has room for one send again as soon as it has none.
    struct Quick(Arc<AtomicUsize>);

    impl Sink for Quick {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            let mut full = true;
            std::future::poll_fn(|context| match std::mem::take(&mut full) {
                true => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
                false => Poll::Ready(()),
            })
            .await;
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(from.iter().map(|slice| slice.len()).sum())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn what_is_short_does_not_stand_behind_the_pages_of_others() {
        let (turns, sent) = (Turns::new(), Arc::new(AtomicUsize::new(0)));
        // All of them begin when this thread has begun them.
        let all = tokio::spawn(async move {
            let movers: Vec<_> = (0..8)
                .map(|_| {
                    let (mut way, _) = ToSocket::new(Quick(sent.clone()), turns.clone(), None);
                    tokio::spawn(async move {
                        let bulk = vec![0; MANY];
                        for _ in 0..400 {
                            way.send(&[IoSlice::new(&bulk)]).await.unwrap();
                        }
                    })
                })
                .collect();
            // Two that hand a word to and fro, 200 times.
            let ((to, mut from), (back, mut answers)) = (mpsc::channel(1), mpsc::channel(1));
            let other = tokio::spawn(async move {
                while let Some(word) = from.recv().await {
                    back.send(word).await.unwrap();
                }
            });
            let one = tokio::spawn(async move {
                let begun = sent.load(Ordering::Relaxed);
                for word in 0..200 {
                    to.send(word).await.unwrap();
                    assert_eq!(answers.recv().await, Some(word));
                }
                sent.load(Ordering::Relaxed) - begun
            });
            let meanwhile = one.await.unwrap();
            assert!(movers.iter().all(|mover| !mover.is_finished()));
            other.await.unwrap();
            for mover in movers {
                mover.await.unwrap();
            }
            meanwhile
        });
        let meanwhile = all.await.unwrap();
        assert!(meanwhile < 600, "{meanwhile} pages went before 400 words");
    }

    /// Is full until a word comes.
    struct Full(mpsc::Receiver<()>);

    impl Sink for Full {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            self.0.recv().await;
            Ok(from[0].len())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_way_is_free_when_it_takes_bytes_again_and_nobody_waits_with_his_turn() {
        let (room, full) = mpsc::channel(1);
        let turns = Turns::new();
        let (mut way, free_since) = ToSocket::new(Full(full), turns.clone(), None);
        let begin = now();
        let sending = tokio::spawn(async move { way.send(&[IoSlice::new(&[0; MANY])]).await });
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!((free_since.get(), turns.free.available_permits()), (begin, 1));
        room.send(()).await.unwrap();
        assert_eq!(sending.await.unwrap().unwrap(), MANY);
        assert_eq!(free_since.get(), begin + Duration::from_secs(2));
        assert_eq!(turns.moving.load(Ordering::Relaxed), 0);
    }

    /// Notes how it was waited for.
    #[derive(Default)]
    struct Noting(Vec<&'static str>);

    impl Source for Noting {
        async fn receive(&mut self, _into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            self.0.push("asleep");
            Ok(1)
        }

        async fn receive_next(&mut self, _into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            self.0.push("looking");
            Ok(1)
        }
    }

    #[tokio::test]
    async fn a_message_is_looked_for_unless_many_bytes_came_before_it() {
        let mut way = FromSocket::new(Noting::default(), Turns::new());
        let (mut few, mut many) = ([0; 32], vec![0; MANY]);
        for _ in 0..2 {
            way.receive_next(&mut [IoSliceMut::new(&mut few)]).await.unwrap();
        }
        way.receive(&mut [IoSliceMut::new(&mut many)]).await.unwrap();
        for _ in 0..2 {
            way.receive_next(&mut [IoSliceMut::new(&mut few)]).await.unwrap();
        }
        way.receive(&mut [IoSliceMut::new(&mut few)]).await.unwrap();
        way.receive_next(&mut [IoSliceMut::new(&mut few)]).await.unwrap();
        assert_eq!(way.way.0, ["looking", "looking", "asleep", "asleep", "looking", "asleep", "looking"]);
    }
}
