//! Pages and puts of other clients: reserved and never written, or written with values that are no
//! numbers. Hits and misses of a node count reuse only.

use crate::common::real::*;
use crate::common::*;
use larder_client::{Client, ClientOptions, NewPage, PagePut, PutOutcome};
use larder_format::{PageKey, page_keys};
use larder_model::KvPool;
use larder_node::Node;
use larder_worker::api::{ApiError, CacheMode, DecodeRequest, ErrorCode, PrefillRequest};
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
    NewPage { key: keys[index], parent, position: index as u32, token_ids: Vec::new() }
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

/// Puts a page under the key of page `index` of `tokens`. All its values are `value`.
async fn put_page(client: &Client, engine: &EngineHandle, tokens: &[u32], index: usize, value: f32) {
    let mut put = client.put(new_page(&page_keys(tokens, PAGE), index), soon());
    for (part, bytes) in engine.info().descriptor.geometry.part_table().into_iter().enumerate() {
        put.part(part, value.to_le_bytes().repeat(bytes as usize / 4).into());
    }
    assert_eq!(put.commit(soon()).await, PutOutcome::Stored);
}

async fn put_nan(client: &Client, engine: &EngineHandle, tokens: &[u32], index: usize) {
    put_page(client, engine, tokens, index, f32::NAN).await;
}

/// Number of pages that the store has. All of their values must be finite.
async fn usable_pages(client: &Client, keys: &[PageKey]) -> usize {
    let pool = KvPool::new(LOADED.model.geometry(PAGE as u32), keys.len());
    let pages = keys.iter().map(|key| (*key, pool.allocate().unwrap())).collect();
    let stored = client.get(pages, soon()).await.into_iter().filter(|(_, tier)| tier.is_some());
    stored.inspect(|(page, _)| assert!(page.is_finite(), "the store has a page that is not finite")).count()
}

