//! The HTTP interface of an engine, as types: what the router sends and what it gets back.
//!
//! Every body is JSON; `/v1/decode` answers newline-delimited JSON, one [`DecodeEvent`] per line. The types here are the
//! only description of the interface: server and router both use them.

use larder_format::NamespaceDescriptor;
pub use larder_model::SamplingParams;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Path of [`PrefillRequest`], POST.
pub const PATH_PREFILL: &str = "/v1/prefill";
/// Path of [`DecodeRequest`], POST.
pub const PATH_DECODE: &str = "/v1/decode";
/// Path of [`EngineInfo`], GET.
pub const PATH_MODEL: &str = "/v1/model";
/// Path below which the tokenizer's files lie, GET.
pub const PATH_MODEL_FILES: &str = "/v1/model/files";
/// Path of [`EngineState`], GET.
pub const PATH_STATE: &str = "/v1/state";
/// Path that answers 200 while the engine serves, GET.
pub const PATH_HEALTH: &str = "/healthz";
/// Path of the metrics in Prometheus text form, GET.
pub const PATH_METRICS: &str = "/metrics";
/// Response header with the milliseconds after which a busy engine should be asked again.
pub const HEADER_RETRY_AFTER_MS: &str = "retry-after-ms";
/// Content type of the answer to [`PATH_DECODE`].
pub const CONTENT_TYPE_NDJSON: &str = "application/x-ndjson";

/// Bytes of a request body that an engine accepts: 32 MiB.
pub const BODY_BYTES_MAX: usize = 32 << 20;
/// Bytes of a request id.
pub const REQUEST_ID_BYTES_MAX: usize = 256;
/// Stop strings in one request.
pub const STOP_STRINGS_MAX: usize = 64;
/// Bytes of one stop string.
pub const STOP_BYTES_MAX: usize = 4096;

/// What an engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and publishes their pages.
    Prefill,
    /// Reads pages and generates.
    Decode,
}

impl Role {
    /// The word used on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which cached pages a request may read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// The engine's own pages (L1) and the store.
    #[default]
    All,
    /// The store only: the engine's own pages are neither read nor added to.
    Store,
    /// None: everything is computed, nothing is kept or published.
    None,
}

impl CacheMode {
    /// Whether the engine's own pages may be read and added to.
    pub fn uses_l1(self) -> bool {
        self == CacheMode::All
    }

    /// Whether the store may be read and written.
    pub fn uses_store(self) -> bool {
        self != CacheMode::None
    }
}

/// Asks a prefill engine to compute and publish the whole pages below a prompt's last token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillRequest {
    /// For logs on both sides; at most [`REQUEST_ID_BYTES_MAX`] bytes.
    pub request_id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Which cached pages may be used.
    #[serde(default)]
    pub cache: CacheMode,
    /// Time from arrival until the request is given up, milliseconds.
    pub deadline_ms: u64,
}

/// What a prefill came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillResponse {
    /// Whole pages below the prompt's last token: `(tokens - 1) / page_tokens`.
    pub pages: u32,
    /// Of those, found in the engine's own L1.
    pub pages_l1: u32,
    /// Read from the DRAM of a store node.
    pub pages_l2: u32,
    /// Read from the NVMe of a store node.
    pub pages_l3: u32,
    /// Computed here.
    pub pages_computed: u32,
    /// Pages that were handed to the store and are not there: nobody should wait for them.
    #[serde(default)]
    pub pages_lost: u32,
    /// Time until pages were reserved, milliseconds.
    pub queue_ms: u64,
    /// Time for looking up and reading pages, milliseconds.
    pub load_ms: u64,
    /// Time for computing, milliseconds.
    pub compute_ms: u64,
}

/// Asks a decode engine to generate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecodeRequest {
    /// For logs on both sides; at most [`REQUEST_ID_BYTES_MAX`] bytes.
    pub request_id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// How to choose tokens and when to stop.
    #[serde(default)]
    pub sampling: SamplingParams,
    /// The first so many pages are in the store or being written by a prefill engine now; those not there yet are followed.
    #[serde(default)]
    pub await_pages: u32,
    /// Which cached pages may be used.
    #[serde(default)]
    pub cache: CacheMode,
    /// Time from arrival until the request is given up, milliseconds.
    pub deadline_ms: u64,
}

/// One line of the answer to a [`DecodeRequest`]: `start`, any number of `token`, then `end` or `error`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum DecodeEvent {
    /// Sent with the first token: where the prompt's pages came from.
    Start(DecodeStart),
    /// A generated token.
    Token {
        /// Its id. The last one may be an end-of-sequence token.
        id: u32,
        /// Text that became certain with it; often empty inside a character or a possible stop string.
        text: String,
    },
    /// The end.
    End {
        /// Why.
        finish_reason: FinishReason,
        /// Generated tokens: the number of `token` events before.
        completion_tokens: u32,
    },
    /// The request failed after it began to stream.
    Error(ApiError),
}

