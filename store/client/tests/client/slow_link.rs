//! Large pages over a slow link: a proxy between client and node limits the rate of each direction,
//! for each connection or for all together.
//!
//! The proxy's socket buffers are small. Otherwise the kernel would take a page at once, and hide
//! the rate from both ends.

use crate::key;
use crate::stalls::despite_stops;
use bytes::Bytes;
use larder_client::{
    Client, ClientOptions, DEFAULT_CONNECTIONS, FollowEnd, Member, NewPage, PutOptions, PutOutcome, StoreUrl, Tier,
    Transport,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry};
use larder_node::{Node, NodeOptions};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::task::AbortOnDropHandle;

const RATE: usize = 2_500_000;
/// Lowest rate at which a link counts as fast enough, in bytes per second.
const SLOWEST_RATE: usize = 64_000;
const PROXY_BUFFER_BYTES: u32 = 16 << 10;
/// Segment size of Ethernet. Loopback's 64 KiB would let the peer acknowledge only once a second.
const SEGMENT_BYTES: u32 = 1460;
/// Bytes that the proxy forwards at a time.
const STEP_BYTES: usize = 4 << 10;

fn descriptor(page_bytes: usize) -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 4,
        kv_heads: 4,
        head_dim: 64,
        page_tokens: (page_bytes / (8 << 10)) as u32,
        layers_per_part: 4,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), page_bytes);
    NamespaceDescriptor { model: "slow".into(), weights: [3; 32], geometry, tenant: "t".into() }
}

async fn node() -> Node {
    node_with(NodeOptions::default()).await
}

async fn node_with(options: NodeOptions) -> Node {
    let options = NodeOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        l2_bytes: 256 << 20,
        share_memory: Some(false),
        ..options
    };
    Node::start(options).await.unwrap()
}

/// Rate of one direction of a link, in bytes per second.
struct Pace {
    rate: usize,
    /// Time at which the link has carried all bytes so far.
    free_at: Mutex<Instant>,
}

impl Pace {
    fn new(rate: usize) -> Arc<Pace> {
        Arc::new(Pace { rate, free_at: Mutex::new(Instant::now()) })
    }

    /// Waits until the link has carried `bytes`, behind those of the connections that share it.
    async fn carry(&self, bytes: usize) {
        let due = {
            let mut free_at = self.free_at.lock().unwrap();
            *free_at = (*free_at).max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
            *free_at
        };
        tokio::time::sleep_until(due.into()).await;
    }
}

/// Bytes of a connection that were forwarded to the node, and to its client.
type Forwarded = [AtomicUsize; 2];

/// A link to a node that carries a limited number of bytes per second in each direction.
struct SlowLink {
    address: String,
    /// Connections that clients have opened, in their order.
    connections: Arc<Mutex<Vec<Arc<Forwarded>>>>,
}

impl SlowLink {
    /// Opens a link that carries `rate` for each connection.
    async fn to(node: &Node, rate: usize) -> SlowLink {
        SlowLink::open(node, move || [Pace::new(rate), Pace::new(rate)]).await
    }

    /// Opens a link that carries `rate` for all connections together.
    async fn shared(node: &Node, rate: usize) -> SlowLink {
        let paces = [Pace::new(rate), Pace::new(rate)];
        SlowLink::open(node, move || paces.clone()).await
    }

    /// Opens a link with the rates that `paces` returns for each connection: to the node, and to
    /// the client.
    async fn open(node: &Node, paces: impl Fn() -> [Arc<Pace>; 2] + Send + 'static) -> SlowLink {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(PROXY_BUFFER_BYTES).unwrap();
        socket2::SockRef::from(&socket).set_tcp_mss(SEGMENT_BYTES).unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let listener = socket.listen(16).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let connections = Arc::<Mutex<Vec<Arc<Forwarded>>>>::default();
        tokio::spawn(accept(listener, node.addr(), paces, connections.clone()));
        SlowLink { address, connections }
    }

    /// Bytes that were forwarded to the node, and to clients.
    fn forwarded(&self) -> [usize; 2] {
        let connections = self.connections.lock().unwrap();
        let sum =
            |direction: usize| connections.iter().map(|bytes| bytes[direction].load(Ordering::Relaxed)).sum::<usize>();
        [sum(0), sum(1)]
    }

    /// Bytes that a connection brought to the node. 0 before it is opened.
    fn forwarded_by(&self, connection: usize) -> usize {
        let connections = self.connections.lock().unwrap();
        connections.get(connection).map_or(0, |bytes| bytes[0].load(Ordering::Relaxed))
    }

