//! One prompt's way through the engines.
//!
//! What always holds:
//! - prefill and decode run at the same time, and meet in the store only: decode follows the pages that prefill writes;
//! - a prefill that fails costs its unsealed pages only: another engine goes on from there, and if there is none, the
//!   decode engine computes the rest, at once;
//! - an engine that failed is not asked again for this prompt; once text may have been sent, nobody else is asked;
//! - dropping a [`Plan`] and its [`Generation`]s drops every call that was made for them.

use crate::Shared;
use crate::calls::{CallError, EventStream, remaining_ms};
use crate::engines::{Engine, Need, Work};
use crate::models::ServedModel;
use futures::FutureExt;
use futures::future::BoxFuture;
use larder_format::PageKey;
use larder_worker::api::{
    CacheMode, DecodeEvent, DecodeRequest, DecodeStart, ErrorCode, FinishReason, PrefillRequest, PrefillResponse, Role,
    SamplingParams,
};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Generated tokens that a request counts for in its engine's outstanding work, at most: generating is cheap beside
/// computing a prompt, because sequences share each step.
const BOOKED_GENERATION_TOKENS: u64 = 64;
/// Most time the end of an answer waits for the prefill engine to say what it found cached.
const USAGE_WAIT: Duration = Duration::from_millis(200);

/// Bytes of text that one generated token comes to, at most, on the average of an answer: the longest tokens in use are
/// runs of 128 blanks, and a character takes up to four bytes.
const TOKEN_BYTES_MAX: usize = 256;
/// Bytes of text beyond that.
const TEXT_BYTES_SPARE: usize = 4 << 10;

/// Why a prompt got no answer.
#[derive(Debug, Clone, Error)]
pub enum RouteError {
    /// No engine of this role may be asked.
    #[error("no {0} engine of this model is available now")]
    NoEngine(Role),
    /// Every engine is full.
    #[error("all engines of this model are busy; try again later")]
    Busy {
        /// When to ask again, milliseconds.
        retry_after_ms: u64,
    },
    /// Every engine that was asked failed before it answered.
    #[error("{0}")]
    Unavailable(CallError),
    /// The engine failed in the middle of its answer.
    #[error("{0}")]
    BrokeOff(CallError),
    /// The request itself cannot be served.
    #[error("{message}")]
    Refused {
        /// Why.
        code: ErrorCode,
        /// The engine's words.
        message: String,
    },
    /// The request's time was over.
    #[error("the request took longer than its time limit")]
    Deadline,
}

impl RouteError {
    fn new(error: CallError, has_begun: bool) -> Self {
        match error {
            // Also `busy`: an engine that shuts down says so to whom it was answering.
            error if has_begun && error.is_worth_another() => RouteError::BrokeOff(error),
            CallError::Deadline { .. } => RouteError::Deadline,
            CallError::Refused { error, .. } if error.code == ErrorCode::Deadline => RouteError::Deadline,
            CallError::Refused { error, .. } if error.code == ErrorCode::Busy => {
                RouteError::Busy { retry_after_ms: error.retry_after_ms.unwrap_or(1000) }
            }
            CallError::Refused { error, .. }
                if matches!(error.code, ErrorCode::BadRequest | ErrorCode::ContextLengthExceeded) =>
            {
                RouteError::Refused { code: error.code, message: error.message }
            }
            error if has_begun => RouteError::BrokeOff(error),
            error => RouteError::Unavailable(error),
        }
    }

    /// Whether an engine that comes now could help: engines that are being replaced must not fail requests.
    fn is_for_want_of_engines(&self) -> bool {
        matches!(self, RouteError::NoEngine(_) | RouteError::Unavailable(CallError::Lost { .. }))
    }
}

/// A tokenised prompt.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Its tokens, at least one.
    pub tokens: Vec<u32>,
    /// Keys of the whole pages below its last token: what prefill publishes and decode needs.
    pub keys: Arc<[PageKey]>,
}

impl Prompt {
    /// Computes the keys: a hash over all tokens, so not for the event loop if there are many.
    pub fn new(tokens: Vec<u32>, page_tokens: usize) -> Self {
        let below_last = tokens.len().saturating_sub(1);
        let keys = larder_format::page_keys(&tokens[..below_last], page_tokens.max(1)).into();
        Self { tokens, keys }
    }

    fn affinity(&self) -> PageKey {
        self.keys.first().copied().unwrap_or_else(|| PageKey::chain(None, &self.tokens))
    }
}

type PrefillTask = futures::future::Shared<BoxFuture<'static, Option<PrefillResponse>>>;

