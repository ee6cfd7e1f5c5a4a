//! Single cases: those that the model does not reach, and those that need a clear failure message.

use super::*;
use larder_format::epoch::{ForeignHeader, Headerless};
use larder_format::footer::{PageSummary, TombstoneSummary};

const BIG: u64 = 4 << 20;

pub(super) fn summary(n: u8, number: u64, offset: u64) -> PageSummary {
    PageSummary {
        id: id(n),
        offset,
        number,
        parent: PageKey::NONE,
        payload_bytes: BLOCK_BYTES as u32,
        generation: number,
        position: 0,
        expires_unix_ms: 0,
    }
}

pub(super) fn scanned(segment: u32, epoch: u64, records: Vec<RecordSummary>) -> ScannedSegment {
    let end = records.last().map_or(BLOCK_BYTES as u64, |last| last.offset() + last.record_bytes());
    ScannedSegment { segment, epoch, records, end, footer: true, torn: 0, cut_short: false }
}

pub(super) fn drop_damaged(log: &mut Log, n: u8, number: u64) -> bool {
    let record = record_of(log, &id(n)).filter(|record| record.number == number);
    record.is_some_and(|record| log.drop_damaged(record))
}

pub(super) fn restored(config: LogConfig, segments: Vec<ScannedSegment>) -> Log {
    let found = segments
        .iter()
        .map(|one| FoundSegment { segment: one.segment, epoch: Ok(one.epoch), truncated: false })
        .collect();
    let Recovery { mut log, scan_order, .. } = Recovery::new(config, found);
    let mut by_number: BTreeMap<u32, ScannedSegment> = segments.into_iter().map(|one| (one.segment, one)).collect();
    for segment in scan_order {
        log.recover_segment(by_number.remove(&segment.segment).unwrap(), 0).unwrap();
    }
    log.finish_recovery().unwrap();
    log
}

proptest! {
    /// Compares recovery with the rule computed from all records at once.
    #[test]
    fn record_with_the_largest_number_counts(
        records in prop::collection::vec((0..IDS, 0u8..4), 0..60),
        cuts in prop::collection::vec(1usize..8, 0..20),
        numbers in prop::collection::vec(0u32..40, 20..21),
    ) {
        let mut counts: BTreeMap<u8, Option<u64>> = BTreeMap::new();
        let (mut segments, mut number, mut rest) = (Vec::new(), 0, records.as_slice());
        for (epoch, take) in cuts.iter().chain(std::iter::repeat(&60)).enumerate().take(cuts.len() + 1) {
            let (some, more) = rest.split_at((*take).min(rest.len()));
            rest = more;
            let mut offset = BLOCK_BYTES as u64;
            let mut found = Vec::new();
            for &(n, kind) in some {
                number += 1;
                counts.insert(n, (kind > 0).then_some(number));
                found.push(match kind {
                    0 => RecordSummary::Tombstone(TombstoneSummary { id: id(n), offset, number }),
                    _ => RecordSummary::Page(summary(n, number, offset)),
                });
                offset += found.last().unwrap().record_bytes();
            }
            // Neither segment numbers nor the order within a segment may matter.
            found.reverse();
            let name = numbers[epoch % numbers.len()] * 100 + epoch as u32;
            segments.push(scanned(name, epoch as u64 + 1, found));
        }
        let log = restored(LogConfig { segment_bytes: BIG, ..config(100) }, segments);
        for n in 0..IDS {
            let expected = counts.get(&n).copied().flatten();
            prop_assert_eq!(log.find(&id(n), 0).map(|entry| entry.number), expected);
        }
        prop_assert!(log.segments.next_record() > number);
    }
}

