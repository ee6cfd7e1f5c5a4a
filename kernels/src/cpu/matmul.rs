//! Products of activations with a weight matrix that is packed once, when the model is loaded.
//!
//! Invariant: one order of operations defines every result, `sum = fma(x[i], weight[i], sum)` for
//! `i` from 0 on, starting at 0. So the result of a row does not depend on the other rows, the
//! number of threads or the instruction set, not even in one bit. [`WeightType::narrow`] types have
//! definitions of their own, in `pairs` and `quads`. There, a row does not depend on other rows or
//! threads either.
//!
//! Weights stay in their type and become `f32` in registers. For many rows, a task instead converts
//! a piece of a panel once and uses it for all of its rows. A single row waits for memory and for
//! its own sums, so it has six vectors of them at once: a whole panel, or two panels with AVX-512.

mod pairs;
mod quads;

use super::disjoint::DisjointSlice;
use super::stored::{self, PANEL, Q8_BLOCK, Stored, WeightType};
use super::vector::{InstructionSet, Kernel, Vector};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;
use thiserror::Error;

/// Vectors of outputs per tile. With [`Vector::TILE_ROWS`] rows, the sums fill the registers.
const TILE_VECTORS: usize = 3;
/// Vectors of outputs per tile of a single row.
const ROW_VECTORS: usize = 2 * TILE_VECTORS;
/// Fewest panels for each thread with which a task of a single row has two of them. With fewer, the
/// longer tasks would leave threads without work at the end.
const PAIR_PANELS_PER_THREAD: usize = 8;
/// Inputs of a panel that one pass over the rows uses. In `f32` they take 96 KiB, which stay in the
/// L2 cache.
const BLOCK_INPUTS: usize = 512;
/// Fewest rows for which a task converts a piece of a panel before it multiplies.
const EXPAND_ROWS: usize = 32;
/// Limits of the rows per task. More rows amortise the conversion, fewer leave tasks for all
/// threads.
const TASK_ROWS: (usize, usize) = (32, 256);
/// Multiplications per rayon task. Smaller products run on the calling thread.
const TASK_PRODUCTS: usize = 1 << 16;
/// Pieces of a product for each thread. More leave shorter waits for the slowest thread at the end.
const PIECES_PER_THREAD: usize = 16;
/// Distance from the weights in use to those that are requested from memory. The processor's own
/// prefetch stops at each page of 4 KiB.
const PREFETCH_BYTES: usize = 2048;

// A piece of a panel begins with a block of scales.
const _: () = assert!(BLOCK_INPUTS.is_multiple_of(Q8_BLOCK));

/// One cache line, so that every panel begins on a cache line.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Weight matrix `[outputs][inputs]`, packed for [`matmul`].
#[derive(Clone)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    weight_type: WeightType,
    /// Cache lines per panel.
    panel_lines: usize,
    panels: Vec<CacheLine>,
}

/// The allocator has no memory for a matrix of this size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no memory for a matrix of {outputs} × {inputs}")]
pub struct PackError {
    pub outputs: usize,
    pub inputs: usize,
}

impl PackedMatrix {
    /// Packs a matrix. `fill(output, row)` writes the `inputs` weights of one output, which are
    /// then rounded to `weight_type`. Calls `fill` from several threads.
    ///
    /// # Errors
    /// If the allocation fails.
    ///
    /// # Panics
    /// If this machine cannot multiply weights of this type. It can if [`WeightType::narrow`]
    /// returned it.
    pub fn new(
        outputs: usize,
        inputs: usize,
        weight_type: WeightType,
        fill: impl Fn(usize, &mut [f32]) + Send + Sync,
    ) -> Result<PackedMatrix, PackError> {
        assert!(weight_type.is_available(), "this machine multiplies weights of this type");
        let error = PackError { outputs, inputs };
        let panel_lines = weight_type.panel_bytes(inputs).ok_or(error.clone())?.div_ceil(size_of::<CacheLine>());
        let len = outputs.div_ceil(PANEL).checked_mul(panel_lines).ok_or(error.clone())?;
        let mut panels = Vec::new();
        panels.try_reserve_exact(len).map_err(|_| error)?;
        prefer_huge_pages(panels.spare_capacity_mut());
        panels.resize(len, CacheLine([0; 64]));
        panels.par_chunks_mut(panel_lines.max(1)).enumerate().for_each_init(
            || vec![0.0; inputs],
            |row, (index, panel)| {
                let panel = bytemuck::cast_slice_mut(panel);
                for lane in 0..PANEL.min(outputs - index * PANEL) {
                    fill(index * PANEL + lane, row);
                    weight_type.write(panel, lane, row);
                }
            },
        );
        Ok(PackedMatrix { outputs, inputs, weight_type, panel_lines, panels })
    }

