//! Serving one prompt: lookup, prefill and decode.
//!
//! Invariants:
//!
//! - Prefill and decode run concurrently and meet only in the store: decode follows the pages that
//!   prefill publishes.
//! - A failed prefill loses only its unpublished pages. Another engine continues from there.
//!   Without one, the decode engine computes the rest at once.
//! - A prompt never goes twice to an engine that failed it. Once text may have reached the client,
//!   no other engine is tried.
//! - Dropping a [`PromptPlan`] and its [`Generation`]s cancels every call made for them.

mod generation;

pub use generation::{Delta, Generation};

use crate::RouterState;
use crate::calls::{CallError, EventStream, remaining_ms};
use crate::engines::{EngineRequirement, RemoteEngine};
use crate::models::ServedModel;
use crate::tokenise::Echo;
use futures::FutureExt;
use futures::future::BoxFuture;
use generation::{ANSWER_TEXT_BYTES_MAX, OutputLimits, unexpected};
use larder_format::PageKey;
use larder_worker::api::{
    CacheMode, DecodeEvent, DecodeRequest, DecodeStart, ErrorCode, PrefillRequest, PrefillResponse, Role,
    SamplingParams, TokenLogprobs,
};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Maximum number of generated tokens that one request adds to its engine's load. Generation costs
/// far less per token than prefill, because all sequences of a batch share each step.
const GENERATION_LOAD_TOKENS_MAX: u64 = 64;
/// Maximum time the end of an answer waits for the prefill engine's report of cached pages. Only
/// the field `cached_tokens` depends on it.
// The report is usually there: prefill ends before decode does. Where it is not, the client has all
// text already, and a delay of this length at its end is hardly noticed.
const USAGE_WAIT: Duration = Duration::from_millis(200);

/// Failure of a prompt. The messages reach API users.
#[derive(Debug, Clone, Error)]
pub enum RouteError {
    #[error("no {0} engine of this model is available now")]
    NoEngine(Role),
    /// Every engine that was tried is at its limit. The time in milliseconds is the hint of the
    /// engine, or 1,000 without one.
    #[error("all engines of this model are busy; try again later")]
    Busy { retry_after_ms: u64 },
    #[error("this server is at its limit of text in answers; stream the answer, or try again later")]
    AnswersFull,
    /// The answer exceeds a limit of the router. Any engine's answer would.
    #[error("the answer is longer than {ANSWER_TEXT_BYTES_MAX} bytes, the limit of this server; request fewer tokens")]
    AnswerTooLong,
    /// Every engine that was tried failed before its first token.
    #[error("{0}")]
    Unavailable(CallError),
    #[error("{0}")]
    Interrupted(CallError),
    /// The engine found the request itself invalid, so other engines would too.
    #[error("{message}")]
    Refused { code: ErrorCode, message: String },
    #[error("the request took longer than its time limit")]
    Deadline,
}

impl RouteError {
    /// Classifies the failure of a call. `has_begun` says that the call had returned its first
    /// token.
    fn new(error: CallError, has_begun: bool) -> Self {
        match error {
            // Includes `busy`: an engine that shuts down sends that to the requests it is serving.
            error if has_begun && error.is_retryable() => RouteError::Interrupted(error),
            CallError::Deadline { .. } => RouteError::Deadline,
            CallError::TooLong { .. } => RouteError::AnswerTooLong,
            CallError::Refused { error, .. } if error.code == ErrorCode::Deadline => RouteError::Deadline,
            CallError::Refused { error, .. } if error.code == ErrorCode::Busy => {
                RouteError::Busy { retry_after_ms: error.retry_after_ms.unwrap_or(1000) }
            }
            CallError::Refused { error, .. }
                if matches!(error.code, ErrorCode::BadRequest | ErrorCode::ContextLengthExceeded) =>
            {
                RouteError::Refused { code: error.code, message: error.message }
            }
            error if has_begun => RouteError::Interrupted(error),
            error => RouteError::Unavailable(error),
        }
    }

    /// Returns `true` if an engine that joins now could serve the prompt. Requests wait for it
    /// while engines are being replaced.
    fn is_missing_engine(&self) -> bool {
        use CallError::{Lost, Violation};
        matches!(self, RouteError::NoEngine(_) | RouteError::Unavailable(Lost { .. } | Violation { .. }))
    }
}

#[derive(Debug, Clone)]
pub struct Prompt {
    /// Token ids. At least one by the time a plan is made.
    pub tokens: Vec<u32>,
    /// Keys of the whole pages before the last token. Prefill publishes exactly these, and decode
    /// needs them. The decode engine always computes the last token itself, because that yields the
    /// logits of the first answer token.
    pub keys: Arc<[PageKey]>,
    /// Text with which the answers begin, if the request asks for it.
    pub(crate) echo: Option<Arc<Echo>>,
}

