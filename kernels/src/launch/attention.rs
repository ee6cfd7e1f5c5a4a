//! Causal attention over pages on a device.
//!
//! Two ways give the same bits. [`Attention::prefill`] has one block per 16 queries and key head,
//! which visits all keys. [`Attention::split`] has one block per [`SPAN`] keys, and a second kernel
//! that merges them: few queries with many keys then keep a whole device busy.
//!
//! Both exist for each [`Arithmetic`]. Its choice changes the bits.

use super::{Arithmetic, DevicePages, Element, blocks, elements, enqueue, expect, select_pair, size};
use crate::cpu::AttentionShape;
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};
use bytemuck::{Pod, Zeroable};

/// Keys per span. Spans begin at fixed positions, so the order of all sums is fixed.
pub const SPAN: usize = 256;
const BLOCK_THREADS: u32 = 128;
/// Largest `head_dim` of the two variants of each kernel.
const VARIANTS: [usize; 2] = [64, 128];
const PREFILL: [[&str; 5]; 2] = [
    [
        "attention_prefill_f32_f32_d64",
        "attention_prefill_f32_f16_d64",
        "attention_prefill_f32_bf16_d64",
        "attention_prefill_f16_f16_d64",
        "attention_prefill_bf16_bf16_d64",
    ],
    [
        "attention_prefill_f32_f32_d128",
        "attention_prefill_f32_f16_d128",
        "attention_prefill_f32_bf16_d128",
        "attention_prefill_f16_f16_d128",
        "attention_prefill_bf16_bf16_d128",
    ],
];
const SPLIT: [[&str; 5]; 2] = [
    [
        "attention_split_f32_f32_d64",
        "attention_split_f32_f16_d64",
        "attention_split_f32_bf16_d64",
        "attention_split_f16_f16_d64",
        "attention_split_bf16_bf16_d64",
    ],
    [
        "attention_split_f32_f32_d128",
        "attention_split_f32_f16_d128",
        "attention_split_f32_bf16_d128",
        "attention_split_f16_f16_d128",
        "attention_split_bf16_bf16_d128",
    ],
];

/// Kernels on tensor cores, for queries of f32 and of bf16.
const TENSOR_PREFILL: [[&str; 2]; 2] = [
    ["attention_mma_prefill_f32_d64", "attention_mma_prefill_bf16_d64"],
    ["attention_mma_prefill_f32_d128", "attention_mma_prefill_bf16_d128"],
];
const TENSOR_SPLIT: [[&str; 2]; 2] = [
    ["attention_mma_split_f32_d64", "attention_mma_split_bf16_d64"],
    ["attention_mma_split_f32_d128", "attention_mma_split_bf16_d128"],
];
/// Threads of a block of [`TENSOR_SPLIT`].
const TENSOR_SPLIT_THREADS: u32 = 32;

/// Consecutive queries of one sequence in a batch, as the kernels read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SequenceRows {
    /// Row of the first query in the batch.
    pub first_row: u32,
    pub rows: u32,
    /// Position of the first query in its sequence.
    pub position: u32,
    /// Entry of the sequence's first page in the page table.
    pub first_page: u32,
}

/// Divides the queries of a batch into tiles of at most `tile` queries: sequence, and first query.
/// `heads_per_kv` is the number of query heads per key head. The last queries of a sequence see the
/// most keys and come first, so that no long tile starts at the end of a launch.
///
/// A sequence of 2³² queries or more gets no tiles beyond the limit.
pub fn tiles(sequences: &[SequenceRows], heads_per_kv: usize, tile: usize) -> Vec<[u32; 2]> {
    let of_sequence = |(index, sequence): (u32, &SequenceRows)| {
        let queries = (sequence.rows as usize).saturating_mul(heads_per_kv).min(u32::MAX as usize);
        (0..queries).step_by(tile.max(1)).rev().map(move |first| [index, first as u32])
    };
    (0..).zip(sequences).flat_map(of_sequence).collect()
}

/// Number of spans that the longest sequence has.
pub fn span_count(sequences: &[SequenceRows]) -> usize {
    let tokens = |sequence: &SequenceRows| (sequence.position as usize).saturating_add(sequence.rows as usize);
    sequences.iter().map(tokens).max().unwrap_or(0).div_ceil(SPAN)
}

