//! The life cycle of one request in an engine.
//!
//! ```text
//! prefill:  bootstrap ──────────────▶ waiting ──▶ in flight ──▶ done
//! decode:   preallocate ─▶ transfer ─▶ waiting ──▶ running ────▶ done
//!               ▲                                     │
//!               └───────────── preempted ─────────────┘
//! ```
//!
//! | state | waits for | time limit |
//! | --- | --- | --- |
//! | bootstrap (prefill) | page reservation, then cached pages | queue timeout, then load timeout |
//! | preallocate (decode) | page reservation | queue timeout |
//! | transfer (decode) | pages read or followed | as configured, at most half of the time left |
//! | waiting | a place in a step (one forward pass over a batch) | deadline of the request |
//! | in flight (prefill) | pages computed and put | deadline of the request |
//! | running (decode) | generated tokens | deadline of the request |
//!
//! A preempted request releases its pages and waits in its first state again. Only decodes run out
//! of pages: a prefill reserves all its pages at admission, and each engine has one role. A request
//! that uses a damaged page of L1 is preempted too, whatever its role.
//!
//! Invariants:
//! - The request's deadline bounds every state. The queue timeout does not apply to a preempted
//!   request.
//! - A request ends in any state when its client disconnects, and releases all it holds.
//! - Preemption keeps the generated tokens. The client sees a pause, never a repeated token.

use crate::api::{
    ApiError, CacheMode, DecodeEvent, DecodeStart, FinishReason, PROMPT_EVENT_TOKENS, PrefillResponse, TokenLogprobs,
};
use crate::guides::StartedGuide;
use crate::http::NON_TOKEN_EVENTS_MAX;
use crate::metrics::{Metrics, PageSource, RequestOutcome};
use crate::pages::SequencePages;
use crate::request_memory::{RequestMemory, event_bytes};
use crate::sampling::{GuideJob, PromptRows, SampledToken, SamplingJob};
use crate::scheduler::RETRY_AFTER_MS;
use crate::store::OpenPut;
use larder_client::{NewPage, PutOutcome};
use larder_format::{MAX_TOKEN_IDS, PageKey, page_keys};
use larder_http::{PeerAddress, PeerCharge};
use larder_model::{Guide, Sampler, SamplingParams, StopMatcher, TokenStream, Tokenizer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestState {
    /// Prefill: waits for page reservation and for cached pages.
    Bootstrap,
    Preallocate,
    /// Decode: waits for pages from the store.
    Transfer,
    Waiting,
    /// Prefill: its pages are being computed or put.
    InFlight,
    /// Decode: its prompt is being computed, or it generates.
    Running,
}

impl RequestState {
    fn as_str(self) -> &'static str {
        match self {
            RequestState::Bootstrap => "bootstrap",
            RequestState::Preallocate => "preallocate",
            RequestState::Transfer => "transfer",
            RequestState::Waiting => "waiting",
            RequestState::InFlight => "in_flight",
            RequestState::Running => "running",
        }
    }
}

/// Records the state of one request in the metrics: the number of requests per state, and the time
/// spent in it. Dropping the timer records the end of the last state.
pub(crate) struct StateTimer {
    state: RequestState,
    since: Instant,
    metrics: Arc<Metrics>,
}

impl StateTimer {
    fn start(state: RequestState, metrics: Arc<Metrics>) -> Self {
        metrics.state_entered(state.as_str());
        Self { state, since: Instant::now(), metrics }
    }

    pub(crate) fn get(&self) -> RequestState {
        self.state
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    pub(crate) fn enter(&mut self, state: RequestState) {
        // Entering the current state again must not split its time.
        if self.state != state {
            *self = Self::start(state, self.metrics.clone());
        }
    }
}

impl Drop for StateTimer {
    fn drop(&mut self) {
        self.metrics.state_left(self.state.as_str(), self.since.elapsed());
    }
}

pub(crate) enum RequestKind {
    Prefill(PrefillOutput),
    Decode(Box<DecodeOutput>),
}

pub(crate) struct PrefillOutput {
    pub(crate) reply: oneshot::Sender<Result<PrefillResponse, ApiError>>,
    pub(crate) commits: Vec<JoinHandle<PutOutcome>>,
}

/// Pages of a decode request's prompt, as the router knows them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AwaitedPages {
    /// Leading pages that are in the store, or that a prefill engine is writing.
    pub(crate) awaited: usize,
    /// Leading pages that the store had before the prefill began. `None` without a prefill.
    pub(crate) cached: Option<usize>,
}

