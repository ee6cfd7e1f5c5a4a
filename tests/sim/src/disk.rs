//! Stored bytes: segments and small files, as they read now and as a power loss would leave them.
//!
//! Invariants:
//! - Only a sync, a bit flip or a power loss changes `durable`.
//! - Every difference between `now` and `durable` was written and not synced.
//!
//! The disk also tracks *suspect* keys, whose forgotten pages may return. A silent fault may have
//! destroyed their tombstones, or hidden their records from recovery. No store with one copy can
//! prevent that.

use crate::payload::{number_in, number_of};
use crate::random::RandomSource;
use crate::sparse::SparseBytes;
use larder_format::disk::{BLOCK_BYTES, LogId, RecordHeader, RecordPlace, SegmentHeader, Superblock};
use larder_io::SmallFile;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// Smallest unit that a device writes atomically. A power loss keeps or loses whole sectors, or
/// ends one in garbage.
pub const SECTOR_BYTES: usize = 512;
const RECENT: usize = 64;

#[derive(Debug)]
struct Unsynced {
    number: u64,
    range: Range<usize>,
}

#[derive(Debug, Default)]
struct Segment {
    now: SparseBytes,
    durable: SparseBytes,
    unsynced: Vec<Unsynced>,
    /// Ranges whose sync failed. Later syncs do not make them durable, as after a failed fsync on
    /// Linux.
    dropped_by_sync: Vec<Range<usize>>,
    /// The device silently damaged this segment since its header was last written.
    silently_damaged: bool,
    /// Numbers of the keys of its tombstones. Those since its header was last written.
    tombstones: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
pub enum CrashEffect {
    /// Only the process dies. Acknowledged writes stay readable and are still not durable.
    ProcessKilled,
    UnsyncedLost,
    /// Each piece is kept, lost or torn independently. `piece` is in bytes. `garbage` and `kept`
    /// are rates per million, and the rest of the pieces is lost.
    Torn {
        piece: usize,
        kept: u32,
        garbage: u32,
    },
}

impl CrashEffect {
    pub fn draw(random: &mut RandomSource) -> CrashEffect {
        match random.below(8) {
            0 | 1 => CrashEffect::ProcessKilled,
            2 => CrashEffect::UnsyncedLost,
            turn => CrashEffect::Torn {
                piece: if turn % 2 == 0 { SECTOR_BYTES } else { BLOCK_BYTES },
                kept: [100_000, 500_000, 900_000][random.below(3) as usize],
                garbage: [0, 50_000][random.below(2) as usize],
            },
        }
    }
}

const SUPERBLOCKS: [SmallFile; 2] = [SmallFile::Superblock, SmallFile::SuperblockCopy];

#[derive(Debug, Default)]
pub struct Disk {
    segments: BTreeMap<u32, Segment>,
    small: BTreeMap<SmallFile, Vec<u8>>,
    /// Stored identity of the node. A power loss keeps it. Only the fault `identity_lost` removes
    /// it.
    pub identity: Option<Vec<u8>>,
    writes: u64,
    recent: VecDeque<(u32, Range<usize>)>,
    /// Numbers of suspect keys. A key is suspect in all namespaces or in none.
    suspects: BTreeSet<u64>,
    /// A segment header was silently damaged. Any page of an earlier incarnation may return.
    all_suspect: bool,
    /// Virtual times in milliseconds until which the disk refuses all requests, and has no space.
    broken_until_ms: u64,
    full_until_ms: u64,
}

impl Disk {
    pub fn segments(&self) -> Vec<u32> {
        self.segments.keys().copied().collect()
    }

    pub fn has(&self, segment: u32) -> bool {
        self.segments.contains_key(&segment)
    }

    /// Bytes of the log: its segments and superblocks. The progress file of the scrub does not
    /// count.
    pub fn bytes(&self) -> u64 {
        let segments: usize = self.segments.values().map(|segment| segment.now.len()).sum();
        let superblocks: usize = SUPERBLOCKS.iter().filter_map(|file| self.small.get(file)).map(Vec::len).sum();
        (segments + superblocks) as u64
    }

