//! The OpenAI API as clients see it.

use crate::fakes::*;
use larder_model::{CallForm, CallableFunction, Constraint, Otherwise};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

fn events(text: &str) -> Vec<Value> {
    let mut events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events.iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

#[tokio::test]
async fn chat_answers_streamed_and_unstreamed() {
    let cluster = TestCluster::new(1, 1).await;
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4});
    let response = cluster.post("/v1/chat/completions", body.clone()).await;
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": " t0 t1 t2 t3", "refusal": null})
    );
    assert_eq!(
        (answer["choices"][0]["finish_reason"].as_str(), answer["usage"]["total_tokens"].as_u64()),
        (Some("length"), Some(8))
    );
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let response = cluster.post("/v1/chat/completions", body).await;
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let events = events(&response.text().await.unwrap());
    let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, " t0 t1 t2 t3");
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "length");
    assert_eq!(events.last().unwrap()["usage"], answer["usage"]);
    assert_eq!(events.last().unwrap()["sglext"], answer["sglext"]);
    // SGLang's cache report.
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4,
        "stream": true, "return_cached_tokens_details": true});
    let text = cluster.post("/v1/chat/completions", body).await.text().await.unwrap();
    let last = self::events(&text).pop().unwrap();
    assert!(last["sglext"]["cached_tokens_details"]["device"].is_u64() && last.get("usage").is_none(), "{last}");
    // Without `max_tokens`, the answer may use the rest of the context.
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}]});
    assert_eq!(cluster.post("/v1/chat/completions", body).await.status(), 200);
    assert_eq!(cluster.decodes[0].decodes.lock().last().unwrap().sampling.max_tokens, CONTEXT as usize - 4);
}

#[tokio::test]
async fn choices_have_their_own_index_and_seed_and_share_one_prefill() {
    let cluster = TestCluster::new(1, 1).await;
    let body = json!({"model": MODEL, "prompt": [prompt(30), "w7 w8 w9"], "n": 2, "seed": 100, "max_tokens": 2});
    let answer: Value = cluster.post("/v1/completions", body.clone()).await.json().await.unwrap();
    let indexes: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    assert_eq!(answer["usage"]["prompt_tokens"], 33);
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    assert_eq!(cluster.prefills[0].prefill_count(), 1, "one for the long prompt, shared by its choices");
    let mut seeds: Vec<_> = cluster.decodes[0].decodes.lock().iter().map(|d| d.sampling.seed.unwrap()).collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [100, 100, 101, 101]);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = events(&cluster.post("/v1/completions", streamed).await.text().await.unwrap());
    for index in 0..4 {
        let of_choice = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index);
        let text: String = of_choice.filter_map(|c| c["text"].as_str()).collect();
        assert_eq!(text, " t0 t1");
    }
    assert!(events.iter().all(|e| e.get("usage").is_none()));
}

#[tokio::test]
async fn answers_that_need_an_engine_that_left_are_to_be_retried() {
    let cluster = TestCluster::new(0, 0).await;
    let mut engines = Vec::new();
    for (name, requests_max) in [("first", 3), ("second", 4)] {
        engines.push(FakeEngine::start_with_room(&cluster.store, name, requests_max, u64::MAX).await);
    }
    assert!(cluster.router.wait_ready(PATIENCE).await);
    eventually("both engines join", || cluster.router.engines().len() == 2).await;
    let ask = async |n: usize| {
        let body = json!({"model": MODEL, "prompt": "w1", "n": n, "max_tokens": 2});
        let response = cluster.post("/v1/completions", body).await;
        (response.status().as_u16(), response.headers().contains_key("retry-after"))
    };
    assert_eq!((ask(7).await, ask(8).await), ((200, false), (400, false)));
    let members = cluster.store.members.lock().clone();
    cluster.store.members.lock().retain(|member| member.name != "second");
    engines[1].is_gone.store(true, Ordering::SeqCst);
    eventually("an engine leaves", || cluster.router.engines().len() == 1).await;
    assert_eq!((ask(7).await, ask(8).await), ((503, true), (400, false)));
    assert_eq!(ask(3).await, (200, false));
    engines[1].is_gone.store(false, Ordering::SeqCst);
    *cluster.store.members.lock() = members;
    eventually("it returns", || cluster.router.engines().len() == 2).await;
    assert_eq!(ask(7).await, (200, false));
}

