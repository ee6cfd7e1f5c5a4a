//! Products of activations with a weight matrix that is packed once, when the model is loaded.
//!
//! Invariant: one order of operations defines every result, `sum = fma(x[i], weight[i], sum)` for
//! `i` from 0 on, starting at 0. So the result of a row does not depend on the other rows, the
//! number of threads or the instruction set, not even in one bit.
//!
//! Weights stay in their type and become `f32` in registers. For many rows, a task instead converts
//! a piece of a panel once and uses it for all of its rows.

use super::disjoint::DisjointSlice;
use super::stored::{self, PANEL, Q8_BLOCK, Stored, WeightType};
use super::vector::{InstructionSet, Kernel, Vector};
use rayon::prelude::*;
use std::cell::RefCell;
use thiserror::Error;

/// Vectors of outputs per tile. With [`Vector::TILE_ROWS`] rows, the sums fill the registers.
const TILE_VECTORS: usize = 3;
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
    pub fn new(
        outputs: usize,
        inputs: usize,
        weight_type: WeightType,
        fill: impl Fn(usize, &mut [f32]) + Send + Sync,
    ) -> Result<PackedMatrix, PackError> {
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

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
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
        bytemuck::cast_slice(&self.panels[index * self.panel_lines..(index + 1) * self.panel_lines])
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
    let task_rows = rows_per_task(rows, panels);
    let tasks = rows.div_ceil(task_rows) * panels;
    let out = DisjointSlice::new(out);
    let task = |index: usize| {
        // Neighbouring indices share rows, so the rows stay in the cache while the panels pass.
        let (block, panel) = (index / panels, index % panels);
        let first_row = block * task_rows;
        let x = &x[first_row * inputs..(first_row + task_rows).min(rows) * inputs];
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the caller guarantees the instruction set.
            let sums = unsafe { panel_product(set, x, weight, panel, scratch) };
            let first = panel * PANEL;
            let width = PANEL.min(outputs - first);
            for (row, sums) in (first_row..).zip(sums.chunks_exact(PANEL)) {
                // SAFETY: each index is a distinct pair of row block and panel, so no two tasks
                // write the same outputs.
                let out = unsafe { out.range_mut(row * outputs + first, width) };
                out.copy_from_slice(&sums[..width]);
                if let Some(bias) = bias {
                    out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
                }
            }
        });
    };
    let tasks_at_least = (TASK_PRODUCTS / (rows.min(task_rows) * PANEL * inputs).max(1)).max(1);
    if tasks <= tasks_at_least {
        return (0..tasks).for_each(task);
    }
    let tasks_at_most = (tasks / (PIECES_PER_THREAD * rayon::current_num_threads())).max(tasks_at_least);
    (0..tasks).into_par_iter().with_min_len(tasks_at_least).with_max_len(tasks_at_most).for_each(task);
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
    /// `[rows][PANEL]`.
    sums: Vec<f32>,
    /// `[BLOCK_INPUTS][PANEL]`: a piece of a panel in `f32`.
    expanded: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Multiplies all rows of `x` by one panel. Returns `[rows][PANEL]`; outputs beyond the matrix are
/// 0.
///
/// # Safety
/// The machine has the instruction set `set`.
unsafe fn panel_product<'a>(
    set: InstructionSet,
    x: &[f32],
    weight: &PackedMatrix,
    panel: usize,
    scratch: &'a mut Scratch,
) -> &'a [f32] {
    let inputs = weight.inputs;
    let panel = weight.panel(panel);
    // The kernels read the panel through pointers, so its length is checked here.
    assert!(weight.weight_type.panel_bytes(inputs).is_some_and(|bytes| bytes <= panel.len()), "the panel is whole");
    let Scratch { sums, expanded } = scratch;
    sums.clear();
    sums.resize(x.len() / inputs * PANEL, 0.0);
    expanded.resize(BLOCK_INPUTS * PANEL, 0.0);
    // SAFETY: the caller guarantees the instruction set. The panel holds `inputs` inputs of its
    // type, `x` has whole rows, and the buffers have the lengths of `PanelProduct`.
    unsafe {
        match weight.weight_type {
            WeightType::F32 => set.run(PanelProduct::<stored::F32>::new(x, inputs, panel, sums, None)),
            WeightType::Bf16 => set.run(PanelProduct::<stored::Bf16>::new(x, inputs, panel, sums, Some(expanded))),
            WeightType::F16 => set.run(PanelProduct::<stored::F16>::new(x, inputs, panel, sums, Some(expanded))),
            WeightType::Q8 => set.run(PanelProduct::<stored::Q8>::new(x, inputs, panel, sums, Some(expanded))),
        }
    }
    sums
}

