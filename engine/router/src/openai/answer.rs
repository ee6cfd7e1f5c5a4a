//! Running the choices of a request, and answers in one piece.
//!
//! Invariant: when [`begin`] returns, every choice has its first token. A failure before that
//! becomes an HTTP status. A later failure is reported inside the answer.

use super::RequestContext;
use super::errors::ApiError;
use super::types::{CommonParams, PromptInput, Usage, finish_reason_name};
use crate::RouterState;
use crate::metrics::{RefusalReason, RequestRecord};
use crate::models::{ModelLookup, ServedModel};
use crate::route::{Delta, Generation, Prompt, PromptPlan, RouteError};
use crate::templates::TextCharge;
use crate::tokenise::{EncodeError, encode, text_bytes_max};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use larder_http::BodyCharge;
use larder_model::SamplingParams;
use larder_worker::api::{FinishReason, Role};
use serde_json::json;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Maximum memory for the prompts of answers in progress, in bytes.
pub(crate) const PROMPTS_BYTES_MAX: usize = 512 << 20;
/// Granularity of [`PROMPTS_BYTES_MAX`].
pub(crate) const PROMPT_CHARGE_BYTES: usize = 1 << 10;
/// Memory of a token of a prompt: itself, its part of a page key, and the prefill request.
const PROMPT_TOKEN_BYTES: usize = 16;
/// Memory of a token in the request of one choice, as a number and as JSON.
const CHOICE_TOKEN_BYTES: usize = 10;

/// Maximum memory for the texts of answers that are not streamed, in bytes, without the first
/// [`ANSWER_CHARGE_BYTES`] of each. A text counts until the client has read its answer. The JSON of
/// an answer may take more than its texts, because some characters are escaped.
pub(crate) const ANSWERS_BYTES_MAX: usize = 256 << 20;
/// Granularity of [`ANSWERS_BYTES_MAX`].
pub(crate) const ANSWER_CHARGE_BYTES: usize = 64 << 10;

/// Endpoint of a request, which decides the form of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Completion,
    Chat,
}

impl Endpoint {
    fn id_prefix(self) -> &'static str {
        match self {
            Endpoint::Completion => "cmpl",
            Endpoint::Chat => "chatcmpl",
        }
    }

    pub(crate) fn prompt_field(self) -> &'static str {
        match self {
            Endpoint::Completion => "prompt",
            Endpoint::Chat => "messages",
        }
    }
}

/// Finds the requested model. Waits up to a second for a decode engine if the model has none.
pub(crate) async fn find_model(request: &RequestContext, name: &str) -> Result<Arc<ServedModel>, ApiError> {
    let router = &request.router;
    let model = match router.models.find(name, &router.engines) {
        ModelLookup::Model(model) => model,
        lookup => return Err(ApiError::model_error(&lookup, name)),
    };
    // A model without decode engines may be restarting them. Waiting is better than a 503.
    let is_served = || (router.engines.admitted(Role::Decode, model.namespace) > 0).then_some(());
    let served = match is_served() {
        None => router.wait_for(request.deadline, is_served).await,
        served => served,
    };
    served.map(|()| model.clone()).ok_or_else(|| RouteError::NoEngine(Role::Decode).into())
}

/// Admits a request as `choices` answers in progress. Fails with 400 if that exceeds the limit, and
/// with 429 if too few are free. Never waits: a queue in front of full engines would only add
/// latency.
pub(crate) fn admit(request: &RequestContext, choices: usize) -> Result<OwnedSemaphorePermit, ApiError> {
    let most = request.router.options.max_inflight;
    if choices > most {
        // A 429 would invite retries, and none of them could succeed.
        let message = format!("the request needs {choices} answers; this server runs at most {most} at once");
        return Err(ApiError::field("n", message));
    }
    let count = u32::try_from(choices).unwrap_or(u32::MAX);
    let permits = request.router.inflight.clone().try_acquire_many_owned(count);
    permits.map_err(|_| ApiError::overloaded("this server is at its limit of answers in progress; try again later", 1))
}

