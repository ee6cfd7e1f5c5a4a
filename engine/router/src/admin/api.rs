//! Types of the admin API, for server and clients.
//!
//! A failure has a 4xx or 5xx status and the body `{"error":{"code","message"}}`. New fields may be
//! added to responses, so clients must ignore unknown ones. Requests with unknown fields are
//! refused: a misspelt field would otherwise change the meaning of a request silently.

use crate::metrics::Counters;
use larder_client::{NodeView, Tier};
use larder_model::ChatMessage;
use larder_worker::api::{EngineState, MemoryMax, Role};
use serde::{Deserialize, Serialize};

pub const PATH_HEALTH: &str = "/healthz";
pub const PATH_METRICS: &str = "/metrics";
/// Prefix of all other paths of this API.
pub const PATH_PREFIX: &str = "/admin/";
pub const PATH_STATUS: &str = "/admin/v1/status";
/// `POST` [`InspectRequest`]: [`InspectResponse`].
pub const PATH_INSPECT: &str = "/admin/v1/prefix/inspect";
/// `POST` [`PrefixRequest`]: [`WarmResponse`].
pub const PATH_WARM: &str = "/admin/v1/prefix/warm";
/// `POST` [`PrefixRequest`]: [`ForgetResponse`].
pub const PATH_FORGET: &str = "/admin/v1/prefix/forget";
/// `POST` [`PinRequest`]: [`PinResponse`].
pub const PATH_PIN: &str = "/admin/v1/prefix/pin";
/// `POST` [`PrefixRequest`]: [`PinResponse`].
pub const PATH_UNPIN: &str = "/admin/v1/prefix/unpin";
/// `POST` a [`PrefixRequest`] as `prefix`, and from 1 to 16 of [`HintAction`] as `actions`, which
/// are carried out in order: [`HintsResponse`].
pub const PATH_HINTS: &str = "/admin/v1/prefix/hints";

/// Error code of a request that was sent to the port of the other API.
pub const CODE_WRONG_PORT: &str = "wrong_port";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatusResponse {
    pub version: String,
    pub uptime_seconds: u64,
    pub store: String,
    pub nodes: Vec<NodeView>,
    pub engines: Vec<EngineStatus>,
    pub models: Vec<ModelStatus>,
    pub router: Counters,
    /// Memory that the router can take. Empty if it is older than this field.
    #[serde(default)]
    pub memory_max: MemoryMax,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineStatus {
    pub name: String,
    pub role: Role,
    pub url: String,
    pub model: String,
    pub namespace: String,
    pub max_context: u32,
    /// False while the circuit breaker excludes the engine after a failure.
    pub up: bool,
    /// Tokens that this router requested and that the engine has not finished.
    pub outstanding_tokens: u64,
    pub requests: u64,
    /// State that the engine reported. Absent if it did not answer within a second.
    pub state: Option<EngineState>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStatus {
    pub name: String,
    pub namespace: String,
    pub page_tokens: u32,
    pub prefill_engines: u32,
    pub decode_engines: u32,
}

/// Beginning of a token sequence. Exactly one of `text`, `tokens` and `messages` must be present.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PrefixRequest {
    /// Model name. Optional if the router serves only one model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Text, tokenised like a prompt of `/v1/completions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
    /// Chat messages, rendered with the model's chat template without the cue for the next answer.
    /// On the wire the router accepts every form of message that `/v1/chat/completions` accepts,
    /// such as content in parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<Vec<ChatMessage>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct InspectRequest {
    #[serde(flatten)]
    pub prefix: PrefixRequest,
    /// Asks why pages are missing: see [`PageStatus::miss`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub why: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InspectResponse {
    pub model: String,
    pub namespace: String,
    /// Tokens of the prefix, including those after its last whole page.
    pub tokens: u32,
    pub page_tokens: u32,
    pub pages: Vec<PageStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageStatus {
    pub index: u32,
    pub key: String,
    pub token_start: u32,
    pub token_end: u32,
    /// `L2`, `L3`, or null if no node of the store reported the page.
    pub tier: Option<Tier>,
    /// Null if the page has no pin, or if its node cannot report pins.
    #[serde(default)]
    pub pin: Option<PinStatus>,
    /// Reason why the page is missing, if the request asks for it and the page's node tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub miss: Option<MissStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissStatus {
    /// `never_stored`, `evicted`, `expired`, `forgotten`, `other_namespace`, `retired`,
    /// `being_put`, `recovering` or `device_failing`. `docs/protocol.md` explains them.
    pub reason: String,
    /// Time of the event, in milliseconds since 1970. Null if it is unknown, or if there was none.
    pub at_unix_ms: Option<u64>,
    /// Fields by which the nearest namespace with the page differs.
    #[serde(default)]
    pub differing: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinStatus {
    pub kind: PinStrength,
    /// Time until the pin expires, in seconds, rounded up.
    pub seconds_left: u64,
}

/// `hard` pages stay in L2. `soft` pages leave it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PinStrength {
    Hard,
    Soft,
}

/// Outcome of warming a prefix. `in_l2 + loaded + computed + missing` equals `pages`, the number of
/// whole pages of the prefix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmResponse {
    pub pages: u32,
    pub in_l2: u32,
    pub loaded: u32,
    /// Pages that no tier had and that a prefill engine computed and stored.
    pub computed: u32,
    pub missing: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetResponse {
    pub pages: u32,
    pub forgotten: u32,
    /// True if every store node and every engine of the model confirmed. Otherwise a page may
    /// remain on a node that is down, or in the L1 of an engine: repeat the request later.
    pub complete: bool,
    /// Number of engines of the model that were asked to drop the pages from L1.
    #[serde(default)]
    pub engines: u32,
    /// Names of the engines that did not confirm. Such an engine may still use the pages, and may
    /// put them into the store again.
    #[serde(default)]
    pub engines_unconfirmed: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PinRequest {
    pub prefix: PrefixRequest,
    /// Duration of the pins in seconds, from 1 to 2,592,000 (30 days).
    pub seconds: u64,
    /// Soft pins are evicted last, hard pins never. All hard pins together hold at most a quarter
    /// of a node's L2.
    pub soft: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinResponse {
    pub pages: u32,
    pub pinned: u32,
    pub complete: bool,
}

/// Advice of a gateway about the pages of a prefix, as vLLM's tiers take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HintAction {
    pub action: HintKind,
    /// Duration in seconds. `retain` and `pin` need it, and the others have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HintKind {
    /// Keep pages in L2 that are there, as far as the namespace's share of soft pins allows.
    Retain,
    /// Load pages from L3 into L2.
    Prefetch,
    /// Load pages and keep them in L2, as hard pins.
    Pin,
    /// Evict pages before others.
    Demote,
    /// Delete pages durably.
    Forget,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HintsResponse {
    /// Whole pages of the prefix.
    pub pages: u32,
    /// One per action, in their order.
    pub results: Vec<HintResult>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HintResult {
    pub action: HintKind,
    pub status: HintStatus,
    /// Pages that the action reached.
    pub pages: u32,
    /// Reason of a node to refuse, in its words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HintStatus {
    /// Carried out for all pages that the store has.
    Accepted,
    /// Carried out for fewer pages, or for a shorter time, because of a quota or limit.
    Clipped,
    /// Not carried out now: a node did not answer, or has not finished. Repeat it later.
    Deferred,
    /// The store has none of the pages.
    Missing,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    pub error: ErrorDetail,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// Stable code for programs: `bad_request`, `too_large`, `refused`, `model_not_found`,
    /// `not_found`, `wrong_port`, `unavailable`, `timeout` or `internal`.
    pub code: String,
    pub message: String,
}
