//! Launchers of the kernels that move pages and compute their checksums.
//!
//! Invariants:
//! - Every address that a kernel computes from the tables lies inside a slice of the transfer. The
//!   constructors check this, and nothing changes the tables afterwards.
//! - A transfer moves whole parts, so every chunk that it moves has a CRC-32.
//!
//! The kernels read the tables from pinned memory. A transfer that repeats needs no new tables. It
//! can move its parts one by one, so that the first layers arrive first.

use crate::cpu::{CHUNK_BYTES, PageShape, PoolLayout};
use crate::device::{Arg, Device, DeviceError, Launch, Place, Slice, Stream};
use std::ops::Range;

/// Threads per block, as `crc32.cuh` defines them.
const BLOCK_THREADS: u32 = 256;
/// Most chunks or pages of one launch.
const MAX_ITEMS: usize = i32::MAX as usize;
/// Length of a chunk's entry in the table of chunks.
const CHUNK_ENTRY_BYTES: usize = size_of::<[u32; 4]>();

/// Compute capability from which devices have bulk copies.
const BULK_CAPABILITY: (i32, i32) = (9, 0);
/// Bulk copies move whole units of this many bytes.
const BULK_UNIT_BYTES: u32 = 16;

/// A page in both of its places.
#[derive(Debug, Clone)]
pub struct PageLocation {
    /// The page in the store's layout: pinned or device memory of the page's length.
    pub store: Slice,
    /// Engine pages that hold the tokens, in order.
    pub engine_pages: Vec<u32>,
    /// Token of the first engine page with which the page begins.
    pub first_token: u32,
}

/// Pages and parts that one launch moves, with its tables in pinned memory.
#[derive(Debug)]
pub struct PageTransfer {
    tables: Tables,
    layout: PoolLayout,
    tensors: Vec<Slice>,
    stores: Vec<Slice>,
    /// Ranges of each tensor that a launch accesses.
    pool_ranges: Vec<Range<usize>>,
    shape: PageShape,
    /// Parts of the transfer.
    parts: Range<u32>,
    tokens: u32,
    /// Heads of a row. Heads that follow each other in the pool count as one.
    heads: u32,
    head_bytes: u32,
    head_stride: u64,
    layer_tensors: u32,
    chunk_lengths: Vec<u32>,
    /// Number of chunks before each part of the transfer, and at last of all parts.
    part_chunks: Vec<usize>,
    unit_bytes: u32,
    uses_bulk: bool,
}

#[derive(Debug)]
struct Tables {
    tensors: Slice,
    table: Slice,
    firsts: Slice,
    pages: Slice,
    chunks: Slice,
    table_stride: u32,
}

impl PageTransfer {
    /// Plans the transfer of `parts` of `pages`. `tensors` holds the pool's tensors of all layers
    /// in order, each from its start on.
    ///
    /// The pages' tokens must not share places in the pool, or a scatter leaves either content.
    ///
    /// # Errors
    /// If the shapes disagree, if a page leaves the pool, or if pinned memory is not free.
    pub fn new(
        device: &dyn Device,
        shape: &PageShape,
        layout: &PoolLayout,
        tensors: &[Slice],
        pages: &[PageLocation],
        parts: Range<u32>,
    ) -> Result<PageTransfer, DeviceError> {
        let allocate = |bytes: usize| device.allocate(Place::Pinned, bytes).map(|memory| memory.all());
        let has_bulk = device.info().compute_capability >= BULK_CAPABILITY;
        Ok(PageTransfer::new_in(allocate, shape, layout, tensors, pages, parts)?.with_bulk(has_bulk))
    }

