//! Measures the write amplification of copy-forward on a trace.
//!
//! `cargo run --release -p larder-log --example copy_forward TRACE [GIB] …`
//!
//! The trace has the public Mooncake format, uncompressed. Its requests go to a log without an L2,
//! with pages of 256 KiB in segments of 64 MiB, once for each capacity. A request reads the cached
//! prefix of its prompt, and puts the other pages. There is no device: the example counts the
//! planned writes.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a tool: it reads files")]

use larder_evict::replay::Trace;
use larder_format::disk::record_bytes;
use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
use larder_log::machine::{
    Append, CopyForward, Intent, KEEP_PERCENT_DEFAULT, Log, LogConfig, PrepareOutcome, WriteOutcome,
};
use std::error::Error;
use std::fs::File;
use std::io::BufReader;

const SEGMENT_BYTES: u64 = 64 << 20;
const PAGE_BYTES: usize = 256 << 10;
const GIB: u64 = 1 << 30;
const CAPACITIES_GIB: [u64; 3] = [2, 6, 20];

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let file = args.next().ok_or("a trace file")?;
    let given: Vec<u64> = args.map(|gib| gib.parse()).collect::<Result<_, _>>()?;
    let capacities = if given.is_empty() { CAPACITIES_GIB.to_vec() } else { given };
    let trace = Trace::read(BufReader::new(File::open(file)?))?;
    println!("| log GiB | keep % | hits % | GiB put | GiB copied | copied / put | written / put |");
    println!("|---|---|---|---|---|---|---|");
    for gib in capacities {
        for keep_percent in [0, 25, KEEP_PERCENT_DEFAULT, 75] {
            let segments_max = u32::try_from(gib * GIB / SEGMENT_BYTES)?;
            let config = LogConfig {
                segment_bytes: SEGMENT_BYTES,
                segments_max,
                hash_seed: 1,
                keep_percent,
                quota_default: u64::MAX,
                pages_max: u64::MAX,
            };
            let mut replay =
                Replay { log: Log::new(config), requested: 0, hits: 0, puts: 0, blocks: Vec::new(), copying: None };
            for request in trace.requests() {
                replay.request(&request.blocks)?;
            }
            replay.print(gib, keep_percent);
        }
    }
    Ok(())
}

struct Replay {
    log: Log,
    requested: u64,
    hits: u64,
    puts: u64,
    /// Blocks put, by generation - 1. It stands for the metadata on the device.
    blocks: Vec<u32>,
    /// Runs while the open segment takes further records.
    copying: Option<CopyForward>,
}

impl Replay {
    fn request(&mut self, blocks: &[u32]) -> Result<(), Box<dyn Error>> {
        self.requested += blocks.len() as u64;
        let there = blocks.iter().take_while(|&&block| self.read(block)).count();
        self.hits += there as u64;
        for (position, &block) in blocks.iter().enumerate().skip(there) {
            if self.log.find(&id(block), 0).is_none() {
                let parent = position.checked_sub(1).map(|before| blocks[before]);
                self.put(block, parent, position as u32)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, block: u32) -> bool {
        let ticket = self.log.entries().begin_read(&id(block), 0);
        ticket.map(|ticket| self.log.end_read(ticket)).is_some()
    }

    fn put(&mut self, block: u32, parent: Option<u32>, position: u32) -> Result<(), Box<dyn Error>> {
        self.puts += 1;
        self.blocks.push(block);
        let meta = meta(block, parent, position, self.puts);
        loop {
            match self.log.append(&meta)? {
                Append::Write(write) => {
                    self.log.write_done(write, WriteOutcome::Written);
                    return Ok(());
                }
                Append::AlreadyThere => return Ok(()),
                Append::Wait => {}
            }
            self.work()?;
        }
    }

    /// Completes the work of the device.
    fn work(&mut self) -> Result<(), Box<dyn Error>> {
        while let Some(intent) = self.log.next_intent() {
            match intent {
                Intent::Prepare(prepare) => self.log.prepared(&prepare, PrepareOutcome::Ready),
                Intent::Footer(footer) => self.log.footer_done(footer, WriteOutcome::Written),
                Intent::Reclaim => while self.log.reclaim_step() {},
                Intent::CopyForward(work) => self.copying = Some(work),
            }
        }
        let Some(work) = self.copying.take() else { return Ok(()) };
        for record in work.pages {
            let Some(ticket) = self.log.entries().begin_maintenance_read(record) else { continue };
            let generation = ticket.entry.generation;
            self.log.end_read(ticket);
            let meta = PageMeta { generation, ..page(id(self.blocks[generation as usize - 1])) };
            let copy = self.log.plan_copy(record, &meta).ok_or("room for a copy was reserved")?;
            self.log.write_done(copy, WriteOutcome::Written);
        }
        self.log.copy_forward_done(work.segment, work.epoch);
        Ok(())
    }

    fn print(&self, gib: u64, keep_percent: u8) {
        let copied = self.log.counts().copied_pages;
        let in_gib = |pages: u64| (pages * record_bytes(PAGE_BYTES) as u64) as f64 / GIB as f64;
        let hits = self.hits as f64 / self.requested as f64 * 100.0;
        let amplification = copied as f64 / self.puts as f64;
        println!(
            "| {gib} | {keep_percent} | {hits:.1} | {:.1} | {:.1} | {amplification:.2} | {:.2} |",
            in_gib(self.puts),
            in_gib(copied),
            1.0 + amplification
        );
    }
}

fn id(block: u32) -> PageId {
    PageId { namespace: NamespaceId([7; 32]), key: key(block) }
}

/// A key as uniformly distributed as a hash.
fn key(block: u32) -> PageKey {
    PageKey::chain(None, &[block])
}

fn page(id: PageId) -> PageMeta {
    PageMeta {
        id,
        parent: PageKey::NONE,
        position: 0,
        generation: 0,
        expires_unix_ms: 0,
        part_bytes: vec![PAGE_BYTES as u32],
        chunk_crcs: vec![0; PAGE_BYTES / larder_format::CHUNK_BYTES],
        token_ids: Vec::new(),
    }
}

fn meta(block: u32, parent: Option<u32>, position: u32, generation: u64) -> PageMeta {
    PageMeta { parent: parent.map_or(PageKey::NONE, key), position, generation, ..page(id(block)) }
}
