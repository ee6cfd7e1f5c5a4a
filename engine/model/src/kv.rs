//! Pages of keys and values in memory: the engine's L1.
//!
//! What must always hold: a [`KvPage`] is exactly `geometry.page_bytes()` bytes in the layout documented at
//! [`PageGeometry`], so its bytes *are* the page's payload in the store. A pool never hands out more pages than its
//! capacity; a page's buffer is handed out again only after the page was dropped, and may then still hold old bytes.

use larder_format::{KvDtype, PageGeometry};
use larder_kernels::cpu::HeadPlace;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Unit of a page buffer: a cache line, so that every buffer begins at one.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

const LINE_BYTES: usize = size_of::<Line>();

/// A bounded number of equal pages. Buffers are made when first needed (so an idle pool costs nothing) and kept.
pub struct KvPool {
    geometry: PageGeometry,
    capacity_pages: usize,
    state: Mutex<PoolState>,
}

struct PoolState {
    in_use: usize,
    spare: Vec<Box<[Line]>>,
}

impl KvPool {
    /// A pool of at most `capacity_pages` pages of `geometry`.
    pub fn new(geometry: PageGeometry, capacity_pages: usize) -> Arc<KvPool> {
        let state = Mutex::new(PoolState { in_use: 0, spare: Vec::new() });
        Arc::new(KvPool { geometry, capacity_pages, state })
    }

    /// Takes a page, or `None` if all are in use. What it holds is not defined.
    pub fn allocate(self: &Arc<Self>) -> Option<KvPage> {
        let spare = {
            let mut state = self.lock();
            if state.in_use == self.capacity_pages {
                return None;
            }
            state.in_use += 1;
            state.spare.pop()
        };
        let lines = self.geometry.page_bytes().div_ceil(LINE_BYTES);
        let buffer = spare.unwrap_or_else(|| vec![Line([0; 16]); lines].into_boxed_slice());
        Some(KvPage { pool: Arc::clone(self), buffer })
    }

    /// Pages that [`allocate`](Self::allocate) can still hand out.
    pub fn free_pages(&self) -> usize {
        self.capacity_pages - self.lock().in_use
    }

    /// Most pages in use at once.
    pub fn capacity_pages(&self) -> usize {
        self.capacity_pages
    }

    /// Shape of every page.
    pub fn geometry(&self) -> &PageGeometry {
        &self.geometry
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, PoolState> {
        // Nothing that holds the lock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvPool({} of {} pages free)", self.free_pages(), self.capacity_pages)
    }
}

/// Keys and values of `page_tokens` consecutive tokens in all layers. The buffer goes back to its pool on drop.
pub struct KvPage {
    pool: Arc<KvPool>,
    buffer: Box<[Line]>,
}

impl KvPage {
    /// Shape of the page.
    pub fn geometry(&self) -> &PageGeometry {
        &self.pool.geometry
    }

    /// The page as `f32`. Meaningful for pages of [`KvDtype::F32`] only.
    pub fn as_f32(&self) -> &[f32] {
        let values = bytemuck::cast_slice(&self.buffer);
        &values[..self.geometry().page_bytes() / 4]
    }

    /// As [`as_f32`](Self::as_f32), for writing.
    pub fn as_f32_mut(&mut self) -> &mut [f32] {
        let len = self.geometry().page_bytes() / 4;
        &mut bytemuck::cast_slice_mut(&mut self.buffer)[..len]
    }
}

impl AsRef<[u8]> for KvPage {
    fn as_ref(&self) -> &[u8] {
        let len = self.geometry().page_bytes();
        &bytemuck::cast_slice(&self.buffer)[..len]
    }
}

impl AsMut<[u8]> for KvPage {
    fn as_mut(&mut self) -> &mut [u8] {
        let len = self.geometry().page_bytes();
        &mut bytemuck::cast_slice_mut(&mut self.buffer)[..len]
    }
}

impl Drop for KvPage {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut state = self.pool.lock();
        state.in_use -= 1;
        state.spare.push(buffer);
    }
}

impl fmt::Debug for KvPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvPage({} bytes)", self.geometry().page_bytes())
    }
}

