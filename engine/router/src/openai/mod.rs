//! The OpenAI-compatible API.
//!
//! What always holds: every failure has OpenAI's shape, whatever the path; a request counts against the limit of answers
//! in progress until its last byte is sent, its client is gone, or its time is over; and a client that goes away takes all work for it along.
//!
//! [`types`]: what is asked · `completions`, `chat`: the two endpoints · `answer`: choices and whole answers · `stream`:
//! server-sent events · [`errors`].

mod answer;
mod chat;
pub(crate) use chat::tokens as chat_tokens;
mod completions;
pub mod errors;
mod stream;
pub mod types;

use crate::Shared;
use crate::models::Found;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use errors::ApiError;
use larder_worker::api::CacheMode;
use std::sync::Arc;
use tokio::time::Instant;

/// Request header that says which caches may be used: `all`, `store` or `none`.
pub const HEADER_CACHE: &str = "x-larder-cache";
/// Header of a request's id, both ways.
pub const HEADER_REQUEST_ID: &str = "x-request-id";
/// Bytes of a body up to which it is parsed on the event loop.
const PARSE_INLINE_BYTES_MAX: usize = 256 << 10;
/// Most bytes of an id that a client brings; longer ones are replaced.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// The id of a request.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

pub(crate) fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(get_model))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn(with_request_id))
        .with_state(shared)
}

async fn no_route(request: Request) -> ApiError {
    ApiError::no_route(request.method().as_str(), request.uri().path())
}

async fn no_method(request: Request) -> ApiError {
    ApiError::no_method(request.method().as_str(), request.uri().path())
}

/// Takes the client's id or makes one, and sends it back.
async fn with_request_id(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(HEADER_REQUEST_ID).and_then(|value| value.to_str().ok());
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

fn model_card(model: &crate::models::ServedModel, shared: &Shared) -> serde_json::Value {
    let context = shared.engines.context_max(larder_worker::api::Role::Decode, model.namespace);
    serde_json::json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "larder",
        "max_model_len": context,
    })
}

async fn list_models(State(shared): State<Arc<Shared>>) -> Response {
    let record = shared.metrics.begin("models");
    let cards: Vec<_> = shared.models.served(&shared.engines).iter().map(|m| model_card(m, &shared)).collect();
    record.end(200);
    Json(serde_json::json!({"object": "list", "data": cards})).into_response()
}

async fn get_model(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Response {
    let record = shared.metrics.begin("models");
    match shared.models.find(&id, &shared.engines) {
        Found::Model(model) => {
            record.end(200);
            Json(model_card(&model, &shared)).into_response()
        }
        found => {
            let error = ApiError::not_found(&found, &id);
            record.end(error.status.as_u16());
            error.into_response()
        }
    }
}

/// What an endpoint has in hand before it reads the body.
pub(crate) struct Arrival {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request_id: String,
    pub(crate) cache: CacheMode,
    pub(crate) deadline: Instant,
}

impl Arrival {
    fn new(shared: Arc<Shared>, id: RequestId, headers: &HeaderMap) -> Result<Self, ApiError> {
        let deadline = Instant::now() + shared.options.request_timeout;
        Ok(Self { cache: cache_mode(headers)?, shared, request_id: id.0, deadline })
    }

    /// The request in `body`, as `parse` reads it.
    async fn read<T: Send + 'static>(
        &self,
        body: Body,
        parse: fn(&[u8]) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let bytes_max = self.shared.options.body_bytes_max;
        let bytes = match tokio::time::timeout_at(self.deadline, axum::body::to_bytes(body, bytes_max)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(_)) => return Err(ApiError::too_large(bytes_max)),
            Err(_) => return Err(crate::route::RouteError::Deadline.into()),
        };
        let parsed = off_loop_if_large(bytes, move |bytes| parse(&bytes)).await;
        parsed.unwrap_or_else(|error| Err(ApiError::internal(format!("reading the request: {error}"))))
    }
}

/// Runs `parse`, which takes time in proportion to the bytes, off the event loop if there are many.
pub(crate) async fn off_loop_if_large<T: Send + 'static>(
    bytes: bytes::Bytes,
    parse: impl FnOnce(bytes::Bytes) -> T + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    match bytes.len() {
        ..=PARSE_INLINE_BYTES_MAX => Ok(parse(bytes)),
        _ => tokio::task::spawn_blocking(move || parse(bytes)).await,
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

/// Runs an endpoint; a request that fails before its answer began is counted here.
async fn counted<F>(shared: &Shared, endpoint: &'static str, serve: F) -> Response
where
    F: AsyncFnOnce(&mut Option<crate::metrics::Record>) -> Result<Response, ApiError>,
{
    let mut record = Some(shared.metrics.begin(endpoint));
    match serve(&mut record).await {
        Ok(response) => response,
        Err(error) => {
            if let Some(record) = record {
                record.end(error.status.as_u16());
            }
            if error.status == StatusCode::INTERNAL_SERVER_ERROR {
                tracing::error!(message = %error.body.message, "request failed");
            }
            error.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_header_is_checked() {
        let mode = |value: &'static str| {
            cache_mode(&HeaderMap::from_iter([(HEADER_CACHE.parse().unwrap(), HeaderValue::from_static(value))]))
        };
        assert_eq!(cache_mode(&HeaderMap::new()).unwrap(), CacheMode::All);
        assert_eq!(mode("store").unwrap(), CacheMode::Store);
        assert_eq!(mode("none").unwrap(), CacheMode::None);
        assert_eq!(mode("some").unwrap_err().status, StatusCode::BAD_REQUEST);
    }
}
