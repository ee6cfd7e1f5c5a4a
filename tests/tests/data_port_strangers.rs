//! Strangers at the data port of a store node: clients that connect and say nothing, announce
//! bodies that they do not send, or request answers that they do not read.
//!
//! Each test has a bound on the memory or the places that strangers take, and an honest client that
//! is served meanwhile.

use larder_client::{Client, ClientOptions, Member, NewPage, PutOptions, PutOutcome};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry};
use larder_tests::{
    PATIENCE, Process, RawConnection, data_dir, eventually, hello, is_flushed, key, soon, unused_address, wait_for_node,
};
use larder_wire::{HEADER_BYTES, MAX_BODY_BYTES, Request, Response};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PAGE_BYTES: usize = 256 << 10;

fn namespace(tenant: &str) -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 2,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 32,
        layers_per_part: 2,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), PAGE_BYTES);
    NamespaceDescriptor { model: "m".into(), weights: [1; 32], geometry, tenant: tenant.into() }
}

/// A node without L3, and the address of its data port.
fn start(more: &[&str]) -> (Process, SocketAddr) {
    let mut node = Process::start(&[&["store", "--listen", "127.0.0.1:0", "--l2", "32MiB"], more].concat());
    let address = address(&mut node);
    (node, address)
}

fn address(node: &mut Process) -> SocketAddr {
    let url = node.url("larder://");
    url.trim_start_matches("larder://").trim_end_matches('/').parse().expect("a node prints its address")
}

async fn attach(address: SocketAddr, tenant: &str) -> Client {
    let url = format!("larder://{address}/").parse().expect("a valid URL");
    Client::attach(url, Some(namespace(tenant)), ClientOptions::default())
}

/// Puts and reads a page. Fails if the node does not serve within [`PATIENCE`].
async fn serves(client: &Client, number: u32) {
    assert!(client.ready(PATIENCE).await, "an honest client connects");
    let bytes: Vec<u8> = (0..PAGE_BYTES as u32).map(|at| (at.wrapping_mul(31) + number) as u8).collect();
    let deadline = soon();
    let page = NewPage::first(key(number));
    let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
    let outcomes = client.put_pages(vec![(page, bytes.clone().into())], options, deadline).await;
    assert_eq!(outcomes, [PutOutcome::Stored], "page {number}");
    let (got, tier) = client.get(vec![(key(number), vec![0; PAGE_BYTES])], deadline).await.remove(0);
    assert!(tier.is_some() && got == bytes, "page {number} comes back");
}

/// Memory of a node that has taken what was sent to it, in bytes.
fn settled_memory(node: &Process, address: SocketAddr) -> u64 {
    node.wait_until_idle(address);
    node.memory_bytes("VmRSS")
}

/// Memory that connections of strangers add to a node, in bytes.
async fn memory_of<F: Future<Output = RawConnection>>(
    node: &Process,
    address: SocketAddr,
    count: usize,
    mut connect: impl FnMut(usize) -> F,
) -> (u64, Vec<RawConnection>) {
    let before = settled_memory(node, address);
    let mut connections = Vec::new();
    for number in 0..count {
        connections.push(connect(number).await);
    }
    let after = settled_memory(node, address);
    println!("{count} connections: {} to {} KiB", before >> 10, after >> 10);
    (after.saturating_sub(before), connections)
}

#[tokio::test]
async fn connection_before_its_handshake_costs_at_most_16_kib() {
    const CONNECTIONS: usize = 400;
    let options = ["--max-connections", "4096", "--request-memory", "256MiB", "--handshake-timeout", "60"];
    let (node, address) = start(&options);
    let connect = async |_| {
        let mut raw = RawConnection::open(address).await.unwrap();
        raw.send_bytes(b"LRDR").await.unwrap();
        raw
    };
    // The first ones pay for pools of the allocator and of the runtime.
    let (_, warm) = memory_of(&node, address, 50, connect).await;
    let (added, connections) = memory_of(&node, address, CONNECTIONS, connect).await;
    let added = added / CONNECTIONS as u64;
    println!("{added} bytes per connection");
    assert!(added <= 16 << 10, "{added} bytes per connection");
    drop((warm, connections));
}

