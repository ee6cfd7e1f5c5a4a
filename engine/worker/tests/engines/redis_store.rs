//! Engines on a server that speaks the Redis protocol: a node of Larder, and one that fails.

use crate::common::fake_redis::{FakeRedis, Fault};
use crate::common::real::*;
use crate::common::*;
use larder_client::{Client, ClientOptions, NewPage, PartsReceived, PutOutcome, StoreUrl};
use larder_format::{NamespaceDescriptor, PageKey};
use larder_model::{KvPage, KvPool, SealedPage};
use larder_node::{Node, NodeOptions};
use larder_worker::api::{CacheMode, EngineInfo};
use larder_worker::redis_store::RedisStore;
use larder_worker::store::{Followed, Got, LookupPurpose, PageStore, PutSource};
use larder_worker::{Engine, EngineHandle, EngineStore, Role};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LEN: usize = 203;
const PAGES: usize = (LEN - 1) / PAGE;
const PATIENCE: Duration = Duration::from_secs(30);
const MISS: Option<Vec<u8>> = None;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

async fn redis_node() -> Node {
    let redis_listen = Some(any_port());
    let options =
        NodeOptions { listen: any_port(), redis_listen, l2_bytes: 128 << 20, l3_bytes: 0, ..Default::default() };
    Node::start(options).await.unwrap()
}

fn url_of(node: &Node) -> String {
    format!("redis://{}/2", node.redis_addr().unwrap())
}

fn descriptor(tenant: &str) -> NamespaceDescriptor {
    let geometry = LOADED.model.geometry(PAGE as u32);
    NamespaceDescriptor { model: "tiny".into(), weights: [7; 32], geometry, tenant: tenant.into() }
}

async fn attach(url: &str, tenant: &str) -> RedisStore {
    let EngineStore::Redis(url) = url.parse().unwrap() else { panic!("not a Redis server: {url}") };
    let store = RedisStore::attach(url, &descriptor(tenant));
    assert!(store.ready(PATIENCE).await);
    store
}

fn pool() -> Arc<KvPool> {
    KvPool::new(descriptor("a").geometry, 64)
}

fn filled(pool: &Arc<KvPool>, seed: u8) -> KvPage {
    let mut page = pool.allocate().unwrap();
    page.as_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_mul(31) ^ seed);
    page
}

fn key(seed: u8) -> PageKey {
    PageKey([seed; 32])
}

async fn put(store: &RedisStore, seed: u8, page: KvPage, source: PutSource) -> PutOutcome {
    let new = NewPage::first(key(seed));
    let mut put = store.put(new, source, soon());
    for (part, (bytes, crcs)) in SealedPage::compute(page).parts().enumerate() {
        put.write_part(part, bytes, crcs);
    }
    put.commit(soon()).await.0
}

