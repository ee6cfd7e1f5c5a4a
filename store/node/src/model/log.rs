//! Models of the log: readers beside the reuse of segments and beside copies, forgets beside
//! writes, and the close.

use super::{MemoryDevice, block_on, explore, finds, id, log_options, page, soon};
use larder_log::{L3, L3Error};
use larder_memory::Arena;
use shuttle::thread;
use std::sync::Arc;

/// Payload of which one segment holds one.
const LARGE: usize = 900 << 10;
/// Segments of a log that copies pages, at least.
const SEGMENTS: u64 = 4;

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

/// A used page is found and read at every moment of its copy to a younger segment, and of the
/// reclaim of its old one.
fn read_beside_copy_forward(arena: &Arc<Arena>) {
    /// Smallest multiple of 64 KiB for which a segment with a large payload has no room.
    const NEXT: usize = 128 << 10;
    let (l3, _) = open(arena, SEGMENTS);
    write(&l3, arena, 1, 1, 4096).unwrap();
    // The first of these stands in the segment of page 1. The others fill two more.
    (2..5).for_each(|number| write(&l3, arena, number, number.into(), LARGE).unwrap());
    let original = l3.lookup(&id(1)).expect("written");
    // A page that was never used would be evicted.
    assert!(block_on(l3.read_at(&original, soon())).unwrap().is_some());
    let reader = thread::spawn({
        let l3 = l3.clone();
        move || {
            for _ in 0..4 {
                let found = l3.lookup(&id(1)).expect("a lookup missed a page that is there all the time");
                for location in [found, original] {
                    let read = block_on(l3.read_at(&location, soon())).unwrap();
                    let (_, payload) = read.expect("a read missed a page that is there all the time");
                    assert!(payload.iter().all(|&byte| byte == 1), "the bytes of another page");
                }
            }
        }
    });
    // It opens the last segment, and so begins the reclaim of the first one.
    write(&l3, arena, 5, 5, NEXT).unwrap();
    while l3.stats().segments_prepared <= SEGMENTS {
        thread::yield_now();
    }
    reader.join().unwrap();
    let stats = l3.stats();
    assert_eq!((stats.copied_forward_pages, stats.evicted_pages, stats.corrupt), (1, 1, 0));
    assert!(l3.lookup(&id(1)).is_some_and(|copy| copy != original), "the page was copied");
}

#[test]
fn threads_find_and_read_a_page_at_every_moment_of_its_copy() {
    explore(read_beside_copy_forward);
}

#[test]
fn threads_find_a_copy_that_becomes_current_in_two_steps() {
    finds("log.relocate-after-unlock", read_beside_copy_forward);
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
