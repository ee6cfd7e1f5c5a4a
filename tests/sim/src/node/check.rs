//! What must hold of a node whatever was asked last, and when all is at rest.

use super::{NodeLife, operations};
use crate::device::SimDevice;
use crate::faults::Faults;
use crate::life::CALM_DOWN;
use crate::model::{Bytes, CHAIN, parent};
use crate::payload::{self, page_id, page_key};
use crate::rest::{self, figure};
use larder_format::{NamespaceId, chunk_crcs};
use larder_node::WritePolicy;
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// How often it is looked at what L3 has by now …
const LOOK: Duration = Duration::from_millis(100);
/// … and every how many looks at all bounds.
const LOOKS: u64 = 20;
/// Memory comes in units of so many bytes.
const UNIT: u64 = 4096;
/// Within this many seconds, what is under way when faults stop has ended.
const SETTLE_SECONDS: u64 = 120;
const PATIENCE: Duration = Duration::from_secs(60);

/// Watches until `stop`.
pub(super) async fn watch(life: &NodeLife, stop: CancellationToken) {
    for turn in 1.. {
        if stop.run_until_cancelled(sleep(LOOK)).await.is_none() || life.world.failed() {
            return;
        }
        life.model.lock().landed(life.world.now_ms(), |key| life.on_l3(key));
        if turn % LOOKS == 0 {
            check_bounds(life);
            (0..life.setup.keys).for_each(|key| check_there(life, key));
        }
    }
}

/// Looks a key up, and checks the answer.
pub(super) fn find(life: &NodeLife, key: u64) {
    let asked = life.asks();
    let tier = life.store.locate(&page_id(key));
    life.world.event("find", [key, tier as u64, 0]);
    let allowed = life.model.lock().may_be_there(key, Bytes::Any, asked);
    if tier != TierCode::Nowhere && !allowed && !life.world.is_suspect(key) {
        life.violate(format!("key {key} is found in {tier:?}, and it was forgotten, is over, or was never sealed"));
    }
    check_there(life, key);
}

/// What was sealed is found until something took it.
fn check_there(life: &NodeLife, key: u64) {
    if !life.loses_nothing() {
        return;
    }
    // The log may be a second early.
    let version = life.model.lock().must_be_there(key, life.began, life.clock.now_unix_ms() + 1000);
    let Some(version) = version else { return };
    life.world.count("pages that had to be somewhere", 1);
    if life.store.locate(&page_id(key)) == TierCode::Nowhere {
        life.violate(format!("key {key}: version {version} was sealed, and is nowhere"));
    }
}

fn check_bounds(life: &NodeLife) {
    let status = life.store.status();
    let bounds = [
        ("/tiers/l2/bytes_used", life.node.l2_bytes),
        // The budget, and one page.
        ("/tiers/l2/in_flight_bytes", life.node.in_flight_bytes / 2 + life.node.l2_bytes),
        ("/tiers/l2/hard_pinned_bytes", life.node.l2_bytes / 4),
    ];
    for (what, most) in bounds {
        let found = figure(&status, what);
        if found > most {
            life.violate(format!("{what} is {found}, and may be {most}"));
        }
    }
    for stats in life.logs.iter().map(|l3| l3.stats()) {
        if stats.pinned_bytes > stats.bytes_capacity / 4 {
            life.violate(format!("{} bytes are pinned on L3", stats.pinned_bytes));
        }
    }
}

/// Bytes of memory of the pages that are found in L2, of one namespace or all.
fn bytes_found(life: &NodeLife, namespace: Option<NamespaceId>) -> u64 {
    let model = life.model.lock();
    let keys =
        (0..life.setup.keys).filter(|&key| namespace.is_none_or(|namespace| page_id(key).namespace == namespace));
    let pages = keys.filter_map(|key| {
        let page = futures::FutureExt::now_or_never(life.store.get(&page_id(key), soon()))??;
        let (_, parts) = model.content(page.0.meta.generation).filter(|_| page.1 == TierCode::L2)?;
        Some(parts.iter().map(|&part| u64::from(part)).sum::<u64>().next_multiple_of(UNIT))
    });
    pages.sum()
}

fn soon() -> Instant {
    (tokio::time::Instant::now() + PATIENCE).into_std()
}

/// Faults stop; after a while everything works again and nothing is left over.
pub(super) async fn come_to_rest(life: &NodeLife) {
    let calm = Faults::none(life.world.faults.lock().latency_ms_max);
    *life.world.faults.lock() = calm;
    life.world.disks.iter().for_each(|disk| disk.lock().heals());
    life.world.event("faults stop", [0; 3]);
    // Puts without a writer, pins and devices set aside take a minute each.
    sleep(CALM_DOWN * 2 + Duration::from_secs(10)).await;
    put_and_get(life).await;
    for key in 0..life.setup.keys {
        let asked = life.asks();
        if let Some((page, _)) = life.store.get(&page_id(key), soon()).await {
            operations::examine(life, key, asked, &page);
        }
        check_there(life, key);
    }
    rest::settled(SETTLE_SECONDS, || left_over(life)).await.into_iter().for_each(|problem| life.violate(problem));
}

