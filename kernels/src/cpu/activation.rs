//! SiLU-gated activation of the MLP.

use super::math::exp;
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

/// Elements per rayon task. A smaller call stays on the calling thread, where it costs less than
/// waking the pool.
const TASK_ELEMENTS: usize = 1 << 14;

/// Computes `out = silu(gate) · up`, with `silu(x) = x / (1 + e^-x)`.
///
/// Shapes: `gate_up` is `[rows][2 · width]`, `out` is `[rows][width]`. Each row of `gate_up` holds
/// its gates, then its ups.
///
/// # Panics
/// If the shapes disagree.
pub fn silu_mul(gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(gate_up.len() == 2 * out.len() && out.len().is_multiple_of(width.max(1)), "shapes of the gate agree");
    let chunk_len = (TASK_ELEMENTS / width.max(1)).max(1) * width;
    if out.len() <= chunk_len {
        return Arch::new().dispatch(SiluMul { gate_up, width, out });
    }
    out.par_chunks_mut(chunk_len).zip(gate_up.par_chunks(2 * chunk_len)).for_each(|(out, gate_up)| {
        Arch::new().dispatch(SiluMul { gate_up, width, out });
    });
}

struct SiluMul<'a> {
    gate_up: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl NullaryFnOnce for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        if self.width == 0 {
            return;
        }
        for (out, row) in self.out.chunks_exact_mut(self.width).zip(self.gate_up.chunks_exact(2 * self.width)) {
            let (gate, up) = row.split_at(self.width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp(-gate)) * up;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_agrees_with_the_formula_and_is_independent_of_other_rows() {
        let (rows, width) = (300, 100);
        let gate_up: Vec<f32> = (0..rows * 2 * width).map(|i| (i as f32 * 0.31).sin() * 12.0).collect();
        let mut out = vec![0.0; rows * width];
        silu_mul(&gate_up, width, &mut out);
        for r in 0..rows {
            let row = &gate_up[r * 2 * width..(r + 1) * 2 * width];
            for c in 0..width {
                let gate = f64::from(row[c]);
                let exact = gate / (1.0 + (-gate).exp()) * f64::from(row[width + c]);
                assert!((f64::from(out[r * width + c]) - exact).abs() < 1e-6 * exact.abs().max(1.0));
            }
        }
        let mut one = vec![0.0; width];
        silu_mul(&gate_up[14 * width..16 * width], width, &mut one);
        assert_eq!(one, out[7 * width..8 * width]);
    }

    #[test]
    fn result_is_finite_for_extreme_gates() {
        let mut out = [0.0; 2];
        silu_mul(&[-1e4, 1e4, 1.0, 1.0], 2, &mut out);
        assert!(out[0].abs() < 1e-30 && out[1] == 1e4, "{out:?}");
    }
}
