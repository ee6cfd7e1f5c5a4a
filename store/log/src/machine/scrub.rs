//! Enumeration of all pages in record order, a segment at a time, for the scrub.

use super::*;

/// Pages of one segment, as of one moment. The caller finds and sorts them once, without the log's
/// lock. Pages that move or go later are left out when their turn comes.
#[derive(Debug, Default)]
pub struct ScrubList {
    segment: u32,
    epoch: u64,
    /// Index slots of the pages, some of them twice. Empty once they are sorted.
    slots: Vec<u32>,
    /// The list has only pages whose record begins behind this offset.
    after: u64,
    /// Offset and index slot of each page, from `next` on those that are still to be scrubbed.
    pages: Vec<(u64, u32)>,
    next: usize,
}

impl ScrubList {
    /// Finds the pages in `index` and sorts them by offset. Must be called before
    /// [`Log::scrub_next`].
    pub fn sort(&mut self, index: &SharedIndex) {
        let page = |slot: u32| {
            let entry = index.get(slot);
            (entry.segment() == self.segment && entry.offset() > self.after).then(|| (entry.offset(), slot))
        };
        self.pages = std::mem::take(&mut self.slots).into_iter().filter_map(page).collect();
        self.pages.sort_unstable();
        // A slot that was reused for another page of the same segment is listed twice.
        self.pages.dedup();
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Position at which the next segment begins, for [`Log::scrub_list`].
    pub fn next_segment(&self) -> (u64, u64) {
        (self.epoch + 1, 0)
    }
}

impl Log {
    /// Lists the pages of a segment behind `after`: the epoch and offset of the last page that the
    /// caller had. It is the first segment from that epoch on, and may have no such page. Returns
    /// `None` behind the last segment. Copies four bytes per page of the segment.
    pub fn scrub_list(&self, after: Option<(u64, u64)>) -> Option<ScrubList> {
        let (after_epoch, after_offset) = after.unwrap_or((0, 0));
        let (epoch, segment) = self.segments.in_epoch_order(after_epoch..).next()?;
        let after = if epoch == after_epoch { after_offset } else { 0 };
        let slots = self.segments.epoch(segment).map_or(Vec::new(), |epoch| epoch.slots().to_vec());
        Some(ScrubList { segment, epoch, slots, after, pages: Vec::new(), next: 0 })
    }

    /// Takes the next pages of a list: at least one, and further ones up to `bytes_max` of records.
    /// Empty at the end of the list.
    pub fn scrub_next(&self, list: &mut ScrubList, bytes_max: u64) -> Vec<(RecordRef, Entry)> {
        let mut found = Vec::new();
        let mut bytes = 0;
        while let Some(&(offset, slot)) = list.pages.get(list.next) {
            if let Some(entry) = self.listed(list, offset, slot) {
                bytes += record_bytes(entry.payload_bytes as usize) as u64;
                if bytes > bytes_max && !found.is_empty() {
                    break;
                }
                found.push((RecordRef { number: entry.number, slot }, entry));
            }
            list.next += 1;
        }
        found
    }

    /// Takes the next pages of one namespace from a list, at most `max`. Fewer are the end of the
    /// list.
    pub fn next_of_namespace(
        &self,
        list: &mut ScrubList,
        namespace: &NamespaceId,
        max: usize,
    ) -> Vec<(RecordRef, Entry)> {
        let mut found = Vec::new();
        while found.len() < max
            && let Some(&(offset, slot)) = list.pages.get(list.next)
        {
            if let Some(entry) = self.listed(list, offset, slot)
                && self.index.namespace_of(slot) == namespace
            {
                found.push((RecordRef { number: entry.number, slot }, entry));
            }
            list.next += 1;
        }
        found
    }

    /// Number of pages of a namespace.
    pub fn pages_of(&self, namespace: &NamespaceId) -> u64 {
        self.index.namespace_pages(namespace)
    }

    /// Namespaces with pages, in the order of their ids, at most `max`.
    pub fn namespaces(&self, max: usize) -> Vec<NamespacePages> {
        self.index.namespaces_with_pages(max)
    }

    /// Entry of a listed page, if its record is still there.
    fn listed(&self, list: &ScrubList, offset: u64, slot: u32) -> Option<Entry> {
        self.index.entries.at(slot).filter(|entry| {
            let RecordPlace { segment, epoch, offset: at } = entry.place;
            (segment, epoch, at) == (list.segment, list.epoch, offset)
        })
    }
}
