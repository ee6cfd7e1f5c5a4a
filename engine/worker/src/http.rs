//! HTTP server of an engine: validates requests, hands them to the scheduler, and streams the
//! answers.
//!
//! Invariants:
//! - The scheduler receives only requests that fit the model's context and vocabulary.
//! - When a client disconnects, the scheduler learns of it at once, whatever the state of the
//!   request.
//! - Every wait for the scheduler ends shortly after the request's deadline.
//! - No peer takes all places of the queue, all memory of requests and forgets, or all compilations
//!   of constraints. The scheduler divides the places of running requests.

use crate::api::{
    self, ApiError, CONTENT_TYPE_NDJSON, CacheMode, DecodeEvent, DecodeRequest, EngineInfo, EngineState, ErrorCode,
    FORGET_HOLD_MS_MAX, ForgetRequest, ForgetResponse, HEADER_RETRY_AFTER_MS, MemoryMax, PATH_DECODE, PATH_FLUSH,
    PATH_FORGET, PATH_HEALTH, PATH_METRICS, PATH_MODEL, PATH_MODEL_FILES, PATH_PREFILL, PATH_STATE,
    PROMPT_EVENT_TOKENS, PROMPT_LOGPROBS_TOKENS_MAX, PrefillRequest, PrefillResponse, REQUEST_ID_BYTES_MAX,
    SamplingParams,
};
use crate::commits::Commits;
use crate::forgets::ForgetBudget;
use crate::guides::{Guides, StartedGuide};
use crate::metrics::{Metrics, RequestOutcome};
use crate::request_memory::{RequestBudget, RequestMemory, RequestSize};
use crate::scheduler::{RETRY_AFTER_MS, SchedulerEvent};
use crate::sequence::{AwaitedPages, DecodeOutput, OutputSpec, PrefillOutput, RequestKind, Sequence, SequenceParams};
use crate::store::PageStore;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Json, Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use larder_http::{PeerAddress, PeerBudget, PeerCharge, Refusal, RequestBody};
use larder_model::Tokenizer;
use larder_runtime::lock::Mutex;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Maximum number of stream events beside the tokens: start, and end or error, with one to spare.
pub(crate) const NON_TOKEN_EVENTS_MAX: usize = 3;

/// Maximum time until the scheduler has flushed L1. A step of long prompts takes seconds.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Slack beyond a request's deadline before the handler abandons it. The scheduler enforces the
/// deadline, so only a stuck scheduler makes this expire.
const RESPONSE_GRACE: Duration = Duration::from_secs(1);
/// Maximum time until a constraint is compiled, with its wait for others.
const CONSTRAINT_TIME_MAX: Duration = Duration::from_secs(600);
/// Largest body parsed on the event loop, in bytes. Larger bodies would delay other connections and
/// go to a blocking thread.
const PARSE_INLINE_BYTES_MAX: usize = 256 << 10;

type BodyRejection = <RequestBody as FromRequest<Arc<AppState>>>::Rejection;

pub(crate) struct AppState {
    pub(crate) info: EngineInfo,
    pub(crate) vocab: usize,
    pub(crate) request_timeout: Duration,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) eos_tokens: Arc<[u32]>,
    pub(crate) guides: Arc<Guides>,
    pub(crate) files: BTreeMap<&'static str, Bytes>,
    pub(crate) metrics: Arc<Metrics>,
    /// Latest snapshot of the scheduler. [`AppState::state`] adds the number of store nodes.
    pub(crate) state: Arc<Mutex<EngineState>>,
    pub(crate) store: Arc<dyn PageStore>,
    pub(crate) commits: Arc<Commits>,
    /// Places in the queue. A request holds one until it is admitted, so they bound the scheduler's
    /// queue. A router is one peer, and has three quarters.
    pub(crate) queue: Arc<PeerBudget>,
    /// Places for requests whose constraint waits for its compilation. They hold none in the queue,
    /// so slow constraints delay no other request.
    pub(crate) constrained: Arc<PeerBudget>,
    pub(crate) memory: RequestBudget,
    pub(crate) forgets: ForgetBudget,
    pub(crate) memory_max: MemoryMax,
    pub(crate) sender: flume::Sender<SchedulerEvent>,
    pub(crate) next_id: AtomicU64,
    pub(crate) stop: CancellationToken,
}