async fn try_prefill(engine: &EngineHandle, tokens: &[u32]) -> Result<u32, (u16, ApiError)> {
    let request = PrefillRequest {
        request_id: "test".into(),
        tokens: tokens.to_vec(),
        cache: CacheMode::All,
        deadline_ms: PATIENCE.as_millis() as u64,
    };
    let response = post(engine, "/v1/prefill", &request).await;
    match response.status().as_u16() {
        200 => Ok(response.json::<larder_worker::api::PrefillResponse>().await.unwrap().pages_computed),
        status => Err((status, response.json().await.unwrap())),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nan_page_fails_one_request_and_disappears() {
    let node = node(any_port()).await;
    let decoder = attached(Role::Decode, &node).await;
    let other = client(&node, &decoder).await;
    for (round, index) in [0, 3, PAGES - 1].into_iter().enumerate() {
        let mut request = decode_request(&prompt(10 + round as u64, LEN), 10);
        request.sampling.ignore_eos = false;
        let keys = page_keys(&request.tokens, PAGE);
        if index > 0 {
            // The page is read only behind those before it.
            let before = decode_request(&request.tokens[..index * PAGE + 1], 1);
            decode(&decoder, &before).await;
            assert!(stores(&other, &keys[..index]).await);
        }
        put_nan(&other, &decoder, &request.tokens, index).await;
        let (status, error) = try_decode(&decoder, &request).await.unwrap_err();
        assert_eq!((status, error.code), (503, ErrorCode::PagesUnusable), "{}", error.message);
        assert_eq!(usable_pages(&other, &keys).await, index, "the page and none that was computed from it");
        let metric = metric(&decoder, "larder_engine_suspect_pages_total").await;
        assert_eq!(metric as usize, round + 1);
        request.sampling.ignore_eos = true;
        assert_eq!(decode(&decoder, &request).await.tokens, expected(&request.tokens, 10), "a retry computes the page");
    }
    assert!(is_idle(&decoder).await);
}

/// Finite, but every product with it overflows.
const HUGE: f32 = 3e38;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_of_huge_values_fails_one_request_and_disappears() {
    let node = node(any_port()).await;
    let decoder = attached(Role::Decode, &node).await;
    let other = client(&node, &decoder).await;
    for (round, index) in [0, 3, PAGES - 1].into_iter().enumerate() {
        let request = decode_request(&prompt(60 + round as u64, LEN), 10);
        let keys = page_keys(&request.tokens, PAGE);
        if index > 0 {
            let before = decode_request(&request.tokens[..index * PAGE + 1], 1);
            decode(&decoder, &before).await;
            assert!(stores(&other, &keys[..index]).await);
        }
        put_page(&other, &decoder, &request.tokens, index, HUGE).await;
        let (status, error) = try_decode(&decoder, &request).await.unwrap_err();
        assert_eq!((status, error.code), (503, ErrorCode::PagesUnusable), "{}", error.message);
        assert_eq!(usable_pages(&other, &keys).await, index, "the engine computed the pages before it itself");
        let metric = metric(&decoder, "larder_engine_suspect_pages_total").await;
        assert_eq!(metric as usize, round + 1);
        assert_eq!(decode(&decoder, &request).await.tokens, expected(&request.tokens, 10), "a retry computes the page");
    }
    assert!(is_idle(&decoder).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_computed_from_a_suspect_page_disappear_with_it() {
    let node = node(any_port()).await;
    let decoder = attached(Role::Decode, &node).await;
    let fresh = attached(Role::Decode, &node).await;
    let other = client(&node, &decoder).await;
    let request = decode_request(&prompt(70, LEN), 10);
    let keys = page_keys(&request.tokens, PAGE);
    // Wrong values, of which the engine computes finite ones.
    put_page(&other, &decoder, &request.tokens, 0, 1.0).await;
    decode(&decoder, &decode_request(&request.tokens[..5 * PAGE + 1], 1)).await;
    assert!(stores(&other, &keys[..5]).await);
    put_page(&other, &decoder, &request.tokens, 5, HUGE).await;
    let (status, error) = try_decode(&decoder, &request).await.unwrap_err();
    assert_eq!((status, error.code), (503, ErrorCode::PagesUnusable), "{}", error.message);
    assert_eq!(usable_pages(&other, &keys).await, 0, "they all come from the first page");
    for engine in [&fresh, &decoder] {
        assert_eq!(decode(engine, &request).await.tokens, expected(&request.tokens, 10));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_that_received_all_pages_suspects_all_of_them() {
    let node = node(any_port()).await;
    let decoder = attached(Role::Decode, &node).await;
    let prefiller = attached(Role::Prefill, &node).await;
    let fresh = attached(Role::Decode, &node).await;
    let other = client(&node, &decoder).await;
    let request = decode_request(&prompt(71, LEN), 10);
    let keys = page_keys(&request.tokens, PAGE);
    prefill(&prefiller, &request.tokens[..5 * PAGE + 1], CacheMode::All).await;
    put_page(&other, &decoder, &request.tokens, 5, HUGE).await;
    let bystander = decode(&fresh, &decode_request(&request.tokens[..5 * PAGE + 1], 1)).await;
    assert_eq!(bystander.start.pages_l2, 5);
    // The values do not tell which page is wrong.
    let (status, error) = try_decode(&fresh, &request).await.unwrap_err();
    assert_eq!((status, error.code), (503, ErrorCode::PagesUnusable), "{}", error.message);
    assert_eq!(usable_pages(&other, &keys).await, 0);
    // The engine answers before it publishes its new state.
    assert!(caches(&fresh, 0).await, "the engine keeps pages that it must suspect");
    for engine in [&fresh, &decoder] {
        assert_eq!(decode(engine, &request).await.tokens, expected(&request.tokens, 10));
    }
}

/// Waits until the store has the pages.
async fn stores(client: &Client, keys: &[PageKey]) -> bool {
    eventually(async || !client.exists(keys, soon()).await.contains(&false)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_publishes_nothing_that_it_computed_from_nan() {
    let node = node(any_port()).await;
    let prefiller = attached(Role::Prefill, &node).await;
    let other = client(&node, &prefiller).await;
    let tokens = prompt(20, LEN);
    let keys = page_keys(&tokens, PAGE);
    put_nan(&other, &prefiller, &tokens, 0).await;
    let (status, error) = try_prefill(&prefiller, &tokens).await.unwrap_err();
    assert_eq!((status, error.code), (503, ErrorCode::PagesUnusable), "{}", error.message);
    assert_eq!((usable_pages(&other, &keys).await, prefiller.state().l1_pages_cached), (0, 0));
    assert_eq!(try_prefill(&prefiller, &tokens).await, Ok(PAGES as u32));
    assert_eq!(usable_pages(&other, &keys).await, PAGES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_with_damaged_weights_gives_an_error_and_no_pages() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(model_dir()).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
    }
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    // All bits set are NaN in every floating-point type.
    bytes[end - 4096..].fill(0xFF);
    std::fs::write(&weights, bytes).unwrap();
    let store = MemoryStore::new();
    let mut settings = options(Role::Decode);
    settings.preloaded = None;
    settings.model_dir = folder.path().to_path_buf();
    let decoder = engine_with(settings, &store).await;
    let (status, error) = try_decode(&decoder, &decode_request(&prompt(30, LEN), 10)).await.unwrap_err();
    assert_eq!((status, error.code), (500, ErrorCode::Internal), "{}", error.message);
    assert!(error.message.contains("not finite"), "{}", error.message);
    assert_eq!(metric(&decoder, "larder_engine_suspect_pages_total").await, 0.0);
    assert!(is_idle(&decoder).await);
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
            let follows = async || counter(&node, "follows") >= (round + 1) * PAGES;
            assert!(eventually(follows).await, "decode does not follow");
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
async fn node_counts_no_hit_for_pages_that_the_prefill_sealed_before() {
    let node = node(any_port()).await;
    let prefiller = attached(Role::Prefill, &node).await;
    let decoder = attached(Role::Decode, &node).await;
    let request = awaiting(51, 10);
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_followed as usize, answer.start.pages_l2), (PAGES, 0));
    assert_eq!(answer.tokens, expected(&request.tokens, 10));
    let hits = counter(&node, "pages_hit_l2") + counter(&node, "pages_hit_l3");
    assert_eq!((hits, counter(&node, "pages_followed")), (0, PAGES), "a prompt that nobody had");
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
