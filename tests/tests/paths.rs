//! Whatever way a page takes, the greedy text is the same to the last token, and equal to the model's own.

use larder_tests::{Ask, Reference, Stack, complete, status_of};

/// 20 whole pages below the last token, and a tail.
const PROMPT_TOKENS: usize = 20 * 32 + 7;

/// Asks, and checks the text against the model's own.
async fn equal(stack: &Stack, reference: &Reference, tokens: &[u32], cache: &str, way: &str) -> u64 {
    let answer = complete(&stack.api, &Ask::new(tokens).cache(cache)).await.unwrap_or_else(|e| panic!("{way}: {e:#}"));
    assert_eq!(answer.text, reference.greedy_text(tokens, 32), "{way}");
    answer.cached
}

async fn every_way(nodes: usize) {
    let reference = Reference::load();
    let tokens = reference.prompt(nodes, PROMPT_TOKENS);
    let mut stack = Stack::start(nodes).await;
    assert_eq!(equal(&stack, &reference, &tokens, "none", "without any cache").await, 0);
    assert_eq!(equal(&stack, &reference, &tokens, "all", "cold").await, 0);
    assert_eq!(equal(&stack, &reference, &tokens, "all", "L1").await, 640);
    assert_eq!(equal(&stack, &reference, &tokens, "store", "L2").await, 640);

    // The same beginning, another end: half of it is cached.
    let mut half = tokens[..320].to_vec();
    half.extend(reference.prompt(77, 327));
    assert_eq!(equal(&stack, &reference, &half, "store", "half cached").await, 320);

    // Generated pages are published too: the next turn of the conversation hits them.
    let mut turn = tokens.clone();
    turn.extend(reference.greedy(&tokens, 32));
    turn.extend(&tokens[..40]);
    assert!(equal(&stack, &reference, &turn, "store", "next turn").await >= 640 + 32);

    // A restart of the nodes empties L2: what comes now comes from L3.
    for number in 0..nodes {
        assert!(stack.nodes[number].take().unwrap().stop().success(), "a node stops cleanly");
        stack.start_node(number);
    }
    stack.ready().await;
    let before = pages_from_l3(&stack).await;
    assert_eq!(equal(&stack, &reference, &tokens, "store", "L3, after a restart").await, 640);
    assert!(pages_from_l3(&stack).await >= before + 20);

    // Nothing of the engines is needed.
    stack.start_engines();
    stack.ready().await;
    assert_eq!(equal(&stack, &reference, &tokens, "all", "fresh engines").await, 640);

    // Prefill and decode in one: no prefill engine at all.
    stack.prefill.take().unwrap().kill9();
    stack.ready().await;
    let other = reference.prompt(nodes + 100, PROMPT_TOKENS);
    assert_eq!(equal(&stack, &reference, &other, "all", "decode alone, cold").await, 0);
    assert_eq!(equal(&stack, &reference, &other, "store", "decode alone, L2").await, 640);
}

async fn pages_from_l3(stack: &Stack) -> u64 {
    // Not those served from there: what a lookup holds may have been loaded by the time that it is read.
    let hits = |status: &serde_json::Value| status["counters"]["pages_read_l3"].as_u64().unwrap();
    status_of(&stack.admin).await.iter().map(hits).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node() {
    every_way(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_share_the_keys() {
    every_way(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_both_hold_pages() {
    let reference = Reference::load();
    let tokens = reference.prompt(5, PROMPT_TOKENS);
    let stack = Stack::start(2).await;
    equal(&stack, &reference, &tokens, "all", "cold").await;
    for status in status_of(&stack.admin).await {
        let pages = status["counters"]["pages_put"].as_u64().unwrap();
        assert!((3..=18).contains(&pages), "20 pages over two nodes, {pages} here");
    }
}
