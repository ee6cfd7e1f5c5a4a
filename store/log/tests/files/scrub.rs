//! The scrub finds damage before a reader does, keeps its rate, and resumes after a restart.

use crate::common::*;
use larder_log::L3Options;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Options of a log that is scrubbed on request only: a first pass by itself would see some of the
/// pages.
fn quick(dir: &std::path::Path, bytes_per_second: u64) -> L3Options {
    let never = Duration::from_secs(u32::MAX.into());
    L3Options { scrub_bytes_per_second: bytes_per_second, scrub_interval: never, ..options(dir, 12) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scrub_drops_and_reports_damaged_pages() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open_with(quick(dir.path(), 1 << 30), &arena).await;
    for n in 0..100 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    let received = Arc::new(AtomicU32::new(0));
    let hears = received.clone();
    l3.on_damage(move |page| {
        assert!(page == id(40) || page == id(41));
        hears.fetch_add(1, Ordering::SeqCst);
    });
    for n in [40, 41] {
        let (file, at) = locate(dir.path(), &bytes_of(n, 1, 64));
        flip(&file, at + 50_000);
    }
    l3.scrub_now();
    eventually("a pass", || l3.scrub().passes == 1).await;
    let progress = l3.scrub();
    assert_eq!((progress.pages, progress.damaged, received.load(Ordering::SeqCst)), (100, 2, 2), "{progress:?}");
    assert!(l3.find(&id(40)).is_none() && l3.find(&id(41)).is_none() && l3.find(&id(42)).is_some());
    assert_eq!(l3.stats().corrupt, 2);
    l3.scrub_now();
    eventually("another pass", || l3.scrub().passes == 2).await;
    assert_eq!((l3.scrub().pages, l3.scrub().damaged), (98, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scrub_keeps_its_rate_and_resumes_after_restart() {
    let dir = temp();
    let arena = arena();
    // 6.4 MB at 512 KiB/s take about 12 s: the pass has not ended when the test closes the log.
    let (l3, _) = open_with(quick(dir.path(), 512 << 10), &arena).await;
    for n in 0..100 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    let began = Instant::now();
    l3.scrub_now();
    eventually("a part of a pass", || l3.scrub().bytes > 2 << 20).await;
    // All but the last step of at most 1 MiB kept the rate.
    assert!(began.elapsed() > Duration::from_secs(1), "{:?}", began.elapsed());
    l3.close().await;
    let before = l3.scrub();
    assert!(before.running && before.pages > 0);
    drop(l3);

    let (l3, _) = open_with(quick(dir.path(), 1 << 30), &arena).await;
    eventually("the rest of the pass", || l3.scrub().passes == 1).await;
    let after = l3.scrub();
    assert!(after.pages >= 100, "both parts together are all of it: {after:?}");
    assert!(after.pages < 100 + before.pages, "it did not begin anew: {before:?} {after:?}");
}
