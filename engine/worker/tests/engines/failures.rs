//! Faults cost only what they must: an unreachable store, disconnected clients, deadlines,
//! overload.

use crate::common::*;
use futures::StreamExt;
use larder_worker::api::{CacheMode, DecodeEvent, DecodeRequest, EngineInfo, ErrorCode, FinishReason, PrefillRequest};
use larder_worker::{EngineHandle, EngineOptions, Role};
use std::time::Duration;

/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);
/// Far more than [`PATIENCE`]: a wait that ends sooner did not end by this limit.
const HOUR: Duration = Duration::from_secs(3600);

/// Result of a step that must not wait for pages, nor for another request.
async fn soon<T>(step: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, step).await.expect("it waits for something that never happens")
}

/// Options of an engine that waits for a prefill for hours, if requests have the time.
fn waits_for_hours(role: Role) -> EngineOptions {
    let mut options = options(role);
    options.request_timeout = 4 * HOUR;
    options.follow_start_timeout = HOUR;
    options.follow_stall_timeout = HOUR;
    options.follow_grace = HOUR;
    options
}

/// Request that waits for its pages for hours at [`waits_for_hours`].
fn patient_request(tokens: &[u32], max_tokens: usize) -> DecodeRequest {
    DecodeRequest { await_pages: 6, deadline_ms: 4 * HOUR.as_millis() as u64, ..decode_request(tokens, max_tokens) }
}

