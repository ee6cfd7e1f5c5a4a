//! Products of activations with a weight matrix that is packed once, when the model is loaded.
//!
//! Invariant: the result of a row does not depend on the other rows of the call, not even in one
//! bit. Three choices ensure this:
//! - The matrix is stored in panels of [`PANEL`] outputs, each `[inputs][PANEL]`. The microkernels
//!   of `gemm-f32` read a panel in one pass, so no call packs anything.
//! - One `gemm` call multiplies one panel by at most [`ROWS`] rows. At this size, gemm chooses its
//!   blocking from `inputs` alone.
//! - A single row is multiplied as two equal rows. For one row, gemm takes another path, which sums
//!   in another order.

use super::disjoint::DisjointSlice;
use gemm_common::Parallelism;
use rayon::prelude::*;
use thiserror::Error;

/// Outputs per panel: three AVX-512 vectors, or six AVX2 vectors.
const PANEL: usize = 48;
/// Maximum number of rows per `gemm` call.
const ROWS: usize = 64;
/// Multiplications per rayon task. Smaller products run on the calling thread.
const TASK_PRODUCTS: usize = 1 << 16;

/// Weight matrix `[outputs][inputs]`, packed for [`matmul`].
#[derive(Clone)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    panels: Vec<f32>,
}

/// The allocator has no memory for a matrix of this size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no memory for a matrix of {outputs} × {inputs}")]
pub struct PackError {
    pub outputs: usize,
    pub inputs: usize,
}

impl PackedMatrix {
    /// Packs a matrix. `fill(output, row)` writes the `inputs` weights of one output. Calls `fill`
    /// from several threads.
    ///
    /// # Errors
    /// If the allocation fails.
    pub fn new(
        outputs: usize,
        inputs: usize,
        fill: impl Fn(usize, &mut [f32]) + Send + Sync,
    ) -> Result<PackedMatrix, PackError> {
        let error = PackError { outputs, inputs };
        let panel = PANEL.checked_mul(inputs).ok_or(error.clone())?;
        let len = outputs.div_ceil(PANEL).checked_mul(panel).ok_or(error.clone())?;
        let mut panels = Vec::new();
        panels.try_reserve_exact(len).map_err(|_| error)?;
        panels.resize(len, 0.0);
        panels.par_chunks_mut(panel.max(1)).enumerate().for_each_init(
            || vec![0.0; inputs],
            |row, (index, panel)| {
                for lane in 0..PANEL.min(outputs - index * PANEL) {
                    fill(index * PANEL + lane, row);
                    for (weights, &weight) in panel.chunks_exact_mut(PANEL).zip(row.iter()) {
                        weights[lane] = weight;
                    }
                }
            },
        );
        Ok(PackedMatrix { outputs, inputs, panels })
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Copies the weights of one output. A model with tied embeddings reads token embeddings this
    /// way.
    ///
    /// # Panics
    /// If the output does not exist, or `row` has another length than `inputs`.
    pub fn copy_row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs && row.len() == self.inputs, "the row exists and fits");
        let panel = self.panel(output / PANEL);
        for (value, weights) in row.iter_mut().zip(panel.chunks_exact(PANEL)) {
            *value = weights[output % PANEL];
        }
    }

    fn panel(&self, index: usize) -> &[f32] {
        let len = PANEL * self.inputs;
        &self.panels[index * len..(index + 1) * len]
    }
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedMatrix({} × {})", self.outputs, self.inputs)
    }
}

/// Computes `out[r][o] = Σ_i x[r][i] · weight[o][i] + bias[o]`.
/// Sums in the order of `i`, in blocks of 512.
///
/// Shapes: `x` is `[rows][inputs]`, `bias` is `[outputs]`, `out` is `[rows][outputs]`.
///
/// # Panics
/// If the shapes disagree.
pub fn matmul(x: &[f32], weight: &PackedMatrix, bias: Option<&[f32]>, out: &mut [f32]) {
    let PackedMatrix { outputs, inputs, .. } = *weight;
    assert!(inputs > 0 && outputs > 0, "a matrix has elements");
    let rows = x.len() / inputs;
    assert!(x.len() == rows * inputs && out.len() == rows * outputs, "shapes of the product agree");
    assert!(bias.is_none_or(|b| b.len() == outputs), "the bias has one value per output");
    let blocks = rows.div_ceil(ROWS);
    let panels = outputs.div_ceil(PANEL);
    let out = DisjointSlice::new(out);
    let tile = |index: usize| {
        // Neighbouring indices share rows, so the rows stay in the cache while the panels pass.
        let (block, panel) = (index / panels, index % panels);
        let first = block * ROWS;
        let x = &x[first * inputs..(first + ROWS).min(rows) * inputs];
        // SAFETY: each index is a distinct pair of row block and panel, so no two calls write the
        // same outputs.
        unsafe { multiply(x, weight, panel, bias, &out, first) };
    };
    let products_per_tile = rows.min(ROWS) * PANEL * inputs;
    let tiles_per_task = (TASK_PRODUCTS / products_per_tile.max(1)).max(1);
    if blocks * panels <= tiles_per_task {
        return (0..blocks * panels).for_each(tile);
    }
    (0..blocks * panels).into_par_iter().with_min_len(tiles_per_task).for_each(tile);
}