impl Prompt {
    /// Computes the page keys. Hashes all tokens: run it off the event loop for long prompts. A
    /// `page_tokens` of 0 counts as 1.
    pub fn new(tokens: Vec<u32>, page_tokens: usize) -> Self {
        let below_last = tokens.len().saturating_sub(1);
        let keys = larder_format::page_keys(&tokens[..below_last], page_tokens.max(1)).into();
        Self { tokens, keys, echo: None }
    }

    /// First page key, which all prompts with the same beginning share. A prompt below one page
    /// uses all its tokens.
    fn affinity(&self) -> PageKey {
        self.keys.first().copied().unwrap_or_else(|| PageKey::chain(None, &self.tokens))
    }
}

type PrefillTask = futures::future::Shared<BoxFuture<'static, Option<PrefillResponse>>>;

/// Plan for one prompt, shared by all its choices. The prompt is looked up and prefilled once,
/// however many choices decode it.
pub struct PromptPlan {
    router: Arc<RouterState>,
    model: Arc<ServedModel>,
    request_id: String,
    prompt: Prompt,
    cache: CacheMode,
    deadline: Instant,
    tokens_requested: usize,
    /// Leading pages that the store held at the time of the lookup. Some may be gone when the
    /// engine reads them.
    cached_pages: usize,
    prefill: Option<PrefillTask>,
}

impl PromptPlan {
    /// Looks the prompt's pages up and starts a prefill if enough of them are missing. Waits for
    /// the lookup only. A lookup that exceeds its timeout counts as one without a hit.
    pub(crate) async fn make(
        router: Arc<RouterState>,
        model: Arc<ServedModel>,
        request_id: String,
        prompt: Prompt,
        cache: CacheMode,
        deadline: Instant,
        tokens_requested: usize,
    ) -> Arc<PromptPlan> {
        let mut plan = PromptPlan {
            router,
            model,
            request_id,
            prompt,
            cache,
            deadline,
            tokens_requested,
            cached_pages: 0,
            prefill: None,
        };
        // Without the store, prefilled pages could not reach the decode engine and the work would
        // be wasted.
        if cache.uses_store() && !plan.prompt.keys.is_empty() && plan.model.pages.up() {
            plan.cached_pages = plan.lookup().await.min(plan.prompt.keys.len());
            let uncached = (plan.prompt.keys.len() - plan.cached_pages) * plan.model.page_tokens;
            // Below the threshold, a second engine and the store cost more than they save.
            let pays = uncached >= plan.router.options.prefill_min_tokens as usize;
            if pays && plan.router.engines.choose(&plan.need(Role::Prefill, &[])).is_some() {
                plan.prefill = Some(plan.spawn_prefill(uncached as u64));
            }
        }
        Arc::new(plan)
    }

    async fn lookup(&self) -> usize {
        let timeout = self.router.options.lookup_timeout;
        let lookup = self.model.pages.lookup(self.prompt.keys.clone(), std::time::Instant::now() + timeout);
        // The timeout also covers a store client that misses its own deadline.
        tokio::time::timeout(timeout, lookup).await.unwrap_or(0)
    }

