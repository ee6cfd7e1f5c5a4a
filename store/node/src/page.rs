//! Sealed pages in DRAM.
//!
//! L2 has millions of small pages, so a page keeps each fact once and shares what its namespace
//! has in common. [`Page::meta`] puts the facts together for the log and for clients.

use crate::token_ids::TokenIds;
use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
use larder_memory::Slot;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Facts that all pages of a namespace share.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PageShape {
    namespace: NamespaceId,
    part_bytes: Vec<u32>,
}

/// A sealed page in DRAM. It never changes, so readers share it without a lock. Its memory returns
/// to the arena with the last reference.
#[derive(Debug)]
pub struct Page {
    key: PageKey,
    parent: PageKey,
    shape: Arc<PageShape>,
    generation: u64,
    pub payload: Slot,
    position: u32,
    /// CRC of the only chunk, unless `more` has all of them.
    first_crc: u32,
    more: Option<Box<MoreFacts>>,
}

/// Facts of pages that expire, have several chunks, or have token ids.
#[derive(Debug)]
struct MoreFacts {
    expires_unix_ms: u64,
    chunk_crcs: Vec<u32>,
    token_ids: Option<Arc<TokenIds>>,
}

// With the two counts of its `Arc` and the allocator's header this is 128 bytes.
const _: () = assert!(size_of::<Page>() <= 104);

impl Page {
    pub fn id(&self) -> PageId {
        PageId { namespace: self.shape.namespace, key: self.key }
    }

    /// Returns `true` if this is a put of that page. Compares without a copy of the id.
    pub(crate) fn is(&self, id: &PageId) -> bool {
        self.key == id.key && self.shape.namespace == id.namespace
    }

    /// Number of the put, unique on a node and growing.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn parent(&self) -> PageKey {
        self.parent
    }

    pub(crate) fn position(&self) -> u32 {
        self.position
    }

    /// Expiry in Unix milliseconds. 0 means never.
    pub(crate) fn expires_unix_ms(&self) -> u64 {
        self.more.as_ref().map_or(0, |more| more.expires_unix_ms)
    }

    pub(crate) fn part_bytes(&self) -> &[u32] {
        &self.shape.part_bytes
    }

    /// Bytes of the slot, which is at least as large as the payload.
    pub(crate) fn bytes(&self) -> u32 {
        u32::try_from(self.payload.capacity()).unwrap_or(u32::MAX)
    }

    /// Ids of the page's tokens, if its writer gave them and the node had room for them.
    pub(crate) fn token_ids(&self) -> Option<&Arc<TokenIds>> {
        self.more.as_ref()?.token_ids.as_ref()
    }

    /// Returns the page with token ids, before others share it.
    pub(crate) fn with_token_ids(mut self, token_ids: Option<Arc<TokenIds>>) -> Page {
        if token_ids.is_some() {
            let first_crc = self.first_crc;
            let more = self.more.get_or_insert_with(|| {
                Box::new(MoreFacts { expires_unix_ms: 0, chunk_crcs: vec![first_crc], token_ids: None })
            });
            more.token_ids = token_ids;
        }
        self
    }

    /// Returns all facts about the page, as L3 stores them. Allocates three tables.
    pub(crate) fn meta_with_token_ids(&self) -> PageMeta {
        let token_ids = self.token_ids().map_or_else(Vec::new, |ids| ids.as_slice().to_vec());
        PageMeta { token_ids, ..self.meta() }
    }

    /// Returns all facts about the page but its token ids, which no reader needs. Allocates two
    /// tables.
    pub fn meta(&self) -> PageMeta {
        PageMeta {
            id: self.id(),
            parent: self.parent,
            position: self.position,
            generation: self.generation,
            expires_unix_ms: self.expires_unix_ms(),
            part_bytes: self.shape.part_bytes.clone(),
            chunk_crcs: self.more.as_ref().map_or_else(|| vec![self.first_crc], |more| more.chunk_crcs.clone()),
            token_ids: Vec::new(),
        }
    }
}

/// Shapes of the pages in DRAM, by namespace.
#[derive(Debug, Default)]
pub(crate) struct PageShapes {
    /// A leaf lock: see the lock order in [`crate::tiers`].
    table: Mutex<ShapeTable>,
}

