//! HTTP endpoints of a node for operators: `/healthz`, `/metrics`, `/status`, `/scrub` and
//! `/namespaces`.

use crate::namespaces::ChangeError;
use crate::state::NodeState;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use larder_format::NamespaceId;
use larder_http::Refusal;
use serde_json::json;
use std::sync::Arc;

pub(crate) fn routes(node: Arc<NodeState>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(metrics))
        .route("/status", get(|State(node): State<Arc<NodeState>>| async move { Json(node.status()) }))
        .route("/scrub", post(scrub))
        .route("/namespaces", get(list_namespaces))
        .route("/namespaces/{namespace}/retire", post(retire))
        .route("/namespaces/{namespace}/rollback", post(rollback))
        .with_state(node)
}

/// Starts a scrub of every L3 device and returns at once. `/status` reports its progress.
async fn scrub(State(node): State<Arc<NodeState>>) -> &'static str {
    node.store.tiers().devices().scrub_now();
    "scrub started; see /status for its progress\n"
}

async fn list_namespaces(State(node): State<Arc<NodeState>>) -> Response {
    Json(node.store.tiers().list_namespaces()).into_response()
}

async fn retire(State(node): State<Arc<NodeState>>, Path(namespace): Path<String>) -> Response {
    set_retired(node, &namespace, true).await
}

async fn rollback(State(node): State<Arc<NodeState>>, Path(namespace): Path<String>) -> Response {
    set_retired(node, &namespace, false).await
}

/// Retires a namespace, or rolls that back. A repetition changes nothing and succeeds. The
/// namespace may be unknown: its pages may be on other nodes, and clients could put more here.
async fn set_retired(node: Arc<NodeState>, namespace: &str, is_retired: bool) -> Response {
    let id: NamespaceId = match namespace.parse() {
        Ok(id) => id,
        Err(error) => return failure(StatusCode::BAD_REQUEST, &error),
    };
    // A task of its own: a change that is stored takes effect although its caller has gone.
    let changing = tokio::spawn(async move { node.store.tiers().set_retired(id, is_retired).await });
    match changing.await {
        Ok(Ok(changed)) => {
            let action = if is_retired { "retired" } else { "rolled back" };
            tracing::info!(namespace = %id, action, changed, "an operator changed a namespace");
            Json(json!({ "namespace": id.to_string(), "retired": is_retired, "changed": changed })).into_response()
        }
        Ok(Err(error)) => failure(status_of(&error), &error),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, &error),
    }
}

fn status_of(error: &ChangeError) -> StatusCode {
    match error {
        ChangeError::TooMany => StatusCode::CONFLICT,
        ChangeError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        ChangeError::Store(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn failure(status: StatusCode, reason: &dyn std::fmt::Display) -> Response {
    (status, format!("{reason}\n")).into_response()
}

/// Answer to a request that the server refused before any endpoint saw it.
pub(crate) fn refusal(refusal: &Refusal) -> Response {
    failure(refusal.status, &refusal.message)
}

async fn metrics(State(node): State<Arc<NodeState>>) -> Response {
    let mut text = String::new();
    node.refresh_metrics();
    match prometheus_client::encoding::text::encode(&mut text, &node.registry) {
        Ok(()) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
