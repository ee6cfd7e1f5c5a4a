//! Requests over a slow network: each kind succeeds if its deadline leaves the time.
//!
//! - A put, gets, ranges, a view and a follow of single pages. A get that ends at its deadline
//!   costs the others nothing.
//! - A put and a get of several pages. The get is hedged, and its node begins to answer in time.
//! - Beside the pages: locate, lookup with a lease, warm, pin, hint and forget. Their short answers
//!   do not wait for the pages.
//! - A put whose parts come one by one, and puts of a copy.
//! - Over several connections: requests at the same time, one of which ends at its deadline.
//! - On the machine of the node: put, get, ranges, views and a follow.
//!
//! None of them costs a connection. The counter "requests over a slow network" tells how many had
//! to succeed.

use super::super::net::ClientHost;
use super::super::{ClientSpec, Cluster, operations, put, room, soon};
use super::{KEYS, PAGE_TIME, PATIENCE, SlowNetwork, check_follow, check_range, check_view, get};
use crate::payload::{key_in_namespace, page_key};
use crate::workload::Limit;
use futures::future::join_all;
use larder_client::{Client, FabricOptions, Fetched, GetOptions, Hint, PinKind, PutOptions, PutOutcome, Transport};
use larder_wire::{FRAGMENT_BYTES, VERSION_COPIES, VERSION_HINTS};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Deadline of a get that ends in the middle of its payload.
const SHORT: Duration = Duration::from_secs(7);
/// Largest delay between the short deadline and the end of that get.
const SHORT_LATE: Duration = Duration::from_millis(50);
/// Connections of a client that uses several per node.
const POOLED_CONNECTIONS: usize = 3;
/// Pages of one put. The last of them is sent after the time for which a node keeps the put of a
/// silent writer.
const BATCH_PAGES: u64 = 7;
/// Pages of one get. More could fill the connection's read window, which delays a warm behind them.
const GET_PAGES: usize = 3;
/// Time after which a hedged get gives up a node that has not begun to answer.
const HEDGE_AFTER: Duration = Duration::from_secs(8);
/// Bytes of short requests or answers that one connection carries at a time, at most.
const SHORT_FRAMES_BYTES: u64 = 4 << 10;
/// Pause of a writer before each part.
const PART_PAUSE: Duration = Duration::from_secs(3);
const PIN_TIME: Duration = Duration::from_secs(5);
const HOLD_TIME: Duration = Duration::from_secs(5);
const LINK: &str = "a slow network";
const LOCAL: &str = "shared memory";

pub(super) struct Clients {
    /// Has one connection per node, as `writer`.
    pub(super) slow: Client,
    writer: Client,
    pooled: Client,
    /// On the machine of all nodes.
    local: Client,
}

impl Clients {
    /// Returns `None` if a client does not connect.
    pub(super) async fn connect(cluster: &Cluster) -> Option<Clients> {
        let slow = cluster.remote_client("slow", cluster.spec());
        let writer = cluster.remote_client("slow writer", cluster.spec());
        let host = |is_local| ClientHost::new(cluster.network.clone(), is_local, FabricOptions::default());
        let spec = ClientSpec { connections: POOLED_CONNECTIONS, ..cluster.spec() };
        let pooled = cluster.client("slow, pooled", host(false), spec);
        let spec = ClientSpec { connections: 1, transport: Transport::Shm, ..cluster.spec() };
        let local = cluster.client("local", host(true), spec);
        for client in [&slow, &writer, &pooled, &local] {
            if !client.ready(PATIENCE).await {
                return None;
            }
        }
        // Further connections follow the first.
        sleep(Duration::from_secs(2)).await;
        Some(Clients { slow, writer, pooled, local })
    }
}

pub(super) async fn check(cluster: &Cluster, client: &Client, clients: &Clients) {
    let Clients { slow, writer, pooled, local } = clients;
    let keys: Vec<u64> = (0..KEYS).map(|number| key_in_namespace(0, number)).collect();
    let [resident, put, followed] = [keys[0], keys[1], keys[2]];
    if !operations::forget(cluster, client, keys.clone(), Limit::None, soon(PATIENCE)).await {
        return cluster.violate("a forget is not complete before the progress check".into());
    }
    let (_, outcome) = put::put_undisturbed(cluster, client, resident).await;
    if outcome != PutOutcome::Stored {
        return cluster.violate(format!("a put is {outcome:?} before the progress check"));
    }
    cluster.world.count("progress checks", 1);
    let slowness = SlowNetwork::begin(cluster);
    let connections = cluster.network.connections();
    put_page(cluster, slow, put, LINK).await;
    let short = end_early(cluster, slow, resident);
    tokio::join!(short, get_page(cluster, slow, put, LINK), check_view(cluster, local, resident, LOCAL));
    check_range(cluster, slow, put, LINK).await;
    check_view(cluster, slow, put, LINK).await;
    tokio::join!(check_follow(cluster, slow, followed, LINK), async {
        // The follower comes first.
        sleep(Duration::from_secs(1)).await;
        put::put_undisturbed(cluster, writer, followed).await;
    });
    check_pool(cluster, pooled, [resident, put, followed]).await;
    // Small tiers have room for few pages.
    forget(cluster, slow, &keys[..3]).await;
    check_streams(cluster, slow, &keys[3..]).await;
    forget(cluster, slow, &keys[3..]).await;
    check_batch(cluster, slow, &keys[3..]).await;
    forget(cluster, slow, &keys[3..]).await;
    check_local(cluster, local, &keys).await;
    if cluster.network.connections() != connections {
        cluster.violate("a deadline on a slow network cost a connection".into());
    }
    drop(slowness);
}

