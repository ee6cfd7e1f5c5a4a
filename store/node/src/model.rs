//! Thread models: the code of the node and of the log under
//! [shuttle](https://docs.rs/shuttle), which decides at each lock, atomic operation and wake-up
//! which thread runs next.
//!
//! The simulation has one thread, so everything between two awaits is atomic there. The models
//! check the sections that rely on locks instead. A model is a function that starts a few threads,
//! joins them, and asserts what must hold. [`explore`] runs it under many random schedules. A
//! thread that waits for ever fails the model as a deadlock.
//!
//! Each model has a negative control: with a fail point or a race point active, [`finds`] requires
//! that the model fails.
//!
//! ```text
//! cargo xtask ci --only threads
//! LARDER_MODEL_SCHEDULES=9999 cargo test --release -p larder-node --lib --features shuttle threads
//! ```
//!
//! A failure prints its schedule. `LARDER_MODEL_REPLAY=<schedule>` replays it in the named test.
//!
//! Time stands still in a model, so a wait that only its deadline ends is a deadlock too. Locks of
//! foyer, tokio and the arena are not modelled: each of their calls is one step.

mod device;
mod log;

use crate::devices::Devices;
use crate::options::{L3Device, NodeOptions};
use crate::policy::WritePolicy;
use crate::puts::Put;
use crate::store::Store;
pub(crate) use device::MemoryDevice;
use larder_format::{NamespaceId, PageId, PageKey, PageMeta, chunk_crcs};
use larder_log::{L3, L3Options};
use larder_memory::{Arena, Slot};
use larder_runtime::{Clock, fail, now};
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a page in the models of the node: one unit of the arena.
pub(crate) const PAGE: usize = 4096;
const ARENA_BYTES: usize = 16 << 20;
/// Schedules of one scheduler, per model.
const SCHEDULES: usize = 2000;
/// Preemptions that the first scheduler places at random. Most known races need one or two.
const PREEMPTIONS: usize = 3;
/// A schedule that takes more steps than this counts as endless.
const STEPS_MAX: usize = 100_000;
const SEED: u64 = 0x1a4d_e45e;

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs `model` under random schedules. Panics if one of them fails.
pub(crate) fn explore(model: fn(&Arc<Arena>)) {
    // Paused, and never driven: time stands still. Leaked, because its drop would fire the timers
    // that a failed execution left behind, and wake tasks that no longer exist.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _context = Box::leak(Box::new(runtime)).enter();
    let arena = Arena::new(ARENA_BYTES).unwrap();
    if let Ok(schedule) = std::env::var("LARDER_MODEL_REPLAY") {
        return shuttle::replay(move || model(&arena), &schedule);
    }
    let schedules = variable("LARDER_MODEL_SCHEDULES").unwrap_or(SCHEDULES);
    let seed = variable("LARDER_MODEL_SEED").unwrap_or(SEED);
    // The more likely one to find a rare race comes first: a control ends with its first failure.
    run(PctScheduler::new_from_seed(seed, PREEMPTIONS, schedules), model, &arena);
    run(RandomScheduler::new_from_seed(seed, schedules), model, &arena);
}

fn run(scheduler: impl Scheduler + 'static, model: fn(&Arc<Arena>), arena: &Arc<Arena>) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.max_steps = shuttle::MaxSteps::FailAfter(STEPS_MAX);
    config.silence_warnings = true;
    let arena = arena.clone();
    Runner::new(scheduler, config).run(move || model(&arena));
}

/// Requires that `model` fails while the fail point or race point is active.
pub(crate) fn finds(point: &'static str, model: fn(&Arc<Arena>)) {
    let outcome = catch_unwind(AssertUnwindSafe(|| fail::with(point, || explore(model))));
    assert!(outcome.is_err(), "the model does not find {point}");
}

pub(crate) fn soon() -> Instant {
    now() + Duration::from_secs(60)
}

pub(crate) fn id(number: u8) -> PageId {
    PageId { namespace: NamespaceId([1; 32]), key: PageKey([number; 32]) }
}