    /// Number of connections that clients have opened.
    fn connections(&self) -> usize {
        self.connections.lock().unwrap().len()
    }

    async fn attach(&self, page_bytes: usize) -> Client {
        attach(self.address.clone(), page_bytes).await
    }

    /// Attaches a client by so many connections, and waits until it uses all of them.
    async fn attach_by_all(&self, connections: usize, page_bytes: usize) -> Client {
        let client = attach_by(self.address.clone(), page_bytes, connections).await;
        let patience = within(60.0);
        // A forget goes over each connection in use. The first growth may be that of a handshake.
        for connection in 0..connections {
            for _ in 0..3 {
                let before = self.forwarded_by(connection);
                while self.forwarded_by(connection) == before {
                    assert!(Instant::now() < patience, "the client does not use connection {connection}");
                    client.forget(&[key(u32::MAX)], patience).await;
                }
            }
        }
        client
    }
}

async fn accept(
    listener: TcpListener,
    node: SocketAddr,
    paces: impl Fn() -> [Arc<Pace>; 2],
    connections: Arc<Mutex<Vec<Arc<Forwarded>>>>,
) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let forwarded = Arc::<Forwarded>::default();
        connections.lock().unwrap().push(forwarded.clone());
        let [to_node_pace, to_client_pace] = paces();
        tokio::spawn(async move {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_recv_buffer_size(PROXY_BUFFER_BYTES).unwrap();
            socket2::SockRef::from(&socket).set_tcp_mss(SEGMENT_BYTES).unwrap();
            let node = socket.connect(node).await.unwrap();
            let (from_client, to_client) = split(client);
            let (from_node, to_node) = split(node);
            tokio::select! {
                () = forward(from_client, to_node, &to_node_pace, &forwarded[0]) => {}
                () = forward(from_node, to_client, &to_client_pace, &forwarded[1]) => {}
            }
        });
    }
}

fn split(stream: TcpStream) -> (tokio::net::tcp::OwnedReadHalf, tokio::net::tcp::OwnedWriteHalf) {
    stream.set_nodelay(true).unwrap();
    stream.into_split()
}

/// Forwards bytes at the rate of `pace` until one side closes.
async fn forward(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    pace: &Pace,
    forwarded: &AtomicUsize,
) {
    let mut bytes = vec![0; STEP_BYTES];
    while let Ok(received @ 1..) = from.read(&mut bytes).await {
        pace.carry(received).await;
        forwarded.fetch_add(received, Ordering::Relaxed);
        if to.write_all(&bytes[..received]).await.is_err() {
            return;
        }
    }
}

async fn attach(address: String, page_bytes: usize) -> Client {
    attach_by(address, page_bytes, 1).await
}

async fn attach_by(address: String, page_bytes: usize, connections: usize) -> Client {
    let url = StoreUrl { nodes: vec![address], transport: Transport::Tcp, connections };
    let client = Client::attach(url, Some(descriptor(page_bytes)), ClientOptions::default());
    assert!(client.ready(Duration::from_secs(60)).await);
    client
}

fn within(seconds: f64) -> Instant {
    Instant::now() + Duration::from_secs_f64(seconds)
}

fn page(number: u32) -> NewPage {
    NewPage::first(key(number))
}

fn payload(number: u32, page_bytes: usize) -> Bytes {
    (0..page_bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8).collect()
}

async fn put(client: &Client, number: u32, page_bytes: usize) -> PutOutcome {
    put_within(client, number, page_bytes, 60.0).await
}

async fn put_within(client: &Client, number: u32, page_bytes: usize, seconds: f64) -> PutOutcome {
    let pages = vec![(page(number), payload(number, page_bytes))];
    client.put_pages(pages, PutOptions::default(), within(seconds)).await[0]
}

async fn get(client: &Client, number: u32, page_bytes: usize, seconds: f64) -> Option<Tier> {
    let (bytes, tier) = client.get(vec![(key(number), vec![0; page_bytes])], within(seconds)).await.remove(0);
    assert!(tier.is_none() || bytes == payload(number, page_bytes));
    tier
}

