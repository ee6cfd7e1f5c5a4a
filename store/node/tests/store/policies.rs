//! Write policies, budgets, quotas and pins.

use crate::common::*;
use larder_format::NamespaceId;
use larder_log::{L3, L3Options};
use larder_memory::Arena;
use larder_node::sim::{Clock, Devices, Progress, Store};
use larder_node::{L3Device, NodeOptions, WritePolicy};
use larder_wire::{PinKind, ReserveOutcome, TierCode};
use std::path::Path;
use std::time::{Duration, Instant};

/// Capacity of L2 in pages of 256 KiB.
const L2_PAGES: u32 = 128;

fn with_policy(write_policy: WritePolicy) -> NodeOptions {
    NodeOptions { write_policy, ..options() }
}

async fn survivors(dir: &Path, numbers: std::ops::Range<u32>) -> Vec<u32> {
    let (store, _) = with_log(&options(), dir).await;
    let mut found = Vec::new();
    for number in numbers {
        if get(&store, number).await.is_some() {
            found.push(number);
        }
    }
    store.close(soon()).await;
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_stays_readable_while_it_moves_from_l2_to_l3() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        let dir = directory();
        let (store, _) = with_log(&with_policy(policy), dir.path()).await;
        for number in 0..2 * L2_PAGES {
            put(&store, number).await;
            // This page is about to leave L2.
            let old = number.saturating_sub(L2_PAGES);
            assert!(get(&store, old).await.is_some(), "{policy}: page {old} after {number}");
        }
        assert!(figure(&store, "/tiers/l2/bytes_used") <= 32 << 20);
        assert!(figure(&store, "/counters/pages_evicted_l2") > 0);
        store.close(soon()).await;
        drop(store);
        assert_eq!(survivors(dir.path(), 0..2 * L2_PAGES).await.len() as u32, 2 * L2_PAGES, "{policy}");
    }
}