/// The footer is larger than the first read of a scan.
#[test]
fn large_footer_takes_two_reads() {
    let records: Vec<RecordSummary> = (0..2000).map(|n| RecordSummary::Tombstone(tombstone(n))).collect();
    let footer = Footer { segment: 3, epoch: 8, records };
    let bytes = footer.encode(&LOG);
    assert!(bytes.len() as u64 > TAIL_BYTES);
    let segment = [vec![0; BIG as usize * 4 - bytes.len()], bytes].concat();
    for broken in [false, true] {
        let mut segment = segment.clone();
        let middle = segment.len() - TAIL_BYTES as usize - 500;
        segment[middle] ^= u8::from(broken);
        let mut scan = SegmentScan::new(LOG, 3, 8, segment.len() as u64, segment.len() as u64);
        let mut reads = 0;
        while let Some(ScanRead { offset, len }) = scan.next_read() {
            scan.feed(&segment[offset as usize..offset as usize + len]);
            reads += 1;
        }
        let found = scan.finish();
        assert_eq!((found.footer, found.records.len()), (!broken, if broken { 0 } else { 2000 }));
        assert!((reads == 2) != broken, "{reads}");
    }
}

fn tombstone(n: u64) -> TombstoneSummary {
    TombstoneSummary { id: id(n as u8), offset: (n + 1) * BLOCK_BYTES as u64, number: n + 1 }
}

#[test]
fn unreadable_footer_falls_back_to_record_headers() {
    let mut disk = Disk::default();
    let place = RecordPlace { segment: 0, epoch: 1, offset: BLOCK_BYTES as u64 };
    let header = RecordHeader { place, number: 1, durable: 0, body: RecordBody::Page(meta(2, 1, 1, 0)) };
    disk.cached.extend(blocks_of(&header));
    let mut scan = SegmentScan::new(LOG, 0, 1, SEGMENT, SEGMENT);
    assert!(scan.next_read().is_some());
    scan.read_failed();
    while let Some(ScanRead { offset, len }) = scan.next_read() {
        let first = offset / BLOCK_BYTES as u64;
        let blocks = (0..(len / BLOCK_BYTES) as u64).flat_map(|i| disk.read((0, first + i)));
        scan.feed(&blocks.collect::<Vec<u8>>());
    }
    let found = scan.finish();
    assert_eq!((found.records.len(), found.cut_short), (1, false));
}

/// A log with segments of 100 pages, on a device that never fails.
pub(super) struct FaultlessLog {
    pub(super) log: Log,
    pub(super) generation: u64,
    pub(super) copied: u64,
    /// By generation.
    pub(super) ids: BTreeMap<u64, PageId>,
}

impl FaultlessLog {
    pub(super) fn new(segments_max: u32, keep_percent: u8) -> FaultlessLog {
        let segment_bytes = 208 * BLOCK_BYTES as u64;
        let config = LogConfig {
            segment_bytes,
            segments_max,
            hash_seed: 1,
            keep_percent,
            quota_default: u64::MAX,
            pages_max: u64::MAX,
        };
        FaultlessLog { log: Log::new(config), generation: 0, copied: 0, ids: BTreeMap::new() }
    }

