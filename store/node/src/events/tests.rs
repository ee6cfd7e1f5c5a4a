//! Subscribers over real sockets, in front of a store without a node.

use super::seats::Seat;
use super::*;
use crate::devices::Devices;
use crate::event_limits::SNAPSHOT_PAUSE_MIN;
use crate::identity::Identity;
use crate::options::NodeOptions;
use crate::page_changes::{ChangeKind, Medium, block_hash};
use crate::store::Store;
use crate::token_ids::test_memory;
use larder_format::{NamespaceId, PageId, PageKey, chunk_crcs};
use larder_memory::Arena;
use larder_runtime::Clock;
use larder_wire::{CommitOutcome, PROTOCOL_VERSION, Reserved};
use std::net::{IpAddr, SocketAddr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const NAMESPACE: NamespaceId = NamespaceId([7; 32]);
const END_OF_REPLAY: u64 = u64::MAX;
/// Maximum time of one read in a test.
const PATIENCE: Duration = Duration::from_secs(60);

fn server(stall_timeout: Duration) -> Arc<EventServer> {
    server_with(NodeOptions { stall_timeout, ..NodeOptions::default() })
}

pub(super) fn server_with(options: NodeOptions) -> Arc<EventServer> {
    let options = NodeOptions {
        l2_bytes: 1 << 20,
        in_flight_bytes: Some(1 << 20),
        kv_events_listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        kv_events_topic: Some("kv@node@model".into()),
        ..options
    };
    let arena = Arena::new(options.arena_bytes() as usize).unwrap();
    let store = Store::new(&options, arena, Devices::default(), Clock::system(), 1);
    let identity = Identity { node_id: "node".into(), epoch: 1 };
    let state = NodeState::new(identity, store, None, None, PROTOCOL_VERSION, Duration::ZERO, None);
    EventServer::new(state).unwrap()
}

/// Listens on a free port.
async fn listen(server: &Arc<EventServer>, kind: SocketKind) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(server.clone().accept(kind, listener, CancellationToken::new(), TaskTracker::new()));
    address
}

fn key(number: u8) -> PageKey {
    PageKey([number; 32])
}

/// Token ids of a page: none, one or more.
fn token_ids(number: u8) -> Vec<u32> {
    (1..u32::from(number)).collect()
}

fn put(server: &EventServer, number: u8) {
    let parent = if number > 1 { key(number - 1) } else { PageKey::NONE };
    let id = PageId { namespace: NAMESPACE, key: key(number) };
    let page = Reserved { parent, token_ids: token_ids(number), ..Reserved::first(id.key, vec![100]) };
    let store = &server.node.store;
    let put = store.reserve(id, page).ok().unwrap();
    let mut part = put.take_part(0, 100).unwrap();
    part.fill(number);
    let crcs = chunk_crcs(&part).collect();
    assert!(put.land(0, part, crcs) && store.puts().commit(&put) == CommitOutcome::Stored);
}

async fn forget(server: &EventServer, number: u8) {
    let id = PageId { namespace: NAMESPACE, key: key(number) };
    assert_eq!(server.node.store.forget(&[id], now() + PATIENCE).await.unwrap(), 1);
}

fn stored(number: u8) -> PageChange {
    let parent = (number > 1).then(|| block_hash(&key(number - 1)));
    let token_ids = test_memory().keep(&NAMESPACE, token_ids(number));
    let kind = ChangeKind::Stored { parent, token_ids };
    PageChange { namespace: NAMESPACE, hash: block_hash(&key(number)), kind, medium: Medium::L2 }
}

fn removed(number: u8) -> PageChange {
    PageChange { kind: ChangeKind::Removed, ..stored(number) }
}

/// The events of a batch with at most 15 of them: without time, number of events and rank.
fn events(batch: &[u8]) -> &[u8] {
    assert_eq!(batch[10] >> 4, 9, "an array of at most 15 elements");
    &batch[11..batch.len() - 1]
}

fn encoded(is_cleared: bool, changes: &[PageChange]) -> Vec<u8> {
    events(&encode::batch(0, is_cleared, changes)).to_vec()
}

/// Makes the oldest batches go, and with them the only way to the pages of L2 but a snapshot.
pub(super) fn lose_batch_0(server: &EventServer) {
    for _ in 0..400 {
        server.batches.append(vec![3; 60_000]);
    }
    assert!(server.batches.numbers().start > 0);
}

/// One end of a connection, as libzmq would be.
struct Client(TcpStream);

