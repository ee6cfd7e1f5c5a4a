//! Sums, maxima and exponentials with a fixed order of operations.

use pulp::{Arch, NullaryFnOnce};

/// Partial sums per row. Fixed, so that results do not depend on the vector width of the machine.
pub const LANES: usize = 16;

/// Adds the lanes pairwise, always in the same order.
#[inline(always)]
pub(super) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Larger of two values. Compiles to one instruction, unlike `f32::max`. If one value is NaN,
/// returns either.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
pub(super) fn max_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = larger(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Computes `e^x` with a relative error of about 1e-7. Returns 0 below -87. Branch-free, so that
/// the compiler vectorises loops over it.
///
/// Writes `x = n·ln 2 + r` with `|r| ≤ ln 2 / 2`. A polynomial (Cephes' `expf`) gives `e^r`, and
/// `n` is added to the exponent bits.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    const HIGHEST: f32 = 88.0;
    // Adding 1.5·2²³ rounds to an integer and leaves it in the lowest mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = larger(if x < HIGHEST { x } else { HIGHEST }, LOWEST);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, clamped));
    let mut poly = 1.987_569_1e-4_f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        poly = poly.mul_add(r, coefficient);
    }
    let mantissa = poly.mul_add(r * r, r) + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < LOWEST { 0.0 } else { mantissa * power }
}

/// Replaces `row` by its softmax. An empty row stays empty.
pub fn softmax(row: &mut [f32]) {
    struct Softmax<'a>(&'a mut [f32]);
    impl NullaryFnOnce for Softmax<'_> {
        type Output = ();
        #[inline(always)]
        fn call(self) {
            let max = self.0.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sums = [0.0; LANES];
            for piece in self.0.chunks_mut(LANES) {
                for (x, sum) in piece.iter_mut().zip(&mut sums) {
                    *x = exp(*x - max);
                    *sum += *x;
                }
            }
            let scale = 1.0 / sum_lanes(sums);
            self.0.iter_mut().for_each(|x| *x *= scale);
        }
    }
    Arch::new().dispatch(Softmax(row));
}

/// Index of the largest value. Returns the lowest index among equals, and 0 for an empty row. NaN
/// never wins.
pub fn argmax(row: &[f32]) -> u32 {
    struct Largest<'a>(&'a [f32]);
    impl NullaryFnOnce for Largest<'_> {
        type Output = f32;
        #[inline(always)]
        fn call(self) -> f32 {
            let mut largest = [f32::NEG_INFINITY; LANES];
            let (whole, rest) = self.0.as_chunks::<LANES>();
            for piece in whole {
                for lane in 0..LANES {
                    largest[lane] = larger(piece[lane], largest[lane]);
                }
            }
            rest.iter().fold(max_lanes(largest), |max, value| larger(*value, max))
        }
    }
    let max = Arch::new().dispatch(Largest(row));
    row.iter().position(|value| *value == max).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_whole_range() {
        let mut worst = 0.0f64;
        for i in -86_990..88_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert!(exp(1000.0).is_finite());
    }

    #[test]
    fn softmax_agrees_with_the_formula_in_f64() {
        let mut row: Vec<f32> = (0..37).map(|i| (i as f32 * 0.37).sin() * 5.0).collect();
        let naive: Vec<f64> = {
            let e: Vec<f64> = row.iter().map(|&x| f64::from(x).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.iter().map(|x| x / sum).collect()
        };
        softmax(&mut row);
        for (x, y) in row.iter().zip(naive) {
            assert!((f64::from(*x) - y).abs() < 1e-7);
        }
        softmax(&mut []);
    }

    #[test]
    fn argmax_returns_the_first_of_equal_maxima() {
        assert_eq!(argmax(&[1.0, 3.0, f32::NAN, 3.0]), 1);
        assert_eq!(argmax(&[]), 0);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY, -3.0]), 2);
        assert_eq!(argmax(&[f32::NAN; 20]), 0);
        for best in 0..50 {
            let mut row = [f32::NAN; 50];
            row[best..].fill(-1.0);
            assert_eq!(argmax(&row), best as u32);
        }
    }
}