    fn need<'a>(&self, role: Role, tried: &'a [String]) -> EngineRequirement<'a> {
        let context = self.prompt.tokens.len() + 1;
        let context_preferred = match role {
            Role::Prefill => context,
            Role::Decode => self.prompt.tokens.len().saturating_add(self.tokens_requested),
        };
        EngineRequirement {
            role,
            namespace: self.model.namespace,
            context,
            context_preferred,
            affinity: self.prompt.affinity(),
            tried,
        }
    }

    fn spawn_prefill(&self, uncached_tokens: u64) -> PrefillTask {
        let request = PrefillRequest {
            request_id: self.request_id.clone(),
            tokens: self.prompt.tokens.clone(),
            cache: self.cache,
            deadline_ms: 0,
        };
        let job = PrefillJob {
            router: self.router.clone(),
            model: self.model.clone(),
            affinity: self.prompt.affinity(),
            request,
            uncached_tokens,
            deadline: self.deadline,
        };
        // A task of its own, so that prefill progresses while nothing polls the plan. Aborting it
        // on drop cancels the call.
        let task = AbortOnDropHandle::new(tokio::spawn(async move { job.run().await.ok() }));
        async move { task.await.ok().flatten() }.boxed().shared()
    }

    /// Starts a generation and waits for its first token. Tries up to `attempts_max` engines and
    /// adds those that fail to `tried`.
    ///
    /// # Errors
    /// A failure that no other engine can help with, at once. Otherwise [`RouteError::Busy`] if any
    /// engine was busy, or else the last failure. [`RouteError::NoEngine`] if none could be tried.
    pub async fn generate(
        self: &Arc<Self>,
        sampling: &SamplingParams,
        tried: &mut Vec<String>,
    ) -> Result<Generation, RouteError> {
        let mut failure: Option<RouteError> = None;
        let mut context = self.prompt.tokens.len() + 1;
        while tried.len() < self.router.options.attempts_max {
            let need = EngineRequirement { context, ..self.need(Role::Decode, tried) };
            // Waiting helps only if engines are missing. Busy engines would still be busy.
            let may_wait = failure.as_ref().is_none_or(RouteError::is_missing_engine);
            let engine = match self.router.engines.choose(&need) {
                None if may_wait => self.router.wait_for(self.deadline, || self.router.engines.choose(&need)).await,
                engine => engine,
            };
            let Some(engine) = engine else { break };
            // Counted only when a second engine is found: giving up is not a retry.
            if failure.is_some() {
                self.router.metrics.count_retry(Role::Decode);
            }
            let error = match self.start(&engine, sampling).await {
                Ok(generation) => {
                    engine.note_success();
                    return Ok(generation);
                }
                Err(error) => error,
            };
            tracing::info!(
                request = %self.request_id, engine = %engine.name, %error,
                "decode failed before its first token; trying another engine if one can help"
            );
            // Before the next choice, so that the balancer skips an engine that was lost.
            self.router.note_failure(&error, &engine);
            tried.push(engine.name.clone());
            let mut is_retryable = error.is_retryable();
            if error.exceeds_context() {
                // Only an engine with a longer context can serve it.
                context = context.max(engine.info.max_context as usize + 1);
                let larger = EngineRequirement { context, ..self.need(Role::Decode, tried) };
                is_retryable = self.router.engines.choose(&larger).is_some();
            }
            let error = RouteError::new(error, false);
            // The same request would fail on every engine.
            if !is_retryable {
                return Err(error);
            }
            // Busy is the better report: it tells the client to retry, and a retry will succeed.
            failure = match failure {
                Some(busy @ RouteError::Busy { .. }) => Some(busy),
                _ => Some(error),
            };
        }
        Err(failure.unwrap_or(RouteError::NoEngine(Role::Decode)))
    }

    /// Starts decoding on `engine`, which follows the pages of the running prefill. If the prefill
    /// fails for good, the call is repeated without waiting for pages: the engine then takes the
    /// published ones and computes the rest. Without the repeat it would wait for pages that never
    /// come.
    ///
    /// Counts a timeout against the engine, unless it still waited for the prefill.
    async fn start(
        self: &Arc<Self>,
        engine: &Arc<RemoteEngine>,
        sampling: &SamplingParams,
    ) -> Result<Generation, CallError> {
        if let Some(prefill) = self.prefill.clone() {
            tokio::select! {
                started = self.call(engine, sampling, self.prompt.keys.len()) => {
                    // The prefill engine is at fault for pages that did not come.
                    if matches!(prefill.now_or_never(), Some(Some(_))) {
                        note_timeout(engine, &started);
                    }
                    return started;
                }
                () = failure_of(prefill.clone()) => {}
            }
        }
        let started = self.call(engine, sampling, 0).await;
        note_timeout(engine, &started);
        started
    }

    /// Calls `engine` and waits for its first token. The engine expects the first `await_pages`
    /// pages in the store and follows those that are missing there.
    async fn call(
        self: &Arc<Self>,
        engine: &Arc<RemoteEngine>,
        sampling: &SamplingParams,
        await_pages: usize,
    ) -> Result<Generation, CallError> {
        // Pages that the engine reads from the store cost it no computation.
        let ready_tokens = await_pages.max(self.cached_pages) * self.model.page_tokens;
        let uncached_tokens = (self.prompt.tokens.len() - ready_tokens) as u64;
        let mut load = engine.add_load(uncached_tokens + generation_tokens(sampling));
        let request = DecodeRequest {
            request_id: self.request_id.clone(),
            tokens: self.prompt.tokens.clone(),
            sampling: sampling.clone(),
            await_pages: await_pages as u32,
            // Pages beyond those may come from the prefill of this request.
            cached_pages: self.prefill.is_some().then_some(self.cached_pages as u32),
            cache: self.cache,
            deadline_ms: remaining_ms(self.deadline),
        };
        let mut events = self.router.engine_client.decode(engine, request, self.deadline).await?;
        let start = match events.next().await? {
            DecodeEvent::Start(start) if start.prompt_tokens != self.prompt_tokens() => {
                let reason = format!("it counts {} tokens of {}", start.prompt_tokens, self.prompt_tokens());
                return Err(CallError::violation(&engine.name, reason));
            }
            DecodeEvent::Start(start) => start,
            other => return Err(unexpected(&load, &other)),
        };
        let (prompt_logprobs, first) = self.prompt_logprobs(engine, sampling, &mut events).await?;
        // The prompt is computed. Only the generation still loads the engine.
        load.reduce_to(generation_tokens(sampling));
        let limits = OutputLimits::new(sampling.max_tokens);
        let top = sampling.logprobs.map(|top| top as usize);
        let plan = self.clone();
        let generation = Generation { plan, start, prompt_logprobs, first: None, events, load, limits, top };
        // Here, where another engine can still take over.
        generation.check(&first)?;
        Ok(Generation { first: Some(first), ..generation })
    }

    /// Reads the log-probabilities of the prompt, if the request asks for them. Returns them with
    /// the event after them.
    async fn prompt_logprobs(
        &self,
        engine: &RemoteEngine,
        sampling: &SamplingParams,
        events: &mut EventStream,
    ) -> Result<(Vec<TokenLogprobs>, DecodeEvent), CallError> {
        let expected = sampling.prompt_logprobs.map_or(0, |_| self.prompt.tokens.len() - 1);
        let top = sampling.prompt_logprobs.unwrap_or(0) as usize;
        let mut logprobs: Vec<TokenLogprobs> = Vec::new();
        loop {
            match events.next().await? {
                DecodeEvent::Prompt { logprobs: more }
                    if logprobs.len() + more.len() <= expected && more.iter().all(|more| more.top.len() <= top) =>
                {
                    logprobs.extend(more)
                }
                event if logprobs.len() == expected && !matches!(event, DecodeEvent::Prompt { .. }) => {
                    return Ok((logprobs, event));
                }
                _ => {
                    let reason = format!("it has not {expected} log-probabilities of the prompt");
                    return Err(CallError::violation(&engine.name, reason));
                }
            }
        }
    }

    /// Prompt tokens whose KV came from a cache. With `may_wait` it waits up to
    /// [`USAGE_WAIT`] for the prefill engine's report. Without a report it uses the result of the
    /// lookup.
    async fn cached_tokens(&self, start: &DecodeStart, may_wait: bool) -> CachedTokens {
        let pages = match &self.prefill {
            None => [start.pages_l1, start.pages_l2, start.pages_l3],
            Some(task) => {
                let answer = if may_wait {
                    tokio::time::timeout(USAGE_WAIT, task.clone()).await.ok().flatten()
                } else {
                    task.clone().now_or_never().flatten()
                };
                let pages = answer.map_or([0, self.cached_pages as u32, 0], |a| [a.pages_l1, a.pages_l2, a.pages_l3]);
                // The decode engine's own L1 may have held more than the prefill engine found.
                if start.pages_l1 > sum(pages) { [start.pages_l1, 0, 0] } else { pages }
            }
        };
        let mut room = self.prompt_tokens();
        let [device, host, storage] = pages.map(|pages| {
            let tokens = pages.saturating_mul(self.model.page_tokens as u32).min(room);
            room -= tokens;
            tokens
        });
        CachedTokens { device, host, storage }
    }

    pub(crate) fn echo(&self) -> Option<&Echo> {
        self.prompt.echo.as_deref()
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.prompt.tokens
    }

    pub fn prompt_tokens(&self) -> u32 {
        self.prompt.tokens.len() as u32
    }
}