    fn id(key: u64) -> PageId {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&key.to_le_bytes());
        PageId { namespace: NamespaceId([0; 32]), key: PageKey(bytes) }
    }

    /// The next version of a page.
    pub(super) fn page(&mut self, key: u64) -> PageMeta {
        let id = FaultlessLog::id(key);
        self.ids.insert(self.generation, id);
        PageMeta { id, ..meta(0, self.generation, 1, 0) }
    }

    /// Metadata that the device would return for a record.
    fn meta(&mut self, record: RecordRef) -> Option<PageMeta> {
        let ticket = self.log.entries().begin_maintenance_read(record)?;
        let entry = ticket.entry;
        self.log.end_read(ticket);
        let blocks = u64::from(entry.payload_bytes) / BLOCK_BYTES as u64;
        Some(PageMeta { id: self.ids[&entry.generation], ..meta(0, entry.generation, blocks, 0) })
    }

    pub(super) fn put(&mut self, key: u64) -> PageId {
        self.put_blocks(key, 1)
    }

    fn put_blocks(&mut self, key: u64, blocks: u64) -> PageId {
        self.generation += 1;
        let page = PageMeta { id: self.page(key).id, ..meta(0, self.generation, blocks, 0) };
        for _ in 0..9 {
            match self.log.append(&page).unwrap() {
                Append::Write(write) => {
                    self.log.write_done(write, WriteOutcome::Written);
                    return page.id;
                }
                _ => self.work(),
            }
        }
        panic!("no room for page {key}");
    }

    pub(super) fn work(&mut self) {
        while let Some(intent) = self.log.next_intent() {
            match intent {
                Intent::Prepare(prepare) => self.log.prepared(&prepare, PrepareOutcome::Ready),
                Intent::Footer(footer) => self.log.footer_done(footer, WriteOutcome::Written),
                Intent::Reclaim => while self.log.reclaim_step() {},
                Intent::CopyForward(work) => {
                    for &record in &work.pages {
                        let Some(meta) = self.meta(record) else { continue };
                        if let Some(write) = self.log.plan_copy(record, &meta) {
                            self.copied += 1;
                            self.log.write_done(write, WriteOutcome::Written);
                        }
                    }
                    self.log.copy_forward_done(work.segment, work.epoch);
                }
            }
        }
        for ticket in self.log.sync_plan() {
            self.log.sync_done(ticket, true);
        }
    }
}

/// Used pages survive unused traffic of many times the capacity.
#[test]
fn used_pages_are_retained() {
    for (keep_percent, kept_at_least) in [(50, 100), (0, 0)] {
        let mut driver = FaultlessLog::new(10, keep_percent);
        // A segment takes only so many copies, so the used pages are spread over several.
        let wanted: Vec<PageId> = (0..300).map(|key| driver.put(key)).step_by(3).collect();
        for key in 0..5000 {
            driver.put(1000 + key);
            for n in 0..2 {
                let id = wanted[(key as usize * 2 + n) % 100];
                if let Some(ticket) = driver.log.entries().begin_read(&id, 0) {
                    driver.log.end_read(ticket);
                }
            }
        }
        let left = wanted.iter().filter(|id| driver.log.find(id, 0).is_some()).count();
        assert!(left >= kept_at_least, "{left} with {keep_percent} %");
        assert_eq!(left > 0, keep_percent > 0);
        assert_eq!(driver.copied > 0, keep_percent > 0);
    }
}

#[test]
fn pinned_pages_stay_and_are_bounded() {
    let mut driver = FaultlessLog::new(8, 50);
    let mut pinned = Vec::new();
    let error = (0..).find_map(|key| {
        let id = driver.put(key);
        driver.work();
        let pin = driver.log.pin(&id, Pin::Hard);
        pinned.push(id);
        pin.err()
    });
    pinned.pop();
    assert!(matches!(error, Some(PinError::Full { .. })), "{error:?}");
    assert_eq!(pinned.len(), 208);
    (0..5000).for_each(|key| {
        driver.put(10_000 + key);
    });
    assert!(pinned.iter().all(|id| driver.log.find(id, 0).is_some()));
    for id in &pinned {
        driver.log.pin(id, Pin::None).unwrap();
    }
    assert_eq!(driver.log.counts().pinned_bytes, 0);
    (0..5000).for_each(|key| {
        driver.put(20_000 + key);
    });
    assert!(pinned.iter().all(|id| driver.log.find(id, 0).is_none()));
}

/// Pages that nearly fill a segment find room beside the copies of pinned pages.
#[test]
fn large_pages_fit_beside_pinned_ones() {
    let mut driver = FaultlessLog::new(8, 50);
    for key in 0..208 {
        let id = driver.put(key);
        driver.work();
        driver.log.pin(&id, Pin::Hard).unwrap();
    }
    for key in 0..200 {
        driver.put_blocks(1000 + key, 200 - key % 150);
    }
    assert!((0..208).all(|key| driver.log.find(&FaultlessLog::id(key), 0).is_some()));
}