/// Multiplies at most [`ROWS`] rows by one panel.
///
/// # Safety
/// No other thread accesses these outputs of these rows during the call.
unsafe fn multiply(
    x: &[f32],
    weight: &PackedMatrix,
    panel: usize,
    bias: Option<&[f32]>,
    out: &DisjointSlice<'_>,
    first_row: usize,
) {
    let PackedMatrix { outputs, inputs, .. } = *weight;
    let rows = x.len() / inputs;
    let first = panel * PANEL;
    let width = PANEL.min(outputs - first);
    let panel = weight.panel(panel);
    if rows == 1 {
        // One row is computed twice to stay on gemm's path for several rows (see the module docs).
        let mut twice = [0.0f32; 2 * PANEL];
        // SAFETY: both columns read the row `x` (stride 0). They write to `twice`, one panel width
        // apart.
        unsafe { gemm_panel(panel, width, inputs, x.as_ptr(), 0, 2, twice.as_mut_ptr(), PANEL) };
        // SAFETY: the caller guarantees exclusive access to these outputs.
        unsafe { out.range_mut(first_row * outputs + first, width) }.copy_from_slice(&twice[..width]);
    } else {
        let target = out.range_ptr(first_row * outputs + first, (rows - 1) * outputs + width);
        // SAFETY: the columns read the rows of `x` and write the caller's outputs, `outputs`
        // elements apart. `range_ptr` has checked that the last one ends inside `out`.
        unsafe { gemm_panel(panel, width, inputs, x.as_ptr(), inputs, rows, target, outputs) };
    }
    let Some(bias) = bias else { return };
    for row in first_row..first_row + rows {
        // SAFETY: the caller guarantees exclusive access to these outputs.
        let out = unsafe { out.range_mut(row * outputs + first, width) };
        out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
    }
}

/// Computes `target[c · target_stride + o] = Σ_i panel[i · PANEL + o] · x[c · x_stride + i]`,
/// for `o < width` and `c < columns`.
///
/// # Safety
/// `x` must be readable, and `target` writable by this thread alone, at every index the formula
/// names.
#[allow(clippy::too_many_arguments)]
unsafe fn gemm_panel(
    panel: &[f32],
    width: usize,
    inputs: usize,
    x: *const f32,
    x_stride: usize,
    columns: usize,
    target: *mut f32,
    target_stride: usize,
) {
    assert!(width <= PANEL && panel.len() == inputs * PANEL, "the panel has PANEL outputs");
    let x_stride = x_stride as isize;
    let target_stride = target_stride as isize;
    let gemm = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: the caller guarantees `x` and `target`. The assertion above covers the panel.
    unsafe {
        gemm(
            width,
            columns,
            inputs,
            target,
            target_stride,
            1,
            // `target` is overwritten, not added to. So the factor 0 for it is never used.
            false,
            panel.as_ptr(),
            PANEL as isize,
            1,
            x,
            x_stride,
            1,
            0.0,
            1.0,
            // Conjugation has no meaning for real numbers.
            false,
            false,
            false,
            // The caller's rayon tasks are the only parallelism.
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn pack(weights: &[f32], outputs: usize, inputs: usize) -> PackedMatrix {
        PackedMatrix::new(outputs, inputs, |o, row| row.copy_from_slice(&weights[o * inputs..(o + 1) * inputs]))
            .unwrap()
    }

    #[test]
    fn product_agrees_with_the_sum_in_f64() {
        for (rows, outputs, inputs) in [(1, 1, 1), (1, 50, 2), (3, 48, 7), (65, 97, 33), (2, 320, 600), (130, 5, 1100)]
        {
            let (w, x, bias) = (values(outputs * inputs, 1), values(rows * inputs, 2), values(outputs, 3));
            let packed = pack(&w, outputs, inputs);
            let mut out = vec![f32::NAN; rows * outputs];
            matmul(&x, &packed, Some(&bias), &mut out);
            for r in 0..rows {
                for o in 0..outputs {
                    let sum: f64 =
                        (0..inputs).map(|i| f64::from(x[r * inputs + i]) * f64::from(w[o * inputs + i])).sum();
                    let exact = sum + f64::from(bias[o]);
                    let error = (f64::from(out[r * outputs + o]) - exact).abs();
                    assert!(error < 1e-5 * (inputs as f64).sqrt(), "{rows} {outputs} {inputs}: {error}");
                }
            }
            let mut row = vec![0.0; inputs];
            packed.copy_row(outputs - 1, &mut row);
            assert_eq!(row, w[(outputs - 1) * inputs..]);
        }
    }

    #[test]
    fn result_of_a_row_is_independent_of_other_rows() {
        for (outputs, inputs) in [(576, 192), (192, 512), (50, 33), (100, 1300), (1, 3), (16, 2), (33, 1)] {
            let packed = pack(&values(outputs * inputs, 4), outputs, inputs);
            let x = values(200 * inputs, 5);
            let mut all = vec![0.0; 200 * outputs];
            matmul(&x, &packed, None, &mut all);
            for rows in [1, 2, 3, 5, 8, 9, 16, 17, 63, 64, 65, 129] {
                for first in [0, 7, 200 - rows] {
                    let mut some = vec![0.0; rows * outputs];
                    matmul(&x[first * inputs..(first + rows) * inputs], &packed, None, &mut some);
                    let same = some.iter().zip(&all[first * outputs..]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{outputs} × {inputs}, {rows} rows from {first}");
                }
            }
        }
    }

    #[test]
    fn packing_refuses_a_matrix_larger_than_memory() {
        assert!(PackedMatrix::new(usize::MAX / 8, 1 << 20, |_, _| ()).is_err());
    }
}
