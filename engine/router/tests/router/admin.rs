//! The admin API as clients see it.

use crate::fakes::*;
use larder_client::Tier;
use larder_model::ChatMessage;
use larder_router::admin::api::*;
use larder_worker::api::{CacheMode, ErrorCode, Role};
use serde_json::{Value, json};

#[tokio::test]
async fn prefix_is_inspected_warmed_and_forgotten() {
    let cluster = TestCluster::new(1, 1).await;
    let request = json!({"text": prompt(16)});
    let (status, body) = cluster.admin_post(PATH_INSPECT, request.clone()).await;
    let inspected: InspectResponse = serde_json::from_value(body).unwrap();
    assert_eq!((status, inspected.pages.len(), inspected.tokens), (200, 4, 16));
    assert!(inspected.pages.iter().all(|page| page.tier.is_none() && page.pin.is_none() && page.key.len() == 64));
    assert_eq!((inspected.pages[3].token_start, inspected.pages[3].token_end), (12, 16));

    let (_, body) = cluster.admin_post(PATH_WARM, request.clone()).await;
    let warmed: WarmResponse = serde_json::from_value(body).unwrap();
    assert_eq!(warmed, WarmResponse { pages: 4, computed: 4, ..Default::default() });
    let requested = cluster.prefills[0].prefills.lock()[0].clone();
    assert_eq!(
        (requested.tokens.len(), requested.cache),
        (17, CacheMode::Store),
        "one more token makes the last page publishable"
    );

    let first = *cluster.store.held.lock().keys().next().unwrap();
    cluster.store.held.lock().insert(first, Tier::L3);
    let (_, body) = cluster.admin_post(PATH_WARM, request.clone()).await;
    let warmed: WarmResponse = serde_json::from_value(body).unwrap();
    assert_eq!(warmed, WarmResponse { pages: 4, in_l2: 3, loaded: 1, ..Default::default() });

    let (_, body) = cluster.admin_post(PATH_INSPECT, request.clone()).await;
    assert_eq!(body["pages"][0]["tier"], "L2");
    assert_eq!(body["pages"][0]["pin"], json!({"kind": "hard", "seconds_left": 60}));
    assert!(body["pages"][1]["pin"].is_null());
    let (_, body) = cluster.admin_post(PATH_FORGET, request).await;
    assert_eq!(
        serde_json::from_value::<ForgetResponse>(body).unwrap(),
        ForgetResponse { pages: 4, forgotten: 4, complete: true, engines: 2, engines_unconfirmed: Vec::new() }
    );
    assert!(cluster.store.held.lock().is_empty());
}

