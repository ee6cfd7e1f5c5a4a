//! Copies of pages from L1 to the device, with their checksums.
//!
//! A kernel reads a page in pinned memory of the host, and writes it to its place. It computes the
//! CRC-32 of each chunk that it has read. It reads a sealed page of a pinned L1 in place. Others
//! pass through staging memory.
//!
//! A page moves by steps, one for each range of layers that shares parts. So the first layers are
//! there while later ones are on their way.
//!
//! Invariants:
//! - The host compares the checksums of a step before it enqueues what reads the step's layers.
//! - The expected checksums are those that sealed the page. Only an open page has none: its
//!   checksums are those of its bytes at the start of the pass.
//! - Memory of a group of pages is used again only after the device has passed its copies.

use super::room::{Room, rounded};
use crate::batch::ForwardError;
use crate::kv::PageSlot;
use larder_format::{CHUNK_BYTES, PageGeometry};
use larder_kernels::cpu::{PageShape, PoolLayout};
use larder_kernels::device::{Device, DeviceError, Event, Place, Slice, Stream};
use larder_kernels::pages::{PageLocation, PageTransfer};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of pages in one piece of staging memory.
const STAGING_BYTES: usize = 16 << 20;
/// Pages that are on their way together. A pass that lacks more waits for all but the last of such
/// groups before it computes.
const GROUP_PAGES: usize = 1024;
/// Blocks of a copy: at most this number of multiprocessors leaves the computation.
const COPY_BLOCKS: u32 = 16;

/// Page that the device lacks, and the place that it gets.
pub(super) struct Missing<'a> {
    pub(super) chunk: usize,
    /// Number of the page in its sequence.
    pub(super) index: usize,
    pub(super) slot: &'a PageSlot,
    pub(super) place: u32,
}

/// Memory of two groups of pages in turn, and the shape of all copies.
pub(super) struct Loader {
    shape: PageShape,
    layout: PoolLayout,
    /// Keys and values of each layer in the pool of the device.
    tensors: Vec<Slice>,
    lanes: [Lane; 2],
}

/// Memory for one group.
struct Lane {
    staging: Room,
    tables: Room,
    /// Checksums of each step. Each has memory of its own, because the host reads it while the
    /// device writes that of later steps.
    found: Vec<Room>,
    /// Behind the last copies that use this memory, perhaps of an earlier pass.
    last: Option<Arc<dyn Event>>,
}

/// Copies that a pass has enqueued.
#[derive(Default)]
pub(super) struct Loads {
    groups: VecDeque<Group>,
    layers_per_step: usize,
}

struct Group {
    /// Chunk of the batch and number in its sequence, of each page.
    pages: Vec<(usize, usize)>,
    /// Expected checksums of each page.
    expected: Vec<u32>,
    steps: Vec<Step>,
}

struct Step {
    /// Behind the copies of this step and of all earlier ones.
    done: Arc<dyn Event>,
    /// Checksums of what the device has read, page by page.
    found: Slice,
    /// Numbers of these chunks among those of a page.
    chunks: Range<usize>,
}

/// Bytes of one layer in a page.
pub(super) fn layer_bytes(geometry: &PageGeometry) -> usize {
    geometry.page_bytes() / geometry.layers as usize
}

fn page_shape(geometry: &PageGeometry) -> PageShape {
    PageShape {
        tokens: geometry.page_tokens,
        layers: geometry.layers,
        kv_heads: geometry.kv_heads,
        head_bytes: geometry.head_dim * geometry.dtype.bytes() as u32,
        layer_tensors: 2,
        layers_per_part: geometry.layers_per_part,
        head_groups: geometry.head_groups,
    }
}

/// Number of checksums of each step of a page.
fn step_chunks(geometry: &PageGeometry) -> impl Iterator<Item = usize> + '_ {
    let groups = geometry.head_groups as usize;
    let of_part = move |part: usize| geometry.part_bytes(part).div_ceil(CHUNK_BYTES);
    (0..geometry.layer_groups()).map(move |step| (step * groups..(step + 1) * groups).map(of_part).sum::<usize>())
}

/// Pages of a group that passes through staging memory.
fn staged_pages(page_bytes: usize) -> usize {
    (STAGING_BYTES / page_bytes.max(1)).clamp(1, GROUP_PAGES)
}