impl Client {
    async fn open(address: SocketAddr, socket_type: &[u8]) -> Client {
        let mut client = Client(TcpStream::connect(address).await.unwrap());
        client.0.write_all(&larder_zmtp::greeting()).await.unwrap();
        let mut greeting = [0; larder_zmtp::GREETING_BYTES];
        client.0.read_exact(&mut greeting).await.unwrap();
        assert_eq!(greeting, larder_zmtp::greeting());
        let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        ready.push(socket_type.len() as u8);
        ready.extend_from_slice(socket_type);
        client.send(4, &ready).await;
        let (flags, body) = client.frame().await;
        assert!(flags == 4 && body.starts_with(b"\x05READY"), "{body:?}");
        client
    }

    async fn subscriber(address: SocketAddr, prefix: &str) -> Client {
        let mut client = Client::open(address, b"SUB").await;
        client.send(0, &[b"\x01".as_slice(), prefix.as_bytes()].concat()).await;
        // The node has taken the subscription when it answers the heartbeat behind it.
        client.send(4, b"\x04PING\0\0beat").await;
        assert_eq!(client.frame().await, (4, b"\x04PONGbeat".to_vec()));
        client
    }

    async fn send(&mut self, flags: u8, body: &[u8]) {
        self.0.write_all(&[[flags, body.len() as u8].as_slice(), body].concat()).await.unwrap();
    }

    async fn frame(&mut self) -> (u8, Vec<u8>) {
        let read = async {
            let flags = self.0.read_u8().await.unwrap();
            let length = if flags & 2 == 0 {
                u64::from(self.0.read_u8().await.unwrap())
            } else {
                self.0.read_u64().await.unwrap()
            };
            let mut body = vec![0; length as usize];
            self.0.read_exact(&mut body).await.unwrap();
            (flags & !2, body)
        };
        tokio::time::timeout(PATIENCE, read).await.expect("a frame arrives")
    }

    /// Receives a message of three frames: the first one, the number, and the batch.
    async fn message(&mut self) -> (Vec<u8>, u64, Vec<u8>) {
        let (first_flags, first) = self.frame().await;
        let (number_flags, number) = self.frame().await;
        let (batch_flags, batch) = self.frame().await;
        assert_eq!((first_flags, number_flags, batch_flags), (1, 1, 0));
        (first, u64::from_be_bytes(number.try_into().unwrap()), batch)
    }

    /// Asks for a replay, and receives its messages up to the end.
    async fn replay(&mut self, number: u64) -> Vec<(u64, Vec<u8>)> {
        self.send(1, &[]).await;
        self.send(0, &number.to_be_bytes()).await;
        let mut messages = Vec::new();
        loop {
            let (delimiter, number, batch) = self.message().await;
            assert!(delimiter.is_empty());
            if number == END_OF_REPLAY {
                assert!(batch.is_empty());
                return messages;
            }
            messages.push((number, batch));
        }
    }

    /// Waits until the node closes the connection.
    async fn ended(mut self) {
        let mut rest = Vec::new();
        let read = self.0.read_to_end(&mut rest);
        // A reset is an end, too.
        let _ = tokio::time::timeout(PATIENCE, read).await.expect("the connection ends");
    }
}

#[tokio::test]
async fn subscriber_receives_changes_in_order_with_consecutive_numbers() {
    let server = server(PATIENCE);
    let address = listen(&server, SocketKind::Pub).await;
    tokio::spawn(server.clone().publish(CancellationToken::new()));
    let mut all = Client::subscriber(address, "").await;
    let mut other = Client::subscriber(address, "other").await;
    let mut mine = Client::subscriber(address, "kv@node").await;
    put(&server, 1);
    put(&server, 2);
    forget(&server, 1).await;
    let expected = encoded(false, &[stored(1), stored(2), removed(1)]);
    for subscriber in [&mut all, &mut mine] {
        let (mut received, mut next) = (Vec::new(), 1);
        while received.len() < expected.len() {
            let (topic, number, batch) = subscriber.message().await;
            assert_eq!((topic.as_slice(), number), (b"kv@node@model".as_slice(), next));
            received.extend_from_slice(events(&batch));
            next += 1;
        }
        assert_eq!(received, expected);
    }
    assert_eq!(server.node.metrics.kv_events_published.get(), 3);
    other.send(4, b"\x04PING\0\0").await;
    assert_eq!(other.frame().await, (4, b"\x04PONG".to_vec()), "another topic gets no batch");
}

#[tokio::test]
async fn slow_subscriber_misses_batches_and_delays_nothing() {
    let server = server(PATIENCE);
    let address = listen(&server, SocketKind::Pub).await;
    let mut subscriber = Client::subscriber(address, "kv").await;
    for _ in 0..1000 {
        server.batches.append(vec![0; 60_000]);
    }
    let (mut count, mut last) = (0, 0);
    while last < 1000 {
        let (_, number, _) = subscriber.message().await;
        assert!(number > last, "{number} after {last}");
        (count, last) = (count + 1, number);
    }
    let missed = server.node.metrics.kv_events_batches_missed.get();
    assert!(missed > 500, "{missed}");
    assert_eq!(count + missed, 1000);
}

