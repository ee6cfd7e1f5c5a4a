//! The client against a real node. The same tests run over TCP as `node`, and over shared memory as
//! `local`.

use crate::{PATIENCE, key, soon};
use bytes::Bytes;
use larder_client::{
    Client, ClientOptions, DEFAULT_CONNECTIONS, FollowEnd, Hint, Member, NewPage, PagePin, PinKind, PutOptions,
    PutOutcome, StoreUrl, Tier, Transport,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use larder_wire::VERSION_PIN_STATUS;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

#[path = "cases/client_memory.rs"]
mod client_memory;
#[path = "cases/copies.rs"]
mod copies;
#[path = "cases/explain.rs"]
mod explain;
#[path = "cases/extents.rs"]
mod extents;
#[path = "cases/ranges.rs"]
mod ranges;

fn transport() -> Transport {
    if module_path!().ends_with("::local") { Transport::Shm } else { Transport::Tcp }
}

fn geometry() -> PageGeometry {
    PageGeometry {
        dtype: KvDtype::F32,
        layers: 6,
        kv_heads: 2,
        head_dim: 32,
        page_tokens: 32,
        layers_per_part: 4,
        head_groups: 1,
    }
}

fn descriptor(weights: u8) -> NamespaceDescriptor {
    NamespaceDescriptor { model: "test".into(), weights: [weights; 32], geometry: geometry(), tenant: "t".into() }
}

fn options(dir: Option<&Path>) -> NodeOptions {
    NodeOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        data_dir: dir.map(Path::to_path_buf),
        l2_bytes: 32 << 20,
        l3_bytes: 64 << 20,
        share_memory: Some(transport() == Transport::Shm),
        ..NodeOptions::default()
    }
}

async fn attach(nodes: &[&Node], weights: u8) -> Client {
    attach_over(DEFAULT_CONNECTIONS, nodes, weights).await
}

async fn attach_over(connections: usize, nodes: &[&Node], weights: u8) -> Client {
    let nodes = nodes.iter().map(|n| n.addr().to_string()).collect();
    let url = StoreUrl { nodes, transport: transport(), connections };
    let client = Client::attach(url, Some(descriptor(weights)), ClientOptions::default());
    assert!(client.ready(PATIENCE).await);
    client
}

fn payload(number: u32) -> Vec<u8> {
    (0..geometry().page_bytes()).map(|i| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8).collect()
}

fn parts(payload: &[u8]) -> Vec<Bytes> {
    let mut rest = Bytes::copy_from_slice(payload);
    geometry().part_table().into_iter().map(|bytes| rest.split_to(bytes as usize)).collect()
}

async fn put_bytes(client: &Client, number: u32, bytes: &[u8]) -> PutOutcome {
    let page = NewPage::first(key(number));
    let mut put = client.put(page, soon());
    for (part, bytes) in parts(bytes).into_iter().enumerate().rev() {
        put.part(part, bytes);
    }
    put.commit(soon()).await
}

async fn put(client: &Client, number: u32) -> PutOutcome {
    put_bytes(client, number, &payload(number)).await
}

async fn get(client: &Client, numbers: &[u32]) -> Vec<(Vec<u8>, Option<Tier>)> {
    let pages = numbers.iter().map(|&n| (key(n), vec![0u8; geometry().page_bytes()])).collect();
    client.get(pages, soon()).await
}

#[tokio::test]
async fn page_takes_no_more_token_ids_than_it_has_tokens() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    // The client leaves out the longest list.
    for (number, ids, outcome) in [(1, 32, PutOutcome::Stored), (2, 33, PutOutcome::Lost), (3, 257, PutOutcome::Stored)]
    {
        let page = NewPage { token_ids: vec![7; ids], ..NewPage::first(key(number)) };
        let mut put = client.put(page, soon());
        for (part, bytes) in parts(&payload(number)).into_iter().enumerate() {
            put.part(part, bytes);
        }
        assert_eq!(put.commit(soon()).await, outcome, "{ids} token ids");
    }
    node.shutdown().await;
}

