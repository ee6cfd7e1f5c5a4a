//! Puts of other clients that reserve pages and never write them. Hits and misses of a node count
//! reuse only.

mod common;

use common::real::*;
use common::*;
use larder_client::{Client, ClientOptions, NewPage, PagePut, PutOutcome};
use larder_format::{PageKey, page_keys};
use larder_node::Node;
use larder_worker::api::{CacheMode, DecodeRequest};
use larder_worker::{EngineHandle, EngineOptions, Role};
use std::time::{Duration, Instant};

const LEN: usize = 203;
const PAGES: usize = (LEN - 1) / PAGE;
/// Limit of each step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);
/// Limit of a wait that no test may reach.
const HOUR: Duration = Duration::from_secs(3600);

async fn client(node: &Node, engine: &EngineHandle) -> Client {
    let url = format!("larder://{}/", node.addr()).parse().unwrap();
    let client = Client::attach(url, Some(engine.info().descriptor.clone()), ClientOptions::default());
    assert!(client.ready(PATIENCE).await);
    client
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn new_page(keys: &[PageKey], index: usize) -> NewPage {
    let parent = index.checked_sub(1).map_or(PageKey::NONE, |before| keys[before]);
    NewPage { key: keys[index], parent, position: index as u32 }
}

/// Reserves the pages and sends nothing. Returns when the node has granted all of them.
async fn squat(squatter: &Client, prober: &Client, keys: &[PageKey]) -> Vec<PagePut> {
    let patience = soon();
    let mut puts = Vec::new();
    for index in 0..keys.len() {
        loop {
            assert!(Instant::now() < patience, "page {index} is not reserved");
            let put = squatter.put(new_page(keys, index), Instant::now() + HOUR);
            tokio::time::sleep(Duration::from_millis(10)).await;
            let probed = prober.put(new_page(keys, index), soon()).commit(soon()).await;
            if probed == PutOutcome::InProgress {
                puts.push(put);
                break;
            }
        }
    }
    puts
}

/// A request whose prompt a prefill engine is said to compute.
fn awaiting(seed: u64, tokens: usize) -> DecodeRequest {
    let mut request = decode_request(&prompt(seed, LEN), tokens);
    request.await_pages = PAGES as u32;
    request.cached_pages = Some(0);
    request.deadline_ms = HOUR.as_millis() as u64;
    request
}

/// Options of a decode engine that would wait for an hour, were it not sooner to compute.
fn trusting() -> EngineOptions {
    let mut options = options(Role::Decode);
    options.follow_start_timeout = HOUR;
    options.follow_stall_timeout = HOUR;
    options.request_timeout = HOUR;
    options
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_does_not_wait_for_reservations_without_bytes() {
    let node = node(any_port()).await;
    let prefiller = attached(Role::Prefill, &node).await;
    let decoder = attached_by(trusting(), &node).await;
    let squatter = client(&node, &decoder).await;
    let prober = client(&node, &decoder).await;
    for (seed, squatted) in [(1, 0..PAGES), (2, 0..1), (3, 5..7)] {
        let request = awaiting(seed, 10);
        let keys = page_keys(&request.tokens, PAGE);
        let puts = squat(&squatter, &prober, &keys[squatted.clone()]).await;
        let begin = Instant::now();
        let answer = tokio::time::timeout(PATIENCE, decode(&decoder, &request));
        let (answer, computed) = tokio::join!(answer, prefill(&prefiller, &request.tokens, CacheMode::All));
        println!("pages {squatted:?} reserved: answer after {:?}", begin.elapsed());
        assert_eq!(answer.expect("decode waits for a silent writer").tokens, expected(&request.tokens, 10));
        assert_eq!(computed.pages_lost as usize, squatted.len(), "no engine may wait for these pages");
        drop(puts);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_does_not_wait_for_a_prefill_that_hangs() {
    let node = node(any_port()).await;
    let decoder = attached_by(trusting(), &node).await;
    let request = awaiting(4, 10);
    let begin = Instant::now();
    let answer = tokio::time::timeout(PATIENCE, decode(&decoder, &request)).await;
    println!("no prefill: answer after {:?}", begin.elapsed());
    assert_eq!(answer.expect("decode waits for nobody").tokens, expected(&request.tokens, 10));
}

fn counter(node: &Node, name: &str) -> usize {
    node.status()["counters"][name].as_u64().unwrap() as usize
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hits_and_misses_of_a_node_count_reuse_only() {
    let node = node(any_port()).await;
    let prefiller = attached(Role::Prefill, &node).await;
    let decoder = attached_by(patient(Role::Decode), &node).await;
    let prompts = 4;
    for round in 0..prompts {
        let request = awaiting(40 + round as u64, 1);
        let computing = async {
            let patience = soon();
            while counter(&node, "follows") < (round + 1) * PAGES {
                assert!(Instant::now() < patience, "decode does not follow");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            prefill(&prefiller, &request.tokens, CacheMode::All).await
        };
        let (answer, _) = tokio::join!(decode(&decoder, &request), computing);
        let start = answer.start;
        assert_eq!((start.pages_followed as usize, start.pages_l2 + start.pages_l3), (PAGES, 0));
    }
    let hits = || counter(&node, "pages_hit_l2") + counter(&node, "pages_hit_l3");
    let pages = prompts * PAGES;
    assert_eq!((hits(), counter(&node, "pages_missed")), (0, pages), "prompts that nobody had");
    assert_eq!(counter(&node, "pages_followed"), pages);

    let fresh = attached(Role::Decode, &node).await;
    for round in 0..prompts {
        let request = decode_request(&prompt(40 + round as u64, LEN), 1);
        assert_eq!(decode(&fresh, &request).await.start.pages_l2 as usize, PAGES);
    }
    assert_eq!((hits(), counter(&node, "pages_missed")), (pages, pages), "half of the prompts were repeated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_read_after_the_prefill_has_ended_are_handed_over_too() {
    let store = MemoryStore::new();
    let prefiller = engine(Role::Prefill, &store).await;
    let request = awaiting(50, 1);
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    let start = decode(&engine(Role::Decode, &store).await, &request).await.start;
    assert_eq!((start.pages_followed as usize, start.pages_l2), (PAGES, 0));
    let half = DecodeRequest { cached_pages: Some(5), ..request };
    let start = decode(&engine(Role::Decode, &store).await, &half).await.start;
    assert_eq!((start.pages_followed as usize, start.pages_l2), (PAGES - 5, 5));
}