/// Adds the products of all rows with one panel of type `S` to `sums`.
///
/// Contract of [`Kernel::run`]: the panel has `inputs` inputs, `x` is `[rows][inputs]`, `sums` is
/// `[rows][PANEL]`, and `expanded` is `[BLOCK_INPUTS][PANEL]`.
struct PanelProduct<'a, S> {
    x: &'a [f32],
    inputs: usize,
    panel: &'a [u8],
    sums: &'a mut [f32],
    /// `None` if the weights need no conversion.
    expanded: Option<&'a mut [f32]>,
    stored: std::marker::PhantomData<S>,
}

impl<'a, S> PanelProduct<'a, S> {
    fn new(
        x: &'a [f32],
        inputs: usize,
        panel: &'a [u8],
        sums: &'a mut [f32],
        expanded: Option<&'a mut Vec<f32>>,
    ) -> Self {
        let expanded = expanded.map(Vec::as_mut_slice);
        PanelProduct { x, inputs, panel, sums, expanded, stored: std::marker::PhantomData }
    }
}

impl<S: Stored> Kernel for PanelProduct<'_, S> {
    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let rows = self.sums.len() / PANEL;
        let panel = self.panel.as_ptr();
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
mod tests {
    use super::*;

    const TYPES: [WeightType; 4] = [WeightType::F32, WeightType::Bf16, WeightType::F16, WeightType::Q8];

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn pack(weights: &[f32], outputs: usize, inputs: usize, weight_type: WeightType) -> PackedMatrix {
        let fill = |o: usize, row: &mut [f32]| row.copy_from_slice(&weights[o * inputs..(o + 1) * inputs]);
        PackedMatrix::new(outputs, inputs, weight_type, fill).unwrap()
    }

    /// The definition of a product, in plain code.
    fn defined(x: &[f32], packed: &PackedMatrix, bias: &[f32]) -> Vec<u32> {
        let mut weights = vec![0.0; packed.inputs];
        let mut out = vec![0; x.len() / packed.inputs * packed.outputs];
        for output in 0..packed.outputs {
            packed.copy_row(output, &mut weights);
            for (row, x) in x.chunks_exact(packed.inputs).enumerate() {
                let sum = x.iter().zip(&weights).fold(0.0f32, |sum, (x, weight)| x.mul_add(*weight, sum));
                out[row * packed.outputs + output] = (sum + bias[output]).to_bits();
            }
        }
        out
    }

    #[test]
    fn every_instruction_set_row_count_and_type_gives_the_bits_of_the_definition() {
        for (outputs, inputs) in [(1, 1), (50, 33), (96, 64), (145, 1100), (48, 515), (300, 31)] {
            let (weights, bias) = (values(outputs * inputs, 4), values(outputs, 6));
            let x = values(73 * inputs, 5);
            for weight_type in TYPES {
                let packed = pack(&weights, outputs, inputs, weight_type);
                let expected = defined(&x, &packed, &bias);
                for set in InstructionSet::available() {
                    for rows in [1, 2, 3, 4, 5, 7, 8, 9, 15, 31, 32, 33, 64, 73] {
                        let first = (73 - rows) / 2;
                        let mut out = vec![f32::NAN; rows * outputs];
                        let x = &x[first * inputs..(first + rows) * inputs];
                        // SAFETY: the set is one of those available.
                        unsafe { matmul_with(set, x, &packed, Some(&bias), &mut out) };
                        let same = out.iter().zip(&expected[first * outputs..]).all(|(a, b)| a.to_bits() == *b);
                        assert!(same, "{set:?} {weight_type:?}: {outputs} × {inputs}, {rows} rows");
                    }
                }
            }
        }
    }