#[tokio::test]
async fn get_returns_a_miss_or_exactly_the_bytes_of_the_put() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    for number in 0..50 {
        assert_eq!(put(&client, number).await, PutOutcome::Stored);
    }
    let numbers: Vec<u32> = (0..60).collect();
    for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
        match tier {
            Some(tier) => assert!(tier == Tier::L2 && bytes == payload(*number), "page {number}"),
            None => assert!(*number >= 50, "page {number} was put"),
        }
    }
    let keys: Vec<PageKey> = numbers.iter().map(|&n| key(n)).collect();
    assert_eq!(client.lookup(&keys, Duration::ZERO, soon()).await.tiers.len(), 50);
    assert_eq!(client.exists(&keys, soon()).await.iter().filter(|&&e| e).count(), 50);
    assert_eq!(client.stats().corrupt, 0);
    node.shutdown().await;
}

fn pages(numbers: &[u32], bytes: impl Fn(u32) -> Vec<u8>) -> Vec<(NewPage, Bytes)> {
    let page = |&number: &u32| (NewPage::first(key(number)), Bytes::from(bytes(number)));
    numbers.iter().map(page).collect()
}

#[tokio::test]
async fn put_pages_returns_the_outcome_of_each_page() {
    use PutOutcome::{AlreadyThere, InProgress, Lost, Refused, Stored};
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    // More than the client sends before the node answers, and less.
    for numbers in [(0..60).collect::<Vec<u32>>(), (100..102).collect()] {
        let outcomes = client.put_pages(pages(&numbers, payload), PutOptions::default(), soon()).await;
        assert!(outcomes.iter().all(|&outcome| outcome == Stored), "{outcomes:?}");
        for (&number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert!(tier.is_some() && bytes == payload(number), "page {number}");
        }
    }
    let mut open = client.put(NewPage::first(key(200)), soon());
    open.part(0, parts(&payload(200))[0].clone());
    settles(&node, "/puts_open", 1).await;
    let mut mixed = pages(&[0, 1, 200, 201, 202], |number| payload(if number == 1 { 7 } else { number }));
    mixed[4].1.truncate(5);
    let outcomes = client.put_pages(mixed, PutOptions::default(), soon()).await;
    assert_eq!(outcomes, [AlreadyThere, Refused, InProgress, Stored, Lost]);
    assert!(get(&client, &[1]).await[0].0 == payload(1) && get(&client, &[201]).await[0].1.is_some());
    drop(open);
    // An abandoned call leaves no put open.
    let late = client.put_pages(pages(&(300..360).collect::<Vec<u32>>(), payload), PutOptions::default(), soon());
    assert!(tokio::time::timeout(Duration::from_micros(300), late).await.is_err());
    settles(&node, "/puts_open", 0).await;
    node.shutdown().await;
}

async fn held_bytes(node: &Node) -> u64 {
    node.status()["tiers"]["l2"]["held_bytes"].as_u64().expect("a number")
}

/// Waits until the node holds no page for a reader.
async fn nothing_is_held(node: &Node) {
    settles(node, "/tiers/l2/held_bytes", 0).await;
}

#[tokio::test]
async fn views_keep_their_bytes_until_they_are_dropped() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let numbers: Vec<u32> = (0..40).collect();
    client.put_pages(pages(&numbers, payload), PutOptions::default(), soon()).await;
    let keys: Vec<PageKey> = (0..41).map(key).collect();
    let views = client.view(&keys, soon()).await;
    for (number, view) in (0..).zip(&views) {
        match view {
            Some(view) => {
                assert!(view[..] == payload(number) && view.tier() == Tier::L2, "page {number}");
                assert_eq!(view.in_place(), transport() == Transport::Shm);
            }
            None => assert_eq!(number, 40),
        }
    }
    // Forget the pages, evict them and end the connection. The views keep their bytes.
    assert!(client.forget(&keys, soon()).await.complete);
    assert!(client.view(&keys[..2], soon()).await.iter().all(Option::is_none), "a forgotten page is not served");
    for first in (1000..2000).step_by(100) {
        let others: Vec<u32> = (first..first + 100).collect();
        client.put_pages(pages(&others, payload), PutOptions::default(), soon()).await;
    }
    drop(client);
    settles(&node, "/counters/connections", 0).await;
    let other = attach(&[&node], 1).await;
    other.put_pages(pages(&(3000..3200).collect::<Vec<u32>>(), payload), PutOptions::default(), soon()).await;
    for (number, view) in (0..40).zip(views) {
        assert!(view.expect("the get had a hit")[..] == payload(number), "page {number} changed under its reader");
    }
    nothing_is_held(&node).await;
    node.shutdown().await;
}

