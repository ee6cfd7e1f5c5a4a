//! Ranges of pages, and the negotiation of protocol versions.

use super::{PATIENCE, descriptor, get, key, nothing_is_held, options, pages, payload, put, soon, transport};
use larder_client::{Client, ClientOptions, DEFAULT_CONNECTIONS, PutOptions, StoreUrl, Tier, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use larder_wire::{
    Delivery, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, PageRange, PayloadLocation,
    Request, Response,
};
use std::ops::Range;
use std::time::Duration;
use tokio::net::TcpStream;

/// Pages of three parts of one and a half chunks, and one of half a chunk.
fn wide() -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 10,
        kv_heads: 2,
        head_dim: 32,
        page_tokens: 64,
        layers_per_part: 3,
        head_groups: 1,
    };
    NamespaceDescriptor { geometry, ..descriptor(9) }
}

fn bytes_of(number: u32) -> Vec<u8> {
    let length = wide().geometry.page_bytes() as u32;
    (0..length).map(|i| (i.wrapping_mul(2_654_435_761) >> 11).wrapping_add(number) as u8).collect()
}

async fn attach(node: &Node, namespace: NamespaceDescriptor, protocol_max: u16) -> Client {
    let url =
        StoreUrl { nodes: vec![node.addr().to_string()], transport: transport(), connections: DEFAULT_CONNECTIONS };
    let client = Client::attach(url, Some(namespace), ClientOptions { protocol_max, ..ClientOptions::default() });
    assert!(client.ready(PATIENCE).await);
    client
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 32) % u64::from(bound)) as u32
    }

    fn range(&mut self) -> Range<u32> {
        let geometry = wide().geometry;
        let bytes = geometry.page_bytes() as u32;
        let start = self.below(bytes);
        match self.below(3) {
            0 => geometry.part_range(self.below(geometry.part_count() as u32) as usize).unwrap(),
            1 => start..start + 1 + self.below(bytes - start),
            _ => start..(start + 1 + self.below(9)).min(bytes),
        }
    }
}

/// Gets these ranges, and compares hits with the slices of the pages. Returns the tiers.
async fn check_ranges(client: &Client, ranges: &[(u32, Range<u32>)]) -> Vec<Option<Tier>> {
    let requests = ranges.iter().map(|(number, range)| (key(*number), range.clone(), vec![0xee; range.len()]));
    let got = client.get_ranges(requests.collect(), soon()).await;
    for ((number, range), (bytes, tier)) in ranges.iter().zip(&got) {
        let expected = &bytes_of(*number)[range.start as usize..range.end as usize];
        assert!(tier.is_none() || bytes == expected, "{range:?} of page {number}");
    }
    got.into_iter().map(|(_, tier)| tier).collect()
}

async fn put_wide(client: &Client, numbers: Range<u32>) {
    let pages = pages(&numbers.collect::<Vec<u32>>(), bytes_of);
    client.put_pages(pages, PutOptions::default(), soon()).await;
}

#[tokio::test]
async fn get_ranges_returns_a_miss_or_exactly_the_slice() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&node, wide(), PROTOCOL_VERSION).await;
    assert_eq!(client.geometry().unwrap().part_table(), [98_304, 98_304, 98_304, 32_768]);
    put_wide(&client, 0..20).await;
    let mut random = Random(7);
    for _ in 0..20 {
        // Several ranges of one page are among them.
        let ranges: Vec<_> = (0..60).map(|_| (random.below(22), random.range())).collect();
        for ((number, range), tier) in ranges.iter().zip(check_ranges(&client, &ranges).await) {
            assert_eq!(tier, (*number < 20).then_some(Tier::L2), "{range:?} of page {number}");
        }
    }
    nothing_is_held(&node).await;
    assert_eq!(client.stats().corrupt, 0);
    drop(client);
    node.shutdown().await;

    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&node, wide(), PROTOCOL_VERSION).await;
    let keys: Vec<PageKey> = (0..21).map(key).collect();
    let on_l3 = client.lookup(&keys, Duration::ZERO, soon()).await;
    assert_eq!((on_l3.tiers, on_l3.expected.len()), (vec![Tier::L3; 20], 20));
    assert!(on_l3.expected.iter().all(|expected| !expected.is_zero()), "{:?}", on_l3.expected);
    let ranges: Vec<_> = (0..20).map(|number| (number, random.range())).collect();
    assert_eq!(check_ranges(&client, &ranges).await, [Some(Tier::L3); 20]);
    assert_eq!(check_ranges(&client, &ranges).await, [Some(Tier::L2); 20], "the page is in L2 from then on");
    let in_l2 = client.lookup(&keys, Duration::ZERO, soon()).await;
    assert_eq!(in_l2.expected, [Duration::ZERO; 20]);
    node.shutdown().await;
}

