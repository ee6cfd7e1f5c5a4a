//! Writers of a cluster: single pages part by part, and batches of whole pages.

use super::{Cluster, LATE_MS, soon};
use crate::model::{ContentMatch, parent, position, token_ids};
use crate::payload::{self, page_key};
use crate::random::RandomSource;
use crate::wire::model::{PutId, RequestTime};
use crate::workload::Limit;
use bytes::Bytes;
use larder_client::{Client, NewPage, PagePut, PutOptions, PutOutcome};
use larder_format::PageOrigin;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Returns of a put of several pages to a busy node.
const BATCH_RETRIES: u32 = 10;

pub(super) fn page(key: u64) -> NewPage {
    NewPage { key: page_key(key), parent: parent(key), position: position(key), token_ids: token_ids(key) }
}

/// Bytes of a put, in shared client memory while some is free. An abort returns that memory, so it
/// soon holds another page.
fn bytes_of(cluster: &Cluster, client: &Client, put_id: PutId) -> Bytes {
    let mut buffer = client.buffer(cluster.setup.geometry.page_bytes());
    payload::fill(put_id.key, put_id.content, &mut buffer);
    buffer.freeze()
}

fn begin(cluster: &Cluster, key: u64, random: &mut RandomSource) -> PutId {
    let mut model = cluster.model.lock();
    let content = if random.chance(300_000) { model.last_content(key) } else { None };
    model.put_begins(key, content)
}

fn options(cluster: &Cluster, random: &mut RandomSource) -> PutOptions {
    let has_ttl = random.chance(cluster.setup.ttl_rate);
    let ttl = has_ttl.then(|| Duration::from_millis(random.between(1, 20_000)));
    PutOptions { ttl, busy_retries: random.below(3) as u32 }
}

/// Page that a client has kept since it read or put it.
#[derive(Clone, Copy)]
pub(super) struct KeptPage {
    pub(super) key: u64,
    pub(super) content: u64,
    pub(super) origin: Option<PageOrigin>,
    /// Tick at which the client had the page.
    pub(super) copied: u64,
}

fn outcome_code(outcome: PutOutcome) -> u64 {
    match outcome {
        PutOutcome::Stored => 0,
        PutOutcome::AlreadyThere => 1,
        PutOutcome::Refused => 2,
        PutOutcome::InProgress => 3,
        PutOutcome::Busy { .. } => 4,
        PutOutcome::Lost => 5,
        PutOutcome::Forgotten => 6,
        PutOutcome::Retired => 7,
    }
}

pub(super) fn record_outcome(
    cluster: &Cluster,
    put_id: PutId,
    options: PutOptions,
    outcome: Option<PutOutcome>,
    started: RequestTime,
) {
    let answer = outcome.map_or(9, outcome_code);
    cluster.world.event("put", [put_id.key, put_id.content, answer]);
    cluster.world.count(
        match outcome {
            Some(PutOutcome::Stored) => "puts stored",
            Some(PutOutcome::AlreadyThere) => "puts already there",
            Some(PutOutcome::Refused) => "puts refused",
            Some(PutOutcome::InProgress) => "puts in progress",
            Some(PutOutcome::Busy { .. }) => "puts busy",
            Some(PutOutcome::Lost) => "puts lost",
            Some(PutOutcome::Forgotten) => "copies refused",
            Some(PutOutcome::Retired) => "puts into retired namespaces",
            None => "puts cancelled",
        },
        1,
    );
    let needed = match outcome {
        Some(PutOutcome::AlreadyThere) => Some(ContentMatch::Same(put_id.content)),
        Some(PutOutcome::Refused) => Some(ContentMatch::Other(put_id.content)),
        _ => None,
    };
    let mut model = cluster.model.lock();
    match outcome {
        Some(PutOutcome::Stored) => {
            // The clock of the node may differ by a millisecond.
            let over = options.ttl.map_or(u64::MAX, |ttl| cluster.world.unix_ms() + ttl.as_millis() as u64 + 2);
            model.put_ends(put_id, Some(over));
        }
        Some(PutOutcome::Lost) | None => {}
        Some(_) => model.put_ends(put_id, None),
    }
    let wrong = needed.is_some_and(|needed| !model.may_exist(put_id.key, needed, started));
    drop(model);
    if wrong && !cluster.world.forgives_suspect(put_id.key) {
        cluster.violate(format!(
            "key {}: a put of content {} is {outcome:?}, which contradicts the puts so far",
            put_id.key, put_id.content
        ));
    }
}

