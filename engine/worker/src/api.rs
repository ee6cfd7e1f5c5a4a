//! HTTP interface of an engine as types, shared by the engine's server and the router's client.
//!
//! Every body is JSON. `/v1/decode` answers with newline-delimited JSON, one [`DecodeEvent`] per
//! line. These types are the only specification of the interface.

use crate::request_memory::request_bytes;
use axum::http::Uri;
use axum::http::uri::Authority;
use larder_format::NamespaceDescriptor;
use larder_memory::plan::MemoryPlan;
use larder_model::constraint::CONSTRAINT_BYTES_MAX;
use larder_model::sampling::{REPETITION_PENALTY_RANGE, TEMPERATURE_RANGE};
pub use larder_model::{SamplingParams, TokenLogprobs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

pub const PATH_PREFILL: &str = "/v1/prefill";
pub const PATH_DECODE: &str = "/v1/decode";
/// POST [`ForgetRequest`]: [`ForgetResponse`].
pub const PATH_FORGET: &str = "/v1/forget";
/// POST: drops all cached pages of L1 that no request uses. [`ForgetResponse`].
pub const PATH_FLUSH: &str = "/v1/flush";
pub const PATH_MODEL: &str = "/v1/model";
/// Prefix of the tokenizer files. GET `<prefix>/<file name>`.
pub const PATH_MODEL_FILES: &str = "/v1/model/files";
pub const PATH_STATE: &str = "/v1/state";
/// GET the health: 200 while the engine serves, 503 otherwise.
pub const PATH_HEALTH: &str = "/healthz";
/// GET the metrics in OpenMetrics text format, for Prometheus.
pub const PATH_METRICS: &str = "/metrics";
pub const HEADER_RETRY_AFTER_MS: &str = "retry-after-ms";
pub const CONTENT_TYPE_NDJSON: &str = "application/x-ndjson";

/// Maximum size of a request body: 32 MiB, enough for a prompt of several million tokens.
pub const BODY_BYTES_MAX: usize = 32 << 20;
pub const REQUEST_ID_BYTES_MAX: usize = 256;
/// Maximum of [`ForgetRequest::hold_ms`]: one minute.
pub const FORGET_HOLD_MS_MAX: u64 = 60_000;
pub const STOP_STRINGS_MAX: usize = 64;
pub const STOP_BYTES_MAX: usize = 4096;
pub const STOP_TOKENS_MAX: usize = 128;
/// Maximum number of tokens with a bias.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Maximum number of best tokens whose log-probabilities are reported for each token.
pub const TOP_LOGPROBS_MAX: u32 = 20;
/// Maximum tokens of a prompt whose log-probabilities are reported. They take up to 20 MiB.
pub const PROMPT_LOGPROBS_TOKENS_MAX: usize = 64 << 10;
/// Maximum number of log-probabilities in one [`DecodeEvent::Prompt`].
pub const PROMPT_EVENT_TOKENS: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Prefill,
    Decode,
}

impl Role {
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

/// Caches that a request may read and write. Measurements use the restricted modes to separate the
/// cost of computation from that of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// L1 and the store.
    #[default]
    All,
    /// The store only. The request neither reads pages cached in L1 nor adds any.
    Store,
    /// No cache. The engine computes every page and publishes none.
    None,
}

impl CacheMode {
    pub fn uses_l1(self) -> bool {
        self == CacheMode::All
    }

    pub fn uses_store(self) -> bool {
        self != CacheMode::None
    }
}

/// Asks a prefill engine to compute and publish the whole pages below a prompt's last token. The
/// last token is left to the decode engine, which needs its logits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillRequest {
    pub request_id: String,
    pub tokens: Vec<u32>,
    #[serde(default)]
    pub cache: CacheMode,
    /// Time from arrival until the engine gives up, in milliseconds. The engine caps it.
    pub deadline_ms: u64,
}

/// Result of a prefill. Sent when every put has an outcome. Pages are counted by source: L1 is the
/// engine's own memory, L2 the DRAM of store nodes, L3 their NVMe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillResponse {
    /// Number of whole pages below the prompt's last token: `(tokens - 1) / page_tokens`.
    pub pages: u32,
    pub pages_l1: u32,
    pub pages_l2: u32,
    pub pages_l3: u32,
    pub pages_computed: u32,
    /// Number of pages that the engine put but the store does not hold, as far as the engine knows.
    /// Includes pages that another client is putting. No engine should follow them.
    #[serde(default)]
    pub pages_lost: u32,
    pub queue_ms: u64,
    pub load_ms: u64,
    /// Time from the end of the load to the end of the computation, in milliseconds.
    pub compute_ms: u64,
}

