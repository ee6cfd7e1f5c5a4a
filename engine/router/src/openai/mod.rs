//! OpenAI-compatible API.
//!
//! Invariants:
//!
//! - Every failure has OpenAI's error body, on every path.
//! - A request counts against the limit of answers in progress until its last byte is sent, its
//!   client disconnects, or its time limit passes.
//! - A client that disconnects cancels all work done for it.
//!
//! Layout: [`types`] parses requests, with [`fields`], [`messages`], [`prompt`] and [`sampling`].
//! `completions`, `chat`, `responses` and `native` are the endpoints. `prepare` tokenises and
//! admits prompts, and `answer` runs their choices within their [`constraint`]. [`tools`] and
//! [`tool_parser`] find calls of tools in answers. `whole` and `stream` write them, with `logprobs`
//! and `usage`. `event_room` bounds events that wait for their client. `tokens` and `operations`
//! are the paths without a model's answer, and `cors` opens paths to web pages. [`errors`] has the
//! error bodies.

mod answer;
mod chat;
pub(crate) use chat::text_for as chat_text;
mod completions;
pub mod constraint;
mod cors;
mod echo;
pub mod errors;
mod event_room;
pub(crate) use event_room::EVENTS_BYTES_MAX;
pub mod fields;
mod logprobs;
pub mod messages;
mod native;
mod operations;
pub(crate) use operations::{OPERATOR_PATHS, metrics};
mod prepare;
pub(crate) use prepare::{PROMPT_CHARGE_BYTES, PROMPTS_BYTES_MAX, charge, too_many_bytes};
pub mod prompt;
mod responses;
mod responses_input;
mod responses_output;
pub mod sampling;
mod stream;
mod tokens;
pub mod tool_parser;
pub mod tools;
pub mod types;
mod usage;
mod whole;
pub(crate) use whole::{ANSWER_CHARGE_BYTES, ANSWERS_BYTES_MAX, charged_body};

use crate::RouterState;
use crate::admin::api::{PATH_HEALTH, PATH_PREFIX};
use crate::metrics::{RefusalReason, RequestRecord};
use crate::models::ModelLookup;
use crate::templates::TextCharge;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use errors::ApiError;
use larder_http::{BodyCharge, PeerAddress, RequestBody};
use larder_worker::api::CacheMode;
use std::sync::Arc;
use tokio::time::Instant;

/// Request header that limits the caches a request may use: `all` (default), `store` or `none`.
pub const HEADER_CACHE: &str = "x-larder-cache";
pub const HEADER_REQUEST_ID: &str = "x-request-id";
/// Largest body parsed on the event loop, in bytes. Parsing takes about a millisecond at this size;
/// larger bodies would delay the tokens of other requests.
const PARSE_INLINE_BYTES_MAX: usize = 256 << 10;
/// Maximum length of a client's request id, in bytes. Longer ids are replaced, because they end up
/// in logs and engines.
const REQUEST_ID_BYTES_MAX: usize = 128;

#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

pub(crate) fn routes(router: Arc<RouterState>) -> Router {
    Router::new()
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(get_model))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/responses", post(responses::handle))
        .route("/generate", post(native::handle))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(operations::health))
        .route("/ready", get(operations::ready))
        .route(operations::PATH_METRICS, get(metrics))
        // Not GET: a web page can send one without `Origin`, as an image.
        .route(operations::PATH_FLUSH, post(operations::flush))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(router.clone(), cors::with_cors))
        .layer(from_fn(with_request_id))
        .with_state(router)
}

pub(crate) fn is_api_path(path: &str) -> bool {
    path.starts_with("/v1/")
}

async fn no_route(State(router): State<Arc<RouterState>>, request: Request) -> ApiError {
    let path = request.uri().path();
    // `larder --admin` pointed at this port is a common mistake, and "unknown URL" would not
    // explain it.
    if path.starts_with(PATH_PREFIX) || path == PATH_HEALTH {
        return ApiError::wrong_port(&crate::location(router.admin_addr));
    }
    ApiError::no_route(request.method().as_str(), path)
}

async fn no_method(request: Request) -> ApiError {
    ApiError::no_method(request.method().as_str(), request.uri().path())
}

/// Middleware that takes over the client's request id, or makes one, and returns it in the
/// response.
async fn with_request_id(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(HEADER_REQUEST_ID).and_then(|value| value.to_str().ok());
    // Ids go to logs and engines. Printable ASCII cannot forge log lines or headers.
    let is_fit = |id: &&str| (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic());
    let id = given.filter(is_fit).map_or_else(|| format!("req_{}", random_id()), str::to_string);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER_REQUEST_ID, value);
    }
    response
}

pub(crate) fn random_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn model_card(model: &crate::models::ServedModel, router: &RouterState) -> serde_json::Value {
    let context = router.engines.context_max(larder_worker::api::Role::Decode, model.namespace);
    serde_json::json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "larder",
        "max_model_len": context,
    })
}

async fn list_models(State(router): State<Arc<RouterState>>) -> Response {
    let record = router.metrics.begin("models");
    let cards: Vec<_> = router.models.served(&router.engines).iter().map(|m| model_card(m, &router)).collect();
    record.end(200);
    Json(serde_json::json!({"object": "list", "data": cards})).into_response()
}