#[tokio::test]
async fn node_sends_only_the_chunks_of_a_range() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&node, wide(), PROTOCOL_VERSION).await;
    put_wide(&client, 0..1).await;
    let sent = || node.status()["counters"]["bytes_sent"].as_u64().expect("a number");
    let chunk = 65_536;
    for (range, bytes) in [(5..6, chunk), (chunk as u32..98_304, 32_768), (98_303..98_305, 32_768 + chunk)] {
        let before = sent();
        assert_eq!(check_ranges(&client, &[(0, range)]).await, [Some(Tier::L2)]);
        let expected = if transport() == Transport::Shm { 0 } else { bytes };
        assert_eq!(sent() - before, expected);
    }
    node.shutdown().await;
}

#[tokio::test]
async fn invalid_ranges_are_misses() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&node, wide(), PROTOCOL_VERSION).await;
    put_wide(&client, 0..1).await;
    let end = wide().geometry.page_bytes() as u32;
    #[expect(clippy::reversed_empty_ranges, reason = "invalid input")]
    let bad = [0..0, 7..7, 9..3, end - 1..end + 1, end..end + 9, 0..u32::MAX, u32::MAX - 1..u32::MAX];
    let mut requests: Vec<_> = bad.into_iter().map(|range| (key(0), range, vec![0u8; 9])).collect();
    // A buffer of another length, then a valid range.
    requests.push((key(0), 3..9, vec![0u8; 7]));
    requests.push((key(0), 3..9, vec![0u8; 6]));
    let tiers: Vec<_> = client.get_ranges(requests, soon()).await.into_iter().map(|(_, tier)| tier).collect();
    let (good, bad) = tiers.split_last().unwrap();
    assert!(good.is_some() && bad.iter().all(Option::is_none), "{tiers:?}");

    // The same from a client without checks.
    let (mut reader, mut writer, _) = handshake(&node, PROTOCOL_VERSION, Some(wide())).await;
    let key = key(0);
    #[expect(clippy::reversed_empty_ranges, reason = "invalid input")]
    let ranges = [7..7, 9..3, 3..9, 0..65_537, 65_536..98_305, 0..u32::MAX, end..end + 65_536, 65_536..98_304];
    let ranges: Vec<PageRange> = ranges.into_iter().map(|bytes| PageRange { key, bytes }).collect();
    let request = Request::GetRanges { ranges, by: Delivery::InPlace };
    writer.send(request.frame(PROTOCOL_VERSION, 5, 1000, None)).await.unwrap();
    let mut misses = 0;
    loop {
        let header = reader.next().await.unwrap().expect("the connection goes on");
        let answer = Response::decode(PROTOCOL_VERSION, header.kind, reader.body()).unwrap();
        reader.discard().await.unwrap();
        match answer {
            Response::Miss { .. } => misses += 1,
            Response::Range { index, bytes, location, .. } => {
                assert_eq!(
                    (index, bytes, location, header.payload_bytes),
                    (7, 65_536..98_304, PayloadLocation::Inline, 32_768)
                );
            }
            Response::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(misses, 7);
    node.shutdown().await;
}

type Handshake =
    (FrameReader<tokio::net::tcp::OwnedReadHalf>, FrameWriter<tokio::net::tcp::OwnedWriteHalf>, Option<u16>);

/// Connects with versions up to `version_max`. Also returns the negotiated version, or `None` if
/// the node refuses.
async fn handshake(node: &Node, version_max: u16, namespace: Option<NamespaceDescriptor>) -> Handshake {
    let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
    let mut reader = FrameReader::new(read);
    let mut writer = FrameWriter::new(write);
    let hello = Request::Hello { version_min: PROTOCOL_VERSION_MIN, version_max, name: "raw".into(), namespace };
    writer.send(hello.frame(PROTOCOL_VERSION_MIN, 1, 0, None)).await.unwrap();
    let header = reader.next().await.unwrap().unwrap();
    let version = match Response::decode(PROTOCOL_VERSION_MIN, header.kind, reader.body()).unwrap() {
        Response::Hello { version, .. } => Some(version),
        _ => None,
    };
    (reader, writer, version)
}

#[tokio::test]
async fn clients_and_nodes_of_all_versions_work_together() {
    for (client_version, node_version) in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (3, 2), (3, 3)] {
        let node = Node::start(NodeOptions { protocol_max: node_version, ..options(None) }).await.unwrap();
        assert_eq!(handshake(&node, client_version, None).await.2, Some(client_version.min(node_version)));
        let client = attach(&node, descriptor(1), client_version).await;
        for number in 0..10 {
            put(&client, number).await;
        }
        let keys: Vec<PageKey> = (0..12).map(key).collect();
        let numbers: Vec<u32> = (0..12).collect();
        for (&number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert!(tier.is_some() == (number < 10) && (tier.is_none() || bytes == payload(number)));
        }
        let lookup = client.lookup(&keys, Duration::from_secs(5), soon()).await;
        assert_eq!((lookup.tiers.len(), lookup.held), (10, 10), "{client_version} and {node_version}");
        let (bytes, end) = client.follow(key(3), vec![0u8; payload(3).len()], soon()).finish().await;
        assert!(end == larder_client::FollowEnd::Sealed && bytes == payload(3));
        drop(lookup);

        let reader = attach(&node, wide(), client_version).await;
        put_wide(&reader, 0..4).await;
        let mut random = Random(u64::from(client_version * 3 + node_version));
        let ranges: Vec<_> = (0..80).map(|_| (random.below(4), random.range())).collect();
        assert_eq!(
            check_ranges(&reader, &ranges).await,
            vec![Some(Tier::L2); 80],
            "{client_version} and {node_version}"
        );
        assert_eq!((client.stats().corrupt, reader.stats().corrupt), (0, 0));
        nothing_is_held(&node).await;
        assert_eq!(node.status()["counters"]["connections_rejected"], 0);
        node.shutdown().await;
    }
}