/// Puts one page part by part, in any order and with pauses. Some writers disappear in between.
/// Their puts must not block others. Returns the page if the store has it.
pub(super) async fn parts(
    cluster: &Cluster,
    client: &Client,
    random: &mut RandomSource,
    key: u64,
    (limit, deadline): (Limit, Instant),
) -> Option<KeptPage> {
    let put_id = begin(cluster, key, random);
    let options = options(cluster, random);
    let put = client.put_with(page(key), options, deadline);
    let written = limit.run(write(cluster, client, put, put_id, options, deadline, random)).await;
    cluster.check_end("put", deadline, LATE_MS + 200);
    written.flatten()
}

/// Puts a copy. A forget after it was taken makes it worthless, whichever client forgot the page.
pub(super) async fn copy(
    cluster: &Cluster,
    client: &Client,
    random: &mut RandomSource,
    kept: KeptPage,
    (limit, deadline): (Limit, Instant),
) {
    let put_id = cluster.model.lock().copy_begins(kept.key, kept.content, kept.copied);
    let options = options(cluster, random);
    let put = client.put_copy(page(kept.key), kept.origin, options, deadline);
    let written = limit.run(write(cluster, client, put, put_id, options, deadline, random)).await;
    cluster.check_end("put of a copy", deadline, LATE_MS + 200);
    cluster.world.count("copies put", written.flatten().is_some().into());
}

async fn write(
    cluster: &Cluster,
    client: &Client,
    mut put: PagePut,
    put_id: PutId,
    options: PutOptions,
    deadline: Instant,
    random: &mut RandomSource,
) -> Option<KeptPage> {
    let table = cluster.setup.geometry.part_table();
    let bytes = bytes_of(cluster, client, put_id);
    let started = cluster.request_time();
    let mut order: Vec<usize> = (0..table.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    let leaves_out = random.chance(30_000);
    for part in order.into_iter().skip(leaves_out.into()) {
        if random.chance(200_000) && tokio::time::Instant::now().into_std() < deadline {
            sleep(Duration::from_millis(random.below(40))).await;
        }
        let start: usize = table[..part].iter().map(|&part| part as usize).sum();
        put.part(part, bytes.slice(start..start + table[part] as usize));
    }
    if random.chance(80_000) {
        // The writer abandons the put without an abort.
        cluster.world.count("puts abandoned", 1);
        return None;
    }
    if !leaves_out {
        cluster.model.lock().commit_requested(put_id);
    }
    let mut answer = OutcomeGuard { cluster, put_id, options, started, outcome: None };
    let (outcome, origin) = put.commit_described(deadline).await;
    answer.outcome = Some(outcome);
    // The model hears of the outcome first: from here on a forget covers the put.
    drop(answer);
    let PutId { key, content, .. } = put_id;
    let copied = cluster.model.lock().tick();
    let is_there = matches!(outcome, PutOutcome::Stored | PutOutcome::AlreadyThere);
    is_there.then_some(KeptPage { key, content, origin, copied })
}

/// Records the outcome of a put when dropped. A cancelled put has an unknown outcome: its page may
/// still appear.
struct OutcomeGuard<'a> {
    cluster: &'a Cluster,
    put_id: PutId,
    options: PutOptions,
    started: RequestTime,
    outcome: Option<PutOutcome>,
}

impl Drop for OutcomeGuard<'_> {
    fn drop(&mut self) {
        record_outcome(self.cluster, self.put_id, self.options, self.outcome, self.started);
    }
}

