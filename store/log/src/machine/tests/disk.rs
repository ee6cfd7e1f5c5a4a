//! A disk with a volatile cache, and the encoding of records and footers.

use super::*;
use larder_format::epoch::{EpochSearch, Headerless};
use std::collections::BTreeSet;

pub(super) const LOG: LogId = [7; 16];
const BLOCKS: u64 = 16;
pub(super) const SEGMENT: u64 = BLOCKS * BLOCK_BYTES as u64;

pub(super) type Block = Vec<u8>;
pub(super) type Address = (u32, u64);

pub(super) fn config(segments_max: u32) -> LogConfig {
    LogConfig {
        segment_bytes: SEGMENT,
        segments_max,
        hash_seed: 5,
        keep_percent: 50,
        quota_default: u64::MAX,
        pages_max: u64::MAX,
    }
}

#[derive(Clone)]
pub(super) struct BlockWrite {
    pub(super) at: Address,
    pub(super) block: Block,
}

/// A disk with a volatile cache.
#[derive(Default)]
pub(super) struct Disk {
    pub(super) durable: BTreeMap<Address, Block>,
    /// Completed and unsynced writes, oldest first.
    pub(super) cached: Vec<BlockWrite>,
    pub(super) ignores_syncs: bool,
}

impl Disk {
    pub(super) fn read(&self, at: Address) -> Block {
        let cached = self.cached.iter().rev().find(|write| write.at == at).map(|write| &write.block);
        cached.or(self.durable.get(&at)).cloned().unwrap_or_else(|| vec![0; BLOCK_BYTES])
    }

    pub(super) fn sync(&mut self, segment: u32) {
        if self.ignores_syncs {
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

    pub(super) fn crash(&mut self, under_way: impl Iterator<Item = BlockWrite>, random: &mut Random) {
        let unsynced: Vec<BlockWrite> = self.cached.drain(..).chain(under_way).collect();
        for mut write in unsynced {
            match random.below(4) {
                0 => continue,
                1 => write.block[BLOCK_BYTES / 2..].fill(0xa5),
                _ => {}
            }
            self.durable.insert(write.at, write.block);
        }
    }

    /// Damages the header of a segment, or of a record that a later one calls durable. Returns
    /// `false` if there is none.
    pub(super) fn rot(&mut self, header: bool, random: &mut Random) -> bool {
        let places: Vec<Address> = match header {
            true => self.segments().into_iter().map(|segment| (segment, 0)).collect(),
            false => self.headers().into_iter().flat_map(|found| self.durable_records(&found)).collect(),
        };
        if places.is_empty() {
            return false;
        }
        let at = places[random.below(places.len() as u64) as usize];
        let mut block = self.read(at);
        block[..BLOCK_BYTES / 2].fill(0x77);
        self.durable.insert(at, block);
        true
    }

    fn durable_records(&self, found: &FoundSegment) -> Vec<Address> {
        let (segment, Ok(epoch)) = (found.segment, found.epoch.as_ref()) else { return Vec::new() };
        let record = |block| {
            let place = RecordPlace { segment, epoch: *epoch, offset: block * BLOCK_BYTES as u64 };
            RecordHeader::decode(&self.read((segment, block)), &LOG, place).ok()
        };
        let records: Vec<RecordHeader> = (1..BLOCKS).filter_map(record).collect();
        let durable = records.iter().map(|record| record.durable).max().unwrap_or(0);
        let offsets = records.iter().map(|record| record.place.offset).filter(|&offset| offset < durable);
        offsets.map(|offset| (segment, offset / BLOCK_BYTES as u64)).collect()
    }

    pub(super) fn headers(&self) -> Vec<FoundSegment> {
        let epoch = |segment| {
            let header = SegmentHeader::decode_epoch(&self.read((segment, 0)), &LOG, segment);
            header.map_err(|_| self.search(segment))
        };
        self.segments()
            .into_iter()
            .map(|segment| FoundSegment { segment, epoch: epoch(segment), truncated: false })
            .collect()
    }

    fn search(&self, segment: u32) -> Headerless {
        let mut search = EpochSearch::new(LOG, segment, SEGMENT, SEGMENT);
        while let Some((offset, len)) = search.next_read() {
            search.feed(&self.bytes(segment, offset, len));
        }
        search.finish()
    }

    fn bytes(&self, segment: u32, offset: u64, len: usize) -> Vec<u8> {
        let first = offset / BLOCK_BYTES as u64;
        (0..(len / BLOCK_BYTES) as u64).flat_map(|block| self.read((segment, first + block))).collect()
    }

    pub(super) fn scan(&self, at: SegmentEpoch) -> ScannedSegment {
        let mut scan = SegmentScan::new(LOG, at.segment, at.epoch, SEGMENT, SEGMENT);
        while let Some(ScanRead { offset, len }) = scan.next_read() {
            scan.feed(&self.bytes(at.segment, offset, len));
        }
        scan.finish()
    }
}

/// A seeded generator, so that a failing case can be replayed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % sides
    }
}

/// A payload block that identifies its put.
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
