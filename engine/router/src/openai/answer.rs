//! Running the choices of a request.
//!
//! Invariants:
//!
//! - When [`begin`] returns, every choice that had a place has its first token. A failure before
//!   that becomes an HTTP status. A later failure is reported inside the answer.
//! - The choices of a request in progress never exceed its places. A prompt without places starts
//!   when an earlier one has ended.

use super::RequestContext;
use super::constraint;
use super::echo::{self, Echoed};
use super::errors::ApiError;
use super::logprobs::TokenEntry;
use super::native::PromptNames;
use super::prepare::{self, tokens_to_generate};
use super::responses_output::ResponseRequest;
use super::tools::ToolRules;
use super::types::{CommonParams, StreamOptions};
use super::usage::UsageTotals;
use super::whole::{AnswerCharge, FinishedAnswer, FinishedChoice};
use crate::models::ServedModel;
use crate::route::{Delta, Generation, Prompt, PromptPlan, RouteError};
use futures::future::{BoxFuture, try_join_all};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use larder_http::{PeerCharge, PeerShare};
use larder_model::{SamplingParams, Tokenizer};
use larder_worker::api::{CacheMode, TokenLogprobs};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Maximum number of choices of one request that wait for their first tokens. More would fill the
/// queues of the engines, which refuse requests then.
const STARTS_MAX: usize = 64;

/// Endpoint of a request, which decides the form of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Completion,
    Chat,
    /// SGLang's own API.
    Native,
}

impl Endpoint {
    fn id_prefix(self) -> &'static str {
        match self {
            Endpoint::Completion => "cmpl",
            Endpoint::Chat => "chatcmpl",
            Endpoint::Native => "gen",
        }
    }

    pub(crate) fn prompt_field(self) -> &'static str {
        match self {
            Endpoint::Completion => "prompt",
            Endpoint::Chat => "messages",
            Endpoint::Native => "text",
        }
    }
}

pub(crate) struct AnswerJob {
    pub(crate) request: RequestContext,
    pub(crate) endpoint: Endpoint,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) common: CommonParams,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) permit: PeerCharge,
    pub(crate) tools: Option<ToolRules>,
}

#[derive(Debug, Clone)]
pub(crate) struct ResponseMeta {
    pub(crate) endpoint: Endpoint,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    /// Changes with the weights, and with everything else that determines results.
    pub(crate) fingerprint: String,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) has_logprobs: bool,
    /// [`Endpoint::Native`]: the answer is a list.
    pub(crate) is_list: bool,
    /// [`Endpoint::Native`]: names that the client has given to its prompts.
    pub(crate) names: Option<PromptNames>,
    /// Rules for calls of tools. `None` if the request has no tools.
    pub(crate) tools: Option<ToolRules>,
    /// The answer has the form of `/v1/responses`.
    pub(crate) response: Option<Arc<ResponseRequest>>,
}

/// Choice in progress, with everything needed to repeat it on another engine.
pub(crate) struct Choice {
    pub(crate) index: u32,
    pub(crate) generation: Generation,
    plan: Arc<PromptPlan>,
    /// Charge for the prompt, which all its choices share.
    _charge: Arc<PeerCharge>,
    sampling: SamplingParams,
    tried: Vec<String>,
    /// The answer has no token of its own, only the prompt.
    is_empty: bool,
    /// Log-probabilities of the prompt's tokens from the second one on, which all its choices
    /// share. `None` if the answer does not have them.
    prompt_logprobs: Option<Arc<[TokenLogprobs]>>,
    /// Charge for the echoed prompt, and for the text collected so far.
    charge: AnswerCharge,
    echoed_bytes: usize,
    /// Characters of the text so far. Counted only with log-probabilities.
    chars: usize,
}

/// Choices of a prompt, which start when this is polled, unless they have started already.
type PromptStart = BoxFuture<'static, Result<Vec<Choice>, RouteError>>;

/// Prompts of a request, in their order.
pub(crate) struct PromptQueue {
    prompts: Vec<PromptStart>,
    /// Number of prompts that run at once.
    places: usize,
}

impl PromptQueue {
    /// Starts the prompts that have places, and waits for their first tokens.
    async fn start(mut prompts: Vec<PromptStart>, places: usize) -> Result<Self, RouteError> {
        let waiting = prompts.split_off(places.min(prompts.len()));
        let started: Vec<Vec<Choice>> = futures::stream::iter(prompts).buffered(places).try_collect().await?;
        let started = started.into_iter().map(|choices| std::future::ready(Ok(choices)).boxed());
        Ok(Self { prompts: started.chain(waiting).collect(), places })
    }