/// Every page of a copy-forward has its room, however much is put meanwhile.
#[test]
fn writers_leave_reserved_room_to_copies() {
    let mut driver = FaultlessLog::new(5, 50);
    let work = (0..2000).find_map(|key| {
        driver.generation += 1;
        let page = driver.page(key);
        while let Ok(Append::Write(write)) = driver.log.append(&page) {
            driver.log.write_done(write, WriteOutcome::Written);
        }
        match driver.log.next_intent() {
            Some(Intent::Prepare(prepare)) => driver.log.prepared(&prepare, PrepareOutcome::Ready),
            Some(Intent::Footer(footer)) => driver.log.footer_done(footer, WriteOutcome::Written),
            Some(Intent::Reclaim) => while driver.log.reclaim_step() {},
            Some(Intent::CopyForward(work)) => return Some(work),
            None => {}
        }
        let wanted = FaultlessLog::id(key % 30);
        driver.log.entries().touch(&wanted);
        None
    });
    let work = work.unwrap();
    assert!(!work.pages.is_empty());
    let put = (100_000..).take_while(|&key| {
        driver.generation += 1;
        let page = driver.page(key);
        match driver.log.append(&page).unwrap() {
            Append::Write(write) => driver.log.write_done(write, WriteOutcome::Written),
            _ => return false,
        }
        true
    });
    assert!(put.count() > 0);
    let segment_bytes = driver.log.config().segment_bytes;
    for &record in &work.pages {
        let meta = driver.meta(record).unwrap();
        let Some(write) = driver.log.plan_copy(record, &meta) else { panic!("no room for a copy") };
        let end = write.header.place.offset + write.header.record_bytes() as u64;
        assert!(end + 2 * BLOCK_BYTES as u64 <= segment_bytes, "a copy where the footer is to be");
        driver.log.write_done(write, WriteOutcome::Written);
    }
}

#[test]
fn log_of_few_segments_copies_nothing() {
    let mut driver = FaultlessLog::new(3, 50);
    let id = driver.put(1);
    assert!(matches!(driver.log.pin(&id, Pin::Hard), Err(PinError::Full { max: 0, .. })));
    (0..1000).for_each(|key| {
        driver.put(10 + key);
    });
    assert_eq!(driver.copied, 0);
}

#[test]
fn segment_counts_as_unsynced_until_its_sync_has_ended() {
    let mut driver = FaultlessLog::new(8, 50);
    assert_eq!(driver.log.counts().segments_unsynced, 0);
    driver.put(1);
    assert_eq!(driver.log.counts().segments_unsynced, 1);
    let tickets = driver.log.sync_plan();
    driver.put(2);
    for ticket in tickets {
        driver.log.sync_done(ticket, true);
    }
    assert_eq!(driver.log.counts().segments_unsynced, 1, "the second write completed after the sync had begun");
    for ticket in driver.log.sync_plan() {
        driver.log.sync_done(ticket, true);
    }
    assert_eq!(driver.log.counts().segments_unsynced, 0);
}

/// A page dropped for a quota may come back after a crash, so its forget needs a tombstone.
#[test]
fn forget_of_page_dropped_by_quota_writes_tombstone() {
    let mut driver = FaultlessLog::new(8, 50);
    let ids: Vec<PageId> = (0..20).map(|key| driver.put(key)).collect();
    driver.log.set_quota(ids[0].namespace, 5 * 2 * BLOCK_BYTES as u64);
    assert_eq!(driver.log.counts().pages, 5);
    assert_eq!(driver.log.find(&ids[0], 0), None);
    assert!(matches!(driver.log.forget(&ids[0]), Ok(Forget::Write { was_found: false, .. })));
    driver.put(100);
    assert_eq!(driver.log.counts().pages, 5);
    driver.log.set_quota(ids[0].namespace, u64::MAX);
    driver.put(101);
    assert_eq!(driver.log.counts().pages, 6);
}

