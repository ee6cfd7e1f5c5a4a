//! Requests over RDMA devices that are slow and otherwise healthy.
//!
//! A page takes longer than the stall timeout of the devices. No channel may fail, and no writer
//! may lose its room to others.

use super::super::net::ClientHost;
use super::super::nodes::NodeHost;
use super::super::{ClientSpec, Cluster, operations, put, room, soon};
use super::{BYTES_PER_SECOND_MIN, PAGE_TIME, PATIENCE, check_follow, check_range, check_view, get};
use crate::payload::key_in_namespace;
use crate::quiescence::status_number;
use crate::workload::Limit;
use futures::future::join_all;
use larder_client::{Client, PutOutcome, Transport};
use larder_wire::VERSION_RDMA_PROGRESS;
use std::time::Duration;
use tokio::time::sleep;

/// Length of a request on a slow RDMA device, in bytes, unless the options have a smaller one.
const RDMA_CHUNK_BYTES: u32 = larder_client::SLOW_CHUNK_BYTES;
/// Requests of that length that a slow RDMA device completes in the time after which its client or
/// the node gives up.
const RDMA_CHUNKS_PER_STALL: u64 = 3;
const LINK: &str = "a slow RDMA device";
/// Pages of a writer over RDMA. All of them take less than the deadline of a put.
const WRITTEN_PAGES_MAX: u64 = 4;

pub(super) async fn check(cluster: &Cluster, hosts: &[NodeHost], client: &Client) {
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
    let [key, followed] = [0, 1].map(|number| key_in_namespace(0, number));
    if !operations::forget(cluster, client, vec![key, followed], Limit::None, soon(PATIENCE)).await {
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
    check_range(cluster, &slow, key, LINK).await;
    check_view(cluster, &slow, key, LINK).await;
    tokio::join!(check_follow(cluster, &slow, followed, LINK), async {
        // The follower comes first.
        sleep(Duration::from_secs(1)).await;
        put::put_undisturbed(cluster, &slow, followed).await;
    });
    check_writer(cluster, client, &slow, rate).await;
    if failed_channels(hosts) != failed {
        cluster.violate("a slow RDMA device cost a channel".into());
    }
    cluster.rdma.lock().bytes_per_second = 0;
    drop(slow);
}

/// Fills the room for puts with pages that are written by slow RDMA devices, while another client
/// of the tenant wants room. A writer that makes progress loses nothing.
async fn check_writer(cluster: &Cluster, client: &Client, slow: &Client, rate: u64) {
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
