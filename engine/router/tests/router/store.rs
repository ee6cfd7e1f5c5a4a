//! Discovery, lookup, inspect and forget through the real client and a real store node.

use crate::fakes::*;
use bytes::Bytes;
use larder_client::{Client, ClientOptions, NewPage, PutOutcome, StoreUrl};
use larder_format::{PageKey, page_keys};
use larder_node::{Node, NodeOptions};
use larder_router::admin::api::*;
use larder_router::{Router, RouterOptions};
use larder_worker::api::Role;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

async fn put_pages(client: &Client, tokens: &[u32]) {
    let geometry = descriptor().geometry;
    let mut parent = PageKey::NONE;
    for (position, key) in (0..).zip(page_keys(tokens, PAGE_TOKENS as usize)) {
        let deadline = Instant::now() + PATIENCE;
        let mut page = client.put(NewPage { key, parent, position, token_ids: Vec::new() }, deadline);
        for part in 0..geometry.part_count() {
            page.part(part, Bytes::from(vec![position as u8; geometry.part_bytes(part)]));
        }
        assert_eq!(page.commit(deadline).await, PutOutcome::Stored);
        parent = key;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn router_finds_engines_and_pages_through_a_store_node() {
    let options =
        NodeOptions { listen: "127.0.0.1:0".parse().unwrap(), l2_bytes: 32 << 20, l3_bytes: 0, ..Default::default() };
    let node = Node::start(options).await.unwrap();
    let url: StoreUrl = format!("larder://{}/", node.addr()).parse().unwrap();
    let fake_store = Arc::new(FakeStore::default());
    let decode = FakeEngine::start(&fake_store, "decode-0", Role::Decode).await;
    let prefill = FakeEngine::start(&fake_store, "prefill-0", Role::Prefill).await;
    let client = Client::attach(url.clone(), Some(descriptor()), ClientOptions::default());
    assert!(client.ready(PATIENCE).await);
    let members = fake_store.members.lock().clone();
    let mut registrations: Vec<_> = members.into_iter().map(|member| client.register(member)).collect();

    let mut options = RouterOptions::new(url);
    options.listen = "127.0.0.1:0".parse().unwrap();
    options.admin_listen = options.listen;
    options.prefill_min_tokens = 8;
    options.template_worker = crate::template_worker_command();
    let router = Router::start(options).await.unwrap();
    assert!(router.wait_ready(PATIENCE).await);
    eventually("both engines join", || router.engines().len() == 2).await;

    // 4 of 8 pages are in the store. The router uses prefill only if enough tokens are missing.
    let tokens: Vec<u32> = (1..=33).collect();
    put_pages(&client, &tokens[..16]).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let ask = async |path: &str, admin: bool, body: Value| -> Value {
        let addr = if admin { router.admin_addr() } else { router.addr() };
        http.post(format!("http://{addr}{path}")).json(&body).send().await.unwrap().json().await.unwrap()
    };
    let answer = ask("/v1/completions", false, json!({"model": MODEL, "prompt": tokens[..22]})).await;
    assert_eq!(answer["choices"][0]["text"].as_str().unwrap().matches('t').count(), 10, "{answer}");
    assert_eq!((prefill.prefill_count(), decode.decode_count()), (0, 1), "4 tokens in whole pages are missing");
    ask("/v1/completions", false, json!({"model": MODEL, "prompt": tokens})).await;
    assert_eq!(prefill.prefill_count(), 1, "16 tokens in whole pages are missing");

    let inspected: InspectResponse =
        serde_json::from_value(ask(PATH_INSPECT, true, json!({"tokens": tokens})).await).unwrap();
    let held: Vec<bool> = inspected.pages.iter().map(|page| page.tier.is_some()).collect();
    assert_eq!(held, [true, true, true, true, false, false, false, false]);
    let forgotten = ask(PATH_FORGET, true, json!({"tokens": tokens})).await;
    let expected = json!({"pages": 8, "forgotten": 4, "complete": true, "engines": 2, "engines_unconfirmed": []});
    assert_eq!(forgotten, expected);

    decode.is_gone.store(true, std::sync::atomic::Ordering::SeqCst);
    registrations.remove(0);
    eventually("an engine that withdraws is taken out", || router.engines().len() == 1).await;
    router.shutdown().await;
    node.shutdown().await;
}