pub(super) async fn pages(
    cluster: &Cluster,
    client: &Client,
    random: &mut RandomSource,
    keys: Vec<u64>,
    (limit, deadline): (Limit, Instant),
) {
    let options = options(cluster, random);
    let started = cluster.request_time();
    let names: Vec<PutId> = keys.into_iter().map(|key| begin(cluster, key, random)).collect();
    let pages = names.iter().map(|&put_id| (page(put_id.key), bytes_of(cluster, client, put_id))).collect();
    names.iter().for_each(|&put_id| cluster.model.lock().commit_requested(put_id));
    let outcomes = limit.run(client.put_pages(pages, options, deadline)).await;
    cluster.check_end("put of pages", deadline, LATE_MS);
    for (index, put_id) in names.into_iter().enumerate() {
        record_outcome(cluster, put_id, options, outcomes.as_ref().map(|outcomes| outcomes[index]), started);
    }
}

fn begin_undisturbed(cluster: &Cluster, key: u64) -> PutId {
    let mut model = cluster.model.lock();
    let put_id = model.put_begins(key, None);
    model.commit_requested(put_id);
    put_id
}

pub(super) async fn put_undisturbed(cluster: &Cluster, client: &Client, key: u64) -> (PutId, PutOutcome) {
    let put_id = begin_undisturbed(cluster, key);
    let started = cluster.request_time();
    let pages = vec![(page(key), bytes_of(cluster, client, put_id))];
    let outcomes = client.put_pages(pages, PutOptions::default(), soon(Duration::from_secs(60))).await;
    record_outcome(cluster, put_id, PutOptions::default(), Some(outcomes[0]), started);
    (put_id, outcomes[0])
}

/// Puts several pages at once. The client returns for those that a busy node refuses: pages that
/// are being written to L3 take room, too.
pub(super) async fn put_pages_undisturbed(
    cluster: &Cluster,
    client: &Client,
    keys: &[u64],
    patience: Duration,
) -> Vec<PutOutcome> {
    let started = cluster.request_time();
    let names: Vec<PutId> = keys.iter().map(|&key| begin_undisturbed(cluster, key)).collect();
    let pages = names.iter().map(|&put_id| (page(put_id.key), bytes_of(cluster, client, put_id))).collect();
    let options = PutOptions { busy_retries: BATCH_RETRIES, ..PutOptions::default() };
    let outcomes = client.put_pages(pages, options, soon(patience)).await;
    for (&put_id, &outcome) in names.iter().zip(&outcomes) {
        record_outcome(cluster, put_id, PutOptions::default(), Some(outcome), started);
    }
    outcomes
}

/// Passes the parts of new content to an open put, with a pause before each, and commits it.
/// Returns the outcome, and the page as its writer may keep it.
pub(super) async fn stream_undisturbed(
    cluster: &Cluster,
    client: &Client,
    open: PagePut,
    key: u64,
    pause: Duration,
    patience: Duration,
) -> (PutOutcome, KeptPage) {
    let put_id = begin_undisturbed(cluster, key);
    let (outcome, origin) = pass_parts(cluster, client, open, put_id, pause, patience).await;
    let copied = cluster.model.lock().tick();
    (outcome, KeptPage { key, content: put_id.content, origin, copied })
}

/// Puts a page again that its client has kept.
pub(super) async fn copy_undisturbed(
    cluster: &Cluster,
    client: &Client,
    kept: KeptPage,
    patience: Duration,
) -> PutOutcome {
    let put_id = cluster.model.lock().copy_begins(kept.key, kept.content, kept.copied);
    cluster.model.lock().commit_requested(put_id);
    let open = client.put_copy(page(kept.key), kept.origin, PutOptions::default(), soon(patience));
    pass_parts(cluster, client, open, put_id, Duration::ZERO, patience).await.0
}

async fn pass_parts(
    cluster: &Cluster,
    client: &Client,
    mut open: PagePut,
    put_id: PutId,
    pause: Duration,
    patience: Duration,
) -> (PutOutcome, Option<PageOrigin>) {
    let started = cluster.request_time();
    let mut bytes = bytes_of(cluster, client, put_id);
    for (part, length) in cluster.setup.geometry.part_table().into_iter().enumerate() {
        sleep(pause).await;
        open.part(part, bytes.split_to(length as usize));
    }
    let (outcome, origin) = open.commit_described(soon(patience)).await;
    record_outcome(cluster, put_id, PutOptions::default(), Some(outcome), started);
    (outcome, origin)
}