    pub fn create(&mut self, segment: u32, bytes: u64, header: &[u8]) {
        self.remove(segment);
        self.resize(segment, bytes);
        let Some(Segment { now, durable, .. }) = self.segments.get_mut(&segment) else { return };
        [now, durable].into_iter().for_each(|bytes| bytes.write(0, header));
    }

    /// Copies or renames a segment file, to the place of another one if `over`, or to a number no
    /// segment can have had. Returns the old and the new number. Skips files that were misplaced
    /// before: the log could no longer tell their origin, nor the segment they replaced. Returns
    /// `None` if no file qualifies.
    pub fn misplace(&mut self, renames: bool, over: bool, random: &mut RandomSource) -> Option<(u32, u32)> {
        let is_misplaced = |(number, segment): &(&u32, &Segment)| {
            SegmentHeader::decode(&segment.first_block()).is_ok_and(|header| header.segment != **number)
        };
        let own = self.segments.iter().filter(|segment| !is_misplaced(segment));
        let mut own: Vec<u32> = own.map(|(&number, _)| number).collect();
        let any =
            |of: &[u32], random: &mut RandomSource| of.get(random.below(of.len().max(1) as u64) as usize).copied();
        let from = any(&own, random)?;
        let to = if over {
            // A segment above a gap may have been the last one. The log cannot miss it, so it is
            // not replaced.
            let known = own.clone();
            own.retain(|&to| to != from && known.iter().any(|&other| other != to && other + 1 >= to));
            any(&own, random)?
        } else {
            self.segments.last_key_value()?.0 + 2 + random.below(3) as u32
        };
        let misplace = match renames {
            false => {
                let now = self.segments.get(&from)?.now.clone();
                Segment { durable: now.clone(), now, ..Segment::default() }
            }
            true => self.segments.remove(&from)?,
        };
        self.recent.retain(|(at, _)| !renames || *at != from);
        self.segments.insert(to, misplace);
        Some((from, to))
    }

    pub fn resize(&mut self, segment: u32, bytes: u64) {
        let found = self.segments.entry(segment).or_default();
        found.now.resize(bytes as usize);
        found.durable.resize(bytes as usize);
    }

    pub fn remove(&mut self, segment: u32) {
        self.segments.remove(&segment);
        self.recent.retain(|(at, _)| *at != segment);
    }

    pub fn small(&self, file: SmallFile) -> Option<Vec<u8>> {
        self.small.get(&file).cloned()
    }

    pub fn save(&mut self, file: SmallFile, bytes: Vec<u8>) {
        self.small.insert(file, bytes);
    }

    /// Reads bytes into `target`. Returns `false` if they reach beyond the end of the segment.
    pub fn read(&self, segment: u32, offset: u64, target: &mut [u8]) -> bool {
        let start = offset as usize;
        let segment = self.segments.get(&segment).map(|segment| &segment.now);
        let Some(now) = segment.filter(|now| now.contains(&(start..start + target.len()))) else { return false };
        now.read(start, target);
        true
    }

    /// Number of writes so far, in all segments. [`Disk::sync`] takes such a number to tell which
    /// writes it covers.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Writes `pieces` contiguously as one write. Returns `false` if they do not fit, and changes
    /// nothing in that case.
    pub fn write(&mut self, segment: u32, offset: u64, pieces: &[&[u8]]) -> bool {
        let start = offset as usize;
        let len: usize = pieces.iter().map(|piece| piece.len()).sum();
        let Some(found) = self.segments.get_mut(&segment) else { return false };
        if !found.now.contains(&(start..start + len)) {
            return false;
        }
        let mut at = start;
        for piece in pieces {
            found.now.write(at, piece);
            at += piece.len();
        }
        self.writes += 1;
        found.unsynced.push(Unsynced { number: self.writes, range: start..start + len });
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((segment, start..start + len));
        true
    }

    pub fn write_some(&mut self, segment: u32, offset: u64, bytes: &[u8], kept: u32, random: &mut RandomSource) {
        for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
            if random.chance(kept) {
                self.write(segment, offset + (index * SECTOR_BYTES) as u64, &[sector]);
            }
        }
    }

