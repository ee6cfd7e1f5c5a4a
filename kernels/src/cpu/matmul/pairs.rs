//! Products of [`WeightType::Bf16Pairs`](super::WeightType::Bf16Pairs), whose activations are
//! rounded to bf16 as well.
//!
//! Invariant: `sum = vdpbf16ps(sum, x[2i..2i + 2], weight[2i..2i + 2])` for `i` from 0 on, starting
//! at 0. So the result of a row does not depend on the other rows or on the number of threads. It
//! may depend on the processor: Intel and AMD need not round the two products alike.

use super::super::vector::multiplies_bf16;
use super::{BLOCK_INPUTS, PANEL, TILE_VECTORS};
use rayon::prelude::*;
use std::ops::Range;

/// Activations in bf16: `[rows][width]` pairs of inputs, the first of each in the lower half.
pub(super) struct Rows {
    pairs: Vec<u32>,
    width: usize,
}

/// Fewest activations that threads share.
const TASK_INPUTS: usize = 1 << 16;

impl Rows {
    /// Rounds rows of `inputs` activations to the nearest bf16.
    pub(super) fn round(x: &[f32], inputs: usize) -> Rows {
        let width = inputs.div_ceil(2);
        let mut pairs = vec![0; x.len() / inputs * width];
        let rows = pairs.par_chunks_exact_mut(width).zip(x.par_chunks_exact(inputs));
        rows.with_min_len(TASK_INPUTS.div_ceil(inputs)).for_each(|(pairs, row)| round_row(row, pairs));
        Rows { pairs, width }
    }
}

/// Writes a row in pairs. A single last activation has a zero beside it.
fn round_row(row: &[f32], pairs: &mut [u32]) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if multiplies_bf16() {
        // SAFETY: the machine has the instructions.
        done = unsafe { x86::round(row, pairs) };
    }
    for (pair, inputs) in pairs[done / 2..].iter_mut().zip(row[done..].chunks(2)) {
        let half = |at: usize| u32::from(half::bf16::from_f32(inputs.get(at).copied().unwrap_or(0.0)).to_bits());
        *pair = half(0) | half(1) << 16;
    }
}

