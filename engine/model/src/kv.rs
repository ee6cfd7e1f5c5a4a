//! Pages of keys and values in memory: the engine's L1.
//!
//! Invariants:
//! - A [`KvPage`] is exactly `geometry.page_bytes()` bytes in the layout of [`PageGeometry`]. Its
//!   bytes are the payload of the page in the store, without conversion.
//! - A pool hands out at most `capacity_pages` pages at a time.
//! - A buffer returns to the pool when its page is dropped. The next owner may find old bytes in
//!   it.
//! - A buffer that a device reads is not written: only sealed pages are read in place, and the pool
//!   hands out no buffer that a device may still read.
//! - The checksums of a [`SealedPage`] are as old as its content. Nothing computes them again from
//!   bytes that have lain in memory since: a put of the page uses them too.

mod transfer;

use crate::page_memory::{CACHE_LINE_BYTES, PageBuffer, PageMemory};
use half::{bf16, f16};
use larder_format::{KvDtype, Mismatch, PageGeometry, PageMeta, PageOrigin, PayloadVerifier, chunk_crcs};
use larder_kernels::cpu::{AttentionElement, HeadLayout, KvElement};
use larder_kernels::device::{Device, PinnedBytes, Slice};
use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Element that pages of [`DTYPE`](Self::DTYPE) hold.
pub(crate) trait PageElement: AttentionElement {
    const DTYPE: KvDtype;
}

impl PageElement for f32 {
    const DTYPE: KvDtype = KvDtype::F32;
}

impl PageElement for f16 {
    const DTYPE: KvDtype = KvDtype::F16;
}

impl PageElement for bf16 {
    const DTYPE: KvDtype = KvDtype::Bf16;
}

/// Evaluates an expression with `$element` as the Rust type of a [`KvDtype`].
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            larder_format::KvDtype::F32 => {
                type $element = f32;
                $body
            }
            larder_format::KvDtype::F16 => {
                type $element = half::f16;
                $body
            }
            larder_format::KvDtype::Bf16 => {
                type $element = half::bf16;
                $body
            }
            larder_format::KvDtype::Opaque => unreachable!("a model computes with numbers"),
        }
    };
}
pub(crate) use with_element;

/// Number of the next page that any pool hands out.
static NEXT_PAGE: AtomicU64 = AtomicU64::new(0);

/// Identity of a page and of its content, as far as the host has written it. Unique in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PageVersion {
    page: u64,
    writes: u64,
}

/// Memory of one page.
#[derive(Default)]
enum Buffer {
    /// The page has given its buffer back.
    #[default]
    Gone,
    Plain(PageBuffer),
    /// Memory that the device of the model reads by itself.
    Pinned(PinnedBytes),
}

impl Buffer {
    fn bytes(&self) -> &[u8] {
        match self {
            Buffer::Gone => &[],
            Buffer::Plain(buffer) => buffer.bytes(),
            Buffer::Pinned(pinned) => pinned.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::Gone => &mut [],
            Buffer::Plain(buffer) => buffer.bytes_mut(),
            Buffer::Pinned(pinned) => match pinned.bytes_mut() {
                Some(bytes) => bytes,
                None => unreachable!("a device reads sealed pages only, and the pool waits for their end"),
            },
        }
    }

    /// Returns `true` if no device reads the buffer.
    fn is_free(&mut self) -> bool {
        match self {
            Buffer::Gone | Buffer::Plain(_) => true,
            Buffer::Pinned(pinned) => pinned.bytes_mut().is_some(),
        }
    }
}

/// Bounded pool of equal pages. Allocates each buffer on first use and keeps it, so an idle pool
/// costs nothing.
pub struct KvPool {
    geometry: PageGeometry,
    capacity_pages: usize,
    /// Device that reads the pages.
    device: Option<Arc<dyn Device>>,
    /// The device has refused to pin a page, so further buffers are not pinned.
    has_refused: AtomicBool,
    /// The system has refused memory for a page, and the log says so.
    has_no_memory: AtomicBool,
    /// Length of each part of a page in bytes. Kept, because every checksum needs it.
    part_bytes: Box<[u32]>,
    state: Mutex<PoolState>,
    /// Memory of the pages that are not pinned.
    memory: Mutex<PageMemory>,
}

