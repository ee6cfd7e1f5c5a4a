//! A ring where glommio cannot start. By itself, as it lowers a limit of the whole process.

use larder_device::{Arena, Block, DeviceFile, Executor, Lane, Operation, Request, Ring, RingOptions, Share};

#[tokio::test]
async fn a_plain_thread_does_the_work_where_glommio_cannot() {
    let limit = libc::rlimit { rlim_cur: 256 << 10, rlim_max: 256 << 10 };
    // SAFETY: the pointer is to a live rlimit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
    let arena = Arena::new(1 << 20).unwrap();
    let options = RingOptions { register_arena: false, ..RingOptions::new("fallback", 1) };
    assert_eq!(options.executor, Executor::Glommio);
    let ring = Ring::start(arena, options).unwrap();
    assert_eq!(ring.facts().executor, Executor::Thread);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = ring.attach(DeviceFile::create(&dir.path().join("a"), 1 << 20).unwrap()).await.unwrap();
    let operation = Operation::write(0, Block::of(b"head"), None);
    ring.run(Request { file, lane: Lane::Demand, operation }).await.unwrap().result.unwrap();
    let (sender, receiver) = tokio::sync::oneshot::channel();
    ring.spawn(Share::Idle, Box::pin(async move { sender.send(()).unwrap() }));
    receiver.await.unwrap();
}

#[test]
fn executors_have_names() {
    for executor in [Executor::Glommio, Executor::Thread] {
        assert_eq!(executor.to_string().parse(), Ok(executor));
    }
    assert!("tokio".parse::<Executor>().is_err());
}