#[tokio::test]
async fn slow_link_delivers_a_large_page_within_its_deadline() {
    const PAGE: usize = 16 << 20;
    let node = node().await;
    let link = SlowLink::to(&node, RATE).await;
    let other_link = SlowLink::to(&node, RATE).await;
    let writer = link.attach(PAGE).await;
    let reader = other_link.attach(PAGE).await;
    // Two kinds of puts and a follow, all at once: each direction of a link carries one page.
    let direct = attach(node.addr().to_string(), PAGE).await;
    assert_eq!(put(&direct, 1, PAGE).await, PutOutcome::Stored);
    let (put, got) = tokio::join!(put(&writer, 2, PAGE), get(&reader, 1, PAGE, 60.0));
    assert_eq!((put, got), (PutOutcome::Stored, Some(Tier::L2)));
    let streamed = async {
        let mut put = writer.put(page(3), within(60.0));
        put.part(0, payload(3, PAGE));
        put.commit(within(60.0)).await
    };
    let follow = reader.follow(key(2), vec![0; PAGE], within(60.0));
    let (streamed, (bytes, followed)) = tokio::join!(streamed, follow.finish());
    assert_eq!((streamed, followed), (PutOutcome::Stored, FollowEnd::Sealed));
    assert!(bytes == payload(2, PAGE));
    assert_eq!((link.connections(), other_link.connections()), (1, 1));
    node.shutdown().await;
}

/// Before, the node refused the pages that a reader does not receive in a quarter of its deadline,
/// and the client took them for misses.
#[tokio::test]
async fn slow_link_delivers_a_batch_of_large_pages_within_its_deadline() {
    despite_stops(deliver_a_batch).await;
}

async fn deliver_a_batch() {
    const PAGE: usize = 2 << 20;
    let node = node().await;
    let link = SlowLink::to(&node, RATE).await;
    let reader = link.attach(PAGE).await;
    let direct = attach(node.addr().to_string(), PAGE).await;
    for number in 0..5 {
        assert_eq!(put(&direct, number, PAGE).await, PutOutcome::Stored);
    }
    // The node knows the rate of the link from the first batch on. A batch takes 4.2 s of 15, and a
    // quarter of that is too short for the fifth page.
    for _ in 0..2 {
        let pages = (0..5).map(|number| (key(number), vec![0; PAGE])).collect();
        let fetched = reader.get(pages, within(15.0)).await;
        for (number, (bytes, tier)) in (0..).zip(fetched) {
            assert_eq!(tier, Some(Tier::L2), "page {number}");
            assert!(bytes == payload(number, PAGE));
        }
    }
    assert_eq!(link.connections(), 1);
    node.shutdown().await;
}

/// Before, the node aborted each put that had received nothing for 60 s, although its writer sent
/// the other pages of the batch.
#[tokio::test]
#[ignore = "takes 131 s; part of the nightly list"]
async fn link_of_64_kilobytes_per_second_takes_a_batch_of_pages() {
    const PAGE: usize = 1 << 20;
    let node = node().await;
    let link = SlowLink::to(&node, SLOWEST_RATE).await;
    let writer = link.attach(PAGE).await;
    let pages = (0..8).map(|number| (page(number), payload(number, PAGE))).collect();
    let outcomes = writer.put_pages(pages, PutOptions::default(), within(180.0)).await;
    assert_eq!(outcomes, [PutOutcome::Stored; 8]);
    node.shutdown().await;
}

/// Puts a page and gets another over links of 64 KB/s, each within `seconds`.
async fn slowest_links_deliver(page_bytes: usize, seconds: f64) {
    let node = node().await;
    let direct = attach(node.addr().to_string(), page_bytes).await;
    assert_eq!(put(&direct, 1, page_bytes).await, PutOutcome::Stored);
    let links = [SlowLink::to(&node, SLOWEST_RATE).await, SlowLink::to(&node, SLOWEST_RATE).await];
    let writer = links[0].attach(page_bytes).await;
    let reader = links[1].attach(page_bytes).await;
    let begin = Instant::now();
    let (put, got) = tokio::join!(put_within(&writer, 2, page_bytes, seconds), get(&reader, 1, page_bytes, seconds));
    println!("{page_bytes} bytes each way in {:?}, of {seconds:.1} s", begin.elapsed());
    assert_eq!((put, got), (PutOutcome::Stored, Some(Tier::L2)));
    assert_eq!(get(&direct, 2, page_bytes, 60.0).await, Some(Tier::L2));
    assert_eq!(links.map(|link| link.connections()), [1, 1]);
    node.shutdown().await;
}

#[tokio::test]
async fn link_of_64_kilobytes_per_second_delivers_pages() {
    slowest_links_deliver(512 << 10, 60.0).await;
}