#[tokio::test]
async fn handshake_may_take_as_long_as_its_option_says() {
    let (_node, patient) = start(&["--handshake-timeout", "60"]);
    let (_other, hasty) = start(&["--handshake-timeout", "1"]);
    let mut late = RawConnection::open(patient).await.unwrap();
    let mut closed = RawConnection::open(hasty).await.unwrap();
    // More than the default.
    tokio::time::sleep(Duration::from_secs(7)).await;
    let hello = hello(Some(namespace("late")));
    assert!(matches!(late.request(&hello).await.unwrap(), Response::Hello { .. }));
    assert!(closed.request(&hello).await.is_err(), "the node closed it long ago");
}

#[tokio::test]
async fn announced_bodies_take_no_memory_before_they_arrive() {
    let (node, address) = start(&[]);
    let body = vec![0; MAX_BODY_BYTES];
    // Never shed, and shed under overload.
    for (page, request) in [Request::Status, Request::Locate(vec![])].into_iter().enumerate() {
        let kind = request.frame(larder_wire::PROTOCOL_VERSION, 0, 0, None).head[4];
        let header = &larder_wire::Frame::new(kind, 1, 0, &body, None).head[..HEADER_BYTES];
        let (added, connections) = memory_of(&node, address, 600, async |number| {
            let namespace = namespace(&format!("stranger-{}", number % 4));
            let mut raw = RawConnection::connect(address, Some(namespace)).await.unwrap();
            raw.send_bytes(header).await.unwrap();
            raw
        })
        .await;
        println!("{request:?}: {} MiB added by 600 headers", added / MIB);
        assert!(added < 64 * MIB, "{} MiB added by 600 headers", added / MIB);
        serves(&attach(address, "honest").await, page as u32).await;
        drop(connections);
    }
}

/// A request whose body has `body_bytes` bytes, as the first frame of a connection.
fn request_of(body_bytes: usize) -> Vec<u8> {
    let kind = Request::Locate(vec![]).frame(larder_wire::PROTOCOL_VERSION, 0, 0, None).head[4];
    let mut frame = larder_wire::Frame::new(kind, 1, 0, &vec![0; body_bytes], None);
    frame.number(1);
    frame.head
}

async fn counters(client: &Client) -> serde_json::Value {
    let status = client.status(soon()).await.pop().and_then(|node| node.status);
    status.unwrap_or_default()["counters"].take()
}

