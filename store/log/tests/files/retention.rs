//! Pages that a full log retains: used ones, pinned ones, those within a quota. And expiry.

use crate::common::*;
use larder_format::{NamespaceId, PageMeta};
use larder_log::{L3Options, NamespacePages, Pin};
use larder_runtime::Clock;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn used_pages_outlive_unused_ones() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 12, &arena).await;
    let hot: Vec<u32> = (0..20).collect();
    for &n in &hot {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    let mut hits = 0;
    // Unused traffic of ten times the capacity.
    for n in 1000..3000 {
        put(&l3, &arena, n, 1, 60_000).await;
        hits += u32::from(get(&l3, hot[n as usize % hot.len()]).await.is_some());
    }
    let stats = l3.stats();
    assert!(hits > 1900, "{hits} of 2000 hits, {stats:?}");
    assert!(stats.copied_forward_pages > 100, "{stats:?}");
    assert!(stats.copied_forward_bytes < stats.written_bytes, "copies are bounded: {stats:?}");
    assert_eq!((stats.corrupt, stats.io_errors), (0, 0));
    l3.close().await;
    let (l3, _) = open(dir.path(), 12, &arena).await;
    assert_eq!(get(&l3, hot[0]).await, Some(1), "it is found in its new place");
    l3.close().await;
    drop(l3);
    assert_eq!(arena.used(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keep_percent_zero_evicts_the_oldest() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open_with(L3Options { keep_percent: 0, ..options(dir.path(), 12) }, &arena).await;
    put(&l3, &arena, 0, 1, 60_000).await;
    for n in 1000..1400 {
        put(&l3, &arena, n, 1, 60_000).await;
        get(&l3, 0).await;
    }
    assert_eq!((get(&l3, 0).await, l3.stats().copied_forward_pages), (None, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_page_has_the_time_of_its_departure() {
    let dir = temp();
    let arena = arena();
    // The seed fixes the places of pages in the table of departures.
    let (l3, _) = open_with(L3Options { keep_percent: 0, seed: Some(1), ..options(dir.path(), 12) }, &arena).await;
    put(&l3, &arena, 0, 1, 60_000).await;
    // The log takes the time every 500 ms.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = Clock::system().now_unix_ms();
    let mut last = 1000;
    while get(&l3, 0).await.is_some() {
        assert!(last < 3000, "the page is never evicted");
        put(&l3, &arena, last, 1, 60_000).await;
        last += 1;
    }
    let at = l3.departed_unix_ms(&id(0)).expect("the log knows its departure");
    assert!(at + 2000 >= before && at <= Clock::system().now_unix_ms(), "{at}, not after {before}");
    assert_eq!((l3.departed_unix_ms(&id(last - 1)), l3.departed_unix_ms(&id(9))), (None, None));
    let NamespacePages { namespace, pages, bytes } = l3.namespaces(9)[0];
    assert!(namespace == NamespaceId([3; 32]) && pages > 100 && bytes > pages * 60_000, "{pages} pages, {bytes} bytes");
    assert_eq!((l3.namespaces(9).len(), l3.namespaces(0).len()), (1, 0));
    l3.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_page_stays_until_unpinned() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 12, &arena).await;
    put(&l3, &arena, 7, 1, 60_000).await;
    assert_eq!(l3.pin(&[id(7), id(8)], Pin::Hard), 1, "the other one is not there");
    for n in 1000..1600 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    assert!(l3.find(&id(7)).is_some() && l3.stats().pinned_bytes > 0);
    assert_eq!((l3.pin(&[id(7)], Pin::None), l3.stats().pinned_bytes), (1, 0));
    for n in 2000..3200 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    assert!(l3.find(&id(7)).is_none(), "an unpinned page without readers is evicted");
    // Pins beyond a quarter of the log are refused.
    let all: Vec<_> = (3000..3200).map(id).filter(|id| l3.find(id).is_some()).collect();
    let held = l3.pin(&all, Pin::Hard);
    assert!(held > 0 && held * 65_536 <= 12 * MIB as usize / 4, "{held} of {}", all.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespace_never_exceeds_its_quota() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 12, &arena).await;
    l3.set_quota(NamespaceId([3; 32]), MIB);
    for n in 0..100 {
        put(&l3, &arena, n, 1, 60_000).await;
        assert!(l3.stats().bytes_used <= MIB, "{:?}", l3.stats());
    }
    assert_eq!(get(&l3, 99).await, Some(1), "the newest is there");
    assert!(l3.stats().pages >= 12);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_page_is_a_miss_also_after_restart() {
    let dir = temp();
    let arena = arena();
    let at = |unix_ms| L3Options { clock: Clock::at(unix_ms), ..options(dir.path(), 8) };
    let (l3, _) = open_with(at(1_000_000), &arena).await;
    for (n, expires_unix_ms) in [(1, 1_600_000), (2, 0), (3, 999_999)] {
        let (meta, slot) = page(&arena, n, 1, 10_000);
        l3.write(larder_format::PageMeta { expires_unix_ms, ..meta }, slot, deadline()).await.unwrap();
    }
    assert_eq!((get(&l3, 1).await, get(&l3, 2).await, get(&l3, 3).await), (Some(1), Some(1), None));
    l3.close().await;
    let (l3, report) = open_with(at(1_700_000), &arena).await;
    assert_eq!((get(&l3, 1).await, get(&l3, 2).await), (None, Some(1)));
    assert_eq!(report.pages, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_forward_without_memory_does_not_stall_writers() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 6, &arena).await;
    let mut hot = 0..400;
    for n in hot.clone() {
        put(&l3, &arena, n, 1, 4096).await;
    }
    for n in hot.clone() {
        get(&l3, n).await;
    }
    let found = hot.all(|n| l3.find(&id(n)).is_some());
    // Only the writers have memory.
    let (meta, payload) = page(&arena, 1000, 1, 60_000);
    let mut taken = Vec::new();
    while let Some(slot) = arena.allocate(4096) {
        taken.push(slot);
    }
    // One deadline for all. Copies that each waited for memory would take minutes.
    let deadline = deadline();
    for n in 1000..1060 {
        let meta = PageMeta { id: id(n), ..meta.clone() };
        l3.write(meta, payload.clone(), deadline).await.unwrap();
    }
    let stats = l3.stats();
    assert!(found && stats.evicted_pages > 100 && stats.copied_forward_pages == 0, "{stats:?}");
}
