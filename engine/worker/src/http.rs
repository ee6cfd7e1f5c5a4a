//! The HTTP server of an engine: it checks what comes in, hands it to the scheduler, and streams what comes out.
//!
//! What always holds: a request is handed on only if it can be served at all; and when its caller goes away, in whatever
//! state it is, the scheduler is told at once.

use crate::api::{
    ApiError, BODY_BYTES_MAX, CONTENT_TYPE_NDJSON, CacheMode, DecodeEvent, DecodeRequest, EngineInfo, EngineState,
    ErrorCode, HEADER_RETRY_AFTER_MS, PATH_DECODE, PATH_HEALTH, PATH_METRICS, PATH_MODEL, PATH_MODEL_FILES,
    PATH_PREFILL, PATH_STATE, PrefillRequest, PrefillResponse, REQUEST_ID_BYTES_MAX, STOP_BYTES_MAX, STOP_STRINGS_MAX,
    SamplingParams,
};
use crate::metrics::{Ending, Metrics};
use crate::scheduler::{Event, RETRY_AFTER_MS};
use crate::sequence::{DecodeWork, NewSequence, PrefillWork, Sequence, Work};
use crate::store::PageStore;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Json, Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use larder_model::Tokenizer;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Events of a stream beside its tokens: start, and end or error.
const EVENTS_BESIDE_TOKENS: usize = 3;

/// Time beyond a request's deadline after which its answer is given up: the scheduler ends it by its deadline, so this
/// never happens unless something is broken.
const ANSWER_OVERRUN: Duration = Duration::from_secs(1);
/// Bytes of a body from which on it is parsed off the event loop.
const PARSE_INLINE_BYTES_MAX: usize = 256 << 10;

/// What the handlers share.
pub(crate) struct App {
    pub(crate) info: EngineInfo,
    pub(crate) vocab: usize,
    pub(crate) request_limit: Duration,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// End-of-sequence tokens.
    pub(crate) ends: Arc<[u32]>,
    pub(crate) files: BTreeMap<&'static str, Bytes>,
    pub(crate) metrics: Arc<Metrics>,
    /// How the scheduler is doing; [`App::state`] adds the store.
    pub(crate) state: Arc<Mutex<EngineState>>,
    pub(crate) store: Arc<dyn PageStore>,
    /// Places in the queue.
    pub(crate) queue: Arc<Semaphore>,
    pub(crate) sender: flume::Sender<Event>,
    pub(crate) next_id: AtomicU64,
    pub(crate) stop: CancellationToken,
}

impl App {
    /// How the engine is doing now.
    pub(crate) fn state(&self) -> EngineState {
        let state = self.state.lock().clone();
        EngineState { store_nodes: self.store.nodes_connected() as u32, ..state }
    }
}

/// The routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(PATH_PREFILL, post(prefill))
        .route(PATH_DECODE, post(decode))
        .route(PATH_MODEL, get(model))
        .route(&format!("{PATH_MODEL_FILES}/{{name}}"), get(model_file))
        .route(PATH_STATE, get(state))
        .route(PATH_HEALTH, get(health))
        .route(PATH_METRICS, get(metrics))
        .fallback(|| async { ApiError::new(ErrorCode::NotFound, "there is nothing under this path") })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
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

/// The caller of a request; tells the scheduler when it goes away.
struct Caller {
    cancel: CancellationToken,
    sender: flume::Sender<Event>,
    /// When the scheduler's answer is no longer waited for.
    give_up_at: tokio::time::Instant,
}

impl Caller {
    /// What the scheduler answers, or that it does not.
    async fn wait<T>(&self, answer: impl Future<Output = Option<T>>) -> Result<T, ApiError> {
        tokio::time::timeout_at(self.give_up_at, answer).await.ok().flatten().ok_or_else(stopped)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.cancel.cancel();
        // If the channel is full the scheduler is awake anyway.
        let _ = self.sender.try_send(Event::Nudge);
    }
}

