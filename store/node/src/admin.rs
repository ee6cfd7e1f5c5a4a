//! HTTP endpoints of a node for operators: `/healthz`, `/metrics`, `/status` and `/scrub`.

use crate::state::NodeState;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use larder_http::Refusal;
use std::sync::Arc;

pub(crate) fn routes(node: Arc<NodeState>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(metrics))
        .route("/status", get(|State(node): State<Arc<NodeState>>| async move { Json(node.status()) }))
        .route("/scrub", post(scrub))
        .with_state(node)
}

/// Starts a scrub of every L3 device and returns at once. `/status` reports its progress.
async fn scrub(State(node): State<Arc<NodeState>>) -> &'static str {
    node.store.tiers().devices().scrub_now();
    "scrub started; see /status for its progress\n"
}

/// Answer to a request that the server refused before any endpoint saw it.
pub(crate) fn refusal(refusal: &Refusal) -> Response {
    (refusal.status, format!("{}\n", refusal.message)).into_response()
}

async fn metrics(State(node): State<Arc<NodeState>>) -> Response {
    let mut text = String::new();
    node.refresh_metrics();
    match prometheus_client::encoding::text::encode(&mut text, &node.registry) {
        Ok(()) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
        }
        Err(error) => (axum::http::StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
