//! L1 pages are verified, and forgotten pages leave L1.

use crate::common::*;
use larder_format::page_keys;
use larder_worker::api::{CacheMode, ErrorCode, ForgetRequest, ForgetResponse};
use larder_worker::{EngineHandle, Role};
use std::time::Duration;

const LEN: usize = 100;
const PAGES: usize = (LEN - 1) / PAGE;
const HOLD_MS: u64 = 60_000;

async fn forget(engine: &EngineHandle, tokens: &[u32], hold_ms: u64) -> ForgetResponse {
    let request = ForgetRequest { tokens: tokens[..PAGES * PAGE].to_vec(), hold_ms, deadline_ms: 30_000 };
    let response = post(engine, "/v1/forget", &request).await;
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_l1_page_is_never_put() {
    let store = MemoryStore::new();
    let tokens = prompt(80, LEN);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    prefill(&engine(Role::Prefill, &store).await, &tokens, CacheMode::All).await;
    let good: Vec<_> = keys.iter().map(|key| store.page(key).unwrap()).collect();

    let second = engine(Role::Prefill, &store).await;
    store.flip_bits_in_l1(true);
    assert_eq!(prefill(&second, &tokens, CacheMode::All).await.pages_l2 as usize, PAGES);
    store.flip_bits_in_l1(false);
    // A node that restarted empty: the engine puts its L1 pages again.
    store.clear();
    prefill(&second, &tokens, CacheMode::All).await;
    for (key, good) in keys.iter().zip(&good) {
        assert!(store.page(key).is_some_and(|page| page == *good), "computed anew instead of copied");
    }
    assert!(metric(&second, "larder_engine_l1_corrupt_pages_total").await >= 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn part_damaged_after_its_checksums_is_put_again_from_l1() {
    let tokens = prompt(89, LEN);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let other = MemoryStore::new();
    prefill(&engine(Role::Prefill, &other).await, &tokens, CacheMode::All).await;
    let store = MemoryStore::new();
    let prefiller = engine(Role::Prefill, &store).await;
    // Puts of computed pages, then puts of copies from L1.
    for copies in [0, PAGES] {
        store.flip_bits_in_puts(true);
        let damaged = prefill(&prefiller, &tokens, CacheMode::All).await;
        assert_eq!((damaged.pages_l1 as usize, damaged.pages_lost as usize), (copies, PAGES));
        assert_eq!(store.len(), 0, "the store took damaged bytes");
        store.flip_bits_in_puts(false);
        assert!(eventually(async || store.len() >= PAGES).await, "the engine puts its pages again");
        for key in keys {
            assert_eq!(store.page(key), other.page(key));
        }
        store.clear();
    }
    assert_eq!(metric(&prefiller, "larder_engine_l1_corrupt_pages_total").await, 0.0, "L1 was intact");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scrub_drops_a_damaged_page_without_a_request() {
    let store = MemoryStore::new();
    let tokens = prompt(82, LEN);
    let first = engine(Role::Prefill, &store).await;
    prefill(&first, &tokens, CacheMode::All).await;
    let second = engine(Role::Prefill, &store).await;
    store.flip_bits_in_l1(true);
    prefill(&second, &tokens, CacheMode::All).await;
    // First: before the engine publishes its state, it seems to cache nothing.
    let finds = async || metric(&second, "larder_engine_l1_corrupt_pages_total").await >= 1.0;
    assert!(eventually(finds).await, "the scrub finds a damaged page");
    assert!(caches(&second, 0).await, "the scrub finds every damaged page");
    assert!(scrubs_l1(&first, PAGES).await, "the scrub verifies intact pages");
    assert_eq!(metric(&first, "larder_engine_l1_corrupt_pages_total").await, 0.0);
    assert_eq!(first.state().l1_pages_cached as usize, PAGES, "intact pages stay");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_page_leaves_l1_and_is_computed_anew() {
    let store = MemoryStore::new();
    let tokens = prompt(81, LEN);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let prefiller = engine(Role::Prefill, &store).await;
    prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!(forget(&prefiller, &tokens, HOLD_MS).await.pages as usize, PAGES);
    store.forget_durably(keys);
    forget(&prefiller, &tokens, 0).await;
    let again = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((again.pages_l1, again.pages_computed as usize, again.pages_lost), (0, PAGES, 0));
    assert_eq!(store.len(), PAGES, "a new computation may store the pages");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_page_is_neither_cached_nor_put() {
    let store = MemoryStore::new();
    let tokens = prompt(83, LEN);
    let prefiller = engine(Role::Prefill, &store).await;
    forget(&prefiller, &tokens, HOLD_MS).await;
    let held = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((held.pages_computed as usize, held.pages_lost as usize, store.puts_begun()), (PAGES, PAGES, 0));
    assert!(caches(&prefiller, 0).await);
    let decoder = engine(Role::Decode, &store).await;
    forget(&decoder, &tokens, HOLD_MS).await;
    let request = decode_request(&tokens, 40);
    assert_eq!(decode(&decoder, &request).await.tokens, expected(&tokens, 40));
    assert_eq!((store.puts_begun(), decoder.state().l1_pages_cached), (0, 0), "generated pages follow held ones");
    forget(&prefiller, &tokens, 0).await;
    let free = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((free.pages_lost, store.len(), caches(&prefiller, PAGES).await), (0, PAGES, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forget_waits_for_puts_in_flight() {
    let store = MemoryStore::new();
    let tokens = prompt(84, LEN);
    let prefiller = engine(Role::Prefill, &store).await;
    store.delay_commits(Duration::from_millis(700));
    let forgetting = async {
        while store.puts_begun() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        forget(&prefiller, &tokens, HOLD_MS).await;
        // The store forgets now. A put that ended later would bring its page back.
        store.clear();
    };
    tokio::join!(prefill(&prefiller, &tokens, CacheMode::All), forgetting);
    assert!(eventually(async || store.puts_open() == 0).await, "the engine ends its puts");
    assert_eq!(store.len(), 0);
    let late = ForgetRequest { tokens: tokens.clone(), hold_ms: HOLD_MS + 1, deadline_ms: 1 };
    let refused = post(&prefiller, "/v1/forget", &late).await;
    assert_eq!(refused.json::<larder_worker::api::ApiError>().await.unwrap().code, ErrorCode::BadRequest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_page_is_put_again_while_l1_holds_it() {
    let tokens = prompt(86, LEN);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let other = MemoryStore::new();
    prefill(&engine(Role::Prefill, &other).await, &tokens, CacheMode::All).await;
    let store = MemoryStore::new();
    store.lose_puts(true);
    let prefiller = engine(Role::Prefill, &store).await;
    assert_eq!(prefill(&prefiller, &tokens, CacheMode::All).await.pages_lost as usize, PAGES);
    store.lose_puts(false);
    assert!(eventually(async || store.len() >= PAGES).await, "the engine puts its pages again");
    for key in keys {
        assert_eq!(store.page(key), other.page(key));
    }
    let published = async || metric(&prefiller, "larder_engine_unpublished_pages").await == 0.0;
    assert!(eventually(published).await, "the engine learns their origin");
    // The pages have an origin now, so the store takes copies of them.
    store.clear();
    assert_eq!(prefill(&prefiller, &tokens, CacheMode::All).await.pages_lost, 0);
    assert_eq!(store.len(), PAGES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_pages_that_found_the_store_busy_are_put_again() {
    let store = MemoryStore::new();
    store.answer_busy_to_puts(true);
    let decoder = engine(Role::Decode, &store).await;
    let request = decode_request(&prompt(89, 50), 60);
    let answer = decode(&decoder, &request).await;
    // The last token was sampled but never computed.
    let computed = [&request.tokens[..], &answer.tokens[..answer.tokens.len() - 1]].concat();
    let keys = page_keys(&computed, PAGE);
    assert!(keys.len() > request.tokens.len() / PAGE && store.len() == 0, "the answer has pages of its own");
    store.answer_busy_to_puts(false);
    let stored = async || keys.iter().all(|key| store.page(key).is_some());
    assert!(eventually(stored).await, "the engine puts its pages again");
    assert_eq!(metric(&decoder, "larder_engine_abandoned_pages_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_page_that_was_forgotten_does_not_come_back() {
    let store = MemoryStore::new();
    let tokens = prompt(87, LEN);
    store.lose_puts(true);
    let prefiller = engine(Role::Prefill, &store).await;
    prefill(&prefiller, &tokens, CacheMode::All).await;
    // Not through the router, so the engine does not hear of it.
    store.forget_durably(&page_keys(&tokens, PAGE)[..PAGES]);
    store.lose_puts(false);
    assert!(caches(&prefiller, 0).await, "the store refuses the pages, and they leave L1");
    assert_eq!(store.len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_page_stays_in_l1_if_its_node_restarted() {
    let store = MemoryStore::new();
    let tokens = prompt(88, LEN);
    store.lose_puts(true);
    let prefiller = engine(Role::Prefill, &store).await;
    prefill(&prefiller, &tokens, CacheMode::All).await;
    let unpublished = async || metric(&prefiller, "larder_engine_unpublished_pages").await;
    assert!(eventually(async || unpublished().await >= PAGES as f64).await, "the pages wait for another put");
    // The node knows none of its earlier forgets now.
    store.restart();
    store.lose_puts(false);
    assert!(eventually(async || unpublished().await == 0.0).await, "the engine gives up");
    assert_eq!((caches(&prefiller, PAGES).await, store.len()), (true, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_of_a_forgotten_page_leaves_l1() {
    let store = MemoryStore::new();
    let tokens = prompt(85, LEN);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let prefiller = engine(Role::Prefill, &store).await;
    prefill(&prefiller, &tokens, CacheMode::All).await;
    // No forget reaches the engine: it was cut off, or the pages were forgotten by another client.
    store.forget_durably(keys);
    let copied = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((copied.pages_lost as usize, store.len()), (PAGES, 0), "a forgotten page does not come back");
    assert!(caches(&prefiller, 0).await);
    let again = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((again.pages_computed as usize, store.len()), (PAGES, PAGES));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_page_is_copied_from_l1_by_its_writer_and_its_readers() {
    let store = MemoryStore::new();
    let tokens = prompt(86, LEN);
    let writer = engine(Role::Prefill, &store).await;
    prefill(&writer, &tokens, CacheMode::All).await;
    let reader = engine(Role::Prefill, &store).await;
    prefill(&reader, &tokens, CacheMode::All).await;
    for engine in [&writer, &reader] {
        store.clear();
        let copied = prefill(engine, &tokens, CacheMode::All).await;
        assert_eq!((copied.pages_l1 as usize, copied.pages_lost, store.len()), (PAGES, 0, PAGES));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_from_before_a_restart_of_the_store_leaves_l1() {
    let store = MemoryStore::new();
    let tokens = prompt(87, LEN);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let prefiller = engine(Role::Prefill, &store).await;
    prefill(&prefiller, &tokens, CacheMode::All).await;
    store.forget_durably(keys);
    // The store knows no more that it has forgotten the pages.
    store.restart();
    let copied = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((copied.pages_lost as usize, store.len()), (PAGES, 0));
    assert!(caches(&prefiller, 0).await);
    let again = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((again.pages_computed as usize, store.len()), (PAGES, PAGES));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespace_depends_on_the_numerics() {
    let store = MemoryStore::new();
    let start = |numerics: Option<&str>| {
        let mut settings = options(Role::Decode);
        settings.numerics = numerics.map(str::to_string);
        let store = store.clone();
        async move { engine_with(settings, &store).await.info().clone() }
    };
    let measured = start(None).await;
    assert_eq!(start(None).await.descriptor, measured.descriptor, "one build on one machine rounds alike");
    let declared = start(Some("a")).await;
    assert_ne!(declared.descriptor.id(), measured.descriptor.id());
    assert_ne!(start(Some("b")).await.descriptor.id(), declared.descriptor.id());
    assert_eq!(start(Some("a")).await.descriptor.id(), declared.descriptor.id());
    let as_measured = start(Some(&measured.numerics)).await;
    assert_eq!(as_measured.descriptor.id(), measured.descriptor.id(), "a measured name can be declared");
}