#[tokio::test]
async fn stalled_bodies_give_their_memory_to_others() {
    // Few long bodies, and many short ones, fill the memory that the connections leave.
    for (count, body_bytes) in [(20, MAX_BODY_BYTES / 4), (200, 8 << 10)] {
        let (node, address) = start(&["--request-memory", "16MiB"]);
        let frame = request_of(body_bytes);
        let mut strangers = Vec::new();
        for _ in 0..count {
            let mut raw = RawConnection::connect(address, Some(namespace("stranger"))).await.unwrap();
            raw.send_bytes(&frame[..frame.len() - 1]).await.unwrap();
            strangers.push(raw);
        }
        // Small requests fill what the bodies leave, and some are refused.
        let client = attach(address, "honest").await;
        let mut follower = RawConnection::connect(address, Some(namespace("honest"))).await.unwrap();
        let deadline = soon();
        let mut pages = 1000..;
        let mut counted = serde_json::Value::Null;
        while counted["stalled_requests_disconnected"].as_u64().unwrap_or(0) == 0 {
            assert!(Instant::now() < deadline, "{count} bodies: {counted} {}", node.stderr());
            for page in pages.by_ref().take(50) {
                follower.send(&Request::Follow(key(page))).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
            counted = counters(&client).await;
        }
        serves(&client, 2).await;
        drop(strangers);
    }
}

/// Bytes of request memory that no client has.
async fn free_request_memory(client: &Client) -> u64 {
    let status = client.status(soon()).await.pop().and_then(|node| node.status).unwrap();
    let requests = &status["budget"]["requests"];
    let bytes = |value: &serde_json::Value| value.as_u64().expect("a number of bytes");
    let connections = bytes(&status["budget"]["connections"]) * (48 << 10);
    bytes(&requests["bytes_max"]).saturating_sub(bytes(&requests["bytes"]) + connections)
}

#[tokio::test]
async fn small_requests_are_served_while_stalled_bodies_fill_the_memory() {
    let (node, address) = start(&["--request-memory", "16MiB"]);
    let client = attach(address, "honest").await;
    serves(&client, 1).await;
    let mut honest = RawConnection::connect(address, Some(namespace("honest"))).await.unwrap();
    let mut strangers = Vec::new();
    // The next smaller body fills what the larger ones leave. Each takes four times its length.
    for body_bytes in [512 << 10, 128 << 10, 32 << 10, 8 << 10, 2 << 10, 256, 16] {
        for _ in 0..20 {
            let cost = 4 * body_bytes as u64 + (1 << 10) + (48 << 10);
            if free_request_memory(&client).await < cost {
                break;
            }
            // Connections take the part of the memory that bodies leave them.
            let Ok(mut raw) = RawConnection::connect_from([127, 0, 0, 2].into(), address).await else { break };
            let before = free_request_memory(&client).await;
            let frame = request_of(body_bytes);
            raw.send_bytes(&frame[..frame.len() - 1]).await.unwrap();
            strangers.push(raw);
            // Short: a node disconnects bodies that stall for a second. Without requests: the
            // honest client would be active, and strangers get their share only.
            tokio::time::sleep(Duration::from_millis(10)).await;
            let is_charged = free_request_memory(&client).await < before;
            if !is_charged {
                break;
            }
        }
    }
    println!("{} strangers left {} bytes", strangers.len(), free_request_memory(&client).await);
    for keys in [1, 10, 50] {
        let answer = honest.request(&Request::Locate(vec![key(1); keys])).await.unwrap();
        assert!(matches!(answer, Response::Located(_)), "{keys} keys: {answer:?} {}", node.stderr());
    }
    serves(&client, 2).await;
    drop(strangers);
}

#[tokio::test]
async fn client_at_its_own_limit_disconnects_no_slow_client() {
    let (node, address) = start(&["--request-memory", "16MiB"]);
    let client = attach(address, "honest").await;
    serves(&client, 1).await;
    let mut slow = RawConnection::connect(address, Some(namespace("slow"))).await.unwrap();
    let request = request_of(20 << 10);
    // 10 KiB/s are too slow for a node that lacks memory. This one does not.
    slow.send_bytes(&request[..request.len() - 1]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    for _ in 0..3 {
        // Four times its body, and 1 KiB, are more than a connection's quarter.
        let mut greedy = RawConnection::connect(address, Some(namespace("greedy"))).await.unwrap();
        greedy.send_bytes(&request_of(MAX_BODY_BYTES)).await.unwrap();
        match greedy.receive().await.unwrap() {
            Response::Busy { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(counters(&client).await["stalled_requests_disconnected"], 0, "{}", node.stderr());
    slow.send_bytes(&request[request.len() - 1..]).await.unwrap();
    let answer = tokio::time::timeout(PATIENCE, slow.receive()).await.expect("an answer");
    assert!(matches!(answer, Ok(Response::Error { .. } | Response::Located(_))), "{answer:?}");
}

#[tokio::test]
async fn unread_member_lists_are_bounded() {
    let (node, address) = start(&[]);
    let mut member = RawConnection::connect(address, None).await.unwrap();
    // Almost as much as one peer may register.
    for number in 0..240 {
        let info = format!("{{\"pad\":\"{}\"}}", "x".repeat(1000));
        let register = Request::Register { name: format!("member-{number}"), ttl_ms: 60_000, info };
        member.request(&register).await.unwrap();
    }
    let (added, connections) = memory_of(&node, address, 30, async |_| {
        let mut raw = RawConnection::connect(address, None).await.unwrap();
        for _ in 0..100 {
            raw.send(&Request::Members).await.unwrap();
        }
        raw
    })
    .await;
    println!("{} MiB added by 30 connections", added / MIB);
    assert!(added < 32 * MIB, "{} MiB added by 30 connections", added / MIB);
    match member.request(&Request::Members).await.unwrap() {
        Response::Members(members) => assert_eq!(members.len(), 240, "an honest client has its list"),
        other => panic!("{other:?}"),
    }
    drop(connections);
}

/// Registers `name` from 127.0.0.2 as soon as the node listens. Returns the node's first answer
/// with the connection.
async fn register_as_stranger(address: SocketAddr, name: &str) -> (Response, RawConnection) {
    let deadline = soon();
    loop {
        if let Ok(mut stranger) = RawConnection::connect_from([127, 0, 0, 2].into(), address).await {
            let register =
                Request::Register { name: name.into(), ttl_ms: 60_000, info: "{\"of\":\"stranger\"}".into() };
            return (stranger.request(&register).await.unwrap(), stranger);
        }
        assert!(Instant::now() < deadline, "the node does not listen");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn restarted_node_keeps_a_name_for_the_peer_that_had_it() {
    let (data, listen) = (data_dir(), unused_address().to_string());
    let dir = data.path().to_str().unwrap();
    let arguments = ["store", "--listen", &listen, "--l2", "32MiB", "--data-dir", dir, "--l3-bytes", "256MiB"];
    let start = || {
        let mut node = Process::start(&arguments);
        let address = address(&mut node);
        (node, address)
    };
    let (node, address) = start();
    let client = attach(address, "engine").await;
    let info = serde_json::json!({"of": "owner"});
    let _registered = client.register(Member { name: "decode-1".into(), info: info.clone() });
    let leaving = client.register(Member { name: "decode-2".into(), info: info.clone() });
    eventually("the node has stored the names", || async {
        let stored = std::fs::read_to_string(data.path().join("members.json")).unwrap_or_default();
        stored.contains("decode-1") && stored.contains("decode-2")
    })
    .await;
    node.sigkill();
    drop(leaving);
    let (node, address) = start();
    // A stranger comes first after the restart.
    let (answer, _stranger) = register_as_stranger(address, "decode-1").await;
    assert_eq!(answer, Response::Count(0), "{}", node.stderr());
    let members = || async { client.members(soon()).await.unwrap_or_default() };
    eventually("the owner is registered again", || async {
        members().await.iter().any(|member| member.name == "decode-1" && member.info == info)
    })
    .await;
    let (answer, _stranger) = register_as_stranger(address, "decode-3").await;
    assert_eq!(answer, Response::Count(1), "a name that nobody had");
    // The owner of this name does not return.
    eventually("an abandoned name is free", || async {
        register_as_stranger(address, "decode-2").await.0 == Response::Count(1)
    })
    .await;
}

#[tokio::test]
async fn waiting_followers_take_the_memory_that_they_are_charged() {
    const CONNECTIONS: usize = 20;
    const FOLLOWS: u32 = 700;
    let (node, address) = start(&[]);
    let (added, connections) = memory_of(&node, address, CONNECTIONS, async |number| {
        let mut raw = RawConnection::connect(address, Some(namespace("stranger"))).await.unwrap();
        for follow in 0..FOLLOWS {
            raw.send(&Request::Follow(key((number as u32) << 16 | follow))).await.unwrap();
        }
        raw
    })
    .await;
    let client = attach(address, "honest").await;
    assert!(client.ready(PATIENCE).await);
    let status = client.status(soon()).await.pop().unwrap().status.unwrap();
    let requests = &status["budget"]["requests"];
    let (charged, bound) = (requests["bytes"].as_u64().unwrap(), requests["bytes_max"].as_u64().unwrap());
    println!("{} KiB added, {} KiB charged, bound {} KiB", added >> 10, charged >> 10, bound >> 10);
    assert!(added <= charged && charged <= bound, "{added} bytes added, {charged} charged, bound {bound}");
    drop(connections);
}

#[tokio::test]
async fn idle_connections_make_room_for_a_client() {
    for greets in [false, true] {
        let (node, address) = start(&["--max-connections", "64"]);
        let mut strangers = Vec::new();
        for _ in 0..64 {
            if greets {
                strangers.extend(RawConnection::connect(address, None).await);
            } else {
                strangers.push(RawConnection::open(address).await.unwrap());
            }
        }
        assert!(strangers.len() >= 48, "one address may take three quarters of the places");
        serves(&attach(address, "honest").await, 1).await;
        let refused = node.stderr().contains("--max-connections-per-peer [LRD0105]");
        assert_eq!(refused, greets, "{}", node.stderr());
    }
}

#[tokio::test]
async fn idle_connection_is_closed_after_the_timeout_and_a_client_stays() {
    let (_node, address) = start(&["--idle-timeout", "10"]);
    let client = attach(address, "honest").await;
    serves(&client, 1).await;
    let mut idle = RawConnection::connect(address, None).await.unwrap();
    tokio::time::timeout(PATIENCE, idle.closed()).await.expect("the node closes the connection");
    serves(&client, 2).await;
    let status = client.status(soon()).await.pop().unwrap().status.unwrap();
    assert_eq!(status["counters"]["connections_closed_idle"], 1);
}

#[tokio::test]
async fn half_a_header_is_closed() {
    let (_node, address) = start(&[]);
    let mut raw = RawConnection::connect(address, None).await.unwrap();
    let frame = raw.frame(&Request::Ping);
    raw.send_bytes(&frame[..16]).await.unwrap();
    tokio::time::timeout(PATIENCE, raw.closed()).await.expect("the node closes the connection");
}

#[tokio::test]
async fn node_raises_the_soft_limit_of_open_files() {
    let mut node = Process::start_after("ulimit -S -n 256", &["store", "--listen", "127.0.0.1:0", "--l2", "32MiB"]);
    address(&mut node);
    let (soft, hard) = node.descriptor_limits();
    assert_ne!(soft, "256");
    assert_eq!(soft, hard);
}

#[tokio::test]
async fn log_takes_writes_at_the_limit_of_open_files() {
    let dir = data_dir();
    let path = dir.path().to_str().expect("a UTF-8 path");
    let store = ["store", "--listen", "127.0.0.1:0", "--l2", "32MiB", "--l3-bytes", "512MiB", "--data-dir", path];
    let mut node = Process::start_after("ulimit -n 1024", &store);
    let address = address(&mut node);
    let client = attach(address, "honest").await;
    serves(&client, 0).await;
    let mut strangers = Vec::new();
    let mut refused = 0;
    for _ in 0..1100 {
        // A node without descriptors accepts nothing.
        let connect = RawConnection::connect(address, None);
        match tokio::time::timeout(Duration::from_secs(2), connect).await {
            Ok(Ok(raw)) => strangers.push(raw),
            _ => refused += 1,
        }
    }
    println!("{} strangers, {refused} refused, {} descriptors", strangers.len(), node.descriptors());
    assert!(refused > 0, "the limit of open files is below the number of strangers");
    for number in 1..400 {
        serves(&client, number).await;
    }
    let status = wait_for_node(&client, "L3 has no write left", is_flushed).await;
    assert_eq!(status["counters"]["l3_writes_failed"], 0, "stderr:\n{}", node.stderr());
    let stderr = node.stderr();
    assert!(stderr.contains("LRD0107") && stderr.contains("LRD0105"), "{stderr}");
    assert!(stderr.lines().count() < 40, "the log is not flooded:\n{stderr}");
}

#[tokio::test]
async fn files_and_directories_are_private_whatever_the_umask() {
    let dir = data_dir();
    let path = dir.path().join("new").join("store");
    let data_dir = path.to_str().expect("a UTF-8 path");
    let store = ["store", "--listen", "127.0.0.1:0", "--l2", "32MiB", "--l3-bytes", "128MiB", "--data-dir", data_dir];
    let mut node = Process::start_after("umask 000", &store);
    let client = attach(address(&mut node), "honest").await;
    serves(&client, 0).await;
    wait_for_node(&client, "L3 has no write left", is_flushed).await;
    let mut found = 0;
    let mut directories = vec![dir.path().join("new")];
    while let Some(directory) = directories.pop() {
        assert_eq!(mode(&directory), 0o700, "{}", directory.display());
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                assert_eq!(mode(&path), 0o600, "{}", path.display());
                found += 1;
            }
        }
    }
    assert!(found >= 4, "identity, lock, superblocks and a segment, not {found} files");
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}
