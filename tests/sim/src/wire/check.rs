//! What must hold when all is at rest, and at the end.

use super::net::Machine;
use super::nodes::Host;
use super::{Wire, operations, put, soon};
use crate::payload::{self, page_key};
use crate::rest::{self, figure};
use crate::workload::Limit;
use larder_client::{Client, FabricOptions, PutOptions, PutOutcome, Transport};
use larder_wire::PROTOCOL_VERSION;
use std::time::Duration;
use tokio::time::sleep;

/// By then, lines that died are known to be dead, and puts, pins and leases without an owner are over.
const CALM_DOWN: Duration = Duration::from_secs(150);
/// Within this many seconds more, what was under way has ended.
const SETTLE_SECONDS: u64 = 60;
const PATIENCE: Duration = Duration::from_secs(60);

/// After a while everything works again and nothing is left over.
pub(super) async fn come_to_rest(wire: &Wire, hosts: &[Host], clients: &[Client]) {
    sleep(CALM_DOWN).await;
    settle(wire, hosts, clients).await;
    wire.model.lock().rests();
    if let Some(client) = clients.last() {
        read_all(wire, client).await;
    }
    for client in clients {
        if wire.world.failed() {
            return;
        }
        put_and_get(wire, client, 0).await;
    }
    if let Some(client) = clients.first().filter(|_| !wire.world.failed()) {
        given_up(wire, client, 0).await;
    }
    settle(wire, hosts, clients).await;
    wire.model.lock().rests();
    damage(wire, hosts, clients);
}

async fn settle(wire: &Wire, hosts: &[Host], clients: &[Client]) {
    let of_clients = || {
        let under_way = clients.iter().map(larder_client::sim::under_way).filter(|under_way| *under_way != (0, 0, 0));
        under_way.map(|under_way| format!("a client has (bytes, requests, memory) {under_way:?} under way"))
    };
    let problems = || hosts.iter().flat_map(|host| left_over(wire, host)).chain(of_clients()).collect();
    rest::settled(SETTLE_SECONDS, problems).await.into_iter().for_each(|problem| wire.violate(problem));
}

/// What is not at rest.
fn left_over(wire: &Wire, host: &Host) -> Vec<String> {
    let Some((server, arena)) = host.up() else { return vec!["a node is down".into()] };
    let status = server.status();
    let mut problems = rest::under_way(&status, wire.setup.write_policy);
    let devices = status.get("rdma").and_then(|devices| devices.as_array());
    if devices.map_or(0, Vec::len) != host.devices() {
        problems.push(format!("a node says of its RDMA devices: {:?}", status.get("rdma")));
    }
    for device in devices.into_iter().flatten() {
        let left = ["/windows", "/stuck"].map(|what| figure(device, what));
        if left != [0, 0] {
            problems.push(format!("(windows, memory) {left:?} of {} are not let go of", device["device"]));
        }
    }
    let (used, memory) = (figure(&status, "/tiers/l2/bytes_used"), arena.used() as u64);
    if used != memory {
        problems.push(format!("L2 has {used} bytes, and {memory} are taken"));
    }
    problems
}

/// Every page that is there is one that may be there; what is damaged is found.
async fn read_all(wire: &Wire, client: &Client) {
    for key in 0..wire.setup.keys {
        let (asked, buffer) = (wire.asks(), vec![0; wire.setup.geometry.page_bytes()]);
        let got = client.get(vec![(page_key(key), buffer)], soon(PATIENCE)).await;
        let (bytes, Some(_)) = &got[0] else { continue };
        wire.world.count("pages read at rest", 1);
        if let Err(problem) = wire.model.lock().check(key, bytes, asked, wire.world.is_suspect(key)) {
            wire.violate(format!("at rest, {problem}"));
        }
    }
}