/// What both kinds of request have.
struct Ticket {
    request_id: String,
    tokens: Vec<u32>,
    cache: CacheMode,
    deadline_ms: u64,
}

async fn prefill(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<PrefillResponse>, ApiError> {
    let PrefillRequest { request_id, tokens, cache, deadline_ms } = app.accept(body).await?;
    let ticket = Ticket { request_id, tokens, cache, deadline_ms };
    app.check(&ticket).map_err(|e| app.refused(e))?;
    let pages = (ticket.tokens.len() - 1) / app.info.page_tokens as usize;
    if pages == 0 || !cache.uses_store() {
        app.metrics.request_ended(Ending::Done);
        return Ok(Json(PrefillResponse::default()));
    }
    let (reply, answer) = oneshot::channel();
    let work = Work::Prefill(PrefillWork { reply, commits: Vec::new() });
    let caller = app.submit(ticket, work).await.map_err(|e| app.refused(e))?;
    caller.wait(async { answer.await.ok() }).await?.map(Json)
}

async fn decode(State(app): State<Arc<App>>, body: Result<Bytes, BytesRejection>) -> Result<Response, ApiError> {
    let DecodeRequest { request_id, tokens, sampling, await_pages, cache, deadline_ms } = app.accept(body).await?;
    let ticket = Ticket { request_id, tokens, cache, deadline_ms };
    app.check(&ticket).and_then(|()| check_sampling(&sampling)).map_err(|e| app.refused(e))?;
    let max_tokens = sampling.max_tokens.min(app.info.max_context as usize - ticket.tokens.len());
    let (events, mut answer) = mpsc::channel(max_tokens + EVENTS_BESIDE_TOKENS);
    let work = DecodeWork::new(&sampling, max_tokens, await_pages as usize, &app.tokenizer, app.ends.clone(), events);
    let caller = app.submit(ticket, Work::Decode(Box::new(work))).await.map_err(|e| app.refused(e))?;
    // Until the first event the answer may still be a plain error.
    match caller.wait(answer.recv()).await? {
        DecodeEvent::Error(error) => Err(error),
        first => Ok(stream(first, answer, caller)),
    }
}

/// The events as lines; ends after `end` or `error`, and with an `error` if the engine stops.
fn stream(first: DecodeEvent, answer: mpsc::Receiver<DecodeEvent>, caller: Caller) -> Response {
    let lines =
        futures::stream::unfold((Some(first), answer, caller, false), |(first, mut answer, caller, over)| async move {
            if over {
                return None;
            }
            let event = match first {
                Some(event) => event,
                None => caller.wait(answer.recv()).await.unwrap_or_else(DecodeEvent::Error),
            };
            let over = matches!(event, DecodeEvent::End { .. } | DecodeEvent::Error(_));
            let mut line = serde_json::to_vec(&event).unwrap_or_default();
            line.push(b'\n');
            Some((Ok::<_, Infallible>(Bytes::from(line)), (None, answer, caller, over)))
        });
    ([(header::CONTENT_TYPE, CONTENT_TYPE_NDJSON)], Body::from_stream(lines)).into_response()
}

fn stopped() -> ApiError {
    ApiError::new(ErrorCode::Internal, "the engine stopped before the request was done")
}

impl App {
    /// The body, if it is what it should be.
    async fn accept<T: DeserializeOwned + Send + 'static>(
        &self,
        body: Result<Bytes, BytesRejection>,
    ) -> Result<T, ApiError> {
        let parse = |bytes: Bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string());
        let parsed = match body {
            Ok(bytes) if bytes.len() <= PARSE_INLINE_BYTES_MAX => parse(bytes),
            Ok(bytes) => tokio::task::spawn_blocking(move || parse(bytes)).await.unwrap_or_else(|e| Err(e.to_string())),
            Err(rejection) => Err(rejection.body_text()),
        };
        parsed.map_err(|problem| self.refused(ApiError::new(ErrorCode::BadRequest, problem)))
    }

    fn refused(&self, error: ApiError) -> ApiError {
        self.metrics.request_ended(Ending::Refused);
        error
    }

    fn check(&self, ticket: &Ticket) -> Result<(), ApiError> {
        let bad = |message: String| Err(ApiError::new(ErrorCode::BadRequest, message));
        if ticket.request_id.len() > REQUEST_ID_BYTES_MAX {
            return bad(format!("request_id is longer than {REQUEST_ID_BYTES_MAX} bytes"));
        }
        if ticket.tokens.is_empty() {
            return bad("tokens is empty".into());
        }
        if let Some(token) = ticket.tokens.iter().find(|&&token| token as usize >= self.vocab) {
            return bad(format!("token {token} is not in the model's vocabulary of {}", self.vocab));
        }
        if ticket.deadline_ms == 0 {
            return bad("deadline_ms must be at least 1".into());
        }
        if ticket.tokens.len() >= self.info.max_context as usize {
            let message = format!(
                "the prompt has {} tokens; prompt and answer together may have {}",
                ticket.tokens.len(),
                self.info.max_context
            );
            return Err(ApiError::new(ErrorCode::ContextLengthExceeded, message));
        }
        Ok(())
    }

    /// Hands a checked request to the scheduler.
    async fn submit(&self, ticket: Ticket, work: Work) -> Result<Caller, ApiError> {
        if self.stop.is_cancelled() {
            return Err(ApiError::busy("the engine is shutting down", RETRY_AFTER_MS));
        }
        let Ok(queue_slot) = self.queue.clone().try_acquire_owned() else {
            return Err(ApiError::busy("the engine's queue is full", RETRY_AFTER_MS));
        };
        let cancel = CancellationToken::new();
        let deadline = Instant::now() + Duration::from_millis(ticket.deadline_ms).min(self.request_limit);
        let new = NewSequence {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            request_id: ticket.request_id,
            cache: ticket.cache,
            tokens: ticket.tokens,
            work,
            deadline,
            cancel: cancel.clone(),
            queue_slot,
        };
        let caller = Caller { cancel, sender: self.sender.clone(), give_up_at: (deadline + ANSWER_OVERRUN).into() };
        let sequence = Sequence::new(new, self.info.page_tokens as usize, self.metrics.clone());
        caller.wait(async { self.sender.send_async(Event::Submit(Box::new(sequence))).await.ok() }).await?;
        Ok(caller)
    }
}

