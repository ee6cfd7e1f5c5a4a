//! A client and a node that move pages by RDMA, on two soft-RoCE devices. `tests/rdma/run` runs
//! these tests in a virtual machine.
//!
//! Limits are generous because an emulated machine is slow; nothing here measures speed. Tests run
//! one at a time, because some change the network.

use bytes::Bytes;
use larder_client::{Client, ClientOptions, FollowEnd, NewPage, PutOptions, PutOutcome, StoreUrl, Tier, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_memory::share::SharedMemory;
use larder_node::{Node, NodeOptions, RdmaOptions};
use larder_rdma::{EndpointAddress, EndpointOptions, Fabric, FabricOptions, RdmaChannel, RemoteRange};
use larder_wire::{
    CommitOutcome, Delivery, Entry, FrameReader, FrameWriter, GrantedRange, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN,
    PartGrant, PartLocation, PayloadLocation, RdmaEndpoint, Request, ReserveOutcome, Reserved, Response,
};
use std::future::pending;
use std::net::SocketAddr;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpStream, tcp};
use tokio::time::{sleep, timeout};

/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const LONG: Duration = Duration::from_secs(60);
/// Set in the process whose client is killed: the address of its node.
const VICTIM: &str = "LARDER_RDMA_VICTIM";

fn in_guest<F: Future<Output = ()>>(test: F) {
    assert!(
        std::env::var_os("LARDER_RDMA_VM").is_some(),
        "this changes the network of its machine: use tests/rdma/run"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(5 * LONG, test).await.expect("the test ends") });
}

/// Endpoints with timeouts beyond any pause of this machine.
fn patient() -> EndpointOptions {
    EndpointOptions { stall_timeout: LONG, connect_deadline: LONG, retry_exponent: 19, ..EndpointOptions::default() }
}

/// Endpoints that give up after a few hundred milliseconds.
fn impatient() -> EndpointOptions {
    EndpointOptions { retry_exponent: 13, retries: 4, ..patient() }
}

fn fabric(devices: &[&str], endpoint: EndpointOptions) -> FabricOptions {
    FabricOptions { devices: devices.iter().map(|name| name.to_string()).collect(), endpoint }
}

async fn start(devices: &[&str], endpoint: EndpointOptions) -> Node {
    start_with(RdmaOptions { fabric: fabric(devices, endpoint), ..RdmaOptions::default() }).await
}

async fn start_with(rdma: RdmaOptions) -> Node {
    let options = NodeOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        l2_bytes: 32 << 20,
        share_memory: Some(false),
        rdma,
        ..NodeOptions::default()
    };
    Node::start(options).await.unwrap()
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

fn descriptor() -> NamespaceDescriptor {
    NamespaceDescriptor { model: "test".into(), weights: [1; 32], geometry: geometry(), tenant: "t".into() }
}

fn client(address: &str, transport: Transport, devices: &[&str], endpoint: EndpointOptions) -> Client {
    let url = StoreUrl { transport, ..format!("larder://{address}/").parse().unwrap() };
    let options = ClientOptions {
        rdma: fabric(devices, endpoint),
        connect_timeout: LONG,
        memory_bytes: 16 << 20,
        ..ClientOptions::default()
    };
    Client::attach(url, Some(descriptor()), options)
}

async fn attach(node: &Node, devices: &[&str], endpoint: EndpointOptions) -> Client {
    let client = client(&node.addr().to_string(), Transport::Auto, devices, endpoint);
    assert!(client.ready(LONG).await);
    assert_eq!(transport_of(&client).await, Some(Transport::Rdma));
    client
}

async fn transport_of(client: &Client) -> Option<Transport> {
    client.status(soon()).await[0].transport
}

fn soon() -> Instant {
    Instant::now() + LONG
}

fn key(number: u32) -> PageKey {
    PageKey::chain(None, &[number])
}

fn payload(number: u32) -> Vec<u8> {
    (0..geometry().page_bytes()).map(|i| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8).collect()
}

fn page(number: u32) -> NewPage {
    NewPage::first(key(number))
}