#[tokio::test]
async fn answers_that_engines_never_have_room_for_are_refused_at_once() {
    let cluster = TestCluster::new(0, 0).await;
    for (name, requests_max, request_bytes_max) in [("few", 3, u64::MAX), ("small", 64, 80 << 10)] {
        FakeEngine::start_with_room(&cluster.store, name, requests_max, request_bytes_max).await;
    }
    assert!(cluster.router.wait_ready(PATIENCE).await);
    eventually("both engines join", || cluster.router.engines().len() == 2).await;
    // Three of one engine, and 80 KiB of the other: requests have 20 KiB with a short prompt, and
    // 24 KiB with a long one.
    for (words, fits) in [(1, 7), (100, 6)] {
        let body = |n: usize| json!({"model": MODEL, "prompt": prompt(words), "n": n, "max_tokens": 2});
        assert_eq!(cluster.post("/v1/completions", body(fits)).await.status(), 200, "{words} words");
        let refused = cluster.post("/v1/completions", body(fits + 1)).await;
        assert_eq!(refused.status(), 400);
        let error: Value = refused.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(&format!("room for {fits} such answers")), "{message}");
        assert_eq!(error["error"]["param"], "n");
    }
    // Prompts of one request wait for each other instead.
    let body = json!({"model": MODEL, "prompt": vec!["w1"; 4], "n": 5, "max_tokens": 2});
    assert_eq!(cluster.post("/v1/completions", body).await.status(), 200);
}

#[tokio::test]
async fn failures_have_openai_form_on_every_path() {
    let cluster = TestCluster::with(0, 1, |options| options.body_bytes_max = 4096).await;
    let long = json!({"model": MODEL, "prompt": prompt(250)});
    let post = |path: &'static str, body: String| cluster.http.post(cluster.url(path)).body(body).send();
    for (path, body, status, code) in [
        ("/v1/completions", "{nonsense".to_string(), 400, Value::Null),
        ("/v1/completions", json!({"model": "other", "prompt": "w1"}).to_string(), 404, json!("model_not_found")),
        ("/v1/chat/completions", json!({"model": MODEL, "messages": []}).to_string(), 400, Value::Null),
        (
            "/v1/completions",
            json!({"model": MODEL, "prompt": "w1", "guided_rgex": "a"}).to_string(),
            400,
            json!("unknown_parameter"),
        ),
        (
            "/v1/chat/completions",
            json!({"model": MODEL, "messages": [], "tool_choice": "sometimes", "tools":
                [{"type": "function", "function": {"name": "f"}}]})
            .to_string(),
            400,
            json!("unsupported_value"),
        ),
        ("/v1/completions", json!({"model": MODEL, "prompt": ""}).to_string(), 400, Value::Null),
        ("/v1/completions", long.to_string(), 400, json!("context_length_exceeded")),
        ("/v1/completions", "x".repeat(5000), 413, Value::Null),
        ("/v1/nothing", "{}".to_string(), 404, json!("unknown_url")),
        ("/v1/models", "{}".to_string(), 405, json!("method_not_supported")),
    ] {
        let response = post(path, body).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{path}");
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["error"]["code"], code, "{body}");
        assert!(body["error"]["message"].is_string() && body["error"]["type"].is_string(), "{body}");
    }
    assert_eq!(cluster.decodes[0].decode_count(), 0);
    let cluster = TestCluster::new(0, 0).await;
    let (status, body) = cluster.complete(3).await;
    assert_eq!((status, body["error"]["type"].as_str()), (503, Some("server_error")));
}

#[tokio::test]
async fn large_bodies_are_parsed() {
    let cluster = TestCluster::new(0, 1).await;
    let body = json!({"model": MODEL, "prompt": "w1", "user": "x".repeat(300 << 10)});
    assert_eq!(cluster.post("/v1/completions", body).await.status(), 200);
    let response = cluster.http.post(cluster.url("/v1/completions")).body("[".repeat(300 << 10)).send().await.unwrap();
    assert_eq!(response.status(), 400);
}

#[tokio::test]
async fn models_are_listed_and_request_ids_returned() {
    let cluster = TestCluster::new(0, 1).await;
    let list: Value = cluster.http.get(cluster.url("/v1/models")).send().await.unwrap().json().await.unwrap();
    assert_eq!((list["object"].as_str(), list["data"][0]["id"].as_str()), (Some("list"), Some(MODEL)));
    let response =
        cluster.http.get(cluster.url("/v1/models/fake")).header("x-request-id", "abc-1").send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["x-request-id"]), (200, &"abc-1".parse().unwrap()));
    let response = cluster.http.get(cluster.url("/v1/models/org/unknown")).send().await.unwrap();
    assert_eq!(response.status(), 404);
    assert!(response.headers()["x-request-id"].to_str().unwrap().starts_with("req_"));
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["code"], "model_not_found");
    let request = cluster.http.post(cluster.url("/v1/completions")).header("x-request-id", "abc-2");
    request.json(&json!({"model": MODEL, "prompt": "w1"})).send().await.unwrap();
    assert_eq!(cluster.decodes[0].decodes.lock()[0].request_id, "abc-2");
}

