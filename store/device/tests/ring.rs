//! The ring on real files, with each of its executors.

use larder_device::{
    Arena, Block, DeviceFile, Done, Executor, FileId, Lane, Operation, Request, Ring, RingOptions, RingStats, Share,
    SlotMut,
};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const BLOCK: usize = 4096;

struct Bench {
    arena: Arc<Arena>,
    ring: Arc<Ring>,
    dir: TempDir,
}

impl Bench {
    fn new(executor: Executor, queue_depth: u32) -> Bench {
        Bench::named(executor, "test-ring", queue_depth)
    }

    fn named(executor: Executor, name: &str, queue_depth: u32) -> Bench {
        let arena = Arena::new(8 << 20).unwrap();
        let options = RingOptions { executor, queue_depth, backlog: 32, ..RingOptions::new(name, 8) };
        let ring = Arc::new(Ring::start(arena.clone(), options).unwrap());
        assert_eq!(ring.facts().executor, executor);
        Bench { arena, ring, dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
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

    async fn run(&self, file: FileId, operation: Operation) -> larder_device::Done {
        self.ring.run(Request { file, lane: Lane::Demand, operation }).await.unwrap()
    }

    async fn read(&self, file: FileId, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
        let done = self.run(file, Operation::read(offset, self.slot(len, 0xcc))).await;
        let Operation::Read { slot, .. } = done.operation else { panic!("another operation came back") };
        done.result.map(|()| slot.to_vec())
    }
}

fn bytes_of(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

async fn a_header_and_its_payload_land_behind_each_other(executor: Executor) {
    let bench = Bench::new(executor, 16);
    let file = bench.file("a", 1 << 20).await;
    let payload = bench.slot(10_000, 7).freeze();
    let done = bench.run(file, Operation::write(BLOCK as u64, Block::of(b"head"), Some(payload))).await;
    done.result.unwrap();
    bench.run(file, Operation::Sync).await.result.unwrap();
    let found = bytes_of(&bench.path("a"), BLOCK as u64, 4 * BLOCK);
    assert_eq!(&found[..5], b"head\0");
    assert!(found[BLOCK..BLOCK + 10_000].iter().all(|&b| b == 7));
    assert!(found[BLOCK + 10_000..].iter().all(|&b| b == 0), "padding is zero, not somebody else's page");
    let back = bench.read(file, 2 * BLOCK as u64, 10_000).await.unwrap();
    assert!(back.iter().all(|&b| b == 7));
}

async fn many_requests_keep_their_own_bytes(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let file = bench.file("a", 4 << 20).await;
    let writes = (0..64u8).map(|n| {
        let payload = bench.slot(3 * BLOCK, n).freeze();
        bench.run(file, Operation::write(u64::from(n) * 4 * BLOCK as u64, Block::of(&[n; 8]), Some(payload)))
    });
    for done in join_all(writes).await {
        done.result.unwrap();
    }
    let reads = (0..64u8).map(|n| bench.read(file, u64::from(n) * 4 * BLOCK as u64, 4 * BLOCK));
    for (n, bytes) in join_all(reads).await.into_iter().enumerate() {
        let bytes = bytes.unwrap();
        assert_eq!(&bytes[..8], [n as u8; 8]);
        assert!(bytes[BLOCK..].iter().all(|&b| b == n as u8));
    }
    bench.ring.close();
    assert_eq!(bench.arena.used(), 0, "all memory came back");
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

async fn a_read_past_the_end_is_an_error_not_old_memory(executor: Executor) {
    let bench = Bench::new(executor, 16);
    let file = bench.file("a", 2 * BLOCK as u64).await;
    assert_eq!(bench.read(file, 0, 4 * BLOCK).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(bench.read(file, 1 << 20, BLOCK).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

async fn what_is_not_in_whole_blocks_or_in_no_file_is_refused(executor: Executor) {
    let bench = Bench::new(executor, 16);
    let file = bench.file("a", 1 << 20).await;
    assert_eq!(bench.read(file, 1, BLOCK).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    let beyond = Operation::Read { offset: 0, slot: bench.slot(BLOCK, 0), range: 0..2 * BLOCK };
    assert_eq!(bench.run(file, beyond).await.result.unwrap_err().kind(), ErrorKind::InvalidInput);
    bench.ring.detach(file).await;
    assert_eq!(bench.read(file, 0, BLOCK).await.unwrap_err().kind(), ErrorKind::NotFound);
}

async fn a_file_number_is_used_again_for_the_next_file_only(executor: Executor) {
    let bench = Bench::new(executor, 16);
    for turn in 0..20u8 {
        let file = bench.file(&format!("f{turn}"), 1 << 20).await;
        bench.run(file, Operation::write(0, Block::of(&[turn; BLOCK]), None)).await.result.unwrap();
        assert!(bench.read(file, 0, BLOCK).await.unwrap().iter().all(|&b| b == turn));
        bench.ring.detach(file).await;
    }
}

async fn a_dropped_future_does_not_free_memory_that_is_in_use(executor: Executor) {
    let bench = Bench::new(executor, 1);
    let file = bench.file("a", 8 << 20).await;
    for n in 0..200u8 {
        let payload = bench.slot(64 << 10, n).freeze();
        let write = bench.run(file, Operation::write(0, Block::of(&[n; 8]), Some(payload)));
        // Given up at once, before or after it was handed over.
        let _ = tokio::time::timeout(Duration::from_micros(u64::from(n)), write).await;
    }
    bench.ring.close();
    assert_eq!(bench.arena.used(), 0);
    let head = bytes_of(&bench.path("a"), 0, 8)[0];
    let found = bytes_of(&bench.path("a"), BLOCK as u64, 64 << 10);
    assert!(found.iter().all(|&b| b == head), "every write was whole");
}

async fn closing_finishes_what_was_asked_and_refuses_the_rest(executor: Executor) {
    let bench = Bench::new(executor, 1);
    let file = bench.file("a", 1 << 20).await;
    let (sender, receiver) = std::sync::mpsc::channel();
    for n in 0..4u64 {
        let operation = Operation::write(n * BLOCK as u64, Block::of(&[1]), None);
        let sender = sender.clone();
        let request = Request { file, lane: Lane::Background, operation };
        let on_done = Box::new(move |done: Done| sender.send(done.result.is_ok()).unwrap());
        bench.ring.submit(request, on_done).await.unwrap();
    }
    bench.ring.close();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [true; 4]);
    let operation = Operation::Sync;
    assert!(bench.ring.run(Request { file, lane: Lane::Demand, operation }).await.is_err());
}

async fn a_completion_that_panics_does_not_stop_the_device(executor: Executor) {
    let bench = Bench::new(executor, 2);
    let file = bench.file("a", 1 << 20).await;
    let request = Request { file, lane: Lane::Demand, operation: Operation::Sync };
    bench.ring.submit(request, Box::new(|_| panic!("planted"))).await.unwrap();
    bench.read(file, 0, BLOCK).await.unwrap();
}

async fn an_idle_ring_uses_no_processor(executor: Executor) {
    let name = format!("idle-{executor}");
    let bench = Bench::named(executor, &name, 16);
    let file = bench.file("a", 1 << 20).await;
    bench.read(file, 0, BLOCK).await.unwrap();
    let waits = bench.ring.sleep(Duration::from_secs(3600));
    bench.ring.spawn(Share::Foreground, waits);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = processor_time(&name);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = processor_time(&name) - before;
    assert!(used < Duration::from_millis(20), "{used:?} in a second");
}

/// Processor time of the thread of this name.
fn processor_time(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut times = tasks.filter_map(|task| {
        let path = task.ok()?.path();
        (std::fs::read_to_string(path.join("comm")).ok()?.trim() == name).then_some(())?;
        let nanoseconds = std::fs::read_to_string(path.join("schedstat")).ok()?;
        Some(Duration::from_nanos(nanoseconds.split_whitespace().next()?.parse().ok()?))
    });
    times.next().expect("the ring has a thread of this name")
}

async fn a_task_uses_its_own_ring(executor: Executor) {
    for share in [Share::Foreground, Share::Background, Share::Idle] {
        let bench = Bench::new(executor, 4);
        let file = bench.file("a", 1 << 20).await;
        let (ring, slot) = (bench.ring.clone(), bench.slot(BLOCK, 9));
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let task = async move {
            let write = Operation::Write { offset: 0, block: None, payload: Some((slot.freeze(), 0..BLOCK)) };
            let done = ring.run(Request { file, lane: Lane::Idle, operation: write }).await.unwrap();
            ring.sleep(Duration::from_millis(2)).await;
            sender.send((done.result.is_ok(), std::thread::current().name().map(str::to_owned))).unwrap();
        };
        bench.ring.spawn(share, Box::pin(task));
        assert_eq!(soon(receiver).await.unwrap(), (true, Some("test-ring".to_owned())));
        assert!(bench.read(file, 0, BLOCK).await.unwrap().iter().all(|&b| b == 9));
    }
}

/// The output of a future that must not take long.
async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), future).await.expect("in ten seconds")
}

async fn sleeps_end_in_order_and_not_too_early(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let (sender, receiver) = flume::unbounded();
    // The longest first, so that the timer has to be set to an earlier time twice.
    for milliseconds in [3_600_000u64, 1000, 30] {
        let (ring, sender, began) = (bench.ring.clone(), sender.clone(), Instant::now());
        let task = async move {
            ring.sleep(Duration::from_millis(milliseconds)).await;
            sender.send((milliseconds, began.elapsed())).unwrap();
        };
        bench.ring.spawn(Share::Background, Box::pin(task));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for expected in [30, 1000] {
        let (milliseconds, took) = soon(receiver.recv_async()).await.unwrap();
        assert_eq!(milliseconds, expected);
        assert!(took >= Duration::from_millis(expected), "{took:?}");
    }
    drop(bench.ring.sleep(Duration::from_secs(3600)));
    let began = Instant::now();
    soon(bench.ring.sleep(Duration::from_millis(5))).await;
    assert!(began.elapsed() >= Duration::from_millis(5), "elsewhere it sleeps as well");
}

async fn a_task_is_woken_from_another_thread(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let (sender, receiver) = flume::bounded::<u32>(1);
    let (back, answers) = flume::bounded(1);
    for share in [Share::Foreground, Share::Background, Share::Idle] {
        let (receiver, back) = (receiver.clone(), back.clone());
        let task = async move {
            for _ in 0..1000 {
                let number = receiver.recv_async().await.unwrap();
                back.send_async(number + 1).await.unwrap();
            }
        };
        bench.ring.spawn(share, Box::pin(task));
    }
    for number in 0..3000 {
        soon(sender.send_async(number)).await.unwrap();
        assert_eq!(soon(answers.recv_async()).await.unwrap(), number + 1);
    }
}

/// Says on which thread it was dropped.
struct Dropped(flume::Sender<Option<String>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().name().map(str::to_owned));
    }
}

async fn closing_drops_tasks_on_their_thread_and_answers_requests(executor: Executor) {
    let bench = Bench::new(executor, 1);
    let file = bench.file("a", 1 << 20).await;
    let (sender, dropped) = flume::unbounded();
    for share in [Share::Foreground, Share::Background, Share::Idle] {
        let (ring, on_drop) = (bench.ring.clone(), Dropped(sender.clone()));
        let task = async move {
            let _on_drop = on_drop;
            ring.sleep(Duration::from_secs(3600)).await;
        };
        bench.ring.spawn(share, Box::pin(task));
    }
    let (answer, answered) = std::sync::mpsc::channel();
    for n in 0..8u64 {
        let operation = Operation::write(n * 8 * BLOCK as u64, Block::of(&[1]), None);
        let (request, answer) = (Request { file, lane: Lane::Idle, operation }, answer.clone());
        let on_done = Box::new(move |done: Done| answer.send(done.result.is_ok()).unwrap());
        bench.ring.submit(request, on_done).await.unwrap();
    }
    bench.ring.close();
    assert_eq!(answered.try_iter().collect::<Vec<_>>(), [true; 8]);
    assert_eq!(dropped.try_iter().collect::<Vec<_>>(), vec![Some("test-ring".to_owned()); 3]);
    let late = Dropped(sender);
    bench.ring.spawn(Share::Foreground, Box::pin(async move { drop(late) }));
    assert_eq!(dropped.try_iter().count(), 1, "a closed ring takes no task");
    soon(bench.ring.sleep(Duration::from_secs(3600))).await;
}

async fn a_task_that_panics_does_not_stop_the_device(executor: Executor) {
    let bench = Bench::new(executor, 2);
    let file = bench.file("a", 1 << 20).await;
    for share in [Share::Foreground, Share::Background, Share::Idle] {
        bench.ring.spawn(share, Box::pin(async { panic!("planted") }));
        bench.read(file, 0, BLOCK).await.unwrap();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        bench.ring.spawn(share, Box::pin(async move { sender.send(()).unwrap() }));
        soon(receiver).await.unwrap();
    }
}

async fn too_many_tasks_are_refused(executor: Executor) {
    let bench = Bench::new(executor, 2);
    let (sender, dropped) = flume::unbounded();
    for _ in 0..1025 {
        let on_drop = Dropped(sender.clone());
        let forever = async move {
            let _on_drop = on_drop;
            std::future::pending::<()>().await;
        };
        bench.ring.spawn(Share::Idle, Box::pin(forever));
    }
    assert_eq!(dropped.len(), 1);
    bench.ring.close();
    assert_eq!(dropped.len(), 1025);
}

/// Ready the second time.
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

async fn busy_tasks_leave_room_for_all_others(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let file = bench.file("a", 1 << 20).await;
    let turns: [Arc<AtomicU64>; 3] = Default::default();
    for (share, turns) in [Share::Foreground, Share::Background, Share::Idle].into_iter().zip(turns.clone()) {
        let task = async move {
            loop {
                let began = Instant::now();
                while began.elapsed() < Duration::from_micros(50) {}
                turns.fetch_add(1, Ordering::Relaxed);
                yield_once().await;
            }
        };
        bench.ring.spawn(share, Box::pin(task));
    }
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(500) {
        soon(bench.read(file, 0, BLOCK)).await.unwrap();
    }
    let turns = turns.map(|turns| turns.load(Ordering::Relaxed));
    assert!(turns.iter().all(|&turns| turns > 20), "{turns:?}");
    assert!(turns[0] >= turns[1] && turns[1] > turns[2], "{turns:?}");
}

/// Keeps the executor from taking requests until the sender is dropped.
async fn hold(ring: &Ring) -> std::sync::mpsc::Sender<()> {
    let (gate, closed) = std::sync::mpsc::channel::<()>();
    let (sender, held) = tokio::sync::oneshot::channel();
    let task = async move {
        sender.send(()).unwrap();
        let _ = closed.recv();
    };
    ring.spawn(Share::Foreground, Box::pin(task));
    held.await.unwrap();
    gate
}

/// Hands over all of these while the executor is held, and gives what came of them and what it took.
async fn run_together(bench: &Bench, requests: Vec<Request>) -> (Vec<larder_device::Done>, RingStats) {
    let before = bench.ring.stats();
    let gate = hold(&bench.ring).await;
    let (sender, receiver) = flume::unbounded();
    let count = requests.len();
    for (n, request) in requests.into_iter().enumerate() {
        let sender = sender.clone();
        bench.ring.submit(request, Box::new(move |done| sender.send((n, done)).unwrap())).await.unwrap();
    }
    drop(gate);
    let mut answers = Vec::new();
    for _ in 0..count {
        answers.push(soon(receiver.recv_async()).await.unwrap());
    }
    answers.sort_by_key(|(n, _)| *n);
    let after = bench.ring.stats();
    let stats = RingStats {
        requests: after.requests - before.requests,
        submissions: after.submissions - before.submissions,
        merged: after.merged - before.merged,
        bytes: after.bytes - before.bytes,
    };
    (answers.into_iter().map(|(_, done)| done).collect(), stats)
}

/// A file whose blocks are filled with their number.
async fn numbered(bench: &Bench, blocks: u8) -> FileId {
    let file = bench.file("numbered", u64::from(blocks) * BLOCK as u64).await;
    for n in 0..blocks {
        let write = Operation::write(u64::from(n) * BLOCK as u64, Block::of(&[n; BLOCK]), None);
        bench.run(file, write).await.result.unwrap();
    }
    file
}

impl Bench {
    fn read_of(&self, file: FileId, lane: Lane, block: u64, blocks: usize) -> Request {
        let operation = Operation::read(block * BLOCK as u64, self.slot(blocks * BLOCK, 0xcc));
        Request { file, lane, operation }
    }
}

fn is_filled(done: larder_device::Done, n: u8) -> bool {
    done.result.is_ok() && done.into_slot().unwrap().iter().all(|&b| b == n)
}

async fn waiting_reads_of_consecutive_blocks_go_as_one(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let file = numbered(&bench, 40).await;
    // Every second slot is given back, so that the memory is not consecutive.
    let mut gaps = Vec::new();
    for lane in [Lane::Demand, Lane::Background, Lane::Idle] {
        let reads = (0..20).map(|n| {
            let request = bench.read_of(file, lane, n, 1);
            gaps.push(bench.slot(BLOCK, 0));
            request
        });
        let (answers, stats) = run_together(&bench, reads.collect()).await;
        assert!(answers.into_iter().enumerate().all(|(n, done)| is_filled(done, n as u8)));
        assert_eq!((stats.requests, stats.submissions, stats.merged), (20, 2, 20), "sixteen and four");
        assert_eq!(stats.bytes, 20 * BLOCK as u64);
    }
}

async fn only_what_follows_on_the_same_file_is_merged(executor: Executor) {
    let bench = Bench::new(executor, 16);
    let file = numbered(&bench, 40).await;
    let other = bench.file("other", 1 << 20).await;
    let read = |file, block| bench.read_of(file, Lane::Demand, block, 1);
    let sync = Request { file, lane: Lane::Demand, operation: Operation::Sync };
    let wrong = Operation::Read { offset: 11 * BLOCK as u64, slot: bench.slot(BLOCK, 0), range: 0..2 * BLOCK };
    let wrong = Request { file, lane: Lane::Demand, operation: wrong };
    let requests =
        vec![read(file, 3), read(file, 3), read(file, 5), read(file, 4), read(other, 5), sync, read(file, 10), wrong];
    let (answers, stats) = run_together(&bench, requests).await;
    assert_eq!((stats.requests, stats.submissions, stats.merged), (7, 7, 0));
    let ok: Vec<bool> = answers.iter().map(|done| done.result.is_ok()).collect();
    assert_eq!(ok, [true, true, true, true, true, true, true, false]);
    for (done, n) in answers.into_iter().zip([3, 3, 5, 4, 0]) {
        assert!(is_filled(done, n));
    }
    let large = (0..3).map(|n| bench.read_of(file, Lane::Demand, n * 128, 128)).collect();
    let (_, stats) = run_together(&bench, large).await;
    assert_eq!(stats.merged, 2, "two are a mebibyte");
}

async fn a_merged_read_past_the_end_answers_each_by_itself(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let file = numbered(&bench, 8).await;
    for lane in [Lane::Demand, Lane::Idle] {
        let reads = (0..12).map(|n| bench.read_of(file, lane, n, 1)).collect();
        let (answers, stats) = run_together(&bench, reads).await;
        for (n, done) in answers.into_iter().enumerate() {
            match n < 8 {
                true => assert!(is_filled(done, n as u8), "block {n}"),
                false => assert_eq!(done.result.unwrap_err().kind(), ErrorKind::UnexpectedEof, "block {n}"),
            }
        }
        assert_eq!((stats.requests, stats.submissions, stats.merged), (12, 13, 12));
    }
    bench.ring.close();
    assert_eq!(bench.arena.used(), 0);
}

async fn waiting_writes_of_consecutive_records_go_as_one(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let file = bench.file("a", 1 << 20).await;
    let writes = (0..8u8).map(|n| {
        let payload = bench.slot(2 * BLOCK, n).freeze();
        let operation = Operation::write(u64::from(n) * 3 * BLOCK as u64, Block::of(&[100 + n; 8]), Some(payload));
        Request { file, lane: Lane::Background, operation }
    });
    let (answers, stats) = run_together(&bench, writes.collect()).await;
    assert!(answers.iter().all(|done| done.result.is_ok()));
    assert_eq!((stats.requests, stats.submissions, stats.merged), (8, 1, 8));
    for n in 0..8u8 {
        let found = bytes_of(&bench.path("a"), u64::from(n) * 3 * BLOCK as u64, 3 * BLOCK);
        assert_eq!(&found[..9], [&[100 + n; 8][..], &[0]].concat());
        assert!(found[BLOCK..].iter().all(|&b| b == n));
    }
}

async fn a_failed_merged_write_fails_each_by_itself(executor: Executor) {
    let bench = Bench::new(executor, 4);
    let file = bench.ring.attach(DeviceFile::open(Path::new("/dev/full")).unwrap()).await.unwrap();
    let writes = (0..4u64).map(|n| {
        let operation = Operation::write(n * BLOCK as u64, Block::of(&[1]), None);
        Request { file, lane: Lane::Demand, operation }
    });
    let (answers, stats) = run_together(&bench, writes.collect()).await;
    assert!(answers.iter().all(|done| done.result.as_ref().unwrap_err().kind() == ErrorKind::StorageFull));
    assert_eq!((stats.submissions, stats.merged, stats.bytes), (5, 4, 0));
}

async fn no_wake_up_is_lost_among_many_requests(executor: Executor) {
    let bench = Bench::new(executor, 16);
    let file = numbered(&bench, 200).await;
    let stop = Arc::new(AtomicU64::new(0));
    // Threads that keep the processors busy, so that the executor is interrupted anywhere.
    let busy: Vec<_> = (0..4)
        .map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || while stop.load(Ordering::Relaxed) == 0 {})
        })
        .collect();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let reads = (0..16u64).map(|n| soon(bench.read(file, n * 8 * BLOCK as u64, BLOCK)));
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
                super::$test(larder_device::Executor::Glommio).await;
            })*
        }
        mod thread {
            $(#[tokio::test]
            async fn $test() {
                super::$test(larder_device::Executor::Thread).await;
            })*
        }
    };
}

on_both_executors! {
    a_header_and_its_payload_land_behind_each_other,
    many_requests_keep_their_own_bytes,
    a_read_past_the_end_is_an_error_not_old_memory,
    what_is_not_in_whole_blocks_or_in_no_file_is_refused,
    a_file_number_is_used_again_for_the_next_file_only,
    a_dropped_future_does_not_free_memory_that_is_in_use,
    closing_finishes_what_was_asked_and_refuses_the_rest,
    a_completion_that_panics_does_not_stop_the_device,
    an_idle_ring_uses_no_processor,
    a_task_uses_its_own_ring,
    sleeps_end_in_order_and_not_too_early,
    a_task_is_woken_from_another_thread,
    closing_drops_tasks_on_their_thread_and_answers_requests,
    a_task_that_panics_does_not_stop_the_device,
    too_many_tasks_are_refused,
    busy_tasks_leave_room_for_all_others,
    waiting_reads_of_consecutive_blocks_go_as_one,
    only_what_follows_on_the_same_file_is_merged,
    a_merged_read_past_the_end_answers_each_by_itself,
    waiting_writes_of_consecutive_records_go_as_one,
    a_failed_merged_write_fails_each_by_itself,
    no_wake_up_is_lost_among_many_requests,
}
