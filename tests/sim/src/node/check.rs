//! Checks that hold for a node at any time, and checks of an idle or closed node.

use super::NodeIncarnation;
use crate::device::SimDevice;
use crate::faults::Faults;
use crate::incarnation::FAULTS_DRAINED_AFTER;
use crate::model::{ContentMatch, RequestTime, parent, position};
use crate::payload::{self, page_id, page_key};
use crate::quiescence::{self, status_number};
use futures::FutureExt;
use larder_format::{NamespaceId, chunk_crcs};
use larder_node::WritePolicy;
use larder_node::sim::Page;
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Interval at which the model learns which pages L3 has …
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// … and number of intervals between two checks of all bounds.
const BOUNDS_CHECK_EVERY: u64 = 20;
const ALLOCATION_UNIT: u64 = 4096;
const IDLE_TIMEOUT_SECONDS: u64 = 120;
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn monitor(node: &NodeIncarnation, stop: CancellationToken) {
    for turn in 1.. {
        if stop.run_until_cancelled(sleep(CHECK_INTERVAL)).await.is_none() || node.world.failed() {
            return;
        }
        node.model.lock().note_on_l3(node.world.now_ms(), |key| node.generation_on_l3(key));
        if turn % BOUNDS_CHECK_EVERY == 0 {
            check_bounds(node);
            (0..node.setup.keys).for_each(|key| check_present(node, key));
        }
    }
}

pub(super) fn find(node: &NodeIncarnation, key: u64) {
    let started = node.request_time();
    let tier = node.store.tiers().locate(&page_id(key));
    node.world.event("find", [key, tier as u64, 0]);
    let allowed = node.model.lock().may_exist(key, ContentMatch::Any, started);
    if tier != TierCode::Absent && !allowed && !node.world.forgives_suspect(key) {
        node.violate(format!(
            "key {key} is reported in {tier:?}, although it was forgotten, has expired, or was never sealed"
        ));
    }
    check_present(node, key);
}

/// Verifies a page as a client does. Reports damage to the node, which must not serve the page
/// again. Returns `false` if the page is damaged.
pub(super) fn check_page(node: &NodeIncarnation, key: u64, started: RequestTime, page: &Page) -> bool {
    let id = page_id(key);
    if let Err(mismatch) = page.meta().verify(&id, &page.payload) {
        report_damage(node, key, page, &mismatch.to_string());
        return false;
    }
    let model = node.model.lock();
    let version = model.version_of(page.generation());
    let found = node.world.check_key(key, |suspect| model.check_found(key, version, started, suspect));
    if let Err(problem) = found.and_then(|()| model.check_page(key, &page.meta(), &page.payload)) {
        drop(model);
        node.violate(format!("get: {problem}"));
    }
    true
}

fn report_damage(node: &NodeIncarnation, key: u64, page: &Page, mismatch: &str) {
    let generation = node.model.lock().version_of(page.generation());
    node.world.event("damaged", [key, generation, 0]);
    node.world.count("damaged in L2", 1);
    match node.memory_fails() {
        true => node.world.forgive("forgiven: damage by failing memory", 1),
        false => node.violate(format!("key {key}: version {generation} is damaged although memory works: {mismatch}")),
    }
    let id = page_id(key);
    node.store.tiers().recheck(&id);
    // A page in L2 is available without waiting.
    let again = node.store.tiers().get(&id, soon()).now_or_never().flatten();
    let served = again.filter(|(page, tier)| *tier == TierCode::L2 && page.meta().verify(&id, &page.payload).is_err());
    if served.is_some() {
        node.violate(format!("key {key}: version {generation} was served again after it was reported as damaged"));
    }
}