    /// As [`new`](Self::new), with tables in the pinned memory that `pinned` returns for a length,
    /// which begins at a multiple of 16 bytes. The caller leaves it alone until the launches have
    /// ended. Threads move the bytes: see [`with_bulk`](Self::with_bulk).
    ///
    /// # Errors
    /// As for [`new`](Self::new), or if a stream uses the memory.
    pub fn new_in(
        pinned: impl FnOnce(usize) -> Result<Slice, DeviceError>,
        shape: &PageShape,
        layout: &PoolLayout,
        tensors: &[Slice],
        pages: &[PageLocation],
        parts: Range<u32>,
    ) -> Result<PageTransfer, DeviceError> {
        check(shape, layout, tensors, pages, &parts)?;
        let mut chunks: Vec<[u32; 4]> = Vec::new();
        let mut part_chunks = vec![0];
        for part in parts.clone() {
            chunks.extend(chunks_of_part(shape, part));
            part_chunks.push(chunks.len());
        }
        let longest = pages.iter().map(|page| page.engine_pages.len()).max().unwrap_or(0);
        if pages.is_empty() || chunks.len().max(longest).saturating_mul(pages.len()) > MAX_ITEMS {
            return Err(DeviceError::Shape("a transfer of no page, or of too many"));
        }
        let merged = layout.head_stride == u64::from(shape.head_bytes);
        let (heads, head_bytes) =
            if merged { (1, shape.group_heads() * shape.head_bytes) } else { (shape.group_heads(), shape.head_bytes) };
        let head_stride = if merged { u64::from(head_bytes) } else { layout.head_stride };
        let strides = [layout.page_stride, layout.token_stride, head_stride, u64::from(head_bytes)];
        let starts = tensors.iter().chain(pages.iter().map(|page| &page.store)).map(Slice::address);
        let in_page = chunks.iter().flat_map(|&[part, offset, bytes, _]| [part, offset, bytes]).map(u64::from);
        let unit_bytes = strides.into_iter().chain(starts).chain(in_page).fold(16, common_power) as u32;
        Ok(PageTransfer {
            tables: Tables::write(pinned, tensors, pages, &chunks)?,
            layout: *layout,
            tensors: tensors.to_vec(),
            stores: pages.iter().map(|page| page.store.clone()).collect(),
            pool_ranges: pool_ranges(shape, layout, pages),
            shape: *shape,
            parts,
            tokens: shape.tokens,
            heads,
            head_bytes,
            head_stride,
            layer_tensors: shape.layer_tensors,
            chunk_lengths: chunks.iter().map(|chunk| chunk[2]).collect(),
            part_chunks,
            unit_bytes,
            uses_bulk: false,
        })
    }

    /// Selects between the kernels with bulk copies (TMA) and those whose threads move the bytes.
    /// Bulk copies are the default where the device has them. They need units of 16 bytes: without
    /// these, and on devices that lack them, this has no effect or runs their plain twin.
    #[must_use]
    pub fn with_bulk(mut self, uses_bulk: bool) -> PageTransfer {
        self.uses_bulk = uses_bulk && self.unit_bytes == BULK_UNIT_BYTES;
        self
    }

    /// Returns `true` if the kernels with bulk copies move the pages.
    pub fn uses_bulk(&self) -> bool {
        self.uses_bulk
    }

    /// Lengths of the chunks of one page, in the order of their CRCs.
    pub fn chunk_lengths(&self) -> &[u32] {
        &self.chunk_lengths
    }

    /// Bytes of the tables of `pages` pages that lie in one engine page each.
    pub fn table_bytes_max(shape: &PageShape, pages: usize) -> usize {
        let chunks: usize = (0..shape.part_count()).map(|part| chunks_of_part(shape, part).count()).sum();
        let tensors = shape.layers as usize * shape.layer_tensors as usize;
        // Of a page: its address, its engine page, and its first token.
        CHUNK_ENTRY_BYTES * chunks + 8 * tensors + 16 * pages
    }

    /// Length of the CRCs of a launch in bytes: a `u32` for each chunk of each page.
    pub fn crc_bytes(&self) -> usize {
        4 * self.stores.len() * self.chunk_lengths.len()
    }

    /// Numbers of the chunks of some parts among those of a page.
    ///
    /// # Errors
    /// If the transfer does not have these parts, or if there is none.
    pub fn chunks_of(&self, parts: &Range<u32>) -> Result<Range<usize>, DeviceError> {
        if parts.is_empty() || parts.start < self.parts.start || parts.end > self.parts.end {
            return Err(DeviceError::Shape("a launch of parts that the transfer does not have"));
        }
        let chunks_before = |part: u32| self.part_chunks[(part - self.parts.start) as usize];
        Ok(chunks_before(parts.start)..chunks_before(parts.end))
    }

    /// Bytes that one access of a thread moves: 16, or less if an address or a length is odd.
    pub fn unit_bytes(&self) -> u32 {
        self.unit_bytes
    }

