//! Progress: the oracle for requests that must not be misses.
//!
//! The faults have stopped, all nodes are up, and no other client uses the cluster. So a request
//! for a page that is there must be a hit, if its link brings the bytes before its deadline:
//!
//! - At full speed, every page that a lookup finds ([`require`]).
//! - Over a slow network: a put, gets of a page in L2 and of one that is only on L3, ranges, and a
//!   follow. Each page takes [`PAGE_TIME`], longer than the silence after which a peer counts as
//!   dead. A get that ends at its deadline costs the others nothing.
//! - Beside the slow network, a view by a client on the same machine.
//! - Over slow RDMA devices: a put, a get, ranges, and a get that ends at its deadline. A page
//!   takes longer than the stall timeout of the devices, and none of their connections may fail.
//!
//! Where devices or memory fail, a node may lose a page at any time, and a crash tears pages that
//! were not durable. The node must notice that at the first read: a page that was missed is not
//! found any more. Puts may fail where devices do, so only gets are checked there. The counters
//! "progress checks" and "forgiven: …" tell how often.

use super::net::ClientHost;
use super::nodes::NodeHost;
use super::{ClientSpec, Cluster, operations, put, room, soon};
use crate::payload::{key_in_namespace, page_key};
use crate::quiescence::status_number;
use crate::workload::Limit;
use futures::future::join_all;
use larder_client::{Client, FabricOptions, FollowEnd, PutOutcome, Tier, Transport};
use larder_wire::VERSION_RDMA_PROGRESS;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Time in which the slow network carries one page.
const PAGE_TIME: Duration = Duration::from_secs(12);
const PATIENCE: Duration = Duration::from_secs(120);
/// Deadline of a get that ends in the middle of its payload.
const SHORT: Duration = Duration::from_secs(7);
/// Largest delay between the short deadline and the end of that get.
const SHORT_LATE: Duration = Duration::from_millis(50);
/// Keys of the pages that the checks put.
const KEYS: [u64; 3] = [0, 1, 2];
/// Length of a request on a slow RDMA device, in bytes, unless the options have a smaller one.
const RDMA_CHUNK_BYTES: u32 = larder_client::SLOW_CHUNK_BYTES;
/// Requests of that length that a slow RDMA device completes in the time after which its client or
/// the node gives up.
const RDMA_CHUNKS_PER_STALL: u64 = 3;

/// Time after which a node does not expect puts to take as long as those before.
const PACE_AGE_MAX: Duration = Duration::from_secs(6);
/// Rate from which requests must succeed.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;
/// Pages of a writer over RDMA. All of them take less than the deadline of a put.
const WRITTEN_PAGES_MAX: u64 = 4;

pub(super) async fn check(cluster: &Cluster, hosts: &[NodeHost], client: &Client) {
    let slow = cluster.remote_client("slow", cluster.spec());
    let writer = cluster.remote_client("slow writer", cluster.spec());
    let machine = ClientHost::new(cluster.network.clone(), true, FabricOptions::default());
    let local =
        cluster.client("local", machine, ClientSpec { connections: 1, transport: Transport::Shm, ..cluster.spec() });
    for client in [&slow, &writer, &local] {
        if !client.ready(PATIENCE).await {
            return cluster.violate("a client is not connected before the progress check".into());
        }
    }
    if cluster.setup.profile.is_reliable() {
        check_puts_and_gets(cluster, client, &slow, &writer, &local).await;
    } else {
        cluster.world.forgive("forgiven: progress of failing nodes", 1);
    }
    check_stored_pages(cluster, &slow).await;
    drop((slow, writer, local));
    if cluster.setup.profile.is_reliable() && !cluster.world.failed() {
        check_rdma(cluster, hosts, client).await;
    }
    // The node forgets the pace of these puts.
    sleep(PACE_AGE_MAX).await;
}

