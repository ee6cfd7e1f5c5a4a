//! Errors in the form that OpenAI's clients expect: `{"error":{"message","type","param","code"}}`.
//!
//! Messages reach API users. They name fields, models and limits, never types or internals of the
//! router.

use crate::admin::api::CODE_WRONG_PORT;
use crate::models::ModelLookup;
use crate::route::RouteError;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header::RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use larder_http::Refusal;
use larder_worker::api::ErrorCode;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub message: String,
    /// `invalid_request_error`, `rate_limit_error`, `server_error`.
    #[serde(rename = "type")]
    pub kind: String,
    pub param: Option<String>,
    pub code: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub body: ErrorBody,
    pub retry_after_s: Option<u64>,
}

#[derive(Debug, Serialize)]
pub struct Envelope<'a> {
    pub error: &'a ErrorBody,
}

impl ApiError {
    fn new(status: StatusCode, kind: &str, message: impl Into<String>) -> Self {
        let body = ErrorBody { message: message.into(), kind: kind.into(), param: None, code: None };
        Self { status, body, retry_after_s: None }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub fn field(param: &str, message: impl Into<String>) -> Self {
        let mut error = Self::invalid(message);
        error.body.param = Some(param.into());
        error
    }

    /// 400 for a value of field `param` that this server does not implement.
    pub fn unsupported(param: &str) -> Self {
        Self::field(param, format!("'{param}' with this value is not supported by this server"))
            .code("unsupported_value")
    }

    /// 400 for a field that this server does not know.
    pub fn unknown(param: &str) -> Self {
        Self::field(param, format!("'{param}' is not a field that this server supports")).code("unknown_parameter")
    }

    pub fn context_length(param: &str, message: impl Into<String>) -> Self {
        Self::field(param, message).code("context_length_exceeded")
    }

    /// 413 for a prompt whose bytes alone exceed the context.
    pub fn prompt_too_large(param: &str, message: impl Into<String>) -> Self {
        let mut error = Self::context_length(param, message);
        error.status = StatusCode::PAYLOAD_TOO_LARGE;
        error
    }

    pub fn no_route(method: &str, path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("Unknown request URL: {method} {path}"))
            .code("unknown_url")
    }

    pub fn wrong_port(location: &str) -> Self {
        let message = format!("this is the OpenAI API port; the admin API is at {location}");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code(CODE_WRONG_PORT)
    }

    pub fn no_method(method: &str, path: &str) -> Self {
        let message = format!("Not allowed to {method} on {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message).code("method_not_supported")
    }

    pub fn no_model(name: &str) -> Self {
        let mut error =
            Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("The model '{name}' does not exist"));
        error.body.param = Some("model".into());
        error.code("model_not_found")
    }

    /// Error for a lookup that found no model: 503 while no model is known, otherwise 404.
    pub fn model_error(lookup: &ModelLookup, name: &str) -> Self {
        match lookup {
            ModelLookup::NoneKnown => {
                Self::unavailable("the router knows no model yet; try again when an engine has joined")
            }
            _ => Self::no_model(name),
        }
    }

    pub fn too_large(bytes_max: usize) -> Self {
        let message = format!("the request body is longer than {bytes_max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// 429 with a `Retry-After` of `seconds`, at least 1.
    pub fn overloaded(message: impl Into<String>, seconds: u64) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).code("overloaded");
        error.retry_after_s = Some(seconds.max(1));
        error
    }

    /// 500 for a failure inside the router while it tried to `action`. Logs `error`, which names
    /// internals, and keeps it from the client.
    pub fn internal(action: &str, error: impl std::fmt::Display) -> Self {
        tracing::error!(%error, action, "API request failed");
        let message = format!("the router failed to {action}; its log has the reason");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).code("internal")
    }

    /// 503 with a `Retry-After` of 1 s, for a request that no engine can serve now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).code("engine_unavailable");
        error.retry_after_s = Some(1);
        error
    }

    /// The same error of a field inside `outer`.
    pub(crate) fn within(mut self, outer: &str) -> Self {
        self.body.param = Some(self.body.param.map_or_else(|| outer.to_string(), |inner| format!("{outer}.{inner}")));
        self
    }

    pub(crate) fn code(mut self, code: &str) -> Self {
        self.body.code = Some(code.into());
        self
    }

    pub fn envelope(&self) -> Envelope<'_> {
        Envelope { error: &self.body }
    }
}

/// Answer to a request that the server refused before any handler saw it.
pub(crate) fn refusal(refusal: &Refusal) -> Response {
    let is_busy = refusal.status == StatusCode::SERVICE_UNAVAILABLE;
    let kind = if is_busy { "server_error" } else { "invalid_request_error" };
    let error = ApiError::new(refusal.status, kind, refusal.message.clone());
    let error = if is_busy { error.code("overloaded") } else { error };
    error.into_response()
}

impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        let message = error.to_string();
        match error {
            RouteError::NoEngine(_) | RouteError::Unavailable(_) => Self::unavailable(message),
            RouteError::Busy { retry_after_ms } => Self::overloaded(message, retry_after_ms.div_ceil(1000)),
            RouteError::AnswersFull => Self::overloaded(message, 1),
            RouteError::AnswerTooLong => Self::field("max_tokens", message),
            RouteError::Interrupted(_) => {
                Self::new(StatusCode::BAD_GATEWAY, "server_error", message).code("engine_lost")
            }
            RouteError::Refused { code: ErrorCode::ContextLengthExceeded, message } => {
                Self::invalid(message).code("context_length_exceeded")
            }
            RouteError::Refused { message, .. } => Self::invalid(message),
            RouteError::Deadline => Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message).code("timeout"),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.envelope())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_has_all_four_fields() {
        let json = serde_json::to_value(ApiError::no_model("x").envelope()).unwrap();
        let expected = serde_json::json!({"error": {
            "message": "The model 'x' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }});
        assert_eq!(json, expected);
        let json = serde_json::to_value(ApiError::invalid("y").envelope()).unwrap();
        assert!(json["error"].get("code").is_some_and(|code| code.is_null()));
    }

    #[test]
    fn busy_engines_become_429_with_retry_after() {
        let error = ApiError::from(RouteError::Busy { retry_after_ms: 1500 });
        let response = error.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[RETRY_AFTER], "2");
    }
}
