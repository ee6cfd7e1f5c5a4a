//! Expiry: the search for pages whose time is over.
//!
//! Readers check the expiry of each page themselves, so a page that is found late costs its memory
//! for longer, and nothing else. A sweep goes through the shards of the index, part by part, and
//! begins anew after the last one. An order by expiry would take 20 bytes and more per page.

use super::read::RecordRef;
use super::shared_index::{CHUNK, SharedIndex};

/// Parts of a sweep through a large index. With two parts per second it takes a minute.
const PARTS: usize = 120;
/// Chunks of a part, at least. So a small index, of up to some 7000 pages, is searched as a whole
/// each time.
const PART_CHUNKS_MIN: usize = 8192 / CHUNK;
/// Chunks that one step looks at, at most. The step keeps changes of their shard waiting.
const STEP_CHUNKS: usize = 4096 / CHUNK;

/// Place of a sweep, between two steps.
///
/// The work is counted in chunks, not in pages: an index keeps the chunks of pages that left.
#[derive(Debug, Default)]
pub struct ExpirySweep {
    /// Next shard.
    shard: usize,
    /// Next chunk of that shard.
    chunk: usize,
    /// Shards of this part that were searched, and the chunks that they have.
    searched: usize,
    chunks: usize,
}

impl ExpirySweep {
    /// Begins the next part. The caller does this periodically.
    pub fn begin_part(&mut self, entries: &SharedIndex, now_unix_ms: u64) {
        entries.departed.set_time(now_unix_ms);
        self.searched = 0;
        self.chunks = 0;
    }

    /// Returns the expired pages of the next chunks, or `None` at the end of the part. The caller
    /// passes them to [`Log::drop_expired`](super::Log::drop_expired), and lets others work between
    /// two steps.
    pub fn next_step(&mut self, entries: &SharedIndex, now_unix_ms: u64) -> Option<Vec<RecordRef>> {
        if !entries.has_expiring() || self.is_over(entries) {
            return None;
        }
        let mut expired = Vec::new();
        let mut left = STEP_CHUNKS;
        while left > 0 && !self.is_over(entries) {
            let wanted = self.chunk..self.chunk + left;
            let (chunks, is_end) = entries.find_expired(self.shard, wanted, now_unix_ms, &mut expired);
            left -= chunks;
            self.chunks += chunks;
            self.chunk += chunks;
            if is_end {
                self.chunk = 0;
                self.shard = (self.shard + 1) % entries.shards();
                self.searched += 1;
            }
        }
        Some(expired)
    }

    /// Returns `true` between two shards, if the part has enough of them.
    fn is_over(&self, entries: &SharedIndex) -> bool {
        let shards = entries.shards();
        let is_enough = self.searched >= shards.div_ceil(PARTS) && self.chunks >= PART_CHUNKS_MIN;
        self.chunk == 0 && (is_enough || self.searched >= shards)
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::PackedEntry;
    use super::super::segment_reads::SegmentReads;
    use super::*;
    use larder_format::footer::PageSummary;
    use larder_format::{NamespaceId, PageId, PageKey};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    fn insert(index: &SharedIndex, number: u64, expires_unix_ms: u64) -> u32 {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        let page = PageSummary {
            id: PageId { namespace: NamespaceId([1; 32]), key: PageKey(key) },
            offset: 4096 * number,
            number,
            parent: PageKey::NONE,
            payload_bytes: 1,
            generation: 1,
            position: 0,
            expires_unix_ms,
        };
        index.insert(PackedEntry::new(index.fingerprint(&page.id), 0, 0, &page))
    }

    /// Numbers of the pages that a part finds.
    fn search(sweep: &mut ExpirySweep, index: &SharedIndex, now_unix_ms: u64) -> BTreeSet<u64> {
        let mut found = BTreeSet::new();
        sweep.begin_part(index, now_unix_ms);
        while let Some(expired) = sweep.next_step(index, now_unix_ms) {
            found.extend(expired.into_iter().map(|record| record.number));
        }
        found
    }

    #[test]
    fn sweep_finds_all_expired_pages_and_no_others() {
        const PAGES: u64 = 200_000;
        let index = SharedIndex::new(7, 1 << 20, Arc::new(SegmentReads::new(1)));
        let mut sweep = ExpirySweep::default();
        let never = insert(&index, PAGES, 0);
        assert!(search(&mut sweep, &index, u64::MAX).is_empty(), "no page expires");
        index.remove(never);
        let expiry = |number: u64| [0, 5000, 9000][number as usize % 3];
        let slots: Vec<u32> = (0..PAGES).map(|number| insert(&index, number, expiry(number))).collect();
        let first = search(&mut sweep, &index, 5000);
        assert!(first.len() as u64 > PAGES / 3 / PARTS as u64 && (first.len() as u64) < PAGES / 6, "a part of them");
        let mut all = first;
        (1..PARTS).for_each(|_| all.extend(search(&mut sweep, &index, 5000)));
        assert!(all.into_iter().eq((0..PAGES).filter(|number| number % 3 == 1)));
        for slot in slots {
            index.remove(slot);
        }
        assert!(!index.has_expiring());
    }

    #[test]
    fn part_of_an_index_that_has_lost_most_pages_is_as_small() {
        const PAGES: u64 = 200_000;
        const LEFT: u64 = 200;
        let index = SharedIndex::new(7, 1 << 20, Arc::new(SegmentReads::new(1)));
        let slots: Vec<u32> = (0..PAGES).map(|number| insert(&index, number, 5000)).collect();
        for &slot in &slots[LEFT as usize..] {
            index.remove(slot);
        }
        let mut sweep = ExpirySweep::default();
        let mut found = search(&mut sweep, &index, 5000);
        assert!(found.len() as u64 <= LEFT / 4, "the first part found {} pages", found.len());
        (1..PARTS).for_each(|_| found.extend(search(&mut sweep, &index, 5000)));
        assert_eq!(found.len() as u64, LEFT);
    }
}
