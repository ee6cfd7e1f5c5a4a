//! The ring on real files.

use larder_device::{Arena, Block, DeviceFile, FileId, Lane, Operation, Request, Ring, RingOptions, SlotMut};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const BLOCK: usize = 4096;

struct Bench {
    arena: Arc<Arena>,
    ring: Ring,
    dir: TempDir,
}

impl Bench {
    fn new(queue_depth: u32) -> Bench {
        Bench::named("test-ring", queue_depth)
    }

    fn named(name: &str, queue_depth: u32) -> Bench {
        let arena = Arena::new(8 << 20).unwrap();
        let options = RingOptions { queue_depth, backlog: 4, ..RingOptions::new(name, 8) };
        let ring = Ring::start(arena.clone(), options).unwrap();
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

#[tokio::test]
async fn a_header_and_its_payload_land_behind_each_other() {
    let bench = Bench::new(16);
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

#[tokio::test]
async fn many_requests_keep_their_own_bytes() {
    let bench = Bench::new(4);
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
    drop(bench.ring);
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

#[tokio::test]
async fn a_read_past_the_end_is_an_error_not_old_memory() {
    let bench = Bench::new(16);
    let file = bench.file("a", 2 * BLOCK as u64).await;
    assert_eq!(bench.read(file, 0, 4 * BLOCK).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(bench.read(file, 1 << 20, BLOCK).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn what_is_not_in_whole_blocks_or_in_no_file_is_refused() {
    let bench = Bench::new(16);
    let file = bench.file("a", 1 << 20).await;
    assert_eq!(bench.read(file, 1, BLOCK).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    let beyond = Operation::Read { offset: 0, slot: bench.slot(BLOCK, 0), range: 0..2 * BLOCK };
    assert_eq!(bench.run(file, beyond).await.result.unwrap_err().kind(), ErrorKind::InvalidInput);
    bench.ring.detach(file).await;
    assert_eq!(bench.read(file, 0, BLOCK).await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_file_number_is_used_again_for_the_next_file_only() {
    let bench = Bench::new(16);
    for turn in 0..20u8 {
        let file = bench.file(&format!("f{turn}"), 1 << 20).await;
        bench.run(file, Operation::write(0, Block::of(&[turn; BLOCK]), None)).await.result.unwrap();
        assert!(bench.read(file, 0, BLOCK).await.unwrap().iter().all(|&b| b == turn));
        bench.ring.detach(file).await;
    }
}

#[tokio::test]
async fn a_dropped_future_does_not_free_memory_that_is_in_use() {
    let bench = Bench::new(1);
    let file = bench.file("a", 8 << 20).await;
    for n in 0..200u8 {
        let payload = bench.slot(256 << 10, n).freeze();
        let write = bench.run(file, Operation::write(0, Block::of(&[n; 8]), Some(payload)));
        // Given up at once, before or after it was handed over.
        let _ = tokio::time::timeout(Duration::from_micros(u64::from(n)), write).await;
    }
    bench.ring.close();
    assert_eq!(bench.arena.used(), 0);
    let head = bytes_of(&bench.path("a"), 0, 8)[0];
    let found = bytes_of(&bench.path("a"), BLOCK as u64, 256 << 10);
    assert!(found.iter().all(|&b| b == head), "every write was whole");
}

#[tokio::test]
async fn closing_finishes_what_was_asked_and_refuses_the_rest() {
    let bench = Bench::new(1);
    let file = bench.file("a", 1 << 20).await;
    let (sender, receiver) = std::sync::mpsc::channel();
    for n in 0..4u64 {
        let operation = Operation::write(n * BLOCK as u64, Block::of(&[1]), None);
        let sender = sender.clone();
        let request = Request { file, lane: Lane::Background, operation };
        bench.ring.submit(request, move |done| sender.send(done.result.is_ok()).unwrap()).await.unwrap();
    }
    bench.ring.close();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [true; 4]);
    let operation = Operation::Sync;
    assert!(bench.ring.run(Request { file, lane: Lane::Demand, operation }).await.is_err());
}

#[tokio::test]
async fn a_completion_that_panics_does_not_stop_the_device() {
    let bench = Bench::new(2);
    let file = bench.file("a", 1 << 20).await;
    let request = Request { file, lane: Lane::Demand, operation: Operation::Sync };
    bench.ring.submit(request, |_| panic!("planted")).await.unwrap();
    bench.read(file, 0, BLOCK).await.unwrap();
}

#[tokio::test]
async fn an_idle_ring_uses_no_processor() {
    let bench = Bench::named("test-idle", 16);
    let file = bench.file("a", 1 << 20).await;
    bench.read(file, 0, BLOCK).await.unwrap();
    let before = switches("test-idle");
    let began = Instant::now();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let woken = switches("test-idle") - before;
    assert!(woken <= 3, "woke {woken} times in {:?}", began.elapsed());
}

/// Times that the thread of this name went to sleep.
fn switches(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut counts = tasks.filter_map(|task| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field =
            |key: &str| Some(status.lines().find(|line| line.starts_with(key))?.split_whitespace().nth(1)?.to_owned());
        (field("Name:")? == name).then_some(())?;
        field("voluntary_ctxt_switches:")?.parse::<u64>().ok()
    });
    counts.next().expect("the ring has a thread of this name")
}