#[tokio::test]
async fn subscriber_that_takes_nothing_is_disconnected() {
    let server = server(Duration::from_millis(200));
    let address = listen(&server, SocketKind::Pub).await;
    let subscriber = Client::subscriber(address, "").await;
    // More than the buffers of a socket: the node must wait for the subscriber.
    for _ in 0..1000 {
        server.batches.append(vec![0; 60_000]);
        tokio::task::yield_now().await;
    }
    let refused = &server.node.metrics.kv_events_connections_refused;
    let closed = async {
        while refused.get() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, closed).await.expect("the node closes the connection");
    subscriber.ended().await;
}

#[tokio::test]
async fn replay_has_the_kept_batches_or_begins_with_a_snapshot() {
    let server = server(PATIENCE);
    let address = listen(&server, SocketKind::Router).await;
    for number in 1..=3 {
        put(&server, number);
    }
    server.batches.append(vec![1]);
    server.batches.append(vec![2]);
    let mut client = Client::open(address, b"DEALER").await;
    assert_eq!(client.replay(1).await, [(1, vec![1]), (2, vec![2])]);
    assert!(client.replay(3).await.is_empty() && client.replay(u64::MAX - 1).await.is_empty());
    let kept = client.replay(0).await;
    assert_eq!(events(&kept[0].1), encoded(true, &[]), "a node begins with the end of all pages");
    lose_batch_0(&server);
    let snapshot = client.replay(0).await;
    assert_eq!(snapshot.len(), 1);
    let (number, batch) = &snapshot[0];
    assert_eq!(*number, 402, "the number of the newest batch");
    let all = events(batch);
    assert_eq!(all.len(), encoded(true, &[stored(1), stored(2), stored(3)]).len());
    assert!(all.starts_with(&encoded(true, &[])));
    for number in 1..=3 {
        let page = encoded(false, &[stored(number)]);
        assert!(all.windows(page.len()).any(|bytes| bytes == page), "page {number}");
    }
}

#[tokio::test]
async fn snapshots_of_a_connection_have_a_pause_between_them() {
    let server = server(PATIENCE);
    let address = listen(&server, SocketKind::Router).await;
    lose_batch_0(&server);
    let mut client = Client::open(address, b"DEALER").await;
    let begin = now();
    assert_eq!(client.replay(0).await.len(), 1);
    assert_eq!(client.replay(0).await.len(), 1);
    assert!(now() - begin >= SNAPSHOT_PAUSE_MIN, "{:?}", now() - begin);
}

#[tokio::test]
async fn replay_waits_for_its_turn_to_walk_up_to_the_stall_timeout() {
    let server = server(Duration::from_millis(200));
    let address = listen(&server, SocketKind::Router).await;
    lose_batch_0(&server);
    let turn = server.walker.lock().await;
    let mut late = Client::open(address, b"DEALER").await;
    late.send(1, &[]).await;
    late.send(0, &0u64.to_be_bytes()).await;
    late.ended().await;
    assert_eq!(server.node.metrics.kv_events_connections_refused.get(), 1);
    drop(turn);
    let mut client = Client::open(address, b"DEALER").await;
    assert_eq!(client.replay(0).await.len(), 1);
}

#[tokio::test]
async fn request_of_another_form_ends_its_connection() {
    let server = server(PATIENCE);
    let address = listen(&server, SocketKind::Router).await;
    let mut client = Client::open(address, b"REQ").await;
    client.send(1, b"").await;
    client.send(0, b"everything").await;
    client.ended().await;
    // The empty frame before the number is missing.
    let mut client = Client::open(address, b"DEALER").await;
    client.send(0, &7u64.to_be_bytes()).await;
    client.ended().await;
    assert_eq!(server.node.metrics.kv_events_connections_refused.get(), 2);
}

#[tokio::test]
async fn lost_changes_are_followed_by_all_pages() {
    let server = server(PATIENCE);
    put(&server, 1);
    put(&server, 2);
    forget(&server, 1).await;
    let page = server.node.store.tiers().get_l2(&PageId { namespace: NAMESPACE, key: key(2) }).unwrap();
    // More changes than the queue takes, before the publisher runs.
    while server.node.metrics.kv_events_dropped.get() == 0 {
        server.changes.stored(&page);
    }
    tokio::spawn(server.clone().publish(CancellationToken::new()));
    tokio::time::timeout(PATIENCE, server.batches.wait_for(2)).await.expect("two batches");
    let published: Vec<Vec<u8>> =
        (1..=2).map(|number| events(&server.batches.since(number).unwrap().1).to_vec()).collect();
    assert_eq!(published, [encoded(true, &[]), encoded(false, &[stored(2)])]);
}