#[tokio::test]
async fn views_beyond_the_hold_limit_are_copies() {
    // The limit is an eighth of L2: 4 MiB.
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let numbers: Vec<u32> = (0..180).collect();
    assert!(numbers.len() * geometry().page_bytes() > 16 << 20);
    client.put_pages(pages(&numbers, payload), PutOptions::default(), soon()).await;
    let keys: Vec<PageKey> = numbers.iter().map(|&number| key(number)).collect();
    let views = client.view(&keys, soon()).await;
    for (number, view) in (0..).zip(&views) {
        assert!(view.as_ref().expect("the page is in the store")[..] == payload(number), "page {number}");
    }
    assert!(views.iter().flatten().any(|view| !view.in_place()));
    assert!(held_bytes(&node).await <= 4 << 20);
    drop(views);
    nothing_is_held(&node).await;
    node.shutdown().await;
}

#[tokio::test]
async fn lookup_holds_its_prefix_until_the_lease_ends() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let numbers: Vec<u32> = (0..20).collect();
    client.put_pages(pages(&numbers, payload), PutOptions::default(), soon()).await;
    let keys: Vec<PageKey> = (0..25).map(key).collect();
    let lookup = client.lookup(&keys, PATIENCE, soon()).await;
    assert_eq!((lookup.tiers.len(), lookup.held, lookup.answered), (20, 20, true));
    // Five times the bytes of L2.
    for first in (1000..1800).step_by(100) {
        let others: Vec<u32> = (first..first + 100).collect();
        client.put_pages(pages(&others, payload), PutOptions::default(), soon()).await;
    }
    for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
        assert!(tier.is_some() && bytes == payload(*number), "page {number} is held");
    }
    drop(lookup);
    nothing_is_held(&node).await;
    assert!(get(&client, &numbers).await.iter().any(|(_, tier)| tier.is_none()), "released pages are evicted");
    // A lease that is not dropped expires.
    let lease = Duration::from_millis(200);
    let begin = Instant::now();
    let lookup = client.lookup(&[key(1799)], lease, soon()).await;
    assert!(lookup.held == 1 && (held_bytes(&node).await > 0 || begin.elapsed() > lease));
    nothing_is_held(&node).await;
    node.shutdown().await;
}

#[tokio::test]
async fn first_writer_wins_and_the_second_learns_of_it() {
    let node = Node::start(options(None)).await.unwrap();
    let a = attach(&[&node], 1).await;
    let b = attach(&[&node], 1).await;
    assert_eq!(put(&a, 1).await, PutOutcome::Stored);
    assert_eq!(put(&b, 1).await, PutOutcome::AlreadyThere);
    assert_eq!(put_bytes(&b, 1, &payload(2)).await, PutOutcome::Refused);
    assert!(get(&b, &[1]).await[0].0 == payload(1));
    let page = NewPage::first(key(9));
    let mut open = a.put(page, soon());
    open.part(0, parts(&payload(9))[0].clone());
    settles(&node, "/puts_open", 1).await;
    assert_eq!(put(&b, 9).await, PutOutcome::InProgress);
    assert!(get(&b, &[9]).await[0].1.is_none(), "an open put is not visible");
    drop(open);
    settles(&node, "/puts_open", 0).await;
    assert_eq!(put(&b, 9).await, PutOutcome::Stored);
}

#[tokio::test]
async fn namespaces_do_not_share_pages() {
    let node = Node::start(options(None)).await.unwrap();
    let a = attach(&[&node], 1).await;
    let b = attach(&[&node], 2).await;
    put(&a, 1).await;
    assert!(get(&b, &[1]).await[0].1.is_none());
    assert_eq!(put_bytes(&b, 1, &payload(7)).await, PutOutcome::Stored);
    assert!(get(&a, &[1]).await[0].0 == payload(1) && get(&b, &[1]).await[0].0 == payload(7));
}

