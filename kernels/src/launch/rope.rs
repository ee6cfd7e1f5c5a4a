//! Per-head norm, rotary position embedding, and the store of keys and values into pages.

use super::{DevicePages, Element, blocks, enqueue, expect, select_pair, size};
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};

/// Heads per block: one warp each.
const BLOCK_HEADS: usize = 4;
const BLOCK_THREADS: u32 = 128;
const KERNELS: [&str; 5] = ["rope_f32_f32", "rope_f32_f16", "rope_f32_bf16", "rope_f16_f16", "rope_bf16_bf16"];

/// Rotation of the queries in place. The rotated keys and the values go to pages, if `target` is
/// present. Otherwise the keys are rotated in place, too.
#[derive(Debug, Clone, Copy)]
pub struct Rotate<'a> {
    pub element: Element,
    pub rows: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Even. Element `i` of a head rotates with element `i + head_dim / 2`.
    pub head_dim: usize,
    /// `[rows][row_stride]`. Each row begins with its query heads, key heads and value heads.
    pub qkv: &'a Slice,
    pub row_stride: usize,
    /// `[rows][head_dim]`, f32: the cosines of a row's pairs, then the sines. See
    /// [`RopeTable::values`](crate::cpu::RopeTable::values).
    pub table: &'a Slice,
    /// RMS norm of each query head before the rotation: `[head_dim]`, f32.
    pub query_norm: Option<&'a Slice>,
    /// RMS norm of each key head before the rotation: `[head_dim]`, f32.
    pub key_norm: Option<&'a Slice>,
    pub eps: f32,
    pub target: Option<KvTarget<'a>>,
}

/// Places in pages for the keys and values of rows.
#[derive(Debug, Clone, Copy)]
pub struct KvTarget<'a> {
    pub pages: DevicePages<'a>,
    /// Place of each row: `page · page_tokens + token in the page`. `[rows]`, u32. The kernel
    /// leaves out a row whose place lies outside the pool.
    pub slots: &'a Slice,
}

impl Rotate<'_> {
    /// Enqueues the rotation.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, head_dim) = (size(self.rows)?, size(self.head_dim)?);
        let (heads, kv_heads) = (size(self.heads)?, size(self.kv_heads)?);
        let row_stride = size(self.row_stride)?;
        let all_heads = self.heads + 2 * self.kv_heads;
        if !self.head_dim.is_multiple_of(2) || super::elements(&[all_heads, self.head_dim])? > self.row_stride {
            return Err(DeviceError::Shape("rope: a row is shorter than its heads, or a head has no whole pairs"));
        }
        expect(self.qkv, &[self.rows, self.row_stride], self.element.bytes(), "rope: the input is too short")?;
        expect(self.table, &[self.rows, self.head_dim], 4, "rope: the table is shorter than the rows")?;
        for norm in self.query_norm.iter().chain(&self.key_norm) {
            expect(norm, &[self.head_dim], 4, "rope: a norm is shorter than a head")?;
        }
        if rows == 0 || all_heads == 0 || head_dim == 0 {
            return Ok(());
        }
        let pages = self.target.map_or(self.element, |target| target.pages.element);
        let kernel = select_pair(self.element, pages, KERNELS)?;
        let optional = |slice: Option<&Slice>| slice.map_or(Arg::Null, Arg::read);
        let launch = Launch::new(kernel, rows, BLOCK_THREADS)
            .grid([rows, blocks(all_heads.div_ceil(BLOCK_HEADS))?, 1])
            .arg(Arg::read_write(self.qkv))
            .arg(row_stride)
            .arg(heads)
            .arg(kv_heads)
            .arg(head_dim)
            .arg(Arg::read(self.table))
            .arg(optional(self.query_norm))
            .arg(optional(self.key_norm))
            .arg(self.eps);
        let launch = match &self.target {
            None => launch.arg(Arg::Null).arg(Arg::Null).arg(0u64).arg(0u32).arg(1u32).arg(Arg::Null).arg(0u32),
            Some(KvTarget { pages, slots }) => {
                let sizes = pages.check(self.kv_heads, self.head_dim)?;
                expect(slots, &[self.rows], 4, "rope: the slots are fewer than the rows")?;
                launch
                    .arg(Arg::read(slots))
                    .arg(Arg::write(pages.pool))
                    .arg(sizes.page_elements)
                    .arg(sizes.page_count)
                    .arg(sizes.page_tokens)
                    .arg(Arg::read(pages.starts))
                    .arg(sizes.token_stride)
            }
        };
        enqueue(stream, &launch)
    }
}
