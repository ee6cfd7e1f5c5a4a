//! Protection of ports that trust every client against web pages in a browser on the same network.
//!
//! A page of another server can make the browser send requests here (CSRF), or can give this
//! server's address to its own name and then read the answers (DNS rebinding). The browser tells
//! the truth in the headers `Host` and `Origin`, so these two tell such requests apart.

use crate::refusal::{Reason, Refusal};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, header};
use std::net::IpAddr;

/// Names under which clients may reach a server, besides IP addresses and `localhost`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    names: Vec<String>,
    /// Paths to check. `None` checks all.
    paths: Option<&'static [&'static str]>,
}

impl AllowedHosts {
    /// Takes host names without ports.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self { names: names.into_iter().map(|name| name.to_ascii_lowercase()).collect(), paths: None }
    }

    /// Checks requests of these paths only. Web pages may use all others.
    pub fn only_for(mut self, paths: &'static [&'static str]) -> Self {
        self.paths = Some(paths);
        self
    }

    /// Adds the host of `url`, if it has one.
    pub fn with_url(mut self, url: &str) -> Self {
        let uri: Option<axum::http::Uri> = url.parse().ok();
        self.names.extend(uri.and_then(|uri| uri.host().map(str::to_ascii_lowercase)));
        self
    }

    fn contains(&self, host: &str) -> bool {
        // A literal address cannot be rebound: the browser connects to it and to nothing else.
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        literal.parse::<IpAddr>().is_ok() || host == "localhost" || self.names.contains(&host)
    }

    /// Refuses a request to a foreign name, a request of a foreign web page, and a body that is
    /// not JSON. Programs without a `Host` or an `Origin` are no browsers.
    pub(crate) fn check(&self, request: &Parts, has_body: bool) -> Result<(), Refusal> {
        if self.paths.is_some_and(|paths| !paths.contains(&request.uri.path())) {
            return Ok(());
        }
        let host = authority(request)?;
        if let Some(host) = &host
            && !self.contains(host.host())
        {
            let message = "the Host header names neither an IP address nor this server; allow the name with \
                           --allowed-host";
            return Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, Reason::Host, message));
        }
        if let Some(origin) = request.headers.get(header::ORIGIN)
            && !is_same_origin(origin.as_bytes(), host.as_ref())
        {
            let message = "this port serves no web pages of other servers";
            return Err(Refusal::new(StatusCode::FORBIDDEN, Reason::Origin, message));
        }
        let is_form = request.headers.contains_key(header::CONTENT_TYPE) || has_body;
        if !matches!(request.method, Method::GET | Method::HEAD) && is_form && !is_json(&request.headers) {
            let message = "the request must have the header Content-Type: application/json";
            return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Reason::ContentType, message));
        }
        Ok(())
    }
}

/// Host and port that the request names. `None` if it names none, as HTTP/1.0 permits.
fn authority(request: &Parts) -> Result<Option<Authority>, Refusal> {
    if let Some(authority) = request.uri.authority() {
        return Ok(Some(authority.clone()));
    }
    let mut hosts = request.headers.get_all(header::HOST).iter();
    let Some(host) = hosts.next() else { return Ok(None) };
    let malformed = || Refusal::new(StatusCode::BAD_REQUEST, Reason::Host, "the Host header is malformed");
    // Two values may be read differently by a proxy and by this server.
    if hosts.next().is_some() {
        return Err(malformed());
    }
    Authority::try_from(host.as_bytes()).map(Some).map_err(|_| malformed())
}

fn is_same_origin(origin: &[u8], host: Option<&Authority>) -> bool {
    let site = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
    site.zip(host).is_some_and(|(site, host)| site.eq_ignore_ascii_case(host.as_str().as_bytes()))
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    fn status(method: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().method(method).uri("/status");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let has_body = headers.iter().any(|(name, _)| *name == "content-length");
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let allowed = AllowedHosts::new(["Engine-1.example".into()]).with_url("http://gpu7.internal:7711/");
        allowed.check(&parts, has_body).map_or_else(|refusal| refusal.status.as_u16(), |()| 200)
    }

    #[test]
    fn only_addresses_and_allowed_names_are_hosts() {
        let good = ["127.0.0.1:7701", "[::1]:7701", "10.0.0.7", "localhost:80", "LOCALHOST.", "engine-1.EXAMPLE:9"];
        for host in good.into_iter().chain(["gpu7.internal:7711"]) {
            assert_eq!(status("GET", &[("host", host)]), 200, "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example:7701", "localhost.evil.example", "xlocalhost"] {
            assert_eq!(status("GET", &[("host", host)]), 421, "{host}");
        }
        assert_eq!(status("GET", &[]), 200);
        assert_eq!(status("GET", &[("host", "127.0.0.1"), ("host", "evil.example")]), 400);
        assert_eq!(status("GET", &[("host", "a b")]), 400);
    }

    #[test]
    fn other_paths_are_open_to_web_pages() {
        let allowed = AllowedHosts::new([]).only_for(&["/status"]);
        let check = |path: &str| {
            let request = Request::builder().uri(path).header("host", "evil.example");
            allowed.check(&request.body(()).unwrap().into_parts().0, false)
        };
        assert!(check("/other").is_ok() && check("/status/").is_ok());
        assert_eq!(check("/status?x").unwrap_err().status, StatusCode::MISDIRECTED_REQUEST);
    }

    #[test]
    fn web_pages_of_other_servers_are_refused() {
        let host = ("host", "127.0.0.1:8001");
        assert_eq!(status("POST", &[host, ("origin", "http://127.0.0.1:8001")]), 200);
        for origin in ["http://evil.example", "null", "http://127.0.0.1:8000", "http://127.0.0.1:8001.evil.example"] {
            assert_eq!(status("POST", &[host, ("origin", origin)]), 403, "{origin}");
            assert_eq!(status("GET", &[host, ("origin", origin)]), 403, "{origin}");
        }
        assert_eq!(status("POST", &[("origin", "http://127.0.0.1")]), 403, "nothing to compare with");
    }

    #[test]
    fn bodies_must_be_json_because_forms_need_no_permission() {
        let host = ("host", "127.0.0.1");
        let post = |kind: &str| status("POST", &[host, ("content-length", "2"), ("content-type", kind)]);
        assert_eq!((post("application/json"), post("Application/JSON; charset=utf-8")), (200, 200));
        assert_eq!((post("text/plain"), post("application/x-www-form-urlencoded")), (415, 415));
        assert_eq!(status("POST", &[host, ("content-length", "2")]), 415);
        assert_eq!(status("POST", &[host, ("content-type", "text/plain")]), 415);
        assert_eq!(status("POST", &[host]), 200, "nothing to parse");
    }
}