/// Asks an engine to drop the pages of a prefix from L1, with all pages after them, and to abort
/// their puts. The answer comes when no put of these pages is in flight any more.
///
/// A caller that also forgets the pages in the store asks twice: before with a hold, after without.
/// During the hold the engine neither caches nor puts these pages. So it cannot bring a page back
/// that the store forgets meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetRequest {
    /// The prefix. Only its whole pages count.
    pub tokens: Vec<u32>,
    /// Duration of the hold in milliseconds. 0 ends a hold of the same prefix.
    #[serde(default)]
    pub hold_ms: u64,
    /// Time from arrival until the engine gives up, in milliseconds. The engine caps it.
    pub deadline_ms: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetResponse {
    /// Number of pages that L1 dropped, those after the prefix included.
    pub pages: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecodeRequest {
    pub request_id: String,
    pub tokens: Vec<u32>,
    #[serde(default)]
    pub sampling: SamplingParams,
    /// Number of leading pages that are in the store or that a prefill engine is writing. The
    /// decode engine follows those that are not sealed yet.
    #[serde(default)]
    pub await_pages: u32,
    /// Number of leading pages that the store had before the prefill of this request began. A
    /// prefill engine hands the later ones over, so the engine does not count them as reused.
    /// Absent if there was no prefill: every page that the store has is reused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_pages: Option<u32>,
    #[serde(default)]
    pub cache: CacheMode,
    /// Time from arrival until the engine gives up, in milliseconds. The engine caps it.
    pub deadline_ms: u64,
}

/// One line of the answer to a [`DecodeRequest`]: `start`, any number of `prompt`, any number of
/// `token`, then `end` or `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum DecodeEvent {
    Start(DecodeStart),
    /// Log-probabilities of the next tokens of the prompt, from its second one on. Only if the
    /// request asks for them.
    Prompt {
        logprobs: Vec<TokenLogprobs>,
    },
    Token {
        /// Token id. The last one may be an end-of-sequence token.
        id: u32,
        /// Text that became final with this token. Empty inside a multi-byte character or a
        /// possible stop string.
        text: String,
        /// Present if the request asks for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        logprobs: Option<TokenLogprobs>,
    },
    End {
        finish_reason: FinishReason,
        /// Number of generated tokens, which equals the number of preceding `token` events.
        completion_tokens: u32,
    },
    Error(ApiError),
}

/// Sources of the prompt's pages, counted as in [`PrefillResponse`]. The counts are final: a
/// preemption does not change them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeStart {
    pub prompt_tokens: u32,
    pub pages_l1: u32,
    pub pages_l2: u32,
    pub pages_l3: u32,
    /// Pages that a prefill engine handed over for this request: read while it wrote them, or
    /// shortly after. They are no reuse.
    pub pages_followed: u32,
    pub tokens_computed: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model produced an end-of-sequence token or a stop string.
    Stop,
    /// The answer reached `max_tokens` or the end of the context.
    Length,
}

/// Coarse error code that tells the caller how to react: retry elsewhere, change the request, or
/// give up. The message explains the case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The prompt does not fit the context. Shorten it, or use an engine with a larger L1.
    ContextLengthExceeded,
    /// The engine is overloaded or shutting down. Retry later or elsewhere.
    Busy,
    /// The request is malformed or out of range. A retry cannot succeed.
    BadRequest,
    Deadline,
    NotFound,
    /// Pages from the store held values that are not finite. The engine has dropped them, so a
    /// retry computes them anew.
    PagesUnusable,
    Internal,
    /// Any code that this version does not know. Engines never send it.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    pub fn http_status(self) -> u16 {
        match self {
            ErrorCode::ContextLengthExceeded | ErrorCode::BadRequest => 400,
            ErrorCode::NotFound => 404,
            ErrorCode::Internal | ErrorCode::Unknown => 500,
            ErrorCode::Busy | ErrorCode::PagesUnusable => 503,
            ErrorCode::Deadline => 504,
        }
    }
}

/// An error: the body of a 4xx or 5xx response, or the last event of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub code: ErrorCode,
    /// Explanation for humans. Programs should only look at `code`.
    pub message: String,
    /// With `busy` and `pages_unusable`: delay before a retry, in milliseconds. Also sent in
    /// [`HEADER_RETRY_AFTER_MS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl ApiError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after_ms: None }
    }

    pub fn busy(message: impl Into<String>, retry_after_ms: u64) -> Self {
        Self { code: ErrorCode::Busy, message: message.into(), retry_after_ms: Some(retry_after_ms) }
    }
}

