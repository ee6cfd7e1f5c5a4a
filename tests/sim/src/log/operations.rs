//! Workers of the log: they draw operations and check every answer against the model.

use super::LogIncarnation;
use crate::model::{Expected, RequestTime, token_ids};
use crate::payload::{self, NAMESPACES, namespace_id, page_id};
use crate::random::{RandomSource, Stream};
use crate::workload::{KEYS_FORGOTTEN_AT_ONCE, Limit, draw_forgotten_keys, draw_key, parts};
use futures::future::join;
use futures::stream::{self, StreamExt};
use larder_format::PageMeta;
use larder_log::{L3Error, Pin};
use larder_memory::Slot;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::sleep;

const PUTS_PER_BOUND_CHECK: u64 = 16;
const READS_AT_ONCE: usize = 4;
/// Deadline of requests without a limit. No request takes this long on a reliable device.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs one worker until the operations of the incarnation are used up, or until a violation ends
/// the seed. All workers share one counter of operations.
pub(super) async fn work(log: Arc<LogIncarnation>, worker: u64) {
    let mut random = RandomSource::new(log.world.seed, Stream::Worker(log.number, worker));
    loop {
        // Relaxed: one thread runs all workers, and none can run between load and store.
        let left = log.operations.load(Ordering::Relaxed);
        if left == 0 || log.world.failed() {
            return;
        }
        log.operations.store(left - 1, Ordering::Relaxed);
        if random.chance(300_000) {
            sleep(Duration::from_millis(random.below(log.setup.pause_ms_max))).await;
        }
        run_operation(&log, &mut random).await;
    }
}

async fn run_operation(log: &LogIncarnation, random: &mut RandomSource) {
    let mix = log.setup.mix;
    if random.chance(log.setup.admin_rate) {
        return administer(log, random);
    }
    let key = draw_key(&log.setup, random);
    let turn = random.below(mix.put + mix.get + mix.find + mix.forget);
    if turn < mix.put {
        let key = log.next_key(random).unwrap_or(key);
        put(log, key, random).await;
    } else if turn < mix.put + mix.get {
        get(log, key, random).await;
    } else if turn < mix.put + mix.get + mix.find {
        find(log, key);
    } else {
        forget(log, key, random).await;
    }
}

impl LogIncarnation {
    /// Key after the last one that was put, for most puts of a large log: random keys would hardly
    /// reach all of them.
    fn next_key(&self, random: &mut RandomSource) -> Option<u64> {
        let is_next = self.setup.is_large && random.chance(800_000);
        is_next.then(|| self.model.lock().next_version() % self.setup.keys)
    }
}

/// Allocates and fills memory for a new version. Returns its number, metadata and memory, or `None`
/// if the arena is full.
fn allocate_version(
    log: &LogIncarnation,
    key: u64,
    parts: Vec<u32>,
    expires_unix_ms: u64,
) -> Option<(u64, PageMeta, Slot)> {
    let bytes: usize = parts.iter().map(|&part| part as usize).sum();
    let Some(mut slot) = log.arena.allocate(bytes) else {
        log.world.count("out of memory", 1);
        return None;
    };
    let mut model = log.model.lock();
    let version = model.put_begins(key, parts, expires_unix_ms);
    payload::fill(key, version, &mut slot);
    let meta = model.describe(key, version, &slot);
    Some((version, meta, slot.freeze()))
}

async fn put(log: &LogIncarnation, key: u64, random: &mut RandomSource) {
    let expires_unix_ms =
        if random.chance(log.setup.ttl_rate) { log.world.unix_ms() + random.below(20_000) } else { 0 };
    let Some((version, meta, slot)) = allocate_version(log, key, parts(&log.setup, random), expires_unix_ms) else {
        return;
    };
    let limit = Limit::draw(random);
    log.world.event("put", [key, version, slot.len() as u64]);
    // Two concurrent writes of one version must behave as one put.
    let twice = random.chance(20_000).then(|| (meta.clone(), slot.clone()));
    let write = log.l3.write(meta, slot, limit.deadline_within(PATIENCE));
    let result = match twice {
        None => limit.run(write).await,
        Some((meta, slot)) => {
            let again = log.l3.write(meta, slot, limit.deadline_within(PATIENCE));
            limit.run(join(write, again)).await.map(|(first, second)| first.and(second))
        }
    };
    check_not_late(log, limit, "put", &result);
    let answer = outcome_code(&result);
    log.world.event("put answer", [key, version, answer]);
    log.world.count(counter_name("put", answer), 1);
    let acked = matches!(result, Some(Ok(()))).then(|| log.world.now_ms());
    log.model.lock().put_ends(version, acked);
    if version % PUTS_PER_BOUND_CHECK == 0 {
        check_page_bound(log);
    }
}

/// Checks the bound of pages, and counts the checks at which the log reclaims segments for it.
pub(super) fn check_page_bound(log: &LogIncarnation) {
    let stats = log.l3.stats();
    // The smallest bound reserves half of its pages for those to come.
    log.world.count("checks at the bound of pages", u64::from(stats.pages > stats.pages_max / 2));
    if stats.pages > stats.pages_max {
        log.world.violate(format!("the index has {} pages, more than its bound of {}", stats.pages, stats.pages_max));
    }
}

