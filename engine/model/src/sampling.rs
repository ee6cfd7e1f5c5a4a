//! Selection of a token from logits.
//!
//! Invariants:
//! - Equal parameters, seed and logits give equal tokens on every machine.
//! - Temperature 0 selects the largest logit, and the lowest id among equals.

use crate::constraint::{self, Constraint};
use crate::guide::{Guide, GuideError};
use larder_kernels::cpu::{SampleParams, best_first, sample_token};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Accepted temperatures.
pub const TEMPERATURE_RANGE: RangeInclusive<f32> = 0.0..=2.0;
/// Accepted repetition penalties. At 0 the logits would be infinite.
pub const REPETITION_PENALTY_RANGE: RangeInclusive<f32> = 0.01..=10.0;

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
    /// Samples from the tokens that are at least this probable, relative to the best one. 0 (the
    /// default) disables the cut.
    pub min_p: f32,
    /// Divides the positive logits of tokens in the prompt and the answer so far, and multiplies
    /// the negative ones. Default 1.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that are in the answer. Default 0.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it is in the answer. Default 0.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, before the penalties. Default: none.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed for reproducible sampling. If absent, each request gets a random seed.
    pub seed: Option<u64>,
    pub max_tokens: usize,
    /// Number of tokens before which no stop token is selected and no stop string ends the answer.
    /// Default 0.
    pub min_tokens: usize,
    /// Ends the generation before the first of these strings. Default: none.
    pub stop: Vec<String>,
    /// Ends the generation at one of these tokens. Default: none.
    pub stop_token_ids: Vec<u32>,
    /// Keeps the stop string, or the text of the stop token, in the answer.
    pub include_stop: bool,
    pub ignore_eos: bool,
    /// Leaves special tokens out of the text. Default `true`.
    pub skip_special_tokens: bool,
    /// Reports the log-probability of each token of the answer, and of this many best tokens at its
    /// place.
    pub logprobs: Option<u32>,
    /// Reports the same for the tokens of the prompt but the first.
    pub prompt_logprobs: Option<u32>,
    /// Texts that the answer may have. Default: any.
    #[serde(with = "constraint::shared", skip_serializing_if = "Option::is_none")]
    pub constraint: Option<Arc<Constraint>>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            max_tokens: 256,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop: false,
            ignore_eos: false,
            skip_special_tokens: true,
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
        }
    }
}

/// Natural logarithm of the probability of a token, before temperature, bias, penalties and cuts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    pub logprob: f32,
    /// Best tokens at this place, best first, with theirs.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Log-probabilities of token `id` and of the `top` best tokens. `logits` must be finite.
    pub fn new(logits: &[f32], id: u32, top: usize) -> TokenLogprobs {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // In the order of the ids, so that equal logits give equal sums.
        let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
        let normaliser = f64::from(max) + sum.ln();
        let logprob = |x: f32| (f64::from(x) - normaliser) as f32;
        let mut best: Vec<(u32, f32)> = Vec::new();
        if top > 0 {
            best = (0..).zip(logits.iter().copied()).collect();
            if top < best.len() {
                best.select_nth_unstable_by(top - 1, best_first);
                best.truncate(top);
            }
            best.sort_unstable_by(best_first);
        }
        let own = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        // By reference: a collection in place would keep the memory of the whole vocabulary.
        Self { logprob: logprob(own), top: best.iter().map(|&(id, x)| (id, logprob(x))).collect() }
    }
}

#[derive(Debug, Clone)]
pub struct Sampler {
    params: SampleParams,
    rng: ChaCha8Rng,
    /// `None` if the logits are used as they are.
    shaping: Option<Shaping>,
    /// End tokens that a constrained request ignores.
    ignored: Vec<u32>,
}

/// Changes to the logits before the selection.
#[derive(Debug, Clone)]
struct Shaping {
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    bias: Vec<(u32, f32)>,
    /// Tokens of the prompt, each once.
    prompt: Vec<u32>,
    /// Tokens selected so far, with their numbers.
    counts: BTreeMap<u32, u32>,
    /// Tokens that are not selected before `min_tokens` others.
    withheld: Vec<u32>,
    min_tokens: usize,
    selected: usize,
}

