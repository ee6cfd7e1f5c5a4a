//! Products of [`WeightType::Q8Quads`](super::WeightType::Q8Quads), whose activations are rounded
//! to 8 bits as well: a scale per row and block of [`Q8_BLOCK`] inputs, as in the weights.
//!
//! Invariant: inside a block, the products are added as integers, exactly. Then each block from 0
//! on is added: `sum = fma(products, weight_scale · row_scale, sum)`, starting at 0. So the result
//! of a row depends neither on other rows, nor on the number of threads or the instruction set.

use super::super::stored::{Q8_BLOCK, Q8_BLOCK_BYTES, Q8_LARGEST};
use super::super::vector::multiplies_bytes;
use super::{PANEL, TILE_VECTORS};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;
use std::ops::Range;

/// Inputs that one instruction multiplies per output.
const QUAD: usize = 4;
const BLOCK_QUADS: usize = Q8_BLOCK / QUAD;
/// Fewest activations that threads share.
const TASK_INPUTS: usize = 1 << 16;

/// Activations of a block: 32 bytes, their scale, and what the sum of products starts with.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Block {
    elements: [i8; Q8_BLOCK],
    scale: f32,
    /// −128 times the sum of the elements, because weights are stored with 128 added.
    start: i32,
}

/// Activations in 8 bits: `[rows][width]` blocks. Those beyond the last input are 0.
pub(super) struct Rows {
    blocks: Vec<Block>,
    width: usize,
}

impl Rows {
    /// Rounds rows of `inputs` activations. The largest of a block becomes ±127.
    pub(super) fn round(x: &[f32], inputs: usize) -> Rows {
        let width = inputs.div_ceil(Q8_BLOCK);
        let mut blocks = vec![Block::default(); x.len() / inputs * width];
        let rows = blocks.par_chunks_exact_mut(width).zip(x.par_chunks_exact(inputs));
        rows.with_min_len(TASK_INPUTS.div_ceil(inputs))
            .for_each(|(blocks, row)| Arch::new().dispatch(RoundRow { row, blocks }));
        Rows { blocks, width }
    }
}

/// Rounds one row. The compiler makes vectors of it.
struct RoundRow<'a> {
    row: &'a [f32],
    blocks: &'a mut [Block],
}

impl NullaryFnOnce for RoundRow<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (block, inputs) in self.blocks.iter_mut().zip(self.row.chunks(Q8_BLOCK)) {
            let mut padded = [0.0; Q8_BLOCK];
            padded[..inputs.len()].copy_from_slice(inputs);
            // Magnitudes order as their bits do, and those of NaN are the largest. So a NaN becomes
            // the scale, and every output of the row is NaN: nothing hides it from the engine.
            let largest = padded.iter().fold(0, |largest: u32, x| largest.max(x.abs().to_bits()));
            block.scale = f32::from_bits(largest) / Q8_LARGEST;
            let inverse = if block.scale > 0.0 { 1.0 / block.scale } else { 0.0 };
            let mut sum = 0;
            for (element, x) in block.elements.iter_mut().zip(padded) {
                // The cast saturates, and turns NaN into 0.
                *element = (x * inverse).round_ties_even() as i8;
                sum += i32::from(*element);
            }
            block.start = -128 * sum;
        }
    }
}

/// Adds the products of some rows with one panel, or of a single row with several, to `sums`:
/// `[rows][PANEL]` or `[panels][PANEL]` of zeros. Panels are `distance` bytes apart.
///
/// # Panics
/// If the lengths disagree.
pub(super) fn multiply(x: &Rows, rows: Range<usize>, panels: &[u8], distance: usize, sums: &mut [f32]) {
    multiply_with(multiplies_bytes(), x, rows, panels, distance, sums);
}

/// As [`multiply`], in plain code unless `is_fast`, which the machine must be then.
fn multiply_with(is_fast: bool, x: &Rows, rows: Range<usize>, panels: &[u8], distance: usize, sums: &mut [f32]) {
    let blocks = &x.blocks[rows.start * x.width..rows.end * x.width];
    assert!(Q8_BLOCK_BYTES * x.width <= distance && panels.len().is_multiple_of(distance), "panels are whole");
    let count = panels.len() / distance;
    assert!(count == 1 || rows.len() == 1, "only a single row has several panels");
    assert!(sums.len() == rows.len() * count * PANEL, "the sums have all columns");
    #[cfg(target_arch = "x86_64")]
    if is_fast {
        assert!(multiplies_bytes(), "the machine has the instructions");
        // SAFETY: the machine has the instructions, and the lengths agree.
        return unsafe {
            if rows.len() == 1 {
                x86::single_row(blocks, panels, distance, sums);
            } else {
                x86::many_rows(blocks, x.width, panels, sums);
            }
        };
    }
    let _ = is_fast;
    for (index, sums) in sums.chunks_exact_mut(PANEL).enumerate() {
        // One panel for all rows, or one row for all panels.
        let (panel, row) = if count == 1 { (0, index) } else { (index, 0) };
        plain(&blocks[row * x.width..(row + 1) * x.width], &panels[panel * distance..], sums);
    }
}

