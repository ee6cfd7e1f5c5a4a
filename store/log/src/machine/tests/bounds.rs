//! Tests of the bound of pages: [`LogConfig::pages_max`].

use super::cases::{restored, scanned};
use super::*;
use larder_format::footer::PageSummary;

const SEGMENT_BYTES: u64 = 256 << 10;
const SEGMENTS: u32 = 40;

fn small_bound() -> LogConfig {
    LogConfig { segment_bytes: SEGMENT_BYTES, pages_max: 0, ..config(SEGMENTS) }
}

/// Page `n`. Its generation tells which one it is.
fn page(n: u64, blocks: u64) -> PageMeta {
    let bytes = (blocks * BLOCK_BYTES as u64) as u32;
    let mut key = [0; 32];
    key[..8].copy_from_slice(&n.to_le_bytes());
    let id = PageId { namespace: NamespaceId([n as u8 % 2; 32]), key: PageKey(key) };
    let chunk_crcs = vec![0; PageMeta::chunks_of(bytes)];
    PageMeta {
        id,
        parent: PageKey::NONE,
        position: 0,
        generation: n,
        expires_unix_ms: 0,
        part_bytes: vec![bytes],
        chunk_crcs,
        token_ids: Vec::new(),
    }
}

fn work(log: &mut Log) {
    work_with(log, page);
}

fn put(log: &mut Log, meta: &PageMeta) {
    put_with(log, meta, page);
}

/// Does one piece of background work without faults: a slice of a reclaim, or an intent. Copies
/// every page that the log names. `page` makes a page of its generation and blocks.
pub(super) fn work_with(log: &mut Log, page: impl Fn(u64, u64) -> PageMeta) {
    if log.reclaim_step() {
        return;
    }
    match log.next_intent() {
        Some(Intent::Prepare(prepare)) => log.prepared(&prepare, PrepareOutcome::Ready),
        Some(Intent::CopyForward(work)) => {
            for record in work.pages {
                let Some(ticket) = log.entries().begin_maintenance_read(record) else { continue };
                let Entry { generation, payload_bytes, .. } = ticket.entry;
                log.end_read(ticket);
                let meta = page(generation, u64::from(payload_bytes) / BLOCK_BYTES as u64);
                if let Some(write) = log.plan_copy(record, &meta) {
                    log.write_done(write, WriteOutcome::Written);
                }
            }
            log.copy_forward_done(work.segment, work.epoch);
        }
        Some(Intent::Footer(_)) => panic!("nothing is synced"),
        Some(Intent::Reclaim) | None => {}
    }
}

/// Puts a page, with as much background work as that needs.
pub(super) fn put_with(log: &mut Log, meta: &PageMeta, page: impl Fn(u64, u64) -> PageMeta + Copy) {
    for _ in 0..100_000 {
        match log.append(meta).unwrap() {
            Append::Write(write) => return log.write_done(write, WriteOutcome::Written),
            Append::AlreadyThere => return,
            Append::Wait => work_with(log, page),
        }
    }
    panic!("the writer found no room although every segment was reclaimed once");
}

proptest! {
    #[test]
    fn small_pages_never_exceed_the_bound(
        phases in prop::collection::vec((1u64..9, 1usize..900, 0u8..4), 1..8),
        quota in prop::option::of(1u64..400),
        work_every in 1u64..20,
    ) {
        let mut log = Log::new(small_bound());
        let max = log.counts().pages_max;
        if let Some(blocks) = quota {
            log.set_quota(NamespaceId([1; 32]), blocks * BLOCK_BYTES as u64);
        }
        let mut n = 0;
        for (blocks, puts, pin) in phases {
            for _ in 0..puts {
                n += 1;
                let meta = page(n, blocks);
                put(&mut log, &meta);
                if n % work_every == 0 {
                    work(&mut log);
                }
                prop_assert!(log.pages_tracked() <= max, "{} of {max} pages", log.pages_tracked());
                let is_limited = quota.is_some() && n % 2 == 1;
                prop_assert!(is_limited || log.find(&meta.id, 0).is_some(), "page {n} is not found");
                log.entries().touch(&meta.id);
                if pin > 1 {
                    let _ = log.pin(&meta.id, if pin == 2 { Pin::Soft } else { Pin::Hard });
                }
            }
        }
    }
}

