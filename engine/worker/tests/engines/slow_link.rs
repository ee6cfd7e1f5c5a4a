//! Pages that L1 must not put again, by engines behind a slow link to a real node.

use crate::common::link::Link;
use crate::common::real::{any_port, store_is};
use crate::common::*;
use futures::future::BoxFuture;
use larder_client::{Client, ClientOptions, Lookup, NewPage, PartsReceived, PutOptions, PutOutcome};
use larder_format::{NamespaceDescriptor, PageKey, PageOrigin, page_keys};
use larder_model::KvPage;
use larder_node::{Node, NodeOptions};
use larder_worker::api::CacheMode;
use larder_worker::store::{Followed, Got, LookupPurpose, NodeStore, OpenPut, PageStore, PutSource};
use larder_worker::{Engine, Role};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LEN: usize = 100;
const PAGES: usize = (LEN - 1) / PAGE;
/// Bytes per second of a link: four times the lowest rate that counts as fast enough.
const RATE: usize = 256_000;

/// Starts a node with an L3. A client that mapped its memory would not use the link.
async fn durable_node(dir: &Path) -> Node {
    let options = NodeOptions {
        listen: any_port(),
        data_dir: Some(dir.to_path_buf()),
        l2_bytes: 64 << 20,
        l3_bytes: 64 << 20,
        share_memory: Some(false),
        ..Default::default()
    };
    Node::start(options).await.unwrap()
}

async fn client(address: SocketAddr, namespace: &NamespaceDescriptor) -> Client {
    let url = format!("larder://{address}/").parse().unwrap();
    let client = Client::attach(url, Some(namespace.clone()), ClientOptions::default());
    assert!(client.ready(Duration::from_secs(60)).await);
    client
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Client whose pages lose a bit in L1, after it has verified them.
struct DamagingL1 {
    nodes: NodeStore,
    flips_bits: AtomicBool,
}

impl PageStore for DamagingL1 {
    fn lookup(&self, keys: Vec<PageKey>, purpose: LookupPurpose, deadline: Instant) -> BoxFuture<'_, Lookup> {
        self.nodes.lookup(keys, purpose, deadline)
    }

    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<Got>> {
        Box::pin(async move {
            let mut got = self.nodes.get(pages, deadline).await;
            for got in &mut got {
                if let Got::Hit(page, _) = got
                    && self.flips_bits.load(Ordering::Relaxed)
                {
                    page.as_mut()[77] ^= 4;
                }
            }
            got
        })
    }

    fn follow(
        &self,
        key: PageKey,
        buffer: KvPage,
        parts: PartsReceived,
        deadline: Instant,
    ) -> BoxFuture<'_, (KvPage, Followed)> {
        self.nodes.follow(key, buffer, parts, deadline)
    }

    fn put(&self, page: NewPage, source: PutSource, deadline: Instant) -> Box<dyn OpenPut> {
        self.nodes.put(page, source, deadline)
    }

    fn forget_copies(&self, pages: Vec<(PageKey, Option<PageOrigin>)>, deadline: Instant) -> BoxFuture<'_, usize> {
        self.nodes.forget_copies(pages, deadline)
    }

    fn generation_ended(&self, keys: Vec<PageKey>, tokens: u32, deadline: Instant) -> BoxFuture<'_, ()> {
        self.nodes.generation_ended(keys, tokens, deadline)
    }

    fn can_judge_copy(&self, key: &PageKey, origin: PageOrigin) -> Option<bool> {
        self.nodes.can_judge_copy(key, origin)
    }

    fn nodes_connected(&self) -> usize {
        self.nodes.nodes_connected()
    }

    fn pages_damaged(&self) -> u64 {
        self.nodes.pages_damaged()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_forgotten_while_the_link_was_cut_do_not_return_from_l1() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = durable_node(dir.path()).await;
    let link = Link::to(node.addr(), RATE).await;
    let mut settings = options(Role::Prefill);
    settings.store = format!("larder://{}/", link.address()).parse().unwrap();
    let prefiller = Engine::start(settings).await.unwrap();
    assert!(store_is(&prefiller, true).await);
    let tokens = prompt(90, LEN);
    assert_eq!(prefill(&prefiller, &tokens, CacheMode::All).await.pages_lost, 0);
    let operator = client(node.addr(), &prefiller.info().descriptor).await;
    let keys = &page_keys(&tokens, PAGE)[..PAGES];
    let stored = async || operator.exists(keys, soon()).await.iter().filter(|&&exists| exists).count();
    assert_eq!(stored().await, PAGES);

    link.cut();
    assert!(store_is(&prefiller, false).await);
    assert!(operator.forget(keys, soon()).await.complete);
    link.mend();
    assert!(store_is(&prefiller, true).await);
    assert_eq!(prefiller.state().l1_pages_cached as usize, PAGES, "the engine knows of no forget");
    let copied = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((copied.pages_l1 as usize, copied.pages_lost as usize, stored().await), (PAGES, PAGES, 0));
    assert!(caches(&prefiller, 0).await);
    let computed = prefill(&prefiller, &tokens, CacheMode::All).await;
    assert_eq!((computed.pages_computed as usize, computed.pages_lost, stored().await), (PAGES, 0, PAGES));
    node.shutdown().await;
}

