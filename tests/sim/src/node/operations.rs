//! What the workers of a node do, and the check of every answer.

use super::{NodeLife, check, put};
use crate::dice::{Dice, Stream};
use crate::model::{Asked, Bytes};
use crate::payload::{self, page_id};
use crate::workload::{Limit, pick};
use futures::FutureExt;
use larder_format::{PageId, chunk_crcs};
use larder_node::sim::{Page, Presence, Progress, Put};
use larder_wire::{CommitOutcome, PinKind, TierCode};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout_at};

/// How long a request waits that does not say so.
const PATIENCE: Duration = Duration::from_secs(5);

/// One worker: operations until there are none left to do.
pub(super) async fn work(life: Arc<NodeLife>, worker: u64) {
    let mut dice = Dice::new(life.world.seed, Stream::Worker(life.number, worker));
    loop {
        let left = life.operations.load(Ordering::Relaxed);
        if left == 0 || life.world.failed() {
            return;
        }
        life.operations.store(left - 1, Ordering::Relaxed);
        if dice.chance(300_000) {
            sleep(Duration::from_millis(dice.below(life.setup.pause_ms_max))).await;
        }
        operation(&life, &mut dice).await;
    }
}

async fn operation(life: &NodeLife, dice: &mut Dice) {
    let key = pick(&life.setup, dice);
    let forgets = 4 * life.setup.mix.forget;
    match dice.below(1000 + forgets) {
        ..300 => put::put(life, key, dice).await,
        300..700 => get(life, key, dice).await,
        700..780 => check::find(life, key),
        780..830 => compare(life, key, dice).await,
        830..900 => follow(life, key, dice).await,
        900..930 => warm(life, dice).await,
        930..960 => pin(life, dice).await,
        960..980 => administer(life, dice),
        980..1000 => flip(life, key, dice),
        _ => forget(life, key, dice).await,
    }
}

fn ids(life: &NodeLife, dice: &mut Dice) -> Vec<PageId> {
    (0..dice.between(1, 4)).map(|_| page_id(pick(&life.setup, dice))).collect()
}

async fn get(life: &NodeLife, key: u64, dice: &mut Dice) {
    let limit = Limit::draw(dice);
    let (asked, deadline) = (life.asks(), limit.deadline_within(PATIENCE));
    let found = limit.run(life.store.get(&page_id(key), deadline)).await;
    life.check_end("get", deadline);
    let Some(Some((page, tier))) = found else {
        life.world.event("get", [key, 0, found.is_none().into()]);
        life.world.count(if found.is_none() { "cancelled" } else { "misses" }, 1);
        return;
    };
    life.world.event("get", [key, page.meta.generation, tier as u64]);
    life.world.count(if tier == TierCode::L2 { "hits in L2" } else { "hits on L3" }, 1);
    if examine(life, key, asked, &page) && dice.chance(50_000) && !life.memory_fails() {
        // Memory that is held stays as it is.
        sleep(Duration::from_millis(dice.below(200))).await;
        if let Err(problem) = life.model.lock().check_page(key, &page.meta, &page.payload) {
            life.violate(format!("memory changed while it was held: {problem}"));
        }
    }
}

/// What a client does with a page: if it is not what its metadata says, the node is told, and must not serve it again.
pub(super) fn examine(life: &NodeLife, key: u64, asked: Asked, page: &Page) -> bool {
    let id = page_id(key);
    if let Err(mismatch) = page.meta.verify(&id, &page.payload) {
        suspect(life, key, page, &mismatch.to_string());
        return false;
    }
    let suspect = life.world.is_suspect(key);
    let model = life.model.lock();
    let found = model.check_found(key, page.meta.generation, asked, suspect);
    if let Err(problem) = found.and_then(|()| model.check_page(key, &page.meta, &page.payload)) {
        drop(model);
        life.violate(format!("a get: {problem}"));
    }
    true
}

fn suspect(life: &NodeLife, key: u64, page: &Page, mismatch: &str) {
    let generation = page.meta.generation;
    life.world.event("damaged", [key, generation, 0]);
    life.world.count("damaged in L2", 1);
    if !life.memory_fails() {
        life.violate(format!("key {key}: version {generation} is damaged in memory that does not fail: {mismatch}"));
    }
    let id = page_id(key);
    life.store.recheck(&id);
    // What is in memory is there at once.
    let again = life.store.get(&id, soon(PATIENCE)).now_or_never().flatten();
    let served = again.filter(|(page, tier)| *tier == TierCode::L2 && page.meta.verify(&id, &page.payload).is_err());
    if served.is_some() {
        life.violate(format!("key {key}: version {generation} is served again though it was found damaged"));
    }
}

