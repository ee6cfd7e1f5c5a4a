//! Processes die at bad moments; answers stay right, and the store keeps what it had.

use larder_tests::{Ask, Reference, Stack, complete, eventually, status_of};

async fn counter(stack: &Stack, name: &str) -> u64 {
    status_of(&stack.admin).await.iter().map(|status| status["counters"][name].as_u64().unwrap_or(0)).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_did_it() {
    let reference = Reference::load();
    let tokens = reference.prompt(1, 1000);
    let mut stack = Stack::start(1).await;
    let first = complete(&stack.api, &Ask::new(&tokens)).await.unwrap();
    assert_eq!(first.cached, 0);
    stack.prefill.take().unwrap().kill9();
    stack.decode.take().unwrap().kill9();
    stack.start_engines();
    stack.ready().await;
    let second = complete(&stack.api, &Ask::new(&tokens)).await.unwrap();
    assert_eq!((second.text, second.cached), (first.text.clone(), 992), "31 pages of 32 tokens");
    assert_eq!(first.text, reference.greedy_text(&tokens, 32));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_store_node_finds_its_pages_again() {
    let reference = Reference::load();
    let tokens = reference.prompt(2, 1000);
    let mut stack = Stack::start(1).await;
    let first = complete(&stack.api, &Ask::new(&tokens)).await.unwrap();
    // Acknowledged is not yet on the device; a second later it is.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    stack.nodes[0].take().unwrap().kill9();
    stack.start_node(0);
    stack.start_engines();
    stack.ready().await;
    let second = complete(&stack.api, &Ask::new(&tokens)).await.unwrap();
    assert_eq!((second.text, second.cached), (first.text, 992));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_store_an_engine_goes_on_computing() {
    let reference = Reference::load();
    let tokens = reference.prompt(3, 300);
    let mut stack = Stack::start(1).await;
    let expected = reference.greedy_text(&tokens, 32);
    assert_eq!(complete(&stack.api, &Ask::new(&tokens)).await.unwrap().text, expected);
    stack.nodes[0].take().unwrap().kill9();
    for cache in ["all", "store", "none"] {
        let answer = complete(&stack.api, &Ask::new(&tokens).cache(cache)).await.unwrap();
        assert_eq!(answer.text, expected, "{cache}");
    }
    let said = stack.decode.as_ref().unwrap().errors();
    assert!(said.contains("store node lost") && said.contains("going on without it, retrying"), "{said}");
    stack.start_node(0);
    stack.ready().await;
    assert_eq!(complete(&stack.api, &Ask::new(&tokens).cache("store")).await.unwrap().text, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_that_dies_half_way_costs_only_its_unsealed_pages() {
    let reference = Reference::load();
    let tokens = reference.prompt(4, 3000);
    let mut stack = Stack::start(1).await;
    // Small steps, so that there is a half-way; a second engine takes over.
    stack.prefill = Some(stack.engine("prefill", &["--chunk-tokens", "32"]));
    stack.ready().await;
    let (api, asked) = (stack.api.clone(), tokens.clone());
    let answer = tokio::spawn(async move { complete(&api, &Ask::new(&asked)).await });
    eventually("some pages sealed", || async { counter(&stack, "pages_put").await >= 5 }).await;
    let slow = stack.prefill.take().unwrap();
    slow.kill9();
    let sealed = counter(&stack, "pages_put").await;
    assert!(sealed < 93, "killed half-way: {sealed} of 93 pages were sealed");
    stack.prefill = Some(stack.engine("prefill", &[]));
    let answer = answer.await.unwrap().unwrap();
    assert_eq!(answer.text, reference.greedy_text(&tokens, 32));
    // Every page is in the store now, and was put once: the second engine went on from the last sealed page.
    eventually("all pages sealed", || async { counter(&stack, "pages_put").await >= 93 }).await;
    assert_eq!(complete(&stack.api, &Ask::new(&tokens).cache("store")).await.unwrap().text, answer.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_cancels_the_work() {
    let reference = Reference::load();
    let tokens = reference.prompt(6, 200);
    let stack = Stack::start(1).await;
    let ask = Ask { max_tokens: 3500, ..Ask::new(&tokens) };
    let request = tokio::time::timeout(std::time::Duration::from_millis(300), complete(&stack.api, &ask)).await;
    assert!(request.is_err(), "3500 tokens take longer than that");
    eventually("nothing running in the engines", || async {
        let status = larder_tests::get_json(&format!("{}/admin/v1/status", stack.admin)).await.unwrap();
        status["engines"].as_array().unwrap().iter().all(|engine| engine["state"]["running"] == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_store_node_is_given_up_and_comes_back() {
    let reference = Reference::load();
    let tokens = reference.prompt(7, 300);
    let mut stack = Stack::start(1).await;
    let expected = reference.greedy_text(&tokens, 32);
    assert_eq!(complete(&stack.api, &Ask::new(&tokens)).await.unwrap().text, expected);
    stack.nodes[0].as_ref().unwrap().freeze();
    let decode = stack.decode.as_ref().unwrap();
    eventually("the engine gives the silent node up", || async { decode.errors().contains("the node is silent") })
        .await;
    let begin = std::time::Instant::now();
    assert_eq!(complete(&stack.api, &Ask::new(&tokens).cache("store")).await.unwrap().text, expected);
    assert!(begin.elapsed().as_secs() < 3, "nobody waits for a node that was given up: {:?}", begin.elapsed());
    stack.nodes[0].as_ref().unwrap().thaw();
    stack.ready().await;
    let answer = complete(&stack.api, &Ask::new(&tokens).cache("store")).await.unwrap();
    assert_eq!((answer.text, answer.cached), (expected, 288));
}