    /// A matrix without weights, which multiplies nothing.
    pub fn empty() -> PackedMatrix {
        PackedMatrix { outputs: 0, inputs: 0, weight_type: WeightType::F32, panel_lines: 0, panels: Vec::new() }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Memory of the packed weights, in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.panels[..])
    }

    /// Copies the weights of one output. The embedding of a token is read this way.
    ///
    /// # Panics
    /// If the output does not exist, or `row` has another length than `inputs`.
    pub fn copy_row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs && row.len() == self.inputs, "the row exists and fits");
        self.weight_type.read(self.panel(output / PANEL), output % PANEL, row);
    }

    fn panel(&self, index: usize) -> &[u8] {
        self.panels(&(index..index + 1))
    }

    /// Consecutive panels, [`panel_distance`](Self::panel_distance) from each other.
    fn panels(&self, range: &Range<usize>) -> &[u8] {
        bytemuck::cast_slice(&self.panels[range.start * self.panel_lines..range.end * self.panel_lines])
    }

    /// Distance from one panel to the next, in bytes.
    fn panel_distance(&self) -> usize {
        self.panel_lines * size_of::<CacheLine>()
    }
}

/// Asks for huge pages, which make reading all weights faster: fewer addresses must be translated.
/// Without them, the matrix works all the same.
fn prefer_huge_pages(memory: &mut [std::mem::MaybeUninit<CacheLine>]) {
    const PAGE: usize = 4096;
    let start = memory.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(PAGE);
    if let Some(len) = size_of_val(memory).checked_sub(skipped)
        && len >= PAGE
    {
        // SAFETY: the range lies in memory that this function borrows exclusively, and the advice
        // changes no content.
        let _ = unsafe {
            let start = start.add(skipped).cast();
            rustix::mm::madvise(start, len / PAGE * PAGE, rustix::mm::Advice::LinuxHugepage)
        };
    }
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedMatrix({} × {}, {:?})", self.outputs, self.inputs, self.weight_type)
    }
}

/// Computes `out[r][o] = Σ_i x[r][i] · weight[o][i] + bias[o]`. Sums in the order of `i`.
///
/// Shapes: `x` is `[rows][inputs]`, `bias` is `[outputs]`, `out` is `[rows][outputs]`.
///
/// # Panics
/// If the shapes disagree.
pub fn matmul(x: &[f32], weight: &PackedMatrix, bias: Option<&[f32]>, out: &mut [f32]) {
    // SAFETY: the machine has its best instruction set.
    unsafe { matmul_with(InstructionSet::best(), x, weight, bias, out) }
}

