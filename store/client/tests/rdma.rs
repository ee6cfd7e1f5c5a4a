//! A client and a node that move pages by RDMA, on two soft-RoCE devices, in the virtual machine of `tests/rdma` (run it by
//! `tests/rdma/run`).
//!
//! Bounds are generous, as an emulated machine is slow; nothing here measures speed. One test at a time: some change the network.

use bytes::Bytes;
use larder_client::{Client, ClientOptions, FollowEnd, NewPage, PutOptions, PutOutcome, StoreUrl, Tier, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions, RdmaOptions};
use larder_rdma::{EndpointAddress, EndpointOptions, Fabric, FabricOptions, Line, RemoteRange};
use larder_share::Memory;
use larder_wire::{
    CommitOutcome, Delivery, Entry, FrameReader, FrameWriter, LineEnd, LineWindow, PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN, PartBytes, PartWindow, Place, Request, ReserveOutcome, Reserved, Response,
};
use std::net::SocketAddr;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpStream, tcp};
use tokio::time::{sleep, timeout};

/// No step of a test takes longer; what does is broken.
const LONG: Duration = Duration::from_secs(30);
/// Tells a process that it is the client that is killed, and of which node.
const VICTIM: &str = "LARDER_RDMA_VICTIM";

fn in_guest<F: Future<Output = ()>>(test: F) {
    assert!(
        std::env::var_os("LARDER_RDMA_VM").is_some(),
        "this changes the network of its machine: use tests/rdma/run"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(150), test).await.expect("the test ends") });
}

/// Longer than this machine ever sleeps.
fn patient() -> EndpointOptions {
    EndpointOptions { deadline: LONG, connect_deadline: LONG, retry_exponent: 19, ..EndpointOptions::default() }
}

/// Gives up after some hundred milliseconds.
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
    assert_eq!(by(&client).await, Some(Transport::Rdma));
    client
}

/// How pages move now: the column BY of `larder status`.
async fn by(client: &Client) -> Option<Transport> {
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
    NewPage { key: key(number), parent: PageKey::NONE, position: 0 }
}

/// Part by part, the last first.
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

fn of_devices(node: &Node, what: &str) -> u64 {
    node.status()["rdma"].as_array().unwrap().iter().map(|device| device[what].as_u64().unwrap()).sum()
}

