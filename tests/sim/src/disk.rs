//! What is stored: segments and small files, as they read now and as they would be after a loss of power.
//!
//! Always true: `durable` changes only by a sync, by a bit that flips, and by a loss of power; everything that `now` and
//! `durable` differ in was written and not synced.
//!
//! The disk also knows which forgettings it may have broken by lying: a tombstone that was never stored cannot be found
//! again, and no store with one copy of it can help that. The same is true of a record that a start could not see. Such keys are *suspect*: their pages may come back.

use crate::dice::Dice;
use crate::payload::key_in;
use larder_device::SmallFile;
use larder_format::disk::{BLOCK_BYTES, LogId, RecordHeader, RecordPlace, SegmentHeader, Superblock};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// The smallest piece that a device writes at once.
pub const SECTOR_BYTES: usize = 512;
/// Writes that are remembered as places worth damaging.
const RECENT: usize = 64;

/// One write that was not synced.
#[derive(Debug)]
struct Unsynced {
    number: u64,
    range: Range<usize>,
}

#[derive(Debug, Default)]
struct Segment {
    now: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Unsynced>,
    /// A sync of them failed: no later one makes them durable.
    doomed: Vec<Range<usize>>,
    /// The device lied about this segment since its header was last written.
    lied: bool,
    /// Keys with tombstones written here since then.
    tombstones: Vec<u64>,
}

/// What a loss of power does to what was not synced.
#[derive(Debug, Clone, Copy)]
pub enum Loss {
    /// Only the process dies: what was answered stays, and is still not durable.
    Kill,
    /// All of it is lost.
    All,
    /// Each piece by itself is kept, lost, or torn.
    Pieces {
        /// Bytes of a piece.
        piece: usize,
        /// How many of a million are kept.
        kept: u32,
        /// How many of a million are garbage.
        garbage: u32,
    },
}

impl Loss {
    /// One of them.
    pub fn draw(dice: &mut Dice) -> Loss {
        match dice.below(8) {
            0 | 1 => Loss::Kill,
            2 => Loss::All,
            turn => Loss::Pieces {
                piece: if turn % 2 == 0 { SECTOR_BYTES } else { BLOCK_BYTES },
                kept: [100_000, 500_000, 900_000][dice.below(3) as usize],
                garbage: [0, 50_000][dice.below(2) as usize],
            },
        }
    }
}

/// Everything that is stored.
#[derive(Debug, Default)]
pub struct Disk {
    segments: BTreeMap<u32, Segment>,
    small: BTreeMap<SmallFile, Vec<u8>>,
    writes: u64,
    recent: VecDeque<(u32, Range<usize>)>,
    suspects: BTreeSet<u64>,
    /// A segment's header was lied about: the pages of an earlier life may come back whenever.
    all_suspect: bool,
    /// Until when it refuses everything, and until when there is no room for files, in virtual milliseconds.
    broken_until_ms: u64,
    full_until_ms: u64,
}

impl Disk {
    /// Numbers of the segments, in order.
    pub fn segments(&self) -> Vec<u32> {
        self.segments.keys().copied().collect()
    }

    /// Whether there is such a segment.
    pub fn has(&self, segment: u32) -> bool {
        self.segments.contains_key(&segment)
    }

    /// Bytes of the log: its segments and superblock. What the scrub notes of its progress is not counted.
    pub fn bytes(&self) -> u64 {
        let segments: usize = self.segments.values().map(|segment| segment.now.len()).sum();
        (segments + self.small.get(&SmallFile::Superblock).map_or(0, Vec::len)) as u64
    }

    /// Makes a segment of zeros behind a header, durably.
    pub fn create(&mut self, segment: u32, bytes: u64, header: &[u8]) {
        self.remove(segment);
        self.make(segment, bytes);
        let Some(Segment { now, durable, .. }) = self.segments.get_mut(&segment) else { return };
        [now, durable].into_iter().for_each(|bytes| bytes[..header.len()].copy_from_slice(header));
    }

    /// Somebody copies a segment, or renames it, `over` another one or to where none can have been; from which number to which.
    /// Not a file of which that was done before: nobody could tell any more what it was, or what lay there.
    pub fn stray(&mut self, renames: bool, over: bool, dice: &mut Dice) -> Option<(u32, u32)> {
        let is_stray = |(number, segment): &(&u32, &Segment)| {
            SegmentHeader::decode(&segment.now).is_ok_and(|header| header.segment != **number)
        };
        let own = self.segments.iter().filter(|segment| !is_stray(segment));
        let mut own: Vec<u32> = own.map(|(&number, _)| number).collect();
        let any = |of: &[u32], dice: &mut Dice| of.get(dice.below(of.len().max(1) as u64) as usize).copied();
        let from = any(&own, dice)?;
        let to = if over {
            // Nor one above a gap: that it was the last one nobody could tell either.
            let known = own.clone();
            own.retain(|&to| to != from && known.iter().any(|&other| other != to && other + 1 >= to));
            any(&own, dice)?
        } else {
            self.segments.last_key_value()?.0 + 2 + dice.below(3) as u32
        };
        let stray = match renames {
            false => {
                let now = self.segments.get(&from)?.now.clone();
                Segment { durable: now.clone(), now, ..Segment::default() }
            }
            true => self.segments.remove(&from)?,
        };
        self.recent.retain(|(at, _)| !renames || *at != from);
        self.segments.insert(to, stray);
        Some((from, to))
    }