#[tokio::test]
async fn follow_reads_a_page_while_it_is_written() {
    let node = Node::start(options(None)).await.unwrap();
    let writer = attach(&[&node], 1).await;
    let reader = attach(&[&node], 1).await;
    let buffer = || vec![0u8; geometry().page_bytes()];
    // One follow starts before the put, another after its first part.
    let early = reader.follow(key(1), buffer(), soon());
    settles(&node, "/readers_waiting", 1).await;
    let bytes = payload(1);
    let pieces = parts(&bytes);
    let mut put = writer.put(NewPage::first(key(1)), soon());
    put.part(1, pieces[1].clone());
    settles(&node, "/counters/bytes_sent", pieces[1].len() as u64).await;
    let late = reader.follow(key(1), buffer(), soon());
    settles(&node, "/counters/bytes_sent", 2 * pieces[1].len() as u64).await;
    put.part(0, pieces[0].clone());
    assert_eq!(put.commit(soon()).await, PutOutcome::Stored);
    for follow in [early, late, reader.follow(key(1), buffer(), soon())] {
        let (got, end) = follow.finish().await;
        assert!(end == FollowEnd::Sealed && got == bytes);
    }
}

#[tokio::test]
async fn follow_ends_when_its_writer_dies_or_never_comes() {
    let node = Node::start(options(None)).await.unwrap();
    let reader = attach(&[&node], 1).await;
    let writer = attach(&[&node], 1).await;
    let follow = reader.follow(key(1), vec![0u8; geometry().page_bytes()], soon());
    settles(&node, "/readers_waiting", 1).await;
    let mut put = writer.put(NewPage::first(key(1)), soon());
    let first = parts(&payload(1))[0].clone();
    put.part(0, first.clone());
    settles(&node, "/counters/bytes_sent", first.len() as u64).await;
    drop((put, writer));
    let (_, end) = follow.finish().await;
    assert_eq!(end, FollowEnd::Aborted);
    let deadline = Instant::now() + Duration::from_millis(200);
    let without_writer = reader.follow(key(2), vec![0u8; geometry().page_bytes()], deadline);
    let end = tokio::time::timeout(PATIENCE, without_writer.finish()).await.expect("it ends at its deadline").1;
    assert_eq!(end, FollowEnd::Miss);
    settles(&node, "/puts_open", 0).await;
    settles(&node, "/readers_waiting", 0).await;
}

#[tokio::test]
async fn restart_keeps_pages_and_not_forgotten_ones() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&[&node], 1).await;
    for number in 0..40 {
        assert_eq!(put(&client, number).await, PutOutcome::Stored);
    }
    let forgotten = client.forget(&[key(3), key(4), key(99)], soon()).await;
    assert_eq!((forgotten.pages, forgotten.complete), (2, true));
    assert!(get(&client, &[3]).await[0].1.is_none());
    let epoch = client.status(soon()).await[0].epoch.unwrap();
    drop(client);
    node.shutdown().await;

    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&[&node], 1).await;
    assert!(client.status(soon()).await[0].epoch.unwrap() > epoch);
    let numbers: Vec<u32> = (0..40).collect();
    for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
        match number {
            3 | 4 => assert!(tier.is_none(), "{number} was forgotten"),
            _ => assert!(tier == Some(Tier::L3) && bytes == payload(*number), "{number}"),
        }
    }
    let keys: Vec<PageKey> = (0..40).map(key).collect();
    let lookup = client.lookup(&keys, Duration::ZERO, soon()).await;
    assert_eq!((lookup.tiers.len(), lookup.expected.len()), (3, 3), "the prefix ends at the first forgotten page");
    assert_eq!(client.warm(&keys, soon()).await, 38);
    assert_eq!(client.locate(&keys[..3], soon()).await, [Some(Tier::L2); 3]);
    node.shutdown().await;
}

#[tokio::test]
async fn pages_beyond_l2_are_served_from_l3() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&[&node], 1).await;
    // 450 pages of 96 KiB are 43 MiB; L2 holds 32.
    for number in 0..450 {
        while matches!(put(&client, number).await, PutOutcome::Busy { .. }) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let mut from_l3 = 0;
    for chunk in (0..450).collect::<Vec<u32>>().chunks(64) {
        for (number, (bytes, tier)) in chunk.iter().zip(get(&client, chunk).await) {
            assert!(tier.is_some() && bytes == payload(*number), "{number} {tier:?}");
            from_l3 += usize::from(tier == Some(Tier::L3));
        }
    }
    assert!(from_l3 > 50, "{from_l3}");
}