/// Waits until nobody can reach anything of the node's, nothing is held and nothing is being put.
async fn at_rest(node: &Node) {
    let begin = Instant::now();
    loop {
        let status = node.status();
        let open = (of_devices(node, "windows"), &status["tiers"]["l2"]["held_pages"], &status["puts_open"]);
        if open.0 == 0 && *open.1 == 0 && *open.2 == 0 {
            assert_eq!(of_devices(node, "stuck"), 0);
            return;
        }
        assert!(begin.elapsed() < LONG, "never at rest: {status}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Everything has ended.
async fn finish(node: Node, client: Client) {
    at_rest(&node).await;
    drop(client);
    let begin = Instant::now();
    while of_devices(&node, "lines") > 0 {
        assert!(begin.elapsed() < LONG, "lines of a client that left");
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

/// A network that behaves badly until this is dropped. What the client and the node say to each other goes another way.
struct Weather;

impl Weather {
    fn new(netem: &str) -> Weather {
        tc(&format!("qdisc add dev DEV root netem {netem}"));
        Weather
    }
}

impl Drop for Weather {
    fn drop(&mut self) {
        tc("qdisc del dev DEV root");
    }
}

#[test]
fn pages_are_written_and_read_by_rdma_and_nothing_goes_over_the_stream() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        let page_bytes = geometry().page_bytes();
        // From plain memory part by part, from memory that devices know, and many at a time.
        assert_eq!(put(&client, 0, &payload(0)).await, PutOutcome::Stored);
        let known = |number| {
            let mut buffer = client.buffer(page_bytes);
            buffer.copy_from_slice(&payload(number));
            (page(number), buffer.freeze())
        };
        let plain = |number| (page(number), Bytes::from(payload(number)));
        let pages = (1..10).map(|number| if number % 2 == 0 { known(number) } else { plain(number) }).collect();
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
            assert!(buffer.is_shown() && buffer.len() == page_bytes, "the caller's memory is back");
            assert!(tier.is_some() == (*number < 10) && (tier.is_none() || buffer[..] == payload(*number)));
        }
        let keys: Vec<PageKey> = numbers.iter().map(|&number| key(number)).collect();
        let views = client.view(&keys, soon()).await;
        for (number, view) in numbers.iter().zip(&views) {
            assert!(view.as_ref().map_or(*number == 10, |view| view[..] == payload(*number)), "page {number}");
        }
        let ranges = vec![(key(2), 70_000..70_100, vec![0; 100]), (key(5), 1..2, vec![0; 1])];
        let had = client.get_ranges(ranges, soon()).await;
        assert!(had[0].0 == payload(2)[70_000..70_100] && had[1].0 == payload(5)[1..2] && had[1].1.is_some());

        assert_eq!((counter(&node, "bytes_sent"), counter(&node, "bytes_received")), (0, 0));
        assert_eq!(counter(&node, "bytes_written_rdma"), 10 * page_bytes as u64);
        assert!(counter(&node, "bytes_opened_rdma") > 30 * page_bytes as u64);
        assert_eq!((counter(&node, "rdma_lines_made"), client.stats().corrupt), (1, 0));
        // Parts can be followed while others are not there yet.
        let follow = client.follow(key(20), vec![0; page_bytes], soon());
        assert_eq!(put(&client, 20, &payload(20)).await, PutOutcome::Stored);
        let (bytes, end) = follow.finish().await;
        assert!(end == FollowEnd::Sealed && bytes == payload(20));
        drop(views);
        finish(node, client).await;
    });
}

#[test]
fn more_than_there_is_memory_for_comes_over_the_stream() {
    in_guest(async {
        // Two windows at a time, too.
        let node = start(&["rxe0"], EndpointOptions { windows: 2, ..patient() }).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        let taken = client.buffer((16 << 20) - 3 * geometry().page_bytes());
        let numbers: Vec<u32> = (0..30).collect();
        let pages = numbers.iter().map(|&number| (page(number), Bytes::from(payload(number)))).collect();
        let outcomes = client.put_pages(pages, PutOptions::default(), soon()).await;
        assert!(outcomes.iter().all(|outcome| *outcome == PutOutcome::Stored), "{outcomes:?}");
        for (number, (bytes, tier)) in numbers.iter().zip(get(&client, &numbers).await) {
            assert!(tier.is_some() && bytes == payload(*number), "page {number}");
        }
        for name in ["bytes_sent", "bytes_received", "bytes_opened_rdma", "bytes_written_rdma"] {
            assert!(counter(&node, name) > 0, "{name}");
        }
        drop(taken);
        finish(node, client).await;
    });
}

#[test]
fn several_devices_are_used_in_turn() {
    in_guest(async {
        let node = start(&[], patient()).await;
        let client = attach(&node, &[], patient()).await;
        for number in 0..4 {
            assert_eq!(put(&client, number, &payload(number)).await, PutOutcome::Stored);
            assert!(get(&client, &[number]).await[0].0 == payload(number));
        }
        let lines: Vec<u64> =
            node.status()["rdma"].as_array().unwrap().iter().map(|device| device["lines"].as_u64().unwrap()).collect();
        assert_eq!(lines, [1, 1]);
        assert_eq!((counter(&node, "rdma_lines_made"), counter(&node, "bytes_sent")), (2, 0));
        finish(node, client).await;
    });
}

#[test]
fn a_page_that_is_forgotten_while_it_is_read_is_a_miss_or_itself() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        {
            let _weather = Weather::new("delay 300ms limit 100000");
            let reader = tokio::spawn({
                let client = client.clone();
                async move { get(&client, &[1]).await }
            });
            while of_devices(&node, "windows") == 0 {
                sleep(Duration::from_millis(2)).await;
            }
            assert_eq!(client.forget(&[key(1)], soon()).await.pages, 1);
            let (bytes, tier) = reader.await.unwrap().remove(0);
            assert!(tier.is_some() && bytes == payload(1), "it was open, and its memory stayed as it was");
        }
        assert!(get(&client, &[1]).await[0].1.is_none());
        // Other bytes under the same key.
        assert_eq!(put(&client, 1, &payload(2)).await, PutOutcome::Stored);
        assert!(get(&client, &[1]).await[0].0 == payload(2));
        finish(node, client).await;
    });
}

