//! Checks of an idle cluster, and of its end.

use super::net::ClientHost;
use super::nodes::NodeHost;
use super::{Cluster, operations, progress, put, refused_reads, room, soon};
use crate::payload::{self, key_in_namespace, page_key};
use crate::quiescence::{self, status_number};
use crate::workload::Limit;
use larder_client::{Client, FabricOptions, PutOptions, PutOutcome};
use std::time::Duration;
use tokio::time::sleep;

/// By this time, peers have noticed dead connections, and puts, pins and leases without an owner
/// have timed out.
const FAULTS_DRAINED_AFTER: Duration = Duration::from_secs(150);
const IDLE_TIMEOUT_SECONDS: u64 = 60;
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the cluster is idle, and checks it. `is_last` adds the checks that one per seed is
/// enough of.
pub(super) async fn quiesce(cluster: &Cluster, hosts: &[NodeHost], clients: &[Client], is_last: bool) {
    sleep(FAULTS_DRAINED_AFTER).await;
    check_idle(cluster, hosts, clients).await;
    cluster.model.lock().quiesced();
    for (number, client) in clients.iter().enumerate() {
        if number < cluster.setup.namespaces as usize {
            read_all_keys(cluster, hosts, client, cluster.setup.namespace_of_client(number)).await;
        }
    }
    for (number, client) in clients.iter().enumerate() {
        if cluster.world.failed() {
            return;
        }
        put_and_get(cluster, hosts, client, key_in_namespace(cluster.setup.namespace_of_client(number), 0)).await;
    }
    if let Some(client) = clients.first().filter(|_| !cluster.world.failed()) {
        check_aborted_puts(cluster, client, 0).await;
    }
    if let Some(client) = clients.first().filter(|_| !cluster.world.failed()) {
        progress::check(cluster, hosts, client).await;
    }
    if let Some(client) = clients.first().filter(|_| is_last && !cluster.world.failed()) {
        room::check(cluster, client).await;
    }
    if let Some(client) = clients.first().filter(|_| is_last && !cluster.world.failed()) {
        refused_reads::check(cluster, client).await;
    }
    check_idle(cluster, hosts, clients).await;
    cluster.model.lock().quiesced();
    count_damage(cluster, hosts, clients);
}

async fn check_idle(cluster: &Cluster, hosts: &[NodeHost], clients: &[Client]) {
    let of_clients = || {
        let under_way = clients.iter().map(larder_client::sim::in_flight).filter(|under_way| *under_way != (0, 0, 0));
        under_way.map(|under_way| format!("a client has {under_way:?} (bytes, requests, memory) in flight"))
    };
    let problems = || hosts.iter().flat_map(|host| remaining_work(cluster, host)).chain(of_clients()).collect();
    quiescence::wait_until_idle(IDLE_TIMEOUT_SECONDS, problems)
        .await
        .into_iter()
        .for_each(|problem| cluster.violate(problem));
}

fn remaining_work(cluster: &Cluster, host: &NodeHost) -> Vec<String> {
    let Some((server, arena)) = host.up() else { return vec!["a node does not run".into()] };
    let status = server.status();
    let mut problems = quiescence::busy_counters(&status, cluster.setup.write_policy);
    let devices = status.get("rdma").and_then(|devices| devices.as_array());
    if devices.map_or(0, Vec::len) != host.devices() {
        problems.push(format!("a node reports its RDMA devices as {:?}", status.get("rdma")));
    }
    for device in devices.into_iter().flatten() {
        let left = ["/grants", "/leaked"].map(|pointer| status_number(device, pointer));
        if left != [0, 0] {
            problems.push(format!("{left:?} (grants, leaked bytes) of RDMA device {} remain", device["device"]));
        }
    }
    let used = status_number(&status, "/tiers/l2/bytes_used");
    let memory = arena.used() as u64;
    if used != memory {
        problems.push(format!("L2 reports {used} bytes, and the arena has {memory} allocated"));
    }
    problems
}

async fn read_all_keys(cluster: &Cluster, hosts: &[NodeHost], client: &Client, namespace: u64) {
    for key in (0..cluster.setup.keys).map(|number| key_in_namespace(namespace, number)) {
        // Before each get: the one before may have changed the tiers.
        let tier = client.locate(&[page_key(key)], soon(PATIENCE)).await.first().copied().flatten();
        progress::require(cluster, hosts, client, key, tier).await;
    }
}