async fn put(client: &Client, number: u32, bytes: &[u8]) -> PutOutcome {
    let mut put = client.put(page(number), soon());
    let mut rest = Bytes::copy_from_slice(bytes);
    let parts: Vec<Bytes> = geometry().part_table().into_iter().map(|len| rest.split_to(len as usize)).collect();
    for (part, bytes) in parts.into_iter().enumerate().rev() {
        put.part(part, bytes);
    }
    put.commit(soon()).await
}

async fn get(client: &Client, numbers: &[u32]) -> Vec<(Vec<u8>, Option<Tier>)> {
    let pages = numbers.iter().map(|&number| (key(number), vec![0; geometry().page_bytes()])).collect();
    client.get(pages, soon()).await
}

fn counter(node: &Node, name: &str) -> u64 {
    node.status()["counters"][name].as_u64().unwrap()
}

fn device_sum(node: &Node, field: &str) -> u64 {
    node.status()["rdma"].as_array().unwrap().iter().map(|device| device[field].as_u64().unwrap()).sum()
}

async fn at_rest(node: &Node) {
    let begin = Instant::now();
    loop {
        let status = node.status();
        let open = (device_sum(node, "grants"), &status["tiers"]["l2"]["held_pages"], &status["puts_open"]);
        if open.0 == 0 && *open.1 == 0 && *open.2 == 0 {
            assert_eq!(device_sum(node, "leaked"), 0);
            return;
        }
        assert!(begin.elapsed() < LONG, "never at rest: {status}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that the node and the client end cleanly.
async fn finish(node: Node, client: Client) {
    at_rest(&node).await;
    drop(client);
    let begin = Instant::now();
    while device_sum(&node, "channels") > 0 {
        assert!(begin.elapsed() < LONG, "channels of a client that disconnected");
        sleep(Duration::from_millis(20)).await;
    }
    node.shutdown().await;
}

fn tc(arguments: &str) {
    for device in ["ve0", "ve1"] {
        let arguments = arguments.replace("DEV", device);
        let status = Command::new("tc").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "tc {arguments}");
    }
}

/// Faults of the RDMA network until this is dropped. Requests travel over the loopback device and
/// are not affected.
struct NetworkFault;

impl NetworkFault {
    fn new(netem: &str) -> NetworkFault {
        tc(&format!("qdisc add dev DEV root netem {netem}"));
        NetworkFault
    }
}

impl Drop for NetworkFault {
    fn drop(&mut self) {
        tc("qdisc del dev DEV root");
    }
}

#[test]
fn pages_travel_by_rdma_and_not_over_tcp() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        let page_bytes = geometry().page_bytes();
        // From heap memory part by part, from registered memory, and in batches.
        assert_eq!(put(&client, 0, &payload(0)).await, PutOutcome::Stored);
        let registered = |number| {
            let mut buffer = client.buffer(page_bytes);
            buffer.copy_from_slice(&payload(number));
            (page(number), buffer.freeze())
        };
        let heap = |number| (page(number), Bytes::from(payload(number)));
        let pages = (1..10).map(|number| if number % 2 == 0 { registered(number) } else { heap(number) }).collect();
        let outcomes = client.put_pages(pages, PutOptions::default(), soon()).await;
        assert_eq!(outcomes, [PutOutcome::Stored; 9]);
        assert_eq!(put(&client, 3, &payload(3)).await, PutOutcome::AlreadyThere);
        assert_eq!(put(&client, 3, &payload(4)).await, PutOutcome::Refused);

        let numbers: Vec<u32> = (0..11).collect();
        for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert_eq!(tier.is_some(), *number < 10, "page {number}");
            assert!(tier.is_none() || bytes == payload(*number), "page {number}");
        }
        let buffers = numbers.iter().map(|&number| (key(number), client.buffer(page_bytes))).collect();
        for (number, (buffer, tier)) in numbers.iter().zip(client.get(buffers, soon()).await) {
            assert!(buffer.is_shared() && buffer.len() == page_bytes, "the caller's memory is restored");
            assert!(tier.is_some() == (*number < 10) && (tier.is_none() || buffer[..] == payload(*number)));
        }
        let keys: Vec<PageKey> = numbers.iter().map(|&number| key(number)).collect();
        let views = client.view(&keys, soon()).await;
        for (number, view) in numbers.iter().zip(&views) {
            assert!(view.as_ref().map_or(*number == 10, |view| view[..] == payload(*number)), "page {number}");
        }
        let ranges = vec![(key(2), 70_000..70_100, vec![0; 100]), (key(5), 1..2, vec![0; 1])];
        let ranges = client.get_ranges(ranges, soon()).await;
        assert!(ranges[0].0 == payload(2)[70_000..70_100] && ranges[1].0 == payload(5)[1..2] && ranges[1].1.is_some());

        assert_eq!((counter(&node, "bytes_sent"), counter(&node, "bytes_received")), (0, 0));
        assert_eq!(counter(&node, "bytes_written_rdma"), 10 * page_bytes as u64);
        assert!(counter(&node, "bytes_exposed_rdma") > 30 * page_bytes as u64);
        assert_eq!((counter(&node, "rdma_channels_opened"), client.stats().corrupt), (1, 0));
        // A follow receives parts while others are missing.
        let follow = client.follow(key(20), vec![0; page_bytes], soon());
        assert_eq!(put(&client, 20, &payload(20)).await, PutOutcome::Stored);
        let (bytes, end) = follow.finish().await;
        assert!(end == FollowEnd::Sealed && bytes == payload(20));
        drop(views);
        finish(node, client).await;
    });
}

