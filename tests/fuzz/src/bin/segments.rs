//! A whole segment that is verified offline: blocks are put together from the input, some with their checksums put right.
#![no_main]

use larder_format::disk::{BLOCK_BYTES, SegmentHeader, Superblock};
use larder_format::verify::{Lives, verify};
use larder_fuzz::{LOG, SEGMENT_BYTES, block, magic};
use std::io::Cursor;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut segment = SegmentHeader { log_id: LOG, segment: 1, life: 2 }.encode();
    for piece in input.chunks(160) {
        let (&choice, fields) = piece.split_first().expect("chunks are not empty");
        match choice {
            0..=127 => segment.extend(block(magic(choice), fields)),
            _ => segment.extend(piece.iter().copied().cycle().take(BLOCK_BYTES)),
        }
    }
    segment.resize(SEGMENT_BYTES as usize, 0);
    let superblock = Superblock { log_id: LOG, segment_bytes: SEGMENT_BYTES };
    let _ = verify(&superblock, 1, &Lives::default(), &mut Cursor::new(segment));
});
