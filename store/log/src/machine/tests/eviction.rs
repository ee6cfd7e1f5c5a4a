//! Evictions of a segment, slice by slice, and the copies before them.

use super::cases::FaultlessLog;
use super::*;

fn append(driver: &mut FaultlessLog, key: u64) -> (PageId, Append) {
    driver.generation += 1;
    let page = driver.page(key);
    (page.id, driver.log.append(&page).unwrap())
}

/// Calls `put` with growing keys until the first slice of a segment is evicted.
fn put_until_eviction_begins(driver: &mut FaultlessLog, mut put: impl FnMut(&mut FaultlessLog, u64)) {
    let is_evicting = |log: &Log| matches!(log.next_segment, NextSegment::Evicting(_));
    for key in 0..2000 {
        put(driver, key);
        match driver.log.next_intent() {
            Some(Intent::Prepare(prepare)) => driver.log.prepared(&prepare, PrepareOutcome::Ready),
            Some(Intent::Footer(footer)) => driver.log.footer_done(footer, WriteOutcome::Written),
            Some(Intent::Reclaim) => while !is_evicting(&driver.log) && driver.log.reclaim_step() {},
            _ => {}
        }
        if is_evicting(&driver.log) {
            return;
        }
    }
    panic!("the log evicts nothing");
}

/// Between two slices of an eviction, the pages that are left can be read, and an evicted page may
/// still be on the device.
#[test]
fn segment_is_evicted_slice_by_slice() {
    let mut driver = FaultlessLog::new(8, 0);
    let mut ids: Vec<PageId> = Vec::new();
    put_until_eviction_begins(&mut driver, |driver, key| {
        if let (id, Append::Write(write)) = append(driver, key) {
            driver.log.write_done(write, WriteOutcome::Written);
            ids.push(id);
        }
    });
    let oldest = driver.log.segments.in_epoch_order(..).next().unwrap();
    let mut left: Vec<PageId> = ids.clone();
    left.retain(|id| driver.log.find(id, 0).is_some_and(|entry| entry.place.epoch == oldest.0));
    assert!(left.len() > 10 && driver.log.find(&ids[0], 0).is_some());
    assert_eq!(driver.log.pin(&left[0], Pin::Hard), Err(PinError::NotKept));
    let ticket = driver.log.entries().begin_read(&left[0], 0).unwrap();
    let pages = driver.log.counts().pages;
    assert!(driver.log.reclaim_step());
    assert_eq!(driver.log.counts().pages, pages - 1);
    let evicted = *left.iter().find(|id| driver.log.find(id, 0).is_none()).unwrap();
    while driver.log.reclaim_step() {}
    assert!(left.iter().all(|id| driver.log.find(id, 0).is_none()));
    assert!(matches!(driver.log.next_segment, NextSegment::Reclaiming(_)), "a page is being read");
    // Until the new header is durable, a crash would bring the page back.
    let forget = driver.log.forget(&evicted);
    assert!(matches!(forget, Ok(Forget::Write { was_found: false, .. }) | Ok(Forget::Wait)), "{forget:?}");
    driver.log.end_read(ticket);
    driver.work();
    assert_eq!(driver.log.forget(&left[1]), Ok(Forget::NotThere));
}

/// The eviction of a segment begins while writes to it are in flight.
#[test]
fn older_put_is_not_served_after_a_newer_one_to_an_evicted_segment() {
    // A log that copies pages waits for the writes before.
    let mut driver = FaultlessLog::new(3, 0);
    let mut in_flight = Vec::new();
    put_until_eviction_begins(&mut driver, |driver, key| {
        if let (_, Append::Write(write)) = append(driver, key) {
            driver.log.write_done(write, WriteOutcome::Written);
        }
        if in_flight.len() < 20
            && let (id, Append::Write(write)) = append(driver, key)
        {
            in_flight.push((id, write));
        }
    });
    let mut older = 0;
    for (id, write) in in_flight {
        older += usize::from(driver.log.find(&id, 0).is_some());
        driver.log.write_done(write, WriteOutcome::Written);
        assert!(driver.log.find(&id, 0).is_none(), "the node has acknowledged a newer put");
    }
    assert!(older > 0, "all older puts were evicted before");
}

/// A newer put of a pinned page is written to the segment that is reclaimed next.
#[test]
fn page_keeps_its_hard_pin_if_it_is_replaced_while_copies_are_chosen() {
    let mut driver = FaultlessLog::new(8, 50);
    let pinned = driver.put(0);
    driver.log.pin(&pinned, Pin::Hard).unwrap();
    let (_, Append::Write(newer)) = append(&mut driver, 0) else { panic!("the segment has room") };
    let generation = driver.generation;
    let is_choosing = |log: &Log| matches!(log.next_segment, NextSegment::Choosing(_));
    (1..5000).find(|&key| {
        driver.work();
        if let (_, Append::Write(write)) = append(&mut driver, key) {
            driver.log.write_done(write, WriteOutcome::Written);
        }
        is_choosing(&driver.log)
    });
    assert!(is_choosing(&driver.log));
    driver.log.write_done(newer, WriteOutcome::Written);
    (5000..9000).for_each(|key| {
        driver.put(key);
    });
    assert_eq!(driver.log.find(&pinned, 0).map(|entry| entry.generation), Some(generation));
    assert!(driver.log.counts().pinned_bytes > 0);
}

/// The choice has begun, and waits for a write. It found no pin, so it keeps no room for one.
#[test]
fn hard_pin_during_the_wait_for_writes_is_refused_or_kept() {
    let mut driver = FaultlessLog::new(8, 50);
    let page = driver.put(0);
    let (_, Append::Write(in_flight)) = append(&mut driver, 1) else { panic!("the segment has room") };
    let is_choosing = |log: &Log| matches!(log.next_segment, NextSegment::Choosing(_));
    (2..5000).find(|&key| {
        driver.work();
        if let (_, Append::Write(write)) = append(&mut driver, key) {
            driver.log.write_done(write, WriteOutcome::Written);
        }
        is_choosing(&driver.log)
    });
    assert!(is_choosing(&driver.log));
    let pinned = driver.log.pin(&page, Pin::Hard);
    driver.log.write_done(in_flight, WriteOutcome::Written);
    (5000..9000).for_each(|key| {
        driver.put(key);
    });
    assert_eq!(driver.log.find(&page, 0).is_some(), pinned.is_ok(), "{pinned:?}");
}

/// The room for copies goes to used pages of higher worth, wherever they are in their segment.
#[test]
fn used_pages_of_higher_worth_are_copied_first() {
    let mut driver = FaultlessLog::new(8, 10);
    let ids: Vec<PageId> = (0..90).map(|key| driver.put(key)).collect();
    for (ids, worth) in ids.chunks(30).zip([Worth::Low, Worth::Usual, Worth::High]) {
        ids.iter().for_each(|id| driver.log.entries().rank(id, worth));
    }
    for key in 1000..5000 {
        driver.put(key);
        if driver.copied > 0 {
            break;
        }
    }
    driver.work();
    let left_of = |ids: &[PageId]| ids.iter().filter(|id| driver.log.find(id, 0).is_some()).count();
    let left: Vec<usize> = ids.chunks(30).map(left_of).collect();
    assert!(left[0] == 0 && left[2] > 0, "{left:?}");
    assert!(left[1] == 0 || left[2] == 30, "{left:?}");
}
