//! Fair sharing of socket work between connections.
//!
//! A socket operation on page bytes copies up to a megabyte in the kernel, on a thread that other
//! connections share. The [`BulkScheduler`] lets at most one such operation per thread run at a
//! time. Before each one it yields, so that short answers of other connections go first.
//!
//! A client's short answers may wait behind its own pages. They share its socket.

use crate::budget::{Account, LOOK_INTERVAL};
use larder_memory::socket::unacknowledged_bytes;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use larder_wire::{ByteSink, ByteSource};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Operations on more bytes than this are bulk. 64 KiB are one chunk of a page, which the kernel
/// copies in about 10 µs. Bodies and short answers are smaller.
const BULK_MIN: usize = 64 << 10;

/// Schedules bulk socket operations of all connections, in the order in which they ask.
#[derive(Clone)]
pub(crate) struct BulkScheduler {
    threads: usize,
    permits: Arc<Semaphore>,
    /// Bulk operations that run, or wait for a permit or for their client.
    active: Arc<AtomicUsize>,
}

impl BulkScheduler {
    pub(crate) fn new() -> BulkScheduler {
        let threads = Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers());
        BulkScheduler { threads, permits: Arc::new(Semaphore::new(threads)), active: Arc::default() }
    }

    /// Runs a socket operation on `bytes` bytes. A bulk one holds a permit during each poll, and
    /// none while it waits for its client. Calls `on_wait` after each of these waits.
    async fn run<T>(&self, bytes: usize, operation: impl Future<Output = T>, mut on_wait: impl FnMut()) -> T {
        let is_bulk = bytes > BULK_MIN;
        let _active = is_bulk.then(|| ActiveOperation::start(&self.active));
        let mut operation = pin!(operation);
        loop {
            let permit = if is_bulk { self.permit().await } else { None };
            let polled = futures::poll!(&mut operation);
            drop(permit);
            if let Poll::Ready(done) = polled {
                return done;
            }
            // The operation has registered this task's waker.
            futures::pending!();
            on_wait();
        }
    }

    async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        let permit = self.permits.acquire().await.ok();
        // Only if others want a turn: alone, a yield would cost throughput for nothing.
        if self.active.load(Ordering::Relaxed) > self.threads {
            tokio::task::yield_now().await;
        }
        permit
    }
}

struct ActiveOperation<'a>(&'a AtomicUsize);

impl<'a> ActiveOperation<'a> {
    fn start(count: &'a AtomicUsize) -> Self {
        // Relaxed: the count is a hint for fairness and orders nothing.
        count.fetch_add(1, Ordering::Relaxed);
        ActiveOperation(count)
    }
}

impl Drop for ActiveOperation<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Time since which nothing delays a short answer to one client: neither a full socket, nor pages
/// that the client requested before.
#[derive(Clone)]
pub(crate) struct UncongestedSince(Arc<Mutex<Instant>>);

impl UncongestedSince {
    pub(super) fn get(&self) -> Instant {
        *self.0.lock()
    }
}

pub(crate) struct ScheduledSink<W> {
    inner: W,
    scheduler: BulkScheduler,
    uncongested_since: UncongestedSince,
    /// Learns of the client's progress. `None` for a connection that was refused.
    account: Option<Arc<Account>>,
    /// Bytes that the client had not acknowledged at the last look. `None` after a send, which adds
    /// to them.
    unacknowledged: Option<u64>,
}

impl<W: ByteSink> ScheduledSink<W> {
    pub(crate) fn new(inner: W, scheduler: BulkScheduler, account: Option<Arc<Account>>) -> (Self, UncongestedSince) {
        let uncongested_since = UncongestedSince(Arc::new(Mutex::new(now())));
        let sink =
            Self { inner, scheduler, uncongested_since: uncongested_since.clone(), account, unacknowledged: None };
        (sink, uncongested_since)
    }
}

impl<W: ByteSink> ScheduledSink<W> {
    /// Records progress if the client has received bytes since the last look. The socket of a slow
    /// link takes 64 KiB at a time, so that a second can pass between two sends.
    fn look_for_progress(&mut self) {
        let after = self.inner.socket().and_then(|socket| unacknowledged_bytes(socket).ok());
        let before = std::mem::replace(&mut self.unacknowledged, after);
        let Some(account) = &self.account else { return };
        match (before, after) {
            (Some(before), Some(after)) if after < before => account.record_progress(),
            // The first look after a send: it may come late, and the client have received bytes.
            (None, Some(_)) => account.record_progress(),
            _ => account.record_no_progress(),
        }
    }
}

impl<W: ByteSink> ByteSink for ScheduledSink<W> {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let bytes = from.iter().map(|slice| slice.len()).sum();
        let mut has_waited = bytes > BULK_MIN;
        let sent = loop {
            let operation = self.scheduler.run(bytes, self.inner.send(from), || has_waited = true);
            // A dropped operation has taken no bytes, so it can begin again.
            match tokio::time::timeout(LOOK_INTERVAL, operation).await {
                Ok(sent) => break sent,
                Err(_) => {
                    has_waited = true;
                    self.look_for_progress();
                }
            }
        };
        if has_waited {
            *self.uncongested_since.0.lock() = now();
        }
        if sent.is_ok() {
            self.unacknowledged = None;
            if let Some(account) = &self.account {
                account.record_progress();
            }
        }
        sent
    }

    fn limit_buffered(&mut self, is_limited: bool) {
        self.inner.limit_buffered(is_limited);
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.inner.socket()
    }
}

