//! The answer of an engine to one choice, as it arrives.
//!
//! Invariant: no event reaches the client that contradicts the request or the events before it.

use super::{CachedTokens, PromptPlan, RouteError};
use crate::calls::{CallError, EventStream};
use crate::engines::LoadGuard;
use larder_worker::api::{DecodeEvent, DecodeStart, FinishReason, TokenLogprobs};
use std::sync::Arc;

/// Maximum text of one token event, in bytes. The text that a stop string of 4 KiB held back comes
/// with one token, as do 256 tokens of incomplete characters.
const EVENT_TEXT_BYTES_MAX: usize = 16 << 10;
/// Maximum text of one answer, in bytes. An engine may claim any context, and so any length. It is
/// the router's own limit: an engine that exceeds it has kept to the interface.
pub(super) const ANSWER_TEXT_BYTES_MAX: usize = 16 << 20;
/// Upper bound of the average text per generated token, in bytes: twice the longest tokens in use,
/// which are runs of 128 blanks.
const TOKEN_BYTES_MAX: usize = 256;
/// Constant slack on top of [`TOKEN_BYTES_MAX`], in bytes, for text that a decoder held back and
/// releases at once.
const TEXT_BYTES_SPARE: usize = 4 << 10;

#[derive(Debug, Clone, PartialEq)]
pub enum Delta {
    /// A token with text, or with log-probabilities.
    Token {
        id: u32,
        text: String,
        logprobs: Option<TokenLogprobs>,
    },
    End {
        finish_reason: FinishReason,
        completion_tokens: u32,
    },
}

/// Remaining output that one generation may send. Bounds the router's memory against an engine that
/// never stops.
#[derive(Debug)]
pub(super) struct OutputLimits {
    tokens: usize,
    text_bytes: usize,
    /// Rest of [`ANSWER_TEXT_BYTES_MAX`].
    room: usize,
    /// Tokens received so far.
    received: usize,
}

impl OutputLimits {
    pub(super) fn new(max_tokens: usize) -> Self {
        let text_bytes = max_tokens.saturating_mul(TOKEN_BYTES_MAX).saturating_add(TEXT_BYTES_SPARE);
        Self { tokens: max_tokens, text_bytes, room: ANSWER_TEXT_BYTES_MAX, received: 0 }
    }

    /// Returns `true` if the request allows a further token with this text. If not, the engine has
    /// violated the interface.
    fn admits(&self, text: &str) -> bool {
        self.tokens > 0 && text.len() <= self.text_bytes.min(EVENT_TEXT_BYTES_MAX)
    }

    /// Returns `true` if the router has room for the text. If not, the answer fails with
    /// [`CallError::TooLong`], which does not count against the engine.
    fn has_room(&self, text: &str) -> bool {
        text.len() <= self.room
    }

    /// Counts one token, which the caller has seen admitted and with room for it.
    fn take(&mut self, text: &str) {
        debug_assert!(self.admits(text) && self.has_room(text));
        self.tokens -= 1;
        self.text_bytes -= text.len();
        self.room -= text.len();
        self.received += 1;
    }
}

/// Running generation that has received its first token. Dropping it cancels the generation.
pub struct Generation {
    pub(super) plan: Arc<PromptPlan>,
    pub(super) start: DecodeStart,
    /// Those of the prompt's tokens from the second one on, if the request asks for them.
    pub(crate) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) first: Option<DecodeEvent>,
    pub(super) events: EventStream,
    pub(super) load: LoadGuard,
    pub(super) limits: OutputLimits,
    /// Number of log-probabilities of best tokens that each token has. `None` for none at all.
    pub(super) top: Option<usize>,
}

impl Generation {
    /// Waits for the next token with text or log-probabilities, or for the end. Must not be called
    /// after [`Delta::End`].
    ///
    /// # Errors
    /// Any failure of the engine, the deadline of the request, or a limit of the router. No other
    /// engine takes over, because the client has part of the answer.
    pub async fn next(&mut self) -> Result<Delta, RouteError> {
        loop {
            let event = match self.first.take() {
                Some(event) => event,
                None => self.events.next().await.map_err(|error| self.fail(error))?,
            };
            self.check(&event).map_err(|error| self.fail(error))?;
            match event {
                DecodeEvent::Token { id, text, logprobs } => {
                    self.limits.take(&text);
                    // A token inside a character or a possible stop string has no text yet.
                    if !text.is_empty() || logprobs.is_some() {
                        return Ok(Delta::Token { id, text, logprobs });
                    }
                }
                DecodeEvent::End { finish_reason, completion_tokens } => {
                    return Ok(Delta::End { finish_reason, completion_tokens });
                }
                other => return Err(self.fail(unexpected(&self.load, &other))),
            }
        }
    }