/// Others must get the lock of the log in between.
#[test]
fn new_quota_of_many_pages_is_enforced_in_steps() {
    const PAGES: u64 = 12_000;
    let mut driver = FaultlessLog::new(200, 50);
    let namespace = driver.put(0).namespace;
    (1..PAGES).for_each(|key| {
        driver.put(key);
    });
    let quota = 10 * 2 * BLOCK_BYTES as u64;
    driver.log.set_quota(namespace, quota);
    let mut steps = 0;
    let mut dropped = driver.log.counts().quota_pages;
    assert!(dropped <= 1024, "{dropped} pages in the first step");
    while driver.log.quota_step() {
        let now = driver.log.counts().quota_pages;
        assert!(now - dropped <= 1024, "{} pages in a step", now - dropped);
        dropped = now;
        steps += 1;
        driver.put(PAGES + steps);
    }
    assert!(steps > 5);
    assert!(driver.log.counts().page_bytes <= quota);
    driver.put(2 * PAGES);
    assert!(driver.log.counts().page_bytes <= quota, "a put keeps to it from then on");
    // A lower quota needs no scan. It is lifted before it is enforced.
    driver.log.set_quota(namespace, 1);
    driver.log.set_quota(namespace, u64::MAX);
    assert!(!driver.log.quota_step());
}

#[test]
fn order_of_a_lifted_quota_is_freed_in_steps() {
    const PAGES: u64 = 12_000;
    let mut driver = FaultlessLog::new(200, 50);
    let namespace = driver.put(0).namespace;
    (1..PAGES).for_each(|key| {
        driver.put(key);
    });
    driver.log.set_quota(namespace, 1 << 40);
    while driver.log.quota_step() {}
    // The call and each step free 4,096 pages.
    driver.log.set_quota(namespace, u64::MAX);
    assert!(driver.log.quota_step());
    assert!(!driver.log.quota_step());
    let quota = 10 * 2 * BLOCK_BYTES as u64;
    driver.log.set_quota(namespace, quota);
    while driver.log.quota_step() {}
    assert!(driver.log.counts().page_bytes <= quota, "the next quota has an order of its own");
}

/// A quota drops pages that no reader used before older ones that were used.
#[test]
fn quota_drops_unused_pages_first() {
    let mut driver = FaultlessLog::new(8, 50);
    let ids: Vec<PageId> = (0..20).map(|key| driver.put(key)).collect();
    ids[..3].iter().for_each(|id| driver.log.entries().touch(id));
    driver.log.set_quota(ids[0].namespace, 5 * 2 * BLOCK_BYTES as u64);
    let left: Vec<bool> = ids.iter().map(|id| driver.log.find(id, 0).is_some()).collect();
    assert!(left[..3].iter().all(|&there| there), "{left:?}");
    assert_eq!(left.iter().filter(|&&there| there).count(), 5);
}

/// A copy counts as unused, so each use is worth one copy.
#[test]
fn page_that_is_not_used_again_is_copied_once() {
    let mut driver = FaultlessLog::new(8, 50);
    let id = driver.put(1);
    driver.log.entries().touch(&id);
    (0..5000).for_each(|key| {
        driver.put(10 + key);
    });
    assert_eq!((driver.copied, driver.log.find(&id, 0)), (1, None));
}

/// Only a full device makes the log smaller. No segment number stays unused.
#[test]
fn failed_segment_is_prepared_again_unless_device_is_full() {
    for (outcome, segments) in [(PrepareOutcome::Removed, 5), (PrepareOutcome::Full, 3)] {
        let config = LogConfig { keep_percent: 0, ..config(5) };
        let mut log = restored(config, (0..4).map(|n| scanned(n, u64::from(n) + 1, Vec::new())).collect());
        let mut failed = false;
        let mut ready = BTreeSet::new();
        for n in 0..200 {
            let write = loop {
                match log.append(&meta(n, 1, 1, 0)).unwrap() {
                    Append::Write(write) => break write,
                    _ => match log.next_intent() {
                        Some(Intent::Prepare(prepare)) if prepare.segment == 2 && !failed => {
                            failed = true;
                            log.prepared(&prepare, outcome);
                        }
                        Some(Intent::Prepare(prepare)) => {
                            ready.insert(prepare.segment);
                            log.prepared(&prepare, PrepareOutcome::Ready);
                        }
                        Some(Intent::Reclaim) => while log.reclaim_step() {},
                        other => panic!("{other:?}"),
                    },
                }
            };
            log.write_done(write, WriteOutcome::Written);
        }
        assert!(failed);
        assert_eq!((log.counts().segments_max, ready.len() as u64), (segments, segments));
        assert!(outcome == PrepareOutcome::Full || ready == (0..5).collect(), "{ready:?}");
    }
}

