//! A clean stop keeps every page that readers could find when it began.

mod common;

use common::*;
use larder_io::{
    BoxFuture, Completion, Device, DeviceCapabilities, FileDevice, Operation, Priority, RingClosed, RingOptions,
    SmallFile, TaskClass,
};
use larder_log::L3;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Device that holds syncs and footers back until the test admits them.
struct GatedDevice {
    inner: Arc<FileDevice>,
    syncs: watch::Sender<bool>,
    footers: watch::Sender<bool>,
    footers_waiting: AtomicU32,
}

impl Device for GatedDevice {
    fn submit(
        &self,
        segment: u32,
        priority: Priority,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingClosed>> {
        Box::pin(async move {
            let gate = match operation {
                Operation::Sync => Some(&self.syncs),
                // Records and headers of segments begin with a block of their own.
                Operation::Write { block: None, .. } => {
                    self.footers_waiting.fetch_add(1, Ordering::SeqCst);
                    Some(&self.footers)
                }
                _ => None,
            };
            if let Some(gate) = gate {
                gate.subscribe().wait_for(|admitted| *admitted).await.unwrap();
            }
            self.inner.submit(segment, priority, operation, on_done).await
        })
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn capabilities(&self) -> DeviceCapabilities {
        self.inner.capabilities()
    }

    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>> {
        self.inner.load(file)
    }

    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        self.inner.save(file, bytes)
    }

    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>> {
        self.inner.segments()
    }

    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>> {
        self.inner.open(segment, bytes)
    }

    fn create(&self, segment: u32, bytes: u64, header: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        self.inner.create(segment, bytes, header)
    }

    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>> {
        self.inner.remove(segment)
    }

    fn rename_misplaced(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        self.inner.rename_misplaced(segment)
    }

    fn spawn(&self, class: TaskClass, task: BoxFuture<'static, ()>) {
        self.inner.spawn(class, task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.inner.sleep(duration)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }

    fn close_now(&self) {
        self.inner.close_now();
    }
}

/// A reclaim waits behind the footers of sealed segments. The background task must not begin it
/// once the log is closed: it would overwrite the oldest segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_a_log_evicts_no_page() {
    const SEGMENTS: u64 = 6;
    const PAGES_PER_SEGMENT: u32 = 15;
    let dir = temp();
    let arena = arena();
    let device = Arc::new(GatedDevice {
        inner: FileDevice::open(dir.path(), arena.clone(), RingOptions::new("closing", 64)).unwrap(),
        syncs: watch::Sender::new(true),
        footers: watch::Sender::new(false),
        footers_waiting: AtomicU32::new(0),
    });
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
