//! A writer: it reserves a page, sends its parts, and ends the put one way or another.

use super::NodeLife;
use crate::dice::Dice;
use crate::model::{CHAIN, parent};
use crate::payload::{self, page_id, page_key};
use crate::workload::parts;
use larder_format::chunk_crcs;
use larder_node::WritePolicy;
use larder_node::sim::Put;
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// An open put that nothing is received for is given up after this time.
const PUT_IDLE_MS: u64 = 60_000;

/// A put under way, as its writer knows it.
struct Writer<'a> {
    life: &'a NodeLife,
    key: u64,
    version: u64,
    ttl_ms: u64,
    parts: Vec<u32>,
    bytes: Vec<u8>,
    landed: usize,
}

/// One put, from its reservation to its end.
pub(super) async fn put(life: &NodeLife, key: u64, dice: &mut Dice) {
    let ttl_ms = if dice.chance(life.setup.mortal) { dice.between(1, 20_000) } else { 0 };
    // Some writers have the bytes that an earlier one had.
    let last = if dice.chance(300_000) { life.model.lock().last_version(key) } else { None };
    let again = last.and_then(|last| life.model.lock().content(last));
    let (content, parts) = match again {
        Some((content, parts)) => (Some(content), parts),
        None => (None, parts(&life.setup, dice)),
    };
    let Some((put, mut writer)) = reserve(life, key, ttl_ms, content, parts) else { return };
    if send(&mut writer, &put, dice).await.is_none() {
        return give_up(&writer, &put, "damaged on its way");
    }
    match dice.below(20) {
        0 => give_up(&writer, &put, "aborted"),
        1 => {
            life.world.event("put left", [key, writer.version, 0]);
            life.left.lock().insert(key, life.world.now_ms());
        }
        _ => writer.commit(&put),
    }
}

fn reserve<'a>(
    life: &'a NodeLife,
    key: u64,
    ttl_ms: u64,
    content: Option<u64>,
    parts: Vec<u32>,
) -> Option<(Arc<Put>, Writer<'a>)> {
    let id = page_id(key);
    let (before, open) = (life.store.locate(&id), life.model.lock().open_put(key));
    let page = Reserved {
        key: page_key(key),
        parent: parent(key),
        position: (key % CHAIN) as u32,
        ttl_ms,
        part_bytes: parts.clone(),
    };
    let outcome = life.store.reserve(id, page);
    let answer = outcome.as_ref().map_or_else(|outcome| *outcome as u64, |_| 0);
    life.world.event("reserve", [key, answer, parts.len() as u64]);
    match outcome {
        Ok(put) => {
            if let Some(open) = open {
                let idle = life.left.lock().get(&key).is_some_and(|left| life.world.now_ms() - left > PUT_IDLE_MS);
                if !idle {
                    life.violate(format!("key {key}: a put was granted while {open} is open"));
                }
                life.model.lock().given_up(open);
            }
            if before != TierCode::Nowhere {
                life.violate(format!("key {key}: a put was granted while the page is in {before:?}"));
            }
            life.left.lock().remove(&key);
            let version = life.model.lock().reserved(key, parts.clone(), content);
            if put.generation() != version {
                life.violate(format!("put {version} has the number {}", put.generation()));
            }
            life.world.count("puts granted", 1);
            let mut bytes = vec![0; parts.iter().map(|&part| part as usize).sum()];
            payload::fill(key, content.unwrap_or(version), &mut bytes);
            return Some((put, Writer { life, key, version, ttl_ms, parts, bytes, landed: 0 }));
        }
        Err(ReserveOutcome::Exists) if before != TierCode::Nowhere => life.world.count("already there", 1),
        Err(ReserveOutcome::InProgress) if open.is_some() => life.world.count("in progress", 1),
        Err(ReserveOutcome::Busy) => life.world.count("busy", 1),
        Err(other) => life.violate(format!("key {key}: in {before:?}, put {open:?} is open, and a put is {other:?}")),
    }
    None
}

/// Sends the parts in any order; `None` if one of them was damaged and noticed.
async fn send(writer: &mut Writer<'_>, put: &Put, dice: &mut Dice) -> Option<()> {
    let mut order: Vec<usize> = (0..writer.parts.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, dice.below(last as u64 + 1) as usize);
    }
    for part in order {
        if dice.chance(200_000) {
            sleep(Duration::from_millis(dice.below(writer.life.setup.pause_ms_max))).await;
        }
        if dice.chance(10_000) {
            // Never sent.
            continue;
        }
        let start: usize = writer.parts[..part].iter().map(|&part| part as usize).sum();
        let range = start..start + writer.parts[part] as usize;
        if put.take_part(part, range.len() + 1).is_some() {
            writer.life.violate(format!("put {}: memory of another length was given", writer.version));
        }
        let Some(mut memory) = put.take_part(part, range.len()) else {
            if writer.life.model.lock().is_open(writer.version) {
                writer.life.violate(format!("put {}: no memory for part {part}", writer.version));
            }
            continue;
        };
        if dice.chance(50_000) {
            // It takes its time to arrive: the put may be given up meanwhile.
            sleep(Duration::from_millis(dice.below(writer.life.setup.pause_ms_max))).await;
        }
        memory.copy_from_slice(&writer.bytes[range.clone()]);
        let crcs = chunk_crcs(&writer.bytes[range.clone()]).collect();
        let damaged = dice.chance(5_000);
        if damaged {
            memory[dice.below(range.len() as u64) as usize] ^= 1 << dice.below(8);
        }
        match put.land(part, memory, crcs) {
            true if damaged => writer.life.violate(format!("put {}: damage was not noticed", writer.version)),
            true => writer.landed += 1,
            false if damaged => return None,
            false => writer.life.violate(format!("put {}: part {part} is whole and was refused", writer.version)),
        }
    }
    Some(())
}

fn give_up(writer: &Writer<'_>, put: &Arc<Put>, why: &'static str) {
    let Writer { life, key, version, .. } = writer;
    life.store.abort(put);
    life.model.lock().given_up(*version);
    life.world.event(why, [*key, *version, 0]);
    life.world.count("puts given up", 1);
}

impl Writer<'_> {
    fn commit(&self, put: &Arc<Put>) {
        let Writer { life, key, version, .. } = self;
        let whole = self.landed == self.parts.len();
        let open = life.model.lock().is_open(*version);
        let outcome = life.store.commit(put);
        life.world.event("commit", [*key, *version, outcome as u64]);
        match outcome {
            CommitOutcome::Stored if whole && open => self.stored(),
            CommitOutcome::Stored => {
                life.violate(format!("put {version} is sealed, with {} of {} parts", self.landed, self.parts.len()));
            }
            CommitOutcome::Incomplete => {
                // Without room in L2, pages that are not written at once are not stored.
                if whole && open && life.node.write_policy != WritePolicy::Selective {
                    life.violate(format!("put {version} is whole and was not sealed"));
                }
                life.model.lock().given_up(*version);
                life.world.count("puts not sealed", 1);
            }
            other => life.violate(format!("put {version} ends with {other:?}")),
        }
    }

    fn stored(&self) {
        let Writer { life, key, version, .. } = self;
        let expires = if self.ttl_ms == 0 { 0 } else { life.clock.now_unix_ms() + self.ttl_ms };
        life.model.lock().sealed(*version, expires);
        life.world.count("puts stored", 1);
        let tier = life.store.locate(&page_id(*key));
        if tier != TierCode::L2 {
            life.violate(format!("key {key}: put {version} was sealed just now, and is in {tier:?}"));
        }
    }
}
