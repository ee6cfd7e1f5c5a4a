//! Where prompts go, and what happens when engines fail.

use crate::fakes::*;
use larder_worker::api::{CacheMode, ErrorCode, Role};
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn cached(body: &serde_json::Value) -> u64 {
    body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn a_long_prompt_is_prefilled_apart_and_its_repetition_is_not() {
    let bed = Bed::new(1, 1).await;
    let (status, body) = bed.complete(33).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!((body["usage"]["prompt_tokens"].as_u64(), cached(&body)), (Some(33), 0));
    assert_eq!(bed.prefills[0].prefills.lock()[0].tokens.len(), 33);
    assert_eq!(bed.decodes[0].decodes.lock()[0].await_pages, 8);
    let (_, body) = bed.complete(33).await;
    assert_eq!(cached(&body), 32, "the store has all whole pages");
    assert_eq!(bed.prefills[0].prefill_count(), 1);
    assert_eq!(bed.decodes[0].decodes.lock()[1].await_pages, 0);
    // Half of it new: prefill goes on from what is there.
    let (_, body) = bed.complete(65).await;
    assert_eq!((cached(&body), bed.prefills[0].prefill_count()), (32, 2));
    let counters = bed.router.counters();
    assert_eq!((counters.requests, counters.tokens_in, counters.tokens_cached), (3, 131, 64));
}

#[tokio::test]
async fn short_prompts_and_uncached_requests_are_decoded_alone() {
    let bed = Bed::new(1, 1).await;
    assert_eq!(bed.complete(8).await.0, 200, "one whole page only");
    let request = bed.http.post(bed.url("/v1/completions")).header("x-larder-cache", "none");
    let response = request.json(&json!({"model": MODEL, "prompt": prompt(50)})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(bed.prefills[0].prefill_count(), 0);
    assert_eq!(bed.decodes[0].decodes.lock()[1].cache, CacheMode::None);
}

#[tokio::test]
async fn without_a_store_decode_computes_everything() {
    let bed = Bed::new(1, 1).await;
    bed.store.is_down.store(true, Ordering::SeqCst);
    assert_eq!(bed.complete(50).await.0, 200);
    assert_eq!(bed.prefills[0].prefill_count(), 0);
    assert_eq!(bed.decodes[0].decodes.lock()[0].await_pages, 0);
}

#[tokio::test]
async fn a_prefill_that_fails_goes_elsewhere_and_never_back() {
    let bed = Bed::new(3, 1).await;
    for engine in &bed.prefills {
        engine.behave(Behaviour::DieAtOnce);
    }
    bed.prefills[2].behave(Behaviour::Serve);
    let (status, body) = bed.complete(50).await;
    assert_eq!(status, 200, "{body}");
    assert!(bed.prefills.iter().all(|engine| engine.prefill_count() <= 1));
    assert_eq!(bed.prefills[2].prefill_count(), 1);
    let failed = bed.prefills.iter().map(|engine| engine.prefill_count()).sum::<usize>() as u64 - 1;
    assert_eq!(bed.router.counters().retries_prefill, failed);
}

#[tokio::test]
async fn without_any_prefill_decode_computes_the_rest() {
    let bed = Bed::new(2, 1).await;
    bed.prefills[0].behave(Behaviour::Refuse(ErrorCode::Internal));
    bed.prefills[1].behave(Behaviour::Refuse(ErrorCode::Busy));
    let (status, body) = bed.complete(50).await;
    assert_eq!((status, cached(&body)), (200, 0));
    assert!(bed.prefills.iter().all(|engine| engine.prefill_count() == 1));
    let awaited: Vec<u32> = bed.decodes[0].decodes.lock().iter().map(|d| d.await_pages).collect();
    assert_eq!(awaited, [12, 0], "it is told not to wait");
}

#[tokio::test]
async fn nobody_waits_for_pages_that_the_prefill_lost() {
    let bed = Bed::new(2, 1).await;
    bed.prefills.iter().for_each(|engine| engine.behave(Behaviour::LosePages));
    let (status, body) = bed.complete(50).await;
    assert_eq!((status, cached(&body)), (200, 8), "what it found cached still counts");
    assert_eq!(
        bed.prefills.iter().map(|engine| engine.prefill_count()).sum::<usize>(),
        1,
        "another would lose them too"
    );
    let awaited: Vec<u32> = bed.decodes[0].decodes.lock().iter().map(|d| d.await_pages).collect();
    assert_eq!(awaited, [12, 0], "it is told not to wait");
}

#[tokio::test]
async fn an_engine_that_shuts_down_while_it_answers_is_replaced() {
    let bed = Bed::new(0, 2).await;
    bed.decodes[0].behave(Behaviour::LeaveAfter(3));
    for words in 1..8 {
        let (status, body) = bed.complete(words).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["choices"][0]["text"].as_str().unwrap().matches(" t0").count(), 1);
    }
    assert!(bed.decodes[0].decode_count() > 0, "the test must need it");
}

#[tokio::test]
async fn an_engine_that_sends_too_much_is_taken_for_lost() {
    let bed = Bed::new(0, 1).await;
    bed.decodes[0].behave(Behaviour::Flood);
    let (status, body) = bed.complete(5).await;
    assert_eq!((status, body["error"]["code"].as_str()), (502, Some("engine_lost")));
    assert!(!bed.router.engines()[0].is_admitted());
}

#[tokio::test]
async fn engines_that_never_answer_are_left_alone_after_a_while() {
    let bed = Bed::with(0, 1, |options| options.request_timeout = Duration::from_millis(150)).await;
    bed.decodes[0].behave(Behaviour::HangAfter(0));
    for _ in 0..3 {
        assert!(bed.router.engines()[0].is_admitted());
        assert_eq!(bed.complete(3).await.0, 504);
    }
    assert!(!bed.router.engines()[0].is_admitted());
}

#[tokio::test]
async fn a_request_waits_for_the_engine_that_replaces_a_lost_one() {
    // Looks are so rare that only a request can bring one about.
    let bed = Bed::with(0, 1, |options| options.poll_interval = Duration::from_secs(60)).await;
    bed.decodes[0].behave(Behaviour::DieAtOnce);
    bed.store.members.lock().clear();
    let replace = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        FakeEngine::start(&bed.store, "decode-new", Role::Decode).await
    };
    let ((status, body), replacement) = tokio::join!(bed.complete(3), replace);
    assert_eq!((status, replacement.decode_count()), (200, 1), "{body}");
}

