//! A device that never answers: closing it ends all the same, and takes nothing from under it.

use larder_device::{Arena, Device, Executor, FileDevice, Lane, OpenError, Operation, RingOptions, segment_name};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const BLOCK: usize = 4096;

/// A directory with a segment that never answers: what is read from a pipe that nobody writes to never comes.
fn with_silent_file() -> TempDir {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = CString::new(dir.path().join(segment_name(0)).as_os_str().as_bytes()).unwrap();
    // SAFETY: the string ends with a zero and lives as long as the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    dir
}

fn options(executor: Executor, patience: Duration) -> RingOptions {
    RingOptions { executor, patience, register_arena: false, ..RingOptions::new("silent", 4) }
}

async fn ask(device: &FileDevice, segment: u32, arena: &Arc<Arena>, on_done: impl FnOnce() + Send + 'static) {
    let read = Operation::read(0, arena.allocate(BLOCK).unwrap());
    device.submit(segment, Lane::Demand, read, Box::new(move |_| on_done())).await.unwrap();
}

#[tokio::test]
async fn several_are_closed_at_once() {
    let patience = Duration::from_secs(2);
    let arena = Arena::new(1 << 20).unwrap();
    let dirs: Vec<TempDir> = (0..4).map(|_| with_silent_file()).collect();
    let mut devices = Vec::new();
    for dir in &dirs {
        let device = FileDevice::open(dir.path(), arena.clone(), options(Executor::default(), patience)).unwrap();
        device.open(0, 1 << 20).await.unwrap();
        ask(&device, 0, &arena, || ()).await;
        devices.push(device);
    }
    let began = Instant::now();
    let closing = devices.into_iter().map(|device| tokio::spawn(async move { device.close().await }));
    for closed in closing.collect::<Vec<_>>() {
        closed.await.unwrap();
    }
    assert!(began.elapsed() >= patience && began.elapsed() < 2 * patience, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lets_go_of_it_on_its_own_thread_leaves_the_directory_locked_until_all_is_answered() {
    for executor in [Executor::Glommio, Executor::Thread] {
        let dir = with_silent_file();
        std::fs::write(dir.path().join(segment_name(1)), [1; BLOCK]).unwrap();
        let arena = Arena::new(1 << 20).unwrap();
        let patience = Duration::from_millis(300);
        let device = FileDevice::open(dir.path(), arena.clone(), options(executor, patience)).unwrap();
        device.open(0, 1 << 20).await.unwrap();
        device.open(1, BLOCK as u64).await.unwrap();
        ask(&device, 0, &arena, || ()).await;
        let ((go, wait), (told, answer)) = (flume::bounded::<()>(1), flume::bounded(1));
        let last = device.clone();
        ask(&device, 1, &arena, move || {
            wait.recv().unwrap();
            drop(last);
            told.send(()).unwrap();
        })
        .await;
        drop(device);
        go.send(()).unwrap();
        answer.recv_timeout(Duration::from_secs(20)).unwrap();
        let again = || FileDevice::open(dir.path(), arena.clone(), options(executor, patience));
        assert!(matches!(again(), Err(OpenError::Locked(_))), "a request is under way");
        std::fs::write(dir.path().join(segment_name(0)), [7; BLOCK]).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while again().is_err() {
            assert!(Instant::now() < until, "it is never let go of");
        }
        assert_eq!(arena.used(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_does_not_wait_for_ever() {
    for executor in [Executor::Glommio, Executor::Thread] {
        let dir = with_silent_file();
        let arena = Arena::new(1 << 20).unwrap();
        let patience = Duration::from_millis(300);
        let options = options(executor, patience);
        let device = FileDevice::open(dir.path(), arena.clone(), options.clone()).unwrap();
        device.open(0, 1 << 20).await.unwrap();
        let (told, answer) = flume::bounded(1);
        let read = Operation::read(0, arena.allocate(BLOCK).unwrap());
        let on_done = Box::new(move |done: larder_device::Done| told.send(done.result.is_ok()).unwrap());
        device.submit(0, Lane::Demand, read, on_done).await.unwrap();
        let began = Instant::now();
        device.close().await;
        assert!(began.elapsed() >= patience && began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        drop(device);
        assert_eq!(arena.used(), BLOCK, "the kernel may still write there");
        assert!(Arc::strong_count(&arena) > 1);
        let again = FileDevice::open(dir.path(), arena.clone(), options);
        assert!(matches!(again, Err(OpenError::Locked(_))), "the directory is not free");
        // It does after all: the memory comes back, and the executor ends.
        std::fs::write(dir.path().join(segment_name(0)), [7; BLOCK]).unwrap();
        assert!(answer.recv_timeout(Duration::from_secs(20)).unwrap());
        let until = Instant::now() + Duration::from_secs(20);
        while arena.used() > 0 {
            assert!(Instant::now() < until, "{} bytes are held", arena.used());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