impl AppState {
    pub(crate) fn state(&self) -> EngineState {
        // Clone under the lock, which the scheduler takes in every loop.
        let state = self.state.lock().clone();
        EngineState {
            store_nodes: self.store.nodes_connected() as u32,
            version: env!("CARGO_PKG_VERSION").into(),
            protocol: larder_client::PROTOCOL_VERSION,
            memory_max: self.memory_max.clone(),
            ..state
        }
    }
}

pub(crate) fn router(app: Arc<AppState>) -> Router {
    Router::new()
        .route(PATH_PREFILL, post(prefill))
        .route(PATH_DECODE, post(decode))
        .route(PATH_FORGET, post(forget))
        .route(PATH_FLUSH, post(flush))
        .route(PATH_MODEL, get(model))
        .route(&format!("{PATH_MODEL_FILES}/{{name}}"), get(model_file))
        .route(PATH_STATE, get(state))
        .route(PATH_HEALTH, get(health))
        .route(PATH_METRICS, get(metrics))
        .fallback(|| async {
            ApiError::new(ErrorCode::NotFound, "no such endpoint; see the list of paths in the documentation")
        })
        .with_state(app)
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after_ms = self.retry_after_ms;
        let mut response = (status, Json(self)).into_response();
        if let Some(ms) = retry_after_ms {
            response.headers_mut().insert(HEADER_RETRY_AFTER_MS, HeaderValue::from(ms));
        }
        response
    }
}

/// Answer to a request that the server refused before any handler saw it.
pub(crate) fn refusal(refusal: &Refusal) -> Response {
    let code = if refusal.status == StatusCode::SERVICE_UNAVAILABLE { ErrorCode::Busy } else { ErrorCode::BadRequest };
    let retry_after_ms = refusal.retry_after_s.map(|seconds| seconds * 1000);
    let error = ApiError { retry_after_ms, ..ApiError::new(code, refusal.message.clone()) };
    let mut response = error.into_response();
    *response.status_mut() = refusal.status;
    response
}

/// Represents the client of a request. Its drop, e.g. on disconnect, cancels the request and wakes
/// the scheduler.
struct CallerGuard {
    cancel: CancellationToken,
    sender: flume::Sender<SchedulerEvent>,
    answer_deadline: tokio::time::Instant,
    /// Charge for the events that wait in the answer.
    _memory: RequestMemory,
}

impl CallerGuard {
    /// Waits for an answer of the scheduler. Fails with an internal error at the deadline or if the
    /// channel closes.
    async fn wait<T>(&self, answer: impl Future<Output = Option<T>>) -> Result<T, ApiError> {
        tokio::time::timeout_at(self.answer_deadline, answer).await.ok().flatten().ok_or_else(engine_stopped)
    }
}

impl Drop for CallerGuard {
    fn drop(&mut self) {
        // Cancel before the wake-up: the scheduler must see the flag when it looks.
        self.cancel.cancel();
        // A full channel means that the scheduler is awake already.
        let _ = self.sender.try_send(SchedulerEvent::Wake);
    }
}

struct RequestParams {
    peer: PeerAddress,
    request_id: String,
    tokens: Vec<u32>,
    cache: CacheMode,
    deadline_ms: u64,
}

/// Request of a peer.
struct Received<T> {
    request: T,
    peer: PeerAddress,
    body_bytes: usize,
}

async fn prefill(
    State(app): State<Arc<AppState>>,
    body: Result<RequestBody, BodyRejection>,
) -> Result<Json<PrefillResponse>, ApiError> {
    let Received { request, peer, body_bytes } = app.accept(body).await?;
    let PrefillRequest { request_id, tokens, cache, deadline_ms } = request;
    let params = RequestParams { peer, request_id, tokens, cache, deadline_ms };
    app.check(&params).map_err(|e| app.refused(e))?;
    let pages = (params.tokens.len() - 1) / app.info.page_tokens as usize;
    // No whole page to publish: answer without the scheduler.
    if pages == 0 || !cache.uses_store() {
        app.metrics.request_ended(RequestOutcome::Done);
        return Ok(Json(PrefillResponse::default()));
    }
    let (reply, answer) = oneshot::channel();
    let kind = RequestKind::Prefill(PrefillOutput { reply, commits: Vec::new() });
    let size = RequestSize { body_bytes, tokens: params.tokens.len(), prompt_logprobs: None };
    let memory = app.memory(peer, size).map_err(|e| app.refused(e))?;
    let place = app.place(&app.queue, peer).map_err(|e| app.refused(e))?;
    let caller = app.submit(params, kind, place, memory).await.map_err(|e| app.refused(e))?;
    caller.wait(async { answer.await.ok() }).await?.map(Json)
}

