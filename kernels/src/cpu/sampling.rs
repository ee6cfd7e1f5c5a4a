//! Selection of a token from logits by a random number.
//!
//! Invariant: equal logits, parameters and random numbers give equal tokens on every machine.

use super::math::argmax;
use std::cmp::Ordering;

/// Best tokens among which the nucleus is searched first. Each further search takes eight times as
/// many.
const NUCLEUS_FIRST: usize = 128;

/// Cuts and temperature of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    /// Divides the logits. A value that is not a positive number selects the largest logit.
    pub temperature: f32,
    /// Keeps the smallest set of best tokens whose probabilities reach this sum. There is no cut
    /// from 1 on, and for NaN.
    pub top_p: f32,
    /// Keeps the tokens that are at least this probable, relative to the best one. There is no cut
    /// up to 0, and for NaN.
    pub min_p: f32,
    /// Keeps this many best tokens. 0 disables the cut.
    pub top_k: u32,
}

impl SampleParams {
    /// Returns `true` if the largest logit is selected, whatever the random number.
    pub fn is_greedy(&self) -> bool {
        !(self.temperature > 0.0 && self.temperature.is_finite()) || self.top_k == 1
    }
}

/// Selects a token id, an index into `logits`, by a random number from 0 to 1, without 1. Never
/// selects NaN. Returns 0 if no token remains.
///
/// The cuts apply in the order `min_p`, `top_k`, `top_p`.
pub fn sample_token(logits: &[f32], params: &SampleParams, uniform: f64) -> u32 {
    if params.is_greedy() {
        return argmax(logits);
    }
    draw(&candidates(logits, params), uniform)
}

/// Returns ids and their unnormalised probabilities, in the order that `draw` visits.
fn candidates(logits: &[f32], params: &SampleParams) -> Vec<(u32, f64)> {
    let top_k = params.top_k as usize;
    let mut kept: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|(_, x)| !x.is_nan()).collect();
    let max = kept.iter().map(|c| c.1).fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: f32| if x == max { 1.0 } else { (f64::from(x - max) / f64::from(params.temperature)).exp() };
    if params.min_p > 0.0 {
        kept.retain(|c| weight(c.1) >= f64::from(params.min_p));
    }
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, best_first);
        kept.truncate(top_k);
    }
    if params.top_p < 1.0 {
        return nucleus(kept, f64::from(params.top_p), weight);
    }
    if top_k > 0 {
        kept.sort_unstable_by(best_first);
    }
    kept.into_iter().map(|(id, x)| (id, weight(x))).collect()
}

fn draw(candidates: &[(u32, f64)], uniform: f64) -> u32 {
    let total: f64 = candidates.iter().map(|c| c.1).sum();
    let mut left = uniform * total;
    for &(id, weight) in candidates {
        left -= weight;
        if left < 0.0 {
            return id;
        }
    }
    // Rounding can leave a remainder. The last token with a non-zero probability takes it.
    candidates.iter().rev().find(|c| c.1 > 0.0).or(candidates.first()).map_or(0, |c| c.0)
}

/// Orders ids with their logits by descending logit, then ascending id.
pub fn best_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Returns the best tokens whose probabilities reach `top_p`, including the token that crosses it,
/// best first. At least one, if `kept` has one.
///
/// Sorts only as many of the best tokens as it needs: a vocabulary has 150,000, and the nucleus
/// usually some dozens.
fn nucleus(mut kept: Vec<(u32, f32)>, top_p: f64, weight: impl Fn(f32) -> f64) -> Vec<(u32, f64)> {
    // The sum needs one order for equal results, and has the order of the ids or that of `top_k`.
    let threshold = top_p * kept.iter().map(|c| weight(c.1)).sum::<f64>();
    let mut count = NUCLEUS_FIRST;
    loop {
        if count < kept.len() {
            kept.select_nth_unstable_by(count - 1, best_first);
        }
        let len = count.min(kept.len());
        let best = &mut kept[..len];
        best.sort_unstable_by(best_first);
        let mut sum = 0.0;
        let crossing = best.iter().position(|c| {
            sum += weight(c.1);
            sum >= threshold
        });
        if crossing.is_some() || count >= kept.len() {
            let size = crossing.map_or(kept.len(), |index| index + 1);
            return kept[..size].iter().map(|&(id, x)| (id, weight(x))).collect();
        }
        count *= 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_k: u32, top_p: f32) -> SampleParams {
        SampleParams { temperature, top_p, min_p: 0.0, top_k }
    }

    #[test]
    fn nucleus_has_the_tokens_that_sorting_the_whole_vocabulary_gives() {
        // Flat logits need several searches, steep ones a single one.
        for (steepness, top_p) in [(0.0, 0.9), (0.001, 0.5), (0.1, 0.999), (3.0, 0.9), (0.01, 1.0 - f32::EPSILON)] {
            let logits: Vec<f32> = (0..5000).map(|i| (i * 7919 % 5000) as f32 * -steepness).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            sorted.sort_by(best_first);
            let weights: Vec<f64> = sorted.iter().map(|c| f64::from(c.1 - sorted[0].1).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = 0.0;
            let crossing = weights.iter().position(|weight| {
                sum += weight;
                sum >= f64::from(top_p) * total * (1.0 + 1e-12)
            });
            let size = crossing.map_or(sorted.len(), |index| index + 1);
            let found = candidates(&logits, &params(1.0, 0, top_p));
            assert!(found.len().abs_diff(size) <= 1, "{steepness} {top_p}: {} {size}", found.len());
            assert!(found.iter().zip(&sorted).all(|(a, b)| a.0 == b.0), "{steepness} {top_p}");
        }
    }

    #[test]
    fn random_number_selects_by_cumulative_probability() {
        let logits = [0.5f32.ln(), f32::NAN, 0.25f32.ln(), 0.25f32.ln()];
        let drawn = [0.0, 0.49, 0.51, 0.74, 0.76, 1.0 - f64::EPSILON / 2.0];
        assert_eq!(drawn.map(|u| sample_token(&logits, &params(1.0, 0, 1.0), u)), [0, 0, 2, 2, 3, 3]);
        assert_eq!(drawn.map(|u| sample_token(&logits, &params(1.0, 2, 1.0), u)), [0, 0, 0, 2, 2, 2]);
        assert_eq!(drawn.map(|u| sample_token(&logits, &params(0.0, 0, 1.0), u)), [0; 6]);
        assert_eq!(sample_token(&[f32::NAN], &params(1.0, 0, 1.0), 0.5), 0);
        assert_eq!(sample_token(&[], &params(1.0, 0, 0.5), 0.5), 0);
    }
}