    /// Makes a segment of zeros, or brings one to this length.
    pub fn make(&mut self, segment: u32, bytes: u64) {
        let found = self.segments.entry(segment).or_default();
        found.now.resize(bytes as usize, 0);
        found.durable.resize(bytes as usize, 0);
    }

    /// Removes a segment.
    pub fn remove(&mut self, segment: u32) {
        self.segments.remove(&segment);
        self.recent.retain(|(at, _)| *at != segment);
    }

    /// A small file.
    pub fn small(&self, file: SmallFile) -> Option<Vec<u8>> {
        self.small.get(&file).cloned()
    }

    /// Makes or replaces a small file.
    pub fn save(&mut self, file: SmallFile, bytes: Vec<u8>) {
        self.small.insert(file, bytes);
    }

    /// Bytes at a place, as they read now; `None` if the segment ends before.
    pub fn read(&self, segment: u32, offset: u64, len: usize) -> Option<&[u8]> {
        let offset = offset as usize;
        self.segments.get(&segment)?.now.get(offset..offset.checked_add(len)?)
    }

    /// Writes that were done so far: a sync that begins now makes these durable.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Writes pieces one behind the other, as one write. `false` if they do not fit.
    pub fn write(&mut self, segment: u32, offset: u64, pieces: &[&[u8]]) -> bool {
        let start = offset as usize;
        let len: usize = pieces.iter().map(|piece| piece.len()).sum();
        let Some(found) = self.segments.get_mut(&segment) else { return false };
        let Some(target) = found.now.get_mut(start..start + len) else { return false };
        let mut rest = target;
        for piece in pieces {
            let (head, tail) = rest.split_at_mut(piece.len());
            head.copy_from_slice(piece);
            rest = tail;
        }
        self.writes += 1;
        found.unsynced.push(Unsynced { number: self.writes, range: start..start + len });
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((segment, start..start + len));
        true
    }