    /// Makes the writes up to number `writes` durable, with the bytes that they have now. So a
    /// later write to the same place may become durable with them.
    pub fn sync(&mut self, segment: u32, writes: u64) {
        let Some(Segment { now, durable, unsynced, .. }) = self.segments.get_mut(&segment) else { return };
        unsynced.retain(|write| {
            let kept = write.number > writes;
            if !kept {
                durable.copy_from(now, write.range.clone());
            }
            kept
        });
    }

    /// Fails a sync. Each covered write becomes durable now, or never: a later sync does not save
    /// it, as after a failed fsync on Linux.
    pub fn sync_fails(&mut self, segment: u32, writes: u64, random: &mut RandomSource) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        let (tried, later) = std::mem::take(&mut found.unsynced).into_iter().partition(|write| write.number <= writes);
        found.unsynced = later;
        let tried: Vec<Unsynced> = tried;
        for Unsynced { range, .. } in tried {
            match random.chance(500_000) {
                true => found.durable.copy_from(&found.now, range),
                false => found.dropped_by_sync.push(range),
            }
        }
    }

    pub fn lose_power(&mut self, effect: CrashEffect, random: &mut RandomSource) {
        if let CrashEffect::ProcessKilled = effect {
            return;
        }
        for segment in self.segments.values_mut() {
            segment.lose_power(effect, random);
        }
    }

    /// Tracks tombstones in a submitted write. `block` is its only block, if it has no payload. A
    /// new header starts the segment afresh.
    pub fn note_write(&mut self, segment: u32, offset: u64, block: Option<&[u8]>) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        if offset == 0 {
            found.silently_damaged = false;
            found.tombstones.clear();
        }
        if let Some(number) = block.and_then(number_in) {
            found.tombstones.push(number);
            if found.silently_damaged {
                self.suspects.insert(number);
            }
        }
    }

    pub fn note_silent_fault(&mut self, segment: u32, offset: u64) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        found.silently_damaged = true;
        self.suspects.extend(found.tombstones.iter().copied());
        self.all_suspect |= offset < BLOCK_BYTES as u64;
    }

    /// Records that recovery read wrong bytes at `offset`. It does not know the records there, so
    /// the log writes no tombstones for their pages.
    pub fn note_hidden(&mut self, segment: u32, offset: u64, len: usize) {
        let mut hidden = vec![0; len];
        if !self.read(segment, offset, &mut hidden) {
            hidden.clear();
        }
        let numbers: Vec<u64> = hidden.chunks(BLOCK_BYTES).filter_map(number_in).collect();
        self.suspects.extend(numbers);
        self.note_silent_fault(segment, offset);
    }

    pub fn is_suspect(&self, key: u64) -> bool {
        self.all_suspect || self.suspects.contains(&number_of(key))
    }

    /// Refuses all requests before this virtual time, in milliseconds. `u64::MAX` stands for a dead
    /// disk, which [`Disk::heal`] does not repair.
    pub fn fail_until(&mut self, until_ms: u64) {
        self.broken_until_ms = self.broken_until_ms.max(until_ms);
    }

    pub fn fill_until(&mut self, until_ms: u64) {
        self.full_until_ms = until_ms;
    }

    pub fn heal(&mut self) {
        self.full_until_ms = 0;
        if self.broken_until_ms != u64::MAX {
            self.broken_until_ms = 0;
        }
    }

    pub fn is_broken(&self, now_ms: u64) -> bool {
        now_ms < self.broken_until_ms
    }

    pub fn is_dead(&self) -> bool {
        self.broken_until_ms == u64::MAX
    }

    pub fn is_full(&self, now_ms: u64) -> bool {
        now_ms < self.full_until_ms
    }

    /// Draws a location in some segment. Half of the draws hit recent writes. Returns its segment
    /// and its byte offset, or `None` without segments.
    pub fn random_location(&self, random: &mut RandomSource) -> Option<(u32, u64)> {
        if self.segments.is_empty() {
            return None;
        }
        if let Some((segment, range)) = self.recent.get(random.below(2 * RECENT as u64) as usize) {
            return Some((*segment, random.between(range.start as u64, range.end as u64 - 1)));
        }
        let (number, segment) = self.segments.iter().nth(random.below(self.segments.len() as u64) as usize)?;
        Some((*number, random.below(segment.now.len().max(1) as u64)))
    }

    /// The copies of the superblock: `None` for one that is missing or damaged.
    fn superblocks(&self) -> impl Iterator<Item = Option<Superblock>> + '_ {
        SUPERBLOCKS.iter().map(|file| Superblock::decode(self.small.get(file)?).ok())
    }

    /// Returns `true` if there are segments, and no valid superblock to use them with.
    pub fn lacks_superblock(&self) -> bool {
        !self.segments.is_empty() && self.superblocks().flatten().next().is_none()
    }

    /// Damages or removes one copy of the superblock, if both are valid. Returns its number. The
    /// log cannot be used without a valid copy, so the last one always stays.
    pub fn destroy_superblock(&mut self, random: &mut RandomSource) -> Option<u64> {
        if self.superblocks().flatten().count() < SUPERBLOCKS.len() {
            return None;
        }
        let copy = random.below(SUPERBLOCKS.len() as u64);
        let file = SUPERBLOCKS[copy as usize];
        match random.chance(500_000) {
            true => drop(self.small.remove(&file)),
            false => random.fill(self.small.get_mut(&file)?),
        }
        Some(copy)
    }

    /// Destroys the header of a segment, or of a record that a later record declares durable.
    /// Returns its location. No forgotten page may return because of it.
    pub fn destroy_header(&mut self, random: &mut RandomSource) -> Option<(u32, u64)> {
        let log_id = self.superblocks().flatten().next()?.log_id;
        let places: Vec<(u32, u64)> = match random.chance(500_000) {
            true => self.segments.keys().map(|&segment| (segment, 0)).collect(),
            false => {
                let places = self.segments.iter().flat_map(|(&number, segment)| {
                    segment.durable_records(&log_id, number).into_iter().map(move |offset| (number, offset))
                });
                places.collect()
            }
        };
        let (segment, offset) = *places.get(random.below(places.len().max(1) as u64) as usize)?;
        let found = self.segments.get_mut(&segment)?;
        for bytes in [&mut found.now, &mut found.durable] {
            let end = (offset as usize + SECTOR_BYTES).min(bytes.len());
            let mut noise = vec![0; end.checked_sub(offset as usize)?];
            random.fill(&mut noise);
            bytes.write(offset as usize, &noise);
        }
        Some((segment, offset))
    }

    /// Flips a stored bit permanently, in the durable bytes as well. Its segment counts as silently
    /// damaged from then on.
    pub fn flip(&mut self, segment: u32, at: u64, bit: u64) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        for bytes in [&mut found.now, &mut found.durable] {
            let at = at as usize;
            if at < bytes.len() {
                bytes.write(at, &[bytes.to_vec(at..at + 1)[0] ^ 1 << (bit % 8)]);
            }
        }
        self.note_silent_fault(segment, at);
    }
}