/// The largest page needs 262 s. Its deadline leaves 5 % for headers and 10 s for a busy machine.
#[tokio::test]
#[ignore = "takes 262 s; part of the nightly list"]
async fn link_of_64_kilobytes_per_second_delivers_the_largest_page_within_size_by_rate() {
    const PAGE: usize = 16 << 20;
    slowest_links_deliver(PAGE, PAGE as f64 / SLOWEST_RATE as f64 * 1.05 + 10.0).await;
}

/// Readers that want more memory than the node has, over and over: one read always waits.
async fn crowd(node: &Node, page_bytes: usize) -> Vec<AbortOnDropHandle<()>> {
    let mut readers = Vec::new();
    for _ in 0..4 {
        let client = attach(node.addr().to_string(), page_bytes).await;
        readers.push(AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                let gets = (2..10).map(|number| (key(number), vec![0; page_bytes])).collect();
                client.get(gets, within(10.0)).await;
            }
        })));
    }
    readers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_of_64_kilobytes_per_second_keeps_its_connection_while_others_wait_for_memory() {
    despite_stops(read_beside_a_crowd).await;
}

async fn read_beside_a_crowd() {
    const PAGE: usize = 1 << 20;
    let node = node_with(NodeOptions { in_flight_bytes: Some(8 * PAGE as u64), ..NodeOptions::default() }).await;
    let direct = attach(node.addr().to_string(), PAGE).await;
    for number in 1..10 {
        assert_eq!(put(&direct, number, PAGE).await, PutOutcome::Stored);
    }
    let link = SlowLink::to(&node, SLOWEST_RATE).await;
    let reader = link.attach(PAGE).await;
    let crowd = crowd(&node, PAGE).await;
    // The page takes 16 s once it has memory. On a busy machine it waits for memory much longer.
    let got = get(&reader, 1, PAGE, 300.0).await;
    crowd.iter().for_each(|reader| reader.abort());
    assert_eq!((got, link.connections()), (Some(Tier::L2), 1));
    node.shutdown().await;
}

#[tokio::test]
async fn refused_page_leaves_a_slow_link_at_once() {
    const PAGE: usize = 1 << 20;
    let node = node_with(NodeOptions { in_flight_bytes: Some(2 * PAGE as u64), ..NodeOptions::default() }).await;
    let direct = attach(node.addr().to_string(), PAGE).await;
    let mut occupant = direct.put(page(1), within(60.0));
    occupant.part(0, payload(1, PAGE));
    let link = SlowLink::to(&node, SLOWEST_RATE).await;
    let writer = link.attach(PAGE).await;
    // The client sends the page before the node's answer, which is "in progress" here.
    assert_eq!(put(&writer, 1, PAGE).await, PutOutcome::InProgress);
    // One fragment of 256 KiB cannot be taken back.
    let [sent, _] = link.forwarded();
    assert!(sent < PAGE / 2, "{sent} bytes of a refused page went over the link");
    assert_eq!(occupant.commit(within(10.0)).await, PutOutcome::Stored);
    node.shutdown().await;
}

/// Writers that want more room than the node has, over and over. The numbers of their pages are no
/// multiples of 16.
async fn crowd_of_writers(node: &Node, page_bytes: usize) -> Vec<AbortOnDropHandle<()>> {
    let mut writers = Vec::new();
    for client in 1..5 {
        let others = attach(node.addr().to_string(), page_bytes).await;
        writers.push(AbortOnDropHandle::new(tokio::spawn(async move {
            // Twice the room at a time. Refused pages come back until their deadline.
            for first in (0..).step_by(8) {
                let pages = (first..first + 8).map(|n| (page(n << 4 | client), payload(n, page_bytes)));
                others.put_pages(pages.collect(), PutOptions::default(), within(10.0)).await;
            }
        })));
    }
    writers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writer_of_64_kilobytes_per_second_keeps_its_room_while_others_want_it() {
    despite_stops(write_beside_a_crowd).await;
}

async fn write_beside_a_crowd() {
    const PAGE: usize = 1 << 20;
    let node = node_with(NodeOptions { in_flight_bytes: Some(8 * PAGE as u64), ..NodeOptions::default() }).await;
    let link = SlowLink::to(&node, SLOWEST_RATE).await;
    let writer = link.attach(PAGE).await;
    let crowd = crowd_of_writers(&node, PAGE).await;
    let options = PutOptions { busy_retries: 10_000, ..PutOptions::default() };
    // The page takes 16 s once it has room. On a busy machine it waits for room much longer.
    let stored = writer.put_pages(vec![(page(0), payload(0, PAGE))], options, within(300.0)).await[0];
    let refused = node.status()["counters"]["puts_busy"].as_u64();
    crowd.iter().for_each(|writer| writer.abort());
    assert_eq!((stored, link.connections()), (PutOutcome::Stored, 1));
    assert!(refused > Some(0), "the others always found room");
    node.shutdown().await;
}

/// A client sends over several connections by default. Here they share the slowest link that counts
/// as fast enough, so each connection has a part of its rate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_share_64_kilobytes_per_second_keep_their_room_while_others_want_it() {
    despite_stops(write_over_connections_beside_a_crowd).await;
}