#[tokio::test]
async fn engines_of_different_context_get_what_fits_them() {
    let bed = Bed::new(0, 1).await;
    let large = FakeEngine::start_with_context(&bed.store, "decode-large", Role::Decode, 2 * CONTEXT).await;
    eventually("it joins", || bed.router.engines().len() == 2).await;
    assert_eq!(bed.complete(CONTEXT as usize).await.0, 200, "with its first token it does not fit the small one");
    assert_eq!(large.decode_count(), 1);
    for words in 100..104 {
        let body = json!({"model": MODEL, "prompt": prompt(words), "max_tokens": CONTEXT - 90});
        assert_eq!(bed.post("/v1/completions", body).await.status(), 200);
    }
    assert_eq!((large.decode_count(), bed.decodes[0].decode_count()), (5, 0), "they have room for the whole answer");
    bed.decodes[0].behave(Behaviour::Refuse(ErrorCode::ContextLengthExceeded));
    for words in 1..9 {
        let (status, body) = bed.complete(words).await;
        assert_eq!(status, 200, "{body}");
    }
    assert!(bed.decodes[0].decode_count() > 0, "the test must need it");
}

#[tokio::test]
async fn a_decode_that_dies_before_its_first_token_is_replaced_and_left_alone() {
    let bed = Bed::new(0, 2).await;
    bed.decodes[0].behave(Behaviour::DieAtOnce);
    for words in 1..8 {
        let (status, body) = bed.complete(words).await;
        assert_eq!(status, 200, "{body}");
    }
    assert!(bed.decodes[0].decode_count() <= 1, "the breaker keeps requests away");
    assert_eq!(bed.router.counters().retries_decode, bed.decodes[0].decode_count() as u64);
}