#[test]
fn pages_beyond_registered_memory_travel_over_tcp() {
    in_guest(async {
        // The node also grants only two ranges at a time.
        let node = start(&["rxe0"], EndpointOptions { grants: 2, ..patient() }).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        let taken = client.buffer((16 << 20) - 3 * geometry().page_bytes());
        let numbers: Vec<u32> = (0..30).collect();
        let pages = numbers.iter().map(|&number| (page(number), Bytes::from(payload(number)))).collect();
        let outcomes = client.put_pages(pages, PutOptions::default(), soon()).await;
        assert!(outcomes.iter().all(|outcome| *outcome == PutOutcome::Stored), "{outcomes:?}");
        for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert!(tier.is_some() && bytes == payload(*number), "page {number}");
        }
        for name in ["bytes_sent", "bytes_received", "bytes_exposed_rdma", "bytes_written_rdma"] {
            assert!(counter(&node, name) > 0, "{name}");
        }
        drop(taken);
        finish(node, client).await;
    });
}

#[test]
fn devices_take_turns() {
    in_guest(async {
        let node = start(&[], patient()).await;
        let client = attach(&node, &[], patient()).await;
        for number in 0..4 {
            assert_eq!(put(&client, number, &payload(number)).await, PutOutcome::Stored);
            assert!(get(&client, &[number]).await[0].0 == payload(number));
        }
        let channels: Vec<u64> = node.status()["rdma"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["channels"].as_u64().unwrap())
            .collect();
        assert_eq!(channels, [1, 1]);
        assert_eq!((counter(&node, "rdma_channels_opened"), counter(&node, "bytes_sent")), (2, 0));
        finish(node, client).await;
    });
}

#[test]
fn page_forgotten_during_an_rdma_read_is_intact_or_a_miss() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        {
            let _fault = NetworkFault::new("delay 300ms limit 100000");
            let reader = tokio::spawn({
                let client = client.clone();
                async move { get(&client, &[1]).await }
            });
            let begin = Instant::now();
            while device_sum(&node, "grants") == 0 {
                assert!(begin.elapsed() < LONG, "the node grants nothing");
                sleep(Duration::from_millis(2)).await;
            }
            assert_eq!(client.forget(&[key(1)], soon()).await.pages, 1);
            let (bytes, tier) = reader.await.unwrap().remove(0);
            assert!(tier.is_some() && bytes == payload(1), "the node kept the memory of the granted page");
        }
        assert!(get(&client, &[1]).await[0].1.is_none());
        // Other bytes under the same key.
        assert_eq!(put(&client, 1, &payload(2)).await, PutOutcome::Stored);
        assert!(get(&client, &[1]).await[0].0 == payload(2));
        finish(node, client).await;
    });
}

