//! Copies that a crash left beside their originals.

use super::cases::{drop_damaged, restored, scanned, summary};
use super::*;
use larder_format::footer::PageSummary;

/// A crash left a torn copy and its original. The original is served after a read found the copy
/// damaged.
#[test]
fn torn_copy_falls_back_to_its_original() {
    let original = summary(2, 4, BLOCK_BYTES as u64);
    let copy = PageSummary { number: 9, ..original };
    let page = |summary| vec![RecordSummary::Page(summary)];
    let log = |later| restored(config(5), vec![scanned(0, 1, page(original)), scanned(1, 2, page(copy)), later]);
    let none = || scanned(2, 3, Vec::new());
    let mut first = log(none());
    assert_eq!(first.find(&id(2), 0).map(|entry| entry.number), Some(9));
    assert!(drop_damaged(&mut first, 2, 9));
    let entry = first.find(&id(2), 0).unwrap();
    assert_eq!((entry.number, entry.place.epoch), (4, 1));
    let mut list = first.scrub_list(None).unwrap();
    list.sort();
    assert_eq!(first.scrub_next(&mut list, u64::MAX).len(), 1);
    assert!(drop_damaged(&mut first, 2, 4));
    assert_eq!(first.find(&id(2), 0), None);
    assert!(first.index.fallbacks() == 0);

    let other = PageSummary { generation: 5, number: 9, ..original };
    let mut log = restored(config(5), vec![scanned(0, 1, page(original)), scanned(1, 2, page(other))]);
    assert!(drop_damaged(&mut log, 2, 9));
    assert_eq!(log.find(&id(2), 0), None, "another put is no copy");
}