/// Adds the products of some rows with one panel, or of a single row with several, to `sums`:
/// `[rows][PANEL]` or `[panels][PANEL]` of zeros. Panels are `distance` bytes apart.
///
/// # Panics
/// If this machine lacks the instructions, or the lengths disagree.
pub(super) fn multiply(x: &Rows, rows: Range<usize>, panels: &[u8], distance: usize, sums: &mut [f32]) {
    let x_rows = &x.pairs[rows.start * x.width..rows.end * x.width];
    assert!(multiplies_bf16(), "the machine has the instructions");
    assert!(4 * PANEL * x.width <= distance && panels.len().is_multiple_of(distance), "panels are whole");
    let count = panels.len() / distance;
    assert!(count == 1 || rows.len() == 1, "only a single row has several panels");
    assert!(sums.len() == rows.len() * count * PANEL, "the sums have all columns");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the machine has the instructions, and the lengths agree.
    unsafe {
        if rows.len() == 1 {
            x86::single_row(x_rows, panels, distance, sums);
        } else {
            x86::many_rows(x_rows, x.width, panels, sums);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x_rows;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::PREFETCH_BYTES;
    use super::{BLOCK_INPUTS, PANEL, TILE_VECTORS};
    use std::arch::x86_64::*;

    /// Lanes of a vector.
    const LANES: usize = 16;
    /// Pairs of a panel that one pass over the rows uses.
    const BLOCK_PAIRS: usize = BLOCK_INPUTS / 2;
    const _: () = assert!(TILE_VECTORS * LANES == PANEL);

    fn halves(bits: __m512i) -> __m512bh {
        // SAFETY: both are 64 bytes, and any bits are a vector of bf16.
        unsafe { std::mem::transmute(bits) }
    }

    /// Rounds the activations of a row in whole vectors. Returns their number.
    ///
    /// # Safety
    /// The machine has the instructions.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn round(row: &[f32], pairs: &mut [u32]) -> usize {
        let whole = row.len() / (2 * LANES) * (2 * LANES);
        assert!(2 * pairs.len() >= whole, "there is a place for each pair");
        for first in (0..whole).step_by(2 * LANES) {
            // SAFETY: the vectors lie in the row and in the pairs.
            unsafe {
                let low = _mm512_loadu_ps(row.as_ptr().add(first));
                let high = _mm512_loadu_ps(row.as_ptr().add(first + LANES));
                let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(pairs.as_mut_ptr().add(first / 2).cast(), rounded);
            }
        }
        whole
    }

    /// Adds the products of one row `x` with all panels to `sums`: `[panels][PANEL]`.
    ///
    /// # Safety
    /// The machine has the instructions. Each panel has as many pairs as `x`, and begins `distance`
    /// bytes after the one before. The sums have `PANEL` columns for each.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn single_row(x: &[u32], panels: &[u8], distance: usize, sums: &mut [f32]) {
        for (sums, panels) in sums.chunks_mut(2 * PANEL).zip(panels.chunks(2 * distance)) {
            let (panel, x, count, sums_at) = (panels.as_ptr(), x.as_ptr(), x.len(), sums.as_mut_ptr());
            // SAFETY: the caller guarantees the panels, and the sums lie in their slice.
            unsafe {
                if panels.len() == 2 * distance {
                    tile::<1, 2>(panel, distance, count, x, 0, sums_at);
                } else {
                    tile::<1, 1>(panel, distance, count, x, 0, sums_at);
                }
            }
        }
    }

    /// Adds the products of rows of `width` pairs with one panel to `sums`: `[rows][PANEL]`.
    ///
    /// # Safety
    /// The machine has the instructions. The panel has `width` pairs, `x` whole rows, and `sums`
    /// as many.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn many_rows(x: &[u32], width: usize, panel: &[u8], sums: &mut [f32]) {
        let rows = sums.len() / PANEL;
        for first in (0..width).step_by(BLOCK_PAIRS) {
            let count = BLOCK_PAIRS.min(width - first);
            let mut row = 0;
            while row < rows {
                // SAFETY: the caller guarantees the lengths. The rows from `row` on number at least
                // as many as the tile has.
                row += unsafe {
                    let panel = panel.as_ptr().add(first * 4 * PANEL);
                    let x = x.as_ptr().add(row * width + first);
                    let sums = sums.as_mut_ptr().add(row * PANEL);
                    match rows - row {
                        8.. => tile::<8, 1>(panel, 0, count, x, width, sums),
                        4.. => tile::<4, 1>(panel, 0, count, x, width, sums),
                        2.. => tile::<2, 1>(panel, 0, count, x, width, sums),
                        _ => tile::<1, 1>(panel, 0, count, x, width, sums),
                    }
                };
            }
        }
    }

    /// Adds the products of `ROWS` rows with the first `count` pairs of `PANELS` panels to `sums`:
    /// `[ROWS][PANELS][PANEL]`. Returns `ROWS`.
    ///
    /// # Safety
    /// The machine has the instructions. The panels have so many pairs and are `distance` bytes
    /// apart; the rows have them and are `stride` pairs apart. The sums are writable.
    // Constant indices keep the sums in registers. Iterators over the arrays may not.
    #[allow(clippy::needless_range_loop)]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn tile<const ROWS: usize, const PANELS: usize>(
        panels: *const u8,
        distance: usize,
        count: usize,
        x: *const u32,
        stride: usize,
        sums: *mut f32,
    ) -> usize {
        // SAFETY: the caller guarantees every address. Prefetches may go anywhere.
        unsafe {
            let at = |r: usize, p: usize, v: usize| (r * PANELS + p) * PANEL + v * LANES;
            let mut tile = [[[_mm512_setzero_ps(); TILE_VECTORS]; PANELS]; ROWS];
            for r in 0..ROWS {
                for p in 0..PANELS {
                    for v in 0..TILE_VECTORS {
                        tile[r][p][v] = _mm512_loadu_ps(sums.add(at(r, p, v)));
                    }
                }
            }
            for pair in 0..count {
                for p in 0..PANELS {
                    let line = panels.add(p * distance + pair * 4 * PANEL);
                    let mut weights = [halves(_mm512_setzero_si512()); TILE_VECTORS];
                    for v in 0..TILE_VECTORS {
                        _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(PREFETCH_BYTES + 64 * v).cast());
                        weights[v] = halves(_mm512_loadu_si512(line.add(64 * v).cast()));
                    }
                    for r in 0..ROWS {
                        let x = halves(_mm512_set1_epi32(*x.add(r * stride + pair) as i32));
                        for v in 0..TILE_VECTORS {
                            tile[r][p][v] = _mm512_dpbf16_ps(tile[r][p][v], weights[v], x);
                        }
                    }
                }
            }
            for r in 0..ROWS {
                for p in 0..PANELS {
                    for v in 0..TILE_VECTORS {
                        _mm512_storeu_ps(sums.add(at(r, p, v)), tile[r][p][v]);
                    }
                }
            }
        }
        ROWS
    }
}
