//! One request on its way through an engine.
//!
//! A prefill goes bootstrap → waiting → in flight → done, a decode preallocate → transfer → waiting → running → done:
//!
//! | state | what it waits for | ends at the latest by |
//! | --- | --- | --- |
//! | bootstrap (prefill) | pages reserved, cached pages read | queue limit (once put back: its deadline), then load limit |
//! | preallocate (decode) | pages reserved | queue limit (once put back: its deadline) |
//! | transfer (decode) | pages read and followed | load limit; while it follows, follow limit or grace, and half of its remaining time |
//! | waiting | a place in a step | the request's deadline |
//! | in flight (prefill) | its pages computed and put | the request's deadline |
//! | running (decode) | its tokens | the request's deadline |
//!
//! In every state the request also ends, and lets go of all it holds, when the caller goes away.

use crate::api::{ApiError, CacheMode, DecodeEvent, DecodeStart, FinishReason, PrefillResponse};
use crate::metrics::{Ending, Metrics, PageSource};
use crate::pages::SequencePages;
use crate::store::OpenPut;
use larder_client::PutOutcome;
use larder_format::{PageKey, page_keys};
use larder_model::{Sampler, SamplingParams, StopMatcher, TokenStream, Tokenizer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Prefill: pages are being reserved and cached ones read.
    Bootstrap,
    /// Decode: pages are being reserved.
    Preallocate,
    /// Decode: pages are arriving.
    Transfer,
    /// Ready to be computed.
    Waiting,
    /// Prefill: being computed.
    InFlight,
    /// Decode: being computed or generating.
    Running,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            State::Bootstrap => "bootstrap",
            State::Preallocate => "preallocate",
            State::Transfer => "transfer",
            State::Waiting => "waiting",
            State::InFlight => "in_flight",
            State::Running => "running",
        }
    }
}

/// Counts a request in its state, and the time it spends there.
pub(crate) struct StateClock {
    state: State,
    since: Instant,
    metrics: Arc<Metrics>,
}

impl StateClock {
    fn start(state: State, metrics: Arc<Metrics>) -> Self {
        metrics.state_entered(state.as_str());
        Self { state, since: Instant::now(), metrics }
    }

    pub(crate) fn get(&self) -> State {
        self.state
    }

    /// Time in this state.
    pub(crate) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    pub(crate) fn enter(&mut self, state: State) {
        if self.state != state {
            *self = Self::start(state, self.metrics.clone());
        }
    }
}

impl Drop for StateClock {
    fn drop(&mut self) {
        self.metrics.state_left(self.state.as_str(), self.since.elapsed());
    }
}

/// What a request wants, and where its answer goes.
pub(crate) enum Work {
    Prefill(PrefillWork),
    Decode(Box<DecodeWork>),
}

/// A prefill's answer.
pub(crate) struct PrefillWork {
    pub(crate) reply: oneshot::Sender<Result<PrefillResponse, ApiError>>,
    /// Puts whose outcome the answer waits for.
    pub(crate) commits: Vec<JoinHandle<PutOutcome>>,
}

/// A decode's text, and where it goes.
pub(crate) struct DecodeWork {
    /// Has room for the whole answer, so that a step never waits for a slow reader.
    pub(crate) events: mpsc::Sender<DecodeEvent>,
    pub(crate) await_pages: usize,
    sampler: Sampler,
    text: TokenStream,
    stops: StopMatcher,
    ends: Arc<[u32]>,
    ignore_eos: bool,
    max_tokens: usize,
    pub(crate) generated: usize,
}

impl DecodeWork {
    /// `max_tokens` is what the request asks for, bounded by the context; `ends` are the end-of-sequence tokens.
    pub(crate) fn new(
        sampling: &SamplingParams,
        max_tokens: usize,
        await_pages: usize,
        tokenizer: &Tokenizer,
        ends: Arc<[u32]>,
        events: mpsc::Sender<DecodeEvent>,
    ) -> Self {
        Self {
            events,
            await_pages,
            sampler: Sampler::new(sampling),
            text: tokenizer.stream(),
            stops: StopMatcher::new(sampling.stop.clone()),
            ends,
            ignore_eos: sampling.ignore_eos,
            max_tokens,
            generated: 0,
        }
    }