/// A segment whose early preparation failed is not retried at every put.
#[test]
fn failed_preparation_is_retried_when_the_open_segment_is_full() {
    let mut log = Log::new(LogConfig { segment_bytes: BIG, ..config(9) });
    let mut tries = 0;
    let mut puts = 0;
    for generation in 1.. {
        match log.append(&meta(1, generation, 8, 0)).unwrap() {
            Append::Write(write) => {
                puts += u32::from(tries > 0);
                log.write_done(write, WriteOutcome::Written);
            }
            _ if tries > 0 => break,
            _ => {}
        }
        while let Some(Intent::Prepare(prepare)) = log.next_intent() {
            tries += prepare.segment;
            log.prepared(&prepare, [PrepareOutcome::Ready, PrepareOutcome::Removed][prepare.segment as usize]);
        }
    }
    assert!(tries == 1 && puts > 20, "{tries} tries, {puts} puts");
    let Some(Intent::Prepare(prepare)) = log.next_intent() else { panic!("it is tried again") };
    log.prepared(&prepare, PrepareOutcome::Ready);
    assert!(matches!(log.append(&meta(1, 1000, 8, 0)), Ok(Append::Write(_))));
}

/// The newest put of a page has expired. Recovery must not serve an older put instead.
#[test]
fn expired_newest_put_hides_older_put_at_recovery() {
    let over = PageSummary { expires_unix_ms: 5000, ..summary(2, 9, BLOCK_BYTES as u64) };
    let segments = || {
        let old = vec![RecordSummary::Page(summary(2, 4, BLOCK_BYTES as u64))];
        vec![scanned(0, 1, old), scanned(1, 2, vec![RecordSummary::Page(over)])]
    };
    assert_eq!(restored(config(5), segments()).find(&id(2), 0).map(|entry| entry.number), Some(9));
    let Recovery { mut log, .. } = Recovery::new(
        config(5),
        vec![
            FoundSegment { segment: 0, epoch: Ok(1), truncated: false },
            FoundSegment { segment: 1, epoch: Ok(2), truncated: false },
        ],
    );
    segments().into_iter().rev().for_each(|segment| log.recover_segment(segment, 5000).unwrap());
    assert_eq!(log.finish_recovery().unwrap().expired, 1);
    assert_eq!(log.find(&id(2), 5000), None);
    let Some(Intent::Prepare(prepare)) = ({
        let _ = log.append(&meta(4, 1, 1, 0));
        log.next_intent()
    }) else {
        panic!("a segment is made")
    };
    log.prepared(&prepare, PrepareOutcome::Ready);
    assert!(matches!(log.forget(&id(2)), Ok(Forget::Write { .. })), "its records are still there");
}

