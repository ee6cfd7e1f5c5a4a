//! Pages that a Get names, and their place in the answers.

use crate::page::Page;
use larder_format::{PageId, whole_chunks};
use larder_runtime::fail_point;
use larder_wire::{ArenaPage, PayloadLocation, Response, TierCode};
use std::ops::Range;

/// A page, or a range of one, in a Get.
pub(super) struct PageRequest {
    pub(super) index: u32,
    pub(super) id: PageId,
    pub(super) bytes: Option<Range<u32>>,
}

impl PageRequest {
    /// Returns the bytes that leave for this request, of a page of `page_bytes`. A range may be
    /// longer than its page, and is a miss then.
    pub(super) fn sent_bytes(&self, page_bytes: u64) -> u64 {
        self.bytes.as_ref().map_or(page_bytes, |bytes| page_bytes.min(bytes.len() as u64))
    }

    /// Returns the requested bytes of the page's payload, or `None` if they are not whole chunks.
    pub(super) fn range(&self, page: &Page) -> Option<Range<usize>> {
        let Some(requested) = &self.bytes else { return Some(0..page.payload.len()) };
        let chunks = whole_chunks(page.part_bytes(), requested).filter(|chunks| chunks == requested)?;
        if fail_point!("node.range-returns-other-chunks") {
            return Some(0..chunks.len());
        }
        Some(chunks.start as usize..chunks.end as usize)
    }

    /// Returns the location of a page in the arena, or `None` as for [`PageRequest::range`].
    pub(super) fn arena_page(&self, page: &Page) -> Option<ArenaPage> {
        let bytes = self.range(page)?;
        let offset = arena_offset(page, &bytes);
        let bytes = bytes.start as u32..bytes.end as u32;
        Some(ArenaPage { index: self.index, tier: TierCode::L2, meta: page.meta(), bytes, offset })
    }

    pub(super) fn answer(&self, page: &Page, tier: TierCode, location: PayloadLocation) -> Response {
        let index = self.index;
        let meta = page.meta();
        match &self.bytes {
            None => Response::Page { index, tier, meta, location },
            Some(bytes) => Response::Range { index, tier, meta, bytes: bytes.clone(), location },
        }
    }
}

pub(super) fn arena_offset(page: &Page, bytes: &Range<usize>) -> u64 {
    (page.payload.arena_offset() + bytes.start) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};

    #[test]
    fn range_counts_its_own_bytes() {
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let sent = |bytes| PageRequest { index: 0, id, bytes }.sent_bytes(1 << 20);
        assert_eq!(sent(None), 1 << 20);
        assert_eq!(sent(Some(65_536..131_072)), 65_536);
        assert_eq!(sent(Some(0..u32::MAX)), 1 << 20);
    }
}
