//! The activation of the MLP, the residual addition, and the embedding.

use super::{Element, PACK_BYTES, THREADS, blocks, enqueue, expect, select_pair, size};
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};

const EMBEDDINGS: [&str; 5] =
    ["embedding_f32_f32", "embedding_f32_f16", "embedding_f32_bf16", "embedding_f16_f16", "embedding_bf16_bf16"];

/// Number of elements that a block covers with one pack per thread.
fn block_elements(element: Element) -> usize {
    THREADS as usize * PACK_BYTES / element.bytes()
}

/// Gated activation: `out = silu(gate) · up`, with `silu(x) = x / (1 + e^-x)`.
#[derive(Debug, Clone, Copy)]
pub struct SiluMul<'a> {
    pub element: Element,
    pub rows: usize,
    pub width: usize,
    /// `[rows][2 · width]`. Each row holds its gates, then its ups.
    pub gate_up: &'a Slice,
    /// Result, `[rows][width]`.
    pub out: &'a Slice,
}

impl SiluMul<'_> {
    /// Enqueues the activation.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, width) = (size(self.rows)?, size(self.width)?);
        let bytes = self.element.bytes();
        expect(self.gate_up, &[self.rows, 2, self.width], bytes, "silu: the input is shorter than its rows")?;
        expect(self.out, &[self.rows, self.width], bytes, "silu: the result is shorter than its rows")?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        let columns = blocks(self.width.div_ceil(block_elements(self.element)))?;
        let kernel = self.element.select(["silu_mul_f32", "silu_mul_f16", "silu_mul_bf16"]);
        let launch = Launch::new(kernel, rows, THREADS).grid([rows, columns, 1]);
        enqueue(stream, &launch.arg(Arg::read(self.gate_up)).arg(width).arg(Arg::write(self.out)))
    }
}

/// Addition of `count` elements: `x += y`.
#[derive(Debug, Clone, Copy)]
pub struct Add<'a> {
    pub element: Element,
    pub count: usize,
    pub x: &'a Slice,
    pub y: &'a Slice,
}

impl Add<'_> {
    /// Enqueues the addition.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let bytes = self.element.bytes();
        expect(self.x, &[self.count], bytes, "add: the sum is shorter than its elements")?;
        expect(self.y, &[self.count], bytes, "add: the addend is shorter than its elements")?;
        if self.count == 0 {
            return Ok(());
        }
        let grid = size(self.count.div_ceil(block_elements(self.element)))?;
        let kernel = self.element.select(["add_f32", "add_f16", "add_bf16"]);
        let launch = Launch::new(kernel, grid, THREADS).arg(Arg::read_write(self.x)).arg(Arg::read(self.y));
        enqueue(stream, &launch.arg(self.count as u64))
    }
}

/// Rounding of `count` elements of f32 to bf16.
#[derive(Debug, Clone, Copy)]
pub struct Narrow<'a> {
    pub count: usize,
    /// `[count]`, f32.
    pub x: &'a Slice,
    /// Result, `[count]`, bf16.
    pub out: &'a Slice,
}

impl Narrow<'_> {
    /// Enqueues the rounding.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        expect(self.x, &[self.count], 4, "narrow: the input is shorter than its elements")?;
        expect(self.out, &[self.count], 2, "narrow: the result is shorter than its elements")?;
        if self.count == 0 {
            return Ok(());
        }
        let grid = size(self.count.div_ceil(block_elements(Element::Bf16)))?;
        let launch = Launch::new("narrow_bf16", grid, THREADS).arg(Arg::read(self.x)).arg(self.count as u64);
        enqueue(stream, &launch.arg(Arg::write(self.out)))
    }
}

/// Rows of an embedding table: `out[r] = table[tokens[r]]`, or zeros for a token outside the
/// vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// Type of the result.
    pub element: Element,
    /// Type of the table: that of the result, or any for a result of f32.
    pub table_element: Element,
    pub vocab: usize,
    pub width: usize,
    pub rows: usize,
    /// `[vocab][width]`.
    pub table: &'a Slice,
    /// `[rows]`, u32.
    pub tokens: &'a Slice,
    /// Result, `[rows][width]`.
    pub out: &'a Slice,
}

impl Embedding<'_> {
    /// Enqueues the gather.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, width, vocab) = (size(self.rows)?, size(self.width)?, size(self.vocab)?);
        let (bytes, table_bytes) = (self.element.bytes(), self.table_element.bytes());
        let table = [self.vocab, self.width];
        expect(self.table, &table, table_bytes, "embedding: the table is shorter than the vocabulary")?;
        expect(self.tokens, &[self.rows], 4, "embedding: the tokens are fewer than the rows")?;
        expect(self.out, &[self.rows, self.width], bytes, "embedding: the result is shorter than its rows")?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        let kernel = select_pair(self.element, self.table_element, EMBEDDINGS)?;
        let launch = Launch::new(kernel, rows, THREADS).arg(Arg::read(self.table)).arg(vocab).arg(width);
        enqueue(stream, &launch.arg(Arg::read(self.tokens)).arg(Arg::write(self.out)))
    }
}
