//! Routing of prompts, and failures of engines.

use crate::fakes::*;
use larder_worker::api::{CacheMode, ErrorCode, Role};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn cached(body: &serde_json::Value) -> u64 {
    body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn long_prompt_uses_a_prefill_engine_and_its_repetition_does_not() {
    let cluster = TestCluster::new(1, 1).await;
    let (status, body) = cluster.complete(33).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!((body["usage"]["prompt_tokens"].as_u64(), cached(&body)), (Some(33), 0));
    assert_eq!(cluster.prefills[0].prefills.lock()[0].tokens.len(), 33);
    assert_eq!(cluster.decodes[0].decodes.lock()[0].await_pages, 8);
    let (_, body) = cluster.complete(33).await;
    assert_eq!(cached(&body), 32, "the store has all whole pages");
    assert_eq!(cluster.prefills[0].prefill_count(), 1);
    assert_eq!(cluster.decodes[0].decodes.lock()[1].await_pages, 0);
    // Half of the prompt is new: prefill continues after the cached pages.
    let (_, body) = cluster.complete(65).await;
    assert_eq!((cached(&body), cluster.prefills[0].prefill_count()), (32, 2));
    let counters = cluster.router.counters();
    assert_eq!((counters.requests, counters.tokens_in, counters.tokens_cached), (3, 131, 64));
}

#[tokio::test]
async fn short_prompts_and_uncached_requests_use_no_prefill_engine() {
    let cluster = TestCluster::new(1, 1).await;
    assert_eq!(cluster.complete(8).await.0, 200, "one whole page only");
    let request = cluster.http.post(cluster.url("/v1/completions")).header("x-larder-cache", "none");
    let response = request.json(&json!({"model": MODEL, "prompt": prompt(50)})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(cluster.prefills[0].prefill_count(), 0);
    assert_eq!(cluster.decodes[0].decodes.lock()[1].cache, CacheMode::None);
}

#[tokio::test]
async fn decode_computes_everything_without_a_store() {
    let cluster = TestCluster::new(1, 1).await;
    cluster.store.is_down.store(true, Ordering::SeqCst);
    assert_eq!(cluster.complete(50).await.0, 200);
    assert_eq!(cluster.prefills[0].prefill_count(), 0);
    assert_eq!(cluster.decodes[0].decodes.lock()[0].await_pages, 0);
}

#[tokio::test]
async fn failed_prefill_moves_to_another_engine_and_never_back() {
    let cluster = TestCluster::new(3, 1).await;
    for engine in &cluster.prefills {
        engine.behave(Behaviour::DieAtOnce);
    }
    cluster.prefills[2].behave(Behaviour::Serve);
    let (status, body) = cluster.complete(50).await;
    assert_eq!(status, 200, "{body}");
    assert!(cluster.prefills.iter().all(|engine| engine.prefill_count() <= 1));
    assert_eq!(cluster.prefills[2].prefill_count(), 1);
    let failed = cluster.prefills.iter().map(|engine| engine.prefill_count()).sum::<usize>() as u64 - 1;
    assert_eq!(cluster.router.counters().retries_prefill, failed);
}

#[tokio::test]
async fn decode_computes_the_rest_when_every_prefill_fails() {
    let cluster = TestCluster::new(2, 1).await;
    cluster.prefills[0].behave(Behaviour::Refuse(ErrorCode::Internal));
    cluster.prefills[1].behave(Behaviour::Refuse(ErrorCode::Busy));
    let (status, body) = cluster.complete(50).await;
    assert_eq!((status, cached(&body)), (200, 0));
    assert!(cluster.prefills.iter().all(|engine| engine.prefill_count() == 1));
    let awaited: Vec<u32> = cluster.decodes[0].decodes.lock().iter().map(|d| d.await_pages).collect();
    assert_eq!(awaited, [12, 0], "the second call must not wait for pages");
}

#[tokio::test]
async fn decode_does_not_wait_for_pages_that_prefill_lost() {
    let cluster = TestCluster::new(2, 1).await;
    cluster.prefills.iter().for_each(|engine| engine.behave(Behaviour::LosePages));
    let (status, body) = cluster.complete(50).await;
    assert_eq!((status, cached(&body)), (200, 8), "pages that prefill found cached still count");
    assert_eq!(
        cluster.prefills.iter().map(|engine| engine.prefill_count()).sum::<usize>(),
        1,
        "another would lose them too"
    );
    let awaited: Vec<u32> = cluster.decodes[0].decodes.lock().iter().map(|d| d.await_pages).collect();
    assert_eq!(awaited, [12, 0], "the second call must not wait for pages");
}

#[tokio::test]
async fn engine_that_shuts_down_during_an_answer_is_replaced() {
    let cluster = TestCluster::new(0, 2).await;
    cluster.decodes[0].behave(Behaviour::LeaveAfter(3));
    for words in 1..8 {
        let (status, body) = cluster.complete(words).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["choices"][0]["text"].as_str().unwrap().matches(" t0").count(), 1);
    }
    assert!(cluster.decodes[0].decode_count() > 0, "otherwise the test shows nothing");
}

#[tokio::test]
async fn engine_that_exceeds_its_output_limits_is_dropped() {
    let cluster = TestCluster::new(0, 1).await;
    cluster.decodes[0].behave(Behaviour::Flood);
    let (status, body) = cluster.complete(5).await;
    assert_eq!((status, body["error"]["code"].as_str()), (502, Some("engine_lost")));
    assert!(cluster.router.engines().is_empty());
}

/// Asks until the first decode engine has answered wrongly. All answers must be complete: the
/// second engine takes over.
async fn provoke(cluster: &TestCluster) {
    let is_out = || cluster.router.engines().iter().all(|engine| engine.name != "decode-0");
    for words in 1..50 {
        let body = json!({"model": MODEL, "prompt": prompt(words), "max_tokens": 20});
        let response = cluster.post("/v1/completions", body).await;
        let status = response.status().as_u16();
        let answer: serde_json::Value = response.json().await.unwrap();
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"][0]["text"].as_str().unwrap().matches(" t9").count(), 1);
        if is_out() {
            return;
        }
    }
    panic!("the engine is not dropped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_engine_that_sends_wrong_answers_is_dropped_and_others_continue() {
    use WrongAnswer::*;
    for wrong in [NoJson, NoEvent, EndlessLine, OtherPrompt, UnknownToken, WrongTotal, EarlyLength, SecondStart] {
        // The first engine's files tell its vocabulary.
        let cluster = TestCluster::new(0, 1).await;
        let second = FakeEngine::start(&cluster.store, "decode-1", Role::Decode).await;
        eventually("it joins", || cluster.router.engines().len() == 2).await;
        let files = second.files_sent.load(Ordering::SeqCst);
        cluster.decodes[0].behave(Behaviour::Wrong(wrong));
        provoke(&cluster).await;
        cluster.refreshed().await;
        let names: Vec<String> = cluster.router.engines().iter().map(|engine| engine.name.clone()).collect();
        assert_eq!(names, ["decode-1"], "{wrong:?}: it must not return at once");
        eventually("the model has the files of the other engine", || second.files_sent.load(Ordering::SeqCst) > files)
            .await;
        assert_eq!(cluster.complete(3).await.0, 200);
        let metrics = cluster.http.get(cluster.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
        assert!(metrics.contains("larder_router_engines_expelled_total 1"), "{metrics}");
        let (status, answer) = cluster.admin_post("/admin/v1/prefix/forget", json!({"text": prompt(9)})).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(cluster.decodes[0].forgets.lock().len(), 2, "it may hold pages still");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_engine_of_a_model_with_wrong_answers_yields_an_error() {
    use WrongAnswer::*;
    for (wrong, expected) in [(NoEvent, (502, "engine_lost")), (OtherPrompt, (503, "engine_unavailable"))] {
        let cluster = TestCluster::new(0, 1).await;
        cluster.decodes[0].behave(Behaviour::Wrong(wrong));
        let (status, body) = cluster.complete(3).await;
        assert_eq!((status, body["error"]["code"].as_str().unwrap()), expected, "{body}");
        assert!(cluster.router.engines().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_with_an_unknown_error_code_stays() {
    let cluster = TestCluster::new(0, 1).await;
    for (after, status) in [(0, 503), (3, 502)] {
        cluster.decodes[0].behave(Behaviour::NewErrorAfter(after));
        let (got, body) = cluster.complete(3).await;
        assert_eq!(got, status, "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains("too hot"), "{body}");
        assert_eq!(cluster.router.engines().len(), 1, "a newer version keeps to the interface");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_engine_that_sends_wrong_counts_is_dropped() {
    let cluster = TestCluster::new(1, 1).await;
    cluster.prefills[0].behave(Behaviour::Wrong(WrongAnswer::TooManyPages));
    let (status, body) = cluster.complete(33).await;
    assert_eq!(status, 200, "{body}");
    eventually("it is dropped", || cluster.router.engines().len() == 1).await;
    assert_eq!(cluster.complete(34).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_that_stops_with_all_store_nodes_disappears_and_may_return() {
    let cluster = TestCluster::new(0, 2).await;
    cluster.store.is_down.store(true, Ordering::SeqCst);
    cluster.decodes[0].is_gone.store(true, Ordering::SeqCst);
    let names = || cluster.router.engines().iter().map(|engine| engine.name.clone()).collect::<Vec<_>>();
    let begin = Instant::now();
    eventually("the stopped engine is out", || names() == ["decode-1"]).await;
    println!("out after {:?}", begin.elapsed());
    cluster.refreshed().await;
    assert_eq!(names(), ["decode-1"], "the other one serves without the store");
    assert_eq!(cluster.complete(3).await.0, 200);
    cluster.decodes[0].is_gone.store(false, Ordering::SeqCst);
    eventually("it answers again", || names().len() == 2).await;
}

/// Counts rounds, because a busy machine stretches them. Unit tests of discovery bound their time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_that_does_not_answer_leaves_in_few_rounds() {
    let cluster = TestCluster::with(0, 2, |options| options.poll_interval = Duration::from_millis(250)).await;
    let engine = &cluster.decodes[0];
    let is_out = || cluster.router.engines().iter().all(|engine| engine.name != "decode-0");
    let checks = || engine.identity_checks.load(Ordering::SeqCst);
    engine.is_gone.store(true, Ordering::SeqCst);
    let before = checks();
    let members = cluster.store.members.lock().clone();
    cluster.store.members.lock().retain(|member| member.name != "decode-0");
    eventually("the engine that the store does not name is out", is_out).await;
    assert_eq!(checks() - before, 1);
    engine.is_gone.store(false, Ordering::SeqCst);
    *cluster.store.members.lock() = members;
    eventually("it is back", || cluster.router.engines().len() == 2).await;
    engine.is_gone.store(true, Ordering::SeqCst);
    let before = checks();
    cluster.store.is_down.store(true, Ordering::SeqCst);
    eventually("the engine is out without a store", is_out).await;
    // Five rounds of 250 ms or more for a limit of 1 s. The store named it last, so once it is out
    // the router probes it: some of these count until the test sees that it is out.
    let rounds = checks() - before;
    assert!((2..=8).contains(&rounds), "{rounds} rounds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_with_too_many_bytes_of_files_is_not_served() {
    let cluster = TestCluster::new(0, 1).await;
    // Each file is below the limit, both together are not.
    let padding = 40 << 20;
    let model = ("large", "{{ messages[0].content }}");
    let large = FakeEngine::start_padded(&cluster.store, "decode-large", Role::Decode, CONTEXT, model, padding).await;
    // An attempt asks for five files at most.
    eventually("the router tries again", || large.files_sent.load(Ordering::SeqCst) > 5).await;
    let status = cluster.http.get(cluster.url("/v1/models/large")).send().await.unwrap().status();
    assert_eq!(status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_of_one_address_share_their_room_under_all_its_names() {
    let cluster = TestCluster::new(0, 1).await;
    // Two files each. An address has 128 MiB.
    let padding = 15 << 20;
    let mut engines = Vec::new();
    for (number, host) in ["127.0.0.1", "localhost", "127.0.0.1", "localhost"].into_iter().enumerate() {
        let model = format!("large-{number}");
        engines.push(FakeEngine::start_under_host(&cluster.store, host, &model, padding).await);
        eventually_has_status(&cluster, &model, 200).await;
    }
    let fifth = FakeEngine::start_under_host(&cluster.store, "localhost", "large-4", padding).await;
    // An attempt asks for five files at most.
    eventually("the router tries again", || fifth.files_sent.load(Ordering::SeqCst) > 5).await;
    assert_eq!(model_status(&cluster, "large-4").await, 404);
}

/// Status of the card of a model.
async fn model_status(cluster: &TestCluster, model: &str) -> u16 {
    cluster.http.get(cluster.url(&format!("/v1/models/{model}"))).send().await.unwrap().status().as_u16()
}

async fn eventually_has_status(cluster: &TestCluster, model: &str, status: u16) {
    let begin = Instant::now();
    while model_status(cluster, model).await != status {
        assert!(begin.elapsed() < PATIENCE, "the model never has the status {status}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn model_without_engines_is_dropped_after_its_retention() {
    let cluster = TestCluster::with(0, 1, |options| options.model_retention = Duration::from_millis(200)).await;
    let model = ("other", "{{ messages[0].content }}");
    let other = FakeEngine::start_model(&cluster.store, "other-0", Role::Decode, CONTEXT, model.0, model.1).await;
    eventually_has_status(&cluster, "other", 200).await;
    let files = || other.files_sent.load(Ordering::SeqCst);
    let files_before = files();
    let members = cluster.store.members.lock().clone();
    cluster.store.members.lock().retain(|member| member.name != "other-0");
    other.is_gone.store(true, Ordering::SeqCst);
    eventually_has_status(&cluster, "other", 404).await;
    assert_eq!(cluster.complete(3).await.0, 200, "the model with an engine stays");
    assert_eq!(files(), files_before);
    // It is loaded again when its engine returns.
    other.is_gone.store(false, Ordering::SeqCst);
    *cluster.store.members.lock() = members;
    eventually_has_status(&cluster, "other", 200).await;
    assert!(files() > files_before);
}

#[tokio::test]
async fn engine_that_restarts_within_the_retention_sends_no_files() {
    let cluster = TestCluster::new(0, 1).await;
    let engine = &cluster.decodes[0];
    assert_eq!(cluster.complete(3).await.0, 200);
    let files = engine.files_sent.load(Ordering::SeqCst);
    engine.is_gone.store(true, Ordering::SeqCst);
    let members = std::mem::take(&mut *cluster.store.members.lock());
    eventually("the engine has left", || cluster.router.engines().is_empty()).await;
    cluster.refreshed().await;
    assert_eq!(model_status(&cluster, MODEL).await, 200, "its engine may be restarting");
    engine.is_gone.store(false, Ordering::SeqCst);
    *cluster.store.members.lock() = members;
    eventually("the engine has returned", || !cluster.router.engines().is_empty()).await;
    assert_eq!(cluster.complete(3).await.0, 200);
    assert_eq!(engine.files_sent.load(Ordering::SeqCst), files);
}

#[tokio::test]
async fn engine_that_times_out_repeatedly_is_excluded() {
    let cluster = TestCluster::with(0, 1, |options| options.request_timeout = Duration::from_millis(150)).await;
    cluster.decodes[0].behave(Behaviour::HangAfter(0));
    for _ in 0..3 {
        assert!(cluster.router.engines()[0].is_admitted());
        assert_eq!(cluster.complete(3).await.0, 504);
    }
    assert!(!cluster.router.engines()[0].is_admitted());
}

#[tokio::test]
async fn prefill_engine_that_times_out_repeatedly_is_excluded() {
    let cluster = TestCluster::with(1, 1, |options| options.request_timeout = Duration::from_millis(150)).await;
    cluster.prefills[0].behave(Behaviour::HangAfter(0));
    let is_admitted = |name: &str| cluster.router.engines().iter().any(|e| e.name == name && e.is_admitted());
    let mut requests = 0;
    while is_admitted("prefill-0") {
        requests += 1;
        assert!(requests <= 20, "the prefill engine is never excluded");
        assert_eq!(cluster.complete(33).await.0, 504, "decode waits for the pages");
        // The call may end after the answer.
        eventually("the prefill ends", || cluster.prefills[0].running.load(Ordering::SeqCst) == 0).await;
    }
    assert!(is_admitted("decode-0"), "it only waited for the prefill");
}

#[tokio::test]
async fn request_waits_for_the_replacement_of_a_lost_engine() {
    // With this interval only a request can cause a refresh within the test.
    let cluster = TestCluster::with(0, 1, |options| options.poll_interval = Duration::from_secs(60)).await;
    cluster.decodes[0].behave(Behaviour::DieAtOnce);
    cluster.store.members.lock().clear();
    let refreshes = || cluster.store.refreshes.load(Ordering::SeqCst);
    let seen = refreshes();
    let replace = async {
        eventually("the request asks for a refresh, in vain", || refreshes() > seen).await;
        FakeEngine::start(&cluster.store, "decode-new", Role::Decode).await
    };
    let ((status, body), replacement) = tokio::join!(cluster.complete(3), replace);
    assert_eq!((status, replacement.decode_count()), (200, 1), "{body}");
}

#[tokio::test]
async fn requests_go_to_engines_with_enough_context() {
    let cluster = TestCluster::new(0, 1).await;
    let large = FakeEngine::start_with_context(&cluster.store, "decode-large", Role::Decode, 2 * CONTEXT).await;
    eventually("it joins", || cluster.router.engines().len() == 2).await;
    assert_eq!(cluster.complete(CONTEXT as usize).await.0, 200, "prompt and first token exceed the small context");
    assert_eq!(large.decode_count(), 1);
    for words in 100..104 {
        let body = json!({"model": MODEL, "prompt": prompt(words), "max_tokens": CONTEXT - 90});
        assert_eq!(cluster.post("/v1/completions", body).await.status(), 200);
    }
    assert_eq!(
        (large.decode_count(), cluster.decodes[0].decode_count()),
        (5, 0),
        "only the large engine fits the whole answer"
    );
    cluster.decodes[0].behave(Behaviour::Refuse(ErrorCode::ContextLengthExceeded));
    for words in 1..9 {
        let (status, body) = cluster.complete(words).await;
        assert_eq!(status, 200, "{body}");
    }
    assert!(cluster.decodes[0].decode_count() > 0, "otherwise the test shows nothing");
}

#[tokio::test]
async fn decode_that_dies_before_its_first_token_is_replaced_and_excluded() {
    let cluster = TestCluster::new(0, 2).await;
    cluster.decodes[0].behave(Behaviour::DieAtOnce);
    for words in 1..8 {
        let (status, body) = cluster.complete(words).await;
        assert_eq!(status, 200, "{body}");
    }
    assert!(cluster.decodes[0].decode_count() <= 1, "the circuit breaker excludes it");
    assert_eq!(cluster.router.counters().retries_decode, cluster.decodes[0].decode_count() as u64);
}

#[tokio::test]
async fn decode_that_dies_midway_ends_the_stream_with_an_error_event() {
    let cluster = TestCluster::new(0, 1).await;
    cluster.decodes[0].behave(Behaviour::DieAfter(3));
    let body = json!({"model": MODEL, "prompt": prompt(3), "stream": true});
    let response = cluster.post("/v1/completions", body).await;
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let events: Vec<&str> = text.split("\n\n").filter(|e| !e.is_empty()).collect();
    assert_eq!(events.len(), 5, "{text}");
    assert!(events[2].contains(" t2"));
    let error: serde_json::Value = serde_json::from_str(events[3].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(
        (error["error"]["type"].as_str(), error["error"]["code"].as_str()),
        (Some("server_error"), Some("engine_lost"))
    );
    assert_eq!(events[4], "data: [DONE]");
    eventually("it is counted as failed", || cluster.router.counters().requests_failed == 1).await;
}

#[tokio::test]
async fn unstreamed_answer_restarts_on_another_engine_or_fails_with_502() {
    let cluster = TestCluster::new(0, 2).await;
    cluster.decodes[0].behave(Behaviour::DieAfter(3));
    for words in 1..8 {
        let (status, body) = cluster.complete(words).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["choices"][0]["text"].as_str().unwrap().matches(" t0").count(), 1);
    }
    let cluster = TestCluster::new(0, 1).await;
    cluster.decodes[0].behave(Behaviour::DieAfter(3));
    let (status, body) = cluster.complete(5).await;
    assert_eq!((status, body["error"]["code"].as_str()), (502, Some("engine_lost")));
    cluster.decodes[0].is_gone.store(true, Ordering::SeqCst);
    cluster.store.members.lock().clear();
    eventually("the engine is out", || cluster.router.engines().is_empty()).await;
    let (status, body) = cluster.complete(5).await;
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("engine_unavailable")));
}

#[tokio::test]
async fn busy_engines_yield_429() {
    let cluster = TestCluster::new(0, 2).await;
    cluster.decodes.iter().for_each(|engine| engine.behave(Behaviour::Refuse(ErrorCode::Busy)));
    let response = cluster.post("/v1/completions", json!({"model": MODEL, "prompt": "w1"})).await;
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"2".parse().unwrap()));
    assert!(cluster.decodes.iter().all(|engine| engine.decode_count() == 1), "each engine is tried once");
    cluster.decodes[1].behave(Behaviour::Serve);
    assert_eq!(cluster.complete(2).await.0, 200, "busy engines are not excluded");
}

#[tokio::test]
async fn request_refused_as_invalid_is_not_retried() {
    let cluster = TestCluster::new(0, 2).await;
    cluster.decodes.iter().for_each(|engine| engine.behave(Behaviour::Refuse(ErrorCode::BadRequest)));
    let (status, body) = cluster.complete(3).await;
    assert_eq!((status, body["error"]["message"].as_str()), (400, Some("refused by the test")));
    assert_eq!(cluster.decodes.iter().map(|engine| engine.decode_count()).sum::<usize>(), 1);
}

#[tokio::test]
async fn client_disconnect_cancels_all_work() {
    let cluster = TestCluster::new(1, 1).await;
    cluster.prefills[0].behave(Behaviour::HangAfter(0));
    cluster.decodes[0].behave(Behaviour::HangAfter(2));
    // First case: the client disconnects while the answer streams.
    let body = json!({"model": MODEL, "prompt": prompt(50), "stream": true});
    let response = cluster.post("/v1/completions", body).await;
    assert_eq!(response.status(), 200);
    eventually("both engines work", || cluster.running() == 2).await;
    drop(response);
    eventually("both engines are let go", || cluster.running() == 0).await;
    // Second case: it disconnects before the first token.
    cluster.decodes[0].behave(Behaviour::HangAfter(0));
    let waiting = cluster.post("/v1/completions", json!({"model": MODEL, "prompt": prompt(50)}));
    tokio::select! {
        response = waiting => panic!("an answer without a token: {response:?}"),
        () = eventually("both engines work again", || cluster.running() == 2) => {}
    }
    eventually("both engines are let go again", || cluster.running() == 0).await;
    eventually("nothing is in progress", || cluster.router.counters().inflight == 0).await;
    assert_eq!(cluster.router.counters().requests_failed, 2);
    assert!(cluster.router.engines().iter().all(|engine| engine.outstanding_tokens() == 0 && engine.is_admitted()));
}

#[tokio::test]
async fn request_fails_with_504_at_its_time_limit() {
    let cluster = TestCluster::with(0, 1, |options| options.request_timeout = Duration::from_millis(300)).await;
    cluster.decodes[0].behave(Behaviour::HangAfter(2));
    let (status, body) = cluster.complete(3).await;
    assert_eq!((status, body["error"]["code"].as_str()), (504, Some("timeout")));
    eventually("the engine is let go", || cluster.running() == 0).await;
}

#[tokio::test]
async fn answers_above_the_limit_are_refused_at_once() {
    let cluster = TestCluster::with(0, 1, |options| options.max_inflight = 2).await;
    cluster.decodes[0].behave(Behaviour::HangAfter(1));
    let body = json!({"model": MODEL, "prompt": "w1", "stream": true, "n": 2});
    let running = cluster.post("/v1/completions", body).await;
    let response = cluster.post("/v1/completions", json!({"model": MODEL, "prompt": "w1"})).await;
    assert_eq!(response.status(), 429);
    assert!(response.headers().contains_key("retry-after"));
    drop(running);
    cluster.decodes[0].behave(Behaviour::Serve);
    eventually("the permits are free again", || cluster.router.counters().inflight == 0).await;
    let body = json!({"model": MODEL, "prompt": "w1", "n": 3});
    assert_eq!(cluster.post("/v1/completions", body).await.status(), 400, "the limit can never admit so many answers");
    assert_eq!(cluster.complete(1).await.0, 200);
}

#[tokio::test]
async fn batches_leave_places_for_other_requests() {
    let cluster = TestCluster::with(0, 1, |options| options.max_inflight = 8).await;
    let engine = &cluster.decodes[0];
    engine.behave(Behaviour::HangAfter(0));
    let batch = || json!({"model": MODEL, "prompt": ["w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9"]});
    let requests = async {
        eventually("the batch has its part", || engine.decode_count() == 2).await;
        engine.behave(Behaviour::Serve);
        assert_eq!(cluster.complete(1).await.0, 200, "beside the batch");
    };
    tokio::select! {
        _ = cluster.post("/v1/completions", batch()) => panic!("its engine hangs"),
        () = requests => {}
    }
    let answer: Value = cluster.post("/v1/completions", batch()).await.json().await.unwrap();
    let choices = answer["choices"].as_array().unwrap();
    assert!(choices.len() == 9 && (0..9).zip(choices).all(|(at, choice)| choice["index"] == at), "{answer}");
    let many = json!({"model": MODEL, "prompt": vec!["w1"; 1024], "n": 5});
    let refused = cluster.post("/v1/completions", many).await;
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("5120 answers"));
}

#[tokio::test]
async fn streamed_batches_start_a_prompt_when_another_has_ended() {
    let cluster = TestCluster::with(0, 1, |options| options.max_inflight = 8).await;
    let engine = &cluster.decodes[0];
    engine.behave(Behaviour::HangAfter(1));
    let body = |prompts: usize| json!({"model": MODEL, "prompt": vec!["w1"; prompts], "stream": true, "max_tokens": 3});
    let hanging = cluster.post("/v1/completions", body(9)).await;
    assert_eq!((hanging.status().as_u16(), engine.decode_count()), (200, 2), "it has two of eight places");
    engine.behave(Behaviour::Serve);
    assert_eq!(cluster.complete(1).await.0, 200, "beside the batch");
    assert_eq!(engine.decode_count(), 3);
    drop(hanging);
    eventually("its places are free", || cluster.router.counters().inflight == 0).await;
    for path in ["/v1/completions", "/generate"] {
        let params = json!({"text": vec!["w1"; 300], "stream": true, "sampling_params": {"max_new_tokens": 3}});
        let body = if path == "/generate" { params } else { body(300) };
        let text = cluster.post(path, body).await.text().await.unwrap();
        let events: Vec<Value> = text
            .split("\n\n")
            .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
            .map(|mut event: Value| event.get_mut("choices").map(|choices| choices[0].take()).unwrap_or(event))
            .collect();
        for index in 0..300 {
            let mut texts =
                events.iter().filter(|event| event["index"] == index).filter_map(|event| event["text"].as_str());
            let text = if path == "/generate" { texts.next_back().unwrap().into() } else { texts.collect::<String>() };
            assert_eq!(text, " t0 t1 t2", "{path} {index}");
        }
    }
    // A prompt that fails after the first ones were streamed ends the answer with an error.
    engine.behave(Behaviour::DieAfter(1));
    let text = cluster.post("/v1/completions", body(9)).await.text().await.unwrap();
    assert!(text.contains("\"error\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn departed_engines_are_removed_and_live_ones_survive_a_store_restart() {
    let cluster = TestCluster::new(1, 2).await;
    cluster.decodes[0].is_gone.store(true, Ordering::SeqCst);
    cluster.store.members.lock().retain(|member| member.name != "decode-0");
    eventually("the engine is out", || cluster.router.engines().len() == 2).await;
    let mut members = std::mem::take(&mut *cluster.store.members.lock());
    cluster.refreshed().await;
    assert_eq!(cluster.router.engines().len(), 2, "a restarted store node names no engine at first");
    assert_eq!(cluster.complete(3).await.0, 200);
    cluster.store.members.lock().push(members.remove(0));
    cluster.refreshed().await;
    assert_eq!(cluster.router.engines().len(), 2, "engines register again one after the other");
    cluster.store.members.lock()[0].info["max_context"] = json!(CONTEXT + 1);
    eventually("one in whose name another registered is out", || cluster.router.engines().len() == 1).await;
    *cluster.store.members.lock() = members;
}

#[tokio::test]
async fn member_with_the_url_of_another_engine_does_not_join() {
    let cluster = TestCluster::new(0, 1).await;
    let mut stale = cluster.store.members.lock()[0].clone();
    stale.name = "decode-dead".into();
    stale.info["max_context"] = json!(CONTEXT + 1);
    let checks = || cluster.decodes[0].identity_checks.load(Ordering::SeqCst);
    let seen = checks();
    cluster.store.members.lock().push(stale);
    eventually("the router checks the new member", || checks() > seen).await;
    cluster.refreshed().await;
    assert_eq!(cluster.router.engines().len(), 1);
}

#[tokio::test]
async fn equal_prefixes_share_an_engine_until_load_differs() {
    let cluster = TestCluster::new(0, 3).await;
    for _ in 0..4 {
        cluster.complete(20).await;
    }
    assert_eq!(cluster.decodes.iter().filter(|engine| engine.decode_count() > 0).count(), 1);
    cluster.decodes.iter().for_each(|engine| engine.behave(Behaviour::HangAfter(1)));
    let mut running = Vec::new();
    for _ in 0..3 {
        running
            .push(cluster.post("/v1/completions", json!({"model": MODEL, "prompt": prompt(20), "stream": true})).await);
    }
    assert!(cluster.decodes.iter().all(|engine| engine.running.load(Ordering::SeqCst) == 1));
}

#[tokio::test]
async fn engine_that_found_unusable_pages_is_not_excluded() {
    let cluster = TestCluster::new(0, 1).await;
    cluster.decodes[0].behave(Behaviour::Refuse(ErrorCode::PagesUnusable));
    // A client that puts such pages must not take engines away from others.
    for _ in 0..4 {
        let (status, body) = cluster.complete(3).await;
        assert_eq!((status, body["error"]["code"].as_str()), (503, Some("engine_unavailable")), "{body}");
    }
    assert!(cluster.router.engines()[0].is_admitted());
}

#[tokio::test]
async fn name_of_a_model_stays_with_the_first_one_while_it_has_engines() {
    let cluster = TestCluster::new(0, 1).await;
    let mut strangers = Vec::new();
    for at in 0..2 {
        strangers.push(FakeEngine::start_other_weights(&cluster.store, &format!("stranger-{at}")).await);
    }
    let files = || strangers.iter().map(|engine| engine.files_sent.load(Ordering::SeqCst)).sum::<usize>();
    eventually("their model is loaded", || cluster.router.engines().len() == 3 && files() >= 5).await;
    let taken = || strangers.iter().map(|engine| engine.decode_count()).sum::<usize>();
    for _ in 0..20 {
        assert_eq!(cluster.complete(3).await.0, 200);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(taken(), 0, "the first engine serves the name");
    cluster.store.members.lock().retain(|member| member.name.starts_with("stranger"));
    cluster.decodes[0].is_gone.store(true, Ordering::SeqCst);
    let deadline = std::time::Instant::now() + PATIENCE;
    while taken() == 0 {
        assert!(std::time::Instant::now() < deadline, "new weights take over when the old ones have no engine");
        cluster.complete(3).await;
    }
}
