//! What the tasks of a life do, and the check of every answer.

use crate::dice::{Dice, Stream};
use crate::life::Life;
use crate::model::{Asked, Expected};
use crate::payload::{self, page_id};
use crate::setup::Setup;
use futures::future::join;
use larder_device::Slot;
use larder_format::{NamespaceId, PageMeta};
use larder_l3::{L3Error, Pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Some pages have more than one chunk per part.
const LARGE_BYTES: u64 = 200_000;

/// How long an operation may take.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    /// As long as it wants.
    None,
    /// The store is given a deadline this soon.
    Deadline(Duration),
    /// The future is dropped after this.
    Cancel(Duration),
}

impl Limit {
    pub(crate) fn draw(dice: &mut Dice) -> Limit {
        match dice.below(20) {
            0 => Limit::Deadline(Duration::from_millis(dice.below(20))),
            1 => Limit::Cancel(Duration::from_millis(dice.below(20))),
            _ => Limit::None,
        }
    }

    fn deadline(self) -> std::time::Instant {
        self.deadline_within(PATIENCE)
    }

    /// At the latest after `patience`.
    pub(crate) fn deadline_within(self, patience: Duration) -> std::time::Instant {
        let duration = match self {
            Limit::Deadline(duration) => duration,
            Limit::None | Limit::Cancel(_) => patience,
        };
        (Instant::now() + duration).into_std()
    }

    /// `None` if it was dropped.
    pub(crate) async fn run<T>(self, work: impl Future<Output = T>) -> Option<T> {
        match self {
            Limit::Cancel(after) => timeout(after, work).await.ok(),
            Limit::None | Limit::Deadline(_) => Some(work.await),
        }
    }
}

