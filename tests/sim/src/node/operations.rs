//! Workers of a node: they draw operations and check every answer against the model.

use super::{NodeIncarnation, check, put};
use crate::model::ContentMatch;
use crate::payload::{self, page_id};
use crate::random::{RandomSource, Stream};
use crate::workload::{KEYS_FORGOTTEN_AT_ONCE, Limit, draw_forgotten_keys, draw_key};
use futures::FutureExt;
use larder_format::{PageId, chunk_crcs};
use larder_node::sim::{Presence, Progress, Put};
use larder_wire::{CommitOutcome, PinKind, TierCode};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout_at};

const PATIENCE: Duration = Duration::from_secs(5);

pub(super) async fn work(node: Arc<NodeIncarnation>, worker: u64) {
    let mut random = RandomSource::new(node.world.seed, Stream::Worker(node.number, worker));
    loop {
        let left = node.operations.load(Ordering::Relaxed);
        if left == 0 || node.world.failed() {
            return;
        }
        node.operations.store(left - 1, Ordering::Relaxed);
        if random.chance(300_000) {
            sleep(Duration::from_millis(random.below(node.setup.pause_ms_max))).await;
        }
        run_operation(&node, &mut random).await;
    }
}

async fn run_operation(node: &NodeIncarnation, random: &mut RandomSource) {
    let key = draw_key(&node.setup, random);
    let forgets = 4 * node.setup.mix.forget;
    match random.below(1000 + forgets) {
        ..300 => put::put(node, key, random).await,
        300..700 => get(node, key, random).await,
        700..780 => check::find(node, key),
        780..830 => compare(node, key, random).await,
        830..900 => follow(node, key, random).await,
        900..930 => warm(node, random).await,
        930..960 => pin(node, random).await,
        960..980 => administer(node, random),
        980..1000 => flip(node, key, random),
        _ => forget(node, key, random).await,
    }
}

fn ids(node: &NodeIncarnation, random: &mut RandomSource) -> Vec<PageId> {
    (0..random.between(1, 4)).map(|_| page_id(draw_key(&node.setup, random))).collect()
}

async fn get(node: &NodeIncarnation, key: u64, random: &mut RandomSource) {
    let limit = Limit::draw(random);
    let started = node.request_time();
    let deadline = limit.deadline_within(PATIENCE);
    let found = limit.run(node.store.tiers().get(&page_id(key), deadline)).await;
    node.check_end("get", deadline);
    let Some(Some((page, tier))) = found else {
        node.world.event("get", [key, 0, found.is_none().into()]);
        node.world.count(if found.is_none() { "cancelled" } else { "misses" }, 1);
        return;
    };
    node.world.event("get", [key, page.generation(), tier as u64]);
    node.world.count(if tier == TierCode::L2 { "L2 hits" } else { "L3 hits" }, 1);
    if check::check_page(node, key, started, &page) && random.chance(50_000) && !node.memory_fails() {
        // The caller still holds the memory, so its bytes must not change.
        sleep(Duration::from_millis(random.below(200))).await;
        if let Err(problem) = node.model.lock().check_page(key, &page.meta(), &page.payload) {
            node.violate(format!("memory changed while the reader held it: {problem}"));
        }
    }
}

fn soon(after: Duration) -> Instant {
    (tokio::time::Instant::now() + after).into_std()
}

