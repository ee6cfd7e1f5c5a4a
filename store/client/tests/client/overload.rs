//! Overload: a node refuses work beyond a budget at once, and one client does not slow another.

use crate::stalls::despite_stops;
use crate::{PATIENCE, hello, key, soon};
use bytes::Bytes;
use larder_client::{
    Client, ClientOptions, Fetched, GetOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Tier, Transport,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use larder_wire::{
    Delivery, Entry, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, PartLocation,
    Request, Reserved, Response,
};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

const PAGE: usize = 256 << 10;
/// Times that a caller may return in vain, as in the simulation. Each pause grows with the time
/// waited so far, so the number bounds the time as well.
const RETURNS_MAX: usize = 10;

fn descriptor(tenant: &str) -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 4,
        kv_heads: 4,
        head_dim: 64,
        page_tokens: 32,
        layers_per_part: 4,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), PAGE);
    NamespaceDescriptor { model: "overload".into(), weights: [3; 32], geometry, tenant: tenant.into() }
}

fn options() -> NodeOptions {
    NodeOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        l2_bytes: 64 << 20,
        in_flight_bytes: Some(16 << 20),
        share_memory: Some(false),
        ..NodeOptions::default()
    }
}

async fn attach(address: &str, tenant: &str) -> Client {
    let url = StoreUrl { nodes: vec![address.into()], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(descriptor(tenant)), ClientOptions::default());
    assert!(client.ready(PATIENCE).await);
    client
}

fn payload(number: u32) -> Bytes {
    (0..PAGE).map(|at| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8).collect::<Vec<u8>>().into()
}

fn pages(numbers: std::ops::Range<u32>) -> Vec<(NewPage, Bytes)> {
    let page = |number| (NewPage::first(key(number)), payload(number));
    numbers.map(page).collect()
}

async fn fill(client: &Client, numbers: std::ops::Range<u32>) {
    for first in numbers.clone().step_by(8) {
        let batch = pages(first..numbers.end.min(first + 8));
        let outcomes = client.put_pages(batch, PutOptions::default(), soon()).await;
        assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
    }
}

fn wanted(numbers: std::ops::Range<u32>) -> Vec<(PageKey, Vec<u8>)> {
    numbers.map(|number| (key(number), vec![0; PAGE])).collect()
}

fn status_number(node: &Node, pointer: &str) -> u64 {
    node.status().pointer(pointer).and_then(|value| value.as_u64()).expect("a number")
}