#[derive(Debug, Default)]
struct ShapeTable {
    /// Latest shape of each namespace. A namespace has one shape, unless a client breaks the rules.
    shapes: BTreeMap<NamespaceId, Arc<PageShape>>,
    /// Length at which shapes without pages are removed.
    cleanup_at: usize,
}

/// A table of fewer shapes keeps those without pages.
const SHAPES_MIN: usize = 64;

impl PageShapes {
    /// Makes a page of its facts and its payload, without token ids.
    pub(crate) fn page(&self, meta: PageMeta, payload: Slot) -> Page {
        let PageMeta { id, parent, position, generation, expires_unix_ms, part_bytes, chunk_crcs, token_ids: _ } = meta;
        let (first_crc, more) = match chunk_crcs[..] {
            [crc] if expires_unix_ms == 0 => (crc, None),
            _ => (0, Some(Box::new(MoreFacts { expires_unix_ms, chunk_crcs, token_ids: None }))),
        };
        let shape = self.shape(id.namespace, part_bytes);
        Page { key: id.key, parent, shape, generation, payload, position, first_crc, more }
    }

    fn shape(&self, namespace: NamespaceId, part_bytes: Vec<u32>) -> Arc<PageShape> {
        let mut table = self.table.lock();
        if let Some(shape) = table.shapes.get(&namespace).filter(|shape| shape.part_bytes == part_bytes) {
            return shape.clone();
        }
        // At double the length that a clean-up left: its cost per new shape is constant.
        if table.shapes.len() >= table.cleanup_at.max(SHAPES_MIN) {
            table.shapes.retain(|_, shape| Arc::strong_count(shape) > 1);
            table.cleanup_at = 2 * table.shapes.len();
        }
        let shape = Arc::new(PageShape { namespace, part_bytes });
        table.shapes.insert(namespace, shape.clone());
        shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token_ids::test_memory;
    use larder_memory::Arena;

    #[test]
    fn a_page_returns_the_facts_it_was_made_of() {
        let arena = Arena::new(1 << 20).unwrap();
        let shapes = PageShapes::default();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        for (parts, expires_unix_ms) in [(vec![100], 0), (vec![100], 7), (vec![70_000, 30], 0)] {
            let slot = arena.allocate(parts.iter().sum::<u32>() as usize).unwrap();
            let meta = PageMeta::describe(id, PageKey([3; 32]), 5, parts, &slot);
            let meta = PageMeta { generation: 9, expires_unix_ms, ..meta };
            let page = shapes.page(meta.clone(), slot.freeze());
            assert_eq!(page.meta(), meta);
            assert!(page.is(&id) && page.meta().verify(&id, &page.payload).is_ok());
        }
    }

    #[test]
    fn token_ids_are_facts_for_l3_only() {
        let arena = Arena::new(1 << 20).unwrap();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let memory = test_memory();
        for expires_unix_ms in [0, 7] {
            let slot = arena.allocate(100).unwrap();
            let meta = PageMeta::describe(id, PageKey([3; 32]), 5, vec![100], &slot);
            let meta = PageMeta { expires_unix_ms, ..meta };
            let page = PageShapes::default().page(meta.clone(), slot.freeze());
            let page = page.with_token_ids(memory.keep(&meta.id.namespace, vec![4, 5]));
            assert_eq!(page.meta(), meta);
            assert_eq!(page.meta_with_token_ids(), PageMeta { token_ids: vec![4, 5], ..meta });
        }
    }

    #[test]
    fn shapes_without_pages_are_removed() {
        let arena = Arena::new(1 << 20).unwrap();
        let shapes = PageShapes::default();
        let page = |number: u32| {
            let mut namespace = [0; 32];
            namespace[..4].copy_from_slice(&number.to_be_bytes());
            let id = PageId { namespace: NamespaceId(namespace), key: PageKey([2; 32]) };
            let slot = arena.allocate(1).unwrap();
            shapes.page(PageMeta::describe(id, PageKey::NONE, 0, vec![1], &slot), slot.freeze())
        };
        let kept: Vec<Page> = (0..10).map(page).collect();
        (10..1000).for_each(|number| drop(page(number)));
        assert!(shapes.table.lock().shapes.len() <= SHAPES_MIN);
        assert!(Arc::ptr_eq(&kept[3].shape, &page(3).shape));
    }
}