fn soon(after: Duration) -> Instant {
    (tokio::time::Instant::now() + after).into_std()
}

/// A second writer asks whether its bytes are those that are there.
async fn compare(life: &NodeLife, key: u64, dice: &mut Dice) {
    let last = life.model.lock().last_version(key);
    let Some((content, parts)) = last.and_then(|last| life.model.lock().content(last)) else { return };
    // The first bytes of all versions are the same.
    if parts.iter().sum::<u32>() < 16 {
        return;
    }
    // Half of them have bytes that nobody ever put.
    let content = if dice.chance(500_000) { content } else { 1 << 40 | dice.below(1 << 30) };
    let mut bytes = vec![0; parts.iter().map(|&part| part as usize).sum()];
    payload::fill(key, content, &mut bytes);
    let mut rest = &bytes[..];
    let crcs: Vec<u32> =
        parts.iter().flat_map(|&part| chunk_crcs(rest.split_off(..part as usize).unwrap_or_default())).collect();
    let limit = Limit::draw(dice);
    let (asked, deadline) = (life.asks(), limit.deadline_within(PATIENCE));
    let outcome = limit.run(life.store.compare(&page_id(key), &crcs, deadline)).await;
    life.check_end("comparison", deadline);
    life.world.event("compare", [key, content, outcome.map_or(0, |outcome| outcome as u64)]);
    let needed = match outcome {
        Some(CommitOutcome::AlreadyThere) => Bytes::Same(content),
        Some(CommitOutcome::Refused) => Bytes::Other(content),
        None | Some(CommitOutcome::Incomplete) => return,
        Some(CommitOutcome::Stored) => return life.violate("a comparison stored something".into()),
    };
    life.world.count("compared", 1);
    if !life.model.lock().may_be_there(key, needed, asked) && !life.world.is_suspect(key) {
        life.violate(format!("key {key}: compared with content {content}: {outcome:?}, which cannot be"));
    }
}

/// A reader of a page that is there, being put, or about to be.
async fn follow(life: &NodeLife, key: u64, dice: &mut Dice) {
    let deadline = soon(Duration::from_millis(dice.below(2000)));
    let limit = Limit::draw(dice);
    limit.run(follow_until(life, key, deadline)).await;
    life.check_end("follow", deadline + PATIENCE);
}

async fn follow_until(life: &NodeLife, key: u64, deadline: Instant) {
    let id = page_id(key);
    loop {
        match life.store.presence(&id) {
            Presence::Sealed => {
                let asked = life.asks();
                let found = life.store.get(&id, deadline).await;
                life.check_end("follow", deadline);
                let Some((page, _)) = found else { return };
                examine(life, key, asked, &page);
                return life.world.count("follows of sealed pages", 1);
            }
            Presence::Open(put) => return follow_put(life, key, &put, deadline).await,
            Presence::Nothing(waiter) => {
                let begun = waiter.begun(deadline).await;
                life.check_end("wait", deadline);
                if !begun {
                    return life.world.count("waits in vain", 1);
                }
            }
            Presence::Crowded => return life.violate("too many readers wait".into()),
        }
    }
}

async fn follow_put(life: &NodeLife, key: u64, put: &Put, deadline: Instant) {
    let version = put.generation();
    let Some((content, parts)) = life.model.lock().content(version) else {
        return life.violate(format!("key {key}: put {version} is open and nobody reserved it"));
    };
    let mut bytes = vec![0; parts.iter().map(|&part| part as usize).sum()];
    payload::fill(key, content, &mut bytes);
    let (mut now, mut seen) = (put.progress(), vec![false; put.part_count()]);
    loop {
        let mut rest = &bytes[..];
        for (part, seen) in seen.iter_mut().enumerate() {
            let expected = rest.split_off(..parts[part] as usize).unwrap_or_default();
            let Some((found, crcs)) = put.landed(part).filter(|_| !*seen) else { continue };
            *seen = true;
            let whole = chunk_crcs(&found).eq(crcs.iter().copied()) && *found == *expected;
            if !whole && !life.memory_fails() {
                life.violate(format!("key {key}: part {part} of put {version} has other bytes"));
            }
        }
        match now {
            Progress::Open(_) => {}
            Progress::Aborted => return life.world.count("follows of puts given up", 1),
            Progress::Sealed if seen.iter().all(|&seen| seen) => return life.world.count("follows to the end", 1),
            Progress::Sealed => return life.violate(format!("put {version} is sealed and was not seen whole")),
        }
        match timeout_at(deadline.into(), put.progress_after(now)).await {
            Ok(changed) => now = changed,
            Err(_) => return life.world.count("follows that end early", 1),
        }
    }
}