/// # Safety
/// The machine has the instruction set `set`.
unsafe fn matmul_with(set: InstructionSet, x: &[f32], weight: &PackedMatrix, bias: Option<&[f32]>, out: &mut [f32]) {
    let PackedMatrix { outputs, inputs, .. } = *weight;
    assert!(inputs > 0 && outputs > 0, "a matrix has elements");
    let rows = x.len() / inputs;
    assert!(x.len() == rows * inputs && out.len() == rows * outputs, "shapes of the product agree");
    assert!(bias.is_none_or(|b| b.len() == outputs), "the bias has one value per output");
    let panels = outputs.div_ceil(PANEL);
    let together = panels_per_task(set, rows, panels);
    let groups = panels.div_ceil(together);
    let task_rows = rows_per_task(rows, panels);
    let tasks = rows.div_ceil(task_rows) * groups;
    let out = DisjointSlice::new(out);
    let x = Activations::new(x, weight);
    let task = |index: usize| {
        // Neighbouring indices share rows, so the rows stay in the cache while the panels pass.
        let (block, first_panel) = (index / groups, index % groups * together);
        let own = first_panel..panels.min(first_panel + together);
        let first_row = block * task_rows;
        let own_rows = first_row..(first_row + task_rows).min(rows);
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the caller guarantees the instruction set.
            let sums = unsafe { panel_product(set, &x, own_rows, weight, &own, scratch) };
            let first = first_panel * PANEL;
            let width = (own.len() * PANEL).min(outputs - first);
            for (row, sums) in (first_row..).zip(sums.chunks_exact(own.len() * PANEL)) {
                // SAFETY: each index is a distinct pair of row block and panels, so no two tasks
                // write the same outputs.
                let out = unsafe { out.range_mut(row * outputs + first, width) };
                out.copy_from_slice(&sums[..width]);
                if let Some(bias) = bias {
                    out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
                }
            }
        });
    };
    let tasks_at_least = (TASK_PRODUCTS / (rows.min(task_rows) * together * PANEL * inputs).max(1)).max(1);
    if tasks <= tasks_at_least {
        return (0..tasks).for_each(task);
    }
    let tasks_at_most = (tasks / (PIECES_PER_THREAD * rayon::current_num_threads())).max(tasks_at_least);
    (0..tasks).into_par_iter().with_min_len(tasks_at_least).with_max_len(tasks_at_most).for_each(task);
}

/// Panels per task. The choice changes no bit.
fn panels_per_task(set: InstructionSet, rows: usize, panels: usize) -> usize {
    let is_whole = TILE_VECTORS * set.lanes() == PANEL;
    let are_many = panels >= PAIR_PANELS_PER_THREAD * rayon::current_num_threads();
    if rows == 1 && is_whole && are_many { 2 } else { 1 }
}

/// Rows per task that leave about four tasks for each thread. The choice changes no bit.
fn rows_per_task(rows: usize, panels: usize) -> usize {
    let blocks = (4 * rayon::current_num_threads()).div_ceil(panels);
    let (fewest, most) = TASK_ROWS;
    rows.div_ceil(blocks).next_multiple_of(8).clamp(fewest, most)
}

/// Buffers of a thread, reused by its later tasks.
#[derive(Default)]
struct Scratch {
    /// `[rows][PANEL]`, or `[panels][PANEL]` for a single row.
    sums: Vec<f32>,
    /// `[BLOCK_INPUTS][PANEL]`: a piece of a panel in `f32`.
    expanded: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The rows of a product, as its weights need them.
enum Activations<'a> {
    F32(&'a [f32]),
    Pairs(pairs::Rows),
    Quads(quads::Rows),
}

impl Activations<'_> {
    fn new<'a>(x: &'a [f32], weight: &PackedMatrix) -> Activations<'a> {
        match weight.weight_type {
            WeightType::Bf16Pairs => Activations::Pairs(pairs::Rows::round(x, weight.inputs)),
            WeightType::Q8Quads => Activations::Quads(quads::Rows::round(x, weight.inputs)),
            WeightType::F32 | WeightType::Bf16 | WeightType::F16 | WeightType::Q8 => Activations::F32(x),
        }
    }
}