async fn check_puts_and_gets(cluster: &Cluster, client: &Client, slow: &Client, writer: &Client, local: &Client) {
    let [resident, put, followed] = KEYS.map(|number| key_in_namespace(0, number));
    for key in [resident, put, followed] {
        if !operations::forget(cluster, client, vec![key], Limit::None, soon(PATIENCE)).await {
            return cluster.violate("a forget is not complete before the progress check".into());
        }
    }
    let (_, outcome) = put::put_undisturbed(cluster, client, resident).await;
    if outcome != PutOutcome::Stored {
        return cluster.violate(format!("a put is {outcome:?} before the progress check"));
    }
    cluster.world.count("progress checks", 1);
    let slowness = SlowNetwork::begin(cluster);
    let connections = cluster.network.connections();
    let (_, outcome) = put::put_undisturbed(cluster, slow, put).await;
    if outcome != PutOutcome::Stored {
        cluster.violate(format!("a put over a slow network is {outcome:?} although its deadline is long enough"));
    }
    let deadline = Instant::now() + SHORT;
    let short = async {
        get(cluster, slow, resident, SHORT).await;
        let late = deadline.elapsed();
        if late > SHORT_LATE {
            cluster.violate(format!("a get over a slow network ended {late:?} after its deadline"));
        }
    };
    let long = async {
        if !get(cluster, slow, put, PATIENCE).await {
            cluster.violate("a get over a slow network is a miss although its deadline is long enough".into());
        }
    };
    tokio::join!(short, long, check_view(cluster, local, resident));
    check_range(cluster, slow, put, "a slow network").await;
    tokio::join!(check_follow(cluster, slow, followed), async {
        // The follower comes first.
        sleep(Duration::from_secs(1)).await;
        put::put_undisturbed(cluster, writer, followed).await;
    });
    if cluster.network.connections() != connections {
        cluster.violate("a deadline on a slow network cost a connection".into());
    }
    drop(slowness);
}

/// A network that carries a page in [`PAGE_TIME`], until this is dropped.
struct SlowNetwork<'a>(&'a Cluster);

impl SlowNetwork<'_> {
    fn begin(cluster: &Cluster) -> SlowNetwork<'_> {
        let rate = (cluster.setup.geometry.page_bytes() as f64 / PAGE_TIME.as_secs_f64()) as u64 + 1;
        cluster.network.faults.lock().bytes_per_second = rate;
        SlowNetwork(cluster)
    }
}

impl Drop for SlowNetwork<'_> {
    fn drop(&mut self) {
        self.0.network.faults.lock().bytes_per_second = 0;
    }
}

/// Returns `true` for a hit.
async fn get(cluster: &Cluster, client: &Client, key: u64, patience: Duration) -> bool {
    let started = cluster.request_time();
    let buffer = vec![0; cluster.setup.geometry.page_bytes()];
    let got = client.get(vec![(page_key(key), buffer)], soon(patience)).await;
    let (bytes, Some(_)) = &got[0] else { return false };
    let model = cluster.model.lock();
    let checked = cluster.world.check_key(key, |suspect| model.check(key, bytes, started, suspect));
    drop(model);
    if let Err(problem) = checked {
        cluster.violate(format!("read during a progress check: {problem}"));
    }
    true
}

async fn check_range(cluster: &Cluster, client: &Client, key: u64, link: &str) {
    let end = cluster.setup.geometry.page_bytes() as u32;
    let range = end / 3..end - 1;
    let started = cluster.request_time();
    let ranges = vec![(page_key(key), range.clone(), vec![0; range.len()])];
    let (bytes, tier) = client.get_ranges(ranges, soon(PATIENCE)).await.remove(0);
    if tier.is_none() {
        return cluster.violate(format!("a range over {link} is a miss although its page is there"));
    }
    if let Err(problem) = cluster.model.lock().check_range(key, range.start as usize, &bytes, started, false) {
        cluster.violate(format!("range over {link}: {problem}"));
    }
}

