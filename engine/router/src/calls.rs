//! Client of the engines' HTTP interface. No other module of the router speaks it.
//!
//! Invariants:
//!
//! - Every call ends by its deadline.
//! - No answer takes more memory than its named bound.
//! - At most [`ENGINES_MAX`] calls of operators to all engines run at a time: for their state,
//!   forgets and flushes.
//! - Dropping a call, or the stream it returned, closes the connection. The engine takes that as a
//!   cancellation.

use crate::engines::{ENGINES_MAX, RemoteEngine};
use crate::json::reason;
use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use larder_http::PeerAddress;
use larder_worker::api::{
    ApiError, DecodeEvent, DecodeRequest, EngineInfo, EngineState, ErrorCode, ForgetRequest, ForgetResponse,
    HEADER_RETRY_AFTER_MS, PATH_DECODE, PATH_FLUSH, PATH_FORGET, PATH_MODEL, PATH_MODEL_FILES, PATH_PREFILL,
    PATH_STATE, PrefillRequest, PrefillResponse,
};
use reqwest::header::CONTENT_TYPE;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Maximum size of a JSON answer, in bytes. Those of engines take at most a few KiB. A longer one
/// violates the interface, unless it is the body of an error.
pub const ANSWER_BYTES_MAX: usize = 32 << 10;
/// Maximum size of one line of a stream, in bytes. The log-probabilities of 256 tokens of a prompt
/// take half of it, with the 20 best tokens of each.
pub const LINE_BYTES_MAX: usize = 256 << 10;
/// Time an idle pooled connection stays open. It is shorter than usual server timeouts: reusing a
/// connection that the server is just closing would look like a lost engine.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Failure of a call to an engine. `engine` is its name, or its URL before it has joined.
#[derive(Debug, Clone, Error)]
pub enum CallError {
    /// The connection failed or broke. A stream that ends without an `end` event counts as broken.
    #[error("lost engine {engine}: {reason}")]
    Lost { engine: String, reason: String },
    /// The answer violates the interface. No engine of Larder sends such an answer, whatever the
    /// request.
    #[error("engine {engine} sent a wrong answer: {reason}")]
    Violation { engine: String, reason: String },
    /// The answer keeps to the interface and exceeds a limit of this router.
    #[error("the answer of engine {engine} exceeds the router's limit of text")]
    TooLong { engine: String },
    #[error("engine {engine} refused the request: {error}")]
    Refused { engine: String, error: ApiError },
    #[error("engine {engine} did not answer before the deadline")]
    Deadline { engine: String },
}

impl CallError {
    pub(crate) fn lost(engine: &str, reason: impl std::fmt::Display) -> Self {
        CallError::Lost { engine: engine.into(), reason: reason.to_string() }
    }

    pub(crate) fn violation(engine: &str, reason: impl std::fmt::Display) -> Self {
        CallError::Violation { engine: engine.into(), reason: reason.to_string() }
    }

    /// Failure of the router itself before the call. The engine is not at fault.
    fn unsent(engine: &str, reason: impl std::fmt::Display) -> Self {
        let message = format!("the router cannot write the request: {reason}");
        CallError::Refused { engine: engine.into(), error: ApiError::new(ErrorCode::BadRequest, message) }
    }

    /// Returns `true` if another engine may succeed. `NotFound` counts: perhaps only this engine,
    /// or a proxy before it, lacks the endpoint. So does an unknown code of a newer engine. After
    /// the deadline no engine has time left.
    pub fn is_retryable(&self) -> bool {
        match self {
            CallError::Lost { .. } | CallError::Violation { .. } => true,
            CallError::Refused { error, .. } => {
                matches!(
                    error.code,
                    ErrorCode::Busy
                        | ErrorCode::Internal
                        | ErrorCode::NotFound
                        | ErrorCode::PagesUnusable
                        | ErrorCode::Unknown
                )
            }
            CallError::TooLong { .. } | CallError::Deadline { .. } => false,
        }
    }