async fn forget(
    State(app): State<Arc<AppState>>,
    body: Result<RequestBody, BodyRejection>,
) -> Result<Json<ForgetResponse>, ApiError> {
    let Received { request, peer, .. } = app.accept(body).await?;
    let ForgetRequest { tokens, hold_ms, deadline_ms } = request;
    if hold_ms > FORGET_HOLD_MS_MAX {
        let message = format!("hold_ms is {hold_ms}; it must be at most {FORGET_HOLD_MS_MAX}");
        return Err(ApiError::new(ErrorCode::BadRequest, message));
    }
    let deadline = tokio::time::Instant::now() + Duration::from_millis(deadline_ms).min(app.request_timeout);
    let forget = app.forgets.begin(peer, tokens, hold_ms > 0).ok_or_else(|| {
        ApiError::busy("too many forgets of your address are in progress; retry later", RETRY_AFTER_MS)
    })?;
    // Hashing a long prefix takes longer than the event loop may wait.
    let hashed = tokio::task::spawn_blocking(move || forget.keys());
    let keys = Arc::new(hashed.await.map_err(|_| engine_stopped())?);
    let forgetting = async {
        let (reply, dropped) = oneshot::channel();
        let event = SchedulerEvent::Forget { keys: keys.clone(), hold: Duration::from_millis(hold_ms), reply };
        app.sender.send_async(event).await.map_err(|_| engine_stopped())?;
        let pages = dropped.await.map_err(|_| engine_stopped())?;
        // After the scheduler has dropped the pages, no new put of them begins.
        app.commits.wait_for(keys.get()).await;
        Ok(Json(ForgetResponse { pages: pages as u32 }))
    };
    tokio::time::timeout_at(deadline, forgetting).await.unwrap_or_else(|_| {
        let message = "the engine is computing or a put of the pages is in flight; repeat the request";
        Err(ApiError::new(ErrorCode::Deadline, message))
    })
}

async fn flush(State(app): State<Arc<AppState>>) -> Result<Json<ForgetResponse>, ApiError> {
    let deadline = tokio::time::Instant::now() + FLUSH_TIMEOUT;
    let flushing = async {
        let (reply, dropped) = oneshot::channel();
        app.sender.send_async(SchedulerEvent::Flush { reply }).await.map_err(|_| engine_stopped())?;
        let pages = dropped.await.map_err(|_| engine_stopped())?;
        Ok(Json(ForgetResponse { pages: pages as u32 }))
    };
    tokio::time::timeout_at(deadline, flushing)
        .await
        .unwrap_or_else(|_| Err(ApiError::new(ErrorCode::Deadline, "the engine is computing; repeat the request")))
}

async fn decode(
    State(app): State<Arc<AppState>>,
    body: Result<RequestBody, BodyRejection>,
) -> Result<Response, ApiError> {
    let Received { request, peer, body_bytes } = app.accept(body).await?;
    let DecodeRequest { request_id, tokens, sampling, await_pages, cached_pages, cache, deadline_ms } = request;
    let mut params = RequestParams { peer, request_id, tokens, cache, deadline_ms };
    app.check(&params).and_then(|()| app.check_sampling(&sampling, params.tokens.len())).map_err(|e| app.refused(e))?;
    if sampling.prompt_logprobs.is_some() {
        // Pages have no logits, so the whole prompt is computed.
        params.cache = CacheMode::None;
    }
    let max_tokens = sampling.max_tokens.min(app.info.max_context as usize - params.tokens.len());
    let prompt_events = sampling.prompt_logprobs.map_or(0, |_| params.tokens.len().div_ceil(PROMPT_EVENT_TOKENS));
    // Room for the whole answer, so that a slow client never blocks a step.
    let (events, mut answer) = mpsc::channel(max_tokens + prompt_events + NON_TOKEN_EVENTS_MAX);
    let prompt_logprobs = sampling.prompt_logprobs.map(|top| top as usize);
    let size = RequestSize { body_bytes, tokens: params.tokens.len(), prompt_logprobs };
    let memory = app.memory(peer, size).map_err(|e| app.refused(e))?;
    let pages = AwaitedPages { awaited: await_pages as usize, cached: cached_pages.map(|pages| pages as usize) };
    let guide = app.guide(&sampling, peer, deadline_ms).await.map_err(|e| app.refused(e))?;
    let place = app.place(&app.queue, peer).map_err(|e| app.refused(e))?;
    let spec = OutputSpec { max_tokens, eos_tokens: app.eos_tokens.clone(), prompt: &params.tokens, guide };
    let output = DecodeOutput::new(&sampling, spec, pages, &app.tokenizer, events);
    let kind = RequestKind::Decode(Box::new(output));
    let caller = app.submit(params, kind, place, memory).await.map_err(|e| app.refused(e))?;
    // The status line is not sent before the first event, so an error can still set the HTTP
    // status.
    match caller.wait(answer.recv()).await? {
        DecodeEvent::Error(error) => Err(error),
        first => Ok(stream(first, answer, caller)),
    }
}