pub(crate) struct DecodeOutput {
    /// Channel to the client. Its capacity covers the whole answer, so that a step never waits for
    /// a slow client.
    pub(crate) events: mpsc::Sender<DecodeEvent>,
    pub(crate) await_pages: usize,
    /// Leading pages that the store had before the prefill of this request began.
    pub(crate) cached_pages: Option<usize>,
    sampler: Sampler,
    guide: Option<Guide>,
    /// Charge of the compiled constraint.
    _constraint: Option<Arc<PeerCharge>>,
    text: TokenStream,
    stops: StopMatcher,
    /// Tokens that end the generation.
    stop_tokens: Vec<u32>,
    /// The text of a stop token is a part of the answer.
    include_stop: bool,
    max_tokens: usize,
    min_tokens: usize,
    /// Number of best tokens to report for each token.
    logprobs: Option<usize>,
    prompt_logprobs: Option<PromptLogprobs>,
    pub(crate) generated: usize,
}

/// Log-probabilities of a prompt's tokens from the second one on, as far as they are computed.
struct PromptLogprobs {
    top: usize,
    done: Vec<TokenLogprobs>,
}

/// Properties of a generation besides its sampling parameters.
pub(crate) struct OutputSpec<'a> {
    /// Requested maximum, bounded by the context.
    pub(crate) max_tokens: usize,
    /// End the sequence unless the request ignores them.
    pub(crate) eos_tokens: Arc<[u32]>,
    pub(crate) prompt: &'a [u32],
    /// Constraint of the request, if it has one.
    pub(crate) guide: Option<StartedGuide>,
}

impl DecodeOutput {
    pub(crate) fn new(
        sampling: &SamplingParams,
        spec: OutputSpec<'_>,
        pages: AwaitedPages,
        tokenizer: &Tokenizer,
        events: mpsc::Sender<DecodeEvent>,
    ) -> Self {
        let eos_tokens: &[u32] = if sampling.ignore_eos { &[] } else { &spec.eos_tokens };
        let prompt_logprobs = sampling.prompt_logprobs;
        let (guide, constraint) = spec.guide.map(|started| (started.guide, started.charge)).unzip();
        Self {
            events,
            await_pages: pages.awaited,
            cached_pages: pages.cached,
            sampler: Sampler::new(sampling, spec.prompt, &spec.eos_tokens),
            guide,
            _constraint: constraint,
            text: tokenizer.stream(sampling.skip_special_tokens),
            stops: StopMatcher::new(sampling.stop.clone(), sampling.include_stop),
            stop_tokens: [eos_tokens, &sampling.stop_token_ids].concat(),
            include_stop: sampling.include_stop,
            max_tokens: spec.max_tokens,
            min_tokens: sampling.min_tokens,
            logprobs: sampling.logprobs.map(|top| top as usize),
            prompt_logprobs: prompt_logprobs.map(|top| PromptLogprobs { top: top as usize, done: Vec::new() }),
            generated: 0,
        }
    }

