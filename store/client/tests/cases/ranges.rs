//! Bytes of pages, and versions of the protocol beside each other.

use super::{descriptor, get, key, nothing_is_held, options, pages, payload, put, soon, transport};
use larder_client::{CONNECTIONS, Client, ClientOptions, PutOptions, StoreUrl, Tier, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use larder_wire::{
    Delivery, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, PageRange, Place, Request,
    Response,
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
    let url = StoreUrl { nodes: vec![node.addr().to_string()], transport: transport(), connections: CONNECTIONS };
    let client = Client::attach(url, Some(namespace), ClientOptions { protocol_max, ..ClientOptions::default() });
    assert!(client.ready(Duration::from_secs(5)).await);
    client
}

/// Numbers by chance, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 32) % u64::from(bound)) as u32
    }

    /// A part, some bytes anywhere, or a few.
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

/// Asks for these ranges, and compares what comes with the plain slices; the tiers.
async fn check_ranges(client: &Client, ranges: &[(u32, Range<u32>)]) -> Vec<Option<Tier>> {
    let asked = ranges.iter().map(|(number, range)| (key(*number), range.clone(), vec![0xee; range.len()]));
    let got = client.get_ranges(asked.collect(), soon()).await;
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
async fn a_range_is_a_miss_or_the_slice_of_what_was_put() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&node, wide(), PROTOCOL_VERSION).await;
    assert_eq!(client.geometry().unwrap().part_table(), [98_304, 98_304, 98_304, 32_768]);
    put_wide(&client, 0..20).await;
    let mut chance = Chance(7);
    for _ in 0..20 {
        // Many of the same page, too.
        let ranges: Vec<_> = (0..60).map(|_| (chance.below(22), chance.range())).collect();
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
    let ranges: Vec<_> = (0..20).map(|number| (number, chance.range())).collect();
    assert_eq!(check_ranges(&client, &ranges).await, [Some(Tier::L3); 20]);
    assert_eq!(check_ranges(&client, &ranges).await, [Some(Tier::L2); 20], "the page is in L2 from then on");
    let in_l2 = client.lookup(&keys, Duration::ZERO, soon()).await;
    assert_eq!(in_l2.expected, [Duration::ZERO; 20]);
    node.shutdown().await;
}