async fn check_view(cluster: &Cluster, client: &Client, key: u64) {
    let started = cluster.request_time();
    let views = client.view(&[page_key(key)], soon(PATIENCE)).await;
    match views.first().and_then(Option::as_ref) {
        None => cluster.violate("a view on the machine of the node is a miss although the page is there".into()),
        Some(view) => {
            if let Err(problem) = cluster.model.lock().check(key, view, started, false) {
                cluster.violate(format!("view during a progress check: {problem}"));
            }
        }
    }
}

async fn check_follow(cluster: &Cluster, client: &Client, key: u64) {
    let started = cluster.request_time();
    let buffer = vec![0; cluster.setup.geometry.page_bytes()];
    let (bytes, end) = client.follow(page_key(key), buffer, soon(PATIENCE)).finish().await;
    if end != FollowEnd::Sealed {
        return cluster.violate(format!("a follow over a slow network is {end:?} although the page was put"));
    }
    if let Err(problem) = cluster.model.lock().check(key, &bytes, started, false) {
        cluster.violate(format!("follow over a slow network: {problem}"));
    }
}

/// Reads over a slow network one page that is in L2 and one that is only on L3, if there are some.
async fn check_stored_pages(cluster: &Cluster, slow: &Client) {
    let keys: Vec<u64> = (0..cluster.setup.keys).map(|number| key_in_namespace(0, number)).collect();
    let names: Vec<_> = keys.iter().map(|&key| page_key(key)).collect();
    let tiers = slow.locate(&names, soon(PATIENCE)).await;
    let _slowness = SlowNetwork::begin(cluster);
    for wanted in [Tier::L2, Tier::L3] {
        // The last one: the keys of the other checks come first.
        let Some(at) = tiers.iter().rposition(|tier| *tier == Some(wanted)) else { continue };
        cluster.world.count(if wanted == Tier::L2 { "slow gets from L2" } else { "slow gets from L3" }, 1);
        let started = cluster.request_time();
        if cluster.setup.profile.is_reliable() && cluster.model.lock().is_untouched(keys[at], started) {
            check_range(cluster, slow, keys[at], "a slow network").await;
        }
        require(cluster, slow, keys[at], tiers[at]).await;
    }
}

/// Reads a page that a lookup has found in `tier`, if any.
pub(super) async fn require(cluster: &Cluster, client: &Client, key: u64, tier: Option<Tier>) {
    let started = cluster.request_time();
    if get(cluster, client, key, PATIENCE).await {
        return cluster.world.count("pages read when quiescent", 1);
    }
    if tier.is_none() || !cluster.model.lock().is_untouched(key, started) {
        return;
    }
    if !cluster.crashes() {
        return cluster.violate(format!("key {key} was found in {tier:?}, and a get missed it"));
    }
    let again = client.locate(&[page_key(key)], soon(PATIENCE)).await;
    match again.first().copied().flatten() {
        None => cluster.world.forgive("forgiven: lost pages of failing nodes", 1),
        Some(again) => {
            cluster.violate(format!("key {key} was found in {tier:?}, a get missed it, and it is in {again:?}"))
        }
    }
}

