//! Room for puts: the oracle for callers that a node refused, and that return as told.
//!
//! After the faults have stopped, silent writers reserve the whole room of a node. Callers put one
//! page each. A caller that is refused returns after the time in the refusal, times a random factor
//! up to 1.25, as [`PutOptions::busy_retries`](larder_client::PutOptions) does. One more client
//! returns at once, again and again, and must not get ahead of the others.
//!
//! Some seeds have a crowd: more callers than the line of a node has places. Their returns are not
//! counted, because a node tells callers without a place when one is free.
//!
//! Promise: a caller is refused at most [`Bounds::refusals_max`] times, and gets in within
//! [`Bounds::wait_max`] of its first refusal. The counters "returns that got in" and "returns in
//! vain" tell how truthful the times are.

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
/// The line of a node has 128 places.
const CROWD: u64 = 150;
/// One seed in so many has a crowd.
const CROWD_SEEDS: u64 = 8;
/// Time in which the link of a caller carries one page …
const PAGE_TIME: Duration = Duration::from_millis(400);
/// … unless this rate is faster. Nothing is promised below it.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;
/// Time between the first puts of two callers.
const STAGGER: Duration = Duration::from_millis(7);
/// Pause of the client that does not return as told.
const IMPATIENCE: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest number of open puts of a silent writer with a tight budget.
const TIGHT_PUTS: u64 = 3;
/// Numbers of the keys that only this module puts.
const FOREIGN_KEYS: u64 = 1 << 32;
const SLOT_UNIT: u64 = 4096;

/// Limits of the promise for one check.
#[derive(Clone, Copy)]
struct Bounds {
    refusals_max: u32,
    wait_max: Duration,
    is_crowd: bool,
}

/// Each time told is at least a quarter of the time for which the estimates failed so far. If the
/// first one is a second, ten returns take at least seven.
const FEW: Bounds = Bounds { refusals_max: 10, wait_max: Duration::from_secs(20), is_crowd: false };
/// Time in which a crowd uses the whole room once, at most. It includes handshakes and returns that
/// are late by a quarter of 10 s.
const TURN_MAX: Duration = Duration::from_secs(4);

impl Bounds {
    /// Bounds for a crowd with a room of so many pages. No caller is told more than 10 s.
    fn of_crowd(pages: u64) -> Bounds {
        let wait_max = FEW.wait_max + TURN_MAX * CROWD.div_ceil(pages) as u32;
        Bounds { refusals_max: FEW.refusals_max + (wait_max.as_secs() / 5) as u32, wait_max, is_crowd: true }
    }
}

pub(super) async fn check(cluster: &Cluster, client: &Client) {
    if !cluster.setup.profile.is_reliable() {
        return cluster.world.forgive("forgiven: progress of failing nodes", 1);
    }
    if cluster.setup.node_protocols[0] < VERSION_RETRY_AFTER {
        return cluster.world.forgive("forgiven: refusals by an old protocol", 1);
    }
    let pages = pages_in(cluster, caller_room(cluster));
    let (count, bounds) = match cluster.world.seed / 12 % CROWD_SEEDS {
        1 => (CROWD, Bounds::of_crowd(pages)),
        _ => (CALLERS_MAX.min(TURNS * pages), FEW),
    };
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
    cluster.world.count("room checks with a crowd", u64::from(bounds.is_crowd));
    let rate = (cluster.setup.geometry.page_bytes() as f64 / PAGE_TIME.as_secs_f64()) as u64;
    cluster.network.faults.lock().bytes_per_second = rate.max(BYTES_PER_SECOND_MIN);
    let calls = callers.iter().zip(keys).enumerate();
    let calls = calls.map(|(number, (caller, key))| call(cluster, caller, (number, key), bounds));
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
async fn call(cluster: &Cluster, caller: &Client, (number, key): (usize, u64), bounds: Bounds) {
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
            cluster.world.count("returns that got in", u64::from(refusals > 0 && !bounds.is_crowd));
            return;
        };
        cluster.world.count("returns in vain", u64::from(refusals > 0 && !bounds.is_crowd));
        cluster.world.event("told to return", [number as u64, retry_after.as_millis() as u64, refusals.into()]);
        refusals += 1;
        let waited = first_refusal.get_or_insert_with(Instant::now).elapsed();
        if refusals > bounds.refusals_max || waited > bounds.wait_max {
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