/// What is not at rest.
fn left_over(life: &NodeLife) -> Vec<String> {
    let status = life.store.status();
    let mut problems = rest::under_way(&status, life.node.write_policy);
    let (held, used) = (bytes_found(life, None), figure(&status, "/tiers/l2/bytes_used"));
    let memory = life.arena.used() as u64;
    if held != used || memory != used {
        problems.push(format!("L2 has {used} bytes, {held} are found in it, and {memory} are taken"));
    }
    if let Some(quota) = life.node.quota {
        let found = bytes_found(life, Some(page_id(0).namespace));
        if found > quota {
            problems.push(format!("{found} bytes of a namespace are in L2, and its quota is {quota}"));
        }
    }
    problems
}

/// A forgetting, a put and a get that must work, if L3 is not beyond repair.
async fn put_and_get(life: &NodeLife) {
    let (key, id) = (0, page_id(0));
    let healthy = life.setup.profile.honest();
    let forgetting = life.model.lock().forget_begins(vec![key]);
    let forgotten = life.store.forget(&[id], soon()).await;
    life.model.lock().forget_ends(forgetting, forgotten.is_ok());
    match forgotten {
        Ok(_) => {}
        Err(error) if healthy => return life.violate(format!("at rest, forgetting fails: {error}")),
        Err(_) => return life.world.count("logs stopped", 1),
    }
    let page = Reserved {
        key: page_key(key),
        parent: parent(key),
        position: (key % CHAIN) as u32,
        ttl_ms: 0,
        part_bytes: vec![1000],
    };
    let put = match life.store.reserve(id, page) {
        Ok(put) => put,
        // Write-back takes nothing that others would have to be written for while no log takes writes.
        Err(ReserveOutcome::Busy) if !healthy && life.node.write_policy == WritePolicy::Back => {
            return life.world.count("logs stopped", 1);
        }
        Err(_) if life.world.is_suspect(key) => return,
        Err(other) => return life.violate(format!("at rest, a put is {other:?}")),
    };
    let version = life.model.lock().reserved(key, vec![1000], None);
    let mut bytes = vec![0; 1000];
    payload::fill(key, version, &mut bytes);
    if let Some(mut part) = put.take_part(0, bytes.len()) {
        part.copy_from_slice(&bytes);
        put.land(0, part, chunk_crcs(&bytes).collect());
    }
    match life.store.commit(&put) {
        CommitOutcome::Stored => life.model.lock().sealed(version, 0),
        other => return life.violate(format!("at rest, a put ends with {other:?}")),
    }
    let found = life.store.get(&id, soon()).await.map(|(page, _)| page.meta.generation);
    if found != Some(version) {
        life.violate(format!("at rest, version {version} was put and {found:?} is read"));
    }
}

/// After closing: what only L2 had is on L3, and nothing is under way.
pub(super) fn closed(life: &NodeLife, devices: &[Arc<SimDevice>]) {
    for device in devices.iter().filter(|device| device.requests() > 0) {
        life.violate(format!("after closing, {} requests are left", device.requests()));
    }
    for stats in life.logs.iter().map(|l3| l3.stats()) {
        if stats.write_queue_bytes > 0 {
            life.violate(format!("after closing, {} bytes are in the write queue", stats.write_queue_bytes));
        }
        life.world.count("evicted pages", stats.evicted_pages);
        life.world.count("damaged pages", stats.corrupt);
        life.world.count("pages rescued", stats.rescued_pages);
        life.world.count("pages past their time", stats.expired_pages);
        life.world.count("pages over a quota", stats.quota_pages);
    }
    let status = life.store.status();
    for counter in ["pages_evicted_l2", "pages_expired_l2", "pages_corrupt_l2", "l3_writes_failed"] {
        if let Some(count) = status.pointer(&format!("/counters/{counter}")).and_then(Value::as_u64) {
            life.world.count(counter, count);
        }
    }
    if !life.loses_nothing() {
        return;
    }
    for key in 0..life.setup.keys {
        let version = life.model.lock().must_be_there(key, life.began, life.clock.now_unix_ms() + 1000);
        let Some(version) = version else { continue };
        life.world.count("pages that had to reach L3", 1);
        let found = life.on_l3(key);
        if found != Some(version) {
            life.violate(format!("key {key}: after closing, version {version} is not on L3, but {found:?}"));
        }
    }
}