/// Multiplies some rows of `x` by one panel, or a single row by several. Returns `[rows][PANEL]` or
/// `[panels][PANEL]`; outputs beyond the matrix are 0.
///
/// # Safety
/// The machine has the instruction set `set`.
unsafe fn panel_product<'a>(
    set: InstructionSet,
    x: &Activations<'_>,
    rows: Range<usize>,
    weight: &PackedMatrix,
    panels: &Range<usize>,
    scratch: &'a mut Scratch,
) -> &'a [f32] {
    let inputs = weight.inputs;
    let distance = weight.panel_distance();
    // The kernels read the panels through pointers, so their lengths are checked here.
    assert!(weight.weight_type.panel_bytes(inputs).is_some_and(|bytes| bytes <= distance), "a panel is whole");
    assert!(panels.len() == 1 || rows.len() == 1, "only a single row has several panels");
    let Scratch { sums, expanded } = scratch;
    sums.clear();
    sums.resize(rows.len() * panels.len() * PANEL, 0.0);
    let panels = weight.panels(panels);
    match x {
        Activations::Pairs(x) => pairs::multiply(x, rows, panels, distance, sums),
        Activations::Quads(x) => quads::multiply(x, rows, panels, distance, sums),
        Activations::F32(x) => {
            let x = &x[rows.start * inputs..rows.end * inputs];
            expanded.resize(BLOCK_INPUTS * PANEL, 0.0);
            // SAFETY: the caller guarantees the instruction set. Each panel holds `inputs` inputs
            // of its type, `x` has whole rows, and the buffers have the lengths of `PanelProduct`.
            unsafe {
                match weight.weight_type {
                    WeightType::F32 => {
                        set.run(PanelProduct::<stored::F32>::new(x, inputs, (panels, distance), sums, None));
                    }
                    WeightType::Bf16 => {
                        set.run(PanelProduct::<stored::Bf16>::new(x, inputs, (panels, distance), sums, Some(expanded)));
                    }
                    WeightType::F16 => {
                        set.run(PanelProduct::<stored::F16>::new(x, inputs, (panels, distance), sums, Some(expanded)));
                    }
                    WeightType::Q8 => {
                        set.run(PanelProduct::<stored::Q8>::new(x, inputs, (panels, distance), sums, Some(expanded)));
                    }
                    WeightType::Bf16Pairs | WeightType::Q8Quads => unreachable!("their rows are not f32"),
                }
            }
        }
    }
    sums
}

/// Adds the products of all rows with one panel of type `S` to `sums`, or those of a single row
/// with several panels.
///
/// Contract of [`Kernel::run`]: each panel has `inputs` inputs, `x` is `[rows][inputs]`, `sums` is
/// `[rows][PANEL]`, or `[panels][PANEL]` of zeros for a single row, and `expanded` is
/// `[BLOCK_INPUTS][PANEL]`.
struct PanelProduct<'a, S> {
    x: &'a [f32],
    inputs: usize,
    panels: &'a [u8],
    /// Distance from one panel to the next, in bytes.
    distance: usize,
    sums: &'a mut [f32],
    /// `None` if the weights need no conversion.
    expanded: Option<&'a mut [f32]>,
    stored: std::marker::PhantomData<S>,
}

impl<'a, S> PanelProduct<'a, S> {
    fn new(
        x: &'a [f32],
        inputs: usize,
        (panels, distance): (&'a [u8], usize),
        sums: &'a mut [f32],
        expanded: Option<&'a mut Vec<f32>>,
    ) -> Self {
        let expanded = expanded.map(Vec::as_mut_slice);
        PanelProduct { x, inputs, panels, distance, sums, expanded, stored: std::marker::PhantomData }
    }
}

impl<S: Stored> Kernel for PanelProduct<'_, S> {
    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let rows = self.x.len() / self.inputs;
        let panel = self.panels.as_ptr();
        if rows == 1 {
            // SAFETY: the contract covers the row, the panels and their sums.
            return unsafe { single_row::<V, S>(panel, self.distance, self.x, self.sums) };
        }
        for first in (0..self.inputs).step_by(BLOCK_INPUTS) {
            let len = BLOCK_INPUTS.min(self.inputs - first);
            // SAFETY: `first` lies in the rows of `x`, and `first + len` inputs in the panel. The
            // contract covers the rest.
            unsafe {
                let x = self.x.as_ptr().add(first);
                match &mut self.expanded {
                    Some(expanded) if rows >= EXPAND_ROWS => {
                        expand::<V, S>(panel, first, len, expanded.as_mut_ptr());
                        tiles::<V, stored::F32>(expanded.as_ptr().cast(), 0, len, x, self.inputs, self.sums);
                    }
                    _ => tiles::<V, S>(panel, first, len, x, self.inputs, self.sums),
                }
            }
        }
    }
}

