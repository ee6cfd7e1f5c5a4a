//! The OpenAI API as clients see it.

use crate::fakes::*;
use serde_json::{Value, json};

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
            json!({"model": MODEL, "prompt": "w1", "guided_regex": "a"}).to_string(),
            400,
            json!("unknown_parameter"),
        ),
        (
            "/v1/chat/completions",
            json!({"model": MODEL, "messages": [], "tools": [{"type": "function"}]}).to_string(),
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
    for path in ["/admin/v1/status", "/admin/v1/prefix/inspect", "/admin/v2/anything", "/metrics", "/healthz"] {
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
    assert_eq!(logprobs["text_offset"], json!([0, 2, 4, 6]));
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
    // Only the prompt.
    let mut empty = body;
    empty["max_tokens"] = json!(0);
    let answer: Value = cluster.post("/v1/completions", empty).await.json().await.unwrap();
    let choice = &answer["choices"][0];
    assert_eq!((choice["text"].as_str(), answer["usage"]["completion_tokens"].as_u64()), (Some("w1 w2 w3"), Some(0)));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.5, -2.0]));
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