    /// Builds the event of the next token. The reason is `Some` for the last token.
    fn next(&mut self, token: SampledToken) -> (DecodeEvent, Option<FinishReason>) {
        let SampledToken { id, logprobs } = token;
        self.generated += 1;
        let ended = self.stop_tokens.contains(&id);
        let mut text = String::new();
        let mut stopped = false;
        let piece = if ended && !self.include_stop { None } else { self.text.push(id) };
        if let Some(piece) = piece {
            // Text before the minimum, or of the stop token itself, cannot end the answer.
            if ended || self.generated <= self.min_tokens {
                text.push_str(&self.stops.finish());
                text.push_str(&piece);
            } else {
                let step = self.stops.push(&piece);
                text.push_str(&step.text);
                stopped = step.stopped;
            }
        }
        // The constraint lets nothing follow, so no further step is needed.
        let is_complete = self.guide.as_ref().is_some_and(Guide::has_ended);
        let reason = if ended || stopped || is_complete {
            Some(FinishReason::Stop)
        } else if self.generated >= self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        };
        // Held-back text may complete a stop string, which takes precedence over the length limit.
        if reason.is_some() && !stopped {
            stopped = self.flush(&mut text);
        }
        let reason = if stopped { Some(FinishReason::Stop) } else { reason };
        (DecodeEvent::Token { id, text, logprobs }, reason)
    }

    /// Appends the text held back for incomplete characters and stop strings. Returns `true` if it
    /// contains a stop string.
    fn flush(&mut self, text: &mut String) -> bool {
        if let Some(rest) = self.text.finish() {
            let step = self.stops.push(&rest);
            text.push_str(&step.text);
            if step.stopped {
                return true;
            }
        }
        text.push_str(&self.stops.finish());
        false
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PageSourceCounts {
    l1: u32,
    l2: u32,
    l3: u32,
    followed: u32,
    computed: u32,
}

/// Times of the transitions that a prefill reply reports. A preempted request keeps its first
/// values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timestamps {
    pub(crate) arrived: Instant,
    pub(crate) admitted: Option<Instant>,
    pub(crate) loaded: Option<Instant>,
}

/// A request inside the engine, with its tokens, pages and open puts. Once it is submitted, only
/// the scheduler thread changes it, so it needs no lock.
pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) peer: PeerAddress,
    pub(crate) request_id: String,
    pub(crate) cache: CacheMode,
    pub(crate) kind: RequestKind,
    /// Prompt tokens followed by generated tokens. Never empty.
    pub(crate) tokens: Vec<u32>,
    prompt_tokens: usize,
    page_tokens: usize,
    pub(crate) keys: Vec<PageKey>,
    pub(crate) pages: SequencePages,
    /// Open puts by page index: pages whose computation began and that are not sealed yet. Dropping
    /// a put aborts it.
    pub(crate) puts: BTreeMap<usize, Box<dyn OpenPut>>,
    pub(crate) state: StateTimer,
    pub(crate) deadline: Instant,
    pub(crate) cancel: CancellationToken,
    /// Place in the bounded queue. Released at admission, so that a new request can enter.
    pub(crate) queue_place: Option<PeerCharge>,
    /// Place among the requests that hold pages, or were preempted. Its peer has a part of them.
    pub(crate) running_place: Option<PeerCharge>,
    memory: RequestMemory,
    pub(crate) times: Timestamps,
    sources: PageSourceCounts,
    prompt_tokens_computed: usize,
    /// Index of the first page that the sequence neither caches in L1 nor puts, because that page
    /// was forgotten. All later pages are computed from it.
    private_from: usize,
    /// Number of loads started. Tells the result of the current load from that of an earlier one.
    pub(crate) loads: u64,
    /// Number of its pages of which the device has read wrong bytes.
    pub(crate) damaged_copies: u32,
    /// True after the first preemption. Recomputed pages are then excluded from the counts.
    preempted: bool,
    metrics: Arc<Metrics>,
}

pub(crate) struct SequenceParams {
    pub(crate) id: u64,
    pub(crate) peer: PeerAddress,
    pub(crate) request_id: String,
    pub(crate) cache: CacheMode,
    pub(crate) tokens: Vec<u32>,
    pub(crate) kind: RequestKind,
    pub(crate) deadline: Instant,
    pub(crate) cancel: CancellationToken,
    pub(crate) queue_place: PeerCharge,
    pub(crate) memory: RequestMemory,
}

impl Sequence {
    pub(crate) fn new(params: SequenceParams, page_tokens: usize, metrics: Arc<Metrics>) -> Self {
        debug_assert!(!params.tokens.is_empty(), "the HTTP layer refuses empty prompts");
        let initial = match params.kind {
            RequestKind::Prefill(_) => RequestState::Bootstrap,
            RequestKind::Decode(_) => RequestState::Preallocate,
        };
        Self {
            id: params.id,
            peer: params.peer,
            request_id: params.request_id,
            cache: params.cache,
            kind: params.kind,
            prompt_tokens: params.tokens.len(),
            keys: page_keys(&params.tokens, page_tokens),
            tokens: params.tokens,
            page_tokens,
            pages: SequencePages::new(page_tokens),
            puts: BTreeMap::new(),
            state: StateTimer::start(initial, metrics.clone()),
            deadline: params.deadline,
            cancel: params.cancel,
            queue_place: Some(params.queue_place),
            running_place: None,
            memory: params.memory,
            times: Timestamps { arrived: Instant::now(), admitted: None, loaded: None },
            sources: PageSourceCounts::default(),
            prompt_tokens_computed: 0,
            private_from: usize::MAX,
            loads: 0,
            damaged_copies: 0,
            preempted: false,
            metrics,
        }
    }

