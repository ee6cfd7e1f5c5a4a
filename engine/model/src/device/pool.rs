//! Pages of keys and values in the memory of a device.
//!
//! The pages of L1 lie in the memory of the host. The device has copies of those that passes use.
//! It writes each new row to both, so a copy can be dropped at any time.
//!
//! Layout: layer by layer, and there place by place. A place of a layer holds the keys of a page's
//! tokens, then the values: the bytes that the page in L1 has for the layer. So a copy that reads
//! one layer and a kernel that writes the next one do not meet.

use super::loads::{Loader, Loads, Missing, layer_bytes};
use super::places::Places;
use crate::batch::{Chunk, ForwardError};
use crate::kv::PageSlot;
use larder_format::{KvDtype, PageGeometry};
use larder_kernels::cpu::HeadLayout;
use larder_kernels::device::{Device, DeviceError, Memory, Place, Slice, Stream, upload};
use larder_kernels::launch::{DevicePages, Element, head_starts};
use std::collections::HashSet;
use std::time::Instant;

pub(super) struct DevicePool {
    geometry: PageGeometry,
    memory: Memory,
    places: Places,
    /// First elements of the heads of a layer in a place.
    starts: Slice,
    token_stride: usize,
    loader: Loader,
}

/// Returns the elements of pages as the kernels name them.
fn element(dtype: KvDtype) -> Result<Element, DeviceError> {
    match dtype {
        KvDtype::F32 => Ok(Element::F32),
        KvDtype::F16 => Ok(Element::F16),
        KvDtype::Bf16 => Ok(Element::Bf16),
        KvDtype::Opaque => Err(DeviceError::Shape("pages of an unknown type have no kernels")),
    }
}