/// Puts the pages of a prompt, which live for `ttl`.
async fn put_for(operator: &Client, pages: &[(PageKey, Vec<u8>)], ttl: Duration) {
    let mut parent = PageKey::NONE;
    let mut new_pages = Vec::new();
    for (position, (key, bytes)) in (0..).zip(pages) {
        new_pages.push((NewPage { key: *key, parent, position, token_ids: Vec::new() }, bytes.clone().into()));
        parent = *key;
    }
    let options = PutOptions { ttl: Some(ttl), ..PutOptions::default() };
    let outcomes = operator.put_pages(new_pages, options, soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_damaged_in_l1_is_never_put_over_a_slow_link() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = durable_node(dir.path()).await;
    // Computes the pages, and puts them elsewhere.
    let memory = MemoryStore::new();
    let reference = engine(Role::Prefill, &memory).await;
    let namespace = reference.info().descriptor.clone();
    let operator = client(node.addr(), &namespace).await;
    let link = Link::to(node.addr(), RATE).await;
    let store = DamagingL1 {
        nodes: NodeStore::new(client(link.address(), &namespace).await, None),
        flips_bits: AtomicBool::new(true),
    };
    let store = Arc::new(store);
    let damaged = Engine::start_with_store(options(Role::Prefill), store.clone()).await.unwrap();

    // The pages expire, which is no forget. On a busy machine they may do so before they are read.
    let mut read = None;
    for attempt in 0..5 {
        let tokens = prompt(91 + attempt, LEN);
        prefill(&reference, &tokens, CacheMode::All).await;
        let keys = page_keys(&tokens, PAGE).into_iter().take(PAGES);
        let pages: Vec<_> = keys.map(|key| (key, memory.page(&key).unwrap())).collect();
        put_for(&operator, &pages, Duration::from_secs(4 << attempt)).await;
        if prefill(&damaged, &tokens, CacheMode::All).await.pages_l2 as usize == PAGES {
            read = Some((tokens, pages));
            break;
        }
    }
    let (tokens, pages) = read.expect("the engine reads its pages within a minute");
    store.flips_bits.store(false, Ordering::Relaxed);
    let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
    let patience = Instant::now() + Duration::from_secs(120);
    while operator.exists(&keys, soon()).await.contains(&true) {
        assert!(Instant::now() < patience, "the pages outlive their time");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    assert_eq!(prefill(&damaged, &tokens, CacheMode::All).await.pages_lost, 0);
    assert!(metric(&damaged, "larder_engine_l1_corrupt_pages_total").await >= 1.0);
    let buffers = pages.iter().map(|(key, bytes)| (*key, vec![0u8; bytes.len()])).collect();
    let stored = operator.get(buffers, soon()).await;
    for ((bytes, tier), (key, good)) in stored.iter().zip(&pages) {
        assert!(tier.is_some() && bytes == good, "{key}: computed anew instead of copied");
    }
    node.shutdown().await;
}