pub(crate) struct ScheduledSource<R> {
    inner: R,
    scheduler: BulkScheduler,
    /// The last operation was bulk. More bytes are likely to follow, and a thread that sleeps until
    /// they come receives more of them at once than one that polls.
    was_bulk: bool,
}

impl<R: ByteSource> ScheduledSource<R> {
    pub(crate) fn new(inner: R, scheduler: BulkScheduler) -> Self {
        Self { inner, scheduler, was_bulk: false }
    }
}

impl<R: ByteSource> ByteSource for ScheduledSource<R> {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let bytes = into.iter().map(|slice| slice.len()).sum();
        self.was_bulk = bytes > BULK_MIN;
        self.scheduler.run(bytes, self.inner.receive(into), || {}).await
    }

    async fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if std::mem::take(&mut self.was_bulk) {
            self.inner.receive(into).await
        } else {
            self.inner.receive_next(into).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::mpsc;

    const BULK: usize = 128 << 10;

    /// Sink that is full once per operation and writable again at once.
    struct BrieflyFullSink(Arc<AtomicUsize>);

    impl ByteSink for BrieflyFullSink {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            let mut full = true;
            std::future::poll_fn(|context| {
                if std::mem::take(&mut full) {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
            .await;
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(from.iter().map(|slice| slice.len()).sum())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn short_messages_do_not_wait_for_pages_of_other_connections() {
        let scheduler = BulkScheduler::new();
        let sent = Arc::new(AtomicUsize::new(0));
        // Spawned together, so that all of them run on this one thread.
        let all = tokio::spawn(async move {
            let senders: Vec<_> = (0..8)
                .map(|_| {
                    let (mut sink, _) = ScheduledSink::new(BrieflyFullSink(sent.clone()), scheduler.clone(), None);
                    tokio::spawn(async move {
                        let bulk = vec![0; BULK];
                        for _ in 0..400 {
                            sink.send(&[IoSlice::new(&bulk)]).await.unwrap();
                        }
                    })
                })
                .collect();
            // Two tasks that exchange a message 200 times.
            let (request, mut requests) = mpsc::channel(1);
            let (answer, mut answers) = mpsc::channel(1);
            let echo = tokio::spawn(async move {
                while let Some(message) = requests.recv().await {
                    answer.send(message).await.unwrap();
                }
            });
            let caller = tokio::spawn(async move {
                let before = sent.load(Ordering::Relaxed);
                for message in 0..200 {
                    request.send(message).await.unwrap();
                    assert_eq!(answers.recv().await, Some(message));
                }
                sent.load(Ordering::Relaxed) - before
            });
            let meanwhile = caller.await.unwrap();
            assert!(senders.iter().all(|sender| !sender.is_finished()));
            echo.await.unwrap();
            for sender in senders {
                sender.await.unwrap();
            }
            meanwhile
        });
        let meanwhile = all.await.unwrap();
        assert!(meanwhile < 600, "{meanwhile} pages were sent during 400 messages");
    }

    struct FullSink(mpsc::Receiver<()>);

    impl ByteSink for FullSink {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            self.0.recv().await;
            Ok(from[0].len())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn full_socket_holds_no_permit_and_is_uncongested_when_it_takes_bytes() {
        let (writable, full) = mpsc::channel(1);
        let scheduler = BulkScheduler::new();
        let (mut sink, uncongested_since) = ScheduledSink::new(FullSink(full), scheduler.clone(), None);
        let start = now();
        let sending = tokio::spawn(async move { sink.send(&[IoSlice::new(&[0; BULK])]).await });
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!((uncongested_since.get(), scheduler.permits.available_permits()), (start, 1));
        writable.send(()).await.unwrap();
        assert_eq!(sending.await.unwrap().unwrap(), BULK);
        assert_eq!(uncongested_since.get(), start + Duration::from_secs(2));
        assert_eq!(scheduler.active.load(Ordering::Relaxed), 0);
    }

    #[derive(Default)]
    struct RecordingSource(Vec<&'static str>);

    impl ByteSource for RecordingSource {
        async fn receive(&mut self, _into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            self.0.push("sleep");
            Ok(1)
        }

        async fn receive_next(&mut self, _into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            self.0.push("poll");
            Ok(1)
        }
    }

    #[tokio::test]
    async fn next_message_is_polled_for_unless_it_follows_bulk() {
        let mut source = ScheduledSource::new(RecordingSource::default(), BulkScheduler::new());
        let mut short = [0; 32];
        let mut bulk = vec![0; BULK];
        for _ in 0..2 {
            source.receive_next(&mut [IoSliceMut::new(&mut short)]).await.unwrap();
        }
        source.receive(&mut [IoSliceMut::new(&mut bulk)]).await.unwrap();
        for _ in 0..2 {
            source.receive_next(&mut [IoSliceMut::new(&mut short)]).await.unwrap();
        }
        source.receive(&mut [IoSliceMut::new(&mut short)]).await.unwrap();
        source.receive_next(&mut [IoSliceMut::new(&mut short)]).await.unwrap();
        assert_eq!(source.inner.0, ["poll", "poll", "sleep", "sleep", "poll", "sleep", "poll"]);
    }
}
