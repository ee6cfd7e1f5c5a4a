//! Models of the log: readers beside the reuse of segments, forgets beside writes, and the close.

use super::{MemoryDevice, block_on, explore, finds, id, log_options, page, soon};
use larder_log::{L3, L3Error};
use larder_memory::Arena;
use shuttle::thread;
use std::sync::Arc;

/// Payload of which one segment holds one.
const LARGE: usize = 900 << 10;

fn open(arena: &Arc<Arena>, segments: u64) -> (L3, Arc<MemoryDevice>) {
    let device = MemoryDevice::new();
    let l3 = block_on(async {
        let l3 = L3::open_on(device.clone(), log_options(segments), arena.clone()).await.unwrap();
        l3.recovered().await.unwrap();
        l3
    });
    (l3, device)
}

fn write(l3: &L3, arena: &Arc<Arena>, number: u8, generation: u64, bytes: usize) -> Result<(), L3Error> {
    let (meta, slot) = page(arena, number, generation, bytes);
    block_on(l3.write(meta, slot, soon()))
}

/// A reader gets its page or a miss while the segment under it is reclaimed and written again.
fn read_beside_recycling(arena: &Arc<Arena>) {
    let (l3, _) = open(arena, 2);
    write(&l3, arena, 1, 1, LARGE).unwrap();
    let location = l3.lookup(&id(1)).expect("written");
    let writer = thread::spawn({
        let (l3, arena) = (l3.clone(), arena.clone());
        move || (2..4).for_each(|number| write(&l3, &arena, number, number.into(), LARGE).unwrap())
    });
    let read = block_on(l3.read_at(&location, soon())).unwrap();
    if let Some((meta, payload)) = read {
        assert!(meta.id == id(1) && payload.iter().all(|&byte| byte == 1), "the bytes of another page");
    }
    writer.join().unwrap();
    assert_eq!(l3.stats().corrupt, 0, "the record changed under its reader");
    assert!(l3.lookup(&id(3)).is_some(), "the last page is on the log");
}

#[test]
fn threads_read_a_page_or_a_miss_while_its_segment_is_reused() {
    explore(read_beside_recycling);
}

#[test]
fn threads_find_a_segment_reused_under_a_read() {
    finds("log.reuse-segment-under-read", read_beside_recycling);
}

#[test]
fn threads_find_a_read_that_is_counted_after_its_unlock() {
    finds("log.read-counted-after-unlock", read_beside_recycling);
}

/// A page whose write had begun when it was forgotten stays forgotten.
fn forget_beside_write(arena: &Arc<Arena>) {
    let (l3, device) = open(arena, 2);
    let before = device.writes_submitted();
    let writer = thread::spawn({
        let (l3, arena) = (l3.clone(), arena.clone());
        move || write(&l3, &arena, 1, 1, 4096)
    });
    // A forget before the plan of the write would be another order, in which the page stays.
    while device.writes_submitted() == before {
        thread::yield_now();
    }
    block_on(l3.forget(&[id(1)], soon())).unwrap();
    let _ = writer.join().unwrap();
    assert!(l3.lookup(&id(1)).is_none(), "a forgotten page came back");
}

#[test]
fn threads_keep_a_page_forgotten_during_its_write() {
    explore(forget_beside_write);
}

#[test]
fn threads_find_a_forget_that_misses_a_write_in_flight() {
    finds("log.forget-misses-write-in-flight", forget_beside_write);
}

/// Every writer ends, whether or not the log is closed while it waits for a segment.
fn close_beside_writers(arena: &Arc<Arena>) {
    let (l3, _) = open(arena, 2);
    let writers = [1, 2].map(|number| {
        let (l3, arena) = (l3.clone(), arena.clone());
        thread::spawn(move || write(&l3, &arena, number, number.into(), LARGE).is_ok())
    });
    block_on(l3.close());
    let written = writers.map(|writer| writer.join().unwrap());
    let found = [1, 2].map(|number| l3.lookup(&id(number)).is_some());
    assert!(written.iter().zip(found).all(|(&written, found)| !written || found), "an acknowledged page is missing");
}

#[test]
fn threads_of_writers_end_when_the_log_closes() {
    explore(close_beside_writers);
}
