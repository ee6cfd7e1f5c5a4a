//! The admin API's handlers.
//!
//! What always holds: an answer comes within [`REQUEST_TIMEOUT`]; a node or an engine that does not answer is shown as
//! such and delays the others by no more than [`STATUS_TIMEOUT`].

use super::api::{
    EngineStatus, ErrorDetail, ErrorResponse, ModelStatus, PATH_FORGET, PATH_HEALTH, PATH_INSPECT, PATH_METRICS,
    PATH_PIN, PATH_STATUS, PATH_UNPIN, PATH_WARM, PinRequest, PrefixRequest, StatusResponse,
};
use super::prefix::Prefix;
use crate::Shared;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::future::join_all;
use larder_client::PinKind;
use larder_worker::api::Role;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Most bytes of a request.
const BODY_BYTES_MAX: usize = 16 << 20;
/// Most time for nodes and engines to say how they are.
const STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Most time for a request about a prefix; warming may compute.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest time for which pages are pinned, in seconds: 30 days.
const PIN_SECONDS_MAX: u64 = 30 * 24 * 3600;

/// A failure on its way to a caller.
#[derive(Debug)]
pub(crate) struct AdminError {
    status: StatusCode,
    detail: ErrorDetail,
}

impl AdminError {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        Self { status, detail: ErrorDetail { code: code.into(), message: message.into() } }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }

    fn timeout() -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", "the request took longer than its time limit")
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        (self.status, Json(ErrorResponse { error: self.detail })).into_response()
    }
}

pub(crate) fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route(PATH_HEALTH, get(|| async { "ok\n" }))
        .route(PATH_METRICS, get(metrics))
        .route(PATH_STATUS, get(status))
        .route(PATH_INSPECT, post(inspect))
        .route(PATH_WARM, post(warm))
        .route(PATH_FORGET, post(forget))
        .route(PATH_PIN, post(pin))
        .route(PATH_UNPIN, post(unpin))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(shared)
}

async fn no_route(uri: axum::http::Uri) -> AdminError {
    AdminError::new(StatusCode::NOT_FOUND, "not_found", format!("there is nothing at {}", uri.path()))
}

async fn no_method(method: axum::http::Method, uri: axum::http::Uri) -> AdminError {
    let message = format!("{method} is not offered at {}", uri.path());
    AdminError::new(StatusCode::METHOD_NOT_ALLOWED, "bad_request", message)
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    match shared.metrics.text(&shared.engines) {
        Ok(text) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn status(State(shared): State<Arc<Shared>>) -> Json<StatusResponse> {
    let deadline = Instant::now() + STATUS_TIMEOUT;
    let nodes = tokio::time::timeout(STATUS_TIMEOUT * 2, shared.directory.status(deadline.into_std()));
    let engines = join_all(shared.engines.list().into_iter().map(|engine| {
        let shared = shared.clone();
        async move {
            let state = shared.calls.state(&engine.info.url, deadline).await.ok();
            EngineStatus {
                name: engine.name.clone(),
                role: engine.info.role,
                url: engine.info.url.clone(),
                model: engine.info.model.clone(),
                namespace: engine.namespace.to_string(),
                max_context: engine.info.max_context,
                up: engine.is_admitted(),
                outstanding_tokens: engine.outstanding_tokens(),
                requests: engine.requests(),
                state,
            }
        }
    }));
    let (nodes, engines) = tokio::join!(nodes, engines);
    Json(StatusResponse {
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_seconds: shared.started.elapsed().as_secs(),
        store: shared.options.store.to_string(),
        nodes: nodes.unwrap_or_default(),
        engines,
        models: models(&shared),
        router: shared.metrics.counters(),
    })
}

fn models(shared: &Shared) -> Vec<ModelStatus> {
    let engines = |role, namespace| shared.engines.admitted(role, namespace) as u32;
    let models = shared.models.served(&shared.engines).into_iter().map(|model| ModelStatus {
        name: model.name.clone(),
        namespace: model.namespace.to_string(),
        page_tokens: model.page_tokens as u32,
        prefill_engines: engines(Role::Prefill, model.namespace),
        decode_engines: engines(Role::Decode, model.namespace),
    });
    models.collect()
}

async fn inspect(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, AdminError> {
    answer(async {
        let prefix = read(shared, body).await?;
        Ok(Json(prefix.inspect(deadline()).await).into_response())
    })
    .await
}

async fn warm(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, AdminError> {
    answer(async {
        let prefix = read(shared, body).await?;
        Ok(Json(prefix.warm(deadline()).await).into_response())
    })
    .await
}

async fn forget(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, AdminError> {
    answer(async {
        let prefix = read(shared, body).await?;
        Ok(Json(prefix.forget(deadline()).await).into_response())
    })
    .await
}

async fn pin(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, AdminError> {
    answer(async {
        let PinRequest { prefix, seconds, soft } = parse(body).await?;
        if !(1..=PIN_SECONDS_MAX).contains(&seconds) {
            let message = format!("'seconds' is {seconds}, it must be from 1 to {PIN_SECONDS_MAX}");
            return Err(AdminError::bad_request(message));
        }
        let kind = if soft { PinKind::Soft } else { PinKind::Hard };
        let prefix = Prefix::resolve(shared, prefix).await?;
        Ok(Json(prefix.pin(kind, Duration::from_secs(seconds), deadline()).await?).into_response())
    })
    .await
}

async fn unpin(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, AdminError> {
    answer(async {
        let prefix = read(shared, body).await?;
        Ok(Json(prefix.pin(PinKind::None, Duration::ZERO, deadline()).await?).into_response())
    })
    .await
}

fn deadline() -> Instant {
    Instant::now() + REQUEST_TIMEOUT
}

async fn answer(work: impl Future<Output = Result<Response, AdminError>>) -> Result<Response, AdminError> {
    tokio::time::timeout(REQUEST_TIMEOUT, work).await.unwrap_or_else(|_| Err(AdminError::timeout()))
}

async fn read(shared: Arc<Shared>, body: Body) -> Result<Prefix, AdminError> {
    let request: PrefixRequest = parse(body).await?;
    Prefix::resolve(shared, request).await
}

async fn parse<T: DeserializeOwned + Send + 'static>(body: Body) -> Result<T, AdminError> {
    let bytes = to_bytes(body, BODY_BYTES_MAX).await.map_err(|_| {
        let message = format!("the request body is longer than {BODY_BYTES_MAX} bytes");
        AdminError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    })?;
    crate::openai::off_loop_if_large(bytes, |bytes| serde_json::from_slice(&bytes))
        .await
        .map_err(|error| AdminError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", error.to_string()))?
        .map_err(|error| AdminError::bad_request(format!("the request body is not valid: {error}")))
}
