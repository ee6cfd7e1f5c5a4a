//! Writers of a node: they reserve a page, send its parts, and commit, abort or abandon the put.

use super::NodeIncarnation;
use crate::model::{parent, position, token_ids};
use crate::payload::{self, page_id, page_key};
use crate::random::RandomSource;
use crate::workload::parts;
use larder_format::chunk_crcs;
use larder_node::WritePolicy;
use larder_node::sim::Put;
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// A node aborts an open put that has received nothing for this long, in milliseconds.
const PUT_IDLE_MS: u64 = 60_000;

struct Writer<'a> {
    node: &'a NodeIncarnation,
    key: u64,
    version: u64,
    ttl_ms: u64,
    parts: Vec<u32>,
    bytes: Vec<u8>,
    landed: usize,
}

pub(super) async fn put(node: &NodeIncarnation, key: u64, random: &mut RandomSource) {
    let ttl_ms = if random.chance(node.setup.ttl_rate) { random.between(1, 20_000) } else { 0 };
    // Some writers repeat the bytes of an earlier put.
    let last = if random.chance(300_000) { node.model.lock().last_version(key) } else { None };
    let again = last.and_then(|last| node.model.lock().content(last));
    let (content, parts) = match again {
        Some((content, parts)) => (Some(content), parts),
        None => (None, parts(&node.setup, random)),
    };
    let Some((put, mut writer)) = reserve(node, key, ttl_ms, content, parts) else { return };
    if send(&mut writer, &put, random).await.is_none() {
        return abort(&writer, &put, "part damaged in transit");
    }
    match random.below(20) {
        0 => abort(&writer, &put, "put aborted"),
        1 => {
            node.world.event("put abandoned", [key, writer.version, 0]);
            node.abandoned_puts.lock().insert(key, node.world.now_ms());
        }
        _ => writer.commit(&put),
    }
}

fn reserve<'a>(
    node: &'a NodeIncarnation,
    key: u64,
    ttl_ms: u64,
    content: Option<u64>,
    parts: Vec<u32>,
) -> Option<(Arc<Put>, Writer<'a>)> {
    let id = page_id(key);
    let before = node.store.tiers().locate(&id);
    let open = node.model.lock().open_put(key);
    let page = Reserved {
        key: page_key(key),
        parent: parent(key),
        position: position(key),
        ttl_ms,
        part_bytes: parts.clone(),
        copy_of: None,
        token_ids: token_ids(key),
    };
    let outcome = node.store.reserve(id, page);
    let answer = outcome.as_ref().map_or_else(|outcome| *outcome as u64, |_| 0);
    node.world.event("reserve", [key, answer, parts.len() as u64]);
    match outcome {
        Ok(put) => {
            if let Some(open) = open {
                let idle =
                    node.abandoned_puts.lock().get(&key).is_some_and(|left| node.world.now_ms() - left > PUT_IDLE_MS);
                if !idle {
                    node.violate(format!("key {key}: a put was granted while put {open} is open"));
                }
                node.model.lock().aborted(open);
            }
            if before != TierCode::Absent {
                node.violate(format!("key {key}: a put was granted although the page is in {before:?}"));
            }
            node.abandoned_puts.lock().remove(&key);
            let version = node.model.lock().reserved(key, parts.clone(), content);
            record_generation(node, version, &put);
            node.world.count("puts granted", 1);
            let mut bytes = vec![0; parts.iter().map(|&part| part as usize).sum()];
            payload::fill(key, content.unwrap_or(version), &mut bytes);
            return Some((put, Writer { node, key, version, ttl_ms, parts, bytes, landed: 0 }));
        }
        Err(ReserveOutcome::Exists) if before != TierCode::Absent => node.world.count("reserves of existing pages", 1),
        Err(ReserveOutcome::InProgress) if open.is_some() => node.world.count("reserves in progress", 1),
        Err(ReserveOutcome::Busy) => node.world.count("busy", 1),
        Err(other) => node.violate(format!(
            "key {key}: a put is {other:?} although the page is in {before:?} and the open put is {open:?}"
        )),
    }
    None
}