/// How one prompt is served; shared by all its choices.
pub struct Plan {
    shared: Arc<Shared>,
    model: Arc<ServedModel>,
    request_id: String,
    prompt: Prompt,
    cache: CacheMode,
    deadline: Instant,
    /// Tokens that the request asks for; 0 if it does not say.
    tokens_asked: usize,
    /// Pages at the start that the store held when it was asked.
    cached_pages: usize,
    prefill: Option<PrefillTask>,
}

impl Plan {
    /// Asks the store what it holds and sets a prefill going if that pays.
    pub(crate) async fn make(
        shared: Arc<Shared>,
        model: Arc<ServedModel>,
        request_id: String,
        prompt: Prompt,
        cache: CacheMode,
        deadline: Instant,
        tokens_asked: usize,
    ) -> Arc<Plan> {
        let (cached_pages, prefill) = (0, None);
        let mut plan = Plan { shared, model, request_id, prompt, cache, deadline, tokens_asked, cached_pages, prefill };
        // A prefill whose pages cannot reach the decode engine is work for nothing.
        if cache.uses_store() && !plan.prompt.keys.is_empty() && plan.model.pages.up() {
            plan.cached_pages = plan.lookup().await.min(plan.prompt.keys.len());
            let uncached = (plan.prompt.keys.len() - plan.cached_pages) * plan.model.page_tokens;
            let pays = uncached >= plan.shared.options.prefill_min_tokens as usize;
            if pays && plan.shared.engines.choose(&plan.need(Role::Prefill, &[])).is_some() {
                plan.prefill = Some(plan.begin_prefill(uncached as u64));
            }
        }
        Arc::new(plan)
    }

    async fn lookup(&self) -> usize {
        let timeout = self.shared.options.lookup_timeout;
        let lookup = self.model.pages.lookup(self.prompt.keys.clone(), std::time::Instant::now() + timeout);
        tokio::time::timeout(timeout, lookup).await.unwrap_or(0)
    }