    /// Collects the answers of all choices, in order, in memory that one charge covers.
    pub(crate) async fn finish(self, answers: &PeerShare) -> Result<FinishedAnswer, RouteError> {
        let prompts: Vec<BoxFuture<'static, _>> = self.prompts.into_iter().map(|start| finish(start).boxed()).collect();
        let mut ended = futures::stream::iter(prompts).buffer_unordered(self.places);
        let mut answer = FinishedAnswer::new(answers);
        while let Some(choices) = ended.next().await {
            choices?.into_iter().try_for_each(|(choice, charge)| answer.add(choice, charge))?;
        }
        answer.choices.sort_by_key(|choice| choice.index);
        Ok(answer)
    }

    /// Events of all choices. Those of one choice come in order.
    pub(crate) fn events<T: Send + 'static>(
        self,
        of_choice: impl Fn(Choice) -> BoxStream<'static, T> + Clone + Send + 'static,
        failed: impl Fn(RouteError) -> T + Clone + Send + 'static,
    ) -> BoxStream<'static, T> {
        let of_prompt = move |start: PromptStart| {
            let (of_choice, failed) = (of_choice.clone(), failed.clone());
            let begun = async move {
                match start.await {
                    Ok(choices) => futures::stream::select_all(choices.into_iter().map(of_choice)).boxed(),
                    Err(error) => futures::stream::iter([failed(error)]).boxed(),
                }
            };
            begun.flatten_stream().boxed()
        };
        let prompts: Vec<BoxStream<'static, T>> = self.prompts.into_iter().map(of_prompt).collect();
        futures::stream::iter(prompts).flatten_unordered(self.places).boxed()
    }
}

/// Collects the answers of the choices of one prompt.
async fn finish(start: PromptStart) -> Result<Vec<(FinishedChoice, AnswerCharge)>, RouteError> {
    try_join_all(start.await?.into_iter().map(Choice::finish)).await
}

/// Request whose first choices have their first token. Errors before this point still get their
/// own HTTP status.
pub(crate) struct StartedAnswer {
    pub(crate) meta: ResponseMeta,
    pub(crate) prompts: PromptQueue,
    /// Room for the texts of answers.
    pub(crate) answers: PeerShare,
    pub(crate) usage_totals: UsageTotals,
    pub(crate) stream_options: StreamOptions,
    /// Choices per prompt, and those of them that the answer has.
    pub(crate) best_of: u32,
    pub(crate) n: u32,
    pub(crate) permit: PeerCharge,
    pub(crate) deadline: Instant,
}

/// Sends the choices that have places to engines and waits for their first tokens. The first
/// failure cancels the other choices.
pub(crate) async fn begin(job: AnswerJob) -> Result<StartedAnswer, ApiError> {
    let AnswerJob { request, endpoint, model, common, prompts, permit, tools } = job;
    let context = prepare::context(&request, &model)?;
    let mut limits = Vec::with_capacity(prompts.len());
    let of_model = model.tokenizer.generation_defaults().max_new_tokens;
    for prompt in &prompts {
        if prompt.tokens.is_empty() {
            return Err(ApiError::field(endpoint.prompt_field(), "the prompt is empty"));
        }
        limits.push(tokens_to_generate(endpoint, common.max_tokens, of_model, prompt.tokens.len(), context)?);
    }
    check_tokens(&common, &model)?;
    constraint::check(&request, &common).await?;
    check_min_tokens(&common, &limits)?;
    let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.tokens.len()).collect();
    echo::check(&common, lengths.iter().sum())?;
    let charges = prepare::charges(endpoint, &lengths, common.best_of)?;
    let charges: Result<Vec<_>, _> =
        charges.into_iter().map(|units| prepare::charge(&request.router, request.peer, units)).collect();
    let together = prepare::prompts_together(&request, &model, &lengths, &common, &permit)?;
    let meta = ResponseMeta {
        endpoint,
        id: format!("{}-{}", endpoint.id_prefix(), super::random_id()),
        created: crate::models::unix_seconds(),
        model: model.name.clone(),
        fingerprint: model.fingerprint(),
        tokenizer: model.tokenizer.clone(),
        has_logprobs: common.logprobs.is_some(),
        is_list: false,
        names: None,
        tools,
        response: None,
    };
    let prompt_tokens = lengths.iter().map(|&length| length as u32).collect();
    let jobs = prompts.into_iter().zip(limits).zip(charges?).enumerate();
    let (best_of, n, stream_options, deadline) = (common.best_of, common.n, common.stream_options, request.deadline);
    let answers = request.router.answers.of(request.peer);
    let context =
        Arc::new(StartContext { request, model, common, answers: answers.clone(), starts: Semaphore::new(STARTS_MAX) });
    let starts = jobs.map(|(at, ((prompt, limit), charge))| {
        start_prompt(context.clone(), PromptJob { at: at as u32, prompt, limit, charge }).boxed()
    });
    Ok(StartedAnswer {
        meta,
        prompts: PromptQueue::start(starts.collect(), together).await?,
        answers,
        usage_totals: UsageTotals::new(prompt_tokens, best_of),
        stream_options,
        best_of,
        n,
        permit,
        deadline,
    })
}