    #[test]
    fn product_agrees_with_the_sum_in_f64() {
        for (rows, outputs, inputs) in [(1, 50, 2), (3, 48, 7), (65, 97, 33), (2, 320, 600), (130, 5, 1100)] {
            let (w, x) = (values(outputs * inputs, 1), values(rows * inputs, 2));
            let packed = pack(&w, outputs, inputs, WeightType::F32);
            let mut out = vec![f32::NAN; rows * outputs];
            matmul(&x, &packed, None, &mut out);
            for (index, out) in out.iter().enumerate() {
                let (r, o) = (index / outputs, index % outputs);
                let exact: f64 = (0..inputs).map(|i| f64::from(x[r * inputs + i]) * f64::from(w[o * inputs + i])).sum();
                let error = (f64::from(*out) - exact).abs();
                assert!(error < 1e-5 * (inputs as f64).sqrt(), "{rows} {outputs} {inputs}: {error}");
            }
        }
    }

    #[test]
    fn result_does_not_depend_on_threads_and_rows_per_task() {
        let (rows, outputs, inputs) = (600, 100, 70);
        let packed = pack(&values(outputs * inputs, 1), outputs, inputs, WeightType::Bf16);
        let x = values(rows * inputs, 2);
        let expected = defined(&x, &packed, &vec![0.0; outputs]);
        for threads in [1, 2, 5, 40] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![f32::NAN; rows * outputs];
            pool.install(|| matmul(&x, &packed, None, &mut out));
            assert!(out.iter().zip(&expected).all(|(a, b)| a.to_bits() == *b), "{threads} threads");
        }
    }

    #[test]
    fn packing_keeps_exact_weights_and_rounds_the_others() {
        let (outputs, inputs) = (50, 70);
        let weights = values(outputs * inputs, 9);
        let halves: Vec<f32> = weights.iter().map(|w| half::bf16::from_f32(w / 1000.0).to_f32()).collect();
        let error = |weights: &[f32], weight_type: WeightType| {
            let packed = pack(weights, outputs, inputs, weight_type);
            let mut row = vec![0.0; inputs];
            let mut worst = 0.0f32;
            for (output, weights) in weights.chunks_exact(inputs).enumerate() {
                packed.copy_row(output, &mut row);
                worst = row.iter().zip(weights).fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
            }
            worst
        };
        assert_eq!((error(&weights, WeightType::F32), error(&halves, WeightType::Bf16)), (0.0, 0.0));
        // Half a step: 2⁻⁹ and 2⁻¹² for values below 1, and 1/254 with a scale of 1/127.
        for (weight_type, step) in [(WeightType::Bf16, 1.0 / 512.0), (WeightType::F16, 1.0 / 4096.0)] {
            assert!((step / 2.0..=step).contains(&error(&weights, weight_type)));
        }
        let q8 = error(&weights, WeightType::Q8);
        assert!((0.003..0.00397).contains(&q8), "{q8}");
        assert_eq!(error(&vec![0.0; outputs * inputs], WeightType::Q8), 0.0);
    }

    #[test]
    fn packing_refuses_a_matrix_larger_than_memory() {
        assert!(PackedMatrix::new(usize::MAX / 8, 1 << 20, WeightType::Bf16, |_, _| ()).is_err());
        assert!(PackedMatrix::new(1, usize::MAX / 8, WeightType::Q8, |_, _| ()).is_err());
    }
}