#[tokio::test]
async fn admin_paths_on_the_api_port_name_the_admin_address() {
    let cluster = TestCluster::new(0, 1).await;
    let expected = format!("this is the OpenAI API port; the admin API is at http://{}", cluster.router.admin_addr());
    for path in ["/admin/v1/status", "/admin/v1/prefix/inspect", "/admin/v2/anything", "/healthz"] {
        let response = cluster.http.get(cluster.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 404, "{path}");
        // The admin client reads failures in the admin API's form.
        let error: larder_router::admin::api::ErrorResponse = response.json().await.unwrap();
        assert_eq!((error.error.code.as_str(), &error.error.message), ("wrong_port", &expected), "{path}");
    }
    let (status, body) = {
        let response = cluster.post("/admin/v1/prefix/warm", json!({"text": "w1"})).await;
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    assert_eq!((status, body["error"]["message"].as_str()), (404, Some(expected.as_str())));
}

#[tokio::test]
async fn model_name_that_is_not_utf8_is_refused_in_openai_form() {
    let cluster = TestCluster::new(0, 1).await;
    let response = cluster.http.get(cluster.url("/v1/models/%ff")).send().await.unwrap();
    assert_eq!(response.status(), 400);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["param"], "model");
    assert!(!body["error"]["message"].as_str().unwrap().contains("Path"), "{body}");
}

#[tokio::test]
async fn completion_logprobs_cover_the_echoed_prompt() {
    let cluster = TestCluster::new(1, 1).await;
    // As lm-evaluation-harness asks for the log-likelihood of a prompt.
    let body = json!({"model": MODEL, "prompt": [[2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]], "max_tokens": 1,
        "logprobs": 1, "echo": true, "temperature": 0, "seed": 1234});
    let answer: Value = cluster.post("/v1/completions", body.clone()).await.json().await.unwrap();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "w1 w2 w3 t0");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["w1", "w2", "w3", "[UNK]"]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -1.5, -2.0, 0.0]));
    assert_eq!(logprobs["top_logprobs"][1], json!({"w2": -1.5, "[UNK]": 0.0}));
    assert_eq!(logprobs["text_offset"], json!([0, 2, 5, 8]), "where the tokens begin in the text");
    assert!(answer["system_fingerprint"].as_str().unwrap().starts_with("fp_"), "{answer}");
    let decode = cluster.decodes[0].decodes.lock()[0].clone();
    assert_eq!((decode.cache, decode.sampling.prompt_logprobs), (larder_worker::api::CacheMode::None, Some(1)));
    assert_eq!(cluster.prefills[0].prefill_count(), 0, "cached pages have no logits");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = events(&cluster.post("/v1/completions", streamed).await.text().await.unwrap());
    let of_first: Vec<_> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == 0).collect();
    let text: String = of_first.iter().filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(text, "w1 w2 w3 t0");
    let tokens = of_first.iter().filter_map(|c| c["logprobs"]["tokens"].as_array()).flatten().cloned();
    assert_eq!(Value::from(tokens.collect::<Vec<_>>()), logprobs["tokens"]);
    let offsets = of_first.iter().filter_map(|c| c["logprobs"]["text_offset"].as_array()).flatten().cloned();
    assert_eq!(Value::from(offsets.collect::<Vec<_>>()), logprobs["text_offset"]);
    // Several answers to a prompt share its log-probabilities.
    let mut several = body.clone();
    several["n"] = json!(2);
    let answer: Value = cluster.post("/v1/completions", several).await.json().await.unwrap();
    assert!((0..2).all(|at| answer["choices"][at]["logprobs"] == *logprobs), "{answer}");
    let wanted =
        cluster.decodes[0].decodes.lock().iter().rev().take(4).map(|d| d.sampling.prompt_logprobs).collect::<Vec<_>>();
    assert_eq!(wanted.iter().flatten().count(), 2, "the engine computes them once per prompt");
    // Only the prompt.
    let mut empty = body;
    empty["max_tokens"] = json!(0);
    let answer: Value = cluster.post("/v1/completions", empty).await.json().await.unwrap();
    let choice = &answer["choices"][0];
    assert_eq!((choice["text"].as_str(), answer["usage"]["completion_tokens"].as_u64()), (Some("w1 w2 w3"), Some(0)));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.5, -2.0]));
}