async fn eventually(condition: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{condition}: not in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn at_rest(node: &Node) {
    let kinds = ["puts", "reads", "outstanding", "requests"].map(|kind| format!("/budget/{kind}/bytes"));
    eventually("all budgets are returned", || kinds.iter().all(|kind| status_number(node, kind) == 0)).await;
}

/// A client without the checks of [`Client`].
struct Raw {
    reader: FrameReader<OwnedReadHalf>,
    writer: FrameWriter<OwnedWriteHalf>,
}

impl Raw {
    async fn attach(node: &Node, tenant: &str) -> Raw {
        let mut raw = Raw::connect(node, tenant).await;
        assert!(matches!(raw.receive().await, Some((0, Response::Hello { .. }))));
        raw
    }

    async fn connect(node: &Node, tenant: &str) -> Raw {
        let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
        let mut raw = Raw { reader: FrameReader::new(read), writer: FrameWriter::new(write) };
        raw.send(0, &hello(descriptor(tenant))).await;
        raw
    }

    async fn send(&mut self, number: u64, request: &Request) {
        let deadline_ms = PATIENCE.as_millis() as u32;
        self.writer.send(request.frame(PROTOCOL_VERSION, number, deadline_ms, None)).await.unwrap();
    }

    /// Returns the next response with its request number, and discards its payload.
    async fn receive(&mut self) -> Option<(u64, Response)> {
        let header = tokio::time::timeout(PATIENCE, self.reader.next()).await.unwrap().unwrap()?;
        let response = Response::decode(PROTOCOL_VERSION, header.kind, self.reader.body()).unwrap();
        self.reader.discard().await.unwrap();
        Some((header.request, response))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn get_beyond_the_budget_is_refused_in_part_and_goes_on_while_pages_arrive() {
    let node =
        Node::start(NodeOptions { connection_outstanding_bytes: Some(5 * PAGE as u64), ..options() }).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    fill(&client, 0..20).await;
    let got = client.get_with(wanted(0..22), GetOptions::default(), soon()).await;
    for (number, (bytes, fetched)) in (0..).zip(&got) {
        match fetched {
            Fetched::Hit(tier) => assert!(number < 20 && *tier == Tier::L2 && bytes[..] == payload(number)[..]),
            Fetched::Busy { .. } => panic!("page {number}: the pages before it arrived"),
            Fetched::Miss => assert!(number >= 20, "page {number}"),
        }
    }
    assert_eq!((client.stats().gets_busy, client.stats().get_hits), (0, 20));
    // Five of 22 pages find room at first.
    assert!(status_number(&node, "/counters/refusals") >= 1 && status_number(&node, "/counters/pages_refused") >= 17);
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn put_beyond_the_budget_is_refused_with_a_hint_and_succeeds_with_retries() {
    let node = Node::start(NodeOptions { connection_put_bytes: Some(2 << 20), ..options() }).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    let outcomes = client.put_pages(pages(0..12), PutOptions::default(), soon()).await;
    let busy = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Busy { retry_after } if !retry_after.is_zero());
    assert_eq!(outcomes.iter().filter(|outcome| busy(outcome)).count(), 4, "{outcomes:?}");
    let options = PutOptions { busy_retries: 20, ..PutOptions::default() };
    let outcomes = client.put_pages(pages(100..150), options, soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
    // Another connection of the same tenant has its own limit.
    let other = attach(&node.addr().to_string(), "t").await;
    let open: Vec<_> =
        pages(200..208).into_iter().map(|(page, _)| client.put_with(page, PutOptions::default(), soon())).collect();
    eventually("they are reserved", || status_number(&node, "/budget/puts/bytes") == 2 << 20).await;
    let mut ninth = client.put_with(pages(208..209).remove(0).0, options, soon());
    ninth.part(0, payload(208));
    assert_eq!(other.put_pages(pages(300..301), PutOptions::default(), soon()).await, [PutOutcome::Stored]);
    drop(open);
    assert_eq!(ninth.commit(soon()).await, PutOutcome::Stored, "the client retries it");
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_do_not_receive_delay_no_other_reader() {
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "good").await;
    fill(&client, 0..100).await;
    // More readers than the read budget has room for.
    let mut stuck = Vec::new();
    for _ in 0..12 {
        let mut raw = Raw::attach(&node, "good").await;
        for number in 1..5 {
            raw.send(number, &Request::Get { keys: (0..100).map(key).collect(), by: Delivery::Inline }).await;
        }
        stuck.push(raw);
    }
    let max = status_number(&node, "/budget/reads/bytes_max");
    // The kernel buffers an unknown part of the answers first.
    eventually("they use the read budget", || status_number(&node, "/budget/reads/bytes") > 0).await;
    let options = GetOptions { busy_retries: 100, ..GetOptions::default() };
    for round in 0..20 {
        // A node that kept the stuck readers would end them after 30 s without progress.
        let deadline = Instant::now() + Duration::from_secs(25);
        let got = client.get_with(wanted(round..round + 20), options, deadline).await;
        assert!(got.iter().all(|(_, fetched)| fetched.tier().is_some()), "round {round}");
        assert!(status_number(&node, "/budget/reads/bytes") <= max);
    }
    drop(stuck);
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_answer_overtakes_the_pages_of_its_own_reader() {
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    fill(&client, 0..200).await;
    let mut raw = Raw::attach(&node, "t").await;
    raw.send(1, &Request::Get { keys: (0..200).map(key).collect(), by: Delivery::Inline }).await;
    // Pages in the kernel's buffers cannot be overtaken. They are full when the node sends no more.
    let mut latest_bytes = 0;
    let mut unchanged = 0;
    eventually("the kernel's buffers are full", || {
        let bytes = status_number(&node, "/budget/outstanding/bytes");
        unchanged = if bytes == latest_bytes { unchanged + 1 } else { 0 };
        latest_bytes = bytes;
        (1..200 * PAGE as u64).contains(&bytes) && unchanged >= 20
    })
    .await;
    raw.send(2, &Request::Locate(vec![key(0)])).await;
    let mut before = 0;
    let mut behind = 0;
    let mut located = false;
    while let Some((_, response)) = raw.receive().await {
        match response {
            Response::Located(_) => located = true,
            Response::Page { .. } if located => behind += 1,
            Response::Page { .. } => before += 1,
            Response::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(located && before + behind == 200 && behind > 100, "{before} pages before it, {behind} behind");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writer_that_disconnects_halfway_loses_only_its_own_put() {
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    let mut raw = Raw::attach(&node, "t").await;
    let page = |number| Reserved::first(key(number), vec![PAGE as u32]);
    raw.send(1, &Request::Reserve((0..8).map(page).collect())).await;
    assert!(matches!(raw.receive().await, Some((1, Response::Reserved { retry_after_ms: 0, .. }))));
    assert_eq!(status_number(&node, "/budget/puts/bytes"), 8 * PAGE as u64);
    drop(raw);
    eventually("its puts are aborted", || status_number(&node, "/puts_open") == 0).await;
    let stream = TcpStream::connect(node.addr()).await.unwrap();
    let half = half_a_part(stream, &page(20)).await;
    eventually("the node reads the part", || status_number(&node, "/puts_open") == 1).await;
    drop(half);
    at_rest(&node).await;
    assert_eq!(status_number(&node, "/puts_open"), 0);
    let outcomes = client.put_pages(pages(0..22), PutOptions::default(), soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "the keys are free again: {outcomes:?}");
    node.shutdown().await;
}

/// Reserves pages of a tenant's own and sends nothing for them.
async fn silent_writer(node: &Node, tenant: &str, count: u32) -> Raw {
    let mut raw = Raw::attach(node, tenant).await;
    let page = |number| Reserved::first(key(10_000 + number), vec![PAGE as u32]);
    raw.send(1, &Request::Reserve((0..count).map(page).collect())).await;
    assert!(matches!(raw.receive().await, Some((1, Response::Reserved { retry_after_ms: 0, .. }))));
    raw
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_writers_lose_their_room_and_refused_callers_get_in_when_told() {
    let node = Node::start(options()).await.unwrap();
    let all = (status_number(&node, "/budget/puts/bytes_max") / PAGE as u64) as u32;
    let mut callers = Vec::new();
    for number in 0..20 {
        callers.push(attach(&node.addr().to_string(), &format!("tenant {number}")).await);
    }
    // Four writers take all of the room. One of them stops in the middle of a part.
    let mut silent = Vec::new();
    for number in 0..4 {
        silent.push(silent_writer(&node, &format!("silent {number}"), all / 4 - u32::from(number == 0)).await);
    }
    let stuck = TcpStream::connect(node.addr()).await.unwrap();
    let half = tokio::spawn(async move {
        let stream = half_a_part(stuck, &Reserved::first(key(20_000), vec![PAGE as u32])).await;
        std::future::pending::<()>().await;
        drop(stream);
    });
    eventually("all room is taken", || status_number(&node, "/budget/puts/bytes") == u64::from(all) * PAGE as u64)
        .await;
    let taken_back = || status_number(&node, "/counters/puts_taken_back");
    assert_eq!(taken_back(), 0);
    // How many get in at their first return is a matter of time. Tests of the budget count it,
    // with a clock of their own.
    let puts = (0..).zip(&callers).map(|(number, caller)| async move {
        for returned in 0.. {
            let page = pages(number..number + 1);
            let retry_after = match caller.put_pages(page, PutOptions::default(), soon()).await[..] {
                [PutOutcome::Stored] => return returned,
                [PutOutcome::Busy { retry_after }] => retry_after,
                ref other => panic!("caller {number}: {other:?}"),
            };
            assert!(returned <= RETURNS_MAX, "caller {number} was sent away {returned} times");
            tokio::time::sleep(retry_after).await;
        }
        unreachable!("it returns until it gets in")
    });
    let returns = futures::future::join_all(puts).await;
    println!("returns of each caller: {returns:?}");
    assert!(returns.iter().any(|&returned| returned > 0), "no caller was refused");
    assert!(taken_back() > 0, "the room came from the silent writers");
    // The silent writers keep their connections.
    for mut raw in silent {
        raw.send(2, &Request::Commit(vec![Entry { request: 1, index: 0 }])).await;
        assert!(matches!(raw.receive().await, Some((2, Response::Committed(_)))));
    }
    half.abort();
    at_rest(&node).await;
    node.shutdown().await;
}
/// Sends half of a part. Returns the connection, which the node reads on.
async fn half_a_part(mut stream: TcpStream, page: &Reserved) -> TcpStream {
    let part = Request::Part {
        put: Entry { request: 1, index: 0 },
        part: 0,
        crcs: vec![0; PAGE >> 16],
        bytes: PartLocation::Inline,
    };
    let frames = [
        hello(descriptor("t")).frame(PROTOCOL_VERSION_MIN, 0, 0, None),
        Request::Reserve(vec![page.clone()]).frame(PROTOCOL_VERSION, 1, 0, None),
        part.frame(PROTOCOL_VERSION, 2, 0, Some(Box::new(payload(0)))),
    ];
    for (number, mut frame) in (0..).zip(frames) {
        frame.number(number);
        stream.write_all(&frame.head).await.unwrap();
    }
    stream.write_all(&payload(0)[..PAGE / 2]).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenant_gets_its_share_while_another_asks_for_everything() {
    despite_stops(share_a_budget).await;
}

async fn share_a_budget() {
    let node = Node::start(options()).await.unwrap();
    let (greedy, modest) =
        (attach(&node.addr().to_string(), "greedy").await, attach(&node.addr().to_string(), "modest").await);
    let all = status_number(&node, "/budget/puts/bytes_max") / PAGE as u64;
    let put =
        |client: &Client, number| client.put_with(pages(number..number + 1).remove(0).0, PutOptions::default(), soon());
    let mut open: Vec<_> = (0..all as u32).map(|number| put(&greedy, number)).collect();
    eventually("the greedy tenant has the whole budget", || {
        status_number(&node, "/budget/puts/bytes") == all * PAGE as u64
    })
    .await;
    let refused = modest.put_pages(pages(500..501), PutOptions::default(), soon()).await;
    assert!(matches!(refused[0], PutOutcome::Busy { .. }));
    // The greedy tenant gets nothing more until the other one has its half.
    open.truncate(all as usize - 4);
    eventually("some of the budget is returned", || {
        status_number(&node, "/budget/puts/bytes") == (all - 4) * PAGE as u64
    })
    .await;
    let outcomes = greedy.put_pages(pages(600..601), PutOptions::default(), soon()).await;
    assert!(matches!(outcomes[0], PutOutcome::Busy { .. }), "{outcomes:?}");
    let outcomes = modest.put_pages(pages(700..704), PutOptions::default(), soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
    drop(open);
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_maximum_number_are_answered_busy_and_counted() {
    let node = Node::start(NodeOptions { connections_max: 3, ..options() }).await.unwrap();
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(Raw::attach(&node, "t").await);
    }
    for refused in 1..=5 {
        let mut raw = Raw::connect(&node, "t").await;
        let answer = raw.receive().await;
        assert!(matches!(answer, Some((0, Response::Error { code: ErrorCode::Busy, .. }))), "{answer:?}");
        assert!(raw.receive().await.is_none(), "the node closes the connection");
        assert_eq!(status_number(&node, "/counters/connections_rejected"), refused);
    }
    drop(open.pop());
    eventually("a connection is free again", || status_number(&node, "/budget/connections") < 3).await;
    let client = attach(&node.addr().to_string(), "t").await;
    assert!(client.exists(&[key(0)], soon()).await == [false]);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_memory_limit_are_refused_with_an_error() {
    let node = Node::start(NodeOptions { request_bytes: 1 << 20, ..options() }).await.unwrap();
    let mut raws = Vec::new();
    for _ in 0..16 {
        raws.push(Raw::attach(&node, "t").await);
    }
    let answer = Raw::connect(&node, "t").await.receive().await;
    assert!(matches!(answer, Some((0, Response::Error { code: ErrorCode::Busy, .. }))), "{answer:?}");
    drop(raws.pop());
    eventually("a connection is free again", || status_number(&node, "/budget/connections") < 16).await;
    let client = attach(&node.addr().to_string(), "t").await;
    assert!(client.exists(&[key(0)], soon()).await == [false]);
    // The node refuses a request whose body exceeds the rest of the budget, and keeps the
    // connection.
    let mut raw = raws.pop().unwrap();
    raw.send(7, &Request::Locate(vec![key(1); 8192])).await;
    assert!(matches!(raw.receive().await, Some((7, Response::Busy { index: None, .. }))));
    raw.send(8, &Request::Locate(vec![key(1)])).await;
    assert!(matches!(raw.receive().await, Some((8, Response::Located(_)))));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hedged_get_returns_its_buffers_on_time_at_a_silent_node() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // A node that answers Hello and nothing else.
    let silent = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, write) = stream.into_split();
        let mut reader = FrameReader::new(read);
        let mut writer = FrameWriter::new(write);
        reader.next().await.unwrap().unwrap();
        let hello = Response::Hello {
            version: PROTOCOL_VERSION,
            node_id: "silent".into(),
            epoch: 1,
            namespace: Some(descriptor("t").id()),
            arena_listener: None,
        };
        writer.send(hello.frame(PROTOCOL_VERSION_MIN, 0, None)).await.unwrap();
        while let Ok(Some(_)) = reader.next().await {}
    });
    let client = attach(&address, "t").await;
    let hedged = GetOptions { hedge_after: Some(Duration::from_millis(100)), ..GetOptions::default() };
    let begin = Instant::now();
    let got = client.get_with(wanted(0..3), hedged, soon()).await;
    let took = begin.elapsed();
    assert!(got.iter().all(|(buffer, fetched)| buffer.len() == PAGE && *fetched == Fetched::Miss));
    assert!((Duration::from_millis(100)..PATIENCE).contains(&took), "{took:?}");
    assert_eq!(client.stats().gets_hedged, 1);
    silent.abort();
    // Hedging has no effect at a node that answers.
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    fill(&client, 0..30).await;
    let begin = Instant::now();
    loop {
        let hedges = client.stats().gets_hedged;
        let got = client.get_with(wanted(0..30), hedged, soon()).await;
        if client.stats().gets_hedged == hedges {
            assert!(got.iter().all(|(_, fetched)| fetched.tier().is_some()));
            break;
        }
        // On a busy machine, a node that answers may be later than the hedge.
        assert!(begin.elapsed() < PATIENCE, "every get was hedged");
    }
    node.shutdown().await;
}