/// Bytes of each page that the store serves.
async fn read(store: &RedisStore, pool: &Arc<KvPool>, seeds: &[u8], deadline: Instant) -> Vec<Option<Vec<u8>>> {
    let pages = seeds.iter().map(|&seed| (key(seed), filled(pool, 0xEE))).collect();
    let got = store.get(pages, deadline).await;
    let bytes = |got| match got {
        Got::Hit(page, _) => Some(page.as_ref().to_vec()),
        Got::Miss(_) => None,
    };
    got.into_iter().map(bytes).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_come_back_as_they_were_put() {
    let node = redis_node().await;
    let (writer, reader) = (attach(&url_of(&node), "a").await, attach(&url_of(&node), "a").await);
    let pool = pool();
    let seeds: Vec<u8> = (1..=20).collect();
    for &seed in &seeds {
        assert_eq!(put(&writer, seed, filled(&pool, seed), PutSource::Computed).await, PutOutcome::Stored);
    }
    let keys: Vec<PageKey> = (1..=22).map(key).collect();
    let found = reader.lookup(keys, LookupPurpose::Reuse, soon()).await;
    assert_eq!((found.tiers.len(), found.answered), (20, true));
    let expected: Vec<_> = seeds.iter().map(|&seed| Some(filled(&pool, seed).as_ref().to_vec())).collect();
    assert_eq!(read(&reader, &pool, &seeds, soon()).await, expected);
    assert_eq!(read(&reader, &pool, &[21, 3], soon()).await, [MISS, expected[2].clone()]);
    // Another namespace has none of them.
    let other = attach(&url_of(&node), "b").await;
    assert_eq!(read(&other, &pool, &[1], soon()).await, [MISS]);
    assert_eq!((reader.pages_damaged(), other.pages_damaged()), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_writer_wins_and_forgotten_pages_do_not_return_from_copies() {
    let node = redis_node().await;
    let store = attach(&url_of(&node), "a").await;
    let pool = pool();
    assert_eq!(put(&store, 1, filled(&pool, 1), PutSource::Computed).await, PutOutcome::Stored);
    assert_eq!(put(&store, 1, filled(&pool, 2), PutSource::Computed).await, PutOutcome::AlreadyThere);
    let first = Some(filled(&pool, 1).as_ref().to_vec());
    assert_eq!(read(&store, &pool, &[1], soon()).await, [first]);
    assert_eq!(store.forget_copies(vec![(key(1), None)], soon()).await, 1);
    assert_eq!(read(&store, &pool, &[1], soon()).await, [MISS]);
    let copy = PutSource::Copy { origin: None };
    assert_eq!(put(&store, 1, filled(&pool, 1), copy).await, PutOutcome::Forgotten);
    assert_eq!(read(&store, &pool, &[1], soon()).await, [MISS]);
    assert_eq!(put(&store, 1, filled(&pool, 1), PutSource::Computed).await, PutOutcome::Stored, "computed again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_page_is_not_put() {
    let server = FakeRedis::start().await;
    let store = attach(&server.url(), "a").await;
    let sealed = SealedPage::compute(filled(&pool(), 1));
    let mut put = store.put(NewPage::first(key(1)), PutSource::Computed, soon());
    for (part, (bytes, crcs)) in sealed.parts().enumerate() {
        let mut bytes = bytes.to_vec();
        bytes[99] ^= 1;
        put.write_part(part, &bytes, crcs);
    }
    assert_eq!(put.commit(soon()).await.0, PutOutcome::Lost);
    let unfinished = store.put(NewPage::first(key(2)), PutSource::Computed, soon());
    assert_eq!(unfinished.commit(soon()).await.0, PutOutcome::Lost);
    assert_eq!(server.len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_values_are_misses_and_leave_the_server() {
    let server = FakeRedis::start().await;
    let store = attach(&server.url(), "a").await;
    let pool = pool();
    let expected = Some(filled(&pool, 1).as_ref().to_vec());
    assert_eq!(put(&store, 2, filled(&pool, 2), PutSource::Computed).await, PutOutcome::Stored);
    let faults = [Fault::FlippedBit, Fault::HalfValue, Fault::LongValue, Fault::OtherValue];
    for (count, fault) in (1..).zip(faults) {
        assert_eq!(put(&store, 1, filled(&pool, 1), PutSource::Computed).await, PutOutcome::Stored, "{fault:?}");
        assert_eq!(read(&store, &pool, &[1], soon()).await, std::slice::from_ref(&expected), "{fault:?}");
        server.set_fault(fault);
        assert_eq!(read(&store, &pool, &[1], soon()).await, [MISS], "{fault:?}");
        server.set_fault(Fault::None);
        assert_eq!((store.pages_damaged(), server.len()), (count, 1), "{fault:?}");
    }
}

/// Waits until the store serves page 1 again.
async fn serves(store: &RedisStore, pool: &Arc<KvPool>) -> bool {
    let expected = Some(filled(pool, 1).as_ref().to_vec());
    eventually(async || read(store, pool, &[1], soon()).await == [expected.clone()]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_server_costs_misses_until_the_deadline_at_most() {
    let server = FakeRedis::start().await;
    let store = attach(&server.url(), "a").await;
    let pool = pool();
    assert_eq!(put(&store, 1, filled(&pool, 1), PutSource::Computed).await, PutOutcome::Stored);
    let faults = [Fault::EndlessValue, Fault::HugeArray, Fault::Garbage, Fault::Loading, Fault::Hang, Fault::Close];
    for fault in faults {
        assert!(serves(&store, &pool).await, "before {fault:?}");
        server.set_fault(fault);
        let began = Instant::now();
        let deadline = began + Duration::from_millis(400);
        let reading = tokio::time::timeout(PATIENCE, read(&store, &pool, &[1], deadline));
        assert_eq!(reading.await.unwrap(), [MISS], "{fault:?}");
        if matches!(fault, Fault::Loading | Fault::Hang | Fault::Close) {
            let lookup = store.lookup(vec![key(1)], LookupPurpose::Reuse, deadline).await;
            assert_eq!((lookup.tiers.len(), lookup.answered), (0, false), "{fault:?}");
            let new = NewPage::first(key(9));
            let mut put = store.put(new, PutSource::Computed, deadline);
            for (part, (bytes, crcs)) in SealedPage::compute(filled(&pool, 9)).parts().enumerate() {
                put.write_part(part, bytes, crcs);
            }
            assert_eq!(put.commit(deadline).await.0, PutOutcome::Lost, "{fault:?}");
        }
        // Three calls with a deadline of 400 ms. The rest is for a busy machine.
        assert!(began.elapsed() < 2 * PATIENCE, "{fault:?}: {:?}", began.elapsed());
        server.set_fault(Fault::None);
    }
    assert!(serves(&store, &pool).await);
    assert_eq!((store.pages_damaged(), server.len()), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follow_waits_for_the_page() {
    let server = FakeRedis::start().await;
    let (writer, reader) = (attach(&server.url(), "a").await, attach(&server.url(), "a").await);
    let pool = pool();
    let short = Instant::now() + Duration::from_millis(300);
    let (_, end) = reader.follow(key(1), filled(&pool, 0xEE), PartsReceived::default(), short).await;
    assert!(matches!(end, Followed::Missed), "{end:?}");
    let writing = async {
        tokio::time::sleep(Duration::from_millis(250)).await;
        put(&writer, 1, filled(&pool, 1), PutSource::Computed).await
    };
    let following = reader.follow(key(1), filled(&pool, 0xEE), PartsReceived::default(), soon());
    let ((page, end), outcome) = tokio::join!(following, writing);
    assert_eq!(outcome, PutOutcome::Stored);
    assert!(matches!(end, Followed::Sealed(_)), "{end:?}");
    assert_eq!(page.as_ref(), filled(&pool, 1).as_ref());
}

async fn engine_on(url: &str, role: Role) -> EngineHandle {
    let mut settings = patient(role);
    settings.store = url.parse().unwrap();
    Engine::start(settings).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_share_pages_through_a_redis_port() {
    let node = redis_node().await;
    let url = url_of(&node);
    let (prefiller, decoder) = (engine_on(&url, Role::Prefill).await, engine_on(&url, Role::Decode).await);
    assert!(store_is(&prefiller, true).await && store_is(&decoder, true).await);
    let mut request = decode_request(&prompt(1, LEN), 20);
    request.await_pages = PAGES as u32;
    let commands = counter(&node, "redis_commands");
    let computing = async {
        // A page that is there before counts as reused. A lookup is one command for each page, and
        // a follow repeats another one.
        let follows = async || counter(&node, "redis_commands") >= commands + 3 * PAGES;
        assert!(eventually(follows).await, "decode does not follow");
        prefill(&prefiller, &request.tokens, CacheMode::All).await
    };
    let (answer, computed) = tokio::join!(decode(&decoder, &request), computing);
    assert_eq!(answer.tokens, expected(&request.tokens, 20));
    assert_eq!((answer.start.pages_followed as usize, computed.pages_lost), (PAGES, 0));

    let fresh = engine_on(&url, Role::Decode).await;
    assert!(store_is(&fresh, true).await);
    let answer = decode(&fresh, &decode_request(&request.tokens, 20)).await;
    assert_eq!((answer.start.pages_l3 as usize, answer.tokens), (PAGES, expected(&request.tokens, 20)));
    assert_eq!(metric(&fresh, "larder_engine_store_damaged_pages_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_answers_with_wrong_values_and_without_a_server() {
    let server = FakeRedis::start().await;
    let (prefiller, decoder) =
        (engine_on(&server.url(), Role::Prefill).await, engine_on(&server.url(), Role::Decode).await);
    assert!(store_is(&prefiller, true).await && store_is(&decoder, true).await);
    let request = decode_request(&prompt(2, LEN), 10);
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!(server.len(), PAGES);
    server.set_fault(Fault::FlippedBit);
    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_l3, answer.tokens), (0, expected(&request.tokens, 10)));
    // The engine samples the store's counter twice a second.
    let damaged = async || metric(&decoder, "larder_engine_store_damaged_pages_total").await as usize;
    assert!(eventually(async || damaged().await == PAGES).await, "{}", damaged().await);

    drop(server);
    let alone = engine_on("redis://127.0.0.1:9/0", Role::Decode).await;
    let request = decode_request(&prompt(3, LEN), 10);
    assert_eq!(decode(&alone, &request).await.tokens, expected(&request.tokens, 10));
    assert_eq!(alone.state().store_nodes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_on_a_redis_server_registers_at_nodes() {
    let node = redis_node().await;
    let nodes: StoreUrl = format!("larder://{}/", node.addr()).parse().unwrap();
    let mut settings = options(Role::Decode);
    settings.store = url_of(&node).parse().unwrap();
    settings.register = Some(nodes.clone());
    let decoder = Engine::start(settings).await.unwrap();
    let observer = Client::attach(nodes, None, ClientOptions::default());
    assert!(observer.ready(PATIENCE).await);
    let mut found = Vec::new();
    let until = soon();
    while found.is_empty() && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(50)).await;
        found = observer.members(soon()).await.unwrap_or_default();
    }
    let info: EngineInfo = serde_json::from_value(found.remove(0).info).unwrap();
    assert_eq!((info.role, info.url.as_str()), (Role::Decode, decoder.info().url.as_str()));
}