/// Longest context of the model's decode engines, in tokens. Engines that the circuit breaker
/// excludes count: a breaker that opens must not change the limit that clients see.
pub(crate) fn context(request: &RequestContext, model: &ServedModel) -> Result<usize, ApiError> {
    let context = request.router.engines.context_max(Role::Decode, model.namespace);
    context.ok_or_else(|| RouteError::NoEngine(Role::Decode).into())
}

/// 413 for a text of more than `bytes_max` bytes, the maximum for a context of `context` tokens.
pub(crate) fn too_many_bytes(
    router: &RouterState,
    field: &str,
    context: usize,
    bytes_max: usize,
    bytes: usize,
) -> ApiError {
    router.metrics.count_refusal(RefusalReason::PromptTooLong);
    let message = format!(
        "This model's maximum context length is {context} tokens, and this server accepts at most {bytes_max} bytes \
         of text for it. The {field} has {bytes} bytes. Please shorten it."
    );
    ApiError::prompt_too_large(field, message)
}

/// Tokenises the inputs and computes page keys. Refuses inputs that cannot fit `context` before
/// that. The memory of the body and of a rendered text counts as free afterwards.
pub(crate) async fn prompts(
    request: &mut RequestContext,
    endpoint: Endpoint,
    model: &Arc<ServedModel>,
    inputs: Vec<PromptInput>,
    context: usize,
) -> Result<Vec<Prompt>, ApiError> {
    let router = request.router.clone();
    let field = endpoint.prompt_field();
    let bytes_max = text_bytes_max(&model.tokenizer, context);
    for input in &inputs {
        match input {
            PromptInput::Text(text) if text.len() > bytes_max => {
                return Err(too_many_bytes(&router, field, context, bytes_max, text.len()));
            }
            PromptInput::Text(_) => {}
            PromptInput::Tokens(tokens) => drop(tokens_to_generate(endpoint, None, tokens.len(), context)?),
        }
    }
    let bytes = inputs.iter().map(PromptInput::bytes).sum();
    // A rendered chat has its special tokens already. Adding them would double the one at the
    // start.
    let add_special = endpoint == Endpoint::Completion;
    let model = model.clone();
    let make = move || -> Result<Vec<Prompt>, ApiError> {
        let tokenise = |input| match input {
            PromptInput::Tokens(tokens) => Ok(tokens),
            PromptInput::Text(text) => encode(&model.tokenizer, &text, add_special, context),
        };
        let prompt = |input| tokenise(input).map(|tokens| Prompt::new(tokens, model.page_tokens));
        let prompts: Result<_, EncodeError> = inputs.into_iter().map(prompt).collect();
        prompts.map_err(|error| match error {
            EncodeError::Tokenizer(error) => ApiError::field(field, error.to_string()),
            EncodeError::TooLong(tokens) => context_exceeded(endpoint, None, tokens, context),
        })
    };
    let made = tokio::time::timeout_at(request.deadline, router.tokeniser.run(bytes, make));
    let made = made.await.map_err(|_| ApiError::from(RouteError::Deadline))?;
    let prompts = made.map_err(|error| ApiError::internal("tokenise the prompt", error))?;
    request.body = BodyCharge::default();
    request.text = TextCharge::default();
    prompts
}

pub(crate) struct AnswerJob {
    pub(crate) request: RequestContext,
    pub(crate) endpoint: Endpoint,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) common: CommonParams,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) permit: OwnedSemaphorePermit,
}

