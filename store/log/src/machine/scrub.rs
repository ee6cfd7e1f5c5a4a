//! Enumeration of all pages in record order, a few at a time, for the scrub.

use super::*;

impl Log {
    /// The pages after `after`, the epoch and offset of the last page that the caller had, in the
    /// order of epochs and offsets. Returns at least one page, and further ones up to `bytes_max`
    /// of records. Returns `None` after the last page. All pages of an answer are in one segment.
    pub fn scrub_next(&self, after: Option<(u64, u64)>, bytes_max: u64) -> Option<Vec<(PageId, Entry)>> {
        let (after_epoch, after_offset) = after.unwrap_or((0, 0));
        self.segments
            .in_epoch_order(after_epoch..)
            .map(|(epoch, segment)| self.slots_after(segment, if epoch == after_epoch { after_offset } else { 0 }))
            .find(|slots| !slots.is_empty())
            .map(|slots| self.entries_up_to(&slots, bytes_max))
    }

    /// Slots of the pages of a segment whose records follow `offset`, in the order of their
    /// offsets.
    pub(super) fn slots_after(&self, segment: u32, offset: u64) -> Vec<u32> {
        let Some(epoch) = self.segments.epoch(segment) else { return Vec::new() };
        let is_after = |slot: &u32| {
            let entry = self.index.get(*slot);
            entry.segment == segment && entry.offset() > offset
        };
        let mut slots: Vec<u32> = epoch.slots().iter().copied().filter(is_after).collect();
        slots.sort_unstable_by_key(|&slot| self.index.get(slot).offset());
        // A slot that was reused for another page of the same segment is listed twice.
        slots.dedup();
        slots
    }

    fn entries_up_to(&self, slots: &[u32], bytes_max: u64) -> Vec<(PageId, Entry)> {
        let mut bytes = 0;
        let fits = |slot: &&u32| {
            let is_first = bytes == 0;
            bytes += self.index.get(**slot).record_bytes();
            is_first || bytes <= bytes_max
        };
        let fitting = slots.iter().take_while(fits);
        fitting.filter_map(|&slot| Some((self.index.id_of(slot), self.entry(slot)?))).collect()
    }
}
