//! A disk that forgets, and what is written to it.

use super::*;
use larder_format::life::{Headless, LifeSearch};
use std::collections::BTreeSet;

pub(super) const LOG: LogId = [7; 16];
const BLOCKS: u64 = 16;
pub(super) const SEGMENT: u64 = BLOCKS * BLOCK_BYTES as u64;

pub(super) type Block = Vec<u8>;
pub(super) type Address = (u32, u64);

/// One block on its way.
#[derive(Clone)]
pub(super) struct BlockWrite {
    pub(super) at: Address,
    pub(super) block: Block,
}

/// A disk with a volatile cache.
#[derive(Default)]
pub(super) struct Disk {
    pub(super) durable: BTreeMap<Address, Block>,
    /// Completed and not synced, oldest first.
    pub(super) cached: Vec<BlockWrite>,
    /// A negative control: syncs do nothing.
    pub(super) lies: bool,
}

impl Disk {
    pub(super) fn read(&self, at: Address) -> Block {
        let cached = self.cached.iter().rev().find(|write| write.at == at).map(|write| &write.block);
        cached.or(self.durable.get(&at)).cloned().unwrap_or_else(|| vec![0; BLOCK_BYTES])
    }

    pub(super) fn sync(&mut self, segment: u32) {
        if self.lies {
            return;
        }
        let (synced, rest) = std::mem::take(&mut self.cached).into_iter().partition(|write| write.at.0 == segment);
        self.cached = rest;
        let synced: Vec<BlockWrite> = synced;
        self.durable.extend(synced.into_iter().map(|write| (write.at, write.block)));
    }

    pub(super) fn remove(&mut self, segment: u32) {
        self.cached.retain(|write| write.at.0 != segment);
        self.durable.retain(|at, _| at.0 != segment);
    }

    pub(super) fn segments(&self) -> BTreeSet<u32> {
        self.durable.keys().chain(self.cached.iter().map(|write| &write.at)).map(|at| at.0).collect()
    }

    pub(super) fn crash(&mut self, under_way: impl Iterator<Item = BlockWrite>, dice: &mut Dice) {
        let unsynced: Vec<BlockWrite> = self.cached.drain(..).chain(under_way).collect();
        for mut write in unsynced {
            match dice.roll(4) {
                0 => continue,
                1 => write.block[BLOCK_BYTES / 2..].fill(0xa5),
                _ => {}
            }
            self.durable.insert(write.at, write.block);
        }
    }

    /// Damages the header of a segment, or of a record that a later one calls durable; whether there is one.
    pub(super) fn rot(&mut self, header: bool, dice: &mut Dice) -> bool {
        let places: Vec<Address> = match header {
            true => self.segments().into_iter().map(|segment| (segment, 0)).collect(),
            false => self.headers().into_iter().flat_map(|found| self.durable_records(&found)).collect(),
        };
        if places.is_empty() {
            return false;
        }
        let at = places[dice.roll(places.len() as u64) as usize];
        let mut block = self.read(at);
        block[..BLOCK_BYTES / 2].fill(0x77);
        self.durable.insert(at, block);
        true
    }

    fn durable_records(&self, found: &FoundSegment) -> Vec<Address> {
        let (segment, Ok(life)) = (found.segment, found.life.as_ref()) else { return Vec::new() };
        let record = |block| {
            let place = RecordPlace { segment, life: *life, offset: block * BLOCK_BYTES as u64 };
            RecordHeader::decode(&self.read((segment, block)), &LOG, place).ok()
        };
        let records: Vec<RecordHeader> = (1..BLOCKS).filter_map(record).collect();
        let durable = records.iter().map(|record| record.durable).max().unwrap_or(0);
        let offsets = records.iter().map(|record| record.place.offset).filter(|&offset| offset < durable);
        offsets.map(|offset| (segment, offset / BLOCK_BYTES as u64)).collect()
    }

    /// What the headers of the segments say.
    pub(super) fn headers(&self) -> Vec<FoundSegment> {
        let life = |segment| {
            let header = SegmentHeader::decode_life(&self.read((segment, 0)), &LOG, segment);
            header.map_err(|_| self.search(segment))
        };
        self.segments().into_iter().map(|segment| FoundSegment { segment, life: life(segment), short: false }).collect()
    }

    fn search(&self, segment: u32) -> Headless {
        let mut search = LifeSearch::new(LOG, segment, SEGMENT, SEGMENT);
        while let Some((offset, len)) = search.next_read() {
            search.feed(&self.bytes(segment, offset, len));
        }
        search.finish()
    }

    fn bytes(&self, segment: u32, offset: u64, len: usize) -> Vec<u8> {
        let first = offset / BLOCK_BYTES as u64;
        (0..(len / BLOCK_BYTES) as u64).flat_map(|block| self.read((segment, first + block))).collect()
    }

    pub(super) fn scan(&self, at: SegmentLife) -> ScannedSegment {
        let mut scan = SegmentScan::new(LOG, at.segment, at.life, SEGMENT, SEGMENT);
        while let Some(ScanRead { offset, len }) = scan.next_read() {
            scan.feed(&self.bytes(at.segment, offset, len));
        }
        scan.finish()
    }
}

/// Repeatable chance.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % sides
    }
}

/// A payload block that names its put.
fn payload_block(generation: u64, index: u64) -> Block {
    let mut block = vec![0xee; BLOCK_BYTES];
    block[..8].copy_from_slice(&generation.to_le_bytes());
    block[8..16].copy_from_slice(&index.to_le_bytes());
    block
}

pub(super) fn blocks_of(header: &RecordHeader) -> Vec<BlockWrite> {
    let first = header.place.offset / BLOCK_BYTES as u64;
    let mut writes = vec![BlockWrite { at: (header.place.segment, first), block: header.encode(&LOG) }];
    if let RecordBody::Page(meta) = &header.body {
        let payload = (meta.payload_bytes() / BLOCK_BYTES) as u64;
        writes.extend((0..payload).map(|index| BlockWrite {
            at: (header.place.segment, first + 1 + index),
            block: payload_block(meta.generation, index),
        }));
    }
    writes
}

pub(super) fn blocks_of_footer(planned: &PlannedFooter, without_tombstones: bool) -> Vec<BlockWrite> {
    let mut footer = planned.footer.clone();
    if without_tombstones {
        footer.records.retain(|record| matches!(record, RecordSummary::Page(_)));
    }
    let bytes = footer.encode(&LOG);
    let first = (SEGMENT - bytes.len() as u64) / BLOCK_BYTES as u64;
    let blocks = bytes.chunks(BLOCK_BYTES).zip(first..);
    blocks.map(|(block, at)| BlockWrite { at: (footer.segment, at), block: block.to_vec() }).collect()
}
