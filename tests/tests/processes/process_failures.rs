//! Failures of single processes. Answers stay correct, and the store keeps its pages.

use larder_tests::{CompletionRequest, Reference, Stack, complete, eventually, get_json, metric, soon};
use std::time::{Duration, Instant};

/// Maximum time that a decode engine waits for the first part of a prefill: the default of its
/// option `follow_start_timeout`.
const FOLLOW_START_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of requests for the list of models, and number of them after which the model of engines
/// that hang is gone: 5 s.
const ROUND: Duration = Duration::from_millis(100);
const GONE_AFTER_ROUNDS: u32 = 50;

/// Time that the requests of an engine have waited for pages so far.
async fn waited_for_pages(engine: &str) -> Duration {
    let name = "larder_engine_state_seconds_sum";
    Duration::from_secs_f64(metric(engine, name, r#"state="transfer""#).await.unwrap())
}

/// Complete pages of 32 tokens in a prompt of 3,000 tokens.
const LONG_PROMPT_PAGES: u64 = 93;

/// Field of the state of every engine that the router reaches.
async fn engine_states(stack: &Stack, field: &str) -> Vec<u64> {
    let status = get_json(&format!("{}/admin/v1/status", stack.admin)).await.unwrap();
    status["engines"].as_array().unwrap().iter().filter_map(|engine| engine["state"][field].as_u64()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_engines_reuse_pages_from_the_store() {
    let reference = Reference::load();
    let tokens = reference.prompt(1, 1000);
    let mut stack = Stack::start(1).await;
    let first = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!(first.cached, 0);
    stack.flushed(31).await;
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
    // A page is acknowledged before it is on L3.
    stack.flushed(31).await;
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
    let decode = stack.decode.as_ref().unwrap();
    eventually("the engine logs the loss and its consequence", || async {
        let log = decode.stderr();
        log.contains("lost the connection to the store node") && log.contains("its pages are misses until a retry")
    })
    .await;
    stack.start_node(0);
    stack.ready().await;
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap().text, expected);
}

/// Kills the prefill engine in the middle of a prompt of [`LONG_PROMPT_PAGES`] pages, and starts
/// another one. Returns the answer to the prompt. Returns `None` if the engine was killed too late:
/// it had sealed all pages.
async fn kill_prefill_midway(stack: &mut Stack, tokens: &[u32]) -> Option<String> {
    let before = stack.pages_put().await;
    // Small steps, so that there is a middle.
    stack.prefill = Some(stack.engine("prefill", &["--chunk-tokens", "32"]));
    stack.ready().await;
    let api = stack.api.clone();
    let prompt = tokens.to_vec();
    let answer = tokio::spawn(async move { complete(&api, &CompletionRequest::new(&prompt)).await });
    eventually("some pages sealed", || async { stack.pages_put().await >= before + 5 }).await;
    stack.prefill.take().unwrap().sigkill();
    let sealed = stack.pages_put().await - before;
    stack.prefill = Some(stack.engine("prefill", &[]));
    let answer = answer.await.unwrap().unwrap();
    (sealed < LONG_PROMPT_PAGES).then_some(answer.text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_prefill_loses_only_unsealed_pages() {
    let reference = Reference::load();
    let mut stack = Stack::start(1).await;
    let deadline = soon();
    let mut prompts = (4..).map(|seed| reference.prompt(seed, 3000));
    // On a busy machine the kill may come too late, so the test tries further prompts.
    let (tokens, text) = loop {
        let tokens = prompts.next().unwrap();
        stack.flushed(0).await;
        if let Some(text) = kill_prefill_midway(&mut stack, &tokens).await {
            break (tokens, text);
        }
        assert!(Instant::now() < deadline, "no engine was killed before it had sealed all pages");
    };
    assert_eq!(text, reference.greedy_text(&tokens, 32));
    // The second engine continues after the last sealed page. It gives up a put that meets an open
    // put of the killed engine, so a later request may have to compute that page again.
    stack.ready().await;
    eventually("the store has every page of the prompt", || async {
        let again = complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap();
        assert_eq!(again.text, text);
        assert!(again.cached > 0, "no sealed page is lost");
        again.cached == LONG_PROMPT_PAGES * 32
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_client_cancels_its_request() {
    let reference = Reference::load();
    let tokens = reference.prompt(6, 200);
    let mut stack = Stack::start(1).await;
    let decode = stack.decode.as_mut().unwrap().url("http://");
    let api = stack.api.clone();
    let request = tokio::spawn(async move {
        let body = CompletionRequest { max_tokens: 3500, ..CompletionRequest::new(&tokens) };
        complete(&api, &body).await
    });
    eventually("the request runs in an engine", || async { engine_states(&stack, "running").await.contains(&1) }).await;
    request.abort();
    assert!(request.await.is_err_and(|end| end.is_cancelled()), "the client left before its answer was complete");
    eventually("nothing running in the engines", || async {
        let running = engine_states(&stack, "running").await;
        running.len() == 2 && running.iter().all(|&running| running == 0)
    })
    .await;
    let requests = "larder_engine_requests_total";
    eventually("the decode engine counts a cancelled request", || async {
        metric(&decode, requests, r#"outcome="cancelled""#).await.unwrap() == 1.0
    })
    .await;
    assert_eq!(metric(&decode, requests, r#"outcome="done""#).await.unwrap(), 0.0, "no answer was computed to its end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_store_node_is_abandoned_and_reconnected() {
    let reference = Reference::load();
    let tokens = reference.prompt(7, 300);
    let mut stack = Stack::start(1).await;
    let expected = reference.greedy_text(&tokens, 32);
    assert_eq!(complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap().text, expected);
    stack.flushed(9).await;
    stack.nodes[0].as_ref().unwrap().sigstop();
    let decode_url = stack.decode.as_mut().unwrap().url("http://");
    let decode = stack.decode.as_ref().unwrap();
    eventually("the engine abandons the silent node", || async {
        decode.stderr().contains("the node sent nothing for")
    })
    .await;
    let without_nodes = || async { engine_states(&stack, "store_nodes").await == [0, 0] };
    eventually("both engines have abandoned the node", without_nodes).await;
    let answer = complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap();
    assert_eq!((answer.text, answer.cached), (expected.clone(), 0), "computed without the node");
    // Without this bound the wait would go unnoticed, because it ends as well.
    let waited = waited_for_pages(&decode_url).await;
    assert!(waited < FOLLOW_START_TIMEOUT, "a request waited {waited:?} for pages of an abandoned node");
    assert!(without_nodes().await, "no engine has taken the node back");
    stack.nodes[0].as_ref().unwrap().sigcont();
    stack.ready().await;
    let answer = complete(&stack.api, &CompletionRequest::new(&tokens).cache("store")).await.unwrap();
    assert_eq!((answer.text, answer.cached), (expected, 288));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_prefill_holds_up_no_answer() {
    let reference = Reference::load();
    let mut stack = Stack::start(1).await;
    let decode = stack.decode.as_mut().unwrap().url("http://");
    stack.prefill.as_ref().unwrap().sigstop();
    for seed in 8..10 {
        let tokens = reference.prompt(seed, 1000);
        let expected = reference.greedy_text(&tokens, 32);
        let before = waited_for_pages(&decode).await;
        let answer = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
        assert_eq!((answer.text, answer.cached), (expected, 0));
        // Without this bound the wait would go unnoticed, because it ends as well.
        let waited = waited_for_pages(&decode).await - before;
        println!("waited {waited:?} for pages");
        assert!(waited < FOLLOW_START_TIMEOUT, "the request waited {waited:?} for a prefill engine that hangs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_of_engines_that_do_not_answer_disappears() {
    let stack = Stack::start(1).await;
    let models = async || get_json(&format!("{}/v1/models", stack.api)).await.unwrap()["data"].clone();
    assert_eq!(models().await.as_array().unwrap().len(), 1);
    stack.prefill.as_ref().unwrap().sigstop();
    stack.decode.as_ref().unwrap().sigstop();
    // By rounds and not by the clock: on a busy machine, each of them takes longer than 100 ms.
    let mut rounds = 0;
    while !models().await.as_array().unwrap().is_empty() {
        rounds += 1;
        assert!(rounds < GONE_AFTER_ROUNDS, "the model of engines that hang is still listed");
        tokio::time::sleep(ROUND).await;
    }
    stack.decode.as_ref().unwrap().sigcont();
    eventually("it is back with its engine", || async { !models().await.as_array().unwrap().is_empty() }).await;
    stack.prefill.as_ref().unwrap().sigcont();
}