async fn get_model(State(router): State<Arc<RouterState>>, id: Result<Path<String>, PathRejection>) -> Response {
    let record = router.metrics.begin("models");
    // axum's own rejection is plain text. An id that is not UTF-8 cannot be the name of a model.
    let Ok(Path(id)) = id else {
        let error = ApiError::field("model", "the model's name is not valid UTF-8");
        record.end(error.status.as_u16());
        return error.into_response();
    };
    match router.models.find(&id, &router.engines) {
        ModelLookup::Model(model) => {
            record.end(200);
            Json(model_card(&model, &router)).into_response()
        }
        found => {
            let error = ApiError::model_error(&found, &id);
            record.end(error.status.as_u16());
            error.into_response()
        }
    }
}

pub(crate) struct RequestContext {
    pub(crate) router: Arc<RouterState>,
    pub(crate) request_id: String,
    pub(crate) cache: CacheMode,
    pub(crate) deadline: Instant,
    pub(crate) peer: PeerAddress,
    /// Charge for the body, or for the prompts in it.
    body: BodyCharge,
    /// Charge for the text of a conversation.
    text: TextCharge,
}

impl RequestContext {
    fn new(router: Arc<RouterState>, id: RequestId, peer: PeerAddress, headers: &HeaderMap) -> Result<Self, ApiError> {
        let deadline = Instant::now() + router.options.request_timeout;
        let cache = cache_mode(headers)?;
        let (request_id, body, text) = (id.0, BodyCharge::default(), TextCharge::default());
        Ok(Self { router, request_id, cache, deadline, peer, body, text })
    }

    /// Parses the body with `parse`. Fails with 413 if no model's context needs so long a body.
    async fn parse<T: Send + 'static>(
        &mut self,
        body: RequestBody,
        parse: fn(&[u8]) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        check_length(&self.router, &body)?;
        self.body = body.charge;
        let parsed = parse_in_background_if_large(body.bytes, move |bytes| parse(&bytes)).await;
        parsed.unwrap_or_else(|error| Err(ApiError::internal("read the request", error)))
    }
}

/// Refuses a body that is longer than any model's context needs.
pub(crate) fn check_length(router: &RouterState, body: &RequestBody) -> Result<(), ApiError> {
    let bytes_max = router.models.body_bytes_max(&router.engines).unwrap_or(usize::MAX);
    if body.bytes.len() <= bytes_max {
        return Ok(());
    }
    router.metrics.count_refusal(RefusalReason::BodyTooLarge);
    Err(ApiError::too_large(bytes_max))
}

/// Runs `parse` inline for small inputs and in the background above [`PARSE_INLINE_BYTES_MAX`]. The
/// thread hop costs more than parsing a small body.
pub(crate) async fn parse_in_background_if_large<T: Send + 'static>(
    bytes: bytes::Bytes,
    parse: impl FnOnce(bytes::Bytes) -> T + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    match bytes.len() {
        ..=PARSE_INLINE_BYTES_MAX => Ok(parse(bytes)),
        _ => crate::background::run(move || parse(bytes)).await,
    }
}

fn cache_mode(headers: &HeaderMap) -> Result<CacheMode, ApiError> {
    match headers.get(HEADER_CACHE).map(HeaderValue::as_bytes) {
        None | Some(b"all") => Ok(CacheMode::All),
        Some(b"store") => Ok(CacheMode::Store),
        Some(b"none") => Ok(CacheMode::None),
        Some(_) => Err(ApiError::field(HEADER_CACHE, format!("header {HEADER_CACHE} must be all, store or none"))),
    }
}

/// A request to one of the endpoints that answer with a model's text.
pub(crate) struct ApiCall {
    router: Arc<RouterState>,
    id: RequestId,
    headers: HeaderMap,
    body: RequestBody,
}

impl FromRequest<Arc<RouterState>> for ApiCall {
    type Rejection = Response;

    async fn from_request(mut request: Request, router: &Arc<RouterState>) -> Result<Self, Response> {
        let id = request.extensions_mut().remove().unwrap_or_else(|| RequestId(random_id()));
        let headers = std::mem::take(request.headers_mut());
        let body = RequestBody::from_request(request, router).await.map_err(IntoResponse::into_response)?;
        Ok(Self { router: router.clone(), id, headers, body })
    }
}

impl ApiCall {
    /// Runs an endpoint and records a request that fails before its answer starts. Afterwards the
    /// answer owns the record.
    async fn serve<F>(self, endpoint: &'static str, serve: F) -> Response
    where
        F: AsyncFnOnce(RequestContext, RequestBody, &mut Option<RequestRecord>) -> Result<Response, ApiError>,
    {
        let mut record = Some(self.router.metrics.begin(endpoint));
        let served = match RequestContext::new(self.router, self.id, self.body.peer, &self.headers) {
            Ok(context) => serve(context, self.body, &mut record).await,
            Err(error) => Err(error),
        };
        served.unwrap_or_else(|error| {
            if let Some(record) = record {
                record.end(error.status.as_u16());
            }
            error.into_response()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;

    #[test]
    fn cache_header_accepts_only_known_modes() {
        let mode = |value: &'static str| {
            cache_mode(&HeaderMap::from_iter([(HEADER_CACHE.parse().unwrap(), HeaderValue::from_static(value))]))
        };
        assert_eq!(cache_mode(&HeaderMap::new()).unwrap(), CacheMode::All);
        assert_eq!(mode("store").unwrap(), CacheMode::Store);
        assert_eq!(mode("none").unwrap(), CacheMode::None);
        assert_eq!(mode("some").unwrap_err().status, StatusCode::BAD_REQUEST);
    }
}
