//! Engines attached to a real store node over TCP.

use crate::common::real::*;
use crate::common::*;
use larder_client::{Client, ClientOptions, NewPage, PutOutcome, StoreUrl};
use larder_format::{PageKey, chunk_crcs, page_keys};
use larder_node::{Node, NodeOptions};
use larder_worker::api::{CacheMode, EngineInfo};
use larder_worker::store::{NodeStore, PageStore, PutSource};
use larder_worker::{Engine, Role};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

const LEN: usize = 203;
const PAGES: usize = (LEN - 1) / PAGE;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_and_decode_share_pages_through_a_node() {
    let node = node(any_port()).await;
    let prefiller = attached(Role::Prefill, &node).await;
    let decoder = attached_by(patient(Role::Decode), &node).await;
    let mut request = decode_request(&prompt(1, LEN), 40);
    request.await_pages = PAGES as u32;
    let computing = async {
        // A page that is there before counts as reused.
        assert!(eventually(async || counter(&node, "follows") >= PAGES).await, "decode does not follow");
        prefill(&prefiller, &request.tokens, CacheMode::All).await
    };
    let (answer, computed) = tokio::join!(decode(&decoder, &request), computing);
    let expected = expected(&request.tokens, 40);
    assert_eq!(answer.tokens, expected);
    assert_eq!((answer.start.pages_followed as usize, computed.pages_computed as usize), (PAGES, PAGES));

    decoder.shutdown().await;
    let decoder = attached(Role::Decode, &node).await;
    let mut tokens = request.tokens.clone();
    tokens.extend(&answer.tokens);
    let sealed = (tokens.len() - 1) / PAGE;
    tokens.push(7);
    let next = decode(&decoder, &decode_request(&tokens, 5)).await;
    assert_eq!(next.start.pages_l2 as usize, sealed, "decode published the generated pages");
    assert_eq!(next.tokens, crate::common::expected(&tokens, 5));

    let url = format!("larder://{}/", node.addr()).parse().unwrap();
    let observer = Client::attach(url, None, ClientOptions::default());
    assert!(observer.ready(Duration::from_secs(60)).await);
    let mut roles = Vec::new();
    // Withdrawal is asynchronous: poll for up to a minute.
    for _ in 0..1200 {
        let members = observer.members(Instant::now() + Duration::from_secs(30)).await.unwrap();
        roles = members.into_iter().map(|m| serde_json::from_value::<EngineInfo>(m.info).unwrap().role).collect();
        roles.sort();
        if roles == [Role::Prefill, Role::Decode] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(roles, [Role::Prefill, Role::Decode], "the decode engine that ended is withdrawn");
    prefiller.shutdown().await;
    decoder.shutdown().await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_generations_reach_the_eviction_policy_of_a_node() {
    let node = node(any_port()).await;
    let decoder = attached(Role::Decode, &node).await;
    let figures = || {
        let status = node.status();
        let pointers = ["/tiers/l2/eviction/pages_ended", "/counters/generations_ended", "/counters/tokens_generated"];
        pointers.map(|pointer| status.pointer(pointer).and_then(serde_json::Value::as_u64).unwrap())
    };
    let request = decode_request(&prompt(4, LEN), 40);
    let mut private = request.clone();
    private.cache = CacheMode::None;
    decode(&decoder, &private).await;
    assert_eq!(decode(&decoder, &request).await.tokens.len(), 40);
    // The pages below the last token that was computed, and nothing of the private request.
    let expected = [((LEN + 40 - 2) / PAGE) as u64, 1, 40];
    assert!(eventually(async || figures() == expected).await, "the report follows the commits: {:?}", figures());
    decoder.shutdown().await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_restarting_empty_leaves_answers_unchanged() {
    let first = node(any_port()).await;
    let address = first.addr();
    let prefiller = attached(Role::Prefill, &first).await;
    let decoder = attached(Role::Decode, &first).await;
    let request = decode_request(&prompt(2, LEN), 10);
    let expected = expected(&request.tokens, 10);
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    first.shutdown().await;
    assert!(store_is(&decoder, false).await && store_is(&prefiller, false).await);
    let mut alone = request.clone();
    alone.await_pages = PAGES as u32;
    assert_eq!(decode(&decoder, &alone).await.tokens, expected);

    let second = node(address).await;
    assert!(store_is(&prefiller, true).await);
    // The new node cannot know if the pages were forgotten, so it refuses the copies.
    let refused = prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!((refused.pages_l1 as usize, refused.pages_lost as usize), (PAGES, PAGES));
    assert!(caches(&prefiller, 0).await);
    let again = prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!((again.pages_computed as usize, again.pages_lost), (PAGES, 0));
    let fresh = attached(Role::Decode, &second).await;
    let answer = decode(&fresh, &request).await;
    assert_eq!((answer.tokens, answer.start.pages_l2 as usize), (expected, PAGES));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_refuses_a_part_that_was_damaged_after_its_checksums() {
    let node = node(any_port()).await;
    let engine = attached(Role::Prefill, &node).await;
    let namespace = engine.info().descriptor.clone();
    let parts = namespace.geometry.part_table();
    let url = format!("larder://{}/", node.addr()).parse().unwrap();
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    assert!(client.ready(Duration::from_secs(60)).await);
    let store: &dyn PageStore = &NodeStore::new(client, None);
    let soon = || Instant::now() + Duration::from_secs(30);
    for (damage, expected) in [(1u8, PutOutcome::Lost), (0, PutOutcome::Stored), (1, PutOutcome::AlreadyThere)] {
        let page = NewPage::first(PageKey::chain(None, &[1]));
        let mut put = store.put(page, PutSource::Computed, soon());
        for (part, &length) in parts.iter().enumerate() {
            let mut bytes = vec![7u8; length as usize];
            let crcs: Vec<u32> = chunk_crcs(&bytes).collect();
            bytes[part] ^= damage;
            put.write_part(part, &bytes, &crcs);
        }
        assert_eq!(put.commit(soon()).await.0, expected);
    }
}

async fn durable_node(dir: &Path, listen: SocketAddr) -> Node {
    let options = NodeOptions {
        listen,
        data_dir: Some(dir.to_path_buf()),
        l2_bytes: 64 << 20,
        l3_bytes: 64 << 20,
        ..Default::default()
    };
    Node::start(options).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_pages_do_not_return_from_l1() {
    let dirs = [tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir_in("/var/tmp").unwrap()];
    let first = durable_node(dirs[0].path(), any_port()).await;
    let second = durable_node(dirs[1].path(), any_port()).await;
    let addresses = [first.addr(), second.addr()];
    let url: StoreUrl = format!("larder://{},{}/", addresses[0], addresses[1]).parse().unwrap();
    let mut settings = options(Role::Prefill);
    settings.store = url.clone().into();
    let prefiller = Engine::start(settings).await.unwrap();
    assert!(connected(&prefiller, 2).await);
    let tokens = prompt(4, LEN);
    prefill(&prefiller, &tokens, CacheMode::All).await;

    let namespace = prefiller.info().descriptor.clone();
    let operator = Client::attach(url, Some(namespace), ClientOptions::default());
    assert!(operator.ready(Duration::from_secs(60)).await);
    let soon = || Instant::now() + Duration::from_secs(30);
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let stored = async || operator.exists(keys, soon()).await.iter().filter(|&&exists| exists).count();
    assert_eq!(stored().await, PAGES);
    // Half of the pages before a restart of the nodes, and half after it. No engine hears of it.
    assert!(operator.forget(&keys[PAGES / 2..], soon()).await.complete);
    let copied = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((copied.pages_lost as usize, stored().await), (PAGES - PAGES / 2, PAGES / 2));

    assert!(operator.forget(&keys[..PAGES / 2], soon()).await.complete);
    first.shutdown().await;
    second.shutdown().await;
    assert!(connected(&prefiller, 0).await);
    let nodes = [durable_node(dirs[0].path(), addresses[0]).await, durable_node(dirs[1].path(), addresses[1]).await];
    assert!(connected(&prefiller, 2).await && operator.ready(Duration::from_secs(60)).await);
    assert_eq!(prefiller.state().l1_pages_cached as usize, PAGES / 2);
    let copied = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!(copied.pages_l1 as usize, PAGES / 2, "pages that no node knows any more");
    let is_resurrected = operator.exists(&keys[..PAGES / 2], soon()).await.contains(&true);
    assert!(!is_resurrected);
    assert!(caches(&prefiller, 0).await);
    let computed = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((computed.pages_lost, stored().await), (0, PAGES), "computed anew");
    for node in nodes {
        node.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_share_pages_only_with_equal_numerics() {
    let node = node(any_port()).await;
    let prefiller = attached_with(Role::Prefill, &node, Some("a")).await;
    let request = decode_request(&prompt(3, LEN), 5);
    let expected = expected(&request.tokens, 5);
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    let other = attached_with(Role::Decode, &node, Some("b")).await;
    let answer = decode(&other, &request).await;
    assert_eq!((answer.start.pages_l2, answer.tokens), (0, expected.clone()));
    let same = attached_with(Role::Decode, &node, Some("a")).await;
    let answer = decode(&same, &request).await;
    assert_eq!((answer.start.pages_l2 as usize, answer.tokens), (PAGES, expected));
    // The checksums from the node prove the pages in L1. A damaged page leaves it.
    assert!(scrubs_l1(&same, PAGES).await, "the scrub did not verify {PAGES} pages of L1");
    assert_eq!(metric(&same, "larder_engine_l1_corrupt_pages_total").await, 0.0);
    assert!(same.state().l1_pages_cached as usize >= PAGES);
}
