//! Work on the logits of one sequence in a step. The sequences of a step run in parallel.
//!
//! Invariant: the result depends on the sequence's own logits, sampler and guide only.

use crate::api::TokenLogprobs;
use crate::request_memory::RequestMemory;
use larder_model::{Guide, GuideError, Sampler, is_finite};
use rayon::prelude::*;

/// Failure to select a token.
#[derive(Debug)]
pub(crate) enum SamplingError {
    /// Logits are NaN or infinite. No token may follow from them.
    NotFinite,
    /// The constraint of the request cannot go on.
    Guide(GuideError),
    /// There is no memory for the state of the constraint.
    GuideMemory,
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

/// Constraint of a request, and the memory that it is charged for.
pub(crate) struct GuideJob<'a> {
    pub(crate) guide: &'a mut Guide,
    pub(crate) memory: &'a RequestMemory,
}

pub(crate) struct SamplingJob<'a> {
    /// Rows of `vocab` logits. Only the last one selects a token.
    pub(crate) logits: &'a [f32],
    pub(crate) vocab: usize,
    /// `None` if the chunk does not end the tokens known so far.
    pub(crate) sampler: Option<&'a mut Sampler>,
    /// Constraint of the request, if it has one.
    pub(crate) guide: Option<GuideJob<'a>>,
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
            Some(GuideJob { guide, memory }) => {
                let id = sampler.sample_within(last, guide).map_err(SamplingError::Guide)?;
                if !memory.keep_guide(guide.bytes()) {
                    // Now, and not at the end of the step: guides of other requests grow in it.
                    guide.release();
                    return Err(SamplingError::GuideMemory);
                }
                id
            }
            None => sampler.sample(last),
        };
        let token = SampledToken { id, logprobs: self.logprobs.map(|top| TokenLogprobs::new(last, id, top)) };
        Ok(Sampled { token: Some(token), prompt })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_memory::{RequestBudget, RequestSize};
    use larder_http::PeerAddress;
    use larder_model::{Constraint, GuideFactory, SamplingParams};

    #[test]
    fn guide_without_room_is_dropped_at_once() {
        let mut guide = GuideFactory::of_bytes().unwrap().compile(&Constraint::Regex("a+".into())).unwrap();
        let size = RequestSize { body_bytes: 0, tokens: 1, prompt_logprobs: None };
        let select = |guides_bytes: usize, guide: &mut Guide| {
            let memory = RequestBudget::new(1 << 20, guides_bytes, 16).take(PeerAddress::default(), size).unwrap();
            let mut sampler = Sampler::new(&SamplingParams::default(), &[], &[]);
            let logits = [0.0; 256];
            let guide = Some(GuideJob { guide, memory: &memory });
            let sampler = Some(&mut sampler);
            SamplingJob { logits: &logits, vocab: 256, sampler, guide, logprobs: None, prompt: None }.run()
        };
        let token = select(64 << 20, &mut guide).unwrap().token.unwrap();
        assert_eq!(token.id, u32::from(b'a'));
        assert!(matches!(select(0, &mut guide), Err(SamplingError::GuideMemory)));
        assert!(guide.has_ended() && guide.bytes() == 0);
    }
}