    /// Checks the next event against the request and the events before it.
    ///
    /// # Errors
    /// A violation of the interface, or a text for which the router has no room.
    pub(super) fn check(&self, event: &DecodeEvent) -> Result<(), CallError> {
        let reason = match event {
            DecodeEvent::Token { text, .. } if !self.limits.admits(text) => {
                format!("it has more than the requested tokens (last event: {} bytes)", text.len())
            }
            DecodeEvent::Token { id, .. } if self.contradicts_its_files(*id) => {
                format!("its model has no token {id}")
            }
            DecodeEvent::Token { logprobs, .. } if !self.fits(logprobs.as_ref()) => {
                "a token has other log-probabilities than requested".into()
            }
            DecodeEvent::Token { text, .. } if !self.limits.has_room(text) => {
                return Err(CallError::TooLong { engine: self.engine_name().into() });
            }
            DecodeEvent::End { completion_tokens, .. } if *completion_tokens as usize != self.limits.received => {
                format!("it counts {completion_tokens} tokens after {} of them", self.limits.received)
            }
            DecodeEvent::End { finish_reason: FinishReason::Length, .. } if !self.is_at_limit() => {
                format!("it ends by its length after {} tokens", self.limits.received)
            }
            DecodeEvent::Start(_) | DecodeEvent::Prompt { .. } => return Err(unexpected(&self.load, event)),
            _ => return Ok(()),
        };
        Err(CallError::violation(self.engine_name(), reason))
    }

    /// Returns `true` if a token has the log-probabilities that the request asks for. Without such
    /// a request, it must have none.
    fn fits(&self, logprobs: Option<&TokenLogprobs>) -> bool {
        match (self.top, logprobs) {
            (None, None) => true,
            // Fewer only if the vocabulary has no more.
            (Some(top), Some(logprobs)) => logprobs.top.len() <= top,
            _ => false,
        }
    }

    /// Returns `true` if the vocabulary that this engine has sent lacks token `id`. Another
    /// engine's files prove nothing: either of the two may be wrong.
    fn contradicts_its_files(&self, id: u32) -> bool {
        let model = &self.plan.model;
        model.source == self.engine_name() && model.vocab_size.is_some_and(|vocab| id >= vocab)
    }

    /// Returns `true` if the answer has as many tokens as the request or the engine's context
    /// allows.
    fn is_at_limit(&self) -> bool {
        let context = self.load.engine().info.max_context as usize;
        self.limits.tokens == 0 || self.plan.prompt.tokens.len() + self.limits.received >= context
    }

    fn fail(&self, error: CallError) -> RouteError {
        if let Some(failures) = self.plan.router.failure_lines.record() {
            tracing::warn!(request = %self.plan.request_id, engine = %self.engine_name(), %error, failures, "decode failed after its first token");
        }
        // No retry, because the client has part of the answer. The circuit breaker still counts it.
        self.plan.router.note_failure(&error, self.load.engine());
        RouteError::new(error, true)
    }

    pub fn engine_name(&self) -> &str {
        &self.load.engine().name
    }

    pub async fn cached_tokens(&self, may_wait: bool) -> CachedTokens {
        self.plan.cached_tokens(&self.start, may_wait).await
    }
}

/// Name of an event in the engines' interface. Debug output would expose tokens of the answer and
/// Rust types.
fn event_name(event: &DecodeEvent) -> &'static str {
    match event {
        DecodeEvent::Start(_) => "start",
        DecodeEvent::Prompt { .. } => "prompt",
        DecodeEvent::Token { .. } => "token",
        DecodeEvent::End { .. } => "end",
        DecodeEvent::Error(_) => "error",
    }
}

pub(super) fn unexpected(load: &LoadGuard, event: &DecodeEvent) -> CallError {
    CallError::violation(&load.engine().name, format!("unexpected {} event", event_name(event)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_limits_bound_tokens_and_text() {
        let mut limits = OutputLimits::new(2);
        for text in ["", "a"] {
            assert!(limits.admits(text));
            limits.take(text);
        }
        assert!(!limits.admits(""));
        let mut limits = OutputLimits::new(2);
        let longest = "x".repeat(2 * TOKEN_BYTES_MAX + TEXT_BYTES_SPARE);
        assert!(limits.admits(&longest));
        limits.take(&longest);
        assert!(!limits.admits("x") && limits.admits(""));
        let mut limits = OutputLimits::new(usize::MAX);
        let longest = "x".repeat(EVENT_TEXT_BYTES_MAX);
        assert!(!limits.admits(&(longest.clone() + "x")));
        for _ in 0..ANSWER_TEXT_BYTES_MAX / EVENT_TEXT_BYTES_MAX {
            assert!(limits.admits(&longest) && limits.has_room(&longest));
            limits.take(&longest);
        }
        assert!(limits.admits("x"), "the engine keeps to the request");
        assert!(!limits.has_room("x") && limits.has_room(""));
    }
}