struct PoolState {
    in_use: usize,
    spare: Vec<Buffer>,
}

impl KvPool {
    /// Creates a pool of at most `capacity_pages` pages of `geometry`. Allocates no buffer yet.
    pub fn new(geometry: PageGeometry, capacity_pages: usize) -> Arc<KvPool> {
        KvPool::for_device(geometry, capacity_pages, None)
    }

    /// As [`new`](Self::new), with pages in pinned memory that `device` reads by itself. If it
    /// refuses to pin more, the other pages lie in plain memory, and are copied once more on their
    /// way to the device.
    pub(crate) fn for_device(
        geometry: PageGeometry,
        capacity_pages: usize,
        device: Option<Arc<dyn Device>>,
    ) -> Arc<KvPool> {
        let state = Mutex::new(PoolState { in_use: 0, spare: Vec::new() });
        let part_bytes = geometry.part_table().into();
        let [has_refused, has_no_memory] = [(); 2].map(|()| AtomicBool::new(false));
        let memory = Mutex::new(PageMemory::new(geometry.page_bytes()));
        Arc::new(KvPool { geometry, capacity_pages, device, has_refused, has_no_memory, part_bytes, state, memory })
    }

    /// Takes a page, or returns `None` if all are in use or the system has no memory for a new one.
    /// The content of the page is unspecified, because buffers are reused without clearing.
    pub fn allocate(self: &Arc<Self>) -> Option<KvPage> {
        let spare = {
            let mut state = self.lock();
            if state.in_use == self.capacity_pages {
                return None;
            }
            let free = state.spare.iter_mut().rposition(Buffer::is_free);
            if free.is_none() && !state.spare.is_empty() {
                // A device may still read all of them, after a pass that failed.
                return None;
            }
            state.in_use += 1;
            free.map(|at| state.spare.swap_remove(at))
        };
        // Outside the lock: a new buffer may take milliseconds, and other threads may allocate
        // meanwhile.
        let Some(buffer) = spare.or_else(|| self.new_buffer()) else {
            self.lock().in_use -= 1;
            return None;
        };
        // Relaxed: the number orders nothing.
        let version = PageVersion { page: NEXT_PAGE.fetch_add(1, Ordering::Relaxed), writes: 0 };
        Some(KvPage { pool: Arc::clone(self), buffer, version })
    }

    fn new_buffer(&self) -> Option<Buffer> {
        let bytes = self.geometry.page_bytes().next_multiple_of(CACHE_LINE_BYTES);
        // Relaxed: a second attempt of another thread does no harm.
        if let Some(device) = self.device.as_ref().filter(|_| !self.has_refused.load(Ordering::Relaxed)) {
            match PinnedBytes::new(&**device, bytes) {
                Ok(pinned) => return Some(Buffer::Pinned(pinned)),
                Err(error) => {
                    tracing::warn!(%error, "further pages of L1 are not pinned, so their copies to the device are slower");
                    self.has_refused.store(true, Ordering::Relaxed);
                }
            }
        }
        match self.memory.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Ok(buffer) => Some(Buffer::Plain(buffer)),
            Err(error) => {
                if !self.has_no_memory.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "the system has no memory for further pages of L1; lower --l1");
                }
                None
            }
        }
    }

    pub fn free_pages(&self) -> usize {
        self.capacity_pages - self.lock().in_use
    }

    pub fn capacity_pages(&self) -> usize {
        self.capacity_pages
    }

    pub fn geometry(&self) -> &PageGeometry {
        &self.geometry
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, PoolState> {
        // Ignoring poison is sound: no holder of the lock can panic between two related changes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvPool({} of {} pages free)", self.free_pages(), self.capacity_pages)
    }
}

/// Keys and values of `page_tokens` consecutive tokens in all layers. Drop returns the buffer to
/// the pool.
pub struct KvPage {
    pool: Arc<KvPool>,
    buffer: Buffer,
    version: PageVersion,
}

impl KvPage {
    pub fn geometry(&self) -> &PageGeometry {
        &self.pool.geometry
    }

    /// Views the page as its elements.
    ///
    /// # Panics
    /// If the page holds another type.
    pub(crate) fn elements<E: PageElement>(&self) -> &[E] {
        assert_eq!(self.geometry().dtype, E::DTYPE, "the page holds elements of this type");
        let bytes: &[u8] = self.as_ref();
        bytemuck::cast_slice(bytes)
    }