/// Tokens of a prompt that were not computed, by their source. Pages count as a whole, but all
/// together never exceed the tokens of the prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CachedTokens {
    /// L1, the memory of an engine.
    pub device: u32,
    /// L2, the DRAM of store nodes.
    pub host: u32,
    /// L3, their NVMe.
    pub storage: u32,
}

impl CachedTokens {
    pub fn total(&self) -> u32 {
        sum([self.device, self.host, self.storage])
    }
}

/// Saturating sum. The numbers come from an engine and may be anything.
fn sum(numbers: [u32; 3]) -> u32 {
    numbers.into_iter().fold(0, u32::saturating_add)
}

/// Completes when the prefill fails or some of its pages did not reach the store. Never completes
/// on success, so that a `select!` waits for the decode engine instead.
async fn failure_of(prefill: PrefillTask) {
    if prefill.await.is_some_and(|answer| answer.pages_lost == 0) {
        std::future::pending::<()>().await;
    }
}

/// Counts a decode call that reached its deadline against the engine. A single timeout may be the
/// client's short limit. Several in a row mean a hung engine.
fn note_timeout(engine: &RemoteEngine, started: &Result<Generation, CallError>) {
    if matches!(started, Err(CallError::Deadline { .. })) {
        engine.note_fault();
    }
}