#[test]
fn lines_that_died_are_made_anew_and_until_then_pages_come_over_the_stream() {
    in_guest(async {
        let node = start(&["rxe0"], impatient()).await;
        let client = attach(&node, &["rxe1"], impatient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let connections = counter(&node, "connections_accepted");
        {
            let _weather = Weather::new("loss 100%");
            let begin = Instant::now();
            // What is under way when the line dies is a miss.
            assert!(get(&client, &[1]).await[0].1.is_none() && begin.elapsed() < LONG);
            while by(&client).await != Some(Transport::Tcp) {
                assert!(begin.elapsed() < LONG, "the line never dies");
                get(&client, &[1]).await;
            }
            assert!(get(&client, &[1]).await[0].0 == payload(1), "over the stream");
            assert_eq!(put(&client, 2, &payload(2)).await, PutOutcome::Stored, "over the stream");
        }
        let begin = Instant::now();
        while by(&client).await != Some(Transport::Rdma) || get(&client, &[1]).await[0].1.is_none() {
            assert!(begin.elapsed() < 2 * LONG, "no line comes back");
            sleep(Duration::from_millis(100)).await;
        }
        let before = counter(&node, "bytes_opened_rdma");
        assert!(get(&client, &[2]).await[0].0 == payload(2) && counter(&node, "bytes_opened_rdma") > before);
        assert_eq!(put(&client, 3, &payload(3)).await, PutOutcome::Stored);
        assert!(counter(&node, "rdma_lines_made") > 1);
        assert_eq!(counter(&node, "connections_accepted"), connections, "the stream stayed");
        finish(node, client).await;
    });
}

/// What is being read, or put, by a process that is killed.
#[test]
fn a_client_that_is_killed_leaves_nothing_behind() {
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
            let (opened, written) = (counter(&node, "bytes_opened_rdma"), counter(&node, "bytes_written_rdma"));
            let mut child = run_victim(&node);
            let begin = Instant::now();
            while counter(&node, "bytes_opened_rdma") < opened + 1_000_000
                || counter(&node, "bytes_written_rdma") < written + 500_000
                || of_devices(&node, "windows") == 0
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
    command.args(["--exact", "a_client_that_is_killed_leaves_nothing_behind", "--nocapture"]);
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
fn a_node_without_devices_is_away_to_who_wants_nothing_else() {
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
        assert_ne!(by(&takes_any).await, Some(Transport::Rdma));
        assert_eq!(put(&takes_any, 1, &payload(1)).await, PutOutcome::Stored);
        node.shutdown().await;
    });
}

/// A client that says what it likes.
struct Liar {
    reader: FrameReader<tcp::OwnedReadHalf>,
    writer: FrameWriter<tcp::OwnedWriteHalf>,
    requests: u64,
    memory: Arc<Memory>,
    line: Line,
}

impl Liar {
    async fn connect(node: &Node) -> Liar {
        let memory = Memory::new(1 << 20).unwrap();
        let fabric = Fabric::open(&fabric(&["rxe1"], patient()), memory.clone()).await.unwrap();
        let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
        let (reader, writer) = (FrameReader::new(read), FrameWriter::new(write));
        let mut liar = Liar { reader, writer, requests: 0, memory, line: fabric.line(0).unwrap() };
        let hello = Request::Hello {
            version_min: PROTOCOL_VERSION_MIN,
            version_max: PROTOCOL_VERSION,
            name: "liar".into(),
            namespace: Some(descriptor()),
        };
        assert!(matches!(liar.ask(&hello).await, Response::Hello { .. }));
        let offered = vec![LineEnd { line: 7, address: liar.line.local().encode() }];
        let Response::Lines(ends) = liar.ask(&Request::Lines { gone: vec![9], offered }).await else { panic!("lines") };
        assert_eq!((ends.len(), ends[0].line), (1, 7));
        liar.line.connect(&EndpointAddress::decode(&ends[0].address).unwrap()).await.unwrap();
        liar
    }

    async fn tell(&mut self, request: &Request) -> u64 {
        self.requests += 1;
        self.writer.send(request.frame(PROTOCOL_VERSION, self.requests, 0, None)).await.unwrap();
        self.requests
    }