    /// Views the page as its elements. Changes its version.
    ///
    /// # Panics
    /// If the page holds another type.
    pub(crate) fn elements_mut<E: PageElement>(&mut self) -> &mut [E] {
        assert_eq!(self.geometry().dtype, E::DTYPE, "the page holds elements of this type");
        let bytes: &mut [u8] = self.as_mut();
        bytemuck::cast_slice_mut(bytes)
    }

    /// Changes with every access for writing but [`bytes_in_step`](Self::bytes_in_step). A device
    /// with a copy of this version need not read the page again.
    pub(crate) fn version(&self) -> PageVersion {
        self.version
    }

    /// Views the bytes, to write what the copy on the device has already. The version stays.
    pub(crate) fn bytes_in_step(&mut self) -> &mut [u8] {
        let len = self.geometry().page_bytes();
        &mut self.buffer.bytes_mut()[..len]
    }

    /// The page for the streams of `device`. `None` if that device cannot read it in place.
    pub(crate) fn source(&self, device: &dyn Device) -> Option<Slice> {
        let owner = self.pool.device.as_ref()?;
        let is_owner = std::ptr::addr_eq(Arc::as_ptr(owner), std::ptr::from_ref(device));
        match &self.buffer {
            Buffer::Pinned(pinned) if is_owner => pinned.source().slice(0..self.geometry().page_bytes()).ok(),
            _ => None,
        }
    }

    /// Checksums of the chunks, part by part. Costs one pass over the page.
    fn chunk_crcs(&self) -> Vec<u32> {
        let mut rest: &[u8] = self.as_ref();
        let mut crcs = Vec::new();
        for &bytes in &self.pool.part_bytes {
            let (part, tail) = rest.split_at(bytes as usize);
            crcs.extend(chunk_crcs(part));
            rest = tail;
        }
        crcs
    }

    /// Replaces every element by a value, rounded to the type of the page.
    pub fn fill_with(&mut self, mut value: impl FnMut() -> f32) {
        with_element!(self.geometry().dtype, E => {
            self.elements_mut::<E>().iter_mut().for_each(|element| *element = E::from_f32(value()));
        });
    }

    /// Copies the elements, which f32 holds without loss.
    pub fn to_f32(&self) -> Vec<f32> {
        with_element!(self.geometry().dtype, E => {
            self.elements::<E>().iter().map(|element| KvElement::to_f32(*element)).collect()
        })
    }

    /// Returns `true` if no value is NaN or infinite. Costs one pass over the page.
    pub fn is_finite(&self) -> bool {
        self.is_finite_in(0..self.geometry().page_bytes())
    }

    /// Returns `true` if no value in a range of bytes is NaN or infinite. The range begins and ends
    /// at an element.
    pub fn is_finite_in(&self, bytes: Range<usize>) -> bool {
        with_element!(self.geometry().dtype, E => {
            is_finite(&self.elements::<E>()[bytes.start / size_of::<E>()..bytes.end / size_of::<E>()])
        })
    }
}

impl AsRef<[u8]> for KvPage {
    fn as_ref(&self) -> &[u8] {
        &self.buffer.bytes()[..self.geometry().page_bytes()]
    }
}

impl AsMut<[u8]> for KvPage {
    fn as_mut(&mut self) -> &mut [u8] {
        self.version.writes += 1;
        self.bytes_in_step()
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

/// Proof of a page's bytes: the checksums that came with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSeal {
    /// CRC-32 of each chunk, part by part, as in [`larder_format::PageMeta`].
    pub chunk_crcs: Vec<u32>,
    /// Source of the page in the store. `None` if the store has not told it.
    pub origin: Option<PageOrigin>,
}

/// A full page that never changes, with the checksums that prove it.
#[derive(Debug)]
pub struct SealedPage {
    page: KvPage,
    chunk_crcs: Vec<u32>,
    /// Empty until the store has told it.
    origin: OnceLock<PageOrigin>,
    /// Origin that a copy states while the store has not confirmed the page.
    unconfirmed_origin: OnceLock<PageOrigin>,
    is_received: bool,
}

impl SealedPage {
    /// Seals a page that this engine has just filled. Costs one pass over its bytes.
    pub fn compute(page: KvPage) -> Self {
        let crcs = page.chunk_crcs();
        Self::with_crcs(page, crcs)
    }

