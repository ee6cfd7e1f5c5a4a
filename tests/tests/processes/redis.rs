//! The Redis port of a store node: restarts, crashes, leases and hostile clients.

use larder_tests::redis::{RedisConnection, RedisReply};
use larder_tests::{PATIENCE, Process, data_dir, soon};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn store(dir: Option<&Path>, more: &[&str]) -> (Process, SocketAddr) {
    let mut arguments = vec!["store", "--listen", "127.0.0.1:0", "--redis-listen", "127.0.0.1:0"];
    if let Some(dir) = dir {
        arguments.extend(["--data-dir", dir.to_str().unwrap()]);
    }
    arguments.extend(more);
    let mut process = Process::start(&arguments);
    let address = process.url("redis://");
    (process, address.trim_start_matches("redis://").parse().unwrap())
}

fn ok() -> RedisReply {
    RedisReply::Simple("OK".into())
}

/// Value of a version of a key: version and length, and bytes that depend on both.
fn value(key: u64, version: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length + 8);
    let mut word = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version;
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(length as u64).to_le_bytes());
    while bytes.len() < length {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(length.max(16));
    bytes
}

/// Version of a value.
///
/// # Panics
/// If the bytes are not exactly those of one version.
fn version_of(key: u64, bytes: &[u8]) -> u64 {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(word(8) as usize, bytes.len(), "a mixture of two values");
    assert!(value(key, word(0), bytes.len()) == bytes, "a mixture of two values of key {key}");
    word(0)
}

const KEYS: u64 = 8;
const LENGTHS: [usize; 5] = [100, 3000, 70_000, 2 * MIB + 5, 400_000];

#[derive(Default)]
struct History {
    /// By key: the last version that was acknowledged, and the last that was sent.
    versions: [(u64, u64); KEYS as usize],
}

impl History {
    /// Sum of the latest acknowledged versions of all keys. It grows with each acknowledgement.
    fn acknowledged(&self) -> u64 {
        self.versions.iter().map(|(acknowledged, _)| acknowledged).sum()
    }
}

/// Sets values until the connection fails.
fn write(address: SocketAddr, first: u64, history: &Mutex<History>) {
    let Ok(mut connection) = RedisConnection::open(address) else { return };
    for step in 0.. {
        let key = (first + 2 * step) % KEYS;
        let version = history.lock().unwrap().versions[key as usize].1 + 1;
        history.lock().unwrap().versions[key as usize].1 = version;
        // Every second version has the length of the one before.
        let bytes = value(key, version, LENGTHS[(key + version / 2) as usize % LENGTHS.len()]);
        match connection.call(&[b"SET", format!("key-{key}").as_bytes(), &bytes]) {
            Ok(reply) if reply == ok() => history.lock().unwrap().versions[key as usize].0 = version,
            // Room is short for a moment.
            Ok(RedisReply::Error(_)) => {}
            Ok(other) => panic!("{other:?}"),
            Err(_) => return,
        }
    }
}