    async fn ask(&mut self, request: &Request) -> Response {
        self.tell(request).await;
        self.hear().await
    }

    async fn hear(&mut self) -> Response {
        let header = timeout(LONG, self.reader.next()).await.unwrap().unwrap().unwrap();
        Response::decode(PROTOCOL_VERSION, header.kind, self.reader.body()).unwrap()
    }

    /// Has a page opened, and does not release it.
    async fn open(&mut self, number: u32) -> LineWindow {
        let answer = self.ask(&Request::Get { keys: vec![key(number)], by: Delivery::Read(vec![7]) }).await;
        let Response::Page { place: Place::Window(window), .. } = answer else { panic!("{answer:?}") };
        assert_eq!(self.hear().await, Response::End);
        window
    }

    async fn read(&self, from: LineWindow) -> Option<Vec<u8>> {
        let block = self.memory.allocate(from.len as usize).unwrap();
        let range = RemoteRange { address: from.address, len: from.len, key: from.key };
        self.line.read(block, range).await.ok().map(|block| block.to_vec())
    }

    /// The number of the reservation, and the windows of its parts.
    async fn reserve(&mut self, number: u32) -> (u64, Vec<PartWindow>) {
        let NewPage { key, parent, position } = page(number);
        let reserved = Reserved { key, parent, position, ttl_ms: 0, part_bytes: geometry().part_table() };
        let answer = self.ask(&Request::Reserve(vec![reserved])).await;
        let Response::Reserved { outcomes, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(outcomes, [ReserveOutcome::Granted]);
        let reserve = self.requests;
        let answer = self.ask(&Request::OpenParts { reserve, lines: vec![7] }).await;
        let Response::Windows(windows) = answer else { panic!("{answer:?}") };
        assert_eq!(windows.len(), geometry().part_table().len());
        (reserve, windows)
    }

    async fn write(&self, bytes: &[u8], to: &PartWindow) -> bool {
        let mut block = self.memory.allocate(bytes.len()).unwrap();
        block.copy_from_slice(bytes);
        let range = RemoteRange { address: to.window.address, len: to.window.len, key: to.window.key };
        self.line.write(block, range).await.is_ok()
    }

    async fn say_written(&mut self, reserve: u64, part: u32, bytes: &[u8]) {
        let crcs = larder_format::chunk_crcs(bytes).collect();
        let put = Entry { request: reserve, index: 0 };
        self.tell(&Request::Part { put, part, crcs, bytes: PartBytes::Window }).await;
    }

    async fn commit(&mut self, reserve: u64) -> CommitOutcome {
        let answer = self.ask(&Request::Commit(vec![Entry { request: reserve, index: 0 }])).await;
        let Response::Committed(outcomes) = answer else { panic!("{answer:?}") };
        outcomes[0]
    }
}

fn part(payload: &[u8], part: u32) -> &[u8] {
    let range = geometry().part_range(part as usize).unwrap();
    &payload[range.start as usize..range.end as usize]
}

#[test]
fn who_writes_other_bytes_than_it_says_or_too_late_harms_nobody() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        let mut liar = Liar::connect(&node).await;
        // Other bytes than its checksums are of; and a part that was never written.
        for (number, written) in [(1, payload(9)), (2, Vec::new())] {
            let (reserve, windows) = liar.reserve(number).await;
            for open in &windows {
                let good = open.part == 0 || written.is_empty();
                let bytes = if good { payload(number) } else { written.clone() };
                if open.part == 0 || !written.is_empty() {
                    assert!(liar.write(part(&bytes, open.part), open).await);
                }
                liar.say_written(reserve, open.part, part(&payload(number), open.part)).await;
            }
            assert_eq!(liar.commit(reserve).await, CommitOutcome::Incomplete, "page {number}");
        }
        // Once a part was said to be written, its window is shut: what comes later is refused, and costs the line.
        let (reserve, windows) = liar.reserve(3).await;
        for open in &windows {
            assert!(liar.write(part(&payload(3), open.part), open).await);
            liar.say_written(reserve, open.part, part(&payload(3), open.part)).await;
        }
        assert_eq!(liar.commit(reserve).await, CommitOutcome::Stored);
        assert!(!liar.write(part(&payload(9), windows[0].part), &windows[0]).await);
        let had = get(&client, &[1, 2, 3]).await;
        assert!(had[0].1.is_none() && had[1].1.is_none() && had[2].0 == payload(3));
        // A put that is given up while its parts are open, and a client that leaves with some open.
        assert_eq!(put(&client, 4, &payload(4)).await, PutOutcome::Stored);
        drop(liar);
        let mut liar = Liar::connect(&node).await;
        let (reserve, _) = liar.reserve(5).await;
        liar.tell(&Request::Cancel(reserve)).await;
        liar.reserve(6).await;
        drop(liar);
        assert_eq!(client.stats().corrupt, 0);
        finish(node, client).await;
    });
}

