//! Work on the logits of one sequence in a step. The sequences of a step run in parallel.
//!
//! Invariant: the result depends on the sequence's own logits and sampler only.

use crate::api::TokenLogprobs;
use larder_model::{Sampler, is_finite};
use rayon::prelude::*;

/// Logits that are NaN or infinite. No token may follow from them.
#[derive(Debug)]
pub(crate) struct NotFinite;

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
        Self { logits, vocab: logits.len(), sampler: None, logprobs: None, prompt: None }
    }

    /// Fails for logits that are not finite.
    pub(crate) fn run(self) -> Result<Sampled, NotFinite> {
        if !is_finite(self.logits) {
            return Err(NotFinite);
        }
        let prompt = self.prompt.map_or_else(Vec::new, |prompt| {
            let rows = self.logits.par_chunks_exact(self.vocab).zip(prompt.next_tokens);
            rows.map(|(row, &next)| TokenLogprobs::new(row, next, prompt.top)).collect()
        });
        let token = self.sampler.map(|sampler| {
            let last = &self.logits[self.logits.len() - self.vocab..];
            let id = sampler.sample(last);
            SampledToken { id, logprobs: self.logprobs.map(|top| TokenLogprobs::new(last, id, top)) }
        });
        Ok(Sampled { token, prompt })
    }
}
