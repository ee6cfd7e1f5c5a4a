//! Attacks on the HTTP ports of router, engines and node.

use super::attacker::{Attack, Stranger, answer_begun, closed, hold, send};
use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
use rand::Rng;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const MIB: usize = 1 << 20;

/// Attacks on HTTP ports, with their number of clients and their pause.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, clients, pause_ms, run| Attack { name, clients, pause: Duration::from_millis(pause_ms), run };
    vec![
        attack("half headers", 300, 5_000, half_header),
        attack("half bodies", 200, 5_000, half_body),
        attack("stalled HTTP bodies", 6, 1_000, stalled_body),
        attack("large JSON bodies", 2, 4_000, large_json),
        attack("long prompts", 2, 2_000, long_prompt),
        attack("long chats", 2, 2_000, long_chat),
        attack("forgets", 4, 500, forget),
        attack("unread streams", 8, 5_000, unread_stream),
        attack("unread metrics", 8, 5_000, unread_metrics),
        attack("nonsense requests", 4, 500, nonsense),
    ]
}

/// The port that this client attacks: half of them the OpenAI API, the others one of the four
/// ports of operators and engines.
fn port(stranger: &Stranger) -> SocketAddr {
    let ports = &stranger.target.ports;
    match stranger.number % 8 {
        0..4 => ports.api,
        4 => ports.admin,
        5 => ports.prefill,
        6 => ports.decode,
        _ => ports.node_admin,
    }
}

fn half_header(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(port(&stranger)).await?;
        stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: 127.").await?;
        stranger.held(closed(stream)).await
    }
    .boxed()
}

fn half_body(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(port(&stranger)).await?;
        let head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
                    Content-Length: 60000\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&[b' '; 1024]).await?;
        stranger.held(closed(stream)).await
    }
    .boxed()
}

/// Sends a body of 12 MiB but for its last byte.
fn stalled_body(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(stranger.target.ports.api).await?;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            12 * MIB
        );
        stream.write_all(head.as_bytes()).await?;
        send(&mut stream, &vec![b' '; 12 * MIB - 1]).await?;
        stranger.held(closed(stream)).await
    }
    .boxed()
}

/// Client with the address of `stranger`.
pub fn http(stranger: &Stranger) -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder().local_address(stranger.address()).build()?)
}

/// Sends a request to the OpenAI API and waits for the whole answer, whatever its status.
async fn post(stranger: &Stranger, path: &str, body: String) -> Result<()> {
    post_to(stranger, stranger.target.ports.api, path, body).await
}

async fn post_to(stranger: &Stranger, port: SocketAddr, path: &str, body: String) -> Result<()> {
    let (mut answer, mut request) = stranger.connect(port).await?.into_split();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let upload = async {
        request.write_all(head.as_bytes()).await?;
        send(&mut request, body.as_bytes()).await
    };
    // A server may answer before it has the whole body, and close the connection.
    let mut first = [0; 1];
    let (sent, received) = tokio::join!(upload, answer.read_exact(&mut first));
    received.or_else(|error| sent.and(Err(error)))?;
    stranger.record_effect();
    let mut discarded = [0; 1024];
    while answer.read(&mut discarded).await.is_ok_and(|bytes| bytes > 0) {}
    Ok(())
}

fn large_json(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        // Small objects: as general JSON values they take a hundred times their text.
        let objects = "{\"\":0},".repeat(15 * MIB / 7);
        let body = format!("{{\"model\":\"larder-tiny\",\"messages\":[],\"metadata\":[{objects}0]}}");
        post(&stranger, "/v1/chat/completions", body).await
    }
    .boxed()
}

/// Has the decode engine forget a prefix that no request had, and hold its keys.
fn forget(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let tokens: Vec<u32> = {
            let mut random = rand::rng();
            (0..64 << 10).map(|_| random.random_range(3..1000)).collect()
        };
        let body = json!({"tokens": tokens, "hold_ms": 60_000, "deadline_ms": 1_000}).to_string();
        post_to(&stranger, stranger.target.ports.decode, "/v1/forget", body).await
    }
    .boxed()
}

fn long_prompt(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        // One length that bytes alone refuse, and one that only its tokens do.
        let bytes = if stranger.round.is_multiple_of(2) { 14 * MIB } else { 64 << 10 };
        let prompt = "And it came to pass. ".repeat(bytes / 21);
        post(&stranger, "/v1/completions", json!({"model": "larder-tiny", "prompt": prompt}).to_string()).await
    }
    .boxed()
}

fn long_chat(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let message = json!({"role": "user", "content": "{{ 7 * 7 }} ".repeat(4)});
        let body = json!({"model": "larder-tiny", "messages": vec![message; 4096], "max_tokens": 1});
        post(&stranger, "/v1/chat/completions", body.to_string()).await
    }
    .boxed()
}

fn unread_stream(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect_unread(stranger.target.ports.api).await?;
        let body = json!({"model": "larder-tiny", "prompt": format!("Stranger {}", stranger.number), "max_tokens": 64,
            "ignore_eos": true, "stream": true})
        .to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        answer_begun(&stream).await?;
        stranger.record_effect();
        hold(stream).await
    }
    .boxed()
}

/// Requests metrics again and again, and never reads them.
fn unread_metrics(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let ports = &stranger.target.ports;
        let port = if stranger.number.is_multiple_of(2) { ports.admin } else { ports.node_admin };
        let mut stream = stranger.connect_unread(port).await?;
        stream.write_all("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".repeat(500).as_bytes()).await?;
        answer_begun(&stream).await?;
        stranger.record_effect();
        hold(stream).await
    }
    .boxed()
}

fn nonsense(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut bytes = vec![0; 512];
        rand::rng().fill(&mut bytes[..]);
        let mut stream = stranger.connect(port(&stranger)).await?;
        if !stranger.round.is_multiple_of(2) {
            stream
                .write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 512\r\n\r\n")
                .await?;
        }
        stream.write_all(&bytes).await?;
        // Or it resets the connection.
        let _ = closed(stream).await;
        stranger.record_effect();
        Ok(())
    }
    .boxed()
}