/// Streams the events as lines. The stream ends after `end` or `error`, and with an `error` if the
/// engine stops.
fn stream(first: DecodeEvent, answer: mpsc::Receiver<DecodeEvent>, caller: CallerGuard) -> Response {
    let lines = futures::stream::unfold(
        (Some(first), answer, caller, false),
        |(first, mut answer, caller, ended)| async move {
            if ended {
                return None;
            }
            let event = match first {
                Some(event) => event,
                None => caller.wait(answer.recv()).await.unwrap_or_else(DecodeEvent::Error),
            };
            let ended = matches!(event, DecodeEvent::End { .. } | DecodeEvent::Error(_));
            let mut line = serde_json::to_vec(&event).unwrap_or_default();
            line.push(b'\n');
            Some((Ok::<_, Infallible>(Bytes::from(line)), (None, answer, caller, ended)))
        },
    );
    ([(header::CONTENT_TYPE, CONTENT_TYPE_NDJSON)], Body::from_stream(lines)).into_response()
}

fn engine_stopped() -> ApiError {
    ApiError::new(ErrorCode::Internal, "the engine stopped before it finished the request; send it to another engine")
}

impl AppState {
    async fn accept<T: DeserializeOwned + Send + 'static>(
        &self,
        body: Result<RequestBody, BodyRejection>,
    ) -> Result<Received<T>, ApiError> {
        let bad = |problem: String| self.refused(ApiError::new(ErrorCode::BadRequest, problem));
        let RequestBody { bytes, charge, peer } = body.map_err(|(_, problem)| bad(problem.into()))?;
        let body_bytes = bytes.len();
        let parse = |bytes: Bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string());
        let parsed = match body_bytes {
            ..=PARSE_INLINE_BYTES_MAX => parse(bytes),
            // Parsing a long prompt takes milliseconds.
            _ => tokio::task::spawn_blocking(move || parse(bytes)).await.unwrap_or_else(|e| Err(e.to_string())),
        };
        drop(charge);
        Ok(Received { request: parsed.map_err(bad)?, peer, body_bytes })
    }

    fn refused(&self, error: ApiError) -> ApiError {
        self.metrics.request_ended(RequestOutcome::Refused);
        error
    }

    fn check(&self, params: &RequestParams) -> Result<(), ApiError> {
        let bad = |message: String| Err(ApiError::new(ErrorCode::BadRequest, message));
        if params.request_id.len() > REQUEST_ID_BYTES_MAX {
            return bad(format!(
                "request_id has {} bytes; at most {REQUEST_ID_BYTES_MAX} are allowed",
                params.request_id.len()
            ));
        }
        if params.tokens.is_empty() {
            return bad("tokens must hold at least one token".into());
        }
        if let Some(token) = params.tokens.iter().find(|&&token| token as usize >= self.vocab) {
            return bad(format!("token {token} is outside the model's vocabulary of {} tokens", self.vocab));
        }
        if params.deadline_ms == 0 {
            return bad("deadline_ms must be at least 1".into());
        }
        // `>=` leaves room for one generated token at least.
        if params.tokens.len() >= self.info.max_context as usize {
            let message = format!(
                "the prompt has {} tokens; prompt and answer together must fit a context of {} tokens",
                params.tokens.len(),
                self.info.max_context
            );
            return Err(ApiError::new(ErrorCode::ContextLengthExceeded, message));
        }
        Ok(())
    }

    fn check_sampling(&self, sampling: &SamplingParams, prompt_tokens: usize) -> Result<(), ApiError> {
        let bad = |message: String| ApiError::new(ErrorCode::BadRequest, message);
        api::check_sampling(sampling, self.vocab).map_err(|(field, problem)| bad(format!("'{field}' {problem}")))?;
        if sampling.prompt_logprobs.is_some() && prompt_tokens > PROMPT_LOGPROBS_TOKENS_MAX {
            let message = format!(
                "the prompt has {prompt_tokens} tokens; log-probabilities are reported for at most \
                 {PROMPT_LOGPROBS_TOKENS_MAX}"
            );
            return Err(bad(message));
        }
        Ok(())
    }

    /// Guide of a request's constraint, if it has one.
    async fn guide(
        &self,
        sampling: &SamplingParams,
        peer: PeerAddress,
        deadline_ms: u64,
    ) -> Result<Option<StartedGuide>, ApiError> {
        let Some(constraint) = &sampling.constraint else { return Ok(None) };
        let _place = self.place(&self.constrained, peer)?;
        let limit = Duration::from_millis(deadline_ms).min(self.request_timeout);
        let deadline = tokio::time::Instant::now() + limit.min(CONSTRAINT_TIME_MAX);
        let compiled = tokio::time::timeout_at(deadline, self.guides.get(constraint, peer, deadline)).await;
        let late = || ApiError::new(ErrorCode::Deadline, "the constraint was not compiled within the request's time");
        compiled.map_err(|_| late())?.map(Some)
    }

    /// Takes a place in a queue. Refuses with `busy` if the queue has none left for this peer: at
    /// once, so that the router can try another engine.
    fn place(&self, queue: &Arc<PeerBudget>, peer: PeerAddress) -> Result<PeerCharge, ApiError> {
        queue.of(peer).take(1).ok_or_else(|| {
            ApiError::busy("the engine's queue is full; retry later or use another engine", RETRY_AFTER_MS)
        })
    }

    /// Charges the memory of a request. Refuses with `busy` if there is none left for this peer.
    fn memory(&self, peer: PeerAddress, size: RequestSize) -> Result<RequestMemory, ApiError> {
        let message = "the engine has no memory left for requests; retry later or use another engine";
        self.memory.take(peer, size).ok_or_else(|| ApiError::busy(message, RETRY_AFTER_MS))
    }

    /// Hands a validated request to the scheduler. Refuses it with `busy` if the engine is
    /// stopping.
    async fn submit(
        &self,
        params: RequestParams,
        kind: RequestKind,
        queue_place: PeerCharge,
        memory: RequestMemory,
    ) -> Result<CallerGuard, ApiError> {
        if self.stop.is_cancelled() {
            return Err(ApiError::busy(
                "the engine is shutting down; send the request to another engine",
                RETRY_AFTER_MS,
            ));
        }
        let cancel = CancellationToken::new();
        // The cap bounds the time that a client can hold pages.
        let deadline = Instant::now() + Duration::from_millis(params.deadline_ms).min(self.request_timeout);
        let new = SequenceParams {
            // Relaxed: ids need to be unique and increasing only. The channel orders the requests.
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            peer: params.peer,
            request_id: params.request_id,
            cache: params.cache,
            tokens: params.tokens,
            kind,
            deadline,
            cancel: cancel.clone(),
            queue_place,
            memory: memory.clone(),
        };
        let answer_deadline = (deadline + RESPONSE_GRACE).into();
        let caller = CallerGuard { cancel, sender: self.sender.clone(), answer_deadline, _memory: memory };
        let sequence = Sequence::new(new, self.info.page_tokens as usize, self.metrics.clone());
        caller.wait(async { self.sender.send_async(SchedulerEvent::Submit(Box::new(sequence))).await.ok() }).await?;
        Ok(caller)
    }
}

async fn model(State(app): State<Arc<AppState>>) -> Json<EngineInfo> {
    Json(app.info.clone())
}

async fn model_file(State(app): State<Arc<AppState>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    // Only preloaded files are served, so no path can leave the model folder.
    match app.files.get(name.as_str()) {
        Some(bytes) => Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes.clone()).into_response()),
        None => Err(ApiError::new(ErrorCode::NotFound, "this engine serves no tokenizer file of that name")),
    }
}

async fn state(State(app): State<Arc<AppState>>) -> Json<EngineState> {
    Json(app.state())
}

async fn health(State(app): State<Arc<AppState>>) -> Result<&'static str, ApiError> {
    if app.stop.is_cancelled() || app.sender.is_disconnected() {
        return Err(ApiError::busy("the engine is shutting down or its scheduler has stopped", RETRY_AFTER_MS));
    }
    Ok("ok\n")
}

async fn metrics(State(app): State<Arc<AppState>>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], app.metrics.encode()).into_response()
}