/// Checks that a sealed page is present, unless it was removed for a known reason. Does nothing
/// while pages may be lost legitimately.
fn check_present(node: &NodeIncarnation, key: u64) {
    if !node.is_lossless() {
        return;
    }
    // The log may treat a page as expired up to a second early.
    let version = node.model.lock().must_exist(key, node.began, node.clock.now_unix_ms() + 1000);
    let Some(version) = version else { return };
    node.world.count("sealed pages checked", 1);
    if node.store.tiers().locate(&page_id(key)) == TierCode::Absent {
        node.violate(format!("key {key}: version {version} was sealed, and no tier has it"));
    }
}

fn check_bounds(node: &NodeIncarnation) {
    let status = node.store.status();
    let bounds = [
        ("/tiers/l2/bytes_used", node.node_setup.l2_bytes),
        // The budget, and one page beyond it.
        ("/tiers/l2/in_flight_bytes", node.node_setup.in_flight_bytes / 2 + node.node_setup.l2_bytes),
        ("/tiers/l2/hard_pinned_bytes", node.node_setup.l2_bytes / 4),
    ];
    for (pointer, most) in bounds {
        let found = status_number(&status, pointer);
        if found > most {
            node.violate(format!("{pointer} is {found}, and its bound is {most}"));
        }
    }
    for stats in node.logs.iter().map(|l3| l3.stats()) {
        if stats.pinned_bytes > stats.bytes_capacity / 4 {
            node.violate(format!("{} bytes are pinned on L3, more than a quarter of its capacity", stats.pinned_bytes));
        }
    }
}

/// Arena bytes of the pages visible in L2, of one namespace or of all.
fn l2_bytes_visible(node: &NodeIncarnation, namespace: Option<NamespaceId>) -> u64 {
    let model = node.model.lock();
    let keys =
        (0..node.setup.keys).filter(|&key| namespace.is_none_or(|namespace| page_id(key).namespace == namespace));
    let pages = keys.filter_map(|key| {
        let page = node.store.tiers().get(&page_id(key), soon()).now_or_never()??;
        let (_, parts) = model.content(model.version_of(page.0.generation())).filter(|_| page.1 == TierCode::L2)?;
        Some(parts.iter().map(|&part| u64::from(part)).sum::<u64>().next_multiple_of(ALLOCATION_UNIT))
    });
    pages.sum()
}

fn soon() -> Instant {
    (tokio::time::Instant::now() + PATIENCE).into_std()
}

pub(super) async fn quiesce(node: &NodeIncarnation) {
    let calm = Faults::none(node.world.faults.lock().latency_ms_max);
    *node.world.faults.lock() = calm;
    node.world.disks.iter().for_each(|disk| disk.lock().heal());
    node.world.event("faults stop", [0; 3]);
    // Abandoned puts, pins and quarantined devices each take a minute to time out.
    sleep(FAULTS_DRAINED_AFTER * 2 + Duration::from_secs(10)).await;
    put_and_get(node).await;
    for key in 0..node.setup.keys {
        let started = node.request_time();
        if let Some((page, _)) = node.store.tiers().get(&page_id(key), soon()).await {
            check_page(node, key, started, &page);
        }
        check_present(node, key);
    }
    quiescence::wait_until_idle(IDLE_TIMEOUT_SECONDS, || remaining_work(node))
        .await
        .into_iter()
        .for_each(|problem| node.violate(problem));
}

fn remaining_work(node: &NodeIncarnation) -> Vec<String> {
    let status = node.store.status();
    let mut problems = quiescence::busy_counters(&status, node.node_setup.write_policy);
    let held = l2_bytes_visible(node, None);
    let used = status_number(&status, "/tiers/l2/bytes_used");
    let memory = node.arena.used() as u64;
    if held != used || memory != used {
        problems.push(format!(
            "L2 reports {used} bytes, its visible pages have {held}, and the arena has {memory} allocated"
        ));
    }
    if let Some(quota) = node.node_setup.quota {
        let found = l2_bytes_visible(node, Some(page_id(0).namespace));
        if found > quota {
            problems.push(format!("L2 has {found} bytes of a namespace with a quota of {quota}"));
        }
    }
    problems
}