/// Computes the products of one row `x` with panels, into `sums`: `[panels][PANEL]`.
///
/// # Safety
/// The machine has the instruction set of `V`. Each panel has as many inputs as `x`, and begins
/// `distance` bytes after the one before.
#[inline(always)]
unsafe fn single_row<V: Vector, S: Stored>(panels: *const u8, distance: usize, x: &[f32], sums: &mut [f32]) {
    let mut rest = sums;
    let mut panel = panels;
    while !rest.is_empty() {
        let is_pair = TILE_VECTORS * V::LANES == PANEL && rest.len() >= 2 * PANEL;
        let (own, others) = rest.split_at_mut(if is_pair { 2 * PANEL } else { PANEL });
        // SAFETY: the caller guarantees the panels, and each set has one of both lengths of vectors
        // that fill a panel. The pointer after the last panel is not read.
        unsafe {
            match V::LANES * TILE_VECTORS {
                PANEL if is_pair => row_tile::<V, S, 2, TILE_VECTORS>(panel, distance, x, own),
                PANEL => row_tile::<V, S, 1, TILE_VECTORS>(panel, distance, x, own),
                _ => row_tile::<V, S, 1, ROW_VECTORS>(panel, distance, x, own),
            }
        }
        panel = panel.wrapping_add(own.len() / PANEL * distance);
        rest = others;
    }
}

/// Computes the products of one row `x` with `PANELS` panels of `VECTORS` vectors, into `sums`.
///
/// # Safety
/// As for [`single_row`].
///
/// # Panics
/// If the sums have another length, or if so many vectors do not fill a panel.
// Constant indices keep the sums in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn row_tile<V: Vector, S: Stored, const PANELS: usize, const VECTORS: usize>(
    panels: *const u8,
    distance: usize,
    x: &[f32],
    sums: &mut [f32],
) {
    assert!(VECTORS * V::LANES == PANEL && sums.len() == PANELS * PANEL, "the sums have all columns");
    let sums = sums.as_mut_ptr();
    // SAFETY: the caller guarantees the panels. The inputs lie in `x`, and the sums have all
    // columns. Prefetches may go anywhere.
    unsafe {
        let mut tile = [[V::splat(0.0); VECTORS]; PANELS];
        let mut start = 0;
        while start < x.len() {
            let end = x.len().min(start.saturating_add(S::BLOCK));
            let mut scales = [[V::splat(1.0); VECTORS]; PANELS];
            for p in 0..PANELS {
                for v in 0..VECTORS {
                    scales[p][v] = S::scale(panels.add(p * distance), start, v * V::LANES);
                }
            }
            for input in start..end {
                let x = V::splat(*x.get_unchecked(input));
                for p in 0..PANELS {
                    let panel = panels.add(p * distance);
                    let ahead = panel.wrapping_add(S::offset(input) + PREFETCH_BYTES);
                    for line in 0..S::STRIDE.div_ceil(64) {
                        V::prefetch(ahead.wrapping_add(64 * line));
                    }
                    for v in 0..VECTORS {
                        let weights: V = S::load(panel, input, v * V::LANES, scales[p][v]);
                        tile[p][v] = x.mul_add(weights, tile[p][v]);
                    }
                }
            }
            start = end;
        }
        for p in 0..PANELS {
            for v in 0..VECTORS {
                tile[p][v].store(sums.add(p * PANEL + v * V::LANES));
            }
        }
    }
}