/// The definition of the products of one row with one panel.
fn plain(row: &[Block], panel: &[u8], sums: &mut [f32]) {
    for (block, weights) in row.iter().zip(panel.chunks_exact(Q8_BLOCK_BYTES)) {
        let (scales, weights) = weights.split_at(2 * PANEL);
        for (lane, sum) in sums.iter_mut().enumerate() {
            let mut products = block.start;
            for (quad, elements) in block.elements.chunks_exact(QUAD).enumerate() {
                let weights = &weights[QUAD * (quad * PANEL + lane)..][..QUAD];
                products += weights.iter().zip(elements).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum::<i32>();
            }
            let scale = half::bf16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]]).to_f32();
            *sum = (products as f32).mul_add(scale * block.scale, *sum);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::PREFETCH_BYTES;
    use super::{BLOCK_QUADS, Block, PANEL, Q8_BLOCK_BYTES, QUAD, TILE_VECTORS};
    use std::arch::x86_64::*;

    /// Lanes of a vector.
    const LANES: usize = 16;
    const _: () = assert!(TILE_VECTORS * LANES == PANEL);

    /// Adds the products of one row with all panels to `sums`: `[panels][PANEL]`.
    ///
    /// # Safety
    /// The machine has the instructions. Each panel has as many blocks as `row`, and begins
    /// `distance` bytes after the one before. The sums have `PANEL` columns for each.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn single_row(row: &[Block], panels: &[u8], distance: usize, sums: &mut [f32]) {
        for (sums, panels) in sums.chunks_mut(2 * PANEL).zip(panels.chunks(2 * distance)) {
            let (panel, at, sums) = (panels.as_ptr(), row.as_ptr(), sums.as_mut_ptr());
            // SAFETY: the caller guarantees the panels, and the sums lie in their slice.
            unsafe {
                if panels.len() == 2 * distance {
                    tile::<1, 2>(panel, distance, row.len(), at, 0, sums);
                } else {
                    tile::<1, 1>(panel, distance, row.len(), at, 0, sums);
                }
            }
        }
    }

    /// Adds the products of rows of `width` blocks with one panel to `sums`: `[rows][PANEL]`.
    ///
    /// # Safety
    /// The machine has the instructions. The panel has `width` blocks, `x` whole rows, and `sums`
    /// as many.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn many_rows(x: &[Block], width: usize, panel: &[u8], sums: &mut [f32]) {
        let rows = sums.len() / PANEL;
        let mut row = 0;
        while row < rows {
            // SAFETY: the caller guarantees the lengths. The rows from `row` on number at least as
            // many as the tile has.
            row += unsafe {
                let (x, sums) = (x.as_ptr().add(row * width), sums.as_mut_ptr().add(row * PANEL));
                match rows - row {
                    4.. => tile::<4, 1>(panel.as_ptr(), 0, width, x, width, sums),
                    2.. => tile::<2, 1>(panel.as_ptr(), 0, width, x, width, sums),
                    _ => tile::<1, 1>(panel.as_ptr(), 0, width, x, width, sums),
                }
            };
        }
    }

    /// Adds the products of `ROWS` rows with `count` blocks of `PANELS` panels to `sums`:
    /// `[ROWS][PANELS][PANEL]`. Returns `ROWS`.
    ///
    /// # Safety
    /// The machine has the instructions. The panels have so many blocks and are `distance` bytes
    /// apart; the rows have them and are `stride` blocks apart. The sums are writable.
    // Constant indices keep the sums in registers. Iterators over the arrays may not.
    #[allow(clippy::needless_range_loop)]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn tile<const ROWS: usize, const PANELS: usize>(
        panels: *const u8,
        distance: usize,
        count: usize,
        x: *const Block,
        stride: usize,
        sums: *mut f32,
    ) -> usize {
        // SAFETY: the caller guarantees every address. Prefetches may go anywhere.
        unsafe {
            let at = |r: usize, p: usize, v: usize| (r * PANELS + p) * PANEL + v * LANES;
            let mut totals = [[[_mm512_setzero_ps(); TILE_VECTORS]; PANELS]; ROWS];
            for r in 0..ROWS {
                for p in 0..PANELS {
                    for v in 0..TILE_VECTORS {
                        totals[r][p][v] = _mm512_loadu_ps(sums.add(at(r, p, v)));
                    }
                }
            }
            for block in 0..count {
                let mut products = [[[_mm512_setzero_si512(); TILE_VECTORS]; PANELS]; ROWS];
                for r in 0..ROWS {
                    let start = _mm512_set1_epi32((*x.add(r * stride + block)).start);
                    products[r] = [[start; TILE_VECTORS]; PANELS];
                }
                for quad in 0..BLOCK_QUADS {
                    for p in 0..PANELS {
                        let line = panels.add(p * distance + block * Q8_BLOCK_BYTES + 2 * PANEL + quad * QUAD * PANEL);
                        let mut weights = [_mm512_setzero_si512(); TILE_VECTORS];
                        for v in 0..TILE_VECTORS {
                            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(PREFETCH_BYTES + 64 * v).cast());
                            weights[v] = _mm512_loadu_si512(line.add(64 * v).cast());
                        }
                        for r in 0..ROWS {
                            let elements = (*x.add(r * stride + block)).elements.as_ptr().add(QUAD * quad);
                            let x = _mm512_set1_epi32(elements.cast::<i32>().read_unaligned());
                            for v in 0..TILE_VECTORS {
                                products[r][p][v] = _mm512_dpbusd_epi32(products[r][p][v], weights[v], x);
                            }
                        }
                    }
                }
                for p in 0..PANELS {
                    for v in 0..TILE_VECTORS {
                        let scales = panels.add(p * distance + block * Q8_BLOCK_BYTES + 2 * v * LANES);
                        let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(scales.cast()));
                        let scales = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves));
                        for r in 0..ROWS {
                            let scale = _mm512_mul_ps(scales, _mm512_set1_ps((*x.add(r * stride + block)).scale));
                            let products = _mm512_cvtepi32_ps(products[r][p][v]);
                            totals[r][p][v] = _mm512_fmadd_ps(products, scale, totals[r][p][v]);
                        }
                    }
                }
            }
            for r in 0..ROWS {
                for p in 0..PANELS {
                    for v in 0..TILE_VECTORS {
                        _mm512_storeu_ps(sums.add(at(r, p, v)), totals[r][p][v]);
                    }
                }
            }
        }
        ROWS
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{pack, values};
    use super::super::{PackedMatrix, WeightType};
    use super::*;

    #[test]
    fn instructions_give_the_bits_of_the_definition() {
        // Without the instructions, both sides are the definition.
        for (outputs, inputs, rows) in [(96, 64, 1), (48, 515, 1), (48, 1100, 7), (48, 31, 4), (48, 1, 2)] {
            let packed: PackedMatrix = pack(&values(outputs * inputs, 4), outputs, inputs, WeightType::Q8Quads);
            let x = Rows::round(&values(rows * inputs, 5), inputs);
            let panels = packed.panels(&(0..outputs / PANEL));
            let [mut fast, mut defined] = [(); 2].map(|()| vec![0.0; rows * outputs]);
            multiply_with(multiplies_bytes(), &x, 0..rows, panels, packed.panel_distance(), &mut fast);
            multiply_with(false, &x, 0..rows, panels, packed.panel_distance(), &mut defined);
            assert!(defined.iter().all(|sum| *sum != 0.0), "{outputs} × {inputs}");
            assert!(fast.iter().zip(&defined).all(|(a, b)| a.to_bits() == b.to_bits()), "{outputs} × {inputs}");
        }
    }

    #[test]
    fn rounded_rows_are_within_half_a_step() {
        let (rows, inputs) = (5, 77);
        let x = values(rows * inputs, 3);
        let rounded = Rows::round(&x, inputs);
        for (index, x) in x.iter().enumerate() {
            let (row, input) = (index / inputs, index % inputs);
            let block = rounded.blocks[row * rounded.width + input / Q8_BLOCK];
            let value = f32::from(block.elements[input % Q8_BLOCK]) * block.scale;
            assert!((value - x).abs() <= 0.501 * block.scale, "{value} for {x}");
        }
    }
}