fn count(cluster: &Cluster, requests: u64) {
    cluster.world.count("requests over a slow network", requests);
}

/// Reports a request that failed. Eviction explains a miss if no node has the page.
fn demand(cluster: &Cluster, key: u64, has_succeeded: bool, problem: impl FnOnce() -> String) {
    count(cluster, has_succeeded.into());
    if !has_succeeded && cluster.has_page(key) {
        cluster.violate(format!("key {key}: {}", problem()));
    }
}

async fn forget(cluster: &Cluster, client: &Client, keys: &[u64]) {
    if !operations::forget(cluster, client, keys.to_vec(), Limit::None, soon(PATIENCE)).await {
        cluster.violate("a forget over a slow network is not complete although its deadline is long enough".into());
    }
    count(cluster, 1);
}

async fn put_page(cluster: &Cluster, client: &Client, key: u64, link: &str) {
    let (_, outcome) = put::put_undisturbed(cluster, client, key).await;
    if outcome != PutOutcome::Stored {
        cluster.violate(format!("a put over {link} is {outcome:?} although its deadline is long enough"));
    }
    count(cluster, 1);
}

async fn get_page(cluster: &Cluster, client: &Client, key: u64, link: &str) {
    let hit = get(cluster, client, key, PATIENCE).await;
    demand(cluster, key, hit, || format!("a get over {link} is a miss although its deadline is long enough"));
}

/// Reads a page with a deadline in the middle of its payload.
async fn end_early(cluster: &Cluster, client: &Client, key: u64) {
    let deadline = Instant::now() + SHORT;
    get(cluster, client, key, SHORT).await;
    let late = deadline.elapsed();
    if late > SHORT_LATE {
        cluster.violate(format!("a get over a slow network ended {late:?} after its deadline"));
    }
}

/// Requests at the same time, which travel over several connections.
async fn check_pool(cluster: &Cluster, pooled: &Client, [first, second, third]: [u64; 3]) {
    tokio::join!(
        end_early(cluster, pooled, third),
        get_page(cluster, pooled, first, LINK),
        get_page(cluster, pooled, second, LINK),
        check_range(cluster, pooled, first, LINK),
        check_view(cluster, pooled, second, LINK),
    );
    // The connection whose request ended early is as good as before.
    get_page(cluster, pooled, third, LINK).await;
}

/// A put whose parts come one by one, and two puts of copies of its page: of a page that is there,
/// and of another one that is not.
async fn check_streams(cluster: &Cluster, client: &Client, keys: &[u64]) {
    // All parts may wait in the client at a time.
    if cluster.setup.geometry.page_bytes() > cluster.setup.budget_bytes {
        return;
    }
    let streamed = keys[0];
    let open = client.put_with(put::page(streamed), PutOptions::default(), soon(PATIENCE));
    let (outcome, kept) = put::stream_undisturbed(cluster, client, open, streamed, PART_PAUSE, PATIENCE).await;
    if outcome != PutOutcome::Stored {
        cluster.violate(format!("a put part by part over a slow network is {outcome:?}"));
    }
    count(cluster, 1);
    let Some(origin) = kept.origin.filter(|_| cluster.all_nodes_speak(VERSION_COPIES)) else { return };
    let outcome = put::copy_undisturbed(cluster, client, kept, PATIENCE).await;
    demand(cluster, streamed, outcome == PutOutcome::AlreadyThere, || {
        format!("a put of a copy of a page that is there is {outcome:?}")
    });
    // Of the same node: others know nothing of the origin.
    let is_judged = |key: &&u64| client.can_judge_copy(&page_key(**key), origin) == Some(true);
    let Some(&absent) = keys[1..].iter().find(is_judged) else { return };
    let open = client.put_copy(put::page(absent), kept.origin, PutOptions::default(), soon(PATIENCE));
    let (outcome, _) = put::stream_undisturbed(cluster, client, open, absent, Duration::ZERO, PATIENCE).await;
    if outcome != PutOutcome::Stored {
        cluster.violate(format!("a put of a copy is {outcome:?} although its page was not forgotten since"));
    }
    count(cluster, 1);
}

