//! From prompts to choices, and whole answers.
//!
//! What always holds: when [`begin`] returns, every choice has its first token, so a failure until then can still be an
//! HTTP status, and a failure after it is the answer's own.

use super::Arrival;
use super::errors::ApiError;
use super::types::{Common, Usage, finish_word};
use crate::metrics::Record;
use crate::models::{Found, ServedModel};
use crate::route::{Generation, Piece, Plan, Prompt, RouteError};
use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::future::{join_all, try_join_all};
use larder_model::SamplingParams;
use larder_worker::api::{FinishReason, Role};
use serde_json::json;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// Bytes of text from which on tokenising is moved off the event loop.
const TOKENISE_INLINE_BYTES_MAX: usize = 8 << 10;

/// Which endpoint's shape an answer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Completion,
    Chat,
}

impl Shape {
    fn id_prefix(self) -> &'static str {
        match self {
            Shape::Completion => "cmpl",
            Shape::Chat => "chatcmpl",
        }
    }

    /// The request's field that holds the prompt.
    pub(crate) fn prompt_field(self) -> &'static str {
        match self {
            Shape::Completion => "prompt",
            Shape::Chat => "messages",
        }
    }
}

/// The model that a request asks for. Waits a moment for a decode engine if there is none.
pub(crate) async fn find_model(arrival: &Arrival, name: &str) -> Result<Arc<ServedModel>, ApiError> {
    let shared = &arrival.shared;
    let model = match shared.models.find(name, &shared.engines) {
        Found::Model(model) => model,
        found => return Err(ApiError::not_found(&found, name)),
    };
    let is_served = || (shared.engines.admitted(Role::Decode, model.namespace) > 0).then_some(());
    let served = match is_served() {
        None => shared.wait_for(arrival.deadline, is_served).await,
        served => served,
    };
    served.map(|()| model.clone()).ok_or_else(|| RouteError::NoEngine(Role::Decode).into())
}

/// A place among the answers in progress. A request has one before its body is read, so that bodies are bounded, too.
pub(crate) fn admit(arrival: &Arrival) -> Result<OwnedSemaphorePermit, ApiError> {
    places(arrival, 1)
}

/// Extends `permit` to a place for each of `choices`.
pub(crate) fn admit_choices(
    arrival: &Arrival,
    permit: &mut OwnedSemaphorePermit,
    choices: usize,
) -> Result<(), ApiError> {
    let most = arrival.shared.options.max_inflight;
    if choices > most {
        // It would be too much at any time, so "try again later" would be wrong.
        return Err(ApiError::field("n", format!("{choices} answers are asked for, this server gives at most {most}")));
    }
    let more = choices.saturating_sub(permit.num_permits());
    permit.merge(places(arrival, u32::try_from(more).unwrap_or(u32::MAX))?);
    Ok(())
}

fn places(arrival: &Arrival, count: u32) -> Result<OwnedSemaphorePermit, ApiError> {
    arrival
        .shared
        .inflight
        .clone()
        .try_acquire_many_owned(count)
        .map_err(|_| ApiError::overloaded("this server is answering as many requests as it may; try again later", 1))
}

/// Tokenises with `tokenise` and computes page keys, off the event loop if `bytes` is large.
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
    tokio::task::spawn_blocking(make).await.map_err(|error| ApiError::internal(format!("tokenising: {error}")))?
}

/// A request that is ready to be sent to engines.
pub(crate) struct Job {
    pub(crate) arrival: Arrival,
    pub(crate) shape: Shape,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) common: Common,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) permit: OwnedSemaphorePermit,
}