/// A truncated segment may have lost tombstones of all older ones. A segment without a known epoch
/// may be of any age.
#[test]
fn untrusted_segments_are_discarded() {
    let silent = Headerless { epoch: None, begins: false, foreign: None };
    let found = |segment, epoch, truncated| FoundSegment { segment, epoch, truncated };
    let sort = |segments: Vec<FoundSegment>| {
        let Recovery { log, discard, misplaced, header_repairs, scan_order } = Recovery::new(config(9), segments);
        assert!(log.segments.next_epoch() > 30 || scan_order.is_empty());
        (
            discard.into_iter().chain(misplaced).collect::<Vec<u32>>(),
            header_repairs,
            scan_order.iter().map(|at| at.epoch).collect::<Vec<u64>>(),
        )
    };
    let whole = || vec![found(7, Ok(10), false), found(4, Ok(30), false), found(5, Ok(20), false)];
    let with = |more: FoundSegment| whole().into_iter().chain([more]).collect();
    assert_eq!(sort(whole()), (vec![], vec![], vec![30, 20, 10]));
    assert_eq!(sort(with(found(1, Ok(25), true))), (vec![7, 5, 1], vec![], vec![30]));
    assert_eq!(sort(with(found(1, Err(silent), false))), (vec![7, 5, 4, 1], vec![], vec![]));
    // A copied segment is harmless. A renamed one is missing. Both are renamed last of all.
    let misplaced = |foreign| found(9, Err(Headerless { foreign: Some(foreign), ..silent }), false);
    let of = |segment, epoch| misplaced(ForeignHeader::Segment { segment, epoch });
    for harmless in [misplaced(ForeignHeader::Log), of(5, 20), of(5, 12)] {
        assert_eq!(sort(with(harmless)), (vec![9], vec![], vec![30, 20, 10]));
    }
    assert_eq!(sort(with(of(5, 25))), (vec![7, 5, 9], vec![], vec![30]), "the one with this name is older");
    assert_eq!(sort(with(of(6, 12))), (vec![7, 9], vec![], vec![30, 20]));
    assert_eq!(Recovery::new(config(9), with(of(6, 77))).log.segments.next_epoch(), 78);
    // A misplaced segment may have replaced one with tombstones. The largest number is removed
    // last, because it is the evidence.
    for (at, foreign) in
        [(6, ForeignHeader::Log), (8, ForeignHeader::Log), (6, ForeignHeader::Segment { segment: 5, epoch: 20 })]
    {
        let over = found(at, Err(Headerless { foreign: Some(foreign), ..silent }), false);
        assert_eq!(sort(with(over)), (vec![4, 5, 7, at], vec![], vec![]), "{foreign:?} at {at}");
    }
    let known = Headerless { epoch: Some(25), ..silent };
    let repair = SegmentEpoch { segment: 1, epoch: 25 };
    assert_eq!(sort(with(found(1, Err(known), false))), (vec![], vec![repair], vec![30, 25, 20, 10]));
    let oldest = Headerless { epoch: Some(5), begins: true, ..silent };
    assert_eq!(sort(with(found(1, Err(oldest), false))), (vec![1], vec![], vec![30, 20, 10]));
    for epoch in [Ok(25), Err(known)] {
        assert_eq!(sort(with(found(65_535, epoch, false))), (vec![7, 5, 4, 65_535], vec![], vec![]));
    }
}

/// A record is missing that a later one calls durable: damage, after which nothing older is served.
#[test]
fn hole_before_the_durable_end_is_damage() {
    for (durable, cut_short) in [(0, false), (BLOCK_BYTES as u64, false), (2 * BLOCK_BYTES as u64, true)] {
        let mut disk = Disk::default();
        let place = RecordPlace { segment: 0, epoch: 1, offset: 2 * BLOCK_BYTES as u64 };
        let header = RecordHeader { place, number: 2, durable, body: RecordBody::Tombstone(id(2)) };
        disk.cached.extend(blocks_of(&header));
        let found = disk.scan(SegmentEpoch { segment: 0, epoch: 1 });
        assert_eq!((found.records.len(), found.cut_short), (1, cut_short));
    }
    let mut disk = Disk::default();
    let place = RecordPlace { segment: 0, epoch: 1, offset: BLOCK_BYTES as u64 };
    let body = RecordBody::Lost { bytes: BLOCK_BYTES as u64 };
    disk.cached.extend(blocks_of(&RecordHeader { place, number: 2, durable: 0, body }));
    assert!(disk.scan(SegmentEpoch { segment: 0, epoch: 1 }).cut_short);
}