#[test]
fn large_pages_fill_the_log_in_spite_of_the_bound() {
    let mut log = Log::new(small_bound());
    (0..500).for_each(|n| put(&mut log, &page(n, 29)));
    let counts = log.counts();
    assert!(counts.segments_used >= u64::from(SEGMENTS) - 1, "{counts:?}");
}

#[test]
fn full_index_keeps_hard_pinned_pages_and_copies_no_others() {
    let mut log = Log::new(small_bound());
    let mut pinned = Vec::new();
    for n in 0..2000 {
        let meta = page(n, 1);
        put(&mut log, &meta);
        log.entries().touch(&meta.id);
        if n < 60 && log.pin(&meta.id, Pin::Hard).is_ok() {
            pinned.push(meta.id);
        }
    }
    let max = log.counts().pages_max;
    assert!(pinned.len() as u64 == max / 8, "{} of {max} pages are pinned", pinned.len());
    assert!(pinned.iter().all(|id| log.find(id, 0).is_some()), "a pinned page is lost");
    // Each pinned page is copied whenever its segment is reclaimed, which is every few segments.
    let copied = log.counts().copied_pages;
    assert!(copied < 2000, "{copied} pages were copied for 2000 puts");
}

const RECOVERED_PAGES: u64 = SEGMENT_BYTES / 8192 - 2;

/// Segment `segment` as recovery finds it, full of pages of a block. The first page is number
/// `segment * RECOVERED_PAGES`.
fn found(segment: u32) -> ScannedSegment {
    let epoch = u64::from(segment) + 1;
    let record = |at: u64| {
        let n = u64::from(segment) * RECOVERED_PAGES + at;
        RecordSummary::Page(PageSummary {
            id: page(n, 1).id,
            offset: BLOCK_BYTES as u64 + at * 8192,
            number: epoch * 1000 + at,
            parent: PageKey::NONE,
            payload_bytes: BLOCK_BYTES as u32,
            generation: n,
            position: 0,
            expires_unix_ms: 0,
        })
    };
    scanned(segment, epoch, (0..RECOVERED_PAGES).map(record).collect())
}

/// An older log, or one with a larger bound before, may have more pages than the index may take.
#[test]
fn recovery_serves_the_newest_pages_within_the_bound() {
    let max = Log::new(small_bound()).counts().pages_max;
    let mut log = restored(small_bound(), (0..SEGMENTS).map(found).collect());
    let last = u64::from(SEGMENTS) * RECOVERED_PAGES - 1;
    assert_eq!(log.pages_tracked(), max);
    assert!(log.find(&page(last, 1).id, 0).is_some() && log.find(&page(0, 1).id, 0).is_none());
    // The record of a page that was left out is on the device.
    while let Forget::Wait = log.forget(&page(0, 1).id).unwrap() {
        work(&mut log);
    }
    (0..200).for_each(|n| put(&mut log, &page(last + 1 + n, 1)));
    assert!(log.pages_tracked() <= max);
}

/// Entries of records that are gone leave the index before a further segment is reclaimed.
#[test]
fn full_index_with_untrusted_pages_reclaims_few_segments() {
    let config = LogConfig { pages_max: 34 * RECOVERED_PAGES, ..small_bound() };
    let segments = (0..34).map(|segment| ScannedSegment { cut_short: segment == 23, ..found(segment) });
    let mut log = restored(config, segments.collect());
    put(&mut log, &page(34 * RECOVERED_PAGES, 1));
    let used = log.counts().segments_used;
    assert!(used >= 34 - 4, "{used} of 34 segments are left");
}
