//! Selection of a token from logits.
//!
//! Invariants:
//! - Equal parameters, seed and logits give equal tokens on every machine.
//! - Temperature 0 selects the largest logit, and the lowest id among equals.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// Sampling parameters of a completion. Fields that are absent in JSON take their defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// Divides the logits. 0 (the default) always selects the best token.
    pub temperature: f32,
    /// Samples from the smallest set of best tokens whose probabilities reach this sum. 1 (the
    /// default) disables the cut.
    pub top_p: f32,
    /// Samples from this many best tokens. 0 (the default) disables the cut.
    pub top_k: u32,
    /// Seed for reproducible sampling. If absent, each request gets a random seed.
    pub seed: Option<u64>,
    pub max_tokens: usize,
    /// Ends the generation before the first of these strings. Default: none.
    pub stop: Vec<String>,
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            seed: None,
            max_tokens: 256,
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// Best tokens among which the nucleus is searched first. Each further search takes eight times as
/// many.
const NUCLEUS_FIRST: usize = 128;

#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f32,
    top_p: f32,
    top_k: usize,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// Creates the sampler of one sequence. A temperature that is not a positive number selects
    /// greedily.
    pub fn new(params: &SamplingParams) -> Sampler {
        let rng = match params.seed {
            Some(seed) => ChaCha8Rng::seed_from_u64(seed),
            None => ChaCha8Rng::from_os_rng(),
        };
        let is_greedy = !(params.temperature > 0.0 && params.temperature.is_finite());
        Sampler {
            temperature: if is_greedy { 0.0 } else { params.temperature },
            top_p: if params.top_p.is_nan() { 1.0 } else { params.top_p },
            top_k: params.top_k as usize,
            rng,
        }
    }

    /// Selects a token id, an index into `logits`. Never selects NaN. Returns 0 for an empty row.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.temperature == 0.0 || self.top_k == 1 {
            return larder_kernels::cpu::argmax(logits);
        }
        let candidates = self.candidates(logits);
        self.draw(&candidates)
    }

    /// Returns ids and their unnormalised probabilities, in the order that `draw` visits.
    fn candidates(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let mut kept: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|(_, x)| !x.is_nan()).collect();
        if self.top_k > 0 && self.top_k < kept.len() {
            kept.select_nth_unstable_by(self.top_k - 1, best_first);
            kept.truncate(self.top_k);
        }
        let max = kept.iter().map(|c| c.1).fold(f32::NEG_INFINITY, f32::max);
        let weight = |x: f32| if x == max { 1.0 } else { (f64::from(x - max) / f64::from(self.temperature)).exp() };
        if self.top_p < 1.0 {
            return nucleus(kept, f64::from(self.top_p), weight);
        }
        if self.top_k > 0 {
            kept.sort_unstable_by(best_first);
        }
        kept.into_iter().map(|(id, x)| (id, weight(x))).collect()
    }

    fn draw(&mut self, candidates: &[(u32, f64)]) -> u32 {
        let total: f64 = candidates.iter().map(|c| c.1).sum();
        let mut left = self.rng.random::<f64>() * total;
        for &(id, weight) in candidates {
            left -= weight;
            if left < 0.0 {
                return id;
            }
        }
        // Rounding can leave a remainder. The last token with a non-zero probability takes it.
        candidates.iter().rev().find(|c| c.1 > 0.0).or(candidates.first()).map_or(0, |c| c.0)
    }
}

/// Order by descending logit, then ascending id.
fn best_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
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

    fn params(temperature: f32, top_k: u32, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, seed: Some(7), ..SamplingParams::default() }
    }

    fn histogram(params: &SamplingParams, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(params);
        let mut counts = vec![0; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_selects_the_lowest_id_of_equal_maxima() {
        let logits = [0.5, 2.0, f32::NAN, 2.0, f32::NEG_INFINITY];
        for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(Sampler::new(&params(temperature, 0, 1.0)).sample(&logits), 1);
        }
        assert_eq!(Sampler::new(&params(1.0, 1, 1.0)).sample(&logits), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.6f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let counts = histogram(&params(1.0, 0, 1.0), &logits, 20_000);
        for (count, p) in counts.iter().zip([0.6, 0.3, 0.1]) {
            assert!((*count as f64 / 20_000.0 - p).abs() < 0.015, "{counts:?}");
        }
        // Temperature 1/2 squares the odds: 36 : 9 : 1.
        let counts = histogram(&params(0.5, 0, 1.0), &logits, 20_000);
        assert!((counts[0] as f64 / 20_000.0 - 36.0 / 46.0).abs() < 0.015, "{counts:?}");
    }

    #[test]
    fn top_k_and_top_p_keep_the_best_tokens() {
        let logits = [0.1f32.ln(), 0.5f32.ln(), 0.15f32.ln(), 0.25f32.ln()];
        let drawn = |p: &SamplingParams| -> Vec<bool> { histogram(p, &logits, 5000).iter().map(|&c| c > 0).collect() };
        assert_eq!(drawn(&params(1.0, 2, 1.0)), [false, true, false, true]);
        // 0.5 alone does not reach 0.6; the token that crosses it is kept.
        assert_eq!(drawn(&params(1.0, 0, 0.6)), [false, true, false, true]);
        assert_eq!(drawn(&params(1.0, 0, 0.8)), [false, true, true, true]);
        assert_eq!(drawn(&params(1.0, 0, 0.0)), [false, true, false, false]);
        assert_eq!(drawn(&params(1.0, 3, 0.99)), [false, true, true, true]);
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
            let found = Sampler::new(&params(1.0, 0, top_p)).candidates(&logits);
            assert!(found.len().abs_diff(size) <= 1, "{steepness} {top_p}: {} {size}", found.len());
            assert!(found.iter().zip(&sorted).all(|(a, b)| a.0 == b.0), "{steepness} {top_p}");
        }
    }

    #[test]
    fn equal_seeds_reproduce_and_other_seeds_differ() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(&SamplingParams { seed: Some(seed), ..params(1.0, 0, 0.95) });
            (0..40).map(|_| sampler.sample(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn invalid_logits_never_panic() {
        let mut sampler = Sampler::new(&params(1.0, 3, 0.5));
        for logits in [&[][..], &[f32::NAN; 3], &[f32::NEG_INFINITY; 3], &[f32::INFINITY, 1.0, f32::INFINITY]] {
            assert!((sampler.sample(logits) as usize) < logits.len().max(1));
        }
    }
}