#[test]
fn node_killed_between_sets_returns_the_last_value_or_none() {
    let dir = data_dir();
    let mut history = History::default();
    let (mut present, mut absent) = (0, 0);
    for round in 0..10u64 {
        let (node, address) = store(Some(dir.path()), &["--l2", "64MiB", "--l3-bytes", "1GiB"]);
        let mut connection = RedisConnection::open(address).unwrap();
        for key in 0..KEYS {
            let (acknowledged, sent) = history.versions[key as usize];
            match connection.call(&[b"GET", format!("key-{key}").as_bytes()]).unwrap() {
                RedisReply::Bulk(bytes) => {
                    let version = version_of(key, &bytes);
                    assert!((acknowledged..=sent).contains(&version), "{version} is not in {acknowledged}..={sent}");
                    present += 1;
                }
                RedisReply::Null => absent += u64::from(sent > 0),
                other => panic!("{other:?}"),
            }
        }
        let versions_before = history.acknowledged();
        let shared = Arc::new(Mutex::new(history));
        let writers = [0, 1].map(|first| {
            let shared = shared.clone();
            std::thread::spawn(move || write(address, first, &shared))
        });
        let deadline = soon();
        while shared.lock().unwrap().acknowledged() < versions_before + 4 * KEYS {
            assert!(Instant::now() < deadline, "the node takes no values");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Some of them are on L3 by now, and some are not.
        std::thread::sleep(Duration::from_millis(200 + 37 * round));
        node.sigkill();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        history = Arc::into_inner(shared).unwrap().into_inner().unwrap();
    }
    println!("{present} values, {absent} misses, versions {:?}", history.versions);
    assert!(present > 20, "too few values survived to prove anything: {present}, and {absent} misses");
}

#[test]
fn values_expiry_and_flushes_survive_a_restart() {
    let dir = data_dir();
    let (node, address) = store(Some(dir.path()), &[]);
    let mut connection = RedisConnection::open(address).unwrap();
    let long = value(1, 1, 5 * MIB);
    assert_eq!(connection.call(&[b"SET", b"long", &long]).unwrap(), ok());
    for command in
        ["SET lasting x EX 1000", "SET passing x PX 300", "SELECT 3", "SET flushed x", "FLUSHDB", "SET later x"]
    {
        assert_eq!(connection.line(command).unwrap(), ok(), "{command}");
    }
    assert!(node.stop().success());
    std::thread::sleep(Duration::from_millis(300));
    let (_node, address) = store(Some(dir.path()), &[]);
    let mut connection = RedisConnection::open(address).unwrap();
    assert!(connection.line("GET long").unwrap() == RedisReply::Bulk(long));
    let RedisReply::Integer(left) = connection.line("TTL lasting").unwrap() else { panic!("no number") };
    assert!((900..=1000).contains(&left), "{left}");
    assert_eq!(connection.line("GET passing").unwrap(), RedisReply::Null);
    assert_eq!(connection.line("SELECT 3").unwrap(), ok());
    let both = RedisReply::Array(vec![RedisReply::Null, RedisReply::Bulk(b"x".to_vec())]);
    assert_eq!(connection.line("MGET flushed later").unwrap(), both);
    assert_eq!(connection.line("DBSIZE").unwrap(), RedisReply::Integer(1));
}

#[test]
fn value_stays_after_a_positive_exists() {
    // Without L3, so that eviction loses a value.
    let (_node, address) = store(None, &["--l2", "32MiB", "--in-flight", "32MiB"]);
    let mut connection = RedisConnection::open(address).unwrap();
    let long = value(1, 1, MIB);
    for key in [b"leased", b"others"] {
        assert_eq!(connection.call(&[b"SET", key, &long]).unwrap(), ok());
    }
    // From another connection: LMCache's client asks on one of several.
    let mut asking = RedisConnection::open(address).unwrap();
    assert_eq!(asking.call(&[b"EXISTS", b"leased"]).unwrap(), RedisReply::Integer(1));
    for number in 0..100 {
        let key = format!("filler-{number}");
        assert_eq!(connection.call(&[b"SET", key.as_bytes(), &value(2, number, MIB)]).unwrap(), ok());
    }
    assert_eq!(connection.call(&[b"EXISTS", b"others"]).unwrap(), RedisReply::Integer(0), "the node evicts");
    drop(asking);
    assert!(connection.call(&[b"GET", b"leased"]).unwrap() == RedisReply::Bulk(long), "the lease holds it");
}

#[test]
fn reader_of_a_replaced_key_gets_the_old_value_or_the_new_one() {
    let dir = data_dir();
    let (_node, address) = store(Some(dir.path()), &[]);
    let versions = Arc::new(AtomicU64::new(1));
    let done = Arc::new(AtomicBool::new(false));
    let length = |version: u64| LENGTHS[version as usize % LENGTHS.len()];
    let mut writer = RedisConnection::open(address).unwrap();
    assert_eq!(writer.call(&[b"SET", b"k", &value(0, 1, length(1))]).unwrap(), ok());
    let reads = Arc::new([(); 3].map(|()| AtomicU64::new(0)));
    let readers = [0, 1, 2].map(|reader| {
        let (versions, done, reads) = (versions.clone(), done.clone(), reads.clone());
        std::thread::spawn(move || {
            let mut connection = RedisConnection::open(address).unwrap();
            while !done.load(Ordering::SeqCst) {
                let before = versions.load(Ordering::SeqCst);
                match connection.call(&[b"GET", b"k"]).unwrap() {
                    RedisReply::Bulk(bytes) => assert!(version_of(0, &bytes) >= before, "an older value came back"),
                    other => panic!("the key always has a value: {other:?}"),
                }
                reads[reader].fetch_add(1, Ordering::SeqCst);
            }
        })
    });
    let until = Instant::now() + Duration::from_secs(4);
    let has_proved = || reads.iter().all(|reads| reads.load(Ordering::SeqCst) > 20);
    for version in 2.. {
        assert_eq!(writer.call(&[b"SET", b"k", &value(0, version, length(version))]).unwrap(), ok());
        // Every later read must return this version or a newer one.
        versions.store(version, Ordering::SeqCst);
        // Longer on a busy machine: too little activity proves nothing.
        if Instant::now() >= until && version > 20 && has_proved() || readers.iter().any(|reader| reader.is_finished())
        {
            break;
        }
        assert!(Instant::now() < until + PATIENCE, "{version} versions, {reads:?} reads");
    }
    done.store(true, Ordering::SeqCst);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    println!("{} versions, {reads:?} reads", versions.load(Ordering::SeqCst));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_clients_delay_no_other() {
    let (node, address) = store(None, &["--l2", "256MiB", "--in-flight", "64MiB"]);
    let mut good = RedisConnection::open(address).unwrap();
    let long = value(1, 1, 4 * MIB);
    assert_eq!(good.call(&[b"SET", b"long", &long]).unwrap(), ok());
    let before = node.memory_bytes("VmRSS");
    let mut hostile = Vec::new();
    for number in 0..96u8 {
        let mut connection = RedisConnection::open_from(Ipv4Addr::new(127, 0, 0, 2), address).await.unwrap();
        assert_eq!(connection.line("PING").unwrap(), RedisReply::Simple("PONG".into()), "the node serves it");
        match number % 4 {
            // Half a long value.
            0 => connection.send_bytes(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870912\r\nhalf").unwrap(),
            // Half a request of many arguments.
            1 => connection.send_bytes(b"*16384\r\n$4096\r\nhalf").unwrap(),
            // Replies that the client never reads.
            2 => connection.send_bytes(&b"GET long\r\n".repeat(64)).unwrap(),
            _ => connection.send_bytes(b"*1\r\n$99999999999\r\n").unwrap(),
        }
        hostile.push(connection);
    }
    // The node has taken what it takes of each, and none of them waits for room.
    node.wait_until_idle(address);
    // It takes room back from writers that are silent for a second.
    let first = value(2, 40, MIB);
    let deadline = soon();
    while good.call(&[b"SET", b"mine", &first]).unwrap() != ok() {
        assert!(Instant::now() < deadline, "silent writers keep their room: {}", node.stderr());
        std::thread::sleep(Duration::from_millis(10));
    }
    for number in 0..40 {
        assert_eq!(good.call(&[b"SET", b"mine", &value(2, number, MIB)]).unwrap(), ok(), "{number}");
        assert!(good.call(&[b"GET", b"long"]).unwrap() == RedisReply::Bulk(long.clone()));
    }
    let grown = node.memory_bytes("VmRSS").saturating_sub(before);
    println!("memory + {} MiB", grown >> 20);
    // The arena is touched as pages are put: 64 MiB in transfer, and what the good client put.
    assert!(grown < 192 * MIB as u64, "{} MiB", grown >> 20);
    let mut wrong = hostile.pop().unwrap();
    assert_eq!(wrong.receive().unwrap(), RedisReply::Error("ERR Protocol error: invalid bulk length".into()));
    assert!(wrong.receive().is_err(), "closed");
}

/// Waits until the node has closed a connection without a reply.
fn is_closed_silently(connection: &mut RedisConnection) -> bool {
    // Closing a socket with unread bytes resets it.
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(connection.receive(), Err(error) if matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe))
}

#[test]
fn web_page_cannot_command_the_node_through_a_browser() {
    let (node, address) = store(None, &[]);
    let mut good = RedisConnection::open(address).unwrap();
    assert_eq!(good.line("SET mine x").unwrap(), ok());
    let headers = "Host: localhost:6379\r\nContent-Length: 10\r\n\r\n";
    let mut tls = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    tls.extend(b"\r\nFLUSHALL\r\n");
    for request in [format!("POST / HTTP/1.1\r\n{headers}FLUSHALL\r\n").into_bytes(), tls] {
        let mut page = RedisConnection::open(address).unwrap();
        page.send_bytes(&request).unwrap();
        assert!(is_closed_silently(&mut page), "{}", request.escape_ascii());
    }
    // The first line of a request by GET looks like a command.
    let mut page = RedisConnection::open(address).unwrap();
    page.send_bytes(format!("GET / HTTP/1.1\r\n{headers}FLUSHALL\r\n").as_bytes()).unwrap();
    while page.receive().is_ok() {}
    assert_eq!(good.line("GET mine").unwrap(), RedisReply::Bulk(b"x".to_vec()));
    let begin = Instant::now();
    while !node.stderr().contains("HTTP or TLS at the Redis port") {
        assert!(begin.elapsed() < larder_tests::PATIENCE, "no line: {}", node.stderr());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn stranger_is_closed_when_idle_and_a_client_is_not() {
    let (_node, address) = store(None, &["--idle-timeout", "10"]);
    let mut client = RedisConnection::open(address).unwrap();
    assert_eq!(client.line("PING").unwrap(), RedisReply::Simple("PONG".into()));
    let mut strangers = [(); 3].map(|()| RedisConnection::open(address).unwrap());
    strangers[1].send_bytes(b"*1\r\n$4\r\nPI").unwrap();
    strangers[2].send_bytes(b"NONSENSE\r\n").unwrap();
    assert!(matches!(strangers[2].receive().unwrap(), RedisReply::Error(_)));
    for stranger in &mut strangers {
        assert!(is_closed_silently(stranger), "the node waits at most 10 s for its first command");
    }
    assert_eq!(client.line("PING").unwrap(), RedisReply::Simple("PONG".into()), "a pool may keep it idle");
}

#[test]
fn connection_before_its_first_command_costs_at_most_16_kib() {
    const CONNECTIONS: usize = 400;
    let (node, address) = store(None, &["--max-connections", "4096", "--request-memory", "256MiB"]);
    let connect = |count: usize| -> Vec<RedisConnection> {
        let connection = |_| {
            let mut connection = RedisConnection::open(address).unwrap();
            connection.send_bytes(b"*1\r\n").unwrap();
            connection
        };
        let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", node.id())).unwrap().count();
        let before = descriptors();
        let connections = (0..count).map(connection).collect();
        let deadline = soon();
        while descriptors() < before + count {
            assert!(Instant::now() < deadline, "the node does not accept {count} connections");
            std::thread::sleep(Duration::from_millis(10));
        }
        connections
    };
    let settled_memory = || {
        node.wait_until_idle(address);
        node.memory_bytes("VmRSS")
    };
    // The first ones pay for pools of the allocator and of the runtime.
    let warm = connect(50);
    let before = settled_memory();
    let connections = connect(CONNECTIONS);
    let added = settled_memory().saturating_sub(before) / CONNECTIONS as u64;
    println!("{added} bytes per connection");
    assert!(added <= 16 << 10, "{added} bytes per connection");
    drop((warm, connections));
}