#[test]
fn dead_channels_are_replaced_and_pages_travel_over_tcp_meanwhile() {
    in_guest(async {
        let node = start(&["rxe0"], impatient()).await;
        let client = attach(&node, &["rxe1"], impatient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let connections = counter(&node, "connections_accepted");
        {
            let _fault = NetworkFault::new("loss 100%");
            let begin = Instant::now();
            // A read in progress when the channel dies is a miss.
            assert!(get(&client, &[1]).await[0].1.is_none() && begin.elapsed() < LONG);
            while transport_of(&client).await != Some(Transport::Tcp) {
                assert!(begin.elapsed() < LONG, "the channel never dies");
                get(&client, &[1]).await;
            }
            assert!(get(&client, &[1]).await[0].0 == payload(1), "over TCP");
            assert_eq!(put(&client, 2, &payload(2)).await, PutOutcome::Stored, "over TCP");
        }
        let begin = Instant::now();
        while transport_of(&client).await != Some(Transport::Rdma) || get(&client, &[1]).await[0].1.is_none() {
            assert!(begin.elapsed() < 2 * LONG, "no channel returns");
            sleep(Duration::from_millis(100)).await;
        }
        let before = counter(&node, "bytes_exposed_rdma");
        assert!(get(&client, &[2]).await[0].0 == payload(2) && counter(&node, "bytes_exposed_rdma") > before);
        assert_eq!(put(&client, 3, &payload(3)).await, PutOutcome::Stored);
        assert!(counter(&node, "rdma_channels_opened") > 1);
        assert_eq!(counter(&node, "connections_accepted"), connections, "the TCP connection stayed");
        finish(node, client).await;
    });
}

#[test]
fn killed_client_leaves_nothing_behind() {
    if let Ok(address) = std::env::var(VICTIM) {
        return in_guest(victim(&address));
    }
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        for number in 0..8 {
            assert_eq!(put(&client, number, &payload(number)).await, PutOutcome::Stored);
        }
        for _ in 0..2 {
            let exposed = counter(&node, "bytes_exposed_rdma");
            let written = counter(&node, "bytes_written_rdma");
            let mut child = run_victim(&node);
            let begin = Instant::now();
            while counter(&node, "bytes_exposed_rdma") < exposed + 1_000_000
                || counter(&node, "bytes_written_rdma") < written + 500_000
                || device_sum(&node, "grants") == 0
            {
                assert!(
                    begin.elapsed() < 2 * LONG && child.try_wait().unwrap().is_none(),
                    "the victim does not get far"
                );
                sleep(Duration::from_millis(1)).await;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            at_rest(&node).await;
        }
        for (number, (bytes, tier)) in (0..8).zip(get(&client, &[0, 1, 2, 3, 4, 5, 6, 7]).await) {
            assert!(tier.is_some() && bytes == payload(number), "page {number}");
        }
        finish(node, client).await;
    });
}

fn run_victim(node: &Node) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "killed_client_leaves_nothing_behind", "--nocapture"]);
    command.env(VICTIM, node.addr().to_string()).spawn().unwrap()
}

async fn victim(address: &str) {
    let client = client(address, Transport::Rdma, &["rxe1"], patient());
    assert!(client.ready(LONG).await);
    let reads = async {
        loop {
            for (number, (bytes, tier)) in (0..8).zip(get(&client, &[0, 1, 2, 3, 4, 5, 6, 7]).await) {
                assert!(tier.is_none() || bytes == payload(number));
            }
        }
    };
    let puts = async {
        for number in 100.. {
            put(&client, number, &payload(number)).await;
        }
    };
    tokio::join!(reads, puts);
}