/// Length of the working memory of [`Attention::split`], in f32.
///
/// # Errors
/// If the product overflows.
pub fn partial_floats(rows: usize, shape: &AttentionShape, spans: usize) -> Result<usize, DeviceError> {
    elements(&[rows, shape.heads, spans, shape.head_dim.saturating_add(2)])
}

/// Attention of a batch. Query `r` of a sequence sees its keys up to position `position + r`.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// [`Arithmetic::Tensor`] needs pages of bf16, and queries of f32 or bf16.
    pub arithmetic: Arithmetic,
    /// Type of queries and results.
    pub element: Element,
    /// `head_dim` is a multiple of 8 and at most 128.
    pub shape: AttentionShape,
    pub rows: usize,
    /// `[rows][query_stride]`. Each row begins with its `[heads][head_dim]` queries.
    pub queries: &'a Slice,
    pub query_stride: usize,
    /// `[sequence_count]`, [`SequenceRows`]. A kernel computes nothing for a sequence that leaves
    /// the rows or the page table.
    pub sequences: &'a Slice,
    pub sequence_count: usize,
    /// `[tile_count]`, see [`tiles`].
    pub tiles: &'a Slice,
    pub tile_count: usize,
    /// Keys and values. Tokens begin at multiples of 16 bytes.
    pub pages: DevicePages<'a>,
    /// Indices in the pool of each sequence's pages from position 0: `[page_entries]`, u32.
    pub page_table: &'a Slice,
    pub page_entries: usize,
    /// Result, `[rows][heads][head_dim]`.
    pub out: &'a Slice,
}