#[tokio::test]
async fn only_the_chunks_that_a_range_touches_are_sent() {
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
async fn what_is_no_range_of_a_page_is_a_miss_and_harms_nothing() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&node, wide(), PROTOCOL_VERSION).await;
    put_wide(&client, 0..1).await;
    let end = wide().geometry.page_bytes() as u32;
    #[expect(clippy::reversed_empty_ranges, reason = "what a caller may say")]
    let bad = [0..0, 7..7, 9..3, end - 1..end + 1, end..end + 9, 0..u32::MAX, u32::MAX - 1..u32::MAX];
    let mut asked: Vec<_> = bad.into_iter().map(|range| (key(0), range, vec![0u8; 9])).collect();
    // Of another length than the buffer's.
    asked.push((key(0), 3..9, vec![0u8; 7]));
    asked.push((key(0), 3..9, vec![0u8; 6]));
    let tiers: Vec<_> = client.get_ranges(asked, soon()).await.into_iter().map(|(_, tier)| tier).collect();
    let (good, bad) = tiers.split_last().unwrap();
    assert!(good.is_some() && bad.iter().all(Option::is_none), "{tiers:?}");

    // The same by a client that does not look at what it asks for.
    let (mut reader, mut writer, _) = greet(&node, PROTOCOL_VERSION, Some(wide())).await;
    let key = key(0);
    #[expect(clippy::reversed_empty_ranges, reason = "what a stranger may say")]
    let ranges = [7..7, 9..3, 3..9, 0..65_537, 65_536..98_305, 0..u32::MAX, end..end + 65_536, 65_536..98_304];
    let ranges: Vec<PageRange> = ranges.into_iter().map(|bytes| PageRange { key, bytes }).collect();
    let request = Request::GetRanges { ranges, by: Delivery::InPlace };
    writer.send(request.frame(PROTOCOL_VERSION, 5, 1000, None)).await.unwrap();
    let mut misses = 0;
    loop {
        let header = reader.next().await.unwrap().expect("the connection goes on");
        let answer = Response::decode(PROTOCOL_VERSION, header.kind, reader.body()).unwrap();
        reader.discard(header.payload_bytes as usize).await.unwrap();
        match answer {
            Response::Miss { .. } => misses += 1,
            Response::Range { index, bytes, place, .. } => {
                assert_eq!((index, bytes, place, header.payload_bytes), (7, 65_536..98_304, Place::Payload, 32_768));
            }
            Response::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(misses, 7);
    node.shutdown().await;
}

type Greeted = (FrameReader<tokio::net::tcp::OwnedReadHalf>, FrameWriter<tokio::net::tcp::OwnedWriteHalf>, Option<u16>);

/// A client by hand that speaks versions up to `version_max`, and which is agreed on.
async fn greet(node: &Node, version_max: u16, namespace: Option<NamespaceDescriptor>) -> Greeted {
    let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
    let (mut reader, mut writer) = (FrameReader::new(read), FrameWriter::new(write));
    let hello = Request::Hello { version_min: PROTOCOL_VERSION_MIN, version_max, name: "by hand".into(), namespace };
    writer.send(hello.frame(PROTOCOL_VERSION_MIN, 1, 0, None)).await.unwrap();
    let header = reader.next().await.unwrap().unwrap();
    let version = match Response::decode(PROTOCOL_VERSION_MIN, header.kind, reader.body()).unwrap() {
        Response::Hello { version, .. } => Some(version),
        _ => None,
    };
    (reader, writer, version)
}

#[tokio::test]
async fn versions_speak_to_each_other() {
    for (of_client, of_node) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let node = Node::start(NodeOptions { protocol_max: of_node, ..options(None) }).await.unwrap();
        assert_eq!(greet(&node, of_client, None).await.2, Some(of_client.min(of_node)));
        let client = attach(&node, descriptor(1), of_client).await;
        for number in 0..10 {
            put(&client, number).await;
        }
        let keys: Vec<PageKey> = (0..12).map(key).collect();
        let numbers: Vec<u32> = (0..12).collect();
        for (&number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert!(tier.is_some() == (number < 10) && (tier.is_none() || bytes == payload(number)));
        }
        let lookup = client.lookup(&keys, Duration::from_secs(5), soon()).await;
        assert_eq!((lookup.tiers.len(), lookup.held), (10, 10), "{of_client} and {of_node}");
        let (bytes, end) = client.follow(key(3), vec![0u8; payload(3).len()], soon()).finish().await;
        assert!(end == larder_client::FollowEnd::Sealed && bytes == payload(3));
        drop(lookup);

        let reader = attach(&node, wide(), of_client).await;
        put_wide(&reader, 0..4).await;
        let mut chance = Chance(u64::from(of_client * 3 + of_node));
        let ranges: Vec<_> = (0..80).map(|_| (chance.below(4), chance.range())).collect();
        assert_eq!(check_ranges(&reader, &ranges).await, vec![Some(Tier::L2); 80], "{of_client} and {of_node}");
        assert_eq!((client.stats().corrupt, reader.stats().corrupt), (0, 0));
        nothing_is_held(&node).await;
        assert_eq!(node.status()["counters"]["connections_rejected"], 0);
        node.shutdown().await;
    }
}

#[tokio::test]
async fn what_a_version_has_not_is_malformed_and_ends_the_connection() {
    let node = Node::start(options(None)).await.unwrap();
    let ranges = vec![PageRange { key: key(0), bytes: 0..1 }];
    let request = Request::GetRanges { ranges, by: Delivery::Sent };
    let frame = || request.frame(PROTOCOL_VERSION, 9, 0, None);
    let (mut reader, mut writer, version) = greet(&node, 1, Some(wide())).await;
    assert_eq!(version, Some(1));
    writer.send(frame()).await.unwrap();
    let header = reader.next().await.unwrap().unwrap();
    let answer = Response::decode(1, header.kind, reader.body()).unwrap();
    assert!(matches!(answer, Response::Error { code: ErrorCode::Malformed, .. }) && header.request == 9, "{answer:?}");
    assert!(reader.next().await.unwrap().is_none(), "the connection ends");
    // The same frame is understood by whom it is for.
    let (mut reader, mut writer, version) = greet(&node, 2, Some(wide())).await;
    assert_eq!(version, Some(2));
    writer.send(frame()).await.unwrap();
    let header = reader.next().await.unwrap().unwrap();
    assert!(matches!(Response::decode(2, header.kind, reader.body()).unwrap(), Response::Miss { index: 0 }));
    // Versions that the node has not are refused with those that it has.
    let (_, _, version) = greet(&node, 0, None).await;
    assert_eq!(version, None);
    node.shutdown().await;
}
