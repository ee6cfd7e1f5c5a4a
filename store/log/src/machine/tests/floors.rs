//! Floors: pages that a log copies because their namespace would fall below its floor.

use super::bounds::{put_with, work_with};
use super::cases::{restored, scanned, summary};
use super::*;

const SEGMENT_BYTES: u64 = 256 << 10;
const SEGMENTS: u32 = 40;
const LOG_BYTES: u64 = SEGMENT_BYTES * SEGMENTS as u64;
const RECORD_BYTES: u64 = 2 * BLOCK_BYTES as u64;

fn big_log(pages_max: u64) -> Log {
    Log::new(LogConfig { segment_bytes: SEGMENT_BYTES, pages_max, ..config(SEGMENTS) })
}

fn namespace(number: u64) -> NamespaceId {
    NamespaceId([number as u8; 32])
}

/// The page of a generation, which names the namespace and the key.
fn page_of(generation: u64, blocks: u64) -> PageMeta {
    let bytes = (blocks * BLOCK_BYTES as u64) as u32;
    let mut key = [0; 32];
    key[..8].copy_from_slice(&generation.to_le_bytes());
    PageMeta {
        id: PageId { namespace: namespace(generation >> 32), key: PageKey(key) },
        parent: PageKey::NONE,
        position: 0,
        generation,
        expires_unix_ms: 0,
        part_bytes: vec![bytes],
        chunk_crcs: vec![0; PageMeta::chunks_of(bytes)],
        token_ids: Vec::new(),
    }
}

fn page(namespace: u64, n: u64) -> PageMeta {
    page_of(namespace << 32 | n, 1)
}

/// Puts pages of one block, with numbers in this range.
fn put_pages(log: &mut Log, namespace: u64, numbers: std::ops::Range<u64>) {
    for n in numbers {
        put_with(log, &page(namespace, n), page_of);
        // The background work keeps up with the writers.
        work_with(log, page_of);
    }
}

fn found(log: &Log, namespace: u64, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|n| log.find(&page(namespace, *n).id, 0).is_some()).count()
}

/// Floors of these namespaces, each one part of `parts`.
fn floors(parts: u64, of: &[u64]) -> Arc<SharedFloors> {
    let floors = SharedFloors::default();
    let weights: Vec<_> = of.iter().map(|&number| (namespace(number), 1)).collect();
    floors.change(&[], &weights, parts);
    Arc::new(floors)
}

#[test]
fn burst_of_another_namespace_evicts_no_page_below_the_floor() {
    for (floors, expected) in [(floors(2, &[]), 0), (floors(2, &[2]), 0), (floors(2, &[1, 2]), 100)] {
        let mut log = big_log(u64::MAX);
        log.share_floors(floors);
        put_pages(&mut log, 1, 0..100);
        put_pages(&mut log, 2, 0..10_000);
        assert_eq!(found(&log, 1, 0..100), expected);
        assert!(found(&log, 2, 9000..10_000) == 1000, "the newest pages of the burst are there");
        let copied = log.counts().copied_pages;
        assert!(copied <= 100 * 12, "each page is copied once per turn of the log: {copied}");
    }
}

#[test]
fn namespace_falls_to_its_floor_and_no_further() {
    let floor = LOG_BYTES / 4;
    let mut log = big_log(u64::MAX);
    log.share_floors(floors(2, &[1, 2]));
    put_pages(&mut log, 1, 0..4000);
    assert!(log.index.namespace_bytes(&namespace(1)) > LOG_BYTES / 10 * 9, "alone it has nearly everything");
    let mut least = u64::MAX;
    for n in 0..20_000 {
        put_pages(&mut log, 2, n..n + 1);
        least = least.min(log.index.namespace_bytes(&namespace(1)));
        assert_eq!(log.copy_credit, log.config.copy_credit_max(), "it is for pages that were used");
    }
    // The floor is a run of ten segments, and eight of them are copied as a whole.
    assert!(least >= floor - 2 * SEGMENT_BYTES / 8 - RECORD_BYTES, "{least} of {floor}");
    assert!(least < floor + 2 * SEGMENT_BYTES, "{least} of {floor}");
    let copied = log.counts().copied_pages;
    assert!(copied < 20_000 / 2, "{copied} copies for 20,000 puts");
}