/// Pinned memory of the host for copies to the device, in bytes at most.
pub(super) fn staging_bytes_max(geometry: &PageGeometry) -> usize {
    let page_bytes = geometry.page_bytes();
    let staging = rounded(staged_pages(page_bytes).saturating_mul(page_bytes));
    let tables = rounded(PageTransfer::table_bytes_max(&page_shape(geometry), GROUP_PAGES));
    let found: usize = step_chunks(geometry).map(|chunks| rounded(size_of::<u32>() * chunks * GROUP_PAGES)).sum();
    2 * (staging + tables + found)
}

impl Loader {
    /// `layers` are the layers of the device's pool, each with all places.
    pub(super) fn new(geometry: &PageGeometry, layers: &[Slice]) -> Result<Loader, DeviceError> {
        let shape = page_shape(geometry);
        let bytes = layer_bytes(geometry);
        let token_stride = u64::from(geometry.kv_heads) * u64::from(shape.head_bytes);
        let layout = PoolLayout {
            page_tokens: geometry.page_tokens,
            page_stride: bytes as u64,
            token_stride,
            head_stride: u64::from(shape.head_bytes),
        };
        let mut tensors = Vec::with_capacity(2 * layers.len());
        for layer in layers {
            // Keys, then values.
            tensors.extend([layer.clone(), layer.slice(bytes / 2..layer.bytes())?]);
        }
        let steps = geometry.layer_groups();
        let lane = || Lane {
            staging: Room::new(Place::Pinned),
            tables: Room::new(Place::Pinned),
            found: (0..steps).map(|_| Room::new(Place::Pinned)).collect(),
            last: None,
        };
        Ok(Loader { shape, layout, tensors, lanes: [lane(), lane()] })
    }

    /// Enqueues the copies of pages to their places.
    ///
    /// # Errors
    /// [`ForwardError::Damaged`] if a page of an earlier group differs from its checksums, and the
    /// errors of the device.
    pub(super) fn load(
        &mut self,
        device: &dyn Device,
        stream: &dyn Stream,
        missing: Vec<Missing<'_>>,
        deadline: Instant,
    ) -> Result<Loads, ForwardError> {
        let Loader { shape, layout, tensors, lanes } = self;
        let (plan, layers_per_step) = ((&*shape, &*layout, &tensors[..]), shape.layers_per_part as usize);
        let mut loads = Loads { groups: VecDeque::new(), layers_per_step };
        let in_place = |missing: &Missing<'_>| missing.source(device).is_some();
        // Pages in place last: they are more, and the pass overlaps with the last groups only.
        let (direct, staged): (Vec<_>, Vec<_>) = missing.into_iter().partition(in_place);
        let groups = staged.chunks(staged_pages(shape.page_bytes() as usize)).chain(direct.chunks(GROUP_PAGES));
        for (number, pages) in groups.enumerate() {
            // Before its memory is used again.
            if loads.groups.len() == 2
                && let Some(earlier) = loads.groups.pop_front()
            {
                (0..earlier.steps.len()).try_for_each(|step| earlier.check(step, deadline))?;
            }
            let lane = &mut lanes[number % 2];
            if let Some(last) = &lane.last {
                last.wait(deadline)?;
            }
            let group = lane.enqueue(device, stream, plan, pages)?;
            lane.last = group.steps.last().map(|step| Arc::clone(&step.done));
            loads.groups.push_back(group);
        }
        Ok(loads)
    }
}

impl Missing<'_> {
    /// The page in the memory of L1, if the device may read it there. The pass writes open pages.
    fn source(&self, device: &dyn Device) -> Option<Slice> {
        match self.slot {
            PageSlot::Sealed(page) => page.source(device),
            PageSlot::Open(_) => None,
        }
    }
}