async fn warm(life: &NodeLife, dice: &mut Dice) {
    let (ids, limit) = (ids(life, dice), Limit::draw(dice));
    let deadline = limit.deadline_within(PATIENCE);
    let warmed = limit.run(life.store.warm(&ids, deadline)).await;
    life.check_end("warming", deadline);
    life.world.event("warm", [ids.len() as u64, warmed.unwrap_or(0) as u64, 0]);
    if warmed.is_some_and(|warmed| warmed > ids.len()) {
        life.violate(format!("{warmed:?} of {} pages were warmed", ids.len()));
    }
}

async fn pin(life: &NodeLife, dice: &mut Dice) {
    let (ids, limit) = (ids(life, dice), Limit::draw(dice));
    let kind = [PinKind::None, PinKind::Soft, PinKind::Hard][dice.below(3) as usize];
    let deadline = limit.deadline_within(PATIENCE);
    let pinned = limit.run(life.store.pin(&ids, kind, dice.between(1, 20_000), deadline)).await;
    life.check_end("pin", deadline);
    let held = pinned.map_or(0, |pinned| pinned.unwrap_or(usize::MAX)) as u64;
    life.world.event("pin", [ids.len() as u64, kind as u64, held]);
    life.world.count(if held == u64::MAX { "pins refused" } else { "pins" }, 1);
}

/// Scrubs, and devices that fail or are full for a while, or fail for good if there is another.
fn administer(life: &NodeLife, dice: &mut Dice) {
    let turn = dice.below(8);
    if turn == 0 {
        return life.store.scrub_l3_now();
    }
    if turn > 4 || !life.setup.profile.has_errors() {
        return life.store.tick();
    }
    let (now, devices) = (life.world.now_ms(), life.world.disks.len() as u64);
    let number = dice.below(devices) as usize;
    let others_work = life.world.disks.iter().enumerate().all(|(at, disk)| at == number || !disk.lock().is_dead());
    let mut disk = life.world.disks[number].lock();
    let what = match turn {
        1 => {
            disk.fills(now + dice.between(1_000, 60_000));
            "full for a while"
        }
        2 if devices > 1 && others_work && dice.chance(50_000) => {
            disk.breaks(u64::MAX);
            "broken for good"
        }
        _ => {
            disk.breaks(now + dice.between(100, 20_000));
            "broken for a while"
        }
    };
    drop(disk);
    life.world.fault(what, [number as u64, now, 0]);
}

/// A bit flips in a page in L2.
fn flip(life: &NodeLife, key: u64, dice: &mut Dice) {
    if !life.memory_fails() {
        return;
    }
    let found = life.store.get(&page_id(key), soon(PATIENCE)).now_or_never().flatten();
    let Some((page, TierCode::L2)) = found else { return };
    let byte = page.payload.arena_offset() + dice.below(page.payload.len() as u64) as usize;
    life.world.fault("L2 flip", [key, byte as u64, 0]);
    // SAFETY: the simulation has one thread, and nobody holds a reference into the slot across an await; here there is none
    // either.
    unsafe { life.arena.flip_bit(byte, dice.below(8) as u32) };
}

async fn forget(life: &NodeLife, key: u64, dice: &mut Dice) {
    let mut keys = vec![key];
    (0..dice.below(4)).for_each(|_| keys.push(pick(&life.setup, dice)));
    keys.sort_unstable();
    keys.dedup();
    let ids: Vec<PageId> = keys.iter().map(|&key| page_id(key)).collect();
    let limit = Limit::draw(dice);
    let deadline = limit.deadline_within(PATIENCE);
    keys.iter().for_each(|&key| life.world.event("forget", [key, 0, 0]));
    let forgetting = life.model.lock().forget_begins(keys.clone());
    let result = limit.run(life.store.forget(&ids, deadline)).await;
    life.check_end("forgetting", deadline);
    let done = matches!(result, Some(Ok(_)));
    keys.iter().for_each(|&key| life.world.event("forget answer", [key, 0, done.into()]));
    life.world.count(if done { "forgets acknowledged" } else { "forgets not acknowledged" }, 1);
    life.model.lock().forget_ends(forgetting, done);
    keys.iter().for_each(|&key| check::find(life, key));
}