#[derive(Debug, Clone)]
pub(crate) struct ResponseMeta {
    pub(crate) endpoint: Endpoint,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// Choice in progress, with everything needed to repeat it on another engine.
pub(crate) struct Choice {
    pub(crate) index: u32,
    pub(crate) generation: Generation,
    plan: Arc<PromptPlan>,
    /// Charge for the prompt, which all its choices share.
    _charge: Arc<OwnedSemaphorePermit>,
    sampling: SamplingParams,
    tried: Vec<String>,
}

/// Request whose choices all have their first token. Errors before this point still get their own
/// HTTP status.
pub(crate) struct StartedAnswer {
    pub(crate) meta: ResponseMeta,
    pub(crate) choices: Vec<Choice>,
    pub(crate) usage_totals: UsageTotals,
    pub(crate) include_usage: bool,
    pub(crate) permit: OwnedSemaphorePermit,
    pub(crate) deadline: Instant,
}

/// Maximum tokens to generate after `prompt_tokens` tokens. Fails if prompt and requested answer
/// exceed the context.
fn tokens_to_generate(
    endpoint: Endpoint,
    max_tokens: Option<u32>,
    prompt_tokens: usize,
    context: usize,
) -> Result<u32, ApiError> {
    let requested = prompt_tokens + max_tokens.unwrap_or(1) as usize;
    if requested > context {
        return Err(context_exceeded(endpoint, max_tokens, prompt_tokens, context));
    }
    let default = match endpoint {
        Endpoint::Completion => super::types::COMPLETION_TOKENS_DEFAULT,
        Endpoint::Chat => u32::MAX,
    };
    // Cannot underflow: `requested`, at most `context`, is more than `prompt_tokens`.
    let room = context - prompt_tokens;
    Ok(max_tokens.unwrap_or(default).min(u32::try_from(room).unwrap_or(u32::MAX)))
}

fn context_exceeded(endpoint: Endpoint, max_tokens: Option<u32>, prompt_tokens: usize, context: usize) -> ApiError {
    let field = endpoint.prompt_field();
    let more = max_tokens.unwrap_or(1);
    let requested = prompt_tokens.saturating_add(more as usize);
    let message = format!(
        "This model's maximum context length is {context} tokens, but {requested} were requested: {prompt_tokens} in \
         the {field} and {more} for the answer. Please shorten one of them."
    );
    ApiError::context_length(field, message)
}

/// Charges of prompts of these lengths, in units of [`PROMPT_CHARGE_BYTES`]: for their tokens and
/// keys, and for the requests of `choices` choices each to engines.
///
/// # Errors
/// 400 if several prompts exceed [`PROMPTS_BYTES_MAX`] by themselves. A single one may.
fn charges(endpoint: Endpoint, lengths: &[usize], choices: u32) -> Result<Vec<u32>, ApiError> {
    let token_bytes = PROMPT_TOKEN_BYTES + CHOICE_TOKEN_BYTES * choices as usize;
    let units = |tokens: &usize| (tokens * token_bytes).min(PROMPTS_BYTES_MAX).div_ceil(PROMPT_CHARGE_BYTES) as u32;
    let charges: Vec<u32> = lengths.iter().map(units).collect();
    if charges.iter().map(|&units| units as usize).sum::<usize>() > PROMPTS_BYTES_MAX / PROMPT_CHARGE_BYTES {
        // A 429 would invite retries, and none of them could succeed.
        let message = format!(
            "the prompts have {} tokens in total, with {choices} answers each; this server has no room for as many in \
             one request. Please send fewer prompts at once.",
            lengths.iter().sum::<usize>()
        );
        return Err(ApiError::field(endpoint.prompt_field(), message));
    }
    Ok(charges)
}

/// Takes the charge of a prompt.
///
/// # Errors
/// 429 if the prompts of all answers in progress exceed [`PROMPTS_BYTES_MAX`].
fn charge(router: &RouterState, units: u32) -> Result<OwnedSemaphorePermit, ApiError> {
    router.prompts.clone().try_acquire_many_owned(units).map_err(|_| {
        router.metrics.count_refusal(RefusalReason::PromptsBusy);
        ApiError::overloaded("this server is at its limit of prompt tokens in progress; try again later", 1)
    })
}

/// Sends all choices to engines and waits for their first tokens. The first failure cancels the
/// other choices.
pub(crate) async fn begin(job: AnswerJob) -> Result<StartedAnswer, ApiError> {
    let AnswerJob { request, endpoint, model, common, prompts, permit } = job;
    let context = context(&request, &model)?;
    let mut limits = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        if prompt.tokens.is_empty() {
            return Err(ApiError::field(endpoint.prompt_field(), "the prompt is empty"));
        }
        limits.push(tokens_to_generate(endpoint, common.max_tokens, prompt.tokens.len(), context)?);
    }
    let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.tokens.len()).collect();
    let charges = charges(endpoint, &lengths, common.n)?.into_iter().map(|units| charge(&request.router, units));
    let charges = charges.collect::<Result<Vec<_>, _>>()?;
    let tokens_requested = common.max_tokens.map_or(0, |tokens| tokens as usize);
    let prompt_tokens = prompts.iter().map(|p| p.tokens.len() as u32).collect();
    // Concurrently: each plan may wait for the lookup timeout.
    let plans = join_all(prompts.into_iter().zip(charges).map(|(prompt, charge)| {
        let router = request.router.clone();
        let id = request.request_id.clone();
        let make =
            PromptPlan::make(router, model.clone(), id, prompt, request.cache, request.deadline, tokens_requested);
        async move { (make.await, charge) }
    }))
    .await;
    let mut starts = Vec::with_capacity(plans.len() * common.n as usize);
    for (at, ((plan, charge), &limit)) in plans.into_iter().zip(&limits).enumerate() {
        let charge = Arc::new(charge);
        for choice in 0..common.n {
            let index = at as u32 * common.n + choice;
            starts.push(Choice::begin(index, plan.clone(), charge.clone(), common.sampling_of(choice, limit)));
        }
    }
    let choices = try_join_all(starts).await?;
    let meta = ResponseMeta {
        endpoint,
        id: format!("{}-{}", endpoint.id_prefix(), super::random_id()),
        created: crate::models::unix_seconds(),
        model: model.name.clone(),
    };
    let usage_totals = UsageTotals::new(prompt_tokens, common.n);
    let include_usage = common.include_usage;
    Ok(StartedAnswer { meta, choices, usage_totals, include_usage, permit, deadline: request.deadline })
}