impl Shaping {
    fn new(params: &SamplingParams, prompt: &[u32], eos_tokens: &[u32]) -> Option<Shaping> {
        let is_penalised = [params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0]
            .into_iter()
            .any(|penalty| penalty != 0.0);
        if !is_penalised && params.logit_bias.is_empty() && params.min_tokens == 0 {
            return None;
        }
        let mut tokens = if params.repetition_penalty == 1.0 { Vec::new() } else { prompt.to_vec() };
        tokens.sort_unstable();
        tokens.dedup();
        let eos_tokens = if params.ignore_eos { &[] } else { eos_tokens };
        Some(Shaping {
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            bias: params.logit_bias.clone(),
            prompt: tokens,
            counts: BTreeMap::new(),
            withheld: [eos_tokens, &params.stop_token_ids].concat(),
            min_tokens: params.min_tokens,
            selected: 0,
        })
    }

    fn apply(&self, logits: &mut [f32], withholds: bool) {
        for &(id, bias) in &self.bias {
            change(logits, id, |x| x + bias);
        }
        if self.repetition_penalty != 1.0 {
            let repeat = |x: f32| if x > 0.0 { x / self.repetition_penalty } else { x * self.repetition_penalty };
            let own = self.counts.keys().filter(|id| self.prompt.binary_search(id).is_err());
            self.prompt.iter().chain(own).for_each(|&id| change(logits, id, repeat));
        }
        for (&id, &count) in &self.counts {
            change(logits, id, |x| x - self.frequency_penalty * count as f32 - self.presence_penalty);
        }
        if withholds && self.selected < self.min_tokens {
            self.withheld.iter().for_each(|&id| change(logits, id, |_| f32::NEG_INFINITY));
        }
    }

    fn count(&mut self, id: u32) {
        self.selected += 1;
        *self.counts.entry(id).or_default() += 1;
    }
}

fn change(logits: &mut [f32], id: u32, new: impl Fn(f32) -> f32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = new(*logit);
    }
}

impl Sampler {
    /// Creates the sampler of one sequence. A temperature that is not a positive number selects
    /// greedily. `min_tokens` withholds `eos_tokens`, unless the request ignores them.
    pub fn new(params: &SamplingParams, prompt: &[u32], eos_tokens: &[u32]) -> Sampler {
        let rng = match params.seed {
            Some(seed) => ChaCha8Rng::seed_from_u64(seed),
            None => ChaCha8Rng::from_os_rng(),
        };
        let &SamplingParams { temperature, top_p, min_p, top_k, .. } = params;
        Sampler {
            params: SampleParams { temperature, top_p, min_p, top_k },
            rng,
            shaping: Shaping::new(params, prompt, eos_tokens),
            ignored: if params.ignore_eos && params.constraint.is_some() { eos_tokens.to_vec() } else { Vec::new() },
        }
    }

