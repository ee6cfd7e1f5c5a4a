//! Clients and model folders that try to exhaust a router.

use larder_tests::{
    CompletionRequest, PATIENCE, Process, Reference, Stack, complete, data_dir, eventually, tiny_model_dir,
};
use serde_json::{Value, json};
use std::path::Path;

const MIB: usize = 1 << 20;

fn http() -> reqwest::Client {
    reqwest::Client::builder().timeout(PATIENCE).build().unwrap()
}

async fn post(url: &str, body: String) -> (u16, Value) {
    let response = http().post(url).body(body).send().await.expect("an answer, not a reset connection");
    (response.status().as_u16(), response.json().await.expect("an error object"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_requests_cost_the_router_little_memory() {
    let stack = Stack::start(1).await;
    let router = stack.router.as_ref().unwrap();
    let before = router.memory_bytes("VmHWM");
    let (completions, chats) = (format!("{}/v1/completions", stack.api), format!("{}/v1/chat/completions", stack.api));
    // Small objects: as general JSON values they take a hundred times their text.
    let objects = |bytes: usize| format!("[{}0]", "{\"\":0},".repeat(bytes / 7));
    let text = |bytes: usize| "And it came to pass. ".repeat(bytes / 21);
    let requests = [
        (&chats, format!("{{\"model\":\"larder-tiny\",\"messages\":[],\"metadata\":{}}}", objects(15 * MIB)), 413),
        (&chats, format!("{{\"model\":\"larder-tiny\",\"messages\":[],\"metadata\":{}}}", objects(6 * MIB)), 400),
        (&chats, format!("{{\"model\":\"larder-tiny\",\"messages\":{}}}", objects(6 * MIB)), 400),
        (&completions, json!({"model": "larder-tiny", "prompt": text(14 * MIB)}).to_string(), 413),
        (&completions, json!({"model": "larder-tiny", "prompt": text(6 * MIB)}).to_string(), 413),
        (&completions, format!("{{\"model\":\"larder-tiny\",\"prompt\":[{}0]}}", "0,".repeat(3 * MIB)), 400),
    ];
    for (url, body, expected) in &requests {
        let answers = [(); 4].map(|()| {
            tokio::spawn({
                let (url, body) = (url.to_string(), body.clone());
                async move { post(&url, body).await }
            })
        });
        for answer in answers {
            let (status, answer) = answer.await.unwrap();
            // Together the bodies may exceed the budget or the share of this address, and some are
            // to be sent again.
            assert!([*expected, 429, 503].contains(&status), "{status}: {answer}");
            assert!(answer["error"]["message"].is_string(), "{answer}");
        }
    }
    let grown = router.memory_bytes("VmHWM") - before;
    println!("peak memory of the router: {} MiB, then {} MiB more", before >> 20, grown >> 20);
    // Bodies of 64 MiB, each in two buffers for a moment while one grows, and parsed prompts.
    assert!(grown < 256 * MIB as u64, "{} MiB", grown >> 20);
}

/// Copy of the bundled model with another chat template.
fn model_with_template(to: &Path, template: &str) {
    for entry in std::fs::read_dir(tiny_model_dir()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    std::fs::write(to.join("chat_template.jinja"), template).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_template_harms_neither_other_requests_nor_the_stop() {
    let (dir, model) = (data_dir(), data_dir());
    // 2^60 comparisons in one instruction.
    let template = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}\
                    {% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}";
    model_with_template(model.path(), template);
    let name = model.path().file_name().unwrap().to_str().unwrap().to_string();
    let paths = [dir.path(), model.path()].map(|path| path.to_str().unwrap());
    let mut up = Process::start(&["up", "--listen", "127.0.0.1:0", "--data-dir", paths[0], "--model", paths[1]]);
    let api = up.url("http://").trim_end_matches("/v1").to_string();
    let url = format!("{api}/v1/chat/completions");
    let body = json!({"model": name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).to_string();
    let (status, answer) = post(&url, body.clone()).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (400, Some("chat_template_exceeded")), "{answer}");
    let chats = [(); 4].map(|()| tokio::spawn(http().post(&url).body(body.clone()).send()));
    eventually("a template worker runs", || async { !up.children().is_empty() }).await;
    let prompt = json!({"model": name, "prompt": "And God", "max_tokens": 4}).to_string();
    let (status, answer) = post(&format!("{api}/v1/completions"), prompt).await;
    assert_eq!(status, 200, "{answer}");
    assert!(!chats.iter().any(|chat| chat.is_finished()), "the template still runs");
    let workers = up.children();
    assert!(!workers.is_empty(), "a template worker runs");
    assert!(up.stop().success());
    eventually("the template worker ends", || async {
        !workers.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn template_worker_ends_with_a_killed_router() {
    let reference = Reference::load();
    let mut stack = Stack::start(1).await;
    let url = format!("{}/v1/chat/completions", stack.api);
    let message = json!({"role": "user", "content": "Who are you?"});
    let body = json!({"model": "larder-tiny", "messages": [message], "max_tokens": 1}).to_string();
    assert_eq!(post(&url, body).await.0, 200);
    let router = stack.router.take().unwrap();
    let workers = router.children();
    assert_eq!(workers.len(), 1, "one worker per model");
    router.sigkill();
    eventually("the template worker ends", || async { !Path::new(&format!("/proc/{}", workers[0])).exists() }).await;
    stack.start_router();
    stack.ready().await;
    let tokens = reference.prompt(1, 100);
    assert!(complete(&stack.api, &CompletionRequest::new(&tokens)).await.is_ok());
}
