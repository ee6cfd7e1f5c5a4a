//! Refused reads: the oracle for readers that a node refuses, and that return as told.
//!
//! After the faults have stopped, one connection over a slow link requests [`WINDOW_BYTES`], which
//! a reader may always request. A second later it requests as many again. The node admits as many
//! pages as have left since, and refuses the last ones. The client requests those again when the
//! others have come, so the window stays full. Now readers share the connection, and request one
//! page each. A reader that is refused returns after the time in
//! the refusal, times a random factor up to 1.25, as
//! [`GetOptions::busy_retries`](larder_client::GetOptions) does.
//!
//! Promise: a reader is refused at most [`REFUSALS_MAX`] times, and gets in within [`WAIT_MAX`] of
//! its first refusal. At most half as many returns as readers are in vain.
//!
//! The reason for these bounds: the link carries the pages of all readers in about [`LINE_TIME`],
//! so no node tells them much more. It tells the readers to return one after the other, as their
//! pages find room. If the measured rate is too high, the last ones return too early. The node
//! sends them to the end of the line, so their next return finds room.
//!
//! If a node told all readers the same time, or too short a time, they would return together. The
//! link carries few pages in the time of one return, so most readers would return several times.
//!
//! The counters "refused reads that got in" and "refused reads in vain" tell how truthful the times
//! are.

use super::{ClientSpec, Cluster, operations, put, soon};
use crate::payload::{key_in_namespace, page_key};
use crate::random::{RandomSource, Stream};
use crate::workload::Limit;
use futures::future::join_all;
use larder_client::{Client, Fetched, GetOptions, PutOutcome};
use larder_wire::VERSION_RETRY_AFTER;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Bytes that a reader may always request, however slow its link is: `OUTSTANDING_MIN` of the node.
const WINDOW_BYTES: u64 = 4 << 20;
/// The fake network buffers 64 KiB ahead of each answer. During that time several smaller pages
/// leave, so that a return finds room whatever the node has told.
const PAGE_BYTES_MIN: usize = 16 << 10;
/// Time in which the link carries one page …
const PAGE_TIME: Duration = Duration::from_millis(40);
/// … unless this rate is slower. Above it, the latency of the fake network would lower the rate.
const BYTES_PER_SECOND_MAX: u64 = 3 << 20;
/// Time in which the link carries the pages of all readers, which bounds the times told.
const LINE_TIME: Duration = Duration::from_millis(800);
/// Number of readers at least. Large pages then take longer than [`LINE_TIME`].
const READERS_MIN: u64 = 6;
/// Time until the window is filled again. The node measures the rate of the link every 100 ms, and
/// the first measurements include the bytes that the network buffers.
const WARM_UP: Duration = Duration::from_secs(1);
/// Time between the request that fills the window and those of the readers.
const STAGGER: Duration = Duration::from_millis(5);
/// Deadline of a request, in the times that the link takes for a window. A reader may request as
/// much as it receives in a quarter of it, if that is more than a window. It must be less.
const DEADLINE_WINDOWS: f64 = 2.5;
const REFUSALS_MAX: u32 = 4;
/// Several times [`LINE_TIME`], for returns in vain.
const WAIT_MAX: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of the random stream of the first reader. [`super::room`] has those from 0.
const FIRST_STREAM: u64 = 1 << 32;

pub(super) async fn check(cluster: &Cluster, client: &Client) {
    let page_bytes = cluster.setup.geometry.page_bytes();
    // The check of the room, just before, counts these two exemptions.
    let is_exempt = !cluster.setup.profile.is_reliable() || cluster.setup.node_protocols[0] < VERSION_RETRY_AFTER;
    // Tight budgets bound the requests of a connection before its pages.
    if is_exempt || cluster.setup.tight || page_bytes < PAGE_BYTES_MIN {
        return;
    }
    let key = key_in_namespace(0, 0);
    if !operations::forget(cluster, client, vec![key], Limit::None, soon(PATIENCE)).await {
        return cluster.violate("a forget is not complete before the check of refused reads".into());
    }
    // One node only: it has every page that the client requests.
    let reader = cluster.remote_client("reader", ClientSpec { nodes: 1, ..cluster.spec() });
    if !reader.ready(PATIENCE).await {
        return cluster.violate("a client is not connected before the check of refused reads".into());
    }
    let (_, outcome) = put::put_undisturbed(cluster, &reader, key).await;
    if outcome != PutOutcome::Stored {
        return cluster.violate(format!("a put is {outcome:?} before the check of refused reads"));
    }
    cluster.world.count("refused read checks", 1);
    let rate = ((page_bytes as f64 / PAGE_TIME.as_secs_f64()) as u64).min(BYTES_PER_SECOND_MAX);
    cluster.network.faults.lock().bytes_per_second = rate;
    let refusals = read_beyond_window(cluster, &reader, key, rate).await;
    cluster.network.faults.lock().bytes_per_second = 0;
    judge(cluster, &refusals);
    drop(reader);
    sleep(Duration::from_secs(2)).await;
}