/// Performs a forget, a put and a get. They must succeed unless a log reports that it takes no
/// writes. A node that refuses everything would pass the other checks.
async fn put_and_get(node: &NodeIncarnation) {
    let key = 0;
    let id = page_id(0);
    // Asked after the failure, because requests may end a quarantine or begin one.
    let has_stopped = || !node.setup.profile.is_reliable() && quiescence::has_stopped(&node.store.status());
    let forgetting = node.model.lock().forget_begins(vec![key]);
    let forgotten = node.store.forget(&[id], soon()).await;
    node.model.lock().forget_ends(forgetting, forgotten.is_ok());
    match forgotten {
        Ok(_) => {}
        Err(_) if has_stopped() => return node.world.forgive("forgiven: log stopped", 1),
        Err(error) => return node.violate(format!("a forget fails after faults have stopped: {error}")),
    }
    let page = Reserved { parent: parent(key), position: position(key), ..Reserved::first(page_key(key), vec![1000]) };
    let put = match node.store.reserve(id, page) {
        Ok(put) => put,
        // While no log takes writes, write-back refuses puts that would evict dirty pages.
        Err(ReserveOutcome::Busy) if node.node_setup.write_policy == WritePolicy::Back && has_stopped() => {
            return node.world.forgive("forgiven: log stopped", 1);
        }
        Err(_) if node.world.forgives_suspect(key) => return,
        Err(other) => return node.violate(format!("a put is {other:?} after faults have stopped")),
    };
    let version = node.model.lock().reserved(key, vec![1000], None);
    super::put::record_generation(node, version, &put);
    let mut bytes = vec![0; 1000];
    payload::fill(key, version, &mut bytes);
    if let Some(mut part) = put.take_part(0, bytes.len()) {
        part.copy_from_slice(&bytes);
        put.land(0, part, chunk_crcs(&bytes).collect());
    }
    match node.store.puts().commit(&put) {
        CommitOutcome::Stored => node.model.lock().sealed(version, 0),
        other => return node.violate(format!("a put ends with {other:?} after faults have stopped")),
    }
    let found = node.store.tiers().get(&id, soon()).await.map(|(page, _)| page.generation());
    let found = found.map(|generation| node.model.lock().version_of(generation));
    if found != Some(version) {
        node.violate(format!("version {version} was put and {found:?} was read after faults have stopped"));
    }
}

/// Checks a closed node: L3 has the pages that only L2 had, and no request is in flight.
pub(super) fn check_closed(node: &NodeIncarnation, devices: &[Arc<SimDevice>]) {
    for device in devices.iter().filter(|device| device.requests() > 0) {
        node.violate(format!("{} requests remain after closing", device.requests()));
    }
    for stats in node.logs.iter().map(|l3| l3.stats()) {
        if stats.write_queue_bytes > 0 {
            node.violate(format!("the write queue has {} bytes after closing", stats.write_queue_bytes));
        }
        node.world.count("evicted pages", stats.evicted_pages);
        node.world.count("damaged pages", stats.corrupt);
        node.world.count("pages copied forward", stats.copied_forward_pages);
        node.world.count("pages expired", stats.expired_pages);
        node.world.count("pages evicted by quota", stats.quota_pages);
    }
    let status = node.store.status();
    for counter in ["pages_evicted_l2", "pages_expired_l2", "pages_corrupt_l2", "l3_writes_failed"] {
        if let Some(count) = status.pointer(&format!("/counters/{counter}")).and_then(Value::as_u64) {
            node.world.count(counter, count);
        }
    }
    if !node.is_lossless() {
        return;
    }
    for key in 0..node.setup.keys {
        let version = node.model.lock().must_exist(key, node.began, node.clock.now_unix_ms() + 1000);
        let Some(version) = version else { continue };
        node.world.count("written-back pages checked", 1);
        let found = node.on_l3(key);
        if found != Some(version) {
            node.violate(format!("key {key}: version {version} is not on L3 after closing; L3 has {found:?}"));
        }
    }
}
