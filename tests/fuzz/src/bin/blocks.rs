//! Decodes one block of a log: a byte that chooses its type, then its fields. A block that decodes
//! must survive a round trip.
#![no_main]

use larder_format::disk::{RecordHeader, RecordPlace, SegmentHeader, Superblock};
use larder_format::footer::FooterBlock;
use larder_fuzz::{LOG, SEGMENT_BYTES, block, magic};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&choice, fields)) = input.split_first() else { return };
    let block = block(magic(choice), &fields[..fields.len().min(4000)]);
    if let Ok(superblock) = Superblock::decode(&block) {
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
    }
    if let Ok(header) = SegmentHeader::decode(&block) {
        assert_eq!(SegmentHeader::decode(&header.encode()), Ok(header));
    }
    let place = RecordPlace { segment: 1, epoch: 2, offset: 4096 };
    if let Ok(record) = RecordHeader::decode(&block, &LOG, place) {
        assert!(record.record_bytes() >= block.len());
        assert_eq!(RecordHeader::decode(&record.encode(&LOG), &LOG, place), Ok(record));
    }
    if let Ok(footer) = FooterBlock::decode(&block, &LOG, 1, 2, SEGMENT_BYTES) {
        assert!(footer.table_offset() + footer.table_blocks_bytes() as u64 <= SEGMENT_BYTES);
        let _ = footer.decode_table(fields);
    }
});
