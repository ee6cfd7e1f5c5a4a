//! Errors of the admin API, as clients see them.

use super::api::{ErrorDetail, ErrorResponse};
use crate::openai::errors::ApiError;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use larder_http::Refusal;

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

    /// Logs `error`, which names internals, and tells the client only that `action` failed.
    pub(crate) fn internal(action: &str, error: impl std::fmt::Display) -> Self {
        tracing::error!(%error, action, "admin request failed");
        let message = format!("the router failed to {action}; its log has the reason");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }
}

impl From<ApiError> for AdminError {
    /// Turns an error of the shared request parser into one of this API. This body has no field for
    /// the wrong parameter, so the message must name it.
    fn from(error: ApiError) -> Self {
        let code = match error.status {
            StatusCode::PAYLOAD_TOO_LARGE => "too_large",
            StatusCode::TOO_MANY_REQUESTS => "busy",
            StatusCode::GATEWAY_TIMEOUT => "timeout",
            StatusCode::INTERNAL_SERVER_ERROR => "internal",
            _ => "bad_request",
        };
        let status = if code == "bad_request" { StatusCode::BAD_REQUEST } else { error.status };
        let message = error.body.message;
        match error.body.param {
            Some(param) if !message.contains(&format!("'{param}'")) => {
                Self::new(status, code, format!("'{param}': {message}"))
            }
            _ => Self::new(status, code, message),
        }
    }
}

/// Answer to a request that the server refused before any handler saw it.
pub(crate) fn refusal(refusal: &Refusal) -> Response {
    let code = match refusal.status {
        StatusCode::PAYLOAD_TOO_LARGE => "too_large",
        StatusCode::SERVICE_UNAVAILABLE => "unavailable",
        StatusCode::REQUEST_TIMEOUT => "timeout",
        _ => "bad_request",
    };
    AdminError::new(refusal.status, code, refusal.message.clone()).into_response()
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        (self.status, Json(ErrorResponse { error: self.detail })).into_response()
    }
}