#[test]
fn node_without_devices_is_absent_for_a_client_that_demands_rdma() {
    in_guest(async {
        let options = NodeOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            l2_bytes: 32 << 20,
            rdma: RdmaOptions { enabled: false, ..RdmaOptions::default() },
            ..NodeOptions::default()
        };
        let node = Node::start(options).await.unwrap();
        let address = node.addr().to_string();
        let wants_more = client(&address, Transport::Rdma, &[], patient());
        assert!(!wants_more.ready(Duration::from_secs(3)).await);
        let takes_any = client(&address, Transport::Auto, &[], patient());
        assert!(takes_any.ready(LONG).await);
        assert_ne!(transport_of(&takes_any).await, Some(Transport::Rdma));
        assert_eq!(put(&takes_any, 1, &payload(1)).await, PutOutcome::Stored);
        node.shutdown().await;
    });
}

/// A client without the checks of [`Client`].
struct RawClient {
    reader: FrameReader<tcp::OwnedReadHalf>,
    writer: FrameWriter<tcp::OwnedWriteHalf>,
    requests: u64,
    memory: Arc<SharedMemory>,
    channel: RdmaChannel,
}

impl RawClient {
    async fn connect(node: &Node) -> RawClient {
        let memory = SharedMemory::new(1 << 20).unwrap();
        let fabric = Fabric::open(&fabric(&["rxe1"], patient()), memory.clone()).await.unwrap();
        let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
        let reader = FrameReader::new(read);
        let writer = FrameWriter::new(write);
        let mut raw = RawClient { reader, writer, requests: 0, memory, channel: fabric.channel(0).unwrap() };
        let hello = Request::Hello {
            version_min: PROTOCOL_VERSION_MIN,
            version_max: PROTOCOL_VERSION,
            name: "raw".into(),
            namespace: Some(descriptor()),
        };
        assert!(matches!(raw.request(&hello).await, Response::Hello { .. }));
        let offered = vec![RdmaEndpoint { channel: 7, address: raw.channel.local().encode() }];
        let Response::RdmaChannels(ends) = raw.request(&Request::RdmaChannels { closed: vec![9], offered }).await
        else {
            panic!("channels")
        };
        assert_eq!((ends.len(), ends[0].channel), (1, 7));
        raw.channel.connect(&EndpointAddress::decode(&ends[0].address).unwrap()).await.unwrap();
        raw
    }

    async fn send(&mut self, request: &Request) -> u64 {
        self.requests += 1;
        self.writer.send(request.frame(PROTOCOL_VERSION, self.requests, 0, None)).await.unwrap();
        self.requests
    }

    async fn request(&mut self, request: &Request) -> Response {
        self.send(request).await;
        self.receive().await
    }

    async fn receive(&mut self) -> Response {
        let header = timeout(LONG, self.reader.next()).await.unwrap().unwrap().unwrap();
        Response::decode(PROTOCOL_VERSION, header.kind, self.reader.body()).unwrap()
    }

    /// Requests a grant for a page, and does not release it.
    async fn open(&mut self, number: u32) -> GrantedRange {
        let answer = self.request(&Request::Get { keys: vec![key(number)], by: Delivery::Rdma(vec![7]) }).await;
        let Response::Page { location: PayloadLocation::Rdma(range), .. } = answer else { panic!("{answer:?}") };
        assert_eq!(self.receive().await, Response::End);
        range
    }

    async fn read(&self, from: GrantedRange) -> Option<Vec<u8>> {
        let block = self.memory.allocate(from.len as usize).unwrap();
        let range = RemoteRange { address: from.address, len: from.len, key: from.key };
        self.channel.read(block, range, &Arc::default(), pending()).await.ok().map(|block| block.to_vec())
    }