pub(super) fn record_generation(node: &NodeIncarnation, version: u64, put: &Put) {
    let generation = put.generation();
    if !node.model.lock().record_generation(version, generation) {
        node.violate(format!("put {version} has generation {generation:#x}, and so had an earlier put"));
    }
}

/// Sends the parts in random order, and leaves some out. Returns `None` if the node noticed a
/// damaged part: the put can then only be aborted.
async fn send(writer: &mut Writer<'_>, put: &Put, random: &mut RandomSource) -> Option<()> {
    let mut order: Vec<usize> = (0..writer.parts.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    for part in order {
        if random.chance(200_000) {
            sleep(Duration::from_millis(random.below(writer.node.setup.pause_ms_max))).await;
        }
        if random.chance(10_000) {
            // This part is never sent, so the put must not be sealed.
            continue;
        }
        let start: usize = writer.parts[..part].iter().map(|&part| part as usize).sum();
        let range = start..start + writer.parts[part] as usize;
        if put.take_part(part, range.len() + 1).is_some() {
            writer.node.violate(format!("put {}: it provided memory of a wrong length", writer.version));
        }
        let Some(mut memory) = put.take_part(part, range.len()) else {
            if writer.node.model.lock().is_open(writer.version) {
                writer.node.violate(format!("put {}: it provided no memory for part {part}", writer.version));
            }
            continue;
        };
        if random.chance(50_000) {
            // The bytes arrive late. The node may abort the put in the meantime.
            sleep(Duration::from_millis(random.below(writer.node.setup.pause_ms_max))).await;
        }
        memory.copy_from_slice(&writer.bytes[range.clone()]);
        let crcs = chunk_crcs(&writer.bytes[range.clone()]).collect();
        let damaged = random.chance(5_000);
        if damaged {
            memory[random.below(range.len() as u64) as usize] ^= 1 << random.below(8);
        }
        match put.land(part, memory, crcs) {
            true if damaged => writer.node.violate(format!("put {}: a damaged part was accepted", writer.version)),
            true => writer.landed += 1,
            false if damaged => return None,
            false => writer.node.violate(format!("put {}: undamaged part {part} was refused", writer.version)),
        }
    }
    Some(())
}

fn abort(writer: &Writer<'_>, put: &Arc<Put>, why: &'static str) {
    let Writer { node, key, version, .. } = writer;
    node.store.puts().abort(put);
    node.model.lock().aborted(*version);
    node.world.event(why, [*key, *version, 0]);
    node.world.count("puts aborted", 1);
}

impl Writer<'_> {
    fn commit(&self, put: &Arc<Put>) {
        let Writer { node, key, version, .. } = self;
        let whole = self.landed == self.parts.len();
        let open = node.model.lock().is_open(*version);
        let outcome = node.store.puts().commit(put);
        node.world.event("commit", [*key, *version, outcome as u64]);
        match outcome {
            CommitOutcome::Stored if whole && open => self.stored(),
            CommitOutcome::Stored => {
                node.violate(format!("put {version} was sealed with {} of {} parts", self.landed, self.parts.len()));
            }
            CommitOutcome::Incomplete => {
                // Under the selective policy, a page that finds no room in L2 may be dropped.
                if whole && open && node.node_setup.write_policy != WritePolicy::Selective {
                    node.violate(format!("put {version} is complete and was not sealed"));
                }
                node.model.lock().aborted(*version);
                node.world.count("puts not sealed", 1);
            }
            other => node.violate(format!("put {version} ends with {other:?}")),
        }
    }

    fn stored(&self) {
        let Writer { node, key, version, .. } = self;
        let expires = if self.ttl_ms == 0 { 0 } else { node.clock.now_unix_ms() + self.ttl_ms };
        node.model.lock().sealed(*version, expires);
        node.world.count("puts stored", 1);
        let tier = node.store.tiers().locate(&page_id(*key));
        if tier != TierCode::L2 {
            node.violate(format!("key {key}: put {version} was just sealed, and is in {tier:?} instead of L2"));
        }
    }
}
