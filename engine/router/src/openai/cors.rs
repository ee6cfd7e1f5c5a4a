//! Access of web pages of other servers, if the operator allows their origins.
//!
//! Without `--cors-origin` the answers have no CORS headers, so browsers hide them from such pages.
//! The paths of operators never have any.

use super::operations::OPERATOR_PATHS;
use crate::RouterState;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Headers of an answer that pages may read, besides the harmless ones that they always may.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, retry-after");
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, OPTIONS");
/// Time for which a browser may remember the answer to a preflight request, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

pub(super) async fn with_cors(State(router): State<Arc<RouterState>>, request: Request, next: Next) -> Response {
    let is_operator = OPERATOR_PATHS.contains(&request.uri().path());
    let allowed = allowed_origin(&router.options.cors_origins, request.headers()).filter(|_| !is_operator);
    let Some(origin) = allowed else { return next.run(request).await };
    let headers = request.headers();
    let is_preflight =
        request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if is_preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let mut set = |name: HeaderName, value: HeaderValue| response.headers_mut().insert(name, value);
    set(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    set(header::VARY, HeaderValue::from_static("origin"));
    set(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    if is_preflight {
        set(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        set(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        // Clients send many of their own, which this server ignores.
        if let Some(wanted) = wanted {
            set(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        }
    }
    response
}

/// Value of `Access-Control-Allow-Origin`. `None` without an origin, or for one that is not
/// allowed.
fn allowed_origin(allowed: &[String], headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let is_same = |allowed: &String| allowed.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
    if allowed.iter().any(|allowed| allowed == "*") {
        return Some(HeaderValue::from_static("*"));
    }
    allowed.iter().any(is_same).then(|| origin.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_origins_are_allowed() {
        let allowed = |list: &[&str], origin: Option<&'static str>| {
            let list: Vec<String> = list.iter().map(|origin| origin.to_string()).collect();
            let origin = origin.map(|origin| (header::ORIGIN, HeaderValue::from_static(origin)));
            allowed_origin(&list, &HeaderMap::from_iter(origin)).map(|value| value.to_str().unwrap().to_string())
        };
        assert_eq!(allowed(&[], Some("http://a.example")), None);
        assert_eq!(allowed(&["http://a.example"], Some("http://A.example")).as_deref(), Some("http://A.example"));
        assert_eq!(allowed(&["http://a.example"], Some("http://b.example")), None);
        assert_eq!(allowed(&["*"], Some("http://b.example")).as_deref(), Some("*"));
        assert_eq!(allowed(&["*"], None), None);
    }
}
