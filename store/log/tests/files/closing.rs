//! A clean stop keeps every page that readers could find when it began.

use crate::common::device::GatedDevice;
use crate::common::*;
use larder_log::L3;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A reclaim waits behind the footers of sealed segments. The background task must not begin it
/// once the log is closed: it would overwrite the oldest segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_a_log_evicts_no_page() {
    const SEGMENTS: u64 = 6;
    const PAGES_PER_SEGMENT: u32 = 15;
    let dir = temp();
    let arena = arena();
    let device = GatedDevice::open(dir.path(), &arena);
    device.footers.send_replace(false);
    let l3 = L3::open_on(device.clone(), options(dir.path(), SEGMENTS), arena.clone()).await.unwrap();
    l3.recovered().await.unwrap();
    // Without syncs no footer is due, so the background task prepares all segments.
    device.syncs.send_replace(false);
    let mut pages = 0;
    while l3.stats().segments_prepared < SEGMENTS {
        put(&l3, &arena, pages, 1, 60_000).await;
        pages += 1;
        // The last segment must not open before the footers are held back.
        if (pages + 1).is_multiple_of(PAGES_PER_SEGMENT) {
            let prepared = u64::from(pages / PAGES_PER_SEGMENT) + 2;
            eventually("the next segment", || l3.stats().segments_prepared >= prepared).await;
        }
    }
    device.syncs.send_replace(true);
    eventually("a footer", || device.footers_waiting.load(Ordering::SeqCst) > 0).await;
    device.syncs.send_replace(false);
    // The last segment opens, and the reclaim of the first one is queued behind the footers.
    while l3.stats().segments_used < SEGMENTS {
        put(&l3, &arena, pages, 1, 60_000).await;
        pages += 1;
    }
    assert_eq!((l3.stats().pages, l3.stats().evicted_pages), (u64::from(pages), 0));
    let closing = tokio::spawn({
        let l3 = l3.clone();
        async move { l3.close().await }
    });
    while l3.read(&id(0), deadline()).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    device.footers.send_replace(true);
    eventually("a footer", || l3.stats().footers_written > 0).await;
    // Time for the background task to begin the reclaim, if it does.
    tokio::time::sleep(Duration::from_millis(100)).await;
    device.syncs.send_replace(true);
    closing.await.unwrap();
    drop(l3);

    let (l3, report) = open(dir.path(), SEGMENTS, &arena).await;
    assert_eq!(report.pages, u64::from(pages), "{report:?}");
    l3.close().await;
}