impl Segment {
    fn first_block(&self) -> Vec<u8> {
        self.now.blocks().next().unwrap_or_default()
    }

    /// Offsets of the records that a later record declares durable: those below the largest bound
    /// in any valid header. Empty if the header of the segment is not valid.
    fn durable_records(&self, log_id: &LogId, segment: u32) -> Vec<u64> {
        let first = self.durable.blocks().next().unwrap_or_default();
        let Ok(epoch) = SegmentHeader::decode_epoch(&first, log_id, segment) else { return Vec::new() };
        let record = |(block, offset): (Vec<u8>, u64)| {
            RecordHeader::decode(&block, log_id, RecordPlace { segment, epoch, offset })
                .ok()
                .map(|header| (offset, header))
        };
        let offsets = (0..).step_by(BLOCK_BYTES);
        let records: Vec<(u64, RecordHeader)> = self.durable.blocks().zip(offsets).filter_map(record).collect();
        let durable = records.iter().map(|(_, header)| header.durable).max().unwrap_or(0);
        records.into_iter().map(|(offset, _)| offset).filter(|&offset| offset < durable).collect()
    }

    fn lose_power(&mut self, effect: CrashEffect, random: &mut RandomSource) {
        let unsynced: Vec<Range<usize>> = self.unsynced.drain(..).map(|write| write.range).collect();
        let dropped_by_sync: Vec<Range<usize>> = self.dropped_by_sync.drain(..).collect();
        if let CrashEffect::Torn { piece, kept, garbage } = effect {
            for range in &unsynced {
                self.tear(range.clone(), piece, kept, garbage, random);
            }
            for range in &dropped_by_sync {
                self.tear(range.clone(), piece, kept, 0, random);
            }
        }
        for range in unsynced.into_iter().chain(dropped_by_sync) {
            self.now.copy_from(&self.durable, range);
        }
    }

