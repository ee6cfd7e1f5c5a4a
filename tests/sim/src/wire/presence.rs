//! Pages that are there while a request of the workload runs: it must not miss them.
//!
//! Checked without faults, with one node, for requests that wait as long as it takes. A page with
//! the same generation before and after the request was there all the time. If it has gone, it was
//! evicted meanwhile, which is legal and counted.
//!
//! A node that has just started is exempt: its clients may not have connected yet.
//!
//! The fail point `node.lookup-misses-now-and-then` is the control of this check.

use super::model::RequestTime;
use super::{Cluster, address};
use crate::faults::Profile;
use larder_client::Client;
use std::time::Duration;

/// Time after its start from which a node has its clients.
const CONNECTED_AFTER: Duration = Duration::from_secs(5);

/// Generations of the pages of a request when it began. Without pages, nothing is checked.
#[derive(Default)]
pub(super) struct Presence(Vec<(u64, Option<u64>)>);

impl Presence {
    /// Looks at the pages before a request. `waits` is `false` if the request may end early.
    pub(super) fn before(cluster: &Cluster, client: &Client, keys: &[u64], waits: bool) -> Presence {
        let is_checked = waits && cluster.setup.profile == Profile::Calm && cluster.setup.nodes == 1;
        if !is_checked || client.nodes_connected() == 0 || !has_clients(cluster) {
            return Presence::default();
        }
        let pages: Vec<_> = keys.iter().map(|&key| (key, generation(cluster, key))).collect();
        let there = pages.iter().filter(|(_, generation)| generation.is_some()).count();
        cluster.world.count("pages there before a request", there as u64);
        Presence(pages)
    }

    /// Decides about a miss of page `at` by a request that started at `started` and has just ended.
    pub(super) fn check_miss(&self, cluster: &Cluster, at: usize, started: RequestTime, request: &str) {
        let Some(&(key, Some(before))) = self.0.get(at) else { return };
        if !has_clients(cluster) || !cluster.model.lock().is_untouched(key, started) {
            return;
        }
        match generation(cluster, key) {
            Some(now) if now == before => {
                cluster.violate(format!("key {key}: a {request} missed generation {now}, which was there all the time"))
            }
            _ => cluster.world.forgive("forgiven: pages evicted during a request", 1),
        }
    }
}

fn has_clients(cluster: &Cluster) -> bool {
    cluster.network.up_for(&address(0)).is_some_and(|time| time >= CONNECTED_AFTER)
}

fn generation(cluster: &Cluster, key: u64) -> Option<u64> {
    let (node, _) = cluster.network.host(&address(0))?;
    node.store().tiers().lookup(&cluster.id(key)).generation()
}