    async fn reserve(&mut self, number: u32) -> (u64, Vec<PartGrant>) {
        let reserved = Reserved::first(key(number), geometry().part_table());
        let answer = self.request(&Request::Reserve(vec![reserved])).await;
        let Response::Reserved { outcomes, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(outcomes, [ReserveOutcome::Granted]);
        let reserve = self.requests;
        let answer = self.request(&Request::GrantParts { reserve, channels: vec![7] }).await;
        let Response::PartGrants(grants) = answer else { panic!("{answer:?}") };
        assert_eq!(grants.len(), geometry().part_table().len());
        (reserve, grants)
    }

    async fn write(&self, bytes: &[u8], to: &PartGrant) -> bool {
        let mut block = self.memory.allocate(bytes.len()).unwrap();
        block.copy_from_slice(bytes);
        let range = RemoteRange { address: to.range.address, len: to.range.len, key: to.range.key };
        self.channel.write(block, range, &Arc::default(), pending()).await.is_ok()
    }

    async fn report_written(&mut self, reserve: u64, part: u32, bytes: &[u8]) {
        let crcs = larder_format::chunk_crcs(bytes).collect();
        let put = Entry { request: reserve, index: 0 };
        self.send(&Request::Part { put, part, crcs, bytes: PartLocation::Rdma }).await;
    }

    async fn commit(&mut self, reserve: u64) -> CommitOutcome {
        let answer = self.request(&Request::Commit(vec![Entry { request: reserve, index: 0 }])).await;
        let Response::Committed(ends) = answer else { panic!("{answer:?}") };
        ends[0].outcome
    }
}

fn part(payload: &[u8], part: u32) -> &[u8] {
    let range = geometry().part_range(part as usize).unwrap();
    &payload[range.start as usize..range.end as usize]
}

#[test]
fn wrong_or_late_writes_fail_their_own_put_only() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        let mut raw = RawClient::connect(&node).await;
        // Bytes that do not match the checksums, then a part that was never written.
        for (number, written) in [(1, payload(9)), (2, Vec::new())] {
            let (reserve, grants) = raw.reserve(number).await;
            for open in &grants {
                let good = open.part == 0 || written.is_empty();
                let bytes = if good { payload(number) } else { written.clone() };
                if open.part == 0 || !written.is_empty() {
                    assert!(raw.write(part(&bytes, open.part), open).await);
                }
                raw.report_written(reserve, open.part, part(&payload(number), open.part)).await;
            }
            assert_eq!(raw.commit(reserve).await, CommitOutcome::Incomplete, "page {number}");
        }
        // A grant ends when the client reports its part. A later write is refused, and breaks the
        // channel.
        let (reserve, grants) = raw.reserve(3).await;
        for open in &grants {
            assert!(raw.write(part(&payload(3), open.part), open).await);
            raw.report_written(reserve, open.part, part(&payload(3), open.part)).await;
        }
        assert_eq!(raw.commit(reserve).await, CommitOutcome::Stored);
        assert!(!raw.write(part(&payload(9), grants[0].part), &grants[0]).await);
        let pages = get(&client, &[1, 2, 3]).await;
        assert!(pages[0].1.is_none() && pages[1].1.is_none() && pages[2].0 == payload(3));
        // A put that is cancelled with open parts, and a client that disconnects with open parts.
        assert_eq!(put(&client, 4, &payload(4)).await, PutOutcome::Stored);
        drop(raw);
        let mut raw = RawClient::connect(&node).await;
        let (reserve, _) = raw.reserve(5).await;
        raw.send(&Request::Cancel(reserve)).await;
        raw.reserve(6).await;
        drop(raw);
        // A part that was damaged after its client computed the checksums.
        let mut damaged = client.put(page(7), soon());
        let crcs = larder_format::chunk_crcs(part(&payload(7), 0)).collect();
        damaged.part_with_crcs(0, Bytes::copy_from_slice(part(&payload(9), 0)), crcs);
        damaged.part(1, Bytes::copy_from_slice(part(&payload(7), 1)));
        assert_eq!(damaged.commit(soon()).await, PutOutcome::Lost);
        assert_eq!(client.stats().corrupt, 0);
        finish(node, client).await;
    });
}