/// Fills the window of the connection and begins the reads of all readers. Returns the number of
/// refusals of each.
async fn read_beyond_window(cluster: &Cluster, client: &Client, key: u64, rate: u64) -> Vec<u32> {
    let page_bytes = cluster.setup.geometry.page_bytes() as f64;
    let readers = ((LINE_TIME.as_secs_f64() * rate as f64 / page_bytes) as u64).max(READERS_MIN);
    let patience = Duration::from_secs_f64(DEADLINE_WINDOWS * WINDOW_BYTES as f64 / rate as f64);
    let fill_again = async {
        sleep(WARM_UP).await;
        get_window(cluster, client, key, patience).await;
    };
    let reads = async {
        sleep(WARM_UP + STAGGER).await;
        join_all((0..readers).map(|number| read(cluster, client, number, key, patience))).await
    };
    let ((), (), refusals) = tokio::join!(get_window(cluster, client, key, PATIENCE), fill_again, reads);
    refusals
}

/// Requests a window of pages. The client requests refused ones again as long as pages arrive.
async fn get_window(cluster: &Cluster, client: &Client, key: u64, patience: Duration) {
    let page_bytes = cluster.setup.geometry.page_bytes();
    let count = WINDOW_BYTES / page_bytes as u64;
    let pages: Vec<_> = (0..count).map(|_| (page_key(key), vec![0u8; page_bytes])).collect();
    client.get_with(pages, GetOptions::default(), soon(patience)).await;
}

/// Reads a page. Returns to the node as it says, until the page has arrived. Returns the number of
/// refusals.
async fn read(cluster: &Cluster, client: &Client, number: u64, key: u64, patience: Duration) -> u32 {
    let mut random = RandomSource::new(cluster.world.seed, Stream::Caller(FIRST_STREAM + number));
    let mut refusals: u32 = 0;
    let mut first_refusal: Option<Instant> = None;
    loop {
        let started = cluster.request_time();
        let page = (page_key(key), vec![0u8; cluster.setup.geometry.page_bytes()]);
        let (bytes, fetched) = client.get_with(vec![page], GetOptions::default(), soon(patience)).await.remove(0);
        let Fetched::Busy { retry_after } = fetched else {
            // Eviction explains a miss if no node has the page.
            if fetched.tier().is_none() && cluster.has_page(key) {
                cluster.violate(format!("a read is a miss after {refusals} refusals, although its page is there"));
            }
            if fetched.tier().is_some()
                && let Err(problem) = cluster.model.lock().check(key, &bytes, started, false)
            {
                cluster.violate(format!("read of a reader that returns as told: {problem}"));
            }
            return refusals;
        };
        cluster.world.event("read told to return", [number, retry_after.as_millis() as u64, refusals.into()]);
        refusals += 1;
        let waited = first_refusal.get_or_insert_with(Instant::now).elapsed();
        if refusals > REFUSALS_MAX || waited > WAIT_MAX {
            cluster.violate(format!(
                "a reader that returned as told was refused {refusals} times, after {waited:?} once more"
            ));
            return refusals;
        }
        sleep(retry_after + retry_after.mul_f64(random.below(250) as f64 / 1000.0)).await;
    }
}

fn judge(cluster: &Cluster, refusals: &[u32]) {
    let all: u64 = refusals.iter().copied().map(u64::from).sum();
    let refused = refusals.iter().filter(|&&refusals| refusals > 0).count() as u64;
    let in_vain = all - refused;
    cluster.world.count("reads refused", all);
    cluster.world.count("refused reads that got in", refused);
    cluster.world.count("refused reads in vain", in_vain);
    if in_vain > refusals.len() as u64 / 2 {
        cluster.violate(format!("{refused} readers that returned as told were refused {in_vain} times more"));
    }
}
