//! KV events of a store node, as an indexer sees them.

use larder_client::{Client, ClientOptions, NewPage, PutOptions, PutOutcome, Tier};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_tests::zmq::{KvEvent, decode_events, replay, replay_client, subscriber};
use larder_tests::{PATIENCE, Process, eventually, key, soon, zmq};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 256 << 10;
/// Twice as many as L2 has room for.
const PAGES: u32 = 256;
/// Pages of a sequence.
const SEQUENCE: u32 = 8;
const PAGE_TOKENS: u32 = 32;
/// Time in which the node may take a subscription before the test puts more pages.
const SUBSCRIPTION_TIME: Duration = Duration::from_secs(2);

fn namespace() -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 2,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: PAGE_TOKENS,
        layers_per_part: 2,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), PAGE_BYTES);
    NamespaceDescriptor { model: "m".into(), weights: [1; 32], geometry, tenant: "t".into() }
}

fn page(number: u32) -> NewPage {
    let position = number % SEQUENCE;
    let parent = if position == 0 { PageKey::NONE } else { key(number - 1) };
    // Page 0 has ids of one byte in msgpack, and later ones of up to five.
    let token_ids = (0..PAGE_TOKENS).map(|token| number * 1000 + token).collect();
    NewPage { key: key(number), parent, position, token_ids }
}

fn hash(key: &PageKey) -> i64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&key.0[..8]);
    i64::from_be_bytes(bytes)
}

/// Pages that an indexer believes to be in L2, with their parents and token ids.
#[derive(Default)]
struct Index {
    pages: BTreeMap<i64, (Option<i64>, Vec<u32>)>,
    removals: usize,
    /// Number of the next batch.
    next: u64,
}

impl Index {
    /// Applies a batch.
    ///
    /// # Panics
    /// If a batch is missing before it, or the batch is malformed.
    fn apply(&mut self, number: u64, batch: &[u8]) {
        assert_eq!(number, self.next, "batches are missing");
        self.next += 1;
        for event in decode_events(batch) {
            match event {
                KvEvent::AllBlocksCleared => self.pages.clear(),
                KvEvent::BlockStored { hash, parent, token_ids, .. } => {
                    self.pages.insert(hash, (parent, token_ids));
                }
                KvEvent::BlockRemoved { hash, .. } => {
                    assert!(self.pages.remove(&hash).is_some(), "a page leaves that never entered");
                    self.removals += 1;
                }
            }
        }
    }
}

/// Starts a node with a small L2. Returns the addresses of its stream and of replays.
fn start(more: &[&str]) -> (Process, SocketAddr, SocketAddr) {
    let any = "127.0.0.1:0";
    let arguments = ["store", "--listen", any, "--l2", "32MiB", "--kv-events-listen", any];
    let arguments = [arguments.as_slice(), ["--kv-events-replay-listen", any].as_slice(), more].concat();
    let mut node = Process::start(&arguments);
    let replays = node.wait_for_line("replays of KV events at tcp://");
    let replays = replays.rsplit("tcp://").next().unwrap().parse().unwrap();
    let stream = node.url("tcp://").trim_start_matches("tcp://").parse().unwrap();
    (node, stream, replays)
}

async fn attach(node: &mut Process) -> Client {
    let url = node.url("larder://").parse().unwrap();
    let client = Client::attach(url, Some(namespace()), ClientOptions::default());
    assert!(client.ready(PATIENCE).await);
    client
}

