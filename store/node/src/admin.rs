//! `/healthz`, `/metrics`, `/status` and `/scrub` of a node, on axum.

use crate::node::Shared;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use std::sync::Arc;

pub(crate) fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(metrics))
        .route("/status", get(|State(shared): State<Arc<Shared>>| async move { Json(shared.status()) }))
        .route("/scrub", post(scrub))
        .with_state(shared)
}

/// Begins a pass over all that L3 holds; `/status` shows how far it is.
async fn scrub(State(shared): State<Arc<Shared>>) -> &'static str {
    shared.store.scrub_l3_now();
    "begun\n"
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let mut text = String::new();
    shared.refresh_metrics();
    match prometheus_client::encoding::text::encode(&mut text, &shared.registry) {
        Ok(()) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
        }
        Err(error) => (axum::http::StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
