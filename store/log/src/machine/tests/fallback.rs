//! Copies that a crash left beside their originals.

use super::cases::{FaultlessLog, drop_damaged, restored, scanned, summary};
use super::*;
use larder_format::footer::PageSummary;

fn page(summary: PageSummary) -> Vec<RecordSummary> {
    vec![RecordSummary::Page(summary)]
}

fn number_of(log: &Log, n: u8) -> Option<u64> {
    log.find(&id(n), 0).map(|entry| entry.number)
}

/// Reports that the device failed to read the record of page 2, or an earlier record in its slot.
fn avoid_unreadable(log: &mut Log, number: u64) {
    avoid_unreadable_at(log, number, 1_000);
}

fn avoid_unreadable_at(log: &mut Log, number: u64, unix_ms: u64) {
    let slot = log.index.entries.find(&id(2)).unwrap();
    log.avoid_unreadable(RecordRef { number, slot }, unix_ms);
}

/// The copy may be torn, and the original was durable before it.
#[test]
fn original_is_served_until_it_is_damaged_and_then_its_copy() {
    let original = summary(2, 4, BLOCK_BYTES as u64);
    let copy = PageSummary { number: 9, ..original };
    let mut first = restored(config(5), vec![scanned(0, 1, page(original)), scanned(1, 2, page(copy))]);
    assert_eq!(number_of(&first, 2), Some(4));
    let mut list = first.scrub_list(None).unwrap();
    list.sort(first.entries());
    assert_eq!(first.scrub_next(&mut list, u64::MAX).len(), 1);
    assert!(drop_damaged(&mut first, 2, 4));
    assert_eq!(number_of(&first, 2), Some(9));
    assert!(drop_damaged(&mut first, 2, 9));
    assert_eq!(number_of(&first, 2), None);
    assert!(first.index.fallbacks() == 0);

    let other = PageSummary { generation: 5, number: 9, ..original };
    let mut log = restored(config(5), vec![scanned(0, 1, page(original)), scanned(1, 2, page(other))]);
    assert_eq!(number_of(&log, 2), Some(9));
    assert!(drop_damaged(&mut log, 2, 9));
    assert_eq!(number_of(&log, 2), None, "another put is no copy");
}

#[test]
fn unreadable_record_takes_turns_with_its_copy_until_both_failed() {
    let original = summary(2, 4, BLOCK_BYTES as u64);
    let copy = PageSummary { number: 9, ..original };
    let restore = || restored(config(5), vec![scanned(0, 1, page(original)), scanned(1, 2, page(copy))]);
    let mut log = restore();
    avoid_unreadable(&mut log, 4);
    assert_eq!(number_of(&log, 2), Some(9));
    avoid_unreadable(&mut log, 4);
    assert_eq!(number_of(&log, 2), Some(9), "that read began before the exchange");
    assert!(drop_damaged(&mut log, 2, 9));
    assert_eq!(number_of(&log, 2), Some(4), "the error may have been transient");

    let mut log = restore();
    avoid_unreadable(&mut log, 4);
    avoid_unreadable(&mut log, 9);
    assert_eq!((number_of(&log, 2), log.index.fallbacks()), (None, 0));
    assert!(log.unindexed.pages() > 0, "a forget must write a tombstone: a restart may bring the records back");
}

#[test]
fn record_that_failed_a_minute_ago_is_tried_again() {
    let original = summary(2, 4, BLOCK_BYTES as u64);
    let copy = PageSummary { number: 9, ..original };
    let failed_ms = 1_000_000;
    let number_after = |ms: u64| {
        let mut log = restored(config(5), vec![scanned(0, 1, page(original)), scanned(1, 2, page(copy))]);
        avoid_unreadable_at(&mut log, 4, failed_ms);
        avoid_unreadable_at(&mut log, 9, ms);
        number_of(&log, 2)
    };
    assert_eq!(number_after(failed_ms + 59_000), None, "both failed lately");
    assert_eq!(number_after(failed_ms + 60_000), Some(4));
    assert_eq!(number_after(failed_ms - 1_000), Some(4), "the clock went back");
}

