//! Recovery: footers, reads and writes during the scan, lack of memory.

use crate::common::*;
use larder_log::L3;
use larder_memory::Arena;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Opens a log of 12 segments and puts 120 pages. The full segments have footers.
async fn filled(dir: &Path, arena: &Arc<Arena>) -> L3 {
    let (l3, _) = open(dir, 12, arena).await;
    for n in 0..120 {
        put(&l3, arena, n, 1, 60_000).await;
    }
    eventually("footers are written in the background", || l3.stats().footers_written >= 7).await;
    l3
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_segments_are_recovered_from_footers() {
    let dir = temp();
    let arena = arena();
    let l3 = filled(dir.path(), &arena).await;
    let gone: Vec<_> = (10..20).map(id).collect();
    l3.forget(&gone, deadline()).await.unwrap();
    l3.close().await;
    let (l3, report) = open(dir.path(), 12, &arena).await;
    assert!(report.segments_by_footer >= 7 && report.segments_by_footer <= report.segments, "{report:?}");
    assert_eq!((report.pages, report.torn_records), (110, 0), "{report:?}");
    for n in 0..120 {
        assert_eq!(get(&l3, n).await, (!(10..20).contains(&n)).then_some(1), "page {n}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_footer_loses_no_page_and_is_rewritten() {
    let dir = temp();
    let arena = arena();
    filled(dir.path(), &arena).await.close().await;
    for path in segments(dir.path()) {
        // Damages the table and the footer block.
        flip(&path, MIB - 4096 - 200);
        flip(&path, MIB - 4096 + 10);
    }
    let (l3, report) = open(dir.path(), 12, &arena).await;
    assert_eq!((report.pages, report.segments_by_footer), (120, 0), "{report:?}");
    for n in 0..120 {
        assert_eq!(get(&l3, n).await, Some(1));
    }
    // Footers are written anew, so the next start is fast again.
    eventually("footers again", || l3.stats().footers_written >= 7).await;
    l3.close().await;
    let (_, report) = open(dir.path(), 12, &arena).await;
    assert!(report.segments_by_footer >= 7, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_footer_of_another_life_or_segment_is_not_believed() {
    let dir = temp();
    let arena = arena();
    filled(dir.path(), &arena).await.close().await;
    let files = segments(dir.path());
    let last_quarter = |path: &Path| {
        let mut bytes = vec![0; 256 << 10];
        std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, MIB - (256 << 10)).unwrap();
        bytes
    };
    // The tail of one segment overwrites that of another, as a misdirected write would.
    let misdirected = last_quarter(&files[2]);
    let file = std::fs::OpenOptions::new().write(true).open(&files[3]).unwrap();
    file.write_all_at(&misdirected, MIB - (256 << 10)).unwrap();
    let (l3, _) = open(dir.path(), 12, &arena).await;
    let mut hits = 0;
    for n in 0..120 {
        hits += u32::from(get(&l3, n).await.is_some());
    }
    assert!((110..120).contains(&hits), "only the pages under the misdirected write are lost: {hits}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_served_during_recovery() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 200, &arena).await;
    for n in 0..1500 {
        put(&l3, &arena, n, 1, 100_000).await;
    }
    l3.close().await;
    drop(l3);
    for path in segments(dir.path()) {
        // Without footers the scan takes longer.
        flip(&path, MIB - 4096 + 10);
    }
    let l3 = L3::open(options(dir.path(), 200), arena.clone()).await.unwrap();
    let mut early = 0;
    while l3.recovery().report.is_none() {
        // Recovery finds the newest pages first.
        if l3.find(&id(1499)).is_some() {
            assert_eq!(get(&l3, 1499).await, Some(1));
            early += u32::from(l3.recovery().report.is_none());
        }
        tokio::task::yield_now().await;
    }
    assert!(early > 0, "read while the scan ran");
    let (meta, slot) = page(&arena, 5000, 1, 1000);
    l3.write(meta, slot, deadline()).await.unwrap();
    assert_eq!((get(&l3, 5000).await, get(&l3, 0).await), (Some(1), Some(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_and_forgets_wait_for_recovery() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 100, &arena).await;
    for n in 0..700 {
        put(&l3, &arena, n, 1, 100_000).await;
    }
    l3.close().await;
    drop(l3);
    let l3 = L3::open(options(dir.path(), 100), arena.clone()).await.unwrap();
    // The oldest page, which recovery finds last.
    assert_eq!(l3.forget(&[id(0)], deadline()).await.unwrap(), 1);
    put(&l3, &arena, 1, 2, 1000).await;
    assert_eq!((get(&l3, 0).await, get(&l3, 1).await), (None, Some(2)));
    l3.close().await;
    let (l3, _) = open(dir.path(), 100, &arena).await;
    assert_eq!((get(&l3, 0).await, get(&l3, 1).await, get(&l3, 2).await), (None, Some(2), Some(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_waits_for_memory() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 4, &arena).await;
    put(&l3, &arena, 1, 1, 5_000).await;
    l3.close().await;
    let mut taken = Vec::new();
    while let Some(slot) = arena.allocate(arena.largest_free()).filter(|slot| !slot.is_empty()) {
        taken.push(slot);
    }
    let again = options(dir.path(), 4);
    let shared = arena.clone();
    let opening = tokio::spawn(async move { L3::open(again, shared).await });
    // Long enough to need memory, and shorter than the time limit for it.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert!(!opening.is_finished(), "there is no memory to read a header into");
    drop(taken);
    let l3 = opening.await.unwrap().unwrap();
    l3.recovered().await.unwrap();
    assert_eq!(get(&l3, 1).await, Some(1));
}