/// Several pages in one put and in one get. Short requests come between, on the same connection.
async fn check_batch(cluster: &Cluster, client: &Client, keys: &[u64]) {
    // A tight connection has room for fewer: its bound leaves out that slots are longer than pages.
    let own_room = BATCH_PAGES * cluster.setup.geometry.page_bytes() as u64;
    let own_room = if cluster.setup.tight { own_room } else { u64::MAX };
    let pages = BATCH_PAGES.min(room::pages_in(cluster, room::room(cluster).min(own_room))) as usize;
    let (keys, spare) = (&keys[..pages], keys[pages]);
    let outcomes = put::put_pages_undisturbed(cluster, client, keys, PATIENCE).await;
    if outcomes.iter().any(|&outcome| outcome != PutOutcome::Stored) {
        cluster.violate(format!("a put of {pages} pages over a slow network is {outcomes:?}"));
    }
    count(cluster, pages as u64);
    let keys = &keys[..pages.min(GET_PAGES)];
    tokio::join!(get_batch(cluster, client, keys), async {
        sleep(Duration::from_secs(1)).await;
        check_short_requests(cluster, client, keys[keys.len() - 1], spare).await;
    });
}

async fn get_batch(cluster: &Cluster, client: &Client, keys: &[u64]) {
    let started = cluster.request_time();
    let bytes = cluster.setup.geometry.page_bytes();
    let pages = keys.iter().map(|&key| (page_key(key), vec![0; bytes])).collect();
    let options = GetOptions { hedge_after: Some(HEDGE_AFTER), ..GetOptions::default() };
    for (&key, (bytes, fetched)) in keys.iter().zip(client.get_with(pages, options, soon(PATIENCE)).await) {
        demand(cluster, key, matches!(fetched, Fetched::Hit(_)), || {
            format!("a page of a get of {} over a slow network is {fetched:?}", keys.len())
        });
        if fetched.tier().is_some()
            && let Err(problem) = cluster.model.lock().check(key, &bytes, started, false)
        {
            cluster.violate(format!("get of several pages over a slow network: {problem}"));
        }
    }
}

/// Time for short requests and their answers: a fragment may have left before each.
fn short_request_time(cluster: &Cluster) -> Duration {
    let page = cluster.setup.geometry.page_bytes() as u64;
    let bytes = 2 * page.min(FRAGMENT_BYTES as u64) + SHORT_FRAMES_BYTES;
    PAGE_TIME.mul_f64(bytes as f64 / page as f64) + Duration::from_secs(2)
}

/// Short requests for a page that is there, all at once. Their answers do not wait until all page
/// bytes have left.
async fn check_short_requests(cluster: &Cluster, client: &Client, key: u64, spare: u64) {
    let names = [page_key(key)];
    let deadline = soon(short_request_time(cluster));
    let forget = async {
        if !operations::forget(cluster, client, vec![spare], Limit::None, deadline).await {
            cluster.violate("a forget beside page bytes on a slow network is not complete".into());
        }
    };
    let (located, lookup, warmed, pinned, hinted, ()) = tokio::join!(
        client.locate(&names, deadline),
        client.lookup(&names, HOLD_TIME, deadline),
        client.warm(&names, deadline),
        client.pin(&names, PinKind::Soft, PIN_TIME, deadline),
        client.hint(&names, None, Hint::None, deadline),
        forget,
    );
    let beside = "over a slow network failed, beside page bytes";
    let must = |ok: bool, what: &str| demand(cluster, key, ok, || format!("{what} {beside}"));
    must(located[0].is_some(), "a locate");
    must(lookup.answered && lookup.tiers.len() == 1, "a lookup with a lease");
    must(warmed == 1, "a warm");
    // The node may refuse the pin, but tells so.
    must(pinned.complete && (pinned.pages == 1 || pinned.refused.is_some()), "a pin");
    // Of a page that a lookup found in L2.
    let is_in_l2 = located[0] == Some(larder_client::Tier::L2);
    must(hinted == 1 || !is_in_l2 || !cluster.all_nodes_speak(VERSION_HINTS), "a hint");
}

/// Requests of a client on the machine of the node. Only its short frames are slow.
async fn check_local(cluster: &Cluster, local: &Client, keys: &[u64]) {
    let [put, followed] = [keys[0], keys[1]];
    put_page(cluster, local, put, LOCAL).await;
    get_page(cluster, local, put, LOCAL).await;
    check_range(cluster, local, put, LOCAL).await;
    tokio::join!(check_follow(cluster, local, followed, LOCAL), async {
        sleep(Duration::from_secs(1)).await;
        put_page(cluster, local, followed, LOCAL).await;
    });
    // Together they may exceed the memory that a node holds for readers. It sends the others.
    let views = local.view(&[page_key(put), page_key(followed)], soon(PATIENCE)).await;
    for (key, view) in [put, followed].into_iter().zip(&views) {
        demand(cluster, key, view.is_some(), || "a view of several pages over shared memory is a miss".into());
    }
    let other = join_all([put, followed].map(|key| get(cluster, local, key, PATIENCE))).await;
    for (key, hit) in [put, followed].into_iter().zip(other) {
        demand(cluster, key, hit, || "a get over shared memory is a miss while views hold the page".into());
    }
}