/// Refuses parameters that name tokens beyond the model's vocabulary.
fn check_tokens(common: &CommonParams, model: &ServedModel) -> Result<(), ApiError> {
    let Some(vocab) = model.vocab_size else { return Ok(()) };
    let sampling = &common.sampling.rest;
    let biased = sampling.logit_bias.iter().map(|bias| ("logit_bias", bias.0));
    let mut named = biased.chain(sampling.stop_token_ids.iter().map(|&id| ("stop_token_ids", id)));
    match named.find(|(_, id)| *id >= vocab) {
        None => Ok(()),
        Some((field, id)) => Err(ApiError::field(field, format!("'{field}' has token {id}; the model has {vocab}"))),
    }
}

/// Refuses an answer that must have more tokens than it may have, which without `max_tokens`
/// depends on the prompt.
fn check_min_tokens(common: &CommonParams, limits: &[u32]) -> Result<(), ApiError> {
    let min_tokens = common.sampling.rest.min_tokens;
    match limits.iter().find(|&&limit| min_tokens > limit as usize) {
        None => Ok(()),
        Some(limit) => {
            let message = format!("'min_tokens' is {min_tokens}; this answer may have {limit} tokens");
            Err(ApiError::field("min_tokens", message))
        }
    }
}

struct PromptJob {
    at: u32,
    prompt: Prompt,
    /// Maximum tokens of each choice.
    limit: u32,
    charge: PeerCharge,
}

/// Parts of a request that all its prompts share.
struct StartContext {
    request: RequestContext,
    model: Arc<ServedModel>,
    common: CommonParams,
    /// Room for the texts of answers.
    answers: PeerShare,
    /// [`STARTS_MAX`] permits.
    starts: Semaphore,
}

/// Plans one prompt and starts its choices.
async fn start_prompt(context: Arc<StartContext>, job: PromptJob) -> Result<Vec<Choice>, RouteError> {
    let StartContext { request, model, common, answers, starts } = &*context;
    let PromptJob { at, prompt, limit, charge } = job;
    // Ends by the deadline of the request, like the starts that hold the permits.
    let _start = starts.acquire_many(common.best_of.min(STARTS_MAX as u32)).await;
    let tokens_requested = common.max_tokens.map_or(0, |tokens| tokens as usize);
    // Cached pages have no logits.
    let cache = if common.echo && common.logprobs.is_some() { CacheMode::None } else { request.cache };
    let id = request.request_id.clone();
    let router = request.router.clone();
    let plan = PromptPlan::make(router, model.clone(), id, prompt, cache, request.deadline, tokens_requested).await;
    let charge = Arc::new(charge);
    let is_empty = common.max_tokens == Some(0);
    let echoed_bytes = echo::bytes(common, &plan);
    // Before any engine computes the echoed tokens.
    let echo_charge = || {
        let charge = AnswerCharge::new(answers);
        charge.grow_to(echoed_bytes).map(|()| charge)
    };
    let echo_charge = &echo_charge;
    let mut choices = try_join_all((0..common.best_of).map(|choice| {
        let sampling = common.sampling_of(choice, limit, model.tokenizer.generation_defaults());
        let index = at * common.best_of + choice;
        let (plan, charge) = (plan.clone(), charge.clone());
        async move { Choice::begin(index, plan, charge, sampling, is_empty, echo_charge()?, echoed_bytes).await }
    }))
    .await?;
    if common.echo && common.logprobs.is_some() {
        let of_first = choices.first_mut().map(|first| std::mem::take(&mut first.generation.prompt_logprobs));
        let shared: Arc<[TokenLogprobs]> = of_first.unwrap_or_default().into();
        choices.iter_mut().for_each(|choice| choice.prompt_logprobs = Some(shared.clone()));
    }
    Ok(choices)
}