impl Lane {
    fn enqueue(
        &mut self,
        device: &dyn Device,
        stream: &dyn Stream,
        (shape, layout, tensors): (&PageShape, &PoolLayout, &[Slice]),
        pages: &[Missing<'_>],
    ) -> Result<Group, ForwardError> {
        let page_bytes = shape.page_bytes() as usize;
        let staged = pages.iter().filter(|missing| missing.source(device).is_none()).count();
        let staging = self.staging.of(device, staged * page_bytes)?;
        let mut next = 0;
        let mut locations = Vec::with_capacity(pages.len());
        for missing in pages {
            let store = match missing.source(device) {
                Some(source) => source,
                None => {
                    let piece = staging.slice(next..next + page_bytes)?;
                    piece.write(missing.slot.page().as_ref())?;
                    next += page_bytes;
                    piece
                }
            };
            locations.push(PageLocation { store, engine_pages: vec![missing.place], first_token: 0 });
        }
        let tables = &mut self.tables;
        let in_room = |bytes: usize| tables.of(device, bytes);
        let transfer = PageTransfer::new_in(in_room, shape, layout, tensors, &locations, 0..shape.part_count())?;
        let mut group = Group { pages: Vec::new(), expected: Vec::new(), steps: Vec::new() };
        for missing in pages {
            let crcs = missing.slot.chunk_crcs();
            let (chunk, page) = (missing.chunk, missing.index);
            if crcs.len() != transfer.chunk_lengths().len() {
                return Err(ForwardError::Damaged { chunk, page });
            }
            group.pages.push((chunk, page));
            group.expected.extend_from_slice(&crcs);
        }
        for (step, room) in (0..).zip(&mut self.found) {
            let parts = step * shape.head_groups..(step + 1) * shape.head_groups;
            let chunks = transfer.chunks_of(&parts)?;
            let found = room.of(device, size_of::<u32>() * pages.len() * chunks.len())?;
            transfer.scatter_parts(stream, COPY_BLOCKS, parts, Some(&found))?;
            group.steps.push(Step { done: stream.record()?, found, chunks });
        }
        Ok(group)
    }
}

impl Loads {
    /// Waits for the copies of a layer, and compares their checksums. Costs nothing but for the
    /// first layer of a step. Call it for the layers in order.
    ///
    /// # Errors
    /// [`ForwardError::Damaged`] names a page of which the device has read other bytes than its
    /// checksums say. The others are errors of the device.
    pub(super) fn check(&self, layer: usize, deadline: Instant) -> Result<(), ForwardError> {
        if self.groups.is_empty() || !layer.is_multiple_of(self.layers_per_step) {
            return Ok(());
        }
        let step = layer / self.layers_per_step;
        self.groups.iter().try_for_each(|group| group.check(step, deadline))
    }
}

impl Group {
    fn check(&self, step: usize, deadline: Instant) -> Result<(), ForwardError> {
        let Step { done, found, chunks } = &self.steps[step];
        done.wait(deadline)?;
        let mut crcs = vec![0_u32; self.pages.len() * chunks.len()];
        found.read(bytemuck::cast_slice_mut(&mut crcs))?;
        let of_page = self.expected.len() / self.pages.len();
        let both = crcs.chunks_exact(chunks.len()).zip(self.expected.chunks_exact(of_page));
        for ((found, expected), &(chunk, page)) in both.zip(&self.pages) {
            if *found != expected[chunks.clone()] {
                return Err(ForwardError::Damaged { chunk, page });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::DevicePool;
    use super::*;
    use crate::batch::{Chunk, LogitRows};
    use crate::kv::{KvPool, SealedPage};
    use larder_format::KvDtype;
    use larder_kernels::cuda::{KernelSource, SOURCES};
    use larder_kernels::device::{download, emulated};
    use std::time::Duration;

    const PAGES: usize = 3;
    const GEOMETRY: PageGeometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 3,
        kv_heads: 2,
        head_dim: 64,
        page_tokens: 96,
        layers_per_part: 2,
        head_groups: 1,
    };

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// An emulated device with the kernels that move pages, with `replacement` in place of
    /// `original`.
    fn device_with(original: &str, replacement: &str) -> Arc<dyn Device> {
        let source = SOURCES.iter().find(|source| source.file == "pages.cu").unwrap();
        assert!(source.content.contains(original));
        let content: &'static str = Box::leak(source.content.replace(original, replacement).into_boxed_str());
        emulated::open_with(&[KernelSource { content, ..*source }], 1 << 30).unwrap()
    }

    /// Sealed pages of an L1, pinned by the device if `is_pinned`.
    fn pages(device: &Arc<dyn Device>, is_pinned: bool) -> Vec<PageSlot> {
        let pool = KvPool::for_device(GEOMETRY, PAGES, is_pinned.then(|| Arc::clone(device)));
        let mut value = 0.0;
        let page = || {
            let mut page = pool.allocate()?;
            page.fill_with(|| {
                value += 1.0;
                value
            });
            Some(PageSlot::Open(page).seal())
        };
        std::iter::from_fn(page).collect()
    }

    /// Loads the pages, and compares the checksums of all layers. Returns `true` if the bytes on
    /// the device are those of the pages.
    fn load(device: &Arc<dyn Device>, pages: &mut [PageSlot]) -> Result<bool, ForwardError> {
        let (compute, loads) = (device.stream("compute")?, device.stream("loads")?);
        let mut pool = DevicePool::new(&**device, &*compute, &GEOMETRY, PAGES, soon())?;
        let position = pages.len() * GEOMETRY.page_tokens as usize;
        // Without tokens of its own, the chunk has no page to write.
        let batch = [Chunk { tokens: &[], position, pages, logits: LogitRows::None }];
        let (places, copies) = pool.load(&**device, &*loads, &batch, soon())?;
        let checked = (0..GEOMETRY.layers as usize).try_for_each(|layer| copies.check(layer, soon()));
        // Also after an error, so that the pages are free afterwards.
        loads.wait(soon())?;
        checked?;
        let mut is_equal = true;
        for layer in 0..GEOMETRY.layers as usize {
            let bytes: Vec<u8> = download(&**device, &*loads, &pool.layer(layer)?, soon())?;
            let length = layer_bytes(&GEOMETRY);
            for (slot, &place) in batch[0].pages.iter().zip(&places[0]) {
                let expected: &[u8] = slot.page().as_ref();
                let place = &bytes[place as usize * length..][..length];
                is_equal &= place == &expected[layer * length..][..length];
            }
        }
        Ok(is_equal)
    }

    /// The slot with one bit of its page flipped after the seal.
    fn damaged(slot: &PageSlot, pool: &Arc<KvPool>, at: usize) -> PageSlot {
        let mut page = pool.allocate().unwrap();
        page.as_mut().copy_from_slice(slot.page().as_ref());
        page.as_mut()[at] ^= 1;
        PageSlot::Sealed(Arc::new(SealedPage::with_crcs(page, slot.chunk_crcs().into_owned())))
    }

    #[test]
    fn pages_arrive_and_damage_in_l1_is_found() {
        let device = device_with("", "");
        for is_pinned in [true, false] {
            let mut pages = pages(&device, is_pinned);
            assert_eq!(pages[0].page().source(&*device).is_some(), is_pinned);
            assert_eq!(load(&device, &mut pages), Ok(true));
            let pool = KvPool::for_device(GEOMETRY, 2, is_pinned.then(|| Arc::clone(&device)));
            for at in [0, GEOMETRY.page_bytes() / 2, GEOMETRY.page_bytes() - 1] {
                let intact = std::mem::replace(&mut pages[1], PageSlot::Open(pool.allocate().unwrap()));
                pages[1] = damaged(&intact, &pool, at);
                assert_eq!(load(&device, &mut pages), Err(ForwardError::Damaged { chunk: 0, page: 1 }), "byte {at}");
                pages[1] = intact;
            }
            // A table of checksums that does not fit the page.
            let mut page = pool.allocate().unwrap();
            page.as_mut().copy_from_slice(pages[2].page().as_ref());
            pages[2] = PageSlot::Sealed(Arc::new(SealedPage::with_crcs(page, vec![0])));
            assert_eq!(load(&device, &mut pages), Err(ForwardError::Damaged { chunk: 0, page: 2 }));
        }
    }

    /// The kernel reads one wrong bit, as a fault of the transfer would give.
    #[test]
    fn damage_on_the_way_is_found() {
        let read = "const Unit unit = TO_STORE ? *inside : *outside;";
        let flipped = "Unit unit = TO_STORE ? *inside : *outside;\n        \
                       if (page == 2 && offset + at == 0) *(unsigned char *)&unit ^= 1;";
        let device = device_with(read, flipped);
        let mut pages = pages(&device, true);
        assert_eq!(load(&device, &mut pages), Err(ForwardError::Damaged { chunk: 0, page: 2 }));
    }

    /// Negative control: bytes that are wrong where the kernel writes them pass its checksums, so
    /// the comparison in these tests can fail.
    #[test]
    fn comparison_of_these_tests_can_fail() {
        let device = device_with("*inside = unit;", "*inside = unit;\n            *(unsigned char *)inside ^= 1;");
        assert_eq!(load(&device, &mut pages(&device, true)), Ok(false));
    }
}
