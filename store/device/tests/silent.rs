//! A device that never answers: closing it ends all the same, and takes nothing from under it.

use larder_device::{Arena, Device, Executor, FileDevice, Lane, OpenError, Operation, RingOptions, segment_name};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_does_not_wait_for_ever() {
    for executor in [Executor::Glommio, Executor::Thread] {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        // What is read from a pipe that nobody writes to never comes.
        let path = CString::new(dir.path().join(segment_name(0)).as_os_str().as_bytes()).unwrap();
        // SAFETY: the string ends with a zero and lives as long as the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        let arena = Arena::new(1 << 20).unwrap();
        let patience = Duration::from_millis(300);
        let options = RingOptions { executor, patience, register_arena: false, ..RingOptions::new("silent", 4) };
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
