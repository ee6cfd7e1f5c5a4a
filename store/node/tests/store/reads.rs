//! Reads from L3, and what may happen while they are under way.

use crate::common::*;
use futures::future::join_all;
use larder_wire::TierCode;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn however_many_ask_for_a_page_it_is_read_once() {
    let dir = directory();
    let (store, _) = with_log(&options(), dir.path()).await;
    for number in 0..20 {
        put(&store, number).await;
    }
    store.close(soon()).await;
    drop(store);
    let (store, l3) = with_log(&options(), dir.path()).await;
    for number in 0..20 {
        let gets = (0..32).map(|_| async { get(&store, number).await });
        assert!(join_all(gets).await.iter().all(Option::is_some));
    }
    assert_eq!(l3.stats().reads, 20);
    assert_eq!(figure(&store, "/tiers/l2/pages"), 20);
    assert_eq!(get(&store, 0).await, Some(TierCode::L2));
}

#[tokio::test]
async fn who_gives_up_waiting_does_not_spoil_it_for_others() {
    let dir = directory();
    let (store, _) = with_log(&options(), dir.path()).await;
    put(&store, 1).await;
    store.close(soon()).await;
    drop(store);
    let (store, _) = with_log(&options(), dir.path()).await;
    let page = id(1);
    let mut first = Box::pin(store.get(&page, soon()));
    assert!(futures::poll!(&mut first).is_pending());
    let second = store.get(&page, soon());
    drop(first);
    check(&second.await.unwrap().0, 1);
}

#[tokio::test]
async fn a_page_forgotten_while_it_is_read_does_not_come_back() {
    let dir = directory();
    let (store, _) = with_log(&options(), dir.path()).await;
    put(&store, 1).await;
    store.close(soon()).await;
    drop(store);
    let (store, _) = with_log(&options(), dir.path()).await;
    let page = id(1);
    let mut read = Box::pin(store.get(&page, soon()));
    assert!(futures::poll!(&mut read).is_pending());
    tokio::task::yield_now().await;
    assert!(futures::poll!(&mut read).is_pending(), "the device has been asked, and its answer not been taken yet");
    assert_eq!(store.forget(&[id(1)], soon()).await.unwrap(), 1);
    // Who asks now may not be answered by the read that began before.
    assert!(store.get(&id(1), soon()).await.is_none());
    // Asked for before it was forgotten, it may be answered; it may not stay.
    let _ = read.await;
    assert_eq!(store.locate(&id(1)), TierCode::Nowhere);
    put(&store, 1).await;
    assert_eq!(get(&store, 1).await, Some(TierCode::L2));
}

#[tokio::test]
async fn a_damaged_copy_in_dram_is_dropped_and_l3_answers() {
    let dir = directory();
    let (store, _) = with_log(&options(), dir.path()).await;
    put(&store, 1).await;
    settles(&store, "/tiers/writing", 0).await;
    let (page, _) = store.get(&id(1), soon()).await.unwrap();
    assert_eq!(store.recheck(&id(1)), 0, "it is whole");
    damage(&page);
    assert_eq!(store.recheck(&id(1)), 1);
    drop(page);
    assert_eq!(get(&store, 1).await, Some(TierCode::L3));
    assert_eq!(figure(&store, "/counters/pages_corrupt_l2"), 1);
}

#[tokio::test]
async fn the_scrub_finds_damage_that_nobody_reads() {
    let options = larder_node::NodeOptions { scrub_bytes_per_second: 1 << 30, ..options() };
    let store = without_l3(options);
    for number in 0..20 {
        put(&store, number).await;
    }
    let (page, _) = store.get(&id(13), soon()).await.unwrap();
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

/// Flips a bit of a page behind everybody's back, as failing memory would: its slot is unchangeable for all others.
fn damage(page: &larder_node::sim::Page) {
    let memory = std::fs::OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
    let address = page.payload.as_ptr() as u64 + 100;
    std::os::unix::fs::FileExt::write_at(&memory, &[page.payload[100] ^ 1], address).unwrap();
}
