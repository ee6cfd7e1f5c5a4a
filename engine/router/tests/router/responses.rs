//! `/v1/responses` as clients see it.

use crate::fakes::*;
use serde_json::{Value, json};

/// Events of a stream, whose names must be their types.
fn events(text: &str) -> Vec<Value> {
    let parse = |event: &str| -> Value {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    text.split("\n\n").filter(|event| !event.is_empty()).map(parse).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap().strip_prefix("response.").unwrap()).collect()
}

/// Removes what differs from answer to answer.
fn without_ids(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for name in ["id", "call_id", "created_at"] {
                fields.remove(name);
            }
            fields.values_mut().for_each(without_ids);
        }
        Value::Array(items) => items.iter_mut().for_each(without_ids),
        _ => {}
    }
}

#[tokio::test]
async fn responses_have_the_text_and_repeat_the_request() {
    let cluster = TestCluster::new(1, 1).await;
    let mut body = json!({"model": MODEL, "input": "w1 w2", "instructions": "w3", "max_output_tokens": 4,
        "temperature": 0.5, "metadata": {"a": "b"}, "store": false});
    let response = cluster.post("/v1/responses", body.clone()).await;
    assert_eq!(response.status(), 200);
    let mut answer: Value = response.json().await.unwrap();
    let usage = json!({"input_tokens": 6, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 10});
    assert_eq!((&answer["object"], &answer["usage"]), (&json!("response"), &usage));
    let part = json!({"type": "output_text", "text": " t0 t1 t2 t3", "annotations": [], "logprobs": []});
    assert_eq!(answer["output"][0]["content"], json!([part]));
    assert_eq!((&answer["status"], &answer["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let repeated = ["instructions", "max_output_tokens", "temperature", "metadata", "store"];
    assert!(repeated.iter().all(|name| answer[name] == body[name]), "{answer}");
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"), "{answer}");
    let sent = cluster.decodes[0].decodes.lock()[0].clone();
    assert_eq!(sent.tokens, [0, 4, 0, 2, 3, 0], "system, w3, user, w1, w2, assistant");
    assert_eq!((sent.sampling.temperature, sent.sampling.max_tokens), (0.5, 4));

    body["stream"] = json!(true);
    let response = cluster.post("/v1/responses", body).await;
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let events = events(&response.text().await.unwrap());
    let mut expected = vec!["created", "in_progress", "output_item.added", "content_part.added"];
    expected.extend(["output_text.delta"; 4]);
    expected.extend(["output_text.done", "content_part.done", "output_item.done", "incomplete"]);
    assert_eq!(types(&events), expected);
    assert!((0..).zip(&events).all(|(at, event)| event["sequence_number"] == at), "{events:?}");
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!((deltas.as_str(), &events[8]["text"]), (" t0 t1 t2 t3", &json!(" t0 t1 t2 t3")));
    assert_eq!(
        (&events[0]["response"]["status"], &events[0]["response"]["output"]),
        (&json!("in_progress"), &json!([]))
    );
    let mut last = events.last().unwrap()["response"].clone();
    assert_eq!(last["output"][0]["id"], events[4]["item_id"]);
    // The second prompt is cached by then.
    last["usage"] = usage;
    without_ids(&mut last);
    without_ids(&mut answer);
    assert_eq!(last, answer);
}

#[tokio::test]
async fn calls_of_tools_are_items_of_their_own() {
    let cluster = TestCluster::new(0, 0).await;
    let template = "{% for t in tools %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }} \
        {% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments.word }} {% endfor %}{% endfor %}{# <tool_call> #}";
    let role = larder_worker::api::Role::Decode;
    let engine = FakeEngine::start_model(&cluster.store, "decode-0", role, CONTEXT, MODEL, template).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let call = "\n<tool_call>\n{\"name\": \"w7\", \"arguments\": {\"word\": \"w8\"}}\n</tool_call>";
    // The first call in two pieces, of which each has a part of the arguments.
    let (begun, rest) = call.split_at(call.find(": \"w8").unwrap());
    engine.behave(Behaviour::Write(vec!["I look.".into(), begun.into(), rest.into(), call.into()]));
    let tools = json!([{"type": "function", "name": "w7", "parameters": {"type": "object"}, "strict": false}]);
    let mut body = json!({"model": MODEL, "input": "w1", "tools": tools});
    let answer: Value = cluster.post("/v1/responses", body.clone()).await.json().await.unwrap();
    let kinds: Vec<_> =
        answer["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!((kinds, &answer["status"]), (vec!["message", "function_call", "function_call"], &json!("completed")));
    let called = &answer["output"][1];
    assert_eq!((&called["name"], &called["arguments"]), (&json!("w7"), &json!("{\"word\": \"w8\"}")));
    assert_eq!(answer["tools"], tools);
    body["stream"] = json!(true);
    let streamed = events(&cluster.post("/v1/responses", body.clone()).await.text().await.unwrap());
    let at = streamed.iter().position(|event| event["item"]["type"] == "function_call").unwrap();
    let of_call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    assert_eq!(types(&streamed)[at..at + 5], of_call);
    let deltas: Vec<&str> = streamed[at + 1..at + 3].iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(deltas, ["{\"word\"", ": \"w8\"}"]);
    assert_eq!(
        (&streamed[at]["item"]["arguments"], &streamed[at + 3]["arguments"]),
        (&json!(""), &called["arguments"])
    );
    assert!((at..at + 5).all(|at| streamed[at]["output_index"] == 1), "{streamed:?}");
    let (mut last, mut whole) = (streamed.last().unwrap()["response"]["output"].clone(), answer["output"].clone());
    without_ids(&mut last);
    without_ids(&mut whole);
    assert_eq!(last, whole);
    // The client sends the answer back, with the results.
    let mut input = vec![json!({"role": "user", "content": "w1"})];
    input.extend(answer["output"].as_array().unwrap().clone());
    input.push(json!({"type": "function_call_output", "call_id": called["call_id"], "output": "w9"}));
    let body = json!({"model": MODEL, "input": input, "tool_choice": "none", "tools": tools});
    assert_eq!(cluster.post("/v1/responses", body).await.status(), 200);
    let tokens = engine.decodes.lock().last().unwrap().tokens.clone();
    assert_eq!(tokens, [2, 0, 0, 8, 9, 8, 9, 10], "w1, I look., w7, w8, w7, w8, w9");
}

#[tokio::test]
async fn failed_responses_say_so() {
    let cluster = TestCluster::new(0, 1).await;
    cluster.decodes[0].behave(Behaviour::DieAfter(2));
    let body = json!({"model": MODEL, "input": "w1", "stream": true});
    let events = events(&cluster.post("/v1/responses", body).await.text().await.unwrap());
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "server_error");
}

#[tokio::test]
async fn fields_of_responses_are_refused_by_their_own_names() {
    let cluster = TestCluster::new(0, 1).await;
    for (field, value, param) in [
        ("previous_response_id", json!("resp_1"), "previous_response_id"),
        ("conversation", json!("conv_1"), "conversation"),
        ("store", json!(true), "store"),
        ("background", json!(true), "background"),
        ("truncation", json!("auto"), "truncation"),
        ("include", json!(["message.output_text.logprobs"]), "include"),
        ("messages", json!([{"role": "user", "content": "a"}]), "messages"),
        ("max_tokens", json!(5), "max_tokens"),
        ("max_output_tokens", json!(0), "max_output_tokens"),
        ("max_output_tokens", json!("five"), "max_output_tokens"),
        ("temperature", json!(9), "temperature"),
        ("text", json!({"format": {"type": "colour"}}), "text.format"),
        ("text", json!({"verbosity": "high"}), "text.verbosity"),
        ("reasoning", json!({"summary": "auto"}), "reasoning.summary"),
        ("tools", json!([{"type": "web_search"}]), "tools"),
        ("tools", json!([{"type": "function", "name": "f", "colour": "red"}]), "tools"),
        ("colour", json!("red"), "colour"),
        ("n", json!(2), "n"),
        ("input", json!([{"role": "user", "content": vec!["w1"; 300].join(" ")}]), "input"),
    ] {
        let mut body = json!({"model": MODEL, "input": "w1"});
        body[field] = value;
        let response = cluster.post("/v1/responses", body).await;
        assert_eq!(response.status(), 400, "{field}");
        let error = response.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(param), "{error}");
    }
    let harmless = json!({"model": MODEL, "input": "w1", "text": {"format": {"type": "text"}}, "store": false,
        "include": ["reasoning.encrypted_content"], "truncation": "disabled", "stream_options": {"include_obfuscation": false},
        "reasoning": {"effort": "low"}, "previous_response_id": null, "tool_choice": "auto", "tools": []});
    assert_eq!(cluster.post("/v1/responses", harmless).await.status(), 200);
}