async fn put(client: &Client, numbers: std::ops::Range<u32>) {
    let pages = numbers.map(|number| (page(number), vec![number as u8; PAGE_BYTES].into())).collect();
    let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
    let outcomes = client.put_pages(pages, options, soon()).await;
    assert!(outcomes.iter().all(|outcome| *outcome == PutOutcome::Stored), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_tell_which_pages_are_in_dram() {
    let (mut node, stream, replays) = start(&["--kv-events-topic", "kv@node@model"]);
    let client = attach(&mut node).await;
    let mut follower = subscriber(stream, "kv@node").await;
    // It reads nothing, and must delay neither puts nor the other subscriber.
    let _idle = subscriber(stream, "").await;
    let mut first = None;
    for start in (0..PAGES).step_by(SEQUENCE as usize) {
        put(&client, start..start + SEQUENCE).await;
        if first.is_none() {
            // A subscription has no answer. Its first batch tells that the node has taken it.
            first = tokio::time::timeout(SUBSCRIPTION_TIME, zmq::batch(&mut follower)).await.ok();
        }
    }
    let forgotten: Vec<PageKey> = (PAGES - 3..PAGES).map(key).collect();
    assert!(client.forget(&forgotten, soon()).await.complete);

    let mut replays = replay_client(replays).await;
    let (_, first, batch) = first.expect("the node takes a subscription");
    let mut index = Index::default();
    // The batches from before the subscription, and then those of the stream.
    let earlier = replay(&mut replays, 0).await;
    earlier.iter().take_while(|(number, _)| *number < first).for_each(|(number, batch)| index.apply(*number, batch));
    index.apply(first, &batch);
    let keys: Vec<PageKey> = (0..PAGES).map(key).collect();
    let deadline = soon();
    loop {
        let mut replayed = Index::default();
        replay(&mut replays, 0).await.iter().for_each(|(number, batch)| replayed.apply(*number, batch));
        while index.next < replayed.next {
            let (topic, number, batch) = zmq::batch(&mut follower).await;
            assert_eq!(topic, b"kv@node@model");
            index.apply(number, &batch);
        }
        assert_eq!(index.pages, replayed.pages, "stream and replay agree");
        let located = client.locate(&keys, deadline).await;
        let present = keys.iter().zip(located).filter(|(_, tier)| tier.is_some());
        let in_dram: BTreeSet<i64> = present.map(|(key, _)| hash(key)).collect();
        if index.pages.keys().copied().eq(in_dram) {
            break;
        }
        assert!(Instant::now() < deadline, "the last events never arrive");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    let pages = &index.pages;
    assert!((10..PAGES as usize - 3).contains(&pages.len()), "L2 has some of the pages: {}", pages.len());
    assert_eq!(index.removals, PAGES as usize - pages.len());
    for number in 0..PAGES {
        let NewPage { key, parent, token_ids, .. } = page(number);
        if let Some(found) = pages.get(&hash(&key)) {
            let parent = Some(&parent).filter(|parent| **parent != PageKey::NONE).map(hash);
            assert_eq!(*found, (parent, token_ids), "page {number}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_node_begins_with_an_empty_l2() {
    let dir = larder_tests::data_dir();
    let data_dir = ["--data-dir", dir.path().to_str().unwrap(), "--l3-bytes", "1GiB"];
    let (mut node, _, _) = start(&data_dir);
    put(&attach(&mut node).await, 0..SEQUENCE).await;
    node.sigkill();
    let (mut node, _, replays) = start(&data_dir);
    let mut replays = replay_client(replays).await;
    let batches = replay(&mut replays, 0).await;
    assert_eq!(batches.len(), 1);
    assert_eq!((batches[0].0, decode_events(&batches[0].1)), (0, vec![KvEvent::AllBlocksCleared]));
    // A page that comes back from L3 is announced with its token ids. The write to L3 may have been
    // lost with the node.
    let client = attach(&mut node).await;
    let deadline = soon();
    let (_, tier) = client.get(vec![(key(0), vec![0; PAGE_BYTES])], deadline).await.remove(0);
    if tier.is_some() {
        let (number, batch) = loop {
            if let Some(first) = replay(&mut replays, 1).await.into_iter().next() {
                break first;
            }
            assert!(Instant::now() < deadline, "the page is never announced");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let events = decode_events(&batch);
        let [KvEvent::BlockStored { hash: found, parent: None, token_ids, namespace, is_on_l3: false }] =
            events.as_slice()
        else {
            panic!("{events:?}")
        };
        assert_eq!((number, *found, namespace.len()), (1, hash(&key(0)), 64));
        assert_eq!(*token_ids, page(0).token_ids);
    }
}

/// Pages on L3 after all events of a replay, with their token ids, and the number of removals.
async fn on_l3(replays: &mut zeromq::DealerSocket) -> (BTreeMap<i64, Vec<u32>>, usize) {
    let (mut pages, mut removals) = (BTreeMap::new(), 0);
    for (_, batch) in replay(replays, 0).await {
        for event in decode_events(&batch) {
            match event {
                KvEvent::AllBlocksCleared => pages.clear(),
                KvEvent::BlockStored { hash, token_ids, is_on_l3: true, .. } => {
                    pages.insert(hash, token_ids);
                }
                KvEvent::BlockRemoved { hash, is_on_l3: true, .. } => {
                    removals += usize::from(pages.remove(&hash).is_some());
                }
                _ => {}
            }
        }
    }
    (pages, removals)
}

/// Waits until the events of the first pages agree with the tiers that the node tells. Returns the
/// answer of [`on_l3`].
async fn agreed_on_l3(
    client: &Client,
    replays: &mut zeromq::DealerSocket,
    pages: u32,
) -> (BTreeMap<i64, Vec<u32>>, usize) {
    let keys: Vec<PageKey> = (0..pages).map(key).collect();
    let deadline = soon();
    loop {
        let (pages, removals) = on_l3(replays).await;
        let located = client.locate(&keys, deadline).await;
        let agrees = keys.iter().zip(&located).all(|(key, tier)| match tier {
            Some(Tier::L2) => true,
            Some(Tier::L3) => pages.contains_key(&hash(key)),
            None => !pages.contains_key(&hash(key)),
        });
        if agrees && located.contains(&Some(Tier::L3)) {
            return (pages, removals);
        }
        assert!(Instant::now() < deadline, "the events never agree with the tiers");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_tell_which_pages_are_on_l3() {
    let dir = larder_tests::data_dir();
    let arguments = ["--data-dir", dir.path().to_str().unwrap(), "--l3-bytes", "48MiB", "--kv-events-l3"];
    let (mut node, _, replays) = start(&arguments);
    let client = attach(&mut node).await;
    let mut replays = replay_client(replays).await;
    // A slow device takes only some pages of a round. The others leave L2 before their turn.
    let (mut count, deadline) = (0, Instant::now() + 4 * PATIENCE);
    let pages = loop {
        for start in (count..count + PAGES).step_by(SEQUENCE as usize) {
            put(&client, start..start + SEQUENCE).await;
        }
        count += PAGES;
        let (pages, removals) = agreed_on_l3(&client, &mut replays, count).await;
        if removals > 0 {
            break pages;
        }
        assert!(Instant::now() < deadline, "L3 has room for all {count} pages");
    };
    for number in 0..count {
        if let Some(token_ids) = pages.get(&hash(&key(number))) {
            assert_eq!(*token_ids, page(number).token_ids, "page {number}");
        }
    }
    node.sigkill();
    let (mut node, _, replays) = start(&arguments);
    let client = attach(&mut node).await;
    let (recovered, _) = agreed_on_l3(&client, &mut replay_client(replays).await, count).await;
    assert!(recovered.values().all(Vec::is_empty), "a snapshot has no token ids of pages on L3");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_another_protocol_end_their_connection_only() {
    let (mut node, stream, replays) = start(&[]);
    for address in [stream, replays] {
        for bytes in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0xff; 200], &[0; 64]] {
            let connection = std::net::TcpStream::connect(address).unwrap();
            connection.set_read_timeout(Some(PATIENCE)).unwrap();
            std::io::Write::write_all(&mut &connection, bytes).unwrap();
            // A reset is an end, too. A greeting of the node may come before it.
            let mut rest = Vec::new();
            let ended = std::io::Read::read_to_end(&mut &connection, &mut rest);
            assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
        }
    }
    put(&attach(&mut node).await, 0..SEQUENCE).await;
    let newest = replay(&mut replay_client(replays).await, 0).await.pop().expect("batches are kept");
    assert!(!decode_events(&newest.1).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_connection_is_logged() {
    let (node, _, replays) = start(&[]);
    let parts = ["connections for KV events refused", "peer=127.0.0.1"];
    eventually("the refusal is logged", || async {
        // One address may have twelve. A silent one ends after some time: only bursts are refused.
        let open: Vec<_> = (0..20).filter_map(|_| std::net::TcpStream::connect(replays).ok()).collect();
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(open);
        node.stderr().lines().any(|line| parts.iter().all(|part| line.contains(part)))
    })
    .await;
}