#[tokio::test]
async fn members_appear_on_registration_and_disappear_on_drop() {
    let node = Node::start(options(None)).await.unwrap();
    let engine = attach(&[&node], 1).await;
    let router = attach(&[&node], 1).await;
    let member = Member { name: "prefill-1".into(), info: serde_json::json!({"role": "prefill"}) };
    let registration = engine.register(member.clone());
    let wait = async |count: usize| {
        let begin = Instant::now();
        while router.members(soon()).await.is_none_or(|members| members.len() != count) {
            assert!(begin.elapsed() < PATIENCE, "never {count} members");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    wait(1).await;
    assert_eq!(router.members(soon()).await.unwrap(), [member]);
    drop(registration);
    wait(0).await;
}

#[tokio::test]
async fn absent_node_costs_misses_until_it_returns() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let a = dir.path().join("a");
    let b = dir.path().join("b");
    let first = Node::start(options(Some(&a))).await.unwrap();
    let second = Node::start(options(Some(&b))).await.unwrap();
    let client = attach(&[&first, &second], 1).await;
    for number in 0..40 {
        assert_eq!(put(&client, number).await, PutOutcome::Stored);
    }
    let address = second.addr();
    second.shutdown().await;
    let numbers: Vec<u32> = (0..40).collect();
    let begin = Instant::now();
    let hits = get(&client, &numbers).await.into_iter().zip(0..).filter(|((bytes, tier), number)| {
        assert!(tier.is_none() || *bytes == payload(*number));
        tier.is_some()
    });
    let hits = hits.count();
    assert!((8..32).contains(&hits), "about half of the pages remain: {hits}");
    assert!(begin.elapsed() < PATIENCE, "a miss does not wait for the deadline");
    assert!(!client.forget(&[key(99)], soon()).await.complete, "an absent node cannot forget");
    let second = Node::start(NodeOptions { listen: address, ..options(Some(&b)) }).await.unwrap();
    let begin = Instant::now();
    while get(&client, &numbers).await.iter().any(|(_, tier)| tier.is_none()) {
        assert!(begin.elapsed() < PATIENCE, "every page has its old owner");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    second.shutdown().await;
    first.shutdown().await;
}

async fn settles(node: &Node, pointer: &str, value: u64) {
    let begin = Instant::now();
    while node.status().pointer(pointer).and_then(|v| v.as_u64()) != Some(value) {
        assert!(begin.elapsed() < PATIENCE, "{pointer} never {value}: {}", node.status());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn connection_pool_moves_pages_and_ends_with_its_primary() {
    // With shared memory, no pages travel over connections, so one is enough.
    let connections = |several| if transport() == Transport::Tcp { several } else { 1 };
    let node = Node::start(options(None)).await.unwrap();
    let client = attach_over(4, &[&node], 1).await;
    settles(&node, "/counters/connections", connections(4)).await;
    let numbers: Vec<u32> = (0..80).collect();
    for round in 0..3 {
        let puts = client.put_pages(pages(&numbers, payload), PutOptions::default(), soon()).await;
        assert!(puts.iter().all(|&put| put == if round == 0 { PutOutcome::Stored } else { PutOutcome::AlreadyThere }));
        for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert!(tier.is_some() && bytes == payload(*number), "page {number}");
        }
    }
    let address = node.addr();
    node.shutdown().await;
    let node = Node::start(NodeOptions { listen: address, ..options(None) }).await.unwrap();
    settles(&node, "/counters/connections", connections(4)).await;
    assert!(get(&client, &numbers).await.iter().all(|(_, tier)| tier.is_none()), "another epoch of the node");
    drop(client);
    settles(&node, "/counters/connections", 0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn cancelled_operations_leave_nothing_behind() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    for number in 0..300 {
        drop(client.follow(key(number), vec![0u8; geometry().page_bytes()], soon()));
        drop(client.put(NewPage::first(key(1000 + number)), soon()));
    }
    let waiting = client.follow(key(5000), vec![0u8; geometry().page_bytes()], soon());
    settles(&node, "/readers_waiting", 1).await;
    let mut put = client.put(NewPage::first(key(6000)), soon());
    put.part(0, parts(&payload(1))[0].clone());
    settles(&node, "/puts_open", 1).await;
    drop((waiting, put, client));
    settles(&node, "/readers_waiting", 0).await;
    settles(&node, "/puts_open", 0).await;
    assert_eq!(node.status()["tiers"]["l2"]["arena_used"], 0, "all memory is free again");
}

#[tokio::test]
async fn parts_that_do_not_match_the_geometry_are_not_sent() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let mut put = client.put(NewPage::first(key(1)), soon());
    put.part(0, Bytes::from(vec![0u8; 17]));
    assert_eq!(put.commit(soon()).await, PutOutcome::Lost);
    let mut put = client.put(NewPage::first(key(2)), soon());
    put.part(0, parts(&payload(2))[0].clone());
    assert_eq!(put.commit(soon()).await, PutOutcome::Lost, "a part is missing");
    assert!(get(&client, &[1, 2]).await.iter().all(|(_, tier)| tier.is_none()));
    settles(&node, "/puts_open", 0).await;
}

#[tokio::test]
async fn page_forgotten_during_a_read_stays_forgotten() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&[&node], 1).await;
    for number in 0..200 {
        put(&client, number).await;
    }
    drop(client);
    node.shutdown().await;
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let reader = attach(&[&node], 1).await;
    let forgetter = attach(&[&node], 1).await;
    let numbers: Vec<u32> = (0..200).collect();
    let keys: Vec<PageKey> = numbers.iter().map(|&n| key(n)).collect();
    let (_, forgotten) = tokio::join!(get(&reader, &numbers), forgetter.forget(&keys, soon()));
    assert_eq!((forgotten.pages, forgotten.complete), (200, true));
    assert!(client_sees_nothing(&reader, &keys).await);
}

async fn client_sees_nothing(client: &Client, keys: &[PageKey]) -> bool {
    client.locate(keys, soon()).await.iter().all(Option::is_none)
}

#[tokio::test]
async fn page_is_a_miss_after_its_ttl() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&[&node], 1).await;
    let page = NewPage::first(key(1));
    let ttl = Some(Duration::from_millis(300));
    let begin = Instant::now();
    let mut put = client.put_with(page, PutOptions { ttl, ..PutOptions::default() }, soon());
    for (part, bytes) in parts(&payload(1)).into_iter().enumerate() {
        put.part(part, bytes);
    }
    assert_eq!(put.commit(soon()).await, PutOutcome::Stored);
    let (bytes, tier) = get(&client, &[1]).await.remove(0);
    assert!(begin.elapsed() > Duration::from_millis(300) || (tier.is_some() && bytes == payload(1)));
    tokio::time::sleep(Duration::from_millis(301)).await;
    assert!(get(&client, &[1]).await[0].1.is_none());
    node.shutdown().await;
}