/// Performs a forget, a put and a get. They must succeed unless a log reports that it takes no
/// writes. A cluster that refuses everything would pass the other checks.
async fn put_and_get(cluster: &Cluster, hosts: &[NodeHost], client: &Client, key: u64) {
    if !client.ready(PATIENCE).await {
        return cluster.violate("a client is not connected after faults have stopped".into());
    }
    // Pooled and RDMA connections may need a few more seconds.
    sleep(Duration::from_secs(5)).await;
    // Asked after the failure, because requests may end a quarantine or begin one.
    let has_stopped = || {
        let is_reliable = cluster.setup.profile.is_reliable();
        !is_reliable && hosts.iter().filter_map(NodeHost::up).any(|(node, _)| quiescence::has_stopped(&node.status()))
    };
    if !operations::forget(cluster, client, vec![key], Limit::None, soon(PATIENCE)).await {
        return match has_stopped() {
            true => cluster.world.forgive("forgiven: log stopped", 1),
            false => cluster.violate("a forget is not complete after faults have stopped".into()),
        };
    }
    let started = cluster.request_time();
    let (put_id, outcome) = put::put_undisturbed(cluster, client, key).await;
    match outcome {
        PutOutcome::Stored => {}
        _ if has_stopped() => return cluster.world.forgive("forgiven: log stopped", 1),
        other => return cluster.violate(format!("a put is {other:?} after faults have stopped")),
    }
    let buffer = vec![0; cluster.setup.geometry.page_bytes()];
    let got = client.get(vec![(page_key(key), buffer)], soon(PATIENCE)).await;
    let found = match &got[0] {
        (bytes, Some(_)) => cluster.model.lock().check(key, bytes, started, false),
        _ => Err("a miss".into()),
    };
    if found.as_ref() != Ok(&put_id.content) {
        return cluster
            .violate(format!("put {} was stored and {found:?} was read after faults have stopped", put_id.content));
    }
    let table = cluster.setup.geometry.part_table();
    let end = cluster.setup.geometry.page_bytes() as u32;
    let last_part = end - table.last().copied().unwrap_or_default()..end;
    let ranges = [last_part, end - 9..end - 1, end / 3..end / 2, 0..end];
    let started = ranges.iter().map(|range| (page_key(key), range.clone(), vec![0; range.len()])).collect();
    for (range, (bytes, tier)) in ranges.iter().zip(client.get_ranges(started, soon(PATIENCE)).await) {
        if tier.is_none() || !payload::is_at(key, put_id.content, range.start as usize, &bytes) {
            cluster.violate(format!(
                "range {range:?} of put {} returned {tier:?} and wrong bytes after faults have stopped",
                put_id.content
            ));
        }
    }
}

/// Checks that a put aborted by its writer, or by the writer's disconnect, soon stops blocking
/// other puts.
async fn check_aborted_puts(cluster: &Cluster, client: &Client, key: u64) {
    for alive in [true, false] {
        if !operations::forget(cluster, client, vec![key], Limit::None, soon(PATIENCE)).await {
            return;
        }
        let machine = ClientHost::new(cluster.network.clone(), true, FabricOptions::default());
        let other = cluster.client("second", machine, cluster.spec());
        if !other.ready(PATIENCE).await {
            return cluster.violate("a second client is not connected after faults have stopped".into());
        }
        sleep(Duration::from_secs(5)).await;
        let open = other.put_with(put::page(key), PutOptions::default(), soon(PATIENCE));
        sleep(Duration::from_secs(1)).await;
        let kept = alive.then_some(other);
        sleep(Duration::from_secs(1)).await;
        drop(open);
        sleep(Duration::from_secs(5)).await;
        let (_, outcome) = put::put_undisturbed(cluster, client, key).await;
        if outcome == PutOutcome::InProgress {
            let writer = if alive { "aborted it" } else { "disconnected" };
            cluster.violate(format!("a put whose writer {writer} is still in progress"));
        }
        drop(kept);
    }
}

/// Checks for damage without a cause: in L2 although memory works, or at clients although networks
/// and memory work.
fn count_damage(cluster: &Cluster, hosts: &[NodeHost], clients: &[Client]) {
    let found: u64 = clients.iter().map(|client| client.stats().corrupt).sum();
    cluster.world.count("pages damaged in transit", found);
    match cluster.setup.profile.memory_fails() || cluster.setup.profile.has_silent_faults() {
        true => cluster.world.forgive("forgiven: damage in transit", found),
        false if found == 0 => {}
        false => cluster.violate(format!("clients found {found} damaged pages although networks and memory work")),
    }
    for (server, _) in hosts.iter().filter_map(NodeHost::up) {
        let found = status_number(&server.store().status(), "/counters/pages_corrupt_l2");
        cluster.world.count("damaged in L2", found);
        match cluster.setup.profile.memory_fails() {
            true => cluster.world.forgive("forgiven: damage by failing memory", found),
            false if found == 0 => {}
            false => cluster.violate(format!("{found} pages are damaged in L2 although memory works")),
        }
    }
}

pub(super) async fn end(cluster: &Cluster, hosts: Vec<NodeHost>) {
    sleep(Duration::from_secs(5)).await;
    for mut host in hosts {
        let Some(arena) = host.up().map(|(_, arena)| arena.clone()) else { continue };
        host.close().await;
        sleep(Duration::from_secs(5)).await;
        if arena.used() > 0 {
            cluster.violate(format!("{} bytes of arena memory leaked when a node closed", arena.used()));
        }
    }
}