    /// Writes some sectors of `bytes`, others not.
    pub fn write_some(&mut self, segment: u32, offset: u64, bytes: &[u8], kept: u32, dice: &mut Dice) {
        for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
            if dice.chance(kept) {
                self.write(segment, offset + (index * SECTOR_BYTES) as u64, &[sector]);
            }
        }
    }

    /// Makes the first `writes` writes of a segment durable.
    pub fn sync(&mut self, segment: u32, writes: u64) {
        let Some(Segment { now, durable, unsynced, .. }) = self.segments.get_mut(&segment) else { return };
        unsynced.retain(|write| {
            let kept = write.number > writes;
            if !kept {
                durable[write.range.clone()].copy_from_slice(&now[write.range.clone()]);
            }
            kept
        });
    }

    /// A sync fails: each of the writes may have become durable, or never will.
    pub fn sync_fails(&mut self, segment: u32, writes: u64, dice: &mut Dice) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        let (tried, later) = std::mem::take(&mut found.unsynced).into_iter().partition(|write| write.number <= writes);
        found.unsynced = later;
        let tried: Vec<Unsynced> = tried;
        for Unsynced { range, .. } in tried {
            match dice.chance(500_000) {
                true => found.durable[range.clone()].copy_from_slice(&found.now[range]),
                false => found.doomed.push(range),
            }
        }
    }

    /// Power fails, or the process alone dies.
    pub fn lose_power(&mut self, loss: Loss, dice: &mut Dice) {
        if let Loss::Kill = loss {
            return;
        }
        for segment in self.segments.values_mut() {
            segment.lose_power(loss, dice);
        }
    }

    /// A write is asked for: what it means is kept in mind. `block` is its first block, if nothing follows it.
    pub fn note_write(&mut self, segment: u32, offset: u64, block: Option<&[u8]>) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        if offset == 0 {
            found.lied = false;
            found.tombstones.clear();
        }
        if let Some(key) = block.and_then(key_in) {
            found.tombstones.push(key);
            if found.lied {
                self.suspects.insert(key);
            }
        }
    }

    /// The device lied about bytes of a segment from `offset` on.
    pub fn note_lie(&mut self, segment: u32, offset: u64) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        found.lied = true;
        self.suspects.extend(found.tombstones.iter().copied());
        self.all_suspect |= offset < BLOCK_BYTES as u64;
    }

    /// A start gets other bytes than those from `offset` on: it does not know the records there, and forgetting their
    /// pages needs no tombstone, as it seems.
    pub fn note_hidden(&mut self, segment: u32, offset: u64, len: usize) {
        let hidden = self.read(segment, offset, len).unwrap_or_default();
        let keys: Vec<u64> = hidden.chunks(BLOCK_BYTES).filter_map(key_in).collect();
        self.suspects.extend(keys);
        self.note_lie(segment, offset);
    }

    /// Whether forgotten pages of a key may come back, because the device lied about its tombstones.
    pub fn is_suspect(&self, key: u64) -> bool {
        self.all_suspect || self.suspects.contains(&key)
    }

    /// It refuses everything until then.
    pub fn breaks(&mut self, until_ms: u64) {
        self.broken_until_ms = self.broken_until_ms.max(until_ms);
    }

    /// There is no room for more files until then.
    pub fn fills(&mut self, until_ms: u64) {
        self.full_until_ms = until_ms;
    }

    /// Works again, unless it broke for good.
    pub fn heals(&mut self) {
        self.full_until_ms = 0;
        if self.broken_until_ms != u64::MAX {
            self.broken_until_ms = 0;
        }
    }

    /// Whether it refuses everything now.
    pub fn is_broken(&self, now_ms: u64) -> bool {
        now_ms < self.broken_until_ms
    }

    /// Whether it broke for good.
    pub fn is_dead(&self) -> bool {
        self.broken_until_ms == u64::MAX
    }

    /// Whether there is no room for files now.
    pub fn is_full(&self, now_ms: u64) -> bool {
        now_ms < self.full_until_ms
    }

    /// A place in some segment: half of them where something was written lately.
    pub fn any_place(&self, dice: &mut Dice) -> Option<(u32, u64)> {
        if self.segments.is_empty() {
            return None;
        }
        if let Some((segment, range)) = self.recent.get(dice.below(2 * RECENT as u64) as usize) {
            return Some((*segment, dice.between(range.start as u64, range.end as u64 - 1)));
        }
        let (number, segment) = self.segments.iter().nth(dice.below(self.segments.len() as u64) as usize)?;
        Some((*number, dice.below(segment.now.len().max(1) as u64)))
    }

    /// Destroys the header of a segment, or of a record that a later one of its segment calls durable; its place. Nothing
    /// that was forgotten may come back for that.
    pub fn rot(&mut self, dice: &mut Dice) -> Option<(u32, u64)> {
        let log_id = Superblock::decode(self.small.get(&SmallFile::Superblock)?).ok()?.log_id;
        let places: Vec<(u32, u64)> = match dice.chance(500_000) {
            true => self.segments.keys().map(|&segment| (segment, 0)).collect(),
            false => {
                let places = self.segments.iter().flat_map(|(&number, segment)| {
                    segment.durable_records(&log_id, number).into_iter().map(move |offset| (number, offset))
                });
                places.collect()
            }
        };
        let (segment, offset) = *places.get(dice.below(places.len().max(1) as u64) as usize)?;
        let found = self.segments.get_mut(&segment)?;
        for bytes in [&mut found.now, &mut found.durable] {
            let end = (offset as usize + SECTOR_BYTES).min(bytes.len());
            dice.fill(bytes.get_mut(offset as usize..end)?);
        }
        Some((segment, offset))
    }

    /// Turns a bit around, for good.
    pub fn flip(&mut self, segment: u32, at: u64, bit: u64) {
        let Some(found) = self.segments.get_mut(&segment) else { return };
        for bytes in [&mut found.now, &mut found.durable] {
            if let Some(byte) = bytes.get_mut(at as usize) {
                *byte ^= 1 << (bit % 8);
            }
        }
        self.note_lie(segment, at);
    }
}

impl Segment {
    /// Offsets of records before the place up to which all is durable, by the records of the segment's life.
    fn durable_records(&self, log_id: &LogId, segment: u32) -> Vec<u64> {
        let Ok(life) = SegmentHeader::decode_life(&self.durable, log_id, segment) else { return Vec::new() };
        let record = |(block, offset)| {
            RecordHeader::decode(block, log_id, RecordPlace { segment, life, offset })
                .ok()
                .map(|header| (offset, header))
        };
        let offsets = (0..).step_by(BLOCK_BYTES);
        let records: Vec<(u64, RecordHeader)> =
            self.durable.chunks(BLOCK_BYTES).zip(offsets).filter_map(record).collect();
        let durable = records.iter().map(|(_, header)| header.durable).max().unwrap_or(0);
        records.into_iter().map(|(offset, _)| offset).filter(|&offset| offset < durable).collect()
    }