    /// Copies the parts from the pool to the store's layout, by at most `blocks` blocks. A block
    /// occupies a share of one multiprocessor. `crcs` receives the CRC of every chunk.
    ///
    /// # Errors
    /// If `crcs` has another length than [`crc_bytes`](Self::crc_bytes), or if the launch fails.
    pub fn gather(&self, stream: &dyn Stream, blocks: u32, crcs: Option<&Slice>) -> Result<(), DeviceError> {
        let kernel = if self.uses_bulk { "larder_gather_pages_bulk" } else { "larder_gather_pages" };
        self.launch(stream, kernel, blocks, self.parts.clone(), crcs, [Arg::read, Arg::write])
    }

    /// Copies the parts from the store's layout to the pool. The CRCs are those of the bytes that
    /// the kernel has read. The caller compares them before it uses the pages.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather).
    pub fn scatter(&self, stream: &dyn Stream, blocks: u32, crcs: Option<&Slice>) -> Result<(), DeviceError> {
        self.scatter_parts(stream, blocks, self.parts.clone(), crcs)
    }

    /// As [`scatter`](Self::scatter) for some of the parts. `crcs` has an entry for each of their
    /// chunks, page by page.
    ///
    /// # Errors
    /// As for [`scatter`](Self::scatter), or if the transfer does not have the parts.
    pub fn scatter_parts(
        &self,
        stream: &dyn Stream,
        blocks: u32,
        parts: Range<u32>,
        crcs: Option<&Slice>,
    ) -> Result<(), DeviceError> {
        let kernel = if self.uses_bulk { "larder_scatter_pages_bulk" } else { "larder_scatter_pages" };
        self.launch(stream, kernel, blocks, parts, crcs, [Arg::write, Arg::read])
    }

    fn launch(
        &self,
        stream: &dyn Stream,
        kernel: &'static str,
        blocks: u32,
        parts: Range<u32>,
        crcs: Option<&Slice>,
        [pool, store]: [fn(&Slice) -> Arg; 2],
    ) -> Result<(), DeviceError> {
        let chunks = self.chunks_of(&parts)?;
        check_crcs(crcs, 4 * self.stores.len() * chunks.len())?;
        let items = (self.stores.len() * chunks.len()) as u32;
        let table = self.tables.chunks.slice(CHUNK_ENTRY_BYTES * chunks.start..CHUNK_ENTRY_BYTES * chunks.end)?;
        let mut launch = Launch::new(kernel, blocks.clamp(1, items), BLOCK_THREADS)
            .arg(Arg::read(&self.tables.tensors))
            .arg(Arg::read(&self.tables.table))
            .arg(Arg::read(&self.tables.firsts))
            .arg(self.layout.page_stride)
            .arg(self.layout.token_stride)
            .arg(self.head_stride)
            .arg(self.tables.table_stride)
            .arg(self.layout.page_tokens)
            .arg(self.tokens)
            .arg(self.heads)
            .arg(self.head_bytes)
            .arg(self.layer_tensors)
            .arg(Arg::read(&self.tables.pages))
            .arg(self.stores.len() as u32)
            .arg(Arg::read(&table))
            .arg(chunks.len() as u32)
            .arg(self.unit_bytes)
            .arg(crcs.map_or(Arg::Null, Arg::write));
        let (first, last) = (self.shape.part_layers(parts.start), self.shape.part_layers(parts.end - 1));
        let tensors = first.start * self.layer_tensors..last.end * self.layer_tensors;
        for tensor in &self.tensors[tensors.start as usize..tensors.end as usize] {
            launch = launch.reaching(pool(tensor).within(self.pool_ranges.clone()));
        }
        let part_range = |part: u32| self.shape.part_range(part);
        let in_page = part_range(parts.start).start as usize..part_range(parts.end - 1).end as usize;
        for page in &self.stores {
            launch = launch.reaching(store(page).within(vec![in_page.clone()]));
        }
        // SAFETY: the arguments follow the kernel's parameters. `new` has checked that the tables
        // lead to places inside the tensors and pages only. `crcs` has an entry per chunk.
        unsafe { stream.launch(&launch) }
    }
}