#[tokio::test]
async fn hints_reach_the_policy_of_their_own_namespace() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let keys: Vec<PageKey> = (0..200).map(key).collect();
    for number in 0..150 {
        put(&client, number).await;
    }
    assert_eq!(client.hint(&keys, Some(70), Hint::None, soon()).await, 150);
    assert_eq!(client.hint(&keys[..2], None, Hint::Retain(Duration::from_secs(60)), soon()).await, 2);
    assert_eq!(client.pins(&keys[..3], soon()).await.iter().flatten().count(), 2);
    assert_eq!(client.hint(&keys[..100], None, Hint::SessionEnded, soon()).await, 100);
    assert_eq!(client.pins(&keys[..2], soon()).await, [None; 2]);
    let stranger = attach(&[&node], 2).await;
    assert_eq!(stranger.hint(&keys, Some(1), Hint::Demote, soon()).await, 0);
    let eviction = &node.status()["tiers"]["l2"]["eviction"];
    assert_eq!((eviction["pages_ended"].as_u64(), eviction["pages_demoted"].as_u64()), (Some(150), Some(100)));
    node.shutdown().await;
    assert_eq!(client.hint(&keys, None, Hint::Demote, soon()).await, 0, "no node is connected");
}

#[tokio::test]
async fn pinned_pages_survive_eviction_and_excess_pins_are_refused() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let keys: Vec<PageKey> = (0..600).map(key).collect();
    for number in 0..300 {
        put(&client, number).await;
    }
    let hour = Duration::from_secs(3600);
    let pinned = client.pin(&keys[..50], PinKind::Hard, hour, soon()).await;
    assert_eq!((pinned.pages, pinned.refused, pinned.complete), (50, None, true));
    let pins = client.pins(&keys[49..51], soon()).await;
    let PagePin { kind, remaining_ms } = pins[0].expect("the page is pinned");
    assert_eq!((kind, pins[1]), (PinKind::Hard, None));
    assert!((3_500_000..=3_600_000).contains(&remaining_ms), "{remaining_ms} ms are left of an hour");
    for number in 300..600 {
        put(&client, number).await;
    }
    assert!(client.exists(&keys[..50], soon()).await.iter().all(|&there| there));
    assert!(!client.exists(&keys[50..300], soon()).await.iter().all(|&there| there), "L2 is full");
    let refused = client.pin(&keys, PinKind::Hard, hour, soon()).await;
    assert!(refused.refused.unwrap().contains("a quarter of L2"));
    let too_long = client.pin(&keys[..1], PinKind::Soft, 24 * 31 * hour, soon()).await;
    assert!(too_long.refused.unwrap().contains("milliseconds"));
    let ended = client.pin(&keys, PinKind::None, Duration::ZERO, soon()).await;
    assert_eq!((ended.pages, ended.complete), (50, true));
    assert_eq!(client.pins(&keys[..50], soon()).await, vec![None; 50]);
    node.shutdown().await;
    assert!(!client.pin(&keys, PinKind::Soft, hour, soon()).await.complete, "no node is connected");
}