#[test]
fn a_page_is_not_open_for_ever() {
    in_guest(async {
        let age = Duration::from_secs(3);
        let node =
            start_with(RdmaOptions { fabric: fabric(&["rxe0"], patient()), page_age_max: age, enabled: true }).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let mut liar = Liar::connect(&node).await;
        let begin = Instant::now();
        let window = liar.open(1).await;
        assert_eq!(liar.read(window).await.unwrap(), payload(1));
        assert!(of_devices(&node, "windows") == 1 || begin.elapsed() > age);
        at_rest(&node).await;
        assert!(begin.elapsed() > age);
        assert!(liar.read(window).await.is_none());
        drop(liar);
        finish(node, client).await;
    });
}

/// Descriptors on which this process hears of completions: one for each connection that its devices keep anything of.
fn completion_channels() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let names = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("infiniband")).count()
}

#[test]
fn what_was_open_on_lines_that_are_gone_goes_with_them() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let mut liar = Liar::connect(&node).await;
        let channels = completion_channels();
        assert!(channels >= 4, "both ends of two lines: {channels}");
        liar.open(1).await;
        let (reserve, _) = liar.reserve(2).await;
        assert!(of_devices(&node, "windows") > 1);
        assert_eq!(liar.ask(&Request::Lines { gone: vec![7], offered: Vec::new() }).await, Response::Lines(Vec::new()));
        let begin = Instant::now();
        // The put is still open, and the page was not released.
        while of_devices(&node, "windows") > 0 || completion_channels() > channels - 1 {
            assert!(begin.elapsed() < LONG, "{} {} {channels}", node.status(), completion_channels());
            sleep(Duration::from_millis(20)).await;
        }
        liar.tell(&Request::Cancel(reserve)).await;
        drop(liar);
        finish(node, client).await;
    });
}

#[test]
fn lines_that_the_node_does_not_use_are_made_anew() {
    in_guest(async {
        // It has lines and no windows, as if its ends were dead.
        let node = start(&["rxe0"], EndpointOptions { windows: 0, ..patient() }).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        let begin = Instant::now();
        while counter(&node, "rdma_lines_made") < 2 {
            assert!(begin.elapsed() < LONG, "the client goes on asking by lines that are not used");
            assert!(get(&client, &[1; 8]).await.iter().all(|(bytes, _)| *bytes == payload(1)));
        }
        assert_eq!(counter(&node, "bytes_opened_rdma"), 0);
        finish(node, client).await;
    });
}

#[test]
fn a_put_that_is_given_up_while_it_is_written_costs_no_line() {
    in_guest(async {
        let node = start(&["rxe0"], patient()).await;
        let client = attach(&node, &["rxe1"], patient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        {
            let _weather = Weather::new("delay 300ms limit 100000");
            // A write is on its way for 600 ms.
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
        assert_eq!((counter(&node, "rdma_lines_made"), of_devices(&node, "lines_died")), (1, 0));
        finish(node, client).await;
    });
}

#[test]
fn a_part_whose_line_dies_goes_over_the_stream() {
    in_guest(async {
        let node = start(&["rxe0"], impatient()).await;
        let client = attach(&node, &["rxe1"], impatient()).await;
        assert_eq!(put(&client, 1, &payload(1)).await, PutOutcome::Stored);
        assert_eq!(counter(&node, "bytes_received"), 0);
        let _weather = Weather::new("loss 100%");
        assert_eq!(put(&client, 2, &payload(2)).await, PutOutcome::Stored);
        assert!(get(&client, &[2]).await[0].0 == payload(2));
        assert!(counter(&node, "bytes_received") > 0);
        finish(node, client).await;
    });
}