fn check(
    shape: &PageShape,
    layout: &PoolLayout,
    tensors: &[Slice],
    pages: &[PageLocation],
    parts: &Range<u32>,
) -> Result<(), DeviceError> {
    let refuse = |reason| Err(DeviceError::Shape(reason));
    if !shape.is_valid() || layout.page_tokens == 0 {
        return refuse("the shape of a page has a field that is 0 or too large");
    }
    if parts.is_empty() || parts.end > shape.part_count() {
        return refuse("a transfer of parts that a page does not have");
    }
    if tensors.len() as u64 != u64::from(shape.layers) * u64::from(shape.layer_tensors) {
        return refuse("the number of tensors is not that of the layers");
    }
    let extent = layout.page_extent(shape).ok_or(DeviceError::Shape("the strides of the pool are too large"))?;
    for page in pages {
        if page.store.bytes() != shape.page_bytes() as usize {
            return refuse("a page in the store's layout has another length than its shape");
        }
        let tokens = u64::from(page.first_token) + u64::from(shape.tokens);
        let needed = tokens.div_ceil(u64::from(layout.page_tokens));
        if page.first_token >= layout.page_tokens || needed != page.engine_pages.len() as u64 {
            return refuse("the tokens of a page need another number of engine pages");
        }
        let last = page.engine_pages.iter().max().copied().unwrap_or(0);
        let end = u64::from(last).checked_mul(layout.page_stride).and_then(|start| start.checked_add(extent));
        if tensors.iter().any(|tensor| end.is_none_or(|end| end > tensor.bytes() as u64)) {
            return refuse("an engine page lies outside the pool");
        }
    }
    Ok(())
}

fn check_crcs(crcs: Option<&Slice>, bytes: usize) -> Result<(), DeviceError> {
    if crcs.is_some_and(|crcs| crcs.bytes() != bytes || !crcs.address().is_multiple_of(4)) {
        return Err(DeviceError::Shape("the space for CRCs has another length, or is not aligned"));
    }
    Ok(())
}

/// The largest power of two that divides both. `a` is one.
fn common_power(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { a.min(1 << b.trailing_zeros().min(62)) }
}

/// Chunks of a part, as the kernel takes them.
fn chunks_of_part(shape: &PageShape, part: u32) -> impl Iterator<Item = [u32; 4]> + use<> {
    let range = shape.part_range(part);
    let place = (shape.part_layers(part).start << 16) | (part % shape.head_groups);
    let bytes = range.end - range.start;
    (0..bytes.div_ceil(CHUNK_BYTES)).map(move |chunk| {
        let offset = chunk * CHUNK_BYTES;
        [range.start, offset, CHUNK_BYTES.min(bytes - offset), place]
    })
}

/// Ranges of a tensor that hold the pages, joined where they meet.
fn pool_ranges(shape: &PageShape, layout: &PoolLayout, pages: &[PageLocation]) -> Vec<Range<usize>> {
    let extent = layout.page_extent(shape).unwrap_or(0) as usize;
    let mut numbers: Vec<u32> = pages.iter().flat_map(|page| page.engine_pages.iter().copied()).collect();
    numbers.sort_unstable();
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for number in numbers {
        let start = number as usize * layout.page_stride as usize;
        let end = start + extent;
        match ranges.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ => ranges.push(start..end),
        }
    }
    ranges
}

impl Tables {
    fn write(
        pinned: impl FnOnce(usize) -> Result<Slice, DeviceError>,
        tensors: &[Slice],
        pages: &[PageLocation],
        chunks: &[[u32; 4]],
    ) -> Result<Tables, DeviceError> {
        let table_stride = pages.iter().map(|page| page.engine_pages.len()).max().unwrap_or(0);
        let tensors: Vec<u64> = tensors.iter().map(Slice::address).collect();
        let stores: Vec<u64> = pages.iter().map(|page| page.store.address()).collect();
        let firsts: Vec<u32> = pages.iter().map(|page| page.first_token).collect();
        let mut table = vec![0_u32; table_stride * pages.len()];
        for (row, page) in table.chunks_mut(table_stride.max(1)).zip(pages) {
            row[..page.engine_pages.len()].copy_from_slice(&page.engine_pages);
        }
        // The widest elements come first, so that all are aligned.
        let sections: [&[u8]; 5] = [
            bytemuck::cast_slice(chunks),
            bytemuck::cast_slice(&tensors),
            bytemuck::cast_slice(&stores),
            bytemuck::cast_slice(&table),
            bytemuck::cast_slice(&firsts),
        ];
        let memory = pinned(sections.iter().map(|section| section.len()).sum())?;
        let mut end = 0;
        let place = |section: &[u8]| {
            let start = end;
            end += section.len();
            write_section(&memory, start, section)
        };
        let [chunks, tensors, pages, table, firsts] = sections.map(place);
        let (tensors, table, firsts) = (tensors?, table?, firsts?);
        Ok(Tables { tensors, table, firsts, pages: pages?, chunks: chunks?, table_stride: table_stride as u32 })
    }
}

