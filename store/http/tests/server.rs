//! The server against real sockets: slow clients, strangers and bystanders.
//!
//! No test judges time. Deadlines are short where a test waits for one, and out of reach elsewhere.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Response;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use larder_http::{AllowedHosts, HttpMetrics, HttpOptions, HttpServer, Refusal};
use prometheus_client::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Generous bound of every wait. A test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);
/// Out of reach of any test.
const NEVER: Duration = Duration::from_secs(3600);

struct TestServer {
    addr: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
    metrics: HttpMetrics,
    /// Requests that reached a handler.
    handled: Arc<AtomicUsize>,
    /// Ends one answer of `/wait`.
    release: Arc<Notify>,
}

fn options() -> HttpOptions {
    HttpOptions {
        header_timeout: NEVER,
        body_timeout: NEVER,
        idle_timeout: NEVER,
        write_timeout: NEVER,
        body_bytes_max: 8 << 20,
        ..HttpOptions::default()
    }
}

fn render(refusal: &Refusal) -> Response<Body> {
    (refusal.status, refusal.message.clone()).into_response()
}

async fn start(options: HttpOptions) -> TestServer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (stop, metrics) = (CancellationToken::new(), HttpMetrics::default());
    let handled = Arc::new(AtomicUsize::new(0));
    let release = Arc::new(Notify::new());
    let (count, wait) = (handled.clone(), release.clone());
    let routes = Router::new()
        .route("/ok", get(|| async { "ok" }))
        .route("/large", get(|| async { vec![b'x'; 64 << 20] }))
        .route("/fail", get(|| async { axum::http::StatusCode::NOT_FOUND }))
        .route(
            "/length",
            post(move |body: Bytes| {
                count.fetch_add(1, Ordering::SeqCst);
                async move { body.len().to_string() }
            })
            .layer(axum::extract::DefaultBodyLimit::disable()),
        )
        .route(
            "/wait",
            get(move || async move {
                wait.notified().await;
                "released"
            }),
        );
    let allowed_hosts = Some(AllowedHosts::new(options.allowed_hosts.clone()));
    let server = HttpServer { name: "test", options, allowed_hosts, metrics: metrics.clone(), render };
    let task = tokio::spawn(server.serve(listener, routes, stop.clone(), PATIENCE));
    TestServer { addr, stop, task, metrics, handled, release }
}

impl TestServer {
    /// Connects from `127.0.0.HOST`. Each such address is a peer of its own.
    async fn connect(&self, host: u8) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, host], 0))).unwrap();
        socket.connect(self.addr).await.unwrap()
    }

    async fn send(&self, host: u8, text: &str) -> TcpStream {
        let mut stream = self.connect(host).await;
        // A refused connection may be closed while it is written to.
        let _ = stream.write_all(text.as_bytes()).await;
        stream
    }

    async fn ask(&self, host: u8, text: &str) -> String {
        to_end(self.send(host, text).await).await
    }

    fn metric(&self, line: &str) -> u64 {
        let mut registry = Registry::default();
        self.metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let value = text.lines().find_map(|l| l.strip_prefix(line)).map(|value| value.trim().parse().unwrap());
        value.unwrap_or(0)
    }

    fn refusals(&self, reason: &str) -> u64 {
        self.metric(&format!("http_refusals_total{{server=\"test\",reason=\"{reason}\"}}"))
    }

    fn open(&self) -> u64 {
        self.metric("http_connections{server=\"test\"}")
    }

    fn body_bytes(&self) -> u64 {
        self.metric("http_body_bytes{server=\"test\"}")
    }

    async fn stopped(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("the server stops").unwrap();
    }
}

async fn to_end(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    // A reset after the answer is not the point of any test.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("the connection ends");
    String::from_utf8_lossy(&answer).into_owned()
}

async fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !is_true() {
        assert!(tokio::time::Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn get_once(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
}

fn post_head(length: usize) -> String {
    format!(
        "POST /length HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    )
}

#[tokio::test]
async fn half_a_header_and_an_idle_connection_end() {
    let server = start(HttpOptions { header_timeout: SHORT, idle_timeout: SHORT, ..options() }).await;
    assert_eq!(server.ask(1, "GET /ok HTTP/1.1\r\nHost: 127.").await, "");
    assert_eq!(server.ask(1, "").await, "", "a connection that sends nothing");
    let answer = server.ask(1, "GET /ok HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok"), "{answer}");
    assert_eq!(server.refusals("header_timeout"), 2, "an idle connection is no refusal");
    eventually("no connection is left", || server.open() == 0).await;
    server.stopped().await;
}

#[tokio::test]
async fn connection_that_is_idle_after_a_long_answer_ends() {
    let server = start(HttpOptions { header_timeout: SHORT, idle_timeout: SHORT, ..options() }).await;
    let stream = server.send(1, "GET /wait HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await;
    // No timer of the header is left when the answer ends.
    tokio::time::sleep(SHORT * 4).await;
    server.release.notify_one();
    let answer = to_end(stream).await;
    assert!(answer.ends_with("released"), "{answer}");
    eventually("no connection is left", || server.open() == 0).await;
    server.stopped().await;
}

#[tokio::test]
async fn stalled_body_is_answered_and_never_reaches_a_handler() {
    let server = start(HttpOptions { body_timeout: SHORT, ..options() }).await;
    let answer = server.ask(1, &format!("{}half", post_head(100))).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("too slowly"), "{answer}");
    assert_eq!((server.handled.load(Ordering::SeqCst), server.refusals("body_timeout")), (0, 1));
    server.stopped().await;
}

#[tokio::test]
async fn long_body_is_refused_with_an_answer_that_arrives() {
    let server = start(HttpOptions { body_bytes_max: 256 << 10, ..options() }).await;
    let body = "x".repeat(1 << 20);
    let announced = format!("{}{body}", post_head(1 << 20));
    let chunked = post_head(0).replace("Content-Length: 0", "Transfer-Encoding: chunked");
    // The client sends everything before it reads, as most do.
    for request in [announced, format!("{chunked}100000\r\n{body}\r\n0\r\n\r\n")] {
        let answer = server.ask(1, &request).await;
        assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("262144 bytes"), "{answer}");
    }
    assert_eq!(server.refusals("body_size"), 2);
    server.stopped().await;
}

#[tokio::test]
async fn stalled_bodies_of_one_address_leave_memory_to_others_and_to_small_requests() {
    let server = start(HttpOptions { body_memory_bytes: 2 << 20, ..options() }).await;
    let length = 1536 << 10;
    let mut stalled = server.send(1, &post_head(length)).await;
    stalled.write_all(&vec![b'x'; length - 1]).await.unwrap();
    // The buffer may have room for the last byte.
    let held = (length - 1 - (64 << 10)) as u64;
    eventually("the stalled body is charged", || server.body_bytes() >= held).await;
    let large = format!("{}{}", post_head(200 << 10), "x".repeat(200 << 10));
    let refused = server.ask(1, &large).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 1"), "{refused}");
    assert!(server.ask(2, &large).await.ends_with(&(200 << 10).to_string()), "another address has room");
    let answer = server.ask(1, &format!("{}{}", post_head(60 << 10), "x".repeat(60 << 10))).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(stalled);
    eventually("its memory is free", || server.body_bytes() == 0).await;
    assert!(server.ask(1, &large).await.ends_with(&(200 << 10).to_string()));
    server.stopped().await;
}

#[tokio::test]
async fn strangers_with_half_requests_leave_room_for_known_clients_and_get_an_answer() {
    let server = start(HttpOptions { connections_max: 16, connections_per_address: Some(16), ..options() }).await;
    assert!(server.ask(2, &get_once("/ok")).await.ends_with("ok"));
    let mut held = Vec::new();
    for _ in 0..12 {
        held.push(server.send(1, &format!("{}half", post_head(100))).await);
    }
    eventually("the strangers hold their places", || server.open() == 12).await;
    // Places are judged on accept. Connections that have waited for a second may be replaced, so
    // this one may get the place of another.
    let answer = server.ask(1, &get_once("/ok")).await;
    let is_refused = answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: 1");
    assert!(is_refused || answer.ends_with("ok"), "{answer}");
    eventually("it is counted", || server.refusals("connections") + server.refusals("replaced") == 1).await;
    let answer = server.ask(2, &get_once("/ok")).await;
    assert!(answer.ends_with("ok"), "a known client: {answer}");
    server.stopped().await;
}

#[tokio::test]
async fn crowd_of_half_requests_does_not_lock_out_its_own_address() {
    let server = start(HttpOptions { connections_max: 16, connections_per_address: Some(8), ..options() }).await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(server.send(1, &format!("{}half", post_head(100))).await);
    }
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !server.ask(1, &get_once("/ok")).await.ends_with("ok") {
        assert!(tokio::time::Instant::now() < deadline, "the address stays locked out");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(server.refusals("replaced") >= 1);
    server.stopped().await;
}

#[tokio::test]
async fn running_answers_are_never_replaced() {
    let server = start(HttpOptions { connections_max: 4, connections_per_address: Some(4), ..options() }).await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(server.send(1, &get_once("/wait")).await);
    }
    eventually("the requests run", || server.open() == 3).await;
    for _ in 0..20 {
        let answer = server.ask(1, &get_once("/ok")).await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    }
    for stream in waiting {
        server.release.notify_one();
        assert!(to_end(stream).await.ends_with("released"));
    }
    assert!(server.ask(1, &get_once("/ok")).await.ends_with("ok"));
    server.stopped().await;
}