fn check_sampling(sampling: &SamplingParams) -> Result<(), ApiError> {
    let bad = |message: String| Err(ApiError::new(ErrorCode::BadRequest, message));
    if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
        return bad(format!("temperature {} is not a number from 0", sampling.temperature));
    }
    if !(0.0..=1.0).contains(&sampling.top_p) {
        return bad(format!("top_p {} is not from 0 to 1", sampling.top_p));
    }
    if sampling.max_tokens == 0 {
        return bad("max_tokens must be at least 1".into());
    }
    if sampling.stop.len() > STOP_STRINGS_MAX {
        return bad(format!("more than {STOP_STRINGS_MAX} stop strings"));
    }
    if sampling.stop.iter().any(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX) {
        return bad(format!("a stop string must have 1 to {STOP_BYTES_MAX} bytes"));
    }
    Ok(())
}

async fn model(State(app): State<Arc<App>>) -> Json<EngineInfo> {
    Json(app.info.clone())
}

async fn model_file(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    match app.files.get(name.as_str()) {
        Some(bytes) => Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes.clone()).into_response()),
        None => Err(ApiError::new(ErrorCode::NotFound, "the model has no such file")),
    }
}

async fn state(State(app): State<Arc<App>>) -> Json<EngineState> {
    Json(app.state())
}

async fn health(State(app): State<Arc<App>>) -> Result<&'static str, ApiError> {
    match app.stop.is_cancelled() || app.sender.is_disconnected() {
        true => Err(ApiError::busy("the engine is not serving", RETRY_AFTER_MS)),
        false => Ok("ok\n"),
    }
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], app.metrics.encode()).into_response()
}