#[tokio::test]
async fn echoes_are_bounded_before_an_engine_computes_them() {
    let cluster = TestCluster::new(0, 1).await;
    cluster.decodes[0].behave(Behaviour::HangAfter(0));
    let echo = |prompts: usize, n: u32| {
        json!({"model": MODEL, "prompt": vec![vec![5; 190]; prompts], "n": n, "echo": true, "logprobs": 20,
            "max_tokens": 0, "stream": true})
    };
    let refused = cluster.post("/v1/completions", echo(2, 128)).await;
    assert_eq!(refused.status(), 400);
    let body: Value = refused.json().await.unwrap();
    assert_eq!(body["error"]["param"], "logprobs");
    assert!(body["error"]["message"].as_str().unwrap().contains("1021440 log-probabilities"), "{body}");
    assert_eq!(cluster.decodes[0].decode_count(), 0);
    // Ten of those within the bound are more than the memory for answers.
    let requests = (0..12).map(|_| Box::pin(cluster.post("/v1/completions", echo(1, 64))));
    let (first, ..) = futures::future::select_all(requests).await;
    assert_eq!(first.status(), 429, "the others wait for the engine");
}

#[tokio::test]
async fn more_tokens_than_the_default_limit_are_refused_by_name() {
    let cluster = TestCluster::new(0, 1).await;
    let mut body = json!({"model": MODEL, "prompt": "w1", "min_tokens": 17});
    let refused = cluster.post("/v1/completions", body.clone()).await;
    assert_eq!(refused.status(), 400);
    assert_eq!(refused.json::<Value>().await.unwrap()["error"]["param"], "min_tokens");
    body["max_tokens"] = json!(17);
    assert_eq!(cluster.post("/v1/completions", body).await.status(), 200);
}

#[tokio::test]
async fn chat_logprobs_have_tokens_bytes_and_alternatives() {
    let cluster = TestCluster::new(0, 1).await;
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 2,
        "logprobs": true, "top_logprobs": 2});
    let answer: Value = cluster.post("/v1/chat/completions", body.clone()).await.json().await.unwrap();
    let content = &answer["choices"][0]["logprobs"]["content"];
    let expected = json!({"token": "w0", "logprob": -0.5, "bytes": [119, 48], "top_logprobs": [
        {"token": "[UNK]", "logprob": 0.0, "bytes": [91, 85, 78, 75, 93]},
        {"token": "w0", "logprob": -0.5, "bytes": [119, 48]}]});
    assert_eq!((content.as_array().unwrap().len(), &content[1]), (2, &expected));
    body["stream"] = json!(true);
    let events = events(&cluster.post("/v1/chat/completions", body).await.text().await.unwrap());
    let streamed = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten().cloned();
    assert_eq!(&Value::from(streamed.collect::<Vec<_>>()), content);
}

#[tokio::test]
async fn batches_of_many_prompts_have_an_answer_each() {
    let cluster = TestCluster::new(0, 1).await;
    let prompts: Vec<String> = (0..300).map(|i| format!("w{i} w1")).collect();
    let body = json!({"model": MODEL, "prompt": prompts, "max_tokens": 1});
    let answer: Value = cluster.post("/v1/completions", body).await.json().await.unwrap();
    let choices = answer["choices"].as_array().unwrap();
    assert!((0..300).zip(choices).all(|(index, choice)| choice["index"] == index), "{answer}");
    assert_eq!((choices.len(), answer["usage"]["prompt_tokens"].as_u64()), (300, Some(600)));
    // As many candidates as asked for, and the best of them in the answer.
    let body = json!({"model": MODEL, "prompt": "w1", "n": 2, "best_of": 5, "max_tokens": 1});
    let answer: Value = cluster.post("/v1/completions", body).await.json().await.unwrap();
    assert_eq!((answer["choices"].as_array().unwrap().len(), cluster.decodes[0].decode_count()), (2, 305));
    assert_eq!(answer["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn history_and_variables_reach_the_template() {
    let cluster = TestCluster::new(0, 0).await;
    let template = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.name }} {{ m.tool_call_id }} \
        {% for call in m.tool_calls %}{{ call.function.name }} {{ call.function.arguments.word }} {% endfor %}\
        {{ m.reasoning_content }} {% endfor %}{{ word }} {% if add_generation_prompt %}w9{% endif %}";
    let name = "decode-0";
    let engine =
        FakeEngine::start_model(&cluster.store, name, larder_worker::api::Role::Decode, CONTEXT, MODEL, template);
    let engine = engine.await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let body = json!({"model": MODEL, "max_tokens": 1, "chat_template_kwargs": {"word": "w8"}, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}], "name": "w3"},
        {"role": "assistant", "content": null, "reasoning_content": "w4", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "w5", "arguments": "{\"word\": \"w6\"}"}}]},
        {"role": "tool", "content": "w7", "tool_call_id": "w11"}]});
    let response = cluster.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
    let words = |tokens: &[u32]| tokens.iter().filter(|id| **id > 0).map(|id| id - 1).collect::<Vec<_>>();
    // The roles are no words of this model.
    assert_eq!(words(&engine.decodes.lock()[0].tokens), [1, 2, 3, 5, 6, 4, 7, 11, 8, 9]);
    let mut truncated = body;
    truncated["truncate_prompt_tokens"] = json!(2);
    truncated["add_generation_prompt"] = json!(false);
    assert_eq!(cluster.post("/v1/chat/completions", truncated).await.status(), 200);
    assert_eq!(words(&engine.decodes.lock()[1].tokens), [11, 8]);
}

