//! A device for tests, which forwards to the one of files.

use larder_io::{
    BoxFuture, Completion, Device, DeviceCapabilities, Done, FileDevice, Operation, Priority, RingClosed, RingOptions,
    SmallFile, TaskClass,
};
use larder_memory::Arena;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Device that holds syncs and footers back until the test admits them, and fails reads.
pub struct GatedDevice {
    inner: Arc<FileDevice>,
    pub syncs: watch::Sender<bool>,
    pub footers: watch::Sender<bool>,
    pub footers_waiting: AtomicU32,
    /// Number of reads that fail from now on.
    pub failing_reads: AtomicU32,
}

impl GatedDevice {
    pub fn open(dir: &Path, arena: &Arc<Arena>) -> Arc<GatedDevice> {
        Arc::new(GatedDevice {
            inner: FileDevice::open(dir, arena.clone(), RingOptions::new("gated", 64)).unwrap(),
            syncs: watch::Sender::new(true),
            footers: watch::Sender::new(true),
            footers_waiting: AtomicU32::new(0),
            failing_reads: AtomicU32::new(0),
        })
    }

    fn fails_read(&self) -> bool {
        let taken = self.failing_reads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        taken.is_ok()
    }
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
            if matches!(operation, Operation::Read { .. }) && self.fails_read() {
                on_done(Done { operation, result: Err(io::Error::other("a failed read")) });
                return Ok(());
            }
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
