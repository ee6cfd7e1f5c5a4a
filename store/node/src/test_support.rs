//! Stores and puts of this crate's tests.

use crate::devices::Devices;
use crate::options::{L3Device, NodeOptions};
use crate::puts::Put;
use crate::store::Store;
use larder_format::{PageId, chunk_crcs};
use larder_log::{L3, L3Error, L3Options};
use larder_memory::Arena;
use larder_runtime::{Clock, now};
use larder_wire::{CommitOutcome, Reserved};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline of a step. One that takes longer hangs, however busy the machine is.
pub(crate) fn soon() -> Instant {
    now() + Duration::from_secs(60)
}

pub(crate) fn options(l2_bytes: u64) -> NodeOptions {
    NodeOptions { l2_bytes, in_flight_bytes: Some(1 << 20), seed: Some(1), ..NodeOptions::default() }
}

/// A store without L3 whose L2 has 1 MiB.
pub(crate) fn store(clock: Clock) -> Store {
    let options = options(1 << 20);
    let arena = Arena::new(options.arena_bytes() as usize).unwrap();
    Store::new(&options, arena, Devices::default(), clock, 1)
}

/// Opens and recovers the log of a device of 64 MiB.
pub(crate) async fn open_log(dir: &Path, arena: &Arc<Arena>) -> (L3Device, Result<L3, L3Error>) {
    let bytes = 64 << 20;
    let l3 = L3::open(L3Options::new(dir, bytes), arena.clone()).await.unwrap();
    l3.recovered().await.unwrap();
    (L3Device { dir: dir.to_path_buf(), bytes }, Ok(l3))
}

/// A page of one part without a parent, to reserve.
pub(crate) fn reserved(id: PageId, bytes: usize) -> Reserved {
    Reserved::first(id.key, vec![bytes as u32])
}

/// Lands the only part of a put.
pub(crate) fn land(put: &Put, content: &[u8]) {
    let mut part = put.take_part(0, content.len()).unwrap();
    part.copy_from_slice(content);
    let crcs = chunk_crcs(&part).collect();
    assert!(put.land(0, part, crcs));
}

/// Reserves a page and lands its only part.
pub(crate) fn open_put(store: &Store, id: PageId, content: &[u8]) -> Arc<Put> {
    let put = store.reserve(id, reserved(id, content.len())).unwrap();
    land(&put, content);
    put
}

pub(crate) fn put(store: &Store, id: PageId, content: &[u8]) {
    assert_eq!(store.puts().commit(&open_put(store, id, content)), CommitOutcome::Stored);
}