    fn need<'a>(&self, role: Role, tried: &'a [String]) -> Need<'a> {
        let context = self.prompt.tokens.len() + 1;
        let context_wanted = match role {
            Role::Prefill => context,
            Role::Decode => self.prompt.tokens.len().saturating_add(self.tokens_asked),
        };
        Need { role, namespace: self.model.namespace, context, context_wanted, affinity: self.prompt.affinity(), tried }
    }

    fn begin_prefill(&self, uncached_tokens: u64) -> PrefillTask {
        let request = PrefillRequest {
            request_id: self.request_id.clone(),
            tokens: self.prompt.tokens.clone(),
            cache: self.cache,
            deadline_ms: 0,
        };
        let job = PrefillJob {
            shared: self.shared.clone(),
            model: self.model.clone(),
            affinity: self.prompt.affinity(),
            request,
            uncached_tokens,
            deadline: self.deadline,
        };
        let task = AbortOnDropHandle::new(tokio::spawn(async move { job.run().await.ok() }));
        async move { task.await.ok().flatten() }.boxed().shared()
    }

    /// Begins to generate; returns with the first token. Engines that fail are added to `tried`.
    pub async fn generate(
        self: &Arc<Self>,
        sampling: &SamplingParams,
        tried: &mut Vec<String>,
    ) -> Result<Generation, RouteError> {
        let mut failure: Option<RouteError> = None;
        let mut context = self.prompt.tokens.len() + 1;
        while tried.len() < self.shared.options.attempts_max {
            let need = Need { context, ..self.need(Role::Decode, tried) };
            let may_wait = failure.as_ref().is_none_or(RouteError::is_for_want_of_engines);
            let engine = match self.shared.engines.choose(&need) {
                None if may_wait => self.shared.wait_for(self.deadline, || self.shared.engines.choose(&need)).await,
                engine => engine,
            };
            let Some(engine) = engine else { break };
            if failure.is_some() {
                self.shared.metrics.count_retry(Role::Decode);
            }
            let error = match self.start(&engine, sampling).await {
                Ok(generation) => {
                    engine.note_success();
                    return Ok(generation);
                }
                Err(error) => error,
            };
            tracing::info!(request = %self.request_id, %error, "decode failed before its first token");
            error.note(&engine);
            if matches!(error, CallError::Deadline { .. }) {
                // It may be hung: it had all the time that there was, and gave nothing.
                engine.note_fault();
            }
            tried.push(engine.name.clone());
            let mut is_worth_another = error.is_worth_another();
            if error.is_too_long() {
                // Only one with more room can do better.
                context = context.max(engine.info.max_context as usize + 1);
                let larger = Need { context, ..self.need(Role::Decode, tried) };
                is_worth_another = self.shared.engines.choose(&larger).is_some();
            }
            let error = RouteError::new(error, false);
            if !is_worth_another {
                return Err(error);
            }
            // A full engine is there and will serve later: that is the better thing to report.
            failure = match failure {
                Some(busy @ RouteError::Busy { .. }) => Some(busy),
                _ => Some(error),
            };
        }
        Err(failure.unwrap_or(RouteError::NoEngine(Role::Decode)))
    }

    /// Begins on `engine`. It follows the prefill's pages while there is hope for them. If the prefill fails for good, the
    /// engine need not find that out by waiting: it is asked anew, takes what was sealed, and computes the rest.
    async fn start(self: &Arc<Self>, engine: &Arc<Engine>, sampling: &SamplingParams) -> Result<Generation, CallError> {
        if let Some(prefill) = self.prefill.clone() {
            tokio::select! {
                started = self.ask(engine, sampling, self.prompt.keys.len()) => return started,
                () = failure_of(prefill) => {}
            }
        }
        self.ask(engine, sampling, 0).await
    }

    async fn ask(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        sampling: &SamplingParams,
        await_pages: usize,
    ) -> Result<Generation, CallError> {
        let ready_tokens = await_pages.max(self.cached_pages) * self.model.page_tokens;
        let uncached_tokens = (self.prompt.tokens.len() - ready_tokens) as u64;
        let mut work = engine.book(uncached_tokens + generation_tokens(sampling));
        let request = DecodeRequest {
            request_id: self.request_id.clone(),
            tokens: self.prompt.tokens.clone(),
            sampling: sampling.clone(),
            await_pages: await_pages as u32,
            cache: self.cache,
            deadline_ms: remaining_ms(self.deadline),
        };
        let mut events = self.shared.calls.decode(engine, &request, self.deadline).await?;
        let start = match events.next().await? {
            DecodeEvent::Start(start) => start,
            other => return Err(unexpected(&work, &other)),
        };
        let first = events.next().await?;
        work.reduce_to(generation_tokens(sampling));
        let bounds = Bounds::new(sampling.max_tokens);
        Ok(Generation { plan: self.clone(), start, first: Some(first), events, work, bounds })
    }

    /// Tokens of the prompt whose keys and values nobody computed for this request. Waits a little for the prefill engine
    /// to answer if `may_wait`.
    async fn cached_tokens(&self, start: &DecodeStart, may_wait: bool) -> u32 {
        let pages = match &self.prefill {
            None => sum([start.pages_l1, start.pages_l2, start.pages_l3]),
            Some(task) => {
                let answer = if may_wait {
                    tokio::time::timeout(USAGE_WAIT, task.clone()).await.ok().flatten()
                } else {
                    task.clone().now_or_never().flatten()
                };
                let pages = answer.map_or(self.cached_pages as u32, |a| sum([a.pages_l1, a.pages_l2, a.pages_l3]));
                pages.max(start.pages_l1)
            }
        };
        pages.saturating_mul(self.model.page_tokens as u32).min(self.prompt_tokens())
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt.tokens.len() as u32
    }
}

/// Sums up what an engine says: any number.
fn sum(numbers: [u32; 3]) -> u32 {
    numbers.into_iter().fold(0, u32::saturating_add)
}

/// Ends if the prefill fails, or if pages of it did not reach the store; never if it succeeds.
async fn failure_of(prefill: PrefillTask) {
    if prefill.await.is_some_and(|answer| answer.pages_lost == 0) {
        std::future::pending::<()>().await;
    }
}

fn generation_tokens(sampling: &SamplingParams) -> u64 {
    (sampling.max_tokens as u64).min(BOOKED_GENERATION_TOKENS)
}

fn unexpected(work: &Work, event: &DecodeEvent) -> CallError {
    CallError::Lost { engine: work.engine().name.clone(), reason: format!("unexpected event {event:?}") }
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text, never empty.
    Text(String),
    /// The end.
    End {
        /// Why.
        finish_reason: FinishReason,
        /// Tokens generated.
        completion_tokens: u32,
    },
}

/// What an engine may still send for one answer, so that one gone wild cannot make the router keep more and more.
#[derive(Debug)]
struct Bounds {
    tokens: usize,
    text_bytes: usize,
}

impl Bounds {
    fn new(max_tokens: usize) -> Self {
        let text_bytes = max_tokens.saturating_mul(TOKEN_BYTES_MAX).saturating_add(TEXT_BYTES_SPARE);
        Self { tokens: max_tokens, text_bytes }
    }