#[test]
fn grant_for_a_page_expires() {
    in_guest(async {
        let age = Duration::from_secs(3);
        let node =
            start_with(RdmaOptions { fabric: fabric(&["rxe0"], patient()), page_age_max: age, enabled: true }).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let mut raw = RawClient::connect(&node).await;
        let begin = Instant::now();
        let range = raw.open(1).await;
        let read = raw.read(range).await;
        assert!(read == Some(payload(1)) || begin.elapsed() > age);
        assert!(device_sum(&node, "grants") == 1 || begin.elapsed() > age);
        at_rest(&node).await;
        assert!(begin.elapsed() > age);
        assert!(raw.read(range).await.is_none());
        drop(raw);
        finish(node, client).await;
    });
}

/// Number of completion channels that this process has open, one for each endpoint.
fn completion_channels() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let names = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("infiniband")).count()
}

#[test]
fn grants_end_with_their_channel() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let mut raw = RawClient::connect(&node).await;
        let channels = completion_channels();
        assert!(channels >= 4, "both ends of two channels: {channels}");
        raw.open(1).await;
        let (reserve, _) = raw.reserve(2).await;
        assert!(device_sum(&node, "grants") > 1);
        assert_eq!(
            raw.request(&Request::RdmaChannels { closed: vec![7], offered: Vec::new() }).await,
            Response::RdmaChannels(Vec::new())
        );
        let begin = Instant::now();
        // The put is still open, and the client has not released the page.
        while device_sum(&node, "grants") > 0 || completion_channels() > channels - 1 {
            assert!(begin.elapsed() < LONG, "{} {} {channels}", node.status(), completion_channels());
            sleep(Duration::from_millis(20)).await;
        }
        raw.send(&Request::Cancel(reserve)).await;
        drop(raw);
        finish(node, client).await;
    });
}

#[test]
fn channels_that_the_node_does_not_use_are_replaced() {
    in_guest(async {
        // The node has channels and grants nothing, as if its ends were dead.
        let node = start(&["rxe0"], EndpointOptions { grants: 0, ..patient() }).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let begin = Instant::now();
        while counter(&node, "rdma_channels_opened") < 2 {
            assert!(begin.elapsed() < LONG, "the client keeps channels that are not used");
            assert!(get(&client, &[1; 8]).await.iter().all(|(bytes, _)| *bytes == payload(1)));
        }
        assert_eq!(counter(&node, "bytes_exposed_rdma"), 0);
        finish(node, client).await;
    });
}

#[test]
fn put_abandoned_during_a_write_keeps_its_channel() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        {
            let _fault = NetworkFault::new("delay 300ms limit 100000");
            // A write takes 600 ms.
            let early = || Instant::now() + Duration::from_millis(300);
            let mut given_up = client.put(page(2), early());
            let len = geometry().part_table()[0] as usize;
            given_up.part(0, Bytes::from(payload(2)).slice(..len));
            let outcomes =
                client.put_pages(vec![(page(3), Bytes::from(payload(3)))], PutOptions::default(), early()).await;
            assert_eq!((given_up.commit(soon()).await, outcomes), (PutOutcome::Lost, vec![PutOutcome::Lost]));
            at_rest(&node).await;
        }
        assert!(get(&client, &[1]).await[0].0 == payload(1));
        assert_eq!(put(&client, 2, &payload(2)).await, PutOutcome::Stored);
        assert_eq!((counter(&node, "rdma_channels_opened"), device_sum(&node, "channels_failed")), (1, 0));
        finish(node, client).await;
    });
}

#[test]
fn part_travels_over_tcp_when_its_channel_dies() {
    in_guest(async {
        let node = start(&["rxe0"], impatient()).await;
        let client = attach(&node, &["rxe1"], impatient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        assert_eq!(counter(&node, "bytes_received"), 0);
        let _fault = NetworkFault::new("loss 100%");
        assert_eq!(put(&client, 2, &payload(2)).await, PutOutcome::Stored);
        assert!(get(&client, &[2]).await[0].0 == payload(2));
        assert!(counter(&node, "bytes_received") > 0);
        finish(node, client).await;
    });
}