/// Identity and limits of an engine: the answer of [`PATH_MODEL`], and its registration with the
/// store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfo {
    pub role: Role,
    pub url: String,
    /// Name of the model for humans. Requests select models by it.
    pub model: String,
    pub descriptor: NamespaceDescriptor,
    /// Measured or declared name of the kernels' rounding. It is part of the namespace, through the
    /// fingerprint of the weights. Empty if the engine is of an older version.
    #[serde(default)]
    pub numerics: String,
    /// Maximum number of tokens of prompt and answer together.
    pub max_context: u32,
    pub page_tokens: u32,
    /// Maximum memory of the requests of one address, in bytes. 0 if the engine is of an older
    /// version.
    #[serde(default)]
    pub request_bytes_max: u64,
    /// Maximum number of requests of one address: those that wait for pages, and those that hold
    /// some. 0 if the engine is of an older version.
    #[serde(default)]
    pub requests_max: u32,
}

impl EngineInfo {
    /// Number of requests that an idle engine takes from one address at a time, at least 1. Each
    /// has `tokens` tokens, and `parameter_bytes` bytes of other parameters. `None` if the engine
    /// does not tell.
    pub fn requests_at_once(&self, tokens: usize, parameter_bytes: usize) -> Option<usize> {
        if self.request_bytes_max == 0 || self.requests_max == 0 {
            return None;
        }
        let bytes = request_bytes(tokens, parameter_bytes, self.page_tokens as usize) as u64;
        // A request that is larger than any share is served alone.
        let of_memory = (self.request_bytes_max / bytes).max(1);
        usize::try_from(of_memory.min(u64::from(self.requests_max))).ok()
    }
}

/// Load of an engine: the answer of [`PATH_STATE`]. Readers must ignore unknown fields, so that new
/// ones can be added.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineState {
    /// Number of requests that wait for L1 pages (prefill: bootstrap; decode: preallocate).
    pub queue: u32,
    /// Number of requests that hold L1 pages, in any state.
    pub running: u32,
    /// Part of `running` that waits for pages from the store.
    pub loading: u32,
    /// Number of tokens left to compute for all accepted requests. An upper bound, because some may
    /// turn out to be cached.
    pub tokens_pending: u64,
    pub l1_pages: u32,
    pub l1_pages_free: u32,
    pub l1_pages_cached: u32,
    /// Prompt throughput in tokens per second of computation, as a moving average. It begins with a
    /// measurement at start.
    pub prefill_tokens_per_second: f64,
    /// Duration of a step in milliseconds, as a moving average. 0 until measured.
    pub step_ms: f64,
    pub store_nodes: u32,
    /// Version of the engine's software. Empty if it is older than this field.
    pub version: String,
    /// Newest version of the store's protocol that the engine speaks. 0 if it does not tell.
    pub protocol: u16,
    /// Memory that the engine can take. Empty if it is older than this field.
    pub memory_max: MemoryMax,
}

/// [`MemoryPlan`] of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryMax {
    /// Maximum memory of the process itself.
    pub bytes: u64,
    /// Bytes by part, those of child processes included.
    pub parts: BTreeMap<String, u64>,
}

impl From<&MemoryPlan> for MemoryMax {
    fn from(plan: &MemoryPlan) -> Self {
        let parts = plan.parts().map(|(name, bytes)| (name.to_string(), bytes));
        Self { bytes: plan.total(), parts: parts.collect() }
    }
}

