//! Products of rows with a weight matrix that was laid out once for them.
//!
//! The matrix is kept in panels of [`PANEL`] outputs, each `[inputs][PANEL]`: what the microkernels of the `gemm` crate
//! read in one go, so that nothing is packed per call. Each call of `gemm` is one panel times at most [`ROWS`] rows.
//! That size makes its choice of blocking a function of `inputs` alone, and a single row is computed as two equal ones,
//! because `gemm` has another path, with another order of sums, for one. So a row's result does not depend on its
//! neighbours.

use super::share::Shared;
use rayon::prelude::*;
use thiserror::Error;

/// Outputs of a panel: three vectors of AVX-512, six of AVX2.
const PANEL: usize = 48;
/// Most rows of one call of `gemm`.
const ROWS: usize = 64;
/// Multiplications that are worth a task of their own.
const TASK_PRODUCTS: usize = 1 << 16;

/// A weight matrix `[outputs][inputs]`, laid out for [`matmul`].
#[derive(Clone)]
pub struct Packed {
    outputs: usize,
    inputs: usize,
    panels: Vec<f32>,
}

/// Why a matrix cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a matrix of {outputs} × {inputs} does not fit into memory")]
pub struct PackError {
    /// Rows of the matrix.
    pub outputs: usize,
    /// Columns of the matrix.
    pub inputs: usize,
}

impl Packed {
    /// Lays out a matrix; `fill(output, row)` writes the `inputs` weights of one output.
    ///
    /// # Errors
    /// If memory for it cannot be had.
    pub fn new(
        outputs: usize,
        inputs: usize,
        fill: impl Fn(usize, &mut [f32]) + Send + Sync,
    ) -> Result<Packed, PackError> {
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
        Ok(Packed { outputs, inputs, panels })
    }

    /// Length of an output row.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Length of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Copies the weights of output `output`: how a token's embedding is taken from a matrix that is also the output matrix.
    ///
    /// # Panics
    /// If there is no such output.
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

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({} × {})", self.outputs, self.inputs)
    }
}

/// `out[r][o] = Σ_i x[r][i] · weight[o][i] + bias[o]`, the sum in the order of `i` (in blocks of 512).
///
/// Shapes: `x` `[rows][inputs]`, `bias` `[outputs]`, `out` `[rows][outputs]`.
///
/// # Panics
/// If the shapes do not agree.
pub fn matmul(x: &[f32], weight: &Packed, bias: Option<&[f32]>, out: &mut [f32]) {
    let Packed { outputs, inputs, .. } = *weight;
    assert!(inputs > 0 && outputs > 0, "a matrix has elements");
    let rows = x.len() / inputs;
    assert!(x.len() == rows * inputs && out.len() == rows * outputs, "shapes of the product agree");
    assert!(bias.is_none_or(|b| b.len() == outputs), "the bias has one value per output");
    let blocks = rows.div_ceil(ROWS);
    let panels = outputs.div_ceil(PANEL);
    let out = Shared::new(out);
    let tile = |index: usize| {
        // Neighbouring tasks share rows, so that these stay in the cache while the panels pass.
        let (block, panel) = (index / panels, index % panels);
        let first = block * ROWS;
        let x = &x[first * inputs..(first + ROWS).min(rows) * inputs];
        // SAFETY: every index is a block of rows and a panel of outputs of its own.
        unsafe { multiply(x, weight, panel, bias, &out, first) };
    };
    let products_per_tile = rows.min(ROWS) * PANEL * inputs;
    let tiles_per_task = (TASK_PRODUCTS / products_per_tile.max(1)).max(1);
    if blocks * panels <= tiles_per_task {
        return (0..blocks * panels).for_each(tile);
    }
    (0..blocks * panels).into_par_iter().with_min_len(tiles_per_task).for_each(tile);
}

/// One panel times at most [`ROWS`] rows.
///
/// # Safety
/// No other thread touches these outputs of these rows.
unsafe fn multiply(x: &[f32], weight: &Packed, panel: usize, bias: Option<&[f32]>, out: &Shared<'_>, first_row: usize) {
    let Packed { outputs, inputs, .. } = *weight;
    let rows = x.len() / inputs;
    let first = panel * PANEL;
    let width = PANEL.min(outputs - first);
    let panel = weight.panel(panel);
    if rows == 1 {
        // A single row is computed twice: see the top of this file.
        let mut twice = [0.0f32; 2 * PANEL];
        // SAFETY: two columns, both of them the row `x`, go to `twice`, a panel's width apart.
        unsafe { gemm_panel(panel, width, inputs, x.as_ptr(), 0, 2, twice.as_mut_ptr(), PANEL) };
        // SAFETY: the caller's promise.
        unsafe { out.part(first_row * outputs + first, width) }.copy_from_slice(&twice[..width]);
    } else {
        let target = out.start_of(first_row * outputs + first, (rows - 1) * outputs + width);
        // SAFETY: the columns are the rows of `x`; they go to the caller's own outputs of its rows, `outputs` apart, the
        // last of which ends inside `out`, as `start_of` has checked.
        unsafe { gemm_panel(panel, width, inputs, x.as_ptr(), inputs, rows, target, outputs) };
    }
    let Some(bias) = bias else { return };
    for row in first_row..first_row + rows {
        // SAFETY: the caller's promise.
        let out = unsafe { out.part(row * outputs + first, width) };
        out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
    }
}

/// `target[c · target_stride + o] = Σ_i panel[i · PANEL + o] · x[c · x_stride + i]` for `o < width`, `c < columns`.
///
/// # Safety
/// `x` is readable and `target` writable, by this thread alone, at the places named; `width` ≤ [`PANEL`].
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
    assert!(width <= PANEL && panel.len() == inputs * PANEL, "the panel is whole");
    let (x_stride, target_stride) = (x_stride as isize, target_stride as isize);
    let (left, stride, one) = (panel.as_ptr(), PANEL as isize, gemm::Parallelism::None);
    // SAFETY: the caller's promise, and the panel is as long as asserted.
    unsafe {
        gemm::gemm(
            width,
            columns,
            inputs,
            target,
            target_stride,
            1,
            false,
            left,
            stride,
            1,
            x,
            x_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            one,
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

    fn pack(weights: &[f32], outputs: usize, inputs: usize) -> Packed {
        Packed::new(outputs, inputs, |o, row| row.copy_from_slice(&weights[o * inputs..(o + 1) * inputs])).unwrap()
    }

    #[test]
    fn agrees_with_the_sum() {
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
    fn a_row_does_not_see_its_neighbours() {
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
    fn an_absurd_matrix_is_refused() {
        assert!(Packed::new(usize::MAX / 8, 1 << 20, |_, _| ()).is_err());
    }
}
