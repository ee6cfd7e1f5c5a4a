//! Paths of the OpenAI API's port for monitors and benchmarks: health, metrics, and the caches.
//!
//! Invariant: no web page of another server can use the paths in [`OPERATOR_PATHS`]. The HTTP
//! server checks the headers `Host` and `Origin` for them.

use super::errors::ApiError;
use crate::RouterState;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use larder_worker::api::Role;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

pub(crate) const PATH_METRICS: &str = "/metrics";
pub(crate) const PATH_FLUSH: &str = "/flush_cache";
/// Paths that a web page could misuse.
pub(crate) const OPERATOR_PATHS: [&str; 2] = [PATH_METRICS, PATH_FLUSH];

const OPENMETRICS: &str = "application/openmetrics-text";
/// Maximum time of a flush.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// 200 while the router runs.
pub(super) async fn health() -> &'static str {
    "ok\n"
}

/// 200 while some model can be used, and 503 otherwise.
pub(super) async fn ready(State(router): State<Arc<RouterState>>) -> Result<&'static str, ApiError> {
    match router.models.is_ready(&router.engines) {
        true => Ok("ok\n"),
        false => Err(ApiError::unavailable("no model has a decode engine; try again when an engine has joined")),
    }
}

/// Metrics in OpenMetrics text form if the client accepts that, and in Prometheus' older one
/// otherwise.
pub(crate) async fn metrics(State(router): State<Arc<RouterState>>, headers: HeaderMap) -> Response {
    let text = match router.metrics.text(&router.engines) {
        Ok(text) => text,
        Err(error) => return ApiError::internal("encode its metrics", error).into_response(),
    };
    let accepts = |value: &axum::http::HeaderValue| value.to_str().is_ok_and(|value| value.contains(OPENMETRICS));
    match headers.get_all(ACCEPT).iter().any(accepts) {
        true => ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response(),
        false => {
            let text = crate::metrics::prometheus_text(&text);
            ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
    }
}

/// Drops the cached pages of all engines' L1. Pages in the store stay.
pub(super) async fn flush(State(router): State<Arc<RouterState>>) -> Result<String, ApiError> {
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    let engines = router.engines.list();
    let engines_of = |role| engines.iter().filter(|engine| engine.info.role == role).count();
    let flushed = router.engine_client.flush_all(&engines, deadline).await;
    let mut pages = 0;
    for (engine, answer) in engines.iter().zip(flushed) {
        match answer {
            Ok(answer) => pages += u64::from(answer.pages),
            Err(error) => {
                tracing::warn!(engine = %engine.name, %error, "an engine did not flush its cache");
                return Err(ApiError::unavailable("an engine did not flush its cache; try again"));
            }
        }
    }
    let (prefill, decode) = (engines_of(Role::Prefill), engines_of(Role::Decode));
    Ok(format!(
        "flushed {pages} pages of L1 from {prefill} prefill and {decode} decode engines; the store keeps its pages\n"
    ))
}
