//! Progress over slow links: the oracle for requests that must not be misses.
//!
//! After the faults have stopped, a network that is slow and otherwise healthy carries a put and
//! gets of single pages. Each page takes [`PAGE_TIME`], which is longer than the silence after
//! which a peer counts as dead. The page is there, the node is up, and the deadline is long enough.
//! So the result must be a hit.
//!
//! The oracle forgives nothing else than a profile in which devices or memory fail: such a node may
//! lose a page at any time. The counters "progress checks" and
//! "forgiven: progress of failing nodes" tell how often.

use super::{Cluster, operations, put, soon};
use crate::payload::{key_in_namespace, page_key};
use crate::workload::Limit;
use larder_client::{Client, PutOutcome};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Time in which the slow network carries one page.
const PAGE_TIME: Duration = Duration::from_secs(12);
const PATIENCE: Duration = Duration::from_secs(120);
/// Deadline of a get that ends in the middle of its payload.
const SHORT: Duration = Duration::from_secs(7);
/// Largest delay between the short deadline and the end of that get.
const SHORT_LATE: Duration = Duration::from_millis(50);

pub(super) async fn check(cluster: &Cluster, client: &Client) {
    if !cluster.setup.profile.is_reliable() {
        return cluster.world.forgive("forgiven: progress of failing nodes", 1);
    }
    let [resident, put] = [0, 1].map(|number| key_in_namespace(0, number));
    for key in [resident, put] {
        if !operations::forget(cluster, client, vec![key], Limit::None, soon(PATIENCE)).await {
            return cluster.violate("a forget is not complete before the progress check".into());
        }
    }
    let (_, outcome) = put::put_undisturbed(cluster, client, resident).await;
    if outcome != PutOutcome::Stored {
        return cluster.violate(format!("a put is {outcome:?} before the progress check"));
    }
    let slow = cluster.remote_client("slow", cluster.spec());
    if !slow.ready(PATIENCE).await {
        return cluster.violate("a client is not connected before the progress check".into());
    }
    cluster.world.count("progress checks", 1);
    let rate = (cluster.setup.geometry.page_bytes() as f64 / PAGE_TIME.as_secs_f64()) as u64 + 1;
    cluster.network.faults.lock().bytes_per_second = rate;
    let connections = cluster.network.connections();
    let (_, outcome) = put::put_undisturbed(cluster, &slow, put).await;
    if outcome != PutOutcome::Stored {
        cluster.violate(format!("a put over a slow network is {outcome:?} although its deadline is long enough"));
    }
    let deadline = Instant::now() + SHORT;
    let short = async {
        get(cluster, &slow, resident, SHORT).await;
        let late = deadline.elapsed();
        if late > SHORT_LATE {
            cluster.violate(format!("a get over a slow network ended {late:?} after its deadline"));
        }
    };
    let long = async {
        if !get(cluster, &slow, put, PATIENCE).await {
            cluster.violate("a get over a slow network is a miss although its deadline is long enough".into());
        }
    };
    tokio::join!(short, long);
    if cluster.network.connections() != connections {
        cluster.violate("a deadline on a slow network cost a connection".into());
    }
    cluster.network.faults.lock().bytes_per_second = 0;
    drop(slow);
    sleep(Duration::from_secs(1)).await;
}

/// Returns `true` for a hit.
async fn get(cluster: &Cluster, client: &Client, key: u64, patience: Duration) -> bool {
    let started = cluster.request_time();
    let buffer = vec![0; cluster.setup.geometry.page_bytes()];
    let got = client.get(vec![(page_key(key), buffer)], soon(patience)).await;
    let (bytes, Some(_)) = &got[0] else { return false };
    if let Err(problem) = cluster.model.lock().check(key, bytes, started, false) {
        cluster.violate(format!("read over a slow network: {problem}"));
    }
    true
}