impl Choice {
    async fn begin(
        index: u32,
        plan: Arc<PromptPlan>,
        charge: Arc<OwnedSemaphorePermit>,
        sampling: SamplingParams,
    ) -> Result<Choice, RouteError> {
        let mut tried = Vec::new();
        let generation = plan.generate(&sampling, &mut tried).await?;
        Ok(Choice { index, generation, plan, _charge: charge, sampling, tried })
    }

    /// Collects the whole text. The client has received nothing yet, so the choice starts over on
    /// another engine if its engine is lost.
    async fn finish(mut self) -> Result<FinishedChoice, RouteError> {
        loop {
            let lost = match self.collect().await {
                Err(error @ RouteError::Interrupted(_)) => error,
                result => return result,
            };
            // Text of the lost engine is dropped: with random sampling, another engine would not
            // continue it.
            self.tried.push(self.generation.engine_name().to_string());
            self.generation = self.plan.generate(&self.sampling, &mut self.tried).await.map_err(|_| lost)?;
        }
    }

    async fn collect(&mut self) -> Result<FinishedChoice, RouteError> {
        let mut text = String::new();
        let mut charge = AnswerCharge::new(self.plan.answers());
        loop {
            match self.generation.next().await? {
                Delta::Text(more) => {
                    text.push_str(&more);
                    charge.grow_to(text.len())?;
                }
                Delta::End { finish_reason, completion_tokens } => {
                    let cached_tokens = self.generation.cached_tokens(true).await;
                    return Ok(FinishedChoice {
                        index: self.index,
                        text,
                        charge,
                        finish_reason,
                        completion_tokens,
                        cached_tokens,
                    });
                }
            }
        }
    }
}

/// Charge of a text that is collected or waits to be sent. Dropping it gives the charge back.
struct AnswerCharge {
    answers: Arc<Semaphore>,
    permits: Vec<OwnedSemaphorePermit>,
}

impl AnswerCharge {
    fn new(answers: Arc<Semaphore>) -> Self {
        Self { answers, permits: Vec::new() }
    }