#[tokio::test]
async fn monitors_read_health_and_metrics_on_the_api_port() {
    let cluster = TestCluster::new(0, 1).await;
    cluster.complete(3).await;
    let get = async |path: &str, accept: &str| {
        let response = cluster.http.get(cluster.url(path)).header("accept", accept).send().await.unwrap();
        let kind = response.headers()["content-type"].to_str().unwrap().to_string();
        (response.status().as_u16(), kind, response.text().await.unwrap())
    };
    for path in ["/health", "/ready"] {
        assert_eq!(get(path, "*/*").await.0, 200, "{path}");
    }
    let (_, kind, text) = get("/metrics", "*/*").await;
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    let sample = "larder_router_requests_total{endpoint=\"completions\",status=\"200\"} 1";
    assert!(text.contains("# TYPE larder_router_requests_total counter\n") && text.contains(sample), "{text}");
    let (_, kind, text) = get("/metrics", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5").await;
    assert!(kind.starts_with("application/openmetrics-text") && text.ends_with("# EOF\n"), "{kind}");
    let foreign = cluster.http.get(cluster.url("/metrics")).header("origin", "http://evil.example");
    assert_eq!(foreign.send().await.unwrap().status(), 403, "web pages read no metrics");
    let foreign = cluster.http.post(cluster.url("/flush_cache")).header("origin", "http://evil.example");
    assert_eq!(foreign.send().await.unwrap().status(), 403, "and flush no caches");
    assert_eq!(cluster.http.post(cluster.url("/flush_cache")).send().await.unwrap().status(), 200);
    // A web page can send this as an image, without `Origin`.
    assert_eq!(cluster.http.get(cluster.url("/flush_cache")).send().await.unwrap().status(), 405);
    let empty = TestCluster::new(0, 0).await;
    assert_eq!(empty.http.get(empty.url("/health")).send().await.unwrap().status(), 200);
    assert_eq!(empty.http.get(empty.url("/ready")).send().await.unwrap().status(), 503);
}

#[tokio::test]
async fn web_pages_of_allowed_origins_read_answers() {
    let origin = "http://app.example";
    let cluster = TestCluster::with(0, 1, |options| options.cors_origins = vec![origin.into()]).await;
    let preflight = |path: &str, origin: &str| {
        let request =
            cluster.http.request(reqwest::Method::OPTIONS, cluster.url(path)).header("origin", origin.to_string());
        let request = request.header("access-control-request-headers", "authorization, x-stainless-os");
        request.header("access-control-request-method", "POST").send()
    };
    let answer = preflight("/v1/chat/completions", origin).await.unwrap();
    assert_eq!(answer.status(), 204);
    assert_eq!(answer.headers()["access-control-allow-origin"], origin);
    assert_eq!(answer.headers()["access-control-allow-headers"], "authorization, x-stainless-os");
    assert!(preflight("/v1/chat/completions", "http://b.example").await.unwrap().status() == 405);
    assert!(preflight("/flush_cache", origin).await.unwrap().status() == 403);
    let models = cluster.http.get(cluster.url("/v1/models"));
    let answer = models.try_clone().unwrap().header("origin", origin).send().await.unwrap();
    assert_eq!(answer.headers()["access-control-allow-origin"], origin);
    assert!(!models.send().await.unwrap().headers().contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn text_becomes_tokens_and_back() {
    let cluster = TestCluster::new(0, 1).await;
    let post = async |path: &str, body: Value| -> Value { cluster.post(path, body).await.json().await.unwrap() };
    let answer = post("/tokenize", json!({"model": MODEL, "prompt": "w1 w2", "return_token_strs": true})).await;
    let expected = json!({"count": 2, "tokens": [2, 3], "token_strs": ["w1", "w2"], "max_model_len": CONTEXT});
    assert_eq!(answer, expected);
    assert_eq!(post("/tokenize", json!({"prompt": ["w1", "w2 w3"]})).await["tokens"], json!([[2], [3, 4]]));
    let chat = json!({"messages": [{"role": "user", "content": "w5"}]});
    assert_eq!(post("/tokenize", chat).await["tokens"], json!([0, 6, 0]));
    // Some clients name the type of a message.
    let chat = json!({"messages": [{"role": "user", "content": "w5", "type": "text"}]});
    assert_eq!(post("/tokenize", chat).await["tokens"], json!([0, 6, 0]));
    assert_eq!(post("/detokenize", json!({"tokens": [2, 3]})).await, json!({"prompt": "w1 w2", "text": "w1 w2"}));
    for (path, body, param) in [
        ("/tokenize", json!({"prompt": "a", "colour": 1}), "colour"),
        ("/tokenize", json!({}), "prompt"),
        ("/detokenize", json!({}), "tokens"),
        (
            "/v1/completions",
            json!({"model": MODEL, "prompt": "w1", "truncate_prompt_tokens": CONTEXT + 1}),
            "truncate_prompt_tokens",
        ),
    ] {
        let response = cluster.post(path, body).await;
        assert_eq!(response.status(), 400);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["param"], param);
    }
}

#[tokio::test]
async fn tokenize_returns_a_million_tokens_at_most() {
    let cluster = TestCluster::new(0, 0).await;
    let role = larder_worker::api::Role::Decode;
    FakeEngine::start_with_context(&cluster.store, "decode-0", role, 2000).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let mut texts = vec!["w1 ".repeat(1024); 1024];
    let answer = cluster.post("/tokenize", json!({"prompt": texts})).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.json::<Value>().await.unwrap()["count"], json!(vec![1024; 1024]));
    texts[1023].push_str("w1");
    let refused = cluster.post("/tokenize", json!({"prompt": texts})).await;
    assert_eq!(refused.status(), 400);
    let message = refused.json::<Value>().await.unwrap()["error"]["message"].to_string();
    assert!(message.contains("1048577 tokens; at most 1048576"), "{message}");
}

#[tokio::test]
async fn native_streams_of_long_texts_wait_for_their_client() {
    let cluster = TestCluster::new(0, 0).await;
    let role = larder_worker::api::Role::Decode;
    let engine = FakeEngine::start_with_context(&cluster.store, "decode-0", role, 2000).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    engine.behave(Behaviour::Write(vec!["x".repeat(16 << 10); 16]));
    // 32 MiB of text. A chunk repeats the whole text of its choice, so a stream has 272 MiB. Its
    // choices wait until the client has read earlier chunks.
    let params = json!({"n": 128, "max_new_tokens": 1500});
    let mut body = json!({"text": "w1", "sampling_params": params});
    let whole = cluster.post("/generate", body.clone()).await;
    assert_eq!(whole.status(), 200);
    assert_eq!(whole.json::<Value>().await.unwrap().as_array().map(Vec::len), Some(128));
    body["stream"] = json!(true);
    let text = cluster.post("/generate", body).await.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{}", &text[text.len() - 300..]);
    assert_eq!(text.matches("\"finish_reason\":{\"type\":\"stop\"}").count(), 128);
}

#[tokio::test]
async fn native_api_answers_as_sglang() {
    let cluster = TestCluster::new(0, 1).await;
    let params = json!({"max_new_tokens": 3, "temperature": 0, "ignore_eos": true});
    let body = json!({"text": "w1 w2", "sampling_params": params});
    let answer: Value = cluster.post("/generate", body.clone()).await.json().await.unwrap();
    assert_eq!((answer["text"].as_str(), &answer["output_ids"]), (Some(" t0 t1 t2"), &json!([0, 1, 2])));
    let info = &answer["meta_info"];
    assert_eq!(info["finish_reason"], json!({"type": "length", "length": 3}));
    assert_eq!((info["prompt_tokens"].as_u64(), info["completion_tokens"].as_u64()), (Some(2), Some(3)));
    let mut named = body.clone();
    named["rid"] = json!("mine");
    let answer: Value = cluster.post("/generate", named.clone()).await.json().await.unwrap();
    assert_eq!(answer["meta_info"]["id"], "mine");
    named["sampling_params"]["n"] = json!(2);
    named["text"] = json!(["w1", "w2"]);
    named["rid"] = json!(["a", "b"]);
    let answer: Value = cluster.post("/generate", named).await.json().await.unwrap();
    let ids: Vec<&Value> = answer.as_array().unwrap().iter().map(|choice| &choice["meta_info"]["id"]).collect();
    assert_eq!(ids, ["a-0", "a-1", "b-0", "b-1"]);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = events(&cluster.post("/generate", streamed).await.text().await.unwrap());
    assert_eq!(events[1]["text"], " t0 t1", "each chunk has the text so far");
    let last = events.last().unwrap();
    assert_eq!(
        (last["text"].as_str(), &last["meta_info"]["finish_reason"]),
        (Some(" t0 t1 t2"), &info["finish_reason"])
    );
    let batch =
        json!({"input_ids": [[2, 3], [4]], "sampling_params": params, "return_logprob": true, "top_logprobs_num": 1});
    let answer: Value = cluster.post("/generate", batch).await.json().await.unwrap();
    assert_eq!((answer.as_array().unwrap().len(), answer[1]["index"].as_u64()), (2, Some(1)));
    assert_eq!(answer[1]["meta_info"]["output_token_logprobs"][1], json!([-0.5, 1, null]));
    assert_eq!(answer[1]["meta_info"]["output_top_logprobs"][1], json!([[0.0, 0, null]]));
    for (body, param) in [
        (json!({"sampling_params": {}}), "text"),
        (json!({"text": "a", "input_ids": [1]}), "input_ids"),
        (json!({"text": "a", "sampling_params": {"ebnf": "root ::= \"a\""}}), "ebnf"),
        (json!({"text": "a", "lora_path": "x"}), "lora_path"),
        (json!({"text": "a", "rid": ["x", "y"]}), "rid"),
        (json!({"text": ["a", "b"], "rid": "x".repeat(200)}), "rid"),
        (json!({"text": "a", "logprob_start_len": 0}), "logprob_start_len"),
    ] {
        let response = cluster.post("/generate", body).await;
        assert_eq!(response.status(), 400);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["param"], param);
    }
}

