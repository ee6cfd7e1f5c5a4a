//! Measures the memory of an HTTP connection, for the plans of routers and engines:
//! `cargo run --release -p larder-http --example connection_memory`.
//!
//! Each state of a connection is measured in a process of its own, because the allocator keeps
//! memory that was in use. The clients are bare sockets, which take no memory of the process.
//! Buffers of the kernel do not count.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Response;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use larder_http::{HttpMetrics, HttpOptions, HttpServer, Refusal};
use std::convert::Infallible;
use std::error::Error;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Both ends of all connections fit the usual limit of 1,024 descriptors.
const CONNECTIONS: usize = 400;
const HEADER_BYTES: usize = 31 << 10;
const CHUNK_BYTES: usize = 1 << 10;
const NEVER: Duration = Duration::from_secs(3600);
/// Time for the server to receive and send all it can.
const SETTLE: Duration = Duration::from_secs(2);

const STATES: [&str; 6] = ["idle", "half a header", "body", "waiting", "stream in chunks", "large answer"];

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(state) = std::env::args().nth(1) {
        return measure(&state);
    }
    for state in STATES {
        let status = Command::new(std::env::current_exe()?).arg(state).status()?;
        if !status.success() {
            return Err(format!("{state}: {status}").into());
        }
    }
    Ok(())
}

/// Bytes that bring a connection into a state, and leave it there.
fn request(state: &str) -> Vec<u8> {
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
    let text = match state {
        "half a header" => format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}", "a".repeat(HEADER_BYTES)),
        "body" => {
            "POST /length HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 60000\r\n\r\n".into()
        }
        "waiting" => get("/wait"),
        "stream in chunks" => get("/stream"),
        "large answer" => get("/large"),
        _ => String::new(),
    };
    text.into_bytes()
}

fn render(refusal: &Refusal) -> Response<Body> {
    (refusal.status, refusal.message.clone()).into_response()
}

fn stream() -> Body {
    Body::from_stream(futures::stream::repeat_with(|| Ok::<_, Infallible>(Bytes::from(vec![b'x'; CHUNK_BYTES]))))
}

#[tokio::main]
async fn measure(state: &str) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    // Shared by all its readers, so that only the connections count.
    let large = Bytes::from(vec![b'x'; 16 << 20]);
    let routes = Router::new()
        .route("/wait", get(std::future::pending::<&'static str>))
        .route("/stream", get(|| async { stream() }))
        .route("/large", get(move || std::future::ready(large.clone())))
        .route("/length", post(|body: Bytes| async move { body.len().to_string() }));
    let options = HttpOptions {
        connections_max: 2 * CONNECTIONS,
        header_timeout: NEVER,
        body_timeout: NEVER,
        idle_timeout: NEVER,
        write_timeout: NEVER,
        ..HttpOptions::default()
    };
    let server = HttpServer { name: "measured", options, allowed_hosts: None, metrics: HttpMetrics::default(), render };
    tokio::spawn(server.serve(listener, routes, CancellationToken::new(), Duration::ZERO));
    let request = request(state);
    // The first ones also make tables and threads.
    let mut sockets = open(address, &request, 16)?;
    tokio::time::sleep(SETTLE).await;
    let before = resident_bytes()?;
    sockets.extend(open(address, &request, CONNECTIONS)?);
    tokio::time::sleep(SETTLE).await;
    let kept = resident_bytes()? - before;
    println!("{state}: {:.1} KiB per connection", kept / CONNECTIONS as f64 / 1024.0);
    drop(sockets);
    Ok(())
}

fn open(address: SocketAddr, request: &[u8], count: usize) -> std::io::Result<Vec<TcpStream>> {
    let open = |_| {
        let mut socket = TcpStream::connect(address)?;
        socket.write_all(request)?;
        Ok(socket)
    };
    (0..count).map(open).collect()
}

fn resident_bytes() -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no such line")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024.0)
}
