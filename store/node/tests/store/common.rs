//! Stores on temporary directories, and pages whose bytes follow from their number.

use larder_format::{NamespaceId, PageId, PageKey, chunk_crcs};
use larder_log::{L3, L3Options};
use larder_memory::Arena;
use larder_node::sim::{Clock, Devices, Page, Store};
use larder_node::{L3Device, NodeOptions};
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const PAGE: usize = 256 << 10;
/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn options() -> NodeOptions {
    NodeOptions { l2_bytes: 32 << 20, seed: Some(1), ..NodeOptions::default() }
}

pub fn soon() -> Instant {
    tokio::time::Instant::now().into_std() + PATIENCE
}

pub fn id(number: u32) -> PageId {
    PageId { namespace: NamespaceId([7; 32]), key: PageKey::chain(None, &[number]) }
}

pub fn bytes(number: u32) -> Vec<u8> {
    (0..PAGE).map(|at| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8).collect()
}

pub fn without_l3(options: NodeOptions) -> Store {
    let arena = Arena::new(options.arena_bytes() as usize).unwrap();
    Store::new(&options, arena, Devices::default(), Clock::at(1_000_000), 1)
}

/// Epoch of the next store. Grows like that of a node, so that generations never repeat.
static EPOCH: AtomicU64 = AtomicU64::new(1);

/// Opens a store with a log of `device_bytes` in each of `dirs`. Returns the logs too.
pub async fn with_logs(options: &NodeOptions, dirs: &[PathBuf], device_bytes: u64) -> (Store, Vec<L3>) {
    let arena = Arena::new(options.arena_bytes() as usize).unwrap();
    let mut logs = Vec::new();
    for dir in dirs {
        let l3 = L3::open(L3Options::new(dir, device_bytes), arena.clone()).await.unwrap();
        l3.recovered().await.unwrap();
        logs.push((L3Device { dir: dir.clone(), bytes: device_bytes }, Ok(l3)));
    }
    let handles = logs.iter().flat_map(|(_, l3)| l3).cloned().collect();
    let epoch = EPOCH.fetch_add(1, Ordering::Relaxed);
    (Store::new(options, arena, Devices::of(logs).unwrap(), Clock::system(), epoch << 32), handles)
}

pub async fn with_log(options: &NodeOptions, dir: &Path) -> (Store, L3) {
    let (store, mut logs) = with_logs(options, &[dir.to_path_buf()], 128 << 20).await;
    (store, logs.remove(0))
}

/// Puts pages, and opens the store again: only its log has them.
pub async fn with_pages_on_l3(dir: &Path, numbers: Range<u32>) -> (Store, L3) {
    let (store, _) = with_log(&options(), dir).await;
    for number in numbers {
        put(&store, number).await;
    }
    store.close(soon()).await;
    drop(store);
    with_log(&options(), dir).await
}

/// Temporary directory on a real file system: `/tmp` is often in memory, without direct I/O.
pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// Reservation of a page with one part.
pub fn reserved(number: u32) -> Reserved {
    Reserved::first(id(number).key, vec![PAGE as u32])
}

/// Puts a page with a time to live. Returns `Err` if the reservation is refused.
pub fn put_for(store: &Store, number: u32, ttl_ms: u64) -> Result<CommitOutcome, ReserveOutcome> {
    let put = store.reserve(id(number), Reserved { ttl_ms, ..reserved(number) })?;
    let mut part = put.take_part(0, PAGE).unwrap();
    part.copy_from_slice(&bytes(number));
    assert!(put.land(0, part, chunk_crcs(&bytes(number)).collect()));
    Ok(store.puts().commit(&put))
}

pub async fn put(store: &Store, number: u32) {
    let deadline = soon();
    loop {
        match put_for(store, number, 0) {
            Err(ReserveOutcome::Busy) => {
                assert!(tokio::time::Instant::now().into_std() < deadline, "page {number}: the store stays busy");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            answer => return assert_eq!(answer, Ok(CommitOutcome::Stored), "page {number}"),
        }
    }
}

pub async fn get(store: &Store, number: u32) -> Option<TierCode> {
    let (page, tier) = store.tiers().get(&id(number), soon()).await?;
    check(&page, number);
    Some(tier)
}

pub fn check(page: &Arc<Page>, number: u32) {
    assert!(page.id() == id(number) && *page.payload == *bytes(number), "page {number} has other bytes");
}

pub fn figure(store: &Store, pointer: &str) -> u64 {
    let status = store.status();
    status.pointer(pointer).and_then(|value| value.as_u64()).unwrap_or_else(|| panic!("no {pointer} in {status}"))
}

pub async fn settles(store: &Store, pointer: &str, value: u64) {
    eventually(&format!("{pointer} is {value}"), store, || figure(store, pointer) == value).await;
}

/// Polls until `condition` holds. Panics with the store's status if it does not within
/// [`PATIENCE`].
pub async fn eventually(condition_name: &str, store: &Store, mut condition: impl FnMut() -> bool) {
    let deadline = soon();
    while !condition() {
        let now = tokio::time::Instant::now().into_std();
        assert!(now < deadline, "{condition_name}: not in time: {}", store.status());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