    /// Chooses the next token and makes its event; with a reason if it is the last.
    fn next(&mut self, logits: &[f32]) -> (u32, DecodeEvent, Option<FinishReason>) {
        let id = self.sampler.sample(logits);
        self.generated += 1;
        let ended = !self.ignore_eos && self.ends.contains(&id);
        let mut text = String::new();
        let mut stopped = false;
        if !ended && let Some(piece) = self.text.push(id) {
            let step = self.stops.push(&piece);
            text.push_str(&step.text);
            stopped = step.stopped;
        }
        let reason = match () {
            () if ended || stopped => Some(FinishReason::Stop),
            () if self.generated >= self.max_tokens => Some(FinishReason::Length),
            () => None,
        };
        if reason.is_some() && !stopped {
            stopped = self.flush(&mut text);
        }
        let reason = if stopped { Some(FinishReason::Stop) } else { reason };
        (id, DecodeEvent::Token { id, text }, reason)
    }

    /// Adds the text that was held back; whether a stop string showed up in it.
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

/// How many pages of the prompt came from where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sources {
    l1: u32,
    l2: u32,
    l3: u32,
    followed: u32,
    computed: u32,
}

/// When what happened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) arrived: Instant,
    pub(crate) admitted: Option<Instant>,
    pub(crate) loaded: Option<Instant>,
}

/// A request.
pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) request_id: String,
    pub(crate) cache: CacheMode,
    pub(crate) work: Work,
    /// Prompt, then what was generated.
    pub(crate) tokens: Vec<u32>,
    prompt_tokens: usize,
    page_tokens: usize,
    /// Keys of the whole pages of `tokens`.
    pub(crate) keys: Vec<PageKey>,
    pub(crate) pages: SequencePages,
    /// Pages that are being computed and put.
    pub(crate) puts: BTreeMap<usize, Box<dyn OpenPut>>,
    pub(crate) state: StateClock,
    pub(crate) deadline: Instant,
    pub(crate) cancel: CancellationToken,
    /// Place in the queue; given back when pages are reserved.
    pub(crate) queue_slot: Option<OwnedSemaphorePermit>,
    pub(crate) times: Times,
    sources: Sources,
    prompt_tokens_computed: usize,
    /// Whether it was put back for want of pages: its second way does not count.
    preempted: bool,
    metrics: Arc<Metrics>,
}

/// What a request begins with.
pub(crate) struct NewSequence {
    pub(crate) id: u64,
    pub(crate) request_id: String,
    pub(crate) cache: CacheMode,
    pub(crate) tokens: Vec<u32>,
    pub(crate) work: Work,
    pub(crate) deadline: Instant,
    pub(crate) cancel: CancellationToken,
    pub(crate) queue_slot: OwnedSemaphorePermit,
}

impl Sequence {
    pub(crate) fn new(new: NewSequence, page_tokens: usize, metrics: Arc<Metrics>) -> Self {
        let first = match new.work {
            Work::Prefill(_) => State::Bootstrap,
            Work::Decode(_) => State::Preallocate,
        };
        Self {
            id: new.id,
            request_id: new.request_id,
            cache: new.cache,
            work: new.work,
            prompt_tokens: new.tokens.len(),
            keys: page_keys(&new.tokens, page_tokens),
            tokens: new.tokens,
            page_tokens,
            pages: SequencePages::new(page_tokens),
            puts: BTreeMap::new(),
            state: StateClock::start(first, metrics.clone()),
            deadline: new.deadline,
            cancel: new.cancel,
            queue_slot: Some(new.queue_slot),
            times: Times { arrived: Instant::now(), admitted: None, loaded: None },
            sources: Sources::default(),
            prompt_tokens_computed: 0,
            preempted: false,
            metrics,
        }
    }

    /// Tokens per page.
    pub(crate) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Whole pages below the last token: those that may come from a cache.
    pub(crate) fn cacheable_pages(&self) -> usize {
        self.tokens.len().saturating_sub(1) / self.page_tokens
    }

    /// Tokens to compute before there is something to answer.
    pub(crate) fn target(&self) -> usize {
        match self.work {
            Work::Prefill(_) => self.cacheable_pages() * self.page_tokens,
            Work::Decode(_) => self.tokens.len(),
        }
    }

    /// Tokens still to be computed.
    pub(crate) fn pending(&self) -> usize {
        self.target().saturating_sub(self.pages.computed())
    }

    /// Pages to reserve: all of the prompt's, and one more token's for a decode.
    pub(crate) fn pages_to_reserve(&self) -> usize {
        match self.work {
            Work::Prefill(_) => self.cacheable_pages(),
            Work::Decode(_) => (self.tokens.len() + 1).div_ceil(self.page_tokens),
        }
    }

