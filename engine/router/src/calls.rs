//! Calls to an engine: the only place that speaks its HTTP interface.
//!
//! What always holds: every call ends by its deadline; no answer takes more memory than its named bound; and dropping a
//! call, or the stream it returned, closes the connection, which is how an engine learns that nobody waits any more.

use crate::engines::Engine;
use bytes::BytesMut;
use larder_worker::api::{
    ApiError, DecodeEvent, DecodeRequest, EngineInfo, EngineState, ErrorCode, HEADER_RETRY_AFTER_MS, PATH_DECODE,
    PATH_MODEL, PATH_MODEL_FILES, PATH_PREFILL, PATH_STATE, PrefillRequest, PrefillResponse,
};
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::future::Future;
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;

/// Most bytes of a JSON answer, and of one line of a stream.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Time an idle connection to an engine is kept; shorter than servers usually keep theirs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a call failed.
#[derive(Debug, Clone, Error)]
pub enum CallError {
    /// No connection, or it broke, or what came is not an answer.
    #[error("engine {engine} was lost: {reason}")]
    Lost {
        /// Its name or URL.
        engine: String,
        /// What happened.
        reason: String,
    },
    /// The engine said no.
    #[error("engine {engine}: {error}")]
    Refused {
        /// Its name or URL.
        engine: String,
        /// What it said.
        error: ApiError,
    },
    /// The deadline passed.
    #[error("engine {engine} did not answer in time")]
    Deadline {
        /// Its name or URL.
        engine: String,
    },
}

impl CallError {
    pub(crate) fn lost(engine: &str, reason: impl std::fmt::Display) -> Self {
        CallError::Lost { engine: engine.into(), reason: reason.to_string() }
    }

    /// Whether another engine may do better.
    pub fn is_worth_another(&self) -> bool {
        match self {
            CallError::Lost { .. } => true,
            CallError::Refused { error, .. } => {
                matches!(error.code, ErrorCode::Busy | ErrorCode::Internal | ErrorCode::NotFound)
            }
            CallError::Deadline { .. } => false,
        }
    }

    /// Whether the request does not fit the engine's context.
    pub fn is_too_long(&self) -> bool {
        matches!(self, CallError::Refused { error, .. } if error.code == ErrorCode::ContextLengthExceeded)
    }

    /// Tells the engine's breaker.
    pub fn note(&self, engine: &Engine) {
        match self {
            CallError::Lost { .. } => engine.note_lost(),
            CallError::Refused { error, .. } if error.code == ErrorCode::Internal => engine.note_fault(),
            CallError::Refused { .. } | CallError::Deadline { .. } => {}
        }
    }
}

/// Makes calls; clones share connections.
#[derive(Debug, Clone)]
pub struct Calls {
    http: reqwest::Client,
}

impl Calls {
    /// Calls that take at most `connect_timeout` to connect.
    pub fn new(connect_timeout: Duration) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .connect_timeout(connect_timeout)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()?;
        Ok(Self { http })
    }

    /// What the engine at `url` says of itself.
    pub async fn model(&self, url: &str, deadline: Instant) -> Result<EngineInfo, CallError> {
        self.get_json(url, PATH_MODEL, deadline).await
    }

    /// How the engine at `url` is doing.
    pub async fn state(&self, url: &str, deadline: Instant) -> Result<EngineState, CallError> {
        self.get_json(url, PATH_STATE, deadline).await
    }

    /// A file of the tokenizer, of at most `bytes_max` bytes; `None` if the engine has none of this name.
    pub async fn file(
        &self,
        url: &str,
        name: &str,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Vec<u8>>, CallError> {
        let request = self.http.get(format!("{}{PATH_MODEL_FILES}/{name}", url.trim_end_matches('/')));
        within(url, deadline, async {
            let mut response = send(url, request).await?;
            if response.status() == reqwest::StatusCode::NOT_FOUND {
                return Ok(None);
            }
            if !response.status().is_success() {
                return Err(refusal(url, response).await);
            }
            read_body(url, &mut response, bytes_max).await.map(Some)
        })
        .await
    }

    /// Has pages computed and published.
    pub async fn prefill(
        &self,
        engine: &Engine,
        request: &PrefillRequest,
        deadline: Instant,
    ) -> Result<PrefillResponse, CallError> {
        let request = self.http.post(path(engine, PATH_PREFILL)).json(request);
        self.json(&engine.name, request, deadline).await
    }

    /// Begins to generate.
    pub async fn decode(
        &self,
        engine: &Engine,
        request: &DecodeRequest,
        deadline: Instant,
    ) -> Result<EventStream, CallError> {
        let request = self.http.post(path(engine, PATH_DECODE)).json(request);
        let response = within(&engine.name, deadline, async {
            let response = send(&engine.name, request).await?;
            match response.status().is_success() {
                true => Ok(response),
                false => Err(refusal(&engine.name, response).await),
            }
        })
        .await?;
        Ok(EventStream { engine: engine.name.clone(), response, lines: Lines::default(), deadline })
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
            serde_json::from_slice(&body).map_err(|error| CallError::lost(engine, format!("answer: {error}")))
        })
        .await
    }
}