/// A copy is damaged while its original's segment still exists.
#[test]
fn damaged_copy_falls_back_while_its_original_exists() {
    let mut driver = FaultlessLog::new(5, 50);
    let mut fell_back = 0;
    for key in 0..3000 {
        let id = driver.put(key % 500);
        if let Some(ticket) = driver.log.entries().begin_read(&id, 0) {
            driver.log.end_read(ticket);
        }
        let work = match driver.log.next_intent() {
            Some(Intent::CopyForward(work)) => work,
            Some(Intent::Reclaim) => {
                while driver.log.reclaim_step() {}
                continue;
            }
            Some(Intent::Prepare(prepare)) => {
                driver.log.prepared(&prepare, PrepareOutcome::Ready);
                continue;
            }
            Some(Intent::Footer(footer)) => {
                driver.log.footer_done(footer, WriteOutcome::Written);
                continue;
            }
            None => continue,
        };
        let meta = driver.meta(work.pages[0]).unwrap();
        let id = meta.id;
        let entry = driver.log.find(&id, 0).unwrap();
        let write = driver.log.plan_copy(work.pages[0], &meta).unwrap();
        driver.log.write_done(write, WriteOutcome::Written);
        let copy = record_of(&driver.log, &id).unwrap();
        assert!(driver.log.drop_damaged(copy));
        assert_eq!(driver.log.find(&id, 0), Some(entry));
        fell_back += 1;
        driver.log.copy_forward_done(work.segment, work.epoch);
        assert_eq!(driver.log.find(&id, 0), None, "it went with its segment");
        assert!(driver.log.index.fallbacks() == 0);
        driver.work();
    }
    assert!(fell_back > 0);
}

/// Only namespaces with a quota of their own stay known without pages, and only a bounded number of
/// them.
#[test]
fn namespace_without_pages_is_forgotten() {
    let quota = 4 * BLOCK_BYTES as u64;
    let segments = vec![scanned(0, 1, Vec::new())];
    let mut log = restored(LogConfig { quota_default: quota, segment_bytes: BIG, ..config(9) }, segments);
    let namespace = |n: u16| NamespaceId([n.to_le_bytes(); 16].concat().try_into().unwrap());
    let page = |n, key| PageMeta {
        id: PageId { namespace: namespace(n), key: PageKey([key; 32]) },
        ..meta(0, u64::from(n) + 1, 1, 0)
    };
    for n in 0..1000u16 {
        log.set_quota(namespace(n), quota);
        for key in 0..3 {
            let write = loop {
                match log.append(&page(n, key)).unwrap() {
                    Append::Write(write) => break write,
                    _ => match log.next_intent() {
                        Some(Intent::Prepare(prepare)) => log.prepared(&prepare, PrepareOutcome::Ready),
                        Some(Intent::Reclaim) => while log.reclaim_step() {},
                        other => panic!("{other:?}"),
                    },
                }
            };
            log.write_done(write, WriteOutcome::Written);
        }
        let there: Vec<PageId> = (0..3).map(|key| page(n, key).id).filter(|id| log.find(id, 0).is_some()).collect();
        assert_eq!(there.len(), 2, "the default holds for namespace {n}");
        for id in there {
            let record = record_of(&log, &id).unwrap();
            assert!(log.drop_damaged(record));
        }
    }
    assert!(log.index.namespaces() <= 1, "{}", log.index.namespaces());
    (0..10).for_each(|n| log.set_quota(namespace(n), 1));
    assert_eq!(log.index.namespaces(), 10);
    (0..10).for_each(|n| log.set_quota(namespace(n), quota));
    assert!((0..10).all(|n| log.index.namespace_number(&namespace(n)).is_none()));
    let last = 3 * index::WITHOUT_PAGES_MAX as u16;
    for n in (0..last).chain([last - 1, last - 1]) {
        log.set_quota(namespace(n), 1);
    }
    assert!(log.index.namespaces() <= index::WITHOUT_PAGES_MAX + 1, "one more until the oldest went");
    let known = |n| log.index.namespace_number(&namespace(n)).is_some();
    let kept = last - index::WITHOUT_PAGES_MAX as u16;
    assert!((kept..last).all(known) && !(0..kept).any(known));
}