    /// Whether it holds pages and could compute.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state.get(), State::Waiting | State::InFlight | State::Running)
    }

    /// Whether it generates: all but the last token is computed.
    pub(crate) fn is_generating(&self) -> bool {
        matches!(&self.work, Work::Decode(work) if work.generated > 0) && self.pending() == 1
    }

    /// The state while pages arrive.
    pub(crate) fn enter_loading(&mut self) {
        if matches!(self.work, Work::Decode(_)) {
            self.state.enter(State::Transfer);
        }
    }

    /// The state while it is computed.
    pub(crate) fn enter_computing(&mut self) {
        self.state.enter(match self.work {
            Work::Prefill(_) => State::InFlight,
            Work::Decode(_) => State::Running,
        });
    }

    /// Counts pages of the prompt.
    pub(crate) fn count_pages(&mut self, source: PageSource, pages: usize) {
        if self.preempted || pages == 0 {
            return;
        }
        self.metrics.prompt_pages(source, pages);
        let counter = match source {
            PageSource::L1 => &mut self.sources.l1,
            PageSource::L2 => &mut self.sources.l2,
            PageSource::L3 => &mut self.sources.l3,
            PageSource::Followed => &mut self.sources.followed,
            PageSource::Computed => &mut self.sources.computed,
        };
        *counter += pages as u32;
    }

    /// Counts computed tokens; `whole` are the pages that they completed.
    pub(crate) fn count_computed(&mut self, tokens: usize, whole: std::ops::Range<usize>) {
        if self.preempted {
            return;
        }
        let in_prompt = self.prompt_tokens.saturating_sub(self.pages.computed() - tokens).min(tokens);
        self.prompt_tokens_computed += in_prompt;
        let cacheable = (self.prompt_tokens - 1) / self.page_tokens;
        self.count_pages(PageSource::Computed, whole.filter(|&page| page < cacheable).count());
    }

    /// Samples the next token from `logits` and sends it; the reason if it is the last, or if the reader is gone.
    pub(crate) fn generate(&mut self, logits: &[f32]) -> Option<Ending> {
        let Work::Decode(work) = &mut self.work else { return Some(Ending::Failed) };
        if work.generated == 0 {
            let start = DecodeStart {
                prompt_tokens: self.prompt_tokens as u32,
                pages_l1: self.sources.l1,
                pages_l2: self.sources.l2,
                pages_l3: self.sources.l3,
                pages_followed: self.sources.followed,
                tokens_computed: self.prompt_tokens_computed as u32,
            };
            self.metrics.first_token_seconds.observe(self.times.arrived.elapsed().as_secs_f64());
            if work.events.try_send(DecodeEvent::Start(start)).is_err() {
                return Some(Ending::Cancelled);
            }
        }
        let (id, event, reason) = work.next(logits);
        self.metrics.tokens_generated.inc();
        if work.events.try_send(event).is_err() {
            return Some(Ending::Cancelled);
        }
        if let Some(finish_reason) = reason {
            let completion_tokens = work.generated as u32;
            let _ = work.events.try_send(DecodeEvent::End { finish_reason, completion_tokens });
            return Some(Ending::Done);
        }
        self.push_token(id);
        None
    }

    fn push_token(&mut self, id: u32) {
        self.tokens.push(id);
        if self.tokens.len().is_multiple_of(self.page_tokens) {
            let page = &self.tokens[self.tokens.len() - self.page_tokens..];
            self.keys.push(PageKey::chain(self.keys.last(), page));
        }
    }

    /// What a prefill answers when all is computed.
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

    /// Lets go of its pages and begins again from the queue, keeping what was generated.
    pub(crate) fn preempt(&mut self) {
        self.pages.clear();
        self.puts.clear();
        self.preempted = true;
        let first = match &mut self.work {
            Work::Prefill(_) => State::Bootstrap,
            Work::Decode(work) => {
                work.await_pages = 0;
                State::Preallocate
            }
        };
        self.state.enter(first);
    }

    /// Whether it was put back for want of pages.
    pub(crate) fn was_preempted(&self) -> bool {
        self.preempted
    }

    /// Whether nobody waits for the answer any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.cancel.is_cancelled()
            || match &self.work {
                Work::Prefill(work) => work.reply.is_closed(),
                Work::Decode(work) => work.events.is_closed(),
            }
    }

    /// Ends it with an error.
    pub(crate) fn fail(self, error: ApiError, ending: Ending) {
        tracing::debug!(request = %self.request_id, %error, "request failed");
        self.metrics.request_ended(ending);
        self.cancel.cancel();
        match self.work {
            Work::Prefill(work) => drop(work.reply.send(Err(error))),
            Work::Decode(work) => drop(work.events.try_send(DecodeEvent::Error(error))),
        }
    }
}
