//! Slow and hostile clients, models and engines.

use crate::fakes::*;
use larder_worker::api::Role;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Sends a request without reading the answer.
fn send(cluster: &TestCluster, body: &str) -> TcpStream {
    let mut socket = TcpStream::connect(cluster.router.addr()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    socket.write_all((head + body).as_bytes()).unwrap();
    socket
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_cut_off_at_the_deadline_ends_with_an_error_event() {
    let cluster = TestCluster::with(0, 0, |options| options.request_timeout = Duration::from_secs(3)).await;
    // An answer that exceeds the buffers of both sockets.
    let context = 200_000;
    let engine = FakeEngine::start_with_context(&cluster.store, "decode-0", Role::Decode, context).await;
    engine.behave(Behaviour::Fill);
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let body = json!({"model": MODEL, "prompt": "w1", "stream": true, "max_tokens": context - 10});
    let mut socket = send(&cluster, &body.to_string());
    eventually("the answer begins", || cluster.router.counters().inflight == 1).await;
    eventually("the deadline ends the answer", || cluster.router.counters().inflight == 0).await;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(!answer.contains("\"finish_reason\":\"length\""), "the buffers hold the whole answer");
    let end = answer.split("data: ").collect::<Vec<_>>();
    let [.., error, done] = &end[..] else { panic!("no events: {answer}") };
    assert!(error.contains("\"error\"") && error.contains("timeout"), "{error}");
    assert!(done.starts_with("[DONE]"), "{done}");
    assert_eq!(cluster.router.counters().requests_failed, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answer_that_an_engine_truncates_is_an_error() {
    let cluster = TestCluster::with(0, 1, |options| options.attempts_max = 1).await;
    cluster.decodes[0].behave(Behaviour::TruncateAfter(3));
    let mut body = json!({"model": MODEL, "prompt": "w1", "max_tokens": 10});
    let response = cluster.post("/v1/completions", body.clone()).await;
    let status = response.status().as_u16();
    let answer: Value = response.json().await.unwrap();
    assert_eq!((status, answer["error"]["code"].as_str()), (502, Some("engine_lost")), "{answer}");
    // The breaker may exclude the engine for a moment.
    eventually("the engine is admitted", || cluster.router.engines().iter().any(|engine| engine.is_admitted())).await;
    body["stream"] = json!(true);
    let text = cluster.post("/v1/completions", body).await.text().await.unwrap();
    let end = text.split("data: ").collect::<Vec<_>>();
    let [.., error, done] = &end[..] else { panic!("no events: {text}") };
    assert!(
        error.contains("engine_lost") && done.starts_with("[DONE]") && !text.contains("\"finish_reason\":\""),
        "{text}"
    );
}
