//! Types of the admin API, for both sides. Failures are `{"error":{"code","message"}}` with a 4xx or 5xx status.

use crate::metrics::Counters;
use larder_client::{NodeView, Tier};
use larder_model::ChatMessage;
use larder_worker::api::{EngineState, Role};
use serde::{Deserialize, Serialize};

/// `GET`: 200 while the router serves.
pub const PATH_HEALTH: &str = "/healthz";
/// `GET`: metrics in Prometheus text form.
pub const PATH_METRICS: &str = "/metrics";
/// `GET`: [`StatusResponse`].
pub const PATH_STATUS: &str = "/admin/v1/status";
/// `POST` [`PrefixRequest`]: [`InspectResponse`].
pub const PATH_INSPECT: &str = "/admin/v1/prefix/inspect";
/// `POST` [`PrefixRequest`]: [`WarmResponse`].
pub const PATH_WARM: &str = "/admin/v1/prefix/warm";
/// `POST` [`PrefixRequest`]: [`ForgetResponse`].
pub const PATH_FORGET: &str = "/admin/v1/prefix/forget";

/// `POST` [`PinRequest`]: [`PinResponse`].
pub const PATH_PIN: &str = "/admin/v1/prefix/pin";
/// `POST` [`PrefixRequest`]: [`PinResponse`].
pub const PATH_UNPIN: &str = "/admin/v1/prefix/unpin";

/// The whole system as the router sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatusResponse {
    /// Version of the router.
    pub version: String,
    /// Seconds since the router started.
    pub uptime_seconds: u64,
    /// The store.
    pub store: String,
    /// Its nodes.
    pub nodes: Vec<NodeView>,
    /// The engines.
    pub engines: Vec<EngineStatus>,
    /// The models that can be asked for.
    pub models: Vec<ModelStatus>,
    /// What the router did.
    pub router: Counters,
}

/// One engine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The name it registered under.
    pub name: String,
    /// Prefill or decode.
    pub role: Role,
    /// Where it is.
    pub url: String,
    /// What it serves.
    pub model: String,
    /// Namespace of its pages, hex.
    pub namespace: String,
    /// Most tokens of prompt and answer.
    pub max_context: u32,
    /// Whether requests may go there: false while it is left alone after a failure.
    pub up: bool,
    /// Tokens that this router asked it for and that are not answered.
    pub outstanding_tokens: u64,
    /// Requests of this router that it works on.
    pub requests: u64,
    /// What it says of itself; absent if it did not answer in time.
    pub state: Option<EngineState>,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStatus {
    /// Its name.
    pub name: String,
    /// Namespace of its pages, hex.
    pub namespace: String,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Prefill engines that requests may go to.
    pub prefill_engines: u32,
    /// Decode engines that requests may go to.
    pub decode_engines: u32,
}

/// Names the beginning of a sequence: exactly one of `text`, `tokens` and `messages`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixRequest {
    /// The model; may be left out if there is one only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Text, tokenised like a prompt of `/v1/completions`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Token ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
    /// A conversation, written with the model's chat template without the cue for the next answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<Vec<ChatMessage>>,
}

/// The pages of a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InspectResponse {
    /// The model.
    pub model: String,
    /// Namespace, hex.
    pub namespace: String,
    /// Tokens of the prefix, those behind the last whole page included.
    pub tokens: u32,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Its whole pages.
    pub pages: Vec<PageStatus>,
}

/// Where one page lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageStatus {
    /// Place in the sequence, from 0.
    pub index: u32,
    /// Key, hex.
    pub key: String,
    /// First token.
    pub token_start: u32,
    /// One behind the last token.
    pub token_end: u32,
    /// `L2`, `L3`, or null: the store does not have it.
    pub tier: Option<Tier>,
}

/// What warming a prefix came to; `in_l2 + loaded + computed + missing` is `pages`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmResponse {
    /// Whole pages of the prefix.
    pub pages: u32,
    /// Were in L2 already.
    pub in_l2: u32,
    /// Were in L3 and are in L2 now.
    pub loaded: u32,
    /// Were nowhere, and were computed and stored.
    pub computed: u32,
    /// Are not in L2 now.
    pub missing: u32,
}

/// What forgetting a prefix came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetResponse {
    /// Whole pages of the prefix.
    pub pages: u32,
    /// Of those, were there and are forgotten.
    pub forgotten: u32,
    /// Whether every store node said so. If not, a page may still be there: try again when all nodes are up.
    pub complete: bool,
}

/// Which pages to pin, how, and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinRequest {
    /// Which pages.
    pub prefix: PrefixRequest,
    /// Seconds until the pins end: from 1 to 2,592,000, which is 30 days.
    pub seconds: u64,
    /// They may go when nothing else can. If false they stay; all that is held so is at most a quarter of L2.
    #[serde(default)]
    pub soft: bool,
}

/// What pinning a prefix, or ending its pins, came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinResponse {
    /// Whole pages of the prefix.
    pub pages: u32,
    /// Of those, are pinned now; when pins are ended, were.
    pub pinned: u32,
    /// Whether every store node that was to be asked answered.
    pub complete: bool,
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// What went wrong.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// For programs: `bad_request`, `too_large`, `refused`, `model_not_found`, `not_found`, `unavailable`, `timeout`.
    pub code: String,
    /// For people.
    pub message: String,
}