    /// Selects a token id, an index into `logits`, and counts it for the penalties. Never selects
    /// NaN. Returns 0 for an empty row.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        match &self.shaping {
            None => self.select(logits),
            Some(_) => self.select_and_count(&self.shaped(logits, true)),
        }
    }

    /// Selects a token like [`sample`](Self::sample) among those that `guide` allows, and has it
    /// accept the token. Stop tokens are withheld only while the guide allows others.
    ///
    /// # Errors
    /// [`GuideError::NoToken`] if the guide allows none of the vocabulary.
    pub fn sample_within(&mut self, logits: &[f32], guide: &mut Guide) -> Result<u32, GuideError> {
        let allowed = guide.allowed()?;
        let mut shaped = self.shaped(logits, true);
        self.ignored.iter().for_each(|&id| change(&mut shaped, id, |_| f32::NEG_INFINITY));
        if !allowed.restrict(&mut shaped) {
            shaped = self.shaped(logits, false);
            if !allowed.restrict(&mut shaped) {
                return Err(GuideError::NoToken);
            }
        }
        let id = self.select_and_count(&shaped);
        guide.accept(id)?;
        Ok(id)
    }

    fn shaped(&self, logits: &[f32], withholds: bool) -> Vec<f32> {
        let mut shaped = logits.to_vec();
        if let Some(shaping) = &self.shaping {
            shaping.apply(&mut shaped, withholds);
        }
        shaped
    }

    fn select_and_count(&mut self, logits: &[f32]) -> u32 {
        let id = self.select(logits);
        if let Some(shaping) = &mut self.shaping {
            shaping.count(id);
        }
        id
    }

    fn select(&mut self, logits: &[f32]) -> u32 {
        // A greedy selection takes no random number.
        let uniform = if self.params.is_greedy() { 0.0 } else { self.rng.random() };
        sample_token(logits, &self.params, uniform)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_k: u32, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, seed: Some(7), ..SamplingParams::default() }
    }

    fn histogram(params: &SamplingParams, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(params, &[], &[]);
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
            assert_eq!(Sampler::new(&params(temperature, 0, 1.0), &[], &[]).sample(&logits), 1);
        }
        assert_eq!(Sampler::new(&params(1.0, 1, 1.0), &[], &[]).sample(&logits), 1);
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
    fn equal_seeds_reproduce_and_other_seeds_differ() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(&SamplingParams { seed: Some(seed), ..params(1.0, 0, 0.95) }, &[], &[]);
            (0..40).map(|_| sampler.sample(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn min_p_cuts_below_a_part_of_the_best_probability() {
        let logits = [0.1f32.ln(), 0.5f32.ln(), 0.15f32.ln(), 0.25f32.ln()];
        let drawn = |min_p| -> Vec<bool> {
            let params = SamplingParams { min_p, ..params(1.0, 0, 1.0) };
            histogram(&params, &logits, 5000).iter().map(|&count| count > 0).collect()
        };
        assert_eq!(drawn(0.0), [true; 4]);
        assert_eq!(drawn(0.4), [false, true, false, true]);
        assert_eq!(drawn(1.0), [false, true, false, false]);
    }

    #[test]
    fn penalties_lower_repeated_tokens() {
        let greedy = |adjust: fn(&mut SamplingParams), logits: &[f32]| -> Vec<u32> {
            let mut params = SamplingParams::default();
            adjust(&mut params);
            let mut sampler = Sampler::new(&params, &[3], &[2]);
            (0..4).map(|_| sampler.sample(logits)).collect()
        };
        let logits = [2.0, 1.0, -1.0, 2.5];
        assert_eq!(greedy(|_| {}, &logits), [3; 4]);
        // The prompt counts for the repetition penalty only: 2.5 / 2 is below 2.0.
        assert_eq!(greedy(|p| p.repetition_penalty = 2.0, &logits), [0, 3, 3, 3]);
        assert_eq!(greedy(|p| p.presence_penalty = 1.0, &logits), [3, 0, 3, 3]);
        assert_eq!(greedy(|p| p.frequency_penalty = 1.0, &logits), [3, 0, 3, 0]);
        assert_eq!(greedy(|p| p.logit_bias = vec![(2, 100.0), (9, 1.0)], &logits), [2; 4]);
        // Negative logits are multiplied.
        assert_eq!(greedy(|p| p.repetition_penalty = 4.0, &[-1.0, -1.5, -9.0, -0.5]), [0, 1, 3, 3]);
    }

    #[test]
    fn stop_tokens_are_withheld_before_the_minimum() {
        let logits = [1.0, 2.0, 4.0, 3.0];
        let first = |ignore_eos| {
            let params = SamplingParams { min_tokens: 2, stop_token_ids: vec![3], ignore_eos, ..Default::default() };
            let mut sampler = Sampler::new(&params, &[], &[2]);
            [sampler.sample(&logits), sampler.sample(&logits), sampler.sample(&logits)]
        };
        assert_eq!(first(false), [1, 1, 2]);
        assert_eq!(first(true), [2, 2, 2]);
    }

    #[test]
    fn logprobs_are_those_of_the_softmax() {
        let logits = [0.5f32.ln() + 7.0, 0.125f32.ln() + 7.0, 0.375f32.ln() + 7.0];
        let logprobs = TokenLogprobs::new(&logits, 1, 2);
        assert!((logprobs.logprob - 0.125f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|top| top.0).collect::<Vec<_>>(), [0, 2]);
        assert!((logprobs.top[1].1 - 0.375f32.ln()).abs() < 1e-6);
        assert_eq!(TokenLogprobs::new(&logits, 0, 9).top.len(), 3);
        assert_eq!(TokenLogprobs::new(&logits, 0, 9).top[0].1, TokenLogprobs::new(&logits, 0, 0).logprob);
        let best = TokenLogprobs::new(&[0.0; 1000], 0, 2).top;
        assert!(best.capacity() < 1000, "{} entries for 2", best.capacity());
    }

    #[test]
    fn invalid_logits_never_panic() {
        let mut sampler = Sampler::new(&params(1.0, 3, 0.5), &[], &[]);
        for logits in [&[][..], &[f32::NAN; 3], &[f32::NEG_INFINITY; 3], &[f32::INFINITY, 1.0, f32::INFINITY]] {
            assert!((sampler.sample(logits) as usize) < logits.len().max(1));
        }
    }
}