    /// Counts one token; `false` if it is too much.
    fn take(&mut self, text: &str) -> bool {
        match (self.tokens.checked_sub(1), self.text_bytes.checked_sub(text.len())) {
            (Some(tokens), Some(text_bytes)) => {
                *self = Self { tokens, text_bytes };
                true
            }
            _ => false,
        }
    }
}

/// A running answer: it has its first token.
pub struct Generation {
    plan: Arc<Plan>,
    start: DecodeStart,
    first: Option<DecodeEvent>,
    events: EventStream,
    work: Work,
    bounds: Bounds,
}

impl Generation {
    /// The next piece. An error is final.
    pub async fn next(&mut self) -> Result<Piece, RouteError> {
        loop {
            let event = match self.first.take() {
                Some(event) => event,
                None => self.events.next().await.map_err(|error| self.fail(error))?,
            };
            match event {
                DecodeEvent::Token { text, .. } if !self.bounds.take(&text) => {
                    let reason = format!("it sent more than was asked for ({} bytes at last)", text.len());
                    return Err(self.fail(CallError::lost(self.engine_name(), reason)));
                }
                DecodeEvent::Token { text, .. } if text.is_empty() => {}
                DecodeEvent::Token { text, .. } => return Ok(Piece::Text(text)),
                DecodeEvent::End { finish_reason, completion_tokens } => {
                    return Ok(Piece::End { finish_reason, completion_tokens });
                }
                other => return Err(self.fail(unexpected(&self.work, &other))),
            }
        }
    }

    fn fail(&self, error: CallError) -> RouteError {
        tracing::info!(request = %self.plan.request_id, %error, "decode failed after its first token");
        error.note(self.work.engine());
        RouteError::new(error, true)
    }

    /// Who generates.
    pub fn engine_name(&self) -> &str {
        &self.work.engine().name
    }

    /// See [`Plan`]: tokens of the prompt that came from a cache.
    pub async fn cached_tokens(&self, may_wait: bool) -> u32 {
        self.plan.cached_tokens(&self.start, may_wait).await
    }
}

/// Pages to be computed by whichever prefill engine can.
pub(crate) struct PrefillJob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) affinity: PageKey,
    /// `deadline_ms` is set for each attempt.
    pub(crate) request: PrefillRequest,
    pub(crate) uncached_tokens: u64,
    pub(crate) deadline: Instant,
}

impl PrefillJob {
    /// Tries one engine after the other, never one twice.
    pub(crate) async fn run(mut self) -> Result<PrefillResponse, RouteError> {
        let mut tried = Vec::new();
        let mut failure = RouteError::NoEngine(Role::Prefill);
        while tried.len() < self.shared.options.attempts_max {
            let need = Need {
                role: Role::Prefill,
                namespace: self.model.namespace,
                context: self.request.tokens.len() + 1,
                context_wanted: 0,
                affinity: self.affinity,
                tried: &tried,
            };
            let Some(engine) = self.shared.engines.choose(&need) else { break };
            if !tried.is_empty() {
                self.shared.metrics.count_retry(Role::Prefill);
            }
            self.request.deadline_ms = remaining_ms(self.deadline);
            let work = engine.book(self.uncached_tokens);
            let answer = self.shared.calls.prefill(&engine, &self.request, self.deadline).await;
            drop(work);
            let error = match answer {
                Ok(answer) => {
                    engine.note_success();
                    return Ok(answer);
                }
                Err(error) => error,
            };
            tracing::info!(request = %self.request.request_id, %error, "prefill failed");
            error.note(&engine);
            let is_worth_another = error.is_worth_another();
            failure = RouteError::new(error, false);
            if !is_worth_another {
                break;
            }
            tried.push(engine.name.clone());
        }
        Err(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_is_in_no_page() {
        for (tokens, pages) in [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)] {
            assert_eq!(Prompt::new(vec![7; tokens], 4).keys.len(), pages, "{tokens} tokens");
        }
    }

    #[test]
    fn an_answer_is_bounded_in_tokens_and_text() {
        let mut bounds = Bounds::new(2);
        assert!(bounds.take("") && bounds.take("a") && !bounds.take(""));
        let mut bounds = Bounds::new(2);
        assert!(bounds.take(&"x".repeat(2 * TOKEN_BYTES_MAX + TEXT_BYTES_SPARE)) && !bounds.take("x"));
        Bounds::new(usize::MAX);
    }

    #[test]
    fn a_prompt_below_one_page_has_an_affinity_of_its_own() {
        let (a, b) = (Prompt::new(vec![1, 2], 4), Prompt::new(vec![1, 3], 4));
        assert_ne!(a.affinity(), b.affinity());
        assert_eq!(a.affinity(), Prompt::new(vec![1, 2], 4).affinity());
    }
}
