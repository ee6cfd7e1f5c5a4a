//! Building a log from what its segments hold.
//!
//! Always true: of the records of a page the one with the largest number counts, and none that a tombstone with a larger
//! number names; the order of the segments does not matter.

use super::scan::{FoundRecord, ScannedSegment};
use super::segment::{Life, Segment};
use super::{Log, LogConfig};
use larder_format::PageId;
use larder_format::disk::BLOCK_BYTES;
use std::collections::BTreeMap;

/// The newest segments, whose last second of writes may not be durable yet.
const UNSYNCED_SEGMENTS: usize = 2;

/// A log again, and what must happen before it is used.
#[derive(Debug)]
pub struct Recovered {
    /// The log.
    pub log: Log,
    /// Segments to remove from the device first, durably and in this order: the unreadable, and the oldest of those that
    /// are more than the capacity allows.
    pub discard: Vec<u32>,
    /// Segments with records.
    pub segments: u64,
    /// Tombstones found.
    pub tombstones: u64,
    /// Records that were begun and are not whole.
    pub torn_records: u64,
    /// The largest generation of a page found.
    pub generation_max: u64,
}

/// Rebuilds the log.
pub fn recover(config: LogConfig, scanned: Vec<ScannedSegment>) -> Recovered {
    let mut log = Log::new(config);
    let torn_records = scanned.iter().map(|segment| segment.torn).sum();
    let (mut kept, mut discard) = by_life(scanned);
    log.next_life = kept.last_key_value().map_or(1, |(life, _)| life + 1);
    discard.extend(surplus(&mut kept, log.config.segments_max as usize));

    let killed = tombstones(&kept);
    let mut found = Recovered { log, discard, segments: 0, tombstones: 0, torn_records, generation_max: 0 };
    let dirty_from = kept.len().saturating_sub(UNSYNCED_SEGMENTS);
    for (age, (life, segment)) in kept.into_iter().enumerate() {
        found.take(life, segment, &killed, age >= dirty_from);
    }
    found
}

/// Sorts by life; what has none is to be removed. So is a second segment of the same life: one of them is a copy.
fn by_life(scanned: Vec<ScannedSegment>) -> (BTreeMap<u64, ScannedSegment>, Vec<u32>) {
    let (mut kept, mut discard) = (BTreeMap::new(), Vec::new());
    for segment in scanned {
        match segment.life {
            Ok(life) => {
                if let Some(copy) = kept.insert(life, segment) {
                    discard.push(copy.segment);
                }
            }
            Err(_) => discard.push(segment.segment),
        }
    }
    (kept, discard)
}

/// Takes out what is more than `max`: those without records first, then the oldest.
fn surplus(kept: &mut BTreeMap<u64, ScannedSegment>, max: usize) -> Vec<u32> {
    let mut order: Vec<u64> = kept.keys().copied().collect();
    order.sort_by_key(|life| (!kept[life].records.is_empty(), *life));
    order.truncate(kept.len().saturating_sub(max));
    order.iter().filter_map(|life| kept.remove(life)).map(|segment| segment.segment).collect()
}

fn tombstones(kept: &BTreeMap<u64, ScannedSegment>) -> BTreeMap<PageId, u64> {
    let mut newest = BTreeMap::new();
    for record in kept.values().flat_map(|segment| &segment.records) {
        if let FoundRecord::Tombstone { id, number } = record {
            let known = newest.entry(*id).or_insert(*number);
            *known = (*known).max(*number);
        }
    }
    newest
}

impl Recovered {
    fn take(&mut self, life: u64, segment: ScannedSegment, killed: &BTreeMap<PageId, u64>, dirty: bool) {
        let ScannedSegment { segment, records, end, sealed, cut_short, .. } = segment;
        let log = &mut self.log;
        if records.is_empty() && !cut_short {
            log.segments.insert(segment, Segment::Free);
            return;
        }
        self.segments += 1;
        let mut rebuilt = Life { end, completed: u64::from(dirty), ..Life::new(life) };
        for record in records {
            match record {
                FoundRecord::Page { id, entry } => {
                    log.next_number = log.next_number.max(entry.number.saturating_add(1));
                    self.generation_max = self.generation_max.max(entry.generation);
                    let dead = killed.get(&id).is_some_and(|&tombstone| tombstone > entry.number);
                    if !dead && log.index.insert_newer(id, entry) {
                        rebuilt.pages.push((id, entry.number));
                    }
                }
                FoundRecord::Tombstone { number, .. } => {
                    self.tombstones += 1;
                    log.next_number = log.next_number.max(number.saturating_add(1));
                }
            }
        }
        log.segments.insert(segment, Segment::Sealed(rebuilt));
        log.by_life.insert(life, segment);
        if !sealed && !cut_short && end + BLOCK_BYTES as u64 <= log.config.segment_bytes {
            // So that the next start need not search behind the last record again.
            log.plan_seal(segment);
        }
    }
}