async fn write_over_connections_beside_a_crowd() {
    // Both pages take 8 s together.
    const PAGE: usize = 256 << 10;
    let node = node_with(NodeOptions { in_flight_bytes: Some(8 * PAGE as u64), ..NodeOptions::default() }).await;
    let link = SlowLink::shared(&node, SLOWEST_RATE).await;
    let writer = link.attach_by_all(DEFAULT_CONNECTIONS, PAGE).await;
    let patience = within(60.0);
    let mut commits = Vec::new();
    let mut unused: Vec<usize> = (0..DEFAULT_CONNECTIONS).collect();
    for number in (0..).step_by(16).take(DEFAULT_CONNECTIONS) {
        let before: Vec<usize> = unused.iter().map(|&connection| link.forwarded_by(connection)).collect();
        let mut put = writer.put(page(number), patience);
        put.part(0, payload(number, PAGE));
        commits.push(tokio::spawn(put.commit(patience)));
        // It has its room then, and the next put goes over a connection with less to send.
        let carrier = loop {
            let has_begun = |at: &usize| link.forwarded_by(unused[*at]) >= before[*at] + 2 * STEP_BYTES;
            if let Some(carrier) = (0..unused.len()).find(has_begun) {
                break carrier;
            }
            assert!(Instant::now() < patience, "page {number} goes over no unused connection");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        unused.remove(carrier);
    }
    let crowd = crowd_of_writers(&node, PAGE).await;
    for commit in commits {
        assert_eq!(commit.await.unwrap(), PutOutcome::Stored, "the node took the room of a writer at work");
    }
    let refused = node.status()["counters"]["puts_busy"].as_u64();
    crowd.iter().for_each(|writer| writer.abort());
    assert_eq!(link.connections(), DEFAULT_CONNECTIONS);
    assert!(refused > Some(0), "the others always found room");
    node.shutdown().await;
}

/// The sockets take the last bytes of all pages long before the link has carried them. Nothing else
/// moves on these connections meanwhile.
#[tokio::test]
async fn connections_that_share_64_kilobytes_per_second_survive_the_ends_of_their_puts() {
    despite_stops(write_over_connections).await;
}

async fn write_over_connections() {
    const PAGE: usize = 128 << 10;
    const CONNECTIONS: usize = 6;
    let node = node().await;
    let link = SlowLink::shared(&node, SLOWEST_RATE).await;
    let writer = link.attach_by_all(CONNECTIONS, PAGE).await;
    // All together take 12 s.
    let puts = (0..CONNECTIONS as u32).map(|number| put_within(&writer, number, PAGE, 120.0));
    assert_eq!(futures::future::join_all(puts).await, [PutOutcome::Stored; CONNECTIONS]);
    assert_eq!(link.connections(), CONNECTIONS, "a connection was taken for dead");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_callers_behind_slow_links_get_in_when_a_silent_writer_loses_its_room() {
    const PAGE: usize = 64 << 10;
    const CALLERS: u32 = 12;
    let node = node_with(NodeOptions { in_flight_bytes: Some(8 * PAGE as u64), ..NodeOptions::default() }).await;
    let mut callers = Vec::new();
    for _ in 0..CALLERS {
        callers.push(SlowLink::to(&node, 10 * SLOWEST_RATE).await.attach(PAGE).await);
    }
    let silent = SlowLink::to(&node, RATE).await.attach(PAGE).await;
    let reserved: Vec<_> = (1..=4).map(|number| silent.put(page(number), within(300.0))).collect();
    let patience = within(60.0);
    while node.status()["budget"]["puts"]["bytes"].as_u64() < Some(4 * PAGE as u64) {
        assert!(Instant::now() < patience, "the silent writer never has all of the room");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // How many get in at their first return is a matter of time. Tests of the budget count it.
    let puts = (0..CALLERS).zip(&callers).map(|(number, caller)| async move {
        for refusals in 0..=10 {
            match put(caller, 100 + number, PAGE).await {
                PutOutcome::Stored => return refusals,
                PutOutcome::Busy { retry_after } => tokio::time::sleep(retry_after).await,
                outcome => panic!("caller {number}: {outcome:?}"),
            }
        }
        panic!("caller {number} was refused more than 10 times")
    });
    let refusals = futures::future::join_all(puts).await;
    println!("refusals per caller: {refusals:?}");
    assert!(node.status()["counters"]["puts_taken_back"].as_u64() > Some(0), "the silent writer had all of the room");
    drop(reserved);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forget_ends_a_copy_that_a_slow_link_still_carries() {
    const PAGE: usize = 4 << 20;
    let node = node().await;
    let direct = attach(node.addr().to_string(), PAGE).await;
    // The page takes 7 s, so that the forget comes before its end also on a busy machine.
    let link = SlowLink::to(&node, 10 * SLOWEST_RATE).await;
    let engine = link.attach(PAGE).await;
    let ttl = Some(Duration::from_millis(1));
    let mut first = direct.put_with(page(1), PutOptions { ttl, ..PutOptions::default() }, within(60.0));
    first.part(0, payload(1, PAGE));
    let (PutOutcome::Stored, origin @ Some(_)) = first.commit_described(within(60.0)).await else {
        panic!("the page is stored")
    };
    // The node drops the page. The engine still has it, and puts its copy.
    let patience = within(60.0);
    while direct.exists(&[key(1)], within(60.0)).await[0] {
        assert!(Instant::now() < patience, "the page outlives its time");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let before = link.forwarded()[0];
    let mut copy = engine.put_copy(page(1), origin, PutOptions::default(), within(60.0));
    copy.part(0, payload(1, PAGE));
    let committing = tokio::spawn(async move { copy.commit(within(60.0)).await });
    while link.forwarded()[0] < before + PAGE / 4 {
        assert!(Instant::now() < patience, "the link carries nothing");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(direct.forget(&[key(1)], within(60.0)).await.complete);
    assert_ne!(committing.await.unwrap(), PutOutcome::Stored);
    assert_eq!(get(&engine, 1, PAGE, 60.0).await, None, "the forgotten page came back");
    assert_eq!(link.connections(), 1);
    node.shutdown().await;
}

#[tokio::test]
async fn get_at_its_deadline_does_not_end_another_get_of_the_connection() {
    const PAGE: usize = 4 << 20;
    let node = node().await;
    let direct = attach(node.addr().to_string(), PAGE).await;
    for number in 0..2 {
        assert_eq!(put(&direct, number, PAGE).await, PutOutcome::Stored);
    }
    let link = SlowLink::to(&node, RATE).await;
    let client = link.attach(PAGE).await;
    let long = tokio::spawn({
        let client = client.clone();
        async move { get(&client, 1, PAGE, 60.0).await }
    });
    assert_eq!(get(&client, 0, PAGE, 0.3).await, None);
    // The link needs 1.7 s for each of the pages.
    assert!(!long.is_finished(), "a get with a deadline of 300 ms ends before the page could arrive");
    assert_eq!(long.await.unwrap(), Some(Tier::L2));
    assert_eq!(link.connections(), 1);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_of_an_idle_node_is_small_beside_many_members() {
    /// Fewer than the share of one peer.
    const MEMBERS: usize = 200;
    /// Header of a frame.
    const FRAME_BYTES: usize = 32;
    let node = node().await;
    let registrar = attach(node.addr().to_string(), 16 << 10).await;
    let member = |number| Member { name: format!("member-{number}"), info: "x".repeat(1000).into() };
    let registrations: Vec<_> = (0..MEMBERS).map(|number| registrar.register(member(number))).collect();
    let patience = within(60.0);
    while node.status()["members"] != MEMBERS {
        assert!(Instant::now() < patience, "{}", node.status()["members"]);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let link = SlowLink::to(&node, RATE).await;
    let client = link.attach(16 << 10).await;
    let before = link.forwarded();
    while link.forwarded()[1] == before[1] {
        assert!(Instant::now() < patience, "no answer to a probe");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // On a busy machine, more than one probe may have passed.
    let probes = [0, 1].map(|direction| link.forwarded()[direction] - before[direction]);
    assert!(probes.iter().all(|bytes| bytes % FRAME_BYTES == 0 && *bytes <= 4 * FRAME_BYTES), "{probes:?} bytes");
    drop((registrations, client));
    node.shutdown().await;
}