/// One worker: operations until there are none left to do.
pub async fn work(life: Arc<Life>, worker: u64) {
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

async fn operation(life: &Life, dice: &mut Dice) {
    let mix = life.setup.mix;
    if dice.chance(life.setup.admin) {
        return administer(life, dice);
    }
    let key = pick(&life.setup, dice);
    let turn = dice.below(mix.put + mix.get + mix.find + mix.forget);
    if turn < mix.put {
        put(life, key, dice).await;
    } else if turn < mix.put + mix.get {
        get(life, key, dice).await;
    } else if turn < mix.put + mix.get + mix.find {
        find(life, key);
    } else {
        forget(life, key, dice).await;
    }
}

/// Some keys are asked for more than others.
pub(crate) fn pick(setup: &Setup, dice: &mut Dice) -> u64 {
    let keys = setup.keys;
    match dice.below(3) {
        0 => dice.below(keys),
        1 => dice.below(keys / 8 + 1),
        _ => dice.below(keys).min(dice.below(keys)),
    }
}

/// Bytes of the parts of a page.
pub(crate) fn parts(setup: &Setup, dice: &mut Dice) -> Vec<u32> {
    if let Some(bytes) = setup.uniform_bytes {
        return vec![bytes];
    }
    let most = if dice.chance(5_000) { LARGE_BYTES } else { setup.payload_max };
    let parts = dice.between(1, 4);
    (0..parts).map(|_| dice.between(1, most / parts) as u32).collect()
}

/// Memory filled with a new version of the key; its number, metadata, and memory, if there is some.
fn make(life: &Life, key: u64, parts: Vec<u32>, expires_unix_ms: u64) -> Option<(u64, PageMeta, Slot)> {
    let bytes: usize = parts.iter().map(|&part| part as usize).sum();
    let Some(mut slot) = life.arena.allocate(bytes) else {
        life.world.count("no memory", 1);
        return None;
    };
    let mut model = life.model.lock();
    let version = model.put_begins(key, parts, expires_unix_ms);
    payload::fill(key, version, &mut slot);
    let meta = model.describe(key, version, &slot);
    Some((version, meta, slot.freeze()))
}

async fn put(life: &Life, key: u64, dice: &mut Dice) {
    let expires_unix_ms = if dice.chance(life.setup.mortal) { life.world.unix_ms() + dice.below(20_000) } else { 0 };
    let Some((version, meta, slot)) = make(life, key, parts(&life.setup, dice), expires_unix_ms) else { return };
    let limit = Limit::draw(dice);
    life.world.event("put", [key, version, slot.len() as u64]);
    // A put that comes twice at once is one put.
    let twice = dice.chance(20_000).then(|| (meta.clone(), slot.clone()));
    let write = life.l3.write(meta, slot, limit.deadline());
    let result = match twice {
        None => limit.run(write).await,
        Some((meta, slot)) => {
            let again = life.l3.write(meta, slot, limit.deadline());
            limit.run(join(write, again)).await.map(|(first, second)| first.and(second))
        }
    };
    check_patience(life, limit, "put", &result);
    let answer = code(&result);
    life.world.event("put answer", [key, version, answer]);
    life.world.count(name("put", answer), 1);
    let acked = matches!(result, Some(Ok(()))).then(|| life.world.now_ms());
    life.model.lock().put_ends(version, acked);
}

/// What is not limited, on a device that does what it should, is done in time.
fn check_patience<T>(life: &Life, limit: Limit, what: &str, result: &Option<Result<T, L3Error>>) {
    let late = matches!(result, Some(Err(L3Error::Deadline(_)))) && matches!(limit, Limit::None);
    if late && life.setup.profile.honest() {
        life.world.violate(format!("a {what} takes longer than {} s", PATIENCE.as_secs()));
    }
}

/// 0 is good, the rest say what happened.
fn code<T>(result: &Option<Result<T, L3Error>>) -> u64 {
    match result {
        Some(Ok(_)) => 0,
        None => 1,
        Some(Err(L3Error::Deadline(_))) => 2,
        Some(Err(L3Error::Io { .. })) => 3,
        Some(Err(L3Error::NoMemory { .. })) => 4,
        Some(Err(L3Error::Closed)) => 5,
        Some(Err(L3Error::Append(_))) => 6,
        Some(Err(_)) => 7,
    }
}

fn name(what: &'static str, code: u64) -> &'static str {
    match (what, code) {
        ("put", 0) => "puts acknowledged",
        ("get", 0) => "gets answered",
        ("forget", 0) => "forgets acknowledged",
        (_, 1) => "cancelled",
        (_, 2) => "deadlines passed",
        (_, 4) => "no memory",
        (_, 6) => "log stopped",
        _ => "refused with an error",
    }
}

async fn get(life: &Life, key: u64, dice: &mut Dice) {
    let limit = Limit::draw(dice);
    let asked = asks(life);
    let id = page_id(key);
    let result = limit.run(life.l3.read(&id, limit.deadline())).await;
    check_patience(life, limit, "get", &result);
    let answer = code(&result);
    life.world.count(name("get", answer), 1);
    let Some(Ok(Some((meta, slot)))) = result else {
        life.world.event("get", [key, 0, answer]);
        return;
    };
    life.world.event("get", [key, meta.generation, 0]);
    life.world.count("hits", 1);
    check(life, key, asked, &meta, &slot);
    if dice.chance(100_000) {
        // Memory that is held stays as it is.
        sleep(Duration::from_millis(dice.below(200))).await;
        if let Err(problem) = payload::check(key, meta.generation, &slot) {
            life.world.violate(format!("memory changed while it was held: {problem}"));
        }
    }
}

fn asks(life: &Life) -> Asked {
    life.model.lock().asks(life.world.unix_ms())
}

fn check(life: &Life, key: u64, asked: Asked, meta: &PageMeta, payload: &[u8]) {
    let suspect = life.world.is_suspect(key);
    let model = life.model.lock();
    let found = model.check_found(key, meta.generation, asked, suspect);
    if let Err(problem) = found.and_then(|()| model.check_page(key, meta, payload)) {
        drop(model);
        life.world.violate(format!("a get: {problem}"));
    }
}

fn find(life: &Life, key: u64) {
    let asked = asks(life);
    let found = life.l3.find(&page_id(key));
    life.world.event("find", [key, found.map_or(0, |entry| entry.generation), 0]);
    let Some(entry) = found else { return };
    let suspect = life.world.is_suspect(key);
    let checked = life.model.lock().check_found(key, entry.generation, asked, suspect);
    if let Err(problem) = checked {
        life.world.violate(format!("a look-up: {problem}"));
    }
}

async fn forget(life: &Life, key: u64, dice: &mut Dice) {
    let mut keys = vec![key];
    for _ in 0..dice.below(4) {
        keys.push(pick(&life.setup, dice));
    }
    keys.sort_unstable();
    keys.dedup();
    let ids: Vec<_> = keys.iter().map(|&key| page_id(key)).collect();
    let limit = Limit::draw(dice);
    keys.iter().for_each(|&key| life.world.event("forget", [key, 0, 0]));
    let forgetting = life.model.lock().forget_begins(keys.clone());
    let result = limit.run(life.l3.forget(&ids, limit.deadline())).await;
    check_patience(life, limit, "forget", &result);
    let answer = code(&result);
    keys.iter().for_each(|&key| life.world.event("forget answer", [key, 0, answer]));
    life.world.count(name("forget", answer), 1);
    life.model.lock().forget_ends(forgetting, answer == 0);
}

/// After a start: what must be there is there.
pub async fn check_expected(life: &Life, expected: &[Expected]) {
    if !life.setup.profile.honest() {
        return;
    }
    for Expected { key, version } in expected {
        let expires = life.model.lock().expires_unix_ms(*version);
        // The log may be a second early.
        if expires != 0 && expires <= life.world.unix_ms() + 1000 {
            continue;
        }
        life.world.count("pages that had to be there", 1);
        let found = life.l3.find(&page_id(*key)).map(|entry| entry.generation);
        let other = found.is_some_and(|found| found < *version) && life.setup.keep_percent > 0;
        if found != Some(*version) && !other {
            life.world.count("pages lost", 1);
            life.world.violate(format!("key {key}: version {version} was durable, and {found:?} is there"));
        }
    }
}

/// Pins, quotas, scrubs: what does not read or write by itself.
fn administer(life: &Life, dice: &mut Dice) {
    match dice.below(8) {
        0 => life.l3.scrub_now(),
        1 | 2 => {
            let namespace = NamespaceId([dice.between(1, 2) as u8; 32]);
            let bytes = if dice.chance(500_000) { u64::MAX } else { dice.below(4 * life.setup.segment_bytes) };
            life.world.event("quota", [namespace.0[0].into(), bytes, 0]);
            life.l3.set_quota(namespace, bytes);
        }
        turn => {
            let ids: Vec<_> = (0..dice.between(1, 4)).map(|_| page_id(pick(&life.setup, dice))).collect();
            let pin = [Pin::None, Pin::Soft, Pin::Hard][dice.below(3) as usize];
            let held = if turn == 3 { 0 } else { life.l3.pin(&ids, pin) };
            life.l3.touch(&ids);
            life.world.event("pin", [ids.len() as u64, held as u64, 0]);
            life.world.count("pages pinned", if pin == Pin::None { 0 } else { held as u64 });
        }
    }
    let stats = life.l3.stats();
    if stats.pinned_bytes > stats.bytes_capacity / 4 {
        life.world.violate(format!("{} bytes are pinned", stats.pinned_bytes));
    }
}

/// Ends all pins; nothing may be held then.
pub fn let_go(life: &Life) {
    let ids: Vec<_> = (0..life.setup.keys).map(page_id).collect();
    life.l3.pin(&ids, Pin::None);
    let left = life.l3.stats().pinned_bytes;
    if left != 0 {
        life.world.violate(format!("after all pins ended, {left} bytes are pinned"));
    }
}

/// A put and a get that must work.
pub async fn put_and_get(life: &Life) -> Result<(), L3Error> {
    let Some((version, meta, slot)) = make(life, 0, vec![1000], 0) else {
        life.world.violate("at rest, there is no memory for a page".into());
        return Ok(());
    };
    let put = life.l3.write(meta, slot, Limit::None.deadline()).await;
    let acked = put.is_ok().then(|| life.world.now_ms());
    life.model.lock().put_ends(version, acked);
    put?;
    match life.l3.read(&page_id(0), Limit::None.deadline()).await? {
        Some((meta, _)) if meta.generation == version => Ok(()),
        other => {
            let found = other.map(|(meta, _)| meta.generation);
            life.world.violate(format!("at rest, version {version} was put and {found:?} is read"));
            Ok(())
        }
    }
}

/// Reads every key once.
pub async fn read_everything(life: &Life) {
    for key in 0..life.setup.keys {
        let asked = asks(life);
        match life.l3.read(&page_id(key), Limit::None.deadline()).await {
            Ok(Some((meta, slot))) => check(life, key, asked, &meta, &slot),
            Ok(None) => {}
            Err(error) => life.world.violate(format!("at rest, reading key {key} fails: {error}")),
        }
    }
}