#[tokio::test]
async fn message_of_a_newer_version_ends_the_connection() {
    let node = Node::start(options(None)).await.unwrap();
    let ranges = vec![PageRange { key: key(0), bytes: 0..1 }];
    let request = Request::GetRanges { ranges, by: Delivery::Inline };
    let frame = || request.frame(PROTOCOL_VERSION, 9, 0, None);
    let (mut reader, mut writer, version) = handshake(&node, 1, Some(wide())).await;
    assert_eq!(version, Some(1));
    writer.send(frame()).await.unwrap();
    let header = reader.next().await.unwrap().unwrap();
    let answer = Response::decode(1, header.kind, reader.body()).unwrap();
    assert!(matches!(answer, Response::Error { code: ErrorCode::Malformed, .. }) && header.request == 9, "{answer:?}");
    assert!(reader.next().await.unwrap().is_none(), "the connection ends");
    // A connection of the newer version accepts the same frame.
    let (mut reader, mut writer, version) = handshake(&node, 2, Some(wide())).await;
    assert_eq!(version, Some(2));
    writer.send(frame()).await.unwrap();
    let header = reader.next().await.unwrap().unwrap();
    assert!(matches!(Response::decode(2, header.kind, reader.body()).unwrap(), Response::Miss { index: 0 }));
    // The node refuses a client without a common version.
    let (_, _, version) = handshake(&node, 0, None).await;
    assert_eq!(version, None);
    node.shutdown().await;
}