    pub(crate) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Page `index`, to put. It must have a key. Pages of more than [`MAX_TOKEN_IDS`] tokens have
    /// no token ids. No store takes these, and they would need memory while the page waits.
    pub(crate) fn new_page(&self, index: usize) -> NewPage {
        let parent = index.checked_sub(1).map_or(PageKey::NONE, |before| self.keys[before]);
        let tokens = index * self.page_tokens..(index + 1) * self.page_tokens;
        let sent = self.tokens.get(tokens).filter(|tokens| tokens.len() <= MAX_TOKEN_IDS);
        let token_ids = sent.unwrap_or_default().to_vec();
        NewPage { key: self.keys[index], parent, position: index as u32, token_ids }
    }

    /// Number of whole pages below the last token. The last token is always computed here, because
    /// its logits are needed.
    pub(crate) fn cacheable_pages(&self) -> usize {
        (self.tokens.len() - 1) / self.page_tokens
    }

    /// Number of tokens whose KV must be loaded or computed before the next output. A prefill stops
    /// at its last whole page, because it produces nothing but pages.
    pub(crate) fn target(&self) -> usize {
        match self.kind {
            RequestKind::Prefill(_) => self.cacheable_pages() * self.page_tokens,
            RequestKind::Decode(_) => self.tokens.len(),
        }
    }

    /// Number of tokens still to compute up to the target.
    pub(crate) fn pending(&self) -> usize {
        debug_assert!(self.pages.computed() <= self.target(), "computed beyond the target");
        self.target() - self.pages.computed()
    }

    /// Number of pages to reserve at admission. A decode reserves room for one token beyond the
    /// prompt, so that it can start generating.
    pub(crate) fn pages_to_reserve(&self) -> usize {
        match self.kind {
            RequestKind::Prefill(_) => self.cacheable_pages(),
            RequestKind::Decode(_) => (self.tokens.len() + 1).div_ceil(self.page_tokens),
        }
    }