    fn lose_power(&mut self, loss: Loss, dice: &mut Dice) {
        let unsynced: Vec<Range<usize>> = self.unsynced.drain(..).map(|write| write.range).collect();
        let doomed: Vec<Range<usize>> = self.doomed.drain(..).collect();
        if let Loss::Pieces { piece, kept, garbage } = loss {
            for range in &unsynced {
                self.settle(range.clone(), piece, kept, garbage, dice);
            }
            for range in &doomed {
                self.settle(range.clone(), piece, kept, 0, dice);
            }
        }
        for range in unsynced.into_iter().chain(doomed) {
            self.now[range.clone()].copy_from_slice(&self.durable[range]);
        }
    }

    /// Decides for each piece of a write whether it got there.
    fn settle(&mut self, range: Range<usize>, piece: usize, kept: u32, garbage: u32, dice: &mut Dice) {
        for start in range.clone().step_by(piece) {
            let part = start..(start + piece).min(range.end);
            if dice.chance(garbage) {
                // Torn inside: the new bytes up to somewhere, then noise.
                let torn = dice.between(part.start as u64, part.end as u64) as usize;
                self.durable[part.start..torn].copy_from_slice(&self.now[part.start..torn]);
                dice.fill(&mut self.durable[torn..part.end]);
            } else if dice.chance(kept) {
                self.durable[part.clone()].copy_from_slice(&self.now[part]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dice::Stream;

    fn disk() -> Disk {
        let mut disk = Disk::default();
        disk.make(0, 1 << 20);
        disk
    }

    #[test]
    fn what_was_not_synced_is_lost() {
        let (mut disk, mut dice) = (disk(), Dice::new(1, Stream::Setup));
        assert!(disk.write(0, 0, &[&[1; 4096]]));
        let began = disk.writes();
        assert!(disk.write(0, 4096, &[&[2; 4096], &[3; 4096]]));
        disk.sync(0, began);
        disk.lose_power(Loss::Kill, &mut dice);
        assert_eq!(disk.read(0, 8192, 1), Some(&[3][..]), "a killed process loses nothing that was written");
        disk.lose_power(Loss::All, &mut dice);
        assert_eq!(disk.read(0, 0, 1), Some(&[1][..]));
        assert_eq!(disk.read(0, 4096, 8192), Some(&[0; 8192][..]));
    }

    #[test]
    fn pieces_are_torn_apart() {
        let (mut disk, mut dice) = (disk(), Dice::new(1, Stream::Setup));
        disk.write(0, 0, &[&[1; 64 * 4096]]);
        disk.lose_power(Loss::Pieces { piece: SECTOR_BYTES, kept: 500_000, garbage: 50_000 }, &mut dice);
        let sectors = disk.read(0, 0, 64 * 4096).unwrap().chunks(SECTOR_BYTES);
        let (kept, rest): (Vec<_>, Vec<_>) = sectors.partition(|sector| sector.iter().all(|&b| b == 1));
        let (lost, torn): (Vec<_>, Vec<_>) = rest.into_iter().partition(|sector| sector.iter().all(|&b| b == 0));
        assert!(kept.len() > 100 && lost.len() > 100 && !torn.is_empty(), "{} {}", kept.len(), lost.len());
    }

    #[test]
    fn no_later_sync_helps_what_a_failed_one_dropped() {
        let (mut disk, mut dice) = (disk(), Dice::new(1, Stream::Setup));
        for block in 0..64 {
            disk.write(0, block * 4096, &[&[1; 4096]]);
        }
        disk.sync_fails(0, disk.writes(), &mut dice);
        disk.sync(0, disk.writes());
        disk.lose_power(Loss::All, &mut dice);
        let kept = (0..64).filter(|block| disk.read(0, block * 4096, 1) == Some(&[1][..])).count();
        assert!((10..54).contains(&kept), "{kept}");
    }

    #[test]
    fn a_lie_about_a_tombstone_makes_its_key_suspect() {
        let mut disk = disk();
        let block = |key| crate::payload::page_key(key).0.to_vec();
        disk.note_write(0, 4096, Some(&block(5)));
        assert!(!disk.is_suspect(5));
        disk.note_lie(0, 8192);
        assert!(disk.is_suspect(5));
        disk.note_write(0, 12288, Some(&block(6)));
        assert!(disk.is_suspect(6), "the segment may not be read to its end");
        disk.note_write(0, 0, None);
        disk.note_write(0, 4096, Some(&block(7)));
        assert!(!disk.is_suspect(7));
    }
}
