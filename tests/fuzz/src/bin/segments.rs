//! Verifies a whole segment offline. The target builds its blocks from the input and gives some of
//! them valid checksums.
#![no_main]

use larder_format::disk::{BLOCK_BYTES, SegmentHeader, Superblock};
use larder_format::verify::{SegmentEpochs, verify};
use larder_fuzz::{LOG, SEGMENT_BYTES, block, magic};
use std::io::Cursor;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut segment = SegmentHeader { log_id: LOG, segment: 1, epoch: 2 }.encode();
    for piece in input.chunks(160) {
        let (&choice, fields) = piece.split_first().expect("chunks are not empty");
        match choice {
            0..=127 => segment.extend(block(magic(choice), fields)),
            _ => segment.extend(piece.iter().copied().cycle().take(BLOCK_BYTES)),
        }
    }
    segment.resize(SEGMENT_BYTES as usize, 0);
    let superblock = Superblock { log_id: LOG, segment_bytes: SEGMENT_BYTES };
    let _ = verify(&superblock, 1, &SegmentEpochs::default(), &mut Cursor::new(segment));
});