/// Converts `len` inputs of a panel, from `first` on, to `f32`: `[len][PANEL]`.
///
/// # Safety
/// As for [`tile`]. `to` must be writable.
#[inline(always)]
unsafe fn expand<V: Vector, S: Stored>(panel: *const u8, first: usize, len: usize, to: *mut f32) {
    for column in (0..PANEL).step_by(V::LANES) {
        for start in (0..len).step_by(S::BLOCK.min(len)) {
            // SAFETY: the inputs lie in the panel and in `to`.
            unsafe {
                let scale = S::scale::<V>(panel, first + start, column);
                for input in start..len.min(start.saturating_add(S::BLOCK)) {
                    S::load::<V>(panel, first + input, column, scale).store(to.add(input * PANEL + column));
                }
            }
        }
    }
}

/// Adds the products of all rows of `sums` with `len` inputs of a panel, from `first` on.
///
/// # Safety
/// As for [`tile`], with as many rows as `sums` has.
#[inline(always)]
unsafe fn tiles<V: Vector, S: Stored>(
    panel: *const u8,
    first: usize,
    len: usize,
    x: *const f32,
    stride: usize,
    sums: &mut [f32],
) {
    let rows = sums.len() / PANEL;
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        let count = [8, 4, 2, 1].into_iter().find(|&count| count <= left.min(V::TILE_ROWS)).unwrap_or(1);
        for column in (0..PANEL).step_by(TILE_VECTORS * V::LANES) {
            // SAFETY: the rows from `row` on number at least `count`.
            unsafe {
                let x = x.add(row * stride);
                let sums = sums.as_mut_ptr().add(row * PANEL + column);
                match count {
                    8 => tile::<V, S, 8>(panel, first, len, column, x, stride, sums),
                    4 => tile::<V, S, 4>(panel, first, len, column, x, stride, sums),
                    2 => tile::<V, S, 2>(panel, first, len, column, x, stride, sums),
                    _ => tile::<V, S, 1>(panel, first, len, column, x, stride, sums),
                }
            }
        }
        row += count;
    }
}

/// Adds the products of `ROWS` rows with `len` inputs of a panel, from `first` on, in the columns
/// from `column` on. `first` is a multiple of `S::BLOCK`, or 0.
///
/// # Safety
/// The machine has the instruction set of `V`. The panel has `first + len` inputs and
/// `column + TILE_VECTORS · V::LANES` columns. `x[row · stride + i]` is readable for every row and
/// `i < len`, and `sums[row · PANEL + c]` writable for the columns of the tile.
// Constant indices keep the sums in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tile<V: Vector, S: Stored, const ROWS: usize>(
    panel: *const u8,
    first: usize,
    len: usize,
    column: usize,
    x: *const f32,
    stride: usize,
    sums: *mut f32,
) {
    // SAFETY: the caller guarantees every address. Prefetches may go anywhere.
    unsafe {
        let mut tile = [[V::splat(0.0); TILE_VECTORS]; ROWS];
        for row in 0..ROWS {
            for v in 0..TILE_VECTORS {
                tile[row][v] = V::load_f32(sums.add(row * PANEL + v * V::LANES));
            }
        }
        let mut start = 0;
        while start < len {
            let end = len.min(start.saturating_add(S::BLOCK));
            let mut scales = [V::splat(1.0); TILE_VECTORS];
            for v in 0..TILE_VECTORS {
                scales[v] = S::scale(panel, first + start, column + v * V::LANES);
            }
            for input in start..end {
                let ahead = panel.wrapping_add(S::offset(first + input) + PREFETCH_BYTES);
                for line in 0..S::STRIDE.div_ceil(64) {
                    V::prefetch(ahead.wrapping_add(64 * line));
                }
                let mut weights = [V::splat(0.0); TILE_VECTORS];
                for v in 0..TILE_VECTORS {
                    weights[v] = S::load(panel, first + input, column + v * V::LANES, scales[v]);
                }
                for row in 0..ROWS {
                    let x = V::splat(*x.add(row * stride + input));
                    for v in 0..TILE_VECTORS {
                        tile[row][v] = x.mul_add(weights[v], tile[row][v]);
                    }
                }
            }
            start = end;
        }
        for row in 0..ROWS {
            for v in 0..TILE_VECTORS {
                tile[row][v].store(sums.add(row * PANEL + v * V::LANES));
            }
        }
    }
}

#[cfg(test)]
mod tests;