    fn tear(&mut self, range: Range<usize>, piece: usize, kept: u32, garbage: u32, random: &mut RandomSource) {
        for start in range.clone().step_by(piece) {
            let part = start..(start + piece).min(range.end);
            if random.chance(garbage) {
                // Torn inside the piece: new bytes up to some point, then noise.
                let torn = random.between(part.start as u64, part.end as u64) as usize;
                self.durable.copy_from(&self.now, part.start..torn);
                let mut noise = vec![0; part.end - torn];
                random.fill(&mut noise);
                self.durable.write(torn, &noise);
            } else if random.chance(kept) {
                self.durable.copy_from(&self.now, part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    fn bytes(disk: &Disk, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(disk.read(0, offset, &mut bytes));
        bytes
    }

    fn disk() -> Disk {
        let mut disk = Disk::default();
        disk.resize(0, 1 << 20);
        disk
    }

    #[test]
    fn power_loss_drops_unsynced_bytes() {
        let mut disk = disk();
        let mut random = RandomSource::new(1, Stream::Setup);
        assert!(disk.write(0, 0, &[&[1; 4096]]));
        let began = disk.writes();
        assert!(disk.write(0, 4096, &[&[2; 4096], &[3; 4096]]));
        disk.sync(0, began);
        disk.lose_power(CrashEffect::ProcessKilled, &mut random);
        assert_eq!(bytes(&disk, 8192, 1), [3], "a killed process loses nothing that was written");
        disk.lose_power(CrashEffect::UnsyncedLost, &mut random);
        assert_eq!(bytes(&disk, 0, 1), [1]);
        assert_eq!(bytes(&disk, 4096, 8192), [0; 8192]);
    }

    #[test]
    fn power_loss_tears_writes_into_sectors() {
        let mut disk = disk();
        let mut random = RandomSource::new(1, Stream::Setup);
        disk.write(0, 0, &[&[1; 64 * 4096]]);
        disk.lose_power(CrashEffect::Torn { piece: SECTOR_BYTES, kept: 500_000, garbage: 50_000 }, &mut random);
        let bytes = bytes(&disk, 0, 64 * 4096);
        let sectors = bytes.chunks(SECTOR_BYTES);
        let (kept, rest): (Vec<_>, Vec<_>) = sectors.partition(|sector| sector.iter().all(|&b| b == 1));
        let (lost, torn): (Vec<_>, Vec<_>) = rest.into_iter().partition(|sector| sector.iter().all(|&b| b == 0));
        assert!(kept.len() > 100 && lost.len() > 100 && !torn.is_empty(), "{} {}", kept.len(), lost.len());
    }

    #[test]
    fn later_sync_does_not_restore_bytes_of_a_failed_one() {
        let mut disk = disk();
        let mut random = RandomSource::new(1, Stream::Setup);
        for block in 0..64 {
            disk.write(0, block * 4096, &[&[1; 4096]]);
        }
        disk.sync_fails(0, disk.writes(), &mut random);
        disk.sync(0, disk.writes());
        disk.lose_power(CrashEffect::UnsyncedLost, &mut random);
        let kept = (0..64).filter(|block| bytes(&disk, block * 4096, 1) == [1]).count();
        assert!((10..54).contains(&kept), "{kept}");
    }

    #[test]
    fn silent_fault_near_a_tombstone_makes_its_key_suspect() {
        let mut disk = disk();
        let block = |key| crate::payload::page_key(key).0.to_vec();
        disk.note_write(0, 4096, Some(&block(5)));
        assert!(!disk.is_suspect(5));
        disk.note_silent_fault(0, 8192);
        assert!(disk.is_suspect(5));
        disk.note_write(0, 12288, Some(&block(8)));
        assert!(disk.is_suspect(8), "the segment may not be read to its end");
        disk.note_write(0, 0, None);
        disk.note_write(0, 4096, Some(&block(11)));
        assert!(!disk.is_suspect(11));
    }
}