/// A read of the original fails before recovery has found all records of the put.
#[test]
fn newest_copy_stays_known_after_an_unreadable_record() {
    let oldest = summary(2, 4, BLOCK_BYTES as u64);
    let records = [oldest, PageSummary { number: 9, ..oldest }, PageSummary { number: 12, ..oldest }];
    let found = [0, 1, 2].map(|segment| FoundSegment { segment, epoch: Ok(u64::from(segment) + 1), truncated: false });
    let Recovery { mut log, .. } = Recovery::new(config(5), found.into());
    for (segment, record) in [(2, records[2]), (1, records[1]), (0, records[0])] {
        log.recover_segment(scanned(segment, u64::from(segment) + 1, page(record)), 0).unwrap();
        if segment == 1 {
            avoid_unreadable(&mut log, 9);
            assert_eq!(number_of(&log, 2), Some(12));
        }
    }
    log.finish_recovery().unwrap();
    assert_eq!(number_of(&log, 2), Some(4));
    assert!(drop_damaged(&mut log, 2, 4));
    assert_eq!(number_of(&log, 2), Some(12));
}

/// Recovers a log of two records of page 2. A reader finds the newer one damaged in between.
fn recovered_after_damage(older: PageSummary, newer: PageSummary) -> Log {
    let segments = [0, 1].map(|segment| FoundSegment { segment, epoch: Ok(u64::from(segment) + 1), truncated: false });
    let Recovery { mut log, .. } = Recovery::new(config(5), segments.into());
    log.recover_segment(scanned(1, 2, page(newer)), 0).unwrap();
    assert!(drop_damaged(&mut log, 2, newer.number));
    log.recover_segment(scanned(0, 1, page(older)), 0).unwrap();
    log.finish_recovery().unwrap();
    log
}

#[test]
fn original_is_served_although_a_read_found_its_copy_first() {
    let original = summary(2, 4, BLOCK_BYTES as u64);
    let log = recovered_after_damage(original, PageSummary { number: 9, ..original });
    assert_eq!(number_of(&log, 2), Some(4));
    let log = recovered_after_damage(original, PageSummary { number: 9, generation: 5, ..original });
    assert_eq!(number_of(&log, 2), None, "an older put does not take the place of a damaged page");
}

/// A log whose oldest segment has page 2, and a younger one its copy.
fn log_with_copy() -> (FaultlessLog, PageSummary) {
    let mut driver = FaultlessLog::new(8, 50);
    let original = PageSummary { generation: u64::MAX, ..summary(2, 4, BLOCK_BYTES as u64) };
    let copy = PageSummary { number: 1 << 40, ..original };
    let segments = vec![scanned(0, 1, page(original)), scanned(1, 2, page(copy))];
    driver.log = restored(driver.log.config().clone(), segments);
    driver.ids.insert(original.generation, id(2));
    (driver, copy)
}

fn put_until(driver: &mut FaultlessLog, is_done: impl Fn(&Log) -> bool) {
    (0..10_000).find(|&key| {
        driver.put(1000 + key);
        is_done(&driver.log)
    });
    assert!(is_done(&driver.log));
}

#[test]
fn reclaim_copies_a_used_page_from_its_original() {
    let (mut driver, copy) = log_with_copy();
    driver.log.pin(&id(2), Pin::Hard).unwrap();
    put_until(&mut driver, |log| log.segments.oldest_epoch() > Some(1));
    assert_ne!(number_of(&driver.log, 2), Some(copy.number), "that copy was never verified");
    assert!(number_of(&driver.log, 2).is_some());
}

#[test]
fn reclaim_leaves_an_unused_page_with_its_copy() {
    let (mut driver, copy) = log_with_copy();
    put_until(&mut driver, |log| log.segments.oldest_epoch() > Some(1));
    assert_eq!(number_of(&driver.log, 2), Some(copy.number));
    assert_eq!(driver.log.counts().evicted_pages, 0);
    put_until(&mut driver, |log| log.segments.oldest_epoch() > Some(2));
    assert_eq!(number_of(&driver.log, 2), None);
}

/// Both records stay on the device, so a restart could bring the copy back.
#[test]
fn forget_writes_a_tombstone_after_the_original_was_dropped_and_reclaimed() {
    let (mut driver, _) = log_with_copy();
    driver.log.set_quota(id(2).namespace, 1);
    assert_eq!(number_of(&driver.log, 2), None);
    driver.log.set_quota(id(2).namespace, u64::MAX);
    put_until(&mut driver, |log| log.segments.oldest_epoch() > Some(1));
    assert!(matches!(driver.log.forget(&id(2)), Ok(Forget::Write { was_found: false, .. })));
}
