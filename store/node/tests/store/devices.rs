//! Stores with several devices.

use crate::common::*;
use larder_node::{L3Device, Node, NodeOptions};
use larder_wire::TierCode;
use std::path::PathBuf;

fn pages(logs: &[larder_log::L3]) -> Vec<u64> {
    logs.iter().map(|l3| l3.stats().pages).collect()
}

#[tokio::test]
async fn pages_are_placed_by_capacity_and_found_in_any_order_of_devices() {
    let dir = directory();
    let mut dirs: Vec<PathBuf> = (0..3).map(|n| dir.path().join(n.to_string())).collect();
    let (store, logs) = with_logs(&options(), &dirs, 64 << 20).await;
    for number in 0..100 {
        put(&store, number).await;
    }
    settles(&store, "/tiers/writes_in_flight", 0).await;
    let counts = pages(&logs);
    assert!(counts.iter().sum::<u64>() == 100 && counts.iter().all(|&count| count >= 15), "{counts:?}");
    assert_eq!(figure(&store, "/tiers/l3/pages"), 100);
    store.close(soon()).await;
    drop((store, logs));
    dirs.reverse();
    let (store, logs) = with_logs(&options(), &dirs, 64 << 20).await;
    for number in 0..100 {
        assert_eq!(get(&store, number).await, Some(TierCode::L3), "{number}");
    }
    let all: Vec<_> = (0..100).map(id).collect();
    assert_eq!(store.forget(&all, soon()).await.unwrap(), 100);
    assert_eq!(pages(&logs), [0, 0, 0]);
    store.close(soon()).await;
}

#[tokio::test]
async fn a_broken_device_costs_its_own_pages_and_others_take_its_writes() {
    let dir = directory();
    let dirs: Vec<PathBuf> = (0..2).map(|n| dir.path().join(n.to_string())).collect();
    let (store, logs) = with_logs(&options(), &dirs, 64 << 20).await;
    for number in 0..60 {
        put(&store, number).await;
    }
    store.close(soon()).await;
    drop((store, logs));
    let (store, logs) = with_logs(&options(), &dirs, 64 << 20).await;
    let counts = pages(&logs);
    logs[0].close().await;
    for number in 100..160 {
        put(&store, number).await;
    }
    settles(&store, "/tiers/writes_in_flight", 0).await;
    assert_eq!(pages(&logs), [counts[0], counts[1] + 60]);
    let status = store.status();
    let states: Vec<_> =
        (0..2).map(|device| status["tiers"]["l3"]["devices"][device]["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["quarantined", "healthy"]);
    assert_eq!(status["tiers"]["l3"]["devices"][0]["reason"], "errors of writes");
    let mut hits = 0;
    for number in 0..60 {
        hits += u64::from(get(&store, number).await.is_some());
    }
    assert_eq!(hits, counts[1], "all pages of the healthy device are there");
    assert!(store.forget(&[id(0)], soon()).await.is_err(), "a page on the broken device could come back");
    // A page of the broken device may be put again. The healthy device takes it.
    let lost = (0..60).find(|number| logs[0].find(&id(*number)).is_some()).unwrap();
    assert_eq!(store.tiers().locate(&id(lost)), TierCode::Absent);
    put(&store, lost).await;
    settles(&store, "/tiers/writes_in_flight", 0).await;
    assert!(logs[1].find(&id(lost)).is_some());
    store.close(soon()).await;
    drop((store, logs));
    // Both devices have the page now. The newer put is served.
    let (store, logs) = with_logs(&options(), &dirs, 64 << 20).await;
    let newest = logs.iter().filter_map(|l3| l3.find(&id(lost))).map(|entry| entry.generation).max().unwrap();
    let (page, _) = store.tiers().get(&id(lost), soon()).await.unwrap();
    assert_eq!(page.generation(), newest);
    assert!(logs.iter().all(|l3| l3.find(&id(lost)).is_some()));
    store.close(soon()).await;
}

#[tokio::test]
async fn a_node_without_a_data_directory_keeps_its_identity_beside_a_log() {
    let dir = directory();
    let device = |name: &str| L3Device { dir: dir.path().join(name), bytes: 64 << 20 };
    let start = |l3| Node::start(NodeOptions { listen: "127.0.0.1:0".parse().unwrap(), l3, seed: None, ..options() });
    let mut before = None;
    std::fs::write(dir.path().join("file"), "not a directory").unwrap();
    for l3 in [vec![device("a"), device("b")], vec![device("b"), device("a")], vec![device("file"), device("a")]] {
        let node = start(l3).await.unwrap();
        let status = node.status();
        let (name, epoch) = (node.node_id().to_string(), status["epoch"].as_u64().unwrap());
        if let Some((name_before, epoch_before)) = before.replace((name.clone(), epoch)) {
            assert!(name == name_before && epoch > epoch_before, "{name} {epoch}");
        }
        node.shutdown().await;
    }
}

#[tokio::test]
async fn a_node_starts_without_one_device_but_not_without_all() {
    let dir = directory();
    let good = dir.path().join("good");
    std::fs::write(dir.path().join("file"), "not a directory").unwrap();
    let device = |dir: PathBuf| L3Device { dir, bytes: 64 << 20 };
    let bad = device(dir.path().join("file"));
    let options = |l3| NodeOptions { listen: "127.0.0.1:0".parse().unwrap(), l3, ..options() };
    assert!(Node::start(options(vec![bad.clone()])).await.is_err());
    let node = Node::start(options(vec![bad, device(good)])).await.unwrap();
    let status = node.status();
    let devices = status["tiers"]["l3"]["devices"].as_array().unwrap();
    let states: Vec<_> = devices.iter().map(|device| device["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["healthy", "unopened"]);
    assert!(devices[1]["reason"].as_str().unwrap().contains("file"), "{status}");
    node.shutdown().await;
}