    /// Returns `false` if the request computes all its pages itself: twice, the device has read
    /// wrong bytes of a page.
    pub(crate) fn reads_cached_pages(&self) -> bool {
        self.damaged_copies < 2
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state.get(), RequestState::Waiting | RequestState::InFlight | RequestState::Running)
    }

    /// Returns `true` if the next step computes only the last generated token. After a preemption
    /// it is `false` until the earlier tokens are computed again.
    pub(crate) fn is_generating(&self) -> bool {
        matches!(&self.kind, RequestKind::Decode(output) if output.generated > 0) && self.pending() == 1
    }

    /// Enters the loading state. A prefill stays in bootstrap while its pages load.
    pub(crate) fn enter_loading(&mut self) {
        if matches!(self.kind, RequestKind::Decode(_)) {
            self.state.enter(RequestState::Transfer);
        }
    }

    pub(crate) fn enter_computing(&mut self) {
        self.state.enter(match self.kind {
            RequestKind::Prefill(_) => RequestState::InFlight,
            RequestKind::Decode(_) => RequestState::Running,
        });
    }

    pub(crate) fn count_pages(&mut self, source: PageSource, pages: usize) {
        if self.preempted || pages == 0 {
            return;
        }
        self.metrics.prompt_pages(source, pages);
        let counter = match source {
            PageSource::L1 => &mut self.sources.l1,
            PageSource::L2 => &mut self.sources.l2,
            PageSource::L3 | PageSource::L3Direct => &mut self.sources.l3,
            PageSource::Followed => &mut self.sources.followed,
            PageSource::Computed => &mut self.sources.computed,
        };
        *counter += pages as u32;
    }

    /// Counts `tokens` just computed. `whole` has the indices of the pages that they completed.
    /// Pages beyond the prompt are not counted.
    pub(crate) fn count_computed(&mut self, tokens: usize, whole: std::ops::Range<usize>) {
        if self.preempted {
            return;
        }
        let in_prompt = self.prompt_tokens.saturating_sub(self.pages.computed() - tokens).min(tokens);
        self.prompt_tokens_computed += in_prompt;
        let cacheable = (self.prompt_tokens - 1) / self.page_tokens;
        self.count_pages(PageSource::Computed, whole.filter(|&page| page < cacheable).count());
    }

    /// Returns `true` if the logits of the whole prompt are needed.
    pub(crate) fn wants_prompt_logits(&self) -> bool {
        matches!(&self.kind, RequestKind::Decode(output) if output.generated == 0 && output.prompt_logprobs.is_some())
    }

    /// Work on the logits of a chunk of `tokens` tokens, which begins at the first token that is
    /// not computed yet. Each row has `vocab` logits.
    pub(crate) fn sampling_job<'a>(&'a mut self, tokens: usize, logits: &'a [f32], vocab: usize) -> SamplingJob<'a> {
        let position = self.pages.computed();
        let is_last = position + tokens == self.target();
        let wants_prompt = self.wants_prompt_logits();
        let RequestKind::Decode(output) = &mut self.kind else { return SamplingJob::check(logits) };
        let prompt = output.prompt_logprobs.as_ref().filter(|_| wants_prompt).map(|prompt| PromptRows {
            next_tokens: &self.tokens[position + 1..self.tokens.len().min(position + tokens + 1)],
            top: prompt.top,
        });
        let generates = is_last && !logits.is_empty();
        SamplingJob {
            logits,
            vocab,
            sampler: generates.then_some(&mut output.sampler),
            guide: output.guide.as_mut().map(|guide| GuideJob { guide, memory: &self.memory }),
            logprobs: output.logprobs,
            prompt,
        }
    }

    /// Keeps the log-probabilities of the tokens after `position`. A preempted request computes
    /// some again, which are the same.
    pub(crate) fn keep_prompt_logprobs(&mut self, position: usize, logprobs: Vec<TokenLogprobs>) {
        if let RequestKind::Decode(output) = &mut self.kind
            && let Some(prompt) = &mut output.prompt_logprobs
        {
            prompt.done.truncate(position);
            prompt.done.extend(logprobs);
        }
    }

    /// Appends a sampled token and sends it. Returns the outcome if the request ends: it was the
    /// last token, the client is gone, or there is no memory for events that it does not read.
    pub(crate) fn generate(&mut self, token: SampledToken) -> Option<RequestOutcome> {
        let id = token.id;
        let RequestKind::Decode(output) = &mut self.kind else { return Some(RequestOutcome::Failed) };
        if output.generated == 0 {
            let start = DecodeStart {
                prompt_tokens: self.prompt_tokens as u32,
                pages_l1: self.sources.l1,
                pages_l2: self.sources.l2,
                pages_l3: self.sources.l3,
                pages_followed: self.sources.followed,
                tokens_computed: self.prompt_tokens_computed as u32,
            };
            self.metrics.first_token_seconds.observe(self.times.arrived.elapsed().as_secs_f64());
            let prompt = output.prompt_logprobs.take().map(|prompt| prompt.done).unwrap_or_default();
            let pieces =
                prompt.chunks(PROMPT_EVENT_TOKENS).map(|piece| DecodeEvent::Prompt { logprobs: piece.to_vec() });
            for event in std::iter::once(DecodeEvent::Start(start)).chain(pieces) {
                if output.events.try_send(event).is_err() {
                    return Some(RequestOutcome::Cancelled);
                }
            }
        }
        let (event, reason) = output.next(token);
        self.metrics.tokens_generated.inc();
        // The channel has room for all events, so an error means that the client is gone.
        if output.events.try_send(event).is_err() {
            return Some(RequestOutcome::Cancelled);
        }
        if let Some(finish_reason) = reason {
            let completion_tokens = output.generated as u32;
            let _ = output.events.try_send(DecodeEvent::End { finish_reason, completion_tokens });
            return Some(RequestOutcome::Done);
        }
        // The request is charged for the events of its prompt.
        let prompt_events = output.events.max_capacity().saturating_sub(output.max_tokens + NON_TOKEN_EVENTS_MAX);
        let unread = (output.events.max_capacity() - output.events.capacity()).saturating_sub(prompt_events);
        if !self.memory.keep_unread(unread, event_bytes(output.logprobs)) {
            let message = "too many events of answers wait for clients of your address; read answers as they arrive";
            let _ = output.events.try_send(DecodeEvent::Error(ApiError::busy(message, RETRY_AFTER_MS)));
            return Some(RequestOutcome::Refused);
        }
        self.push_token(id);
        None
    }

    fn push_token(&mut self, id: u32) {
        self.tokens.push(id);
        // The key of a page exists as soon as its last token is known, before its KV is computed.
        if self.tokens.len().is_multiple_of(self.page_tokens) {
            let page = &self.tokens[self.tokens.len() - self.page_tokens..];
            self.keys.push(PageKey::chain(self.keys.last(), page));
        }
    }

    /// Returns `true` if other requests may use page `index`, through L1 and the store.
    pub(crate) fn is_shareable(&self, index: usize) -> bool {
        index < self.private_from
    }

    pub(crate) fn private_from(&self) -> usize {
        self.private_from
    }

    /// Number of whole pages that the sequence keeps to itself.
    pub(crate) fn private_pages(&self) -> usize {
        let pages = self.cacheable_pages();
        pages - self.private_from.min(pages)
    }

    /// Number of tokens that a decode has generated.
    pub(crate) fn generated(&self) -> usize {
        match &self.kind {
            RequestKind::Prefill(_) => 0,
            RequestKind::Decode(output) => output.generated,
        }
    }

    /// Stops sharing from the first page whose key `is_forgotten`, and aborts its open puts.
    pub(crate) fn withhold(&mut self, is_forgotten: impl Fn(&PageKey) -> bool) {
        if let Some(first) = self.keys.iter().position(is_forgotten) {
            self.withhold_from(first);
        }
    }

    pub(crate) fn withhold_from(&mut self, first: usize) {
        self.private_from = self.private_from.min(first);
        // Dropping a put aborts it.
        self.puts.retain(|&page, _| page < first);
    }

    /// Builds the reply of a finished prefill. The caller fills in `pages_lost`.
    pub(crate) fn prefill_response(&self) -> PrefillResponse {
        let admitted = self.times.admitted.unwrap_or(self.times.arrived);
        let loaded = self.times.loaded.unwrap_or(admitted);
        PrefillResponse {
            pages: self.cacheable_pages() as u32,
            pages_l1: self.sources.l1,
            pages_l2: self.sources.l2,
            pages_l3: self.sources.l3,
            pages_computed: self.sources.computed,
            pages_lost: 0,
            queue_ms: (admitted - self.times.arrived).as_millis() as u64,
            load_ms: (loaded - admitted).as_millis() as u64,
            compute_ms: loaded.elapsed().as_millis() as u64,
        }
    }

    /// Releases all pages and puts and returns to the initial state. Keeps the generated tokens,
    /// whose keys and values are computed again after the next admission. Keeps the running place,
    /// too: requests of other peers could take it for long.
    pub(crate) fn preempt(&mut self) {
        self.pages.clear();
        self.puts.clear();
        // All pages are computed or loaded anew.
        self.private_from = usize::MAX;
        self.preempted = true;
        let initial = match &mut self.kind {
            RequestKind::Prefill(_) => RequestState::Bootstrap,
            RequestKind::Decode(output) => {
                // The wait for the prefill is over. Missing pages are computed at once.
                output.await_pages = 0;
                RequestState::Preallocate
            }
        };
        self.state.enter(initial);
    }

    pub(crate) fn was_preempted(&self) -> bool {
        self.preempted
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.cancel.is_cancelled()
            || match &self.kind {
                RequestKind::Prefill(output) => output.reply.is_closed(),
                RequestKind::Decode(output) => output.events.is_closed(),
            }
    }

    /// Ends the request with an error and cancels its background load.
    pub(crate) fn fail(self, error: ApiError, outcome: RequestOutcome) {
        tracing::debug!(request = %self.request_id, %error, "request failed");
        self.metrics.request_ended(outcome);
        // Stops a load that still runs, which returns its buffers.
        self.cancel.cancel();
        match self.kind {
            RequestKind::Prefill(output) => drop(output.reply.send(Err(error))),
            RequestKind::Decode(output) => drop(output.events.try_send(DecodeEvent::Error(error))),
        }
    }
}