/// Puts and reads over RDMA devices that are slow and otherwise healthy.
async fn check_rdma(cluster: &Cluster, hosts: &[NodeHost], client: &Client) {
    let setup = &cluster.setup;
    let all_have_devices = setup.node_devices.iter().all(|devices| !devices.is_empty());
    let is_new = setup.node_protocols.iter().all(|&version| version >= VERSION_RDMA_PROGRESS);
    let devices = setup.client_devices.iter().find(|devices| !devices.is_empty());
    let Some(devices) = devices.filter(|_| all_have_devices && is_new && setup.memory_bytes > 0) else { return };
    let machine = ClientHost::new(cluster.network.clone(), false, setup.fabric(devices));
    let spec = ClientSpec { transport: Transport::Rdma, connections: 1, ..cluster.spec() };
    let slow = cluster.client("slow RDMA", machine, spec);
    if !slow.ready(PATIENCE).await {
        return cluster.violate("a client over RDMA is not connected before the progress check".into());
    }
    // The channels follow the connection.
    sleep(Duration::from_secs(5)).await;
    let key = key_in_namespace(0, KEYS[0]);
    if !operations::forget(cluster, client, vec![key], Limit::None, soon(PATIENCE)).await {
        return cluster.violate("a forget is not complete before the check of RDMA".into());
    }
    cluster.world.count("rdma progress checks", 1);
    let failed = failed_channels(hosts);
    let page_bytes = setup.geometry.page_bytes() as u64;
    let chunk = u64::from(RDMA_CHUNK_BYTES.min(setup.endpoint.chunk_bytes)).min(page_bytes);
    // The node revokes a page that its client does not use for as long.
    let silence_max = setup.endpoint.stall_timeout.min(Duration::from_millis(setup.page_age_ms));
    let fast_enough = (RDMA_CHUNKS_PER_STALL * chunk) as f64 / silence_max.as_secs_f64();
    let rate = (fast_enough as u64).max(page_bytes / PAGE_TIME.as_secs()) + 1;
    cluster.rdma.lock().bytes_per_second = rate;
    let (_, outcome) = put::put_undisturbed(cluster, &slow, key).await;
    if outcome != PutOutcome::Stored {
        cluster.violate(format!("a put over a slow RDMA device is {outcome:?} although its deadline is long enough"));
    }
    // Ends in the middle of the transfer.
    get(cluster, &slow, key, Duration::from_secs_f64(page_bytes as f64 / rate as f64 / 2.0)).await;
    if !get(cluster, &slow, key, PATIENCE).await {
        cluster.violate("a get over a slow RDMA device is a miss although its deadline is long enough".into());
    }
    check_range(cluster, &slow, key, "a slow RDMA device").await;
    check_rdma_writer(cluster, client, &slow, rate).await;
    if failed_channels(hosts) != failed {
        cluster.violate("a slow RDMA device cost a channel".into());
    }
    cluster.rdma.lock().bytes_per_second = 0;
    drop(slow);
}

/// Fills the room for puts with pages that are written by slow RDMA devices, while another client
/// of the tenant wants room. A writer that makes progress loses nothing.
async fn check_rdma_writer(cluster: &Cluster, client: &Client, slow: &Client, rate: u64) {
    let pages = room::pages_in(cluster, room::room(cluster)).min(WRITTEN_PAGES_MAX);
    let keys: Vec<u64> = (0..pages).map(|number| key_in_namespace(0, number)).collect();
    if !operations::forget(cluster, client, keys.clone(), Limit::None, soon(PATIENCE)).await {
        return cluster.violate("a forget is not complete before the check of RDMA writers".into());
    }
    let other = cluster.remote_client("other writer", cluster.spec());
    if !other.ready(PATIENCE).await {
        return cluster.violate("a client is not connected before the check of RDMA writers".into());
    }
    // Nothing is promised below it.
    cluster.rdma.lock().bytes_per_second = rate.max(BYTES_PER_SECOND_MIN);
    let puts = keys.iter().map(|&key| put::put_undisturbed(cluster, slow, key));
    tokio::select! {
        biased;
        outcomes = join_all(puts) => {
            let lost = outcomes.iter().filter(|(_, outcome)| *outcome == PutOutcome::Lost).count();
            if lost > 0 {
                cluster.violate(format!("{lost} of {pages} puts over a slow RDMA device were lost to another client"));
            }
        }
        () = room::put_again_and_again(cluster, &other) => {}
    }
}

/// Number of RDMA channels of all nodes that failed.
fn failed_channels(hosts: &[NodeHost]) -> u64 {
    let of_host = |host: &NodeHost| {
        let status = host.up()?.0.status();
        let devices = status.get("rdma")?.as_array()?;
        Some(devices.iter().map(|device| status_number(device, "/channels_failed")).sum::<u64>())
    };
    hosts.iter().filter_map(of_host).sum()
}