/// Checks that a request without a limit completes in time on a reliable device.
fn check_not_late<T>(log: &LogIncarnation, limit: Limit, operation: &str, result: &Option<Result<T, L3Error>>) {
    let late = matches!(result, Some(Err(L3Error::Deadline(_)))) && matches!(limit, Limit::None);
    if late && log.setup.profile.is_reliable() {
        log.world.violate(format!("a {operation} took longer than {} s on a reliable device", PATIENCE.as_secs()));
    }
}

fn outcome_code<T>(result: &Option<Result<T, L3Error>>) -> u64 {
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

fn counter_name(operation: &'static str, code: u64) -> &'static str {
    match (operation, code) {
        ("put", 0) => "puts acknowledged",
        ("get", 0) => "gets answered",
        ("forget", 0) => "forgets acknowledged",
        (_, 1) => "cancelled",
        (_, 2) => "deadlines passed",
        (_, 4) => "out of memory",
        (_, 6) => "log stopped",
        _ => "refused with an error",
    }
}

async fn get(log: &LogIncarnation, key: u64, random: &mut RandomSource) {
    let limit = Limit::draw(random);
    let started = request_time(log);
    let id = page_id(key);
    let result = limit.run(log.l3.read(&id, limit.deadline_within(PATIENCE))).await;
    check_not_late(log, limit, "get", &result);
    let answer = outcome_code(&result);
    log.world.count(counter_name("get", answer), 1);
    let Some(Ok(Some((meta, slot)))) = result else {
        log.world.event("get", [key, 0, answer]);
        return;
    };
    log.world.event("get", [key, meta.generation, 0]);
    log.world.count("hits", 1);
    check(log, key, started, &meta, &slot);
    if random.chance(100_000) {
        // The caller still holds the memory, so its bytes must not change.
        sleep(Duration::from_millis(random.below(200))).await;
        if let Err(problem) = payload::check(key, meta.generation, &slot) {
            log.world.violate(format!("memory changed while the caller held it: {problem}"));
        }
    }
}

fn request_time(log: &LogIncarnation) -> RequestTime {
    log.model.lock().request_time(log.world.unix_ms())
}

fn check(log: &LogIncarnation, key: u64, started: RequestTime, meta: &PageMeta, payload: &[u8]) {
    let model = log.model.lock();
    let found = log.world.check_key(key, |suspect| model.check_found(key, meta.generation, started, suspect));
    let mut checked = found.and_then(|()| model.check_page(key, meta, payload));
    if checked.is_ok() && meta.token_ids != token_ids(key) {
        checked = Err(format!("key {key}: wrong token ids: {:?}", meta.token_ids));
    }
    if let Err(problem) = checked {
        drop(model);
        log.world.violate(format!("get: {problem}"));
    }
}

fn find(log: &LogIncarnation, key: u64) {
    let started = request_time(log);
    let found = log.l3.find(&page_id(key));
    log.world.event("find", [key, found.map_or(0, |entry| entry.generation), 0]);
    let Some(entry) = found else { return };
    let model = log.model.lock();
    let checked = log.world.check_key(key, |suspect| model.check_found(key, entry.generation, started, suspect));
    drop(model);
    if let Err(problem) = checked {
        log.world.violate(format!("lookup: {problem}"));
    }
}

async fn forget(log: &LogIncarnation, key: u64, random: &mut RandomSource) {
    let keys = draw_forgotten_keys(&log.setup, key, random);
    let ids: Vec<_> = keys.iter().map(|&key| page_id(key)).collect();
    let limit = Limit::draw(random);
    keys.iter().for_each(|&key| log.world.event("forget", [key, 0, 0]));
    let forgetting = log.model.lock().forget_begins(keys.clone());
    let result = limit.run(log.l3.forget(&ids, limit.deadline_within(PATIENCE))).await;
    check_not_late(log, limit, "forget", &result);
    let answer = outcome_code(&result);
    keys.iter().for_each(|&key| log.world.event("forget answer", [key, 0, answer]));
    log.world.count(counter_name("forget", answer), 1);
    log.world.count("namespaces forgotten", u64::from(answer == 0 && keys.len() > KEYS_FORGOTTEN_AT_ONCE));
    log.model.lock().forget_ends(forgetting, answer == 0);
}

/// Reads of expected pages around a recovery. Not always: reads count as uses, and used pages are
/// copied instead of evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpectedReads {
    None,
    After,
    /// Also during recovery: a reader may find a torn copy before recovery finds its original.
    DuringAndAfter,
}

impl ExpectedReads {
    pub(super) fn draw(random: &mut RandomSource) -> ExpectedReads {
        match random.below(4) {
            0 | 1 => ExpectedReads::None,
            2 => ExpectedReads::After,
            _ => ExpectedReads::DuringAndAfter,
        }
    }
}

/// Reads expected pages while recovery runs, if `reads` asks for it.
pub(super) async fn read_early(log: &LogIncarnation, expected: &[Expected], reads: ExpectedReads) {
    let read = async |expected: &Expected| {
        read_key(log, expected.key).await;
    };
    if reads == ExpectedReads::DuringAndAfter {
        stream::iter(expected).for_each_concurrent(READS_AT_ONCE, read).await;
    }
}

/// Checks after recovery that all expected versions are present, and intact if `reads` asks for it.
/// Skips unreliable devices, and pages that may have expired.
pub(super) async fn check_expected(
    log: &LogIncarnation,
    expected: &[Expected],
    beyond_index: u64,
    reads: ExpectedReads,
) {
    if !log.setup.profile.is_reliable() {
        return log.world.forgive("forgiven: durable pages of failing devices", expected.len() as u64);
    }
    if beyond_index > 0 {
        return log.world.forgive("forgiven: durable pages of a full index", expected.len() as u64);
    }
    for Expected { key, version } in expected {
        let expires = log.model.lock().expires_unix_ms(*version);
        // The log may treat a page as expired up to a second early.
        if expires != 0 && expires <= log.world.unix_ms() + 1000 {
            continue;
        }
        let found = match reads {
            ExpectedReads::None => log.l3.find(&page_id(*key)).map(|entry| entry.generation),
            _ if log.model.lock().may_be_torn(*version) => continue,
            _ => {
                log.world.count("durable pages read", 1);
                read_key(log, *key).await
            }
        };
        log.world.count("durable pages checked", 1);
        let other = found.is_some_and(|found| found < *version) && log.setup.keep_percent > 0;
        if found != Some(*version) && !other {
            log.world.count("pages lost", 1);
            log.world.violate(format!("key {key}: version {version} was durable, and the log has {found:?}"));
        }
    }
}

fn administer(log: &LogIncarnation, random: &mut RandomSource) {
    match random.below(8) {
        0 => log.l3.scrub_now(),
        1 | 2 => {
            let namespace = namespace_id(random.below(NAMESPACES));
            let bytes = if random.chance(500_000) { u64::MAX } else { random.below(4 * log.setup.segment_bytes) };
            log.world.event("quota", [namespace.0[0].into(), bytes, 0]);
            log.l3.set_quota(namespace, bytes);
        }
        turn => {
            let ids: Vec<_> = (0..random.between(1, 4)).map(|_| page_id(draw_key(&log.setup, random))).collect();
            let pin = [Pin::None, Pin::Soft, Pin::Hard][random.below(3) as usize];
            let held = if turn == 3 { 0 } else { log.l3.pin(&ids, pin) };
            log.l3.touch(&ids);
            log.world.event("pin", [ids.len() as u64, held as u64, 0]);
            log.world.count("pages pinned", if pin == Pin::None { 0 } else { held as u64 });
        }
    }
    let stats = log.l3.stats();
    if stats.pinned_bytes > stats.bytes_capacity / 4 {
        log.world.violate(format!("{} bytes are pinned, more than a quarter of the capacity", stats.pinned_bytes));
    }
}

pub(super) fn release_all_pins(log: &LogIncarnation) {
    let ids: Vec<_> = (0..log.setup.keys).map(page_id).collect();
    log.l3.pin(&ids, Pin::None);
    let left = log.l3.stats().pinned_bytes;
    if left != 0 {
        log.world.violate(format!("{left} bytes are pinned after all pins were removed"));
    }
}

pub(super) async fn put_and_get(log: &LogIncarnation) -> Result<(), L3Error> {
    let Some((version, meta, slot)) = allocate_version(log, 0, vec![1000], 0) else {
        log.world.violate("the arena has no memory for a page after faults have stopped".into());
        return Ok(());
    };
    let put = log.l3.write(meta, slot, Limit::None.deadline_within(PATIENCE)).await;
    let acked = put.is_ok().then(|| log.world.now_ms());
    log.model.lock().put_ends(version, acked);
    put?;
    match log.l3.read(&page_id(0), Limit::None.deadline_within(PATIENCE)).await? {
        Some((meta, _)) if meta.generation == version => Ok(()),
        other => {
            let found = other.map(|(meta, _)| meta.generation);
            log.world.violate(format!("version {version} was put and {found:?} was read after faults have stopped"));
            Ok(())
        }
    }
}

pub(super) async fn read_all_keys(log: &LogIncarnation) {
    for key in 0..log.setup.keys {
        if let Err(error) = try_read_key(log, key).await {
            log.world.violate(format!("reading key {key} fails after faults have stopped: {error}"));
        }
    }
}

/// Reads a page and checks it. Returns its version, or `None` if it is not there.
async fn try_read_key(log: &LogIncarnation, key: u64) -> Result<Option<u64>, L3Error> {
    let started = request_time(log);
    let found = log.l3.read(&page_id(key), Limit::None.deadline_within(PATIENCE)).await?;
    Ok(found.map(|(meta, slot)| {
        check(log, key, started, &meta, &slot);
        meta.generation
    }))
}

/// Reads a page of a device that may fail.
async fn read_key(log: &LogIncarnation, key: u64) -> Option<u64> {
    try_read_key(log, key).await.ok().flatten()
}
