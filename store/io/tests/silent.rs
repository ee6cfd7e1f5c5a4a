//! A device that does not complete its requests. Closing it must time out, and must not free memory
//! or unlock the directory while a request is in flight.

use larder_io::{Device, Executor, FileDevice, OpenError, Operation, Priority, RingOptions, segment_name};
use larder_memory::Arena;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const BLOCK: usize = 4096;
/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

/// Creates a directory whose segment 0 is a FIFO without a writer: reads of it do not complete.
fn with_silent_file() -> TempDir {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = CString::new(dir.path().join(segment_name(0)).as_os_str().as_bytes()).unwrap();
    // SAFETY: the string is NUL-terminated and lives through the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    dir
}

fn options(executor: Executor, close_timeout: Duration) -> RingOptions {
    RingOptions { executor, close_timeout, register_arena: false, ..RingOptions::new("silent", 4) }
}

async fn submit_read(device: &FileDevice, segment: u32, arena: &Arc<Arena>, on_done: impl FnOnce() + Send + 'static) {
    let read = Operation::read(0, arena.allocate(BLOCK).unwrap());
    device.submit(segment, Priority::Demand, read, Box::new(move |_| on_done())).await.unwrap();
}

/// On paused time, which passes while all tasks wait. A close that blocks its thread takes none of
/// it, and closes one after the other take one timeout each.
#[tokio::test(start_paused = true)]
async fn silent_devices_close_concurrently() {
    let close_timeout = Duration::from_secs(2);
    let arena = Arena::new(1 << 20).unwrap();
    let dirs: Vec<TempDir> = (0..16).map(|_| with_silent_file()).collect();
    let mut devices = Vec::new();
    for dir in &dirs {
        let device = FileDevice::open(dir.path(), arena.clone(), options(Executor::default(), close_timeout)).unwrap();
        device.open(0, 1 << 20).await.unwrap();
        submit_read(&device, 0, &arena, || ()).await;
        devices.push(device);
    }
    let start = tokio::time::Instant::now();
    let closing = devices.into_iter().map(|device| tokio::spawn(async move { device.close().await }));
    for closed in closing.collect::<Vec<_>>() {
        closed.await.unwrap();
    }
    let time = start.elapsed();
    assert!((close_timeout..2 * close_timeout).contains(&time), "{time:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_dropped_on_its_own_thread_keeps_the_directory_locked_until_requests_complete() {
    for executor in [Executor::Glommio, Executor::Thread] {
        let dir = with_silent_file();
        std::fs::write(dir.path().join(segment_name(1)), [1; BLOCK]).unwrap();
        let arena = Arena::new(1 << 20).unwrap();
        let close_timeout = Duration::from_millis(300);
        let device = FileDevice::open(dir.path(), arena.clone(), options(executor, close_timeout)).unwrap();
        device.open(0, 1 << 20).await.unwrap();
        device.open(1, BLOCK as u64).await.unwrap();
        submit_read(&device, 0, &arena, || ()).await;
        let (go, wait) = flume::bounded::<()>(1);
        let (told, answer) = flume::bounded(1);
        let last = device.clone();
        submit_read(&device, 1, &arena, move || {
            wait.recv().unwrap();
            drop(last);
            told.send(()).unwrap();
        })
        .await;
        drop(device);
        go.send(()).unwrap();
        answer.recv_timeout(PATIENCE).unwrap();
        let reopen = || FileDevice::open(dir.path(), arena.clone(), options(executor, close_timeout));
        assert!(matches!(reopen(), Err(OpenError::Locked(_))), "a request is in flight");
        std::fs::write(dir.path().join(segment_name(0)), [7; BLOCK]).unwrap();
        let until = Instant::now() + PATIENCE;
        while reopen().is_err() {
            assert!(Instant::now() < until, "the directory is never unlocked");
        }
        assert_eq!(arena.used(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_times_out_on_a_silent_device_and_keeps_its_memory() {
    for executor in [Executor::Glommio, Executor::Thread] {
        let dir = with_silent_file();
        let arena = Arena::new(1 << 20).unwrap();
        let close_timeout = Duration::from_millis(300);
        let options = options(executor, close_timeout);
        let device = FileDevice::open(dir.path(), arena.clone(), options.clone()).unwrap();
        device.open(0, 1 << 20).await.unwrap();
        let (told, answer) = flume::bounded(1);
        let read = Operation::read(0, arena.allocate(BLOCK).unwrap());
        let on_done = Box::new(move |done: larder_io::Done| told.send(done.result.is_ok()).unwrap());
        device.submit(0, Priority::Demand, read, on_done).await.unwrap();
        let start = Instant::now();
        device.close().await;
        assert!(start.elapsed() >= close_timeout && start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        drop(device);
        assert_eq!(arena.used(), BLOCK, "the kernel may still write to this memory");
        assert!(Arc::strong_count(&arena) > 1);
        let reopen = FileDevice::open(dir.path(), arena.clone(), options);
        assert!(matches!(reopen, Err(OpenError::Locked(_))), "the directory stays locked");
        // A writer completes the request: the memory is returned and the executor ends.
        std::fs::write(dir.path().join(segment_name(0)), [7; BLOCK]).unwrap();
        assert!(answer.recv_timeout(PATIENCE).unwrap());
        let until = Instant::now() + PATIENCE;
        while arena.used() > 0 {
            assert!(Instant::now() < until, "{} bytes are still allocated", arena.used());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
