//! Going through all pages, a few at a time, for somebody who reads them again.

use super::*;
use std::ops::Bound;

impl Log {
    /// The next pages after `after` (life and offset of the last page that was had), in the order of lives and offsets:
    /// at least one, and no more than `bytes_max` of records if that is more. `None` behind the last. Looks at the pages
    /// of one segment, and at what is left of those that have none.
    pub fn scrub_next(&self, after: Option<(u64, u64)>, bytes_max: u64) -> Option<Vec<(PageId, Entry)>> {
        let (life, offset) = after.unwrap_or((0, 0));
        let rest = self.by_life.range((Bound::Included(life), Bound::Unbounded));
        rest.map(|(&found, &segment)| self.pages_behind(segment, if found == life { offset } else { 0 }))
            .find(|pages| !pages.is_empty())
            .map(|pages| self.first_bytes(&pages, bytes_max))
    }

    /// The slots of the pages of a segment whose records stand behind `offset`, in the order of their offsets.
    pub(super) fn pages_behind(&self, segment: u32, offset: u64) -> Vec<u32> {
        let Some(life) = self.segments.get(&segment).and_then(Segment::life) else { return Vec::new() };
        let is_there = |slot: &u32| {
            let stored = self.index.get(*slot);
            stored.segment == segment && stored.offset() > offset
        };
        let mut slots: Vec<u32> = life.slots.iter().copied().filter(is_there).collect();
        slots.sort_unstable_by_key(|&slot| self.index.get(slot).offset());
        // A slot that got another page of the same segment is listed twice.
        slots.dedup();
        slots
    }

    fn first_bytes(&self, slots: &[u32], bytes_max: u64) -> Vec<(PageId, Entry)> {
        let mut bytes = 0;
        let few_enough = |slot: &&u32| {
            let first = bytes == 0;
            bytes += self.index.get(**slot).record_bytes();
            first || bytes <= bytes_max
        };
        let few = slots.iter().take_while(few_enough);
        few.filter_map(|&slot| Some((self.index.id_of(slot), self.entry(slot)?))).collect()
    }
}
