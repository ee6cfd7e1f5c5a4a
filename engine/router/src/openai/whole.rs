//! Answers in one piece.

use super::answer::{Endpoint, ResponseMeta, StartedAnswer};
use super::errors::ApiError;
use super::logprobs::{self, TokenEntry};
use super::responses_output;
use super::tools;
use super::types::finish_reason_name;
use super::usage::UsageTotals;
use crate::metrics::RequestRecord;
use crate::route::{CachedTokens, RouteError};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use larder_http::{PeerCharge, PeerShare};
use larder_worker::api::FinishReason;
use serde_json::json;

/// Maximum memory for the texts of answers that are not streamed, in bytes, without the first
/// [`ANSWER_CHARGE_BYTES`] of each request, and of each choice in progress. A text counts until the
/// client has read its answer. The JSON of an answer may take more than its texts, because some
/// characters are escaped.
pub(crate) const ANSWERS_BYTES_MAX: usize = 256 << 20;
/// Granularity of [`ANSWERS_BYTES_MAX`].
pub(crate) const ANSWER_CHARGE_BYTES: usize = 64 << 10;

/// Charge of a text that is collected or waits to be sent. Dropping it gives the charge back.
pub(crate) struct AnswerCharge(PeerCharge);

impl AnswerCharge {
    pub(crate) fn new(answers: &PeerShare) -> Self {
        Self(answers.charge())
    }

    pub(crate) fn share(&self) -> &PeerShare {
        self.0.share()
    }

    /// Adds the charge of a text that is now one of several, which have `bytes` bytes together.
    fn absorb(&self, other: Self, bytes: usize) -> Result<(), RouteError> {
        self.0.absorb(other.0);
        self.grow_to(bytes)
    }

    /// Returns `true` if the text is longer than [`ANSWER_CHARGE_BYTES`].
    fn is_large(&self) -> bool {
        self.0.units() > 0
    }

    /// Charges a text of `bytes` bytes beyond its first [`ANSWER_CHARGE_BYTES`].
    ///
    /// # Errors
    /// [`RouteError::AnswersFull`] if the texts of all answers exceed [`ANSWERS_BYTES_MAX`], or
    /// those of the peer its share.
    pub(crate) fn grow_to(&self, bytes: usize) -> Result<(), RouteError> {
        let units = bytes.saturating_sub(ANSWER_CHARGE_BYTES).div_ceil(ANSWER_CHARGE_BYTES);
        if units <= self.0.units() || self.0.raise_to(units) { Ok(()) } else { Err(RouteError::AnswersFull) }
    }
}

pub(crate) struct FinishedChoice {
    pub(crate) index: u32,
    pub(crate) text: String,
    /// Tokens of the answer, after those of the prompt if it is echoed. Empty without
    /// log-probabilities.
    pub(crate) tokens: Vec<TokenEntry>,
    /// Tokens of the prompt among them.
    pub(crate) echoed: usize,
    pub(crate) finish_reason: FinishReason,
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) cached_tokens: CachedTokens,
}

impl FinishedChoice {
    /// Average log-probability of the tokens of the answer.
    fn score(&self) -> f32 {
        let own = self.tokens.iter().skip(self.echoed);
        let logprobs: Vec<f32> = own.filter_map(|token| Some(token.logprobs.as_ref()?.logprob)).collect();
        logprobs.iter().sum::<f32>() / logprobs.len().max(1) as f32
    }
}

/// Finished choices of a request.
pub(crate) struct FinishedAnswer {
    pub(crate) choices: Vec<FinishedChoice>,
    bytes: usize,
    /// Kept until the response is sent: texts wait for slower choices, and then for the client.
    pub(crate) charge: AnswerCharge,
}

impl FinishedAnswer {
    pub(crate) fn new(answers: &PeerShare) -> Self {
        Self { choices: Vec::new(), bytes: 0, charge: AnswerCharge::new(answers) }
    }

    pub(crate) fn add(&mut self, choice: FinishedChoice, charge: AnswerCharge) -> Result<(), RouteError> {
        self.bytes += choice.text.len() + choice.tokens.iter().map(TokenEntry::bytes).sum::<usize>();
        self.choices.push(choice);
        self.charge.absorb(charge, self.bytes)
    }
}