fn generation_tokens(sampling: &SamplingParams) -> u64 {
    (sampling.max_tokens as u64).min(GENERATION_LOAD_TOKENS_MAX)
}

pub(crate) struct PrefillJob {
    pub(crate) router: Arc<RouterState>,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) affinity: PageKey,
    /// [`PrefillJob::run`] sets `deadline_ms` anew for each attempt.
    pub(crate) request: PrefillRequest,
    pub(crate) uncached_tokens: u64,
    pub(crate) deadline: Instant,
}

impl PrefillJob {
    /// Tries engines one after the other until one succeeds, at most `attempts_max` and none twice.
    ///
    /// # Errors
    /// The failure of the last engine that was tried. [`RouteError::NoEngine`] if none could be
    /// tried.
    pub(crate) async fn run(mut self) -> Result<PrefillResponse, RouteError> {
        let mut tried = Vec::new();
        let mut failure = RouteError::NoEngine(Role::Prefill);
        while tried.len() < self.router.options.attempts_max {
            let need = EngineRequirement {
                role: Role::Prefill,
                namespace: self.model.namespace,
                context: self.request.tokens.len() + 1,
                context_preferred: 0,
                affinity: self.affinity,
                tried: &tried,
            };
            let Some(engine) = self.router.engines.choose(&need) else { break };
            if !tried.is_empty() {
                self.router.metrics.count_retry(Role::Prefill);
            }
            self.request.deadline_ms = remaining_ms(self.deadline);
            let load = engine.add_load(self.uncached_tokens);
            let mut watch = TimeoutWatch { engine: &engine, deadline: self.deadline, is_answered: false };
            let answer = self.router.engine_client.prefill(&engine, &self.request, self.deadline).await;
            watch.is_answered = !matches!(answer, Err(CallError::Deadline { .. }));
            drop(watch);
            // Before the next `choose`, which compares loads: this call loads the engine no more.
            drop(load);
            let error = match answer.and_then(|answer| self.check(&engine, answer)) {
                Ok(answer) => {
                    engine.note_success();
                    return Ok(answer);
                }
                Err(error) => error,
            };
            tracing::info!(
                request = %self.request.request_id, engine = %engine.name, %error,
                "prefill failed; trying another engine if one can help"
            );
            self.router.note_failure(&error, &engine);
            let is_retryable = error.is_retryable();
            failure = RouteError::new(error, false);
            if !is_retryable {
                break;
            }
            tried.push(engine.name.clone());
        }
        Err(failure)
    }
}

impl PrefillJob {
    /// Checks the counts of an answer against the prompt. The pages must be all whole ones before
    /// the last token. Neither the cached nor the lost ones may be more than these.
    fn check(&self, engine: &RemoteEngine, answer: PrefillResponse) -> Result<PrefillResponse, CallError> {
        let pages = (self.request.tokens.len() - 1) / self.model.page_tokens;
        let cached = u64::from(answer.pages_l1) + u64::from(answer.pages_l2) + u64::from(answer.pages_l3);
        if answer.pages as usize == pages && cached <= pages as u64 && answer.pages_lost <= answer.pages {
            return Ok(answer);
        }
        let reason = format!("it counts {} pages, {cached} of them cached, of {pages}", answer.pages);
        Err(CallError::violation(&engine.name, reason))
    }
}

/// Counts a fault against an engine when it is dropped after the deadline of a call without an
/// answer. Covers a call whose task was aborted because decode reached the same deadline first.
struct TimeoutWatch<'a> {
    engine: &'a RemoteEngine,
    deadline: Instant,
    is_answered: bool,
}

impl Drop for TimeoutWatch<'_> {
    fn drop(&mut self) {
        if !self.is_answered && Instant::now() >= self.deadline {
            self.engine.note_fault();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_keys_exclude_the_last_token() {
        for (tokens, pages) in [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)] {
            assert_eq!(Prompt::new(vec![7; tokens], 4).keys.len(), pages, "{tokens} tokens");
        }
    }

    #[test]
    fn prompt_below_one_page_has_its_own_affinity() {
        let a = Prompt::new(vec![1, 2], 4);
        let b = Prompt::new(vec![1, 3], 4);
        assert_ne!(a.affinity(), b.affinity());
        assert_eq!(a.affinity(), Prompt::new(vec![1, 2], 4).affinity());
    }
}
