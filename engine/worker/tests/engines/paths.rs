//! The generated tokens are the same for every source of the prompt's pages.

use crate::common::*;
use larder_format::{KvDtype, page_keys};
use larder_model::{Activations, LoadOptions, Model, WeightFormat};
use larder_worker::api::{CacheMode, DecodeEvent, FinishReason};
use larder_worker::{Preloaded, Role};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 203;
const PAGES: usize = (LEN - 1) / PAGE;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_match_when_computed_or_read_from_l1_or_store() {
    let store = MemoryStore::new();
    let first = engine(Role::Decode, &store).await;
    let request = decode_request(&prompt(1, LEN), 40);
    let expected = expected(&request.tokens, 40);

    let mut uncached = request.clone();
    uncached.cache = CacheMode::None;
    let answer = decode(&first, &uncached).await;
    assert_eq!(answer.tokens, expected, "nothing cached");
    assert_eq!(answer.last, DecodeEvent::End { finish_reason: FinishReason::Length, completion_tokens: 40 });
    assert_eq!((answer.start.tokens_computed as usize, answer.start.prompt_tokens as usize), (LEN, LEN));
    assert_eq!((store.puts_begun(), first.state().l1_pages_cached), (0, 0), "and nothing kept");

    let answer = decode(&first, &request).await;
    assert_eq!((answer.tokens, answer.start.pages_l1), (expected.clone(), 0), "cold");
    let answer = decode(&first, &request).await;
    assert_eq!((answer.tokens, answer.start.pages_l1 as usize), (expected.clone(), PAGES), "from L1");
    assert_eq!(answer.start.tokens_computed as usize, LEN - PAGES * PAGE);

    let mut store_only = request.clone();
    store_only.cache = CacheMode::Store;
    let answer = decode(&first, &store_only).await;
    let start = answer.start;
    assert_eq!((answer.tokens, start.pages_l1, start.pages_l2 as usize), (expected.clone(), 0, PAGES), "L1 ignored");

    let second = engine(Role::Decode, &store).await;
    let answer = decode(&second, &request).await;
    let start = answer.start;
    assert_eq!((answer.tokens, start.pages_l1, start.pages_l2 as usize), (expected, 0, PAGES), "another engine");
    assert!(is_idle(&first).await && is_idle(&second).await);
    first.shutdown().await;
    second.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_generations_are_reported_once_their_pages_are_put() {
    let store = MemoryStore::new();
    store.delay_commits(Duration::from_millis(300));
    let engine = engine(Role::Decode, &store).await;
    let request = decode_request(&prompt(1, LEN), 40);
    let mut private = request.clone();
    private.cache = CacheMode::None;
    decode(&engine, &private).await;
    decode(&engine, &request).await;
    assert!(eventually(async || !store.generations_ended().is_empty()).await);
    // The pages below the last token that was computed, and nothing of the private request.
    assert_eq!(store.generations_ended(), [((LEN + 40 - 2) / PAGE, 40)]);
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_type_of_pages_and_weights_gives_one_answer_on_every_path() {
    for (kv_dtype, weights, activations) in [
        (KvDtype::F32, WeightFormat::Stored, Activations::F32),
        (KvDtype::F16, WeightFormat::Stored, Activations::Narrow),
        (KvDtype::Bf16, WeightFormat::Q8, Activations::F32),
        (KvDtype::Bf16, WeightFormat::Q8, Activations::Narrow),
    ] {
        let load = LoadOptions { kv_dtype: Some(kv_dtype), weights, activations, ..LoadOptions::default() };
        let model = Arc::new(Model::load_with(&model_dir(), &load, &|_, _| ()).unwrap());
        let loaded = Preloaded { model, tokenizer: LOADED.tokenizer.clone() };
        let with_role = |role| {
            let mut settings = patient(role);
            settings.preloaded = Some(loaded.clone());
            settings
        };
        let store = MemoryStore::new();
        let prefiller = engine_with(with_role(Role::Prefill), &store).await;
        let decoder = engine_with(with_role(Role::Decode), &store).await;
        let request = decode_request(&prompt(21, LEN), 20);
        let mut uncached = request.clone();
        uncached.cache = CacheMode::None;
        let computed = decode(&decoder, &uncached).await;
        prefill(&prefiller, &request.tokens, CacheMode::All).await;
        let read = decode(&decoder, &request).await;
        let cached = decode(&decoder, &request).await;
        assert_eq!((read.start.pages_l2 as usize, cached.start.pages_l1 as usize), (PAGES, PAGES), "{load:?}");
        assert_eq!((&read.tokens, &cached.tokens), (&computed.tokens, &computed.tokens), "{load:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_follows_pages_while_prefill_writes_them() {
    for (seed, chunk_tokens) in [(2, 64), (3, 7), (4, 1000)] {
        let store = MemoryStore::new();
        let mut settings = options(Role::Prefill);
        settings.chunk_tokens = chunk_tokens;
        let prefiller = engine_with(settings, &store).await;
        let decoder = engine_with(patient(Role::Decode), &store).await;
        let mut request = decode_request(&prompt(seed, LEN), 20);
        request.await_pages = PAGES as u32;
        let expected = expected(&request.tokens, 20);

        let waiting = async { decode(&decoder, &request).await };
        let computing = async {
            // A page that is there before counts as reused.
            assert!(eventually(async || store.follow_calls() >= PAGES).await, "decode does not follow");
            let response = prefill(&prefiller, &request.tokens, CacheMode::All).await;
            let stored = store.keys();
            let keys = page_keys(&request.tokens, PAGE);
            assert!(keys[..PAGES].iter().all(|key| stored.contains(key)), "put before the prefill answered");
            response
        };
        let (answer, computed) = tokio::join!(waiting, computing);
        assert_eq!((computed.pages as usize, computed.pages_computed as usize), (PAGES, PAGES));
        assert_eq!(answer.tokens, expected);
        assert_eq!(answer.start.pages_followed as usize, PAGES);

        let again = prefill(&prefiller, &request.tokens, CacheMode::All).await;
        assert_eq!((again.pages_l1 as usize, again.pages_computed), (PAGES, 0));
        let answer = decode(&engine(Role::Decode, &store).await, &request).await;
        assert_eq!((answer.tokens, answer.start.pages_l2 as usize), (expected, PAGES));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_turn_reads_generated_pages_from_the_store() {
    let store = MemoryStore::new();
    let request = decode_request(&prompt(5, 50), 60);
    let first = engine(Role::Decode, &store).await;
    let answer = decode(&first, &request).await;
    let mut tokens = request.tokens.clone();
    tokens.extend(&answer.tokens);
    // The last token was sampled but never computed.
    let sealed = (tokens.len() - 1) / PAGE;
    tokens.extend(prompt(6, 30));
    let next = decode_request(&tokens, 10);
    let expected = expected(&tokens, 10);
    first.shutdown().await;
    assert_eq!(store.len(), sealed);
    let second = engine(Role::Decode, &store).await;
    let answer = decode(&second, &next).await;
    assert_eq!((answer.start.pages_l2 as usize, answer.tokens), (sealed, expected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_prefill_costs_only_its_unsealed_pages() {
    let store = MemoryStore::new();
    let prefiller = engine(Role::Prefill, &store).await;
    let mut request = decode_request(&prompt(7, LEN), 12);
    request.await_pages = PAGES as u32;
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    let keys = page_keys(&request.tokens, PAGE);
    for key in &keys[5..PAGES] {
        store.forget(key);
    }
    // The writer died within page 5: pages before it are sealed, later ones never began.
    store.abort(keys[5]);
    let decoder = engine(Role::Decode, &store).await;
    let answer = decode(&decoder, &request).await;
    assert_eq!(answer.tokens, expected(&request.tokens, 12));
    assert_eq!((answer.start.pages_l2, answer.start.pages_followed), (5, 0));
    assert_eq!(answer.start.tokens_computed as usize, LEN - 5 * PAGE);
    assert!(is_idle(&decoder).await);
    assert_eq!(store.len(), (LEN + 12 - 1) / PAGE, "decode published the missing pages");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_middle_page_is_the_only_page_computed() {
    let store = MemoryStore::new();
    let request = decode_request(&prompt(8, LEN), 12);
    prefill(&engine(Role::Prefill, &store).await, &request.tokens, CacheMode::All).await;
    let keys = page_keys(&request.tokens, PAGE);
    store.forget(&keys[3]);
    let mut request = request;
    // Pages after the gap are outside the lookup's prefix. Only following can read them.
    request.await_pages = PAGES as u32;
    let answer = decode(&engine(Role::Decode, &store).await, &request).await;
    assert_eq!(answer.tokens, expected(&request.tokens, 12));
    assert_eq!((answer.start.pages_l2, answer.start.pages_followed as usize), (3, PAGES - 4));
    assert_eq!(answer.start.tokens_computed as usize, PAGE + LEN - PAGES * PAGE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_restores_lost_store_pages_from_l1() {
    let store = MemoryStore::new();
    let prefiller = engine(Role::Prefill, &store).await;
    let tokens = prompt(9, LEN);
    prefill(&prefiller, &tokens, CacheMode::All).await;
    let keys = store.keys();
    store.clear();
    let response = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((response.pages_l1 as usize, response.pages_computed), (PAGES, 0));
    assert_eq!(store.keys(), keys);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_compute_a_shared_prompt_once() {
    let store = MemoryStore::new();
    let decoder = engine(Role::Decode, &store).await;
    let shared = prompt(10, 160);
    let requests: Vec<_> = (0..6)
        .map(|i| {
            let mut tokens = shared.clone();
            tokens.extend(prompt(20 + i, 5 + i as usize));
            decode_request(&tokens, 10)
        })
        .collect();
    let answers = futures::future::join_all(requests.iter().map(|request| decode(&decoder, request))).await;
    for (request, answer) in requests.iter().zip(&answers) {
        assert_eq!(answer.tokens, expected(&request.tokens, 10));
    }
    let tails: usize = requests.iter().map(|r| r.tokens.len() - 160 + 9).sum();
    let computed = metric(&decoder, "larder_engine_tokens_computed_total").await;
    assert_eq!(computed as usize, 160 + tails);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generation_ends_at_a_stop_string() {
    let store = MemoryStore::new();
    let decoder = engine(Role::Decode, &store).await;
    let mut request = decode_request(&prompt(11, 40), 30);
    let whole = decode(&decoder, &request).await;
    assert_eq!(whole.text, LOADED.tokenizer.decode(&whole.tokens));
    let middle = whole.text.char_indices().nth(whole.text.chars().count() / 2).unwrap().0;
    let stop: String = whole.text[middle..].chars().take(3).collect();
    request.sampling.stop = vec![stop.clone()];
    let stopped = decode(&decoder, &request).await;
    assert_eq!(stopped.text, whole.text[..whole.text.find(&stop).unwrap()]);
    let DecodeEvent::End { finish_reason, completion_tokens } = stopped.last else { panic!() };
    assert_eq!((finish_reason, completion_tokens as usize), (FinishReason::Stop, stopped.tokens.len()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_with_several_parts_round_trip() {
    let large = |role| {
        let mut settings = options(role);
        settings.page_tokens = 256;
        settings
    };
    assert!(LOADED.model.geometry(256).part_count() > 1, "the test must need it");
    let store = MemoryStore::new();
    let prefiller = engine_with(large(Role::Prefill), &store).await;
    let decoder = engine_with(large(Role::Decode), &store).await;
    let request = decode_request(&prompt(12, 600), 10);
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_l2, answer.tokens), (2, expected(&request.tokens, 10)));
}