#[tokio::test]
async fn pins_of_a_node_with_an_older_protocol_are_unknown() {
    let older = VERSION_PIN_STATUS - 1;
    let node = Node::start(NodeOptions { protocol_max: older, ..options(None) }).await.unwrap();
    let client = attach(&[&node], 1).await;
    put(&client, 1).await;
    let pinned = client.pin(&[key(1)], PinKind::Soft, Duration::from_secs(60), soon()).await;
    assert_eq!(pinned.pages, 1);
    assert_eq!(client.pins(&[key(1)], soon()).await, [None]);
    node.shutdown().await;
}

/// On one thread, a loop over operations without a node must not starve other tasks.
#[tokio::test(flavor = "current_thread")]
async fn operations_without_a_node_yield() {
    let url = StoreUrl { nodes: vec!["127.0.0.1:1".into()], transport: transport(), connections: DEFAULT_CONNECTIONS };
    let client = Client::attach(url, Some(descriptor(1)), ClientOptions::default());
    let ran = std::rc::Rc::new(std::cell::Cell::new(0u32));
    let local = tokio::task::LocalSet::new();
    let seen = ran.clone();
    local.spawn_local(async move {
        loop {
            seen.set(seen.get() + 1);
            tokio::task::yield_now().await;
        }
    });
    let requests = async {
        for number in 0..9 {
            let before = ran.get();
            // Many turns, because the runtime does not promise an order.
            for _ in 0..200 {
                match number {
                    0 => drop(client.locate(&[key(1)], soon()).await),
                    1 => drop(client.get(vec![(key(1), vec![0; geometry().page_bytes()])], soon()).await),
                    2 => drop(client.forget(&[key(1)], soon()).await),
                    3 => drop(client.members(soon()).await),
                    4 => drop(client.pin(&[key(1)], PinKind::Hard, Duration::from_secs(1), soon()).await),
                    5 => drop(client.lookup(&[key(1)], Duration::ZERO, soon()).await),
                    6 => drop(client.view(&[key(1)], soon()).await),
                    7 => drop(client.put_pages(pages(&[1], payload), PutOptions::default(), soon()).await),
                    _ => drop(client.status(soon()).await),
                }
            }
            assert!(ran.get() > before, "operation {number} never yields");
        }
    };
    local.run_until(requests).await;
}
