//! Running the choices of a request, and answers in one piece.
//!
//! Invariant: when [`begin`] returns, every choice has its first token. A failure before that
//! becomes an HTTP status. A later failure is reported inside the answer.

use super::RequestContext;
use super::errors::ApiError;
use super::types::{CommonParams, Usage, finish_reason_name};
use crate::metrics::RequestRecord;
use crate::models::{ModelLookup, ServedModel};
use crate::route::{Delta, Generation, Prompt, PromptPlan, RouteError};
use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::future::{join_all, try_join_all};
use larder_model::SamplingParams;
use larder_worker::api::{FinishReason, Role};
use serde_json::json;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// Largest text tokenised on the event loop, in bytes. Longer texts go to a blocking thread.
const TOKENISE_INLINE_BYTES_MAX: usize = 8 << 10;

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

/// Admits a request as one answer in progress, or fails with 429. Never waits: a queue in front of
/// full engines would only add latency.
pub(crate) fn admit(request: &RequestContext) -> Result<OwnedSemaphorePermit, ApiError> {
    acquire_permits(request, 1)
}

/// Extends `permit` to one permit per choice. Fails with 400 if `choices` exceeds the limit, with
/// 429 if too few are free.
pub(crate) fn admit_choices(
    request: &RequestContext,
    permit: &mut OwnedSemaphorePermit,
    choices: usize,
) -> Result<(), ApiError> {
    let most = request.router.options.max_inflight;
    if choices > most {
        // A 429 would invite retries, and none of them could succeed.
        let message = format!("the request needs {choices} answers; this server runs at most {most} at once");
        return Err(ApiError::field("n", message));
    }
    assert!(choices >= permit.num_permits(), "parsing admits at least one prompt and one choice");
    let more = choices - permit.num_permits();
    permit.merge(acquire_permits(request, u32::try_from(more).unwrap_or(u32::MAX))?);
    Ok(())
}

fn acquire_permits(request: &RequestContext, count: u32) -> Result<OwnedSemaphorePermit, ApiError> {
    request
        .router
        .inflight
        .clone()
        .try_acquire_many_owned(count)
        .map_err(|_| ApiError::overloaded("this server is at its limit of answers in progress; try again later", 1))
}

/// Tokenises with `tokenise` and computes page keys. Both take time in proportion to `bytes`, so
/// large inputs go to a blocking thread.
pub(crate) async fn prompts<T>(model: &Arc<ServedModel>, bytes: usize, tokenise: T) -> Result<Vec<Prompt>, ApiError>
where
    T: FnOnce(&ServedModel) -> Result<Vec<Vec<u32>>, ApiError> + Send + 'static,
{
    let model = model.clone();
    let make = move || -> Result<Vec<Prompt>, ApiError> {
        let lists = tokenise(&model)?;
        Ok(lists.into_iter().map(|tokens| Prompt::new(tokens, model.page_tokens)).collect())
    };
    if bytes <= TOKENISE_INLINE_BYTES_MAX {
        return make();
    }
    tokio::task::spawn_blocking(make).await.map_err(|error| ApiError::internal("tokenise the prompt", error))?
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
        let message = format!(
            "This model's maximum context length is {context} tokens, but {requested} were requested: {prompt_tokens} in \
             the {field} and {more} for the answer. Please shorten one of them.",
            field = endpoint.prompt_field(),
            more = max_tokens.unwrap_or(1),
        );
        return Err(ApiError::context_length(endpoint.prompt_field(), message));
    }
    let default = match endpoint {
        Endpoint::Completion => super::types::COMPLETION_TOKENS_DEFAULT,
        Endpoint::Chat => u32::MAX,
    };
    // Cannot underflow: `requested`, at most `context`, is more than `prompt_tokens`.
    let room = context - prompt_tokens;
    Ok(max_tokens.unwrap_or(default).min(u32::try_from(room).unwrap_or(u32::MAX)))
}

/// Sends all choices to engines and waits for their first tokens. The first failure cancels the
/// other choices.
pub(crate) async fn begin(job: AnswerJob) -> Result<StartedAnswer, ApiError> {
    let AnswerJob { request, endpoint, model, common, prompts, permit } = job;
    let no_engine = || ApiError::from(RouteError::NoEngine(Role::Decode));
    // Excluded engines count: a breaker that opens must not change the limit that clients see.
    let context = request.router.engines.context_max(Role::Decode, model.namespace).ok_or_else(no_engine)?;
    let mut limits = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        if prompt.tokens.is_empty() {
            return Err(ApiError::field(endpoint.prompt_field(), "the prompt is empty"));
        }
        limits.push(tokens_to_generate(endpoint, common.max_tokens, prompt.tokens.len(), context)?);
    }
    let tokens_requested = common.max_tokens.map_or(0, |tokens| tokens as usize);
    let prompt_tokens = prompts.iter().map(|p| p.tokens.len() as u32).collect();
    // Concurrently: each plan may wait for the lookup timeout.
    let plans = join_all(prompts.into_iter().map(|prompt| {
        let router = request.router.clone();
        let id = request.request_id.clone();
        PromptPlan::make(router, model.clone(), id, prompt, request.cache, request.deadline, tokens_requested)
    }))
    .await;
    let mut starts = Vec::with_capacity(plans.len() * common.n as usize);
    for (at, (plan, &limit)) in plans.iter().zip(&limits).enumerate() {
        for choice in 0..common.n {
            let index = at as u32 * common.n + choice;
            starts.push(Choice::begin(index, plan.clone(), common.sampling_of(choice, limit)));
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
    async fn begin(index: u32, plan: Arc<PromptPlan>, sampling: SamplingParams) -> Result<Choice, RouteError> {
        let mut tried = Vec::new();
        let generation = plan.generate(&sampling, &mut tried).await?;
        Ok(Choice { index, generation, plan, sampling, tried })
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
        loop {
            match self.generation.next().await? {
                Delta::Text(more) => text.push_str(&more),
                Delta::End { finish_reason, completion_tokens } => {
                    let cached_tokens = self.generation.cached_tokens(true).await;
                    return Ok(FinishedChoice {
                        index: self.index,
                        text,
                        finish_reason,
                        completion_tokens,
                        cached_tokens,
                    });
                }
            }
        }
    }
}

struct FinishedChoice {
    index: u32,
    text: String,
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
    let choices: Vec<_> = finished.into_iter().map(|choice| meta.choice(choice)).collect();
    let object = match meta.endpoint {
        Endpoint::Completion => "text_completion",
        Endpoint::Chat => "chat.completion",
    };
    // The answer is complete here. A client that disconnects before it has read it counts as
    // served.
    if let Some(record) = record.take() {
        usage_totals.end(record);
    }
    let answer = json!({
        "id": meta.id,
        "object": object,
        "created": meta.created,
        "model": meta.model,
        "choices": choices,
        "usage": usage_totals.usage(),
    });
    Ok(Json(answer).into_response())
}

impl ResponseMeta {
    fn choice(&self, choice: FinishedChoice) -> serde_json::Value {
        let FinishedChoice { index, text, finish_reason, .. } = choice;
        let finish_reason = finish_reason_name(finish_reason);
        match self.endpoint {
            Endpoint::Completion => {
                json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason})
            }
            Endpoint::Chat => json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null,
                "finish_reason": finish_reason,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
