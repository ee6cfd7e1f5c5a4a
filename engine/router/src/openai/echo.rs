//! Prompts at the beginning of answers, with the log-probabilities of their tokens.

use super::errors::ApiError;
use super::logprobs::{TokenEntry, entry_bytes};
use super::types::CommonParams;
use crate::route::PromptPlan;
use larder_worker::api::TokenLogprobs;
use std::ops::Range;
use std::sync::Arc;

/// Maximum log-probabilities of echoed prompts in one answer. They take a quarter of the memory for
/// all answers.
const ECHO_LOGPROBS_MAX: usize = 512 << 10;
/// Maximum tokens of an echoed prompt in one event of a stream.
const ECHO_PIECE_TOKENS: usize = 256;

/// Refuses more log-probabilities of echoed prompts than one answer may have.
pub(super) fn check(common: &CommonParams, tokens: usize) -> Result<(), ApiError> {
    let Some(top) = common.logprobs.filter(|_| common.echo) else { return Ok(()) };
    let count = tokens.saturating_mul(common.best_of as usize).saturating_mul(top as usize + 1);
    if count > ECHO_LOGPROBS_MAX {
        let message = format!(
            "the echo of {tokens} tokens of prompts, {} times and with {top} alternatives, has {count} log-probabilities; \
             one answer may have {ECHO_LOGPROBS_MAX}. Please send fewer prompts at once.",
            common.best_of
        );
        return Err(ApiError::field("logprobs", message));
    }
    Ok(())
}

/// Approximate memory that the prompt takes in each answer to it, in bytes.
pub(super) fn bytes(common: &CommonParams, plan: &PromptPlan) -> usize {
    let top = common.logprobs.filter(|_| common.echo);
    let logprobs = top.map_or(0, |top| plan.tokens().len() * entry_bytes(top as usize));
    logprobs + plan.echo().map_or(0, |echo| echo.text.len())
}

/// Prompt at the beginning of an answer, if the request asks for it.
pub(crate) struct Echoed {
    plan: Arc<PromptPlan>,
    logprobs: Option<Arc<[TokenLogprobs]>>,
}

impl Echoed {
    pub(super) fn new(plan: Arc<PromptPlan>, logprobs: Option<Arc<[TokenLogprobs]>>) -> Self {
        Self { plan, logprobs }
    }

    pub(super) fn text(&self) -> &str {
        self.plan.echo().map_or("", |echo| &echo.text)
    }

    /// Number of tokens that the answer reports.
    pub(super) fn len(&self) -> usize {
        self.logprobs.as_ref().map_or(0, |_| self.plan.tokens().len())
    }

    pub(super) fn tokens(&self, range: Range<usize>) -> Vec<TokenEntry> {
        let (Some(logprobs), Some(echo)) = (&self.logprobs, self.plan.echo()) else { return Vec::new() };
        let entry = |at: usize| TokenEntry {
            id: self.plan.tokens()[at],
            logprobs: at.checked_sub(1).and_then(|before| logprobs.get(before)).cloned(),
            offset: echo.offsets.get(at).map_or(0, |&offset| offset as usize),
        };
        range.map(entry).collect()
    }

    /// The text with the first tokens, and then the others. Nothing if no prompt is echoed.
    pub(crate) fn pieces(self) -> impl Iterator<Item = (String, Vec<TokenEntry>)> {
        let count = if self.plan.echo().is_some() { self.len().max(1) } else { 0 };
        (0..count).step_by(ECHO_PIECE_TOKENS).map(move |start| {
            let text = if start == 0 { self.text().to_string() } else { String::new() };
            (text, self.tokens(start..(start + ECHO_PIECE_TOKENS).min(self.len())))
        })
    }
}
