//! Reads from L3, and events that race with them.

use crate::common::*;
use futures::future::join_all;
use larder_wire::TierCode;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_readers_of_a_page_share_one_read() {
    let dir = directory();
    let (store, l3) = with_pages_on_l3(dir.path(), 0..20).await;
    for number in 0..20 {
        let gets = (0..32).map(|_| async { get(&store, number).await });
        assert!(join_all(gets).await.iter().all(Option::is_some));
    }
    assert_eq!(l3.stats().reads, 20);
    assert_eq!(figure(&store, "/tiers/l2/pages"), 20);
    assert_eq!(get(&store, 0).await, Some(TierCode::L2));
}

#[tokio::test]
async fn a_cancelled_reader_does_not_fail_the_others() {
    let dir = directory();
    let (store, _) = with_pages_on_l3(dir.path(), 1..2).await;
    let page = id(1);
    let mut first = Box::pin(store.tiers().get(&page, soon()));
    assert!(futures::poll!(&mut first).is_pending());
    let second = store.tiers().get(&page, soon());
    drop(first);
    check(&second.await.unwrap().0, 1);
}

#[tokio::test]
async fn a_page_forgotten_during_a_read_does_not_come_back() {
    let dir = directory();
    let (store, _) = with_pages_on_l3(dir.path(), 0..20).await;
    for number in 0..20 {
        let page = id(number);
        let mut read = Box::pin(store.tiers().get(&page, soon()));
        assert!(futures::poll!(&mut read).is_pending());
        tokio::task::yield_now().await;
        if futures::poll!(&mut read).is_ready() {
            // The system stopped this thread until the device had answered. Try another page.
            continue;
        }
        // The device has the request, and its result is not taken yet.
        assert_eq!(store.forget(&[page], soon()).await.unwrap(), 1);
        // A request that begins now must not join the read that began before the forget.
        assert!(store.tiers().get(&page, soon()).await.is_none());
        // The earlier request is concurrent with the forget: it may get the page, and L2 must not.
        let _ = read.await;
        assert_eq!(store.tiers().locate(&page), TierCode::Absent);
        put(&store, number).await;
        assert_eq!(get(&store, number).await, Some(TierCode::L2));
        return;
    }
    panic!("each of 20 reads ended before the forget");
}

#[tokio::test]
async fn a_damaged_copy_in_dram_is_dropped_and_l3_serves_the_page() {
    let dir = directory();
    let (store, _) = with_log(&options(), dir.path()).await;
    put(&store, 1).await;
    settles(&store, "/tiers/writes_in_flight", 0).await;
    let (page, _) = store.tiers().get(&id(1), soon()).await.unwrap();
    assert_eq!(store.tiers().recheck(&id(1)), 0, "it is intact");
    damage(&page);
    assert_eq!(store.tiers().recheck(&id(1)), 1);
    drop(page);
    assert_eq!(get(&store, 1).await, Some(TierCode::L3));
    assert_eq!(figure(&store, "/counters/pages_corrupt_l2"), 1);
}

#[tokio::test]
async fn the_scrub_finds_damage_before_a_reader_does() {
    let options = larder_node::NodeOptions { scrub_bytes_per_second: 1 << 30, ..options() };
    let store = without_l3(options);
    for number in 0..20 {
        put(&store, number).await;
    }
    let (page, _) = store.tiers().get(&id(13), soon()).await.unwrap();
    damage(&page);
    drop(page);
    let stop = tokio_util::sync::CancellationToken::new();
    let upkeep = store.upkeep(stop.clone());
    let watch = async {
        settles(&store, "/tiers/l2/scrub/passes", 1).await;
        stop.cancel();
    };
    tokio::join!(upkeep, watch);
    assert_eq!(figure(&store, "/tiers/l2/scrub/pages_dropped"), 1);
    assert!(get(&store, 13).await.is_none());
    for number in (0..20).filter(|number| *number != 13) {
        assert_eq!(get(&store, number).await, Some(TierCode::L2));
    }
}

/// Flips a bit of a page, as failing memory would. Goes through `/proc/self/mem`, because no safe
/// code can write to a sealed page.
fn damage(page: &larder_node::sim::Page) {
    let memory = std::fs::OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
    let address = page.payload.as_ptr() as u64 + 100;
    std::os::unix::fs::FileExt::write_at(&memory, &[page.payload[100] ^ 1], address).unwrap();
}