#[tokio::test]
async fn tool_calls_leave_the_text_of_the_answer() {
    let cluster = TestCluster::new(0, 0).await;
    // A template that teaches the marks of Hermes.
    let template = "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}{% for m in messages %}{{ m.content }} \
        {% endfor %}{# <tool_call> #}";
    let role = larder_worker::api::Role::Decode;
    let engine = FakeEngine::start_model(&cluster.store, "decode-0", role, CONTEXT, MODEL, template).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let call =
        |name: &str| format!("\n<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"a\": 1}}}}\n</tool_call>");
    let text = format!("I look.{}{}", call("w7"), call("w8"));
    let pieces = text.as_bytes().chunks(7).map(|piece| String::from_utf8(piece.to_vec()).unwrap());
    engine.behave(Behaviour::Write(pieces.collect()));
    let tools = json!([{"type": "function", "function": {"name": "w7", "parameters": {"type": "object"}}}]);
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1"}], "tools": tools});
    // The template writes the name of each tool before the messages.
    let tokenized = cluster.post("/tokenize", body.clone()).await.json::<Value>().await.unwrap();
    assert_eq!(tokenized["tokens"], json!([8, 2]));
    let response = cluster.post("/v1/chat/completions", body.clone()).await;
    let answer: Value = response.json().await.unwrap();
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (message["content"].as_str(), answer["choices"][0]["finish_reason"].as_str()),
        (Some("I look."), Some("tool_calls"))
    );
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"]), (2, &json!({"name": "w7", "arguments": "{\"a\": 1}"})));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_") && calls[0]["id"] != calls[1]["id"], "{message}");
    assert_eq!(engine.decodes.lock()[0].tokens, [8, 2], "the template shows the tools");
    body["stream"] = json!(true);
    let events = events(&cluster.post("/v1/chat/completions", body.clone()).await.text().await.unwrap());
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    let streamed: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    assert_eq!(content, "I look.");
    for (index, name) in ["w7", "w8"].into_iter().enumerate() {
        // The name comes first, and then the arguments as the model writes them.
        let of_call: Vec<&&Value> = streamed.iter().filter(|entry| entry["index"] == index).collect();
        let head = json!({"index": index, "id": of_call[0]["id"], "type": "function",
            "function": {"name": name, "arguments": ""}});
        assert_eq!(**of_call[0], head);
        assert!(of_call[0]["id"].as_str().unwrap().starts_with("call_"), "{head}");
        let arguments: Vec<&str> =
            of_call[1..].iter().map(|entry| entry["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(arguments.concat(), "{\"a\": 1}");
        assert!(arguments.len() > 1, "{arguments:?}");
        let more = json!({"index": index, "function": {"arguments": arguments[0]}});
        assert_eq!(**of_call[1], more, "no other field");
    }
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    // Without tools the text stays as it is.
    body["stream"] = json!(false);
    body["tool_choice"] = json!("none");
    let answer: Value = cluster.post("/v1/chat/completions", body).await.json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"].as_str(), Some(text.as_str()));
    let plain = TestCluster::new(0, 1).await;
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1"}], "tools": tools});
    let response = plain.post("/v1/chat/completions", body).await;
    assert_eq!(response.status(), 400);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["param"], "tools");
}

