//! Progress: the oracle for requests that must not be misses.
//!
//! The faults have stopped, all nodes are up, and no other client uses the cluster. So a request
//! for a page that is there must be a hit, if its link brings the bytes before its deadline:
//!
//! - At full speed, every page that a lookup finds ([`require`]).
//! - Over a slow network, requests of every kind ([`slow_network`]). Each page takes
//!   [`PAGE_TIME`], longer than the silence after which a peer counts as dead.
//! - Over slow RDMA devices, every kind that uses them ([`rdma`]).
//!
//! Where devices or memory fail, a node may lose a page at any time, and a crash tears pages that
//! were not durable ([`super::durable`]). The node must notice that at the first read: a page that
//! was missed is not found any more. Puts may fail where devices do, so only gets are checked
//! there. The counters "progress checks" and "forgiven: …" tell how often.

mod rdma;
mod slow_network;

use super::nodes::NodeHost;
use super::{Cluster, durable, soon};
use crate::payload::{key_in_namespace, page_key};
use larder_client::{Client, FollowEnd, Tier};
use slow_network::Clients;
use std::time::Duration;
use tokio::time::sleep;

/// Time in which the slow network carries one page, unless pages are very small.
const PAGE_TIME: Duration = Duration::from_secs(12);
/// Least rate of the slow network. Short frames are not cut, so a peer counts as dead if one takes
/// 5 s. A reservation of several pages has up to 1 KiB.
const SLOW_BYTES_PER_SECOND_MIN: u64 = 300;
const PATIENCE: Duration = Duration::from_secs(180);
/// Number of the keys that the checks put, from 0.
const KEYS: u64 = 12;

/// Time after which a node does not expect puts to take as long as those before.
const PACE_AGE_MAX: Duration = Duration::from_secs(6);
/// Rate from which requests must succeed.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

pub(super) async fn check(cluster: &Cluster, hosts: &[NodeHost], client: &Client) {
    let Some(clients) = Clients::connect(cluster).await else {
        return cluster.violate("a client is not connected before the progress check".into());
    };
    if cluster.setup.profile.is_reliable() {
        slow_network::check(cluster, client, &clients).await;
    } else {
        cluster.world.forgive("forgiven: progress of failing nodes", 1);
    }
    check_stored_pages(cluster, hosts, &clients.slow).await;
    drop(clients);
    if cluster.setup.profile.is_reliable() && !cluster.world.failed() {
        rdma::check(cluster, hosts, client).await;
    }
    // The node forgets the pace of these puts.
    sleep(PACE_AGE_MAX).await;
}

/// A network that carries a page in [`PAGE_TIME`], until this is dropped.
struct SlowNetwork<'a>(&'a Cluster);

impl SlowNetwork<'_> {
    fn begin(cluster: &Cluster) -> SlowNetwork<'_> {
        let rate = (cluster.setup.geometry.page_bytes() as f64 / PAGE_TIME.as_secs_f64()) as u64 + 1;
        cluster.network.faults.lock().bytes_per_second = rate.max(SLOW_BYTES_PER_SECOND_MIN);
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

async fn check_view(cluster: &Cluster, client: &Client, key: u64, link: &str) {
    let started = cluster.request_time();
    let views = client.view(&[page_key(key)], soon(PATIENCE)).await;
    match views.first().and_then(Option::as_ref) {
        None => cluster.violate(format!("a view over {link} is a miss although its page is there")),
        Some(view) => {
            if let Err(problem) = cluster.model.lock().check(key, view, started, false) {
                cluster.violate(format!("view during a progress check: {problem}"));
            }
        }
    }
}

async fn check_follow(cluster: &Cluster, client: &Client, key: u64, link: &str) {
    let started = cluster.request_time();
    let buffer = vec![0; cluster.setup.geometry.page_bytes()];
    let (bytes, end) = client.follow(page_key(key), buffer, soon(PATIENCE)).finish().await;
    if end != FollowEnd::Sealed {
        return cluster.violate(format!("a follow over {link} is {end:?} although its page was put"));
    }
    if let Err(problem) = cluster.model.lock().check(key, &bytes, started, false) {
        cluster.violate(format!("follow over {link}: {problem}"));
    }
}

/// Reads over a slow network one page that is in L2 and one that is only on L3, if there are some.
async fn check_stored_pages(cluster: &Cluster, hosts: &[NodeHost], slow: &Client) {
    let keys: Vec<u64> = (0..cluster.setup.keys).map(|number| key_in_namespace(0, number)).collect();
    let names: Vec<_> = keys.iter().map(|&key| page_key(key)).collect();
    let tiers = slow.locate(&names, soon(PATIENCE)).await;
    let _slowness = SlowNetwork::begin(cluster);
    // Not the last one, which is read below.
    let mut on_l3 = (0..tiers.len()).filter(|&at| tiers[at] == Some(Tier::L3));
    if let (Some(at), Some(_)) = (on_l3.next(), on_l3.next()) {
        check_warm(cluster, hosts, slow, keys[at]).await;
    }
    for wanted in [Tier::L2, Tier::L3] {
        // The last one: the keys of the other checks come first.
        let Some(at) = tiers.iter().rposition(|tier| *tier == Some(wanted)) else { continue };
        cluster.world.count(if wanted == Tier::L2 { "slow gets from L2" } else { "slow gets from L3" }, 1);
        let started = cluster.request_time();
        if cluster.setup.profile.is_reliable() && cluster.model.lock().is_untouched(keys[at], started) {
            check_range(cluster, slow, keys[at], "a slow network").await;
        }
        require(cluster, hosts, slow, keys[at], tiers[at]).await;
    }
}

/// Brings a page from L3 to L2.
async fn check_warm(cluster: &Cluster, hosts: &[NodeHost], client: &Client, key: u64) {
    let started = cluster.request_time();
    let may_be_damaged = durable::may_be_damaged(cluster, hosts, key);
    let warmed = client.warm(&[page_key(key)], soon(PATIENCE)).await;
    cluster.world.count("pages warmed over a slow network", warmed as u64);
    let is_demanded = !may_be_damaged && cluster.model.lock().is_untouched(key, started);
    if warmed == 0 && is_demanded && cluster.has_page(key) {
        cluster.violate(format!("key {key}: a warm did not read the page, which is on L3"));
    }
}

/// Reads a page that a lookup has found in `tier`, if any.
pub(super) async fn require(cluster: &Cluster, hosts: &[NodeHost], client: &Client, key: u64, tier: Option<Tier>) {
    let started = cluster.request_time();
    let may_be_damaged = durable::may_be_damaged(cluster, hosts, key);
    if get(cluster, client, key, PATIENCE).await {
        return cluster.world.count("pages read when quiescent", 1);
    }
    if tier.is_none() || !cluster.model.lock().is_untouched(key, started) {
        return;
    }
    if !may_be_damaged {
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