#[tokio::test]
async fn a_decode_that_dies_half_way_breaks_a_stream_with_an_error_event() {
    let bed = Bed::new(0, 1).await;
    bed.decodes[0].behave(Behaviour::DieAfter(3));
    let body = json!({"model": MODEL, "prompt": prompt(3), "stream": true});
    let response = bed.post("/v1/completions", body).await;
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
    eventually("it is counted as failed", || bed.router.counters().requests_failed == 1).await;
}

#[tokio::test]
async fn a_whole_answer_is_begun_anew_elsewhere_or_is_a_bad_gateway() {
    let bed = Bed::new(0, 2).await;
    bed.decodes[0].behave(Behaviour::DieAfter(3));
    for words in 1..8 {
        let (status, body) = bed.complete(words).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["choices"][0]["text"].as_str().unwrap().matches(" t0").count(), 1);
    }
    let bed = Bed::new(0, 1).await;
    bed.decodes[0].behave(Behaviour::DieAfter(3));
    let (status, body) = bed.complete(5).await;
    assert_eq!((status, body["error"]["code"].as_str()), (502, Some("engine_lost")));
    bed.decodes[0].is_gone.store(true, Ordering::SeqCst);
    bed.store.members.lock().clear();
    eventually("the engine is out", || bed.router.engines().is_empty()).await;
    let (status, body) = bed.complete(5).await;
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("engine_unavailable")));
}

#[tokio::test]
async fn engines_that_are_busy_mean_too_many_requests() {
    let bed = Bed::new(0, 2).await;
    bed.decodes.iter().for_each(|engine| engine.behave(Behaviour::Refuse(ErrorCode::Busy)));
    let response = bed.post("/v1/completions", json!({"model": MODEL, "prompt": "w1"})).await;
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"2".parse().unwrap()));
    assert!(bed.decodes.iter().all(|engine| engine.decode_count() == 1), "each was asked once");
    bed.decodes[1].behave(Behaviour::Serve);
    assert_eq!(bed.complete(2).await.0, 200, "busy is not broken");
}

#[tokio::test]
async fn what_the_engine_refuses_is_not_tried_elsewhere() {
    let bed = Bed::new(0, 2).await;
    bed.decodes.iter().for_each(|engine| engine.behave(Behaviour::Refuse(ErrorCode::BadRequest)));
    let (status, body) = bed.complete(3).await;
    assert_eq!((status, body["error"]["message"].as_str()), (400, Some("told to refuse")));
    assert_eq!(bed.decodes.iter().map(|engine| engine.decode_count()).sum::<usize>(), 1);
}

#[tokio::test]
async fn a_client_that_goes_away_takes_all_work_along() {
    let bed = Bed::new(1, 1).await;
    bed.prefills[0].behave(Behaviour::HangAfter(0));
    bed.decodes[0].behave(Behaviour::HangAfter(2));
    // While the answer streams.
    let body = json!({"model": MODEL, "prompt": prompt(50), "stream": true});
    let response = bed.post("/v1/completions", body).await;
    assert_eq!((response.status().as_u16(), bed.running()), (200, 2));
    drop(response);
    eventually("both engines are let go", || bed.running() == 0).await;
    // While nothing has come yet.
    bed.decodes[0].behave(Behaviour::HangAfter(0));
    let waiting = bed.post("/v1/completions", json!({"model": MODEL, "prompt": prompt(50)}));
    assert!(tokio::time::timeout(Duration::from_millis(600), waiting).await.is_err());
    eventually("both engines are let go again", || bed.running() == 0).await;
    eventually("nothing is in progress", || bed.router.counters().inflight == 0).await;
    assert_eq!(bed.router.counters().requests_failed, 2);
    assert!(bed.router.engines().iter().all(|engine| engine.outstanding_tokens() == 0 && engine.is_admitted()));
}