    /// Returns `true` if the request does not fit this engine's context. An engine with a longer
    /// one may succeed.
    pub fn exceeds_context(&self) -> bool {
        matches!(self, CallError::Refused { error, .. } if error.code == ErrorCode::ContextLengthExceeded)
    }
}

/// HTTP client for engines. Clones share one connection pool. Every call has a deadline, because an
/// engine may accept a connection and never answer.
#[derive(Debug, Clone)]
pub struct EngineClient {
    http: reqwest::Client,
    /// One permit for each call that an operator's request makes to every engine.
    operator_calls: Arc<Semaphore>,
}

/// File of a model from an engine. Its bytes are as the engine sent them: nothing has parsed them
/// yet.
pub struct ModelFile {
    pub bytes: Vec<u8>,
    /// Address that sent it. A member chooses the name in its URL, but not this.
    pub from: Option<PeerAddress>,
}

impl EngineClient {
    /// Creates a client that follows no redirects and uses no proxy: engine URLs come from the
    /// store, not from users.
    pub fn new(connect_timeout: Duration) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .connect_timeout(connect_timeout)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()?;
        Ok(Self { http, operator_calls: Arc::new(Semaphore::new(ENGINES_MAX)) })
    }

    /// Fetches the self-description of the engine at `url`, which need not be in the table. Errors
    /// have the URL in place of its name.
    pub async fn model(&self, url: &str, deadline: Instant) -> Result<EngineInfo, CallError> {
        self.get_json(url, PATH_MODEL, deadline).await
    }

    /// Fetches the state of an engine, for an operator. Waits for one of [`ENGINES_MAX`] places
    /// before the call. The wait counts against the deadline.
    pub async fn state(&self, url: &str, deadline: Instant) -> Result<EngineState, CallError> {
        self.for_operator(url, deadline, self.get_json(url, PATH_STATE, deadline)).await
    }

    /// Runs `call` when it has one of the places of calls to all engines.
    async fn for_operator<T>(
        &self,
        engine: &str,
        deadline: Instant,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        within(engine, deadline, async {
            // Never closed.
            let _place = self.operator_calls.acquire().await;
            call.await
        })
        .await
    }

    /// Fetches a tokenizer file of at most `bytes_max` bytes. Returns `None` if the engine has no
    /// file `name`.
    ///
    /// # Errors
    /// [`CallError::Violation`] if the file is longer than `bytes_max`. The limit holds for the
    /// bytes as they arrive, whatever length the headers announce.
    pub async fn file(
        &self,
        url: &str,
        name: &str,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<ModelFile>, CallError> {
        let request = self.http.get(format!("{}{PATH_MODEL_FILES}/{name}", url.trim_end_matches('/')));
        within(url, deadline, async {
            let mut response = send(url, request).await?;
            // Most tokenizer files are optional, so their absence is no error.
            if response.status() == reqwest::StatusCode::NOT_FOUND {
                return Ok(None);
            }
            if !response.status().is_success() {
                return Err(refusal(url, response).await);
            }
            let from = response.remote_addr().map(|address| PeerAddress::of(address.ip()));
            let bytes = read_body(url, &mut response, bytes_max).await?;
            Ok(Some(ModelFile { bytes, from }))
        })
        .await
    }

    /// Has the engine compute and publish the pages of a prompt. Returns when the pages are
    /// computed; the last puts may still be on their way.
    pub async fn prefill(
        &self,
        engine: &RemoteEngine,
        request: &PrefillRequest,
        deadline: Instant,
    ) -> Result<PrefillResponse, CallError> {
        let request = self.http.post(url(engine, PATH_PREFILL)).json(request);
        self.json(&engine.name, request, deadline).await
    }

    /// Has all `engines` drop the pages of a prefix from L1, at the same time. An engine answers
    /// when none of their puts is in flight. Returns the answers in the order of the engines.
    pub async fn forget_all(
        &self,
        engines: &[Arc<RemoteEngine>],
        request: &ForgetRequest,
        deadline: Instant,
    ) -> Vec<Result<ForgetResponse, CallError>> {
        // One copy for all engines: a prefix of four million tokens takes 30 MB.
        let body = serde_json::to_vec(request).map(Bytes::from);
        let calls = engines.iter().map(|engine| {
            let post = self.http.post(url(engine, PATH_FORGET)).header(CONTENT_TYPE, "application/json");
            // An empty body in its place could be read as another request.
            let body = body.as_ref().cloned().map_err(|error| CallError::unsent(&engine.name, error));
            let call = async move { self.json(&engine.name, post.body(body?), deadline).await };
            self.for_operator(&engine.name, deadline, call)
        });
        join_all(calls).await
    }

    /// Has all `engines` drop the cached pages of L1, at the same time. Returns the answers in the
    /// order of the engines.
    pub async fn flush_all(
        &self,
        engines: &[Arc<RemoteEngine>],
        deadline: Instant,
    ) -> Vec<Result<ForgetResponse, CallError>> {
        let calls = engines.iter().map(|engine| {
            // Without a body it would need no content type, which engines expect of every POST.
            let post = self.http.post(url(engine, PATH_FLUSH)).header(CONTENT_TYPE, "application/json").body("{}");
            self.for_operator(&engine.name, deadline, self.json(&engine.name, post, deadline))
        });
        join_all(calls).await
    }

    /// Starts a generation. Returns with the response headers, before the first event. `deadline`
    /// also bounds each later wait for an event.
    ///
    /// # Errors
    /// [`CallError::Refused`] for any status but success.
    pub async fn decode(
        &self,
        engine: &RemoteEngine,
        request: DecodeRequest,
        deadline: Instant,
    ) -> Result<EventStream, CallError> {
        let post = self.http.post(url(engine, PATH_DECODE)).json(&request);
        // The body has the tokens now.
        drop(request);
        let response = within(&engine.name, deadline, async {
            let response = send(&engine.name, post).await?;
            match response.status().is_success() {
                true => Ok(response),
                false => Err(refusal(&engine.name, response).await),
            }
        })
        .await?;
        Ok(EventStream { engine: engine.name.clone(), response, lines: LineSplitter::default(), deadline })
    }

    async fn get_json<T: DeserializeOwned>(&self, url: &str, path: &str, deadline: Instant) -> Result<T, CallError> {
        let request = self.http.get(format!("{}{path}", url.trim_end_matches('/')));
        self.json(url, request, deadline).await
    }

    async fn json<T: DeserializeOwned>(
        &self,
        engine: &str,
        request: reqwest::RequestBuilder,
        deadline: Instant,
    ) -> Result<T, CallError> {
        within(engine, deadline, async {
            let mut response = send(engine, request).await?;
            if !response.status().is_success() {
                return Err(refusal(engine, response).await);
            }
            let body = read_body(engine, &mut response, ANSWER_BYTES_MAX).await?;
            serde_json::from_slice(&body)
                .map_err(|error| CallError::violation(engine, format!("it has another form: {}", reason(&error))))
        })
        .await
    }
}

