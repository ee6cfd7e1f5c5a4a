//! How long a start takes per page beside reading the device, and what memory a page takes.
//!
//! `cargo run --release -p larder-core --example recovery [PAGES]`: segments of 64 MiB with pages of 256 KiB, each read
//! by one read of its end, from memory.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "it measures what the core takes as values")]

use larder_core::log::{FoundSegment, KEEP_PERCENT_DEFAULT, LogConfig, Recovery, SegmentScan, TAIL_BYTES};
use larder_format::disk::{BLOCK_BYTES, LogId, record_bytes};
use larder_format::footer::{Footer, FooterRoom, PageSummary, RecordSummary};
use larder_format::{NamespaceId, PageId, PageKey};
use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const LOG: LogId = [7; 16];
const SEGMENT_BYTES: u64 = 64 << 20;
const PAGE_BYTES: u32 = 256 << 10;
/// Pages of a sequence.
const SEQUENCE: u64 = 20;
/// Pages that the keeper is told of at once.
const SETTLE: usize = 256;

struct Counting;

static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything on to the system's allocator as it came, and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn held_bytes() -> usize {
    HELD_BYTES.load(Ordering::Relaxed)
}

/// A key that looks like a hash.
fn key(page: u64) -> PageKey {
    let mut bytes = [0; 32];
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        let mixed = (page * 4 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        chunk.copy_from_slice(&(mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes());
    }
    PageKey(bytes)
}

/// The ends of full segments with `pages` pages; how many pages there are.
fn segments(pages: u64) -> (Vec<Vec<u8>>, u64) {
    let (mut tails, mut page) = (Vec::new(), 0);
    while page < pages {
        let (mut records, mut room, mut end) = (Vec::new(), FooterRoom::default(), BLOCK_BYTES as u64);
        let record = record_bytes(PAGE_BYTES as usize) as u64;
        let namespace = NamespaceId([1; 32]);
        while page < pages && end + record + room.bytes_with(&namespace) <= SEGMENT_BYTES {
            room.add(&namespace);
            records.push(RecordSummary::Page(PageSummary {
                id: PageId { namespace, key: key(page) },
                offset: end,
                number: page + 1,
                parent: if page % SEQUENCE == 0 { PageKey::NONE } else { key(page - 1) },
                payload_bytes: PAGE_BYTES,
                generation: page + 1,
                position: (page % SEQUENCE) as u32,
                expires_unix_ms: 0,
            }));
            end += record;
            page += 1;
        }
        let segment = tails.len() as u32;
        let footer = Footer { segment, life: u64::from(segment) + 1, records }.encode(&LOG);
        let mut tail = vec![0; (TAIL_BYTES as usize).saturating_sub(footer.len())];
        tail.extend_from_slice(&footer[footer.len().saturating_sub(TAIL_BYTES as usize)..]);
        tails.push(tail);
    }
    (tails, page)
}

fn main() -> Result<(), Box<dyn Error>> {
    let wanted = std::env::args().nth(1).map_or(Ok(400_000), |arg| arg.parse())?;
    let (tails, pages) = segments(wanted);
    let gib = pages as f64 * f64::from(PAGE_BYTES) / f64::from(1 << 30);
    println!("{pages} pages in {} segments: {gib:.0} GiB", tails.len());
    let per_page = |what: &str, began: Instant| {
        let seconds = began.elapsed().as_secs_f64();
        println!(
            "{what}: {:.3} s, {:.2} µs a page, {:.2} s per 100 GiB",
            seconds,
            seconds * 1e6 / pages as f64,
            seconds / gib * 100.0
        );
    };

    let before = held_bytes();
    let began = Instant::now();
    let found =
        (0..tails.len() as u32).map(|segment| FoundSegment { segment, life: Ok(u64::from(segment) + 1), short: false });
    let config = LogConfig {
        segment_bytes: SEGMENT_BYTES,
        segments_max: tails.len() as u32,
        hash_seed: 5,
        keep_percent: KEEP_PERCENT_DEFAULT,
        quota_default: u64::MAX,
    };
    let Recovery { mut log, order, .. } = Recovery::new(config, found.collect());
    for segment in order {
        let mut scan = SegmentScan::new(LOG, segment.segment, segment.life, SEGMENT_BYTES, SEGMENT_BYTES);
        while scan.next_read().is_some() {
            scan.feed(&tails[segment.segment as usize]);
        }
        log.restore(scan.finish(), 0)?;
    }
    let report = log.restored()?;
    per_page("index ready", began);
    let index = held_bytes() - before;

    let (began, mut longest) = (Instant::now(), 0.0);
    loop {
        let step = Instant::now();
        let more = log.settle(SETTLE);
        longest = step.elapsed().as_secs_f64().max(longest);
        if !more {
            break;
        }
    }
    per_page("keeper told", began);
    println!("at most {:.2} ms for {SETTLE} pages", longest * 1e3);
    let all = held_bytes() - before;

    let counts = log.counts();
    if counts.pages != pages || report.footers != tails.len() as u64 {
        return Err(format!("{} pages from {} footers", counts.pages, report.footers).into());
    }
    let each = |bytes: usize, pages: u64| bytes as f64 / pages as f64;
    println!("index: {:.1} bytes a page by its capacities", each(log.index_bytes() as usize, pages));
    println!("index and empty keeper: {:.1} bytes a page allocated", each(index, pages));
    println!(
        "keeper: {:.1} bytes for each of {} pages that it keeps, {:.1} for each page there is",
        each(all - index, counts.kept_pages),
        counts.kept_pages,
        each(all - index, pages)
    );
    Ok(())
}