fn path(engine: &Engine, path: &str) -> String {
    format!("{}{path}", engine.info.url.trim_end_matches('/'))
}

/// Milliseconds until `deadline`, at least 1: what an engine is told.
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

/// The innermost cause says what happened; the outer ones repeat the URL.
fn describe(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

async fn read_body(engine: &str, response: &mut reqwest::Response, bytes_max: usize) -> Result<Vec<u8>, CallError> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|error| CallError::lost(engine, describe(&error)))? {
        if body.len() + piece.len() > bytes_max {
            return Err(CallError::lost(engine, format!("its answer is longer than {bytes_max} bytes")));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

async fn refusal(engine: &str, mut response: reqwest::Response) -> CallError {
    let status = response.status();
    let header = response.headers().get(HEADER_RETRY_AFTER_MS).and_then(|v| v.to_str().ok()?.parse().ok());
    let body = match read_body(engine, &mut response, ANSWER_BYTES_MAX).await {
        Ok(body) => body,
        Err(error) => return error,
    };
    let mut error: ApiError = serde_json::from_slice(&body).unwrap_or_else(|_| {
        let code = match status.as_u16() {
            404 => ErrorCode::NotFound,
            503 | 429 => ErrorCode::Busy,
            504 => ErrorCode::Deadline,
            400..500 => ErrorCode::BadRequest,
            _ => ErrorCode::Internal,
        };
        ApiError::new(code, format!("status {status}"))
    });
    error.retry_after_ms = error.retry_after_ms.or(header);
    CallError::Refused { engine: engine.into(), error }
}

/// The events of a running generation.
#[derive(Debug)]
pub struct EventStream {
    engine: String,
    response: reqwest::Response,
    lines: Lines,
    deadline: Instant,
}

impl EventStream {
    /// The next event. A stream that ends without its last event is an error, as is an `error` event.
    pub async fn next(&mut self) -> Result<DecodeEvent, CallError> {
        let line = loop {
            if let Some(line) = self.lines.take() {
                break line;
            }
            let engine = &self.engine;
            let piece = within(engine, self.deadline, async {
                self.response.chunk().await.map_err(|error| CallError::lost(engine, describe(&error)))
            })
            .await?;
            let piece = piece.ok_or_else(|| CallError::lost(engine, "its answer ended before the end"))?;
            self.lines.push(&piece).map_err(|reason| CallError::lost(engine, reason))?;
        };
        match serde_json::from_slice(&line) {
            Ok(DecodeEvent::Error(error)) => Err(CallError::Refused { engine: self.engine.clone(), error }),
            Ok(event) => Ok(event),
            Err(error) => Err(CallError::lost(&self.engine, format!("event: {error}"))),
        }
    }
}

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
struct Lines {
    begun: BytesMut,
    whole: VecDeque<BytesMut>,
}

impl Lines {
    fn push(&mut self, mut piece: &[u8]) -> Result<(), String> {
        while let Some(end) = piece.iter().position(|&b| b == b'\n') {
            self.begun.extend_from_slice(&piece[..end]);
            let line = self.begun.split();
            if !line.trim_ascii().is_empty() {
                self.whole.push_back(line);
            }
            piece = &piece[end + 1..];
        }
        if self.begun.len() + piece.len() > ANSWER_BYTES_MAX {
            return Err(format!("a line is longer than {ANSWER_BYTES_MAX} bytes"));
        }
        self.begun.extend_from_slice(piece);
        Ok(())
    }

    fn take(&mut self) -> Option<BytesMut> {
        self.whole.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_whole_however_they_arrive() {
        let text = b"one\n\ntwo three\r\nfour\n";
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            lines.push(&text[..cut]).unwrap();
            lines.push(&text[cut..]).unwrap();
            let got: Vec<String> =
                std::iter::from_fn(|| lines.take()).map(|l| String::from_utf8_lossy(&l).trim().to_string()).collect();
            assert_eq!(got, ["one", "two three", "four"]);
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; ANSWER_BYTES_MAX / 2];
        lines.push(&piece).unwrap();
        lines.push(&piece).unwrap();
        assert!(lines.push(b"x").is_err());
    }

    #[test]
    fn only_what_another_engine_can_mend_is_tried_again() {
        let refused = |code| CallError::Refused { engine: "e".into(), error: ApiError::new(code, "") };
        assert!(CallError::lost("e", "x").is_worth_another());
        assert!(refused(ErrorCode::Busy).is_worth_another());
        assert!(refused(ErrorCode::Internal).is_worth_another());
        assert!(!refused(ErrorCode::BadRequest).is_worth_another());
        assert!(!refused(ErrorCode::ContextLengthExceeded).is_worth_another());
        assert!(!CallError::Deadline { engine: "e".into() }.is_worth_another());
    }
}