/// Number of distinct pages that a batch reads and writes.
pub(super) fn distinct_pages(batch: &[Chunk<'_>]) -> usize {
    let versions = batch.iter().flat_map(|chunk| used_pages(chunk).map(|slot| slot.page().version()));
    versions.collect::<HashSet<_>>().len()
}

fn used_pages<'a>(chunk: &'a Chunk<'_>) -> impl Iterator<Item = &'a PageSlot> {
    let used = chunk.end().div_ceil(chunk.geometry().page_tokens as usize);
    chunk.pages[..used].iter()
}

impl DevicePool {
    /// Allocates places for `count` pages.
    pub(super) fn new(
        device: &dyn Device,
        stream: &dyn Stream,
        geometry: &PageGeometry,
        count: usize,
        deadline: Instant,
    ) -> Result<DevicePool, DeviceError> {
        let (kv_heads, head_dim) = (geometry.kv_heads as usize, geometry.head_dim as usize);
        let (tokens, stride) = (geometry.page_tokens as usize, kv_heads * head_dim);
        let bytes = count.checked_mul(geometry.page_bytes()).filter(|_| count <= pages_max(geometry));
        let memory = device.allocate(Place::Device, bytes.ok_or(DeviceError::OutOfMemory { wanted: usize::MAX })?)?;
        let [keys, values]: [Vec<HeadLayout>; 2] = [0, tokens * stride]
            .map(|start| (0..kv_heads).map(|head| HeadLayout { start: start + head * head_dim, stride }).collect());
        let (starts, token_stride) = head_starts(&keys, &values)?;
        let starts = upload(device, stream, &starts, deadline)?.all();
        let layer = |layer: usize| layer_slice(&memory, geometry, count, layer);
        let layers = (0..geometry.layers as usize).map(layer).collect::<Result<Vec<_>, _>>()?;
        Ok(DevicePool {
            geometry: *geometry,
            places: Places::new(count as u32),
            starts,
            token_stride,
            loader: Loader::new(geometry, &layers)?,
            memory,
        })
    }

    pub(super) fn geometry(&self) -> &PageGeometry {
        &self.geometry
    }

    /// Number of places.
    pub(super) fn count(&self) -> usize {
        self.places.count()
    }

    /// Forgets all content. Call it after a pass that failed.
    pub(super) fn clear(&mut self) {
        self.places.clear();
    }

    /// All places of one layer.
    pub(super) fn layer(&self, layer: usize) -> Result<Slice, DeviceError> {
        layer_slice(&self.memory, &self.geometry, self.places.count(), layer)
    }

    /// Type of keys and values.
    pub(super) fn element(&self) -> Result<Element, DeviceError> {
        element(self.geometry.dtype)
    }

    /// The pages of one layer, as kernels take them. `pool` is that of [`layer`](Self::layer).
    pub(super) fn pages<'a>(&'a self, pool: &'a Slice) -> Result<DevicePages<'a>, DeviceError> {
        Ok(DevicePages {
            element: self.element()?,
            pool,
            page_elements: layer_bytes(&self.geometry) / self.geometry.dtype.bytes(),
            page_tokens: self.geometry.page_tokens as usize,
            starts: &self.starts,
            token_stride: self.token_stride,
        })
    }

    /// Gives every page of a batch a place, chunk by chunk. Enqueues copies of the pages with
    /// earlier tokens that the device lacks. [`Loads::check`] tells when a layer is there.
    ///
    /// # Errors
    /// Those of [`Loader::load`], or if the pages of the batch are more than the places.
    pub(super) fn load(
        &mut self,
        device: &dyn Device,
        loads: &dyn Stream,
        batch: &[Chunk<'_>],
        deadline: Instant,
    ) -> Result<(Vec<Vec<u32>>, Loads), ForwardError> {
        self.places.begin_pass();
        let mut missing = Vec::new();
        let mut places = Vec::with_capacity(batch.len());
        for (number, chunk) in batch.iter().enumerate() {
            let mut own = Vec::new();
            for (index, slot) in used_pages(chunk).enumerate() {
                let taken = self.places.take(slot.page().version());
                let wanted = self.geometry.page_bytes();
                let (place, is_there) = taken.ok_or(DeviceError::OutOfMemory { wanted })?;
                own.push(place);
                if !is_there && index * (self.geometry.page_tokens as usize) < chunk.position {
                    missing.push(Missing { chunk: number, index, slot, place });
                }
            }
            places.push(own);
        }
        Ok((places, self.loader.load(device, loads, missing, deadline)?))
    }
}

/// All places of one layer in the memory of a pool with `count` places.
fn layer_slice(memory: &Memory, geometry: &PageGeometry, count: usize, layer: usize) -> Result<Slice, DeviceError> {
    let bytes = count * layer_bytes(geometry);
    memory.slice(layer * bytes..(layer + 1) * bytes)
}

/// Most pages of which the kernels can number the tokens.
pub(super) fn pages_max(geometry: &PageGeometry) -> usize {
    i32::MAX as usize / (geometry.page_tokens as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::LogitRows;
    use crate::kv::{KvPool, SealedPage};
    use larder_kernels::cuda::SOURCES;
    use larder_kernels::device::emulated;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn pages_of_the_next_pass_wait_for_the_copies_of_the_last() {
        let geometry = PageGeometry {
            dtype: KvDtype::F32,
            layers: 2,
            kv_heads: 1,
            head_dim: 8,
            page_tokens: 1,
            layers_per_part: 1,
            head_groups: 1,
        };
        let source = SOURCES.iter().find(|source| source.file == "pages.cu").unwrap();
        let device = emulated::open_with(&[*source], 1 << 30).unwrap();
        let (compute, loads) = (device.stream("compute").unwrap(), device.stream("loads").unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut pool = DevicePool::new(&*device, &*compute, &geometry, 4, deadline).unwrap();
        let kv = KvPool::new(geometry, 3);
        let mut pages: Vec<PageSlot> = std::iter::from_fn(|| kv.allocate())
            .zip(1u8..)
            .map(|(mut page, byte)| {
                page.as_mut().fill(byte);
                PageSlot::Sealed(Arc::new(SealedPage::compute(page)))
            })
            .collect();
        // The copies of the first pass are still to run when the second one begins.
        let slow = device.allocate(Place::Device, 64 << 20).unwrap();
        loads.fill(&slow.all(), 1).unwrap();
        let (first, second) = pages.split_at_mut(1);
        let mut places = Vec::new();
        let mut last = None;
        for pages in [first, second] {
            // Without tokens of its own, the chunk has no page to write.
            let chunk = Chunk { tokens: &[], position: pages.len(), pages, logits: LogitRows::None };
            // Nothing waits for the copies of the first pass, as after a pass that failed.
            let (own, copies) = pool.load(&*device, &*loads, &[chunk], deadline).unwrap();
            places.extend(own.concat());
            last = Some(copies);
        }
        (0..2).for_each(|layer| last.as_ref().unwrap().check(layer, deadline).unwrap());
        assert_eq!(places.len(), 3);
        let copy = device.allocate(Place::Pinned, layer_bytes(&geometry)).unwrap();
        for layer in 0..2 {
            for (place, byte) in places.iter().zip(1u8..) {
                let at = *place as usize * copy.bytes();
                let place = pool.layer(layer).unwrap().slice(at..at + copy.bytes()).unwrap();
                loads.copy(&copy.all(), &place).unwrap();
                loads.wait(deadline).unwrap();
                let mut bytes = vec![0; copy.bytes()];
                copy.all().read(&mut bytes).unwrap();
                assert!(bytes.iter().all(|found| *found == byte), "layer {layer}: {bytes:?} instead of {byte}");
            }
        }
    }
}
