//! Room for puts: the oracle for callers that a node refused, and that return as told.
//!
//! After the faults have stopped, silent writers reserve the whole room of a node. Callers put one
//! page each. A caller that is refused returns after the time in the refusal, times a random factor
//! up to 1.25, as [`PutOptions::busy_retries`](larder_client::PutOptions) does. One more client
//! returns at once, again and again, and must not get ahead of the others.
//!
//! Promise: a caller is refused at most [`REFUSALS_MAX`] times, and gets in within [`WAIT_MAX`] of
//! its first refusal. The counters "returns that got in" and "returns in vain" tell how truthful
//! the times are.

use super::{ClientSpec, Cluster, operations, put, soon};
use crate::payload::key_in_namespace;
use crate::random::{RandomSource, Stream};
use crate::workload::Limit;
use bytes::Bytes;
use futures::future::join_all;
use larder_client::{Client, PagePut, PutOptions, PutOutcome};
use larder_wire::VERSION_RETRY_AFTER;
use std::time::Duration;
use tokio::time::{Instant, sleep};

const CALLERS_MAX: u64 = 12;
/// Callers per page of their room: the times that a node tells cover lines of three turns.
const TURNS: u64 = 3;
/// Time in which the link of a caller carries one page …
const PAGE_TIME: Duration = Duration::from_millis(400);
/// … unless this rate is faster. Nothing is promised below it.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;
/// Time between the first puts of two callers.
const STAGGER: Duration = Duration::from_millis(7);
/// Pause of the client that does not return as told.
const IMPATIENCE: Duration = Duration::from_millis(20);
/// Each time told is at least a quarter of the time waited so far. If the first one is a second,
/// ten returns take at least seven.
const REFUSALS_MAX: u32 = 10;
const WAIT_MAX: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest number of open puts of a silent writer with a tight budget.
const TIGHT_PUTS: u64 = 3;
/// Numbers of the keys that only this module puts.
const FOREIGN_KEYS: u64 = 1 << 32;
const SLOT_UNIT: u64 = 4096;

pub(super) async fn check(cluster: &Cluster, client: &Client) {
    if !cluster.setup.profile.is_reliable() {
        return cluster.world.forgive("forgiven: progress of failing nodes", 1);
    }
    if cluster.setup.node_protocols[0] < VERSION_RETRY_AFTER {
        return cluster.world.forgive("forgiven: refusals by an old protocol", 1);
    }
    let count = CALLERS_MAX.min(TURNS * pages_in(cluster, caller_room(cluster)));
    let keys: Vec<u64> = (0..count).map(|number| key_in_namespace(0, number)).collect();
    if !operations::forget(cluster, client, keys.clone(), Limit::None, soon(PATIENCE)).await {
        return cluster.violate("a forget is not complete before the check of the room".into());
    }
    // One node only: each has room of its own.
    let spec = ClientSpec { nodes: 1, ..cluster.spec() };
    let callers: Vec<Client> =
        (0..count).map(|number| cluster.remote_client(&format!("caller-{number}"), spec)).collect();
    let impatient = cluster.remote_client("impatient", spec);
    let ready = join_all(callers.iter().chain([&impatient]).map(|client| client.ready(PATIENCE))).await;
    if ready.contains(&false) {
        return cluster.violate("a client is not connected before the check of the room".into());
    }
    let silent = reserve_the_room(cluster).await;
    cluster.world.count("room checks", 1);
    let rate = (cluster.setup.geometry.page_bytes() as f64 / PAGE_TIME.as_secs_f64()) as u64;
    cluster.network.faults.lock().bytes_per_second = rate.max(BYTES_PER_SECOND_MIN);
    let calls = callers.iter().zip(keys).enumerate().map(|(number, (caller, key))| call(cluster, caller, number, key));
    tokio::select! {
        biased;
        _ = join_all(calls) => {}
        () = put_again_and_again(cluster, &impatient) => {}
    }
    cluster.network.faults.lock().bytes_per_second = 0;
    drop((callers, impatient, silent));
    sleep(Duration::from_secs(2)).await;
}

pub(super) fn room(cluster: &Cluster) -> u64 {
    cluster.setup.in_flight_bytes / 2
}

/// Namespace of the silent writers. Half of the seeds take one of another tenant.
fn silent_namespace(cluster: &Cluster) -> u64 {
    [0, 2][(cluster.world.seed / 6 % 2) as usize]
}

/// Room of the callers. Another tenant keeps its share, even if its writers are silent.
fn caller_room(cluster: &Cluster) -> u64 {
    if silent_namespace(cluster) == 0 { room(cluster) } else { room(cluster) / 2 }
}

pub(super) fn pages_in(cluster: &Cluster, bytes: u64) -> u64 {
    let slot = (cluster.setup.geometry.page_bytes() as u64).next_multiple_of(SLOT_UNIT);
    (bytes / slot).max(1)
}

/// Opens puts until the room of the first node is taken, and sends nothing for them.
async fn reserve_the_room(cluster: &Cluster) -> Vec<(Client, Vec<PagePut>)> {
    let namespace = silent_namespace(cluster);
    let spec = ClientSpec { nodes: 1, namespace, ..cluster.spec() };
    let pages = pages_in(cluster, room(cluster));
    let each = if cluster.setup.tight { TIGHT_PUTS } else { pages };
    let mut silent = Vec::new();
    for number in 0..pages.div_ceil(each) {
        let writer = cluster.remote_client(&format!("silent-{number}"), spec);
        writer.ready(PATIENCE).await;
        let keys = (0..each).map(|page| key_in_namespace(namespace, FOREIGN_KEYS + number * each + page));
        let puts = keys.map(|key| writer.put_with(put::page(key), PutOptions::default(), soon(PATIENCE))).collect();
        silent.push((writer, puts));
    }
    // Until the reservations have arrived.
    sleep(Duration::from_millis(200)).await;
    silent
}

/// Puts a page. Returns to the node as it says, until the page is stored.
async fn call(cluster: &Cluster, caller: &Client, number: usize, key: u64) {
    let mut random = RandomSource::new(cluster.world.seed, Stream::Caller(number as u64));
    sleep(STAGGER * number as u32).await;
    let mut refusals = 0;
    let mut first_refusal = None;
    loop {
        let (_, outcome) = put::put_undisturbed(cluster, caller, key).await;
        let PutOutcome::Busy { retry_after } = outcome else {
            if outcome != PutOutcome::Stored {
                cluster.violate(format!("a put of a caller that returns as told is {outcome:?}"));
            }
            cluster.world.count("returns that got in", u64::from(refusals > 0));
            return;
        };
        cluster.world.count("returns in vain", u64::from(refusals > 0));
        cluster.world.event("told to return", [number as u64, retry_after.as_millis() as u64, refusals.into()]);
        refusals += 1;
        let waited = first_refusal.get_or_insert_with(Instant::now).elapsed();
        if refusals > REFUSALS_MAX || waited > WAIT_MAX {
            return cluster.violate(format!(
                "a caller that returned as told was refused {refusals} times, after {waited:?} once more"
            ));
        }
        sleep(retry_after + retry_after.mul_f64(random.below(250) as f64 / 1000.0)).await;
    }
}

pub(super) async fn put_again_and_again(cluster: &Cluster, client: &Client) {
    for number in 0.. {
        let page = put::page(key_in_namespace(0, 2 * FOREIGN_KEYS + number));
        let bytes = Bytes::from(vec![0; cluster.setup.geometry.page_bytes()]);
        client.put_pages(vec![(page, bytes)], PutOptions::default(), soon(PATIENCE)).await;
        sleep(IMPATIENCE).await;
    }
}
