use super::*;
use crate::footer::PageSummary;
use crate::{NamespaceId, PageKey};
use proptest::prelude::*;
use std::io::Cursor;

const SUPERBLOCK: Superblock = Superblock { log_id: [9; 16], segment_bytes: 1 << 20 };
const SEGMENT: u32 = 3;
const EPOCH: u64 = 8;

impl Sync for Cursor<Vec<u8>> {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Dying {
    file: Cursor<Vec<u8>>,
    blocks_left: usize,
}

impl Read for Dying {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.file.read(bytes)
    }
}

impl Seek for Dying {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Write for Dying {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.blocks_left == 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.blocks_left -= 1;
        self.file.write(&bytes[..BLOCK_BYTES])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sync for Dying {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn id(n: u8) -> PageId {
    PageId { namespace: NamespaceId([n % 2; 32]), key: PageKey([n; 32]) }
}

/// Pages 0 to 6 and, in place of the fourth, a tombstone; what is listed of them.
fn segment(with_footer: bool) -> (Vec<u8>, Vec<RecordSummary>) {
    let mut bytes = vec![0x5a; SUPERBLOCK.segment_bytes as usize];
    let header = SegmentHeader { log_id: SUPERBLOCK.log_id, segment: SEGMENT, epoch: EPOCH };
    bytes[..BLOCK_BYTES].copy_from_slice(&header.encode());
    let (mut at, mut records) = (BLOCK_BYTES, Vec::new());
    for n in 0..7u8 {
        let payload: Vec<u8> = (0..1 + usize::from(n) * 20_000).map(|i| (i as u8) ^ n).collect();
        let meta = PageMeta::describe(id(n), PageKey::NONE, 0, vec![payload.len() as u32], &payload);
        let body = if n == 3 { RecordBody::Tombstone(id(n)) } else { RecordBody::Page(meta) };
        let place = RecordPlace { segment: SEGMENT, epoch: EPOCH, offset: at as u64 };
        let header = RecordHeader { place, number: 50 + u64::from(n), durable: at as u64, body };
        bytes[at..at + BLOCK_BYTES].copy_from_slice(&header.encode(&SUPERBLOCK.log_id));
        if n != 3 {
            bytes[at + BLOCK_BYTES..at + BLOCK_BYTES + payload.len()].copy_from_slice(&payload);
        }
        records.extend(RecordSummary::of(&header));
        at += header.record_bytes();
    }
    if with_footer {
        let footer = Footer { segment: SEGMENT, epoch: EPOCH, records: records.clone() };
        let encoded = footer.encode(&SUPERBLOCK.log_id);
        let from = bytes.len() - encoded.len();
        bytes[from..].copy_from_slice(&encoded);
    }
    (bytes, records)
}

fn beside(epoch: u64) -> SegmentEpochs {
    let mut epochs = SegmentEpochs::default();
    epochs.add(SEGMENT + 1, epoch);
    epochs
}

fn older() -> SegmentEpochs {
    beside(EPOCH - 1)
}

fn check(bytes: &[u8]) -> SegmentReport {
    verify(&SUPERBLOCK, SEGMENT, &older(), &mut Cursor::new(bytes))
}

/// The pages that a start would find and that read back whole, with whatever else it counts as
/// whole.
fn whole(bytes: &[u8]) -> Vec<RecordSummary> {
    let mut file = Cursor::new(bytes);
    let mut found = Survey::of(&SUPERBLOCK, SEGMENT, &older(), &mut file).intact;
    found.sort_unstable_by_key(RecordSummary::offset);
    found
}

#[test]
fn intact_segment_is_clean() {
    for with_footer in [true, false] {
        let (bytes, records) = segment(with_footer);
        let report = check(&bytes);
        assert_eq!(report.damages, []);
        assert_eq!((report.pages, report.tombstones, report.footer), (6, 1, with_footer));
        assert_eq!((report.epoch, report.payload_bytes), (Some(EPOCH), 6 + 18 * 20_000));
        assert_eq!(whole(&bytes), records);
        let mut file = Cursor::new(bytes.clone());
        assert!(!repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap().remove);
        assert_eq!(file.into_inner(), bytes, "nothing to repair, nothing written");
    }
}

#[test]
fn damaged_page_is_reported() {
    let (mut bytes, records) = segment(true);
    let RecordSummary::Page(page) = records[5] else { panic!("a page") };
    bytes[page.offset as usize + BLOCK_BYTES + CHUNK_BYTES + 7] ^= 1;
    let damage = &check(&bytes).damages[0];
    assert_eq!((damage.offset, damage.page), (page.offset, Some(page.id)));
    assert_eq!(damage.reason, Reason::Payload(Mismatch::Crc { part: 0, chunk: 1 }));
}

#[test]
fn listed_tombstone_is_restored() {
    let (mut bytes, records) = segment(true);
    bytes[records[3].offset() as usize + 200] ^= 4;
    let mut file = Cursor::new(bytes);
    assert_eq!(repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap().voided, 0);
    assert_eq!(whole(file.get_ref()), records);
}

#[test]
fn short_file_is_beyond_repair() {
    for with_footer in [true, false] {
        let (bytes, _) = segment(with_footer);
        for len in [4096, 5000, 300_000, bytes.len() - BLOCK_BYTES, bytes.len() - 1] {
            let mut cut = bytes.clone();
            cut.truncate(len);
            let report = check(&cut);
            let last = report.damages.last().unwrap();
            assert_eq!(
                (&last.reason, last.offset, last.bytes),
                (&Reason::CutShort, len as u64, (bytes.len() - len) as u64)
            );
            assert!(report.unrepairable);
            let mut file = Cursor::new(cut.clone());
            let done = repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap();
            assert!(!done.remove && file.into_inner() == cut, "removing it alone would bring back what it forgot");
        }
        for len in [0, 100] {
            assert!(check(&bytes[..len]).unrepairable);
        }
    }
}

#[test]
fn copy_of_another_segment_is_set_aside() {
    let (bytes, _) = segment(true);
    let mut at = SegmentEpochs::default();
    at.add(SEGMENT, EPOCH);
    for (number, epochs, unrepairable) in [(9, &at, false), (9, &beside(EPOCH), true), (SEGMENT, &at, false)] {
        let mut file = Cursor::new(bytes.clone());
        let done = repair(&SUPERBLOCK, number, epochs, &mut file).unwrap();
        assert!(file.into_inner() == bytes, "nothing is written");
        let misplaced = number != SEGMENT;
        assert_eq!(
            (done.found.misplaced, done.found.unrepairable, done.remove),
            (misplaced, unrepairable, misplaced && !unrepairable)
        );
        let reason = Reason::Misnamed { segment: SEGMENT, epoch: EPOCH };
        assert_eq!(done.found.damages.first().map(|damage| damage.reason.clone()), misplaced.then_some(reason));
    }
    let other = Superblock { log_id: [1; 16], ..SUPERBLOCK };
    for (number, unrepairable) in [(SEGMENT, true), (SEGMENT + 1, true), (SEGMENT + 2, false)] {
        let report = verify(&other, number, &at, &mut Cursor::new(&bytes));
        assert!(report.misplaced && report.damages[0].reason == Reason::OfAnotherLog);
        assert_eq!(report.unrepairable, unrepairable, "{number}: one of the log's segments may have been there");
    }
}

#[test]
fn every_segment_number_of_the_log_counts() {
    let (bytes, _) = segment(true);
    let report = |number, bytes: &[u8]| verify(&SUPERBLOCK, number, &SegmentEpochs::default(), &mut Cursor::new(bytes));
    let is_unrepairable = |other: Option<SegmentReport>| {
        let mut epochs = SegmentEpochs::default();
        epochs.add(SEGMENT, EPOCH);
        other.iter().for_each(|other| epochs.learn(other));
        verify(&SUPERBLOCK, 50, &epochs, &mut Cursor::new(&bytes)).unrepairable
    };
    assert!(
        !is_unrepairable(None) && !is_unrepairable(Some(report(60, &bytes))),
        "a misplaced segment is not one of the log"
    );
    assert!(is_unrepairable(Some(report(49, &[]))), "a damaged segment is one of the log");
    let mut renamed = bytes.clone();
    let header = SegmentHeader { log_id: SUPERBLOCK.log_id, segment: 49, epoch: EPOCH };
    renamed[..BLOCK_BYTES].copy_from_slice(&header.encode());
    assert!(is_unrepairable(Some(report(60, &renamed))), "the renamed segment was one of the log");
}

/// A damaged page becomes a tombstone: an older put of it, in another segment, must not be found in
/// its place.
#[test]
fn repaired_page_still_hides_older_puts() {
    for (with_footer, header) in [(true, false), (true, true), (false, false)] {
        let (mut bytes, records) = segment(with_footer);
        let RecordSummary::Page(page) = records[5] else { panic!("a page") };
        bytes[page.offset as usize + 300 + if header { 0 } else { BLOCK_BYTES }] ^= 1;
        let mut file = Cursor::new(bytes);
        assert_eq!(repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap().voided, 1);
        let PageSummary { id, offset, number, .. } = page;
        let left = whole(file.get_ref());
        assert_eq!(left[5], RecordSummary::Tombstone(TombstoneSummary { id, offset, number }));
        assert_eq!(check(file.get_ref()).damages, []);
        assert_eq!(left.len(), records.len());
    }
}

#[test]
fn lost_record_stays_lost() {
    let (mut bytes, records) = segment(false);
    bytes[records[3].offset() as usize + 200] ^= 4;
    assert_eq!(check(&bytes).damages[0].reason, Reason::Lost, "those behind it say that it was durable");
    let mut file = Cursor::new(bytes);
    repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap();
    let place = RecordPlace { segment: SEGMENT, epoch: EPOCH, offset: records[3].offset() };
    let block = &file.get_ref()[place.offset as usize..][..BLOCK_BYTES];
    let header = RecordHeader::decode(block, &SUPERBLOCK.log_id, place).unwrap();
    assert_eq!(header.body, RecordBody::Lost { bytes: BLOCK });
    assert_eq!(check(file.get_ref()).damages, []);
    let (mut bytes, records) = segment(false);
    bytes[records[6].offset() as usize + 200] ^= 4;
    let mut file = Cursor::new(bytes);
    assert_eq!(repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap().voided, 1, "the last one may have been torn");
    assert!(!Survey::of(&SUPERBLOCK, SEGMENT, &older(), &mut file).lost);
}

#[test]
fn damaged_segment_header_is_restored_from_the_records() {
    for with_footer in [true, false] {
        let (good, records) = segment(with_footer);
        let mut bytes = good.clone();
        bytes[20] ^= 1;
        assert_eq!(check(&bytes).epoch, Some(EPOCH));
        assert_eq!(whole(&bytes), records);
        let mut file = Cursor::new(bytes.clone());
        let done = repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap();
        assert!(!done.remove && file.into_inner() == good);
        let mut file = Cursor::new(bytes.clone());
        assert!(
            repair(&SUPERBLOCK, SEGMENT, &beside(EPOCH + 1), &mut file).unwrap().remove,
            "it was to be written anew"
        );
        bytes[BLOCK_BYTES + 300] ^= 1;
        let report = verify(&SUPERBLOCK, SEGMENT, &beside(EPOCH + 1), &mut Cursor::new(bytes));
        assert!(report.unrepairable && report.epoch.is_none());
    }
}

fn flip(bytes: &mut [u8], flips: &[(prop::sample::Index, u8)]) {
    for (at, bit) in flips {
        bytes[at.index(bytes.len())] ^= 1 << (bit % 8);
    }
}

/// A record is untouched if its own bytes are. Without a footer nothing else counts.
fn untouched(before: &[u8], after: &[u8], record: &RecordSummary) -> bool {
    let (from, len) = (record.offset() as usize, record.record_bytes() as usize);
    before[from..from + len] == after[from..from + len]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn flipped_bits_are_detected_and_repaired(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        with_footer: bool,
        dies_after in 0usize..12,
    ) {
        let (good, records) = segment(with_footer);
        let mut bad = good.clone();
        flip(&mut bad, &flips);
        let report = check(&bad);
        // What is not reported is harmless: all that is found is what was written.
        if report.damages.is_empty() {
            prop_assert_eq!(whole(&bad), records.clone());
        }
        // What was there, or a tombstone in place of it.
        let was_there = |record: &RecordSummary| {
            let known = |old: &&RecordSummary| {
                (old.id(), old.offset(), old.number()) == (record.id(), record.offset(), record.number())
            };
            records.contains(record) || matches!(record, RecordSummary::Tombstone(_)) && records.iter().any(|old| known(&old))
        };

        let mut dying = Dying { file: Cursor::new(bad.clone()), blocks_left: dies_after };
        let died = repair(&SUPERBLOCK, SEGMENT, &older(), &mut dying).is_err();
        let mut file = dying.file;
        if died {
            // Nothing appears that was not there, and what is untouched can still be found.
            let left = whole(file.get_ref());
            prop_assert!(left.iter().all(was_there));
            prop_assert!(records.iter().all(|record| !untouched(&good, &bad, record) || left.contains(record)));
        }
        let repaired = repair(&SUPERBLOCK, SEGMENT, &older(), &mut file).unwrap();
        prop_assert!(!repaired.remove);
        prop_assert_eq!(check(file.get_ref()).damages, vec![]);
        let left = whole(file.get_ref());
        prop_assert!(left.iter().all(was_there));
        prop_assert!(records.iter().all(|record| !untouched(&good, &bad, record) || left.contains(record)));
        // A tombstone is there, or something says that it is not.
        let lost = Survey::of(&SUPERBLOCK, SEGMENT, &older(), &mut file).lost;
        prop_assert!(lost || left.contains(&records[3]));
    }
}