    /// Charges a text of `bytes` bytes beyond its first [`ANSWER_CHARGE_BYTES`].
    ///
    /// # Errors
    /// [`RouteError::AnswersFull`] if the texts of all answers exceed [`ANSWERS_BYTES_MAX`].
    fn grow_to(&mut self, bytes: usize) -> Result<(), RouteError> {
        while bytes > (self.permits.len() + 1) * ANSWER_CHARGE_BYTES {
            let permit = self.answers.clone().try_acquire_owned();
            self.permits.push(permit.map_err(|_| RouteError::AnswersFull)?);
        }
        Ok(())
    }
}

struct FinishedChoice {
    index: u32,
    text: String,
    /// Kept until the response is sent: the text waits for slower choices, and then for the client.
    charge: AnswerCharge,
    finish_reason: FinishReason,
    completion_tokens: u32,
    cached_tokens: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UsageTotals {
    prompt_tokens: Vec<u32>,
    /// Per prompt, the minimum over its choices. A later choice may find pages cached that an
    /// earlier one computed.
    cached_tokens: Vec<Option<u32>>,
    completion_tokens: u32,
    choices_each: u32,
}

impl UsageTotals {
    fn new(prompt_tokens: Vec<u32>, choices_each: u32) -> Self {
        let cached_tokens = vec![None; prompt_tokens.len()];
        Self { prompt_tokens, cached_tokens, completion_tokens: 0, choices_each: choices_each.max(1) }
    }

    pub(crate) fn add(&mut self, index: u32, completion_tokens: u32, cached_tokens: u32) {
        self.completion_tokens = self.completion_tokens.saturating_add(completion_tokens);
        if let Some(least) = self.cached_tokens.get_mut((index / self.choices_each) as usize) {
            *least = Some(least.map_or(cached_tokens, |l| l.min(cached_tokens)));
        }
    }

    /// Sums for the field `usage`. Saturates: the numbers come from engines.
    pub(crate) fn usage(&self) -> Usage {
        let sum = |numbers: &mut dyn Iterator<Item = u32>| numbers.fold(0, u32::saturating_add);
        let cached = sum(&mut self.cached_tokens.iter().flatten().copied());
        Usage::new(sum(&mut self.prompt_tokens.iter().copied()), self.completion_tokens, cached)
    }

    pub(crate) fn end(&self, record: RequestRecord) {
        let usage = self.usage();
        let cached = usage.prompt_tokens_details.cached_tokens;
        record.end_with_tokens(usage.prompt_tokens, usage.completion_tokens, cached);
    }
}

pub(crate) async fn whole(started: StartedAnswer, record: &mut Option<RequestRecord>) -> Result<Response, ApiError> {
    let StartedAnswer { meta, choices, mut usage_totals, permit, .. } = started;
    let finished = try_join_all(choices.into_iter().map(Choice::finish)).await?;
    // Early: sending the response needs no engine.
    drop(permit);
    for choice in &finished {
        usage_totals.add(choice.index, choice.completion_tokens, choice.cached_tokens);
    }
    let response = meta.response(finished, &usage_totals.usage())?;
    // The answer is complete here. A client that disconnects before it has read it counts as
    // served.
    if let Some(record) = record.take() {
        usage_totals.end(record);
    }
    Ok(response)
}

/// Body of a response, with the charges of its texts.
struct ChargedBody {
    json: Vec<u8>,
    _charges: Vec<AnswerCharge>,
}

impl AsRef<[u8]> for ChargedBody {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

impl ResponseMeta {
    /// Response with the texts of all choices. The charges end with its body.
    fn response(&self, finished: Vec<FinishedChoice>, usage: &Usage) -> Result<Response, ApiError> {
        let (choices, charges): (Vec<_>, _) = finished.into_iter().map(|choice| self.choice(choice)).unzip();
        let object = match self.endpoint {
            Endpoint::Completion => "text_completion",
            Endpoint::Chat => "chat.completion",
        };
        let answer = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        });
        let json = serde_json::to_vec(&answer).map_err(|error| ApiError::internal("write the answer", error))?;
        // The body, and not this call, ends the charges: a slow client keeps the text in memory.
        let body = Bytes::from_owner(ChargedBody { json, _charges: charges });
        Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
    }