#[tokio::test]
async fn constraints_reach_the_engine_with_every_choice() {
    let cluster = TestCluster::new(0, 1).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    let messages = json!([{"role": "user", "content": "w1"}]);
    let of_json = Constraint::JsonSchema(schema.to_string());
    for (path, body, constraint) in [
        ("/v1/chat/completions", json!({"model": MODEL, "messages": messages, "response_format": format}), &of_json),
        ("/v1/completions", json!({"model": MODEL, "prompt": "w1", "guided_json": schema}), &of_json),
        ("/generate", json!({"text": "w1", "sampling_params": {"json_schema": schema.to_string()}}), &of_json),
        ("/generate", json!({"text": "w1", "sampling_params": {"regex": "a+"}}), &Constraint::Regex("a+".into())),
    ] {
        let engine = &cluster.decodes[0];
        engine.decodes.lock().clear();
        let mut body = body;
        let params = if path == "/generate" { &mut body["sampling_params"] } else { &mut body };
        params["n"] = json!(3);
        let response = cluster.post(path, body).await;
        assert_eq!(response.status(), 200, "{path}: {}", response.text().await.unwrap());
        let sent = engine.decodes.lock().clone();
        assert_eq!(sent.len(), 3);
        assert!(sent.iter().all(|request| request.sampling.constraint.as_deref() == Some(constraint)), "{path}");
    }
    let free = json!({"model": MODEL, "messages": messages, "response_format": {"type": "text"}});
    assert_eq!(cluster.post("/v1/chat/completions", free).await.status(), 200);
    assert_eq!(cluster.decodes[0].decodes.lock().last().unwrap().sampling.constraint, None);
}