    /// Seals a page that this engine has just filled, with the checksums that it computed of each
    /// part once the part was full, in order. Does not read the bytes.
    pub fn with_crcs(page: KvPage, chunk_crcs: Vec<u32>) -> Self {
        let unknown = OnceLock::new;
        Self { page, chunk_crcs, origin: unknown(), unconfirmed_origin: unknown(), is_received: false }
    }

    /// Keeps a page with the checksums that came with it. Does not read the bytes.
    pub fn received(page: KvPage, seal: PageSeal) -> Self {
        let origin = seal.origin.map_or_else(OnceLock::new, OnceLock::from);
        Self { page, chunk_crcs: seal.chunk_crcs, origin, unconfirmed_origin: OnceLock::new(), is_received: true }
    }

    /// Source of the page in the store. `None` until the store has confirmed that it has the page.
    pub fn origin(&self) -> Option<PageOrigin> {
        self.origin.get().copied()
    }

    /// Origin that a put of this page must state as a copy: its source in the store, or what
    /// [`set_unconfirmed_origin`](Self::set_unconfirmed_origin) recorded.
    pub fn copy_origin(&self) -> Option<PageOrigin> {
        self.origin().or_else(|| self.unconfirmed_origin.get().copied())
    }

    /// Records the origin to state for a page whose first put failed. The first one stays: it is
    /// that of the time when the page was computed.
    pub fn set_unconfirmed_origin(&self, origin: PageOrigin) {
        let _ = self.unconfirmed_origin.set(origin);
    }

    /// Returns `true` if the page came from the store, so that any client may have computed it.
    pub fn is_received(&self) -> bool {
        self.is_received
    }

    /// Records the source of the page in the store. A source that is known already stays.
    pub fn set_origin(&self, origin: PageOrigin) {
        let _ = self.origin.set(origin);
    }

    /// Parts of the page, in order, with the checksums of their chunks. Does not verify them. Where
    /// the table of checksums is too short, a part has too few.
    pub fn parts(&self) -> impl Iterator<Item = (&[u8], &[u32])> {
        let mut bytes: &[u8] = self.page.as_ref();
        let mut crcs: &[u32] = &self.chunk_crcs;
        self.page.pool.part_bytes.iter().map(move |&length| {
            let (part, later_parts) = bytes.split_at(length as usize);
            let (own, later_crcs) = crcs.split_at(PageMeta::chunks_of(length).min(crcs.len()));
            bytes = later_parts;
            crcs = later_crcs;
            (part, own)
        })
    }

    /// Compares the bytes with the checksums. Costs one pass over the page.
    ///
    /// # Errors
    /// The first chunk that differs, or a table of checksums that does not fit the page.
    pub fn verify(&self) -> Result<(), Mismatch> {
        let mut verifier = PayloadVerifier::new(&self.page.pool.part_bytes, &self.chunk_crcs);
        verifier.take(self.page.as_ref());
        verifier.finish()
    }
}

impl Deref for SealedPage {
    type Target = KvPage;

    fn deref(&self) -> &KvPage {
        &self.page
    }
}

#[derive(Debug)]
pub enum PageSlot {
    /// Partly filled, and owned by this sequence alone.
    Open(KvPage),
    /// Full and immutable. Other sequences with the same prefix may share it.
    Sealed(Arc<SealedPage>),
}

impl PageSlot {
    pub fn page(&self) -> &KvPage {
        match self {
            PageSlot::Open(page) => page,
            PageSlot::Sealed(page) => page,
        }
    }

    /// Checksums of the chunks: those of the seal, or of the present bytes if the page has none.
    pub(crate) fn chunk_crcs(&self) -> Cow<'_, [u32]> {
        match self {
            PageSlot::Open(page) => Cow::Owned(page.chunk_crcs()),
            PageSlot::Sealed(page) => Cow::Borrowed(&page.chunk_crcs),
        }
    }