#[tokio::test]
async fn inspection_explains_missing_pages_on_request() {
    let cluster = TestCluster::new(1, 1).await;
    let (_, body) = cluster.admin_post(PATH_WARM, json!({"text": prompt(8)})).await;
    assert_eq!(body["computed"], 2);
    let request = |why: bool| json!({"text": prompt(16), "why": why});
    let (status, body) = cluster.admin_post(PATH_INSPECT, request(true)).await;
    let inspected: InspectResponse = serde_json::from_value(body).unwrap();
    assert_eq!((status, inspected.pages.len()), (200, 4));
    let present = |page: &PageStatus| page.tier.is_some() && page.miss.is_none();
    assert!(inspected.pages[..2].iter().all(present), "{inspected:?}");
    let evicted = |at_unix_ms| Some(MissStatus { reason: "evicted".into(), at_unix_ms, differing: Vec::new() });
    assert_eq!([&inspected.pages[2].miss, &inspected.pages[3].miss], [&evicted(Some(77)), &evicted(None)]);
    let (_, body) = cluster.admin_post(PATH_INSPECT, request(false)).await;
    assert!(body["pages"][2].get("miss").is_none(), "{body}");
    let (status, _) = cluster.admin_post(PATH_INSPECT, json!({"text": "a", "why": 1})).await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn hints_are_answered_one_by_one_by_what_was_done() {
    use HintKind::{Demote, Forget, Pin, Prefetch, Retain};
    use HintStatus::{Accepted, Clipped, Missing};
    let cluster = TestCluster::new(1, 1).await;
    let prefix = json!({"text": prompt(8)});
    let hints = async |actions: Value| {
        let (status, body) = cluster.admin_post(PATH_HINTS, json!({"prefix": prefix, "actions": actions})).await;
        assert_eq!(status, 200, "{body}");
        let answer: HintsResponse = serde_json::from_value(body).unwrap();
        assert_eq!(answer.pages, 2);
        answer.results.into_iter().map(|result| (result.action, result.status, result.pages)).collect::<Vec<_>>()
    };
    let all = json!([
        {"action": "prefetch"}, {"action": "retain", "seconds": 50}, {"action": "retain", "seconds": 900},
        {"action": "pin", "seconds": 60}, {"action": "pin", "seconds": 31 * 24 * 3600}, {"action": "demote"},
        {"action": "forget"}, {"action": "forget"},
    ]);
    let nothing = hints(all.clone()).await;
    assert!(nothing.iter().all(|(_, status, pages)| (*status, *pages) == (Missing, 0)), "{nothing:?}");
    cluster.admin_post(PATH_WARM, prefix.clone()).await;
    let expected = [
        (Prefetch, Accepted, 2),
        // Of the two pages only the first has a pin, for a minute.
        (Retain, Clipped, 1),
        (Retain, Clipped, 1),
        (Pin, Accepted, 2),
        (Pin, Clipped, 2),
        (Demote, Accepted, 2),
        (Forget, Accepted, 2),
        (Forget, Missing, 0),
    ];
    assert_eq!(hints(all).await, expected);
    for actions in [
        json!([]),
        json!([{"action": "pin"}]),
        json!([{"action": "demote", "seconds": 5}]),
        json!([{"action": "retain", "seconds": 0}]),
        json!([{"action": "keep"}]),
        json!([{"action": "forget", "time": 5}]),
    ] {
        let (status, body) = cluster.admin_post(PATH_HINTS, json!({"prefix": prefix, "actions": actions})).await;
        assert_eq!((status, body["error"]["code"].as_str()), (400, Some("bad_request")), "{actions}: {body}");
    }
}

#[tokio::test]
async fn engines_hold_the_keys_while_the_store_forgets_and_silence_is_reported() {
    let cluster = TestCluster::new(1, 2).await;
    let request = json!({"text": prompt(18)});
    cluster.admin_post(PATH_WARM, request.clone()).await;
    cluster.decodes[1].behave(Behaviour::Refuse(ErrorCode::Deadline));
    let (status, body) = cluster.admin_post(PATH_FORGET, request).await;
    let answer: ForgetResponse = serde_json::from_value(body).unwrap();
    let expected = ForgetResponse {
        pages: 4,
        forgotten: 4,
        complete: false,
        engines: 3,
        engines_unconfirmed: vec!["decode-1".into()],
    };
    assert_eq!((status, answer), (200, expected));
    for engine in cluster.prefills.iter().chain(&cluster.decodes) {
        let forgets = engine.forgets.lock();
        let seen: Vec<_> = forgets.iter().map(|(r, held)| (r.tokens.len(), r.hold_ms > 0, *held)).collect();
        assert_eq!(seen, [(16, true, 4), (16, false, 0)], "before and after the store");
    }
}

#[tokio::test]
async fn pages_stay_missing_without_a_prefill_engine() {
    let cluster = TestCluster::new(0, 1).await;
    let (status, body) = cluster.admin_post(PATH_WARM, json!({"tokens": [1, 2, 3, 4, 5], "model": MODEL})).await;
    assert_eq!((status, body["missing"].as_u64(), body["computed"].as_u64()), (200, Some(1), Some(0)));
}

#[tokio::test]
async fn status_shows_nodes_engines_and_models() {
    let cluster = TestCluster::new(1, 2).await;
    let response = cluster.http.get(cluster.admin_url(PATH_STATUS)).send().await.unwrap();
    let status: StatusResponse = response.json().await.unwrap();
    assert_eq!((status.nodes.len(), status.engines.len(), status.models.len()), (1, 3, 1));
    assert!(status.engines.iter().all(|engine| engine.up && engine.state.as_ref().unwrap().l1_pages == 77));
    assert_eq!((status.models[0].prefill_engines, status.models[0].decode_engines), (1, 2));
    let metrics = cluster.http.get(cluster.admin_url(PATH_METRICS)).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("larder_router_engines_up{role=\"decode\"} 2"), "{metrics}");
    assert_eq!(cluster.http.get(cluster.admin_url(PATH_HEALTH)).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn failures_have_the_admin_error_form() {
    let cluster = TestCluster::new(0, 1).await;
    for (path, body, status, code) in [
        (PATH_INSPECT, json!({}), 400, "bad_request"),
        (PATH_INSPECT, json!({"text": "a", "tokens": [1]}), 400, "bad_request"),
        (PATH_WARM, json!({"txt": "a"}), 400, "bad_request"),
        (PATH_FORGET, json!({"text": "a", "model": "other"}), 404, "model_not_found"),
        ("/admin/v1/nothing", json!({}), 404, "not_found"),
        (PATH_STATUS, json!({}), 405, "bad_request"),
    ] {
        let (got, body) = cluster.admin_post(path, body).await;
        assert_eq!((got, body["error"]["code"].as_str()), (status, Some(code)), "{body}");
    }
    let (status, body) = cluster.admin_post(PATH_INSPECT, json!({"tokens": [1]})).await;
    assert_eq!((status, &body["pages"]), (200, &Value::Array(vec![])));
}

#[tokio::test]
async fn prefix_is_pinned_and_unpinned_and_refusals_are_reported() {
    let cluster = TestCluster::new(1, 1).await;
    let request = json!({"text": prompt(16)});
    cluster.admin_post(PATH_WARM, request.clone()).await;
    let (status, body) = cluster.admin_post(PATH_PIN, json!({"prefix": request, "seconds": 60})).await;
    let pinned: PinResponse = serde_json::from_value(body).unwrap();
    assert_eq!((status, pinned), (200, PinResponse { pages: 4, pinned: 4, complete: true }));
    let (status, body) = cluster.admin_post(PATH_UNPIN, request.clone()).await;
    assert_eq!((status, body["pinned"].as_u64()), (200, Some(4)));
    let long = json!({"prefix": {"text": prompt(40)}, "seconds": 60});
    let (status, body) = cluster.admin_post(PATH_PIN, long).await;
    assert_eq!((status, body["error"]["code"].as_str()), (409, Some("refused")), "{body}");
    for seconds in [0, 30 * 24 * 3600 + 1] {
        let (status, body) =
            cluster.admin_post(PATH_PIN, json!({"prefix": request, "seconds": seconds, "soft": true})).await;
        assert_eq!((status, body["error"]["code"].as_str()), (400, Some("bad_request")), "{body}");
    }
}

#[tokio::test]
async fn chat_prefix_has_the_pages_that_a_chat_completion_computes() {
    let cluster = TestCluster::new(1, 1).await;
    let messages = json!([
        {"role": "developer", "content": prompt(10)},
        {"role": "user", "content": [{"type": "text", "text": prompt(9)}]},
    ]);
    let response =
        cluster.post("/v1/chat/completions", json!({"model": MODEL, "messages": messages, "max_tokens": 1})).await;
    assert_eq!(response.status(), 200);
    eventually("prefill stores the pages", || !cluster.store.held.lock().is_empty()).await;

    let (status, body) = cluster.admin_post(PATH_INSPECT, json!({"messages": messages})).await;
    assert_eq!(status, 200, "{body}");
    let inspected: InspectResponse = serde_json::from_value(body).unwrap();
    // Two roles and 19 words. The cue for the answer is not part of the prefix.
    assert_eq!((inspected.tokens, inspected.pages.len()), (21, 5));
    assert!(inspected.pages.iter().all(|page| page.tier == Some(Tier::L2)), "{inspected:?}");

    let message = |role: &str, words| ChatMessage::new(role, prompt(words));
    let messages = vec![message("system", 10), message("user", 9)];
    let request = PrefixRequest { messages: Some(messages), ..Default::default() };
    let pin = PinRequest { prefix: request.clone(), seconds: 60, soft: true };
    for (path, body) in [
        (PATH_WARM, serde_json::to_value(&request).unwrap()),
        (PATH_PIN, serde_json::to_value(&pin).unwrap()),
        (PATH_UNPIN, serde_json::to_value(&request).unwrap()),
        (PATH_FORGET, serde_json::to_value(&request).unwrap()),
    ] {
        let (status, body) = cluster.admin_post(path, body).await;
        assert_eq!((status, body["pages"].as_u64()), (200, Some(5)), "{path}: {body}");
    }
}

async fn refusal(cluster: &TestCluster, path: &str, body: Value) -> String {
    let (status, answer) = cluster.admin_post(path, body).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (400, Some("bad_request")), "{answer}");
    answer["error"]["message"].as_str().unwrap().to_string()
}

#[tokio::test]
async fn prefix_requests_must_have_exactly_one_of_text_tokens_and_messages() {
    let cluster = TestCluster::new(0, 1).await;
    let messages = json!([{"role": "user", "content": "w1"}]);
    for (body, expected) in [
        (json!({}), "the request has none of them"),
        (json!({"text": null}), "the request has none of them"),
        (json!({"text": "w1", "messages": messages}), "the request has 'text' and 'messages'"),
        (json!({"tokens": [1], "messages": messages}), "the request has 'tokens' and 'messages'"),
        (json!({"text": "w1", "tokens": [1], "messages": messages}), "'text' and 'tokens' and 'messages'"),
    ] {
        for path in [PATH_INSPECT, PATH_WARM, PATH_FORGET, PATH_UNPIN] {
            let message = refusal(&cluster, path, body.clone()).await;
            assert!(message.starts_with("give exactly one of") && message.contains(expected), "{message}");
        }
        let message = refusal(&cluster, PATH_PIN, json!({"prefix": body, "seconds": 1})).await;
        assert!(message.contains(expected), "{message}");
    }
}

#[tokio::test]
async fn prefix_that_can_never_fit_the_share_of_a_client_is_refused_for_good() {
    let cluster = TestCluster::new(0, 0).await;
    let _engine = FakeEngine::start_with_context(&cluster.store, "decode-0", Role::Decode, 4 << 20).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    // A page of four tokens takes 576 bytes, and a client has 384 MiB.
    let (status, answer) = cluster.admin_post(PATH_INSPECT, json!({"tokens": vec![1; 2_900_000]})).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (413, Some("too_large")), "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("2900000 tokens") && message.contains("2796200 such tokens"), "{message}");
}

#[tokio::test]
async fn tokens_outside_the_vocabulary_are_refused() {
    let cluster = TestCluster::new(0, 1).await;
    let (status, _) = cluster.admin_post(PATH_INSPECT, json!({"tokens": [0, VOCAB_SIZE - 1]})).await;
    assert_eq!(status, 200);
    for path in [PATH_INSPECT, PATH_WARM, PATH_FORGET, PATH_UNPIN] {
        let message = refusal(&cluster, path, json!({"tokens": [7, VOCAB_SIZE, 9999]})).await;
        assert_eq!(
            message,
            "token 501 at index 1 of 'tokens' is outside the vocabulary of 'fake', which has 501 tokens"
        );
    }
}

#[tokio::test]
async fn errors_name_fields_once_and_no_rust_types() {
    let cluster = TestCluster::new(0, 1).await;
    let pin = |prefix| json!({"prefix": prefix, "seconds": 1});
    for (path, body, expected) in [
        (PATH_INSPECT, json!(5), "the request body must be a JSON object"),
        (PATH_INSPECT, json!({"txt": "a"}), "'txt' is not a field of this request"),
        (PATH_INSPECT, json!({"text": "a", "txt": "a"}), "'txt' is not a field of this request"),
        (PATH_INSPECT, json!({"text": 5}), "'text' is not valid: invalid type: integer `5`, expected a string"),
        (
            PATH_INSPECT,
            json!({"tokens": [-1]}),
            "'tokens' is not valid: invalid value: integer `-1`, expected an integer from 0 to 4294967295",
        ),
        (PATH_INSPECT, json!({"tokens": "a"}), "'tokens' is not valid: invalid type: string \"a\", expected a list"),
        (
            PATH_INSPECT,
            json!({"messages": [{"role": "robot", "content": "a"}]}),
            "'messages[0].role': 'robot' is not one of system, developer, user, assistant, tool",
        ),
        (PATH_INSPECT, json!({"messages": []}), "'messages' has 0 messages; it must have from 1 to 4096"),
        (PATH_PIN, pin(json!(5)), "'prefix' is not valid: invalid type: integer `5`, expected an object"),
        (PATH_PIN, pin(json!({"text": "a", "txt": 1})), "'txt' is not a field of this request"),
        (PATH_PIN, json!({"prefix": {"text": "a"}}), "'seconds' is required"),
    ] {
        assert_eq!(refusal(&cluster, path, body).await, expected);
    }
    let request = cluster.http.post(cluster.admin_url(PATH_INSPECT)).header("content-type", "application/json");
    let response = request.body("{\"text\": ").send().await.unwrap();
    let body: Value = response.json().await.unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("the request body is not valid JSON: EOF while parsing"), "{message}");
}

#[tokio::test]
async fn api_paths_on_the_admin_port_name_the_api_address() {
    let cluster = TestCluster::new(0, 1).await;
    let expected = format!("this is the admin API port; the OpenAI API is at http://{}", cluster.router.addr());
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/models"] {
        let (status, body) = cluster.admin_post(path, json!({"model": MODEL, "prompt": "w1"})).await;
        assert_eq!((status, &body["error"]), (404, &json!({"code": "wrong_port", "message": expected})), "{path}");
    }
}

#[tokio::test]
async fn router_measures_the_delays_of_its_event_loop() {
    let cluster = TestCluster::new(0, 0).await;
    let delay = async || {
        let text = cluster.http.get(cluster.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
        let name = "larder_router_event_loop_delay_max_seconds ";
        text.lines().find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok()).expect("the metric is there")
    };
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while delay().await <= 0.0 {
        assert!(tokio::time::Instant::now() < deadline, "no delay is measured");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