/// A forgetting, a put and a get that must work, if L3 is not beyond repair.
async fn put_and_get(wire: &Wire, client: &Client, key: u64) {
    if !client.ready(PATIENCE).await {
        return wire.violate("at rest, a client is not connected".into());
    }
    // The last connections may take a moment more.
    sleep(Duration::from_secs(5)).await;
    let healthy = wire.setup.profile.honest();
    if !operations::forget(wire, client, vec![key], Limit::None, soon(PATIENCE)).await {
        return match healthy {
            true => wire.violate("at rest, forgetting is not complete".into()),
            false => wire.world.count("logs stopped", 1),
        };
    }
    let asked = wire.asks();
    let (name, outcome) = put::alone(wire, client, key).await;
    match outcome {
        PutOutcome::Stored => {}
        _ if !healthy => return wire.world.count("logs stopped", 1),
        other => return wire.violate(format!("at rest, a put is {other:?}")),
    }
    let buffer = vec![0; wire.setup.geometry.page_bytes()];
    let got = client.get(vec![(page_key(key), buffer)], soon(PATIENCE)).await;
    let found = match &got[0] {
        (bytes, Some(_)) => wire.model.lock().check(key, bytes, asked, false),
        _ => Err("a miss".into()),
    };
    if found.as_ref() != Ok(&name.content) {
        return wire.violate(format!("at rest, put {} was stored and {found:?} is read", name.content));
    }
    let (table, end) = (wire.setup.geometry.part_table(), wire.setup.geometry.page_bytes() as u32);
    let last_part = end - table.last().copied().unwrap_or_default()..end;
    let ranges = [last_part, end - 9..end - 1, end / 3..end / 2, 0..end];
    let asked = ranges.iter().map(|range| (page_key(key), range.clone(), vec![0; range.len()])).collect();
    for (range, (bytes, tier)) in ranges.iter().zip(client.get_ranges(asked, soon(PATIENCE)).await) {
        if tier.is_none() || !payload::is_at(key, name.content, range.start as usize, &bytes) {
            wire.violate(format!("at rest, {range:?} of put {} is {tier:?}, and not what was put", name.content));
        }
    }
}

/// Puts that are given up, or whose writer is gone, are soon in nobody's way.
async fn given_up(wire: &Wire, client: &Client, key: u64) {
    for alive in [true, false] {
        if !operations::forget(wire, client, vec![key], Limit::None, soon(PATIENCE)).await {
            return;
        }
        let machine = Machine::new(wire.network.clone(), true, FabricOptions::default());
        let other = wire.client("another", machine, Transport::Tcp, PROTOCOL_VERSION);
        if !other.ready(PATIENCE).await {
            return wire.violate("at rest, another client is not connected".into());
        }
        sleep(Duration::from_secs(5)).await;
        let open = other.put_with(put::page(key), PutOptions::default(), soon(PATIENCE));
        sleep(Duration::from_secs(1)).await;
        let kept = alive.then_some(other);
        sleep(Duration::from_secs(1)).await;
        drop(open);
        sleep(Duration::from_secs(5)).await;
        let (_, outcome) = put::alone(wire, client, key).await;
        if outcome == PutOutcome::InProgress {
            let writer = if alive { "gave up" } else { "is gone" };
            wire.violate(format!("at rest, a put whose writer {writer} is still in progress"));
        }
        drop(kept);
    }
}

/// Memory that does not fail holds no damage, whatever lines did; and if these did not lie, either, nobody was sent any.
fn damage(wire: &Wire, hosts: &[Host], clients: &[Client]) {
    let found: u64 = clients.iter().map(|client| client.stats().corrupt).sum();
    wire.world.count("damaged on the way", found);
    if found > 0 && !wire.setup.profile.memory_fails() && !wire.setup.profile.lies() {
        wire.violate(format!("clients found {found} pages damaged on lines that do not lie"));
    }
    for (server, _) in hosts.iter().filter_map(Host::up) {
        let found = figure(&server.store().status(), "/counters/pages_corrupt_l2");
        wire.world.count("damaged in L2", found);
        if found > 0 && !wire.setup.profile.memory_fails() {
            wire.violate(format!("{found} pages are damaged in memory that does not fail"));
        }
    }
}

/// Clients are gone; nodes stop, and give all their memory back.
pub(super) async fn end(wire: &Wire, hosts: Vec<Host>) {
    sleep(Duration::from_secs(5)).await;
    for mut host in hosts {
        let Some(arena) = host.up().map(|(_, arena)| arena.clone()) else { continue };
        host.close().await;
        sleep(Duration::from_secs(5)).await;
        if arena.used() > 0 {
            wire.violate(format!("a node is gone, and {} bytes of its memory are taken", arena.used()));
        }
    }
}
