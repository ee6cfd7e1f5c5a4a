//! `larder namespace` with the processes of real nodes.

use larder_client::{Client, FollowEnd, MissReason, NewPage, PutOutcome};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry};
use larder_tests::redis::{RedisConnection, RedisReply};
use larder_tests::{Process, attach, data_dir, is_flushed, key, larder_command, soon, wait_for_node};
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

const GEOMETRY: PageGeometry = PageGeometry {
    dtype: KvDtype::F16,
    layers: 4,
    kv_heads: 1,
    head_dim: 64,
    page_tokens: 16,
    layers_per_part: 4,
    head_groups: 1,
};

/// The namespace of a version of the model's weights.
fn version(version: &str) -> NamespaceDescriptor {
    let base = NamespaceDescriptor { model: "policy".into(), weights: [1; 32], geometry: GEOMETRY, tenant: "t".into() };
    base.with_weights_version(version)
}

struct Node {
    process: Process,
    /// URLs of the data port and of the admin address.
    store: String,
    admin: String,
}

fn start(dir: &Path) -> Node {
    let dir = dir.to_str().expect("a UTF-8 path");
    let listen = ["store", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--data-dir", dir];
    let mut process = Process::start(&[&listen[..], &["--l2", "32MiB", "--l3-bytes", "64MiB"]].concat());
    let store = process.url("larder://");
    let admin = process.url("http://").trim_end_matches("/metrics").to_string();
    Node { process, store, admin }
}

fn payload(number: u32) -> Vec<u8> {
    let byte = |at: u32| (at.wrapping_mul(2_654_435_761).wrapping_add(number) >> 16) as u8;
    (0..GEOMETRY.page_bytes() as u32).map(byte).collect()
}

async fn put(client: &Client, number: u32) -> PutOutcome {
    let mut put = client.put(NewPage::first(key(number)), soon());
    put.part(0, payload(number).into());
    put.commit(soon()).await
}

/// Returns `true` if a get has the page, with its bytes.
async fn has(client: &Client, number: u32) -> bool {
    let wanted = vec![(key(number), vec![0u8; GEOMETRY.page_bytes()])];
    let (bytes, tier) = client.get(wanted, soon()).await.remove(0);
    assert!(tier.is_none() || bytes == payload(number), "page {number} has other bytes");
    tier.is_some()
}

async fn reason(client: &Client, number: u32) -> MissReason {
    client.explain(&[key(number)], soon()).await[0].expect("the node answers").reason
}

/// Runs a command with the admin addresses of these nodes.
fn command(nodes: &[&String], arguments: &[&str]) -> Output {
    let urls: Vec<&str> = nodes.iter().map(|url| url.as_str()).collect();
    let nodes = ["--nodes", &urls.join(",")];
    larder_command().arg("namespace").args(arguments).args(nodes).output().expect("larder runs")
}

fn json(nodes: &[&String], arguments: &[&str]) -> Value {
    let output = command(nodes, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON document")
}

/// Entry of a namespace in the list of the first node.
fn listed(node: &Node, namespace: &NamespaceDescriptor) -> Value {
    let list = json(&[&node.admin], &["ls"]);
    let rows = list["nodes"][0]["answer"]["namespaces"].as_array().expect("a list").clone();
    let name = namespace.id().to_string();
    rows.into_iter().find(|row| row["namespace"] == name).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retired_namespace_has_no_pages_until_the_rollback_also_after_kill_9() {
    let dir = data_dir();
    let (old, new) = (version("step-1"), version("step-2"));
    let first_digits = &old.id().to_string()[..12];
    let node = start(dir.path());
    let (reader, other) = (attach(&node.store, old.clone()).await, attach(&node.store, new).await);
    for client in [&reader, &other] {
        assert_eq!(put(client, 1).await, PutOutcome::Stored);
    }
    let row = listed(&node, &old);
    assert_eq!((&row["model"], &row["retired_unix_ms"]), (&"policy@step-1".into(), &Value::Null), "{row}");
    assert!(row["l2_pages"] == 1 && row["connections"].as_u64() > Some(0), "{row}");
    wait_for_node(&reader, "L3 has the pages", is_flushed).await;

    let retired = json(&[&node.admin], &["retire", first_digits]);
    assert_eq!(retired["nodes"][0]["answer"]["changed"], true, "{retired}");
    for number in [1, 2] {
        assert!(!has(&reader, number).await && !reader.exists(&[key(number)], soon()).await[0]);
        assert_eq!(put(&reader, number).await, PutOutcome::Retired);
        assert_eq!(reason(&reader, number).await, MissReason::Retired);
    }
    let lookup = reader.lookup(&[key(1)], Duration::from_secs(1), soon()).await;
    assert!(lookup.answered && lookup.tiers.is_empty());
    let buffer = vec![0u8; GEOMETRY.page_bytes()];
    let (_, end) = reader.follow(key(1), buffer, Instant::now() + Duration::from_millis(300)).finish().await;
    assert_eq!(end, FollowEnd::Miss, "a follower does not find it either");
    assert!(has(&other, 1).await && put(&other, 2).await == PutOutcome::Stored, "another namespace");
    assert_eq!(reason(&other, 3).await, MissReason::NeverStored);

    node.process.sigkill();
    let node = start(dir.path());
    let reader = attach(&node.store, old.clone()).await;
    assert!(!has(&reader, 1).await);
    assert_eq!((put(&reader, 2).await, reason(&reader, 1).await), (PutOutcome::Retired, MissReason::Retired));
    let row = listed(&node, &old);
    assert!(row["retired_unix_ms"].is_u64() && row["l3_pages"] == 1 && row["model"] == "policy@step-1", "{row}");
    assert_eq!(json(&[&node.admin], &["retire", first_digits])["nodes"][0]["answer"]["changed"], false, "a repetition");

    let back = json(&[&node.admin], &["rollback", first_digits]);
    assert_eq!(back["nodes"][0]["answer"]["changed"], true, "{back}");
    assert!(has(&reader, 1).await, "its pages are still there");
    assert_eq!(put(&reader, 2).await, PutOutcome::Stored);
    node.process.sigkill();
    let node = start(dir.path());
    assert!(has(&attach(&node.store, old).await, 1).await);
    assert!(node.process.stop().success());
}

/// The namespace with two pages in a tier, as soon as there is one.
fn with_two_pages(nodes: &[&String], field: &str) -> String {
    let end = soon();
    loop {
        let list = json(nodes, &["ls"]);
        let rows = list["nodes"][0]["answer"]["namespaces"].as_array().expect("a list");
        if let Some(row) = rows.iter().find(|row| row[field] == 2) {
            return row["namespace"].as_str().expect("a name").to_string();
        }
        assert!(Instant::now() < end, "{list}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn retired_database_of_redis_hides_its_values_and_loses_only_those_that_are_deleted() {
    let dir = data_dir();
    let without_l3: [&str; 0] = [];
    let with_l3 = ["--data-dir", dir.path().to_str().expect("a UTF-8 path"), "--l3-bytes", "64MiB"];
    for (more, field) in [(&without_l3[..], "l2_pages"), (&with_l3[..], "l3_pages")] {
        let free = "127.0.0.1:0";
        let listen = ["store", "--listen", free, "--redis-listen", free, "--admin-listen", free];
        let mut node = Process::start(&[&listen[..], &["--l2", "32MiB"], more].concat());
        let admin = node.url("http://").trim_end_matches("/metrics").to_string();
        let address = node.url("redis://").trim_start_matches("redis://").parse().expect("an address");
        let mut connection = RedisConnection::open(address).unwrap();
        let mut call = |line: &str| connection.line(line).unwrap();
        for command in ["SET kept x", "SET deleted x"] {
            assert_eq!(call(command), RedisReply::Simple("OK".into()));
        }
        let name = with_two_pages(&[&admin], field);

        json(&[&admin], &["retire", &name]);
        assert_eq!(call("GET kept"), RedisReply::Null);
        assert_eq!(call("DBSIZE"), RedisReply::Integer(0));
        let no_keys = vec![RedisReply::Bulk(b"0".to_vec()), RedisReply::Array(Vec::new())];
        assert_eq!(call("SCAN 0"), RedisReply::Array(no_keys));
        let refused = call("SET kept y");
        assert!(matches!(&refused, RedisReply::Error(reason) if reason.contains("retired")), "{refused:?}");
        assert_eq!(call("DEL deleted"), RedisReply::Integer(0));

        json(&[&admin], &["rollback", &name]);
        assert_eq!(call("GET kept"), RedisReply::Bulk(b"x".to_vec()), "{field}: a refused value has replaced it");
        assert_eq!(call("GET deleted"), RedisReply::Null, "{field}: a deleted value came back");
        assert_eq!(call("DBSIZE"), RedisReply::Integer(1));
        assert!(node.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_fails_if_a_node_is_away_or_no_node_has_the_name() {
    let dirs = [data_dir(), data_dir()];
    let [first, second] = [start(dirs[0].path()), start(dirs[1].path())];
    let namespace = version("step-1");
    let name = namespace.id().to_string();
    let client = attach(&first.store, namespace.clone()).await;
    assert_eq!(put(&client, 1).await, PutOutcome::Stored);

    let table = command(&[&first.admin, &second.admin], &["ls"]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.status.success() && text.contains(&name[..16]) && text.contains("policy@step-1"), "{text}");
    let unknown = command(&[&first.admin, &second.admin], &["retire", &"0".repeat(8)]);
    assert!(!unknown.status.success() && String::from_utf8_lossy(&unknown.stderr).contains("no node has"));

    // A node that has never seen the namespace refuses its puts too.
    let retired = json(&[&first.admin, &second.admin], &["retire", &name[..8]]);
    assert!((0..2).all(|node| retired["nodes"][node]["answer"]["changed"] == true), "{retired}");
    let stranger = attach(&second.store, namespace).await;
    assert_eq!(put(&stranger, 1).await, PutOutcome::Retired);

    second.process.sigkill();
    let output = command(&[&first.admin, &second.admin], &["rollback", &name]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && errors.contains(&second.admin) && errors.contains("incomplete"), "{errors}");
    assert!(has(&client, 1).await, "the other node has carried it out");
}
