//! RMS norm, and the residual addition before it.

use super::math::{LANES, sum_lanes};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

/// Elements per rayon task. A smaller call stays on the calling thread, where it costs less than
/// waking the pool.
const TASK_ELEMENTS: usize = 1 << 15;

fn rows_per_task(width: usize) -> usize {
    (TASK_ELEMENTS / width.max(1)).max(1)
}

/// Computes `out[r] = x[r] / sqrt(mean(x[r]²) + eps) · weight` for every row.
///
/// Shapes: `x` and `out` are `[rows][width]`, `weight` is `[width]`.
///
/// # Panics
/// If the shapes disagree.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == out.len() && x.len().is_multiple_of(width.max(1)), "shapes of the norm agree");
    let chunk_len = rows_per_task(width) * width;
    if x.len() <= chunk_len {
        return Arch::new().dispatch(RmsNorm { x, weight, eps, out });
    }
    out.par_chunks_mut(chunk_len).zip(x.par_chunks(chunk_len)).for_each(|(out, x)| {
        Arch::new().dispatch(RmsNorm { x, weight, eps, out });
    });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl NullaryFnOnce for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let width = self.weight.len();
        for (out, x) in self.out.chunks_exact_mut(width).zip(self.x.chunks_exact(width)) {
            let mut lanes = [0.0f32; LANES];
            let (whole, rest) = x.as_chunks::<LANES>();
            for piece in whole {
                for (lane, v) in lanes.iter_mut().zip(piece) {
                    *lane = v.mul_add(*v, *lane);
                }
            }
            for (lane, v) in lanes.iter_mut().zip(rest) {
                *lane = v.mul_add(*v, *lane);
            }
            let scale = 1.0 / (sum_lanes(lanes) / width as f32 + self.eps).sqrt();
            for ((out, v), weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = v * scale * weight;
            }
        }
    }
}

/// Computes `x += y`, element by element.
///
/// # Panics
/// If the lengths differ.
pub fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "shapes of the sum agree");
    let add = |(x, y): (&mut [f32], &[f32])| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    if x.len() <= TASK_ELEMENTS {
        return add((x, y));
    }
    x.par_chunks_mut(TASK_ELEMENTS).zip(y.par_chunks(TASK_ELEMENTS)).for_each(add);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_agrees_with_the_formula_in_f64() {
        for width in [1, 7, 16, 48, 100] {
            let rows = 5;
            let x: Vec<f32> = (0..rows * width).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
            let weight: Vec<f32> = (0..width).map(|i| 1.0 + (i as f32).cos() * 0.2).collect();
            let mut out = vec![0.0; x.len()];
            rms_norm(&x, &weight, 1e-5, &mut out);
            for r in 0..rows {
                let row = &x[r * width..(r + 1) * width];
                let mean: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
                for c in 0..width {
                    let exact = f64::from(row[c]) / (mean + 1e-5).sqrt() * f64::from(weight[c]);
                    assert!((f64::from(out[r * width + c]) - exact).abs() < 2e-6);
                }
            }
        }
    }

    #[test]
    fn result_of_a_row_is_independent_of_other_rows() {
        let width = 192;
        let x: Vec<f32> = (0..700 * width).map(|i| ((i * 7919 % 1000) as f32 - 500.0) * 0.01).collect();
        let weight = vec![1.5; width];
        let mut all = vec![0.0; x.len()];
        rms_norm(&x, &weight, 1e-6, &mut all);
        let mut one = vec![0.0; width];
        for r in [0, 170, 171, 699] {
            rms_norm(&x[r * width..(r + 1) * width], &weight, 1e-6, &mut one);
            assert_eq!(one, all[r * width..(r + 1) * width]);
        }
    }
}
