//! Measures the CPU time of recovery and the memory of the index, per page.
//!
//! `cargo run --release -p larder-log --example recovery [PAGES]`
//!
//! The segments of 64 MiB hold pages of 256 KiB. Each is recovered from its footer, which is in
//! memory.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a measurement: it reads the time")]

#[path = "../../evict/examples/heap/mod.rs"]
mod heap;

use heap::held_bytes;
use larder_format::disk::{BLOCK_BYTES, LogId, record_bytes};
use larder_format::footer::{Footer, FooterRoom, PageSummary, RecordSummary};
use larder_format::{NamespaceId, PageId, PageKey};
use larder_log::machine::{FoundSegment, KEEP_PERCENT_DEFAULT, LogConfig, Recovery, SegmentScan, TAIL_BYTES};
use std::error::Error;
use std::time::Instant;

const LOG: LogId = [7; 16];
const SEGMENT_BYTES: u64 = 64 << 20;
const PAGE_BYTES: u32 = 256 << 10;
/// Pages per sequence.
const SEQUENCE: u64 = 20;

/// A key as uniformly distributed as a hash.
fn key(page: u64) -> PageKey {
    let mut bytes = [0; 32];
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        let mixed = (page * 4 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        chunk.copy_from_slice(&(mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes());
    }
    PageKey(bytes)
}

/// Tails of full segments with at least `pages` pages, and the number of these pages.
fn segments(pages: u64) -> (Vec<Vec<u8>>, u64) {
    let mut tails = Vec::new();
    let mut page = 0;
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
        let footer = Footer { segment, epoch: u64::from(segment) + 1, records }.encode(&LOG);
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
            "{what}: {:.3} s, {:.2} µs per page, {:.2} s per 100 GiB",
            seconds,
            seconds * 1e6 / pages as f64,
            seconds / gib * 100.0
        );
    };

    let before = held_bytes();
    let began = Instant::now();
    let found = (0..tails.len() as u32).map(|segment| FoundSegment {
        segment,
        epoch: Ok(u64::from(segment) + 1),
        truncated: false,
    });
    let config = LogConfig {
        segment_bytes: SEGMENT_BYTES,
        segments_max: tails.len() as u32,
        hash_seed: 5,
        keep_percent: KEEP_PERCENT_DEFAULT,
        quota_default: u64::MAX,
        pages_max: u64::MAX,
    };
    let Recovery { mut log, scan_order, .. } = Recovery::new(config, found.collect());
    for segment in scan_order {
        let mut scan = SegmentScan::new(LOG, segment.segment, segment.epoch, SEGMENT_BYTES, SEGMENT_BYTES);
        while scan.next_read().is_some() {
            scan.feed(&tails[segment.segment as usize]);
        }
        log.recover_segment(scan.finish(), 0)?;
    }
    let report = log.finish_recovery()?;
    per_page("index ready", began);
    let index = held_bytes() - before;

    let counts = log.counts();
    if counts.pages != pages || report.footers != tails.len() as u64 {
        return Err(format!("{} pages from {} footers", counts.pages, report.footers).into());
    }
    let each = |bytes: usize, pages: u64| bytes as f64 / pages as f64;
    println!(
        "index: {:.1} bytes per page by allocated capacity",
        each(log.index_bytes() as usize + log.entries().memory_bytes(), pages)
    );
    println!("index: {:.1} bytes per page allocated", each(index, pages));
    Ok(())
}