/// Where the prompt's pages came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeStart {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Pages found in the engine's own L1.
    pub pages_l1: u32,
    /// Pages read from the DRAM of a store node.
    pub pages_l2: u32,
    /// Pages read from the NVMe of a store node.
    pub pages_l3: u32,
    /// Pages read while a prefill engine was writing them.
    pub pages_followed: u32,
    /// Prompt tokens computed here.
    pub tokens_computed: u32,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

/// What kind of failure: what should the caller do?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// Shorten the prompt.
    ContextLengthExceeded,
    /// Ask another engine, or this one later.
    Busy,
    /// Mend the request.
    BadRequest,
    /// The request's own time was over.
    Deadline,
    /// Nothing here under that name.
    NotFound,
    /// Ask another engine; a fault of this one.
    Internal,
}

impl ErrorCode {
    /// The HTTP status that goes with it.
    pub fn http_status(self) -> u16 {
        match self {
            ErrorCode::ContextLengthExceeded | ErrorCode::BadRequest => 400,
            ErrorCode::NotFound => 404,
            ErrorCode::Internal => 500,
            ErrorCode::Busy => 503,
            ErrorCode::Deadline => 504,
        }
    }
}

/// A failure, as the body of a 4xx or 5xx answer or as the last event of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The kind.
    pub code: ErrorCode,
    /// What is wrong, for people.
    pub message: String,
    /// With `busy`: milliseconds after which to ask again; also in the header [`HEADER_RETRY_AFTER_MS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl ApiError {
    /// An error of kind `code`.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after_ms: None }
    }

    /// [`ErrorCode::Busy`], to be asked again after `retry_after_ms`.
    pub fn busy(message: impl Into<String>, retry_after_ms: u64) -> Self {
        Self { code: ErrorCode::Busy, message: message.into(), retry_after_ms: Some(retry_after_ms) }
    }
}

/// What an engine says of itself: the answer of [`PATH_MODEL`], and its registration with the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// Prefill or decode.
    pub role: Role,
    /// Where it is reached, e.g. `http://10.0.0.7:7710`.
    pub url: String,
    /// The model's name for people.
    pub model: String,
    /// Whose pages it reads and writes.
    pub descriptor: NamespaceDescriptor,
    /// Tokens of prompt and answer together, as far as model and L1 allow.
    pub max_context: u32,
    /// Tokens per page.
    pub page_tokens: u32,
}

/// How an engine is doing: the answer of [`PATH_STATE`]. New fields may come; unknown ones are to be ignored.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineState {
    /// Requests that wait for pages (prefill: bootstrap; decode: preallocate).
    pub queue: u32,
    /// Requests that hold pages, in whatever state.
    pub running: u32,
    /// Of those, waiting for pages to arrive.
    pub loading: u32,
    /// Tokens of accepted requests that are still to be computed (an upper bound: some may be found cached).
    pub tokens_pending: u64,
    /// Pages in the L1 pool.
    pub l1_pages: u32,
    /// Of those, free.
    pub l1_pages_free: u32,
    /// Of those, kept for later requests.
    pub l1_pages_cached: u32,
    /// Smoothed prompt tokens computed per second while computing; 0 until measured.
    pub prefill_tokens_per_second: f64,
    /// Smoothed time of one step, milliseconds; 0 until measured.
    pub step_ms: f64,
    /// Store nodes that it is connected to.
    pub store_nodes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_the_documented_form() {
        let line =
            serde_json::to_value(DecodeEvent::Start(DecodeStart { prompt_tokens: 3, ..Default::default() })).unwrap();
        assert_eq!((line["type"].as_str(), line["prompt_tokens"].as_u64()), (Some("start"), Some(3)));
        let line = serde_json::to_value(DecodeEvent::Token { id: 7, text: "x".into() }).unwrap();
        assert_eq!(line, serde_json::json!({"type": "token", "id": 7, "text": "x"}));
        let end = DecodeEvent::End { finish_reason: FinishReason::Length, completion_tokens: 2 };
        let text = serde_json::to_string(&end).unwrap();
        assert_eq!(text, r#"{"type":"end","finish_reason":"length","completion_tokens":2}"#);
        assert_eq!(serde_json::from_str::<DecodeEvent>(&text).unwrap(), end);
        let error = DecodeEvent::Error(ApiError::new(ErrorCode::ContextLengthExceeded, "too long"));
        assert_eq!(
            serde_json::to_string(&error).unwrap(),
            r#"{"type":"error","code":"context_length_exceeded","message":"too long"}"#
        );
    }

    #[test]
    fn requests_may_leave_out_what_has_a_default() {
        let request: DecodeRequest =
            serde_json::from_str(r#"{"request_id":"a","tokens":[1],"deadline_ms":5}"#).unwrap();
        assert_eq!((request.cache, request.await_pages), (CacheMode::All, 0));
        assert_eq!(serde_json::to_string(&CacheMode::None).unwrap(), r#""none""#);
    }
}