async fn compare(node: &NodeIncarnation, key: u64, random: &mut RandomSource) {
    let last = node.model.lock().last_version(key);
    let Some((content, parts)) = last.and_then(|last| node.model.lock().content(last)) else { return };
    // All versions of a key share their first word, so short pages may be equal.
    if parts.iter().sum::<u32>() < 16 {
        return;
    }
    // Half of the comparisons use bytes that were never put.
    let content = if random.chance(500_000) { content } else { 1 << 40 | random.below(1 << 30) };
    let mut bytes = vec![0; parts.iter().map(|&part| part as usize).sum()];
    payload::fill(key, content, &mut bytes);
    let mut rest = &bytes[..];
    let crcs: Vec<u32> =
        parts.iter().flat_map(|&part| chunk_crcs(rest.split_off(..part as usize).unwrap_or_default())).collect();
    let limit = Limit::draw(random);
    let started = node.request_time();
    let deadline = limit.deadline_within(PATIENCE);
    let end = limit.run(node.store.compare(&page_id(key), &crcs, deadline)).await;
    let outcome = end.map(|end| end.outcome);
    node.check_end("comparison", deadline);
    node.world.event("compare", [key, content, outcome.map_or(0, |outcome| outcome as u64)]);
    let needed = match outcome {
        Some(CommitOutcome::AlreadyThere) => ContentMatch::Same(content),
        Some(CommitOutcome::Refused) => ContentMatch::Other(content),
        None | Some(CommitOutcome::Incomplete) => return,
        Some(CommitOutcome::Stored) => return node.violate("a comparison stored something".into()),
    };
    node.world.count("compared", 1);
    if !node.model.lock().may_exist(key, needed, started) && !node.world.forgives_suspect(key) {
        node.violate(format!("key {key}: compared with content {content}: {outcome:?}, which cannot be"));
    }
}

async fn follow(node: &NodeIncarnation, key: u64, random: &mut RandomSource) {
    let deadline = soon(Duration::from_millis(random.below(2000)));
    let limit = Limit::draw(random);
    limit.run(follow_until(node, key, deadline)).await;
    node.check_end("follow", deadline + PATIENCE);
}

async fn follow_until(node: &NodeIncarnation, key: u64, deadline: Instant) {
    let id = page_id(key);
    loop {
        match node.store.puts().presence(&id) {
            Presence::Sealed => {
                let started = node.request_time();
                let found = node.store.tiers().get(&id, deadline).await;
                node.check_end("follow", deadline);
                let Some((page, _)) = found else { return };
                check::check_page(node, key, started, &page);
                return node.world.count("follows of sealed pages", 1);
            }
            Presence::Open(put) => return follow_put(node, key, &put, deadline).await,
            Presence::Absent(waiter) => {
                let begun = waiter.put_started(deadline).await;
                node.check_end("wait", deadline);
                if !begun {
                    return node.world.count("waits that timed out", 1);
                }
            }
            Presence::TooManyWaiters => {
                return node.violate("a reader was refused because too many readers wait".into());
            }
        }
    }
}

async fn follow_put(node: &NodeIncarnation, key: u64, put: &Put, deadline: Instant) {
    let version = node.model.lock().version_of(put.generation());
    let Some((content, parts)) = node.model.lock().content(version) else {
        return node.violate(format!("key {key}: put {version} is open and was never reserved"));
    };
    let mut bytes = vec![0; parts.iter().map(|&part| part as usize).sum()];
    payload::fill(key, content, &mut bytes);
    let mut now = put.progress();
    let mut seen = vec![false; put.part_count()];
    loop {
        let mut rest = &bytes[..];
        for (part, seen) in seen.iter_mut().enumerate() {
            let expected = rest.split_off(..parts[part] as usize).unwrap_or_default();
            let Some((found, crcs)) = put.landed(part).filter(|_| !*seen) else { continue };
            *seen = true;
            let whole = chunk_crcs(&found).eq(crcs.iter().copied()) && *found == *expected;
            match node.memory_fails() {
                _ if whole => {}
                true => node.world.forgive("forgiven: damage by failing memory", 1),
                false => node.violate(format!("key {key}: part {part} of put {version} has wrong bytes")),
            }
        }
        match now {
            Progress::Open(_) => {}
            Progress::Aborted => return node.world.count("follows of aborted puts", 1),
            Progress::Sealed if seen.iter().all(|&seen| seen) => return node.world.count("follows completed", 1),
            Progress::Sealed => {
                return node.violate(format!("put {version} was sealed, and its follower did not see all parts"));
            }
        }
        match timeout_at(deadline.into(), put.progress_after(now)).await {
            Ok(changed) => now = changed,
            Err(_) => return node.world.count("follows that timed out", 1),
        }
    }
}

