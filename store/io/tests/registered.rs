//! Registered memory: requests with a header and a payload, on kernels with and without vectored
//! transfers of registered memory (Linux 6.15).

use larder_io::{Block, DeviceFile, Executor, FileId, Operation, Priority, Request, Ring, RingOptions, TaskClass};
use larder_memory::{Arena, ArenaSharing, SlotMut};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::sync::oneshot;

const BLOCK: usize = 4096;
/// Payload of a record in the tests.
const PAYLOAD: usize = 3 * BLOCK;
const RECORD: usize = BLOCK + PAYLOAD;

struct TestRing {
    arena: Arc<Arena>,
    ring: Ring,
    file: FileId,
    _dir: TempDir,
}

impl TestRing {
    async fn new(vectored: bool) -> TestRing {
        let arena = Arena::with(8 << 20, ArenaSharing::Always).unwrap();
        let options = RingOptions { executor: Executor::Thread, vectored, ..RingOptions::new("registered", 1) };
        let ring = Ring::start(arena.clone(), options).unwrap();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = ring.attach(DeviceFile::create(&dir.path().join("a"), 1 << 20).unwrap()).await.unwrap();
        TestRing { arena, ring, file, _dir: dir }
    }

    fn slot(&self, fill: u8) -> SlotMut {
        let mut slot = self.arena.allocate(PAYLOAD).unwrap();
        slot.fill(fill);
        slot
    }

    async fn run(&self, operation: Operation) -> Operation {
        let done = self.ring.run(Request { file: self.file, priority: Priority::Demand, operation }).await.unwrap();
        done.result.unwrap();
        done.operation
    }

    async fn write(&self, record: u8) {
        let offset = u64::from(record) * RECORD as u64;
        self.run(Operation::write(offset, Block::of(&[record; BLOCK]), Some(self.slot(record + 100).freeze()))).await;
    }

    fn read_of(&self, record: u8) -> Operation {
        Operation::read_split(u64::from(record) * RECORD as u64, Some(Block::of(&[])), self.slot(0xcc))
    }
}

fn assert_record(operation: Operation, record: u8) {
    let Operation::Read { block: Some(block), slot, .. } = operation else { panic!("a read returns its memory") };
    assert!(block.iter().all(|&byte| byte == record), "header of record {record}");
    assert!(slot.iter().all(|&byte| byte == record + 100), "payload of record {record}");
}

#[tokio::test]
async fn headers_and_payloads_use_registered_memory() {
    let bed = TestRing::new(true).await;
    if !bed.ring.capabilities().vectored {
        eprintln!("skipped: the kernel has no vectored transfers of registered memory");
        return;
    }
    for record in 0..20 {
        bed.write(record).await;
    }
    for record in 0..20 {
        assert_record(bed.run(bed.read_of(record)).await, record);
    }
    let stats = bed.ring.stats();
    assert_eq!((stats.submissions, stats.registered), (40, 40));
}

#[tokio::test]
async fn records_are_whole_when_no_private_block_is_free() {
    let bed = TestRing::new(true).await;
    let taken: Vec<_> = std::iter::from_fn(|| bed.arena.private_block(0)).collect();
    assert_eq!(taken.len(), 512);
    bed.write(7).await;
    assert_record(bed.run(bed.read_of(7)).await, 7);
    assert_eq!(bed.ring.stats().registered, 0);
}

#[tokio::test]
async fn private_blocks_return_after_use() {
    let bed = TestRing::new(true).await;
    for _ in 0..600 {
        bed.write(1).await;
    }
    let all: Vec<_> = std::iter::from_fn(|| bed.arena.private_block(0)).collect();
    assert_eq!(all.len(), 512);
}

#[tokio::test]
async fn adjacent_reads_are_merged_without_vectored_transfers() {
    for vectored in [true, false] {
        let bed = TestRing::new(vectored).await;
        for record in 0..8 {
            bed.write(record).await;
        }
        let before = bed.ring.stats();
        // A task that blocks keeps the executor from its requests until all of them are queued.
        let (gate, blocked) = std::sync::mpsc::channel::<()>();
        let (started, start) = oneshot::channel();
        let block = async move {
            started.send(()).unwrap();
            let _ = blocked.recv();
        };
        bed.ring.spawn(TaskClass::Foreground, Box::pin(block));
        start.await.unwrap();
        let mut answers = Vec::new();
        for record in 0..8 {
            let (reply, answer) = oneshot::channel();
            let operation = bed.read_of(record);
            let request = Request { file: bed.file, priority: Priority::Demand, operation };
            bed.ring.submit(request, Box::new(move |done| drop(reply.send(done)))).await.unwrap();
            answers.push(answer);
        }
        drop(gate);
        for (record, answer) in answers.into_iter().enumerate() {
            let done = answer.await.unwrap();
            done.result.unwrap();
            assert_record(done.operation, record as u8);
        }
        let stats = bed.ring.stats();
        assert_eq!((stats.submissions - before.submissions, stats.merged - before.merged), (1, 8));
        let registered = u64::from(bed.ring.capabilities().vectored);
        assert_eq!(stats.registered - before.registered, registered, "vectored: {vectored}");
    }
}
