//! Too much at once: what is beyond a budget is refused at once, and nobody pays for what another does.

use bytes::Bytes;
use larder_client::{
    Client, ClientOptions, Fetched, GetOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Tier, Transport,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use larder_wire::{
    Delivery, Entry, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, PartBytes, Request,
    Reserved, Response,
};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

const PAGE: usize = 256 << 10;

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
    NamespaceDescriptor { model: "calm".into(), weights: [3; 32], geometry, tenant: tenant.into() }
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
    assert!(client.ready(Duration::from_secs(5)).await);
    client
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn key(number: u32) -> PageKey {
    PageKey::chain(None, &[number])
}

fn payload(number: u32) -> Bytes {
    (0..PAGE).map(|at| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8).collect::<Vec<u8>>().into()
}

fn pages(numbers: std::ops::Range<u32>) -> Vec<(NewPage, Bytes)> {
    let page = |number| (NewPage { key: key(number), parent: PageKey::NONE, position: 0 }, payload(number));
    numbers.map(page).collect()
}

/// Puts pages a few at a time.
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

fn figure(node: &Node, pointer: &str) -> u64 {
    node.status().pointer(pointer).and_then(|value| value.as_u64()).expect("a number")
}

async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(8), "{what}: not in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Nothing is under way any more.
async fn at_rest(node: &Node) {
    let kinds = ["puts", "reads", "asked", "requests"].map(|kind| format!("/budget/{kind}/bytes"));
    eventually("all comes back", || kinds.iter().all(|kind| figure(node, kind) == 0)).await;
}

/// A client that does as it pleases.
struct Raw {
    reader: FrameReader<OwnedReadHalf>,
    writer: FrameWriter<OwnedWriteHalf>,
}

impl Raw {
    async fn attach(node: &Node, tenant: &str) -> Raw {
        let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
        let mut raw = Raw { reader: FrameReader::new(read), writer: FrameWriter::new(write) };
        let hello = Request::Hello {
            version_min: PROTOCOL_VERSION_MIN,
            version_max: PROTOCOL_VERSION,
            name: "raw".into(),
            namespace: Some(descriptor(tenant)),
        };
        raw.say(0, &hello).await;
        assert!(matches!(raw.hear().await, Some((0, Response::Hello { .. }))));
        raw
    }

    async fn say(&mut self, number: u64, request: &Request) {
        self.writer.send(request.frame(PROTOCOL_VERSION, number, 5000, None)).await.unwrap();
    }

    /// The next answer and its request; payloads are thrown away.
    async fn hear(&mut self) -> Option<(u64, Response)> {
        let header = tokio::time::timeout(Duration::from_secs(5), self.reader.next()).await.unwrap().unwrap()?;
        let response = Response::decode(PROTOCOL_VERSION, header.kind, self.reader.body()).unwrap();
        self.reader.discard(header.payload_bytes as usize).await.unwrap();
        Some((header.request, response))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_get_beyond_the_budget_is_served_as_far_as_it_goes_and_the_rest_refused_at_once() {
    let node = Node::start(NodeOptions { asked_bytes: Some(5 * PAGE as u64), ..options() }).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    fill(&client, 0..20).await;
    let got = client.get_with(wanted(0..22), GetOptions::default(), soon()).await;
    for (number, (bytes, fetched)) in (0..).zip(&got) {
        match fetched {
            Fetched::Had(tier) => assert!(number < 5 && *tier == Tier::L2 && bytes[..] == payload(number)[..]),
            Fetched::Busy { retry_after } => {
                assert!(number >= 5 && (1..=1000).contains(&retry_after.as_millis()), "page {number}");
            }
            Fetched::Miss => panic!("page {number}: busy is no miss"),
        }
    }
    assert_eq!((client.stats().gets_busy, client.stats().get_hits), (17, 5));
    // Who tries again has them all.
    let options = GetOptions { busy_retries: 20, ..GetOptions::default() };
    let got = client.get_with(wanted(0..20), options, soon()).await;
    assert!(got.iter().all(|(_, fetched)| fetched.tier().is_some()));
    assert!(figure(&node, "/counters/refusals") >= 2 && figure(&node, "/counters/pages_refused") >= 17);
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_beyond_the_budget_is_refused_with_a_hint_and_done_by_who_tries_again() {
    let node = Node::start(NodeOptions { connection_bytes: Some(2 << 20), ..options() }).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    let outcomes = client.put_pages(pages(0..12), PutOptions::default(), soon()).await;
    let busy = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Busy { retry_after } if !retry_after.is_zero());
    assert_eq!(outcomes.iter().filter(|outcome| busy(outcome)).count(), 4, "{outcomes:?}");
    let options = PutOptions { busy_retries: 20, ..PutOptions::default() };
    let outcomes = client.put_pages(pages(100..150), options, soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
    // Another connection of the same tenant has a bound of its own.
    let other = attach(&node.addr().to_string(), "t").await;
    let open: Vec<_> =
        pages(200..208).into_iter().map(|(page, _)| client.put_with(page, PutOptions::default(), soon())).collect();
    eventually("they are reserved", || figure(&node, "/budget/puts/bytes") == 2 << 20).await;
    let mut ninth = client.put_with(pages(208..209).remove(0).0, options, soon());
    ninth.part(0, payload(208));
    assert_eq!(other.put_pages(pages(300..301), PutOptions::default(), soon()).await, [PutOutcome::Stored]);
    drop(open);
    assert_eq!(ninth.commit(soon()).await, PutOutcome::Stored, "it is tried again by itself");
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_take_nothing_hold_nobody_up() {
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "good").await;
    fill(&client, 0..100).await;
    // More of them than there is room for.
    let mut stuck = Vec::new();
    for _ in 0..12 {
        let mut raw = Raw::attach(&node, "good").await;
        for number in 1..5 {
            raw.say(number, &Request::Get { keys: (0..100).map(key).collect(), by: Delivery::Sent }).await;
        }
        stuck.push(raw);
    }
    let max = figure(&node, "/budget/reads/bytes_max");
    // How much the kernel takes of them first is its own affair.
    eventually("they are in the way", || figure(&node, "/budget/reads/bytes") > 0).await;
    let options = GetOptions { busy_retries: 100, ..GetOptions::default() };
    let begin = Instant::now();
    for round in 0..20 {
        let got = client.get_with(wanted(round..round + 20), options, soon()).await;
        assert!(got.iter().all(|(_, fetched)| fetched.tier().is_some()), "round {round}");
        assert!(figure(&node, "/budget/reads/bytes") <= max);
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    drop(stuck);
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_answer_does_not_wait_behind_the_readers_own_pages() {
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    fill(&client, 0..200).await;
    let mut raw = Raw::attach(&node, "t").await;
    raw.say(1, &Request::Get { keys: (0..200).map(key).collect(), by: Delivery::Sent }).await;
    // What the kernel takes is on its way.
    tokio::time::sleep(Duration::from_millis(200)).await;
    raw.say(2, &Request::Locate(vec![key(0)])).await;
    let (mut before, mut behind) = (0, 0);
    let mut located = false;
    while let Some((_, response)) = raw.hear().await {
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
async fn a_writer_that_vanishes_half_way_costs_its_own_put() {
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    let mut raw = Raw::attach(&node, "t").await;
    let page = |number| Reserved {
        key: key(number),
        parent: PageKey::NONE,
        position: 0,
        ttl_ms: 0,
        part_bytes: vec![PAGE as u32],
    };
    raw.say(1, &Request::Reserve((0..8).map(page).collect())).await;
    assert!(matches!(raw.hear().await, Some((1, Response::Reserved { retry_after_ms: 0, .. }))));
    assert_eq!(figure(&node, "/budget/puts/bytes"), 8 * PAGE as u64);
    drop(raw);
    let stream = TcpStream::connect(node.addr()).await.unwrap();
    half_a_part(stream, &page(20)).await;
    at_rest(&node).await;
    assert_eq!(figure(&node, "/puts_open"), 0);
    let outcomes = client.put_pages(pages(0..22), PutOptions::default(), soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "nothing stands in the way: {outcomes:?}");
    node.shutdown().await;
}

/// Says hello, reserves, sends half of a part, and is gone.
async fn half_a_part(mut stream: TcpStream, page: &Reserved) {
    let hello = Request::Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION,
        name: "half".into(),
        namespace: Some(descriptor("t")),
    };
    let part = Request::Part {
        put: Entry { request: 1, index: 0 },
        part: 0,
        crcs: vec![0; PAGE >> 16],
        bytes: PartBytes::Payload,
    };
    let frames = [
        hello.frame(PROTOCOL_VERSION_MIN, 0, 0, None),
        Request::Reserve(vec![page.clone()]).frame(PROTOCOL_VERSION, 1, 0, None),
        part.frame(PROTOCOL_VERSION, 2, 0, Some(Box::new(payload(0)))),
    ];
    for (number, mut frame) in (0..).zip(frames) {
        frame.number(number);
        stream.write_all(&frame.head).await.unwrap();
    }
    stream.write_all(&payload(0)[..PAGE / 2]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_gets_its_share_however_much_another_wants() {
    let node = Node::start(options()).await.unwrap();
    let (greedy, modest) =
        (attach(&node.addr().to_string(), "greedy").await, attach(&node.addr().to_string(), "modest").await);
    let all = figure(&node, "/budget/puts/bytes_max") / PAGE as u64;
    let put =
        |client: &Client, number| client.put_with(pages(number..number + 1).remove(0).0, PutOptions::default(), soon());
    let mut open: Vec<_> = (0..all as u32).map(|number| put(&greedy, number)).collect();
    eventually("it has all there is", || figure(&node, "/budget/puts/bytes") == all * PAGE as u64).await;
    let refused = modest.put_pages(pages(500..501), PutOptions::default(), soon()).await;
    assert!(matches!(refused[0], PutOutcome::Busy { .. }));
    // As it lets go of some, it gets no more until the other has its half.
    open.truncate(all as usize - 4);
    eventually("some come back", || figure(&node, "/budget/puts/bytes") == (all - 4) * PAGE as u64).await;
    let outcomes = greedy.put_pages(pages(600..601), PutOptions::default(), soon()).await;
    assert!(matches!(outcomes[0], PutOutcome::Busy { .. }), "{outcomes:?}");
    let outcomes = modest.put_pages(pages(700..704), PutOptions::default(), soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
    drop(open);
    at_rest(&node).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_without_memory_are_refused_with_a_word() {
    let node = Node::start(NodeOptions { request_bytes: 1 << 20, ..options() }).await.unwrap();
    let mut raws = Vec::new();
    for _ in 0..16 {
        raws.push(Raw::attach(&node, "t").await);
    }
    let (read, _write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
    let mut reader = FrameReader::new(read);
    let header = reader.next().await.unwrap().unwrap();
    let answer = Response::decode(PROTOCOL_VERSION_MIN, header.kind, reader.body()).unwrap();
    assert!(matches!(answer, Response::Error { code: ErrorCode::Busy, .. }), "{answer:?}");
    drop(raws.pop());
    eventually("there is room again", || figure(&node, "/budget/connections") < 16).await;
    let client = attach(&node.addr().to_string(), "t").await;
    assert!(client.exists(&[key(0)], soon()).await == [false]);
    // A request whose body is too much for what is left is refused unread, and the connection goes on.
    let mut raw = raws.pop().unwrap();
    raw.say(7, &Request::Locate(vec![key(1); 8192])).await;
    assert!(matches!(raw.hear().await, Some((7, Response::Busy { index: None, .. }))));
    raw.say(8, &Request::Locate(vec![key(1)])).await;
    assert!(matches!(raw.hear().await, Some((8, Response::Located(_)))));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_hedges_has_its_buffers_back_by_its_own_clock() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // A node that says hello and nothing else.
    let silent = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, write) = stream.into_split();
        let (mut reader, mut writer) = (FrameReader::new(read), FrameWriter::new(write));
        reader.next().await.unwrap().unwrap();
        let hello = Response::Hello {
            version: PROTOCOL_VERSION,
            node_id: "silent".into(),
            epoch: 1,
            namespace: Some(descriptor("t").id()),
            door: None,
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
    assert!((100..900).contains(&took.as_millis()), "{took:?}");
    assert_eq!(client.stats().gets_hedged, 1);
    silent.abort();
    // At a node that answers, hedging changes nothing.
    let node = Node::start(options()).await.unwrap();
    let client = attach(&node.addr().to_string(), "t").await;
    fill(&client, 0..30).await;
    let got = client.get_with(wanted(0..30), hedged, soon()).await;
    assert!(got.iter().all(|(_, fetched)| fetched.tier().is_some()) && client.stats().gets_hedged == 0);
    node.shutdown().await;
}
