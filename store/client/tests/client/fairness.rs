//! Fairness between namespaces: a stranger without limits of its own leaves the floors of others.

use crate::key;
use larder_client::{Client, ClientOptions, NewPage, PinKind, PutOptions, PutOutcome, StoreUrl, Tier, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

/// Bytes of a usual page, and of the smallest one.
const PAGE: usize = 64 << 10;
const SMALL_PAGE: usize = 4;

/// A namespace with pages of 4 bytes, or of a multiple of 4 KiB.
fn descriptor(tenant: &str, page_bytes: usize) -> NamespaceDescriptor {
    let (layers, page_tokens) = if page_bytes == SMALL_PAGE { (1, 1) } else { (1024, (page_bytes / 4096) as u32) };
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers,
        kv_heads: 1,
        head_dim: 1,
        page_tokens,
        layers_per_part: layers,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), page_bytes);
    NamespaceDescriptor { model: "fairness".into(), weights: [3; 32], geometry, tenant: tenant.into() }
}

fn options(dir: Option<&Path>) -> NodeOptions {
    NodeOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        l2_bytes: 32 * MIB,
        in_flight_bytes: Some(32 * MIB),
        data_dir: dir.map(Path::to_owned),
        l3_bytes: 64 * MIB,
        share_memory: Some(false),
        ..NodeOptions::default()
    }
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

async fn attach(node: &Node, descriptor: NamespaceDescriptor) -> Client {
    let address = node.addr().to_string();
    let url = StoreUrl { nodes: vec![address], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(descriptor), ClientOptions::default());
    assert!(client.ready(PATIENCE).await);
    client
}

fn keys(numbers: std::ops::Range<u32>) -> Vec<PageKey> {
    numbers.map(key).collect()
}

/// Puts pages of `page_bytes`, each a sequence of its own.
async fn put(client: &Client, numbers: std::ops::Range<u32>, page_bytes: usize) {
    for first in numbers.clone().step_by(16) {
        let mut left: Vec<u32> = (first..numbers.end.min(first + 16)).collect();
        let deadline = soon();
        while !left.is_empty() {
            assert!(Instant::now() < deadline, "the node stays busy");
            let page = |&number: &u32| {
                let page = NewPage::first(key(number));
                (page, vec![number as u8; page_bytes].into())
            };
            let outcomes = client.put_pages(left.iter().map(page).collect(), PutOptions::default(), deadline).await;
            let mut stored = outcomes.iter().map(|outcome| *outcome == PutOutcome::Stored);
            left.retain(|_| !stored.next().unwrap_or(false));
        }
    }
}

async fn tiers(client: &Client, numbers: std::ops::Range<u32>) -> Vec<Option<Tier>> {
    let mut tiers = Vec::new();
    for number in numbers {
        tiers.push(client.lookup(&[key(number)], Duration::ZERO, soon()).await.tiers.first().copied());
    }
    tiers
}

fn figure(node: &Node, pointer: &str) -> u64 {
    let status = node.status();
    status.pointer(pointer).and_then(|value| value.as_u64()).unwrap_or_else(|| panic!("no {pointer} in {status}"))
}

async fn settles(node: &Node, pointer: &str, value: u64) {
    let deadline = soon();
    while figure(node, pointer) != value {
        assert!(Instant::now() < deadline, "{pointer} is not {value} in time: {}", node.status());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A new namespace used to evict all pages of another one from L2 and from L3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_of_a_new_namespace_leaves_the_pages_of_another_in_both_tiers() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let honest = attach(&node, descriptor("honest", PAGE)).await;
    put(&honest, 0..100, PAGE).await;
    let hostile = attach(&node, descriptor("hostile", PAGE)).await;
    // Ten times L2, five times L3.
    put(&hostile, 0..5000, PAGE).await;
    assert_eq!(tiers(&honest, 0..100).await, vec![Some(Tier::L2); 100]);
    settles(&node, "/tiers/writes_in_flight", 0).await;
    drop((honest, hostile));
    node.shutdown().await;
    // L2 is empty after a restart.
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let honest = attach(&node, descriptor("honest", PAGE)).await;
    assert_eq!(tiers(&honest, 0..100).await, vec![Some(Tier::L3); 100]);
    node.shutdown().await;
}

/// Pages of 4 bytes used to hold far more memory than their namespace was charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_pages_are_charged_with_what_they_take() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let honest = attach(&node, descriptor("honest", PAGE)).await;
    put(&honest, 0..100, PAGE).await;
    let hostile = attach(&node, descriptor("hostile", SMALL_PAGE)).await;
    put(&hostile, 0..1000, SMALL_PAGE).await;
    settles(&node, "/tiers/writes_in_flight", 0).await;
    let uses = node.status()["tiers"]["namespaces"].clone();
    let bytes: Vec<u64> = uses.as_array().unwrap().iter().map(|used| used["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes, [100 * PAGE as u64, 1000 * 4096], "a page takes a slot of 4 KiB");
    assert_eq!(figure(&node, "/tiers/l3/bytes_used"), 100 * (PAGE as u64 + 4096) + 1000 * 8192);
    // They fill both tiers, and the floors still hold.
    put(&hostile, 1000..20_000, SMALL_PAGE).await;
    assert_eq!(tiers(&honest, 0..100).await, vec![Some(Tier::L2); 100]);
    node.shutdown().await;
}

/// One client used to pin nearly all of the pinnable bytes, for 30 days.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pins_leave_the_floor_of_another_namespace_and_end_within_the_bound_of_the_node() {
    let hour = Duration::from_secs(3600);
    let node = Node::start(NodeOptions { pin_time_max: hour, ..options(None) }).await.unwrap();
    let hostile = attach(&node, descriptor("hostile", PAGE)).await;
    put(&hostile, 0..128, PAGE).await;
    let long = hostile.pin(&[key(0)], PinKind::Hard, hour + Duration::from_millis(1), soon()).await;
    assert!(long.refused.unwrap().contains("from 1 to 3600000 milliseconds"));
    let mut pinned = 0;
    for number in 0..128 {
        pinned += hostile.pin(&[key(number)], PinKind::Hard, hour, soon()).await.pages;
    }
    assert_eq!(pinned, 96, "three quarters of 8 MiB");
    let honest = attach(&node, descriptor("honest", PAGE)).await;
    put(&honest, 0..64, PAGE).await;
    let floor = honest.pin(&keys(0..32), PinKind::Hard, hour, soon()).await;
    assert_eq!((floor.pages, floor.refused), (32, None));
    assert!(honest.pin(&keys(32..33), PinKind::Hard, hour, soon()).await.refused.is_some());
    assert_eq!(figure(&node, "/tiers/l2/hard_pinned_bytes"), 8 * MIB);
    node.shutdown().await;
}
