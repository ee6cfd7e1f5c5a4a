//! Reads of a page with two records, on a device that cannot read one of them.

use crate::common::device::GatedDevice;
use crate::common::*;
use larder_log::L3;
use std::sync::atomic::Ordering;

/// A put that was written twice, like a copy that a crash left beside its original.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_error_is_answered_from_the_other_record() {
    let (dir, arena) = (temp(), arena());
    let (l3, _) = open(dir.path(), 8, &arena).await;
    for _ in 0..2 {
        put(&l3, &arena, 1, 7, 9_000).await;
        // The page leaves the index. Its record stays.
        l3.set_quota(id(1).namespace, 1);
        l3.set_quota(id(1).namespace, u64::MAX);
    }
    l3.close().await;
    drop(l3);

    let device = GatedDevice::open(dir.path(), &arena);
    let l3 = L3::open_on(device.clone(), options(dir.path(), 8), arena.clone()).await.unwrap();
    l3.recovered().await.unwrap();
    device.failing_reads.store(1, Ordering::SeqCst);
    assert_eq!(get(&l3, 1).await, Some(7));
    assert_eq!(device.failing_reads.load(Ordering::SeqCst), 0, "a read failed");

    // Both records, one after the other: the error is told, and the page is dropped.
    device.failing_reads.store(2, Ordering::SeqCst);
    assert!(l3.read(&id(1), deadline()).await.is_err());
    assert_eq!(get(&l3, 1).await, None);
    l3.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_error_of_the_only_record_is_told() {
    let (dir, arena) = (temp(), arena());
    let device = GatedDevice::open(dir.path(), &arena);
    let l3 = L3::open_on(device.clone(), options(dir.path(), 8), arena.clone()).await.unwrap();
    l3.recovered().await.unwrap();
    put(&l3, &arena, 1, 7, 9_000).await;
    device.failing_reads.store(1, Ordering::SeqCst);
    assert!(l3.read(&id(1), deadline()).await.is_err());
    l3.close().await;
}