#[tokio::test]
async fn a_request_ends_at_its_time_limit() {
    let bed = Bed::with(0, 1, |options| options.request_timeout = Duration::from_millis(300)).await;
    bed.decodes[0].behave(Behaviour::HangAfter(2));
    let (status, body) = bed.complete(3).await;
    assert_eq!((status, body["error"]["code"].as_str()), (504, Some("timeout")));
    eventually("the engine is let go", || bed.running() == 0).await;
}

#[tokio::test]
async fn more_answers_than_allowed_are_refused_at_once() {
    let bed = Bed::with(0, 1, |options| options.max_inflight = 2).await;
    bed.decodes[0].behave(Behaviour::HangAfter(1));
    let body = json!({"model": MODEL, "prompt": "w1", "stream": true, "n": 2});
    let running = bed.post("/v1/completions", body).await;
    let response = bed.post("/v1/completions", json!({"model": MODEL, "prompt": "w1"})).await;
    assert_eq!(response.status(), 429);
    assert!(response.headers().contains_key("retry-after"));
    drop(running);
    bed.decodes[0].behave(Behaviour::Serve);
    eventually("the places are free again", || bed.router.counters().inflight == 0).await;
    let body = json!({"model": MODEL, "prompt": ["w1", "w2", "w3"]});
    assert_eq!(bed.post("/v1/completions", body).await.status(), 400, "so many will never be allowed");
    assert_eq!(bed.complete(1).await.0, 200);
}

#[tokio::test]
async fn engines_that_leave_are_taken_out_and_one_that_answers_is_kept_while_the_store_forgot() {
    let bed = Bed::new(1, 2).await;
    bed.decodes[0].is_gone.store(true, Ordering::SeqCst);
    bed.store.members.lock().retain(|member| member.name != "decode-0");
    eventually("the engine is out", || bed.router.engines().len() == 2).await;
    let mut members = std::mem::take(&mut *bed.store.members.lock());
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(bed.router.engines().len(), 2, "a store node that restarts names nobody for a moment");
    assert_eq!(bed.complete(3).await.0, 200);
    bed.store.members.lock().push(members.remove(0));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(bed.router.engines().len(), 2, "and then one after the other");
    bed.store.members.lock()[0].info["max_context"] = json!(CONTEXT + 1);
    eventually("one in whose name another registered is out", || bed.router.engines().len() == 1).await;
    *bed.store.members.lock() = members;
}

#[tokio::test]
async fn a_member_that_is_another_engine_now_is_not_taken() {
    let bed = Bed::new(0, 1).await;
    let mut stale = bed.store.members.lock()[0].clone();
    stale.name = "decode-dead".into();
    stale.info["max_context"] = json!(CONTEXT + 1);
    bed.store.members.lock().push(stale);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(bed.router.engines().len(), 1);
}

#[tokio::test]
async fn equal_beginnings_meet_on_one_engine_and_load_is_spread() {
    let bed = Bed::new(0, 3).await;
    for _ in 0..4 {
        bed.complete(20).await;
    }
    assert_eq!(bed.decodes.iter().filter(|engine| engine.decode_count() > 0).count(), 1);
    bed.decodes.iter().for_each(|engine| engine.behave(Behaviour::HangAfter(1)));
    let mut running = Vec::new();
    for _ in 0..3 {
        running.push(bed.post("/v1/completions", json!({"model": MODEL, "prompt": prompt(20), "stream": true})).await);
    }
    assert!(bed.decodes.iter().all(|engine| engine.running.load(Ordering::SeqCst) == 1));
}
