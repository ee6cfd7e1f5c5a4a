//! Expiry of pages, pins and puts, on a clock that the test advances.

use crate::common::*;
use larder_node::sim::Presence;
use larder_wire::{CommitOutcome, PinKind, ReserveOutcome, TierCode};
use std::time::Duration;

#[tokio::test(start_paused = true)]
async fn an_expired_page_is_a_miss_and_may_be_put_again() {
    let store = without_l3(options());
    assert_eq!(put_for(&store, 1, 5000), Ok(CommitOutcome::Stored));
    assert_eq!(put_for(&store, 2, 0), Ok(CommitOutcome::Stored));
    tokio::time::advance(Duration::from_millis(4999)).await;
    assert_eq!(get(&store, 1).await, Some(TierCode::L2));
    assert_eq!(put_for(&store, 1, 0), Err(ReserveOutcome::Exists));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!((get(&store, 1).await, store.tiers().locate(&id(1))), (None, TierCode::Absent));
    assert_eq!(get(&store, 2).await, Some(TierCode::L2));
    assert_eq!(figure(&store, "/tiers/l2/pages"), 2, "the next tick removes it");
    store.tick();
    assert_eq!(figure(&store, "/tiers/l2/pages"), 1);
    assert_eq!(put_for(&store, 1, 0), Ok(CommitOutcome::Stored));
    assert_eq!(get(&store, 1).await, Some(TierCode::L2));
}

#[tokio::test(start_paused = true)]
async fn pins_and_idle_puts_expire_by_the_same_clock() {
    let store = without_l3(options());
    assert_eq!(put_for(&store, 1, 0), Ok(CommitOutcome::Stored));
    assert_eq!(store.pin(&[id(1), id(2)], PinKind::Soft, 3000, soon()).await, Ok(1));
    store.reserve(id(3), reserved(3)).unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let watch = async {
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert_eq!(figure(&store, "/tiers/l2/pinned_pages"), 1);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(figure(&store, "/tiers/l2/pinned_pages"), 0);
        assert!(matches!(store.puts().presence(&id(3)), Presence::Open(_)));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(figure(&store, "/puts_open"), 0);
        stop.cancel();
    };
    tokio::join!(store.upkeep(stop.clone()), watch);
}

#[tokio::test]
async fn a_page_that_expired_while_the_node_was_down_is_a_miss_and_may_be_put_again() {
    let dir = directory();
    let (store, _) = with_log(&options(), dir.path()).await;
    assert_eq!(put_for(&store, 1, 200), Ok(CommitOutcome::Stored));
    assert_eq!(put_for(&store, 2, 3_600_000), Ok(CommitOutcome::Stored));
    store.close(soon()).await;
    drop(store);
    // The time to live is on the system's clock, so only waiting ends it. More time does no harm.
    tokio::time::sleep(Duration::from_millis(250)).await;
    let (store, l3) = with_log(&options(), dir.path()).await;
    assert_eq!((get(&store, 1).await, get(&store, 2).await), (None, Some(TierCode::L3)));
    assert!(l3.find(&id(1)).is_none(), "L3 must not find it either");
    assert_eq!(put_for(&store, 1, 0), Ok(CommitOutcome::Stored));
    store.close(soon()).await;
}