#[tokio::test]
async fn failed_requests_do_not_make_an_address_known() {
    let server = start(HttpOptions { connections_max: 4, connections_per_address: Some(4), ..options() }).await;
    assert!(server.ask(3, &get_once("/fail")).await.starts_with("HTTP/1.1 404"));
    let held: Vec<_> = [server.send(1, &get_once("/wait")).await, server.send(1, &get_once("/wait")).await].into();
    let third = server.send(1, &get_once("/wait")).await;
    eventually("three places are taken", || server.open() == 3).await;
    assert!(server.ask(3, &get_once("/ok")).await.starts_with("HTTP/1.1 503"));
    drop((held, third));
    server.stopped().await;
}

#[tokio::test]
async fn client_that_does_not_read_its_answer_is_cut() {
    let server = start(HttpOptions { write_timeout: SHORT, ..options() }).await;
    let _stream = server.send(1, &get_once("/large")).await;
    eventually("the connection ends", || server.refusals("write_timeout") == 1 && server.open() == 0).await;
    server.stopped().await;
}

#[tokio::test]
async fn answers_that_wait_outlast_every_deadline_of_the_client() {
    let short = HttpOptions {
        header_timeout: SHORT,
        body_timeout: SHORT,
        idle_timeout: SHORT,
        write_timeout: SHORT,
        ..options()
    };
    let server = start(short).await;
    let stream = server.send(1, &get_once("/wait")).await;
    // The deadlines have passed when a connection that owes its header has ended.
    assert_eq!(server.ask(1, "GET").await, "");
    server.release.notify_one();
    assert!(to_end(stream).await.ends_with("released"));
    server.stopped().await;
}

#[tokio::test]
async fn stop_ends_half_requests_at_once_and_answers_after_their_end() {
    let server = start(options()).await;
    let idle = server.connect(1).await;
    let half = server.send(1, &format!("{}half", post_head(100))).await;
    let running = server.send(1, &get_once("/wait")).await;
    eventually("all are open", || server.open() == 3).await;
    server.ask(1, &get_once("/ok")).await;
    server.stop.cancel();
    assert_eq!((to_end(idle).await, to_end(half).await), (String::new(), String::new()));
    server.release.notify_one();
    assert!(to_end(running).await.ends_with("released"));
    server.stopped().await;
}

#[tokio::test]
async fn foreign_host_and_foreign_page_are_refused() {
    let server = start(HttpOptions { allowed_hosts: vec!["larder.example".into()], ..options() }).await;
    let with = |headers: &str| format!("GET /ok HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
    for (headers, expected) in [
        ("Host: 127.0.0.1:1\r\n", "200"),
        ("Host: larder.example:1\r\n", "200"),
        ("Host: rebound.example\r\n", "421"),
        ("Host: 127.0.0.1:1\r\nOrigin: http://evil.example\r\n", "403"),
    ] {
        let answer = server.ask(1, &with(headers)).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected}")), "{headers}: {answer}");
    }
    let form = post_head(4).replace("application/json", "text/plain");
    assert!(server.ask(1, &format!("{form}body")).await.starts_with("HTTP/1.1 415"));
    assert_eq!((server.refusals("host"), server.refusals("origin"), server.refusals("content_type")), (1, 1, 1));
    assert_eq!(server.handled.load(Ordering::SeqCst), 0);
    server.stopped().await;
}