    fn choice(&self, choice: FinishedChoice) -> (serde_json::Value, AnswerCharge) {
        let FinishedChoice { index, text, charge, finish_reason, .. } = choice;
        let finish_reason = finish_reason_name(finish_reason);
        let json = match self.endpoint {
            Endpoint::Completion => {
                json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason})
            }
            Endpoint::Chat => json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null,
                "finish_reason": finish_reason,
            }),
        };
        (json, charge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_answers_are_bounded_together() {
        let answers = Arc::new(Semaphore::new(3));
        let mut first = AnswerCharge::new(answers.clone());
        let mut second = AnswerCharge::new(answers.clone());
        first.grow_to(ANSWER_CHARGE_BYTES).unwrap();
        assert_eq!(answers.available_permits(), 3, "short answers are free");
        first.grow_to(3 * ANSWER_CHARGE_BYTES).unwrap();
        second.grow_to(2 * ANSWER_CHARGE_BYTES).unwrap();
        assert!(matches!(second.grow_to(2 * ANSWER_CHARGE_BYTES + 1), Err(RouteError::AnswersFull)));
        drop(first);
        second.grow_to(2 * ANSWER_CHARGE_BYTES + 1).unwrap();
    }

    #[test]
    fn texts_count_until_the_response_is_dropped() {
        let answers = Arc::new(Semaphore::new(8));
        let finished = |index| {
            let text = "x".repeat(3 * ANSWER_CHARGE_BYTES);
            let mut charge = AnswerCharge::new(answers.clone());
            charge.grow_to(text.len()).unwrap();
            let finish_reason = FinishReason::Length;
            FinishedChoice { index, text, charge, finish_reason, completion_tokens: 1, cached_tokens: 0 }
        };
        let meta = ResponseMeta { endpoint: Endpoint::Completion, id: "cmpl-1".into(), created: 0, model: "m".into() };
        let response = meta.response(vec![finished(0), finished(1)], &Usage::new(1, 2, 0)).unwrap();
        assert_eq!(answers.available_permits(), 4, "two texts of three units wait for the client");
        drop(response);
        assert_eq!(answers.available_permits(), 8);
    }

    #[test]
    fn prompts_that_can_never_fit_together_are_the_clients_error() {
        let single = PROMPTS_BYTES_MAX / (PROMPT_TOKEN_BYTES + CHOICE_TOKEN_BYTES);
        let refused = |lengths: &[usize]| charges(Endpoint::Completion, lengths, 1).is_err();
        assert!(!refused(&[single]) && !refused(&[2 * single]), "a single prompt is as long as the context allows");
        assert!(!refused(&[single / 2, single / 2]));
        let error = charges(Endpoint::Completion, &[single, single / 2], 1).unwrap_err();
        assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some("prompt")));
    }

    #[test]
    fn usage_counts_each_prompt_once_with_its_smallest_hit() {
        let mut usage_totals = UsageTotals::new(vec![10, 20], 2);
        for (index, cached) in [(0, 8), (1, 4), (2, 0), (3, 16)] {
            usage_totals.add(index, 5, cached);
        }
        assert_eq!(usage_totals.usage(), Usage::new(30, 20, 4));
    }

    #[test]
    fn tokens_to_generate_refuses_requests_beyond_the_context() {
        assert_eq!(tokens_to_generate(Endpoint::Chat, None, 40, 100).unwrap(), 60);
        assert_eq!(tokens_to_generate(Endpoint::Completion, None, 40, 100).unwrap(), 16);
        assert_eq!(tokens_to_generate(Endpoint::Completion, None, 95, 100).unwrap(), 5);
        assert_eq!(tokens_to_generate(Endpoint::Chat, Some(60), 40, 100).unwrap(), 60);
        for (max_tokens, prompt) in [(Some(61), 40), (None, 100), (Some(u32::MAX), 1)] {
            let error = tokens_to_generate(Endpoint::Chat, max_tokens, prompt, 100).unwrap_err();
            assert_eq!(error.body.code.as_deref(), Some("context_length_exceeded"));
        }
    }
}