/// Waits until so many changes were published.
async fn wait_for_published(server: &EventServer, changes: u64) {
    let published = async {
        while server.node.metrics.kv_events_published.get() < changes {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, published).await.expect("the publisher takes the changes");
}

#[tokio::test]
async fn changes_during_a_walk_are_published_before_the_queue_overflows() {
    /// The queue has room for these, but not for twice as many.
    const CHANGES: u64 = 40_000;
    let server = server_with(NodeOptions { kv_events_l3: true, ..NodeOptions::default() });
    put(&server, 1);
    let page = server.node.store.tiers().get_l2(&PageId { namespace: NAMESPACE, key: key(1) }).unwrap();
    let first_turn = server.walker.lock().await;
    tokio::spawn(server.clone().publish(CancellationToken::new()));
    // The walk has two steps, one per tier. From here on, the first one waits for its turn.
    tokio::time::timeout(PATIENCE, server.batches.wait_for(1)).await.expect("the end of all pages");
    (0..CHANGES).for_each(|_| server.changes.stored(&page));
    drop(first_turn);
    // After the first step, and before the second one.
    let second_turn = server.walker.lock().await;
    wait_for_published(&server, CHANGES).await;
    (0..CHANGES).for_each(|_| server.changes.stored(&page));
    drop(second_turn);
    wait_for_published(&server, 2 * CHANGES).await;
    assert_eq!(server.node.metrics.kv_events_dropped.get(), 0);
}

#[tokio::test]
async fn connection_without_a_subscription_or_a_request_is_closed() {
    let mut server = server(PATIENCE);
    Arc::get_mut(&mut server).unwrap().unused_timeout = Duration::from_secs(1);
    let events = listen(&server, SocketKind::Pub).await;
    let replays = listen(&server, SocketKind::Router).await;
    let mut used = Client::subscriber(events, "").await;
    Client::open(events, b"SUB").await.ended().await;
    Client::subscriber(events, "other").await.ended().await;
    Client::open(replays, b"DEALER").await.ended().await;
    let mut client = Client::open(replays, b"DEALER").await;
    assert_eq!(client.replay(0).await.len(), 1);
    client.ended().await;
    let mut late = Client::open(replays, b"DEALER").await;
    late.send(1, &[]).await;
    late.ended().await;
    assert_eq!(server.node.metrics.kv_events_connections_refused.get(), 5);
    used.send(4, b"\x04PING\0\0").await;
    assert_eq!(used.frame().await, (4, b"\x04PONG".to_vec()), "a subscriber may wait for ever");
}

/// Seats of strangers, each with an address of its own, until there is none left for another one.
fn strangers(seats: &Arc<Seats>) -> Vec<Seat> {
    let address = |number: u16| IpAddr::from((0x0a00_0000 | u32::from(number)).to_be_bytes());
    (0..=u16::MAX).map_while(|number| seats.take(Peer::Address(address(number)))).collect()
}

#[tokio::test]
async fn subscriptions_and_replays_make_a_peer_known() {
    let server = server(PATIENCE);
    let events = listen(&server, SocketKind::Pub).await;
    let replays = listen(&server, SocketKind::Router).await;
    let mut others = Vec::new();
    for seats in [&server.subscribers, &server.replays] {
        others.extend(strangers(seats));
        assert!(seats.take(Peer::of(events)).is_none(), "unknown so far");
    }
    // The peer needs a seat for its first use.
    others.clear();
    let mut subscriber = Client::subscriber(events, "").await;
    server.batches.append(vec![1]);
    subscriber.message().await;
    assert!(!Client::open(replays, b"DEALER").await.replay(0).await.is_empty());
    for seats in [&server.subscribers, &server.replays] {
        others.extend(strangers(seats));
        assert!(seats.take(Peer::of(events)).is_some(), "a reserved seat");
    }
}

#[tokio::test]
async fn strangers_and_connections_beyond_the_bound_are_closed() {
    let server = server(PATIENCE);
    let address = listen(&server, SocketKind::Pub).await;
    let mut browser = Client(TcpStream::connect(address).await.unwrap());
    browser.0.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    browser.ended().await;
    let refused = &server.node.metrics.kv_events_connections_refused;
    assert_eq!(refused.get(), 1);
    let of_one_address = SUBSCRIBERS_MAX - SUBSCRIBERS_MAX / 4;
    let mut clients = Vec::new();
    for _ in 0..of_one_address {
        clients.push(Client::subscriber(address, "").await);
    }
    Client(TcpStream::connect(address).await.unwrap()).ended().await;
    assert_eq!(refused.get(), 2);
    clients.pop().unwrap().0.shutdown().await.unwrap();
    let again = async {
        // The seat is free a moment after its connection has ended.
        while server.subscribers.take(Peer::of(address)).is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again).await.expect("a place is free again");
}
