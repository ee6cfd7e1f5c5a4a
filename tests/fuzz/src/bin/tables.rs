//! Decodes the table of a footer: its claimed number of records, then its bytes.
#![no_main]

use larder_format::footer::FooterBlock;
use larder_fuzz::{LOG, SEGMENT_BYTES, block};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&records, table)) = input.split_first() else { return };
    let mut fields = LOG.to_vec();
    fields.extend_from_slice(&1u32.to_le_bytes());
    fields.extend_from_slice(&2u64.to_le_bytes());
    fields.extend_from_slice(&(table.len() as u32).to_le_bytes());
    fields.extend_from_slice(&u32::from(records).to_le_bytes());
    fields.extend_from_slice(&crc32fast::hash(table).to_le_bytes());
    let Ok(footer) = FooterBlock::decode(&block(b"LDFT", &fields), &LOG, 1, 2, SEGMENT_BYTES) else { return };
    if let Ok(footer) = footer.decode_table(table) {
        assert_eq!(footer.records.len(), usize::from(records));
        let ends = footer.records.iter().map(|record| record.offset() + record.record_bytes());
        assert!(ends.is_sorted() && footer.records.last().is_none_or(|last| last.offset() < SEGMENT_BYTES));
    }
});