    pub fn seal(self) -> PageSlot {
        match self {
            PageSlot::Open(page) => PageSlot::Sealed(Arc::new(SealedPage::compute(page))),
            sealed => sealed,
        }
    }
}

/// Returns `true` if no value is NaN or infinite.
pub fn is_finite<E: KvElement>(values: &[E]) -> bool {
    // Without an early exit inside a block, the compiler uses vector instructions.
    values.chunks(1024).all(|block| block.iter().fold(true, |all, value| all & KvElement::is_finite(*value)))
}

/// Selects the keys or the values. The numbers give their order in the page layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvKind {
    Key = 0,
    Value = 1,
}

/// Computes the position of `kind` of KV head `head` in layer `layer`, by the layout of
/// [`PageGeometry`].
pub fn head_layout(geometry: &PageGeometry, layer: usize, kind: KvKind, head: usize) -> HeadLayout {
    let head_dim = geometry.head_dim as usize;
    let group_heads = (geometry.kv_heads / geometry.head_groups) as usize;
    let layer_group = layer / geometry.layers_per_part as usize;
    let part = layer_group * geometry.head_groups as usize + head / group_heads;
    let part_start: usize = (0..part).map(|p| geometry.part_bytes(p)).sum::<usize>() / geometry.dtype.bytes();
    let layer_in_part = layer % geometry.layers_per_part as usize;
    let stride = group_heads * head_dim;
    let block = (2 * layer_in_part + kind as usize) * geometry.page_tokens as usize * stride;
    HeadLayout { start: part_start + block + (head % group_heads) * head_dim, stride }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_kernels::device::{Place, host};
    use std::time::{Duration, Instant};

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
    fn allocate_fails_at_capacity_and_succeeds_after_a_drop() {
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
    fn pages_for_a_device_are_pinned_and_wait_for_its_reads() {
        let (device, other) = (host::open(256 << 20), host::open(1 << 20));
        let geometry = geometry(2, 1);
        let pool = KvPool::for_device(geometry, 2, Some(Arc::clone(&device)));
        let mut page = pool.allocate().unwrap();
        page.fill_with(|| 2.0);
        assert!(page.source(&*other).is_none());
        assert_eq!(page.source(&*device).map(|source| source.bytes()), Some(geometry.page_bytes()));
        let second = pool.allocate().unwrap();
        // The device still reads the page when it returns to the pool.
        let stream = device.stream("test").unwrap();
        let slow = device.allocate(Place::Device, 64 << 20).unwrap();
        for _ in 0..20 {
            stream.fill(&slow.all(), 1).unwrap();
        }
        let target = device.allocate(Place::Device, geometry.page_bytes()).unwrap();
        stream.copy(&target.all(), &page.source(&*device).unwrap()).unwrap();
        drop(page);
        assert!(pool.allocate().is_none() && pool.free_pages() == 1);
        stream.wait(Instant::now() + Duration::from_secs(60)).unwrap();
        let mut page = pool.allocate().unwrap();
        page.as_mut().fill(1);
        drop((page, second));
        assert_eq!(pool.free_pages(), 2);

        // Where the device pins no more, pages lie in plain memory.
        let pool = KvPool::for_device(geometry, 1, Some(host::open(100)));
        let mut page = pool.allocate().unwrap();
        page.as_mut().fill(1);
        assert!(page.is_finite() && pool.device.as_ref().is_some_and(|device| page.source(&**device).is_none()));
    }

    #[test]
    fn verify_finds_a_flipped_bit_and_foreign_checksums() {
        let pool = KvPool::new(geometry(2, 1), 2);
        let mut page = pool.allocate().unwrap();
        page.as_mut().fill(7);
        let mut sealed = SealedPage::compute(page);
        assert_eq!((sealed.verify(), sealed.origin(), sealed.is_received()), (Ok(()), None, false));
        let seal = PageSeal { chunk_crcs: sealed.chunk_crcs.clone(), origin: None };
        let last = sealed.page.as_ref().len() - 1;
        sealed.page.as_mut()[last] ^= 1;
        assert!(matches!(sealed.verify(), Err(Mismatch::Crc { part: 2, chunk: 0 })));
        sealed.page.as_mut()[last] ^= 1;
        assert_eq!(SealedPage::received(sealed.page, seal.clone()).verify(), Ok(()));
        let mut page = pool.allocate().unwrap();
        page.as_mut().fill(7);
        let origin = Some(PageOrigin { run: 1, generation: 3 });
        let short = SealedPage::received(page, PageSeal { chunk_crcs: seal.chunk_crcs[1..].to_vec(), origin });
        short.set_origin(PageOrigin { run: 2, generation: 3 });
        assert!(short.verify().is_err() && short.origin() == origin && short.is_received());
    }

    #[test]
    fn parts_keep_their_checksums_when_the_page_is_damaged() {
        let pool = KvPool::new(geometry(2, 1), 2);
        let mut page = pool.allocate().unwrap();
        page.as_mut().fill(7);
        let mut sealed = SealedPage::compute(page);
        let crcs = |sealed: &SealedPage| sealed.parts().flat_map(|(_, crcs)| crcs.to_vec()).collect::<Vec<u32>>();
        let intact = |sealed: &SealedPage| {
            let is_intact = |(bytes, crcs): (&[u8], &[u32])| chunk_crcs(bytes).eq(crcs.iter().copied());
            sealed.parts().map(is_intact).collect::<Vec<bool>>()
        };
        assert_eq!((crcs(&sealed), intact(&sealed)), (sealed.chunk_crcs.clone(), vec![true; 3]));
        let bytes: &[u8] = sealed.page.as_ref();
        assert_eq!(sealed.parts().flat_map(|(bytes, _)| bytes.to_vec()).collect::<Vec<u8>>(), bytes);
        let last = sealed.page.as_ref().len() - 1;
        sealed.page.as_mut()[last] ^= 1;
        assert_eq!((crcs(&sealed), intact(&sealed)), (sealed.chunk_crcs.clone(), vec![true, true, false]));
        // A table that is too short is no panic.
        let short = SealedPage::with_crcs(pool.allocate().unwrap(), vec![0]);
        assert_eq!(short.parts().map(|(_, crcs)| crcs.len()).collect::<Vec<usize>>(), [1, 0, 0]);
        assert!(short.verify().is_err());
    }

    #[test]
    fn one_value_that_is_no_number_makes_a_page_not_finite() {
        for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            let pool = KvPool::new(PageGeometry { dtype, ..geometry(2, 1) }, 1);
            let mut page = pool.allocate().unwrap();
            let len = page.to_f32().len();
            for (at, value) in [(0, f32::NAN), (len - 1, f32::INFINITY), (len / 2, f32::NEG_INFINITY)] {
                assert!(page.is_finite());
                let mut index = 0..;
                page.fill_with(|| if index.next() == Some(at) { value } else { 60_000.0 });
                assert!(!page.is_finite());
                assert!(page.is_finite_in(0..at * dtype.bytes()));
                assert!(!page.is_finite_in(at * dtype.bytes()..(at + 1) * dtype.bytes()));
                page.fill_with(|| -60_000.0);
            }
        }
        assert!(is_finite::<f32>(&[]));
    }

    #[test]
    fn page_bytes_are_the_store_payload() {
        let pool = KvPool::new(geometry(2, 1), 1);
        let mut page = pool.allocate().unwrap();
        assert_eq!(page.as_ref().len(), pool.geometry().page_bytes());
        page.elements_mut::<f32>()[7] = 1.5;
        assert_eq!(page.as_ref()[28..32], 1.5f32.to_le_bytes());
        page.as_mut()[28..32].copy_from_slice(&2.5f32.to_le_bytes());
        assert_eq!(page.elements::<f32>()[7], 2.5);
    }

    #[test]
    fn head_layouts_cover_the_page_in_the_documented_order() {
        for (layers_per_part, head_groups) in [(1, 1), (2, 1), (2, 2), (5, 4), (3, 2)] {
            let g = geometry(layers_per_part, head_groups);
            let mut expected = 0;
            // The documented order: part by part, layer by layer, keys before values, token by
            // token, head by head.
            for part in 0..g.part_count() {
                for layer in g.part_layers(part) {
                    for kind in [KvKind::Key, KvKind::Value] {
                        for slot in 0..g.page_tokens as usize {
                            for head in g.part_heads(part) {
                                let layout = head_layout(&g, layer, kind, head);
                                assert_eq!(layout.start + slot * layout.stride, expected);
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