impl Attention<'_> {
    /// Enqueues the attention of chunks. `tiles` are of [`Arithmetic::prefill_tile`] queries.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn prefill(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let variant = self.check()?;
        let kernel = match self.arithmetic {
            Arithmetic::Plain => select_pair(self.element, self.pages.element, PREFILL[variant])?,
            Arithmetic::Tensor => self.select_tensor(TENSOR_PREFILL[variant])?,
        };
        if self.tile_count == 0 {
            return Ok(());
        }
        let grid = [size(self.tile_count)?, blocks(self.shape.kv_heads)?, 1];
        enqueue(stream, &self.attend(kernel, grid, BLOCK_THREADS)?.arg(Arg::write(self.out)))
    }

    /// Enqueues the attention of few queries with many keys, span by span. `tiles` are of
    /// [`Arithmetic::split_tile`] queries. `spans` is at least the [`span_count`] of the sequences:
    /// keys of later spans are not seen. `partials` holds [`partial_floats`] f32 of working memory.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn split(&self, stream: &dyn Stream, spans: usize, partials: &Slice) -> Result<(), DeviceError> {
        let variant = self.check()?;
        let (kernel, threads, combine) = match self.arithmetic {
            Arithmetic::Plain => {
                let names = ["attention_combine_f32", "attention_combine_f16", "attention_combine_bf16"];
                let kernel = select_pair(self.element, self.pages.element, SPLIT[variant])?;
                (kernel, BLOCK_THREADS, self.element.select(names))
            }
            Arithmetic::Tensor => {
                let combine = self.select_tensor(["attention_mma_combine_f32", "attention_mma_combine_bf16"])?;
                (self.select_tensor(TENSOR_SPLIT[variant])?, TENSOR_SPLIT_THREADS, combine)
            }
        };
        let floats = partial_floats(self.rows, &self.shape, spans)?;
        expect(partials, &[floats], 4, "attention: the working memory is too short")?;
        if self.tile_count == 0 || spans == 0 {
            return Ok(());
        }
        let (tiles, kv_heads) = (size(self.tile_count)?, blocks(self.shape.kv_heads)?);
        let split = self.attend(kernel, [tiles, kv_heads, blocks(spans)?], threads)?.arg(Arg::write(partials));
        enqueue(stream, &split)?;
        let combine = Launch::new(combine, tiles, BLOCK_THREADS)
            .grid([tiles, kv_heads, 1])
            .arg(Arg::read(partials))
            .arg(size(spans)?)
            .arg(Arg::read(self.sequences))
            .arg(size(self.sequence_count)?)
            .arg(Arg::read(self.tiles))
            .arg(size(self.rows)?)
            .arg(size(self.shape.heads)?)
            .arg(kv_heads)
            .arg(size(self.shape.head_dim)?)
            .arg(size(self.pages.page_tokens)?)
            .arg(size(self.page_entries)?)
            .arg(Arg::write(self.out));
        enqueue(stream, &combine)
    }

    /// Selects a kernel on tensor cores from those for queries of f32 and bf16.
    fn select_tensor(&self, names: [&'static str; 2]) -> Result<&'static str, DeviceError> {
        match (self.element, self.pages.element) {
            (Element::F32, Element::Bf16) => Ok(names[0]),
            (Element::Bf16, Element::Bf16) => Ok(names[1]),
            _ => Err(DeviceError::Shape("attention on tensor cores needs pages of bf16, and no queries of f16")),
        }
    }

    /// Checks all shapes but those of the pages. Returns the index of the kernel's variant.
    fn check(&self) -> Result<usize, DeviceError> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(DeviceError::Shape("attention: the key heads do not divide the heads"));
        }
        let variant = VARIANTS.iter().position(|&largest| head_dim <= largest);
        let variant = variant.filter(|_| head_dim > 0 && head_dim.is_multiple_of(8));
        let variant = variant.ok_or(DeviceError::Shape("attention: head_dim is no multiple of 8 up to 128"))?;
        let width = elements(&[heads, head_dim])?;
        if self.query_stride < width {
            return Err(DeviceError::Shape("attention: a row of queries is shorter than its heads"));
        }
        let bytes = self.element.bytes();
        expect(self.queries, &[self.rows, self.query_stride], bytes, "attention: the queries are too short")?;
        expect(self.out, &[self.rows, width], bytes, "attention: the result is shorter than its rows")?;
        expect(self.sequences, &[self.sequence_count, 4], 4, "attention: the sequences are too short")?;
        expect(self.tiles, &[self.tile_count, 2], 4, "attention: the tiles are too short")?;
        expect(self.page_table, &[self.page_entries], 4, "attention: the page table is too short")?;
        Ok(variant)
    }

    /// The launch without its last argument.
    fn attend(&self, kernel: &'static str, grid: [u32; 3], threads: u32) -> Result<Launch, DeviceError> {
        let sizes = self.pages.check(self.shape.kv_heads, self.shape.head_dim)?;
        self.pages.check_alignment()?;
        let launch = Launch::new(kernel, grid[0], threads)
            .grid(grid)
            .arg(Arg::read(self.queries))
            .arg(size(self.query_stride)?)
            .arg(Arg::read(self.sequences))
            .arg(size(self.sequence_count)?)
            .arg(Arg::read(self.tiles))
            .arg(size(self.rows)?)
            .arg(size(self.shape.heads)?)
            .arg(size(self.shape.kv_heads)?)
            .arg(size(self.shape.head_dim)?)
            .arg(self.shape.scale)
            .arg(Arg::read(self.pages.pool))
            .arg(sizes.page_elements)
            .arg(sizes.page_count)
            .arg(sizes.page_tokens)
            .arg(Arg::read(self.page_table))
            .arg(size(self.page_entries)?)
            .arg(Arg::read(self.pages.starts))
            .arg(sizes.token_stride);
        Ok(launch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(rows: u32, position: u32) -> SequenceRows {
        SequenceRows { first_row: 0, rows, position, first_page: 0 }
    }

    #[test]
    fn tiles_cover_every_query_once_and_begin_with_the_last() {
        let found = tiles(&[sequence(3, 0), sequence(0, 9), sequence(1, 500)], 6, 16);
        assert_eq!(found, [[0, 16], [0, 0], [2, 0]]);
        assert!(tiles(&[], 4, 16).is_empty());
    }

    #[test]
    fn spans_cover_the_longest_sequence() {
        assert_eq!(span_count(&[]), 0);
        assert_eq!(span_count(&[sequence(1, 255), sequence(6, 0)]), 1);
        assert_eq!(span_count(&[sequence(1, 256)]), 2);
        assert_eq!(span_count(&[sequence(u32::MAX, u32::MAX)]), 1 << 25);
    }
}