/// Keeps the `n` most probable of each `best_of` choices, most probable first.
fn best(finished: Vec<FinishedChoice>, best_of: u32, n: u32) -> Vec<FinishedChoice> {
    let mut kept = Vec::new();
    let mut rest = finished.into_iter().peekable();
    while rest.peek().is_some() {
        let mut of_prompt: Vec<_> = rest.by_ref().take(best_of as usize).collect();
        // Stable: the earlier choice comes first among equals.
        of_prompt.sort_by(|a, b| b.score().total_cmp(&a.score()));
        kept.extend(of_prompt.into_iter().take(n as usize));
    }
    for (index, choice) in (0..).zip(&mut kept) {
        choice.index = index;
    }
    kept
}

pub(crate) async fn whole(started: StartedAnswer, record: &mut Option<RequestRecord>) -> Result<Response, ApiError> {
    let StartedAnswer { meta, prompts, answers, mut usage_totals, best_of, n, permit, .. } = started;
    let FinishedAnswer { mut choices, charge, .. } = prompts.finish(&answers).await?;
    // Early: sending the response needs no engine.
    drop(permit);
    for choice in &choices {
        usage_totals.add(choice.index, choice.completion_tokens, choice.cached_tokens);
    }
    if best_of > n {
        choices = best(choices, best_of, n);
    }
    let response = if charge.is_large() {
        // Megabytes of JSON would hold up all other requests of the event loop.
        let totals = usage_totals.clone();
        let written = crate::background::run(move || meta.response(choices, charge, &totals)).await;
        written.map_err(|error| ApiError::internal("write the answer", error))??
    } else {
        meta.response(choices, charge, &usage_totals)?
    };
    // The answer is complete here. A client that disconnects before it has read it counts as
    // served.
    if let Some(record) = record.take() {
        usage_totals.end(record);
    }
    Ok(response)
}

/// Body of a response, with the charge of its memory.
pub(crate) struct ChargedBody<C> {
    json: Vec<u8>,
    _charge: C,
}

impl<C> ChargedBody<C> {
    pub(crate) fn new(json: Vec<u8>, charge: C) -> Self {
        Self { json, _charge: charge }
    }
}