fn write_section(memory: &Slice, start: usize, section: &[u8]) -> Result<Slice, DeviceError> {
    let slice = memory.slice(start..start + section.len())?;
    slice.write(section)?;
    Ok(slice)
}

/// Chunks whose CRC-32 one launch computes, with its tables in pinned memory.
#[derive(Debug)]
pub struct CrcChunks {
    chunks: Vec<Slice>,
    starts: Slice,
    lengths: Slice,
}

impl CrcChunks {
    /// Plans the CRCs of `chunks`, in device memory or pinned memory.
    ///
    /// # Errors
    /// If there is no chunk or one has 2 GiB or more, or if pinned memory is not free.
    pub fn new(device: &dyn Device, chunks: &[Slice]) -> Result<CrcChunks, DeviceError> {
        let memory = device.allocate(Place::Pinned, CrcChunks::table_bytes(chunks.len()).max(1))?;
        CrcChunks::new_in(&memory.all(), chunks)
    }

    /// Length of the tables of `chunks` chunks, in bytes.
    pub fn table_bytes(chunks: usize) -> usize {
        (size_of::<u64>() + size_of::<u32>()) * chunks
    }

    /// As [`new`](Self::new), with tables in `tables`: pinned memory of at least
    /// [`table_bytes`](Self::table_bytes), at a multiple of 8 bytes. The caller leaves it alone
    /// until the launches have ended.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or if a stream uses the memory, or if it is too short.
    pub fn new_in(tables: &Slice, chunks: &[Slice]) -> Result<CrcChunks, DeviceError> {
        // The kernel adds tiles to offsets in 32 bits.
        let length = |chunk: &Slice| u32::try_from(chunk.bytes()).ok().filter(|&bytes| bytes <= i32::MAX as u32);
        let lengths: Option<Vec<u32>> = chunks.iter().map(length).collect();
        let lengths = lengths.filter(|lengths| !lengths.is_empty() && lengths.len() <= MAX_ITEMS);
        let lengths = lengths.ok_or(DeviceError::Shape("CRCs of no chunk, of too many, or of one of 2 GiB"))?;
        let starts: Vec<u64> = chunks.iter().map(Slice::address).collect();
        let (starts, lengths): (&[u8], &[u8]) = (bytemuck::cast_slice(&starts), bytemuck::cast_slice(&lengths));
        let at_starts = write_section(tables, 0, starts)?;
        let at_lengths = write_section(tables, starts.len(), lengths)?;
        Ok(CrcChunks { chunks: chunks.to_vec(), starts: at_starts, lengths: at_lengths })
    }

    /// Computes the CRC of each chunk as a `u32` of `crcs`, by at most `blocks` blocks.
    ///
    /// # Errors
    /// If `crcs` has another length than 4 bytes per chunk, or if the launch fails.
    pub fn compute(&self, stream: &dyn Stream, blocks: u32, crcs: &Slice) -> Result<(), DeviceError> {
        check_crcs(Some(crcs), 4 * self.chunks.len())?;
        let count = self.chunks.len() as u32;
        let mut launch = Launch::new("larder_crc32_chunks", blocks.clamp(1, count), BLOCK_THREADS)
            .arg(Arg::read(&self.starts))
            .arg(Arg::read(&self.lengths))
            .arg(count)
            .arg(Arg::write(crcs));
        for chunk in &self.chunks {
            launch = launch.reaching(Arg::read(chunk));
        }
        // SAFETY: the arguments follow the kernel's parameters. The tables lead to the chunks only,
        // and `crcs` has an entry for each.
        unsafe { stream.launch(&launch) }
    }
}
