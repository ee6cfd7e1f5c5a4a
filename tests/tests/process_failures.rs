//! Failures of single processes. Answers stay correct, and the store keeps its pages.

use larder_tests::{CompletionRequest, Reference, Stack, complete, eventually, node_statuses};

async fn counter(stack: &Stack, name: &str) -> u64 {
    node_statuses(&stack.admin).await.iter().map(|status| status["counters"][name].as_u64().unwrap_or(0)).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_engines_reuse_pages_from_the_store() {
    let reference = Reference::load();
    let tokens = reference.prompt(1, 1000);
    let mut stack = Stack::start(1).await;
    let first = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!(first.cached, 0);
    stack.prefill.take().unwrap().sigkill();
    stack.decode.take().unwrap().sigkill();
    stack.start_engines();
    stack.ready().await;
    let second = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!((second.text, second.cached), (first.text.clone(), 992), "31 pages of 32 tokens");
    assert_eq!(first.text, reference.greedy_text(&tokens, 32));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_store_node_recovers_its_pages() {
    let reference = Reference::load();
    let tokens = reference.prompt(2, 1000);
    let mut stack = Stack::start(1).await;
    let first = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
    // A page is acknowledged before it is durable. One second later it is durable.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    stack.nodes[0].take().unwrap().sigkill();
    stack.start_node(0);
    stack.start_engines();
    stack.ready().await;
    let second = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!((second.text, second.cached), (first.text, 992));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_computes_without_its_store() {
    let reference = Reference::load();
    let tokens = reference.prompt(3, 300);
    let mut stack = Stack::start(1).await;
    let expected = reference.greedy_text(&tokens, 32);
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap().text, expected);
    stack.nodes[0].take().unwrap().sigkill();
    for cache in ["all", "store", "none"] {
        let answer = complete(&stack.api, &CompletionRequest::new(&tokens).cache(cache)).await.unwrap();
        assert_eq!(answer.text, expected, "{cache}");
    }
    let log = stack.decode.as_ref().unwrap().stderr();
    assert!(
        log.contains("lost the connection to the store node") && log.contains("its pages are misses until a retry"),
        "{log}"
    );
    stack.start_node(0);
    stack.ready().await;
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap().text, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_prefill_loses_only_unsealed_pages() {
    let reference = Reference::load();
    let tokens = reference.prompt(4, 3000);
    let mut stack = Stack::start(1).await;
    // Small prefill steps leave time to kill the engine midway. A second engine takes over.
    stack.prefill = Some(stack.engine("prefill", &["--chunk-tokens", "32"]));
    stack.ready().await;
    let api = stack.api.clone();
    let prompt = tokens.clone();
    let answer = tokio::spawn(async move { complete(&api, &CompletionRequest::new(&prompt)).await });
    eventually("some pages sealed", || async { counter(&stack, "pages_put").await >= 5 }).await;
    let slow = stack.prefill.take().unwrap();
    slow.sigkill();
    let sealed = counter(&stack, "pages_put").await;
    assert!(sealed < 93, "killed half-way: {sealed} of 93 pages were sealed");
    stack.prefill = Some(stack.engine("prefill", &[]));
    let answer = answer.await.unwrap().unwrap();
    assert_eq!(answer.text, reference.greedy_text(&tokens, 32));
    // The second engine continued after the last sealed page, so every page was put exactly once.
    eventually("all pages sealed", || async { counter(&stack, "pages_put").await >= 93 }).await;
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap().text, answer.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_client_cancels_its_request() {
    let reference = Reference::load();
    let tokens = reference.prompt(6, 200);
    let stack = Stack::start(1).await;
    let request_body = CompletionRequest { max_tokens: 3500, ..CompletionRequest::new(&tokens) };
    let request =
        tokio::time::timeout(std::time::Duration::from_millis(300), complete(&stack.api, &request_body)).await;
    assert!(request.is_err(), "3500 tokens take longer than that");
    eventually("nothing running in the engines", || async {
        let status = larder_tests::get_json(&format!("{}/admin/v1/status", stack.admin)).await.unwrap();
        status["engines"].as_array().unwrap().iter().all(|engine| engine["state"]["running"] == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_store_node_is_abandoned_and_reconnected() {
    let reference = Reference::load();
    let tokens = reference.prompt(7, 300);
    let mut stack = Stack::start(1).await;
    let expected = reference.greedy_text(&tokens, 32);
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap().text, expected);
    stack.nodes[0].as_ref().unwrap().sigstop();
    let decode = stack.decode.as_ref().unwrap();
    eventually("the engine abandons the silent node", || async {
        decode.stderr().contains("the node sent nothing for")
    })
    .await;
    let begin = std::time::Instant::now();
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap().text, expected);
    assert!(begin.elapsed().as_secs() < 3, "a request waited for an abandoned node: {:?}", begin.elapsed());
    stack.nodes[0].as_ref().unwrap().sigcont();
    stack.ready().await;
    let answer = complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap();
    assert_eq!((answer.text, answer.cached), (expected, 288));
}