/// Checks sampling parameters against the limits of engines and a vocabulary of `vocab` tokens.
///
/// # Errors
/// The name of the wrong field in [`SamplingParams`], and what it must be.
pub fn check_sampling(sampling: &SamplingParams, vocab: usize) -> Result<(), (&'static str, String)> {
    let within = |range: &RangeInclusive<f32>| format!("must be from {} to {}", range.start(), range.end());
    let ranges = [
        ("top_p", sampling.top_p, 0.0..=1.0),
        ("min_p", sampling.min_p, 0.0..=1.0),
        ("temperature", sampling.temperature, TEMPERATURE_RANGE),
        ("repetition_penalty", sampling.repetition_penalty, REPETITION_PENALTY_RANGE),
        ("presence_penalty", sampling.presence_penalty, -2.0..=2.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0..=2.0),
    ];
    for (field, value, range) in ranges {
        if !range.contains(&value) {
            return Err((field, format!("is {value}; it {}", within(&range))));
        }
    }
    let top = sampling.logprobs.max(sampling.prompt_logprobs).unwrap_or(0);
    let is_unknown = |id: &u32| *id as usize >= vocab;
    let is_wrong_bias = |bias: &(u32, f32)| is_unknown(&bias.0) || !(-100.0..=100.0).contains(&bias.1);
    let is_wrong_stop = |stop: &String| stop.is_empty() || stop.len() > STOP_BYTES_MAX;
    let wrong = [
        ("max_tokens", sampling.max_tokens == 0, "must be at least 1".to_string()),
        ("min_tokens", sampling.min_tokens > sampling.max_tokens, "must be at most 'max_tokens'".to_string()),
        ("stop", sampling.stop.len() > STOP_STRINGS_MAX, format!("must have at most {STOP_STRINGS_MAX} strings")),
        ("stop", sampling.stop.iter().any(is_wrong_stop), format!("must have strings of 1 to {STOP_BYTES_MAX} bytes")),
        (
            "stop_token_ids",
            sampling.stop_token_ids.len() > STOP_TOKENS_MAX,
            format!("must have at most {STOP_TOKENS_MAX} ids"),
        ),
        ("stop_token_ids", sampling.stop_token_ids.iter().any(is_unknown), format!("must have ids below {vocab}")),
        (
            "logit_bias",
            sampling.logit_bias.len() > LOGIT_BIAS_MAX,
            format!("must have at most {LOGIT_BIAS_MAX} tokens"),
        ),
        (
            "logit_bias",
            sampling.logit_bias.iter().any(is_wrong_bias),
            format!("must have token ids below {vocab}, each with a number from -100 to 100"),
        ),
        (
            "constraint",
            sampling.constraint.as_ref().is_some_and(|constraint| constraint.bytes() > CONSTRAINT_BYTES_MAX),
            format!("must have at most {CONSTRAINT_BYTES_MAX} bytes"),
        ),
        ("logprobs", top > TOP_LOGPROBS_MAX, format!("must be at most {TOP_LOGPROBS_MAX}")),
    ];
    match wrong.into_iter().find(|(_, is_wrong, _)| *is_wrong) {
        Some((field, _, requirement)) => Err((field, requirement)),
        None => Ok(()),
    }
}

/// Maximum length of an engine's URL, in bytes: longer than any host name with a port.
const URL_BYTES_MAX: usize = 300;

/// Returns `true` for `http://HOST` and `http://HOST:PORT`, the only form of an engine's URL.
/// Routers append their own paths. After a query or a fragment, these would have no effect, so the
/// member would choose the whole request.
pub fn is_engine_url(url: &str) -> bool {
    // `Uri` drops a fragment without an error.
    let is_foreign = |c: char| matches!(c, '?' | '#' | '@' | '\\') || c.is_whitespace() || c.is_control();
    if url.len() > URL_BYTES_MAX || url.contains(is_foreign) {
        return false;
    }
    url.parse::<Uri>().is_ok_and(|uri| {
        let is_host = |authority: &Authority| {
            !authority.host().is_empty()
                && (authority.as_str() == authority.host() || authority.port_u16().is_some_and(|port| port > 0))
        };
        uri.scheme_str() == Some("http") && uri.authority().is_some_and(is_host) && uri.path() == "/"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_url_is_a_host_and_a_port_only() {
        for url in ["http://10.0.0.1:7720", "http://gpu-7.example.com/", "http://[::1]:80"] {
            assert!(is_engine_url(url), "{url}");
        }
        let long = format!("http://{}", "a".repeat(URL_BYTES_MAX));
        let wrong = [
            "https://a:1",
            "ftp://a:1",
            "a:1",
            "http://",
            "http://a:0",
            "http://a:65536",
            "http://a:",
            "http://user@a:1",
            "http://user:word@a:1",
            "http://a:1/any?x#",
            "http://a:1/any",
            "http://a:1?x",
            "http://a:1#x",
            "http://a:1\\@b",
            "http://a:1/\r\nHost: b",
            "http:// a:1",
            &long,
        ];
        wrong.iter().for_each(|url| assert!(!is_engine_url(url), "{url}"));
    }

    #[test]
    fn events_serialize_to_the_documented_json() {
        let line =
            serde_json::to_value(DecodeEvent::Start(DecodeStart { prompt_tokens: 3, ..Default::default() })).unwrap();
        assert_eq!((line["type"].as_str(), line["prompt_tokens"].as_u64()), (Some("start"), Some(3)));
        let line = serde_json::to_value(DecodeEvent::Token { id: 7, text: "x".into(), logprobs: None }).unwrap();
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
    fn omitted_request_fields_take_defaults() {
        let request: DecodeRequest =
            serde_json::from_str(r#"{"request_id":"a","tokens":[1],"deadline_ms":5}"#).unwrap();
        assert_eq!((request.cache, request.await_pages), (CacheMode::All, 0));
        assert_eq!(serde_json::to_string(&CacheMode::None).unwrap(), r#""none""#);
    }
}