async fn warm(node: &NodeIncarnation, random: &mut RandomSource) {
    let ids = ids(node, random);
    let limit = Limit::draw(random);
    let deadline = limit.deadline_within(PATIENCE);
    let warmed = limit.run(node.store.warm(&ids, deadline)).await;
    node.check_end("warming", deadline);
    node.world.event("warm", [ids.len() as u64, warmed.unwrap_or(0) as u64, 0]);
    if warmed.is_some_and(|warmed| warmed > ids.len()) {
        node.violate(format!("warm reported {warmed:?} of {} pages", ids.len()));
    }
}

async fn pin(node: &NodeIncarnation, random: &mut RandomSource) {
    let ids = ids(node, random);
    let limit = Limit::draw(random);
    let kind = [PinKind::None, PinKind::Soft, PinKind::Hard][random.below(3) as usize];
    let deadline = limit.deadline_within(PATIENCE);
    let pinned = limit.run(node.store.pin(&ids, kind, random.between(1, 20_000), deadline)).await;
    node.check_end("pin", deadline);
    let held = pinned.map_or(0, |pinned| pinned.unwrap_or(usize::MAX)) as u64;
    node.world.event("pin", [ids.len() as u64, kind as u64, held]);
    node.world.count(if held == u64::MAX { "pins refused" } else { "pins" }, 1);
}

/// Starts scrubs, and makes devices fail or fill up. A device fails for good only if another one
/// works.
fn administer(node: &NodeIncarnation, random: &mut RandomSource) {
    let turn = random.below(8);
    if turn == 0 {
        return node.store.tiers().devices().scrub_now();
    }
    if turn > 4 || !node.setup.profile.has_errors() {
        return node.store.tick();
    }
    let now = node.world.now_ms();
    let devices = node.world.disks.len() as u64;
    let number = random.below(devices) as usize;
    let others_work = node.world.disks.iter().enumerate().all(|(at, disk)| at == number || !disk.lock().is_dead());
    let mut disk = node.world.disks[number].lock();
    let fault = match turn {
        1 => {
            disk.fill_until(now + random.between(1_000, 60_000));
            "device full for a while"
        }
        2 if devices > 1 && others_work && random.chance(50_000) => {
            disk.fail_until(u64::MAX);
            "device fails for good"
        }
        _ => {
            disk.fail_until(now + random.between(100, 20_000));
            "device fails for a while"
        }
    };
    drop(disk);
    node.world.fault(fault, [number as u64, now, 0]);
}

fn flip(node: &NodeIncarnation, key: u64, random: &mut RandomSource) {
    if !node.memory_fails() {
        return;
    }
    let found = node.store.tiers().get(&page_id(key), soon(PATIENCE)).now_or_never().flatten();
    let Some((page, TierCode::L2)) = found else { return };
    let byte = page.payload.arena_offset() + random.below(page.payload.len() as u64) as usize;
    node.world.fault("L2 flip", [key, byte as u64, 0]);
    // SAFETY: the simulation runs on one thread, and no task holds a reference into the slot across
    // an await. This function holds none either.
    unsafe { node.arena.flip_bit(byte, random.below(8) as u32) };
}

async fn forget(node: &NodeIncarnation, key: u64, random: &mut RandomSource) {
    let keys = draw_forgotten_keys(&node.setup, key, random);
    let ids: Vec<PageId> = keys.iter().map(|&key| page_id(key)).collect();
    let limit = Limit::draw(random);
    let deadline = limit.deadline_within(PATIENCE);
    keys.iter().for_each(|&key| node.world.event("forget", [key, 0, 0]));
    let forgetting = node.model.lock().forget_begins(keys.clone());
    let result = limit.run(node.store.forget(&ids, deadline)).await;
    node.check_end("forgetting", deadline);
    let done = matches!(result, Some(Ok(_)));
    keys.iter().for_each(|&key| node.world.event("forget answer", [key, 0, done.into()]));
    node.world.count(if done { "forgets acknowledged" } else { "forgets not acknowledged" }, 1);
    node.world.count("namespaces forgotten", u64::from(done && keys.len() > KEYS_FORGOTTEN_AT_ONCE));
    node.model.lock().forget_ends(forgetting, done);
    keys.iter().for_each(|&key| check::find(node, key));
}
