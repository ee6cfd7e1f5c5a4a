//! The fallback from glommio to a plain thread.
//!
//! A test binary of its own, because it lowers a limit of the whole process: glommio needs more
//! locked memory.

use larder_io::{Block, DeviceFile, Executor, Operation, Priority, Request, Ring, RingOptions, TaskClass};
use larder_memory::Arena;

#[tokio::test]
async fn plain_thread_drives_the_ring_where_glommio_cannot_start() {
    let limit = libc::rlimit { rlim_cur: 256 << 10, rlim_max: 256 << 10 };
    // SAFETY: the pointer refers to a live rlimit for the duration of the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
    let arena = Arena::new(1 << 20).unwrap();
    let options = RingOptions { register_arena: false, ..RingOptions::new("fallback", 1) };
    assert_eq!(options.executor, Executor::Glommio);
    let ring = Ring::start(arena, options).unwrap();
    assert_eq!(ring.capabilities().executor, Executor::Thread);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = ring.attach(DeviceFile::create(&dir.path().join("a"), 1 << 20).unwrap()).await.unwrap();
    let operation = Operation::write(0, Block::of(b"head"), None);
    ring.run(Request { file, priority: Priority::Demand, operation }).await.unwrap().result.unwrap();
    let (sender, receiver) = tokio::sync::oneshot::channel();
    ring.spawn(TaskClass::Idle, Box::pin(async move { sender.send(()).unwrap() }));
    receiver.await.unwrap();
}

#[test]
fn executor_names_parse_back() {
    for executor in [Executor::Glommio, Executor::Thread] {
        assert_eq!(executor.to_string().parse(), Ok(executor));
    }
    assert!("tokio".parse::<Executor>().is_err());
}