impl<C> AsRef<[u8]> for ChargedBody<C> {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// Response with a JSON body, whose charge ends with the body.
pub(crate) fn charged_body<C: Send + 'static>(json: Vec<u8>, charge: C) -> Response {
    // The body, and not this call, ends the charge: a slow client keeps the text in memory.
    let body = Bytes::from_owner(ChargedBody::new(json, charge));
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

/// Response of `answer`, whose charge ends with its body.
pub(crate) fn charged_json(answer: &serde_json::Value, charge: AnswerCharge) -> Result<Response, ApiError> {
    let json = serde_json::to_vec(answer).map_err(|error| ApiError::internal("write the answer", error))?;
    Ok(charged_body(json, charge))
}

impl ResponseMeta {
    /// Response with the texts of all choices. The charge ends with its body.
    fn response(
        &self,
        finished: Vec<FinishedChoice>,
        charge: AnswerCharge,
        usage_totals: &UsageTotals,
    ) -> Result<Response, ApiError> {
        if let (Some(_), Some(only)) = (&self.response, finished.first()) {
            let json = responses_output::whole(self, &only.text, only.finish_reason, &usage_totals.usage())?;
            return Ok(charged_body(json, charge));
        }
        let choices: Vec<_> = finished.into_iter().map(|choice| self.choice(choice)).collect();
        let object = match self.endpoint {
            Endpoint::Completion | Endpoint::Native => "text_completion",
            Endpoint::Chat => "chat.completion",
        };
        let answer = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": usage_totals.usage(),
            "sglext": usage_totals.sglext(),
        });
        charged_json(&answer, charge)
    }

    fn choice(&self, choice: FinishedChoice) -> serde_json::Value {
        let FinishedChoice { index, text, tokens, finish_reason, .. } = choice;
        let reason = finish_reason;
        let finish_reason = finish_reason_name(reason);
        let logprobs = self.has_logprobs.then(|| logprobs::json(self.endpoint, &self.tokenizer, &tokens));
        match self.endpoint {
            Endpoint::Completion | Endpoint::Native => {
                json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
            }
            Endpoint::Chat => {
                let (message, has_calls) = tools::message(self.tools, text);
                let has_ended = has_calls && reason == FinishReason::Stop;
                let finish_reason = if has_ended { tools::FINISH_REASON } else { finish_reason };
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason})
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_http::{PeerAddress, PeerBudget};
    use larder_worker::api::TokenLogprobs;
    use std::sync::Arc;

    fn finished_choice(index: u32, logprobs: &[f32]) -> FinishedChoice {
        let logprobs = logprobs.iter().map(|&logprob| TokenLogprobs { logprob, top: Vec::new() });
        FinishedChoice {
            index,
            text: format!("{index}"),
            tokens: logprobs.map(|logprobs| TokenEntry { id: 0, logprobs: Some(logprobs), offset: 0 }).collect(),
            echoed: 0,
            finish_reason: FinishReason::Length,
            prompt_tokens: 1,
            completion_tokens: 1,
            cached_tokens: CachedTokens::default(),
        }
    }

    #[test]
    fn best_choices_have_the_most_probable_tokens_on_average() {
        let scores: [&[f32]; 6] = [&[-3.0], &[-1.0, -1.5], &[-2.0], &[-0.5], &[-0.5], &[-9.0]];
        let finished = (0..).zip(scores).map(|(index, scores)| finished_choice(index, scores));
        let best = best(finished.collect(), 3, 2);
        let kept: Vec<_> = best.iter().map(|choice| (choice.index, choice.text.as_str())).collect();
        assert_eq!(kept, [(0, "1"), (1, "2"), (2, "3"), (3, "4")]);
        let echoed = |index, scores: &[f32]| FinishedChoice { echoed: 1, ..finished_choice(index, scores) };
        // The same prompt before each answer. A short answer would take its average.
        let kept = super::best(vec![echoed(0, &[0.0, -3.0]), echoed(1, &[0.0, -2.0, -2.0, -2.0, -2.0])], 2, 1);
        assert_eq!(kept[0].text, "1");
    }

    fn share(budget: &Arc<PeerBudget>, peer: u8) -> PeerShare {
        budget.of(PeerAddress::of([10, 0, 0, peer].into()))
    }

    #[test]
    fn texts_of_answers_are_bounded_together_and_by_peer() {
        let answers = PeerBudget::new(4);
        let first = AnswerCharge::new(&share(&answers, 1));
        let second = AnswerCharge::new(&share(&answers, 2));
        first.grow_to(ANSWER_CHARGE_BYTES).unwrap();
        assert_eq!(answers.free(), 4, "short answers are free");
        first.grow_to(4 * ANSWER_CHARGE_BYTES).unwrap();
        let of_peer = AnswerCharge::new(first.share()).grow_to(2 * ANSWER_CHARGE_BYTES);
        assert!(matches!(of_peer, Err(RouteError::AnswersFull)), "the rest is for others");
        second.grow_to(2 * ANSWER_CHARGE_BYTES).unwrap();
        assert!(matches!(second.grow_to(2 * ANSWER_CHARGE_BYTES + 1), Err(RouteError::AnswersFull)));
        drop(first);
        second.grow_to(2 * ANSWER_CHARGE_BYTES + 1).unwrap();
    }

    #[test]
    fn texts_count_until_the_response_is_dropped() {
        let budget = PeerBudget::new(8);
        let answers = share(&budget, 1);
        let mut answer = FinishedAnswer::new(&answers);
        for index in 0..2 {
            let text = "x".repeat(3 * ANSWER_CHARGE_BYTES);
            let charge = AnswerCharge::new(&answers);
            charge.grow_to(text.len()).unwrap();
            answer.add(FinishedChoice { text, ..finished_choice(index, &[]) }, charge).unwrap();
        }
        let meta = ResponseMeta::for_tests(Endpoint::Completion);
        let FinishedAnswer { choices, charge, .. } = answer;
        let response = meta.response(choices, charge, &UsageTotals::new(vec![1], 1)).unwrap();
        assert_eq!(budget.free(), 3, "six units wait for the client, and the first is free");
        drop(response);
        assert_eq!(budget.free(), 8);
    }

    #[test]
    fn short_texts_of_many_prompts_are_bounded_together() {
        let answers = share(&PeerBudget::new(3), 1);
        let mut answer = FinishedAnswer::new(&answers);
        let mut add = |index| {
            let choice = FinishedChoice { text: "x".repeat(ANSWER_CHARGE_BYTES / 4), ..finished_choice(index, &[]) };
            answer.add(choice, AnswerCharge::new(&answers))
        };
        assert!((0..16).all(|index| add(index).is_ok()));
        assert!(matches!(add(16), Err(RouteError::AnswersFull)));
    }
}
