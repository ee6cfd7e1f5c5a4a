//! Work on the logits of one sequence in a step. The sequences of a step run in parallel.
//!
//! Invariant: the result depends on the sequence's own logits, sampler and guide only.

use crate::api::TokenLogprobs;
use larder_model::{Guide, GuideError, Sampler, is_finite};
use rayon::prelude::*;

/// Failure to select a token.
#[derive(Debug)]
pub(crate) enum SamplingError {
    /// Logits are NaN or infinite. No token may follow from them.
    NotFinite,
    /// The constraint of the request cannot go on.
    Guide(GuideError),
}

#[derive(Debug, Clone)]
pub(crate) struct SampledToken {
    pub(crate) id: u32,
    /// Present if the request asks for it.
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// Rows of a prompt whose log-probabilities are wanted.
pub(crate) struct PromptRows<'a> {
    /// Tokens after those of the rows. The last row of a prompt has none.
    pub(crate) next_tokens: &'a [u32],
    /// Number of best tokens to report.
    pub(crate) top: usize,
}

pub(crate) struct SamplingJob<'a> {
    /// Rows of `vocab` logits. Only the last one selects a token.
    pub(crate) logits: &'a [f32],
    pub(crate) vocab: usize,
    /// `None` if the chunk does not end the tokens known so far.
    pub(crate) sampler: Option<&'a mut Sampler>,
    /// Constraint of the request, if it has one.
    pub(crate) guide: Option<&'a mut Guide>,
    pub(crate) logprobs: Option<usize>,
    pub(crate) prompt: Option<PromptRows<'a>>,
}

#[derive(Debug, Default)]
pub(crate) struct Sampled {
    pub(crate) token: Option<SampledToken>,
    pub(crate) prompt: Vec<TokenLogprobs>,
}

impl<'a> SamplingJob<'a> {
    /// Job that only checks the logits.
    pub(crate) fn check(logits: &'a [f32]) -> Self {
        Self { logits, vocab: logits.len(), sampler: None, guide: None, logprobs: None, prompt: None }
    }

    /// Selects the token, within the constraint of the request.
    pub(crate) fn run(self) -> Result<Sampled, SamplingError> {
        if !is_finite(self.logits) {
            return Err(SamplingError::NotFinite);
        }
        let prompt = self.prompt.map_or_else(Vec::new, |prompt| {
            let rows = self.logits.par_chunks_exact(self.vocab).zip(prompt.next_tokens);
            rows.map(|(row, &next)| TokenLogprobs::new(row, next, prompt.top)).collect()
        });
        let Some(sampler) = self.sampler else { return Ok(Sampled { token: None, prompt }) };
        let last = &self.logits[self.logits.len() - self.vocab..];
        let id = match self.guide {
            Some(guide) => sampler.sample_within(last, guide).map_err(SamplingError::Guide)?,
            None => sampler.sample(last),
        };
        let token = SampledToken { id, logprobs: self.logprobs.map(|top| TokenLogprobs::new(last, id, top)) };
        Ok(Sampled { token: Some(token), prompt })
    }
}