/// Requests of a decode engine in this state.
async fn in_state(engine: &EngineHandle, state: &str) -> f64 {
    metric(engine, &format!(r#"larder_engine_state_requests{{role="decode",state="{state}"}}"#)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_computes_without_the_store() {
    let store = MemoryStore::new();
    store.set_down(true);
    let decoder = engine_with(waits_for_hours(Role::Decode), &store).await;
    let request = patient_request(&prompt(1, 100), 10);
    assert_eq!(soon(decode(&decoder, &request)).await.tokens, expected(&request.tokens, 10));
    assert_eq!(store.follow_calls(), 0, "nothing to follow, nothing to wait for");
    let prefiller = engine(Role::Prefill, &store).await;
    let response = prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!((response.pages_computed, response.pages_lost), (6, 6));
    // Pages are in L1 now. A down store must not trigger new puts.
    let begun = store.puts_begun();
    let response = prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!((response.pages_l1, response.pages_lost), (6, 0), "a store that is away is not known to lack anything");
    assert_eq!(store.puts_begun(), begun, "so nothing is put again");
    assert_eq!(metric(&prefiller, r#"larder_engine_pages_published_total{role="prefill",outcome="lost"}"#).await, 6.0);
    assert_eq!(prefiller.state().store_nodes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_computes_pages_that_prefill_lost() {
    let store = MemoryStore::new();
    store.lose_puts(true);
    let prefiller = engine(Role::Prefill, &store).await;
    let decoder = engine(Role::Decode, &store).await;
    let mut request = decode_request(&prompt(2, 100), 10);
    request.await_pages = 6;
    let (answer, _) = tokio::join!(decode(&decoder, &request), prefill(&prefiller, &request.tokens, CacheMode::All));
    assert_eq!((answer.tokens, answer.start.pages_followed), (expected(&request.tokens, 10), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_client_frees_all_pages() {
    let store = MemoryStore::new();
    let decoder = engine_with(waits_for_hours(Role::Decode), &store).await;
    let response = post(&decoder, "/v1/decode", &decode_request(&prompt(3, 100), 3000)).await;
    let mut stream = response.bytes_stream();
    stream.next().await.unwrap().unwrap();
    assert_eq!(decoder.state().running, 1);
    drop(stream);
    assert!(is_idle(&decoder).await);
    assert!(metric(&decoder, "larder_engine_tokens_generated_total").await < 2900.0);
    assert_eq!(metric(&decoder, r#"larder_engine_requests_total{role="decode",outcome="cancelled"}"#).await, 1.0);

    // Disconnect while the request waits for pages that no engine writes.
    let request = patient_request(&prompt(4, 100), 10);
    tokio::select! {
        response = post(&decoder, "/v1/decode", &request) => panic!("it does not wait: {response:?}"),
        waits = eventually(async || in_state(&decoder, "transfer").await >= 1.0) => assert!(waits),
    }
    assert!(is_idle(&decoder).await, "the request still waits");
    assert_eq!(in_state(&decoder, "transfer").await, 0.0);
    assert_eq!(metric(&decoder, r#"larder_engine_requests_total{role="decode",outcome="cancelled"}"#).await, 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadline_ends_a_running_request() {
    let store = MemoryStore::new();
    let decoder = engine(Role::Decode, &store).await;
    let mut request = decode_request(&prompt(5, 100), 3500);
    request.deadline_ms = 400;
    let code = match try_decode(&decoder, &request).await {
        Ok(Answer { last: DecodeEvent::Error(error), .. }) => error.code,
        // A busy machine has not begun the answer by then.
        Err((_, error)) => error.code,
        Ok(answer) => panic!("{:?}", answer.last),
    };
    assert_eq!(code, ErrorCode::Deadline);
    assert!(is_idle(&decoder).await);
    store.delay_lookups(HOUR);
    request.tokens = prompt(6, 100);
    request.sampling.max_tokens = 3;
    request.deadline_ms = 10_000;
    let answer = decode(&decoder, &request).await;
    assert_eq!(answer.tokens, expected(&request.tokens, 3), "a store that hangs costs half the time, not the answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preemption_under_small_l1_keeps_answers_identical() {
    let store = MemoryStore::new();
    let mut settings = options(Role::Decode);
    settings.l1_bytes = 20 * LOADED.model.geometry(PAGE as u32).page_bytes();
    let decoder = engine_with(settings, &store).await;
    let requests: Vec<_> = (0..5).map(|i| decode_request(&prompt(30 + i, 60), 100)).collect();
    let answers = futures::future::join_all(requests.iter().map(|request| decode(&decoder, request))).await;
    for (request, answer) in requests.iter().zip(answers) {
        assert_eq!(answer.tokens, expected(&request.tokens, 100));
    }
    assert!(metric(&decoder, "larder_engine_preemptions_total").await > 0.0, "the test must need it");
    assert!(is_idle(&decoder).await);

    let info: EngineInfo =
        reqwest::get(format!("http://{}/v1/model", decoder.addr())).await.unwrap().json().await.unwrap();
    assert_eq!(info.max_context as usize, 20 * PAGE);
    let (status, error) = try_decode(&decoder, &decode_request(&prompt(1, 20 * PAGE), 1)).await.unwrap_err();
    assert_eq!((status, error.code), (400, ErrorCode::ContextLengthExceeded));
    let answer = decode(&decoder, &decode_request(&prompt(1, 20 * PAGE - 3), 100)).await;
    assert_eq!(answer.last, DecodeEvent::End { finish_reason: FinishReason::Length, completion_tokens: 3 });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oldest_request_gets_pages_preempted_from_a_younger_one() {
    let store = MemoryStore::new();
    let mut settings = options(Role::Decode);
    settings.l1_bytes = 8 * LOADED.model.geometry(PAGE as u32).page_bytes();
    settings.max_batch = 1;
    let decoder = engine_with(settings, &store).await;
    // The second request holds pages without a place in a step, while the first outgrows the rest
    // of L1. The second is too short to load anything, so it takes its pages again as soon as they
    // are free.
    let long = decode_request(&prompt(60, 20), 100);
    let short = decode_request(&prompt(61, 16), 5);
    let response = post(&decoder, "/v1/decode", &long).await;
    let (second, first) = tokio::join!(decode(&decoder, &short), response.bytes());
    assert_eq!(second.tokens, expected(&short.tokens, 5));
    let ids: Vec<u32> = (first.unwrap().split(|&byte| byte == b'\n'))
        .filter_map(|line| match serde_json::from_slice(line) {
            Ok(DecodeEvent::Token { id, .. }) => Some(id),
            _ => None,
        })
        .collect();
    assert_eq!(ids, expected(&long.tokens, 100));
    assert!(metric(&decoder, "larder_engine_preemptions_total").await > 0.0, "the test must need it");
    assert!(is_idle(&decoder).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_queue_answers_busy_immediately() {
    let store = MemoryStore::new();
    store.delay_lookups(Duration::from_millis(500));
    let mut settings = options(Role::Decode);
    settings.max_batch = 1;
    settings.queue_max = 2;
    let decoder = engine_with(settings, &store).await;
    let requests: Vec<_> = (0..8).map(|i| decode_request(&prompt(40 + i, 40), 2)).collect();
    let answers = futures::future::join_all(requests.iter().map(|request| try_decode(&decoder, request))).await;
    let (served, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    assert!(served.len() >= 2 && !refused.is_empty(), "{} served", served.len());
    for answer in refused {
        let (status, error) = answer.unwrap_err();
        assert_eq!((status, error.code), (503, ErrorCode::Busy));
        assert!(error.retry_after_ms.is_some());
    }
    assert!(is_idle(&decoder).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_of_one_address_leaves_a_place_in_the_queue_to_the_next_one() {
    let store = MemoryStore::new();
    // The first ones wait for half their time, and keep the others in the queue.
    store.delay_lookups(Duration::from_secs(60));
    let mut settings = options(Role::Decode);
    settings.max_batch = 1;
    settings.queue_max = 8;
    let decoder = engine_with(settings, &store).await;
    let url = format!("http://{}/v1/decode", decoder.addr());
    let stranger = reqwest::Client::builder().local_address(std::net::IpAddr::from([127, 0, 0, 2])).build().unwrap();
    let (refusal, mut refusals) = tokio::sync::mpsc::unbounded_channel();
    let mut crowd = tokio::task::JoinSet::new();
    for number in 0..24 {
        let mut request = decode_request(&prompt(100 + number, 40), 2);
        request.deadline_ms = 10_000;
        let (stranger, url, refusal) = (stranger.clone(), url.clone(), refusal.clone());
        crowd.spawn(async move {
            if stranger.post(url).json(&request).send().await.unwrap().status() == 503 {
                refusal.send(()).unwrap();
            }
        });
    }
    // More than the two that hold pages and the queue leave.
    for _ in 0..10 {
        soon(refusals.recv()).await.unwrap();
    }
    store.delay_lookups(Duration::ZERO);
    let honest = decode_request(&prompt(99, 40), 2);
    assert_eq!(decode(&decoder, &honest).await.tokens, expected(&honest.tokens, 2));
    while crowd.join_next().await.is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_of_one_address_leaves_a_running_place_to_the_next_one() {
    let store = MemoryStore::new();
    // They hold their pages while they wait for the store.
    store.delay_lookups(HOUR);
    let mut settings = waits_for_hours(Role::Decode);
    settings.load_timeout = HOUR;
    settings.queue_timeout = HOUR;
    settings.max_batch = 2;
    let decoder = engine_with(settings, &store).await;
    let url = format!("http://{}/v1/decode", decoder.addr());
    let stranger = reqwest::Client::builder().local_address(std::net::IpAddr::from([127, 0, 0, 2])).build().unwrap();
    let mut crowd = tokio::task::JoinSet::new();
    for number in 0..4 {
        let request = patient_request(&prompt(200 + number, 40), 2);
        crowd.spawn(stranger.post(url.as_str()).json(&request).send());
    }
    // Of four places, the last one stays free.
    let is_full = async || {
        let state = decoder.state();
        (state.running, state.queue) == (3, 1)
    };
    assert!(eventually(is_full).await, "{:?}", decoder.state());
    store.delay_lookups(Duration::ZERO);
    let honest = decode_request(&prompt(199, 40), 2);
    assert_eq!(soon(decode(&decoder, &honest)).await.tokens, expected(&honest.tokens, 2));
    assert_eq!(decoder.state().queue, 1, "the last one of the crowd still waits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_requests_get_specific_errors() {
    let store = MemoryStore::new();
    let decoder = engine(Role::Decode, &store).await;
    let good = decode_request(&[1, 2, 3], 2);
    type Mutation = fn(&mut larder_worker::api::DecodeRequest);
    let mutations: [(Mutation, ErrorCode); 14] = [
        (|r| r.tokens.clear(), ErrorCode::BadRequest),
        (|r| r.tokens[1] = u32::MAX, ErrorCode::BadRequest),
        (|r| r.tokens = vec![5; 4096], ErrorCode::ContextLengthExceeded),
        (|r| r.deadline_ms = 0, ErrorCode::BadRequest),
        (|r| r.sampling.max_tokens = 0, ErrorCode::BadRequest),
        (|r| r.sampling.temperature = -1.0, ErrorCode::BadRequest),
        (|r| r.sampling.top_p = -0.1, ErrorCode::BadRequest),
        (|r| r.sampling.stop = vec![String::new()], ErrorCode::BadRequest),
        (|r| r.sampling.min_tokens = 3, ErrorCode::BadRequest),
        (|r| r.sampling.repetition_penalty = 0.0, ErrorCode::BadRequest),
        (|r| r.sampling.presence_penalty = 2.5, ErrorCode::BadRequest),
        (|r| r.sampling.logit_bias = vec![(1 << 20, 1.0)], ErrorCode::BadRequest),
        (|r| r.sampling.stop_token_ids = vec![u32::MAX], ErrorCode::BadRequest),
        (|r| r.sampling.logprobs = Some(21), ErrorCode::BadRequest),
    ];
    for (mutate, code) in mutations {
        let mut request = good.clone();
        mutate(&mut request);
        let (status, error) = try_decode(&decoder, &request).await.unwrap_err();
        assert_eq!((status, error.code), (400, code), "{}", error.message);
    }
    let mut sharpest = good.clone();
    sharpest.sampling.top_p = 0.0;
    sharpest.sampling.temperature = 1.0;
    let answer = decode(&decoder, &sharpest).await;
    assert_eq!(answer.tokens, expected(&good.tokens, 2), "top_p 0 leaves the likeliest token");
    let url = |path: &str| format!("http://{}{path}", decoder.addr());
    let client = reqwest::Client::new();
    let garbage = client.post(url("/v1/prefill")).header("content-type", "application/json").body("{\"tokens\":");
    let response = garbage.send().await.unwrap();
    assert_eq!(response.status(), 400);
    let error: larder_worker::api::ApiError = response.json().await.unwrap();
    assert_eq!(error.code, ErrorCode::BadRequest);
    for (path, status) in [
        ("/healthz", 200),
        ("/v1/state", 200),
        ("/v1/model/files/tokenizer.json", 200),
        ("/v1/model/files/model.safetensors", 404),
        ("/v1/model/files/..%2Fconfig.json", 404),
        ("/nowhere", 404),
    ] {
        assert_eq!(reqwest::get(url(path)).await.unwrap().status(), status, "{path}");
    }
    let short =
        PrefillRequest { request_id: String::new(), tokens: vec![1; PAGE], cache: CacheMode::All, deadline_ms: 1000 };
    let response = post(&decoder, "/v1/prefill", &short).await;
    assert_eq!((response.status().as_u16(), store.puts_begun()), (200, 0), "no whole page below the last token");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_running_requests_with_an_error() {
    let store = MemoryStore::new();
    let decoder = engine(Role::Decode, &store).await;
    let response = post(&decoder, "/v1/decode", &decode_request(&prompt(7, 50), 3000)).await;
    soon(decoder.shutdown()).await;
    let body = response.bytes().await.unwrap();
    let last = body.split(|&b| b == b'\n').rfind(|line| !line.is_empty()).unwrap();
    assert!(matches!(serde_json::from_slice(last).unwrap(), DecodeEvent::Error(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_measures_the_delays_of_its_event_loop() {
    let decoder = engine(Role::Decode, &MemoryStore::new()).await;
    let measures = async || metric(&decoder, "larder_engine_event_loop_delay_max_seconds").await > 0.0;
    assert!(eventually(measures).await);
}
