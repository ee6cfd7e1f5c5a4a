//! The ring on real files, with each of its executors.
//!
//! Every test runs on glommio and on a plain thread, and on glommio with deferred completions, see
//! `on_both_executors`.

use larder_io::{
    Block, DeviceFile, Done, Executor, FileId, Operation, Priority, Request, Ring, RingOptions, RingStats, TaskClass,
};
use larder_memory::{Arena, SlotMut};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const BLOCK: usize = 4096;
/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Setup {
    executor: Executor,
    /// See [`RingOptions::deferred`].
    deferred: bool,
}

struct TestRing {
    arena: Arc<Arena>,
    ring: Arc<Ring>,
    dir: TempDir,
}

impl TestRing {
    fn new(setup: Setup, queue_depth: u32) -> TestRing {
        TestRing::named(setup, "test-ring", queue_depth)
    }

    fn named(setup: Setup, name: &str, queue_depth: u32) -> TestRing {
        let arena = Arena::new(8 << 20).unwrap();
        let Setup { executor, deferred } = setup;
        let options = RingOptions { executor, deferred, queue_depth, backlog: 32, ..RingOptions::new(name, 8) };
        let ring = Arc::new(Ring::start(arena.clone(), options).unwrap());
        assert_eq!(ring.capabilities().executor, executor);
        TestRing { arena, ring, dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn file(&self, name: &str, bytes: u64) -> FileId {
        self.ring.attach(DeviceFile::create(&self.path(name), bytes).unwrap()).await.unwrap()
    }

    fn slot(&self, len: usize, fill: u8) -> SlotMut {
        let mut slot = self.arena.allocate(len).unwrap();
        slot.fill(fill);
        slot
    }

    async fn run(&self, file: FileId, operation: Operation) -> larder_io::Done {
        self.ring.run(Request { file, priority: Priority::Demand, operation }).await.unwrap()
    }

    async fn read(&self, file: FileId, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
        let done = self.run(file, Operation::read(offset, self.slot(len, 0xcc))).await;
        let Operation::Read { slot, .. } = done.operation else { panic!("the outcome returns another operation") };
        done.result.map(|()| slot.to_vec())
    }
}

fn bytes_of(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

async fn write_puts_payload_directly_behind_header(setup: Setup) {
    let bed = TestRing::new(setup, 16);
    let file = bed.file("a", 1 << 20).await;
    let payload = bed.slot(10_000, 7).freeze();
    let done = bed.run(file, Operation::write(BLOCK as u64, Block::of(b"head"), Some(payload))).await;
    done.result.unwrap();
    bed.run(file, Operation::Sync).await.result.unwrap();
    let found = bytes_of(&bed.path("a"), BLOCK as u64, 4 * BLOCK);
    assert_eq!(&found[..5], b"head\0");
    assert!(found[BLOCK..BLOCK + 10_000].iter().all(|&b| b == 7));
    assert!(found[BLOCK + 10_000..].iter().all(|&b| b == 0), "padding is zero, not another page's bytes");
    let back = bed.read(file, 2 * BLOCK as u64, 10_000).await.unwrap();
    assert!(back.iter().all(|&b| b == 7));
}

async fn concurrent_requests_keep_their_own_bytes(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let file = bed.file("a", 4 << 20).await;
    let writes = (0..64u8).map(|n| {
        let payload = bed.slot(3 * BLOCK, n).freeze();
        bed.run(file, Operation::write(u64::from(n) * 4 * BLOCK as u64, Block::of(&[n; 8]), Some(payload)))
    });
    for done in join_all(writes).await {
        done.result.unwrap();
    }
    let reads = (0..64u8).map(|n| bed.read(file, u64::from(n) * 4 * BLOCK as u64, 4 * BLOCK));
    for (n, bytes) in join_all(reads).await.into_iter().enumerate() {
        let bytes = bytes.unwrap();
        assert_eq!(&bytes[..8], [n as u8; 8]);
        assert!(bytes[BLOCK..].iter().all(|&b| b == n as u8));
    }
    bed.ring.close();
    assert_eq!(bed.arena.used(), 0, "all memory is returned");
}

async fn join_all<F: std::future::Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut pinned: Vec<_> = futures.map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = pinned.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, output) in pinned.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let std::task::Poll::Ready(ready) = future.as_mut().poll(context)
            {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

async fn read_past_the_end_fails_with_unexpected_eof(setup: Setup) {
    let bed = TestRing::new(setup, 16);
    let file = bed.file("a", 2 * BLOCK as u64).await;
    assert_eq!(bed.read(file, 0, 4 * BLOCK).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(bed.read(file, 1 << 20, BLOCK).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

async fn unaligned_oversized_or_detached_requests_are_refused(setup: Setup) {
    let bed = TestRing::new(setup, 16);
    let file = bed.file("a", 1 << 20).await;
    assert_eq!(bed.read(file, 1, BLOCK).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    let beyond = Operation::Read { offset: 0, block: None, slot: bed.slot(BLOCK, 0), range: 0..2 * BLOCK };
    assert_eq!(bed.run(file, beyond).await.result.unwrap_err().kind(), ErrorKind::InvalidInput);
    bed.ring.detach(file).await;
    assert_eq!(bed.read(file, 0, BLOCK).await.unwrap_err().kind(), ErrorKind::NotFound);
}

async fn file_number_is_reused_only_after_detach(setup: Setup) {
    let bed = TestRing::new(setup, 16);
    for turn in 0..20u8 {
        let file = bed.file(&format!("f{turn}"), 1 << 20).await;
        bed.run(file, Operation::write(0, Block::of(&[turn; BLOCK]), None)).await.result.unwrap();
        assert!(bed.read(file, 0, BLOCK).await.unwrap().iter().all(|&b| b == turn));
        bed.ring.detach(file).await;
    }
}

async fn dropping_a_future_keeps_memory_until_completion(setup: Setup) {
    let bed = TestRing::new(setup, 1);
    let file = bed.file("a", 8 << 20).await;
    for n in 0..200u8 {
        let payload = bed.slot(64 << 10, n).freeze();
        let write = bed.run(file, Operation::write(0, Block::of(&[n; 8]), Some(payload)));
        // Dropped at different moments, before and after submission.
        let _ = tokio::time::timeout(Duration::from_micros(u64::from(n)), write).await;
    }
    bed.ring.close();
    assert_eq!(bed.arena.used(), 0);
    let head = bytes_of(&bed.path("a"), 0, 8)[0];
    let found = bytes_of(&bed.path("a"), BLOCK as u64, 64 << 10);
    assert!(found.iter().all(|&b| b == head), "every write is complete");
}

async fn close_completes_accepted_requests_and_refuses_new_ones(setup: Setup) {
    let bed = TestRing::new(setup, 1);
    let file = bed.file("a", 1 << 20).await;
    let (sender, receiver) = std::sync::mpsc::channel();
    for n in 0..4u64 {
        let operation = Operation::write(n * BLOCK as u64, Block::of(&[1]), None);
        let sender = sender.clone();
        let request = Request { file, priority: Priority::Background, operation };
        let on_done = Box::new(move |done: Done| sender.send(done.result.is_ok()).unwrap());
        bed.ring.submit(request, on_done).await.unwrap();
    }
    bed.ring.close();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [true; 4]);
    let operation = Operation::Sync;
    assert!(bed.ring.run(Request { file, priority: Priority::Demand, operation }).await.is_err());
}

async fn panic_in_a_completion_does_not_stop_the_ring(setup: Setup) {
    let bed = TestRing::new(setup, 2);
    let file = bed.file("a", 1 << 20).await;
    let request = Request { file, priority: Priority::Demand, operation: Operation::Sync };
    bed.ring.submit(request, Box::new(|_| panic!("planted"))).await.unwrap();
    bed.read(file, 0, BLOCK).await.unwrap();
}

/// Judges the processor time of the ring's thread, which other work on the machine does not
/// lengthen.
async fn idle_ring_uses_no_cpu(setup: Setup) {
    // A thread has a name of 15 bytes.
    let name = format!("idle-{}-{}", setup.executor, u8::from(setup.deferred));
    let bed = TestRing::named(setup, &name, 16);
    let file = bed.file("a", 1 << 20).await;
    bed.read(file, 0, BLOCK).await.unwrap();
    let waits = bed.ring.sleep(Duration::from_secs(3600));
    bed.ring.spawn(TaskClass::Foreground, waits);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = cpu_time_of_thread(&name);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = cpu_time_of_thread(&name) - before;
    assert!(used < Duration::from_millis(20), "{used:?} in a second");
}

fn cpu_time_of_thread(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut times = tasks.filter_map(|task| {
        let path = task.ok()?.path();
        (std::fs::read_to_string(path.join("comm")).ok()?.trim() == name).then_some(())?;
        let nanoseconds = std::fs::read_to_string(path.join("schedstat")).ok()?;
        Some(Duration::from_nanos(nanoseconds.split_whitespace().next()?.parse().ok()?))
    });
    times.next().expect("the ring runs on a thread of this name")
}

async fn task_can_use_the_ring_it_runs_on(setup: Setup) {
    for class in [TaskClass::Foreground, TaskClass::Background, TaskClass::Idle] {
        let bed = TestRing::new(setup, 4);
        let file = bed.file("a", 1 << 20).await;
        let ring = bed.ring.clone();
        let slot = bed.slot(BLOCK, 9);
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let task = async move {
            let write = Operation::Write { offset: 0, block: None, payload: Some((slot.freeze(), 0..BLOCK)) };
            let done = ring.run(Request { file, priority: Priority::Idle, operation: write }).await.unwrap();
            ring.sleep(Duration::from_millis(2)).await;
            sender.send((done.result.is_ok(), std::thread::current().name().map(str::to_owned))).unwrap();
        };
        bed.ring.spawn(class, Box::pin(task));
        assert_eq!(soon(receiver).await.unwrap(), (true, Some("test-ring".to_owned())));
        assert!(bed.read(file, 0, BLOCK).await.unwrap().iter().all(|&b| b == 9));
    }
}

/// Awaits a future that must complete within [`PATIENCE`].
async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("the step completes")
}

async fn sleeps_end_in_order_of_deadline_and_never_early(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let (sender, receiver) = flume::unbounded();
    // The longest first: each later one must move the timer to an earlier deadline.
    for milliseconds in [3_600_000u64, 1000, 30] {
        let ring = bed.ring.clone();
        let sender = sender.clone();
        let start = Instant::now();
        let task = async move {
            ring.sleep(Duration::from_millis(milliseconds)).await;
            sender.send((milliseconds, start.elapsed())).unwrap();
        };
        bed.ring.spawn(TaskClass::Background, Box::pin(task));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for expected in [30, 1000] {
        let (milliseconds, took) = soon(receiver.recv_async()).await.unwrap();
        assert_eq!(milliseconds, expected);
        assert!(took >= Duration::from_millis(expected), "{took:?}");
    }
    drop(bed.ring.sleep(Duration::from_secs(3600)));
    let start = Instant::now();
    soon(bed.ring.sleep(Duration::from_millis(5))).await;
    assert!(start.elapsed() >= Duration::from_millis(5), "a sleep also works on a foreign executor");
}

async fn task_is_woken_from_another_thread(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let (sender, receiver) = flume::bounded::<u32>(1);
    let (back, outcomes) = flume::bounded(1);
    for class in [TaskClass::Foreground, TaskClass::Background, TaskClass::Idle] {
        let (receiver, back) = (receiver.clone(), back.clone());
        let task = async move {
            for _ in 0..1000 {
                let number = receiver.recv_async().await.unwrap();
                back.send_async(number + 1).await.unwrap();
            }
        };
        bed.ring.spawn(class, Box::pin(task));
    }
    for number in 0..3000 {
        soon(sender.send_async(number)).await.unwrap();
        assert_eq!(soon(outcomes.recv_async()).await.unwrap(), number + 1);
    }
}

struct Dropped(flume::Sender<Option<String>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().name().map(str::to_owned));
    }
}

async fn close_drops_tasks_on_the_ring_thread_and_completes_requests(setup: Setup) {
    let bed = TestRing::new(setup, 1);
    let file = bed.file("a", 1 << 20).await;
    let (sender, dropped) = flume::unbounded();
    for class in [TaskClass::Foreground, TaskClass::Background, TaskClass::Idle] {
        let ring = bed.ring.clone();
        let on_drop = Dropped(sender.clone());
        let task = async move {
            let _on_drop = on_drop;
            ring.sleep(Duration::from_secs(3600)).await;
        };
        bed.ring.spawn(class, Box::pin(task));
    }
    let (answer, answered) = std::sync::mpsc::channel();
    for n in 0..8u64 {
        let operation = Operation::write(n * 8 * BLOCK as u64, Block::of(&[1]), None);
        let request = Request { file, priority: Priority::Idle, operation };
        let answer = answer.clone();
        let on_done = Box::new(move |done: Done| answer.send(done.result.is_ok()).unwrap());
        bed.ring.submit(request, on_done).await.unwrap();
    }
    bed.ring.close();
    assert_eq!(answered.try_iter().collect::<Vec<_>>(), [true; 8]);
    assert_eq!(dropped.try_iter().collect::<Vec<_>>(), vec![Some("test-ring".to_owned()); 3]);
    let late = Dropped(sender);
    bed.ring.spawn(TaskClass::Foreground, Box::pin(async move { drop(late) }));
    assert_eq!(dropped.try_iter().count(), 1, "a closed ring accepts no task");
    soon(bed.ring.sleep(Duration::from_secs(3600))).await;
}

async fn panic_in_a_task_does_not_stop_the_ring(setup: Setup) {
    let bed = TestRing::new(setup, 2);
    let file = bed.file("a", 1 << 20).await;
    for class in [TaskClass::Foreground, TaskClass::Background, TaskClass::Idle] {
        bed.ring.spawn(class, Box::pin(async { panic!("planted") }));
        bed.read(file, 0, BLOCK).await.unwrap();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        bed.ring.spawn(class, Box::pin(async move { sender.send(()).unwrap() }));
        soon(receiver).await.unwrap();
    }
}

async fn tasks_beyond_the_limit_are_dropped(setup: Setup) {
    let bed = TestRing::new(setup, 2);
    let (sender, dropped) = flume::unbounded();
    for _ in 0..1025 {
        let on_drop = Dropped(sender.clone());
        let forever = async move {
            let _on_drop = on_drop;
            std::future::pending::<()>().await;
        };
        bed.ring.spawn(TaskClass::Idle, Box::pin(forever));
    }
    assert_eq!(dropped.len(), 1);
    bed.ring.close();
    assert_eq!(dropped.len(), 1025);
}

async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(move |context| {
        context.waker().wake_by_ref();
        match std::mem::replace(&mut yielded, true) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

async fn busy_tasks_do_not_starve_other_classes_or_requests(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let file = bed.file("a", 1 << 20).await;
    let turns: [Arc<AtomicU64>; 3] = Default::default();
    for (class, turns) in [TaskClass::Foreground, TaskClass::Background, TaskClass::Idle].into_iter().zip(turns.clone())
    {
        let task = async move {
            loop {
                let start = Instant::now();
                while start.elapsed() < Duration::from_micros(50) {}
                turns.fetch_add(1, Ordering::Relaxed);
                yield_once().await;
            }
        };
        bed.ring.spawn(class, Box::pin(task));
    }
    let start = Instant::now();
    let count = || turns.each_ref().map(|turns| turns.load(Ordering::Relaxed));
    // The shares hold over many turns, which take longer on a busy machine.
    while start.elapsed() < Duration::from_millis(500) || count().iter().any(|&turns| turns <= 20) {
        assert!(start.elapsed() < PATIENCE, "a class starves: {:?}", count());
        soon(bed.read(file, 0, BLOCK)).await.unwrap();
    }
    let turns = count();
    assert!(turns[0] >= turns[1] && turns[1] > turns[2], "{turns:?}");
}

/// Blocks the executor with a task, so that requests queue up, until the sender is dropped.
async fn block_executor(ring: &Ring) -> std::sync::mpsc::Sender<()> {
    let (gate, closed) = std::sync::mpsc::channel::<()>();
    let (sender, held) = tokio::sync::oneshot::channel();
    let task = async move {
        sender.send(()).unwrap();
        let _ = closed.recv();
    };
    ring.spawn(TaskClass::Foreground, Box::pin(task));
    held.await.unwrap();
    gate
}

/// Submits all requests while the executor is blocked. Returns their outcomes in order and the
/// change of the counters.
async fn run_together(bed: &TestRing, requests: Vec<Request>) -> (Vec<larder_io::Done>, RingStats) {
    let before = bed.ring.stats();
    let gate = block_executor(&bed.ring).await;
    let (sender, receiver) = flume::unbounded();
    let count = requests.len();
    for (n, request) in requests.into_iter().enumerate() {
        let sender = sender.clone();
        bed.ring.submit(request, Box::new(move |done| sender.send((n, done)).unwrap())).await.unwrap();
    }
    drop(gate);
    let mut outcomes = Vec::new();
    for _ in 0..count {
        outcomes.push(soon(receiver.recv_async()).await.unwrap());
    }
    outcomes.sort_by_key(|(n, _)| *n);
    let after = bed.ring.stats();
    let stats = RingStats {
        requests: after.requests - before.requests,
        submissions: after.submissions - before.submissions,
        merged: after.merged - before.merged,
        registered: after.registered - before.registered,
        bytes: after.bytes - before.bytes,
    };
    (outcomes.into_iter().map(|(_, done)| done).collect(), stats)
}

async fn numbered_file(bed: &TestRing, blocks: u8) -> FileId {
    let file = bed.file("numbered_file", u64::from(blocks) * BLOCK as u64).await;
    for n in 0..blocks {
        let write = Operation::write(u64::from(n) * BLOCK as u64, Block::of(&[n; BLOCK]), None);
        bed.run(file, write).await.result.unwrap();
    }
    file
}

impl TestRing {
    fn read_of(&self, file: FileId, priority: Priority, block: u64, blocks: usize) -> Request {
        let operation = Operation::read(block * BLOCK as u64, self.slot(blocks * BLOCK, 0xcc));
        Request { file, priority, operation }
    }
}

fn is_filled(done: larder_io::Done, n: u8) -> bool {
    done.result.is_ok() && done.into_slot().unwrap().iter().all(|&b| b == n)
}

async fn queued_adjacent_reads_are_merged(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let file = numbered_file(&bed, 40).await;
    // Every second slot is given back, so that the memory is not consecutive.
    let mut gaps = Vec::new();
    for priority in [Priority::Demand, Priority::Background, Priority::Idle] {
        let reads = (0..20).map(|n| {
            let request = bed.read_of(file, priority, n, 1);
            gaps.push(bed.slot(BLOCK, 0));
            request
        });
        let (outcomes, stats) = run_together(&bed, reads.collect()).await;
        assert!(outcomes.into_iter().enumerate().all(|(n, done)| is_filled(done, n as u8)));
        assert_eq!((stats.requests, stats.submissions, stats.merged), (20, 2, 20), "merged as sixteen and four");
        assert_eq!(stats.bytes, 20 * BLOCK as u64);
    }
}

async fn only_adjacent_requests_on_one_file_are_merged(setup: Setup) {
    let bed = TestRing::new(setup, 16);
    let file = numbered_file(&bed, 40).await;
    let other = bed.file("other", 1 << 20).await;
    let read = |file, block| bed.read_of(file, Priority::Demand, block, 1);
    let sync = Request { file, priority: Priority::Demand, operation: Operation::Sync };
    let wrong =
        Operation::Read { offset: 11 * BLOCK as u64, block: None, slot: bed.slot(BLOCK, 0), range: 0..2 * BLOCK };
    let wrong = Request { file, priority: Priority::Demand, operation: wrong };
    let requests =
        vec![read(file, 3), read(file, 3), read(file, 5), read(file, 4), read(other, 5), sync, read(file, 10), wrong];
    let (outcomes, stats) = run_together(&bed, requests).await;
    assert_eq!((stats.requests, stats.submissions, stats.merged), (7, 7, 0));
    let ok: Vec<bool> = outcomes.iter().map(|done| done.result.is_ok()).collect();
    assert_eq!(ok, [true, true, true, true, true, true, true, false]);
    for (done, n) in outcomes.into_iter().zip([3, 3, 5, 4, 0]) {
        assert!(is_filled(done, n));
    }
    let large = (0..3).map(|n| bed.read_of(file, Priority::Demand, n * 128, 128)).collect();
    let (_, stats) = run_together(&bed, large).await;
    assert_eq!(stats.merged, 2, "two requests reach the limit of 1 MiB");
}

async fn merged_read_past_the_end_completes_each_request_alone(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let file = numbered_file(&bed, 8).await;
    for priority in [Priority::Demand, Priority::Idle] {
        let reads = (0..12).map(|n| bed.read_of(file, priority, n, 1)).collect();
        let (outcomes, stats) = run_together(&bed, reads).await;
        for (n, done) in outcomes.into_iter().enumerate() {
            if n < 8 {
                assert!(is_filled(done, n as u8), "block {n}");
            } else {
                assert_eq!(done.result.unwrap_err().kind(), ErrorKind::UnexpectedEof, "block {n}");
            }
        }
        assert_eq!((stats.requests, stats.submissions, stats.merged), (12, 13, 12));
    }
    bed.ring.close();
    assert_eq!(bed.arena.used(), 0);
}

async fn queued_adjacent_writes_are_merged(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let file = bed.file("a", 1 << 20).await;
    let writes = (0..8u8).map(|n| {
        let payload = bed.slot(2 * BLOCK, n).freeze();
        let operation = Operation::write(u64::from(n) * 3 * BLOCK as u64, Block::of(&[100 + n; 8]), Some(payload));
        Request { file, priority: Priority::Background, operation }
    });
    let (outcomes, stats) = run_together(&bed, writes.collect()).await;
    assert!(outcomes.iter().all(|done| done.result.is_ok()));
    assert_eq!((stats.requests, stats.submissions, stats.merged), (8, 1, 8));
    for n in 0..8u8 {
        let found = bytes_of(&bed.path("a"), u64::from(n) * 3 * BLOCK as u64, 3 * BLOCK);
        assert_eq!(&found[..9], [&[100 + n; 8][..], &[0]].concat());
        assert!(found[BLOCK..].iter().all(|&b| b == n));
    }
}

async fn failed_merged_write_fails_each_request_alone(setup: Setup) {
    let bed = TestRing::new(setup, 4);
    let file = bed.ring.attach(DeviceFile::open(Path::new("/dev/full")).unwrap()).await.unwrap();
    let writes = (0..4u64).map(|n| {
        let operation = Operation::write(n * BLOCK as u64, Block::of(&[1]), None);
        Request { file, priority: Priority::Demand, operation }
    });
    let (outcomes, stats) = run_together(&bed, writes.collect()).await;
    assert!(outcomes.iter().all(|done| done.result.as_ref().unwrap_err().kind() == ErrorKind::StorageFull));
    assert_eq!((stats.submissions, stats.merged, stats.bytes), (5, 4, 0));
}

async fn no_wakeup_is_lost_under_cpu_contention(setup: Setup) {
    let bed = TestRing::new(setup, 16);
    let file = numbered_file(&bed, 200).await;
    let stop = Arc::new(AtomicU64::new(0));
    // Threads that keep all CPUs busy, so that the executor is preempted at arbitrary points.
    let busy: Vec<_> = (0..4)
        .map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || while stop.load(Ordering::Relaxed) == 0 {})
        })
        .collect();
    // About two seconds of reads on two cores.
    for _ in 0..5000 {
        let reads = (0..16u64).map(|n| soon(bed.read(file, n * 8 * BLOCK as u64, BLOCK)));
        assert!(join_all(reads).await.into_iter().all(|read| read.is_ok()));
    }
    stop.store(1, Ordering::Relaxed);
    busy.into_iter().for_each(|thread| thread.join().unwrap());
}

macro_rules! on_both_executors {
    ($($test:ident,)*) => {
        mod glommio {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Setup { executor: larder_io::Executor::Glommio, deferred: false }).await;
            })*
        }
        mod thread {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Setup { executor: larder_io::Executor::Thread, deferred: false }).await;
            })*
        }
        mod deferred {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Setup { executor: larder_io::Executor::Glommio, deferred: true }).await;
            })*
        }
    };
}

on_both_executors! {
    write_puts_payload_directly_behind_header,
    concurrent_requests_keep_their_own_bytes,
    read_past_the_end_fails_with_unexpected_eof,
    unaligned_oversized_or_detached_requests_are_refused,
    file_number_is_reused_only_after_detach,
    dropping_a_future_keeps_memory_until_completion,
    close_completes_accepted_requests_and_refuses_new_ones,
    panic_in_a_completion_does_not_stop_the_ring,
    idle_ring_uses_no_cpu,
    task_can_use_the_ring_it_runs_on,
    sleeps_end_in_order_of_deadline_and_never_early,
    task_is_woken_from_another_thread,
    close_drops_tasks_on_the_ring_thread_and_completes_requests,
    panic_in_a_task_does_not_stop_the_ring,
    tasks_beyond_the_limit_are_dropped,
    busy_tasks_do_not_starve_other_classes_or_requests,
    queued_adjacent_reads_are_merged,
    only_adjacent_requests_on_one_file_are_merged,
    merged_read_past_the_end_completes_each_request_alone,
    queued_adjacent_writes_are_merged,
    failed_merged_write_fails_each_request_alone,
    no_wakeup_is_lost_under_cpu_contention,
}