/// One such page fills a segment, although it takes little more than half of it.
#[test]
fn copies_of_large_pages_leave_turns_to_writers() {
    const BLOCKS: u64 = 34;
    let mut log = big_log(u64::MAX);
    log.share_floors(floors(2, &[1, 2]));
    let mut put = |namespace: u64, n: u64| {
        let page = page_of(namespace << 32 | n, BLOCKS);
        let mut steps = 0_u64;
        loop {
            if let Append::Write(write) = log.append(&page).unwrap() {
                log.write_done(write, WriteOutcome::Written);
                return steps;
            }
            work_with(&mut log, page_of);
            steps += 1;
            assert!(steps < 2_000, "page {n} of namespace {namespace} waits for ever");
        }
    };
    for n in 0..60 {
        put(1, n);
    }
    let steps: u64 = (0..200).map(|n| put(2, n)).sum();
    assert!(steps < 200 * 200, "{steps} steps for 200 puts");
    let left = (0..60).filter(|&n| log.find(&page_of(1 << 32 | n, BLOCKS).id, 0).is_some()).count();
    assert!(left > 0, "the floor keeps pages");
}

/// Pages of a namespace that no reader used leave first.
#[test]
fn used_pages_of_a_namespace_leave_last() {
    let floor = LOG_BYTES / 8;
    let mut log = big_log(u64::MAX);
    log.share_floors(floors(4, &[1, 2]));
    put_pages(&mut log, 1, 0..300);
    (0..300).step_by(3).for_each(|n| log.entries().touch(&page(1, n).id));
    put_pages(&mut log, 2, 0..3000);
    let used = (0..300).step_by(3).filter(|n| log.find(&page(1, *n).id, 0).is_some()).count();
    assert_eq!(used, 100);
    assert!((floor / RECORD_BYTES..180).contains(&(found(&log, 1, 0..300) as u64)));
}

/// A stranger's small pages fill the index before the device.
#[test]
fn full_index_keeps_pages_below_the_floor() {
    let mut log = big_log(0);
    let max = log.counts().pages_max;
    log.share_floors(floors(2, &[1, 2]));
    let kept = max / 32;
    put_pages(&mut log, 1, 0..kept);
    put_pages(&mut log, 2, 0..10_000);
    assert_eq!(found(&log, 1, 0..kept) as u64, kept, "{max} pages at most");
    assert!(log.pages_tracked() <= max);
    // More than its part of the index is not protected: writers must find room.
    put_pages(&mut log, 1, 1000..1000 + max / 4);
    put_pages(&mut log, 2, 10_000..20_000);
    assert!(log.counts().copied_pages < 20_000 / 2, "{}", log.counts().copied_pages);
}

/// The file system has room for 10 of the 40 segments.
#[test]
fn floors_shrink_with_the_log_when_the_file_system_is_full() {
    let mut log = big_log(u64::MAX);
    log.share_floors(floors(2, &[1, 2]));
    for n in 0.. {
        put_with(&mut log, &page(1, n), page_of);
        match log.next_intent() {
            Some(Intent::Prepare(prepare)) if log.segments.len() > 10 => {
                log.prepared(&prepare, PrepareOutcome::Full);
                break;
            }
            Some(Intent::Prepare(prepare)) => log.prepared(&prepare, PrepareOutcome::Ready),
            other => assert_eq!(other, None),
        }
    }
    assert_eq!(log.counts().segments_max, 10);
    for n in 0..5000 {
        put_pages(&mut log, 2, n..n + 1);
        put_pages(&mut log, 1, 10_000 + n..10_001 + n);
    }
    assert_eq!(log.counts().copied_pages, 0, "both namespaces are far above a quarter of the log");
}

#[test]
fn recovered_segment_lists_its_oldest_pages_first() {
    let records = (1..5).map(|n| RecordSummary::Page(summary(n, n.into(), u64::from(n) * RECORD_BYTES))).collect();
    let log = restored(config(5), vec![scanned(0, 1, records)]);
    let slots = log.segments.epoch(0).unwrap().slots();
    let numbers: Vec<u64> = slots.iter().map(|slot| log.index.entries.get(*slot).number).collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Whatever the namespaces put, each keeps its floor or what it put, whichever is less. The
    /// floors together are a run of twenty segments at most, which may lose an eighth.
    #[test]
    fn floors_hold_for_random_bursts(
        bursts in prop::collection::vec((1u64..5, 1u64..1500), 1..12),
        uses in any::<bool>(),
    ) {
        let floor = LOG_BYTES / 8;
        let mut log = big_log(u64::MAX);
        log.share_floors(floors(4, &[1, 2, 3, 4]));
        let mut put = BTreeMap::<u64, u64>::new();
        for (number, pages) in bursts {
            let first = put.get(&number).copied().unwrap_or(0);
            put_pages(&mut log, number, first..first + pages);
            put.insert(number, first + pages);
            if uses {
                (first..first + pages).step_by(2).for_each(|n| log.entries().touch(&page(number, n).id));
            }
            for (number, pages) in &put {
                let kept = floor.min(pages * RECORD_BYTES);
                let least = kept - kept / 8;
                let bytes = log.index.namespace_bytes(&namespace(*number));
                prop_assert!(bytes >= least, "namespace {number}: {bytes} of {least}");
            }
        }
    }
}
