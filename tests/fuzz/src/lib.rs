//! Helpers of the fuzz targets: blocks with valid checksums around arbitrary fields. Without those,
//! no fuzzer would get past the first comparison.

use larder_format::disk::{BLOCK_BYTES, LogId};

pub const LOG: LogId = [7; 16];
/// Segment size of that log, in bytes.
pub const SEGMENT_BYTES: u64 = 1 << 20;

/// A block with this magic, a valid checksum, version 1 and these fields.
pub fn block(magic: &[u8; 4], fields: &[u8]) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    block.extend_from_slice(magic);
    block.extend_from_slice(&[0; 4]);
    block.extend_from_slice(&1u32.to_le_bytes());
    block.extend_from_slice(fields);
    block.resize(BLOCK_BYTES, 0);
    let crc = crc32fast::hash(&block[8..]);
    block[4..8].copy_from_slice(&crc.to_le_bytes());
    block
}

pub fn magic(choice: u8) -> &'static [u8; 4] {
    [b"LDSB", b"LDSG", b"LDRC", b"LDFT"][usize::from(choice % 4)]
}