/// Runs a future as a thread of the model would.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    shuttle::future::block_on(work)
}

pub(crate) fn options(write_policy: WritePolicy) -> NodeOptions {
    NodeOptions {
        l2_bytes: 1 << 20,
        in_flight_bytes: Some(1 << 20),
        write_policy,
        seed: Some(1),
        ..NodeOptions::default()
    }
}

/// A node without L3.
pub(crate) fn store(arena: &Arc<Arena>) -> Arc<Store> {
    let options = options(WritePolicy::Through);
    Arc::new(Store::new(&options, arena.clone(), Devices::default(), Clock::at(1_000_000), 1))
}

/// Log options with the smallest segments.
pub(crate) fn log_options(segments: u64) -> L3Options {
    const SEGMENT: u64 = 1 << 20;
    L3Options {
        segment_bytes: SEGMENT,
        clock: Clock::at(1_000_000),
        seed: Some(1),
        ..L3Options::new("model", segments * SEGMENT + 16_384)
    }
}

/// A node over one log in memory.
pub(crate) fn store_with_log(arena: &Arc<Arena>, options: &NodeOptions) -> (Arc<Store>, L3) {
    let log = log_options(4);
    let bytes = log.capacity_bytes;
    let l3 = block_on(async {
        let l3 = L3::open_on(MemoryDevice::new(), log, arena.clone()).await.unwrap();
        l3.recovered().await.unwrap();
        l3
    });
    let devices = Devices::of(vec![(L3Device { dir: "model".into(), bytes }, Ok(l3.clone()))]).unwrap();
    (Arc::new(Store::new(options, arena.clone(), devices, Clock::at(1_000_000), 100)), l3)
}

/// A page that L3 can write without a put.
pub(crate) fn page(arena: &Arc<Arena>, number: u8, generation: u64, bytes: usize) -> (PageMeta, Slot) {
    let mut slot = arena.allocate(bytes).expect("the arena is large enough for a model");
    slot.fill(number);
    let meta = PageMeta::describe(id(number), PageKey::NONE, 0, vec![bytes as u32], &slot);
    (PageMeta { generation, ..meta }, slot.freeze())
}

/// A page of one part, to reserve.
pub(crate) fn reserved(number: u8) -> Reserved {
    Reserved::first(id(number).key, vec![PAGE as u32])
}

/// Reserves a page of one part.
pub(crate) fn reserve(store: &Store, number: u8) -> Result<Arc<Put>, ReserveOutcome> {
    store.reserve(id(number), reserved(number))
}

/// Lands the part of a put, filled with `byte`.
pub(crate) fn land(put: &Put, byte: u8) {
    let mut part = put.take_part(0, PAGE).unwrap();
    part.fill(byte);
    let crcs = chunk_crcs(&part).collect();
    assert!(put.land(0, part, crcs));
}

/// Reserves a page and lands its part, filled with `byte`.
pub(crate) fn open_put(store: &Store, number: u8, byte: u8) -> Arc<Put> {
    let put = reserve(store, number).unwrap_or_else(|refusal| panic!("page {number}: {refusal:?}"));
    land(&put, byte);
    put
}

pub(crate) fn put(store: &Store, number: u8, byte: u8) {
    assert_eq!(store.puts().commit(&open_put(store, number, byte)), CommitOutcome::Stored);
}

/// Every race point in the source has a negative control in a model.
#[test]
fn threads_have_a_control_for_each_race_point() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut points = BTreeSet::new();
    let mut controls = BTreeSet::new();
    let mut folders = vec![root.join("src"), root.join("../log/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(path).unwrap();
            let named = |call: &str| {
                text.split(call)
                    .skip(1)
                    .filter_map(|rest| Some(rest.split_once('"')?.0.to_string()))
                    .collect::<Vec<_>>()
            };
            points.extend(named(concat!("race_point!", "(\"")));
            controls.extend(named(concat!("finds", "(\"")));
        }
    }
    assert!(!points.is_empty());
    let missing: Vec<_> = points.difference(&controls).collect();
    assert!(missing.is_empty(), "no model finds {missing:?}");
}