#[tokio::test]
async fn required_tools_constrain_the_answer_to_calls() {
    let cluster = TestCluster::new(0, 0).await;
    let template = "{% for m in messages %}{{ m.content }} {% endfor %}{# <tool_call> #}";
    let role = larder_worker::api::Role::Decode;
    let engine = FakeEngine::start_model(&cluster.store, "decode-0", role, CONTEXT, MODEL, template).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let tool = |name: &str, strict: bool| json!({"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}});
    let ask = async |fields: Value| {
        let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "w1"}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let response = cluster.post("/v1/chat/completions", body).await;
        assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
        engine.decodes.lock().last().unwrap().sampling.constraint.clone()
    };
    let calls = async |fields: Value| match ask(fields).await.as_deref() {
        Some(Constraint::Calls(calls)) => calls.clone(),
        other => panic!("{other:?}"),
    };
    let both = json!([tool("f", false), tool("g", false)]);
    let function = |name: &str, parameters: &Value| CallableFunction {
        name: name.into(),
        parameters: Some(parameters.to_string()),
    };
    let required = calls(json!({"tools": both, "tool_choice": "required"})).await;
    assert_eq!((required.form, required.is_parallel, required.otherwise), (CallForm::Hermes, true, Otherwise::Never));
    assert_eq!(required.functions, [function("f", &parameters), function("g", &parameters)]);
    let named = json!({"type": "function", "function": {"name": "g"}});
    let named = calls(json!({"tools": both, "tool_choice": named})).await;
    assert_eq!((named.functions, named.is_parallel), (vec![function("g", &parameters)], false));
    assert_eq!(ask(json!({"tools": both})).await, None, "the model decides");
    let any = json!({"type": "object"});
    let strict = calls(json!({"tools": [tool("f", true), tool("g", false)]})).await;
    assert_eq!(strict.functions[0], function("f", &parameters));
    let free: Value = serde_json::from_str(strict.functions[1].parameters.as_ref().unwrap()).unwrap();
    assert_eq!((free, strict.otherwise), (any, Otherwise::Text));
    let format = json!({"type": "json_object"});
    let json_or_calls = calls(json!({"tools": both, "response_format": format})).await;
    assert!(matches!(json_or_calls.otherwise, Otherwise::Json(_)));
}