fn url(engine: &RemoteEngine, path: &str) -> String {
    format!("{}{path}", engine.info.url.trim_end_matches('/'))
}

/// Milliseconds until `deadline`, for the engine's own time limit. At least 1, because engines
/// refuse 0.
pub fn remaining_ms(deadline: Instant) -> u64 {
    (deadline.saturating_duration_since(Instant::now()).as_millis() as u64).max(1)
}

async fn within<T>(
    engine: &str,
    deadline: Instant,
    call: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    match tokio::time::timeout_at(deadline, call).await {
        Ok(result) => result,
        Err(_) => Err(CallError::Deadline { engine: engine.into() }),
    }
}

async fn send(engine: &str, request: reqwest::RequestBuilder) -> Result<reqwest::Response, CallError> {
    request.send().await.map_err(|error| CallError::lost(engine, describe(&error)))
}

/// Innermost cause of an error. The outer ones only add the URL, and the message names the engine.
fn describe(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

async fn read_body(engine: &str, response: &mut reqwest::Response, bytes_max: usize) -> Result<Vec<u8>, CallError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| CallError::lost(engine, describe(&error)))? {
        // Checked on the received bytes: Content-Length may be absent or wrong.
        if body.len() + chunk.len() > bytes_max {
            return Err(CallError::violation(engine, format!("it exceeds {bytes_max} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Error in a response without a success status. Proxies answer without the interface's error body,
/// and newer engines may use unknown codes; the status stands in for the code then. So it does for
/// a body that is too long: an error page of a proxy is no violation of the engine.
async fn refusal(engine: &str, mut response: reqwest::Response) -> CallError {
    let status = response.status();
    let header = response.headers().get(HEADER_RETRY_AFTER_MS).and_then(|v| v.to_str().ok()?.parse().ok());
    let body = match read_body(engine, &mut response, ANSWER_BYTES_MAX).await {
        Ok(body) => body,
        Err(CallError::Violation { .. }) => Vec::new(),
        Err(error) => return error,
    };
    let mut error: ApiError = serde_json::from_slice(&body)
        .unwrap_or_else(|_| ApiError::new(ErrorCode::Unknown, format!("HTTP status {status}")));
    if error.code == ErrorCode::Unknown {
        error.code = match status.as_u16() {
            404 => ErrorCode::NotFound,
            503 | 429 => ErrorCode::Busy,
            504 => ErrorCode::Deadline,
            400..500 => ErrorCode::BadRequest,
            _ => ErrorCode::Internal,
        };
    }
    // The body of a proxy has no retry time, but the header may have survived it.
    error.retry_after_ms = error.retry_after_ms.or(header);
    CallError::Refused { engine: engine.into(), error }
}

/// Event stream of a running generation. Dropping it cancels the generation.
#[derive(Debug)]
pub struct EventStream {
    engine: String,
    response: reqwest::Response,
    lines: LineSplitter,
    deadline: Instant,
}

impl EventStream {
    /// Waits for the next event. Returns `error` events, and a stream that ends without an `end`
    /// event, as errors. Must not be called after the `end` event: it would report a lost engine.
    pub async fn next(&mut self) -> Result<DecodeEvent, CallError> {
        let line = loop {
            let engine = &self.engine;
            if let Some(line) = self.lines.take().map_err(|reason| CallError::violation(engine, reason))? {
                break line;
            }
            let chunk = within(engine, self.deadline, async {
                self.response.chunk().await.map_err(|error| CallError::lost(engine, describe(&error)))
            })
            .await?;
            let chunk = chunk.ok_or_else(|| CallError::lost(engine, "its stream ended without an end event"))?;
            self.lines.push(chunk);
        };
        match serde_json::from_slice(&line) {
            Ok(DecodeEvent::Error(error)) => Err(CallError::Refused { engine: self.engine.clone(), error }),
            Ok(event) => Ok(event),
            Err(error) => {
                Err(CallError::violation(&self.engine, format!("an event has another form: {}", reason(&error))))
            }
        }
    }
}

/// Cuts a stream into lines. It holds one chunk and one line, however many lines the chunk has: an
/// entry for each would take many times the memory of short lines.
#[derive(Debug, Default)]
struct LineSplitter {
    /// Begin of a line whose end has not arrived.
    partial: BytesMut,
    /// Part of the last chunk that is not cut yet.
    rest: Bytes,
}

impl LineSplitter {
    /// Adds the next chunk. Call it only after [`take`](Self::take) returned `None`.
    fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.rest.is_empty(), "lines of the last chunk are left");
        self.rest = chunk;
    }

    /// Returns the next line that is not blank, without its end. `None` asks for the next chunk.
    ///
    /// # Errors
    /// If the line exceeds [`LINE_BYTES_MAX`], even before its end has arrived.
    fn take(&mut self) -> Result<Option<BytesMut>, String> {
        while let Some(end) = self.rest.iter().position(|&b| b == b'\n') {
            let piece = self.rest.split_to(end + 1);
            self.extend(&piece[..end])?;
            let line = self.partial.split();
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
        let piece = std::mem::take(&mut self.rest);
        self.extend(&piece).map(|()| None)
    }

    fn extend(&mut self, piece: &[u8]) -> Result<(), String> {
        // Checked before copying, so that an endless line cannot exhaust memory.
        if self.partial.len() + piece.len() > LINE_BYTES_MAX {
            return Err(format!("a line of its stream exceeds {LINE_BYTES_MAX} bytes"));
        }
        self.partial.extend_from_slice(piece);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    #[tokio::test]
    async fn calls_to_all_engines_are_bounded() {
        let client = EngineClient::new(Duration::from_secs(1)).unwrap();
        let now = Instant::now();
        let hour = now + Duration::from_secs(3600);
        let hanging = join_all((0..ENGINES_MAX).map(|_| client.for_operator("e", hour, pending::<Result<(), _>>())));
        let next = client.for_operator("e", now + Duration::from_millis(100), ready(Ok(())));
        tokio::select! {
            biased;
            _ = hanging => panic!("they hang"),
            next = next => assert!(matches!(next, Err(CallError::Deadline { .. })), "it has no place"),
        }
        assert!(client.for_operator("e", hour, ready(Ok(()))).await.is_ok());
    }

    #[test]
    fn splitter_returns_whole_lines_for_every_cut() {
        let text = b"one\n\ntwo three\r\nfour\n";
        for cut in 0..text.len() {
            let mut lines = LineSplitter::default();
            let mut got = Vec::new();
            for chunk in [&text[..cut], &text[cut..]] {
                lines.push(Bytes::copy_from_slice(chunk));
                while let Some(line) = lines.take().unwrap() {
                    got.push(String::from_utf8_lossy(&line).trim().to_string());
                }
            }
            assert_eq!(got, ["one", "two three", "four"]);
        }
    }

    #[test]
    fn splitter_refuses_an_endless_line() {
        let mut lines = LineSplitter::default();
        let half = Bytes::from(vec![b'x'; LINE_BYTES_MAX / 2]);
        for chunk in [half.clone(), half] {
            lines.push(chunk);
            assert_eq!(lines.take(), Ok(None));
        }
        lines.push(Bytes::from_static(b"x"));
        assert!(lines.take().is_err());
    }

    #[test]
    fn splitter_refuses_a_line_that_ends_beyond_the_limit() {
        let whole = Bytes::from(vec![b'x'; LINE_BYTES_MAX]);
        let after_whole = |chunk: &'static [u8]| {
            let mut lines = LineSplitter::default();
            lines.push(whole.clone());
            assert_eq!(lines.take(), Ok(None));
            lines.push(Bytes::from_static(chunk));
            lines.take()
        };
        assert_eq!(after_whole(b"\nnext").unwrap().unwrap().len(), LINE_BYTES_MAX);
        assert!(after_whole(b"x\n").is_err());
    }

    #[test]
    fn only_failures_of_the_engine_are_retryable() {
        let refused = |code| CallError::Refused { engine: "e".into(), error: ApiError::new(code, "") };
        assert!(CallError::lost("e", "x").is_retryable());
        assert!(refused(ErrorCode::Busy).is_retryable());
        assert!(refused(ErrorCode::Internal).is_retryable());
        assert!(refused(ErrorCode::PagesUnusable).is_retryable());
        assert!(refused(ErrorCode::Unknown).is_retryable());
        assert!(!CallError::TooLong { engine: "e".into() }.is_retryable());
        assert!(!refused(ErrorCode::BadRequest).is_retryable());
        assert!(!refused(ErrorCode::ContextLengthExceeded).is_retryable());
        assert!(!CallError::Deadline { engine: "e".into() }.is_retryable());
    }
}