impl Choice {
    async fn begin(
        index: u32,
        plan: Arc<PromptPlan>,
        charge: Arc<PeerCharge>,
        sampling: SamplingParams,
        is_empty: bool,
        echo_charge: AnswerCharge,
        echoed_bytes: usize,
    ) -> Result<Choice, RouteError> {
        let mut tried = Vec::new();
        let generation = plan.generate(&sampling, &mut tried).await?;
        Ok(Choice {
            index,
            generation,
            _charge: charge,
            sampling,
            tried,
            is_empty,
            prompt_logprobs: None,
            charge: echo_charge,
            echoed_bytes,
            chars: plan.echo().map_or(0, |echo| echo.chars),
            plan,
        })
    }

    pub(crate) fn echoed(&self) -> Echoed {
        Echoed::new(self.plan.clone(), self.prompt_logprobs.clone())
    }

    /// Charges `bytes` of the answer that stay in memory, beside the echoed prompt.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), RouteError> {
        let echoed = self.echoed_bytes;
        self.charge.grow_to(echoed + bytes)
    }

    pub(crate) fn take_charge(&mut self) -> AnswerCharge {
        let rest = AnswerCharge::new(self.charge.share());
        std::mem::replace(&mut self.charge, rest)
    }

    /// Entry of the next token, whose text is `text`. `None` without log-probabilities.
    pub(crate) fn entry(&mut self, id: u32, text: &str, logprobs: Option<TokenLogprobs>) -> Option<TokenEntry> {
        let entry = TokenEntry { id, logprobs: Some(logprobs?), offset: self.chars };
        self.chars += text.chars().count();
        Some(entry)
    }

    /// Next event of the answer, without the token that an empty answer needs.
    pub(crate) async fn next(&mut self) -> Result<Delta, RouteError> {
        loop {
            match self.generation.next().await? {
                Delta::Token { .. } if self.is_empty => {}
                Delta::End { finish_reason, .. } if self.is_empty => {
                    return Ok(Delta::End { finish_reason, completion_tokens: 0 });
                }
                delta => return Ok(delta),
            }
        }
    }

    /// Collects the whole text. The client has received nothing yet, so the choice starts over on
    /// another engine if its engine is lost.
    pub(crate) async fn finish(mut self) -> Result<(FinishedChoice, AnswerCharge), RouteError> {
        loop {
            let lost = match self.collect().await {
                Err(error @ RouteError::Interrupted(_)) => error,
                result => return result.map(|choice| (choice, self.charge)),
            };
            // Text of the lost engine is dropped: with random sampling, another engine would not
            // continue it.
            self.tried.push(self.generation.engine_name().to_string());
            self.generation = self.plan.generate(&self.sampling, &mut self.tried).await.map_err(|_| lost)?;
        }
    }

    async fn collect(&mut self) -> Result<FinishedChoice, RouteError> {
        let echoed = self.echoed();
        let mut text = echoed.text().to_string();
        let mut tokens = echoed.tokens(0..echoed.len());
        let mut bytes = tokens.iter().map(TokenEntry::bytes).sum::<usize>();
        self.chars = self.plan.echo().map_or(0, |echo| echo.chars);
        loop {
            match self.next().await? {
                Delta::Token { id, text: more, logprobs } => {
                    text.push_str(&more);
                    if let Some(entry) = self.entry(id, &more, logprobs) {
                        bytes += entry.bytes();
                        tokens.push(entry);
                    }
                    self.charge.grow_to(text.len() + bytes)?;
                }
                Delta::End { finish_reason, completion_tokens } => {
                    let cached_tokens = self.generation.cached_tokens(true).await;
                    return Ok(FinishedChoice {
                        index: self.index,
                        prompt_tokens: self.plan.prompt_tokens(),
                        text,
                        tokens,
                        echoed: echoed.len(),
                        finish_reason,
                        completion_tokens,
                        cached_tokens,
                    });
                }
            }
        }
    }
}

#[cfg(test)]
impl ResponseMeta {
    pub(super) fn for_tests(endpoint: Endpoint) -> Self {
        let json =
            serde_json::json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
        let files = [("tokenizer.json".to_string(), json.to_string().into_bytes())];
        let tokenizer = Arc::new(Tokenizer::from_files(&files.into()).unwrap());
        let (id, model, fingerprint) = ("id-1".into(), "m".into(), "fp_1".into());
        Self {
            endpoint,
            id,
            created: 7,
            model,
            fingerprint,
            tokenizer,
            has_logprobs: false,
            is_list: false,
            names: None,
            tools: None,
            response: None,
        }
    }
}
