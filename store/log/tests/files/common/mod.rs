//! Helpers of the L3 tests.
#![allow(dead_code)]

pub mod device;

use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
use larder_log::{L3, L3Options, RecoveryReport};
use larder_memory::{Arena, Slot};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn temp() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn arena() -> Arc<Arena> {
    Arena::new(32 << 20).unwrap()
}

pub fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

pub fn options(dir: &Path, segments: u64) -> L3Options {
    let capacity_bytes = segments * MIB + 16_384;
    L3Options { segment_bytes: MIB, ..L3Options::new(dir, capacity_bytes) }
}

pub async fn open(dir: &Path, segments: u64, arena: &Arc<Arena>) -> (L3, RecoveryReport) {
    open_with(options(dir, segments), arena).await
}

pub async fn open_with(options: L3Options, arena: &Arc<Arena>) -> (L3, RecoveryReport) {
    let l3 = L3::open(options, arena.clone()).await.unwrap();
    let report = l3.recovered().await.unwrap();
    (l3, report)
}

pub async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = deadline();
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn id(n: u32) -> PageId {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&n.to_le_bytes());
    PageId { namespace: NamespaceId([3; 32]), key: PageKey(key) }
}

/// Payload that is unique to one put of one page.
pub fn bytes_of(n: u32, generation: u64, len: usize) -> Vec<u8> {
    let mut state = u64::from(n) << 32 ^ generation ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub fn page(arena: &Arc<Arena>, n: u32, generation: u64, len: usize) -> (PageMeta, Slot) {
    let bytes = bytes_of(n, generation, len);
    let first = len.div_ceil(2);
    let parts = if len > 1 { vec![first as u32, (len - first) as u32] } else { vec![len as u32] };
    let mut meta = PageMeta::describe(id(n), PageKey([9; 32]), n, parts, &bytes);
    meta.generation = generation;
    let mut slot = arena.allocate(len).unwrap();
    slot.copy_from_slice(&bytes);
    (meta, slot.freeze())
}

pub async fn put(l3: &L3, arena: &Arc<Arena>, n: u32, generation: u64, len: usize) {
    let (meta, slot) = page(arena, n, generation, len);
    l3.write(meta, slot, deadline()).await.unwrap();
}

/// Reads a page, checks its bytes again, and returns its generation.
pub async fn get(l3: &L3, n: u32) -> Option<u64> {
    let (meta, slot) = l3.read(&id(n), deadline()).await.unwrap()?;
    assert_eq!(meta.id, id(n));
    assert!(slot[..] == bytes_of(n, meta.generation, slot.len())[..], "page {n} has other bytes than were put");
    Some(meta.generation)
}

/// Copies the files as a crash of the process would leave them.
pub fn copy_as_after_a_crash(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

pub fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.extension().is_some_and(|extension| extension == "seg"));
    found.sort();
    found
}

/// File and offset of the given bytes in the segments.
pub fn locate(dir: &Path, wanted: &[u8]) -> (PathBuf, u64) {
    for path in segments(dir) {
        let bytes = std::fs::read(&path).unwrap();
        if let Some(at) = bytes.windows(wanted.len()).position(|window| window == wanted) {
            return (path, at as u64);
        }
    }
    panic!("not on the device");
}

pub fn flip(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
    file.sync_all().unwrap();
}
