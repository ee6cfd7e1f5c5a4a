//! Waits of streams and events, on the device of the host, and on a CUDA device if one exists.

use larder_kernels::device::{Device, DeviceError, Place, cuda, host};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: usize = 64 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices = vec![host::open(4 * BYTES)];
    match cuda::open(0) {
        Ok(device) => devices.push(device),
        Err(error @ (DeviceError::NoDriver | DeviceError::NoDevice(_) | DeviceError::NoCudaCompiler)) => {
            println!("{error}");
        }
        Err(other) => panic!("{other}"),
    }
    devices
}

#[test]
fn a_wait_for_a_stream_includes_the_events_for_which_it_waits() {
    for device in devices() {
        let (busy, waiting) = (device.stream("busy").unwrap(), device.stream("waiting").unwrap());
        let memory = device.allocate(Place::Device, BYTES).unwrap();
        for byte in 0..30 {
            busy.fill(&memory.all(), byte).unwrap();
        }
        let filled = busy.record().unwrap();
        waiting.wait_for(&*filled).unwrap();
        waiting.wait(soon()).unwrap();
        assert!(filled.is_done().unwrap(), "{:?}", device.info());
    }
}

#[test]
fn a_wait_ends_at_its_deadline_while_another_thread_waits_for_room() {
    // While this thread is stopped, the operations may end.
    assert!((0..10).any(|_| waits_while_the_queue_is_full()), "each wait has lasted longer than its deadline");
}

/// The second stream waits for the first, and its queue fills up. Returns `true` if a wait for it
/// ends before the operations of the first.
fn waits_while_the_queue_is_full() -> bool {
    let device = host::open(2 * BYTES);
    let (busy, full) = (device.stream("busy").unwrap(), device.stream("full").unwrap());
    let (large, small) = (device.allocate(Place::Device, BYTES).unwrap(), device.allocate(Place::Device, 1).unwrap());
    for _ in 0..200 {
        busy.fill(&large.all(), 1).unwrap();
    }
    let event = busy.record().unwrap();
    full.wait_for(&*event).unwrap();
    let ends_early = std::thread::scope(|scope| {
        let fills = scope.spawn(|| (0..1100).for_each(|_| full.fill(&small.all(), 1).unwrap()));
        // One operation runs, 1,024 are queued, and one waits for room.
        let is_full = || format!("{full:?}").contains("of 1026 operations");
        while !is_full() && !event.is_done().unwrap() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let was_full = is_full();
        let result = full.wait(Instant::now() + Duration::from_millis(5));
        assert!(matches!(result, Ok(()) | Err(DeviceError::Deadline { .. })), "{result:?}");
        let ends_early = was_full && result.is_err() && !event.is_done().unwrap();
        fills.join().unwrap();
        ends_early
    });
    full.wait(soon()).unwrap();
    ends_early
}

#[test]
fn the_host_reads_pinned_memory_after_a_wait_for_an_event() {
    for device in devices() {
        let stream = device.stream("fill").unwrap();
        let memory = device.allocate(Place::Pinned, BYTES).unwrap();
        for byte in 0..8 {
            stream.fill(&memory.all(), byte).unwrap();
        }
        stream.record().unwrap().wait(soon()).unwrap();
        let mut last = [0];
        memory.slice(BYTES - 1..BYTES).unwrap().read(&mut last).unwrap();
        assert_eq!(last, [7], "{:?}", device.info());
    }
}