/// What every part of an answer repeats.
#[derive(Debug, Clone)]
pub(crate) struct Heading {
    pub(crate) shape: Shape,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// One running choice.
pub(crate) struct Choice {
    pub(crate) index: u32,
    pub(crate) generation: Generation,
    plan: Arc<Plan>,
    sampling: SamplingParams,
    tried: Vec<String>,
}

/// A request whose choices all have their first token.
pub(crate) struct Begun {
    pub(crate) heading: Heading,
    pub(crate) choices: Vec<Choice>,
    pub(crate) tally: Tally,
    pub(crate) include_usage: bool,
    pub(crate) permit: OwnedSemaphorePermit,
    pub(crate) deadline: Instant,
}

/// Tokens that may be generated after `prompt_tokens`.
fn tokens_to_generate(shape: Shape, asked: Option<u32>, prompt_tokens: usize, context: usize) -> Result<u32, ApiError> {
    let room = context.saturating_sub(prompt_tokens);
    let requested = prompt_tokens + asked.unwrap_or(1) as usize;
    if requested > context {
        let message = format!(
            "This model's maximum context length is {context} tokens, but {requested} were requested: {prompt_tokens} in \
             the {field} and {more} for the answer. Please shorten one of them.",
            field = shape.prompt_field(),
            more = asked.unwrap_or(1),
        );
        return Err(ApiError::context_length(shape.prompt_field(), message));
    }
    let default = match shape {
        Shape::Completion => super::types::COMPLETION_TOKENS_DEFAULT,
        Shape::Chat => u32::MAX,
    };
    Ok(asked.unwrap_or(default).min(u32::try_from(room).unwrap_or(u32::MAX)))
}

/// Sends a job to engines and waits for the first tokens.
pub(crate) async fn begin(job: Job) -> Result<Begun, ApiError> {
    let Job { arrival, shape, model, common, prompts, permit } = job;
    let no_engine = || ApiError::from(RouteError::NoEngine(Role::Decode));
    let context = arrival.shared.engines.context_max(Role::Decode, model.namespace).ok_or_else(no_engine)?;
    let mut limits = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        if prompt.tokens.is_empty() {
            return Err(ApiError::field(shape.prompt_field(), "the prompt is empty"));
        }
        limits.push(tokens_to_generate(shape, common.max_tokens, prompt.tokens.len(), context)?);
    }
    let tokens_asked = common.max_tokens.map_or(0, |tokens| tokens as usize);
    let prompt_tokens = prompts.iter().map(|p| p.tokens.len() as u32).collect();
    let plans = join_all(prompts.into_iter().map(|prompt| {
        let (shared, id) = (arrival.shared.clone(), arrival.request_id.clone());
        Plan::make(shared, model.clone(), id, prompt, arrival.cache, arrival.deadline, tokens_asked)
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
    let heading = Heading {
        shape,
        id: format!("{}-{}", shape.id_prefix(), super::random_id()),
        created: crate::models::unix_seconds(),
        model: model.name.clone(),
    };
    let tally = Tally::new(prompt_tokens, common.n);
    let (include_usage, deadline) = (common.include_usage, arrival.deadline);
    Ok(Begun { heading, choices, tally, include_usage, permit, deadline })
}

impl Choice {
    async fn begin(index: u32, plan: Arc<Plan>, sampling: SamplingParams) -> Result<Choice, RouteError> {
        let mut tried = Vec::new();
        let generation = plan.generate(&sampling, &mut tried).await?;
        Ok(Choice { index, generation, plan, sampling, tried })
    }

    /// The whole text. Nothing was sent yet, so an engine that is lost on the way can be replaced.
    async fn finish(mut self) -> Result<Finished, RouteError> {
        loop {
            let lost = match self.collect().await {
                Err(error @ RouteError::BrokeOff(_)) => error,
                result => return result,
            };
            self.tried.push(self.generation.engine_name().to_string());
            self.generation = self.plan.generate(&self.sampling, &mut self.tried).await.map_err(|_| lost)?;
        }
    }

    async fn collect(&mut self) -> Result<Finished, RouteError> {
        let mut text = String::new();
        loop {
            match self.generation.next().await? {
                Piece::Text(more) => text.push_str(&more),
                Piece::End { finish_reason, completion_tokens } => {
                    let cached_tokens = self.generation.cached_tokens(true).await;
                    return Ok(Finished { index: self.index, text, finish_reason, completion_tokens, cached_tokens });
                }
            }
        }
    }
}

struct Finished {
    index: u32,
    text: String,
    finish_reason: FinishReason,
    completion_tokens: u32,
    cached_tokens: u32,
}

/// Sums up the tokens of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tally {
    prompt_tokens: Vec<u32>,
    /// For each prompt the least of its choices: a later one may have found what an earlier one had computed.
    cached_tokens: Vec<Option<u32>>,
    completion_tokens: u32,
    choices_each: u32,
}

impl Tally {
    fn new(prompt_tokens: Vec<u32>, choices_each: u32) -> Self {
        let cached_tokens = vec![None; prompt_tokens.len()];
        Self { prompt_tokens, cached_tokens, completion_tokens: 0, choices_each: choices_each.max(1) }
    }

    /// Adds a choice that ended.
    pub(crate) fn add(&mut self, index: u32, completion_tokens: u32, cached_tokens: u32) {
        self.completion_tokens = self.completion_tokens.saturating_add(completion_tokens);
        if let Some(least) = self.cached_tokens.get_mut((index / self.choices_each) as usize) {
            *least = Some(least.map_or(cached_tokens, |l| l.min(cached_tokens)));
        }
    }

    /// The sums.
    pub(crate) fn usage(&self) -> Usage {
        let sum = |numbers: &mut dyn Iterator<Item = u32>| numbers.fold(0, u32::saturating_add);
        let cached = sum(&mut self.cached_tokens.iter().flatten().copied());
        Usage::new(sum(&mut self.prompt_tokens.iter().copied()), self.completion_tokens, cached)
    }

    /// Counts them in the metrics.
    pub(crate) fn end(&self, record: Record) {
        let usage = self.usage();
        let cached = usage.prompt_tokens_details.cached_tokens;
        record.end_with_tokens(usage.prompt_tokens, usage.completion_tokens, cached);
    }
}

/// Waits for all choices and answers in one piece.
pub(crate) async fn whole(begun: Begun, record: &mut Option<Record>) -> Result<Response, ApiError> {
    let Begun { heading, choices, mut tally, permit, .. } = begun;
    let finished = try_join_all(choices.into_iter().map(Choice::finish)).await?;
    drop(permit);
    for choice in &finished {
        tally.add(choice.index, choice.completion_tokens, choice.cached_tokens);
    }
    let choices: Vec<_> = finished.into_iter().map(|choice| heading.choice(choice)).collect();
    let object = match heading.shape {
        Shape::Completion => "text_completion",
        Shape::Chat => "chat.completion",
    };
    if let Some(record) = record.take() {
        tally.end(record);
    }
    let answer = json!({
        "id": heading.id,
        "object": object,
        "created": heading.created,
        "model": heading.model,
        "choices": choices,
        "usage": tally.usage(),
    });
    Ok(Json(answer).into_response())
}

impl Heading {
    fn choice(&self, choice: Finished) -> serde_json::Value {
        let Finished { index, text, finish_reason, .. } = choice;
        let finish_reason = finish_word(finish_reason);
        match self.shape {
            Shape::Completion => {
                json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason})
            }
            Shape::Chat => json!({
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
    fn usage_counts_each_prompt_once_and_the_least_of_its_hits() {
        let mut tally = Tally::new(vec![10, 20], 2);
        for (index, cached) in [(0, 8), (1, 4), (2, 0), (3, 16)] {
            tally.add(index, 5, cached);
        }
        assert_eq!(tally.usage(), Usage::new(30, 20, 4));
    }

    #[test]
    fn what_does_not_fit_the_context_is_refused_with_its_code() {
        assert_eq!(tokens_to_generate(Shape::Chat, None, 40, 100).unwrap(), 60);
        assert_eq!(tokens_to_generate(Shape::Completion, None, 40, 100).unwrap(), 16);
        assert_eq!(tokens_to_generate(Shape::Completion, None, 95, 100).unwrap(), 5);
        assert_eq!(tokens_to_generate(Shape::Chat, Some(60), 40, 100).unwrap(), 60);
        for (asked, prompt) in [(Some(61), 40), (None, 100), (Some(u32::MAX), 1)] {
            let error = tokens_to_generate(Shape::Chat, asked, prompt, 100).unwrap_err();
            assert_eq!(error.body.code.as_deref(), Some("context_length_exceeded"));
        }
    }
}