#[tokio::test]
async fn write_back_defers_all_writes_until_the_store_closes() {
    let dir = directory();
    let (store, l3) = with_log(&with_policy(WritePolicy::Back), dir.path()).await;
    for number in 0..100 {
        put(&store, number).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!((l3.stats().writes, figure(&store, "/tiers/l2/dirty_pages")), (0, 100));
    store.close(soon()).await;
    assert_eq!((l3.stats().writes, figure(&store, "/tiers/l2/dirty_pages")), (100, 0));
    drop((store, l3));
    assert_eq!(survivors(dir.path(), 0..100).await.len(), 100);
}

#[tokio::test]
async fn close_aborts_open_puts_and_flushes_with_their_budget() {
    let dir = directory();
    let budget = NodeOptions { in_flight_bytes: Some(2 * PAGE as u64), ..with_policy(WritePolicy::Back) };
    let (store, l3) = with_log(&budget, dir.path()).await;
    for number in 0..10 {
        put(&store, number).await;
    }
    // This put takes the whole budget.
    let open = store.reserve(id(10), reserved(10)).ok().unwrap();
    let deadline = soon();
    store.close(deadline).await;
    assert!(Instant::now() < deadline, "it does not wait for the writer");
    assert!(open.progress() == Progress::Aborted && figure(&store, "/tiers/l2/in_flight_bytes") == 0);
    assert_eq!(put_for(&store, 11, 0), Err(ReserveOutcome::Busy));
    drop((store, l3, open));
    assert_eq!(survivors(dir.path(), 0..12).await.len(), 10);
}

#[tokio::test]
async fn write_back_is_busy_while_no_device_takes_dirty_pages() {
    let dir = directory();
    let (store, l3) = with_log(&with_policy(WritePolicy::Back), dir.path()).await;
    for number in 0..L2_PAGES {
        put(&store, number).await;
    }
    l3.close().await;
    // Some pages are lost before the device is quarantined. From then on dirty pages stay in L2.
    let mut number = L2_PAGES;
    eventually("the device is quarantined", &store, || {
        let _ = put_for(&store, number, 0);
        number += 1;
        store.status()["tiers"]["l3"]["devices"][0]["state"] == "quarantined"
    })
    .await;
    // The room of lost pages is used up by others, which stay dirty.
    eventually("L2 is full of dirty pages", &store, || {
        number += 1;
        put_for(&store, number, 0) == Err(ReserveOutcome::Busy)
    })
    .await;
    // A probe of the device, now and then, may lose a page more.
    let busy = (1..=L2_PAGES).filter(|after| put_for(&store, number + after, 0) == Err(ReserveOutcome::Busy)).count();
    assert!(busy as u32 > L2_PAGES / 2, "{busy}");
}

#[tokio::test]
async fn selective_policy_writes_only_pages_that_were_read_twice() {
    let dir = directory();
    let (store, l3) = with_log(&with_policy(WritePolicy::Selective), dir.path()).await;
    for number in 0..90 {
        put(&store, number).await;
        for _ in 0..number % 3 {
            get(&store, number).await.unwrap();
        }
    }
    settles(&store, "/tiers/writes_in_flight", 0).await;
    assert_eq!(l3.stats().writes, 30);
    store.close(soon()).await;
    drop((store, l3));
    let expected: Vec<u32> = (0..90).filter(|number| number % 3 == 2).collect();
    assert_eq!(survivors(dir.path(), 0..90).await, expected);
}

#[tokio::test]
async fn puts_are_busy_at_once_when_the_budget_is_spent() {
    let store = without_l3(options());
    let mut open = Vec::new();
    let refused = loop {
        let number = open.len() as u32;
        match store.reserve(id(number), reserved(number)) {
            Ok(put) => open.push(put),
            Err(refused) => break refused,
        }
    };
    assert_eq!((refused, open.len()), (ReserveOutcome::Busy, (32 << 20) / PAGE));
    let held = figure(&store, "/tiers/l2/in_flight_bytes");
    for number in 5000..5100 {
        assert_eq!(put_for(&store, number, 0), Err(ReserveOutcome::Busy), "a refusal releases nothing");
    }
    assert_eq!(figure(&store, "/tiers/l2/in_flight_bytes"), held);
    open.iter().for_each(|put| store.puts().abort(put));
    assert_eq!(figure(&store, "/tiers/l2/in_flight_bytes"), 0);
    drop(open);
    assert_eq!(figure(&store, "/tiers/l2/arena_used"), 0, "all memory came back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn put_gets_memory_beside_silent_writers_although_other_slots_split_the_arena() {
    let dir = directory();
    let options = NodeOptions { in_flight_bytes: Some(8 * PAGE as u64), ..with_policy(WritePolicy::Back) };
    let arena = Arena::new(options.arena_bytes() as usize).unwrap();
    let l3 = L3::open(L3Options::new(dir.path(), 128 << 20), arena.clone()).await.unwrap();
    l3.recovered().await.unwrap();
    let device = L3Device { dir: dir.path().into(), bytes: 128 << 20 };
    let devices = Devices::of(vec![(device, Ok(l3))]).unwrap();
    let store = Store::new(&options, arena.clone(), devices, Clock::system(), 1 << 32);
    for number in 0..L2_PAGES {
        put(&store, number).await;
    }
    // Three of the four pages of the budget.
    let silent: Vec<_> = (1000..1003).map(|number| store.reserve(id(number), reserved(number)).unwrap()).collect();
    // No free run of bytes is as long as a page, as between slots of several lengths.
    let slots: Vec<_> = std::iter::from_fn(|| arena.allocate(PAGE)).collect();
    put(&store, 2000).await;
    assert_eq!(get(&store, 2000).await, Some(TierCode::L2));
    drop((silent, slots));
    store.close(soon()).await;
}

#[tokio::test]
async fn a_namespace_stays_within_its_quota_and_the_status_shows_its_bytes() {
    let quota = larder_node::NamespaceQuota { namespace: "0707".parse().unwrap(), bytes: 4 << 20 };
    let store = without_l3(NodeOptions { quotas: vec![quota], ..options() });
    for number in 0..50 {
        put(&store, number).await;
    }
    assert_eq!(figure(&store, "/tiers/namespaces/0/bytes"), 4 << 20);
    assert_eq!(figure(&store, "/tiers/namespaces/0/quota_bytes"), 4 << 20);
    assert_eq!(figure(&store, "/tiers/l2/pages"), 16);
}

/// A log drops the quotas of namespaces without pages when it learns many others.
#[tokio::test]
async fn a_quota_dropped_by_the_log_is_restored_with_the_next_write() {
    let quota = larder_node::NamespaceQuota { namespace: "0707".parse().unwrap(), bytes: 4 << 20 };
    let dir = directory();
    let options = NodeOptions { quotas: vec![quota], quota_default: Some(64 << 20), ..options() };
    let (store, l3) = with_log(&options, dir.path()).await;
    let namespace = id(0).namespace;
    store.tiers().apply_quota(namespace);
    assert_eq!(l3.quota(&namespace), 4 << 20);
    for number in 0..5000u32 {
        store.tiers().apply_quota(NamespaceId([number.to_le_bytes(); 8].concat().try_into().unwrap()));
    }
    assert_ne!(l3.quota(&namespace), 4 << 20, "the log dropped it");
    for number in 0..50 {
        put(&store, number).await;
    }
    settles(&store, "/tiers/writes_in_flight", 0).await;
    assert_eq!(l3.quota(&namespace), 4 << 20);
    let bytes = figure(&store, "/tiers/l3/bytes_used");
    assert!((3 << 20..=4 << 20).contains(&bytes), "{bytes}");
    store.close(soon()).await;
}

#[tokio::test]
async fn pinning_loads_pages_from_l3_and_keeps_them() {
    let dir = directory();
    let (store, _) = with_pages_on_l3(dir.path(), 0..40).await;
    let ids: Vec<_> = (0..20).map(id).collect();
    assert_eq!(store.pin(&ids, PinKind::Hard, 60_000, soon()).await, Ok(20));
    for number in 100..100 + 2 * L2_PAGES {
        put(&store, number).await;
    }
    assert!(ids.iter().all(|id| store.tiers().locate(id) == TierCode::L2));
    let more: Vec<_> = (20..40).map(id).collect();
    assert!(store.pin(&more, PinKind::Hard, 60_000, soon()).await.unwrap_err().to_string().contains("quarter"));
    assert_eq!(figure(&store, "/tiers/l2/hard_pinned_bytes"), (20 * PAGE) as u64);
    assert_eq!(store.pin(&ids, PinKind::None, 0, soon()).await, Ok(20));
    assert_eq!(figure(&store, "/tiers/l2/pinned_pages"), 0);
    store.close(soon()).await;
}