/// One page of a sequence, as the forward pass sees it.
#[derive(Debug)]
pub enum PageSlot {
    /// Still being filled, by this sequence alone.
    Open(KvPage),
    /// Full and immutable, perhaps shared with other sequences.
    Sealed(Arc<KvPage>),
}

impl PageSlot {
    /// The page, for reading.
    pub fn page(&self) -> &KvPage {
        match self {
            PageSlot::Open(page) => page,
            PageSlot::Sealed(page) => page,
        }
    }

    /// Makes an open page immutable; a sealed one stays as it is.
    pub fn seal(self) -> PageSlot {
        match self {
            PageSlot::Open(page) => PageSlot::Sealed(Arc::new(page)),
            sealed => sealed,
        }
    }
}

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvKind {
    /// Keys.
    Key = 0,
    /// Values.
    Value = 1,
}

/// Finds `kind` of KV head `head` in layer `layer` of a page of `geometry`; the layout itself is documented there.
pub fn head_place(geometry: &PageGeometry, layer: usize, kind: KvKind, head: usize) -> HeadPlace {
    let head_dim = geometry.head_dim as usize;
    let group_heads = (geometry.kv_heads / geometry.head_groups) as usize;
    let layer_group = layer / geometry.layers_per_part as usize;
    let part = layer_group * geometry.head_groups as usize + head / group_heads;
    let part_start: usize = (0..part).map(|p| geometry.part_bytes(p)).sum::<usize>() / geometry.dtype.bytes();
    let layer_in_part = layer % geometry.layers_per_part as usize;
    let stride = group_heads * head_dim;
    let block = (2 * layer_in_part + kind as usize) * geometry.page_tokens as usize * stride;
    HeadPlace { start: part_start + block + (head % group_heads) * head_dim, stride }
}

/// Whether this build computes on pages of `geometry`.
pub fn is_computable(geometry: &PageGeometry) -> bool {
    geometry.dtype == KvDtype::F32 && cfg!(target_endian = "little")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(layers_per_part: u32, head_groups: u32) -> PageGeometry {
        PageGeometry {
            dtype: KvDtype::F32,
            layers: 5,
            kv_heads: 4,
            head_dim: 6,
            page_tokens: 3,
            layers_per_part,
            head_groups,
        }
    }

    #[test]
    fn the_pool_is_bounded_and_takes_pages_back() {
        let pool = KvPool::new(geometry(2, 1), 2);
        let first = pool.allocate().unwrap();
        let second = pool.allocate().unwrap();
        assert!(pool.allocate().is_none());
        assert_eq!(pool.free_pages(), 0);
        drop(first);
        assert_eq!(pool.free_pages(), 1);
        let sealed = PageSlot::Open(pool.allocate().unwrap()).seal();
        drop((second, sealed));
        assert_eq!(pool.free_pages(), 2);
    }

    #[test]
    fn a_page_is_the_payload() {
        let pool = KvPool::new(geometry(2, 1), 1);
        let mut page = pool.allocate().unwrap();
        assert_eq!(page.as_ref().len(), pool.geometry().page_bytes());
        page.as_f32_mut()[7] = 1.5;
        assert_eq!(page.as_ref()[28..32], 1.5f32.to_le_bytes());
        page.as_mut()[28..32].copy_from_slice(&2.5f32.to_le_bytes());
        assert_eq!(page.as_f32()[7], 2.5);
    }

    #[test]
    fn heads_tile_every_layout_in_the_documented_order() {
        for (layers_per_part, head_groups) in [(1, 1), (2, 1), (2, 2), (5, 4), (3, 2)] {
            let g = geometry(layers_per_part, head_groups);
            let mut expected = 0;
            // The documented order: part by part, layer by layer, K then V, token by token, head by head.
            for part in 0..g.part_count() {
                for layer in g.part_layers(part) {
                    for kind in [KvKind::Key, KvKind::Value] {
                        for slot in 0..g.page_tokens as usize {
                            for head in g.part_heads(part) {
                                let place = head_place(&g, layer, kind, head);
                                assert_eq!(place.start + slot * place.stride, expected);
                                expected += g.head_dim as usize;
                            }
                        }
                    }
                }
            }
            assert_eq!(expected * 4, g.page_bytes());
        }
    }
}
